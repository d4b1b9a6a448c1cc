"""Gemma 3, and what becomes of it in other hands."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from tests.rewrites.catalogue import BFLOAT16, INT8, Family, Run, random_model, tokens
from tests.rewrites.layers import (
    Int8Linear,
    RootMeanSquare,
    Weights,
    attention,
    causal_mask,
    embedding_of,
    join_heads,
    linear_of,
    replace,
    rotary_tables,
    rotate_halves,
    split_heads,
    table,
)

LAYERS, HEADS, KV_HEADS, HEAD, SIZE, WIDE, VOCABULARY = 3, 4, 2, 16, 48, 96, 101
WINDOW, LOCAL_BASE, BASE, QUERY_SCALAR = 4, 100.0, 10000.0, 24
KINDS: Final = ("sliding_attention", "full_attention", "sliding_attention")
IDS: Final = tokens(2, 12, VOCABULARY)


def model(implementation: str = "sdpa") -> Any:
    return random_model(
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        vocab_size=VOCABULARY,
        hidden_size=SIZE,
        intermediate_size=WIDE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD,
        query_pre_attn_scalar=QUERY_SCALAR,
        sliding_window=WINDOW,
        layer_types=list(KINDS),
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": LOCAL_BASE},
            "full_attention": {"rope_type": "default", "rope_theta": BASE},
        },
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation=implementation,
    )


def run_of(port: Any) -> Run:
    return Run(port, {"input_ids": IDS, "use_cache": False})


def reference() -> Run:
    return run_of(model())


FAMILY: Final = Family("gemma3", reference)


@FAMILY.correct("eager attention in the place of sdpa")
def eager_attention() -> Run:
    return run_of(model("eager"))


@FAMILY.correct("the same in bfloat16", tolerance=BFLOAT16)
def bfloat16() -> Run:
    return run_of(model().bfloat16())


@FAMILY.correct("the text model of a multimodal one: a prefix before every name, embeddings as input")
def language_model_prefix() -> Run:
    class Multimodal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            port = model()
            self.language_model, self.lm_head = port.model, port.lm_head

        def forward(self, input_ids: Tensor, pixel_values: Tensor | None = None) -> dict[str, Tensor]:
            embeds = self.language_model.embed_tokens(input_ids)
            hidden = self.language_model(inputs_embeds=embeds, use_cache=False).last_hidden_state
            return {"logits": self.lm_head(hidden)}

    return Run(Multimodal().eval(), {"input_ids": IDS})


class PlainNorm(nn.Module):
    """The one that Gemma adds to its gains is in the weight."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(1 + norm.weight.detach()), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@FAMILY.correct("norms whose weights have the one added, as converters of checkpoints do")
def ones_in_the_norms() -> Run:
    port = model()
    replace(port, type(port.model.norm), PlainNorm)
    return run_of(port)


@FAMILY.correct("the scale of the embedding folded into its table, the head untied")
def scaled_table() -> Run:
    port = model()
    port.lm_head.weight = nn.Parameter(port.lm_head.weight.detach().clone())
    port.model.embed_tokens = table(port.model.embed_tokens.weight * SIZE**0.5)
    return run_of(port)


@FAMILY.correct("masks given as arguments, made once")
def masks_as_arguments() -> Run:
    full = causal_mask(IDS.shape[1])
    sliding = full & ~full.tril(-WINDOW)
    masks = {"full_attention": full[None, None], "sliding_attention": sliding[None, None]}
    return Run(model(), {"input_ids": IDS, "attention_mask": masks, "use_cache": False})


@FAMILY.correct("an attention mask of ones given", reference=reference)
def mask_of_ones() -> Run:
    return Run(model(), {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "use_cache": False})


@FAMILY.correct("the MLPs in int8, dequantised before use", tolerance=INT8)
def int8_mlps() -> Run:
    port = model()
    for layer in port.model.layers:
        replace(layer.mlp, nn.Linear, Int8Linear)
    return run_of(port)


class LocalOrGlobalAttention(nn.Module):
    def __init__(self, w: Weights, at: str, *, is_local: bool) -> None:
        super().__init__()
        self.to_q, self.to_kv = linear_of(w, f"{at}.q_proj"), linear_of(w, f"{at}.k_proj", f"{at}.v_proj")
        self.to_out = linear_of(w, f"{at}.o_proj")
        self.norm_q = RootMeanSquare(1 + w[f"{at}.q_norm.weight"], 1e-6)
        self.norm_k = RootMeanSquare(1 + w[f"{at}.k_norm.weight"], 1e-6)
        self.base = LOCAL_BASE if is_local else BASE
        self.window = WINDOW if is_local else 0  # 0: it sees all
        self.scale = QUERY_SCALAR**-0.5

    def forward(self, x: Tensor) -> Tensor:
        q = self.norm_q(split_heads(self.to_q(x), HEADS))
        k, v = (split_heads(part, KV_HEADS) for part in self.to_kv(x).chunk(2, -1))
        tables = rotary_tables(x.shape[1], HEAD, self.base)
        q, k = rotate_halves(q, *tables).to(v.dtype), rotate_halves(self.norm_k(k), *tables).to(v.dtype)
        mask = causal_mask(x.shape[1])
        if self.window:
            mask = mask & ~mask.tril(-self.window)
        out: Tensor = self.to_out(join_heads(attention(q, k, v, mask, self.scale)))
        return out


class GatedGelu(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.w_in, self.w_out = (
            linear_of(w, f"{at}.gate_proj", f"{at}.up_proj"),
            linear_of(w, f"{at}.down_proj"),
        )
        self.approximate = "tanh"

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w_in(x).chunk(2, -1)
        out: Tensor = self.w_out(F.gelu(gate, approximate=self.approximate) * up)
        return out


class Sandwich(nn.Module):
    """A sublayer between two norms, and the residual around it."""

    def __init__(self, inner: nn.Module, before: Tensor, after: Tensor) -> None:
        super().__init__()
        self.before, self.inner, self.after = RootMeanSquare(before, 1e-6), inner, RootMeanSquare(after, 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.after(self.inner(self.before(x)))
        return out


class Rewritten(nn.Module):
    def __init__(self, w: Weights) -> None:
        super().__init__()
        self.embedder = embedding_of(w, "model.embed_tokens")
        stack: list[nn.Module] = []
        for i, kind in enumerate(KINDS):
            at = f"model.layers.{i}"
            gains = {
                name: 1 + w[f"{at}.{name}_layernorm.weight"]
                for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")
            }
            mixer = LocalOrGlobalAttention(w, f"{at}.self_attn", is_local=kind == "sliding_attention")
            stack.append(Sandwich(mixer, gains["input"], gains["post_attention"]))
            gated = GatedGelu(w, f"{at}.mlp")
            stack.append(Sandwich(gated, gains["pre_feedforward"], gains["post_feedforward"]))
        self.stack = nn.Sequential(*stack)
        self.final_norm = RootMeanSquare(1 + w["model.norm.weight"], 1e-6)
        self.scale = SIZE**0.5

    def forward(self, token_ids: Tensor) -> Tensor:
        x = self.stack(self.embedder(token_ids) * self.scale)
        return F.linear(self.final_norm(x), self.embedder.weight)


def rewrite() -> Rewritten:
    return Rewritten(model().state_dict()).eval()


@FAMILY.correct("written anew: each sublayer a module between two norms, the head a product with the table")
def rewritten() -> Run:
    return Run(rewrite(), (IDS,))


@FAMILY.mistake(
    "gains of one norm without the one that is added",
    guilty="model.layers.1.input_layernorm",
    beside=ones_in_the_norms,
)
def one_not_added() -> Run:
    port = ones_in_the_norms().model
    with torch.no_grad():
        port.model.layers[1].input_layernorm.weight -= 1
    return run_of(port)


@FAMILY.mistake("embeddings that are not scaled", guilty="model.embed_tokens", beside=rewritten)
def embeddings_not_scaled() -> Run:
    port = rewrite()
    port.scale = 1.0
    return Run(port, (IDS,))


@FAMILY.mistake("a window that is one token too wide", guilty="model.layers.0.self_attn", beside=rewritten)
def window_off_by_one() -> Run:
    port: Any = rewrite()
    port.stack[0].inner.window = WINDOW + 1
    return Run(port, (IDS,))


@FAMILY.mistake(
    "the local rotary base in a layer of full attention", guilty="model.layers.1.self_attn", beside=rewritten
)
def local_base_in_full_attention() -> Run:
    port: Any = rewrite()
    port.stack[2].inner.base = LOCAL_BASE
    return Run(port, (IDS,))


@FAMILY.mistake(
    "scores scaled by the head size, not by the query scalar",
    guilty="model.layers.2.self_attn",
    beside=rewritten,
)
def scale_of_head_size() -> Run:
    port: Any = rewrite()
    port.stack[4].inner.scale = HEAD**-0.5
    return Run(port, (IDS,))


@FAMILY.mistake(
    "norms before and after the MLP swapped",
    guilty="model.layers.1.pre_feedforward_layernorm",
    beside=bfloat16,
)
def norms_swapped() -> Run:
    port = model()
    layer = port.model.layers[1]
    layer.pre_feedforward_layernorm, layer.post_feedforward_layernorm = (
        layer.post_feedforward_layernorm,
        layer.pre_feedforward_layernorm,
    )
    return run_of(port.bfloat16())


@FAMILY.mistake(
    "a given mask whose window is too narrow", guilty="model.layers.0.self_attn", beside=masks_as_arguments
)
def given_mask_too_narrow() -> Run:
    full = causal_mask(IDS.shape[1])
    sliding = full & ~full.tril(1 - WINDOW)
    masks = {"full_attention": full[None, None], "sliding_attention": sliding[None, None]}
    return Run(model(), {"input_ids": IDS, "attention_mask": masks, "use_cache": False})


@FAMILY.mistake(
    "the scale in the table and in the head that is tied to it", guilty="lm_head", beside=scaled_table
)
def scale_in_the_head() -> Run:
    port = scaled_table().model
    port.lm_head.weight = port.model.embed_tokens.weight
    return run_of(port)
