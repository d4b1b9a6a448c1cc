"""Gemma-3 with grouped queries, keys and values in one projection, and other names for its many norms."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tensorcap_formats.dtypes import Array
from tests.alignment.ports.parts import (
    GROUPS,
    HEAD,
    IDS,
    KV_HEADS,
    TEXT,
    TOKENS,
    WIDTH,
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

KINDS = ("sliding_attention", "full_attention", "sliding_attention")


class Embedder(nn.Module):
    """The table is not what the model goes on with, its scaled rows are."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.table = embedding(weight)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.table(ids) * WIDTH**0.5
        return out


class Attention(nn.Module):
    def __init__(self, w: Weights, at: str, *, is_local: bool) -> None:
        super().__init__()
        q, k, v = (parted(w[f"{at}.{name}_proj.weight"], 0, KV_HEADS, -1, HEAD) for name in ("q", "k", "v"))
        self.wqkv = linear(torch.cat([q, k, v], 1).flatten(0, 2))  # for each group: its queries, key, value
        self.query_norm = RMSNorm(1 + w[f"{at}.q_norm.weight"])
        self.key_norm = RMSNorm(1 + w[f"{at}.k_norm.weight"])
        self.wo = dense(w, f"{at}.o_proj")
        self.is_local = is_local

    def forward(self, x: Tensor) -> Tensor:
        groups = parted(self.wqkv(x), -1, KV_HEADS, 4, HEAD)
        q = self.query_norm(groups[..., :2, :].flatten(2, 3)).transpose(1, 2)
        k = self.key_norm(groups[..., 2, :]).transpose(1, 2)
        v = groups[..., 3, :].transpose(1, 2)
        theta = 10000.0 if self.is_local else 1000000.0
        mask = causal(x.shape[1], 3 if self.is_local else None)
        out: Tensor = self.wo(attend(rotate(q, theta), rotate(k, theta), v, HEAD**-0.5, mask))
        return out


class FeedForward(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.w1 = dense(w, f"{at}.gate_proj")
        self.w2 = dense(w, f"{at}.down_proj")
        self.w3 = dense(w, f"{at}.up_proj")
        self.gelu = nn.GELU("tanh")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(self.w3(x) * self.gelu(self.w1(x)))
        return out


class Cell(nn.Module):
    def __init__(self, w: Weights, at: str, *, is_local: bool) -> None:
        super().__init__()
        self.attention = Attention(w, f"{at}.self_attn", is_local=is_local)
        self.feed_forward = FeedForward(w, f"{at}.mlp")
        self.norm_a = RMSNorm(1 + w[f"{at}.input_layernorm.weight"])
        self.norm_b = RMSNorm(1 + w[f"{at}.post_attention_layernorm.weight"])
        self.norm_c = RMSNorm(1 + w[f"{at}.pre_feedforward_layernorm.weight"])
        self.norm_d = RMSNorm(1 + w[f"{at}.post_feedforward_layernorm.weight"])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm_b(self.attention(self.norm_a(x)))
        out: Tensor = x + self.norm_d(self.feed_forward(self.norm_c(x)))
        return out


class Gemma3(nn.Module):
    def __init__(self, w: Weights) -> None:
        super().__init__()
        self.embedder = Embedder(w["model.embed_tokens.weight"])
        self.cells = nn.ModuleList(
            Cell(w, f"model.layers.{i}", is_local=kind == KINDS[0]) for i, kind in enumerate(KINDS)
        )
        self.norm_out = RMSNorm(1 + w["model.norm.weight"])
        self.decode = linear(w["lm_head.weight"])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedder(ids)
        for cell in self.cells:
            x = cell(x)
        logits: Tensor = self.decode(self.norm_out(x))
        return logits


def reference() -> tuple[nn.Module, dict[str, Any]]:
    fields = {**TEXT, **GROUPS, **TOKENS, "head_dim": 8, "query_pre_attn_scalar": 8}
    windows = {"sliding_window": 3, "layer_types": list(KINDS)}
    model = drawn("Gemma3ForCausalLM", "Gemma3TextConfig", 4, **fields, **windows)
    return model, {"input_ids": IDS, "use_cache": False}


def target(w: Weights, inputs: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    return Gemma3(w), {"ids": inputs["input_ids"]}


def _ungrouped(x: Array) -> list[Array]:
    groups = x.reshape(*x.shape[:2], 2, 4, HEAD)
    parts = np.split(groups, [2, 3], axis=3)
    return [part.reshape(*x.shape[:2], -1) for part in parts]


def _heads_first(x: Array) -> Array:
    return x.swapaxes(1, 2)


LAYER, OTHER = "model.layers.{i}", "cells.{i}"
PORT = Port(
    "gemma3",
    reference,
    target,
    Truth(
        pairs=(
            Pair("@root/output.logits", "@root/output"),
            Pair("lm_head", "decode"),
            Pair("model.embed_tokens", "embedder"),
            Pair("model.norm", "norm_out"),
            Pair(f"{LAYER}.input_layernorm", f"{OTHER}.norm_a"),
            Pair(
                (f"{LAYER}.self_attn.q_proj", f"{LAYER}.self_attn.k_proj", f"{LAYER}.self_attn.v_proj"),
                f"{OTHER}.attention.wqkv",
                _ungrouped,
            ),
            Pair(f"{LAYER}.self_attn.q_norm", f"{OTHER}.attention.query_norm", _heads_first),
            Pair(f"{LAYER}.self_attn.k_norm", f"{OTHER}.attention.key_norm", _heads_first),
            Pair(f"{LAYER}.self_attn.o_proj", f"{OTHER}.attention.wo"),
            Pair(f"{LAYER}.self_attn/output.0", f"{OTHER}.attention"),
            Pair(f"{LAYER}.post_attention_layernorm", f"{OTHER}.norm_b"),
            Pair(f"{LAYER}.pre_feedforward_layernorm", f"{OTHER}.norm_c"),
            Pair(f"{LAYER}.mlp.gate_proj", f"{OTHER}.feed_forward.w1"),
            Pair(f"{LAYER}.mlp.act_fn", f"{OTHER}.feed_forward.gelu"),
            Pair(f"{LAYER}.mlp.up_proj", f"{OTHER}.feed_forward.w3"),
            Pair(f"{LAYER}.mlp.down_proj", f"{OTHER}.feed_forward.w2"),
            Pair(f"{LAYER}.mlp", f"{OTHER}.feed_forward"),
            Pair(f"{LAYER}.post_feedforward_layernorm", f"{OTHER}.norm_d"),
            Pair(LAYER, OTHER),
        ),
        alike={"model/output.last_hidden_state": "model.norm"},
        reference_only=(
            "model.rotary_emb/output.0",
            "model.rotary_emb/output.1",
            "model.rotary_emb@1/output.0",
            "model.rotary_emb@1/output.1",
        ),
        target_only=("embedder.table",),
    ),
)
