"""The operations that a model ran, and what of their values does not change with layout."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from tensorcap.alignment.match import statistics_distance
from tensorcap.runs import Graph, Node, Value, ops_of
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import DTYPES, Array
from tensorcap_formats.errors import ReadError, TensorNotFoundError
from tensorcap_formats.float_formats import UNIT_ROUNDOFFS
from tensorcap_formats.keys import ROOT_SITE, Key
from tensorcap_formats.records import Record
from tensorcap_formats.statistics import Statistics, StatisticsBuilder

_MOST_ELEMENTS: Final = 1 << 24  # of a value that is read; a larger one counts as held
_MASKED: Final = -1e4  # and lower: masked scores, beside which no other one shows in sums of squares
_SAME: Final = 1e-9  # relative distance of statistics of the same elements in another order
_COARSEST: Final = UNIT_ROUNDOFFS["bfloat16"]  # that is allowed for: formats of fewer bits only store


class TracedValue(NamedTuple):
    """What is known of a value of an operation: statistics that no layout changes.

    Attributes:
        size: Number of elements; of complex ones, of their parts.
        statistics: Of the elements; masked scores count as minus infinity.
    """

    size: int
    statistics: Statistics

    @classmethod
    def of(cls, values: Array) -> TracedValue:
        """Measure an array."""
        parts = np.stack([values.real, values.imag]) if np.iscomplexobj(values) else values
        flat = parts.astype(np.float64).ravel()
        flat[flat <= _MASKED] = -np.inf
        builder = StatisticsBuilder(DTYPES["float64"])
        builder.add(flat)
        return cls(flat.size, builder.result())

    def distance(self, other: TracedValue) -> float:
        """A lower bound of the relative distance of the elements, no unit; infinite of unlike sizes."""
        if self.size != other.size:
            return math.inf
        return statistics_distance(self.statistics, other.statistics, self.size)

    def has_elements_of(self, other: TracedValue) -> bool:
        """Whether it has the elements of another value, in any order, or each of them as often repeated."""
        one, two = self._per_element, other._per_element
        peak = max(map(abs, (*one, *two)))
        return all(abs(a - b) <= _SAME * peak for a, b in zip(one, two, strict=True))

    @property
    def _per_element(self) -> tuple[float, ...]:
        """Statistics that do not change with the number of elements, in any unit of these."""
        known = self.statistics
        ends = known.minimum or 0.0, known.maximum or 0.0, known.mean or 0.0
        peak = max(map(abs, ends))
        shares = (peak * count / self.size for count in (known.nan, known.posinf, known.neginf))
        return (*map(float, ends), (known.l2 or 0.0) / math.sqrt(self.size), *shares)


class HeldValues:
    """Values that a side has.

    Args:
        values: All of them; None for one that is not known.
        tolerance: Relative distance of values that are equal.
    """

    def __init__(self, values: Iterable[TracedValue | None], tolerance: float) -> None:
        self._tolerance = tolerance
        self._by_size: dict[int, list[TracedValue]] = {}
        for value in values:
            if value is not None:
                self._by_size.setdefault(value.size, []).append(value)
        for alike in self._by_size.values():
            alike.sort(key=_l2)

    def __contains__(self, value: object) -> bool:
        """Whether the side has a value; one that is not known counts as held."""
        if not isinstance(value, TracedValue):
            return True
        alike, l2 = self._by_size.get(value.size, []), _l2(value)
        slack = 2 * self._tolerance * l2
        for other in alike[bisect_left(alike, l2 - slack, key=_l2) :]:
            if _l2(other) > l2 + slack:
                return False
            if value.distance(other) <= self._tolerance:
                return True
        return False


def _l2(value: TracedValue) -> float:
    return value.statistics.l2 or 0.0


class OperationTrace:
    """The operations of a run, and what is known of their values; each is measured once."""

    def __init__(self, archive: Archive) -> None:
        self.graph = Graph.of(archive) if ops_of(archive) else Graph(archive, (), {}, {}, {})
        self._archive = archive
        self._known: dict[object, TracedValue | None] = {}
        names = {record.dtype.name for record in archive.records if record.dtype.is_inexact}
        self.unit = min(_COARSEST, max((UNIT_ROUNDOFFS.get(name, 0.0) for name in names), default=0.0))

    def calls(self, step: int, site: str) -> TracedCalls:
        """The operations of a step that a module ran, or one within it."""
        nodes = [
            node
            for node in self.graph.nodes
            if Key.parse(f"{node.where}/op").step == step
            and (site == ROOT_SITE or f"{node.module}.".startswith(f"{site}."))
        ]
        results = [
            self.measure(record.key.text)
            for record in self._archive.records
            if record.key.step == step and record.key.site == site and record.key.slot.startswith("output")
        ]
        return TracedCalls(self, nodes, results)

    def outputs(self, node: Node) -> list[TracedValue | None]:
        """What an operation returned."""
        return [self.measure(f"{node.where}/{value.name}") for value in node.outputs]

    def input(self, value: Value) -> TracedValue | None:
        """What it was given; None for a number, and for a parameter that is not recorded."""
        return None if value.number is not None else self.measure(value)

    def measure(self, value: Value | str) -> TracedValue | None:
        """Measure a value, or a record by its key text; None if it is not known, or too large."""
        known = value if isinstance(value, str) else (value.key, value.parameter, value.writes, value.view)
        if known not in self._known:
            try:
                self._known[known] = self._measure(value)
            except (ReadError, TensorNotFoundError):
                self._known[known] = None
        return self._known[known]

    def _measure(self, value: Value | str) -> TracedValue | None:
        if isinstance(value, str) and value in self._archive:
            record, view = self._archive.get(value), None
        else:
            record, view = self.graph.source(self.graph.output(value) if isinstance(value, str) else value)
        size = math.prod(record.shape if view is None else view.shape)
        if not 0 < size <= _MOST_ELEMENTS:
            return None
        if view is None and record.statistics is not None and _is_plain(record, record.statistics):
            return TracedValue(size, record.statistics)
        return TracedValue.of(self.graph.read(value))


def _is_plain(record: Record, statistics: Statistics) -> bool:
    """Whether the statistics of a record are those of its elements as they are measured here."""
    is_masked = statistics.minimum is not None and statistics.minimum <= _MASKED
    return record.dtype.kind != "complex" and not is_masked


class TracedCalls:
    """The operations of calls of one module, and of modules within it, in execution order.

    Args:
        trace: The run.
        nodes: The operations.
        results: What the module returned.
    """

    def __init__(
        self, trace: OperationTrace, nodes: Sequence[Node], results: Sequence[TracedValue | None]
    ) -> None:
        self.nodes = nodes
        self.results = results
        self._trace = trace

    def made(self) -> Iterator[TracedValue | None]:
        """What they returned."""
        for node in self.nodes:
            yield from self._trace.outputs(node)

    def given(self, nodes: Sequence[Node]) -> Iterator[TracedValue | None]:
        """What some of them were given that none of these made."""
        places = {node.where for node in nodes}
        for node in nodes:
            for value in node.inputs:
                producer = self._trace.graph.producer(value)
                if producer is None or producer.where not in places:
                    yield self._trace.input(value)

    def alone(self, held: HeldValues) -> list[Node]:
        """Those whose results the other side does not hold, nor what is made of them in the end."""
        alone: dict[str, Node] = {}
        known = {node.where for node in self.nodes}
        for node in reversed(self.nodes):
            if not any(value.number is None for value in node.inputs):
                continue  # a constant
            if all(value in held for value in self._trace.outputs(node)):
                continue
            texts = [f"{node.where}/{value.name}" for value in node.outputs]
            users = {user.where for text in texts for user in self._trace.graph.consumers(text)} & known
            is_end = not users and (not self._only_moves(node) or self._makes(node, self.results))
            if is_end or users & alone.keys():
                alone[node.where] = node
        return list(reversed(alone.values()))

    def from_values(
        self, nodes: Sequence[Node], values: HeldValues, ends: Sequence[TracedValue | None] = ()
    ) -> list[Node]:
        """Those of some that take one of these values, and what is made of them, up to some values.

        What only moves elements, or repeats them, is left out.
        """
        reached: dict[str, Node] = {}
        passed: set[str] = set()
        for node in nodes:
            inputs = [value for value in node.inputs if value.number is None]
            producers = {maker.where for value in inputs if (maker := self._trace.graph.producer(value))}
            known = [self._trace.input(value) for value in inputs]
            if producers & passed or any(one is not None and one in values for one in known):
                reached[node.where] = node
                if not self._makes(node, ends):
                    passed.add(node.where)
        return self.without_moves(reached.values())

    def without_moves(self, nodes: Iterable[Node]) -> list[Node]:
        """Those of some that do more than to move elements, or to repeat them."""
        return [node for node in nodes if not self._only_moves(node)]

    def _makes(self, node: Node, values: Sequence[TracedValue | None]) -> bool:
        """Whether an operation makes one of some values."""
        known = [value for value in values if value is not None]
        made = [value for value in self._trace.outputs(node) if value is not None]
        return any(one.distance(other) <= _SAME for one in made for other in known)

    def _only_moves(self, node: Node) -> bool:
        """Whether an operation returns the elements that it was given, in another order or repeated."""
        given = [known for value in node.inputs if (known := self._trace.input(value)) is not None]
        made = [known for known in self._trace.outputs(node) if known is not None]
        return bool(made) and all(any(one.has_elements_of(other) for other in given) for one in made)
