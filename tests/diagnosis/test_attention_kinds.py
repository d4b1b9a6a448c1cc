"""Attentions with masks, biases of positions, sinks, and keys of earlier steps, worked out by numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tensorcap.diagnosis import Diagnosis
from tensorcap_formats.dtypes import Array
from tests.diagnosis.conftest import Diagnose
from tests.support.floats import to_bfloat16

HEADS, DIM = 4, 16
CONFIG = {"d_model": HEADS * DIM, "num_heads": HEADS}
CORE = "0/attn.o/input.input"


def core(
    q: Array,
    k: Array,
    v: Array,
    seen: Array,
    *,
    scale: float = DIM**-0.5,
    bias: Array | None = None,
    sinks: Array | None = None,
) -> Array:
    """Of every query, head by head; `seen` is (batch, query, key)."""
    q, k, v = (x.reshape(*x.shape[:2], HEADS, DIM).astype(float) for x in (q, k, v))
    out = np.zeros_like(q)
    for batch, token, head in np.ndindex(q.shape[:3]):
        at = np.flatnonzero(seen[batch, token])
        scores = k[batch, at, head] @ q[batch, token, head] * scale
        scores = scores if bias is None else scores + bias[head, token, at]
        e = np.exp(scores)
        total = e.sum() + (0.0 if sinks is None else np.exp(sinks[head]))
        out[batch, token, head] = e @ v[batch, at, head] / total
    return out.reshape(*q.shape[:2], -1)


def causal(tokens: int) -> Array:
    return np.tile(np.tri(tokens, dtype=bool), (2, 1, 1))


def padded(queries: int, keys: int) -> Array:
    """The second sequence is five tokens shorter."""
    seen = np.ones((2, queries, keys), bool)
    seen[1, :, -5:] = False
    return seen


class Made:
    """Queries, keys and values of both sides, and their diagnosis."""

    def __init__(self, diagnosed: Diagnose, queries: int, keys: int, precision: str) -> None:
        rng = np.random.default_rng(3)
        shapes = {"q": queries, "k": keys, "v": keys}
        self.values = {name: rng.standard_normal((2, n, HEADS * DIM)) for name, n in shapes.items()}
        self.diagnosed, self.precision = diagnosed, precision
        self.narrow = to_bfloat16 if precision == "bfloat16" else lambda x: x.astype(np.float32)

    def named(self, ours: Array, theirs: Array, beside: dict[str, Array]) -> Diagnosis:
        wide = {f"0/attn.{name}/output": x for name, x in self.values.items()} | beside
        return self.diagnosed(
            {**wide, CORE: ours},
            {**wide, CORE: theirs},
            key=CORE,
            precision=self.precision,
            config=CONFIG,
        )

    def core(self, seen: Array, *, is_target: bool = False, **changes: Any) -> Array:
        narrow = self.narrow if is_target else lambda x: x.astype(np.float32)
        q, k, v = (narrow(x) for x in self.values.values())
        return core(q, k, v, seen, **changes)


MASKS: dict[str, Callable[[Array], Array]] = {
    "bool": lambda seen: seen[:, None],
    "float": lambda seen: np.where(seen[:, None], 0.0, float(np.finfo(np.float32).min)),
    "int": lambda seen: seen[:, 0].astype(np.int64),
}


@pytest.mark.spec("DIA-27")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", MASKS)
def test_a_mask_of_padding_that_is_not_looked_at_is_named(
    diagnosed: Diagnose, form: str, precision: str
) -> None:
    made = Made(diagnosed, 14, 20, precision)
    seen = padded(14, 20)
    ours, theirs = made.core(seen), made.core(np.ones_like(seen), is_target=True)
    found = made.named(ours, theirs, {"0/attn/input.mask": MASKS[form](seen)})
    assert found.explanations[0].kind == "attention-mask"
    assert found.explanations[0].text == "tokens of the target see padded ones"


@pytest.mark.spec("DIA-27")
@pytest.mark.parametrize(
    ("other", "text"),
    [
        (padded(20, 20), "the target is not causal"),
        (causal(20), "tokens of the target see padded ones"),
        (np.ones((2, 20, 20), bool), "the target does not look at the mask"),
        (
            padded(20, 20) & causal(20) & ~np.eye(20, k=-3, dtype=bool),
            "token 19 of the target does not see 16",
        ),
    ],
)
def test_what_of_a_causal_mask_is_not_looked_at_is_named(
    diagnosed: Diagnose, other: Array, text: str
) -> None:
    made = Made(diagnosed, 20, 20, "float32")
    seen = padded(20, 20) & causal(20)
    beside = {"0/attn/input.attention_mask": MASKS["float"](seen)}
    found = made.named(made.core(seen), made.core(other, is_target=True), beside)
    said = [e.text for e in found.explanations if e.kind.startswith("attention")]
    assert said[:1] == [text]


@pytest.mark.spec("DIA-27")
@pytest.mark.parametrize("window", [5, 7, 0])
def test_a_window_is_read_off_the_mask(diagnosed: Diagnose, window: int) -> None:
    made = Made(diagnosed, 20, 20, "float32")
    behind = np.arange(20)[:, None] - np.arange(20)
    seen = causal(20) & (behind < 6)
    other = causal(20) & (behind < (window or 99))
    beside = {"0/attn/input.mask": seen[:, None]}
    found = made.named(made.core(seen), made.core(other, is_target=True), beside)
    sees = f"a window of {window} tokens" if window else "all tokens"
    assert found.explanations[0].text == f"the target sees {sees}, the reference a window of 6 tokens"


@pytest.mark.spec("DIA-27")
def test_tokens_that_see_nothing_do_not_count(diagnosed: Diagnose) -> None:
    made = Made(diagnosed, 20, 20, "float32")
    seen = causal(20)
    seen[1, :, :5] = False
    some = seen | ~seen.any(axis=-1, keepdims=True)  # so that numpy has something to divide by
    ours, theirs = made.core(some), made.core(some, scale=1.0)
    ours[1, :5], theirs[1, :5] = 7.0, -3.0
    found = made.named(ours, theirs, {"0/attn/input.mask": seen[:, None]})
    assert found.explanations[0].kind == "attention-scale"


@pytest.mark.spec("DIA-28")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_bias_of_positions_belongs_to_the_scores(diagnosed: Diagnose, precision: str) -> None:
    made = Made(diagnosed, 20, 20, precision)
    bias = 2 * np.random.default_rng(4).standard_normal((HEADS, 20, 20)).astype(np.float32)
    hidden = np.where(padded(20, 20)[:, None], 0.0, float(np.finfo(np.float32).min))
    for beside, seen in (
        ({"0/attn/input.position_bias": bias[None]}, np.ones((2, 20, 20), bool)),
        ({"0/attn.relative_attention_bias/output": bias.transpose(1, 2, 0)}, np.ones((2, 20, 20), bool)),
        ({"0/attn/input.position_bias": bias[None] + hidden}, padded(20, 20)),
    ):
        ours = made.core(seen, scale=1.0, bias=bias)
        scaled = made.core(seen, is_target=True, bias=bias)
        found = made.named(ours, scaled, beside).explanations[0]
        assert found.kind == "attention-scale"
        assert abs(found.facts["factor"] - 0.25) < 0.01
        absent = made.core(seen, is_target=True, scale=1.0)
        assert made.named(ours, absent, beside).explanations[0].kind == "attention-bias"


@pytest.mark.spec("DIA-28")
@pytest.mark.parametrize("is_captured", [True, False])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_sinks_take_part_in_the_softmax(diagnosed: Diagnose, precision: str, is_captured: bool) -> None:
    made = Made(diagnosed, 20, 20, precision)
    sinks = np.array([1.0, -0.5, 2.0, 0.25], np.float32)
    beside = {"0/attn/param.sinks": sinks} if is_captured else {}
    ours = made.core(causal(20), sinks=sinks)
    found = made.named(ours, made.core(causal(20), is_target=True), beside)
    assert found.explanations[0].kind == "attention-sinks"
    scaled = made.core(causal(20), is_target=True, sinks=sinks, scale=1.0)
    assert made.named(ours, scaled, beside).explanations[0].kind == "attention-scale"
    window = causal(20) & ~np.tri(20, k=-6, dtype=bool)
    found = made.named(ours, made.core(window, is_target=True, sinks=sinks), beside)
    assert not [e for e in found.explanations if e.kind.startswith("attention")]


@pytest.mark.spec("DIA-28")
def test_sinks_of_the_target_are_not_those_that_it_should_have(diagnosed: Diagnose) -> None:
    made = Made(diagnosed, 20, 20, "float32")
    sinks = np.array([1.0, -0.5, 2.0, 0.25], np.float32)
    wide = {f"0/attn.{name}/output": x for name, x in made.values.items()}
    ours = {**wide, "0/attn/param.sinks": sinks, CORE: made.core(causal(20), sinks=sinks)}
    theirs = {**wide, "0/attn/param.sinks": np.full(4, -1e9), CORE: made.core(causal(20))}
    assert diagnosed(ours, theirs, key=CORE, config=CONFIG).explanations[0].kind == "attention-sinks"


def rotated(x: Array, angles: Array) -> Array:
    """The first half of each head's channels against the second."""
    x = x.reshape(2, len(angles), HEADS, DIM).astype(float)
    z = (x[..., : DIM // 2] + 1j * x[..., DIM // 2 :]) * np.exp(1j * angles)[None, :, None]
    return np.concatenate([z.real, z.imag], axis=-1).reshape(2, len(angles), -1)


@pytest.mark.spec("DIA-29")
@pytest.mark.parametrize("is_half_wide", [True, False])
@pytest.mark.parametrize("change", [{"scale": 1.0}, {"window": True}])
def test_a_step_attends_to_keys_of_the_steps_before(
    diagnosed: Diagnose, change: dict[str, Any], is_half_wide: bool
) -> None:
    rng = np.random.default_rng(6)
    q, k, v = (rng.standard_normal((2, 12, HEADS * DIM)).astype(np.float32) for _ in range(3))
    angles = np.arange(12)[:, None] * 100.0 ** (-np.arange(8) / 8)
    beside = {"2/attn/input.cache.layers.0.keys": np.zeros((2, 11, 3), np.float32)}
    for step, at in enumerate((slice(10), slice(10, 11), slice(11, 12))):
        beside |= {f"{step}/attn.{n}/output": x[:, at] for n, x in (("q", q), ("k", k), ("v", v))}
        for number, function in enumerate((np.cos, np.sin)):
            table = np.tile(function(angles[at]), 1 if is_half_wide else 2)[None]
            beside[f"{step}/attn/input.position_embeddings.{number}"] = table
    seen = np.ones((2, 1, 12), bool)
    last = rotated(q, angles)[:, 11:]
    ours = core(last, rotated(k, angles), v, seen)
    if "window" in change:
        seen[:, :, :8] = False
    theirs = core(last, rotated(k, angles), v, seen, scale=change.get("scale", DIM**-0.5))
    key = "2/attn.o/input.input"
    config = {**CONFIG, "sliding_window": 4}
    found = diagnosed({**beside, key: ours}, {**beside, key: theirs}, key=key, config=config)
    assert found.explanations[0].kind == ("attention-mask" if "window" in change else "attention-scale")


@pytest.mark.spec("DIA-26")
@pytest.mark.parametrize("is_head_first", [True, False])
def test_queries_may_be_recorded_by_head(diagnosed: Diagnose, is_head_first: bool) -> None:
    made = Made(diagnosed, 20, 20, "float32")
    by_head = {f"0/attn.{n}_norm/output": made.values[n].reshape(2, 20, HEADS, DIM) for n in "qk"}
    if is_head_first:
        by_head = {name: x.transpose(0, 2, 1, 3) for name, x in by_head.items()}
    found = made.named(made.core(causal(20)), made.core(causal(20), scale=1.0), by_head)
    assert found.explanations[0].kind == "attention-scale"


@pytest.mark.spec("DIA-30")
def test_a_dropout_may_come_behind_the_last_product(diagnosed: Diagnose) -> None:
    made = Made(diagnosed, 20, 20, "float32")
    fused = np.concatenate(list(made.values.values()), axis=-1)
    w = np.random.default_rng(8).standard_normal((64, 64)) / 8
    sides = [made.core(causal(20)), made.core(causal(20), scale=1.0)]
    archives = [
        {
            "0/h.attn.c_attn/output": fused,
            "0/h.attn.c_proj/input.input": side,
            "0/h.attn.c_proj/output": side @ w,
            "0/h.attn.drop/input.input": side @ w,
            "0/h.attn/output.0": side @ w,
        }
        for side in sides
    ]
    found = diagnosed(*archives, key="0/h.attn/output.0", config=CONFIG)
    assert found.explanations[0].kind == "attention-scale"
    assert found.explanations[0].text.startswith("in 0/h.attn.c_proj/input.input: ")
