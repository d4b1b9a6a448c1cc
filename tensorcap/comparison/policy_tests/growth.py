"""Did the error grow past what a correct run's grows to at that depth? See POL-13, POL-16, POL-29.

Formula: row error <= e0 * rho * sqrt(e1 + e2 * n) after n blocks (`Policy.envelope`), the random walk of one
rounding a block with a margin; of float32 runs, in which the order of accumulation makes the error,
`Policy.wide_total`. The limit is larger for places within a module's code and gradients (`Policy.rough`) and
behind routers that chose other experts in earlier steps (`Policy.routing_growth`). Behind one that did so in
the same step the median is that of tokens, also if their rows are too short for row metrics. Alone it is no
more than `suspect` in low precision: a correct run of a chaotic model exceeds it.

Of a target with weights in few bits it is known what each module rounds off. Errors that know nothing of each
other add in squares, so that the limit is no more than `Policy.summed` times the root of the sum of the
squares of all that was rounded up to there (POL-665).
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import Final

from tensorcap.comparison.pair import Finding
from tensorcap.comparison.policy import POLICY, Limits, Precision
from tensorcap.comparison.policy_tests.context import Context, PolicyTest
from tensorcap.comparison.policy_tests.op_gains import cancellation_scale
from tensorcap.comparison.robust_errors import has_measured_rows
from tensorcap.runs import is_gradient, is_inner
from tensorcap.wording import number_and_limit
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import ROOT_SITE
from tensorcap_formats.records import Record

_OF_ZEROS: Final = 1.0  # row error of zeros: farther off is what has nothing to do with the reference


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
    roundings = None if is_wide else _SummedRoundings.of(context)
    for pair, error in context.open_results():
        record, precision = pair.reference, pair.precision
        has_other_rows = context.after_flips.has_other_rows(record)
        is_of_other = is_wide != (precision.is_wide and not has_other_rows)
        if is_of_other or context.injected.own(pair) is not None:
            continue
        measured = context.layers.results.get(pair.key)
        is_proven = measured is not None and measured.finding.status == "within-rounding"
        if is_proven and pair.key not in context.layers.undone and record.key.site != ROOT_SITE:
            continue  # what was there before it is judged where it was made
        scaled = error * cancellation_scale(context, pair)
        if has_other_rows:
            yield pair.key, _judge_other_experts(scaled)
            continue
        times = POLICY.rough if is_inner(record.key) or is_gradient(record.key) else 1.0
        if not is_wide and context.after_flips.is_in_later_step(record):
            times = max(times, POLICY.routing_growth)
        depth, elements = context.calls.depth(record), pair.elements
        summed = None if roundings is None or not precision.weights else roundings.up_to(record)
        finding = judge_total_error(scaled, depth, precision, elements=elements, times=times, summed=summed)
        is_green = finding.status == "within-rounding"
        if not is_green and context.after_flips.is_in_step(record) and not has_measured_rows(pair):
            typical = min(error, context.robust_errors.typical(pair)) * cancellation_scale(context, pair)
            finding = judge_total_error(
                typical, depth, precision, elements=elements, times=times, summed=summed
            )
        yield pair.key, finding


class _SummedRoundings:
    """What the modules of a target with weights in few bits round off together, up to a place of the run.

    What is rounded somewhere that the reference has no results of counts everywhere.

    Args:
        reference: The trusted archive, with an order of execution.
        own_roundings: What each module rounds off, by its site.
    """

    def __init__(self, reference: Archive, own_roundings: Mapping[str, float]) -> None:
        orders: dict[tuple[int, int, str, int], int] = {}  # of the first result of each call
        for record in reference.records:
            key = record.key
            if key.slot.startswith("output") and key.site in own_roundings:
                orders.setdefault((key.rank, key.step, key.site, key.call), record.order)
        steps: dict[int, list[tuple[int, float]]] = {}
        for (_, step, site, _), order in orders.items():
            steps.setdefault(step, []).append((order, own_roundings[site] ** 2))
        called = {site for _, _, site, _ in orders}
        self._elsewhere = sum(rho**2 for site, rho in own_roundings.items() if site not in called)
        self._orders = {step: [order for order, _ in sorted(made)] for step, made in steps.items()}
        self._squares = {
            step: list(itertools.accumulate((square for _, square in sorted(made)), initial=0.0))
            for step, made in steps.items()
        }

    @classmethod
    def of(cls, context: Context) -> _SummedRoundings | None:
        """Sum up what is known of the runs; None if nothing is, as of a target without such weights."""
        precision = context.runs_precision
        if precision is None or not precision.own_roundings or not context.reference.is_ordered:
            return None
        return cls(context.reference, precision.own_roundings)

    def up_to(self, record: Record) -> float:
        """Return the root of the sum of squares of what was rounded before a record."""
        step = record.key.step
        count = bisect_right(self._orders.get(step, ()), record.order)
        return math.sqrt(self._elsewhere + (self._squares[step][count] if count else 0.0))


def judge_total_error(
    error: float,
    depth: int,
    precision: Precision,
    *,
    elements: int,
    times: float = 1.0,
    summed: float | None = None,
) -> Finding:
    """Judge the whole error of a record: `growth`, or `wide_error` of float32 and wider.

    Args:
        error: Row error, no unit.
        depth: Count of blocks that it has come through.
        precision: The precision of the pair.
        elements: Count of elements that the error is taken over.
        times: What limits are multiplied by: `Policy.rough`, `Policy.routing_growth`.
        summed: What modules with weights in few bits rounded off up to there, no unit; None if not known.
    """
    if precision.is_wide:
        limits = POLICY.in_proportion(POLICY.wide_total, precision).scaled(times)
        shown, most = number_and_limit(error, limits.green)
        text = f"row error {shown}, {precision.text} runs agree within {most}"
        return limits.finding("wide_error", error, text)
    allowed = POLICY.envelope_at(depth, precision)
    if summed is not None:
        allowed = min(allowed, POLICY.summed * max(summed, precision.rounding))
    limit = times * allowed * POLICY.widened_by(elements)
    limit = min(limit, _OF_ZEROS) if precision.weights else limit
    shown, most = number_and_limit(error, limit)
    text = f"row error {shown}, at most {most} expected at depth {depth} in {precision.text}"
    return Limits(limit, math.inf).finding("growth", error, text)


def _judge_other_experts(error: float) -> Finding:
    """Judge the whole error of a record whose typical row had other experts, by that of two unlike rows."""
    limit = math.sqrt(2)
    shown, most = number_and_limit(error, limit)
    text = f"row error {shown}, where most rows had other experts: at most {most}"
    return Limits(limit, math.inf).finding("growth", error, text)
