"""Inject: run a target with an archive's tensors in the place of its own, and keep what it would have had."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tensorcap.adapters.protocol import adapter_for
from tensorcap.alignment.aligned import NO_MAPPING, Aligned, MappingSource, align
from tensorcap.alignment.map_file import map_text
from tensorcap.alignment.views import ReversedArchive
from tensorcap.comparison.pipeline import Source, opened
from tensorcap.recording.substitution import Substitution
from tensorcap.session.capture_session import Capture, capture_workload
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import module_site

if TYPE_CHECKING:
    from tensorcap.workload.workload import Workload
    from tensorcap_formats.progress import Progress


def inject(
    reference: Source,
    workload: Workload,
    output: str | os.PathLike[str] | None,
    *,
    inputs: str | Iterable[str] | None = None,
    outputs: str | Iterable[str] = (),
    steps: str | Iterable[range | int] = (),
    calls: str | Iterable[range | int] = (),
    mapping: MappingSource | Literal["none"] | None = None,
    target: Source | None = None,
    seed: int | None = None,
    run: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Capture:
    """Run a workload once with archived tensors in the place of the model's own.

    What each call would have been given, and would have returned, is recorded before it is replaced: the
    archive holds the natural values, and `injected` of its run metadata says what was replaced by what
    (`specs/injection.md`). Globs, steps and calls are those of the model that runs.

    Args:
        reference: The trusted archive, open or a path.
        workload: The target and its inputs.
        output: Where to put the archive, as for `capture`; None writes nothing.
        inputs: Globs of arguments to replace. If None, those of all modules but the model itself, unless
            outputs are chosen.
        outputs: Globs of results to replace.
        steps: Only in these steps; in all if empty.
        calls: Only in these calls of a site within a step, counted from 0; in all if empty.
        mapping: What belongs together, as an `Alignment` or a map file; `"none"` for equal keys. If None, one
            is computed where the target lacks modules that the reference has.
        target: A capture of the same workload without injection, open or a path, which a mapping is resolved
            against; one is made first where there is none and a mapping is needed.
        seed: Of the random generators before each run; as they are if None.
        run: Further run metadata.
        progress: As for `capture_workload`.
        options: Further arguments of `capture`.

    Returns:
        The capture, which is over; its `substitution` says what became of each slot.

    Raises:
        UsageError: A glob fits nothing; the mapping does not fit; a tensor does not fit in its place, which
            names both shapes.
        CaptureError: Nothing was captured.
    """
    adapter = adapter_for(workload.model)

    def seeded() -> None:
        if seed is not None:
            adapter.seed(seed)

    with ExitStack() as stack:
        trusted = stack.enter_context(opened(reference))
        metadata = dict(run or {})
        source: Archive = trusted
        aligned: Aligned | None = None
        if mapping != NO_MAPPING and (mapping is not None or not _has_its_sites(trusted, workload.model)):
            if target is None:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="tensorcap-"))
                target = Path(folder) / "target.h5"
                seeded()
                injectable = ("input",) * (inputs is not None or not outputs) + ("output",) * bool(outputs)
                capture_workload(workload, target, progress=progress, injectable=injectable)
            tested = stack.enter_context(opened(target))
            aligned = align(trusted, tested, mapping=mapping)
            source = reversed_by(aligned, trusted, tested)
        substitution = Substitution(source, inputs=inputs, outputs=outputs, steps=steps, calls=calls)
        if aligned is not None:
            substitution.map_path = _map_path(mapping)
            substitution.map_text = map_text(aligned.alignment)
        seeded()
        return capture_workload(
            workload, output, run=metadata, progress=progress, substitution=substitution, **options
        )


def reverse(reference: Archive, target: Archive, mapping: MappingSource | None = None) -> ReversedArchive:
    """The reference under the target's keys and in its layout.

    Args:
        reference: The trusted archive.
        target: An archive of the target.
        mapping: As for `align`.

    Raises:
        UsageError: The mapping does not fit, or nothing of it can be undone.
    """
    return reversed_by(align(reference, target, mapping=mapping), reference, target)


def reversed_by(aligned: Aligned, reference: Archive, target: Archive) -> ReversedArchive:
    """The same by a mapping that is resolved already.

    Raises:
        UsageError: Nothing of it can be undone.
    """
    links = {id(link): link for link in aligned.target.links.values()}
    found = ReversedArchive(reference, target, links.values())
    if not len(found):
        some = "; ".join(dict.fromkeys(found.left_out.values()))
        raise UsageError(f"{reference.path}: nothing of it can stand in the target: {some or 'no links'}")
    return found


def _has_its_sites(archive: Archive, model: Any) -> bool:
    """Whether every site of which an archive has arguments is a module of the model."""
    names = {
        module_site(name)
        for site in adapter_for(model).list_sites(model)
        for name in (site.name, *site.aliases)
    }
    sites = {r.key.site for r in archive.records if r.key.slot.startswith("input") and ":" not in r.key.site}
    return sites <= names


def _map_path(mapping: object) -> str:
    return str(mapping) if isinstance(mapping, (str, os.PathLike)) else "computed"
