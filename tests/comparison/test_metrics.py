"""The metrics of specs/metrics.md against numbers worked out by hand or by plain numpy, by every engine."""

from __future__ import annotations

import dataclasses
import math
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap.metrics import UNIT as BLOCK
from tensorcap.metrics import (
    Difference,
    Histogram,
    Nonfinite,
    NumpyEngine,
    Operands,
    Tolerance,
    exact_difference,
    quantiles,
)
from tensorcap.metrics.compiled_engine import CompiledEngine, OutOfRangeError
from tensorcap_formats.dtypes import DTYPES, Array, bits_of, decode, dtype, dtype_of
from tensorcap_formats.float_formats import FLOAT_FORMATS
from tests.support.floats import to_bfloat16

NAN, INF = math.nan, math.inf
SPEC = Path(__file__).parents[2] / "specs/metrics.md"
LEAST = float(np.finfo(np.float32).min)
MAX = float(np.finfo(np.float64).max)
LEAST_BFLOAT16 = -(2.0**127) * (2 - 2.0**-7)


def raw_difference(
    reference: Array,
    target: Array,
    names: tuple[str, str],
    shape: tuple[int, ...],
    tolerance: Tolerance | None = None,
) -> Difference:
    """What numpy finds, once the compiled engine has found the same, where it can."""
    operands = Operands(dtype(names[0]), dtype(names[1]), shape, tolerance)
    engine = NumpyEngine(operands)
    engine.add(reference, target)
    found = engine.totals().difference(operands)
    if CompiledEngine.can_measure(operands):
        compiled = CompiledEngine(operands)
        with suppress(OutOfRangeError):
            compiled.add(reference, target)
            # A mean that is large against the spread may put centred products off by more (MET-40)
            pearson = 1e-9 if CompiledEngine.kernel(operands) == "wide" else 1e-11
            assert_alike(compiled.totals().difference(operands), found, pearson)
    return found


def assert_alike(found: Difference, expected: Difference, pearson: float) -> None:
    """All fields equal, or within the bounds of MET-40."""
    for field in dataclasses.fields(Difference):
        ours, theirs = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(theirs, float) and isinstance(ours, float) and not field.name.startswith("max_abs"):
            bounds = {"mean_rel": 2e-7, "row_error_median": 0.04, "row_error_p95": 0.04, "pearson": pearson}
            bound = bounds.get(field.name, 1e-11)
            slack = 1e-9 if field.name.endswith("_db") else 0
            assert ours == pytest.approx(theirs, rel=bound, abs=slack), field.name
        else:
            assert repr(ours) == repr(theirs), field.name


def difference(
    reference: Any, target: Any, *, rtol: float | None = None, atol: float | None = None
) -> Difference:
    reference, target = np.asarray(reference), np.asarray(target)
    names = dtype_of(reference).name, dtype_of(target).name
    trusted, tested = (bits_of(side).reshape(-1) for side in (reference, target))
    return raw_difference(trusted, tested, names, reference.shape, Tolerance.parse(rtol, atol))


@pytest.mark.spec("MET-1")
def test_float32_is_subtracted_in_float64() -> None:
    d = difference(np.array([1.0, 16777216.0], np.float32), np.array([1.0000001, 16777218.0], np.float32))
    assert d.max_abs == 2.0
    assert d.mean_abs == (2.0 + 2.0**-23) / 2


@pytest.mark.spec("MET-1")
def test_float16_sums_do_not_overflow() -> None:
    d = difference(np.full(1000, 60000, np.float16), np.full(1000, -60000, np.float16))
    assert (d.max_abs, d.mean_abs, d.relative_frobenius) == (120000.0, 120000.0, 2.0)


@pytest.mark.spec("MET-1")
@pytest.mark.parametrize(
    "scale", [pytest.param(s, id=f"{s:g}") for s in (1e-320, 1e-200, 1e-30, 1.0, 1e150, 1e200, 1e307)]
)
def test_squares_neither_overflow_nor_vanish(scale: float) -> None:
    d = difference(np.array([3.0, 4.0]) * scale, np.array([3.0, 8.0]) * scale)
    assert d.relative_frobenius == pytest.approx(0.8, rel=1e-3)
    assert d.cosine == pytest.approx((9 + 32) / (5 * math.sqrt(73)), rel=1e-3)
    assert d.psnr_db == pytest.approx(10 * math.log10(16 / 8), rel=1e-2)
    assert d.mean_abs == pytest.approx(2 * scale, rel=1e-3)


@pytest.mark.spec("MET-1")
def test_tiny_and_huge_elements_of_unlike_blocks_add_up() -> None:
    reference = np.concatenate([np.full(BLOCK, 1e-200), np.full(BLOCK, 1e200), np.full(BLOCK, 1e-200)])
    d = difference(reference, reference * 2)
    assert d.relative_frobenius == pytest.approx(1.0, rel=1e-12)
    assert d.cosine == pytest.approx(1.0, rel=1e-12)
    assert d.mean_abs == pytest.approx(1e200 / 3, rel=1e-12)


@pytest.mark.spec("MET-1")
def test_an_error_beyond_float64_is_infinite_and_never_within_a_tolerance() -> None:
    d = difference(np.array([1.7e308, 1.0]), np.array([-1.7e308, 1.0]), rtol=1e10, atol=1e300)
    assert (d.max_abs, d.max_abs_index, d.mismatches, d.psnr_db) == (INF, (0,), 1, -INF)


@pytest.mark.spec("MET-1")
def test_int64_differences_neither_wrap_nor_round() -> None:
    d = difference(np.array([2**53, 2**62, 7]), np.array([2**53 + 1, -(2**62), 7]), rtol=0.0)
    assert (d.max_abs, d.max_abs_index, d.unequal, d.mismatches) == (2**63, (1,), 2, 2)
    assert (d.max_abs_reference, d.max_abs_target) == (2**62, -(2**62))
    d = difference(np.array([2**53]), np.array([2**53 + 1]), rtol=0.0)
    assert (d.max_abs, d.mean_abs, d.mismatches) == (1, 1.0, 1)


@pytest.mark.spec("MET-1")
@pytest.mark.parametrize(
    ("reference", "target", "expected"),
    [
        pytest.param(
            np.array([2**64 - 1], "u8"),
            np.array([-(2**63)], "i8"),
            2**64 + 2**63 - 1,
            id="u64-i64-extremes",
        ),
        pytest.param(np.array([-1], "i8"), np.array([2**63 - 1], "u8"), 2**63, id="i64-u64-below-2^63"),
        pytest.param(
            np.array([2**64 - 1], "u8"),
            np.array([2**63 - 1], "i8"),
            2**63,
            id="u64-i64-both-positive",
        ),
        pytest.param(np.array([0], "u8"), np.array([2**64 - 1], "u8"), 2**64 - 1, id="u64-below-zero"),
        pytest.param(np.array([-128], "i1"), np.array([127], "i1"), 255, id="i8"),
        pytest.param(np.array([0], "u1"), np.array([-128], "i1"), 128, id="u8-i8"),
        pytest.param(np.array([True]), np.array([False]), 1, id="bool"),
        pytest.param(np.array([True]), np.array([3], "i4"), 2, id="bool-i32"),
    ],
)
def test_mixed_integers_are_exact(reference: Array, target: Array, expected: int) -> None:
    assert exact_difference(reference, target).tolist() == [expected]
    d = difference(reference, target)
    assert (d.max_abs, d.unequal) == (expected, 1)
    assert d.mean_abs == float(expected)


@pytest.mark.spec("MET-1")
@pytest.mark.parametrize(
    ("reference", "target", "expected"),
    [
        pytest.param(np.array([2**53 + 1], "i8"), np.array([2.0**53], "f8"), 1.0, id="i64"),
        pytest.param(np.array([-(2**53) - 1], "i8"), np.array([-(2.0**53)], "f8"), 1.0, id="negative"),
        pytest.param(np.array([2**63 - 1], "i8"), np.array([2.0**63], "f8"), 1.0, id="i64-max"),
        pytest.param(np.array([2**64 - 1], "u8"), np.array([2.0**64], "f4"), 1.0, id="u64-max"),
        pytest.param(np.array([2**53], "i8"), np.array([2.0**53], "f4"), 0.0, id="equal"),
        pytest.param(np.array([2**60 + 1], "i8"), np.array([2.0**60], "c16"), 1.0, id="complex"),
    ],
)
def test_an_integer_that_float64_cannot_hold_differs_from_its_neighbour(
    reference: Array, target: Array, expected: float
) -> None:
    for d in (difference(reference, target), difference(target, reference)):
        assert d.max_abs == expected
        assert d.unequal == (expected > 0)


@pytest.mark.spec("MET-1")
def test_sums_of_large_integers_are_exact() -> None:
    reference = np.zeros(3 * BLOCK, np.uint64)
    target = np.full(3 * BLOCK, 2**64 - 1, np.uint64)
    assert difference(reference, target).mean_abs == float(2**64 - 1)


@pytest.mark.spec("MET-1")
def test_flipped_bools_are_counted() -> None:
    d = difference(np.zeros(8, bool), np.array([0, 0, 1, 0, 0, 1, 0, 0], bool), atol=0.5)
    assert (d.max_abs, d.max_abs_index, d.unequal, d.mismatches, d.mean_abs) == (1, (2,), 2, 2, 0.25)
    assert (d.max_abs_reference, d.max_abs_target) == (False, True)


@pytest.mark.spec("MET-3")
def test_only_elements_finite_on_both_sides_are_measured() -> None:
    d = difference(np.array([1.0, NAN, INF, 2.0]), np.array([1.5, NAN, 5.0, -INF]))
    assert (d.elements, d.measured, d.max_abs, d.mean_abs) == (4, 1, 0.5, 0.5)
    assert d.relative_frobenius == 0.5


@pytest.mark.spec("MET-3")
def test_complex_error_is_the_modulus_of_the_difference() -> None:
    d = difference(
        np.array([1 + 1j, 2 + 2j], np.complex64), np.array([1 + 1j, 5 + 6j], np.complex64), atol=4.9
    )
    assert (d.max_abs, d.max_abs_index, d.mean_abs, d.mismatches) == (5.0, (1,), 2.5, 1)
    assert (d.max_abs_reference, d.max_abs_target) == (2 + 2j, 5 + 6j)
    assert d.relative_frobenius == pytest.approx(5 / math.sqrt(10), rel=1e-12)


@pytest.mark.spec("MET-3")
def test_the_finite_part_of_a_complex_element_is_measured_beside_an_infinite_one() -> None:
    d = difference(np.array([complex(INF, 1.0)]), np.array([complex(INF, 3.0)]))
    assert (d.measured, d.mask_mismatches, d.max_abs) == (1, 0, 2.0)


@pytest.mark.spec("MET-2")
def test_masks_are_compared_class_by_class() -> None:
    reference = np.array([[NAN, INF, -INF], [0.0, NAN, INF]], np.float32)
    target = np.array([[NAN, INF, INF], [0.0, 1.0, INF]], np.float32)
    d = difference(reference, target)
    assert d.nonfinite_reference == Nonfinite(nan=2, posinf=2, neginf=1)
    assert d.nonfinite_target == Nonfinite(nan=1, posinf=3, neginf=0)
    assert (d.mask_mismatches, d.mask_index) == (2, (0, 2))


@pytest.mark.spec("MET-2")
def test_complex_masks_are_compared_part_by_part() -> None:
    d = difference(np.array([complex(INF, 0), 1j]), np.array([complex(0, INF), 1j]))
    assert (d.mask_mismatches, d.mask_index) == (1, (0,))
    assert (d.nonfinite_reference, d.nonfinite_target) == (Nonfinite(posinf=1), Nonfinite(posinf=1))


@pytest.mark.spec("MET-2")
def test_the_first_unlike_mask_is_found_in_a_later_block() -> None:
    reference = np.zeros((3, BLOCK), np.float32)
    target = reference.copy()
    target[1, 5] = target[2, 7] = NAN
    d = difference(reference, target)
    assert (d.mask_mismatches, d.mask_index) == (2, (1, 5))


@pytest.mark.spec("MET-20")
def test_the_largest_error_has_its_index_and_both_values() -> None:
    reference = np.zeros((2, 3, BLOCK), np.float32)
    target = reference.copy()
    target[1, 2, 100] = -4.0
    target[0, 1, 7] = 3.0
    d = difference(reference, target)
    assert (d.max_abs, d.max_abs_index) == (4.0, (1, 2, 100))
    assert (d.max_abs_reference, d.max_abs_target) == (0.0, -4.0)


@pytest.mark.spec("MET-20")
def test_of_equal_errors_the_first_is_named_and_no_error_has_no_place() -> None:
    zeros = np.zeros(3 * BLOCK)
    assert difference(zeros, zeros + 1).max_abs_index == (0,)
    assert difference(zeros, zeros).max_abs_index is None
    assert difference(zeros, zeros).max_abs == 0
    assert difference(np.float32(1), np.float32(2)).max_abs_index == ()


@pytest.mark.spec("MET-20")
def test_an_index_into_a_packed_tensor_counts_values() -> None:
    reference = np.zeros(6, np.uint8)
    target = reference.copy()
    target[4] = 0x70  # the high half of byte 4 is 6.0: row 1, values 2 and 3
    d = raw_difference(reference, target, ("float4_e2m1fn_x2", "float4_e2m1fn_x2"), (2, 3))
    assert (d.elements, d.max_abs, d.max_abs_index) == (12, 6.0, (1, 3))


def test_narrow_floats_are_measured_by_value() -> None:
    bfloat16 = np.array([0x3F80, 0x4049], np.uint16)  # 1.0 and 3.140625
    d = raw_difference(bfloat16, np.array([1.0, 3.0], np.float32), ("bfloat16", "float32"), (2,))
    assert (d.max_abs, d.max_abs_reference, d.unequal) == (0.140625, 3.140625, 1)
    e4m3 = np.array([0x38, 0x7E], np.uint8)  # 1.0 and 448.0
    d = raw_difference(e4m3, np.array([1.0, 440.0], np.float32), ("float8_e4m3fn", "float32"), (2,))
    assert (d.max_abs, d.max_abs_reference) == (8.0, 448.0)


def test_mean_error_is_over_measured_elements() -> None:
    d = difference(np.array([0.0, 0.0, NAN, 0.0]), np.array([1.0, -2.0, NAN, 0.0]))
    assert d.mean_abs == 1.0


@pytest.mark.spec("MET-22")
def test_relative_frobenius_error_of_a_zero_reference() -> None:
    assert difference(np.zeros(3), np.ones(3)).relative_frobenius == INF
    assert difference(np.zeros(3), np.zeros(3)).relative_frobenius == 0.0
    assert difference(np.array([3, 4], np.float32), np.array([3, 4.5], np.float32)).relative_frobenius == 0.1


@pytest.mark.spec("MET-25")
def test_cosine_is_undefined_for_a_zero_vector_only() -> None:
    x = np.arange(1, 9, dtype=np.float32)
    assert difference(np.zeros(3), np.zeros(3)).cosine is None
    assert difference(np.zeros(3), np.ones(3)).cosine is None
    assert difference(x, x).cosine == 1.0
    assert difference(x, 2 * x).cosine == pytest.approx(1.0, abs=1e-15)
    assert difference(x, -x).cosine == -1.0
    assert difference(np.array([1.0, 0.0]), np.array([0.0, 1.0])).cosine == 0.0
    assert difference(np.array([1 + 1j]), np.array([1 - 1j])).cosine == 0.0


@pytest.mark.spec("MET-24")
def test_psnr_takes_the_largest_reference_as_peak() -> None:
    assert difference(np.array([10.0, 0.0]), np.array([10.0, 1.0])).psnr_db == 10 * math.log10(100 / 0.5)
    assert difference(np.full(4, 3.0), np.full(4, 3.0)).psnr_db == INF
    assert difference(np.zeros(2), np.ones(2)).psnr_db == -INF


def test_mismatches_and_unequal_elements_are_counted_apart() -> None:
    reference = np.array([1.0, 10.0, 100.0, 0.0])
    target = np.array([1.05, 10.5, 120.0, 0.0])
    d = difference(reference, target, rtol=0.1)
    assert (d.unequal, d.mismatches) == (3, 1)
    assert difference(reference, target).mismatches is None


@pytest.mark.spec("CMP-12")
@pytest.mark.parametrize("kind", ["float32", "float64", "int32"])
def test_the_element_that_is_named_is_outside_the_tolerance(kind: str) -> None:
    reference = np.array([[1000, 1000], [10, 10]], kind)
    target = np.array([[1050, 1000], [12, 10]], kind)  # 5 % of the largest element, 20 % of a small one
    d = difference(reference, target, rtol=0.1)
    assert (d.max_abs_index, d.mismatches, d.mismatch_index) == ((0, 0), 1, (1, 0))
    d = difference(reference, target, rtol=0.01)
    assert (d.max_abs_index, d.mismatches, d.mismatch_index) == ((0, 0), 2, (0, 0))
    assert difference(reference, target, rtol=0.5).mismatch_index is None
    assert difference(reference, target).mismatch_index is None


def test_the_element_outside_the_tolerance_is_found_in_a_later_block() -> None:
    reference = np.full((300, 100), 1000.0, np.float32)
    target = reference.copy()
    target[0, 0] = 1050
    reference[201, 7], target[201, 7] = 1, 2
    d = difference(reference, target, rtol=0.1)
    assert (d.max_abs_index, d.mismatch_index) == ((0, 0), (201, 7))


@pytest.mark.spec("CMP-12")
def test_a_tolerance_that_is_left_out_is_zero() -> None:
    assert Tolerance.parse(1e-3, None) == Tolerance(1e-3, 0.0)
    assert Tolerance.parse(None, 1e-3) == Tolerance(0.0, 1e-3)
    assert Tolerance.parse(0.0, None) == Tolerance(0.0, 0.0)
    assert Tolerance.parse(None, None) is None
    assert difference(np.zeros(1), np.full(1, 1e-30), rtol=1.0).mismatches == 1
    assert difference(np.full(1, 1e30), np.full(1, 1.1e30), atol=1.0).mismatches == 1


@pytest.mark.spec("CMP-12")
def test_an_error_of_exactly_the_tolerance_is_within_it() -> None:
    assert difference(np.array([8.0]), np.array([9.0]), rtol=0.125).mismatches == 0
    assert difference(np.array([8]), np.array([9]), rtol=0.125).mismatches == 0
    assert difference(np.array([8]), np.array([9]), atol=0.99).mismatches == 1
    big = np.array([2**60])
    assert difference(big, big + 2**55 + 1, atol=2.0**55).mismatches == 1
    assert difference(big, big + 2**55, atol=2.0**55).mismatches == 0


@pytest.mark.spec("CMP-12")
@pytest.mark.parametrize("value", [-1e-9, NAN, INF])
def test_a_tolerance_that_is_no_number_to_compare_with_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"expected a finite number of at least 0"):
        Tolerance.parse(value, None)
    with pytest.raises(ValueError, match=r"^atol: is"):
        Tolerance.parse(None, value)


@pytest.mark.spec("CMP-12")
def test_a_modulus_beyond_float64_hides_no_error() -> None:
    reference = np.array([complex(1.5e308, 1.5e308)])
    assert difference(reference, reference + 1e300, atol=1.0).mismatches == 1
    assert difference(reference, reference, atol=1.0).mismatches == 0


@pytest.mark.spec("CMP-12", "MET-40")
@pytest.mark.parametrize(
    ("reference", "target", "rtol", "atol", "expected"),
    [
        pytest.param(0.0, 1.0, 1e60, 0.5, 1, id="rtol-beyond-float32"),
        pytest.param(-3e38, 3e38, 0.0, 5e38, 1, id="atol-beyond-float32"),
        pytest.param(-3e38, 3e38, 0.0, 7e38, 0, id="error-beyond-float32"),
        pytest.param(2.0**-149, 2.0**-148, 0.5, 2.0**-150, 0, id="sum-of-halves-of-the-least"),
        pytest.param(2.0**-149, 2.0**-148, 0.49, 2.0**-150, 1, id="less-than-the-least"),
        pytest.param(1.0, 1 + 2.0**-10, 2.0**-10, 0.0, 0, id="exactly-rtol"),
        pytest.param(1.0, 1 + 2.0**-10, 2.0**-10 * (1 - 1e-15), 0.0, 1, id="just-above-rtol"),
        pytest.param(0.0, 0.0, 0.0, 0.0, 0, id="nothing"),
    ],
)
def test_mismatches_are_exact_where_float32_is_not(
    reference: float, target: float, rtol: float, atol: float, expected: int
) -> None:
    d = difference(np.float32(reference), np.float32(target), rtol=rtol, atol=atol)
    assert d.mismatches == expected


@pytest.mark.spec("MET-5")
@pytest.mark.parametrize(
    "values",
    [pytest.param(np.zeros((0, 4)), id="empty"), pytest.param(np.full(3, NAN), id="all-nan")],
)
def test_nothing_measured_leaves_errors_undefined(values: Array) -> None:
    d = difference(values, values, rtol=0.0)
    assert (d.measured, d.unequal, d.mismatches, d.same_bits) == (0, 0, 0, True)
    assert [d.max_abs, d.mean_abs, d.relative_frobenius, d.cosine, d.psnr_db] == [None] * 5


@pytest.mark.spec("MET-40")
def test_sums_are_bit_equal_however_the_bytes_come_in() -> None:
    random = np.random.default_rng(0)
    reference = random.standard_normal(10 * BLOCK + 77).astype(np.float32)
    target = reference + random.standard_normal(reference.size).astype(np.float32) * np.float32(1e-3)
    operands = Operands(dtype("float32"), dtype("float32"), reference.shape)
    for kind in (NumpyEngine, CompiledEngine):
        found = set()
        for step in (1, 3, 100):
            engine = kind(operands)
            for start in range(0, reference.size, step * kind.unit):
                engine.add(
                    reference[start : start + step * kind.unit], target[start : start + step * kind.unit]
                )
            found.add(engine.totals().difference(operands))
        assert len(found) == 1


def test_random_tensors_agree_with_plain_numpy() -> None:
    random = np.random.default_rng(1)
    for _ in range(20):
        shape = tuple(int(n) for n in random.integers(1, 40, size=3))
        reference = random.standard_normal(shape)
        target = reference + random.standard_normal(shape) * 10.0 ** random.integers(-12, 2)
        d, error = difference(reference, target, rtol=1e-3, atol=1e-4), np.abs(target - reference)
        assert d.max_abs == error.max()
        assert d.max_abs_index == tuple(int(i) for i in np.argwhere(error == error.max())[0])
        assert d.mean_abs == pytest.approx(error.mean(), rel=1e-12)
        assert d.relative_frobenius == pytest.approx(
            np.linalg.norm(error) / np.linalg.norm(reference), rel=1e-12
        )
        norms = np.linalg.norm(reference) * np.linalg.norm(target)
        assert d.cosine == pytest.approx((reference * target).sum() / norms, rel=1e-12)
        assert d.mismatches == np.count_nonzero(error > 1e-4 + 1e-3 * np.abs(reference))


def test_the_table_of_the_specification_has_the_fields_of_the_result() -> None:
    section = SPEC.read_text().partition("## 3. Metrics")[2].partition("Sources:")[0]
    named = {
        name for row in re.findall(r"(?m)^\| (`.*?`) \| ", section) for name in re.findall(r"`(\w+)`", row)
    }
    companions = {
        "errors",
        "elements",
        "measured",
        "same_bits",
        "sentinels",
        "sentinels_lost",
        "mask_mismatches",
    }
    companions |= {"nonfinite_reference", "nonfinite_target", "max_abs_reference", "max_abs_target"}
    fields = {field.name for field in dataclasses.fields(Difference)}
    assert named == {name for name in fields - companions if not name.endswith("_index")}
    for name in named:
        assert re.search(rf"(?m)^        {name}: ", Difference.__doc__ or ""), name


@pytest.mark.spec("MET-4")
def test_a_mask_sentinel_on_both_sides_is_set_apart_and_counted() -> None:
    reference = np.array([1.0, LEAST, LEAST, -1e9, -65504.0, 2.0], np.float32)
    target = np.array([1.5, LEAST, LEAST_BFLOAT16, -1e9, -65504.0, 2.0], np.float32)
    d = difference(reference, target)
    assert (d.sentinels, d.measured, d.max_abs, d.mask_mismatches) == (4, 2, 0.5, 0)
    assert d.relative_frobenius == 0.5 / math.sqrt(5)
    d = difference(np.array([LEAST, 1.0]), np.array([float(np.finfo(np.float64).min), 1.0]))
    assert (d.sentinels, d.measured, d.max_abs) == (1, 1, 0.0)


@pytest.mark.spec("MET-4")
def test_a_sentinel_that_became_minus_infinity_is_lost() -> None:
    d = difference(np.array([LEAST, 1.0, -INF], np.float32), np.array([-INF, 1.0, LEAST], np.float32))
    assert (d.sentinels, d.sentinels_lost, d.mask_mismatches, d.mask_index) == (0, 1, 2, (0,))


@pytest.mark.spec("MET-4")
def test_what_is_a_sentinel_on_one_side_only_is_measured() -> None:
    d = difference(np.array([-65504.0, 0.0], np.float32), np.array([-65500.0, 0.0], np.float32))
    assert (d.sentinels, d.max_abs) == (0, 4.0)
    assert difference(np.array([-65504]), np.array([-65504])).sentinels == 0
    assert difference(np.array([65504.0]), np.array([65504.0])).sentinels == 0


@pytest.mark.spec("MET-10")
@pytest.mark.parametrize(
    ("shape", "row"),
    [
        pytest.param((4, 64), 64, id="last-axis"),
        pytest.param((4, 63), 252, id="whole"),
        pytest.param((5, 4, 63), 252, id="merged"),
        pytest.param((3, 5000), 5000, id="longer-than-a-piece"),
        pytest.param((), 1, id="scalar"),
        pytest.param((0, 70), 70, id="empty"),
    ],
)
def test_rows_are_trailing_axes_of_64_elements_at_least(shape: tuple[int, ...], row: int) -> None:
    assert Operands(dtype("float32"), dtype("float32"), shape).row == row


@pytest.mark.spec("MET-10", "MET-11")
def test_row_errors_are_of_pieces_of_rows() -> None:
    reference = np.ones((2, 5000), np.float32)
    target = reference.copy()
    target[0, :4096] += 0.5  # one piece of four
    d = difference(reference, target)
    assert d.row_error_median == 0.0
    assert d.row_error_p95 == pytest.approx(0.5, rel=0.023)
    target[1] += 0.25  # pieces of 4,096 and 904
    assert difference(reference, target).row_error_median == pytest.approx(0.25, rel=0.023)


@pytest.mark.spec("MET-10")
def test_rows_of_zeros_have_no_relative_error() -> None:
    reference = np.zeros((4, 64), np.float32)
    target = reference.copy()
    assert (difference(reference, target).row_error_median, difference(reference, target).outlier) == (0, 0)
    target[3, 5] = 1.0
    d = difference(reference, target)
    assert (d.zero_rows, d.row_error_median, d.row_error_p95, d.outlier) == (1, None, None, None)
    reference[0] = target[0] = 2.0
    d = difference(reference, target)
    assert (d.zero_rows, d.row_error_median, d.outlier, d.outlier_index) == (1, 0.0, 0.0, None)


@pytest.mark.spec("MET-11")
@pytest.mark.parametrize("error", [2.0**-20, 1e-3, 0.999, 1.0, 7.7])
def test_a_row_error_is_within_two_percent(error: float) -> None:
    reference = np.full((9, 64), 3.0, np.float32)
    d = difference(reference, (reference * (1 + error)).astype(np.float32))
    exact = abs(float(np.float32(3 * (1 + error))) / 3 - 1)
    assert d.row_error_median == pytest.approx(exact, rel=0.023)


@pytest.mark.spec("MET-12")
def test_an_outlier_is_relative_to_element_and_row() -> None:
    reference = np.full((3, 100), 2.0, np.float32)
    target = reference.copy()
    target[1, 7] = 8.0
    target[2, 8] = 5.0
    d = difference(reference, target)
    assert (d.outlier, d.outlier_index) == (6 / 4, (1, 7))
    reference[2] = target[2] = 1e-6  # the same relative error in a row of small numbers counts as much
    target[2, 8] = 9e-6
    d = difference(reference, target)
    assert d.outlier_index == (2, 8)
    assert d.outlier == pytest.approx(4.0, rel=1e-6)


@pytest.mark.spec("MET-12")
def test_an_outlier_in_a_row_of_huge_or_tiny_numbers_is_found() -> None:
    for size in (3e38, 1e-44):
        reference = np.full((1, 64), size, np.float32)
        target = reference.copy()
        target[0, 9] = -target[0, 9]
        d = difference(reference, target)
        assert d.outlier == pytest.approx(1.0, rel=1e-12)
        assert d.outlier_index == (0, 9)
    d = difference(np.full((1, 64), 1.7e308), np.full((1, 64), 1e308))
    assert d.outlier == pytest.approx(0.7 / 3.4, rel=1e-12)


@pytest.mark.spec("MET-21")
def test_relative_errors_leave_zeros_of_the_reference_out() -> None:
    d = difference(np.array([0.0, 0.0, 2.0, -4.0]), np.array([1.0, 0.0, 3.0, -3.0]))
    assert (d.max_rel, d.max_rel_index, d.mean_rel, d.zero_reference_errors) == (0.5, (2,), 0.375, 1)
    d = difference(np.zeros(3), np.ones(3))
    assert (d.max_rel, d.max_rel_index, d.mean_rel, d.zero_reference_errors) == (None, None, None, 3)
    d = difference(np.array([1e-45, 1.0], np.float32), np.array([3e38, 1.0], np.float32))
    assert d.max_rel == float(np.float32(3e38)) / 2.0**-149
    d = difference(np.array([4, 0]), np.array([5, 1]))
    assert (d.max_rel, d.zero_reference_errors) == (0.25, 1)


@pytest.mark.spec("MET-22")
def test_linf_error_of_a_zero_reference() -> None:
    assert difference(np.zeros(3), np.ones(3)).relative_linf == INF
    assert difference(np.zeros(3), np.zeros(3)).relative_linf == 0.0
    assert difference(np.array([4.0, -8.0]), np.array([5.0, -8.0])).relative_linf == 0.125


def test_mean_squared_error_and_its_root() -> None:
    d = difference(np.array([1.0, 2.0]), np.array([4.0, 6.0]))
    assert (d.mse, d.rmse) == (12.5, math.sqrt(12.5))
    d = difference(np.array([1e200]), np.array([3e200]))
    assert d.mse == INF
    assert d.rmse == pytest.approx(2e200, rel=1e-12)


@pytest.mark.spec("MET-23")
def test_calc_diff_does_not_cancel() -> None:
    assert difference(np.array([3.0, 4.0]), np.array([3.0, -4.0])).calc_diff == 64 / 50
    assert difference(np.zeros(2), np.zeros(2)).calc_diff == 0.0
    assert difference(np.zeros(2), np.ones(2)).calc_diff == 1.0
    tiny = difference(np.array([1.0]), np.array([1.0 + 2.0**-40])).calc_diff
    assert tiny == pytest.approx(2.0**-81, rel=1e-9)


@pytest.mark.spec("MET-24")
def test_sqnr_takes_the_mean_square_as_signal() -> None:
    d = difference(np.array([3.0, 4.0]), np.array([3.0, 4.5]))
    assert d.sqnr_db == pytest.approx(10 * math.log10(25 / 0.25), rel=1e-12)
    assert difference(np.ones(2), np.ones(2)).sqnr_db == INF
    assert difference(np.zeros(2), np.ones(2)).sqnr_db == -INF


@pytest.mark.spec("MET-26")
def test_pearson_survives_a_large_mean() -> None:
    noise = np.random.default_rng(3).standard_normal((2, 3 * BLOCK))
    expected = float(np.corrcoef(noise[0], noise[0] + noise[1])[0, 1])
    d = difference(noise[0] + 1e8, noise[0] + noise[1] + 1e8)
    assert d.pearson == pytest.approx(expected, abs=1e-6)
    small = difference(noise[0] * 1e-190, (noise[0] + noise[1]) * 1e170)
    assert small.pearson == pytest.approx(expected, rel=1e-9)


@pytest.mark.spec("MET-26")
def test_pearson_of_a_constant_is_undefined() -> None:
    x = np.arange(8, dtype=np.float32)
    assert difference(np.full(8, 0.1, np.float32), x).pearson is None
    assert difference(x, np.full(8, 0.1, np.float32)).pearson is None
    assert difference(np.full(3, 7), np.full(3, 7)).pearson is None
    assert difference(x + 1j, x + 1j).pearson is None
    assert difference(x, 3 - 2 * x).pearson == pytest.approx(-1.0, rel=1e-12)
    masked = np.where(x == 3, NAN, np.float32(0.1))
    assert difference(masked, masked * x).pearson is None


@pytest.mark.spec("MET-27")
@pytest.mark.parametrize(
    ("reference", "target", "expected"),
    [
        pytest.param(np.float32(1), np.float32(1 + 2.0**-23), 1, id="next"),
        pytest.param(np.float32(-0.0), np.float32(0), 0, id="zeros"),
        pytest.param(np.float32(-1e-45), np.float32(1e-45), 2, id="across-zero"),
        pytest.param(np.float32(LEAST), np.float32(-LEAST), 2 * 0x7F7FFFFF, id="all-of-float32"),
        pytest.param(1.0, np.float32(1), 0, id="float64-reference"),
        pytest.param(np.float32(1 + 2.0**-11), np.float16(1), 0, id="tie-to-even"),
        pytest.param(np.float32(1 + 2.0**-11 + 2.0**-20), np.float16(1), 1, id="above-the-tie"),
        pytest.param(np.float32(2.0**-25 * (1 + 2.0**-23)), np.float16(0), 1, id="above-half-a-subnormal"),
        pytest.param(np.float32(2.0**-25), np.float16(0), 0, id="half-a-subnormal"),
        pytest.param(np.float32(3 * 2.0**-25 * (1 - 2.0**-24)), np.float16(0), 1, id="just-below-a-tie"),
        pytest.param(np.float32(1e6), np.float16(65504), 1, id="overflow"),
        pytest.param(1.0, 1 + 2.0**-50, 4, id="float64"),
        pytest.param(-MAX, MAX, 2 * 0x7FEFFFFFFFFFFFFF, id="all-of-it"),
        pytest.param(np.int32(3), np.float32(3), 0, id="integer-reference"),
        pytest.param(np.float32(3), np.int32(4), None, id="integer-target"),
        pytest.param(np.complex64(3), np.float32(4), None, id="complex"),
    ],
)
def test_representable_values_are_counted(reference: Any, target: Any, expected: int | None) -> None:
    assert difference(reference, target).max_ulp == expected


@pytest.mark.spec("MET-27")
@pytest.mark.parametrize(
    "name", [n for n, form in FLOAT_FORMATS.items() if n in DTYPES and form.is_signed and form.bits <= 16]
)
def test_the_numbers_of_a_format_are_those_of_its_sorted_values(name: str) -> None:
    bits = np.arange(2 ** (8 * DTYPES[name].itemsize)).astype(f"<u{DTYPES[name].itemsize}")
    with np.errstate(invalid="ignore"):  # signalling NaN
        values = decode(bits.view(DTYPES[name].storage), DTYPES[name]).astype(np.float64)
    values = np.unique(values[np.isfinite(values)])
    numbers = FLOAT_FORMATS[name].numbers(values)
    assert (np.diff(numbers) == 1).all()
    assert numbers[values == 0] == 0
    middles = (values[1:] + values[:-1]) / 2
    for beside, expected in ((-1e-9, numbers[:-1]), (1e-9, numbers[1:])):
        assert (
            FLOAT_FORMATS[name].numbers(middles + np.abs(middles) * beside)[middles != 0]
            == expected[middles != 0]
        ).all()
    assert (FLOAT_FORMATS[name].numbers(middles) % 2 == 0).all()
    assert FLOAT_FORMATS[name].numbers(np.array([1e30]) * values[-1]) in (numbers[-1], numbers[-1] + 1)


@pytest.mark.spec("MET-27")
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(1 + 2.0**-8, 0, id="tie-down-to-even"),
        pytest.param(1 + 2.0**-8 + 2.0**-23, 1, id="above-the-tie"),
        pytest.param(1 + 3 * 2.0**-8, 2, id="tie-up-to-even"),
        pytest.param(1 + 3 * 2.0**-8 - 2.0**-23, 1, id="below-the-tie"),
    ],
)
def test_values_between_two_of_bfloat16_are_rounded_to_even(value: float, expected: int) -> None:
    one = np.array([0x3F80], np.uint16)
    d = raw_difference(np.array([value], np.float32), one, ("float32", "bfloat16"), (1,))
    assert d.max_ulp == expected


@pytest.mark.spec("MET-27")
def test_no_distance_is_counted_in_packed_values_and_scales() -> None:
    bytes_ = np.array([0x12, 0x34], np.uint8)
    for name in ("float4_e2m1fn_x2", "float8_e8m0fnu"):
        assert raw_difference(bytes_, bytes_ + np.uint8(1), (name, name), (2,)).max_ulp is None


@pytest.mark.spec("MET-28")
@pytest.mark.parametrize("kind", ["float32", "float64", "int64"])
@pytest.mark.parametrize("size", [1, 2, 10, 999, 1000, 30_000])
def test_quantiles_are_never_too_small_and_at_most_a_quarter_too_large(kind: str, size: int) -> None:
    errors = np.exp(np.random.default_rng(size).standard_normal(size) * 6)
    target = np.round(errors).astype(kind) if kind == "int64" else errors.astype(kind)
    d = difference(np.zeros(size, kind), target)
    exact = np.sort(target.astype(np.float64))
    for found, permille in ((d.p50_abs, 500), (d.p90_abs, 900), (d.p99_abs, 990), (d.p999_abs, 999)):
        at_rank = exact[-(-size * permille // 1000) - 1]
        assert found is not None
        assert at_rank <= found <= 1.2500001 * at_rank
        assert found <= exact[-1]


@pytest.mark.spec("MET-28")
def test_errors_of_zero_and_beyond_float32_have_quantiles() -> None:
    zeros = np.zeros(1000, np.float32)
    target = zeros.copy()
    target[:2] = 1e-45, 3e38
    d = difference(zeros, target)
    assert (d.p99_abs, d.errors[0], sum(count for _, count in d.errors)) == (0.0, (0, 998), 1000)
    assert 1e-45 <= quantiles(d.errors, [999])[0] <= 2.0**-126
    huge = difference(np.full(2, -3e38, np.float32), np.full(2, 3e38, np.float32))
    assert huge.p50_abs == huge.max_abs == 2 * float(np.float32(3e38))


@pytest.mark.spec("MET-28")
def test_a_bin_is_the_exponent_and_two_bits_of_the_mantissa() -> None:
    d = difference(np.zeros(5), np.array([0.0, 1.0, 1.2499, 1.25, 1.9]))
    assert d.errors == ((0, 1), (1023 * 4, 2), (1023 * 4 + 1, 1), (1023 * 4 + 3, 1))


@pytest.mark.spec("MET-29")
def test_the_needed_tolerances_pass_and_no_smaller_ones_do() -> None:
    random = np.random.default_rng(5)
    reference = random.standard_normal(3000).astype(np.float32)
    target = (reference * (1 + 1e-3 * random.standard_normal(3000))).astype(np.float32)
    d = difference(reference, target)
    assert d.needed_rtol is not None
    assert d.needed_atol is not None
    assert difference(reference, target, rtol=d.needed_rtol).mismatches == 0
    assert difference(reference, target, rtol=d.needed_rtol * (1 - 1e-15)).mismatches == 1
    assert difference(reference, target, atol=d.needed_atol).mismatches == 0
    assert difference(reference, target, atol=math.nextafter(d.needed_atol, 0)).mismatches == 1
    d = difference(np.array([49.0]), np.array([50.0]))  # 1/49 times 49 is less than 1 in float64
    assert difference(np.array([49.0]), np.array([50.0]), rtol=d.max_rel).mismatches == 1
    assert difference(np.array([49.0]), np.array([50.0]), rtol=d.needed_rtol).mismatches == 0
    assert difference(np.zeros(2), np.array([0, 1.0])).needed_rtol == INF
    assert difference(np.zeros(2), np.zeros(2)).needed_rtol == 0.0


@pytest.mark.spec("MET-3")
def test_every_count_of_errors_leaves_out_what_is_not_measured() -> None:
    d = difference(np.array([NAN, 0.0, 1.0], np.float32), np.array([1.0, INF, 2.0], np.float32), atol=0.0)
    assert (d.unequal, d.mismatches, d.zero_reference_errors, d.measured) == (1, 1, 0, 1)
    assert sum(count for _, count in d.errors) == 1


@pytest.mark.spec("MET-5")
def test_with_everything_set_apart_only_counts_are_left() -> None:
    masks = np.full((2, 64), LEAST, np.float32)
    d = difference(masks, masks, rtol=0.0)
    defined = {name for name, value in dataclasses.asdict(d).items() if value is not None}
    assert defined == {
        "elements", "measured", "same_bits", "errors", "unequal", "mismatches", "zero_reference_errors",
        "zero_rows", "nonfinite_reference", "nonfinite_target", "mask_mismatches", "sentinels",
        "sentinels_lost",
    }  # fmt: skip
    assert (d.sentinels, d.measured, len(d.errors)) == (128, 0, 0)


# Pairs that today's tools judge wrong: what their metrics are.


def test_case_19_half_precision_metrics_do_not_overflow() -> None:
    d = difference(np.full((64, 256), 300, np.float16), np.full((64, 256), -100, np.float16))
    assert (d.mse, d.mean_abs, d.cosine) == (160000.0, 400.0, -1.0)
    assert d.sqnr_db == pytest.approx(20 * math.log10(300 / 400), rel=1e-12)


def test_case_21_integers_are_exact() -> None:
    d = difference(np.array([2**53, 2**62, 7]), np.array([2**53 + 1, -(2**62), 7]), rtol=0.0)
    assert (d.mismatches, d.max_abs, d.max_abs_index) == (2, 2**63, (1,))


def test_case_23_zeros_and_constants() -> None:
    x = np.arange(1, 9, dtype=np.float32)
    zeros = difference(x * 0, x * 0)
    assert (zeros.unequal, zeros.cosine, zeros.relative_frobenius, zeros.psnr_db) == (0, None, 0.0, INF)
    ones = difference(x * 0, x * 0 + 1)
    assert (ones.unequal, ones.cosine, ones.relative_frobenius) == (8, None, INF)
    double = difference(x, 2 * x)
    assert double.cosine == pytest.approx(1.0, rel=1e-15)
    assert double.relative_frobenius == 1.0
    constant = difference(x * 0 + 3, x * 0 + 3)
    assert (constant.psnr_db, constant.pearson) == (INF, None)
    tiny = x * np.float32(1e-30)
    assert difference(tiny, tiny).cosine == 1.0


def test_case_25_empty_scalar_and_complex() -> None:
    empty = difference(np.zeros((0, 4), np.float32), np.zeros((0, 4), np.float32))
    assert (empty.elements, empty.same_bits, empty.max_abs) == (0, True, None)
    scalar = difference(np.float32(2.5), np.float32(3.5))
    assert (scalar.max_abs, scalar.max_abs_index, scalar.outlier, scalar.outlier_index) == (1.0, (), 0.2, ())
    pair = np.array([1 + 1j, 2 + 2j], np.complex64)
    assert difference(pair, pair + np.array([0, 3 + 4j], np.complex64)).max_abs == 5.0


def test_case_61_rounding_near_zero_is_large_relative_to_elements_only() -> None:
    random = np.random.default_rng(0)
    x, w = random.standard_normal((64, 256)), random.standard_normal((256, 128)) / 16
    reference = x @ w

    low_x, low_w = (to_bfloat16(each).astype(np.float64) for each in (x, w))
    target = to_bfloat16(low_x @ low_w)
    d = difference(reference, target)
    assert d.max_rel is not None
    assert d.max_rel > 0.5
    for found, limit in ((d.relative_frobenius, 1e-2), (d.row_error_median, 1e-2), (d.outlier, 5e-2)):
        assert found is not None
        assert found < limit
    small = random.standard_normal(1000) * 1e-6
    d = difference(small, 2 * small, atol=1e-5)
    assert (d.mismatches, d.relative_frobenius) == (0, 1.0)


FLAT = np.arange(4096).reshape(1, 64, 64)
IDS = np.arange(2**24 - 6, 2**24 + 58)
X = np.random.default_rng(3).standard_normal((1, 64, 64)).astype(np.float32)


def with_value(value: float, at: int = 5) -> Array:
    changed = X.copy()
    changed.reshape(-1)[at] = value
    return changed


@pytest.mark.parametrize(
    ("reference", "target", "expected"),
    [
        pytest.param(X, with_value(X.reshape(-1)[100] + 1, 100), {"max_abs": 1.0}, id="one-outlier"),
        pytest.param(X, X * 2, {"relative_frobenius": 1.0}, id="scaled"),
        pytest.param(X + 100, X + np.float32(100.5), {"max_abs": 0.5}, id="shifted"),
        pytest.param(with_value(NAN), with_value(NAN), {"mask_mismatches": 0, "max_abs": 0.0}, id="same-nan"),
        pytest.param(X, with_value(NAN), {"mask_mismatches": 1, "mask_index": (0, 0, 5)}, id="new-nan"),
        pytest.param(with_value(INF), with_value(-INF), {"mask_mismatches": 1}, id="inf-sign"),
        pytest.param(
            IDS, IDS + np.arange(64) % 2,
            {"max_abs": 1, "unequal": 32}, id="int64-off-by-one",
        ),
        pytest.param(X + np.float64(1e8), X + np.float64(1e8) + 0.1, {"unequal": 4096}, id="float64"),
        pytest.param(
            np.zeros((1, 8, 8)), np.full((1, 8, 8), 1e-12),
            {"relative_frobenius": INF, "zero_rows": 1, "max_abs": 1e-12}, id="zeros-and-tiny",
        ),
        pytest.param(X > 0, (X > 0) ^ (FLAT == 7), {"unequal": 1, "max_abs": 1}, id="bool"),
        pytest.param(np.float32(1), np.float32(2), {"max_abs": 1.0, "max_rel": 1.0}, id="scalar"),
    ],
)  # fmt: skip
def test_traps_show_in_the_metrics(reference: Array, target: Array, expected: dict[str, Any]) -> None:
    d = difference(reference, target)
    for name, value in expected.items():
        found = getattr(d, name)
        assert found == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), name


def test_bin_numbers_are_found_at_every_rank() -> None:
    errors = Histogram([0, 4092, 4096], [1, 998, 1])
    assert quantiles(errors, [1, 2, 999, 1000]) == [0.0, 1.25, 1.25, 2.5]


def test_histograms_add_up_also_if_nothing_is_counted() -> None:
    # Parts of a tensor whose rows are all zero in the reference have no relative error to count.
    assert tuple(Histogram() + Histogram()) == ()
    assert tuple(Histogram([3], [2]) + Histogram()) == ((3, 2),)
    assert tuple(Histogram([3, 5], [2, 1]) + Histogram([3], [4])) == ((3, 6), (5, 1))
