"""How numbers and names read: one place, so that terminal, page and figures say the same."""

from __future__ import annotations

from locustfiles.records import parse_point

WORKLOADS = {
    "single_turn": "single prompts, cold",
    "shared_prefix": "shared prefix, unique suffixes",
    "multi_turn": "multi-turn conversations",
}
METRICS = {
    "decode_rate": "decode rate",
    "ttft_p50": "TTFT p50",
    "ttft_p95": "TTFT p95",
    "ttfa_p50": "TTFA p50",
    "tpot_p50": "TPOT p50",
    "e2e_p50": "E2E p50",
    "output_rate": "output rate",
    "goodput": "goodput",
}
POINT_WORDS = {"prompt": "prompt", "prefix": "prefix", "context": "context"}


def tokens_text(count: float) -> str:
    """8192 -> ``8K``, 1100 -> ``1.1K``, 96 -> ``96``."""
    if count < 1000:
        return f"{count:.0f}"
    return f"{count / 1024:.1f}".removesuffix(".0") + "K"


def point_text(point: str) -> str:
    """``context=8192,pace=lockstep`` -> ``8K context, lockstep``; what it does not know stays as it is."""
    try:
        items = parse_point(point)
    except ValueError:
        return point
    words: list[str] = []
    for name, value in items.items():
        if name in POINT_WORDS and value.isdigit():
            words.append(f"{tokens_text(int(value))} {POINT_WORDS[name]}")
        else:
            words.append(value if name == "pace" else f"{name}={value}")
    return ", ".join(words)


def users_text(users: int) -> str:
    """``1 user``, ``16 users``."""
    return f"{users} user" if users == 1 else f"{users} users"


def workload_text(workload: str) -> str:
    """The workload in words."""
    return WORKLOADS.get(workload, workload)


def metric_text(metric: str, turn: int | None) -> str:
    """``TTFT p50, turn 2``."""
    name = METRICS.get(metric, metric)
    return name if turn is None else f"{name}, turn {turn}"


def value_text(value: float | None, unit: str) -> str:
    """A number with its unit, three significant digits: ``12.3 ms``, ``1.02 s``, ``94.9 tok/s``, ``65 %``."""
    if value is None:
        return "unknown"
    if unit == "s":
        return f"{digits(value * 1000)} ms" if abs(value) < 1 else f"{digits(value)} s"
    if unit == "1":
        return f"{value:.0%}".replace("%", " %")
    return f"{digits(value)} {unit}"


def digits(value: float) -> str:
    """Three significant digits, never in exponent notation."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"


def times_text(factor: float) -> str:
    """``13.6×``."""
    return f"{factor:.1f}×" if factor >= 10 else f"{factor:.2f}×"


def range_text(factor: list[float] | tuple[float, float] | None) -> str:
    """``1.8–16.8×``."""
    if not factor:
        return "–"
    low, high = factor
    first, second = times_text(low), times_text(high)
    return first if first == second else f"{first.removesuffix('×')}–{second}"


def list_text(words: list[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def span_text(values: list[int], form: str = "{}") -> str:
    """``1–16`` of several levels, one number of one."""
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low}–{high}"
