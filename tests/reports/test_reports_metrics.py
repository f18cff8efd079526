import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_builder import CACHE, RunBuilder, attempt

from locustfiles.records import CellRecord, ServerSample
from reports import metrics
from reports.metrics import quantile
from reports.read import Cell, ServerSeries

CELL = CellRecord(
    id="c", arm="cache", workload="single_turn", point="prompt=1024", users=1, repeat=1,
    sessions=1, turns=1, order=0, block=0,
)  # fmt: skip


def row(**changes):
    made = attempt(CACHE, CELL, 0, 1, 1, 0.0, 1.0, 0.02)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def series(*samples):
    return ServerSeries.from_samples(
        ServerSample(t_ms=t, server_id=server, name=name, labels=labels, value=value)
        for t, server, name, labels, value in samples
    )


def cell(rows=(), server=None):
    return Cell(CELL, None, None, list(rows), server or ServerSeries(), None)


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.sampled_from([0.0, 0.5, 0.9, 0.95, 0.99, 1.0])
)
def test_quantile_is_numpys_linear(values, q):
    assert quantile(values, q) == pytest.approx(float(np.quantile(values, q)), rel=1e-9, abs=1e-6)


def test_quantile_by_hand():
    assert quantile([4, 1, 3, 2], 0.5) == 2.5
    assert quantile([1, 2, 3, 4, 5], 0.9) == pytest.approx(4.6)
    with pytest.raises(ValueError, match="nothing"):
        quantile([], 0.5)


def test_failed_attempts_never_enter_a_latency():
    rows = [row(), row(status="truncated", ttft_ms=1.0), row(status="censored", ttft_ms=1.0)]
    assert metrics.latencies(rows, "ttft") == [1.0]


def test_undefined_tpot_is_not_zero():
    rows = [row(tpot_ms=None, output_tokens=1), row(tpot_ms=25.0)]
    assert metrics.latencies(rows, "tpot") == [0.025]
    assert metrics.decode_rates(rows) == [40.0]


def test_output_rate_is_over_the_time_that_attempts_ran():
    # Two overlapping attempts 0-2 s and 1-3 s, a gap, a failed one 5-6 s that counts as time only: 4 s.
    rows = [
        row(start_ms=0.0, end_ms=2000.0, output_tokens=100),
        row(start_ms=1000.0, end_ms=3000.0, output_tokens=100),
        row(start_ms=5000.0, end_ms=6000.0, output_tokens=50, status="truncated"),
    ]
    assert metrics.output_rate(rows) == pytest.approx(200 / 4)


def test_output_rate_without_usage_is_unknown():
    assert metrics.output_rate([row(), row(token_source="counted")]) is None
    assert metrics.output_rate([row(), row(output_tokens=None, token_source="none")]) is None
    assert metrics.output_rate([row(status="timeout")]) is None


def test_goodput_counts_failures_and_closes_on_the_unknown():
    rows = [
        row(ttft_ms=1000.0, tpot_ms=20.0),
        row(ttft_ms=2500.0, tpot_ms=20.0),  # too late
        row(status="http_error", ttft_ms=None, tpot_ms=None),
        row(ttft_ms=1000.0, tpot_ms=None, output_tokens=None),  # unknown TPOT is not met
        row(ttft_ms=1000.0, tpot_ms=None, output_tokens=1),  # one token has no TPOT to miss
    ]
    assert metrics.goodput(rows, {"ttft": 2.0, "tpot": 0.05}) == pytest.approx(2 / 5)
    assert metrics.goodput(rows, {}) is None


def test_hit_rate_from_usage():
    rows = [row(prompt_tokens=1000, cached_tokens=800), row(prompt_tokens=3000, cached_tokens=0)]
    assert metrics.hit_rate(cell(rows)) == pytest.approx(0.2)


def test_hit_rate_falls_back_to_the_server_where_usage_is_silent():
    server = series(
        (0, 0, "vllm:prefix_cache_hits_total", "", 100),
        (9, 0, "vllm:prefix_cache_hits_total", "", 400),
        (0, 0, "vllm:prefix_cache_queries_total", "", 1000),
        (9, 0, "vllm:prefix_cache_queries_total", "", 1600),
    )
    rows = [row(cached_tokens=None), row(cached_tokens=512)]
    assert metrics.hit_rate(cell(rows, server)) == pytest.approx(0.5)
    assert metrics.hit_rate(cell(rows), None) is None
    assert metrics.hit_rate(cell(rows, server), 2) is None  # counters cannot tell turns apart


def test_a_hit_rate_over_cells_sums_tokens():
    """By hand: 800 of 1,000 and 0 of 9,000 are 8 %, not the mean of 80 % and 0 %."""
    short, long = row(prompt_tokens=1000, cached_tokens=800), row(prompt_tokens=9000, cached_tokens=0)
    assert metrics.pooled_hit_rate([cell([short]), cell([long])]) == pytest.approx(0.08)


def test_a_hit_rate_over_cells_falls_back_to_the_servers_all_or_nothing():
    def counted(hits, asked):
        names = {"vllm:prefix_cache_hits_total": hits, "vllm:prefix_cache_queries_total": asked}
        return series(*[(t, 0, name, "", 5 + t / 9 * value) for name, value in names.items() for t in (0, 9)])

    silent = [row(cached_tokens=None)]
    cells = [cell(silent, counted(100, 1000)), cell(silent, counted(0, 3000))]
    assert metrics.pooled_hit_rate(cells) == pytest.approx(0.025)
    assert metrics.pooled_hit_rate([*cells, cell(silent)]) is None
    assert metrics.pooled_hit_rate([]) is None


def test_acceptance_length_from_counter_deltas():
    server = series(
        (0, 0, "vllm:spec_decode_num_drafts_total", "", 1000),
        (9, 0, "vllm:spec_decode_num_drafts_total", "", 1100),
        (0, 0, "vllm:spec_decode_num_accepted_tokens_total", "", 500),
        (9, 0, "vllm:spec_decode_num_accepted_tokens_total", "", 690),
    )
    assert metrics.acceptance_length(cell(server=server)) == pytest.approx(2.9)
    assert metrics.acceptance_length(cell()) is None


def test_counters_add_over_servers_and_survive_restarts():
    server = series(
        (0, 0, "n_total", "a=1", 5), (5, 0, "n_total", "a=1", 9), (9, 0, "n_total", "a=1", 2),  # 4 and 2
        (0, 1, "n_total", "", 10), (9, 1, "n_total", "", 13),  # 3
        (5, 0, "n_total", "a=2", 7),  # appeared during the cell: 7
    )  # fmt: skip
    assert server.increase("n") == 16
    assert server.increase("n", lambda labels: labels.get("a") == "2") == 7
    assert server.increase("absent") is None


def test_highest_gauge_by_label():
    server = series(
        (0, 0, "g", "reason=capacity", 1), (5, 0, "g", "reason=capacity", 3), (5, 0, "g", "reason=x", 9)
    )
    assert server.highest("g", lambda labels: labels.get("reason") == "capacity") == 3
    assert server.highest("none") is None


def test_uncached_prefill():
    rows = [row(prompt_tokens=1000, cached_tokens=800), row(prompt_tokens=1000, cached_tokens=400)]
    assert metrics.uncached_prefill(rows) == 400
    assert metrics.uncached_prefill([*rows, row(cached_tokens=None)]) is None


def test_unknown_metric_is_an_error():
    with pytest.raises(ValueError, match="no such metric"):
        metrics.statistic(cell([row()]), "itl_p50", None, {})


def test_statistic_of_a_turn_uses_measured_rows_of_that_turn(tmp_path):
    from reports.read import read_run

    def times(record, user, session, turn):
        return (100.0, 0.02) if session == 0 else (float(turn + user), 0.02)

    folder = RunBuilder(tmp_path / "r", repeats=1, times={"cache": times}).write()
    found = next(c for c in read_run(folder).finished if c.record.arm == "cache")
    # Turn 2 of users 0 and 1, two sessions each: 2, 2, 3, 3. The warm-up's 100 s stay out.
    assert metrics.statistic(found, "ttft_p50", 2, {}) == pytest.approx(2.5)
    assert metrics.samples(found, "ttft_p50", 2) == 4
