"""Torch tensors as stored bits, and back; every dtype bit for bit.

numpy knows neither bfloat16 nor the narrower floats, so it sees the memory of such a tensor as integers.
A tensor without dense values in memory (sparse, nested, quantised, meta, fake, inside a function transform
or a graph under construction) is refused with the reason; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from tensorcap.adapters.protocol import NotCapturableError
from tensorcap_formats.dtypes import DTYPES, Array, DType, bits_of, dtype_of
from tensorcap_formats.errors import UsageError

PLAIN_CLASSES: Final = tuple(
    c for c in (torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", None)) if c is not None
)


class Stored(NamedTuple):
    """A tensor's stored elements; they share its memory if they can."""

    bits: Array
    dtype: DType
    shape: tuple[int, ...]


class _Form(NamedTuple):
    logical: DType
    storage: str  # numpy type code of its elements, in full


class _Memory:
    """Shows numpy a tensor's memory. After `Tensor.numpy`, its owner could not resize it any more."""

    __slots__ = ("__array_interface__", "_kept")

    def __init__(self, tensor: torch.Tensor, storage: str) -> None:
        self._kept = tensor
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "typestr": storage,
            "data": (tensor.data_ptr(), False),
        }


def _forms() -> dict[torch.dtype, _Form]:
    forms = {}
    for name, logical in DTYPES.items():
        dtype = getattr(torch, name, None)
        if isinstance(dtype, torch.dtype):
            forms[dtype] = _Form(logical, np.dtype(logical.storage).str)
    return forms


_FORMS: Final = _forms()


def stored(tensor: Any, part: tuple[slice, ...] | None = None) -> Stored:
    """The stored elements of a torch tensor or a numpy array; a tensor on a device is waited for.

    Args:
        tensor: The tensor.
        part: A slice for each axis; all of the tensor if None.

    Raises:
        NotCapturableError: It has no stored elements.
    """
    if isinstance(tensor, np.ndarray):
        if isinstance(tensor, np.ma.MaskedArray):
            raise NotCapturableError("a masked array, whose mask would be lost")
        tensor = tensor if part is None else tensor[part]
        try:
            return Stored(bits_of(tensor), dtype_of(tensor), tensor.shape)
        except UsageError as error:
            raise NotCapturableError(str(error)) from None
    return on_host(plain(tensor, part))


def plain(tensor: torch.Tensor, part: tuple[slice, ...] | None = None) -> torch.Tensor:
    """The same values on the same device, without autograd history, subclass or pending negation.

    Args:
        tensor: The tensor.
        part: As for `stored`.

    Raises:
        NotCapturableError: It has no values, or none that can be read now.
    """
    if type(tensor) not in PLAIN_CLASSES:
        tensor = _as_plain(tensor)
    if tensor.dtype not in _FORMS or not is_dense(tensor):
        raise NotCapturableError(_reason(tensor))
    if not tensor.is_cpu:
        _refuse_graph_capture(tensor)  # before anything is done on its stream, which would be in the graph
    values = tensor.detach() if part is None else tensor.detach()[part]
    if values.is_conj():
        values = values.resolve_conj()
    if values.is_neg():
        values = values.resolve_neg()
    return values


def on_host(values: torch.Tensor) -> Stored:
    """The stored elements of a plain tensor."""
    form = _FORMS[values.dtype]
    values = (values if values.is_cpu else values.cpu()).contiguous()
    shape = tuple(values.shape)
    bits = np.asarray(_Memory(values, form.storage)) if values.numel() else np.empty(shape, form.storage)
    return Stored(bits, form.logical, shape)


def logical_dtype(dtype: torch.dtype) -> DType:
    """The logical dtype of a plain tensor's dtype."""
    return _FORMS[dtype].logical


def from_stored(bits: Array, logical: DType) -> torch.Tensor:
    """Make a tensor of stored elements; its memory is its own.

    Raises:
        UsageError: This release of torch has no such dtype.
    """
    dtype = getattr(torch, logical.name, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"torch {torch.__version__} has no dtype {logical.name!r}")
    if logical.is_native:
        return torch.from_numpy(np.array(bits, order="C"))
    size = logical.itemsize
    as_integers = np.array(bits, order="C").view(f"<i{size}" if size > 1 else "u1")
    return torch.from_numpy(as_integers).view(dtype)


def save_tensor(bits: Array, dtype: DType, path: Path) -> None:
    """Write one tensor of stored elements as a `.pt` file.

    Raises:
        UsageError: This release of torch has no such dtype.
    """
    torch.save(from_stored(bits, dtype), path)


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype of a name on the command line: `bfloat16`, `bf16`, `torch.bfloat16`.

    Raises:
        UsageError: There is no floating dtype of that name.
    """
    short = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp64": "float64"}
    plain_name = name.removeprefix("torch.")
    dtype = getattr(torch, short.get(plain_name, plain_name), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UsageError(
            f"dtype {name!r} is no floating dtype of torch",
            hint="Known are: bfloat16, float16, float32, float64.",
        )
    return dtype


def device_named(name: str) -> torch.device:
    """The torch device of a name on the command line.

    Raises:
        UsageError: There is no such device, or it cannot be used.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise UsageError(f"device {name!r} cannot be used: {reason}") from error
    return device


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name without the module."""
    return str(dtype).removeprefix("torch.")


def equal_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have one shape, dtype and layout and the same values; NaN is equal to NaN.

    Those of no known values, as meta and nested ones, are equal to none.

    Example:
        >>> equal_values(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]))
        True
    """
    if any(tensor.is_meta or tensor.is_nested for tensor in (one, other)):
        return False
    if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
        return False
    return all(map(_are_equal, _dense_parts(one), _dense_parts(other)))


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two dense tensors have the same values."""
    one, other = _comparable(one), _comparable(other)
    if torch.equal(one, other):
        return True
    if one.shape != other.shape or not (one.is_floating_point() or one.is_complex()):
        return False
    is_nan = one.isnan()
    return torch.equal(is_nan, other.isnan()) and torch.equal(one[~is_nan], other[~is_nan])


def _dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensor itself; of a sparse one the indices and the values."""
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return tensor.indices(), tensor.values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor.to_dense(),)


def _comparable(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in a dtype that torch compares: the bits of two floats in a byte, wider floats."""
    if dtype_name(tensor.dtype).endswith("_x2"):
        return tensor.view(torch.uint8)
    if tensor.is_floating_point() and tensor.element_size() == 1:
        return tensor.float()
    return tensor.to(torch.complex64) if tensor.dtype == torch.complex32 else tensor


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor lie in memory, each with its value."""
    is_other = tensor.is_quantized or tensor.is_nested or tensor.is_meta or _is_wrapped(tensor)
    return not is_other and tensor.layout is torch.strided


def _as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """View a subclass that only adds behaviour as a plain tensor."""
    if type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        raise NotCapturableError(
            f"a {type(tensor).__module__}.{type(tensor).__qualname__} holds no plain values"
        )
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def _reason(tensor: torch.Tensor) -> str:
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided:
        return f"layout {str(tensor.layout).removeprefix('torch.')}"
    if tensor.is_quantized:
        return f"a quantised tensor ({dtype_name(tensor.dtype)})"
    if tensor.is_meta:
        return "on the meta device, without values"
    if _is_wrapped(tensor):
        return "inside a function transform (vmap, grad, …)"
    return f"dtype {dtype_name(tensor.dtype)}"


def _refuse_graph_capture(tensor: torch.Tensor) -> None:
    """Refuse a tensor under CUDA graph capture, which a copy to the host would break."""
    if tensor.is_cuda:
        with torch.cuda.device(tensor.device):  # the device whose current stream is asked for
            if torch.cuda.is_current_stream_capturing():
                raise NotCapturableError("inside a CUDA graph under capture")


_is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
