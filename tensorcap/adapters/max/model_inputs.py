"""The inputs of a MAX model: arrays, which become inputs of its graph; all other leaves are its constants."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from tensorcap.adapters.max.engine import BufferType, DeviceRef, MaxDType, TensorType, size_of
from tensorcap.adapters.max.graph_plan import GraphSource, source_of
from tensorcap.adapters.max.modules import argument_names, module_of
from tensorcap.adapters.max.playback import record_array
from tensorcap.adapters.max.tensors import ARRAYS, as_buffer, from_stored, logical_dtype, stored
from tensorcap.recording import Call, Recorder, argument_slots, rebuild, walk
from tensorcap.workload import StoredInput, Workload, class_name
from tensorcap_formats.dtypes import DTYPES, cast, decode, encode
from tensorcap_formats.errors import UsageError
from tensorcap_formats.float_formats import FLOAT_FORMATS
from tensorcap_formats.keys import escape


class ModelInputs:
    """The arguments of one run.

    Attributes:
        names: The names of the arrays, `ids` or `cache.0`.
        buffers: The arrays, in the order of the graph's inputs and on their devices.
        types: The types of the graph's inputs.
        dims: The sizes of the symbolic dimensions.
    """

    def __init__(self, model: GraphSource, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Collect the arrays among arguments.

        Raises:
            UsageError: They do not fit the model's `input_types`.
        """
        self._args, self._kwargs = tuple(args), dict(kwargs)
        arrays_by_name: list[tuple[str, Any]] = []

        def note(prefix: str, path: str, value: Any) -> Any:
            arrays_by_name.append((f"{prefix}.{path}" if path else prefix, value))
            return value

        for name, value in name_arguments(model, args, kwargs):
            rebuild(value, ARRAYS, partial(note, name))
        self.names = [name for name, _ in arrays_by_name]
        arrays = [as_buffer(array) for _, array in arrays_by_name]
        model_class = class_name(model.module)
        self.types = _types(model_class, model.input_types, self.names, arrays)
        self.dims: dict[str, int] = {}
        for name, array, wanted in zip(self.names, arrays, self.types, strict=True):
            self._check(model_class, name, array, wanted)
        self.buffers = [_on_device(a, t) for a, t in zip(arrays, self.types, strict=True)]

    @cached_property
    def signature(self) -> tuple[Any, ...]:
        """Equal for two runs if one graph serves both."""
        constants = [
            (leaf.name, repr(leaf.value))
            for leaf in walk([list(self._args), self._kwargs], ARRAYS)
            if not leaf.is_tensor
        ]
        return (*self.names, *map(repr, self.types), *constants)

    def with_graph_inputs(self, inputs: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with the graph's inputs in the place of their arrays."""
        left = iter(inputs)

        def change(path: str, array: Any) -> Any:
            return next(left)

        args = tuple(rebuild(value, ARRAYS, change) for value in self._args)
        return args, {name: rebuild(value, ARRAYS, change) for name, value in self._kwargs.items()}

    def _check(self, model_class: str, name: str, array: Any, wanted: Any) -> None:
        fits = array.dtype == wanted.dtype and len(array.shape) == len(wanted.shape)
        for size, dim in zip(array.shape, wanted.shape, strict=False):
            text = str(dim)
            fits = fits and int(size) == (
                int(text) if text.isdigit() else self.dims.setdefault(text, int(size))
            )
        if not fits:
            sizes = f" with {', '.join(f'{k}={v}' for k, v in self.dims.items())}" if self.dims else ""
            raise UsageError(
                f"{model_class}: input {name}: found {_text(array)}, expected {_text(wanted)}{sizes}",
                hint="input_types of the model say what its graph takes.",
            )

    def shape_of(self, dims: Sequence[Any]) -> tuple[int, ...] | None:
        """The sizes of dimensions of the graph in this run; None if they depend on what is computed."""
        sizes = [size_of(dim, self.dims) for dim in dims]
        known = tuple(size for size in sizes if size is not None)
        return known if len(known) == len(sizes) else None


def name_arguments(
    model: GraphSource, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """The arguments of a run, each with its name."""
    if model.forward is None:
        names = argument_names(type(model.module))
    else:
        names = tuple(inspect.signature(model.forward).parameters)[1:]
    slots = argument_slots(names, len(args), kwargs)
    return zip((slot.removeprefix("input.") for slot in slots), (*args, *kwargs.values()), strict=True)


def _types(
    model_class: str,
    input_types: Sequence[Any] | Mapping[str, Any],
    names: Sequence[str],
    arrays: Sequence[Any],
) -> list[Any]:
    """The type of each array: from the model's `input_types`, or its own."""
    if not input_types:
        return [TensorType(a.dtype, list(a.shape), DeviceRef.from_device(a.device)) for a in arrays]
    listed = list(input_types)
    if isinstance(input_types, Mapping):
        if sorted(listed) != sorted(names):
            raise UsageError(f"{model_class}: inputs {', '.join(names)}, expected {', '.join(listed)}")
        return [input_types[name] for name in names]
    if len(listed) != len(names):
        raise UsageError(
            f"{model_class}: {len(names)} arrays among the inputs ({', '.join(names)}), "
            f"expected {len(listed)}"
        )
    return listed


def _on_device(array: Any, wanted: Any) -> Any:
    """An array on the device of an input; one of a buffer type stays itself, since the graph writes to it."""
    if isinstance(wanted, BufferType) or wanted.device.is_cpu() == array.device.is_host:
        return array
    return array.to(wanted.device.to_device())


def _text(tensor: Any) -> str:
    return f"{tensor.dtype.name}[{', '.join(map(str, tensor.shape))}]"


def with_archived_inputs(
    workload: Workload, inputs: Mapping[str, StoredInput]
) -> dict[str, Any] | tuple[Any, ...]:
    """Put archived inputs in the place of the workload's own, by argument and field, or by position.

    Raises:
        UsageError: An archived input is none of the workload's.
    """
    own = workload.inputs
    if isinstance(own, Mapping):
        values = dict(own)
    elif workload.run is None:
        values = dict(name_arguments(source_of(workload.model), own, {}))
    else:
        values = {str(i): value for i, value in enumerate(own)}
    left = {name: from_stored(*value) for name, value in inputs.items()}
    replaced = rebuild(values, ARRAYS, lambda name, array: left.pop(name, array))
    for name in left:
        raise UsageError(f"input {name!r} of the archive is none of the workload's: {', '.join(values)}")
    return replaced if isinstance(own, Mapping) else tuple(replaced.values())


def cast_inputs(inputs: Any, dtype: MaxDType) -> Any:
    """The inputs of a workload with each floating array in a dtype, rounded to nearest."""
    wanted = logical_dtype(dtype)

    def change(path: str, array: Any) -> Any:
        bits, own = stored(array)
        if own.kind != "float" or own == wanted:
            return array
        return from_stored(cast(bits, own, wanted)[0], wanted)

    return rebuild(inputs, ARRAYS, change)


def perturb(workload: Workload, dtype: str) -> Workload:
    """Multiply each floating input by 1 plus or minus the machine epsilon of a dtype, at random.

    Raises:
        UsageError: There is none, or no such dtype.
    """
    if dtype not in DTYPES or dtype not in FLOAT_FORMATS:
        raise UsageError(f"dtype {dtype!r}: its machine epsilon is not known")
    epsilon = FLOAT_FORMATS[dtype].epsilon
    signs = np.random.default_rng(0)
    changed = 0

    def change(path: str, array: Any) -> Any:
        nonlocal changed
        bits, own = stored(array)
        if own.kind != "float":
            return array
        changed += 1
        values = decode(bits, own).astype(np.float64)
        return from_stored(encode(values * (1 + epsilon * signs.choice((-1, 1), values.shape)), own), own)

    values = rebuild(workload.inputs, ARRAYS, change)
    if not changed:
        raise UsageError(
            f"{class_name(module_of(workload.model))}: has no floating input to perturb",
            hint="A baseline by another precision needs none.",
        )
    return replace(workload, inputs=values)


def record_inputs(inputs: Any, recorder: Recorder) -> None:
    """Record the arrays that a run is given as `given.NAME` of the root, before its first call."""
    call = Call(recorder.points[""], 0, 0)

    def keep(path: str, array: Any) -> Any:
        record_array(recorder, call, f"given.{escape(path)}", array, required=True)
        return array

    rebuild(inputs, ARRAYS, keep)
