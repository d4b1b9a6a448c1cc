"""Ranges of weights that a search chose smaller than their values, and ones that cut off an outlier."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorcap.comparison.clipped_weights import cut_of_choice
from tensorcap.comparison.weight_mistakes import find_weight_mistake
from tensorcap.comparison.weight_rounding import WeightNumbers

RNG = np.random.default_rng(5)
WEIGHT = RNG.normal(size=(32, 64))
INPUTS = RNG.normal(size=(48, 64))


def in_four_bits(share: Any) -> WeightNumbers:
    """Groups of 32 in int4, each of a share of its largest value, `[rows, groups]`."""
    groups = WEIGHT.reshape(32, 2, 32)
    steps = share * np.abs(groups).max(axis=-1) / 7
    numbers = np.clip(np.rint(groups / steps[..., None]), -8, 7)
    return WeightNumbers("int4", (numbers * steps[..., None]).reshape(32, 64), steps)


@pytest.mark.spec("POL-642")
def test_ranges_that_lose_little_may_be_chosen() -> None:
    found = cut_of_choice(WEIGHT, in_four_bits(np.full((32, 2), 0.85)), INPUTS)
    assert found is not None
    assert found < 1.5


@pytest.mark.spec("POL-642")
@pytest.mark.parametrize(
    ("share", "outlier"), [pytest.param(0.3, 1, id="a-third-is-left"), pytest.param(0.6, 8, id="an-outlier")]
)
def test_a_range_that_loses_much_of_one_output_is_no_choice(share: float, outlier: float) -> None:
    shares = np.ones((32, 2))
    shares[9, 0] = share
    inputs = INPUTS.copy()
    inputs[:, np.abs(WEIGHT[9, :32]).argmax()] *= outlier
    found = cut_of_choice(WEIGHT, in_four_bits(shares), inputs)
    assert found is None or found > 2


@pytest.mark.spec("POL-642")
@pytest.mark.parametrize(
    ("whole", "is_choice"),
    [pytest.param([], True, id="all-alike"), pytest.param([3], False, id="but-for-a-row")],
)
def test_one_output_may_lose_more_if_all_ranges_are_cut_alike(whole: list[int], is_choice: bool) -> None:
    """Four fifths of each range are left, and the largest weight of row 9 has an input of outliers."""
    draws = np.random.default_rng(6)
    weight, inputs = draws.normal(size=(32, 64)), draws.normal(size=(48, 64))
    inputs[:, np.abs(weight[9]).argmax()] *= 4
    shares = np.full((32, 2), 0.8)
    shares[whole] = 1
    groups = weight.reshape(32, 2, 32)
    low, high = groups.min(axis=-1) * shares, groups.max(axis=-1) * shares
    steps = (high - low) / 15
    zeros = np.rint(-low / steps)
    numbers = np.clip(np.rint(groups / steps[..., None]) + zeros[..., None], 0, 15)
    values = ((numbers - zeros[..., None]) * steps[..., None]).reshape(32, 64)
    errors = np.square(inputs @ (values - weight).T).sum(axis=0)
    whole_ranges = np.repeat(np.square((groups.max(axis=-1) - groups.min(axis=-1)) / 15) / 12, 32, axis=1)
    by_row = np.sqrt(errors / (whole_ranges @ np.square(inputs).sum(axis=0)))
    assert by_row.argmax() == 9
    assert np.sqrt(np.square(by_row).mean()) < 2 < by_row[9] / 1.5
    found = cut_of_choice(weight, WeightNumbers("uint4", values, steps, zeros), inputs)
    assert found is not None
    assert (found <= 2) == is_choice


@pytest.mark.spec("POL-282")
def test_numbers_that_wrapped_around_are_named() -> None:
    steps = np.abs(WEIGHT).max(axis=1, keepdims=True) / 131  # where 127 is the largest number
    numbers = np.rint(WEIGHT / steps).astype(np.int64).astype(np.int8).astype(np.float64)
    found = find_weight_mistake(WEIGHT, WeightNumbers("int8", numbers * steps, steps))
    assert found.kind == "weight-wrapped"
    assert "wrapped around to the other end, 256 steps off" in found.text
