"""The values that a compiled target has of the operations of the reference's graph, in their shapes.

A target that is compiled from an exported graph says which of its operations holds the value of which node
(`RunInfo.operation_map`). What is looked up here by the name of a node of the reference is that record, if
its elements are known to be those of the node in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from tensorcap.alignment import pair_operations
from tensorcap.alignment.node_sequences import GraphNode, pair_nodes
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.keys import ROOT_SITE, Key, module_site
from tensorcap_formats.records import Record
from tensorcap_formats.run_info import ExportedNode, MappedOperation

# Operations whose result has the elements of their first input in the same order
_RESHAPES: Final = frozenset(
    {
        *("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "alias"),
        *("detach", "clone", "contiguous", "_to_copy", "lift_fresh_copy"),
    }
)
_PRODUCTS: Final = frozenset({"mm", "bmm", "addmm", "baddbmm", "convolution"})


class OperationValues:
    """The target's values by node of the reference's graph.

    Args:
        reference: The trusted archive, of a run of its graph.
        target: The archive under test, under its own keys.

    Attributes:
        nodes: The reference's nodes by name, in execution order.
        names: Names of nodes in the target, by those in the reference.
        places: Places of nodes in the reference, `0/blocks.1:gelu_1`, by name.
        records: Records of the target by name and number of the output.
        misfits: Why the value of a node cannot be used, by name.
    """

    def __init__(self, reference: Archive, target: Archive) -> None:
        self.reference, self.target = reference, target
        self.places = _places_of_nodes(reference)
        self.nodes = {node.node: node for node in reference.info.exported_nodes}
        own = _by_node(target)
        theirs = target.info.exported_nodes
        if theirs:
            self.names = pair_operations(reference.info.exported_nodes, theirs)
        else:
            self.names = _paired_by_sequence(self.nodes.values(), own)
        self.records: dict[tuple[str, int], Record] = {}
        self.misfits: dict[str, str] = {}
        shapes = _ReshapedShapes(reference.info.exported_nodes)
        for node in self.nodes.values():
            for at, shape in enumerate(node.shapes):
                record = own.get((self.names.get(node.node, ""), at))
                if record is not None and record.stored:
                    self._add(node, at, record, shape, shapes.of(node.node) if at == 0 else ())
        self._add_outputs()

    def _add(
        self,
        node: ExportedNode,
        at: int,
        record: Record,
        shape: Sequence[int],
        others: Sequence[Sequence[int]],
    ) -> None:
        is_same = _without_ones(record.shape) == _without_ones(shape)
        if is_same or record.shape in others:
            self.records[node.node, at] = record
        elif at == 0:
            self.misfits[node.node] = f"has shape {list(record.shape)}, expected {list(shape)}"

    def _add_outputs(self) -> None:
        """Take the model's outputs as the values of their nodes, which need no map of operations."""
        names = {at: node.node for node in self.nodes.values() for at in node.outputs}
        results = results_of_model(self.target)
        for at, name in names.items():
            record = results[at] if len(results) == len(results_of_model(self.reference)) else None
            if record is not None and self.nodes[name].shapes == (record.shape,) and record.stored:
                self.records[name, 0] = record
                self.misfits.pop(name, None)

    def read(self, name: str, at: int, shape: Sequence[int]) -> Array:
        """Read a value in the shape that it has in the reference."""
        return self.target.load(self.records[name, at]).reshape(tuple(shape))

    def key(self, name: str, at: int) -> str:
        """The reference's key text of an output of a node."""
        is_single = len(self.nodes[name].shapes) == 1
        return f"{self.places[name]}/{'output' if is_single else f'output.{at}'}"

    def terms(self, node: ExportedNode) -> int:
        """How many terms are summed for each element of a product; 1 of any other operation."""
        if node.base not in _PRODUCTS:
            return 1
        if node.base == "convolution":
            module, _, own = node.weights.get("weight", "").rpartition(".")
            info = self.reference.info.modules.get(module_site(module))
            shape = None if info is None or own not in info.parameters else info.parameters[own].shape
            return math.prod(shape[1:]) if shape else 1
        first = next((node.inputs[name] for name in ("mat1", "self", "batch1") if name in node.inputs), "")
        source = self.nodes.get(first)
        return source.shapes[0][-1] if source is not None and source.shapes and source.shapes[0] else 1

    def operation(self, name: str) -> MappedOperation | None:
        """The operation of the target that is said to hold the first output of a node; None if none is."""
        own = self.names.get(name)
        return next((row for row in self.target.info.operation_map if row.node == own), None)

    def converted(self, name: str) -> ExportedNode | None:
        """The node that the target was converted from; None if that is not known."""
        own = self.names.get(name)
        return next((node for node in self.target.info.exported_nodes if node.node == own), None)


def results_of_model(archive: Archive) -> Sequence[Record]:
    """The outputs of the model itself, in order."""
    return [
        record
        for record in archive.records
        if record.key.site == ROOT_SITE and record.key.slot.partition(".")[0] == "output"
    ]


def _places_of_nodes(reference: Archive) -> Mapping[str, str]:
    """Where each node of a captured graph stands, as the text of a key up to its slot, by its name."""
    places = {}
    for text, facts in reference.values.items():
        if text.endswith("/op") and isinstance(facts, Mapping) and isinstance(facts.get("node"), str):
            places[facts["node"]] = text.rpartition("/")[0]
    return places


def _by_node(target: Archive) -> dict[tuple[str, int], Record]:
    """Records of operations by their node and the number of the output."""
    records: dict[tuple[str, int], Record] = {}
    for record in target.records:
        key: Key = record.key
        _, _, name = key.site.partition(":")
        kind, _, number = key.slot.partition(".")
        if name and kind == "output" and (not number or number.isdigit()):
            records.setdefault((name, int(number or 0)), record)
    return records


class _ReshapedShapes:
    """The shapes that the elements of a node have in nodes that only reshape it, or that it reshapes."""

    def __init__(self, nodes: Sequence[ExportedNode]) -> None:
        self._shapes: dict[str, set[tuple[int, ...]]] = {}
        for node in nodes:
            if len(node.shapes) != 1:
                continue
            own = {node.shapes[0]}
            source = next(iter(node.inputs.values()), "")
            known = self._shapes.get(source)
            if node.base in _RESHAPES and known is not None and _counts(known) == _counts(own):
                known |= own
                own = known
            self._shapes[node.node] = own

    def of(self, name: str) -> tuple[tuple[int, ...], ...]:
        return tuple(self._shapes.get(name, ()))


def _counts(shapes: set[tuple[int, ...]]) -> int:
    return math.prod(next(iter(shapes)))


def _paired_by_sequence(
    nodes: Iterable[ExportedNode], own: Mapping[tuple[str, int], Record]
) -> dict[str, str]:
    """Names of nodes in a target whose graph is not known, by those in the reference (SYN-1)."""
    ours = [
        GraphNode(node.node, node.node, module_site(node.module), node.shapes[0] if node.shapes else None)
        for node in nodes
    ]
    theirs = [GraphNode(name, record.key.site, None, record.shape) for (name, _), record in own.items()]
    return {one.name: other.name for one, other in pair_nodes(ours, theirs)}


def _without_ones(shape: Sequence[int]) -> list[int]:
    """A shape without axes of length 1, which do not say where an element is."""
    return [size for size in shape if size != 1]
