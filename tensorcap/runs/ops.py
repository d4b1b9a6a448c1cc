"""The ops that a run recorded within its modules, by place: name, source line, inputs, arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

from tensorcap.runs.graph import Graph, Node, Value
from tensorcap.runs.record_kinds import is_inner
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import TensorNotFoundError
from tensorcap_formats.keys import PROBES, Key, module_of

FACTS: Final = "op"  # the slot of an op's facts
_MODULE: Final = "module"  # the slot of the module that passed a probe
_CASTS: Final = ("_to_copy", "to")
_RESERVE: Final = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
# Dtype and device, which records and preflight compare
_COMPARED_ELSEWHERE: Final = ("dtype", "device", "layout", "pin_memory", "memory_format", "generator")

_Call = tuple[str, str, int]


class Ops:
    """The ops of an archive, by their place: the text of a key up to its slot; get them by `ops_of`."""

    def __init__(self, archive: Archive) -> None:
        try:
            graph = Graph.of(archive)
        except TensorNotFoundError:
            self._nodes: dict[str, Node] = {}
        else:
            self._nodes = {node.where: node for node in graph.nodes}
        self._outputs = {
            f"{node.where}/{value.name}": value for node in self._nodes.values() for value in node.outputs
        }

        self._reserved: dict[_Call, int] = {}  # when a call of a module first reserves memory
        for node in self._nodes.values():
            if self.name(node.where) in _RESERVE:
                self._reserved.setdefault(_call(node), node.order)

    def __bool__(self) -> bool:
        return bool(self._nodes)

    def __contains__(self, place: object) -> bool:
        return place in self._nodes

    def module_call(self, place: str) -> int:
        """Return the number of the call of the module that runs an op."""
        return self._nodes[place].module_call

    def op(self, place: str) -> str:
        """Return the full name of an op."""
        return self._nodes[place].op

    def name(self, place: str) -> str:
        """Return the op without its namespace, overload, and the `_` of in-place ops; "" if there is none."""
        node = self._nodes.get(place)
        return _base(node.op).rstrip("_") if node else ""

    def is_cast(self, place: str) -> bool:
        """Whether an op only changes the dtype, or the device."""
        return self.name(place) in _CASTS

    def is_uninitialised(self, key: Key) -> bool:
        """Whether a record may hold arbitrary values: of memory that is reserved and not filled yet."""
        node = self._nodes.get(key.where)
        if node is None:
            return False
        if self.name(node.where) in _RESERVE:
            return True
        is_written = key.slot == "input.self" and _base(node.op).endswith("_")
        return is_written and self._reserved.get(_call(node), node.order) < node.order

    def source(self, place: str) -> str:
        """Return the source line of an op, as `modeling_llama.py:189 in forward`; "" if it is not known."""
        node = self._nodes.get(place)
        if node is None or not node.file:
            return ""
        line = f":{node.line}" if node.line else ""
        function = f" in {node.function}" if node.function else ""
        return f"{node.file.rpartition('/')[2]}{line}{function}"

    def inputs(self, place: str) -> Sequence[str] | None:
        """Return key texts of the records that an op takes, those behind views too, without parameters.

        Returns:
            None if one is not known.
        """
        node = self._nodes.get(place)
        if node is None or any(value.note for value in node.inputs):
            return None
        keys = [self._origin(value) for value in node.inputs if value.number is None]
        return [key for key in keys if key is not None]

    def input_key(self, place: str, slot: str) -> str:
        """Return the key text of the record, or the parameter, with the values of an op's input; "" if none.

        Args:
            place: The op's place.
            slot: The slot of the input: `input.ARGUMENT`.
        """
        node = self._nodes.get(place)
        for value in node.inputs if node else ():
            if slot == f"input.{value.name}" and not value.note:
                return self._origin(value) or value.parameter or ""
        return ""

    def arguments(self, place: str) -> Mapping[str, Any]:
        """Return the arguments that are no tensors, without dtype, device and the like."""
        node = self._nodes.get(place)
        if node is None:
            return {}
        numbers = {value.name: value.number for value in node.inputs if value.number is not None}
        return {
            name: value
            for name, value in {**numbers, **node.arguments}.items()
            if name not in _COMPARED_ELSEWHERE
        }

    def _origin(self, value: Value) -> str | None:
        """Return the key text of the record that a value is, or is a view of; None for a parameter."""
        stored = self._outputs.get(value.key) if value.key is not None else None
        return value.key if stored is None else stored.key


def _base(op: str) -> str:
    """Return the name of an op between its namespace and its overload."""
    parts = op.split(".")
    return parts[min(1, len(parts) - 1)]


def _call(node: Node) -> _Call:
    """Return the call of the module that runs an op: rank and step, module, number of the call."""
    return node.where.rpartition("/")[0], node.module, node.module_call


def ops_of(archive: Archive) -> Ops:
    """Return the ops of an archive; they are read once, as long as the archive exists."""
    ops = _KNOWN.get(archive)
    if ops is None:
        ops = _KNOWN[archive] = Ops(archive)
    return ops


def forget_ops(archive: Archive) -> None:
    """Drop what `ops_of` keeps of an archive, until they are asked for again."""
    _KNOWN.pop(archive, None)


_KNOWN: Final[WeakKeyDictionary[Archive, Ops]] = WeakKeyDictionary()


def is_fact(text: str, value: object) -> bool:
    """Whether a value describes a place within a module's code, and is not one that the run computed."""
    site, _, slot = text.rpartition("/")
    if slot == _MODULE:
        return ":" in site and Key.parse(text).site.startswith(f"{PROBES}:")
    return slot == FACTS and isinstance(value, Mapping) and "op" in value  # of an op at a module's place too


def passed_in(archive: Archive, key: Key) -> str:
    """Return the module whose code a record is of; for a probe, the module that passed it."""
    module = module_of(key.site)
    if module != PROBES or not is_inner(key):
        return module
    site = archive.values.get(f"{key.where}/{_MODULE}")
    return site if isinstance(site, str) and site else PROBES
