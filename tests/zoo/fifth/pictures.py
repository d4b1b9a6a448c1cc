"""Ports and changes of models of pictures: MobileViT, deformable DETR, CLIPSeg."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.planting import override, put
from tests.zoo.third.parts import attend, fused, heads, kept, linear, merged


class Cell(nn.Module):
    """A convolution with the statistics of the norm in it, and an activation."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        conv, norm = layer.convolution, layer.normalization
        self.stride, self.groups = conv.stride, conv.groups
        self.pads = [conv.padding[1]] * 2 + [conv.padding[0]] * 2
        if norm is None:
            self.kernel, self.shift = kept(conv.weight), None
        else:
            gain = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
            self.kernel = kept(conv.weight * gain[:, None, None, None])
            self.shift = kept(norm.bias - norm.running_mean * gain)
        self.active = layer.activation is not None

    def forward(self, x: Tensor) -> Tensor:
        x = functional.pad(x, self.pads)
        x = functional.conv2d(x, self.kernel, self.shift, self.stride, groups=self.groups)
        return functional.silu(x) if self.active else x


class Inverted(nn.Module):
    """Wider, each channel by itself, narrower."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.cells = nn.Sequential(Cell(layer.expand_1x1), Cell(layer.conv_3x3), Cell(layer.reduce_1x1))
        self.adds = layer.use_residual

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.cells(x)
        return x + y if self.adds else y


class PixelBlock(nn.Module):
    """A layer of a transformer."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        inner = layer.attention.attention
        self.pre_mix, self.pre_feed = layer.layernorm_before, layer.layernorm_after
        self.qkv, self.out = fused(inner.query, inner.key, inner.value), layer.attention.output.dense
        self.grow, self.shrink = layer.intermediate.dense, layer.output.dense
        self.count = inner.num_attention_heads

    def mixed(self, x: Tensor) -> Tensor:
        q, k, v = (heads(part, self.count) for part in self.qkv(x).chunk(3, -1))
        out: Tensor = self.out(merged(attend(q, k, v, scale=q.shape[-1] ** -0.5)))
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixed(self.pre_mix(x))
        out: Tensor = x + self.shrink(functional.silu(self.grow(self.pre_feed(x))))
        return out


class PixelLayer(nn.Module):
    """Local by convolutions, global by attention of the pixels that lie alike in their patches."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.less, self.size = Inverted(layer.downsampling_layer), layer.patch_width
        self.near, self.widen = Cell(layer.conv_kxk), Cell(layer.conv_1x1)
        self.blocks = nn.Sequential(*(PixelBlock(block) for block in layer.transformer.layer))
        self.norm = layer.layernorm
        self.narrow, self.fuse = Cell(layer.conv_projection), Cell(layer.fusion)

    def resized(self, x: Tensor, height: int, width: int) -> Tensor:
        if tuple(x.shape[2:]) == (height, width):
            return x
        return functional.interpolate(x, size=(height, width), mode="bilinear", align_corners=False)

    def apart(self, x: Tensor) -> Tensor:
        """Pixels (batch * place in the patch, patches, channels)."""
        rows, columns = x.shape[2] // self.size, x.shape[3] // self.size
        parts = torch.unflatten(torch.unflatten(x, 3, (columns, self.size)), 2, (rows, self.size))
        return parts.permute(0, 3, 5, 2, 4, 1).flatten(3, 4).flatten(0, 2)

    def together(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """The inverse."""
        parts = torch.unflatten(torch.unflatten(x, 0, (-1, self.size, self.size)), 3, (rows, columns))
        return parts.permute(0, 5, 3, 1, 4, 2).flatten(4, 5).flatten(2, 3)

    def fused(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.fuse(torch.cat((x, y), 1))
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = self.less(x)
        height, width = x.shape[2:]
        rows, columns = -(-height // self.size), -(-width // self.size)
        y = self.resized(self.widen(self.near(x)), rows * self.size, columns * self.size)
        y = self.together(self.norm(self.blocks(self.apart(y))), rows, columns)
        return self.fused(x, self.narrow(self.resized(y, height, width)))


class MobilePort(nn.Module):
    """MobileViT, the statistics of its norms in the convolutions."""

    def __init__(self, reference: Any) -> None:
        super().__init__()
        inner = reference.mobilevit
        layers = inner.encoder.layer
        self.stem = Cell(inner.conv_stem)
        self.early = nn.Sequential(*(Inverted(block) for stage in layers[:2] for block in stage.layer))
        self.late = nn.Sequential(*(PixelLayer(layer) for layer in layers[2:]))
        self.wide, self.labels = Cell(inner.conv_1x1_exp), reference.classifier

    def pooled(self, x: Tensor) -> Tensor:
        out: Tensor = self.wide(x)
        return out.mean((2, 3))

    def forward(self, pixel_values: Tensor) -> Tensor:
        out: Tensor = self.labels(self.pooled(self.late(self.early(self.stem(pixel_values)))))
        return out


class ColumnsFirst(PixelLayer):
    """The places in a patch in another order, there and back."""

    def apart(self, x: Tensor) -> Tensor:
        return super().apart(x.transpose(2, 3)).contiguous()

    def together(self, x: Tensor, rows: int, columns: int) -> Tensor:
        return super().together(x, columns, rows).transpose(2, 3)


def mobilevit_columns_first(reference: Any) -> Any:
    """Patches and their pixels column by column."""
    port = MobilePort(reference)
    layers = reference.mobilevit.encoder.layer[2:]
    port.late = nn.Sequential(*(ColumnsFirst(layer) for layer in layers))
    return port


def mobilevit_pointwise_as_linear(reference: Any) -> Any:
    """Convolutions of one pixel as products of channels, by einsum."""

    def product(self: Any, input: Tensor) -> Tensor:
        out = torch.einsum("bchw,dc->bdhw", input, self.weight.flatten(1))
        return out if self.bias is None else out + self.bias[:, None, None]

    for module in reference.modules():
        if isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1):
            override(module, product)
    return reference


class Bilinear(nn.Module):
    """Samples of maps, each the sum of four pixels that are gathered by index."""

    def forward(
        self, value: Tensor, _: Any, shapes: Any, __: Any, places: Tensor, weights: Tensor, ___: int
    ) -> Tensor:
        batch, _length, count, size = value.shape
        levels = torch.split(value, [height * width for height, width in shapes], 1)
        total = torch.zeros(batch, places.shape[1], count, size, dtype=value.dtype)
        for at, (height, width) in enumerate(shapes):
            pixels = levels[at].permute(0, 2, 1, 3)  # batch, heads, pixels, channels
            x = places[:, :, :, at, :, 0] * width - 0.5
            y = places[:, :, :, at, :, 1] * height - 0.5
            for down in (0, 1):
                for right in (0, 1):
                    row, column = y.floor() + down, x.floor() + right
                    share = (1 - (y - row).abs()) * (1 - (x - column).abs())
                    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
                    index = (row.clamp(0, height - 1) * width + column.clamp(0, width - 1)).long()
                    index = index.permute(0, 2, 1, 3).flatten(2)  # batch, heads, queries * points
                    taken = pixels.gather(2, index[..., None].expand(-1, -1, -1, size))
                    taken = torch.unflatten(taken, 2, (places.shape[1], -1)).permute(0, 2, 1, 3, 4)
                    total = total + ((share * inside * weights[:, :, :, at])[..., None] * taken).sum(3)
        return total.flatten(2)


def detr_samples_by_index(reference: Any) -> Any:
    """Bilinear samples without the library's function."""
    for layer in (*reference.model.encoder.layers, *reference.model.decoder.layers):
        attention = layer.encoder_attn if hasattr(layer, "encoder_attn") else layer.self_attn
        attention.attn = Bilinear()
    return reference


def detr_with_statistics_folded(reference: Any) -> Any:
    """The frozen norms of the backbone in its convolutions."""
    for module in list(reference.model.backbone.modules()):
        norm = getattr(module, "normalization", None)
        if norm is None:
            continue
        conv = module.convolution
        gain = norm.weight * torch.rsqrt(norm.running_var + 1e-5)
        conv.weight = kept(conv.weight * gain[:, None, None, None])
        conv.bias = kept(norm.bias - norm.running_mean * gain)
        module.normalization = nn.Identity()
    return reference


class Both(nn.Module):
    """Offsets and weights of samples by one linear."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.both = fused(attention.sampling_offsets, attention.attention_weights)
        self.value, self.out, self.attn = attention.value_proj, attention.output_proj, attention.attn
        self.sizes = (attention.n_heads, attention.n_levels, attention.n_points)
        self.split = (attention.sampling_offsets.out_features,)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Any,
        position_embeddings: Tensor,
        reference_points: Tensor,
        spatial_shapes: Tensor,
        spatial_shapes_list: Any,
        level_start_index: Any,
    ) -> tuple[Tensor, Tensor]:
        offsets, weights = self.both(hidden_states + position_embeddings).tensor_split(self.split, -1)
        offsets = torch.unflatten(offsets, -1, (*self.sizes, 2))
        weights = torch.unflatten(weights, -1, (self.sizes[0], -1)).softmax(-1)
        weights = torch.unflatten(weights, -1, self.sizes[1:])
        middle = reference_points[:, :, None, :, None]
        if middle.shape[-1] == 2:
            places = middle + offsets / spatial_shapes.flip(-1)[:, None]
        else:
            places = middle[..., :2] + offsets * middle[..., 2:] * (0.5 / self.sizes[2])
        value = heads(self.value(encoder_hidden_states), self.sizes[0]) * attention_mask[:, None, :, None]
        sampled = self.attn(
            value.transpose(1, 2), spatial_shapes, spatial_shapes_list, level_start_index, places, weights, 64
        )
        return self.out(sampled), weights


def detr_with_offsets_and_weights_fused(reference: Any) -> Any:
    """One linear where the reference has two."""
    for layer in reference.model.encoder.layers:
        layer.self_attn = Both(layer.self_attn)
    for layer in reference.model.decoder.layers:
        layer.encoder_attn = Both(layer.encoder_attn)
    return reference


class Spread(nn.Module):
    """A transposed convolution whose patches do not overlap, as a linear and a rearrangement."""

    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.size, self.channels = conv.stride[0], conv.out_channels
        self.linear = linear(conv.weight.flatten(1).T, conv.bias.repeat_interleave(self.size**2))

    def forward(self, x: Tensor) -> Tensor:
        wide = self.linear(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return functional.pixel_shuffle(wide, self.size)


def clipseg_spread_by_linears(reference: Any) -> Any:
    """Transposed convolutions as linears."""
    for at in (2, 4):
        site = f"decoder.transposed_convolution.{at}"
        put(reference, site, Spread(reference.get_submodule(site)))
    return reference


class Flat(nn.Module):
    """Patches cut out by reshapes, and a linear, instead of a strided convolution."""

    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.weight, self.size = kept(conv.weight.permute(0, 2, 3, 1).flatten(1)), conv.kernel_size[0]

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = x.shape[2] // self.size, x.shape[3] // self.size
        cut = torch.unflatten(torch.unflatten(x, 3, (columns, self.size)), 2, (rows, self.size))
        return functional.linear(cut.permute(0, 2, 4, 3, 5, 1).flatten(3), self.weight).permute(0, 3, 1, 2)


def clipseg_patches_by_a_linear(reference: Any) -> Any:
    """The first convolution as a linear over channels-last patches."""
    site = "clip.vision_model.embeddings.patch_embedding"
    put(reference, site, Flat(reference.get_submodule(site)))
    return reference


class Fused(nn.Module):
    """Queries, keys and values by one linear, the scale in the weights of queries."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.count = attention.num_heads
        query = copy.deepcopy(attention.q_proj)
        with torch.no_grad():
            query.weight *= attention.scale
            query.bias *= attention.scale
        self.qkv, self.out_proj = fused(query, attention.k_proj, attention.v_proj), attention.out_proj

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, **_: Any) -> tuple[Tensor, None]:
        q, k, v = (heads(part, self.count) for part in self.qkv(hidden_states).chunk(3, -1))
        return self.out_proj(merged(attend(q, k, v, scale=1.0))), None


def clipseg_fused_without_mask(reference: Any) -> Any:
    """Attention of the tower of pictures and of the decoder, which need no mask, with one linear."""
    for layer in (*reference.clip.vision_model.encoder.layers, *reference.decoder.layers):
        layer.self_attn = Fused(layer.self_attn)
    return reference
