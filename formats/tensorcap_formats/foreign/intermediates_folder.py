"""Folders of a reference run for Apple's Core AI Debugger, `NAME.aimodelintermediates`.

`metadata.json` names the nodes of an exported graph, as inputs, outputs or anything else, and
the .npy file of each (specs/aimodelintermediates.md). Nothing outside of the folder is read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from tensorcap_formats.dtypes import DTYPES, Array
from tensorcap_formats.errors import (
    CorruptArchiveError,
    NotAnArchiveError,
    ReadError,
    UsageError,
    abbreviate,
)
from tensorcap_formats.folder import OpenFolder, others_below, read_side_file
from tensorcap_formats.foreign.numpy_files import read_npy_tensor
from tensorcap_formats.foreign_archive import ForeignArchive, ForeignTensor
from tensorcap_formats.index import decode_json
from tensorcap_formats.keys import ROOT_SITE, Key, escape, module_site

INTERMEDIATES_SUFFIX: Final = ".aimodelintermediates"
METADATA_FILE: Final = "metadata.json"
KINDS: Final = ("inputs", "outputs", "intermediates")  # the required members of the metadata
_MAX_METADATA_BYTES: Final = 256 * 1024 * 1024
_COUNTER: Final = re.compile(r"_(\d{4,18})\.npy")
_TORCH: Final = "torch."
_TEXTS: Final = ("node_op", "node_target", "data_file", "torch_dtype")


@dataclass(frozen=True, slots=True)
class _NodeEntry:
    """What the metadata say of one node.

    Attributes:
        where: For messages.
        name: Of the node.
        op: `placeholder`, `get_attr` or `call_function`.
        target: The operator, or the path of a weight in the model.
        file: Of its values, in the folder.
        dtype: Name of its logical dtype.
        shape: Its shape.
        own_keys: The keys that the entry itself gives; none if it is not one of ours.
    """

    where: str
    name: str
    op: str
    target: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    own_keys: tuple[Key, ...]

    @property
    def counter(self) -> int | None:
        """The number in the name of its file, which counts in the order of execution."""
        match = _COUNTER.search(self.file.name)
        return int(match[1]) if match and match.end() == len(self.file.name) else None

    @property
    def keys(self) -> tuple[Key, ...]:
        """The keys of what a capture of the graph records of it; Apple's own folders name no modules."""
        if self.own_keys:
            return self.own_keys
        if self.op == "placeholder":
            return (Key(ROOT_SITE, f"input.{escape(self.name)}"),)
        if self.op == "get_attr":
            module, _, name = self.target.rpartition(".")
            return (Key(module_site(module), f"param.{escape(name)}"),)
        return (Key(f"{ROOT_SITE}:{escape(self.name)}", "output"),)


def is_intermediates_folder(path: Path, names: set[str]) -> bool:
    """Whether a folder is to be read as one of these.

    Args:
        path: The folder.
        names: What is in it.

    Raises:
        NotAnArchiveError: It holds what such a folder holds, and is not named so.
    """
    if os.path.abspath(path).endswith(INTERMEDIATES_SUFFIX):
        return True
    if METADATA_FILE not in names or not (path / "data").is_dir():
        return False
    try:
        metadata = _read_metadata(path)
    except ReadError:
        return False
    if not metadata.keys() >= set(KINDS):
        return False
    raise NotAnArchiveError(
        f"{path}: holds intermediates of Core AI, expected a name in {INTERMEDIATES_SUFFIX} (AIM-1)",
        hint=f"Rename it to {os.path.basename(os.path.abspath(path))}{INTERMEDIATES_SUFFIX}.",
    )


def open_intermediates(path: Path) -> ForeignArchive:
    """Open a folder of intermediates as an archive.

    Raises:
        NotAnArchiveError: It has no metadata.
        CorruptArchiveError: The metadata lack something, or contradict a file.
        UnsafeFileError: A file lies outside of the folder, or holds Python objects.
        ReadError: The system cannot read it.
    """
    metadata = _read_metadata(path)
    mappings = metadata.get("mappings", {})
    if not isinstance(mappings, dict):
        raise CorruptArchiveError(f"{path / METADATA_FILE}: 'mappings' is no JSON object (AIM-6)")
    with closing(OpenFolder(path)) as folder:
        entries = list(_entries(folder, metadata))
        counters = [entry.counter for entry in entries]
        is_ordered = None not in counters and len(set(counters)) == len(counters)
        if is_ordered:
            entries.sort(key=lambda entry: entry.counter or 0)
        tensors = [replace(_tensor(entry), name=key.text) for entry in entries for key in entry.keys]
        folder.require_unreplaced()
    run: dict[str, Any] = {"framework": {"name": "torch"}, "scope": {"level": "export"}}
    if mappings:
        run["mappings"] = mappings
    files = [path / METADATA_FILE, *(entry.file for entry in entries)]
    return ForeignArchive(
        path,
        "intermediates-folder",
        tensors,
        skipped=others_below(path, files, f"{METADATA_FILE} does not name it"),
        run=run,
        is_ordered=is_ordered,
    )


def _read_metadata(path: Path) -> dict[str, Any]:
    file = path / METADATA_FILE
    return decode_json(read_side_file(file, path, _MAX_METADATA_BYTES), str(file))


def _entries(folder: OpenFolder, metadata: Mapping[str, Any]) -> Iterator[_NodeEntry]:
    source = folder.path / METADATA_FILE
    missing = [kind for kind in KINDS if not isinstance(metadata.get(kind), dict)]
    if missing:
        raise CorruptArchiveError(
            f"{source}: has no JSON object {' and '.join(map(repr, missing))}, "
            f"expected {', '.join(KINDS)} (AIM-2)"
        )
    entries: dict[str, object] = {}
    for kind in KINDS:
        for name, entry in metadata[kind].items():
            if name not in entries or entry != entries[name]:  # an output that is an input too has two
                yield _entry(folder, name, entry, f"{source}: {kind}: {abbreviate(name)!r}")
            entries[name] = entry


def _entry(folder: OpenFolder, name: str, entry: object, where: str) -> _NodeEntry:
    if not isinstance(entry, dict):
        raise CorruptArchiveError(f"{where}: is no JSON object (AIM-2)")
    for member in _TEXTS:
        if not isinstance(entry.get(member), str):
            raise CorruptArchiveError(
                f"{where}: {member} is {abbreviate(repr(entry.get(member)))}, expected a text (AIM-2)"
            )
    shape, dtype = entry.get("shape"), entry["torch_dtype"].removeprefix(_TORCH)
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise CorruptArchiveError(
            f"{where}: shape is {abbreviate(repr(shape))}, expected a list of sizes (AIM-2)"
        )
    if dtype not in DTYPES:
        raise CorruptArchiveError(f"{where}: torch_dtype {abbreviate(entry['torch_dtype'])!r} is unknown")
    if "\0" in entry["data_file"]:
        raise CorruptArchiveError(f"{where}: data_file is {abbreviate(repr(entry['data_file']))}, no path")
    file = folder.inside(folder.path / entry["data_file"])
    keys = _keys(entry.get("keys", []), where)
    return _NodeEntry(where, name, entry["node_op"], entry["node_target"], file, dtype, tuple(shape), keys)


def _keys(texts: object, where: str) -> tuple[Key, ...]:
    """The keys that an entry of ours gives."""
    with suppress(UsageError):
        if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
            keys = tuple(map(Key.parse, texts))
            if not any(key.is_bare for key in keys):
                return keys
    raise CorruptArchiveError(
        f"{where}: keys are {abbreviate(repr(texts))}, expected a list of STEP/SITE/SLOT (AIM-40)"
    )


def _tensor(entry: _NodeEntry) -> ForeignTensor:
    """The values of a node, after a check of its file against the metadata."""
    try:
        tensor = read_npy_tensor(entry.file, entry.name)
    except NotAnArchiveError as error:
        raise CorruptArchiveError(f"{entry.where}: {error} (AIM-4)") from None
    if tensor.shape != entry.shape:
        raise CorruptArchiveError(
            f"{entry.file}: is of shape {list(tensor.shape)}, expected {list(entry.shape)} "
            f"as {METADATA_FILE} says (AIM-4)"
        )
    if tensor.dtype.name == entry.dtype:
        return tensor
    if (tensor.dtype.name, entry.dtype) != ("float32", "bfloat16"):
        raise CorruptArchiveError(
            f"{entry.file}: is of dtype {tensor.dtype.name}, expected {entry.dtype} "
            f"as {METADATA_FILE} says (AIM-4)"
        )

    def read_narrowed(start: int, out: Array) -> None:
        wide = np.empty(out.size, np.float32)
        tensor.read(start, wide)
        bits = wide.view(np.uint32)
        if np.any(bits & 0xFFFF):
            raise CorruptArchiveError(f"{entry.file}: holds values that are no bfloat16 (AIM-5)")
        out[...] = (bits >> 16).astype(np.uint16).view(out.dtype)

    return replace(tensor, dtype=DTYPES["bfloat16"], read=read_narrowed)
