"""Arrays as numpy saves them: .npy, .npz, and folders of .npy; and an .npz file of an archive's tensors.

The header of an array is checked against the file, and nothing in it is run.
"""

from __future__ import annotations

import ast
import math
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from tensorcap_formats.archive import Archive
from tensorcap_formats.content import write_errors
from tensorcap_formats.dtypes import DTYPES, Array, DType
from tensorcap_formats.errors import (
    CorruptArchiveError,
    NotAnArchiveError,
    ReadError,
    UnsafeFileError,
    UsageError,
    abbreviate,
)
from tensorcap_formats.flat_arrays import Bands
from tensorcap_formats.folder import files_below, others_below
from tensorcap_formats.foreign.strided import StridedTensor
from tensorcap_formats.foreign.zip_members import ZipMembers
from tensorcap_formats.foreign_archive import ForeignArchive, ForeignTensor
from tensorcap_formats.index import decode_json, encode_json, parse_shape
from tensorcap_formats.input_file import InputFile, check_total, read_stored
from tensorcap_formats.keys import Key, unescape
from tensorcap_formats.records import Record

_DTYPES_MEMBER: Final = "__dtypes__.json"  # of an .npz of ours: logical dtypes that numpy has not
_MAX_DTYPES_BYTES: Final = 64 * 1024 * 1024
_SUFFIX: Final = ".npy"

ReadBytes = Callable[[int, Array], None]
_MAX_HEADER_BYTES: Final = 10_000 + 12  # as numpy: what is longer may choke the parser
_MAGIC: Final = b"\x93NUMPY"
_NUMBERS: Final = re.compile(r"([<>|=]?)(?:b1|[iu][1248]|f[248]|c8|c16|\?)")
_TEXT_AND_DATES: Final = re.compile(r"[<>|=]?(?:[SUa]\d*|[Mm]8(?:\[.*\])?)")
_VOID: Final = re.compile(r"([<>|=]?)V(\d+)")
_UNREADABLE: Final = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


def open_npy(path: Path) -> Archive:
    """Open one array; it is named as the file.

    Raises:
        UnsafeFileError: It holds Python objects.
        CorruptArchiveError: Its header contradicts the file.
        NotAnArchiveError: It holds no numbers.
    """
    return ForeignArchive(path, "npy", [read_npy_tensor(path, path.stem)])


def read_npy_tensor(path: Path, name: str, *, void_dtypes: Mapping[int, str] | None = None) -> ForeignTensor:
    """The array of a file, under a name; its elements are read later.

    Args:
        path: Of the file.
        name: The tensor's.
        void_dtypes: Dtypes of bits whose dtype numpy does not know, by their width in bytes; without it they
            cannot be read.

    Raises:
        UnsafeFileError: It holds Python objects.
        CorruptArchiveError: Its header contradicts the file.
        NotAnArchiveError: There is no such file, or it holds no numbers.
        ReadError: The system cannot read it.
    """
    header, read = _npy_file(path)
    if header.dtype is None:
        raise NotAnArchiveError(f"{path}: holds {header.written!r}, expected numbers")
    if header.problem and void_dtypes and header.dtype.itemsize in void_dtypes:
        known = replace(header, problem=None)
        return _tensor(name, known, DTYPES[void_dtypes[header.dtype.itemsize]], read, Bands())
    return _tensor(name, header, header.dtype, read, Bands())


def npy_tensor_in(read: ReadBytes, size: int, name: str, where: str) -> ForeignTensor:
    """The array of a .npy file within another file, under a name; its elements are read later.

    Args:
        read: Fills an array with the bytes of the .npy file from an offset on.
        size: Bytes of the .npy file.
        name: The tensor's.
        where: For messages.

    Raises:
        UnsafeFileError: It holds Python objects.
        CorruptArchiveError: Its header contradicts it.
        NotAnArchiveError: It holds no numbers.
    """
    start = np.empty(min(size, 12), np.uint8)
    read(0, start)
    first = np.empty(min(size, _header_bytes(start.tobytes())), np.uint8)
    read(0, first)  # and no more: damage of its elements is found when these are read
    header = _parse_header(first.tobytes(), where)
    if header.dtype is None:
        raise NotAnArchiveError(f"{where}: holds {header.written!r}, expected numbers")
    _check_size(header, header.dtype, size, where)
    return _tensor(name, header, header.dtype, read, Bands())


def open_npy_folder(path: Path) -> Archive:
    """Open all .npy files below a folder, named by their paths in it.

    Raises:
        UnsafeFileError: One holds Python objects, or is a link out of the folder.
        CorruptArchiveError: The header of one contradicts the file.
    """
    tensors, bands = [], Bands()
    files = list(files_below(path, (_SUFFIX,)))
    skipped = others_below(path, [file for _, file in files], f"no {_SUFFIX} file")
    for name, file in files:
        header, read = _npy_file(file)
        if header.dtype is None:
            skipped[name] = f"an array of {header.written!r}"
        else:
            tensors.append(_tensor(name, header, header.dtype, read, bands))
    if not tensors:
        raise NotAnArchiveError(f"{path}: holds no .npy file with numbers")
    return ForeignArchive(path, "npy-folder", tensors, skipped=skipped)


def open_npz(path: Path) -> Archive:
    """Open the arrays of an .npz file, which is a zip file of .npy.

    Raises:
        UnsafeFileError: One holds Python objects, or expands absurdly.
        CorruptArchiveError: A header or the directory contradicts the file.
        NotAnArchiveError: It is no zip file of arrays.
    """
    with ExitStack() as resources:
        members = resources.enter_context(closing(ZipMembers(path, has_checksums=True)))
        is_ours = _DTYPES_MEMBER in members.sizes
        logical = _logical_dtypes(members) if is_ours else {}
        tensors, skipped, bands = [], {}, Bands()
        for member, size in members.sizes.items():
            if not member.endswith(_SUFFIX):
                if member != _DTYPES_MEMBER:
                    skipped[member] = "no .npy array"
                continue
            name, where = member[: -len(_SUFFIX)], f"{path}: {abbreviate(member)!r}"
            members.check(member)
            header = _parse_header(_read_header(members, member), where)
            if header.dtype is None:
                skipped[name] = f"an array of {header.written!r}"
                continue
            _check_size(header, header.dtype, size, where)
            read = partial(members.read_into, member)
            dtype = logical.get(name, header.dtype)
            if dtype.storage != header.dtype.storage:
                raise CorruptArchiveError(
                    f"{where}: holds {header.dtype.name}, expected the bits of {dtype.name}"
                )
            original = _original_name(name) if is_ours else name
            tensors.append(_tensor(original, header, dtype, read, bands))
        if not tensors:
            raise NotAnArchiveError(f"{path}: holds no .npy array of numbers")
        check_total(members.file_size, sum(members.sizes.values()), str(path))  # they may overlap
        return ForeignArchive(path, "npz", tensors, resources=resources, skipped=skipped)


def _npy_file(path: Path) -> tuple[_NpyHeader, ReadBytes]:
    with closing(InputFile(path)) as file:
        header = _parse_header(file.read(0, min(file.size, _MAX_HEADER_BYTES)), str(path))
        if header.dtype is not None:
            _check_size(header, header.dtype, file.size, str(path))
        return header, partial(read_stored, path, file.size, 1, 0)


def _check_size(header: _NpyHeader, dtype: DType, size: int, where: str) -> None:
    expected = header.size + math.prod(header.shape) * dtype.itemsize
    if size != expected:
        raise CorruptArchiveError(
            f"{where}: has {size} bytes, expected {expected} for {header.written} of shape {header.shape}"
        )


def _tensor(name: str, header: _NpyHeader, dtype: DType, read: ReadBytes, bands: Bands) -> ForeignTensor:
    def read_elements(start: int, out: Array) -> None:
        if header.problem:
            raise ReadError(header.problem, hint="Save the bits as an unsigned integer, or use safetensors.")
        read(header.size + start * dtype.itemsize, out)
        if header.is_swapped:
            out.byteswap(inplace=True)

    shape = header.shape
    if not header.is_fortran:
        return ForeignTensor(name, dtype, shape, read_elements)
    strides = tuple(math.prod(shape[:axis]) for axis in range(len(shape)))
    view = StridedTensor(read_elements, dtype.storage, offset=0, shape=shape, strides=strides, bands=bands)
    return ForeignTensor(name, dtype, shape, view.read)


def _original_name(name: str) -> str:
    """The name that a bare key was made of; a full key is its own name."""
    with suppress(UsageError):  # of a member name that is no key
        if not Key.parse(name).is_bare:
            return name
    return unescape(name)


def _read_header(members: ZipMembers, member: str) -> bytes:
    """The header of an array, and no more of it: damage of its elements is found when these are read."""
    return members.read(member, _header_bytes(members.read(member, 12)))


def _header_bytes(first: bytes) -> int:
    """How many bytes have the header of an array, by its first 12."""
    length = first[8:10] if first[6:7] == b"\1" else first[8:12]
    return min(12 + int.from_bytes(length, "little"), _MAX_HEADER_BYTES)


def _logical_dtypes(members: ZipMembers) -> dict[str, DType]:
    where = f"{members.path}: {_DTYPES_MEMBER}"
    members.check(_DTYPES_MEMBER)
    if members.sizes[_DTYPES_MEMBER] > _MAX_DTYPES_BYTES:
        raise CorruptArchiveError(f"{where}: has more than {_MAX_DTYPES_BYTES} bytes")
    names = decode_json(members.read(_DTYPES_MEMBER, _MAX_DTYPES_BYTES), where)
    for name in names.values():
        if not isinstance(name, str) or name not in DTYPES:
            raise CorruptArchiveError(f"{where}: dtype {abbreviate(repr(name))} is unknown")
    return {key: DTYPES[name] for key, name in names.items()}


def write_npz(source: Archive, path: Path, records: Sequence[Record], *, compress: bool = False) -> None:
    """Write an .npz file at a path where nothing is yet.

    It has no run, no order and no links: equal tensors are written as often as they have names. Of dtypes
    that numpy has not, such as bfloat16, the bits are written as unsigned integers, exactly, and the member
    `__dtypes__.json` names the dtypes.

    Args:
        source: Where the records and their bytes come from.
        path: Of the new file.
        records: Which.
        compress: Deflate the members.

    Raises:
        UsageError: Only statistics were kept of a record.
        ReadError: The source cannot be read, or fails a checksum.
        WriteError: The disk is full.
    """
    for record in records:
        if not record.stored:
            raise UsageError(f"{record.key.text}: only its statistics were kept, which .npz has no place for")
    method = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with write_errors(path), zipfile.ZipFile(path, "x", method) as file:
        for record in records:
            member = zipfile.ZipInfo(f"{_member_name(record)}.npy")
            member.compress_type = method
            with file.open(member, "w", force_zip64=True) as out:
                header = {
                    "descr": np.dtype(record.dtype.storage).str,
                    "fortran_order": False,
                    "shape": record.shape,
                }
                np.lib.format.write_array_header_1_0(out, header)
                for block in source.blocks(record):
                    out.write(block.view("u1").data)
        dtypes = {_member_name(r): r.dtype.name for r in records if not r.dtype.is_native}
        file.writestr(zipfile.ZipInfo(_DTYPES_MEMBER), encode_json(dtypes))


def _member_name(record: Record) -> str:
    """The key's text; a leading `/`, which would unpack to the root of the file system, is escaped."""
    text = record.key.text
    return f"%2F{text[1:]}" if text.startswith("/") else text


@dataclass(frozen=True, slots=True)
class _NpyHeader:
    """The parsed header of an array.

    Attributes:
        dtype: Logical dtype; None for text, dates and structures, which are no tensors.
        written: The dtype as written.
        is_swapped: Whether the elements are big endian.
        is_fortran: Whether the first axis varies fastest.
        shape: Its shape.
        size: Bytes of the header, which the elements follow.
        problem: Why the elements cannot be read, if their dtype is not known for sure.
    """

    dtype: DType | None
    written: str
    is_swapped: bool
    is_fortran: bool
    shape: tuple[int, ...]
    size: int
    problem: str | None


def _parse_header(first: bytes, where: str) -> _NpyHeader:
    """Parse a header.

    Args:
        first: The first bytes of the array, `_MAX_HEADER_BYTES` or all if there are fewer.
        where: For messages.

    Raises:
        CorruptArchiveError: It is no header, or an invalid one.
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
    dtype, order, problem = _dtype_of(written, where)
    if not isinstance(shape, tuple):
        raise CorruptArchiveError(f"{where}: shape is {abbreviate(repr(shape))}, expected a tuple")
    parse_shape(shape, dtype.itemsize if dtype else 1, where)
    return _NpyHeader(
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


def _dtype_of(written: object, where: str) -> tuple[DType | None, str, str | None]:
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
