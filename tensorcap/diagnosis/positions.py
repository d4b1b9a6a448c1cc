"""Whole numbers that count positions: from another number on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from tensorcap.diagnosis.exhibit import Exhibit
from tensorcap.diagnosis.weighing import Trial

_STEPS: Final = (1, -1, 2, -2)
_HINT: Final = (
    "Positions are counted from another number: from one, from behind padding, or with a cache that is one "
    "token longer or shorter."
)


def positions(exhibit: Exhibit) -> Iterator[Trial]:
    """All positions plus the same number."""
    r, t = exhibit.r, exhibit.t
    is_whole = exhibit.reference.dtype.kind in ("int", "uint")
    if not (is_whole and exhibit.is_same_shape and r.ndim and r.size):
        return
    is_counting = r.shape[-1] >= 4 and bool((np.diff(r, axis=-1) == 1).all())
    if not is_counting and "position" not in exhibit.reference.key.slot:
        return
    for step in _STEPS:
        sign = "plus" if step > 0 else "minus"
        text = f"positions of the target are those of the reference {sign} {abs(step)}"
        logs = math.log(len(_STEPS))
        yield Trial("position-offset", text, t, r + step, r, 0, logs, _HINT, {"offset": step})
