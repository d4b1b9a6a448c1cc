"""A vision transformer, and what becomes of it in other hands."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification

from tests.rewrites.catalogue import BFLOAT16, FLOAT16, Family, Run, random_model
from tests.rewrites.layers import (
    Weights,
    attention,
    join_heads,
    layer_norm_of,
    linear,
    linear_of,
    split_heads,
)

LAYERS, HEADS, SIZE, WIDE, PATCH, IMAGE, CLASSES = 3, 4, 48, 96, 8, 32, 11
PIXELS: Final = torch.randn(3, 3, IMAGE, IMAGE, generator=torch.Generator().manual_seed(1))
EPS: Final = 1e-12


def model(implementation: str = "sdpa") -> Any:
    return random_model(
        ViTForImageClassification,
        ViTConfig,
        hidden_size=SIZE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=WIDE,
        patch_size=PATCH,
        image_size=IMAGE,
        num_labels=CLASSES,
        attn_implementation=implementation,
    )


def run_of(port: Any) -> Run:
    return Run(port, {"pixel_values": PIXELS})


def reference() -> Run:
    return run_of(model())


FAMILY: Final = Family("vit", reference)


@FAMILY.correct("eager attention in the place of sdpa")
def eager_attention() -> Run:
    return run_of(model("eager"))


@FAMILY.correct("the same in float16", tolerance=FLOAT16)
def float16() -> Run:
    return Run(model().half(), {"pixel_values": PIXELS.half()})


@FAMILY.correct("the same in bfloat16, fed float32", tolerance=BFLOAT16)
def bfloat16() -> Run:
    return run_of(model().bfloat16())


@FAMILY.correct("pixels in channels-last memory")
def channels_last_memory() -> Run:
    return Run(
        model().to(memory_format=torch.channels_last),
        {"pixel_values": PIXELS.contiguous(memory_format=torch.channels_last)},
    )


@FAMILY.correct("one image of the batch", reference_view=lambda logits: logits[2:3])
def one_image() -> Run:
    return Run(model(), {"pixel_values": PIXELS[2:3]})


@FAMILY.correct("the backbone alone with a head outside, bare logits")
def backbone_and_head() -> Run:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            port = model()
            self.backbone, self.head = port.vit, port.classifier

        def forward(self, images: Tensor) -> Tensor:
            logits: Tensor = self.head(self.backbone(images).last_hidden_state[:, 0])
            return logits

    return Run(Classifier().eval(), (PIXELS,))


@FAMILY.correct("each MLP compiled")
def compiled_mlps() -> Run:
    port = model()
    for layer in port.vit.layers:
        layer.mlp = torch.compile(layer.mlp, backend="eager")
    return run_of(port)


@FAMILY.correct("two models one after the other: the mean of two copies", reference=reference)
def ensemble_of_copies() -> Run:
    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.members = nn.ModuleList([model(), model()])

        def forward(self, pixel_values: Tensor) -> Tensor:
            return torch.stack([member(pixel_values).logits for member in self.members]).mean(0)

    return run_of(Ensemble().eval())


class PatchLinear(nn.Module):
    """The convolution of patches as a product: its stride is its size."""

    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.proj = linear(w[f"{at}.weight"].flatten(1), w[f"{at}.bias"])
        self.transposes = False

    def forward(self, images: Tensor) -> Tensor:
        patches = images.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)  # batch, channel, row, column, patch
        if self.transposes:
            patches = patches.transpose(2, 3)
        out: Tensor = self.proj(patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2))
        return out


class PatchConvolution(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, SIZE, PATCH, PATCH)
        self.proj.weight, self.proj.bias = nn.Parameter(w[f"{at}.weight"]), nn.Parameter(w[f"{at}.bias"])

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.proj(images).flatten(2).transpose(1, 2)
        return out


class Attention(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.qkv, self.proj = (
            linear_of(w, *(f"{at}.{name}_proj" for name in "qkv")),
            linear_of(w, f"{at}.o_proj"),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(part, HEADS) for part in self.qkv(x).chunk(3, -1))
        out: Tensor = self.proj(join_heads(attention(q, k, v)))
        return out


class Mlp(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = linear_of(w, f"{at}.fc1"), nn.GELU(), linear_of(w, f"{at}.fc2")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.act(self.fc1(x)))
        return out


class Block(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = (
            layer_norm_of(w, f"{at}.layernorm_{name}", EPS) for name in ("before", "after")
        )
        self.attn, self.mlp = Attention(w, f"{at}.attention"), Mlp(w, f"{at}.mlp")
        self.drop_path = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x)))
        out: Tensor = x + self.drop_path(self.mlp(self.norm2(x)))
        return out


class TimmLike(nn.Module):
    def __init__(self, w: Weights, patches: type[nn.Module] = PatchConvolution) -> None:
        super().__init__()
        self.patch_embed = patches(w, "vit.embeddings.patch_embeddings.projection")
        self.cls_token = nn.Parameter(w["vit.embeddings.cls_token"])
        self.pos_embed = nn.Parameter(w["vit.embeddings.position_embeddings"])
        self.blocks = nn.Sequential(*(Block(w, f"vit.layers.{i}") for i in range(LAYERS)))
        self.norm, self.head = layer_norm_of(w, "vit.layernorm", EPS), linear_of(w, "classifier")
        self.pools_mean = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        x = self.norm(self.blocks(x))
        logits: Tensor = self.head(x[:, 1:].mean(1) if self.pools_mean else x[:, 0])
        return logits


def timm_like(patches: type[nn.Module] = PatchConvolution) -> Any:
    return TimmLike(model().state_dict(), patches).eval()


@FAMILY.correct("as in timm: fused projections, an identity for each dropped path")
def as_in_timm() -> Run:
    return Run(timm_like(), (PIXELS,))


@FAMILY.correct("as in timm, with patches by a linear layer")
def patches_by_linear() -> Run:
    return Run(timm_like(PatchLinear), (PIXELS,))


@FAMILY.correct("channels last, as in Flax: images of [batch, height, width, channel]")
def images_channels_last() -> Run:
    class Flax(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = timm_like()

        def forward(self, images: Tensor) -> Tensor:
            logits: Tensor = self.module(images.permute(0, 3, 1, 2))
            return logits

    return Run(Flax().eval(), (PIXELS.permute(0, 2, 3, 1).contiguous(),))


@FAMILY.correct("as in timm, in bfloat16", tolerance=BFLOAT16)
def timm_bfloat16() -> Run:
    return Run(timm_like().bfloat16(), (PIXELS.bfloat16(),))


@FAMILY.mistake(
    "patches counted by columns", guilty="vit.embeddings.patch_embeddings", beside=patches_by_linear
)
def patches_by_columns() -> Run:
    port = timm_like(PatchLinear)
    port.patch_embed.transposes = True
    return Run(port, (PIXELS,))


@FAMILY.mistake("positions shifted by the class token", guilty="vit.embeddings", beside=as_in_timm)
def positions_shifted() -> Run:
    port = timm_like()
    port.pos_embed = nn.Parameter(port.pos_embed.detach().roll(1, 1))
    return Run(port, (PIXELS,))


@FAMILY.mistake("the mean of patches in the place of the class token", guilty="classifier", beside=as_in_timm)
def mean_of_patches() -> Run:
    port = timm_like()
    port.pools_mean = True
    return Run(port, (PIXELS,))


@FAMILY.mistake("no bias of the queries", guilty="vit.layers.1.attention.q_proj", beside=as_in_timm)
def bias_missing() -> Run:
    port = timm_like()
    with torch.no_grad():
        port.blocks[1].attn.qkv.bias[:SIZE] = 0
    return Run(port, (PIXELS,))


@FAMILY.mistake(
    "colours in the order blue, green, red",
    guilty="vit.embeddings.patch_embeddings.projection",
    beside=eager_attention,
)
def colours_reversed() -> Run:
    port = model("eager")
    weight = port.vit.embeddings.patch_embeddings.projection.weight
    with torch.no_grad():
        weight.copy_(weight.flip(1))
    return run_of(port)


@FAMILY.mistake(
    "in float16, a square weight transposed", guilty="vit.layers.2.attention.v_proj", beside=float16
)
def square_weight_transposed() -> Run:
    port = model()
    layer = port.vit.layers[2].attention.v_proj
    layer.weight = nn.Parameter(layer.weight.detach().T.clone())
    return Run(port.half(), {"pixel_values": PIXELS.half()})


@FAMILY.mistake(
    "SiLU in the place of GELU, in bfloat16", guilty="vit.layers.1.mlp.activation_fn", beside=bfloat16
)
def silu() -> Run:
    port = model()
    port.vit.layers[1].mlp.activation_fn = nn.SiLU()
    port.vit.layers[2].mlp.activation_fn = nn.SiLU()
    return run_of(port.bfloat16())


@FAMILY.mistake(
    "height and width swapped on the way from channels last",
    guilty="vit.embeddings",
    beside=images_channels_last,
)
def height_and_width_swapped() -> Run:
    class Flax(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = timm_like()

        def forward(self, images: Tensor) -> Tensor:
            logits: Tensor = self.module(images.permute(0, 3, 2, 1))
            return logits

    return Run(Flax().eval(), (PIXELS.permute(0, 2, 3, 1).contiguous(),))
