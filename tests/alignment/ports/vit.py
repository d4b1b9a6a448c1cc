"""ViT with timm's names: queries, keys and values fused, and a class token that holds its place."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tensorcap_formats.dtypes import Array
from tests.alignment.ports.parts import HEADS, INNER, WIDTH, Weights, attend, dense, drawn, heads, layer_norm
from tests.alignment.ports.truth import LAYERS, Pair, Port, Truth


class PatchEmbed(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, WIDTH, 8, 8)
        self.proj.load_state_dict({"weight": w[f"{at}.weight"], "bias": w[f"{at}.bias"]})

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.proj(x)
        return out.flatten(2).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.qkv = dense(w, f"{at}.q_proj", f"{at}.k_proj", f"{at}.v_proj")
        self.proj = dense(w, f"{at}.o_proj")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(part, HEADS) for part in self.qkv(x).chunk(3, -1))
        out: Tensor = self.proj(attend(q, k, v, 8**-0.5))
        return out


class Mlp(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.fc1 = dense(w, f"{at}.fc1")
        self.act = nn.GELU()
        self.fc2 = dense(w, f"{at}.fc2")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.act(self.fc1(x)))
        return out


class Block(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.norm1 = layer_norm(w, f"{at}.layernorm_before", 1e-12)
        self.attn = Attention(w, f"{at}.attention")
        self.ls1 = nn.Identity()
        self.norm2 = layer_norm(w, f"{at}.layernorm_after", 1e-12)
        self.mlp = Mlp(w, f"{at}.mlp")
        self.ls2 = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        out: Tensor = x + self.ls2(self.mlp(self.norm2(x)))
        return out


class VisionTransformer(nn.Module):
    def __init__(self, w: Weights) -> None:
        super().__init__()
        positions = w["vit.embeddings.position_embeddings"]
        self.cls_token = nn.Parameter(w["vit.embeddings.cls_token"] + positions[:, :1])
        self.pos_embed = nn.Parameter(positions[:, 1:].clone())
        self.patch_embed = PatchEmbed(w, "vit.embeddings.patch_embeddings.projection")
        self.norm_pre = nn.Identity()
        self.blocks = nn.Sequential(*(Block(w, f"vit.layers.{i}") for i in range(LAYERS)))
        self.norm = layer_norm(w, "vit.layernorm", 1e-12)
        self.head = dense(w, "classifier")

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch_embed(x) + self.pos_embed
        tokens = torch.cat([self.cls_token.expand(len(x), -1, -1), patches], 1)
        logits: Tensor = self.head(self.norm(self.blocks(self.norm_pre(tokens)))[:, 0])
        return logits


def reference() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "image_size": 32, "patch_size": 8}
    counts = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_labels": 5}
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return drawn("ViTForImageClassification", "ViTConfig", 8, **sizes, **counts), {"pixel_values": pixels}


def target(w: Weights, inputs: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    return VisionTransformer(w), {"x": inputs["pixel_values"]}


def _parts(x: Array) -> list[Array]:
    return np.split(x, 3, axis=-1)


LAYER, OTHER = "vit.layers.{i}", "blocks.{i}"
PORT = Port(
    "vit",
    reference,
    target,
    Truth(
        pairs=(
            Pair("@root/output.logits", "@root/output"),
            Pair("classifier", "head"),
            Pair("vit.embeddings.patch_embeddings.projection", "patch_embed.proj"),
            Pair("vit.embeddings.patch_embeddings", "patch_embed"),
            Pair("vit.layernorm", "norm"),
            Pair(f"{LAYER}.layernorm_before", f"{OTHER}.norm1"),
            Pair(
                (f"{LAYER}.attention.q_proj", f"{LAYER}.attention.k_proj", f"{LAYER}.attention.v_proj"),
                f"{OTHER}.attn.qkv",
                _parts,
            ),
            Pair(f"{LAYER}.attention.o_proj", f"{OTHER}.attn.proj"),
            Pair(f"{LAYER}.attention/output.0", f"{OTHER}.attn"),
            Pair(f"{LAYER}.layernorm_after", f"{OTHER}.norm2"),
            Pair(f"{LAYER}.mlp.fc1", f"{OTHER}.mlp.fc1"),
            Pair(f"{LAYER}.mlp.activation_fn", f"{OTHER}.mlp.act"),
            Pair(f"{LAYER}.mlp.fc2", f"{OTHER}.mlp.fc2"),
            Pair(f"{LAYER}.mlp", f"{OTHER}.mlp"),
            Pair(LAYER, OTHER),
        ),
        extras=(Pair("vit.embeddings", "norm_pre"),),
        alike={
            "vit/output.last_hidden_state": "vit.layernorm",
            "vit.embeddings.dropout": "vit.embeddings",
            f"{LAYER}.dropout": f"{LAYER}.attention.o_proj",
            f"{LAYER}.dropout@1": f"{LAYER}.mlp.fc2",
            f"{OTHER}.ls1": f"{OTHER}.attn.proj",
            f"{OTHER}.ls2": f"{OTHER}.mlp.fc2",
            "blocks": "blocks.2",
        },
    ),
)
