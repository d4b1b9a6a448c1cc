"""Records of mapped operations, as level `export` of a reference has them: an op each, in its module.

An op's facts (CAP-11) are those of the node that was converted: its function, arguments, inputs and line. Of
an asset from a file, whose graph is not known, they are the Core AI operation's name, and its line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

import torch
from torch.fx import Node

from tensorcap.adapters.coreai.operation_map import MappedOutput, OperationMap
from tensorcap.adapters.torch.operators import Operator, leaves_of, plain
from tensorcap.recording import Call, Recorder
from tensorcap_formats.dtypes import Array
from tensorcap_formats.keys import escape

_GETITEM: Final = "getitem"
_Reference = dict[str, Any]  # of `specs/capture.md`


class OpRecorder:
    """Records the operations of one run of an asset.

    Args:
        recorder: Takes the records.
        root: The call of the model.
        operation_map: The operations.
        parameters: The parameter or buffer of each input of the graph that is one.
        classes: The class of each module by its path.
    """

    def __init__(
        self,
        recorder: Recorder,
        root: Call,
        operation_map: OperationMap,
        parameters: Mapping[str, str],
        classes: Mapping[str, str],
    ) -> None:
        self._recorder = recorder
        self._root = root
        self._map = operation_map
        self._parameters = parameters
        self._classes = classes
        self._calls: dict[str, Call] = {}  # calls of modules, by their keys in the stacks of nodes
        self._values: dict[tuple[str, int], _Reference] = {}  # by node and number of its output

    def record(
        self,
        values: Callable[[MappedOutput], Array | None],
        record: Callable[[Call, str, Array], str],
        reason: Callable[[MappedOutput], str],
    ) -> None:
        """Record the mapped operations.

        Args:
            values: Gives the value of an output.
            record: Records an array in a slot of a call; returns why it did not, or not the whole.
            reason: Says why an output has no value.
        """
        for name, group in groupby(self._map.outputs, key=lambda row: row.node):
            rows = list(group)
            outer = self._module_call(rows[0])
            call = self._recorder.inner(name, "op", outer=outer)
            if call is None:
                return
            facts = self._describe(rows[0], call, outer)
            outputs = []
            for row in rows:
                array = values(row)
                if array is None:
                    lost = reason(row)
                    self._recorder.lose(call.point, row.slot, lost, call=call, absence="fused")
                else:
                    lost = record(call, row.slot, array)
                reference = {"lost": lost} if lost else {"record": call.key(row.slot).text}
                self._values[name, row.output] = reference
                outputs.append({"slot": row.slot, **reference})
            if self._recorder.wants(call, "op"):
                self._recorder.value(call, "op", {**facts, "outputs": outputs})

    def _module_call(self, row: MappedOutput) -> Call:
        """The innermost call of a module that a node lies in; its nodes need not be neighbours."""
        recorder, innermost = self._recorder, self._root
        for key, path in row.stack:
            point = recorder.points.get(path)
            if point is None or not path:
                continue
            if key not in self._calls:
                call = recorder.enter(point, id(row))
                if call is None:
                    continue
                recorder.leave(point, id(row))
                recorder.finish(call)
                self._calls[key] = call
            innermost = self._calls[key]
        return innermost

    def _describe(self, row: MappedOutput, call: Call, outer: Call) -> dict[str, Any]:
        node = self._map.nodes.get(row.node)
        inputs, arguments = ([], {}) if node is None else self._arguments(node)
        path = next((path for _, path in reversed(row.stack) if path in self._classes), "")
        return {
            "op": row.op_name if node is None else str(node.target),
            "order": self._recorder.next_order(),
            "module": outer.point.site,
            "module_call": outer.number,
            "class": self._classes.get(path, "").rpartition(".")[2],
            "file": row.source.file,
            "line": row.source.line,
            "function": row.source.function,
            "inputs": inputs,
            "arguments": arguments,
            "node": row.node,
        }

    def _arguments(self, node: Node) -> tuple[list[_Reference], dict[str, Any]]:
        inputs: list[_Reference] = []
        arguments: dict[str, Any] = {}
        for name, value in _named(node):
            leaves = list(leaves_of(name, value))
            if any(isinstance(leaf, Node) for _, leaf in leaves):
                inputs += [
                    {"name": full, **self._reference(leaf)} for full, leaf in leaves if isinstance(leaf, Node)
                ]
            else:
                arguments[name] = plain(value)
        return inputs, arguments

    def _reference(self, node: Node) -> _Reference:
        """Where the value of a node is that another takes."""
        output = 0
        while _name(node) == _GETITEM and isinstance(node.args[0], Node):
            output, node = int(node.args[1]), node.args[0]  # type: ignore[arg-type] # a number, of a tuple
        if node.op == "placeholder":
            if node.name in self._parameters:
                return {"parameter": self._parameters[node.name]}
            return {"record": self._root.key(f"input.{escape(node.name)}").text}
        return self._values.get((node.name, output), {"lost": "no operation is mapped to it"})


def _named(node: Node) -> Iterator[tuple[str, Any]]:
    """The arguments of a node by name, by position where its function has no schema."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        yield from Operator.of(target).items(node.args, node.kwargs)
    else:
        yield from ((str(i), value) for i, value in enumerate(node.args))
        yield from node.kwargs.items()


def _name(node: Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def parameters_of(program: Any) -> dict[str, str]:
    """The name of the parameter, buffer or constant that each input of an exported graph is."""
    if program is None:
        return {}
    signature = program.graph_signature
    return {
        spec.arg.name: spec.target
        for spec in signature.input_specs
        if spec.target is not None and hasattr(spec.arg, "name")
    }


def value_of(
    results: Mapping[int, Sequence[Array | None] | None], operation_map: OperationMap, row: MappedOutput
) -> Array | None:
    """The value of a mapped output among those of operations; None if it has none of its own."""
    arrays = results.get(row.op_id) or ()
    value = arrays[row.op_output] if row.op_output < len(arrays) else None
    namesakes = operation_map.namesakes.get(row.node)
    if value is None or namesakes is None or namesakes.are_excluded(value, row.op_output):
        return value
    return None
