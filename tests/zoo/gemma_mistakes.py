"""Mistakes in what Gemma 2 and 3 do otherwise: scaled embeddings, (1 + w) norms, windows, softcaps."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from tests.zoo.entry import Mistake
from tests.zoo.planting import (
    activated,
    attending,
    computing,
    fed,
    removed,
    with_config,
    with_tensors,
    with_values,
)

ATTENTION: Final = "model.layers.1.self_attn"


def one_plus_norm_cast_first(self: Any, x: Tensor) -> Tensor:
    out: Tensor = self._norm(x.float()).to(x.dtype) * (1.0 + self.weight)
    return out


def narrower(attend: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> Any:
    """The window without its farthest token."""
    at = torch.arange(q.shape[2])
    too_far = at[:, None] - at[None] >= options["sliding_window"] - 1
    return attend(module, q, k, v, mask.masked_fill(too_far, torch.finfo(mask.dtype).min), **options)


def without_softcap(attend: Any, module: Any, *given: Any, **options: Any) -> Any:
    return attend(module, *given, **{**options, "softcap": None})


def embedded_without_scale(self: Any, input_ids: Tensor) -> Tensor:
    return functional.embedding(input_ids, self.weight)


def global_tables(_: Any, given: dict[str, Any]) -> None:
    given["layer_type"] = "full_attention"


GEMMA_MISTAKES: Final = (
    Mistake(
        "gemma2_embedding_scale",
        "gemma2",
        "model.embed_tokens",
        "factor",
        computing("model.embed_tokens", embedded_without_scale),
    ),
    Mistake(
        "gemma2_one_plus",
        "gemma2",
        "model.layers.1.pre_feedforward_layernorm",
        "norm_one_plus",
        with_tensors("model.layers.1.pre_feedforward_layernorm", weight=lambda w: w - 1),
    ),
    Mistake(
        "gemma2_norm_cast",
        "gemma2",
        "model.layers.1.input_layernorm",
        "precision",
        computing("model.layers.1.input_layernorm", one_plus_norm_cast_first),
    ),
    Mistake("gemma2_softcap", "gemma2", ATTENTION, "softcap", attending(ATTENTION, without_softcap)),
    Mistake(
        "gemma2_final_softcap",
        "gemma2",
        "@root",
        "softcap",
        with_config("@root", final_logit_softcapping=None),
    ),
    Mistake(
        "gemma2_window_off_by_one",
        "gemma2",
        "model.layers.0.self_attn",
        "window",
        attending("model.layers.0.self_attn", narrower),
        also_kinds=("mask",),
    ),
    Mistake(
        "gemma2_window_ignored",
        "gemma2",
        "model",
        "window",
        with_config("model", layer_types=["full_attention"] * 3),
        also_kinds=("mask",),
    ),
    Mistake(
        "gemma2_gelu_erf",
        "gemma2",
        "model.layers.1.mlp.act_fn",
        "activation",
        activated("model.layers.1.mlp.act_fn", functional.gelu),
    ),
    Mistake("gemma2_query_scale", "gemma2", ATTENTION, "factor", with_values(ATTENTION, scaling=16**-0.5)),
    Mistake(
        "gemma3_local_tables", "gemma3", "model.rotary_emb", "rope", fed("model.rotary_emb", global_tables)
    ),
    Mistake(
        "gemma3_query_norm",
        "gemma3",
        f"{ATTENTION}.q_norm",
        "missing_module",
        removed(f"{ATTENTION}.q_norm"),
    ),
    Mistake(
        "gemma3_one_plus",
        "gemma3",
        "model.norm",
        "norm_one_plus",
        with_tensors("model.norm", weight=lambda w: w - 1),
    ),
)
