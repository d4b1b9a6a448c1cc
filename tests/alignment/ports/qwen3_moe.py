"""Qwen3-MoE as a vendor's library has it: doubled projections, rotary pairs interleaved, stacked experts."""

from __future__ import annotations

from typing import Any

import einops
import numpy as np
import torch
from torch import Tensor, nn

from tensorcap_formats.dtypes import Array
from tests.alignment.ports.parts import (
    GROUPS,
    HEAD,
    HEADS,
    IDS,
    KV_HEADS,
    TEXT,
    TOKENS,
    RMSNorm,
    Weights,
    attend,
    causal,
    dense,
    drawn,
    embedding,
    linear,
    parted,
    rotate,
)
from tests.alignment.ports.truth import Pair, Port, Truth


def _interleaved(rows: Tensor) -> Tensor:
    """Rows of a projection, or a norm's weight, with each head's two halves shuffled into pairs."""
    return parted(rows, 0, -1, 2, HEAD // 2).transpose(1, 2).flatten(0, 2)


class FusedQKV(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.q_proj = linear(_interleaved(w[f"{at}.q_proj.weight"]))
        self.k_proj = linear(_interleaved(w[f"{at}.k_proj.weight"]))
        self.v_proj = dense(w, f"{at}.v_proj")

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


class RowParallel(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.o_proj = dense(w, at)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.o_proj(x)
        return out


class Attention(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.qkv_proj = FusedQKV(w, at)
        self.q_layernorm = RMSNorm(_interleaved(w[f"{at}.q_norm.weight"]))
        self.k_layernorm = RMSNorm(_interleaved(w[f"{at}.k_norm.weight"]))
        self.o_proj = RowParallel(w, f"{at}.o_proj")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            parted(part, -1, count, HEAD).transpose(1, 2)
            for part, count in zip(self.qkv_proj(x), (HEADS, KV_HEADS, KV_HEADS), strict=True)
        )
        q, k = (
            rotate(norm(part), 10000.0, is_interleaved=True)
            for norm, part in ((self.q_layernorm, q), (self.k_layernorm, k))
        )
        out: Tensor = self.o_proj(attend(q, k, v, HEAD**-0.5, causal(x.shape[1])))
        return out


class Router(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.linear_router = linear(weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.linear_router(x)
        weights, chosen = logits.softmax(-1).topk(2)
        affinities = torch.zeros_like(logits).scatter(1, chosen, weights)
        return logits, affinities, chosen


class Experts(nn.Module):
    """All experts on all tokens, weighted by affinities that are mostly zero."""

    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(w[f"{at}.gate_up_proj"].transpose(1, 2).clone())
        self.down = nn.Parameter(w[f"{at}.down_proj"].transpose(1, 2).clone())

    def forward(self, x: Tensor, affinities: Tensor) -> Tensor:
        gate, up = torch.einsum("th,ehi->eti", x, self.gate_up).chunk(2, -1)
        out = torch.einsum("eti,eih->eth", nn.functional.silu(gate) * up, self.down)
        return torch.einsum("eth,te->th", out, affinities)


class MoE(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.router = Router(w[f"{at}.gate.weight"])
        self.expert_mlps = Experts(w, f"{at}.experts")

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        _, affinities, _ = self.router(tokens)
        out: Tensor = self.expert_mlps(tokens, affinities).view_as(x)
        return out


class Layer(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.ln1 = RMSNorm(w[f"{at}.input_layernorm.weight"])
        self.attention = Attention(w, f"{at}.self_attn")
        self.ln2 = RMSNorm(w[f"{at}.post_attention_layernorm.weight"])
        self.moe = MoE(w, f"{at}.mlp")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln1(x))
        out: Tensor = x + self.moe(self.ln2(x))
        return out


class Qwen3Moe(nn.Module):
    def __init__(self, w: Weights) -> None:
        super().__init__()
        self.embed = embedding(w["model.embed_tokens.weight"])
        self.decoder = nn.ModuleList(Layer(w, f"model.layers.{i}") for i in range(3))
        self.ln = RMSNorm(w["model.norm.weight"])
        self.head = linear(w["lm_head.weight"])

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.decoder:
            x = layer(x)
        logits: Tensor = self.head(self.ln(x))
        return logits


def reference() -> tuple[nn.Module, dict[str, Any]]:
    experts = {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    fields = {**TEXT, **GROUPS, **TOKENS, **experts, "norm_topk_prob": False}
    model = drawn("Qwen3MoeForCausalLM", "Qwen3MoeConfig", 2, **fields)
    return model, {"input_ids": IDS, "use_cache": False}


def target(w: Weights, inputs: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    return Qwen3Moe(w), {"input_ids": inputs["input_ids"]}


def _halves(x: Array) -> Array:
    return einops.rearrange(x, "b s (h d two) -> b s (h two d)", two=2, d=HEAD // 2)


def _normed(x: Array) -> Array:
    return np.concatenate([x[..., ::2], x[..., 1::2]], axis=-1).swapaxes(1, 2)


LAYER, OTHER = "model.layers.{i}", "decoder.{i}"
PORT = Port(
    "qwen3-moe",
    reference,
    target,
    Truth(
        pairs=(
            Pair("@root/output.logits", "@root/output"),
            Pair("lm_head", "head"),
            Pair("model.embed_tokens", "embed"),
            Pair("model.norm", "ln"),
            Pair(f"{LAYER}.input_layernorm", f"{OTHER}.ln1"),
            Pair(f"{LAYER}.self_attn.q_proj", f"{OTHER}.attention.qkv_proj.q_proj", _halves),
            Pair(f"{LAYER}.self_attn.k_proj", f"{OTHER}.attention.qkv_proj.k_proj", _halves),
            Pair(f"{LAYER}.self_attn.v_proj", f"{OTHER}.attention.qkv_proj.v_proj"),
            Pair(f"{LAYER}.self_attn.q_norm", f"{OTHER}.attention.q_layernorm", _normed),
            Pair(f"{LAYER}.self_attn.k_norm", f"{OTHER}.attention.k_layernorm", _normed),
            Pair(f"{LAYER}.self_attn.o_proj", f"{OTHER}.attention.o_proj.o_proj"),
            Pair(f"{LAYER}.self_attn/output.0", f"{OTHER}.attention"),
            Pair(f"{LAYER}.post_attention_layernorm", f"{OTHER}.ln2"),
            Pair(f"{LAYER}.mlp.gate/output.0", f"{OTHER}.moe.router/output.0"),
            Pair(f"{LAYER}.mlp.experts", f"{OTHER}.moe.expert_mlps"),
            Pair(f"{LAYER}.mlp", f"{OTHER}.moe"),
            Pair(LAYER, OTHER),
        ),
        extras=(
            Pair(f"{LAYER}.mlp.gate/output.2", f"{OTHER}.moe.router/output.2"),
            Pair(f"{LAYER}.mlp.gate/output.0", f"{OTHER}.moe.router.linear_router"),
            Pair(f"{LAYER}.self_attn.o_proj", f"{OTHER}.attention.o_proj"),
        ),
        alike={
            "model/output.last_hidden_state": "model.norm",
            f"{OTHER}.attention.qkv_proj/output.0": f"{OTHER}.attention.qkv_proj.q_proj",
            f"{OTHER}.attention.qkv_proj/output.1": f"{OTHER}.attention.qkv_proj.k_proj",
            f"{OTHER}.attention.qkv_proj/output.2": f"{OTHER}.attention.qkv_proj.v_proj",
        },
        reference_only=(
            "model.rotary_emb/output.0",
            "model.rotary_emb/output.1",
            f"{LAYER}.mlp.experts.act_fn",
            f"{LAYER}.mlp.gate/output.1",
        ),
        target_only=(f"{OTHER}.moe.router/output.1",),
    ),
)
