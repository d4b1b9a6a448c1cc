"""Convolutions in few bits, what they have in them besides, and what code between modules rounds to steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorcap.comparison import Comparison, RoundedArguments, compare
from tensorcap.comparison.policy import Precision
from tensorcap.comparison.policy_tests.growth import judge_total_error
from tests.comparison.conftest import MakeArchive

RNG = np.random.default_rng(11)
X = RNG.normal(size=(2, 4, 9, 9))
WEIGHT = RNG.normal(size=(6, 2, 3, 3)) * np.exp(0.4 * RNG.normal(size=(6, 1, 1, 1)))
BIAS = RNG.normal(size=6)
CONVOLUTION = {
    "stride": [2, 2],
    "padding": [1, 1],
    "dilation": [1, 1],
    "groups": 2,
    "transposed": False,
    "padding_mode": "zeros",
}
GAIN, SHIFT, MEAN, VARIANCE = (np.exp(RNG.normal(size=6)) for _ in range(4))
NORM = {
    "0/bn/param.weight": GAIN,
    "0/bn/param.bias": SHIFT,
    "0/bn/buffer.running_mean": MEAN,
    "0/bn/buffer.running_var": VARIANCE,
}
STEP = 0.05


def convolved(x: Any, weight: Any, bias: Any) -> Any:
    """By loops: stride 2, one zero around, two groups of inputs and outputs."""
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    made = np.zeros((len(x), 6, 5, 5))
    for n, o, i, j in np.ndindex(made.shape):
        group = slice(0, 2) if o < 3 else slice(2, 4)
        patch = padded[n, group, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3]
        made[n, o, i, j] = (patch * weight[o]).sum() + bias[o]
    return made


def normed(values: Any) -> Any:
    factor = GAIN / np.sqrt(VARIANCE + 1e-5)
    return (values - MEAN.reshape(-1, 1, 1)) * factor.reshape(-1, 1, 1) + SHIFT.reshape(-1, 1, 1)


def in_rows(weight: Any, *, behind: int = 0) -> tuple[Any, Any]:
    """In int8 with a scale for each output, or with those of outputs behind; and the scales."""
    steps = np.abs(weight).max(axis=(1, 2, 3), keepdims=True) / 127
    numbers = np.rint(weight / steps)
    return numbers * np.roll(steps, behind, axis=0), np.roll(steps, behind, axis=0)


def in_steps(values: Any, low: float, high: float) -> Any:
    return np.clip(np.rint(values / STEP), round(low / STEP), round(high / STEP)) * STEP


def status(comparison: Comparison, key: str) -> str:
    return next(pair.status for pair in comparison.pairs if pair.key == key)


def network(make_archive: MakeArchive, tensors: Any, convolution: Any, name: str = "Conv2d") -> Any:
    modules = [
        {"path": "", "class": "my.Net"},
        {"path": "conv", "class": f"my.{name}", "settings": convolution},
        {"path": "bn", "class": "torch.nn.BatchNorm2d", "settings": {"eps": 1e-5}},
        {"path": "act", "class": "torch.nn.ReLU"},
        {"path": "next", "class": "my.Next"},
    ]
    held = {key: np.asarray(value, np.float32) for key, value in tensors.items()}
    return make_archive(held, run={"modules": modules, "dtype": "float32"})


def settings(low: float, high: float) -> dict[str, Any]:
    return {
        **CONVOLUTION,
        "dequantised": ["weight"],
        "numbers": {"weight": "int8"},
        "output_step": STEP,
        "output_range": [low, high],
    }


@pytest.mark.spec("POL-281")
@pytest.mark.parametrize(
    ("behind", "bias", "expected"),
    [
        pytest.param(0, BIAS, "within-rounding", id="right"),
        pytest.param(1, BIAS, "diverged", id="scales-of-the-output-before"),
        pytest.param(0, BIAS / 2, "diverged", id="half-the-bias"),
    ],
)
def test_a_convolution_is_off_by_what_its_rounding_predicts(
    make_archive: MakeArchive, behind: int, bias: Any, expected: str
) -> None:
    weight, steps = in_rows(WEIGHT, behind=behind)
    tensors = {"0/conv/param.weight": WEIGHT, "0/conv/input": X, "0/conv/output": convolved(X, WEIGHT, BIAS)}
    reference = network(make_archive, tensors, CONVOLUTION)
    made = in_steps(convolved(X, weight, bias), -40, 40)
    own = {"0/conv/param.weight": weight, "0/conv/param.weight_step": steps}
    target = network(make_archive, {**own, "0/conv/input": X, "0/conv/output": made}, settings(-40.0, 40.0))
    found = compare(reference, target)
    assert status(found, "0/conv/output") == expected
    assert found.layers is not None
    ratio = found.layers.results["0/conv/output"].ratio
    assert (0.8 < ratio < 1.25) == (expected == "within-rounding")


@pytest.mark.spec("POL-284")
@pytest.mark.parametrize(
    ("added", "expected"),
    [pytest.param(0, "explained", id="right"), pytest.param(0.2, "diverged", id="and-something-is-added")],
)
def test_channels_are_multiplied_in_the_weight_and_divided_before_it(
    make_archive: MakeArchive, added: float, expected: str
) -> None:
    """As where ranges of channels are made alike; as many channels as columns of a picture."""
    x, weight = RNG.normal(size=(2, 16, 16, 16)), RNG.normal(size=(24, 16, 1, 1))
    factors = np.exp(np.linspace(-1, 1, 16)).reshape(-1, 1, 1)
    kept, scales = in_rows(weight * factors)
    settings = {**CONVOLUTION, "stride": [1, 1], "padding": [0, 0], "groups": 1}
    given = (x + added) / factors
    sides: Any = (x, weight, {}), (given, kept, {"0/conv/param.weight_step": scales})
    reference, target = (
        network(
            make_archive,
            {
                "0/before/output": a,
                "0/conv/param.weight": w,
                "0/conv/input": a,
                "0/conv/output": np.einsum("nchw,oc->nohw", a, w[:, :, 0, 0]),
                **steps,
            },
            settings | ({"dequantised": ["weight"], "numbers": {"weight": "int8"}} if steps else {}),
        )
        for a, w, steps in sides
    )
    found = compare(reference, target)
    assert status(found, "0/conv/param.weight") == "within-rounding"
    assert [status(found, f"0/{key}") for key in ("before/output", "conv/input")] == [expected] * 2


@pytest.mark.spec("POL-640")
@pytest.mark.parametrize(
    ("scale", "high", "weights", "results"),
    [
        pytest.param(1.0, 40.0, "within-rounding", "explained", id="right"),
        pytest.param(1.5, 40.0, "diverged", "diverged", id="another-norm"),
        pytest.param(1.0, 2.0, "within-rounding", "diverged", id="range-too-small"),
    ],
)
def test_a_norm_and_a_relu_are_parts_of_a_convolution(
    make_archive: MakeArchive, scale: float, high: float, weights: str, results: str
) -> None:
    plain = convolved(X, WEIGHT, BIAS)
    after = np.maximum(normed(plain), 0)
    reference = network(
        make_archive,
        {
            **NORM,
            "0/conv/param.weight": WEIGHT,
            "0/conv/param.bias": BIAS,
            "0/conv/input": X,
            "0/conv/output": plain,
            "0/bn/input": plain,
            "0/bn/output": normed(plain),
            "0/act/input": normed(plain),
            "0/act/output": after,
            "0/next/input": after,
        },
        CONVOLUTION,
    )
    factor = GAIN / np.sqrt(VARIANCE + 1e-5)
    factor = np.where(np.arange(6) == 2, scale * factor, factor)
    bias = (BIAS - MEAN) * factor + SHIFT
    weight, steps = in_rows(WEIGHT * factor.reshape(-1, 1, 1, 1))
    made = in_steps(np.maximum(convolved(X, weight, bias), 0), 0, high)
    own = {
        "0/conv/param.weight": weight,
        "0/conv/param.weight_step": steps,
        "0/conv/param.bias": bias,
        "0/conv/input": X,
        "0/conv/output": made,
        "0/next/input": made,
    }
    found = compare(reference, network(make_archive, own, settings(0.0, high), "ConvReLU2d"))
    assert status(found, "0/conv/param.weight") == weights
    assert status(found, "0/conv/output") == results
    assert (status(found, "0/conv/param.bias") == "explained") == (scale == 1)


@pytest.mark.spec("POL-641")
@pytest.mark.parametrize(
    ("shift", "high", "expected"),
    [
        pytest.param(0, 4.0, "within-rounding", id="right"),
        pytest.param(1, 4.0, "diverged", id="a-step-off"),
        pytest.param(0, 0.5, "diverged", id="a-third-is-cut"),
    ],
)
def test_code_rounds_what_it_hands_on_to_whole_steps(
    make_archive: MakeArchive, shift: int, high: float, expected: str
) -> None:
    made = convolved(X, WEIGHT, BIAS)
    tensors = {"0/@root/input.x": X, "0/conv/param.weight": WEIGHT, "0/conv/input": X, "0/conv/output": made}
    reference = network(make_archive, tensors, CONVOLUTION)
    weight, steps = in_rows(WEIGHT)
    given = in_steps(X, -4, high) + shift * STEP
    own = {
        "0/@root/input.x": X,
        "0/conv/param.weight": weight,
        "0/conv/param.weight_step": steps,
        "0/conv/input": given,
        "0/conv/output": in_steps(convolved(given, weight, BIAS), -40, 40),
    }
    found = compare(reference, network(make_archive, own, settings(-40.0, 40.0)))
    assert status(found, "0/conv/input") == expected


@pytest.mark.spec("POL-280")
@pytest.mark.parametrize(
    ("where", "expected"),
    [pytest.param(0, "within-rounding", id="inputs-are-small"), pytest.param(1, "diverged", id="are-large")],
)
def test_errors_may_be_uneven_where_inputs_are_small(
    make_archive: MakeArchive, where: int, expected: str
) -> None:
    """Ten columns are a step off, those that GPTQ leaves the errors of others to, or others."""
    inputs = RNG.normal(size=(64, 96))
    inputs[:, :10] /= 30
    weight = RNG.normal(size=(48, 96))
    steps = np.abs(weight).max(axis=1, keepdims=True) / 120
    values = np.rint(weight / steps) * steps
    off = np.zeros((48, 96))
    off[:, 20 * where : 20 * where + 10] = 1
    values = values + off * steps * RNG.choice([-1, 1], size=off.shape)

    def layer(values: Any, **more: Any) -> Any:
        tensors = {"0/proj/param.weight": values, "0/proj/input": inputs, "0/proj/output": inputs @ values.T}
        if more:
            tensors["0/proj/param.weight_step"] = steps
        held = {key: np.asarray(value, np.float32) for key, value in tensors.items()}
        modules = [{"path": "", "class": "my.Net"}, {"path": "proj", "class": "my.Layer", "settings": more}]
        return make_archive(held, run={"modules": modules, "dtype": "float32"})

    target = layer(values, dequantised=["weight"], numbers={"weight": "int8"})
    assert status(compare(layer(weight), target), "0/proj/param.weight") == expected


@pytest.mark.spec("POL-671", "CMP-270")
@pytest.mark.parametrize(
    ("high", "shift", "expected", "is_handed_on"),
    [
        pytest.param(6.0, 0, "within-rounding", True, id="right"),
        pytest.param(3.0, 0, "diverged", True, id="half-the-range"),
        pytest.param(6.0, 2, "within-rounding", False, id="another-tensor"),
    ],
)
def test_the_range_of_inputs_may_be_the_activation_before(
    make_archive: MakeArchive, high: float, shift: int, expected: str, is_handed_on: bool
) -> None:
    """A graph that rounds what a convolution is given leaves out the ReLU6 before: its range cuts alike."""
    whole = 4 * X
    cut = np.clip(whole, 0, 6)
    tensors = {"0/act/input": whole, "0/act/output": cut, "0/conv/input": cut}
    tensors |= {"0/conv/param.weight": WEIGHT, "0/conv/output": convolved(cut, WEIGHT, BIAS)}
    weight, steps = in_rows(WEIGHT)
    rounded = in_steps(whole, 0, high)
    own = {
        "0/act/input": whole,
        "0/act/output": rounded + shift * STEP,
        "0/conv/param.weight": weight,
        "0/conv/param.weight_step": steps,
        "0/conv/input": whole,
        "0/conv/output": in_steps(convolved(rounded, weight, BIAS), -90, 90),
    }
    says = {**settings(-90.0, 90.0), "input_step": STEP, "input_range": [0.0, high]}
    target = network(make_archive, own, says)
    found = compare(network(make_archive, tensors, CONVOLUTION), target)
    assert status(found, "0/conv/output") == expected
    given, made = target.get("0/conv/input"), target.get("0/act/output")
    assert RoundedArguments(target).are(given, target, made) == is_handed_on
    tests = {f.test for pair in found.pairs if pair.key == "0/conv/input" for f in pair.findings}
    assert "pass_through" not in tests


@pytest.mark.spec("CMP-19")
@pytest.mark.parametrize("times", [1.0, 1.5], ids=["right", "wrong-step"])
def test_each_use_of_a_tied_weight_may_be_rounded_by_itself(make_archive: MakeArchive, times: float) -> None:
    table = RNG.normal(size=(40, 24))
    modules = [{"path": path, "class": "my.Layer"} for path in ("table", "head")]
    says = [
        {**module, "settings": {"dequantised": ["weight"], "numbers": {"weight": "int8"}}}
        for module in modules
    ]
    tied = {"0/table/param.weight": table, "0/head/param.weight": table}
    rows, whole = np.abs(table).max(axis=1, keepdims=True) / 127, np.full((1, 1), np.abs(table).max() / 127)
    own = {
        "0/table/param.weight": np.rint(table / rows) * rows,
        "0/table/param.weight_step": rows,
        "0/head/param.weight": np.rint(table / whole) * whole * times,
        "0/head/param.weight_step": whole * times,
    }
    reference, target = (
        make_archive({k: np.asarray(v, np.float32) for k, v in held.items()}, run={"modules": listed})
        for held, listed in ((tied, modules), (own, says))
    )
    found = compare(reference, target)
    assert status(found, "0/table/param.weight") == "within-rounding"
    assert status(found, "0/head/param.weight") == ("within-rounding" if times == 1 else "diverged")


@pytest.mark.spec("POL-673")
@pytest.mark.parametrize(("error", "expected"), [(0.9, "within-rounding"), (1.1, "suspect")])
def test_what_is_farther_off_than_zeros_is_not_right(error: float, expected: str) -> None:
    precision = Precision("float32", unit=0.13, rounding=0.054, weights="int8")
    assert judge_total_error(error, 12, precision, elements=1 << 20).status == expected
