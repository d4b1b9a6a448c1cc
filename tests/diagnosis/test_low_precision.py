"""Steps in low precision: of products, norms and tables, in narrow targets and within float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorcap_formats.dtypes import Array
from tests.diagnosis.conftest import Diagnose
from tests.support.floats import to_bfloat16

OUT, IN = "0/m/output", "0/m/input.x"
WEIGHT, BIAS = "0/m/param.weight", "0/m/param.bias"


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def bf16(x: Array) -> Array:
    return to_bfloat16(x).astype(np.float64)


def fp16(x: Array) -> Array:
    return np.asarray(x).astype(np.float16).astype(np.float64)


def tf32(x: Array) -> Array:
    """Ten bits of mantissa, ties to even."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    kept = (bits + 0xFFF + ((bits >> 13) & 1)) >> 13 << 13
    return kept.astype(np.uint32).view(np.float32).astype(np.float64)


def summed(x: Array, w: Array, run: int, low: Any) -> Array:
    total = np.zeros((*x.shape[:-1], len(w)))
    for at in range(0, x.shape[-1], run):
        total = low(total + low(x[..., at : at + run] @ w[:, at : at + run].T))
    return total


@pytest.mark.spec("DIA-111")
@pytest.mark.parametrize("run", [8, 16, 32, 64])
@pytest.mark.parametrize(
    ("low", "precision"), [(bf16, "bfloat16"), (bf16, "float32"), (fp16, "float32")], ids=["b", "fb", "fh"]
)
def test_sums_over_runs_that_do_not_divide_the_inputs_are_named(
    diagnosed: Diagnose, rng: np.random.Generator, run: int, low: Any, precision: str
) -> None:
    x, w, b = (bf16(rng.standard_normal(size)) for size in ((1, 40, 100), (48, 100), 48))
    weights = {WEIGHT: w, BIAS: b, IN: x}
    target = summed(x, w, run, low) + b
    found = diagnosed({**weights, OUT: x @ w.T + b}, {**weights, OUT: target}, precision=precision)
    assert found.explanations[0].kind == "sum-precision"
    assert found.explanations[0].facts == {"run": run}


@pytest.mark.spec("DIA-112")
@pytest.mark.parametrize(("low", "dtype"), [(bf16, "bfloat16"), (tf32, "tf32")])
@pytest.mark.parametrize("what", ["inputs and weights", "inputs", "weights"])
def test_a_product_of_rounded_operands_in_float32_is_named(
    diagnosed: Diagnose, rng: np.random.Generator, low: Any, dtype: str, what: str
) -> None:
    x, w = (rng.standard_normal(size).astype(np.float32).astype(float) for size in ((1, 40, 96), (48, 96)))
    sides = low(x) if "inputs" in what else x, low(w) if "weights" in what else w
    weights = {WEIGHT: w, IN: x}
    found = diagnosed({**weights, OUT: x @ w.T}, {**weights, OUT: sides[0] @ sides[1].T})
    assert found.explanations[0].kind == "operand-precision"
    assert found.explanations[0].facts == {"dtype": dtype, "operands": what}


def runs_of(squares: Array, run: int) -> Array:
    total = np.zeros((*squares.shape[:-1], 1))
    for at in range(0, squares.shape[-1], run):
        total = bf16(total + bf16(squares[..., at : at + run].sum(-1, keepdims=True)))
    return total


def variance_of(x: Array, low: Any) -> Array:
    return np.asarray(low(low(x * x).mean(-1, keepdims=True)))


NORMS = [
    pytest.param(lambda x, w: x / np.sqrt(variance_of(x, bf16) + 1e-6) * w, "variance", id="variance"),
    pytest.param(
        lambda x, w: bf16(x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)) * w, "wide", id="cast"
    ),
    *[
        pytest.param(
            lambda x, w, run=run: x / np.sqrt(bf16(runs_of(bf16(x * x), run) / x.shape[-1]) + 1e-6) * w,
            f"variance in runs of {run}",
            id=f"runs-of-{run}",
        )
        for run in (8, 16, 32)
    ],
]


@pytest.mark.spec("DIA-113")
@pytest.mark.parametrize(("theirs", "low"), NORMS)
def test_steps_of_a_norm_in_bfloat16_within_float32_are_named(
    diagnosed: Diagnose, rng: np.random.Generator, theirs: Any, low: str
) -> None:
    x, w = rng.standard_normal((1, 64, 100)) * rng.uniform(0.3, 3, (1, 64, 1)), rng.uniform(0.5, 2, 100)
    x, w = (side.astype(np.float32).astype(float) for side in (x, w))
    ours = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w
    found = diagnosed({WEIGHT: w, IN: x, OUT: ours}, {WEIGHT: w, IN: x, OUT: theirs(x, w)})
    kind = "norm-cast-order" if low == "wide" else "norm-variance-precision"
    assert found.explanations[0].kind == kind
    target = found.explanations[0].facts["target"]
    assert (target["low"], target["steps"]) == (low, "bfloat16")


@pytest.mark.spec("DIA-113")
def test_a_variance_from_moments_in_float32_is_named(diagnosed: Diagnose, rng: np.random.Generator) -> None:
    x = (rng.standard_normal((1, 64, 128)) + 60).astype(np.float32)
    w, b = (rng.uniform(0.5, 2, 128).astype(np.float32) for _ in range(2))
    wide = x.astype(float)
    ours = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5) * w + b
    mean = np.add.reduce(x, axis=-1, keepdims=True, dtype=np.float32) / np.float32(128)
    variance = np.add.reduce(x * x, axis=-1, keepdims=True, dtype=np.float32) / np.float32(128) - mean * mean
    theirs = (x - mean) / np.sqrt(variance + np.float32(1e-5)) * w + b
    weights = {WEIGHT: w, BIAS: b, IN: x}
    found = diagnosed({**weights, OUT: ours}, {**weights, OUT: theirs})
    assert found.explanations[0].kind == "norm-variance-precision"
    assert "E[x^2] - E[x]^2" in found.explanations[0].text


@pytest.mark.spec("DIA-113")
def test_another_factor_of_each_row_is_no_variance_from_moments(
    diagnosed: Diagnose, rng: np.random.Generator
) -> None:
    x = rng.standard_normal((1, 64, 128)).astype(np.float32).astype(float)
    ours = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    found = diagnosed({IN: x, OUT: ours}, {IN: x, OUT: ours * rng.uniform(0.9, 1.1, (1, 64, 1))})
    assert "norm-variance-precision" not in {explanation.kind for explanation in found.explanations}


F = 10000.0 ** (-np.arange(16) / 16)
P = np.arange(300.0)[:, None]
STEPPED = bf16(1 / bf16(10000.0 ** bf16(np.arange(16) / 16)))
TABLES = [
    pytest.param(P * bf16(F), "frequencies", "bfloat16", id="frequencies"),
    pytest.param(P * fp16(F), "frequencies", "float16", id="frequencies-in-float16"),
    pytest.param(bf16(P) * F, "positions", "bfloat16", id="positions"),
    pytest.param(bf16(P * F), "angles", "bfloat16", id="angles"),
    pytest.param(bf16(bf16(P) * bf16(F)), "frequencies, positions and angles", "bfloat16", id="all"),
    pytest.param(P * STEPPED, "powers of the base", "bfloat16", id="powers"),
]


@pytest.mark.spec("DIA-114")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("function", [np.cos, np.sin])
@pytest.mark.parametrize(("angles", "what", "dtype"), TABLES)
def test_a_rotary_table_that_is_computed_in_low_precision_is_named(
    diagnosed: Diagnose, angles: Array, what: str, dtype: str, function: Any, precision: str
) -> None:
    ours, theirs = (function(np.tile(side, 2))[None] for side in (P * F, angles))
    explanation = diagnosed(ours, theirs, precision=precision).explanations[0]
    assert explanation.kind == "rotary-precision"
    assert explanation.facts == {"dtype": dtype, "rounded": what}
