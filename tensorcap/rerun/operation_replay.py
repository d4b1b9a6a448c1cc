"""Replay of operations: what each operation of the reference's graph makes of a compiled target's values.

Every operation is computed on the values that the target has of its inputs; an input without one, fused away
or never mapped, is computed in the same way. So a difference is of one operation's own making, or of those
without a value between it and its nearest inputs (`specs/replay.md`, RPL-150).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tensorcap.adapters.operation_graph import OperationGraph, Value
from tensorcap.comparison import POLICY, Finding, Precision, Status, worst_status
from tensorcap.comparison.weight_grids import find_weight_grid
from tensorcap.metrics import Difference, measure
from tensorcap.rerun.operation_runs import OperationRun, OperationRuns, is_view
from tensorcap.rerun.operation_values import OperationValues, part_of
from tensorcap.rerun.own_errors import BAD, OwnError
from tensorcap.rerun.replay_tests import judge_replayed
from tensorcap.runs import ArrayArchive
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.keys import Key, module_of

_ROUNDS: Final = 3  # of looking for values that are another operation's
_FUSED: Final = 3  # operations before one that a kernel may do with it
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


class OperationReplays(OperationRuns):
    """Replays of the operations of one graph.

    Args:
        graph: The reference's graph.
        values: The target's values.
        precision: What errors are held against; None if no run says one.
    """

    def __init__(self, graph: OperationGraph, values: OperationValues, precision: Precision | None) -> None:
        super().__init__(graph, values)
        self._precision = precision
        self._outputs = {name for name, node in self.nodes.items() if node.outputs}
        self._wrong: set[str] = set()

    def replay(self) -> OperationReplay:
        """Replay all operations, and judge what each made itself.

        1. Each operation is computed on the target's values, and judged.
        2. Of those that are wrong, the last first, the value is left out: if all that is computed of it is
           right then, the target did not compute with that value. It is another operation's, as one that
           was fused with it, or it is undone by what comes of it, as a norm folded into a product.
        3. All is computed and judged once more without these values.
        """
        run = OperationRun()
        judged = self._judge_all(run)
        elsewhere: dict[str, str] = {}
        for _ in range(_ROUNDS):
            found = self._find_elsewhere(run, judged)
            if not found:
                break
            elsewhere.update(found)
            run = OperationRun(frozenset(elsewhere))
            judged = self._judge_all(run)
        self.last = run
        self._wrong = {name for (name, _), one in judged.items() if one.is_bad}
        return self._result(run, judged, elsewhere)

    def is_wrong(self, name: str) -> bool:
        """Whether the target has another value of a node than the reference makes."""
        return name in self._wrong

    def _judge_all(self, run: OperationRun) -> dict[tuple[str, int], _Judged]:
        judged = {}
        for name in self.nodes:
            run.memo[name] = self.natural(name, run)
            if self.is_valued(name, run.released):
                for at in range(len(self.nodes[name].shapes)):
                    if (name, at) in self._values.records:
                        judged[name, at] = self._judge(name, at, run.memo[name], run)
        return judged

    def _judge(self, name: str, at: int, made: Value, run: OperationRun) -> _Judged:
        """Judge one output, and look at it once more if it is wrong.

        1. A weight may have been rounded to a grid of few bits.
        2. In a kernel that does several operations what one hands to the next is not rounded, though its
           value is: the nearest inputs are computed too, and those before them, up to three deep. What is
           right then is what the reference's operations make of values that the target has.
        3. An operation may be so sensitive that a rounding of its inputs makes such an error.
        """
        judged = self._hold_against(name, at, made, run)
        if not judged.is_bad or judged.error is None or not math.isfinite(judged.error):
            return judged
        natural, value = part_of(made, at), self._values.read(name, at, self.nodes[name].shapes[at])
        precision = self._precision_of(name, at)
        error = judged.error
        if name in self._of_weights and natural is not None:
            grid = find_weight_grid(natural.astype(np.float64), value.astype(np.float64), precision.unit)
            if grid is not None:
                return _within("weights", error, error, f"rounded to {grid.text}")
        left_out: set[str] = set()
        for _ in range(_FUSED):
            inputs = self.nearest(name, run.released | left_out)
            if not inputs:
                break
            left_out.update(inputs)
            without = self.without(run, left_out, self.order[name])
            fused = self._hold_against(name, at, without.memo[name], without)
            if not fused.is_bad and fused.status != "unjudged":
                return fused
        sensitive = self._rounded_inputs_effect(name, at, natural, precision, run)
        if error <= _CONDITIONED * sensitive:
            text = f"error {error:.2g} of its own, where a rounding of its inputs makes {sensitive:.2g}"
            return _within("own_error_leaf", error, _CONDITIONED * sensitive, text)
        return judged

    def _hold_against(self, name: str, at: int, made: Value, run: OperationRun) -> _Judged:
        """Judge one output: exact if it is of whole numbers, else by its own error in roundings.

        1. What the reference's operation cannot be computed on is unjudged.
        2. Other whole numbers, and masks of values that are not finite that differ, are diverged.
        3. An error of as few roundings as the operations without a value make is rounding.
        """
        shape = self.nodes[name].shapes[at]
        natural = part_of(made, at)
        if natural is None or natural.shape != shape:
            return _Judged("unjudged", (Finding("replay", 1, 0, "unjudged", "cannot be computed again"),))
        value = self._values.read(name, at, shape)
        if natural.dtype.kind not in "fc" or value.dtype.kind not in "fc":
            count = int((natural != value).sum())
            if not count:
                return _Judged("identical")
            text = f"{count} of {natural.size} values are others"
            return _Judged("diverged", (Finding("integers", count, 0, "diverged", text),))
        difference = self._measure(natural, value)
        if difference.same_bits:
            return _Judged("identical", error=0.0)
        lost = difference.mask_mismatches - difference.sentinels_lost
        if lost > 0:
            text = f"{lost} of {natural.size} elements are finite on one side only"
            return _Judged("diverged", (Finding("nonfinite", lost, 0, "diverged", text),), math.inf)
        errors = _errors(natural, value, difference)
        precision = self._precision_of(name, at)
        operations = self._count_roundings(name, run, precision)
        findings = self._rounding_findings(errors, precision, difference.measured, operations)
        return _Judged(worst_status(findings), findings, max(errors))

    def _precision_of(self, name: str, at: int) -> Precision:
        record = self._values.records[name, at]
        return POLICY.precision_of_pair(self._precision, record, record)

    def _rounding_findings(
        self, errors: Sequence[float], precision: Precision, elements: int, operations: int
    ) -> tuple[Finding, ...]:
        """Judge the error of the usual row, and those of the worst rows and of all."""
        factor = max(1.0, math.sqrt(operations) / 2)  # roundings of n operations add up as their root
        usual, *others = (error / factor for error in errors)
        worst = max(others)
        return judge_replayed(usual, worst, precision, is_leaf=operations == 1, elements=elements)

    def _count_roundings(self, name: str, run: OperationRun, precision: Precision) -> int:
        """How many roundings one after the other may have made a value of the nearest inputs.

        Each operation rounds once. A product in low precision may round each term of its sums (Higham and
        Mary, "A new approach to probabilistic rounding error analysis", 2019); the limits for float32 hold
        for sums of thousands of terms.
        """
        nodes = [self.nodes[one] for one in self.between(name, run.released) if one not in self._of_weights]
        roundings = sum(1 for node in nodes if not is_view(node))
        if precision.is_wide:
            return 1 + roundings
        return max(1, sum(self._values.terms(one) for one in (self.nodes[name], *nodes) if not is_view(one)))

    def _rounded_inputs_effect(
        self, name: str, at: int, natural: Array | None, precision: Precision, run: OperationRun
    ) -> float:
        """By how much the result changes if each nearest input is changed by a rounding up or down."""
        result = part_of(self.compute_rounded(name, run, precision.unit), at)
        if natural is None or result is None or result.shape != natural.shape:
            return 0.0
        return min(max(_errors(natural, result, self._measure(natural, result))), 1.0)

    def _find_elsewhere(self, run: OperationRun, judged: Mapping[tuple[str, int], _Judged]) -> dict[str, str]:
        """Why the values of nodes that are wrong are not what the target computed with, by name."""
        bad = {name for (name, _), one in judged.items() if one.is_bad}
        released: dict[str, str] = {}
        for name in sorted(bad, key=self.order.__getitem__, reverse=True):
            known = run.released | released.keys()
            for others in self._candidates(name, bad - known, known):
                left_out = frozenset({name, *others})
                if self._is_right_without(left_out, known, judged, run):
                    released.update({one: self._reason(one, judged) for one in left_out if one in bad})
                    break
        return released

    def _candidates(self, name: str, bad: Collection[str], released: Collection[str]) -> list[frozenset[str]]:
        """What may have to be left out with a value: nothing, or what else goes into the same results."""
        users = self.consumers(name, released)
        if not users or name in self._outputs:
            return []
        every = {one for one in bad if one != name and set(self.consumers(one, released)) & set(users)}
        every -= self._outputs
        return [frozenset(), frozenset(every)] if every else [frozenset()]

    def _is_right_without(
        self,
        left_out: frozenset[str],
        released: Collection[str],
        judged: Mapping[tuple[str, int], _Judged],
        run: OperationRun,
    ) -> bool:
        """Whether all that is computed of some values is right if the reference's own stand in their place.

        So it has to be with them wrong, or it may not depend on them.
        """
        without = self.without(run, {*released, *left_out}, len(self.order))
        users = {user for one in left_out for user in self.consumers(one, without.released)}
        errors = [judged[one, 0].error for one in left_out if (one, 0) in judged]
        own = min((error for error in errors if error is not None and error <= 1), default=1.0)
        for user in users:
            outputs = [at for at in range(len(self.nodes[user].shapes)) if (user, at) in self._values.records]
            before = [self._hold_against(user, at, run.memo[user], run) for at in outputs]
            after = [self._judge(user, at, without.memo[user], without) for at in outputs]
            if any(one.is_bad or one.status == "unjudged" for one in after):
                return False
            has_effect = max((one.error or 0.0 for one in after), default=0.0) > _WITHOUT_EFFECT * own
            is_wrong = any(one.is_bad for one in before)
            if has_effect and not is_wrong:
                return False
        return bool(users)

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
        ours, theirs = (
            ArrayArchive(self._values.reference, {text: np.asarray(one)}) for one in (natural, value)
        )
        return measure(ours, ours.records[0], theirs, theirs.records[0])

    def _result(
        self, run: OperationRun, judged: Mapping[tuple[str, int], _Judged], elsewhere: Mapping[str, str]
    ) -> OperationReplay:
        own_errors, nodes, between = [], {}, {}
        natural: dict[str, Array] = {}
        values: dict[str, Array] = {}
        for (name, at), one in judged.items():
            node = self.nodes[name]
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
                if not is_view(self.nodes[other]) and other not in self._of_weights
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
            for n, node in self.nodes.items()
            if node.shapes and not is_view(node) and n not in self._of_weights
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
            ArrayArchive(self._values.reference, natural),
            ArrayArchive(self._values.target, values),
            (len(computing), sum(self.is_valued(name, run.released) for name in computing)),
        )


def _within(test: str, value: float, limit: float, text: str) -> _Judged:
    """What is no more than rounding, and why."""
    return _Judged("within-rounding", (Finding(test, value, limit, "within-rounding", text),), value)


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
