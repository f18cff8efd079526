"""When sessions may start: spread over a session, in lockstep, or as an open loop of arrivals."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator

from gevent.event import Event


def start_offsets(seed: int, users: int, spread_s: float) -> list[float]:
    """Start of each user in model seconds after the cell's start.

    User 0 starts at 0; the others one in each of ``users - 1`` equal slots of the spread, placed within the
    slot by the seed: evenly enough that no seed makes a burst, and the same for every arm.
    """
    if users < 2:
        return [0.0] * users
    slot = spread_s / (users - 1)
    order = sorted(range(1, users), key=lambda user: _uniform(seed, user, "order"))
    offsets = [0.0] * users
    for place, user in enumerate(order):
        offsets[user] = (place + _uniform(seed, user, "place")) * slot
    return offsets


def _uniform(seed: int, user: int, what: str) -> float:
    digest = hashlib.blake2b(f"{seed}/{user}/{what}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def reading_pause(seed: int, user: int, session: int, turn: int, mean_s: float) -> float:
    """Model seconds that a user reads and types before ``turn``: uniform from 0 to twice the mean.

    Without it, users with answers of one fixed length lock into a regular pipeline, in which each finds the
    queue empty: a pattern that no real traffic has, and that decides the TTFT of follow-ups.
    """
    return 2.0 * mean_s * _uniform(seed, user, f"pause/{session}/{turn}")


def arrival_times(seed: int, rate: float, poisson: bool) -> Iterator[float]:
    """Model seconds at which sessions arrive, without end; the first at 0. The same for every arm.

    Poisson: independent exponential gaps of mean 1/rate, by inversion of uniform numbers from the seed.
    """
    at = 0.0
    number = 0
    while True:
        yield at
        gap = -math.log(1.0 - _uniform(seed, number, "gap")) if poisson else 1.0
        at += gap / rate
        number += 1


class Lockstep:
    """A barrier over steps: when nobody is under way any more, those with the lowest step go on together.

    A user whose conversation failed arrives early at a later step (its next session) and so neither holds
    the others up nor runs ahead of them. A user that is gone for good must ``leave``.
    """

    def __init__(self, users: int) -> None:
        self._parties = users
        self._waiting: dict[int, tuple[tuple[int, int], Event]] = {}
        self._released_ns = 0
        self._ended = False

    def wait(self, user: int, step: tuple[int, int]) -> int:
        """Block until ``step`` (session, turn) is released; the monotonic ns of the release."""
        event = Event()
        self._waiting[user] = (step, event)
        try:
            self._release_if_all_wait()
            event.wait()
        finally:
            # Killed while waiting: the others must not wait for a user who is gone.
            self._waiting.pop(user, None)
        return self._released_ns

    def leave(self) -> None:
        """One user less to wait for."""
        self._parties -= 1
        self._release_if_all_wait()

    def end(self) -> None:
        """The cell is over: nobody is released any more."""
        self._ended = True

    def _release_if_all_wait(self) -> None:
        if self._ended or not self._waiting or len(self._waiting) < self._parties:
            return
        lowest = min(step for step, _ in self._waiting.values())
        self._released_ns = time.monotonic_ns()
        for user, (step, event) in list(self._waiting.items()):
            if step == lowest:
                del self._waiting[user]
                event.set()
