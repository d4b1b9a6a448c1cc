"""Mistakes in the ports of LFM2 and Qwen3-Next; their words were written before any report was read."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from tests.zoo.entry import PortedMistake
from tests.zoo.fourth.hybrids import DeltaMixer, LfmPort, NextPort, ShortConvolution
from tests.zoo.fourth.parts import Rms
from tests.zoo.planting import with_tensors
from tests.zoo.third.parts import having


def gates_exchanged(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    before, after, value = ShortConvolution.divided(self, x)
    return after, before, value


def backwards(kernel: Tensor) -> Tensor:
    return kernel.flip(-1)


def held_too_early(_: Any, x: Tensor) -> Tensor:
    return x[..., -3:-1]


def eps_of_other_models(port: Any) -> None:
    for module in port.modules():
        if isinstance(module, Rms):
            module.eps = 1e-6


def normed_at_first(self: Any, ids: Tensor) -> Tensor:
    out: Tensor = self.norm(self.table[ids])
    return out


def unnormed(self: Any, x: Tensor) -> Tensor:
    out: Tensor = x @ self.table.T
    return out


_LFM_NORMS: Final = tuple(
    f"model.layers.{at}.{name}" for at in range(3) for name in ("operator_norm", "ffn_norm")
)

LFM: Final = (
    PortedMistake(
        "lfm2_gates_exchanged",
        "lfm2",
        "model.layers.0.conv",
        "permutation",
        having("blocks.0.mix", divided=gates_exchanged),
        also=("model.layers.0.conv.in_proj",),
        also_kinds=("order", "wiring"),
        port=LfmPort,
        in_words="the gate before the convolution and that after it are exchanged",
        words=("gate", "order", "swap", "exchang", "permut", "split"),
    ),
    PortedMistake(
        "lfm2_kernel_backwards",
        "lfm2",
        "model.layers.2.conv",
        "permutation",
        with_tensors("blocks.2.mix", kernel=backwards),
        also=("model.layers.2.conv.conv",),
        also_kinds=("axis", "order", "transposition"),
        port=LfmPort,
        in_words="the taps of the convolution are in the opposite order",
        words=("kernel", "flip", "revers", "order", "permut", "taps"),
    ),
    PortedMistake(
        "lfm2_eps_of_other_models",
        "lfm2",
        "model.layers.0.operator_norm",
        "norm_eps",
        eps_of_other_models,
        also=(
            *_LFM_NORMS,
            "model.embedding_norm",
            "model.layers.1.self_attn.q_layernorm",
            "model.layers.1.self_attn.k_layernorm",
        ),
        port=LfmPort,
        in_words="1e-6 in the place of 1e-5 in all norms; that of the first embeddings shows it",
        words=("eps",),
    ),
    PortedMistake(
        "lfm2_last_norm_first",
        "lfm2",
        "model.embedding_norm",
        "order",
        having("@root", embedded=normed_at_first, scored=unnormed),
        also=("model",),
        also_kinds=("missing_module", "wiring"),
        port=LfmPort,
        in_words="the norm named after embeddings is applied to them, although it is the last one",
        words=("norm", "missing", "order"),
    ),
    PortedMistake(
        "lfm2_stream_state_too_early",
        "lfm2_stream",
        "model.layers.0.conv",
        "state",
        having("blocks.0.mix", "blocks.2.mix", held=held_too_early),
        also=("model.layers.2.conv", "model.layers.0.conv.conv", "model.layers.2.conv.conv"),
        also_kinds=("cache", "shift"),
        port=LfmPort,
        in_words="the state that a convolution keeps for the next call lacks the newest token",
        words=("state", "cache", "shift"),
    ),
)


def read_too_early(_: Any, state: Tensor, k: Tensor, v: Tensor, write: Tensor, keep: Tensor) -> Tensor:
    """What is known is read before the state decays."""
    known = torch.einsum("bhkv,bhk->bhv", state, k)
    state = state * keep[..., None, None]
    return state + torch.einsum("bhk,bhv->bhkv", k, (v - known) * write[..., None])


def low_state(self: Any, state: Tensor, k: Tensor, v: Tensor, write: Tensor, keep: Tensor) -> Tensor:
    return DeltaMixer.stepped(self, state, k, v, write, keep).to(self.norm.dtype).to(state.dtype)


def split_flat(self: Any, x: Tensor) -> list[Tensor]:
    """Not key head by key head."""
    width, wide = self.keys * self.size, self.values * self.wide
    return list(self.qkvz(x).split((width, width, wide, wide), -1))


def gated_before(self: Any, y: Tensor, z: Tensor) -> Tensor:
    wide = y.float() * functional.silu(z.float())
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
    out: Tensor = wide.to(y.dtype) * self.norm
    return out


def ungated(self: Any, x: Tensor) -> Tensor:
    out: Tensor = self.shared(x)
    return out


def halves_of_all_heads(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and gates of the heads alternate in the weights."""
    parts = [part.unflatten(-1, (-1, self.size)) for part in (self.to_q(x), self.gate(x))]
    first, second = torch.stack(parts, -2).flatten(-3).chunk(2, -1)
    return first, second


LINEAR: Final = ("model.layers.0.linear_attn", "model.layers.2.linear_attn")

NEXT: Final = (
    PortedMistake(
        "next_state_read_too_early",
        "qwen3_next",
        LINEAR[0],
        "order",
        having("blocks.0.mix", "blocks.2.mix", stepped=read_too_early),
        also=LINEAR,
        also_kinds=("state",),
        port=NextPort,
        in_words="the state is read before it decays, not after",
        words=("state", "decay", "order", "recurren"),
    ),
    PortedMistake(
        "next_projection_split_flat",
        "qwen3_next",
        LINEAR[0],
        "permutation",
        having("blocks.0.mix", divided=split_flat),
        also=(f"{LINEAR[0]}.in_proj_qkvz",),
        also_kinds=("heads", "groups", "order"),
        port=NextPort,
        in_words="queries, keys, values and gates are split as wholes, where they lie key head by key head",
        words=("permut", "order", "head", "group", "split", "layout"),
    ),
    PortedMistake(
        "next_gate_before_norm",
        "qwen3_next",
        f"{LINEAR[0]}.norm",
        "order",
        having("blocks.0.mix", "blocks.2.mix", normed=gated_before),
        also=(f"{LINEAR[1]}.norm", *LINEAR),
        also_kinds=("statistics",),
        port=NextPort,
        in_words="what the delta rule gives is gated before its norm, not after",
        words=("gate", "order", "before", "norm"),
    ),
    PortedMistake(
        "next_plain_gain_of_queries",
        "qwen3_next",
        "model.layers.1.self_attn.q_norm",
        "norm_one_plus",
        having("blocks.1.mix.norm_q", forward=Rms.forward),
        also_kinds=("offset",),
        port=NextPort,
        in_words="the norm of queries multiplies by its weight, not by one and its weight",
        words=("1 +", "one plus", "plus one", "weight + 1", "zero-cent", "offset"),
    ),
    PortedMistake(
        "next_gates_split_flat",
        "qwen3_next",
        "model.layers.1.self_attn",
        "permutation",
        having("blocks.1.mix", queries=halves_of_all_heads),
        also=("model.layers.1.self_attn.q_proj",),
        also_kinds=("heads", "order", "groups"),
        port=NextPort,
        in_words="queries and gates are the halves of the projection, where they alternate head by head",
        words=("permut", "order", "head", "gate", "split", "layout"),
    ),
    PortedMistake(
        "next_shared_expert_ungated",
        "qwen3_next",
        "model.layers.2.mlp",
        "missing_module",
        having("blocks.2.feed", common=ungated),
        also=("model.layers.2.mlp.shared_expert_gate",),
        also_kinds=("factor",),
        port=NextPort,
        in_words="the gate of the expert for all tokens is not applied",
        words=("gate", "missing", "shared"),
    ),
    PortedMistake(
        "next_state_in_low_precision",
        "qwen3_next",
        LINEAR[0],
        "precision",
        having("blocks.0.mix", "blocks.2.mix", stepped=low_state),
        also=LINEAR,
        also_kinds=("state",),
        port=NextPort,
        in_words="the state is rounded to the dtype of the model after each token",
        words=("precision", "bfloat16", "round", "state", "accumul"),
    ),
)

MISTAKES: Final = (*LFM, *NEXT)
