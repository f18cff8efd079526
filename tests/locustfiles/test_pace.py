"""When sessions start: spread, lockstep, open loop."""

import itertools
import statistics

import gevent
import pytest

from locustfiles.pace import Lockstep, arrival_times, reading_pause, start_offsets
from locustfiles.point import read_point


def test_starts_are_spread_one_to_a_slot_and_come_from_the_seed():
    offsets = start_offsets(5, 9, 16.0)
    assert offsets[0] == 0.0
    assert sorted(int(at // 2.0) for at in offsets[1:]) == list(range(8))  # 8 slots of 2 s, one user in each
    assert start_offsets(5, 9, 16.0) == offsets
    assert start_offsets(6, 9, 16.0) != offsets
    assert start_offsets(5, 1, 16.0) == [0.0]


def test_constant_arrivals():
    assert list(itertools.islice(arrival_times(1, 4.0, False), 4)) == [0.0, 0.25, 0.5, 0.75]


def test_poisson_arrivals_have_exponential_gaps_and_come_from_the_seed():
    times = list(itertools.islice(arrival_times(1, 4.0, True), 5001))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.06)  # an exponential's deviation is its mean
    assert sum(gap > 0.25 for gap in gaps) / 5000 == pytest.approx(0.368, abs=0.02)  # 1/e
    assert list(itertools.islice(arrival_times(1, 4.0, True), 5)) == times[:5]
    assert list(itertools.islice(arrival_times(2, 4.0, True), 5)) != times[:5]


def test_reading_pauses_are_uniform_up_to_twice_the_mean_and_come_from_the_seed():
    pauses = [reading_pause(1, user, session, 2, 4.0) for user in range(50) for session in range(50)]
    assert 0.0 <= min(pauses) < 0.1
    assert 7.9 < max(pauses) <= 8.0
    assert statistics.mean(pauses) == pytest.approx(4.0, rel=0.03)
    assert reading_pause(1, 3, 2, 2, 4.0) == reading_pause(1, 3, 2, 2, 4.0)
    assert (
        len({reading_pause(s, u, n, t, 4.0) for s in (1, 2) for u in (0, 1) for n in (1, 2) for t in (2, 3)})
        == 16
    )


def test_lockstep_releases_nobody_before_the_last_arrives():
    barrier = Lockstep(3)
    log = []

    def user(number):
        for turn in (1, 2):
            log.append(("released", turn, barrier.wait(number, (1, turn))))

    greenlets = [gevent.spawn(user, n) for n in range(2)]
    gevent.sleep(0.02)
    assert log == []
    greenlets.append(gevent.spawn(user, 2))
    gevent.joinall(greenlets, timeout=5, raise_error=True)
    assert [turn for _, turn, _ in log] == [1, 1, 1, 2, 2, 2]
    assert len({stamp for _, turn, stamp in log if turn == 1}) == 1  # one release, one intended start


def test_a_failed_user_waits_at_its_next_session_and_holds_nobody_up():
    barrier = Lockstep(2)
    log = []

    def healthy():
        for step in [(1, 1), (1, 2), (1, 3), (2, 1)]:
            barrier.wait(0, step)
            log.append(("healthy", step))

    def failing():  # its first turn fails, so it goes on to its next session
        for step in [(1, 1), (2, 1)]:
            barrier.wait(1, step)
            log.append(("failing", step))

    gevent.joinall([gevent.spawn(healthy), gevent.spawn(failing)], timeout=5, raise_error=True)
    assert log.index(("failing", (2, 1))) > log.index(("healthy", (1, 3)))
    assert len(log) == 6


def test_a_stopped_user_is_not_waited_for():
    barrier = Lockstep(2)
    waiting = gevent.spawn(barrier.wait, 0, (1, 1))
    gevent.sleep(0)
    assert not waiting.ready()
    barrier.leave()
    waiting.join(timeout=5)
    assert waiting.successful()


def test_a_user_killed_at_the_barrier_is_forgotten():
    barrier = Lockstep(2)
    victim = gevent.spawn(barrier.wait, 0, (1, 1))
    gevent.sleep(0)
    victim.kill()
    barrier.leave()
    assert gevent.spawn(barrier.wait, 1, (1, 1)).get(timeout=5) > 0


def test_an_ended_barrier_releases_nobody():
    barrier = Lockstep(1)
    barrier.end()
    waiting = gevent.spawn(barrier.wait, 0, (1, 1))
    gevent.sleep(0.02)
    assert not waiting.ready()
    waiting.kill()


def test_points():
    single = read_point("single_turn", "prompt=1024")
    assert (single.prompt, single.output, single.turns, single.lockstep, single.rate) == (
        1024,
        512,
        1,
        False,
        0.0,
    )
    shared = read_point("shared_prefix", "prefix=4096")
    assert (shared.prefix, shared.suffix, shared.prompt, shared.output) == (4096, 512, 4608, 256)
    multi = read_point("multi_turn", "context=8192,pace=lockstep")
    assert (multi.prompt, multi.turns, multi.growth, multi.output, multi.lockstep) == (
        8192,
        3,
        1024,
        256,
        True,
    )
    assert [multi.prompt_tokens(turn) for turn in (1, 2, 3)] == [8192, 9216, 10240]
    assert multi.session_tokens == (8192 + 9216 + 10240, 768)
    open_loop = read_point("single_turn", "prompt=1024,rate=2.5,arrivals=constant")
    assert (open_loop.rate, open_loop.poisson) == (2.5, False)
    assert multi.pause is None
    assert read_point("multi_turn", "context=8192,pause=0").pause == 0.0


@pytest.mark.parametrize(
    ("workload", "text", "says"),
    [
        ("nope", "prompt=1", "unknown workload"),
        ("single_turn", "prompt", "not of the form name=value"),
        ("single_turn", "context=8", "needs prompt=<tokens>"),
        ("single_turn", "prompt=0", "above 0"),
        ("single_turn", "prompt=1_000", "above 0"),
        ("single_turn", "prompt=8,turns=3", "has no turns"),
        ("multi_turn", "context=8,pace=march", "independent or lockstep"),
        ("multi_turn", "context=8192,growth=256", "growth must exceed output"),
        ("single_turn", "prompt=8,rate=fast", "rate is sessions per second"),
        ("single_turn", "prompt=8,rate=nan", "rate is sessions per second"),
        ("multi_turn", "context=8192,pause=-1", "pause is seconds, 0 or more"),
        ("multi_turn", "context=8192,pause=nan", "pause is seconds, 0 or more"),
        ("single_turn", "prompt=8,rate=1,arrivals=bursty", "poisson or constant"),
        ("multi_turn", "context=8192,rate=1,pace=lockstep", "no room for lockstep"),
    ],
)
def test_wrong_points_say_what_is_wrong(workload, text, says):
    with pytest.raises(ValueError, match=says):
        read_point(workload, text)
