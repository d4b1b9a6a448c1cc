"""Statistics against float64 numpy, and the same for any cutting into blocks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tensorcap_formats.dtypes import DTYPES, dtype
from tensorcap_formats.statistics import Statistics, StatisticsBuilder

Bits = np.ndarray[Any, Any]
MAX_32 = 3.4028234663852886e38
MAX_64 = 1.7976931348623157e308


def statistics_of(bits: Bits, name: str, cuts: list[int] | None = None) -> Statistics:
    builder = StatisticsBuilder(dtype(name))
    for part in np.split(bits, cuts or []):
        builder.add(part)
    return builder.result()


def assert_close(statistics: Statistics, values: Bits) -> None:
    """Hold statistics against those of float64 or complex128 `values`, computed here."""
    if np.iscomplexobj(values):
        finite = np.hypot(values.real, values.imag)[np.isfinite(values)]
        has_infinity = np.isinf(values.real) | np.isinf(values.imag)
        nan, posinf, neginf = np.isnan(values) & ~has_infinity, has_infinity, np.zeros(1)
    else:
        finite = values[np.isfinite(values)]
        nan, posinf, neginf = np.isnan(values), values == np.inf, values == -np.inf
    counts = [int(np.sum(n)) for n in (nan, posinf, neginf, values == 0)]
    assert [statistics.nan, statistics.posinf, statistics.neginf, statistics.zeros] == counts
    if not finite.size:
        assert (statistics.minimum, statistics.maximum, statistics.mean, statistics.l2) == (
            None,
            None,
            None,
            None,
        )
        return
    assert statistics.minimum == pytest.approx(finite.min(), rel=1e-15)
    assert statistics.maximum == pytest.approx(finite.max(), rel=1e-15)
    magnitude = math.fsum(abs(finite).tolist()) / finite.size
    assert statistics.mean == pytest.approx(math.fsum(finite.tolist()) / finite.size, abs=1e-12 * magnitude)
    assert statistics.l2 == pytest.approx(math.sqrt(math.fsum((finite * finite).tolist())), rel=1e-12)


def random_values(size: int) -> Bits:
    r = np.random.default_rng(7)
    values = r.standard_normal(size) * 10.0 ** r.integers(-3, 4, size)
    values[r.integers(0, size, size // 20)] = 0.0
    values[r.integers(0, size, size // 50)] = -0.0
    values[r.integers(0, size, size // 50)] = np.nan
    values[r.integers(0, size, size // 90)] = np.inf
    values[r.integers(0, size, size // 90)] = -np.inf
    return values


@pytest.mark.spec("ARC-11")
@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
@pytest.mark.parametrize("size", [1, 50, 8191, 8192, 8193, 50_000])
def test_floats_with_nan_infinities_and_zeros_are_as_numpy_has_them(name: str, size: int) -> None:
    with np.errstate(over="ignore"):
        values = random_values(size).astype(name)
    assert_close(statistics_of(values, name), values.astype(np.float64))


@pytest.mark.spec("ARC-11")
def test_bfloat16_is_counted_by_its_values() -> None:
    bits = (random_values(20_000).astype(np.float32).view(np.uint32) >> 16).astype("<u2")
    values = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    assert_close(statistics_of(bits, "bfloat16"), values)


@pytest.mark.spec("ARC-15")
@pytest.mark.parametrize("name", ["complex64", "complex128"])
def test_complex_statistics_are_of_the_modulus(name: str) -> None:
    values = np.stack([random_values(9000), random_values(9000)[::-1]], axis=-1).view("<c16")[:, 0]
    values = values.astype(name)
    assert_close(statistics_of(values, name), values.astype(np.complex128))
    assert statistics_of(np.array([3 + 4j, 0, -0.0], name), name) == Statistics(
        0.0, 5.0, 5 / 3, 5.0, 0, 0, 0, zeros=2
    )


@pytest.mark.spec("ARC-11")
@pytest.mark.parametrize(
    ("name", "values", "extremes_mean_and_l2", "counts"),
    [
        pytest.param(
            "int64",
            [-(2**63), 2**63 - 1, 2**53 + 1],
            (-(2**63), 2**63 - 1, 2.0**53 / 3, 1.3043820935220924e19),
            (0, 0, 0, 0),
            id="int64-extremes",
        ),
        pytest.param("int64", [2**53 + 1], (2**53 + 1,) * 2 + (2.0**53,) * 2, (0, 0, 0, 0), id="odd-int64"),
        pytest.param("uint64", [2**64 - 1], (2**64 - 1,) * 2 + (2.0**64,) * 2, (0, 0, 0, 0), id="uint64"),
        pytest.param(
            "int8", [-128, 127, 0, 0], (-128, 127, -0.25, 180.31361568112376), (0, 0, 0, 2), id="int8"
        ),
        pytest.param("bool", [True, True, False], (0, 1, 2 / 3, math.sqrt(2)), (0, 0, 0, 1), id="bool"),
        pytest.param(
            "float32", [MAX_32] * 2, (*(MAX_32,) * 3, 4.812319096523503e38), (0,) * 4, id="float32-max"
        ),
        pytest.param(
            "float64", [1e300, -1e300], (-1e300, 1e300, 0.0, math.sqrt(2) * 1e300), (0,) * 4, id="1e300"
        ),
        pytest.param("float64", [MAX_64], (MAX_64,) * 4, (0,) * 4, id="float64-max"),
        pytest.param("float64", [MAX_64] * 2, (*(MAX_64,) * 3, None), (0,) * 4, id="l2-beyond-float64"),
        pytest.param("float64", [5e-324], (5e-324,) * 4, (0,) * 4, id="subnormal"),
        pytest.param(
            "float64",
            [1e-200, 2e-200],
            (1e-200, 2e-200, 1.5e-200, 2.2360679774997897e-200),
            (0,) * 4,
            id="squares-below-float64",
        ),
        pytest.param(
            "float64", [3e-160, 4e-160, 0], (0.0, 4e-160, 7e-160 / 3, 5e-160), (0, 0, 0, 1), id="tiny"
        ),
        pytest.param(
            "float64", [1e-200, 3.0, 1e200], (1e-200, 1e200, 1e200 / 3, 1e200), (0,) * 4, id="tiny-and-large"
        ),
        pytest.param("complex128", [3e-200 + 4e-200j], (5e-200,) * 4, (0,) * 4, id="tiny-modulus"),
        pytest.param("float32", [], (None,) * 4, (0, 0, 0, 0), id="empty"),
        pytest.param("float32", [math.nan], (None,) * 4, (1, 0, 0, 0), id="only-nan"),
        pytest.param("float32", [math.inf, -math.inf, math.inf], (None,) * 4, (0, 2, 1, 0), id="infinities"),
        pytest.param("float32", [-0.0], (0.0,) * 4, (0, 0, 0, 1), id="minus-zero"),
        pytest.param("complex128", [1.7e308 * (1 + 1j)], (None,) * 4, (0, 1, 0, 0), id="modulus-too-large"),
    ],
)
def test_statistics_are(
    name: str,
    values: list[Any],
    extremes_mean_and_l2: tuple[Any, Any, Any, Any],
    counts: tuple[int, int, int, int],
) -> None:
    statistics = statistics_of(np.array(values, dtype(name).storage), name)
    assert (statistics.minimum, statistics.maximum, statistics.mean, statistics.l2) == extremes_mean_and_l2
    assert (statistics.nan, statistics.posinf, statistics.neginf, statistics.zeros) == counts
    assert type(statistics.minimum) is type(extremes_mean_and_l2[0])


@pytest.mark.spec("ARC-11")
def test_large_values_after_and_before_small_ones_overflow_nothing() -> None:
    values = np.concatenate([np.ones(8192), np.full(8192, 1e300), np.ones(8192)])
    statistics = statistics_of(values, "float64")
    assert statistics.mean == pytest.approx(1e300 / 3, rel=1e-12)
    assert statistics.l2 == pytest.approx(math.sqrt(8192) * 1e300, rel=1e-12)


@pytest.mark.spec("ARC-11")
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_any_cutting_into_blocks_gives_equal_bits(name: str) -> None:
    r = np.random.default_rng(3)
    bits = r.integers(0, 256, 30_000 * dtype(name).itemsize, np.uint8)
    bits = (bits & 1).view(bool) if name == "bool" else bits.view(dtype(name).storage)
    whole = statistics_of(bits, name)
    for cuts in (
        [8192],
        [1],
        [29_999],
        [0, 0, 5],
        list(range(0, 30_000, 1000)),
        [8191, 8193, 16_384, 16_385],
    ):
        assert repr(statistics_of(bits, name, cuts)) == repr(whole)
    for _ in range(5):
        cuts = sorted(r.integers(0, 30_000, 7).tolist())
        assert repr(statistics_of(bits, name, cuts)) == repr(whole)


@pytest.mark.spec("ARC-11")
@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16", "complex64", "int64", "float4_e2m1fn_x2"])
def test_any_cutting_of_a_large_tensor_gives_equal_bits(name: str) -> None:
    r = np.random.default_rng(4)
    bits = r.standard_normal(150_000 * dtype(name).itemsize // 2, np.float32).view(dtype(name).storage)
    if name == "float64":
        bits = r.standard_normal(300_000)
        bits[[70_000, 250_000]] = 1e300, np.nan
    whole = statistics_of(bits, name)
    for count in (1, 2, 9, 40):
        cuts = sorted(r.integers(0, bits.size, count).tolist())
        assert repr(statistics_of(bits, name, cuts)) == repr(whole)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_bit_pattern_is_counted_without_a_warning(name: str) -> None:
    logical = dtype(name)
    if logical.itemsize <= 2:
        bits = np.arange(256**logical.itemsize, dtype=f"u{logical.itemsize}")
    else:  # of each part all the sign and exponent bits, and the lowest of the mantissa: signalling NaN too
        top = np.arange(65536, dtype=np.uint64)
        part = 8 if name in ("float64", "int64", "uint64", "complex128") else 2 if name == "complex32" else 4
        parts = (top << (8 * part - 16)) | (np.uint64(1) if part > 2 else np.uint64(0))
        bits = np.ascontiguousarray(parts.view(np.uint8).reshape(-1, 8)[:, :part]).reshape(-1)
    if name == "bool":
        bits = np.array([0, 1], "u1")
    statistics = statistics_of(bits.view(logical.storage), name)
    assert statistics.minimum is not None
    assert logical.is_inexact or (statistics.nan, statistics.posinf, statistics.neginf) == (0, 0, 0)


@pytest.mark.spec("ARC-11")
def test_counts_are_of_all_elements_whatever_the_block() -> None:
    values = np.zeros(20_000, np.float32)
    values[[0, 8191, 8192, 19_999]] = [np.nan, np.inf, -np.inf, np.nan]
    statistics = statistics_of(values, "float32")
    assert statistics == Statistics(0.0, 0.0, 0.0, 0.0, nan=2, posinf=1, neginf=1, zeros=19_996)


def test_blocks_may_be_views_that_change_after_they_were_added() -> None:
    buffer = np.full(10, 1, np.int32)
    builder = StatisticsBuilder(dtype("int32"))
    for value in (1, 2, 3):
        buffer[:] = value
        builder.add(buffer)
    assert builder.result() == Statistics(1, 3, 2.0, math.sqrt(140), 0, 0, 0, 0)


@pytest.mark.parametrize("at", [0, 8191, 8192, 20_000, 150_000])
def test_tiny_values_count_wherever_they_stand(at: int) -> None:
    values = np.zeros(200_000)
    values[at], values[-1] = 3e-170, 4e-170
    assert statistics_of(values, "float64").l2 == pytest.approx(5e-170, rel=1e-15)
    assert statistics_of(values, "float64", [1, 9000, 150_001]) == statistics_of(values, "float64")
    values[-1] = 2.0
    assert statistics_of(values, "float64").l2 == 2.0
