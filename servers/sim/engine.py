"""The engine: vLLM's scheduler, one step at a time, in model time.

Pure and deterministic: time comes in as an argument, randomness from the seed and the requests' content, and
nothing is read or written. A driver calls ``begin`` at the model time at which a step starts, waits until the
end it returns, and calls ``finish`` then. Rules as in vLLM 0.32 ``v1/core/sched/scheduler.py``:

- every step has a budget of ``max_batched_tokens``; running requests come first, in order, so decodes precede
  new prefills; a prefill takes what is left in chunks;
- waiting requests are admitted first come, first served, when their whole sequence fits, and only in steps
  that preempted nobody;
- where a running request finds no block, the last one running is preempted: it loses its blocks, goes to the
  head of the queue, and computes again what the prefix cache no longer holds.
"""

from __future__ import annotations

import heapq
from collections import deque

import msgspec

from .calibration import Calibration
from .memory import Memory
from .request import Acceptance, EngineConfig, Request, State


class Output(msgspec.Struct):
    """What one step gave one request."""

    request: Request
    tokens: int
    finished: bool
    #: Whether it is the request's first output, and the time since its last one.
    first: bool = False
    gap: float = 0.0


class Step(msgspec.Struct):
    """One step under way."""

    start: float
    end: float
    decodes: list[Request]
    #: Prefill chunks: request, first position, tokens.
    chunks: list[tuple[Request, int, int]]
    #: Drafts of the last decode: the budget may end within it.
    last_drafts: int = 0


class Counters(msgspec.Struct):
    """Totals since the start."""

    steps: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    generated_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = []


class Engine:
    """Scheduler, memory and clockless execution of one model replica."""

    def __init__(self, config: EngineConfig, calibration: Calibration, seed: int = 0) -> None:
        self.config = config
        self.calibration = calibration
        self.seed = seed
        self.memory = Memory(config)
        self.counters = Counters(accepted_per_position=[0] * config.drafts)
        self.incoming: list[tuple[float, int, Request]] = []
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.step: Step | None = None
        self._sequence = 0
        request = calibration.request
        self._latency = request.fixed_s + (request.caching_s if config.caching else 0.0)

    def submit(self, request: Request, now: float) -> None:
        """A request arrives at ``now``; the scheduler sees it after the fixed latency of its path."""
        request.arrival = now
        request.ready = now + self._latency
        if self.config.drafts:
            chances = self.calibration.draft.acceptance
            request.acceptance = Acceptance(chances, self.config.drafts, self.seed, request.content.digest)
        self._sequence += 1
        heapq.heappush(self.incoming, (request.ready, self._sequence, request))

    def abort(self, request: Request) -> None:
        """Forget a request and free its blocks at once, whatever it is doing."""
        if request.state == State.WAITING:
            self.waiting.remove(request)
        elif request.state == State.RUNNING:
            self.running.remove(request)
            self.memory.release(request)
        elif request.state == State.INCOMING:
            self.incoming = [entry for entry in self.incoming if entry[2] is not request]
            heapq.heapify(self.incoming)
        request.state = State.DONE

    @property
    def in_flight(self) -> int:
        """Requests that have arrived and not ended."""
        return len(self.incoming) + len(self.waiting) + len(self.running)

    def next_ready(self) -> float | None:
        """When the next request reaches the scheduler, if one is on its way."""
        return self.incoming[0][0] if self.incoming else None

    def begin(self, now: float) -> float | None:
        """Start a step at ``now`` and return its end; None when there is nothing to do."""
        while self.incoming and self.incoming[0][0] <= now:
            request = heapq.heappop(self.incoming)[2]
            request.state = State.WAITING
            self.waiting.append(request)
        if not self.running and not self.waiting:
            return None
        decodes: list[Request] = []
        chunks: list[tuple[Request, int, int]] = []
        budget, preempted, last_drafts = self._schedule_running(decodes, chunks)
        if not preempted:
            self._admit(now, budget, chunks)
        self.memory.end_scheduling()
        if not decodes and not chunks:
            return None
        self.step = Step(now, now + self._duration(decodes, chunks), decodes, chunks, last_drafts)
        return self.step.end

    def _schedule_running(
        self, decodes: list[Request], chunks: list[tuple[Request, int, int]]
    ) -> tuple[int, bool, int]:
        budget, drafts = self.config.max_batched_tokens, self.config.drafts
        running, memory, caching = self.running, self.memory, self.config.caching
        preempted = False
        last_drafts = index = 0
        while index < len(running) and budget > 0:
            request = running[index]
            computed = request.computed
            missing = request.prompt_tokens + request.generated - computed
            if missing == 1 and request.decoding:
                tokens = min(1 + drafts, budget)
            else:
                tokens = memory.chunk(request, min(missing, budget), request.junction)
                if tokens == 0:
                    index += 1
                    continue
            needed = computed + tokens + drafts
            if needed > request.capacity and not memory.grow(request, needed):
                preempted = True
                victim = self._preempt_last()
                if victim is request:
                    break
                continue
            budget -= tokens
            if missing == 1 and request.decoding:
                decodes.append(request)
                last_drafts = tokens - 1
                if caching and computed >= request.name_at:
                    memory.note_scheduled(request, computed + 1)
            else:
                chunks.append((request, computed, tokens))
                memory.note_chunk(request, computed + tokens)
            index += 1
        return budget, preempted, last_drafts

    def _preempt_last(self) -> Request:
        """The last running request gives up its blocks and heads the queue."""
        victim = self.running.pop()
        self.memory.release(victim)
        victim.state = State.WAITING
        victim.decoding = False
        victim.preemptions += 1
        self.counters.preemptions += 1
        self.waiting.appendleft(victim)
        return victim

    def _admit(self, now: float, budget: int, chunks: list[tuple[Request, int, int]]) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.config.max_seqs:
            request = self.waiting[0]
            found = self.memory.lookup(request)
            hit = request.computed = found.tokens
            tokens = self.memory.chunk(request, min(request.tokens - hit, budget), found.junction)
            if tokens == 0 or not self.memory.admit(request, found, tokens):
                request.computed = 0
                break
            request.junction = found.junction
            self.memory.note_chunk(request, hit + tokens)
            self.waiting.popleft()
            request.state = State.RUNNING
            self.running.append(request)
            if not request.preemptions:
                request.cached_tokens = hit
                if self.config.caching:
                    self.counters.prefix_queries += request.tokens
                    self.counters.prefix_hits += hit
            if request.scheduled_at is None:
                request.scheduled_at = now
            chunks.append((request, hit, tokens))
            budget -= tokens

    def _duration(self, decodes: list[Request], chunks: list[tuple[Request, int, int]]) -> float:
        """Seconds that a step takes; the formula is in ``calibration``."""
        calibration, drafts, batch = self.calibration, self.config.drafts, len(decodes)
        seconds = calibration.decode.step_s
        if batch:
            context = 0
            for request in decodes:
                context += request.computed
            seconds += calibration.decode.seq_s * batch + calibration.decode.context_s * context
            seconds += drafts * (calibration.draft.step_s + calibration.draft.seq_s * batch)
        if chunks:
            prefill = calibration.prefill
            for _, start, tokens in chunks:
                seconds += (
                    prefill.chunk_s
                    + prefill.token_s * tokens
                    + prefill.pair_s * tokens * (start + tokens / 2)
                )
        return seconds

    def finish(self) -> list[Output]:
        """End the step under way; outputs in the order in which the requests run."""
        step = self.step
        if step is None:
            raise RuntimeError("finish() without a step under way")
        self.step = None
        now, counters = step.end, self.counters
        counters.steps += 1
        outputs: list[Output] = []
        drafts = self.config.drafts
        for request in step.decodes:
            if request.state != State.RUNNING:
                continue
            tokens = 1
            if request.acceptance is not None:
                drafted = drafts if request is not step.decodes[-1] else step.last_drafts
                accepted = min(request.acceptance.next(), drafted)
                tokens += accepted
                counters.drafts += 1
                counters.draft_tokens += drafted
                counters.accepted_tokens += accepted
                for position in range(accepted):
                    counters.accepted_per_position[position] += 1
                tokens = min(tokens, request.output_tokens - request.generated)
            request.computed += tokens
            outputs.append(self._output(request, tokens, now))
        for request, start, tokens in step.chunks:
            if request.state != State.RUNNING or request.computed != start:
                continue
            request.computed += tokens
            if request.computed == request.prompt_tokens + request.generated:
                outputs.append(self._output(request, 1, now))
        return outputs

    def _output(self, request: Request, tokens: int, now: float) -> Output:
        request.generated += tokens
        request.decoding = True
        self.counters.generated_tokens += tokens
        first = request.first_token_at is None
        if first:
            request.first_token_at = now
            self.counters.prompt_tokens += request.prompt_tokens
            self.counters.prompt_tokens_cached += request.cached_tokens
        gap = 0.0 if request.last_token_at is None else now - request.last_token_at
        request.last_token_at = now
        finished = request.generated >= request.output_tokens
        if finished:
            request.state = State.DONE
            self.running.remove(request)
            self.memory.release(request)
        return Output(request, tokens, finished, first, gap)
