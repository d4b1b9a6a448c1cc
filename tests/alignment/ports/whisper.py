"""Whisper with channels last: convolutions give (b, t, c), and attention hands out its keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tensorcap_formats.dtypes import Array
from tests.alignment.ports.parts import (
    HEADS,
    IDS,
    INNER,
    VOCAB,
    WIDTH,
    Weights,
    attend,
    causal,
    dense,
    drawn,
    embedding,
    heads,
    layer_norm,
)
from tests.alignment.ports.truth import LAYERS, Pair, Port, Truth

Attended = tuple[Tensor, tuple[Tensor, Tensor]]


class Conv(nn.Module):
    def __init__(self, w: Weights, at: str, stride: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(w[f"{at}.weight"].permute(2, 1, 0).clone())  # (width, in, out)
        self.bias = nn.Parameter(w[f"{at}.bias"].clone())
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        padded = nn.functional.pad(x, (0, 0, 1, 1)).unfold(1, 3, self.stride)  # (b, t, in, width)
        return torch.einsum("btiw,wio->bto", padded, self.kernel) + self.bias


class MultiHead(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.query = dense(w, f"{at}.q_proj")
        self.key = dense(w, f"{at}.k_proj")
        self.value = dense(w, f"{at}.v_proj")
        self.out = dense(w, f"{at}.out_proj")

    def forward(self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None) -> Attended:
        source = x if memory is None else memory
        k, v, q = self.key(source), self.value(source), self.query(x)
        attended = attend(heads(q, HEADS), heads(k, HEADS), heads(v, HEADS), 8**-0.5, mask)
        return self.out(attended), (k, v)


class Block(nn.Module):
    def __init__(self, w: Weights, at: str, *, is_decoder: bool) -> None:
        super().__init__()
        self.attn = MultiHead(w, f"{at}.self_attn")
        self.attn_ln = layer_norm(w, f"{at}.self_attn_layer_norm")
        self.is_decoder = is_decoder
        if is_decoder:
            self.cross_attn = MultiHead(w, f"{at}.encoder_attn")
            self.cross_attn_ln = layer_norm(w, f"{at}.encoder_attn_layer_norm")
        self.mlp1 = dense(w, f"{at}.fc1")
        self.mlp2 = dense(w, f"{at}.fc2")
        self.mlp_ln = layer_norm(w, f"{at}.final_layer_norm")

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        mask = causal(x.shape[1]) if self.is_decoder else None
        x = x + self.attn(self.attn_ln(x), mask=mask)[0]
        if self.is_decoder:
            x = x + self.cross_attn(self.cross_attn_ln(x), memory)[0]
        out: Tensor = x + self.mlp2(nn.functional.gelu(self.mlp1(self.mlp_ln(x))))
        return out


class AudioEncoder(nn.Module):
    def __init__(self, w: Weights) -> None:
        super().__init__()
        self.conv1 = Conv(w, "model.encoder.conv1", 1)
        self.conv2 = Conv(w, "model.encoder.conv2", 2)
        self.positional_embedding = nn.Parameter(w["model.encoder.embed_positions.weight"].clone())
        self.blocks = nn.ModuleList(
            Block(w, f"model.encoder.layers.{i}", is_decoder=False) for i in range(LAYERS)
        )
        self.ln_post = layer_norm(w, "model.encoder.layer_norm")

    def forward(self, mel: Tensor) -> Tensor:
        x = nn.functional.gelu(self.conv2(nn.functional.gelu(self.conv1(mel))))
        x = x + self.positional_embedding
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.ln_post(x)
        return out


class TextDecoder(nn.Module):
    def __init__(self, w: Weights) -> None:
        super().__init__()
        self.token_embedding = embedding(w["model.decoder.embed_tokens.weight"])
        self.positional_embedding = nn.Parameter(w["model.decoder.embed_positions.weight"].clone())
        self.blocks = nn.ModuleList(
            Block(w, f"model.decoder.layers.{i}", is_decoder=True) for i in range(LAYERS)
        )
        self.ln = layer_norm(w, "model.decoder.layer_norm")

    def forward(self, tokens: Tensor, audio: Tensor) -> Tensor:
        x = self.token_embedding(tokens) + self.positional_embedding[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, audio)
        logits: Tensor = self.ln(x) @ self.token_embedding.weight.T
        return logits


class Whisper(nn.Module):
    def __init__(self, w: Weights) -> None:
        super().__init__()
        self.encoder = AudioEncoder(w)
        self.decoder = TextDecoder(w)

    def forward(self, mel: Tensor, tokens: Tensor) -> Tensor:
        logits: Tensor = self.decoder(tokens, self.encoder(mel))
        return logits


def reference() -> tuple[nn.Module, dict[str, Any]]:
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", LAYERS), ("attention_heads", HEADS), ("ffn_dim", INNER))
    }
    lengths = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 12}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    fields = {"vocab_size": VOCAB, "d_model": WIDTH, **sides, **lengths, **tokens}
    mel = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))
    inputs = {"input_features": mel, "decoder_input_ids": IDS[:, :5], "use_cache": False}
    return drawn("WhisperForConditionalGeneration", "WhisperConfig", 7, **fields), inputs


def target(w: Weights, inputs: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    mel = inputs["input_features"].transpose(1, 2).contiguous()
    return Whisper(w), {"mel": mel, "tokens": inputs["decoder_input_ids"]}


def _channels_first(x: Array) -> Array:
    return x.swapaxes(1, 2)


def _block(of: str, attentions: dict[str, str]) -> list[Pair]:
    layer, other = f"model.{of}.layers.{{i}}", f"{of}.blocks.{{i}}"
    parts = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "out"}
    return [
        Pair(layer, other),
        Pair(f"{layer}.final_layer_norm", f"{other}.mlp_ln"),
        Pair(f"{layer}.fc1", f"{other}.mlp1"),
        Pair(f"{layer}.fc2", f"{other}.mlp2"),
        *(
            pair
            for one, to in attentions.items()
            for pair in (
                Pair(f"{layer}.{one}_layer_norm", f"{other}.{to}_ln"),
                Pair(f"{layer}.{one}/output.0", f"{other}.{to}/output.0"),
                *(Pair(f"{layer}.{one}.{a}", f"{other}.{to}.{b}") for a, b in parts.items()),
            )
        ),
    ]


PORT = Port(
    "whisper",
    reference,
    target,
    Truth(
        pairs=(
            Pair("@root/output.logits", "@root/output"),
            Pair("model.encoder/output.last_hidden_state", "encoder"),
            Pair("model.encoder.conv1", "encoder.conv1", _channels_first),
            Pair("model.encoder.conv2", "encoder.conv2", _channels_first),
            Pair("model.encoder.layer_norm", "encoder.ln_post"),
            *_block("encoder", {"self_attn": "attn"}),
            Pair("model.decoder.embed_tokens", "decoder.token_embedding"),
            Pair("model.decoder.layer_norm", "decoder.ln"),
            *_block("decoder", {"self_attn": "attn", "encoder_attn": "cross_attn"}),
        ),
        alike={
            "proj_out": "@root/output.logits",
            "@root/output.encoder_last_hidden_state": "model.encoder.layer_norm",
            "model/output.encoder_last_hidden_state": "model.encoder.layer_norm",
            "model/output.last_hidden_state": "model.decoder.layer_norm",
            "model.decoder/output.last_hidden_state": "model.decoder.layer_norm",
            "decoder": "@root",
            "encoder.blocks.{i}.attn/output.1.0": "encoder.blocks.{i}.attn.key",
            "encoder.blocks.{i}.attn/output.1.1": "encoder.blocks.{i}.attn.value",
            "decoder.blocks.{i}.attn/output.1.0": "decoder.blocks.{i}.attn.key",
            "decoder.blocks.{i}.attn/output.1.1": "decoder.blocks.{i}.attn.value",
            "decoder.blocks.{i}.cross_attn/output.1.0": "decoder.blocks.{i}.cross_attn.key",
            "decoder.blocks.{i}.cross_attn/output.1.1": "decoder.blocks.{i}.cross_attn.value",
        },
        reference_only=(
            "model.encoder.embed_positions",
            "model.decoder.embed_positions",
            "model.encoder.layers.{i}.activation_fn",
            "model.decoder.layers.{i}.activation_fn",
        ),
        given=(  # the port's gelu is no module
            Pair("model.encoder.layers.{i}.activation_fn", "encoder.blocks.{i}.mlp2/input.input"),
            Pair("model.decoder.layers.{i}.activation_fn", "decoder.blocks.{i}.mlp2/input.input"),
        ),
    ),
)
