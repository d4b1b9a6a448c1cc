"""Runs of an ExecuTorch program: as it is, and with the values of its operators recorded."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch.fx import Node

from tensorcap.adapters.array_records import record_bits
from tensorcap.adapters.control_run import compare_with_control, describe_control
from tensorcap.adapters.executorch.engine import execute, read_record
from tensorcap.adapters.executorch.model import ExecuTorchModel
from tensorcap.adapters.executorch.program import (
    EdgeProgram,
    ModuleCall,
    Value,
    by_first,
    by_last,
    named_results,
    stored_elements,
    value_of,
)
from tensorcap.adapters.input_arrays import named_arrays, note_places
from tensorcap.adapters.protocol import NotCapturableError
from tensorcap.adapters.torch.graph_nodes import source_of
from tensorcap.adapters.torch.operators import Operator, leaves_of, plain
from tensorcap.recording import Call, CaptureOptions, Recorder
from tensorcap.wording import counted, some
from tensorcap_formats.errors import CaptureError
from tensorcap_formats.keys import escape

_NO_EVENT: Final = "no event of the run has its value: the runtime computes no such node"
_NOT_TENSOR: Final = "its event has no tensor"


def edge_program(model: ExecuTorchModel) -> EdgeProgram:
    """The graph that a model was made of, read once."""
    if not model.loaded:
        model.loaded.append(EdgeProgram(read_record(model.record_path)))
    program: EdgeProgram = model.loaded[0]
    return program


def run(model: ExecuTorchModel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Run a model, through the capture that is under way if there is one."""
    if model.tapped_run is not None:
        outputs: dict[str, Any] = model.tapped_run(args, kwargs)
        return outputs
    program = edge_program(model)
    results, _ = execute(Path(model.source), list(_inputs(model, program, args, kwargs).values()))
    return _named(program, results)


def _inputs(
    model: ExecuTorchModel, program: EdgeProgram, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    arrays = named_arrays(str(model.source), program.kinds, args, kwargs)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _named(program: EdgeProgram, results: Sequence[Any]) -> dict[str, Any]:
    return {
        output[0]: value
        for output, value in zip(program.outputs, results, strict=False)
        if output is not None
    }


class ModelTap:
    """A capture of a model that is under way."""

    def __init__(
        self, model: ExecuTorchModel, names: Collection[str], recorder: Recorder, plan: CaptureOptions
    ) -> None:
        self._model = model
        self._names = names
        self._recorder = recorder
        self._plan = plan
        self._awaits_control = model.control

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Run the model with events, record them, and run it once without."""
        model, recorder = self._model, self._recorder
        program = edge_program(model)
        inputs = _inputs(model, program, args, kwargs)
        path = Path(model.source)
        if program.constants:
            constants = some([f"{value!r} at {place}" for place, value in program.constants.items()])
            raise CaptureError(
                f"{path}: returns {constants} beside its tensors, which the runtime cannot log as events",
                hint="Export a model that returns its tensors alone.",
            )
        results, events = execute(
            path, list(inputs.values()), record=model.record_path, value_bytes=program.value_bytes
        )
        values, reasons, left = program.match(events)
        if left and not values:
            raise CaptureError(
                f"{model.record_path}: none of the {counted(len(left), 'event')} of the run is of its graph, "
                f"expected the ETRecord of the export that made {path}"
            )
        values |= {(name, 0): tensor for name, tensor in inputs.items()}
        record = _RunRecord(program, recorder, self._names, values, reasons, with_inputs=self._plan.inputs)
        record.record(inputs, results)
        recorder.facts["graph"] = {
            "nodes": len(program.nodes),
            "nodes_with_values": sum((node.name, 0) in values for node in program.nodes),
        }
        note_places(model.inputs, recorder)
        notes = recorder.facts.setdefault("notes", [])
        if left:
            names = some([event.name for event in left])
            notes.append(f"{counted(len(left), 'event')} of the run are of no node of the graph: {names}")
        if self._awaits_control:
            self._awaits_control = False
            with recorder.stage("ExecuTorch runs the program without events, as a control"):
                control, _ = execute(path, list(inputs.values()))
            entries = [
                compare_with_control(slot, without, tapped, stored_elements)
                for slot, without, tapped in zip(_output_slots(program), control, results, strict=False)
            ]
            recorder.facts["control"] = entries
            notes.append(describe_control(entries))
        return _named(program, results)


def _output_slots(program: EdgeProgram) -> list[str]:
    if len(program.outputs) == 1:
        return ["output"]
    return [f"output.{i}" for i in range(len(program.outputs))]


class _RunRecord:
    """The records of one run."""

    def __init__(
        self,
        program: EdgeProgram,
        recorder: Recorder,
        names: Collection[str],
        values: Mapping[Value, Any],
        reasons: Mapping[str, str],
        *,
        with_inputs: bool,
    ) -> None:
        self._program = program
        self._recorder = recorder
        self._names = names
        self._values = values
        self._reasons = reasons
        self._with_inputs = with_inputs
        self._calls: dict[str, Call | None] = {}
        self._references: dict[Value, dict[str, Any]] = {}

    def record(self, inputs: Mapping[str, torch.Tensor], results: Sequence[Any]) -> None:
        """Record the run: inputs, each node and call of a module in order, outputs."""
        recorder, program = self._recorder, self._program
        root = recorder.enter(recorder.points[""], id(self), is_outermost=True)
        if root is None:
            return
        self._root = root
        for name, tensor in inputs.items():
            slot = f"input.{escape(name)}"
            record_bits(recorder, root, slot, *stored_elements(tensor), required=True)
            self._references[name, 0] = {"record": root.key(slot).text}
        beginning, ending = by_first(program.calls), by_last(program.calls)
        for i, node in enumerate(program.nodes):
            for call in beginning.get(i, ()):
                self._begin(call)
            self._record_node(node)
            for call in ending.get(i, ()):
                self._end(call)
        for slot, value in zip(_output_slots(program), results, strict=False):
            self._record_value(root, slot, value, "")
        recorder.leave(root.point, id(self))
        recorder.finish(root)

    def _begin(self, call: ModuleCall) -> None:
        point = self._recorder.points[call.path]
        entered = self._recorder.enter(point, id(call)) if call.path in self._names else None
        self._calls[call.key] = entered
        if entered is None:
            return
        self._recorder.leave(point, id(call))  # nodes of calls need not be neighbours
        if self._with_inputs:
            for i, value in enumerate(call.inputs):
                self._record_value(entered, f"input.{i}", self._values.get(value), self._why(value))

    def _end(self, call: ModuleCall) -> None:
        entered = self._calls.get(call.key)
        if entered is None:
            return
        for i, value in enumerate(call.outputs):
            slot = "output" if len(call.outputs) == 1 else f"output.{i}"
            self._record_value(entered, slot, self._values.get(value), self._why(value))
        self._recorder.finish(entered)

    def _why(self, value: Value) -> str:
        return self._reasons.get(value[0], _NO_EVENT)

    def _record_value(self, call: Call, slot: str, value: Any, reason: str) -> str:
        """Record a value of a call, if it is asked for; return why it was not, or not as a whole."""
        recorder = self._recorder
        if not recorder.wants(call, slot):
            return "not asked for"
        if value is None:
            recorder.lose(call.point, slot, reason, call=call, absence="fused")
            return reason
        if not isinstance(value, torch.Tensor):
            recorder.lose(call.point, slot, _NOT_TENSOR, call=call)
            return _NOT_TENSOR
        try:
            return record_bits(recorder, call, slot, *stored_elements(value))
        except NotCapturableError as error:
            recorder.lose(call.point, slot, str(error), call=call)
            return str(error)

    def _record_node(self, node: Node) -> None:
        recorder = self._recorder
        stack = node.meta.get("nn_module_stack") or {}
        outer = (
            next((self._calls[key] for key in reversed(stack) if self._calls.get(key)), None) or self._root
        )
        call = recorder.inner(node.name, "op", outer=outer)
        if call is None:
            return
        inputs, arguments = self._arguments(node)
        source = source_of(node)
        facts = {
            "op": str(getattr(node.target, "__name__", node.target)),
            "order": recorder.next_order(),
            "module": outer.point.site,
            "module_call": outer.number,
            "class": self._program.classes.get(list(stack.values())[-1][0] if stack else "", ""),
            "file": source.file,
            "line": source.line,
            "function": source.function,
            "inputs": inputs,
            "arguments": arguments,
            "node": node.name,
        }
        outputs = []
        for i, slot in enumerate(named_results(node)):
            value = node.name, i
            lost = self._record_value(call, slot, self._values.get(value), self._why(value))
            reference = {"lost": lost} if lost else {"record": call.key(slot).text}
            self._references[value] = reference
            outputs.append({"slot": slot, **reference})
        if recorder.wants(call, "op"):
            recorder.value(call, "op", {**facts, "outputs": outputs})

    def _arguments(self, node: Node) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        inputs: list[dict[str, Any]] = []
        arguments: dict[str, Any] = {}
        overload = getattr(node.target, "_op", None)
        if isinstance(overload, torch._ops.OpOverload):
            named = Operator.of(overload).items(node.args, node.kwargs)
        else:
            named = iter([(str(i), value) for i, value in enumerate(node.args)])
        for name, value in named:
            leaves = list(leaves_of(name, value))
            if not any(isinstance(leaf, Node) for _, leaf in leaves):
                arguments[name] = plain(value)
                continue
            for full, leaf in leaves:
                if not isinstance(leaf, Node):
                    continue
                weight = self._program.weights.get(leaf.name)
                taken = {"parameter": weight} if weight else self._references.get(value_of(leaf))
                inputs.append({"name": full, **(taken or {"lost": _NO_EVENT})})
        return inputs, arguments
