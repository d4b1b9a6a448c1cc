"""Read checkpoints in safetensors files that other programs wrote."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import (
    CorruptArchiveError,
    NotAnArchiveError,
    ReadError,
    UnsafeFileError,
    abbreviate,
)
from tensorcap_formats.folder import others_below
from tensorcap_formats.foreign_archive import ForeignArchive, ForeignTensor
from tensorcap_formats.index import decode_json
from tensorcap_formats.input_file import InputFile
from tensorcap_formats.safetensors.header import (
    DTYPE_OF_CODE,
    MAX_HEADER_BYTES,
    SIX_BITS,
    HeaderEntry,
    read_header,
)


def open_safetensors_folder(path: Path) -> Archive:
    """Open a checkpoint of several files: those that its `*.safetensors.index.json` names, or all of them.

    Raises:
        UnsafeFileError: A file's name leads out of the folder.
        CorruptArchiveError: A header contradicts its file, or the index names a tensor that is not there.
    """
    indexes = sorted(path.glob("*.safetensors.index.json"))
    if len(indexes) > 1:
        raise NotAnArchiveError(f"{path}: has {len(indexes)} files *.safetensors.index.json, expected one")
    weight_map = _weight_map(indexes[0]) if indexes else {}
    shards = sorted(set(weight_map.values())) or sorted(p.name for p in path.glob("*.safetensors"))
    with ExitStack() as resources:
        tensors: list[ForeignTensor] = []
        files = indexes[:1]
        shard_of: dict[str, str] = {}
        for shard in shards:
            file = resources.enter_context(closing(InputFile(file_inside(path, shard))))
            entries, metadata = read_header(file)
            if "tensorcap" in metadata:
                raise NotAnArchiveError(
                    f"{file.path}: is an archive of its own, expected a part of a checkpoint",
                    hint="Open the file by itself.",
                )
            tensors += foreign_tensors(file, entries)
            files.append(file.path)
            shard_of.update(dict.fromkeys(entries, shard))
        for name, shard in weight_map.items():
            if shard_of.get(name) != shard:
                raise CorruptArchiveError(
                    f"{indexes[0]}: tensor {abbreviate(name)!r} is not in {shard}, expected it there"
                )
        others = others_below(
            path, files, f"not named in {indexes[0].name}" if indexes else "no .safetensors file"
        )
        return ForeignArchive(path, "safetensors", tensors, resources=resources, skipped=others)


def foreign_tensors(file: InputFile, entries: Mapping[str, HeaderEntry]) -> list[ForeignTensor]:
    """The tensors of a checkpoint, by the names in its header.

    Raises:
        CorruptArchiveError: A shape does not fit its dtype.
    """
    return [_tensor(file, name, entry) for name, entry in entries.items()]


def _tensor(file: InputFile, name: str, entry: HeaderEntry) -> ForeignTensor:
    if entry.code in SIX_BITS:
        reason = f"{file.path}: {abbreviate(name)!r}: no document says how {entry.code} is packed into bytes"
        return ForeignTensor(name, SIX_BITS[entry.code], entry.shape, partial(_refuse, reason))
    logical, shape = DTYPE_OF_CODE[entry.code], entry.shape
    if logical.packed > 1:
        if not shape or shape[-1] % logical.packed:
            raise CorruptArchiveError(
                f"{file.path}: {abbreviate(name)!r}: shape {list(shape)} of {entry.code} has an odd last axis"
            )
        shape = (*shape[:-1], shape[-1] // logical.packed)
    return ForeignTensor(name, logical, shape, partial(_read_values, file, entry.offset, logical.itemsize))


def _read_values(file: InputFile, offset: int, itemsize: int, start: int, out: Array) -> None:
    file.read_into(offset + start * itemsize, out)


def _refuse(reason: str, start: int, out: Array) -> None:
    raise ReadError(reason)


def file_inside(folder: Path, name: str) -> Path:
    """Resolve the name of a file in a folder's index; no name and no link may lead elsewhere.

    A snapshot of the Hugging Face cache has links into `blobs` beside `snapshots`: those are followed.
    """
    if not name or name in (".", "..") or set(name) & set("/\\\0"):
        raise UnsafeFileError(
            f"{folder}: index names the file {abbreviate(name)!r}, expected a plain file name"
        )
    try:
        home = folder.resolve()
        target = (home / name).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # links in a ring; a name that no file can have
        raise UnsafeFileError(f"{folder}: its file {abbreviate(name)!r} leads nowhere: {error}") from None
    allowed = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if target.parent not in allowed:
        raise UnsafeFileError(f"{folder / name}: is a link to {target}, expected a file of the folder")
    return folder / name


def _weight_map(path: Path) -> dict[str, str]:
    with closing(InputFile(file_inside(path.parent, path.name))) as file:
        weight_map = decode_json(file.read_all(MAX_HEADER_BYTES), str(path)).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CorruptArchiveError(f"{path}: weight_map does not give each tensor a file name")
    return weight_map
