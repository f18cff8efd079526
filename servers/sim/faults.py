"""Ways to misbehave on purpose, by rate (``--faults die=0.01,stall=0.02``) or by request header.

A header ``X-Faceoff-Fault: kind`` or ``kind:value`` picks the fault of that request; ``none`` shields it. By
rate, seed and prompt decide, so the same requests fail in every run and on every server with the same seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from hashlib import blake2b

import msgspec

from .bodies import ApiError, error_body
from .sse import Reply, StreamReply, WholeReply

HEADER = "x-faceoff-fault"

#: Kind -> default value and what it means.
KINDS: dict[str, tuple[float, str]] = {
    "die": (3, "the connection breaks after this many deltas"),
    "error": (3, "an error event comes after this many deltas, then [DONE]"),
    "stall": (1e9, "nothing comes after the third delta for this many seconds (model time)"),
    "truncated": (0, "the stream ends without finish_reason and [DONE]"),
    "no_usage": (0, "usage was asked for and does not come"),
    "slow_headers": (2, "headers and all else come this many seconds (model time) after the request at best"),
    "keep_alive": (0.5, "headers come at once, then a comment every so many seconds until the first token"),
    "role_early": (0, "headers and the role event come at once, long before the first token"),
    "reasoning": (8, "this many tokens come as reasoning first"),
    "429": (0, "refused: too many requests"),
    "503": (0, "refused: overloaded"),
}
_STALL_AFTER = 3


class Fault(msgspec.Struct, frozen=True):
    """One fault of one request."""

    kind: str
    value: float

    @classmethod
    def parse(cls, text: str) -> Fault:
        """``kind`` or ``kind:value``. Raises ValueError that names the kinds."""
        kind, _, value = text.strip().partition(":")
        if kind not in KINDS:
            raise ValueError(f"unknown fault {kind!r}; known are {', '.join(KINDS)}")
        try:
            return cls(kind, float(value) if value else KINDS[kind][0])
        except ValueError:
            raise ValueError(f"fault {kind}: {value!r} is not a number") from None

    def refuse(self) -> None:
        """Raise the ApiError of kinds ``429`` and ``503``."""
        if self.kind == "429":
            raise ApiError(429, "Too many requests, please retry later.", "RateLimitError")
        raise ApiError(503, "The server is overloaded, please retry later.", "ServiceUnavailableError")


class Faults(msgspec.Struct, frozen=True):
    """Rates of faults."""

    rates: tuple[tuple[Fault, float], ...] = ()
    seed: int = 0

    @classmethod
    def parse(cls, text: str, seed: int) -> Faults:
        """``kind=rate`` or ``kind:value=rate``, comma-separated. Raises ValueError."""
        rates = []
        for item in filter(None, text.split(",")):
            kind, _, rate = item.partition("=")
            try:
                share = float(rate)
            except ValueError:
                raise ValueError(f"{item!r}: write kind=rate, e.g. die=0.01") from None
            if not 0 <= share <= 1:
                raise ValueError(f"{item!r}: a rate is between 0 and 1")
            rates.append((Fault.parse(kind), share))
        if sum(share for _, share in rates) > 1:
            raise ValueError("the rates add up to more than 1")
        return cls(tuple(rates), seed)

    def choose(self, headers: Mapping[str, str], digest: bytes) -> Fault | None:
        """The fault of a request, if it has one. Raises ApiError for an unknown kind in the header."""
        text = headers.get(HEADER)
        if text is not None:
            if text.strip() == "none":
                return None
            try:
                return Fault.parse(text)
            except ValueError as error:
                raise ApiError(400, f"{HEADER}: {error}", param=HEADER) from None
        if not self.rates:
            return None
        seed = self.seed.to_bytes(8, "big", signed=True)
        draw = int.from_bytes(blake2b(digest + seed, digest_size=8, person=b"fault").digest(), "big") / 2**64
        for fault, share in self.rates:
            if draw < share:
                return fault
            draw -= share
        return None


class FaultyStream(StreamReply):
    """A stream with one fault. ``scale`` turns the fault's model seconds into wall seconds."""

    def __init__(
        self, reply: Reply, include_usage: bool, continuous_usage: bool, fault: Fault, scale: float
    ) -> None:
        super().__init__(reply, include_usage and fault.kind != "no_usage", continuous_usage)
        self.fault = fault
        self._scale = scale
        self._deltas = 0
        self._held = self._finished = False
        self._loop = asyncio.get_running_loop()
        if fault.kind == "role_early":
            self.exchange.write(self.start())
        elif fault.kind == "keep_alive":
            self.exchange.write(self.start_head())
            self._keep_alive()
        elif fault.kind == "slow_headers":
            self._hold(fault.value)

    def push(self, tokens: int, finished: bool) -> None:
        """See Sink."""
        self._deltas += 1
        kind, over = self.fault.kind, self._deltas > self.fault.value
        if kind == "die" and over:
            self.exchange.cut()
        elif kind == "error" and over:
            self._fail()
        else:
            if kind == "stall" and self._deltas == _STALL_AFTER + 1:
                self._hold(self.fault.value)
            self._finished = self._finished or finished
            super().push(tokens, finished)

    def flush(self) -> None:
        """See StreamReply."""
        if self._held or self.exchange.gone:
            return
        reasoning = int(self.fault.value) if self.fault.kind == "reasoning" else 0
        if self.chat and self.sent < reasoning and self.sent < self.produced:
            text = self.take(min(self.produced, reasoning))
            delta = b'{"index":0,"delta":{"reasoning":"%b"},"logprobs":null,"finish_reason":null}]' % text
            data = self.start()
            self.exchange.write(data + self.exchange.frame(self.opening + delta + self.closing(self.sent)))
        super().flush()

    def finish(self) -> None:
        """See StreamReply."""
        if self._held or self.exchange.gone:
            return
        if self.fault.kind == "truncated":
            self.flush()
            self.exchange.end()
            return
        if self.fault.kind == "reasoning" and self.sent < self.fault.value:
            self.flush()
        super().finish()

    def _hold(self, seconds: float) -> None:
        self._held = True
        # Longer than any client waits means for ever; the loop cannot hold timers that far away.
        if seconds < 1e6:
            self._loop.call_later(seconds / self._scale, self._release)

    def _release(self) -> None:
        self._held = False
        if self._finished:
            self.finish()
        else:
            self.flush()

    def _keep_alive(self) -> None:
        if self.started or self.exchange.gone:
            return
        self.exchange.write(self.exchange.frame(b": keep-alive\n\n"))
        self._loop.call_later(max(0.001, self.fault.value / self._scale), self._keep_alive)

    def _fail(self) -> None:
        if self.exchange.gone:
            return
        frame = self.exchange.frame
        event = b"data: " + error_body(500, "Internal server error", "InternalServerError", None) + b"\n\n"
        data = self.start() + frame(event) + frame(b"data: [DONE]\n\n")
        if self.exchange.on_gone is not None:
            self.exchange.on_gone()
        self.exchange.end(data)


class FaultyWhole(WholeReply):
    """An unstreamed response with one fault: those of streams that have a counterpart here."""

    def __init__(self, reply: Reply, fault: Fault) -> None:
        super().__init__(reply)
        self._fault = fault

    def push(self, tokens: int, finished: bool) -> None:
        """See Sink."""
        kind = self._fault.kind
        if not finished or kind == "stall":
            return
        if kind in ("die", "truncated"):
            self.reply.exchange.cut()
        elif kind == "error":
            body = error_body(500, "Internal server error", "InternalServerError", None)
            self.reply.exchange.respond(500, body)
        else:
            super().push(tokens, finished)
