"""What a layer does with a right weight in few bits, and should not, is named with what it leaves."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tensorcap.alignment import Alignment, Entry
from tensorcap.comparison import Comparison, compare
from tensorcap.localization import localize
from tests.comparison.conftest import MakeArchive

RNG = np.random.default_rng(23)
X = RNG.normal(size=(48, 64)) * np.exp(0.8 * RNG.normal(size=(48, 1)))
WEIGHT = RNG.normal(size=(32, 64)) * np.exp(0.4 * RNG.normal(size=(32, 1)))
BIAS = RNG.normal(size=32)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def rounded(values: Any) -> tuple[Any, Any]:
    """In int8 with a step for each row, and the steps."""
    steps = np.abs(values).max(axis=1, keepdims=True) / 127
    return np.rint(values / steps) * steps, steps


def archive(make: MakeArchive, weight: Any, y: Any, *, number: str = "", **tensors: Any) -> Any:
    """An archive of a layer `proj`; with a number its weight is in few bits."""
    settings = {"dequantised": ["weight"], "numbers": {"weight": number}} if number else {}
    held = {"0/proj/param.weight": weight, "0/proj/input": X, "0/proj/output": y}
    held |= {f"0/proj/{slot.replace('__', '.')}": values for slot, values in tensors.items()}
    modules = [
        {"path": "", "class": "my.Net"},
        {"path": "proj", "class": "my.Layer", "settings": settings},
    ]
    return make(
        {key: np.asarray(value, np.float32) for key, value in held.items()},
        run={"modules": modules, "dtype": "float32"},
    )


def text_of(comparison: Comparison) -> str:
    pair = next(pair for pair in comparison.pairs if pair.key == "0/proj/output")
    return next((f.text for f in pair.findings if f.test == "quantisation"), pair.reason)


def in_bits(x: Any, bits: int, steps_of: Any = None) -> Any:
    top = 2 ** (bits - 1) - 1
    steps = np.abs(x).max(axis=1, keepdims=True) / top
    steps = steps if steps_of is None else steps[steps_of]
    return np.clip(np.rint(x / steps), -top, top) * steps


def hadamard(size: int) -> Any:
    """Sylvester's, of one and minus one, over the root of the size."""
    whole = np.ones((1, 1))
    while len(whole) < size:
        whole = np.block([[whole, whole], [whole, -whole]])
    return whole / np.sqrt(size)


FACTORS = np.exp(RNG.normal(size=64))
NUMBERS, STEPS = rounded(WEIGHT)
UNSIGNED = np.where(NUMBERS < 0, NUMBERS / STEPS + 256, NUMBERS / STEPS) * STEPS


@pytest.mark.spec("POL-283")
@pytest.mark.parametrize(
    ("made", "text"),
    [
        pytest.param(X @ UNSIGNED.T, "signed numbers read as unsigned", id="unsigned"),
        pytest.param(
            X @ (2 * NUMBERS).T, "it is 2 times what its weight makes, as with exponents", id="twice"
        ),
        pytest.param(
            X @ (np.exp2(np.floor(np.log2(STEPS))) / STEPS * NUMBERS).T,
            "its scales rounded down to powers of two",
            id="powers",
        ),
        pytest.param(
            X @ (NUMBERS / STEPS * STEPS[0]).T, "with scales of the first row for all rows", id="one-scale"
        ),
        pytest.param(
            X @ ((NUMBERS / STEPS).reshape(64, 32).T * STEPS).T, "read as [32, 64]", id="not-transposed"
        ),
        pytest.param(X @ (NUMBERS * FACTORS[:32, None]).T, "each output is", id="a-factor-for-each-output"),
        pytest.param(
            in_bits(X, 4) @ NUMBERS.T, "rounded to 4 bits with a step for each row", id="bits-of-inputs"
        ),
        pytest.param(
            in_bits(X, 8, np.roll(np.arange(48), 1)) @ NUMBERS.T, "the steps of the row before", id="step"
        ),
        pytest.param(X @ hadamard(64) @ NUMBERS.T, "a Hadamard matrix", id="hadamard"),
        pytest.param(X @ NUMBERS.T - BIAS, "no bias is added", id="no-bias"),
        pytest.param(X @ NUMBERS.T - 0.5 * BIAS, "0.5 times the bias is added", id="half-a-bias"),
        pytest.param(
            X @ RNG.normal(size=(64, 32)), "it is not what its own weight makes of its input", id="nothing"
        ),
    ],
)
def test_what_a_layer_does_is_named(make_archive: MakeArchive, made: Any, text: str) -> None:
    reference = archive(make_archive, WEIGHT, X @ WEIGHT.T + BIAS)
    target = archive(make_archive, NUMBERS, made + BIAS, number="int8", param__weight_step=STEPS)
    found = compare(reference, target)
    assert text in text_of(found)
    left = re.findall(r"which leaves ([\d.e-]+)", text_of(found))
    assert bool(left) == ("bias" not in text and "is not" not in text)
    assert not left or float(left[0]) < 1e-6
    (suspect,) = localize(reference, target).suspects
    assert suspect.module == "proj"
    assert (suspect.diagnosis is not None and text in suspect.diagnosis.text) == bool(left)


@pytest.mark.spec("POL-283")
@pytest.mark.parametrize(
    ("made", "text"),
    [
        pytest.param(X, "of inputs that are not divided by its smoothing", id="not-divided"),
        pytest.param(X / FACTORS**2, "of inputs that are divided by its smoothing", id="twice"),
    ],
)
def test_inputs_that_are_not_divided_are_named(make_archive: MakeArchive, made: Any, text: str) -> None:
    reference = archive(make_archive, WEIGHT, X @ WEIGHT.T)
    weight, steps = rounded(WEIGHT * FACTORS)
    more = {"number": "int8", "param__weight_step": steps, "buffer__smoothing": FACTORS}
    right = archive(make_archive, weight, X / FACTORS @ weight.T, **more)
    assert compare(reference, right).exit_status == 0
    assert text in text_of(compare(reference, archive(make_archive, weight, made @ weight.T, **more)))


@pytest.mark.spec("POL-283", "POL-626")
def test_a_table_of_numbers_is_fitted(make_archive: MakeArchive) -> None:
    """Of e2m1, whose largest number is taken for 8 in the place of 6."""
    parts = WEIGHT.reshape(32, -1, 32)
    steps = np.exp2(np.floor(np.log2(np.abs(parts).max(axis=-1))) - 2)
    wide = np.repeat(steps, 32, axis=1)
    places = np.abs(np.abs(WEIGHT / wide)[..., None] - E2M1).argmin(axis=-1)
    weight, read = (np.sign(WEIGHT) * table[places] * wide for table in (E2M1, np.where(E2M1 == 6, 8, E2M1)))
    reference = archive(make_archive, WEIGHT, X @ WEIGHT.T)
    more = {"number": "MXFP4", "param__weight_step": steps}
    assert compare(reference, archive(make_archive, weight, X @ weight.T, **more)).exit_status == 0
    found = text_of(compare(reference, archive(make_archive, weight, X @ read.T, **more)))
    assert "it reads its MXFP4 numbers by another table: 8 for 6, -8 for -6, which leaves" in found


@pytest.mark.spec("POL-283")
@pytest.mark.parametrize(
    ("sign", "text"),
    [
        pytest.param(1, "", id="added"),
        pytest.param(-1, "the product of its lora_a and lora_b is subtracted, not added", id="subtracted"),
        pytest.param(2, "the product of its lora_a and lora_b is added 2 times", id="twice"),
        pytest.param(0, "the product of its lora_a and lora_b is not added", id="forgotten"),
    ],
)
def test_what_thin_matrices_add_is_named(make_archive: MakeArchive, sign: int, text: str) -> None:
    a, b = RNG.normal(size=(4, 64)), RNG.normal(size=(32, 4)) / 4
    weight, steps = rounded(WEIGHT - b @ a)
    reference = archive(make_archive, WEIGHT, X @ WEIGHT.T)
    made = X @ weight.T + sign * (X @ a.T) @ b.T
    more = {"param__weight_step": steps, "param__lora_a": a, "param__lora_b": b}
    found = compare(reference, archive(make_archive, weight, made, number="int8", **more))
    assert text in text_of(found)
    assert (found.exit_status == 0) == (sign == 1)


@pytest.mark.spec("POL-283")
def test_results_that_are_not_finite_are_named_by_the_format(make_archive: MakeArchive) -> None:
    """Bits of e4m3 read as e5m2: from 0x7c on these are infinite, or NaN."""
    codes = np.arange(0x7F)
    e4m3 = np.where(codes < 8, (codes & 7) * 2.0**-9, np.ldexp(1 + (codes & 7) / 8, (codes >> 3) - 7))
    e5m2 = np.where(codes < 4, (codes & 3) * 2.0**-16, np.ldexp(1 + (codes & 3) / 4, (codes >> 2) - 15))
    e5m2[0x7C:] = [np.inf, np.nan, np.nan]
    steps = np.abs(WEIGHT).max(axis=1, keepdims=True) / np.where(np.arange(32) < 8, 448, 200)[:, None]
    places = np.abs(np.abs(WEIGHT / steps)[..., None] - e4m3).argmin(axis=-1)
    weight, read = (np.sign(WEIGHT) * table[places] * steps for table in (e4m3, e5m2))
    with np.errstate(invalid="ignore"):
        made = X @ read.T
    assert np.isfinite(made).all(axis=0).sum() == 24
    reference = archive(make_archive, WEIGHT, X @ WEIGHT.T)
    target = archive(make_archive, weight, made, number="float8_e4m3fn", param__weight_step=steps)
    text = "it is what its weight makes with its float8_e4m3fn numbers read as float8_e5m2"
    assert text_of(compare(reference, target)) == text
    (suspect,) = localize(reference, target).suspects
    assert suspect.diagnosis is not None
    assert suspect.diagnosis.text == text


@pytest.mark.spec("POL-282")
@pytest.mark.parametrize(
    ("what", "text"),
    [
        pytest.param("scales", "its scales are those of 0/other/param.weight, of another layer", id="scales"),
        pytest.param("swapped", "its scales are held by 0/other/param.weight", id="swapped"),
        pytest.param("numbers", "its numbers are those of 0/other/param.weight, of another", id="numbers"),
    ],
)
def test_scales_and_numbers_of_another_layer_are_named(
    make_archive: MakeArchive, what: str, text: str
) -> None:
    other = RNG.normal(size=(32, 64)) * np.exp(0.4 * RNG.normal(size=(32, 1)))
    settings = {"dequantised": ["weight"], "numbers": {"weight": "int8"}}

    def held(weights: dict[str, Any], settings: dict[str, Any], steps: dict[str, Any]) -> Any:
        tensors = {f"0/{site}/param.weight": weight for site, weight in weights.items()}
        tensors |= {f"0/{site}/param.weight_step": step for site, step in steps.items()}
        modules = [{"path": site, "class": "my.Layer", "settings": settings} for site in weights]
        run = {"modules": [{"path": "", "class": "my.Net"}, *modules], "dtype": "float32"}
        return make_archive({key: np.asarray(value, np.float32) for key, value in tensors.items()}, run=run)

    (ours, our_steps), (theirs, their_steps) = rounded(WEIGHT), rounded(other)
    steps = {"proj": our_steps if what == "numbers" else their_steps, "other": their_steps}
    steps |= {"other": our_steps} if what == "swapped" else {}
    numbers = {"proj": (theirs / their_steps) if what == "numbers" else ours / our_steps}
    numbers |= {"other": theirs / their_steps}
    found = compare(
        held({"proj": WEIGHT, "other": other}, {}, {}),
        held({site: numbers[site] * steps[site] for site in numbers}, settings, steps),
    )
    pair = next(pair for pair in found.pairs if pair.key == "0/proj/param.weight")
    assert text in pair.findings[0].text


@pytest.mark.spec("POL-661")
@pytest.mark.parametrize(("times", "is_warned"), [(1, False), (6, False), (16, True)])
def test_a_range_that_is_far_too_wide_is_warned_of(
    make_archive: MakeArchive, times: float, is_warned: bool
) -> None:
    made = X @ WEIGHT.T
    step = times * np.ptp(made) / 255
    weight, steps = rounded(WEIGHT)
    ends = [float(times * made.min()), float(times * made.max())]
    settings = {
        "dequantised": ["weight"],
        "numbers": {"weight": "int8"},
        "output_step": float(step),
        "output_range": ends,
    }

    def held(weight: Any, y: Any, settings: dict[str, Any], **tensors: Any) -> Any:
        values = {"param.weight": weight, "input": X, "output": y, **tensors}
        modules = [
            {"path": "", "class": "my.Net"},
            {"path": "proj", "class": "my.Layer", "settings": settings},
        ]
        tensors = {f"0/proj/{slot}": np.asarray(value, np.float32) for slot, value in values.items()}
        return make_archive(tensors, run={"modules": modules, "dtype": "float32"})

    target = held(weight, np.rint(X @ weight.T / step) * step, settings, **{"param.weight_step": steps})
    found = compare(held(WEIGHT, made, {}), target)
    warnings = [text for text in found.warnings if "far wider than what they hold" in text]
    assert bool(warnings) == is_warned
    assert not warnings or "proj: its results" in warnings[0]


@pytest.mark.spec("POL-281")
@pytest.mark.parametrize("name", ["proj", "dense"])
def test_an_injected_layer_is_held_against_its_rounding_under_another_name_too(
    make_archive: MakeArchive, name: str
) -> None:
    slots = [{"site": name, "slot": "input", "status": "injected", "calls": {"0": "0"}}]
    settings = {"dequantised": ["weight"], "numbers": {"weight": "int8"}}
    own = X * 1.1  # what it would have been given; it was given the reference's
    held = {"input": own, "output": X @ NUMBERS.T, "param.weight": NUMBERS, "param.weight_step": STEPS}
    target = make_archive(
        {f"0/{name}/{slot}": np.asarray(value, np.float32) for slot, value in held.items()},
        run={
            "modules": [{"path": name, "class": "my.Layer", "settings": settings}],
            "dtype": "float32",
            "injected": {"source": "ref.h5", "root": "", "mapping": "", "slots": slots},
        },
    )
    reference = archive(make_archive, WEIGHT, X @ WEIGHT.T)
    found = compare(reference, target, mapping=Alignment((Entry(("proj",), (name,)),)))
    pair = next(pair for pair in found.pairs if pair.key == "0/proj/output")
    (finding,) = [finding for finding in pair.findings if finding.test == "quantisation"]
    predicted = np.linalg.norm(X @ (NUMBERS - WEIGHT).T) / np.linalg.norm(X @ WEIGHT.T)
    assert finding.text.startswith(f"own error {predicted:.2g}, ")
    assert pair.status == "within-rounding"
