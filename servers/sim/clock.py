"""Model time over wall time, and an event loop whose timers are precise to about 0.1 ms."""

from __future__ import annotations

import asyncio
import select
import selectors
import time
from typing import Any

#: Bounds of the clock scale.
SLOWEST, FASTEST = 0.1, 20.0


class ModelClock:
    """Model seconds = ``scale`` x wall seconds since an origin: absolute, so lateness never adds up."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self._wall = time.monotonic()
        self._model = 0.0

    def now(self) -> float:
        """Model seconds now."""
        return self._model + (time.monotonic() - self._wall) * self.scale

    def wall(self, model: float) -> float:
        """The ``time.monotonic()`` at which the model time ``model`` is reached."""
        return self._wall + (model - self._model) / self.scale

    def set_scale(self, scale: float) -> None:
        """Change the scale from now on; model time stays continuous. Only while nothing is scheduled."""
        wall = time.monotonic()
        self._model += (wall - self._wall) * self.scale
        self._wall, self.scale = wall, scale


class PreciseSelector(selectors.EpollSelector):
    """An epoll selector that sleeps in microseconds.

    ``epoll.poll`` rounds its timeout up to whole milliseconds, half a decode step at clock scale 10. The
    epoll descriptor itself can be waited for with ``select``, whose timeout is finer.
    """

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As the base class, with a finer timeout."""
        if timeout is not None and 0 < timeout < 1.0:
            select.select([self.fileno()], [], [], timeout)
            timeout = 0
        return super().select(timeout)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """An asyncio loop with precise timers where epoll exists, the default one elsewhere."""
    if not hasattr(select, "epoll"):
        return asyncio.new_event_loop()
    selector: Any = PreciseSelector()
    return asyncio.SelectorEventLoop(selector)
