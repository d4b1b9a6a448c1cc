"""Is a single element off by far more than its row? See POL-12.

Formula: kappa, the largest error of an element relative to it and to the RMS of its row, against
`Policy.outlier` times the usual row error. A mistake in one index or one mask position changes few elements
by much, which a median of rows hides. Not tested behind routers that chose other experts in the same step,
whose rows are others, nor within a module's code if masked elements were left out (POL-29). A row that is
much smaller than the usual one of its tensor, as of a channel that a ReLU leaves hardly anything of, is
measured again as if it were not as small (POL-162).
"""

from __future__ import annotations

from collections.abc import Iterator

from tensorcap.comparison.pair import Finding
from tensorcap.comparison.policy import POLICY, Limits, Precision
from tensorcap.comparison.policy_tests.context import Context, PolicyTest
from tensorcap.runs import is_inner


class OutlierTest(PolicyTest):
    """Tests `outlier_element`."""

    names = ("outlier_element",)
    is_local = True
    is_evidence = True
    fails_by_rounded_inputs = True

    def judge(self, context: Context) -> Iterator[tuple[str, Finding]]:
        """Judge every float tensor that has an outlier metric."""
        for pair, error in context.open_results():
            difference, record = pair.difference, pair.reference
            is_flipped = pair.key in context.shuffled or context.after_flips.is_in_step(record)
            is_masked = is_inner(record.key) and difference.measured < difference.elements
            if difference.outlier is None or is_flipped or is_masked:
                continue
            worst_rows = difference.row_error_p95 or error
            finding = judge_outlier(difference.outlier, error, worst_rows, pair.precision)
            is_all = (
                pair.reference.stored and pair.target.stored and difference.measured == difference.elements
            )
            if finding.status == "diverged" and is_all:
                outlier = min(difference.outlier, context.robust_errors.outlier(pair))
                finding = judge_outlier(outlier, error, worst_rows, pair.precision)
            yield pair.key, finding


def judge_outlier(outlier: float, error: float, worst_rows: float, precision: Precision) -> Finding:
    """Judge the largest error of an element against the error of rows.

    Args:
        outlier: `kappa`, the largest error of an element relative to it and to its row, no unit.
        error: Row error, the median.
        worst_rows: Its 95th percentile; it counts up to `Policy.outlier_spread` times the median, since in a
            tensor of few rows it is the outlier's own.
        precision: The precision of the pair.
    """
    usual = max(error, min(worst_rows, POLICY.outlier_spread * error), POLICY.noise(precision))
    limit = POLICY.outlier * usual
    text = f"one element is off by {outlier:.2g} of its row, where rows are off by {usual:.2g}"
    return Limits(limit, limit).finding("outlier_element", outlier, text)
