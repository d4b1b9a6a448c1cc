"""The values that a compiled target has of the operations of the reference's graph, in their shapes.

A target that is compiled from an exported graph says which of its operations holds the value of which node
(`RunInfo.operation_map`). What is looked up here by the name of a node of the reference is the record that it
is compared with, if that has the node's shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from tensorcap.adapters.operation_graph import Value
from tensorcap.alignment import paired_names, sides
from tensorcap.alignment.node_sequences import without_ones
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.keys import ROOT_SITE, module_site
from tensorcap_formats.records import Record
from tensorcap_formats.run_info import ExportedNode, MappedOperation

_PRODUCTS: Final = frozenset({"mm", "bmm", "addmm", "baddbmm", "convolution"})


class OperationValues:
    """The target's values by node of the reference's graph.

    Args:
        reference: The trusted archive, of a run of its graph.
        target: The archive under test, under its own keys.

    Attributes:
        reference: The trusted archive, as it is compared.
        target: The archive under test, likewise: under the reference's keys.
        nodes: The reference's nodes by name, in execution order.
        names: Names of nodes in the target, by those in the reference.
        places: Places of nodes in the reference, `0/blocks.1:gelu_1`, by name.
        records: Records of the target by name and number of the output.
    """

    def __init__(self, reference: Archive, target: Archive) -> None:
        self.reference, self.target = sides(reference, target)
        self.places = _places_of_nodes(reference)
        self.nodes = {node.node: node for node in reference.info.exported_nodes}
        self.names = paired_names(reference, target)
        self.records: dict[tuple[str, int], Record] = {}
        results = results_of_model(self.target)
        has_results = len(results) == len(results_of_model(reference))
        for node in self.nodes.values():
            for at, shape in enumerate(node.shapes):
                text = self.key(node.node, at) if node.node in self.places else ""
                records = [self.target.get(text)] if text in self.target else []
                if has_results and len(node.shapes) == 1:  # outputs of the model need no map of operations
                    records += [results[number] for number in node.outputs]
                fitting = [r for r in records if r.stored and without_ones(r.shape) == without_ones(shape)]
                if fitting:
                    self.records[node.node, at] = fitting[-1]

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


def is_compiled(reference: Archive, target: Archive) -> bool:
    """Whether a target was compiled from a graph that the reference ran, so that operations correspond."""
    return bool(reference.info.exported_nodes and target.info.operation_map)


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


def part_of(made: Value, at: int) -> Array | None:
    """The tensor at a place among what an operation returns, or the only one; None if there is none."""
    part = made[at] if isinstance(made, (list, tuple)) and at < len(made) else made
    return part if isinstance(part, np.ndarray) else None
