"""Make the call of the reference's module again that made the reference's value, with mutations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property
from typing import Final

import numpy as np

from tensorcap.adapters import CallMutation, Edit, Filled, Operation, Rerun
from tensorcap.diagnosis.search import Cause, Search
from tensorcap.diagnosis.values import Values, classes, finite_or_marked, relative_error
from tensorcap_formats.float_formats import FLOAT_FORMATS, rounded

_REPEATS: Final = 1e-5  # relative error that a call made again may have, by the order of sums
_NARROW: Final = ("bfloat16", "float16")
_CALL: Final = 1 << 20  # elements that a call counts as, besides those it has: it takes a millisecond
_OPERATION: Final = 1 << 15  # elements that an operation counts as: it takes some 30 microseconds at least
_TO_FIND_USED: Final = 0.25  # of the work that is left, that may go to find out what a call uses
_FILLED: Final = (math.nan, -1.0, 1.0)  # what is not used may hold; comparisons take NaN for a small number

Part = tuple[str, str]  # of a call: which of its edits has it, and its name there


def repeat_call(
    rerun: Rerun,
    reference: Values,
    target: Values,
    *,
    target_dtype: str,
    search: Search,
    ignored: Values | None = None,
    is_of_choices: bool = False,
) -> RepeatedCall | None:
    """Make the call as it was.

    Args:
        rerun: The call.
        reference: The value that it has to make, float64; NaN and infinities as they are.
        target: The value that a mutated call is held against, likewise.
        target_dtype: Name of the target's dtype; floats in bfloat16 or float16 are rounded to it.
        search: Whose causes are tried by it.
        ignored: Elements that count as 0, of the same shape; None if all count.
        is_of_choices: Whether rows are weights of what each token chose, whose order means nothing if they
            are not the same in order.

    Returns:
        The call; None if it does not make the reference's value again.
    """
    made = rerun.run(CallMutation())
    if made is None or made.shape != reference.shape:
        return None
    values = made
    if ignored is not None:
        values, reference, target = (np.where(ignored, 0.0, side) for side in (made, reference, target))
    if not np.array_equal(classes(values), classes(reference)):
        return None
    if (
        not relative_error(*(np.where(np.isfinite(side), side, 0.0) for side in (values, reference)))
        <= _REPEATS
    ):
        return None
    if is_of_choices:
        in_order = np.sort(values, axis=-1), np.sort(target, axis=-1)
        is_of_choices = values.shape == target.shape and relative_error(*in_order) > _REPEATS
    return RepeatedCall(
        rerun, made, values, target, target_dtype, search, ignored, is_of_choices=is_of_choices
    )


class RepeatedCall:
    """A call that makes the reference's value again.

    Attributes:
        rerun: The call.
        values: What it makes without a mutation, float64.
        operations: Operations of the module's own code, by key.
    """

    def __init__(
        self,
        rerun: Rerun,
        made: Values,
        values: Values,
        target: Values,
        target_dtype: str,
        search: Search,
        ignored: Values | None,
        *,
        is_of_choices: bool = False,
    ) -> None:
        """Take the call over directly after it was made without a mutation.

        Args:
            rerun: The call.
            made: What it made.
            values: Likewise, with 0 where elements are ignored.
            target: As for `repeat_call`, as are all others.
            target_dtype: Likewise.
            search: Likewise.
            ignored: Likewise.
            is_of_choices: Whether rows mean nothing by their order.
        """
        self.rerun = rerun
        self._made = made
        self._is_sorted = is_of_choices
        self.values = values = np.sort(values, axis=-1) if is_of_choices else values
        target = np.sort(target, axis=-1) if is_of_choices else target
        self.operations: Mapping[str, Operation] = rerun.operations
        shapes = [
            *rerun.tensors.values(),
            *(argument.shape for argument in rerun.arguments.values()),
            *rerun.results.values(),
        ]
        size = sum(map(math.prod, shapes)) + _OPERATION * rerun.operation_count
        self._search, self._work = search, size + _CALL
        self._target, self._ignored = target, ignored
        self._target_classes = classes(target)
        self._dtype = target_dtype if target_dtype in _NARROW else ""
        finite = target[np.isfinite(target)]
        self._usual_size = math.sqrt(float(np.mean(finite**2))) if finite.any() else 1.0
        self._seen: set[tuple[str, bytes]] = set()

    def run(self, mutation: CallMutation) -> Values | None:
        """Make the call with a mutation.

        Returns:
            What it makes, float64, repeated along axes of 1 that are longer in the target; None if that
            cannot be the target, since its shape or the places of NaN and infinities are others, or the
            mutation makes no difference.
        """
        if not self.has_effect(mutation):
            return None
        values = self.make(mutation)
        if values is not None and self._is_sorted and values.ndim:
            values = np.sort(values, axis=-1)
        if values is None or np.array_equal(values, self.values, equal_nan=True):
            return None
        values = _repeated(values, self._target.shape)
        if values is None:
            return None
        if self._ignored is not None:
            values = np.where(self._ignored, 0.0, values)
        if not np.array_equal(classes(self._rounded(values)), self._target_classes):
            return None
        is_same = values.shape == self.values.shape and np.array_equal(values, self.values, equal_nan=True)
        return None if is_same else values

    def affordable(self, causes: Sequence[Cause], calls: int = 1) -> Iterator[Cause]:
        """Yield causes as far as the search goes, as `Search.affordable` does.

        Args:
            causes: The likeliest first.
            calls: How many each costs.
        """
        return self._search.affordable(causes, calls * self._work)

    def make(self, mutation: CallMutation) -> Values | None:
        """Make the call with a mutation, and give what it makes, float64; None if it fails."""
        self._search.left -= self._work
        return self.rerun.run(mutation)

    def has_effect(self, mutation: CallMutation) -> bool:
        """Whether it changes anything that the call uses before it has made the tensor."""
        edited = _edited(mutation)
        rest = replace(mutation, tensors={}, arguments={}, results={})
        return not edited or rest != CallMutation() or not edited <= self._unused

    @property
    def used_tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the tensors that it uses until then, by name."""
        shapes = self.rerun.tensors
        return {name: shape for name, shape in shapes.items() if ("tensors", name) not in self._unused}

    @cached_property
    def _unused(self) -> Set[Part]:
        """Tensors, arguments and results of calls within that have no effect on what the call makes.

        All of a sort are filled with a number at once; if that has an effect, halves of them are, the largest
        groups first. What is not divided when a quarter of the work is spent counts as used.
        """
        arguments = [name for name, argument in self.rerun.arguments.items() if argument.kind == "float"]
        sorts = ("tensors", self.rerun.tensors), ("arguments", arguments), ("results", self.rerun.results)
        groups: list[Sequence[Part]] = [[(sort, name) for name in names] for sort, names in sorts if names]
        unused: set[Part] = set()
        kept = (1 - _TO_FIND_USED) * self._search.left
        while groups and self._search.left - self._work >= kept:
            group = groups.pop(0)
            if all(self._is_unaffected(group, number) for number in _FILLED):
                unused.update(group)
            elif len(group) > 1:
                groups += [group[: len(group) // 2], group[len(group) // 2 :]]
        return unused

    def _is_unaffected(self, parts: Sequence[Part], number: float) -> bool:
        edits: dict[str, dict[str, Edit]] = {"tensors": {}, "arguments": {}, "results": {}}
        for sort, name in parts:
            edits[sort][name] = Filled(number)
        filled = CallMutation(edits["tensors"], {}, edits["arguments"], edits["results"])
        values = self.make(filled)
        return values is not None and np.array_equal(values, self._made, equal_nan=True)

    @property
    def observed(self) -> Values:
        """The target's values, with marks for what is not finite."""
        return self._marked(self._target)

    def predict(self, values: Values) -> Values:
        """What the target holds if the call makes these values: they are rounded to its dtype.

        They are not if that leaves more of the difference: code in low precision rounds more than its result,
        which another rounding does not undo.
        """
        raw, low = (self._marked(side) for side in (values, self._rounded(values)))
        if not self._dtype or values.shape != self._target.shape:
            return raw
        return min((low, raw), key=lambda side: relative_error(self.observed, side))

    def distance(self, values: Values) -> float:
        """Relative error of what the call makes as the target, no unit."""
        return relative_error(self.observed, self._marked(values))

    def is_first(self, kind: str, values: Values) -> bool:
        """Note values that a mutation of a kind makes; false if another one of that kind made the same."""
        entry = kind, values.tobytes()
        is_first = entry not in self._seen
        self._seen.add(entry)
        return is_first

    def _rounded(self, values: Values) -> Values:
        """Round to the target's dtype; what is beyond its range becomes infinite where the target is."""
        if not self._dtype:
            return values
        is_beyond = ~(np.abs(values) < FLOAT_FORMATS[self._dtype].largest) & (self._target_classes > 1)
        return np.where(is_beyond, np.copysign(np.inf, values), rounded(values, self._dtype))

    def _marked(self, values: Values) -> Values:
        """Put marks of a usual size for what is not finite, so that other places of it are a difference."""
        return finite_or_marked(values, self._usual_size)


def _edited(mutation: CallMutation) -> Set[Part]:
    sorts = {"tensors": mutation.tensors, "arguments": mutation.arguments, "results": mutation.results}
    return {(sort, name) for sort, edits in sorts.items() for name in edits}


def _repeated(values: Values, shape: tuple[int, ...]) -> Values | None:
    """Repeat values along axes of 1 to a shape: one sequence stands for all; None if that cannot be."""
    is_repeatable = len(values.shape) == len(shape) and all(
        size in (1, wanted) for size, wanted in zip(values.shape, shape, strict=True)
    )
    return np.array(np.broadcast_to(values, shape)) if is_repeatable else None
