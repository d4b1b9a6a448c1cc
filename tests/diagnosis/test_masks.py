"""Masks whose rows see one column more or less."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tensorcap.adapters.torch.masks import change_extent

CAUSAL = ["1000", "1100", "1110", "1111"]
WINDOW = ["1000", "1100", "0110", "0011"]
WAYS = [
    pytest.param(CAUSAL, "one further", ["1100", "1110", "1111", "1111"], id="further"),
    pytest.param(CAUSAL, "one fewer", ["1000", "1000", "1100", "1110"], id="fewer"),
    pytest.param(WINDOW, "longer window", ["1000", "1100", "1110", "0111"], id="longer"),
    pytest.param(WINDOW, "shorter window", ["1000", "0100", "0010", "0001"], id="shorter"),
]


def matrix(rows: list[str]) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    return np.array([[letter == "1" for letter in row] for row in rows])


@pytest.mark.spec("DIA-39")
@pytest.mark.parametrize(("rows", "way", "expected"), WAYS)
def test_a_mask_sees_one_more_or_less(rows: list[str], way: str, expected: list[str]) -> None:
    found = change_extent(torch.from_numpy(matrix(rows))[None], way)
    assert np.array_equal(found.numpy()[0], matrix(expected))


@pytest.mark.spec("DIA-39")
@pytest.mark.parametrize(("rows", "way", "expected"), WAYS)
def test_a_mask_of_numbers_stays_one(rows: list[str], way: str, expected: list[str]) -> None:
    least = torch.finfo(torch.bfloat16).min
    mask = torch.where(torch.from_numpy(matrix(rows)), 0.0, least).bfloat16()
    found = change_extent(mask, way)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found == 0, torch.from_numpy(matrix(expected)))
    assert set(found.flatten().tolist()) == {0.0, least}
