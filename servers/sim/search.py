"""Pattern search: a small derivative-free minimiser, so that fitting needs no numerical library."""

from __future__ import annotations

from collections.abc import Callable, Sequence

#: A round that gains less than this (or this share of a cost above 1) counts as none.
_GAIN = 1e-3


def pattern_search(
    cost: Callable[[Sequence[float]], float],
    start: Sequence[float],
    *,
    step: float = 0.2,
    smallest: float = 0.005,
    progress: Callable[[float, float], None] | None = None,
) -> tuple[list[float], float]:
    """Point and cost of a local minimum, after Hooke and Jeeves.

    Each round tries ``step`` up and down along every axis and then leaps on in the direction that the round
    found, as long as that helps; a round without gain halves ``step``, until it is below ``smallest``. Works
    on stepped, slightly rough costs, where slopes mislead.
    """
    point, best = list(start), cost(start)
    while step >= smallest:
        trial, value = _round(cost, point, best, step)
        gain = best - value
        while value < best:
            leap = [2 * new - old for new, old in zip(trial, point, strict=True)]
            point, best = trial, value
            trial, value = leap, cost(leap)
        if progress is not None:
            progress(step, best)
        if gain <= _GAIN * max(1.0, abs(best)):
            step /= 2
    return point, best


def _round(
    cost: Callable[[Sequence[float]], float], point: Sequence[float], best: float, step: float
) -> tuple[list[float], float]:
    """The best of ``step`` up or down along each axis in turn."""
    found = list(point)
    for axis in range(len(found)):
        for direction in (step, -step):
            trial = found.copy()
            trial[axis] += direction
            value = cost(trial)
            if value < best:
                found, best = trial, value
                break
    return found, best
