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


class Decoder(nn.Module):
    """A Llama: keys, values and queries in one product, attention by torch's own function."""

    def __init__(self, weights: Mapping[str, Tensor], mistake: str = "") -> None:
        super().__init__()
        self.mistake = mistake
        for name, value in weights.items():
            self.register_buffer(name.replace(".", "_"), value.clone())

    def weight(self, name: str) -> Tensor:
        weight: Tensor = getattr(self, f"{name}_weight".replace(".", "_"))
        return weight

    def norm(self, x: Tensor, name: str) -> Tensor:
        wide = x.float()
        mean_square = wide.square().mean(-1, keepdim=True)
        normed: Tensor = (wide * (mean_square + LLAMA.rms_norm_eps).rsqrt()).to(x.dtype)
        return self.weight(name) * normed

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

    def attention(self, x: Tensor, name: str) -> Tensor:
        parts = [functional.linear(x, self.weight(f"{name}.{kind}_proj")) for kind in "qkv"]
        q, k, v = (split_heads(part) for part in parts)
        scale = 1.1 / math.sqrt(16) if self.mistake == "scale" and ".1." in name else None
        heads = functional.scaled_dot_product_attention(
            self.turn(q), self.turn(k), v, is_causal=True, enable_gqa=True, scale=scale
        )
        return functional.linear(heads.transpose(1, 2).flatten(2), self.weight(f"{name}.o_proj"))

    def mlp(self, x: Tensor, name: str) -> Tensor:
        gate_up = torch.cat([self.weight(f"{name}.{kind}_proj") for kind in ("gate", "up")])
        gate, up = functional.linear(x, gate_up).chunk(2, -1)
        activation = functional.gelu if self.mistake == "activation" and ".1." in name else functional.silu
        return functional.linear(activation(gate) * up, self.weight(f"{name}.down_proj"))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = functional.embedding(input_ids, self.weight("model.embed_tokens"))
        for layer in ("model.layers.0", "model.layers.1"):
            x = x + self.attention(self.norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attn")
            x = x + self.mlp(self.norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp")
        logits = functional.linear(self.norm(x, "model.norm"), self.weight("lm_head"))
        if self.mistake == "nan":
            logits[:, -1, 3] = math.nan
        if self.mistake == "cap":  # leaves the order of choices as it is
            logits = 2 * torch.tanh(logits / 2)
        return logits


class Encoder(nn.Module):
    """A Bert with a head for masked tokens."""

    def __init__(self, weights: Mapping[str, Tensor], mistake: str = "") -> None:
        super().__init__()
        self.mistake = mistake
        for name, value in weights.items():
            self.register_buffer(name.replace(".", "_"), value.clone())

    def parameter(self, name: str) -> Tensor:
        value: Tensor = getattr(self, name.replace(".", "_"))
        return value

    def linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.parameter(f"{name}.weight"), self.parameter(f"{name}.bias"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = (self.parameter(f"{name}.{kind}") for kind in ("weight", "bias"))
        return functional.layer_norm(x, x.shape[-1:], weight, bias, BERT.layer_norm_eps)

    def forward(self, input_ids: Tensor) -> Tensor:
        prefix = "bert.embeddings"
        tables = [
            self.parameter(f"{prefix}.{kind}_embeddings.weight")
            for kind in ("word", "token_type", "position")
        ]
        x = tables[0][input_ids] + tables[1][0] + tables[2][: input_ids.shape[1]]
        x = self.norm(x, f"{prefix}.LayerNorm")
        for layer in ("bert.encoder.layer.0", "bert.encoder.layer.1"):
            parts = [self.linear(x, f"{layer}.attention.self.{kind}") for kind in ("query", "key", "value")]
            q, k, v = (split_heads(part) for part in parts)
            is_causal = self.mistake == "causal" and ".1" in layer
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
            attended = self.linear(attended.transpose(1, 2).flatten(2), f"{layer}.attention.output.dense")
            x = self.norm(x + attended, f"{layer}.attention.output.LayerNorm")
            wide = functional.gelu(self.linear(x, f"{layer}.intermediate.dense"))
            x = self.norm(x + self.linear(wide, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
        head = "cls.predictions"
        x = functional.gelu(self.linear(x, f"{head}.transform.dense"))
        x = self.norm(x, f"{head}.transform.LayerNorm")
        return functional.linear(x, self.parameter(f"{head}.decoder.weight"), self.parameter(f"{head}.bias"))
