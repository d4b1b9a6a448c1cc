"""Compare two archives, pair by pair; what each status means is normative in `specs/comparison.md`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tensorcap.metrics.difference import Difference, Tolerance
from tensorcap.metrics.measuring import measure_pairs
from tensorcap.verdicts.account import Account
from tensorcap.verdicts.baseline import RELATIVE_EPSILON, with_ratios
from tensorcap.verdicts.calibration import Calibration
from tensorcap.verdicts.caveats import caveats, caveats_of_pairs, error_of
from tensorcap.verdicts.divergence import Divergence, first_divergence
from tensorcap.verdicts.judging import PolicyJudge, judge, settle
from tensorcap.verdicts.pairing import STATUSES, Pair, Selection, Status, pair_records
from tensorcap.verdicts.policy import POLICY, Policy, Precision
from tensorcap.verdicts.thresholds import Given, Thresholds
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import Key

Source = Archive | str | os.PathLike[str]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Side:
    """What a comparison says of one of its two archives.

    Attributes:
        path: The file or folder.
        container: As `Archive.container`.
        records: Count of its records.
        model: Class of the model, "" where unknown.
        dtype: Precision of its weights, "" where unknown.
        compute_dtype: Precision in which it computed, "" where unknown.
        is_ordered: Whether its execution order is known.
        is_complete: Whether the run ended as it should.
        error: What the run ended by, "" for nothing known.
    """

    path: Path
    container: str
    records: int
    model: str
    dtype: str
    compute_dtype: str
    is_ordered: bool
    is_complete: bool
    error: str

    @classmethod
    def of(cls, archive: Archive) -> Side:
        """Describe an archive."""
        run = archive.run
        model = run.get("model")
        return cls(
            path=archive.path,
            container=archive.container,
            records=len(archive),
            model=str(model.get("class") or "") if isinstance(model, Mapping) else "",
            dtype=str(run.get("dtype") or ""),
            compute_dtype=str(run.get("compute_dtype") or ""),
            is_ordered=archive.is_ordered,
            is_complete=archive.is_complete,
            error=error_of(run),
        )


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """An argument or a result that is no tensor and differs (CMP-15).

    Attributes:
        key: Its key text.
        reference: JSON value of the reference, None also where it has none.
        target: JSON value of the target, None also where it has none.
        is_result: Whether it is a number that a module returned, so that the comparison is not green.
    """

    key: str
    reference: Any
    target: Any
    is_result: bool = False


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two archives compared.

    Attributes:
        reference: The trusted archive.
        target: The archive under test.
        tolerance: What was allowed wherever a file of thresholds says nothing else, or None.
        pairs: All pairs: in execution order of the reference, then records that only the target has.
        divergence: The first pair that is not green, and its module; None if all are.
        value_differences: Arguments and results that are no tensors and differ.
        warnings: What a reader has to know first, a sentence each.
        is_of_archives: False if two records were named, so that it matters to nobody what else there is.
        account: What the policy's tests say of the runs as a whole, and what they cannot see.
        thresholds: The file of thresholds, or None.
        calibration: The calibration that limits came from, or None.
        baseline: The baseline of the three-way test, or None.
    """

    reference: Side
    target: Side
    tolerance: Tolerance | None
    pairs: Sequence[Pair]
    divergence: Divergence | None
    value_differences: Sequence[ValueDifference]
    warnings: Sequence[str]
    is_of_archives: bool = True
    account: Account | None = None
    thresholds: Path | None = None
    calibration: Calibration | None = None
    baseline: Side | None = None

    @property
    def policy(self) -> Policy | None:
        """The limits that judged where nothing was given; None for a comparison out of a file."""
        return self.account.policy if self.account else None

    @property
    def blind_spots(self) -> Sequence[str]:
        """What this run cannot see, a sentence each."""
        return self.account.blind if self.account else ()

    @property
    def counts(self) -> dict[Status, int]:
        """How many pairs have each status that occurs, in the order of the specification."""
        found = Counter(pair.status for pair in self.pairs)
        return {status: found[status] for status in STATUSES if found[status]}

    @property
    def records(self) -> int:
        """Count of all reference records: the denominator."""
        return sum(pair.reference is not None for pair in self.pairs)

    @property
    def compared(self) -> int:
        """Count of reference records whose values, or digests, were held against the target's."""
        return sum(pair.is_compared for pair in self.pairs)

    @property
    def is_green(self) -> bool:
        """Whether something was compared, nothing required is missing, and every required pair is green."""
        return (
            self.compared > 0
            and (not self.is_of_archives or (self.reference.is_complete and self.target.is_complete))
            and not any(difference.is_result for difference in self.value_differences)
            and all(pair.is_green for pair in self.pairs if pair.is_required)
        )

    @property
    def exit_status(self) -> int:
        """3 if a pair could not be read, else 0 if green and 1 if not (CMP-51)."""
        if any(pair.status == "unreadable" for pair in self.pairs):
            return 3
        return 0 if self.is_green else 1


def compare(
    reference: Source,
    target: Source,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    thresholds: str | os.PathLike[str] | None = None,
    baseline: Source | None = None,
    calibration: str | os.PathLike[str] | None = None,
    compute_dtype: str | None = None,
    require: str | Iterable[str] = (),
    only: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    progress: Progress | None = None,
) -> Comparison:
    """Compare two archives, each record with the one of the same key.

    Args:
        reference: The trusted archive, open or a path.
        target: The archive under test, open or a path.
        rtol: Allowed error relative to `|reference|`, no unit; if only `atol` is given, 0.
        atol: Allowed absolute error, in the tensors' own unit; if only `rtol` is given, 0.
        thresholds: A TOML file of tolerances and limits by glob; an entry goes before `rtol` and `atol`.
        baseline: An archive of a run of the reference in the target's precision, or of a perturbed input,
            open or a path: each pair then says how far the target lies in units of its distance.
        calibration: A file of limits from known-good ports, as `tcap calibrate` writes it.
        compute_dtype: What the target computed in, where its run does not say so or says it wrongly.
        require: Globs; a record of the reference that fits none may be missing. Everything is required
            where there is none.
        only: Globs; compare only keys that fit one of them.
        exclude: Globs; leave out keys that fit one of them.
        progress: Told the bytes of the reference done so far, and all that will be.

    Returns:
        Every pair with its status: by what was given, else by the calibration, else by the policy.

    Raises:
        UsageError: A tolerance is negative or not finite, a dtype is unknown, a file is no file of
            thresholds, a threshold matches nothing, or a calibration is of another precision.
        TensorNotFoundError: A pattern in `only` or `require` fits nothing.
        ReadError: One of the archives, or a file, cannot be read.
    """
    given = Thresholds.given(rtol, atol, thresholds)
    selection = Selection(*map(_globs, (only, exclude, require)))
    calibrated = None if calibration is None else Calibration.read(calibration)
    with ExitStack() as stack:
        trusted, tested = (stack.enter_context(_opened(source)) for source in (reference, target))
        twin = None if baseline is None else stack.enter_context(_opened(baseline))
        pairs = pair_records(trusted, tested, selection)
        given.require_hits(pair.key for pair in pairs)
        run = _Run(trusted, tested, given, calibrated, compute_dtype, progress)
        return run.compare(pairs, selection, twin)


def compare_records(
    reference: Source,
    reference_key: str,
    target: Source,
    target_key: str,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    compute_dtype: str | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Compare one record with another, whatever their keys.

    Args:
        reference: The trusted archive, open or a path.
        reference_key: Key of the trusted record, or a shorter text as `Archive.get` takes it.
        target: The archive under test, open or a path; may be the same one.
        target_key: Key of the record under test.
        rtol: As for `compare`.
        atol: As for `compare`.
        compute_dtype: As for `compare`.
        progress: As for `compare`.

    Returns:
        A comparison of one pair, under the reference's key.

    Raises:
        UsageError: A tolerance is negative or not finite, or a dtype is unknown.
        TensorNotFoundError: A key fits no record, or several.
        ReadError: One of the archives cannot be opened.
    """
    given = Thresholds.given(rtol, atol)
    with _opened(reference) as trusted, _opened(target) as tested:
        record, partner = trusted.get(reference_key), tested.get(target_key)
        pairs = [Pair(record.key.text, "unjudged", record, partner)]
        return _Run(trusted, tested, given, None, compute_dtype, progress).compare(pairs, None, None)


def _globs(given: str | Iterable[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


@contextmanager
def _opened(source: Source) -> Iterator[Archive]:
    if isinstance(source, Archive):
        yield source
        return
    from tensorcap_formats.opening import open_archive

    with open_archive(source) as archive:
        yield archive


class _Run:
    """One comparison under way."""

    def __init__(
        self,
        reference: Archive,
        target: Archive,
        given: Thresholds,
        calibration: Calibration | None,
        compute_dtype: str | None,
        progress: Progress | None,
    ) -> None:
        self._reference = reference
        self._target = target
        self._given = given
        self._calibration = calibration
        self._progress = progress
        self._precision = POLICY.precision_of_runs(reference.run, target.run, compute_dtype)
        if calibration is not None:
            _require_precision(calibration, self._precision)

    def compare(
        self, pairs: Sequence[Pair], selection: Selection | None, baseline: Archive | None
    ) -> Comparison:
        """Measure and judge the pairs."""
        reference, target = self._reference, self._target
        settled = [settle(reference, target, pair) for pair in pairs]
        measured = self._measured(settled)
        judge_rest = PolicyJudge(
            reference,
            target,
            policy=POLICY,
            precision=self._precision,
            given=self._given,
            calibration=self._calibration,
        )
        judged, account = judge_rest.judge(measured)
        if baseline is not None:
            judged = with_ratios(judged, self._against(baseline, judged), _exact_below(account))
        return Comparison(
            reference=Side.of(reference),
            target=Side.of(target),
            tolerance=self._given.default,
            pairs=tuple(judged),
            divergence=first_divergence(reference, judged) if selection else None,
            value_differences=tuple(self._value_differences(selection)) if selection else (),
            warnings=(*caveats(reference, target), *caveats_of_pairs(judged)),
            is_of_archives=selection is not None,
            account=account,
            thresholds=self._given.path,
            calibration=self._calibration,
            baseline=None if baseline is None else Side.of(baseline),
        )

    def _value_differences(self, selection: Selection) -> Iterator[ValueDifference]:
        reference, target = self._reference.values, self._target.values
        for key in {**reference, **target}:
            ours, theirs = reference.get(key), target.get(key)
            if (ours == theirs and type(ours) is type(theirs)) or selection.why_not(key):
                continue
            is_result = _is_number(ours) and key in target and Key.parse(key).slot.startswith("output")
            if is_result and _is_within(ours, theirs, self._given.of(key).tolerance):
                continue
            yield ValueDifference(key, ours, theirs, is_result)

    def _measured(self, pairs: Sequence[Pair]) -> list[Pair]:
        """The pairs with their differences, those that need no policy with their statuses."""
        given = [self._given.of(pair.key) for pair in pairs if _needs_values(pair)]
        tolerances = [limits.tolerance for limits in given]
        found = list(self._differences(self._target, pairs, tolerances, self._progress))
        results = zip(given, found, strict=True)
        return [self._with_result(p, *next(results)) if _needs_values(p) else p for p in pairs]

    def _with_result(self, pair: Pair, given: Given, found: Difference | OSError) -> Pair:
        if isinstance(found, OSError):  # one of ours, or what the system said
            return replace(pair, status="unreadable", reason=str(found))
        return judge(replace(pair, difference=found), given, self._remark(pair))

    def _remark(self, pair: Pair) -> str:
        """What has to be known of how a pair's values came about."""
        sides = (self._reference, pair.reference), (self._target, pair.target)
        return "; ".join(r for archive, record in sides if record and (r := archive.remark(record)))

    def _against(self, baseline: Archive, pairs: Sequence[Pair]) -> dict[str, Difference | None]:
        """Baseline against reference, for the pairs that were compared; None for identical records."""
        others = [
            settle(self._reference, baseline, Pair(p.key, "unjudged", p.reference, baseline.get(p.key)))
            for p in pairs
            if p.reference is not None and p.is_compared and p.key in baseline
        ]
        found: dict[str, Difference | None] = {p.key: None for p in others if p.status == "identical"}
        open_pairs = [p for p in others if _needs_values(p)]
        differences = self._differences(baseline, open_pairs, [None] * len(open_pairs), None)
        for pair, difference in zip(open_pairs, differences, strict=True):
            if not isinstance(difference, OSError):  # the pair is undefined then
                found[pair.key] = difference
        return found

    def _differences(
        self,
        target: Archive,
        pairs: Sequence[Pair],
        tolerances: Sequence[Tolerance | None],
        progress: Progress | None,
    ) -> Iterator[Difference | OSError]:
        records = [(p.reference, p.target) for p in pairs if _needs_values(p) and p.reference and p.target]
        return measure_pairs(self._reference, target, records, tolerance=tolerances, progress=progress)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_within(ours: Any, theirs: Any, tolerance: Tolerance | None) -> bool:
    if tolerance is None or not _is_number(theirs):
        return False
    return bool(abs(theirs - ours) <= tolerance.atol + tolerance.rtol * abs(ours))


def _exact_below(account: Account) -> float:
    """The relative error up to which a run is exact."""
    if not account.precision:
        return RELATIVE_EPSILON
    return min(RELATIVE_EPSILON, POLICY.precision(account.precision).unit / 4)


def _needs_values(pair: Pair) -> bool:
    return (
        pair.status == "unjudged"
        and pair.reference is not None
        and pair.target is not None
        and pair.reference.stored
        and pair.target.stored
    )


def _require_precision(calibration: Calibration, precision: Precision | None) -> None:
    if precision is not None and precision.name != calibration.precision:
        raise UsageError(
            f"{calibration.path}: is of {calibration.precision} runs, these are {precision.name}",
            hint="Calibrate by runs of the same precision, or say --compute-dtype.",
        )
