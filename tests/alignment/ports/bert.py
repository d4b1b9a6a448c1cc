"""BERT with tokens first: everything is (s, b, h), with fused projections, under `layers.layers`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tensorcap_formats.dtypes import Array
from tests.alignment.ports.parts import (
    HEADS,
    IDS,
    TEXT,
    Weights,
    attend,
    dense,
    drawn,
    embedding,
    heads,
    layer_norm,
)
from tests.alignment.ports.truth import Pair, Port, Truth

SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1]])


class Front(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.words = embedding(w[f"{at}.word_embeddings.weight"])
        self.places = embedding(w[f"{at}.position_embeddings.weight"])
        self.segments = embedding(w[f"{at}.token_type_embeddings.weight"])
        self.ln = layer_norm(w, f"{at}.LayerNorm", 1e-12)

    def forward(self, ids: Tensor, segments: Tensor) -> Tensor:
        places = torch.arange(ids.shape[0])[:, None]
        out: Tensor = self.ln(self.words(ids) + self.places(places) + self.segments(segments))
        return out


class InnerAttention(nn.Module):
    def forward(self, qkv: Tensor) -> Tensor:
        q, k, v = (heads(part, HEADS) for part in qkv.transpose(0, 1).chunk(3, -1))
        return attend(q, k, v, 8**-0.5).transpose(0, 1)


class Mixer(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.Wqkv = dense(w, f"{at}.self.query", f"{at}.self.key", f"{at}.self.value")
        self.inner_attn = InnerAttention()
        self.out_proj = dense(w, f"{at}.output.dense")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out_proj(self.inner_attn(self.Wqkv(x)))
        return out


class FeedForward(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.fc1 = dense(w, f"{at}.intermediate.dense")
        self.gelu = nn.GELU()
        self.fc2 = dense(w, f"{at}.output.dense")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.gelu(self.fc1(x)))
        return out


class Block(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.mixer = Mixer(w, f"{at}.attention")
        self.norm1 = layer_norm(w, f"{at}.attention.output.LayerNorm", 1e-12)
        self.mlp = FeedForward(w, at)
        self.norm2 = layer_norm(w, f"{at}.output.LayerNorm", 1e-12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.mixer(x))
        out: Tensor = self.norm2(x + self.mlp(x))
        return out


class Stack(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(w, f"{at}.{i}") for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Bert(nn.Module):
    def __init__(self, w: Weights) -> None:
        super().__init__()
        self.front = Front(w, "embeddings")
        self.layers = Stack(w, "encoder.layer")
        self.pool = nn.Sequential(dense(w, "pooler.dense"), nn.Tanh())

    def forward(self, ids: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
        x = self.layers(self.front(ids.T, segments.T))
        return x, self.pool(x[0])


def reference() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {**TEXT, "num_attention_heads": HEADS, "max_position_embeddings": 16}
    return drawn("BertModel", "BertConfig", 5, **sizes), {"input_ids": IDS, "token_type_ids": SEGMENTS}


def target(w: Weights, inputs: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    return Bert(w), {"ids": inputs["input_ids"], "segments": inputs["token_type_ids"]}


def _batch_first(x: Array) -> Array:
    return x.swapaxes(0, 1)


def _parts(x: Array) -> list[Array]:
    return np.split(x.swapaxes(0, 1), 3, axis=-1)


LAYER, OTHER = "encoder.layer.{i}", "layers.layers.{i}"
PORT = Port(
    "bert",
    reference,
    target,
    Truth(
        pairs=(
            Pair("@root/output.last_hidden_state", "@root/output.0", _batch_first),
            Pair("@root/output.pooler_output", "@root/output.1"),
            Pair("embeddings", "front", _batch_first),
            Pair("embeddings.word_embeddings", "front.words", _batch_first),
            Pair("embeddings.position_embeddings", "front.places", _batch_first),
            Pair("embeddings.token_type_embeddings", "front.segments", _batch_first),
            Pair("embeddings.LayerNorm", "front.ln", _batch_first),
            Pair("encoder/output.last_hidden_state", "layers", _batch_first),
            Pair(LAYER, OTHER, _batch_first),
            Pair(
                (
                    f"{LAYER}.attention.self.query",
                    f"{LAYER}.attention.self.key",
                    f"{LAYER}.attention.self.value",
                ),
                f"{OTHER}.mixer.Wqkv",
                _parts,
            ),
            Pair(f"{LAYER}.attention.self/output.0", f"{OTHER}.mixer.inner_attn", _batch_first),
            Pair(f"{LAYER}.attention.output.dense", f"{OTHER}.mixer.out_proj", _batch_first),
            Pair(f"{LAYER}.attention.output.LayerNorm", f"{OTHER}.norm1", _batch_first),
            Pair(f"{LAYER}.intermediate.dense", f"{OTHER}.mlp.fc1", _batch_first),
            Pair(f"{LAYER}.intermediate.intermediate_act_fn", f"{OTHER}.mlp.gelu", _batch_first),
            Pair(f"{LAYER}.output.dense", f"{OTHER}.mlp.fc2", _batch_first),
            Pair(f"{LAYER}.output.LayerNorm", f"{OTHER}.norm2", _batch_first),
            Pair("pooler", "pool"),
            Pair("pooler.dense", "pool.0"),
            Pair("pooler.activation", "pool.1"),
        ),
        alike={
            "embeddings.dropout": "embeddings.LayerNorm",
            f"{LAYER}.attention/output.0": f"{LAYER}.attention.output.LayerNorm",
            f"{LAYER}.attention.output": f"{LAYER}.attention.output.LayerNorm",
            f"{LAYER}.attention.output.dropout": f"{LAYER}.attention.output.dense",
            f"{LAYER}.intermediate": f"{LAYER}.intermediate.intermediate_act_fn",
            f"{LAYER}.output": f"{LAYER}.output.LayerNorm",
            f"{LAYER}.output.dropout": f"{LAYER}.output.dense",
            f"{OTHER}.mixer": f"{OTHER}.mixer.out_proj",
            f"{OTHER}.mlp": f"{OTHER}.mlp.fc2",
        },
    ),
)
