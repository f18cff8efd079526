"""Compass search: a small derivative-free minimiser, so that fitting needs no numerical library."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def compass_search(
    cost: Callable[[Sequence[float]], float],
    start: Sequence[float],
    *,
    step: float = 0.2,
    smallest: float = 0.005,
    progress: Callable[[float, float], None] | None = None,
) -> tuple[list[float], float]:
    """Point and cost of a local minimum.

    Tries ``step`` up and down along every axis, follows what helps, and halves ``step`` when nothing does,
    until it is below ``smallest``. Works on stepped, slightly rough costs, where slopes mislead.
    """
    point, best = list(start), cost(start)
    while step >= smallest:
        improved = False
        for axis in range(len(point)):
            for direction in (step, -step):
                trial = point.copy()
                trial[axis] += direction
                value = cost(trial)
                if value < best:
                    point, best, improved = trial, value, True
                    break
        if progress is not None:
            progress(step, best)
        if not improved:
            step /= 2
    return point, best
