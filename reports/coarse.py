"""A folder with nothing but Locust's own CSV files: shown, marked coarse, never judged."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reports.page import environment
from reports.read import ReportError
from reports.verdict import RecommendationRecord, Verdict

WHY = (
    "no verdict: plain Locust CSVs carry rounded percentiles and no evidence that the arms did the same work"
)


@dataclass(frozen=True)
class CoarseRow:
    """One line of a ``_stats.csv``, as Locust wrote it."""

    type: str
    name: str
    requests: str
    failures: str
    median: str
    mean: str
    p95: str
    highest: str


@dataclass(frozen=True)
class CoarseTable:
    """One ``_stats.csv``."""

    file: str
    rows: list[CoarseRow]


COLUMNS = {
    "type": "Type",
    "name": "Name",
    "requests": "Request Count",
    "failures": "Failure Count",
    "median": "Median Response Time",
    "mean": "Average Response Time",
    "p95": "95%",
    "highest": "Max Response Time",
}


def find_stats(folder: Path) -> list[Path]:
    """Locust's statistics files in a folder and below it."""
    return sorted(folder.glob("*_stats.csv"))


def read_stats(path: Path, folder: Path) -> CoarseTable:
    """Read one file.

    Raises:
        ReportError: if it is not one of Locust's.
    """
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as lines:
            rows = list(csv.DictReader(lines))
    except (OSError, csv.Error) as error:
        raise ReportError(f"cannot read {path}: {error}") from None
    missing = [name for name in COLUMNS.values() if rows and name not in rows[0]]
    if missing or not rows:
        raise ReportError(
            f"{path} is not a statistics file of Locust's (no column {', '.join(missing) or 'at all'})"
        )
    return CoarseTable(
        str(path.relative_to(folder)),
        [CoarseRow(**{field: shorten(row[name]) for field, name in COLUMNS.items()}) for row in rows],
    )


def shorten(text: str | None) -> str:
    """Locust writes means with 13 decimals."""
    try:
        return f"{float(text or ''):.0f}" if "." in (text or "") else text or ""
    except ValueError:
        return text or ""


def coarse_html(folder: Path, tables: Sequence[CoarseTable]) -> str:
    """The page."""
    return (
        environment().get_template("coarse.html.j2").render(name=folder.name, tables=tables, simulated=False)
    )


def coarse_verdict(folder: Path) -> Verdict:
    """A verdict file without verdicts, so that whatever reads it finds out why."""
    return Verdict(
        run=folder.name,
        simulated=False,
        arms=[],
        base="",
        cells=[],
        classes=[],
        crossovers=[],
        capacity=[],
        certificate=[],
        recommendation=RecommendationRecord(mix={}, slo={}, arm=None, why=WHY),
    )
