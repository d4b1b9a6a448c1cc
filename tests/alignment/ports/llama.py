"""Llama as a server has it: no batch axis, fused projections, and a residual that is kept apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.alignment.ports.parts import (
    GROUPS,
    HEADS,
    IDS,
    INNER,
    KV_HEADS,
    TEXT,
    TOKENS,
    Weights,
    attend,
    causal,
    dense,
    drawn,
    embedding,
    heads,
    linear,
    rotate,
)
from tests.alignment.ports.truth import Pair, Port, Truth, cut


class Norm(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.gain = nn.Parameter(weight.clone())

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        whole = x if residual is None else x + residual
        normed = whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain
        return normed if residual is None else (normed, whole)


class Rotary(nn.Module):
    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = heads(q[None], HEADS), heads(k[None], KV_HEADS)
        return rotate(q, 10000.0), rotate(k, 10000.0)


class Core(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, heads(v[None], KV_HEADS), 8**-0.5, causal(q.shape[-2]))[0]


class Attention(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.qkv_proj = dense(w, f"{at}.q_proj", f"{at}.k_proj", f"{at}.v_proj")
        self.rotary = Rotary()
        self.core = Core()
        self.out_proj = dense(w, f"{at}.o_proj")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(x).split([32, 16, 16], -1)
        q, k = self.rotary(q, k)
        out: Tensor = self.out_proj(self.core(q, k, v))
        return out


class ActMul(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return nn.functional.silu(gate) * up


class FeedForward(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.gate_up = dense(w, f"{at}.gate_proj", f"{at}.up_proj")
        self.act_mul = ActMul()
        self.down = dense(w, f"{at}.down_proj")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.act_mul(self.gate_up(x)))
        return out


class Block(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.norm_attn = Norm(w[f"{at}.input_layernorm.weight"])
        self.attn = Attention(w, f"{at}.self_attn")
        self.norm_ffn = Norm(w[f"{at}.post_attention_layernorm.weight"])
        self.ffn = FeedForward(w, f"{at}.mlp")

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            x, residual = self.norm_attn(x), x
        else:
            x, residual = self.norm_attn(x, residual)
        x, residual = self.norm_ffn(self.attn(x), residual)
        return self.ffn(x), residual


class Llama(nn.Module):
    def __init__(self, w: Weights) -> None:
        super().__init__()
        self.token_embed = embedding(w["model.embed_tokens.weight"])
        self.layers = nn.ModuleList(Block(w, f"model.layers.{i}") for i in range(3))
        self.final_norm = Norm(w["model.norm.weight"])
        self.unembed = linear(w["lm_head.weight"])

    def forward(self, tokens: Tensor) -> Tensor:
        x, residual = self.token_embed(tokens), None
        for layer in self.layers:
            x, residual = layer(x, residual)
        logits: Tensor = self.unembed(self.final_norm(x, residual)[0])
        return logits


def reference() -> tuple[nn.Module, dict[str, Any]]:
    model = drawn("LlamaForCausalLM", "LlamaConfig", 1, **TEXT, **GROUPS, **TOKENS)
    return model, {"input_ids": IDS[:1], "use_cache": False}


def target(w: Weights, inputs: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    return Llama(w), {"tokens": inputs["input_ids"][0]}


def _batch(x: Any) -> Any:
    return x[None]


def _cut(*sizes: int) -> Any:
    return lambda x: cut(*sizes)(x[None])


def _sum(x: Any, residual: Any) -> Any:
    return (x.astype("float64") + residual)[None]


LAYER = "model.layers.{i}"
PORT = Port(
    "llama",
    reference,
    target,
    Truth(
        pairs=(
            Pair("@root/output.logits", "@root/output", _batch),
            Pair("lm_head", "unembed", _batch),
            Pair("model.embed_tokens", "token_embed", _batch),
            Pair("model.norm", "final_norm/output.0", _batch),
            Pair("model.layers.0.input_layernorm", "layers.0.norm_attn", _batch),
            Pair(f"{LAYER}.input_layernorm", "layers.{i}.norm_attn/output.0", _batch, (1, 2)),
            Pair(
                (f"{LAYER}.self_attn.q_proj", f"{LAYER}.self_attn.k_proj", f"{LAYER}.self_attn.v_proj"),
                "layers.{i}.attn.qkv_proj",
                _cut(32, 16, 16),
            ),
            Pair(f"{LAYER}.self_attn.o_proj", "layers.{i}.attn.out_proj", _batch),
            Pair(f"{LAYER}.self_attn/output.0", "layers.{i}.attn", _batch),
            Pair(f"{LAYER}.post_attention_layernorm", "layers.{i}.norm_ffn/output.0", _batch),
            Pair(
                (f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"),
                "layers.{i}.ffn.gate_up",
                _cut(INNER, INNER),
            ),
            Pair(f"{LAYER}.mlp.down_proj", "layers.{i}.ffn.down", _batch),
            Pair(f"{LAYER}.mlp", "layers.{i}.ffn", _batch),
            Pair(LAYER, ("layers.{i}/output.0", "layers.{i}/output.1"), _sum),
        ),
        extras=(
            Pair(LAYER, "layers.{i+1}.norm_attn/output.1", _batch, (0, 1)),
            Pair("model.layers.2", "final_norm/output.1", _batch),
        ),
        alike={
            "model/output.last_hidden_state": "model.norm",
            "layers.{i}.norm_ffn/output.1": "layers.{i}/output.1",
        },
        reference_only=(
            "model.rotary_emb/output.0",
            "model.rotary_emb/output.1",
            "model.layers.{i}.mlp.act_fn",
        ),
        target_only=(
            "layers.{i}.attn.rotary/output.0",
            "layers.{i}.attn.rotary/output.1",
            "layers.{i}.attn.core",
            "layers.{i}.ffn.act_mul",
        ),
    ),
)
