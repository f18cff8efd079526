"""HTTP/1.1 on a raw asyncio protocol: llhttp parses requests, responses are written as bytes."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from urllib.parse import parse_qs, urlsplit

import httptools

MAX_BODY = 64 << 20
MAX_HEADERS = 64 << 10
_PIPELINE = 16
#: Bytes that may wait for a client that reads slowly before its deltas are merged.
_BUFFER = 256 << 10


def _status_line(status: int) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "Unknown"
    return f"HTTP/1.1 {status} {phrase}\r\nserver: faceoff-sim\r\n".encode()


class Exchange:
    """One request and its response."""

    __slots__ = (
        "_protocol",
        "arrived",
        "body",
        "headers",
        "keep_alive",
        "method",
        "on_gone",
        "on_room",
        "path",
        "query",
        "version",
    )

    def __init__(
        self, protocol: HttpProtocol, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> None:
        self._protocol = protocol
        self.method = method
        try:
            parts = urlsplit(target)
        except ValueError:
            parts = urlsplit("/invalid")
        self.path = parts.path
        self.query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        self.headers = headers
        self.body = body
        #: ``time.monotonic()`` at which its last byte was read.
        self.arrived = time.monotonic()
        self.version, self.keep_alive = "1.1", True
        #: Called once if the client goes away before the response has ended.
        self.on_gone: Callable[[], None] | None = None
        #: Called when a slow client has room again.
        self.on_room: Callable[[], None] | None = None

    @property
    def gone(self) -> bool:
        """Whether the response can no longer reach the client."""
        return self._protocol.exchange is not self

    @property
    def congested(self) -> bool:
        """Whether the client reads more slowly than it is written to."""
        return self._protocol.congested

    def respond(
        self,
        status: int,
        body: bytes,
        content_type: str = "application/json",
        headers: dict[str, str] | None = None,
    ) -> None:
        """A whole response at once."""
        if self.gone:
            return
        extra = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        close = "" if self.keep_alive else "connection: close\r\n"
        head = f"content-type: {content_type}\r\ncontent-length: {len(body)}\r\n{extra}{close}\r\n"
        self._protocol.write(_status_line(status) + head.encode() + body)
        self._protocol.done(self)

    def stream_head(self) -> bytes:
        """Status line and headers of an event stream."""
        framing = "transfer-encoding: chunked\r\n" if self.version == "1.1" else ""
        if self.version != "1.1":
            self.keep_alive = False
        close = "" if self.keep_alive else "connection: close\r\n"
        return (
            _status_line(200)
            + f"content-type: text/event-stream; charset=utf-8\r\n{framing}{close}\r\n".encode()
        )

    def frame(self, event: bytes) -> bytes:
        """One event as one HTTP chunk."""
        if self.version != "1.1":
            return event
        return b"%x\r\n%b\r\n" % (len(event), event)

    def write(self, data: bytes) -> None:
        """Bytes made by ``stream_head`` and ``frame``."""
        if self._protocol.exchange is self:
            self._protocol.write(data)

    def end(self, data: bytes = b"") -> None:
        """Last bytes of a stream."""
        if self.gone:
            return
        self._protocol.write(data + b"0\r\n\r\n" if self.version == "1.1" else data)
        self._protocol.done(self)

    def release(self) -> None:
        """Nobody needs to be told anything any more."""
        self.on_gone = self.on_room = None

    def cut(self) -> None:
        """Break the connection in the middle."""
        self._protocol.cut()


def _nowhere(data: bytes) -> None:
    pass


class HttpProtocol(asyncio.Protocol):
    """One connection; requests on it are answered one after another."""

    def __init__(self, handle: Callable[[Exchange], None], connections: set[HttpProtocol]) -> None:
        self._handle = handle
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._queue: deque[Exchange] = deque()
        self.exchange: Exchange | None = None
        self.congested = False
        #: Bytes to the client: the transport's own method while there is one.
        self.write: Callable[[bytes], None] = _nowhere
        self._reset()

    def _reset(self) -> None:
        self._target: list[bytes] = []
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._header_bytes = self._body_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio callback."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=_BUFFER)
        self.write = transport.write
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio callback: whoever is being answered stops at once."""
        self._connections.discard(self)
        self._transport = None
        self._queue.clear()
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            if exchange.on_gone is not None:
                exchange.on_gone()
            exchange.release()
        self.write = _nowhere
        # Parser and protocol hold each other; parted, they need no garbage collection.
        self._parser = None

    def pause_writing(self) -> None:
        """asyncio callback."""
        self.congested = True

    def resume_writing(self) -> None:
        """asyncio callback."""
        self.congested = False
        if self.exchange is not None and self.exchange.on_room is not None:
            self.exchange.on_room()

    def data_received(self, data: bytes) -> None:
        """asyncio callback."""
        if self._parser is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, "Upgrades are not supported.")
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, _TooLarge):
                raise
            self._refuse(error.__context__.status, str(error.__context__))
        except httptools.HttpParserError:
            self._refuse(400, "Invalid HTTP request received.")

    def _refuse(self, status: int, message: str) -> None:
        if self._transport is not None and not self._transport.is_closing():
            body = message.encode()
            head = f"content-type: text/plain\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self._transport.write(_status_line(status) + head.encode() + body)
            self._transport.close()

    def on_url(self, url: bytes) -> None:
        """llhttp callback."""
        self._target.append(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """llhttp callback."""
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEADERS:
            raise _TooLarge(431, "Request headers are too large.")
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """llhttp callback."""
        if self._headers.get("expect", "").lower() == "100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """llhttp callback."""
        self._body_bytes += len(body)
        if self._body_bytes > MAX_BODY:
            raise _TooLarge(413, "Request body is too large.")
        self._body.append(body)

    def on_message_complete(self) -> None:
        """llhttp callback."""
        parser = self._parser
        assert parser is not None
        target = b"".join(self._target).decode("latin-1")
        method = parser.get_method().decode("latin-1")
        exchange = Exchange(self, method, target, self._headers, b"".join(self._body))
        exchange.version = parser.get_http_version()
        exchange.keep_alive = parser.should_keep_alive()
        self._reset()
        if len(self._queue) >= _PIPELINE:
            raise _TooLarge(429, "Too many requests in flight on one connection.")
        self._queue.append(exchange)
        if self.exchange is None:
            self._next()

    def _next(self) -> None:
        if self._queue and self.exchange is None:
            self.exchange = self._queue.popleft()
            self._handle(self.exchange)

    def done(self, exchange: Exchange) -> None:
        """The response has been written."""
        self.exchange = None
        exchange.release()
        if not exchange.keep_alive:
            self.close()
        elif self._queue:
            asyncio.get_running_loop().call_soon(self._next)

    def close(self) -> None:
        """Close once everything is written."""
        if self._transport is not None:
            self._transport.close()

    def cut(self) -> None:
        """Close without the rest."""
        if self._transport is not None:
            self._transport.abort()


class _TooLarge(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
