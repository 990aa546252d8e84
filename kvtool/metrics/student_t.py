"""Student's t: the quantile that an interval over few draws needs."""

from __future__ import annotations

import math
from functools import cache


@cache
def two_sided(freedom: int, confidence: float = 0.95) -> float:
    """The t that |T| stays below with probability `confidence`, T of `freedom` >= 1 degrees of freedom."""
    low, high = 0.0, 1.0
    while _within(high, freedom) < confidence:
        high *= 2.0
    for _ in range(100):
        middle = (low + high) / 2.0
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """P(|T| < t), the finite series for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = (cosine if freedom > 1 else 0.0) if odd else 1.0
    total = term
    for power in range(2 + odd, freedom - 1, 2):
        term *= cosine * cosine * (power - 1) / power
        total += term
    return 2.0 / math.pi * (angle + sine * total) if odd else sine * total
