"""A run folder, read into typed records. Nothing here judges.

Reading is tolerant where a run may be incomplete or killed (cells that did not finish, half-written last
lines, missing server samples) and strict where going on would mislead (a newer schema, rows that belong to
another cell).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from locustfiles.records import (
    SCHEMA,
    ArmRecord,
    Attempt,
    CellRecord,
    Done,
    Manifest,
    ServerSample,
    read_csv,
    read_json,
)

Labels = dict[str, str]


class ReportError(Exception):
    """A mistake of the user or of a file: the message is one line that says what, where and what to do."""


class LabelledSample(ServerSample, kw_only=True):
    """A sample whose label set may be empty, which a CSV cannot tell from unknown."""

    labels: str = ""


@dataclass(frozen=True)
class ServerSeries:
    """The samples of one cell's ``server.csv``: (server, name without ``_total``, labels) -> [(t, value)]."""

    series: dict[tuple[int, str, str], list[tuple[float, float]]] = field(default_factory=dict)

    @classmethod
    def from_samples(cls, samples: Iterable[ServerSample]) -> ServerSeries:
        """Group samples by series, in the order of time."""
        grouped: defaultdict[tuple[int, str, str], list[tuple[float, float]]] = defaultdict(list)
        for sample in samples:
            name = sample.name.removesuffix("_total")
            grouped[(sample.server_id, name, sample.labels)].append((sample.t_ms, sample.value))
        for values in grouped.values():
            values.sort(key=lambda pair: pair[0])
        return cls(dict(grouped))

    def has(self, name: str) -> bool:
        """Whether the server exported ``name`` at all."""
        return any(key[1] == name for key in self.series)

    def increase(self, name: str, where: Callable[[Labels], bool] | None = None) -> float | None:
        """How much a counter grew over the cell, summed over servers and labels; None if not exported.

        A value below its predecessor means that the server restarted: what it then shows counts from 0.
        A series that first appears in the middle of the cell counts from 0 as well.
        """
        firsts: dict[int, float] = {}
        for (server, _, _), values in self.series.items():
            firsts[server] = min(firsts.get(server, values[0][0]), values[0][0])
        total: float | None = None
        for (server, series_name, labels), values in self.series.items():
            if series_name != name or (where and not where(split_labels(labels))):
                continue
            previous = values[0][1] if values[0][0] <= firsts[server] else 0.0
            grown = 0.0
            for _, value in values:
                grown += value - previous if value >= previous else value
                previous = value
            total = (total or 0.0) + grown
        return total

    def highest(self, name: str, where: Callable[[Labels], bool] | None = None) -> float | None:
        """Highest value that a gauge showed on any server; None if not exported."""
        found = [
            value
            for (_, series_name, labels), values in self.series.items()
            if series_name == name and (where is None or where(split_labels(labels)))
            for _, value in values
        ]
        return max(found, default=None)


def split_labels(labels: str) -> Labels:
    """``"a=1;b=2"`` -> ``{"a": "1", "b": "2"}``."""
    return {
        name: value for name, sep, value in (item.partition("=") for item in labels.split(";") if item) if sep
    }


@dataclass(frozen=True)
class Cell:
    """One planned cell as far as its folder tells it."""

    record: CellRecord
    folder: Path
    done: Done | None
    attempts: list[Attempt]
    server: ServerSeries
    problem: str | None
    """Why the cell cannot be judged; None for a finished, readable cell."""

    @property
    def measured(self) -> list[Attempt]:
        """Rows of phase ``measure``, whatever their status."""
        return [row for row in self.attempts if row.phase == "measure"]

    @property
    def level(self) -> tuple[str, str, int]:
        """What is compared across arms: (workload, point, users)."""
        return (self.record.workload, self.record.point, self.record.users)


@dataclass(frozen=True)
class Run:
    """A run folder."""

    folder: Path
    manifest: Manifest
    cells: list[Cell]
    remarks: list[str]
    """What the reader noticed: cells not in the manifest, and the like."""

    @property
    def arms(self) -> list[str]:
        """Arm names, base first."""
        names = [arm.name for arm in self.manifest.arms]
        base = self.manifest.base
        return [base, *(name for name in names if name != base)] if base in names else names

    @property
    def finished(self) -> list[Cell]:
        """Cells that can be judged."""
        return [cell for cell in self.cells if cell.problem is None]

    @property
    def unfinished(self) -> list[Cell]:
        """Cells that cannot, each with its ``problem``."""
        return [cell for cell in self.cells if cell.problem is not None]

    @property
    def simulated(self) -> bool:
        """Whether any arm is a simulator."""
        return self.manifest.simulated or any(arm.probe.simulated for arm in self.manifest.arms)

    def arm(self, name: str) -> ArmRecord | None:
        """The record of an arm."""
        return next((arm for arm in self.manifest.arms if arm.name == name), None)


def find_run(name: str, results: Path = Path("results")) -> Path:
    """The folder that the user means: a path, ``latest``, or a name below ``results``.

    Raises:
        ReportError: if there is none.
    """
    for path in (Path(name), results / name):
        if path.is_dir():
            return path.resolve()
    known = sorted(path.name for path in results.iterdir() if path.is_dir()) if results.is_dir() else []
    runs = [run for run in known if run not in ("latest", "servers")][-3:]
    hint = f"newest in {results}/: {', '.join(runs)}" if runs else f"{results}/ holds no run yet"
    raise ReportError(f"no such run: {name} is neither a folder nor a name below {results}/ ({hint})")


def read_run(folder: Path) -> Run:
    """Read a run folder.

    Raises:
        ReportError: no readable manifest, or one of a newer schema.
    """
    path = folder / "manifest.json"
    if not path.is_file():
        raise ReportError(f"{folder} holds no manifest.json: not a run (pass the folder above cells/)")
    try:
        check_schema(path)
        manifest = read_json(path, Manifest)
    except (OSError, ValueError) as error:
        raise ReportError(f"cannot read the manifest: {error}") from None
    if not manifest.arms:
        raise ReportError(f"{path} names no arms: nothing to compare")
    cells = [read_cell(folder, record) for record in sorted(manifest.cells, key=lambda cell: cell.order)]
    known = {cell.id for cell in manifest.cells}
    root = folder / "cells"
    found = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    remarks = [f"cells/{name} is not in the manifest and is left out" for name in found if name not in known]
    return Run(folder, manifest, cells, remarks)


def check_schema(path: Path) -> None:
    """Refuse files of a later schema before their fields are trusted.

    Raises:
        ReportError: if the file says so.
        ValueError: if it is not a JSON object.
    """

    class Stamp(msgspec.Struct):
        schema: int = SCHEMA

    schema = read_json(path, Stamp).schema
    if schema > SCHEMA:
        raise ReportError(
            f"{path} has schema {schema}, this Faceoff reads up to {SCHEMA}: re-judge it with a newer Faceoff"
        )


def read_cell(folder: Path, record: CellRecord) -> Cell:
    """Read one cell; whatever is wrong with it becomes its ``problem``."""
    place = folder / "cells" / record.id

    def unfinished(problem: str) -> Cell:
        return Cell(record, place, None, [], ServerSeries(), problem)

    if Path(record.id).name != record.id or record.id in ("", ".", ".."):
        return unfinished("its id is not a folder name")
    if not place.is_dir():
        return unfinished("not started")
    if not (place / "done.json").is_file():
        return unfinished(f"did not finish: no done.json{count_rows(place)}")
    try:
        check_schema(place / "done.json")
        done = read_json(place / "done.json", Done)
        attempts = read_attempts(place / "requests.csv", record)
    except ReportError:
        raise
    except (OSError, ValueError) as error:
        return unfinished(f"cannot be read: {relative(error, folder)}")
    if done.failed:
        return unfinished(f"failed: {done.failed}")
    try:
        server = ServerSeries.from_samples(read_csv(place / "server.csv", LabelledSample))
    except FileNotFoundError:
        server = ServerSeries()
    except (OSError, ValueError) as error:
        return unfinished(f"cannot be read: {relative(error, folder)}")
    return Cell(record, place, done, attempts, server, None)


def read_attempts(path: Path, record: CellRecord) -> list[Attempt]:
    """Rows of a cell's ``requests.csv``.

    Raises:
        ReportError: rows of a newer schema.
        ValueError: rows that do not fit, or that belong to another cell.
    """
    rows = list(read_csv(path, Attempt))
    expected = (record.arm, record.workload, record.point, record.users, record.repeat)
    for row in rows:
        if row.schema > SCHEMA:
            raise ReportError(f"{path} has schema {row.schema}, this Faceoff reads up to {SCHEMA}")
        if (row.arm, row.workload, row.point, row.users, row.repeat) != expected:
            other = f"{row.arm} {row.workload} {row.point} u{row.users} r{row.repeat}"
            raise ValueError(f"{path}: holds a row of another cell ({other})")
    return rows


def count_rows(place: Path) -> str:
    """``", 12 attempts on disk"`` for a cell that did not finish."""
    try:
        lines = (place / "requests.csv").read_bytes().count(b"\n")
    except OSError:
        return ""
    return f", {max(0, lines - 1)} attempts on disk"


def relative(error: Exception, folder: Path) -> str:
    """The error's text with paths relative to the run."""
    return str(error).replace(f"{folder}/", "")
