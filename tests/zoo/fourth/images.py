"""Ports of models of images: EfficientNet, BEiT, DPT."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.third.parts import attend, heads, kept, linear, merged


class Cell(nn.Module):
    """A convolution without a bias, the statistics of a norm, and an activation."""

    def __init__(
        self, conv: Any, norm: Any, pads: Sequence[int] = (0, 0, 0, 0), *, active: bool = True
    ) -> None:
        super().__init__()
        self.kernel, self.stride, self.groups = kept(conv.weight), conv.stride[0], conv.groups
        self.gain, self.shift = kept(norm.weight), kept(norm.bias)
        self.mean, self.variance = kept(norm.running_mean), kept(norm.running_var)
        self.eps, self.pads, self.active = norm.eps, tuple(pads), active

    def act(self, x: Tensor) -> Tensor:
        return functional.silu(x) if self.active else x

    def normed(self, x: Tensor) -> Tensor:
        return functional.batch_norm(x, self.mean, self.variance, self.gain, self.shift, eps=self.eps)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.pad(x, self.pads)
        return self.act(
            self.normed(functional.conv2d(x, self.kernel, stride=self.stride, groups=self.groups))
        )


def same(depthwise: Any) -> Sequence[int]:
    """Padding of a depthwise convolution, which strided ones have from the layer before."""
    if depthwise.stride == 2:
        return tuple(depthwise.depthwise_conv_pad.padding)
    half = depthwise.depthwise_conv.kernel_size[0] // 2
    return (half,) * 4


class Excite(nn.Module):
    """Channels weighted by what the whole map has of them."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.less = linear(layer.reduce.weight.flatten(1), layer.reduce.bias)
        self.more = linear(layer.expand.weight.flatten(1), layer.expand.bias)

    def act(self, x: Tensor) -> Tensor:
        return functional.silu(x)

    def forward(self, x: Tensor) -> Tensor:
        weights: Tensor = self.more(self.act(self.less(x.mean((2, 3))))).sigmoid()
        return x * weights[:, :, None, None]


class Inverted(nn.Module):
    """A block: wider, each channel by itself, excited, narrower."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        wide, deep, thin = getattr(block, "expansion", None), block.depthwise_conv, block.projection
        self.widen = nn.Identity() if wide is None else Cell(wide.expand_conv, wide.expand_bn)
        self.each = Cell(deep.depthwise_conv, deep.depthwise_norm, same(deep))
        self.excite = Excite(block.squeeze_excite)
        self.narrow = Cell(thin.project_conv, thin.project_bn, active=False)
        self.adds = thin.apply_dropout

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.narrow(self.excite(self.each(self.widen(x))))
        return x + y if self.adds else y


class EfficientPort(nn.Module):
    """EfficientNet."""

    def __init__(self, reference: Any) -> None:
        super().__init__()
        inner = reference.efficientnet
        stem, top = inner.embeddings, inner.encoder
        self.stem = Cell(stem.convolution, stem.batchnorm, (0, 1, 0, 1))
        self.blocks = nn.ModuleList([Inverted(block) for block in inner.encoder.blocks])
        self.top, self.labels = Cell(top.top_conv, top.top_bn), reference.classifier

    def pooled(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.stem(pixel_values)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.labels(self.pooled(self.top(x)))
        return out


class FoldedCell(Cell):
    """The statistics are in the kernel and in a bias."""

    def __init__(self, cell: Cell) -> None:
        nn.Module.__init__(self)
        share = cell.gain.double() * torch.rsqrt(cell.variance.double() + cell.eps)
        dtype = cell.kernel.dtype
        self.kernel = kept((cell.kernel.double() * share[:, None, None, None]).to(dtype))
        self.shift = kept((cell.shift.double() - cell.mean.double() * share).to(dtype))
        self.stride, self.groups, self.pads, self.active = cell.stride, cell.groups, cell.pads, cell.active

    def forward(self, x: Tensor) -> Tensor:
        x = functional.pad(x, self.pads)
        return self.act(functional.conv2d(x, self.kernel, self.shift, self.stride, groups=self.groups))


def efficientnet_with_statistics_folded(reference: Any) -> Any:
    """No norm is left."""
    port: Any = EfficientPort(reference)
    port.stem, port.top = FoldedCell(port.stem), FoldedCell(port.top)
    for block in port.blocks:
        block.each, block.narrow = FoldedCell(block.each), FoldedCell(block.narrow)
        if isinstance(block.widen, Cell):
            block.widen = FoldedCell(block.widen)
    return port


def efficientnet_channels_last(reference: Any) -> Any:
    """The library's model in the other memory format."""
    return reference.to(memory_format=torch.channels_last)


class Seer(nn.Module):
    """Attention with a bias of each pair of patches, by one projection; keys have no bias."""

    def __init__(self, layer: Any, size: int) -> None:
        super().__init__()
        a = layer.attention
        weights = torch.cat((a.q_proj.weight, a.k_proj.weight, a.v_proj.weight))
        bias = torch.cat((a.q_proj.bias, torch.zeros_like(a.q_proj.bias), a.v_proj.bias))
        self.qkv, self.out, self.heads = linear(weights, bias), a.o_proj, a.num_attention_heads
        self.table, self.size = kept(layer.relative_position_bias.relative_position_bias_table), size

    def slots(self) -> Tensor:
        """Row of the table for each (query, key), the first of which is the class token."""
        n = self.size
        places = torch.cartesian_prod(torch.arange(n), torch.arange(n))
        apart = places[:, None] - places[None] + n - 1
        special = self.table.shape[0] - 3
        slots = functional.pad(apart[..., 0] * (2 * n - 1) + apart[..., 1], (1, 0, 1, 0))
        slots[0, 1:], slots[1:, 0], slots[0, 0] = special, special + 1, special + 2
        return slots

    def bias(self) -> Tensor:
        return self.table[self.slots()].permute(2, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        mixed = attend(q, k, v, scale=q.shape[-1] ** -0.5, bias=self.bias())
        out: Tensor = self.out(merged(mixed))
        return out


class SeerBlock(nn.Module):
    """A layer whose parts have a factor for each channel."""

    def __init__(self, layer: Any, size: int) -> None:
        super().__init__()
        self.n1, self.n2, self.see = layer.layernorm_before, layer.layernorm_after, Seer(layer, size)
        self.up, self.down = layer.mlp.fc1, layer.mlp.fc2
        self.gain_see, self.gain_feed = kept(layer.lambda_1), kept(layer.lambda_2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gain_see * self.see(self.n1(x))
        out: Tensor = x + self.gain_feed * self.down(functional.gelu(self.up(self.n2(x))))
        return out


class BeitPort(nn.Module):
    """BEiT with a classifier; patches are cut out and multiplied."""

    def __init__(self, reference: Any) -> None:
        super().__init__()
        inner = reference.beit
        e, conv = inner.embeddings, inner.embeddings.patch_embeddings.projection
        self.patch, self.cut = conv.kernel_size[0], linear(conv.weight.flatten(1), conv.bias)
        self.first, self.places = kept(e.cls_token), kept(e.position_embeddings)
        side = inner.embeddings.patch_embeddings.image_size[0] // self.patch
        self.blocks = nn.ModuleList([SeerBlock(layer, side) for layer in inner.layers])
        self.norm, self.labels = inner.pooler.layernorm, reference.classifier

    def patches(self, image: Tensor) -> Tensor:
        return functional.unfold(image, self.patch, stride=self.patch).transpose(1, 2)

    def pooled(self, x: Tensor) -> Tensor:
        return x[:, 1:].mean(1)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = self.cut(self.patches(pixel_values))
        x = torch.cat((self.first.expand(len(x), -1, -1), x), 1) + self.places
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.labels(self.norm(self.pooled(x)))
        return out


class SdpaSeer(Seer):
    """Attention by the library's function; its bias was looked up when it was made."""

    def __init__(self, layer: Any, size: int) -> None:
        super().__init__(layer, size)
        self.pairs = kept(self.bias())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        out: Tensor = self.out(
            merged(functional.scaled_dot_product_attention(q, k, v, attn_mask=self.pairs[None]))
        )
        return out


def beit_with_gains_folded(reference: Any) -> Any:
    """The factors of channels are in the weights before them, and biases of pairs are laid out."""
    port: Any = BeitPort(reference)
    with torch.no_grad():
        for block, layer in zip(port.blocks, reference.beit.layers, strict=True):
            block.see = SdpaSeer(layer, block.see.size)
            for gain, last in ((block.gain_see, block.see.out), (block.gain_feed, block.down)):
                last.weight *= gain[:, None]
                last.bias *= gain
                gain.fill_(1)
    return port


class Watcher(nn.Module):
    """A layer of the transformer."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        a = layer.attention.attention
        self.q, self.k, self.v, self.out = a.query, a.key, a.value, layer.attention.output.dense
        self.up, self.down = layer.intermediate.dense, layer.output.dense
        self.n1, self.n2, self.heads = layer.layernorm_before, layer.layernorm_after, a.num_attention_heads

    def forward(self, x: Tensor) -> Tensor:
        y = self.n1(x)
        q, k, v = (heads(part(y), self.heads) for part in (self.q, self.k, self.v))
        x = x + self.out(merged(attend(q, k, v, scale=q.shape[-1] ** -0.5)))
        out: Tensor = x + self.down(functional.gelu(self.up(self.n2(x))))
        return out


class Reassemble(nn.Module):
    """Tokens as a map of another size, each with what the class token says."""

    def __init__(self, readout: Any, layer: Any, conv: Any) -> None:
        super().__init__()
        self.read, self.project = readout[0], layer.projection
        self.resize, self.last = layer.resize, conv

    def joined(self, patches: Tensor, first: Tensor) -> Tensor:
        return torch.cat((patches, first.expand_as(patches)), -1)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.gelu(self.read(self.joined(x[:, 1:], x[:, :1])))
        side = round(y.shape[1] ** 0.5)
        grid = torch.unflatten(y.transpose(1, 2), -1, (side, side))
        out: Tensor = self.last(self.resize(self.project(grid)))
        return out


class ResidualUnit(nn.Module):
    """Two convolutions, each after ReLU."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.one, self.two = layer.convolution1, layer.convolution2

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.two(self.one(x.relu()).relu())
        return out


class Fusion(nn.Module):
    """A coarse map and a finer one, twice as large."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.side, self.main = ResidualUnit(layer.residual_layer1), ResidualUnit(layer.residual_layer2)
        self.project = layer.projection

    def grown(self, x: Tensor) -> Tensor:
        return functional.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)

    def forward(self, x: Tensor | None, finer: Tensor) -> Tensor:
        x = finer if x is None else x + self.side(finer)
        out: Tensor = self.project(self.grown(self.main(x)))
        return out


class DptPort(nn.Module):
    """DPT for depth."""

    def __init__(self, reference: Any) -> None:
        super().__init__()
        inner, neck = reference.dpt, reference.neck
        self.cut = inner.embeddings.patch_embeddings.projection
        self.first, self.places = kept(inner.embeddings.cls_token), kept(inner.embeddings.position_embeddings)
        self.blocks = nn.ModuleList([Watcher(layer) for layer in inner.encoder.layer])
        stage = neck.reassemble_stage
        self.maps = nn.ModuleList(
            [
                Reassemble(*parts)
                for parts in zip(stage.readout_projects, stage.layers, neck.convs, strict=True)
            ]
        )
        self.fuse = nn.ModuleList([Fusion(layer) for layer in neck.fusion_stage.layers])
        head = reference.head.head
        self.shrink, self.smooth, self.depth = head[0], head[2], head[4]

    def grid(self, height: int, width: int) -> Tensor:
        """Places of patches, resized to as many as the image has."""
        side = round((self.places.shape[1] - 1) ** 0.5)
        grid = torch.unflatten(self.places[:, 1:].transpose(1, 2), -1, (side, side))
        grid = functional.interpolate(grid, (height, width), mode="bilinear", align_corners=False)
        return torch.cat((self.places[:, :1], grid.flatten(2).transpose(1, 2)), 1)

    def embed(self, image: Tensor) -> Tensor:
        cut: Tensor = self.cut(image)
        patches = torch.cat((self.first.expand(len(cut), -1, -1), cut.flatten(2).transpose(1, 2)), 1)
        return patches + self.grid(*cut.shape[2:])

    def features(self, x: Tensor) -> list[Tensor]:
        """The maps of the four layers, the finest first."""
        features = []
        for block, mapped in zip(self.blocks, self.maps, strict=True):
            x = block(x)
            features.append(mapped(x))
        return features

    def forward(self, pixel_values: Tensor) -> Tensor:
        features, y = self.features(self.embed(pixel_values)), None
        for fuse, feature in zip(self.fuse, features[::-1], strict=True):
            y = fuse(y, feature)
        y = functional.interpolate(self.shrink(y), scale_factor=2, mode="bilinear", align_corners=True)
        out: Tensor = self.depth(self.smooth(y).relu()).relu()[:, 0]
        return out


class PartedReassemble(Reassemble):
    """The product with the class token is added to that with the patches."""

    def forward(self, x: Tensor) -> Tensor:
        weight, width = self.read.weight, x.shape[-1]
        y = x[:, 1:] @ weight[:, :width].T + (x[:, :1] @ weight[:, width:].T + self.read.bias)
        y = functional.gelu(y)
        side = round(y.shape[1] ** 0.5)
        grid = torch.unflatten(y.transpose(1, 2), -1, (side, side))
        out: Tensor = self.last(self.resize(self.project(grid)))
        return out


def dpt_with_readout_in_parts(reference: Any) -> Any:
    """The class token is projected once, rather than with each patch."""
    port: Any = DptPort(reference)
    for mapped in port.maps:
        mapped.__class__ = PartedReassemble
    return port
