"""Write an archive as an HDF5 file: as a flat file, or with compressed chunks through the HDF5 library.

Both have the same paths, types and links.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tensorcap_formats.archive import BLOCK_BYTES, Archive
from tensorcap_formats.content import build_index, content_of, write_errors
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import missing_package
from tensorcap_formats.flat_arrays import Slabs
from tensorcap_formats.hdf5.flat_file import (
    HEAD_SIZE,
    INDEX_NAME,
    RUN_NAME,
    align_offset,
    finish_flat_file,
    write_at,
)
from tensorcap_formats.hdf5.header import datatype_of, string_type
from tensorcap_formats.index import Index, encode_index
from tensorcap_formats.records import Record

if TYPE_CHECKING:
    import h5py

_CHUNK_BYTES: Final = BLOCK_BYTES  # below the library's cache of 1 MiB, or each read would decode anew
_ZSTD_FILTER: Final = 32015  # number in the registry of HDF5
_ENCODED: Final = b"\x03\x00"  # H5Tdecode expects it before a datatype message


def write_hdf5(
    source: Archive, path: Path, records: Sequence[Record], *, compress: str | None = None
) -> None:
    """Write an archive as an HDF5 file at a path where nothing is yet.

    Args:
        source: Where the records and their bytes come from.
        path: Of the new file.
        records: Which, in the order of the new archive.
        compress: `zstd` or `blosc2`; None for plain bytes.

    Raises:
        ReadError: The source cannot be read, or fails a checksum.
        WriteError: The disk is full.
        MissingPackageError: Compression was asked for, and hdf5plugin is not installed.
    """
    index = build_index(source, records)
    if compress is not None:
        _write_compressed(source, path, records, index, compress)
        return
    places: dict[tuple[str, int], int] = {}
    offsets: list[int | None] = []
    end = HEAD_SIZE
    with write_errors(path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            for original, record in zip(records, index.records, strict=True):
                if not record.stored or not record.nbytes:
                    offsets.append(None)
                    continue
                content = record.digest, record.nbytes
                if content not in places:
                    places[content] = at = end
                    for block in source.blocks(original):
                        write_at(fd, at, block.view("u1"))
                        at += block.nbytes
                    end = align_offset(at)
                offsets.append(places[content])
            finish_flat_file(fd, index, offsets, end)
        finally:
            os.close(fd)


def _write_compressed(
    source: Archive, path: Path, originals: Sequence[Record], index: Index, compress: str
) -> None:
    """Write the file; scalars and empty tensors stay as they are, which HDF5 cannot cut into chunks."""
    try:
        import h5py
        import hdf5plugin
        from h5py import h5t
    except ImportError as error:
        raise missing_package(f"compressing {path}", error.name or "hdf5plugin", extra="compress") from None
    filters: dict[str, Any] = {"zstd": hdf5plugin.Zstd, "blosc2": hdf5plugin.Blosc2}
    pipeline = filters[compress]()
    index_json, run_json = encode_index(index)
    datasets: dict[object, Any] = {}
    with write_errors(path), h5py.File(path, "x", libver=("earliest", "v108")) as file:
        for original, record in zip(originals, index.records, strict=True):
            if not record.stored:
                continue
            parent, _, name = record.key.path.rpartition("/")
            group = file.require_group(parent)
            dataset = datasets.get(content_of(record))
            if dataset is not None:
                group[name] = dataset
                continue
            kind = h5t.decode(_ENCODED + datatype_of(record.dtype))
            slabs = Slabs.cut(record.shape, record.dtype.itemsize, _CHUNK_BYTES)
            dataset = _create(group, name, kind, slabs, pipeline if record.shape and record.size else None)
            blocks = source.blocks(original)
            for number, chunk in enumerate(slabs.fill(blocks, np.dtype(record.dtype.storage))):
                _write(dataset, kind, slabs, number, chunk)
            datasets[content_of(record)] = group[name]
        for name, text in ((INDEX_NAME, index_json), (RUN_NAME, run_json)):
            kind = h5t.decode(_ENCODED + string_type(len(text)))
            scalar = Slabs.cut((), len(text), _CHUNK_BYTES)
            _write(_create(file, name, kind, scalar, None), kind, scalar, 0, np.array([text]))


def _create(group: h5py.Group, name: str, kind: Any, slabs: Slabs, pipeline: Any) -> Any:
    """Create a dataset of an HDF5 type, in chunks if there is a pipeline of filters; return its handle."""
    import h5py
    from h5py import h5d, h5p, h5s

    properties = h5p.create(h5p.DATASET_CREATE)
    properties.set_fill_time(h5d.FILL_TIME_NEVER)
    properties.set_obj_track_times(False)
    if pipeline:
        properties.set_chunk(slabs.chunk)
        if pipeline.filter_id == _ZSTD_FILTER:  # blosc2 shuffles by itself
            properties.set_shuffle()
        properties.set_filter(pipeline.filter_id, 0, tuple(pipeline.filter_options))
    space = h5s.create_simple(slabs.shape) if slabs.shape else h5s.create(h5s.SCALAR)
    dataset = h5d.create(group.id, None, kind, space, properties)
    group[name] = h5py.Dataset(dataset)
    return dataset


def _write(dataset: Any, kind: Any, slabs: Slabs, number: int, chunk: Array) -> None:
    """Write one chunk, or the one element of a scalar, as it is: file and memory have the same type."""
    from h5py import h5s

    if not slabs.shape:
        scalar = h5s.create(h5s.SCALAR)
        dataset.write(scalar, scalar, chunk[:1], kind)
        return
    first = slabs.position(number)
    count = tuple(min(c, n - at) for c, n, at in zip(slabs.chunk, slabs.shape, first, strict=True))
    space = dataset.get_space()
    space.select_hyperslab(first, count)
    dataset.write(h5s.create_simple(count), space, chunk, kind)
