"""Dropout that is active: elements of a tensor, or of what is added to one, are left out at random."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from tensorcap.diagnosis.exhibit import Exhibit
from tensorcap.diagnosis.weighing import Trial, Values

_LEAST: Final = 8  # elements that are left out, and that are kept
_MOST: Final = 0.95  # the largest share that is left out
_TERMS: Final = 8
_SPREADS: Final = 5.0  # standard deviations that the share may be from what the scale says
_ROUNDED: Final = 0.005  # and as much for the rounding of the scale
_HINT: Final = "Dropout is active: the target runs in training mode."


def dropouts(exhibit: Exhibit) -> Iterator[Trial]:
    """The reference with elements left out and the others scaled up, by itself or beside a residual."""
    if not exhibit.is_same_shape or exhibit.r.size < 4 * _LEAST:
        return
    yield from _of(exhibit, exhibit.r, exhibit.t, 0.0, "")
    for count, (label, ours, theirs) in enumerate(exhibit.beside(exhibit.r.shape)):
        if count >= _TERMS:
            return
        own = ours if theirs is None else theirs
        yield from _of(exhibit, exhibit.r - ours, exhibit.t - own, own, label)


def _of(exhibit: Exhibit, r: Values, t: Values, term: Values | float, label: str) -> Iterator[Trial]:
    seen = r != 0
    dropped = (t == 0) & seen
    kept = seen & ~dropped
    out, rest = int(dropped.sum()), int(kept.sum())
    if out < _LEAST or rest < _LEAST or out > _MOST * (out + rest):
        return
    scale = float(r[kept] @ t[kept]) / float(r[kept] @ r[kept])
    share = out / (out + rest)
    spread = math.sqrt(share * (1 - share) / (out + rest))
    if scale <= 1 or abs(1 - 1 / scale - share) > _SPREADS * spread + _ROUNDED:
        return  # zeros that are no dropout, which keeps the mean
    predicted = np.where(dropped, 0.0, r * scale) + term
    where = f" beside {label}" if label else ""
    text = (
        f"{100 * share:.3g} % of the elements{where} are left out at random and the others are scaled by "
        f"{scale:.4g}, which is 1 / (1 - {1 - 1 / scale:.3g})"
    )
    facts = {"share": share, "factor": scale, "key": label or None}
    # which elements are left out is taken as it is
    logs = (out + rest) * _entropy(share) + math.log(_TERMS)
    yield Trial("dropout", text, exhibit.t, predicted, exhibit.r, 1, logs, _HINT, facts)


def _entropy(share: float) -> float:
    return -share * math.log(share) - (1 - share) * math.log(1 - share)
