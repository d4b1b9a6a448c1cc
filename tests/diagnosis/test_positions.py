"""Positions that are counted from another number."""

from __future__ import annotations

import numpy as np
import pytest

from tests.diagnosis.conftest import Diagnose

COUNTED = np.arange(12)[None].repeat(2, 0)


@pytest.mark.spec("DIA-45")
@pytest.mark.parametrize("step", [1, -1, 2])
def test_positions_from_another_number_are_told(diagnosed: Diagnose, step: int) -> None:
    found = diagnosed(COUNTED, COUNTED + step, key="0/wpe/input.input")
    assert found.explanations[0].kind == "position-offset"
    assert found.explanations[0].facts == {"offset": step}


@pytest.mark.spec("DIA-45")
def test_one_position_is_known_by_its_name(diagnosed: Diagnose) -> None:
    found = diagnosed(np.array([[21]]), np.array([[20]]), key="1/rotary/input.position_ids")
    assert [e.kind for e in found.explanations] == ["position-offset"]


@pytest.mark.spec("DIA-45")
def test_other_whole_numbers_are_no_positions(diagnosed: Diagnose) -> None:
    ids = np.array([[5, 17, 3, 250, 9, 1, 77, 40]])
    found = diagnosed(ids, ids + 1, key="0/wte/input.input")
    assert {e.kind for e in found.explanations} == {"offset"}


@pytest.mark.spec("DIA-45")
def test_positions_that_stand_still_are_not_counted_from_elsewhere(diagnosed: Diagnose) -> None:
    found = diagnosed(COUNTED, np.full_like(COUNTED, 3), key="0/rotary/input.position_ids")
    assert "position-offset" not in {e.kind for e in found.explanations}
