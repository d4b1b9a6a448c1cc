"""What is computed of what: the neighbourhood of an op or a module, from the recorded data flow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from sys import intern
from typing import Final, NamedTuple

from tensorcap.runs import Graph, is_result
from tensorcap.viewer.rows import Row, abbreviated, shortened
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import ReadError, TensorNotFoundError
from tensorcap_formats.keys import unescape
from tensorcap_formats.records import Record

_HOPS: Final = 2  # on each side
_IN_A_LINE: Final = 4  # boxes
_WIDTH, _HEIGHT, _GAP = 110, 28, 13  # of a box, and between lines
_BESIDE: Final = 8  # between boxes of a line
_CHARACTERS: Final = 20  # of a module's path in a box
_SEVERITY: Final = ("red", "yellow", "green", "grey")


class Operation(NamedTuple):
    """What is kept of an op, of which there may be tens of thousands.

    Attributes:
        name: Its name.
        file: The file of the line that ran it; None if unknown.
        line: Its number.
    """

    name: str
    file: str | None
    line: int | None


@dataclass(frozen=True, slots=True)
class Box:
    """A call of a module or a run of an op in the picture.

    Attributes:
        label: Its name without its module, shortened.
        title: All that is known of it, for the pointer.
        module: Its module's path, abbreviated.
        colour: The worst colour of its results.
        row: The number of a row of it; None without one.
        x: Left edge.
        y: Upper edge.
        is_centre: Whether it is what the picture is of.
    """

    label: str
    title: str
    module: str
    colour: str
    row: int | None
    x: float
    y: float
    is_centre: bool


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """A picture of what a place takes and what takes its results.

    Attributes:
        boxes: Places.
        lines: From the middle of the lower edge of one box to that of the upper edge of another.
        width: Of the picture.
        height: Of the picture.
        more: How many places are left out.
    """

    boxes: tuple[Box, ...]
    lines: tuple[tuple[float, float, float, float], ...]
    width: int
    height: int
    more: int


@dataclass
class Flow:
    """Places of a run, and the edges between them.

    A place is a run of an op or a call of a module: the text of a key up to its slot. An op's edges are
    recorded with it. Modules have an edge where the input of one has the bytes of the result of one before
    it that is not around it.

    Attributes:
        nodes: Ops by place.
        places: The place of each row, by number: of a module's result the op that made it.
        rows: The rows of each place.
        inputs: What a place takes.
        outputs: What takes of a place.
        digests: Of each row's record, by number; None without one.
        carried: The digests of what a module takes of another, by both places.
    """

    nodes: Mapping[str, Operation] = field(default_factory=dict)
    places: Mapping[int, str] = field(default_factory=dict)
    rows: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    inputs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    outputs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    digests: Mapping[int, str | None] = field(default_factory=dict)
    carried: Mapping[tuple[str, str], set[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, archive: Archive | None, rows: Iterable[tuple[Row, Record]]) -> Flow:
        """Read the flow of an archive, and where its rows are, each with its record there."""
        by_place: dict[str, list[Row]] = {}
        places: dict[int, str] = {}
        digests: dict[int, str | None] = {}
        for row, record in rows:
            if not record.key.is_bare:
                places[row.number] = record.key.where
                digests[row.number] = record.digest
                by_place.setdefault(places[row.number], []).append(row)
        edges: dict[str, dict[str, None]] = {}
        nodes: dict[str, Operation] = {}
        carried: dict[tuple[str, str], set[str]] = {}
        if archive is not None:
            try:
                graph = Graph.of(archive)
            except (TensorNotFoundError, ReadError):  # none is recorded, or what is recorded is damaged
                pass
            else:
                for node in graph.nodes:
                    file = node.file and intern(node.file)
                    nodes[node.where] = Operation(intern(node.op), file, node.line)
                    for value in node.inputs:
                        producer = graph.producer(value)
                        if producer is not None:
                            edges.setdefault(node.where, {})[producer.where] = None
            carried = _add_module_edges(archive, nodes, edges)
        outputs: dict[str, list[str]] = {}
        for place, sources in edges.items():
            for source in sources:
                outputs.setdefault(source, []).append(place)
        inputs = {place: tuple(sources) for place, sources in edges.items()}
        made_by = {
            digest: place
            for place, of_place in by_place.items()
            for row in of_place
            if place in nodes and (digest := digests[row.number]) and _is_output(row)
        }
        for number, place in places.items():  # of a module the op that made its result
            if place not in nodes:
                places[number] = made_by.get(digests[number] or "", place)
        takers = {place: tuple(to) for place, to in outputs.items()}
        return cls(nodes, places, by_place, inputs, takers, digests, carried)

    def node(self, row: Row) -> Operation | None:
        """The op of a row, or the one that made its module's result; None without one."""
        return self.nodes.get(self.places.get(row.number, ""))

    def around(self, row: Row) -> Neighbourhood | None:
        """Draw what a row's place takes, above it, and what takes its results, below; None without any.

        Of a module next to it are drawn only those that take the row itself, if that is a result, or that
        made it, if it is an input.
        """
        centre = self.places.get(row.number)
        if centre is None:
            return None
        levels, more = {0: [centre]}, 0
        for edges, direction in ((self.inputs, -1), (self.outputs, 1)):
            known = {centre}
            for hop in range(1, _HOPS + 1):
                before = levels.get((hop - 1) * direction, [])
                nearest = dict.fromkeys(
                    other
                    for place in before
                    for other in self._nearest(place, edges)
                    if self._has_part(row, *((other, place) if direction > 0 else (place, other)))
                )
                beside = [place for place in nearest if place not in known]
                known.update(beside)
                if beside:
                    levels[hop * direction] = beside[:_IN_A_LINE]
                    more += max(0, len(beside) - _IN_A_LINE)
        if len(levels) == 1:
            return None
        return self._draw(row, levels, more)

    def _has_part(self, row: Row, taker: str, source: str) -> bool:
        """Whether an edge of a row's place is of the row, or of what that is made of or makes."""
        carried = self.carried.get((taker, source))
        own_side = source if _is_output(row) else taker
        return not carried or self.places[row.number] != own_side or self.digests[row.number] in carried

    def _nearest(self, place: str, edges: Mapping[str, Sequence[str]]) -> list[str]:
        """The places next to one that have rows: a view, which has none, is passed."""
        nearest, waiting, known = [], list(edges.get(place, ())), {place}
        while waiting:
            other = waiting.pop(0)
            if other in known:
                continue
            known.add(other)
            if other in self.rows:
                nearest.append(other)
            else:
                waiting += edges.get(other, ())
        return nearest

    def _draw(self, row: Row, levels: Mapping[int, Sequence[str]], more: int) -> Neighbourhood:
        widest = max(map(len, levels.values()))
        width = widest * (_WIDTH + _BESIDE) + 4
        places: dict[str, tuple[float, float, int]] = {}
        for line, level in enumerate(sorted(levels)):
            inside = levels[level]
            left = (width - len(inside) * (_WIDTH + _BESIDE) + _BESIDE) / 2
            for at, place in enumerate(inside):
                places.setdefault(
                    place, (left + at * (_WIDTH + _BESIDE), 4.0 + line * (_HEIGHT + _GAP), level)
                )
        boxes = tuple(self._box(place, x, y, level == 0) for place, (x, y, level) in places.items())
        lines = []
        for place, (x, y, level) in places.items():
            for source in self._nearest(place, self.inputs):
                if source in places and places[source][2] < level and self._has_part(row, place, source):
                    sx, sy, _ = places[source]
                    lines.append((sx + _WIDTH / 2, sy + _HEIGHT, x + _WIDTH / 2, y))
        return Neighbourhood(boxes, tuple(lines), width, len(levels) * (_HEIGHT + _GAP) - _GAP + 8, more)

    def _box(self, place: str, x: float, y: float, is_centre: bool) -> Box:
        rows = self.rows.get(place, ())
        results = [row for row in rows if _is_output(row)] or list(rows)
        colour = min((row.colour for row in results), key=_SEVERITY.index, default="grey")
        node = self.nodes.get(place)
        site = place.partition("/")[2].partition("@")[0]
        module, _, point = site.partition(":")
        parts = unescape(module).split(".")
        if node is not None:
            label, below = node.name.removeprefix("aten."), parts
        else:
            own = 2 if parts[-1].isdigit() else 1  # a number says nothing without its list
            label, below = unescape(point) or ".".join(parts[-own:]), parts[:-own]
        line = f", {node.file}:{node.line}" if node is not None and node.file else ""
        row = results[0].number if results else None
        title = f"{shortened(place)}{line}"
        (path,) = abbreviated(shortened(".".join(below)), width=_CHARACTERS)
        return Box(shortened(label, 16), title, _end(path), colour, row, x, y, is_centre)


def _is_output(row: Row) -> bool:
    """Whether a row is a result of its place: a module, or an op in one."""
    return row.record.key.slot.partition(".")[0] == "output"


def _end(text: str, limit: int = _CHARACTERS + 2) -> str:
    return text if len(text) <= limit else f"…{text[1 - limit :]}"


def _add_module_edges(
    archive: Archive, nodes: Mapping[str, Operation], edges: dict[str, dict[str, None]]
) -> dict[tuple[str, str], set[str]]:
    """Add what modules take of others, a tensor with the bytes of a result before it.

    Returns:
        The digests of these tensors, by the place that takes them and the one that made them.
    """
    carried: dict[tuple[str, str], set[str]] = {}
    results: dict[str, list[tuple[int, str]]] = {}
    for record in archive.records:
        key = record.key
        if key.is_bare or not record.digest or key.where in nodes or ":" in key.site or not record.size:
            continue
        if key.slot.startswith("input"):
            for order, place in reversed(results.get(record.digest, ())):
                if order < record.order and not _is_around(key.where, place):
                    edges.setdefault(key.where, {})[place] = None
                    carried.setdefault((key.where, place), set()).add(record.digest)
                    break
        elif is_result(key):
            known = results.setdefault(record.digest, [])
            # A module that hands on what its last child returned is no source of its own.
            if not (known and _is_around(known[-1][1], key.where)):
                known.append((record.order, key.where))
    return carried


def _is_around(inner: str, outer: str) -> bool:
    """Whether a place lies within another one's module."""
    return inner.partition("@")[0].startswith(f"{outer.partition('@')[0]}.") or outer.endswith("/@root")
