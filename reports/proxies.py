"""Which server behind a proxy served what, and what the detour cost. Describes; decides nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from locustfiles.records import ArmRecord, Attempt
from reports import metrics
from reports.compare import Level
from reports.read import Cell, Run


@dataclass(frozen=True)
class Served:
    """What one server behind a proxy did at one level."""

    level: Level
    proxy: str
    server: str
    """As the proxy names it: the arm that it sends requests to."""
    requests: int
    """Measured attempts that worked."""
    share: float
    """Of those that the proxy answered at this level."""
    hit_rate: float | None
    """Of its follow-ups and shared prefixes: cached / prompt tokens, by usage."""
    ttft: float | None
    """TTFT p50 of first turns, through the proxy ÷ direct; None where that arm was not measured itself."""
    tpot: float | None


def backends(run: Run, arm: ArmRecord) -> list[str]:
    """Arms of the run that a proxy hands requests to, by their metrics URLs; [] for an arm that is none."""
    if not arm.is_proxy:
        return []
    return [other.name for other in run.manifest.arms if f"{other.url}/metrics" in arm.metrics_urls]


def pool_text(run: Run, arm: ArmRecord) -> str:
    """``"a pool of cache and mtp"``; a number where not all of them are arms of the run."""
    names, count = backends(run, arm), len(arm.metrics_urls)
    return f"a pool of {' and '.join(names) if len(names) == count else f'{count} servers'}"


def serving(run: Run) -> list[Served]:
    """A line per level, proxy and server; nothing for arms that are asked directly."""
    cells: dict[tuple[Level, str], list[Cell]] = {}
    for cell in run.finished:
        cells.setdefault((cell.level, cell.record.arm), []).append(cell)
    found: list[Served] = []
    for (level, arm), own in cells.items():
        rows = [row for cell in own for row in metrics.ok(cell.measured)]
        counts = Counter(row.server_id for row in rows if row.server_id)
        for server, count in sorted(counts.items()):
            mine = [row for row in rows if row.server_id == server]
            direct = [
                row for cell in cells.get((level, server), []) for row in metrics.ok(cell.measured)
            ]  # fmt: skip
            found.append(
                Served(
                    level=level,
                    proxy=arm,
                    server=server,
                    requests=count,
                    share=count / sum(counts.values()),
                    hit_rate=metrics.usage_hit_rate(reusing(mine)) if reusing(mine) else None,
                    ttft=ratio(metrics.of_turn(mine, 1), metrics.of_turn(direct, 1), "ttft"),
                    tpot=ratio(mine, direct, "tpot"),
                )
            )
    return found


def reusing(rows: Sequence[Attempt]) -> list[Attempt]:
    """The attempts whose prompt some server has seen a part of."""
    return [row for row in rows if row.turn > 1 or row.workload == "shared_prefix"]


def ratio(mine: Sequence[Attempt], direct: Sequence[Attempt], latency: str) -> float | None:
    """Median of a latency ÷ median of the same; None where either has none."""
    above, below = metrics.latencies(mine, latency), metrics.latencies(direct, latency)
    if not above or not below:
        return None
    lower = metrics.quantile(below, 0.5)
    return metrics.quantile(above, 0.5) / lower if lower > 0 else None


def counts_text(run: Run) -> list[str]:
    """``"proxy: served by cache 24, mtp 24"``, a line per proxy; for the terminal."""
    totals: dict[str, Counter[str]] = {}
    for line in serving(run):
        totals.setdefault(line.proxy, Counter())[line.server] += line.requests
    return [
        f"{proxy}: served by {', '.join(f'{server} {count}' for server, count in sorted(counts.items()))}"
        for proxy, counts in totals.items()
    ]
