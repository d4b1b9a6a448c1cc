"""Cores of attention worked out by numpy, with one thing done otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap.diagnosis.context import read_pair
from tensorcap_formats.dtypes import Array
from tensorcap_formats.open import open_archive
from tests.diagnosis.conftest import Diagnose
from tests.support.archives import write_archive
from tests.support.floats import to_bfloat16

HEADS, KEYS, DIM, TOKENS = 4, 2, 16, 24
CONFIG = {
    "hidden_size": HEADS * DIM,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEYS,
    "head_dim": DIM,
    "sliding_window": 8,
    "attn_logit_softcapping": 5.0,
}
CORE, OUT = "0/attn.o_proj/input.input", "0/attn/output.0"


def rotated(x: Array, angles: Array, layout: str) -> Array:
    cos, sin = np.cos(angles)[None, :, None], np.sin(angles)[None, :, None]
    a, b = (x[..., : DIM // 2], x[..., DIM // 2 :]) if layout == "halves" else (x[..., ::2], x[..., 1::2])
    parts = a * cos - b * sin, b * cos + a * sin
    return np.concatenate(parts, -1) if layout == "halves" else np.stack(parts, -1).reshape(x.shape)


def core(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float = DIM**-0.5,
    layout: str = "halves",
    window: int = 8,
    cap: float = 5.0,
    tiled: bool = False,
    causal: bool = True,
    ahead: int = 0,
    is_capped_first: bool = False,
) -> Array:
    q, k, v = (x.reshape(1, TOKENS, -1, DIM).astype(float) for x in (q, k, v))
    angles = np.arange(TOKENS)[:, None] * 100.0 ** (-np.arange(8) / 8)
    if layout != "none":
        q, k = rotated(q, angles, layout), rotated(k, angles, layout)
    out = np.empty_like(q)
    for head in range(HEADS):
        key = head % KEYS if tiled else head // (HEADS // KEYS)
        scores = q[0, :, head] @ k[0, :, key].T * (1.0 if is_capped_first else scale)
        scores = cap * np.tanh(scores / cap) if cap else scores
        scores = scores * scale if is_capped_first else scores
        for i in range(TOKENS):
            seen = [
                j for j in range(TOKENS) if (j <= i + ahead or not causal) and (not window or i - j < window)
            ]
            e = np.exp(scores[i, seen] - scores[i, seen].max())
            out[0, i, head] = e / e.sum() @ v[0, seen, key]
    return out.reshape(1, TOKENS, -1)


MISTAKES = [
    pytest.param({"scale": 2 * DIM**-0.5}, "attention-scale", id="scale"),
    pytest.param({"scale": 1.0}, "attention-scale", id="no-scale"),
    pytest.param({"layout": "pairs"}, "attention-rotation", id="pairs"),
    pytest.param({"layout": "none"}, "attention-rotation", id="not-rotated"),
    pytest.param({"window": 7}, "attention-mask", id="window-off-by-one"),
    pytest.param({"window": 0}, "attention-mask", id="no-window"),
    pytest.param({"causal": False}, "attention-mask", id="not-causal"),
    pytest.param({"ahead": 1}, "attention-mask", id="sees-the-next"),
    pytest.param({"cap": 0.0}, "attention-softcap", id="no-softcap"),
    pytest.param(
        {"is_capped_first": True},
        "attention-softcap",
        id="capped-before-scaled",
        marks=pytest.mark.spec("DIA-605"),
    ),
    pytest.param({"tiled": True}, "attention-heads", id="tiled"),
]


@pytest.mark.spec("DIA-26", "DIA-30")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("change", "kind"), MISTAKES)
def test_what_an_attention_does_otherwise_is_named(
    diagnosed: Diagnose, change: dict[str, Any], kind: str, precision: str
) -> None:
    rng = np.random.default_rng(5)
    q, k, v, w = (rng.standard_normal((1, TOKENS, n)) for n in (64, 32, 32, 64))
    w = rng.standard_normal((64, 64)) / 8
    narrow = to_bfloat16 if precision == "bfloat16" else lambda x: x.astype(np.float32)
    angles = np.arange(TOKENS)[:, None] * 100.0 ** (-np.arange(8) / 8)
    beside = {
        "0/attn/input.position_embeddings.0": np.tile(np.cos(angles), 2)[None],
        "0/attn/input.position_embeddings.1": np.tile(np.sin(angles), 2)[None],
        "0/attn.q_proj/output": 2 * q,
        "0/attn.k_proj/output": 2 * k,
        "0/attn.v_proj/output": v,
    }
    ours = core(*(x.astype(np.float32) for x in (2 * q, 2 * k, v)))
    theirs = core(*(narrow(x) for x in (2 * q, 2 * k, v)), **change)
    reference = {**beside, CORE: ours, OUT: ours @ w}
    target = {**beside, CORE: theirs, OUT: theirs @ w}
    found = diagnosed(reference, target, key=CORE, precision=precision, config=CONFIG)
    assert found.explanations[0].kind == kind
    whole = diagnosed(reference, target, key=OUT, precision=precision, config=CONFIG)
    assert whole.explanations[0].kind == kind
    assert whole.explanations[0].text.startswith(f"in {CORE}: ")


@pytest.mark.spec("DIA-26")
def test_a_core_that_was_given_the_targets_values_is_known_by_them(diagnosed: Diagnose) -> None:
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((1, TOKENS, n)) for n in (64, 32, 32))
    q, k = 4 * q, 4 * k  # so that roundings of scores make more than a few roundings of the result
    given = [to_bfloat16(x) for x in (q, k, v)]
    names = "0/attn.q_proj/output", "0/attn.k_proj/output", "0/attn.v_proj/output"
    ours = {**dict(zip(names, (q, k, v), strict=True)), CORE: core(*given, layout="none")}
    theirs = {**dict(zip(names, given, strict=True)), CORE: core(*given, layout="none", window=7)}
    found = diagnosed(ours, theirs, key=CORE, precision="bfloat16", config=CONFIG)
    assert found.explanations[0].kind == "attention-mask"


@pytest.mark.spec("DIA-26")
def test_a_right_attention_in_low_precision_is_no_suspect(diagnosed: Diagnose) -> None:
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((1, TOKENS, n)) for n in (64, 32, 32))
    beside = {"0/attn.q_proj/output": q, "0/attn.k_proj/output": k, "0/attn.v_proj/output": v}
    ours = core(*(x.astype(np.float32) for x in (q, k, v)), layout="none")
    theirs = core(*(to_bfloat16(x) for x in (q, k, v)), layout="none")
    found = diagnosed(
        {**beside, CORE: ours}, {**beside, CORE: theirs}, key=CORE, precision="bfloat16", config=CONFIG
    )
    assert not [e for e in found.explanations if e.kind.startswith("attention")]


@pytest.mark.spec("DIA-423")
def test_a_window_of_the_configuration_may_have_any_name(diagnosed: Diagnose) -> None:
    rng = np.random.default_rng(5)
    q, k, v = (2 * rng.standard_normal((1, TOKENS, n)).astype(np.float32) for n in (64, 32, 32))
    names = "0/attn.q_proj/output", "0/attn.k_proj/output", "0/attn.v_proj/output"
    causal = np.tril(np.ones((1, 1, TOKENS, TOKENS), np.bool_))
    beside = {**dict(zip(names, (q, k, v), strict=True)), "0/attn/input.attention_mask": causal}
    ours, theirs = (core(q, k, v, layout="none", window=window) for window in (8, 9))
    config = {**CONFIG, "window_size": CONFIG["sliding_window"], "sliding_window": None}
    found = diagnosed({**beside, CORE: ours}, {CORE: theirs}, key=CORE, config=config)
    best = found.explanations[0]
    assert (best.kind, best.facts["target"]["window"]) == ("attention-mask", 9)


@pytest.mark.spec("DIA-600")
@pytest.mark.parametrize(("theirs", "kind"), [(False, "attention-mask"), (True, "layer-schedule")])
def test_a_core_that_sees_what_another_layer_sees_is_named_without_a_model(
    diagnosed: Diagnose, theirs: bool, kind: str
) -> None:
    """Layer 1 looks back 5 tokens and turns by other angles than layer 0, which sees all before."""
    rng = np.random.default_rng(5)
    q, k, v = (2 * rng.standard_normal((1, TOKENS, n)).astype(np.float32) for n in (64, 32, 32))
    distance = np.arange(TOKENS)[:, None] - np.arange(TOKENS)
    masks = distance >= 0, (distance >= 0) & (distance < 5)
    angles = [np.arange(TOKENS)[:, None] * base ** (-np.arange(8) / 8) for base in (100.0, 300.0)]
    beside: dict[str, Array] = {}
    for layer, (mask, table) in enumerate(zip(masks, angles, strict=True)):
        beside |= {
            f"0/layers.{layer}.attn/input.position_embeddings.0": np.tile(np.cos(table), 2)[None],
            f"0/layers.{layer}.attn/input.position_embeddings.1": np.tile(np.sin(table), 2)[None],
            f"0/layers.{layer}.attn/input.attention_mask": mask[None, None],
        }
    names = (f"0/layers.1.attn.{name}_proj/output" for name in "qkv")
    beside |= dict(zip(names, (q, k, v), strict=True))
    key = "0/layers.1.attn.o_proj/input.input"

    def made(layer: int, window: int) -> Array:
        sides = (x.reshape(1, TOKENS, -1, DIM).astype(float) for x in (q, k))
        one, other = (rotated(x, angles[layer], "halves").reshape(1, TOKENS, -1) for x in sides)
        return core(one, other, v, layout="none", window=window, cap=0.0)

    config = {**CONFIG, "sliding_window": None, "attn_logit_softcapping": None}
    target = {**beside, key: made(0 if theirs else 1, 0)}
    found = diagnosed({**beside, key: made(1, 5)}, target, key=key, config=config)
    named = {e.kind: e for e in found.explanations}
    assert found.explanations[0].kind == kind
    assert (named[kind].facts.get("as") == ["layers.0.attn"]) or not theirs


@pytest.mark.spec("DIA-607")
@pytest.mark.parametrize("wrong", [(0, 2), (1, 6)], ids=["a-token", "padding-alone"])
def test_tokens_that_masks_leave_out_do_not_count_in_calls(tmp_path: Path, wrong: tuple[int, int]) -> None:
    mask = np.ones((2, 8), np.int64)
    mask[1, 5:] = 0
    ours = np.random.default_rng(5).standard_normal((2, 8, 4)).astype(np.float32)
    theirs = ours.copy()
    theirs[1, 5:] += 1  # what padding becomes
    theirs[wrong] += 1
    given = {"0/@root/input.input_ids": np.arange(16).reshape(2, 8), "0/@root/input.attention_mask": mask}
    for name, side in (("r.h5", ours), ("t.h5", theirs)):
        write_archive(tmp_path / name, {**given, "0/attn/output": side})
    with open_archive(tmp_path / "r.h5") as reference, open_archive(tmp_path / "t.h5") as target:
        sides = ((archive, archive.get("0/attn/output")) for archive in (reference, target))
        uncounted = read_pair(*sides, limit=1 << 10).uncounted
    if wrong == (1, 6):
        assert uncounted is None
    else:
        assert uncounted is not None
        assert np.array_equal(uncounted, np.repeat(mask[:, :, None] == 0, 4, 2))
