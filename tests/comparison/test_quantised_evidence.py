"""What a limit of a quantised layer rests on comes from the reference, or is checked: nobody sets his own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorcap.comparison import Comparison, compare
from tests.comparison.conftest import MakeArchive
from tests.support.floats import to_bfloat16

RNG = np.random.default_rng(12)


def run_of(site: str, dtype: str, **settings: Any) -> dict[str, Any]:
    modules = [{"path": "", "class": "my.Net"}, {"path": site, "class": "my.Layer", "settings": settings}]
    return {"modules": modules, "dtype": dtype}


def finding(comparison: Comparison, key: str, test: str) -> tuple[str, float]:
    pair = next(pair for pair in comparison.pairs if pair.key == key)
    return next((f.status, f.value) for f in pair.findings if f.test == test)


def statuses(comparison: Comparison) -> dict[str, str]:
    return {pair.key: pair.status for pair in comparison.pairs}


@pytest.mark.spec("POL-281")
@pytest.mark.parametrize(
    ("factor", "expected"),
    [pytest.param(1.0, "within-rounding", id="rounded"), pytest.param(1e-3, "diverged", id="lost")],
)
def test_a_result_that_is_lost_does_not_widen_its_own_limit(
    make_archive: MakeArchive, factor: float, expected: str
) -> None:
    """Of an activation, which rounds to whole steps: an error of 0.02 / sqrt(12) of an RMS of 1."""
    x, y = (RNG.normal(size=(64, 32)).astype(np.float32) for _ in range(2))

    def archive(result: Any, **settings: Any) -> Any:
        return make_archive(
            {"0/act/input": x, "0/act/output": result}, run=run_of("act", "float32", **settings)
        )

    rounded = (np.rint(y / 0.02) * 0.02 * factor).astype(np.float32)
    found = compare(archive(y), archive(rounded, output_step=0.02))
    assert statuses(found)["0/act/output"] == expected


@pytest.mark.spec("POL-280", "POL-281")
@pytest.mark.parametrize(
    ("step", "input_step", "expected"),
    [
        pytest.param(1e-4, None, "within-rounding", id="fine"),
        pytest.param(0.2, None, "diverged", id="coarse"),
        pytest.param(10.0, None, "diverged", id="nothing-is-left"),
        pytest.param(0.02, 4.0, "within-rounding", id="of-the-products-it-is-added-to"),
        pytest.param(0.02, 2.0, "diverged", id="of-other-products"),
    ],
)
def test_a_bias_of_32_bits_is_rounded_to_a_step_that_such_numbers_have(
    make_archive: MakeArchive, step: float, input_step: float | None, expected: str
) -> None:
    bias = np.linspace(-0.5, 0.5, 24).astype(np.float32)

    def archive(values: Any, **settings: Any) -> Any:
        tensors = {"0/proj/param.bias": values}
        if settings:
            tensors["0/proj/param.bias_step"] = np.array([step], np.float32)
            tensors["0/proj/param.weight_step"] = np.array([0.005], np.float32)
        return make_archive(tensors, run=run_of("proj", "float32", **settings))

    settings: dict[str, Any] = {"dequantised": ["bias"], "numbers": {"bias": "int32"}}
    if input_step is not None:
        settings["input_step"] = input_step
    rounded = (np.rint(bias / step) * step).astype(np.float32)
    found = compare(archive(bias), archive(rounded, **settings))
    assert statuses(found)["0/proj/param.bias"] == expected


@pytest.mark.spec("POL-280")
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param(4.0, "within-rounding", id="of-the-inputs-times-the-weights"),
        pytest.param(3.0, "diverged", id="of-other-inputs"),
        pytest.param(0.0, "diverged", id="of-zeros"),
    ],
)
def test_the_step_of_inputs_is_known_by_what_they_lie_on(
    make_archive: MakeArchive, given: float, expected: str
) -> None:
    """Of a norm, which does not round its inputs itself: what made them did."""
    bias, x = np.linspace(-0.5, 0.5, 24).astype(np.float32), RNG.normal(size=(16, 24)).astype(np.float32)

    def archive(values: Any, inputs: Any, **settings: Any) -> Any:
        tensors = {"0/norm/param.bias": values, "0/norm/input.x": inputs, "0/norm/output": x}
        if settings:
            tensors["0/norm/param.bias_step"] = np.array([0.02], np.float32)
            tensors["0/norm/param.weight_step"] = np.array([0.005], np.float32)
        return make_archive(tensors, run=run_of("norm", "float32", **settings))

    rounded = (np.rint(bias / 0.02) * 0.02).astype(np.float32)
    inputs = (np.rint(x * 30) * given).astype(np.float32)
    target = archive(rounded, inputs, dequantised=["bias"], numbers={"bias": "int32"})
    assert statuses(compare(archive(bias, inputs), target))["0/norm/param.bias"] == expected


@pytest.mark.spec("POL-281")
def test_all_rows_of_a_lookup_are_judged(make_archive: MakeArchive) -> None:
    table = RNG.normal(size=(40, 32)).astype(np.float32)
    steps = np.abs(table).max(axis=1, keepdims=True) / 127
    rounded = (np.rint(table / steps) * steps).astype(np.float32)
    tokens = RNG.integers(0, 40, size=700)

    def archive(values: Any, result: Any, **settings: Any) -> Any:
        tensors = {"0/embed/param.weight": values, "0/embed/input.0": tokens, "0/embed/output": result}
        if settings:
            tensors["0/embed/param.weight_step"] = steps.astype(np.float32)
        return make_archive(tensors, run=run_of("embed", "float32", **settings))

    reference = archive(table, table[tokens])
    settings: dict[str, Any] = {"dequantised": ["weight"], "numbers": {"weight": "int8"}}
    last = rounded[tokens]
    last[-100:] = rounded[(tokens[-100:] + 1) % 40]
    right, wrong = (compare(reference, archive(rounded, r, **settings)) for r in (rounded[tokens], last))
    status, ratio = finding(right, "0/embed/output", "quantisation")
    assert status == "within-rounding"
    assert ratio == pytest.approx(1, rel=1e-3)
    status, ratio = finding(wrong, "0/embed/output", "quantisation")
    noise = float(np.linalg.norm(rounded[tokens] - table[tokens]))
    assert status == "diverged"
    assert ratio == pytest.approx(float(np.linalg.norm(last - table[tokens])) / noise, rel=1e-3)


@pytest.mark.spec("POL-620")
@pytest.mark.parametrize(
    ("over", "factor", "expected"),
    [
        pytest.param(1.0, 1.0, "within-rounding", id="nothing-cut"),
        pytest.param(1.3, 1.0, "within-rounding", id="cut"),
        pytest.param(1.0, 1.02, "diverged", id="nothing-cut-and-a-mistake"),
        pytest.param(1.1, 1.015, "diverged", id="cut-and-a-mistake"),
        pytest.param(1.2, 1.02, "diverged", id="more-cut-and-a-mistake"),
    ],
)
def test_what_a_range_cuts_hides_no_mistake(
    make_archive: MakeArchive, over: float, factor: float, expected: str
) -> None:
    """Half a percent of the inputs lie beyond 1, and are cut to it; results are those times a factor."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((48, 64)).astype(np.float32)
    steps = np.abs(weight).max(axis=1, keepdims=True) / 127
    rounded = (np.rint(weight / steps) * steps).astype(np.float32)
    x = rng.uniform(-1, 1, (64, 64)).astype(np.float32)
    x.reshape(-1)[rng.choice(x.size, x.size // 200, replace=False)] = over
    given = np.clip(np.rint(x * 127), -127, 127) / 127

    def archive(values: Any, result: Any, **settings: Any) -> Any:
        tensors = {"0/fc/param.weight": values, "0/fc/input.x": x, "0/fc/output": result.astype(np.float32)}
        if settings:
            tensors["0/fc/param.weight_step"] = steps.astype(np.float32)
        return make_archive(tensors, run=run_of("fc", "float32", **settings))

    settings: dict[str, Any] = {"dequantised": ["weight"], "numbers": {"weight": "int8"}, "input_bits": 8}
    settings |= {"input_step": 1 / 127, "input_range": [-1.0, 1.0]}
    target = archive(rounded, given @ rounded.T * factor, **settings)
    found = compare(archive(weight, x @ weight.T), target)
    assert statuses(found)["0/fc/output"] == expected
    assert (found.exit_status == 0) == (expected == "within-rounding")
    told = [text for text in found.warnings if "as a calibration may choose" in text]
    assert bool(told) == (over > 1 and expected == "within-rounding")


@pytest.mark.spec("POL-280")
@pytest.mark.parametrize(
    ("shift", "offset", "expected"),
    [
        pytest.param(0, 0, "within-rounding", id="right"),
        pytest.param(1, 0, "diverged", id="steps-of-the-row-before"),
        pytest.param(0, 1, "diverged", id="zero-point-one-off"),
    ],
)
def test_numbers_times_steps_may_be_rounded_to_bfloat16(
    make_archive: MakeArchive, shift: int, offset: int, expected: str
) -> None:
    """127 steps have 7 bits, and a bfloat16 8: a product is off by up to half a step of a large number."""
    weight = to_bfloat16(RNG.normal(size=(32, 128)) * np.exp(0.4 * RNG.normal(size=(32, 1))))
    steps = to_bfloat16(np.abs(weight).max(axis=1, keepdims=True) / 127)
    numbers, held = np.rint(weight / steps), np.roll(steps, shift, axis=0)
    made = {"0/proj/param.weight": to_bfloat16((numbers - offset) * held), "0/proj/param.weight_step": held}
    settings = {"dequantised": ["weight"], "numbers": {"weight": "int8"}}
    reference = make_archive({"0/proj/param.weight": weight}, run=run_of("proj", "bfloat16"))
    target = make_archive(made, run=run_of("proj", "bfloat16", **settings))
    assert statuses(compare(reference, target))["0/proj/param.weight"] == expected
