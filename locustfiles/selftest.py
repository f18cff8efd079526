"""Measures this load generator: whole Locust processes against a metronome server of known timing.

``python -m locustfiles.selftest`` raises the number of streams until the p99 error of TTFT passes 2 ms or the
generator's core is full, and writes what it carried safely to ``results/selftest.json``. Runs on this machine
put that certificate into their manifest, and the reports compare each cell with it.

The truth is the server's: the kernel's stamp of a request's arrival there, and the time at which it wrote the
first content chunk. The error is what the row says minus that.
"""

from __future__ import annotations

import argparse
import csv
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from locustfiles.host import host_facts
from locustfiles.records import Attempt, Done, read_csv, read_json, write_json

LEVELS = (16, 64, 128, 256, 512, 1024)
ERROR_LIMIT_MS = 2.0
CPU_LIMIT = 0.9
FIRST_MS, GAP_MS, CHUNKS = 300.0, 20.0, 128
SALT = "selftest"

RESULT = Path("results/selftest.json")


class Level(msgspec.Struct, kw_only=True):
    """What one number of concurrent streams cost, and how wrong it was against the server's log."""

    streams: int
    requests: int
    failed: int
    events_per_s: float
    """Token-bearing chunks per second over the loaded period."""
    ttft_error_p50_ms: float
    ttft_error_p99_ms: float
    ttft_error_max_ms: float
    tpot_error_p99_percent: float
    cpu_share: float
    us_per_chunk: float
    """CPU time of the whole Locust process over the loaded period, per chunk."""
    loop_lag_p99_ms: float | None
    safe: bool


class Selftest(msgspec.Struct, kw_only=True):
    """``results/selftest.json``."""

    schema: int = 1
    made_utc: str
    host: dict[str, Any]
    workers: int = 1
    error_limit_ms: float = ERROR_LIMIT_MS
    cpu_limit: float = CPU_LIMIT
    levels: list[Level]
    safe_streams: int
    """Highest level up to which every level was safe; 0 if none was."""
    safe_events_per_s: float


@dataclass(frozen=True)
class Truth:
    """One request as the metronome saw it."""

    ttft_ms: float
    tpot_ms: float


def read_truth(path: Path) -> dict[str, Truth]:
    """The metronome's log by request id."""
    with path.open(encoding="utf-8", newline="") as file:
        return {
            row["request_id"]: Truth(
                (int(row["first_ns"]) - int(row["arrived_ns"])) / 1e6,
                (int(row["last_ns"]) - int(row["first_ns"])) / 1e6 / max(1, int(row["chunks"]) - 1),
            )
            for row in csv.DictReader(file)
        }


def judge_level(rows: Sequence[Attempt], truth: dict[str, Truth], done: Done) -> Level:
    """Errors of one level from its rows.

    Raises:
        ValueError: if no measured attempt can be compared, or the process's CPU time is unknown.
    """
    measured = [row for row in rows if row.phase == "measure"]
    ttft: list[float] = []
    tpot: list[float] = []
    failed = 0
    for row in measured:
        known = truth.get(f"{SALT}-{row.user}-{row.session}-{row.turn}")
        if row.status != "ok" or row.ttft_ms is None or known is None:
            failed += 1
            continue
        ttft.append(abs(row.ttft_ms - known.ttft_ms))
        if row.tpot_ms is not None:
            tpot.append(abs(row.tpot_ms / known.tpot_ms - 1) * 100)
    if not ttft or not tpot:
        raise ValueError("no measured attempt ended well")
    chunks = sum(row.chunks for row in rows)
    cpu = done.generator.cpu_share
    if cpu is None:
        raise ValueError("the load generator's CPU share was not recorded")
    p99 = float(np.quantile(ttft, 0.99))
    return Level(
        streams=measured[0].users,
        requests=len(measured),
        failed=failed,
        events_per_s=chunks / done.wall_seconds,
        ttft_error_p50_ms=float(np.quantile(ttft, 0.5)),
        ttft_error_p99_ms=p99,
        ttft_error_max_ms=max(ttft),
        tpot_error_p99_percent=float(np.quantile(tpot, 0.99)),
        cpu_share=cpu,
        us_per_chunk=cpu * done.wall_seconds / chunks * 1e6,
        loop_lag_p99_ms=done.generator.loop_lag_p99_ms,
        safe=p99 <= ERROR_LIMIT_MS and cpu <= CPU_LIMIT and not failed,
    )


@contextmanager
def pinned(cpu: int | None) -> Any:
    """Run children started inside on one core; the parent gets its own cores back."""
    if cpu is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def cores() -> tuple[int | None, int | None]:
    """(core of the generator, core of the server); Nones on a machine with one core."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return (usable[0], usable[-1]) if len(usable) > 1 else (None, None)


@contextmanager
def metronome(log: Path, cpu: int | None) -> Any:
    """A metronome process; yields its URL."""
    command = [sys.executable, "-m", "servers.metronome", "--log", str(log)]
    command += ["--first-ms", str(FIRST_MS), "--gap-ms", str(GAP_MS)]
    command += [] if cpu is None else ["--cpu", str(cpu)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline().split()
            if len(line) < 2:
                raise RuntimeError("the metronome server did not start")
            yield line[1]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=10)


def run_level(streams: int, folder: Path, locustfile: str = "locustfiles/single_turn.py") -> Level:
    """One level: a metronome, a Locust process with ``streams`` users, and the comparison.

    Raises:
        RuntimeError: if one of the processes fails.
        ValueError: if nothing can be compared.
    """
    folder.mkdir(parents=True)
    mine, its = cores()
    log = folder / "metronome.csv"
    with metronome(log, its) as url:
        command = [
            *(sys.executable, "-m", "locust", "-f", locustfile, "--host", url, "--headless"),
            *("-u", str(streams), "-r", str(streams), "--only-summary", "--exit-code-on-error", "0"),
            *("--csv", str(folder / "locust"), "--logfile", str(folder / "locust.log")),
            *(
                "--arm",
                "selftest",
                "--point",
                f"prompt=1024,output={CHUNKS}",
                "--sessions",
                "2",
                "--seed",
                "1",
            ),
            *("--cache-salt", SALT, "--cell-dir", str(folder), "--clock-scale", "1"),
            *("--start-spread", str((FIRST_MS + GAP_MS * CHUNKS) / 1e3)),
        ]
        with pinned(mine):
            result = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
        if result.returncode:
            last = (result.stderr.strip().splitlines() or ["no message"])[-1]
            raise RuntimeError(f"the Locust process ended with {result.returncode}: {last}")
    rows = list(read_csv(folder / "requests.csv", Attempt))
    return judge_level(rows, read_truth(log), read_json(folder / "done.json", Done))


def table_line(level: Level) -> str:
    """One line of the table on the terminal."""
    return (
        f"{level.streams:>8} {level.events_per_s:>10.0f} {level.ttft_error_p50_ms:>8.2f} "
        f"{level.ttft_error_p99_ms:>8.2f} {level.tpot_error_p99_percent:>8.3f} {level.cpu_share:>7.0%} "
        f"{level.us_per_chunk:>9.1f}  {'safe' if level.safe else 'not safe'}"
    )


HEADING = " streams   events/s  TTFT error p50/p99 ms  TPOT err %    CPU  us/chunk"


def selftest(levels: Sequence[int]) -> Selftest:
    """Run the levels in rising order, stopping behind the first that is not safe."""
    found: list[Level] = []
    with tempfile.TemporaryDirectory(prefix="faceoff-selftest-") as folder:
        print(HEADING, flush=True)
        for streams in levels:
            level = run_level(streams, Path(folder) / str(streams))
            found.append(level)
            print(table_line(level), flush=True)
            if not level.safe:
                break
    safe = [level for level in found if level.safe]
    return Selftest(
        made_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        host=host_facts(),
        levels=found,
        safe_streams=max((level.streams for level in safe), default=0),
        safe_events_per_s=max((level.events_per_s for level in safe), default=0.0),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: 0 with a certificate, 1 if not even the lowest level is safe, 2 if it could not run."""
    parser = argparse.ArgumentParser(
        prog="python -m locustfiles.selftest", description="Measure this load generator."
    )
    parser.add_argument("--levels", default=",".join(map(str, LEVELS)), help="numbers of streams, rising")
    args = parser.parse_args(argv)
    try:
        levels = [int(part) for part in args.levels.split(",")]
        result = selftest(levels)
        RESULT.parent.mkdir(exist_ok=True)
        write_json(RESULT, result)
    except (RuntimeError, ValueError, OSError, subprocess.TimeoutExpired) as error:
        print(f"faceoff: the self-test failed: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        with suppress(BrokenPipeError):
            print("faceoff: interrupted", file=sys.stderr)
        return 130
    limits = f"p99 TTFT error <= {ERROR_LIMIT_MS:g} ms, CPU <= {CPU_LIMIT:.0%}"
    print(
        f"certificate: safe up to {result.safe_streams} streams and {result.safe_events_per_s:.0f} events/s "
        f"with {result.workers} process ({limits})\n{RESULT}"
    )
    return 0 if result.safe_streams else 1


if __name__ == "__main__":
    sys.exit(main())
