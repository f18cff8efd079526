"""``verdict.json``, schema 1: what was concluded, for machines."""

from __future__ import annotations

import msgspec

from reports import classes as roll
from reports.capacity import Outcome, capacity_at, crossings, level_goodputs, slo_text
from reports.judge import Judgement
from reports.recommend import recommend

SCHEMA = 1


class Ratio(msgspec.Struct, kw_only=True):
    """arm / base for the metric as it stands; bounds are null where the sample gives no interval."""

    ratio: float
    low: float | None
    high: float | None


class VerdictCell(msgspec.Struct, kw_only=True):
    """One metric and turn at one level. ``turn`` null = all turns."""

    workload: str
    point: str
    users: int
    turn: int | None
    metric: str
    unit: str
    primary: bool
    values: dict[str, float]
    n: dict[str, int]
    repeats: int
    against_base: dict[str, Ratio]
    winner: str | None
    reasons: list[str]


class VerdictClass(msgspec.Struct, kw_only=True):
    """A row of the roll-up table."""

    name: str = msgspec.field(name="class")
    workload: str
    winner: str | None
    factor: tuple[float, float] | None
    why: str


class Crossover(msgspec.Struct, kw_only=True):
    """The load at which the winner changes, between the nearest levels with a clear winner."""

    workload: str
    point: str
    metric: str
    from_: str = msgspec.field(name="from")
    to: str
    users: float
    low: float
    high: float


class Capacity(msgspec.Struct, kw_only=True):
    """The highest level at which an arm still met the SLO; null = not even at the lowest."""

    arm: str
    workload: str
    point: str
    metric: str
    slo: str
    users: int | None


class CheckLine(msgspec.Struct, kw_only=True):
    """A line of the certificate; ``ok`` null = not checked."""

    check: str
    arm: str
    ok: bool | None
    value: str
    limit: str


class RecommendationRecord(msgspec.Struct, kw_only=True):
    """What to put into production, if the run tells."""

    mix: dict[str, float]
    slo: dict[str, float]
    arm: str | None
    why: str


class Verdict(msgspec.Struct, kw_only=True):
    """The file."""

    schema: int = SCHEMA
    run: str
    simulated: bool
    arms: list[str]
    base: str
    cells: list[VerdictCell]
    classes: list[VerdictClass]
    crossovers: list[Crossover]
    capacity: list[Capacity]
    certificate: list[CheckLine]
    recommendation: RecommendationRecord


def rounded(value: float) -> float:
    """Six significant digits: more would be noise, and files stay comparable by eye."""
    return float(f"{value:.6g}")


def to_verdict(judgement: Judgement) -> Verdict:
    """The file's record."""
    run = judgement.run
    advice = recommend(judgement)
    return Verdict(
        run=run.manifest.run,
        simulated=run.simulated,
        arms=run.arms,
        base=run.arms[0],
        cells=[
            VerdictCell(
                workload=cell.level[0],
                point=cell.level[1],
                users=cell.level[2],
                turn=cell.turn,
                metric=cell.metric,
                unit=cell.unit,
                primary=cell.primary,
                values={arm: rounded(value) for arm, value in cell.values.items()},
                n=cell.n,
                repeats=cell.repeats,
                against_base={
                    arm: Ratio(
                        ratio=rounded(found.ratio),
                        low=None if found.low is None else rounded(found.low),
                        high=None if found.high is None else rounded(found.high),
                    )
                    for arm, found in cell.against_base.items()
                },
                winner=cell.winner,
                reasons=cell.reasons,
            )
            for cell in judgement.cells
        ],
        classes=[
            VerdictClass(
                name=found.name,
                workload=found.workload,
                winner=found.winner,
                factor=found.factor and (rounded(found.factor[0]), rounded(found.factor[1])),
                why=found.why,
            )
            for found in roll.roll_up(judgement)
        ],
        crossovers=find_crossovers(judgement),
        capacity=find_capacity(judgement),
        certificate=[
            CheckLine(check=c.check, arm=c.arm, ok=c.ok, value=c.value, limit=c.limit)
            for c in judgement.checks
        ],
        recommendation=RecommendationRecord(mix=advice.mix, slo=advice.slo, arm=advice.arm, why=advice.why),
    )


def find_crossovers(judgement: Judgement) -> list[Crossover]:
    """Crossovers of every workload, point and primary metric."""
    lines: dict[tuple[str, str, str], list[Outcome]] = {}
    for cell in judgement.primary:
        workload, point, users = cell.level
        outcome = Outcome(users, cell.winner, cell.values)
        lines.setdefault((workload, point, cell.metric), []).append(outcome)
    return [
        Crossover(
            workload=workload,
            point=point,
            metric=metric,
            from_=found.loser,
            to=found.winner,
            users=rounded(found.users),
            low=found.low,
            high=found.high,
        )
        for (workload, point, metric), outcomes in lines.items()
        for found in crossings(outcomes, judgement.run.arms)
    ]


def find_capacity(judgement: Judgement) -> list[Capacity]:
    """Capacity of every arm, workload and point; nothing without an SLO."""
    slo = judgement.options.slo
    if not slo:
        return []
    return [
        Capacity(
            arm=arm,
            workload=workload,
            point=point,
            metric="goodput",
            slo=slo_text(slo),
            users=capacity_at(goodputs),
        )
        for (arm, workload, point), goodputs in level_goodputs(judgement.run, slo).items()
    ]
