"""The roll-up: workload class -> winner -> by how much -> why, as a person would say it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reports import metrics
from reports.compare import PRIMARY, Level
from reports.judge import JudgedCell, Judgement
from reports.read import Cell, Run
from reports.words import (
    list_text,
    point_text,
    span_text,
    times_text,
    tokens_text,
    users_text,
    workload_text,
)


@dataclass(frozen=True)
class WorkloadClass:
    """The primary cells of a workload that came out the same way."""

    name: str
    workload: str
    winner: str | None
    factor: tuple[float, float] | None
    """Smallest and largest advantage over the runner-up among its cells."""
    why: str
    cells: list[JudgedCell]


def roll_up(judgement: Judgement) -> list[WorkloadClass]:
    """Classes in the order of the plan, decided ones first within a workload."""
    groups: dict[str, dict[str | None, list[JudgedCell]]] = {}
    for cell in judgement.primary:
        groups.setdefault(cell.level[0], {}).setdefault(cell.winner, []).append(cell)
    found: list[WorkloadClass] = []
    for workload, outcomes in groups.items():
        ranked = sorted(outcomes.items(), key=lambda item: (not item[1][0].decided, -len(item[1])))
        for winner, cells in ranked:
            gains = [cell.advantage for cell in cells]
            factors = [gain[1] for gain in gains if gain is not None] if cells[0].decided else []
            factor = (min(factors), max(factors)) if factors else None
            ran = [cell.level for same in outcomes.values() for cell in same]
            name = f"{workload_text(workload)}: {describe([cell.level for cell in cells], ran)}"
            found.append(WorkloadClass(name, workload, winner, factor, why(judgement.run, cells), cells))
    return found


def describe(levels: Sequence[Level], ran: Sequence[Level]) -> str:
    """``8K context, 16 users``; a full grid as spans, anything else point by point.

    ``ran``: every level of the workload, so that a span never runs over a level that came out otherwise.
    """
    steps = sorted({users for _, _, users in ran})
    users_of: dict[str, list[int]] = {}
    for _, point, users in levels:
        users_of.setdefault(point, []).append(users)
    points = list(users_of)
    if len({tuple(sorted(users)) for users in users_of.values()}) == 1:
        return f"{points_text(points)}, {users_span(users_of[points[0]], steps)}"
    return "; ".join(
        f"{point_text(point)} at {users_span(counts, steps)}" for point, counts in users_of.items()
    )


def points_text(points: Sequence[str]) -> str:
    """``4K to 64K context, lockstep``: what the first and the last have in common is said once."""
    first, last = point_text(points[0]), point_text(points[-1])
    if first == last:
        return first
    size, _, rest = first.partition(" ")
    other, _, same = last.partition(" ")
    return f"{size} to {other} {rest}" if rest and rest == same else f"{first} to {last}"


def users_span(users: Sequence[int], steps: Sequence[int]) -> str:
    """``1–16 users`` where these are neighbouring steps, ``1, 4 and 16 users`` where not."""
    ordered = sorted(users)
    if len(ordered) == 1:
        return users_text(ordered[0])
    between = [step for step in steps if ordered[0] <= step <= ordered[-1]]
    if between == ordered:
        return f"{span_text(ordered)} users"
    return f"{list_text([str(count) for count in ordered])} users"


def why(run: Run, cells: Sequence[JudgedCell]) -> str:
    """One sentence from hit rate, uncached prefill and acceptance; the cells' own reasons if undecided."""
    if not cells[0].decided:
        reasons = list(dict.fromkeys(reason for cell in cells for reason in cell.reasons))
        if not reasons:
            return "The arms come out the same."
        more = f" (and {len(reasons) - 2} more)" if len(reasons) > 2 else ""
        return sentence("; ".join(reasons[:2]) + more)
    winner = cells[0].winner or ""
    rivals = [arm for arm in run.arms if arm != winner and any(arm in cell.values for cell in cells)]
    levels = {cell.level for cell in cells}
    explain = decode_reason if PRIMARY[cells[0].level[0]][0].startswith("tpot") else prefill_reason
    return explain(run, levels, winner, rivals)


def sentence(text: str) -> str:
    """With a full stop. No capital is forced: most start with an arm's name, which is lower case."""
    return text if text.endswith(".") else f"{text}."


def mean_over(
    run: Run, levels: set[Level], arm: str, measure: Callable[[Cell], float | None]
) -> float | None:
    """Mean of what is known of a metric over an arm's finished cells."""
    values = [
        value
        for cell in run.finished
        if cell.record.arm == arm and cell.level in levels and (value := measure(cell)) is not None
    ]
    return sum(values) / len(values) if values else None


def prefill_reason(run: Run, levels: set[Level], winner: str, rivals: Sequence[str]) -> str:
    """TTFT differs by what had to be prefilled, where that differs."""
    turn = PRIMARY[next(iter(levels))[0]][1]
    unit = "follow-up" if turn else "request"

    def hits(cell: Cell) -> float | None:
        return metrics.hit_rate(cell, turn)

    def prefill(cell: Cell) -> float | None:
        return metrics.uncached_prefill(metrics.of_turn(cell.measured, turn))

    ours, theirs = mean_over(run, levels, winner, prefill), prefills(run, levels, rivals, prefill)
    rate = mean_over(run, levels, winner, hits)
    if ours is not None and theirs:
        text = f"{winner} prefilled {tokens_text(ours)} tokens per {unit}, " + list_text(
            [f"{arm} {tokens_text(value)}" for arm, value in theirs.items()]
        )
        if rate is not None:
            text += f"; {rate:.0%} of its prompt tokens came from the prefix cache"
        if min(theirs.values()) < 1.1 * ours:
            text = f"Not explained by prefill: {text}"
        return sentence(text)
    rates = {arm: mean_over(run, levels, arm, hits) for arm in [winner, *rivals]}
    known = [f"{arm} {value:.0%}" for arm, value in rates.items() if value is not None]
    return sentence(f"Prefix hit rates: {list_text(known)}" if known else "The servers do not tell why")


def prefills(
    run: Run, levels: set[Level], arms: Sequence[str], measure: Callable[[Cell], float | None]
) -> dict[str, float]:
    """Arm -> mean uncached prefill, of those that tell."""
    found = {arm: mean_over(run, levels, arm, measure) for arm in arms}
    return {arm: value for arm, value in found.items() if value is not None}


def decode_reason(run: Run, levels: set[Level], winner: str, rivals: Sequence[str]) -> str:
    """TPOT differs by the tokens that a decode step yields, where that differs."""
    lengths = {arm: mean_over(run, levels, arm, metrics.acceptance_length) for arm in [winner, *rivals]}
    ours = lengths[winner]
    rates = decode_text(run, levels, [winner, *rivals])
    if ours is not None and ours > 1:
        others = list_text([f"{arm} {lengths[arm] or 1:.1f}" for arm in rivals])
        return sentence(f"{winner} gets {ours:.1f} tokens out of a decode step ({others}); {rates}")
    if any(length is not None for length in lengths.values()):
        drafting = [arm for arm in rivals if lengths[arm] is not None]
        return sentence(f"Drafting does not pay on {list_text(drafting)} here; {rates}")
    return sentence(f"No arm drafts tokens; {rates}")


def decode_text(run: Run, levels: set[Level], arms: Sequence[str]) -> str:
    """``"mtp 94.9 tok/s per session, cache 49.9"``."""

    def rate(cell: Cell) -> float | None:
        return metrics.statistic(cell, "decode_rate", None, {})

    found = {arm: mean_over(run, levels, arm, rate) for arm in arms}
    shown = [f"{arm} {value:.1f}" for arm, value in found.items() if value is not None]
    return f"tokens per second and session: {', '.join(shown)}"


def advantage_text(cell: JudgedCell) -> str:
    """``"13.6× (11.9–15.2×) over mtp"``."""
    gain = cell.advantage
    if gain is None:
        return "–"
    runner, factor, low, high = gain
    span = "" if low is None or high is None else f" ({low:.2f}–{times_text(high)})"
    return f"{times_text(factor)}{span} over {runner}"
