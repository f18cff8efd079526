"""Cells that meet trouble: refusals, interruption, a dead server, a full disk, wrong options."""

import itertools
import os
import resource
import signal
import subprocess
import time
from collections import Counter

import pytest

from tests.locustfiles.cells import (
    ROOT,
    endless_cell,
    locust_command,
    locust_counts,
    make_table,
    rows_of,
    run_cell,
    simulator,
    wait_until,
)


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


def test_interrupted_cell_keeps_every_finished_attempt_and_did_not_finish(cached, tmp_path):
    with endless_cell(cached, tmp_path) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
    rows = rows_of(tmp_path)
    assert not (tmp_path / "done.json").exists()
    statuses = Counter(row.status for row in rows)
    assert set(statuses) <= {"ok", "censored"}
    assert locust_counts(tmp_path) == (statuses["ok"], 0)


def test_killed_cell_can_be_read_and_has_no_done_file(cached, tmp_path):
    with endless_cell(cached, tmp_path) as process:
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
