"""Values beyond the range of their numbers."""

from __future__ import annotations

import numpy as np
import pytest

from tensorcap.comparison.cut_values import find_cut
from tensorcap_formats.dtypes import Array


def normal(rows: int) -> Array:
    return np.random.default_rng(0).uniform(-1, 1, (rows, 200))


@pytest.mark.spec("POL-620")
@pytest.mark.parametrize(("rows", "channels"), [(16, (3, 50, 51, 52, 199)), (1, ())], ids=["many", "one row"])
def test_channels_that_are_cut_as_a_whole_are_known_of_some_rows(
    rows: int, channels: tuple[int, ...]
) -> None:
    values = normal(rows)
    values[:, [3, 50, 51, 52, 199]] = 1.5
    cut = find_cut(values, [-1.0, 1.0], 0.01, "its inputs")
    assert cut is not None
    assert (cut.share, cut.channels) == (0.025, channels)
    assert not cut.is_choice  # 2.5 % of them
    assert np.abs(cut.error).sum() == pytest.approx(0.5 * 5 * rows)
    assert cut.text.startswith(
        "2.5 % of its inputs lie beyond the calibrated range -1 to 1 and are cut, 1.5 to 1"
    )


@pytest.mark.spec("POL-620")
def test_a_value_half_a_step_beyond_is_rounded_only() -> None:
    values = normal(4)
    values[0, 0] = 1.004
    assert find_cut(values, [-1.0, 1.0], 0.01, "its inputs") is None
    values[0, 0] = 1.3
    cut = find_cut(values, [-1.0, 1.0], 0.01, "its inputs")
    assert cut is not None
    assert cut.is_choice


@pytest.mark.parametrize(
    ("ends", "step"), [(None, 0.1), ([-1.0], 0.1), ([-1.0, 1.0], None), ([], 0.1), (["-1", 1.0], 0.1)]
)
def test_without_a_range_nothing_is_known(ends: object, step: object) -> None:
    assert find_cut(normal(2) * 9, ends, step, "its results") is None


def test_all_values_may_be_cut() -> None:
    cut = find_cut(np.full((2, 4), 3.0), [-1.0, 1.0], 0.01, "its results")
    assert cut is not None
    assert cut.text.startswith("100 % of its results lie beyond")
