"""MAX buffers as stored bits, and back; every dtype bit for bit."""

from __future__ import annotations

from typing import Any, Final, Protocol, runtime_checkable

import numpy as np

from tensorcap.adapters.max.engine import CPU, Buffer, DeviceRef, Dim, MaxDType
from tensorcap.adapters.protocol import NotCapturableError
from tensorcap.recording import Kinds
from tensorcap_formats.dtypes import DTYPES, Array, DType, bits_of, dtype_of
from tensorcap_formats.errors import UsageError


@runtime_checkable
class DLPack(Protocol):
    """An array of any framework: numpy's, torch's, MAX's."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Export the array to another framework."""


def logical_dtype(dtype: MaxDType) -> DType:
    """The logical dtype of one of MAX's.

    Raises:
        NotCapturableError: There is none.
    """
    logical = DTYPES.get(dtype.name)
    if logical is None or logical.itemsize * 8 != _itemsize_bits(dtype):
        raise NotCapturableError(f"dtype {dtype.name}")
    return logical


def _itemsize_bits(dtype: MaxDType) -> int:
    size = getattr(dtype, "size_in_bits", None)
    return int(size) if isinstance(size, int) else 8 * int(dtype.size_in_bytes)


def stored(array: Any) -> tuple[Array, DType]:
    """The stored elements of an array of any framework; they share its memory if they can.

    Raises:
        NotCapturableError: It has none that an archive can store.
    """
    if isinstance(array, np.ndarray):
        return bits_of(array), dtype_of(array)
    buffer = as_buffer(array)
    dtype = logical_dtype(buffer.dtype)
    if not buffer.device.is_host:
        buffer = buffer.to(CPU())
    if not buffer.is_contiguous:
        buffer = buffer.contiguous()
    if not _is_exchanged(dtype):
        buffer = buffer.view(getattr(MaxDType, f"uint{8 * dtype.itemsize}"), buffer.shape)
    return np.asarray(buffer.to_numpy()).view(dtype.storage), dtype


def as_buffer(array: Any) -> Any:
    """A MAX buffer of an array of any framework; it shares the memory if it can."""
    if isinstance(array, Buffer):
        return array
    if isinstance(array, np.ndarray):
        return from_stored(bits_of(array), dtype_of(array))
    return Buffer.from_dlpack(array)


def from_stored(bits: Array, dtype: DType) -> Any:
    """Make a MAX buffer of stored elements, on the CPU."""
    if not (bits.flags.c_contiguous and bits.flags.writeable):
        bits = np.array(bits, order="C")
    if _is_exchanged(dtype):
        return Buffer.from_numpy(bits)
    as_integers = bits.view(f"u{dtype.itemsize}")
    return Buffer.from_numpy(as_integers).view(getattr(MaxDType, dtype.name), bits.shape)


def _is_exchanged(dtype: DType) -> bool:
    """Whether numpy and MAX exchange arrays of a dtype, of any rank."""
    return dtype.is_native and dtype.kind != "bool"


def dtype_named(name: str) -> MaxDType:
    """The MAX dtype of a name on the command line: `bfloat16`, `bf16`.

    Raises:
        UsageError: There is no floating dtype of that name.
    """
    short = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
    dtype = getattr(MaxDType, short.get(name, name), None)
    if not isinstance(dtype, MaxDType) or not dtype.is_float():
        raise UsageError(
            f"dtype {name!r} is no floating dtype of MAX",
            hint="Known are: bfloat16, float16, float32, float64.",
        )
    return dtype


ARRAYS: Final = Kinds(tensors=(np.ndarray, Buffer, DLPack), texts=(MaxDType, DeviceRef, Dim))
