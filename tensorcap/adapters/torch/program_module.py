"""An exported program in the place of the model that it was made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from tensorcap.workload import class_name
from tensorcap_formats.errors import UsageError

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node

_Module = TypeVar("_Module", bound=nn.Module)


class ProgramModule(nn.Module):
    """The modules that a program's nodes name, with its parameters and buffers; level export runs its graph.

    Attributes:
        program: The program.
        weights: Its parameters, buffers and constants by name; buffers that it writes to are copies, so that
            a run leaves the program as it is.
    """

    def __init__(self, program: ExportedProgram, classes: Mapping[str, str]) -> None:
        """Build the modules.

        Args:
            program: The program.
            classes: The class of each module by its path.
        """
        super().__init__()
        self.program = program
        self.weights = {**program.constants, **program.state_dict}
        for name in set(program.graph_signature.buffers_to_mutate.values()):
            self.weights[name] = self.weights[name].clone()
        for path in sorted(classes, key=lambda path: path.count(".")):
            _module_at(self, path, classes)
        for spec in program.graph_signature.input_specs:
            weight = self.weights.get(spec.target or "")
            if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER) or weight is None:
                continue
            path, _, name = (spec.target or "").rpartition(".")
            module = _module_at(self, path, classes)
            if isinstance(weight, nn.Parameter):
                module.register_parameter(name, weight)
            else:
                module.register_buffer(name, weight, persistent=bool(spec.persistent))
        self.eval()

    def forward(self, **inputs: Any) -> Any:
        """Run the program on its inputs by the names of its graph."""
        return self.program.module()(*inputs.values())


def program_module(program: ExportedProgram) -> ProgramModule:
    """A program as a model, of a class with the name of that which it was exported from."""
    classes = _classes(program)
    kind = _class_named(classes.pop("", class_name(program)), ProgramModule)
    return kind(program, classes)


def named_inputs(program: ExportedProgram, inputs: Any) -> dict[str, Any]:
    """The inputs of a program by the names of its graph, after a check against it.

    Args:
        program: The program.
        inputs: Its positional arguments in a tuple or list, or arguments by name.

    Raises:
        UsageError: There are more or fewer than it takes, or one is of another shape or dtype.
    """
    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    specs = program.graph_signature.input_specs
    own = [n for n, spec in zip(nodes, specs, strict=True) if spec.kind is InputKind.USER_INPUT]
    names = [node.name for node in own]
    values = pytree.tree_leaves(_in_order(program, inputs, names))
    if len(values) != len(own):
        expected = f"expected {len(own)}: {', '.join(names) or 'none'}"
        raise UsageError(f"inputs of the program: found {len(values)} values, {expected}")
    for node, value in zip(own, values, strict=True):
        _check(node, value)
    return dict(zip(names, values, strict=True))


def _in_order(program: ExportedProgram, inputs: Any, names: Sequence[str]) -> Any:
    """Inputs by name in the order of the graph.

    Args:
        program: The program.
        inputs: As for `named_inputs`.
        names: The names that the graph has for them.
    """
    if not isinstance(inputs, Mapping):
        return inputs
    arguments = _argument_names(program)
    for order in (arguments, names):
        if {*order} == inputs.keys():
            return [inputs[name] for name in order]
    raise UsageError(
        f"inputs of the program: found {', '.join(map(str, inputs)) or 'none'}, expected {', '.join(names)}"
    )


def _argument_names(program: ExportedProgram) -> list[str]:
    """The arguments by name that a program was exported with, in their order."""
    spec = program.call_spec.in_spec
    if spec is None:
        return []
    # before torch 2.10 there is no `children`
    children = spec.children() if hasattr(spec, "children") else spec.children_specs
    return list(children[1].context or ()) if len(children) == 2 else []


def _check(node: Node, value: Any) -> None:
    """Refuse an input that the program was not exported for; sizes that may vary do."""
    wanted = node.meta.get("val")
    if not isinstance(wanted, torch.Tensor):
        return
    sizes = [size if isinstance(size, int) else None for size in wanted.shape]
    fits = isinstance(value, torch.Tensor) and (value.dtype, value.ndim) == (wanted.dtype, wanted.ndim)
    if fits and all(size in (None, own) for size, own in zip(sizes, value.shape, strict=True)):
        return
    raise UsageError(
        f"input {node.name} of the program: found {_describe(value)}, expected {_describe(wanted)}"
    )


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"


def _classes(program: ExportedProgram) -> dict[str, str]:
    """The class of each module that a node lies in, by its path."""
    classes: dict[str, str] = {}
    for node in program.graph.nodes:
        for path, kind in (node.meta.get("nn_module_stack") or {}).values():
            if all(part.isidentifier() or part.isdigit() for part in path.split(".")) or not path:
                classes[path] = kind if isinstance(kind, str) else class_name(kind)
    return classes


def _module_at(root: nn.Module, path: str, classes: Mapping[str, str]) -> nn.Module:
    """The module at a path, made with those above it if it is not there yet."""
    module = root
    parts = path.split(".") if path else []
    for depth, part in enumerate(parts, 1):
        child = module._modules.get(part)
        if child is None:
            kind = _class_named(classes.get(".".join(parts[:depth]), "torch.nn.Module"), nn.Module)
            child = kind()
            module.add_module(part, child)
        module = child
    return module


def _class_named(qualified: str, base: type[_Module]) -> type[_Module]:
    """A subclass without code, under the qualified name of another class."""
    package, _, name = qualified.rpartition(".")
    return type(name, (base,), {"__module__": package or "builtins"})
