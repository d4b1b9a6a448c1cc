"""Attentions of real models, with one thing done otherwise in torch; `localize` has to say which.

The wrong attention is written out here in the target; the reference is the module of transformers.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tensorcap.diagnosis import Explanation
from tensorcap.localization import localize
from tensorcap.session import capture_workload
from tensorcap.workload import Workload
from tests.support.transformers_models import random_model

TEXT = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
TOKENS, DIM = 24, 16
LAYER = "model.layers.1.self_attn"
Change = dict[str, Any]


def with_large_weights(model: Any) -> Any:
    """So that attention is neither uniform nor one-hot, and that each channel of a norm differs."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            values = torch.randn(weight.shape, generator=generator)
            if weight.ndim > 1:
                size = 1.0 if "relative" in name else 0.15
                weight.copy_(size * values)
            else:
                weight.copy_((1.0 if name.endswith("weight") else 0.0) + 0.2 * values)
    return model


def text_inputs() -> dict[str, Any]:
    ids = torch.randint(1, 64, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "use_cache": False}


def explained(
    folder: Path,
    make: Callable[[], Any],
    site: str,
    forward: Callable[..., Any],
    inputs: dict[str, Any],
    change: Change,
    *,
    has_model: bool = True,
) -> Explanation | None:
    """The first explanation of the first suspect; None if nobody is accused."""
    reference, target = with_large_weights(make()), with_large_weights(make())
    module = target.get_submodule(site)
    module.forward = types.MethodType(lambda self, *a, **k: forward(self, *a, change=change, **k), module)
    ours, theirs = Workload(reference, inputs), Workload(target, inputs)
    capture_workload(ours, folder / "reference.h5")
    capture_workload(theirs, folder / "target.h5")
    paths = folder / "reference.h5", folder / "target.h5"
    suspects = localize(*paths, reference_model=ours if has_model else None).suspects
    if not suspects:
        return None
    assert suspects[0].module == site
    assert suspects[0].examined is not None
    assert suspects[0].examined.explanations, suspects[0].examined.tried
    return suspects[0].examined.explanations[0]


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotated in halves, the first channels of as many as there are angles for."""
    width = cos.shape[-1]
    some, rest = x[..., :width], x[..., width:]
    halves = torch.cat((-some[..., width // 2 :], some[..., : width // 2]), -1)
    return torch.cat((some * cos + halves * sin, rest), -1)


def moved(cos: Tensor, sin: Tensor, by: float) -> tuple[Tensor, Tensor]:
    step = torch.atan2(sin[:, :, 1:2], cos[:, :, 1:2]) * by
    return cos * step.cos() - sin * step.sin(), sin * step.cos() + cos * step.sin()


def decoder_attention(
    self: Any, hidden_states: Tensor, position_embeddings: Any, *_: Any, change: Change, **__: Any
) -> Any:
    """The attention of Llama and Qwen3, in eager, with a change."""
    batch, tokens, _width = hidden_states.shape
    linears = self.q_proj, self.k_proj, self.v_proj
    if "fused" in change:
        whole = functional.linear(hidden_states, torch.cat([linear.weight for linear in linears]))
        q, k, v = change["fused"](whole)
    else:
        q, k, v = (linear(hidden_states) for linear in linears)
    split = change.get("split", lambda name, x: x.view(batch, tokens, -1, DIM).transpose(1, 2))
    q, k, v = (split(name, x) for name, x in zip("qkv", (q, k, v), strict=True))
    norm = change.get("norm", "before") if hasattr(self, "q_norm") else "none"
    if norm == "before":
        q, k = self.q_norm(q), self.k_norm(k)
    cos, sin = (x[:, None] for x in change.get("table", lambda x: x)(position_embeddings))
    q = turned(q, *moved(cos, sin, change.get("ahead", 0.0)))
    k = turned(k, cos, sin)
    if norm == "after":
        q, k = self.q_norm(q), self.k_norm(k)
    group = q.shape[1] // k.shape[1]
    in_turn = change.get("in_turn", "")
    k, v = (
        x.repeat(1, group, 1, 1) if name in in_turn else x.repeat_interleave(group, 1)
        for name, x in (("k", k), ("v", v))
    )
    k = k.roll(change.get("keys_behind", 0), 2)
    query, key = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
    seen = change.get("seen", lambda query, key: key <= query)(query, key)
    scores = (q @ k.mT * self.scaling).masked_fill(~seen, -torch.inf)
    result = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, tokens, -1)
    return self.o_proj(result), None


def by_group(whole: Tensor) -> tuple[Tensor, ...]:
    """Read as if each of two heads of keys had its four queries, keys and values side by side."""
    groups = whole.view(*whole.shape[:2], 2, 6, DIM)
    parts = groups[..., :4, :], groups[..., 4, :], groups[..., 5, :]
    return tuple(part.reshape(*whole.shape[:2], -1) for part in parts)


def in_blocks(whole: Tensor) -> tuple[Tensor, ...]:
    return whole[..., :128], whole[..., 128:160], whole[..., 160:]


def first_channels(tables: Any) -> Any:
    """Of half the channels, with the first half of the frequencies."""
    return tuple(torch.cat((x[..., : DIM // 4],) * 2, -1) for x in tables)


def split_by_channel(name: str, x: Tensor) -> Tensor:
    if name == "v":
        return x.view(*x.shape[:2], DIM, -1).permute(0, 3, 1, 2)
    return x.view(*x.shape[:2], -1, DIM).transpose(1, 2)


def not_transposed(name: str, x: Tensor) -> Tensor:
    if name == "q":
        return x.reshape(x.shape[0], -1, x.shape[1], DIM)
    return x.view(*x.shape[:2], -1, DIM).transpose(1, 2)


def base_of_another_model(tables: Any) -> Any:
    angles = torch.arange(TOKENS)[:, None] * 500000.0 ** (-torch.arange(0, DIM, 2) / DIM)
    angles = torch.cat((angles, angles), -1)[None]
    return angles.cos(), angles.sin()


MISTAKES = [
    pytest.param({"ahead": 1.0}, "attention-positions", "1 positions ahead", id="queries-ahead"),
    pytest.param({"ahead": -5.0}, "attention-positions", "5 positions behind", id="queries-behind"),
    pytest.param(
        {"table": first_channels}, "attention-rotation", "the first 8 of 16 channels", id="half-rotated"
    ),
    pytest.param(
        {"table": base_of_another_model}, "attention-rotation", "base 500000 for 10000", id="other-base"
    ),
    pytest.param(
        {"fused": by_group}, "attention-layout", "group by group where they lie in blocks", id="by-group"
    ),
    pytest.param(
        {"fused": in_blocks, "in_turn": "kv"},
        "attention-heads",
        "all heads of keys in turn",
        id="fused-in-turn",
    ),
    pytest.param({"in_turn": "k"}, "attention-heads", "but not those of values", id="keys-in-turn"),
    pytest.param({"in_turn": "v"}, "attention-heads", "but not those of keys", id="values-in-turn"),
    pytest.param(
        {"split": split_by_channel}, "attention-layout", "channels of v into (channel, head)", id="split"
    ),
    pytest.param(
        {"split": not_transposed}, "attention-layout", "heads of q not transposed", id="not-transposed"
    ),
    pytest.param({"keys_behind": 1}, "token-shift", "the rotated key of the one before it", id="keys-behind"),
    pytest.param(
        {"seen": lambda query, key: (key <= query) & (key < 15)},
        "attention-mask",
        "the first 15 keys only",
        id="first",
    ),
    pytest.param(
        {"seen": lambda query, key: (key <= query) & (query - key < 7)},
        "attention-mask",
        "a window of 7 tokens",
        id="window-where-there-is-none",
    ),
    pytest.param(
        {"seen": lambda query, key: (key <= query) & (query // 8 == key // 8)},
        "attention-mask",
        "chunks of 8 tokens",
        id="chunks",
    ),
    pytest.param(
        {"seen": lambda query, key: (key <= query) | (key < 5)},
        "attention-mask",
        "the first 5 ones",
        id="prefix",
    ),
    pytest.param(
        {"seen": lambda query, key: (key <= query) & ~((query == 20) & (key == 3))},
        "attention-mask",
        "token 20 of the target does not see 3",
        id="one-key",
    ),
]


@pytest.mark.slow
@pytest.mark.spec("DIA-120", "DIA-121")
@pytest.mark.parametrize(("change", "kind", "words"), MISTAKES)
def test_what_an_attention_of_a_model_does_otherwise_is_said(
    tmp_path: Path, change: Change, kind: str, words: str
) -> None:
    found = explained(
        tmp_path,
        lambda: random_model("LlamaForCausalLM", **TEXT),
        LAYER,
        decoder_attention,
        text_inputs(),
        change,
    )
    assert found is not None
    assert (found.kind, words in found.text) == (kind, True), found.text


@pytest.mark.slow
@pytest.mark.spec("DIA-120")
@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize(
    ("norm", "words"), [("after", "behind the rotation"), ("none", "without the norm of q and k")]
)
def test_norms_of_queries_and_keys_that_are_elsewhere_are_said(
    tmp_path: Path, norm: str, words: str, is_fused: bool
) -> None:
    change: Change = {"norm": norm, **({"fused": in_blocks} if is_fused else {})}
    found = explained(
        tmp_path,
        lambda: random_model("Qwen3ForCausalLM", **TEXT),
        LAYER,
        decoder_attention,
        text_inputs(),
        change,
    )
    assert found is not None
    assert (found.kind, words in found.text) == ("attention-norm", True), found.text


@pytest.mark.slow
@pytest.mark.spec("DIA-120")
@pytest.mark.parametrize("change", [{}, {"fused": in_blocks}], ids=["as-it-is", "fused"])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_the_same_attention_written_out_is_no_suspect(tmp_path: Path, name: str, change: Change) -> None:
    make = lambda: random_model(name, **TEXT)  # noqa: E731  # the model is made twice
    assert explained(tmp_path, make, LAYER, decoder_attention, text_inputs(), change) is None


def neox_attention(
    self: Any, hidden_states: Tensor, *_: Any, position_embeddings: Any, change: Change, **__: Any
) -> Any:
    """The attention of GPT-NeoX, a quarter of whose channels is rotated."""
    whole = self.query_key_value(hidden_states)
    shape = *whole.shape[:2], -1, DIM
    if change["reads"] == "blocks":
        q, k, v = (x.reshape(shape).transpose(1, 2) for x in whole.chunk(3, -1))
    else:
        q, k, v = whole.view(*whole.shape[:2], -1, 3 * DIM).transpose(1, 2).chunk(3, -1)
    cos, sin = (x[:, None] for x in position_embeddings)
    width = cos.shape[-1] if change["rotates"] == "last" else 0
    if width:
        q, k = (torch.cat((x[..., :-width], turned(x[..., -width:], cos, sin)), -1) for x in (q, k))
    else:
        q, k = turned(q, cos, sin), turned(k, cos, sin)
    result = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return self.dense(result.transpose(1, 2).reshape(*whole.shape[:2], -1)), None


@pytest.mark.slow
@pytest.mark.spec("DIA-120")
@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (
            {"reads": "blocks", "rotates": "first"},
            "attention-layout",
            "in blocks where they lie group by group",
        ),
        ({"reads": "heads", "rotates": "last"}, "attention-rotation", "the last 4 of 16 channels"),
    ],
)
@pytest.mark.parametrize("has_model", [True, False])
def test_what_is_read_of_a_fused_result_and_which_channels_are_rotated_is_said(
    tmp_path: Path, change: Change, kind: str, words: str, has_model: bool
) -> None:
    config: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    }
    found = explained(
        tmp_path,
        lambda: random_model("GPTNeoXForCausalLM", **config),
        "gpt_neox.layers.1.attention",
        neox_attention,
        text_inputs(),
        change,
        has_model=has_model,
    )
    assert found is not None
    assert (found.kind, words in found.text) == (kind, True), found.text


def t5_attention(
    self: Any,
    hidden_states: Tensor,
    mask: Any = None,
    key_value_states: Any = None,
    position_bias: Any = None,
    *,
    change: Change,
    **_: Any,
) -> Any:
    """The attention of T5 within itself or across, in eager."""
    source = hidden_states if key_value_states is None else key_value_states
    width = self.key_value_proj_dim
    q, k, v = (
        linear(x).view(len(x), -1, self.n_heads, width).transpose(1, 2)
        for linear, x in ((self.q, hidden_states), (self.k, source), (self.v, source))
    )
    bias = position_bias
    if bias is None:
        bias = torch.zeros(1, self.n_heads, q.shape[2], k.shape[2])
        bias = bias if mask is None else bias + mask
    scores = q @ k.mT * change.get("scale", 1.0) + change.get("bias", lambda x: x)(bias)
    scores[..., change.get("keys", scores.shape[-1]) :] = -torch.inf
    result = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    return self.o(result), bias, None


@pytest.mark.slow
@pytest.mark.spec("DIA-120", "DIA-121", "DIA-122")
@pytest.mark.parametrize("has_model", [True, False])
@pytest.mark.parametrize(
    ("site", "change", "kind", "words"),
    [
        (
            "encoder.block.1.layer.0.SelfAttention",
            {"bias": lambda x: x.mT},
            "attention-bias",
            "keys exchanged",
        ),
        (
            "encoder.block.1.layer.0.SelfAttention",
            {"bias": lambda x: x.flip(1)},
            "attention-bias",
            "heads reversed",
        ),
        ("decoder.block.1.layer.1.EncDecAttention", {"scale": 0.3}, "attention-scale", "0.3"),
        ("decoder.block.1.layer.1.EncDecAttention", {"keys": 9}, "attention-mask", "the first 9 keys only"),
    ],
    ids=["bias-transposed", "bias-of-other-heads", "cross-scale", "cross-first-keys"],
)
def test_biases_of_positions_and_attention_across_are_said(
    tmp_path: Path, site: str, change: Change, kind: str, words: str, has_model: bool
) -> None:
    config = {"vocab_size": 64, "d_model": 64, "d_kv": 24, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    inputs = text_inputs() | {"decoder_input_ids": text_inputs()["input_ids"][:, :11]}
    found = explained(
        tmp_path,
        lambda: random_model("T5ForConditionalGeneration", dropout_rate=0.0, **config),
        site,
        t5_attention,
        inputs,
        change,
        has_model=has_model,
    )
    assert found is not None
    assert (found.kind, words in found.text) == (kind, True), found.text


def swin_attention(
    self: Any, hidden_states: Tensor, attention_mask: Any = None, *, change: Change, **_: Any
) -> Any:
    """The attention of Swin within windows, in eager."""
    q, k, v = (
        linear(hidden_states).view(*hidden_states.shape[:2], -1, self.head_dim).transpose(1, 2)
        for linear in (self.q_proj, self.k_proj, self.v_proj)
    )
    scores = q @ k.mT * self.scaling + change.get("bias", lambda x: x)(self.relative_position_bias())
    if attention_mask is not None and "no mask" not in change:
        scores = scores + attention_mask.repeat(len(scores) // len(attention_mask), 1, 1)[:, None]
    result = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    return self.o_proj(result), None


@pytest.mark.slow
@pytest.mark.spec("DIA-122")
@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"bias": lambda x: 0 * x}, "attention-bias", "the target adds no bias of positions to scores"),
        (
            {"bias": lambda x: x.mT},
            "attention-bias",
            "the bias of positions of the target has queries and keys exchanged",
        ),
        ({"no mask": True}, "attention-mask", "the target does not look at the mask"),
    ],
    ids=["no-bias", "bias-transposed", "no-mask"],
)
def test_attention_within_windows_of_an_image_is_known(
    tmp_path: Path, change: Change, kind: str, text: str
) -> None:
    config = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
    found = explained(
        tmp_path,
        lambda: random_model("SwinForImageClassification", window_size=4, **config),
        "swin.encoder.layers.0.blocks.1.attention",
        swin_attention,
        {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))},
        change,
    )
    assert found is not None
    assert (found.kind, found.text) == (kind, text)


def bloom_attention(
    self: Any, hidden_states: Tensor, residual: Tensor, alibi: Tensor, *a: Any, change: Change, **k: Any
) -> Any:
    """The attention of Bloom, given other slopes."""
    slopes = alibi.view(-1, self.num_heads, *alibi.shape[1:])
    return type(self).forward(
        self, hidden_states, residual, change["slopes"](slopes).reshape(alibi.shape), *a, **k
    )


@pytest.mark.slow
@pytest.mark.spec("DIA-122")
@pytest.mark.parametrize(
    ("slopes", "words"),
    [(lambda x: x.flip(1), "heads reversed"), (lambda x: x * 8**-0.5, "the reference times 0.3536")],
    ids=["of-other-heads", "before-the-scale"],
)
def test_slopes_of_alibi_are_told_by_what_queries_take_of_keys(
    tmp_path: Path, slopes: Callable[[Tensor], Tensor], words: str
) -> None:
    config = {"vocab_size": 64, "hidden_size": 64, "n_layer": 2, "n_head": 8}
    found = explained(
        tmp_path,
        lambda: random_model("BloomForCausalLM", **config),
        "transformer.h.1.self_attention",
        bloom_attention,
        text_inputs(),
        {"slopes": slopes},
    )
    assert found is not None
    assert (found.kind, words in found.text) == ("attention-bias", True), found.text
