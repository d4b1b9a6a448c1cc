"""Ranges of a static calibration that cut values, and steps in which a sum loses an operand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

import tensorcap
from tensorcap.comparison import Comparison, compare
from tensorcap.localization import localize
from tensorcap.session import capture_workload
from tensorcap_formats.dtypes import Array
from tests.onnx.graphs import model, save

DRAW = np.random.default_rng(7)
ROWS, INPUTS, OUTPUTS = 32, 64, 24
WEIGHT = DRAW.standard_normal((OUTPUTS, INPUTS)).astype(np.float32)
X = DRAW.uniform(-2.5, 2.5, (ROWS, INPUTS)).astype(np.float32)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(INPUTS, OUTPUTS, bias=False)
        self.fc.weight.data = torch.from_numpy(WEIGHT)

    def forward(self, x: Any) -> Any:
        return self.fc(x)


def rounded(value: str, step: str, site: str) -> tuple[list[Any], str]:
    """Nodes that round a value to int8, as floats again, and the name of that."""
    name = f"{value}_{step}".replace("/", "")
    return [
        helper.make_node("QuantizeLinear", [value, step, "zero"], [f"/{site}/{name}_q"], f"/{site}/{name}_q"),
        helper.make_node(
            "DequantizeLinear",
            [f"/{site}/{name}_q", step, "zero"],
            [f"/{site}/{name}_d"],
            f"/{site}/{name}_d",
        ),
    ], f"/{site}/{name}_d"


def linear(x: Array, largest: float, folder: Path, result: float = 60.0) -> Path:
    """A layer in int8 whose inputs are calibrated to a largest value, and its results to another."""
    steps = np.abs(WEIGHT).max(axis=1) / 127
    numbers = np.rint(WEIGHT / steps[:, None]).astype(np.int8)
    given, name = rounded("x", "step", "fc")
    made, last = rounded("/fc/y", "result_step", "fc")
    nodes = [
        *given,
        helper.make_node("DequantizeLinear", ["fc.weight_quantized", "s", "z"], ["w"], "d", axis=0),
        helper.make_node("Transpose", ["w"], ["t"], "t", perm=[1, 0]),
        helper.make_node("MatMul", [name, "t"], ["/fc/y"], "/fc/MatMul"),
        *made,
    ]
    weights = {
        "fc.weight_quantized": numbers,
        "s": steps.astype(np.float32),
        "z": np.zeros(OUTPUTS, np.int8),
        "step": np.float32(largest / 127),
        "result_step": np.float32(result / 127),
        "zero": np.int8(0),
    }
    return captured(nodes, last, {"x": x}, weights, folder)


def captured(
    nodes: Any, output: str, given: dict[str, Array], weights: Any, folder: Path, params: Any = True
) -> Path:
    inputs = [(name, TensorProto.FLOAT, list(value.shape)) for name, value in given.items()]
    path = save(model(nodes, inputs, [output], weights), folder / "net.onnx")
    workload = tensorcap.Workload(tensorcap.OnnxModel(path), given)
    capture_workload(workload, folder / "tgt.h5", params=params)
    return folder / "tgt.h5"


def reference(net: nn.Module, given: dict[str, Array], folder: Path, params: Any = True) -> Path:
    inputs = {name: torch.from_numpy(value) for name, value in given.items()}
    capture_workload(tensorcap.Workload(net.eval(), inputs), folder / "ref.h5", params=params)
    return folder / "ref.h5"


def text(result: Comparison, key: str) -> str:
    (pair,) = (pair for pair in result.pairs if pair.key == key)
    return "; ".join(finding.text for finding in pair.findings if finding.test == "quantisation")


def outliers(count: int, value: float) -> Array:
    x = X.copy()
    x[np.arange(count), 5 * np.arange(count) % INPUTS] = value
    return x


def one_channel() -> Array:
    x = X.copy()
    x[:, 9] *= 3
    return x


class SelfAttention(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Any) -> Any:
        q, k, v = (
            part(x).reshape(*x.shape[:2], self.heads, -1).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        return (scores @ v).transpose(1, 2).flatten(-2)


class Attending(nn.Module):
    def __init__(self, heads: int = 8) -> None:
        super().__init__()
        self.attention = SelfAttention(heads)

    def forward(self, x: Any) -> Any:
        return torch.relu(self.attention(x))


@pytest.mark.spec("POL-11", "POL-691", "RPL-101", "ONX-40", "ALN-347", "LCL-670", "LCL-671")
@pytest.mark.parametrize(("heads", "is_larger"), [(8, False), (2, False), (8, True)])
def test_a_fused_attention_in_few_bits_is_judged_by_what_its_projections_were_given(
    heads: int, is_larger: bool, tmp_path: Path
) -> None:
    """`QAttention`: no result of a projection is a value of the graph. With 2 heads for 8 it is wrong.

    So it is with scales of values that are 3 times as large.
    """
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = Attending().eval()
        net.attention.query.weight.data *= 6
    x = torch.from_numpy(DRAW.standard_normal((2, 12, 64)).astype(np.float32))
    parts = net.attention.query, net.attention.key, net.attention.value
    whole = np.concatenate([part.weight.detach().numpy() for part in parts])
    steps = np.abs(whole).max(axis=1) / 127
    held = np.concatenate([steps[:128], 3 * steps[128:]]) if is_larger else steps
    weights = {
        "qkv_quantized": np.rint(whole / steps[:, None]).astype(np.int8).T.copy(),
        "qkv_scale": held,
        "qkv_zero_point": np.zeros(192, np.int8),
        "qkv_bias": np.concatenate([part.bias.detach().numpy() for part in parts]),
    }
    given = ["q", "qkv_quantized", "qkv_bias", "qs", "qkv_scale", "", "qz", "qkv_zero_point"]
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "qs", "qz"], "x_q"),
        helper.make_node(
            "QAttention", given, ["/attention/y"], "Attention_0", domain="com.microsoft", num_heads=heads
        ),
        helper.make_node("Relu", ["/attention/y"], ["y"], "/Relu"),
    ]
    made = model(nodes, [("x", TensorProto.FLOAT, list(x.shape))], ["y"], weights)
    made.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    reference = tensorcap.Workload(net, (x,))
    capture_workload(reference, tmp_path / "ref.h5", params=True)
    target = tensorcap.OnnxModel(save(made, tmp_path / "net.onnx"))
    capture_workload(tensorcap.Workload(target, {"x": x.numpy()}), tmp_path / "tgt.h5", params=True)
    compared = compare(tmp_path / "ref.h5", tmp_path / "tgt.h5")
    localized = localize(tmp_path / "ref.h5", tmp_path / "tgt.h5", reference_model=reference)
    is_right = heads == 8 and not is_larger
    assert (compared.exit_status, localized.exit_status) == ((0, 0) if is_right else (1, 1))
    values = ["attention.value"] if is_larger else []
    assert [suspect.module for suspect in localized.suspects] == ([] if is_right else ["attention", *values])
    if is_larger:
        assert [one.cause for one in localized.suspects] == ["weight-scales", "weight-scales"]
    elif not is_right:
        assert compared.divergence is not None
        assert compared.divergence.pair.key == "0/attention/output"
        text = "it has 2 heads, the reference 8"
        assert any(text in finding.text for finding in compared.divergence.pair.findings)
        assert localized.suspects[0].cause == "attention-layout"
        of_graph = tensorcap.Workload(target, {"x": x.numpy()})
        injected = localize(tmp_path / "ref.h5", tmp_path / "tgt.h5", target_model=of_graph)
        assert [suspect.module for suspect in injected.suspects] == ["attention"]


@pytest.mark.spec("POL-620", "ONX-41")
@pytest.mark.parametrize(
    ("x", "largest", "status", "words"),
    [
        pytest.param(X, 2.5, 0, "", id="all within"),
        pytest.param(
            outliers(3, 3.3),
            2.6,
            0,
            "0.15 % of its inputs lie beyond the calibrated range -2.62 to 2.6 and are cut, 3.3 to 2.6",
            id="a few outliers",
        ),
        pytest.param(outliers(1, 90.0), 2.6, 1, "are cut, 90 to 2.6", id="a massive one"),
        pytest.param(X, 1.5, 1, "% of its inputs lie beyond the calibrated range -1.51 to 1.5", id="many"),
        pytest.param(one_channel(), 2.6, 1, "most of channel 9", id="a channel"),
    ],
)
def test_what_the_range_of_inputs_cuts_is_told(
    x: Array, largest: float, status: int, words: str, tmp_path: Path
) -> None:
    result = compare(reference(Net(), {"x": x}, tmp_path), linear(x, largest, tmp_path))
    assert result.exit_status == status
    assert words in text(result, "0/fc/output")
    told = [warning for warning in result.warnings if "as a calibration may choose" in warning]
    assert bool(told) == (status == 0 and words != "")
    assert all(words in warning for warning in told)


def test_what_the_range_of_results_cuts_is_told(tmp_path: Path) -> None:
    result = compare(reference(Net(), {"x": X}, tmp_path), linear(X, 2.5, tmp_path, result=10.0))
    assert result.exit_status == 1
    assert "% of its results lie beyond the calibrated range -10.1 to 10 and are cut" in text(
        result, "0/fc/output"
    )


class Scores(nn.Module):
    def forward(self, scores: Any, mask: Any) -> Any:
        return torch.softmax(scores + mask, dim=-1)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Scores()

    def forward(self, scores: Any, mask: Any) -> Any:
        return self.attention(scores, mask)


def masked(fill: float, folder: Path) -> tuple[Path, Path, tensorcap.Workload]:
    """Scores and a mask, added in int8 steps whose range has both: the reference, the port, its twin."""
    scores = DRAW.standard_normal((4, 8)).astype(np.float32)
    mask = np.zeros((4, 8), np.float32)
    mask[:, 6:] = fill
    one, first = rounded("scores", "step", "attention")
    two, second = rounded("mask", "fill_step", "attention")
    total, last = rounded("/attention/sum", "fill_step", "attention")
    nodes = [
        *one,
        *two,
        helper.make_node("Add", [first, second], ["/attention/sum"], "/attention/Add"),
        *total,
        helper.make_node("Softmax", [last], ["/attention/y"], "/attention/Softmax"),
    ]
    weights = {"step": np.float32(4 / 127), "fill_step": np.float32(-fill / 127), "zero": np.int8(0)}
    given = {"scores": scores, "mask": mask}
    target = captured(nodes, "/attention/y", given, weights, folder)
    inputs = {name: torch.from_numpy(value) for name, value in given.items()}
    return reference(Masked(), given, folder), target, tensorcap.Workload(Masked().eval(), inputs)


@pytest.mark.spec("POL-621")
def test_scores_that_are_lost_beside_a_mask_are_named(tmp_path: Path) -> None:
    ours, theirs, trusted = masked(-3e38, tmp_path)
    result = compare(ours, theirs)
    assert result.exit_status == 1
    assert result.divergence is not None
    assert result.divergence.module == "attention"
    words = "rounds a sum to steps of 2.36e+36, in which its operand of at most"
    assert words in text(result, "0/attention/output")
    found = localize(ours, theirs, reference_model=trusted)
    assert [suspect.module for suspect in found.suspects] == ["attention"]
    assert words in found.suspects[0].reason


@pytest.mark.spec("POL-621", "POL-622", "ONX-60")
def test_a_sum_in_steps_that_keep_its_operands_is_as_rounding_predicts(tmp_path: Path) -> None:
    ours, theirs, trusted = masked(-8.0, tmp_path)
    assert compare(ours, theirs).exit_status == 0
    assert localize(ours, theirs, reference_model=trusted).exit_status == 0


def with_outliers() -> Array:
    """Inputs of which one row sets the step of all."""
    x = X.copy()
    x[3] *= 40
    return x


def dynamic(x: Array, folder: Path, *, off: int = 0) -> Path:
    """The layer with a scale for each row, whose inputs are rounded at each call."""
    steps = np.abs(WEIGHT).max(axis=1) / 127
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "qs", "qz"], "/fc/q"),
        helper.make_node(
            "MatMulInteger", ["q", "fc.weight_quantized", "qz", "z"], ["/fc/i"], "/fc/MatMulInteger"
        ),
        helper.make_node("Cast", ["/fc/i"], ["/fc/c"], "/fc/Cast", to=TensorProto.FLOAT),
        helper.make_node("Mul", ["qs", "s"], ["/fc/f"], "/fc/Mul"),
        helper.make_node("Mul", ["/fc/c", "/fc/f"], ["/fc/y"], "/fc/Mul_1"),
    ]
    numbers = np.ascontiguousarray(np.rint(WEIGHT / steps[:, None]).astype(np.int8).T)
    weights = {"fc.weight_quantized": numbers, "s": steps.astype(np.float32), "z": np.int8(off)}
    return captured(nodes, "/fc/y", {"x": x}, weights, folder, params=None)


@pytest.mark.spec("POL-623")
def test_a_row_of_outliers_is_allowed_for_where_no_weights_were_recorded(tmp_path: Path) -> None:
    x = with_outliers()
    ours, theirs = reference(Net(), {"x": x}, tmp_path, params=None), dynamic(x, tmp_path)
    assert compare(ours, theirs).exit_status == 0
    trusted = tensorcap.Workload(Net().eval(), {"x": torch.from_numpy(x)})
    assert localize(ours, theirs, reference_model=trusted).suspects == ()


@pytest.mark.spec("LCL-620", "VER-620")
@pytest.mark.parametrize("off", [0, 1])
def test_verify_accuses_a_layer_of_its_weight_alone(off: int, tmp_path: Path) -> None:
    x = with_outliers()
    dynamic(x, tmp_path, off=off)
    given = {"x": torch.from_numpy(x)}
    target = tensorcap.Workload(tensorcap.OnnxModel(tmp_path / "net.onnx"), {"x": x})
    found = tensorcap.verify(tensorcap.Workload(Net().eval(), given), target, tmp_path / "out")
    assert found.exit_status == off
    suspects = found.localization.suspects
    assert [(suspect.module, suspect.by, suspect.cause) for suspect in suspects] == [
        ("fc", ("weights",), "weight-zero-point")
    ] * off
    if off:
        assert suspects[0].diagnosis is not None
        assert "in its parameter weight: its zero point is 1 off" in suspects[0].diagnosis.text
        assert suspects[0].code is None  # its operations are right, and other ones than in floats
