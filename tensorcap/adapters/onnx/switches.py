"""Archived values in the place of a graph's own: each argument and result of a module has a switch.

A switch is an `If` between the value of the graph and an input; both are cheap to leave off. So one session
runs every injection and every cut of a bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper

from tensorcap.adapters.onnx.boundaries import Boundary
from tensorcap.adapters.onnx.engine import from_stored, to_runtime
from tensorcap.adapters.onnx.graph import GraphNode, OnnxGraph, subgraphs_of
from tensorcap.adapters.onnx.quantisation import Grid
from tensorcap.adapters.onnx.scopes import ROOT, ModuleCall, Scopes
from tensorcap.recording import Kind, Substitution
from tensorcap_formats.dtypes import DTYPES, Array, DType, bits_of
from tensorcap_formats.keys import Key, module_site
from tensorcap_formats.records import Record

_OWN_RESULT: Final = "the model itself returns it, and nothing of the run comes after that"
_NO_TENSOR: Final = "it is no tensor but a sequence, a map or text"
_KINDS: Final[tuple[Kind, ...]] = ("input", "output")


@dataclass(frozen=True, slots=True)
class Switch:
    """A place where an archived value can stand.

    Attributes:
        call: The call of a module.
        slot: Which of its arguments and results.
        value: The value of the graph that it is.
        number: Of the switch in the graph.
    """

    call: ModuleCall
    slot: str
    value: str
    number: int

    @property
    def flag(self) -> str:
        """The input of the graph that switches it on."""
        return f"tensorcap/on/{self.number}"

    @property
    def archived(self) -> str:
        """The input of the graph that is then taken."""
        return f"tensorcap/value/{self.number}"


class Switches:
    """The switches of a graph."""

    def __init__(self, graph: OnnxGraph, scopes: Scopes, modules: Mapping[ModuleCall, Boundary]) -> None:
        """Give every argument and result of the modules a switch."""
        self._graph = graph
        self._scopes = scopes
        self.by_place: dict[tuple[ModuleCall, str], Switch] = {}
        for call, boundary in modules.items():
            for slot, value in (*boundary.inputs.items(), *boundary.outputs.items()):
                place = call, slot
                self.by_place[place] = Switch(call, slot, value, len(self.by_place))
        self._of_value: dict[tuple[ModuleCall, str, str], Switch] = {
            (switch.call, switch.slot.partition(".")[0], switch.value): switch
            for switch in self.by_place.values()
        }

    def passed(self, value: str, taker: GraphNode | None) -> list[Switch]:
        """The switches between what makes a value and a node that takes it, the first one first.

        Results of calls that are over pass theirs, inner ones first; then arguments of calls that begin,
        outer ones first.

        Args:
            value: The value.
            taker: The node; None for the caller of the model.
        """
        maker = self._graph.makers.get(value)
        made_in = () if maker is None else self._scopes.nodes[maker.index].calls
        taken_in = () if taker is None else self._scopes.nodes[taker.index].calls
        ended = [(call, "output") for call in reversed(made_in) if call not in taken_in]
        begun = [(call, "input") for call in taken_in if call not in made_in]
        places = ((call, kind, value) for call, kind in (*ended, *begun))
        return [self._of_value[place] for place in places if place in self._of_value]

    def build(
        self, proto: Any, nodes: Sequence[GraphNode], element_type: Callable[[str], int | None]
    ) -> tuple[list[str], list[Any]]:
        """Add nodes to a graph, with the switches of what they take.

        Args:
            proto: The graph.
            nodes: The nodes.
            element_type: Gives the element type of a value; None for what is no tensor, which has no switch.

        Returns:
            Names and types of the inputs of the switches.
        """
        names: list[str] = []
        inputs: list[Any] = []
        built: dict[tuple[str, tuple[int, ...]], str] = {}
        used: set[int] = set()
        for node in nodes:
            renamed = {}
            for value in dict.fromkeys(node.inputs):
                kind = element_type(value) if value and not self._graph.is_constant(value) else None
                if kind is None:
                    continue
                before = value
                path: tuple[int, ...] = ()
                for switch in self.passed(value, node):
                    path = (*path, switch.number)
                    if (value, path) not in built:
                        after = built[value, path] = f"tensorcap/switched/{len(built)}/{nodes[0].index}"
                        proto.node.append(_switch(switch, before, after, kind))
                        if switch.number not in used:
                            used.add(switch.number)
                            names += [switch.flag, switch.archived]
                            inputs.append(helper.make_tensor_value_info(switch.flag, TensorProto.BOOL, []))
                            inputs.append(helper.make_tensor_value_info(switch.archived, kind, None))
                    before = built[value, path]
                if before != value:
                    renamed[value] = before
            copy = onnx.NodeProto()
            copy.CopyFrom(node.proto)
            _rename(copy, renamed)
            proto.node.append(copy)
        return names, inputs


def _switch(switch: Switch, before: str, after: str, kind: int) -> Any:
    """An `If` that takes the archived value if it is on."""

    def branch(name: str, source: str) -> Any:
        identity = helper.make_node("Identity", [source], [f"{after}/{name}"])
        return helper.make_graph(
            [identity], name, [], [helper.make_tensor_value_info(f"{after}/{name}", kind, None)]
        )

    return helper.make_node(
        "If",
        [switch.flag],
        [after],
        then_branch=branch("then", switch.archived),
        else_branch=branch("else", before),
    )


def _rename(node: Any, names: Mapping[str, str]) -> None:
    """Have a node, and graphs within it, take values of other names."""
    if not names:
        return
    for place, name in enumerate(node.input):
        node.input[place] = names.get(name, name)
    for _, graph in subgraphs_of(node):
        own = {*(value.name for value in graph.input), *(stored.name for stored in graph.initializer)}
        own |= {name for inner in graph.node for name in inner.output}
        outer = {name: new for name, new in names.items() if name not in own}
        for inner in graph.node:
            _rename(inner, outer)


class Feed:
    """What a run's switches are given.

    Attributes:
        own: The model's inputs, as values of the runtime, some of them replaced.
        values: The inputs of the switches.
        archived: Stored elements that take the place of a value, by number of the switch.
    """

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self.own = dict(inputs)
        self.values: dict[str, Any] = {}
        self.archived: dict[int, tuple[Array, DType]] = {}

    def natural(self, switches: Iterable[Switch]) -> tuple[Array, DType] | None:
        """What stands behind switches in a row, if one of them is on; else None."""
        natural = None
        for switch in switches:
            natural = self.archived.get(switch.number, natural)
        return natural


def feed_inputs(
    inputs: Mapping[str, tuple[Array, DType]],
    own: Mapping[str, Any],
    element_type: Callable[[str], int | None],
    substitution: Substitution | None,
    step: int,
) -> Feed:
    """The feed with the model's own inputs, of which a substitution may replace some.

    Raises:
        UsageError: A tensor does not fit.
    """
    feed = Feed(own)
    records = None if substitution is None else substitution.planned(module_site(""), step, 0, "input")
    if substitution is None or records is None:
        return feed
    left = dict(records)
    for name, (bits, dtype) in inputs.items():
        key = Key(module_site(""), f"input.{name}", step, 0)
        record = left.pop(key.slot, None)
        if record is None:
            substitution.note_absent(key)
            continue
        shape = None if substitution.may_resize(key) else bits.shape
        archived, cast_text = substitution.read_as(key, record, dtype, shape)
        feed.own[name] = from_stored(archived, dtype, element_type(name) or 0)
        substitution.note_injected(key, cast_text)
    for slot in left:
        substitution.note_left(Key(module_site(""), slot, step, 0))
    return feed


def feed_switches(
    feed: Feed,
    switches: Switches,
    modules: Mapping[ModuleCall, Boundary],
    grids: Mapping[str, Grid],
    shapes: Mapping[str, tuple[int, ...]],
    element_type: Callable[[str], int | None],
    dtype_of_value: Callable[[str], DType | None],
    substitution: Substitution | None,
    step: int,
) -> None:
    """Turn on the switches for which a substitution has a tensor.

    What stands in the place of whole numbers, which have a grid, is rounded to that.

    Raises:
        UsageError: A tensor does not fit.
    """
    off = to_runtime(np.array(False))
    on = to_runtime(np.array(True))
    for switch in switches.by_place.values():
        dtype, kind = dtype_of_value(switch.value), element_type(switch.value)
        if dtype is not None and kind is not None:
            feed.values[switch.flag] = off
            feed.values[switch.archived] = from_stored(np.zeros((), dtype.storage), dtype, kind)
    if substitution is None:
        return
    for call, boundary in (*modules.items(), (ROOT, None)):
        site = module_site(call.path)
        for kind_name in _KINDS:
            records = substitution.planned(site, step, call.number, kind_name)
            if records is None or (call == ROOT and kind_name == "input"):
                continue
            left = dict(records)
            slots: Mapping[str, str] = {}
            if boundary is not None:
                slots = boundary.inputs if kind_name == "input" else boundary.outputs
            for slot, value in slots.items():
                key, record = Key(site, slot, step, call.number), left.pop(slot, None)
                switch = switches.by_place[call, slot]
                dtype, kind = dtype_of_value(value), element_type(value)
                if record is None:
                    substitution.note_absent(key)
                elif dtype is None or kind is None:
                    substitution.note_left(key, _NO_TENSOR)
                else:
                    grid = grids.get(value)
                    _turn_on(
                        feed, switch, substitution, key, record, dtype, kind, shapes.get(value), grid, on
                    )
            for slot in left:
                key = Key(site, slot, step, call.number)
                substitution.note_left(key, _OWN_RESULT if call == ROOT else "")


def _turn_on(
    feed: Feed,
    switch: Switch,
    substitution: Substitution,
    key: Key,
    record: Record,
    dtype: DType,
    kind: int,
    shape: tuple[int, ...] | None,
    grid: Grid | None,
    on: Any,
) -> None:
    if shape is not None and record.shape != shape and substitution.leaves_misfit(key):
        substitution.note_left(key, f"it has the shape {list(record.shape)}, and the model {list(shape)}")
        return
    if grid is None:
        bits, cast_text = substitution.read_as(key, record, dtype, shape)
    else:
        floats, cast_text = substitution.read_as(key, record, DTYPES["float32"], shape)
        bits = bits_of(grid.numbers(floats, dtype.storage))
    feed.archived[switch.number] = bits, dtype
    feed.values[switch.flag] = on
    feed.values[switch.archived] = from_stored(bits, dtype, kind)
    substitution.note_injected(key, cast_text)
