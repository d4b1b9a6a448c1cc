"""Ports of a model of speech, Parakeet, and of a diffusion transformer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.fifth.mmdit import HEADS, WIDTH, by_head, modulated, rotated
from tests.zoo.fourth.parts import Scores
from tests.zoo.third.parts import attend, fused, heads, kept, linear, merged


class Subsampler(nn.Module):
    """Convolutions that halve time and pitch, and a linear over what is left of the pitch, channels last."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.convs = nn.ModuleList([part for part in layer.layers if isinstance(part, nn.Conv2d)])
        channels = layer.channels
        weight = torch.unflatten(layer.linear.weight, 1, (channels, -1)).transpose(1, 2).flatten(1)
        self.out = linear(weight, layer.linear.bias)

    def shorter(self, lengths: Tensor) -> Tensor:
        return (lengths - 1) // 2 + 1

    def flat(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1).flatten(2)

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x = features[:, None]
        convs: Any = self.convs
        for at, conv in enumerate(convs):
            if conv.stride[0] == 2:
                lengths = self.shorter(lengths)
            x = conv(x)
            x = x * (torch.arange(x.shape[2]) < lengths[:, None])[:, None, :, None]
            if at in (0, 2):
                x = functional.relu(x)
        return self.out(self.flat(x)), lengths


class HalfFeed(nn.Module):
    """A feed-forward, half of which is added."""

    def __init__(self, norm: Any, feed: Any) -> None:
        super().__init__()
        self.norm, self.grow, self.shrink, self.share = norm, feed.linear1, feed.linear2, 0.5

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.share * self.shrink(functional.silu(self.grow(self.norm(x))))
        return out


class FarMixer(nn.Module):
    """Attention by content and by distance."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.qkv = fused(attention.q_proj, attention.k_proj, attention.v_proj)
        self.far, self.out = linear(attention.relative_k_proj.weight), attention.o_proj
        self.by_word, self.by_place = kept(attention.bias_u), kept(attention.bias_v)
        self.count, self.scale = attention.config.num_attention_heads, attention.scaling

    def placed(self, q: Tensor, waves: Tensor) -> Tensor:
        """Scores of distances from the largest down, moved so that each pair has its own."""
        every = (q + self.by_place[:, None]) @ heads(self.far(waves), self.count).transpose(-1, -2)
        rows, count, length, width = every.shape
        moved = functional.pad(every, (1, 0)).reshape(rows, count, width + 1, length)[:, :, 1:]
        return moved.reshape(rows, count, length, width)[..., :length]

    def forward(self, x: Tensor, waves: Tensor, keep: Tensor) -> Tensor:
        q, k, v = (heads(part, self.count) for part in self.qkv(x).chunk(3, -1))
        bias = (self.placed(q, waves) * self.scale).masked_fill(~keep, torch.finfo(x.dtype).min)
        out: Tensor = self.out(merged(attend(q + self.by_word[:, None], k, v, scale=self.scale, bias=bias)))
        return out


class GatheredMixer(FarMixer):
    """Each pair's distance looked up."""

    def placed(self, q: Tensor, waves: Tensor) -> Tensor:
        every = (q + self.by_place[:, None]) @ heads(self.far(waves), self.count).transpose(-1, -2)
        length = q.shape[2]
        index = length - 1 - torch.arange(length)[:, None] + torch.arange(length)
        return every.gather(-1, index.expand(*every.shape[:2], -1, -1))


class Convolved(nn.Module):
    """A gated linear, each channel over time, and a linear; channels last but for the convolution."""

    def __init__(self, conv: Any) -> None:
        super().__init__()
        one, other = conv.pointwise_conv1, conv.pointwise_conv2
        self.value, self.gate = (
            linear(weight[:, :, 0], bias)
            for weight, bias in zip(one.weight.chunk(2), one.bias.chunk(2), strict=True)
        )
        self.out = linear(other.weight[:, :, 0], other.bias)
        self.along, self.norm = conv.depthwise_conv, conv.norm

    def gated(self, x: Tensor) -> Tensor:
        out: Tensor = self.value(x) * self.gate(x).sigmoid()
        return out

    def over_time(self, x: Tensor, real: Tensor) -> Tensor:
        x = (x * real[..., None]).transpose(1, 2)
        out: Tensor = self.norm(self.along(x)).transpose(1, 2)
        return out

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        out: Tensor = self.out(functional.silu(self.over_time(self.gated(x), real)))
        return out


class BirdBlock(nn.Module):
    """A layer."""

    def __init__(self, layer: Any, mixer: type[FarMixer]) -> None:
        super().__init__()
        self.first = HalfFeed(layer.norm_feed_forward1, layer.feed_forward1)
        self.pre_mix, self.mix = layer.norm_self_att, mixer(layer.self_attn)
        self.pre_conv, self.conv = layer.norm_conv, Convolved(layer.conv)
        self.second = HalfFeed(layer.norm_feed_forward2, layer.feed_forward2)
        self.norm = layer.norm_out

    def forward(self, x: Tensor, waves: Tensor, real: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.mix(self.pre_mix(x), waves, (real[:, :, None] & real[:, None])[:, None])
        x = x + self.conv(self.pre_conv(x), real)
        out: Tensor = self.norm(self.second(x))
        return out


class BirdPort(nn.Module):
    """Parakeet."""

    mixer: type[FarMixer] = FarMixer

    def __init__(self, reference: Any) -> None:
        super().__init__()
        inner = reference.encoder
        self.less, self.factor = Subsampler(inner.subsampling), inner.input_scale
        self.rates = inner.encode_positions.inv_freq.detach().clone()
        self.blocks = nn.ModuleList([BirdBlock(layer, self.mixer) for layer in inner.layers])
        head = reference.ctc_head
        self.letters = linear(head.weight[:, :, 0], head.bias)

    def distances(self, length: int) -> Tensor:
        return torch.arange(length - 1, -length, -1)

    def waves(self, length: int) -> Tensor:
        angles = self.distances(length).float()[:, None] * self.rates.float()
        return torch.stack((angles.sin(), angles.cos()), -1).flatten(-2)[None]

    def forward(self, input_features: Tensor, attention_mask: Tensor) -> Scores:
        x, lengths = self.less(input_features, attention_mask.sum(-1))
        x = x * self.factor
        real = torch.arange(x.shape[1]) < lengths[:, None]
        waves = self.waves(x.shape[1]).to(x.dtype)
        for block in self.blocks:
            x = block(x, waves, real)
        return Scores(logits=self.letters(x))


class BirdGathered(BirdPort):
    """With distances looked up."""

    mixer = GatheredMixer


def parakeet_with_statistics_folded(reference: Any) -> Any:
    """The statistics of the norm over time in the convolution of each channel, and 8 in the first linear."""
    port: Any = BirdPort(reference)
    with torch.no_grad():
        for block in port.blocks:
            conv, norm = block.conv.along, block.conv.norm
            gain = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
            conv.weight *= gain[:, None, None]
            conv.bias.copy_((conv.bias - norm.running_mean) * gain + norm.bias)
            block.conv.norm = nn.Identity()
        port.less.out.weight *= port.factor
        port.less.out.bias *= port.factor
        port.factor = 1.0
    return port


class Halves(nn.Module):
    """Queries, keys and values of one stream by a linear each."""

    def __init__(self, layer: Any, norms: Any) -> None:
        super().__init__()
        parts = zip(layer.weight[: 3 * WIDTH].chunk(3), layer.bias[: 3 * WIDTH].chunk(3), strict=True)
        self.query, self.key, self.value = (linear(weight, bias) for weight, bias in parts)
        self.query_gain, self.key_gain = kept(norms.query_norm.weight), kept(norms.key_norm.weight)

    def unit(self, x: Tensor, gain: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * gain

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (
            self.unit(by_head(self.query(x)), self.query_gain),
            self.unit(by_head(self.key(x)), self.key_gain),
            by_head(self.value(x)),
        )


def mixed(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    return merged(attend(q, k, v, scale=(WIDTH // HEADS) ** -0.5))


class Pair(nn.Module):
    """A block of two streams, its shifts, scales and gates given."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.picture = Halves(block.image_qkv.qkv, block.image_qkv)
        self.text = Halves(block.text_qkv.qkv, block.text_qkv)
        self.picture_out, self.text_out = block.image_out, block.text_out
        self.picture_feed, self.text_feed = block.image_feed, block.text_feed

    def forward(
        self, x: Tensor, words: Tensor, of_x: Any, of_words: Any, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        both = zip(
            self.text(modulated(words, *of_words[:2])), self.picture(modulated(x, *of_x[:2])), strict=True
        )
        q, k, v = (torch.cat(pair, 2) for pair in both)
        out = mixed(q, k, v, cos, sin)
        first, second = out.tensor_split((words.shape[1],), 1)
        words = words + of_words[2] * self.text_out(first)
        x = x + of_x[2] * self.picture_out(second)
        words = words + of_words[5] * self.text_feed(modulated(words, *of_words[3:5]))
        return x + of_x[5] * self.picture_feed(modulated(x, *of_x[3:5])), words


class Alone(nn.Module):
    """A block of one stream, its wide and narrow linears taken apart."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.halves = Halves(block.wide, block)
        self.grow = linear(block.wide.weight[3 * WIDTH :], block.wide.bias[3 * WIDTH :])
        self.out = linear(block.narrow.weight[:, :WIDTH], block.narrow.bias)
        self.shrink = linear(block.narrow.weight[:, WIDTH:])

    def forward(self, x: Tensor, parts: Any, cos: Tensor, sin: Tensor) -> Tensor:
        given = modulated(x, *parts[:2])
        fed = self.shrink(functional.gelu(self.grow(given), approximate="tanh"))
        q, k, v = self.halves(given)
        out: Tensor = x + parts[2] * (self.out(mixed(q, k, v, cos, sin)) + fed)
        return out


class DiffusionPort(nn.Module):
    """The diffusion transformer: all blocks' shifts, scales and gates by one linear, once."""

    def __init__(self, reference: Any) -> None:
        super().__init__()
        mods = [mod for block in reference.double_blocks for mod in (block.image_mod, block.text_mod)]
        mods += [block.mod for block in reference.single_blocks] + [reference.last.mod]
        self.counts = [mod.count for mod in mods]
        self.conditions = fused(*(mod.linear for mod in mods))
        self.cut, self.words, self.time = reference.patches, reference.words, reference.time_embed
        self.summary, self.places = reference.pooled_embed, reference.places
        self.ids = reference.ids
        self.pairs = nn.ModuleList([Pair(block) for block in reference.double_blocks])
        self.singles = nn.ModuleList([Alone(block) for block in reference.single_blocks])
        self.out, self.join = reference.last.linear, reference.unpatch

    def forward(self, latents: Tensor, time: Tensor, text: Tensor, pooled: Tensor) -> Tensor:
        grid, words = self.cut(latents), self.words(text)
        rows, columns = grid.shape[2:]
        x = grid.flatten(2).transpose(1, 2)
        parts = self.conditions(functional.silu(self.time(time) + self.summary(pooled)))[:, None]
        given = [
            p.chunk(n, -1)
            for p, n in zip(
                torch.split(parts, [n * WIDTH for n in self.counts], -1), self.counts, strict=True
            )
        ]
        cos, sin = self.places(self.ids(words.shape[1], rows, columns))
        for at, pair in enumerate(self.pairs):
            x, words = pair(x, words, given[2 * at], given[2 * at + 1], cos, sin)
        x = torch.cat((words, x), 1)
        for at, single in enumerate(self.singles):
            x = single(x, given[2 * len(self.pairs) + at], cos, sin)
        out: Tensor = self.join(self.out(modulated(x[:, words.shape[1] :], *given[-1])), rows, columns)
        return out


class PixelShuffled(nn.Module):
    """Patches put together by the library's function, the channels of the last linear reordered for it."""

    def forward(self, x: Tensor, rows: int, columns: int) -> Tensor:
        grid = torch.unflatten(x.transpose(1, 2), 2, (rows, columns))
        return functional.pixel_shuffle(grid, 2)


def mmdit_with_rows_for_shuffle(reference: Any) -> Any:
    """The rows of the last linear channel by channel, as a pixel shuffle wants them."""
    last = reference.last.linear
    order = torch.arange(last.out_features).reshape(2, 2, -1).permute(2, 0, 1).flatten()
    reference.last.linear = linear(last.weight[order], last.bias[order])
    reference.unpatch = PixelShuffled()
    return reference
