"""Graphs of a model: as it is, or with all that happens in it given out and room for other values in it."""

from __future__ import annotations

import io
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any

from tensorcap.adapters.max.engine import (
    DeviceRef,
    Graph,
    InferenceSession,
    MaxDType,
    TensorType,
    TensorValue,
    compiled,
    ops,
)
from tensorcap.adapters.max.graph_plan import Built, GraphSource, Place, Told
from tensorcap.adapters.max.inputs import Given
from tensorcap.adapters.max.layer_calls import watching
from tensorcap.adapters.max.modules import as_before, devices_of, is_in_graph, own_weights, tree
from tensorcap.adapters.max.subgraphs import subgraphs
from tensorcap.adapters.max.trace import KINDS, Tracing
from tensorcap.recording.probes import probing
from tensorcap.recording.structure import walk
from tensorcap.recording.substitution import Kind
from tensorcap.workload.sources import class_name
from tensorcap_formats.errors import CaptureError, UsageError, abbreviate
from tensorcap_formats.keys import escape


class _Places:
    """Lists the places of a graph that is traced to find them."""

    def __init__(self, room: Collection[str], given: Given) -> None:
        self.found: dict[Place, TensorType] = {}
        self._room = room
        self._given = given

    def __call__(self, name: str, call: int, kind: Kind, slot: str, value: TensorValue) -> TensorValue:
        if name and kind in self._room and self._given.size_of(value.shape) is not None:
            self.found[Place(name, call, slot)] = TensorType(value.dtype, value.shape, value.device)
        return value


class _Switches:
    """Puts a switch at each place, between the value that is there and that of a graph input."""

    def __init__(self, places: Mapping[Place, TensorType], inputs: Sequence[Any]) -> None:
        self._values = dict(zip(places, inputs[: len(places)], strict=True))
        self._flags = dict(zip(places, inputs[len(places) :], strict=True))

    def __call__(self, name: str, call: int, kind: Kind, slot: str, value: TensorValue) -> TensorValue:
        flag = self._flags.get(Place(name, call, slot))
        if flag is None:
            return value
        if value.device != flag.device:
            flag = flag.to(value.device)
        flag = ops.broadcast_to(ops.reshape(flag, [1] * len(value.shape)), value.shape)
        return ops.where(flag, self._values[Place(name, call, slot)], value)


def build(model: GraphSource, given: Given, told: Told | None) -> Built:
    """Make a graph of a model and compile it.

    Args:
        model: The model.
        given: What it is run on, whose types the graph is for.
        told: What it tells besides what the model gives; None for nothing, as a control.

    Raises:
        UsageError: A second graph cannot be made of the module, or MAX refuses its graph.
        CaptureError: MAX fails at compiling it.
    """
    began = time.perf_counter()
    modules, _ = tree(model.module)
    wanted = told or Told(frozenset())
    names = {id(module): name for name, module in modules.items()} if told else {}
    noted = {*wanted.names, ""}
    places: Mapping[Place, TensorType] = {}
    if wanted.room:
        listing = _Places(wanted.room, given)
        _traced(model, given, modules, Tracing(names, noted, listing), {}, told=told)
        places = listing.found
    tracing = Tracing(names, noted, inputs=wanted.inputs, prints=wanted.prints)
    graph, own_slots, unused = _traced(model, given, modules, tracing, places, told=told)
    session = model.compiled.session
    if session is None:
        devices = list(model.devices) or [ref.to_device() for ref in devices_of(modules, given.types)]
        session = model.compiled.session = InferenceSession(devices=devices)
    try:
        artifact = compiled(session, graph, model.extensions)
    except RuntimeError as error:
        raise CaptureError(
            f"{class_name(model.module)}: MAX failed to compile its graph: {_line(error.__cause__ or error)}",
            hint="With MODULAR_DEBUG=source-tracebacks in the environment MAX says more.",
        ) from error
    return Built(
        session,
        artifact,
        tuple(tracing.events),
        own_slots,
        len(tracing.values),
        places,
        time.perf_counter() - began,
        given.signature,
        told,
        unused,
    )


def _traced(
    model: GraphSource,
    given: Given,
    modules: Mapping[str, Any],
    tracing: Tracing,
    places: Mapping[Place, TensorType],
    *,
    told: Told | None,
) -> tuple[Graph, list[str], frozenset[str]]:
    """A graph of the model, the slots of its own outputs, and the modules whose weights are not in it."""
    flag = TensorType(MaxDType.bool, [], DeviceRef.CPU())
    types = [*given.types, *places.values(), *([flag] * len(places))]
    own = len(given.types)
    with as_before(modules), Graph(type(model.module).__name__, input_types=types) as graph:
        for name, weight in model.module.raw_state_dict().items():
            weight.name = name  # as in its state_dict
        inputs = list(graph.inputs)
        tracing.begin(graph, inputs[:own])
        if places:
            tracing.switch = _Switches(places, inputs[own:])
        args, kwargs = given.put(inputs[:own])
        with (
            watching(tracing.call, map(type, modules.values())),
            probing(tracing) if told else nullcontext(),
            subgraphs(lambda: tracing) if told else nullcontext(),
            _refusals(class_name(model.module)),
        ):
            if model.forward is None:
                result = model.module(*args, **kwargs)
            else:
                result = model.forward(model.module, *args, **kwargs)
            leaves = [leaf for leaf in walk(result, KINDS) if leaf.is_tensor]
            with redirect_stdout(io.StringIO()):  # where it prints a graph that it refuses, which may be long
                graph.output(*(leaf.value for leaf in leaves), *(tracing.values if told else ()))
        unused = frozenset(
            name
            for name, module in modules.items()
            if (weights := own_weights(module).values()) and not any(map(is_in_graph, weights))
        )
    slots = [f"output.{escape(leaf.name)}" if leaf.name else "output" for leaf in leaves]
    return graph, slots, unused


@contextmanager
def _refusals(who: str) -> Iterator[None]:
    """Say in a line why MAX takes no graph."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        if "outside" in text and "region" in text:
            raise UsageError(
                f"{who}: holds values of a graph that was made of it before",
                hint="Make a new module for the capture; what is kept outside of modules cannot be undone.",
            ) from error
        if "failed to verify" in text:
            raise UsageError(f"{who}: MAX takes no such graph: {_line(error)}") from error
        raise


def _line(error: BaseException) -> str:
    """What an error says, in a line."""
    return abbreviate(" ".join(str(error).split()), 300)
