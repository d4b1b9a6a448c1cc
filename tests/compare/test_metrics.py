"""The measures of specs/comparison.md against numbers worked out by hand or by plain numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tensorcap.metrics import BLOCK, Difference, DifferenceBuilder, Nonfinite, Tolerance, exact_difference
from tensorcap_formats.dtypes import Array, bits_of, dtype, dtype_of

NAN, INF = math.nan, math.inf


def difference(
    reference: Any, target: Any, *, rtol: float | None = None, atol: float | None = None
) -> Difference:
    reference, target = np.asarray(reference), np.asarray(target)
    builder = DifferenceBuilder(
        dtype_of(reference), dtype_of(target), reference.shape, tolerance=Tolerance.given(rtol, atol)
    )
    builder.update(bits_of(reference).reshape(-1), bits_of(target).reshape(-1))
    return builder.result()


def raw_difference(
    reference: Array, target: Array, names: tuple[str, str], shape: tuple[int, ...]
) -> Difference:
    builder = DifferenceBuilder(dtype(names[0]), dtype(names[1]), shape)
    builder.update(reference, target)
    return builder.result()


@pytest.mark.spec("CMP-20")
def test_float32_is_subtracted_in_float64() -> None:
    d = difference(np.array([1.0, 16777216.0], np.float32), np.array([1.0000001, 16777218.0], np.float32))
    assert d.max_abs == 2.0
    assert d.mean_abs == (2.0 + 2.0**-23) / 2


@pytest.mark.spec("CMP-20")
def test_float16_sums_do_not_overflow() -> None:
    d = difference(np.full(1000, 60000, np.float16), np.full(1000, -60000, np.float16))
    assert (d.max_abs, d.mean_abs, d.relative_frobenius) == (120000.0, 120000.0, 2.0)


@pytest.mark.spec("CMP-20")
@pytest.mark.parametrize(
    "scale", [pytest.param(s, id=f"{s:g}") for s in (1e-320, 1e-200, 1e-30, 1.0, 1e150, 1e200, 1e307)]
)
def test_squares_neither_overflow_nor_vanish(scale: float) -> None:
    d = difference(np.array([3.0, 4.0]) * scale, np.array([3.0, 8.0]) * scale)
    assert d.relative_frobenius == pytest.approx(0.8, rel=1e-3)
    assert d.cosine == pytest.approx((9 + 32) / (5 * math.sqrt(73)), rel=1e-3)
    assert d.psnr_db == pytest.approx(10 * math.log10(16 / 8), rel=1e-2)
    assert d.mean_abs == pytest.approx(2 * scale, rel=1e-3)


@pytest.mark.spec("CMP-20")
def test_tiny_and_huge_elements_of_unlike_blocks_add_up() -> None:
    reference = np.concatenate([np.full(BLOCK, 1e-200), np.full(BLOCK, 1e200), np.full(BLOCK, 1e-200)])
    d = difference(reference, reference * 2)
    assert d.relative_frobenius == pytest.approx(1.0, rel=1e-12)
    assert d.cosine == pytest.approx(1.0, rel=1e-12)
    assert d.mean_abs == pytest.approx(1e200 / 3, rel=1e-12)


@pytest.mark.spec("CMP-20")
def test_an_error_beyond_float64_is_infinite_and_never_within_a_tolerance() -> None:
    d = difference(np.array([1.7e308, 1.0]), np.array([-1.7e308, 1.0]), rtol=1e10, atol=1e300)
    assert (d.max_abs, d.max_abs_index, d.mismatches, d.psnr_db) == (INF, (0,), 1, -INF)


@pytest.mark.spec("CMP-21")
def test_int64_differences_neither_wrap_nor_round() -> None:
    d = difference(np.array([2**53, 2**62, 7]), np.array([2**53 + 1, -(2**62), 7]), rtol=0.0)
    assert (d.max_abs, d.max_abs_index, d.unequal, d.mismatches) == (2**63, (1,), 2, 2)
    assert (d.max_abs_reference, d.max_abs_target) == (2**62, -(2**62))
    d = difference(np.array([2**53]), np.array([2**53 + 1]), rtol=0.0)
    assert (d.max_abs, d.mean_abs, d.mismatches) == (1, 1.0, 1)


@pytest.mark.spec("CMP-21")
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


@pytest.mark.spec("CMP-21")
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


@pytest.mark.spec("CMP-21")
def test_sums_of_large_integers_are_exact() -> None:
    reference = np.zeros(3 * BLOCK, np.uint64)
    target = np.full(3 * BLOCK, 2**64 - 1, np.uint64)
    assert difference(reference, target).mean_abs == float(2**64 - 1)


@pytest.mark.spec("CMP-21")
def test_flipped_bools_are_counted() -> None:
    d = difference(np.zeros(8, bool), np.array([0, 0, 1, 0, 0, 1, 0, 0], bool), atol=0.5)
    assert (d.max_abs, d.max_abs_index, d.unequal, d.mismatches, d.mean_abs) == (1, (2,), 2, 2, 0.25)
    assert (d.max_abs_reference, d.max_abs_target) == (False, True)


@pytest.mark.spec("CMP-22")
def test_only_elements_finite_on_both_sides_are_measured() -> None:
    d = difference(np.array([1.0, NAN, INF, 2.0]), np.array([1.5, NAN, 5.0, -INF]))
    assert (d.elements, d.measured, d.max_abs, d.mean_abs) == (4, 1, 0.5, 0.5)
    assert d.relative_frobenius == 0.5


@pytest.mark.spec("CMP-22")
def test_complex_error_is_the_modulus_of_the_difference() -> None:
    d = difference(
        np.array([1 + 1j, 2 + 2j], np.complex64), np.array([1 + 1j, 5 + 6j], np.complex64), atol=4.9
    )
    assert (d.max_abs, d.max_abs_index, d.mean_abs, d.mismatches) == (5.0, (1,), 2.5, 1)
    assert (d.max_abs_reference, d.max_abs_target) == (2 + 2j, 5 + 6j)
    assert d.relative_frobenius == pytest.approx(5 / math.sqrt(10), rel=1e-12)


@pytest.mark.spec("CMP-22")
def test_the_finite_part_of_a_complex_element_is_measured_beside_an_infinite_one() -> None:
    d = difference(np.array([complex(INF, 1.0)]), np.array([complex(INF, 3.0)]))
    assert (d.measured, d.mask_mismatches, d.max_abs) == (1, 0, 2.0)


@pytest.mark.spec("CMP-23")
def test_masks_are_compared_class_by_class() -> None:
    reference = np.array([[NAN, INF, -INF], [0.0, NAN, INF]], np.float32)
    target = np.array([[NAN, INF, INF], [0.0, 1.0, INF]], np.float32)
    d = difference(reference, target)
    assert d.nonfinite_reference == Nonfinite(nan=2, posinf=2, neginf=1)
    assert d.nonfinite_target == Nonfinite(nan=1, posinf=3, neginf=0)
    assert (d.mask_mismatches, d.mask_index) == (2, (0, 2))


@pytest.mark.spec("CMP-23")
def test_complex_masks_are_compared_part_by_part() -> None:
    d = difference(np.array([complex(INF, 0), 1j]), np.array([complex(0, INF), 1j]))
    assert (d.mask_mismatches, d.mask_index) == (1, (0,))
    assert (d.nonfinite_reference, d.nonfinite_target) == (Nonfinite(posinf=1), Nonfinite(posinf=1))


@pytest.mark.spec("CMP-23")
def test_the_first_unlike_mask_is_found_in_a_later_block() -> None:
    reference = np.zeros((3, BLOCK), np.float32)
    target = reference.copy()
    target[1, 5] = target[2, 7] = NAN
    d = difference(reference, target)
    assert (d.mask_mismatches, d.mask_index) == (2, (1, 5))


@pytest.mark.spec("CMP-24")
def test_the_largest_error_has_its_index_and_both_values() -> None:
    reference = np.zeros((2, 3, BLOCK), np.float32)
    target = reference.copy()
    target[1, 2, 100] = -4.0
    target[0, 1, 7] = 3.0
    d = difference(reference, target)
    assert (d.max_abs, d.max_abs_index) == (4.0, (1, 2, 100))
    assert (d.max_abs_reference, d.max_abs_target) == (0.0, -4.0)


@pytest.mark.spec("CMP-24")
def test_of_equal_errors_the_first_is_named_and_no_error_has_no_place() -> None:
    zeros = np.zeros(3 * BLOCK)
    assert difference(zeros, zeros + 1).max_abs_index == (0,)
    assert difference(zeros, zeros).max_abs_index is None
    assert difference(zeros, zeros).max_abs == 0
    assert difference(np.float32(1), np.float32(2)).max_abs_index == ()


@pytest.mark.spec("CMP-24")
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


@pytest.mark.spec("CMP-25")
def test_mean_error_is_over_measured_elements() -> None:
    d = difference(np.array([0.0, 0.0, NAN, 0.0]), np.array([1.0, -2.0, NAN, 0.0]))
    assert d.mean_abs == 1.0


@pytest.mark.spec("CMP-26")
def test_relative_frobenius_error_of_a_zero_reference() -> None:
    assert difference(np.zeros(3), np.ones(3)).relative_frobenius == INF
    assert difference(np.zeros(3), np.zeros(3)).relative_frobenius == 0.0
    assert difference(np.array([3, 4], np.float32), np.array([3, 4.5], np.float32)).relative_frobenius == 0.1


@pytest.mark.spec("CMP-27")
def test_cosine_is_undefined_for_a_zero_vector_only() -> None:
    x = np.arange(1, 9, dtype=np.float32)
    assert difference(np.zeros(3), np.zeros(3)).cosine is None
    assert difference(np.zeros(3), np.ones(3)).cosine is None
    assert difference(x, x).cosine == 1.0
    assert difference(x, 2 * x).cosine == pytest.approx(1.0, abs=1e-15)
    assert difference(x, -x).cosine == -1.0
    assert difference(np.array([1.0, 0.0]), np.array([0.0, 1.0])).cosine == 0.0
    assert difference(np.array([1 + 1j]), np.array([1 - 1j])).cosine == 0.0


@pytest.mark.spec("CMP-28")
def test_psnr_takes_the_largest_reference_as_peak() -> None:
    assert difference(np.array([10.0, 0.0]), np.array([10.0, 1.0])).psnr_db == 10 * math.log10(100 / 0.5)
    assert difference(np.full(4, 3.0), np.full(4, 3.0)).psnr_db == INF
    assert difference(np.zeros(2), np.ones(2)).psnr_db == -INF


@pytest.mark.spec("CMP-29")
def test_mismatches_and_unequal_elements_are_counted_apart() -> None:
    reference = np.array([1.0, 10.0, 100.0, 0.0])
    target = np.array([1.05, 10.5, 120.0, 0.0])
    d = difference(reference, target, rtol=0.1)
    assert (d.unequal, d.mismatches) == (3, 1)
    assert difference(reference, target).mismatches is None


@pytest.mark.spec("CMP-12")
def test_a_tolerance_that_is_left_out_is_zero() -> None:
    assert Tolerance.given(1e-3, None) == Tolerance(1e-3, 0.0)
    assert Tolerance.given(None, 1e-3) == Tolerance(0.0, 1e-3)
    assert Tolerance.given(0.0, None) == Tolerance(0.0, 0.0)
    assert Tolerance.given(None, None) is None
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
        Tolerance.given(value, None)
    with pytest.raises(ValueError, match=r"^atol: is"):
        Tolerance.given(None, value)


@pytest.mark.spec("CMP-12")
def test_a_modulus_beyond_float64_hides_no_error() -> None:
    reference = np.array([complex(1.5e308, 1.5e308)])
    assert difference(reference, reference + 1e300, atol=1.0).mismatches == 1
    assert difference(reference, reference, atol=1.0).mismatches == 0


@pytest.mark.spec("CMP-30")
@pytest.mark.parametrize(
    "values",
    [pytest.param(np.zeros((0, 4)), id="empty"), pytest.param(np.full(3, NAN), id="all-nan")],
)
def test_nothing_measured_leaves_errors_undefined(values: Array) -> None:
    d = difference(values, values, rtol=0.0)
    assert (d.measured, d.unequal, d.mismatches, d.same_bits) == (0, 0, 0, True)
    assert [d.max_abs, d.mean_abs, d.relative_frobenius, d.cosine, d.psnr_db] == [None] * 5


@pytest.mark.spec("CMP-31")
def test_sums_are_bit_equal_however_the_bytes_come_in() -> None:
    random = np.random.default_rng(0)
    reference = random.standard_normal(10 * BLOCK + 77).astype(np.float32)
    target = reference + random.standard_normal(reference.size).astype(np.float32) * np.float32(1e-3)
    whole = difference(reference, target)
    for step in (BLOCK, 3 * BLOCK):
        builder = DifferenceBuilder(dtype("float32"), dtype("float32"), reference.shape)
        for start in range(0, reference.size, step):
            builder.update(reference[start : start + step], target[start : start + step])
        assert builder.result() == whole


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
