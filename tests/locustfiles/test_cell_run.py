"""Whole cells: real Locust processes against the real simulator, and what they leave on disk."""

import csv
import itertools
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import requests

from locustfiles.prompts import TokenCounter, measure_table
from locustfiles.records import Attempt, Done, Manifest, ServerSample, read_csv, read_json

ROOT = Path(__file__).parents[2]


def free_port() -> int:
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


@pytest.fixture(scope="module")
def cached():
    with simulator("--enable-prefix-caching") as (url, _):
        yield url


@pytest.fixture(scope="module")
def plain():
    with simulator("--no-enable-prefix-caching") as (url, _):
        yield url


def locust_command(workload: str, url: str, cell: Path, *more: str, users: int = 4) -> list[str]:
    return [
        *(sys.executable, "-m", "locust", "-f", f"locustfiles/{workload}.py", "--host", url),
        *("--headless", "-u", str(users), "-r", str(users), "--only-summary", "--exit-code-on-error", "0"),
        *("--csv", f"{cell}/locust", "--logfile", f"{cell}/locust.log", "--cell-dir", str(cell)),
        *("--seed", "7", *more),
    ]


def run_cell(workload: str, url: str, cell: Path, *more: str, users: int = 4, **options):
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
    return list(read_csv(cell / "requests.csv", Attempt))


def locust_counts(cell: Path) -> tuple[int, int]:
    """(requests, failures) of Locust's Aggregated row."""
    with (cell / "locust_stats.csv").open() as file:
        total = next(row for row in csv.DictReader(file) if row["Name"] == "Aggregated")
    return int(total["Request Count"]), int(total["Failure Count"])


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


def test_idle_connection_closed_under_our_feet_is_retried_once_and_marked(tmp_path, scripted, cached):
    """The server closes when the second request arrives: keep-alive at work, not a failure of the arm."""
    answered = {}
    table = tmp_path / "table.json"
    make_table(cached, table)
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":64,"completion_tokens":1}}\n\n'
    body = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"length"}]}\n\n' + usage

    def script(sock, request):
        if b"POST" not in request[:5]:
            sock.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return
        count = answered[sock] = answered.get(sock, 0) + 1
        if count > 1:
            sock.close()
            return
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    server = scripted(script)
    args = ("--model", "m", "--token-table", str(table), "--point", "prompt=64,output=1", "--sessions", "3")
    run_cell("single_turn", server.url, tmp_path / "cell", *args, "--clock-scale", "1", users=1)
    rows = [r for r in rows_of(tmp_path / "cell") if r.status != "censored"]
    assert [(r.status, r.retries) for r in rows[:4]] == [("ok", 0), ("ok", 1), ("ok", 1), ("ok", 1)]
    assert all(r.connect_ms > 0 for r in rows[:4])
    assert locust_counts(tmp_path / "cell") == (len(rows), 0)


def test_refusals_are_counted_and_retry_after_is_heeded(tmp_path, scripted, cached):
    table = tmp_path / "table.json"
    make_table(cached, table)
    times = []

    def script(sock, request):
        if b"POST" in request[:5]:
            times.append(time.monotonic())
        sock.sendall(b"HTTP/1.1 503 Busy\r\nRetry-After: 1\r\nContent-Length: 4\r\n\r\nbusy")

    server = scripted(script)
    args = ("--model", "m", "--token-table", str(table), "--point", "prompt=64,output=1", "--sessions", "2")
    run_cell("single_turn", server.url, tmp_path / "cell", *args, "--clock-scale", "1", users=1)
    rows = rows_of(tmp_path / "cell")
    assert [(r.status, r.http_status) for r in rows] == [("http_error", 503)] * 3
    assert rows[0].error == "HTTP 503: busy"
    assert all(b - a > 0.95 for a, b in itertools.pairwise(times))
    assert locust_counts(tmp_path / "cell") == (3, 3)


def make_table(url, path):
    counter = TokenCounter(url, requests.get(f"{url}/v1/models", timeout=5).json()["data"][0]["id"])
    path.write_bytes(msgspec.json.encode(measure_table(counter)))


def test_interrupted_cell_keeps_every_finished_attempt_and_did_not_finish(cached, tmp_path):
    command = locust_command(
        "single_turn", cached, tmp_path, "--point", "prompt=64,output=16", "--sessions", "100000"
    )
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        requests_csv = tmp_path / "requests.csv"
        wait_until(
            lambda: requests_csv.exists() and requests_csv.read_text().count("\n") > 20, "rows on disk"
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
    rows = rows_of(tmp_path)
    assert not (tmp_path / "done.json").exists()
    statuses = Counter(row.status for row in rows)
    assert set(statuses) <= {"ok", "censored"}
    assert locust_counts(tmp_path) == (statuses["ok"], 0)


def test_killed_cell_can_be_read_and_has_no_done_file(cached, tmp_path):
    command = locust_command(
        "single_turn", cached, tmp_path, "--point", "prompt=64,output=16", "--sessions", "100000"
    )
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        requests_csv = tmp_path / "requests.csv"
        wait_until(
            lambda: requests_csv.exists() and requests_csv.read_text().count("\n") > 20, "rows on disk"
        )
        process.kill()
    assert len(rows_of(tmp_path)) >= 19
    assert not (tmp_path / "done.json").exists()


def test_server_that_dies_in_the_middle_leaves_failures_not_gaps(tmp_path):
    with simulator() as (url, server):
        command = locust_command(
            "single_turn", url, tmp_path, "--point", "prompt=512,output=256", "--sessions", "3"
        )
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            requests_csv = tmp_path / "requests.csv"
            wait_until(lambda: requests_csv.exists() and ",ok," in requests_csv.read_text(), "an ok row")
            server.send_signal(signal.SIGKILL)
            assert process.wait(timeout=60) == 0
    rows = rows_of(tmp_path)
    failed = [row for row in rows if row.status not in ("ok", "censored")]
    assert failed
    assert {row.status for row in failed} <= {"connect_error", "stream_error", "truncated"}
    assert all(row.error for row in failed)
    assert sum(row.phase == "measure" for row in rows) == 4 * 3  # every planned attempt has its row
    not_censored = sum(row.status != "censored" for row in rows)
    assert locust_counts(tmp_path) == (not_censored, len(failed))


def test_full_disk_ends_the_cell_in_one_line(cached, tmp_path):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))

    result = run_cell(
        "single_turn",
        cached,
        tmp_path,
        *("--point", "prompt=64,output=16", "--sessions", "100000"),
        preexec_fn=limit,
    )
    assert result.returncode == 2
    assert result.stderr.count("faceoff: cannot write the results") == 1
    assert not (tmp_path / "done.json").exists()


@pytest.mark.parametrize(
    ("url", "args", "says"),
    [
        ("http://127.0.0.1:1", (), "cannot connect; is the server up?"),
        (None, ("--point", "prompt=many"), "prompt must be a whole number above 0, not 'many'"),
        (None, ("--point", "context=8192"), "single_turn needs prompt=<tokens>"),
        (None, ("--arm", "No Good"), "use lower-case letters, digits, - and _"),
        (None, ("--sessions", "-1"), "--sessions must be 0 or more"),
        (None, ("--model", "none-such"), "does not serve 'none-such', it serves "),
        (None, ("--cell-dir", "/proc/nowhere"), "cannot write the results"),
        ("ftp://127.0.0.1", (), "ftp://127.0.0.1"),
    ],
)
def test_user_mistakes_end_in_one_line(url, args, says, cached, tmp_path):
    result = run_cell("single_turn", url or cached, tmp_path, *args)
    assert result.returncode == 2, result.stdout + result.stderr
    said = [line for line in result.stderr.splitlines() if line.startswith("faceoff:")]
    assert len(said) == 1
    assert says in said[0]
    assert "Traceback" not in result.stdout + result.stderr + (tmp_path / "locust.log").read_text()


def test_api_key_reaches_the_server_and_no_file(tmp_path, scripted):
    """The server refuses without the key; the key is in no log, no CSV, no command line."""
    key = "sk-very-secret-0123456789"
    seen = []

    def script(sock, request):
        seen.append(b"Authorization: Bearer " + key.encode() in request)
        path = request.split(b" ", 2)[1]
        body = {
            b"/v1/models": b'{"data":[{"id":"m"}]}',
            b"/version": b"{}",
            b"/tokenize": b'{"count": 1}',
        }.get(path, b'{"error":{"message":"nothing here"}}')
        sock.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    server = scripted(script)
    run_cell(
        "single_turn",
        server.url,
        tmp_path,
        *("--arm", "my-arm"),
        env={**os.environ, "FACEOFF_API_KEY_MY_ARM": key},
    )
    assert seen
    assert all(seen)
    for path in tmp_path.rglob("*"):
        assert key not in path.read_text()


def test_web_ui_loads_the_picked_scenario_and_leaves_a_run_folder(cached, tmp_path):
    port = free_port()
    command = [
        *(sys.executable, "-m", "locust", "-f", f"{ROOT}/locustfiles/single_turn.py"),
        *(
            "--host",
            cached,
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
                f"{ui}/swarm", data={"user_count": 3, "spawn_rate": 3, "host": cached}, timeout=30
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
    assert read_json(run / "manifest.json", Manifest).plan == "adhoc"
    judged = subprocess.run(
        [sys.executable, "-m", "reports", str(run)], cwd=ROOT, capture_output=True, text=True
    )
    assert judged.returncode == 0, judged.stderr
    assert (run / "report.html").exists()
    rows = rows_of(done_file.parent)
    assert {row.user for row in rows} == {0, 1, 2}
    assert sum(row.phase == "measure" for row in rows) > 5
