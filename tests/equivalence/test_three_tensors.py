"""R, BC and sigma of three tensors, with literal values."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tensorcap.equivalence.component_result import judge
from tensorcap.metrics import compare_three
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import UsageError

REFERENCE = np.array([[3.0, 4.0], [0.0, 12.0]])  # of norm 13


def off_by(size: float) -> Array:
    """The reference with one element off."""
    off: Array = REFERENCE + np.array([[0.0, size], [0.0, 0.0]])
    return off


@pytest.mark.spec("EQV-30")
def test_ratio_is_the_distance_over_that_of_the_baseline() -> None:
    three = compare_three(REFERENCE, off_by(0.5), off_by(-1.5))
    assert (three.ratio, three.sigma_ratio, three.elements) == (3.0, 3.0, 4)
    assert three.relative_error == 1.5 / 13
    assert three.metrics == pytest.approx(
        {
            "abs_max_elem_diff_2_1": 0.5,
            "abs_mean_elem_diff_2_1": 0.125,
            "rel_max_elem_diff_2_1": 0.125,
            "rel_mean_elem_diff_2_1": 0.03125,
            "rel_matrix_fro_norm_dist_2_1": 0.5 / 13,
            "rel_matrix_inf_norm_dist_2_1": 0.5 / 12,
            "abs_max_elem_diff_3_1": 1.5,
            "abs_mean_elem_diff_3_1": 0.375,
            "rel_max_elem_diff_3_1": 0.375,
            "rel_mean_elem_diff_3_1": 0.09375,
            "rel_matrix_fro_norm_dist_3_1": 1.5 / 13,
            "rel_matrix_inf_norm_dist_3_1": 1.5 / 12,
        }
    )


@pytest.mark.spec("EQV-30")
@pytest.mark.parametrize(
    ("baseline", "target", "ratio", "is_exact"),
    [
        pytest.param(0.0, 0.0, 0.0, True, id="all-equal"),
        pytest.param(0.0, 1.3e-6, 1.0, True, id="baseline-exact-and-epsilon-relative"),
        pytest.param(1e-7, 1.3e-6, 1.0, True, id="baseline-within-epsilon"),
        pytest.param(0.5, 0.0, 0.0, False, id="target-exact"),
    ],
)
def test_a_baseline_without_error_is_told(
    baseline: float, target: float, ratio: float, is_exact: bool
) -> None:
    three = compare_three(REFERENCE, off_by(baseline), off_by(target))
    assert three.ratio == pytest.approx(ratio, rel=1e-6)
    assert three.is_baseline_exact is is_exact


@pytest.mark.spec("EQV-30")
def test_elements_that_are_not_finite_are_never_replaced() -> None:
    spoiled = off_by(0.25)
    spoiled[1, 1] = math.nan
    three = compare_three(REFERENCE, off_by(0.5), spoiled)
    assert (three.ratio, three.nonfinite) == (math.inf, 1)
    left_out = [values.copy() for values in (REFERENCE, off_by(0.5), off_by(0.25))]
    for values in left_out:
        values[1, 1] = math.nan
    three = compare_three(*left_out)
    assert (three.ratio, three.nonfinite, three.elements) == (0.5, 0, 3)


@pytest.mark.spec("EQV-30")
def test_unlike_shapes_are_refused() -> None:
    with pytest.raises(UsageError, match=r"reference \[2, 2\], baseline \[2, 2\], target \[4\]"):
        compare_three(REFERENCE, REFERENCE, REFERENCE.reshape(-1))
    with pytest.raises(UsageError, match="there is no element"):
        compare_three(np.empty((0, 3)), np.empty((0, 3)), np.empty((0, 3)))


@pytest.mark.spec("EQV-30")
def test_overlap_is_one_for_equal_errors_and_nothing_for_errors_apart() -> None:
    errors = np.random.default_rng(0).normal(size=10_000)
    zeros = np.zeros(10_000)
    assert compare_three(zeros, errors, errors[::-1]).bhattacharyya == pytest.approx(1.0)
    assert compare_three(zeros, errors * 1e-3, errors * 1e-3 + 1.0).bhattacharyya == 0.0
    # of two normal distributions, one of twice the width, it is sqrt(2 s t / (s**2 + t**2)) = sqrt(4 / 5)
    twice = compare_three(zeros, errors, 2 * np.random.default_rng(1).normal(size=10_000))
    assert twice.bhattacharyya == pytest.approx(math.sqrt(4 / 5), abs=0.02)


@pytest.mark.spec("EQV-31")
@pytest.mark.parametrize(
    ("ratio", "passed", "words"),
    [
        pytest.param(1.0, True, "as the precision alone makes it", id="usual"),
        pytest.param(1.19, True, "as the precision alone makes it", id="below"),
        pytest.param(1.25, False, "R is not below 1.22", id="above"),
        pytest.param(0.5, True, "by itself no mistake", id="more-precise"),
    ],
)
def test_r_of_many_elements_has_to_be_below_the_limit(ratio: float, passed: bool, words: str) -> None:
    generator = np.random.default_rng(0)
    reference, error = generator.normal(size=40_000), generator.normal(size=40_000) * 1e-3
    three = compare_three(reference, reference + error, reference - ratio * error)
    judged, limit, text = judge(three, 1.2, "bfloat16")
    assert limit == pytest.approx(1.2 * (1 + 3 / 200))
    assert judged is passed
    assert words in text


@pytest.mark.spec("EQV-31")
def test_few_elements_and_sums_over_ranks_widen_the_limit() -> None:
    reference = np.full(100, 1.0)
    error = np.where(np.arange(100) % 2, 1e-3, -1e-3)
    three = compare_three(reference, reference + error, reference + 1.5 * error)
    passed, limit, _ = judge(three, 1.2, "bfloat16")
    assert passed
    assert limit == pytest.approx(1.2 * 1.3)
    many = compare_three(
        *(np.tile(one, 400) for one in (reference, reference + error, reference + 1.5 * error))
    )
    assert not judge(many, 1.2, "bfloat16")[0]
    # one rounding to bfloat16 is about 2**-8 / sqrt(3) = 0.00226 of a value at worst, twice the baseline here
    passed, limit, words = judge(many, 1.2, "bfloat16", 1.0)
    assert passed
    assert 1.5 < limit < 3.0
    assert "sum over ranks" in words


@pytest.mark.spec("EQV-31")
def test_without_an_error_of_the_source_one_rounding_passes() -> None:
    three = compare_three(REFERENCE, REFERENCE, off_by(2.0**-8))
    assert judge(three, 1.2, "bfloat16")[0]
    three = compare_three(REFERENCE, REFERENCE, off_by(0.1))
    passed, _, words = judge(three, 1.2, "bfloat16")
    assert (passed, words) == (False, "the source is exact here, the port is off by 0.0077")


@pytest.mark.spec("EQV-31")
def test_what_is_not_finite_fails() -> None:
    spoiled = REFERENCE.copy()
    spoiled[0, 0] = math.inf
    passed, _, words = judge(compare_three(REFERENCE, off_by(0.5), spoiled), 1.2, "bfloat16")
    assert not passed
    assert words == "1 of 3 elements are finite on one side only"
