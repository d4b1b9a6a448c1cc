"""What enters and leaves a module: the values of the graph that are its arguments and results."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from tensorcap.adapters.onnx.graph import OnnxGraph
from tensorcap.adapters.onnx.scopes import ROOT, ModuleCall, Scopes

_THE_SAME: Final = ("Identity", "Cast", "Reshape", "Flatten", "QuantizeLinear", "DequantizeLinear")


@dataclass(frozen=True, slots=True)
class Boundary:
    """Arguments and results of a call of a module, by slot: names of values of the graph.

    Attributes:
        inputs: `input.0`, `input.1`, … in the order in which nodes take them.
        outputs: `output`, or `output.0`, … the main one first.
        first: Place of its first node.
        last: Place of its last node.
    """

    inputs: dict[str, str]
    outputs: dict[str, str]
    first: int
    last: int


def boundaries(graph: OnnxGraph, scopes: Scopes) -> dict[ModuleCall, Boundary]:
    """The boundary of each call of a module but the model itself, outer modules first.

    Results are the values that nodes around take. If some depend on values of the model's inputs, those that
    depend on shapes alone are none: sizes are computed of them. A value that only nodes outside of the module
    around take, such as a mask that the exporter computes once for all layers, is none if there are others.
    Of several, the last that is computed is the main one.
    """
    calls = sorted(
        (c for c in scopes.nodes_of if c != ROOT), key=lambda c: (c.path.count("."), c.path, c.number)
    )
    parents = {call: _parent(call, scopes) for call in calls}
    found = {}
    for call in calls:
        nodes = scopes.nodes_of[call]
        own = {node.index for node in nodes}
        around = {node.index for node in scopes.nodes_of[parents[call]]} - own
        made = [name for node in nodes for name in node.outputs if name]
        leaving = [
            name
            for name in made
            if name in graph.outputs or any(t.index not in own for t in graph.takers.get(name, ()))
        ]
        by_value = [name for name in leaving if name in graph.by_value]
        results = by_value or leaving
        near = [n for n in results if any(t.index in around for t in graph.takers.get(n, ()))]
        results = near or results
        if any(scopes.nodes[node.index].calls[-1] != call for node in nodes) and any(
            _has_unlocated_taker(name, graph, scopes) for name in results
        ):
            results = []
        if by_value:
            results = sorted(results, key=lambda name: -graph.makers[name].index)
        produced = set(made)
        taken = [n for node in nodes for n in node.inputs if n and n not in produced]
        entering = [n for n in dict.fromkeys(taken) if not graph.is_constant(n)]
        arguments = [name for name in entering if name in graph.by_value] or entering
        outputs = _numbered("output", results) if len(results) != 1 else {"output": results[0]}
        found[call] = Boundary(_numbered("input", arguments), outputs, nodes[0].index, nodes[-1].index)
    return found


def _has_unlocated_taker(name: str, graph: OnnxGraph, scopes: Scopes) -> bool:
    """Whether a node that nothing locates computes something of a value, or of what is the same."""
    for taker in graph.takers.get(name, ()):
        if taker.index not in scopes.unlocated:
            continue
        if taker.op not in _THE_SAME or any(_has_unlocated_taker(n, graph, scopes) for n in taker.outputs):
            return True
    return False


def _parent(call: ModuleCall, scopes: Scopes) -> ModuleCall:
    """The call around a call."""
    calls = scopes.nodes[scopes.nodes_of[call][0].index].calls
    place = calls.index(call)
    return calls[place - 1] if place else ROOT


def _numbered(kind: str, names: Iterable[str]) -> dict[str, str]:
    return {f"{kind}.{number}": name for number, name in enumerate(names)}
