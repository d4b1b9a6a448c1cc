"""Ports of a vocoder and of a model of images and text: HiFi-GAN, Qwen2-VL."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.fourth.architectures import IMAGE
from tests.zoo.fourth.parts import Gated, Rms
from tests.zoo.third.parts import attend, causal, fused, heads, kept, linear, merged, turn


class Dilated(nn.Module):
    """Pairs of convolutions, the first of each with holes."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.holed, self.plain, self.slope = block.convs1, block.convs2, block.leaky_relu_slope

    def forward(self, x: Tensor) -> Tensor:
        for holed, plain in zip(self.holed, self.plain, strict=True):
            y = holed(functional.leaky_relu(x, self.slope))
            x = x + plain(functional.leaky_relu(y, self.slope))
        return x


class Stage(nn.Module):
    """More samples, and the mean of several blocks."""

    def __init__(self, grow: Any, blocks: Any, slope: float) -> None:
        super().__init__()
        self.grow, self.blocks, self.slope = grow, nn.ModuleList([Dilated(b) for b in blocks]), slope

    def larger(self, x: Tensor) -> Tensor:
        out: Tensor = self.grow(x)
        return out

    def mean(self, parts: list[Tensor]) -> Tensor:
        return torch.stack(parts).mean(0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.larger(functional.leaky_relu(x, self.slope))
        return self.mean([block(x) for block in self.blocks])


class Vocoder(nn.Module):
    """HiFi-GAN."""

    last_slope = 0.01

    def __init__(self, reference: Any) -> None:
        super().__init__()
        count, slope = reference.num_kernels, reference.config.leaky_relu_slope
        self.mean, self.scale = kept(reference.mean), kept(reference.scale)
        self.into, self.out = reference.conv_pre, reference.conv_post
        self.stages = nn.ModuleList(
            [
                Stage(grow, reference.resblocks[at * count : (at + 1) * count], slope)
                for at, grow in enumerate(reference.upsampler)
            ]
        )

    def normed(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.scale

    def forward(self, spectrogram: Tensor) -> Tensor:
        x = self.into(self.normed(spectrogram).transpose(1, 2))
        for stage in self.stages:
            x = stage(x)
        out: Tensor = self.out(functional.leaky_relu(x, self.last_slope)).tanh()[:, 0]
        return out


def hifigan_with_statistics_folded(reference: Any) -> Any:
    """The mean of the spectrograms is subtracted still; what they are divided by is in the weights."""
    port: Any = Vocoder(reference)
    with torch.no_grad():
        port.into.weight /= port.scale[:, None]
        port.scale.fill_(1)
    return port


def hifigan_with_weight_norm(reference: Any) -> Any:
    """The library's model, its weights kept as directions and lengths, as they are trained."""
    reference.apply_weight_norm()
    return reference


class LooksAtImages(nn.Module):
    """Attention of the patches of each image to one another, in two directions rotated."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = attention.qkv, attention.proj, attention.num_heads

    def keep(self, images: Tensor) -> Tensor:
        return images[:, None] == images

    def forward(self, x: Tensor, angles: Tensor, images: Tensor) -> Tensor:
        q, k, v = (heads(part[None], self.heads) for part in self.qkv(x).chunk(3, -1))
        q, k = (turn(part.float(), angles).to(x.dtype) for part in (q, k))
        mixed = attend(q, k, v, scale=q.shape[-1] ** -0.5, keep=self.keep(images))
        out: Tensor = self.out(merged(mixed)[0])
        return out


class ImageBlock(nn.Module):
    """A layer of the tower."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.n1, self.n2, self.look = block.norm1, block.norm2, LooksAtImages(block.attn)
        self.up, self.down = block.mlp.fc1, block.mlp.fc2

    def act(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)

    def forward(self, x: Tensor, angles: Tensor, images: Tensor) -> Tensor:
        x = x + self.look(self.n1(x), angles, images)
        out: Tensor = x + self.down(self.act(self.up(self.n2(x))))
        return out


class Merger(nn.Module):
    """Four patches as one token of the text."""

    def __init__(self, merger: Any) -> None:
        super().__init__()
        self.norm, self.up, self.down = merger.ln_q, merger.mlp[0], merger.mlp[2]

    def act(self, x: Tensor) -> Tensor:
        return functional.gelu(x)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.act(self.up(self.norm(x).reshape(len(x) // 4, -1))))
        return out


class Tower(nn.Module):
    """The tower for images; the convolution of patches is a product."""

    def __init__(self, visual: Any) -> None:
        super().__init__()
        self.cut = linear(visual.patch_embed.proj.weight.flatten(1))
        self.blocks = nn.ModuleList([ImageBlock(block) for block in visual.blocks])
        self.merge, self.frequencies = Merger(visual.merger), visual.rotary_pos_emb.inv_freq

    def places(self, height: int, width: int) -> Tensor:
        """Row and column of each patch; four that are merged follow one another."""
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        both = torch.stack((rows, columns), -1).reshape(height // 2, 2, width // 2, 2, 2)
        return both.transpose(1, 2).reshape(-1, 2)

    def forward(self, pixels: Tensor, grids: Tensor) -> Tensor:
        places = torch.cat([self.places(int(grid[1]), int(grid[2])) for grid in grids])
        images = torch.arange(len(grids)).repeat_interleave(grids.prod(-1))
        angles = (places[..., None].float() * self.frequencies.float()).flatten(1)
        x = self.cut(pixels)
        for block in self.blocks:
            x = block(x, angles, images)
        out: Tensor = self.merge(x)
        return out


class TextMixer(nn.Module):
    """Attention of the text."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.qkv = fused(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out, self.size = attention.o_proj, attention.head_dim
        self.groups = attention.num_key_value_heads

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        every = heads(self.qkv(x), self.qkv.out_features // self.size)
        q, k, v = every.tensor_split((-2 * self.groups, -self.groups), 1)
        q, k = turn(q, angles), turn(k, angles)
        k, v = (part.repeat_interleave(q.shape[1] // self.groups, 1) for part in (k, v))
        mixed = attend(q, k, v, scale=self.size**-0.5, keep=causal(*2 * x.shape[1:2]))
        out: Tensor = self.out(merged(mixed))
        return out


class TextBlock(nn.Module):
    """A layer of the text."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.n1, self.n2 = (
            Rms(norm.weight, norm.variance_epsilon)
            for norm in (layer.input_layernorm, layer.post_attention_layernorm)
        )
        self.mix, mlp = TextMixer(layer.self_attn), layer.mlp
        self.feed = Gated(mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.mix(self.n1(x), angles)
        out: Tensor = x + self.feed(self.n2(x))
        return out


class MixedPort(nn.Module):
    """Qwen2-VL."""

    def __init__(self, reference: Any) -> None:
        super().__init__()
        inner = reference.model
        text = inner.language_model
        self.tower, self.words = Tower(inner.visual), text.embed_tokens
        self.blocks = nn.ModuleList([TextBlock(layer) for layer in text.layers])
        self.norm, self.head = Rms(text.norm.weight, text.norm.variance_epsilon), reference.lm_head
        self.frequencies, self.sections = text.rotary_emb.inv_freq, text.rotary_emb.mrope_section

    def after(self, height: int, width: int) -> int:
        """By how much places go on after an image."""
        return max(height, width)

    def places(self, ids: Tensor, grids: Tensor) -> Tensor:
        """Time, row and column (3, length) of each token of a text."""
        parts, place, at, left = [], 0, 0, iter(grids.tolist())
        while at < len(ids):
            if ids[at] != IMAGE:
                parts.append(torch.full((3, 1), place))
                place, at = place + 1, at + 1
                continue
            _, height, width = (size // 2 for size in next(left))
            rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
            parts.append(torch.stack((torch.zeros_like(rows), rows, columns)).flatten(1) + place)
            place, at = place + self.after(height, width), at + height * width
        return torch.cat(parts, 1)

    def axes(self) -> list[int]:
        """Which of the three places each pair of channels turns by."""
        return [axis for axis, count in enumerate(self.sections) for _ in range(count)]

    def angles(self, places: Tensor) -> Tensor:
        out: Tensor = places[self.axes()].T.float() * self.frequencies.float()
        return out

    def embed(self, ids: Tensor, pixels: Tensor, grids: Tensor) -> Tensor:
        x: Tensor = self.words(ids)
        return x.masked_scatter((ids == IMAGE)[..., None], self.tower(pixels, grids))

    def forward(self, input_ids: Tensor, pixel_values: Tensor, image_grid_thw: Tensor, **_: Any) -> Any:
        x = self.embed(input_ids, pixel_values, image_grid_thw)
        angles = self.angles(self.places(input_ids[0], image_grid_thw))
        for block in self.blocks:
            x = block(x, angles)
        return {"logits": self.head(self.norm(x))}


def qwen2_vl_image_by_image(reference: Any) -> Any:
    """The tower is called once for each image."""
    port: Any = MixedPort(reference)
    port.tower = OneByOne(reference.model.visual)
    return port


class OneByOne(Tower):
    """A tower for one image at a time."""

    def forward(self, pixels: Tensor, grids: Tensor) -> Tensor:
        parts = torch.split(pixels, grids.prod(-1).tolist())
        once = super().forward
        return torch.cat([once(part, grid[None]) for part, grid in zip(parts, grids, strict=True)])
