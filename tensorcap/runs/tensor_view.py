"""A tensor that an archive does not store, a view of another one, as an archive of that one tensor."""

from __future__ import annotations

from collections.abc import Iterator

from tensorcap.runs.graph import Graph, Node, Value
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array, bits_of, dtype_of
from tensorcap_formats.errors import TensorNotFoundError, no_such_tensor
from tensorcap_formats.keys import Key
from tensorcap_formats.records import Record
from tensorcap_formats.view import ArchiveView


class Viewed(ArchiveView):
    """An archive of one tensor, which was read out of another archive.

    Attributes:
        value: What an op gave or was given.
    """

    def __init__(self, archive: Archive, text: str, node: Node, value: Value, values: Array) -> None:
        self.value = value
        self._bits = bits_of(values).reshape(-1)
        record = Record(Key.parse(text), dtype_of(values), values.shape, node.order, "", None, True, 0)
        super().__init__(archive, [record], {})

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        out[:] = self._bits[start : start + out.size]


def find(archive: Archive, name: str) -> Archive:
    """The archive that has a tensor: the archive itself, or one of a view that it describes.

    Args:
        archive: An open archive.
        name: A key, or a shorter text as `Archive.get` takes it. Of an op, `…/input.ARGUMENT` is what it
            was given, also where that was recorded elsewhere.

    Raises:
        TensorNotFoundError: There is no such tensor, and no such view.
        ReadError: What it is a view of cannot be read.
    """
    try:
        archive.get(name)
    except TensorNotFoundError as error:
        found = _value(archive, name)
        if found is None:
            known = [*(record.key.text for record in archive.records), *_views(archive)]
            fits_several = error.hint is not None and error.hint.startswith("Name")
            raise error if fits_several else no_such_tensor(str(archive.path), name, known) from None
        graph, node, value = found
        text = name if name.startswith(f"{node.where}/") else f"{node.where}/{value.name}"
        return Viewed(archive, text, node, value, graph.read(value))
    return archive


def _value(archive: Archive, name: str) -> tuple[Graph, Node, Value] | None:
    """What a key that no record has means to the graph."""
    try:
        graph = Graph.of(archive)
        node = graph.node(name)
    except TensorNotFoundError:
        return None
    slot = name.removeprefix(node.where).removeprefix("/")
    for value in node.outputs:
        if slot in ("", value.name):
            return graph, node, value
    for value in node.inputs:
        if slot == f"input.{value.name}":
            return graph, node, value
    return None


def _views(archive: Archive) -> Iterator[str]:
    """Keys of views that ops gave."""
    try:
        graph = Graph.of(archive)
    except TensorNotFoundError:
        return
    for node in graph.nodes:
        for value in node.outputs:
            if value.view is not None:
                yield f"{node.where}/{value.name}"
