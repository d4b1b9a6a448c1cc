"""Graphs of a model: as it is, or with all that happens in it given out and room for other values in it."""

from __future__ import annotations

import io
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from typing import Any, NamedTuple

from tensorcap.adapters._max.engine import (
    CPU,
    DeviceRef,
    Graph,
    InferenceSession,
    MaxDType,
    TensorType,
    TensorValue,
    compiled,
    ops,
)
from tensorcap.adapters._max.given import Given
from tensorcap.adapters._max.model import MaxModel
from tensorcap.adapters._max.modules import as_before, is_in_graph, own_weights, tree
from tensorcap.adapters._max.subgraphs import subgraphs
from tensorcap.adapters._max.tracing import KINDS, Event, Tracing, watching
from tensorcap.recording.probing import probing
from tensorcap.recording.structure import class_name, walk
from tensorcap.substitution import Kind
from tensorcap_formats.errors import CaptureError, UsageError, abbreviate
from tensorcap_formats.keys import escape


class Place(NamedTuple):
    """Where a value can be exchanged: a tensor of a call, counted from 0 within one run of the graph."""

    name: str
    call: int
    slot: str


@dataclass(frozen=True)
class Built:
    """A graph of a model, compiled.

    Attributes:
        session: Which compiled it.
        artifact: What it made.
        events: What happens in the model, in order.
        own_slots: Of the model's own outputs, which come first.
        taps: How many further outputs it has; None of a graph that is not to tell of itself.
        switches: Places whose values can be exchanged, with the type of what goes in. The graph has an input
            for each after the model's own, and behind those as many flags.
        room: The kinds of values that have switches.
        seconds: What making it took.
        signature: Of the arguments that it is for.
        prints: Whether it prints what it cannot give out.
        unused: Names of modules with weights of which none is in it.
    """

    session: InferenceSession
    artifact: Any
    events: Sequence[Event]
    own_slots: Sequence[str]
    taps: int | None
    switches: Mapping[Place, TensorType]
    room: frozenset[Kind]
    seconds: float
    signature: tuple[Any, ...]
    unused: frozenset[str]
    prints: bool


class _Places:
    """Lists the places of a graph that is traced to find them."""

    def __init__(self, room: Collection[Kind], given: Given) -> None:
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


def build(
    model: MaxModel, given: Given, *, taps: bool, room: Collection[Kind] = (), prints: bool = False
) -> Built:
    """Make a graph of a model and compile it.

    Args:
        model: The model.
        given: What it is run on, whose types the graph is for.
        taps: Whether it gives out what happens in the model.
        room: Which values can be exchanged.
        prints: Whether it prints what it cannot give out.

    Raises:
        UsageError: A second graph cannot be made of the module, or MAX refuses its graph.
        CaptureError: MAX fails at compiling it.
    """
    began = time.perf_counter()
    modules, _ = tree(model.module)
    names = {id(module): name for name, module in modules.items()} if taps else {}
    places: Mapping[Place, TensorType] = {}
    if room:
        listing = _Places(room, given)
        _traced(model, given, modules, Tracing(names, listing), {}, taps=False)
        places = listing.found
    tracing = Tracing(names, prints=prints)
    graph, own_slots, unused = _traced(model, given, modules, tracing, places, taps=taps)
    session = model.compiled.session
    if session is None:
        session = model.compiled.session = InferenceSession(devices=list(model.devices) or [CPU()])
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
        len(tracing.values) if taps else None,
        places,
        frozenset(room),
        time.perf_counter() - began,
        given.signature,
        unused,
        prints,
    )


def _traced(
    model: MaxModel,
    given: Given,
    modules: Mapping[str, Any],
    tracing: Tracing,
    places: Mapping[Place, TensorType],
    *,
    taps: bool,
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
            probing(tracing) if taps else nullcontext(),
            subgraphs(lambda: tracing) if taps else nullcontext(),
            _refusals(class_name(model.module)),
        ):
            if model.forward is None:
                result = model.module(*args, **kwargs)
            else:
                result = model.forward(model.module, *args, **kwargs)
            leaves = [leaf for leaf in walk(result, KINDS) if leaf.is_tensor]
            graph.output(*(leaf.value for leaf in leaves), *(tracing.values if taps else ()))
        unused = frozenset(
            name
            for name, module in modules.items()
            if (weights := own_weights(module).values()) and not any(map(is_in_graph, weights))
        )
    slots = [f"output.{escape(leaf.name)}" if leaf.name else "output" for leaf in leaves]
    return graph, slots, unused


@contextmanager
def _refusals(who: str) -> Iterator[None]:
    """Say in a line why MAX takes no graph; it prints such a graph, which may be long."""
    try:
        with redirect_stdout(io.StringIO()):
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
