"""Is a single element off by far more than its row? See POL-12.

Formula: kappa, the largest error of an element relative to it and to the RMS of its row, against
`Policy.outlier` times the usual row error. A mistake in one index or one mask position changes few elements
by much, which a median of rows hides. Not tested behind routers that chose other experts in the same step,
whose rows are others, nor within a module's code where masked elements were left out (POL-29).
"""

from __future__ import annotations

from collections.abc import Iterator

from tensorcap.comparison.pair import Finding
from tensorcap.comparison.policy_tests.context import Context
from tensorcap.runs.record_kinds import is_inner


class OutlierTest:
    """Tests `outlier_element`."""

    names = ("outlier_element",)
    is_local = True

    def judge(self, context: Context) -> Iterator[tuple[str, Finding]]:
        """Judge every float tensor that has an outlier metric."""
        for pair, error in context.open_results():
            difference, record = pair.difference, pair.reference
            after = context.after_flips.of(record, is_shuffled=pair.key in context.shuffled)
            is_masked = is_inner(record.key) and difference.measured < difference.elements
            if difference.outlier is None or after.of_step or is_masked:
                continue
            worst_rows = difference.row_error_p95 or error
            finding = context.policy.judge_outlier(difference.outlier, error, worst_rows, pair.precision)
            yield pair.key, finding
