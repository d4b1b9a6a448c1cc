"""Weights that were rounded to int8 or int4 and made floats again are told as such."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tensorcap.comparison import find_weight_grid
from tensorcap.comparison.preflight import item_text, preflight
from tensorcap.diagnosis import diagnose
from tensorcap_formats.dtypes import Array

WEIGHT = np.random.default_rng(4).normal(size=(48, 256))


def rounded(groups: Array, largest: int) -> Array:
    step = np.abs(groups).max(axis=-1, keepdims=True).astype(np.float16).astype(float) / largest
    return np.asarray(np.clip(np.rint(groups / step), -largest, largest) * step)


GRIDS = [
    pytest.param(
        lambda w: rounded(w.reshape(1, -1), 127).reshape(w.shape), 8, "the whole tensor", id="tensor"
    ),
    pytest.param(lambda w: rounded(w, 127), 8, "each row", id="rows"),
    pytest.param(lambda w: rounded(w.T, 127).T, 8, "each column", id="columns"),
    pytest.param(lambda w: rounded(w.reshape(-1, 32), 127).reshape(w.shape), 8, "32 values", id="blocks"),
    pytest.param(lambda w: rounded(w.reshape(-1, 128), 7).reshape(w.shape), 4, "128 values", id="int4"),
]


@pytest.mark.spec("PRE-90")
@pytest.mark.parametrize(("quantise", "bits", "scope"), GRIDS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_the_grid_of_rounded_weights_is_found(
    quantise: Callable[[Array], Array], bits: int, scope: str, dtype: Any
) -> None:
    unit = float(np.finfo(dtype).eps) / 2
    grid = find_weight_grid(WEIGHT, quantise(WEIGHT).astype(dtype).astype(np.float64), unit)
    assert grid is not None
    assert (grid.bits, grid.scope) == (bits, scope)


@pytest.mark.spec("PRE-90")
@pytest.mark.parametrize(
    "target",
    [
        pytest.param(WEIGHT + 1e-3, id="off-by-a-constant"),
        pytest.param(rounded(WEIGHT, 127)[::-1], id="rows-in-another-order"),
        pytest.param(1.1 * rounded(WEIGHT, 127), id="a-wrong-scale"),
        pytest.param(np.zeros_like(WEIGHT), id="zeros"),
        pytest.param(WEIGHT.astype(np.float16).astype(np.float64), id="rounded-to-float16"),
    ],
)
def test_other_values_lie_on_no_grid(target: Array) -> None:
    assert find_weight_grid(WEIGHT, target) is None


@pytest.mark.spec("PRE-90", "DIA-17")
def test_weights_rounded_to_int8_are_told_as_that(make_archive: Callable[..., Any]) -> None:
    key = "0/layer/param.weight"
    reference, target = (make_archive({key: w.astype(np.float32)}) for w in (WEIGHT, rounded(WEIGHT, 127)))
    items = [item for item in preflight(reference, target).items if item.kind == "parameters"]
    assert [item_text(item) for item in items if "not the same numbers" in item_text(item)] == []
    assert "1 parameter rounded to int8 with a scale for each row in the target" in item_text(items[0])
    first = diagnose(reference, target, key).explanations[0]
    assert (first.kind, first.facts["dtype"], first.facts["scale"]) == ("rounded", "int8", "each row")


@pytest.mark.spec("PRE-90")
def test_the_lowest_number_of_a_signed_type_is_one_of_the_grid() -> None:
    """torch rounds -127.5 steps to -128, which no positive number of int8 mirrors."""
    weight = WEIGHT * (1.0 / np.abs(WEIGHT).max())
    weight[0, 0] = -1.001
    step = 1.001 / 127.5
    grid = find_weight_grid(weight, np.clip(np.rint(weight / step), -128, 127) * step)
    assert grid is not None
    assert grid.text == "int8 with a scale for the whole tensor"
