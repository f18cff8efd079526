"""How every figure is drawn: colours, styles, and a figure as inline SVG.

Colours are CSS variables of the page (light, dark and print each set their own), text stays text. Every
figure of a simulated run says so itself, since figures travel without their page.
"""

from __future__ import annotations

import html
import io
import re
from dataclasses import dataclass
from typing import Any

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from reports.judge import Judgement

INK = "#010203"
ARM_COLOURS = tuple(f"#0102{10 + place:02d}" for place in range(8))
"""Stand-ins that become CSS variables; matplotlib wants real colours."""
MARKERS = "osD^vPX*"
REM_PER_INCH = 6.6

RC: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Drawing:
    """A figure with its caption."""

    name: str
    title: str
    svg: str
    caption: str
    width: int
    """Natural width in rem."""


def drawing(judgement: Judgement, name: str, title: str, caption: str, figure: Figure) -> Drawing:
    """Close a figure."""
    svg = to_svg(figure, name, title, judgement.run.simulated)
    return Drawing(name, title, svg, caption, round(figure.get_figwidth() * REM_PER_INCH))


def to_svg(figure: Figure, name: str, label: str, simulated: bool) -> str:
    """Inline SVG: no prolog, ids unique in the page, colours as variables, a label for screen readers."""
    if simulated:
        # A title of the figure, not a text at a place: the layout keeps room for it.
        figure.suptitle("SIMULATED", x=0.99, ha="right", fontsize=8, fontweight="bold")
    FigureCanvasSVG(figure)
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.S)
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    for reference in ('id="', "url(#", 'xlink:href="#'):
        svg = svg.replace(reference, f"{reference}{name}-")
    svg = svg.replace(INK, "currentColor")
    for place, colour in enumerate(ARM_COLOURS):
        svg = svg.replace(colour, f"var(--arm{place})")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(label)}" ', 1)


def colour(judgement: Judgement, arm: str) -> str:
    """The colour of an arm, the same in every figure."""
    return ARM_COLOURS[judgement.run.arms.index(arm) % len(ARM_COLOURS)]


def marker(judgement: Judgement, arm: str) -> str:
    """The marker of an arm: never told by colour alone."""
    return MARKERS[judgement.run.arms.index(arm) % len(MARKERS)]
