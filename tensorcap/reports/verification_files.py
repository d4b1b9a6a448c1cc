"""The files that a verification leaves; `specs/verify.md` says what each holds."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorcap.comparison.comparison import Comparison
from tensorcap.reports.error_plot import plot_errors
from tensorcap.reports.layer_report import Layer, Spread, by_component, depth_of, layer_report, layers_of
from tensorcap.reports.localization_json import localization_value
from tensorcap.reports.report_folder import MARK
from tensorcap.reports.result_json import json_value
from tensorcap.reports.verification_text import order_text, summary_of
from tensorcap.runs.tree import Tree
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import MissingPackageError
from tensorcap_formats.keys import ROOT_SITE

if TYPE_CHECKING:
    from tensorcap.localization.verification import Verification
    from tensorcap.localization.weights import WeightComparison

Sides = tuple[Archive, Archive]
FREE, INJECTED = "without_injection", "with_injection"


def write_files(
    folder: Path,
    found: Verification,
    free: Sides,
    injected: Sides | None,
    *,
    originals: Sides,
    layers: bool,
) -> Verification:
    """Write all files but the archives.

    Args:
        folder: Where to.
        found: What was found.
        free: Both sides of the free runs, as they were compared.
        injected: Those of the injected run, or None.
        originals: Both sides of the free runs under their own keys.
        layers: Whether to write a file for each tensor too.

    Returns:
        What was found, with its summary, and notes of what could not be written.
    """
    notes = list(found.notes)
    scenarios: dict[str, Any] = {FREE: None, INJECTED: None}
    rows: dict[str, tuple[Layer, ...]] = {}
    for name, sides, comparison in (
        (FREE, free, found.free),
        (INJECTED, injected, found.injected),
    ):
        if sides is None or comparison is None:
            continue
        rows[name] = layers_of(sides[0], comparison)
        notes += _write_scenario(folder / name, name, rows[name], originals, found)
        if layers:
            _write_layers(folder / name, sides, comparison)
        scenarios[name] = _scenario(rows[name], comparison, folder)
    found = replace(found, notes=tuple(dict.fromkeys(notes)))
    found = replace(found, summary=summary_of(found, rows[FREE]))
    (folder / "summary.txt").write_text("".join(f"{_line(s)}\n" for s in found.summary), encoding="utf-8")
    text = json.dumps(_report(found, scenarios, folder), ensure_ascii=False, allow_nan=False, indent=1)
    (folder / MARK).write_text(text + "\n", encoding="utf-8")
    return found


def _write_scenario(
    folder: Path, name: str, layers: tuple[Layer, ...], originals: Sides, found: Verification
) -> Iterator[str]:
    """Write the files of a scenario, and say what could not be written."""
    folder.mkdir(exist_ok=True)
    for side, archive in zip(("reference", "target"), originals, strict=True):
        lines = "".join(f"{_line(line)}\n" for line in _module_names(archive))
        (folder / f"module_names_{side}.txt").write_text(lines, encoding="utf-8")
    run = found.free.target
    what = f"{run.model.rpartition('.')[2] or run.path.stem} {run.compute_dtype or run.dtype}".strip()
    title = f"Layer verification of {what}, {name.replace('_', ' ')}"
    text = layer_report(title, layers, order_text(found.order))
    stem = re.sub(r"[^A-Za-z0-9.-]+", "_", what)
    (folder / f"layer_verification_report_{stem}.txt").write_text(text, encoding="utf-8")
    try:
        plot_errors(folder / "mse_plot.png", title, layers)
    except MissingPackageError as error:
        yield f"{error}. {error.hint}"


def _module_names(archive: Archive) -> Iterator[str]:
    for node in Tree.of(archive).root.walk():
        path = node.path or ROOT_SITE
        yield " ".join(filter(None, (path, node.type, "(never called)" if node.is_never_called else "")))


def _write_layers(folder: Path, sides: Sides, comparison: Comparison) -> None:
    """Write each tensor that was compared as a file of its own, and what is in which."""
    names = "reference_layers", "target_layers"
    about: dict[str, dict[str, Any]] = {name: {} for name in names}
    for name in names:
        (folder / name).mkdir()
    for number, pair in enumerate(comparison.pairs):
        if pair.reference is None or pair.target is None or pair.status == "unreadable":
            continue
        stem = re.sub(r"[^A-Za-z0-9.@-]+", "_", pair.key)[:150]
        file = f"{number:06}_{stem}.npy"
        for name, archive, record in zip(names, sides, (pair.reference, pair.target), strict=True):
            if record.stored:
                np.save(folder / name / file, archive.load(record), allow_pickle=False)
                about[name][file] = {
                    "key": pair.key,
                    "dtype": record.dtype.name,
                    "shape": list(record.shape),
                }
    for name in names:
        text = json.dumps(about[name], ensure_ascii=False, indent=1)
        (folder / name / "layer_metadata.json").write_text(text + "\n", encoding="utf-8")


def _scenario(layers: tuple[Layer, ...], comparison: Comparison, folder: Path) -> dict[str, Any]:
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


def _report(found: Verification, scenarios: dict[str, Any], folder: Path) -> dict[str, Any]:
    return {
        "format": "tensorcap-verification",
        "version": 1,
        "exit_status": found.exit_status,
        "reference": _side(found.free, "reference", folder),
        "target": _side(found.free, "target", folder),
        "weights": _weights(found.weights) if found.weights else None,
        "control": list(found.control),
        "preflight": json_value(found.preflight),
        "order": json_value(found.order),
        **scenarios,
        "why_not_injected": found.why_not_injected,
        **{**localization_value(found.localization), "notes": list(found.notes)},
        "inheriting": list(found.inheriting),
        "summary": list(found.summary),
    }


def _weights(found: WeightComparison) -> dict[str, Any]:
    return {
        "records": found.comparison.records,
        "compared": found.comparison.compared,
        "counts": found.comparison.counts,
        "unlike": [pair.key for pair in found.unlike],
        "diagnosis": json_value(found.diagnosis.to_json()) if found.diagnosis else None,
    }


def _side(comparison: Comparison, name: str, folder: Path) -> Any:
    """What a comparison says of a side; the path of an archive in the folder is told from there."""
    side = getattr(comparison, name)
    within = side.path.is_relative_to(folder)
    return {**json_value(side), "path": str(side.path.relative_to(folder) if within else side.path)}


def _line(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)
