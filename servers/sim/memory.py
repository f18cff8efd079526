"""Which blocks a request holds, what it finds in the prefix cache, and what it leaves there.

Plain attention: every full block of a prompt or answer can be hit, from the moment at which the step that
computes it is scheduled. Hybrid models (``state_groups`` > 0) need the recurrent state at the boundary as
well. A state exists only where a chunk of a prefill ends, so chunks end at block boundaries, and it is kept
at two places only: at the prompt's last boundary that a repetition could use, and where a request was seen to
share a prefix with an earlier one. Hence a shared system prompt hits from its third request on, unless its
end is also the last boundary of the first prompt: then from the second.
"""

from __future__ import annotations

import sys
from operator import itemgetter
from typing import NamedTuple

from .blocks import BlockPool
from .request import EngineConfig, Request


class Hit(NamedTuple):
    """What a request finds in the prefix cache."""

    #: Tokens that need not be computed.
    tokens: int
    #: Attention blocks that hold them; the last one only in part where hits are finer than blocks.
    blocks: list[int]
    #: Blocks of the recurrent state behind them, one per group.
    state: list[int]
    #: Where attention alone would have hit further: the prefix is shared, but no state was kept. 0: nowhere.
    junction: int


class Memory:
    """The block pool in the hands of requests."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.blocks)
        self._state_blocks = config.state_groups * (1 + config.drafts)
        #: Whether recurrent states are kept, so that chunks end where a state can be.
        self._aligned = config.caching and config.state_groups > 0
        self._unit = config.match_unit if config.state_groups else config.block_size
        self._drop = self._unit if config.drop_unit else 0
        #: Prefixes whose state the step being scheduled computes: it exists only at the step's end.
        self._fresh: set[bytes] = set()
        #: Blocks that the step being scheduled copies from or to, for others to hit: 0 for attention or 1 +
        #: group of the state, and the block.
        self._copied: list[tuple[int, int]] = []

    def blocks_for(self, tokens: int) -> int:
        """Attention blocks that hold ``tokens``."""
        return -(-tokens // self.config.block_size)

    def end_scheduling(self) -> None:
        """All requests of a step are scheduled."""
        if self._copied:
            self._copied.sort(key=itemgetter(0), reverse=True)
            self.pool.release([block for _, block in self._copied])
            self._copied = []
        if self._fresh:
            self._fresh.clear()

    # What is found.

    def lookup(self, request: Request) -> Hit:
        """What the cache holds of a waiting request; at least its last token is always computed.

        Changes nothing: a request that is looked up at every step while it waits must not keep its prefix
        from being evicted.
        """
        config = self.config
        if not config.caching:
            return Hit(0, [], [], 0)
        if request.generated:
            request.content.extend(request.tokens)
        blocks, found = self._attention_hit(request)
        if not config.state_groups:
            return Hit(found, blocks, [], 0)
        tokens, state = self._state_hit(request, found)
        return Hit(tokens, blocks[: self.blocks_for(tokens)], state, found if found > tokens else 0)

    def _attention_hit(self, request: Request) -> tuple[list[int], int]:
        """Cached attention blocks of the longest prefix, and its tokens."""
        size, unit, pool = self.config.block_size, self._unit, self.pool
        step, hashes = size // self.config.match_unit, request.content.hashes
        limit = request.tokens - 1
        if self._drop and self.config.state_groups:
            # One unit more is looked at, because one is given up below.
            limit = min(limit + unit, len(hashes) * unit)
        blocks: list[int] = []
        for count in range(1, min(limit // size, len(hashes) // step) + 1):
            block = pool.find(hashes[count * step - 1])
            if block is None:
                break
            blocks.append(block)
        found = len(blocks) * size
        if unit < size:
            first = len(blocks) * step
            for count in range(min(first + step - 1, limit // unit, len(hashes)), first, -1):
                block = pool.find(hashes[count - 1])
                if block is not None:
                    blocks.append(block)
                    found = count * unit
                    break
        if found:
            found -= self._drop
        return blocks[: self.blocks_for(found)], found

    def _state_hit(self, request: Request, limit: int) -> tuple[int, list[int]]:
        """Longest prefix of at most ``limit`` tokens behind which the state is cached, and its blocks."""
        unit, hashes, find = self._unit, request.content.hashes, self.pool.find
        groups = self.config.state_groups
        for count in range(limit // unit, 0, -1):
            name = hashes[count - 1]
            first = find((0, name))
            if first is None:
                continue
            blocks = [first]
            for group in range(1, groups):
                block = find((group, name))
                if block is not None:
                    blocks.append(block)
            if len(blocks) == groups:
                return count * unit, blocks
        return 0, []

    # What is held.

    def admit(self, request: Request, hit: Hit, chunk: int) -> bool:
        """Give a waiting request blocks for ``hit`` + ``chunk`` tokens; False where all of it does not fit.

        vLLM admits only what fits whole, and then allocates chunk by chunk all the same.
        """
        config, pool, groups = self.config, self.pool, self.config.state_groups
        if hit.state and request.content.hashes[hit.tokens // self._unit - 1] in self._fresh:
            # The state is computed by this very step; the next one can start from it.
            return False
        end = hit.tokens + chunk
        held = min(end + config.drafts, config.max_model_len)
        needed = self.blocks_for(max(request.tokens, held)) - len(hit.blocks) + self._state_blocks
        inside = hit.tokens % config.block_size != 0
        if inside:
            # Blocks that others may hit as well, but that this request goes on writing, are copied.
            needed += 1 + groups * (self.blocks_for(request.tokens) > len(hit.blocks))
        needed += sum(1 for block in hit.blocks if pool.is_free(block))
        needed += sum(1 for block in hit.state if pool.is_free(block))
        if needed > pool.free:
            return False
        pool.share(hit.blocks)
        pool.share(hit.state)
        request.blocks = list(hit.blocks)
        if inside:
            self._copied += enumerate([request.blocks[-1], *hit.state])
            request.blocks[-1:] = pool.take(1)
        else:
            request.retired, request.retired_at = hit.state, hit.tokens
        request.blocks += pool.take(self.blocks_for(held) - len(request.blocks))
        request.state_blocks = pool.take(self._state_blocks)
        request.state_end = self.blocks_for(end) * config.block_size if self._aligned else sys.maxsize
        request.named = hit.tokens // config.block_size
        request.name_at = (request.named + 1) * config.block_size - 1
        request.computed = hit.tokens
        self._set_capacity(request)
        return True

    def _set_capacity(self, request: Request) -> None:
        """Up to which position ``grow`` has nothing to do."""
        if request.retired or request.copy_state:
            request.capacity = 0
        else:
            request.capacity = min(
                len(request.blocks) * self.config.block_size, request.state_end + self.config.drafts
            )

    def grow(self, request: Request, tokens: int) -> bool:
        """Hold blocks for ``tokens`` tokens in all, drafts to come included; False when the pool cannot.

        The state behind a block boundary needs blocks of its own. Those of the boundary are given back one
        step later, when the step that read them is over.
        """
        config, pool, groups = self.config, self.pool, self.config.state_groups
        if request.retired and request.computed > request.retired_at:
            pool.release(request.retired[::-1])
            request.retired = []
        tokens = min(tokens, config.max_model_len)
        missing = max(0, self.blocks_for(tokens) - len(request.blocks))
        crosses = tokens - config.drafts > request.state_end
        if missing + groups * (crosses + request.copy_state) > pool.free:
            return False
        request.blocks += pool.take(missing)
        if request.copy_state:
            # The state was kept in the middle of a block, which this step goes on writing.
            copies = pool.take(groups)
            for block, copy in zip(request.state_blocks, copies, strict=False):
                pool.move_names(block, copy)
            self._copied += enumerate(copies, 1)
            self._fresh.add(request.content.hashes[request.computed // self._unit - 1])
            request.copy_state = False
        if crosses:
            request.retired = request.state_blocks[:groups] + request.retired
            request.retired_at = request.state_end
            request.state_blocks[:groups] = pool.take(groups)
            request.state_end = self.blocks_for(tokens - config.drafts) * config.block_size
        self._set_capacity(request)
        return True

    def release(self, request: Request) -> None:
        """Give everything back; what has a name stays findable until it is overwritten."""
        self.pool.release(request.blocks)
        groups = self.config.state_groups
        for group in range(groups):
            self.pool.release(request.retired[group::groups] + request.state_blocks[group::groups])
        request.blocks, request.state_blocks, request.retired = [], [], []
        request.copy_state = False
        request.capacity = request.named = request.computed = 0

    # Where prefills stop, and what is kept.

    def _last_boundary(self, tokens: int, unit: int) -> int:
        """The last multiple of ``unit`` at which a repetition of ``tokens`` tokens could start."""
        if self._drop:
            return max(0, tokens // unit * unit - unit)
        return (tokens - 1) // unit * unit

    def chunk(self, request: Request, tokens: int, junction: int) -> int:
        """Tokens of the next prefill chunk, at most ``tokens``; with kept states it ends where one can be."""
        if not self._aligned:
            return tokens
        size, start, prompt = self.config.block_size, request.computed, request.prompt_tokens
        prefill_end = max(prompt, request.tokens - 1)
        if start >= prefill_end:
            return tokens
        end = start + tokens
        if end < prefill_end:
            floor = end // size * size
            # A block larger than any chunk is computed in parts.
            if floor > start or size <= self.config.max_batched_tokens:
                end = floor
        last = self._last_boundary(request.tokens, size)
        tail = self._last_boundary(prompt, self._unit)
        stops = [last]
        if start % size:
            stops.append((start // size + 1) * size)
        if last < tail < prompt:
            stops.append(tail)
        if start < junction < end:
            stops.append(start + (junction - start) // size * size)
        return max(0, min((stop for stop in stops if start < stop < end), default=end) - start)

    def note_scheduled(self, request: Request, end: int) -> None:
        """Name the blocks that are full when the step being scheduled has computed up to ``end``."""
        full = end // self.config.block_size
        if full <= request.named:
            return
        step = self.config.block_size // self.config.match_unit
        if full * step > len(request.content.hashes):
            request.content.extend(full * self.config.block_size)
        hashes = request.content.hashes
        for index in range(request.named, full):
            self.pool.name(request.blocks[index], hashes[(index + 1) * step - 1])
        request.named = full
        request.name_at = (full + 1) * self.config.block_size - 1

    def note_chunk(self, request: Request, end: int) -> None:
        """The same for a prefill chunk, which may also end where the state is kept."""
        if not self.config.caching:
            return
        self.note_scheduled(request, end)
        if self._aligned:
            self._note_state(request, end)

    def _note_state(self, request: Request, end: int) -> None:
        size, unit, prompt = self.config.block_size, self._unit, request.prompt_tokens
        hashes = request.content.hashes
        last = self._last_boundary(prompt, size)
        if unit < size:
            tail = prompt // unit * unit if self._drop else (prompt - 1) // unit * unit
            if tail <= end and tail % size:
                self.pool.name(request.blocks[tail // size], hashes[tail // unit - 1])
        elif request.retired and end // size * size == request.retired_at == last:
            # vLLM registers a state that is still held at the prompt's last boundary once more, so that
            # nobody can hit it in this step: requests that hit the same one start one step after the other.
            self._fresh.add(hashes[last // unit - 1])
        kept = {last, self._last_boundary(prompt, unit), request.junction // size * size}
        if self._drop:
            # Where a repetition of exactly this prompt could start: its last token is computed again.
            kept.add(max(0, (prompt - 1) // size * size - size))
        if end not in kept:
            return
        name = hashes[end // unit - 1]
        for group in range(self.config.state_groups):
            self.pool.name(request.state_blocks[group], (group, name))
        self._fresh.add(name)
        if end % size:
            request.copy_state = True
            self._set_capacity(request)
