"""safetensors files: archives of ours in that container, and checkpoints from elsewhere."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, Final

from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import DTYPES, Array
from tensorcap_formats.errors import (
    CorruptArchiveError,
    NotAnArchiveError,
    ReadError,
    UnsafeFileError,
    WriteError,
    abbreviate,
)
from tensorcap_formats.folder import others_below
from tensorcap_formats.foreign.archive import ForeignArchive, ForeignTensor
from tensorcap_formats.index import (
    FORMAT_VERSION,
    check_version,
    decode_sealed,
    from_json,
    to_json,
)
from tensorcap_formats.input_file import InputFile
from tensorcap_formats.records import Record
from tensorcap_formats.safetensors.header import MAX_HEADER_BYTES, METADATA, HeaderEntry, read_header
from tensorcap_formats.writing.content import (
    checked_blocks,
    content_of,
    described,
    holders,
    index_and_run,
    writing,
)

_CODES: Final = {  # of the format, for our dtypes; all others are stored as bytes (ARC-62)
    "bool": "BOOL",
    **{f"int{n}": f"I{n}" for n in (8, 16, 32, 64)},
    **{f"uint{n}": f"U{n}" for n in (8, 16, 32, 64)},
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
}
_DTYPES: Final = {code: DTYPES[name] for name, code in _CODES.items()}
OUR_PADDING: Final = b" " * 8  # ends the header; a library that rewrites the file pads with less (ARC-62)
_SIX_BITS: Final = {"F6_E2M3": DTYPES["float6_e2m3fn"], "F6_E3M2": DTYPES["float6_e3m2fn"]}


def write_safetensors(source: Archive, path: Path, *, records: Sequence[Record] | None = None) -> None:
    """Write an archive as a safetensors file at a path where nothing is yet.

    Args:
        source: Where the records and their bytes come from.
        path: Of the new file.
        records: Which, in the order of the new archive; all of the source by default.

    Raises:
        ReadError: The source cannot be read, or fails a checksum.
        WriteError: The header would be above the limit of the format, or the disk is full.
    """
    originals = source.records if records is None else records
    chosen, algorithm = described(source, originals)
    # Large elements first: each tensor then lies at a multiple of its element size, which torch insists on.
    kept = sorted(holders(chosen).values(), key=lambda r: -r.dtype.itemsize)
    index, run = index_and_run(source, chosen, algorithm)
    texts = {"tensorcap": FORMAT_VERSION, "index": index.decode(), "run": run.decode()}
    header: dict[str, Any] = {METADATA: texts}
    end = 0
    for record in kept:
        name = record.key.text
        if name == METADATA:
            raise WriteError(f"{path}: a tensor is named {name!r}, a name that the format needs for itself")
        code, shape = _stored_form(record)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [end, end + record.nbytes]}
        end += record.nbytes
    text = to_json(header)
    text += OUR_PADDING + b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise WriteError(
            f"{path}: {len(chosen)} records need a header of {len(text)} bytes, "
            f"expected at most {MAX_HEADER_BYTES} (ARC-80)",
            hint="Write an .h5 or .zarr archive: they have no such limit.",
        )
    with writing(path), path.open("xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for record in kept:
            for block in checked_blocks(source, originals[record.row]):
                file.write(block.view("u1").data)


def open_safetensors(path: Path) -> Archive:
    """Open a safetensors file: an archive of ours, or a checkpoint from elsewhere.

    Raises:
        CorruptArchiveError: The header lies, or the index in it does.
        NewerVersionError: A newer tensorcap wrote it.
    """
    with ExitStack() as resources:
        file = resources.enter_context(closing(InputFile(path)))
        entries, metadata = read_header(file)
        if "tensorcap" in metadata:
            return SafetensorsArchive(file, entries, metadata, resources=resources)
        return ForeignArchive(path, "safetensors", _tensors(file, entries), resources=resources)


def open_safetensors_folder(path: Path) -> Archive:
    """Open a checkpoint of several files: those that its `*.safetensors.index.json` names, or all of them.

    Raises:
        UnsafeFileError: A file's name leads out of the folder.
        CorruptArchiveError: A header lies, or the index names a tensor that is not there.
    """
    indexes = sorted(path.glob("*.safetensors.index.json"))
    if len(indexes) > 1:
        raise NotAnArchiveError(f"{path}: has {len(indexes)} files *.safetensors.index.json, expected one")
    placed = _weight_map(indexes[0]) if indexes else {}
    shards = sorted(set(placed.values())) or sorted(p.name for p in path.glob("*.safetensors"))
    with ExitStack() as resources:
        tensors: list[ForeignTensor] = []
        read = indexes[:1]
        where: dict[str, str] = {}
        for shard in shards:
            file = resources.enter_context(closing(InputFile(_inside(path, shard))))
            entries, metadata = read_header(file)
            if "tensorcap" in metadata:
                raise NotAnArchiveError(
                    f"{file.path}: is an archive of its own, expected a part of a checkpoint",
                    hint="Open the file by itself.",
                )
            tensors += _tensors(file, entries)
            read.append(file.path)
            where.update(dict.fromkeys(entries, shard))
        for name, shard in placed.items():
            if where.get(name) != shard:
                raise CorruptArchiveError(
                    f"{indexes[0]}: tensor {abbreviate(name)!r} is not in {shard}, expected it there"
                )
        others = others_below(
            path, read, f"not named in {indexes[0].name}" if indexes else "no .safetensors file"
        )
        return ForeignArchive(path, "safetensors", tensors, resources=resources, skipped=others)


class SafetensorsArchive(Archive):
    """An archive of ours in a safetensors file: index and run are in the header's metadata (ARC-62)."""

    is_direct = True

    def __init__(
        self,
        file: InputFile,
        entries: Mapping[str, HeaderEntry],
        metadata: Mapping[str, str],
        *,
        resources: ExitStack,
    ) -> None:
        """Check the index against the header; takes `resources` over once that has succeeded."""
        source = str(file.path)
        check_version(metadata, source)
        run = metadata.get("run", "").encode("utf-8", "surrogatepass")
        index = decode_sealed(metadata.get("index", "").encode("utf-8", "surrogatepass"), run, source)
        header_end = min((entry.offset for entry in entries.values()), default=file.size)
        super().__init__(
            file.path,
            "safetensors",
            index.records,
            is_ordered=index.is_ordered,
            is_complete=index.is_complete,
            run=from_json(run, f"{source}: run"),
            values=index.values,
            algorithm=index.algorithm,
            root=index.root,
            trusts_digests=file.read(header_end - len(OUR_PADDING), len(OUR_PADDING)) == OUR_PADDING,
        )
        kept = holders(index.records)
        for record in kept.values():
            entry = entries.get(record.key.text)
            if entry is None or (entry.code, entry.shape) != _stored_form(record):
                found = f"{entry.code} of shape {list(entry.shape)}" if entry else "missing"
                code, shape = _stored_form(record)
                raise CorruptArchiveError(
                    f"{source}: tensor {record.key.text!r} is {found}, "
                    f"expected {code} of shape {list(shape)} (ARC-62)"
                )
        if len(kept) != len(entries):
            raise CorruptArchiveError(
                f"{source}: header names {len(entries)} tensors, expected {len(kept)} as the index (ARC-62)"
            )
        self._file = file
        self._offsets = {content: entries[r.key.text].offset for content, r in kept.items()}
        self._resources = resources.pop_all()

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        self._file.read_into(self._offsets[content_of(record)] + start * record.dtype.itemsize, out)

    def close(self) -> None:
        """Let go of the files; a second call does nothing."""
        self._resources.close()


def _stored_form(record: Record) -> tuple[str, tuple[int, ...]]:
    """Dtype code and shape in the header: values where the format has the dtype, else bytes (ARC-62)."""
    shape, logical = record.shape, record.dtype
    code = _CODES.get(logical.name)
    if code is None:
        return "U8", (*shape, logical.itemsize) if logical.itemsize > 1 else shape
    if logical.packed > 1:  # the format counts values, torch counts bytes
        return code, (*shape[:-1], logical.packed * (shape[-1] if shape else 1))
    return code, shape


def _tensors(file: InputFile, entries: Mapping[str, HeaderEntry]) -> list[ForeignTensor]:
    return [_tensor(file, name, entry) for name, entry in entries.items()]


def _tensor(file: InputFile, name: str, entry: HeaderEntry) -> ForeignTensor:
    if entry.code in _SIX_BITS:
        reason = f"{file.path}: {abbreviate(name)!r}: no document says how {entry.code} is packed into bytes"
        return ForeignTensor(name, _SIX_BITS[entry.code], entry.shape, partial(_refuse, reason))
    logical, shape = _DTYPES[entry.code], entry.shape
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


def _inside(folder: Path, name: str) -> Path:
    """The path of a file that a folder's index names; no name and no link may lead elsewhere.

    A snapshot of the Hugging Face cache has links into `blobs` beside `snapshots`: those are followed.
    """
    if not name or name in (".", "..") or set(name) & set("/\\\0"):
        raise UnsafeFileError(
            f"{folder}: index names the file {abbreviate(name)!r}, expected a plain file name"
        )
    home = folder.resolve()
    allowed = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    found = (home / name).resolve()
    if found.parent not in allowed:
        raise UnsafeFileError(f"{folder / name}: is a link to {found}, expected a file of the folder")
    return folder / name


def _weight_map(path: Path) -> dict[str, str]:
    with closing(InputFile(path)) as file:
        if file.size > MAX_HEADER_BYTES:
            raise CorruptArchiveError(f"{path}: has {file.size} bytes, expected at most {MAX_HEADER_BYTES}")
        placed = from_json(file.read(0, file.size), str(path)).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(shard, str) for shard in placed.values()):
        raise CorruptArchiveError(f"{path}: weight_map does not give each tensor a file name")
    return placed
