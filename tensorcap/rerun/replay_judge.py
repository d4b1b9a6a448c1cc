"""What modules made in a replay, judged by the tests of `specs/replay.md`.

Every argument and result was replaced after it was recorded, so that no error is inherited.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from tensorcap.alignment import NO_MAPPING
from tensorcap.comparison import (
    ABSENT,
    JUDGED,
    POLICY,
    Finding,
    Inputs,
    Limits,
    NearTies,
    Padding,
    Pair,
    Precision,
    QuantisedModule,
    RobustErrors,
    RoundedArguments,
    Status,
    compare,
    is_circumstance,
    measure_layers,
    ranks_that_add,
    require_readable,
    without_estimates,
    worst_status,
)
from tensorcap.rerun.own_errors import (
    BAD,
    Makers,
    OwnError,
    States,
    both_records,
    mismatch_finding,
    mismatch_text,
)
from tensorcap.rerun.producers import Producers
from tensorcap.rerun.quantised_modules import quantised_sites
from tensorcap.rerun.replay_result import Replay, Way
from tensorcap.rerun.replay_tests import (
    judge_bits,
    judge_narrowing,
    judge_other_values,
    judge_outliers_of_twin,
    judge_replayed,
    judge_twin,
    rounds_less,
    shares_off,
)
from tensorcap.rerun.substitutes import is_slot
from tensorcap.runs import enclosing_sites, lies_within
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import ROOT_SITE, Key
from tensorcap_formats.records import Record
from tensorcap_formats.run_info import ModuleInfo

_ROUNDED_ANEW: Final = 2.0  # R of weights that were rounded, and are again where they are made or folded
_BITS: Final = 8  # of what code between modules rounds to whole steps
_NO_ROUNDINGS: Final = frozenset({"outlier_element", "range"})  # tests whose findings no twin excuses


@dataclass(frozen=True, slots=True)
class ReplayRuns:
    """The runs of a replay, whose tensors are compared.

    Attributes:
        exact: What the reference's modules made.
        target: What the target's made, under the reference's keys.
        twin: What the reference's made in the target's precision; None without.
        precision: What errors are held against; None if no run says one.
        compute_dtype: What the target computed in, if its run does not say so.
        producers: Who made what the target has no tensors before.
    """

    exact: Archive
    target: Archive
    twin: Archive | None
    precision: Precision | None
    compute_dtype: str | None
    producers: Producers = field(default_factory=Producers)


class ReplayJudge:
    """Judges what modules made in a replay, by the tests of `specs/replay.md`.

    Args:
        reference: The trusted archive, which says who calls whom.
        runs: The runs.
        pairs: Their comparison.
        is_forward: Whether the target was run on the reference's values, which were rounded on the way in.
        released: Key texts of what was left in place: what is made of it has the roundings of both.
    """

    def __init__(
        self,
        reference: Archive,
        runs: ReplayRuns,
        pairs: Sequence[Pair],
        *,
        is_forward: bool,
        released: Collection[str] = (),
    ) -> None:
        self._runs = runs
        self._released = released
        self._makers = Makers(reference, runs.producers)
        self._calls = self._makers.calls
        self._layers = measure_layers(reference, runs.target, runs.precision)
        self._quantised = (
            {} if runs.compute_dtype else quantised_sites(runs.exact, runs.target, pairs, self._layers)
        )
        self._padding = Padding(runs.exact, runs.target, self._layers.divisors)
        self._near_ties = NearTies.of(
            runs.exact, runs.target, pairs, noise=self._noise, divisors=self._layers.divisors
        )
        self._arguments = Inputs(reference, pairs)
        self._states = States(self._makers.writers, (runs.exact, runs.target))
        self._ranks_that_add = ranks_that_add(runs.target)
        self._rounded_arguments = RoundedArguments(runs.target)
        self._is_forward = is_forward

    def is_written(self, record: Record) -> bool:
        """Whether a tensor is a state that a module is known to have written."""
        return self._makers.writers.writer(record) is not None

    def judge(self, pair: Pair) -> OwnError:
        """Judge one tensor that both sides have."""
        pair = self._near_ties.without(self._padding.without(pair))
        key = both_records(pair)[0].key
        if pair.key in self._layers.folded:
            finding = self._layers.results[pair.key].finding
            return self._makers.own_error(pair, finding.status, (finding,))
        is_leaf = self._is_leaf(key)
        if pair.key in self._layers.undone:
            left = self._judge_errors(pair, is_leaf=is_leaf) if pair.key in self._layers.divisors else ()
            if left and worst_status(left) in BAD:
                return self._makers.own_error(pair, worst_status(left), left)
            return self._makers.own_error(pair, "explained", pair.findings)
        ratio = None if pair.baseline is None else pair.baseline.r
        status, findings = self._status(pair, ratio, is_leaf=is_leaf)
        inherited = self._states.inherited(pair) if status in BAD else None
        if inherited is not None:
            return self._makers.own_error(pair, inherited.status, (inherited,))
        rounds_itself = is_leaf and not self._calls.is_linear(key.site)
        is_precise = rounds_itself and ratio is not None and rounds_less(ratio, pair.elements)
        return self._makers.own_error(pair, status, findings, ratio=ratio, is_precise=is_precise)

    def _status(
        self, pair: Pair, ratio: float | None, *, is_leaf: bool
    ) -> tuple[Status, tuple[Finding, ...]]:
        """The status of a pair, and the findings that gave it.

        1. Equal values need no test, and a circumstance of the run (an argument of another kind) allows none.
        2. Unequal masks or shapes are diverged.
        3. What a module of the target that is given it rounds to what the model hands on is within rounding.
        4. Numbers that are not rounded keep the comparison's status.
        5. All else is judged by its row error; if the twin errs as much, that is rounding; else by R against
           the twin, by its outliers, and by its bits.
        """
        if pair.status in ("identical", "match"):
            return pair.status, ()
        if self._near_ties.moves(both_records(pair)[0]):
            return "unjudged", ()
        if is_circumstance(pair, self._arguments.of(pair)):
            findings = pair.findings or (Finding(pair.status, 1, 0, "unjudged", mismatch_text(pair)),)
            return "unjudged", tuple(replace(finding, status="unjudged") for finding in findings)
        if pair.status in ("nonfinite", "shape-mismatch"):
            return "diverged", (mismatch_finding(pair),)
        reference, target = both_records(pair)
        if self._rounded_arguments.are(target, self._runs.exact, reference):
            return "within-rounding", ()
        error = pair.row_error
        if error is None or pair.difference is None or not reference.dtype.is_inexact:
            return (pair.status if pair.status in JUDGED else "unjudged"), pair.findings
        elements = pair.elements
        own = list(self._judge_errors(pair, is_leaf=is_leaf))
        if ratio is not None and ratio <= self._rounds_as_much(reference.key, elements, is_leaf=is_leaf):
            own = [replace(f, status="within-rounding") for f in own]
        elif ratio is not None and math.isfinite(ratio) and self._is_judged_by_twin(pair, is_leaf=is_leaf):
            own.append(judge_twin(ratio, elements))
        if not self._is_forward and self._is_kept_wide(reference.key, target):
            own.append(judge_narrowing(target.dtype.name))
        own += [
            self._without_twins_outliers(finding, pair)
            for finding in pair.findings
            if finding.test in _NO_ROUNDINGS or (finding.test == "zeros" and self._precision_of(pair).is_wide)
        ]
        own = list(without_estimates([*own, *self._layers.findings(pair.key)]))
        is_precise = ratio is not None and ratio < POLICY.twin_precise
        has_own_tensors = self._calls.has_own_tensors(reference.key.site)
        if not (is_precise and (self._is_forward or has_own_tensors)):
            own += self._judge_bits(pair)
        return worst_status(own), tuple(own)

    def _judge_errors(self, pair: Pair, *, is_leaf: bool) -> tuple[Finding, ...]:
        """Judge the row errors of a pair; nothing if it has none."""
        if pair.row_error is None or pair.difference is None:
            return ()
        return tuple(
            judge_replayed(
                pair.row_error,
                pair.difference.row_error_p95,
                self._precision_of(pair),
                is_leaf=is_leaf,
                elements=pair.elements,
                is_forward=self._is_forward,
                ranks=self._ranks_that_add.get(pair.key, 1),
            )
        )

    def _rounds_as_much(self, key: Key, elements: int, *, is_leaf: bool) -> float:
        """The largest R at which the model itself rounds as much as the target does.

        Weights that a target folds, or makes at each call, are rounded once more.
        """
        is_anew = self._makers.is_of_span(key) or (is_leaf and self._makes_weight(key.site))
        is_anew |= self._is_folded(key) and self._makers.is_leaf(key)
        limits = Limits(_ROUNDED_ANEW, math.inf) if is_anew else POLICY.twin_ratio
        return POLICY.sampled(limits, elements).green

    def _without_twins_outliers(self, finding: Finding, pair: Pair) -> Finding:
        """Excuse outliers that the model has as well in the target's precision (RPL-205)."""
        twin, text = self._runs.twin, pair.key
        if finding.test != "outlier_element" or finding.status not in BAD or twin is None:
            return finding
        reference, tested = both_records(pair)
        if text not in twin or not twin.get(text).shape == reference.shape == tested.shape:
            return finding
        exact, left_out = self._runs.exact, self._padding.left_out(reference)
        own, of_twin = (
            RobustErrors(exact, archive).outliers(Pair(text, "unjudged", reference, record))
            for archive, record in ((self._runs.target, tested), (twin, twin.get(text)))
        )
        if left_out is not None:
            own, of_twin = (np.where(left_out.reshape(side.shape), 0, side) for side in (own, of_twin))
        return judge_outliers_of_twin(finding, own, of_twin)

    def _is_folded(self, key: Key) -> bool:
        """Whether something was left in place that the call was given which made a tensor."""
        return any(record.key.text in self._released for record in self._makers.inputs(key))

    def _is_leaf(self, key: Key) -> bool:
        """Whether a leaf of known kind made a tensor of what was put in its arguments' place, and alone."""
        return not self._is_folded(key) and self._makers.is_leaf(key)

    def _makes_weight(self, module: str) -> bool:
        """Whether the target's module makes, at each call, the weight that the reference's holds."""
        ours, theirs = (run.info.modules.get(module) for run in (self._runs.exact, self._runs.target))
        return ours is not None and theirs is not None and _has_matrix(ours) and not _has_matrix(theirs)

    def _noise(self, pair: Pair) -> float:
        """The relative error of a row of a pair that rounding alone makes."""
        return POLICY.noise(self._precision_of(pair))

    def _precision_of(self, pair: Pair) -> Precision:
        """The precision of the runs, of the weights of the module that made a tensor, or of its own steps."""
        precision = POLICY.precision_of_pair(self._runs.precision, *both_records(pair))
        quantised = self._weights_of(self._makers.module(both_records(pair)[0].key))
        if quantised is not None:
            precision = quantised.precision(precision)
        rounded = 0.0 if self._runs.compute_dtype else self._layers.rounded.get(pair.key, 0.0)
        return QuantisedModule(_BITS, rounded).precision(precision)

    def _weights_of(self, module: str) -> QuantisedModule | None:
        """The weights in few bits that a module of the reference computes with in the target.

        Those of the nearest module around it that has some, if the target has no such module, or one without
        the matrix: something else makes what it hands on.
        """
        ours, theirs = (run.info.modules.get(module) for run in (self._runs.exact, self._runs.target))
        is_elsewhere = theirs is None or (ours is not None and _has_matrix(ours) and not _has_matrix(theirs))
        sites = (module, *enclosing_sites(module)) if is_elsewhere else (module,)
        return next((self._quantised[site] for site in sites if site in self._quantised), None)

    def _is_judged_by_twin(self, pair: Pair, *, is_leaf: bool) -> bool:
        """Whether R is judged: of leaves that are no products, and of weights that routers give.

        No twin has weights of few bits.
        """
        reference, target = both_records(pair)
        if reference.key.site in self._quantised:
            return False
        key, statistics, twin = reference.key, reference.statistics, self._runs.twin
        if is_leaf or not self._calls.is_router(key.site) or twin is None or key.text not in twin:
            return is_leaf and not self._calls.is_linear(key.site)
        is_as_wide = twin.get(key.text).dtype == target.dtype
        minimum = None if statistics is None else statistics.minimum
        return is_as_wide and minimum is not None and float(minimum) >= 0

    def _is_kept_wide(self, key: Key, target: Record) -> bool:
        """Whether the model keeps a result exactly in float32 in that precision, and the target rounds it."""
        twin = self._runs.twin
        if twin is None or key.text not in twin or not key.slot.startswith("output"):
            return False
        record, units = twin.get(key.text), POLICY.units
        is_narrower = record.dtype.name in units and units.get(target.dtype.name, 0.0) > units["float32"]
        if not is_narrower or units[record.dtype.name] > units["float32"] or record.shape != target.shape:
            return False
        return np.array_equal(self._runs.exact.load(self._runs.exact.get(key.text)), twin.load(record))

    def _judge_bits(self, pair: Pair) -> list[Finding]:
        """Judge the bits of leaves that compute a tensor of another of its shape: activations and norms."""
        reference, target = both_records(pair)
        key, twin = reference.key, self._runs.twin
        if twin is None or key.text not in twin or not self._keeps_shape(reference):
            return []
        twin_record = twin.get(key.text)
        if twin_record.dtype != target.dtype or twin_record.shape != target.shape:
            return []
        is_plain = not self._is_forward and not self._calls.has_own_tensors(key.site)
        elements = twin_record.size
        far, unlike_twin = shares_off(
            self._runs.exact.load(reference).astype(np.float64),
            twin.load(twin_record).astype(np.float64),
            self._runs.target.load(target).astype(np.float64),
            POLICY.units[twin_record.dtype.name],
            rounds_once=is_plain,
        )
        findings = [judge_bits(far, elements)]
        if is_plain:
            findings.append(judge_other_values(unlike_twin, elements))
        return findings

    def _keeps_shape(self, record: Record) -> bool:
        """Whether a leaf that is no product made a tensor of a single one of the same shape."""
        key = record.key
        if not self._is_leaf(key) or self._calls.is_linear(key.site):
            return False
        inputs = self._makers.inputs(key)
        return len(inputs) == 1 and inputs[0].shape == record.shape


def _has_matrix(module: ModuleInfo) -> bool:
    """Whether one of a module's own parameters has two axes or more."""
    return any(len(parameter.shape or ()) > 1 for parameter in module.parameters.values())


def judge_replay(
    reference: Archive,
    runs: ReplayRuns,
    way: Way,
    keys: Collection[str],
    natural: Iterable[str],
    released: Collection[str] = (),
) -> Replay:
    """Compare the runs, and judge what each module made.

    Raises:
        ReadError: Bytes of a tensor are damaged.
    """
    comparison = compare(
        runs.exact,
        runs.target,
        mapping=NO_MAPPING,
        baseline=runs.twin,
        compute_dtype=runs.compute_dtype,
    )
    require_readable(comparison.pairs)
    judge = ReplayJudge(reference, runs, comparison.pairs, is_forward=way == "forward", released=released)
    lacking = (
        pair.key
        for pair in comparison.pairs
        if pair.is_required and pair.status in ABSENT and _is_result(pair) and pair.key in reference
    )
    own_errors = [judge.judge(pair) for pair in comparison.pairs if _is_of_module(pair, judge)]
    return Replay(
        tuple(_without_inherited(own_errors, keys)),
        runs.precision.name if runs.precision else "",
        len(keys),
        tuple(natural),
        tuple(lacking),
        way,
    )


def _without_inherited(own_errors: Sequence[OwnError], keys: Collection[str]) -> Iterator[OwnError]:
    """Own errors; unjudged is what may be made of a wrong result within the module that was not replaced.

    Such are results of which the target has some tokens or words: they cannot stand in the whole's place.
    """
    kept = {own.module for own in own_errors if own.is_bad and own.made == "result" and own.key not in keys}
    for own in own_errors:
        inherits = own.is_bad and any(lies_within(module, own.module) for module in kept)
        yield unjudged(own) if inherits else own


def unjudged(own: OwnError) -> OwnError:
    """An own error that no test decides, with its findings."""
    findings = tuple(replace(finding, status="unjudged") for finding in own.findings)
    return replace(own, status="unjudged", findings=findings)


def _is_of_module(pair: Pair, judge: ReplayJudge) -> bool:
    """Whether both sides have a tensor that a module made: inputs of the run are nobody's, but for states."""
    if pair.reference is None or pair.target is None or not is_slot(pair.reference.key):
        return False
    key = pair.reference.key
    return key.site != ROOT_SITE or not key.slot.startswith("input") or judge.is_written(pair.reference)


def _is_result(pair: Pair) -> bool:
    key = pair.reference.key if pair.reference else None
    return key is not None and is_slot(key) and key.slot.startswith("output")
