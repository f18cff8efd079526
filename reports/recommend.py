"""A recommendation for a mix of workloads: the arm that costs least where it does not win."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from reports.compare import HIGHER_IS_BETTER
from reports.judge import JudgedCell, Judgement
from reports.words import list_text, times_text, workload_text


@dataclass(frozen=True)
class Recommendation:
    """What to put into production, for this mix and SLO."""

    mix: dict[str, float]
    slo: dict[str, float]
    arm: str | None
    why: str


def recommend(judgement: Judgement) -> Recommendation:
    """Weigh each workload's primary metric by the mix.

    An arm's cost in a cell is how many times worse than the best arm it is there; over a workload's cells and
    over the mix, costs are averaged as logarithms. With an SLO, the mean goodput over the mix counts instead.
    Capacity-bound cells (``neither``) count for nobody.
    """
    run, options = judgement.run, judgement.options
    ran = list(dict.fromkeys(cell.level[0] for cell in judgement.primary))
    mix = dict(options.mix) or {workload: 1 / len(ran) for workload in ran}
    slo = dict(options.slo)

    def nothing(why: str) -> Recommendation:
        return Recommendation(mix, slo, None, why)

    if not ran:
        return nothing("no verdict: no primary metric was measured on finished cells")
    missing = [workload for workload, weight in mix.items() if weight > 0 and workload not in ran]
    if missing:
        return nothing(f"no verdict: the mix asks for {list_text(missing)}, which this run did not measure")
    counted = {
        workload: [
            c for c in judgement.primary if c.level[0] == workload and c.winner not in (None, "neither")
        ]
        for workload in mix
        if mix[workload] > 0
    }
    empty = [workload for workload, cells in counted.items() if not cells]
    if empty:
        return nothing(f"no verdict: {list_text(empty)} in the mix has no cell with a verdict")
    if not any(cell.decided for cells in counted.values() for cell in cells):
        return nothing("no verdict: no cell of the mix has a clear winner")
    costs = {arm: cost(arm, counted, mix) for arm in run.arms}
    known = {arm: value for arm, value in costs.items() if value is not None}
    if len(known) < 2:
        return nothing("no verdict: fewer than two arms were measured on the whole mix")
    if slo:
        return by_goodput(judgement, counted, mix, slo)
    best = min(sorted(known), key=lambda arm: known[arm])
    second = min(sorted(set(known) - {best}), key=lambda arm: known[arm])
    lead = math.exp(known[second] - known[best])
    if lead <= 1 + options.margin:
        return nothing(f"{best} and {second} cost the same over this mix (within {options.margin:.0%})")
    why = why_text(best, second, lead, counted) + end_to_end(judgement, counted, mix, best)
    return Recommendation(mix, slo, best, why)


def cost(arm: str, counted: Mapping[str, list[JudgedCell]], mix: Mapping[str, float]) -> float | None:
    """Weighted mean of ln(times worse than the best arm); None if the arm lacks a cell."""
    total = sum(mix[workload] for workload in counted)
    result = 0.0
    for workload, cells in counted.items():
        logs: list[float] = []
        for cell in cells:
            if arm not in cell.values or cell.best is None:
                return None
            log = math.log(cell.values[arm] / cell.values[cell.best])
            logs.append(-log if cell.metric in HIGHER_IS_BETTER else log)
        result += mix[workload] / total * sum(logs) / len(logs)
    return result


def end_to_end(
    judgement: Judgement, counted: Mapping[str, list[JudgedCell]], mix: Mapping[str, float], best: str
) -> str:
    """Whether end-to-end time, which no primary metric is, agrees: a short wait can hide a slow answer."""
    whole = {
        workload: [
            cell
            for cell in judgement.cells
            if cell.metric == "e2e_p50"
            and cell.turn is None
            and cell.level in {counted_cell.level for counted_cell in cells}
        ]
        for workload, cells in counted.items()
    }
    if not all(whole.values()):
        return ""
    costs = {arm: cost(arm, whole, mix) for arm in judgement.run.arms}
    known = {arm: value for arm, value in costs.items() if value is not None}
    if best not in known or len(known) < 2:
        return ""
    fastest = min(sorted(known), key=lambda arm: known[arm])
    if fastest == best:
        return " By end-to-end time it leads as well."
    factor = math.exp(known[best] - known[fastest])
    if factor <= 1 + judgement.options.margin:
        return f" By end-to-end time {fastest} is as good."
    lead = f" By end-to-end time {fastest} would lead ({times_text(factor)})"
    return f"{lead}: prefer it where users wait for whole answers."


def why_text(best: str, second: str, lead: float, counted: Mapping[str, list[JudgedCell]]) -> str:
    """Where it wins, where it loses and by how much: the trade-off, said out loud."""
    wins: list[str] = []
    losses: list[str] = []
    for workload, cells in counted.items():
        for mine, target in ((True, wins), (False, losses)):
            factors = [
                cell.advantage[1] if mine else cell.values[best] / cell.values[cell.winner or best]
                for cell in cells
                if cell.decided and (cell.winner == best) is mine and cell.advantage is not None
            ]
            if factors:
                low, high = times_text(min(factors)), times_text(max(factors))
                span = low if low == high else f"{low} to {high}"
                target.append(f"{workload_text(workload)} ({span})")
    text = f"over this mix {second} is {times_text(lead)} slower"
    if wins:
        text += f"; {best} wins {list_text(wins)}"
    text += f" and loses {list_text(losses)}" if losses else " and loses nowhere with certainty"
    return f"{text[:1].upper()}{text[1:]}."


def by_goodput(
    judgement: Judgement,
    counted: Mapping[str, list[JudgedCell]],
    mix: Mapping[str, float],
    slo: dict[str, float],
) -> Recommendation:
    """The arm that meets the SLO for the largest share of attempts over the mix."""
    good: dict[str, float] = {}
    total = sum(mix[workload] for workload in counted)
    for arm in judgement.run.arms:
        shares = {
            workload: [
                cell.values[arm]
                for cell in judgement.cells
                if cell.metric == "goodput"
                and cell.turn is None
                and arm in cell.values
                and cell.level in {counted_cell.level for counted_cell in cells}
            ]
            for workload, cells in counted.items()
        }
        if all(shares.values()):
            good[arm] = sum(mix[w] / total * sum(found) / len(found) for w, found in shares.items())
    ranked = sorted(good, key=lambda arm: (-good[arm], arm))
    shown = list_text([f"{arm} {good[arm]:.0%}" for arm in ranked])
    why = f"share of attempts over this mix that met the SLO: {shown}"
    if len(ranked) < 2 or good[ranked[0]] - good[ranked[1]] <= judgement.options.margin:
        return Recommendation(dict(mix), slo, None, f"No clear difference; {why}.")
    return Recommendation(dict(mix), slo, ranked[0], f"{why[:1].upper()}{why[1:]}.")
