"""The folder of a run: where it lies, what the sweep writes there, what is found in a cell that has ended."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from locustfiles.arm_http import one_line
from locustfiles.cell_process import CONSOLE, CellEnd
from locustfiles.log_reason import log_reason
from locustfiles.records import Attempt, CellRecord, Done, read_csv, read_json, write_json

RESULTS = Path("results")


def make_run_folder(plan: str, out: Path | None) -> Path:
    """Make the run's folder and the one for its cells; its name is the run's name.

    Raises:
        FileExistsError: ``out`` holds a run already.
        OSError: it cannot be written.
    """
    if out is not None:
        if (out / "manifest.json").exists():
            raise FileExistsError(17, "it holds a run already: name another folder", str(out))
        (out / "cells").mkdir(parents=True, exist_ok=True)
        return out
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    RESULTS.mkdir(parents=True, exist_ok=True)
    for number in range(1, 100):
        folder = RESULTS / (f"{stamp}-{plan}" if number == 1 else f"{stamp}-{plan}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        (folder / "cells").mkdir()
        return folder
    raise FileExistsError(17, "no free name for the run's folder", str(RESULTS))


def drop_unstarted(folder: Path) -> None:
    """Remove a run folder that never got its manifest; anything in it that is not the sweep's own stays."""
    with contextlib.suppress(OSError):
        if (folder / "manifest.json").exists():
            return
        for path in (*folder.glob("tokens*.json"), folder / "manifest.json.part"):
            path.unlink(missing_ok=True)
        (folder / "cells").rmdir()
        folder.rmdir()


def link_latest(folder: Path) -> None:
    """Point ``results/latest`` to a run that lies in ``results``, in one step, where links can be made."""
    if folder.parent.resolve() != RESULTS.resolve():
        return
    part = RESULTS / f".latest.{os.getpid()}"
    with contextlib.suppress(OSError):
        part.unlink(missing_ok=True)
        part.symlink_to(folder.name)
        part.replace(RESULTS / "latest")


def certificate(host_id: str) -> tuple[dict[str, Any] | None, list[str]]:
    """The load generator's self-test from ``results/selftest.json``, if this machine made it; and remarks."""
    path = RESULTS / "selftest.json"
    try:
        found = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        return None, []
    except (OSError, msgspec.MsgspecError) as error:
        return None, [f"{path} cannot be read ({one_line(error, 120)}): run make selftest again"]
    if not isinstance(found, dict):
        return None, [f"{path} is no self-test: run make selftest again"]
    host = found.get("host")
    made_by = host.get("id") if isinstance(host, dict) else None
    if made_by != host_id:
        return None, [f"{path} was made on another machine: run make selftest here"]
    return found, []


@dataclass(frozen=True)
class CellResult:
    """What a cell left behind."""

    state: str
    """ok, incomplete (some planned attempts have no row), failed (no done.json) or skipped."""
    ok: int = 0
    planned: int = 0
    reason: str = ""
    first_error: str = ""


def read_result(folder: Path, cell: CellRecord, end: CellEnd) -> CellResult:
    """Judge a cell whose process has ended, by its files."""
    planned = cell.measured_planned
    ok, first_error = 0, ""
    with contextlib.suppress(OSError, ValueError):
        for row in read_csv(folder / "requests.csv", Attempt):
            if row.phase == "measure":
                ok += row.status == "ok"
            if row.status not in ("ok", "censored") and not first_error:
                first_error = one_line(f"{row.status} {row.error or row.http_status or ''}", 160)
    try:
        done = read_json(folder / "done.json", Done)
    except (OSError, ValueError):
        how = (
            f"no end within its {end.wall_seconds:.0f} s"
            if end.timed_out
            else f"exit code {end.exit_code}"
            if end.exit_code >= 0
            else f"signal {-end.exit_code}"
        )
        last = log_reason(folder / "locust.log") or log_reason(folder / CONSOLE)
        return CellResult("failed", ok, planned, f"{how}; {last}" if last else how, first_error)
    if done.complete and not end.timed_out:
        return CellResult("ok", ok, planned, "", first_error)
    reason = "stopped at its time limit" if end.timed_out else one_line(done.reason or "incomplete")
    return CellResult("incomplete", ok, planned, reason, first_error)


def complete_cells(folder: Path) -> int:
    """Number of cells of a run that did all they were to do."""
    count = 0
    for path in folder.glob("cells/*/done.json"):
        with contextlib.suppress(OSError, ValueError):
            done = read_json(path, Done)
            count += done.complete and not done.failed
    return count


def mark_failed(folder: Path, reason: str) -> None:
    """Note in a cell's done.json, where it has one, that its arm died in it; its rows stay as they are."""
    path = folder / "done.json"
    with contextlib.suppress(FileNotFoundError, ValueError):
        write_json(path, msgspec.structs.replace(read_json(path, Done), failed=reason))
