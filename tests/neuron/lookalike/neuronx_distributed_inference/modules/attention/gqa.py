"""Projections of an attention with fewer heads of keys than of queries, in wrappers named as NxDI's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from neuronx_distributed.parallel_layers.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    rank_and_count,
)
from torch import Tensor, nn


@dataclass
class QKVOutput:
    """What the projections return; the hidden states are not the first by the alphabet."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias_added: bool


def repeated(weight: Tensor, head_dim: int, copies: int) -> Tensor:
    """Each head of a weight or a bias so many times in succession."""
    heads = weight.reshape(-1, head_dim, *weight.shape[1:])
    return heads.repeat_interleave(copies, 0).reshape(-1, *weight.shape[1:])


class GroupQueryAttention_QKV(nn.Module):  # noqa: N801 # NxDI's name
    """Queries, keys and values; each head of keys on several ranks if there are fewer heads than ranks."""

    def __init__(self, weights: dict[str, Tensor], heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        count = rank_and_count()[1]
        copies = max(1, count // kv_heads)
        self.tp_degree, self.head_dim = count, head_dim
        self._src_num_attention_heads, self.num_attention_heads = heads, heads
        self._src_num_key_value_heads, self.num_key_value_heads = kv_heads, kv_heads * copies
        for name in ("q_proj", "k_proj", "v_proj"):
            tensors = [weights[f"{name}.weight"], weights[f"{name}.bias"]]
            if name != "q_proj":
                tensors = [self.repeat(tensor, copies) for tensor in tensors]
            setattr(self, name, ColumnParallelLinear(*tensors, gather_output=False))

        self.fused_qkv = False

    def fuse(self) -> None:
        """Put this rank's queries, keys and values into one projection, one behind the other."""
        rank, count = rank_and_count()
        layers = [getattr(self, name) for name in ("q_proj", "k_proj", "v_proj")]
        whole = [torch.cat([getattr(layer, kind).data for layer in layers]) for kind in ("weight", "bias")]
        parts = [
            torch.cat([part if i == rank else torch.zeros_like(part) for i in range(count)]) for part in whole
        ]
        self.Wqkv = ColumnParallelLinear(*parts, gather_output=False)
        self.fused_qkv = True
        for name in ("q_proj", "k_proj", "v_proj"):
            delattr(self, name)

    def repeat(self, tensor: Tensor, copies: int) -> Tensor:
        """Repeat the heads of keys, in the order in which ranks use them."""
        return repeated(tensor, self.head_dim, copies)

    def forward(self, hidden_states: Tensor) -> QKVOutput:
        if self.fused_qkv:
            each = self.num_attention_heads * self.head_dim // self.tp_degree
            keys = self.num_key_value_heads * self.head_dim // self.tp_degree
            return QKVOutput(*torch.tensor_split(self.Wqkv(hidden_states), (each, each + keys), -1), True)
        return QKVOutput(
            self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states), True
        )


class GroupQueryAttention_O(nn.Module):  # noqa: N801 # NxDI's name
    """The output projection."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.o_proj = RowParallelLinear(weights["o_proj.weight"], weights["o_proj.bias"])

    def forward(self, attention_output: Tensor) -> Tensor:
        output: Tensor = self.o_proj(attention_output)
        return output


def grouped(x: Tensor, head_dim: int) -> Tensor:
    """Heads in an axis of their own: [B, S, H D] to [B, H, S, D]."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Scaled dot products with an additive mask, as Hugging Face's eager attention computes them."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5 + mask
    return (torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v).transpose(1, 2).flatten(2)
