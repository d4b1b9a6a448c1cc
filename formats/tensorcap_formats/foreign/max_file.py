"""Checkpoints of MAX's debug prints, `.max` files of one tensor each (specs/max-files.md)."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from tensorcap_formats.archive import Archive
from tensorcap_formats.content import write_errors
from tensorcap_formats.dtypes import DTYPES, Array, DType
from tensorcap_formats.errors import (
    CorruptArchiveError,
    NewerVersionError,
    NotAnArchiveError,
    UsageError,
    abbreviate,
)
from tensorcap_formats.foreign.raw_file import raw_file_hint
from tensorcap_formats.foreign.signatures import SIGNATURE_BYTES, refuse_known_file
from tensorcap_formats.foreign_archive import ForeignArchive, ForeignTensor
from tensorcap_formats.index import parse_shape
from tensorcap_formats.input_file import InputFile, read_stored
from tensorcap_formats.keys import MAX_KEY_BYTES

MAX_SUFFIX: Final = ".max"
MAGIC: Final = bytes.fromhex("93f09f94a52b2b93")
MAX_DTYPE_CODES: Final = {
    "bool": 1,
    "float4_e2m1fn": 64,
    "float6_e2m3fn": 65,
    "float6_e3m2fn": 66,
    "float8_e8m0fnu": 73,
    "float8_e4m3fn": 75,
    "float8_e4m3fnuz": 76,
    "float8_e5m2": 77,
    "float8_e5m2fnuz": 78,
    "float16": 79,
    "bfloat16": 80,
    "float32": 81,
    "float64": 82,
    **{f"{'u' * (not signed)}int{8 << n}": 134 + 2 * n + signed for n in range(4) for signed in (0, 1)},
}
_DTYPES: Final = {code: DTYPES[name] for name, code in MAX_DTYPE_CODES.items()}
_START: Final = struct.Struct("<8sIIQI")  # magic, version, size of the metadata, length of the label
_MAX_SIZE: Final = 0xFFFFFFFF  # of an axis


def open_max(path: Path) -> Archive:
    """Open one file; its tensor is named as the file.

    Raises:
        ReadError: As `read_max_tensor`.
    """
    tensor = read_max_tensor(path, path.stem)
    return ForeignArchive(path, "max", [tensor], is_direct=True)


def read_max_tensor(path: Path, name: str) -> ForeignTensor:
    """Read the header of one file; the elements of its tensor are read when they are asked for.

    Raises:
        NotAnArchiveError: The file is none of this kind, of an unknown dtype, or of several tensors.
        CorruptArchiveError: It is cut short or contradicts itself.
        NewerVersionError: It is of a newer major version.
        ReadError: The system cannot read it.
    """
    with closing(InputFile(path)) as file:
        dtype, shape, offset = _read_header(file)
        expected = offset + math.prod(shape) * dtype.itemsize
        if file.size != expected:
            raise CorruptArchiveError(
                f"{path}: has {file.size} bytes, expected {expected} for {dtype.name} of shape {shape} "
                f"from byte {offset} on (MXF-7)"
            )
    return ForeignTensor(name, dtype, shape, partial(read_stored, path, expected, dtype.itemsize, offset))


def _read_header(file: InputFile) -> tuple[DType, tuple[int, ...], int]:
    """Dtype and shape of the tensor, and the byte at which its elements begin."""
    path = file.path
    first = file.read(0, min(file.size, _START.size))
    if first[: len(MAGIC)] != MAGIC:
        refuse_known_file(path, file.read(0, min(file.size, SIGNATURE_BYTES)))
        raise NotAnArchiveError(
            f"{path}: begins with {first[: len(MAGIC)]!r}, expected {MAGIC!r} (MXF-2)",
            hint=raw_file_hint(path),
        )
    if len(first) < _START.size:
        raise CorruptArchiveError(f"{path}: has {file.size} bytes, expected at least {_START.size} (MXF-1)")
    _, major, minor, metadata_size, label_size = _START.unpack(first)
    if major > 0:
        raise NewerVersionError(f"{path}: is of version {major}.{minor}, expected 0 (MXF-3)")
    if not 0 < label_size <= MAX_KEY_BYTES:
        raise CorruptArchiveError(
            f"{path}: has a label of {label_size} bytes, expected 1 to {MAX_KEY_BYTES} (MXF-5)"
        )
    rest = file.read(_START.size, label_size + 2)
    try:
        label = rest[:label_size].decode()
    except UnicodeDecodeError:
        raise CorruptArchiveError(f"{path}: label {rest[:label_size][:40]!r} is no UTF-8 (MXF-5)") from None
    code, rank = rest[label_size:]
    size = 4 + label_size + 2 + 4 * rank + 8
    if metadata_size != size:
        raise NotAnArchiveError(
            f"{path}: has {metadata_size} bytes of metadata, expected {size} for one tensor of {rank} axes "
            "(MXF-4)",
            hint="Files of several tensors are not read.",
        )
    if code not in _DTYPES:
        raise NotAnArchiveError(f"{path}: dtype code {code} is unknown (MXF-6)")
    dtype = _DTYPES[code]
    *sizes, offset = struct.unpack(f"<{rank}IQ", file.read(_START.size + label_size + 2, 4 * rank + 8))
    where = f"{path}: {abbreviate(label)!r}"
    shape = parse_shape(sizes, dtype.itemsize, where)
    if offset < 24 + size:
        raise CorruptArchiveError(
            f"{where}: its elements begin at byte {offset}, expected {24 + size} or later (MXF-7)"
        )
    return dtype, shape, offset


def write_max(path: Path, label: str, dtype: DType, shape: tuple[int, ...], blocks: Iterable[Array]) -> None:
    """Write a file as the engine does.

    Args:
        path: Of a new file.
        label: What is printed; the file keeps it with `_` for `/`.
        dtype: Logical dtype.
        shape: In elements.
        blocks: The stored elements in C order, in any number of arrays.

    Raises:
        UsageError: The format does not allow the dtype, the label or the shape.
        WriteError: The file cannot be written.
    """
    encoded = label.replace("/", "_").encode("utf-8", "surrogatepass")
    if dtype.name not in MAX_DTYPE_CODES:
        known = ", ".join(sorted(MAX_DTYPE_CODES))
        raise UsageError(
            f"{path}: .max files have no dtype {dtype.name!r} (MXF-6)", hint=f"They have: {known}."
        )
    if not 0 < len(encoded) <= MAX_KEY_BYTES or b"\0" in encoded:
        raise UsageError(
            f"{path}: label {abbreviate(label)!r} has {len(encoded)} bytes, expected 1 to {MAX_KEY_BYTES} "
            "without NUL (MXF-5)"
        )
    if any(size > _MAX_SIZE for size in shape):
        raise UsageError(f"{path}: shape {shape} has an axis of more than {_MAX_SIZE} elements (MXF-4)")
    size = 4 + len(encoded) + 2 + 4 * len(shape) + 8
    with write_errors(path), path.open("xb") as file:
        file.write(_START.pack(MAGIC, 0, 1, size, len(encoded)))
        file.write(encoded + bytes([MAX_DTYPE_CODES[dtype.name], len(shape)]))
        file.write(struct.pack(f"<{len(shape)}IQ", *shape, 24 + size))
        for block in blocks:
            file.write(np.ascontiguousarray(block).view("u1").data)
