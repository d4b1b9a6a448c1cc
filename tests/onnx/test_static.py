"""Static quantisation that leaves activations to ranges, rounds where no module is, and has wide ranges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

import tensorcap
from tensorcap.comparison import Comparison, compare
from tensorcap.comparison.rounded_paths import rounded_paths
from tensorcap.localization import localize
from tensorcap.reports.next_step import Sides, after_comparison
from tensorcap.session import capture_workload
from tensorcap_formats.dtypes import Array
from tensorcap_formats.open import open_archive
from tests.onnx.graphs import model, save

DRAW = np.random.default_rng(11)
SIZE, ROWS = 24, 48
WEIGHTS = {
    site: (DRAW.standard_normal((SIZE, SIZE)) / scale).astype(np.float32)
    for site, scale in (("body.fc0", 3), ("body.fc1", 9), ("fc2", 3), ("fc3", 3))
}
STEPS = {site: (np.abs(weight).max(axis=1) / 127).astype(np.float32) for site, weight in WEIGHTS.items()}
NUMBERS = {site: np.rint(weight / STEPS[site][:, None]).astype(np.int8) for site, weight in WEIGHTS.items()}
X = (4 * DRAW.standard_normal((ROWS, SIZE))).astype(np.float32)


class Body(nn.Module):
    """Two layers with a ReLU6 between them, and code behind, which is what it hands on."""

    def __init__(self) -> None:
        super().__init__()
        self.fc0, self.fc1 = (nn.Linear(SIZE, SIZE, bias=False) for _ in range(2))
        self.act = nn.ReLU6()

    def forward(self, x: Any) -> Any:
        return nn.functional.hardswish(self.fc1(self.act(self.fc0(x))))


class Net(nn.Module):
    """Four layers, two of them in a body."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()
        self.fc2, self.fc3 = (nn.Linear(SIZE, SIZE, bias=False) for _ in range(2))
        for site, weight in WEIGHTS.items():
            self.get_submodule(site).weight.data = torch.from_numpy(weight)

    def forward(self, x: Any) -> Any:
        return self.fc3(self.fc2(self.body(x).abs()))


def values(x: Array) -> dict[str, Array]:
    """What the model makes, in float64, by the name that the graph has for it."""
    made = {"x": x.astype(np.float64)}
    made["hardtanh"] = np.clip(made["x"] @ WEIGHTS["body.fc0"].T, 0, 6)
    made["fc1_y"] = made["hardtanh"] @ WEIGHTS["body.fc1"].T
    made["gate"] = np.clip(made["fc1_y"] / 6 + 0.5, 0, 1)
    made["swish"] = made["fc1_y"] * made["gate"]
    made["abs"] = np.abs(made["swish"])
    made["fc2_y"] = made["abs"] @ WEIGHTS["fc2"].T
    made["y"] = made["fc2_y"] @ WEIGHTS["fc3"].T
    return made


@dataclass
class Target:
    """A graph as a static quantiser writes it of an optimised one: names lie on layers alone.

    Attributes:
        nodes: Its nodes.
        weights: Its constants.
        ranges: The least and the largest value of each that is rounded.
    """

    nodes: list[Any]
    weights: dict[str, Array]
    ranges: Mapping[str, tuple[float, float]]

    def rounded(self, name: str) -> str:
        low, high = self.ranges[name]
        step = (high - low) / 255
        self.weights[f"{name}_step"] = np.asarray(step, np.float32)
        self.weights[f"{name}_zero"] = np.asarray(np.rint(-128 - low / step), np.int8)
        for op, given, made in (("Quantize", name, f"{name}_q"), ("Dequantize", f"{name}_q", f"{name}_d")):
            taken = [given, f"{name}_step", f"{name}_zero"]
            self.nodes.append(helper.make_node(f"{op}Linear", taken, [made], f"{made}_node"))
        return f"{name}_d"

    def layer(self, site: str, given: str, made: str) -> None:
        self.weights |= {
            f"{site}.weight_quantized": NUMBERS[site],
            f"{site}_s": STEPS[site],
            f"{site}_z": np.zeros(SIZE, np.int8),
        }
        taken = [f"{site}.weight_quantized", f"{site}_s", f"{site}_z"]
        self.nodes += [
            helper.make_node("DequantizeLinear", taken, [f"{site}_w"], f"{site}_dequantised", axis=0),
            helper.make_node("Transpose", [f"{site}_w"], [f"{site}_t"], f"{site}_transposed", perm=[1, 0]),
            helper.make_node(
                "MatMul", [self.rounded(given), f"{site}_t"], [made], f"/{site.replace('.', '/')}/MatMul"
            ),
        ]


def target(
    folder: Path, x: Array = X, *, alpha: float = 1 / 6, params: Any = True, **ranges: tuple[float, float]
) -> Path:
    """The network with ranges of `X` but for those that are given; `alpha` is that of the hard sigmoid."""
    own = {name: (min(made.min(), 0.0), made.max()) for name, made in values(X).items()}
    made = Target([], {}, own | ranges)
    made.layer("body.fc0", "x", "hardtanh")
    made.layer("body.fc1", "hardtanh", "fc1_y")
    given = made.rounded("fc1_y")
    made.nodes.append(helper.make_node("HardSigmoid", [given], ["gate"], "gate_node", alpha=alpha, beta=0.5))
    gate = made.rounded("gate")
    made.nodes.append(helper.make_node("Mul", [given, gate], ["swish"], "swish_node"))
    made.nodes.append(helper.make_node("Abs", [made.rounded("swish")], ["abs"], "abs_node"))
    made.layer("fc2", "abs", "fc2_y")
    made.layer("fc3", "fc2_y", "y")
    path = save(
        model(made.nodes, [("x", TensorProto.FLOAT, list(x.shape))], ["y"], made.weights), folder / "net.onnx"
    )
    workload = tensorcap.Workload(tensorcap.OnnxModel(path), {"x": x})
    capture_workload(workload, folder / "tgt.h5", params=params)
    return folder / "tgt.h5"


def reference(folder: Path, x: Array = X, *, params: Any = True) -> tuple[Path, tensorcap.Workload]:
    workload = tensorcap.Workload(Net().eval(), {"x": torch.from_numpy(x)})
    capture_workload(workload, folder / "ref.h5", params=params)
    return folder / "ref.h5", workload


def text(result: Comparison, key: str) -> str:
    (pair,) = (pair for pair in result.pairs if pair.key == key)
    return "; ".join(finding.text for finding in pair.findings if finding.test == "quantisation")


@pytest.mark.spec("ONX-44", "POL-627", "POL-701")
def test_an_activation_that_is_left_to_a_range_is_a_node_and_accuses_nobody(tmp_path: Path) -> None:
    (ours, workload), theirs = reference(tmp_path), target(tmp_path)
    with open_archive(theirs) as archive:
        given = archive.read(archive.get("0/body.fc0:x_d_node/output")).astype(np.float64)
        weight = NUMBERS["body.fc0"] * STEPS["body.fc0"][:, None].astype(np.float64)
        wanted = np.clip(given @ weight.T, 0, 6)
        np.testing.assert_allclose(
            archive.read(archive.get("0/body.fc0/output")), wanted, rtol=1e-5, atol=1e-5
        )
    result = compare(ours, theirs)
    assert result.exit_status == 0
    assert result.warnings == ()
    found = localize(ours, theirs, reference_model=workload)
    assert (found.exit_status, found.suspects) == (0, ())


@pytest.mark.spec("ONX-44")
def test_a_relu_in_the_place_of_a_relu6_is_named(tmp_path: Path) -> None:
    largest = float((X.astype(np.float64) @ WEIGHTS["body.fc0"].T).max())
    result = compare(reference(tmp_path)[0], target(tmp_path, hardtanh=(0.0, largest)))
    assert result.exit_status == 1
    assert result.divergence is not None
    assert result.divergence.module == "body.fc0"


@pytest.mark.spec("POL-701")
def test_what_is_rounded_on_the_way_is_counted_back_to_arguments_of_both(tmp_path: Path) -> None:
    with open_archive(reference(tmp_path)[0]) as ours, open_archive(target(tmp_path)) as theirs:

        def relative(name: str, node: str) -> float:
            low, high = min(values(X)[name].min(), 0.0), values(X)[name].max()
            made = theirs.read(theirs.get(f"0/{node}_d_node/output")).astype(np.float64)
            return float((high - low) / 255 / np.sqrt(12) / np.sqrt(np.square(made).mean()))

        nodes = {"hardtanh": "body.fc1:", "fc1_y": "body.fc1:", "gate": "@root:", "swish": "@root:"}
        rounded = [relative(name, site + name) for name, site in nodes.items()]
        aligned = tensorcap.align(ours, theirs)
        for layers, wanted in (({}, rounded), ({"body.fc1": 0.02}, [0.02, *rounded[1:]])):
            errors = dict(rounded_paths(aligned.reference, aligned.target, layers, ()))
            np.testing.assert_allclose(errors["0/fc2/input.input"], np.linalg.norm(wanted), rtol=0.01)


@pytest.mark.spec("POL-701")
def test_code_between_layers_that_computes_something_else_is_told(tmp_path: Path) -> None:
    (ours, workload), theirs = reference(tmp_path), target(tmp_path, alpha=0.5)
    assert compare(ours, theirs).exit_status == 1
    found = localize(ours, theirs, reference_model=workload)
    assert [suspect.module for suspect in found.suspects] == [
        "@root"
    ]  # of the body's result nothing in the graph tells


@pytest.mark.spec("POL-702")
def test_a_range_that_is_far_too_wide_is_named(tmp_path: Path) -> None:
    low, high = min(values(X)["fc2_y"].min(), 0.0), values(X)["fc2_y"].max()
    result = compare(reference(tmp_path)[0], target(tmp_path, fc2_y=(16 * low, 16 * high)))
    assert result.exit_status == 1
    words = "of the calibrated range -"
    assert "its steps are 16 times as wide as they have to be" in text(result, "0/fc3/output")
    assert words in text(result, "0/fc3/output")


@pytest.mark.spec("POL-702")
def test_ranges_that_are_all_too_wide_are_those_of_other_inputs(tmp_path: Path) -> None:
    x = X / 20
    result = compare(reference(tmp_path, x)[0], target(tmp_path, x))
    assert result.exit_status == 0
    assert any("are far wider than what they hold" in warning for warning in result.warnings)


@pytest.mark.spec("POL-703")
@pytest.mark.parametrize("params", [None, True])
def test_what_is_estimated_without_values_of_weights_is_told(params: Any, tmp_path: Path) -> None:
    ours, theirs = reference(tmp_path, params=params)[0], target(tmp_path, params=params)
    result = compare(ours, theirs)
    assert (result.exit_status, result.account is None) == (0, False)
    assert result.account is not None
    told = [text for text in result.account.blind if "the target's capture has no values of them" in text]
    advice = after_comparison(result, Sides(str(ours), str(theirs))).line
    assert (len(told), "--params" in advice) == ((0, False) if params else (1, True))
