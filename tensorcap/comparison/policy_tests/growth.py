"""Did the error grow past what a correct run's grows to at that depth? See POL-13, POL-16, POL-29.

Formula: row error <= e0 * rho * sqrt(e1 + e2 * n) after n blocks (`Policy.envelope`), the random walk of one
rounding a block with a margin; of float32 runs, in which the order of accumulation makes the error,
`Policy.wide_total`. The limit is larger for places within a module's code and gradients (`Policy.rough`) and
behind routers that chose other experts in earlier steps (`Policy.routing_growth`). Alone it is no more than
`suspect` in low precision: a correct run of a chaotic model exceeds it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from tensorcap.comparison.pair import Finding, Status
from tensorcap.comparison.policy import Limits, Policy, Precision
from tensorcap.comparison.policy_tests.context import Context
from tensorcap.comparison.policy_tests.op_gains import cancellation_scale
from tensorcap.runs import is_gradient, is_inner


class GrowthTest:
    """Tests `growth`, and `wide_error` of float32 runs."""

    names = ("growth", "wide_error")
    is_local = False

    def judge(self, context: Context) -> Iterator[tuple[str, Finding]]:
        """Judge every float tensor whose error may have come from before it."""
        policy = context.policy
        for pair, error in context.open_results():
            if context.own_kind(context.pairs[pair.key]) is not None:
                continue
            record, precision = pair.reference, pair.precision
            after = context.after_flips.of(record, is_shuffled=pair.key in context.shuffled)
            scaled = error * cancellation_scale(context, context.pairs[pair.key])
            if after.of_most_rows:
                yield pair.key, judge_other_experts(scaled)
                continue
            times = policy.rough if is_inner(record.key) or is_gradient(record.key) else 1.0
            if after.of_earlier and not precision.is_wide:
                times = max(times, policy.routing_growth)
            depth = context.calls.depth(record)
            yield (
                pair.key,
                judge_total_error(policy, scaled, depth, precision, elements=pair.elements, times=times),
            )


def judge_total_error(
    policy: Policy, error: float, depth: int, precision: Precision, *, elements: int, times: float = 1.0
) -> Finding:
    """Judge the whole error of a record: `growth`, or `wide_error` of float32 runs.

    Args:
        policy: The limits.
        error: Row error, no unit.
        depth: Count of blocks that it has come through.
        precision: The precision of the pair.
        elements: Count of elements that the error is taken over.
        times: What limits are multiplied by: `Policy.rough`, `Policy.routing_growth`.
    """
    if precision.is_wide:
        limits = policy.in_proportion(policy.wide_total, precision)
        limits = Limits(times * limits.green, times * limits.suspect)
        text = f"row error {error:.2g}, {precision.name} runs agree within {limits.green:.2g}"
        return Finding("wide_error", error, limits.green, limits.status(error), text)
    limit = times * policy.envelope_at(depth, precision) * policy.widened_by(elements)
    status: Status = "within-rounding" if error <= limit else "suspect"
    text = f"row error {error:.2g}, at most {limit:.2g} expected at depth {depth} in {precision.name}"
    return Finding("growth", error, limit, status, text)


def judge_other_experts(error: float) -> Finding:
    """Judge the whole error of a record whose typical row had other experts, by that of two unlike rows."""
    limit = math.sqrt(2)
    status: Status = "within-rounding" if error <= limit else "suspect"
    text = f"row error {error:.2g}, where most rows had other experts: at most {limit:.2g}"
    return Finding("growth", error, limit, status, text)
