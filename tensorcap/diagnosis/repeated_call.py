"""Make the call of the reference's module again that made the reference's value, with mutations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np

from tensorcap.adapters import CallMutation, Operation, Rerun
from tensorcap.diagnosis.values import Values, relative_error

_REPEATS: Final = 1e-5  # relative error that a call made again may have, by the order of sums
_WORK: Final = 1 << 36  # elements of tensors, arguments and results that all calls together may have


def repeat_call(rerun: Rerun, reference: Values, target_shape: tuple[int, ...]) -> RepeatedCall | None:
    """Make the call as it was.

    Args:
        rerun: The call.
        reference: The value that it has to make, float64.
        target_shape: Shape that a mutated call has to make, to be compared.

    Returns:
        The call; None if it does not make the reference's value again.
    """
    values = rerun.run(CallMutation())
    if values is None or values.shape != reference.shape:
        return None
    if not relative_error(values, reference) <= _REPEATS:
        return None
    return RepeatedCall(rerun, values, target_shape)


class RepeatedCall:
    """A call that makes the reference's value again.

    Attributes:
        rerun: The call.
        values: What it makes without a mutation, float64.
        operations: Operations of the module's own code, by key.
        affordable_calls: How many calls may be made of each list of mutations.
    """

    def __init__(self, rerun: Rerun, values: Values, target_shape: tuple[int, ...]) -> None:
        """Take the call over directly after it was made without a mutation."""
        self.rerun = rerun
        self.values = values
        self.operations: Mapping[str, Operation] = rerun.operations
        shapes = [
            *rerun.tensors.values(),
            *(argument.shape for argument in rerun.arguments.values()),
            *rerun.results.values(),
        ]
        self.affordable_calls = _WORK // (1 + sum(map(math.prod, shapes)))
        self._target_shape = target_shape
        self._seen: set[tuple[str, bytes]] = set()

    def run(self, mutation: CallMutation) -> Values | None:
        """Make the call with a mutation.

        Returns:
            What it makes, float64; None if that cannot be the target, or the mutation makes no difference.
        """
        values = self.rerun.run(mutation)
        if values is None or values.shape != self._target_shape or not np.isfinite(values).all():
            return None
        return None if np.array_equal(values, self.values) else values

    def is_first(self, kind: str, values: Values) -> bool:
        """Note values that a mutation of a kind makes; false if another one of that kind made the same."""
        entry = kind, values.tobytes()
        is_first = entry not in self._seen
        self._seen.add(entry)
        return is_first
