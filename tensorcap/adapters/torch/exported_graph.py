"""An exported graph whose nodes are computed one by one, from whatever values they are given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from tensorcap.adapters.operation_graph import Read, Value
from tensorcap.adapters.torch.export import export_program
from tensorcap.adapters.torch.graph_nodes import graph_nodes, operator_of
from tensorcap.workload import Workload

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node


class ExportedGraph:
    """The graph of an exported program, as `OperationGraph` defines it.

    Args:
        program: The program.
        leaves: The tensors that the model is given, in order.

    Attributes:
        nodes: Its operations, in execution order.
        given: Names of the model's inputs.
    """

    def __init__(self, program: ExportedProgram, leaves: list[Any]) -> None:
        from torch.export.graph_signature import InputKind

        signature = program.graph_signature
        self.nodes = graph_nodes(program)
        weights = {**program.constants, **program.state_dict}
        inputs = iter(leaves)
        self.given: list[str] = []
        self._constants: dict[str, Any] = {}  # inputs and weights, by the name of their node
        for spec in signature.input_specs:
            is_input = spec.kind is InputKind.USER_INPUT
            value = next(inputs) if is_input else weights.get(spec.target or "")
            self._constants[getattr(spec.arg, "name", "")] = value
            if is_input:
                self.given.append(getattr(spec.arg, "name", ""))
        self._module = program.graph_module
        self._nodes = {node.name: node for node in program.graph.nodes}

    @classmethod
    def of(cls, workload: Workload, decompositions: str) -> ExportedGraph:
        """Export the model of a workload.

        Raises:
            UsageError: The workload is no single forward.
            CaptureError: torch cannot export the model.
        """
        with torch.no_grad():
            program, _ = export_program(workload, decompositions)
        return cls(program, pytree.tree_leaves(workload.arguments))

    def compute(self, name: str, read: Read, changed: Mapping[str, Any] | None = None) -> Value:
        """Run the operation of a node; values are converted to the dtypes that it has in the graph."""
        node = self._nodes[name]

        def value_of(one: Node) -> Any:
            if one.name in self._constants:
                return self._constants[one.name]
            if one.op == "get_attr":
                return getattr(self._module, str(one.target))
            return _tensors(read(one.name), one.meta.get("val"))

        args, kwargs = map_arg((node.args, node.kwargs), value_of)
        if changed:
            names = operator_of(node, args)[0].arguments
            args = tuple(changed.get(key, value) for key, value in zip(names, args, strict=False))
            kwargs = {
                **kwargs,
                **{key: value for key, value in changed.items() if key not in names[: len(args)]},
            }
        with torch.no_grad():
            result = node.target(*args, **kwargs)
        return _arrays(result)


def _tensors(value: Value, like: Any) -> Any:
    """Arrays as the tensors that a graph has, by the dtypes of its own."""
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        return tuple(
            None if one is None else _tensors(one, like[i] if isinstance(like, (list, tuple)) else None)
            for i, one in enumerate(value)
        )
    tensor = torch.from_numpy(value) if value.flags.writeable else torch.from_numpy(value.copy())  # type: ignore[union-attr]
    return tensor.to(like.dtype) if isinstance(like, torch.Tensor) else tensor


def _arrays(result: Any) -> Value:
    if isinstance(result, (list, tuple)):
        return [_arrays(one) for one in result]  # type: ignore[misc] # no operation nests its results
    if not isinstance(result, torch.Tensor):
        return None
    result = result.detach()
    if result.dtype is torch.bfloat16:
        result = result.float()  # which holds the same
    return result.cpu().numpy()  # type: ignore[no-any-return] # torch's stubs
