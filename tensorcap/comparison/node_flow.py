"""The data flow between nodes of a graph, as far as pairs have compared values of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from tensorcap.comparison.pair import Pair
from tensorcap.runs import Graph, Node, is_inner, ops_of
from tensorcap_formats.archive import Archive


class NodeFlow:
    """Which nodes of a graph are computed from which, and the pairs of each.

    Args:
        reference: The trusted archive.
        target: The archive under test, with its nodes under the reference's names.
        pairs: Their pairs.

    Attributes:
        graph: The reference's graph, else the target's; None if neither run recorded one.
        is_of_reference: Whether it is the reference's.
    """

    def __init__(self, reference: Archive, target: Archive, pairs: Iterable[Pair]) -> None:
        self.is_of_reference = bool(ops_of(reference))
        archive = reference if self.is_of_reference else target
        self.graph = Graph.of(archive) if ops_of(archive) else None
        self._pairs: dict[str, list[Pair]] = {}
        for pair in pairs:
            record = pair.reference
            if record is not None and is_inner(record.key) and record.key.slot.startswith("output"):
                self._pairs.setdefault(record.key.where, []).append(pair)

    @cached_property
    def nodes(self) -> Mapping[str, Node]:
        """The nodes by their place."""
        return {} if self.graph is None else {node.where: node for node in self.graph.nodes}

    def pairs(self, place: str) -> Sequence[Pair]:
        """The pairs of what a node returned."""
        return self._pairs.get(place, ())

    def inputs(self, place: str) -> Iterator[str]:
        """Yield the nodes whose results a node takes."""
        node = self.nodes.get(place)
        if node is None or self.graph is None:
            return
        for value in node.inputs:
            producer = self.graph.producer(value)
            if producer is not None:
                yield producer.where

    def users(self, place: str) -> Iterator[str]:
        """Yield the nodes that take a result of a node."""
        node = self.nodes.get(place)
        if node is None or self.graph is None:
            return
        for value in node.outputs:
            for user in self.graph.consumers(f"{place}/{value.name}"):
                yield user.where

    def nearest_inputs(self, place: str, has_values: Callable[[str], bool]) -> list[str]:
        """The nearest nodes with values that a node is computed from, through those without."""
        return self._nearest(place, self.inputs, has_values)

    def nearest_users(self, place: str, has_values: Callable[[str], bool], text: str = "") -> list[str]:
        """The nearest nodes with values that are computed from a node, through those without.

        Args:
            place: The node.
            has_values: Whether a node has any.
            text: Key text of one of its outputs, if only what is computed from that one counts.
        """

        def users(other: str) -> Iterator[str]:
            if text and other == place and self.graph is not None:
                return (user.where for user in self.graph.consumers(text))
            return self.users(other)

        return self._nearest(place, users, has_values)

    def _nearest(
        self, place: str, neighbours: Callable[[str], Iterator[str]], has_values: Callable[[str], bool]
    ) -> list[str]:
        nearest: dict[str, None] = {}
        known, waiting = {place}, [place]
        while waiting:
            for neighbour in neighbours(waiting.pop()):
                if neighbour in known:
                    continue
                known.add(neighbour)
                if has_values(neighbour):
                    nearest[neighbour] = None
                else:
                    waiting.append(neighbour)
        return list(nearest)

    def within(self, place: str, steps: int, neighbours: Callable[[str], Iterator[str]]) -> dict[str, int]:
        """Nodes within so many computations of a node, and how many each is away; views count nothing.

        Args:
            place: The node.
            steps: The most computations.
            neighbours: `inputs` or `users`.
        """
        distances = {place: 0}
        waiting = deque([place])
        while waiting:
            here = waiting.popleft()
            for neighbour in neighbours(here):
                distance = distances[here] + (not self.is_view(neighbour))
                if distance <= steps and distance < distances.get(neighbour, steps + 1):
                    distances[neighbour] = distance
                    waiting.append(neighbour)
        del distances[place]
        return distances

    def is_view(self, place: str) -> bool:
        """Whether a node computes nothing: all that it returns shows values of other tensors."""
        node = self.nodes[place]
        return bool(node.outputs) and all(
            value.view is not None or value.parameter is not None for value in node.outputs
        )
