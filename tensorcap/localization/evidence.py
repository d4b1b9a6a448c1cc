"""What speaks against which module: a replay, an injected run, or two archives alone."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from tensorcap.alignment import Aligned, MappedArchive, MappingSource
from tensorcap.comparison import (
    ABSENT,
    EVIDENCE_TESTS,
    GREEN,
    POLICY,
    SEVERITY,
    Comparison,
    Divergence,
    Finding,
    FoldedResults,
    Givers,
    Injected,
    Inputs,
    Pair,
    Status,
    called_sites,
    caller_of,
    first_divergence,
    has_only_grown,
    is_circumstance,
    state_writer,
)
from tensorcap.diagnosis import Family
from tensorcap.localization.error_origins import ErrorOrigins, has_arguments
from tensorcap.localization.suspect import By, Operation
from tensorcap.rerun import BAD, InjectedRun, OpenReplay, OwnError, replay_within, run_injected
from tensorcap.runs import (
    Calls,
    Contents,
    StateWriters,
    calls_of,
    contents_of,
    is_inner,
    is_parameter,
    is_result,
    is_telling,
    lies_within,
)
from tensorcap.wording import name_pattern, some
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import Key
from tensorcap_formats.progress import Progress, Silent
from tensorcap_formats.records import Record

if TYPE_CHECKING:
    from tensorcap.adapters import Rerun
    from tensorcap.workload import Workload

RerunCall = Callable[[str, str], "Rerun | None"]

_CLEARLY: Final = 8.0  # times smaller than what a difference leaves is an error that shows none, as in CMP-55
_FAR_ABOVE: Final = 10.0  # times the total error: errors add up as roots of squares, and hardly cancel so far
_MOST: Final = 8  # suspects by archives alone: of more, none stands out
_UNLIKE: Final = ("unequal_copies", "unequal_since")  # findings about ranks that hold unlike tensors
_MADE: Final = {
    "result": "its own result",
    "argument": "what its code hands on",
    "state": "the state that it leaves behind",
}
_ARCHIVES_ALONE: Final = (
    "No model was replayed: the archives alone tell a mistake only where it stands out of what errors do "
    "anyway."
)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What speaks against one module.

    Attributes:
        module: Its site.
        keys: Key texts of tensors, the one that speaks most against it first.
        status: The status of that one.
        findings: One for each test that looked at it.
        own: Row error that the module makes itself; None if not known.
        ratio: R of that against a twin; None without one.
        reason: Why the module is suspected, as a sentence.
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
    """One way to tell own errors from inherited ones, and the evidence that it gave.

    Attributes:
        by: Which way.
        reference: What each module should have made.
        target: What it made, under the same keys.
        rerun_call: Makes the call again by which the reference's module made a tensor, given the module and
            the key text; None if no model was replayed. If one was, each result was replaced after it was
            recorded, so that what comes after a tensor says nothing of it.
        evidence: Against each suspected module, the first suspect first.
        own_errors: What each module made itself, in execution order.
        unjudged: Key texts of what it should have judged and could not, or that is not green by so little
            that no module is suspected of it.
        notes: What a reader should know, as sentences.
        operations: The operation that a suspect is, by its site, if it is one of a compiled target.
        mistakes: Makes hypotheses about the operation that made a tensor, given its key text.
    """

    by: By
    reference: Archive
    target: Archive
    rerun_call: RerunCall | None
    evidence: tuple[Evidence, ...]
    own_errors: Sequence[OwnError] = ()
    unjudged: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    operations: Mapping[str, Operation] = field(default_factory=dict)
    mistakes: Callable[[str], Family] | None = None


class Totals:
    """The errors of the free runs, which an error that a module makes itself does not exceed.

    A module that gives the reference's values in the free run is not wrong if it gives others for arguments
    that it was not made for: a pair of arguments that do not belong together, a factor that the one side has
    in another module.

    Args:
        free: The comparison of the free runs.

    Attributes:
        exceeded: Key texts of own errors that lie far above the total ones.
    """

    def __init__(self, free: Comparison) -> None:
        self._green = {pair.key for pair in free.pairs if pair.is_compared and pair.is_green}
        self._errors = {pair.key: pair.row_error for pair in free.pairs if pair.is_compared}
        self._explained = {pair.key for pair in free.pairs if pair.is_compared and pair.status == "explained"}
        self._patterns = {name_pattern(key) for key in self._explained}
        self.exceeded: dict[str, None] = {}

    def are_exceeded_by(self, key: str, error: float | None) -> bool:
        """Whether an error lies far above the total one of the same tensor; if so, it is noted."""
        if not self.are_far_below(key, error):
            return False
        self.exceeded[key] = None
        return True

    def are_far_below(self, key: str, error: float | None) -> bool:
        """Whether an error lies far above the total one of the same tensor."""
        total = self._errors.get(key)
        return total is not None and error is not None and error > _FAR_ABOVE * total

    def explain(self, own: OwnError) -> bool:
        """Whether a result or a state differs in the free run too, and is undone there by what follows it."""
        is_result = own.made != "argument" or Key.parse(own.key).slot.startswith("output")
        return is_result and self.has_explained(own.key)

    def explain_alike(self, own: OwnError, folded: FoldedResults) -> bool:
        """Whether a result differs as one of another layer that is undone in the free run, and by as little.

        Args:
            own: The error that the module makes itself.
            folded: Of what the module should have made, and what it made.
        """
        is_result = Key.parse(own.key).slot.startswith("output")
        return is_result and name_pattern(own.key) in self._patterns and folded.is_folded(own.key)

    def has_explained(self, key: str) -> bool:
        """Whether a tensor differs in the free run too, and is undone there by what follows it."""
        return key in self._explained

    @property
    def unjudged(self) -> Iterator[str]:
        """Key texts of errors that were noted and that the free runs do not find right."""
        return (key for key in self.exceeded if key not in self._green)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know of them, a sentence or none."""
        if not self.exceeded:
            return ()
        return (
            f"{some(list(self.exceeded))}: differs far less in the free run than with values of the other "
            "side, which therefore do not belong there; nobody is accused of it.",
        )


@dataclass(frozen=True, slots=True)
class GatheredEvidence:
    """All evidence that models and archives at hand give.

    Attributes:
        sources: At least one, the most trusted first.
        injection: The injected run; None without one.
        replay_error: Why the reference's model could not be replayed; None if it was, or if there is none.
        injection_error: Why the target could not be injected; None if it was, or if there is none.
    """

    sources: Sequence[EvidenceSource]
    injection: InjectedRun | None
    replay_error: UsageError | None
    injection_error: UsageError | None


@dataclass(frozen=True, slots=True)
class ComparedRuns:
    """Two free runs, and what speaks against modules or operations of the target.

    Attributes:
        sides: Both archives as they were compared.
        free: Their comparison.
        gathered: The evidence.
    """

    sides: tuple[Archive, Archive]
    free: Comparison
    gathered: GatheredEvidence


def gather_evidence(
    stack: ExitStack,
    reference: Archive,
    target: Archive,
    free: Comparison,
    *,
    compared: tuple[Archive, Archive],
    reference_model: Workload | None = None,
    target_model: Workload | None = None,
    mapping: MappingSource | Literal["none"] | None = None,
    aligned: Aligned | None = None,
    compute_dtype: str | None = None,
    injected_path: Path | None = None,
    reference_path: Path | None = None,
    progress: Progress | None = None,
) -> GatheredEvidence:
    """Gather what speaks against modules; archives stay open for as long as the stack does.

    1. If the reference's model is known, it is replayed on the target's values.
    2. If the target's model is known, it is run on the reference's arguments, and compared.
    3. A model on which the other side's values do not fit is left out.
    4. Without a model the comparison of the free runs gives evidence. So it does if an argument that was left
       in place is not known, of tensors that models could not judge for that: if these gave no evidence, or
       within the one module that an injected run alone accuses.
    5. What ranks of the target hold unlike is evidence beside them: a replay has the tensors of one rank.

    Args:
        stack: Closes what is opened.
        reference: The trusted archive.
        target: The archive under test, under its own keys.
        free: The comparison of both.
        compared: Both as they were compared, under the same keys.
        reference_model: The reference's model, inputs and seed.
        target_model: The target's model, inputs and seed.
        mapping: As for `compare`.
        aligned: What it comes to between both archives, if that is known.
        compute_dtype: What the target computed in, if its run does not say so.
        injected_path: Where to put the archive of the injected run; in a temporary folder if None.
        reference_path: As `source_path` of `inject`.
        progress: Shows what is being run.

    Raises:
        CaptureError: A run gave nothing.
    """
    progress = progress or Silent()
    sources = []
    injection: InjectedRun | None = None
    replay_error: UsageError | None = None
    injection_error: UsageError | None = None
    if reference_model is not None:
        try:
            opened_replay = replay_within(
                stack,
                reference,
                reference_model,
                compared[1],
                seen=compared[0],
                mapping="none",
                compute_dtype=compute_dtype,
                free=free,
                progress=progress,
            )
        except UsageError as error:  # nothing that the target has can stand in the reference
            replay_error = error
        else:
            sources.append(evidence_of_replay(opened_replay, free))
    if target_model is not None:
        path = injected_path
        if path is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tensorcap-"))
            path = Path(folder) / "injected.h5"
        try:
            injection = run_injected(
                stack,
                reference,
                target_model,
                path,
                target=target,
                compared=compared[1],
                free=free,
                mapping=mapping,
                aligned=aligned,
                compute_dtype=compute_dtype,
                source_path=reference_path,
                progress=progress,
            )
        except UsageError as error:  # a tensor does not fit, or nothing belongs together
            injection_error = error
        else:
            sources.append(evidence_of_injection(injection, free))
    if not sources:
        sources.append(evidence_of_archives(*compared, free))
    elif injection is not None and injection.unknown:
        has_evidence = any(source.evidence for source in sources)
        if not has_evidence or len(sources) == 1:
            archives = _of_unjudged(evidence_of_archives(*compared, free), sources)
            if has_evidence:
                sources = with_modules_within(sources[0], archives, injection)
            else:
                sources.append(archives)
    if sources[0].by != "archives" and (ranks := evidence_of_ranks(*compared, free)):
        sources.append(ranks)
    return GatheredEvidence(sources, injection, replay_error, injection_error)


def _of_unjudged(archives: EvidenceSource, sources: Sequence[EvidenceSource]) -> EvidenceSource:
    """The evidence of free runs by tensors that no run with a model judged."""
    judged = {own.key for source in sources for own in source.own_errors if own.status != "unjudged"}
    evidence = tuple(one for one in archives.evidence if judged.isdisjoint(one.keys))
    return replace(archives, evidence=evidence, unjudged=(), notes=())


def with_modules_within(
    injected: EvidenceSource, archives: EvidenceSource, run: InjectedRun
) -> list[EvidenceSource]:
    """Both, if free runs accuse modules within the one that alone is accused by an injected run; else that.

    What such a module made could not be judged in the injected run, for an argument that is not known; of
    what lies around it is known that it is wrong (LCL-312).
    """
    modules = [one.module for one in injected.evidence]
    within = tuple(
        one
        for one in archives.evidence
        if lies_within(one.module, modules[0]) and not set(run.unjudged).isdisjoint(one.keys)
    )
    if not within or len(modules) > 1:
        return [injected]
    return [replace(injected, evidence=()), replace(archives, evidence=within)]


def evidence_of_replay(opened_replay: OpenReplay, free: Comparison) -> EvidenceSource:
    """What the reference's model shows that was run on the target's values.

    If no arguments were recorded, a result is that of all code since what is known before it (LCL-260).

    Args:
        opened_replay: Its run.
        free: The comparison of the free runs: an own error far above the total one accuses nobody.
    """
    result, totals, reference = opened_replay.replay, Totals(free), opened_replay.reference
    is_partial = bool(result.bad) and not has_arguments(reference)
    origins = ErrorOrigins(reference, opened_replay.target, free.pairs) if is_partial else None
    pairs = {pair.key: pair for pair in free.pairs} if is_partial else {}
    folded = FoldedResults(opened_replay.run, opened_replay.target, ())
    uses = _ReplayedUses(opened_replay)
    bad: dict[str, list[OwnError]] = {}
    for own in result.bad:
        if totals.explain(own):
            continue
        if totals.explain_alike(own, folded) and not uses.are_right(own.key):
            continue
        if totals.are_exceeded_by(own.key, own.error):
            continue
        pair = pairs.get(own.key)
        module = origins.module_of(pair, free.pairs) if origins is not None and pair is not None else ""
        if module not in ("", own.module):
            own = replace(own, module=module, made="argument")
        bad.setdefault(own.module, []).append(own)
    return EvidenceSource(
        "replay",
        opened_replay.run,
        opened_replay.target,
        opened_replay.rerun_call,
        _ranked(bad, calls_of(opened_replay.reference), "is wrong for what the target gave it"),
        result.own_errors,
        unjudged=(*result.lacking, *(own.key for own in result.unjudged), *totals.unjudged),
        notes=(*result.notes, *totals.notes),
    )


class _ReplayedUses:
    """What the reference's code made of the target's results, by factors and terms.

    Args:
        opened_replay: The run.
    """

    def __init__(self, opened_replay: OpenReplay) -> None:
        reference = opened_replay.reference
        self._injected = Injected(opened_replay.run, reference)
        self._folded = FoldedResults(reference, opened_replay.target, ())
        own_errors = (own for own in opened_replay.replay.own_errors if own.status in GREEN)
        self._errors = {own.key: own.error for own in own_errors if own.error is not None}

    def are_right(self, key: str) -> bool:
        """Whether some of it is what the target makes of a result, which nothing is folded into then.

        Its error has to be far smaller than what the difference of the result leaves in it.
        """
        if not self._injected.is_replaced(Key.parse(key)):
            return False
        changes = self._folded.changes_of_next(key).items()
        return any(self._errors.get(made, math.inf) * _CLEARLY <= change for made, change in changes)


def evidence_of_injection(run: InjectedRun, free: Comparison) -> EvidenceSource:
    """What a target shows that was run on the reference's arguments.

    1. Nobody is accused of what the free runs excuse, nor who hands it on (LCL-301). Nor is anybody of what
       leads to nothing, in the free runs or in this one (LCL-313). A result that could not be judged is its
       own module's, not of who hands it on (LCL-311).
    2. Results are natural, so that an error goes on into what the code around a module makes of it: evidence
       against a module that has an earlier suspect within it adds nothing.
    3. In low precision what stands out a little is a note (LCL-300). It accuses nobody around it either, but
       hides nothing there that is far larger.
    4. If there is neither, the first divergence is evidence.

    Args:
        run: The injected run.
        free: The comparison of the free runs: an own error far above the total one accuses nobody.
    """
    totals = Totals(free)
    origins = ErrorOrigins(run.reference, run.target, free.pairs)
    free_pairs = {pair.key: pair for pair in free.pairs}
    undone = _undone_in_run(run)
    makers = _makers_of_arguments(run)
    precision = POLICY.precision_of_runs(run.reference.info, run.target.info)
    is_wide = precision is None or precision.is_wide
    folded = FoldedResults(run.reference, run.target, ())
    bad: dict[str, list[OwnError]] = {}
    unclear: dict[str, list[OwnError]] = {}
    excused: set[str] = set()  # key texts
    for own in run.own_errors:
        if not own.is_bad:
            continue
        is_undone = totals.explain(own) or totals.explain_alike(own, folded)
        if is_undone or totals.are_exceeded_by(own.key, own.error):
            excused.add(own.key)
            continue
        made_by = makers.get(own.key, ())
        if any(maker.text in excused for maker in made_by) or any(
            is_within(module, maker.site) for maker in made_by for module in (*bad, *unclear)
        ):
            continue
        pair = free_pairs.get(own.key)
        if own.key in undone or (pair is not None and origins.is_undone(pair)):
            continue
        unjudged = next((maker for maker in made_by if maker.text in run.unjudged), None)
        if unjudged is not None:
            own = replace(own, key=unjudged.text, module=unjudged.site, made="result")
        elif pair is not None:
            own = _of_maker(own, origins, pair, free.pairs)
        within = [module for module in bad if is_within(module, own.module)]
        if (within and own.module not in bad) or _comes_of(own, unclear):
            continue
        is_accusing = is_wide or _is_clear(own)
        (bad if is_accusing else unclear).setdefault(own.module, []).append(own)
    for module, errors in bad.items():
        errors += unclear.pop(module, ())
    how, calls = "is wrong though it was given the reference's tensors", calls_of(run.reference)
    evidence, little = _ranked(bad, calls, how), _ranked(unclear, calls, how)
    if not evidence and not little:
        divergence = _first_not_excused(run, totals, origins, makers, undone)
        first = _of_divergence(run.reference, divergence, run.comparison.pairs)
        first = tuple(_at_maker(one, origins, free_pairs, free.pairs) for one in first)
        evidence = tuple(one for one in first if is_wide or _is_clear(one))
        little = tuple(one for one in first if one not in evidence)
    notes = (*totals.notes, *map(_note_of_unclear, little))
    if run.unknown:
        notes += (
            "Arguments that were left as they were and are not known in the reference: "
            f"{len(run.unknown)}, first {run.unknown[0]}; errors of what was made of them may be "
            "inherited.",
        )
    return EvidenceSource(
        "injection",
        run.reference,
        run.target,
        None,
        evidence,
        run.own_errors,
        unjudged=(*totals.unjudged, *(one.keys[0] for one in little), *_not_judged(run, free)),
        notes=notes,
    )


def _undone_in_run(run: InjectedRun) -> set[str]:
    """Key texts of results that lead to nothing in an injected run (LCL-313).

    What the code around a module makes of its result shows that: all of it is judged, and right. An argument
    of a further call that the result is handed on as was replaced, and does not.
    """
    if run.comparison.divergence is None and not any(own.is_bad for own in run.own_errors):
        return set()
    origins = ErrorOrigins(run.reference, run.target, run.comparison.pairs)
    called = called_sites(run.reference)
    right = {own.module for own in run.own_errors if own.made == "result" and own.status != "unjudged"}
    right -= {own.module for own in run.own_errors if own.is_bad}
    handed_on = {contents_of(r) for r in run.reference.records if r.key.slot.startswith("input")}
    return {
        pair.key
        for pair in run.comparison.pairs
        if pair.reference is not None
        and is_result(pair.reference.key)
        and contents_of(pair.reference) not in handed_on
        and caller_of(pair.reference.key.site, called) in right
        and origins.is_undone(pair)
    }


def _not_judged(run: InjectedRun, free: Comparison) -> Iterator[str]:
    """Key texts of what an argument that is not known leaves unjudged and the free runs do not find right."""
    wrong = {pair.key for pair in free.pairs if pair.is_required and not pair.is_green}
    return (key for key in run.unjudged if key in wrong)


def _comes_of(own: OwnError, unclear: Mapping[str, Sequence[OwnError]]) -> bool:
    """Whether an error may come of those that modules within its own make, which stand out a little."""
    errors = [
        one.error or 0.0
        for module, within in unclear.items()
        if module != own.module and is_within(module, own.module)
        for one in within
    ]
    return bool(errors) and own.error is not None and own.error <= _FAR_ABOVE * max(errors)


def _first_not_excused(
    run: InjectedRun,
    totals: Totals,
    origins: ErrorOrigins,
    makers: Mapping[str, Sequence[Key]],
    undone: Collection[str],
) -> Divergence | None:
    """The first divergence of an injected run but for what the free runs excuse (LCL-301).

    What comes before it and lies far above its total error is noted.
    """
    wrong = [p for p in run.comparison.pairs if p.is_required and not p.is_green and not has_only_grown(p)]
    far = {pair.key for pair in wrong if pair.is_compared and totals.are_far_below(pair.key, pair.row_error)}
    excused = (
        far | set(undone) | {p.key for p in wrong if totals.has_explained(p.key) or origins.is_undone(p)}
    )
    excused |= {key for key, results in makers.items() if any(one.text in excused for one in results)}
    pairs = [pair for pair in run.comparison.pairs if pair.key not in excused]
    divergence = first_divergence(run.reference, pairs) if excused else run.comparison.divergence
    last = "" if divergence is None or divergence.is_growth else divergence.pair.key
    for pair in takewhile(lambda pair: pair.key != last, wrong):
        if pair.key in far:
            totals.exceeded[pair.key] = None
    return divergence


def _makers_of_arguments(run: InjectedRun) -> dict[str, list[Key]]:
    """The results that an argument is, on both sides, bit for bit, by its key text (LCL-270).

    Whoever hands it on is not wrong, though the target has no such module and calls what lies in it itself.
    """
    target = run.target
    results: dict[tuple[object, ...], list[Key]] = {}
    makers: dict[str, list[Key]] = {}
    for record in sorted(run.reference.records, key=lambda record: record.order):
        key = record.key
        if key.text not in target or not is_telling(record):
            continue
        sources = target.sources[key.text] if isinstance(target, MappedArchive) else (target.get(key.text),)
        held = (contents_of(record), *(source.digest for source in sources))
        if not all(held[1:]):
            continue
        if is_result(key):
            results.setdefault(held, []).append(key)
        elif key.slot.startswith("input"):
            makers[key.text] = results.get(held, [])
    return makers


def _of_maker(own: OwnError, origins: ErrorOrigins, pair: Pair, pairs: Sequence[Pair]) -> OwnError:
    """An own error of the module that made the tensor, if another one only hands it on (LCL-262)."""
    if own.made != "argument" or own.module in origins.gap(pair).modules:
        return own
    return replace(own, module=origins.module_of(pair, pairs) or own.module)


def _at_maker(
    evidence: Evidence, origins: ErrorOrigins, free: Mapping[str, Pair], pairs: Sequence[Pair]
) -> Evidence:
    """Evidence by an argument against the module that made it, if another one only hands it on (LCL-262)."""
    pair, module = free.get(evidence.keys[0]), evidence.module
    is_argument = (
        pair is not None and pair.reference is not None and pair.reference.key.slot.startswith("input")
    )
    if pair is None or not is_argument or module in origins.gap(pair).modules:
        return evidence
    maker = origins.module_of(pair, pairs)
    if maker in ("", module):
        return evidence
    return replace(evidence, module=maker, reason=f"{module} hands this on, which is made in {maker}.")


def evidence_of_archives(reference: Archive, target: Archive, free: Comparison) -> EvidenceSource:
    """What the comparison of two free runs shows.

    1. The module of the first divergence is suspected, if that is no matter of a limit.
    2. So are modules whose gain is much too large, in execution order, up to eight; but not those whose
       error is undone by what is computed of it (CMP-55), down to what they were given.

    Args:
        reference: The trusted archive, as it was compared.
        target: The target under the same keys.
        free: Their comparison.
    """
    notes = [_ARCHIVES_ALONE]
    givers, writers = Givers.of_pairs(reference, free.pairs), StateWriters(reference)
    origins = ErrorOrigins(reference, target, free.pairs)
    pairs = [pair for pair in free.pairs if not origins.is_undone(pair)]
    first = _of_first_error(reference, origins, pairs)
    suspected = {one.module: one for one in first if _is_clear(one)}
    unclear = [one for one in first if one.module not in suspected]
    notes += map(_note_of_unclear, unclear)
    inputs, takers = Inputs(reference, free.pairs), _Takers(free.pairs)
    for pair in pairs if first else ():
        finding = _excessive_gain(pair)
        if not pair.is_required or (finding is not None and takers.undo(pair, inputs.of(pair))):
            continue
        if _has_unlike_arguments(inputs.of(pair)):
            continue
        if len(suspected) < _MOST and pair.reference is not None and finding is not None:
            module = state_writer(writers, pair) or _maker(pair.reference, givers)
            suspected.setdefault(module, _of_pair(module, pair, finding.text))
    return EvidenceSource(
        "archives",
        reference,
        target,
        None,
        tuple(suspected.values()),
        unjudged=tuple(one.keys[0] for one in unclear),
        notes=tuple(notes),
    )


def evidence_of_ranks(reference: Archive, target: Archive, free: Comparison) -> EvidenceSource | None:
    """The first tensor that ranks hold unlike though they should hold the same; None if there is none."""
    for pair in free.pairs:
        finding = next((f for f in pair.findings if f.test == "unequal_copies"), None)
        if finding is not None and pair.reference is not None:
            module = _maker(pair.reference, Givers.of_pairs(reference, free.pairs))
            evidence = _of_pair(module, pair, finding.text)
            return EvidenceSource("archives", reference, target, None, (evidence,))
    return None


def _maker(record: Record, givers: Givers) -> str:
    """The module whose code made a result, or gave a call one of its arguments."""
    key = record.key
    return givers.of(record) if key.slot.startswith("input") else key.site


def _has_unlike_arguments(arguments: Sequence[Pair]) -> bool:
    """Whether ranks gave a call unlike arguments, so that an error of what it made of them is not its own."""
    return any(finding.test in _UNLIKE for pair in arguments for finding in pair.findings)


class _Takers:
    """What is computed of each tensor that calls are given, by what it holds in the reference.

    Args:
        pairs: All pairs of the free runs.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._takers: dict[Contents, list[Pair]] = {}
        self._results: dict[str, list[Pair]] = {}
        for pair in pairs:
            record = pair.reference
            if record is None or is_inner(record.key) or is_parameter(record.key):
                continue
            if record.key.slot.startswith("output"):
                self._results.setdefault(record.key.where, []).append(pair)
            elif record.key.slot.startswith("input") and record.digest:
                self._takers.setdefault(contents_of(record), []).append(pair)

    def undo(self, pair: Pair, inputs: Sequence[Pair]) -> bool:
        """Whether all calls that are given a tensor have results as right as what it was computed of.

        Args:
            pair: The tensor.
            inputs: What the call that made it was given.
        """
        record, error = pair.reference, pair.row_error
        if record is None or not record.digest or error is None or not inputs:
            return False
        takers = self._takers.get(contents_of(record), [])
        calls = [one.reference.key.where for one in takers if one.reference is not None]
        results = [result for call in calls for result in self._results.get(call, ())]
        given = [one.row_error for one in inputs]
        left = [one.row_error for one in results if one.is_compared]
        known = [one for one in left if one is not None], [one for one in given if one is not None]
        if not left or len(known[0]) < len(left) or len(known[1]) < len(given):
            return False
        return max(known[0]) <= min(error / 2, POLICY.leaf_gain.green**2 * max(known[1]))


def is_within(module: str, outer: str) -> bool:
    """Whether a module is another one, or lies within it."""
    return module == outer or lies_within(module, outer)


def _ranked(bad: Mapping[str, Sequence[OwnError]], calls: Calls, how: str) -> tuple[Evidence, ...]:
    """Rank modules by what speaks against them: the worst status first, leaves first, then by execution."""
    order = {module: at for at, module in enumerate(bad)}
    modules = sorted(bad, key=lambda m: (-max(map(_severity, bad[m])), not calls.is_leaf(m), order[m]))
    return tuple(
        _of_own_errors(module, sorted(bad[module], key=lambda own: -_severity(own)), how)
        for module in modules
    )


def _of_own_errors(module: str, own_errors: Sequence[OwnError], how: str) -> Evidence:
    """Evidence by own errors of a module, the worst first."""
    first = own_errors[0]
    reason = f"{_MADE[first.made]} {how}"
    if first.findings:
        reason += f": {max(first.findings, key=lambda f: SEVERITY.index(f.status)).text}"
    keys = tuple(own.key for own in own_errors)
    return Evidence(module, keys, first.status, first.findings, first.error, first.ratio, reason)


def _of_first_error(reference: Archive, origins: ErrorOrigins, pairs: Sequence[Pair]) -> tuple[Evidence, ...]:
    """Evidence by the first divergence, or by an earlier error that does not come of what is known before.

    The suspect is the smallest module around all that lies between the tensor and what is known (LCL-260).
    """
    divergence = first_divergence(reference, pairs)
    evidence = _of_divergence(reference, divergence, pairs)
    jump = origins.first_jump(pairs)
    if divergence is None:
        return ()
    if jump is not None and (not evidence or _order(jump.pair) <= _order(divergence.pair)):
        findings = (*jump.pair.findings, jump.finding)
        one = _of_pair(origins.module_of(jump.pair, pairs), jump.pair, jump.finding.text)
        return (replace(one, findings=findings),)
    if not evidence:
        return ()
    module = origins.module_of(divergence.pair, pairs)
    if not module or module == divergence.module or state_writer(StateWriters(reference), divergence.pair):
        return evidence
    reason = f"What this was made of, back to what is known of both runs, was made in {module}."
    return (replace(evidence[0], module=module, reason=reason),)


def _order(pair: Pair) -> int:
    return pair.reference.order if pair.reference is not None else 0


def _of_divergence(
    reference: Archive, first: Divergence | None, pairs: Sequence[Pair]
) -> tuple[Evidence, ...]:
    """Evidence by the first divergence; none if errors only grew, or it does not say who made it."""
    if first is None or first.is_growth or first.pair.status in ABSENT:
        return ()
    if is_circumstance(first.pair, Inputs(reference, pairs).of(first.pair)):
        return ()
    return (_of_pair(first.module, first.pair, first.explanation),)


def _is_clear(evidence: Evidence | OwnError) -> bool:
    """Whether it is no matter of a limit that a correct port passes now and then."""
    is_other_function = any(f.test == "input_dependence" and f.status in BAD for f in evidence.findings)
    is_much = any(f.test in EVIDENCE_TESTS and f.status == "diverged" for f in evidence.findings)
    return evidence.status != "suspect" or is_other_function or is_much


def _note_of_unclear(evidence: Evidence) -> str:
    return f"{evidence.keys[0]} stands out a little, as now and then in a correct port: {evidence.reason}"


def _of_pair(module: str, pair: Pair, reason: str) -> Evidence:
    return Evidence(module, (pair.key,), pair.status, pair.findings, None, None, reason)


def _excessive_gain(pair: Pair) -> Finding | None:
    """The finding of a test that looks at one module alone and found much too large an error."""
    if pair.reference is None or is_inner(pair.reference.key) or is_parameter(pair.reference.key):
        return None
    return next((f for f in pair.findings if f.test in EVIDENCE_TESTS and f.status == "diverged"), None)


def _severity(own: OwnError) -> int:
    return SEVERITY.index(own.status)
