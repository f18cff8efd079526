import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from locustfiles import token_counter
from locustfiles.token_counter import TokenCounter, TokenCountError
from tests.locustfiles.token_server import TokenServer, serving

ROOT = Path(__file__).resolve().parents[2]
HELLO = [{"role": "user", "content": "hello there"}]


@pytest.fixture
def server():
    with serving(TokenServer()) as running:
        yield running


@pytest.fixture
def counter(server):
    found = TokenCounter(server.url, "m", {"Authorization": "Bearer sesame-4711"})
    yield found
    found.close()


def test_counts_messages_in_the_chat_form_with_template_and_thinking_off(server, counter):
    assert counter.count_messages(HELLO) == 6  # <bos> <user> hello there <end> <assistant>
    assert server.bodies("/tokenize") == [
        {
            "model": "m",
            "messages": HELLO,
            "add_generation_prompt": True,
            "chat_template_kwargs": {"enable_thinking": False},
        }
    ]
    assert counter.source == "tokenize"


def test_counts_bare_text_without_special_tokens(server, counter):
    assert counter.count_text("one two three") == 3
    assert server.bodies("/tokenize") == [
        {"model": "m", "prompt": "one two three", "add_special_tokens": False}
    ]


def test_a_dropped_field_is_not_sent(server):
    TokenCounter(server.url, "m", dropped=["chat_template_kwargs"]).count_messages(HELLO)
    assert "chat_template_kwargs" not in server.bodies("/tokenize")[0]


def test_keeps_one_connection_open(server, counter):
    for _ in range(20):
        counter.count_messages(HELLO)
    assert server.connections == 1
    assert counter.requests == 20


def test_ids_or_none(server, counter):
    assert len(counter.count_ids(HELLO)) == 6
    server.ids = False
    assert counter.count_ids(HELLO) is None


def test_many_prompts_come_back_in_order(server, counter):
    prompts = [[{"role": "user", "content": "w " * size}] for size in range(40)]
    assert counter.count_each(prompts) == [size + 4 for size in range(40)]


@pytest.mark.parametrize("status", [404, 405, 501, 422])
def test_falls_back_to_usage_where_tokenize_is_missing(server, counter, status):
    server.tokenize = status
    assert counter.count_messages(HELLO) == 6
    assert counter.count_messages(HELLO) == 6
    assert counter.source == "usage"
    assert len(server.bodies("/tokenize")) == 1  # not asked again
    first, second = server.bodies("/v1/chat/completions")
    assert first["max_tokens"] == 1
    assert first["stream"] is False
    assert first["cache_salt"] != second["cache_salt"]  # counting warms no cache
    assert counter.count_ids(HELLO) is None


def test_text_counts_by_usage_are_what_the_text_adds(server, counter):
    server.tokenize = 404
    assert counter.count_text("one two three") == 3
    assert counter.count_text("") == 0


def test_falls_back_where_tokenize_speaks_another_dialect(server, counter):
    server.replies = [(200, {}, b'{"tokens": [1, 2]}')]
    assert counter.count_messages(HELLO) == 6
    assert counter.source == "usage"


def test_a_refusal_after_a_success_is_an_error_and_no_fallback(server, counter):
    counter.count_messages(HELLO)
    server.tokenize = 404
    with pytest.raises(TokenCountError, match="HTTP 404: Not Found") as caught:
        counter.count_messages(HELLO)
    assert caught.value.status == 404
    assert server.bodies("/v1/chat/completions") == []


def test_a_busy_server_is_asked_again(server, counter):
    server.replies = [(503, {"Retry-After": "0"}, b""), (429, {"Retry-After": "0.01"}, b"{}")]
    assert counter.count_messages(HELLO) == 6
    assert counter.requests == 3


def test_a_keep_alive_connection_closed_meanwhile_is_opened_again(server, counter):
    server.close_after = 1
    assert [counter.count_messages(HELLO) for _ in range(3)] == [6, 6, 6]


@pytest.mark.parametrize("count", [-1, "6", 6.5, None, True, 1 << 40])
def test_an_impossible_count_is_an_error(server, counter, count):
    server.replies = [(200, {}, json.dumps({"count": count}).encode())]
    with pytest.raises(TokenCountError, match="impossible count"):
        counter.count_messages(HELLO)


@pytest.mark.parametrize(
    "body", [b"<html>hi</html>", b"", b"\xff\xfe", b"[" * 100_000, b"[]", b'{"usage": null}']
)
def test_an_answer_without_usage_is_an_error_that_says_what_to_do(server, counter, body):
    server.tokenize = 404
    counter.count_messages(HELLO)
    server.replies = [(200, {}, body)]
    with pytest.raises(TokenCountError, match=r"usage\.prompt_tokens.*--token-table"):
        counter.count_messages(HELLO)


def test_an_endless_answer_is_cut(server, counter, monkeypatch):
    monkeypatch.setattr(token_counter, "MAX_ANSWER", 100_000)
    server.replies = [(200, {}, b" " * 1_000_000)]
    with pytest.raises(TokenCountError, match="longer than"):
        counter.count_messages(HELLO)


def test_a_redirect_is_not_followed(server, counter):
    server.replies = [(302, {"Location": "http://127.0.0.1:1/tokenize"}, b"")]
    with pytest.raises(TokenCountError, match="HTTP 302"):
        counter.count_messages(HELLO)


def test_a_missing_key_is_named_and_no_key_is_quoted(server, counter):
    server.replies = [(401, {}, b'{"error": {"message": "bad\\u001b[31m key"}}')]
    with pytest.raises(TokenCountError) as caught:
        counter.count_messages(HELLO)
    message = str(caught.value)
    assert "HTTP 401" in message
    assert "FACEOFF_API_KEY" in message
    assert "sesame" not in message
    assert "\x1b" not in message
    assert server.seen[0][1]["Authorization"] == "Bearer sesame-4711"


def test_an_unreachable_server_is_named_without_its_credentials():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(TokenCountError) as caught:
        TokenCounter(f"http://user:secret@127.0.0.1:{port}", "m").count_messages(HELLO)
    message = str(caught.value)
    assert f"http://127.0.0.1:{port}/tokenize cannot be reached (Connection refused)" in message
    assert "secret" not in message


def test_a_silent_server_times_out(monkeypatch):
    monkeypatch.setattr(token_counter, "READ_TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(TokenCountError, match="did not answer within"):
            TokenCounter(url, "m").count_messages(HELLO)


def test_works_under_gevent_monkey_patching(server):
    code = (
        "from gevent import monkey; monkey.patch_all()\n"
        "import sys\n"
        "from locustfiles.token_counter import TokenCounter\n"
        "counter = TokenCounter(sys.argv[1], 'm')\n"
        "message = [{'role': 'user', 'content': 'hello there'}]\n"
        "print(counter.count_messages(message), sum(counter.count_each([message] * 30)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, server.url], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "6 180\n"
