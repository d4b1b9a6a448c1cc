"""A Llama by both exporters of torch against the torch model, with rotary embeddings, cache and masks.

It is exported with its mask as an input: without one transformers looks for packed sequences by `diff` of the
positions, an operator (`aten::diff`) for which TorchScript's exporter has nothing.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorcap
from tensorcap.comparison import compare
from tensorcap.session import capture_workload

pytest.importorskip("onnxscript")
transformers = pytest.importorskip("transformers")


class Exported(nn.Module):
    """The model with the tensors of its cache in the place of that: graphs return tensors alone."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any) -> Any:
        made = self.net(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=True
        )
        layers = made.past_key_values.layers
        return (made.logits, *(tensor for layer in layers for tensor in (layer.keys, layer.values)))


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def inputs() -> dict[str, Any]:
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, :2] = 0
    return {
        "input_ids": torch.arange(12).reshape(2, 6),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
    }


@pytest.mark.parametrize("dynamo", [True, False], ids=["torch.export", "TorchScript"])
def test_rotary_cache_and_mask_are_mapped(dynamo: bool, tmp_path: Path) -> None:
    net = llama()
    reference = tensorcap.Workload(net, {**inputs(), "use_cache": True})
    capture_workload(reference, tmp_path / "ref.h5")
    names = ["logits", *(f"present.{layer}.{kind}" for layer in range(2) for kind in ("key", "value"))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Exported(net),
            tuple(inputs().values()),
            tmp_path / "net.onnx",
            input_names=list(inputs()),
            output_names=names,
            dynamo=dynamo,
            verbose=False,
        )
    given = {name: value.numpy() for name, value in inputs().items()}
    target = tensorcap.Workload(tensorcap.OnnxModel(tmp_path / "net.onnx"), given)
    capture_workload(target, tmp_path / "tgt.h5")
    comparison = compare(tmp_path / "ref.h5", tmp_path / "tgt.h5")
    red = {p.key: p.status for p in comparison.pairs if p.status in ("suspect", "diverged", "unmapped")}
    assert (comparison.exit_status, red) == (0, {})
    greens = {pair.key for pair in comparison.pairs if pair.is_compared and pair.is_green}
    assert {
        "0/@root/output.logits",
        "0/model.rotary_emb/input.position_ids",
        "0/model.layers.1/input.position_embeddings.0",
        "0/model.layers.1.self_attn/input.position_embeddings.1",
        "0/model.layers.1.self_attn/input.attention_mask",
        "0/model.layers.1.self_attn/output.0",
        "0/model.layers.1.mlp/output",
        "0/model/output.cache.layers.0.keys",
        "0/model/output.cache.layers.1.keys",
    } <= greens
