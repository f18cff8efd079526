"""One request as the scheduler sees it, and the sizes and switches of the scheduler."""

from __future__ import annotations

import enum
from hashlib import shake_128
from typing import Protocol

import msgspec


class Content(Protocol):
    """What the scheduler needs to know of a request's tokens: names of their blocks."""

    hashes: list[bytes]
    digest: bytes

    def extend(self, total: int) -> None:
        """Make ``hashes`` cover the full units among the first ``total`` tokens."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in tokens, blocks or requests. Source of the rules: vLLM 0.32 ``v1/core``."""

    max_model_len: int
    max_batched_tokens: int
    max_seqs: int
    block_size: int
    blocks: int
    caching: bool
    drafts: int = 0
    #: State groups of a hybrid model; 0 for plain attention.
    state_groups: int = 0
    #: Granularity of prefix hits in tokens; divides block_size.
    match_unit: int
    #: 0.32 gives up one unit of every hit when it drafts, 0.33 does not.
    drop_unit: bool = False


class State(enum.IntEnum):
    """Where a request is."""

    INCOMING = 0
    WAITING = 1
    RUNNING = 2
    DONE = 3


class Request:
    """One request. Times are model seconds; ``None`` until they happened."""

    __slots__ = (
        "acceptance",
        "arrival",
        "blocks",
        "cached_tokens",
        "capacity",
        "computed",
        "content",
        "copy_state",
        "decoding",
        "finish_reason",
        "first_token_at",
        "generated",
        "junction",
        "key",
        "last_token_at",
        "name_at",
        "named",
        "output_tokens",
        "preemptions",
        "prompt_tokens",
        "ready",
        "retired",
        "retired_at",
        "scheduled_at",
        "sink",
        "state",
        "state_blocks",
        "state_end",
    )

    def __init__(
        self,
        key: str,
        content: Content,
        prompt_tokens: int,
        output_tokens: int,
        finish_reason: str = "length",
    ) -> None:
        self.key = key
        self.content = content
        self.prompt_tokens = prompt_tokens
        #: Tokens that it will generate, and why it ends then.
        self.output_tokens = output_tokens
        self.finish_reason = finish_reason
        self.state = State.INCOMING
        self.arrival = self.ready = 0.0
        self.scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.computed = 0
        self.generated = 0
        #: Whether its last step gave a token, so that there are drafts to verify.
        self.decoding = False
        self.cached_tokens = 0
        self.preemptions = 0
        self.blocks: list[int] = []
        #: Blocks of the running recurrent state and of its drafts, and the position where they end.
        self.state_blocks: list[int] = []
        self.state_end = 0
        #: Blocks of an earlier state, and the position behind which nobody reads them.
        self.retired: list[int] = []
        self.retired_at = 0
        #: Whether the state was kept in the middle of a block, so that others may use what is written next.
        self.copy_state = False
        #: Tokens up to which nothing has to be allocated.
        self.capacity = 0
        #: Full blocks already named, and the computed tokens at which the next one gets full.
        self.named = 0
        self.name_at = 0
        #: Where it was seen to share a prefix whose state nobody kept; 0: nowhere.
        self.junction = 0
        self.acceptance: Acceptance | None = None
        #: Whatever the caller wants to find again in an output.
        self.sink: object = None

    @property
    def tokens(self) -> int:
        """Prompt and generated tokens."""
        return self.prompt_tokens + self.generated


class Acceptance:
    """How many drafts each decode step of a request accepts: from seed and prompt, not from timing."""

    __slots__ = ("_buffer", "_seed", "_step", "_thresholds")

    def __init__(self, chances: list[float], drafts: int, seed: int, digest: bytes) -> None:
        product, thresholds = 1.0, []
        for position in range(drafts):
            # Positions beyond the measured ones behave like the last measured one.
            product *= chances[min(position, len(chances) - 1)] if chances else 0.0
            thresholds.append(round(product * 65536))
        self._thresholds = thresholds
        self._seed = seed.to_bytes(8, "big", signed=True) + digest
        self._step = 0
        self._buffer = b""

    def next(self) -> int:
        """Accepted drafts of the next step, 0 to ``drafts``."""
        index = 2 * (self._step % 128)
        if index == 0:
            self._buffer = shake_128(self._seed + self._step.to_bytes(8, "big")).digest(256)
        self._step += 1
        draw = self._buffer[index] << 8 | self._buffer[index + 1]
        accepted = 0
        for threshold in self._thresholds:
            if draw >= threshold:
                break
            accepted += 1
        return accepted
