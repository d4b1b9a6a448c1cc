"""Mistakes in the float parts of a quantised block are seen, however large the error of their inputs is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pytest

from tensorcap.comparison import POLICY, Comparison, Precision, compare
from tensorcap.comparison.attention_formula import AttentionFormula, AttentionValues
from tensorcap_formats.archive import Archive
from tests.comparison.conftest import MakeArchive
from tests.support.floats import bfloat16

RNG = np.random.default_rng(7)
TOKENS, WIDTH, HEADS = 16, 64, 4
X = RNG.normal(size=(2, TOKENS, WIDTH))
NORM = 1 + 0.2 * RNG.normal(size=WIDTH)
BIAS = 0.1 * RNG.normal(size=WIDTH)
WEIGHTS = {
    name: RNG.normal(size=(WIDTH, WIDTH)) / 8
    for name in ("attn.q", "attn.k", "attn.v", "attn.o", "up", "down")
}
ROUNDED: Final[dict[str, Any]] = {"dequantised": ["weight"], "numbers": {"weight": "int4"}}
ANGLES = np.arange(TOKENS)[:, None] * 100.0 ** (-np.arange(8) / 8)


def in_four_bits(weight: Any) -> tuple[Any, Any]:
    steps = np.abs(weight).max(axis=1, keepdims=True) / 7
    return np.rint(weight / steps) * steps, steps


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def turned(x: Any, ahead: int = 0) -> Any:
    """Rotate the halves of each head, `[batch, head, token, 16]`, by its token's angles."""
    cosines, sines = np.cos(ANGLES + ahead * ANGLES[1]), np.sin(ANGLES + ahead * ANGLES[1])
    a, b = x[..., :8], x[..., 8:]
    return np.concatenate([a * cosines - b * sines, b * cosines + a * sines], axis=-1)


def attention(q: Any, k: Any, v: Any, mistake: str) -> Any:
    q, k, v = (side.reshape(2, TOKENS, HEADS, -1).transpose(0, 2, 1, 3) for side in (q, k, v))
    q, k = turned(q, ahead=mistake == "rotary"), turned(k)
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(WIDTH / HEADS) * (1.1 if mistake == "scale" else 1)
    if mistake != "mask":
        scores = np.where(np.tri(TOKENS, dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    return (shares @ v).transpose(0, 2, 1, 3).reshape(2, TOKENS, WIDTH)


def records_of(weights: Mapping[str, Any], mistake: str = "") -> dict[str, Any]:
    """A block of a transformer in float64, by key."""
    tensors: dict[str, Any] = {f"0/block.{name}/param.weight": weight for name, weight in weights.items()}
    tensors |= {"0/block.norm/param.weight": NORM, "0/block.norm/param.bias": BIAS, "0/block/input.x": X}
    cosines, sines = (np.tile(side, 2)[None] for side in (np.cos(ANGLES), np.sin(ANGLES)))
    tensors |= {"0/block.attn/input.x": X, "0/block.attn/input.cos": cosines, "0/block.attn/input.sin": sines}

    def call(name: str, x: Any, y: Any) -> Any:
        tensors.update({f"0/block.{name}/input": x, f"0/block.{name}/output": y})
        return y

    q, k, v = (call(name, X, X @ weights[name].T) for name in ("attn.q", "attn.k", "attn.v"))
    core = attention(q, k, v, mistake)
    x = X + call("attn.o", core, core @ weights["attn.o"].T)
    tensors["0/block.attn/output"] = tensors["0/block.attn.o/output"]
    variance = x.var(axis=-1, keepdims=True) + (1e-2 if mistake == "epsilon" else 1e-5)
    normal = call("norm", x, (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(variance) * NORM + BIAS)
    up = call("up", normal, normal @ weights["up"].T)
    active = call("act", up, up * sigmoid(1.1 * up if mistake == "activation" else up))
    gated = active * normal * (0.98 if mistake == "product" else 1)
    down = call("down", gated, gated @ weights["down"].T)
    tensors["0/block/output"] = (0.98 if mistake == "residual" else 1) * x + down
    return tensors


def archive(
    make_archive: MakeArchive, tensors: Mapping[str, Any], *, few_bits: bool, more: Any = ()
) -> Archive:
    """The block as it was recorded; with `few_bits` its weights are such."""
    classes = {"attn": "Attention", "norm": "LayerNorm", "act": "SiLU", **dict.fromkeys(WEIGHTS, "Linear")}
    modules: list[dict[str, Any]] = [{"path": "", "class": "my.Net"}, {"path": "block", "class": "my.Block"}]
    for name, cls in classes.items():
        held = {
            key.rpartition(".")[2]: value
            for key, value in tensors.items()
            if f"block.{name}/param." in key and not key.endswith("_step")
        }
        parameters = {key: {"dtype": "float32", "shape": list(value.shape)} for key, value in held.items()}
        settings = ROUNDED if few_bits and name in WEIGHTS else {"eps": 1e-5} if name == "norm" else {}
        modules.append(
            {"path": f"block.{name}", "class": f"my.{cls}", "parameters": parameters, "settings": settings}
        )
    values = {key: np.asarray(value, np.float32) for key, value in tensors.items()}
    return make_archive(values, run={"modules": [*modules, *more], "dtype": "float32"})


def compared(make_archive: MakeArchive, mistake: str, more: Any = ()) -> Comparison:
    rounded = {name: in_four_bits(weight) for name, weight in WEIGHTS.items()}
    target = records_of({name: weight for name, (weight, _) in rounded.items()}, mistake)
    target |= {f"0/block.{name}/param.weight_step": steps for name, (_, steps) in rounded.items()}
    reference = archive(make_archive, records_of(WEIGHTS), few_bits=False)
    return compare(reference, archive(make_archive, target, few_bits=True, more=more))


@pytest.mark.spec("POL-651", "POL-652", "POL-653", "POL-654")
@pytest.mark.parametrize(
    ("mistake", "key", "text"),
    [
        pytest.param("activation", "block.act/output", "the function of its input", id="activation"),
        pytest.param("epsilon", "block.norm/output", "the norm of its input", id="epsilon"),
        pytest.param("scale", "block.attn.o/input", "the attention of its queries", id="attention-scale"),
        pytest.param("mask", "block.attn.o/input", "the attention of its queries", id="mask"),
        pytest.param("rotary", "block.attn.o/input", "the attention of its queries", id="rotary-positions"),
        pytest.param(
            "residual", "block/output", "the sum of 0/block.down/output and 0/block.norm/input", id="residual"
        ),
        pytest.param("product", "block.down/input", "the product of 0/block.act/output and", id="product"),
    ],
)
def test_a_mistake_in_floats_is_seen_behind_weights_in_few_bits(
    make_archive: MakeArchive, mistake: str, key: str, text: str
) -> None:
    found = compared(make_archive, mistake)
    red = {pair.key: pair for pair in found.pairs if pair.status in ("suspect", "diverged")}
    assert next(iter(red)) == f"0/{key}"
    assert [finding.test for finding in red[f"0/{key}"].findings if finding.status == "diverged"] == [
        "recomputed"
    ]
    assert text in next(f.text for f in red[f"0/{key}"].findings if f.test == "recomputed")


@pytest.mark.spec("POL-651")
def test_a_right_block_in_few_bits_is_green_and_its_floats_are_exact(make_archive: MakeArchive) -> None:
    found = compared(make_archive, "")
    assert found.exit_status == 0
    judged = {p.key: f.value for p in found.pairs for f in p.findings if f.test == "recomputed"}
    keys = ("attn.o/input", "norm/input", "norm/output", "act/output", "down/input")
    assert judged.keys() == {*(f"0/block.{key}" for key in keys), "0/block/output"}
    assert max(judged.values()) < 1e-6
    assert max(pair.row_error or 0 for pair in found.pairs) > 0.05


@pytest.mark.spec("POL-655")
def test_a_module_around_one_that_quantises_values_may_round(make_archive: MakeArchive) -> None:
    quantiser = {"path": "block.attn.fake", "class": "torch.ao.quantization.FakeQuantize"}
    found = compared(make_archive, "scale", more=[quantiser])
    judged = {pair.key for pair in found.pairs for finding in pair.findings if finding.test == "recomputed"}
    assert judged == {"0/block.norm/output", "0/block.act/output"}
    assert found.exit_status == 0


@pytest.mark.spec("POL-650")
def test_records_that_are_coarser_than_the_run_are_not_more_precise_than_they_can_hold(
    make_archive: MakeArchive,
) -> None:
    runs = Precision("float32", 0.08, 0.04, "int8", own_roundings={"norm": 4e-6})
    (wide,), (low,) = (
        make_archive({"0/norm/output": values}).records
        for values in (X.astype(np.float32), bfloat16(X.astype(np.float32)))
    )
    for record, rounding in ((wide, 4e-6), (low, 0.425 * 2**-8)):
        own = POLICY.precision_of_pair(runs, record, record).of_module("norm")
        assert own.rounding == pytest.approx(rounding)


@pytest.mark.spec("POL-651")
def test_a_bias_for_each_head_says_how_many_heads_there_are() -> None:
    """T5's bias of 4 heads of 16 channels; 8 channels a head would make 8 of them."""
    rng = np.random.default_rng(1)
    q, k, v = rng.normal(size=(3, 2, 5, 64))
    bias = rng.normal(size=(1, 4, 5, 5))
    values = AttentionValues((q, k, v), (), bias)
    right, wrong = (AttentionFormula((0, 1, 2), channels, 1.0, "none", "given") for channels in (16, 8))
    split = [side.reshape(2, 5, 4, 16) for side in (q, k, v)]
    scores = np.einsum("bqhd,bkhd->bhqk", *split[:2]) + bias
    shares = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    expected = np.einsum("bhqk,bkhd->bqhd", shares, split[2])
    made = right(values, np.arange(4), np.arange(5))
    assert made is not None
    np.testing.assert_allclose(made, expected, rtol=1e-9)
    assert wrong(values, np.arange(8), np.arange(5)) is None
