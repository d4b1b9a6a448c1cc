"""The nodes of an exported program as an archive describes them: operations, and what each takes."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from tensorcap.adapters.torch.frames import Source
from tensorcap.adapters.torch.operators import Operator, leaves_of, plain
from tensorcap.workload import redact
from tensorcap_formats.run_info import ExportedNode

if TYPE_CHECKING:
    from torch.export import ExportedProgram

INNER: Final = (os.path.dirname(torch.__file__) + os.sep, "<eval_with_key>")  # files of torch's own code
_FRAME: Final = re.compile(r'File "(.+)", line (\d+), in (.+)')


def graph_nodes(program: ExportedProgram) -> list[ExportedNode]:
    """Describe the operations of a program."""
    return list(_graph_nodes(program))


def _graph_nodes(program: ExportedProgram) -> Iterator[ExportedNode]:
    weights = {
        getattr(spec.arg, "name", ""): spec.target or ""
        for spec in program.graph_signature.input_specs
        if spec.target is not None
    }
    outputs = output_names(program)
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        operator, _ = operator_of(node, node.args)
        inputs, of_weights, arguments = {}, {}, {}
        for argument, value in operator.items(node.args, node.kwargs):
            leaves = list(leaves_of(argument, value))
            for full, leaf in leaves:
                if isinstance(leaf, Node) and leaf.name in weights:
                    of_weights[full] = weights[leaf.name]
                elif isinstance(leaf, Node):
                    inputs[full] = leaf.name
            if not any(isinstance(leaf, Node) for _, leaf in leaves):
                arguments[argument] = plain(value)
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        path = stack[-1][0] if stack else ""
        source = source_of(node)
        yield ExportedNode(
            node.name,
            operator.name,
            ".".join(part for part in path.split(".") if part != "_orig_mod"),
            inputs,
            of_weights,
            arguments,
            tuple(
                tuple(map(int, leaf.shape))
                for leaf in pytree.tree_leaves(node.meta.get("val"))
                if _is_fixed(leaf)
            ),
            tuple(at for at, name in enumerate(outputs) if name == node.name),
            source.file or "",
            source.line,
        )


def output_names(program: ExportedProgram) -> list[str]:
    """Names of the nodes that are the model's outputs, in order; "" for one that is no node."""
    from torch.export.graph_signature import OutputKind

    specs = program.graph_signature.output_specs
    return [getattr(spec.arg, "name", "") for spec in specs if spec.kind is OutputKind.USER_OUTPUT]


def _is_fixed(leaf: Any) -> bool:
    """Whether a value is a tensor of a shape that is known."""
    return isinstance(leaf, torch.Tensor) and all(isinstance(size, int) for size in leaf.shape)


def operator_of(node: Node, args: tuple[Any, ...]) -> tuple[Operator, tuple[Any, ...]]:
    """The properties of a node's function, and its arguments as they are recorded."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return Operator.of(target), args
    name = getattr(target, "__name__", str(target))
    if target is operator.getitem and isinstance(args[0], (tuple, list)):
        args = (args[0][args[1]], args[1])
    graphs = {
        id(value): arg.name for value, arg in zip(args, node.args, strict=True) if isinstance(arg, Node)
    }
    args = tuple(graphs.get(id(value), value) if callable(value) else value for value in args)
    names = tuple(map(str, range(len(args))))
    return Operator(name, names, frozenset(), frozenset(), None, False, False), args


def source_of(node: Node) -> Source:
    """The innermost frame of the user's code."""
    frames = _FRAME.findall(node.stack_trace or "")
    users = [frame for frame in frames if not frame[0].startswith(INNER)]
    if not users:
        return Source(None, None, None)
    file, line, function = users[-1]
    return Source(redact(file), int(line), function)
