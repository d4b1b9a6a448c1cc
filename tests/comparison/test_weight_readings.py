"""Mistakes of weights in few bits are undone by another reading of their bits, and named by it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tensorcap.comparison.weight_mistakes import find_bias_mistake, find_weight_mistake
from tensorcap.comparison.weight_readings import codes_of, readings, table_of
from tensorcap.comparison.weight_rounding import WeightNumbers

RNG = np.random.default_rng(17)
WEIGHT = RNG.normal(size=(64, 64)) * np.exp(0.5 * RNG.normal(size=(64, 1)))
AWQ = [0, 2, 4, 6, 1, 3, 5, 7]


def in_groups(values: Any, group: int = 16, top: int = 7) -> tuple[Any, Any]:
    """Whole numbers of both signs, and their steps, `[rows, groups]`."""
    parts = values.reshape(len(values), -1, group)
    steps = np.abs(parts).max(axis=-1) / top
    return np.rint(parts / steps[..., None]).reshape(values.shape), steps


def wide(steps: Any, group: int = 16) -> Any:
    return np.repeat(steps, group, axis=1)


def named(values: Any, steps: Any, number: str = "int4", zeros: Any = None, inputs: Any = None) -> str:
    return find_weight_mistake(WEIGHT, WeightNumbers(number, values, steps, zeros), inputs).text


@pytest.mark.spec("POL-660")
@pytest.mark.parametrize(
    ("order", "text"),
    [
        pytest.param(
            [7, 6, 5, 4, 3, 2, 1, 0], "each eight columns are in the reverse order", id="high-first"
        ),
        pytest.param(AWQ, "each eight columns are in the order 0, 4, 1, 5, 2, 6, 3, 7", id="awq"),
        pytest.param([1, 0, 3, 2, 5, 4, 7, 6], "each two columns are exchanged", id="nibbles"),
    ],
)
def test_numbers_in_another_order_are_named(order: list[int], text: str) -> None:
    numbers, steps = in_groups(WEIGHT)
    moved = numbers.reshape(64, -1, 8)[..., order].reshape(64, 64)
    assert text in named(moved * wide(steps), steps)


@pytest.mark.spec("POL-660")
@pytest.mark.parametrize("blocks", [(64, 4), (1, 64), (64, 1), (4, 4)], ids=str)
@pytest.mark.parametrize("number", ["uint4", "nf4"])
def test_readings_of_some_rows_are_those_rows_of_the_readings(number: str, blocks: tuple[int, int]) -> None:
    steps = np.exp(RNG.normal(size=blocks))
    zeros = np.rint(RNG.uniform(0, 15, size=blocks)) if number == "uint4" else np.zeros(blocks)
    by_element = np.ones((64 // blocks[0], 64 // blocks[1]))
    numbers = RNG.choice(table_of(number), size=(64, 64))
    values = (numbers - np.kron(zeros, by_element)) * np.kron(steps, by_element)
    weight = WeightNumbers(number, values, steps, zeros if zeros.any() else None)
    rows = np.array([0, 7, 33, 63])
    whole, few = list(readings(weight)), list(readings(weight, rows))
    assert len(whole) > 30
    assert [reading.made for reading in few] == [reading.made for reading in whole]
    for one, other in zip(few, whole, strict=True):
        assert np.array_equal(one.weight.values, other.weight.values[rows])


@pytest.mark.spec("POL-660")
def test_zero_points_may_be_packed_in_the_order_of_numbers() -> None:
    """As AWQ packs both along the outputs; scales are in order."""
    parts = WEIGHT.reshape(64, -1, 16)
    low, high = parts.min(axis=-1), parts.max(axis=-1)
    steps = (high - low) / 15
    zeros = np.rint(-low / steps)
    numbers = np.clip(np.rint(WEIGHT / wide(steps)) + wide(zeros), 0, 15)
    moved, moved_zeros = (side.reshape(8, 8, -1)[:, AWQ].reshape(64, -1) for side in (numbers, zeros))
    values = (moved - wide(moved_zeros)) * wide(steps)
    text = named(values, steps, "uint4", moved_zeros)
    assert "each eight rows are in the order 0, 4, 1, 5, 2, 6, 3, 7" in text


@pytest.mark.spec("POL-660")
def test_float8_of_the_other_format_is_named() -> None:
    """Of e5m2, 8 bits of which 2 are a mantissa, as e4m3: codes below 0x78 have no infinity in either."""
    codes = np.arange(0x78)
    e5m2 = np.where(
        codes < 4,
        (codes & 3) * 2.0**-16,
        np.ldexp(1 + (codes & 3) / 4, (codes >> 2) - 15),
    )
    e4m3 = np.where(codes < 8, (codes & 7) * 2.0**-9, np.ldexp(1 + (codes & 7) / 8, (codes >> 3) - 7))
    steps = np.abs(WEIGHT).max(axis=1, keepdims=True) / e5m2[-1]
    places = np.abs(np.abs(WEIGHT / steps)[..., None] - e5m2).argmin(axis=-1)
    values = np.sign(WEIGHT) * e4m3[places] * steps
    assert named(values, steps, "float8_e4m3fn") == "its numbers are float8_e5m2 ones, read as float8_e4m3fn"


@pytest.mark.spec("POL-660")
def test_codes_and_tables_of_formats() -> None:
    weight = WeightNumbers("MXFP4", np.array([[6.0, -0.0, 0.5, -3.0]]), np.ones((1, 1)))
    codes = codes_of(weight)
    assert codes is not None
    assert codes.tolist() == [[7, 8, 1, 13]]
    assert table_of("float8_e4m3fn")[[0x7E, 0x38]].tolist() == [448, 1]
    assert table_of("uint8")[200] == 200
    assert table_of("int8")[200] == -56
    assert table_of("int32").size == 0
    unsigned = WeightNumbers("int8", np.array([[-1.0, 5.0]]), np.ones((1, 1)))
    assert [255, 5] in [reading.weight.values[0].tolist() for reading in readings(unsigned)]


@pytest.mark.spec("POL-282")
@pytest.mark.parametrize(
    ("factor", "text"),
    [
        pytest.param(2.0, "all its scales are 2 times (an exponent that is 1 off) what they", id="exponent"),
        pytest.param(0.7, "all its scales are 0.7 times what they", id="factor"),
    ],
)
def test_factors_of_all_scales_are_named(factor: float, text: str) -> None:
    numbers, steps = in_groups(WEIGHT, top=127)
    assert text in named(numbers * wide(steps) * factor, steps * factor, "int8")


@pytest.mark.spec("POL-282")
def test_columns_of_other_groups_are_named() -> None:
    """Groups of columns in the order of activations, whose index is not heeded."""
    order = RNG.permutation(64)
    numbers, steps = in_groups(WEIGHT[:, order])
    own = np.empty_like(numbers)
    own[:, order] = numbers
    text = named(own * wide(steps), wide(steps))
    assert "columns have scales of other groups than their own" in text
    assert "g_idx" in text


@pytest.mark.spec("POL-282")
def test_a_zero_point_is_named_though_errors_make_up_for_each_other() -> None:
    """Each error is handed on to the next column, of inputs that are all alike, as GPTQ does."""
    inputs = RNG.normal(size=(128, 1)) + 0.05 * RNG.normal(size=(128, 64))
    steps = (WEIGHT.max(axis=1) - WEIGHT.min(axis=1))[:, None] / 13
    numbers, carried = np.empty_like(WEIGHT), np.zeros(64)
    for column in range(64):
        wanted = WEIGHT[:, column] + carried
        numbers[:, column] = np.rint(wanted / steps[:, 0])
        carried = wanted - numbers[:, column] * steps[:, 0]
    zeros = np.full((64, 1), 8.0)
    text = named((numbers + 1) * steps, steps, "uint4", zeros, inputs)
    assert text == "its zero point is 1 off: all numbers are too large"


@pytest.mark.spec("POL-282")
@pytest.mark.parametrize("is_zero", [True, False])
def test_a_column_that_alone_is_wrong_is_named(is_zero: bool) -> None:
    numbers, steps = in_groups(WEIGHT, 64, 127)
    values = numbers * steps
    values[:, 7] = 0 if is_zero else -values[:, 7]
    text = named(values, steps, "int8")
    assert text.startswith(
        f"column 7 of it is {'0' if is_zero else 'wrong'}, and the rest is as it should be"
    )


@pytest.mark.spec("POL-282")
def test_a_few_wrong_values_are_no_groups_of_another_size() -> None:
    """One value of a coarse weight that wrapped around, of numbers that were rounded before."""
    step = np.abs(WEIGHT).max() / 127
    before = np.rint(WEIGHT / step) * step
    numbers = np.rint(before / (0.97 * step)).astype(np.int64).astype(np.int8).astype(np.float64)
    text = named(numbers * 0.97 * step, np.array([[0.97 * step]]), "int8")
    assert "1 value beyond the largest number wrapped around" in text


@pytest.mark.spec("POL-282")
def test_columns_that_are_multiplied_are_named() -> None:
    factors = np.exp(0.4 * RNG.normal(size=64))
    numbers, steps = in_groups(WEIGHT * factors, 64, 127)
    text = named(numbers * steps, steps, "int8")
    low, high = re.findall(r"factors of (.*) to (.*)", text)[0]
    assert np.allclose([float(low), float(high)], [factors.min(), factors.max()], rtol=0.02)


@pytest.mark.spec("POL-282")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        pytest.param(
            lambda w: w @ np.linalg.qr(RNG.normal(size=(64, 64)))[0], "its inputs rotated", id="inputs"
        ),
        pytest.param(
            lambda w: np.linalg.qr(RNG.normal(size=(64, 64)))[0] @ w, "its outputs rotated", id="outputs"
        ),
        pytest.param(
            lambda w: w[:, RNG.permutation(64)], "columns are the reference's in another order", id="order"
        ),
        pytest.param(lambda w: w.T, "it is transposed", id="transposed"),
        pytest.param(lambda w: RNG.normal(size=w.shape), "", id="another-weight"),
    ],
)
def test_rotations_and_orders_are_named(change: Any, text: str) -> None:
    numbers, steps = in_groups(change(WEIGHT), 64, 127)
    found = named(numbers * steps, steps, "int8")
    assert text in found
    assert text or not found


@pytest.mark.spec("POL-282", "POL-660")
@pytest.mark.parametrize(
    ("move", "text"),
    [
        pytest.param(lambda w: w[..., ::-1, ::-1], "its kernel is turned by half a turn", id="turned"),
        pytest.param(lambda w: w.swapaxes(0, 1), "its axes of inputs and outputs are exchanged", id="axes"),
        pytest.param(lambda w: w, "its scales are those of 1 row behind", id="scales"),
    ],
)
def test_mistakes_of_kernels_are_named(move: Any, text: str) -> None:
    kernel = RNG.normal(size=(12, 12, 3, 3)) * np.exp(0.5 * RNG.normal(size=(12, 1, 1, 1)))
    steps = np.abs(kernel).max(axis=(1, 2, 3), keepdims=True) / 127
    numbers = move(np.rint(kernel / steps))
    steps = np.roll(steps, 1, axis=0) if "scales" in text else steps
    found = find_weight_mistake(kernel, WeightNumbers("int8", numbers * steps, steps))
    assert found.text == text


@pytest.mark.spec("POL-282")
@pytest.mark.parametrize(
    ("factor", "text"),
    [
        pytest.param(0.5, "it is 0.5 times the reference's", id="half"),
        pytest.param("scales", "it is the reference's times the scales of its weight", id="scales"),
        pytest.param("noise", "", id="another"),
    ],
)
def test_mistakes_of_a_bias_are_named(factor: Any, text: str) -> None:
    bias, scales = RNG.normal(size=32), np.exp(RNG.normal(size=(32, 1)))
    values = {"scales": bias * scales[:, 0], "noise": RNG.normal(size=32)}.get(factor)
    values = bias * factor if values is None else values
    steps = np.full(32, 1e-6)
    found = find_bias_mistake(bias, np.rint(values / steps) * steps, steps, scales)
    assert found.text == text
