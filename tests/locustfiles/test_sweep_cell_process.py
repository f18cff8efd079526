from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from locustfiles.cell_process import CONSOLE, CellEnd, CellStart, run_cells
from tests.locustfiles.sweep_standin import __file__ as standin_file

ROOT = Path(__file__).parents[2]


def cell(mode: str, folder: Path) -> list[str]:
    return [sys.executable, standin_file, "cell", mode, str(folder), "2", "1", "1"]


def run_cell(command: list[str], folder: Path, *, timeout_s: float, stop_s: float = 20.0) -> CellEnd:
    """One cell alone."""
    return run_cells([CellStart(command, folder, timeout_s)], stop_s=stop_s)[0]


def test_a_cell_that_ends(tmp_path: Path) -> None:
    end = run_cell(cell("ok", tmp_path), tmp_path, timeout_s=60)
    assert (end.exit_code, end.timed_out) == (0, False)
    assert not (tmp_path / CONSOLE).exists(), "nothing said, no file"


def test_a_cell_that_falls_over_leaves_its_words(tmp_path: Path) -> None:
    end = run_cell(cell("crash", tmp_path), tmp_path, timeout_s=60)
    assert end.exit_code == 3
    assert "the cell fell over" in (tmp_path / CONSOLE).read_text(encoding="utf-8")


def test_a_cell_past_its_time_is_ended_in_order(tmp_path: Path) -> None:
    last = tmp_path / "done.json"
    script = f"trap 'echo > {last}; exit 0' TERM; while :; do sleep 0.05; done"
    end = run_cell(["sh", "-c", script], tmp_path, timeout_s=1)
    assert end.timed_out
    assert last.exists()


def test_a_cell_that_does_not_end_is_killed_with_its_children(tmp_path: Path) -> None:
    child = tmp_path / "child"
    script = f"trap '' TERM; sleep 600 & echo $! > {child}; while :; do sleep 0.05; done"
    end = run_cell(["sh", "-c", script], tmp_path, timeout_s=1, stop_s=0.3)
    assert end.timed_out
    assert end.exit_code == -9
    deadline = time.monotonic() + 10
    while _alive(int(child.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_cells_side_by_side_end_each_on_its_own(tmp_path: Path) -> None:
    """The first waits for the second: one after the other they would never end."""
    for name in ("first", "second", "late"):
        (tmp_path / name).mkdir()
    meet = f"while ! [ -e {tmp_path}/second/here ]; do sleep 0.02; done; exit 4"
    commands = {"first": meet, "second": f"touch {tmp_path}/second/here", "late": "sleep 600"}
    starts = [
        CellStart(["sh", "-c", command], tmp_path / name, 2.0 if name == "late" else 60.0)
        for name, command in commands.items()
    ]
    ends = run_cells(starts)
    assert [end.exit_code for end in ends] == [4, 0, -15]
    assert [end.timed_out for end in ends] == [False, False, True]


def test_when_one_cannot_be_started_the_others_are_ended(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    first = CellStart(["sh", "-c", f"echo $$ > {pid}; exec sleep 600"], tmp_path, 60.0)
    with pytest.raises(OSError, match="nowhere"):
        run_cells([first, CellStart(["true"], tmp_path / "nowhere", 60.0)])
    assert not pid.exists() or not _alive(int(pid.read_text()))


INTERRUPTED = """
import sys
from pathlib import Path
from locustfiles.cell_process import CellStart, run_cells
folder, limit = Path(sys.argv[1]), float(sys.argv[2])
stubborn = "trap 'echo > asked' TERM; echo $$ > pid; while :; do sleep 0.05; done"
starts = [CellStart(["sh", "-c", f"cd {folder}/{n}; {stubborn}"], folder / n, limit) for n in "ab"]
run_cells(starts, stop_s=600)
"""


@pytest.mark.parametrize("limit", ["600", "1"])
def test_a_second_interruption_leaves_nothing_behind(tmp_path: Path, limit: str) -> None:
    """Also where the first one came while a cell past its time was being ended, and must not get lost."""
    pids = []
    for name in "ab":
        (tmp_path / name).mkdir()
        pids.append(tmp_path / name / "pid")
    asked = [tmp_path / name / "asked" for name in "ab"]
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path), limit]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        _await(lambda: all(pid.exists() and pid.read_text() for pid in pids))
        if limit == "1":
            _await(lambda: any(path.exists() for path in asked))  # a cell is past its time and asked to end
        process.send_signal(signal.SIGINT)
        _await(lambda: all(path.exists() for path in asked))  # the interruption has reached both
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in stderr
    assert process.returncode != 0
    _await(lambda: not any(_alive(int(pid.read_text())) for pid in pids))


def _await(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] == "Z")
