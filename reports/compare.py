"""From cells to differences between arms: blocks, log-ratios, t intervals, decisions.

The unit is the cell. Within a block (the cells of all arms for one workload, point, users and repeat) the
arms met the same machine at nearly the same time, so d = ln(arm / base) of the cells' statistics is free of
what changes between blocks; the G blocks of a level give mean(d) +- t * s / sqrt(G). Requests within a cell
share their queue and are no independent sample: intervals from them cover far less than they claim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reports import metrics
from reports.metrics import Slo
from reports.read import Cell, Run
from reports.student import t_quantile

Level = tuple[str, str, int]
"""(workload, point, users)"""

CONFIDENCE = 0.95
POOL_LEVELS = 6
"""From this many levels on, scatter is pooled over the levels of a workload x metric."""
NEEDED_REPEATS = 3
P95_ATTEMPTS = 200
DEFAULT_MARGIN = 0.05

PRIMARY: dict[str, tuple[str, int | None]] = {
    "single_turn": ("tpot_p50", None),
    "shared_prefix": ("ttft_p50", None),
    "multi_turn": ("ttft_p50", 2),
}
"""Workload -> the metric and turn that carry its winner."""

UNITS = {
    "ttft_p50": "s",
    "ttft_p95": "s",
    "ttfa_p50": "s",
    "tpot_p50": "s",
    "e2e_p50": "s",
    "output_rate": "tok/s",
    "goodput": "1",
}
HIGHER_IS_BETTER = frozenset({"output_rate", "goodput"})


@dataclass(frozen=True)
class Blocks:
    """A metric at one level: the statistic of every cell, by repeat and arm."""

    level: Level
    metric: str
    turn: int | None
    values: dict[int, dict[str, float]]
    """Repeat -> arm -> statistic. A cell whose statistic is unknown is missing."""
    n: dict[str, int]
    """Arm -> attempts behind its statistics, over all its cells."""

    @property
    def arms(self) -> list[str]:
        """Arms with a value in any block."""
        return sorted({arm for block in self.values.values() for arm in block})

    def complete(self, arms: Sequence[str]) -> list[int]:
        """The repeats in which all of ``arms`` have a value."""
        return sorted(repeat for repeat, block in self.values.items() if all(arm in block for arm in arms))

    def differences(self, arm: str, against: str) -> list[float]:
        """ln(arm / against) in every block that has both; blocks with a zero (a goodput) are left out."""
        return [
            math.log(self.values[repeat][arm] / self.values[repeat][against])
            for repeat in self.complete([arm, against])
            if self.values[repeat][arm] > 0 and self.values[repeat][against] > 0
        ]

    def value(self, arm: str, repeats: Sequence[int]) -> float | None:
        """Geometric mean over ``repeats``, so that values divide to the ratio; arithmetic if one is 0."""
        found = [self.values[repeat][arm] for repeat in repeats if arm in self.values[repeat]]
        if not found:
            return None
        if min(found) <= 0:
            return sum(found) / len(found)
        return math.exp(sum(map(math.log, found)) / len(found))


@dataclass(frozen=True)
class Estimate:
    """How an arm compares with another in one metric: the ratio as it stands (arm / against)."""

    arm: str
    against: str
    ratio: float
    low: float | None
    high: float | None
    """Bounds of the interval; None where the sample cannot give one."""
    repeats: int
    df: int
    pooled: bool

    @property
    def smallest_effect(self) -> float | None:
        """Smallest relative difference that would have excluded 1 at this scatter (0.12 = 12 %)."""
        return None if self.high is None else self.high / self.ratio - 1


def gather(run: Run, metric: str, turn: int | None, slo: Slo) -> list[Blocks]:
    """The blocks of a metric at every level of a run, finished cells only."""
    levels: dict[Level, list[Cell]] = {}
    for cell in run.finished:
        levels.setdefault(cell.level, []).append(cell)
    found: list[Blocks] = []
    for level, cells in levels.items():
        values: dict[int, dict[str, float]] = {}
        n: dict[str, int] = {}
        for cell in cells:
            value = metrics.statistic(cell, metric, turn, slo)
            if value is not None:
                values.setdefault(cell.record.repeat, {})[cell.record.arm] = value
                n[cell.record.arm] = n.get(cell.record.arm, 0) + metrics.samples(cell, metric, turn)
        found.append(Blocks(level, metric, turn, values, n))
    return found


def scatter(differences: Sequence[float]) -> tuple[float, int]:
    """Sum of squared deviations from the mean, and its degrees of freedom."""
    if len(differences) < 2:
        return 0.0, 0
    mean = sum(differences) / len(differences)
    return sum((d - mean) ** 2 for d in differences), len(differences) - 1


def estimate(
    blocks: Blocks, siblings: Sequence[Blocks], arm: str, against: str, alpha: float
) -> Estimate | None:
    """Ratio and interval of ``arm`` to ``against`` at one level.

    Args:
        blocks: the level.
        siblings: every level of the same workload and metric (this one included). If six or more of them
            show scatter, the interval uses the pooled standard deviation and its degrees of freedom.
        arm: the numerator.
        against: the denominator.
        alpha: error probability of this interval, after any correction.

    Returns:
        None without a block that has both arms.
    """
    differences = blocks.differences(arm, against)
    if not differences:
        return None
    repeats = len(differences)
    mean = sum(differences) / repeats
    squares, df = scatter(differences)
    others = [scatter(sibling.differences(arm, against)) for sibling in siblings]
    with_scatter = [found for found in others if found[1] > 0]
    pooled = len(with_scatter) >= POOL_LEVELS
    if pooled:
        squares, df = sum(found[0] for found in with_scatter), sum(found[1] for found in with_scatter)
    elif repeats < NEEDED_REPEATS:
        return Estimate(arm, against, math.exp(mean), None, None, repeats, df, False)
    half = t_quantile(1 - alpha / 2, df) * math.sqrt(squares / df / repeats)
    return Estimate(
        arm, against, math.exp(mean), math.exp(mean - half), math.exp(mean + half), repeats, df, pooled
    )


def relation(found: Estimate | None, metric: str, margin: float) -> str:
    """What the interval says about ``against`` relative to ``arm``: better, worse, equivalent, inconclusive.

    ``better`` means that ``found.against`` is better than ``found.arm``. Inside the margin means between
    1 / (1 + margin) and 1 + margin.
    """
    if found is None or found.low is None or found.high is None:
        return "inconclusive"
    inside = found.low >= 1 / (1 + margin) and found.high <= 1 + margin
    if inside:
        return "equivalent"
    if found.low <= 1 <= found.high:
        return "inconclusive"
    arm_is_larger = found.low > 1
    return "worse" if arm_is_larger == (metric in HIGHER_IS_BETTER) else "better"


@dataclass(frozen=True)
class Decision:
    """The outcome of one cell by its numbers alone: checks and capacity may still overrule it."""

    winner: str
    """An arm, ``equivalent`` or ``inconclusive``."""
    reasons: list[str]
    best: str | None
    """The arm with the best value, whatever the intervals say."""


def effect_text(effect: float) -> str:
    """``a difference of 12.0%``, or ``a factor of 4.0`` where a percentage would be silly."""
    return f"a difference of {effect:.1%}" if effect < 1 else f"a factor of {1 + effect:.1f}"


def best_arm(values: Mapping[str, float], metric: str) -> str | None:
    """The arm with the best value."""
    if not values:
        return None
    choose = max if metric in HIGHER_IS_BETTER else min
    return choose(sorted(values), key=lambda arm: values[arm])


def decide(
    values: Mapping[str, float], against_best: Mapping[str, Estimate | None], metric: str, margin: float
) -> Decision:
    """Choose the winner of a cell: the best arm, if it is better than every other one.

    To claim a winner among k arms takes all k - 1 comparisons with it (an intersection-union test), so the
    number of arms needs no correction of its own.

    Args:
        values: statistic of each arm.
        against_best: every other arm -> its estimate against the best arm (other / best).
        metric: gives the direction.
        margin: of practical importance, relative.
    """
    best = best_arm(values, metric)
    if best is None or not against_best:
        return Decision("inconclusive", ["inconclusive: fewer than two arms have finished cells here"], best)
    relations = {arm: relation(found, metric, margin) for arm, found in against_best.items()}
    if all(kind == "better" for kind in relations.values()):
        return Decision(best, [], best)
    reasons: list[str] = []
    ties = sorted(arm for arm, kind in relations.items() if kind == "equivalent")
    beaten = sorted(arm for arm, kind in relations.items() if kind == "better")
    open_arms = sorted(set(relations) - set(ties) - set(beaten))
    if ties:
        reasons.append(f"{' and '.join([best, *ties])} are within {margin:.0%} of each other")
    if beaten:
        reasons.append(f"{best} is better than {' and '.join(beaten)}")
    for arm in open_arms:
        found = against_best[arm]
        if found is None or found.low is None:
            repeats = 0 if found is None else found.repeats
            reasons.append(f"inconclusive: needs {NEEDED_REPEATS} repeats")
            reasons.append(f"{repeats} finished for {arm} and {best}")
        else:
            effect = found.smallest_effect or 0.0
            reasons.append(
                f"{arm} and {best} cannot be told apart: with this scatter, only "
                f"{effect_text(effect)} or more would show"
            )
    return Decision("inconclusive" if open_arms else "equivalent", reasons, best)
