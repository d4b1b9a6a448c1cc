"""A diffusion transformer of two streams that attend jointly, then one, in plain modules."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, CHANNELS, PATCH, TEXT_WIDTH, POOLED = 48, 3, 4, 2, 24, 16
AXES = (4, 6, 6)  # rotated channels of a head: of text, of rows, of columns


class TimeEmbed(nn.Module):
    """A time between 0 and 1, in thousandths, as cosines and sines, and two linears."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.width = width
        self.grow, self.mix = nn.Linear(width, WIDTH), nn.Linear(WIDTH, WIDTH)

    def angles(self, time: Tensor) -> Tensor:
        half = self.width // 2
        rates = torch.exp(-math.log(10000.0) * torch.arange(half, device=time.device).float() / half)
        return 1000.0 * time.float()[:, None] * rates

    def forward(self, time: Tensor) -> Tensor:
        angles = self.angles(time)
        waves = torch.cat((angles.cos(), angles.sin()), -1).to(self.grow.weight.dtype)
        out: Tensor = self.mix(functional.silu(self.grow(waves)))
        return out


class Places(nn.Module):
    """Rotary cosines and sines of tokens, each of three axes."""

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        parts = []
        for at, size in enumerate(AXES):
            rates = 1.0 / (100.0 ** (torch.arange(0, size, 2).float() / size))
            parts.append(ids[:, at].float()[:, None] * rates)
        angles = torch.cat(parts, -1)
        return angles.cos(), angles.sin()


class HeadNorm(nn.Module):
    """Root mean square norm of each head."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return wide.to(x.dtype) * self.weight


class Modulation(nn.Module):
    """Shifts, scales and gates from the condition."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.linear = count, nn.Linear(WIDTH, count * WIDTH)

    def forward(self, condition: Tensor) -> tuple[Tensor, ...]:
        parts: Tensor = self.linear(functional.silu(condition))
        return parts[:, None].chunk(self.count, -1)


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs side by side of (batch, heads, length, size) turned by (length, size / 2)."""
    one, other = x.float()[..., ::2], x.float()[..., 1::2]
    return torch.stack((one * cos - other * sin, other * cos + one * sin), -1).flatten(-2).to(x.dtype)


def by_head(x: Tensor) -> Tensor:
    return torch.unflatten(x, -1, (HEADS, -1)).transpose(1, 2)


class Feed(nn.Module):
    """Two linears with the approximation of GELU by tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.gelu(self.up(x), approximate="tanh"))
        return out


class StreamQkv(nn.Module):
    """Queries, keys and values of one stream, queries and keys normed."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.query_norm, self.key_norm = HeadNorm(WIDTH // HEADS), HeadNorm(WIDTH // HEADS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (by_head(part) for part in self.qkv(x).chunk(3, -1))
        return self.query_norm(q), self.key_norm(k), v


class Joint(nn.Module):
    """Attention of all tokens to all."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return mixed.transpose(1, 2).flatten(2)


class DoubleBlock(nn.Module):
    """Text and image with weights of their own, and one attention."""

    def __init__(self) -> None:
        super().__init__()
        self.image_mod, self.text_mod = Modulation(6), Modulation(6)
        self.image_qkv, self.text_qkv = StreamQkv(), StreamQkv()
        self.attend = Joint()
        self.image_out, self.text_out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.image_feed, self.text_feed = Feed(), Feed()

    def forward(
        self, image: Tensor, text: Tensor, condition: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        i, t = self.image_mod(condition), self.text_mod(condition)
        of_text = self.text_qkv(modulated(text, t[0], t[1]))
        of_image = self.image_qkv(modulated(image, i[0], i[1]))
        q, k, v = (torch.cat(pair, 2) for pair in zip(of_text, of_image, strict=True))
        mixed = self.attend(q, k, v, cos, sin)
        count = text.shape[1]
        text = text + t[2] * self.text_out(mixed[:, :count])
        image = image + i[2] * self.image_out(mixed[:, count:])
        text = text + t[5] * self.text_feed(modulated(text, t[3], t[4]))
        image = image + i[5] * self.image_feed(modulated(image, i[3], i[4]))
        return image, text


class SingleBlock(nn.Module):
    """Attention and feed-forward side by side on one stream."""

    def __init__(self) -> None:
        super().__init__()
        self.mod = Modulation(3)
        self.wide, self.narrow = nn.Linear(WIDTH, 5 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.query_norm, self.key_norm = HeadNorm(WIDTH // HEADS), HeadNorm(WIDTH // HEADS)
        self.attend = Joint()

    def forward(self, x: Tensor, condition: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shift, scale, gate = self.mod(condition)
        qkv, feed = torch.split(self.wide(modulated(x, shift, scale)), [3 * WIDTH, 2 * WIDTH], -1)
        q, k, v = (by_head(part) for part in qkv.chunk(3, -1))
        mixed = self.attend(self.query_norm(q), self.key_norm(k), v, cos, sin)
        out: Tensor = x + gate * self.narrow(
            torch.cat((mixed, functional.gelu(feed, approximate="tanh")), -1)
        )
        return out


class Last(nn.Module):
    """The modulated norm and the projection to patches."""

    def __init__(self) -> None:
        super().__init__()
        self.mod = Modulation(2)
        self.linear = nn.Linear(WIDTH, PATCH * PATCH * CHANNELS)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.mod(condition)
        out: Tensor = self.linear(modulated(x, shift, scale))
        return out


class Unpatch(nn.Module):
    """Patches (batch, rows * columns, p * q * channels) as a picture."""

    def forward(self, x: Tensor, rows: int, columns: int) -> Tensor:
        x = x.reshape(x.shape[0], rows, columns, PATCH, PATCH, CHANNELS)
        return torch.einsum("bhwpqc->bchpwq", x).reshape(x.shape[0], CHANNELS, rows * PATCH, columns * PATCH)


class MMDiT(nn.Module):
    """The whole: latents (batch, channels, height, width), time, text and a pooled text."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(CHANNELS, WIDTH, PATCH, stride=PATCH)
        self.words = nn.Linear(TEXT_WIDTH, WIDTH)
        self.time_embed, self.pooled_embed = TimeEmbed(), nn.Linear(POOLED, WIDTH)
        self.places = Places()
        self.double_blocks = nn.ModuleList([DoubleBlock() for _ in range(2)])
        self.single_blocks = nn.ModuleList([SingleBlock() for _ in range(2)])
        self.last, self.unpatch = Last(), Unpatch()

    def ids(self, words: int, rows: int, columns: int) -> Tensor:
        """The three coordinates of each token: those of text are zero."""
        grid = torch.zeros(rows, columns, 3)
        grid[..., 1] += torch.arange(rows)[:, None]
        grid[..., 2] += torch.arange(columns)[None, :]
        return torch.cat((torch.zeros(words, 3), grid.reshape(-1, 3)), 0)

    def forward(self, latents: Tensor, time: Tensor, text: Tensor, pooled: Tensor) -> Tensor:
        grid = self.patches(latents)
        rows, columns = grid.shape[2:]
        image, words = grid.flatten(2).transpose(1, 2), self.words(text)
        condition = self.time_embed(time) + self.pooled_embed(pooled)
        cos, sin = self.places(self.ids(words.shape[1], rows, columns))
        for block in self.double_blocks:
            image, words = block(image, words, condition, cos, sin)
        x = torch.cat((words, image), 1)
        for block in self.single_blocks:
            x = block(x, condition, cos, sin)
        out: Tensor = self.unpatch(self.last(x[:, words.shape[1] :], condition), rows, columns)
        return out
