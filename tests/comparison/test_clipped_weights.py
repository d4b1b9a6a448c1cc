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


@pytest.mark.spec("POL-282")
def test_numbers_that_wrapped_around_are_named() -> None:
    steps = np.abs(WEIGHT).max(axis=1, keepdims=True) / 131  # where 127 is the largest number
    numbers = np.rint(WEIGHT / steps).astype(np.int64).astype(np.int8).astype(np.float64)
    found = find_weight_mistake(WEIGHT, WeightNumbers("int8", numbers * steps, steps))
    assert found.kind == "weight-wrapped"
    assert "wrapped around to the other end, 256 steps off" in found.text
