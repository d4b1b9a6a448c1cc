"""Weights as llama.cpp keeps them, `.gguf`, read through the package gguf; quantised ones are dequantised."""

from __future__ import annotations

import math
import struct
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUFValueType
from gguf.gguf_reader import GGUFReader
from gguf.quants import dequantize

from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import DTYPES, Array
from tensorcap_formats.errors import CorruptArchiveError, NotAnArchiveError, ReadError, abbreviate
from tensorcap_formats.flat_arrays import Bands
from tensorcap_formats.foreign_archive import ForeignArchive, ForeignTensor
from tensorcap_formats.index import parse_shape
from tensorcap_formats.input_file import InputFile, check_total, read_stored

_PLAIN: Final = {  # types whose elements are stored as they are
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
}
_ARRAY: Final = struct.Struct("<IQ")  # type and count of its elements
_LENGTH: Final = struct.Struct("<Q")
_ERRORS: Final = (  # that the package raises on damaged files
    ValueError,
    LookupError,
    TypeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
    struct.error,
)
_BAND_BYTES: Final = 4 * 1024 * 1024  # of dequantised elements, at once


class _Reader(GGUFReader):
    """The package's reader, within the bounds of the file, and without the elements of arrays.

    The package takes what lies behind the end of a file for empty arrays, as often as a count says, and needs
    many seconds for the lists of tokens that are no tensors.
    """

    def _get(self, offset: int, dtype: Any, count: int = 1, *rest: Any, **options: Any) -> Any:
        self._require(int(offset) + int(count) * np.dtype(dtype).itemsize)
        return super()._get(offset, dtype, count, *rest, **options)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        data, end = memoryview(self.data), int(orig_offs) + _ARRAY.size
        self._require(end)
        kind, count = _ARRAY.unpack_from(data, orig_offs)
        scalar = self.gguf_scalar_to_np.get(kind)
        if scalar is not None:
            end += count * np.dtype(scalar).itemsize
        elif kind == GGUFValueType.STRING:
            for _ in range(count):
                end += _LENGTH.size + _LENGTH.unpack_from(data, end)[0]
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        self._require(end)
        return end - orig_offs, [], [], [GGUFValueType.ARRAY]

    def _require(self, size: int) -> None:
        if size > len(self.data):
            raise ValueError(f"it has {len(self.data)} bytes, expected at least {size}")


def open_gguf(path: Path) -> Archive:
    """Open the tensors of a file, as numpy orders axes: the one that varies fastest last.

    Raises:
        NotAnArchiveError: It is big endian, or has no tensors.
        CorruptArchiveError: It is cut short, contradicts itself, or is of a version that the package has not.
    """
    with closing(InputFile(path)) as head:
        if head.size >= 8 and head.read(4, 2) == b"\0\0":  # the lower half of the version
            raise NotAnArchiveError(f"{path}: is a big-endian GGUF file, expected little endian")
    try:
        file = _Reader(path)
    except _ERRORS as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CorruptArchiveError(f"{path}: the package gguf cannot read it: {reason}") from None
    if not file.tensors:
        raise NotAnArchiveError(f"{path}: is a GGUF file without tensors")
    declared = sum(4 * int(np.prod(tensor.shape, dtype=object)) for tensor in file.tensors)
    check_total(len(file.data), declared, str(path))  # they may overlap
    bands = Bands()
    tensors = [_tensor(path, len(file.data), tensor, bands) for tensor in file.tensors]
    kinds = Counter(t.tensor_type.name for t in file.tensors if t.tensor_type.name not in _PLAIN)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    notes = [f"Quantised tensors ({counts}) are dequantised to float32."] if kinds else []
    return ForeignArchive(path, "gguf", tensors, run={"notes": notes})


def _tensor(path: Path, file_size: int, stored: Any, bands: Bands) -> ForeignTensor:
    """One tensor, whose elements are read, and dequantised, when they are asked for."""
    kind, offset = stored.tensor_type, int(stored.data_offset)
    shape = tuple(int(size) for size in reversed(stored.shape.tolist()))
    where = f"{path}: {abbreviate(stored.name)!r}"
    if kind.name in _PLAIN:
        dtype = DTYPES[_PLAIN[kind.name]]
        read = partial(read_stored, path, file_size, dtype.itemsize, offset)
        return ForeignTensor(stored.name, dtype, shape, read)
    dtype = DTYPES["float32"]
    parse_shape(shape, dtype.itemsize, where)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    grid = math.prod(shape) // block, block
    owner = object()

    def load(first: int, end: int) -> Array:
        data = np.empty((1, (end - first) * block_bytes), np.uint8)  # of one row, which it takes in one go
        read_stored(path, file_size, 1, offset, first * block_bytes, data[0])
        try:
            return np.asarray(dequantize(data, kind), np.float32).reshape(-1)
        except NotImplementedError:
            raise ReadError(
                f"{where}: is of type {kind.name}, which the package gguf does not dequantise"
            ) from None

    def read_elements(start: int, out: Array) -> None:
        rows = max(_BAND_BYTES // (dtype.itemsize * block), 1)
        bands.read(owner, grid, rows, load, start, out)

    return ForeignTensor(stored.name, dtype, shape, read_elements)
