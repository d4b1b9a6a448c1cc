"""Compare two archives pair by pair: pair, measure, judge."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from tensorcap.alignment import MappedArchive, MappingSource, OrderedArchive, in_reference_layout, sides
from tensorcap.comparison.agreement import explain_by_agreement, explain_in_injected_run
from tensorcap.comparison.baseline import RELATIVE_EPSILON, with_ratios
from tensorcap.comparison.blind_spots import RunSummary
from tensorcap.comparison.calibration import Calibration
from tensorcap.comparison.comparison import Comparison, ValueDifference, is_number
from tensorcap.comparison.divergence import first_divergence
from tensorcap.comparison.exact import (
    is_blocked,
    judge_by_metadata,
    judge_pass_through,
    parameter_rounding,
    verify_equal_digests,
)
from tensorcap.comparison.held_values import explain_held_values
from tensorcap.comparison.injected import Injected
from tensorcap.comparison.judge import LogitMeasure, PolicyJudge, judge
from tensorcap.comparison.mapping_provenance import (
    matching_warnings,
    summary_with_tokens,
    value_warnings,
    with_hints,
    with_mapping,
    with_places,
)
from tensorcap.comparison.padding import Padding
from tensorcap.comparison.pair import Decision, Pair, decide
from tensorcap.comparison.pairing import Selection, pair_records, partner_texts
from tensorcap.comparison.policy import POLICY, Precision
from tensorcap.comparison.quantised_layers import measure_layers
from tensorcap.comparison.quantised_weights import quantised_precision
from tensorcap.comparison.ranks import judge_ranks, sums_of_ranks
from tensorcap.comparison.thresholds import KeyThresholds, Thresholds
from tensorcap.comparison.warnings import digest_warnings, pair_warnings, run_warnings
from tensorcap.metrics import Difference, Tolerance, measure_pairs
from tensorcap.runs import FACTS, ArchiveSummary, enclosing_sites, is_fact, ops_of
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError
from tensorcap_formats.garbage import paused_collection
from tensorcap_formats.keys import Key, escape, module_of
from tensorcap_formats.open import Source, opened, opened_both
from tensorcap_formats.progress import Progress

_Place = tuple[int, int, str]  # rank, step, site


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
    mapping: MappingSource | None = None,
    trust_digests: bool = False,
    progress: Progress | None = None,
) -> Comparison:
    """Compare two archives, each record with the one that it belongs to.

    Args:
        reference: The trusted archive, open or a path.
        target: The archive under test, open or a path.
        rtol: Allowed error relative to `|reference|`, no unit; 0 if only `atol` is given.
        atol: Allowed absolute error, in the tensors' own unit; 0 if only `rtol` is given.
        thresholds: A TOML file of tolerances and limits by glob; an entry goes before `rtol` and `atol`.
        baseline: An archive of a run of the reference in the target's precision, or of a perturbed input,
            open or a path: each pair then says how far the target lies in units of its distance.
        calibration: A file of limits from known-good ports, as `tcap calibrate` writes it.
        compute_dtype: What the target computed in, if its run does not say so or says it wrongly.
        require: Globs; a record of the reference that fits none may be missing. Everything is required if
            there is none.
        only: Globs; compare only keys that fit one of them.
        exclude: Globs; leave out keys that fit one of them.
        mapping: What belongs together, as an `Alignment` or a map file; `"none"` for equal keys alone. If it
            is None, a mapping is computed if keys leave records of both sides without a partner, or rules
            say how tensors of equal keys and unlike shapes are laid out.
        trust_digests: Take tensors of equal recorded digests for identical without reading them.
        progress: Receives the bytes of the reference that are compared, and those of all pairs.

    Returns:
        Every pair with its status: by what was given, else by the calibration, else by the policy.

    Raises:
        UsageError: A tolerance is negative or not finite, a dtype is unknown, a file is no file of
            thresholds, a threshold matches nothing, a calibration is of another precision, or a mapping does
            not fit the archives.
        TensorNotFoundError: A pattern in `only` or `require` fits nothing.
        ReadError: One of the archives, or a file, cannot be read.
    """
    limits = Thresholds.parse(rtol, atol, thresholds)
    selection = Selection(*map(_globs, (only, exclude, require)))
    calibrated = None if calibration is None else Calibration.read(calibration)
    with paused_collection(), ExitStack() as stack:
        trusted, tested = stack.enter_context(opened_both(reference, target))
        twin = None if baseline is None else stack.enter_context(opened(baseline))
        trusted, tested = sides(trusted, tested, mapping)
        run = _Run(trusted, tested, limits, compute_dtype, progress, trust_digests, calibrated)
        return run.compare(paired(trusted, tested, selection), selection, twin)


def compare_records(
    reference: Source,
    reference_key: str,
    target: Source,
    target_key: str,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    compute_dtype: str | None = None,
    trust_digests: bool = False,
    steps: Sequence[str] = (),
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
        trust_digests: As for `compare`.
        steps: Layout steps from the target's tensor to the reference's, as in a map file.
        progress: As for `compare`.

    Returns:
        A comparison of one pair, under the reference's key.

    Raises:
        UsageError: A tolerance is negative or not finite, a dtype is unknown, or a step does not fit.
        TensorNotFoundError: A key fits no record, or several.
        ReadError: One of the archives cannot be opened.
    """
    limits = Thresholds.parse(rtol, atol)
    with opened_both(reference, target) as (trusted, tested):
        if steps:
            tested = in_reference_layout(trusted, reference_key, tested, target_key, steps)
            target_key = trusted.get(reference_key).key.text
        record, partner = trusted.get(reference_key), tested.get(target_key)
        pairs = [Pair(record.key.text, "unjudged", record, partner)]
        if isinstance(tested, MappedArchive):
            pairs = with_mapping(pairs, tested, Selection())
        run = _Run(trusted, tested, limits, compute_dtype, progress, trust_digests)
        return run.compare(pairs, None, None)


def _globs(globs: str | Iterable[str]) -> tuple[str, ...]:
    return (globs,) if isinstance(globs, str) else tuple(globs)


def paired(reference: Archive, target: Archive, selection: Selection) -> list[Pair]:
    """Pair the records of two archives as `pair_records` does, with what a mapping says of each."""
    pairs = with_places(pair_records(reference, target, selection), target)
    return with_mapping(pairs, target, selection) if isinstance(target, MappedArchive) else pairs


@dataclass(frozen=True)
class _Run:
    """One comparison under way."""

    reference: Archive
    target: Archive
    thresholds: Thresholds
    compute_dtype: str | None
    progress: Progress | None
    trust_digests: bool
    calibration: Calibration | None = None

    def compare(
        self, pairs: Sequence[Pair], selection: Selection | None, baseline: Archive | None
    ) -> Comparison:
        """Measure and judge the pairs.

        Each stage makes them anew, by the hundred thousand; one name for all of them forgets the last ones.
        """
        reference, target, thresholds = self.reference, self.target, self.thresholds
        thresholds.require_hits(pair.key for pair in pairs)
        mapped = target if isinstance(target, MappedArchive) else None
        precision = POLICY.precision_of_runs(reference.info, target.info, self.compute_dtype)
        injected = Injected(target, reference)
        layers = measure_layers(reference, target, precision, injected)
        if precision is not None and self.compute_dtype is None:
            precision = quantised_precision(
                reference.info,
                target.info,
                precision,
                reference.records if reference.is_ordered else (),
                predicted=layers.own_errors,
                stepped=layers.rounded,
            )
        if self.calibration is not None:
            _require_precision(self.calibration, precision)
        pairs = with_hints(self._by_metadata(target, pairs), reference, target)
        pairs = self._measured(pairs)
        policy_judge = PolicyJudge(
            reference, target, precision, thresholds, self.calibration, injected, layers
        )
        pairs, account = policy_judge.judge(pairs)
        pairs = layers.explain(pairs)
        if not injected:  # else records that are the same in the reference are not in the target
            padding = Padding(reference, target)
            pairs = judge_pass_through(
                reference, target, pairs, thresholds, padding.left_out, sums_of_ranks(target)
            )
        pairs = explain_held_values(reference, target, pairs, precision)
        is_of_own_values = not injected and reference.info.injected is None
        if selection is not None and is_of_own_values:
            pairs = explain_by_agreement(reference, target, pairs, selection)
        elif selection is not None:  # what follows agrees, whatever was made before
            pairs = explain_in_injected_run(reference, target, pairs, selection)
        pairs = judge_ranks(reference, target, pairs, is_of_own_values=is_of_own_values)
        if baseline is not None:
            pairs = with_ratios(pairs, self._against(baseline, pairs), _exact_below(account))
        return Comparison(
            reference=ArchiveSummary.of(
                reference.source if isinstance(reference, OrderedArchive) else reference
            ),
            target=ArchiveSummary.of(mapped.source if mapped else target),
            tolerance=thresholds.default,
            pairs=tuple(pairs),
            divergence=first_divergence(reference, pairs) if selection else None,
            value_differences=(
                *self._value_differences(selection, _agreements(pairs, with_parts=not is_of_own_values)),
                *self._arguments(pairs),
            )
            if selection
            else (),
            warnings=(
                *run_warnings(reference, target),
                *matching_warnings(target),
                *value_warnings(target),
                *pair_warnings(pairs),
                *layers.warnings,
                *digest_warnings(pairs),
            ),
            is_of_archives=selection is not None,
            account=account,
            thresholds=thresholds.path,
            calibration=self.calibration,
            baseline=None if baseline is None else ArchiveSummary.of(baseline),
            mapping=summary_with_tokens(mapped) if mapped else None,
            layers=layers,
        )

    def _value_differences(
        self, selection: Selection, agreements: Mapping[_Place, bool]
    ) -> Iterator[ValueDifference]:
        """Yield the arguments and results of modules that are no tensors and differ.

        Args:
            selection: What a user asked for.
            agreements: Of modules, whether the target can do without a number within: all results agree.
        """
        reference, rest = (
            {key: value for key, value in archive.values.items() if not is_fact(key, value)}
            for archive in (self.reference, self.target)
        )
        for key, ours in reference.items():
            name = key if key in rest else self.target.canonical(key)
            is_there, theirs = name in rest, rest.pop(name, None)
            if _is_equal(ours, theirs) or selection.why_not(key):
                continue
            parsed = Key.parse(key)
            may_lack = not is_there and (
                selection.is_optional(key)
                or (_agrees_around(parsed, agreements) and not selection.is_required(key))
            )
            is_result = is_number(ours) and parsed.slot.startswith("output") and not may_lack
            difference = ValueDifference(key, ours, theirs, is_result)
            yield difference.judged(self.thresholds.limits_for(key).tolerance)
        for key, theirs in rest.items():
            if theirs is not None and not selection.why_not(key):
                yield ValueDifference(key, None, theirs)

    def _arguments(self, pairs: Sequence[Pair]) -> Iterator[ValueDifference]:
        """Yield the arguments that differ of ops that have records on both sides."""
        ours, theirs = ops_of(self.reference), ops_of(self.target)
        places = {
            pair.reference.key.where: pair.target.key.where
            for pair in pairs
            if pair.reference and pair.target and pair.status != "excluded"
        }
        for place, partner in places.items() if ours and theirs else ():
            if place not in ours or partner not in theirs or ours.op(place) != theirs.op(partner):
                continue  # whose arguments mean something else
            trusted, tested = ours.arguments(place), theirs.arguments(partner)
            for name in {**trusted, **tested}:
                one, other = trusted.get(name), tested.get(name)
                if not (_is_equal(one, other) or (is_blocked(one) and is_blocked(other))):
                    yield ValueDifference(f"{place}/{FACTS}.{escape(name)}", one, other)

    def _by_metadata(self, target: Archive, pairs: Iterable[Pair]) -> Iterator[Pair]:
        """Judge the pairs that need no values."""
        for pair in pairs:
            yield judge_by_metadata(self.reference, target, pair, trust_digests=self.trust_digests)

    def _measured(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Read the pairs that need it, and judge those that need no policy."""
        total = sum(p.reference.nbytes for p in pairs if _needs_values(p) and p.reference)
        progress = _Shares(self.progress, total) if self.progress else None
        pairs = verify_equal_digests(self.reference, self.target, pairs, progress)
        if progress is not None:
            progress.begin_next()
        limits = {pair.key: self.thresholds.limits_for(pair.key) for pair in pairs if _needs_values(pair)}
        tolerances = [
            limits[p.key].tolerance or parameter_rounding(p.reference, p.target)
            for p in pairs
            if _needs_values(p) and p.reference and p.target
        ]
        differences = self._differences(self.target, pairs, tolerances, progress)
        measured = dict(zip(limits, differences, strict=True))
        return [
            self._judged(pair, limits[pair.key], measured[pair.key]) if _needs_values(pair) else pair
            for pair in pairs
        ]

    def _judged(self, pair: Pair, limits: KeyThresholds, difference: Difference | OSError) -> Pair:
        if isinstance(difference, OSError):  # one of ours, or one of the system
            return decide(pair, Decision("values", "unreadable", str(difference)))
        sides = (self.reference, pair.reference), (self.target, pair.target)
        remark = "; ".join(r for archive, record in sides if record and (r := archive.remark(record)))
        doubt = ""
        if isinstance(self.target, MappedArchive) and pair.target is not None:
            doubt = self.target.doubt(pair.target)
        if remark != doubt:  # bytes of a side are missing
            return decide(pair, Decision("values", "unreadable", remark))
        logits = None
        if limits.needs_logits and difference.unequal:
            try:
                logits = LogitMeasure(self.reference, self.target, self.compute_dtype)(pair)
            except OSError as error:
                return decide(pair, Decision("values", "unreadable", str(error)))
        return judge(pair.with_difference(difference), limits, doubt, logits)

    def _against(self, baseline: Archive, pairs: Sequence[Pair]) -> dict[str, Difference | None]:
        """Measure the baseline against the reference, of pairs that were compared; None if identical."""
        partner_text = partner_texts(self.reference, baseline)
        others = [
            Pair(p.key, "unjudged", p.reference, baseline.get(text))
            for p in pairs
            if p.reference is not None
            and p.is_compared
            and (text := partner_text(p.reference)) is not None
            and text in baseline
        ]
        others = verify_equal_digests(
            self.reference, baseline, list(self._by_metadata(baseline, others)), None
        )
        by_key: dict[str, Difference | None] = {p.key: None for p in others if p.status == "identical"}
        open_pairs = [p for p in others if _needs_values(p)]
        differences = self._differences(baseline, open_pairs, [None] * len(open_pairs), None)
        for pair, difference in zip(open_pairs, differences, strict=True):
            if not isinstance(difference, OSError):  # the pair is undefined then
                by_key[pair.key] = difference
        return by_key

    def _differences(
        self,
        target: Archive,
        pairs: Sequence[Pair],
        tolerances: Sequence[Tolerance | None],
        progress: Progress | None,
    ) -> Iterator[Difference | OSError]:
        records = [(p.reference, p.target) for p in pairs if _needs_values(p) and p.reference and p.target]
        return measure_pairs(self.reference, target, records, tolerance=tolerances, progress=progress)


class _Shares:
    """The progress of stages one after the other, as that of one stage.

    Args:
        whole: Is shown it.
        total: Of all stages.
    """

    def __init__(self, whole: Progress, total: int) -> None:
        self._whole = whole
        self._total = total
        self._before = self._done = 0

    def begin_next(self) -> None:
        """Begin the next stage."""
        self._before = self._done

    def stage(self, text: str) -> None:
        """Show what the stages do."""
        self._whole.stage(text)

    def advance(self, done: int, total: int | None) -> None:
        """Show how far all stages are."""
        self._done = self._before + done
        self._whole.advance(self._done, self._total)


def _is_equal(ours: object, theirs: object) -> bool:
    """Whether two arguments are equal: numbers by value, whatever their type, and NaN to NaN (CMP-15)."""
    if is_number(ours) and is_number(theirs):
        return ours == theirs or (ours != ours and theirs != theirs)
    return ours == theirs and type(ours) is type(theirs)


def _exact_below(account: RunSummary) -> float:
    """Return the relative error up to which a run is exact."""
    return min(RELATIVE_EPSILON, POLICY.units.get(account.precision, math.inf) / 4)


def _agreements(pairs: Sequence[Pair], *, with_parts: bool) -> dict[_Place, bool]:
    """Whether all results of a module agree, or are explained, of each that has some.

    Args:
        pairs: All pairs, judged.
        with_parts: Whether all that is compared within a module has to agree too, as in a run in which values
            were replaced: what came of a number may be there alone.
    """
    agreements: dict[_Place, bool] = {}
    for pair in pairs:
        if pair.reference is not None and pair.reference.key.slot.startswith("output"):
            key = pair.reference.key
            place = key.rank, key.step, key.site
            agreements[place] = agreements.get(place, True) and pair.agrees
    for pair in pairs if with_parts else ():
        if pair.reference is not None and pair.is_compared and not pair.agrees:
            key = pair.reference.key
            site = module_of(key.site)
            agreements |= {(key.rank, key.step, part): False for part in (site, *enclosing_sites(site))}
    return agreements


def _agrees_around(key: Key, agreements: Mapping[_Place, bool]) -> bool:
    """Whether the results of the nearest module around the one of a key agree; False for the root."""
    places = ((key.rank, key.step, site) for site in enclosing_sites(key.site))
    return next((agreements[place] for place in places if place in agreements), False)


def _needs_values(pair: Pair) -> bool:
    return (
        pair.status == "unjudged"
        and pair.reference is not None
        and pair.target is not None
        and pair.reference.stored
        and pair.target.stored
    )


def _require_precision(calibration: Calibration, precision: Precision | None) -> None:
    if precision is not None and precision.text != calibration.precision:
        raise UsageError(
            f"{calibration.path}: is of {calibration.precision} runs, these are {precision.text}",
            hint="Calibrate by runs of the same precision, or say --compute-dtype.",
        )
