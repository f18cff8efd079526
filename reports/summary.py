"""``summary.csv``: every metric of every arm at every level, over all repeats. It decides nothing."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from locustfiles.records import Attempt
from reports import metrics
from reports.metrics import QUANTILES, Slo, quantile
from reports.read import Cell, Run


@dataclass(frozen=True)
class SummaryRow:
    """One line. Durations in seconds; ``n`` counts attempts for latencies and cells for everything else."""

    arm: str
    workload: str
    point: str
    users: int
    turn: int | None
    metric: str
    unit: str
    attempts: int
    failed: int
    n: int
    mean: float
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None


COLUMNS = tuple(item.name for item in fields(SummaryRow))

SERVER_METRICS: dict[str, tuple[str, Callable[[Cell], float | None]]] = {
    "hit_rate": ("1", metrics.hit_rate),
    "acceptance_length": ("1", metrics.acceptance_length),
    "preemptions": ("count", metrics.preemptions),
    "kv_use_max": ("1", metrics.kv_use_max),
}


def failed(rows: Sequence[Attempt]) -> int:
    """Measured attempts that did not work, censored ones included."""
    return sum(row.status != "ok" for row in rows)


def turns_of(cells: Sequence[Cell]) -> list[int | None]:
    """None (all turns), then each turn where a session has several."""
    seen = sorted({row.turn for cell in cells for row in cell.measured})
    return [None, *seen] if len(seen) > 1 else [None]


def summarise(run: Run, slo: Slo) -> list[SummaryRow]:
    """All lines, in the order of the plan; a metric without any value has none."""
    groups: dict[tuple[str, str, int, str], list[Cell]] = {}
    for cell in run.finished:
        groups.setdefault((*cell.level, cell.record.arm), []).append(cell)
    rows: list[SummaryRow] = []
    for (workload, point, users, arm), cells in groups.items():
        for turn in turns_of(cells):
            rows += level_rows(arm, workload, point, users, turn, cells, slo)
    return rows


def level_rows(
    arm: str, workload: str, point: str, users: int, turn: int | None, cells: Sequence[Cell], slo: Slo
) -> list[SummaryRow]:
    """The lines of one arm at one level and turn."""
    attempts = [row for cell in cells for row in metrics.of_turn(cell.measured, turn)]

    def row(
        metric: str, unit: str, values: Sequence[float], spread: bool = False, count: int | None = None
    ) -> list[SummaryRow]:
        if not values:
            return []
        ranks = {name: quantile(values, q) for name, q in QUANTILES.items()} if spread else {}
        return [
            SummaryRow(
                arm, workload, point, users, turn, metric, unit, len(attempts), failed(attempts),
                len(values) if count is None else count, sum(values) / len(values), **ranks,
                max=max(values) if spread else None,
            )
        ]  # fmt: skip

    found: list[SummaryRow] = []
    for latency in metrics.LATENCIES:
        found += row(latency, "s", metrics.latencies(attempts, latency), spread=True)
    if is_open_loop(point):
        found += row("ttft_intended", "s", metrics.intended_ttfts(attempts), spread=True)
    found += row("decode_rate", "tok/s", metrics.decode_rates(attempts))
    rates = [metrics.output_rate(metrics.of_turn(cell.measured, turn)) for cell in cells]
    found += row("output_rate", "tok/s", known(rates))
    shares = [metrics.goodput(metrics.of_turn(cell.measured, turn), slo) for cell in cells]
    found += row("goodput", "1", known(shares))
    if turn is not None:
        return found + row("hit_rate", "1", known([metrics.hit_rate(cell, turn) for cell in cells]))
    for metric, (unit, measure) in SERVER_METRICS.items():
        found += row(metric, unit, known([measure(cell) for cell in cells]))
    return found


def is_open_loop(point: str) -> bool:
    """Whether sessions arrive at a rate of their own."""
    return any(item.startswith("rate=") for item in point.split(","))


def known(values: Sequence[float | None]) -> list[float]:
    """Without the unknown ones."""
    return [value for value in values if value is not None]


def to_csv(rows: Sequence[SummaryRow]) -> str:
    """The file's text: six significant digits, unknown fields empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        values = (getattr(row, name) for name in COLUMNS)
        writer.writerow(
            "" if value is None else f"{value:.6g}" if isinstance(value, float) else value for value in values
        )
    return text.getvalue()
