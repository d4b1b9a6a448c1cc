"""The error that quantised weights make is expected where a target has such weights, and nowhere else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorcap.comparison import POLICY, compare
from tensorcap.comparison.policy import Precision
from tensorcap.comparison.quantised_weights import quantised_precision
from tensorcap_formats.run_info import RunInfo
from tests.comparison.conftest import MakeArchive

RNG = np.random.default_rng(11)
FLOAT32 = POLICY.precision("float32")


def quantised(weight: Any, bits: int, group: int) -> Any:
    """Round to whole steps of the largest value of each group, symmetrically, in float64."""
    groups = weight.reshape(-1, group)
    step = np.abs(groups).max(axis=1, keepdims=True) / (2 ** (bits - 1) - 1)
    return (np.rint(groups / step) * step).reshape(weight.shape)


def run_of(**tensors: tuple[str, list[int]]) -> dict[str, Any]:
    parameters = {name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in tensors.items()}
    return {"modules": [{"path": "proj", "class": "my.Linear", "parameters": parameters}], "dtype": "float32"}


@pytest.mark.spec("POL-4")
@pytest.mark.parametrize(
    ("held", "bits"),
    [
        pytest.param({"weight": ("int8", [256, 512])}, 8, id="a byte for each weight"),
        pytest.param(
            {"qweight": ("int32", [64, 256]), "qzeros": ("int32", [4, 32])}, 4, id="eight in an int32"
        ),
        pytest.param({"packed": ("uint8", [256, 256])}, 4, id="two in a byte"),
    ],
)
@pytest.mark.parametrize("group", [64, 512])
def test_what_rounding_of_weights_does_to_a_product_is_expected(
    held: dict[str, tuple[str, list[int]]], bits: int, group: int
) -> None:
    reference = RunInfo.of(run_of(weight=("float32", [256, 512])))
    precision = quantised_precision(reference, RunInfo.of(run_of(**held)), FLOAT32)
    weight, x = RNG.normal(size=(256, 512)), RNG.normal(size=(32, 512))
    exact, rounded = x @ weight.T, x @ quantised(weight, bits, group).T
    error = float(np.linalg.norm(rounded - exact) / np.linalg.norm(exact))
    assert (precision.weights, precision.text) == (f"int{bits}", f"float32 with int{bits} weights")
    assert 0.5 * precision.rounding < error < 1.5 * precision.rounding


@pytest.mark.spec("POL-4")
@pytest.mark.parametrize(
    "held",
    [
        pytest.param({"weight": ("float32", [256, 512])}, id="floats"),
        pytest.param(
            {"weight": ("float32", [256, 512]), "ids": ("int64", [512])}, id="whole numbers in a row"
        ),
    ],
)
def test_other_targets_keep_their_precision(held: dict[str, tuple[str, list[int]]]) -> None:
    reference = RunInfo.of(run_of(weight=("float32", [256, 512])))
    assert quantised_precision(reference, RunInfo.of(run_of(**held)), FLOAT32) == FLOAT32


@pytest.mark.spec("POL-4")
def test_a_table_of_indices_that_both_sides_have_is_no_weight() -> None:
    both = RunInfo.of(run_of(weight=("float32", [8, 8]), positions=("int64", [8, 8])))
    assert quantised_precision(both, both, FLOAT32) == FLOAT32


@pytest.mark.spec("POL-4")
@pytest.mark.parametrize(
    "trusted",
    [
        pytest.param({"weight": ("float32", [8, 64])}, id="beside a weight"),
        pytest.param({}, id="without any"),
    ],
)
@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8"])
def test_a_table_of_indices_that_the_target_alone_has_is_no_weight(
    trusted: dict[str, tuple[str, list[int]]], dtype: str
) -> None:
    target = RunInfo.of(run_of(**trusted, position_ids=(dtype, [1, 512])))
    assert quantised_precision(RunInfo.of(run_of(**trusted)), target, FLOAT32) == FLOAT32


@pytest.mark.spec("POL-4")
def test_a_quantised_projection_is_green_and_one_with_a_wrong_scale_is_not(make_archive: MakeArchive) -> None:
    weight, x = RNG.normal(size=(96, 128)), RNG.normal(size=(64, 128))
    rounded = quantised(weight, 8, 128)
    wrong = rounded * np.where(np.arange(96) < 48, 1.0, 1.2)[:, None]

    def archive(used: Any, **tensors: tuple[str, list[int]]) -> Any:
        values = {"0/proj/input.x": x, "0/proj/output": x @ used.T}
        return make_archive({k: v.astype(np.float32) for k, v in values.items()}, run=run_of(**tensors))

    reference = archive(weight, weight=("float32", [96, 128]))
    right = compare(reference, archive(rounded, weight=("int8", [96, 128])))
    assert (right.exit_status, right.counts) == (0, {"identical": 1, "within-rounding": 1})
    assert compare(reference, archive(wrong, weight=("int8", [96, 128]))).exit_status == 1
    assert compare(reference, archive(rounded, weight=("float32", [96, 128]))).exit_status == 1


@pytest.mark.spec("POL-4")
@pytest.mark.parametrize("wrong", ["0/norm/output", "0/proj/output", ""])
def test_quantised_weights_excuse_nothing_that_comes_before_them(
    make_archive: MakeArchive, wrong: str
) -> None:
    """A norm that is off by half a percent is no rounding of float32; that of int8 weights is larger."""
    weight, x = RNG.normal(size=(96, 128)), RNG.normal(size=(64, 128))
    norm = x / np.sqrt((x**2).mean(-1, keepdims=True))

    def archive(used: Any, factors: dict[str, Any], **tensors: tuple[str, list[int]]) -> Any:
        hidden = norm * factors.get("0/norm/output", 1.0)
        values = {
            "0/norm/input.x": x,
            "0/norm/output": hidden,
            "0/proj/input.x": norm,
            "0/proj/output": norm @ used.T * factors.get("0/proj/output", 1.0),
        }
        return make_archive({k: v.astype(np.float32) for k, v in values.items()}, run=run_of(**tensors))

    reference = archive(weight, {}, weight=("float32", [96, 128]))
    noise = 1 + 0.005 * RNG.normal(size=(64, 1))
    target = archive(quantised(weight, 8, 128), {wrong: noise} if wrong else {}, weight=("int8", [96, 128]))
    found = compare(reference, target)
    statuses = {pair.key: pair.is_green for pair in found.pairs}
    assert statuses["0/norm/output"] is (wrong != "0/norm/output")
    assert statuses["0/proj/output"] is True


@pytest.mark.spec("POL-180")
@pytest.mark.parametrize("largest", [1.0, 40.0], ids=["normal values", "one large value in each row"])
@pytest.mark.parametrize("bits", [7, 8])
def test_what_rounding_of_inputs_does_to_a_product_is_expected(
    make_archive: MakeArchive, bits: int, largest: float
) -> None:
    """Of products of float64 matrices of which each is rounded to one grid of its own."""
    weight, x = RNG.normal(size=(96, 128)), RNG.normal(size=(64, 128))
    x[:, 5] *= largest
    step = (x.max() - x.min()) / (2**bits - 1)
    scale = np.abs(weight).max() / 127.5
    exact = x @ weight.T
    rounded = np.rint(x / step) * step @ (np.clip(np.rint(weight / scale), -128, 127) * scale).T
    error = float(np.linalg.norm(rounded - exact) / np.linalg.norm(exact))

    run = run_of(weight=("float32", [96, 128]))
    values = {"0/proj/param.weight": weight, "0/proj/input.x": x, "0/proj/output": exact}
    reference = make_archive({k: v.astype(np.float32) for k, v in values.items()}, run=run)
    held = run_of(weight=("qint8", [96, 128]))
    held["modules"][0]["settings"] = {"input_bits": bits, "one_scale": True}
    precision = quantised_precision(reference.info, RunInfo.of(held), FLOAT32, reference.records)
    assert 0.9 * precision.rounding < error < 1.1 * precision.rounding


@pytest.mark.spec("POL-181")
@pytest.mark.parametrize(
    ("factor", "held", "status"),
    [
        pytest.param(1.0, "qint8", "within-rounding", id="rounded"),
        pytest.param(1.1, "qint8", "diverged", id="a wrong scale"),
        pytest.param(1.0, "float32", "diverged", id="not said"),
    ],
)
def test_a_packed_weight_is_the_references_rounded_to_a_grid(
    make_archive: MakeArchive, factor: float, held: str, status: str
) -> None:
    weight = RNG.normal(size=(96, 128))
    rounded = factor * quantised(weight, 8, weight.size)
    key = "0/proj/param.weight"
    reference, target = (
        make_archive({key: w.astype(np.float32)}, run=run_of(weight=(dtype, [96, 128])))
        for w, dtype in ((weight, "float32"), (rounded, held))
    )
    assert compare(reference, target).pairs[0].status == status


@pytest.mark.spec("POL-180")
def test_what_a_module_adds_is_held_against_its_own_weights() -> None:
    runs = Precision("float32", 0.08, 0.04, "int8", own_roundings={"q_proj": 0.01})
    assert (runs.of_module("q_proj").rounding, runs.of_module("q_proj").unit) == (0.01, 0.02)
    assert (runs.of_module("norm").rounding, runs.of_module("norm").unit) == (0.04, 0.08)


@pytest.mark.spec("POL-650")
def test_a_module_in_floats_adds_what_its_own_dtype_rounds() -> None:
    held = run_of(weight=("int8", [256, 512]))
    held["modules"].append({"path": "norm", "class": "my.Norm"})
    whole = run_of(weight=("float32", [256, 512]))
    whole["modules"].append({"path": "norm", "class": "my.Norm"})
    precision = quantised_precision(RunInfo.of(whole), RunInfo.of(held), FLOAT32)
    assert precision.of_module("proj").rounding == precision.rounding > 1e-3
    assert precision.of_module("norm").rounding == 4e-6
    assert precision.of_module("elsewhere").rounding == precision.rounding
    low = quantised_precision(RunInfo.of(whole), RunInfo.of(held), POLICY.precision("bfloat16"))
    assert low.of_module("norm").rounding == pytest.approx(0.425 * 2**-8)


@pytest.mark.spec("POL-655")
def test_no_module_of_a_target_that_rounds_results_is_known_to_round_nothing() -> None:
    whole, held = run_of(weight=("float32", [256, 512])), run_of(weight=("int8", [256, 512]))
    for run in (whole, held):
        run["modules"].append({"path": "norm", "class": "my.Norm"})
    held["modules"][0]["settings"] = {"output_step": 0.1}
    precision = quantised_precision(RunInfo.of(whole), RunInfo.of(held), FLOAT32)
    assert precision.of_module("norm").rounding == precision.rounding


@pytest.mark.spec("POL-665")
@pytest.mark.parametrize(
    ("error", "is_green"),
    [pytest.param(0.07, True, id="of-four-roundings"), pytest.param(0.1, False, id="larger-than-these-make")],
)
def test_what_all_layers_round_off_bounds_the_error_of_the_last(
    make_archive: MakeArchive, *, error: float, is_green: bool
) -> None:
    """Four layers in int8, 4 / (127 sqrt(12)) each, make 0.018 together, of which four times are allowed.

    Limits widen by 1 + 3 / sqrt(4096) for so few elements: 0.0761. By depth alone it is 0.2.
    """
    made = {f"0/layers.{i}.proj/output": RNG.normal(size=(64, 64)).astype(np.float32) for i in range(4)}
    result = RNG.normal(size=(64, 64))
    noise = np.sign(RNG.normal(size=(64, 64))) * result * error

    def archive(last: Any, dtype: str) -> Any:
        held = {"weight": {"dtype": dtype, "shape": [64, 64]}}
        modules = [{"path": f"layers.{i}.proj", "class": "my.Linear", "parameters": held} for i in range(4)]
        run = {"dtype": "float32", "modules": modules}
        return make_archive({**made, "0/layers.3/output": last.astype(np.float32)}, run=run)

    found = compare(archive(result, "float32"), archive(result + noise, "int8"))
    assert found.pairs[-1].is_green is is_green
