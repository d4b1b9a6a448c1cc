"""Files of torch.save, read without torch: single ones, and folders of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import DTYPES
from tensorcap_formats.errors import CorruptArchiveError, NotAnArchiveError, UnsafeFileError, abbreviate
from tensorcap_formats.flat_arrays import Bands
from tensorcap_formats.folder import files_below, others_below
from tensorcap_formats.foreign.raw_file import raw_file_hint
from tensorcap_formats.foreign.signatures import SIGNATURE_BYTES, refuse_known_file
from tensorcap_formats.foreign.strided import StridedTensor, last_element
from tensorcap_formats.foreign.torch_pickle import Name, TensorView, read_pickle
from tensorcap_formats.foreign.zip_members import ZipMembers
from tensorcap_formats.foreign_archive import ForeignArchive, ForeignTensor
from tensorcap_formats.index import parse_shape
from tensorcap_formats.input_file import InputFile, check_expansion, check_total, read_stored
from tensorcap_formats.keys import MAX_KEY_BYTES

SUFFIXES: Final = (".pt", ".pth", ".bin")
_MAX_PICKLE_BYTES: Final = 64 * 1024 * 1024
_MAX_LEAVES: Final = 1_000_000
_MAX_DEPTH: Final = 100
_SHARD: Final = re.compile(r"(?:.*/)?(?:pytorch_model|.*-\d{5}-of-\d{5})")
_EXPANDED: Final = (
    "It is an expanded view, with strides of 0. If that is what you mean, save tensor.contiguous()."
)
_HINT: Final = "Save it anew with torch 1.6 or later, or its tensors as safetensors."


def open_torch_file(path: Path) -> Archive:
    """Open one file: a tensor, or dicts and lists of tensors, named by their keys joined with dots.

    Raises:
        UnsafeFileError: It is a plain pickle, or the pickle in it asks for more than tensors need.
        CorruptArchiveError: It is cut short, or a tensor reaches out of its storage.
        NotAnArchiveError: It is no torch file, or big endian.
    """
    contents = read_contents(path, path.stem, is_prefix=False, bands=Bands())
    return ForeignArchive(path, "pt", contents.tensors, values=contents.values, skipped=contents.skipped)


def open_torch_folder(path: Path) -> Archive:
    """Open all torch files below a folder.

    A name begins with that of its file, unless the files are parts of one checkpoint.

    Raises:
        UnsafeFileError: As `open_torch_file`, or a file is a link out of the folder.
        CorruptArchiveError: As `open_torch_file`.
        NotAnArchiveError: As `open_torch_file`, or there is none.
    """
    files = list(files_below(path, SUFFIXES))
    shards = [(name, file) for name, file in files if _SHARD.fullmatch(name)]
    files = shards or files  # beside a checkpoint there may be pickles of other things
    reason = "no part of the checkpoint" if shards else "no .pt file"
    others = others_below(path, [file for _, file in files], reason)
    contents, bands = TorchFileContents([], {}, others), Bands()
    for name, file in files:
        part = read_contents(file, name, is_prefix=not shards, bands=bands)
        contents.tensors.extend(part.tensors)
        contents.values.update(part.values)
        contents.skipped.update(part.skipped)
    if not contents.tensors:
        raise NotAnArchiveError(f"{path}: holds no torch file with tensors")
    return ForeignArchive(
        path, "pt-folder", contents.tensors, values=contents.values, skipped=contents.skipped
    )


@dataclass(frozen=True, slots=True)
class TorchFileContents:
    """The contents of torch files.

    Attributes:
        tensors: The tensors.
        values: Other values, by name.
        skipped: Why other things are not read, by name.
    """

    tensors: list[ForeignTensor]
    values: dict[str, Any]
    skipped: dict[str, str]


def read_contents(path: Path, name: str, *, is_prefix: bool, bands: Bands) -> TorchFileContents:
    """Read the pickle of one file and find its tensors, whose elements are read when they are asked for.

    Args:
        path: Of the file.
        name: Name of a tensor that is all that the file holds.
        is_prefix: Whether the names of several tensors begin with `name`, before a `/`.
        bands: Keeps rows of strided tensors.

    Raises:
        ReadError: As `open_torch_file`.
    """
    _refuse_bare_pickle(path)
    with closing(ZipMembers(path)) as members:
        pickles = [
            member for member in members.sizes if member.endswith("data.pkl") and member.count("/") == 1
        ]
        if len(pickles) != 1:
            raise NotAnArchiveError(
                f"{path}: has {len(pickles)} members data.pkl, expected one of torch.save"
            )
        root = pickles[0][: -len("data.pkl")]
        _refuse_big_endian(members, root)
        members.check(pickles[0])
        if not members.is_stored(pickles[0]):
            raise NotAnArchiveError(f"{path}: its pickle is compressed, expected plain bytes", hint=_HINT)
        if members.sizes[pickles[0]] > _MAX_PICKLE_BYTES:
            raise CorruptArchiveError(f"{path}: pickle has more than {_MAX_PICKLE_BYTES} bytes")
        value = read_pickle(members.read(pickles[0], _MAX_PICKLE_BYTES), str(path))
        contents = TorchFileContents([], {}, {})
        for parts, leaf in _leaves(value, str(path)):
            below = ".".join(parts)
            full = name if not below else f"{name}/{below}" if is_prefix else below
            if isinstance(leaf, TensorView):
                contents.tensors.append(_tensor(full, leaf, members, root, bands))
            elif isinstance(leaf, float) and not math.isfinite(leaf):
                contents.values[full] = str(leaf)  # JSON has no such numbers
            elif leaf is None or isinstance(leaf, bool | int | float | str):
                contents.values[full] = leaf
            elif isinstance(leaf, Name):  # a dtype
                contents.values[full] = str(leaf)
            else:
                contents.skipped[full] = f"a {type(leaf).__name__} that is no tensor"
        declared = sum(math.prod(t.shape) * t.dtype.itemsize for t in contents.tensors)
        check_total(members.file_size, declared, str(path))
    return contents


def _refuse_bare_pickle(path: Path) -> None:
    with closing(InputFile(path)) as file:
        first = file.read(0, min(SIGNATURE_BYTES, file.size))
    if not first.startswith(b"PK"):
        refuse_known_file(path, first)
        is_pickle = first[:1] == b"\x80" or path.suffix == ".pkl"
        kind = UnsafeFileError if is_pickle else NotAnArchiveError
        advice = _HINT if is_pickle else raw_file_hint(path)
        what = "is a bare pickle, which may run code when it is read" if is_pickle else "is no zip file"
        raise kind(f"{path}: {what}, expected the zip format of torch.save", hint=advice)


def _refuse_big_endian(members: ZipMembers, root: str) -> None:
    order = f"{root}byteorder"
    if order in members.sizes:
        members.check(order)
        byte_order = members.read(order, 16)
        if byte_order != b"little":
            raise NotAnArchiveError(
                f"{members.path}: byte order is {byte_order!r}, expected b'little'", hint=_HINT
            )


def _leaves(root: Any, source: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Path and value of each leaf; a small pickle that nests lists to billions of leaves is refused."""
    pending: list[tuple[tuple[str, ...], int, Any]] = [((), 0, root)]
    visited = 0
    while pending:
        parts, length, value = pending.pop()
        visited += 1
        if visited > _MAX_LEAVES or len(parts) > _MAX_DEPTH or length > MAX_KEY_BYTES:
            raise CorruptArchiveError(
                f"{source}: has more than {_MAX_LEAVES} values, or names of more than {_MAX_DEPTH} parts "
                f"or {MAX_KEY_BYTES} characters"
            )
        if isinstance(value, dict):
            children = [(str(key), child) for key, child in value.items()]
        elif isinstance(value, list | tuple):
            children = [(str(number), child) for number, child in enumerate(value)]
        else:
            yield parts, value
            continue
        if len(children) + len(pending) > _MAX_LEAVES:
            raise CorruptArchiveError(f"{source}: has more than {_MAX_LEAVES} values")
        pending += [((*parts, key), length + len(key) + 1, child) for key, child in reversed(children)]


def _tensor(name: str, view: TensorView, members: ZipMembers, root: str, bands: Bands) -> ForeignTensor:
    where = f"{members.path}: {abbreviate(name)!r}"
    logical = DTYPES[view.dtype]
    member = f"{root}data/{view.storage.key}"
    if member not in members.sizes:
        raise CorruptArchiveError(f"{where}: its storage {abbreviate(member)!r} is missing")
    members.check(member)
    if not members.is_stored(member):
        raise NotAnArchiveError(f"{where}: its storage is compressed, expected plain bytes", hint=_HINT)
    size = members.sizes[member]
    declared = view.storage.numel * (DTYPES[view.storage.dtype].itemsize if view.storage.dtype else 1)
    if declared != size:
        raise CorruptArchiveError(f"{where}: its storage has {size} bytes, expected {declared}")
    parse_shape(view.shape, logical.itemsize, where)
    if math.prod(view.shape):
        last = last_element(view.offset, view.shape, view.strides)
        if (last + 1) * logical.itemsize > size:
            raise CorruptArchiveError(
                f"{where}: reaches to element {last} of a storage of {size // logical.itemsize}"
            )
        check_expansion(size, math.prod(view.shape) * logical.itemsize, where, hint=_EXPANDED)
    offset = members.offset(member)
    tensor = StridedTensor(
        partial(read_stored, members.path, members.file_size, logical.itemsize, offset),
        logical.storage,
        offset=view.offset,
        shape=view.shape,
        strides=view.strides,
        bands=bands,
    )
    return ForeignTensor(name, logical, view.shape, tensor.read)
