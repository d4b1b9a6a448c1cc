"""Replay of operations: what each operation of the reference's graph makes of a compiled target's values.

Every operation is computed on the values that the target has of its inputs; an input without one, fused away
or never mapped, is computed in the same way. So a difference is of one operation's own making, or of those
without a value between it and its nearest inputs (`specs/replay.md`, RPL-140).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from tensorcap.adapters.operation_graph import OperationGraph, Value
from tensorcap.comparison import POLICY, Finding, Precision, Status, worst_status
from tensorcap.comparison.weight_grids import find_weight_grid
from tensorcap.metrics import Difference, measure
from tensorcap.rerun.operation_values import OperationValues
from tensorcap.rerun.own_errors import BAD, OwnError
from tensorcap.rerun.replay_tests import judge_replayed
from tensorcap.runs import ArrayArchive
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.keys import Key, module_of
from tensorcap_formats.run_info import GraphNode

_ROUNDS: Final = 3  # of looking for values that are another operation's
_CONDITIONED: Final = 4.0  # times the change that one rounding of each input makes, that an error may be
_WITHOUT_EFFECT: Final = 1e-4  # of its own error, that what is computed of it changes by at most (RPL-50)


@dataclass(frozen=True, slots=True)
class OperationReplay:
    """What each operation made itself.

    Attributes:
        own_errors: One for each value that the target has, in execution order.
        nodes: Names of the nodes by key text.
        between: Names of the operations without a value that an error may be of instead, by key text.
        elsewhere: Why a value is not the one that the target computed with, by key text.
        natural: What the reference's operations made of the target's values, by its key texts.
        values: The target's values under those.
        counts: Operations of the reference's graph that compute something, and how many the target has.
    """

    own_errors: tuple[OwnError, ...]
    nodes: Mapping[str, str]
    between: Mapping[str, tuple[str, ...]]
    elsewhere: Mapping[str, str]
    natural: Archive
    values: Archive
    counts: tuple[int, int]

    @property
    def bad(self) -> Sequence[OwnError]:
        """What is suspect or worse, in execution order."""
        return [own for own in self.own_errors if own.is_bad]

    @property
    def unjudged(self) -> Sequence[OwnError]:
        """What could not be computed again."""
        return [own for own in self.own_errors if own.status == "unjudged"]


@dataclass(frozen=True, slots=True)
class _Judged:
    """One output of one operation."""

    status: Status
    findings: tuple[Finding, ...] = ()
    error: float | None = None

    @property
    def is_bad(self) -> bool:
        return self.status in BAD


@dataclass(slots=True)
class _Run:
    """All operations, computed on the target's values but for some that are left out.

    Attributes:
        released: Names of nodes whose values are left out.
        memo: What operations made, by name; None of one that could not be computed.
    """

    released: frozenset[str] = frozenset()
    memo: dict[str, Value] = field(default_factory=dict)


class OperationReplays:
    """Replays of the operations of one graph.

    Args:
        graph: The reference's graph.
        values: The target's values.
        precision: What errors are held against; None if no run says one.
    """

    def __init__(self, graph: OperationGraph, values: OperationValues, precision: Precision | None) -> None:
        self._graph = graph
        self._values = values
        self._reference = values.reference
        self._precision = precision
        self._nodes = values.nodes
        self._outputs = {name for name, node in self._nodes.items() if node.outputs}
        self._order = {name: at for at, name in enumerate(self._nodes)}
        self._inputs = {
            name: tuple(one for one in node.inputs.values() if one in self._nodes)
            for name, node in self._nodes.items()
        }
        self._users: dict[str, list[str]] = {}
        for name, inputs in self._inputs.items():
            for one in dict.fromkeys(inputs):
                self._users.setdefault(one, []).append(name)
        self._of_weights = self._find_weight_nodes()
        self._last = _Run()
        self._wrong: set[str] = set()
        self._given = _given_values(graph, values.target)

    def replay(self) -> OperationReplay:
        """Replay all operations, and judge what each made itself.

        1. Each operation is computed on the target's values, and judged.
        2. Of those that are wrong, the last first, the value is left out: if all that is computed of it is
           right then, the target did not compute with that value. It is another operation's, as one that
           was fused with it, or it is undone by what comes of it, as a norm folded into a product.
        3. All is computed and judged once more without these values.
        """
        run = _Run()
        judged = self._judge_all(run)
        elsewhere: dict[str, str] = {}
        for _ in range(_ROUNDS):
            found = self._find_elsewhere(run, judged)
            if not found:
                break
            elsewhere.update(found)
            run = _Run(frozenset(elsewhere))
            judged = self._judge_all(run)
        self._last = run
        self._wrong = {name for (name, _), one in judged.items() if one.is_bad}
        return self._result(run, judged, elsewhere)

    def compute(self, name: str, changed: Mapping[str, Mapping[str, Any]]) -> Value:
        """What a node makes in the last run if operations before it, or it itself, get other arguments.

        Args:
            name: The node.
            changed: Other arguments by name, by node.
        """
        base = _Run(self._last.released | changed.keys(), self._last.memo)
        memo: dict[str, Value] = {}
        affected = set().union(*(self._affected(one, base.released) for one in changed)) | set(changed)
        for one in sorted(affected | {name}, key=self._order.__getitem__):
            if self._order[one] <= self._order[name]:
                memo[one] = self._natural(one, _Run(base.released, {**base.memo, **memo}), changed.get(one))
        return memo[name]

    def compute_with_input(self, name: str, source: str, other: str) -> Value:
        """What a node makes in the last run of another node than the one that it takes."""
        try:
            return self._graph.compute(
                name, lambda one: self._value(other if one == source else one, self._last)
            )
        except Exception:  # of values that the operation does not take
            return None

    def nearest(self, name: str) -> list[str]:
        """The nodes with a value that a node is computed of, through nodes without one."""
        sources = [one for node in (name, *self.between(name)) for one in self._inputs[node]]
        return [one for one in dict.fromkeys(sources) if self.is_valued(one, self._last.released)]

    def is_wrong(self, name: str) -> bool:
        """Whether the target has another value of a node than the reference makes."""
        return name in self._wrong

    def is_of_weights(self, name: str) -> bool:
        """Whether a node is computed of weights and of nothing else."""
        return name in self._of_weights

    def is_valued(self, name: str, released: Collection[str] = ()) -> bool:
        """Whether the target has the value of a node."""
        return (name, 0) in self._values.records and name not in released

    def between(self, name: str, released: Collection[str] | None = None) -> list[str]:
        """The nodes without a value between a node and its nearest inputs, the last first."""
        released = self._last.released if released is None else released
        seen: dict[str, None] = {}
        waiting = list(self._inputs[name])
        while waiting:
            one = waiting.pop(0)
            if one not in seen and not self.is_valued(one, released):
                seen[one] = None
                waiting.extend(self._inputs[one])
        return list(seen)

    def _consumers(self, name: str, released: Collection[str]) -> list[str]:
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
        return sorted(result, key=self._order.__getitem__)

    def _affected(self, name: str, released: Collection[str]) -> set[str]:
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
        for name, node in self._nodes.items():
            has_source = bool(node.weights) or bool(node.inputs)
            if has_source and all(one in known for one in node.inputs.values()):
                known.add(name)
        return frozenset(known)

    def _natural(self, name: str, run: _Run, changed: Mapping[str, Any] | None = None) -> Value:
        try:
            return self._graph.compute(name, lambda one: self._value(one, run), changed)
        except Exception:  # of values that the operation does not take
            return None

    def _value(self, name: str, run: _Run) -> Value:
        """The value of a node: the target's if it has one, else what the reference makes."""
        if name in self._given:
            return self._given[name]
        node = self._nodes.get(name)
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

    def _judge_all(self, run: _Run) -> dict[tuple[str, int], _Judged]:
        judged = {}
        for name in self._nodes:
            run.memo[name] = self._natural(name, run)
            if self.is_valued(name, run.released):
                for at in range(len(self._nodes[name].shapes)):
                    if (name, at) in self._values.records:
                        judged[name, at] = self._judge(name, at, run.memo[name], run)
        return judged

    def _judge(self, name: str, at: int, made: Value, run: _Run) -> _Judged:
        """Judge one output: exact if it is of whole numbers, else by its own error in roundings.

        1. What the reference's operation cannot be computed on is unjudged.
        2. Other whole numbers, and masks of values that are not finite that differ, are diverged.
        3. An error of as few roundings as the operations without a value make is rounding; so is one of no
           more than a few times the change that a rounding of each input makes, if the operation is so
           sensitive; and a weight that was rounded to a grid of few bits.
        """
        node, record = self._nodes[name], self._values.records[name, at]
        natural = made[at] if isinstance(made, (list, tuple)) and at < len(made) else made
        if not isinstance(natural, np.ndarray) or natural.shape != node.shapes[at]:
            return _Judged("unjudged", (Finding("replay", 1, 0, "unjudged", "cannot be computed again"),))
        value = self._values.read(name, at, node.shapes[at])
        if not natural.size:
            return _Judged("identical")
        if natural.dtype.kind not in "fc" or value.dtype.kind not in "fc":
            count = int((natural != value).sum())
            text = f"{count} of {natural.size} values are others"
            return (
                _Judged("diverged", (Finding("integers", count, 0, "diverged", text),))
                if count
                else _Judged("identical")
            )
        difference = self._measure(natural, value)
        if difference.same_bits:
            return _Judged("identical", error=0.0)
        lost = difference.mask_mismatches - difference.sentinels_lost
        if lost > 0:
            text = f"{lost} of {natural.size} elements are finite on one side only"
            return _Judged("diverged", (Finding("nonfinite", lost, 0, "diverged", text),), math.inf)
        precision = POLICY.precision_of_pair(self._precision, record, record)
        operations = 1 + self._count_between(name, run)
        errors = _errors(natural, value, difference)
        findings = self._rounding_findings(errors, precision, difference.measured, operations)
        error = max(errors)
        if worst_status(findings) not in BAD:
            return _Judged(worst_status(findings), findings, error)
        if name in self._of_weights:
            grid = find_weight_grid(natural.astype(np.float64), value.astype(np.float64), precision.unit)
            if grid is not None:
                text = f"rounded to {grid.text}"
                return _Judged(
                    "within-rounding", (Finding("weights", error, error, "within-rounding", text),), error
                )
        sensitive = self._rounded_inputs_effect(name, at, natural, precision, run)
        if error <= _CONDITIONED * sensitive:
            text = f"error {error:.2g} of its own, where a rounding of its inputs makes {sensitive:.2g}"
            return _Judged(
                "within-rounding",
                (Finding("own_error_leaf", error, _CONDITIONED * sensitive, "within-rounding", text),),
                error,
            )
        return _Judged(worst_status(findings), findings, error)

    def _rounding_findings(
        self, errors: Sequence[float], precision: Precision, elements: int, operations: int
    ) -> tuple[Finding, ...]:
        """Judge the error of the usual row, and those of the worst rows and of all."""
        factor = max(1.0, math.sqrt(operations) / 2)  # roundings of n operations add up as their root
        usual, *others = (error / factor for error in errors)
        worst = max(others)
        return judge_replayed(usual, worst, precision, is_leaf=operations == 1, elements=elements)

    def _count_between(self, name: str, run: _Run) -> int:
        """How many operations without a value may round what a node is made of."""
        return sum(
            not _is_view(self._nodes[one]) and one not in self._of_weights
            for one in self.between(name, run.released)
        )

    def _rounded_inputs_effect(
        self, name: str, at: int, natural: Array, precision: Precision, run: _Run
    ) -> float:
        """By how much the result changes if each nearest input is changed by a rounding up or down."""
        random = np.random.default_rng(0)
        between = self.between(name, run.released)
        memo = dict(run.memo)
        changed: dict[str, Value] = {}

        def read(one: str) -> Value:
            if one in changed:
                return changed[one]
            value = self._value(one, _Run(run.released, memo))
            is_nearest = one in self._given or self.is_valued(one, run.released)
            changed[one] = _perturbed(value, precision.unit, random) if is_nearest else value
            return changed[one]

        try:
            for one in sorted(between, key=self._order.__getitem__):
                memo[one] = self._graph.compute(one, read)
                changed.pop(one, None)
            made = self._graph.compute(name, read)
        except Exception:
            return 0.0
        result = made[at] if isinstance(made, (list, tuple)) else made
        if not isinstance(result, np.ndarray) or result.shape != natural.shape:
            return 0.0
        return min(max(_errors(natural, result, self._measure(natural, result))), 1.0)

    def _find_elsewhere(self, run: _Run, judged: Mapping[tuple[str, int], _Judged]) -> dict[str, str]:
        """Why the values of nodes that are wrong are not what the target computed with, by name."""
        bad = {name for (name, _), one in judged.items() if one.is_bad}
        released: dict[str, str] = {}
        for name in sorted(bad, key=self._order.__getitem__, reverse=True):
            known = run.released | released.keys()
            for others in self._candidates(name, bad - known, known):
                left_out = frozenset({name, *others})
                if self._is_right_without(left_out, known, judged, run):
                    released.update({one: self._reason(one, judged) for one in left_out if one in bad})
                    break
        return released

    def _candidates(self, name: str, bad: Collection[str], released: Collection[str]) -> list[frozenset[str]]:
        """What may have to be left out with a value: nothing, or what else goes into the same results."""
        users = self._consumers(name, released)
        if not users or name in self._outputs:
            return []
        every = {one for one in bad if one != name and set(self._consumers(one, released)) & set(users)}
        every -= self._outputs
        return [frozenset(), frozenset(every)] if every else [frozenset()]

    def _is_right_without(
        self,
        left_out: frozenset[str],
        released: Collection[str],
        judged: Mapping[tuple[str, int], _Judged],
        run: _Run,
    ) -> bool:
        """Whether all that is computed of some values is right if the reference's own stand in their place.

        So it has to be with them wrong, or it may not depend on them.
        """
        without = _Run(frozenset({*released, *left_out}))
        affected = set().union(*(self._affected(one, without.released) for one in left_out)) | left_out
        without.memo = {name: value for name, value in run.memo.items() if name not in affected}
        # a node between may have been made of values that other rounds left out since
        for name in sorted(affected | self._stale(run, without), key=self._order.__getitem__):
            without.memo[name] = self._natural(name, without)
        users = {user for one in left_out for user in self._consumers(one, without.released)}
        errors = [judged[one, 0].error for one in left_out if (one, 0) in judged]
        own = min(
            (1.0 if error is None or not math.isfinite(error) else error for error in errors), default=1.0
        )
        was_wrong = False
        for user in users:
            before = [one for (name, _), one in judged.items() if name == user]
            after = [
                self._judge(user, at, without.memo[user], without)
                for at in range(len(self._nodes[user].shapes))
                if (user, at) in self._values.records
            ]
            if any(one.is_bad or one.status == "unjudged" for one in after):
                return False
            has_effect = max((one.error or 0.0 for one in after), default=0.0) > _WITHOUT_EFFECT * own
            is_wrong = any(one.is_bad for one in before)
            if has_effect and not is_wrong:
                return False
            was_wrong |= is_wrong
        return bool(users)

    def _stale(self, run: _Run, without: _Run) -> set[str]:
        more = without.released - run.released
        return set().union(*(self._affected(one, without.released) for one in more)) | set(more)

    def _reason(self, name: str, judged: Mapping[tuple[str, int], _Judged]) -> str:
        """Whose value a record holds, if it is that of another operation, to the bit."""
        record = self._values.records[name, 0]
        for (other, at), one in judged.items():
            theirs = self._values.records[other, at]
            is_same = theirs.digest == record.digest and theirs.shape == record.shape
            if other != name and is_same and record.digest and not one.is_bad:
                return f"holds the value of {other}"
        return "is not what the target computed with"

    def _measure(self, natural: Array, value: Array) -> Difference:
        text = "0/@root/output"
        ours, theirs = (ArrayArchive(self._reference, {text: np.asarray(one)}) for one in (natural, value))
        return measure(ours, ours.records[0], theirs, theirs.records[0])

    def _result(
        self, run: _Run, judged: Mapping[tuple[str, int], _Judged], elsewhere: Mapping[str, str]
    ) -> OperationReplay:
        own_errors, nodes, between = [], {}, {}
        natural: dict[str, Array] = {}
        values: dict[str, Array] = {}
        for (name, at), one in judged.items():
            node = self._nodes[name]
            if name not in self._values.places:
                continue
            key = self._values.key(name, at)
            made = run.memo[name]
            array = made[at] if isinstance(made, (list, tuple)) else made
            if isinstance(array, np.ndarray):
                natural[key], values[key] = array, self._values.read(name, at, node.shapes[at])
            nodes[key] = name
            between[key] = tuple(
                other
                for other in self.between(name, run.released)
                if not _is_view(self._nodes[other]) and other not in self._of_weights
            )
            own_errors.append(
                OwnError(
                    key,
                    module_of(Key.parse(key).site),
                    "result",
                    not between[key],
                    one.error,
                    None,
                    one.status,
                    one.findings,
                    False,
                )
            )
        computing = [
            n
            for n, node in self._nodes.items()
            if node.shapes and not _is_view(node) and n not in self._of_weights
        ]
        return OperationReplay(
            tuple(own_errors),
            nodes,
            between,
            {
                self._values.key(name, 0): text
                for name, text in elsewhere.items()
                if name in self._values.places
            },
            ArrayArchive(self._reference, natural),
            ArrayArchive(self._values.target, values),
            (len(computing), sum(self.is_valued(name, run.released) for name in computing)),
        )


_VIEWS: Final = frozenset(  # what hands elements on as they are
    {
        *("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "flatten", "permute", "transpose", "t"),
        *("expand", "slice", "select", "getitem", "clone", "alias", "detach", "split", "split_with_sizes"),
        *("chunk", "narrow", "lift_fresh_copy", "_assert_tensor_metadata"),
    }
)


def _is_view(node: GraphNode) -> bool:
    """Whether an operation computes nothing and hands elements on."""
    return node.base in _VIEWS


def _errors(natural: Array, value: Array, difference: Difference) -> tuple[float, ...]:
    """The relative error of the usual row, of the worst ones, and of all; no unit.

    Values of which each stands for a token, as a mean over its channels, are rows by themselves.
    """
    rows = difference.row_error_median, difference.row_error_p95, difference.relative_frobenius
    errors = [0.0 if one is None else one for one in rows]
    if natural.ndim > 1 and natural.shape[-1] == 1 and natural.size > 1 and difference.unequal:
        ours, theirs = (side.astype(np.float64).reshape(-1) for side in (natural, value))
        is_known = np.isfinite(ours) & np.isfinite(theirs) & (ours != 0)
        relative = np.abs(theirs - ours)[is_known] / np.abs(ours[is_known])
        if relative.size:
            errors[:2] = map(float, np.quantile(relative, (0.5, 0.95)))
    return tuple(errors)


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
