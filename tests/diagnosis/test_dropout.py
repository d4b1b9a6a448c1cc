"""Dropout that is active in the target."""

from __future__ import annotations

import numpy as np
import pytest

from tensorcap_formats.dtypes import Array
from tests.diagnosis.conftest import Diagnose
from tests.support.floats import to_bfloat16

OUT = "0/m/output"
PRECISIONS = ["float32", "bfloat16"]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(8)


def dropped(values: Array, share: float, rng: np.random.Generator) -> Array:
    return np.asarray(np.where(rng.random(values.shape) < share, 0, values / (1 - share)))


@pytest.mark.spec("DIA-46")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_dropout_is_reported_with_its_share(
    diagnosed: Diagnose, rng: np.random.Generator, precision: str, share: float
) -> None:
    r = rng.standard_normal((2, 24, 64))
    found = diagnosed(r, dropped(r, share, rng), precision=precision)
    assert found.explanations[0].kind == "dropout"
    assert found.explanations[0].facts["factor"] == pytest.approx(1 / (1 - share), rel=0.01)
    assert found.explanations[0].facts["share"] == pytest.approx(share, abs=0.03)


@pytest.mark.spec("DIA-46")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_dropout_of_what_is_added_to_a_residual_is_reported(
    diagnosed: Diagnose, rng: np.random.Generator, precision: str
) -> None:
    x, y = rng.standard_normal((2, 1, 24, 64))
    narrow = to_bfloat16 if precision == "bfloat16" else np.float32
    x = narrow(x).astype(float)
    ours = {"0/m/input.hidden": x, OUT: x + y}
    found = diagnosed(ours, {**ours, OUT: x + dropped(y, 0.2, rng)}, precision=precision)
    first = next(e for e in found.explanations if e.kind == "dropout")
    assert first.facts["key"] == "0/m/input.hidden"
    assert found.explanations[0].kind == "dropout"


NO_DROPOUT = [
    pytest.param(lambda r: np.maximum(r, 0), id="relu"),
    pytest.param(lambda r: np.where(np.arange(64) % 3 == 0, 0, r), id="zeros-without-scale"),
    pytest.param(lambda r: np.where(np.arange(64) % 3 == 0, 0, 3 * r), id="another-scale"),
]


@pytest.mark.spec("DIA-46")
@pytest.mark.parametrize("make", NO_DROPOUT)
def test_zeros_that_do_not_keep_the_mean_are_no_dropout(
    diagnosed: Diagnose, rng: np.random.Generator, make: object
) -> None:
    r = rng.standard_normal((2, 24, 64))
    found = diagnosed(r, make(r))  # type: ignore[operator] # a lambda
    assert "dropout" not in {e.kind for e in found.explanations}


@pytest.mark.spec("DIA-8")
def test_a_few_elements_are_no_evidence_of_dropout(diagnosed: Diagnose, rng: np.random.Generator) -> None:
    r = rng.standard_normal((2, 24, 64))
    t = r.copy()
    t[0, :3, :2] = 0
    assert "dropout" not in {e.kind for e in diagnosed(r, t).explanations}
