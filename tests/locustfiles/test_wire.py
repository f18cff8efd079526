"""The connection, against real sockets: framing, stamps, and everything that a server can do wrong."""

import gzip
import json
import socket
import threading
import time
import tracemalloc

import gevent
import numpy as np
import pytest

from locustfiles.arrival_clock import ArrivalClock, kernel_stamps_work
from locustfiles.stream import StreamWatch
from locustfiles.wire import Connection, Target, WireError, request_bytes

from .conftest import reset

TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
STOP = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n'
DONE = b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def with_length(body: bytes) -> bytes:
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


def chunked(*pieces: bytes) -> bytes:
    framed = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces)
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\n\r\n"


def exchange(url: str, connection: Connection | None = None, timeout_s: float = 20.0):
    """(watch, failure, connection) of one request."""
    connection = connection or Connection(Target.from_url(url), ArrivalClock())
    watch = StreamWatch()
    failure = None
    try:
        connection.open(5.0)
        connection.exchange(request_bytes(connection.target, "/v1/x", {}, b"{}"), watch, timeout_s)
    except WireError as error:
        failure = error
    watch.finish(time.monotonic_ns())
    return watch, failure, connection


def outcome(url: str, **options):
    watch, failure, connection = exchange(url, **options)
    connection.close()
    return watch.outcome(failure)


@pytest.mark.parametrize(
    "answer",
    [with_length(TOKEN + STOP + DONE), chunked(TOKEN, STOP, DONE), chunked(TOKEN + STOP + DONE)],
    ids=["length", "a chunk each", "one chunk"],
)
@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_framing_and_reads_of_any_size(scripted, answer, piece):
    def script(sock, _):
        for i in range(0, len(answer), piece):
            sock.sendall(answer[i : i + piece])

    server = scripted(script)
    watch, failure, connection = exchange(server.url)
    assert (watch.outcome(failure), watch.chunks) == (("ok", None), 1)
    again, failure, _ = exchange(server.url, connection)
    assert again.outcome(failure) == ("ok", None)
    assert server.connections == 1  # kept alive
    connection.close()


def test_body_until_close(scripted):
    def script(sock, _):
        sock.sendall(HEAD + b"Connection: close\r\n\r\n" + TOKEN + STOP)
        sock.close()

    assert outcome(scripted(script).url) == ("ok", None)


def test_interim_response_is_skipped(scripted):
    server = scripted(
        lambda sock, _: sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" + with_length(TOKEN + STOP))
    )
    watch, failure, connection = exchange(server.url)
    assert (watch.outcome(failure), watch.http_status) == (("ok", None), 200)
    connection.close()


def test_message_that_never_ends_behind_done_is_ok(scripted):
    def script(sock, _):
        sock.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"%x\r\n%s\r\n" % (len(TOKEN), TOKEN))
        for part in (STOP, DONE):
            sock.sendall(b"%x\r\n%s\r\n" % (len(part), part))
        sock.recv(1)  # until the client gives up on the terminating chunk

    began = time.monotonic()
    assert outcome(scripted(script).url) == ("ok", None)
    assert time.monotonic() - began < 15


def test_refusal_keeps_its_text(scripted):
    body = b'{"error":{"message":"prompt too long","code":400}}'
    head = b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    server = scripted(lambda sock, _: sock.sendall(head % len(body) + body))
    assert outcome(server.url) == ("http_error", "HTTP 400: prompt too long (400)")


def test_garbage_instead_of_http(scripted):
    server = scripted(lambda sock, _: sock.sendall(b"\x00\x01garbage\r\n\r\n" * 10))
    status, reason = outcome(server.url)
    assert status == "stream_error"
    assert reason.startswith("not HTTP")


def test_endless_header_is_cut_off(scripted):
    def script(sock, _):
        sock.sendall(b"HTTP/1.1 200 OK\r\n")
        for _ in range(10_000):
            sock.sendall(b"X-A: " + b"a" * 1000 + b"\r\n")

    status, reason = outcome(scripted(script).url)
    assert status == "stream_error"
    assert "headers of more than" in reason or "not HTTP" in reason


def test_hundred_megabyte_line_is_cut_off_in_bounded_memory(scripted):
    def script(sock, _):
        sock.sendall(HEAD + b"Connection: close\r\n\r\ndata: ")
        for _ in range(100):
            sock.sendall(b"x" * (1 << 20))
        sock.close()

    tracemalloc.start()
    try:
        status, reason = outcome(scripted(script).url)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert status == "stream_error"
    assert "an event of more than" in reason
    assert peak < 80 * (1 << 20)


def test_compressed_body_is_named(scripted):
    body = gzip.compress(TOKEN + STOP)
    head = HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body)
    status, reason = outcome(scripted(lambda sock, _: sock.sendall(head + body)).url)
    assert status == "stream_error"
    assert "compressed (gzip)" in reason


def test_event_that_is_not_json(scripted):
    status, reason = outcome(
        scripted(lambda sock, _: sock.sendall(with_length(b"data: {oops\n\n" + STOP))).url
    )
    assert status == "stream_error"
    assert "not a completion chunk" in reason


def test_reset_in_the_middle_is_a_stream_error_not_a_success(scripted):
    def script(sock, _):
        sock.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"%x\r\n%s\r\n" % (len(TOKEN), TOKEN))
        time.sleep(0.2)  # lets the client read the token first: a reset discards what is unread
        reset(sock)

    status, reason = outcome(scripted(script).url)
    assert status == "stream_error"
    assert "broke" in reason


def test_close_in_the_middle_is_truncated(scripted):
    def script(sock, _):
        sock.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"%x\r\n%s\r\n" % (len(TOKEN), TOKEN))
        sock.close()

    assert outcome(scripted(script).url)[0] == "truncated"


def test_close_without_an_answer_says_so(scripted):
    server = scripted(lambda sock, _: sock.close())
    watch, failure, connection = exchange(server.url)
    assert failure.unanswered
    assert watch.outcome(failure)[0] == "connect_error"
    connection.close()


def test_nothing_for_ever_is_a_timeout(scripted):
    server = scripted(lambda sock, _: sock.recv(1))
    assert outcome(server.url, timeout_s=0.3) == ("timeout", "no end after 0.3 s")


def test_idle_connection_that_the_server_closed_is_replaced_before_the_clock_starts(scripted):
    def script(sock, _):
        sock.sendall(with_length(TOKEN + STOP))
        sock.close()

    server = scripted(script)
    _, failure, connection = exchange(server.url)
    assert failure is None
    gevent.sleep(0.1)  # the FIN arrives
    watch, failure, connection = exchange(server.url, connection)
    assert watch.outcome(failure) == ("ok", None)
    assert server.connections == 2
    connection.close()


def test_nobody_listens():
    status, reason = outcome("http://127.0.0.1:1")
    assert status == "connect_error"
    assert "cannot connect to 127.0.0.1:1" in reason


def test_early_refusal_of_a_large_request_is_read():
    """A server may answer and close before it has read the body; what it said is worth more than EPIPE."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        sock, _ = listener.accept()
        sock.recv(100)
        sock.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\nConnection: close\r\n\r\nbig")
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 20):
            pass
        sock.close()

    threading.Thread(target=serve, daemon=True).start()
    with listener:
        target = Target.from_url(f"http://127.0.0.1:{listener.getsockname()[1]}")
        connection = Connection(target, ArrivalClock())
        connection.open(5.0)
        watch = StreamWatch()
        connection.exchange(request_bytes(target, "/", {}, b"x" * (32 << 20)), watch, 20.0)
    assert watch.outcome(None) == ("http_error", "HTTP 413: big")
    connection.close()


def test_kernel_stamps_pass_their_self_check():
    assert kernel_stamps_work()


def measure_beside_a_hog(url: str) -> tuple[list[float], list[float]]:
    """(TTFT errors, lateness of reads) in ms: 16 streams beside a greenlet that blocks the loop."""
    errors: list[float] = []
    late_reads: list[float] = []

    class Watch(StreamWatch):
        truth: dict[str, int] | None = None

        def _take(self, event, stamp_ns, by_kernel):
            super()._take(event, stamp_ns, by_kernel)
            late_reads.append((time.monotonic_ns() - stamp_ns) / 1e6)
            if b'"metronome"' in event.data:
                self.truth = json.loads(event.data)["metronome"]

    clock = ArrivalClock()

    def user(number: int) -> None:
        connection = Connection(Target.from_url(url), clock)
        connection.open(5.0)
        gevent.sleep(number * 0.3 / 16)
        for _ in range(4):
            watch = Watch()
            body = b'{"max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]}'
            connection.exchange(
                request_bytes(connection.target, "/v1/chat/completions", {}, body), watch, 30.0
            )
            assert watch.outcome(None) == ("ok", None)
            assert watch.kernel_stamps > 0
            measured = (watch.first_token_ns - watch.sent_ns) / 1e6
            truth = (watch.truth["first_ns"] - watch.truth["arrived_ns"]) / 1e6
            errors.append(abs(measured - truth))
        connection.close()

    def hog() -> None:
        while True:
            until = time.perf_counter() + 0.010
            while time.perf_counter() < until:
                pass
            gevent.sleep(0.002)

    hogging = gevent.spawn(hog)
    gevent.joinall([gevent.spawn(user, n) for n in range(16)], raise_error=True)
    hogging.kill()
    return errors, late_reads


def test_ttft_is_within_2_ms_though_the_loop_is_blocked_for_10_ms_at_a_time(metronome):
    """Known timing: 300 ms, then every 20 ms. On a busy machine *other* processes may take the core in the
    middle of a stamp; up to three rounds tell that from an error of ours, which would be in each."""
    for _ in range(3):
        errors, late_reads = measure_beside_a_hog(metronome)
        assert len(errors) == 64
        assert np.quantile(late_reads, 0.9) > 3  # really blocked: stamps of user space would be this late
        if np.quantile(errors, 0.99) <= 2.0:
            break
    assert np.quantile(errors, 0.99) <= 2.0
