"""What modules made in an injected run, whose results are natural, judged by the tests of `specs/replay.md`.

Arguments were replaced as far as they belong together, and what was left in place may pass errors on.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from tensorcap.alignment import MappedArchive
from tensorcap.comparison import (
    GROWTH_TESTS,
    POLICY,
    ROUNDED_INPUT_TESTS,
    Finding,
    Injected,
    Pair,
    Precision,
    Status,
    compare_records,
    is_circumstance,
    judge_gain,
    judge_own_error,
    worst_status,
)
from tensorcap.rerun.own_errors import (
    BAD,
    TOO_LARGE,
    Makers,
    OwnError,
    States,
    both_records,
    mismatch_finding,
)
from tensorcap.rerun.producers import Producers
from tensorcap.runs import Contents, contents_of, is_inner, is_parameter, is_result, is_telling
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import Key

Judged = tuple[Status, tuple[Finding, ...]]


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
        unjudged: Key texts of the reference's of what is wrong and was made of these; likewise.
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
        self.unjudged: list[str] = []
        both = (pair for pair in pairs if pair.reference is not None and pair.target is not None)
        self._pairs = sorted(both, key=lambda pair: both_records(pair)[0].order)
        self._makers = Makers(reference, Producers.of_arguments(reference, injected))
        self._precision = POLICY.precision_of_runs(reference.info, injected.info, None)
        self._paired = {pair.key for pair in self._pairs}
        self._reference = reference
        self._mapped = injected if isinstance(injected, MappedArchive) else None
        self._run = injected.source if isinstance(injected, MappedArchive) else injected
        self._injected = Injected(injected, reference)
        self._states = States(self._makers.writers, (reference, injected))
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
        key = both_records(pair)[0].key
        left = self._injected.left(pair)
        if left is None or is_inner(key) or is_parameter(key):
            return None
        if pair.status == "shape-mismatch" and is_circumstance(pair, ()):
            return self._makers.own_error(
                pair, "unjudged", (replace(mismatch_finding(pair), status="unjudged"),)
            )
        if pair.status in BAD and self._is_of_unmatched_tokens(pair):
            findings = tuple(replace(finding, status="unjudged") for finding in pair.findings)
            return self._makers.own_error(pair, "unjudged", findings)
        kept = tuple(one for one in left if one not in self._released)
        judged = self._status(pair, kept, is_leaf=self._makers.is_leaf(key))
        if kept != left:
            judged = self._without_gain(pair, judged)
        inherited = self._states.inherited(pair) if pair.status in BAD else None
        if inherited is not None:
            judged = inherited.status, (inherited,)
        return None if judged is None else self._makers.own_error(pair, *judged)

    def _is_of_unmatched_tokens(self, pair: Pair) -> bool:
        """Whether a tensor has tokens that were not matched, and was compared as it is (ALN-75)."""
        return self._mapped is not None and bool(self._mapped.doubt(both_records(pair)[1]))

    def _status(self, pair: Pair, left: Sequence[Key], *, is_leaf: bool) -> Judged | None:
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
        is_too_large = pair.status in TOO_LARGE
        if left:
            inherited = self._errors_of(pair, left)
            if inherited is None:
                self.unjudged.append(pair.key)
                return None
            gain = self._gain(pair, inherited, is_leaf=is_leaf) if is_too_large else None
            if is_too_large and any(inherited):
                return None if gain is None else (gain.status, (gain,))
            findings = findings if gain is None else (*findings, gain)
        if not is_too_large:
            return "diverged", findings or (mismatch_finding(pair),)
        uncertain = GROWTH_TESTS if self._is_wide(pair) else GROWTH_TESTS | ROUNDED_INPUT_TESTS
        certain = [f for f in findings if f.status in TOO_LARGE and f.test not in uncertain]
        if certain:
            return worst_status(certain), findings
        return ("within-rounding" if findings else pair.status), findings

    def _without_gain(self, pair: Pair, judged: Judged | None) -> Judged | None:
        """Judge a result of arguments that were left in place, since it undoes them, by its own error.

        They hold something else than the reference's, so that a gain over their errors excuses nothing where
        the whole error is too large.
        """
        precision, error = self._precision_of(pair), pair.row_error
        is_excused = judged is not None and judged[0] not in BAD
        is_large = any(f.test in GROWTH_TESTS and f.status in TOO_LARGE for f in pair.findings)
        if not (is_excused and is_large) or precision is None or error is None:
            return judged
        own = judge_own_error(error, precision, is_leaf=False, elements=pair.elements)
        return (own.status, (own,)) if own.status == "diverged" else judged

    def _errors_of(self, pair: Pair, left: Sequence[Key]) -> list[float] | None:
        """Row errors of arguments that were left in place; None, and noted, if one is not known."""
        errors = {key: self._errors.get(key.text) for key in left}
        if self._injected.takes_replaced(pair):
            class_name = self._makers.calls.class_of(both_records(pair)[0].key.site)
            proven = [key for key in left if (class_name, self._contents(key)) in self._proven]
            errors.update((key, errors[key] or 0.0) for key in proven)
        unknown = [key for key, error in errors.items() if error is None]
        if unknown:
            errors.update(self._errors_under_other_names(both_records(pair)[0].key, unknown))
        known = [error for error in errors.values() if error is not None]
        if len(known) == len(errors):
            return known
        noted = [*self.unknown, *(key.text for key, error in errors.items() if error is None)]
        self.unknown = list(dict.fromkeys(noted))
        return None

    @cached_property
    def _proven(self) -> set[tuple[str, Contents | None]]:
        """Unknown arguments that a call made a right result of, by the class of it and what they hold."""
        proven: set[tuple[str, Contents | None]] = set()
        for pair in self._pairs:
            key, error, precision = both_records(pair)[0].key, pair.row_error, self._precision_of(pair)
            if not is_result(key) or not pair.is_compared or error is None or precision is None:
                continue
            own = judge_own_error(error, precision, is_leaf=False, elements=pair.elements)
            if own.status in TOO_LARGE:
                continue
            class_name = self._makers.calls.class_of(key.site)
            left = (one for one in self._injected.left(pair) or () if self._errors.get(one.text) is None)
            proven.update((class_name, contents) for one in left if (contents := self._contents(one)))
        return proven

    def _contents(self, key: Key) -> Contents | None:
        """What a tensor of the run holds; None if others may hold the same by chance."""
        record = self._run.get(key.text) if key.text in self._run else None
        return contents_of(record) if record is not None and is_telling(record) else None

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
        inputs, elements = math.hypot(*inherited), both_records(pair)[0].size
        return judge_gain(error, inputs, precision, is_core=not is_leaf, elements=elements)

    def _is_wide(self, pair: Pair) -> bool:
        precision = self._precision_of(pair)
        return precision is None or precision.is_wide

    def _precision_of(self, pair: Pair) -> Precision | None:
        """None of whole numbers."""
        return POLICY.precision_of_pair(self._precision, *both_records(pair)) if pair.is_inexact else None
