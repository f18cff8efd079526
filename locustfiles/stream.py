"""Watches one completion stream: which tokens came when, how it ended, and so what the attempt was."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Mapping
from typing import Any

from locustfiles.completion_chunk import Chunk, Usage, body_error_text, decode_chunk, error_text
from locustfiles.records import Status, TokenSource
from locustfiles.sse import Event, SseReader
from locustfiles.wire import WireError

_HEAD_BYTES = 4096
#: No server counts this far in one request; a larger (or a negative) count is a server's mistake.
_MAX_TOKENS = 2**40


def one_line(text: str, limit: int = 300) -> str:
    """``text`` fit for one CSV field and one terminal line."""
    flat = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * limit]).split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


class StreamWatch:
    """The sink of one exchange. Instants are monotonic nanoseconds; None = never happened."""

    def __init__(self) -> None:
        self.sent_ns = 0
        self.headers_ns: int | None = None
        self.first_token_ns: int | None = None
        self.first_answer_ns: int | None = None
        self.last_token_ns: int | None = None
        self.http_status: int | None = None
        self.headers: Mapping[str, Any] = {}
        self.finish_reason: str | None = None
        self.usage: Usage | None = None
        self.error: str | None = None
        """An error inside the stream."""
        self.chunks = 0
        self.token_ids = 0
        self.token_reads = 0
        """Reads that held at least one token-bearing event."""
        self.coalesced_reads = 0
        self.first_token_coalesced = False
        self.kernel_stamps = 0
        self.user_stamps = 0
        self.first_token_by_kernel: bool | None = None
        self.ended = False
        self._sse = SseReader()
        self._gaps_ns: list[int] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._tool_calls: list[str] = []
        self._head = b""
        self._events = 0
        self._read_ns = -1  # stamp of the read that the last token-bearing event came from
        self._read_events = 0

    # -- the sink's side -----------------------------------------------------------------------------------

    def on_headers(self, status: int, headers: Mapping[str, Any], stamp_ns: int) -> None:
        """Remember the head; a body that is not a stream is kept for its error text."""
        self.http_status = status
        self.headers = headers
        self.headers_ns = stamp_ns

    def on_body(self, data: bytes, stamp_ns: int, by_kernel: bool) -> None:
        """Take the events that ``data`` completes."""
        if len(self._head) < _HEAD_BYTES:
            self._head += data[:_HEAD_BYTES]
        if self.http_status != 200:
            return
        if by_kernel:
            self.kernel_stamps += 1
        else:
            self.user_stamps += 1
        for event in self._sse.feed(data):
            self._take(event, stamp_ns, by_kernel)

    def _take(self, event: Event, stamp_ns: int, by_kernel: bool) -> None:
        if self.ended:
            return
        if event.data == b"[DONE]":
            self.ended = True
            return
        self._events += 1
        chunk = decode_chunk(event.data)
        if chunk.error or event.kind == b"error":
            self.error = error_text(chunk.error or event.data.decode("utf-8", errors="replace"))
        if chunk.usage is not None:
            self.usage = chunk.usage
        if chunk.choices:
            self._take_choices(chunk, stamp_ns, by_kernel)

    def _take_choices(self, chunk: Chunk, stamp_ns: int, by_kernel: bool) -> None:
        bears_token = bears_answer = False
        for choice in chunk.choices or ():
            delta = choice.delta
            text = choice.text
            if delta is not None:
                text = delta.content or text
                reasoning = delta.reasoning or delta.reasoning_content
                if reasoning:
                    bears_token = True
                    self._reasoning.append(reasoning)
                if delta.tool_calls:
                    bears_token = bears_answer = True
                    self._tool_calls.append(str(delta.tool_calls))
            if text:
                bears_token = bears_answer = True
                self._content.append(text)
            if choice.token_ids:
                self.token_ids += len(choice.token_ids)
            if choice.finish_reason:
                self.finish_reason = choice.finish_reason
        if bears_token:
            self._stamp_token(stamp_ns, by_kernel, bears_answer)

    def _stamp_token(self, stamp_ns: int, by_kernel: bool, answer: bool) -> None:
        self.chunks += 1
        if stamp_ns == self._read_ns:
            self._read_events += 1
            if self._read_events == 2:
                self.coalesced_reads += 1
                self.first_token_coalesced |= self.first_token_ns == stamp_ns
        else:
            self._read_ns = stamp_ns
            self._read_events = 1
            self.token_reads += 1
        if self.last_token_ns is not None:
            self._gaps_ns.append(stamp_ns - self.last_token_ns)
        if self.first_token_ns is None:
            self.first_token_ns = stamp_ns
            self.first_token_by_kernel = by_kernel
        if answer and self.first_answer_ns is None:
            self.first_answer_ns = stamp_ns
        self.last_token_ns = stamp_ns

    # -- what it was ---------------------------------------------------------------------------------------

    def finish(self, stamp_ns: int) -> None:
        """The body is over: take a last event that lacks its blank line; a cut-off one is left out."""
        if self.http_status != 200:
            return
        try:
            for event in self._sse.finish():
                self._take(event, stamp_ns, False)
        except ValueError:
            pass

    def outcome(self, failure: WireError | None) -> tuple[Status, str | None]:
        """Status of the attempt and, unless all is well, a reason of one line.

        ``ok`` needs HTTP 200, a finish reason and no error inside the stream. ``[DONE]`` proves nothing: vLLM
        sends it after an error as well.
        """
        wire = None if failure is None else one_line(str(failure))
        if self.http_status is not None and self.http_status != 200:
            return "http_error", one_line(f"HTTP {self.http_status}: {body_error_text(self._head)}")
        if self.error is not None:
            return "stream_error", one_line(self.error)
        if failure is not None:
            if failure.kind == WireError.TIMEOUT:
                return "timeout", wire
            if failure.kind == WireError.CONNECT or failure.unanswered:
                return "connect_error", wire
            if failure.kind in (WireError.PROTOCOL, WireError.RESET) or self.http_status is None:
                return "stream_error", wire
        if self.finish_reason is None:
            if not self._events and self._head.strip():
                return "stream_error", one_line(f"no event stream: {self._head.decode('utf-8', 'replace')}")
            return "truncated", wire or "the stream ended without a finish_reason"
        return "ok", wire

    def tokens(self) -> tuple[int | None, TokenSource]:
        """Output tokens and where the number is from. Chunks are never taken for tokens."""
        if self.usage is not None:
            count = _plausible(self.usage.completion_tokens)
            if count is not None:
                return count, "usage"
        if self.token_ids:
            return self.token_ids, "counted"
        return None, "none"

    @property
    def prompt_tokens(self) -> int | None:
        """From the server's usage."""
        return _plausible(self.usage.prompt_tokens) if self.usage else None

    @property
    def cached_tokens(self) -> int | None:
        """From the server's usage; None where it does not tell (which is not 0)."""
        details = self.usage.prompt_tokens_details if self.usage else None
        return _plausible(details.cached_tokens) if details else None

    @property
    def reasoning_tokens(self) -> int | None:
        """From the server's usage."""
        details = self.usage.completion_tokens_details if self.usage else None
        return _plausible(details.reasoning_tokens) if details else None

    @property
    def answer(self) -> str:
        """The text of the answer, without reasoning: what a client sends back in the next turn."""
        return "".join(self._content)

    @property
    def output_digest(self) -> str | None:
        """Digest of everything generated; None if nothing was."""
        if not self.chunks:
            return None
        text = "\0".join(("".join(self._reasoning), self.answer, "".join(self._tool_calls)))
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()

    def gaps_ms(self) -> tuple[float | None, float | None]:
        """(median, longest) gap between token-bearing chunks, wall ms; None below two chunks."""
        if not self._gaps_ns:
            return None, None
        return statistics.median(self._gaps_ns) / 1e6, max(self._gaps_ns) / 1e6


def _plausible(count: int | None) -> int | None:
    return count if count is not None and 0 <= count < _MAX_TOKENS else None
