"""Localize: rank the modules that may be wrong, by replay, by injection, or by archives alone."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from tensorcap.alignment import Aligned, MappingSource, aligned_sides
from tensorcap.comparison import compare, digest_warnings, exchanged_operations, require_readable
from tensorcap.comparison.preflight import item_text, preflight
from tensorcap.localization.differing_operations import add_differing_operations
from tensorcap.localization.evidence import GatheredEvidence, gather_evidence
from tensorcap.localization.operations import gather_operation_evidence, why_not_injectable
from tensorcap.localization.ranking import noise_between, rank_suspects
from tensorcap.localization.suspect import Localization
from tensorcap.rerun import is_compiled, open_run
from tensorcap.wording import FEW
from tensorcap_formats.errors import UsageError
from tensorcap_formats.open import Source, opened, opened_both
from tensorcap_formats.progress import Progress, Silent

if TYPE_CHECKING:
    from tensorcap.workload import Workload


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
        remarks: list[str] = []
        aligned: Aligned | None = None
        if is_compiled(trusted, tested):
            operations = gather_operation_evidence(
                trusted, tested, reference_model, compute_dtype=compute_dtype, progress=progress
            )
            compared, free = operations.sides, operations.free
            require_readable(free.pairs)
            gathered = GatheredEvidence((operations.source,), None, operations.replay_error, None)
            remarks += [] if target_model is None else [f"No injection: {why_not_injectable(tested)}."]
        else:
            ours, theirs, aligned = aligned_sides(trusted, tested, mapping)
            compared = ours, theirs
            free = compare(*compared, mapping="none", compute_dtype=compute_dtype)
            require_readable(free.pairs)
            gathered = gather_evidence(
                stack,
                trusted,
                tested,
                free,
                compared=compared,
                reference_model=reference_model,
                target_model=target_model,
                mapping=mapping,
                aligned=aligned,
                compute_dtype=compute_dtype,
                progress=progress,
            )
        if gathered.injection_error is not None and gathered.sources[0].by == "archives":
            raise gathered.injection_error
        noise = None
        if target_repeat is not None:
            noise = noise_between(*compared, tested, stack.enter_context(opened(target_repeat)))
        localization = rank_suspects(
            *compared,
            free,
            gathered.sources,
            noise=noise,
            compute_dtype=compute_dtype,
            is_exhaustive=exhaustive,
        )
        localization = add_differing_operations(
            localization,
            trusted,
            tested,
            compared[1],
            reference_model=reference_model,
            target_model=target_model,
            mapping=aligned or mapping,
            progress=progress,
        )
        notes = [
            f"No {what}: {error}."
            for what, error in (("replay", gathered.replay_error), ("injection", gathered.injection_error))
            if error is not None
        ]
        notes += [
            f"The {side} is incomplete: its run ended early."
            for side, archive in (("reference", trusted), ("target", tested))
            if not archive.is_complete
        ]
        causes = [] if free.is_green else preflight(*compared, layers=free.layers).explaining[:FEW]
        before = [f"Before any tensor: {item_text(item)}" for item in causes]
        before += [one.text for one in exchanged_operations(free.pairs, *compared)]
        return replace(
            localization,
            notes=(*before, *localization.notes, *notes, *remarks, *digest_warnings(free.pairs)),
            is_incomplete=bool(notes),
        )
