"""The target by the reference's own module, called again on the target's values with something changed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from tensorcap.adapters.edits import CallMutation, Ordered, Rerun
from tensorcap.diagnosis.context import PairContext
from tensorcap.diagnosis.mutations import (
    SMALL,
    Mutation,
    alterations,
    in_low_precision,
    kind_of_setting,
    mutations_of,
    of_experts,
    rounded_tensors,
)
from tensorcap.diagnosis.scoring import LESSENED, Hypothesis, Scorer, Values, relative_error
from tensorcap.diagnosis.simple import hint_of, named

_REPEATS: Final = 1e-5  # what a call that is made again may leave of what it made the first time
_LARGEST: Final = 1 << 26  # elements of a tensor that is put in another order
_WORK: Final = 1 << 36  # elements of tensors, arguments and results that all calls together have to do with
_NARROW: Final = ("bfloat16", "float16")
_STEPS: Final = 32
_FACTORS: Final = tuple(2.0**power for power in range(-8, 9) if power)
_MOST_EXPERTS: Final = 128
_ROWS_PER_EXPERT: Final = 8
_FAINT: Final = 0.1  # share of the largest weight that an expert needs to count


def mutation_hypotheses(exhibit: PairContext, scales: Scorer, rerun: Rerun | None) -> Iterator[Hypothesis]:
    """Every change, each by itself.

    Experts in any order and altered operations are tried only where nothing so far explains the pair.
    """
    if rerun is None or exhibit.window is not None:
        return
    usual = rerun.made(CallMutation())
    if usual is None or usual.shape != exhibit.r.shape:
        return
    if not relative_error(usual, exhibit.r) <= _REPEATS:
        return
    operations = rerun.operations
    shapes = [
        *rerun.tensors.values(),
        *(argument.shape for argument in rerun.arguments.values()),
        *rerun.results.values(),
    ]
    most = _WORK // (1 + sum(map(math.prod, shapes)))
    tried = _Tried(exhibit, rerun, usual)
    yield from tried.all_of(mutations_of(exhibit, rerun, _LARGEST)[:most])
    dtype = exhibit.target.dtype.name
    if dtype in _NARROW:
        yield from tried.all_of(rounded_tensors(rerun, dtype)[:most])
    if most > _STEPS:
        for name, value in rerun.settings.items():
            if isinstance(value, float) and abs(value) >= SMALL:
                yield from tried.fitted(name, value)
    if scales.is_explained:
        return
    if dtype in _NARROW:
        yield from tried.all_of(in_low_precision(rerun, dtype))
    yield from tried.experts()
    yield from tried.all_of(alterations(operations)[:most])


class _Tried:
    """Calls a module again and again, and tells what comes of it."""

    def __init__(self, exhibit: PairContext, rerun: Rerun, usual: Values) -> None:
        self._exhibit = exhibit
        self._rerun = rerun
        self._usual = usual
        self._seen: set[tuple[str, bytes]] = set()

    def all_of(self, found: list[Mutation]) -> Iterator[Hypothesis]:
        """Each change that makes a difference; those that make the same one are told once."""
        logs = math.log(max(len(found), 1))
        for one in found:
            made = self._made(one.change)
            if made is not None and (one.kind, made.tobytes()) not in self._seen:
                self._seen.add((one.kind, made.tobytes()))
                text = f"the target is what {self._rerun.class_name} makes {one.text}"
                yield self._trial(one.kind, text, made, 0, logs, one.hint, dict(one.facts))

    def fitted(self, name: str, value: float) -> Iterator[Hypothesis]:
        """Another number for a setting: the best of some factors, then by golden section."""
        before = relative_error(self._exhibit.t, self._usual) if self._exhibit.is_same_shape else 1.0

        def left(factor: float) -> float:
            made = self._made(CallMutation(settings={name: value * factor}))
            return math.inf if made is None else relative_error(self._exhibit.t, made)

        errors = {factor: left(factor) for factor in _FACTORS}
        best = min(errors, key=lambda factor: errors[factor])
        if errors[best] >= before:
            return
        low, high = math.log(best / 2), math.log(best * 2)
        ratio = (math.sqrt(5) - 1) / 2
        for _ in range(_STEPS):
            inner, outer = high - ratio * (high - low), low + ratio * (high - low)
            if left(math.exp(inner)) < left(math.exp(outer)):
                high = outer
            else:
                low = inner
        factor = min((math.exp((low + high) / 2), best), key=left)
        made = self._made(CallMutation(settings={name: value * factor}))
        if made is None or relative_error(self._exhibit.t, made) > LESSENED * before:
            return
        names = named(factor, self._exhibit, 1e-3)
        kind, hint = kind_of_setting(name, self._rerun.class_name)
        text = (
            f"the target is what {self._rerun.class_name} makes with {value * factor:.6g} in the place of "
            f"{value:g} for its setting {name}" + (f", which is {names[0]} times that" if names else "")
        )
        facts = {"setting": name, "reference": value, "target": value * factor, "equals": list(names)}
        logs = math.log(_STEPS + len(_FACTORS))
        yield self._trial(kind, text, made, 1, logs, hint or hint_of(names), facts)

    def experts(self) -> Iterator[Hypothesis]:
        """Experts in any order.

        Each expert makes, in the place of all, what it would of every row. How much of each a row has tells
        which the reference chose for it and which the target.
        """
        names = of_experts(self._exhibit, self._rerun.tensors)
        r, t = self._exhibit.r, self._exhibit.t
        count = self._rerun.tensors[names[0]][0] if names else 0
        if not 1 < count <= min(_MOST_EXPERTS, r.shape[-1] - 1) or r.shape != t.shape:
            return
        width = r.shape[-1]
        rows = r.size // width
        picked = np.linspace(0, rows - 1, min(rows, _ROWS_PER_EXPERT * count)).astype(np.int64)
        alone = []
        for expert in range(count):
            of_one = Ordered(0, np.full(count, expert))
            made = self._rerun.made(CallMutation(dict.fromkeys(names, of_one)))
            if made is None or made.shape != r.shape or not np.isfinite(made).all():
                return
            alone.append(made.reshape(rows, width)[picked])
        inverse = np.linalg.pinv(np.stack(alone, axis=-1))
        ours, theirs = ((inverse @ side.reshape(rows, width, 1)[picked])[..., 0] for side in (r, t))
        shares = _strong(theirs).T @ _strong(ours)
        order = np.where(shares.any(axis=0), shares.argmax(axis=0), np.arange(count))
        if np.array_equal(order, np.arange(count)):
            return
        made = self._made(CallMutation(dict.fromkeys(names, Ordered(0, order))))
        if made is not None:
            shown = ", ".join(map(str, order[:16])) + (", …" if count > 16 else "")
            text = f"the target is what {self._rerun.class_name} makes with its experts in the order {shown}"
            facts = {"parameters": list(names), "order": order.tolist()}
            logs = count * math.log(count)
            yield self._trial("expert-order", text, made, 0, logs, "Experts are in another order.", facts)

    def _made(self, change: CallMutation) -> Values | None:
        """What a change makes; None where it makes nothing that could be the target, or no difference."""
        made = self._rerun.made(change)
        if made is None or made.shape != self._exhibit.t.shape or not np.isfinite(made).all():
            return None
        return None if np.array_equal(made, self._usual) else made

    def _trial(
        self,
        kind: str,
        text: str,
        made: Values,
        parameters: int,
        logs: float,
        hint: str,
        facts: dict[str, object],
    ) -> Hypothesis:
        baseline = self._exhibit.baseline
        return Hypothesis(kind, text, self._exhibit.t, made, baseline, parameters, logs, hint, facts)


def _strong(weights: Values) -> Values:
    """The weights of each row without those that are next to nothing."""
    size = np.abs(weights)
    return np.where(size >= _FAINT * size.max(axis=1, keepdims=True), size, 0.0)
