"""The folder of reports of a verification, written whole or not at all (`specs/verify.md`)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tensorcap.alignment import MappedArchive, write_map
from tensorcap.comparison import Comparison, SyncPoints, has_sync_points, points_of
from tensorcap.reports.error_plot import plot_errors
from tensorcap.reports.html import gather_page, own_errors_json, source_of_verification, write_html
from tensorcap.reports.layer_report import Layer, Spread, by_component, depth_of, layer_report, layers_of
from tensorcap.reports.sync_points_text import sync_point_lines
from tensorcap.reports.verification_text import layer_of, order_text, summarize_verification, summary_lines
from tensorcap.runs import Tree
from tensorcap.wording import printable
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import MissingPackageError, UsageError, WriteError
from tensorcap_formats.json_values import json_value
from tensorcap_formats.keys import ROOT_SITE
from tensorcap_formats.output_path import build_beside, put_in_place

if TYPE_CHECKING:
    from tensorcap.localization import Verification

Sides = tuple[Archive, Archive]
FREE, INJECTED = "without_injection", "with_injection"
MAP: Final = "map.toml"
PAGE: Final = "report.html"
_MARK: Final = "verify.json"  # a folder without it is none of ours, and is not replaced
_LONGEST_STEM: Final = 150  # characters of a key in the name of a file: file systems allow 255 bytes
_OWN_MEMBERS: Final = ("format", "version", "exit_status", "notes")  # of verify.json, not of a localization


@contextmanager
def replace_folder(path: Path, *, force: bool) -> Iterator[Path]:
    """Make a folder under a temporary name beside its place, and put it there if the block ends well.

    Args:
        path: The place.
        force: Whether an earlier report may be replaced.

    Raises:
        UsageError: Something is there that may not be replaced, or there is no folder around it.
        WriteError: The folder cannot be made.
    """
    _require_free(path, force=force)
    with build_beside(path) as building:
        try:
            building.mkdir()
        except OSError as error:
            raise WriteError(f"{path}: cannot be written: {error.strerror or error}") from error
        try:
            yield building
        except BaseException as error:
            notes = getattr(error, "__notes__", [])
            notes[:] = [note for note in notes if str(building) not in note]  # of archives that are removed
            raise
        _require_free(path, force=force)
        put_in_place(building, path)


def _require_free(path: Path, *, force: bool) -> None:
    if not path.parent.is_dir():
        raise UsageError(f"{path}: there is no folder {path.parent}")
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not (path / _MARK).is_file():
        raise UsageError(f"{path}: exists and is no report, expected a new folder")
    if not force:
        raise UsageError(f"{path}: exists", hint="--force replaces it.")


def write_files(
    folder: Path,
    verification: Verification,
    free: Sides,
    injected: Sides | None,
    *,
    originals: Sides,
    layers: bool,
) -> Verification:
    """Write all files but the archives.

    Args:
        folder: Where to.
        verification: All but its summary.
        free: Both sides of the free runs, as they were compared.
        injected: Those of the injected run, or None.
        originals: Both sides of the free runs under their own keys.
        layers: Whether to write a file for each tensor too.

    Returns:
        The verification with its summary, and with notes of what could not be written.
    """
    notes = list(verification.notes)
    layers_by_scenario: dict[str, tuple[Layer, ...]] = {}
    for name, sides, comparison in (
        (FREE, free, verification.free),
        (INJECTED, injected, verification.injected),
    ):
        if sides is None or comparison is None:
            continue
        listed = layers_by_scenario[name] = layers_of(sides[0], originals[1], comparison)
        notes += _write_scenario(folder / name, name, listed, originals, verification)
        if layers:
            _write_layers(folder / name, sides, comparison)
    notes += _write_page(folder, verification, free)
    verification = replace(verification, notes=tuple(dict.fromkeys(notes)))
    files = tuple(archive.info.model_file for archive in originals)
    summary = summarize_verification(verification, layers_by_scenario[FREE], files)
    verification = replace(verification, summary=summary)
    lines = "".join(f"{line}\n" for line in summary_lines(verification.summary))
    (folder / "summary.txt").write_text(lines, encoding="utf-8")
    if has_sync_points(*free):
        _write_sync_points(folder, points_of(verification.free, *free))
    used = free[1].alignment if isinstance(free[1], MappedArchive) else None
    if used is not None and used.entries:
        write_map(used, folder / MAP, title="The map by which the free runs were compared.")
    scenarios = {
        name: _scenario_json(layers_by_scenario[name], comparison, folder)
        if comparison and name in layers_by_scenario
        else None
        for name, comparison in ((FREE, verification.free), (INJECTED, verification.injected))
    }
    document = _document(verification, scenarios, folder, files)
    for suspect in document["suspects"]:
        layer = layer_of(suspect["key"], suspect["module"], layers_by_scenario[FREE])
        suspect["target"] = json_value(layer.target) if layer else None
    with (folder / _MARK).open("w", encoding="utf-8") as file:  # in pieces: the whole text may be large
        json.dump(document, file, ensure_ascii=False, allow_nan=False, indent=1)
        file.write("\n")
    return verification


def _write_page(folder: Path, verification: Verification, free: Sides) -> Iterator[str]:
    """Write the report as one page (VER-160); yield what could not be written, a sentence each."""
    try:
        write_html(folder / PAGE, gather_page(source_of_verification(verification, free, folder)))
    except MissingPackageError as error:
        yield f"No {PAGE}: {error}. {error.hint}"


def _write_sync_points(folder: Path, points: SyncPoints) -> None:
    """Write the sync points of the free runs, as text and as JSON (SYN-40)."""

    def written(name: str, text: str) -> None:
        text = text.replace(f"{folder}{os.sep}", "")  # archives in the folder, by their names in it
        (folder / name).write_text(text, encoding="utf-8")

    lines = sync_point_lines(points, sort="operation", show_all=True)
    written("sync-points.txt", "".join(f"{line.text}\n" for line in lines))
    document = json.dumps(points.to_json(), ensure_ascii=False, allow_nan=False, indent=1)
    written("sync-points.json", f"{document}\n")


def _write_scenario(
    folder: Path, name: str, layers: tuple[Layer, ...], originals: Sides, verification: Verification
) -> Iterator[str]:
    """Write the files of a scenario; yield what could not be written, a sentence each."""
    folder.mkdir(exist_ok=True)
    for side, archive in zip(("reference", "target"), originals, strict=True):
        lines = "".join(f"{printable(line)}\n" for line in _module_names(archive))
        (folder / f"module_names_{side}.txt").write_text(lines, encoding="utf-8")
    run = verification.free.target
    what = f"{run.model.rpartition('.')[2] or run.path.stem} {run.compute_dtype or run.dtype}".strip()
    title = f"Layer verification of {what}, {name.replace('_', ' ')}"
    text = layer_report(title, layers, order_text(verification.order))
    stem = re.sub(r"[^A-Za-z0-9.-]+", "_", what)
    (folder / f"layer_verification_report_{stem}.txt").write_text(text, encoding="utf-8")
    try:
        plot_errors(folder / "mse_plot.png", title, layers)
    except MissingPackageError as error:
        yield f"{error}. {error.hint}"


def _module_names(archive: Archive) -> Iterator[str]:
    """The path and type of each module of a run, a line each."""
    for node in Tree.of(archive).root.walk():
        path = node.path or ROOT_SITE
        yield " ".join(filter(None, (path, node.type, "(never called)" if node.is_never_called else "")))


def _write_layers(folder: Path, sides: Sides, comparison: Comparison) -> None:
    """Write each tensor that was compared as a file of its own, and what is in which."""
    names = "reference_layers", "target_layers"
    metadata: dict[str, dict[str, Any]] = {name: {} for name in names}
    for name in names:
        (folder / name).mkdir()
    for number, pair in enumerate(comparison.pairs):
        if pair.reference is None or pair.target is None or pair.status == "unreadable":
            continue
        stem = re.sub(r"[^A-Za-z0-9.@-]+", "_", pair.key)[:_LONGEST_STEM]
        file = f"{number:06}_{stem}.npy"
        for name, archive, record in zip(names, sides, (pair.reference, pair.target), strict=True):
            if record.stored:
                np.save(folder / name / file, archive.load(record), allow_pickle=False)
                metadata[name][file] = {
                    "key": pair.key,
                    "dtype": record.dtype.name,
                    "shape": list(record.shape),
                }
    for name in names:
        text = json.dumps(metadata[name], ensure_ascii=False, indent=1)
        (folder / name / "layer_metadata.json").write_text(text + "\n", encoding="utf-8")


def _scenario_json(layers: tuple[Layer, ...], comparison: Comparison, folder: Path) -> dict[str, Any]:
    first = comparison.divergence
    return {
        "is_green": comparison.is_green,
        "exit_status": comparison.exit_status,
        "records": comparison.records,
        "compared": comparison.compared,
        "counts": comparison.counts,
        "divergence": {"key": first.pair.key, "module": first.module, "is_growth": first.is_growth}
        if first
        else None,
        "mse": json_value(Spread.of(layers)),
        "components": json_value(by_component(layers)),
        "depth": json_value(depth_of(layers)),
        "layers": json_value(layers),
        "warnings": [text.replace(f"{folder}{os.sep}", "") for text in comparison.warnings],
    }


def _document(
    verification: Verification, scenarios: dict[str, Any], folder: Path, files: Sequence[str]
) -> dict[str, Any]:
    """The content of `verify.json` (VER-30)."""
    localization = verification.localization.to_json()
    return {
        "format": "tensorcap-verification",
        "version": 1,
        "exit_status": verification.exit_status,
        "reference": {**_side_json(verification.free, "reference", folder), "file": files[0]},
        "target": {**_side_json(verification.free, "target", folder), "file": files[1]},
        "weights": verification.weights.to_json() if verification.weights else None,
        "control": list(verification.control),
        "preflight": json_value(verification.preflight),
        "order": json_value(verification.order),
        **scenarios,
        "why_not_injected": verification.why_not_injected,
        **{name: value for name, value in localization.items() if name not in _OWN_MEMBERS},
        "notes": list(verification.notes),
        "inheriting": list(verification.inheriting),
        "own_errors": own_errors_json(verification.localization.own_errors),
        "summary": list(verification.summary),
    }


def _side_json(comparison: Comparison, name: str, folder: Path) -> Any:
    """A side of a comparison; the path of an archive in the folder is relative to the folder."""
    side = getattr(comparison, name)
    within = side.path.is_relative_to(folder)
    return {**json_value(side), "path": str(side.path.relative_to(folder) if within else side.path)}
