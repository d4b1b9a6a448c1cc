"""Diffusion: a U-Net with cross attention, a diffusion transformer."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.entry import Correct, Mistake
from tests.zoo.other_ways import linear
from tests.zoo.planting import computing, module_at, override
from tests.zoo.second.diffusion import modulate

UP: Final = "up_blocks.0"
GEGLU: Final = "mid_block.attention.transformer_block.ff.geglu"


def sines_first(self: Any, timesteps: Tensor) -> Tensor:
    half = self.width // 2
    frequencies = (-math.log(10000) * torch.arange(half, dtype=torch.float32) / half).exp()
    angles = timesteps[:, None].float() * frequencies
    return torch.cat((angles.sin(), angles.cos()), -1)


def kept_first(self: Any, hidden_states: Tensor, kept: Tensor, temb: Tensor) -> Tensor:
    out: Tensor = self.resnet(torch.cat((kept, self.upsampler(hidden_states)), 1), temb)
    return out


def gate_first(self: Any, hidden_states: Tensor) -> Any:
    gate, hidden = self.proj(hidden_states).chunk(2, -1)
    return hidden * functional.gelu(gate)


def scaled_without_one(self: Any, x: Tensor, condition: Tensor) -> Any:
    """The MLP's branch scaled by what is predicted, where it is one plus that."""
    parts = [part[:, None] for part in self.adaLN_modulation(condition).chunk(6, -1)]
    shift_attn, scale_attn, gate_attn, shift_mlp, scale_mlp, gate_mlp = parts
    x = x + gate_attn * self.attn(self.norm1(x) * (1 + scale_attn) + shift_attn)
    return x + gate_mlp * self.mlp(self.norm2(x) * scale_mlp + shift_mlp)


def scales_before_shifts(self: Any, x: Tensor, condition: Tensor) -> Tensor:
    scale, shift = self.adaLN_modulation(condition).chunk(2, -1)
    out: Tensor = self.linear(modulate(self.norm_final(x), shift, scale))
    return out


def rows_for_columns(self: Any, hidden_states: Tensor) -> Tensor:
    at = torch.arange(self.rows * self.columns)
    table = torch.cat((self.axis(at // self.columns), self.axis(at % self.columns)), -1)
    return hidden_states + table.to(hidden_states.dtype)


def label_of_the_next(self: Any, input: Tensor) -> Tensor:
    """Classes counted from one, as where the first is the background."""
    return functional.embedding((input + 1) % len(self.weight), self.weight)


def variance_of_squares(self: Any, input: Tensor) -> Any:
    """The mean of squares without the square of the mean, in the dtype of the input."""
    x = input.reshape(len(input), self.num_groups, -1)
    mean = x.mean(-1, keepdim=True)
    variance = (x * x).mean(-1, keepdim=True) - mean * mean
    x = ((x - mean) * torch.rsqrt(variance + self.eps)).view(input.shape)
    return x * self.weight[:, None, None] + self.bias[:, None, None]


MISTAKES: Final = (
    Mistake(
        "unet_sines_first",
        "unet",
        "time_proj",
        "permutation",
        computing("time_proj", sines_first),
        also_kinds=("shift",),
    ),
    Mistake("unet_skip_order", "unet", UP, "permutation", computing(UP, kept_first)),
    Mistake(
        "unet_gate_first",
        "unet",
        GEGLU,
        "permutation",
        computing(GEGLU, gate_first),
        also_kinds=("activation",),
    ),
    Mistake(
        "unet_variance_of_squares",
        "unet",
        "mid_block.attention.norm",
        "precision",
        computing("mid_block.attention.norm", variance_of_squares),
        also_kinds=("statistics",),
    ),
    Mistake(
        "dit_label_of_the_next",
        "dit",
        "y_embedder",
        "shift",
        computing("y_embedder", label_of_the_next),
        also_kinds=("position", "permutation"),
    ),
    Mistake(
        "dit_scale_without_one",
        "dit",
        "blocks.1",
        "norm_one_plus",
        computing("blocks.1", scaled_without_one),
        also_kinds=("factor", "residual"),
    ),
    Mistake(
        "dit_scale_before_shift",
        "dit",
        "final_layer",
        "permutation",
        computing("final_layer", scales_before_shifts),
    ),
    Mistake(
        "dit_rows_for_columns",
        "dit",
        "pos_embed",
        "position",
        computing("pos_embed", rows_for_columns),
        also_kinds=("transposition", "permutation"),
    ),
)


def fused_attention(model: Any) -> Any:
    """Queries, keys and values of the self attention in one projection."""
    attention = module_at(model, "mid_block.attention.transformer_block.attn1")
    attention.to_qkv = linear(
        torch.cat([attention.to_q.weight, attention.to_k.weight, attention.to_v.weight])
    )
    del attention.to_q, attention.to_k, attention.to_v

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        parts = self.to_qkv(hidden_states).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*parts.unbind())
        out: Tensor = self.to_out(attended.transpose(1, 2).flatten(2))
        return out

    override(attention, forward)
    return model


class AllModulations(nn.Module):
    """The modulations of all blocks, from one matrix product."""

    def __init__(self, blocks: Any) -> None:
        super().__init__()
        maps = [block.adaLN_modulation[1] for block in blocks]
        self.linear = linear(torch.cat([m.weight for m in maps]), torch.cat([m.bias for m in maps]))
        self.count = len(maps)

    def forward(self, condition: Tensor) -> tuple[Tensor, ...]:
        out: Tensor = self.linear(functional.silu(condition))
        return out.chunk(self.count, -1)


def modulations_at_once(model: Any) -> Any:
    model.modulations = AllModulations(model.blocks).eval()

    def block_forward(self: Any, x: Tensor, modulation: Tensor) -> Any:
        shift_attn, scale_attn, gate_attn, shift_mlp, scale_mlp, gate_mlp = modulation.chunk(6, -1)
        x = x + gate_attn[:, None] * self.attn(modulate(self.norm1(x), shift_attn, scale_attn))
        return x + gate_mlp[:, None] * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))

    for block in model.blocks:
        del block.adaLN_modulation
        override(block, block_forward)

    def predict(latent: Tensor, timestep: Tensor, label: Tensor) -> Tensor:
        x = model.pos_embed(model.x_embedder(latent))
        condition = model.t_embedder(model.t_proj(timestep).to(latent.dtype)) + model.y_embedder(label)
        for block, modulation in zip(model.blocks, model.modulations(condition), strict=True):
            x = block(x, modulation)
        out: Tensor = model.unpatchify(model.final_layer(x, condition))
        return out

    model.predict = predict
    return model


CORRECT: Final = (
    Correct("unet_fused_attention", "unet", fused_attention),
    Correct("unet_as_it_is", "unet", lambda model: model),
    Correct("dit_modulations_at_once", "dit", modulations_at_once),
)
