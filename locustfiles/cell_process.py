"""One cell = one child process, in a session of its own, that never outlives the sweep.

Cells of arms that are loaded together run side by side.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Wall seconds that a cell gets to write its last files after SIGTERM, before SIGKILL.
STOP_SECONDS = 20.0

#: Wall seconds that one child is waited for before the others are looked at.
LOOK_SECONDS = 0.1

#: Where a cell's stdout and stderr go; kept only where something went wrong.
CONSOLE = "console.log"


@dataclass(frozen=True)
class CellEnd:
    """How the process of a cell ended."""

    exit_code: int
    """Negative: minus the signal that ended it."""
    timed_out: bool
    wall_seconds: float


@dataclass(frozen=True)
class CellStart:
    """A cell that is to run."""

    command: Sequence[str]
    folder: Path
    timeout_s: float
    """Wall seconds after which it is ended."""


class _Child:
    """The process of one cell."""

    def __init__(self, start: CellStart, environ: Mapping[str, str] | None) -> None:
        self.begun = time.monotonic()
        self.start = start
        self.end: CellEnd | None = None
        self._console = start.folder / CONSOLE
        with self._console.open("wb") as output:
            self.process = subprocess.Popen(
                list(start.command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=None if environ is None else dict(environ),
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )

    def wait(self, seconds: float, stop_s: float) -> None:
        """Wait at most ``seconds`` for the end; end the process where its time is up."""
        left = self.begun + self.start.timeout_s - time.monotonic()
        timed_out = False
        try:
            self.process.wait(max(0.0, min(seconds, left)))
        except subprocess.TimeoutExpired:
            if seconds < left:
                return
            timed_out = True
            self.stop(stop_s)
        else:
            self._clear()
        self.end = CellEnd(self.process.returncode, timed_out, time.monotonic() - self.begun)

    def stop(self, stop_s: float) -> None:
        """End the process and its group: SIGTERM, and SIGKILL where that does not do.

        Raises:
            KeyboardInterrupt: one more Ctrl-C came while waiting; the group was killed at once.
        """
        try:
            self.process.terminate()
            self.process.wait(stop_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if self.process.returncode is None:
                _kill_group(self.process.pid)
                self.process.wait()
            self._clear()

    def _clear(self) -> None:
        """Kill what is left of the process group; keep the console only where it says something.

        At once when the child has ended: later its id may be somebody else's.
        """
        _kill_group(self.process.pid)
        with contextlib.suppress(OSError):
            if self._console.stat().st_size == 0:
                self._console.unlink()


def run_cells(
    starts: Sequence[CellStart], *, environ: Mapping[str, str] | None = None, stop_s: float = STOP_SECONDS
) -> list[CellEnd]:
    """Run cells side by side, each to its end or to its time limit; the ends in the order of ``starts``.

    Each child gets its own session, so that Ctrl-C in the terminal reaches only the sweep: the sweep then
    ends the children in order (SIGTERM, so that they write their last files; SIGKILL to the whole group of
    one that does not). If the sweep itself is killed, Linux sends them SIGTERM.

    Raises:
        KeyboardInterrupt: passed on after the children have ended.
        OSError: if a command cannot be started or a folder cannot be written.
    """
    children: list[_Child] = []
    try:
        for start in starts:
            children.append(_Child(start, environ))
        while waiting := [child for child in children if child.end is None]:
            for child in waiting:
                child.wait(LOOK_SECONDS, stop_s)
    except BaseException:
        _stop_all([child for child in children if child.process.returncode is None], stop_s)
        raise
    return [child.end for child in children if child.end is not None]


def _stop_all(children: Sequence[_Child], stop_s: float) -> None:
    """Ask all to end, then wait for each; after one more Ctrl-C those that are left are killed at once."""
    for child in children:
        child.process.terminate()
    for child in children:
        try:
            child.stop(stop_s)
        except KeyboardInterrupt:
            stop_s = 0.0


def _kill_group(pid: int) -> None:
    """Kill what is left of the child's process group (its id is the child's pid)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _end_with_parent() -> None:
    """Runs in the child before exec: ask Linux for SIGTERM when the parent dies (PR_SET_PDEATHSIG = 1)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
