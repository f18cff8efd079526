"""One HTTP/1.1 connection that stamps what it reads.

The socket is read inside the event loop's own I/O callback, not in a greenlet that waits its turn, and every
read carries the kernel's arrival stamp (``arrival_clock``). Framing is llhttp's, through geventhttpclient.
TLS has no kernel stamps to offer: there a greenlet reads and the stamp is the time of the read.
"""

from __future__ import annotations

import errno
import socket as std_socket
import ssl
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import gevent
import gevent.socket
import gevent.ssl
from gevent.event import AsyncResult
from geventhttpclient.response import HTTPParseError, HTTPResponse

from locustfiles.arrival_clock import ANCILLARY_BYTES, ArrivalClock, enable_kernel_stamps

_READ_BYTES = 256 * 1024
_MAX_HEADER_BYTES = 64 * 1024
_READ, _WRITE = 1, 2  # libev's event bits

#: Wall seconds that a server gets to end the HTTP message after the stream said ``[DONE]``.
_DONE_GRACE_S = 2.0


class WireError(Exception):
    """The exchange broke below the level of the stream's content. ``kind`` is one of the class constants."""

    CONNECT = "connect"
    TIMEOUT = "timeout"
    CLOSED = "closed"
    RESET = "reset"
    PROTOCOL = "protocol"

    def __init__(self, kind: str, message: str, *, unanswered: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.unanswered = unanswered
        """Not one byte of a response had arrived."""


class Sink(Protocol):
    """What an exchange is told, in order, from inside the event loop: keep it short."""

    sent_ns: int
    """Set by the exchange right before the first byte is written."""

    def on_headers(self, status: int, headers: Mapping[str, Any], stamp_ns: int) -> None:
        """The final (not 1xx) response's head is complete."""

    def on_body(self, data: bytes, stamp_ns: int, by_kernel: bool) -> None:
        """A piece of the body."""

    @property
    def ended(self) -> bool:
        """The content says that nothing more will come."""


class Target(NamedTuple):
    """Where requests go."""

    scheme: str
    host: str
    port: int
    path: str
    """Base path without a trailing slash."""

    @classmethod
    def from_url(cls, url: str) -> Target:
        """Parse ``http(s)://host[:port][/base]``.

        Raises:
            ValueError: if it is not such an URL.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an http:// or https:// URL")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return cls(parts.scheme, parts.hostname, port, parts.path.rstrip("/"))

    @property
    def netloc(self) -> str:
        """Value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = 443 if self.scheme == "https" else 80
        return host if self.port == default else f"{host}:{self.port}"


def request_bytes(target: Target, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """A whole POST request, ready to be written at once."""
    lines = [
        f"POST {target.path}{path} HTTP/1.1",
        f"Host: {target.netloc}",
        "Accept: text/event-stream",
        "Accept-Encoding: identity",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


class _Response(HTTPResponse):
    """llhttp's callbacks, handed to the sink with the stamp of the read that they come from."""

    def __init__(self, sink: Sink) -> None:
        super().__init__("POST")
        self.sink = sink
        self.stamp_ns = 0
        self.by_kernel = False

    def _on_headers_complete(self) -> int | bool | None:
        skip: int | bool | None = super()._on_headers_complete()
        if self.get_code() >= 200:
            headers = {str(k).lower(): v for k, v in self.items()}
            encoding = str(headers.get("content-encoding", "identity")).lower()
            if encoding not in ("identity", ""):
                raise WireError(
                    WireError.PROTOCOL,
                    f"the body is compressed ({encoding[:40]}) though identity was asked for",
                )
            self.sink.on_headers(self.get_code(), headers, self.stamp_ns)
        return skip

    def _on_body(self, buf: bytearray) -> None:
        self.sink.on_body(bytes(buf), self.stamp_ns, self.by_kernel)


class Connection:
    """A keep-alive connection of one user. Not shared between greenlets."""

    def __init__(self, target: Target, arrivals: ArrivalClock, tls: ssl.SSLContext | None = None) -> None:
        self.target = target
        self._arrivals = arrivals
        self._tls = tls
        self._sock: Any = None
        self._owner: Any = None  # closes _sock, and must outlive it
        self._watch: Any = None
        self._kernel = False
        self._response: _Response | None = None
        self._outcome: AsyncResult[None] | None = None
        self._header_bytes = 0
        self._answered = False
        self._grace: Any = None
        self.used = False
        """An exchange has ended on this connection: the server may close it at any time."""
        self.reads = 0

    def open(self, timeout_s: float) -> float:
        """Make sure that the connection is open; wall milliseconds that it took (0.0 if it was).

        Raises:
            WireError: kind ``connect``.
        """
        if self._sock is not None and not self._stale():
            return 0.0
        self.close()
        began = time.monotonic_ns()
        target = self.target
        try:
            sock = gevent.socket.create_connection((target.host, target.port), timeout=timeout_s)
        except OSError as error:
            raise WireError(
                WireError.CONNECT, f"cannot connect to {target.netloc}: {error}", unanswered=True
            ) from None
        try:
            sock.setsockopt(std_socket.IPPROTO_TCP, std_socket.TCP_NODELAY, 1)
            if target.scheme == "https":
                context = self._tls or gevent.ssl.create_default_context()
                sock = self._sock = context.wrap_socket(sock, server_hostname=target.host)
            else:
                self._sock = sock._sock  # type: ignore[attr-defined]  # the plain non-blocking socket below gevent's
                self._kernel = enable_kernel_stamps(self._sock)
                self._watch = gevent.get_hub().loop.io(self._sock.fileno(), _READ)
            sock.settimeout(None)
        except (OSError, ssl.SSLError) as error:
            sock.close()
            raise WireError(
                WireError.CONNECT, f"cannot set up TLS with {target.netloc}: {error}", unanswered=True
            ) from None
        self._owner = sock
        self.used = False
        return (time.monotonic_ns() - began) / 1e6

    def close(self) -> None:
        """Close; safe to call twice."""
        if self._watch is not None:
            self._watch.stop()
            self._watch.close()
            self._watch = None
        self._stop_grace()
        if self._owner is not None:
            self._owner.close()
            self._owner = self._sock = None

    def _stop_grace(self) -> None:
        if self._grace is not None:
            self._grace.stop()
            self._grace.close()
            self._grace = None

    def exchange(self, request: bytes, sink: Sink, timeout_s: float) -> int:
        """Write ``request`` and feed the answer to ``sink`` until the message ends.

        Args:
            request: from ``request_bytes``.
            sink: told about headers and body as they arrive.
            timeout_s: wall seconds for the whole exchange.

        Returns:
            Monotonic ns right before the first byte was written; also set as ``sink.sent_ns`` at that time.

        Raises:
            WireError: whatever broke; the connection is then closed.
        """
        self._response = response = _Response(sink)
        outcome: AsyncResult[None] = AsyncResult()
        self._outcome = outcome
        self._header_bytes = 0
        self._answered = False
        finished = False
        timer = gevent.Timeout.start_new(timeout_s)
        try:
            if self._watch is not None:
                self._watch.start(self._on_readable)
            sent_ns = time.monotonic_ns()
            sink.sent_ns = sent_ns
            if self._watch is None:
                self._exchange_tls(request, outcome)
            else:
                self._write(request, outcome)
            outcome.get()
            finished = True
        except gevent.Timeout as caught:
            if caught is not timer:
                raise
            raise WireError(
                WireError.TIMEOUT, f"no end after {timeout_s:.1f} s", unanswered=not self._answered
            ) from None
        except OSError as error:
            # A server may answer and close before it has read everything: an answer that came counts.
            raise self._broken(error) from None
        finally:
            timer.close()
            self.used = True
            if self._watch is not None:
                self._watch.stop()
            self._stop_grace()
            if not finished or response.should_close() or not response.message_complete:
                self.close()
            self._response = self._outcome = None
        return sent_ns

    # -- inside the event loop ---------------------------------------------------------------------------

    def _on_readable(self) -> None:
        outcome = self._outcome
        if outcome is None or outcome.ready():
            return
        try:
            try:
                if self._kernel:
                    data, ancillary, _, _ = self._sock.recvmsg(_READ_BYTES, ANCILLARY_BYTES)
                    stamp_ns, by_kernel = self._arrivals.stamp(ancillary)
                else:
                    data = self._sock.recv(_READ_BYTES)
                    stamp_ns, by_kernel = time.monotonic_ns(), False
            except (BlockingIOError, InterruptedError):
                return
            self._take(data, stamp_ns, by_kernel, outcome)
        except OSError as error:
            outcome.set_exception(self._broken(error))
        except Exception as error:  # must not reach the hub: it would be printed and the attempt would hang
            outcome.set_exception(error if isinstance(error, WireError) else self._refused(error))

    def _take(self, data: bytes, stamp_ns: int, by_kernel: bool, outcome: AsyncResult[None]) -> None:
        response = self._response
        assert response is not None
        self.reads += 1
        if data:
            self._answered = True
            if not response.headers_complete:
                self._header_bytes += len(data)
        response.stamp_ns = stamp_ns
        response.by_kernel = by_kernel
        try:
            response.feed(data)  # b"" tells llhttp that the peer closed: it ends an until-close body
        except HTTPParseError as error:
            if data:
                raise WireError(WireError.PROTOCOL, f"not HTTP: {error}") from None
            raise WireError(
                WireError.CLOSED,
                "the server closed the connection "
                + ("in the middle of its answer" if self._answered else "without an answer"),
                unanswered=not self._answered,
            ) from None
        if not response.headers_complete and self._header_bytes > _MAX_HEADER_BYTES:
            raise WireError(WireError.PROTOCOL, f"headers of more than {_MAX_HEADER_BYTES} bytes")
        if response.message_complete and response.get_code() >= 200:
            outcome.set(None)
        elif not data:
            raise WireError(
                WireError.CLOSED,
                "the server closed the connection without an answer",
                unanswered=not self._answered,
            )
        elif response.sink.ended and self._grace is None and self._watch is not None:
            self._grace = gevent.get_hub().loop.timer(_DONE_GRACE_S)
            self._grace.start(self._on_grace)

    def _on_grace(self) -> None:
        if self._outcome is not None and not self._outcome.ready():
            self._outcome.set(None)

    # -- helpers -----------------------------------------------------------------------------------------

    def _write(self, request: bytes, outcome: AsyncResult[None]) -> None:
        view = memoryview(request)
        while view and not outcome.ready():
            try:
                view = view[self._sock.send(view) :]
            except (BlockingIOError, InterruptedError):
                watcher = gevent.get_hub().loop.io(self._sock.fileno(), _WRITE)
                try:
                    gevent.get_hub().wait(watcher)
                finally:
                    watcher.close()
            except OSError as error:
                # The server closed on us; what it said before that, if anything, is read first.
                try:
                    outcome.get(timeout=1.0)
                except gevent.Timeout:
                    raise self._broken(error) from None
                return

    def _exchange_tls(self, request: bytes, outcome: AsyncResult[None]) -> None:
        self._sock.sendall(request)
        while not outcome.ready():
            data = self._sock.recv(_READ_BYTES)
            try:
                self._take(data, time.monotonic_ns(), False, outcome)
            except WireError:
                raise
            except Exception as error:
                raise self._refused(error) from None
            if self._response is not None and self._response.sink.ended and not outcome.ready():
                outcome.set(None)

    def _broken(self, error: OSError) -> WireError:
        kind = WireError.RESET if error.errno in (errno.ECONNRESET, errno.EPIPE) else WireError.CLOSED
        return WireError(kind, f"the connection broke: {error}", unanswered=not self._answered)

    def _refused(self, error: Exception) -> WireError:
        return WireError(WireError.PROTOCOL, f"{error}"[:300])

    def _stale(self) -> bool:
        """Whether the idle connection was closed, or spoken on out of turn, by the server."""
        if self._watch is None:
            return False  # TLS: cannot be told without reading; the retry covers it
        try:
            self._sock.recv(1, std_socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True
        return True
