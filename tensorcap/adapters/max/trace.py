"""What happens in a model while MAX traces it into a graph, noted in order.

The calls of modules are wrapped on their classes, so that what a call is given is noted before what happens
in it, as in frameworks that run a model as it is written. MAX's own hooks come after a call, and its list of
them is everybody's. A note holds no tensor: it says which input or output of the graph will be one.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from tensorcap.adapters.max.engine import (
    BufferValue,
    DeviceRef,
    Dim,
    Graph,
    Layer,
    MaxDType,
    NoBitsError,
    TensorValue,
    Value,
    is_nested,
    logical,
)
from tensorcap.adapters.max.trace_events import (
    Body,
    Enter,
    Event,
    Inner,
    Leave,
    Lost,
    Passed,
    Plain,
    Printed,
    Tensor,
)
from tensorcap.recording.structure import Kinds, rebuilt, walk
from tensorcap.recording.substitution import Kind
from tensorcap_formats.keys import escape

KINDS: Final = Kinds(tensors=(Value,), opaque=(Layer, Graph), texts=(MaxDType, DeviceRef, Dim))
_IN_SUBGRAPH: Final = (
    "within a subgraph, of whose values the graph around it gives out none "
    "(build the model with use_subgraphs=False, or capture with inner=True, --inner)"
)
_PRINTED_OVER: Final = "its subgraph was run again, and only what the last run prints is left"
_IN_BRANCH: Final = "within a branch or a loop of the graph (inner=True, --inner, shows what was run last)"
_BUFFER: Final = "a buffer that the graph writes to, such as a cache"


class Switcher(Protocol):
    """What puts another value in the place of one that is traced."""

    def __call__(self, name: str, call: int, kind: Kind, slot: str, value: TensorValue) -> TensorValue:
        """What goes on in the place of a value of a call, which was noted."""


class Tracing:
    """Notes what happens while one graph is made.

    Attributes:
        events: What happened, in order.
        values: What the graph has to give out besides its own outputs, each once.
        graph: The graph; values of another are not to be had.
        switch: Puts other values in the place of those that are traced.
        inputs: Whether arguments are noted, besides those of the model itself.
        prints: Whether values that cannot be given out are printed.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        wanted: Collection[str],
        switch: Switcher | None = None,
        *,
        inputs: bool = True,
        prints: bool = False,
    ) -> None:
        self.events: list[Event] = []
        self.values: list[TensorValue] = []
        self.graph: Graph | None = None
        self.switch = switch
        self.inputs = inputs
        self.prints = prints
        self._names = names
        self._wanted = wanted
        self._bodies: dict[int, Body] = {}
        self._labels: dict[Any, str] = {}
        self._given: dict[Any, int] = {}
        self._found: dict[Any, int] = {}
        self._active: set[int] = set()
        self._calls: dict[str, int] = {}
        self._path: list[str] = []
        self._thread = threading.get_ident()

    def begin(self, graph: Graph, inputs: Iterable[Any]) -> None:
        """A graph with these inputs is traced from now on."""
        self.graph = graph
        self._given = {value._mlir_value: i for i, value in enumerate(inputs)}

    @property
    def current(self) -> str | None:
        """The module whose call is under way; None outside of any."""
        return self._path[-1] if self._path else None

    def call(
        self, original: Callable[..., Any], layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Trace a call of a layer, and note it if the layer is one of those that are watched."""
        name = self._names.get(id(layer))
        if name is None or id(layer) in self._active or threading.get_ident() != self._thread:
            return original(layer, *args, **kwargs)  # also what a class has of its base: it is one call
        if Graph.current is not self.graph and self._body(Graph.current).path is None:
            self._body(Graph.current).path = name
        if name not in self._wanted:
            return original(layer, *args, **kwargs)
        self._active.add(id(layer))
        self._path.append(name)
        number = self._enter(name)
        try:
            slots = list(_slots(type(layer), len(args), kwargs))
            given = [
                self._value(name, number, "input", slot, value)
                for slot, value in zip(slots, [*args, *kwargs.values()], strict=True)
            ]
            kwargs = dict(zip(kwargs, given[len(args) :], strict=True))
            result = original(layer, *given[: len(args)], **kwargs)
            result = self._value(name, number, "output", "output", result)
        finally:
            self._path.pop()
            self._active.discard(id(layer))
        self._noted.append(Leave())
        return result

    def _enter(self, name: str) -> int:
        """Note that a call begins; its number, of one that is no part of a subgraph."""
        self._noted.append(Enter(name))
        number = self._calls.get(name, 0)
        if self._noted is self.events:
            self._calls[name] = number + 1
        return number

    @property
    def _noted(self) -> list[Event]:
        """Where it is noted what happens in the graph that is traced now."""
        return self.events if Graph.current is self.graph else self._body(Graph.current).events

    def _body(self, graph: Graph) -> Body:
        return self._bodies.setdefault(id(graph), Body(graph))

    def ended(self, graph: Graph, outputs: Iterable[Any]) -> None:
        """A subgraph is made, and gives these values to those who call it."""
        self._body(graph).outputs = [getattr(value, "_mlir_value", None) for value in outputs]

    def called(
        self, graph: Graph, args: Sequence[Any], prefix: str, run: Callable[[Sequence[Any]], Iterable[Any]]
    ) -> list[Any]:
        """A subgraph is called: note what happens in it, as far as the graph around it shows that.

        Args:
            graph: The subgraph.
            args: What it is given.
            prefix: Of the names of the weights in this call, which is the path of a module.
            run: Makes the call with what goes on in the place of that, and gives its results.

        Returns:
            What goes on in the place of the results.
        """
        body = self._bodies.get(id(graph))
        if body is None:
            return list(run(args))
        rename = body.renaming(prefix.rstrip("."), self._names.values())
        inputs = [value._mlir_value for value in graph.inputs]
        given = self._exchanged("input", body, rename, inputs, args)
        results = list(run(given))
        made = self._exchanged("output", body, rename, body.outputs, results)
        natural = dict(zip((*inputs, *body.outputs), (*args, *results), strict=False))
        handed = natural | dict(zip(inputs, given, strict=False))
        self._note_body(body, rename, natural, handed)
        return made

    def _exchanged(
        self,
        kind: Kind,
        body: Body,
        rename: Callable[[str], str],
        inner: Sequence[Any],
        values: Sequence[Any],
    ) -> list[Any]:
        """What goes on in the place of values that a subgraph is given, or gives."""
        found = list(values)
        if self.switch is not None and self._can_give_out:
            for name, before, leaf in body.outer_leaves(kind):
                site = rename(name)
                at = inner.index(leaf.value) if leaf.value in inner else -1
                if at >= 0 and isinstance(found[at], TensorValue):
                    call = self._calls.get(site, 0) + before
                    found[at] = self.switch(site, call, kind, leaf.slot, found[at])
        return found

    def _note_body(
        self,
        body: Body,
        rename: Callable[[str], str],
        natural: Mapping[Any, Any],
        handed: Mapping[Any, Any],
    ) -> None:
        """Note one call of a subgraph.

        Args:
            body: What happens in it.
            rename: How its modules are named in this call.
            natural: What stands outside for values within, before anything is exchanged.
            handed: The same of what is within the module that is called.
        """
        into, depth = self._noted, 0
        for at in body.printed:
            lost = into[at]
            if isinstance(lost, Printed):
                into[at] = Lost(lost.slot, _PRINTED_OVER)
        body.printed.clear()
        for event in tuple(body.events):
            seen = natural if depth <= 1 else handed
            if isinstance(event, Enter):
                self._enter(rename(event.name))
            elif isinstance(event, Passed):
                into.append(Passed(event.name, rename(event.module)))
            elif not isinstance(event, Inner):
                into.append(event)
            elif event.value in seen:
                into.append(self._leaf(event.slot, seen[event.value]))
            elif event.label:
                body.printed.append(len(into))
                into.append(Printed(event.slot, event.label))
            else:
                into.append(Lost(event.slot, _IN_SUBGRAPH))
            depth += isinstance(event, (Enter, Passed)) - isinstance(event, Leave)

    @property
    def is_under_way(self) -> bool:
        """Whether a call of the model is being traced in this thread."""
        return bool(self._path) and threading.get_ident() == self._thread

    def probed(self, name: str, value: object, *, is_alone: bool) -> None:
        """Note a value that code of the model has given a name."""
        self._noted.append(Passed(name, self.current or ""))
        self.note("value", value)
        self._noted.append(Leave())

    def note(self, slot: str, value: object) -> None:
        """Note all leaves of a value."""
        for leaf in walk(value, KINDS):
            name = f"{slot}.{escape(leaf.name)}" if leaf.name else slot
            if leaf.is_tensor:
                self._noted.append(self._leaf(name, leaf.value))
            elif leaf.reason:
                self._noted.append(Lost(name, leaf.reason))
            else:
                self._noted.append(Plain(name, leaf.value))

    def _value(self, name: str, call: int, kind: Kind, slot: str, value: Any) -> Any:
        """Note a value of a call, and say what goes on in its place."""
        if self.inputs or kind == "output" or not name:
            self.note(slot, value)
        switch = self.switch
        if switch is None or not self._can_give_out:
            return value

        def change(path: str, natural: Any) -> Any:
            if not isinstance(natural, TensorValue):
                return natural
            return switch(name, call, kind, f"{slot}.{escape(path)}" if path else slot, natural)

        return rebuilt(value, KINDS, change)

    def _label(self, value: TensorValue) -> str:
        """The label by which a value is printed from now on; none if values are not."""
        if not self.prints:
            return ""
        key = value._mlir_value
        if key not in self._labels:
            self._labels[key] = f"tensorcap.{len(self._labels)}"
            value.print(self._labels[key])
        return self._labels[key]

    @property
    def _can_give_out(self) -> bool:
        return self.graph is not None and Graph.current is self.graph and not is_nested(self.graph)

    def _leaf(self, slot: str, value: Any) -> Event:
        if isinstance(value, BufferValue):
            return Lost(slot, _BUFFER)
        if not isinstance(value, TensorValue):
            return Lost(slot, f"a {type(value).__name__.lstrip('_')} of the graph")
        try:
            logical(value.dtype)
        except NoBitsError as error:
            return Lost(slot, str(error))
        if Graph.current is not self.graph:
            return Inner(slot, value._mlir_value, self._label(value))
        if not self._can_give_out:
            return Printed(slot, self._label(value)) if self.prints else Lost(slot, _IN_BRANCH)
        dims = tuple(map(str, value.shape))
        key = value._mlir_value
        if key in self._given:
            return Tensor(slot, self._given[key], True, dims)
        index = self._found.setdefault(key, len(self.values))
        if index == len(self.values):
            self.values.append(value)
        return Tensor(slot, index, False, dims)


def argument_names(cls: Any) -> tuple[str, ...]:
    """Names of the positional parameters of a layer's call; none where they cannot be told."""
    try:
        parameters = list(inspect.signature(cls.__call__).parameters.values())[1:]
    except (TypeError, ValueError):
        return ()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in positional)


def _slots(cls: type, positional: int, kwargs: Iterable[str]) -> Iterator[str]:
    """The slot of each argument of a call."""
    names = argument_names(cls)
    for i in range(positional):
        yield f"input.{escape(names[i])}" if i < len(names) else f"input.args.{i - len(names)}"
    for name in kwargs:
        yield f"input.{escape(name)}"
