"""Where load, not configuration, decides: capacity-bound cells, crossovers, capacity at an SLO."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reports import metrics
from reports.compare import Level
from reports.metrics import Slo
from reports.read import Cell, Run

KV_FULL = 0.95
"""Share of the KV pool from which on it counts as full."""
OFF_TREND = 1.5
"""TTFT this many times what the lower levels lead one to expect has left their trend."""
GOOD_SHARE = 0.95
"""A level meets the SLO if this share of its measured attempts does."""


@dataclass(frozen=True)
class Pressure:
    """One arm at one level: how full its KV pool was, and whether that bound it."""

    bound: bool | None
    """None: signs of it, but nothing to compare TTFT with."""
    text: str


def ttft_turn(workload: str) -> int | None:
    """The turn whose TTFT shows capacity: the first follow-up of a conversation."""
    return 2 if workload == "multi_turn" else None


def pool_ttft(cells: Sequence[Cell], workload: str) -> float | None:
    """Geometric mean over repeats of the cells' TTFT p50, seconds."""
    found = [metrics.statistic(cell, "ttft_p50", ttft_turn(workload), {}) for cell in cells]
    logs = [math.log(value) for value in found if value]
    return math.exp(sum(logs) / len(logs)) if logs else None


def expected_ttft(lower: Mapping[int, float], users: int) -> float | None:
    """TTFT that the lower levels lead one to expect at ``users``.

    With two or more: the least-squares line through (ln users, ln TTFT), no flatter than constant. With one:
    growth in proportion to users, which is what a queue for a single resource gives.
    """
    if not lower:
        return None
    if len(lower) == 1:
        ((level, value),) = lower.items()
        return value * users / level
    xs, ys = [math.log(level) for level in lower], [math.log(value) for value in lower.values()]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum(
        (x - mean_x) ** 2 for x in xs
    )
    return math.exp(mean_y + max(0.0, slope) * (math.log(users) - mean_x))


def pressures(run: Run) -> dict[tuple[Level, str], Pressure]:
    """For every level and arm: was it bound by KV capacity?

    Bound = KV use reached 95 %, and requests were preempted or waited for capacity, and TTFT left the trend
    of the lower levels that were not bound themselves.
    """
    groups: dict[tuple[str, str, str], dict[int, list[Cell]]] = {}
    for cell in run.finished:
        workload, point, users = cell.level
        groups.setdefault((workload, point, cell.record.arm), {}).setdefault(users, []).append(cell)
    found: dict[tuple[Level, str], Pressure] = {}
    for (workload, point, arm), levels in groups.items():
        free: dict[int, float] = {}
        for users in sorted(levels):
            ttft = pool_ttft(levels[users], workload)
            pressure = judge_pressure(levels[users], ttft, expected_ttft(free, users))
            found[((workload, point, users), arm)] = pressure
            if not pressure.bound and ttft is not None:
                free[users] = ttft
    return found


def judge_pressure(cells: Sequence[Cell], ttft: float | None, expected: float | None) -> Pressure:
    """The capacity rule for one arm at one level."""
    use = max((value for cell in cells if (value := metrics.kv_use_max(cell)) is not None), default=None)
    preempted = sum(metrics.preemptions(cell) or 0 for cell in cells)
    waited = max((metrics.waited_for_capacity(cell) or 0 for cell in cells), default=0)
    if use is None:
        return Pressure(None if preempted or waited else False, "KV use unknown")
    text = f"KV use {use:.0%}, {preempted:.0f} preemptions, up to {waited:.0f} waiting for capacity"
    if use < KV_FULL or not (preempted or waited):
        return Pressure(False, text)
    if ttft is None or expected is None:
        return Pressure(None, f"{text}; no lower level to compare TTFT with")
    text += f"; TTFT {ttft / expected:.1f} times what lower levels lead one to expect"
    return Pressure(ttft > OFF_TREND * expected, text)


@dataclass(frozen=True)
class Outcome:
    """A primary cell as crossovers see it."""

    users: int
    winner: str | None
    values: Mapping[str, float]


@dataclass(frozen=True)
class Crossing:
    """The load at which the winner changes."""

    loser: str
    """The arm that wins below."""
    winner: str
    """The arm that wins above."""
    users: float
    low: int
    high: int
    """The nearest levels with a clear winner on either side."""


def crossings(outcomes: Sequence[Outcome], arms: Sequence[str]) -> list[Crossing]:
    """Crossovers along the levels of one workload, point and metric.

    Between two levels with different clear winners, the place where the two arms' ln(ratio) is 0, on a line
    through the two innermost levels around the change of sign (against ln users).
    """
    ordered = sorted(outcomes, key=lambda outcome: outcome.users)
    clear = [outcome for outcome in ordered if outcome.winner in arms]
    found: list[Crossing] = []
    for below, above in itertools.pairwise(clear):
        first, second = below.winner, above.winner
        if first is None or second is None or first == second:
            continue
        path = [
            (math.log(outcome.users), math.log(outcome.values[first] / outcome.values[second]))
            for outcome in ordered
            if below.users <= outcome.users <= above.users
            and outcome.values.get(first, 0) > 0
            and outcome.values.get(second, 0) > 0
        ]
        place = zero_of(path)
        if place is not None:
            found.append(Crossing(first, second, math.exp(place), below.users, above.users))
    return found


def zero_of(path: Sequence[tuple[float, float]]) -> float | None:
    """Where a piecewise linear path last changes sign; None if it does not."""
    for (x0, y0), (x1, y1) in reversed(list(itertools.pairwise(path))):
        if y0 == 0:
            return x0
        if y0 * y1 <= 0:
            return x0 + (x1 - x0) * y0 / (y0 - y1)
    return None


def slo_text(slo: Slo) -> str:
    """``"ttft <= 2 s, tpot <= 0.05 s for 95 % of attempts"``."""
    limits = ", ".join(f"{latency} <= {limit:g} s" for latency, limit in slo.items())
    return f"{limits} for {GOOD_SHARE:.0%} of attempts"


def capacity_at(goodputs: Mapping[int, float]) -> int | None:
    """The highest level such that it and every lower one met the SLO; None if the lowest did not."""
    best: int | None = None
    for users in sorted(goodputs):
        if goodputs[users] < GOOD_SHARE:
            break
        best = users
    return best


def level_goodputs(run: Run, slo: Slo) -> dict[tuple[str, str, str], dict[int, float]]:
    """(arm, workload, point) -> users -> share of all measured attempts (over repeats) that met the SLO."""
    rows: dict[tuple[str, str, str], dict[int, tuple[int, int]]] = {}
    for cell in run.finished:
        workload, point, users = cell.level
        levels = rows.setdefault((cell.record.arm, workload, point), {})
        good, total = levels.get(users, (0, 0))
        measured = cell.measured
        levels[users] = (good + sum(metrics.meets(row, slo) for row in measured), total + len(measured))
    return {
        key: {users: good / total for users, (good, total) in levels.items() if total}
        for key, levels in rows.items()
    }
