"""The scheduler's rules, one at a time, on hand-made sizes and costs."""

import pytest

from servers.sim.calibration import Calibration, Decode, Draft, Model, Prefill
from servers.sim.calibration import Request as Latency
from servers.sim.engine import Engine
from servers.sim.replay import Load, Names, Replay, replay
from servers.sim.request import Acceptance, EngineConfig, Request


def calibration(**changes):
    fields = {
        "model": Model("m"),
        "prefill": Prefill(token_s=0.001, pair_s=0.0, chunk_s=0.0),
        "decode": Decode(step_s=0.5),
        **changes,
    }
    return Calibration(**fields)


def config(**changes):
    fields = {
        "max_model_len": 10_000,
        "max_batched_tokens": 100,
        "max_seqs": 8,
        "block_size": 10,
        "blocks": 1000,
        "caching": False,
        "match_unit": 10,
        **changes,
    }
    return EngineConfig(**fields)


def request(name, prompt, output=3, unit=10):
    return Request(name, Names(name, unit, prompt), prompt, output)


def test_one_request_costs_what_the_formula_says():
    cost = calibration(
        prefill=Prefill(token_s=0.001, pair_s=1e-5, chunk_s=0.1),
        decode=Decode(step_s=0.5, seq_s=0.02, context_s=0.001),
        request=Latency(fixed_s=2.0, caching_s=1.0),
    )
    engine = Engine(config(), cost)
    engine.submit(request("a", 150), 10.0)
    assert engine.begin(10.0) is None
    assert engine.next_ready() == 12.0
    # First chunk: 0.5 + 0.1 + 100 x 0.001 + 1e-5 x 100 x 50; second: 50 tokens from position 100 on.
    assert engine.begin(12.0) == pytest.approx(12.75)
    assert engine.finish() == []
    assert engine.begin(12.75) == pytest.approx(12.75 + 0.5 + 0.1 + 0.05 + 1e-5 * 50 * 125)
    (first,) = engine.finish()
    assert (first.tokens, first.first, first.finished) == (1, True, False)
    # A decode step: 150 tokens of context are read.
    now = first.request.first_token_at
    assert engine.begin(now) == pytest.approx(now + 0.5 + 0.02 + 0.150)


def test_caching_costs_its_own_latency():
    engine = Engine(config(caching=True), calibration(request=Latency(fixed_s=2.0, caching_s=1.0)))
    engine.submit(request("a", 50), 0.0)
    assert engine.next_ready() == 3.0


def test_decodes_come_first_and_prefills_share_what_is_left():
    engine = Engine(config(), calibration())
    first, second, third = request("a", 40), request("b", 90), request("c", 90)
    for one in (first, second, third):
        engine.submit(one, 0.0)
    engine.begin(0.0)
    assert [(r.key, start, n) for r, start, n in engine.step.chunks] == [("a", 0, 40), ("b", 0, 60)]
    engine.finish()
    engine.begin(1.0)
    # 100 = 1 for the decode of a, 30 left of b, and 69 of c.
    assert [r.key for r in engine.step.decodes] == ["a"]
    assert [(r.key, start, n) for r, start, n in engine.step.chunks] == [("b", 60, 30), ("c", 0, 69)]


def test_admission_is_first_come_first_served_and_capped():
    engine = Engine(config(max_seqs=2), calibration())
    for name in "abc":
        engine.submit(request(name, 10, output=2), 0.0)
    engine.begin(0.0)
    engine.finish()
    assert [r.key for r in engine.running] == ["a", "b"]
    assert [r.key for r in engine.waiting] == ["c"]
    engine.begin(1.0)
    engine.finish()
    engine.begin(2.0)
    assert [r.key for r, _, _ in engine.step.chunks] == ["c"]


def test_a_sequence_that_does_not_fit_whole_waits_and_blocks_those_behind_it():
    # 21 usable blocks: a holds 12, b needs 15 although its first chunk of 85 tokens needs 9, c would fit.
    engine = Engine(config(blocks=22), calibration())
    for name, prompt in (("a", 115), ("b", 150), ("c", 10)):
        engine.submit(request(name, prompt, output=4), 0.0)
    engine.begin(0.0)
    engine.finish()
    engine.begin(1.0)
    assert [r.key for r, _, _ in engine.step.chunks] == ["a"]
    assert [r.key for r in engine.waiting] == ["b", "c"]


def run(engine, now=0.0):
    """To the end; order in which requests finished."""
    finished = []
    while engine.in_flight:
        end = engine.begin(now)
        assert end is not None
        finished += [output.request for output in engine.finish() if output.finished]
        now = end
    return finished


def test_the_last_one_running_is_preempted_recomputes_and_finishes():
    # 8 usable blocks of 10. Two requests of 30 + 30 tokens need 6 each at their ends.
    engine = Engine(config(blocks=9), calibration())
    a, b = request("a", 30, output=30), request("b", 30, output=30)
    engine.submit(a, 0.0)
    engine.submit(b, 0.0)
    assert [r.key for r in run(engine)] == ["a", "b"]
    assert (a.preemptions, b.preemptions) == (0, 1)
    assert engine.counters.preemptions == 1
    assert a.generated == b.generated == 30
    assert engine.memory.pool.usage == 0


def test_nobody_is_admitted_in_a_step_that_preempts():
    # 9 usable blocks. With three drafts, none ever accepted, a decode needs room for 6 tokens beyond its own.
    # Where a, at 35 tokens, needs a fifth block, b holds five although its 36 tokens fit into the four that
    # are left.
    cost = calibration(draft=Draft(acceptance=[0.0]))
    engine = Engine(config(blocks=10, drafts=3), cost)
    a, b, c = request("a", 30, output=20), request("b", 31, output=20), request("c", 30, output=20)
    for one in (a, b, c):
        engine.submit(one, 0.0)
    now = 0.0
    while not engine.counters.preemptions:
        now = engine.begin(now)
        if engine.counters.preemptions:
            assert (a.tokens, b.tokens) == (35, 36)
            assert [r.key for r in engine.waiting] == ["b", "c"]
            assert engine.step.chunks == []
            assert engine.memory.pool.free == 4
        engine.finish()
    now = engine.begin(now)
    assert [(r.key, start, n) for r, start, n in engine.step.chunks] == [("b", 0, 36)]
    engine.finish()
    assert len(run(engine, now)) == 3


def test_a_preempted_request_is_helped_by_its_own_cached_blocks():
    engine = Engine(config(blocks=9, caching=True), calibration())
    a, b = request("a", 30, output=30), request("b", 30, output=30)
    engine.submit(a, 0.0)
    engine.submit(b, 0.0)
    now, resumed = 0.0, []
    while engine.in_flight:
        now = engine.begin(now)
        resumed += [(r.key, start) for r, start, _ in engine.step.chunks if r.preemptions]
        engine.finish()
    assert b.preemptions == 1
    # b has 41 tokens when a takes its place, and nobody needs the blocks of its first twenty until it is
    # back.
    assert resumed == [("b", 20)]
    # Queries count admissions of new requests only, and so do the tokens reported as cached.
    assert engine.counters.prefix_queries == 60
    assert b.cached_tokens == 0


def test_abort_frees_blocks_in_every_state():
    engine = Engine(config(max_seqs=1), calibration(request=Latency(fixed_s=1.0)))
    a, b, c = request("a", 50), request("b", 50), request("c", 50)
    engine.submit(a, 0.0)
    engine.submit(b, 0.0)
    engine.submit(c, 5.0)
    engine.begin(1.0)
    assert engine.memory.pool.usage > 0
    for one in (c, b, a):
        engine.abort(one)
    assert engine.in_flight == 0
    assert engine.memory.pool.usage == 0
    assert engine.finish() == []
    assert engine.begin(9.0) is None


def test_drafts_count_against_the_budget_and_never_overshoot_the_length():
    cost = calibration(draft=Draft(step_s=0.1, seq_s=0.01, acceptance=[1.0, 1.0, 1.0]))
    engine = Engine(config(drafts=3, max_batched_tokens=10), cost)
    for name in "abc":
        engine.submit(request(name, 2, output=7), 0.0)
    engine.begin(0.0)
    engine.finish()
    end = engine.begin(1.0)
    # 10 tokens: 4 + 4 and the 2 that are left; three decodes of context 2, drafts at 3 x (0.1 + 0.01 x 3).
    assert end == pytest.approx(1.0 + 0.5 + 3 * 0.13)
    outputs = engine.finish()
    assert [output.tokens for output in outputs] == [4, 4, 2]
    assert all(one.generated == 7 for one in run(engine, 2.0))


def test_acceptance_follows_the_chances_and_only_seed_and_content():
    draws = Acceptance([0.8, 0.5], 3, 1, b"prompt")
    counts = [draws.next() for _ in range(20_000)]
    # 0.8, 0.8 x 0.5, and beyond what was measured 0.5 again; +- 4 standard errors.
    for position, chance in enumerate((0.8, 0.4, 0.2), 1):
        share = sum(count >= position for count in counts) / len(counts)
        assert share == pytest.approx(chance, abs=4 * (chance * (1 - chance) / len(counts)) ** 0.5)
    again = Acceptance([0.8, 0.5], 3, 1, b"prompt")
    assert [again.next() for _ in range(1000)] == counts[:1000]
    other = Acceptance([0.8, 0.5], 3, 2, b"prompt")
    assert [other.next() for _ in range(1000)] != counts[:1000]


def test_replays_are_deterministic_by_seed():
    cost = calibration(draft=Draft(acceptance=[0.8, 0.6, 0.5]))
    load = Load(users=4, prompt=200, output=50)
    first, second = (replay(config(drafts=3), cost, load, seed=1) for _ in range(2))
    assert first.rows == second.rows
    assert replay(config(drafts=3), cost, load, seed=2).rows != first.rows


def test_lockstep_users_send_together():
    engine = Replay(config(), calibration(), Load(users=3, prompt=50, output=20, turns=2, pattern="lockstep"))
    result = engine.run()
    assert len(result.rows) == 3 * 2 * 2
    # Everybody prefills in turn in one step of 100 tokens at a time: 50 tokens each, two per step.
    step = 0.5 + 0.1
    assert sorted(row.ttft for row in result.rows if row.turn == 1)[:2] == pytest.approx([step, step])


@pytest.mark.parametrize(("caching", "drafts", "block"), [(True, 0, 1568), (False, 3, 1600)])
def test_a_pool_that_is_too_small_makes_everyone_wait_for_capacity(caching, drafts, block):
    # 16 x 64K tokens of live context against a pool of half that, hybrid blocks: the corner of the article by
    # construction. Whatever the flags, follow-ups come later than from a pool that is large enough, and
    # nothing hits any more.
    cost = calibration(
        prefill=Prefill(token_s=1e-4), decode=Decode(step_s=0.02), draft=Draft(acceptance=[0.8, 0.7, 0.6])
    )
    load = Load(users=16, prompt=65_536, output=256, turns=2, pattern="lockstep", sessions=1)
    small, ample = (
        replay(
            config(
                max_model_len=131_072,
                max_batched_tokens=8192,
                max_seqs=64,
                block_size=block,
                blocks=tokens // block,
                caching=caching,
                drafts=drafts,
                match_unit=block,
                state_groups=3,
            ),
            cost,
            load,
        )
        for tokens in (524_288, 3_000_000)
    )
    assert small.kv_use_max > 0.9 > ample.kv_use_max
    assert small.ttft_p50(2) > ample.ttft_p50(2) * (10 if caching else 1)
    assert small.hit_rate == 0
    assert (ample.hit_rate > 0.4) == caching


@pytest.mark.parametrize("caching", [True, False])
def test_nothing_leaks_over_many_requests(caching):
    sizes = config(caching=caching, blocks=60, max_batched_tokens=200)
    result = Replay(sizes, calibration(), Load(users=6, prompt=60, output=40, sessions=50))
    outcome = result.run()
    assert len(outcome.rows) >= 300
    for one in [*result.engine.running, *result.engine.waiting]:
        result.engine.abort(one)
    pool = result.engine.memory.pool
    assert pool.free == pool.usable
    assert len(pool._named) <= pool.size
