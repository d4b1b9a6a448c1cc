"""Did the error grow past what a correct run's grows to at that depth? See POL-13, POL-16, POL-29.

Formula: row error <= e0 * rho * sqrt(e1 + e2 * n) after n blocks (`Policy.envelope`), the random walk of one
rounding a block with a margin; of float32 runs, in which the order of accumulation makes the error,
`Policy.wide_total`. The limit is larger for places within a module's code and gradients (`Policy.rough`) and
behind routers that chose other experts in earlier steps (`Policy.routing_growth`). Alone it is no more than
`suspect` in low precision: a correct run of a chaotic model exceeds it.
"""

from __future__ import annotations

from collections.abc import Iterator

from tensorcap.comparison.pair import Finding
from tensorcap.comparison.policy_tests.context import Context
from tensorcap.comparison.policy_tests.op_gains import cancellation_scale
from tensorcap.runs.record_kinds import is_gradient, is_inner


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
                yield pair.key, policy.judge_other_experts(scaled)
                continue
            times = policy.rough if is_inner(record.key) or is_gradient(record.key) else 1.0
            if after.of_earlier and not precision.is_wide:
                times = max(times, policy.routing_growth)
            depth = context.calls.depth(record)
            yield (
                pair.key,
                policy.judge_total(scaled, depth, precision, elements=pair.elements, times=times),
            )
