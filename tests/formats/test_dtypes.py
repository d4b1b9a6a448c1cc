"""Logical dtypes: every bit pattern against ml_dtypes, every torch dtype known or named as unsupported."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tensorcap_formats.dtypes import DTYPES, bits_of, decode, dtype, dtype_of
from tensorcap_formats.errors import UsageError

SMALL_FLOATS = [
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float6_e2m3fn",
    "float6_e3m2fn",
    "float4_e2m1fn",
]
# quantised tensors of an interface that torch has deprecated, and raw bits without a numeric meaning
UNSUPPORTED_IN_TORCH = {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}
UNSUPPORTED_IN_TORCH |= {"bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"}


def assert_same_floats(actual: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    assert actual.dtype == expected.dtype == np.float32
    is_nan = np.isnan(expected)
    assert (np.isnan(actual) == is_nan).all()
    assert (actual.view(np.uint32)[~is_nan] == expected.view(np.uint32)[~is_nan]).all()


@pytest.mark.spec("ARC-10")
@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_every_pattern_of_a_small_float_has_the_value_that_ml_dtypes_gives_it(name: str) -> None:
    width = {"float6": 64, "float4": 16}.get(name[:6], 256)
    patterns = np.arange(width, dtype="u1")
    assert_same_floats(
        decode(patterns, dtype(name)), patterns.view(getattr(ml_dtypes, name)).astype(np.float32)
    )


@pytest.mark.parametrize("name", ["float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn"])
def test_bits_above_the_width_of_a_narrow_float_are_ignored(name: str) -> None:
    width = 64 if name.startswith("float6") else 16
    values = decode(np.arange(256, dtype="u1"), dtype(name))
    for start in range(0, 256, width):
        assert values[start : start + width].tobytes() == values[:width].tobytes()


def test_every_bfloat16_pattern_has_the_value_that_ml_dtypes_gives_it() -> None:
    patterns = np.arange(65536, dtype="<u2")
    assert_same_floats(
        decode(patterns, dtype("bfloat16")), patterns.view(ml_dtypes.bfloat16).astype(np.float32)
    )


@pytest.mark.parametrize("name", ["int2", "int4", "uint2", "uint4"])
def test_narrow_integers_have_the_values_that_ml_dtypes_gives_them(name: str) -> None:
    values = np.array([-8, -7, -2, -1, 0, 1, 7] if name == "int4" else [0, 1], f"{name[:-1]}8")
    values = np.array([-2, -1, 0, 1], "i1") if name == "int2" else values
    values = np.arange(2 ** int(name[-1]), dtype="u1") if name[0] == "u" else values
    array = values.astype(getattr(ml_dtypes, name))
    assert dtype_of(array).name == name
    assert decode(bits_of(array), dtype(name)).tolist() == values.tolist()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("int1", [0, -1, 0, -1]),
        ("int3", [0, 3, -4, -1]),
        ("int7", [0, 3, 4, -1]),
        ("uint1", [0, 1, 0, 1]),
        ("uint3", [0, 3, 4, 7]),
        ("uint7", [0, 3, 4, 127]),
    ],
)
def test_only_the_low_bits_of_a_narrow_integer_count(name: str, expected: list[int]) -> None:
    bits = np.array([0, 3, 4, 0xFF], "u1").view(dtype(name).storage)
    assert decode(bits, dtype(name)).tolist() == expected


def test_packed_float4_gives_the_low_half_first_and_doubles_the_last_axis() -> None:
    bits = np.array([[0x21, 0x80], [0xF7, 0x5A]], "u1")
    values = decode(bits, dtype("float4_e2m1fn_x2"))
    assert values.tolist() == [[0.5, 1.0, 0.0, -0.0], [6.0, -6.0, -1.0, 3.0]]
    assert np.signbit(values[0, 3])
    assert decode(np.array(0x21, "u1"), dtype("float4_e2m1fn_x2")).tolist() == [0.5, 1.0]
    assert decode(np.empty((2, 0), "u1"), dtype("float4_e2m1fn_x2")).shape == (2, 0)


def test_complex32_gives_real_part_then_imaginary_part() -> None:
    bits = np.array([[0xC0003C00], [0x00007C00]], "<u4")
    assert decode(bits, dtype("complex32")).tolist() == [[1 - 2j], [complex(np.inf, 0)]]
    assert decode(np.array(0x3C00, "<u4"), dtype("complex32")).shape == ()


def test_every_torch_dtype_is_known_or_named_as_unsupported() -> None:
    torch = pytest.importorskip("torch")
    names = {str(v).removeprefix("torch.") for v in vars(torch).values() if isinstance(v, torch.dtype)}
    assert names - DTYPES.keys() == UNSUPPORTED_IN_TORCH


def test_every_torch_dtype_has_the_size_that_torch_gives_it() -> None:
    torch = pytest.importorskip("torch")
    for name, logical in DTYPES.items():
        theirs = getattr(torch, name, None)
        if isinstance(theirs, torch.dtype):
            assert logical.itemsize == theirs.itemsize, name


def test_every_ml_dtypes_dtype_is_known() -> None:
    names = {np.dtype(v).name for v in vars(ml_dtypes).values() if isinstance(v, type) and v is not type}
    floats = {name for name in names if "float" in name or "int" in name}
    assert floats - {"finfo", "iinfo"} <= DTYPES.keys()


def test_float_and_complex_dtypes_are_inexact_and_no_others() -> None:
    exact = {name for name, logical in DTYPES.items() if not logical.is_inexact}
    assert {name.rstrip("0123456789") for name in exact} == {"bool", "int", "uint"}
    assert {*SMALL_FLOATS, "float64", "bfloat16", "complex32", "float4_e2m1fn_x2"} <= DTYPES.keys() - exact


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_a_storage_type_is_little_endian_and_native_where_numpy_has_the_dtype(name: str) -> None:
    logical = dtype(name)
    numpy_has_it = name in {
        *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    }
    assert logical.is_native is numpy_has_it
    assert logical.storage[0] == ("|" if logical.itemsize == 1 else "<")


@pytest.mark.parametrize(
    "array",
    [
        pytest.param(np.array(["a"]), id="text"),
        pytest.param(np.array([b"a"]), id="bytes"),
        pytest.param(np.array([None]), id="object"),
        pytest.param(np.array([0], "M8[s]"), id="date"),
        pytest.param(np.array([0], "m8[s]"), id="duration"),
        pytest.param(np.zeros(1, [("a", "i4")]), id="struct"),
        pytest.param(np.zeros(1, "V3"), id="void"),
        pytest.param(np.zeros(1, np.longdouble), id="longdouble"),
    ],
)
def test_an_array_of_anything_else_is_no_tensor(array: np.ndarray[Any, Any]) -> None:
    with pytest.raises(UsageError, match="is no tensor dtype"):
        dtype_of(array)


def test_an_unknown_dtype_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="dtype 'float17' is unknown") as caught:
        dtype("float17")
    assert "bfloat16" in str(caught.value.hint)


def test_bits_are_little_endian_contiguous_and_keep_the_shape() -> None:
    assert bits_of(np.array([[1, 2], [3, 4]], ">i4").T).tobytes() == np.array([1, 3, 2, 4], "<i4").tobytes()
    assert bits_of(np.array(7.0, ml_dtypes.bfloat16)).shape == ()
    array = np.arange(3, dtype="<f4")
    assert bits_of(array).base is not None
    assert np.shares_memory(bits_of(array), array)
