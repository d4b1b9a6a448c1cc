"""How far tensors that belong together are apart: over all of a run, and before a result of it."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import Final

from tensorcap.alignment.evidence import UNRELATED

_REACH: Final = 4  # of what pairs mostly differ by, that others may


class Drift:
    """What pairs that values prove are apart by, on the way through a run.

    Args:
        proven: When each pair's result was given, and how far it is apart.
    """

    def __init__(self, proven: Iterable[tuple[int, float]]) -> None:
        self._orders: list[int] = []
        self._usual = [0.0]  # by how many pairs came before: three of four are no further apart
        known: list[float] = []
        for order, distance in sorted(proven):
            bisect.insort(known, distance)
            self._orders.append(order)
            self._usual.append(known[len(known) * 3 // 4])

    def near(self, rounding: float, before: float = float("inf")) -> float:
        """How far pairs may be apart by what those before a result are, mostly."""
        usual = self._usual[bisect.bisect_left(self._orders, before)]
        return _REACH * max(rounding, min(usual, UNRELATED))
