"""A call seen through a later one that is given its result, where the target has that one's result alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from tensorcap.adapters import Argument, CallMutation, Operation, Replaced, Rerun
from tensorcap_formats.dtypes import Array

MOST_CALLS: Final = 1 << 12  # that are made to find out what is wrong in them


class CallThrough:
    """What a call makes of what mutated calls before it made; all but its values is that of the first one.

    Attributes:
        outer: The call that is made last, without a mutation of its own.
        inner: The calls that make some of its arguments, by the names of these; all are mutated alike.
    """

    def __init__(self, outer: Rerun, inner: Mapping[str, Rerun]) -> None:
        self.outer, self.inner = outer, inner
        self._first = next(iter(inner.values()))
        self._made: dict[str, Array] = {}  # what the inner calls make without a mutation
        self._result: Array | None = None  # what the outer one makes of that
        self._left = MOST_CALLS

    @property
    def site(self) -> str:
        """As in `Rerun`."""
        return self._first.site

    @property
    def class_name(self) -> str:
        """As in `Rerun`."""
        return self._first.class_name

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """As in `Rerun`."""
        return self._first.tensors

    @property
    def settings(self) -> Mapping[str, Any]:
        """As in `Rerun`."""
        return self._first.settings

    @property
    def arguments(self) -> Mapping[str, Argument]:
        """As in `Rerun`."""
        return self._first.arguments

    @property
    def results(self) -> Mapping[str, tuple[int, ...]]:
        """As in `Rerun`."""
        return self._first.results

    @property
    def operations(self) -> Mapping[str, Operation]:
        """As in `Rerun`."""
        return self._first.operations

    @property
    def operation_count(self) -> int:
        """How many operations all the calls did."""
        inner = sum(call.operation_count for call in self.inner.values())
        return inner + self.outer.operation_count

    @property
    def alike(self) -> Sequence[Mapping[str, str]]:
        """As in `Rerun`."""
        return self._first.alike

    def read_tensor(self, name: str) -> Array:
        """As in `Rerun`."""
        return self._first.read_tensor(name)

    def run(self, mutation: CallMutation) -> Array | None:
        """Make the inner calls with a mutation, and the outer one of what they make.

        None if that is what they make without it, and beyond the most calls.
        """
        return self._run(mutation, needs_change=True)

    def _run(self, mutation: CallMutation, *, needs_change: bool) -> Array | None:
        """Make the calls; without a change what they make without a mutation, if that is not needed.

        Of several inner calls that are calls through others, a mutation may change what one alone makes.
        """
        is_natural = mutation == CallMutation()
        self._left -= 1
        if self._left < 0:
            return None
        made: dict[str, Array] = {}
        for name, call in self.inner.items():
            if isinstance(call, CallThrough):
                values = call._run(mutation, needs_change=False)
            else:
                values = call.run(mutation)
            if values is None:
                return None
            made[name] = values
        is_changed = not all(_is_same(value, self._made.get(name)) for name, value in made.items())
        if not is_natural and not is_changed:
            return None if needs_change else self._result
        result = self.outer.run(CallMutation(arguments={name: Replaced(made[name]) for name in made}))
        if is_natural:
            self._made, self._result = made, result
        return result


def _is_same(values: Array, others: Array | None) -> bool:
    return others is not None and np.array_equal(values, others, equal_nan=True)
