"""From what was watched to the row: the one place where an attempt's durations are computed."""

from __future__ import annotations

import time
from dataclasses import dataclass

from locustfiles.records import Attempt, Phase
from locustfiles.stream import StreamWatch, one_line
from locustfiles.wire import WireError


@dataclass
class CellClock:
    """Model-time milliseconds since the cell's start. ``scale`` is model time / wall time."""

    start_ns: int
    scale: float = 1.0

    def ms(self, instant_ns: int | None) -> float | None:
        """Instant on the monotonic clock -> ms since the cell's start; None stays None."""
        return None if instant_ns is None else (instant_ns - self.start_ns) * self.scale / 1e6

    def now_ms(self) -> float:
        """Model ms since the cell's start."""
        return (time.monotonic_ns() - self.start_ns) * self.scale / 1e6

    def span_ms(self, begin_ns: int | None, end_ns: int | None) -> float | None:
        """Duration in model ms; None if either end is unknown."""
        return None if begin_ns is None or end_ns is None else (end_ns - begin_ns) * self.scale / 1e6


@dataclass(frozen=True)
class CellKey:
    """What all attempts of a cell share."""

    arm: str
    workload: str
    point: str
    users: int
    repeat: int


@dataclass
class Try:
    """One attempt while it is under way. Instants are monotonic ns, ``connect_ms`` is wall time."""

    user: int
    session: int
    turn: int
    phase: Phase
    prompt_tokens: int
    output_tokens: int
    prompt_digest: str
    intended_ns: int | None = None
    connect_ms: float | None = None
    retries: int = 0
    watch: StreamWatch | None = None
    failure: WireError | None = None
    censored: str | None = None
    """Why the attempt was cut short by us, if it was."""
    end_ns: int = 0


def tpot_ms(first_ms: float | None, last_ms: float | None, tokens: int | None, chunks: int) -> float | None:
    """(last token - first token) / (output tokens - 1), in ms.

    None below two tokens, and where all tokens came in one chunk or in one read: their spacing was not
    observed.
    """
    if (
        first_ms is None
        or last_ms is None
        or tokens is None
        or tokens < 2
        or chunks < 2
        or last_ms <= first_ms
    ):
        return None
    return (last_ms - first_ms) / (tokens - 1)


def attempt_row(key: CellKey, clock: CellClock, attempt: Try) -> Attempt:
    """The row of an attempt that is over.

    An attempt that the run itself cut short is ``censored`` whatever had arrived; its times stay, for they
    happened, but it is not judged.
    """
    row = Attempt(
        arm=key.arm,
        workload=key.workload,
        point=key.point,
        users=key.users,
        repeat=key.repeat,
        user=attempt.user,
        session=attempt.session,
        turn=attempt.turn,
        phase=attempt.phase,
        intended_ms=clock.ms(attempt.intended_ns),
        connect_ms=None if attempt.connect_ms is None else attempt.connect_ms * clock.scale,
        end_ms=clock.ms(attempt.end_ns),
        prompt_tokens_asked=attempt.prompt_tokens,
        output_tokens_asked=attempt.output_tokens,
        retries=attempt.retries,
        prompt_digest=attempt.prompt_digest,
        status="censored",
    )
    watch = attempt.watch
    if watch is not None and watch.sent_ns:
        _add_stream(row, clock, watch)
    if attempt.censored is not None:
        row.error = one_line(attempt.censored)
    elif watch is not None and watch.sent_ns:
        row.status, row.error = watch.outcome(attempt.failure)
    else:
        row.status, row.error = "connect_error", one_line(str(attempt.failure))
    return row


def _add_stream(row: Attempt, clock: CellClock, watch: StreamWatch) -> None:
    row.start_ms = clock.ms(watch.sent_ns)
    row.headers_ms = clock.ms(watch.headers_ns)
    row.first_token_ms = clock.ms(watch.first_token_ns)
    row.first_answer_ms = clock.ms(watch.first_answer_ns)
    row.last_token_ms = clock.ms(watch.last_token_ns)
    row.ttft_ms = clock.span_ms(watch.sent_ns, watch.first_token_ns)
    row.ttfa_ms = clock.span_ms(watch.sent_ns, watch.first_answer_ns)
    row.e2e_ms = clock.span_ms(watch.sent_ns, watch.last_token_ns)
    row.output_tokens, row.token_source = watch.tokens()
    row.tpot_ms = tpot_ms(row.first_token_ms, row.last_token_ms, row.output_tokens, watch.chunks)
    row.prompt_tokens = watch.prompt_tokens
    row.cached_tokens = watch.cached_tokens
    row.reasoning_tokens = watch.reasoning_tokens
    row.chunks = watch.chunks
    median, longest = watch.gaps_ms()
    row.icl_p50_ms = None if median is None else median * clock.scale
    row.icl_max_ms = None if longest is None else longest * clock.scale
    row.finish_reason = None if watch.finish_reason is None else one_line(watch.finish_reason, 40)
    row.http_status = watch.http_status
    if watch.first_token_by_kernel is not None:
        row.stamp = "kernel" if watch.first_token_by_kernel else "user"
    server = watch.headers.get("x-litellm-model-id")
    row.server_id = None if server is None else one_line(str(server), 80)
    row.output_digest = watch.output_digest
