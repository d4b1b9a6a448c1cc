"""A layer that does what another one does; tables, masks and heads of an attention without modules within.

What the target holds is made by numpy in float64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tensorcap.adapters.torch.operation_options import find_options, run_option
from tensorcap.localization import localize
from tensorcap.reports.suspects import suspect_lines
from tensorcap.session import capture_workload
from tensorcap.workload import Workload
from tensorcap_formats.dtypes import Array
from tensorcap_formats.open import open_archive
from tests.diagnosis.test_mutations import drawn, found_by, with_values

HEADS, KEYS, DIM, TOKENS, WIDTH = 4, 2, 8, 12, 16
KINDS = ("whole", "window", "whole", "window")
CORE = "0/layers.1.o/input.input"


def tables(kind: str, pairs: int = DIM // 4) -> tuple[Array, Array]:
    """Cosines and sines, each frequency twice: of half the channels of a head, of another base in windows."""
    base = 100.0 if kind == "window" else 10000.0
    half = np.arange(TOKENS)[:, None] * base ** (-np.arange(pairs) / pairs)
    both = np.concatenate((half, half), -1)[None]
    return np.cos(both), np.sin(both)


def seen(kind: str) -> Array:
    distance = np.arange(TOKENS)[:, None] - np.arange(TOKENS)
    return np.asarray((distance >= 0) & ((distance < 4) | (kind == "whole")))


class Attention(nn.Module):
    """Queries, keys and values are products with a parameter of its own, so that they are no results."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty((HEADS + 2 * KEYS) * DIM, WIDTH))
        self.o = nn.Linear(HEADS * DIM, WIDTH, bias=False)
        self.head_dim = DIM

    def forward(
        self, x: Tensor, attention_mask: Tensor | None, position_embeddings: tuple[Tensor, Tensor]
    ) -> Tensor:
        whole = (x @ self.w.T).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
        q, k, v = torch.split(whole, [HEADS, KEYS, KEYS], 1)
        cos, sin = (side[:, None] for side in position_embeddings)
        width = cos.shape[-1]

        def turn(side: Tensor) -> Tensor:
            some, rest = side[..., :width], side[..., width:]
            other = torch.cat((-some[..., width // 2 :], some[..., : width // 2]), -1)
            return torch.cat((some * cos + other * sin, rest), -1)

        is_causal = attention_mask is None
        made = functional.scaled_dot_product_attention(
            turn(q), turn(k), v, attn_mask=attention_mask, is_causal=is_causal, enable_gqa=True
        )
        result: Tensor = self.o(made.transpose(1, 2).flatten(2))
        return result


def attend(x: Array, w: Array, mask: Array, angles: tuple[Array, Array], *, in_turn: bool = False) -> Array:
    """What is given to the last product, in float64."""
    whole = (x @ w.T).reshape(*x.shape[:2], -1, DIM).transpose(0, 2, 1, 3)
    cos, sin = (side[:, None] for side in angles)
    width = cos.shape[-1]

    def turn(side: Array) -> Array:
        some = side[..., :width]
        other = np.concatenate((-some[..., width // 2 :], some[..., : width // 2]), -1)
        return np.concatenate((some * cos + other * sin, side[..., width:]), -1)

    q, k, v = turn(whole[:, :HEADS]), turn(whole[:, HEADS:-KEYS]), whole[:, -KEYS:]
    heads = np.arange(HEADS) % KEYS if in_turn else np.arange(HEADS) * KEYS // HEADS
    scores = np.where(mask, q @ k[:, heads].swapaxes(-1, -2) / np.sqrt(DIM), -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    made = (shares / shares.sum(-1, keepdims=True)) @ v[:, heads]
    return np.asarray(made.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1))


class Stack(nn.Module):
    """Layers that see all tokens before them, or a window, each with its own angles; a sum around each."""

    def __init__(self, kinds: tuple[str, ...] = KINDS, *, has_masks: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in kinds)
        self.kinds, self.has_masks = kinds, has_masks

    def forward(self, x: Tensor) -> Tensor:
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            cos, sin = (torch.from_numpy(side).float() for side in tables(kind))
            mask = torch.from_numpy(seen(kind)) if self.has_masks else None
            x = x + layer(x, mask, (cos, sin))
        return x


def workload(kinds: tuple[str, ...] = KINDS, *, has_masks: bool = True) -> Workload:
    x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(3))
    return Workload(drawn(Stack(kinds, has_masks=has_masks)), {"x": x})


def given_to(ours: Workload, folder: Path) -> tuple[Array, Array]:
    """What layer 1 of the reference is given, and its weight."""
    capture_workload(ours, folder / "given.h5")
    with open_archive(folder / "given.h5") as archive:
        x = archive.load(archive.get("0/layers.1/input.x")).astype(float)
    layer: Any = ours.model.layers[1]
    return x, layer.w.detach().double().numpy()


def explained(ours: Workload, core: Array, folder: Path) -> tuple[str, str]:
    """Kind and text of what explains that layer 1 gives this to its last product."""
    layer: Any = ours.model.layers[1]
    made = core @ layer.o.weight.detach().double().numpy().T
    changed = {CORE: core, "0/layers.1.o/output": made, "0/layers.1/output": made}
    first = found_by(ours, changed, folder, "layers.1", CORE).explanations[0]
    return first.kind, first.text


MISTAKES = [
    pytest.param(
        seen("whole"),
        tables("whole"),
        False,
        "layer-schedule",
        "position_embeddings of layers.0",
        id="another-layer",
    ),
    pytest.param(
        seen("window"),
        tables("window", DIM // 2),
        False,
        "attention-rotation",
        "all 8 channels",
        id="all-channels",
    ),
    pytest.param(seen("window"), tables("window"), True, "attention-heads", "in turn", id="heads-in-turn"),
]


@pytest.mark.spec("DIA-600", "DIA-601", "DIA-602")
@pytest.mark.parametrize(("mask", "angles", "in_turn", "kind", "words"), MISTAKES)
def test_what_an_attention_without_modules_within_does_otherwise_is_said(
    tmp_path: Path, mask: Array, angles: tuple[Array, Array], in_turn: bool, kind: str, words: str
) -> None:
    ours = workload()
    found, text = explained(ours, attend(*given_to(ours, tmp_path), mask, angles, in_turn=in_turn), tmp_path)
    assert (found, words in text) == (kind, True), text


class Placed(nn.Module):
    """Adds rows of a table, if it is given positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(TOKENS, WIDTH))

    def forward(self, x: Tensor, position_ids: Tensor | None) -> Tensor:
        return x.tanh() if position_ids is None else x.tanh() + self.table[position_ids]


class Places(nn.Module):
    """The first layer is given positions, the second one none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Placed() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x, position_ids=torch.arange(TOKENS).flip(0))
        made: Tensor = self.layers[1](x, position_ids=None)
        return made


@pytest.mark.spec("DIA-600")
def test_whole_numbers_of_another_layer_are_given_to_one_that_has_none(tmp_path: Path) -> None:
    x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(3))
    ours = Workload(drawn(Places()), (x,))
    first, second = ours.model.layers
    given = np.tanh(x.double().numpy()) + first.table.detach().double().numpy()[::-1]
    made = np.tanh(given) + second.table.detach().double().numpy()[::-1]
    changed = {"0/layers.1/output": made, "0/@root/output": made}
    best = found_by(ours, changed, tmp_path, "layers.1", "0/layers.1/output").explanations[0]
    assert best.text == "the target is what Placed makes with position_ids of layers.0"


@pytest.mark.slow
@pytest.mark.spec("DIA-602")
def test_attention_of_torch_that_is_not_causal_is_said(tmp_path: Path) -> None:
    ours = workload(has_masks=False)
    everywhere = np.ones((TOKENS, TOKENS), bool)
    core = attend(*given_to(ours, tmp_path), everywhere, tables("window"))
    found, text = explained(ours, core, tmp_path)
    assert (found, "sees all keys" in text) == ("attention-mask", True), text


@pytest.mark.spec("LCL-650")
def test_a_shifted_schedule_is_one_suspect_that_says_what_each_layer_does(tmp_path: Path) -> None:
    """The target has no masks and tables: it makes them in the layers."""
    paths = tmp_path / "reference.h5", tmp_path / "whole.h5"
    capture_workload(workload(), paths[0])
    capture_workload(workload(("whole", "window", "window", "whole")), paths[1])
    with open_archive(paths[1]) as archive:
        lacking = [r.key.text for r in archive.records if r.key.slot.startswith(("input.att", "input.pos"))]
    target = with_values(paths[1], tmp_path / "target.h5", {}, lacking=lacking)
    (suspect,) = localize(paths[0], target, reference_model=workload()).suspects
    assert suspect.modules == ("layers.2", "layers.3")
    text = "\n".join(suspect_lines(1, suspect))
    assert "explained: the target is what Attention makes with" in text
    assert "of layers.3: the target is what Attention makes with" in text
    assert "does what the one 1 before it does in the reference" in text
    assert [one.get("text", "").count("layers.{0,2}") for one in suspect.to_json()["others"]] == [1]


class Gated(nn.Module):
    """A product whose first half is a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = (x @ self.w.T).chunk(2, -1)
        return functional.silu(gate) * up


@pytest.mark.spec("DIA-608")
def test_one_mistake_in_all_layers_is_one_suspect_though_the_target_has_results_alone(tmp_path: Path) -> None:
    """The second layer is called again on what the target's first one made, which is wrong too."""

    def chain() -> Workload:
        x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(3))
        return Workload(drawn(nn.Sequential(Gated(), Gated())), (x,))

    capture_workload(chain(), tmp_path / "reference.h5")
    with open_archive(tmp_path / "reference.h5") as archive:
        made = archive.load(archive.get("0/0/input.x")).astype(float)
        lacking = [r.key.text for r in archive.records if "/input." in r.key.text]
    changed = {}
    for number, layer in enumerate(chain().model):
        gate, up = np.split(made @ layer.w.detach().double().numpy().T, 2, -1)
        made = gate * up / (1 + np.exp(-up))
        changed[f"0/{number}/output"] = changed["0/@root/output"] = made
    target = with_values(tmp_path / "reference.h5", tmp_path / "target.h5", changed, lacking=lacking)
    (suspect,) = localize(tmp_path / "reference.h5", target, reference_model=chain()).suspects
    assert sorted(suspect.modules) == ["0", "1"]
    assert all(one.diagnosis is not None for one in (suspect, *suspect.others))


@pytest.mark.spec("DIA-602")
@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 4, 5, 8)], ids=["a-head", "heads", "a-batch"])
def test_attention_of_any_number_of_axes_can_be_done_otherwise(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    name, attend_to = "scaled_dot_product_attention", functional.scaled_dot_product_attention
    causal = [words for words in find_options(name, (x, x, x), {}, attend_to(x, x, x)) if "causal" in words]
    assert causal == ["attention that is causal"]
    made = run_option(name, causal[0], attend_to, (x, x, x), {})
    seen = (x @ x.mT / 8**0.5).masked_fill(torch.ones(5, 5).triu(1) == 1, -torch.inf).softmax(-1) @ x
    assert torch.allclose(made, seen, atol=1e-6)
