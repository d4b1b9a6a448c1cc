"""Files of torch.save and .npy files, made byte by byte after their layouts."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

STORAGES = {
    "float32": "FloatStorage",
    "bfloat16": "BFloat16Storage",
    "int32": "IntStorage",
    "int64": "LongStorage",
}
ITEMSIZES = {"float32": 4, "bfloat16": 2, "int32": 4, "int64": 8}


class Tensor(NamedTuple):
    """A tensor as bytes: little endian, in C order."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes


def floats(*values: float, shape: Sequence[int] | None = None) -> Tensor:
    return Tensor("float32", tuple(shape or (len(values),)), struct.pack(f"<{len(values)}f", *values))


def bfloats(*values: float, shape: Sequence[int] | None = None) -> Tensor:
    """Values that bfloat16 holds exactly: the upper halves of float32."""
    content = b"".join(struct.pack("<f", value)[2:] for value in values)
    return Tensor("bfloat16", tuple(shape or (len(values),)), content)


def integers(*values: int, shape: Sequence[int] | None = None, dtype: str = "int32") -> Tensor:
    code = {"int32": "i", "int64": "q"}[dtype]
    return Tensor(dtype, tuple(shape or (len(values),)), struct.pack(f"<{len(values)}{code}", *values))


def write_torch(path: Path, value: Tensor | Sequence[Tensor]) -> None:
    """A tensor, or a tuple of tensors, as torch.save writes it: a zip file, uncompressed, with a pickle."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = [value] if isinstance(value, Tensor) else list(value)
    pickled = io.BytesIO()
    pickled.write(b"\x80\x02")
    if not isinstance(value, Tensor):
        pickled.write(b"(")
    for number, tensor in enumerate(tensors):
        pickled.write(_pickled(number, tensor))
    if not isinstance(value, Tensor):
        pickled.write(b"t")
    pickled.write(b".")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        file.writestr("archive/data.pkl", pickled.getvalue())
        file.writestr("archive/byteorder", b"little")
        for number, tensor in enumerate(tensors):
            file.writestr(f"archive/data/{number}", tensor.content)
        file.writestr("archive/version", b"3\n")


def write_npy(path: Path, descr: str, shape: tuple[int, ...], content: bytes) -> None:
    """A .npy file of version 1.0, whose header is padded to a multiple of 64 bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}, }}".encode()
    header += b" " * (-(10 + len(header) + 1) % 64) + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content)


def _pickled(number: int, tensor: Tensor) -> bytes:
    """torch._utils._rebuild_tensor_v2(storage, 0, shape, strides, False, OrderedDict())."""
    count = len(tensor.content) // ITEMSIZES[tensor.dtype]
    strides: list[int] = []
    step = 1
    for size in reversed(tensor.shape):
        strides.insert(0, step)
        step *= size
    return b"".join(
        (
            b"ctorch._utils\n_rebuild_tensor_v2\n((",
            _text("storage"),
            f"ctorch\n{STORAGES[tensor.dtype]}\n".encode(),
            _text(str(number)),
            _text("cpu"),
            _number(count),
            b"tQ",
            _number(0),
            _tuple(tensor.shape),
            _tuple(strides),
            b"\x89ccollections\nOrderedDict\n)RtR",
        )
    )


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _number(number: int) -> bytes:
    return b"J" + struct.pack("<i", number)


def _tuple(numbers: Sequence[Any]) -> bytes:
    return b"(" + b"".join(map(_number, numbers)) + b"t"
