"""The tracer: notes the calls in a model, in order, while MAX traces the model into a graph.

The calls of modules are wrapped on their classes, so that the arguments of a call are noted before the calls
within it, as in frameworks that run a model as it is written. MAX's own hooks run after a call, and its list
of them is shared by everybody. An event holds no tensor: it has the index of an input or output of the graph.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

from tensorcap.adapters.max.engine import (
    BufferValue,
    DeviceRef,
    Dim,
    Graph,
    Layer,
    MaxDType,
    TensorValue,
    Value,
    is_nested,
)
from tensorcap.adapters.max.modules import argument_names
from tensorcap.adapters.max.tensors import logical_dtype
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
    SubgraphTrace,
)
from tensorcap.adapters.protocol import NotCapturableError
from tensorcap.recording import Kind, Kinds, argument_slots, leaf_slot, rebuild, walk

KINDS: Final = Kinds(tensors=(Value,), opaque=(Layer, Graph), texts=(MaxDType, DeviceRef, Dim))
_IN_SUBGRAPH: Final = (
    "within a subgraph, of whose values the graph around it gives out none "
    "(build the model with use_subgraphs=False, or capture with inner=True, --inner)"
)
_PRINTED_OVER: Final = "its subgraph was run again, and only what the last run prints is left"
_IN_BRANCH: Final = "within a branch or a loop of the graph (inner=True, --inner, shows what was run last)"


class Injector(Protocol):
    """Puts another value in the place of one that is traced."""

    def __call__(self, name: str, call: int, kind: Kind, slot: str, value: TensorValue) -> TensorValue:
        """The value that the model goes on with in the place of a value of a call, which was noted."""


class Tracer:
    """Notes the calls of modules while one graph is traced.

    Attributes:
        events: The events, in order.
        values: The values to add to the outputs of the graph, each once.
        graph: The graph; None before `begin`. Values of another graph cannot be added to its outputs.
        injector: Puts other values in the place of those that are traced.
        inputs: Whether arguments are noted, besides those of the model itself.
        prints: Whether the graph prints values that cannot be among its outputs.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        wanted: Collection[str],
        injector: Injector | None = None,
        *,
        inputs: bool = True,
        prints: bool = False,
    ) -> None:
        self.events: list[Event] = []
        self.values: list[TensorValue] = []
        self.graph: Graph | None = None
        self.injector = injector
        self.inputs = inputs
        self.prints = prints
        self._names = names  # of modules, by id
        self._wanted = wanted
        self._subgraphs: dict[int, SubgraphTrace] = {}
        self._labels: dict[Any, str] = {}  # by value
        self._input_positions: dict[Any, int] = {}
        self._output_positions: dict[Any, int] = {}
        self._active: set[int] = set()  # ids of the layers whose calls are under way
        self._calls: dict[str, int] = {}  # how many, by module
        self._path: list[str] = []  # of the modules whose calls are under way
        self._thread = threading.get_ident()

    def begin(self, graph: Graph, inputs: Iterable[Any]) -> None:
        """Begin to trace a graph with these inputs."""
        self.graph = graph
        self._input_positions = {value._mlir_value: i for i, value in enumerate(inputs)}

    @property
    def current(self) -> str | None:
        """The module whose call is under way; None outside of any."""
        return self._path[-1] if self._path else None

    def call(
        self, original: Callable[..., Any], layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Trace a call of a layer, and note it if its module is among the wanted ones."""
        name = self._names.get(id(layer))
        if name is None or id(layer) in self._active or threading.get_ident() != self._thread:
            return original(layer, *args, **kwargs)  # the `__call__` of a base class too: it is one call
        if Graph.current is not self.graph and self._subgraph(Graph.current).path is None:
            self._subgraph(Graph.current).path = name
        if name not in self._wanted:
            return original(layer, *args, **kwargs)
        self._active.add(id(layer))
        self._path.append(name)
        number = self._enter(name)
        try:
            slots = argument_slots(argument_names(type(layer)), len(args), kwargs)
            values = [
                self._note_value(name, number, "input", slot, value)
                for slot, value in zip(slots, [*args, *kwargs.values()], strict=True)
            ]
            kwargs = dict(zip(kwargs, values[len(args) :], strict=True))
            result = original(layer, *values[: len(args)], **kwargs)
            result = self._note_value(name, number, "output", "output", result)
        finally:
            self._path.pop()
            self._active.discard(id(layer))
        self._current_events.append(Leave())
        return result

    def _enter(self, name: str) -> int:
        """Note that a call begins, and return its number if it is no part of a subgraph."""
        self._current_events.append(EnterModule(name))
        number = self._calls.get(name, 0)
        if self._current_events is self.events:
            self._calls[name] = number + 1
        return number

    @property
    def _current_events(self) -> list[Event]:
        """The events of the graph, or the subgraph, that is traced now."""
        return self.events if Graph.current is self.graph else self._subgraph(Graph.current).events

    def _subgraph(self, graph: Graph) -> SubgraphTrace:
        return self._subgraphs.setdefault(id(graph), SubgraphTrace(graph))

    def end_subgraph(self, graph: Graph, outputs: Iterable[Any]) -> None:
        """Note the values that a subgraph, whose trace ends, returns to its callers."""
        self._subgraph(graph).outputs = [getattr(value, "_mlir_value", None) for value in outputs]

    def call_subgraph(
        self, graph: Graph, args: Sequence[Any], prefix: str, run: Callable[[Sequence[Any]], Iterable[Any]]
    ) -> list[Any]:
        """Call a subgraph, and note its calls as far as the graph around it has their values.

        Args:
            graph: The subgraph.
            args: Its arguments.
            prefix: The prefix of the names of its weights in this call, which is the path of a module.
            run: Makes the call with the arguments after injection, and returns its results.

        Returns:
            The results after injection.
        """
        subgraph = self._subgraphs.get(id(graph))
        if subgraph is None:
            return list(run(args))
        rename = subgraph.renamer(prefix.rstrip("."), self._names.values())
        inputs = [value._mlir_value for value in graph.inputs]
        injected_args = self._inject("input", subgraph, rename, inputs, args)
        results = list(run(injected_args))
        injected_results = self._inject("output", subgraph, rename, subgraph.outputs, results)
        natural = dict(zip((*inputs, *subgraph.outputs), (*args, *results), strict=False))
        injected = natural | dict(zip(inputs, injected_args, strict=False))
        self._note_subgraph(subgraph, rename, natural, injected)
        return injected_results

    def _inject(
        self,
        kind: Kind,
        subgraph: SubgraphTrace,
        rename: Callable[[str], str],
        inner: Sequence[Any],
        values: Sequence[Any],
    ) -> list[Any]:
        """The arguments, or the results, of a call of a subgraph after injection.

        Args:
            kind: Which of the two.
            subgraph: The subgraph.
            rename: Renames its modules in this call.
            inner: The values within the subgraph.
            values: The values outside that stand for them.
        """
        injected = list(values)
        if self.injector is not None and self._can_give_out:
            for name, number, leaf in subgraph.outer_tensors(kind):
                site = rename(name)
                index = inner.index(leaf.value) if leaf.value in inner else -1
                if index >= 0 and isinstance(injected[index], TensorValue):
                    call = self._calls.get(site, 0) + number
                    injected[index] = self.injector(site, call, kind, leaf.slot, injected[index])
        return injected

    def _note_subgraph(
        self,
        subgraph: SubgraphTrace,
        rename: Callable[[str], str],
        natural: Mapping[Any, Any],
        injected: Mapping[Any, Any],
    ) -> None:
        """Note one call of a subgraph.

        Args:
            subgraph: The subgraph.
            rename: Renames its modules in this call.
            natural: The values outside that stand for those within, before injection.
            injected: The same after injection, for what lies within the module that is called.
        """
        events, depth = self._current_events, 0
        for index in subgraph.printed:
            earlier = events[index]
            if isinstance(earlier, PrintedTensor):
                events[index] = LostValue(earlier.slot, _PRINTED_OVER)
        subgraph.printed.clear()
        for event in tuple(subgraph.events):
            outside = natural if depth <= 1 else injected
            if isinstance(event, EnterModule):
                self._enter(rename(event.name))
            elif isinstance(event, EnterProbe):
                events.append(EnterProbe(event.name, rename(event.module)))
            elif not isinstance(event, SubgraphTensor):
                events.append(event)
            elif event.value in outside:
                events.append(self._leaf_event(event.slot, outside[event.value]))
            elif event.label:
                subgraph.printed.append(len(events))
                events.append(PrintedTensor(event.slot, event.label))
            else:
                events.append(LostValue(event.slot, _IN_SUBGRAPH))
            depth += isinstance(event, (EnterModule, EnterProbe)) - isinstance(event, Leave)

    @property
    def is_under_way(self) -> bool:
        """Whether a call of the model is being traced in this thread."""
        return bool(self._path) and threading.get_ident() == self._thread

    def probed(self, name: str, value: object, *, is_alone: bool) -> None:
        """Note a value that the model's code names by a probe."""
        self._current_events.append(EnterProbe(name, self.current or ""))
        self.note("value", value)
        self._current_events.append(Leave())

    def note(self, slot: str, value: object) -> None:
        """Note all leaves of a value."""
        for leaf in walk(value, KINDS):
            name = leaf_slot(slot, leaf.name)
            if leaf.is_tensor:
                self._current_events.append(self._leaf_event(name, leaf.value))
            elif leaf.reason:
                self._current_events.append(LostValue(name, leaf.reason))
            else:
                self._current_events.append(PlainValue(name, leaf.value))

    def _note_value(self, name: str, call: int, kind: Kind, slot: str, value: Any) -> Any:
        """Note a value of a call, and return the value after injection."""
        if self.inputs or kind == "output" or not name:
            self.note(slot, value)
        injector = self.injector
        if injector is None or not self._can_give_out:
            return value

        def change(path: str, natural: Any) -> Any:
            if not isinstance(natural, TensorValue):
                return natural
            return injector(name, call, kind, leaf_slot(slot, path), natural)

        return rebuild(value, KINDS, change)

    def _label(self, value: TensorValue) -> str:
        """Have a value printed, and return its label; an empty one if values are not printed."""
        if not self.prints:
            return ""
        key = value._mlir_value
        if key not in self._labels:
            self._labels[key] = f"tensorcap.{len(self._labels)}"
            value.print(self._labels[key])
        return self._labels[key]

    @property
    def _can_give_out(self) -> bool:
        """Whether a value that is traced now can be an output of the graph."""
        return self.graph is not None and Graph.current is self.graph and not is_nested(self.graph)

    def _leaf_event(self, slot: str, value: Any) -> Event:
        """The event of one leaf, which is added to the outputs of the graph if that is possible."""
        if isinstance(value, BufferValue):
            return LostValue(slot, "a buffer that the graph writes to, such as a cache", is_held=True)
        if not isinstance(value, TensorValue):
            return LostValue(slot, f"a {type(value).__name__.lstrip('_')} of the graph")
        try:
            logical_dtype(value.dtype)
        except NotCapturableError as error:
            return LostValue(slot, str(error))
        if Graph.current is not self.graph:
            return SubgraphTensor(slot, value._mlir_value, self._label(value))
        if not self._can_give_out:
            return PrintedTensor(slot, self._label(value)) if self.prints else LostValue(slot, _IN_BRANCH)
        dims = tuple(map(str, value.shape))
        key = value._mlir_value
        if key in self._input_positions:
            return GraphTensor(slot, self._input_positions[key], True, dims)
        index = self._output_positions.setdefault(key, len(self.values))
        if index == len(self.values):
            self.values.append(value)
        return GraphTensor(slot, index, False, dims)
