"""What the reference case published, to be shown beside a run's own numbers where workload and level match.

One H100 with prefix caching (``cache``), one with MTP and three draft tokens (``mtp``), a 27B model in FP8.
Its numbers under a shared prefix and in conversations fit users that move in lockstep, so they are compared
with that pace alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from locustfiles.records import parse_point
from reports import metrics
from reports.read import Cell, Run
from reports.words import metric_text, point_text, times_text, users_text, value_text, workload_text

LOCKSTEP = "lockstep"


@dataclass(frozen=True)
class Published:
    """One published number; a range has two ends. ``over`` makes it a ratio: value of ``over`` / ``arm``."""

    workload: str
    point: str
    users: int
    turn: int | None
    metric: str
    arm: str
    low: float
    high: float
    over: str | None = None

    def matches(self, workload: str, point: str, turn: int | None, metric: str) -> bool:
        """Whether it belongs to this workload, point, turn and metric."""
        if (self.workload, self.turn, self.metric) != (workload, turn, metric):
            return False
        return same_point(point, self.point)

    @property
    def unit(self) -> str:
        """Unit of the number."""
        return "tok/s" if self.metric == "decode_rate" else "s"


def same_point(point: str, other: str) -> bool:
    """Whether two points say the same, whatever the order of their items."""
    try:
        return parse_point(point) == parse_point(other)
    except ValueError:
        return False


def _pair(
    workload: str,
    point: str,
    users: int,
    turn: int | None,
    metric: str,
    **values: float | tuple[float, float],
) -> list[Published]:
    found: list[Published] = []
    for arm, number in values.items():
        low, high = number if isinstance(number, tuple) else (number, number)
        found.append(Published(workload, point, users, turn, metric, arm, low, high))
    return found


def _context(tokens: int) -> str:
    return f"context={tokens},pace={LOCKSTEP}"


def _prefix(tokens: int) -> str:
    return f"prefix={tokens},pace={LOCKSTEP}"


#: Seconds, tokens per second and session.
PUBLISHED: list[Published] = [
    *_pair("single_turn", "prompt=1024", 1, None, "decode_rate", cache=49.9, mtp=94.9),
    *_pair("shared_prefix", _prefix(4096), 1, None, "ttft_p50", cache=1.02, mtp=0.85),
    *_pair("shared_prefix", _prefix(4096), 32, None, "ttft_p50", cache=5.20, mtp=13.55),
    *_pair("shared_prefix", _prefix(16384), 1, None, "ttft_p50", cache=0.91, mtp=2.20),
    *_pair("shared_prefix", _prefix(16384), 16, None, "ttft_p50", cache=3.49, mtp=27.85),
    *_pair("multi_turn", _context(32768), 8, 2, "ttft_p50", cache=(1.4, 5.5), mtp=28.6),
    *_pair("multi_turn", _context(65536), 16, 2, "ttft_p50", cache=132.0, mtp=80.9),
]
RATIOS: list[Published] = [
    Published("single_turn", "prompt=1024", 1, None, "decode_rate", "cache", 1.9, 1.9, over="mtp"),
    Published("single_turn", "prompt=1024", 32, None, "decode_rate", "cache", 1.28, 1.28, over="mtp"),
    Published("multi_turn", _context(65536), 4, 2, "ttft_p50", "cache", 16.8, 16.8, over="mtp"),
]
HIT_RATE = {"cache": 0.65}
"""Over its whole multi-turn run."""


@dataclass(frozen=True)
class Beside:
    """A published number beside this run's."""

    what: str
    arm: str
    published: str
    here: str
    ratio: float
    """Here / published (the nearest end of a range)."""


def beside(run: Run) -> list[Beside]:
    """Every published number that this run also measured."""
    found: list[Beside] = []
    for number in [*PUBLISHED, *RATIOS]:
        value = here(run, number, number.arm)
        if number.over is not None:
            over = here(run, number, number.over)
            value = None if value is None or over is None else over / value
        if value is None:
            continue
        nearest = min(max(value, number.low), number.high)
        name = metric_text(number.metric, number.turn)
        found.append(
            Beside(
                what=f"{workload_text(number.workload)}, {point_text(number.point)}, "
                f"{users_text(number.users)}: {name}",
                arm=number.arm if number.over is None else f"{number.over} ÷ {number.arm}",
                published=show(number.low, number)
                if number.low == number.high
                else f"{show(number.low, number)} to {show(number.high, number)}",
                here=show(value, number),
                ratio=value / nearest,
            )
        )
    return found + hit_rates(run)


def show(value: float, number: Published) -> str:
    """The number with its unit, or as a factor."""
    return value_text(value, number.unit) if number.over is None else times_text(value)


def here(run: Run, number: Published, arm: str) -> float | None:
    """Geometric mean over this run's repeats of the same statistic; None if it was not measured."""
    values = [
        value
        for cell in run.finished
        if cell.record.arm == arm
        and cell.record.users == number.users
        and number.matches(cell.record.workload, cell.record.point, number.turn, number.metric)
        and (value := metrics.statistic(cell, number.metric, number.turn, {}))
    ]
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def hit_rates(run: Run) -> list[Beside]:
    """The hit rate over all multi-turn cells in lockstep, tokens summed as the published counter did."""
    found: list[Beside] = []
    for arm, published in HIT_RATE.items():
        cells = [cell for cell in run.finished if cell.record.arm == arm and in_lockstep(cell)]
        rate = metrics.pooled_hit_rate(cells)
        if rate is not None:
            found.append(
                Beside(
                    "multi-turn conversations, all cells: prefix hit rate",
                    arm,
                    f"about {value_text(published, '1')}",
                    value_text(rate, "1"),
                    rate / published,
                )
            )
    return found


def in_lockstep(cell: Cell) -> bool:
    """Whether this is a multi-turn cell of the reference case's pace."""
    return cell.record.workload == "multi_turn" and f"pace={LOCKSTEP}" in cell.record.point.split(",")
