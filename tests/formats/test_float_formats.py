"""Facts of floating-point formats against the standards' numbers, and against ml_dtypes, numpy and torch."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tensorcap_formats.dtypes import DTYPES
from tensorcap_formats.float_formats import (
    DTYPE_FORMATS,
    FLOAT_FORMATS,
    MASK_SENTINELS,
    UNIT_ROUNDOFFS,
    rounded,
)

finfo: Any = ml_dtypes.finfo  # it has no types

# Unit roundoff, smallest positive value, smallest normal, largest finite value
FACTS = {
    "float64": (2.0**-53, 2.0**-1074, 2.0**-1022, 1.7976931348623157e308),
    "float32": (2.0**-24, 2.0**-149, 2.0**-126, 3.4028234663852886e38),
    "tf32": (2.0**-11, 2.0**-136, 2.0**-126, 3.4011621342146535e38),
    "float16": (2.0**-11, 2.0**-24, 2.0**-14, 65504.0),
    "bfloat16": (2.0**-8, 2.0**-133, 2.0**-126, 3.3895313892515355e38),
    "float8_e3m4": (2.0**-5, 2.0**-6, 2.0**-2, 15.5),
    "float8_e4m3": (2.0**-4, 2.0**-9, 2.0**-6, 240.0),
    "float8_e4m3fn": (2.0**-4, 2.0**-9, 2.0**-6, 448.0),
    "float8_e4m3fnuz": (2.0**-4, 2.0**-10, 2.0**-7, 240.0),
    "float8_e4m3b11fnuz": (2.0**-4, 2.0**-13, 2.0**-10, 30.0),
    "float8_e5m2": (2.0**-3, 2.0**-16, 2.0**-14, 57344.0),
    "float8_e5m2fnuz": (2.0**-3, 2.0**-17, 2.0**-15, 57344.0),
    "float8_e8m0fnu": (2.0**-1, 2.0**-127, 2.0**-127, 2.0**127),
    "float6_e2m3fn": (2.0**-4, 0.125, 1.0, 7.5),
    "float6_e3m2fn": (2.0**-3, 0.0625, 0.25, 28.0),
    "float4_e2m1fn": (2.0**-2, 0.5, 1.0, 6.0),
}
OF_ML_DTYPES = [name for name in FACTS if name not in ("float64", "float32", "tf32", "float16")]
ROUNDED = [name for name in OF_ML_DTYPES if name != "float8_e8m0fnu"]


@pytest.mark.parametrize("name", FACTS)
def test_a_format_has_the_unit_roundoff_and_range_of_its_definition(name: str) -> None:
    form = FLOAT_FORMATS[name]
    assert (form.unit_roundoff, form.smallest, form.smallest_normal, form.largest) == FACTS[name]


def test_every_float_format_is_pinned_down() -> None:
    assert FACTS.keys() == FLOAT_FORMATS.keys()


@pytest.mark.parametrize("name", [*OF_ML_DTYPES, "float16", "float32", "float64"])
def test_ml_dtypes_and_numpy_know_the_same_of_a_format(name: str) -> None:
    theirs = finfo(getattr(ml_dtypes, name, name))
    form = FLOAT_FORMATS[name]
    assert form.bits == theirs.bits
    assert form.epsilon == float(theirs.eps)
    assert form.largest == float(theirs.max)
    assert form.smallest_normal == float(theirs.smallest_normal)
    assert form.smallest == float(theirs.smallest_subnormal if form.is_signed else theirs.smallest_normal)


def test_torch_knows_the_same_of_its_formats() -> None:
    torch = pytest.importorskip("torch")
    names = [name for name in FACTS if isinstance(getattr(torch, name, None), torch.dtype)]
    assert {"float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"} <= {*names}
    for name in names:
        theirs, form = torch.finfo(getattr(torch, name)), FLOAT_FORMATS[name]
        assert (form.largest, form.smallest_normal) == (theirs.max, theirs.tiny), name
        if name != "float8_e5m2fnuz":  # of which torch says half the distance from 1 to the next value
            assert form.epsilon == theirs.eps, name


def test_every_float_and_complex_dtype_has_a_unit_roundoff() -> None:
    floating = {name for name, logical in DTYPES.items() if logical.kind in ("float", "complex")}
    assert UNIT_ROUNDOFFS.keys() == DTYPE_FORMATS.keys() == floating | {"tf32"}


@pytest.mark.parametrize(
    ("dtype", "unit"),
    [
        ("complex128", 2.0**-53),
        ("complex64", 2.0**-24),
        ("complex32", 2.0**-11),
        ("float4_e2m1fn_x2", 2.0**-2),
    ],
)
def test_a_dtype_of_several_numbers_rounds_as_each_of_them(dtype: str, unit: float) -> None:
    assert UNIT_ROUNDOFFS[dtype] == unit


@pytest.mark.parametrize("name", ROUNDED)
def test_values_within_the_range_are_rounded_as_ml_dtypes_rounds_them(name: str) -> None:
    _, smallest, _, largest = FACTS[name]
    exponents = np.random.default_rng(0).uniform(np.log2(smallest) - 2, np.log2(largest), 4096)
    values = np.random.default_rng(1).choice((-1.0, 1.0), 4096) * np.exp2(exponents)
    values = np.append(values, (0.0, 1.0 + FACTS[name][0], 1.0 + 3 * FACTS[name][0]))  # and two ties
    expected = values.astype(getattr(ml_dtypes, name)).astype(np.float64)
    within = np.isfinite(expected)
    assert within.sum() > 4000
    np.testing.assert_array_equal(rounded(values, name)[within], expected[within])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("float8_e4m3fn", [448.0, -448.0], id="float8"),
        pytest.param("float16", [1e4, -65504.0], id="float16"),
        pytest.param("float64", [1e4, -1e40], id="float64"),
        pytest.param("int8", [1e4, -1e40], id="no-float"),
        pytest.param("float8_e8m0fnu", [1e4, -1e40], id="no-sign"),
    ],
)
def test_what_is_beyond_the_range_becomes_the_largest_value(name: str, expected: list[float]) -> None:
    assert rounded(np.array([1e4, -1e40]), name).tolist() == expected


@pytest.mark.spec("MET-4")
def test_mask_sentinels_are_the_least_finite_values_and_minus_a_milliard() -> None:
    least_bfloat16 = float(finfo(ml_dtypes.bfloat16).min)
    least_others = (float(np.finfo(np.float32).min), float(np.finfo(np.float64).min))
    assert (-65504.0, -1e9, least_bfloat16, *least_others) == MASK_SENTINELS
