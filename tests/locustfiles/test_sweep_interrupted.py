"""Ctrl-C, SIGTERM and SIGKILL: real processes, nothing left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.locustfiles import sweep_standin
from tests.locustfiles.sweep_standin import StandIn, serving

PLAN = """
repeats = 2
users = [2]
sessions = 1
[[workloads]]
workload = "single_turn"
points = ["prompt=64,output=8", "prompt=128,output=8"]
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """An empty folder with a plan of 8 cells."""
    (tmp_path / "plan.toml").write_text(PLAN, encoding="utf-8")
    return tmp_path


def until(holds: Callable[[], Any], seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return found


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def start_sweep(place: Path, standin: StandIn, mode: str) -> subprocess.Popen[str]:
    arms = f"a={standin.url} b={standin.url}"
    command = [
        sys.executable,
        sweep_standin.__file__,
        "sweep",
        mode,
        "--",
        "--plan",
        "plan.toml",
        "--arms",
        arms,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=place)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_cell_in_order_and_then_the_run(place: Path, ending: signal.Signals) -> None:
    with serving(StandIn()) as standin:
        process = start_sweep(place, standin, "hang")
        started = until(lambda: list(place.glob("results/2*/cells/*/started")))
        process.send_signal(ending)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    last = err.strip().splitlines()[-1]
    assert last.startswith("faceoff: interrupted: 0 of 8 cells complete; finished attempts are in results/")
    assert "Traceback" not in err
    cell = started[0].parent
    assert (cell / "done.json").exists(), "the cell got the time to write its last file"
    assert gone(int((cell / "pid").read_text()))


def test_a_second_ctrl_c_kills_a_cell_that_does_not_end(place: Path) -> None:
    with serving(StandIn()) as standin:
        process = start_sweep(place, standin, "stubborn")
        started = until(lambda: list(place.glob("results/2*/cells/*/started")))
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=15)
    assert process.returncode == 130
    assert gone(int((started[0].parent / "pid").read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_a_killed_sweep_leaves_no_orphan(place: Path) -> None:
    with serving(StandIn()) as standin:
        process = start_sweep(place, standin, "hang")
        started = until(lambda: list(place.glob("results/2*/cells/*/started")))
        process.kill()
        process.communicate(timeout=15)
        pid = int((started[0].parent / "pid").read_text())
        until(lambda: gone(pid))
    assert (started[0].parent / "done.json").exists()
