from __future__ import annotations

import pytest

from locustfiles import estimate
from locustfiles.estimate import Speed
from locustfiles.plan import expand, load_plan, turn_knobs
from locustfiles.point import read_point
from locustfiles.records import ArmProbe

PLAIN = Speed(prefill=1000, decode=50, block=16)
CACHE = Speed(prefill=1000, decode=50, caching=True, block=16)


def test_speed_of_a_probe() -> None:
    probe = ArmProbe(
        prefill_seconds=0.5, prefill_tokens=2000, decode_tokens_per_second=90, acceptance_length=2.7,
        prefix_caching=True, block_size=1600,
    )  # fmt: skip
    assert estimate.speed_of(probe) == Speed(4000, 90, 2.7, True, 1600)
    assert estimate.speed_of(ArmProbe()) == Speed()


def test_session_seconds_by_hand() -> None:
    single = read_point("single_turn", "prompt=1000,output=100")
    # 1 s of prefill, 100 tokens at 50 per second
    assert estimate.session_seconds(single, PLAIN, 1) == pytest.approx(3.0)
    multi = read_point("multi_turn", "context=1000,growth=200,output=100")
    # 1.0 + 1.2 + 1.4 s of prefill, three times 2 s of decoding
    assert estimate.session_seconds(multi, PLAIN, 1) == pytest.approx(9.6)
    # with caching the later turns prefill 200 + one block of 16
    assert estimate.session_seconds(multi, CACHE, 1) == pytest.approx(1.0 + 2 * 0.216 + 6.0)
    shared = read_point("shared_prefix", "prefix=4000,suffix=184,output=100")
    assert estimate.session_seconds(shared, PLAIN, 1) == pytest.approx(4.184 + 2.0)
    assert estimate.session_seconds(shared, CACHE, 1) == pytest.approx(0.2 + 2.0)


def test_the_start_spread_is_one_session_of_the_fastest_arm() -> None:
    multi = read_point("multi_turn", "context=1000,growth=200,output=100")
    assert estimate.start_spread(multi, [PLAIN, CACHE], 8) == pytest.approx(7.432)
    assert estimate.start_spread(multi, [PLAIN, CACHE], 1) == 0
    lockstep = read_point("multi_turn", "context=1000,growth=200,output=100,pace=lockstep")
    assert estimate.start_spread(lockstep, [PLAIN, CACHE], 8) == 0


def test_the_pause_before_a_follow_up_is_one_idle_turn_of_the_fastest_arm() -> None:
    multi = read_point("multi_turn", "context=1000,growth=200,output=100")
    assert estimate.reading_pause(multi, [PLAIN, CACHE], 2) == pytest.approx(7.432 / 3, abs=0.001)
    assert estimate.reading_pause(multi, [PLAIN, CACHE], 1) == 0
    named = read_point("multi_turn", "context=1000,growth=200,output=100,pause=1.5")
    assert estimate.reading_pause(named, [PLAIN, CACHE], 1) == 1.5
    lockstep = read_point("multi_turn", "context=1000,growth=200,output=100,pace=lockstep")
    assert estimate.reading_pause(lockstep, [PLAIN], 2) == 0
    assert estimate.reading_pause(read_point("single_turn", "prompt=1000"), [PLAIN], 2) == 0


def test_the_clock_scale_keeps_within_the_chunk_budget() -> None:
    single = read_point("single_turn", "prompt=1000,output=100")
    # one session: 100 chunks in 3 s
    assert estimate.chunk_rate(single, PLAIN, 1) == pytest.approx(100 / 3)
    # 20 ms of model time between chunks are 2 ms of wall time at a scale of 10
    assert estimate.clock_scale(single, [PLAIN], 1) == 10
    assert estimate.clock_scale(single, [Speed(prefill=1000, decode=20)], 1) == 20
    fast = Speed(prefill=1e9, decode=50, block=16)
    for users in (16, 32, 64, 256):
        scale = estimate.clock_scale(single, [fast], users)
        chunks = scale * users * estimate.decode_rate(fast, users)
        assert scale == 1 or chunks <= estimate.CHUNK_BUDGET * 1.001
    # drafts put several tokens into a chunk
    mtp = Speed(prefill=1e9, decode=100, chunk_tokens=4)
    assert estimate.clock_scale(single, [mtp], 64) > estimate.clock_scale(single, [fast], 64)
    # a generator that carries less than the budget gets no more than it carries
    chunks = 64 * estimate.decode_rate(fast, 64)
    assert estimate.clock_scale(single, [fast], 64, 3200) * chunks <= 3200 * 1.001
    assert estimate.clock_scale(single, [fast], 64, 1e9) == estimate.clock_scale(single, [fast], 64)
    # one scale for both: the slower clock
    assert estimate.clock_scale(single, [mtp, fast], 64) == estimate.clock_scale(single, [fast], 64)


def test_in_lockstep_all_sessions_decode_at_once() -> None:
    point = "context=1000,growth=200,output=100"
    apart = read_point("multi_turn", point)
    together = read_point("multi_turn", point + ",pace=lockstep")
    assert estimate.chunk_rate(together, PLAIN, 4) == pytest.approx(4 * 50 / 4**0.15)
    assert estimate.chunk_rate(apart, PLAIN, 4) < estimate.chunk_rate(together, PLAIN, 4)


def test_where_everybody_waits_long_the_clock_may_run_as_fast_as_chunks_can_be_carried() -> None:
    point = "context=8000,growth=1000,output=100"
    together = read_point("multi_turn", point + ",pace=lockstep")
    apart = read_point("multi_turn", point)
    fast = Speed(prefill=10_000, decode=50)
    # 32 prompts of 8000 tokens take 25.6 s, their middle one 12.8 s; a gap is 1.68 / 50 s = 34 ms, 0.3 %.
    rate = 32 * 50 / 32**0.15
    assert estimate.clock_scale(together, [fast], 32) == pytest.approx(10_000 / rate, abs=0.1)
    assert estimate.clock_scale(together, [fast], 32, together=2) == pytest.approx(5000 / rate, abs=0.1)
    assert estimate.clock_scale(together, [fast], 32, 3200) == pytest.approx(3200 / rate, abs=0.1)
    assert estimate.gaps_are_small(together, fast, 32)
    assert not estimate.gaps_are_small(apart, fast, 32)
    # Two users wait 0.8 s, and a gap is 22 ms of that: 2.8 %.
    assert not estimate.gaps_are_small(together, fast, 2)
    # An arm whose follow-ups hit waits for 1016 tokens a user: 1.6 s with 32, still 2.1 %.
    assert not estimate.gaps_are_small(together, Speed(prefill=10_000, decode=50, caching=True), 32)


def test_sessions_are_cut_alike_for_every_arm_and_repeat_and_not_below_the_floor() -> None:
    plan = turn_knobs(load_plan("load"), users=[2])
    speeds = {"a": PLAIN, "b": CACHE}
    cells, notes = estimate.fit_sessions(expand(plan, ["a", "b"]), speeds, 40)
    assert sum(estimate.cell_seconds(cell, speeds[cell.arm]) for cell in cells) <= 40 * 60
    for workload in ("single_turn", "shared_prefix", "multi_turn"):
        sessions = {cell.sessions for cell in cells if cell.workload == workload}
        assert len(sessions) == 1
        assert 1 <= sessions.pop() <= 6
    assert len(notes) == 1
    assert "SESSIONS=N overrides" in notes[0]
    floor, _ = estimate.fit_sessions(expand(plan, ["a", "b"]), speeds, 0.01)
    assert {(cell.workload, cell.sessions) for cell in floor} == {
        ("single_turn", 1),
        ("shared_prefix", 1),
        ("multi_turn", 3),
    }
    untouched, notes = estimate.fit_sessions(expand(plan, ["a", "b"]), speeds, None)
    assert {cell.sessions for cell in untouched} == {6}
    assert notes == []


def test_fixed_sessions_are_never_cut() -> None:
    plan = turn_knobs(load_plan("load"), sessions=5)
    assert estimate.minutes_of(plan, True) is None
    assert estimate.minutes_of(load_plan("load"), True) is not None
