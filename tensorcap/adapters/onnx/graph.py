"""An ONNX graph, its weights apart: nodes in an order of execution, and what each takes and makes.

Weights in the file are taken out of it and shared by all sessions; those in files beside it are left to the
runtime, which maps them. So no weight passes through protobuf when a session is made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from tensorcap.adapters.input_arrays import InputKind
from tensorcap.adapters.onnx.cut_ranges import separate_cuts
from tensorcap.adapters.onnx.engine import PACKED, from_stored, type_name
from tensorcap.adapters.onnx.fused_sums import separate_sums
from tensorcap.adapters.onnx.quantisation import quantised_constants, separate_quantisers, with_constants
from tensorcap_formats.dtypes import Array, DType, decode
from tensorcap_formats.errors import CorruptArchiveError, UsageError, abbreviate
from tensorcap_formats.foreign.onnx_file import foreign_tensor, load_onnx
from tensorcap_formats.foreign_archive import ForeignTensor

_APART: Final = 4096  # bytes from which a weight is kept apart; shapes and axes have to stay in the graph
_DATA: Final = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data")
_SHAPES: Final = ("Shape", "Size")  # whose results do not depend on values


@dataclass(frozen=True, slots=True)
class Subgraph:
    """A graph within a node: the branch of an `If`, the body of a `Loop` or a `Scan`.

    Attributes:
        name: The attribute that it is.
        nodes: Names of its nodes, those of graphs within it too.
    """

    name: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A node.

    Attributes:
        index: Its place in the order of execution.
        op: Its operator, with the domain if that is not ONNX's own: `com.microsoft.Attention`.
        name: Its name; "" if it has none.
        inputs: Names of the values that it takes, those that its subgraphs take from outside behind its own.
        own_inputs: How many of them are its own.
        outputs: Names of the values that it makes; "" for those that are left out.
        metadata: What the exporter says of it.
        subgraphs: Graphs within it.
        proto: The node as ONNX has it.
    """

    index: int
    op: str
    name: str
    inputs: tuple[str, ...]
    own_inputs: int
    outputs: tuple[str, ...]
    metadata: Mapping[str, str]
    subgraphs: tuple[Subgraph, ...]
    proto: Any = field(compare=False, repr=False)


class OnnxGraph:
    """A model's graph.

    Attributes:
        path: The file.
        plain: The model without the weights that are kept apart.
        proto: The same, each integer product with a node of its own that rounds its inputs, sums that fused
            operators make and cuts that ranges make by nodes of their own, and weights that the graph rounds
            itself as numbers.
        nodes: All but constants, in an order of execution: that of the file, if it is one.
        constants: Nodes that make a constant, by the name of that.
        weights: Initialisers by name.
        apart: Those that sessions are given, as values of the runtime, by name.
        inputs: What each input has to be, by name.
        outputs: Names of the model's outputs.
        makers: The node that makes a value, by name.
        takers: The nodes that take a value, by name.
    """

    def __init__(self, path: Path) -> None:
        """Load a model.

        Raises:
            CorruptArchiveError: It is no model, is cut short, or contradicts itself.
            UnsafeFileError: It names a file outside of its folder.
            UsageError: It has no nodes, or its nodes depend on each other in a ring.
        """
        self.path = path
        self.plain = load_onnx(path)
        graph = self.plain.graph
        if not graph.node:
            raise UsageError(f"{path}: the model has no nodes, expected at least one to capture")
        self.weights: dict[str, ForeignTensor] = {}
        self.apart: dict[str, Any] = {}
        self._kept: dict[str, tuple[Array, DType]] = {}
        taken = _taken_in(graph)
        for stored in graph.initializer:
            self._take(stored, is_taken=stored.name in taken)
        self.constants = {
            node.output[0]: node for node in graph.node if node.op_type == "Constant" and node.output
        }
        self.proto = separate_sums(separate_quantisers(self.plain), self.is_constant)
        count = len(self.proto.graph.initializer)
        self.proto = separate_cuts(self.proto, self)
        for stored in self.proto.graph.initializer[count:]:
            self._take(stored)
        if folded := quantised_constants(self.proto, self):
            self.proto = with_constants(self.proto, folded)
            _drop_unused(self.proto.graph, self.apart)
            for stored in self.proto.graph.initializer[-len(folded) :]:
                self._take(stored)
        graph = self.proto.graph
        self.inputs = {
            each.name: _input_kind(path, each) for each in graph.input if each.name not in self.weights
        }
        self.outputs = tuple(output.name for output in graph.output)
        ordered = self._ordered([node for node in graph.node if node.op_type != "Constant"])
        self.nodes = tuple(_node(index, proto) for index, proto in enumerate(ordered))
        self.makers = {name: node for node in self.nodes for name in node.outputs if name}
        self.takers: dict[str, list[GraphNode]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                self.takers.setdefault(name, []).append(node)

    def is_constant(self, name: str) -> bool:
        """Whether a value is an initialiser or made by a constant."""
        return name in self.weights or name in self.constants

    def read(self, name: str) -> tuple[Array, DType]:
        """The stored elements of an initialiser, and its dtype."""
        if name in self._kept:
            return self._kept[name]
        tensor = self.weights[name]
        flat = np.empty(int(np.prod(tensor.shape, dtype=np.int64)), tensor.dtype.storage)
        tensor.read(0, flat)
        return flat.reshape(tensor.shape), tensor.dtype

    def elements(self, name: str) -> Array:
        """The values of an initialiser or a constant, exactly: of numbers in few bits, each in a byte."""
        if name in self.weights:
            return decode(*self.read(name))
        value = helper.get_attribute_value(self.constants[name].attribute[0])
        return numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of an initialiser or a constant."""
        return self.weights[name].shape if name in self.weights else self.elements(name).shape

    def floats(self, name: str) -> Array:
        """The same in float32."""
        return self.elements(name).astype(np.float32)

    def number_format(self, name: str) -> str:
        """The format of the elements of an initialiser or a constant: `int8`, `uint4`, `float8_e4m3fn`."""
        return self.weights[name].dtype.name if name in self.weights else str(self.elements(name).dtype)

    @cached_property
    def by_value(self) -> frozenset[str]:
        """The values that depend on the values of the model's inputs, not on their shapes alone."""
        names = set(self.inputs)
        for node in self.nodes:
            if node.op not in _SHAPES and not names.isdisjoint(node.inputs):
                names.update(node.outputs)
        return frozenset(names)

    @cached_property
    def opsets(self) -> dict[str, int]:
        """Versions of the sets of operators by domain."""
        return {opset.domain or "ai.onnx": int(opset.version) for opset in self.proto.opset_import}

    def _take(self, stored: Any, *, is_taken: bool = True) -> None:
        """Check an initialiser; keep it apart if it is large and in the file, and something takes it."""
        name = stored.name
        if stored.data_type == TensorProto.STRING:
            return
        tensor = self.weights[name] = foreign_tensor(self.path, name, stored)
        size = int(np.prod(tensor.shape, dtype=np.int64)) * tensor.dtype.itemsize
        if stored.data_location == TensorProto.EXTERNAL or size < _APART or not is_taken:
            return
        bits, dtype = self.read(name)
        self.weights[name] = ForeignTensor(name, dtype, bits.shape, _no_read)
        self._kept[name] = bits, dtype
        if TensorProto.DataType.Name(stored.data_type).lower() in PACKED:
            return
        self.apart[name] = from_stored(bits, dtype, stored.data_type)
        for data in _DATA:
            stored.ClearField(data)
        stored.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "weights"), ("offset", "0"), ("length", str(bits.nbytes))):
            stored.external_data.add(key=key, value=value)

    def _ordered(self, nodes: list[Any]) -> list[Any]:
        """The nodes so that each comes behind those whose results it takes, else in the order of the file."""
        known = {"", *self.inputs, *self.weights, *self.constants}
        known |= {stored.name for stored in self.proto.graph.initializer}
        known |= {sparse.values.name for sparse in self.proto.graph.sparse_initializer}
        ordered, left = [], nodes
        while left:
            waiting = []
            for node in left:
                if known.issuperset(_taken(node)):
                    ordered.append(node)
                    known.update(node.output)
                else:
                    waiting.append(node)
            if len(waiting) == len(left):
                lacking = next(name for name in _taken(left[0]) if name not in known)
                raise CorruptArchiveError(
                    f"{self.path}: node {abbreviate(left[0].name or left[0].op_type)!r} takes "
                    f"{abbreviate(lacking)!r}, which is no input, no initialiser and no result before it"
                )
            left = waiting
        return ordered


def _no_read(start: int, out: Array) -> None:
    raise NotImplementedError  # what is kept in memory is not read


def _node(index: int, proto: Any) -> GraphNode:
    own, all_inputs = tuple(proto.input), tuple(_taken(proto))
    domain = "" if proto.domain in ("", "ai.onnx") else f"{proto.domain}."
    return GraphNode(
        index,
        f"{domain}{proto.op_type}",
        proto.name,
        all_inputs,
        len(own),
        tuple(proto.output),
        {entry.key: entry.value for entry in proto.metadata_props},
        tuple(Subgraph(name, tuple(_node_names(graph))) for name, graph in subgraphs_of(proto)),
        proto,
    )


def subgraphs_of(proto: Any) -> Iterator[tuple[str, Any]]:
    """The graphs among the attributes of a node, by attribute."""
    for attribute in proto.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.name, attribute.g
        for number, graph in enumerate(attribute.graphs):
            yield f"{attribute.name}.{number}", graph


def _taken(proto: Any) -> list[str]:
    """What a node takes, with what its subgraphs take from outside."""
    names = list(proto.input)
    for _, graph in subgraphs_of(proto):
        own = {*(value.name for value in graph.input), *(stored.name for stored in graph.initializer)}
        own |= {name for node in graph.node for name in node.output}
        outer = [name for node in graph.node for name in _taken(node)]
        outer += [output.name for output in graph.output]
        names += [name for name in dict.fromkeys(outer) if name and name not in own]
    return names


def _taken_in(graph: Any) -> set[str]:
    """What nodes of a graph take, and what it hands on."""
    return {name for node in graph.node for name in _taken(node)} | {each.name for each in graph.output}


def _drop_unused(graph: Any, apart: Collection[str]) -> None:
    """Drop the weights kept apart that no node takes: the runtime refuses to be given them."""
    taken = _taken_in(graph)
    used = [stored for stored in graph.initializer if stored.name in taken or stored.name not in apart]
    del graph.initializer[:]
    graph.initializer.extend(used)


def _node_names(graph: Any) -> Iterator[str]:
    for node in graph.node:
        if node.op_type != "Constant":
            yield node.name or next((name for name in node.output if name), node.op_type)
            for _, inner in subgraphs_of(node):
                yield from _node_names(inner)


def _input_kind(path: Path, value: Any) -> InputKind:
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        raise UsageError(f"{path}: input {value.name}: is a {(kind or 'value')[:-5]}, expected tensors alone")
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return InputKind(None, type_name(tensor.elem_type))
    dims = tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim)
    return InputKind(dims, type_name(tensor.elem_type))


def copy_without_nodes(model: Any) -> Any:
    """A model of the same versions and functions without nodes, weights, inputs and outputs."""
    copy = onnx.ModelProto()
    copy.ir_version = model.ir_version
    copy.opset_import.extend(model.opset_import)
    copy.functions.extend(model.functions)
    copy.graph.name = model.graph.name
    return copy
