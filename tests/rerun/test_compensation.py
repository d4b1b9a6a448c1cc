"""What differs and is undone by what is computed of it accuses nobody, and hides no mistake beside it."""

from __future__ import annotations

import copy
import errno
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it
from torch.nn.utils.fusion import fuse_conv_bn_eval

from tensorcap.comparison import compare
from tensorcap.localization import Localization, gather_evidence, localize
from tensorcap.rerun import OwnError, inject
from tensorcap.rerun.compensation import Dependencies, settle
from tensorcap.session import capture_workload
from tensorcap.workload import Workload
from tensorcap_cli.main import main as tcap
from tensorcap_formats.open import open_archive
from tests.support.archives import new_archive

IMAGES = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))
STATES = torch.randn(2, 10, 16, generator=torch.Generator().manual_seed(2))
WAYS = ["replay", "injection"]


class Step(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = (
            nn.Conv2d(inner, outer, 3, padding=1),
            nn.BatchNorm2d(outer),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.bn(self.conv(x)))
        return out


class Net(nn.Module):
    """Convolutions with batch norms, the second pair behind the first without anything between."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Sequential(Step(3, 8), Step(8, 8), Step(8, 8))
        self.depthwise, self.depthwise_bn = nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8)
        self.pointwise, self.pointwise_bn = nn.Conv2d(8, 6, 1), nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.depthwise_bn(self.depthwise(self.steps(x)))
        out: Tensor = self.pointwise_bn(self.pointwise(x)).mean((2, 3))
        return out


class Attention(nn.Module):
    """Heads of four channels: a norm, projections, a scale, and a product behind."""

    def __init__(self, scale: float = 0.5) -> None:
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(16), scale
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (each(h).unflatten(-1, (4, 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
        heads = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        out: Tensor = x + self.o(heads.transpose(1, 2).flatten(-2))
        return out


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Attention() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def seeded(make: Callable[[], nn.Module]) -> Any:
    """A model with weights and statistics that look trained."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                noise = 0.3 * torch.randn(tensor.shape, generator=generator)
                tensor.copy_(tensor + noise if "running_var" not in name else 1 + noise.abs())
    return model


def net() -> Any:
    return seeded(Net)


def tower() -> Any:
    return seeded(Tower)


def folded(model: Any = None) -> Any:
    """Each batch norm in the convolution before it, an identity in its place."""
    model = model or net()
    for step in model.steps:
        step.conv, step.bn = fuse_conv_bn_eval(step.conv, step.bn), nn.Identity()
    for name in ("depthwise", "pointwise"):
        fused = fuse_conv_bn_eval(getattr(model, name), getattr(model, f"{name}_bn"))
        setattr(model, name, fused)
        setattr(model, f"{name}_bn", nn.Identity())
    return model


def norms_folded() -> Any:
    """The gain and the bias of each norm in the projections behind it."""
    model = tower()
    with torch.no_grad():
        for layer in model.layers:
            for each in (layer.q, layer.k, layer.v):
                each.bias += each.weight @ layer.norm.bias
                each.weight *= layer.norm.weight
            layer.norm.weight.fill_(1)
            layer.norm.bias.zero_()
    return model


def scale_folded() -> Any:
    """The scale of the scores in the projection of the queries."""
    model = tower()
    with torch.no_grad():
        for layer in model.layers:
            layer.q.weight *= layer.scale
            layer.q.bias *= layer.scale
            layer.scale = 1.0
    return model


def values_scaled() -> Any:
    """The values larger, the product behind the heads smaller by as much, as quantisation likes it."""
    model = tower()
    factor = torch.linspace(0.5, 3, 16)
    with torch.no_grad():
        for layer in model.layers:
            layer.v.weight *= factor[:, None]
            layer.v.bias *= factor
            layer.o.weight /= factor
    return model


def gains_moved(*, wrong: bool = False) -> Any:
    """Channels of the queries larger, and those of the keys smaller by as much."""
    model = tower()
    factor = torch.linspace(0.5, 3, 16)
    with torch.no_grad():
        for number, layer in enumerate(model.layers):
            for part, by in ((layer.q, factor), (layer.k, 1 / factor)):
                if not (wrong and number == 2 and part is layer.k):
                    part.weight *= by[:, None]
                    part.bias *= by
    return model


class HandsOn(nn.Module):
    """Its argument has another name than that of a norm."""

    def forward(self, anything: Tensor) -> Tensor:
        return anything


def folded_by_another_name() -> Any:
    model = folded()
    for step in model.steps:
        step.bn = HandsOn()
    return model


PORTS = {
    "folded": (net, folded, IMAGES),
    "norms-folded": (tower, norms_folded, STATES),
    "scale-folded": (tower, scale_folded, STATES),
    "values-scaled": (tower, values_scaled, STATES),
}


def localized(
    folder: Path, reference: Any, target: Any, x: Tensor, way: str, *, dtype: torch.dtype | None = None
) -> Localization:
    """Both runs captured in a folder, and localized by a replay, by an injected run, or by archives alone."""
    if dtype is not None:
        target, low = target.to(dtype), x.to(dtype)
    else:
        low = x
    runs = Workload(reference, (x,), seed=0), Workload(target, (low,), seed=0)
    paths = [folder / "ref.h5", folder / "tgt.h5"]
    for run, path in zip(runs, paths, strict=True):
        capture_workload(run, path)
    return localize(
        *paths,
        reference_model=runs[0] if way == "replay" else None,
        target_model=runs[1] if way == "injection" else None,
    )


@pytest.mark.spec("RPL-50")
@pytest.mark.parametrize("way", [*WAYS, "archives"])
@pytest.mark.parametrize("name", PORTS)
def test_a_port_that_computes_the_same_otherwise_accuses_nobody(tmp_path: Path, name: str, way: str) -> None:
    reference, target, x = PORTS[name]
    with torch.no_grad():
        assert torch.allclose(reference()(x), target()(x), atol=1e-5)
    result = localized(tmp_path, reference(), target(), x, way)
    assert (result.suspects, result.open, result.exit_status) == ((), (), 0)
    assert compare(tmp_path / "ref.h5", tmp_path / "tgt.h5").exit_status == 0


@pytest.mark.spec("RPL-50", "LCL-62")
@pytest.mark.parametrize("way", WAYS)
def test_what_is_undone_is_told_with_what_undoes_it(tmp_path: Path, way: str) -> None:
    result = localized(tmp_path, net(), folded(), IMAGES, way)
    convolutions = [*(f"steps.{number}.conv" for number in range(3)), "depthwise", "pointwise"]
    assert [one.module for one in result.undone] == convolutions
    assert result.undone[0].reason == "differs and is undone by steps.0.bn"
    assert result.to_json()["undone"][3] == {
        "module": "depthwise",
        "reason": "differs and is undone by depthwise_bn",
    }


@pytest.mark.spec("RPL-50")
def test_the_run_that_is_kept_may_lie_on_another_file_system_than_temporary_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    rename = os.replace

    def rename_within(source: Any, wanted: Any) -> None:
        if Path(source).is_relative_to(kept) != Path(wanted).is_relative_to(kept):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        rename(source, wanted)

    monkeypatch.setattr(os, "replace", rename_within)
    runs = Workload(net(), (IMAGES,), seed=0), Workload(folded(), (IMAGES,), seed=0)
    paths = tmp_path / "ref.h5", tmp_path / "tgt.h5"
    for run, path in zip(runs, paths, strict=True):
        capture_workload(run, path)
    with ExitStack() as stack:
        reference, target = (stack.enter_context(open_archive(path)) for path in paths)
        gathered = gather_evidence(
            stack,
            reference,
            target,
            compare(reference, target),
            compared=(reference, target),
            reference_model=None,
            target_model=runs[1],
            mapping=None,
            compute_dtype=None,
            injected_path=kept / "injected.h5",
            reference_path=None,
        )
        assert gathered.injection is not None
    assert [path.name for path in kept.iterdir()] == ["injected.h5"]


@pytest.mark.spec("RPL-50")
@pytest.mark.parametrize("way", WAYS)
def test_a_folded_batch_norm_in_low_precision_accuses_nobody(tmp_path: Path, way: str) -> None:
    result = localized(tmp_path, net(), folded(), IMAGES, way, dtype=torch.float16)
    assert (result.suspects, result.exit_status) == ((), 0)


@pytest.mark.spec("RPL-50")
def test_a_norm_is_folded_too_whose_argument_the_target_has_by_another_name(tmp_path: Path) -> None:
    result = localized(tmp_path, net(), folded_by_another_name(), IMAGES, "replay", dtype=torch.float16)
    assert result.suspects == ()
    assert [one.module for one in result.undone if one.module.startswith("steps")] == [
        f"steps.{number}.conv" for number in range(3)
    ]


@pytest.mark.spec("RPL-204", "LCL-6")
@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
def test_gains_of_queries_and_keys_make_up_for_each_other_in_low_precision(
    tmp_path: Path, wrong: bool
) -> None:
    port = gains_moved(wrong=wrong)
    result = localized(tmp_path, tower(), port, STATES, "replay", dtype=torch.bfloat16)
    assert {suspect.module for suspect in result.suspects} == ({"layers.2.q"} if wrong else set())
    undone = {f"layers.{layer}.{part}" for layer in range(4) for part in "qk" if not wrong or layer != 2}
    assert {one.module for one in result.undone} == undone
    assert result.exit_status == wrong


@pytest.mark.spec("RPL-204")
def test_what_nothing_shows_to_matter_makes_up_for_nothing(tmp_path: Path) -> None:
    """Where all values are equal, neither queries nor keys change what is made of them."""
    reference, port = tower(), gains_moved()
    for model in (reference, port):
        with torch.no_grad():
            model.layers[2].v.weight.zero_()
    result = localized(tmp_path, reference, port, STATES, "replay", dtype=torch.bfloat16)
    assert {suspect.module for suspect in result.suspects} == {"layers.2.q", "layers.2.k"}


@dataclass(frozen=True)
class Run:
    """A replay of a module of two others, `first` and `second`, of which the target has other results."""

    errors: dict[str, float]
    wrong: frozenset[str]
    suspect: frozenset[str] = frozenset()

    @property
    def own_errors(self) -> list[OwnError]:
        return [
            OwnError(
                f"0/{site}/output",
                site,
                "result",
                True,
                error,
                None,
                "diverged"
                if site in self.wrong
                else "suspect"
                if site in self.suspect
                else "within-rounding",
                (),
                False,
            )
            for site, error in self.errors.items()
        ]


@pytest.mark.spec("RPL-204")
@pytest.mark.parametrize(
    ("shows", "error", "are_undone"),
    [
        pytest.param(("first", "second"), 0.5, True, id="each-shows"),
        pytest.param(("first",), 0.5, False, id="the-first-alone"),
        pytest.param(("second",), 0.5, False, id="the-second-alone"),
        pytest.param(("first", "second"), 0.001, False, id="hidden"),
    ],
)
def test_of_two_that_make_up_for_each_other_each_shows_it_whatever_their_order(
    tmp_path: Path, shows: tuple[str, ...], error: float, are_undone: bool
) -> None:
    """One that shows nothing where it is alone may hide the other, as a gate that is closed does.

    No run is made for an error that is smaller than that of what is made of it, of which none can be seen.
    """
    names = "first", "second"
    rng = np.random.default_rng(2)
    slots = [f"0/block.{name}/output" for name in names]
    texts = ["0/block/input.x", *(f"0/block.{name}/input.x" for name in names), *slots, "0/block/output"]
    values = {text: rng.normal(size=(8, 4)).astype(np.float32) for text in texts}
    reference, target = (new_archive(tmp_path / f"{side}.h5", values) for side in ("ref", "tgt"))

    runs: list[frozenset[str]] = []

    def run(released: frozenset[str]) -> Run:
        runs.append(released & set(slots))
        alone = [name for name, slot in zip(names, slots, strict=True) if slot in released]
        is_wrong = len(alone) == 1 and alone[0] in shows
        errors = {"block.first": 0.5, "block.second": error, "block": 0.5 if is_wrong else 0.002}
        return Run(errors, frozenset(errors) if is_wrong else frozenset({"block.first", "block.second"}))

    settled = settle(run(frozenset()), run, Dependencies(reference, target))
    assert set(settled.undone) == (set(slots) if are_undone else set())
    assert {own.status for own in settled.own_errors[:2]} == {"explained" if are_undone else "diverged"}
    is_hidden = error < 0.002
    assert ({slots[0]} in runs) is not is_hidden
    assert ({slots[1]} in runs) is ("first" in shows and not is_hidden)  # else what it shows counts nothing


@pytest.mark.spec("RPL-50", "RPL-240")
@pytest.mark.parametrize(
    ("before", "after", "is_undone"),
    [("suspect", "suspect", True), ("diverged", "suspect", True), ("suspect", "diverged", False)],
)
def test_what_is_as_wrong_as_before_says_nothing_of_what_is_undone(
    tmp_path: Path, before: str, after: str, is_undone: bool
) -> None:
    """The second module undoes the first one's result, which the third one is given, too."""
    given, made = (np.random.default_rng(seed).normal(size=(8, 4)).astype(np.float32) for seed in (3, 4))
    values = {
        "0/block.first/input.x": given,
        "0/block.first/output": made,
        "0/block.second/input.x": made,
        "0/block.second/output": made + 1,
        "0/block.third/input.x": made,
        "0/block.third/input.y": given,
        "0/block.third/output": made + 2,
    }
    without = {text: value for text, value in values.items() if value is not made or "first" in text}
    reference, target = new_archive(tmp_path / "ref.h5", values), new_archive(tmp_path / "tgt.h5", without)

    def run(released: frozenset[str]) -> Run:
        is_in_place = "0/block.first/output" in released
        errors = {"block.first": 0.5, "block.second": 0.002 if is_in_place else 0.5, "block.third": 0.2}
        status = after if is_in_place else before
        wrong = {"block.first", *(["block.third"] if status == "diverged" else [])}
        suspect = frozenset({"block.third"} if status == "suspect" else ())
        return Run(errors, frozenset(wrong if is_in_place else wrong | {"block.second"}), suspect)

    settled = settle(run(frozenset()), run, Dependencies(reference, target))
    assert ("0/block.first/output" in settled.undone) is is_undone


@pytest.mark.spec("RPL-50")
@pytest.mark.parametrize(
    ("replaced", "is_undone"),
    [
        pytest.param(("first",), True, id="in-place"),
        pytest.param(("first", "second"), False, id="replaced"),
        pytest.param((), False, id="unknown"),
    ],
)
def test_one_tensor_alone_is_undone_if_it_was_in_place_already(
    tmp_path: Path, replaced: tuple[str, ...], is_undone: bool
) -> None:
    given, made = np.random.default_rng(6).normal(size=(2, 8, 4)).astype(np.float32)
    values = {
        "0/block.first/input.x": given,
        "0/block.first/output": made,
        "0/block.second/input.x": made,
        "0/block.second/output": made + 1,
    }
    reference, target = (new_archive(tmp_path / f"{side}.h5", values) for side in ("ref", "tgt"))
    first = Run({"block.first": 0.5, "block.second": 1e-6}, frozenset({"block.first"}))
    inputs = [f"0/block.{name}/input.x" for name in replaced]
    settled = settle(first, lambda _: first, Dependencies(reference, target), replaced=inputs)
    assert ("0/block.first/output" in settled.undone) is is_undone


@pytest.mark.spec("RPL-240")
def test_what_seemed_to_undo_something_and_is_wrong_itself_hides_nothing_that_is_undone(
    tmp_path: Path,
) -> None:
    """The sum undoes what the scale makes; the product seems to undo the gate, which grew from the scale."""
    scale, gate, product, given = np.random.default_rng(5).normal(size=(4, 8, 4)).astype(np.float32)
    names = "scale", "gate", "product", "sum"
    values = {
        "0/block.scale/input.x": given,
        "0/block.scale/output": scale,
        "0/block.gate/input.x": given,
        "0/block.gate/output": gate,
        "0/block.product/input.x": gate,
        "0/block.product/output": product,
        "0/block.sum/input.a": scale,
        "0/block.sum/input.b": product,
        "0/block.sum/output": scale + product,
    }
    without = {text: value for text, value in values.items() if "input" not in text}
    reference, target = new_archive(tmp_path / "ref.h5", values), new_archive(tmp_path / "tgt.h5", without)

    def run(released: frozenset[str]) -> Run:
        left = {name for name in names if f"0/block.{name}/output" in released}
        wrong = {"block.scale"} | {
            f"block.{name}" for name, of in (("product", {"scale", "gate"}), ("sum", {"scale"})) if of - left
        }
        errors = {f"block.{name}": 0.5 if f"block.{name}" in wrong else 0.002 for name in names}
        return Run(errors, frozenset(wrong), frozenset() if "gate" in left else frozenset({"block.gate"}))

    settled = settle(run(frozenset()), run, Dependencies(reference, target))
    assert {text for text in settled.undone if "output" in text} == {"0/block.scale/output"}
    statuses = {own.module: own.status for own in settled.own_errors}
    assert (statuses["block.scale"], statuses["block.product"]) == ("explained", "diverged")


@pytest.mark.spec("RPL-50")
def test_nothing_is_judged_again_if_nothing_is_wrong(tmp_path: Path) -> None:
    values = {"0/block/input.x": np.ones((8, 4), np.float32), "0/block/output": np.ones((8, 4), np.float32)}
    reference, target = (new_archive(tmp_path / f"{side}.h5", values) for side in ("ref", "tgt"))
    first, runs = Run({"block": 0.002}, frozenset()), list[frozenset[str]]()

    def run(released: frozenset[str]) -> Run:
        runs.append(released)
        return first

    settled = settle(first, run, Dependencies(reference, target), replaced=["0/block/input.x"])
    assert (settled.judged, runs) == (first, [])


@pytest.mark.spec("RPL-100")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("modules", [[], ["steps.0.conv"]], ids=["right", "wrong"])
def test_a_fold_that_rounds_weights_which_were_not_rounded_is_no_mistake(
    tmp_path: Path, modules: list[str], dtype: torch.dtype
) -> None:
    reference = net().to(dtype).float()  # a checkpoint in low precision, as most are
    port = folded(copy.deepcopy(reference))
    with torch.no_grad():
        if modules:
            port.steps[0].conv.bias.zero_()
    result = localized(tmp_path, reference, port, IMAGES, "replay", dtype=dtype)
    assert [suspect.module for suspect in result.suspects] == modules
    assert result.exit_status == bool(modules)


@pytest.mark.spec("RPL-50", "CMP-55")
@pytest.mark.parametrize("way", [*WAYS, "archives"])
def test_a_mistake_in_one_folded_pair_accuses_that_convolution_alone(tmp_path: Path, way: str) -> None:
    port = folded()
    with torch.no_grad():
        port.steps[1].conv.bias -= net().steps[1].bn.bias  # forgotten
    result = localized(tmp_path, net(), port, IMAGES, way)
    assert [suspect.module for suspect in result.suspects] == ["steps.1.conv"]
    if way != "archives":  # the pair as one: what is wrong with it is seen behind the norm
        assert result.suspects[0].key == "0/steps.1.bn/output"
        assert result.suspects[0].cause == "axis-1-offset"
    first = compare(tmp_path / "ref.h5", tmp_path / "tgt.h5").divergence
    assert first is not None
    assert first.module == "steps.1.conv"


class FoldedBlock(nn.Module):
    """What a convolution with its norm makes, added to what it is given."""

    def __init__(self, act: Any = F.relu) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), act

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.act(self.norm(self.conv(x)))
        return out


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(FoldedBlock() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x.mean((2, 3)))
        return out


@pytest.mark.spec("RPL-50", "RPL-240")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("module", ["blocks.1", "blocks.1.conv"])
def test_a_mistake_in_one_of_several_folded_blocks_is_not_undone_by_what_is_made_of_all(
    tmp_path: Path, module: str, dtype: torch.dtype | None
) -> None:
    port: Any = seeded(Chain)
    for block in port.blocks:
        block.conv, block.norm = fuse_conv_bn_eval(block.conv, block.norm), nn.Identity()
    if module == "blocks.1":
        port.blocks[1].act = torch.tanh
    else:
        with torch.no_grad():
            port.blocks[1].conv.bias -= 3
    result = localized(tmp_path, seeded(Chain), port, IMAGES, "injection", dtype=dtype)
    assert [suspect.module for suspect in result.suspects] == [module]


@pytest.mark.spec("RPL-50")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "module"), [("norms-folded", "layers.2.v"), ("values-scaled", "layers.1.o")]
)
def test_a_mistake_beside_compensations_is_accused_alone(
    tmp_path: Path, name: str, module: str, way: str
) -> None:
    reference, target, x = PORTS[name]
    port = target()
    with torch.no_grad():
        port.get_submodule(module).bias.add_(torch.linspace(-1, 2, 16))
    result = localized(tmp_path, reference(), port, x, way)
    assert [suspect.module for suspect in result.suspects] == [module]


class Head(nn.Module):
    """A product without a bias, which the module around it adds."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder, self.bias = nn.Linear(16, 12, bias=False), nn.Parameter(torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.decoder(x) + self.bias
        return out


class Feed(nn.Module):
    """A product that adds the residual itself, or leaves that to who calls it."""

    def __init__(self, *, adds: bool) -> None:
        super().__init__()
        self.up, self.adds = nn.Linear(16, 16), adds

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        out: Tensor = self.up(x).tanh()
        return out + residual if self.adds else out


class Block(nn.Module):
    def __init__(self, *, adds: bool) -> None:
        super().__init__()
        self.norm, self.feed, self.last = nn.LayerNorm(16), Feed(adds=adds), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        out = self.feed(self.norm(x), x)
        last: Tensor = self.last(out if self.feed.adds else out + x)
        return last


class Table(nn.Module):
    """States that are scaled by one number for each sequence, and zeros for a token."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong = ""

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.ones(len(x), 1, 1)
        if self.wrong == "scale":
            scale[0] = 1.3
        kept = torch.ones(x.shape[1], 1)
        kept[2] = 0 if self.wrong != "zeros" else 1
        return x * scale * kept


class Reader(nn.Module):
    """Blocks and a head; without the head's own call where the model holds what is within it itself."""

    def __init__(self, *, is_port: bool = False) -> None:
        super().__init__()
        self.table, self.head, self.is_port = Table(), Head(), is_port
        self.blocks = nn.ModuleList(Block(adds=not is_port) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head.decoder(x) if self.is_port else self.head(x)
        return out


def reader(*, is_port: bool = False) -> Any:
    model = seeded(lambda: Reader(is_port=is_port))
    if is_port:
        model.head.decoder.bias = model.head.bias
    return model


@pytest.mark.spec("RPL-50", "RPL-11")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrong", ["", "scale", "zeros", "block"])
def test_what_the_module_around_adds_is_undone_beside_a_mistake(tmp_path: Path, way: str, wrong: str) -> None:
    """The head's result is not in the target, so that nothing stands for it; of one mistake few rows know."""
    port = reader(is_port=True)
    port.table.wrong = wrong
    if wrong == "block":
        port.blocks[1].norm.eps = 0.2
    with torch.no_grad():
        assert torch.allclose(reader()(STATES), port(STATES), atol=1e-5) is not bool(wrong)
    result = localized(tmp_path, reader(), port, STATES, way)
    accused = {"": [], "block": ["blocks.1.norm"]}.get(wrong, ["table"])
    assert [suspect.module for suspect in result.suspects] == accused
    if wrong:  # of the right one the comparison explains it
        assert "head.decoder" in [one.module for one in result.undone]


@pytest.mark.spec("RPL-50")
def test_a_leaf_that_was_left_out_of_what_others_undo_is_accused_alone(tmp_path: Path) -> None:
    reference, target, x = PORTS["norms-folded"]
    port = target()
    with torch.no_grad():
        port.layers[2].v.load_state_dict(reference().layers[2].v.state_dict())
    result = localized(tmp_path, reference(), port, x, "replay")
    assert [suspect.module for suspect in result.suspects] == ["layers.2.v"]
    assert result.suspects[0].cause == "left-out"


@pytest.mark.spec("RPL-50")
@pytest.mark.parametrize("way", WAYS)
def test_two_mistakes_in_a_row_undo_nothing(tmp_path: Path, way: str) -> None:
    port = copy.deepcopy(net())
    with torch.no_grad():
        port.steps[1].conv.weight.mul_(1.5)
        port.steps[1].bn.running_mean.zero_()
    result = localized(tmp_path, net(), port, IMAGES, way)
    assert {suspect.module for suspect in result.suspects} == {"steps.1.conv", "steps.1.bn"}
    assert result.undone == ()


class Scores(nn.Module):
    """A head, and scores that only the caller looks at."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.head, self.act = nn.Linear(16, 16), nn.Linear(16, 4), act

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.up(x)
        scores = self.act(x)
        return self.head(x), scores


@pytest.mark.spec("RPL-50", "LCL-261")
@pytest.mark.parametrize("way", [*WAYS, "archives"])
@pytest.mark.parametrize("tokens", [10, 1])
def test_what_the_model_returns_is_undone_by_nothing(tmp_path: Path, way: str, tokens: int) -> None:
    sides = Scores(nn.SiLU()), Scores(nn.GELU())
    result = localized(tmp_path, *sides, STATES[:1, :tokens, :8].repeat(1, 1, 2), way)
    assert [suspect.module for suspect in result.suspects] == ["act"]
    assert result.undone == ()


@pytest.mark.spec("RPL-50")
@pytest.mark.parametrize(("layers", "is_run_again"), [([1], False), ([1, 2], True)], ids=["one", "two"])
def test_a_target_is_not_run_again_if_its_free_run_shows_that_nothing_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: list[int], is_run_again: bool
) -> None:
    """Of two mistakes the second may undo the first, which the free run does not say."""
    runs: list[Path] = []

    def count(reference: Any, model: Workload, path: Path, **options: Any) -> Any:
        runs.append(path)
        return inject(reference, model, path, **options)

    monkeypatch.setattr("tensorcap.rerun.injected_run.inject", count)
    port = tower()
    for layer in layers:
        port.layers[layer].norm.eps = 0.1
    result = localized(tmp_path, tower(), port, STATES, "injection")
    assert [suspect.module for suspect in result.suspects] == ["layers.1.norm"]  # one in many layers is one
    assert (len(runs) > 1) is is_run_again


@pytest.mark.spec("LCL-61")
def test_one_mistake_in_many_layers_is_one_suspect(tmp_path: Path) -> None:
    port = tower()
    for number in (1, 2, 3):
        port.layers[number].norm.eps = 0.05
    result = localized(tmp_path, tower(), port, STATES, "replay")
    assert [suspect.name for suspect in result.suspects] == ["layers.{1-3}.norm"]
    assert result.suspects[0].modules == ("layers.1.norm", "layers.2.norm", "layers.3.norm")
    assert result.suspects[0].cause == "norm-eps"
    shown = result.to_json()["suspects"][0]
    assert shown["modules"] == ["layers.1.norm", "layers.2.norm", "layers.3.norm"]
    assert [other["module"] for other in shown["others"]] == ["layers.2.norm", "layers.3.norm"]


@pytest.mark.spec("LCL-61")
def test_unlike_mistakes_in_many_layers_stay_apart(tmp_path: Path) -> None:
    port = tower()
    port.layers[1].norm.eps = 0.05
    with torch.no_grad():
        port.layers[2].norm.bias.add_(torch.linspace(-1, 1, 16))
    result = localized(tmp_path, tower(), port, STATES, "replay")
    assert sorted(suspect.name for suspect in result.suspects) == ["layers.1.norm", "layers.2.norm"]


@pytest.mark.spec("LCL-63")
def test_all_lists_each_layer_and_suspects_can_be_sorted_by_their_own_error(tmp_path: Path) -> None:
    port = tower()
    with torch.no_grad():
        port.layers[0].q.bias.add_(0.001 * torch.linspace(-1, 1, 16))
        for number in (1, 2, 3):
            port.layers[number].k.weight.mul_(2)
            port.layers[number].k.bias.mul_(2)
    localized(tmp_path, tower(), port, STATES, "archives")
    (tmp_path / "model.py").write_text(
        "from tests.rerun.test_compensation import STATES, Workload, tower\n\n\n"
        "def reference():\n    return Workload(tower(), (STATES,), seed=0)\n"
    )
    paths = [str(tmp_path / name) for name in ("ref.h5", "tgt.h5")]
    arguments = ["localize", *paths, "--reference-model", f"{tmp_path / 'model.py'}:reference"]
    printed = CliRunner().invoke(tcap, [*arguments, "--all"]).output
    assert "layers.{1-3}.k" in printed
    assert "also layers.3.k: error: own 1" in printed
    orders = {
        order: [one["module"] for one in json.loads(text)["suspects"]]
        for order in ("evidence", "own")
        for text in [CliRunner().invoke(tcap, [*arguments, "--sort", order, "--json"]).stdout]
    }
    assert orders == {"evidence": ["layers.0.q", "layers.1.k"], "own": ["layers.1.k", "layers.0.q"]}


@pytest.mark.spec("LCL-64")
def test_an_argument_of_another_shape_is_left_in_place(tmp_path: Path) -> None:
    class Masked(nn.Module):
        """Adds a mask that has an axis for rows, or one for all of them."""

        def __init__(self, rows: int) -> None:
            super().__init__()
            self.rows, self.linear, self.mask = rows, nn.Linear(16, 16), Added()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.mask(self.linear(x), torch.zeros(self.rows, 10, 16))
            return out

    right = localized(tmp_path, seeded(lambda: Masked(2)), seeded(lambda: Masked(1)), STATES, "injection")
    assert (right.suspects, right.exit_status) == ((), 0)
    port = seeded(lambda: Masked(1))
    with torch.no_grad():
        port.linear.weight.mul_(1.1)
    wrong = localized(tmp_path, seeded(lambda: Masked(2)), port, STATES, "injection")
    assert [suspect.module for suspect in wrong.suspects] == ["linear"]


@pytest.mark.spec("LCL-64")
def test_an_argument_of_other_numbers_is_left_in_place(tmp_path: Path) -> None:
    class Counted(nn.Module):
        """Adds a row of numbers, whole ones or floats, that are none of the values around it."""

        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.dtype, self.linear, self.row = dtype, nn.Linear(16, 16), Added()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.row(self.linear(x), torch.arange(16).to(self.dtype))
            return out

    whole, port = seeded(lambda: Counted(torch.int64)), seeded(lambda: Counted(torch.float32))
    right = localized(tmp_path, whole, port, STATES, "injection")
    assert (right.suspects, right.notes, right.exit_status) == ((), (), 0)
    with torch.no_grad():
        port.linear.weight.mul_(1.1)
    wrong = localized(tmp_path, whole, port, STATES, "injection")
    assert [suspect.module for suspect in wrong.suspects] == ["linear"]


class Added(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + mask


@pytest.mark.spec("RPL-51")
def test_what_the_target_does_without_is_not_lacking_in_a_replay(tmp_path: Path) -> None:
    port = net()
    del port.steps[0].relu
    port.steps[0].relu = F.relu  # the same function, and no module
    result = localized(tmp_path, net(), port, IMAGES, "replay")
    assert (result.suspects, result.open, result.exit_status) == ((), (), 0)
