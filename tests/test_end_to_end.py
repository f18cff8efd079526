"""The main job as a user runs it: launchers, sweep and reports together, on the simulator."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from locustfiles.records import Attempt, Done, Manifest, read_csv, read_json

ROOT = Path(__file__).parents[1]


def run(*command, **options):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, **options)


def make(target, *knobs, **options):
    return run("make", target, *knobs, **options)


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """The sim profile on ports of its own, so that nothing of the user's is touched."""
    folder = tmp_path_factory.mktemp("profile") / "mysim"
    folder.mkdir()
    source = ROOT / "servers/profiles/sim"
    for path in source.iterdir():
        text = path.read_text()
        if path.suffix == ".env":
            text = text.replace("PORT=81", "PORT=87")
        (folder / path.name).write_text(text)
    yield folder
    run("bash", "servers/down.sh", str(folder))


@pytest.fixture(scope="module")
def smoke(profile, tmp_path_factory):
    """One run of the smoke plan, judged."""
    out = tmp_path_factory.mktemp("results") / "run"
    swept = run(
        *("bash", "servers/with_arms.sh", str(profile), "cache mtp", "--"),
        *(sys.executable, "-m", "locustfiles.sweep", "--plan", "smoke", "--out", str(out), "--seed", "3"),
    )
    assert swept.returncode == 0, swept.stderr
    judged = run(sys.executable, "-m", "reports", "build", str(out))
    assert judged.returncode == 0, judged.stderr
    return out, swept, judged


def test_a_run_leaves_the_files_that_its_readers_rely_on(smoke):
    out, _, _ = smoke
    manifest = read_json(out / "manifest.json", Manifest)
    assert manifest.simulated
    assert [arm.name for arm in manifest.arms] == ["cache", "mtp"]
    for cell in manifest.cells:
        folder = out / "cells" / cell.id
        assert {path.name for path in folder.iterdir()} == {
            *("locust_stats.csv", "locust_stats_history.csv", "locust_failures.csv", "locust_exceptions.csv"),
            *("requests.csv", "server.csv", "locust.log", "done.json"),
        }
        rows = list(read_csv(folder / "requests.csv", Attempt))
        assert sum(row.phase == "measure" for row in rows) == cell.measured_planned
        assert read_json(folder / "done.json", Done).complete
        with (folder / "locust_stats.csv").open() as file:
            total = next(row for row in csv.DictReader(file) if row["Name"] == "Aggregated")
        assert int(total["Request Count"]) == sum(row.status != "censored" for row in rows)
    for name in ("summary.csv", "verdict.json", "report.html"):
        assert (out / name).stat().st_size > 100


def test_cells_differ_in_salt_and_every_cold_prompt_was_cold(smoke):
    out, _, _ = smoke
    manifest = read_json(out / "manifest.json", Manifest)
    salts = [cell.command[cell.command.index("--cache-salt") + 1] for cell in manifest.cells]
    assert len(set(salts)) == len(salts)
    for cell in manifest.cells:
        rows = list(read_csv(out / "cells" / cell.id / "requests.csv", Attempt))
        if cell.workload != "shared_prefix":
            assert all(row.cached_tokens in (0, None) for row in rows if row.turn == 1)


def test_the_verdict_says_that_it_is_simulated_and_holds_back_what_three_repeats_would_show(smoke):
    out, _, judged = smoke
    verdict = json.loads((out / "verdict.json").read_text())
    assert (verdict["schema"], verdict["simulated"], verdict["base"]) == (1, True, "cache")
    assert "SIMULATED" in judged.stdout
    primary = [cell for cell in verdict["cells"] if cell["primary"]]
    assert primary
    manifest = read_json(out / "manifest.json", Manifest)
    if max(cell.repeat for cell in manifest.cells) < 3:
        assert all(cell["winner"] in (None, "inconclusive") for cell in primary)
        # A busy machine may fail a check; what holds the verdict back is said either way.
        for cell in primary:
            said = " ".join(cell["reasons"])
            assert "needs 3 repeats" in said or said.startswith("no verdict: "), said


def all_down(profile):
    """Whether every arm of the profile is down."""
    state = run("bash", "servers/status.sh", str(profile)).stdout
    return state.count(" down") == len(list(profile.glob("*.env")))


def test_launched_servers_are_gone_afterwards(smoke, profile):
    assert all_down(profile)


def test_a_pool_that_is_too_small_for_every_arm_makes_the_answer_neither(profile, tmp_path):
    out = tmp_path / "run"
    swept = run(
        *("bash", "servers/with_arms.sh", str(profile), "cache_small mtp_small", "--"),
        *(sys.executable, "-m", "locustfiles.sweep", "--plan", "small_pool", "--out", str(out)),
        *("--repeats", "1", "--sessions", "1"),
    )
    assert swept.returncode == 0, swept.stderr
    judged = run(sys.executable, "-m", "reports", "build", str(out))
    assert judged.returncode == 0, judged.stderr
    verdict = json.loads((out / "verdict.json").read_text())
    said = {cell["users"]: (cell["winner"], cell["reasons"]) for cell in verdict["cells"] if cell["primary"]}
    assert said[8][0] == "neither", said[8]
    assert [reason.split(":")[0] for reason in said[8][1]] == [
        "cache_small is capacity-bound",
        "mtp_small is capacity-bound",
    ]
    assert said[1][0] != "neither"
    assert said[2][0] != "neither"
    assert "neither" in judged.stdout


def test_an_arm_that_dies_is_started_anew_once_and_its_cell_counts_as_failed(profile, tmp_path):
    out = tmp_path / "run"
    command = [
        *("bash", "servers/with_arms.sh", str(profile), "cache mtp", "--"),
        *(sys.executable, "-m", "locustfiles.sweep", "--plan", "smoke", "--out", str(out)),
    ]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 60
        while not list(out.glob("cells/*.mtp/requests.csv")):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)
        state = ROOT / "results/servers"
        pid_file = max(state.glob("mysim-*/mtp.pid"), key=lambda path: path.stat().st_mtime)
        os.kill(int(pid_file.read_text().split()[0]), signal.SIGKILL)
        _, stderr = process.communicate(timeout=100)
    assert process.returncode == 1, stderr
    assert "starting arm mtp anew" in stderr
    manifest = read_json(out / "manifest.json", Manifest)
    done = [cell for cell in manifest.cells if (out / "cells" / cell.id / "done.json").exists()]
    assert len(done) >= len(manifest.cells) - 1  # every other cell ran
    assert all_down(profile)


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        (["USERS=0"], "'0' is not a whole number of at least 1"),
        (["USERS=many"], "'many' is not a whole number of at least 1"),
        (["USERS=2", "PROFILE=nope"], "no profile 'nope'"),
        (["USERS=2", "ARMS=cache nope"], "nope"),
        (["USERS=2", "ARMS=cache cache"], "arm 'cache' is named twice"),
        (["USERS=2", "WORKLOADS=nope"], "nope"),
        (["USERS=2", "SLO=bogus"], "--slo: 'bogus' is not name=number"),
        (["USERS=2", "MIX=foo=1"], "--mix: 'foo' is not one of"),
        (["USERS=2", "MARGIN=x"], "--margin: 'x' is not a number"),
        (["USERS=2", "ARMS=a=http://127.0.0.1:1 b=http://127.0.0.1:2"], "arm a"),
        (["USERS=2", "ARMS=a=http://k:secret@127.0.0.1:1 b=http://127.0.0.1:2"], "credentials"),
        (["USERS=2", "PROXY=nope", "ARMS=a=http://127.0.0.1:1 b=http://127.0.0.1:2"], "no arm 'nope'"),
        (["USERS=2", "SWAP=1", "ARMS=a=http://127.0.0.1:1 b=http://127.0.0.1:2"], "not URLs"),
    ],
)
def test_user_mistakes_end_in_one_clear_line(knobs, says):
    result = make("load", *knobs)
    assert result.returncode != 0
    lines = [line for line in result.stderr.splitlines() if says in line and not line.startswith("make:")]
    assert lines, result.stderr
    assert "starting on" not in result.stderr  # no server is started for a typing mistake
    assert "Traceback" not in result.stdout + result.stderr
    assert "secret" not in result.stdout + result.stderr


def test_unknown_plan_and_unknown_run():
    assert "nope" in make("compare", "PLAN=nope", "ARMS=a=http://127.0.0.1:1").stderr
    result = make("report", "RUN=nope")
    assert result.returncode != 0
    assert "nope" in result.stderr
    assert "Traceback" not in result.stderr


def test_help_lists_the_commands():
    said = make("help").stdout
    for target in (
        "load",
        "compare",
        "report",
        "servers",
        "stop",
        "status",
        "ui",
        "selftest",
        "test",
        "lint",
    ):
        assert f"make {target} " in said
