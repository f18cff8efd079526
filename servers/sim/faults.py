"""Ways to misbehave on purpose."""

from __future__ import annotations


class Faults:
    """Nothing yet."""

    @classmethod
    def parse(cls, text: str, seed: int) -> Faults:
        """Faults from ``kind=rate,…``."""
        return cls()
