"""Figures, one function each: from a judgement to a drawing, or None where the run has nothing to draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from locustfiles.records import parse_point
from reports import metrics
from reports.article import PUBLISHED
from reports.compare import PRIMARY
from reports.drawing import INK, RC, Drawing, colour, drawing, marker
from reports.judge import Judgement
from reports.read import Cell
from reports.words import digits, point_text, users_text, workload_text

PANELS = 6
"""Points that one figure shows."""


def draw_all(judgement: Judgement) -> list[Drawing]:
    """Every figure that this run can fill, in reading order."""
    found: list[Drawing] = []
    for draw in FIGURES:
        with mpl.rc_context({**RC, "svg.hashsalt": draw.__name__}):
            made = draw(judgement)
        if made is not None:
            found.append(made)
    return found


Measure = Callable[[Cell], float | None]


def cell_values(
    judgement: Judgement, workload: str, point: str, arm: str, measure: Measure
) -> dict[int, list[float]]:
    """Users -> the statistic of every repeat."""
    found: dict[int, list[float]] = {}
    for cell in judgement.run.finished:
        record = cell.record
        if (record.workload, record.point, record.arm) == (workload, point, arm):
            value = measure(cell)
            if value is not None:
                found.setdefault(record.users, []).append(value)
    return dict(sorted(found.items()))


def points_of(judgement: Judgement, workload: str) -> list[str]:
    """The points of a workload, in the order of the plan."""
    return list(
        dict.fromkeys(c.record.point for c in judgement.run.finished if c.record.workload == workload)
    )


def mean(values: Sequence[float]) -> float:
    """Geometric mean of positive values: what ratios are made of."""
    return math.exp(sum(math.log(value) for value in values) / len(values))


def panel(
    ax: Axes,
    judgement: Judgement,
    workload: str,
    point: str,
    measure: Measure,
    published: tuple[int | None, str],
) -> tuple[bool, bool]:
    """One panel: lines over users, or bars at a single level; repeats as points.

    Returns:
        (whether anything was drawn, whether a published number was).
    """
    series = {
        arm: found
        for arm in judgement.run.arms
        if (found := cell_values(judgement, workload, point, arm, measure))
    }
    levels = sorted({users for found in series.values() for users in found})
    ax.set_title(point_text(point))
    if not levels:
        return False, False
    single = len(levels) == 1
    for place, (arm, found) in enumerate(series.items()):
        shade, shape = colour(judgement, arm), marker(judgement, arm)
        if single:
            values = found[levels[0]]
            ax.bar(place, mean(values), width=0.6, color=shade, alpha=0.35)
            offsets = [place + 0.08 * (i - (len(values) - 1) / 2) for i in range(len(values))]
            ax.plot(offsets, values, shape, color=shade, markersize=4)
            ax.annotate(digits(mean(values)), (place, max(values)), ha="center", va="bottom", fontsize=8,
                        xytext=(0, 4), textcoords="offset points")  # fmt: skip
            continue
        ax.plot(list(found), [mean(values) for values in found.values()], "-", color=shade)
        for users, values in found.items():
            ax.plot([users] * len(values), values, shape, color=shade, markersize=4,
                    label=arm if users == min(found) else None)  # fmt: skip
    reference = overlay(ax, judgement, workload, point, published, list(series), levels)
    if single:
        ax.set_xticks(range(len(series)), list(series))
        ax.set_xlabel(users_text(levels[0]))
        ax.grid(False, axis="x")
        ax.margins(y=0.15)
    else:
        ax.set_xscale("log", base=2)
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_xticks(levels, [str(users) for users in levels])
        ax.set_xlabel("users")
    ax.set_ylim(bottom=0)
    return True, reference


def overlay(
    ax: Axes,
    judgement: Judgement,
    workload: str,
    point: str,
    published: tuple[int | None, str],
    arms: Sequence[str],
    levels: Sequence[int],
) -> bool:
    """The reference case's numbers as hollow markers, where point and level match; False if none does."""
    turn, metric = published
    drawn = False
    for number in PUBLISHED:
        if number.arm not in arms or number.users not in levels:
            continue
        if not number.matches(workload, point, turn, metric):
            continue
        drawn = True
        x = arms.index(number.arm) + 0.3 if len(levels) == 1 else number.users
        shade, shape = colour(judgement, number.arm), marker(judgement, number.arm)
        ax.plot([x, x], [number.low, number.high], ":", color=shade)
        ax.plot([x, x], [number.low, number.high], shape, color=shade, markersize=8, markerfacecolor="none",
                markeredgewidth=1.5)  # fmt: skip
    return drawn


def panels(
    judgement: Judgement, name: str, workload: str, measure: Measure, published: tuple[int | None, str],
    title: str, unit: str,
) -> Drawing | None:  # fmt: skip
    """A row of panels, one per point of a workload, each on its own linear scale from 0."""
    points = points_of(judgement, workload)[:PANELS]
    if not points:
        return None
    columns = min(3, len(points))
    rows = math.ceil(len(points) / columns)
    figure = Figure(figsize=(max(4.2, 3.1 * columns), 2.9 * rows), layout="constrained")
    drawn, reference = False, False
    handles: dict[str, Any] = {}
    for place, point in enumerate(points):
        ax = figure.add_subplot(rows, columns, place + 1)
        filled, overlaid = panel(ax, judgement, workload, point, measure, published)
        drawn, reference = drawn or filled, reference or overlaid
        ax.set_ylabel(unit)
        lines, labels = ax.get_legend_handles_labels()
        handles |= dict(zip(labels, lines, strict=True))
    if not drawn:
        return None
    if handles:
        figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=len(handles))
    caption = f"{title}; points are repeats, lines and bars their geometric mean"
    if reference:
        caption += "; large hollow markers are the reference case's published numbers"
    if len(points_of(judgement, workload)) > PANELS:
        caption += f"; the first {PANELS} of {len(points_of(judgement, workload))} points"
    if workload != "single_turn":
        paces = {point_items(point).get("pace", "independent") for point in points}
        caption += f". Pace: {' and '.join(sorted(paces))}"
    return drawing(judgement, name, title, f"{caption}.", figure)


def point_items(point: str) -> dict[str, str]:
    """The point's items; nothing for a point that cannot be parsed."""
    try:
        return parse_point(point)
    except ValueError:
        return {}


def decode_rate(judgement: Judgement) -> Drawing | None:
    """Decode rate of cold prompts against users."""

    def measure(cell: Cell) -> float | None:
        return metrics.statistic(cell, "decode_rate", None, {})

    title = "Decode rate per session, single prompts"
    return panels(judgement, "decode-rate", "single_turn", measure, (None, "decode_rate"), title, "tok/s")


def shared_prefix_ttft(judgement: Judgement) -> Drawing | None:
    """TTFT under a shared prefix."""

    def measure(cell: Cell) -> float | None:
        return metrics.statistic(cell, "ttft_p50", None, {})

    title = "TTFT p50, shared prefix"
    return panels(judgement, "shared-prefix", "shared_prefix", measure, (None, "ttft_p50"), title, "s")


def follow_up_ttft(judgement: Judgement) -> Drawing | None:
    """TTFT of the first follow-up, one panel per context."""

    def measure(cell: Cell) -> float | None:
        return metrics.statistic(cell, "ttft_p50", 2, {})

    title = "TTFT p50 of the first follow-up (turn 2), multi-turn"
    return panels(judgement, "follow-up", "multi_turn", measure, (2, "ttft_p50"), title, "s")


def turns(judgement: Judgement) -> Drawing | None:
    """TTFT by turn at the highest level of every context."""
    points = points_of(judgement, "multi_turn")[:PANELS]
    if not points:
        return None
    columns = min(3, len(points))
    rows = math.ceil(len(points) / columns)
    figure = Figure(figsize=(max(4.2, 3.1 * columns), 2.9 * rows), layout="constrained")
    handles: dict[str, Any] = {}
    for place, point in enumerate(points):
        ax = figure.add_subplot(rows, columns, place + 1)
        cells = [c for c in judgement.run.finished if c.level[:2] == ("multi_turn", point)]
        users = max(cell.record.users for cell in cells)
        last = max(cell.record.turns for cell in cells)
        arms = judgement.run.arms
        for number, arm in enumerate(arms):
            for turn in range(1, last + 1):
                values = [
                    value
                    for cell in cells
                    if cell.record.arm == arm and cell.record.users == users
                    and (value := metrics.statistic(cell, "ttft_p50", turn, {}))
                ]  # fmt: skip
                if not values:
                    continue
                x = turn + (number - (len(arms) - 1) / 2) * 0.8 / len(arms)
                bar = ax.bar(
                    x, mean(values), width=0.72 / len(arms), color=colour(judgement, arm), alpha=0.35
                )
                handles.setdefault(arm, bar)
                ax.plot([x] * len(values), values, marker(judgement, arm), color=colour(judgement, arm), ms=3)
        ax.set_title(f"{point_text(point)}, {users_text(users)}")
        ax.set_xticks(range(1, last + 1), [f"turn {turn}" for turn in range(1, last + 1)])
        ax.set_ylabel("s")
        ax.grid(False, axis="x")
        ax.set_ylim(bottom=0)
    if not handles:
        return None
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=len(handles))
    title = "TTFT p50 by turn, multi-turn"
    caption = f"{title}, at the highest level of each context; points are repeats."
    return drawing(judgement, "turns", title, caption, figure)


def hit_rates(judgement: Judgement) -> Drawing | None:
    """Prefix hit rate of every arm and workload, over all its cells."""
    run = judgement.run
    workloads = list(dict.fromkeys(cell.record.workload for cell in run.finished))
    figure = Figure(figsize=(max(4.2, 2.2 * len(workloads)), 2.6), layout="constrained")
    ax = figure.add_subplot()
    handles: dict[str, Any] = {}
    for number, arm in enumerate(run.arms):
        for place, workload in enumerate(workloads):
            values = [
                value
                for cell in run.finished
                if (cell.record.arm, cell.record.workload) == (arm, workload)
                and (value := metrics.hit_rate(cell)) is not None
            ]
            if not values:
                continue
            x = place + (number - (len(run.arms) - 1) / 2) * 0.8 / len(run.arms)
            height = 100 * sum(values) / len(values)
            bar = ax.bar(x, height, width=0.72 / len(run.arms), color=colour(judgement, arm), alpha=0.5)
            handles.setdefault(arm, bar)
            ax.annotate(f"{height:.0f}", (x, height), ha="center", va="bottom", fontsize=8)
    if not handles:
        return None
    ax.set_xticks(range(len(workloads)), [workload_text(workload) for workload in workloads])
    ax.set_ylabel("% of prompt tokens")
    ax.set_ylim(0, 108)
    ax.grid(False, axis="x")
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=len(handles))
    title = "Prefix-cache hit rate"
    caption = f"{title}: cached share of the prompt tokens of measured attempts, mean over cells."
    return drawing(judgement, "hit-rate", title, caption, figure)


def forest(judgement: Judgement) -> Drawing | None:
    """Every primary cell's ratio to the base with its interval, on a logarithmic axis."""
    rows = [(cell, arm, found) for cell in judgement.primary for arm, found in cell.against_base.items()]
    if not rows:
        return None
    base = judgement.run.arms[0]
    figure = Figure(figsize=(8, 1.1 + 0.28 * len(rows)), layout="constrained")
    ax = figure.add_subplot()
    margin = 1 + judgement.options.margin
    ax.axvspan(1 / margin, margin, color=INK, alpha=0.1, linewidth=0)
    ax.axvline(1, color=INK, linewidth=1)
    labels: list[str] = []
    for place, (cell, arm, found) in enumerate(rows):
        shade = colour(judgement, arm)
        if found.low is not None and found.high is not None:
            ax.plot([found.low, found.high], [place, place], "-", color=shade, linewidth=2)
        ax.plot([found.ratio], [place], marker(judgement, arm), color=shade, markersize=6)
        workload, point, users = cell.level
        name = PRIMARY[workload][0].split("_")[0].upper()
        labels.append(f"{arm}: {name}, {workload} {point_text(point)}, {users_text(users)}")
    ax.set_yticks(range(len(rows)), labels)
    ax.invert_yaxis()
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.grid(False, axis="y")
    ax.set_xlabel(f"ratio to {base} (above 1: slower than {base}; grey: the margin of {margin - 1:.0%})")
    title = f"Every primary metric, as a ratio to {base}"
    caption = (
        f"{title}, with its interval ({1 - judgement.alpha:.2%} each, so that all together hold with 95 %). "
        "All primary metrics are times: lower is better."
    )
    return drawing(judgement, "ratios", title, caption, figure)


FIGURES: tuple[Callable[[Judgement], Drawing | None], ...] = (
    forest,
    decode_rate,
    shared_prefix_ttft,
    follow_up_ttft,
    turns,
    hit_rates,
)
