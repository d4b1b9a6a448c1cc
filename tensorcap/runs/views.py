"""Archives made of another one: some of its records, or tensors that it stores only as views."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

import numpy as np

from tensorcap.runs.graph import Graph, Node, Value
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array, bits_of, dtype_of
from tensorcap_formats.errors import TensorNotFoundError, no_such_tensor
from tensorcap_formats.keys import Key
from tensorcap_formats.records import Record
from tensorcap_formats.view import ArchiveView


class PartialArchive(ArchiveView):
    """An archive of some of another one's records.

    Args:
        whole: The other one; the caller closes it.
        records: The records that are kept, in the order of their execution.
    """

    def __init__(self, whole: Archive, records: Iterable[Record]) -> None:
        kept = list(records)
        sources = {record.key.text: (record,) for record in kept}
        super().__init__(whole, kept, sources, root=whole.root, is_direct=whole.is_direct)


class TensorArchive(ArchiveView):
    """An archive of one tensor, whose values were computed from another archive.

    Attributes:
        value: The input or output of an op that the tensor is.
    """

    def __init__(self, archive: Archive, text: str, node: Node, value: Value, values: Array) -> None:
        self.value = value
        self._bits = bits_of(values).reshape(-1)
        record = Record(Key.parse(text), dtype_of(values), values.shape, node.order, "", None, True, 0)
        super().__init__(archive, [record], {})

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        out[:] = self._bits[start : start + out.size]


class ArrayArchive(ArchiveView):
    """An archive of arrays in memory, by key text, in the order of their execution.

    Args:
        archive: What it takes its path, its run's metadata and its values from.
        arrays: The arrays; a dtype of numpy that archives have.
    """

    def __init__(self, archive: Archive, arrays: Mapping[str, Array]) -> None:
        self._arrays = {
            text: bits_of(np.ascontiguousarray(array)).reshape(-1) for text, array in arrays.items()
        }
        records = [
            Record(Key.parse(text), dtype_of(array), array.shape, order, "", None, True, 0)
            for order, (text, array) in enumerate(arrays.items())
        ]
        super().__init__(archive, records, {}, values=archive.values)

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        out[:] = self._arrays[record.key.text][start : start + out.size]


class ViewRecords(ArchiveView):
    """A run with some of the views that its ops returned, which it does not store, as records."""

    def __init__(self, run: Archive, graph: Graph, views: Mapping[str, Record]) -> None:
        """Add the records.

        Args:
            run: The run; the caller closes it.
            graph: Its ops.
            views: The record of each view, by its key text.
        """
        self._graph = graph
        self._views = views
        records = sorted((*run.records, *views.values()), key=lambda record: record.order)
        sources = {record.key.text: (record,) for record in run.records}
        super().__init__(run, records, sources, is_direct=run.is_direct)

    @classmethod
    def of(cls, run: Archive, texts: Iterable[str]) -> Archive:
        """The run itself, if none of the keys is of a view that can be read."""
        graph = Graph.of(run)
        orders = {f"{node.where}/{value.name}": node.order for node in graph.nodes for value in node.outputs}
        views = {}
        for text in texts:
            if text in run or text not in orders:
                continue
            with suppress(TensorNotFoundError):
                source, view = graph.source(graph.output(text))
                dtype, shape = (source.dtype, source.shape) if view is None else (view.dtype, view.shape)
                views[text] = Record(
                    Key.parse(text), dtype, shape, orders[text], "", None, stored=source.stored, row=0
                )
        return cls(run, graph, views) if views else run

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        text = record.key.text
        if text not in self._views:
            super()._read_flat(record, start, out)
            return
        (elements,) = self._computed(text, lambda: [self._graph.elements(self._graph.output(text))])
        out[:] = elements[start : start + out.size]


def find_tensor(archive: Archive, name: str) -> Archive:
    """Find a tensor, stored or described as a view of a stored one.

    Args:
        archive: An open archive.
        name: A key, or a shorter text as `Archive.get` takes it. `…/input.ARGUMENT` of an op is its input,
            also if that was recorded elsewhere.

    Returns:
        An archive to read the tensor from: the archive itself, or one of the view.

    Raises:
        TensorNotFoundError: There is no such tensor, and no such view.
        ReadError: What it is a view of cannot be read.
    """
    try:
        archive.get(name)
    except TensorNotFoundError as error:
        match = _find_value(archive, name)
        if match is None:
            known = [*(record.key.text for record in archive.records), *_list_views(archive)]
            fits_several = error.hint is not None and error.hint.startswith("Name")
            raise error if fits_several else no_such_tensor(str(archive.path), name, known) from None
        graph, node, value = match
        text = name if name.startswith(f"{node.where}/") else f"{node.where}/{value.name}"
        return TensorArchive(archive, text, node, value, graph.read(value))
    return archive


def _find_value(archive: Archive, name: str) -> tuple[Graph, Node, Value] | None:
    """Find the input or output of an op that a key without a record names."""
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


def _list_views(archive: Archive) -> Iterator[str]:
    """Yield the keys of the outputs of ops that are views."""
    try:
        graph = Graph.of(archive)
    except TensorNotFoundError:
        return
    for node in graph.nodes:
        for value in node.outputs:
            if value.view is not None:
                yield f"{node.where}/{value.name}"
