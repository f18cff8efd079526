"""Whole cells for tests: real Locust processes against the real simulator."""

import csv
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import msgspec
import requests

from locustfiles.prompts import TokenCounter, measure_table
from locustfiles.records import Attempt, read_csv

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    """A port that nobody listens on right now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def wait_until(condition, what: str, seconds: float = 60.0):
    """Poll: the events awaited here happen in other processes."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.05)
    return found


@contextmanager
def simulator(*flags: str):
    """A simulator with these flags at twenty times wall time; (URL, process)."""
    port = free_port()
    command = [sys.executable, "-m", "servers.sim", "--port", str(port), "--clock-scale", "20", *flags]
    with subprocess.Popen(
        [*command, "--calibration", "servers/calibrations/h100-qwen3.8-27b.toml"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        url = f"http://127.0.0.1:{port}"

        def healthy():
            assert process.poll() is None, "the simulator died at its start"
            try:
                return requests.get(f"{url}/health", timeout=1).ok
            except requests.ConnectionError:
                return False

        wait_until(healthy, "simulator")
        try:
            yield url, process
        finally:
            process.terminate()


def locust_command(workload: str, url: str, cell: Path, *more: str, users: int = 4) -> list[str]:
    """Locust as the sweep runs it for one cell."""
    return [
        *(sys.executable, "-m", "locust", "-f", f"locustfiles/{workload}.py", "--host", url),
        *("--headless", "-u", str(users), "-r", str(users), "--only-summary", "--exit-code-on-error", "0"),
        *("--csv", f"{cell}/locust", "--logfile", f"{cell}/locust.log", "--cell-dir", str(cell)),
        *("--seed", "7", *more),
    ]


def run_cell(workload: str, url: str, cell: Path, *more: str, users: int = 4, **options):
    """A whole cell, to its end."""
    cell.mkdir(parents=True, exist_ok=True)
    return subprocess.run(
        locust_command(workload, url, cell, *more, users=users),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        **options,
    )


def rows_of(cell: Path) -> list[Attempt]:
    """The attempts that a cell left."""
    return list(read_csv(cell / "requests.csv", Attempt))


def locust_counts(cell: Path) -> tuple[int, int]:
    """(requests, failures) of Locust's Aggregated row."""
    with (cell / "locust_stats.csv").open() as file:
        total = next(row for row in csv.DictReader(file) if row["Name"] == "Aggregated")
    return int(total["Request Count"]), int(total["Failure Count"])


@contextmanager
def endless_cell(url: str, cell: Path):
    """A cell that goes on until it is stopped, with some rows on disk; its process."""
    command = locust_command(
        "single_turn", url, cell, "--point", "prompt=64,output=16", "--sessions", "100000"
    )
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        rows = cell / "requests.csv"
        wait_until(lambda: rows.exists() and rows.read_text().count("\n") > 20, "rows on disk")
        yield process


def make_table(url, path):
    """Measure a token table on the simulator, for servers that cannot tokenise."""
    counter = TokenCounter(url, requests.get(f"{url}/v1/models", timeout=5).json()["data"][0]["id"])
    path.write_bytes(msgspec.json.encode(measure_table(counter)))
