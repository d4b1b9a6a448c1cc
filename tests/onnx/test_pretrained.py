"""A pretrained BERT of a package, as ONNX, against its torch twin that is made of the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

import tensorcap
from tensorcap.comparison import Comparison, compare
from tensorcap.session import capture_workload
from tests.onnx.bert import MODEL, drop_mask, exchange_gelu, inputs, named, twin


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
    made = onnx.load(MODEL)
    exchange_gelu(made)
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
    drop_mask(made)
    comparison = compared(reference, tmp_path, made)
    assert comparison.exit_status == 1
    assert comparison.divergence is not None
    assert comparison.divergence.module == "encoder.layer.1.attention.self"
