"""Quantised layers that do more than multiply by a weight in few bits, as their authors write them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorcap.comparison import Comparison, compare
from tensorcap.comparison.column_factors import column_factors
from tensorcap.comparison.layer_products import Product
from tensorcap.comparison.record_index import RecordIndex
from tensorcap.comparison.weight_rounding import WeightNumbers
from tests.comparison.conftest import MakeArchive

RNG = np.random.default_rng(3)
X = RNG.normal(size=(64, 128)) * np.where(np.arange(128) == 5, 6, 1)
WEIGHT = RNG.normal(size=(96, 128)) * np.exp(0.4 * RNG.normal(size=(96, 1)))
NORM = 1 + 0.1 * RNG.normal(size=128)
SETTINGS: dict[str, Any] = {"dequantised": ["weight"], "numbers": {"weight": "int8"}}


def rounded(values: Any) -> tuple[Any, Any]:
    """In int8 with a step for each row, and the steps."""
    steps = np.abs(values).max(axis=1, keepdims=True) / 127
    return np.rint(values / steps) * steps, steps


def layer(make_archive: MakeArchive, x: Any, weight: Any, y: Any, steps: Any = None, **more: Any) -> Any:
    """An archive of a layer `proj` behind a norm; with steps its weight is in int8."""
    tensors = dict(more.pop("before", {}))
    tensors |= {"0/norm/output": x, "0/proj/param.weight": weight, "0/proj/input": x, "0/proj/output": y}
    settings = {} if steps is None else SETTINGS | {"numbers": {"weight": more.pop("number", "int8")}}
    tensors |= {} if steps is None else {"0/proj/param.weight_step": steps}
    tensors |= more.pop("tensors", {})
    modules = [
        {"path": "", "class": "my.Net"},
        {"path": "norm", "class": "my.Norm"},
        {"path": "proj", "class": "my.Layer", "settings": settings},
        *more.pop("modules", []),
    ]
    held = {key: np.asarray(value, np.float32) for key, value in tensors.items()}
    return make_archive(held, run={"modules": modules, "dtype": "float32"})


def status(comparison: Comparison, key: str) -> str:
    return next(pair.status for pair in comparison.pairs if pair.key == key)


def in_bits(x: Any, *, shift: int = 0) -> Any:
    """In 8 bits with a step for each row, or for one `shift` rows behind."""
    steps = np.roll(np.abs(x).max(axis=1, keepdims=True) / 127, shift, axis=0)
    return np.clip(np.rint(x / steps), -127, 127) * steps


@pytest.mark.spec("POL-624")
@pytest.mark.parametrize(
    ("shift", "expected"),
    [pytest.param(0, "within-rounding", id="own-steps"), pytest.param(1, "diverged", id="of-the-row-before")],
)
def test_a_layer_rounds_its_inputs_and_does_not_say_so(
    make_archive: MakeArchive, shift: int, expected: str
) -> None:
    weight, steps = rounded(WEIGHT)
    x = X * np.exp(RNG.normal(size=(64, 1)))
    reference = layer(make_archive, x, WEIGHT, x @ WEIGHT.T)
    target = layer(make_archive, x, weight, in_bits(x, shift=shift) @ weight.T, steps)
    assert status(compare(reference, target), "0/proj/output") == expected


@pytest.mark.spec("POL-625")
@pytest.mark.parametrize(
    ("power", "expected"),
    [pytest.param(1, "within-rounding", id="once"), pytest.param(2, "diverged", id="twice")],
)
def test_a_norm_is_divided_by_what_columns_are_multiplied_by(
    make_archive: MakeArchive, power: int, expected: str
) -> None:
    """By less than 10 % each, and the input is off by 20 %, so that columns say little."""
    factors = np.sqrt(np.abs(NORM))
    weight, steps = rounded(WEIGHT * factors)
    noisy = X * (1 + 0.2 * RNG.normal(size=X.shape))
    reference = layer(make_archive, X, WEIGHT, X @ WEIGHT.T, tensors={"0/norm/param.weight": NORM})
    x = noisy / factors**power
    target = layer(
        make_archive,
        x,
        weight,
        x @ weight.T,
        steps,
        tensors={"0/norm/param.weight": NORM / factors**power},
    )
    found = compare(reference, target)
    assert status(found, "0/proj/param.weight") == expected
    assert status(found, "0/norm/param.weight") == ("explained" if power == 1 else "diverged")


@pytest.mark.spec("POL-284")
@pytest.mark.parametrize(
    ("times", "added", "expected"),
    [
        pytest.param(0, 0, "explained", id="right"),
        pytest.param(0, 0.2, "diverged", id="and-something-is-added"),
        pytest.param(0.05, 0, "diverged", id="and-each-column-is-5-percent-off"),
    ],
)
def test_what_is_wrong_with_a_divided_input_besides_is_not_explained(
    make_archive: MakeArchive, times: float, added: float, expected: str
) -> None:
    """The factors are fitted: no parameter of the norm has lost them."""
    factors = np.exp(RNG.normal(size=128))
    weight, steps = rounded(WEIGHT * factors)
    x = (X * (1 + times * RNG.choice([-1, 1], size=128)) + added) / factors
    reference = layer(make_archive, X, WEIGHT, X @ WEIGHT.T)
    found = compare(reference, layer(make_archive, x, weight, x @ weight.T, steps))
    assert status(found, "0/proj/param.weight") == "within-rounding"
    assert [status(found, f"0/{key}") for key in ("norm/output", "proj/input")] == [expected] * 2


@pytest.mark.spec("POL-625")
@pytest.mark.parametrize(
    ("is_divided", "expected"),
    [pytest.param(True, "within-rounding", id="right"), pytest.param(False, "diverged", id="forgotten")],
)
def test_a_layer_divides_its_input_itself(make_archive: MakeArchive, is_divided: bool, expected: str) -> None:
    factors = np.exp(RNG.normal(size=128))
    weight, steps = rounded(WEIGHT * factors)
    y = (X / factors if is_divided else X) @ weight.T
    reference = layer(make_archive, X, WEIGHT, X @ WEIGHT.T)
    target = layer(make_archive, X, weight, y, steps, tensors={"0/proj/buffer.smoothing": factors})
    assert status(compare(reference, target), "0/proj/output") == expected


@pytest.mark.spec("POL-626")
@pytest.mark.parametrize(
    ("is_rotated", "expected"),
    [pytest.param(True, "within-rounding", id="right"), pytest.param(False, "diverged", id="forgotten")],
)
def test_a_layer_rotates_its_input(make_archive: MakeArchive, is_rotated: bool, expected: str) -> None:
    rotation = np.linalg.qr(RNG.normal(size=(128, 128)))[0]
    weight, steps = rounded(WEIGHT @ rotation)
    y = (X @ rotation if is_rotated else X) @ weight.T
    reference = layer(make_archive, X, WEIGHT, X @ WEIGHT.T)
    found = compare(reference, layer(make_archive, X, weight, y, steps))
    assert status(found, "0/proj/output") == expected
    assert status(found, "0/proj/param.weight") == expected


@pytest.mark.spec("POL-627")
@pytest.mark.parametrize(
    ("name", "expected"),
    [pytest.param("ReLU", "explained", id="relu"), pytest.param("GELU", "diverged", id="another")],
)
def test_a_relu_is_a_part_of_the_layer_before(make_archive: MakeArchive, name: str, expected: str) -> None:
    weight, steps = rounded(WEIGHT)

    def archive(made: Any, after: Any, own: Any, **quantised: Any) -> Any:
        tensors = {
            "0/conv/param.weight": own,
            "0/conv/input": X,
            "0/conv/output": made,
            "0/act/input": made,
            "0/act/output": after,
        }
        if quantised:
            tensors["0/conv/param.weight_step"] = steps
        modules = [
            {"path": "", "class": "my.Net"},
            {"path": "conv", "class": "my.Conv", "settings": quantised},
            {"path": "act", "class": f"torch.nn.{name}"},
        ]
        held = {key: np.asarray(value, np.float32) for key, value in tensors.items()}
        return make_archive(held, run={"modules": modules, "dtype": "float32"})

    y, cut = np.tanh(X @ WEIGHT.T), np.maximum(np.tanh(X @ weight.T), 0)  # no product, as of a convolution
    reference = archive(y, np.maximum(y, 0), WEIGHT)
    found = compare(reference, archive(cut, cut, weight, **SETTINGS))
    assert status(found, "0/conv/output") == expected


@pytest.mark.spec("POL-284")
@pytest.mark.parametrize("seed", range(3))
def test_columns_of_which_four_bits_leave_little_are_divided_all_the_same(
    make_archive: MakeArchive, seed: int
) -> None:
    """In groups with larger columns nearly all of their numbers are 0, or one step: a fit says little."""
    rng = np.random.default_rng(seed)
    factors = np.exp(0.5 * rng.normal(size=128))
    weight = rng.standard_t(5, size=(512, 128))
    groups = (weight * factors).reshape(512, 4, 32)
    steps = np.abs(groups).max(axis=2, keepdims=True) / 7
    values = (np.rint(groups / steps) * steps).reshape(512, 128)
    x = X / factors
    reference = layer(make_archive, X, weight, X @ weight.T)
    target = layer(make_archive, x, values, x @ values.T, steps[:, :, 0], number="int4")
    found = compare(reference, target)
    assert status(found, "0/proj/param.weight") == "within-rounding"
    assert [status(found, f"0/{key}") for key in ("norm/output", "proj/input")] == ["explained"] * 2


@pytest.mark.spec("POL-284")
def test_rows_of_padding_of_a_divided_input_do_not_count(make_archive: MakeArchive) -> None:
    factors = np.exp(RNG.normal(size=128))
    weight, steps = rounded(WEIGHT * factors)
    mask = np.ones((2, 32), np.int64)
    mask[:, :24] = 0
    given = {"0/@root/input.input_ids": mask, "0/@root/input.attention_mask": mask}
    x, other = X.reshape(2, 32, 128), X.reshape(2, 32, 128) / factors
    other[:, :24] += 1
    reference, target = (
        layer(make_archive, a, w, a @ w.T, s, tensors={"0/norm/param.weight": n, **given})
        for a, w, s, n in ((x, WEIGHT, None, NORM), (other, weight, steps, NORM / factors))
    )
    found = compare(reference, target)
    assert [status(found, f"0/{key}") for key in ("norm/output", "proj/input")] == ["explained"] * 2


@pytest.mark.spec("POL-284")
@pytest.mark.parametrize(
    ("factor", "expected"),
    [pytest.param(1 + 1e-6, "within-rounding", id="right"), pytest.param(1.3, "diverged", id="too-large")],
)
def test_what_is_divided_behind_a_norm_says_nothing_of_the_norm(
    make_archive: MakeArchive, factor: float, expected: str
) -> None:
    """In the reference the layer is given what the norm makes; in the target code between divides that."""
    factors = np.exp(RNG.normal(size=128))
    weight, steps = rounded(WEIGHT * factors)
    x = X / factors
    reference = layer(make_archive, X, WEIGHT, X @ WEIGHT.T)
    made = {"0/norm/output": X * factor}
    found = compare(reference, layer(make_archive, x, weight, x @ weight.T, steps, tensors=made))
    assert status(found, "0/proj/param.weight") == "within-rounding"
    assert status(found, "0/norm/output") == expected


EXPERTS = [
    {"path": "mlp", "class": "my.Experts"},
    {
        "path": "mlp.gate",
        "class": "my.Gate",
        "settings": {"num_experts": 4, "top_k": 1},
        "parameters": {"weight": {"shape": [4, 128], "dtype": "float32"}},
    },
    *({"path": f"mlp.experts.{expert}", "class": "my.Expert"} for expert in range(4)),
]


@pytest.mark.spec("POL-284", "POL-18", "CMP-11")
@pytest.mark.parametrize("unreadable", ["", "0/mlp.gate/output"])
def test_tokens_at_near_ties_of_a_divided_input_do_not_count(
    make_archive: MakeArchive, unreadable: str
) -> None:
    """Ten of 64 tokens got another expert before the norm; half of the rows and more are right."""
    factors = np.exp(RNG.normal(size=128))
    weight, steps = rounded(WEIGHT * factors)
    tied, scores = slice(3, 13), RNG.normal(size=(64, 4))
    scores[tied] = 1, 1 - 1e-7, 0, 0
    other_scores, other = scores.copy(), X.copy()
    other_scores[tied] = 1 - 1e-7, 1, 0, 0
    other[tied] = RNG.normal(size=(10, 128))
    mixed = RNG.normal(size=X.shape)
    reference, target = (
        layer(
            make_archive,
            x,
            w,
            x @ w.T,
            s,
            before={"0/mlp/input.0": mixed, "0/mlp.gate/input.0": mixed, "0/mlp.gate/output": of_gate},
            tensors={"0/norm/param.weight": n},
            modules=EXPERTS,
        )
        for x, w, s, n, of_gate in (
            (X, WEIGHT, None, NORM, scores),
            (other / factors, weight, steps, NORM / factors, other_scores),
        )
    )
    reference.unreadable = unreadable
    found = compare(reference, target)
    assert (status(found, "0/mlp.gate/output") == "unreadable") == bool(unreadable)
    assert [status(found, f"0/{key}") for key in ("norm/output", "proj/input")] == ["explained"] * 2


@pytest.mark.spec("POL-625")
def test_steps_of_a_weight_and_a_norm_as_it_was_are_no_factors_of_columns(make_archive: MakeArchive) -> None:
    """A square layer has as many steps as columns."""
    weight, steps = rounded(RNG.normal(size=(128, 128)))
    of_norm = {"0/norm/param.weight": NORM}
    y = X @ weight.T
    archive = layer(make_archive, X, weight, y, steps, tensors={**of_norm, "0/proj/buffer.smooth": NORM})
    index = RecordIndex(archive)
    product = Product("0/proj/output", X, y, y, np.zeros(128), X)
    given = [archive.get("0/proj/input")]
    numbers = WeightNumbers("int8", weight, steps)
    found = list(column_factors(index, index, "proj", weight, numbers, [product], given))
    smooth = NORM.astype(np.float32)
    assert [factors.is_inside for factors in found] == [True, True]
    for factors, wanted in zip(found, (smooth, 1 / smooth), strict=True):
        assert factors.factors == pytest.approx(wanted, rel=1e-6)
