"""MAX's names in both of their generations, and its buffers as stored bits; nothing else asks which it is."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np

from tensorcap_formats.dtypes import DTYPES, Array, DType, bits_of, dtype_of
from tensorcap_formats.errors import MissingPackageError

try:
    import max.driver as driver
    from max.driver import CPU
    from max.dtype import DType as MaxDType
    from max.engine import InferenceSession, Model
    from max.graph import (
        BufferType,
        BufferValue,
        DeviceRef,
        Dim,
        Graph,
        TensorType,
        TensorValue,
        Value,
        Weight,
        ops,
    )
    from max.nn import LayerList
    from max.nn.layer import Layer, Module

    Buffer: Any = getattr(driver, "Buffer", None) or driver.Tensor  # its name before 26.1
except (ImportError, AttributeError) as error:
    if isinstance(error, ModuleNotFoundError) and error.name == "max":
        raise
    raise MissingPackageError(
        f"max: {error}; expected Modular MAX of a release that has max.nn and max.graph",
        hint="Install it with: pip install 'tensorcap[max]'",
    ) from None

__all__ = [
    "CPU",
    "VERSION",
    "Buffer",
    "BufferType",
    "BufferValue",
    "DLPack",
    "DeviceRef",
    "Dim",
    "Graph",
    "InferenceSession",
    "Layer",
    "LayerList",
    "MaxDType",
    "Model",
    "Module",
    "NoBitsError",
    "TensorType",
    "TensorValue",
    "Value",
    "Weight",
    "bits",
    "buffer",
    "buffer_of",
    "compiled",
    "initialised",
    "is_nested",
    "is_subgraph",
    "load_buffer",
    "logical",
    "ops",
]


def _version() -> str:
    try:
        return importlib.metadata.version("max")
    except importlib.metadata.PackageNotFoundError:
        return ""


VERSION: Final = _version()


class NoBitsError(Exception):
    """A buffer has no stored elements that could be kept; the text says why. Never leaves the adapter."""


@runtime_checkable
class DLPack(Protocol):
    """An array of any framework: numpy's, torch's, MAX's."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """What the exchange of arrays between frameworks is made by."""


def logical(dtype: MaxDType) -> DType:
    """The logical dtype of one of MAX's.

    Raises:
        NoBitsError: There is none.
    """
    found = DTYPES.get(dtype.name)
    if found is None or found.itemsize * 8 != _bits_of_one(dtype):
        raise NoBitsError(f"dtype {dtype.name}")
    return found


def _bits_of_one(dtype: MaxDType) -> int:
    size = getattr(dtype, "size_in_bits", None)
    return int(size) if isinstance(size, int) else 8 * int(dtype.size_in_bytes)


def bits(array: Any) -> tuple[Array, DType]:
    """The stored elements of an array, of whatever framework, which share its memory where they can.

    Raises:
        NoBitsError: It has none that could be kept.
    """
    if isinstance(array, np.ndarray):
        return bits_of(array), dtype_of(array)
    found = buffer(array)
    dtype = logical(found.dtype)
    if not found.device.is_host:
        found = found.to(CPU())
    if not found.is_contiguous:
        found = found.contiguous()
    if not _is_exchanged(dtype):
        found = found.view(getattr(MaxDType, f"uint{8 * dtype.itemsize}"), found.shape)
    return np.asarray(found.to_numpy()).view(dtype.storage), dtype


def buffer(array: Any) -> Any:
    """A buffer of an array, which shares its memory where it can."""
    if isinstance(array, Buffer):
        return array
    if isinstance(array, np.ndarray):
        return buffer_of(bits_of(array), dtype_of(array))
    return Buffer.from_dlpack(array)


def buffer_of(stored: Array, dtype: DType) -> Any:
    """A buffer of stored elements, on the CPU."""
    if not (stored.flags.c_contiguous and stored.flags.writeable):
        stored = np.array(stored, order="C")
    if _is_exchanged(dtype):
        return Buffer.from_numpy(stored)
    as_integers = stored.view(f"u{dtype.itemsize}")
    return Buffer.from_numpy(as_integers).view(getattr(MaxDType, dtype.name), stored.shape)


def _is_exchanged(dtype: DType) -> bool:
    """Whether numpy and MAX hand arrays of a dtype to each other, of any rank."""
    return dtype.is_native and dtype.kind != "bool"


def load_buffer(path: Path) -> Any:
    """What MAX's own reader makes of a `.max` file."""
    load = getattr(driver, "load_max_buffer", None) or driver.load_max_tensor
    return load(path)


def compiled(session: InferenceSession, graph: Graph, extensions: Sequence[Any] = ()) -> Any:
    """A graph compiled, if this release does that apart from loading; else the graph."""
    if hasattr(session, "compile") and hasattr(session, "init"):
        return session.compile(graph, **({"custom_extensions": extensions} if extensions else {}))
    return graph


def initialised(session: InferenceSession, artifact: Any, weights: Mapping[str, Any]) -> Model:
    """What `compiled` gave, with weights, ready to be executed."""
    if isinstance(artifact, Graph):
        return session.load(artifact, weights_registry=weights)
    return session.init(artifact, weights_registry=weights)


def is_nested(graph: Graph) -> bool:
    """Whether what is traced now lies in a branch or a loop of a graph."""
    body = getattr(graph, "_graph_body", None)
    return getattr(graph, "_current_block", body) is not body


def is_subgraph(graph: Graph) -> bool:
    """Whether a graph is a part that others call, which is given the order of effects by its caller."""
    return bool(getattr(graph, "_has_chain_input", False))
