"""What is asked of an arm outside the load: bounded in time and size, whatever the server does."""

import time
import tracemalloc

import pytest

from locustfiles import arm_http
from locustfiles.arm_http import ArmHttp
from locustfiles.arms import ArmError, parse_arms

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"


@pytest.fixture
def client(scripted, monkeypatch):
    monkeypatch.setattr(arm_http, "CONNECT_S", 0.5)

    def make(script):
        [arm] = parse_arms(f"a={scripted(script).url}")
        return ArmHttp(arm, {})

    return make


def test_a_body_that_drips_for_ever_is_cut_off(client):
    def script(sock, _):
        sock.sendall(HEAD)
        while True:
            sock.sendall(b" ")
            time.sleep(0.05)

    began = time.monotonic()
    assert "answers without an end" in client(script).health(timeout=0.5)
    assert time.monotonic() - began < 10


def test_an_endless_body_is_cut_off_in_bounded_memory(client):
    def script(sock, _):
        sock.sendall(HEAD)
        while True:
            sock.sendall(b"x" * 65536)

    tracemalloc.start()
    try:
        with pytest.raises(ArmError, match="answers more than 16 MB"):
            client(script).models()
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_a_plain_answer_is_read_whole(client):
    body = b'{"data": [{"id": "m"}]}'
    arm = client(
        lambda sock, _: sock.sendall(
            HEAD.replace(b"close", b"keep-alive\r\nContent-Length: %d" % len(body)) + body
        )
    )
    assert [entry["id"] for entry in arm.models()] == ["m"]
    assert arm.health() is None
