"""What calls make of what mutated calls before them made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from tensorcap.adapters import CallMutation, Replaced
from tensorcap.rerun import CallThrough

NATURAL, CHANGED = CallMutation(), CallMutation(settings={"rate": 2.0})
ONES = np.ones(3)


class Call:
    """A call that is given nothing but arguments that stand for others, and the setting `rate`."""

    def __init__(self, function: Callable[[Mapping[str, Any], float], Any]) -> None:
        self.function = function
        self.count = 0

    def run(self, mutation: CallMutation) -> Any:
        self.count += 1
        given = {name: edit.values for name, edit in mutation.arguments.items() if isinstance(edit, Replaced)}
        return self.function(given, mutation.settings.get("rate", 1.0))


def through(outer: Any, **inner: Any) -> Any:
    return CallThrough(outer, inner)


@pytest.mark.spec("LCL-510")
def test_a_mutation_that_changes_one_of_several_slots_is_run() -> None:
    """Sines are made of the angles of a call that has the rate; cosines of one that has none."""
    angles, places = Call(lambda _, rate: rate * ONES), Call(lambda *_: ONES)
    sines = through(Call(lambda given, _: np.sin(given["angles"])), angles=angles)
    cosines = through(Call(lambda given, _: np.cos(given["angles"])), angles=places)
    call = through(Call(lambda given, _: given["sin"] + given["cos"]), sin=sines, cos=cosines)
    assert np.allclose(call.run(NATURAL), np.sin(1) + np.cos(1))
    assert np.allclose(call.run(CHANGED), np.sin(2) + np.cos(1))


@pytest.mark.spec("LCL-510")
def test_a_mutation_that_changes_no_slot_makes_what_is_known() -> None:
    last = Call(lambda given, _: given["sin"])
    middle = Call(lambda given, _: 2 * given["angles"])
    call = through(last, sin=through(middle, angles=Call(lambda *_: ONES)))
    assert np.allclose(call.run(NATURAL), 2)
    assert np.allclose(call.run(CHANGED), 2)
    assert (middle.count, last.count) == (1, 1)  # what they make is known


@pytest.mark.spec("LCL-510")
def test_a_call_that_fails_is_none() -> None:
    call = through(
        Call(lambda given, _: given["sin"]),
        sin=through(
            Call(lambda given, _: given["angles"]), angles=Call(lambda _, r: None if r > 1 else ONES)
        ),
        cos=through(Call(lambda given, _: given["angles"]), angles=Call(lambda _, rate: rate * ONES)),
    )
    assert np.allclose(call.run(NATURAL), 1)
    assert call.run(CHANGED) is None
