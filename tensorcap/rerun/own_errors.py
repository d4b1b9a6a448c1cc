"""The error that each module makes itself, read from a replay or from an injected run, and judged.

In a replay every argument and result was replaced after it was recorded, so that no error is inherited; in an
injected run arguments were, as far as they belong together, and what was left in place may pass errors on.
The tests are those of `specs/replay.md`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np

from tensorcap.alignment import MappedArchive
from tensorcap.comparison import (
    GROWTH_TESTS,
    JUDGED,
    POLICY,
    ROUNDED_INPUT_TESTS,
    Finding,
    Injected,
    Inputs,
    NearTies,
    Padding,
    Pair,
    Precision,
    Status,
    called_sites,
    caller_of,
    compare_records,
    is_circumstance,
    judge_gain,
    state_writer,
    worst_status,
)
from tensorcap.rerun.quantised_modules import quantised_sites
from tensorcap.rerun.replay_tests import (
    judge_bits,
    judge_narrowing,
    judge_other_values,
    judge_replayed,
    judge_twin,
    rounds_less,
)
from tensorcap.runs import Calls, StateWriters, is_handed_on, is_inner, is_parameter
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import Key
from tensorcap_formats.records import Record

BAD: Final = frozenset({"suspect", "diverged", "nonfinite", "shape-mismatch"})
_NO_ROUNDINGS: Final = frozenset({"outlier_element", "range"})  # tests whose findings no twin excuses
_TOO_LARGE: Final = frozenset({"suspect", "diverged"})
_ROUNDING_SLACK: Final = 0.001  # of an ulp: what computing a distance in ulp may be off by
_ROUNDED_ONCE: Final = 0.5 + _ROUNDING_SLACK  # ulp from the exact value


@dataclass(frozen=True, slots=True)
class OwnError:
    """The error of one tensor, as far as the module that made it added it itself.

    Attributes:
        key: Key text of the tensor, in the names of the model that was run.
        module: The module whose code made it: of an argument, the caller; of a state, who wrote it in place.
        made: Whether it is a result of `module`, an argument that it hands on, or a state that it writes.
        is_leaf: Whether a leaf of known kind made it.
        error: Row error, no unit; None if none is defined.
        ratio: R against the twin on the same values; None without one.
        status: `identical`, `within-rounding`, `suspect` or `diverged`, or `unjudged`.
        findings: One for each test that looked at it.
        is_precise: Whether it was rounded less than the model itself rounds it in that precision.
    """

    key: str
    module: str
    made: Literal["result", "argument", "state"]
    is_leaf: bool
    error: float | None
    ratio: float | None
    status: Status
    findings: tuple[Finding, ...]
    is_precise: bool

    @property
    def is_bad(self) -> bool:
        """Whether it is suspect or worse."""
        return self.status in _TOO_LARGE


class _Makers:
    """Which module made a tensor, by the reference's calls.

    Args:
        reference: The trusted archive.
    """

    def __init__(self, reference: Archive) -> None:
        self.calls = Calls(reference)
        self.writers = StateWriters(reference)
        self._called = called_sites(reference)
        self._inputs = {call.place: call.inputs for call in self.calls.calls}

    def inputs(self, key: Key) -> Sequence[Record]:
        """What the call that a key belongs to was given."""
        return self._inputs.get((key.rank, key.step, key.site, key.call), ())

    def is_leaf(self, key: Key) -> bool:
        """Whether a leaf of known kind made the tensor of a key."""
        is_result = key.slot.startswith("output")
        return is_result and self.calls.is_leaf(key.site) and self.calls.is_simple(key.site)

    def module(self, key: Key) -> str:
        """The module whose code made the tensor of a key, states aside."""
        return key.site if key.slot.startswith("output") else caller_of(key.site, self._called)

    def own_error(
        self,
        pair: Pair,
        status: Status,
        findings: tuple[Finding, ...],
        *,
        ratio: float | None = None,
        is_precise: bool = False,
    ) -> OwnError:
        """State what a pair shows of the module whose code made its tensor."""
        key = _records(pair)[0].key
        is_result = key.slot.startswith("output")
        writer = state_writer(self.writers, pair)
        return OwnError(
            pair.key,
            writer or self.module(key),
            "state" if writer else "result" if is_result else "argument",
            self.is_leaf(key) and not writer,
            pair.row_error,
            ratio,
            status,
            findings,
            is_precise,
        )


class _States:
    """What states that calls share, and that no run replaces, hand on from one call to the next.

    Args:
        writers: Who wrote each, by the reference's calls.
        runs: Both runs, under the reference's keys.
    """

    def __init__(self, writers: StateWriters, runs: tuple[Archive, Archive]) -> None:
        self._writers = writers
        self._runs = runs
        self._wrong: set[str] = set()  # key texts of what differs

    def inherited(self, pair: Pair) -> Finding | None:
        """From where a tensor that differs has its error, if not from the module whose code made it.

        1. A state that both runs hand on as it was at the moment before.
        2. A state that was wrong at the moment before, and what a call makes that was handed a wrong one of
           those that its own module writes.

        Args:
            pair: The tensor; those before it were asked for before.
        """
        record = _records(pair)[0]
        self._wrong.add(pair.key)
        before = self._writers.before(record)
        if before is not None and all(is_handed_on(run, before.key.text, pair.key) for run in self._runs):
            return Finding("state", 0, 0, "identical", f"handed on as it is in {before.key.text}")
        handed = (before,) if before is not None else self._writers.own_states(record)
        wrong = next((one.key.text for one in handed if one.key.text in self._wrong), "")
        text = f"made of a state that differs before, in {wrong}"
        return Finding("state", 1, 0, "unjudged", text) if wrong else None


@dataclass(frozen=True, slots=True)
class ReplayRuns:
    """The runs of a replay, whose tensors are compared.

    Attributes:
        exact: What the reference's modules made.
        target: What the target's made, under the reference's keys.
        twin: What the reference's made in the target's precision; None without.
        precision: What errors are held against; None if no run says one.
        compute_dtype: What the target computed in, if its run does not say so.
    """

    exact: Archive
    target: Archive
    twin: Archive | None
    precision: Precision | None
    compute_dtype: str | None


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
        self._makers = _Makers(reference)
        self._calls = self._makers.calls
        self._quantised = {} if runs.compute_dtype else quantised_sites(runs.exact, runs.target, pairs)
        self._padding = Padding(runs.exact, runs.target)
        self._near_ties = NearTies.of(runs.exact, runs.target, pairs, noise=self._noise)
        self._arguments = Inputs(reference, pairs)
        self._states = _States(self._makers.writers, (runs.exact, runs.target))
        self._is_forward = is_forward

    def is_written(self, record: Record) -> bool:
        """Whether a tensor is a state that a module is known to have written."""
        return self._makers.writers.writer(record) is not None

    def judge(self, pair: Pair) -> OwnError:
        """Judge one tensor that both sides have."""
        pair = self._near_ties.without(self._padding.without(pair))
        key = _records(pair)[0].key
        is_leaf = self._is_leaf(key)
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
        3. Numbers that are not rounded keep the comparison's status.
        4. All else is judged by its row error; if the twin errs as much, that is rounding; else by R against
           the twin, by its outliers, and by its bits.
        """
        if pair.status in ("identical", "match"):
            return pair.status, ()
        if is_circumstance(pair, self._arguments.of(pair)):
            findings = pair.findings or (Finding(pair.status, 1, 0, "unjudged", mismatch_text(pair)),)
            return "unjudged", tuple(replace(finding, status="unjudged") for finding in findings)
        if pair.status in ("nonfinite", "shape-mismatch"):
            return "diverged", (_mismatch(pair),)
        error = pair.row_error
        reference, target = _records(pair)
        if error is None or pair.difference is None or not reference.dtype.is_inexact:
            return (pair.status if pair.status in JUDGED else "unjudged"), pair.findings
        elements = pair.elements
        own = list(
            judge_replayed(
                error,
                pair.difference.row_error_p95,
                self._precision_of(pair),
                is_leaf=is_leaf,
                elements=elements,
                is_forward=self._is_forward,
            )
        )
        if ratio is not None and ratio <= POLICY.twin_ratio.green:  # the model itself rounds as much
            own = [replace(f, status="within-rounding") for f in own]
        elif ratio is not None and math.isfinite(ratio) and self._is_judged_by_twin(pair, is_leaf=is_leaf):
            own.append(judge_twin(ratio, elements))
        if not self._is_forward and self._is_kept_wide(reference.key, target):
            own.append(judge_narrowing(target.dtype.name))
        own += [finding for finding in pair.findings if finding.test in _NO_ROUNDINGS]
        is_precise = ratio is not None and ratio < POLICY.twin_precise
        has_parameters = self._calls.has_parameters(reference.key.site)
        if not (is_precise and (self._is_forward or has_parameters)):
            own += self._judge_bits(pair)
        return worst_status(own), tuple(own)

    def _is_leaf(self, key: Key) -> bool:
        """Whether a leaf of known kind made a tensor of what was put in its arguments' place, and alone."""
        is_alone = all(record.key.text not in self._released for record in self._makers.inputs(key))
        return is_alone and self._makers.is_leaf(key)

    def _noise(self, pair: Pair) -> float:
        """The relative error of a row of a pair that rounding alone makes."""
        return POLICY.noise(self._precision_of(pair))

    def _precision_of(self, pair: Pair) -> Precision:
        """The precision of the runs, or of the weights of the module that made a tensor."""
        precision = POLICY.precision_of_pair(self._runs.precision, *_records(pair))
        quantised = self._quantised.get(self._makers.module(_records(pair)[0].key))
        return precision if quantised is None else quantised.precision(precision)

    def _is_judged_by_twin(self, pair: Pair, *, is_leaf: bool) -> bool:
        """Whether R is judged: of leaves that are no products, and of weights that routers give.

        No twin has weights of few bits.
        """
        reference, target = _records(pair)
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
        reference, target = _records(pair)
        key, twin = reference.key, self._runs.twin
        if twin is None or key.text not in twin or not self._keeps_shape(reference):
            return []
        twin_record = twin.get(key.text)
        if twin_record.dtype != target.dtype or twin_record.shape != target.shape:
            return []
        is_plain = not self._is_forward and not self._calls.has_parameters(key.site)
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


class InjectionJudge:
    """Judges what modules made in an injected run, whose results are natural.

    Args:
        reference: The trusted archive, as it was compared.
        injected: The injected run under the same keys.
        pairs: Their comparison.
        released: Key texts of arguments that were left in place since what is computed of them undoes their
            error: it is held against what they were computed of.

    Attributes:
        unknown: Key texts of arguments that were left in place and of which the reference has no counterpart,
            so that errors of what was made of them may be inherited; filled by `judge_all`.
    """

    def __init__(
        self,
        reference: Archive,
        injected: Archive,
        pairs: Sequence[Pair],
        *,
        released: Collection[str] = (),
    ) -> None:
        self.unknown: list[str] = []
        both = (pair for pair in pairs if pair.reference is not None and pair.target is not None)
        self._pairs = sorted(both, key=lambda pair: _records(pair)[0].order)
        self._makers = _Makers(reference)
        self._precision = POLICY.precision_of_runs(reference.info, injected.info, None)
        self._paired = {pair.key for pair in self._pairs}
        self._reference = reference
        self._run = injected.source if isinstance(injected, MappedArchive) else injected
        self._injected = Injected(injected)
        self._states = _States(self._makers.writers, (reference, injected))
        self._errors: dict[str, float | None] = {}
        self._released = {
            key for pair in self._pairs if pair.key in released for key in self._injected.keys_of(pair)
        }
        for pair in self._pairs:
            for key in self._injected.keys_of(pair):
                is_known = pair.is_compared and pair.status != "nonfinite"
                self._errors[key.text] = pair.row_error if is_known else None

    def judge_all(self) -> tuple[OwnError, ...]:
        """Judge each tensor whose error is known to be its module's own, in execution order."""
        judged = (self._judge(pair) for pair in self._pairs)
        return tuple(own for own in judged if own is not None)

    def _judge(self, pair: Pair) -> OwnError | None:
        key = _records(pair)[0].key
        left = self._injected.left(pair)
        if left is None or is_inner(key) or is_parameter(key):
            return None
        if pair.status == "shape-mismatch" and is_circumstance(pair, ()):
            return self._makers.own_error(pair, "unjudged", (replace(_mismatch(pair), status="unjudged"),))
        left = tuple(one for one in left if one not in self._released)
        judged = self._status(pair, left, is_leaf=self._makers.is_leaf(key))
        inherited = self._states.inherited(pair) if pair.status in BAD else None
        if inherited is not None:
            judged = inherited.status, (inherited,)
        return None if judged is None else self._makers.own_error(pair, *judged)

    def _status(
        self, pair: Pair, left: Sequence[Key], *, is_leaf: bool
    ) -> tuple[Status, tuple[Finding, ...]] | None:
        """The status of what a pair shows of its own module; None if the module may have inherited it.

        1. What is not bad keeps the comparison's status.
        2. If arguments were left in place, their errors have to be known; unless all are 0, only what the
           module adds to them, its gain, counts.
        3. Tests that an argument's rounding may fail count for nothing.

        Args:
            pair: A tensor of the injected run and the reference's.
            left: Keys of the arguments that were left in place.
            is_leaf: Whether a leaf of known kind made it.
        """
        findings = pair.findings
        if pair.status not in BAD:
            return pair.status, findings
        is_too_large = pair.status in _TOO_LARGE
        if left:
            inherited = self._errors_of(pair, left)
            if inherited is None:
                return None
            gain = self._gain(pair, inherited, is_leaf=is_leaf) if is_too_large else None
            if is_too_large and any(inherited):
                return None if gain is None else (gain.status, (gain,))
            findings = findings if gain is None else (*findings, gain)
        if not is_too_large:
            return "diverged", findings or (_mismatch(pair),)
        uncertain = GROWTH_TESTS if self._is_wide(pair) else GROWTH_TESTS | ROUNDED_INPUT_TESTS
        certain = [f for f in findings if f.status in _TOO_LARGE and f.test not in uncertain]
        if certain:
            return worst_status(certain), findings
        return ("within-rounding" if findings else pair.status), findings

    def _errors_of(self, pair: Pair, left: Sequence[Key]) -> list[float] | None:
        """Row errors of arguments that were left in place; None, and noted, if one is not known."""
        errors = {key: self._errors.get(key.text) for key in left}
        unknown = [key for key, error in errors.items() if error is None]
        if unknown:
            errors.update(self._errors_under_other_names(_records(pair)[0].key, unknown))
        known = [error for error in errors.values() if error is not None]
        if len(known) == len(errors):
            return known
        noted = [*self.unknown, *(key.text for key, error in errors.items() if error is None)]
        self.unknown = list(dict.fromkeys(noted))
        return None

    def _errors_under_other_names(self, result: Key, unknown: Sequence[Key]) -> Iterator[tuple[Key, float]]:
        """Errors of arguments that the reference's call has under other names, paired in their order."""
        unpaired = [
            record
            for record in self._makers.inputs(result)
            if record.key.text not in self._paired and record.dtype.is_inexact
        ]
        if result.slot.startswith("output") and len(unpaired) == len(unknown):
            for ours, theirs in zip(unpaired, unknown, strict=True):
                pair = compare_records(self._reference, ours.key.text, self._run, theirs.text).pairs[0]
                error = pair.row_error if pair.is_compared else None
                if error is not None:
                    yield theirs, error

    def _gain(self, pair: Pair, inherited: Sequence[float], *, is_leaf: bool) -> Finding | None:
        """What was added to the errors of arguments; None of whole numbers."""
        error, precision = pair.row_error, self._precision_of(pair)
        if error is None or precision is None:
            return None
        inputs, elements = math.hypot(*inherited), _records(pair)[0].size
        return judge_gain(error, inputs, precision, is_core=not is_leaf, elements=elements)

    def _is_wide(self, pair: Pair) -> bool:
        precision = self._precision_of(pair)
        return precision is None or precision.is_wide

    def _precision_of(self, pair: Pair) -> Precision | None:
        """None of whole numbers."""
        return POLICY.precision_of_pair(self._precision, *_records(pair)) if pair.is_inexact else None


def mismatch_text(pair: Pair) -> str:
    """What is wrong with a pair that no test judged: elements that are not finite, or shapes."""
    if pair.status == "nonfinite" and pair.difference is not None:
        count, elements = pair.difference.mask_mismatches, pair.difference.elements
        return f"{count} of {elements} elements are finite on one side only"
    return pair.reason or "the shapes differ"


def _mismatch(pair: Pair) -> Finding:
    return Finding(pair.status, 1, 0, "diverged", mismatch_text(pair))


def _records(pair: Pair) -> tuple[Record, Record]:
    """The records of a pair that has both."""
    assert pair.reference is not None
    assert pair.target is not None
    return pair.reference, pair.target


def shares_off(
    exact: Any, twin: Any, target: Any, unit: float, *, rounds_once: bool = True
) -> tuple[float, float]:
    """Measure which elements are neither the twin's nor the exact ones rounded once (`ulp_share`).

    Args:
        exact: What the model makes in its own precision, float64.
        twin: What it makes in the target's, float64, the same shape.
        target: What the target made, float64, the same shape.
        unit: `u` of the target's dtype.
        rounds_once: Whether the exact ones rounded once are as good as the twin's, to the last place.

    Returns:
        The share of elements that are more than one unit in the last place off, and of those that differ from
        both at all.
    """
    if not target.size:
        return 0.0, 0.0
    _, exponent = np.frexp(np.maximum(np.abs(exact), np.abs(target)))
    ulp = np.ldexp(2 * unit, exponent - 1)
    with np.errstate(invalid="ignore"):
        from_twin, from_exact = np.abs(target - twin), np.abs(target - exact)
        far = from_twin > (1 + _ROUNDING_SLACK) * ulp
        unlike_both = (from_twin > 0) & (from_exact > _ROUNDED_ONCE * ulp)
        if rounds_once:
            far &= from_exact > (1 + _ROUNDED_ONCE) * ulp
    return float(far.mean()), float(unlike_both.mean())
