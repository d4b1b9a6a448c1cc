"""The graph that a program was made of: nodes and modules, and which event of a run computed which node."""

from __future__ import annotations

import math
import operator
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node
from torch.utils import _pytree as pytree

from tensorcap.adapters.executorch.engine import Event
from tensorcap.adapters.input_arrays import InputKind as Kind
from tensorcap.adapters.torch.tensors import stored
from tensorcap_formats.dtypes import Array, DType

_Place = tuple[int, str, tuple[int, ...]]  # debug handle, operator, and shape of the first result
Value = tuple[str, int]  # a node, and which of its results
_NATIVE: Final = re.compile(r"native_call_(.+)\.\w+")
_DELEGATE: Final = "DELEGATE_CALL"
_WITHIN: Final = "computed within {}, which gives its results alone"
_REORDERED: Final = "the runtime calls the operator several times for one handle and shape, in no known order"
_AMBIGUOUS: Final = "{} gives several results of one shape, in no known order"
_VIEWS: Final = ("alias_copy", "squeeze_copy", "unsqueeze_copy", "view", "view_copy")  # of the same elements
_EDGE_NAME: Final = re.compile(r"[\w]+[.:]+(.+?)(?:\.\w+)?")


@dataclass
class ModuleCall:
    """A call of a module.

    Attributes:
        path: Its path.
        key: Names the call in the graph.
        first: Its first node.
        last: Its last node.
        inputs: What its nodes take from outside, in that order.
        outputs: What nodes outside of it take, or the model returns.
    """

    path: str
    key: str
    first: int
    last: int
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)


class EdgeProgram:
    """The exported program in the edge dialect.

    Attributes:
        nodes: Its operations, in their order.
        kinds: What each input has to be, by name.
        outputs: What it returns, by place; None for what is no tensor.
        constants: What it returns that is no tensor, by place.
        weights: The name of the parameter, buffer or constant of each input of the graph that is one.
        classes: The class of each module by path.
        calls: The calls of modules, outer ones first.
    """

    def __init__(self, program: Any) -> None:
        self._program = program
        signature = program.graph_signature
        self.weights: dict[str, str] = {
            spec.arg.name: spec.target for spec in signature.input_specs if spec.target is not None
        }
        self._parameters = {spec.target for spec in signature.input_specs if spec.kind is InputKind.PARAMETER}
        inputs = [spec.arg.name for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
        placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
        self.kinds = {name: _kind(placeholders[name]) for name in inputs}
        self.nodes = [
            node
            for node in program.graph.nodes
            if node.op == "call_function" and node.target is not operator.getitem
        ]
        own = [spec for spec in signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
        by_name = {node.name: node for node in program.graph.nodes}
        returned = [by_name.get(getattr(spec.arg, "name", None)) for spec in own]
        self.outputs = [None if node is None else value_of(node) for node in returned]
        self.constants = {
            i: getattr(spec.arg, "value", None)
            for i, (spec, node) in enumerate(zip(own, returned, strict=True))
            if node is None
        }
        self.classes: dict[str, str] = {"": ""}
        self.calls = list(self._find_calls())

    @property
    def value_bytes(self) -> int:
        """How many bytes all values of the nodes take."""
        tensors = (leaf for node in self.nodes for leaf in pytree.tree_leaves(node.meta.get("val")))
        return sum(
            math.prod(map(int, leaf.shape)) * leaf.dtype.itemsize + 64
            for leaf in tensors
            if isinstance(leaf, torch.Tensor)
        )

    def parameters(self) -> Iterator[tuple[str, str, str, torch.Tensor]]:
        """Module, name, kind (`param` or `buffer`) and values of each weight."""
        held = {**self._program.state_dict, **self._program.constants}
        for target in dict.fromkeys(self.weights.values()):
            if isinstance(held.get(target), torch.Tensor):
                module, _, name = target.rpartition(".")
                kind = "param" if target in self._parameters else "buffer"
                yield module, name, kind, held[target]

    def _find_calls(self) -> Iterator[ModuleCall]:
        calls: dict[str, ModuleCall] = {}
        within: dict[str, set[str]] = defaultdict(set)  # nodes by key of a call
        for i, node in enumerate(self.nodes):
            for key, (path, name) in (node.meta.get("nn_module_stack") or {}).items():
                path = path.partition("@")[0]
                self.classes.setdefault(path, str(name))
                if not path:
                    self.classes[""] = str(name)
                    continue
                calls.setdefault(key, ModuleCall(path, key, i, i)).last = i
                within[key].add(node.name)
        for key, call in calls.items():
            nodes = within[key]
            for node in self.nodes[call.first : call.last + 1]:
                if node.name in nodes:
                    taken = [v for v in values_taken(node) if v[0] not in nodes and v[0] not in self.weights]
                    call.inputs += [value for value in taken if value not in call.inputs]
            for node in self.nodes[call.first :]:
                if node.name not in nodes:
                    given = [value for value in values_taken(node) if value[0] in nodes]
                    call.outputs += [value for value in given if value not in call.outputs]
            call.outputs += [v for v in self.outputs if v and v[0] in nodes and v not in call.outputs]
            yield call

    def match(self, events: Sequence[Event]) -> tuple[dict[Value, Any], dict[str, str], list[Event]]:
        """The values of nodes, by what the events of a run say of them.

        Returns:
            The values; why nodes have none, by name; and events that are of no node.
        """
        waiting: dict[_Place, deque[Node]] = defaultdict(deque)
        by_handle: dict[int, list[Node]] = defaultdict(list)
        for node in self.nodes:
            handle = node.meta.get("debug_handle")
            if isinstance(handle, int):
                waiting[handle, base_name(node), _shape_of(node.meta.get("val"))].append(node)
                by_handle[handle].append(node)
        values: dict[Value, Any] = {}
        reasons: dict[str, str] = {}
        computed: set[str] = set()  # nodes that have a kernel of their own
        left = []
        counts = {place: len(nodes) for place, nodes in waiting.items()}
        is_reordered = any(event.name == _DELEGATE for event in events)  # around delegates
        for event in events:
            if match := _NATIVE.fullmatch(event.name):
                places = ((handle, match[1], _shape_of(event.results)) for handle in event.handles)
                place = next((place for place in places if waiting.get(place)), None)
                if place is None:
                    left.append(event)
                    continue
                node = waiting[place].popleft()
                computed.add(node.name)
                if is_reordered and counts[place] > 1:
                    reasons[node.name] = _REORDERED
                else:
                    values.update({(node.name, i): value for i, value in enumerate(event.results)})
        backend = "a delegate"
        for event in events:
            if event.name == _DELEGATE:
                handles = dict.fromkeys(event.handles)
                nodes = [n for handle in handles for n in by_handle[handle] if n.name not in computed]
                computed |= {node.name for node in nodes}
                reasons |= self._add_delegate(values, nodes, event.results, backend)
            backend = event.delegate or backend
        self._add_views(values)
        return values, reasons, left

    def _add_delegate(
        self, values: dict[Value, Any], nodes: Sequence[Node], results: Sequence[Any], backend: str
    ) -> dict[str, str]:
        """Add the results of a delegate, and say why nodes within it have none.

        Args:
            values: The values of nodes.
            nodes: Those that it computes.
            results: What it was given, and behind that what it returned, in an order of its own.
            backend: Its name.
        """
        own = {node.name for node in nodes}
        taken = {v for node in self.nodes if node.name not in own for v in values_taken(node)}
        border = [node for node in nodes if (node.name, 0) in taken or (node.name, 0) in self.outputs]
        returned = results[len(results) - len(border) :]
        by_shape = {tuple(value.shape): value for value in returned if isinstance(value, torch.Tensor)}
        shapes = [tuple(node.meta["val"].shape) for node in border]
        is_certain = len(set(shapes)) == len(border) and set(shapes) == by_shape.keys()
        if is_certain:
            for node, shape in zip(border, shapes, strict=True):
                values[node.name, 0] = by_shape[shape]
        names = {node.name for node in border}
        inner, ambiguous = _WITHIN.format(backend), _AMBIGUOUS.format(backend)
        return {name: ambiguous if name in names else inner for name in own}

    def _add_views(self, values: dict[Value, Any]) -> None:
        """Add what nodes give that only change the shape of a value, which the runtime leaves out."""
        for node in self.nodes:
            value, taken = (node.name, 0), values_taken(node)
            given = node.meta.get("val")
            if (
                base_name(node) in _VIEWS
                and value not in values
                and isinstance(given, torch.Tensor)
                and all(isinstance(size, int) for size in given.shape)
                and isinstance(values.get(taken[0]), torch.Tensor)
                and values[taken[0]].numel() == given.numel()
            ):
                values[value] = values[taken[0]].reshape(given.shape)


def base_name(node: Node) -> str:
    """The name of a node's operator as the runtime has it: `addmm` of `aten.addmm.default`."""
    name = str(getattr(node.target, "__name__", node.target))
    match = _EDGE_NAME.fullmatch(name)
    return match[1] if match else name


def _shape_of(results: Any) -> tuple[int, ...]:
    """The shape of the first tensor among results; of none, none."""
    leaves = pytree.tree_leaves(results)
    sizes = next((leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor)), ())
    return tuple(size if isinstance(size, int) else -1 for size in sizes)


def value_of(node: Node) -> Value:
    """Which result of which node a value is."""
    index = 0
    while node.op == "call_function" and node.target is operator.getitem:
        index, node = int(node.args[1]), node.args[0]  # type: ignore[arg-type, assignment] # of a tuple
    return node.name, index


def values_taken(node: Node) -> list[Value]:
    """The values that a node takes, in the order of its arguments."""
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    return [value_of(leaf) for leaf in leaves if isinstance(leaf, Node)]


def stored_elements(tensor: Any) -> tuple[Array, DType]:
    """The stored elements of a tensor in its shape, and their dtype.

    Raises:
        NotCapturableError: It has none.
    """
    bits, dtype, shape = stored(tensor)
    return bits.reshape(shape), dtype


def _kind(node: Node) -> Kind:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return Kind(None, "float32")
    sizes = tuple(size if isinstance(size, int) else None for size in value.shape)
    return Kind(sizes, str(value.dtype).removeprefix("torch."))


def named_results(node: Node) -> list[str]:
    """The slots of a node's results."""
    value: Any = node.meta.get("val")
    if isinstance(value, (tuple, list)):
        return [f"output.{i}" for i in range(len(value))]
    return ["output"]


def by_first(calls: Sequence[ModuleCall]) -> Mapping[int, list[ModuleCall]]:
    """Calls by their first node, outer ones first."""
    found: dict[int, list[ModuleCall]] = defaultdict(list)
    for call in calls:
        found[call.first].append(call)
    return found


def by_last(calls: Sequence[ModuleCall]) -> Mapping[int, list[ModuleCall]]:
    """Calls by their last node, inner ones first."""
    found: dict[int, list[ModuleCall]] = defaultdict(list)
    for call in calls:
        found[call.last].insert(0, call)
    return found
