"""Is a tensor, or one row of it, off by far more than anything before it in the run? See POL-680, POL-681.

Formula: gain = error / sqrt(w^2 + (2 rho)^2), with w the largest error of all that was recorded before:
`row_gain` of the largest row error, `run_gain` of the median one. Whatever a module makes is made of what was
before, so that in a correct run errors grow by and by.

A mistake in one token, as of a mask, a cache or a slice, moves neither the median nor, of many rows, the 95th
percentile: `row_gain` is a finding of a row that is also past what is expected at that depth, and off by far
more than the median one. `growth` alone names no module, since correct runs of chaotic models grow past its
limit: `run_gain` is a finding of a result that is far past it at once, though all that its module was given
is not. In runs of low precision only: in float32 `outlier_element` and `wide_error` find both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from tensorcap.comparison.pair import Finding, Pair
from tensorcap.comparison.policy import POLICY
from tensorcap.comparison.policy_tests.context import Context, MeasuredPair, PolicyTest
from tensorcap.runs import is_gradient, is_inner, is_parameter, is_state
from tensorcap.wording import number_and_limit
from tensorcap_formats.records import Record

_IMAGES: Final = 4  # axes, from which on rows are channels, of very unlike size


class RunGainTest(PolicyTest):
    """Tests `row_gain` and `run_gain`."""

    names = ("row_gain", "run_gain")
    is_local = True

    def judge(self, context: Context) -> Iterator[tuple[str, Finding]]:
        """Judge what modules were given and made, of runs of low precision."""
        if context.injected or not context.reference.is_ordered:
            return
        open_results = {pair.key: pair for pair, _ in context.open_results()}
        if all(pair.precision.is_wide for pair in open_results.values()):
            return
        given = {one.key.text: call.inputs for call in context.calls.calls for one in call.outputs}
        usual, worst = 0.0, 0.0
        for record in sorted(context.reference.records, key=lambda record: record.order):
            if is_parameter(record.key):
                continue
            pair = context.pairs.get(record.key.text)
            judged = open_results.get(record.key.text)
            if judged is not None and _is_of_modules(context, judged):
                if (finding := _judge_worst_row(context, judged, worst)) is not None:
                    yield record.key.text, finding
                inputs = given.get(record.key.text, ())
                if _are_compared(context, inputs) and (finding := _judge(context, judged, usual)) is not None:
                    yield record.key.text, finding
            if pair is not None and pair.is_compared:
                usual = max(usual, pair.row_error or 0.0)
                worst = max(worst, _largest_row_error(pair))


def _are_compared(context: Context, inputs: Sequence[Record]) -> bool:
    """Whether a module was given tensors, and all of floats among them were compared."""
    floats = [context.pairs.get(record.key.text) for record in inputs if record.dtype.is_inexact]
    return bool(floats) and all(pair is not None and pair.is_compared for pair in floats)


def _is_of_modules(context: Context, pair: MeasuredPair) -> bool:
    """Whether a tensor was made by modules of what was before, by the same choices of experts."""
    record = pair.reference
    if pair.precision.is_wide or is_inner(record.key) or is_gradient(record.key) or is_state(record.key):
        return False
    if pair.key in context.shuffled or context.after_flips.reaches(record):
        return False
    return record.key.slot.startswith(("input", "output"))


def _judge(context: Context, pair: MeasuredPair, before: float) -> Finding | None:
    """Judge the median row of a tensor; None if it is not far past what is expected, or than all before."""
    precision, error, limits = pair.precision, pair.row_error or 0.0, POLICY.run_gain
    gain = error / math.hypot(before, 2 * precision.rounding)
    expected = POLICY.envelope_at(context.calls.depth(pair.reference), precision)
    if gain <= limits.green or error <= POLICY.run_excess * expected:
        return None
    shown, limit = number_and_limit(gain, limits.green, 3)
    text = (
        f"off by {error:.2g}, and nothing that came before by more than {before:.2g}: gain {shown}, at most "
        f"{limit}"
    )
    return limits.finding("run_gain", gain, text)


def _judge_worst_row(context: Context, pair: MeasuredPair, before: float) -> Finding | None:
    """Judge the worst row of a tensor; None if it is off no more than other rows, or than is expected."""
    precision, limits = pair.precision, POLICY.row_gain
    if precision.weights or len(pair.reference.shape) >= _IMAGES:
        return None
    noise = math.hypot(before, 2 * precision.rounding)
    usual = POLICY.row_spread * max(pair.row_error or 0.0, precision.rounding)
    expected = POLICY.envelope_at(context.calls.depth(pair.reference), precision)
    least = max(usual, POLICY.row_excess * expected, limits.green * noise)
    if _largest_row_error(pair) <= least or pair.difference.measured < pair.difference.elements:
        return None
    error = context.robust_errors.worst_row(pair, context.padding.left_out(pair.reference))
    if error <= least:
        return None
    gain = error / noise
    shown, limit = number_and_limit(gain, limits.green, 3)
    text = (
        f"one row is off by {error:.2g}, the median one by {pair.row_error:.2g}, and none of what came "
        f"before by more than {before:.2g}: gain {shown}, at most {limit}"
    )
    return limits.finding("row_gain", gain, text)


def _largest_row_error(pair: Pair) -> float:
    difference = pair.difference
    return (difference.row_error_max or 0.0) if difference is not None else 0.0
