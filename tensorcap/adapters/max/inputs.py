"""What a MAX model is run on: arrays, which become inputs of its graph, and constants of it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Final

import numpy as np

from tensorcap.adapters.max.engine import (
    Buffer,
    BufferType,
    DeviceRef,
    Dim,
    DLPack,
    MaxDType,
    TensorType,
    buffer,
)
from tensorcap.adapters.max.graph_plan import GraphSource
from tensorcap.adapters.max.trace import argument_names
from tensorcap.recording.structure import Kinds, rebuilt, walk
from tensorcap.workload.sources import class_name
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import escape

ARRAYS: Final = Kinds(tensors=(np.ndarray, Buffer, DLPack), texts=(MaxDType, DeviceRef, Dim))


class Given:
    """The arguments of one run.

    Attributes:
        names: Of the arrays, `ids` or `cache.0`.
        buffers: The arrays, in the order of the graph's inputs, where the graph wants them.
        types: Of the graph's inputs.
        dims: Sizes of symbolic dimensions.
    """

    def __init__(self, model: GraphSource, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Look at arguments.

        Raises:
            UsageError: They do not fit the types that the model has for them.
        """
        self._args, self._kwargs = tuple(args), dict(kwargs)
        found: list[tuple[str, Any]] = []

        def note(prefix: str, path: str, value: Any) -> Any:
            found.append((f"{prefix}.{path}" if path else prefix, value))
            return value

        for name, value in named(model, args, kwargs):
            rebuilt(value, ARRAYS, partial(note, name))
        self.names = [name for name, _ in found]
        arrays = [buffer(array) for _, array in found]
        who = class_name(model.module)
        self.types = _types(who, model.input_types, self.names, arrays)
        self.dims: dict[str, int] = {}
        for name, array, wanted in zip(self.names, arrays, self.types, strict=True):
            self._check(who, name, array, wanted)
        self.buffers = [_placed(a, t) for a, t in zip(arrays, self.types, strict=True)]

    @cached_property
    def signature(self) -> tuple[Any, ...]:
        """Equal where one graph does for both."""
        constants = [
            (leaf.name, repr(leaf.value))
            for leaf in walk([list(self._args), self._kwargs], ARRAYS)
            if not leaf.is_tensor
        ]
        return (*self.names, *map(repr, self.types), *constants)

    def put(self, inputs: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same arguments with the graph's inputs in the place of arrays."""
        left = iter(inputs)

        def change(path: str, array: Any) -> Any:
            return next(left)

        args = tuple(rebuilt(value, ARRAYS, change) for value in self._args)
        return args, {name: rebuilt(value, ARRAYS, change) for name, value in self._kwargs.items()}

    def _check(self, who: str, name: str, array: Any, wanted: Any) -> None:
        fits = array.dtype == wanted.dtype and len(array.shape) == len(wanted.shape)
        for size, dim in zip(array.shape, wanted.shape, strict=False):
            text = str(dim)
            fits = fits and int(size) == (
                int(text) if text.isdigit() else self.dims.setdefault(text, int(size))
            )
        if not fits:
            sizes = f" with {', '.join(f'{k}={v}' for k, v in self.dims.items())}" if self.dims else ""
            raise UsageError(
                f"{who}: input {name}: found {_text(array)}, expected {_text(wanted)}{sizes}",
                hint="input_types of the model say what its graph takes.",
            )

    def size_of(self, dims: Sequence[Any]) -> tuple[int, ...] | None:
        """A shape of the graph in this run; None where it is known only from what is computed."""
        texts = [str(dim) for dim in dims]
        if not all(text.isdigit() or text in self.dims for text in texts):
            return None
        return tuple(int(text) if text.isdigit() else self.dims[text] for text in texts)


def named(model: GraphSource, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The arguments of a run by name."""
    if model.forward is None:
        names = argument_names(type(model.module))
    else:
        names = tuple(inspect.signature(model.forward).parameters)[1:]
    for i, value in enumerate(args):
        yield (escape(names[i]) if i < len(names) else f"args.{i - len(names)}"), value
    for name, value in kwargs.items():
        yield escape(name), value


def _types(
    who: str, given: Sequence[Any] | Mapping[str, Any], names: Sequence[str], arrays: Sequence[Any]
) -> list[Any]:
    if not given:
        return [TensorType(a.dtype, list(a.shape), DeviceRef.from_device(a.device)) for a in arrays]
    listed = list(given)
    if isinstance(given, Mapping):
        if sorted(listed) != sorted(names):
            raise UsageError(f"{who}: inputs {', '.join(names)}, expected {', '.join(listed)}")
        return [given[name] for name in names]
    if len(listed) != len(names):
        raise UsageError(
            f"{who}: {len(names)} arrays among the inputs ({', '.join(names)}), expected {len(listed)}"
        )
    return listed


def _placed(array: Any, wanted: Any) -> Any:
    """An array on the device of an input; a graph writes to what it is given of a buffer type."""
    if isinstance(wanted, BufferType) or wanted.device.is_cpu() == array.device.is_host:
        return array
    return array.to(wanted.device.to_device())


def _text(tensor: Any) -> str:
    return f"{tensor.dtype.name}[{', '.join(map(str, tensor.shape))}]"
