"""The self-test of the load generator: its arithmetic by hand, and one real level."""

import pytest

from locustfiles.records import Attempt, Done, GeneratorHealth
from locustfiles.selftest import Truth, judge_level, read_truth, run_level


def row(user, ttft, tpot, status="ok", phase="measure"):
    return Attempt(
        arm="selftest",
        workload="single_turn",
        point="prompt=1024,output=128",
        users=2,
        repeat=1,
        user=user,
        session=1,
        turn=1,
        phase=phase,
        ttft_ms=ttft,
        tpot_ms=tpot,
        chunks=100,
        status=status,
    )


def done(cpu):
    return Done(
        complete=True,
        started_utc="",
        wall_seconds=2.0,
        rows=2,
        measured=2,
        measured_planned=2,
        generator=GeneratorHealth(cpu_share=cpu),
    )


TRUTH = {"selftest-0-1-1": Truth(300.0, 20.0), "selftest-1-1-1": Truth(300.0, 20.0)}


def test_hand_computed_level():
    level = judge_level([row(0, 300.5, 20.0), row(1, 298.5, 20.2)], TRUTH, done(0.25))
    assert level.ttft_error_p50_ms == pytest.approx(1.0)  # errors 0.5 and 1.5
    assert level.ttft_error_max_ms == 1.5
    assert level.ttft_error_p99_ms == pytest.approx(1.49)
    assert level.tpot_error_p99_percent == pytest.approx(0.99)  # errors 0 and 1 %
    assert level.events_per_s == 100  # 200 chunks in 2 s
    assert level.us_per_chunk == pytest.approx(2500)  # 0.25 * 2 s / 200
    assert level.safe


@pytest.mark.parametrize(
    ("rows", "cpu"),
    [
        ([row(0, 303.0, 20.0)], 0.2),
        ([row(0, 300.0, 20.0)], 0.95),
        ([row(0, 300.0, 20.0), row(1, None, None, status="truncated")], 0.2),
    ],
    ids=["late", "core full", "a failure"],
)
def test_what_makes_a_level_unsafe(rows, cpu):
    assert not judge_level(rows, TRUTH, done(cpu)).safe


def test_nothing_to_compare_is_an_error_not_a_pass():
    with pytest.raises(ValueError, match="no measured attempt"):
        judge_level([row(0, 300.0, 20.0, phase="warmup")], TRUTH, done(0.1))


def test_an_unknown_cpu_share_certifies_nothing():
    with pytest.raises(ValueError, match="CPU share was not recorded"):
        judge_level([row(0, 300.0, 20.0)], TRUTH, done(None))


def test_truth_is_read_from_the_servers_log(tmp_path):
    log = tmp_path / "log.csv"
    log.write_text(
        "request_id,arrived_ns,first_ns,last_ns,chunks\nselftest-0-1-1,1000000,301000000,341000000,3\n"
    )
    assert read_truth(log) == {"selftest-0-1-1": Truth(300.0, 20.0)}


def test_one_real_level(tmp_path):
    level = run_level(8, tmp_path / "level")
    assert (level.streams, level.requests, level.failed) == (8, 16, 0)
    assert level.ttft_error_p50_ms < 5
    assert level.events_per_s > 50
