"""From witnesses to suspects: who is accused first, with which errors, and what explains the values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from tensorcap.alignment.views import MappedArchive
from tensorcap.comparison.baseline import label_of
from tensorcap.comparison.comparison import Comparison
from tensorcap.comparison.divergence import called_sites, caller_of
from tensorcap.comparison.pair import Pair
from tensorcap.comparison.pipeline import compare
from tensorcap.comparison.policy import POLICY
from tensorcap.diagnosis.diagnosis import Diagnosis, diagnose
from tensorcap.localization.curves import ChangePoint, CurvePoint, change_points
from tensorcap.localization.evidence import Evidence, EvidenceSource, is_within
from tensorcap.localization.nonfinite import nonfinite_origin
from tensorcap.localization.suspect import By, Localization, Noise, Precise, Suspect, mistake
from tensorcap.rerun.own_errors import OwnError
from tensorcap.runs.calls import Calls
from tensorcap.runs.part import Part
from tensorcap.runs.record_kinds import is_inner, is_parameter, is_result
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import TensorcapError
from tensorcap_formats.keys import ROOT_SITE

_DIAGNOSED: Final = 3  # suspects, and tensors of each
_NOISE: Final = 2.0  # times what a target differs from itself: no larger error says anything
NOISE_CAUSE: Final = "run-to-run noise"


def rank_suspects(
    reference: Archive,
    target: Archive,
    free: Comparison,
    witnesses: Sequence[EvidenceSource],
    *,
    noise: Noise | None = None,
    compute_dtype: str | None = None,
) -> Localization:
    """Rank whom the witnesses accuse, and tell what is known of each.

    Args:
        reference: The trusted archive, as it was compared.
        target: The target under the same keys.
        free: Their comparison.
        witnesses: At least one, the most trusted first; others confirm what it says, and add to it.
        noise: How the target differs from itself.
        compute_dtype: What the target computed in, where its run does not say so.
    """
    curve = _Total(free, noise)
    calls = Calls(reference)
    suspects = []
    for at, (by, accusation, witness) in enumerate(_together(witnesses)):
        examined = _examined(witness, accusation, compute_dtype) if at < _DIAGNOSED else None
        suspects.append(_suspect(accusation, by, examined, curve, calls, noise))
    suspects.sort(key=lambda one: one.cause == NOISE_CAUSE)
    owns = witnesses[0].owns
    told = {key for one in witnesses[0].accusations for key in one.keys}  # others are explained by these
    own_points = [
        CurvePoint(own.key, own.module, _value(own.error, is_bad=own.is_bad), own.is_bad and own.key in told)
        for own in owns
    ]
    notes = [note for witness in witnesses for note in witness.notes]
    ordered: tuple[ChangePoint, ...] = ()
    if reference.is_ordered:
        ordered = (*change_points(own_points, "own"), *change_points(curve.points, "total"))
    else:
        notes.append("The reference has no order of execution, so that no curve can be told.")
    found = Localization(
        tuple(suspects),
        witnesses[0].by,
        tuple(_explained(suspects, free, called_sites(reference))),
        ordered,
        nonfinite_origin(reference, target, free),
        tuple(_over_precise(owns, calls)),
        noise,
        owns,
        tuple(dict.fromkeys([*notes, *_noise_notes(noise)])),
    )
    return found if suspects else _with_open(found, free, witnesses)


def noise_between(reference: Archive, target: Archive, tested: Archive, repeated: Archive) -> Noise:
    """How two runs of a target differ.

    Args:
        reference: The trusted archive, as it was compared.
        target: The target under the same keys.
        tested: The target under its own keys.
        repeated: Another run of it.
    """
    found: dict[str, float] = {}
    for pair in compare(tested, repeated, mapping="none").pairs:
        if pair.reference is not None and pair.status != "excluded":
            is_same = pair.status == "identical"
            found[pair.key] = 0.0 if is_same else _value(pair.row_error if pair.is_compared else None)
    errors: dict[str, float] = {}
    called = called_sites(reference)
    first = module = ""
    for record in sorted(reference.records, key=lambda record: record.order):
        text = record.key.text
        if text not in target or is_inner(record.key):
            continue
        sources = target.sources[text] if isinstance(target, MappedArchive) else (target.get(text),)
        known = [found[source.key.text] for source in sources if source.key.text in found]
        errors[text] = max(known, default=math.inf)  # the other run lacks it
        if errors[text] and not first:
            is_argument = record.key.slot.startswith("input")
            first = text
            module = caller_of(record.key.site, called) if is_argument else record.key.site
    return Noise(errors, max(errors.values(), default=0.0), first, module)


def _together(witnesses: Sequence[EvidenceSource]) -> list[tuple[tuple[By, ...], Evidence, EvidenceSource]]:
    """Each accused module once: by whom, and what the most trusted of them says.

    What a later witness alone says counts unless it is of a module around or within one that an earlier
    witness accuses: that is the same mistake, seen less exactly.
    """
    found: dict[str, tuple[tuple[By, ...], Evidence, EvidenceSource]] = {}
    for witness in witnesses:
        known = list(found)
        for accusation in witness.accusations:
            module = accusation.module
            if module in found:
                by, before, first = found[module]
                found[module] = (*by, witness.by), before, first
            elif not any(is_within(module, one) or is_within(one, module) for one in known):
                found[module] = (witness.by,), accusation, witness
    return list(found.values())


def _suspect(
    accusation: Evidence,
    by: tuple[By, ...],
    examined: Diagnosis | None,
    curve: _Total,
    calls: Calls,
    noise: Noise | None,
) -> Suspect:
    module, key = accusation.module, accusation.keys[0]
    inherited, total = curve.of(module)
    floor = None if noise is None else noise.errors.get(key)
    error = accusation.own if accusation.own is not None else total
    said = mistake(examined)
    cause, reason = said.kind if said else "", accusation.reason
    if floor and (error is None or error <= _NOISE * floor):
        cause = NOISE_CAUSE
        reason += f"; the target differs from itself by {floor:.2g} there from run to run"
    elif not cause and accusation.ratio is not None and accusation.ratio > POLICY.twin_ratio.green:
        cause = label_of(accusation.ratio)
    return Suspect(
        module,
        calls.class_of(module),
        key,
        by,
        accusation.status,
        accusation.findings,
        accusation.own,
        inherited,
        total,
        accusation.ratio,
        floor,
        cause,
        reason,
        examined,
    )


def _examined(witness: EvidenceSource, accusation: Evidence, compute_dtype: str | None) -> Diagnosis | None:
    """What diagnosing the first tensor says whose values a mistake explains, else the first of all."""
    first = None
    for key in accusation.keys[:_DIAGNOSED]:
        if key not in witness.reference or key not in witness.target:
            continue
        ours, rerun = witness.reference, None
        if witness.again is not None:
            ours, rerun = _until(ours, key), witness.again(accusation.module, key)
        try:
            found = diagnose(ours, witness.target, key, compute_dtype=compute_dtype, rerun=rerun)
        except TensorcapError:  # complex values, or none were kept: nothing to look at
            continue
        if mistake(found) is not None:
            return found
        first = first or found
    return first


def _until(run: Archive, key: str) -> Archive:
    """What a replay had made until a tensor: what came after it was made of the target's value of it."""
    last = run.get(key).order
    return Part(run, [r for r in run.records if r.order <= last or is_parameter(r.key)])


class _Total:
    """What the target's own run says of each module: errors that arrive and that leave."""

    def __init__(self, free: Comparison, noise: Noise | None) -> None:
        self._in: dict[str, float] = {}
        self._out: dict[str, float] = {}
        self.points: list[CurvePoint] = []
        for pair in sorted(free.pairs, key=lambda p: p.reference.order if p.reference else 0):
            if pair.reference is None or is_inner(pair.reference.key):
                continue
            key = pair.reference.key
            error = pair.row_error if pair.is_compared else None
            kept = self._in if key.slot.startswith("input") else self._out
            if error is not None and key.slot.partition(".")[0] in ("input", "output"):
                kept[key.site] = max(error, kept.get(key.site, 0.0))
            if is_result(key) and pair.target is not None and pair.status != "excluded":
                value = _value(error, is_bad=not pair.is_green)
                is_noise = noise is not None and 0 < value <= _NOISE * noise.errors.get(pair.key, 0.0)
                is_bad = pair.is_required and not pair.is_green and not is_noise
                self.points.append(CurvePoint(pair.key, key.site, value, is_bad))

    def of(self, module: str) -> tuple[float | None, float | None]:
        """Inherited and total error."""
        return self._in.get(module), self._out.get(module)


def _explained(suspects: Sequence[Suspect], free: Comparison, called: set[str]) -> Iterable[tuple[str, str]]:
    """Modules around suspects whose results are wrong too, the nearest first, each with the first suspect."""
    wrong = {p.reference.key.site for p in free.pairs if _is_wrong_result(p) and p.reference}
    accused = {one.module for one in suspects}
    seen: set[str] = set()
    for suspect in suspects:
        around = suspect.module
        while around != ROOT_SITE:
            around = caller_of(around, called)
            if around in wrong and around not in accused and around not in seen:
                seen.add(around)
                yield around, suspect.module


def _is_wrong_result(pair: Pair) -> bool:
    if pair.reference is None or pair.target is None or not is_result(pair.reference.key):
        return False
    return pair.is_required and not pair.is_green


def _over_precise(owns: Sequence[OwnError], calls: Calls) -> Iterable[Precise]:
    """Modules with a result that was rounded less than the model rounds it, in execution order."""
    ratios: dict[str, float] = {}
    for own in owns:
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


def _with_open(found: Localization, free: Comparison, witnesses: Sequence[EvidenceSource]) -> Localization:
    """What was found, and what is wrong that nobody is accused of."""
    wrong = (
        pair.key for pair in free.pairs if pair.is_required and not pair.is_green and pair.status != "suspect"
    )
    unjudged = (key for witness in witnesses for key in witness.unjudged)
    keys = tuple(dict.fromkeys([*wrong, *unjudged]))
    if not keys:
        return found
    note = f"{len(keys)} tensors are not green and no module is accused of them: {keys[0]}; see tcap compare."
    return replace(found, open=keys, notes=(*found.notes, note))


def _value(error: float | None, *, is_bad: bool = True) -> float:
    """An error as a point of a curve."""
    return (math.inf if is_bad else 0.0) if error is None or math.isnan(error) else error
