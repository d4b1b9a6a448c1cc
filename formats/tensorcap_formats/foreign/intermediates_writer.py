"""Writes the values of a graph's nodes as a folder `NAME.aimodelintermediates`, as Apple's writer does.

Beside what Apple's loader reads, each entry has the keys that our reader gives it (AIM-40).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from tensorcap_formats.content import write_errors
from tensorcap_formats.dtypes import Array, DType
from tensorcap_formats.errors import UsageError, WriteError
from tensorcap_formats.foreign.intermediates_folder import INTERMEDIATES_SUFFIX, KINDS, METADATA_FILE
from tensorcap_formats.output_path import build_beside, put_in_place

Kind = Literal["inputs", "outputs", "intermediates"]

_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.-]")
_MAX_STEM: Final = 150  # characters of a file's name before its number


@dataclass(frozen=True, slots=True)
class NodeValue:
    """The value of a node, or of one of its outputs.

    Attributes:
        kinds: The objects of the metadata that name it; an output that is an input too has two.
        name: In the metadata, unlike all others.
        node: The node.
        op: `placeholder`, `get_attr` or `call_function`.
        target: The operator, or the path of a weight in the model.
        dtype: One that `can_hold` allows.
        keys: Texts of the keys that it has in archives, the node's own first; none for that of AIM-10.
        nbytes: Bytes of the values.
        read: Gives its values, decoded, in its shape.
    """

    kinds: tuple[Kind, ...]
    name: str
    node: str
    op: str
    target: str
    dtype: DType
    keys: tuple[str, ...]
    nbytes: int
    read: Callable[[], Array]


def can_hold(dtype: DType) -> bool:
    """Whether a folder has a place for values of a dtype: those that numpy has, and bfloat16 (AIM-5)."""
    return dtype.is_native or dtype.name == "bfloat16"


def refuse_intermediates(folder: Path) -> None:
    """Refuse a path at which no folder can be written.

    Raises:
        UsageError: It has another suffix.
        WriteError: Something is there already.
    """
    if not folder.name.endswith(INTERMEDIATES_SUFFIX):
        raise UsageError(f"{folder}: expected a name in {INTERMEDIATES_SUFFIX} (AIM-1)")
    if os.path.lexists(folder):
        raise WriteError(f"{folder}: is there already, expected a new folder", hint="Choose another one.")


def write_intermediates(
    folder: Path,
    values: Iterable[NodeValue],
    *,
    mappings: Mapping[str, Any] | None = None,
    written: Callable[[int], object] = lambda _: None,
) -> None:
    """Write a new folder, all of it or nothing.

    Args:
        folder: Its path.
        values: In the order in which their files are numbered, that of execution.
        mappings: Which operator of a compiled program is which node (AIM-6).
        written: Called with the bytes of each value.

    Raises:
        UsageError: The folder has another suffix.
        ReadError: A value cannot be read.
        WriteError: Something is there already, or the disk is full.
    """
    refuse_intermediates(folder)
    metadata: dict[str, Any] = {kind: {} for kind in KINDS}
    with build_beside(folder) as building, write_errors(folder):
        (building / "data").mkdir(parents=True)
        for number, value in enumerate(values):
            array = value.read()
            file = f"data/{_UNSAFE.sub('_', value.name)[:_MAX_STEM]}_{number:04}.npy"
            np.save(building / file, array)
            entry = {
                "node_name": value.node,
                "node_op": value.op,
                "node_target": value.target,
                "data_file": file,
                "shape": list(array.shape),
                "torch_dtype": f"torch.{value.dtype.name}",
                "numel": int(array.size),
            }
            for kind in value.kinds:
                metadata[kind][value.name] = {**entry, "keys": list(value.keys)} if value.keys else entry
            written(value.nbytes)
        if mappings:
            metadata["mappings"] = mappings
        (building / METADATA_FILE).write_text(json.dumps(metadata, indent=2), encoding="utf-8")
        put_in_place(building, folder)
