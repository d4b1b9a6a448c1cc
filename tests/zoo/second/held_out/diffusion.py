"""Diffusion: a U-Net with cross attention, a diffusion transformer."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from tests.zoo.entry import Correct, Mistake
from tests.zoo.planting import computing, fed, override, with_values
from tests.zoo.second.diffusion import modulate

RESNET: Final = "mid_block.resnet_1"
CROSS: Final = "mid_block.attention.transformer_block.attn2"
UP: Final = "up_blocks.0.upsampler"


def smoothly_enlarged(self: Any, hidden_states: Tensor) -> Any:
    return self.conv(functional.interpolate(hidden_states, scale_factor=2.0, mode="bilinear"))


def time_after_the_norm(self: Any, hidden_states: Tensor, temb: Tensor) -> Any:
    x = self.norm2(self.conv1(self.nonlinearity(self.norm1(hidden_states))))
    x = x + self.time_emb_proj(self.nonlinearity(temb))[:, :, None, None]
    return self.conv_shortcut(hidden_states) + self.conv2(self.nonlinearity(x))


def halves_exchanged(
    self: Any, latent: Tensor, timestep: Tensor, label: Tensor, guidance: float = 3.0
) -> Any:
    """The half without a class taken for that with one."""
    nothing = torch.full_like(label, 10)
    both = (torch.cat((latent, latent)), torch.cat((timestep, timestep)), torch.cat((label, nothing)))
    none, given = self.predict(*both).chunk(2)
    return none + guidance * (given - none)


def channels_before_places(self: Any, x: Tensor) -> Tensor:
    """Each patch read as channels of two by two, where it is two by two of channels."""
    patches = x.view(len(x), self.rows, self.columns, -1, 2, 2)
    return patches.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


def time_from_zero_to_one(_: Any, given: dict[str, Any]) -> None:
    given["timesteps"] = given["timesteps"] / 1000


def one_gate(self: Any, x: Tensor, condition: Tensor) -> Any:
    """The attention's branch added as it is, its gate forgotten."""
    parts = self.adaLN_modulation(condition).chunk(6, -1)
    shift_attn, scale_attn, _, shift_mlp, scale_mlp, gate_mlp = parts
    x = x + self.attn(modulate(self.norm1(x), shift_attn, scale_attn))
    return x + gate_mlp[:, None] * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))


MISTAKES: Final = (
    Mistake(
        "unet_frequencies",
        "unet",
        "time_proj",
        "frequencies",
        with_values("time_proj", shift=1.0),
        also_kinds=("factor", "position"),
    ),
    Mistake("unet_smoothly_enlarged", "unet", UP, "interpolation", computing(UP, smoothly_enlarged)),
    Mistake("unet_time_after_the_norm", "unet", RESNET, "order", computing(RESNET, time_after_the_norm)),
    Mistake(
        "unet_count_of_heads",
        "unet",
        CROSS,
        "heads",
        with_values(CROSS, heads=16),
        also_kinds=("groups", "permutation"),
    ),
    Mistake(
        "dit_guidance_exchanged",
        "dit",
        "@root",
        "permutation",
        computing("@root", halves_exchanged),
        also_kinds=("factor", "order"),
    ),
    Mistake(
        "dit_channels_before_places",
        "dit",
        "unpatchify",
        "permutation",
        computing("unpatchify", channels_before_places),
        also_kinds=("transposition",),
    ),
    Mistake(
        "dit_time_from_zero_to_one",
        "dit",
        "t_proj",
        "factor",
        fed("t_proj", time_from_zero_to_one),
        also_kinds=("frequencies", "position"),
    ),
    Mistake(
        "dit_gate_forgotten",
        "dit",
        "blocks.1",
        "factor",
        computing("blocks.1", one_gate),
        also_kinds=("missing_module",),
    ),
)


def written_group_norm(self: Any, input: Tensor) -> Tensor:
    """By its formula, in float32."""
    x = input.float().reshape(len(input), self.num_groups, -1)
    x = x - x.mean(-1, keepdim=True)
    x = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)).view(input.shape)
    out: Tensor = x * self.weight.float()[:, None, None] + self.bias.float()[:, None, None]
    return out.to(input.dtype)


def written_group_norms(model: Any) -> Any:
    for module in model.modules():
        if type(module).__name__ == "GroupNorm":
            override(module, written_group_norm)
    return model


def enlarged_by_repetition(model: Any) -> Any:
    def forward(self: Any, hidden_states: Tensor) -> Any:
        return self.conv(hidden_states.repeat_interleave(2, 2).repeat_interleave(2, 3))

    for block in model.up_blocks:
        override(block.upsampler, forward)
    return model


def written_attention(model: Any) -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind()
        weights = torch.softmax((q * q.shape[-1] ** -0.5) @ k.mT, -1, dtype=torch.float32)
        return self.proj((weights.to(v.dtype) @ v).transpose(1, 2).flatten(2))

    for block in model.blocks:
        override(block.attn, forward)
    return model


CORRECT: Final = (
    Correct("unet_written_group_norms", "unet", written_group_norms),
    Correct("unet_enlarged_by_repetition", "unet", enlarged_by_repetition),
    Correct("dit_written_attention", "dit", written_attention),
    Correct("dit_as_it_is", "dit", lambda model: model),
)
