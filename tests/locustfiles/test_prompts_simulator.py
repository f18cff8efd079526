"""Exact lengths by the simulator's own count, over real HTTP."""

import http.client
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from locustfiles.body import chat_body
from locustfiles.prompts import PromptWriter, TokenCounter, measure_table

ROOT = Path(__file__).resolve().parents[2]


def ask(port, method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {"Content-Type": "application/json"})
        return json.loads(connection.getresponse().read() or b"null")
    finally:
        connection.close()


@pytest.fixture(scope="module")
def simulator():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "servers.sim", "--port", str(port), "--clock-scale", "20"]
    server = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert server.poll() is None, "the simulator did not start"
                assert time.monotonic() < deadline, "the simulator does not listen"
                time.sleep(0.05)
        yield port
    finally:
        server.terminate()
        server.wait(20)


@pytest.fixture(scope="module")
def model(simulator):
    return ask(simulator, "GET", "/v1/models")["data"][0]["id"]


@pytest.fixture(scope="module")
def table(simulator, model):
    return measure_table(TokenCounter(f"http://127.0.0.1:{simulator}", model))


def test_the_simulator_counts_what_the_table_says(table):
    assert table.source == "tokenize"
    assert table.additive
    assert table.system


def test_the_server_reports_the_tokens_asked_turn_by_turn(simulator, model, table):
    writer = PromptWriter(table, seed=1, workload="multi_turn", point="context=2048", users=2, repeat=1)
    prompt = writer.single(1, 1, 2048)
    text, generated = "", 0
    for turn in (1, 2, 3):
        if turn > 1:
            prompt = writer.follow_up(prompt, text, generated, 1, 1, turn, 768)
        answer = ask(
            simulator, "POST", "/v1/chat/completions", chat_body(model, prompt.messages, 16, stream=False)
        )
        assert answer["usage"]["prompt_tokens"] == prompt.tokens == 2048 + (turn - 1) * (16 + 768)
        text = answer["choices"][0]["message"]["content"]
        generated = answer["usage"]["completion_tokens"]
        assert generated == 16


def test_the_server_finds_the_shared_prefix_and_no_more(simulator, model, table):
    writer = PromptWriter(table, seed=1, workload="shared_prefix", point="prefix=4096", users=4, repeat=1)
    ids = [
        ask(simulator, "POST", "/tokenize", {"model": model, "messages": prompt.messages})["tokens"]
        for prompt in (writer.shared(user, 1, 1, 4096, 512) for user in range(4))
    ]
    assert {len(found) for found in ids} == {4608}
    assert len({tuple(found[:4096]) for found in ids}) == 1
    assert len({found[4096] for found in ids}) == 4


def test_a_nonce_line_costs_what_the_table_says(simulator, model, table):
    counter = TokenCounter(f"http://127.0.0.1:{simulator}", model)
    for nonce in ("one", "another"):
        writer = PromptWriter(
            table, seed=1, workload="single_turn", point="prompt=512", users=1, repeat=1, nonce=nonce
        )
        assert counter.count_messages(writer.single(0, 1, 512).messages) == 512
        assert counter.count_messages(writer.shared(0, 1, 1, 300, 200).messages) == 500
    counter.close()
