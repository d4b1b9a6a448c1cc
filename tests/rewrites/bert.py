"""BERT, and what becomes of it in other hands."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from transformers import BertConfig, BertModel

from tests.rewrites.catalogue import BFLOAT16, FLOAT16, INT8, Family, Run, random_model, tokens
from tests.rewrites.layers import (
    Int8Linear,
    Weights,
    attention,
    embedding_of,
    join_heads,
    layer_norm_of,
    linear_of,
    replace,
    split_heads,
)

LAYERS, HEADS, SIZE, WIDE, VOCABULARY, LENGTH = 3, 4, 48, 128, 101, 12
IDS: Final = tokens(2, LENGTH, VOCABULARY)
MASK: Final = torch.ones(2, LENGTH, dtype=torch.long)
MASK[1, 8:] = 0
TYPES: Final = torch.zeros(2, LENGTH, dtype=torch.long)
TYPES[:, 5:] = 1
INPUTS: Final = {"input_ids": IDS, "attention_mask": MASK, "token_type_ids": TYPES}


def model(implementation: str = "sdpa", *, pooler: bool = True) -> Any:
    port = random_model(
        BertModel,
        BertConfig,
        vocab_size=VOCABULARY,
        hidden_size=SIZE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=WIDE,
        max_position_embeddings=32,
        attn_implementation=implementation,
    )
    if not pooler:
        port.pooler = None
    return port


def reference() -> Run:
    return Run(model(), INPUTS)


def reference_without_padding() -> Run:
    return Run(model(pooler=False), {"input_ids": IDS, "token_type_ids": TYPES})


def attended(hidden: Tensor) -> Tensor:
    """Rows of tokens that are no padding."""
    return hidden[MASK.bool()]


FAMILY: Final = Family("bert", reference)


@FAMILY.correct("eager attention in the place of sdpa, on padded rows")
def eager_attention() -> Run:
    return Run(model("eager"), INPUTS)


@FAMILY.correct("the same in float16", tolerance=FLOAT16)
def float16() -> Run:
    return Run(model().half(), INPUTS)


@FAMILY.correct("the same in bfloat16, eager", tolerance=BFLOAT16)
def bfloat16_in_eager() -> Run:
    return Run(model("eager").bfloat16(), INPUTS)


@FAMILY.correct("no pooler, whose result nobody needs")
def without_pooler() -> Run:
    return Run(model(pooler=False), INPUTS)


@FAMILY.correct("a mask of booleans in the place of integers")
def boolean_mask() -> Run:
    return Run(model(), {**INPUTS, "attention_mask": MASK.bool()})


@FAMILY.correct("the padded row alone, without its padding", reference_view=lambda hidden: hidden[1:2, :8])
def row_without_padding() -> Run:
    return Run(model(), {"input_ids": IDS[1:2, :8], "token_type_ids": TYPES[1:2, :8]})


@FAMILY.correct("an encoder that a sentence embedder wraps: one argument, a dictionary with the mean")
def sentence_embedder() -> Run:
    class Embedder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.auto_model = model()

        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            hidden = self.auto_model(**features).last_hidden_state
            mask = features["attention_mask"].unsqueeze(-1)
            return {"last_hidden_state": hidden, "sentence": (hidden * mask).sum(1) / mask.sum(1)}

    return Run(Embedder().eval(), (INPUTS,))


@FAMILY.correct("linear layers of the blocks in int8, dequantised before use", tolerance=INT8)
def int8_weights() -> Run:
    port = model()
    replace(port.encoder, nn.Linear, Int8Linear)
    return Run(port, INPUTS)


@FAMILY.correct("each layer compiled")
def compiled_layers() -> Run:
    port = model()
    for i in range(LAYERS):
        port.encoder.layer[i] = torch.compile(port.encoder.layer[i], backend="eager")
    return Run(port, INPUTS)


@FAMILY.correct(
    "one type of tokens, folded into the table of positions",
    reference=lambda: Run(model(), {"input_ids": IDS}),
)
def types_folded() -> Run:
    port = model()
    with torch.no_grad():
        port.embeddings.position_embeddings.weight += port.embeddings.token_type_embeddings.weight[0]
        port.embeddings.token_type_embeddings.weight.zero_()
    return Run(port, {"input_ids": IDS})


class TorchEncoder(nn.Module):
    """Embeddings of its own, and layers of torch.nn."""

    def __init__(self, w: Weights) -> None:
        super().__init__()
        self.words = embedding_of(w, "embeddings.word_embeddings")
        self.positions = embedding_of(w, "embeddings.position_embeddings")
        self.types = embedding_of(w, "embeddings.token_type_embeddings")
        self.norm = layer_norm_of(w, "embeddings.LayerNorm", 1e-12)
        layer = nn.TransformerEncoderLayer(
            SIZE, HEADS, WIDE, dropout=0.0, activation="gelu", layer_norm_eps=1e-12, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        names = {
            "self_attn.out_proj": "attention.output.dense",
            "linear1": "intermediate.dense",
            "linear2": "output.dense",
            "norm1": "attention.output.LayerNorm",
            "norm2": "output.LayerNorm",
        }
        with torch.no_grad():
            for i, block in enumerate(self.encoder.layers):
                at = f"encoder.layer.{i}"
                fused = linear_of(w, *(f"{at}.attention.self.{name}" for name in ("query", "key", "value")))
                attn: Any = block.self_attn
                attn.in_proj_weight.copy_(fused.weight)
                attn.in_proj_bias.copy_(fused.bias)
                for mine, theirs in names.items():
                    module: Any = block.get_submodule(mine)
                    module.weight.copy_(w[f"{at}.{theirs}.weight"])
                    module.bias.copy_(w[f"{at}.{theirs}.bias"])

    def forward(self, ids: Tensor, types: Tensor) -> Tensor:
        x = self.words(ids) + self.positions(torch.arange(ids.shape[1])) + self.types(types)
        out: Tensor = self.encoder(self.norm(x))
        return out


@FAMILY.correct("layers of torch.nn.TransformerEncoder", reference=reference_without_padding)
def torch_encoder() -> Run:
    return Run(TorchEncoder(model().state_dict()).eval(), (IDS, TYPES))


class PostNormBlock(nn.Module):
    def __init__(self, w: Weights, at: str) -> None:
        super().__init__()
        self.qkv = linear_of(w, *(f"{at}.attention.self.{name}" for name in ("query", "key", "value")))
        self.out = linear_of(w, f"{at}.attention.output.dense")
        self.attention_norm = layer_norm_of(w, f"{at}.attention.output.LayerNorm", 1e-12)
        self.fc_in, self.fc_out = linear_of(w, f"{at}.intermediate.dense"), linear_of(w, f"{at}.output.dense")
        self.output_norm = layer_norm_of(w, f"{at}.output.LayerNorm", 1e-12)
        self.uses_mask, self.residual_after_norm, self.approximate = True, False, "none"

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (split_heads(part, HEADS) for part in self.qkv(x).chunk(3, -1))
        mixed = self.out(join_heads(attention(q, k, v, mask if self.uses_mask else None)))
        x = x + self.attention_norm(mixed) if self.residual_after_norm else self.attention_norm(x + mixed)
        out: Tensor = self.output_norm(x + self.fc_out(F.gelu(self.fc_in(x), approximate=self.approximate)))
        return out


class Rewritten(nn.Module):
    def __init__(self, w: Weights) -> None:
        super().__init__()
        self.tok, self.pos, self.seg = (
            embedding_of(w, f"embeddings.{name}_embeddings") for name in ("word", "position", "token_type")
        )
        self.embedding_norm = layer_norm_of(w, "embeddings.LayerNorm", 1e-12)
        self.blocks = nn.ModuleList(PostNormBlock(w, f"encoder.layer.{i}") for i in range(LAYERS))
        self.pooled = linear_of(w, "pooler.dense")
        self.uses_segments, self.first_position = True, 0

    def forward(self, tokens: Tensor, segments: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1]) + self.first_position)
        if self.uses_segments:
            x = x + self.seg(segments)
        x = self.embedding_norm(x)
        for block in self.blocks:
            x = block(x, ~padding[:, None, None, :])
        return x, self.pooled(x[:, 0]).tanh()


def rewrite() -> Any:
    return Rewritten(model().state_dict()).eval()


def rewrite_run(port: Any) -> Run:
    return Run(port, (IDS, TYPES, MASK == 0))


@FAMILY.correct("written anew with names of its own; the mask says what is padding")
def rewritten() -> Run:
    return rewrite_run(rewrite())


@FAMILY.correct("written anew, in float16", tolerance=FLOAT16)
def rewritten_float16() -> Run:
    return rewrite_run(rewrite().half())


@FAMILY.mistake("no embeddings of token types", guilty="embeddings.token_type_embeddings", beside=rewritten)
def no_token_types() -> Run:
    port = rewrite()
    port.uses_segments = False
    return rewrite_run(port)


@FAMILY.mistake(
    "padding is attended to in one layer", guilty="encoder.layer.1.attention.self", beside=rewritten
)
def padding_attended() -> Run:
    port = rewrite()
    port.blocks[1].uses_mask = False
    return rewrite_run(port)


@FAMILY.mistake(
    "the residual added behind the norm", guilty="encoder.layer.2.attention.output", beside=rewritten
)
def residual_after_norm() -> Run:
    port = rewrite()
    port.blocks[2].residual_after_norm = True
    return rewrite_run(port)


@FAMILY.mistake(
    "the approximated GELU in the place of the exact one",
    guilty="encoder.layer.0.intermediate",
    beside=rewritten,
)
def approximated_gelu() -> Run:
    port = rewrite()
    for block in port.blocks:
        block.approximate = "tanh"
    return rewrite_run(port)


@FAMILY.mistake(
    "positions that start at two, as in RoBERTa", guilty="embeddings.position_embeddings", beside=rewritten
)
def positions_of_roberta() -> Run:
    port = rewrite()
    port.first_position = 2
    return rewrite_run(port)


@FAMILY.mistake(
    "the epsilon of torch's default, times a hundred",
    guilty="encoder.layer.1.output.LayerNorm",
    beside=eager_attention,
)
def epsilon() -> Run:
    port = model("eager")
    port.encoder.layer[1].output.LayerNorm.eps = 1e-3
    return Run(port, INPUTS)


@FAMILY.mistake("weights of two layers swapped", guilty="encoder.layer.1", beside=float16)
def layers_swapped() -> Run:
    port = model()
    layers = port.encoder.layer
    second = {name: tensor.clone() for name, tensor in layers[2].state_dict().items()}
    layers[2].load_state_dict(layers[1].state_dict())
    layers[1].load_state_dict(second)
    return Run(port.half(), INPUTS)


@FAMILY.mistake(
    "dropout that is active: the model was left in train mode",
    guilty="embeddings.dropout",
    beside=without_pooler,
)
def train_mode() -> Run:
    torch.manual_seed(0)
    return Run(model(pooler=False).train(), INPUTS)


@FAMILY.mistake("the other type of tokens folded", guilty="embeddings", beside=types_folded)
def other_type_folded() -> Run:
    port = model()
    with torch.no_grad():
        port.embeddings.position_embeddings.weight += port.embeddings.token_type_embeddings.weight[1]
        port.embeddings.token_type_embeddings.weight.zero_()
    return Run(port, {"input_ids": IDS})


@FAMILY.mistake(
    "the row without padding, its positions counted from the padding",
    guilty="embeddings.position_embeddings",
    beside=row_without_padding,
)
def positions_of_left_padding() -> Run:
    inputs = {
        "input_ids": IDS[1:2, :8],
        "token_type_ids": TYPES[1:2, :8],
        "position_ids": torch.arange(4, 12)[None],
    }
    return Run(model(), inputs)


@FAMILY.mistake(
    "compiled layers, two weights of one swapped",
    guilty="encoder.layer.1.attention.self",
    beside=compiled_layers,
)
def swapped_inside_compiled() -> Run:
    port = model()
    inner = port.encoder.layer[1].attention.self
    inner.query, inner.value = inner.value, inner.query
    for i in range(LAYERS):
        port.encoder.layer[i] = torch.compile(port.encoder.layer[i], backend="eager")
    return Run(port, INPUTS)
