"""A module that the target skips is accused, also the first one; so is a result that is rounded alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tensorcap.alignment import align
from tensorcap.localization import localize
from tensorcap.session import capture_workload
from tensorcap.workload import Workload

WAYS = ("archives", "replay", "injection")


class Block(nn.Module):
    def __init__(self, *, skips_norm: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(48), nn.Linear(48, 96), nn.Linear(96, 48)
        nn.init.uniform_(self.norm.weight, 0.4, 2.0)
        self.skips_norm = skips_norm

    def forward(self, x: torch.Tensor) -> Any:
        normed = x if self.skips_norm else self.norm(x)
        return x + self.down(nn.functional.gelu(self.up(normed)))


def blocks(skipping: int | None) -> Workload:
    torch.manual_seed(3)
    model = nn.Sequential(*[Block(skips_norm=at == skipping) for at in range(3)], nn.Linear(48, 8)).eval()
    return Workload(model, {"input": 2 * torch.randn(2, 12, 48) + 0.3})


def located(way: str, folder: Path, reference: Workload, target: Workload) -> Any:
    capture_workload(reference, folder / "ref.h5")
    capture_workload(target, folder / "tgt.h5")
    models: dict[str, Any] = {
        "archives": {},
        "replay": {"reference_model": reference},
        "injection": {"target_model": target},
    }[way]
    return localize(folder / "ref.h5", folder / "tgt.h5", **models)


@pytest.mark.spec("LCL-80", "DIA-115")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("skipping", [0, 1])
def test_a_norm_that_is_skipped_is_accused_and_not_the_block_that_should_call_it(
    way: str, skipping: int, tmp_path: Path
) -> None:
    localization = located(way, tmp_path, blocks(None), blocks(skipping))
    suspect = localization.suspects[0]
    assert suspect.module == f"{skipping}.norm"
    assert suspect.cause == "skipped"
    assert suspect.class_name == "LayerNorm"
    assert len(localization.suspects) == 1


class Stream(nn.Module):
    """A stream in float32 around a layer in the model's own precision, as in Mamba."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.dtype = nn.Linear(48, 48), dtype

    def forward(self, x: torch.Tensor) -> Any:
        return (x.to(self.dtype) + self.layer(x.to(self.layer.weight.dtype))).to(self.dtype)


def streams(narrow: int | None, dtype: torch.dtype) -> Workload:
    torch.manual_seed(4)
    wide = [torch.bfloat16 if at == narrow else torch.float32 for at in range(3)]
    model = nn.Sequential(*map(Stream, wide)).eval().to(dtype)
    return Workload(
        model, {"input": torch.randn(2, 40, 48, generator=torch.Generator().manual_seed(0)).to(dtype)}
    )


@pytest.mark.spec("RPL-71")
def test_a_result_that_the_model_keeps_in_float32_is_not_rounded_by_a_right_port(tmp_path: Path) -> None:
    reference, target = streams(None, torch.float32), streams(1, torch.bfloat16)
    suspects = located("replay", tmp_path, reference, target).suspects
    assert [suspect.module for suspect in suspects] == ["1"]
    assert "keeps it in float32" in suspects[0].reason
    right = located("replay", tmp_path, reference, streams(None, torch.bfloat16))
    assert right.suspects == ()
    assert right.exit_status == 0


class Tower(nn.Module):
    """A stem, layers that are alike, and a head; the names of the parts are given."""

    def __init__(self, names: tuple[str, str, str]) -> None:
        super().__init__()
        stem, layers, head = names
        torch.manual_seed(5)
        self.names = names
        self.add_module(stem, nn.Linear(24, 48))
        self.add_module(layers, nn.ModuleList(Block(skips_norm=False) for _ in range(3)))
        self.add_module(head, nn.Linear(48, 8))
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.2)

    def forward(self, x: torch.Tensor) -> Any:
        stem, layers, head = (getattr(self, name) for name in self.names)
        x = stem(x)
        for layer in layers:
            x = layer(x)
        return head(x)


def towers() -> tuple[Workload, Workload]:
    inputs = torch.randn(2, 12, 24, generator=torch.Generator().manual_seed(1))
    reference: Any = Tower(("embed", "layers", "classifier"))
    target: Any = Tower(("patches", "blocks", "out"))
    with torch.no_grad():  # inputs in another order than the weight takes them
        target.patches.weight.copy_(reference.embed.weight.view(48, 6, 4).transpose(1, 2).reshape(48, 24))
    return Workload(reference.eval(), {"x": inputs}), Workload(target.eval(), {"x": inputs})


@pytest.mark.spec("ALN-140")
@pytest.mark.parametrize("way", WAYS)
def test_a_wrong_first_module_of_another_name_is_accused_since_parameters_pair_the_layers(
    way: str, tmp_path: Path
) -> None:
    reference, target = towers()
    localization = located(way, tmp_path, reference, target)
    assert localization.suspects[0].module == "embed"


@pytest.mark.spec("ALN-140")
def test_layers_whose_values_all_differ_are_paired_by_their_parameters(tmp_path: Path) -> None:
    reference, target = towers()
    capture_workload(reference, tmp_path / "ref.h5")
    capture_workload(target, tmp_path / "tgt.h5")
    aligned = align(tmp_path / "ref.h5", tmp_path / "tgt.h5")
    keys = {f"0/layers.{at}.{part}/output" for at in range(3) for part in ("norm", "up", "down")}
    pairs = {key: aligned.target.links[key].entry.evidence for key in keys}
    assert set(pairs.values()) == {"values"}
    for key in keys:
        (source,) = aligned.target.sources[key]
        assert source.key.text == key.replace("layers", "blocks")


class Attention(nn.Module):
    """Three linear layers in a module of their own and one beside it, or all in one; that may lack a bias."""

    def __init__(self, names: tuple[str, ...], *, is_nested: bool, bias: bool) -> None:
        super().__init__()
        self.names, self.is_nested = names, is_nested
        torch.manual_seed(6)
        inner = nn.Module() if is_nested else self
        for name in names[:-1]:
            inner.add_module(name, nn.Linear(24, 24))
        self.add_module(names[-1], nn.Linear(24, 24, bias=bias))
        if is_nested:
            self.core = Core(inner, names[:-1])

    def forward(self, x: torch.Tensor) -> Any:
        mixed = self.core(x) if self.is_nested else mix(self, self.names[:-1], x)
        return getattr(self, self.names[-1])(mixed)


class Core(nn.Module):
    """What comes before the last linear layer."""

    def __init__(self, layers: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names
        for name in names:
            self.add_module(name, getattr(layers, name))

    def forward(self, x: torch.Tensor) -> Any:
        return mix(self, self.names, x)


def mix(layers: nn.Module, names: tuple[str, ...], x: torch.Tensor) -> Any:
    a, b, c = (getattr(layers, name)(x) for name in names)
    return torch.softmax(a @ b.mT, -1) @ c


@pytest.mark.spec("ALN-140")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_projection_that_lacks_its_bias_is_paired_by_its_weight_and_not_the_module_before_it(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    x = torch.randn(1, 6, 24, generator=torch.Generator().manual_seed(2))
    reference: Any = Attention(("q", "k", "v", "dense"), is_nested=True, bias=True)
    target: Any = Attention(("one", "two", "three", "last"), is_nested=False, bias=False).to(dtype)
    capture_workload(Workload(reference.eval(), {"x": x}), tmp_path / "ref.h5")
    capture_workload(Workload(target.eval(), {"x": x.to(dtype)}), tmp_path / "tgt.h5")
    aligned = align(tmp_path / "ref.h5", tmp_path / "tgt.h5")
    (source,) = aligned.target.sources["0/dense/output"]
    assert source.key.text == "0/last/output"
    (source,) = aligned.target.sources["0/core/output"]
    assert source.key.text == "0/last/input.input"


class Fused(nn.Module):
    """The three layers of a `Core` as one, under other names, and a layer behind it."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        parts = [getattr(attention.core, name) for name in "qkv"]
        self.mixer: Any = nn.Module()
        self.mixer.three, self.mixer.last = nn.Linear(24, 72), attention.dense
        with torch.no_grad():
            self.mixer.three.weight.copy_(torch.cat([part.weight for part in parts]))
            self.mixer.three.bias.copy_(torch.cat([part.bias for part in parts]))
        self.mixer.forward = self.mix

    def mix(self, x: torch.Tensor) -> Any:
        a, b, c = self.mixer.three(x).chunk(3, -1)
        return self.mixer.last(torch.softmax(a @ b.mT, -1) @ c)

    def forward(self, x: torch.Tensor) -> Any:
        return self.mixer(x.flip(-1))


@pytest.mark.spec("ALN-140")
def test_a_module_with_a_fused_projection_is_paired_by_the_parameters_in_it(tmp_path: Path) -> None:
    x = torch.randn(1, 6, 24, generator=torch.Generator().manual_seed(2))
    attention = Attention(("q", "k", "v", "dense"), is_nested=True, bias=True)
    reference = nn.Sequential(attention)
    capture_workload(Workload(reference.eval(), {"input": x}), tmp_path / "ref.h5")
    capture_workload(Workload(Fused(attention).eval(), {"x": x}), tmp_path / "tgt.h5")
    aligned = align(tmp_path / "ref.h5", tmp_path / "tgt.h5")
    assert {key: aligned.target.links[key].entry.evidence for key in ("0/0.dense/output", "0/0/output")} == {
        "0/0.dense/output": "values",
        "0/0/output": "values",
    }


@pytest.mark.spec("ALN-240")
def test_layers_of_a_port_in_bfloat16_are_paired_by_the_extremes_of_their_parameters(tmp_path: Path) -> None:
    reference, target = towers()
    target.model.to(torch.bfloat16)
    capture_workload(reference, tmp_path / "ref.h5")
    given: Any = target.inputs
    inputs = {name: x.bfloat16() for name, x in given.items()}
    capture_workload(Workload(target.model, inputs), tmp_path / "tgt.h5")
    aligned = align(tmp_path / "ref.h5", tmp_path / "tgt.h5")
    for key in (f"0/layers.{at}.{part}/output" for at in range(3) for part in ("norm", "up", "down")):
        (source,) = aligned.target.sources[key]
        assert source.key.text == key.replace("layers", "blocks")


class Mixer(nn.Module):
    """Two linear layers, or two matrices of its own; the port may add what it is given itself."""

    def __init__(self, weights: Sequence[torch.Tensor], *, is_own: bool, adds: bool, sign: float) -> None:
        super().__init__()
        self.is_own, self.adds, self.sign = is_own, adds, sign
        if is_own:
            self.one, self.two = (nn.Parameter(weight.clone()) for weight in weights)
        else:
            self.first, self.second = (nn.Linear(24, 24, bias=False) for _ in weights)
            for layer, weight in zip((self.first, self.second), weights, strict=True):
                layer.weight.data = weight.clone()

    def forward(self, x: torch.Tensor) -> Any:
        one = x @ self.one.T if self.is_own else self.first(x)
        mixed = torch.tanh(self.sign * one) * one.roll(1, 1)
        result = mixed @ self.two.T if self.is_own else self.second(mixed)
        return x + result if self.adds else result


class Layer(nn.Module):
    def __init__(self, weights: Sequence[torch.Tensor], name: str, **how: Any) -> None:
        super().__init__()
        self.name, self.adds = name, how["adds"]
        self.add_module(name, Mixer(weights[:2], **how))
        self.add_module(f"{name}_norm", nn.LayerNorm(24))
        getattr(self, f"{name}_norm").weight.data = weights[2].clone()

    def forward(self, x: torch.Tensor) -> Any:
        mixed = getattr(self, self.name)(x)
        return getattr(self, f"{self.name}_norm")(mixed if self.adds else x + mixed)


def mixers(name: str, **how: Any) -> Workload:
    drawn = torch.Generator().manual_seed(7)
    shapes = (24, 24), (24, 24), (24,)
    layers = [Layer([torch.randn(s, generator=drawn) for s in shapes], name, **how) for _ in range(2)]
    return Workload(nn.Sequential(*layers).eval(), {"input": torch.randn(2, 9, 24, generator=drawn)})


@pytest.mark.spec("ALN-140")
@pytest.mark.parametrize(("adds", "sign"), [(False, -0.5), (True, 1.0), (True, -0.5)])
def test_a_module_of_matrices_of_its_own_is_paired_by_them_unless_it_does_more(
    adds: bool, sign: float, tmp_path: Path
) -> None:
    capture_workload(mixers("mixer", is_own=False, adds=False, sign=1.0), tmp_path / "ref.h5")
    capture_workload(mixers("part", is_own=True, adds=adds, sign=sign), tmp_path / "tgt.h5")
    aligned = align(tmp_path / "ref.h5", tmp_path / "tgt.h5")
    partners = [
        source.key.text
        for at in range(2)
        for source in aligned.target.sources.get(f"0/{at}.mixer/output", ())
    ]
    is_more = adds and sign == 1  # a sum with what it is given, as its values show where they are right
    assert partners == ([] if is_more else ["0/0.part/output", "0/1.part/output"])
