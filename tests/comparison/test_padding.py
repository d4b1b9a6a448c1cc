"""Tokens of padding are nobody's mistake, and the others are judged as ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tensorcap.comparison import compare
from tensorcap_formats.dtypes import Array

MakeArchive = Callable[..., Any]
ROWS, TOKENS, WIDTH = 2, 16, 64
PADDED = 5  # tokens at the start of the second row


def tensor(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def given(new: int = TOKENS) -> dict[str, Array]:
    mask = np.ones((ROWS, TOKENS), np.int64)
    mask[1, :PADDED] = 0
    return {
        "0/@root/input.input_ids": np.ones((ROWS, new), np.int64),
        "0/@root/input.attention_mask": mask,
    }


def spoiled(x: Array, *at: Any) -> Array:
    made = x.copy()
    made[at] += 1
    return made


FIRST = slice(0, PADDED)
BY_TOKEN = tensor(ROWS, TOKENS, WIDTH)
CACHE = tensor(ROWS, 4, TOKENS, WIDTH)


def statuses(make_archive: MakeArchive, key: str, x: Array, y: Array, inputs: dict[str, Array]) -> Any:
    archives = (make_archive({**inputs, key: side}, run={"dtype": "float32"}) for side in (x, y))
    found = compare(*archives)
    return next(pair for pair in found.pairs if pair.key == key)


@pytest.mark.spec("POL-31")
@pytest.mark.parametrize(
    ("key", "x", "at"),
    [
        pytest.param("0/mlp/output", BY_TOKEN, (1, FIRST), id="by-token"),
        pytest.param(
            "0/mlp/output", BY_TOKEN.reshape(-1, WIDTH), (slice(16, 21),), id="rows-and-tokens-as-one"
        ),
        pytest.param("0/a/output", CACHE, (1, slice(None), FIRST), id="heads-first"),
        pytest.param("0/a/output.past_key_values.0", CACHE, (1, slice(None), FIRST), id="a-cache"),
    ],
)
def test_what_is_made_of_padding_is_not_held_against_anybody(
    make_archive: MakeArchive, key: str, x: Array, at: Any
) -> None:
    pair = statuses(make_archive, key, x, spoiled(x, *at), given())
    assert pair.status == "within-rounding"
    assert pair.difference.max_abs == pytest.approx(1)  # what is shown is of the whole tensor
    without = given()
    without["0/@root/input.attention_mask"] = np.ones((ROWS, TOKENS), np.int64)
    assert statuses(make_archive, key, x, spoiled(x, *at), without).status == "diverged"


@pytest.mark.spec("POL-31")
@pytest.mark.parametrize(
    ("key", "x", "at"),
    [
        pytest.param("0/mlp/output", BY_TOKEN, (1, PADDED), id="the-first-that-counts"),
        pytest.param("0/mlp/output", BY_TOKEN, (0, 0), id="of-the-other-row"),
        pytest.param("0/a/output.past_key_values.0", CACHE, (1, 0, PADDED), id="in-a-cache"),
        pytest.param("0/param/output", tensor(TOKENS, ROWS, WIDTH), (0, 1), id="other-axes"),
    ],
)
def test_a_token_that_counts_is_judged(make_archive: MakeArchive, key: str, x: Array, at: Any) -> None:
    pair = statuses(make_archive, key, x, spoiled(x, *at), given())
    assert pair.status == "diverged"


@pytest.mark.spec("POL-31")
def test_a_step_of_one_token_has_the_padding_of_its_cache_and_none_of_its_own(
    make_archive: MakeArchive,
) -> None:
    cache = "0/a/input.past_key_values.0"
    for length in (TOKENS, TOKENS - 1):
        x = CACHE[:, :, :length]
        y = spoiled(x, 1, slice(None), FIRST)
        assert statuses(make_archive, cache, x, y, given(new=1)).status == "within-rounding"
    one = tensor(ROWS, 1, WIDTH)
    assert statuses(make_archive, "0/mlp/output", one, spoiled(one, 1, 0), given(new=1)).status == "diverged"


@pytest.mark.spec("POL-31")
def test_zeros_of_padding_are_not_suspect(make_archive: MakeArchive) -> None:
    zeros = BY_TOKEN.copy()
    zeros[1, FIRST] = 0
    pair = statuses(make_archive, "0/mlp/output", zeros, spoiled(zeros, 1, FIRST), given())
    assert pair.status == "within-rounding"
    assert pair.difference.zero_rows == PADDED


@pytest.mark.spec("POL-31")
def test_masks_that_differ_leave_nothing_out(make_archive: MakeArchive) -> None:
    inputs = given()
    other = {**inputs, "0/@root/input.attention_mask": np.ones((ROWS, TOKENS), np.int64)}
    key, y = "0/mlp/output", spoiled(BY_TOKEN, 1, FIRST)
    sides = make_archive({**inputs, key: BY_TOKEN}), make_archive({**other, key: y})
    pairs = {pair.key: pair.status for pair in compare(*sides).pairs}
    assert pairs[key] == "diverged"


OF_MODULE = "0/encoder/input.attention_mask"


def given_to_module(*, masked: bool = True, also: str = "") -> dict[str, Array]:
    mask = np.ones((ROWS, TOKENS), bool)
    mask[1, :PADDED] = not masked
    return {
        "0/@root/input.pixels": tensor(ROWS, 3, WIDTH),
        "0/encoder/input.x": BY_TOKEN,
        OF_MODULE: mask,
        "0/encoder/output": tensor(ROWS, TOKENS, WIDTH, seed=1),
        **({also: tensor(ROWS, TOKENS, WIDTH, seed=2)} if also else {}),
    }


@pytest.mark.spec("POL-301")
@pytest.mark.parametrize(
    ("key", "is_known"),
    [
        pytest.param("0/encoder.layers.0/output", True, id="within"),
        pytest.param("0/encoder/input.positions", True, id="given-beside"),
        pytest.param("0/decoder.layers.0/output", False, id="elsewhere"),
        pytest.param("0/encoders/output", False, id="of-another-name"),
    ],
)
def test_a_mask_that_a_module_is_given_counts_within_it(
    make_archive: MakeArchive, key: str, *, is_known: bool
) -> None:
    wrong = spoiled(BY_TOKEN, 1, FIRST)
    found = statuses(make_archive, key, BY_TOKEN, wrong, given_to_module())
    assert found.status == ("within-rounding" if is_known else "diverged")
    assert statuses(make_archive, key, BY_TOKEN, wrong, given_to_module(masked=False)).status == "diverged"
    other = spoiled(BY_TOKEN, 1, PADDED)
    assert statuses(make_archive, key, BY_TOKEN, other, given_to_module()).status == "diverged"


@pytest.mark.spec("POL-301")
def test_what_such_a_module_returns_is_padded_wherever_it_is_given(make_archive: MakeArchive) -> None:
    inputs = given_to_module()
    states = inputs.pop("0/encoder/output")
    inputs["0/decoder/input.x"] = tensor(ROWS, TOKENS // 2, WIDTH)
    keys = "0/encoder/output", "0/decoder/input.encoded"
    archives = (
        make_archive({**inputs, **dict.fromkeys(keys, side)}, run={"dtype": "float32"})
        for side in (states, spoiled(states, 1, FIRST))
    )
    found = {pair.key: pair.status for pair in compare(*archives).pairs}
    assert [found[key] for key in keys] == ["within-rounding"] * 2


@pytest.mark.spec("POL-301")
def test_masks_of_many_steps_and_modules_are_all_read(make_archive: MakeArchive) -> None:
    def archive(by: float) -> Any:
        tensors = {}
        for step in range(10):
            mask = np.ones((ROWS, TOKENS), np.int64)
            mask[1, : step + 1] = 0
            for layer in range(2):
                made = tensor(ROWS, TOKENS, WIDTH, seed=2 * step + layer)
                made[mask == 0] += np.float32(by)
                tensors[f"{step}/encoder.{layer}/input.x"] = tensor(ROWS, TOKENS, WIDTH, seed=99)
                tensors[f"{step}/encoder.{layer}/input.attention_mask"] = mask
                tensors[f"{step}/encoder.{layer}/output"] = made
        return make_archive(tensors, run={"dtype": "float32"})

    found = compare(archive(0), archive(1))
    assert [pair.key for pair in found.pairs if not pair.is_green] == []


@pytest.mark.spec("POL-301")
def test_a_mask_of_either_of_two_leaves_nothing_out(make_archive: MakeArchive) -> None:
    inputs = given_to_module(also="0/encoder/input.encoder_output")
    wrong = spoiled(BY_TOKEN, 1, FIRST)
    pair = statuses(make_archive, "0/encoder.layers.0/output", BY_TOKEN, wrong, inputs)
    assert pair.status == "diverged"


@pytest.mark.spec("POL-301")
def test_what_the_mask_of_a_module_has_made_zero_has_to_be_zero(make_archive: MakeArchive) -> None:
    zeros = BY_TOKEN.copy()
    zeros[1, FIRST] = 0
    key = "0/encoder.layers.0.attention/input.value"
    pair = statuses(make_archive, key, zeros, spoiled(zeros, 1, FIRST), given_to_module())
    assert pair.status == "suspect"
    assert [f.test for f in pair.findings if f.status == "suspect"] == ["zeros"]


@pytest.mark.spec("POL-31")
def test_short_axes_of_a_token_are_one_row(make_archive: MakeArchive) -> None:
    x = tensor(ROWS, TOKENS, 32, 2)
    x[0, 3, 0] = 1e-3  # both of them: alone they would be off by a multiple of themselves
    y = (x + 1e-3 * tensor(ROWS, TOKENS, 32, 2, seed=1)).astype(np.float32)
    pair = statuses(make_archive, "0/mlp/output", x, spoiled(y, 1, FIRST), given())
    without = statuses(make_archive, "0/mlp/output", x, y, {})
    assert {f.test: f.value for f in pair.findings} == pytest.approx(
        {f.test: f.value for f in without.findings}, rel=0.2
    )


def with_nan(x: Array, *at: Any) -> Array:
    made = x.copy()
    made[at] = np.nan
    return made


@pytest.mark.spec("POL-160")
@pytest.mark.parametrize("is_reference", [False, True], ids=["of-the-target", "of-the-reference"])
@pytest.mark.parametrize(
    ("key", "x", "at"),
    [
        pytest.param("0/mlp/output", BY_TOKEN, (1, FIRST), id="by-token"),
        pytest.param("0/a/output", CACHE, (1, slice(None), FIRST), id="heads-first"),
        pytest.param("0/a/output.past_key_values.0", CACHE, (1, 2, 3), id="a-cache"),
    ],
)
def test_nan_in_padding_is_nobodys_mistake(
    make_archive: MakeArchive, key: str, x: Array, at: Any, *, is_reference: bool
) -> None:
    sides = (with_nan(x, *at), x) if is_reference else (x, with_nan(x, *at))
    pair = statuses(make_archive, key, *sides, given())
    assert pair.status == "match"
    assert "where the attention mask leaves out" in pair.reason
    rounded = sides[0], sides[1] * np.float32(1 + 3e-7)
    assert statuses(make_archive, key, *rounded, given()).status == "within-rounding"
    wrong = sides[0], sides[1] * np.float32(1.2)
    assert statuses(make_archive, key, *wrong, given()).status == "diverged"


@pytest.mark.spec("POL-160")
@pytest.mark.parametrize("at", [(1, PADDED), (0, 0)], ids=["the-first-that-counts", "of-the-other-row"])
def test_nan_in_a_token_that_counts_is_told(make_archive: MakeArchive, at: Any) -> None:
    y = with_nan(with_nan(BY_TOKEN, 1, FIRST), *at)
    assert statuses(make_archive, "0/mlp/output", BY_TOKEN, y, given()).status == "nonfinite"


@pytest.mark.spec("POL-160")
@pytest.mark.parametrize("slot", ["key_padding_mask", "src_key_padding_mask"])
def test_a_mask_that_names_the_padding_is_read_the_other_way_round(
    make_archive: MakeArchive, slot: str
) -> None:
    padded = np.zeros((ROWS, TOKENS), np.bool_)
    padded[1, FIRST] = True
    inputs = {"0/@root/input.src": tensor(ROWS, TOKENS, WIDTH, seed=1), f"0/@root/input.{slot}": padded}
    y = with_nan(BY_TOKEN, 1, FIRST)
    assert statuses(make_archive, "0/mlp/output", BY_TOKEN, y, inputs).status == "match"
    y = with_nan(BY_TOKEN, 0, FIRST)
    assert statuses(make_archive, "0/mlp/output", BY_TOKEN, y, inputs).status == "nonfinite"


@pytest.mark.spec("POL-161")
@pytest.mark.parametrize("is_float", [False, True], ids=["bool", "float"])
def test_a_token_that_sees_nothing_may_become_nan(make_archive: MakeArchive, *, is_float: bool) -> None:
    sees = np.tril(np.ones((TOKENS, TOKENS), np.bool_))[None, None].repeat(ROWS, 0)
    sees[1, :, :, FIRST] = False  # so that the first tokens of the second row see nothing
    mask = np.where(sees, np.float32(0), np.finfo(np.float32).min) if is_float else sees
    key, inputs = "0/a/output", {"0/a/input.attention_mask": mask}
    y = with_nan(BY_TOKEN, 1, FIRST)
    assert statuses(make_archive, key, BY_TOKEN, y, inputs).status == "match"
    y = with_nan(BY_TOKEN, 1, PADDED)
    assert statuses(make_archive, key, BY_TOKEN, y, inputs).status == "nonfinite"
    other = {"0/a/input.attention_mask": np.where(sees, mask, mask[0, 0, 0, 0])}
    other_key = {**other, key: BY_TOKEN}, {**inputs, key: with_nan(BY_TOKEN, 1, FIRST)}
    pairs = {p.key: p.status for p in compare(*(make_archive(side) for side in other_key)).pairs}
    assert pairs[key] == "nonfinite"


@pytest.mark.spec("POL-230")
@pytest.mark.parametrize(
    ("at", "status"),
    [
        pytest.param((1, 0, 2, 1), "match", id="of-padding"),
        pytest.param((1, 0, PADDED, 1), "diverged", id="a-token-that-sees-padding"),
        pytest.param((0, 0, 2, 1), "diverged", id="of-the-other-row"),
    ],
)
def test_what_padding_sees_by_a_mask_does_not_count(
    make_archive: MakeArchive, at: tuple[int, ...], status: str
) -> None:
    seen = np.broadcast_to(np.tril(np.ones((TOKENS, TOKENS), bool)), (ROWS, 1, TOKENS, TOKENS)).copy()
    added = np.where(seen, 0, np.finfo(np.float32).min).astype(np.float32)
    seen[at] = not seen[at]
    pair = statuses(make_archive, "0/attention/input.attention_mask", added, seen, given())
    assert pair.status == status
    assert ("of tokens that are no padding" in pair.reason) is (status == "match")


@pytest.mark.spec("CMP-70", "ALN-320")
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(
    ("name", "damaged"),
    [
        pytest.param("attention_mask", "0/@root/input.input_ids", id="ids"),
        pytest.param("attention_mask", "0/@root/input.attention_mask", id="a-mask"),
        pytest.param("valid", "0/@root/input.valid", id="a-mask-of-another-name"),
        pytest.param("valid", "0/@root/input.input_ids", id="ids-beside-such-a-mask"),
        pytest.param("valid", "0/a/input.attention_mask", id="a-mask-of-four-axes"),
    ],
)
def test_inputs_that_cannot_be_read_leave_all_else_compared(
    make_archive: MakeArchive, side: int, name: str, damaged: str
) -> None:
    inputs = given()
    mask = inputs.pop("0/@root/input.attention_mask")
    scores = np.where(mask[:, None, None, :] * mask[:, None, :, None] == 1, 0, np.finfo(np.float32).min)
    tensors = {
        **inputs,
        f"0/@root/input.{name}": mask,
        "0/a/input.attention_mask": scores.astype(np.float32),
        "0/a/output": BY_TOKEN,
    }
    archives = [make_archive(tensors, unreadable=damaged if i == side else "") for i in (0, 1)]
    found = compare(*archives)
    assert [pair.key for pair in found.pairs if pair.status != "identical"] == [damaged]
    assert found.exit_status == 3


@pytest.mark.spec("CMP-70", "ALN-40")
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("name", ["input_ids", "words"])
def test_ids_that_cannot_be_read_leave_results_of_other_shapes_as_they_are(
    make_archive: MakeArchive, side: int, name: str
) -> None:
    ids, logits = f"0/@root/input.{name}", tensor(ROWS, TOKENS, 32)
    run = {ids: np.arange(ROWS * TOKENS)[::-1].reshape(ROWS, TOKENS), "0/mlp/output": BY_TOKEN}
    archives = [
        make_archive({**run, "0/head/output": head}, unreadable=ids if i == side else "")
        for i, head in enumerate((logits, logits[:, -1:]))
    ]
    found = compare(*archives)
    assert {pair.key: pair.status for pair in found.pairs} == {
        ids: "unreadable",
        "0/mlp/output": "identical",
        "0/head/output": "shape-mismatch",
    }
    assert found.exit_status == 3


@pytest.mark.spec("CMP-70", "ALN-308")
@pytest.mark.parametrize("side", [0, 1])
def test_chosen_experts_that_cannot_be_read_leave_those_of_other_layers_compared(
    make_archive: MakeArchive, side: int
) -> None:
    """Of the layer itself nothing says any more in which order its weights are."""
    random = np.random.default_rng(7)
    chosen = np.array([random.permutation(8)[:3] for _ in range(24)])
    weights = random.random((24, 3)).astype(np.float32)
    archives = []
    for i, order in enumerate((slice(None), slice(None, None, -1))):
        run = {
            f"0/{layer}.gate/output.{name}": values[:, order].copy()
            for layer in "ab"
            for name, values in (("weights", weights), ("chosen", chosen))
        }
        archives.append(make_archive(run, unreadable="0/a.gate/output.chosen" if i == side else ""))
    found = compare(*archives)
    assert {pair.key: pair.status for pair in found.pairs} == {
        "0/a.gate/output.weights": "unreadable",
        "0/a.gate/output.chosen": "unreadable",
        "0/b.gate/output.weights": "identical",
        "0/b.gate/output.chosen": "identical",
    }
    assert found.exit_status == 3
