"""Measured points of a user's own server, as targets of a fit.

The file is TOML::

    source = "my server, 3 repeats of make load"
    acceptance = [0.82, 0.7, 0.6]        # each given that all before it were; leave out without drafts
    [model]                              # as in a calibration file; from the server's log and /metrics
    name = "my-model"
    kv_cache_tokens = 500000
    [[points]]
    users = 1
    prompt = 1024
    output = 512
    ttft_s = 0.31                        # medians; leave out what was not measured
    tpot_s = 0.0201
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from .calibration import Calibration, Draft, Model
from .replay import Load, Pattern, Replayed
from .targets import ALONE, CONCURRENT, Results, Target


class PointsError(Exception):
    """A file of points that cannot be used; the message names the file, the entry and the remedy."""


class Point(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One measured load with its medians (seconds)."""

    users: int
    prompt: int
    output: int
    ttft_s: float | None = None
    tpot_s: float | None = None
    caching: bool = False
    drafts: int = 0
    shared: int = 0
    max_num_batched_tokens: int = 8192
    pattern: Pattern = "independent"


class Points(msgspec.Struct, forbid_unknown_fields=True):
    """The whole file."""

    points: list[Point]
    source: str = ""
    model: Model | None = None
    acceptance: list[float] = []


def read_points(path: Path) -> Points:
    """Read and check a file. Raises PointsError."""
    try:
        found = msgspec.toml.decode(path.read_bytes(), type=Points)
    except OSError as error:
        raise PointsError(f"{path}: cannot be read ({error.strerror})") from None
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError) as error:
        raise PointsError(f"{path}: {error}; see docs/simulator.md for the keys") from None
    for number, point in enumerate(found.points, 1):
        if point.ttft_s is None and point.tpot_s is None:
            raise PointsError(f"{path}: point {number} gives neither ttft_s nor tpot_s")
        if min(point.users, point.prompt, point.output - 1, point.ttft_s or 1, point.tpot_s or 1) <= 0:
            raise PointsError(
                f"{path}: point {number}: users, prompt, times must be above 0, output at least 2"
            )
        if point.drafts and not found.acceptance:
            raise PointsError(f"{path}: point {number} has drafts; give acceptance, per position")
    if not found.points:
        raise PointsError(f"{path}: no [[points]]")
    return found


def _target(point: Point, metric: str, value: float, simulate: Callable[[Results], float]) -> Target:
    features = ("caching, " if point.caching else "") + (f"{point.drafts} drafts, " if point.drafts else "")
    return Target(
        name=f"{metric}, {features}{point.users} users, {point.prompt} in, {point.output} out",
        unit="s",
        low=value,
        high=value,
        tolerance=ALONE if point.users == 1 else CONCURRENT,
        simulate=simulate,
    )


def _flags(point: Point) -> tuple[str, ...]:
    caching = "--enable-prefix-caching" if point.caching else "--no-enable-prefix-caching"
    budget = ("--max-num-batched-tokens", str(point.max_num_batched_tokens))
    drafts = ("--spec-tokens", str(point.drafts)) if point.drafts else ()
    return (caching, *budget, *drafts)


def _measure(point: Point) -> Callable[[Results], Replayed]:
    load = Load(
        users=point.users,
        prompt=point.prompt,
        output=point.output,
        shared=point.shared,
        pattern=point.pattern,
    )
    return lambda results: results.get(_flags(point), load)


def _ttft(point: Point) -> Callable[[Results], float]:
    return lambda results: _measure(point)(results).ttft_p50()


def _tpot(point: Point) -> Callable[[Results], float]:
    return lambda results: 1 / _measure(point)(results).decode_rate()


def point_targets(points: Points, base: Calibration) -> tuple[Calibration, list[Target], list[str]]:
    """Calibration to start from, targets, and the constants that the points speak of."""
    start = msgspec.convert(msgspec.to_builtins(base), Calibration)
    start.source = points.source or "fitted to measured points"
    if points.model is not None:
        start.model = points.model
    if points.acceptance:
        start.draft = Draft(start.draft.step_s, start.draft.seq_s, points.acceptance)
    targets: list[Target] = []
    for point in points.points:
        if point.ttft_s is not None:
            targets.append(_target(point, "TTFT", point.ttft_s, _ttft(point)))
        if point.tpot_s is not None:
            targets.append(_target(point, "TPOT", point.tpot_s, _tpot(point)))
    names = [
        "request.fixed_s",
        "prefill.token_s",
        "prefill.pair_s",
        "prefill.chunk_s",
        "decode.step_s",
        "decode.seq_s",
    ]
    if any(point.caching for point in points.points):
        names.append("request.caching_s")
    if any(point.drafts for point in points.points):
        names += ["draft.step_s", "draft.seq_s"]
    return start, targets, names
