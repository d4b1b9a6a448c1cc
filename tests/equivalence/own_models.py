"""A decoder and an encoder of our own, with the weights of transformers' models, and none of their code.

Each takes mistakes by name, one line of code each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

_LLAMA: Any = LlamaConfig  # which is not annotated well
_BERT: Any = BertConfig
THETA = 10000.0
LLAMA = _LLAMA(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=256,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    initializer_range=0.2,
    tie_word_embeddings=False,
    eos_token_id=None,
    attn_implementation="eager",
)
BERT = _BERT(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=256,
    max_position_embeddings=64,
    initializer_range=0.2,
    attn_implementation="eager",
)


def llama(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Transformers' decoder with random weights, made in a precision as `from_pretrained` makes it."""
    model: LlamaForCausalLM = _in_precision(LlamaForCausalLM, LLAMA, dtype)
    return model


def bert(dtype: torch.dtype = torch.float32) -> BertForMaskedLM:
    """Transformers' encoder, likewise."""
    model: BertForMaskedLM = _in_precision(BertForMaskedLM, BERT, dtype)
    return model


def _in_precision(kind: Any, config: Any, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    model = kind(config).float().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0, 0.2)
    if dtype != torch.float32:
        state = dict(model.state_dict())
        model = kind.from_pretrained(None, config=config, state_dict=state, dtype=dtype).eval()
    return model


def split_heads(x: Tensor) -> Tensor:
    """Heads [B, H, S, 16] of rows [B, S, 16 H]."""
    return x.view(*x.shape[:2], -1, 16).transpose(1, 2)


def embedding(weight: Tensor) -> nn.Embedding:
    """A table of given weights."""
    table = nn.Embedding(weight.shape[0], weight.shape[1], dtype=weight.dtype)
    table.weight.data.copy_(weight)
    return table


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A layer of given weights."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, dtype=weight.dtype)
    layer.weight.data.copy_(weight)
    if bias is not None:
        layer.bias.data.copy_(bias)
    return layer


class Norm(nn.Module):
    """Root mean square norm."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        mean_square = wide.square().mean(-1, keepdim=True)
        normed: Tensor = (wide * (mean_square + LLAMA.rms_norm_eps).rsqrt()).to(x.dtype)
        return self.weight * normed


class SelfAttention(nn.Module):
    """Keys, values and queries in one product, scores by torch's own function."""

    def __init__(self, weights: Mapping[str, Tensor], name: str, mistake: str) -> None:
        super().__init__()
        self.qkv = linear(torch.cat([weights[f"{name}.{kind}_proj.weight"] for kind in "qkv"]))
        self.out = linear(weights[f"{name}.o_proj.weight"])
        self.mistake = mistake

    def turn(self, x: Tensor) -> Tensor:
        """Heads [B, H, S, D] turned by their positions."""
        half = x.shape[-1] // 2
        theta = 1.2 * THETA if self.mistake == "theta" else THETA
        frequencies = theta ** (-torch.arange(half) / half)
        angles = torch.arange(x.shape[-2])[:, None] * frequencies
        if self.mistake == "cache" and x.shape[-2] > 12:  # steps behind a prompt of 12 tokens
            angles[12:] -= frequencies
        cos, sin = (table.to(x.dtype) for table in (angles.cos(), angles.sin()))
        left, right = x.chunk(2, -1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(part) for part in self.qkv(x).split((64, 32, 32), -1))
        heads = functional.scaled_dot_product_attention(
            self.turn(q),
            self.turn(k),
            v,
            is_causal=True,
            enable_gqa=True,
            scale=1.1 / math.sqrt(16) if self.mistake == "scale" else None,
        )
        attended: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return attended


class FeedForward(nn.Module):
    """Gate and up projection in one product."""

    def __init__(self, weights: Mapping[str, Tensor], name: str, mistake: str) -> None:
        super().__init__()
        self.gate_up = linear(torch.cat([weights[f"{name}.{kind}_proj.weight"] for kind in ("gate", "up")]))
        self.down = linear(weights[f"{name}.down_proj.weight"])
        self.activation = nn.GELU() if mistake == "activation" else nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        lowered: Tensor = self.down(self.activation(gate) * up)
        return lowered


class Block(nn.Module):
    """A layer."""

    def __init__(self, weights: Mapping[str, Tensor], name: str, mistake: str) -> None:
        super().__init__()
        self.norm1 = Norm(weights[f"{name}.input_layernorm.weight"])
        self.attention = SelfAttention(weights, f"{name}.self_attn", mistake)
        self.norm2 = Norm(weights[f"{name}.post_attention_layernorm.weight"])
        self.mlp = FeedForward(weights, f"{name}.mlp", mistake)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        fed: Tensor = self.mlp(self.norm2(x))
        return x + fed


class Decoder(nn.Module):
    """A Llama. Mistakes are in the second layer, but for those of positions and of logits."""

    def __init__(self, weights: Mapping[str, Tensor], mistake: str = "") -> None:
        super().__init__()
        self.mistake = mistake
        first = mistake if mistake in ("theta", "cache") else ""
        self.embed = embedding(weights["model.embed_tokens.weight"])
        self.blocks = nn.ModuleList(
            Block(weights, f"model.layers.{number}", wrong) for number, wrong in enumerate((first, mistake))
        )
        self.norm = Norm(weights["model.norm.weight"])
        self.head = linear(weights["lm_head.weight"])

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if self.mistake == "nan":
            logits[:, -1, 3] = math.nan
        if self.mistake == "cap":  # leaves the order of choices as it is
            logits = 2 * torch.tanh(logits / 2)
        return logits


class EncoderBlock(nn.Module):
    """A layer of an encoder, which normalises behind its sums."""

    def __init__(self, weights: Mapping[str, Tensor], name: str, mistake: str) -> None:
        super().__init__()

        def layer(kind: str) -> nn.Linear:
            return linear(weights[f"{name}.{kind}.weight"], weights[f"{name}.{kind}.bias"])

        self.mistake = mistake
        self.query, self.key, self.value = (
            layer(f"attention.self.{kind}") for kind in ("query", "key", "value")
        )
        self.out = layer("attention.output.dense")
        self.norm1 = layer_norm(weights, f"{name}.attention.output.LayerNorm")
        self.up = layer("intermediate.dense")
        self.activation = nn.GELU()
        self.down = layer("output.dense")
        self.norm2 = layer_norm(weights, f"{name}.output.LayerNorm")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(layer(x)) for layer in (self.query, self.key, self.value))
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=self.mistake == "causal")
        x = self.norm1(x + self.out(heads.transpose(1, 2).flatten(2)))
        normed: Tensor = self.norm2(x + self.down(self.activation(self.up(x))))
        return normed


def layer_norm(weights: Mapping[str, Tensor], name: str) -> nn.LayerNorm:
    """A norm of given weights."""
    weight = weights[f"{name}.weight"]
    norm = nn.LayerNorm(len(weight), eps=BERT.layer_norm_eps, dtype=weight.dtype)
    norm.weight.data.copy_(weight)
    norm.bias.data.copy_(weights[f"{name}.bias"])
    return norm


class Encoder(nn.Module):
    """A Bert with a head for masked tokens. Its mistake is in the second layer."""

    def __init__(self, weights: Mapping[str, Tensor], mistake: str = "") -> None:
        super().__init__()
        prefix, head = "bert.embeddings", "cls.predictions"
        self.words, self.types, self.positions = (
            embedding(weights[f"{prefix}.{kind}_embeddings.weight"])
            for kind in ("word", "token_type", "position")
        )
        self.norm = layer_norm(weights, f"{prefix}.LayerNorm")
        self.blocks = nn.ModuleList(
            EncoderBlock(weights, f"bert.encoder.layer.{number}", wrong)
            for number, wrong in enumerate(("", mistake))
        )
        self.dense = linear(
            weights[f"{head}.transform.dense.weight"], weights[f"{head}.transform.dense.bias"]
        )
        self.activation = nn.GELU()
        self.head_norm = layer_norm(weights, f"{head}.transform.LayerNorm")
        self.head = linear(weights[f"{head}.decoder.weight"], weights[f"{head}.bias"])

    def forward(self, input_ids: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1])
        x = self.words(input_ids) + self.types(torch.zeros_like(input_ids)) + self.positions(positions)
        x = self.norm(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.head_norm(self.activation(self.dense(x))))
        return logits
