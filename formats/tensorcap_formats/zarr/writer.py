"""Write an archive as a zarr v3 store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from tensorcap_formats.archive import Archive
from tensorcap_formats.content import build_index, holders, write_errors
from tensorcap_formats.dtypes import Array
from tensorcap_formats.flat_arrays import Slabs
from tensorcap_formats.index import FORMAT_VERSION, encode_index, encode_json
from tensorcap_formats.records import Record
from tensorcap_formats.zarr.header import (
    INDEX_NAME,
    MAX_CHUNK_BYTES,
    METADATA_NAME,
    RUN_NAME,
    array_metadata,
    array_path,
    zstd_codec,
)

_COMPRESSED_CHUNK_BYTES: Final = 4 * 1024 * 1024  # a reader keeps one, decoded, for each thread


def write_zarr(source: Archive, path: Path, records: Sequence[Record], *, compress: bool = False) -> None:
    """Write an archive as a zarr v3 store at a path where nothing is yet.

    The metadata of the root is written last, so that nothing opens a store that was not finished.

    Args:
        source: Where the records and their bytes come from.
        path: Of the new folder.
        records: Which, in the order of the new archive.
        compress: Compress the chunks by zstd.

    Raises:
        ReadError: The source cannot be read, or fails a checksum.
        WriteError: The disk is full, or two keys differ in case only on a file system that does not care.
        MissingPackageError: Compression was asked for, and numcodecs is not installed.
    """
    index = build_index(source, records)
    index_json, run_json = encode_index(index)
    group = encode_json({"zarr_format": 3, "node_type": "group", "attributes": {}})
    groups = {""}
    with write_errors(path):
        path.mkdir()
        for record in holders(index.records).values():
            *parents, name = array_path(record.key).split("/")
            for depth in range(1, len(parents) + 1):
                parent = "/".join(parents[:depth])
                if parent not in groups:
                    groups.add(parent)
                    (path / parent).mkdir()
                    (path / parent / METADATA_NAME).write_bytes(group)
            write_array(
                path.joinpath(*parents, name),
                source.blocks(records[record.row]),
                record.shape,
                record.dtype.storage,
                record.dtype.name,
                compress=compress,
            )
        for name, text in ((INDEX_NAME, index_json), (RUN_NAME, run_json)):
            data = np.frombuffer(text, np.uint8)
            write_array(path / name, [data], data.shape, "|u1", "uint8", compress=compress)
        root = {"zarr_format": 3, "node_type": "group", "attributes": {"tensorcap": FORMAT_VERSION}}
        (path / METADATA_NAME).write_bytes(encode_json(root))


def write_array(
    folder: Path, blocks: Iterable[Array], shape: tuple[int, ...], storage: str, dtype: str, *, compress: bool
) -> None:
    """Write one array.

    Args:
        folder: Of the array; must not exist, its parent must.
        blocks: Its elements in C order, one-dimensional.
        shape: Its shape.
        storage: numpy type code of its elements.
        dtype: Logical dtype, kept as an attribute for other readers if zarr has none like it.
        compress: Use zstd.
    """
    kind = np.dtype(storage)
    slabs = Slabs.cut(shape, kind.itemsize, _COMPRESSED_CHUNK_BYTES if compress else MAX_CHUNK_BYTES)
    encode = zstd_codec("writing a compressed .zarr archive").encode if compress else None
    folder.mkdir()
    for number, chunk in enumerate(slabs.fill(blocks, kind)):
        path = folder / slabs.key(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(chunk.view("u1")) if encode else chunk.view("u1").data)
    (folder / METADATA_NAME).write_bytes(encode_json(array_metadata(slabs, kind, dtype, compress=compress)))
