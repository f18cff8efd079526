"""Who holds which blocks, and from when on what is found: as vLLM 0.32's own scheduler does it."""

import pytest

from servers.sim.blocks import BlockPool
from servers.sim.engine import Engine
from servers.sim.memory import Memory
from servers.sim.options import CALIBRATION, build_parser, engine_config, load
from servers.sim.request import EngineConfig, Request
from servers.sim.text import Prompt

DRAFTS = ["--spec-tokens", "3"]
UNIT = ["--prefix-match-unit", "32"]
PLAIN = {"block_size": 16, "block_size_drafts": None, "state_groups": 0}


def engine(*flags, **model):
    calibration = load(CALIBRATION)
    calibration.draft.acceptance = [0.0]
    for key, value in model.items():
        setattr(calibration.model, key, value)
    return Engine(engine_config(build_parser().parse_args(list(flags)), calibration), calibration)


def words(stem, count):
    return b"".join(b" %s%d" % (stem.encode(), index) for index in range(count))


def submit(server, key, text, output=1):
    prompt = Prompt(text, server.config.match_unit)
    request = Request(key, prompt, prompt.tokens, output)
    server.submit(request, 0.0)
    return request


def steps(server):
    """Every step to the end: what each request computes (first position, tokens), and the blocks in use."""
    rows, now = [], 1e3
    while server.in_flight:
        now = server.begin(now)
        assert now is not None
        step = {r.key: (r.computed, 1 + server.config.drafts) for r in server.step.decodes}
        step |= {r.key: (start, tokens) for r, start, tokens in server.step.chunks}
        rows.append((step, server.memory.pool.usable - server.memory.pool.free))
        server.finish()
    return rows


def chunks(server):
    return [step for step, _ in steps(server)]


def test_full_blocks_can_be_hit_by_the_same_step_that_computes_them():
    server = engine(**PLAIN)
    for index in range(4):
        submit(server, index, words("shared", 1600) + words(f"own{index}.", 40))
    assert steps(server) == [({0: (0, 1640), 1: (1600, 40), 2: (1600, 40), 3: (1600, 40)}, 100 + 4 * 3)]


def test_a_state_can_be_hit_only_when_the_step_that_computes_it_is_over():
    # a keeps its state at 4,704. Nor can it be hit in the step after that, which registers it again.
    server = engine()
    submit(server, "a", words("w", 5000), output=2)
    submit(server, "b", words("w", 5000) + words("more", 300), output=2)
    assert steps(server) == [
        ({"a": (0, 4704)}, 6),
        ({"a": (4704, 296)}, 10),
        ({"a": (5000, 1), "b": (4704, 596)}, 14),
        ({"b": (5300, 1)}, 7),
    ]


def test_requests_whose_last_boundary_is_the_state_they_hit_start_one_by_one():
    server = engine()
    submit(server, "first", words("w", 5000))
    steps(server)
    for index in range(3):
        submit(server, index, words("w", 4800) + words(f"own{index}.", 400))
    assert steps(server) == [({index: (4704, 496)}, 10) for index in range(3)]


def test_a_chunk_that_does_not_reach_the_end_of_the_prompt_ends_at_a_block_boundary():
    # Eight prompts of 1,000 tokens leave 192 tokens of the budget, less than a block of the ninth.
    server = engine()
    for index in range(9):
        submit(server, index, words(f"own{index}.", 1000), output=2)
    first, second, third = chunks(server)
    assert first == dict.fromkeys(range(8), (0, 1000))
    assert second == dict.fromkeys(range(8), (1000, 1)) | {8: (0, 1000)}
    assert third == {8: (1000, 1)}


@pytest.mark.parametrize(
    ("flags", "first", "second"),
    [
        (
            [],
            [((0, 4704), 6), ((4704, 1280), 10), ((5984, 16), 7)],
            [((5984, 288), 7), ((6272, 4704), 13), ((10976, 992), 14), ((11968, 32), 11)],
        ),
        (
            DRAFTS,
            [((0, 3200), 15), ((3200, 2752), 19), ((5952, 48), 16)],
            [((5952, 448), 17), ((6400, 3200), 22), ((9600, 2368), 23), ((11968, 32), 20)],
        ),
    ],
)
def test_with_finer_hits_a_chunk_that_starts_within_a_block_ends_with_it(flags, first, second):
    server = engine(*UNIT, *flags)
    submit(server, "a", words("w", 6000))
    assert steps(server) == [({"a": chunk}, used) for chunk, used in first]
    submit(server, "b", words("w", 6000) + words("more", 6000))
    assert steps(server) == [({"b": chunk}, used) for chunk, used in second]


def test_with_drafts_a_hit_needs_one_shared_block_behind_it():
    # The first request keeps its state at 4,800, which is all that the second shares: no hit, but it keeps
    # the state at 3,200, where the third starts.
    server = engine(*DRAFTS)
    cached = []
    for index, own in enumerate((1500, 3000, 3000)):
        cached.append(submit(server, index, words("shared", 5000) + words(f"own{index}.", own)))
        steps(server)
    assert [request.cached_tokens for request in cached] == [0, 0, 3200]


def test_a_request_that_waits_does_not_keep_its_prefix_from_being_evicted():
    # Ten usable blocks, one group of states. Two prompts are cached, old before new; then a request for old
    # is looked up again and again, but does not fit. What is evicted first is still old.
    sizes = EngineConfig(
        max_model_len=1000,
        max_batched_tokens=100,
        max_seqs=8,
        block_size=16,
        blocks=11,
        caching=True,
        state_groups=1,
        match_unit=16,
    )
    memory = Memory(sizes)
    for stem in ("old", "new"):
        request = Request(stem, Prompt(words(stem, 20), 16), 20, 1)
        assert memory.admit(request, memory.lookup(request), 16)
        memory.note_chunk(request, 16)
        memory.end_scheduling()
        memory.release(request)
    waiting = Request("again", Prompt(words("old", 160), 16), 160, 1)
    for _ in range(3):
        found = memory.lookup(waiting)
        assert found.tokens == 16
        assert not memory.admit(waiting, found, 16)
    # Six blocks hold nothing. The seventh and eighth ones taken are old's, attention and state.
    memory.pool.take(8)
    assert memory.lookup(Request("a", Prompt(words("old", 20), 16), 20, 1)).tokens == 0
    assert memory.lookup(Request("b", Prompt(words("new", 20), 16), 20, 1)).tokens == 16


def test_one_block_of_the_pool_is_never_given_away():
    pool = BlockPool(32)
    assert (pool.usable, pool.free, pool.usage) == (31, 31, 0.0)
    taken = pool.take(31)
    assert 0 not in taken
    assert (pool.free, pool.usage) == (0, 1.0)
    assert not pool.forget()
    pool.release(taken[:30])
    assert pool.usage == pytest.approx(1 / 31)
    pool.release(taken[30:])
    assert pool.forget()
    assert pool.free == 31


def test_blocks_of_the_same_content_are_found_until_the_last_one_is_overwritten():
    pool = BlockPool(4)
    first, second = pool.take(2)
    pool.name(first, "content")
    pool.name(second, "content")
    assert pool.find("content") == first
    pool.release([first])
    pool.take(2)
    assert pool.find("content") == second
    pool.release([second])
    pool.take(1)
    assert pool.find("content") is None
