"""One cell as this process sees it: what to send, who is how far, when it is over, what goes on record."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import gevent
import msgspec
from gevent.event import Event

from locustfiles.arrival_clock import ArrivalClock
from locustfiles.attempt import CellClock, CellKey, Try, attempt_row
from locustfiles.body import Message, chat_body
from locustfiles.loop_health import LoopHealth
from locustfiles.options import CellOptions
from locustfiles.pace import Lockstep, arrival_times, reading_pause, start_offsets
from locustfiles.point import Point
from locustfiles.prompts import PromptWriter, TokenCounter, TokenTable
from locustfiles.recorder import Recorder
from locustfiles.records import (
    REQUEST_COLUMNS,
    SERVER_COLUMNS,
    Attempt,
    Done,
    GeneratorHealth,
    Phase,
    write_json,
)
from locustfiles.server_metrics import MetricsSampler
from locustfiles.wire import Target, request_bytes


@dataclass(frozen=True)
class Session:
    """One conversation of one user; number 0 is the warm-up.

    In an open loop ``user`` is not who plays the session but whose it is: arrival k belongs to user k modulo
    users, so that a session's text does not depend on who happened to be free.
    """

    user: int
    number: int
    phase: Phase
    intended_ns: int | None = None
    """When it was to start, where that was planned."""


class Cell:
    """State of one workload × point × users on one arm. ``users`` is the number asked for at the start."""

    def __init__(
        self,
        options: CellOptions,
        *,
        workload: str,
        point: Point,
        users: int,
        folder: Path,
        model: str,
        table: TokenTable,
        clock_scale: float,
        counter: TokenCounter | None,
        on_complete: Callable[[], None],
        on_error: Callable[[OSError], None],
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.options = options
        self.point = point
        self.users = users
        self.folder = folder
        self.model = model
        self.target = Target.from_url(options.host)
        self.arrivals = ArrivalClock()
        self.key = CellKey(options.arm, workload, point.text, users, options.repeat)
        self.prompts = PromptWriter(
            table,
            seed=options.seed,
            workload=workload,
            point=point.text,
            users=users,
            repeat=options.repeat,
            nonce=options.cache_salt if options.nonce else None,
            counter=counter,
        )
        self.lockstep = Lockstep(users) if point.lockstep else None
        self._offsets = start_offsets(options.seed, users, options.start_spread_s)
        self._seeded = Event()
        self._seeded_ns = 0
        self._on_complete = on_complete
        self._request_prefix = options.cache_salt[:12] or "faceoff"
        self._measured_sessions = 0
        self._arrivals = arrival_times(options.seed, point.rate, point.poisson) if point.rate else None
        self._arrived = 0
        self._starts: dict[int, int] = {}
        self._sessions: dict[int, int] = {}
        self._free: list[int] = []
        self._joined = 0
        self._measured = 0
        self._closed = False
        self._ended = 0
        self.health: LoopHealth | None = None
        self._started_utc = datetime.now(UTC).isoformat(timespec="seconds")
        self._requests = Recorder(folder / "requests.csv", REQUEST_COLUMNS, on_error)
        self._server = Recorder(folder / "server.csv", SERVER_COLUMNS, on_error)
        self.clock = CellClock(time.monotonic_ns(), clock_scale)
        own = all(url.startswith(f"{options.host}/") for url in options.metrics_urls)
        # A proxy's key is none of its backends' business.
        headers = options.headers if own else {}
        self._sampler = MetricsSampler(options.metrics_urls, self.clock, self._server, headers)
        self._sampler.start()

    # -- users and their sessions --------------------------------------------------------------------------

    def join(self) -> int:
        """The number of a user that starts: the lowest free one. The first one starts the cell's clock."""
        if not self._joined:
            self.clock.start_ns = time.monotonic_ns()
            self.health = LoopHealth()
        if self._free:
            number = min(self._free)
            self._free.remove(number)
            return number
        number = self._joined
        self._joined += 1
        return number

    def leave(self, user: int) -> None:
        """A user was stopped."""
        self._free.append(user)
        if self.lockstep is not None:
            self.lockstep.leave()

    def next_session(self, user: int) -> Session:
        """The next session that ``user`` plays, once it is due. Sessions are never played twice."""
        if self._arrivals is not None:
            return self._await_arrival(self._arrivals)
        number = self._sessions.get(user, 0)
        self._sessions[user] = number + 1
        return Session(user, number, self.phase(number), self._starts.get(user) if number == 0 else None)

    def _await_arrival(self, arrivals: Iterator[float]) -> Session:
        at = next(arrivals)
        index = self._arrived
        self._arrived += 1
        due = self._origin_ns(index) + round(at / self.clock.scale * 1e9)
        gevent.sleep(max(0.0, (due - time.monotonic_ns()) / 1e9))
        number, user = divmod(index, self.users)
        return Session(user, number, self.phase(number), due)

    def _origin_ns(self, user: int) -> int:
        """Time 0 of starts: behind a shared prefix, when user 0, who starts at once, has sent the prefix."""
        if self.point.prefix and user:
            self._seeded.wait()
            return self._seeded_ns
        return self.clock.start_ns

    def phase(self, session: int) -> Phase:
        """Phase of a session by its number."""
        if session == 0:
            return "warmup"
        sessions = self.options.sessions
        return "measure" if not sessions or session <= sessions else "drain"

    def await_start(self, user: int) -> None:
        """Closed loop: wait for the user's place in the spread of starts."""
        if self._arrivals is not None:
            return
        origin = self._origin_ns(user)
        if user < len(self._offsets) and self.options.start_spread_s:
            at = origin + round(self._offsets[user] / self.clock.scale * 1e9)
            self._starts[user] = at
            gevent.sleep(max(0.0, (at - time.monotonic_ns()) / 1e9))

    def await_turn(self, session: Session, turn: int) -> int | None:
        """Read and type before a follow-up; monotonic ns at which that is over, None = there is no pause."""
        mean_s = self.options.pause_s if self.point.pause is None else self.point.pause
        if turn == 1 or self.lockstep is not None or not mean_s:
            return None
        seed = self.options.seed + self.options.repeat
        pause_s = reading_pause(seed, session.user, session.number, turn, mean_s) / self.clock.scale
        due = time.monotonic_ns() + round(pause_s * 1e9)
        gevent.sleep(pause_s)
        return due

    def lockstep_step(self, session: Session, turn: int) -> tuple[int, int] | None:
        """The barrier's step that a request belongs to; None where it waits for nobody.

        The two requests that seed a shared prefix come before everybody's first step.
        """
        if self.lockstep is None:
            return None
        if self.point.prefix and session.number == 0 and session.user == 0:
            return None if turn < 3 else (0, 1)
        return session.number, turn

    def seeded(self) -> None:
        """The shared prefix has been sent, or could not be: everybody may start."""
        if not self._seeded.is_set():
            self._seeded_ns = time.monotonic_ns()
            self._seeded.set()

    def session_over(self, session: Session) -> None:
        """A session ended, completed or broken. The last measured one ends the cell."""
        if self.options.sessions and session.phase == "measure":
            self._measured_sessions += 1
            if self._measured_sessions >= self.users * self.options.sessions:
                if self.lockstep is not None:
                    self.lockstep.end()
                self._on_complete()

    # -- requests and their record -------------------------------------------------------------------------

    def request(self, messages: Sequence[Message], output: int, session: Session, turn: int) -> bytes:
        """A whole request, built before its clock starts.

        ``X-Request-Id`` lets a server's own log be laid beside the rows; ``x-litellm-session-id`` is what a
        LiteLLM proxy with session affinity routes by.
        """
        options = self.options
        body = chat_body(
            self.model,
            messages,
            output,
            cache_salt=None if options.nonce else options.cache_salt,
            dropped=options.drop_fields,
        )
        conversation = f"{self._request_prefix}-{session.user}-{session.number}"
        headers = options.headers | {
            "X-Request-Id": f"{conversation}-{turn}",
            "x-litellm-session-id": conversation,
        }
        return request_bytes(self.target, "/v1/chat/completions", headers, msgspec.json.encode(body))

    def wall_timeout_s(self) -> float:
        """Wall seconds that a request may take."""
        return self.options.request_timeout_s / self.clock.scale

    def record(self, attempt: Try) -> Attempt:
        """Write the row of an attempt that is over."""
        attempt.end_ns = attempt.end_ns or time.monotonic_ns()
        row = attempt_row(self.key, self.clock, attempt)
        self._requests.append(row)
        self._measured += row.phase == "measure"
        watch = attempt.watch
        if self.health is not None and watch is not None and watch.sent_ns:
            late = None if attempt.intended_ns is None else (watch.sent_ns - attempt.intended_ns) / 1e6
            self.health.add(watch, late)
        return row

    # -- the end -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop sampling and close the files; safe to call twice."""
        if not self._closed:
            self._closed = True
            self._ended = time.monotonic_ns()
            if self.health is not None:
                self.health.stop()
            self._sampler.stop()
            self._server.close()
            self._requests.close()

    def write_done(self, exit_code: int) -> None:
        """Write ``done.json``, after everything else of the cell is on disk.

        A cell that was to measure a number of sessions and was stopped before has none: it did not finish.
        """
        planned = self.users * self.options.sessions * self.point.turns if self.options.sessions else None
        if planned is not None and self._measured_sessions < self.users * self.options.sessions:
            return
        complete = planned is None or self._measured == planned
        reason = None
        if not complete:
            reason = f"{self._measured} of {planned} measured attempts: conversations broke off"
        write_json(
            self.folder / "done.json",
            Done(
                complete=complete,
                reason=reason,
                exit_code=exit_code,
                started_utc=self._started_utc,
                wall_seconds=(self._ended - self.clock.start_ns) / 1e9,
                clock_scale=self.clock.scale,
                rows=self._requests.rows,
                measured=self._measured,
                measured_planned=planned,
                generator=GeneratorHealth() if self.health is None else self.health.result(),
            ),
        )
