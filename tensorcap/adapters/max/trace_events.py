"""Trace events: the calls in a model in order, and which output of its graph each tensor is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tensorcap.adapters.max.engine import Graph


class EnterModule(NamedTuple):
    """A call of a module begins."""

    name: str


class Leave(NamedTuple):
    """The call, or the probe, that began last ends."""


class EnterProbe(NamedTuple):
    """A probe is passed; the values up to the next `Leave` are its own."""

    name: str
    module: str


class GraphTensor(NamedTuple):
    """A tensor of the call under way: the input, or the tap, of the graph at a position."""

    slot: str
    position: int
    is_input: bool
    dims: tuple[str, ...]


class PlainValue(NamedTuple):
    """A leaf of an argument or a result that is no tensor."""

    slot: str
    value: Any


class SubgraphTensor(NamedTuple):
    """A tensor within a subgraph: its value there, and the label with which it is printed, empty if not."""

    slot: str
    value: Any
    label: str

    @property
    def kind(self) -> str:
        """The first part of the slot: `input`, `output` or `value`."""
        return self.slot.partition(".")[0]


class PrintedTensor(NamedTuple):
    """A tensor that the graph prints with this label."""

    slot: str
    label: str


class LostValue(NamedTuple):
    """A leaf that cannot be recorded; `is_held` if runs of the graph go on writing to it, as to a cache."""

    slot: str
    reason: str
    is_held: bool = False


Leaf = GraphTensor | PlainValue | SubgraphTensor | PrintedTensor | LostValue
Event = EnterModule | EnterProbe | Leave | Leaf


@dataclass(eq=False)
class SubgraphTrace:
    """The trace of a subgraph.

    Attributes:
        graph: The subgraph.
        path: The module that it was traced from: the first that is called in it; None before.
        events: Its trace events, the same for all calls of it.
        outputs: The values that it returns.
        printed: The indices, in the trace of its caller, of what its last call prints.
    """

    graph: Graph
    path: str | None = None
    events: list[Event] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    printed: list[int] = field(default_factory=list)

    def renamer(self, path: str, known: Collection[str]) -> Callable[[str], str]:
        """A function that renames modules in a call of the subgraph for the module at a path."""
        traced = self.path
        if not path or not traced or path not in known:
            return lambda name: name
        return lambda name: (
            path + name[len(traced) :] if name == traced or name.startswith(f"{traced}.") else name
        )

    def outer_tensors(self, kind: str) -> Iterator[tuple[str, int, SubgraphTensor]]:
        """The tensors of the modules that no other module in the subgraph calls.

        Args:
            kind: `input` or `output`.

        Yields:
            The module, the number of its call within the subgraph, and the tensor.
        """
        calls: dict[str, int] = {}
        path: list[str] = []
        for event in self.events:
            if isinstance(event, (EnterModule, EnterProbe)):
                path.append(event.name)
                if isinstance(event, EnterModule) and len(path) == 1:
                    calls[event.name] = calls.get(event.name, -1) + 1
            elif isinstance(event, Leave):
                path.pop()
            elif isinstance(event, SubgraphTensor) and len(path) == 1 and event.kind == kind:
                yield path[0], calls[path[0]], event
