"""GPT-2, and what becomes of it in other hands."""

from __future__ import annotations

import copy
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from tests.rewrites.catalogue import BFLOAT16, Family, Run, random_model, randomise, tokens
from tests.rewrites.layers import (
    Weights,
    Wrapper,
    attention,
    causal_mask,
    embedding_of,
    join_heads,
    layer_norm_of,
    linear,
    replace,
    split_heads,
)

LAYERS, HEADS, SIZE, VOCABULARY = 3, 4, 48, 101
IDS: Final = tokens(2, 10, VOCABULARY)


def model(implementation: str = "sdpa") -> Any:
    return random_model(
        GPT2LMHeadModel,
        GPT2Config,
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=SIZE,
        n_layer=LAYERS,
        n_head=HEADS,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation=implementation,
    )


def reference() -> Run:
    return Run(model(), {"input_ids": IDS, "use_cache": False})


FAMILY: Final = Family("gpt2", reference)


@FAMILY.correct("eager attention in the place of sdpa, which returns its weights")
def eager_attention() -> Run:
    return Run(model("eager"), {"input_ids": IDS, "use_cache": False})


@FAMILY.correct("an outer module with another argument that returns bare logits")
def wrapped() -> Run:
    return Run(Wrapper(model()), (IDS,))


@FAMILY.correct("a tuple in the place of the dataclass of outputs, tokens given by position")
def tuple_output() -> Run:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            port = model()
            self.transformer, self.lm_head = port.transformer, port.lm_head

        def forward(self, idx: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.transformer(idx, use_cache=False, return_dict=False)[0]
            return self.lm_head(hidden), hidden

    return Run(Plain().eval(), (IDS,))


@FAMILY.correct("dropouts replaced by nn.Identity")
def identities_for_dropouts() -> Run:
    port = model()
    replace(port, nn.Dropout, lambda _: nn.Identity())
    return Run(port, {"input_ids": IDS, "use_cache": False})


@FAMILY.correct("Conv1D replaced by nn.Linear with the weight transposed")
def linears_for_conv1d() -> Run:
    port = model()
    replace(port, Conv1D, lambda conv: linear(conv.weight.T, conv.bias))
    return Run(port, {"input_ids": IDS, "use_cache": False})


@FAMILY.correct("the same in bfloat16", tolerance=BFLOAT16)
def bfloat16() -> Run:
    return Run(model().bfloat16(), {"input_ids": IDS, "use_cache": False})


@FAMILY.correct("a head of its own with the weights of the embedding")
def untied_head() -> Run:
    port = model()
    port.lm_head.weight = nn.Parameter(port.lm_head.weight.detach().clone())
    return Run(port, {"input_ids": IDS, "use_cache": False})


@FAMILY.correct(
    "the vocabulary padded to a multiple of 64", target_view=lambda logits: logits[..., :VOCABULARY]
)
def padded_vocabulary() -> Run:
    port = model()
    port.resize_token_embeddings(128, mean_resizing=False)
    return Run(port, {"input_ids": IDS, "use_cache": False})


@FAMILY.correct("only the second row of the batch", reference_view=lambda logits: logits[1:2])
def one_row() -> Run:
    return Run(model(), {"input_ids": IDS[1:2], "use_cache": False})


@FAMILY.correct("a cache that is filled, and not read")
def with_cache() -> Run:
    return Run(model(), {"input_ids": IDS, "use_cache": True})


@FAMILY.correct("every MLP compiled")
def compiled_mlps() -> Run:
    port = model()
    for block in port.transformer.h:
        block.mlp = torch.compile(block.mlp, backend="eager")
    return Run(port, {"input_ids": IDS, "use_cache": False})


@FAMILY.correct("gains and offsets of the layer norms folded into the projections behind them")
def folded_norms() -> Run:
    port = model()
    for block in port.transformer.h:
        for norm_name, projection in (("ln_1", block.attn.c_attn), ("ln_2", block.mlp.c_fc)):
            norm = getattr(block, norm_name)
            with torch.no_grad():
                projection.bias += norm.bias @ projection.weight
                projection.weight *= norm.weight[:, None]
            setattr(block, norm_name, nn.LayerNorm(SIZE, norm.eps, elementwise_affine=False))
    return Run(port, {"input_ids": IDS, "use_cache": False})


class SelfAttention(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.qkv = linear(w[f"{at}.c_attn.weight"].T, w[f"{at}.c_attn.bias"])
        self.proj = linear(w[f"{at}.c_proj.weight"].T, w[f"{at}.c_proj.bias"])
        self.is_causal, self.scale = True, (SIZE // HEADS) ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split_heads(part, HEADS) for part in self.qkv(x).chunk(3, -1))
        mask = causal_mask(x.shape[1]) if self.is_causal else None
        mixed: Tensor = self.proj(join_heads(attention(q, k, v, mask, self.scale)))
        return mixed


class FeedForward(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.up = linear(w[f"{at}.c_fc.weight"].T, w[f"{at}.c_fc.bias"])
        self.down = linear(w[f"{at}.c_proj.weight"].T, w[f"{at}.c_proj.bias"])
        self.approximate = "tanh"

    def forward(self, x: Tensor) -> Tensor:
        widened: Tensor = self.down(F.gelu(self.up(x), approximate=self.approximate))
        return widened


class Block(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = layer_norm_of(w, f"{at}.ln_1", 1e-5), layer_norm_of(w, f"{at}.ln_2", 1e-5)
        self.attention, self.ffn = SelfAttention(w, f"{at}.attn"), FeedForward(w, f"{at}.mlp")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.ffn(self.norm2(x))
        return out


class MiniGPT(nn.Module):
    """As in a book on language models: no dropout, no cache, no mask as input."""

    def __init__(self, w: Weights, *, last_only: bool = False) -> None:
        super().__init__()
        self.token_embedding = embedding_of(w, "transformer.wte")
        self.position_embedding = embedding_of(w, "transformer.wpe")
        self.blocks = nn.Sequential(*(Block(w, f"transformer.h.{i}") for i in range(LAYERS)))
        self.final_norm = layer_norm_of(w, "transformer.ln_f", 1e-5)
        self.head = linear(w["lm_head.weight"])
        self.last_only, self.first_position = last_only, 0

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1]) + self.first_position
        x = self.final_norm(self.blocks(self.token_embedding(tokens) + self.position_embedding(positions)))
        logits: Tensor = self.head(x[:, -1:] if self.last_only else x)
        return logits


def rewrite(**options: bool) -> MiniGPT:
    return MiniGPT(model().state_dict(), **options).eval()


@FAMILY.correct("written anew with names of its own")
def rewritten() -> Run:
    return Run(rewrite(), (IDS,))


@FAMILY.correct(
    "written anew, with logits of the last token alone", reference_view=lambda logits: logits[:, -1:]
)
def rewritten_last_token() -> Run:
    return Run(rewrite(last_only=True), (IDS,))


@FAMILY.correct("written anew, in bfloat16", tolerance=BFLOAT16)
def rewritten_bfloat16() -> Run:
    return Run(rewrite().bfloat16(), (IDS,))


@FAMILY.correct("the whole model compiled")
def compiled() -> Run:
    return Run(torch.compile(model(), backend="eager"), {"input_ids": IDS, "use_cache": False})


def generate(port: Any, ids: Tensor) -> Any:
    return port.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=None)


@FAMILY.correct(
    "three tokens generated by a loop of its own", reference=lambda: Run(model(), (IDS[:, :5],), generate)
)
def loop_of_its_own() -> Run:
    def call(port: Any, ids: Tensor) -> Tensor:
        output = port(input_ids=ids, use_cache=True)
        for step in range(3):
            chosen = output.logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, chosen], 1)
            if step < 2:
                output = port(input_ids=chosen, use_cache=True, cache=output.cache)
        return ids

    return Run(model("eager"), (IDS[:, :5],), call)


@FAMILY.mistake(
    "the exact GELU in the place of its approximation", guilty="transformer.h.1.mlp.act", beside=rewritten
)
def exact_gelu() -> Run:
    port: Any = rewrite()
    port.blocks[1].ffn.approximate = "none"
    return Run(port, (IDS,))


@FAMILY.mistake("no causal mask in one layer", guilty="transformer.h.2.attn", beside=rewritten)
def no_causal_mask() -> Run:
    port: Any = rewrite()
    port.blocks[2].attention.is_causal = False
    return Run(port, (IDS,))


@FAMILY.mistake("positions that start at one", guilty="transformer.wpe", beside=rewritten)
def positions_from_one() -> Run:
    port = rewrite()
    port.first_position = 1
    return Run(port, (IDS,))


@FAMILY.mistake(
    "a square weight of Conv1D that was not transposed",
    guilty="transformer.h.1.attn.c_proj",
    beside=rewritten,
)
def square_weight_not_transposed() -> Run:
    port: Any = rewrite()
    layer = port.blocks[1].attention.proj
    layer.weight = nn.Parameter(layer.weight.detach().T.clone())
    return Run(port, (IDS,))


@FAMILY.mistake(
    "a head that kept its weights while the embedding was loaded", guilty="lm_head", beside=untied_head
)
def stale_head() -> Run:
    port = model()
    stale = copy.deepcopy(port)
    randomise(stale, seed=7)
    port.lm_head.weight = nn.Parameter(stale.lm_head.weight.detach().clone())
    return Run(port, {"input_ids": IDS, "use_cache": False})


@FAMILY.mistake(
    "a layer norm with the epsilon of another library",
    guilty="transformer.h.1.ln_2",
    beside=identities_for_dropouts,
)
def epsilon_of_another_library() -> Run:
    port = identities_for_dropouts().model
    port.transformer.h[1].ln_2.eps = 1e-3
    return Run(port, {"input_ids": IDS, "use_cache": False})


@FAMILY.mistake(
    "in bfloat16, a layer norm whose gain was not loaded", guilty="transformer.h.1.ln_1", beside=bfloat16
)
def gain_not_loaded_in_bfloat16() -> Run:
    port = model().bfloat16()
    nn.init.ones_(port.transformer.h[1].ln_1.weight)
    return Run(port, {"input_ids": IDS, "use_cache": False})


@FAMILY.mistake(
    "key and value parts of the fused projection swapped",
    guilty="transformer.h.0.attn.c_attn",
    beside=linears_for_conv1d,
)
def keys_and_values_swapped() -> Run:
    port = linears_for_conv1d().model
    layer = port.transformer.h[0].attn.c_attn
    with torch.no_grad():
        for tensor in (layer.weight, layer.bias):
            q, k, v = tensor.chunk(3)
            tensor.copy_(torch.cat([q, v, k]))
    return Run(port, {"input_ids": IDS, "use_cache": False})


@FAMILY.mistake(
    "another activation inside what is compiled", guilty="transformer.h.1.mlp", beside=compiled_mlps
)
def activation_inside_compiled() -> Run:
    port = model()
    port.transformer.h[1].mlp.act = nn.SiLU()
    for block in port.transformer.h:
        block.mlp = torch.compile(block.mlp, backend="eager")
    return Run(port, {"input_ids": IDS, "use_cache": False})


@FAMILY.mistake("one row of the batch, an offset not loaded", guilty="transformer.h.2.ln_1", beside=one_row)
def one_row_without_offset() -> Run:
    port = model()
    nn.init.zeros_(port.transformer.h[2].ln_1.bias)
    return Run(port, {"input_ids": IDS[1:2], "use_cache": False})


@FAMILY.mistake("logits of the token before the last", guilty="lm_head", beside=rewritten_last_token)
def token_before_the_last() -> Run:
    class Early(MiniGPT):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens)[:, -2:-1]

    return Run(Early(model().state_dict()).eval(), (IDS,))


@FAMILY.mistake("the vocabulary padded in front", guilty="lm_head", beside=padded_vocabulary)
def vocabulary_padded_in_front() -> Run:
    port = padded_vocabulary().model
    weight = port.lm_head.weight.detach()
    port.lm_head.weight = nn.Parameter(weight.roll(1, 0))
    return Run(port, {"input_ids": IDS, "use_cache": False})
