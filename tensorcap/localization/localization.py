"""Localize: rank the modules that may be wrong, by replay, by injection, or by archives alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from tensorcap.alignment import Aligned, MappingSource, aligned_sides
from tensorcap.comparison import (
    Comparison,
    compare,
    digest_warnings,
    exchanged_operations,
    require_readable,
)
from tensorcap.comparison.preflight import Item, item_text, preflight
from tensorcap.localization.differing_operations import add_differing_operations
from tensorcap.localization.evidence import ComparedRuns, GatheredEvidence, gather_evidence
from tensorcap.localization.operations import gather_operation_evidence, why_not_injectable
from tensorcap.localization.ranking import noise_between, rank_suspects
from tensorcap.localization.suspect import Localization
from tensorcap.rerun import is_compiled, open_run
from tensorcap.wording import FEW, counted
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError
from tensorcap_formats.open import Source, opened, opened_both
from tensorcap_formats.progress import Progress, Silent

if TYPE_CHECKING:
    from tensorcap.workload import Workload

_SETTINGS: Final = ("mode", "config", "hyperparameters")  # what a port sets, unlike what it is made of


def localize(
    reference: Source,
    target: Source | None = None,
    *,
    reference_model: Workload | None = None,
    target_model: Workload | None = None,
    target_repeat: Source | None = None,
    mapping: MappingSource | Literal["none"] | None = None,
    compute_dtype: str | None = None,
    exhaustive: bool = False,
    progress: Progress | None = None,
) -> Localization:
    """Rank the modules of a target by the evidence that they are wrong themselves.

    Args:
        reference: The trusted archive, open or a path.
        target: The archive under test, open or a path; if None, `target_model` is captured for it.
        reference_model: The reference's model, inputs and seed, to be replayed on the target's values.
        target_model: The target's model, inputs and seed, to be run on the reference's arguments. Without
            both models the archives alone say what they can.
        target_repeat: Another run of the target, open or a path: what differs from run to run is no mistake.
        mapping: As for `compare`.
        compute_dtype: What the target computed in, if its run does not say so.
        exhaustive: Whether every possible cause of a suspect is tried, however long that takes; otherwise
            the search has a bound, and a suspect says how much of it was made (`tried`, `possible`).
        progress: Shows what is being run.

    Raises:
        UsageError: The archives have nothing in common, the mapping does not fit, there is no target, or no
            evidence but that of a target on which the reference's tensors do not fit.
        CaptureError: Nothing was captured.
        ReadError: Bytes of a tensor that is compared are damaged: that accuses nobody.
    """
    progress = progress or Silent()
    with ExitStack() as stack:
        if target is None:
            if target_model is None:
                raise UsageError("no target, expected its archive or a workload to inject into")
            target = open_run(stack, target_model, "running the target as it is", progress=progress)
        trusted, tested = stack.enter_context(opened_both(reference, target))
        models = _Models(reference_model, target_model)
        runs = _compare_runs(stack, trusted, tested, models, mapping, compute_dtype, progress)
        if runs.gathered.injection_error is not None and runs.gathered.sources[0].by == "archives":
            raise runs.gathered.injection_error
        noise = None
        if target_repeat is not None:
            noise = noise_between(*runs.sides, tested, stack.enter_context(opened(target_repeat)))
        localization = rank_suspects(
            *runs.sides,
            runs.free,
            runs.gathered.sources,
            noise=noise,
            compute_dtype=compute_dtype,
            is_exhaustive=exhaustive,
        )
        localization = add_differing_operations(
            localization,
            trusted,
            tested,
            runs.sides[1],
            reference_model=reference_model,
            target_model=target_model,
            mapping=runs.aligned or mapping,
            progress=progress,
        )
        causes = [] if runs.free.is_green else preflight(*runs.sides, layers=runs.free.layers).explaining
        localization = _with_settings(localization, runs.free, causes)
        missing = _missing_notes(runs.gathered, trusted, tested)
        notes = (*_notes_before(runs, causes), *localization.notes, *missing, *runs.remarks)
        return replace(
            localization, notes=(*notes, *digest_warnings(runs.free.pairs)), is_incomplete=bool(missing)
        )


class _Models(NamedTuple):
    """The models of both sides that can be run; None of a side that is known by its archive alone."""

    reference: Workload | None
    target: Workload | None


@dataclass(frozen=True, slots=True)
class _Runs(ComparedRuns):
    """Both runs under one set of keys.

    Attributes:
        aligned: How keys were mapped; None if both are programs, of which operations are paired.
        remarks: What was not run and why, sentences.
    """

    aligned: Aligned | None = None
    remarks: tuple[str, ...] = ()


def _compare_runs(
    stack: ExitStack,
    trusted: Archive,
    tested: Archive,
    models: _Models,
    mapping: MappingSource | Literal["none"] | None,
    compute_dtype: str | None,
    progress: Progress,
) -> _Runs:
    """Compare the free runs, and gather the evidence of others: of operations if the target is compiled."""
    if is_compiled(trusted, tested):
        runs = gather_operation_evidence(
            trusted, tested, models.reference, compute_dtype=compute_dtype, progress=progress
        )
        require_readable(runs.free.pairs)
        why_not = None if models.target is None else f"No injection: {why_not_injectable(tested)}."
        remarks = () if why_not is None else (why_not,)
        return _Runs(runs.sides, runs.free, runs.gathered, remarks=remarks)
    ours, theirs, aligned = aligned_sides(trusted, tested, mapping)
    free = compare(ours, theirs, mapping="none", compute_dtype=compute_dtype)
    require_readable(free.pairs)
    gathered = gather_evidence(
        stack,
        trusted,
        tested,
        free,
        compared=(ours, theirs),
        reference_model=models.reference,
        target_model=models.target,
        mapping=mapping,
        aligned=aligned,
        compute_dtype=compute_dtype,
        progress=progress,
    )
    return _Runs((ours, theirs), free, gathered, aligned)


def _missing_notes(gathered: GatheredEvidence, reference: Archive, target: Archive) -> list[str]:
    """What is missing of the evidence, a sentence each: runs that failed, and those that ended early."""
    errors = (("replay", gathered.replay_error), ("injection", gathered.injection_error))
    notes = [f"No {what}: {error}." for what, error in errors if error is not None]
    for side, archive in (("reference", reference), ("target", target)):
        if not archive.is_complete:
            notes.append(f"The {side} is incomplete: its run ended early.")
    return notes


def _with_settings(localization: Localization, free: Comparison, causes: Sequence[Item]) -> Localization:
    """Add settings that differ before any tensor, if nobody is accused of what is not green.

    Errors that are `suspect` only are open then: they are not known to have grown of rounding alone.
    """
    settings = tuple(item_text(item) for item in causes if item.kind in _SETTINGS)
    undone = {own.key for own in localization.own_errors if own.is_undone}
    pairs = [pair for pair in free.pairs if pair.is_required and pair.is_compared and not pair.is_green]
    wrong = tuple(pair.key for pair in pairs if pair.key not in undone)
    if localization.suspects or not settings or not wrong:
        return localization
    localization = replace(localization, settings=settings)
    if localization.open:
        return localization
    not_green = f"{counted(len(wrong), 'tensor', 'are')} not green"
    note = f"{not_green}, which what is set otherwise may cause: {wrong[0]}."
    return replace(localization, open=wrong, notes=(note, *localization.notes))


def _notes_before(runs: _Runs, causes: Sequence[Item]) -> list[str]:
    """What may explain the differences before any tensor is looked at, a sentence each."""
    notes = [f"Before any tensor: {item_text(item)}" for item in causes[:FEW]]
    return notes + [one.text for one in exchanged_operations(runs.free.pairs, *runs.sides)]
