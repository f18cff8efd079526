"""One cell = one child process, in a session of its own, that never outlives the sweep."""

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

#: Where a cell's stdout and stderr go; kept only where something went wrong.
CONSOLE = "console.log"


@dataclass(frozen=True)
class CellEnd:
    """How the process of a cell ended."""

    exit_code: int
    """Negative: minus the signal that ended it."""
    timed_out: bool
    wall_seconds: float


def run_cell(
    command: Sequence[str],
    folder: Path,
    *,
    timeout_s: float,
    environ: Mapping[str, str] | None = None,
    stop_s: float = STOP_SECONDS,
) -> CellEnd:
    """Run a cell to its end, or to ``timeout_s`` wall seconds.

    The child gets its own session, so that Ctrl-C in the terminal reaches only the sweep: the sweep then ends
    the child in order (SIGTERM, so that it writes its last files; SIGKILL to its whole group when it does
    not). If the sweep itself is killed, Linux sends the child SIGTERM.

    Raises:
        KeyboardInterrupt: passed on after the child has ended.
        OSError: if the command cannot be started or the folder cannot be written.
    """
    started = time.monotonic()
    console = folder / CONSOLE
    timed_out = False
    with console.open("wb") as output:
        child = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=None if environ is None else dict(environ),
            start_new_session=True,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        try:
            try:
                child.wait(timeout_s)
            except subprocess.TimeoutExpired:
                timed_out = True
                _stop(child, stop_s)
        except BaseException:
            _stop(child, stop_s)
            raise
        finally:
            _kill_group(child.pid)
    with contextlib.suppress(OSError):
        if console.stat().st_size == 0:
            console.unlink()
    return CellEnd(child.returncode, timed_out, time.monotonic() - started)


def _stop(child: subprocess.Popen[bytes], stop_s: float) -> None:
    """End the child; a second Ctrl-C while waiting kills it at once."""
    try:
        child.terminate()
        child.wait(stop_s)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        _kill_group(child.pid)
        child.wait()


def _kill_group(pid: int) -> None:
    """Kill what is left of the child's process group (its id is the child's pid)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _end_with_parent() -> None:
    """Runs in the child before exec: ask Linux for SIGTERM when the parent dies (PR_SET_PDEATHSIG = 1)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
