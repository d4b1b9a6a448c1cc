"""The data-flow graph of a run whose ops were recorded: each op's inputs, and which op computed them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import DTYPES, Array, DType, decode
from tensorcap_formats.errors import CorruptArchiveError, ReadError, TensorNotFoundError, no_such_tensor
from tensorcap_formats.keys import Key, module_site
from tensorcap_formats.records import Record

_IMMATERIAL: Final = ("device", "generator", "half_to_float", "layout", "memory_format", "pin_memory")
_SLOT: Final = "op"  # the slot of the value with an op's facts


@dataclass(frozen=True, slots=True)
class View:
    """A tensor that is not stored: elements of another one, without a copy.

    Attributes:
        shape: Its shape.
        strides: Stride of each axis, over the elements of the other tensor in C order.
        offset: Number of its first element among those.
        dtype: Its logical dtype; offset and strides count elements of it.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: DType


@dataclass(frozen=True, slots=True)
class Value:
    """An input or output of an op: a tensor and where its values are, or a number.

    Attributes:
        name: The argument (`query`, `tensors.0`), or the slot (`output.1`).
        key: Key text of the record with the values; of the record that it is a view of, if `view` is set;
            of the output that is the same view, if it is an op's input and not stored.
        parameter: The parameter or buffer that it is, or is a view of, if it has no key.
        writes: How often the parameter was written to before; its recorded value is then another.
        view: How to read it from the tensor of `key` or `parameter`; None for the whole tensor.
        note: Why its values are not in the archive; empty if they are.
        number: The number, if it is no tensor.
    """

    name: str
    key: str | None = None
    parameter: str | None = None
    writes: int = 0
    view: View | None = None
    note: str = ""
    number: Any = None


@dataclass(frozen=True, slots=True)
class Node:
    """One run of an op.

    Attributes:
        where: Step, site and call, as a text: `0/model.layers.0.mlp:aten.mul.Tensor`.
        op: Its name.
        order: Execution order number, comparable with that of records.
        module: Site of the module that ran it.
        module_call: Number of that module's call within the step.
        class_name: Class of the module.
        file: The file of the user's code that runs it; None if none does, or it is unknown.
        line: The line in the file.
        function: The function.
        inputs: Its tensor arguments, in the order of its signature.
        arguments: Its other arguments, without those left at their defaults.
        outputs: The tensors that it returned or wrote to.
    """

    where: str
    op: str
    order: int
    module: str
    module_call: int
    class_name: str
    file: str | None
    line: int | None
    function: str | None
    inputs: tuple[Value, ...]
    arguments: Mapping[str, Any]
    outputs: tuple[Value, ...]

    @property
    def call_text(self) -> str:
        """What it is and is given apart from tensors, as `aten.gelu(approximate='tanh')`.

        What changes no value, as a device, is left out.
        """
        numbers = {value.name: value.number for value in self.inputs if value.number is not None}
        known = {**numbers, **self.arguments}
        text = ", ".join(f"{name}={value!r}" for name, value in known.items() if name not in _IMMATERIAL)
        name = self.op.removesuffix(".default")
        return f"{name}({text})" if text else name

    def input(self, name: str) -> Value:
        """Return the tensor argument of that name.

        Raises:
            TensorNotFoundError: There is none.
        """
        for value in self.inputs:
            if value.name == name:
                return value
        raise no_such_tensor(self.where, name, [value.name for value in self.inputs])


@dataclass(frozen=True, slots=True)
class GraphEnds:
    """What goes into an exported graph and comes out of it (CAP-220).

    Attributes:
        inputs: The model's inputs, by the names of their nodes.
        weights: Parameters, buffers and constants of the code, by their names in the model.
        outputs: The nodes that the graph returns, with the slots of the model's result that they are in.
    """

    inputs: tuple[Value, ...] = ()
    weights: tuple[Value, ...] = ()
    outputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, archive: Archive) -> GraphEnds:
        """Read them off the run's metadata; what is damaged counts as absent."""
        entry = archive.run.get("graph")
        graph = entry if isinstance(entry, Mapping) else {}
        entries = graph.get("outputs")
        outputs: dict[str, tuple[str, ...]] = {}
        for output in entries if isinstance(entries, list) else ():
            with suppress(KeyError, TypeError):
                outputs[str(output["node"])] = tuple(map(str, output["slots"]))
        return cls(_values_by_name(graph.get("inputs")), _values_by_name(graph.get("weights")), outputs)


@dataclass(slots=True)
class Graph:
    """Ops in execution order; reads any value between them, also one that is not stored.

    Attributes:
        nodes: All nodes, in execution order.

    Example:
        The probabilities of fused attention, which no module returns:

        >>> import tempfile, torch, tensorcap
        >>> class Attention(torch.nn.Module):
        ...     def forward(self, x):
        ...         q, k, v = x.reshape(4, 3, 8).unbind(1)
        ...         q, k, v = (t[None, None] for t in (q, k, v))
        ...         return torch.nn.functional.scaled_dot_product_attention(q, k, v)
        >>> folder = tempfile.TemporaryDirectory()
        >>> model, path = Attention(), folder.name + "/ref.h5"
        >>> with torch.no_grad(), tensorcap.capture(model, path, level="op"):
        ...     _ = model(torch.randn(4, 24))
        >>> with tensorcap.open_archive(path) as archive:
        ...     graph = Graph.of(archive)
        ...     (node,) = [node for node in graph.nodes if "scaled_dot_product" in node.op]
        ...     q, k = (graph.read(node.input(name)).astype("f8") for name in ("query", "key"))
        >>> scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
        >>> e = np.exp(scores - scores.max(-1, keepdims=True))
        >>> np.round((e / e.sum(-1, keepdims=True)).sum(-1), 9).tolist()
        [[[1.0, 1.0, 1.0, 1.0]]]
        >>> folder.cleanup()
    """

    archive: Archive
    nodes: tuple[Node, ...]
    _by_where: dict[str, Node] = field(repr=False)
    _outputs: dict[str, Value] = field(repr=False)
    _consumers: dict[str, list[Node]] = field(repr=False)

    @classmethod
    def of(cls, archive: Archive) -> Graph:
        """Read the graph of an archive, which has to stay open as long as values are read.

        Raises:
            CorruptArchiveError: The facts of an op are not as specified.
            TensorNotFoundError: The archive has no facts of ops.
        """
        nodes = []
        for text, facts in archive.values.items():
            if text.endswith(f"/{_SLOT}") and isinstance(facts, dict):
                where = text.rpartition("/")[0]
                try:
                    nodes.append(_node(where, facts))
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    raise CorruptArchiveError(
                        f"{archive.path}: {where}: what it says of the op is not as specified (CAP-11): "
                        f"{type(error).__name__}: {error}"
                    ) from error
        if not nodes:
            raise TensorNotFoundError(
                f"{archive.path}: holds no ops", hint="Capture with --level op, or --level export."
            )
        nodes.sort(key=lambda node: node.order)
        consumers: dict[str, list[Node]] = {}
        for node in nodes:
            for key in dict.fromkeys(value.key for value in node.inputs if value.key is not None):
                consumers.setdefault(key, []).append(node)
        outputs = {f"{node.where}/{value.name}": value for node in nodes for value in node.outputs}
        return cls(archive, tuple(nodes), {node.where: node for node in nodes}, outputs, consumers)

    def node(self, key: str) -> Node:
        """Return the node of a key, or of `STEP/SITE@CALL` alone.

        Raises:
            TensorNotFoundError: There is none.
        """
        node = self._by_where.get(key) or self._by_where.get(key.rpartition("/")[0])
        if node is None:
            raise no_such_tensor(str(self.archive.path), key, self._by_where)
        return node

    def producer(self, value: Value | str) -> Node | None:
        """Return the node that computed a value, or a key's tensor; None for model inputs and parameters."""
        key = value if isinstance(value, str) else value.key
        return self._by_where.get(key.rpartition("/")[0]) if key in self._outputs and key else None

    def consumers(self, key: str) -> tuple[Node, ...]:
        """Return the nodes that take the tensor of a key, in execution order."""
        return tuple(self._consumers.get(key, ()))

    def read(self, value: Value | str) -> Array:
        """Read the values of an op's input or output, or of a key; in its own shape, decoded as by `load`.

        Raises:
            TensorNotFoundError: Its values are not in the archive.
            CorruptArchiveError: A view reaches outside of the tensor that it is a view of.
            ReadError: The bytes cannot be read.
        """
        if isinstance(value, str):
            stored = self._outputs.get(value)
            if stored is None or stored.key == value:
                return self.archive.load(self.archive.get(value))
            value = stored
        if value.number is not None:
            return np.asarray(value.number)
        record, view = self.source(value)
        return decode(self.elements(value), record.dtype if view is None else view.dtype)

    def output(self, key: str) -> Value:
        """Return the output of an op that a key names, stored or not.

        Raises:
            TensorNotFoundError: There is none.
        """
        if key not in self._outputs:
            raise no_such_tensor(str(self.archive.path), key, self._outputs)
        return self._outputs[key]

    def elements(self, value: Value) -> Array:
        """Read the stored elements of an op's input or output, in its own shape.

        Raises:
            TensorNotFoundError: Its values are not in the archive.
            CorruptArchiveError: A view reaches outside of the tensor that it is a view of.
            ReadError: The bytes cannot be read.
        """
        record, view = self.source(value)
        stored = self.archive.read(record)
        return stored if view is None else _strided(stored, view, record.key.text)

    def source(self, value: Value) -> tuple[Record, View | None]:
        """Find the record with the values of an op's input or output, and how they are a view of it.

        Raises:
            TensorNotFoundError: Its values are not in the archive.
        """
        if value.note:
            raise TensorNotFoundError(f"{self.archive.path}: {value.name!r} has no values: {value.note}")
        stored = self._outputs.get(value.key) if value.view is None and value.key is not None else None
        if stored is not None and stored.key != value.key:
            return self.source(stored)
        key = value.key if value.key is not None else self._parameter(value)
        return self.archive.get(key), value.view

    def _parameter(self, value: Value) -> str:
        """Return the key of the record of a parameter or a buffer."""
        name = value.parameter or ""
        module, _, own = name.rpartition(".")
        keys = [Key(module_site(module), f"{kind}.{own}").text for kind in ("param", "buffer")]
        for key in keys:
            if key in self.archive:
                if value.writes:
                    raise TensorNotFoundError(
                        f"{self.archive.path}: {name!r} was written to {value.writes} times before the op, "
                        f"and {key!r} is its value at another time"
                    )
                return key
        raise TensorNotFoundError(
            f"{self.archive.path}: holds no parameter {name!r}", hint="Capture with --params."
        )


def _values_by_name(entry: object) -> tuple[Value, ...]:
    values = []
    for name, reference in entry.items() if isinstance(entry, Mapping) else ():
        with suppress(KeyError, TypeError, ValueError, AttributeError):
            values.append(_value(name, reference))
    return tuple(values)


def _node(where: str, facts: Mapping[str, Any]) -> Node:
    return Node(
        where,
        str(facts["op"]),
        int(facts["order"]),
        str(facts["module"]),
        int(facts["module_call"]),
        str(facts["class"]),
        facts.get("file"),
        facts.get("line"),
        facts.get("function"),
        tuple(_value(entry["name"], entry) for entry in facts["inputs"]),
        dict(facts["arguments"]),
        tuple(_output(where, entry) for entry in facts["outputs"]),
    )


def _output(where: str, entry: Mapping[str, Any]) -> Value:
    value = _value(entry["slot"], entry)
    if "view" in entry or entry.get("record", f"{where}/{value.name}") != f"{where}/{value.name}":
        raise ValueError(f"output {value.name!r} refers to that of another op")
    return value


def _value(name: str, entry: Mapping[str, Any]) -> Value:
    """Parse a reference in an op's facts (CAP-12)."""
    if "value" in entry:
        return Value(name, number=entry["value"])
    for unknown in ("lost", "unfilled", "overwritten"):
        if unknown in entry:
            return Value(name, note=_NOTES.get(unknown) or str(entry[unknown]))
    keys = [entry[kind] for kind in ("record", "view", "view_of") if kind in entry]
    if len(keys) + ("parameter" in entry) != 1 or not all(isinstance(key, str) for key in keys):
        raise ValueError(f"{name!r} refers to {len(keys)} tensors, expected one")
    view = None
    if "shape" in entry:
        shape, strides = _whole_numbers(entry["shape"]), _whole_numbers(entry["strides"])
        if len(shape) != len(strides):
            raise ValueError(f"{name!r} has {len(shape)} axes and {len(strides)} strides")
        view = View(shape, strides, _whole_numbers([entry["offset"]])[0], DTYPES[entry["dtype"]])
    if not isinstance(entry.get("parameter", ""), str):
        raise ValueError(f"{name!r} refers to a parameter {entry['parameter']!r}")
    key = keys[0] if keys else None
    return Value(name, key, parameter=entry.get("parameter"), writes=int(entry.get("writes", 0)), view=view)


_NOTES: Final = {
    "unfilled": "nothing had been written to its memory",
    "overwritten": "the op did not read it",
}


def _whole_numbers(numbers: Sequence[Any]) -> tuple[int, ...]:
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"expected whole numbers, found {numbers!r}")
    return tuple(numbers)


def _strided(elements: Array, view: View, base: str) -> Array:
    """Copy the stored elements of a view to an array of its own."""
    last = view.offset + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True))
    itemsize = view.dtype.itemsize
    if math.prod(view.shape) and (last + 1) * itemsize > elements.nbytes:
        raise CorruptArchiveError(
            f"{base}: has {elements.nbytes} bytes, and a view of it goes to byte {(last + 1) * itemsize}"
        )
    raw = np.ascontiguousarray(elements).reshape(-1).view(np.uint8)
    usable = raw[view.offset * itemsize :]
    flat = usable[: usable.nbytes // itemsize * itemsize].view(view.dtype.storage)
    strides = tuple(s * itemsize for s in view.strides)
    try:
        return np.lib.stride_tricks.as_strided(flat, view.shape, strides).copy()
    except (MemoryError, ValueError):  # numpy has a word of its own for sizes beyond any memory
        raise ReadError(f"{base}: a view of it of shape {view.shape} does not fit into memory") from None
