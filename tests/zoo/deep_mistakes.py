"""Mistakes of porting, planted into any layer of a model of `deep_models`; each says which site is guilty."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn


class QuickGELU(nn.Module):
    """The cheap approximation, in the place of whatever the model has."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input * torch.sigmoid(1.702 * input)


def without_one_plus(model: Any, layer: int) -> str:
    """A norm that scales by its weight where it has to scale by one plus its weight."""
    norm = _block(model, layer).input_layernorm
    with torch.no_grad():
        norm.weight -= 1
    return _path_of(model, norm)


def quick_gelu(model: Any, layer: int) -> str:
    """Another activation."""
    return _replace_activation(model, layer, QuickGELU())


def no_activation(model: Any, layer: int) -> str:
    """The activation left out."""
    return _replace_activation(model, layer, nn.Identity())


def attention_scale(factor: float) -> Callable[[Any, int], str]:
    """Scores of the attention multiplied by too large a number."""

    def plant(model: Any, layer: int) -> str:
        block = _block(model, layer)
        attention = block.attn if hasattr(block, "attn") else block.self_attn
        attention.scaling *= factor
        return _path_of(model, attention)

    return plant


MISTAKES: Final[Mapping[str, Callable[[Any, int], str]]] = {
    "without_one_plus": without_one_plus,
    "quick_gelu": quick_gelu,
    "no_activation": no_activation,
    "attention_scale_1.5": attention_scale(1.5),
    "attention_scale_2": attention_scale(2.0),
}


def _block(model: Any, layer: int) -> Any:
    blocks = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    return blocks[layer]


def _replace_activation(model: Any, layer: int, other: nn.Module) -> str:
    mlp = _block(model, layer).mlp
    parent = getattr(mlp, "experts", mlp)
    name = "act" if hasattr(parent, "act") else "act_fn"
    setattr(parent, name, other)
    return _path_of(model, other)


def _path_of(model: Any, module: nn.Module) -> str:
    return next(str(name) for name, found in model.named_modules() if found is module)
