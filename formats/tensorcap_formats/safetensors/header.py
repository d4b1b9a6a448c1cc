"""The header of a safetensors file, parsed strictly and without the library of the format.

The header has a limit, each name occurs once, and the tensors cover the data exactly, so that a false header
is refused before anything is read or allocated.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

from tensorcap_formats.dtypes import DTYPES
from tensorcap_formats.errors import CorruptArchiveError, abbreviate
from tensorcap_formats.index import MAX_RANK
from tensorcap_formats.input_file import InputFile
from tensorcap_formats.records import Record

MAX_HEADER_BYTES: Final = 100_000_000
METADATA: Final = "__metadata__"
_MAX_AXES: Final = MAX_RANK + 1  # one more for dtypes that are stored as bytes
BITS: Final = {  # of one value, by dtype code
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "I8", "U8"), 8),
    **dict.fromkeys(("F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
CODES: Final = {  # of the format, for our dtypes; all others are stored as bytes (ARC-68)
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
DTYPE_OF_CODE: Final = {code: DTYPES[name] for name, code in CODES.items()}
OUR_PADDING: Final = b" " * 8  # ends the header; a library that rewrites the file pads with less (ARC-69)
SIX_BITS: Final = {"F6_E2M3": DTYPES["float6_e2m3fn"], "F6_E3M2": DTYPES["float6_e3m2fn"]}


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One tensor of a header.

    Attributes:
        code: Dtype code, a key of `BITS`.
        shape: Counts values, also those smaller than a byte.
        offset: Where its bytes begin, from the start of the file.
        nbytes: How many they are.
    """

    code: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(file: InputFile) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
    """Read the tensors, in the order of their bytes, and the metadata.

    Raises:
        CorruptArchiveError: The header is not as the format says, or does not fit the file.
    """
    length = int.from_bytes(file.read(0, 8), "little")
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise CorruptArchiveError(
            f"{file.path}: header length is {length}, expected 2 to {MAX_HEADER_BYTES} (ARC-80)"
        )
    if length > file.size - 8:
        raise CorruptArchiveError(f"{file.path}: header of {length} bytes ends after the file's {file.size}")
    header = _parse(file.read(8, length), str(file.path))
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise CorruptArchiveError(f"{file.path}: {METADATA} is no object of strings")
    entries = {name: _entry(name, value, 8 + length, str(file.path)) for name, value in header.items()}
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)))
    end = 8 + length
    for name, entry in entries.items():
        if entry.offset != end:
            raise CorruptArchiveError(
                f"{file.path}: {abbreviate(name)!r} begins at byte {entry.offset}, expected {end}: "
                "tensors leave no gap and do not overlap"
            )
        end += entry.nbytes
    if end != file.size:
        raise CorruptArchiveError(f"{file.path}: has {file.size} bytes, expected {end}")
    return entries, metadata


def _parse(data: bytes, source: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
            raise CorruptArchiveError(f"{source}: header has {abbreviate(twice)!r} twice")
        return entries

    try:
        header = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CorruptArchiveError(f"{source}: header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise CorruptArchiveError(f"{source}: header is a JSON {type(header).__name__}, expected an object")
    return header


def _entry(name: str, value: Any, data_at: int, source: str) -> HeaderEntry:
    where = f"{source}: {abbreviate(name)!r}"
    if not isinstance(value, dict):
        raise CorruptArchiveError(f"{where}: is {abbreviate(repr(value))}, expected an object")
    code, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(code, str) or code not in BITS:
        raise CorruptArchiveError(
            f"{where}: dtype is {abbreviate(repr(code))}, expected one of {', '.join(BITS)}"
        )
    if not _is_sizes(shape) or len(shape) > _MAX_AXES:
        raise CorruptArchiveError(
            f"{where}: shape is {abbreviate(repr(shape))}, expected up to {_MAX_AXES} sizes"
        )
    if not _is_sizes(offsets) or len(offsets) != 2:
        raise CorruptArchiveError(
            f"{where}: data_offsets is {abbreviate(repr(offsets))}, expected two offsets"
        )
    begin, end = offsets
    if (end - begin) * 8 != math.prod(shape) * BITS[code]:
        raise CorruptArchiveError(
            f"{where}: has {end - begin} bytes, expected those of {code} of shape {abbreviate(repr(shape))}"
        )
    return HeaderEntry(code, tuple(shape), data_at + begin, end - begin)


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def stored_form(record: Record) -> tuple[str, tuple[int, ...]]:
    """Dtype code and shape in the header: values if the format has the dtype, else bytes (ARC-68)."""
    shape, logical = record.shape, record.dtype
    code = CODES.get(logical.name)
    if code is None:
        return "U8", (*shape, logical.itemsize) if logical.itemsize > 1 else shape
    if logical.packed > 1:  # the format counts values, torch counts bytes
        return code, (*shape[:-1], logical.packed * (shape[-1] if shape else 1))
    return code, shape
