"""T5, encoder and decoder, and what becomes of it in other hands."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from transformers import T5Config, T5ForConditionalGeneration

from tests.rewrites.catalogue import BFLOAT16, INT8, Family, Run, random_model, tokens
from tests.rewrites.layers import (
    Int8Linear,
    RootMeanSquare,
    Weights,
    embedding_of,
    join_heads,
    linear_of,
    replace,
    split_heads,
)

LAYERS, HEADS, HEAD, SIZE, WIDE, VOCABULARY, BUCKETS, FARTHEST = 2, 4, 12, 48, 96, 101, 8, 20
IDS: Final = tokens(2, 11, VOCABULARY)
DECODED: Final = tokens(2, 7, VOCABULARY, seed=2)
EPS: Final = 1e-6


def model(implementation: str = "sdpa", *, tied: bool = True) -> Any:
    port = random_model(
        T5ForConditionalGeneration,
        T5Config,
        vocab_size=VOCABULARY,
        d_model=SIZE,
        d_kv=HEAD,
        d_ff=WIDE,
        num_layers=LAYERS,
        num_decoder_layers=LAYERS,
        num_heads=HEADS,
        relative_attention_num_buckets=BUCKETS,
        relative_attention_max_distance=FARTHEST,
        feed_forward_proj="relu",
        tie_word_embeddings=tied,
        attn_implementation=implementation,
    )
    with torch.no_grad():
        for name, parameter in port.named_parameters():
            if name.endswith((".q.weight", "shared.weight")):
                parameter.mul_(HEAD**-0.5 if name.endswith(".q.weight") else 3.0)
    return port


def run_of(port: Any) -> Run:
    return Run(port, {"input_ids": IDS, "decoder_input_ids": DECODED, "use_cache": False})


def reference() -> Run:
    return run_of(model())


FAMILY: Final = Family("t5", reference)


@FAMILY.correct("eager attention in the place of sdpa")
def eager_attention() -> Run:
    return run_of(model("eager"))


@FAMILY.correct("sdpa in the place of a reference in eager", reference=lambda: run_of(model("eager")))
def sdpa_attention() -> Run:
    return run_of(model("sdpa"))


@FAMILY.correct("the same in bfloat16", tolerance=BFLOAT16)
def bfloat16() -> Run:
    return run_of(model().bfloat16())


@FAMILY.correct("encoder called first, its states given to the decoder")
def encoder_called_first() -> Run:
    def call(port: Any, ids: Tensor, decoded: Tensor) -> Any:
        return port(encoder_outputs=(port.encoder(ids)[0],), decoder_input_ids=decoded, use_cache=False)

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model()

        def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
            logits: Tensor = call(self.inner, src, tgt).logits
            return logits

    return Run(Caller().eval(), (IDS, DECODED))


@FAMILY.correct("dropouts replaced by nn.Identity")
def identities_for_dropouts() -> Run:
    port = model()
    replace(port, nn.Dropout, lambda _: nn.Identity())
    return run_of(port)


@FAMILY.correct("a head of its own, the scale before it folded into its weight")
def scale_folded_into_head() -> Run:
    port = model()
    port.lm_head.weight = nn.Parameter(port.lm_head.weight.detach() * SIZE**-0.5)
    port.config.scale_decoder_outputs = False
    return run_of(port)


@FAMILY.correct("linear layers of the decoder in int8, dequantised before use", tolerance=INT8)
def int8_decoder() -> Run:
    port = model()
    replace(port.decoder, nn.Linear, Int8Linear)
    return run_of(port)


def bucket_of(distance: Tensor, *, both_ways: bool) -> Tensor:
    """The bucket of a relative position: exact ones near by, logarithmic ones far away."""
    buckets = BUCKETS
    start = torch.zeros_like(distance)
    if both_ways:
        buckets //= 2
        start = torch.where(distance > 0, buckets, 0)
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = buckets // 2
    ratio = torch.log(distance.float().clamp(min=1) / exact) / math.log(FARTHEST / exact)
    far = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
    return start + torch.where(distance < exact, distance, far)


class Attend(nn.Module):
    def __init__(self, w: Weights, at: str, bias: Tensor | None, *, is_causal: bool = False) -> None:
        super().__init__()
        self.to_q, self.to_kv = linear_of(w, f"{at}.q"), linear_of(w, f"{at}.k", f"{at}.v")
        self.to_out = linear_of(w, f"{at}.o")
        self.is_causal, self.both_ways, self.scale = is_causal, not is_causal, 1.0
        self.register_buffer("bias_table", bias)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        q = split_heads(self.to_q(x), HEADS)
        k, v = (split_heads(part, HEADS) for part in self.to_kv(x if memory is None else memory).chunk(2, -1))
        scores = q @ k.transpose(-1, -2) * self.scale
        rows, columns = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
        table: Any = self.bias_table
        if table is not None:
            scores = scores + table[bucket_of(columns - rows, both_ways=self.both_ways)].permute(2, 0, 1)
        if self.is_causal:
            scores = scores.masked_fill(columns > rows, float("-inf"))
        out: Tensor = self.to_out(join_heads(scores.softmax(-1) @ v))
        return out


class ReluMLP(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.lin1, self.lin2 = linear_of(w, f"{at}.wi"), linear_of(w, f"{at}.wo")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lin2(F.relu(self.lin1(x)))
        return out


class Half(nn.Module):
    """Encoder or decoder."""

    def __init__(self, w: Weights, at: str, embedding: nn.Embedding, *, is_decoder: bool) -> None:
        super().__init__()
        self.embedding = embedding
        bias = w[f"{at}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
        self.norms, self.parts = nn.ModuleList(), nn.ModuleList()
        for i in range(LAYERS):
            block = f"{at}.block.{i}.layer"
            parts: list[nn.Module] = [Attend(w, f"{block}.0.SelfAttention", bias, is_causal=is_decoder)]
            if is_decoder:
                parts.append(Attend(w, f"{block}.1.EncDecAttention", None))
            parts.append(ReluMLP(w, f"{block}.{len(parts)}.DenseReluDense"))
            gains = [w[f"{block}.{number}.layer_norm.weight"] for number in range(len(parts))]
            self.norms.append(nn.ModuleList(RootMeanSquare(gain, EPS) for gain in gains))
            self.parts.append(nn.ModuleList(parts))
        self.final_norm = RootMeanSquare(w[f"{at}.final_layer_norm.weight"], EPS)

    def forward(self, ids: Tensor, memory: Tensor | None = None) -> Tensor:
        x = self.embedding(ids)
        for norms, parts in zip(self.norms, self.parts, strict=True):
            pairs: Any = list(zip(norms, parts, strict=True))  # type: ignore[call-overload] # ModuleList iterates
            for number, (norm, part) in enumerate(pairs):
                is_cross = memory is not None and number == 1
                x = x + (part(norm(x), memory) if is_cross else part(norm(x)))
        out: Tensor = self.final_norm(x)
        return out


class Rewritten(nn.Module):
    def __init__(self, w: Weights) -> None:
        super().__init__()
        table = embedding_of(w, "shared")
        self.enc = Half(w, "encoder", table, is_decoder=False)
        self.dec = Half(w, "decoder", table, is_decoder=True)
        self.out = linear_of(w, "lm_head")
        self.scale = SIZE**-0.5

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        logits: Tensor = self.out(self.dec(target, self.enc(source)) * self.scale)
        return logits


def rewrite() -> Any:
    return Rewritten(model().state_dict()).eval()


def rewrite_run(port: Any) -> Run:
    return Run(port, (IDS, DECODED))


@FAMILY.correct("written anew: one class for both halves, the relative bias computed in every layer")
def rewritten() -> Run:
    return rewrite_run(rewrite())


@FAMILY.correct("the encoder alone, written anew", reference=lambda: Run(model().encoder, {"input_ids": IDS}))
def encoder_alone() -> Run:
    return Run(rewrite().enc, (IDS,))


@FAMILY.mistake(
    "scores scaled as everywhere else", guilty="encoder.block.0.layer.0.SelfAttention", beside=rewritten
)
def scores_scaled() -> Run:
    port = rewrite()
    port.enc.parts[0][0].scale = HEAD**-0.5
    return rewrite_run(port)


@FAMILY.mistake(
    "buckets for both ways in the decoder", guilty="decoder.block.0.layer.0.SelfAttention", beside=rewritten
)
def buckets_both_ways() -> Run:
    port = rewrite()
    for parts in port.dec.parts:
        parts[0].both_ways = True
    return rewrite_run(port)


@FAMILY.mistake(
    "the relative bias in the first layer alone",
    guilty="encoder.block.1.layer.0.SelfAttention",
    beside=rewritten,
)
def bias_in_first_layer_alone() -> Run:
    port = rewrite()
    port.enc.parts[1][0].bias_table = None
    return rewrite_run(port)


@FAMILY.mistake("hidden states not scaled before the tied head", guilty="lm_head", beside=rewritten)
def head_not_scaled() -> Run:
    port = rewrite()
    port.scale = 1.0
    return rewrite_run(port)


@FAMILY.mistake(
    "the decoder looks at states before the last norm",
    guilty="encoder.final_layer_norm",
    beside=eager_attention,
)
def encoder_without_last_norm() -> Run:
    port = model("eager")
    port.encoder.final_layer_norm = nn.Identity()
    return run_of(port)


@FAMILY.mistake(
    "weights of self and cross attention swapped in one layer",
    guilty="decoder.block.1.layer.1",
    beside=bfloat16,
)
def attentions_swapped() -> Run:
    port = model()
    layers = port.decoder.block[1].layer
    for name in ("q", "k", "v", "o"):
        one, other = getattr(layers[0].SelfAttention, name), getattr(layers[1].EncDecAttention, name)
        one.weight, other.weight = other.weight, one.weight
    return run_of(port.bfloat16())


@FAMILY.mistake(
    "the scale folded into the head and still applied", guilty="lm_head", beside=scale_folded_into_head
)
def scale_folded_and_applied() -> Run:
    port = scale_folded_into_head().model
    port.config.scale_decoder_outputs = True
    return run_of(port)
