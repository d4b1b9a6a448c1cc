"""A quantised Llama: two layers that rounding hits hard come first; of one that is good none does."""

from __future__ import annotations

import pytest

from tensorcap.sensitivities import sensitivity
from tests.sensitivities import models

pytestmark = pytest.mark.slow


@pytest.mark.spec("SEN-5")
def test_outliers_of_a_quantised_llama_come_first() -> None:
    result = sensitivity(models.reference(), models.target())
    assert {group.name for group in result.groups[:2]} == set(models.OUTLIERS)
    assert {group.name for group in result.outliers} == set(models.OUTLIERS)
    assert result.runs < 2 * result.layers
    goal = sensitivity(models.reference(), models.target(), goal=f"kl={0.3 * result.total!r}")
    assert set(goal.keep) == set(models.OUTLIERS)


@pytest.mark.spec("SEN-5")
def test_no_layer_of_a_model_that_is_good_all_over_stands_out() -> None:
    result = sensitivity(models.uniform_reference(), models.uniform_target())
    assert result.outliers == ()
    assert result.keep == ()
    assert result.runs == 3 + 2 * 6
