"""A Llama of parallel layers, and its application, which pads what it is given: named as NxDI's.

Padded to the length of the graph; logits of the last position alone; the first attention makes the tables of
rotations for all; the class of norms depends on whether a CPU runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from neuronx_distributed.parallel_layers.layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    SPMDRank,
)
from neuronx_distributed_inference.modules.attention.gqa import (
    GroupQueryAttention_O,
    GroupQueryAttention_QKV,
    attended,
    grouped,
)
from torch import Tensor, nn
from torch.nn import functional

CONTEXT = 32  # tokens of the graph


@dataclass
class NeuronAttentionBaseOutput:
    """Fields in NxDI's order; by the alphabet a table of cosines would come first."""

    hidden_states: Tensor
    present_key_value: tuple[Tensor, Tensor]
    cos_cache: Tensor
    sin_cache: Tensor


class LlamaRMSNorm(nn.Module):
    """The norm that a CPU runs."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone(), requires_grad=False)
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(hidden_states.dtype)


class LlamaRotaryEmbedding(nn.Module):
    """Tables of cosines and sines."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        dim = config.hidden_size // config.num_attention_heads
        powers = torch.arange(0, dim, 2).float() / dim
        theta = config.rope_parameters["rope_theta"]
        self.register_buffer("inv_freq", 1.0 / theta**powers, persistent=False)
        self.inv_freq: Tensor

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [B, H, S, D] turned by their positions."""
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


def causal(tokens: int) -> Tensor:
    """Which query sees which key, [1, 1, S, S]."""
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()[None, None]


def additive(is_seen: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask that is added to scores."""
    return torch.where(is_seen, 0.0, torch.finfo(dtype).min).to(dtype)


class NeuronLlamaAttention(nn.Module):
    """Attention of this rank's heads."""

    def __init__(
        self, config: Any, weights: dict[str, Tensor], qkv_class: type[GroupQueryAttention_QKV]
    ) -> None:
        super().__init__()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.hidden_size // heads
        self.qkv_proj = qkv_class(weights, heads, kv_heads, self.head_dim)
        self.o_proj = GroupQueryAttention_O(weights)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.rank_util = SPMDRank()
        self.reads_padding = False

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        cos_cache: Tensor | None = None,
        sin_cache: Tensor | None = None,
    ) -> NeuronAttentionBaseOutput:
        if self.reads_padding:
            attention_mask = additive(causal(hidden_states.shape[1]), hidden_states.dtype)
        parts = self.qkv_proj(hidden_states)
        q, k, v = (grouped(x, self.head_dim) for x in (parts.query, parts.key, parts.value))
        if cos_cache is None or sin_cache is None:
            cos_cache, sin_cache = self.rotary_emb(v, position_ids)
        q, k = rotated(q, cos_cache, sin_cache), rotated(k, cos_cache, sin_cache)
        output = self.o_proj(attended(q, k, v, attention_mask))
        return NeuronAttentionBaseOutput(output, (k, v), cos_cache, sin_cache)


class NeuronLlamaMLP(nn.Module):
    """Gate and up projection in one, whose blocks each rank has a part of."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        fused = [
            torch.cat([weights[f"{name}.{kind}"] for name in ("gate_proj", "up_proj")])
            for kind in ("weight", "bias")
        ]
        self.gate_up_proj = ColumnParallelLinear(*fused, gather_output=False, stride=2)
        self.act_fn = nn.SiLU()
        self.down_proj = RowParallelLinear(weights["down_proj.weight"], weights["down_proj.bias"])

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        output: Tensor = self.down_proj(self.act_fn(gate) * up)
        return output


class NeuronLlamaDecoderLayer(nn.Module):
    """A layer."""

    def __init__(
        self, config: Any, weights: dict[str, Tensor], qkv_class: type[GroupQueryAttention_QKV]
    ) -> None:
        super().__init__()
        self.self_attn = NeuronLlamaAttention(config, part_of(weights, "self_attn."), qkv_class)
        self.mlp = NeuronLlamaMLP(part_of(weights, "mlp."))
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(self, name, LlamaRMSNorm(weights[f"{name}.weight"], config.rms_norm_eps))

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        attention = self.self_attn(self.input_layernorm(hidden_states), *args, **kwargs)
        hidden_states = hidden_states + attention.hidden_states
        hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states, attention.present_key_value, attention.cos_cache, attention.sin_cache


class NeuronLlamaModel(nn.Module):
    """The inner model, which a graph is made of."""

    def __init__(
        self,
        config: Any,
        weights: dict[str, Tensor],
        qkv_class: type[GroupQueryAttention_QKV] = GroupQueryAttention_QKV,
    ) -> None:
        super().__init__()
        inner = part_of(weights, "model.")
        self.embed_tokens = ParallelEmbedding(inner["embed_tokens.weight"])
        self.layers = nn.ModuleList(
            NeuronLlamaDecoderLayer(config, part_of(inner, f"layers.{i}."), qkv_class)
            for i in range(config.num_hidden_layers)
        )
        self.norm = LlamaRMSNorm(inner["norm.weight"], config.rms_norm_eps)
        self.lm_head = ColumnParallelLinear(weights["lm_head.weight"], gather_output=True)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        tokens = input_ids.shape[1]
        mask = additive(causal(tokens) & attention_mask[:, None, None].bool(), x.dtype)
        tables: dict[str, Tensor] = {}
        for layer in self.layers:
            x, _, cos, sin = layer(x, mask, position_ids, **tables)
            tables = {"cos_cache": cos, "sin_cache": sin}
        x = self.norm(x)
        last = position_ids.argmax(-1)
        logits: Tensor = self.lm_head(x[torch.arange(len(x)), last][:, None])
        return logits


class ModelWrapper:
    """What an application calls: a graph on the device, the inner model on a CPU."""

    tag = "context_encoding_model"
    model: NeuronLlamaModel | None = None


class NeuronLlamaForCausalLM:
    """The application."""

    def __init__(self, config: Any, weights: dict[str, Tensor], **options: Any) -> None:
        self.config, self._weights, self._options = config, weights, options
        self.context_encoding_model = ModelWrapper()
        self.models = [self.context_encoding_model]

    def to_cpu(self) -> None:
        """Make the inner model of this rank's weights."""
        self.context_encoding_model.model = NeuronLlamaModel(
            self.config, self._weights, **self._options
        ).eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        model, missing = self.context_encoding_model.model, CONTEXT - input_ids.shape[1]
        assert model is not None
        ids, mask = (functional.pad(tensor, (0, missing)) for tensor in (input_ids, attention_mask))
        logits: Tensor = model(ids, mask, functional.pad(position_ids, (0, missing)))
        return logits

    __call__ = forward


def part_of(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The weights below a module, without its name."""
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
