"""The names and calls of MAX that differ between its releases; no other module asks which release it is."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

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
        StaticDim,
        SymbolicDim,
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
    "DeviceRef",
    "Dim",
    "Graph",
    "InferenceSession",
    "Layer",
    "LayerList",
    "MaxDType",
    "Model",
    "Module",
    "StaticDim",
    "SymbolicDim",
    "TensorType",
    "TensorValue",
    "Value",
    "Weight",
    "cache_folder",
    "compile_graph",
    "in_thread",
    "init_model",
    "is_nested",
    "is_subgraph",
    "load_buffer",
    "ops",
    "size_of",
]


_Result = TypeVar("_Result")
_ENVIRONMENT: Final = ("PYTHONEXECUTABLE", "PYTHONPATH")  # which MAX sets as it is imported, past os.environ


def _restore_environment() -> None:
    """Give processes that are started later the environment that Python knows.

    The interpreter that MAX found in the PATH would take the packages of a virtual environment from them.
    """
    for name in _ENVIRONMENT:
        if name in os.environ:
            os.putenv(name, os.environ[name])
        else:
            os.unsetenv(name)


_restore_environment()


def _version() -> str:
    try:
        return importlib.metadata.version("max")
    except importlib.metadata.PackageNotFoundError:
        return ""


VERSION: Final = _version()


def load_buffer(path: Path) -> Any:
    """Read a `.max` file by MAX's own reader."""
    load = getattr(driver, "load_max_buffer", None) or driver.load_max_tensor
    return load(path)


def compile_graph(session: InferenceSession, graph: Graph, extensions: Sequence[Any] = ()) -> Any:
    """Compile a graph, if this release compiles apart from loading; else return the graph."""
    if hasattr(session, "compile") and hasattr(session, "init"):
        return session.compile(graph, **({"custom_extensions": extensions} if extensions else {}))
    return graph


def init_model(session: InferenceSession, artifact: Any, weights: Mapping[str, Any]) -> Model:
    """Give weights to a result of `compile_graph`; the model can then be executed."""
    if isinstance(artifact, Graph):
        return session.load(artifact, weights_registry=weights)
    return session.init(artifact, weights_registry=weights)


def cache_folder() -> Path | None:
    """Where MAX keeps what it compiled, for later processes too; None if this release does not say it."""
    try:
        from max._core.engine import max_cache_dir
    except ImportError:
        return None
    folder = max_cache_dir()  # beside those of kernels
    return None if folder is None else Path(folder)


def in_thread(function: Callable[[], _Result]) -> Callable[[], _Result]:
    """The same function, for a thread other than that which imported MAX."""
    try:
        from max._mlir_context import ensure_default_mlir_context
    except ImportError:
        return function

    def call() -> _Result:
        with ensure_default_mlir_context():
            return function()

    return call


def size_of(dim: Any, sizes: Mapping[str, int]) -> int | None:
    """The size of a dimension, `rows + -1` too, by those of symbols; None if it is not known by them."""
    text = str(dim)
    if text in sizes:
        return sizes[text]
    if not text.isdigit() and hasattr(dim, "substitute"):
        text = str(in_thread(lambda: dim.substitute(sizes))())
    return int(text) if text.isdigit() else None


def is_nested(graph: Graph) -> bool:
    """Whether the code that is traced now lies in a branch or a loop of a graph."""
    body = getattr(graph, "_graph_body", None)
    return getattr(graph, "_current_block", body) is not body


def is_subgraph(graph: Graph) -> bool:
    """Whether a graph is called by others; its caller gives it the chain that orders effects."""
    return bool(getattr(graph, "_has_chain_input", False))
