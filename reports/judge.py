"""A run, judged: numbers, checks and capacity brought together into one record per cell.

Order of precedence: a failed check withholds (``None``), then capacity (``neither``), then the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from reports import compare, metrics
from reports.capacity import Pressure, pressures
from reports.certificate import certify
from reports.check import Check
from reports.compare import DEFAULT_MARGIN, HIGHER_IS_BETTER, PRIMARY, UNITS, Blocks, Estimate, Level
from reports.metrics import Slo
from reports.read import Run
from reports.summary import SummaryRow, summarise

WHOLE_SESSION_METRICS = frozenset({"output_rate"})


@dataclass(frozen=True)
class Options:
    """What the user may choose when judging; none of it changes what was measured."""

    slo: Slo = field(default_factory=dict)
    mix: Mapping[str, float] = field(default_factory=dict)
    """Workload -> weight; empty = equal over the workloads that ran."""
    margin: float = DEFAULT_MARGIN


@dataclass(frozen=True)
class JudgedCell:
    """One metric and turn at one level, over all arms and repeats."""

    level: Level
    turn: int | None
    metric: str
    primary: bool
    values: dict[str, float]
    n: dict[str, int]
    repeats: int
    against_base: dict[str, Estimate]
    against_best: dict[str, Estimate]
    best: str | None
    winner: str | None
    reasons: list[str]
    decided: bool
    """Whether the winner is an arm."""

    @property
    def unit(self) -> str:
        """Unit of ``values``."""
        return UNITS[self.metric]

    @property
    def advantage(self) -> tuple[str, float, float | None, float | None] | None:
        """(runner-up, how many times better the best is, interval); None without two arms."""
        if self.best is None or not self.against_best:
            return None
        rates = self.metric in HIGHER_IS_BETTER
        runner = compare.best_arm({a: v for a, v in self.values.items() if a != self.best}, self.metric)
        found = self.against_best.get(runner or "")
        if runner is None or found is None:
            return None
        if not rates:
            return runner, found.ratio, found.low, found.high
        low, high = found.low, found.high
        return runner, 1 / found.ratio, None if high is None else 1 / high, None if low is None else 1 / low


@dataclass(frozen=True)
class Judgement:
    """Everything that terminal, verdict.json and page show."""

    run: Run
    options: Options
    summary: list[SummaryRow]
    checks: list[Check]
    pressures: dict[tuple[Level, str], Pressure]
    cells: list[JudgedCell]
    alpha: float
    """Error probability of a primary interval after Bonferroni."""

    @property
    def primary(self) -> list[JudgedCell]:
        """The cells that carry winners."""
        return [cell for cell in self.cells if cell.primary]


def judge(run: Run, options: Options) -> Judgement:
    """Judge a run. Pure."""
    checks = certify(run)
    pressure = pressures(run)
    levels = {
        (cell.workload, cell.point, cell.users) for cell in run.manifest.cells if cell.workload in PRIMARY
    }
    alpha = (1 - compare.CONFIDENCE) / max(1, len(levels))
    cells: list[JudgedCell] = []
    for metric, turn, workloads in questions(run, options):
        blocks = [
            found for found in compare.gather(run, metric, turn, options.slo) if found.level[0] in workloads
        ]
        for found in blocks:
            siblings = [other for other in blocks if other.level[0] == found.level[0]]
            if found.values:
                cells.append(judge_cell(run, found, siblings, options, checks, pressure, alpha))
    order = {level: place for place, level in enumerate(dict.fromkeys(cell.level for cell in run.cells))}
    names = list(UNITS)
    cells.sort(
        key=lambda c: (order[c.level], not c.primary, names.index(c.metric), -1 if c.turn is None else c.turn)
    )
    return Judgement(run, options, summarise(run, options.slo), checks, pressure, cells, alpha)


def questions(run: Run, options: Options) -> list[tuple[str, int | None, set[str]]]:
    """(metric, turn, workloads) of everything that is compared."""
    turns: dict[int | None, set[str]] = {}
    for record in run.manifest.cells:
        turns.setdefault(None, set()).add(record.workload)
        for turn in range(1, record.turns + 1 if record.turns > 1 else 1):
            turns.setdefault(turn, set()).add(record.workload)
    return [
        (metric, turn, workloads)
        for metric in UNITS
        if metric != "goodput" or options.slo
        for turn, workloads in turns.items()
        if turn is None or metric not in WHOLE_SESSION_METRICS
    ]


def judge_cell(
    run: Run,
    blocks: Blocks,
    siblings: Sequence[Blocks],
    options: Options,
    checks: Sequence[Check],
    pressure: Mapping[tuple[Level, str], Pressure],
    alpha: float,
) -> JudgedCell:
    """One metric at one level: values, ratios, and (primary only) the winner."""
    level, metric, turn = blocks.level, blocks.metric, blocks.turn
    primary = PRIMARY.get(level[0]) == (metric, turn)
    if not primary:
        alpha = 1 - compare.CONFIDENCE
    present = [arm for arm in run.arms if arm in blocks.arms]
    repeats = blocks.complete(present)
    values = {
        arm: value
        for arm in present
        if (value := blocks.value(arm, repeats or sorted(blocks.values))) is not None
    }
    best = compare.best_arm(values, metric)
    reasons: list[str] = []
    ranked = metric.endswith("_p95")
    short = {
        arm: count
        for arm in present
        if ranked and (count := attempts(run, level, arm, turn)) < compare.P95_ATTEMPTS
    }
    if short:
        shown = ", ".join(f"{arm} has {count}" for arm, count in short.items())
        reasons.append(f"no verdict: p95 needs {compare.P95_ATTEMPTS} measured attempts per arm; {shown}")

    def against(other: str | None) -> dict[str, Estimate]:
        if other is None or other not in present or short:
            return {}
        found = {
            arm: compare.estimate(blocks, siblings, arm, other, alpha) for arm in present if arm != other
        }
        return {arm: estimate for arm, estimate in found.items() if estimate is not None}

    against_best = against(best)
    winner: str | None = None
    if primary:
        every = {arm: against_best.get(arm) for arm in present if arm != best}
        winner, reasons = settle(run, level, metric, values, every, options, checks, pressure)
    return JudgedCell(
        level=level,
        turn=turn,
        metric=metric,
        primary=primary,
        values=values,
        n={arm: blocks.n.get(arm, 0) for arm in present},
        repeats=len(repeats),
        against_base=against(run.arms[0]),
        against_best=against_best,
        best=best,
        winner=winner,
        reasons=reasons,
        decided=winner in values,
    )


def attempts(run: Run, level: Level, arm: str, turn: int | None) -> int:
    """Measured attempts of an arm at a level, failures included."""
    return sum(
        len(metrics.of_turn(cell.measured, turn))
        for cell in run.finished
        if cell.level == level and cell.record.arm == arm
    )


def settle(
    run: Run,
    level: Level,
    metric: str,
    values: Mapping[str, float],
    against_best: Mapping[str, Estimate | None],
    options: Options,
    checks: Sequence[Check],
    pressure: Mapping[tuple[Level, str], Pressure],
) -> tuple[str | None, list[str]]:
    """Winner and reasons of a primary cell."""
    failed = [check.reason for check in checks if check.touches(level, metric)]
    if failed:
        return None, failed
    notes = [f"{arm} has no finished cell here" for arm in run.arms if arm not in values]
    states = {arm: found for arm in values if (found := pressure.get((level, arm))) is not None}
    bound = [arm for arm, state in states.items() if state.bound]
    if values and len(bound) == len(values):
        return "neither", [f"{arm} is capacity-bound: {states[arm].text}" for arm in bound]
    notes += [f"{arm} is capacity-bound: {states[arm].text}" for arm in bound]
    notes += [
        f"{arm} may be capacity-bound: {state.text}" for arm, state in states.items() if state.bound is None
        and not state.text.startswith("KV use unknown")
    ]  # fmt: skip
    decision = compare.decide(values, against_best, metric, options.margin)
    return decision.winner, decision.reasons + notes
