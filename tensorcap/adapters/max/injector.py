"""Archived tensors in the place of those that a MAX model computes: by switches of a graph, or by weights.

A graph of ours has switches, each between the model's own value and an input (`feed`). A graph of a foreign
program keeps the inputs that its program gives it, so archived tensors become weights (`InjectedWeights`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from tensorcap.adapters.max.engine import Buffer, MaxDType, TensorValue, Weight
from tensorcap.adapters.max.graph_plan import CompiledGraph, InjectionPoint
from tensorcap.adapters.max.model_inputs import ModelInputs
from tensorcap.adapters.max.tensors import from_stored, logical_dtype
from tensorcap.adapters.max.trace_events import (
    EnterModule,
    EnterProbe,
    Event,
    GraphTensor,
    Leave,
    LostValue,
    PlainValue,
    PrintedTensor,
    SubgraphTensor,
)
from tensorcap.recording import Kind, Substitution
from tensorcap_formats.dtypes import DTYPES
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import Key, module_site
from tensorcap_formats.records import Record

_OWN_RESULT: Final = "the model itself returns it, and nothing of the run comes after that"
_NO_SWITCH: Final = "nothing can stand for it: it is within a subgraph, or its shape is only computed"
_ELSEWHERE: Final = "it is within a subgraph, a branch or a loop of the graph"
_UNKNOWN_SHAPE: Final = "its shape is known only when the graph is run, and a weight has one before"
_KINDS: Final[tuple[Kind, ...]] = ("input", "output")

_Leaf = GraphTensor | PlainValue | PrintedTensor | LostValue


def feed(
    graph: CompiledGraph, model_inputs: ModelInputs, substitution: Substitution | None, step: int
) -> list[Any]:
    """The inputs of a graph: the model's own, a value for each switch, and for each whether it is on.

    Args:
        graph: The graph.
        model_inputs: The inputs of the model.
        substitution: The archived tensors, if there are any; notes what became of each.
        step: The number of the step that this run is.

    Raises:
        UsageError: A tensor does not fit.
    """
    run_inputs = _RunInputs(graph, model_inputs, step)
    if substitution is not None:
        try:
            run_inputs.fill(substitution)
        except UsageError as error:
            substitution.failure = error
            raise
    zeros: dict[Any, Any] = {}
    values = [
        run_inputs.values[point]
        if point in run_inputs.values
        else _zeros(tensor_type, model_inputs.shape_of(tensor_type.shape) or (), zeros)
        for point, tensor_type in graph.switches.items()
    ]
    flags = [from_stored(np.array(point in run_inputs.values), DTYPES["bool"]) for point in graph.switches]
    return [*run_inputs.own, *values, *flags]


class _RunInputs:
    """The inputs of one run of a graph.

    Attributes:
        own: The model's own inputs, some of them replaced.
        values: The archived tensors by injection point.
    """

    def __init__(self, graph: CompiledGraph, model_inputs: ModelInputs, step: int) -> None:
        self.own = list(model_inputs.buffers)
        self.values: dict[InjectionPoint, Any] = {}
        self._graph = graph
        self._model_inputs = model_inputs
        self._step = step

    def fill(self, substitution: Substitution) -> None:
        """Read the archived tensors that a substitution has for the calls of the run."""
        for key, point, leaf, record in planned(self._graph.events, substitution, self._step):
            tensor_type = self._graph.switches.get(point)
            if leaf.is_input and not point.name:
                own_type = self._model_inputs.types[leaf.position]
                self.own[leaf.position], cast_text = self._read(substitution, key, record, own_type)
            elif tensor_type is not None:
                self.values[point], cast_text = self._read(substitution, key, record, tensor_type)
            else:
                substitution.note_left(key, _NO_SWITCH if point.name else _OWN_RESULT)
                continue
            substitution.note_injected(key, cast_text)

    def _read(
        self, substitution: Substitution, key: Key, record: Record, tensor_type: Any
    ) -> tuple[Any, str]:
        """Read an archived tensor as a buffer of a type; and how it was cast."""
        shape = self._model_inputs.shape_of(tensor_type.shape) or ()
        buffer, cast_text = read_archived(substitution, key, record, tensor_type.dtype, shape)
        return _on_device(buffer, tensor_type), cast_text


def planned(
    events: Sequence[Event], substitution: Substitution, step: int
) -> Iterator[tuple[Key, InjectionPoint, GraphTensor, Record]]:
    """The tensors of a run that are to be replaced, each with its archived record.

    The substitution notes the tensors that it has no record for, and the records that the run has no
    tensor for.

    Args:
        events: The trace events of the graph.
        substitution: The archived tensors and where they go.
        step: The number of the step that the run is.
    """
    for name, call, leaves in _calls(events):
        site = module_site(name)
        for kind in _KINDS:
            records = substitution.planned(site, step, call, kind)
            if records is None:
                continue
            left = dict(records)
            for leaf in leaves:
                if leaf.slot.partition(".")[0] != kind or isinstance(leaf, PlainValue):
                    continue
                key, record = Key(site, leaf.slot, step, call), left.pop(leaf.slot, None)
                is_held = isinstance(leaf, LostValue) and leaf.is_held
                if record is None:
                    substitution.note_absent(key, is_held=is_held)
                elif not isinstance(leaf, GraphTensor):
                    reason = leaf.reason if isinstance(leaf, LostValue) else _ELSEWHERE
                    substitution.note_left(key, "" if is_held else reason, is_held=is_held)
                else:
                    yield key, InjectionPoint(name, call, leaf.slot), leaf, record
            for slot in left:
                substitution.note_left(Key(site, slot, step, call))


def read_archived(
    substitution: Substitution, key: Key, record: Record, dtype: MaxDType, shape: tuple[int, ...]
) -> tuple[Any, str]:
    """Read an archived tensor as a buffer of a dtype; and how it was cast, empty if it was not.

    Raises:
        UsageError: It does not fit.
    """
    logical = logical_dtype(dtype)
    bits, cast_text = substitution.read_as(key, record, logical, shape)
    return from_stored(bits, logical), cast_text


def _calls(events: Sequence[Event]) -> Iterator[tuple[str, int, list[_Leaf]]]:
    """Each call of a module: its name, its number, and the leaves of its arguments and its result."""
    counts: dict[str, int] = {}
    stack: list[tuple[str, int, list[_Leaf]]] = []
    for event in events:
        if isinstance(event, EnterModule):
            number = counts.get(event.name, 0)
            counts[event.name] = number + 1
            stack.append((event.name, number, []))
        elif isinstance(event, EnterProbe):
            stack.append(("", -1, []))
        elif isinstance(event, Leave):
            call = stack.pop()
            if call[1] >= 0:
                yield call
        elif not isinstance(event, SubgraphTensor):
            stack[-1][2].append(event)


def _zeros(tensor_type: Any, shape: tuple[int, ...], buffers: dict[Any, Any]) -> Any:
    """The input of a switch that is off: zeros, of which all switches of a type share one buffer."""
    key = (tensor_type.dtype.name, shape, str(tensor_type.device))
    if key not in buffers:
        buffers[key] = _on_device(Buffer.zeros(list(shape), tensor_type.dtype), tensor_type)
    return buffers[key]


def _on_device(buffer: Any, tensor_type: Any) -> Any:
    return buffer if tensor_type.device.is_cpu() else buffer.to(tensor_type.device.to_device())


class InjectedWeights:
    """Puts a weight at each point of a graph for which a substitution has a tensor, in the first step.

    Attributes:
        values: The weights, by name.
    """

    def __init__(self, substitution: Substitution) -> None:
        self.values: dict[str, Any] = {}
        self._substitution = substitution
        self._casts: dict[InjectionPoint, str] = {}

    def __call__(self, name: str, call: int, kind: Kind, slot: str, value: TensorValue) -> TensorValue:
        """Replace a value by a weight, if there is an archived tensor for it and its shape is known."""
        site = module_site(name)
        record = (self._substitution.planned(site, 0, call, kind) or {}).get(slot)
        if record is None or not all(str(dim).isdigit() for dim in value.shape):
            return value
        key, shape = Key(site, slot, 0, call), tuple(int(str(dim)) for dim in value.shape)
        try:
            buffer, cast_text = read_archived(self._substitution, key, record, value.dtype, shape)
        except UsageError as error:
            self._substitution.failure = error
            raise
        weight = Weight(f"tensorcap.{key.text}", value.dtype, list(shape), value.device, align=1)
        self.values[weight.name] = buffer
        self._casts[InjectionPoint(name, call, slot)] = cast_text
        return TensorValue(weight)

    def note_outcomes(self, events: Sequence[Event]) -> None:
        """Note what became of each archived tensor in a run."""
        for key, point, _, _ in planned(events, self._substitution, 0):
            if point in self._casts:
                self._substitution.note_injected(key, self._casts[point])
            else:
                self._substitution.note_left(key, _UNKNOWN_SHAPE)
