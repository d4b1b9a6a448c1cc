"""The graph in sections that are run one after the other, so that what is tapped at once has a bound.

An output of a session is held until its run is over, whether it is asked for or not; a graph all of whose
values are outputs would hold all of them. So a graph is cut, and each section gets from those before what it
takes. A graph whose values have room is one section.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from onnx import helper

from tensorcap.adapters.onnx.engine import Session, dtype_name, element_type_of
from tensorcap.adapters.onnx.graph import GraphNode, OnnxGraph, copy_without_nodes
from tensorcap.adapters.onnx.model import OnnxModel
from tensorcap.adapters.onnx.switches import Switches
from tensorcap_formats.dtypes import DTYPES, DType

_TENSOR: Final = "tensor("


@dataclass(frozen=True, slots=True)
class Section:
    """Consecutive nodes of a graph, and the session that runs them.

    Attributes:
        nodes: The nodes.
        session: Runs them.
        inputs: What it takes from before, the model's own inputs too.
        outputs: All values that its nodes make.
    """

    nodes: tuple[GraphNode, ...]
    session: Session
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class TappedGraph:
    """A graph all of whose values are outputs, for inputs of the shapes that it was made for.

    Attributes:
        sections: In the order in which they are run; made when they are first needed.
        shapes: Shape of each value that is a tensor.
        types: Type of each value, as the runtime writes it.
        switches: Where archived values can take the place of its own; None for nowhere.
    """

    def __init__(
        self, model: OnnxModel, graph: OnnxGraph, values: Mapping[str, Any], switches: Switches | None
    ):
        """Find out how large each value is, and cut the graph.

        Args:
            model: The model.
            graph: Its graph.
            values: Its inputs, as values of the runtime.
            switches: Switches to build in.
        """
        self.switches = switches
        self._model = model
        self._graph = graph
        self.types, self.shapes = self._measure(values)
        self._cuts = _cut(graph, self._sizes(), self.types, model.tapped_bytes)
        self._sections: dict[int, Section] = {}

    @property
    def count(self) -> int:
        """How many sections there are."""
        return len(self._cuts)

    def run(self, values: Mapping[str, Any], receive: Callable[[GraphNode, Mapping[str, Any]], None]) -> None:
        """Run the graph.

        Args:
            values: Its inputs, and those of its switches, as values of the runtime.
            receive: Is given each node, in order, with all values that it and later nodes take and make.
        """
        live = dict(values)
        uses = self._last_uses()
        for number in range(len(self._cuts)):
            section = self._section(number)
            live |= section.session.run(section.outputs, {name: live[name] for name in section.inputs})
            for node in section.nodes:
                receive(node, live)
            made = self._graph.makers
            live = {n: v for n, v in live.items() if n not in made or uses.get(n, -1) > number}

    def _last_uses(self) -> dict[str, int]:
        """The last section that takes each value of the graph."""
        uses: dict[str, int] = {}
        for number, nodes in enumerate(self._cuts):
            uses.update((name, number) for node in nodes for name in node.inputs)
        return uses

    def _section(self, number: int) -> Section:
        section = self._sections.get(number)
        if section is None:
            section = self._sections[number] = self._make(self._cuts[number])
        return section

    def _make(self, nodes: tuple[GraphNode, ...]) -> Section:
        outputs = tuple(name for node in nodes for name in node.outputs if name)
        proto, inputs = self._proto(nodes)
        proto.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in outputs)
        return Section(nodes, self._session(proto), inputs, outputs)

    def _proto(self, nodes: Sequence[GraphNode]) -> tuple[Any, tuple[str, ...]]:
        """A model of some nodes, and what it takes from before."""
        graph = self._graph
        proto = copy_without_nodes(graph.proto)
        made = {name for node in nodes for name in node.outputs}
        taken = dict.fromkeys(name for node in nodes for name in node.inputs if name)
        weights = {stored.name: stored for stored in graph.proto.graph.initializer}
        sparse = {stored.values.name: stored for stored in graph.proto.graph.sparse_initializer}
        inputs = []
        for name in taken:
            if name in graph.constants:
                proto.graph.node.append(graph.constants[name])
            elif name in weights:
                proto.graph.initializer.append(weights[name])
            elif name in sparse:
                proto.graph.sparse_initializer.append(sparse[name])
            elif name not in made:
                inputs.append(name)
                proto.graph.input.append(self._input(name))
        switches = self.switches
        if switches is None:
            proto.graph.node.extend(node.proto for node in nodes)
        else:
            names, switch_inputs = switches.build(proto.graph, nodes, self.element_type)
            inputs += names
            proto.graph.input.extend(switch_inputs)
        return proto, tuple(inputs)

    def _input(self, name: str) -> Any:
        graph = self._graph
        for value in graph.proto.graph.input:
            if value.name == name:
                return value
        shape = self.shapes.get(name)
        return helper.make_tensor_value_info(name, self.element_type(name), shape)

    def element_type(self, name: str) -> int | None:
        """The element type of a value; None if it is no tensor."""
        return element_type_of(self._dtype_name(name))

    def dtype_of(self, name: str) -> DType | None:
        """The dtype of a value; None if it is no tensor of numbers."""
        return DTYPES.get(self._dtype_name(name))

    def _dtype_name(self, name: str) -> str:
        """The dtype of a value, as numpy names it; "" if it is no tensor."""
        if name in self._graph.inputs:
            return self._graph.inputs[name].dtype
        text = self.types.get(name, "")
        return dtype_name(text) if text.startswith(_TENSOR) else ""

    def _session(self, proto: Any) -> Session:
        graph, model = self._graph, self._model
        weights = {w.name: graph.apart[w.name] for w in proto.graph.initializer if w.name in graph.apart}
        return Session(
            str(model.source),
            proto.SerializeToString(),
            providers=model.providers,
            optimization=model.optimization,
            folder=graph.path.parent.resolve(),
            weights=weights,
            is_tapped=True,
        )

    def _measure(self, values: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
        """The type of each value, and the shape of each tensor, by a run that keeps shapes alone.

        A first session has all values as outputs, for their types; it is never run. In the second the shape
        of each tensor is an output, and the runtime frees the tensor as soon as all have taken it.
        """
        graph = self._graph
        proto = copy_without_nodes(graph.proto)
        proto.graph.CopyFrom(graph.proto.graph)
        own = {output.name for output in proto.graph.output}
        made = [name for node in graph.nodes for name in node.outputs if name]
        types = self._types(proto, [name for name in made if name not in own])
        del proto.graph.output[:]
        shapes = {
            name: f"tensorcap/{number}" for number, name in enumerate(made) if types[name].startswith(_TENSOR)
        }
        for name, shape in shapes.items():
            proto.graph.node.add(op_type="Shape", input=[name], output=[shape])
        proto.graph.output.extend(helper.make_empty_tensor_value_info(shape) for shape in shapes.values())
        results = self._session(proto).run(list(shapes.values()), values)
        return types, {
            name: tuple(int(size) for size in results[shape].numpy()) for name, shape in shapes.items()
        }

    def _types(self, proto: Any, names: Sequence[str]) -> dict[str, str]:
        count = len(proto.graph.output)
        proto.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
        types = self._session(proto).outputs
        del proto.graph.output[count:]
        return types

    def _sizes(self) -> dict[str, int]:
        """Bytes of each value that is a tensor."""
        sizes = {}
        for name, shape in self.shapes.items():
            dtype = DTYPES.get(dtype_name(self.types[name]))
            count = int(np.prod(shape, dtype=np.int64))
            sizes[name] = count * (8 if dtype is None else dtype.itemsize)
        return sizes


def _cut(
    graph: OnnxGraph, sizes: Mapping[str, int], types: Mapping[str, str], bound: int
) -> list[tuple[GraphNode, ...]]:
    """Cut a graph into sections whose values take at most so many bytes, or are those of one node.

    It is cut only where all that is taken behind the cut is a tensor.
    """
    last = {name: node.index for node in graph.nodes for name in node.inputs}
    others = {name for name, text in types.items() if not text.startswith(_TENSOR)}
    cuts: list[tuple[GraphNode, ...]] = []
    section: list[GraphNode] = []
    total, open_others = 0, set[str]()
    for node in graph.nodes:
        size = sum(sizes.get(name, 0) for name in node.outputs)
        if section and total + size > bound and not open_others:
            cuts.append(tuple(section))
            section, total = [], 0
        section.append(node)
        total += size
        open_others |= others.intersection(node.outputs)
        open_others = {name for name in open_others if last.get(name, -1) > node.index}
    return [*cuts, tuple(section)]
