"""What the reference case published, to be drawn beside a run's own numbers where the point matches.

One H100 with prefix caching (``cache``), one with MTP and three draft tokens (``mtp``), a 27B model in FP8.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """One published number; a range is published as two."""

    workload: str
    point: dict[str, str]
    """The part of the point that has to match."""
    users: int
    turn: int | None
    metric: str
    arm: str
    low: float
    high: float

    def matches(self, workload: str, point: dict[str, str], turn: int | None, metric: str) -> bool:
        """Whether it belongs into a figure of this workload, point, turn and metric."""
        if (self.workload, self.turn, self.metric) != (workload, turn, metric):
            return False
        return all(point.get(name) == value for name, value in self.point.items())


def _one(
    workload: str,
    point: str,
    users: int,
    turn: int | None,
    metric: str,
    **values: float | tuple[float, float],
) -> list[Published]:
    name, _, value = point.partition("=")
    found: list[Published] = []
    for arm, number in values.items():
        low, high = number if isinstance(number, tuple) else (number, number)
        found.append(Published(workload, {name: value}, users, turn, metric, arm, low, high))
    return found


#: Seconds and tokens per second.
PUBLISHED: list[Published] = [
    *_one("single_turn", "prompt=1024", 1, None, "decode_rate", cache=49.9, mtp=94.9),
    *_one("shared_prefix", "prefix=4096", 1, None, "ttft_p50", cache=1.02, mtp=0.85),
    *_one("shared_prefix", "prefix=4096", 32, None, "ttft_p50", cache=5.20, mtp=13.55),
    *_one("shared_prefix", "prefix=16384", 16, None, "ttft_p50", cache=3.49, mtp=27.85),
    *_one("shared_prefix", "prefix=16384", 1, None, "ttft_p50", cache=0.91, mtp=2.20),
    *_one("multi_turn", "context=32768", 8, 2, "ttft_p50", cache=(1.4, 5.5), mtp=28.6),
    *_one("multi_turn", "context=65536", 16, 2, "ttft_p50", cache=132.0, mtp=80.9),
]

#: Advantages at one level, for tables: (workload, point, users, turn, metric, text).
RATIOS: list[tuple[str, str, int, str]] = [
    ("single_turn", "prompt=1024", 1, "mtp decodes 1.9 times as fast as cache"),
    ("single_turn", "prompt=1024", 32, "mtp decodes 1.28 times as fast as cache"),
    ("multi_turn", "context=65536", 4, "cache's turn-2 TTFT is 16.8 times shorter than mtp's"),
]
HIT_RATE = {"cache": 0.65}
"""Over its multi-turn run."""
