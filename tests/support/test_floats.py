"""Rounding to bfloat16 against bits that are known."""

import numpy as np
import pytest

from tensorcap_formats.dtypes import dtype_of
from tests.support.floats import bfloat16, bfloat16_bits, to_bfloat16


@pytest.mark.parametrize(
    ("float32_bits", "expected"),
    [
        pytest.param(0x3F800000, 0x3F80, id="one"),
        pytest.param(0xC0490FDB, 0xC049, id="minus-pi-is-rounded-to-nearest"),
        pytest.param(0x3F808000, 0x3F80, id="tie-goes-down-to-even"),
        pytest.param(0x3F818000, 0x3F82, id="tie-goes-up-to-even"),
        pytest.param(0x3F807FFF, 0x3F80, id="just-below-a-tie"),
        pytest.param(0x3F808001, 0x3F81, id="just-above-a-tie"),
        pytest.param(0x3FFFFFFF, 0x4000, id="carry-into-the-exponent"),
        pytest.param(0x80000000, 0x8000, id="minus-zero"),
        pytest.param(0x00018000, 0x0002, id="subnormal-tie"),
        pytest.param(0x7F800000, 0x7F80, id="infinity"),
    ],
)
def test_values_are_rounded_to_nearest_and_ties_to_even(float32_bits: int, expected: int) -> None:
    value = np.array([float32_bits], np.uint32).view(np.float32)
    assert bfloat16_bits(value).tolist() == [expected]
    assert to_bfloat16(value).view(np.uint32).tolist() == [expected << 16]


def test_an_archive_stores_them_as_bfloat16() -> None:
    assert dtype_of(bfloat16([1.0])).name == "bfloat16"
