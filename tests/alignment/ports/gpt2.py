"""GPT-2 with linear layers, blocks counted from 1, and queries, keys and values interleaved by head."""

from __future__ import annotations

from typing import Any

import einops
import torch
from torch import Tensor, nn

from tensorcap_formats.dtypes import Array
from tests.alignment.ports.parts import (
    HEAD,
    HEADS,
    IDS,
    TOKENS,
    VOCAB,
    WIDTH,
    Weights,
    attend,
    causal,
    drawn,
    embedding,
    heads,
    layer_norm,
    linear,
    parted,
)
from tests.alignment.ports.truth import Pair, Port, Truth


def transposed(w: Weights, name: str) -> nn.Linear:
    return linear(w[f"{name}.weight"].T, bias=w[f"{name}.bias"])


class SelfAttention(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()

        def by_head(x: Tensor) -> Tensor:
            return parted(x, 0, 3, HEADS, HEAD).transpose(0, 1).flatten(0, 2)

        self.query_key_value = linear(
            by_head(w[f"{at}.c_attn.weight"].T), bias=by_head(w[f"{at}.c_attn.bias"])
        )
        self.dense = transposed(w, f"{at}.c_proj")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = parted(self.query_key_value(x), -1, HEADS, 3, HEAD).unbind(-2)
        q, k, v = (heads(part.flatten(2), HEADS) for part in (q, k, v))
        out: Tensor = self.dense(attend(q, k, v, HEAD**-0.5, causal(x.shape[1])))
        return out


class Block(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.ln_attn = layer_norm(w, f"{at}.ln_1")
        self.attention = SelfAttention(w, f"{at}.attn")
        self.ln_ff = layer_norm(w, f"{at}.ln_2")
        self.ff = nn.Sequential(
            transposed(w, f"{at}.mlp.c_fc"), nn.GELU("tanh"), transposed(w, f"{at}.mlp.c_proj")
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln_attn(x))
        out: Tensor = x + self.ff(self.ln_ff(x))
        return out


class Embedder(nn.Module):
    def __init__(self, w: Weights) -> None:
        super().__init__()
        self.tokens = embedding(w["transformer.wte.weight"])
        self.positions = embedding(w["transformer.wpe.weight"])

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        return out


class GPT2(nn.Module):
    def __init__(self, w: Weights) -> None:
        super().__init__()
        self.embed = Embedder(w)
        self.blocks = nn.ModuleDict({str(i + 1): Block(w, f"transformer.h.{i}") for i in range(3)})
        self.ln_out = layer_norm(w, "transformer.ln_f")
        self.to_logits = linear(w["lm_head.weight"])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks.values():
            x = block(x)
        logits: Tensor = self.to_logits(self.ln_out(x))
        return logits


def reference() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": 3, "n_head": HEADS, "n_positions": 16}
    model = drawn("GPT2LMHeadModel", "GPT2Config", 3, **sizes, **TOKENS)
    return model, {"input_ids": IDS, "use_cache": False}


def target(w: Weights, inputs: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    return GPT2(w), {"ids": inputs["input_ids"]}


def _batch(x: Array) -> Array:
    return x[None]


def _blocks(x: Array) -> Array:
    return einops.rearrange(x, "b s (h n d) -> b s (n h d)", h=HEADS, n=3)


LAYER, OTHER = "transformer.h.{i}", "blocks.{i+1}"
PORT = Port(
    "gpt2",
    reference,
    target,
    Truth(
        pairs=(
            Pair("@root/output.logits", "@root/output"),
            Pair("lm_head", "to_logits"),
            Pair("transformer.wte", "embed.tokens"),
            Pair("transformer.wpe", "embed.positions", _batch),
            Pair("transformer.ln_f", "ln_out"),
            Pair(f"{LAYER}.ln_1", f"{OTHER}.ln_attn"),
            Pair(f"{LAYER}.attn.c_attn", f"{OTHER}.attention.query_key_value", _blocks),
            Pair(f"{LAYER}.attn.c_proj", f"{OTHER}.attention.dense"),
            Pair(f"{LAYER}.attn/output.0", f"{OTHER}.attention"),
            Pair(f"{LAYER}.ln_2", f"{OTHER}.ln_ff"),
            Pair(f"{LAYER}.mlp.c_fc", f"{OTHER}.ff.0"),
            Pair(f"{LAYER}.mlp.act", f"{OTHER}.ff.1"),
            Pair(f"{LAYER}.mlp.c_proj", f"{OTHER}.ff.2"),
            Pair(f"{LAYER}.mlp", f"{OTHER}.ff"),
            Pair(LAYER, OTHER),
        ),
        extras=(Pair("transformer.drop", "embed"),),
        alike={
            "transformer/output.last_hidden_state": "transformer.ln_f",
            f"{LAYER}.attn.resid_dropout": f"{LAYER}.attn.c_proj",
            f"{LAYER}.mlp.dropout": f"{LAYER}.mlp.c_proj",
        },
    ),
)
