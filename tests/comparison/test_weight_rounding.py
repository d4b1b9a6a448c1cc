"""Weights of few bits are held against rounding to their own numbers, which their values alone show too."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tensorcap.comparison.weight_mistakes import find_weight_mistake
from tensorcap.comparison.weight_rounding import (
    WeightNumbers,
    find_numbers,
    levels_of,
    measure_rounding,
)
from tensorcap_formats.dtypes import Array

RNG = np.random.default_rng(0)
WEIGHT = RNG.normal(size=(128, 256)) * np.exp(RNG.normal(size=(128, 1)) / 2)


def quantised(bits: int, group: int, *, down: bool = False, zero: float = 0.0, limit: float = 1.0) -> Any:
    """Numbers with a scale for each group of a row, and what is wrong with them."""
    groups = WEIGHT.reshape(128, -1, group)
    most = 2 ** (bits - 1) - 1
    steps = limit * np.abs(groups).max(axis=-1) / most
    numbers = groups / steps[..., None]
    numbers = np.clip(np.floor(numbers) if down else np.rint(numbers), -most - 1, most)
    values = ((numbers + zero) * steps[..., None]).reshape(WEIGHT.shape)
    return WeightNumbers(f"int{bits}", values, steps)


@pytest.mark.spec("POL-280")
@pytest.mark.parametrize(("bits", "group"), [(8, 256), (8, 32), (4, 128), (4, 16)])
def test_the_error_of_rounding_is_a_step_over_the_root_of_12(bits: int, group: int) -> None:
    weight = quantised(bits, group)
    expected = np.sqrt(np.mean(np.repeat(weight.steps, group, axis=1) ** 2 / 12))
    assert math.isclose(np.sqrt(weight.variances.mean()), expected, rel_tol=1e-9)
    rounding = measure_rounding(WEIGHT, weight)
    assert rounding.is_nearest
    assert rounding.value <= 1
    assert 0.95 < rounding.ratio < 1.05


@pytest.mark.spec("POL-280")
@pytest.mark.parametrize(
    ("wrong", "ratio"),
    [
        pytest.param(quantised(8, 256, zero=1), math.sqrt(13), id="a zero point off by one"),
        pytest.param(quantised(8, 256, down=True), 2, id="rounded down"),
    ],
)
def test_mistakes_are_as_many_times_the_error_of_rounding(wrong: WeightNumbers, ratio: float) -> None:
    assert math.isclose(measure_rounding(WEIGHT, wrong).ratio, ratio, rel_tol=0.02)


@pytest.mark.spec("POL-280")
def test_a_group_that_alone_is_wrong_is_seen() -> None:
    right = quantised(4, 16)
    values = right.values.copy()
    values[5, 32:48] -= right.steps[5, 2]
    weight = WeightNumbers("int4", values, right.steps)
    inputs = RNG.normal(size=(64, 256))
    assert measure_rounding(WEIGHT, weight, inputs).value > 1.5
    assert "1 off in 1 of 2048 groups" in find_weight_mistake(WEIGHT, weight).text


@pytest.mark.spec("POL-280")
@pytest.mark.parametrize(("bits", "group"), [(8, 256), (8, 64), (4, 256), (4, 128), (4, 16)])
def test_numbers_are_found_in_the_values_alone(bits: int, group: int) -> None:
    made = quantised(bits, group)
    found = find_numbers(made.values)
    assert found is not None
    assert (found.number, found.text) == (f"int{bits}", made.text)
    assert np.allclose(found.steps, made.steps, rtol=1e-6)


@pytest.mark.spec("POL-280")
def test_numbers_with_a_zero_point_are_found_in_the_values_alone() -> None:
    low, high = WEIGHT.min(axis=1, keepdims=True) / 4, WEIGHT.max(axis=1, keepdims=True)
    steps = (high - low) / 15
    zeros = np.rint(-low / steps)
    numbers = np.clip(np.rint(WEIGHT / steps) + zeros, 0, 15)
    found = find_numbers((numbers - zeros) * steps)
    assert found is not None
    assert found.text == "uint4 with a scale for each row"
    assert np.allclose(found.steps, steps)


@pytest.mark.spec("POL-280")
@pytest.mark.parametrize(
    "values", [WEIGHT, WEIGHT.astype(np.float16).astype(float), np.zeros((16, 64)), np.ones(400)]
)
def test_other_values_are_no_numbers_of_few_bits(values: Array) -> None:
    assert find_numbers(values) is None


@pytest.mark.spec("POL-282")
@pytest.mark.parametrize(
    ("weight", "text"),
    [
        pytest.param(quantised(8, 32, zero=-1), "its zero point is 1 off", id="zero point"),
        pytest.param(quantised(4, 32, zero=8), "unsigned ones read as signed: all are 8", id="unsigned"),
        pytest.param(quantised(4, 32, down=True), "rounded down", id="down"),
        pytest.param(quantised(8, 32, limit=0.2), "beyond the largest number cut off", id="cut off"),
    ],
)
def test_mistakes_of_numbers_are_named(weight: WeightNumbers, text: str) -> None:
    assert text in find_weight_mistake(WEIGHT, weight).text


@pytest.mark.spec("POL-282")
@pytest.mark.parametrize(
    ("move", "text"),
    [
        pytest.param(lambda s: np.roll(s, 1, axis=0), "those of 1 row behind", id="the row before"),
        pytest.param(lambda s: s[::-1], "in the reverse order of rows", id="reverse"),
        pytest.param(lambda s: s.T.reshape(s.shape), "rows and groups are exchanged", id="exchanged"),
        pytest.param(lambda s: 1.3 * s, "all its scales are 1.3 times", id="factor"),
    ],
)
def test_mistakes_of_scales_are_named(move: Any, text: str) -> None:
    right = quantised(8, 32)
    steps = move(right.steps)
    values = right.numbers * np.repeat(steps, 32, axis=1)
    assert text in find_weight_mistake(WEIGHT, WeightNumbers("int8", values, steps)).text


@pytest.mark.spec("POL-280")
def test_levels_of_formats() -> None:
    assert levels_of("int3") == (-4, -3, -2, -1, 0, 1, 2, 3)
    assert levels_of("MXFP4")[-3:] == (3, 4, 6)
    assert len(levels_of("float8_e4m3fn")) == 253
    assert levels_of("int32") == levels_of("float32") == levels_of("") == ()
