"""Whisper, encoder of sound and decoder of text, and what becomes of it in other hands."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from transformers import WhisperConfig, WhisperForConditionalGeneration

from tests.rewrites.catalogue import BFLOAT16, FLOAT16, Family, Run, random_model, tokens
from tests.rewrites.layers import (
    Weights,
    attention,
    causal_mask,
    embedding_of,
    join_heads,
    layer_norm_of,
    linear,
    linear_of,
    replace,
    split_heads,
)

LAYERS, HEADS, SIZE, WIDE, VOCABULARY, MELS, FRAMES = 2, 4, 48, 96, 101, 16, 20
MEL: Final = torch.randn(2, MELS, 2 * FRAMES, generator=torch.Generator().manual_seed(1))
DECODED: Final = tokens(2, 6, VOCABULARY)
EPS: Final = 1e-5


def model(implementation: str = "sdpa") -> Any:
    return random_model(
        WhisperForConditionalGeneration,
        WhisperConfig,
        vocab_size=VOCABULARY,
        num_mel_bins=MELS,
        d_model=SIZE,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=WIDE,
        decoder_ffn_dim=WIDE,
        max_source_positions=FRAMES,
        max_target_positions=24,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        attn_implementation=implementation,
    )


def run_of(port: Any, mel: Tensor = MEL) -> Run:
    return Run(port, {"input_features": mel, "decoder_input_ids": DECODED, "use_cache": False})


def reference() -> Run:
    return run_of(model())


FAMILY: Final = Family("whisper", reference)


@FAMILY.correct("eager attention in the place of sdpa")
def eager_attention() -> Run:
    return run_of(model("eager"))


@FAMILY.correct("the same in bfloat16", tolerance=BFLOAT16)
def bfloat16() -> Run:
    return run_of(model().bfloat16(), MEL.bfloat16())


@FAMILY.correct("the same in float16", tolerance=FLOAT16)
def float16() -> Run:
    return run_of(model().half(), MEL.half())


@FAMILY.correct("a bias of zeros for the keys, which have none")
def key_bias_of_zeros() -> Run:
    port = model()
    for module in port.modules():
        if hasattr(module, "k_proj"):
            module.k_proj = linear(module.k_proj.weight, torch.zeros(SIZE))
    return run_of(port)


class ConvolutionByProduct(nn.Module):
    """A convolution over time as a product with the window around each frame."""

    def __init__(self, convolution: nn.Conv1d) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(convolution.weight.detach().flatten(1)), convolution.bias
        self.width, self.stride = convolution.kernel_size[0], convolution.stride

    def forward(self, x: Tensor) -> Tensor:
        windows = F.pad(x, (1, 1)).unfold(2, self.width, self.stride[0])  # batch, channel, frame, window
        return F.linear(windows.transpose(1, 2).flatten(2), self.weight, self.bias).transpose(1, 2)


@FAMILY.correct("convolutions as products with windows")
def convolutions_by_product() -> Run:
    port = model()
    replace(port.model.encoder, nn.Conv1d, ConvolutionByProduct)
    return run_of(port)


@FAMILY.correct("a pipeline: encoder and decoder as two modules of a class of its own")
def two_modules() -> Run:
    class Pipeline(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            port = model()
            self.audio_encoder, self.text_decoder = port.model.encoder, port.model.decoder
            self.projection = port.proj_out

        def forward(self, audio: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
            memory = self.audio_encoder(audio).last_hidden_state
            hidden = self.text_decoder(input_ids=text, encoder_hidden_states=memory, use_cache=False)
            return self.projection(hidden.last_hidden_state), memory

    return Run(Pipeline().eval(), (MEL, DECODED))


class MultiHeadAttention(nn.Module):
    """As its authors wrote it: queries and keys are each scaled by the fourth root of their size."""

    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.query, self.key = linear_of(w, f"{at}.q_proj"), linear_of(w, f"{at}.k_proj")
        self.value, self.out = linear_of(w, f"{at}.v_proj"), linear_of(w, f"{at}.out_proj")
        self.scale = (SIZE // HEADS) ** -0.25

    def forward(self, x: Tensor, xa: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        source = x if xa is None else xa
        q, k, v = (split_heads(part, HEADS) for part in (self.query(x), self.key(source), self.value(source)))
        out: Tensor = self.out(join_heads(attention(q * self.scale, k * self.scale, v, mask, 1.0)))
        return out


class ResidualAttentionBlock(nn.Module):
    def __init__(self, w: Weights, at: str, *, crosses: bool) -> None:
        super().__init__()
        self.attn = MultiHeadAttention(w, f"{at}.self_attn")
        self.attn_ln = layer_norm_of(w, f"{at}.self_attn_layer_norm", EPS)
        self.cross_attn = MultiHeadAttention(w, f"{at}.encoder_attn") if crosses else None
        self.cross_attn_ln = layer_norm_of(w, f"{at}.encoder_attn_layer_norm", EPS) if crosses else None
        self.mlp = nn.Sequential(linear_of(w, f"{at}.fc1"), nn.GELU(), linear_of(w, f"{at}.fc2"))
        self.mlp_ln = layer_norm_of(w, f"{at}.final_layer_norm", EPS)

    def forward(self, x: Tensor, xa: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.attn_ln(x), mask=mask)
        if self.cross_attn is not None and self.cross_attn_ln is not None:
            x = x + self.cross_attn(self.cross_attn_ln(x), xa)
        out: Tensor = x + self.mlp(self.mlp_ln(x))
        return out


def sinusoids(length: int, channels: int, *, divisor: int) -> Tensor:
    step = math.log(10000) / divisor
    times = torch.arange(length)[:, None] * torch.exp(-step * torch.arange(channels // 2))[None]
    return torch.cat([times.sin(), times.cos()], 1)


class AudioEncoder(nn.Module):
    positional_embedding: Tensor

    def __init__(self, w: Weights, divisor: int) -> None:
        super().__init__()
        at = "model.encoder"
        self.conv1, self.conv2 = nn.Conv1d(MELS, SIZE, 3, padding=1), nn.Conv1d(SIZE, SIZE, 3, 2, 1)
        for name in ("conv1", "conv2"):
            self.get_submodule(name).load_state_dict({n: w[f"{at}.{name}.{n}"] for n in ("weight", "bias")})
        self.register_buffer("positional_embedding", sinusoids(FRAMES, SIZE, divisor=divisor))
        self.blocks = nn.ModuleList(
            ResidualAttentionBlock(w, f"{at}.layers.{i}", crosses=False) for i in range(LAYERS)
        )
        self.ln_post = layer_norm_of(w, f"{at}.layer_norm", EPS)
        self.approximate = "none"

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.conv1(x), approximate=self.approximate)
        x = F.gelu(self.conv2(x), approximate=self.approximate)
        x = x.permute(0, 2, 1) + self.positional_embedding
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.ln_post(x)
        return out


class TextDecoder(nn.Module):
    mask: Tensor

    def __init__(self, w: Weights) -> None:
        super().__init__()
        at = "model.decoder"
        self.token_embedding = embedding_of(w, f"{at}.embed_tokens")
        self.positional_embedding = nn.Parameter(w[f"{at}.embed_positions.weight"].clone())
        self.blocks = nn.ModuleList(
            ResidualAttentionBlock(w, f"{at}.layers.{i}", crosses=True) for i in range(LAYERS)
        )
        self.ln = layer_norm_of(w, f"{at}.layer_norm", EPS)
        self.register_buffer("mask", causal_mask(24), persistent=False)
        self.offset = 0

    def forward(self, x: Tensor, xa: Tensor) -> Tensor:
        length = x.shape[1]
        x = self.token_embedding(x) + self.positional_embedding[self.offset : self.offset + length]
        for block in self.blocks:
            x = block(x, xa, self.mask[:length, :length])
        logits: Tensor = self.ln(x) @ self.token_embedding.weight.T
        return logits


class AuthorsWhisper(nn.Module):
    def __init__(self, w: Weights, *, divisor: int = SIZE // 2 - 1) -> None:
        super().__init__()
        self.encoder, self.decoder = AudioEncoder(w, divisor), TextDecoder(w)

    def forward(self, mel: Tensor, tokens: Tensor) -> Tensor:
        logits: Tensor = self.decoder(tokens, self.encoder(mel))
        return logits


def authors(**options: int) -> Any:
    return AuthorsWhisper(model().state_dict(), **options).eval()


def authors_run(port: Any) -> Run:
    return Run(port, {"mel": MEL, "tokens": DECODED})


@FAMILY.correct("as its authors wrote it: sinusoids computed, queries and keys each scaled by a fourth root")
def original_code() -> Run:
    return authors_run(authors())


@FAMILY.correct(
    "as its authors wrote it, logits of the last token",
    target_view=lambda x: x,
    reference_view=lambda x: x[:, -1],
)
def original_code_last_token() -> Run:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = authors()

        def forward(self, mel: Tensor, tokens: Tensor) -> Tensor:
            logits: Tensor = self.model(mel, tokens)
            return logits[:, -1]

    return authors_run(Last().eval())


@FAMILY.mistake(
    "sinusoids whose step is divided by the count of channels",
    guilty="model.encoder.embed_positions",
    beside=original_code,
)
def step_of_sinusoids() -> Run:
    return authors_run(authors(divisor=SIZE // 2))


@FAMILY.mistake("the approximated GELU behind the convolutions", guilty="model.encoder", beside=original_code)
def approximated_gelu() -> Run:
    port = authors()
    port.encoder.approximate = "tanh"
    return authors_run(port)


@FAMILY.mistake(
    "scaled twice: in the projection and in the attention",
    guilty="model.decoder.layers.0.self_attn",
    beside=original_code,
)
def scaled_twice() -> Run:
    port = authors()
    port.decoder.blocks[0].attn.scale = (SIZE // HEADS) ** -0.5
    return authors_run(port)


@FAMILY.mistake(
    "positions of the decoder that start at two, as in Bart",
    guilty="model.decoder.embed_positions",
    beside=original_code,
)
def positions_of_bart() -> Run:
    port = authors()
    port.decoder.offset = 2
    return authors_run(port)


@FAMILY.mistake(
    "weights of cross attention taken from the layer before",
    guilty="model.decoder.layers.1.encoder_attn",
    beside=eager_attention,
)
def cross_attention_of_another_layer() -> Run:
    port = model("eager")
    layers = port.model.decoder.layers
    layers[1].encoder_attn.load_state_dict(layers[0].encoder_attn.state_dict())
    return run_of(port)


@FAMILY.mistake("a kernel that runs backwards", guilty="model.encoder.conv2", beside=convolutions_by_product)
def kernel_backwards() -> Run:
    port = model()
    with torch.no_grad():
        port.model.encoder.conv2.weight.copy_(port.model.encoder.conv2.weight.flip(2))
    replace(port.model.encoder, nn.Conv1d, ConvolutionByProduct)
    return run_of(port)
