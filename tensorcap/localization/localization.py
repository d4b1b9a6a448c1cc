"""Localise: which module is guilty, by replay, by injection, or by archives alone."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tensorcap.adapters.protocol import adapter_for
from tensorcap.alignment.aligned import MappingSource, sides
from tensorcap.comparison.pipeline import Source, compare, opened
from tensorcap.localization.evidence import (
    EvidenceSource,
    evidence_of_archives,
    evidence_of_injection,
    evidence_of_replay,
)
from tensorcap.localization.ranking import noise_between, rank_suspects
from tensorcap.localization.suspect import Localization
from tensorcap.rerun.injection import inject
from tensorcap.rerun.module_replay import replay_within
from tensorcap.session.capture_session import capture_workload
from tensorcap_formats.errors import UsageError

if TYPE_CHECKING:
    from tensorcap.workload.workload import Workload
    from tensorcap_formats.progress import Progress


def localize(
    reference: Source,
    target: Source | None,
    workload: Workload | None = None,
    *,
    into: Workload | None = None,
    repeat: Source | None = None,
    mapping: MappingSource | Literal["none"] | None = None,
    compute_dtype: str | None = None,
    seed: int | None = None,
    into_seed: int | None = None,
    progress: Progress | None = None,
) -> Localization:
    """Rank the modules of a target by the evidence that they are wrong themselves.

    Args:
        reference: The trusted archive, open or a path.
        target: The archive under test, open or a path; if None, `into` is captured for it.
        workload: The reference's model and inputs, to be replayed on the target's values.
        into: The target and its inputs, to be run on the reference's arguments. Without this and `workload`
            the archives alone say what they can.
        repeat: Another run of the target, open or a path: what differs from run to run is no mistake.
        mapping: As for `compare`.
        compute_dtype: What the target computed in, where its run does not say so.
        seed: Of the random generators before each replay; as they are if None.
        into_seed: The same before each run of the target.
        progress: As for `capture_workload`.

    Raises:
        UsageError: The archives have nothing in common, the mapping does not fit, or there is no target.
        CaptureError: Nothing was captured.
    """
    if target is None and into is None:
        raise UsageError("no target, expected its archive or a workload to inject into")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tensorcap-")))
        if target is None and into is not None:
            target = folder / "target.h5"
            if into_seed is not None:
                adapter_for(into.model).seed(into_seed)
            capture_workload(into, target, progress=progress)
        assert target is not None
        trusted, tested = (stack.enter_context(opened(source)) for source in (reference, target))
        reduced, mapped = sides(trusted, tested, mapping)
        free = compare(reduced, mapped, mapping="none", compute_dtype=compute_dtype)
        witnesses: list[EvidenceSource] = []
        if workload is not None:
            done = replay_within(
                stack,
                trusted,
                workload,
                mapped,
                mapping="none",
                compute_dtype=compute_dtype,
                seed=seed,
                progress=progress,
            )
            witnesses.append(evidence_of_replay(done, seed))
        if into is not None:
            path = folder / "injected.h5"
            inject(trusted, into, path, mapping=mapping, target=tested, seed=into_seed, progress=progress)
            ours, theirs = sides(trusted, stack.enter_context(opened(path)), mapping)
            own = compare(ours, theirs, mapping="none", compute_dtype=compute_dtype)
            witnesses.append(evidence_of_injection(ours, theirs, own))
        if not witnesses:
            witnesses.append(evidence_of_archives(reduced, mapped, free))
        noise = None
        if repeat is not None:
            noise = noise_between(reduced, mapped, tested, stack.enter_context(opened(repeat)))
        return rank_suspects(reduced, mapped, free, witnesses, noise=noise, compute_dtype=compute_dtype)
