import math

import numpy as np
import pytest

from reports.compare import Blocks, decide, estimate, relation

LEVEL = ("multi_turn", "context=8192", 4)


def blocks(values, level=LEVEL, metric="ttft_p50"):
    """values: arm -> list over repeats."""
    repeats = max(len(found) for found in values.values())
    by_repeat = {
        repeat + 1: {arm: found[repeat] for arm, found in values.items() if repeat < len(found)}
        for repeat in range(repeats)
    }
    return Blocks(level, metric, None, by_repeat, dict.fromkeys(values, 10))


def test_interval_by_hand():
    # d = ln 2, ln 2.2, ln 2.4: mean 0.785705, s = 0.091160; t(0.975, 2) = 4.302653; half = 0.226457.
    level = blocks({"a": [1.0, 1.0, 1.0], "b": [2.0, 2.2, 2.4]})
    found = estimate(level, [level], "b", "a", 0.05)
    differences = [math.log(2), math.log(2.2), math.log(2.4)]
    mean = sum(differences) / 3
    s = math.sqrt(sum((d - mean) ** 2 for d in differences) / 2)
    half = 4.302653 * s / math.sqrt(3)
    assert found.ratio == pytest.approx(2.194, abs=1e-3)
    assert found.low == pytest.approx(math.exp(mean - half), rel=1e-6)
    assert found.high == pytest.approx(math.exp(mean + half), rel=1e-6)
    assert (found.repeats, found.df, found.pooled) == (3, 2, False)


def test_blocks_cancel_what_both_arms_share():
    # The machine got twice as slow in each block; the ratio did not move at all.
    level = blocks({"a": [1.0, 2.0, 4.0], "b": [3.0, 6.0, 12.0]})
    found = estimate(level, [level], "b", "a", 0.05)
    assert found.ratio == pytest.approx(3)
    assert found.low == pytest.approx(3)
    assert found.high == pytest.approx(3)


def test_two_repeats_without_pooling_give_a_ratio_and_no_interval():
    level = blocks({"a": [1.0, 1.0], "b": [2.0, 2.0]})
    found = estimate(level, [level], "b", "a", 0.05)
    assert found.ratio == pytest.approx(2)
    assert found.low is None
    outcome = decide({"a": 1.0, "b": 2.0}, {"b": found}, "ttft_p50", 0.05)
    assert outcome.winner == "inconclusive"
    assert "inconclusive: needs 3 repeats" in outcome.reasons


def test_scatter_is_pooled_from_six_levels_on():
    # Six levels, two repeats each, d = +-0.1 around different means: s^2 = 6 * 0.02 / 6, df = 6.
    def level(users, mean):
        return blocks(
            {"a": [1.0, 1.0], "b": [math.exp(mean - 0.1), math.exp(mean + 0.1)]},
            ("multi_turn", "context=8192", users),
        )

    levels = [level(users, users / 10) for users in (1, 2, 4, 8, 16, 32)]
    found = estimate(levels[2], levels, "b", "a", 0.05)
    half = 2.446912 * math.sqrt(0.02) / math.sqrt(2)  # t(0.975, 6)
    assert found.pooled
    assert found.df == 6
    assert math.log(found.high) == pytest.approx(0.4 + half, rel=1e-6)
    five = estimate(levels[2], levels[:5], "b", "a", 0.05)
    assert not five.pooled
    assert five.low is None


def test_a_block_lacking_an_arm_is_left_out():
    level = blocks({"a": [1.0, 1.0, 1.0, 9.0], "b": [2.0, 2.0, 2.0]})
    assert estimate(level, [level], "b", "a", 0.05).repeats == 3
    assert level.complete(["a", "b"]) == [1, 2, 3]


def test_values_divide_to_the_ratio():
    level = blocks({"a": [1.0, 2.0, 3.0], "b": [5.0, 7.0, 11.0]})
    repeats = level.complete(["a", "b"])
    ratio = estimate(level, [level], "b", "a", 0.05).ratio
    assert level.value("b", repeats) / level.value("a", repeats) == pytest.approx(ratio)


def interval(low, high, ratio=None):
    from reports.compare import Estimate

    return Estimate("other", "best", ratio or math.sqrt(low * high), low, high, 3, 2, False)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1.2, 1.4, "better"),
        (1.01, 1.4, "better"),  # excludes 1, reaches out of the margin
        (1.01, 1.04, "equivalent"),  # excludes 1 but lies wholly inside
        (0.97, 1.04, "equivalent"),
        (0.94, 1.04, "inconclusive"),  # 1 / 1.05 = 0.952
        (0.9, 1.4, "inconclusive"),
        (0.5, 0.9, "worse"),
    ],
)
def test_margin(low, high, expected):
    assert relation(interval(low, high), "ttft_p50", 0.05) == expected


def test_rates_are_better_when_higher():
    assert relation(interval(0.5, 0.9), "output_rate", 0.05) == "better"
    assert relation(interval(1.2, 1.4), "output_rate", 0.05) == "worse"


def test_winner_has_to_beat_every_other_arm():
    values = {"plain": 2.0, "cache": 1.0, "mtp": 3.0}
    clear = {"plain": interval(1.8, 2.2), "mtp": interval(2.5, 3.5)}
    assert decide(values, clear, "ttft_p50", 0.05).winner == "cache"
    tie = {"plain": interval(0.98, 1.03), "mtp": interval(2.5, 3.5)}
    outcome = decide(values, tie, "ttft_p50", 0.05)
    assert outcome.winner == "equivalent"
    assert outcome.reasons == ["cache and plain are within 5% of each other", "cache is better than mtp"]
    fog = {"plain": interval(0.8, 1.5), "mtp": interval(2.5, 3.5)}
    outcome = decide(values, fog, "ttft_p50", 0.05)
    assert outcome.winner == "inconclusive"
    assert any("cannot be told apart" in reason for reason in outcome.reasons)


def test_smallest_effect_is_the_half_width():
    assert interval(1 / 1.2, 1.2, 1.0).smallest_effect == pytest.approx(0.2)


def test_goodput_of_zero_gives_no_ratio():
    level = blocks({"a": [0.0, 0.0, 0.0], "b": [0.5, 0.5, 0.5]}, metric="goodput")
    assert estimate(level, [level], "b", "a", 0.05) is None
    assert level.value("a", [1, 2, 3]) == 0


def covered(rng, repeats, levels, alpha):
    """Share of A/A intervals that hold 1: block effects shared by both arms, noise of their own."""
    machine = rng.normal(0, 0.5, (levels, repeats))
    a, b = machine + rng.normal(0, 0.05, (2, levels, repeats))
    made = [
        blocks({"a": list(np.exp(a[i])), "b": list(np.exp(b[i]))}, ("multi_turn", "context=8192", i + 1))
        for i in range(levels)
    ]
    pooled = levels >= 6
    hits = 0
    for level in made:
        found = estimate(level, made if pooled else [level], "b", "a", alpha)
        hits += found.low <= 1 <= found.high
    return hits, levels


@pytest.mark.parametrize(("repeats", "levels"), [(3, 1), (5, 1), (2, 8)])
def test_a_a_intervals_cover_what_they_claim(repeats, levels):
    rng = np.random.default_rng(20261130)
    runs = [covered(rng, repeats, levels, 0.05) for _ in range(3000 // levels)]
    share = sum(hit for hit, _ in runs) / sum(total for _, total in runs)
    assert 0.935 <= share <= 0.965  # 95 %; the binomial standard error of 3000 is 0.4 %


def test_bonferroni_keeps_false_winners_of_a_whole_run_below_five_percent():
    rng = np.random.default_rng(7)
    wrong = 0
    for _ in range(600):
        machine = rng.normal(0, 0.5, (9, 3))
        a, b = machine + rng.normal(0, 0.2, (2, 9, 3))
        for i in range(9):
            level = blocks({"a": list(np.exp(a[i])), "b": list(np.exp(b[i]))})
            found = estimate(level, [level], "b", "a", 0.05 / 9)
            if not found.low <= 1 <= found.high:
                wrong += 1
                break
    assert wrong / 600 <= 0.08  # 5 % + 3 standard errors of 0.9 %
