"""Archived values go in another dtype as INJ-5 says, by numpy alone."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tensorcap_formats.dtypes import DTYPES, bits_of, cast
from tensorcap_formats.errors import UsageError


def casted(values: Any, name: str, wanted: str) -> tuple[Any, str]:
    array = np.asarray(values, ml_dtypes.bfloat16 if name == "bfloat16" else name)
    return cast(bits_of(array), DTYPES[name], DTYPES[wanted])


@pytest.mark.spec("INJ-5")
@pytest.mark.parametrize("name", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("wanted", ["float64", "float32", "float16", "bfloat16"])
def test_floats_are_rounded_to_nearest_as_ml_dtypes_rounds_them(name: str, wanted: str) -> None:
    draws = np.random.default_rng(0).normal(size=4096) * np.exp2(
        np.random.default_rng(1).integers(-30, 14, 4096)
    )
    own = draws.astype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    special = np.array([0.0, -0.0, np.inf, -np.inf]).astype(own.dtype)
    own = np.concatenate([own, special])
    elements, text = cast(bits_of(own), DTYPES[name], DTYPES[wanted])
    expected = own.astype(ml_dtypes.bfloat16 if wanted == "bfloat16" else wanted)
    np.testing.assert_array_equal(elements, bits_of(expected))
    assert text == ("" if name == wanted else f"{name} to {wanted}")


@pytest.mark.spec("INJ-5")
def test_ties_go_to_even_and_not_a_number_stays_one() -> None:
    elements, _ = casted([1.00390625, 1.01171875, np.nan], "float32", "bfloat16")
    assert elements[:2].tolist() == [0x3F80, 0x3F82]
    assert elements[2] & 0x7F80 == 0x7F80
    assert elements[2] & 0x7F


@pytest.mark.spec("INJ-5")
def test_a_mask_sentinel_beyond_the_range_becomes_the_least_finite_value() -> None:
    elements, text = casted([0.0, float(np.finfo(np.float32).min), -1e9], "float32", "float16")
    assert elements.tolist() == [0.0, -65504.0, -65504.0]
    assert text == "float32 to float16, mask sentinels to -65504"


@pytest.mark.spec("INJ-5")
@pytest.mark.parametrize(
    ("values", "name", "wanted", "message"),
    [
        pytest.param([7e4], "float32", "float16", "70000 is beyond the range of float16", id="range"),
        pytest.param([300], "int64", "int8", "whole numbers of int64 to int8 change", id="narrow"),
        pytest.param([-1], "int64", "uint64", "whole numbers of int64 to uint64 change", id="sign"),
        pytest.param([1.5], "float32", "bool", "float32 in the archive, bool in the model", id="no-mask"),
        pytest.param([0, 2], "int64", "bool", "int64 in the archive, bool in the model", id="not-true"),
        pytest.param([1], "int64", "float32", "int64 in the archive, float32 in the model", id="kind"),
    ],
)
def test_what_would_change_is_an_error(values: Any, name: str, wanted: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        casted(values, name, wanted)


@pytest.mark.spec("INJ-5")
def test_whole_numbers_and_masks_go_into_other_forms() -> None:
    assert casted([1, -2], "int64", "int32")[0].tolist() == [1, -2]
    assert casted([True, False], "bool", "float16")[0].tolist() == [0.0, -65504.0]
    assert casted([0, 1], "int32", "bool")[0].tolist() == [False, True]
    assert casted([True, False], "bool", "int64")[0].tolist() == [1, 0]
    assert casted([0.0, -1e9], "float32", "bool")[0].tolist() == [True, False]
    assert casted([True, False], "bool", "bfloat16")[0].tolist() == [0x0000, 0xFF7F]
