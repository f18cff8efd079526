"""Whole cells: real Locust processes against the real simulator, and what they leave on disk."""

import itertools
import subprocess
import sys

import pytest
import requests

from locustfiles.records import Done, Manifest, ServerSample, read_csv, read_json
from tests.locustfiles.cells import ROOT, free_port, locust_counts, rows_of, run_cell, simulator, wait_until

SMALL = {
    "single_turn": ("prompt=256,output=32", 1),
    "shared_prefix": ("prefix=4096,suffix=128,output=32", 1),
    "multi_turn": ("context=2048,growth=512,output=64", 3),
}


@pytest.mark.parametrize("workload", SMALL)
def test_a_cell_leaves_exactly_what_it_implies(workload, cached, tmp_path):
    point, turns = SMALL[workload]
    result = run_cell(workload, cached, tmp_path, "--point", point, "--sessions", "3", "--arm", "cache")
    assert result.returncode == 0, result.stdout + result.stderr
    rows = rows_of(tmp_path)
    done = read_json(tmp_path / "done.json", Done)
    measured = [row for row in rows if row.phase == "measure"]
    assert {(r.user, r.session, r.turn) for r in measured} == {
        (user, session, turn) for user in range(4) for session in (1, 2, 3) for turn in range(1, turns + 1)
    }
    assert len(measured) == 4 * 3 * turns
    assert (done.complete, done.measured, done.measured_planned) == (True, len(measured), len(measured))
    assert done.rows == len(rows)
    assert all(row.status == "ok" for row in rows if row.status != "censored")
    assert locust_counts(tmp_path) == (sum(row.status != "censored" for row in rows), 0)
    # Locust's history ends with the same count.
    history = (tmp_path / "locust_stats_history.csv").read_text().splitlines()
    count = history[0].split(",").index("Total Request Count")
    assert int(history[-1].split(",")[count]) == locust_counts(tmp_path)[0]
    # Lengths are exact, follow-ups carry the real answer, and the conversation hits its own past.
    for row in measured:
        assert row.prompt_tokens == row.prompt_tokens_asked
        assert row.output_tokens == row.output_tokens_asked
        assert row.token_source == "usage"
        assert row.tpot_ms > 0
    if workload == "multi_turn":
        assert {row.prompt_tokens for row in measured if row.turn == 3} == {2048 + 2 * 512}
        assert all(row.cached_tokens == 0 for row in measured if row.turn == 1)
        assert all(row.cached_tokens > 0 for row in measured if row.turn == 3)
    if workload == "shared_prefix":
        assert all(row.cached_tokens > 0 for row in measured)
    samples = list(read_csv(tmp_path / "server.csv", ServerSample))
    assert {s.t_ms for s in samples if s.t_ms == 0.0} == {0.0}
    assert any(s.name == "vllm:generation_tokens_total" and s.value > 0 for s in samples)


def test_every_arm_gets_the_same_text_and_another_seed_another(cached, plain, tmp_path):
    args = ("--point", "context=512,growth=256,output=32", "--sessions", "1")
    run_cell("multi_turn", cached, tmp_path / "a", *args, "--arm", "cache")
    run_cell("multi_turn", plain, tmp_path / "b", *args, "--arm", "plain")
    run_cell("multi_turn", plain, tmp_path / "c", *args, "--arm", "plain", "--seed", "8")

    def digests(name):
        return {
            (r.user, r.session, r.turn): (r.prompt_digest, r.output_digest)
            for r in rows_of(tmp_path / name)
            if r.phase == "measure"
        }

    assert len(digests("a")) == 12
    assert digests("a") == digests("b")
    assert not set(digests("c").values()) & set(digests("a").values())


def test_lockstep_users_start_each_turn_together(cached, tmp_path):
    point = "context=1024,growth=256,output=32,pace=lockstep"
    run_cell("multi_turn", cached, tmp_path, "--point", point, "--sessions", "2", users=8)
    rows = [r for r in rows_of(tmp_path) if r.phase == "measure"]
    assert len(rows) == 8 * 2 * 3
    by_step = {}
    for row in rows:
        by_step.setdefault((row.session, row.turn), []).append(row)
    ends = {step: max(r.end_ms for r in group) for step, group in by_step.items()}
    order = sorted(by_step)
    for earlier, later in itertools.pairwise(order):
        assert min(r.start_ms for r in by_step[later]) >= ends[earlier]  # nobody ran ahead
    assert all(len({r.intended_ms for r in group}) == 1 for group in by_step.values())


def test_lockstep_behind_a_shared_prefix_seeds_first_and_then_starts_together(cached, tmp_path):
    point = "prefix=4096,suffix=128,output=32,pace=lockstep"
    run_cell("shared_prefix", cached, tmp_path, "--point", point, "--sessions", "2", users=6)
    rows = rows_of(tmp_path)
    assert sum(r.phase == "measure" for r in rows) == 6 * 2
    seeding = [r for r in rows if r.session == 0 and r.user == 0 and r.turn < 3]
    warming = [r for r in rows if r.session == 0 and r not in seeding]
    assert (len(seeding), len(warming)) == (2, 6)
    assert min(r.start_ms for r in warming) >= max(r.end_ms for r in seeding)
    for session in (1, 2):
        assert len({r.intended_ms for r in rows if r.session == session}) == 1


def test_open_loop_starts_when_planned_whatever_the_server_does(cached, plain, tmp_path):
    """The same arrivals on both arms; a pool that is too small shows as lateness, not as less load."""
    point = "prompt=512,output=64,rate=2"
    for name, url in (("a", cached), ("b", plain)):
        run_cell("single_turn", url, tmp_path / name, "--point", point, "--sessions", "2", users=6)
    runs = [[r for r in rows_of(tmp_path / name) if r.phase == "measure"] for name in "ab"]
    intended = [{(r.user, r.session): r.intended_ms for r in rows} for rows in runs]
    assert len(intended[0]) == 6 * 2
    assert intended[0] == pytest.approx(intended[1], abs=0.01)
    gaps = [b - a for a, b in itertools.pairwise(sorted(intended[0].values()))]
    assert len(set(map(round, gaps))) > 6  # Poisson: no two alike
    digests = [{(r.user, r.session): r.prompt_digest for r in rows} for rows in runs]
    assert digests[0] == digests[1]

    run_cell(
        "single_turn",
        cached,
        tmp_path / "c",
        "--point",
        "prompt=512,output=64,rate=20",
        "--sessions",
        "8",
        users=2,
    )
    starved = [r for r in rows_of(tmp_path / "c") if r.phase == "measure"]
    assert max(r.start_ms - r.intended_ms for r in starved) > 500
    assert all(r.ttft_ms < r.first_token_ms - r.intended_ms for r in starved[4:])


@pytest.fixture
def real_time():
    """A simulator whose clock is the wall's: only what it says of itself tells that it is none."""
    with simulator("--clock-scale", "1") as (url, _):
        yield url


def test_web_ui_loads_the_picked_scenario_and_leaves_a_run_folder(real_time, tmp_path):
    port = free_port()
    command = [
        *(sys.executable, "-m", "locust", "-f", f"{ROOT}/locustfiles/single_turn.py"),
        *(
            "--host",
            real_time,
            "--web-host",
            "127.0.0.1",
            "--web-port",
            str(port),
            "--point",
            "prompt=64,output=16",
        ),
    ]
    ui = f"http://127.0.0.1:{port}"
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:

            def answers():
                try:
                    return requests.get(ui, timeout=5).ok
                except requests.ConnectionError:
                    return False

            wait_until(answers, "web UI")
            started = requests.post(
                f"{ui}/swarm", data={"user_count": 3, "spawn_rate": 3, "host": real_time}, timeout=30
            )
            assert started.json()["success"], started.text

            def counted():
                stats = requests.get(f"{ui}/stats/requests", timeout=5).json()["stats"]
                return next((s for s in stats if s["method"] == "TTFT" and s["num_requests"] > 5), None)

            wait_until(counted, "TTFT row in the web UI")
            assert requests.post(f"{ui}/stop", timeout=30).json()["success"]
            [done_file] = wait_until(
                lambda: list(tmp_path.glob("results/*-adhoc/cells/*/done.json")), "done.json"
            )
        finally:
            process.terminate()
    run = done_file.parents[2]
    manifest = read_json(run / "manifest.json", Manifest)
    assert manifest.plan == "adhoc"
    assert manifest.simulated
    judged = subprocess.run(
        [sys.executable, "-m", "reports", str(run)], cwd=ROOT, capture_output=True, text=True
    )
    assert judged.returncode == 0, judged.stderr
    assert (run / "report.html").exists()
    rows = rows_of(done_file.parent)
    assert {row.user for row in rows} == {0, 1, 2}
    assert sum(row.phase == "measure" for row in rows) > 5
