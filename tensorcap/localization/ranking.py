"""Rank suspects by the evidence against them: errors, noise, and what explains their values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from tensorcap.alignment import MappedArchive
from tensorcap.comparison import (
    POLICY,
    Comparison,
    Pair,
    called_sites,
    caller_of,
    compare,
    label_of,
    rank_text,
)
from tensorcap.diagnosis import MOST_WORK, NOT_OF_MAKERS, Diagnosis, Explanation, Search, diagnose
from tensorcap.localization.curves import ChangePoint, CurvePoint, change_points
from tensorcap.localization.evidence import Evidence, EvidenceSource, is_within
from tensorcap.localization.grouping import group_suspects, kind_of_place
from tensorcap.localization.nonfinite import find_nonfinite_origin
from tensorcap.localization.quantised_weights import (
    evidence_of_weights,
    explain_by_held,
    explain_by_weights,
    explain_left_out,
)
from tensorcap.localization.suspect import By, Localization, Noise, Precise, Suspect, Undone, find_mistake
from tensorcap.rerun import TOO_LARGE, CallThrough, OwnError
from tensorcap.runs import (
    Calls,
    PartialArchive,
    calls_of,
    contents_of,
    is_inner,
    is_parameter,
    is_result,
    is_telling,
)
from tensorcap.wording import conjugated, counted, some
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import TensorcapError
from tensorcap_formats.keys import ROOT_SITE, Key
from tensorcap_formats.records import Record

if TYPE_CHECKING:
    from tensorcap.adapters import Rerun

_DIAGNOSED: Final = 3  # places, layers, and tensors of each: diagnosing takes longer than all else
_EXPLAINS: Final = 0.5  # of its error, that a mistake leaves which explains bits alone
_NOISE: Final = 2.0  # times what a target differs from itself: no larger error means anything
_DONE_THERE: Final = (  # kinds by which something is done that the reference does elsewhere
    *("operations-order", "term-twice", "term-exchanged", "product-added", "activation-added"),
    *("bias-added", "bias-twice", "weight-twice"),
)
_PARAMETRIZATIONS: Final = "parametrizations"  # modules that torch makes a parameter by: part of who has it
_PLACES: Final = ("mask", "position_embeddings", "position_ids")  # of arguments that say what is where
NOISE_CAUSE: Final = "run-to-run noise"

_Place = tuple[object, ...]  # see `kind_of_place`


def rank_suspects(
    reference: Archive,
    target: Archive,
    free: Comparison,
    sources: Sequence[EvidenceSource],
    *,
    noise: Noise | None = None,
    compute_dtype: str | None = None,
    explain_weights: Callable[[str], Diagnosis | None] | None = None,
    is_exhaustive: bool = False,
) -> Localization:
    """Rank the modules against which there is evidence, and say what is known of each.

    1. Evidence of all sources is merged, a module once; last are those whose weights in few bits are wrong.
    2. Of the first three places, up to three suspects in as many layers are diagnosed, those of one place by
       one bound of work; each suspect is given its inherited, total and run-to-run error. One with a weight
       in few bits of which a mistake is known is explained by that; one that its values do not explain by its
       parameters, if these are known not to be the same numbers. Those with one explanation are one.
    3. Those whose error is noise come last. Who only rounds otherwise than the model does in that precision,
       and nothing of the comparison is red for that, is named in a note (LCL-660).
    4. Around them: composites that a suspect explains, where both error curves change, the origin of values
       that are not finite; and if there is no suspect, what is wrong nevertheless.

    Args:
        reference: The trusted archive, as it was compared.
        target: The target under the same keys.
        free: Their comparison.
        sources: At least one, the most trusted first; others confirm what it shows, and add to it.
        noise: How the target differs from itself.
        compute_dtype: What the target computed in, if its run does not say so.
        explain_weights: The diagnosis of a module's parameters, by its site; None if they are the same.
        is_exhaustive: Whether every possible cause of a suspect is tried, however many there are.
    """
    free_errors = _FreeErrors(free, noise)
    calls, called = calls_of(reference), called_sites(reference)
    examiner = _Examiner(compute_dtype, explain_weights, is_exhaustive=is_exhaustive)
    suspects: list[Suspect] = []
    weights = evidence_of_weights(reference, target, free)
    for merged in _merge([*sources, *([weights] if weights else [])]):
        module = merged.evidence.module
        examined = explain_by_weights(free, module) or explain_left_out(merged.evidence)
        examined = examined or explain_by_held(free, module)
        suspect = _suspect(merged, examined, free_errors, calls, called, noise)
        place = kind_of_place(suspect)
        if examined is None and merged.source is not weights and examiner.has_room(place):
            examined, search = examiner.examine(merged, place)
            suspect = _suspect(merged, examined, free_errors, calls, called, noise)
            suspect = replace(suspect, tried=search.tried, possible=search.possible)
        _add_suspect(suspects, suspect)
    suspects = group_suspects([_with_ranks(suspect, free) for suspect in suspects])
    suspects.sort(key=lambda suspect: suspect.cause == NOISE_CAUSE)
    of_rounding: list[Suspect] = []
    if not free.exit_status:
        of_rounding = [one for one in suspects if all(map(_is_of_rounding, (one, *one.others)))]
        suspects = [one for one in suspects if one not in of_rounding]
    own_errors = sources[0].own_errors
    notes = [note for source in sources for note in source.notes]
    notes += _notes_of_rounding(of_rounding)
    every = [one for suspect in suspects for one in (suspect, *suspect.others)]
    notes += [text for one in every if one.examined for text in one.examined.failed]
    changes: tuple[ChangePoint, ...] = ()
    if reference.is_ordered:
        own_points = change_points(_own_points(sources[0]), "own")
        changes = (*own_points, *change_points(free_errors.points, "total"))
    else:
        notes.append("The reference has no order of execution, so that no curve can be told.")
    localization = Localization(
        tuple(suspects),
        sources[0].by,
        tuple(_explained(every, free, called)),
        changes,
        find_nonfinite_origin(reference, target, free),
        tuple(_over_precise(own_errors, calls)),
        noise,
        own_errors,
        tuple(dict.fromkeys([*notes, *_noise_notes(noise)])),
        undone=tuple(_undone(own_errors, free)),
    )
    return localization if suspects else _with_open(localization, free, sources)


class _Examiner:
    """Diagnoses suspects: those of the first places, some of each, by one bound of work a place.

    Args:
        compute_dtype: What the target computed in, if its run does not say so.
        explain_weights: The diagnosis of a module's parameters, by its site; None if they are the same.
        is_exhaustive: Whether every possible cause is tried.
    """

    def __init__(
        self,
        compute_dtype: str | None,
        explain_weights: Callable[[str], Diagnosis | None] | None,
        *,
        is_exhaustive: bool,
    ) -> None:
        self._compute_dtype, self._explain_weights = compute_dtype, explain_weights
        self._bound = math.inf if is_exhaustive else MOST_WORK
        self._diagnosed = Counter[_Place]()  # suspects of each place
        self._work: dict[_Place, float] = {}  # that is left for those of a place
        self._by_makers: set[_Place] = set()  # places of which the first suspect was given something wrong

    def has_room(self, place: _Place) -> bool:
        """Whether a further suspect of a place is to be diagnosed."""
        diagnosed = self._diagnosed
        return diagnosed[place] < _DIAGNOSED and (diagnosed[place] > 0 or len(+diagnosed) < _DIAGNOSED)

    def examine(self, merged: _Merged, place: _Place) -> tuple[Diagnosis | None, Search]:
        """Diagnose a suspect, by its parameters if its tensors do not explain it.

        Returns:
            What was found, if anything was looked for, and how far the search went.
        """
        self._diagnosed[place] += 1
        search = Search(self._work.get(place, self._bound))
        examination = _Examination(merged.evidence, merged.source, self._compute_dtype, search)
        has_makers = self._diagnosed[place] == 1 or place in self._by_makers
        diagnosis = _diagnose(examination, has_makers=has_makers)
        self._work[place] = search.left
        if diagnosis is not None and _is_of_maker(diagnosis):
            self._by_makers.add(place)
        if self._explain_weights is not None and find_mistake(diagnosis) is None:
            diagnosis = self._explain_weights(merged.evidence.module) or diagnosis
        return diagnosis, search


def _add_suspect(suspects: list[Suspect], suspect: Suspect) -> None:
    """Add a suspect, or what is known of it to the one of the same module that has no diagnosis."""
    same = next((at for at, other in enumerate(suspects) if other.module == suspect.module), None)
    if same is None:
        suspects.append(suspect)
    elif suspects[same].diagnosis is None and suspect.diagnosis is not None:  # of what comes of it
        suspects[same] = replace(suspects[same], cause=suspect.cause, examined=suspect.examined)


def _own_points(source: EvidenceSource) -> list[CurvePoint]:
    """The own errors of a source as points of a curve; those with evidence explain the others."""
    with_evidence = {key for one in source.evidence for key in one.keys}
    return [
        CurvePoint(
            own.key,
            own.module,
            _curve_value(own.error, is_bad=own.is_bad),
            own.is_bad and own.key in with_evidence,
        )
        for own in source.own_errors
    ]


def noise_between(reference: Archive, target: Archive, tested: Archive, repeated: Archive) -> Noise:
    """Measure how two runs of a target differ.

    Args:
        reference: The trusted archive, as it was compared.
        target: The target under the same keys.
        tested: The target under its own keys.
        repeated: Another run of it.
    """
    by_own_key: dict[str, float] = {}
    for pair in compare(tested, repeated, mapping="none").pairs:
        if pair.reference is not None and pair.status != "excluded":
            is_same = pair.status == "identical"
            error = pair.row_error if pair.is_compared else None
            by_own_key[pair.key] = 0.0 if is_same else _curve_value(error)
    errors: dict[str, float] = {}
    called = called_sites(reference)
    first = module = ""
    for record in sorted(reference.records, key=lambda record: record.order):
        text = record.key.text
        if text not in target or is_inner(record.key):
            continue
        parts = target.sources[text] if isinstance(target, MappedArchive) else (target.get(text),)
        known = [by_own_key[part.key.text] for part in parts if part.key.text in by_own_key]
        errors[text] = max(known, default=math.inf)  # the other run lacks it
        if errors[text] and not first:
            is_argument = record.key.slot.startswith("input")
            first = text
            module = caller_of(record.key.site, called) if is_argument else record.key.site
    return Noise(errors, max(errors.values(), default=0.0), first, module)


@dataclass(frozen=True, slots=True)
class _Merged:
    """Evidence of all sources against one module.

    Attributes:
        by: Which sources have some, the most trusted first.
        evidence: That of the most trusted.
        source: The most trusted.
    """

    by: tuple[By, ...]
    evidence: Evidence
    source: EvidenceSource

    @property
    def is_of_parameter(self) -> bool:
        """Whether what speaks most against the module is a parameter."""
        return is_parameter(Key.parse(self.evidence.keys[0]))


def _merge(sources: Sequence[EvidenceSource]) -> list[_Merged]:
    """Merge the evidence of all sources, a module once.

    What a later source alone has counts unless it is against a module around or within one that an earlier
    source has evidence against: that is the same mistake, seen less exactly. A weight is proven wrong itself.
    """
    merged: dict[str, _Merged] = {}
    for source in sources:
        earlier = list(merged)
        for evidence in source.evidence:
            module = evidence.module
            if source.by == "weights" and module in merged and merged[module].is_of_parameter:
                merged[module] = _Merged((source.by,), evidence, source)
            elif module in merged:
                merged[module] = replace(merged[module], by=(*merged[module].by, source.by))
            elif source.by == "weights" or not any(
                is_within(module, one) or is_within(one, module) for one in earlier
            ):
                merged[module] = _Merged((source.by,), evidence, source)
    return list(merged.values())


def _suspect(
    merged: _Merged,
    examined: Diagnosis | None,
    free_errors: _FreeErrors,
    calls: Calls,
    called: set[str],
    noise: Noise | None,
) -> Suspect:
    """Describe a suspect; its cause is noise, else the mistake that explains it, else what R means.

    A module that is skipped is suspected itself, not the one whose code should have called it; so is one of
    which the target has no result, if the mistake lies in its tensors or operations alone. One that is right
    for what it was given is not, but the one whose code left out an argument.
    """
    evidence = merged.evidence
    module, key = evidence.module, evidence.keys[0]
    inherited, total = free_errors.of_module(module)
    floor = None if noise is None else noise.errors.get(key)
    error = evidence.own if evidence.own is not None else total
    mistake = find_mistake(examined)
    if mistake is not None and mistake.kind == "skipped":
        module = str(mistake.facts["module"])
    if mistake is not None and mistake.facts.get("not_given_to") == module:
        module = caller_of(module, called)
    if mistake is not None and mistake.facts.get("made_by"):
        module = str(mistake.facts["made_by"])
    child = "" if mistake is None else str(mistake.facts.get("child", ""))
    if child and _PARAMETRIZATIONS not in child.split("."):
        module = child if module == ROOT_SITE else f"{module}.{child}"
    if mistake is not None and mistake.facts.get("site") in merged.source.operations:
        module = str(mistake.facts["site"])
    cause, reason = mistake.kind if mistake else "", evidence.reason
    if floor and (error is None or error <= _NOISE * floor):
        cause = NOISE_CAUSE
        reason += f"; the target differs from itself by {floor:.2g} there from run to run"
    elif not cause and evidence.ratio is not None and evidence.ratio > POLICY.twin_ratio.green:
        cause = label_of(evidence.ratio)
    return Suspect(
        module,
        calls.class_of(module),
        key,
        merged.by,
        evidence.status,
        evidence.findings,
        evidence.own,
        inherited,
        total,
        evidence.ratio,
        floor,
        cause,
        reason,
        examined,
        operation=merged.source.operations.get(module),
    )


def _with_ranks(suspect: Suspect, free: Comparison) -> Suspect:
    """A suspect with what the comparison of the free runs says of the ranks of its tensor, in its reason."""
    pair = next((pair for pair in free.pairs if pair.key == suspect.key), None)
    ranks = "" if pair is None else rank_text(pair.findings)
    if not ranks or ranks in suspect.reason:
        return suspect
    return replace(suspect, reason=f"{suspect.reason.rstrip('.')}; {ranks}")


def _is_of_rounding(suspect: Suspect) -> bool:
    """Whether nothing but bits speaks against a suspect, and no mistake explains them but how it rounds."""
    bad = {finding.test for finding in suspect.findings if finding.status in TOO_LARGE}
    mistake = find_mistake(suspect.examined)
    return bad == {"ulp_share"} and (
        mistake is None
        or mistake.kind.endswith(("precision", "rounded"))
        or (mistake.before is not None and mistake.after > _EXPLAINS * mistake.before)
    )


def _notes_of_rounding(suspects: Sequence[Suspect]) -> Iterator[str]:
    """Say who only rounds otherwise, a sentence or none."""
    findings = [f for suspect in suspects for f in suspect.findings if f.test == "ulp_share"]
    if findings:
        names = some([suspect.name for suspect in suspects])
        count = sum(len(suspect.modules) for suspect in suspects)
        worst = max(findings, key=lambda finding: finding.value)
        yield (
            f"{names}: {conjugated(count, 'round')} otherwise than the model does in that precision "
            f"({worst.text}). No more than rounding comes of it; nobody is accused of that."
        )


def _is_of_maker(diagnosis: Diagnosis) -> bool:
    """Whether it names a mistake of who made what the suspect was given."""
    mistake = find_mistake(diagnosis)
    return mistake is not None and "given_to" in mistake.facts


@dataclass(frozen=True, slots=True)
class _Examination:
    """What the tensors of a suspect are diagnosed by.

    Attributes:
        evidence: Against the suspect.
        source: Where it comes from.
        compute_dtype: What the target computed in, if its run does not say so.
        search: The search for what explains it, in all its tensors.
    """

    evidence: Evidence
    source: EvidenceSource
    compute_dtype: str | None
    search: Search


def _diagnose(examination: _Examination, *, has_makers: bool) -> Diagnosis | None:
    """Diagnose a suspect's tensors: return the first diagnosis that names a mistake, else the first.

    1. Its first tensors are diagnosed in turn, until one diagnosis names a mistake. Calls are made of each
       tensor once: in another call the same code made it, which nothing that was tried explains.
    2. If something is missing there, those behind it are, too: what is done at one of them is done in
       another order.
    3. If none names one, and `has_makers`, the first is diagnosed by who made what the suspect was given.
    """
    first = missing = None
    search = examination.search
    searched: set[tuple[str, str]] = set()  # sites and slots
    for key in examination.evidence.keys[:_DIAGNOSED]:
        parsed, tried = Key.parse(key), search.tried
        tensor = parsed.site, parsed.slot
        diagnosis = _diagnose_tensor(examination, key, makes_calls=tensor not in searched)
        searched |= {tensor} if search.tried > tried else set()
        mistake = find_mistake(diagnosis)
        if diagnosis is not None and missing is not None:
            if mistake is not None and mistake.kind in _DONE_THERE:
                return _in_another_order(missing, mistake, diagnosis.key)
        elif diagnosis is not None and mistake is not None:
            if not mistake.kind.endswith("-missing"):
                return diagnosis
            missing = diagnosis
        first = first or diagnosis
    if missing is None and has_makers and (first is None or find_mistake(first) is None):
        first = next(_diagnose_makers(examination), first)
    return missing or first


def _in_another_order(missing: Diagnosis, done: Explanation, key: str) -> Diagnosis:
    """Say of what is missing in one tensor that it is done at another one."""
    mistake = find_mistake(missing)
    if mistake is None:
        return missing
    order = replace(
        mistake,
        kind="operations-order",
        text=f"{mistake.text}, and of {key} {done.text}: it is done there",
        hint="Two steps are done the other way round: a sum, a norm, an activation, a gate.",
    )
    return replace(missing, explanations=(order, *missing.explanations))


def _diagnose_tensor(examination: _Examination, key: str, *, makes_calls: bool) -> Diagnosis | None:
    """Diagnose one tensor by the call of the suspect, or of the code that hands its result on.

    That code is what is wrong if it explains the tensor without numbers that were fitted, as by another one
    that it hands on, and the suspect does not, or only by another record that the tensor is.
    """
    module, parsed = examination.evidence.module, Key.parse(key)
    diagnosis = _diagnose_by(examination, module, key, makes_calls=makes_calls)
    is_result = parsed.slot.startswith("output")
    caller = parsed.site if is_result else caller_of(parsed.site, called_sites(examination.source.reference))
    mistake = find_mistake(diagnosis)
    if mistake is not None and not mistake.parameters and not _is_other_record(mistake):
        return diagnosis
    if caller != module and is_within(module, caller):
        other = _diagnose_by(examination, caller, key, makes_calls=makes_calls)
        mistake = find_mistake(other)
        if other is not None and mistake is not None and not mistake.parameters:
            return _made_by(other, mistake, caller)
    return diagnosis


def _is_other_record(mistake: Explanation) -> bool:
    """Whether a tensor is another record of the reference, whoever hands it on."""
    return mistake.kind == "operand-exchanged" and "key" in mistake.facts


def _made_by(diagnosis: Diagnosis, mistake: Explanation, maker: str, given_to: str = "") -> Diagnosis:
    """Say of a mistake that another module has made it, and whom it was given to."""
    facts = {**mistake.facts, "made_by": maker, **({"given_to": given_to} if given_to else {})}
    text = f"{mistake.text}, which {given_to} is given" if given_to else mistake.text
    made = replace(mistake, text=text, facts=facts)
    return replace(diagnosis, explanations=tuple(made if e is mistake else e for e in diagnosis.explanations))


def _diagnose_makers(examination: _Examination) -> Iterator[Diagnosis]:
    """Diagnose a suspect's first tensor by the calls that made what it was given and the target lacks.

    So are those which made what these were given. Only what names a mistake is yielded.
    """
    source, evidence = examination.source, examination.evidence
    module, key = evidence.module, evidence.keys[0]
    if source.rerun_call is None or key not in source.reference or key not in source.target:
        return
    outer = source.rerun_call(module, key)
    for maker, call in _calls_through(source, module, key, outer) if outer is not None else ():
        diagnosis = _diagnose_call(examination, key, call)
        mistake = find_mistake(diagnosis)
        if diagnosis is not None and mistake is not None and not mistake.parameters:
            yield _made_by(diagnosis, mistake, maker, module)


def _calls_through(
    source: EvidenceSource, module: str, key: str, outer: Rerun
) -> Iterator[tuple[str, CallThrough]]:
    """Find the modules that made what a call was given, and those that made what these were given."""
    for maker, slots in _find_makers(source, module, key):
        inner = {slot: _call_of(source, maker, made) for slot, made in slots.items()}
        known = {slot: call for slot, call in inner.items() if call is not None}
        if len(known) < len(inner):
            continue
        yield maker, CallThrough(outer, known)
        for first, earlier in _find_makers(source, maker, next(iter(slots.values()))):
            behind = {
                slot: {s: call for s, made in earlier.items() if (call := _call_of(source, first, made))}
                for slot in known
            }
            if all(len(calls) == len(earlier) for calls in behind.values()):
                through = {slot: CallThrough(known[slot], calls) for slot, calls in behind.items()}
                yield first, CallThrough(outer, through)


def _call_of(source: EvidenceSource, module: str, key: str) -> Rerun | None:
    return None if source.rerun_call is None else source.rerun_call(module, key)


def _find_makers(source: EvidenceSource, module: str, key: str) -> Sequence[tuple[str, Mapping[str, str]]]:
    """Find who made the arguments of a module's first call in a step that the target has nowhere.

    Of each module the arguments that it made, with the key text of the tensor that each was at first: a
    result of a call, or else what the code of a caller hands on. Of a tensor that others are equal to by
    chance, as one of zeros, nobody else is known to have made it.
    """
    own, run = Key.parse(key), source.reference
    called = called_sites(run)
    of_step = [r for r in run.records if (r.key.step, r.key.rank) == (own.step, own.rank)]
    of_step = [r for r in of_step if not is_inner(r.key) and r.key.slot.startswith(("input", "output"))]
    makers: dict[str, dict[str, str]] = {}
    for record in of_step:
        if (record.key.site, record.key.call) != (module, 0) or not record.key.slot.startswith("input"):
            continue
        same = [record]
        if is_telling(record):
            alike = (r for r in of_step if contents_of(r) == contents_of(record))
            same = [r for r in alike if r.order <= record.order]
        if any(r.key.text in source.target for r in same):
            continue
        first = min(same, key=lambda r: r.order).key
        maker = first.site if first.slot.startswith("output") else caller_of(first.site, called)
        if maker != module and first.site != ROOT_SITE:
            makers.setdefault(maker, {})[record.key.slot] = first.text
    return list(makers.items())[:_DIAGNOSED]


def _diagnose_call(examination: _Examination, key: str, call: CallThrough) -> Diagnosis | None:
    """Diagnose a tensor by calls before that of its module alone."""
    source = examination.source
    try:
        return diagnose(
            _until(source.reference, key),
            source.target,
            key,
            compute_dtype=examination.compute_dtype,
            rerun=call,
            without=NOT_OF_MAKERS,
            search=examination.search,
        )
    except TensorcapError:  # complex values, or none were kept: nothing to look at
        return None


def _diagnose_by(examination: _Examination, module: str, key: str, *, makes_calls: bool) -> Diagnosis | None:
    source = examination.source
    if key not in source.reference or key not in source.target:
        return None
    reference, rerun = source.reference, None
    if source.rerun_call is not None:
        reference = _until(reference, key)
        rerun = source.rerun_call(module, key) if makes_calls else None
    if _is_folded(module, key):
        reference = _without_inputs(reference, key)
    try:
        return diagnose(
            reference,
            source.target,
            key,
            compute_dtype=examination.compute_dtype,
            rerun=rerun,
            further=None if source.mistakes is None else source.mistakes(key),
            search=examination.search,
        )
    except TensorcapError:  # complex values, or none were kept: nothing to look at
        return None


def _is_folded(module: str, key: str) -> bool:
    """Whether a tensor is the result of another module, whose work a module does (RPL-50)."""
    parsed = Key.parse(key)
    return parsed.slot.startswith("output") and parsed.site != module


def _without_inputs(run: Archive, key: str) -> Archive:
    """A run without the arguments of a call: of a folded module, which hands them on, they say nothing."""
    where = run.get(key).key.where
    return PartialArchive(
        run, [r for r in run.records if r.key.where != where or not r.key.slot.startswith("input")]
    )


def _until(run: Archive, key: str) -> Archive:
    """What a replay had computed up to a tensor: what came after it was made of the target's value of it.

    Masks and positions that later modules are given stay: no module has made them.
    """
    last = run.get(key).order

    def is_known(record: Record) -> bool:
        if record.order <= last or is_parameter(record.key):
            return True
        slot = record.key.slot
        return slot.startswith("input.") and any(word in slot for word in _PLACES)

    return PartialArchive(run, [r for r in run.records if is_known(r)])


class _FreeErrors:
    """Errors of the target's own run: those that enter and leave each module, and their curve.

    Args:
        free: The comparison of the free runs.
        noise: How the target differs from itself.

    Attributes:
        points: The total error of each result, in execution order.
    """

    def __init__(self, free: Comparison, noise: Noise | None) -> None:
        self._entering: dict[str, float] = {}
        self._leaving: dict[str, float] = {}
        self.points: list[CurvePoint] = []
        for pair in sorted(free.pairs, key=lambda p: p.reference.order if p.reference else 0):
            if pair.reference is None:
                continue
            key = pair.reference.key
            error = pair.row_error if pair.is_compared else None
            if is_inner(key):
                if error is not None and key.slot.startswith("output"):
                    self._leaving[key.site] = max(error, self._leaving.get(key.site, 0.0))
                continue
            errors = self._entering if key.slot.startswith("input") else self._leaving
            if error is not None and key.slot.partition(".")[0] in ("input", "output"):
                errors[key.site] = max(error, errors.get(key.site, 0.0))
            if is_result(key) and pair.target is not None and pair.status != "excluded":
                value = _curve_value(error, is_bad=not pair.is_green)
                is_noise = noise is not None and 0 < value <= _NOISE * noise.errors.get(pair.key, 0.0)
                is_bad = pair.is_required and not pair.is_green and not is_noise
                self.points.append(CurvePoint(pair.key, key.site, value, is_bad))

    def of_module(self, module: str) -> tuple[float | None, float | None]:
        """The largest error that enters a module, and that leaves it; None if not known."""
        return self._entering.get(module), self._leaving.get(module)


def _explained(suspects: Sequence[Suspect], free: Comparison, called: set[str]) -> Iterator[tuple[str, str]]:
    """Modules around suspects whose results are wrong too, the nearest first, each with the first suspect."""
    wrong = {p.reference.key.site for p in free.pairs if _is_wrong_result(p) and p.reference}
    suspected = {suspect.module for suspect in suspects}
    seen: set[str] = set()
    for suspect in suspects:
        outer = suspect.module
        while outer != ROOT_SITE:
            outer = caller_of(outer, called)
            if outer in wrong and outer not in suspected and outer not in seen:
                seen.add(outer)
                yield outer, suspect.module


def _undone(own_errors: Sequence[OwnError], free: Comparison) -> Iterator[Undone]:
    """Modules whose results differ and are undone: by a rerun, else by the comparison of the free runs."""
    reasons: dict[str, str] = {}
    for own in own_errors:
        if own.made == "result" and own.is_undone:
            reasons.setdefault(own.module, own.findings[0].text)
    for pair in free.pairs if not own_errors else ():
        is_undone = pair.status == "explained" and pair.is_compared and pair.reference is not None
        if is_undone and pair.reference is not None and is_result(pair.reference.key):
            reasons.setdefault(pair.reference.key.site, pair.reason)
    for module, reason in reasons.items():
        yield Undone(module, reason)


def _is_wrong_result(pair: Pair) -> bool:
    if pair.reference is None or pair.target is None or not is_result(pair.reference.key):
        return False
    return pair.is_required and not pair.is_green


def _over_precise(own_errors: Sequence[OwnError], calls: Calls) -> Iterator[Precise]:
    """Modules with a result that was rounded less than the model rounds it, in execution order."""
    ratios: dict[str, float] = {}
    for own in own_errors:
        if own.is_precise and own.ratio is not None:
            ratios[own.module] = max(own.ratio, ratios.get(own.module, 0.0))
    for module, ratio in ratios.items():
        yield Precise(module, calls.class_of(module), ratio)


def _noise_notes(noise: Noise | None) -> Iterable[str]:
    if noise is not None and noise.first:
        yield (
            f"The target does not repeat itself: {noise.module} makes {noise.first} otherwise from run to "
            f"run; the largest such error is {noise.largest:.2g}."
        )


def _with_open(
    localization: Localization, free: Comparison, sources: Sequence[EvidenceSource]
) -> Localization:
    """Add what is wrong although no module is suspected of it: all for which the comparison is not green.

    Where each module was judged by what it makes itself, errors that are `suspect` only are grown rounding.
    What a rerun shows to be undone is wrong only if a result of the model is.
    """
    grown = "suspect" if localization.by != "archives" else None
    wrong = [p.key for p in free.pairs if p.is_required and not p.is_green and p.status != grown]
    if not any(Key.parse(key).site == ROOT_SITE for key in wrong):
        undone = {own.key for own in localization.own_errors if own.is_undone}
        wrong = [key for key in wrong if key not in undone]
    wrong += [difference.key for difference in free.value_differences if difference.is_red]
    unjudged = (key for source in sources for key in source.unjudged)
    keys = tuple(dict.fromkeys([*wrong, *unjudged]))
    if not keys:
        return localization
    open_keys = counted(len(keys), "tensor", "are")
    note = f"{open_keys} not green, and no module is accused of that: {keys[0]}; see tcap compare."
    return replace(localization, open=keys, notes=(*localization.notes, note))


def _curve_value(error: float | None, *, is_bad: bool = True) -> float:
    """An error as a point of a curve; if none is defined, infinite for what is bad, else 0."""
    return (math.inf if is_bad else 0.0) if error is None or math.isnan(error) else error
