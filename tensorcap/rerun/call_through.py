"""Calls of which the target has something else than the result: that of a later call, or some tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tensorcap.adapters import Argument, CallMutation, Operation, Replaced, Rerun
from tensorcap.alignment import Gather
from tensorcap_formats.dtypes import Array


class _SeenCall:
    """A call that is mutated, of which something else than its result is seen.

    Args:
        call: The call.
    """

    def __init__(self, call: Rerun) -> None:
        self._call = call

    @property
    def site(self) -> str:
        """As in `Rerun`."""
        return self._call.site

    @property
    def class_name(self) -> str:
        """As in `Rerun`."""
        return self._call.class_name

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """As in `Rerun`."""
        return self._call.tensors

    @property
    def settings(self) -> Mapping[str, Any]:
        """As in `Rerun`."""
        return self._call.settings

    @property
    def arguments(self) -> Mapping[str, Argument]:
        """As in `Rerun`."""
        return self._call.arguments

    @property
    def results(self) -> Mapping[str, tuple[int, ...]]:
        """As in `Rerun`."""
        return self._call.results

    @property
    def operations(self) -> Mapping[str, Operation]:
        """As in `Rerun`."""
        return self._call.operations

    @property
    def operation_count(self) -> int:
        """As in `Rerun`."""
        return self._call.operation_count

    @property
    def alike(self) -> Sequence[Mapping[str, str]]:
        """As in `Rerun`."""
        return self._call.alike

    def settings_of(self, site: str) -> Mapping[str, Any]:
        """As in `Rerun`."""
        return self._call.settings_of(site)

    def read_tensor(self, name: str) -> Array:
        """As in `Rerun`."""
        return self._call.read_tensor(name)


class CallThrough(_SeenCall):
    """What a call makes of what mutated calls before it made; all but its values is that of the first one.

    Attributes:
        outer: The call that is made last, without a mutation of its own.
        inner: The calls that make some of its arguments, by the names of these; all are mutated alike.
    """

    def __init__(self, outer: Rerun, inner: Mapping[str, Rerun]) -> None:
        super().__init__(next(iter(inner.values())))
        self.outer, self.inner = outer, inner
        self._natural: dict[str, Array] = {}  # what the inner calls make without a mutation
        self._result: Array | None = None  # what the outer one makes of that

    @property
    def operation_count(self) -> int:
        """How many operations all the calls did."""
        inner = sum(call.operation_count for call in self.inner.values())
        return inner + self.outer.operation_count

    def run(self, mutation: CallMutation) -> Array | None:
        """Make the inner calls with a mutation; the outer one of what they make, unless it is the same."""
        made: dict[str, Replaced] = {}
        for name, call in self.inner.items():
            values = call.run(mutation)
            if values is None:
                return None
            made[name] = Replaced(values)
        values_by_name = {name: one.values for name, one in made.items()}
        if self._natural and all(_is_same(v, self._natural.get(n)) for n, v in values_by_name.items()):
            return self._result
        result = self.outer.run(CallMutation(arguments=made))
        if mutation == CallMutation():
            self._natural, self._result = values_by_name, result
        return result


class GatheredCall(_SeenCall):
    """A call of which the tokens count that both sides have, one after the other.

    Args:
        call: The call, which makes a tensor of the reference's shape.
        gather: What of it counts.
        shape: That shape.
    """

    def __init__(self, call: Rerun, gather: Gather, shape: tuple[int, ...]) -> None:
        super().__init__(call)
        self._gather, self._shape = gather, shape

    def run(self, mutation: CallMutation) -> Array | None:
        """Make the call; None if it fails, or makes a tensor of another shape."""
        values = self._call.run(mutation)
        return None if values is None or values.shape != self._shape else self._gather.of_reference(values)


def _is_same(values: Array, others: Array | None) -> bool:
    return others is not None and np.array_equal(values, others, equal_nan=True)
