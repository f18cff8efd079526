"""Which blocks a request holds, what it finds in the prefix cache, and what it leaves there.

Plain attention: every full block of a prompt or answer can be hit. Hybrid models (``state_groups`` > 0) need
the recurrent state at the boundary as well, and it is kept at two places only: at the prompt's last boundary
that a repetition could use, and where a request was seen to share a prefix with an earlier one. Hence a
shared system prompt hits from its third request on.
"""

from __future__ import annotations

from .blocks import BlockPool
from .request import EngineConfig, Request


class Memory:
    """The block pool in the hands of requests."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.blocks)
        self._state_blocks = config.state_groups * (1 + config.drafts)

    def blocks_for(self, tokens: int) -> int:
        """Attention blocks that hold ``tokens``."""
        return -(-tokens // self.config.block_size)

    def ever_fits(self, tokens: int) -> bool:
        """Whether a request of this many tokens fits into the empty pool."""
        return self.blocks_for(tokens) + self._state_blocks <= self.pool.size

    def _attention_hits(self, request: Request, limit: int) -> list[int]:
        """Cached blocks of the longest prefix of at most ``limit`` tokens."""
        size = self.config.block_size
        step = size // self.config.match_unit
        hashes = request.content.hashes
        found: list[int] = []
        for count in range(1, min(limit // size, len(hashes) // step) + 1):
            block = self.pool.find(hashes[count * step - 1])
            if block is None:
                break
            found.append(block)
        return found

    def _state_at(self, request: Request, boundary: int) -> list[int] | None:
        """Cached recurrent state at ``boundary``, one block per state group."""
        name = request.content.hashes[boundary // self.config.match_unit - 1]
        blocks = []
        for group in range(self.config.state_groups):
            block = self.pool.find((group, name))
            if block is None:
                return None
            blocks.append(block)
        return blocks

    def _hybrid_hit(self, request: Request, limit: int, attention: list[int]) -> tuple[int, list[int]]:
        """Longest boundary at which attention blocks and state are both cached, and the state's blocks."""
        unit, size = self.config.match_unit, self.config.block_size
        for boundary in range(limit // unit * unit, 0, -unit):
            if boundary // size > len(attention):
                continue
            state = self._state_at(request, boundary)
            if state is None:
                continue
            name = request.content.hashes[boundary // unit - 1]
            if boundary % size == 0 or self.pool.find(("part", name)) is not None:
                return boundary, state
        return 0, []

    def lookup(self, request: Request) -> tuple[int, list[int]]:
        """Tokens that need not be computed, and the full blocks that hold them; notes the prefill stops.

        At least the last token is always computed.
        """
        config = self.config
        request.stops = []
        if not config.caching:
            return 0, []
        limit = request.tokens - 1
        attention = self._attention_hits(request, limit)
        drop = config.match_unit if config.drop_unit else 0
        if not config.state_groups:
            if drop and attention:
                attention.pop()
            return len(attention) * config.block_size, attention
        hit, state = self._hybrid_hit(request, limit, attention)
        if state:
            # Used again, so evicted later; the running request works on a copy.
            self.pool.share(state)
            self.pool.release(state)
        unit, prompt = config.match_unit, request.prompt_tokens
        replay = max(0, prompt // unit * unit - drop) if drop else (prompt - 1) // unit * unit
        junction = len(attention) * config.block_size - drop
        request.stops = sorted({stop for stop in (replay, junction) if hit < stop < request.tokens})
        return hit, attention[: hit // config.block_size]

    def admit(self, request: Request, hit: int, shared: list[int], chunk: int) -> bool:
        """Give a waiting request blocks for ``hit`` + ``chunk`` tokens; False where all of it does not fit.

        vLLM admits only what fits whole, and then allocates chunk by chunk all the same.
        """
        revived = sum(1 for block in shared if self.pool.is_free(block))
        whole = self.blocks_for(request.tokens) - len(shared) + self._state_blocks
        if whole + revived > self.pool.free:
            return False
        self.pool.share(shared)
        request.blocks = list(shared)
        request.state_blocks = self.pool.take(self._state_blocks)
        request.named = len(shared)
        request.computed = hit
        request.capacity = len(shared) * self.config.block_size
        return self.grow(request, hit + chunk)

    def grow(self, request: Request, tokens: int) -> bool:
        """Hold blocks for ``tokens`` tokens in all; False when the pool cannot give them."""
        tokens = min(tokens, self.config.max_model_len)
        missing = self.blocks_for(tokens) - len(request.blocks)
        if missing > self.pool.free:
            return False
        if missing > 0:
            request.blocks += self.pool.take(missing)
        request.capacity = len(request.blocks) * self.config.block_size
        return True

    def chunk(self, request: Request, tokens: int) -> int:
        """Tokens of the next prefill chunk, at most ``tokens``: hybrids stop where state is kept."""
        stops = request.stops
        if not stops:
            return tokens
        end = request.computed + tokens
        for stop in stops:
            if request.computed < stop <= end:
                return stop - request.computed
        if request.computed < stops[-1]:
            return max(0, end // self.config.block_size * self.config.block_size - request.computed)
        return tokens

    def note_computed(self, request: Request) -> None:
        """Name what became full or reached a kept boundary with the request's computed tokens."""
        config = self.config
        if not config.caching:
            return
        size, unit, computed = config.block_size, config.match_unit, request.computed
        full = computed // size
        if full > request.named:
            step = size // unit
            if full * step > len(request.content.hashes):
                request.content.extend(full * size)
            hashes = request.content.hashes
            for index in range(request.named, full):
                self.pool.name(request.blocks[index], hashes[(index + 1) * step - 1])
            request.named = full
        if computed in request.stops:
            self._keep_state(request, computed)

    def _keep_state(self, request: Request, boundary: int) -> None:
        groups, unit = self.config.state_groups, self.config.match_unit
        if self.pool.free < groups:
            return
        name = request.content.hashes[boundary // unit - 1]
        kept = request.state_blocks[:groups]
        request.state_blocks[:groups] = self.pool.take(groups)
        for group, block in enumerate(kept):
            self.pool.name(block, (group, name))
        self.pool.release(kept)
        if boundary % self.config.block_size:
            self.pool.name(request.blocks[boundary // self.config.block_size], ("part", name))

    def release(self, request: Request) -> None:
        """Give everything back; what has a name stays findable until it is overwritten."""
        self.pool.release(request.blocks)
        self.pool.release(request.state_blocks)
        request.blocks, request.state_blocks = [], []
        request.capacity = request.named = request.computed = 0
