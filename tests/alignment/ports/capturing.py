"""Both sides of a port captured, and what their archives hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import tensorcap
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tests.alignment.ports.truth import Port, Truth

ROUNDING = 1e-5  # of float32 through three layers, relative to the largest element; measured: 2e-6


class Run(NamedTuple):
    truth: Truth
    reference: Archive
    target: Archive


def captured(port: Port, folder: Path, **options: Any) -> Run:
    """Capture both sides of a port; further arguments are those of `capture`."""
    model, inputs = port.reference()
    other, others = port.target(model.state_dict(), inputs)
    archives = []
    for name, made, given in (("ref", model, inputs), ("tgt", other.eval(), others)):
        with torch.no_grad(), tensorcap.capture(made, folder / f"{name}.h5", **options):
            made(**given)
        archives.append(tensorcap.open_archive(folder / f"{name}.h5"))
    return Run(port.truth, *archives)


def outputs(archive: Archive) -> dict[str, Array]:
    """What the modules gave, by key text."""
    found = (r for r in archive.records if r.key.slot.partition(".")[0] == "output")
    return {record.key.text: archive.read(record) for record in found}


def is_close(one: Array, other: Array) -> bool:
    """Whether two tensors are equal to rounding, and exactly where they are no floats."""
    if one.shape != other.shape:
        return False
    if one.dtype.kind != "f":
        return bool((one == other).all())
    finite = np.isfinite(one)
    if (finite != np.isfinite(other)).any():
        return False
    difference = np.abs(np.subtract(one, other, dtype=np.float64, where=finite, out=np.zeros(one.shape)))
    return bool(difference.max(initial=0.0) <= ROUNDING * np.abs(one[finite]).max(initial=0.0))
