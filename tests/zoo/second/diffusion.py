"""A U-Net with cross attention and a diffusion transformer, plain modules with the names of diffusers."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class Timesteps(nn.Module):
    """Cosines and sines of a time at geometric frequencies."""

    def __init__(self, width: int, shift: float = 0.0) -> None:
        super().__init__()
        self.width, self.shift = width, shift

    def forward(self, timesteps: Tensor) -> Tensor:
        half = self.width // 2
        exponent = -math.log(10000) * torch.arange(half, dtype=torch.float32) / (half - self.shift)
        angles = timesteps[:, None].float() * exponent.exp()
        return torch.cat((angles.cos(), angles.sin()), -1)


class TimestepEmbedding(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(width, out)
        self.act = nn.SiLU()
        self.linear_2 = nn.Linear(out, out)

    def forward(self, sample: Tensor) -> Tensor:
        out: Tensor = self.linear_2(self.act(self.linear_1(sample)))
        return out


class ResnetBlock2D(nn.Module):
    def __init__(self, channels: int, out: int, time: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(8, channels, eps=1e-5)
        self.conv1 = nn.Conv2d(channels, out, 3, padding=1)
        self.time_emb_proj = nn.Linear(time, out)
        self.norm2 = nn.GroupNorm(8, out, eps=1e-5)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.nonlinearity = nn.SiLU()
        self.conv_shortcut = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, hidden_states: Tensor, temb: Tensor) -> Tensor:
        x = self.conv1(self.nonlinearity(self.norm1(hidden_states)))
        x = x + self.time_emb_proj(self.nonlinearity(temb))[:, :, None, None]
        x = self.conv2(self.nonlinearity(self.norm2(x)))
        out: Tensor = self.conv_shortcut(hidden_states) + x
        return out


class Attention(nn.Module):
    """Attention of a sequence to itself, or to a context."""

    def __init__(self, width: int, heads: int, context: int | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_k = nn.Linear(context or width, width, bias=False)
        self.to_v = nn.Linear(context or width, width, bias=False)
        self.to_out = nn.Linear(width, width)

    def forward(self, hidden_states: Tensor, context: Tensor | None = None) -> Tensor:
        context = hidden_states if context is None else context
        q, k, v = self.to_q(hidden_states), self.to_k(context), self.to_v(context)
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, k, v))
        attended = functional.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.to_out(attended.transpose(1, 2).flatten(2))
        return out


class GEGLU(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 2 * inner)

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden, gate = self.proj(hidden_states).chunk(2, -1)
        out: Tensor = hidden * functional.gelu(gate)
        return out


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.geglu = GEGLU(width, 2 * width)
        self.linear = nn.Linear(2 * width, width)

    def forward(self, hidden_states: Tensor) -> Tensor:
        out: Tensor = self.linear(self.geglu(hidden_states))
        return out


class BasicTransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn1 = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.attn2 = Attention(width, heads, context)
        self.norm3 = nn.LayerNorm(width)
        self.ff = FeedForward(width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        x = x + self.attn1(self.norm1(x))
        x = x + self.attn2(self.norm2(x), context)
        out: Tensor = x + self.ff(self.norm3(x))
        return out


class Transformer2D(nn.Module):
    """Attention of all places of an image, around it a norm and projections."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, width, eps=1e-6)
        self.proj_in = nn.Conv2d(width, width, 1)
        self.transformer_block = BasicTransformerBlock(width, heads, context)
        self.proj_out = nn.Conv2d(width, width, 1)

    def forward(self, hidden_states: Tensor, context: Tensor) -> Tensor:
        x = self.proj_in(self.norm(hidden_states))
        size = x.shape[2:]
        x = self.transformer_block(x.flatten(2).transpose(1, 2), context)
        x = self.proj_out(x.transpose(1, 2).unflatten(2, size))
        out: Tensor = x + hidden_states
        return out


class Upsample2D(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        out: Tensor = self.conv(functional.interpolate(hidden_states, scale_factor=2.0, mode="nearest"))
        return out


class DownBlock(nn.Module):
    def __init__(self, channels: int, out: int, time: int) -> None:
        super().__init__()
        self.resnet = ResnetBlock2D(channels, out, time)
        self.downsampler = nn.Conv2d(out, out, 3, stride=2, padding=1)

    def forward(self, hidden_states: Tensor, temb: Tensor) -> tuple[Tensor, Tensor]:
        kept = self.resnet(hidden_states, temb)
        return self.downsampler(kept), kept


class UpBlock(nn.Module):
    def __init__(self, channels: int, kept: int, out: int, time: int) -> None:
        super().__init__()
        self.upsampler = Upsample2D(channels)
        self.resnet = ResnetBlock2D(channels + kept, out, time)

    def forward(self, hidden_states: Tensor, kept: Tensor, temb: Tensor) -> Tensor:
        out: Tensor = self.resnet(torch.cat((self.upsampler(hidden_states), kept), 1), temb)
        return out


class MidBlock(nn.Module):
    def __init__(self, width: int, time: int, context: int) -> None:
        super().__init__()
        self.resnet_1 = ResnetBlock2D(width, width, time)
        self.attention = Transformer2D(width, 4, context)
        self.resnet_2 = ResnetBlock2D(width, width, time)

    def forward(self, hidden_states: Tensor, temb: Tensor, context: Tensor) -> Tensor:
        hidden_states = self.attention(self.resnet_1(hidden_states, temb), context)
        out: Tensor = self.resnet_2(hidden_states, temb)
        return out


class UNet2DCondition(nn.Module):
    """Noise of an image of four channels, at a time, given a text."""

    def __init__(self) -> None:
        super().__init__()
        self.time_proj = Timesteps(32)
        self.time_embedding = TimestepEmbedding(32, 64)
        self.conv_in = nn.Conv2d(4, 32, 3, padding=1)
        self.down_blocks = nn.ModuleList([DownBlock(32, 32, 64), DownBlock(32, 64, 64)])
        self.mid_block = MidBlock(64, 64, 24)
        self.up_blocks = nn.ModuleList([UpBlock(64, 64, 64, 64), UpBlock(64, 32, 32, 64)])
        self.conv_norm_out = nn.GroupNorm(8, 32, eps=1e-5)
        self.conv_act = nn.SiLU()
        self.conv_out = nn.Conv2d(32, 4, 3, padding=1)

    def forward(self, sample: Tensor, timestep: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        temb = self.time_embedding(self.time_proj(timestep).to(sample.dtype))
        x = self.conv_in(sample)
        kept = []
        for block in self.down_blocks:
            x, before = block(x, temb)
            kept.append(before)
        x = self.mid_block(x, temb, encoder_hidden_states)
        for block in self.up_blocks:
            x = block(x, kept.pop(), temb)
        out: Tensor = self.conv_out(self.conv_act(self.conv_norm_out(x)))
        return out


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale[:, None]) + shift[:, None]


class GridPositions(nn.Module):
    """Sines and cosines of the rows and of the columns of a grid, which are not learned."""

    def __init__(self, width: int, rows: int, columns: int) -> None:
        super().__init__()
        self.width, self.rows, self.columns = width, rows, columns

    def axis(self, places: Tensor) -> Tensor:
        quarter = self.width // 4
        omega = 10000 ** -(torch.arange(quarter, dtype=torch.float32) / quarter)
        angles = places.float()[:, None] * omega
        return torch.cat((angles.sin(), angles.cos()), -1)

    def table(self) -> Tensor:
        at = torch.arange(self.rows * self.columns)
        return torch.cat((self.axis(at % self.columns), self.axis(at // self.columns)), -1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states + self.table().to(hidden_states.dtype)


class PatchEmbed(nn.Module):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, 2, stride=2)

    def forward(self, latent: Tensor) -> Tensor:
        out: Tensor = self.proj(latent).flatten(2).transpose(1, 2)
        return out


class SelfAttention(nn.Module):
    """Attention with queries, keys and values of one projection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*parts.unbind())
        out: Tensor = self.proj(attended.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * width)
        self.act = nn.GELU("tanh")
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.act(self.fc1(x)))
        return out


class DiTBlock(nn.Module):
    """A block whose norms are shifted and scaled, and whose branches are gated, by the condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.attn = SelfAttention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.mlp = MLP(width)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        parts = self.adaLN_modulation(condition).chunk(6, -1)
        shift_attn, scale_attn, gate_attn, shift_mlp, scale_mlp, gate_mlp = parts
        x = x + gate_attn[:, None] * self.attn(modulate(self.norm1(x), shift_attn, scale_attn))
        out: Tensor = x + gate_mlp[:, None] * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))
        return out


class FinalLayer(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.linear = nn.Linear(width, out)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(condition).chunk(2, -1)
        out: Tensor = self.linear(modulate(self.norm_final(x), shift, scale))
        return out


class Unpatchify(nn.Module):
    """Patches of two by two, put together to an image."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.rows, self.columns = rows, columns

    def forward(self, x: Tensor) -> Tensor:
        patches = x.view(len(x), self.rows, self.columns, 2, 2, -1)
        return patches.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


class DiT(nn.Module):
    """Noise of a latent image at a time, of a class, guided away from that of no class."""

    def __init__(self, width: int = 64, rows: int = 4, columns: int = 6) -> None:
        super().__init__()
        self.x_embedder = PatchEmbed(4, width)
        self.pos_embed = GridPositions(width, rows, columns)
        self.t_proj = Timesteps(32)
        self.t_embedder = TimestepEmbedding(32, width)
        self.y_embedder = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(DiTBlock(width, 4) for _ in range(3))
        self.final_layer = FinalLayer(width, 16)
        self.unpatchify = Unpatchify(rows, columns)

    def predict(self, latent: Tensor, timestep: Tensor, label: Tensor) -> Tensor:
        x = self.pos_embed(self.x_embedder(latent))
        condition = self.t_embedder(self.t_proj(timestep).to(latent.dtype)) + self.y_embedder(label)
        for block in self.blocks:
            x = block(x, condition)
        out: Tensor = self.unpatchify(self.final_layer(x, condition))
        return out

    def forward(self, latent: Tensor, timestep: Tensor, label: Tensor, guidance: float = 3.0) -> Tensor:
        nothing = torch.full_like(label, 10)
        both = (torch.cat((latent, latent)), torch.cat((timestep, timestep)), torch.cat((label, nothing)))
        given, none = self.predict(*both).chunk(2)
        return none + guidance * (given - none)
