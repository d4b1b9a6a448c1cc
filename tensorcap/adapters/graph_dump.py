"""Writes a captured graph as a folder of intermediates: the value of every node, of views too."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from tensorcap.runs import Graph, GraphEnds, Node, Value
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import TensorNotFoundError, UsageError, no_such_tensor
from tensorcap_formats.foreign import Kind, NodeValue, can_hold, refuse_intermediates, write_intermediates
from tensorcap_formats.keys import ROOT_SITE, Key, escape, matches, module_site, unescape
from tensorcap_formats.output_path import refuse_overlap
from tensorcap_formats.progress import Progress

_RECAPTURE: Final = "Capture the model with: tcap capture torch MODEL --coreai -o ARCHIVE"
_NO_WEIGHTS: Final = "weights, or views of them: the capture did not record parameters (--params)"
_NO_VALUES: Final = "only their statistics were kept"
_NOT_RECORDED: Final = "not recorded"


@dataclass(slots=True)
class GraphDump:
    """What a folder of intermediates has been given.

    Attributes:
        folder: The folder.
        values: How many.
        nbytes: Their bytes.
        left_out: How many have none there, by reason.
    """

    folder: Path
    values: int = 0
    nbytes: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


def export_graph(
    archive: Archive,
    folder: str | os.PathLike[str],
    *,
    only: Iterable[str] = (),
    exclude: Iterable[str] = (),
    progress: Progress | None = None,
) -> GraphDump:
    """Write an archive of level export as a folder `NAME.aimodelintermediates`; all of it, or nothing.

    The folder has the value of every node, also of those that the archive has as a view of another one. A
    result of several tensors has an entry for each, the first under the node's name; `getitem` nodes have
    theirs too.

    Args:
        archive: Open archive.
        folder: The folder to write, which is not there yet.
        only: Globs; a key must match one of them, if there are any.
        exclude: Globs; a key must match none of them.
        progress: Called with the bytes written so far, and with their final number.

    Raises:
        UsageError: The archive holds no exported graph, or parts of tensors, or nothing is selected; or the
            folder has another suffix.
        ReadError: The archive cannot be read, or fails a checksum.
        WriteError: The folder is there already, or the disk is full.
    """
    folder = Path(folder)
    refuse_intermediates(folder)
    refuse_overlap(archive.path, folder)
    _require_graph(archive)
    dump = GraphDump(folder)
    values = _selected(archive, list(_GraphValues(archive, dump.left_out)), list(only), list(exclude))
    dump.values = len(values)
    total = sum(value.nbytes for value in values)

    def written(nbytes: int) -> None:
        dump.nbytes += nbytes
        if progress:
            progress.advance(dump.nbytes, total)

    write_intermediates(folder, values, mappings=archive.info.mappings, written=written)
    return dump


def _require_graph(archive: Archive) -> None:
    scope = archive.info.scope
    if scope is None or scope.level != "export":
        raise UsageError(
            f"{archive.path}: holds no nodes of an exported graph, expected a capture at level export",
            hint=_RECAPTURE,
        )
    if scope.slices:
        raise UsageError(
            f"{archive.path}: holds parts of tensors ({', '.join(scope.slices)}), expected whole ones",
            hint="Capture without --slice.",
        )
    if archive.records and not any(record.stored for record in archive.records):
        raise UsageError(f"{archive.path}: only statistics were kept, expected values")


def _selected(
    archive: Archive, values: list[NodeValue], only: list[str], exclude: list[str]
) -> list[NodeValue]:
    for pattern in only:
        if not any(_matches(value, pattern) for value in values):
            raise no_such_tensor(
                str(archive.path), pattern, [value.keys[0] for value in values if value.keys]
            )
    selected = [
        value
        for value in values
        if (not only or any(_matches(value, pattern) for pattern in only))
        and not any(_matches(value, pattern) for pattern in exclude)
    ]
    if not selected:
        raise UsageError(f"{archive.path}: no value of a node is selected")
    return selected


def _matches(value: NodeValue, pattern: str) -> bool:
    return any(matches(key, pattern) for key in value.keys)


class _GraphValues:
    """The values of a graph as a folder has them: weights, inputs, then nodes in the order of execution."""

    def __init__(self, archive: Archive, left_out: Counter[str]) -> None:
        """Read the graph.

        Args:
            archive: Open archive of level export.
            left_out: Counts what has no value there, by reason.
        """
        self._archive = archive
        self._left_out = left_out
        self._graph = Graph.of(archive)
        self._ends = GraphEnds.of(archive)
        self._nodes = {name: node for node in self._graph.nodes if (name := _name(node))}
        self._names = {*self._nodes, *(value.name for value in self._ends.inputs)}
        self._keys: set[str] = set()

    def __iter__(self) -> Iterator[NodeValue]:
        for weight in self._ends.weights:
            yield from self._weight(weight)
        for value in self._ends.inputs:
            kinds: tuple[Kind, ...] = (
                ("inputs", "outputs") if value.name in self._ends.outputs else ("inputs",)
            )
            yield from self._value(value, kinds, (value.name, value.name), "placeholder", value.name)
        for name, node in self._nodes.items():
            kind: Kind = "outputs" if name in self._ends.outputs else "intermediates"
            for value in node.outputs:
                slot, _, position = value.name.partition(".")
                if value.number is not None:
                    continue
                if slot != "output":
                    self._left_out["what an operator wrote to in place"] += 1
                    continue
                own = name if position in ("", "0") else f"{name}.{position}"
                key = f"{node.where}/{value.name}"
                yield from self._value(value, (kind,), (own, name), "call_function", node.op, key)

    def _weight(self, weight: Value) -> Iterator[NodeValue]:
        """A parameter, a buffer or a constant, under the name that Apple's own graph has for it."""
        module, _, own = weight.name.rpartition(".")
        name = free = weight.name.replace(".", "_")
        number = 0
        while free in self._names:
            number += 1
            free = f"{name}_{number}"
        self._names.add(free)
        keys = [Key(module_site(module), f"{kind}.{escape(own)}").text for kind in ("param", "buffer")]
        key = next((key for key in keys if key in self._archive), "")
        kinds: tuple[Kind, ...] = ("intermediates",)
        yield from self._value(weight, kinds, (free, free), "get_attr", weight.name, key)

    def _value(
        self,
        value: Value,
        kinds: tuple[Kind, ...],
        names: tuple[str, str],
        op: str,
        target: str,
        key: str = "",
    ) -> Iterator[NodeValue]:
        """One value, unless it is nowhere in the archive or of a dtype without a place in the folder.

        Args:
            value: Where it is.
            kinds: As in `NodeValue`.
            names: Of the value, and of its node.
            op: As in `NodeValue`.
            target: As in `NodeValue`.
            key: Its own key; that of its record if it is "".
        """
        try:
            record, view = self._graph.source(value)
        except TensorNotFoundError:
            is_weight = value.parameter is not None and not value.writes
            self._left_out[_NO_WEIGHTS if is_weight else value.note or _NOT_RECORDED] += 1
            return
        dtype = record.dtype if view is None else view.dtype
        shape = record.shape if view is None else view.shape
        if not record.stored or not can_hold(dtype):
            reason = f"of dtype {dtype.name}, which .npy files have not" if record.stored else _NO_VALUES
            self._left_out[reason] += 1
            return
        keys = [key or record.key.text, *self._keys_of_result(names[1], value)]
        keys = [key for key in keys if key not in self._keys]  # a weight under two names has one
        self._keys.update(keys)
        nbytes = math.prod(shape) * (4 if dtype.name == "bfloat16" else dtype.itemsize)
        read = partial(self._graph.read, value)
        yield NodeValue(kinds, *names, op, target, dtype, tuple(keys), nbytes, read)

    def _keys_of_result(self, node: str, value: Value) -> Iterator[str]:
        """The keys of the model's results that a node's value is, unless it was written to since."""
        for slot in self._ends.outputs.get(node, ()):
            key = Key(ROOT_SITE, slot).text
            if key in self._archive:
                result = self._archive.load(self._archive.get(key))
                if result.tobytes() == self._graph.read(value).tobytes():
                    yield key


def _name(node: Node) -> str:
    """The name of a node of the graph itself; "" for one of a graph that an operator takes."""
    name = unescape(Key.parse(f"{node.where}/output").site.partition(":")[2])
    return "" if "." in name else name
