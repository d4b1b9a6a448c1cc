"""Mistakes in encoders and in models with one, and in state spaces: T5, Whisper, BERT, ViT, Mamba."""

from __future__ import annotations

import inspect
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
    module_at,
    quick_gelu,
    rebind,
    rebound,
    removed,
    returning,
    with_config,
    with_tensors,
    with_values,
)

MIXER: Final = "backbone.layers.1.mixer"


def unmasked(attend: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, _: Any, **options: Any) -> Any:
    return attend(module, q, k, v, None, **options)


def causal_convolution(self: Any, x: Tensor) -> Tensor:
    return functional.conv1d(functional.pad(x, (2, 0)), self.weight, self.bias, self.stride)


def next_position(_: Any, given: dict[str, Any]) -> None:
    given["position_ids"] = given["position_ids"] + 1


def one_segment(_: Any, given: dict[str, Any]) -> None:
    given["token_type_ids"] = torch.zeros_like(given["input_ids"])


def output_without_residual(self: Any, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
    out: Tensor = self.LayerNorm(self.dropout(self.dense(hidden_states)))
    return out


def heads_reversed(x: Tensor) -> Tensor:
    return x.reshape(4, 16, *x.shape[1:]).flip(0).reshape(x.shape)


def patches_by_column(self: Any, pixel_values: Tensor) -> Tensor:
    out: Tensor = self.projection(pixel_values).transpose(2, 3).flatten(2).transpose(1, 2)
    return out


def early_convolution(model: Any) -> None:
    """A convolution that is one token ahead."""
    mixer = module_at(model, MIXER)
    convolve = inspect.unwrap(type(mixer).forward).__globals__["causal_conv1d_fn"]

    def ahead(x: Tensor, *given: Any, **options: Any) -> Tensor:
        out: Tensor = convolve(functional.pad(x, (0, 1))[..., 1:], *given, **options)
        return out

    rebind(mixer, causal_conv1d_fn=ahead)


def low_scan(
    x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, *, z: Tensor, delta_bias: Tensor, **given: Any
) -> Tensor:
    """The recurrence with its state in the dtype of the activations."""
    step = functional.softplus(step + delta_bias[:, None].to(x.dtype))
    state, out = torch.zeros(*x.shape[:2], a.shape[-1], dtype=x.dtype), []
    for at in range(x.shape[-1]):
        decay = (a.to(x.dtype) * step[:, :, at, None]).exp()
        state = decay * state + (step[:, :, at] * x[:, :, at])[..., None] * b[:, None, :, at]
        out.append((state @ c[:, :, at, None])[..., 0])
    scanned = torch.stack(out, -1) + x * given["D"].to(x.dtype)[:, None]
    gated: Tensor = scanned * functional.silu(z)
    return gated


def tanh_gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


OTHER_MISTAKES: Final = (
    Mistake(
        "t5_attention_scaled",
        "t5",
        "encoder.block.1.layer.0.SelfAttention",
        "factor",
        with_values("encoder.block.1.layer.0.SelfAttention", scaling=16**-0.5),
    ),
    Mistake(
        "t5_buckets_one_sided",
        "t5",
        "encoder.block.0.layer.0.SelfAttention",
        "position",
        with_values("encoder.block.0.layer.0.SelfAttention", is_decoder=True),
    ),
    Mistake("t5_head_scale", "t5", "@root", "factor", with_config("@root", scale_decoder_outputs=False)),
    Mistake(
        "t5_activation",
        "t5",
        "encoder.block.1.layer.1.DenseReluDense.act",
        "activation",
        activated("encoder.block.1.layer.1.DenseReluDense.act", torch.relu),
    ),
    Mistake(
        "t5_cross_mask",
        "t5",
        "decoder.block.1.layer.1.EncDecAttention",
        "mask",
        attending("decoder.block.1.layer.1.EncDecAttention", unmasked),
    ),
    Mistake(
        "whisper_positions_rolled",
        "whisper",
        "model.encoder.embed_positions",
        "shift",
        with_tensors("model.encoder.embed_positions", weight=lambda w: w.roll(1, 0)),
        also_kinds=("position",),
    ),
    Mistake(
        "whisper_decoder_position",
        "whisper",
        "model.decoder.embed_positions",
        "position",
        fed("model.decoder.embed_positions", next_position),
        also_kinds=("shift",),
    ),
    Mistake(
        "whisper_gelu_tanh",
        "whisper",
        "model.encoder.layers.1.activation_fn",
        "activation",
        activated("model.encoder.layers.1.activation_fn", tanh_gelu),
    ),
    Mistake(
        "whisper_final_norm",
        "whisper",
        "model.encoder.layer_norm",
        "missing_module",
        removed("model.encoder.layer_norm"),
    ),
    Mistake(
        "whisper_convolution_shifted",
        "whisper",
        "model.encoder.conv1",
        "shift",
        computing("model.encoder.conv1", causal_convolution),
    ),
    Mistake(
        "bert_mask_ignored",
        "bert",
        "bert.encoder.layer.1.attention.self",
        "mask",
        attending("bert.encoder.layer.1.attention.self", unmasked),
    ),
    Mistake("bert_segments", "bert", "bert.embeddings", "offset", fed("bert.embeddings", one_segment)),
    Mistake(
        "bert_residual_missing",
        "bert",
        "bert.encoder.layer.1.output",
        "residual",
        computing("bert.encoder.layer.1.output", output_without_residual),
    ),
    Mistake(
        "bert_head_bias",
        "bert",
        "cls.predictions.decoder",
        "bias",
        with_tensors("cls.predictions.decoder", bias=torch.zeros_like),
        also_kinds=("offset",),
    ),
    Mistake(
        "bert_heads_reversed",
        "bert",
        "bert.encoder.layer.1.attention.self.value",
        "permutation",
        with_tensors("bert.encoder.layer.1.attention.self.value", weight=heads_reversed, bias=heads_reversed),
    ),
    Mistake(
        "bert_gelu_tanh",
        "bert",
        "bert.encoder.layer.1.intermediate.intermediate_act_fn",
        "activation",
        activated("bert.encoder.layer.1.intermediate.intermediate_act_fn", tanh_gelu),
    ),
    Mistake(
        "bert_norm_eps",
        "bert",
        "bert.embeddings.LayerNorm",
        "norm_eps",
        with_values("bert.embeddings.LayerNorm", eps=1e-5),
    ),
    Mistake(
        "vit_patch_order",
        "vit",
        "vit.embeddings.patch_embeddings",
        "permutation",
        computing("vit.embeddings.patch_embeddings", patches_by_column),
    ),
    Mistake(
        "vit_channel_order",
        "vit",
        "vit.embeddings.patch_embeddings.projection",
        "permutation",
        with_tensors("vit.embeddings.patch_embeddings.projection", weight=lambda w: w.flip(1)),
    ),
    Mistake(
        "vit_positions_rolled",
        "vit",
        "vit.embeddings",
        "position",
        with_tensors("vit.embeddings", position_embeddings=lambda w: w.roll(1, 1)),
        also_kinds=("shift", "offset"),
    ),
    Mistake(
        "vit_residual_twice",
        "vit",
        "vit.layers.1",
        "residual",
        returning("vit.layers.1", lambda out, hidden_states, *_: out + hidden_states),
    ),
    Mistake(
        "vit_norm_eps",
        "vit",
        "vit.layers.1.layernorm_before",
        "norm_eps",
        with_values("vit.layers.1.layernorm_before", eps=1e-6),
    ),
    Mistake(
        "vit_quick_gelu",
        "vit",
        "vit.layers.1.mlp.activation_fn",
        "activation",
        activated("vit.layers.1.mlp.activation_fn", quick_gelu),
    ),
    Mistake(
        "mamba_skip",
        "mamba",
        MIXER,
        "residual",
        with_tensors(MIXER, D=torch.zeros_like),
        also_kinds=("missing_module",),
    ),
    Mistake(
        "mamba_step_bias",
        "mamba",
        MIXER,
        "bias",
        with_tensors(f"{MIXER}.dt_proj", bias=torch.zeros_like),
        also=(f"{MIXER}.dt_proj",),
    ),
    Mistake("mamba_convolution_ahead", "mamba", MIXER, "shift", early_convolution),
    Mistake(
        "mamba_scan_precision", "mamba", MIXER, "precision", rebound(MIXER, mamba_selective_scan=low_scan)
    ),
    Mistake(
        "mamba_residual_precision",
        "mamba",
        "backbone.layers.0",
        "precision",
        with_values("backbone.layers.0", residual_in_fp32=False),
    ),
)
