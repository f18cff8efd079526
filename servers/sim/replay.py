"""Load on the pure engine, without a network: closed-loop users in model time.

Patterns as in the plans: ``independent`` users start spread over one expected session and go on by
themselves; in ``lockstep`` all users send turn n together once everyone has the answer to turn n-1; a
``burst`` is one request of every user at the same instant, on an idle server.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from hashlib import blake2b
from statistics import median
from typing import Literal

import msgspec

from .calibration import Calibration
from .engine import Counters, Engine
from .request import EngineConfig, Request

Pattern = Literal["independent", "lockstep", "burst"]


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What users do. Tokens; ``growth`` is what each turn adds to the one before, its answer included."""

    users: int
    prompt: int
    output: int
    #: Tokens at the head of the prompt that all users share; sent twice before anyone measures.
    shared: int = 0
    turns: int = 1
    growth: int = 1024
    pattern: Pattern = "independent"
    #: Measured sessions per user, after one to warm up.
    sessions: int = 2


class Row(msgspec.Struct, frozen=True):
    """One finished, measured request. Times in seconds; sessions count from 1."""

    user: int
    session: int
    turn: int
    prompt: int
    cached: int
    output: int
    ttft: float
    decode_s: float
    preemptions: int


class Replayed(msgspec.Struct):
    """The measured rows of one load, and the engine's totals."""

    rows: list[Row]
    counters: Counters
    seconds: float
    kv_use_max: float

    def ttft_p50(self, turn: int | None = None) -> float:
        """Median TTFT in seconds."""
        return median(row.ttft for row in self.rows if turn in (None, row.turn))

    def decode_rate(self) -> float:
        """1 / median TPOT, tokens per second and session."""
        return 1 / median(row.decode_s / (row.output - 1) for row in self.rows)

    @property
    def hit_rate(self) -> float:
        """Cached share of the measured prompt tokens."""
        return sum(row.cached for row in self.rows) / max(1, sum(row.prompt for row in self.rows))


class Names:
    """Content without text: block names from a session's identity; ``shared`` tokens are the same for all."""

    def __init__(self, identity: str, unit: int, tokens: int, shared: int = 0) -> None:
        self.digest = blake2b(identity.encode(), digest_size=16).digest()
        self._unit = unit
        self._shared = shared
        self.hashes: list[bytes] = []
        self.extend(tokens)

    def extend(self, total: int) -> None:
        """See Content."""
        while (len(self.hashes) + 1) * self._unit <= total:
            index = len(self.hashes) + 1
            owner = b"shared" if index * self._unit <= self._shared else self.digest
            self.hashes.append(owner + index.to_bytes(4, "big"))


class _User:
    def __init__(self, number: int) -> None:
        self.number = number
        self.session = 0
        self.turn = 1


def _request(load: Load, config: EngineConfig, user: int, session: int, turn: int) -> Request:
    prompt = load.prompt + (turn - 1) * load.growth
    identity = f"{load.prompt}/{load.shared}/{user}/{session}"
    content = Names(identity, config.match_unit, prompt, load.shared)
    return Request(f"{identity}/{turn}", content, prompt, load.output)


class Replay:
    """One load against one engine."""

    def __init__(self, config: EngineConfig, calibration: Calibration, load: Load, seed: int = 0) -> None:
        self.engine = Engine(config, calibration, seed)
        self.load = load
        self._arrivals: list[tuple[float, int, _User]] = []
        self._sequence = 0
        self._barrier: list[_User] = []
        self._rows: list[Row] = []
        self._measured = 0
        self._kv_use_max = 0.0

    def run(self) -> Replayed:
        """Run to the end of the last measured session."""
        now = self._warm_prefix() if self.load.shared else 0.0
        begun = now
        load = self.load
        spread = self._expected_session() if load.pattern == "independent" else 0.0
        users = [_User(number) for number in range(load.users)]
        for user in users:
            if load.pattern == "burst":
                user.session = 1
            self._send(user, now + spread * user.number / load.users)
        goal = load.users * load.turns * (1 if load.pattern == "burst" else load.sessions)
        for ended, request, user in self._finished(now):
            self._record(request, user)
            now = ended
            if self._measured >= goal:
                break
            self._go_on(user, ended)
        return Replayed(self._rows, self.engine.counters, now - begun, self._kv_use_max)

    def _expected_session(self) -> float:
        """Seconds of one session on an idle server, about."""
        load, calibration = self.load, self.engine.calibration
        alone = load.prompt * calibration.prefill.token_s + load.output * calibration.decode.step_s
        return load.turns * (calibration.request.fixed_s + alone)

    def _warm_prefix(self) -> float:
        now = 0.0
        for index in range(2):
            request = _request(self.load, self.engine.config, -1, index, 1)
            self.engine.submit(request, now)
            for ended, _, _ in self._finished(now):
                now = ended
                break
        return now

    def _send(self, user: _User, when: float) -> None:
        self._sequence += 1
        heapq.heappush(self._arrivals, (when, self._sequence, user))

    def _go_on(self, user: _User, now: float) -> None:
        load = self.load
        if load.pattern == "burst":
            return
        user.turn += 1
        if user.turn > load.turns:
            user.turn, user.session = 1, user.session + 1
        if load.pattern == "independent":
            self._send(user, now)
            return
        self._barrier.append(user)
        if len(self._barrier) == load.users:
            for waiting in sorted(self._barrier, key=lambda one: one.number):
                self._send(waiting, now)
            self._barrier = []

    def _record(self, request: Request, user: _User) -> None:
        if not 1 <= user.session <= self.load.sessions:
            return
        first, last = request.first_token_at, request.last_token_at
        assert first is not None
        assert last is not None
        self._measured += 1
        self._rows.append(
            Row(
                user.number,
                user.session,
                user.turn,
                request.prompt_tokens,
                request.cached_tokens,
                request.generated,
                first - request.arrival,
                last - first,
                request.preemptions,
            )
        )

    def _finished(self, now: float) -> Iterator[tuple[float, Request, _User]]:
        """Finished requests as they end; what the caller sends meanwhile joins."""
        engine, load = self.engine, self.load
        pool = engine.memory.pool
        while True:
            while self._arrivals and self._arrivals[0][0] <= now:
                when, _, user = heapq.heappop(self._arrivals)
                request = _request(load, engine.config, user.number, user.session, user.turn)
                request.sink = user
                engine.submit(request, when)
            end = engine.begin(now)
            if end is None:
                times = [self._arrivals[0][0]] if self._arrivals else []
                ready = engine.next_ready()
                times += [ready] if ready is not None else []
                if not times:
                    return
                now = max(now, min(times))
                continue
            self._kv_use_max = max(self._kv_use_max, pool.usage)
            # Requests that arrive while the step runs are submitted with their own arrival time.
            outputs = engine.finish()
            now = end
            for output in outputs:
                if output.finished:
                    yield end, output.request, output.request.sink  # type: ignore[misc]


def replay(config: EngineConfig, calibration: Calibration, load: Load, seed: int = 0) -> Replayed:
    """Measure one load."""
    return Replay(config, calibration, load, seed).run()
