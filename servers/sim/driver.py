"""The engine on the wall clock: starts and ends steps when they are due, hands outputs to their streams."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from .clock import ModelClock
from .engine import Engine
from .metrics import Metrics
from .request import Request
from .sse import Sink

#: A timer that fires this early (s, wall) counts as on time: sleeping again would cost more.
_EARLY = 5e-5


class Driver:
    """Runs one engine on an absolute model-time schedule.

    Work that a real server does off its GPU's clock (parsing, tokenising, hashing) is queued with the time
    at which its bytes arrived and done between steps, one request at a time so that streams stay punctual. A
    step starts, in model time, exactly where the last one ended, and never before every request that had
    reached the scheduler by then is known to it.
    """

    def __init__(self, engine: Engine, metrics: Metrics, clock: ModelClock) -> None:
        self.engine = engine
        self.metrics = metrics
        self.clock = clock
        self._loop = asyncio.get_running_loop()
        #: Arrival (wall), and the work that ends in ``submit``.
        self._arrivals: deque[tuple[float, Callable[[float], None]]] = deque()
        self._timer: asyncio.Handle | None = None
        #: Model time up to which the engine has been run.
        self._reached = 0.0

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight."""
        return not self._arrivals and self.engine.in_flight == 0

    def arrive(self, wall: float, prepare: Callable[[float], None]) -> None:
        """A request's bytes were complete at ``wall``; ``prepare(model time of arrival)`` submits it."""
        self._arrivals.append((wall, prepare))
        if len(self._arrivals) == 1:
            self._loop.call_soon(self._prepare_one)

    def submit(self, request: Request, arrival: float) -> None:
        """Give a request, whose ``sink`` takes its tokens, to the engine."""
        self.engine.submit(request, arrival)
        if self.engine.step is None:
            self._rearm(self._loop.time())

    def abort(self, request: Request) -> None:
        """The client is gone. vLLM counts such requests nowhere, not even under ``abort``."""
        self.engine.abort(request)

    def _model(self, wall: float) -> float:
        return self.clock.now() - (time.monotonic() - wall) * self.clock.scale

    def _prepare_one(self) -> None:
        if not self._arrivals:
            return
        wall, prepare = self._arrivals.popleft()
        prepare(self._model(wall))
        if self._arrivals:
            self._loop.call_soon(self._prepare_one)

    def _rearm(self, wall: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(wall, self._advance)

    def _advance(self) -> None:
        """End the step that is due, start the next one, and sleep until its end."""
        self._timer = None
        engine, clock = self.engine, self.clock
        step = engine.step
        if step is not None:
            due = clock.wall(step.end)
            if time.monotonic() < due - _EARLY:
                self._rearm(due)
                return
            self._emit(due)
            self._reached = step.end
        start = self._next_start()
        if start is None:
            return
        while self._arrivals and self._model(self._arrivals[0][0]) <= start:
            wall, prepare = self._arrivals.popleft()
            prepare(self._model(wall))
        end = engine.begin(start)
        if end is not None:
            self._rearm(clock.wall(end))
        elif engine.in_flight:
            ready = engine.next_ready()
            if ready is not None:
                self._rearm(clock.wall(max(ready, start)))

    def _next_start(self) -> float | None:
        """Model time at which the next step starts; None (with a timer set) when it is not known yet."""
        engine = self.engine
        if engine.running or engine.waiting:
            return self._reached
        ready = engine.next_ready()
        if ready is None:
            return None
        start = max(self._reached, ready)
        wall = self.clock.wall(start)
        if time.monotonic() < wall - _EARLY:
            self._rearm(wall)
            return None
        return start

    def _emit(self, due: float) -> None:
        step = self.engine.step
        assert step is not None
        monotonic, observe, late = time.monotonic, self.metrics.observe, self.metrics.lateness.observe
        outputs = self.engine.finish()
        for output in outputs:
            sink: Sink = output.request.sink  # type: ignore[assignment]
            sink.push(output.tokens, output.finished)
            if output.finished:
                # Request and sink hold each other; parted, they need no garbage collection.
                output.request.sink = None
            late(max(0.0, monotonic() - due))
            observe(output, sink.limit)
        if outputs:
            self.metrics.observe_step(outputs)
