"""Student's t distribution: the one special function that the intervals need.

Written out here because SciPy (which tests compare this with) is too large a dependency for one quantile.
"""

from __future__ import annotations

import math
from functools import lru_cache

_TINY = 1e-300
_EPSILON = 1e-16


def incomplete_beta(x: float, a: float, b: float) -> float:
    """Regularised incomplete beta function I_x(a, b), for 0 <= x <= 1 and a, b > 0.

    Continued fraction DLMF 8.17.22 evaluated with Lentz's method, on the side of the mean where it converges
    fast (I_x(a, b) = 1 - I_{1-x}(b, a), DLMF 8.17.4).
    """
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - incomplete_beta(1 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    c, d = 1.0, 1.0 / _not_zero(1 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, 10_000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        change = 1.0
        for term in (even, odd):
            d = 1.0 / _not_zero(1 + term * d)
            c = _not_zero(1 + term / c)
            change = c * d
            fraction *= change
        if abs(change - 1) < _EPSILON * 4:
            break
    return math.exp(log_front) * fraction / a


def _not_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


def t_tail(t: float, df: float) -> float:
    """P(T > t) for t >= 0 and ``df`` degrees of freedom (DLMF 8.17: half of I_{df/(df+t^2)}(df/2, 1/2))."""
    return 0.5 * incomplete_beta(df / (df + t * t), df / 2, 0.5)


@lru_cache(maxsize=512)
def t_quantile(p: float, df: float) -> float:
    """The t with P(T <= t) = p.

    Works on the tail probability, so that far quantiles (Bonferroni over many cells) keep their digits.

    Raises:
        ValueError: unless 0 < p < 1 and df > 0.
    """
    if not 0 < p < 1 or df <= 0:
        raise ValueError(f"t quantile needs 0 < p < 1 and df > 0, not p={p}, df={df}")
    if p < 0.5:
        return -t_quantile(1 - p, df)
    tail = 1 - p
    low, high = 0.0, 1.0
    while t_tail(high, df) > tail:
        low, high = high, high * 2
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if t_tail(middle, df) > tail:
            low = middle
        else:
            high = middle
    return (low + high) / 2
