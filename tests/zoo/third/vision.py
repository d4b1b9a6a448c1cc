"""Ports of vision models: ConvNeXt with channels last, SegFormer with its batch norm folded, SigLIP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.third.parts import attend, fused, heads, kept, linear, merged


class Depthwise(nn.Module):
    """A depthwise convolution of (batch, height, width, channels)."""

    def __init__(self, convolution: Any) -> None:
        super().__init__()
        self.kernel = kept(convolution.weight[:, 0].permute(1, 2, 0))
        self.offset = kept(convolution.bias)

    def bordered(self, x: Tensor, edge: int) -> Tensor:
        return functional.pad(x, (0, 0, edge, edge, edge, edge))

    def forward(self, x: Tensor) -> Tensor:
        weight, edge = self.kernel.permute(2, 0, 1)[:, None], self.kernel.shape[0] // 2
        y = self.bordered(x, edge).permute(0, 3, 1, 2)
        return functional.conv2d(y, weight, self.offset, groups=y.shape[1]).permute(0, 2, 3, 1)


class Squares(nn.Module):
    """A convolution of squares that do not overlap, as a linear over them; channels last."""

    def __init__(self, convolution: Any) -> None:
        super().__init__()
        self.size = convolution.kernel_size[0]
        self.project = linear(convolution.weight.permute(0, 2, 3, 1).flatten(1), convolution.bias)

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.unflatten(torch.unflatten(x, 1, (-1, self.size)), 3, (-1, self.size))
        out: Tensor = self.project(parts.transpose(2, 3).flatten(3))
        return out


class NextBlock(nn.Module):
    """A block of ConvNeXt."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.spatial = Depthwise(layer.dwconv)
        self.norm = nn.LayerNorm(layer.layernorm.weight.shape, layer.layernorm.eps)
        self.norm.weight, self.norm.bias = layer.layernorm.weight, layer.layernorm.bias
        self.expand, self.act, self.shrink = layer.pwconv1, nn.GELU(), layer.pwconv2
        self.gain = kept(layer.layer_scale_parameter)

    def branch(self, x: Tensor) -> Tensor:
        out: Tensor = self.gain * self.shrink(self.act(self.expand(self.norm(self.spatial(x)))))
        return out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class LastNorm(nn.Module):
    """A layer norm of channels that are last."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.gain, self.offset, self.eps = kept(norm.weight), kept(norm.bias), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.gain.shape, self.gain, self.offset, self.eps)


class NextStage(nn.Module):
    """A stage of ConvNeXt."""

    def __init__(self, norm: Any, convolution: Any, layers: Any, *, norm_first: bool) -> None:
        super().__init__()
        self.norm, self.merge = LastNorm(norm), Squares(convolution)
        self.blocks, self.norm_first = nn.ModuleList([NextBlock(x) for x in layers]), norm_first

    def smaller(self, x: Tensor) -> Tensor:
        out: Tensor = self.merge(self.norm(x)) if self.norm_first else self.norm(self.merge(x))
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = self.smaller(x)
        for block in self.blocks:
            x = block(x)
        return x


class NextPort(nn.Module):
    """ConvNeXt with channels last throughout; the embeddings are part of the first stage."""

    def __init__(self, reference: Any) -> None:
        super().__init__()
        inner = reference.convnext
        first, stages = inner.embeddings, inner.encoder.stages
        pairs = [(first.layernorm, first.patch_embeddings), *(s.downsampling_layer for s in stages[1:])]
        self.body = nn.ModuleList(
            [
                NextStage(norm, convolution, stage.layers, norm_first=at > 0)
                for at, ((norm, convolution), stage) in enumerate(zip(pairs, stages, strict=True))
            ]
        )
        self.norm, self.labels = LastNorm(inner.layernorm), reference.classifier

    def pooled(self, x: Tensor) -> Tensor:
        return x.mean((1, 2))

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = pixel_values.permute(0, 2, 3, 1)
        for stage in self.body:
            x = stage(x)
        out: Tensor = self.labels(self.norm(self.pooled(x)))
        return out


def convnext_scales_folded(model: Any) -> Any:
    """The scales of layers multiplied into the linears before them; they themselves are 1."""
    with torch.no_grad():
        for stage in model.convnext.encoder.stages:
            for layer in stage.layers:
                layer.pwconv2.weight.mul_(layer.layer_scale_parameter[:, None])
                layer.pwconv2.bias.mul_(layer.layer_scale_parameter)
                layer.layer_scale_parameter.fill_(1)
    return model


class SegMixer(nn.Module):
    """Attention whose keys and values are of a smaller map."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.q, self.kv, self.out = (
            attention.q_proj,
            fused(attention.k_proj, attention.v_proj),
            attention.o_proj,
        )
        self.heads, self.scale = attention.num_attention_heads, attention.scaling
        reduction = getattr(attention, "sequence_reduction", None)
        self.reduce = None if reduction is None else reduction.sequence_reduction
        self.reduce_norm = None if reduction is None else reduction.layer_norm

    def fewer(self, x: Tensor) -> Tensor:
        if self.reduce is None or self.reduce_norm is None:
            return x.flatten(1, 2)
        out: Tensor = self.reduce_norm(self.reduce(x.permute(0, 3, 1, 2)).flatten(2).transpose(1, 2))
        return out

    def forward(self, x: Tensor) -> Tensor:
        q = heads(self.q(x.flatten(1, 2)), self.heads)
        k, v = (heads(part, self.heads) for part in self.kv(self.fewer(x)).chunk(2, -1))
        out: Tensor = self.out(merged(attend(q, k, v, scale=self.scale)))
        return out.view_as(x)


class SegFeed(nn.Module):
    """A feed-forward with a depthwise convolution."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.expand, self.spatial, self.shrink = mlp.fc1, Depthwise(mlp.dwconv.dwconv), mlp.fc2

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.shrink(functional.gelu(self.spatial(self.expand(x))))
        return out


class SegBlock(nn.Module):
    """A block of SegFormer, channels last."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.norm_a, self.norm_f = layer.layernorm_before, layer.layernorm_after
        self.mixer, self.feed = SegMixer(layer.attention), SegFeed(layer.mlp)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm_a(x))
        out: Tensor = x + self.feed(self.norm_f(x))
        return out


class SegStage(nn.Module):
    """A stage of SegFormer."""

    def __init__(self, stage: Any) -> None:
        super().__init__()
        self.patch, self.patch_norm = stage.patch_embeddings.proj, stage.patch_embeddings.layer_norm
        self.blocks = nn.ModuleList([SegBlock(x) for x in stage.blocks])
        self.norm = stage.layer_norm

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_norm(self.patch(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.norm(x)
        return out


class SegHead(nn.Module):
    """The decoder, its batch norm folded into the convolution before it."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.levels = nn.ModuleList([projection.proj for projection in head.linear_projections])
        norm = head.batch_norm
        gain = norm.weight / torch.sqrt(norm.running_var + norm.eps)
        weight = head.linear_fuse.weight[:, :, 0, 0] * gain[:, None]
        self.mix = linear(weight, norm.bias - norm.running_mean * gain)
        self.deviation, self.shift = norm.running_var.detach().sqrt(), norm.bias.detach().clone()
        self.label = linear(head.classifier.weight[:, :, 0, 0], head.classifier.bias)

    def larger(self, x: Tensor, size: Any) -> Tensor:
        y = functional.interpolate(x.permute(0, 3, 1, 2), size=size, mode="bilinear", align_corners=False)
        return y.permute(0, 2, 3, 1)

    def joined(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts[::-1], -1)

    def forward(self, maps: list[Tensor]) -> Tensor:
        size = maps[0].shape[1:3]
        parts = [self.larger(f(x), size) for f, x in zip(self.levels, maps, strict=True)]
        out: Tensor = self.label(functional.relu(self.mix(self.joined(parts))))
        return out.permute(0, 3, 1, 2)


class SegPort(nn.Module):
    """SegFormer."""

    def __init__(self, reference: Any) -> None:
        super().__init__()
        self.encode = nn.ModuleList([SegStage(x) for x in reference.segformer.stages])
        self.decode = SegHead(reference.decode_head)

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        x, maps = pixel_values.permute(0, 2, 3, 1), []
        for stage in self.encode:
            x = stage(x)
            maps.append(x)
        return {"logits": self.decode(maps)}


def segformer_channels_last(model: Any) -> Any:
    """The model itself, its convolutions stored with channels last."""
    return model.to(memory_format=torch.channels_last)


class TowerBlock(nn.Module):
    """A layer of either tower of SigLIP."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        a, m = layer.self_attn, layer.mlp
        self.norm1, self.qkv = layer.layer_norm1, fused(a.q_proj, a.k_proj, a.v_proj)
        self.proj, self.heads = a.out_proj, a.num_heads
        self.norm2, self.up, self.down = layer.layer_norm2, m.fc1, m.fc2

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = (heads(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        out: Tensor = self.proj(merged(functional.scaled_dot_product_attention(q, k, v)))
        return out

    def act(self, x: Tensor) -> Tensor:
        return functional.gelu(x, approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm1(x))
        out: Tensor = x + self.down(self.act(self.up(self.norm2(x))))
        return out


class TextTower(nn.Module):
    """The tower of texts."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.words, self.places = tower.embeddings.token_embedding, tower.embeddings.position_embedding
        self.blocks = nn.ModuleList([TowerBlock(x) for x in tower.encoder.layers])
        self.norm, self.project = tower.final_layer_norm, tower.head

    def pool(self, x: Tensor) -> Tensor:
        return x[:, -1]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.project(self.pool(self.norm(x)))
        return out


class ProbePool(nn.Module):
    """Attention of one learned query to all patches, and a feed-forward."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        inner = head.attention
        (wq, wk, wv), (bq, bk, bv) = inner.in_proj_weight.chunk(3), inner.in_proj_bias.chunk(3)
        self.query = kept(functional.linear(head.probe, wq, bq))
        self.key, self.value = linear(wk, bk), linear(wv, bv)
        self.out = linear(inner.out_proj.weight, inner.out_proj.bias)
        self.heads, self.norm = inner.num_heads, head.layernorm
        self.up, self.down = head.mlp.fc1, head.mlp.fc2

    def finish(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(functional.gelu(self.up(self.norm(x)), approximate="tanh"))
        return out

    def forward(self, x: Tensor) -> Tensor:
        q = heads(self.query.expand(x.shape[0], -1, -1), self.heads)
        k, v = heads(self.key(x), self.heads), heads(self.value(x), self.heads)
        y = self.out(merged(attend(q, k, v, scale=q.shape[-1] ** -0.5)))
        return self.finish(y)[:, 0]


class ImageTower(nn.Module):
    """The tower of images."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.patches, self.places = (
            Squares(tower.embeddings.patch_embedding),
            tower.embeddings.position_embedding,
        )
        self.blocks = nn.ModuleList([TowerBlock(x) for x in tower.encoder.layers])
        self.norm, self.pool = tower.post_layernorm, ProbePool(tower.head)

    def flat(self, x: Tensor) -> Tensor:
        return x.flatten(1, 2)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.flat(self.patches(pixels.permute(0, 2, 3, 1))) + self.places.weight
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.pool(self.norm(x))
        return out


class SiglipPort(nn.Module):
    """SigLIP."""

    def __init__(self, reference: Any) -> None:
        super().__init__()
        self.text, self.image = TextTower(reference.text_model), ImageTower(reference.vision_model)
        self.log_scale, self.offset = kept(reference.logit_scale), kept(reference.logit_bias)

    def unit(self, x: Tensor) -> Tensor:
        return functional.normalize(x, dim=-1)

    def scores(self, text: Tensor, image: Tensor) -> Tensor:
        return (text @ image.T) * self.log_scale.exp() + self.offset

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> dict[str, Tensor]:
        text, image = self.unit(self.text(input_ids)), self.unit(self.image(pixel_values))
        per_text = self.scores(text, image)
        return {
            "logits_per_image": per_text.T,
            "logits_per_text": per_text,
            "text_embeds": text,
            "image_embeds": image,
        }
