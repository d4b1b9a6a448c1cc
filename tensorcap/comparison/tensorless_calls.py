"""Calls of modules that are given no tensors, as of a table of positions: what they make is all their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import Key
from tensorcap_formats.run_info import RunInfo


class GivenValues:
    """What calls of two runs were given that is no tensor.

    Args:
        reference: The trusted archive.
        run: The archive under test.
    """

    def __init__(self, reference: Archive, run: Archive) -> None:
        self._sides = _by_call(reference.values), _by_call(run.values)

    def are_equal(self, reference: Key, run: Key) -> bool:
        """Whether two calls were given the same values, if under other names.

        Args:
            reference: Of a record of the reference's call.
            run: Of a record of the other run's.
        """
        ours, theirs = (
            {name: value for name, value in calls.get(key.where, {}).items() if name.startswith("input")}
            for calls, key in zip(self._sides, (reference, run), strict=True)
        )
        if ours.keys() == theirs.keys():
            return ours == theirs
        return sorted(map(repr, ours.values())) == sorted(map(repr, theirs.values()))


def has_all_inputs(info: RunInfo, site: str) -> bool:
    """Whether all tensors that a module was given were recorded, by what a run says of its capture."""
    scope = info.scope
    if scope is None or not scope.inputs or scope.include or scope.exclude:
        return False
    return not any(point.site == site and point.slots for point in info.points)


def _by_call(values: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Values by slot, of each call by `Key.where`."""
    by_call: dict[str, dict[str, Any]] = {}
    for text, value in values.items():
        call, _, slot = text.rpartition("/")
        by_call.setdefault(call, {})[slot] = value
    return by_call
