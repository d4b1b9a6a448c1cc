"""The status of pairs that were measured: from what was given, then from the policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from tensorcap.comparison.blind_spots import RunSummary, summarize_runs
from tensorcap.comparison.calibration import Calibration
from tensorcap.comparison.exact import judge_masks, judge_parameter
from tensorcap.comparison.gains import Gains, elements_of, row_error
from tensorcap.comparison.injected import Injected
from tensorcap.comparison.input_dependence import explained_leaves
from tensorcap.comparison.op_gains import OpGains
from tensorcap.comparison.padding import Padding
from tensorcap.comparison.pair import Finding, Pair, worst_status
from tensorcap.comparison.policy import Policy, Precision
from tensorcap.comparison.robust_errors import RobustErrors
from tensorcap.comparison.routing import (
    Flips,
    aligned_leaves,
    calls_that_align,
    copies_of,
    find_flips,
    moved_ops,
    routers,
    scores_by_choices,
    shuffled_calls,
)
from tensorcap.comparison.thresholds import KeyThresholds, Thresholds
from tensorcap.metrics.routing import is_routing
from tensorcap.runs.calls import Calls
from tensorcap.runs.ops import ops_of
from tensorcap.runs.record_kinds import is_gradient, is_inner, is_parameter
from tensorcap_formats.archive import Archive
from tensorcap_formats.records import Record

_MOVED: Final = "experts flipped before it, so that its rows are not those of the reference"
_WHOLE_ERRORS: Final = {"row_error_median", "row_error_p95", "relative_frobenius"}  # what F and `wide` limit


def judge(pair: Pair, given: KeyThresholds, remark: str = "") -> Pair:
    """Find the status of a pair that was measured, if it needs no policy.

    Args:
        pair: The pair with its difference.
        given: What somebody gave for its key; the difference was measured with its tolerance.
        remark: Why the values may not be those that were meant (CMP-17); such a pair is never green.
    """
    found = pair.difference
    if found is None:
        return pair
    if remark:
        finding = Finding("remark", 1, 0, "suspect", remark)
        return replace(pair, status="suspect", reason=remark, findings=(finding,))
    if found.same_bits:
        return replace(pair, status="identical")
    if found.mask_mismatches:
        return replace(pair, status="nonfinite")
    if not found.unequal:  # other bits, same values: within every tolerance there is
        nothing = found.elements and not found.measured
        return replace(pair, status="match", reason="no element is finite on both sides" if nothing else "")
    return with_findings(pair, given.judge(found)) if given else pair


def with_findings(pair: Pair, findings: Sequence[Finding]) -> Pair:
    """The pair with findings, the worst of which is its status."""
    return replace(pair, status=worst_status(findings), findings=tuple(findings))


class PolicyJudge:
    """Judges the pairs that nothing was given for, by tests that look at the whole of both runs.

    Args:
        reference: The trusted archive.
        target: The archive under test.
        policy: The limits.
        precision: What the runs can agree in, or None where neither says what it computed in.
        given: What a user gave; pairs that it is about are left as they are.
        injected: Which values of the target show a module's own error, where it is an injected run.
        calibration: Limits that known-good runs gave, in the place of the policy's of the same quantity.
    """

    def __init__(
        self,
        reference: Archive,
        target: Archive,
        *,
        policy: Policy,
        precision: Precision | None,
        given: Thresholds,
        calibration: Calibration | None = None,
        injected: Injected | None = None,
    ) -> None:
        self._archives = reference, target
        self._policy = policy
        self._runs_precision = precision
        self._given = given
        self._calibration = calibration
        self._injected = injected

    def judge(self, pairs: Sequence[Pair]) -> tuple[list[Pair], RunSummary]:
        """Judge the pairs that are `unjudged`.

        Returns:
            All pairs in their order, and what the tests say of the runs as a whole.
        """
        pairs = [self._as_masks(pair) for pair in pairs]
        if all(pair.difference is None for pair in pairs):
            self._open = {pair.key for pair in pairs if self._is_open(pair)}
            if not self._open:
                return list(pairs), RunSummary(self._policy)
        whole = {pair.key: pair for pair in pairs}
        padding = Padding(*self._archives)
        pairs = [padding.without(pair) for pair in pairs]
        ops = ops_of(self._archives[0])
        by_key = {pair.key: pair for pair in pairs}
        found_routers = routers(self._calls, ops, by_key)
        flips = find_flips(
            *self._archives,
            found_routers,
            by_key,
            policy=self._policy,
            noise=lambda pair: self._policy.noise(self._precision(pair)),
        )
        flipped = [flip for flip in flips if flip.flipped]
        first_flip = _first_flips([flip.pair for flip in flipped])
        stands = _Stands(flipped, self._policy.routing_typical)
        copies = copies_of(pairs, [flip.pair for flip in flips])
        moved = moved_ops(self._calls, self._archives[0], flips, copies)
        pairs = [self._left_out(pair, moved, first_flip) for pair in pairs]
        by_key = {pair.key: pair for pair in pairs if pair.status != "excluded"}
        self._open = {pair.key for pair in pairs if self._is_open(pair)}
        findings: dict[str, list[Finding]] = {pair.key: [] for pair in pairs}
        by_router = {flip.pair.key: flip for flip in flips}
        scores = scores_by_choices(found_routers, by_key)
        verdicts = {key: self._of_router(flip, scores[key]) for key, flip in by_router.items()}
        routed = {key: verdicts[pair.key] for key, pair in copies.items()}
        shuffled = shuffled_calls(self._calls, flips, copies)
        aligned = calls_that_align(
            list(aligned_leaves(*self._archives, self._calls, by_key, shuffled)) if shuffled else []
        )
        errors = {pair.key: row_error(pair) for pair in pairs if pair.is_compared}
        errors.update({key: aligned.get(key) for key in shuffled})
        second_look = RobustErrors(*self._archives)
        gains = Gains(
            self._calls,
            by_key,
            errors=errors,
            aligned=aligned,
            policy=self._policy,
            precision=self._precision,
            confirm=second_look,
            of_rows=second_look.of_rows,
            was_replaced=self._injected.was_replaced if self._injected else lambda pair: False,
        )
        of_ops = OpGains(
            ops,
            by_key,
            errors=errors,
            policy=self._policy,
            precision=self._precision,
            confirm=second_look,
        )
        found_gains = [*gains.all(), *of_ops.all()]
        for pair in pairs:
            if pair.key in self._open:
                error = errors.get(pair.key)
                scale = of_ops.scale(pair)
                findings[pair.key] += self._of_pair(
                    pair,
                    error,
                    routed.get(pair.key),
                    scale=scale,
                    behind=stands.behind(pair, is_shuffled=pair.key in shuffled),
                )
        for gain in found_gains:
            findings[gain.pair.key] += gain.findings
        for pair, finding in explained_leaves(
            *self._archives, self._calls, by_key, policy=self._policy, precision=self._precision
        ):
            if not self._is_own(pair):  # the rounding of an archived input depends on it, too
                findings[pair.key].append(finding)
        judged = [self._judged(pair, findings[pair.key]) for pair in pairs]
        account = summarize_runs(
            *self._archives,
            calls=self._calls,
            pairs=judged,
            gains=found_gains,
            untested=tuple(gains.untested),
            has_inputs=gains.has_inputs,
            left_out=sum(pair.reason == _MOVED for pair in pairs),
            flips=flips,
            policy=self._policy,
            precision=self._precision,
            is_injected=bool(self._injected),
        )
        return [replace(pair, difference=whole[pair.key].difference) for pair in judged], account

    def _left_out(self, pair: Pair, moved: Collection[str], first_flip: Callable[[Record], bool]) -> Pair:
        """The pair, `excluded` if it is of an op whose rows are others since experts flipped (POL-27)."""
        record = pair.reference
        if record is None or pair.status not in ("unjudged", "shape-mismatch") or pair.findings:
            return pair
        if not is_inner(record.key) or self._given.of(pair.key):
            return pair
        is_moved = pair.key in moved
        if not is_moved and first_flip(record):
            is_choice = is_routing(record) and pair.status == "unjudged"
            is_moved = pair.status == "shape-mismatch" or (_is_whole(record) and not is_choice)
        return replace(pair, status="excluded", reason=_MOVED) if is_moved else pair

    def _as_masks(self, pair: Pair) -> Pair:
        is_settled = pair.status not in ("unjudged", "nonfinite") or bool(pair.findings)
        if is_settled or self._given.of(pair.key):
            return pair
        return judge_masks(*self._archives, pair)

    def _of_router(self, flips: Flips, scores: Pair) -> Finding:
        """The verdict on choices, no better than that of the scores that they were made by (POL-18)."""
        finding = flips.finding(self._policy)
        if scores.difference is None or not scores.difference.unequal:
            is_wrong = flips.unexplained if flips.is_by_scores else flips.flipped
            return replace(finding, status="diverged") if is_wrong else finding
        precision, error = self._precision(scores), row_error(scores)
        if not (flips.flipped and precision.is_wide and scores.reference and error is not None):
            return finding
        depth, count = self._calls.depth(scores.reference), elements_of(scores)
        total = self._policy.judge_total(error, depth, precision, elements=count)
        is_doubtful = total.status != "within-rounding" and finding.status == "within-rounding"
        return replace(finding, status="suspect") if is_doubtful else finding

    def _judged(self, pair: Pair, findings: Sequence[Finding]) -> Pair:
        if pair.key not in self._open or not findings:
            return pair
        if self._calibration is not None and pair.difference is not None:
            calibrated = self._calibration.judge(pair, self._calls)
            findings = [f for f in findings if f.test not in _replaced_by(calibrated)] + calibrated
        return with_findings(pair, findings)

    def _is_open(self, pair: Pair) -> bool:
        """Whether nothing was given for the pair that would judge it, or that it is `unjudged` by."""
        return pair.status == "unjudged" and not pair.findings and not self._given.of(pair.key)

    @cached_property
    def _calls(self) -> Calls:
        return Calls(self._archives[0])

    def _of_pair(
        self,
        pair: Pair,
        error: float | None,
        routing: Finding | None,
        *,
        scale: float,
        behind: _Behind,
    ) -> list[Finding]:
        """What one pair says by itself."""
        assert pair.reference is not None
        assert pair.target is not None
        if _is_whole(pair.reference) or _is_whole(pair.target):
            return [routing or _integers(pair)] if pair.difference is not None else []
        precision, depth = self._precision(pair), self._calls.depth(pair.reference)
        if pair.difference is None:
            return self._by_statistics(pair, depth, precision)
        key = pair.reference.key
        if is_parameter(key):
            return [judge_parameter(pair, pair.difference)]
        found = self._of_dtypes(pair)
        if pair.difference.zero_rows:
            text = f"{pair.difference.zero_rows} rows are all zeros in the reference and not in the target"
            found.append(Finding("zeros", pair.difference.zero_rows, 0, "suspect", text))
        if error is not None:
            times = self._policy.rough if is_inner(key) or is_gradient(key) else 1.0
            if behind.of_earlier and not precision.is_wide:
                times = max(times, self._policy.routing_growth)
            own = self._of_own(pair, error, precision)
            if own is not None:
                found.append(own)
            elif behind.of_most_rows:
                found.append(self._policy.judge_other_experts(error * scale))
            else:
                total = self._policy.judge_total(
                    error * scale, depth, precision, elements=elements_of(pair), times=times
                )
                found.append(total)
            outlier = pair.difference.outlier
            is_masked = is_inner(key) and pair.difference.measured < pair.difference.elements
            if outlier is not None and not behind.of_step and not is_masked:
                worst = pair.difference.row_error_p95 or error
                found.append(self._policy.judge_outlier(outlier, error, worst, precision))
        return found

    def _is_own(self, pair: Pair) -> bool:
        return self._injected is not None and self._injected.own(pair) is not None

    def _of_own(self, pair: Pair, error: float, precision: Precision) -> Finding | None:
        """Tests A and A', where the error can have come from nowhere else (POL-70, POL-71)."""
        own = self._injected.own(pair) if self._injected else None
        if own is None or pair.reference is None:
            return None
        site = pair.reference.key.site
        is_leaf = own == "result" and self._calls.is_leaf(site) and self._calls.is_simple(site)
        return self._policy.judge_own(error, precision, is_leaf=is_leaf, elements=elements_of(pair))

    def _of_dtypes(self, pair: Pair) -> list[Finding]:
        """A record that is coarser than the other, and than what both runs say that they computed in."""
        assert pair.reference is not None
        assert pair.target is not None
        stated = [self._policy.stated(archive.info) for archive in self._archives]
        units = [self._policy.units[r.dtype.name] for r in (pair.reference, pair.target)]
        known = [precision for precision in stated if precision is not None]
        if len(known) < len(stated) or units[0] == units[1] or max(units) <= max(p.unit for p in known):
            return []
        coarse = max((pair.reference, pair.target), key=lambda r: self._policy.units[r.dtype.name])
        name = max(known, key=lambda p: p.unit).name
        text = f"a record is {coarse.dtype.name}, and both runs say that they computed in {name} or finer"
        return [Finding("dtype", max(units), min(units), "suspect", text)]

    def _by_statistics(self, pair: Pair, depth: int, precision: Precision) -> list[Finding]:
        """By the error that the statistics prove, where no values were kept."""
        if pair.reference is None or pair.target is None:
            return []
        least = _least_error(pair.reference, pair.target)
        if least is None:
            return []
        finding = self._policy.judge_total(least, depth, precision, elements=pair.reference.size)
        text = f"norms or means prove {finding.text}"
        return [] if finding.status == "within-rounding" else [replace(finding, test="statistics", text=text)]

    def _precision(self, pair: Pair) -> Precision:
        assert pair.reference is not None
        assert pair.target is not None
        return self._policy.precision_of_pair(self._runs_precision, pair.reference, pair.target)


def _replaced_by(calibrated: Sequence[Finding]) -> set[str]:
    """The policy's tests that limits of known-good ports take the place of: those of the same quantity."""
    metrics = {finding.test for finding in calibrated}
    replaced = {"growth", "wide_error"} if metrics & _WHOLE_ERRORS else set()
    return replaced | {"outlier_element"} if "outlier" in metrics else replaced


def _first_flips(flipped: Sequence[Pair]) -> Callable[[Record], bool]:
    """Whether a record was made after experts flipped, in the same step."""
    first: dict[tuple[int, int], int] = {}
    for pair in flipped:
        if pair.reference is not None:
            place = pair.reference.key.rank, pair.reference.key.step
            first[place] = min(first.get(place, pair.reference.order), pair.reference.order)
    return lambda record: record.order >= first.get((record.key.rank, record.key.step), 1 << 62)


@dataclass(frozen=True, slots=True)
class _Behind:
    """Which routers that chose other experts a tensor was made after.

    Attributes:
        of_step: Some of the same step.
        of_earlier: Some of an earlier step, of which caches keep what it made.
        of_most_rows: Some of the same step, by which the median row is not what it was.
    """

    of_step: bool
    of_earlier: bool
    of_most_rows: bool


class _Stands:
    """Where tensors stand to routers that chose other experts."""

    def __init__(self, flipped: Sequence[Flips], typical: float) -> None:
        self._of_step = _first_flips([flip.pair for flip in flipped])
        self._of_most = _first_flips([flip.pair for flip in flipped if flip.flipped > typical * flip.rows])
        self._first: dict[int, int] = {}  # step by rank
        for flip in flipped:
            if flip.pair.reference is not None:
                key = flip.pair.reference.key
                self._first[key.rank] = min(self._first.get(key.rank, key.step), key.step)

    def behind(self, pair: Pair, *, is_shuffled: bool) -> _Behind:
        record = pair.reference
        if record is None:
            return _Behind(is_shuffled, of_earlier=False, of_most_rows=False)
        of_step = is_shuffled or self._of_step(record)
        of_earlier = record.key.step > self._first.get(record.key.rank, 1 << 62)
        return _Behind(of_step, of_earlier, self._of_most(record))


def _integers(pair: Pair) -> Finding:
    found = pair.difference
    assert found is not None
    assert pair.reference is not None
    text = f"{found.unequal} of {found.elements} whole numbers differ"
    if is_routing(pair.reference):
        text = f"{text}, and the scores that they were chosen by were not captured"
        return Finding("integers", found.unequal, 0, "suspect", text)
    return Finding("integers", found.unequal, 0, "diverged", text)


def _is_whole(record: Record) -> bool:
    return record.dtype.kind in ("bool", "int", "uint")


def _least_error(trusted: Record, tested: Record) -> float | None:
    """The relative Frobenius error that norms and means prove, by the triangle inequality."""
    ours, theirs = trusted.statistics, tested.statistics
    if ours is None or theirs is None or not ours.l2 or theirs.l2 is None:
        return None
    least = abs(theirs.l2 - ours.l2)
    if ours.mean is not None and theirs.mean is not None:
        least = max(least, abs(theirs.mean - ours.mean) * math.sqrt(trusted.size))
    return least / ours.l2
