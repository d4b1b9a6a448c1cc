"""What is noted of a model while its graph is made: what happens in it, and where its tensors come out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from tensorcap.adapters.max.engine import Graph


class Enter(NamedTuple):
    """A call of a module begins."""

    name: str


class Leave(NamedTuple):
    """The call that began last returns."""


class Passed(NamedTuple):
    """A probe is passed; what follows with its slots is of it, up to `Leave`."""

    name: str
    module: str


class Tensor(NamedTuple):
    """A tensor of the call that is under way: the input or the output of the graph at `at`."""

    slot: str
    at: int
    is_input: bool
    dims: tuple[str, ...]


class Plain(NamedTuple):
    """A leaf that is no tensor."""

    slot: str
    value: Any


class Inner(NamedTuple):
    """A tensor within a subgraph: the value it has there, and the label by which it is printed, if it is."""

    slot: str
    value: Any
    label: str


class Printed(NamedTuple):
    """A tensor that the graph prints into a file of this label."""

    slot: str
    label: str


class Lost(NamedTuple):
    """A leaf that cannot be had."""

    slot: str
    reason: str


Event = Enter | Leave | Passed | Tensor | Plain | Inner | Printed | Lost


class Body:
    """What happens in a subgraph.

    Attributes:
        graph: The subgraph.
        path: The module that it is made of: the first that is called in it.
        events: What happens, once for all calls of it.
        outputs: The values that it gives.
        printed: Where the notes of its last call have what it prints.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.path: str | None = None
        self.events: list[Event] = []
        self.outputs: list[Any] = []
        self.printed: list[int] = []

    def renaming(self, path: str, known: Collection[str]) -> Callable[[str], str]:
        """How modules are named in a call that stands for the module at a path."""
        traced = self.path
        if not path or not traced or path not in known:
            return lambda name: name
        return lambda name: (
            path + name[len(traced) :] if name == traced or name.startswith(f"{traced}.") else name
        )

    def outer_leaves(self, slot: str) -> Iterator[tuple[str, int, Inner]]:
        """Tensors of the modules that no other in the subgraph calls.

        Args:
            slot: `input` or `output`.

        Returns:
            The module, how many calls of it came before in the subgraph, and the leaf.
        """
        calls: dict[str, int] = {}
        path: list[str] = []
        for event in self.events:
            if isinstance(event, (Enter, Passed)):
                path.append(event.name)
                if isinstance(event, Enter) and len(path) == 1:
                    calls[event.name] = calls.get(event.name, -1) + 1
            elif isinstance(event, Leave):
                path.pop()
            elif isinstance(event, Inner) and len(path) == 1 and event.slot.partition(".")[0] == slot:
                yield path[0], calls[path[0]], event
