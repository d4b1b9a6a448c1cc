"""Arrays as numpy saves them: .npy, .npz, and folders of .npy."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final

from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import DTYPES, Array, DType
from tensorcap_formats.errors import CorruptArchiveError, NotAnArchiveError, ReadError, UsageError, abbreviate
from tensorcap_formats.flat_arrays import Bands
from tensorcap_formats.folder import files_below, others_below
from tensorcap_formats.foreign.npy_header import MAX_HEADER_BYTES, NpyHeader, parse_header
from tensorcap_formats.foreign.strided import StridedTensor
from tensorcap_formats.foreign.zip_members import ZipMembers
from tensorcap_formats.foreign_archive import ForeignArchive, ForeignTensor
from tensorcap_formats.index import decode_json
from tensorcap_formats.input_file import InputFile, StoredElements
from tensorcap_formats.keys import Key, unescape

DTYPES_MEMBER: Final = "__dtypes__.json"  # of an .npz of ours: logical dtypes that numpy has not
_MAX_DTYPES_BYTES: Final = 64 * 1024 * 1024
_SUFFIX: Final = ".npy"

ReadBytes = Callable[[int, Array], None]


def open_npy(path: Path) -> Archive:
    """Open one array; it is named as the file.

    Raises:
        UnsafeFileError: It holds Python objects.
        CorruptArchiveError: Its header lies.
        NotAnArchiveError: It holds no numbers.
    """
    header, read = _npy_file(path)
    if header.dtype is None:
        raise NotAnArchiveError(f"{path}: holds {header.written!r}, expected numbers")
    tensor = _tensor(path.stem, header, header.dtype, read, Bands())
    return ForeignArchive(path, "npy", [tensor], resources=ExitStack())


def open_npy_folder(path: Path) -> Archive:
    """Open all .npy files below a folder, named by their paths in it.

    Raises:
        UnsafeFileError: One holds Python objects, or is a link out of the folder.
        CorruptArchiveError: The header of one lies.
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
    return ForeignArchive(path, "npy-folder", tensors, resources=ExitStack(), skipped=skipped)


def open_npz(path: Path) -> Archive:
    """Open the arrays of an .npz file, which is a zip file of .npy.

    Raises:
        UnsafeFileError: One holds Python objects, or expands absurdly.
        CorruptArchiveError: A header or the directory lies.
        NotAnArchiveError: It is no zip file of arrays.
    """
    with ExitStack() as resources:
        members = resources.enter_context(closing(ZipMembers(path)))
        is_ours = DTYPES_MEMBER in members.sizes
        logical = _logical_dtypes(members) if is_ours else {}
        tensors, skipped, bands = [], {}, Bands()
        for member, size in members.sizes.items():
            if not member.endswith(_SUFFIX):
                if member != DTYPES_MEMBER:
                    skipped[member] = "no .npy array"
                continue
            name, where = member[: -len(_SUFFIX)], f"{path}: {abbreviate(member)!r}"
            members.check(member)
            header = parse_header(members.read(member, MAX_HEADER_BYTES), where)
            if header.dtype is None:
                skipped[name] = f"an array of {header.written!r}"
                continue
            _check_size(header, header.dtype, size, where)
            read = _MemberReader(members, member).read
            dtype = logical.get(name, header.dtype)
            if dtype.storage != header.dtype.storage:
                raise CorruptArchiveError(
                    f"{where}: holds {header.dtype.name}, expected the bits of {dtype.name}"
                )
            original = _original_name(name) if is_ours else name
            tensors.append(_tensor(original, header, dtype, read, bands))
        if not tensors:
            raise NotAnArchiveError(f"{path}: holds no .npy array of numbers")
        return ForeignArchive(path, "npz", tensors, resources=resources, skipped=skipped)


class _MemberReader:
    """Reads bytes of one member of a zip file."""

    def __init__(self, members: ZipMembers, name: str) -> None:
        self._members = members
        self._name = name

    def read(self, start: int, out: Array) -> None:
        self._members.read_into(self._name, start, out)


def _npy_file(path: Path) -> tuple[NpyHeader, ReadBytes]:
    with closing(InputFile(path)) as file:
        header = parse_header(file.read(0, min(file.size, MAX_HEADER_BYTES)), str(path))
        if header.dtype is not None:
            _check_size(header, header.dtype, file.size, str(path))
        return header, StoredElements(path, 0, file.size, 1).read


def _check_size(header: NpyHeader, dtype: DType, size: int, where: str) -> None:
    expected = header.size + math.prod(header.shape) * dtype.itemsize
    if size != expected:
        raise CorruptArchiveError(
            f"{where}: has {size} bytes, expected {expected} for {header.written} of shape {header.shape}"
        )


def _tensor(name: str, header: NpyHeader, dtype: DType, read: ReadBytes, bands: Bands) -> ForeignTensor:
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
    """The name that a key of ours stands for; a full key is itself."""
    try:
        if not Key.parse(name).is_bare:
            return name
    except UsageError:  # not a key, but what `npz_output.member_name` makes of one
        pass
    return unescape(name)


def _logical_dtypes(members: ZipMembers) -> dict[str, DType]:
    where = f"{members.path}: {DTYPES_MEMBER}"
    members.check(DTYPES_MEMBER)
    if members.sizes[DTYPES_MEMBER] > _MAX_DTYPES_BYTES:
        raise CorruptArchiveError(f"{where}: has more than {_MAX_DTYPES_BYTES} bytes")
    names = decode_json(members.read(DTYPES_MEMBER, _MAX_DTYPES_BYTES), where)
    for name in names.values():
        if not isinstance(name, str) or name not in DTYPES:
            raise CorruptArchiveError(f"{where}: dtype {abbreviate(repr(name))} is unknown")
    return {key: DTYPES[name] for key, name in names.items()}
