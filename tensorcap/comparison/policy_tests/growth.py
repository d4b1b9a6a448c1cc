"""Did the error grow past what a correct run's grows to at that depth? See POL-13, POL-16, POL-29.

Formula: row error <= e0 * rho * sqrt(e1 + e2 * n) after n blocks (`Policy.envelope`), the random walk of one
rounding a block with a margin; of float32 runs, in which the order of accumulation makes the error,
`Policy.wide_total`. The limit is larger for places within a module's code and gradients (`Policy.rough`) and
behind routers that chose other experts in earlier steps (`Policy.routing_growth`). Behind one that did so in
the same step the median is that of tokens, also if their rows are too short for row metrics. Alone it is no
more than `suspect` in low precision: a correct run of a chaotic model exceeds it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from tensorcap.comparison.pair import Finding
from tensorcap.comparison.policy import POLICY, Limits, Precision
from tensorcap.comparison.policy_tests.context import Context, PolicyTest
from tensorcap.comparison.policy_tests.op_gains import cancellation_scale
from tensorcap.comparison.robust_errors import has_measured_rows
from tensorcap.runs import is_gradient, is_inner
from tensorcap.wording import number_and_limit


class GrowthTest(PolicyTest):
    """Tests `growth`."""

    names = ("growth",)
    is_local = False
    is_growth = True

    def judge(self, context: Context) -> Iterator[tuple[str, Finding]]:
        """Judge every float tensor of low precision whose error may have come from before it."""
        return _total_errors(context, is_wide=False)


class WideErrorTest(PolicyTest):
    """Tests `wide_error`, which takes the place of `growth` in float32 and wider."""

    names = ("wide_error",)
    is_local = False

    def judge(self, context: Context) -> Iterator[tuple[str, Finding]]:
        """Judge every float tensor of float32 or wider whose error may have come from before it."""
        return _total_errors(context, is_wide=True)


def _total_errors(context: Context, *, is_wide: bool) -> Iterator[tuple[str, Finding]]:
    """Judge tensors by `wide_error`, or by `growth`, which also judges rows of other experts if wide."""
    for pair, error in context.open_results():
        record, precision = pair.reference, pair.precision
        has_other_rows = context.after_flips.has_other_rows(record)
        is_of_other = is_wide != (precision.is_wide and not has_other_rows)
        if is_of_other or context.injected.own(pair) is not None:
            continue
        scaled = error * cancellation_scale(context, pair)
        if has_other_rows:
            yield pair.key, _judge_other_experts(scaled)
            continue
        times = POLICY.rough if is_inner(record.key) or is_gradient(record.key) else 1.0
        if not is_wide and context.after_flips.is_in_later_step(record):
            times = max(times, POLICY.routing_growth)
        depth, elements = context.calls.depth(record), pair.elements
        finding = judge_total_error(scaled, depth, precision, elements=elements, times=times)
        is_green = finding.status == "within-rounding"
        if not is_green and context.after_flips.is_in_step(record) and not has_measured_rows(pair):
            typical = min(error, context.robust_errors.typical(pair)) * cancellation_scale(context, pair)
            finding = judge_total_error(typical, depth, precision, elements=elements, times=times)
        yield pair.key, finding


def judge_total_error(
    error: float, depth: int, precision: Precision, *, elements: int, times: float = 1.0
) -> Finding:
    """Judge the whole error of a record: `growth`, or `wide_error` of float32 and wider.

    Args:
        error: Row error, no unit.
        depth: Count of blocks that it has come through.
        precision: The precision of the pair.
        elements: Count of elements that the error is taken over.
        times: What limits are multiplied by: `Policy.rough`, `Policy.routing_growth`.
    """
    if precision.is_wide:
        limits = POLICY.in_proportion(POLICY.wide_total, precision).scaled(times)
        shown, most = number_and_limit(error, limits.green)
        text = f"row error {shown}, {precision.text} runs agree within {most}"
        return limits.finding("wide_error", error, text)
    limit = times * POLICY.envelope_at(depth, precision) * POLICY.widened_by(elements)
    shown, most = number_and_limit(error, limit)
    text = f"row error {shown}, at most {most} expected at depth {depth} in {precision.text}"
    return Limits(limit, math.inf).finding("growth", error, text)


def _judge_other_experts(error: float) -> Finding:
    """Judge the whole error of a record whose typical row had other experts, by that of two unlike rows."""
    limit = math.sqrt(2)
    shown, most = number_and_limit(error, limit)
    text = f"row error {shown}, where most rows had other experts: at most {most}"
    return Limits(limit, math.inf).finding("growth", error, text)
