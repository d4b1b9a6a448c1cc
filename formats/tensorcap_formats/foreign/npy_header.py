"""The header of a .npy array, parsed without running anything and without trusting it."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tensorcap_formats.dtypes import DTYPES, DType
from tensorcap_formats.errors import CorruptArchiveError, NotAnArchiveError, UnsafeFileError, abbreviate
from tensorcap_formats.index import check_shape

MAX_HEADER_BYTES: Final = 10_000 + 12  # as numpy: what is longer may choke the parser
_MAGIC: Final = b"\x93NUMPY"
_NUMBERS: Final = re.compile(r"([<>|=]?)(?:b1|[iu][1248]|f[248]|c8|c16|\?)")
_TEXT_AND_DATES: Final = re.compile(r"[<>|=]?(?:[SUa]\d*|[Mm]8(?:\[.*\])?)")
_VOID: Final = re.compile(r"([<>|=]?)V(\d+)")
_UNREADABLE: Final = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """What the header of an array says.

    Attributes:
        dtype: Logical dtype; None for text, dates and structures, which are no tensors.
        written: The dtype as written.
        is_swapped: Whether the elements are big endian.
        is_fortran: Whether the first axis varies fastest.
        shape: Its shape.
        size: Bytes of the header, which the elements follow.
        problem: Why the elements cannot be read, where their dtype is not known for sure.
    """

    dtype: DType | None
    written: str
    is_swapped: bool
    is_fortran: bool
    shape: tuple[int, ...]
    size: int
    problem: str | None


def parse_header(first: bytes, where: str) -> NpyHeader:
    """Parse a header.

    Args:
        first: The first bytes of the array, `MAX_HEADER_BYTES` or all if there are fewer.
        where: For messages.

    Raises:
        CorruptArchiveError: It is no header, or one that makes no sense.
        UnsafeFileError: The array holds Python objects, as pickle.
        NotAnArchiveError: Its numbers are of a type that is no tensor dtype.
    """
    fields, size = _fields(first, where)
    written, shape, is_fortran = fields["descr"], fields["shape"], fields["fortran_order"]
    if not isinstance(is_fortran, bool):
        raise CorruptArchiveError(
            f"{where}: fortran_order is {abbreviate(repr(is_fortran))}, expected a bool"
        )
    if _holds_objects(written):
        raise UnsafeFileError(
            f"{where}: is an array of Python objects, stored by pickle, which may run code when it is read",
            hint="Save each array by itself, or convert it to numbers, with the program that wrote it.",
        )
    dtype, order, problem = _dtype(written, where)
    if not isinstance(shape, tuple):
        raise CorruptArchiveError(f"{where}: shape is {abbreviate(repr(shape))}, expected a tuple")
    check_shape(shape, dtype.itemsize if dtype else 1, where)
    return NpyHeader(
        dtype, abbreviate(str(written)), order == ">", is_fortran and len(shape) > 1, shape, size, problem
    )


def _fields(first: bytes, where: str) -> tuple[dict[str, Any], int]:
    """The three fields as written, and the size of the header.

    `numpy.lib.format.read_array_header_1_0` gives a dtype for the text of `descr`, and with it '<V2'
    (bfloat16) is '|V2' (any two bytes) and '<f1' (float8_e5m2) an error; it has no reader of version 3.
    """
    if not first.startswith(_MAGIC) or len(first) < 10:
        raise CorruptArchiveError(f"{where}: begins with {first[:6]!r}, expected {_MAGIC!r}")
    if first[6] not in (1, 2, 3):
        raise CorruptArchiveError(f"{where}: .npy version is {first[6]}, expected 1, 2 or 3")
    width = 2 if first[6] == 1 else 4
    length = int.from_bytes(first[8 : 8 + width], "little")
    text = first[8 + width : 8 + width + length]
    if len(text) != length:
        raise CorruptArchiveError(f"{where}: header claims {length} bytes, {len(text)} are there or allowed")
    try:
        fields = ast.literal_eval(text.decode("utf-8" if first[6] == 3 else "latin-1").strip())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise CorruptArchiveError(f"{where}: header is no Python literal: {abbreviate(repr(text))}") from None
    if not isinstance(fields, dict) or fields.keys() != {"descr", "fortran_order", "shape"}:
        raise CorruptArchiveError(f"{where}: header lacks one of descr, fortran_order and shape")
    return fields, 8 + width + length


def _holds_objects(written: object) -> bool:
    if isinstance(written, str):
        return written.lstrip("<>|=").startswith("O")
    return isinstance(written, list | tuple) and any(map(_holds_objects, written))


def _dtype(written: object, where: str) -> tuple[DType | None, str, str | None]:
    """Logical dtype, byte order, and what keeps the elements from being read."""
    if not isinstance(written, str) or _TEXT_AND_DATES.fullmatch(written):
        return None, "", None
    if written == "<V2":  # how numpy writes bfloat16 of ml_dtypes; a true void of 2 bytes is '|V2'
        return DTYPES["bfloat16"], "<", None
    if written == "<f1":  # likewise
        return DTYPES["float8_e5m2"], "<", None
    void = _VOID.fullmatch(written)
    if void and int(void[2]) in _UNREADABLE:
        problem = (
            f"{where}: dtype {written!r} does not tell what its bytes are; numpy writes it for float8, int4 "
            "and other types that it does not know"
        )
        return DTYPES[_UNREADABLE[int(void[2])]], "<", problem
    if void:
        return None, "", None
    numbers = _NUMBERS.fullmatch(written)
    name = np.dtype(written).name if numbers else ""
    if numbers is None or name not in DTYPES:
        raise NotAnArchiveError(
            f"{where}: dtype {abbreviate(written)!r} is no tensor dtype", hint="Convert it to float64 first."
        )
    return DTYPES[name], numbers[1], None
