"""Values that are no result at all: zeros, one constant, NaN; and masks that use another sentinel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from tensorcap.diagnosis.weighing import Trial, Values

_SENTINEL: Final = 1e4  # masks use numbers of at least that size; float16 goes to 65,504


def degenerates(r: Values, t: Values) -> Iterator[Trial]:
    """Look at values as they are, not finite ones among them.

    Args:
        r: The reference.
        t: The target; any shape.
    """
    same = r.shape == t.shape
    finite = np.isfinite(t)
    if not t.size or not r.size:
        return
    if np.isnan(t).all() and not np.isnan(r).all():
        hint = "The target is NaN from here on: look for the first record that is."
        yield _exact("nan", "every value of the target is NaN", hint, r, same)
    elif finite.all() and not np.isfinite(r).all() and same:
        yield from _sentinels(r, t, "target", "reference")
    elif same and np.isfinite(r).all() and not finite.all():
        yield from _sentinels(t, r, "reference", "target")
    if finite.all() and t.size > 1 and (t == t.reshape(-1)[0]).all() and not (r == r.reshape(-1)[0]).all():
        value = float(t.reshape(-1)[0])
        if value == 0:
            hint = "Nothing was written here: an output never filled, a weight not loaded, a mask of zeros."
            yield _exact("zero", "every value of the target is 0", hint, r, same)
        else:
            hint = (
                "A default stands in the place of a result: a weight as initialised, a buffer never filled."
            )
            text = f"every value of the target is {value:.6g}"
            yield _exact("constant", text, hint, r, same, value)


def _exact(kind: str, text: str, hint: str, r: Values, same: bool, value: float = 0.0) -> Trial:
    """A trial of values that are just what is said; NaN stands as 0, and what differs in it as 1."""
    observed = np.full(r.shape, value)
    finite = np.where(np.isfinite(r), r, 0.0)
    baseline = finite if finite.any() or value else np.ones_like(r)
    if not observed.any() and not baseline.any():
        baseline = np.ones_like(r)
    return Trial(kind, text, observed, observed.copy(), baseline if same else None, 0, 0, hint)


def _sentinels(masked: Values, other: Values, side: str, with_infinity: str) -> Iterator[Trial]:
    """One side has -inf where the other has one large negative number."""
    places = masked == -np.inf
    if not places.any() or not np.isfinite(masked[~places]).all():
        return
    numbers = other[places]
    if not (numbers == numbers[0]).all() or numbers[0] > -_SENTINEL:
        return
    text = f"where the {with_infinity} has -inf, the {side} has {numbers[0]:.6g}"
    hint = (
        "Masks with another sentinel: the same after a softmax, unless a whole row is masked, the mask is "
        "added twice, or it is cast to a narrower dtype."
    )
    # what is masked counts as 0 where both agree on it and as 1 where not; the rest as it is
    rest = np.where(places, 0.0, masked)
    seen = np.where(places, 0.0, other)
    baseline = np.where(places, np.sqrt(np.mean(rest**2)) or 1.0, rest)
    facts = {"sentinel": float(numbers[0]), "count": int(places.sum())}
    yield Trial("mask-sentinel", text, seen, rest, baseline, 0, 0, hint, facts)
