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
