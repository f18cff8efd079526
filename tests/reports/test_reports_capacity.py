import pytest
from run_builder import RunBuilder, flat

from reports.capacity import Outcome, capacity_at, crossings, expected_ttft, level_goodputs, zero_of
from reports.judge import Options, judge
from reports.read import read_run
from reports.verdict import find_capacity, find_crossovers


def test_trend_of_lower_levels():
    assert expected_ttft({}, 8) is None
    assert expected_ttft({2: 3.0}, 8) == pytest.approx(12.0)  # in proportion to users
    assert expected_ttft({1: 1.0, 2: 2.0, 4: 4.0}, 16) == pytest.approx(16.0)
    assert expected_ttft({1: 2.0, 4: 1.0}, 16) == pytest.approx(2**0.5)  # falling: taken as constant


LEVELS = [("multi_turn", "context=8192", users) for users in (2, 4, 8)]


def pressure_samples(arms, users=8, use=0.97):
    def samples(cell):
        full = cell.arm in arms and cell.users == users
        for t in (0.0, 9.0):
            yield t, "vllm:kv_cache_usage_perc", "", use if full else 0.4
            yield t, "vllm:num_preemptions_total", "", 3.0 if full and t else 0.0

    return samples


def wall(cell, user, session, turn):
    """TTFT in proportion to users, then a wall at 8."""
    return (cell.users * (1.0 if cell.users < 8 else 10.0), 0.02)


def outcomes(tmp_path, **changes):
    folder = RunBuilder(tmp_path / "run", **{"levels": LEVELS, **changes}).write()
    judgement = judge(read_run(folder), Options())
    return {cell.level[2]: cell for cell in judgement.primary}


def test_neither_where_every_arm_is_bound(tmp_path):
    found = outcomes(tmp_path, times={"cache": wall, "mtp": wall}, samples=pressure_samples({"cache", "mtp"}))
    assert found[8].winner == "neither"
    assert "10.0 times what lower levels" in found[8].reasons[0]
    assert found[4].winner == "equivalent"


def test_one_bound_arm_is_said_and_loses_on_its_numbers(tmp_path):
    found = outcomes(tmp_path, times={"cache": wall, "mtp": flat(2.0)}, samples=pressure_samples({"cache"}))
    assert found[8].winner == "mtp"
    assert any(reason.startswith("cache is capacity-bound") for reason in found[8].reasons)


@pytest.mark.parametrize("use", [0.90, 0.97])
def test_a_full_pool_alone_is_not_a_wall(tmp_path, use):
    def straight(cell, user, session, turn):
        return (float(cell.users), 0.02)

    times = {"cache": straight, "mtp": straight}
    found = outcomes(tmp_path, times=times, samples=pressure_samples({"cache", "mtp"}, use=use))
    assert found[8].winner == "equivalent"


def test_nothing_to_compare_with_is_said(tmp_path):
    found = outcomes(tmp_path, levels=LEVELS[2:], samples=pressure_samples({"mtp"}))
    assert any("no lower level to compare TTFT with" in reason for reason in found[8].reasons)


def test_zero_of_a_line():
    assert zero_of([(0.0, -1.0), (1.0, 3.0)]) == pytest.approx(0.25)
    assert zero_of([(0.0, 1.0), (1.0, 3.0)]) is None


def test_crossing_by_hand():
    # ln ratio -ln 2 at 1 user, +ln 2 at 4: zero half way on the logarithmic axis, at 2.
    found = crossings(
        [Outcome(1, "mtp", {"mtp": 1.0, "cache": 2.0}), Outcome(4, "cache", {"mtp": 2.0, "cache": 1.0})],
        ["cache", "mtp"],
    )
    assert [(c.loser, c.winner, c.low, c.high) for c in found] == [("mtp", "cache", 1, 4)]
    assert found[0].users == pytest.approx(2.0)


def test_an_undecided_level_widens_the_interval():
    levels = [
        Outcome(1, "mtp", {"mtp": 1.0, "cache": 2.0}),
        Outcome(2, "inconclusive", {"mtp": 1.0, "cache": 1.0}),
        Outcome(4, "cache", {"mtp": 2.0, "cache": 1.0}),
    ]
    found = crossings(levels, ["cache", "mtp"])
    assert (found[0].low, found[0].high) == (1, 4)
    assert found[0].users == pytest.approx(2.0)


def test_no_crossing_without_clear_winners_on_both_sides():
    levels = [
        Outcome(1, "inconclusive", {"mtp": 1.0, "cache": 2.0}),
        Outcome(4, "cache", {"mtp": 2.0, "cache": 1.0}),
    ]
    assert crossings(levels, ["cache", "mtp"]) == []


def test_crossover_of_a_run(tmp_path):
    times = {"cache": flat(2.0), "mtp": lambda cell, u, s, t: (cell.users / 2.0, 0.02)}
    folder = RunBuilder(tmp_path / "run", levels=[*LEVELS[:2], LEVELS[2]], times=times).write()
    judgement = judge(read_run(folder), Options())
    assert [cell.winner for cell in judgement.primary] == ["mtp", "equivalent", "cache"]
    (found,) = find_crossovers(judgement)
    assert (found.from_, found.to, found.low, found.high) == ("mtp", "cache", 2, 8)
    assert found.users == pytest.approx(4.0)


def test_capacity_needs_every_lower_level():
    assert capacity_at({1: 1.0, 2: 0.96, 4: 0.5, 8: 1.0}) == 2
    assert capacity_at({1: 0.9, 2: 1.0}) is None
    assert capacity_at({}) is None


def test_capacity_of_a_run(tmp_path):
    times = {"cache": flat(1.0), "mtp": lambda cell, u, s, t: (float(cell.users), 0.02)}
    run = read_run(RunBuilder(tmp_path / "run", levels=LEVELS, times=times).write())
    options = Options(slo={"ttft": 4.0})
    found = {line.arm: line for line in find_capacity(judge(run, options))}
    assert found["cache"].users == 8
    assert found["mtp"].users == 4
    assert found["mtp"].slo == "ttft <= 4 s for 95% of attempts"
    assert level_goodputs(run, options.slo)[("mtp", "multi_turn", "context=8192")] == {2: 1.0, 4: 1.0, 8: 0.0}
    assert find_capacity(judge(run, Options())) == []
