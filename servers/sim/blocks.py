"""The KV block pool: reference counts, content names, and the order in which blocks are reused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable


class BlockPool:
    """Blocks numbered from 0.

    A block nobody references is free, even while its content is still named: a prefix hit takes it back,
    an allocation overwrites it. Unnamed blocks are reused first (last freed, first reused), named ones in
    the order in which they were freed (least recently used first).
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(size))
        self._references = [0] * size
        self._names: list[list[Hashable] | None] = [None] * size
        self._named: dict[Hashable, int] = {}

    @property
    def free(self) -> int:
        """Number of blocks that nobody references."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the pool that is referenced, 0 to 1; free cached blocks count as free."""
        return 1.0 - len(self._free) / self.size

    def find(self, name: Hashable) -> int | None:
        """The block with this content, if it still exists."""
        return self._named.get(name)

    def is_free(self, block: int) -> bool:
        """Whether nobody references the block."""
        return self._references[block] == 0

    def take(self, count: int) -> list[int]:
        """Allocate ``count`` blocks, forgetting what they held. The caller has checked ``free``."""
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            names = self._names[block]
            if names:
                for name in names:
                    del self._named[name]
                self._names[block] = None
            self._references[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block of a prefix hit."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Drop a reference to each block, the last first: a prompt's tail is evicted before its head."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if self._names[block] is None:
                    self._free.move_to_end(block, last=False)

    def name(self, block: int, name: Hashable) -> None:
        """Name a block's content. Where another block already has that name, this one stays as it is."""
        if name in self._named:
            return
        self._named[name] = block
        names = self._names[block]
        if names is None:
            self._names[block] = [name]
        else:
            names.append(name)

    def forget(self) -> bool:
        """Drop every name, as a cache reset does; False (and nothing done) while any block is referenced."""
        if len(self._free) != self.size:
            return False
        self._named.clear()
        self._names = [None] * self.size
        self._free = OrderedDict.fromkeys(range(self.size))
        return True
