"""``python -m tests.bench``: what measuring costs and how wrong it is, beside the plain way of doing it.

Server of known timing (first token after 300 ms, then a chunk every 20 ms, 128 tokens) on one core, a whole
Locust process on the other. Errors are against the server's own log of what it did. Speeds are ratios within
one run.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from locustfiles.selftest import cores, metronome, pinned, read_truth, run_level

ROOT = Path(__file__).parents[2]


def plain_level(streams: int, folder: Path) -> dict[str, float]:
    """The baseline's figures at one number of streams."""
    folder.mkdir(parents=True)
    mine, its = cores()
    log, rows, cost = folder / "metronome.csv", folder / "rows.csv", folder / "cost.json"
    with metronome(log, its) as url, pinned(mine):
        command = [
            *(sys.executable, "-m", "locust", "-f", str(ROOT / "tests/bench/http_user.py"), "--host", url),
            *(
                "--headless",
                "-u",
                str(streams),
                "-r",
                str(streams),
                "--only-summary",
                "--logfile",
                str(folder / "log"),
            ),
        ]
        subprocess.run(
            command,
            env={**os.environ, "BENCH_ROWS": str(rows), "BENCH_COST": str(cost)},
            capture_output=True,
            timeout=240,
            check=True,
        )
    truth = read_truth(log)
    errors = []
    with rows.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            errors.append(abs(float(row["ttft_ms"]) - truth[row["request_id"]].ttft_ms))
    spent = json.loads(cost.read_text())
    return {
        "p50": float(np.quantile(errors, 0.5)),
        "p99": float(np.quantile(errors, 0.99)),
        "us": spent["cpu"] / spent["chunks"] * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--levels", default="16,64,256,1024")
    levels = [int(part) for part in parser.parse_args().levels.split(",")]
    print("              Faceoff                                    plain HttpUser             ratio")
    print("streams   TTFT error p50/p99 ms  TPOT err %  us/chunk   p50/p99 ms        us/chunk   us/chunk")
    with tempfile.TemporaryDirectory(prefix="faceoff-bench-") as folder:
        for streams in levels:
            ours = run_level(streams, Path(folder) / f"ours-{streams}")
            plain = plain_level(streams, Path(folder) / f"plain-{streams}")
            print(
                f"{streams:>7} {ours.ttft_error_p50_ms:>11.2f} / {ours.ttft_error_p99_ms:<8.2f} "
                f"{ours.tpot_error_p99_percent:>9.3f} {ours.us_per_chunk:>9.1f}   "
                f"{plain['p50']:>7.1f} / {plain['p99']:<8.1f} {plain['us']:>7.1f} "
                f"{ours.us_per_chunk / plain['us']:>9.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
