"""T5 as a scan over stacked layers: one record of (layer, …) for each place, position biases moved out."""

from __future__ import annotations

from typing import Any

import einops
import torch
from torch import Tensor, nn

from tensorcap_formats.dtypes import Array
from tests.alignment.ports.parts import (
    HEAD,
    HEADS,
    IDS,
    INNER,
    VOCAB,
    WIDTH,
    RMSNorm,
    Weights,
    drawn,
    embedding,
    linear,
    parted,
)
from tests.alignment.ports.truth import LAYERS, Pair, Port, Truth


class Scanned(nn.Module):
    """A place in the body of a scan: its weights, and what it gave, on top of each other."""

    def __init__(self, *weights: Tensor) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.stack(weights))
        self.kept: list[Tensor] = []

    def keep(self, x: Tensor) -> Tensor:
        self.kept.append(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return x


class Norm(Scanned):
    def step(self, x: Tensor, i: int) -> Tensor:
        return self.keep(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.kernel[i])


class Dense(Scanned):
    def step(self, x: Tensor, i: int) -> Tensor:
        return self.keep(x @ self.kernel[i])


class Heads(Scanned):
    def step(self, x: Tensor, i: int) -> Tensor:
        return self.keep(torch.einsum("bse,ehd->bshd", x, self.kernel[i]))


class Attention(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        for name, of in (("query", "q"), ("key", "k"), ("value", "v")):
            rows = [parted(w[f"{at.format(i)}.{of}.weight"].T, 1, HEADS, HEAD) for i in range(LAYERS)]
            setattr(self, name, Heads(*rows))
        self.out = Dense(*(w[f"{at.format(i)}.o.weight"].T for i in range(LAYERS)))

    query: Heads
    key: Heads
    value: Heads

    def step(self, x: Tensor, memory: Tensor, bias: Tensor | None, i: int) -> Tensor:
        q, k, v = self.query.step(x, i), self.key.step(memory, i), self.value.step(memory, i)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
        weights = (scores if bias is None else scores + bias).softmax(-1)
        return self.out.step(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2), i)


class FeedForward(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.wi = Dense(*(w[f"{at.format(i)}.wi.weight"].T for i in range(LAYERS)))
        self.wo = Dense(*(w[f"{at.format(i)}.wo.weight"].T for i in range(LAYERS)))

    def step(self, x: Tensor, i: int) -> Tensor:
        return self.wo.step(self.wi.step(x, i).relu(), i)


class Layers(nn.Module):
    """All layers of a stack; returns the last one's result, and those of all."""

    def __init__(self, w: Weights, at: str, *, is_decoder: bool) -> None:
        super().__init__()

        def norm(part: int) -> Norm:
            return Norm(*(w[f"{at}.{i}.layer.{part}.layer_norm.weight"] for i in range(LAYERS)))

        self.pre_attention_norm = norm(0)
        self.attention = Attention(w, at + ".{}.layer.0.SelfAttention")
        self.is_decoder = is_decoder
        if is_decoder:
            self.pre_cross_norm = norm(1)
            self.encoder_decoder_attention = Attention(w, at + ".{}.layer.1.EncDecAttention")
        self.pre_mlp_norm = norm(1 + is_decoder)
        self.mlp = FeedForward(w, at + f".{{}}.layer.{1 + is_decoder}.DenseReluDense")

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor]:
        results = []
        for i in range(LAYERS):
            normed = self.pre_attention_norm.step(x, i)
            x = x + self.attention.step(normed, normed, bias, i)
            if memory is not None:
                normed = self.pre_cross_norm.step(x, i)
                x = x + self.encoder_decoder_attention.step(normed, memory, None, i)
            x = x + self.mlp.step(self.pre_mlp_norm.step(x, i), i)
            results.append(x)
        for place in self.modules():
            if isinstance(place, Scanned):
                place(torch.stack(place.kept))
                place.kept.clear()
        return x, torch.stack(results)


class PositionBias(nn.Module):
    """Buckets are distances: none is long enough here to share one."""

    def __init__(self, weight: Tensor, *, is_decoder: bool) -> None:
        super().__init__()
        self.rel_embedding = embedding(weight)
        self.is_decoder = is_decoder

    def forward(self, length: int) -> Tensor:
        ahead = torch.arange(length) - torch.arange(length)[:, None]
        buckets = (-ahead).clamp(min=0) if self.is_decoder else ahead.abs() + 16 * (ahead > 0)
        bias: Tensor = self.rel_embedding(buckets).permute(2, 0, 1)[None]
        return bias.masked_fill(ahead > 0, float("-inf")) if self.is_decoder else bias


class Stack(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        is_decoder = at == "decoder"
        self.embedder = embedding(w["shared.weight"])
        self.position_bias = PositionBias(
            w[f"{at}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"], is_decoder=is_decoder
        )
        self.layers = Layers(w, f"{at}.block", is_decoder=is_decoder)
        self.norm = RMSNorm(w[f"{at}.final_layer_norm.weight"])

    def forward(self, ids: Tensor, memory: Tensor | None = None) -> Tensor:
        x, _ = self.layers(self.embedder(ids), self.position_bias(ids.shape[1]), memory)
        normed: Tensor = self.norm(x)
        return normed


class T5(nn.Module):
    def __init__(self, w: Weights) -> None:
        super().__init__()
        self.encoder = Stack(w, "encoder")
        self.decoder = Stack(w, "decoder")
        self.logits_dense = linear(w["lm_head.weight"])

    def forward(self, encoder_tokens: Tensor, decoder_tokens: Tensor) -> Tensor:
        x = self.decoder(decoder_tokens, self.encoder(encoder_tokens))
        logits: Tensor = self.logits_dense(x * WIDTH**-0.5)
        return logits


def reference() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"vocab_size": VOCAB, "d_model": WIDTH, "d_kv": HEAD, "d_ff": INNER}
    counts = {"num_layers": LAYERS, "num_heads": HEADS}
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS.flip(0)[:, :4], "use_cache": False}
    return drawn("T5ForConditionalGeneration", "T5Config", 6, **sizes, **counts), inputs


def target(w: Weights, inputs: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    return T5(w), {"encoder_tokens": inputs["input_ids"], "decoder_tokens": inputs["decoder_input_ids"]}


def each(place: str) -> tuple[str, ...]:
    """A place of every layer: one tensor of the target has them all."""
    return tuple(place.replace("{i}", str(i)) for i in range(LAYERS))


def _merged(x: Array) -> list[Array]:
    return list(einops.rearrange(x, "l b s h d -> l b s (h d)"))


def _stack(of: str, layer: str) -> list[Pair]:
    """The pairs of one stack without cross attention."""
    block, to = f"{of}.block.{{i}}", f"{of}.layers"
    return [
        Pair(f"{of}.embed_tokens", f"{of}.embedder"),
        Pair(f"{of}.final_layer_norm", f"{of}.norm"),
        Pair(
            f"{of}.block.0.layer.0.SelfAttention.relative_attention_bias", f"{of}.position_bias.rel_embedding"
        ),
        Pair(each(f"{block}/output.0"), f"{to}/output.1", list),
        Pair(each(f"{block}.layer.0.layer_norm"), f"{to}.pre_attention_norm", list),
        Pair(each(f"{block}.layer.0.SelfAttention.q"), f"{to}.attention.query", _merged),
        Pair(each(f"{block}.layer.0.SelfAttention.k"), f"{to}.attention.key", _merged),
        Pair(each(f"{block}.layer.0.SelfAttention.v"), f"{to}.attention.value", _merged),
        Pair(each(f"{block}.layer.0.SelfAttention.o"), f"{to}.attention.out", list),
        Pair(each(f"{block}.{layer}.layer_norm"), f"{to}.pre_mlp_norm", list),
        Pair(each(f"{block}.{layer}.DenseReluDense.wi"), f"{to}.mlp.wi", list),
        Pair(each(f"{block}.{layer}.DenseReluDense.wo"), f"{to}.mlp.wo", list),
    ]


def _alike(of: str, layer: str) -> dict[str, str]:
    block = f"{of}.block.{{i}}"
    bias = f"{of}.block.0.layer.0.SelfAttention/output.1"
    return {
        f"{of}.dropout": f"{of}.embed_tokens",
        f"{of}.dropout@1": f"{of}.final_layer_norm",
        f"{block}.layer.0.SelfAttention/output.0": f"{block}.layer.0.SelfAttention.o",
        f"{block}.layer.0.dropout": f"{block}.layer.0.SelfAttention.o",
        f"{block}.layer.0.SelfAttention/output.1": bias,
        f"{block}.layer.0/output.1": bias,
        f"{block}/output.1": bias,
        f"{block}.{layer}.DenseReluDense": f"{block}.{layer}.DenseReluDense.wo",
        f"{block}.{layer}.dropout": f"{block}.{layer}.DenseReluDense.wo",
        f"{block}.{layer}": f"{block}/output.0",
        f"{block}.{layer}.DenseReluDense.dropout": f"{block}.{layer}.DenseReluDense.act",
    }


CROSS = "decoder.block.{i}.layer.1"
PORT = Port(
    "t5",
    reference,
    target,
    Truth(
        pairs=(
            Pair("@root/output.logits", "@root/output"),
            Pair("lm_head", "logits_dense"),
            Pair("encoder/output.last_hidden_state", "encoder"),
            Pair("decoder/output.last_hidden_state", "decoder"),
            *_stack("encoder", "layer.1"),
            *_stack("decoder", "layer.2"),
            Pair(each(f"{CROSS}.layer_norm"), "decoder.layers.pre_cross_norm", list),
            *(
                Pair(each(f"{CROSS}.EncDecAttention.{one}"), f"decoder.layers.{cross}.{other}", _merged)
                for cross in ("encoder_decoder_attention",)
                for one, other in (("q", "query"), ("k", "key"), ("v", "value"))
            ),
            Pair(each(f"{CROSS}.EncDecAttention.o"), "decoder.layers.encoder_decoder_attention.out", list),
        ),
        extras=(
            Pair("encoder.block.0.layer.0.SelfAttention/output.1", "encoder.position_bias"),
            Pair("encoder.block.2/output.0", "encoder.layers/output.0"),
            Pair("decoder.block.2/output.0", "decoder.layers/output.0"),
        ),
        alike={
            "@root/output.encoder_last_hidden_state": "encoder.final_layer_norm",
            **_alike("encoder", "layer.1"),
            **_alike("decoder", "layer.2"),
            f"{CROSS}.EncDecAttention/output.0": f"{CROSS}.EncDecAttention.o",
            f"{CROSS}.dropout": f"{CROSS}.EncDecAttention.o",
        },
        reference_only=(
            "encoder.block.{i}.layer.0/output.0",
            "encoder.block.{i}.layer.1.DenseReluDense.act",
            "decoder.block.0.layer.0.SelfAttention/output.1",  # without the mask, which the port adds
            "decoder.block.{i}.layer.0/output.0",
            f"{CROSS}/output.0",
            f"{CROSS}/output.1",  # zeros
            f"{CROSS}.EncDecAttention/output.1",
            "decoder.block.{i}/output.2",
            "decoder.block.{i}.layer.2.DenseReluDense.act",
        ),
        target_only=("decoder.position_bias",),
    ),
)
