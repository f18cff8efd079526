"""A run in progress: one Locust process per cell, and what becomes of each.

One arm is loaded at a time, unless the manifest says ``parallel_arms``: then the cells of a block run side
by side.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from locustfiles.arm_http import ArmHttp
from locustfiles.arms import Arm, ArmError
from locustfiles.cell_process import CONSOLE, CellStart, run_cells
from locustfiles.devices import Placement, device_variables, placement_of
from locustfiles.log_reason import log_reason
from locustfiles.records import CellRecord, Manifest, write_json
from locustfiles.run_folder import CellResult, mark_failed, read_result

ROOM = Path(__file__).parent

#: With less space than this no cell is started: it could not write its rows.
LEAST_FREE_BYTES = 2_000_000

#: Command line of a cell's process; tests put a stand-in here.
CellCommand = Callable[["Run", CellRecord], list[str]]


def say(line: str, end: str = "\n") -> None:
    """Progress, to stderr."""
    print(line, end=end, file=sys.stderr, flush=True)


@dataclass
class Run:
    """Everything that the cells of one run share."""

    folder: Path
    manifest: Manifest
    arms: dict[str, Arm]
    tables: dict[str, Path]
    """Token table of each arm."""
    dropped: list[str]
    nonce: bool
    estimates: dict[str, float] = field(default_factory=dict)
    """Cell id -> expected wall seconds."""

    def cell_folder(self, cell: CellRecord) -> Path:
        """Folder of a cell."""
        return self.folder / "cells" / cell.id


def cache_salt(run: str, arm: str, cell: str, attempt: int = 1) -> str:
    """One salt per try of a cell: no other cell, arm, run or try can have warmed its cache entries."""
    return hashlib.sha256("\n".join((run, arm, cell, str(attempt))).encode()).hexdigest()[:32]


def locust_command(run: Run, cell: CellRecord) -> list[str]:
    """The cell's Locust process. Holds no secret: keys travel in the environment."""
    arm = run.arms[cell.arm]
    record = next(record for record in run.manifest.arms if record.name == cell.arm)
    folder = run.cell_folder(cell)
    command = [
        sys.executable,
        "-m",
        "locust",
        "-f",
        str(ROOM / f"{cell.workload}.py"),
        "--headless",
        "--only-summary",
    ]
    command += ["--host", arm.url, "-u", str(cell.users), "-r", str(cell.users)]
    command += ["--csv", str(folder / "locust"), "--logfile", str(folder / "locust.log")]
    # A failed attempt is a row, not a crashed process.
    command += ["--exit-code-on-error", "0"]
    command += ["--arm", cell.arm, "--point", cell.point, "--repeat", str(cell.repeat)]
    command += ["--sessions", str(cell.sessions), "--seed", str(run.manifest.seed), "--cell-dir", str(folder)]
    # With "=", since a server names its model: no name must read as an option.
    command += [f"--model={record.probe.model or ''}", "--token-table", str(run.tables[cell.arm])]
    command += ["--start-spread", f"{cell.start_spread_s:g}", "--clock-scale", f"{cell.clock_scale:g}"]
    command += ["--pause", f"{cell.pause_s:g}"]
    command += ["--cache-salt", cache_salt(run.manifest.run, cell.arm, cell.id)]
    command += ["--metrics-url", ",".join(arm.metrics_urls)]
    if run.dropped:
        command += ["--drop-fields", ",".join(run.dropped)]
    if run.nonce:
        command += ["--nonce"]
    return command


@dataclass
class Progress:
    """Time left, from the estimates and how far off they were so far."""

    run: Run
    took: dict[str, float] = field(default_factory=dict)

    def left_s(self) -> float:
        """Expected wall seconds of the cells not yet run."""
        cells = self.run.manifest.cells
        ratios: dict[tuple[str, str], tuple[float, float]] = {}
        for cell in cells:
            if cell.id in self.took:
                for key in ((cell.workload, cell.arm), ("", "")):
                    took, expected = ratios.get(key, (0.0, 0.0))
                    ratios[key] = (took + self.took[cell.id], expected + self.run.estimates[cell.id])
        left = 0.0
        for cell in cells:
            if cell.id not in self.took:
                took, expected = ratios.get((cell.workload, cell.arm)) or ratios.get(("", "")) or (1.0, 1.0)
                left += self.run.estimates[cell.id] * took / expected
        return left


def clock(seconds: float) -> str:
    """``"2 min 05 s"``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def alive(http: ArmHttp, tries: int = 3) -> str | None:
    """None if the arm is alive; a busy server gets a second and a third chance."""
    why = None
    for attempt in range(tries):
        if attempt:
            time.sleep(1.0)
        why = http.health()
        if why is None:
            return None
    return why


def death(arm: Arm, why: str) -> str:
    """Why an arm is gone, in one line, with its log's last word where the log is known."""
    why = why.removeprefix(f"arm {arm.name}: ").removesuffix("; is the server up?")
    if arm.log is None:
        return f"arm {arm.name} is gone: {why}"
    last = log_reason(arm.log)
    return f"arm {arm.name} is gone: {why}; its log {arm.log} says: {last or 'nothing'}"


def restart_command(arm: str) -> list[str]:
    """The launcher's command, if it gave one: ``FACEOFF_RESTART_<ARM>``, else ``FACEOFF_RESTART``."""
    own = "FACEOFF_RESTART_" + arm.upper().replace("-", "_")
    return shlex.split(os.environ.get(own) or os.environ.get("FACEOFF_RESTART", ""))


def start_anew(arms: Sequence[str], placement: Placement) -> bool:
    """Start arms anew, dead or alive, on the devices that ``placement`` says.

    The command gets the arms' names as its last words; it says what it does on stderr.
    """
    command = restart_command(arms[0])
    if not command:
        return False
    say(f"starting arm {' and '.join(arms)} anew")
    try:
        done = subprocess.run(
            [*command, *arms],
            env=os.environ | device_variables(placement),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            check=False,
        )
    except OSError as error:
        say(f"cannot run {command[0]}: {error.strerror}")
        return False
    return done.returncode == 0


class Watch:
    """Which arms are alive. A dead one is started anew once, where that can be done, else it stays dead."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._restarted: set[str] = set()
        self.clients = {name: ArmHttp(arm) for name, arm in run.arms.items()}
        self.dead: dict[str, str] = {}
        """Arm -> why it will not be loaded any more."""
        self.placement = placement_of(run.manifest.cells, 1)

    def move(self, placement: Placement) -> None:
        """Have every arm on the device that ``placement`` says; where that fails, all are dead."""
        if placement == self.placement:
            return
        self.placement = placement
        where = ", ".join(f"{arm} on {device}" for arm, device in placement.items())
        say(f"swapping devices: {where}")
        if not start_anew(list(placement), placement):
            self.dead |= dict.fromkeys(placement, f"could not be started again for the swap ({where})")

    def look(self, name: str) -> str | None:
        """None if the arm is alive; else why not. Afterwards the arm is up again, or in ``dead``.

        A proxy is only as alive as the arms behind it.
        """
        gone = self._look_at(name)
        for other in self._behind(name):
            found = self._look_at(other)
            if other in self.dead and name not in self.dead:
                self.dead[name] = f"behind {name}: {self.dead[other]}"
            gone = gone or found
        return self.dead.get(name, gone)

    def _behind(self, name: str) -> list[str]:
        arms = self._run.arms
        return [
            other.name for other in arms.values() if other.name != name and other.url in arms[name].servers
        ]

    def _look_at(self, name: str) -> str | None:
        if name in self.dead:
            return self.dead[name]
        why = alive(self.clients[name])
        if why is None:
            return None
        reason = death(self._run.arms[name], why)
        say(reason)
        if (
            name not in self._restarted
            and start_anew([name], self.placement)
            and alive(self.clients[name]) is None
        ):
            self._restarted.add(name)
            self._run.manifest.notes.append(f"{reason}; it was started anew")
            # At once: whatever ends the run, it must not look as if nothing had happened.
            write_json(self._run.folder / "manifest.json", self._run.manifest)
        else:
            self.dead[name] = reason
        return reason

    def close(self) -> None:
        """Close the connections."""
        for client in self.clients.values():
            client.close()


def groups(manifest: Manifest) -> list[list[CellRecord]]:
    """Cells in run order, those that run side by side in one list."""
    if not manifest.parallel_arms:
        return [[cell] for cell in manifest.cells]
    return [list(group) for _, group in itertools.groupby(manifest.cells, key=lambda cell: cell.block)]


def run_all(run: Run) -> dict[str, CellResult]:
    """Run all cells in order; returns what became of each. A dead arm's remaining cells are skipped.

    Raises:
        OSError: the results folder is full or cannot be written; going on would lose every attempt.
    """
    results: dict[str, CellResult] = {}
    watch = Watch(run)
    progress = Progress(run)
    for group in groups(run.manifest):
        watch.move(placement_of(run.manifest.cells, group[0].repeat))
        for cell in group:
            watch.look(cell.arm)
        for cell in group:
            if cell.arm in watch.dead:
                results[cell.id] = CellResult("skipped", 0, cell.measured_planned, watch.dead[cell.arm])
                progress.took[cell.id] = run.estimates[cell.id]
                say(f"{_head(run, cell)}skipped: {watch.dead[cell.arm]}")
        live = [cell for cell in group if cell.arm not in watch.dead]
        if not live:
            continue
        if len(live) == 1:
            say(_head(run, live[0]), end="")
        else:
            say(f"{' and '.join(cell.arm for cell in live)} side by side …")
        started = time.monotonic()
        found = _run_group(run, live, watch)
        took = time.monotonic() - started
        for cell in live:
            progress.took[cell.id] = took / len(live)
            line = _told(found[cell.id], took)
            left = progress.left_s()
            line = f"{line}, {clock(left)} left" if left else line
            say(line if len(live) == 1 else _head(run, cell) + line)
        for cell in live:
            result = found[cell.id]
            if result.ok < result.planned and (gone := watch.look(cell.arm)) is not None:
                result = replace(result, state="failed", reason=gone)
                mark_failed(run.cell_folder(cell), gone)
            results[cell.id] = result
    watch.close()
    return results


def _head(run: Run, cell: CellRecord) -> str:
    total = len(run.manifest.cells)
    return (
        f"[{cell.order + 1:>{len(str(total))}}/{total}] {cell.workload} {cell.point} u{cell.users} "
        f"r{cell.repeat} {cell.arm} … "
    )


def _told(result: CellResult, took: float) -> str:
    """How a cell went, in a few words."""
    line = f"{took:.1f} s  {result.state} {result.ok}/{result.planned}"
    if result.state != "ok":
        line += f" ({result.reason})"
    if result.ok < result.planned and result.first_error:
        line += f", first error: {result.first_error}"
    return line


def _run_group(run: Run, cells: Sequence[CellRecord], watch: Watch) -> dict[str, CellResult]:
    """Cells side by side: set the simulators' clocks, run the processes, look at what they left."""
    results: dict[str, CellResult] = {}
    ready: list[CellRecord] = []
    for cell in cells:
        record = next(record for record in run.manifest.arms if record.name == cell.arm)
        try:
            if record.probe.simulated:
                watch.clients[cell.arm].set_clock_scale(cell.clock_scale)
            ready.append(cell)
        except ArmError as error:
            results[cell.id] = CellResult("failed", 0, cell.measured_planned, str(error))
    if shutil.disk_usage(run.folder).free < LEAST_FREE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(run.folder))
    starts = []
    for cell in ready:
        run.cell_folder(cell).mkdir(parents=True)
        limit = max(300.0, 120.0 + 6 * run.estimates[cell.id])
        starts.append(CellStart(cell.command, run.cell_folder(cell), limit))
    for cell, end in zip(ready, run_cells(starts), strict=True):
        folder = run.cell_folder(cell)
        results[cell.id] = read_result(folder, cell, end)
        if results[cell.id].state == "ok":
            # Locust's closing tables; what they say is in its CSVs.
            (folder / CONSOLE).unlink(missing_ok=True)
    return results


def finish(run: Run, results: dict[str, CellResult], wall_s: float) -> int:
    """Put what went wrong into the manifest, say how it went, and give the exit code."""
    bad = {cell_id: result for cell_id, result in results.items() if result.state != "ok"}
    total = len(run.manifest.cells)
    say(f"{total - len(bad)} of {total} cells finished in {clock(wall_s)}")
    if bad:
        run.manifest.notes += [f"cell {cell_id} {r.state}: {r.reason}" for cell_id, r in bad.items()]
        write_json(run.folder / "manifest.json", run.manifest)
    hopeless = [cell_id for cell_id, r in results.items() if r.state == "ok" and r.planned and not r.ok]
    print(run.folder, flush=True)
    if bad:
        reasons = list(dict.fromkeys(result.reason for result in bad.values()))
        more = f" (and {len(reasons) - 1} more reasons, see manifest.json)" if len(reasons) > 1 else ""
        say(f"faceoff: {len(bad)} of {total} cells did not finish: {reasons[0]}{more}")
        return 1
    if hopeless:
        error = results[hopeless[0]].first_error
        say(f"faceoff: in {len(hopeless)} of {total} cells no attempt succeeded, first error: {error}")
        return 1
    return 0
