"""Mistakes of modules whose inputs and parameters are in the archives, planted by numpy alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tensorcap_formats.dtypes import Array
from tests.diagnosis.conftest import Diagnose
from tests.support.floats import to_bfloat16

OUT, IN = "0/m/output", "0/m/input.x"
PRECISIONS = ["float32", "bfloat16"]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def as_is(values: Array) -> Array:
    return np.asarray(values, np.float32)


def erf(x: Array) -> Array:
    return np.asarray(np.vectorize(math.erf)(x))


def gelu_erf(x: Array) -> Array:
    return np.asarray(x * 0.5 * (1 + erf(x / np.sqrt(2))))


def gelu_tanh(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))


def quick_gelu(x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-1.702 * x)))


def silu(x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-x)))


def softmax(z: Array) -> Array:
    e = np.exp(z - z.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def top(z: Array, count: int) -> Array:
    return np.asarray(-np.sort(-z, axis=-1)[..., :count])


def rms(x: Array, eps: float = 1e-6) -> Array:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps))


def layer(x: Array, eps: float = 1e-5) -> Array:
    return np.asarray((x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps))


ACTIVATIONS = [
    pytest.param(gelu_erf, gelu_tanh, ("gelu erf", "gelu tanh"), id="gelu-forms"),
    pytest.param(gelu_tanh, quick_gelu, ("gelu tanh", "quick gelu"), id="quick-gelu"),
    pytest.param(silu, gelu_tanh, ("silu", "gelu tanh"), id="silu"),
    pytest.param(silu, lambda x: np.maximum(x, 0), ("silu", "relu"), id="relu"),
    pytest.param(gelu_erf, lambda x: x, ("gelu erf", "identity"), id="left-out"),
]


@pytest.mark.spec("DIA-20")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("ours", "theirs", "names"), ACTIVATIONS)
def test_another_activation_is_named(
    diagnosed: Diagnose,
    rng: np.random.Generator,
    precision: str,
    ours: Callable[[Array], Array],
    theirs: Callable[[Array], Array],
    names: tuple[str, str],
) -> None:
    x = rng.standard_normal((2, 30, 48)) * 2
    own = to_bfloat16(x) if precision == "bfloat16" else as_is(x)
    found = diagnosed(
        {IN: x, OUT: ours(as_is(x).astype(float))},
        {IN: x, OUT: theirs(own.astype(float))},
        precision=precision,
    )
    first = next(e for e in found.explanations if e.kind == "activation")
    assert (first.facts["reference"], first.facts["target"]) == names
    assert found.explanations[0].kind in ("activation", "identity")


@pytest.mark.spec("DIA-20")
def test_the_same_activation_in_low_precision_is_no_other_one(
    diagnosed: Diagnose, rng: np.random.Generator
) -> None:
    x = rng.standard_normal((2, 30, 48)) * 2
    found = diagnosed(
        {IN: x, OUT: gelu_erf(as_is(x).astype(float))},
        {IN: x, OUT: gelu_erf(to_bfloat16(x).astype(float))},
        precision="bfloat16",
    )
    assert {e.kind for e in found.explanations} <= {"inherited"}


@pytest.mark.spec("DIA-21")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("target", "kind"),
    [
        pytest.param(lambda g, u: gelu_tanh(g) * u, "activation", id="other"),
        pytest.param(lambda g, u: silu(u) * g, "gate-swapped", id="swapped"),
        pytest.param(lambda g, u: silu(g), "gate-missing", id="missing"),
        pytest.param(lambda g, u: g * u, "activation", id="none"),
    ],
)
def test_a_gated_product_is_worked_out_from_its_parts(
    diagnosed: Diagnose, rng: np.random.Generator, precision: str, target: Any, kind: str
) -> None:
    g, u = rng.standard_normal((2, 1, 20, 32))
    ours = {"0/mlp.gate/output": g, "0/mlp.up/output": u, "0/mlp.down/input.x": silu(as_is(g)) * as_is(u)}
    narrow = to_bfloat16 if precision == "bfloat16" else as_is
    theirs = {**ours, "0/mlp.down/input.x": target(narrow(g), narrow(u))}
    found = diagnosed(ours, theirs, key="0/mlp.down/input.x", precision=precision)
    assert found.explanations[0].kind == kind


def outside(x: Array, eps: float) -> Array:
    """A norm that adds eps to the root mean square."""
    return np.asarray(x / (np.sqrt((x * x).mean(-1, keepdims=True)) + eps))


NORMS = [
    pytest.param(lambda x, w: rms(x) * (1 + w), lambda x, w: rms(x) * w, "norm-without-one-plus", id="w"),
    pytest.param(lambda x, w: rms(x) * w, lambda x, w: rms(x) * (1 + w), "norm-with-one-plus", id="1+w"),
    pytest.param(lambda x, w: rms(x) * w, lambda x, w: rms(x), "weight-missing", id="no-weight"),
    pytest.param(lambda x, w: rms(x) * w, lambda x, w: layer(x, 1e-6) * w, "norm-statistic", id="mean"),
    pytest.param(lambda x, w: layer(x) * w, lambda x, w: rms(x, 1e-5) * w, "norm-statistic", id="no-mean"),
    pytest.param(lambda x, w: rms(x) * w, lambda x, w: rms(x, 1e-2) * w, "norm-eps", id="eps"),
    pytest.param(lambda x, w: rms(x) * w, lambda x, w: outside(x, 1e-2) * w, "norm-eps", id="eps-outside"),
]


@pytest.mark.spec("DIA-22")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("ours", "theirs", "kind", "with_weight"),
    [pytest.param(*norm.values, True, id=f"{norm.id}-weight") for norm in NORMS]
    + [pytest.param(*norm.values, False, id=str(norm.id)) for norm in NORMS[3:]],
)
def test_another_variant_of_a_norm_is_named(
    diagnosed: Diagnose,
    rng: np.random.Generator,
    precision: str,
    ours: Any,
    theirs: Any,
    kind: str,
    with_weight: bool,
) -> None:
    x = rng.standard_normal((1, 64, 32)) + 0.5
    x[0, ::3] *= 0.1
    w = rng.standard_normal(32) * 0.3 + 0.4
    weights = {"0/m/param.weight": w} if with_weight else {}
    narrow = to_bfloat16 if precision == "bfloat16" else as_is
    found = diagnosed(
        {**weights, IN: x, OUT: ours(as_is(x).astype(float), as_is(w))},
        {**weights, IN: x, OUT: theirs(narrow(x).astype(float), narrow(w))},
        precision=precision,
    )
    assert found.explanations[0].kind == kind


@pytest.mark.spec("DIA-22")
def test_where_eps_is_added_is_said(diagnosed: Diagnose, rng: np.random.Generator) -> None:
    x = rng.standard_normal((1, 64, 32)) * np.geomspace(1e-3, 1, 64)[:, None]
    found = diagnosed({IN: x, OUT: rms(as_is(x).astype(float))}, {IN: x, OUT: outside(as_is(x), 1e-6)})
    assert found.explanations[0].text == (
        "the target adds eps 1e-06 to the root of the variance, the reference 1e-06 to the variance"
    )


@pytest.mark.spec("DIA-603")
def test_a_factor_of_one_sequence_is_no_norm(diagnosed: Diagnose, rng: np.random.Generator) -> None:
    """A weight and a bias of each channel make any scaled input of one sequence the result of a norm."""
    x = rng.standard_normal((1, 4, 30))
    x -= x.mean(axis=2, keepdims=True)
    found = diagnosed({IN: x, OUT: 3 * x}, {IN: x, OUT: 3 * x * np.sqrt(119 / 120)})
    assert [e.kind for e in found.explanations] == ["factor"]


@pytest.mark.spec("DIA-603")
@pytest.mark.parametrize(("count", "is_said", "name"), [(1, False, "gamma"), (2, True, "weight")])
def test_statistics_of_all_sequences_are_those_of_several(
    diagnosed: Diagnose, rng: np.random.Generator, count: int, is_said: bool, name: str
) -> None:
    x, w = rng.standard_normal((count, 4, 30)), rng.standard_normal(4)

    def norm(axes: tuple[int, ...]) -> Array:
        y = as_is(x).astype(float)
        y = (y - y.mean(axis=axes, keepdims=True)) / np.sqrt(y.var(axis=axes, keepdims=True) + 1e-5)
        return np.asarray(y * as_is(w)[:, None])

    given = {f"0/m/param.{name}": w, IN: x}
    texts = [
        e.text for e in diagnosed({**given, OUT: norm((1, 2))}, {**given, OUT: norm((0, 2))}).explanations
    ]
    assert "of each channel" in texts[0]
    assert any("of all sequences together" in text for text in texts) is is_said


@pytest.mark.spec("DIA-22")
@pytest.mark.parametrize("order", ["first", "last"])
def test_either_order_of_cast_and_weight_is_right_for_a_wide_reference(
    diagnosed: Diagnose, rng: np.random.Generator, order: str
) -> None:
    x, w = rng.standard_normal((1, 64, 32)), rng.standard_normal(32)
    y = rms(to_bfloat16(x).astype(float))
    made = to_bfloat16(y) * to_bfloat16(w) if order == "first" else y * to_bfloat16(w)
    found = diagnosed(
        {"0/m/param.weight": w, IN: x, OUT: rms(as_is(x).astype(float)) * w},
        {"0/m/param.weight": w, IN: x, OUT: made},
        precision="bfloat16",
    )
    assert {e.kind for e in found.explanations} <= {"inherited"}


def in_turn(values: Array) -> Array:
    """The sum over the last axis, one after the other in bfloat16."""
    total = to_bfloat16(values[..., 0])
    for at in range(1, values.shape[-1]):
        total = to_bfloat16(total + values[..., at])
    return total.astype(float)


def low_norm(x: Array) -> Array:
    """A norm of which every step is rounded to bfloat16."""
    variance = to_bfloat16(to_bfloat16(to_bfloat16(x * x).astype(float).mean(-1, keepdims=True)) + 1e-6)
    inverse = to_bfloat16(1 / np.sqrt(variance.astype(float)))
    return to_bfloat16(x * inverse.astype(float)).astype(float)


LOW = [
    pytest.param(lambda x, w: to_bfloat16(rms(x)) * w, lambda x, w: rms(x) * w, "norm-cast-order", id="cast"),
    pytest.param(
        lambda x, w: rms(x) * (1 + w),
        lambda x, w: rms(x) * to_bfloat16(1 + w),
        "norm-weight-rounded",
        id="1+w",
    ),
    pytest.param(
        lambda x, w: rms(x) * w,
        lambda x, w: x / np.sqrt(to_bfloat16(to_bfloat16(x * x).mean(-1, keepdims=True)) + 1e-6) * w,
        "norm-variance-precision",
        id="variance",
    ),
    pytest.param(
        lambda x, w: rms(x) * w,
        lambda x, w: x / np.sqrt(to_bfloat16(x * x).astype(float).mean(-1, keepdims=True) + 1e-6) * w,
        "norm-variance-precision",
        id="squares",
    ),
    pytest.param(
        lambda x, w: rms(x) * w,
        lambda x, w: x / np.sqrt(in_turn(to_bfloat16(x * x)) / x.shape[-1] + 1e-6)[..., None] * w,
        "norm-variance-precision",
        id="in-turn",
    ),
    pytest.param(
        lambda x, w: to_bfloat16(rms(x)) * w,
        lambda x, w: low_norm(x) * w,
        "norm-variance-precision",
        id="all",
    ),
]


@pytest.mark.spec("DIA-23")
@pytest.mark.parametrize(("ours", "theirs", "kind"), LOW)
def test_low_precision_within_a_norm_is_named(
    diagnosed: Diagnose, rng: np.random.Generator, ours: Any, theirs: Any, kind: str
) -> None:
    x = to_bfloat16(rng.standard_normal((1, 64, 64))).astype(float)
    w = to_bfloat16(rng.standard_normal(64)).astype(float)
    found = diagnosed(
        {"0/m/param.weight": w, IN: x, OUT: ours(x, w)},
        {"0/m/param.weight": w, IN: x, OUT: theirs(x, w)},
        precision="bfloat16",
        reference_precision="bfloat16",
    )
    assert found.explanations[0].kind == kind


ROUTES = [
    pytest.param(lambda z: top(softmax(z), 2), "softmax, top-k, not renormalised", id="not-renormalised"),
    pytest.param(lambda z: top(z, 2), "top-k of raw scores", id="raw"),
    pytest.param(lambda z: top(1 / (1 + np.exp(-z)), 2), "sigmoid, top-k, not renormalised", id="sigmoid"),
]


@pytest.mark.spec("DIA-24")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("target", "name"), ROUTES)
def test_the_order_of_softmax_and_choice_is_named(
    diagnosed: Diagnose, rng: np.random.Generator, precision: str, target: Any, name: str
) -> None:
    z = rng.standard_normal((40, 8))
    narrow = to_bfloat16 if precision == "bfloat16" else as_is
    ours = {"0/mlp.gate/output.0": z, "0/mlp.gate/output.1": softmax(top(as_is(z), 2))}
    theirs = {"0/mlp.gate/output.0": z, "0/mlp.gate/output.1": target(narrow(z))}
    found = diagnosed(ours, theirs, key="0/mlp.gate/output.1", precision=precision)
    assert found.explanations[0].kind == "router-order"
    assert found.explanations[0].facts["target"] == name
    assert found.explanations[0].facts["reference"] == "softmax, top-k, renormalised"


@pytest.mark.spec("DIA-24")
def test_softmax_after_choice_is_no_mistake(diagnosed: Diagnose, rng: np.random.Generator) -> None:
    z = rng.standard_normal((40, 8))
    p = top(softmax(z), 2)
    ours = {"0/mlp.gate/output.0": z, "0/mlp.gate/output.1": softmax(top(z, 2))}
    theirs = {"0/mlp.gate/output.0": z, "0/mlp.gate/output.1": p / p.sum(-1, keepdims=True)}
    found = diagnosed(ours, theirs, key="0/mlp.gate/output.1")
    assert found.status == "identical" or (found.before or 0) < 1e-6


@pytest.mark.spec("DIA-32")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("is_renormalised", [False, True], ids=["as-they-were", "renormalised"])
def test_weights_of_fewer_experts_are_told(
    diagnosed: Diagnose, rng: np.random.Generator, precision: str, is_renormalised: bool
) -> None:
    z = rng.standard_normal((40, 8))
    narrow = to_bfloat16 if precision == "bfloat16" else as_is
    weights = softmax(top(narrow(z).astype(float), 4))
    weights[:, 2:] = 0
    if is_renormalised:
        weights /= weights.sum(-1, keepdims=True)
    ours = {"0/mlp.gate/output.0": z, "0/mlp.gate/output.1": softmax(top(as_is(z), 4))}
    theirs = {"0/mlp.gate/output.0": z, "0/mlp.gate/output.1": weights}
    found = diagnosed(ours, theirs, key="0/mlp.gate/output.1", precision=precision)
    assert found.explanations[0].kind == "router-count"
    assert found.explanations[0].facts == {"count": 2}


@pytest.mark.spec("DIA-32")
def test_a_router_in_low_precision_is_reported(diagnosed: Diagnose, rng: np.random.Generator) -> None:
    z = to_bfloat16(rng.standard_normal((80, 8)))
    p = top(to_bfloat16(softmax(z.astype(float))).astype(float), 3)
    low = p / to_bfloat16(p.sum(-1, keepdims=True))
    ours = {"0/mlp.gate/output.0": z, "0/mlp.gate/output.1": softmax(top(z.astype(float), 3))}
    theirs = {"0/mlp.gate/output.0": z, "0/mlp.gate/output.1": low}
    found = diagnosed(ours, theirs, key="0/mlp.gate/output.1", precision="bfloat16")
    assert found.explanations[0].kind == "router-precision"
    once = {**theirs, "0/mlp.gate/output.1": softmax(top(z.astype(float), 3))}
    right = diagnosed(ours, once, key="0/mlp.gate/output.1", precision="bfloat16")
    assert "router-precision" not in {e.kind for e in right.explanations}


@pytest.mark.spec("DIA-33")
@pytest.mark.parametrize("parts", [4, 16, 64])
def test_products_that_are_summed_in_low_precision_are_reported_with_their_parts(
    diagnosed: Diagnose, rng: np.random.Generator, parts: int
) -> None:
    x, w, b = (to_bfloat16(rng.standard_normal(size)).astype(float) for size in ((1, 40, 64), (48, 64), 48))
    total = np.zeros((1, 40, 48))
    for xs, ws in zip(np.split(x, parts, 2), np.split(w, parts, 1), strict=True):
        total = to_bfloat16(total + to_bfloat16(xs @ ws.T)).astype(float)
    weights = {"0/m/param.weight": w, "0/m/param.bias": b}
    found = diagnosed(
        {**weights, IN: x, OUT: x @ w.T + b}, {**weights, IN: x, OUT: total + b}, precision="bfloat16"
    )
    assert found.explanations[0].kind == "sum-precision"
    assert found.explanations[0].facts == {"parts": parts}


@pytest.mark.spec("DIA-33")
def test_a_product_that_is_rounded_once_is_no_sum_in_low_precision(
    diagnosed: Diagnose, rng: np.random.Generator
) -> None:
    x, w = (to_bfloat16(rng.standard_normal(size)).astype(float) for size in ((1, 40, 64), (48, 64)))
    ours = {"0/m/param.weight": w, IN: x, OUT: x @ w.T}
    found = diagnosed(ours, ours, precision="bfloat16")
    assert "sum-precision" not in {e.kind for e in found.explanations}


@pytest.mark.spec("DIA-25")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_transposed_weight_of_a_product_is_found(
    diagnosed: Diagnose, rng: np.random.Generator, precision: str
) -> None:
    x, w = rng.standard_normal((1, 20, 32)), rng.standard_normal((32, 32))
    ours = {"0/m/param.weight": w, IN: x, OUT: x @ w.T}
    found = diagnosed(ours, {**ours, OUT: x @ w}, precision=precision)
    assert found.explanations[0].kind == "weight-transposed"


@pytest.mark.spec("DIA-25")
def test_a_head_that_is_right_for_other_weights_is_found(
    diagnosed: Diagnose, rng: np.random.Generator
) -> None:
    x, w, v = rng.standard_normal((1, 6, 32)), rng.standard_normal((64, 32)), rng.standard_normal((64, 32))
    ours = {"0/embed/param.weight": w, IN: x, OUT: x @ w.T}
    theirs = {"0/embed/param.weight": w, "0/m/param.weight": v, IN: x, OUT: x @ v.T}
    found = diagnosed(ours, theirs)
    assert [e.kind for e in found.explanations] == ["other-weights"]
    assert any("hardly related" in note for note in found.notes)


@pytest.mark.spec("DIA-25")
@pytest.mark.parametrize("is_recorded", [True, False], ids=["recorded", "not recorded"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_of_many_layers_the_one_whose_weight_is_used_is_named(
    diagnosed: Diagnose, rng: np.random.Generator, precision: str, is_recorded: bool
) -> None:
    x, w = rng.standard_normal((1, 20, 32)), rng.standard_normal((12, 48, 32))
    weights = {f"0/layers.{n}.up/param.weight": w[n] for n in range(12)}
    where = "0/layers.2.up/"
    theirs = {f"{where}param.weight": w[9]} if is_recorded else {}
    found = diagnosed(
        {**weights, f"{where}input.x": x, f"{where}output": x @ w[2].T},
        {**theirs, f"{where}input.x": x, f"{where}output": x @ w[9].T},
        key=f"{where}output",
        precision=precision,
    )
    best = found.explanations[0]
    assert best.kind == "other-weights"
    assert "0/layers.9.up/param.weight" in best.text


RECORDS = [
    pytest.param("identity", lambda r, x, y: x, id="identity"),
    pytest.param("holds", lambda r, x, y: y, id="holds"),
    pytest.param("term-twice", lambda r, x, y: r + x, id="twice"),
    pytest.param("term-missing", lambda r, x, y: r - x, id="missing"),
    pytest.param("term-scaled", lambda r, x, y: r + 0.37 * x, id="scaled"),
    pytest.param("product-added", lambda r, x, y: r * y, id="product"),
]


@pytest.mark.spec("DIA-34")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("kind", "make"), RECORDS)
def test_other_records_are_found_in_the_values(
    diagnosed: Diagnose, rng: np.random.Generator, precision: str, kind: str, make: Any
) -> None:
    r, x, y, z = rng.standard_normal((4, 1, 30, 48))
    ours = {IN: x, "0/m.a/output": y, "0/m.b/output": z, OUT: r}
    found = diagnosed(ours, {**ours, OUT: make(r, x, y)}, precision=precision)
    assert found.explanations[0].kind == kind
    if kind == "holds":
        assert found.explanations[0].facts["key"] == "0/m.a/output"


@pytest.mark.spec("DIA-34")
def test_an_input_that_has_another_name_in_the_target_is_known(
    diagnosed: Diagnose, rng: np.random.Generator
) -> None:
    r, x = rng.standard_normal((2, 1, 30, 48))
    ours = {"0/m/input.hidden": x, OUT: r}
    found = diagnosed(ours, {"0/m/input.x": x, OUT: x})
    assert [e.kind for e in found.explanations] == ["identity"]
    assert found.explanations[0].facts["slot"] == "input.hidden"


@pytest.mark.spec("DIA-9")
def test_what_says_why_comes_before_the_record_that_is_held(
    diagnosed: Diagnose, rng: np.random.Generator
) -> None:
    x = rng.standard_normal((1, 30, 48)).astype(np.float32)
    ours = {"0/head/output": x, OUT: 0.5 * np.tanh(x / 0.5)}
    found = diagnosed(ours, {**ours, OUT: x}, config={"final_logit_softcapping": 0.5})
    assert [e.kind for e in found.explanations] == ["softcap-missing", "holds"]
    assert found.explanations[1].after == 0


@pytest.mark.spec("DIA-35")
def test_a_table_of_positions_that_is_not_added_is_found(
    diagnosed: Diagnose, rng: np.random.Generator
) -> None:
    r, table = rng.standard_normal((2, 10, 24)), rng.standard_normal((50, 24))
    ours = {"0/positions/param.weight": table, OUT: r + table[:10]}
    found = diagnosed(ours, {**ours, OUT: r})
    assert found.explanations[0].kind == "term-missing"
    assert found.explanations[0].facts["key"] == "0/positions/param.weight[0:10]"


@pytest.mark.spec("DIA-11")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("sign", "kind"), [(-1, "bias-dropped"), (1, "bias-added")])
def test_a_captured_bias_is_named(
    diagnosed: Diagnose, rng: np.random.Generator, precision: str, sign: int, kind: str
) -> None:
    r, b = rng.standard_normal((1, 6, 64)), rng.standard_normal(64)
    found = diagnosed(
        {"0/m/param.bias": b, OUT: r}, {"0/m/param.bias": b, OUT: r + sign * b}, precision=precision
    )
    assert found.explanations[0].kind == kind
    assert found.explanations[0].facts == {"parameter": "bias"}


@pytest.mark.spec("DIA-11")
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        pytest.param(
            lambda y, w: y * (1 + to_bfloat16(w - 1).astype(float)),
            "norm-without-one-plus",
            id="less",
        ),
        pytest.param(lambda y, w: y * to_bfloat16(1 + w).astype(float), "norm-with-one-plus", id="more"),
    ],
)
def test_one_plus_a_weight_that_is_kept_in_low_precision_is_named(
    diagnosed: Diagnose, rng: np.random.Generator, make: Any, kind: str
) -> None:
    y, w = rng.standard_normal((1, 30, 48)), rng.standard_normal(48) * 0.02
    usual = y * (1 + w) if kind == "norm-without-one-plus" else y * w
    weights = {"0/m/param.weight": w}
    found = diagnosed({**weights, OUT: usual}, {**weights, OUT: make(y, as_is(w))}, precision="bfloat16")
    assert found.explanations[0].kind == kind


@pytest.mark.spec("DIA-48")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_tokens_of_one_expert_are_told(
    diagnosed: Diagnose, rng: np.random.Generator, precision: str
) -> None:
    r, e = rng.standard_normal((60, 32)), rng.standard_normal((60, 32))
    chosen = np.argsort(rng.standard_normal((60, 8)), axis=1)[:, :2]
    t = np.where((chosen == 5).any(axis=1, keepdims=True), r + e, r)
    ours = {"0/moe/input.top_k_index": chosen, "0/moe/output": r}
    found = diagnosed(ours, {**ours, "0/moe/output": t}, key="0/moe/output", precision=precision)
    assert found.explanations[0].kind == "only-expert"
    assert found.explanations[0].facts["experts"] == [5]


@pytest.mark.spec("DIA-48")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_padded_tokens_are_told(diagnosed: Diagnose, rng: np.random.Generator, precision: str) -> None:
    r, e = rng.standard_normal((2, 3, 12, 32))
    mask = np.arange(12)[None] >= np.array([[0], [3], [5]])
    t = np.where(mask[..., None], r, r + e)
    ours = {"0/@root/input.attention_mask": mask.astype(np.int64), OUT: r}
    found = diagnosed(ours, {**ours, OUT: t}, precision=precision)
    assert found.explanations[0].kind == "only-padded"


@pytest.mark.spec("DIA-31")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("make", "size"),
    [
        pytest.param(lambda x, w: x @ w.T, (32, 32), id="product"),
        pytest.param(lambda x, w: rms(x) * w, (32,), id="norm"),
        pytest.param(lambda x, w: silu(x), (1,), id="activation"),
    ],
)
def test_a_module_that_is_right_for_its_inputs_is_no_suspect(
    diagnosed: Diagnose, rng: np.random.Generator, make: Any, size: tuple[int, ...], precision: str
) -> None:
    x, e, w = rng.standard_normal((1, 40, 32)), rng.standard_normal((1, 40, 32)), rng.standard_normal(size)
    weight = {"0/m/param.weight": w}
    narrow = to_bfloat16 if precision == "bfloat16" else as_is
    x, y, w = as_is(x), narrow(x + 0.2 * e), narrow(w)
    found = diagnosed(
        {**weight, IN: x, OUT: make(x.astype(float), as_is(w))},
        {**weight, IN: y, OUT: make(y.astype(float), as_is(w))},
        precision=precision,
    )
    assert [e.kind for e in found.explanations] == ["inherited"]


@pytest.mark.spec("DIA-6")
def test_what_arrives_wrong_is_a_floor_and_is_said(diagnosed: Diagnose, rng: np.random.Generator) -> None:
    x, e, w = (
        rng.standard_normal((1, 40, 32)),
        rng.standard_normal((1, 40, 32)),
        rng.standard_normal((32, 32)),
    )
    y = x + 0.01 * e
    found = diagnosed({IN: x, OUT: x @ w}, {IN: y, OUT: 2 * (y @ w)})
    assert found.explanations[0].kind == "factor"
    assert found.inherited == pytest.approx(0.01, rel=0.1)
    assert found.explanations[0].after == pytest.approx(0.01, rel=0.3)
    assert found.notes[0].startswith("input.x arrives with a relative error of 0.0")


@pytest.mark.spec("DIA-125")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_residual_from_behind_the_norm_is_told(
    diagnosed: Diagnose, rng: np.random.Generator, precision: str
) -> None:
    x, made = rng.standard_normal((1, 40, 32)), rng.standard_normal((1, 40, 32))
    normed = rms(x) * rng.standard_normal(32)
    beside = {"0/m/input.x": x, "0/m.norm/output": normed, "0/m.mlp/output": made}
    found = diagnosed({**beside, OUT: x + made}, {**beside, OUT: normed + made}, precision=precision)
    best = found.explanations[0]
    assert best.kind == "term-exchanged"
    assert best.facts == {"key": "0/m/input.x", "target_key": "0/m.norm/output"}


@pytest.mark.spec("DIA-125")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_residual_of_a_module_around_is_told(
    diagnosed: Diagnose, rng: np.random.Generator, precision: str
) -> None:
    block, x, made = (rng.standard_normal((1, 40, 32)) for _ in range(3))
    beside = {"0/block/input.x": block, "0/block.m/input.x": x, "0/block.m.dense/output": made}
    pair = "0/block.m.norm/input.x"
    found = diagnosed(
        {**beside, pair: x + made}, {**beside, pair: block + made}, key=pair, precision=precision
    )
    best = found.explanations[0]
    assert best.kind == "term-exchanged"
    assert best.facts == {"key": "0/block.m/input.x", "target_key": "0/block/input.x"}


@pytest.mark.spec("DIA-124")
def test_rows_of_a_weight_are_rows(diagnosed: Diagnose, rng: np.random.Generator) -> None:
    weight = rng.standard_normal((32, 64))
    order = [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, *range(12, 32)]
    found = diagnosed(
        {"0/m/param.weight": weight}, {"0/m/param.weight": weight[order]}, key="0/m/param.weight"
    )
    best = found.explanations[0]
    assert best.kind == "row-order"
    assert best.text == (
        "rows of the target are those of the reference in another order: blocks of 4 in the order "
        "0, 2, 1, 3, 4, 5, 6, 7"
    )
    assert "oken" not in " ".join([best.text, best.hint, *found.notes])


@pytest.mark.spec("DIA-124")
def test_an_order_has_each_slice_once(diagnosed: Diagnose, rng: np.random.Generator) -> None:
    one, other = rng.standard_normal((2, 1, 40, 1))
    heads = np.concatenate([one, one, other, other], axis=2)  # repeated, each for its neighbour
    found = diagnosed({OUT: np.tile(heads, 3)}, {OUT: np.tile(heads[..., [0, 2, 1, 3]], 3)})
    best = found.explanations[0]
    assert best.kind == "channel-order"
    assert sorted(best.facts["sources"]) == list(range(12))


@pytest.mark.spec("DIA-124")
def test_slices_most_of_which_are_taken_repeatedly_are_no_order(
    diagnosed: Diagnose, rng: np.random.Generator
) -> None:
    r = rng.standard_normal((40, 32))
    found = diagnosed({OUT: r}, {OUT: r[:, np.arange(32) // 4]})
    assert not [e for e in found.explanations if e.kind == "channel-order"]


@pytest.mark.spec("DIA-420")
@pytest.mark.parametrize("key", [OUT, "0/next/input.x"], ids=["result", "argument"])
def test_an_activation_that_a_port_has_as_a_function_is_known_by_the_result_before_it(
    diagnosed: Diagnose, rng: np.random.Generator, key: str
) -> None:
    x = as_is(rng.standard_normal((1, 20, 32)))
    ours = {"0/up/output": x, IN: x, OUT: silu(x), "0/next/input.x": silu(x)}
    found = diagnosed(ours, {"0/up/output": x, key: quick_gelu(x)}, key=key)
    best = found.explanations[0]
    assert (best.kind, best.facts) == ("activation", {"reference": "silu", "target": "quick gelu"})


OTHER_WEIGHTS = [
    pytest.param(lambda w, _: w - 1, "norm-without-one-plus", id="w"),
    pytest.param(lambda w, _: w + 1, "norm-with-one-plus", id="1+w"),
    pytest.param(lambda w, _: w * w, "weight-twice", id="twice"),
    pytest.param(lambda _, v: v, "other-weights", id="of-another"),
]


@pytest.mark.spec("DIA-421")
@pytest.mark.parametrize(("theirs", "kind"), OTHER_WEIGHTS)
def test_the_weight_of_a_norm_that_no_archive_has_is_fitted_to_the_reference(
    diagnosed: Diagnose, rng: np.random.Generator, theirs: Any, kind: str
) -> None:
    x, y = rng.standard_normal((2, 1, 40, 32))
    w, v = rng.standard_normal((2, 32)) * 0.3 + 0.4
    beside = {"0/n/input.x": y, "0/n/output": rms(y) * v, IN: x}
    modules = [{"path": name, "class": "Norm", "parameters": {}} for name in "mn"]
    found = diagnosed({**beside, OUT: rms(x) * w}, {**beside, OUT: rms(x) * theirs(w, v)}, modules=modules)
    assert found.explanations[0].kind == kind


@pytest.mark.spec("DIA-421")
@pytest.mark.parametrize("has_weight", [True, False])
def test_statistics_of_groups_of_channels_are_named(
    diagnosed: Diagnose, rng: np.random.Generator, has_weight: bool
) -> None:
    x, w = rng.standard_normal((1, 40, 32)), rng.standard_normal(32)
    beside = {IN: x, **({"0/m/param.weight": w} if has_weight else {})}
    grouped = rms(x.reshape(1, 40, 4, 8)).reshape(1, 40, 32)
    found = diagnosed({**beside, OUT: rms(x) * w}, {**beside, OUT: grouped * w})
    assert found.explanations[0].kind == "groups-differ"
    assert "4 groups" in found.explanations[0].text


@pytest.mark.spec("DIA-421")
def test_statistics_of_all_heads_together_are_named(diagnosed: Diagnose, rng: np.random.Generator) -> None:
    x, w = rng.standard_normal((1, 20, 4, 8)) * np.array([0.5, 1, 2, 3])[:, None], rng.standard_normal(8)
    whole = rms(x.reshape(1, 20, 32)).reshape(x.shape)
    found = diagnosed({IN: x, OUT: rms(x) * w}, {IN: x, OUT: whole * w})
    assert found.explanations[0].kind == "axes-differ"


@pytest.mark.spec("DIA-422")
def test_weights_of_experts_that_only_a_router_can_have_made_are_its_work(
    diagnosed: Diagnose, rng: np.random.Generator
) -> None:
    z, x, y = (rng.standard_normal((30, n)) for n in (8, 32, 32))
    shares = top(softmax(z), 2)
    ours = {
        "0/gate/output.0": z,
        "0/gate/output.1": shares,
        IN: x,
        "0/m/input.top_k_weights": shares,
        OUT: y,
    }
    theirs = {"0/gate/output.0": z, IN: x, OUT: y / shares.sum(-1, keepdims=True)}
    config = {"num_experts": 8, "num_experts_per_tok": 2}
    best = diagnosed(ours, theirs, config=config).explanations[0]
    assert (best.kind, best.facts.get("made_by")) == ("router-renormalised", "gate")
