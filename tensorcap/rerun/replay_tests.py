"""Tests of what a model computed again from archived values: own error, ratio to a twin, bits (RPL-10)."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from tensorcap.comparison import POLICY, Finding, Limits, Precision, count_tail, judge_own_error
from tensorcap.wording import number_and_limit
from tensorcap_formats.dtypes import Array

_ROUNDING_SLACK: Final = 0.001  # of an ulp: what computing a distance in ulp may be off by
_ROUNDED_ONCE: Final = 0.5 + _ROUNDING_SLACK  # ulp from the exact value
_ROUNDED: Final = 1.001  # of values that are equal but for the order of sums
_OTHER_NEIGHBOUR: Final = 2.0  # a unit in the last place, if the model rounds to the nearest: half of one


def judge_replayed(
    error: float,
    worst_rows: float | None,
    precision: Precision,
    *,
    is_leaf: bool,
    elements: int,
    is_forward: bool = False,
    ranks: int = 1,
) -> tuple[Finding, ...]:
    """Judge what a model computed from archived values, by its own error and that of the worst rows.

    Args:
        error: Row error, no unit.
        worst_rows: Its 95th percentile; None if it is not known.
        precision: The precision of the pair.
        is_leaf: Whether a leaf of known kind computed it.
        elements: Count of elements that the error is taken over.
        is_forward: Whether the target was run on values that were rounded on the way in.
        ranks: How many ranks' terms it is the sum of; 1 if none add it up.
    """
    if is_forward:
        limits = POLICY.leaf_own if is_leaf else POLICY.composite_own
    else:
        limits = POLICY.replayed_leaf if is_leaf else POLICY.replayed_composite
    if ranks > 1 and not precision.is_wide:
        limits = limits.scaled(POLICY.widened_by_ranks(limits, ranks))
    finding = judge_own_error(error, precision, is_leaf=is_leaf, elements=elements, limits=limits)
    if worst_rows is None:
        return (finding,)
    tail = judge_own_error(
        worst_rows,
        precision,
        is_leaf=is_leaf,
        elements=count_tail(elements),
        limits=limits.scaled(POLICY.replayed_tail),
        where=" in the worst rows",
    )
    return finding, tail


def judge_twin(ratio: float, elements: int) -> Finding:
    """Judge how a leaf's own error compares with that of the same leaf in low precision: `twin_ratio`."""
    limits = POLICY.sampled(POLICY.twin_ratio, elements)
    shown, limit = number_and_limit(ratio, limits.green, 3)
    text = f"{shown} times the error of the model in that precision, at most {limit}"
    return limits.finding("twin_ratio", ratio, text)


def judge_narrowing(dtype: str) -> Finding:
    """Judge a result that is rounded where the model in that precision keeps it in float32, to the bit."""
    text = f"rounded to {dtype}, where the reference's model in that precision keeps it in float32"
    return Finding("twin_ratio", math.inf, POLICY.twin_ratio.green, "suspect", text)


def judge_outliers_of_twin(finding: Finding, own: Array, of_twin: Array) -> Finding:
    """Judge elements that are far off beside those of the model in the target's precision.

    An element has at least twice the twin's largest error in its row, and in its column: what is hopeless in
    that precision, as angles of some positions and frequencies are, is so in many. One element that the twin
    has wrong allows nothing elsewhere.

    Args:
        finding: Of `outlier_element`, of the largest of them.
        own: How far each element of the target is off, relative to it and to its row, `[rows, columns]`, no
            unit. What is beyond the finding's value was not measured.
        of_twin: The same of the twin.

    Returns:
        The finding of the element that is the farthest beyond its limit.
    """
    measured = np.where(own <= finding.value * _ROUNDED, own, 0.0)
    if not own.size or measured.max() < finding.value / _ROUNDED:
        return finding
    allowed = np.minimum(of_twin.max(axis=1, keepdims=True), of_twin.max(axis=0, keepdims=True))
    limits = np.maximum(finding.limit, _OTHER_NEIGHBOUR * allowed)
    worst = np.unravel_index(int((measured / limits).argmax()), own.shape)
    value, limit, twins = (float(side[worst]) for side in (measured, limits, allowed))
    text = (
        finding.text if value >= finding.value / _ROUNDED else f"one element is off by {value:.2g} of its row"
    )
    text += f", and by {twins:.2g} in the model in that precision"
    return Limits(limit, limit).finding("outlier_element", value, text)


def rounds_less(ratio: float, elements: int) -> bool:
    """Whether a result was rounded less than the model itself rounds it in that precision."""
    return ratio < POLICY.twin_precise / POLICY.widened_by(elements)


def judge_bits(share: float, elements: int) -> Finding:
    """Judge the share of elements that are more than one unit in the last place off: `ulp_share`."""
    limits = Limits(_widen(POLICY.twin_bits.green, elements), _widen(POLICY.twin_bits.suspect, elements))
    shown, limit = number_and_limit(100 * share, 100 * limits.green)
    text = f"{shown} % of elements are more than 1 ulp off, at most {limit} %"
    return limits.finding("ulp_share", share, text)


def judge_other_values(share: float, elements: int) -> Finding:
    """Judge the share of an activation's elements that are not the twin's; at most suspect."""
    limits = Limits(_widen(POLICY.twin_values, elements), math.inf)
    shown, limit = number_and_limit(100 * share, 100 * limits.green)
    text = f"{shown} % of elements are not the twin's, at most {limit} %"
    return limits.finding("ulp_share", share, text)


def shares_off(
    exact: Any, twin: Any, target: Any, unit: float, *, rounds_once: bool = True
) -> tuple[float, float]:
    """Measure which elements are neither the twin's nor the exact ones rounded once (`ulp_share`).

    Args:
        exact: What the model makes in its own precision, float64.
        twin: What it makes in the target's, float64, the same shape.
        target: What the target made, float64, the same shape.
        unit: `u` of the target's dtype.
        rounds_once: Whether the exact ones rounded once are as good as the twin's, to the last place.

    Returns:
        The share of elements that are more than one unit in the last place off, and of those that differ from
        both at all.
    """
    if not target.size:
        return 0.0, 0.0
    _, exponent = np.frexp(np.maximum(np.abs(exact), np.abs(target)))
    ulp = np.ldexp(2 * unit, exponent - 1)
    with np.errstate(invalid="ignore"):
        from_twin, from_exact = np.abs(target - twin), np.abs(target - exact)
        far = from_twin > (1 + _ROUNDING_SLACK) * ulp
        unlike_both = (from_twin > 0) & (from_exact > _ROUNDED_ONCE * ulp)
        if rounds_once:
            far &= from_exact > (1 + _ROUNDED_ONCE) * ulp
    return float(far.mean()), float(unlike_both.mean())


def _widen(share: float, elements: int) -> float:
    """Widen the limit of a share of some elements by what a count may be off by (POL-30)."""
    count = max(1, elements)
    return share + POLICY.few * math.sqrt(share / count) + 1 / count
