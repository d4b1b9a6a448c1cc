"""Inputs of a model that an archive gives it: by name, or all of them by their places, which is noted."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensorcap.adapters.input_arrays import archived_arrays, note_places
from tensorcap.workload import StoredInput
from tensorcap_formats.dtypes import DTYPES
from tensorcap_formats.errors import UsageError

ONE, TWO = (StoredInput(np.full(3, value, np.float32), DTYPES["float32"]) for value in (1.0, 2.0))


def noted(origins: dict[str, str]) -> Any:
    recorder: Any = SimpleNamespace(facts={})  # of a run: its facts alone are written to
    note_places(origins, recorder)
    return recorder.facts["notes"]


def test_inputs_are_given_by_name_beside_those_that_are_known() -> None:
    given, origins = archived_arrays("net", ["b", "a"], {"a": 5}, {"b": ONE, "of_another": TWO})
    assert (given["a"], given["b"].tolist(), len(given)) == (5, [1.0, 1.0, 1.0], 2)
    assert origins == {"b": "of the archive"}
    assert noted(origins) == []


def test_as_many_of_other_names_are_given_by_their_places_which_is_noted() -> None:
    given, origins = archived_arrays("net", ["p", "q"], {}, {"x": ONE, "y": TWO})
    assert (given["p"].tolist(), given["q"].tolist()) == ([1.0, 1.0, 1.0], [2.0, 2.0, 2.0])
    (note,) = noted(origins)
    assert "p is x of the archive, by its place; q is y of the archive, by its place" in note


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (["p", "q", "r"], "net: found the inputs x, y, expected p, q, r"),
        (["x", "z"], "net: found the inputs x, y, expected 'z' too"),
    ],
)
def test_what_the_archive_lacks_is_one_line(own: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        archived_arrays("net", own, {}, {"x": ONE, "y": TWO})
