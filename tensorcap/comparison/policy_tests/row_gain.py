"""Is one row off by far more than anything before it, and than the other rows? See POL-680.

Formula: gain = largest row error / sqrt(w^2 + (2 rho)^2), with w the largest row error of all that was
recorded before. Every row is made of rows before it, so that in a correct run the worst of them grow as all
do. A mistake in one token, as of a mask, a cache or a slice, moves neither the median nor, of many rows, the
95th percentile. It is a finding only of a row that is also past what is expected at that depth, and off by
far more than the median one. In runs of low precision only: in float32 `outlier_element` finds it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from tensorcap.comparison.pair import Finding, Pair
from tensorcap.comparison.policy import POLICY
from tensorcap.comparison.policy_tests.context import Context, MeasuredPair, PolicyTest
from tensorcap.runs import is_gradient, is_inner, is_parameter, is_state
from tensorcap.wording import number_and_limit

_IMAGES: Final = 4  # axes, from which on rows are channels, of very unlike size


class RowGainTest(PolicyTest):
    """Tests `row_gain`."""

    names = ("row_gain",)
    is_local = True

    def judge(self, context: Context) -> Iterator[tuple[str, Finding]]:
        """Judge what modules were given and made, of runs of low precision without rounded weights."""
        if context.injected or not context.reference.is_ordered:
            return
        open_results = {pair.key: pair for pair, _ in context.open_results()}
        if all(pair.precision.is_wide or pair.precision.weights for pair in open_results.values()):
            return
        worst = 0.0
        for record in sorted(context.reference.records, key=lambda record: record.order):
            if is_parameter(record.key):
                continue
            pair = context.pairs.get(record.key.text)
            judged = open_results.get(record.key.text)
            if judged is not None and _has_tokens(context, judged):
                finding = _judge(context, judged, worst)
                if finding is not None:
                    yield record.key.text, finding
            worst = max(worst, _largest_row_error(pair))


def _has_tokens(context: Context, pair: MeasuredPair) -> bool:
    """Whether rows of a tensor are comparable ones, made by modules of rows before them."""
    record = pair.reference
    if pair.precision.is_wide or pair.precision.weights or len(record.shape) >= _IMAGES:
        return False
    if is_inner(record.key) or is_gradient(record.key) or is_state(record.key):
        return False
    if pair.key in context.shuffled or context.after_flips.reaches(record):
        return False
    return record.key.slot.startswith(("input", "output"))


def _judge(context: Context, pair: MeasuredPair, before: float) -> Finding | None:
    """Judge the worst row of a tensor; None if it is off no more than other rows, or than is expected."""
    precision, limits = pair.precision, POLICY.row_gain
    noise = math.hypot(before, 2 * precision.rounding)
    usual = POLICY.row_spread * max(pair.row_error or 0.0, precision.rounding)
    expected = POLICY.envelope_at(context.calls.depth(pair.reference), precision)
    least = max(usual, POLICY.row_excess * expected, limits.green * noise)
    if _largest_row_error(pair) <= least or pair.difference.measured < pair.difference.elements:
        return None
    error = context.robust_errors.worst_row(pair)
    if error <= least:
        return None
    gain = error / noise
    shown, limit = number_and_limit(gain, limits.green, 3)
    text = (
        f"one row is off by {error:.2g}, the median one by {pair.row_error:.2g}, and none of what came "
        f"before by more than {before:.2g}: gain {shown}, at most {limit}"
    )
    return limits.finding("row_gain", gain, text)


def _largest_row_error(pair: Pair | None) -> float:
    difference = None if pair is None else pair.difference
    return (difference.row_error_max or 0.0) if difference is not None else 0.0
