"""The KV block pool: reference counts, content names, and the order in which blocks are reused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable


class BlockPool:
    """Blocks numbered from 0.

    Block 0 is vLLM's null block, a placeholder that nobody is ever given: of ``size`` blocks, ``size`` - 1
    are usable. A block nobody references is free, even while its content is still named: a prefix hit takes
    it back, an allocation overwrites it. Unnamed blocks are reused first (last freed, first reused), named
    ones in the order in which they were freed (least recently used first).
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, size))
        self._references = [0] * size
        self._names: list[list[Hashable] | None] = [None] * size
        self._named: dict[Hashable, int] = {}
        #: Further blocks with the content of one in ``_named``: requests that computed the same side by side.
        self._copies: dict[Hashable, list[int]] = {}

    @property
    def usable(self) -> int:
        """Number of blocks that requests can hold."""
        return self.size - 1

    @property
    def free(self) -> int:
        """Number of blocks that nobody references."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the usable blocks that is referenced, 0 to 1; free cached blocks count as free."""
        return 1.0 - len(self._free) / self.usable if self.usable else 0.0

    def find(self, name: Hashable) -> int | None:
        """The block with this content, if one still exists."""
        return self._named.get(name)

    def is_free(self, block: int) -> bool:
        """Whether nobody references the block."""
        return self._references[block] == 0

    def take(self, count: int) -> list[int]:
        """Allocate ``count`` blocks, forgetting what they held. The caller has checked ``free``."""
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            if self._names[block]:
                self._forget(block)
            self._references[block] = 1
            taken.append(block)
        return taken

    def _forget(self, block: int) -> None:
        for name in self._names[block] or ():
            copies = self._copies.get(name)
            if copies is None:
                del self._named[name]
                continue
            if self._named[name] == block:
                self._named[name] = copies.pop(0)
            else:
                copies.remove(block)
            if not copies:
                del self._copies[name]
        self._names[block] = None

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
        """Name a block's content. Of blocks with the same name the oldest is found first."""
        names = self._names[block]
        if names is None:
            self._names[block] = [name]
        elif name in names:
            return
        else:
            names.append(name)
        if name in self._named:
            self._copies.setdefault(name, []).append(block)
        else:
            self._named[name] = block

    def move_names(self, source: int, target: int) -> None:
        """``target`` holds a copy of what ``source`` held, and ``source`` is about to be written."""
        names = self._names[source] or []
        self._forget(source)
        for name in names:
            self.name(target, name)

    def forget(self) -> bool:
        """Drop every name, as a cache reset does; False (and nothing done) while any block is referenced."""
        if len(self._free) != self.usable:
            return False
        self._named.clear()
        self._copies.clear()
        self._names = [None] * self.size
        self._free = OrderedDict.fromkeys(range(1, self.size))
        return True
