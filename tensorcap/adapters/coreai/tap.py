"""Runs of a Core AI model: its function is executed, and once more by the inspector, for its operations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from tensorcap.adapters.coreai.conversion import Converted, converted
from tensorcap.adapters.coreai.engine import CoreAIInspector, NDArray, quiet
from tensorcap.adapters.coreai.model import CoreAIModel
from tensorcap.adapters.coreai.model_inputs import named_arrays
from tensorcap.adapters.coreai.operation_map import MappedOutput, OperationMap
from tensorcap.adapters.torch.graph_nodes import graph_nodes
from tensorcap.recording import Call, NothingLeftError, Recorder
from tensorcap.workload import class_name
from tensorcap_formats.dtypes import Array, bits_of, dtype_of
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import escape

_FUSED: Final = "no target value: fused away, or none that the runtime gives"
_NO_LOCATIONS: Final = (
    "the asset has no source locations (converted in release mode): files, lines and modules of its "
    "operations are not known"
)


@dataclass(frozen=True)
class _Values:
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    operations: Mapping[int, Sequence[Array | None] | None]


def run(model: CoreAIModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Array]:
    """Run a model, through the capture that is under way if there is one."""
    if model.tapped_run is not None:
        outputs: dict[str, Array] = model.tapped_run(args, kwargs)
        return outputs
    return dict(_execute(model, converted(model, args, kwargs), args, kwargs, ()).outputs)


def tapped(model: CoreAIModel, recorder: Recorder) -> Callable[..., dict[str, Array]]:
    """The run of a model under capture."""

    def tapped_run(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Array]:
        known = converted(model, args, kwargs)
        with quiet():
            operation_map = OperationMap(known.asset.program, known.program)
        op_ids = sorted({row.op_id for row in operation_map.outputs} | operation_map.unmapped.keys())
        values = _execute(model, known, args, kwargs, op_ids)
        _record(values, operation_map, recorder)
        if known.program is not None:
            recorder.facts["graph"] = [asdict(node) for node in graph_nodes(known.program)]
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
    name = str(model.source) if known.program is None else class_name(model.source)

    async def execute() -> _Values:
        async with known.asset.executable() as executable:
            if model.function not in executable.function_names:
                names = ", ".join(executable.function_names)
                raise UsageError(f"{name}: no function {model.function!r}, expected one of: {names}")
            function = executable.load_function(model.function)
            inputs = named_arrays(name, function.desc, args, kwargs)
            results = await function({key: NDArray(array) for key, array in inputs.items()})
            outputs = {key: value.numpy().copy() for key, value in results.items()}
            operations: Any = {}
            if op_ids:
                inspector = CoreAIInspector(model=executable, function_name=model.function)
                operations = await inspector.get_intermediates_for_ops(list(op_ids), dict(inputs))
            return _Values(inputs, outputs, operations)

    with quiet(), ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, execute()).result()


def _record(values: _Values, operation_map: OperationMap, recorder: Recorder) -> None:
    """Record a run: inputs, mapped outputs as their torch nodes, other operations, outputs."""
    point = recorder.points[""]
    root = recorder.enter(point, id(values), is_outermost=True)
    if root is None:
        return
    for name, array in values.inputs.items():
        _record_array(recorder, root, f"input.{escape(name)}", array, required=True)
    calls: dict[str, Call] = {}
    for row in operation_map.outputs:
        _record_mapped(recorder, _module_call(recorder, root, row, calls), row, values)
    for op_id, op_name in operation_map.unmapped.items():
        results = [array for array in values.operations.get(op_id) or () if array is not None]
        call = recorder.inner(f"{op_name.rpartition('.')[2]}_{op_id}", "op", outer=root) if results else None
        if call is not None:
            for i, array in enumerate(results):
                _record_array(recorder, call, "output" if len(results) == 1 else f"output.{i}", array)
    is_single = len(values.outputs) == 1
    for name, array in values.outputs.items():
        _record_array(recorder, root, "output" if is_single else f"output.{escape(name)}", array)
    recorder.leave(point, id(values))
    recorder.finish(root)
    recorder.facts["operation_map"] = [row.describe() for row in operation_map.outputs]
    if operation_map.outputs and not any(row.file for row in operation_map.outputs):
        recorder.facts.setdefault("notes", []).append(_NO_LOCATIONS)


def _module_call(recorder: Recorder, root: Call, row: MappedOutput, calls: dict[str, Call]) -> Call:
    """The innermost call of a module that a node lies in; its nodes need not be neighbours."""
    innermost = root
    for key, path in row.stack:
        point = recorder.points.get(path)
        if point is None or not path:
            continue
        if key not in calls:
            call = recorder.enter(point, id(row))
            if call is None:
                continue
            recorder.leave(point, id(row))
            recorder.finish(call)
            calls[key] = call
        innermost = calls[key]
    return innermost


def _record_mapped(recorder: Recorder, outer: Call, row: MappedOutput, values: _Values) -> None:
    call = recorder.inner(row.node, "op", outer=outer)
    if call is None:
        return
    slot = "output" if row.output == 0 else f"output.{row.output}"
    results = values.operations.get(row.op_id) or ()
    array = results[row.op_output] if row.op_output < len(results) else None
    if array is None:
        recorder.lose(call.point, slot, _FUSED, call=call)
        return
    _record_array(recorder, call, slot, array)


def _record_array(recorder: Recorder, call: Call, slot: str, array: Array, *, required: bool = False) -> None:
    if not recorder.wants(call, slot, required=required):
        return
    array = np.array(array, order="C")
    try:
        part = recorder.part(call, slot, array.shape) if recorder.has_slices and not required else None
    except NothingLeftError as error:
        recorder.lose(call.point, slot, str(error), call=call, required=required)
        return
    bits = bits_of(array if part is None else np.array(array[part], order="C"))
    recorder.tensor(call, slot, bits, dtype_of(array), bits.shape, required=required)
