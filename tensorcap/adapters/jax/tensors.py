"""Arrays of JAX as stored bits, and back; every dtype bit for bit."""

from __future__ import annotations

import functools
import sys
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax import numpy as jnp

from tensorcap.adapters.input_arrays import as_array
from tensorcap.adapters.protocol import NotCapturableError
from tensorcap.recording import Kinds, rebuild
from tensorcap_formats.dtypes import Array, DType, bits_of, dtype_of
from tensorcap_formats.errors import UsageError

ARRAYS = (np.ndarray, jax.Array)


@runtime_checkable
class _TorchTensor(Protocol):
    """A tensor of torch, which need not be imported."""

    def detach(self) -> Any: ...


@functools.cache
def kinds() -> Kinds:
    """How arguments and results are walked: modules and shared state of Flax are not entered."""
    nnx, linen = sys.modules.get("flax.nnx"), sys.modules.get("flax.linen")
    variables = () if nnx is None else (nnx.Variable,)
    opaque = () if nnx is None else (nnx.Module, nnx.RngStream)
    opaque += () if linen is None else (linen.Module,)
    return Kinds(tensors=(*ARRAYS, *variables), opaque=opaque, texts=(np.dtype, jax.Device))


def array_in(value: Any) -> Any:
    """The array of a leaf: of a variable of NNX what it holds.

    Raises:
        NotCapturableError: It has no elements that an archive can store.
    """
    array = value if isinstance(value, ARRAYS) else value[...]
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        raise NotCapturableError(f"dtype {array.dtype}")
    return array


def stored(array: Any) -> tuple[Array, DType]:
    """The stored elements of an array; they share its memory if they can.

    Raises:
        NotCapturableError: It has none that an archive can store.
    """
    try:
        values = np.asarray(array_in(array))
        return bits_of(values), dtype_of(values)
    except UsageError as error:
        raise NotCapturableError(str(error)) from None


def from_stored(bits: Array, dtype: DType) -> Array:
    """A numpy array of stored elements."""
    return np.array(bits, order="C").view(jnp.dtype(dtype.name))


def to_arrays(inputs: Any) -> Any:
    """Inputs as JAX takes them, nested ones too."""
    return rebuild(inputs, Kinds((_TorchTensor,)), lambda name, tensor: to_array(tensor))


def to_array(value: Any) -> Any:
    """An input as JAX takes it: a tensor of torch becomes an array of numpy, of its dtype."""
    if not hasattr(value, "detach"):
        return value
    array = as_array(value)  # of bfloat16, which numpy alone has not, as float32
    return array.astype(jnp.bfloat16) if str(value.dtype) == "torch.bfloat16" else array


def dtype_named(name: str) -> Any:
    """The dtype of JAX of a name on the command line: `bfloat16`, `bf16`.

    Raises:
        UsageError: There is no floating dtype of that name.
    """
    short = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
    try:
        dtype = jnp.dtype(short.get(name, name))
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise UsageError(
            f"dtype {name!r} is no floating dtype of JAX",
            hint="Known are: bfloat16, float16, float32, float64.",
        )
    return dtype
