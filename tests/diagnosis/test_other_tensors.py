"""Other tensors of a module, steps of norms left out, paddings, roundings, caches; targets by numpy alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tensorcap.diagnosis.attention.rotary import list_tables
from tensorcap_formats.dtypes import Array
from tests.diagnosis.conftest import Diagnose
from tests.diagnosis.test_options import Case, Own, diagnosed_module, softmax

EPS = 1e-5
ROWS, EXPERTS = 4, 6


def scaled_twice(self: Any, input: Tensor) -> Tensor:
    return torch.tanh(input * self.query) + torch.sin(input * self.key)


def differences(self: Any, input: Tensor) -> Tensor:
    return torch.tanh(input) - functional.pad(input, (0, 0, 1, -1))


class Mixed(nn.Module):
    """A share of each token, the rest of the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("share", torch.linspace(0.1, 0.8, 16))

    def forward(self, input: Tensor) -> Tensor:
        share: Any = self.share
        before = functional.pad(input, (0, 0, 1, -1))
        out: Tensor = input * share + before * (1 - share)
        return out


def attended(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v)


class RowExperts(nn.Module):
    """Rows of all experts one after the other in one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.empty(EXPERTS * ROWS, 16))

    def forward(self, input: Tensor) -> Tensor:
        each = torch.einsum("btw,erw->bter", input, self.rows.view(EXPERTS, ROWS, 16)).tanh()
        out: Tensor = torch.cat(each.unbind(2)[:3], -1) + torch.cat(each.unbind(2)[3:], -1).sin()
        return out


def attention(q: Array, k: Array, v: Array) -> Array:
    return np.asarray(softmax(q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])) @ v)


def low(x: Array) -> Array:
    """Rounded to bfloat16, ties to even."""
    return np.asarray(torch.from_numpy(x.astype(np.float32)).bfloat16().double().numpy())


def correlated(x: Array, weight: Array, before: int, behind: int) -> Array:
    """A correlation along the last axis of (batch, channel, place)."""
    padded = np.pad(x, ((0, 0), (0, 0), (before, behind)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, weight.shape[-1], -1)
    return np.asarray(np.einsum("bcpk,ock->bop", windows, weight))


def normed_by_variance(v: dict[str, Array]) -> Array:
    x = v["input"]
    centred = x - x.mean(-1, keepdims=True)
    return np.asarray(centred / (x.var(-1, keepdims=True) + EPS) * v["weight"] + v["bias"])


def early(v: dict[str, Array]) -> Array:
    """The newest key and value stand a slot before theirs, which stays empty."""
    k, x = (np.concatenate((v[n][..., :-2, :], v[n][..., -1:, :], 0 * v[n][..., -1:, :]), -2) for n in "kv")
    return attention(v["q"], k, x)


CASES = [
    Case(
        "other-weights",
        "with query in the place of key",
        lambda _: Own(scaled_twice, query=(16,), key=(16,)),
        lambda v: np.tanh(v["input"] * v["query"]) + np.sin(v["input"] * v["query"]),
    ),
    Case(
        "other-weights",
        "with query and key exchanged",
        lambda _: Own(scaled_twice, query=(16,), key=(16,)),
        lambda v: np.tanh(v["input"] * v["key"]) + np.sin(v["input"] * v["query"]),
    ),
    Case(
        "term-exchanged",
        "with 1 - share in the place of share",
        lambda _: Mixed(),
        lambda v: (
            v["input"] * (1 - np.linspace(0.1, 0.8, 16))
            + np.pad(v["input"], ((0, 0), (1, 0), (0, 0)))[:, :-1] * np.linspace(0.1, 0.8, 16)
        ),
    ),
    Case(
        "padding-differs",
        "padding of 2 before and 4 behind",
        lambda _: nn.Conv1d(3, 4, 7, 2, 3, bias=False),
        lambda v: correlated(v["input"], v["weight"], 2, 4)[..., ::2],
        {"input": (2, 3, 21)},
    ),
    Case(
        "padding-differs",
        "padding that is circular in pad",
        lambda _: Own(differences),
        lambda v: np.tanh(v["input"]) - np.roll(v["input"], 1, 1),
    ),
    Case(
        "statistics-differ",
        "division by the variance",
        lambda _: nn.LayerNorm(16),
        normed_by_variance,
    ),
    Case(
        "operation-precision",
        "key and value rounded to bfloat16",
        lambda _: Own(attended),
        lambda v: attention(v["q"], low(v["k"]), low(v["v"])),
        dict.fromkeys("qkv", (2, 3, 9, 8)),
    ),
    Case(
        "cache-not-written",
        "the newest key and value written one slot early",
        lambda _: Own(attended),
        early,
        {"q": (2, 3, 1, 8), "k": (2, 3, 9, 8), "v": (2, 3, 9, 8)},
    ),
    Case(
        "expert-order",
        "the experts of rows reversed",
        lambda _: RowExperts(),
        lambda v: (
            np.concatenate(
                [np.tanh(v["input"] @ w.T) for w in v["rows"].reshape(EXPERTS, ROWS, 16)[:2:-1]], -1
            )
            + np.sin(
                np.concatenate(
                    [np.tanh(v["input"] @ w.T) for w in v["rows"].reshape(EXPERTS, ROWS, 16)[2::-1]], -1
                )
            )
        ),
    ),
]


@pytest.mark.spec("DIA-381", "DIA-382", "DIA-383")
@pytest.mark.parametrize("case", CASES, ids=[f"{c.kind}-{c.words[:24]}" for c in CASES])
def test_another_tensor_step_padding_or_rounding_is_named(tmp_path: Path, case: Case) -> None:
    found = diagnosed_module(case, tmp_path)
    assert found.explanations, found.tried
    first = found.explanations[0]
    assert first.kind == case.kind, first.text
    assert case.words in first.text


@pytest.mark.spec("DIA-384")
def test_angles_that_are_computed_in_low_precision_are_tried() -> None:
    positions, frequencies = np.arange(40.0), 10000.0 ** (-np.arange(8) / 8)
    angles = np.exp(1j * positions[:, None] * frequencies)[None]
    narrow = torch.arange(40).bfloat16()[:, None] * torch.from_numpy(frequencies).bfloat16()
    expected = np.exp(1j * narrow.double().numpy())
    tables = {name: table for name, table, _ in list_tables(angles, 16)}
    assert np.abs(tables["positions, frequencies and angles in bfloat16"] - expected).max() < 1e-9


@pytest.mark.spec("DIA-384")
def test_of_the_angles_of_one_token_parts_are_tried() -> None:
    """A decode step has one: no frequencies are known, and no other base."""
    angles = np.exp(1j * 7.0 * 10000.0 ** (-np.arange(8) / 8))[None, None]
    names = [name for name, _, _ in list_tables(angles, 16)]
    assert "the first 8 of 16 channels, by every other frequency" in names
    assert not any("base" in name for name in names)


def layer_norm(x: Array, weight: Array, bias: Array) -> Array:
    deviation = np.sqrt(x.var(-1, keepdims=True) + EPS)
    return np.asarray((x - x.mean(-1, keepdims=True)) / deviation * weight + bias)


@pytest.mark.spec("DIA-385")
def test_a_feed_forward_behind_attention_and_not_beside_it_is_named(diagnosed: Diagnose) -> None:
    rng = np.random.default_rng(3)
    x, attended = rng.standard_normal((2, 2, 9, 16))
    weight, bias = rng.standard_normal((2, 16))
    normed = layer_norm(x, weight, bias)
    reference = {
        "0/block/input.x": x,
        "0/block.norm/input.x": x,
        "0/block.norm/output": normed,
        "0/block.attention/output": attended,
        "0/block.feed/input.x": normed,
    }
    target = {**reference, "0/block.feed/input.x": layer_norm(x + attended, weight, bias)}
    found = diagnosed(reference, target, key="0/block.feed/input.x")
    assert found.explanations[0].kind == "operand-exchanged"
    assert "block.norm makes of the sum of 0/block" in found.explanations[0].text
    noise = {**target, "0/block.feed/input.x": rng.standard_normal(x.shape)}
    assert not diagnosed(reference, noise, key="0/block.feed/input.x").explanations
