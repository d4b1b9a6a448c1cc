"""Who says what against which module: a replay, an injected run, or two archives alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tensorcap.alignment.views import MappedArchive
from tensorcap.comparison.comparison import Comparison
from tensorcap.comparison.divergence import Inputs, called_sites, caller_of, is_circumstance
from tensorcap.comparison.injected import Injected
from tensorcap.comparison.pair import ABSENT, SEVERITY, Finding, Pair, Status, worst_status
from tensorcap.comparison.pipeline import compare_records
from tensorcap.comparison.policy import POLICY, Precision
from tensorcap.localization.suspect import By
from tensorcap.rerun.module_replay import Replayed
from tensorcap.rerun.own_errors import Made, OwnError, mismatch_text
from tensorcap.rerun.rerun import rerun_of
from tensorcap.runs.calls import Calls
from tensorcap.runs.record_kinds import is_inner, is_parameter
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import ROOT_SITE, Key

if TYPE_CHECKING:
    from tensorcap.adapters.edits import Rerun

Again = Callable[[str, str], "Rerun | None"]

_MOST: Final = 8  # suspects by archives alone
_GAINS: Final = frozenset({"gain", "attention_gain", "gain_tail", "attention_gain_tail", "outlier_element"})
_UNSURE: Final = frozenset(
    {"outlier_element", "growth", "input_dependence"}
)  # tests that may fail for an argument that was rounded
_BAD: Final = frozenset({"suspect", "diverged", "nonfinite", "shape-mismatch"})


@dataclass(frozen=True, slots=True)
class Evidence:
    """What speaks against one module.

    Attributes:
        module: Its site.
        keys: Key texts of tensors, the one that speaks most against it first.
        status: What the tests make of that one.
        findings: What each test said of it.
        own: Row error that the module makes itself; None where not known.
        ratio: R of that against a twin; None without one.
        reason: Why it is accused, as a sentence.
    """

    module: str
    keys: tuple[str, ...]
    status: Status
    findings: tuple[Finding, ...]
    own: float | None
    ratio: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class EvidenceSource:
    """One way to tell own errors from inherited ones, and what it came to.

    Attributes:
        by: Which way.
        reference: What each module should have made.
        target: What it made, under the same keys.
        again: Makes the call again by which the reference's module made a tensor, given the module and the
            key text; None where no model was replayed. Where one was, each result was replaced after it was
            recorded, so that what comes after a tensor says nothing of it.
        accusations: Whom it accuses, the first one first.
        owns: What each module made itself, in execution order.
        unjudged: Key texts of what it should have judged and could not, or that is not green by so little
            that nobody is accused of it.
        notes: What a reader should know, as sentences.
    """

    by: By
    reference: Archive
    target: Archive
    again: Again | None
    accusations: tuple[Evidence, ...]
    owns: Sequence[OwnError]
    unjudged: tuple[str, ...]
    notes: tuple[str, ...]


def evidence_of_replay(done: Replayed, seed: int | None) -> EvidenceSource:
    """What the reference's model says that was run on the target's values.

    Args:
        done: The replay, while its runs are there.
        seed: Of the random generators before each call that is made again.
    """

    def again(module: str, key: str) -> Rerun | None:
        return rerun_of(done.workload, done.run, done.target, module, key, seed=seed)

    bad: dict[str, list[OwnError]] = {}
    for own in done.found.owns:
        if own.is_bad:
            bad.setdefault(own.module, []).append(own)
    accusations = _ranked(bad, Calls(done.reference), "is wrong for what the target gave it")
    unjudged = (*done.found.lacking, *(own.key for own in done.found.unjudged))
    return EvidenceSource(
        "replay", done.run, done.target, again, accusations, done.found.owns, unjudged, done.found.notes
    )


def evidence_of_injection(reference: Archive, injected: Archive, comparison: Comparison) -> EvidenceSource:
    """What a target says that was run on the reference's arguments.

    Results are natural, so that an error goes on into what the code around a module makes of it: who accuses
    a module that has an earlier suspect within it says nothing new.

    Args:
        reference: The trusted archive, as it was compared.
        injected: The injected run under the same keys.
        comparison: Their comparison.
    """
    found = _OwnsOfInjection(reference, injected, comparison)
    owns = found.all()
    bad: dict[str, list[OwnError]] = {}
    for own in owns:
        if own.is_bad and (own.module in bad or not any(is_within(one, own.module) for one in bad)):
            bad.setdefault(own.module, []).append(own)
    accusations = _ranked(bad, Calls(reference), "is wrong though it was given the reference's tensors")
    if not accusations:
        accusations = _of_divergence(reference, comparison)
    return EvidenceSource("injection", reference, injected, None, accusations, owns, (), tuple(found.notes()))


def evidence_of_archives(reference: Archive, target: Archive, free: Comparison) -> EvidenceSource:
    """What comparing says: the module of the first divergence, then those whose gain is too large."""
    notes = [
        "No model was replayed: the archives alone tell a mistake only where it stands out of what errors "
        "do anyway."
    ]
    called = called_sites(reference)
    first = _of_divergence(reference, free)
    accused = {one.module: one for one in first if _is_clear(one)}
    unclear = [one for one in first if one.module not in accused]
    for one in unclear:
        key = one.keys[0]
        notes.append(f"{key} stands out a little, as now and then in a correct port: {one.reason}")
    for pair in free.pairs if first else ():
        said = _stands_out(pair)
        if len(accused) < _MOST and pair.reference is not None and said is not None:
            site, slot = pair.reference.key.site, pair.reference.key.slot
            module = caller_of(site, called) if slot.startswith("input") else site
            accused.setdefault(module, _by_pair(module, pair, said.text))
    unjudged = tuple(one.keys[0] for one in unclear)
    return EvidenceSource(
        "archives", reference, target, None, tuple(accused.values()), (), unjudged, tuple(notes)
    )


def is_within(module: str, other: str) -> bool:
    """Whether a module is another one, or lies within it."""
    return other in (module, ROOT_SITE) or module.startswith(f"{other}.")


def _ranked(bad: dict[str, list[OwnError]], calls: Calls, how: str) -> tuple[Evidence, ...]:
    """Modules by what speaks against them: certain ones first, leaves first, then in execution order."""
    order = {module: at for at, module in enumerate(bad)}
    modules = sorted(bad, key=lambda m: (-max(map(_severity, bad[m])), not calls.is_leaf(m), order[m]))
    return tuple(
        _accusation(module, sorted(bad[module], key=lambda own: -_severity(own)), how) for module in modules
    )


def _accusation(module: str, against: Sequence[OwnError], how: str) -> Evidence:
    first = against[0]
    what = "its own result" if first.made == "result" else "what its code hands on"
    reason = f"{what} {how}"
    if first.findings:
        reason += f": {max(first.findings, key=lambda f: SEVERITY.index(f.status)).text}"
    keys = tuple(own.key for own in against)
    return Evidence(module, keys, first.status, first.findings, first.error, first.ratio, reason)


def _of_divergence(reference: Archive, comparison: Comparison) -> tuple[Evidence, ...]:
    """The module of the first divergence; nobody's if errors only grew, or it says nothing of who made it."""
    first = comparison.divergence
    if first is None or first.is_growth or first.pair.status in ABSENT:
        return ()
    if is_circumstance(first.pair, Inputs(reference, comparison.pairs).of(first.pair)):
        return ()
    return (_by_pair(first.module, first.pair, first.explanation),)


def _is_clear(accusation: Evidence) -> bool:
    """Whether it is no matter of a limit that a correct port passes now and then."""
    is_other_function = any(f.test == "input_dependence" and f.status in _BAD for f in accusation.findings)
    return accusation.status != "suspect" or is_other_function


def _by_pair(module: str, pair: Pair, reason: str) -> Evidence:
    return Evidence(module, (pair.key,), pair.status, pair.findings, None, None, reason)


def _stands_out(pair: Pair) -> Finding | None:
    if pair.reference is None or is_inner(pair.reference.key) or is_parameter(pair.reference.key):
        return None
    return next((f for f in pair.findings if f.test in _GAINS and f.status == "diverged"), None)


def _severity(own: OwnError) -> int:
    return SEVERITY.index(own.status)


class _OwnsOfInjection:
    """What each module of an injected run made itself."""

    def __init__(self, reference: Archive, injected: Archive, comparison: Comparison) -> None:
        self._pairs = sorted(
            (pair for pair in comparison.pairs if pair.reference is not None and pair.target is not None),
            key=lambda pair: pair.reference.order if pair.reference else 0,
        )
        self._calls, self._called = Calls(reference), called_sites(reference)
        self._precision = POLICY.precision_of_runs(reference.info, injected.info, None)
        self._given = {call.place: call.inputs for call in self._calls.calls}
        self._paired = {pair.key for pair in self._pairs}
        self._reference, self._run = reference, injected
        self._injected = Injected(injected)
        if isinstance(injected, MappedArchive):
            self._run = injected.source
            self._injected = Injected(injected.source, injected.sources)
        self._errors: dict[str, float | None] = {}
        for pair in self._pairs:
            for key in self._injected.keys_of(pair):
                is_known = pair.is_compared and pair.status != "nonfinite"
                self._errors[key.text] = pair.row_error if is_known else None
        self._unknown: dict[str, None] = {}

    def all(self) -> tuple[OwnError, ...]:
        """In execution order."""
        return tuple(own for pair in self._pairs if (own := self._own(pair)) is not None)

    def notes(self) -> Iterable[str]:
        """What could not be told apart."""
        if self._unknown:
            keys = list(self._unknown)
            yield (
                f"Arguments that were left as they were and are not known in the reference: {len(keys)}, "
                f"first {keys[0]}; errors of what was made of them may be inherited."
            )

    def _own(self, pair: Pair) -> OwnError | None:
        assert pair.reference is not None
        key = pair.reference.key
        left = self._injected.left(pair)
        if left is None or is_inner(key) or is_parameter(key):
            return None
        made: Made = "result" if key.slot.startswith("output") else "argument"
        module = key.site if made == "result" else caller_of(key.site, self._called)
        is_leaf = made == "result" and self._calls.is_leaf(key.site) and self._calls.is_simple(key.site)
        status, findings = self._judged(pair, left, is_leaf=is_leaf)
        error = pair.row_error
        if status is None:
            return None
        return OwnError(key.text, module, made, is_leaf, error, None, status, findings, is_precise=False)

    def _judged(
        self, pair: Pair, left: Sequence[Key], *, is_leaf: bool
    ) -> tuple[Status | None, tuple[Finding, ...]]:
        """The status of what a pair shows of its own module; None where it may have inherited it."""
        if pair.status not in _BAD:
            return pair.status, pair.findings
        findings, status = pair.findings, pair.status
        if left:
            known = self._known(pair, left)
            if known is None:
                return None, ()
            if status in ("suspect", "diverged"):
                gain = self._gain(pair, known, is_leaf=is_leaf)
                if any(known):  # all else may be inherited
                    return (None, ()) if gain is None else (gain.status, (gain,))
                findings = findings if gain is None else (*findings, gain)
        if status in ("suspect", "diverged"):
            unsure = frozenset({"growth"}) if self._is_wide(pair) else _UNSURE
            telling = [f for f in findings if f.status in ("suspect", "diverged") and f.test not in unsure]
            if findings and not telling:
                return "within-rounding", findings
            if telling:
                status = worst_status(telling)
        else:
            findings = findings or (Finding(pair.status, 1, 0, "diverged", mismatch_text(pair)),)
            status = "diverged"
        return status, findings

    def _known(self, pair: Pair, left: Sequence[Key]) -> list[float] | None:
        """Errors of what was left as it was; None where one is not known."""
        errors = {key: self._errors.get(key.text) for key in left}
        unknown = [key for key, error in errors.items() if error is None]
        if unknown and pair.reference is not None:
            errors.update(self._of_other_names(pair.reference.key, unknown))
        known = [error for error in errors.values() if error is not None]
        if len(known) == len(errors):
            return known
        self._unknown.update((key.text, None) for key, error in errors.items() if error is None)
        return None

    def _of_other_names(self, result: Key, unknown: Sequence[Key]) -> Iterator[tuple[Key, float]]:
        """Errors of arguments that the reference's call has under other names, one by one in their order."""
        place = (result.rank, result.step, result.site, result.call)
        lacking = [
            record
            for record in self._given.get(place, ())
            if record.key.text not in self._paired and record.dtype.is_inexact
        ]
        if result.slot.startswith("output") and len(lacking) == len(unknown):
            for ours, theirs in zip(lacking, unknown, strict=True):
                found = compare_records(self._reference, ours.key.text, self._run, theirs.text).pairs[0]
                error = found.row_error if found.is_compared else None
                if error is not None:
                    yield theirs, error

    def _gain(self, pair: Pair, known: Sequence[float], *, is_leaf: bool) -> Finding | None:
        """What was added to the errors of what was left as it was: D and D'; None of whole numbers."""
        error, precision = pair.row_error, self._precision_of(pair)
        if error is None or precision is None or pair.reference is None:
            return None
        inputs, elements = math.hypot(*known), pair.reference.size
        return POLICY.judge_gain(error, inputs, precision, is_core=not is_leaf, elements=elements)

    def _is_wide(self, pair: Pair) -> bool:
        precision = self._precision_of(pair)
        return precision is None or precision.is_wide

    def _precision_of(self, pair: Pair) -> Precision | None:
        """None of whole numbers."""
        ours, theirs = pair.reference, pair.target
        if ours is None or theirs is None or not ours.dtype.is_inexact:
            return None
        return POLICY.precision_of_pair(self._precision, ours, theirs)
