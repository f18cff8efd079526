"""The user that every scenario builds on: sessions, paced requests with stamps, a row for each attempt."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import gevent
from locust import User
from locust.env import Environment

from locustfiles.attempt import Try
from locustfiles.cell import Cell, Session
from locustfiles.point import Point
from locustfiles.prompts import Prompt, PromptWriter
from locustfiles.records import Attempt
from locustfiles.runtime import runtime
from locustfiles.stream import StreamWatch
from locustfiles.wire import Connection, WireError

logger = logging.getLogger("faceoff")

_CONNECT_TIMEOUT_S = 10.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_LONGEST_RETRY_AFTER_S = 10.0


@dataclass(frozen=True)
class Reply:
    """What the scenario needs to know of an attempt."""

    ok: bool
    answer: str
    tokens: int | None


class ChatUser(User):
    """One of the cell's concurrent sessions. A scenario sets ``workload`` and writes one ``@task``."""

    abstract = True
    workload: ClassVar[str]

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.cell: Cell = runtime(environment).cells[self.workload]
        self.number = self.cell.join()
        self._connection = Connection(self.cell.target, self.cell.arrivals)
        self._failures = 0
        self._retry_after = 0.0

    @property
    def point(self) -> Point:
        """The workload's parameters."""
        return self.cell.point

    @property
    def prompts(self) -> PromptWriter:
        """Writes this cell's prompts."""
        return self.cell.prompts

    def on_start(self) -> None:
        """Wait for this user's place in the spread of starts."""
        self.cell.await_start(self.number)

    def on_stop(self) -> None:
        """Leave the cell."""
        self._connection.close()
        self.cell.leave(self.number)

    @contextmanager
    def session(self) -> Iterator[Session]:
        """The next session, once it is due. One that breaks off still counts as played."""
        session = self.cell.next_session(self.number)
        yield session
        self.cell.session_over(session)
        self._back_off()

    def send(self, session: Session, turn: int, prompt: Prompt, output: int | None = None) -> Reply:
        """Send one request, watch its stream to the end, leave its row and its Locust row.

        Everything that takes time is done before the attempt's clock starts: the body is built, the
        connection is open. An idle connection that the server has closed meanwhile is replaced, once, and the
        attempt starts again: that is HTTP keep-alive at work, not a failure of the server.

        Args:
            session: from ``session()``.
            turn: from 1.
            prompt: what to ask.
            output: tokens to ask for; the point's by default.
        """
        output = output or self.point.output
        attempt = Try(
            user=session.user,
            session=session.number,
            turn=turn,
            phase=session.phase,
            prompt_tokens=prompt.tokens,
            output_tokens=output,
            prompt_digest=prompt.digest,
        )
        request = self.cell.request(prompt.messages, output, session, turn)
        intended_ns = session.intended_ns if turn == 1 else self.cell.await_turn(session, turn)
        began = time.monotonic_ns()
        try:
            self._attempt(session, attempt, request, intended_ns)
        except BaseException as stop:
            if attempt.watch is not None and attempt.watch.sent_ns:
                attempt.censored = f"cut short by the end of the run ({type(stop).__name__})"
                self.cell.record(attempt)
            self._connection.close()
            raise
        row = self.cell.record(attempt)
        self._report(row, attempt, began)
        ok = row.status == "ok"
        self._failures = 0 if ok else self._failures + 1
        if not ok:
            logger.warning(
                "user %d session %d turn %d: %s: %s",
                session.user,
                session.number,
                turn,
                row.status,
                row.error,
            )
            self._retry_after = _retry_after_s(attempt.watch)
        watch = attempt.watch
        return Reply(ok=ok, answer=watch.answer if watch else "", tokens=row.output_tokens)

    # -- the attempt ---------------------------------------------------------------------------------------

    def _attempt(self, session: Session, attempt: Try, request: bytes, intended_ns: int | None) -> None:
        connection = self._connection
        try:
            attempt.connect_ms = connection.open(_CONNECT_TIMEOUT_S)
            step = self.cell.lockstep_step(session, attempt.turn)
            if self.cell.lockstep is not None and step is not None:
                attempt.intended_ns = self.cell.lockstep.wait(self.number, step)
                attempt.connect_ms += connection.open(_CONNECT_TIMEOUT_S)  # it may have idled too long
            else:
                attempt.intended_ns = intended_ns
            while True:
                reused = connection.used
                attempt.watch = StreamWatch()
                attempt.failure = None
                try:
                    connection.exchange(request, attempt.watch, self.cell.wall_timeout_s())
                except WireError as error:
                    attempt.failure = error
                    gone = error.unanswered and error.kind in (WireError.CLOSED, WireError.RESET)
                    if gone and reused and not attempt.retries:
                        attempt.retries = 1
                        attempt.connect_ms += connection.open(_CONNECT_TIMEOUT_S)
                        continue
                break
            attempt.end_ns = time.monotonic_ns()
            attempt.watch.finish(attempt.end_ns)
        except WireError as error:  # the connection could not be opened
            attempt.failure = error
            attempt.end_ns = time.monotonic_ns()

    def _report(self, row: Attempt, attempt: Try, began: int) -> None:
        """One request row in Locust; TTFT and TPOT as rows that do not count as requests. Wall time."""
        scale = self.cell.clock.scale
        name = self.workload if self.point.turns == 1 else f"{self.workload} turn {row.turn}"
        elapsed = (attempt.end_ns - began) / 1e6
        ok = row.status == "ok"
        self.environment.events.request.fire(
            request_type="POST",
            name=name,
            response_time=row.e2e_ms / scale if ok and row.e2e_ms is not None else elapsed,
            response_length=len(attempt.watch.answer) if attempt.watch else 0,
            exception=None if ok else RuntimeError(f"{row.status}: {row.error}"),
            context={"arm": self.cell.options.arm},
        )
        if ok:
            for kind, value in (("TTFT", row.ttft_ms), ("TPOT", row.tpot_ms)):
                if value is not None:
                    self.environment.stats.get(name, kind).log(value / scale, 0)

    def _back_off(self) -> None:
        """Pause after failures: a server that refuses at once must not be hammered."""
        if self._failures:
            pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(self._failures - 1, 10))
            gevent.sleep(max(pause, self._retry_after))


def _retry_after_s(watch: StreamWatch | None) -> float:
    """Seconds that the server asks for, at most ten; 0 where it does not."""
    value: Any = watch.headers.get("retry-after") if watch is not None else None
    try:
        return max(0.0, min(_LONGEST_RETRY_AFTER_S, float(value)))
    except (TypeError, ValueError):
        return 0.0
