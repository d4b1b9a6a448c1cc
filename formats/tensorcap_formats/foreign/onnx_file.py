"""Initialisers of ONNX models, `.onnx`, read through the package onnx.

Those in the file itself are in memory while the archive is open; those in files beside it are read when they
are asked for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import onnx
from google.protobuf.message import DecodeError
from onnx import numpy_helper

from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array, bits_of, dtype_of
from tensorcap_formats.errors import (
    CorruptArchiveError,
    NotAnArchiveError,
    UnsafeFileError,
    abbreviate,
)
from tensorcap_formats.folder import refuse_link_out
from tensorcap_formats.foreign_archive import ForeignArchive, ForeignTensor
from tensorcap_formats.index import parse_shape
from tensorcap_formats.input_file import InputFile, check_total, read_stored

_PACKED: Final = re.compile(r"U?INT[1-7]|FLOAT[46]\w*")  # names of types of which bytes hold several
_KEYS: Final = ("offset", "length")  # of external data, numbers as text


def open_onnx(path: Path) -> Archive:
    """Open the initialisers of a model's graph, and the tensors of its Constant nodes, by name.

    Raises:
        CorruptArchiveError: It is no model, is cut short, or contradicts itself.
        NotAnArchiveError: It has no tensors.
        UnsafeFileError: It names a file outside of its folder.
    """
    tensors, skipped = initialisers(path, load_onnx(path))
    if not tensors:
        raise NotAnArchiveError(
            f"{path}: is an ONNX model without initialisers",
            hint="For what it computes, capture a run of it: tcap capture onnx.",
        )
    return ForeignArchive(path, "onnx", tensors, skipped=skipped)


def load_onnx(path: Path) -> Any:
    """Parse a model, without what it keeps in files beside it.

    Raises:
        CorruptArchiveError: It is no model, or is cut short.
    """
    with closing(InputFile(path)):  # with our messages if it cannot be opened
        pass
    try:
        return onnx.load(path, load_external_data=False)
    except (DecodeError, ValueError, MemoryError) as error:
        raise CorruptArchiveError(f"{path}: is no valid ONNX model: {' '.join(str(error).split())}") from None


def initialisers(path: Path, model: Any) -> tuple[list[ForeignTensor], dict[str, str]]:
    """The initialisers of a graph and the tensors of its Constant nodes; and, by name, why others are none.

    Raises:
        CorruptArchiveError: One contradicts itself, or its file is not there or too short.
        UnsafeFileError: One names a file outside of the model's folder.
    """
    with closing(InputFile(path)) as file:
        sizes = {path: file.size}
    tensors, skipped, declared = [], {}, 0
    for name, stored in _named_tensors(model.graph):
        if stored.data_type == onnx.TensorProto.STRING:
            skipped[name] = "an array of text"
        else:
            tensor = foreign_tensor(path, name, stored, sizes)
            tensors.append(tensor)
            declared += math.prod(tensor.shape) * tensor.dtype.itemsize
            check_total(sum(sizes.values()), declared, str(path))  # they may share bytes of a file beside it
    for sparse in model.graph.sparse_initializer:
        skipped[_text(sparse.values.name)] = "a sparse tensor"
    return tensors, skipped


def _named_tensors(graph: Any) -> Iterator[tuple[str, Any]]:
    for stored in graph.initializer:
        yield _text(stored.name), stored
    for node in graph.node:
        if node.op_type == "Constant" and len(node.output) == 1:
            for attribute in node.attribute:
                if attribute.name == "value":
                    yield _text(node.output[0]), attribute.t


def _text(value: str | bytes) -> str:
    """A text of the model; of one that is no UTF-8, versions of protobuf give the bytes."""
    return value if isinstance(value, str) else value.decode("utf-8", "backslashreplace")


def tensor_name(stored: Any) -> str:
    """The name of a tensor; "" if it has none."""
    return _text(stored.name)


def foreign_tensor(path: Path, name: str, stored: Any, sizes: dict[Path, int] | None = None) -> ForeignTensor:
    """A tensor of a model, in the file itself or beside it; raises as `initialisers` does.

    Args:
        path: Of the model.
        name: Of the tensor.
        stored: The tensor's own message.
        sizes: Is given the size of the file beside the model that has its values, in bytes.
    """
    where, shape = f"{path}: {abbreviate(name)!r}", tuple(int(size) for size in stored.dims)
    try:
        type_name = onnx.TensorProto.DataType.Name(stored.data_type)
        dtype = dtype_of(numpy_helper.to_array(onnx.TensorProto(data_type=stored.data_type, dims=[0])))
    except (ValueError, KeyError, TypeError):
        raise NotAnArchiveError(f"{where}: is of type {stored.data_type}, which is no tensor dtype") from None
    parse_shape(shape, dtype.itemsize, where)
    if stored.data_location == onnx.TensorProto.EXTERNAL:
        data = _ExternalData.of(path, stored, where)
        if sizes is not None:
            sizes[data.path] = data.file_size
        if not _PACKED.fullmatch(type_name):
            expected = math.prod(shape) * dtype.itemsize
            if data.size != expected:
                raise CorruptArchiveError(
                    f"{where}: has {data.size} bytes, expected {expected} for {dtype.name} of shape {shape}"
                )
            read = partial(read_stored, data.path, data.file_size, dtype.itemsize, data.offset)
            return ForeignTensor(name, dtype, shape, read)
        stored.raw_data = data.read_all()
        stored.data_location = onnx.TensorProto.DEFAULT
    try:
        values = numpy_helper.to_array(stored)
    except (ValueError, TypeError, LookupError, MemoryError) as error:
        raise CorruptArchiveError(f"{where}: {' '.join(str(error).split())}") from None
    if values.shape != shape:
        raise CorruptArchiveError(f"{where}: has values of shape {values.shape}, expected {shape}")
    bits = bits_of(values).reshape(-1)

    def read_elements(start: int, out: Array) -> None:
        out[:] = bits[start : start + out.size]

    return ForeignTensor(name, dtype, shape, read_elements)


@dataclass(frozen=True, slots=True)
class _ExternalData:
    """The place of a tensor's bytes in a file beside the model.

    Attributes:
        path: Of the file.
        file_size: Its size, in bytes.
        offset: Of the first byte.
        size: In bytes.
    """

    path: Path
    file_size: int
    offset: int
    size: int

    @classmethod
    def of(cls, model: Path, stored: Any, where: str) -> _ExternalData:
        """Check what a tensor says of its place."""
        entries = {_text(entry.key): _text(entry.value) for entry in stored.external_data}
        location = entries.get("location", "")
        parts = Path(location).parts
        if not parts or Path(location).is_absolute() or ".." in parts or "\0" in location:
            raise UnsafeFileError(
                f"{where}: keeps its values in {abbreviate(location)!r}, expected a file beside the model"
            )
        path = model.parent / location
        inside = model.parent
        for part in parts:
            inside = inside / part
            refuse_link_out(inside, model.parent, hint="Put a copy in its place.")
        with closing(InputFile(path)) as file:
            file_size = file.size
        try:
            numbers = {key: int(entries[key]) for key in _KEYS if key in entries}
        except ValueError:
            raise CorruptArchiveError(f"{where}: its offset or length is no number") from None
        offset = numbers.get("offset", 0)
        size = numbers.get("length", file_size - offset)
        if not 0 <= offset <= offset + size <= file_size:
            raise CorruptArchiveError(
                f"{where}: {size} bytes at {offset} of {path} are not within its {file_size}"
            )
        return cls(path, file_size, offset, size)

    def read_all(self) -> bytes:
        """All bytes."""
        with closing(InputFile(self.path)) as file:
            return file.read(self.offset, self.size)
