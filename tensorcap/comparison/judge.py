"""Judge measured pairs: first by values and by a user's thresholds, then by the tests of the policy."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Final

from tensorcap.comparison.blind_spots import RunSummary, summarize_runs
from tensorcap.comparison.calibration import Calibration
from tensorcap.comparison.exact import judge_masks
from tensorcap.comparison.injected import Injected
from tensorcap.comparison.near_ties import NearTies
from tensorcap.comparison.padding import Padding
from tensorcap.comparison.pair import Decision, Finding, Pair, decide
from tensorcap.comparison.policy import POLICY, Precision
from tensorcap.comparison.policy_tests import (
    TESTS,
    Context,
    is_whole,
    judge_total_error,
    measured_pair,
    without_estimates,
)
from tensorcap.comparison.quantised_layers import QuantisedLayers
from tensorcap.comparison.routing import (
    Flips,
    StepsAfterFlips,
    aligned_errors,
    copies_of,
    find_flips,
    find_routers,
    moved_ops,
    scores_by_choices,
    shuffled_calls,
)
from tensorcap.comparison.thresholds import KeyThresholds, Thresholds
from tensorcap.metrics import Difference, LogitDifference, is_routing, logit_metrics, shared_vocabulary
from tensorcap.runs import Calls, calls_of, is_inner, ops_of
from tensorcap_formats.archive import Archive

_MOVED: Final = "experts flipped before it, so that its rows are not those of the reference"
_WHOLE_ERRORS: Final = {"row_error_median", "row_error_p95", "relative_frobenius"}  # as `growth` limits


@dataclass(frozen=True)
class LogitMeasure:
    """Measures pairs as logits, if a limit of a metric of logits asks for it.

    Attributes:
        reference: The trusted archive.
        target: The archive under test.
        compute_dtype: Precision of the target's run, which says what a tie is; the record's if None.
    """

    reference: Archive
    target: Archive
    compute_dtype: str | None = None

    def __call__(self, pair: Pair) -> LogitDifference | None:
        """Measure a pair; None if it cannot be logits.

        Raises:
            ReadError: One side cannot be read.
        """
        ours, theirs = pair.reference, pair.target
        if (
            ours is None
            or theirs is None
            or not ours.shape
            or "complex" in (ours.dtype.kind, theirs.dtype.kind)
        ):
            return None
        vocabulary = shared_vocabulary(self.reference, self.target)
        return logit_metrics(
            self.reference,
            ours,
            self.target,
            theirs,
            vocabulary=vocabulary,
            compute_dtype=self.compute_dtype,
        )


def judge(pair: Pair, limits: KeyThresholds, remark: str = "", logits: LogitDifference | None = None) -> Pair:
    """Judge a pair that was measured, if it needs no policy.

    1. Values that may not be those that the key names are `suspect`, whatever they are.
    2. Equal bits, masks of non-finite elements that differ, and equal values decide.
    3. The user's thresholds for the key decide; without any the pair stays `unjudged`.

    Args:
        pair: The pair with its difference.
        limits: The user's thresholds for its key; the difference was measured with this tolerance.
        remark: Why the values may not be those that the key names (CMP-17), or "".
        logits: The pair as logits, if a metric of these is limited.
    """
    difference = pair.difference
    if difference is None:
        return pair
    if remark:
        finding = Finding("remark", 1, 0, "suspect", remark)
        return decide(pair, Decision("values", "suspect", remark, (finding,)))
    if difference.same_bits:
        return decide(pair, Decision("values", "identical", pair.reason))
    if difference.mask_mismatches:
        return decide(pair, Decision("values", "nonfinite", pair.reason))
    if not difference.unequal:  # other bits, same values: within every tolerance there is
        is_empty = difference.elements and not difference.measured
        reason = "no element is finite on both sides" if is_empty else ""
        return decide(pair, Decision("values", "match", reason))
    pair = decide(pair, _counted(difference.unequal, difference.elements))
    if not limits:
        return pair
    return decide(pair, Decision.of_findings("tolerance", limits.judge(difference, logits), pair.reason))


@lru_cache(maxsize=1024)
def _counted(unequal: int, elements: int) -> Decision:
    """The decision that only counts what differs; many pairs have the same."""
    return Decision("values", None, f"{unequal} of {elements} differ")


@dataclass(frozen=True)
class PolicyJudge:
    """Judges the pairs that the user gave no thresholds for, by tests that use the whole of both runs.

    Attributes:
        reference: The trusted archive.
        target: The archive under test.
        precision: The precision that the runs can agree in; None if neither says what it computed in.
        thresholds: The user's thresholds; pairs that they apply to are left as they are.
        calibration: Limits that known-good runs gave, in place of the policy's of the same quantity.
        injected: Which values of the target show a module's own error; none if it is no injected run.
        layers: The quantised layers of the target.
    """

    reference: Archive
    target: Archive
    precision: Precision | None
    thresholds: Thresholds
    calibration: Calibration | None
    injected: Injected
    layers: QuantisedLayers = field(default_factory=QuantisedLayers)

    def judge(self, pairs: Sequence[Pair]) -> tuple[list[Pair], RunSummary]:
        """Judge the pairs that are `unjudged`.

        1. Masks of two kinds are compared as masks; rows of padding are taken out of the errors, and may be
           NaN on one side. Errors are those without what a layer with a weight in few bits undoes (POL-284).
        2. Routers that chose other experts are found; ops behind them whose rows moved are `excluded`, and
           tokens at near ties of routers without records of their choices are taken out of the errors.
        3. Rows that other choices shuffled are aligned.
        4. Every test of `policy_tests.tests.TESTS` is run; the worst of a pair's findings is its status.

        Returns:
            All pairs in their order, and a summary of the runs.
        """
        pairs = [self._as_masks(pair) for pair in pairs]
        if all(pair.difference is None for pair in pairs) and not any(map(self._is_open, pairs)):
            return list(pairs), RunSummary(POLICY)
        differences = [pair.difference for pair in pairs]
        pairs, context, flips = self._without_moved_rows([self._without_padding(pair) for pair in pairs])
        findings, gain_log = self._run_tests(context), context.gain_log
        after_flips = context.after_flips
        del context  # whose tables are as large as all pairs
        judged = [
            self._decided(
                pair,
                without_estimates(findings.pop(pair.key)),
                is_excused=after_flips.reaches(pair.reference)
                and not self._is_right_in_all(pair, difference),
            )
            if pair.key in findings
            else pair
            for pair, difference in zip(pairs, differences, strict=True)
        ]
        summary = summarize_runs(
            self.reference,
            self.target,
            calls=self._calls,
            pairs=judged,
            gain_log=gain_log,
            left_out=sum(pair.reason == _MOVED for pair in pairs),
            flips=flips,
            precision=self._precision,
            is_injected=bool(self.injected),
        )
        return [
            pair if pair.difference is difference else pair.with_difference(difference)
            for pair, difference in zip(judged, differences, strict=True)
        ], summary

    def _without_moved_rows(self, pairs: list[Pair]) -> tuple[list[Pair], Context, list[Flips]]:
        """Take out of the pairs what other choices of experts moved; what tests look at, and the choices."""
        archives = self.reference, self.target
        by_key = {pair.key: pair for pair in pairs}
        ops = ops_of(self.reference)
        routers = find_routers(self._calls, ops, by_key)
        noise = partial(_noise, self.precision)
        flips = find_flips(*archives, routers, by_key, noise=noise)
        near_ties = NearTies(
            *archives, self._calls, routers, by_key, noise=noise, divisors=self.layers.divisors
        )
        pairs = [self._without_other_order(near_ties, near_ties.without(pair)) for pair in pairs]
        after_flips = StepsAfterFlips([flip for flip in flips if flip.flipped] + near_ties.flips)
        copies = copies_of(pairs, [flip.pair for flip in flips])
        moved = moved_ops(self._calls, self.reference, flips, copies)
        pairs = [self._without_moved(pair, moved, after_flips) for pair in pairs]
        by_key = {pair.key: pair for pair in pairs if pair.status != "excluded"}
        scores = scores_by_choices(routers, by_key)
        choices = {flip.pair.key: self._judge_router(flip, scores[flip.pair.key]) for flip in flips}
        shuffled = shuffled_calls(self._calls, flips, copies)
        aligned = aligned_errors(*archives, self._calls, by_key, shuffled) if shuffled else {}
        errors = {pair.key: pair.row_error for pair in pairs if pair.is_compared}
        errors.update({key: aligned.get(key) for key in shuffled})
        context = Context(
            *archives,
            runs_precision=self.precision,
            calls=self._calls,
            ops=ops,
            pairs={key: measured_pair(pair, self.precision) or pair for key, pair in by_key.items()},
            open_keys={pair.key for pair in pairs if self._is_open(pair)},
            errors=errors,
            aligned=aligned,
            shuffled=shuffled,
            choices={key: choices[pair.key] for key, pair in copies.items()},
            after_flips=after_flips,
            injected=self.injected,
            padding=self._padding,
            layers=self.layers,
        )
        return pairs, context, flips

    @staticmethod
    def _run_tests(context: Context) -> dict[str, tuple[Finding, ...]]:
        """Run every test; the findings of each open pair."""
        findings: dict[str, tuple[Finding, ...]] = {}
        for test in TESTS:
            for key, finding in test.judge(context):
                if key in context.open_keys:
                    findings[key] = (*findings.get(key, ()), finding)
        return findings

    def _is_right_in_all(self, pair: Pair, difference: Difference | None) -> bool:
        """Whether the error of all elements is green, whatever was left out of the pair."""
        error = None if difference is None else difference.relative_frobenius
        if pair.reference is None or difference is None or error is None:
            return True
        if not pair.is_inexact:  # choices
            return not difference.unequal
        depth, precision = self._calls.depth(pair.reference), self._precision(pair)
        total = judge_total_error(error, depth, precision, elements=pair.elements)
        return total.status == "within-rounding"

    def _decided(self, pair: Pair, findings: Sequence[Finding], *, is_excused: bool) -> Pair:
        """Decide a pair by its findings, with limits of a calibration in place of the policy's (POL-72)."""
        policy = Decision.of_findings("policy", findings, pair.reason, is_excused=is_excused)
        pair = decide(pair, policy)
        if self.calibration is None or pair.difference is None:
            return pair
        calibrated = self.calibration.judge(pair, self._calls, LogitMeasure(self.reference, self.target))
        if not calibrated:
            return pair
        replaced = _replaced_by(calibrated)
        kept = [finding for finding in findings if finding.test not in replaced]
        calibration = Decision.of_findings(
            "calibration", [*kept, *calibrated], pair.reason, is_excused=is_excused
        )
        return decide(pair, calibration)

    def _without_moved(self, pair: Pair, moved: Collection[str], after_flips: StepsAfterFlips) -> Pair:
        """Exclude the pair if it is of an op whose rows are others since experts flipped (POL-27)."""
        record = pair.reference
        if record is None or pair.status not in ("unjudged", "shape-mismatch") or pair.findings:
            return pair
        if not is_inner(record.key) or self.thresholds.limits_for(pair.key):
            return pair
        is_moved = pair.key in moved
        if not is_moved and after_flips.is_in_step(record):
            is_choice = is_routing(record) and pair.status == "unjudged"
            is_moved = pair.status == "shape-mismatch" or (is_whole(record) and not is_choice)
        return decide(pair, Decision("routing", "excluded", _MOVED)) if is_moved else pair

    def _without_other_order(self, near_ties: NearTies, pair: Pair) -> Pair:
        """Exclude the pair if its rows are by expert, and tokens may have chosen otherwise (POL-212)."""
        record = pair.reference
        if record is None or pair.status not in ("unjudged", "shape-mismatch") or pair.findings:
            return pair
        if self.thresholds.limits_for(pair.key) or not near_ties.moves(record):
            return pair
        return decide(pair, Decision("routing", "excluded", _MOVED))

    def _as_masks(self, pair: Pair) -> Pair:
        is_settled = pair.status not in ("unjudged", "nonfinite") or bool(pair.findings)
        if is_settled or self.thresholds.limits_for(pair.key):
            return pair
        return judge_masks(self.reference, self.target, pair, lambda record: self._padding.left_out(record))

    def _without_padding(self, pair: Pair) -> Pair:
        """Take rows of padding out of a pair; if it was not finite there alone, the user's limits decide."""
        without = self._padding.without(pair)
        limits, difference = self.thresholds.limits_for(pair.key), without.difference
        if pair.status != "nonfinite" or without.status != "unjudged" or not limits or difference is None:
            return without
        findings = limits.judge(difference, None)
        return decide(without, Decision.of_findings("tolerance", findings, without.reason))

    def _judge_router(self, flips: Flips, pair: Pair) -> Finding:
        """Judge choices no better than the scores that they were made by, whose pair is given (POL-18)."""
        finding = flips.finding()
        scores = measured_pair(pair, self.precision)
        if scores is None or not scores.difference.unequal:
            is_wrong = flips.unexplained if flips.is_by_scores else flips.flipped
            return replace(finding, status="diverged") if is_wrong else finding
        precision, error = scores.precision, scores.row_error
        if not (flips.flipped and precision.is_wide and error is not None):
            return finding
        depth = self._calls.depth(scores.reference)
        total = judge_total_error(error, depth, precision, elements=scores.elements)
        is_doubtful = total.status != "within-rounding" and finding.status == "within-rounding"
        return replace(finding, status="suspect") if is_doubtful else finding

    def _is_open(self, pair: Pair) -> bool:
        """Whether the policy has to judge the pair: no threshold applies to it, and nothing decided it."""
        return pair.status == "unjudged" and not pair.findings and not self.thresholds.limits_for(pair.key)

    @cached_property
    def _padding(self) -> Padding:
        return Padding(self.reference, self.target, self.layers.divisors)

    @cached_property
    def _calls(self) -> Calls:
        return calls_of(self.reference)

    def _precision(self, pair: Pair) -> Precision:
        assert pair.reference is not None  # pairs whose errors are asked for have both sides
        assert pair.target is not None
        return POLICY.precision_of_pair(self.precision, pair.reference, pair.target)


def _noise(runs_precision: Precision | None, pair: Pair) -> float:
    """Return the relative error of a row of a pair that rounding alone makes; the pair has both sides."""
    assert pair.reference is not None
    assert pair.target is not None
    return POLICY.noise(POLICY.precision_of_pair(runs_precision, pair.reference, pair.target))


def _replaced_by(calibrated: Sequence[Finding]) -> set[str]:
    """Return the policy's tests that limits of known-good ports replace: those of the same quantity."""
    metrics = {finding.test for finding in calibrated}
    replaced = {"growth", "wide_error"} if metrics & _WHOLE_ERRORS else set()
    return replaced | {"outlier_element"} if "outlier" in metrics else replaced
