"""Graphs that were optimised before they were quantised: nobody says any more where their nodes lie."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnxruntime.quantization import QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import nn

import tensorcap
from tensorcap.comparison import Comparison, compare
from tensorcap.localization import localize
from tensorcap.session import capture_workload
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.open import open_archive
from tests.onnx.graphs import model, save
from tests.quantised_zoo import models
from tests.quantised_zoo.onnx_targets import Graph, Images, exported
from tests.quantised_zoo.run import outcomes_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

DRAW = np.random.default_rng(9)
GAIN = DRAW.standard_normal(8).astype(np.float32)
UP, HEAD = (DRAW.standard_normal(shape).astype(np.float32) for shape in ((8, 12), (12, 5)))
BIAS = DRAW.standard_normal(12).astype(np.float32)
X = DRAW.standard_normal((3, 8)).astype(np.float32)


def captured(path: Path, made: Any, inputs: dict[str, Array]) -> Archive:
    target = tensorcap.OnnxModel(save(made, path / "net.onnx"))
    capture_workload(tensorcap.Workload(target, inputs), path / "run.h5", params=True)
    return open_archive(path / "run.h5")


def sites(archive: Archive) -> set[str]:
    """The modules that have records."""
    return {record.key.site for record in archive.records if ":" not in record.key.site} - {"@root"}


def norm_and_layers() -> Any:
    """An RMS norm in parts, a product with a bias of no module, and one with a dequantised weight."""
    nodes = [
        helper.make_node("Pow", ["x", "two"], ["square"], "n0"),
        helper.make_node("ReduceMean", ["square"], ["mean"], "n1", axes=[-1]),
        helper.make_node("Add", ["mean", "eps"], ["sum"], "n2"),
        helper.make_node("Sqrt", ["sum"], ["root"], "n3"),
        helper.make_node("Reciprocal", ["root"], ["inverse"], "n4"),
        helper.make_node("Mul", ["x", "inverse"], ["normed"], "n5"),
        helper.make_node("Mul", ["net.norm.weight", "normed"], ["h"], "n6"),
        helper.make_node("MatMul", ["h", "val_7"], ["product"], "n7"),
        helper.make_node("Add", ["product", "val_8"], ["linear.1"], "n8"),
        helper.make_node("DequantizeLinear", ["net.head.weight_quantized", "s"], ["w"], "n9", axis=1),
        helper.make_node("MatMul", ["linear.1", "w"], ["y"], "n10"),
    ]
    steps = np.abs(HEAD).max(axis=0) / 127
    weights = {
        "two": np.float32(2),
        "eps": np.float32(1e-5),
        "net.norm.weight": GAIN,
        "val_7": UP,
        "val_8": BIAS,
        "net.head.weight_quantized": np.rint(HEAD / steps).astype(np.int8),
        "s": steps.astype(np.float32),
    }
    return model(nodes, [("x", TensorProto.FLOAT, [3, 8])], ["y"], weights)


@pytest.mark.spec("ONX-70", "ONX-71")
def test_norms_in_parts_and_layers_without_names_are_modules(tmp_path: Path) -> None:
    with captured(tmp_path, norm_and_layers(), {"x": X}) as archive:
        assert sites(archive) == {"net", "net.norm", "linear_1", "net.head"}
        assert not any(r.key.site == "net" and "output" in r.key.slot for r in archive.records)
        exact = X.astype(np.float64)
        h = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5) * GAIN
        wanted = {
            "net.norm/input.0": exact,
            "net.norm/output": h,
            "linear_1/input.0": h,
            "linear_1/output": h @ UP + BIAS,
            "net.head/input.0": h @ UP + BIAS,
        }
        for key, values in wanted.items():
            np.testing.assert_allclose(archive.read(archive.get(f"0/{key}")), values, rtol=1e-5, atol=1e-5)
        assert archive.get("0/linear_1/param.weight").shape == UP.shape
        assert archive.info.modules["net.head"].settings["dequantised"] == ["weight"]


@pytest.mark.spec("ONX-72")
def test_a_norm_that_was_folded_into_a_convolution_lies_with_it(tmp_path: Path) -> None:
    node = helper.make_node("Conv", ["x", "stem.0.weight", "stem.0.weight_bias"], ["y"], "node_Conv_1")
    says = {
        "pkg.torch.onnx.name_scopes": "['', 'stem', 'stem.1', 'batch_norm']",
        "pkg.onnxscript.rewriter.rule_name": "FuseBatchNormIntoConv",
    }
    for key, value in says.items():
        node.metadata_props.add(key=key, value=value)
    weights = {
        "stem.0.weight": DRAW.standard_normal((4, 2, 3, 3)).astype(np.float32),
        "stem.0.weight_bias": DRAW.standard_normal(4).astype(np.float32),
    }
    made = model([node], [("x", TensorProto.FLOAT, [1, 2, 5, 5])], ["y"], weights)
    made.ir_version = 10
    with captured(tmp_path, made, {"x": DRAW.standard_normal((1, 2, 5, 5)).astype(np.float32)}) as archive:
        assert "0/stem.0/output" in archive
        assert "stem.1" not in sites(archive)


@pytest.mark.spec("ONX-72")
def test_what_dequantises_for_one_of_several_lies_outside(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["/m/q"], "/m/Quantize"),
        helper.make_node("DequantizeLinear", ["/m/q", "s", "z"], ["d"], "dequantise"),
        helper.make_node("Sqrt", ["d"], ["y"], "sqrt"),
        helper.make_node("Cast", ["/m/q"], ["numbers"], "cast", to=TensorProto.INT32),
    ]
    weights: dict[str, Any] = {"s": np.float32(0.1), "z": np.uint8(0)}
    made = model(nodes, [("x", TensorProto.FLOAT, [3, 8])], ["y", "numbers"], weights)
    with captured(tmp_path, made, {"x": np.abs(X)}) as archive:
        results = [r.key.slot for r in archive.records if r.key.site == "m" and "output" in r.key.slot]
        assert results == ["output"]
        rounded = np.minimum(np.rint(np.abs(X) / np.float32(0.1)), 255) * 0.1
        np.testing.assert_allclose(archive.read(archive.get("0/m/output")), rounded, rtol=1e-6)


class Embeddings(nn.Module):
    """Of words, and of one type for all; their sum is normed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words, self.types, self.norm = nn.Embedding(20, 8), nn.Embedding(2, 8), nn.LayerNorm(8)

    def forward(self, ids: Any) -> Any:
        return self.norm(self.words(ids) + self.types(torch.zeros_like(ids)))


@pytest.mark.spec("ALN-333")
def test_a_sum_with_what_was_computed_beforehand_is_no_embedding(tmp_path: Path) -> None:
    net = Embeddings().eval()
    ids = torch.arange(12).reshape(2, 6)
    capture_workload(tensorcap.Workload(net, {"ids": ids}), tmp_path / "ref.h5", params=True)
    table = net.words.weight.detach().numpy()
    step = np.abs(table).max() / 127
    nodes = [
        helper.make_node("Gather", ["words.weight_quantized", "ids"], ["numbers"], "n0"),
        helper.make_node("DequantizeLinear", ["numbers", "s"], ["embedding"], "n1"),
        helper.make_node("Add", ["embedding", "types"], ["sum"], "n2"),
        helper.make_node("LayerNormalization", ["sum", "norm.weight", "norm.bias"], ["y"], "n3"),
    ]
    weights: dict[str, Any] = {
        "words.weight_quantized": np.rint(table / step).astype(np.int8),
        "s": np.float32(step),
        "types": net.types.weight[0].detach().numpy(),
        "norm.weight": net.norm.weight.detach().numpy(),
        "norm.bias": net.norm.bias.detach().numpy(),
    }
    made = model(nodes, [("ids", TensorProto.INT64, [2, 6])], ["y"], weights)
    captured(tmp_path, made, {"ids": ids.numpy()})
    comparison = compare(tmp_path / "ref.h5", tmp_path / "run.h5")
    status = {pair.key: pair.status for pair in comparison.pairs}
    assert status["0/types/output"] == "explained"
    assert comparison.exit_status == 0


def optimised(folder: Path, times: float = 1.0) -> Comparison:
    """The decoder, exported, optimised, and then in int8; one step of its weights is wrong."""
    logging.disable(logging.WARNING)
    onnx.save(exported(models.decoder).model, folder / "exported.onnx")
    quant_pre_process(folder / "exported.onnx", folder / "ready.onnx", skip_symbolic_shape=True)
    quantize_dynamic(folder / "ready.onnx", folder / "target.onnx", weight_type=QuantType.QInt8)
    graph = Graph(onnx.load(folder / "target.onnx"))
    assert not any(node.metadata_props for node in graph.model.graph.node)
    up = "node_linear_12_quant"  # the second of 7 in the second layer: up_proj comes behind gate_proj
    name = next(node.input[1] for node in graph.model.graph.node if node.name == up)
    graph[name.replace("_quantized", "_scale")] = graph[name.replace("_quantized", "_scale")] * np.float32(
        times
    )
    onnx.save(graph.model, folder / "target.onnx")
    reference = models.decoder()
    capture_workload(reference, folder / "ref.h5", params=True)
    inputs: Any = reference.inputs
    target = tensorcap.OnnxModel(folder / "target.onnx")
    given = {"input_ids": inputs["input_ids"].numpy()}
    capture_workload(tensorcap.Workload(target, given), folder / "tgt.h5", params=True)
    return compare(folder / "ref.h5", folder / "tgt.h5")


@pytest.mark.slow
def test_a_llama_that_was_optimised_first_is_compared_layer_by_layer(tmp_path: Path) -> None:
    comparison = optimised(tmp_path)
    assert comparison.exit_status == 0
    green = {pair.key for pair in comparison.pairs if pair.is_compared and pair.is_green}
    layers = [
        f"0/model.layers.{i}.{part}/{slot}"
        for i in range(3)
        for part in (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.o_proj",
            "mlp.up_proj",
            "mlp.down_proj",
        )
        for slot in ("param.weight", "input.input", "output")
    ]
    assert {*layers, "0/lm_head/output"} <= green


@pytest.mark.slow
def test_a_wrong_step_of_it_is_named(tmp_path: Path) -> None:
    comparison = optimised(tmp_path, times=1.3)
    assert comparison.exit_status == 1
    red = {pair.key for pair in comparison.pairs if pair.status in ("diverged", "suspect")}
    assert red == {f"0/model.layers.1.mlp.up_proj/{slot}" for slot in ("param.weight", "output")}
    assert (
        localize(tmp_path / "ref.h5", tmp_path / "tgt.h5").suspects[0].module == "model.layers.1.mlp.up_proj"
    )


@pytest.mark.slow
@pytest.mark.spec("POL-672")
@pytest.mark.parametrize("name", ["onnx-qdq/network", "onnx-qoperator/network"])
def test_sums_that_are_rounded_outside_of_their_blocks_accuse_nobody(name: str) -> None:
    (outcome,) = outcomes_of(name, ("localize",))
    assert outcome.exit_status == 0, outcome.report


class Mobile(nn.Module):
    """Convolutions with norms folded into them, by channel too, and activations that are left to ranges."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.block = nn.Sequential(
            nn.Conv2d(8, 16, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.Hardswish(),
            nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU6(),
            nn.Conv2d(16, 8, 1, bias=False),
            nn.BatchNorm2d(8),
        )
        self.head = nn.Linear(8, 10)

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        return self.head((x + self.block(x)).mean((2, 3)))


def mobile() -> tensorcap.Workload:
    torch.manual_seed(5)
    net = models._as_trained(Mobile(), 5)
    norms: list[Any] = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    for module in norms:
        module.running_mean.uniform_(-0.3, 0.3)
        module.running_var.uniform_(0.1, 0.4)
    return tensorcap.Workload(net, (models.images(0),))


@pytest.mark.slow
@pytest.mark.spec("POL-670", "RPL-230")
@pytest.mark.parametrize("has_activation", [True, False], ids=["right", "without-the-relu6"])
def test_activations_and_norms_of_a_static_network_are_where_the_graph_has_them(
    tmp_path: Path, has_activation: bool
) -> None:
    graph = exported(mobile).model
    if not has_activation:
        clip = next(node for node in graph.graph.node if node.op_type == "Clip")
        for node in graph.graph.node:
            node.input[:] = [clip.input[0] if name == clip.output[0] else name for name in node.input]
        graph.graph.node.remove(clip)
    onnx.save(graph, tmp_path / "exported.onnx")
    feeds = iter([{"x": models.images(seed).numpy()} for seed in range(4)])
    settings: Any = {"per_channel": True, "weight_type": QuantType.QInt8}
    quantize_static(tmp_path / "exported.onnx", tmp_path / "target.onnx", Images(feeds), **settings)
    capture_workload(mobile(), tmp_path / "ref.h5", params=True)
    target = tensorcap.OnnxModel(tmp_path / "target.onnx")
    capture_workload(
        tensorcap.Workload(target, {"x": models.images(0).numpy()}), tmp_path / "tgt.h5", params=True
    )
    assert compare(tmp_path / "ref.h5", tmp_path / "tgt.h5").exit_status == (0 if has_activation else 1)
    found = localize(tmp_path / "ref.h5", tmp_path / "tgt.h5", reference_model=mobile())
    suspects = {suspect.module for suspect in found.suspects}
    assert suspects == (set() if has_activation else {"block.5"})  # the activation
