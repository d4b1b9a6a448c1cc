"""Operations of a graph computed on a compiled target's values, but for some of them that are left out.

An input without a value of the target's is computed in the same way, from its own inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from tensorcap.adapters.operation_graph import OperationGraph, Value
from tensorcap.rerun.operation_values import OperationValues
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.run_info import ExportedNode

_VIEWS: Final = frozenset(  # what hands elements on as they are
    {
        *("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "flatten", "permute", "transpose", "t"),
        *("expand", "slice", "select", "getitem", "clone", "alias", "detach", "split", "split_with_sizes"),
        *("chunk", "narrow", "lift_fresh_copy", "_assert_tensor_metadata"),
    }
)


def is_view(node: ExportedNode) -> bool:
    """Whether an operation computes nothing and hands elements on."""
    return node.base in _VIEWS


@dataclass(slots=True)
class OperationRun:
    """All operations, computed on the target's values but for some that are left out.

    Attributes:
        released: Names of nodes whose values are left out.
        memo: What operations made, by name; None of one that could not be computed.
    """

    released: frozenset[str] = frozenset()
    memo: dict[str, Value] = field(default_factory=dict)


class OperationRuns:
    """Runs of the operations of one graph.

    Args:
        graph: The reference's graph.
        values: The target's values.

    Attributes:
        nodes: The graph's nodes by name, in execution order.
        order: Their places in it.
        last: The run that `compute` and `between` are asked about if none is named.
    """

    def __init__(self, graph: OperationGraph, values: OperationValues) -> None:
        self._graph = graph
        self._values = values
        self.nodes = values.nodes
        self.order = {name: at for at, name in enumerate(self.nodes)}
        self._inputs = {
            name: tuple(one for one in node.inputs.values() if one in self.nodes)
            for name, node in self.nodes.items()
        }
        self._users: dict[str, list[str]] = {}
        for name, inputs in self._inputs.items():
            for one in dict.fromkeys(inputs):
                self._users.setdefault(one, []).append(name)
        self._of_weights = self._find_weight_nodes()
        self.last = OperationRun()
        self._given = _given_values(graph, values.target)

    def compute(self, name: str, changed: Mapping[str, Mapping[str, Any]]) -> Value:
        """What a node makes in the last run if operations before it, or it itself, get other arguments.

        Args:
            name: The node.
            changed: Other arguments by name, by node.
        """
        base = OperationRun(self.last.released | changed.keys(), self.last.memo)
        memo: dict[str, Value] = {}
        affected = set().union(*(self.affected(one, base.released) for one in changed)) | set(changed)
        for one in sorted(affected | {name}, key=self.order.__getitem__):
            if self.order[one] <= self.order[name]:
                memo[one] = self.natural(
                    one, OperationRun(base.released, {**base.memo, **memo}), changed.get(one)
                )
        return memo[name]

    def compute_with_input(self, name: str, source: str, other: str) -> Value:
        """What a node makes in the last run of another node than the one that it takes."""
        try:
            return self._graph.compute(
                name, lambda one: self._value(other if one == source else one, self.last)
            )
        except Exception:  # of values that the operation does not take
            return None

    def nearest(self, name: str, released: Collection[str] | None = None) -> list[str]:
        """The nodes with a value that a node is computed of, through nodes without one."""
        released = self.last.released if released is None else released
        sources = [one for node in (name, *self.between(name, released)) for one in self._inputs[node]]
        return [one for one in dict.fromkeys(sources) if self.is_valued(one, released)]

    def is_of_weights(self, name: str) -> bool:
        """Whether a node is computed of weights and of nothing else."""
        return name in self._of_weights

    def is_valued(self, name: str, released: Collection[str] = ()) -> bool:
        """Whether the target has the value of a node."""
        return (name, 0) in self._values.records and name not in released

    def between(self, name: str, released: Collection[str] | None = None) -> list[str]:
        """The nodes without a value between a node and its nearest inputs, the last first."""
        released = self.last.released if released is None else released
        seen: dict[str, None] = {}
        waiting = list(self._inputs[name])
        while waiting:
            one = waiting.pop(0)
            if one not in seen and not self.is_valued(one, released):
                seen[one] = None
                waiting.extend(self._inputs[one])
        return list(seen)

    def consumers(self, name: str, released: Collection[str]) -> list[str]:
        """The nearest nodes with a value that are computed of a node."""
        result: dict[str, None] = {}
        seen: set[str] = set()
        waiting = list(self._users.get(name, ()))
        while waiting:
            one = waiting.pop()
            if one in seen:
                continue
            seen.add(one)
            if self.is_valued(one, released):
                result[one] = None
            else:
                waiting.extend(self._users.get(one, ()))
        return sorted(result, key=self.order.__getitem__)

    def affected(self, name: str, released: Collection[str]) -> set[str]:
        """The nodes that may be made of a node's own result, up to the nearest ones with a value."""
        seen: set[str] = set()
        waiting = list(self._users.get(name, ()))
        while waiting:
            one = waiting.pop()
            if one not in seen:
                seen.add(one)
                if not self.is_valued(one, released):
                    waiting.extend(self._users.get(one, ()))
        return seen

    def _find_weight_nodes(self) -> frozenset[str]:
        """Nodes that are computed of weights and of nothing else."""
        known: set[str] = set()
        for name, node in self.nodes.items():
            has_source = bool(node.weights) or bool(node.inputs)
            if has_source and all(one in known for one in node.inputs.values()):
                known.add(name)
        return frozenset(known)

    def natural(self, name: str, run: OperationRun, changed: Mapping[str, Any] | None = None) -> Value:
        """What a node makes in a run; None if it cannot be computed."""
        try:
            return self._graph.compute(name, lambda one: self._value(one, run), changed)
        except Exception:  # of values that the operation does not take
            return None

    def _value(self, name: str, run: OperationRun) -> Value:
        """The value of a node: the target's if it has one, else what the reference makes."""
        if name in self._given:
            return self._given[name]
        node = self.nodes.get(name)
        if node is None:
            return None
        if not self.is_valued(name, run.released):
            return run.memo.get(name)
        if len(node.shapes) == 1:
            return self._values.read(name, 0, node.shapes[0])
        made = run.memo.get(name)
        own = list(made) if isinstance(made, (list, tuple)) else [None] * len(node.shapes)
        for at, shape in enumerate(node.shapes):
            if (name, at) in self._values.records and at < len(own):
                own[at] = self._values.read(name, at, shape)
        return own  # type: ignore[return-value] # None stands for one that nothing is known of

    def without(self, run: OperationRun, left_out: Collection[str], last: int) -> OperationRun:
        """A run with some values left out, computed up to a node's place in the order of execution."""
        without = OperationRun(run.released | frozenset(left_out), dict(run.memo))
        more = without.released - run.released
        affected = set().union(*(self.affected(one, without.released) for one in more)) | more
        for name in sorted(affected, key=self.order.__getitem__):
            if self.order[name] <= last:
                without.memo[name] = self.natural(name, without)
        return without

    def compute_rounded(self, name: str, run: OperationRun, unit: float) -> Value:
        """What a node makes if each element of its nearest inputs is changed by a rounding up or down."""
        random = np.random.default_rng(0)
        memo = dict(run.memo)
        rounded: dict[str, Value] = {}

        def read(one: str) -> Value:
            if one in rounded:
                return rounded[one]
            value = self._value(one, OperationRun(run.released, memo))
            is_nearest = one in self._given or self.is_valued(one, run.released)
            if is_nearest:
                rounded[one] = value = _perturbed(value, unit, random)
            return value

        try:
            for one in sorted(self.between(name, run.released), key=self.order.__getitem__):
                memo[one] = self._graph.compute(one, read)
            return self._graph.compute(name, read)
        except Exception:  # of values that the operation does not take
            return None


def _perturbed(value: Value, unit: float, random: np.random.Generator) -> Value:
    """A value with each element changed by a relative rounding up or down."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind != "f":
            return value
        signs = random.integers(0, 2, value.shape) * 2 - 1
        with np.errstate(over="ignore", invalid="ignore"):
            changed: Array = (value.astype(np.float64) * (1 + unit * signs)).astype(value.dtype)
        if value.dtype == np.float16 or unit > 1e-5:  # finer steps than its dtype has
            changed = value.astype(np.float32) * (1 + np.float32(unit) * signs.astype(np.float32))
        return changed
    if isinstance(value, (list, tuple)):
        return [_perturbed(one, unit, random) for one in value]  # type: ignore[misc]
    return value


def _given_values(graph: OperationGraph, target: Archive) -> dict[str, Array]:
    """What the target was given, by the names of the graph's inputs."""
    values = {}
    for name in graph.given:
        text = f"0/@root/input.{name}"
        if text in target and target.get(text).stored:
            values[name] = target.load(target.get(text))
    return values
