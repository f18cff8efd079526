"""Plans: which workloads, points and users are measured, how often, and in which order.

A plan is a TOML file (``locustfiles/plans/<name>.toml`` or a path of one's own)::

    about = "one line"
    repeats = 3
    users = [16]               # default levels of concurrent sessions
    sessions = 2               # measured sessions per user; left out: chosen by ``default_sessions``
    minutes = { simulated = 3, real = 9 }   # sessions are cut (never below ``fewest_sessions``) to fit
    [[workloads]]
    workload = "multi_turn"
    points = ["context=8192"]
    users = [1, 2, 4]          # instead of the plan's; ``sessions`` likewise

Unknown keys are errors. Everything here is pure: a plan plus the arms' names gives the list of cells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from locustfiles.point import WORKLOADS, read_point
from locustfiles.records import CellRecord, cell_id

PLANS = Path(__file__).parent / "plans"


class PlanError(ValueError):
    """A plan, or a knob turned on it, that cannot be carried out; the message says what to change."""


class Grid(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The points and levels of one workload."""

    workload: str
    points: list[str]
    users: list[int] | None = None
    sessions: int | None = None


class Minutes(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How long a run should take at most, wall time; sessions are cut towards it."""

    simulated: float | None = None
    real: float | None = None


class Plan(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A plan as read from TOML, or as knobs left it."""

    name: str = ""
    about: str = ""
    repeats: int = 3
    users: list[int] = []
    sessions: int | None = None
    seed: int | None = None
    minutes: Minutes | None = None
    workloads: list[Grid]


def plan_names() -> list[str]:
    """Names of the plans that come with Faceoff."""
    return sorted(path.stem for path in PLANS.glob("*.toml"))


def load_plan(name_or_path: str) -> Plan:
    """Read and check a plan by name or path.

    Raises:
        PlanError: naming the file and the key, or the plans there are.
    """
    path = Path(name_or_path)
    if "/" not in name_or_path and path.suffix != ".toml":
        path = PLANS / f"{name_or_path}.toml"
        if not path.is_file():
            raise PlanError(
                f"unknown plan {name_or_path!r}: there are {', '.join(plan_names())}, or give a .toml path"
            )
    try:
        plan = msgspec.toml.decode(path.read_bytes(), type=Plan)
    except OSError as error:
        raise PlanError(f"cannot read plan {path}: {error.strerror}") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise PlanError(f"plan {path}: {error}") from None
    plan.name = plan.name or path.stem
    if not all(c.isascii() and (c.isalnum() or c in "_-") for c in plan.name):
        raise PlanError(f"plan {path}: name {plan.name!r}: use letters, digits, _ and -")
    try:
        check_plan(plan)
    except PlanError as error:
        raise PlanError(f"plan {path}: {error}") from None
    return plan


def check_plan(plan: Plan) -> None:
    """Check numbers and points.

    Raises:
        PlanError: naming the key.
    """
    _at_least_one("repeats", plan.repeats)
    _levels("users", plan.users)
    if plan.sessions is not None:
        _at_least_one("sessions", plan.sessions)
    if plan.seed is not None and plan.seed < 0:
        raise PlanError(f"seed: {plan.seed} is negative")
    if not plan.workloads:
        raise PlanError("workloads: none named")
    seen: set[tuple[str, str, int]] = set()
    for index, grid in enumerate(plan.workloads):
        where = f"workloads[{index}]"
        if grid.workload not in WORKLOADS:
            raise PlanError(f"{where}.workload: unknown {grid.workload!r}: there are {', '.join(WORKLOADS)}")
        if not grid.points:
            raise PlanError(f"{where}.points: none named")
        for point in grid.points:
            try:
                read_point(grid.workload, point)
            except ValueError as error:
                raise PlanError(f"{where}.points: {error}") from None
            for users in dict.fromkeys(grid.users or plan.users):
                if (grid.workload, point, users) in seen:
                    raise PlanError(
                        f"{where}.points: {grid.workload} {point} at {users} users is named twice"
                    )
                seen.add((grid.workload, point, users))
        if grid.users is not None:
            _levels(f"{where}.users", grid.users)
        if not grid.users and not plan.users:
            raise PlanError(f"{where}.users: no levels, neither here nor for the plan")
        if grid.sessions is not None:
            _at_least_one(f"{where}.sessions", grid.sessions)


def _at_least_one(key: str, value: int) -> None:
    if value < 1:
        raise PlanError(f"{key}: {value} is not a whole number of at least 1")


def _levels(key: str, levels: list[int]) -> None:
    for level in levels:
        _at_least_one(key, level)
    if len(set(levels)) != len(levels):
        raise PlanError(f"{key}: {levels} names a level twice")


def turn_knobs(
    plan: Plan,
    *,
    users: Sequence[int] | None = None,
    workloads: Sequence[str] | None = None,
    repeats: int | None = None,
    sessions: int | None = None,
    seed: int | None = None,
) -> Plan:
    """A copy of the plan with what the command line overrides.

    Raises:
        PlanError: if nothing is left, or a value does not fit.
    """
    changed = msgspec.convert(msgspec.to_builtins(plan), Plan)
    if workloads is not None:
        named = [grid.workload for grid in plan.workloads]
        for workload in workloads:
            if workload not in named:
                raise PlanError(
                    f"unknown workload {workload!r}: plan {plan.name} has {', '.join(dict.fromkeys(named))}"
                )
        changed.workloads = [grid for grid in changed.workloads if grid.workload in workloads]
    if users is not None:
        changed.users = list(users)
        named_points: set[tuple[str, str]] = set()
        for grid in changed.workloads:
            # Grids that shared a point at other levels now share its levels: each point stays once.
            grid.users = None
            grid.points = [p for p in grid.points if (grid.workload, p) not in named_points]
            named_points |= {(grid.workload, point) for point in grid.points}
        changed.workloads = [grid for grid in changed.workloads if grid.points]
    if sessions is not None:
        changed.sessions = sessions
        for grid in changed.workloads:
            grid.sessions = None
    if repeats is not None:
        changed.repeats = repeats
    if seed is not None:
        changed.seed = seed
    check_plan(changed)
    return changed


def default_sessions(users: int, turns: int) -> int:
    """Measured sessions per user where the plan names none: at least 12 a cell and 2 a user.

    3 a user where sessions have follow-ups: their queueing differs more from session to session.
    """
    return max(3 if turns > 1 else 2, math.ceil(12 / users))


def fewest_sessions(users: int, turns: int) -> int:
    """Below this, cutting to fit ``minutes`` stops: at least 2 sessions a cell.

    6 where several users have follow-ups: now and then one queues behind another's cold first turn, and a
    median must stand that.
    """
    enough = 6 if turns > 1 and users > 1 else 2
    return max(1, math.ceil(enough / users))


def arm_order(arms: Sequence[str], place: int, repeat: int) -> list[str]:
    """Order of the arms in a block: rotated by one from block to block, and from repeat to repeat.

    ``place`` is the block's place within its repeat, from 0; repeats count from 1. Two arms: AB, BA, AB along
    a repeat, and AB, BA, AB over the repeats of the first point (BA, AB, BA of the second). With n arms every
    arm comes first, and at every other place, once in n repeats of a point, so that a drift within a block
    does not always favour the same arm.
    """
    shift = (place + repeat - 1) % len(arms)
    return [*arms[shift:], *arms[:shift]]


def expand(plan: Plan, arms: Sequence[str]) -> list[CellRecord]:
    """All cells in run order.

    Repeats are outermost: the repeats of a point lie as far apart in time as the run allows, so that slow
    drift (a GPU that warms up, a neighbour on the machine) shows in the spread between repeats and with it
    in the interval, instead of shifting all repeats of one point alike.
    """
    cells: list[CellRecord] = []
    block = 0
    for repeat in range(1, plan.repeats + 1):
        first_block = block
        for grid in plan.workloads:
            for text in grid.points:
                point = read_point(grid.workload, text)
                for users in grid.users or plan.users:
                    sessions = grid.sessions or plan.sessions or default_sessions(users, point.turns)
                    for arm in arm_order(arms, block - first_block, repeat):
                        cells.append(
                            CellRecord(
                                id=cell_id(grid.workload, point.text, users, repeat, arm),
                                arm=arm,
                                workload=grid.workload,
                                point=point.text,
                                users=users,
                                repeat=repeat,
                                sessions=sessions,
                                turns=point.turns,
                                order=len(cells),
                                block=block,
                            )
                        )
                    block += 1
    return cells


def plan_record(plan: Plan) -> dict[str, Any]:
    """The plan for the manifest, as plain data."""
    record: dict[str, Any] = msgspec.to_builtins(plan)
    return record
