"""What the reference's code has and the port's has not, in small sources of our own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorcap.source_analysis import ReferenceDifferences, divergence

REFERENCE = """
import torch
from torch import nn

class DemoRMSNorm(nn.Module):
    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.to(dtype)

def attend(q, k, v, config):
    scores = torch.matmul(q, k) * config.query_scale
    if config.attn_logit_softcapping is not None:
        scores = torch.tanh(scores / config.attn_logit_softcapping) * config.attn_logit_softcapping
    return nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v

class DemoAttention(nn.Module):
    def __init__(self, config):
        self.heads = config.num_attention_heads
        self.dropout = config.attention_dropout
        self.kind = getattr(config, "layer_kind", None)
        self.limit = config["limit"]
    def forward(self, x):
        return attend(x, x, x, self.config)

class DemoSparseMoeBlock(nn.Module):
    def forward(self, x):
        return torch.topk(torch.sigmoid(x), self.config.text_config.num_experts_per_tok)
"""
PORT = """
import torch

class Base:
    def forward(self, x):
        return self.act(torch.nn.functional.softmax(x, dim=-1))

class NeuronDemoAttention(Base):
    def __init__(self, config):
        config.query_scale = 1
        super().__init__(config.num_attention_heads, scale=config.query_scale)
        self.kernel = config.neuron_config.attention_dropout

class CustomRMSNorm(DistantBase, nn.Module):
    def forward(self, x):
        return Kernel.apply(x.float(), self.weight)

class NeuronMoE:
    def forward(self, x):
        return torch.topk(torch.softmax(x, -1), 2)
"""


@pytest.fixture
def differences(tmp_path: Path) -> ReferenceDifferences:
    (tmp_path / "reference.py").write_text(REFERENCE)
    (tmp_path / "port.py").write_text(PORT)
    result = divergence([tmp_path / "port.py"], reference_sources=[tmp_path / "reference.py"])
    assert result.exit_status == 1
    assert result.reference is not None
    return result.reference


@pytest.mark.spec("NRN-54")
def test_settings_that_only_the_reference_reads_are_listed(differences: ReferenceDifferences) -> None:
    assert [setting.name for setting in differences.unread] == [
        "attn_logit_softcapping",
        "layer_kind",
        "limit",
        "num_experts_per_tok",
    ]
    first = differences.unread[0]
    assert [place.rpartition(":")[2] for place in first.places] == ["14", "15"]


@pytest.mark.spec("NRN-55")
def test_classes_are_paired_by_name_and_by_role(differences: ReferenceDifferences) -> None:
    assert differences.paired == 3
    assert differences.absent_bases == ("DistantBase",)
    assert differences.unpaired == ()
    assert {(pair.reference, pair.target) for pair in differences.classes} == {
        ("DemoAttention", "NeuronDemoAttention"),
        ("DemoRMSNorm", "CustomRMSNorm"),
        ("DemoSparseMoeBlock", "NeuronMoE"),
    }


@pytest.mark.spec("NRN-55")
def test_operations_and_casts_of_one_side_are_listed(differences: ReferenceDifferences) -> None:
    attention, norm, moe = sorted(differences.classes, key=lambda pair: pair.reference)
    assert set(attention.lost_operations) == {"tanh"}
    assert set(attention.new_operations) == set()
    assert set(attention.lost_casts) == {"softmax in float32"}
    assert set(norm.lost_operations) == {"rsqrt", "mean"}
    assert (dict(norm.lost_casts), dict(norm.new_casts)) == ({}, {})
    assert (set(moe.lost_operations), set(moe.new_operations)) == ({"sigmoid"}, {"softmax"})


@pytest.mark.spec("NRN-55")
def test_code_of_the_same_operations_has_no_difference(tmp_path: Path) -> None:
    (tmp_path / "reference.py").write_text(REFERENCE)
    result = divergence([tmp_path / "reference.py"], reference_sources=[tmp_path / "reference.py"])
    assert result.reference is not None
    assert (result.reference.unread, result.reference.classes) == ((), ())
    assert result.exit_status == 0
