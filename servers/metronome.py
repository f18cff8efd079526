"""A server of known timing: the first token a fixed time after the request, then one chunk per beat.

``python -m servers.metronome --port 0`` prints ``metronome http://127.0.0.1:PORT up`` and serves until it
is told to stop. It has no model: it exists to measure load generators. Beats lie on an absolute grid from the
request's arrival, which the kernel stamps. What really happened is in the stream itself: the first content
chunk and the usage chunk carry ``metronome`` members with the request's arrival and the times of the first
and of the last content chunk's writing, in CLOCK_MONOTONIC ns, which a machine's processes share. So this
server's own lateness can be told from the client's error. ``--log`` writes the same into a file, one row per
request, by the request's ``X-Request-Id``.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import selectors
import signal
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import TextIO

_SO_TIMESTAMPNS = 35
_TIMESPEC = struct.Struct("qq")
_HEADERS = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    b"Connection: keep-alive\r\n\r\n"
)
_SPIN_S = 0.0003  # below this, poll instead of sleeping: epoll wakes up to a millisecond late


def chunked(payload: bytes) -> bytes:
    """One HTTP chunk."""
    return f"{len(payload):x}\r\n".encode() + payload + b"\r\n"


def _event(content: str, **extra: object) -> bytes:
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": None}
    return b"data: " + json.dumps({"choices": [choice], **extra}).encode() + b"\n\n"


def _header(head: bytes, wanted: bytes) -> str:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == wanted:
            return value.strip().decode("latin-1")
    return ""


@dataclass
class Beats:
    """The timing that every request gets."""

    first_s: float = 0.3
    gap_s: float = 0.02
    chunks: int = 128


@dataclass
class Stream:
    """One connection; between requests ``beat`` is -1."""

    sock: socket.socket
    inbox: bytearray = field(default_factory=bytearray)
    beat: int = -1
    chunks: int = 0
    arrived_ns: int = 0
    first_ns: int = 0
    last_ns: int = 0
    prompt_tokens: int = 0
    request_id: str = ""


class Metronome:
    """Serves every connection from one thread: a heap of beats and a selector."""

    def __init__(self, listener: socket.socket, beats: Beats, log: TextIO | None = None) -> None:
        self._listener = listener
        self._beats = beats
        self._log = log
        self._due: list[tuple[int, int, Stream]] = []
        self._order = 0
        self._selector = selectors.DefaultSelector()
        self._role = chunked(b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n')
        self._plain = chunked(_event(" tick"))
        self._last = chunked(
            b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n',
        )
        self.stopping = False

    def serve(self) -> None:
        """Run until ``stopping``."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        while not self.stopping:
            wait = 0.2
            if self._due:
                wait = (self._due[0][0] - time.monotonic_ns()) / 1e9 - _SPIN_S
            for key, _ in self._selector.select(max(0.0, wait)):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)
            now = time.monotonic_ns()
            while self._due and self._due[0][0] <= now:
                _, _, stream = heapq.heappop(self._due)
                self._beat(stream)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
            self._selector.register(sock, selectors.EVENT_READ, Stream(sock))

    def _drop(self, stream: Stream) -> None:
        stream.beat = -1
        self._selector.unregister(stream.sock)
        stream.sock.close()

    def _read(self, stream: Stream) -> None:
        try:
            data, ancillary, _, _ = stream.sock.recvmsg(1 << 18, 64)
        except BlockingIOError:
            return
        except OSError:
            data, ancillary = b"", []
        if not data:
            self._drop(stream)
            return
        now, real = time.monotonic_ns(), time.time_ns()
        arrived = now
        for level, kind, stamp in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS):
                seconds, nanoseconds = _TIMESPEC.unpack_from(stamp)
                arrived = now - max(0, real - (seconds * 10**9 + nanoseconds))
        if not stream.inbox:
            stream.arrived_ns = arrived  # of the request's first bytes
        stream.inbox += data
        head, found, body = bytes(stream.inbox).partition(b"\r\n\r\n")
        if not found:
            return
        length = int(_header(head, b"content-length") or 0)
        if len(body) >= length:
            stream.inbox.clear()
            self._answer(stream, head, body)

    def _answer(self, stream: Stream, head: bytes, body: bytes) -> None:
        path = head.split(b" ", 2)[1]
        if path.startswith(b"/v1/models"):
            self._reply(stream, {"object": "list", "data": [{"id": "metronome", "max_model_len": 1 << 20}]})
        elif path == b"/tokenize":
            request = json.loads(body)
            text = request.get("prompt") or " ".join(m["content"] for m in request.get("messages", []))
            self._reply(stream, {"count": len(text.split()), "max_model_len": 1 << 20, "tokens": []})
        elif path.endswith(b"/completions"):
            request = json.loads(body)
            stream.prompt_tokens = sum(len(m["content"].split()) for m in request.get("messages", []))
            stream.chunks = int(request.get("max_tokens") or self._beats.chunks)
            stream.request_id = _header(head, b"x-request-id")
            stream.beat = 0
            self._write(stream, _HEADERS)
            self._schedule(stream)
        elif path in (b"/health", b"/version"):
            self._reply(stream, {"version": "metronome"})
        else:
            self._reply(stream, {"error": {"message": "not found"}}, b"404 Not Found")

    def _reply(self, stream: Stream, answer: object, status: bytes = b"200 OK") -> None:
        body = json.dumps(answer).encode()
        head = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        self._write(stream, head % (status, len(body)) + body)

    def _schedule(self, stream: Stream) -> None:
        due = stream.arrived_ns + round((self._beats.first_s + stream.beat * self._beats.gap_s) * 1e9)
        self._order += 1
        heapq.heappush(self._due, (due, self._order, stream))

    def _beat(self, stream: Stream) -> None:
        if stream.beat < 0:
            return  # hung up
        now = time.monotonic_ns()
        if stream.beat == 0:
            stream.first_ns = now
            stamp = {"arrived_ns": stream.arrived_ns, "first_ns": now}
            payload = self._role + chunked(_event("tick", metronome=stamp))
        else:
            payload = self._plain
        stream.last_ns = now
        stream.beat += 1
        if stream.beat < stream.chunks:
            self._write(stream, payload)
            if stream.beat >= 0:
                self._schedule(stream)
        else:
            stream.beat = -1
            self._write(stream, payload + self._last + self._end(stream))
            if self._log is not None:
                self._log.write(
                    f"{stream.request_id},{stream.arrived_ns},{stream.first_ns},{stream.last_ns},{stream.chunks}\n"
                )

    def _end(self, stream: Stream) -> bytes:
        usage = {
            "prompt_tokens": stream.prompt_tokens,
            "completion_tokens": stream.chunks,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        times = {
            "arrived_ns": stream.arrived_ns,
            "first_ns": stream.first_ns,
            "last_ns": stream.last_ns,
        }
        final = json.dumps({"choices": [], "usage": usage, "metronome": times}).encode()
        return chunked(b"data: " + final + b"\n\ndata: [DONE]\n\n") + b"0\r\n\r\n"

    def _write(self, stream: Stream, data: bytes) -> None:
        try:
            sent = stream.sock.send(data)
        except OSError:
            sent = -1
        if sent != len(data):  # a client that does not read is not worth a queue here
            self._drop(stream)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m servers.metronome", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 = any free port")
    parser.add_argument("--first-ms", type=float, default=300.0, help="request to first token")
    parser.add_argument("--gap-ms", type=float, default=20.0, help="between chunks")
    parser.add_argument("--chunks", type=int, default=128, help="where the request has no max_tokens")
    parser.add_argument("--log", default="", help="CSV of what really happened, one row per request")
    parser.add_argument("--cpu", type=int, default=None, help="pin to this core")
    options = parser.parse_args()
    if options.cpu is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {options.cpu})
    with socket.create_server((options.host, options.port), backlog=4096) as listener:
        log = open(options.log, "w", encoding="utf-8", buffering=1 << 16) if options.log else None  # noqa: SIM115
        if log is not None:
            log.write("request_id,arrived_ns,first_ns,last_ns,chunks\n")
        beats = Beats(options.first_ms / 1e3, options.gap_ms / 1e3, options.chunks)
        server = Metronome(listener, beats, log)

        def stop(*_: object) -> None:
            server.stopping = True

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        print(f"metronome http://{options.host}:{listener.getsockname()[1]} up", flush=True)
        server.serve()
        if log is not None:
            log.close()


if __name__ == "__main__":
    main()
