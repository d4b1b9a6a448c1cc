"""Verify a port: capture, match and compare both sides, free-running and injected, and write a report."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

from tensorcap.adapters import adapter_for
from tensorcap.alignment import Aligned, MappingSource, Order, align, aligned_sides, order_between
from tensorcap.alignment.names import read_rules
from tensorcap.comparison import Comparison, compare, holds_packed_weights, packed_weights
from tensorcap.comparison.preflight import Preflight, preflight
from tensorcap.localization import (
    ComparedRuns,
    Localization,
    Verification,
    WeightComparison,
    add_differing_operations,
    compare_weights,
    gather_evidence,
    gather_operation_evidence,
    rank_suspects,
    why_not_injectable,
)
from tensorcap.reports.verification_files import replace_folder, write_files
from tensorcap.rerun import is_compiled
from tensorcap.runs import is_parameter
from tensorcap.session import capture_workload
from tensorcap.workload import Workload
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError
from tensorcap_formats.open import Source, opened
from tensorcap_formats.progress import Progress, Silent
from tensorcap_formats.run_info import RunInfo

REFERENCE: Final = "reference.h5"
TARGET: Final = "target.h5"
_SEED: Final = 0  # of a workload without one: both of its runs have to draw the same numbers
_NOT_RUN: Final = "the target is an archive, which cannot be run again"


@dataclass(frozen=True)
class Runnable:
    """A side that is made when it is its turn.

    Attributes:
        make: Makes the workload, and further metadata of its run; for the target it is given the reference's
            archive, for the reference None.
    """

    make: Callable[[Archive | None], tuple[Workload, Mapping[str, Any]]]


Side = Runnable | Workload | Source


@dataclass(frozen=True, slots=True)
class _Run:
    """A workload that is made, with its seed, and further metadata of its run."""

    workload: Workload
    metadata: Mapping[str, Any]

    def capture(self, path: Path, **options: Any) -> Path:
        """Capture it, with further arguments of `capture`, and return where its archive is."""
        return capture_workload(self.workload, path, run=self.metadata, **options).path or path


def verify(
    reference_model: Side,
    target_model: Side,
    output: str | os.PathLike[str],
    *,
    mapping: MappingSource | None = None,
    rules: str | os.PathLike[str] | None = None,
    layers: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> Verification:
    """Verify a port, and write a folder of reports (`specs/verify.md`).

    1. Both sides are captured, unless they are archives. Of unlike frameworks the weights are compared before
       the target runs.
    2. They are aligned; what differs apart from tensors is listed; the free runs are compared.
    3. The reference's model is replayed on the target's values, and the target is run on the reference's
       arguments: this tells own errors from inherited ones.
    4. Suspects are ranked and diagnosed, and the files written.

    Args:
        reference_model: The trusted side: a workload, or an archive, open or a path.
        target_model: The side under test; it is not injected if it is an archive.
        output: The folder, which is written whole or not at all.
        mapping: What belongs together, as for `compare`.
        rules: A file of rules for names, which go before those that come with tensorcap.
        layers: Whether to write a file for each tensor too.
        force: Whether to replace a folder that an earlier verification wrote.
        progress: Shows what is done next.

    Raises:
        UsageError: The folder exists, a side is none, or the mapping does not fit.
        CaptureError: A run gave nothing.
        ReadError: An archive cannot be read.
    """
    progress = progress or Silent()
    final = Path(output)
    with replace_folder(final, force=force) as folder, ExitStack() as stack:
        is_run = isinstance(reference_model, Workload | Runnable)
        progress.stage("capturing the reference" if is_run else "opening the reference")
        reference_run = _make(reference_model, None)
        trusted, under_test = _open_reference(
            stack, reference_model, reference_run, target_model, folder / REFERENCE, progress
        )
        target_run = under_test if isinstance(under_test, _Run) else None
        weights = None
        if target_run is not None:
            weights = _compare_weights(trusted, reference_run, target_run, rules, progress)
        tested = _open_target(stack, under_test, folder / TARGET, trusted, progress)
        compared = _compare_runs(
            stack,
            (trusted, tested),
            (reference_run, target_run),
            mapping=mapping,
            rules=rules,
            injected_path=folder / "with_injection" / TARGET,
            reference_path=_final_path(trusted.path, folder, final),
            progress=progress,
        )
        progress.stage("localizing")
        localization = _localize(compared, (trusted, tested), (reference_run, target_run), weights, progress)
        verification = _verification(compared, localization, weights, tested, folder, final)
        progress.stage("writing")
        injection = compared.gathered.injection
        return write_files(
            folder,
            verification,
            compared.sides,
            (injection.reference, injection.target) if injection else None,
            originals=(trusted, tested),
            layers=layers,
        )


def _localize(
    compared: _Compared,
    originals: tuple[Archive, Archive],
    runs: tuple[_Run | None, _Run | None],
    weights: WeightComparison | None,
    progress: Progress,
) -> Localization:
    """Rank and diagnose the suspects, with operations that differ between the runs."""
    reference_model, target_model = (None if run is None else run.workload for run in runs)
    localization = rank_suspects(
        *compared.sides,
        compared.free,
        compared.gathered.sources,
        explain_weights=None if weights is None else weights.explain,
    )
    return add_differing_operations(
        localization,
        *originals,
        compared.sides[1],
        reference_model=reference_model,
        target_model=target_model,
        mapping=compared.mapping,
        progress=progress,
    )


def _verification(
    compared: _Compared,
    localization: Localization,
    weights: WeightComparison | None,
    tested: Archive,
    folder: Path,
    final: Path,
) -> Verification:
    """Put together what was found.

    Args:
        compared: The runs.
        localization: The suspects.
        weights: The comparison of weights; None if it was not made.
        tested: The target under its own keys.
        folder: Where files are written.
        final: Where they are going to be.
    """
    free, gathered = compared.free, compared.gathered
    injected = gathered.injection.comparison if gathered.injection else None
    why_not_injected, notes = compared.why_not_injected, []
    if gathered.injection_error is not None:
        why_not_injected = _outside(gathered.injection_error, folder)
    if gathered.replay_error is not None:
        notes.append(f"No replay: {_outside(gathered.replay_error, folder)}.")
    return Verification(
        final,
        compared.checklist,
        free.mapping.order if free.mapping else _order(free),
        free,
        injected,
        why_not_injected,
        gathered.injection_error is not None,
        localization,
        _inheriting(free, injected),
        weights,
        tested.info.control,
        notes,
    )


@dataclass(frozen=True, slots=True)
class _Compared(ComparedRuns):
    """Two free runs, and what else runs showed.

    Attributes:
        checklist: What differs apart from tensors.
        mapping: What belongs together, as for `inject`.
        why_not_injected: Why the target was not to be injected; "" if it was.
    """

    checklist: Preflight
    mapping: MappingSource | Aligned | None
    why_not_injected: str


def _compare_runs(
    stack: ExitStack,
    originals: tuple[Archive, Archive],
    runs: tuple[_Run | None, _Run | None],
    *,
    mapping: MappingSource | None,
    rules: str | os.PathLike[str] | None,
    injected_path: Path,
    reference_path: Path,
    progress: Progress,
) -> _Compared:
    """Align both free runs, compare them, and gather what speaks against modules or operations."""
    trusted, tested = originals
    reference_model, target_model = (None if run is None else run.workload for run in runs)
    if is_compiled(trusted, tested):
        if mapping is not None or rules is not None:
            raise UsageError(
                "a mapping is not for a compiled target: its operations are paired by the graph that it was "
                "converted from"
            )
        progress.stage("comparing")
        compared = gather_operation_evidence(trusted, tested, reference_model, progress=progress)
        checklist = preflight(*compared.sides, layers=compared.free.layers)
        why_not = why_not_injectable(tested)
        return _Compared(compared.sides, compared.free, compared.gathered, checklist, None, why_not)
    progress.stage("aligning")
    known = mapping
    aligned: Aligned | None
    if rules is None:
        ours, theirs, aligned = aligned_sides(trusted, tested, mapping)
    else:
        aligned = align(trusted, tested, mapping=mapping, rules=rules, by="all")
        known, ours, theirs = aligned.alignment, aligned.reference, aligned.target
    progress.stage("comparing")
    free = compare(ours, theirs, mapping=None if ours is not trusted else "none")
    progress.stage("looking at what differs before any tensor does")
    checklist = preflight(ours, theirs, layers=free.layers)
    if target_model is not None:
        injected_path.parent.mkdir()
    gathered = gather_evidence(
        stack,
        trusted,
        tested,
        free,
        compared=(ours, theirs),
        reference_model=reference_model,
        target_model=target_model,
        mapping=known,
        aligned=aligned,
        injected_path=injected_path,
        reference_path=reference_path,
        progress=progress,
    )
    why_not = "" if target_model is not None else _NOT_RUN
    return _Compared((ours, theirs), free, gathered, checklist, aligned or known, why_not)


def _open_reference(
    stack: ExitStack,
    side: Side,
    run: _Run | None,
    target: Side,
    path: Path,
    progress: Progress,
) -> tuple[Archive, _Run | Archive]:
    """Capture the reference, and make or open the target, which may be made of the reference's run.

    1. If the target is compiled from an exported graph, the reference is captured once more, as the same
       graph: its nodes are what the target has values of.
    2. If the target has weights in few bits, the reference is captured once more with the values of its own,
       which the target's results are held against.
    """
    source = cast("Source", side) if run is None else run.capture(path)
    with ExitStack() as first:
        trusted = first.enter_context(opened(source))
        under_test: _Run | Archive | None = _make(target, trusted)
        if under_test is None:
            progress.stage("opening the target")
            under_test = stack.enter_context(opened(cast("Source", target), reference=trusted))
        options: dict[str, Any] = {}
        decompositions = ""
        if isinstance(under_test, _Run):
            decompositions = adapter_for(under_test.workload.model).decompositions
        if run is not None and decompositions:
            progress.stage("capturing the reference's graph")
            options = {"level": "export", "decompositions": decompositions}
        elif run is not None and _has_few_bits(under_test):
            progress.stage("capturing the reference with its weights")
            options = {"params": True}
        if run is None or not options:
            stack.enter_context(first.pop_all())
            return trusted, under_test
    return stack.enter_context(opened(run.capture(path, **options))), under_test


def _open_target(
    stack: ExitStack, target: _Run | Archive, path: Path, reference: Archive, progress: Progress
) -> Archive:
    """Capture the target if it is to be run; its weights in few bits too, if the reference has its own."""
    if isinstance(target, Archive):
        return target
    progress.stage("capturing the target")
    has_values = any(is_parameter(record.key) and record.stored for record in reference.records)
    params = True if has_values and _has_few_bits(target) else None
    return stack.enter_context(opened(target.capture(path, injectable=("input",), params=params)))


def _has_few_bits(target: _Run | Archive) -> bool:
    """Whether a target has weights in few bits, whose values can be had."""
    if isinstance(target, Archive):
        return holds_packed_weights(target)
    model = target.workload.model
    return bool(packed_weights(RunInfo.of(adapter_for(model).describe(model))))


def _make(side: Side, reference: Archive | None) -> _Run | None:
    """Make the workload of a side that is to be run; None if it is an archive."""
    metadata: Mapping[str, Any] = {}
    if isinstance(side, Workload):
        workload = side
    elif isinstance(side, Runnable):
        workload, metadata = side.make(reference)
    else:
        return None
    if workload.seed is None:
        workload = replace(workload, seed=_SEED)
    return _Run(workload, metadata)


def _compare_weights(
    trusted: Archive,
    reference_run: _Run | None,
    target_run: _Run,
    rules: str | os.PathLike[str] | None,
    progress: Progress,
) -> WeightComparison | None:
    """Compare the weights of two frameworks, which a port converts.

    Returns:
        None if both sides have the same one, or if weights are compiled, and seen in what is made of them.
    """
    model = target_run.workload.model
    if adapter_for(model).decompositions:
        return None
    if trusted.info.framework == RunInfo.of(adapter_for(model).describe(model)).framework:
        return None
    progress.stage("comparing weights")
    known_rules = None if rules is None else read_rules(rules)
    reference = trusted if reference_run is None else reference_run.workload.model
    weights = compare_weights(reference, model, rules=known_rules)
    if weights is not None and weights.unlike:
        count = weights.comparison.compared
        progress.stage(f"{len(weights.unlike)} of {count} weights are not the same numbers; going on")
    return weights


def _outside(error: object, folder: Path) -> str:
    """The text of an error, with paths relative to the folder in it."""
    return str(error).replace(f"{folder}{os.sep}", "")


def _final_path(path: Path, folder: Path, final: Path) -> Path:
    """Where an archive is going to be, once the folder is in its place."""
    return final.absolute() / path.relative_to(folder) if path.is_relative_to(folder) else path


def _order(comparison: Comparison) -> Order | None:
    if not (comparison.reference.is_ordered and comparison.target.is_ordered):
        return None
    return order_between((p.reference, p.target) for p in comparison.pairs if p.reference and p.target)


def _inheriting(free: Comparison, injected: Comparison | None) -> tuple[str, ...]:
    """Key texts of what is not green in the free run, and green in the injected one."""
    if injected is None:
        return ()
    green = {pair.key for pair in injected.pairs if pair.is_green}
    return tuple(p.key for p in free.pairs if p.is_required and not p.is_green and p.key in green)
