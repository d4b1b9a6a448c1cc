"""Inject: run a target with archived tensors in the place of its own, and record its own before each."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from tensorcap.adapters import adapter_for
from tensorcap.alignment import (
    NO_MAPPING,
    Aligned,
    CutArchive,
    MappingSource,
    Reasons,
    ReversedArchive,
    align,
    aligned_if_needed,
    fed_in_common,
    in_own_steps,
    map_text,
)
from tensorcap.recording import Substitution
from tensorcap.rerun.finite_padding import with_finite_padding
from tensorcap.session import Capture, capture_workload
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import ROOT_SITE, Key, module_site
from tensorcap_formats.open import Source, open_archive, opened
from tensorcap_formats.progress import Progress, Silent

if TYPE_CHECKING:
    from tensorcap.workload import Workload

# kinds of dtypes that stand for one another
_ALIKE: Final = ({"int", "uint", "bool"}, {"float", "bool"}, {"complex"})
_CAPTURE_FIRST: Final = (
    "Capture the target without injection, and give that archive as TGT: it tells which rows, tokens and "
    "layouts both runs have."
)


def inject(
    reference: Source,
    target_model: Workload,
    output: str | os.PathLike[str] | None,
    *,
    target: Source | None = None,
    inputs: str | Iterable[str] | None = None,
    outputs: str | Iterable[str] = (),
    steps: str | Iterable[range | int] = (),
    calls: str | Iterable[range | int] = (),
    mapping: MappingSource | Aligned | Literal["none"] | None = None,
    left: Collection[str] = (),
    leaves_misfits: bool = False,
    run: Mapping[str, Any] | None = None,
    source_path: Path | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Capture:
    """Run a target once with archived tensors in the place of its own.

    What each call would have been given, and would have returned, is recorded before it is replaced: the
    archive holds the natural values, and `injected` of its run metadata says what was replaced by what
    (`specs/injection.md`). Globs, steps and calls are those of the model that runs.

    1. Without a mapping or a capture of the target, keys are equal if the target has all sites of which the
       reference has arguments.
    2. Otherwise, and if the model is given inputs of other shapes, the reference is aligned with a capture of
       the target and brought under the target's keys.
    3. The target is run with these tensors in the place of its own, and on the rows that both were fed; if it
       runs on inputs of one shape alone, they are put into its own tensors, in the places of these rows.

    Args:
        reference: The trusted archive, open or a path.
        target_model: The target, its inputs and its seed.
        output: Where to put the archive, as for `capture`; None writes nothing.
        target: A capture of the same workload without injection, open or a path, which a mapping is resolved
            against; if a mapping is needed and this is None, the target is captured first.
        inputs: Globs of arguments to replace. If None, those of all modules but the model itself, unless
            outputs are chosen.
        outputs: Globs of results to replace.
        steps: Only in these steps; in all if empty.
        calls: Only in these calls of a site within a step, counted from 0; in all if empty.
        mapping: What belongs together, as an `Alignment` or a map file, or as an `Aligned` of the reference
            and `target`; `"none"` for equal keys. If None, one is computed if the target lacks modules that
            the reference has.
        left: Key texts, of the model that runs, of tensors that are left in place.
        leaves_misfits: Whether a tensor that has another shape than in `target`, in the rows and tokens that
            both were fed, or whole numbers in the place of floats, is left in place, too.
        run: Further run metadata.
        source_path: Where the reference is going to be, for the run's metadata; by default where it is.
        progress: Shows what is being run.
        options: Further arguments of `capture`.

    Returns:
        The capture, which is over; its `substitution` says what became of each slot.

    Raises:
        UsageError: A glob fits nothing; the mapping does not fit; a tensor does not fit in its place, which
            names both shapes.
        CaptureError: Nothing was captured.
    """
    progress = progress or Silent()
    with ExitStack() as stack:
        trusted = stack.enter_context(opened(reference))
        source: Archive = trusted
        aligned: Aligned | None = None
        fed: Archive | None = None
        fitted: Source | None = target
        needs_mapping = mapping is not None or not _has_sites_of(target_model.model, trusted)
        is_alike = target is None and not needs_mapping and _is_fed_alike(target_model, trusted)
        if mapping != NO_MAPPING and not is_alike:
            if target is None:
                injectable = ("input",) * (inputs is not None or not outputs) + ("output",) * bool(outputs)
                stage = "running the target as it is"
                target = open_run(stack, target_model, stage, progress=progress, injectable=injectable)
            tested = stack.enter_context(opened(target, reference=trusted))
            if isinstance(mapping, Aligned):
                aligned = mapping
            elif needs_mapping:
                aligned = align(trusted, tested, mapping=mapping)
            else:
                aligned = aligned_if_needed(trusted, tested)
            source = trusted if aligned is None else reverse(aligned)
            rows = fed_in_common(trusted, tested)[1]
            source = with_finite_padding(source, rows)
            source, fed = fitted_to(target_model.model, source, rows, tested)
            fitted = tested if fed is None else fed
        if leaves_misfits and fitted is not None:
            left = {*left, *_misfits(source, stack.enter_context(opened(fitted, reference=trusted)))}
        substitution = Substitution(
            source,
            inputs=inputs,
            outputs=outputs,
            steps=steps,
            calls=calls,
            left=left,
            leaves_misfits=leaves_misfits,
            fed=fed,
            why_absent=_absence_reasons(aligned),
        )
        if source_path is not None:
            substitution.source_path = source_path
        if aligned is not None:
            substitution.map_path = aligned.target.map_path or "computed"
            substitution.map_text = map_text(aligned.alignment)
        progress.stage("injecting")
        try:
            return capture_workload(
                target_model, output, run=dict(run or {}), substitution=substitution, **options
            )
        except UsageError as error:
            error.hint = error.hint or (_CAPTURE_FIRST if is_alike else None)
            raise


def _absence_reasons(aligned: Aligned | None) -> Callable[[Key], str]:
    """What says why the reference has no counterpart of a tensor of the target, if a mapping explains it."""
    reasons = Reasons(aligned.alignment.left_over if aligned else (), "target")

    def why_absent(key: Key) -> str:
        left = reasons.of(key)
        return left.reason if left is not None and left.is_explained else ""

    return why_absent


def open_run(
    stack: ExitStack, workload: Workload, stage: str, *, progress: Progress, **options: Any
) -> Archive:
    """Run a workload once, into an archive that stays open for as long as a stack does.

    Args:
        stack: Closes the archive, and removes it.
        workload: What is run.
        stage: What that is, for whoever waits.
        progress: Shows the stage.
        options: Further arguments of `capture`.

    Raises:
        CaptureError: Nothing was captured.
    """
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tensorcap-"))
    path = Path(folder) / "run.h5"
    progress.stage(stage)
    run = capture_workload(workload, path, **options)
    return stack.enter_context(open_archive(run.path or path))


def reverse(aligned: Aligned) -> Archive:
    """Bring the reference under the target's keys and in its layout, as far as both have the same rows.

    Where steps of the target were joined (ALN-307), it is brought into the steps that the target has.

    Raises:
        UsageError: Nothing of it can be undone.
    """
    reference, target = aligned.reference.source, aligned.target.source
    links = {id(link): link for link in aligned.target.links.values()}
    reversed_archive = ReversedArchive(reference, target, links.values())
    if not len(reversed_archive):
        reasons = "; ".join(dict.fromkeys(reversed_archive.left_out.values()))
        raise UsageError(f"{reference.path}: nothing of it can stand in the target: {reasons or 'no links'}")
    return in_own_steps(reversed_archive, target)[0]


def fitted_to(
    model: object, source: Archive, rows: Archive, tested: Archive
) -> tuple[Archive, Archive | None]:
    """Fit the tensors to inject to a model that was fed more rows or tokens than the reference.

    Args:
        model: The model that is to run.
        source: The tensors, of the tokens that both runs have.
        rows: What of `tested` is of these tokens; `tested` itself if both were fed the same.
        tested: A capture of the model.

    Returns:
        The tensors, and the rows that the model is to run on, None for all. A model that runs on inputs of
        one shape alone gets them in its own tensors, in the places of these tokens.
    """
    if isinstance(rows, CutArchive) and adapter_for(model).is_of_one_shape:
        return rows.put_into_whole(source), None
    return source, None if rows is tested else rows


def _misfits(source: Archive, run: Archive) -> Iterator[str]:
    """Key texts of what has another shape, or other numbers, in a run: a call that was given another mask."""
    for record in source.records:
        if record.key.text in run:
            own = run.get(record.key.text)
            kinds = {own.dtype.kind, record.dtype.kind}
            if own.shape != record.shape or not any(kinds <= alike for alike in _ALIKE):
                yield record.key.text


def _is_fed_alike(workload: Workload, archive: Archive) -> bool:
    """Whether each tensor that a model is given has the shape of one that the archived run was given."""
    given = workload.inputs.values() if isinstance(workload.inputs, Mapping) else workload.inputs
    shapes = {r.shape for r in archive.records if r.key.site == ROOT_SITE and r.key.slot.startswith("input")}
    own = (tuple(value.shape) for value in given if getattr(value, "shape", ()))
    return not shapes or all(shape in shapes for shape in own)


def _has_sites_of(model: Any, archive: Archive) -> bool:
    """Whether every site of which an archive has arguments is a module of a model."""
    names = {
        module_site(name)
        for site in adapter_for(model).list_sites(model)
        for name in (site.name, *site.aliases)
    }
    sites = {r.key.site for r in archive.records if r.key.slot.startswith("input") and ":" not in r.key.site}
    return sites <= names
