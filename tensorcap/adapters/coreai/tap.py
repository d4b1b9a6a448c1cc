"""Runs of a Core AI model: its function is executed, and once more by the inspector, for its operations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np

from tensorcap.adapters.array_records import record_array
from tensorcap.adapters.coreai.conversion import Converted, converted
from tensorcap.adapters.coreai.description import modules_of
from tensorcap.adapters.coreai.engine import MissingValue, NDArray, quiet
from tensorcap.adapters.coreai.model import CoreAIModel
from tensorcap.adapters.coreai.op_recorder import OpRecorder, parameters_of, value_of
from tensorcap.adapters.coreai.operation_map import MappedOutput, OperationMap
from tensorcap.adapters.coreai.output_order import OrderedInspector
from tensorcap.adapters.coreai.runtime_log import without_runtime_log
from tensorcap.adapters.input_arrays import InputKind, named_arrays
from tensorcap.adapters.torch.graph_nodes import graph_nodes
from tensorcap.recording import Recorder
from tensorcap.wording import counted, some
from tensorcap.workload import class_name
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import CaptureError, UsageError, abbreviate
from tensorcap_formats.keys import escape

_T = TypeVar("_T")
_NO_NAMES: Final = (
    "the asset was converted in release mode: which node of the model each operation is, and its module, "
    "file and line, are not known, and the runtime gives the values of no operations, only inputs and outputs"
)
_SHAPES: Final = "It was converted for the shapes of its first inputs; make a CoreAIModel for each."
_UNORDERED: Final = "no target value: the runtime gives the outputs of the operation in no known order"
_NAMESAKE: Final = (
    "no target value: {} has the number {} too, and the value that the runtime gives may be of that"
)
_NO_LOCATIONS: Final = "the asset has no source locations: files and lines of its operations are not known"


@dataclass(frozen=True)
class _Values:
    """What a run gave: its inputs, its outputs, and, if operations were asked for, those of a second run."""

    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    operations: Mapping[int, Sequence[Array | None] | None]
    second_outputs: Mapping[str, Array]
    explain: Callable[[int], Any]
    unordered: frozenset[int] = frozenset()


def run(model: CoreAIModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Array]:
    """Run a model, through the capture that is under way if there is one."""
    if model.tapped_run is not None:
        outputs: dict[str, Array] = model.tapped_run(args, kwargs)
        return outputs
    return dict(_execute(model, converted(model, args, kwargs), args, kwargs, ()).outputs)


def tapped(model: CoreAIModel, recorder: Recorder) -> Callable[..., dict[str, Array]]:
    """The run of a model under capture."""

    def tapped_run(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Array]:
        with nullcontext() if model.is_asset else recorder.stage("Core AI converts the model"):
            known = converted(model, args, kwargs)
        operation_map = known.operation_map
        op_ids = sorted({row.op_id for row in operation_map.outputs} | operation_map.unmapped.keys())
        values = _execute(model, known, args, kwargs, op_ids)
        _record(values, operation_map, recorder, known.program, modules_of(model))
        if known.program is not None:
            recorder.facts["exported_nodes"] = [asdict(node) for node in graph_nodes(known.program)]
        return dict(values.outputs)

    return tapped_run


def _execute(
    model: CoreAIModel,
    known: Converted,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    op_ids: Sequence[int],
) -> _Values:
    """Run the function in a thread of its own, since the caller's may have an event loop."""
    name = name_of(model)

    async def execute() -> _Values:
        async with known.asset.executable() as executable:
            function = _function(model, executable)
            hint = None if known.program is None else _SHAPES
            inputs = named_arrays(name, _kinds(function.desc), args, kwargs, shape_hint=hint)
            results = await function({key: NDArray(array) for key, array in inputs.items()})
            names = function.desc.output_names  # in whose order the runtime does not give them
            outputs = {key: results[key].numpy().copy() for key in names}
            if not op_ids:
                return _Values(inputs, outputs, {}, {}, _no_reason)
            types = known.operation_map.results
            inspector = OrderedInspector(types, model=executable, function_name=model.function)
            operations = await inspector.get_intermediates_for_ops(list(op_ids), dict(inputs))
            second = inspector.last_outputs or {}
            unordered = frozenset(inspector.unordered)
            return _Values(inputs, outputs, operations, second, inspector.explain_missing, unordered)

    return _in_runtime(name, execute)


def input_kinds(model: CoreAIModel) -> dict[str, InputKind]:
    """What the inputs of an asset's function have to be, by name."""

    async def describe() -> dict[str, InputKind]:
        async with converted(model, (), {}).asset.executable() as executable:
            return _kinds(_function(model, executable).desc)

    return _in_runtime(name_of(model), describe)


def _kinds(descriptor: Any) -> dict[str, InputKind]:
    """Parse the descriptors of a function's inputs, of which one has the text `[2, -1], float32, bytes`."""
    kinds = {}
    for name in descriptor.input_names:
        shape, _, rest = str(descriptor.input_descriptor(name)).partition("], ")
        sizes = [part.strip() for part in shape.lstrip("[").split(",") if part.strip()]
        lengths = tuple(int(size) if size.isdigit() else None for size in sizes)
        kinds[name] = InputKind(lengths, rest.partition(",")[0].strip())
    return kinds


def name_of(model: CoreAIModel) -> str:
    """The model, for messages."""
    return str(model.source) if model.is_asset else class_name(model.source)


def _in_runtime(name: str, action: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    with quiet(), without_runtime_log(), ThreadPoolExecutor(1) as pool:
        try:
            return pool.submit(asyncio.run, action()).result()
        except UsageError:
            raise
        except Exception as error:
            reason = abbreviate(str(error).strip().partition("\n")[0], 300)
            raise CaptureError(f"{name}: Core AI cannot run it: {type(error).__name__}: {reason}") from error


def _function(model: CoreAIModel, executable: Any) -> Any:
    """The model's function.

    Raises:
        UsageError: There is none of the name, or it keeps state.
    """
    name = name_of(model)
    if model.function not in executable.function_names:
        names = ", ".join(executable.function_names)
        raise UsageError(f"{name}: no function {model.function!r}, expected one of: {names}")
    function = executable.load_function(model.function)
    states = list(function.desc.state_names)
    if states:
        raise UsageError(
            f"{name}: function {model.function!r} keeps state between calls ({some(states)}), expected one "
            "without: the inspector of Core AI cannot pass it on",
            hint="Give caches and buffers that are written to as inputs and outputs.",
        )
    return function


def _no_reason(op_id: int) -> Any:
    raise LookupError(op_id)


def _record(
    values: _Values,
    operation_map: OperationMap,
    recorder: Recorder,
    program: Any,
    classes: Mapping[str, str],
) -> None:
    """Record a run: inputs, mapped outputs as their torch nodes, other operations, outputs."""
    point = recorder.points[""]
    root = recorder.enter(point, id(values), is_outermost=True)
    if root is None:
        return
    for name, array in values.inputs.items():
        record_array(recorder, root, f"input.{escape(name)}", array, required=True)
    ops = OpRecorder(recorder, root, operation_map, parameters_of(program), classes)
    names = {op_id: row.node for row in operation_map.outputs for op_id in row.op_ids}

    def why_lost(row: MappedOutput) -> str:
        namesakes = operation_map.namesakes.get(row.node)
        if namesakes is not None and values.operations.get(row.op_id):
            return _NAMESAKE.format(namesakes.text, row.op_id)
        return _UNORDERED if row.op_id in values.unordered else _reason(values.explain(row.op_id), names)

    ops.record(partial(value_of, values.operations, operation_map), partial(record_array, recorder), why_lost)
    for op_id, op_name in operation_map.unmapped.items():
        results = [array for array in values.operations.get(op_id) or () if array is not None]
        call = recorder.inner(f"{op_name.rpartition('.')[2]}_{op_id}", "op", outer=root) if results else None
        if call is not None:
            for i, array in enumerate(results):
                record_array(recorder, call, "output" if len(results) == 1 else f"output.{i}", array)
    is_single = len(values.outputs) == 1
    for name, array in values.outputs.items():
        record_array(recorder, root, "output" if is_single else f"output.{escape(name)}", array)
    recorder.leave(point, id(values))
    recorder.finish(root)
    for each in recorder.points.values():
        if each.kind == "module" and not (each.calls or each.reason):
            each.reason = "no operation that is mapped to a node lies in it"
    recorder.facts["operation_map"] = [row.describe() for row in operation_map.outputs]
    notes = recorder.facts.setdefault("notes", [])
    notes.extend(note for note in _notes(values, operation_map) if note not in notes)


def _notes(values: _Values, operation_map: OperationMap) -> Iterable[str]:
    if not operation_map.outputs:
        yield _NO_NAMES
    elif not any(row.source.file for row in operation_map.outputs):
        yield _NO_LOCATIONS
    unlike = [
        name
        for name, array in values.second_outputs.items()
        if not np.array_equal(array, values.outputs[name], equal_nan=array.dtype.kind == "f")
    ]
    if unlike:
        yield (
            f"the values of operations are of a second run, whose outputs are not equal to those that are "
            f"recorded: {some(unlike)}"
        )


def _reason(explanation: Any, names: Mapping[int, str]) -> str:
    """Why an operation has no value, in words."""
    if explanation.reason is not MissingValue.Reason.MERGED_INTO_ANOTHER_OPERATION:
        return "no target value: no operation of the compiled program is mapped to it"
    holder = explanation.observable_op_id
    others = len(explanation.merged_with) - 1
    node = f", that of {names[holder]}," if holder in names else ""
    return (
        f"no target value: computed in one kernel with {counted(others, 'other operation')}, of which "
        f"operation {holder}{node} has the value"
    )
