"""A hypothesis holds by how sure it is, also beside rounding; and a text says what its numbers say."""

from __future__ import annotations

import numpy as np
import pytest

from tensorcap.diagnosis import Hypothesis, Scorer
from tensorcap.diagnosis.values import estimate_step, number_text
from tests.diagnosis.conftest import Diagnose
from tests.support.floats import to_bfloat16

ROUNDING = 0.425 / 256  # of bfloat16, relative


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


@pytest.mark.spec("DIA-130")
def test_a_factor_that_is_known_well_is_found_beside_rounding(
    diagnosed: Diagnose, rng: np.random.Generator
) -> None:
    r = rng.standard_normal((2, 24, 256))
    # Gemma multiplies embeddings by the root of the width in bfloat16: 55.5 for 55.4256
    t = 55.5 / 55.42562584220407 * r
    found = diagnosed(r, t, precision="bfloat16", config={"hidden_size": 3072})
    first = found.explanations[0]
    assert first.kind == "factor"
    assert first.facts["factor"] == pytest.approx(1.0013419, abs=1e-4)
    assert 0 < first.facts["standard_error"] < 5e-5  # a rounding over the root of 12,288 elements is 1.5e-5
    assert "that of sqrt(hidden_size) in bfloat16 over sqrt(hidden_size)" in first.facts["equals"]
    assert first.after == pytest.approx(ROUNDING, rel=0.1)


@pytest.mark.spec("DIA-130")
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("axis", [1, 2])
def test_a_rounded_weight_or_statistic_is_no_factor(diagnosed: Diagnose, axis: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    r = rng.standard_normal((1, 24, 64))
    shape = [1, 1, 1]
    shape[axis] = r.shape[axis]
    w = 1 + 0.3 * rng.standard_normal(shape)
    found = diagnosed(r * w, r * to_bfloat16(w).astype(float), precision="bfloat16")
    assert {"factor", "offset", "affine"}.isdisjoint(e.kind for e in found.explanations)


@pytest.mark.spec("DIA-130")
@pytest.mark.parametrize(
    ("change", "step", "inherited", "parameters", "is_within"),
    [
        pytest.param(0.8, 1.0, 0.0, 0, True, id="known"),
        pytest.param(0.8, 1.0, 2.0, 0, False, id="the-inputs-err-more"),
        pytest.param(0.8, 1.0, 0.0, 2, False, id="two-numbers"),
        pytest.param(0.8, 0.5, 0.0, 0, False, id="half-of-what-it-says"),
        pytest.param(0.1, 1.0, 0.0, 0, False, id="less-than-a-quarter-of-a-rounding"),
    ],
)
def test_what_is_certain_may_leave_rounding(
    rng: np.random.Generator,
    change: float,
    step: float,
    inherited: float,
    parameters: int,
    *,
    is_within: bool,
) -> None:
    r, way, noise = rng.standard_normal((3, 64, 64))
    way *= change * ROUNDING
    t = r + step * way + ROUNDING * noise
    explanation = Scorer(ROUNDING, inherited * ROUNDING).score(
        Hypothesis("x", "x", t, r + way, r, parameters=parameters)
    )
    assert explanation.is_within is is_within


@pytest.mark.spec("DIA-130")
def test_an_error_of_one_channel_makes_a_step_uncertain() -> None:
    start, end = np.zeros((16, 16)), np.ones((16, 16))
    observed = start.copy()
    observed[:, 0] = 16.0  # the mean of all is 1, and one of 16 channels makes it
    step = estimate_step(observed, end, start)
    assert step.value == pytest.approx(1.0)
    assert step.error == pytest.approx(1.0)  # of 16 means, one 16 and the others 0: their deviation is 4


@pytest.mark.spec("DIA-131")
@pytest.mark.parametrize("share", [0.0002, 0.0005, 0.003])
def test_a_few_zeros_beside_a_scale_of_one_are_no_dropout(
    diagnosed: Diagnose, rng: np.random.Generator, share: float
) -> None:
    r = rng.standard_normal((4, 64, 256))
    t = np.where(rng.random(r.shape) < share, 0.0, r * 1.00001)
    found = diagnosed(r, t)
    assert "dropout" not in found.tried


@pytest.mark.spec("DIA-131")
@pytest.mark.parametrize(
    ("value", "neutral", "text"),
    [
        pytest.param(1.0000003, 1.0, "1.0000003", id="factor"),
        pytest.param(0.9999999, 1.0, "0.9999999", id="smaller"),
        pytest.param(0.25, 1.0, "0.25", id="plain"),
        pytest.param(1e-9, 0.0, "1e-09", id="offset"),
    ],
)
def test_a_number_that_changes_something_does_not_look_as_if_it_did_not(
    value: float, neutral: float, text: str
) -> None:
    assert number_text(value, neutral) == text


@pytest.mark.spec("DIA-131")
def test_a_tiny_factor_is_told_with_its_digits(diagnosed: Diagnose, rng: np.random.Generator) -> None:
    r = rng.standard_normal((1, 24, 64)).astype(np.float32).astype(float)
    found = diagnosed(r, r * (1 + 2e-6))
    factor = next(e for e in found.explanations if e.kind == "factor")
    assert "times 1.000002" in factor.text
