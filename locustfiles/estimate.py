"""How long cells take, from what the probes saw: coarse, for progress, time limits, start spreads and scales.

Nothing is concluded from these figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from locustfiles.plan import Plan, fewest_sessions
from locustfiles.point import Point, read_point
from locustfiles.records import ArmProbe, CellRecord

#: Wall seconds that a cell's process needs besides its sessions (start, first and last samples).
PROCESS_S = 1.5
#: Decode rate per session falls with about this power of the sessions.
CROWDING = 0.15
#: Chunks per wall second that generator and simulator together carry with room to spare on two cores: at
#: 10000, with 16 streams, one first token in ten shared a read with later ones and was stamped late by a gap.
CHUNK_BUDGET = 6000.0
#: Wall seconds between two chunks of a stream at least: when they come closer, a busy moment of the machine
#: makes one read out of two.
SHORTEST_GAP_S = 0.002
#: Where a gap between chunks is at most this share of TTFT, being late by one does no harm (the certificate
#: allows as much), and the limits are what generator and simulator carry at all:
SMALL_GAP = 0.02
FULL_CHUNK_BUDGET = 10_000.0
FULL_SHORTEST_GAP_S = 0.001
#: Highest clock scale (a limit of the simulator).
SCALE_LIMIT = 20.0


@dataclass(frozen=True)
class Speed:
    """Speeds of an arm at one session, in model time."""

    prefill: float = 5000.0
    """Prompt tokens per second."""
    decode: float = 50.0
    """Output tokens per second and session."""
    chunk_tokens: float = 1.0
    """Output tokens per streamed chunk."""
    caching: bool = False
    block: int = 16


def speed_of(probe: ArmProbe) -> Speed:
    """The arm's speed as probed; a nominal figure for what the probe could not tell."""
    nominal = Speed()
    prefill = nominal.prefill
    if probe.prefill_seconds and probe.prefill_tokens:
        prefill = probe.prefill_tokens / probe.prefill_seconds
    return Speed(
        prefill=prefill,
        decode=probe.decode_tokens_per_second or nominal.decode,
        chunk_tokens=max(1.0, probe.acceptance_length or 1.0),
        caching=bool(probe.prefix_caching),
        block=probe.block_size or nominal.block,
    )


def decode_rate(speed: Speed, users: int) -> float:
    """Output tokens per second of one of ``users`` sessions."""
    return float(speed.decode / users**CROWDING)


def turn_seconds(point: Point, turn: int, speed: Speed, users: int) -> float:
    """Model seconds of one turn while ``users`` sessions share the server; decoding is shared."""
    return prefill_seconds(point, turn, speed, users) + point.output / decode_rate(speed, users)


def prefill_seconds(point: Point, turn: int, speed: Speed, users: int) -> float:
    """Model seconds until all of ``users`` prompts are prefilled: serial, each waits for everybody's."""
    prompt = point.prompt_tokens(turn)
    if speed.caching and turn > 1:
        prompt = min(prompt, point.growth + speed.block)
    elif speed.caching and point.prefix:
        prompt = min(prompt, point.suffix + speed.block)
    return users * prompt / speed.prefill


def session_seconds(point: Point, speed: Speed, users: int) -> float:
    """Model seconds of one session."""
    return sum(turn_seconds(point, turn, speed, users) for turn in range(1, point.turns + 1))


def cell_seconds(cell: CellRecord, speed: Speed) -> float:
    """Wall seconds of a whole cell: warm-up and measured sessions, and users that are not abreast."""
    point = read_point(cell.workload, cell.point)
    apart = 0.0 if point.lockstep or cell.users == 1 else 0.4
    sessions = cell.sessions + 1 + apart
    busy = session_seconds(point, speed, cell.users) + (point.turns - 1) * cell.pause_s
    return PROCESS_S + (sessions * busy + seeding_seconds(point, speed)) / cell.clock_scale


def seeding_seconds(point: Point, speed: Speed) -> float:
    """Model seconds of the two requests that seed a shared prefix before all others; the first is cold."""
    if not point.prefix:
        return 0.0
    cold, second = point.prompt_tokens(1) / speed.prefill, prefill_seconds(point, 1, speed, 1)
    return cold + second + 2 * point.output / decode_rate(speed, 1)


def run_seconds(cells: Sequence[CellRecord], seconds: Mapping[str, float], parallel: bool) -> float:
    """Wall seconds of cells, given each one's; ``parallel``: those of a block run side by side."""
    if not parallel:
        return sum(seconds[cell.id] for cell in cells)
    longest: dict[int, float] = {}
    for cell in cells:
        longest[cell.block] = max(longest.get(cell.block, 0.0), seconds[cell.id])
    return sum(longest.values())


def start_spread(point: Point, speeds: Sequence[Speed], users: int) -> float:
    """Model seconds over which the users' starts spread: one session of the fastest arm, unloaded.

    The same for every arm, so that starts are identical across arms; short enough that the last user has
    started before the first one has finished its warm-up. 0 in lockstep and for a single user.
    """
    if point.lockstep or users == 1:
        return 0.0
    return round(min(session_seconds(point, speed, 1) for speed in speeds), 3)


def reading_pause(point: Point, speeds: Sequence[Speed], users: int) -> float:
    """Mean model seconds between an answer and the follow-up: one turn of the fastest arm, unloaded.

    The same for every arm. 0 in lockstep, where there are no follow-ups, and for a single user, who meets
    nobody whatever the pauses; a point may name its own.
    """
    if point.lockstep or point.turns == 1:
        return 0.0
    if point.pause is not None:
        return point.pause
    if users == 1:
        return 0.0
    return round(min(session_seconds(point, speed, 1) for speed in speeds) / point.turns, 3)


def chunk_rate(point: Point, speed: Speed, users: int) -> float:
    """Chunks per model second that ``users`` sessions get together.

    In lockstep while all of them decode; else on average, since prefill takes its share of the time.
    """
    if point.lockstep:
        tokens = users * decode_rate(speed, users)
    else:
        tokens = users * point.turns * point.output / session_seconds(point, speed, users)
    return float(tokens / speed.chunk_tokens)


def chunk_gap(speed: Speed, users: int) -> float:
    """Model seconds between two chunks of one of ``users`` sessions."""
    return speed.chunk_tokens / decode_rate(speed, users)


def gaps_are_small(point: Point, speed: Speed, users: int) -> bool:
    """Whether a gap between chunks is small beside every turn's TTFT.

    Only in lockstep does everybody surely wait for all prompts; half of them are ahead of the median.
    """
    waits = [prefill_seconds(point, turn, speed, users) / 2 for turn in range(1, point.turns + 1)]
    return point.lockstep and chunk_gap(speed, users) <= SMALL_GAP * min(waits)


def clock_scale(
    point: Point,
    speeds: Sequence[Speed],
    users: int,
    certified_per_s: float | None = None,
    together: int = 1,
) -> float:
    """Clock scale for simulated arms, the same for all: as fast as chunk budget and shortest gap allow.

    ``certified_per_s``: chunks per second that the generator's self-test found safe, where there is one.
    ``together``: arms that are loaded at the same time and share the machine.
    """
    chunks = max(chunk_rate(point, speed, users) for speed in speeds)
    gap_s = min(chunk_gap(speed, users) for speed in speeds)
    budget, shortest = CHUNK_BUDGET, SHORTEST_GAP_S
    if all(gaps_are_small(point, speed, users) for speed in speeds):
        budget, shortest = FULL_CHUNK_BUDGET, FULL_SHORTEST_GAP_S
    budget = min(budget, certified_per_s or budget) / together
    fastest = min(SCALE_LIMIT, budget / chunks, gap_s / shortest)
    return max(1.0, math.floor(10 * fastest) / 10)


def fit_sessions(
    cells: Sequence[CellRecord],
    speeds: Mapping[str, Speed],
    minutes: float | None,
    parallel: bool = False,
) -> tuple[list[CellRecord], list[str]]:
    """Cut measured sessions until the estimate fits ``minutes``; always alike for every arm and repeat.

    The group of cells (workload, point, users) that costs most gives a session first, so that time ends up
    evenly spread; below ``fewest_sessions`` nothing is cut. Returns the cells and remarks.
    """
    groups: dict[tuple[str, str, int], list[CellRecord]] = {}
    for cell in cells:
        groups.setdefault((cell.workload, cell.point, cell.users), []).append(cell)
    planned = {key: group[0].sessions for key, group in groups.items()}

    def cost(group: Sequence[CellRecord]) -> float:
        seconds = {cell.id: cell_seconds(cell, speeds[cell.arm]) for cell in group}
        return run_seconds(group, seconds, parallel)

    costs = {key: cost(group) for key, group in groups.items()}
    while minutes is not None and sum(costs.values()) > minutes * 60:
        open_keys = [
            key
            for key, group in groups.items()
            if group[0].sessions > fewest_sessions(key[2], groups[key][0].turns)
        ]
        if not open_keys:
            break
        key = max(open_keys, key=lambda k: costs[k])
        for cell in groups[key]:
            cell.sessions -= 1
        costs[key] = cost(groups[key])
    cut = [
        f"{workload} {point} u{users} {planned[key]} -> {group[0].sessions}"
        for key, group in groups.items()
        for workload, point, users in [key]
        if group[0].sessions != planned[key]
    ]
    if not cut:
        return list(cells), []
    return list(cells), [
        f"measured sessions per user cut to fit about {minutes:g} min (SESSIONS=N overrides): "
        + "; ".join(cut)
    ]


def minutes_of(plan: Plan, simulated: bool) -> float | None:
    """The plan's time limit for these arms, None if sessions were fixed."""
    if plan.minutes is None or plan.sessions is not None:
        return None
    return plan.minutes.simulated if simulated else plan.minutes.real
