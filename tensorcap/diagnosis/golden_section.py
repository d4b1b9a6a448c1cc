"""Fit one positive number by golden section."""

from __future__ import annotations

import math
from collections.abc import Callable

RATIO = (math.sqrt(5) - 1) / 2


def minimize_over_logarithm(error: Callable[[float], float], low: float, high: float, steps: int) -> float:
    """Find the positive number of the least error, by golden section over its logarithm.

    Args:
        error: What a number leaves; it has one minimum between the bounds.
        low: Logarithm of the smallest number.
        high: Logarithm of the largest.
        steps: How often the interval is cut to 0.618 of its length; of two errors within it
            one is known.
    """
    inner, outer = high - RATIO * (high - low), low + RATIO * (high - low)
    of_inner, of_outer = error(math.exp(inner)), error(math.exp(outer))
    for _ in range(steps):
        if of_inner < of_outer:
            high, outer, of_outer = outer, inner, of_inner
            inner = high - RATIO * (high - low)
            of_inner = error(math.exp(inner))
        else:
            low, inner, of_inner = inner, outer, of_outer
            outer = low + RATIO * (high - low)
            of_outer = error(math.exp(outer))
    return math.exp((low + high) / 2)
