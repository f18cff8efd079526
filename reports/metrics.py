"""Each metric, defined once, from rows.

Durations are seconds of model time (requests.csv holds milliseconds). ``None`` is "unknown" and never 0.
Latencies come from measured attempts with status ``ok`` alone; shares and rates keep the others in their
denominators.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from locustfiles.records import Attempt
from reports.read import Cell, ServerSeries

Slo = Mapping[str, float]
"""Metric of one attempt (ttft, ttfa, tpot, e2e) -> its limit in seconds."""

LATENCIES = ("ttft", "ttfa", "tpot", "e2e")
Quantile = Literal["p50", "p90", "p95", "p99"]
QUANTILES: dict[str, float] = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}


def quantile(values: Sequence[float], q: float) -> float:
    """Exact quantile with linear interpolation (Hyndman and Fan's type 7, the default of NumPy).

    Raises:
        ValueError: without values.
    """
    if not values:
        raise ValueError("quantile of nothing")
    ordered = sorted(values)
    place = (len(ordered) - 1) * q
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def ok(rows: Iterable[Attempt]) -> list[Attempt]:
    """The attempts that worked."""
    return [row for row in rows if row.status == "ok"]


def of_turn(rows: Iterable[Attempt], turn: int | None) -> list[Attempt]:
    """The attempts of one turn; all for None."""
    return [row for row in rows if turn is None or row.turn == turn]


def seconds(row: Attempt, latency: str) -> float | None:
    """A latency of one attempt in seconds; None where it is unknown or undefined."""
    value: float | None = getattr(row, f"{latency}_ms")
    return None if value is None else value / 1000


def latencies(rows: Iterable[Attempt], latency: str) -> list[float]:
    """A latency of every attempt that worked and has one, in seconds."""
    return [value for row in ok(rows) if (value := seconds(row, latency)) is not None]


def intended_ttfts(rows: Iterable[Attempt]) -> list[float]:
    """First token - intended start of every attempt that worked and had one, in seconds.

    In an open loop this is what a user would have waited whose request the load generator could not send in
    time: a queue in front of the clock cannot hide in it (coordinated omission).
    """
    return [
        (row.first_token_ms - row.intended_ms) / 1000
        for row in ok(rows)
        if row.first_token_ms is not None and row.intended_ms is not None
    ]


def start_delays_ms(rows: Iterable[Attempt]) -> list[float]:
    """Actual - intended start of every attempt that had one, whatever its status, in model ms."""
    return [
        row.start_ms - row.intended_ms
        for row in rows
        if row.start_ms is not None and row.intended_ms is not None
    ]


def decode_rates(rows: Iterable[Attempt]) -> list[float]:
    """1 / TPOT of each attempt: tokens per second and session."""
    return [1 / value for value in latencies(rows, "tpot") if value > 0]


def busy_seconds(rows: Iterable[Attempt]) -> float | None:
    """Time during which at least one of these attempts ran, failed ones included (union of their spans)."""
    spans: list[tuple[float, float]] = []
    for row in rows:
        end = row.end_ms if row.end_ms is not None else row.last_token_ms
        if row.start_ms is not None and end is not None and end >= row.start_ms:
            spans.append((row.start_ms, end))
    if not spans:
        return None
    total, reach = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total / 1000


def output_rate(rows: Sequence[Attempt]) -> float | None:
    """Output tokens of the attempts that worked / time during which any attempt ran, tokens per second.

    Unknown as soon as one of them has no token count from the server: a partial sum would be a wrong rate.
    """
    good = ok(rows)
    if not good or any(row.output_tokens is None or row.token_source != "usage" for row in good):
        return None
    time = busy_seconds(rows)
    return sum(row.output_tokens or 0 for row in good) / time if time else None


def meets(row: Attempt, slo: Slo) -> bool:
    """Whether one attempt met every limit. What is unknown is not met (a gate that cannot see stays shut).

    A TPOT limit is void for an answer of one token, which has no TPOT.
    """
    if row.status != "ok":
        return False
    for latency, limit in slo.items():
        if latency == "tpot" and row.output_tokens == 1:
            continue
        value = seconds(row, latency)
        if value is None or value > limit:
            return False
    return True


def goodput(rows: Sequence[Attempt], slo: Slo) -> float | None:
    """Share of all attempts, failures included, that met the SLO; None without an SLO or attempts."""
    if not slo or not rows:
        return None
    return sum(meets(row, slo) for row in rows) / len(rows)


def usage_hit_rate(rows: Iterable[Attempt]) -> float | None:
    """Cached / prompt tokens of the attempts that worked; None if usage did not say so for every one.

    A sum over only those that tell would be biased: some servers leave the field out where nothing was
    cached.
    """
    good = ok(rows)
    if not good or any(row.cached_tokens is None or not row.prompt_tokens for row in good):
        return None
    return sum(row.cached_tokens or 0 for row in good) / sum(row.prompt_tokens or 0 for row in good)


def counter_hit_rate(servers: Sequence[ServerSeries]) -> float | None:
    """Prefix-cache hits / queries (tokens) by the servers' counters, warm-up included."""
    counted = [
        (server.increase("vllm:prefix_cache_hits"), server.increase("vllm:prefix_cache_queries"))
        for server in servers
    ]
    queries = sum(asked or 0 for _, asked in counted)
    if not queries or any(hits is None or asked is None for hits, asked in counted):
        return None
    return sum(hits or 0 for hits, _ in counted) / queries


def hit_rate(cell: Cell, turn: int | None = None) -> float | None:
    """Share of prompt tokens that came from the prefix cache: by usage where it tells, else by the server."""
    return pooled_hit_rate([cell]) if turn is None else usage_hit_rate(of_turn(cell.measured, turn))


def pooled_hit_rate(cells: Sequence[Cell]) -> float | None:
    """The same over all of ``cells``, tokens summed, as a server's counters over the run would have it."""
    told = usage_hit_rate(row for cell in cells for row in cell.measured)
    return counter_hit_rate([cell.server for cell in cells]) if told is None else told


def acceptance_length(cell: Cell) -> float | None:
    """Tokens per decode step = 1 + accepted / drafts over the cell; None without speculative decoding."""
    drafts = cell.server.increase("vllm:spec_decode_num_drafts")
    accepted = cell.server.increase("vllm:spec_decode_num_accepted_tokens")
    return 1 + accepted / drafts if drafts and accepted is not None else None


def preemptions(cell: Cell) -> float | None:
    """Requests preempted during the cell."""
    return cell.server.increase("vllm:num_preemptions")


def kv_use_max(cell: Cell) -> float | None:
    """Highest share of the KV pool seen in use."""
    return cell.server.highest("vllm:kv_cache_usage_perc")


def waited_for_capacity(cell: Cell) -> float | None:
    """Highest number of requests seen waiting for capacity; None if the server does not say why they wait."""
    return cell.server.highest(
        "vllm:num_requests_waiting_by_reason", lambda labels: labels.get("reason") == "capacity"
    )


def uncached_prefill(rows: Iterable[Attempt]) -> float | None:
    """Mean prompt tokens per attempt that had to be computed, i.e. were not cached."""
    good = ok(rows)
    if not good or any(row.cached_tokens is None or row.prompt_tokens is None for row in good):
        return None
    return sum((row.prompt_tokens or 0) - (row.cached_tokens or 0) for row in good) / len(good)


def statistic(cell: Cell, metric: str, turn: int | None, slo: Slo) -> float | None:
    """The statistic of one cell that comparisons are made of, in seconds, tokens per second or as a share.

    ``metric``: a latency with its quantile (``ttft_p50``), ``decode_rate`` (mean), ``output_rate`` or
    ``goodput``.

    Raises:
        ValueError: for any other metric.
    """
    rows = of_turn(cell.measured, turn)
    if metric == "output_rate":
        return output_rate(rows)
    if metric == "goodput":
        return goodput(rows, slo)
    if metric == "decode_rate":
        rates = decode_rates(rows)
        return sum(rates) / len(rates) if rates else None
    latency, _, rank = metric.partition("_")
    if latency not in LATENCIES or rank not in QUANTILES:
        raise ValueError(f"no such metric: {metric}")
    values = latencies(rows, latency)
    return quantile(values, QUANTILES[rank]) if values else None


def samples(cell: Cell, metric: str, turn: int | None) -> int:
    """How many attempts a cell's statistic rests on."""
    rows = of_turn(cell.measured, turn)
    if metric == "goodput":
        return len(rows)
    if metric == "output_rate":
        return len(ok(rows))
    return len(latencies(rows, "tpot" if metric == "decode_rate" else metric.partition("_")[0]))
