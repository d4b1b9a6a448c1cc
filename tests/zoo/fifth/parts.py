"""What the ports of the fifth zoo share, next to the parts of the third and the fourth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from tests.zoo.third.parts import kept


@dataclass
class Labels(ModelOutput):
    """What a tagger with a memory gives."""

    logits: Tensor | None = None
    mems: tuple[Any, ...] | None = None


def embedding(table: Tensor) -> nn.Embedding:
    """A table of its own with these rows."""
    made = nn.Embedding(table.shape[0], table.shape[1], dtype=table.dtype)
    made.weight = kept(table)
    return made


def as_it_is(reference: Any) -> Any:
    """The model itself, of which a mistake changes one module."""
    return reference


def by_blocks(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, *, scale: float, size: int = 5) -> Tensor:
    """Attention (batch, heads, length, channels) over blocks of keys, with a running maximum and sum."""
    top = torch.full((*q.shape[:-1], 1), float("-inf"))
    total = torch.zeros_like(top)
    mixed = torch.zeros_like(q).float()
    for start in range(0, k.shape[2], size):
        part = slice(start, start + size)
        scores = (q @ k[:, :, part].transpose(-1, -2)).float() * scale
        scores = scores.masked_fill(~keep[..., part], float("-inf"))
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        shift = torch.where(higher.isfinite(), higher, 0.0)
        weights, fade = (scores - shift).exp(), (top - shift).exp()
        total = total * fade + weights.sum(-1, keepdim=True)
        mixed = mixed * fade + weights @ v[:, :, part].float()
        top = higher
    return (mixed / total).to(v.dtype)
