"""Mistakes that the values alone show: degenerate values, positions from another number, active dropout."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from tensorcap.diagnosis.context import PairContext
from tensorcap.diagnosis.hypothesis import Hypothesis
from tensorcap.diagnosis.values import Values, number_text

_SENTINEL: Final = 1e4  # masks use numbers of at least that size; float16 goes to 65,504

_OFFSETS: Final = (1, -1, 2, -2)  # from padding, from one, or a cache one token off
_LEAST_COUNTED: Final = 4  # positions that count up by one, to be taken for positions
_POSITION_HINT: Final = (
    "Positions are counted from another number: from one, from behind padding, or with a cache that is one "
    "token longer or shorter."
)

_LEAST_DROPPED: Final = 8  # elements that are left out, and that are kept
_LARGEST_SHARE: Final = 0.95  # that is left out
_RESIDUALS: Final = 8  # records beside the pair that may be the residual
_DEVIATIONS: Final = 5.0  # standard deviations that the share may be from what the scale says
_ROUNDINGS_OF_SCALE: Final = 2.4  # and as many, since the scale may be rounded: half a unit in the last place
_DROPOUT_HINT: Final = "Dropout is active: the target runs in training mode."


def propose_degenerate_values(context: PairContext) -> Iterator[Hypothesis]:
    """Propose that the target is NaN, zero or constant throughout, or masks with another sentinel."""
    r, t = context.reference_values, context.target_values
    is_finite = np.isfinite(t)
    if not t.size or not r.size:
        return
    if np.isnan(t).all() and not np.isnan(r).all():
        hint = "The target is NaN from here on: look for the first record that is."
        yield _throughout(context, "nan", "every value of the target is NaN", hint)
    elif context.is_same_shape and is_finite.all() and not np.isfinite(r).all():
        yield from _sentinels(r, t, "target", "reference")
    elif context.is_same_shape and np.isfinite(r).all() and not is_finite.all():
        yield from _sentinels(t, r, "reference", "target")
    if is_finite.all() and t.size > 1 and (t == t.reshape(-1)[0]).all() and not (r == r.reshape(-1)[0]).all():
        value = float(t.reshape(-1)[0]) or 0.0  # without a sign
        hint = "Nothing was written here: an output never filled, a weight not loaded, a mask of zeros."
        if value:
            hint = (
                "A default stands in the place of a result: a weight as initialised, a buffer never filled."
            )
        kind = "constant" if value else "zero"
        yield _throughout(context, kind, f"every value of the target is {value:.6g}", hint, value)


def _throughout(context: PairContext, kind: str, text: str, hint: str, value: float = 0.0) -> Hypothesis:
    """State that every value of the target is one number; NaN stands as 0, and what differs from it as 1."""
    r = context.reference_values
    observed = np.full(r.shape, value)
    finite = np.where(np.isfinite(r), r, 0.0)
    baseline = finite if finite.any() or value else np.ones_like(r)
    return Hypothesis(
        kind, text, observed, observed.copy(), baseline if context.is_same_shape else None, hint=hint
    )


def _sentinels(masked: Values, other: Values, side: str, with_infinity: str) -> Iterator[Hypothesis]:
    """State that one side has -inf wherever the other has one large negative number."""
    is_masked = masked == -np.inf
    if not is_masked.any() or not np.isfinite(masked[~is_masked]).all():
        return
    numbers = other[is_masked]
    if not (numbers == numbers[0]).all() or numbers[0] > -_SENTINEL:
        return
    text = f"where the {with_infinity} has -inf, the {side} has {numbers[0]:.6g}"
    hint = (
        "Masks with another sentinel: the same after a softmax, unless a whole row is masked, the mask is "
        "added twice, or it is cast to a narrower dtype."
    )
    # Masked elements count as 0 if both sides mask them and as a typical value if not; the rest as it is.
    rest = np.where(is_masked, 0.0, masked)
    observed = np.where(is_masked, 0.0, other)
    baseline = np.where(is_masked, np.sqrt(np.mean(rest**2)) or 1.0, rest)
    facts = {"sentinel": float(numbers[0]), "count": int(is_masked.sum())}
    yield Hypothesis("mask-sentinel", text, observed, rest, baseline, hint=hint, facts=facts)


def propose_position_offsets(context: PairContext) -> Iterator[Hypothesis]:
    """Propose that whole numbers that count positions start from another number."""
    r = context.r
    is_whole = context.reference.dtype.kind in ("int", "uint")
    if not (is_whole and context.is_same_shape and r.ndim and r.size):
        return
    is_counting = r.shape[-1] >= _LEAST_COUNTED and bool((np.diff(r, axis=-1) == 1).all())
    if not is_counting and "position" not in context.reference.key.slot:
        return
    for offset in _OFFSETS:
        sign = "plus" if offset > 0 else "minus"
        yield context.propose(
            "position-offset",
            f"positions of the target are those of the reference {sign} {abs(offset)}",
            r + offset,
            log_alternatives=math.log(len(_OFFSETS)),
            hint=_POSITION_HINT,
            facts={"offset": offset},
        )


def propose_dropouts(context: PairContext) -> Iterator[Hypothesis]:
    """Propose that elements are left out at random and the others scaled up, of all or beside a residual."""
    if not context.is_same_shape or context.r.size < 4 * _LEAST_DROPPED:
        return
    yield from _propose_dropout(context, context.r, context.t, 0.0, "")
    for label, ours, theirs in itertools.islice(context.read_neighbours(context.r.shape), _RESIDUALS):
        own = ours if theirs is None else theirs
        yield from _propose_dropout(context, context.r - ours, context.t - own, own, label)


def _propose_dropout(
    context: PairContext, r: Values, t: Values, term: Values | float, label: str
) -> Iterator[Hypothesis]:
    """Propose dropout if elements are zero and the others scaled by the number that keeps the mean.

    Args:
        context: The pair.
        r: The reference without the residual.
        t: The target without its own.
        term: The target's residual; 0 if there is none.
        label: Key text of the residual; "" if there is none.
    """
    is_nonzero = r != 0
    dropped = (t == 0) & is_nonzero
    kept = is_nonzero & ~dropped
    dropped_count, count = int(dropped.sum()), int(is_nonzero.sum())
    if min(dropped_count, count - dropped_count) < _LEAST_DROPPED or dropped_count > _LARGEST_SHARE * count:
        return
    scale = float(r[kept] @ t[kept]) / float(r[kept] @ r[kept])
    share = dropped_count / count
    spread = math.sqrt(share * (1 - share) / count)
    slack = _DEVIATIONS * spread + _ROUNDINGS_OF_SCALE * context.rounding
    lifted = 1 - 1 / scale if scale > 0 else 0.0
    if lifted <= slack or abs(lifted - share) > slack:
        return  # these zeros are no dropout, which scales the others up, and by what keeps the mean
    where = f" beside {label}" if label else ""
    # Which elements are left out is not predicted: each is a choice.
    entropy = -share * math.log(share) - (1 - share) * math.log(1 - share)
    yield context.propose(
        "dropout",
        f"{100 * share:.3g} % of the elements{where} are left out at random and the others are scaled by "
        f"{number_text(scale, 1.0)}, which is 1 / (1 - {lifted:.3g})",
        np.where(dropped, 0.0, r * scale) + term,
        parameters=1,
        log_alternatives=count * entropy + math.log(_RESIDUALS),
        hint=_DROPOUT_HINT,
        facts={"share": share, "factor": scale, "key": label or None},
    )
