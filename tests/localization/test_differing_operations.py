"""Operations in which a suspect's code differs: what is named, with which lines, and when nothing is."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch as dispatching

from tensorcap import localize
from tensorcap.localization import DifferingOperations, Localization
from tensorcap.localization.operation_traces import OperationTrace
from tensorcap.session import capture_workload
from tensorcap.workload import Workload
from tensorcap_formats.archive import Archive

X = torch.linspace(-2, 3, 6 * 32).sin().reshape(1, 6, 32)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 32))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Any:
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.feed = Norm(), Feed()

    def forward(self, x: Tensor) -> Any:
        return x + self.feed(self.norm(x))


class Model(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class PortedFeed(nn.Module):
    """The same with its activation in its own code, written out."""

    def __init__(self, feed: Feed) -> None:
        super().__init__()
        self.grow, self.shrink = feed.up, feed.down

    def forward(self, x: Tensor) -> Any:
        return self.shrink(self.activate(self.grow(x)))

    def activate(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


class PortedBlock(nn.Module):
    def __init__(self, block: Any) -> None:
        super().__init__()
        self.scale, self.inner = nn.Module(), PortedFeed(block.feed)
        self.gain = block.norm.weight

    def norm(self, x: Tensor) -> Any:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * self.gain

    def forward(self, x: Tensor) -> Any:
        return self.inner(self.norm(x)) + x


class Port(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PortedBlock(model.get_submodule(f"blocks.{i}")) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def summed(self: Norm, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-5) * self.weight


def not_activated(self: PortedFeed, x: Tensor) -> Any:
    return self.shrink(self.grow(x))


def gelu(self: PortedFeed, x: Tensor) -> Tensor:
    return nn.functional.gelu(x)


def doubled(self: PortedFeed, x: Tensor) -> Tensor:
    x = self.shrink(self.activate(self.grow(x)))
    return x + x.tanh()


def flipped(self: Norm, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight.flip(0)


def subtracted(self: Block, x: Tensor) -> Any:
    return x - self.feed(self.norm(x))


def line_of(function: Callable[..., Tensor], text: str) -> tuple[str, int]:
    """The file's name, and the number of the line of a function that has a text."""
    lines, first = inspect.getsourcelines(function)
    return Path(__file__).name, first + next(at for at, line in enumerate(lines) if text in line)


def replace_method(model: nn.Module, path: str, function: Callable[..., Tensor]) -> None:
    module, _, name = path.rpartition(".")
    setattr(model.get_submodule(module), name, MethodType(function, model.get_submodule(module)))


def made() -> Model:
    torch.manual_seed(3)
    return Model().eval()


def compared(folder: Path, *models: nn.Module, dtype: torch.dtype = torch.float32) -> Localization:
    """Localize with a reference and a target, of which the latter computes in a dtype."""
    reference, target = models
    sides = [Workload(reference, (X,)), Workload(target.to(dtype), (X.to(dtype),))]
    for name, side in zip(("ref", "tgt"), sides, strict=True):
        with torch.no_grad():
            capture_workload(side, folder / f"{name}.h5")
    return localize(folder / "ref.h5", folder / "tgt.h5", reference_model=sides[0], target_model=sides[1])


def localized(folder: Path, target: nn.Module, dtype: torch.dtype = torch.float32) -> Localization:
    return compared(folder, made(), target, dtype=dtype)


def first(folder: Path, target: nn.Module, dtype: torch.dtype = torch.float32) -> DifferingOperations:
    suspect = localized(folder, target, dtype).suspects[0]
    assert suspect.code is not None
    return suspect.code


def named(code: DifferingOperations) -> tuple[list[str], list[str]]:
    """The operations of both sides, without arguments."""
    reference, target = (
        [place.op.partition("(")[0] for place in side] for side in (code.reference, code.target)
    )
    return reference, target


@pytest.mark.spec("LCL-600", "LCL-601")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_operation_is_named_with_both_lines(tmp_path: Path, dtype: torch.dtype) -> None:
    target = made()
    replace_method(target, "blocks.1.norm.forward", summed)
    code = first(tmp_path, target, dtype)
    (ours, *_), (theirs,) = code.reference, code.target
    assert (ours.op, theirs.op) == (
        "aten.mean.dim(dim=[-1], keepdim=True)",
        "aten.sum.dim_IntList(dim=[-1], keepdim=True)",
    )
    assert (Path(ours.file).name, ours.line) == line_of(Norm.forward, "mean(")
    assert (Path(theirs.file).name, theirs.line) == line_of(summed, "sum(")
    assert theirs.module == "blocks.1.norm"


@pytest.mark.spec("LCL-600")
def test_a_port_with_other_names_and_operations_differs_in_its_mistake_alone(tmp_path: Path) -> None:
    port = Port(made())
    replace_method(port, "layers.1.inner.activate", gelu)
    code = first(tmp_path, port)
    assert named(code) == (["aten.silu"], ["aten.gelu"])
    (place,) = code.target
    assert (place.module, Path(place.file).name, place.line) == (
        "layers.1.inner",
        *line_of(gelu, "gelu(x)"),
    )
    ours, theirs = (
        ":".join(map(str, one)) for one in (line_of(Feed.forward, "act"), line_of(gelu, "gelu(x)"))
    )
    assert (
        code.text
        == f"operations: the reference runs aten.silu at {ours}; the target runs aten.gelu at {theirs}"
    )


@pytest.mark.spec("LCL-602")
def test_what_one_side_alone_runs_is_said(tmp_path: Path) -> None:
    port = Port(made())
    replace_method(port, "layers.2.inner.forward", not_activated)
    code = first(tmp_path, port)
    assert named(code)[0] == ["aten.silu"]
    port = Port(made())
    replace_method(port, "layers.0.inner.forward", doubled)
    code = first(tmp_path, port)
    assert named(code) == ([], ["aten.tanh", "aten.add.Tensor"])
    assert [place.line for place in code.target] == [line_of(doubled, "tanh")[1]] * 2
    assert code.text.endswith(", whose results the reference has nowhere")


@pytest.mark.spec("LCL-602")
def test_the_same_operations_on_other_elements_are_named_by_the_first_that_differs(tmp_path: Path) -> None:
    target = made()
    replace_method(target, "blocks.1.norm.forward", flipped)
    code = first(tmp_path, target)
    assert code.is_alike
    assert [place.op.partition("(")[0] for place in code.reference] == ["aten.mul.Tensor"]
    assert code.reference[0].line == line_of(Norm.forward, "weight")[1]
    assert code.target[-1].line == line_of(flipped, "flip(0)")[1]


@pytest.mark.spec("LCL-600")
def test_of_other_layers_nothing_is_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[set[str]] = []

    class Trace(OperationTrace):
        def __init__(self, archive: Archive) -> None:
            super().__init__(archive)
            traced.append({record.key.site.partition(":")[0] for record in archive.records})

    monkeypatch.setattr("tensorcap.localization.differing_operations.OperationTrace", Trace)
    torch.manual_seed(3)
    models = Model(11).eval(), Model(11).eval()
    models[1].load_state_dict(models[0].state_dict())
    replace_method(models[1], "blocks.1.forward", subtracted)
    (suspect, *_) = compared(tmp_path, *models).suspects
    assert (suspect.module, suspect.code is not None) == ("blocks.1", True)
    assert [sites & {"blocks.1.feed.up", "blocks.10"} for sites in traced] == [{"blocks.1.feed.up"}] * 2


@pytest.mark.spec("LCL-600")
def test_each_of_two_mistakes_has_its_own_operations(tmp_path: Path) -> None:
    port = Port(made())
    replace_method(port, "layers.0.inner.activate", gelu)
    replace_method(port, "layers.2.inner.forward", doubled)
    found = {suspect.module: suspect.code for suspect in localized(tmp_path, port).suspects}
    codes = [code and named(code) for code in found.values()]
    assert codes[:2] == [(["aten.silu"], ["aten.gelu"]), ([], ["aten.tanh", "aten.add.Tensor"])]


class Flat(nn.Module):
    """Three projections in the model itself, with activations of their own between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.mid = nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64)
        self.gate, self.down = nn.SiLU(), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Any:
        return self.down(self.gate(self.mid(self.act(self.up(x)))))


def without_activations(self: Flat, x: Tensor) -> Any:
    return self.down(torch.sinc(self.mid(1.01 * torch.relu(self.up(x)))))


@pytest.mark.spec("LCL-600")
def test_an_earlier_mistake_in_the_same_code_hides_no_operation_of_a_later_one(tmp_path: Path) -> None:
    torch.manual_seed(3)
    reference, target = Flat().eval(), Flat().eval()
    target.load_state_dict(reference.state_dict())
    replace_method(target, "forward", without_activations)
    found = {one.module: one.code for one in compared(tmp_path, reference, target).suspects}
    told = {module: code and named(code) for module, code in found.items()}
    assert told == {
        "act": (["aten.gelu"], ["aten.relu", "aten.mul.Tensor"]),
        "gate": (["aten.silu"], ["aten.sinc"]),
    }


@pytest.mark.spec("LCL-603")
def test_nothing_is_said_without_both_models(tmp_path: Path) -> None:
    target = made()
    replace_method(target, "blocks.1.norm.forward", summed)
    localized(tmp_path, target)
    models: tuple[tuple[Workload | None, Workload | None], ...] = (
        (Workload(made(), (X,)), None),
        (None, Workload(target, (X,))),
    )
    for ours, theirs in models:
        found = localize(tmp_path / "ref.h5", tmp_path / "tgt.h5", reference_model=ours, target_model=theirs)
        assert [suspect.code for suspect in found.suspects] == [None]
        assert "code" not in found.to_json()["suspects"][0]
    assert localized(tmp_path, Port(made())).suspects == ()


@pytest.mark.spec("LCL-603")
def test_a_model_that_cannot_be_traced_keeps_its_suspects(tmp_path: Path) -> None:
    def refusing(self: Norm, x: Tensor) -> Tensor:
        if dispatching._get_current_dispatch_mode() is not None:
            raise NotImplementedError("no tracing here")
        return summed(self, x)

    target = made()
    replace_method(target, "blocks.1.norm.forward", refusing)
    found = localized(tmp_path, target)
    assert [(suspect.module, suspect.code) for suspect in found.suspects] == [("blocks.1.norm", None)]
    assert "Operations of blocks.1.norm were not traced: NotImplementedError: no tracing here." in found.notes


@pytest.mark.spec("LCL-603")
def test_a_suspect_that_cannot_be_traced_costs_no_other_one_its_operations(tmp_path: Path) -> None:
    """One lies within the other, so that each has a run of its own; the second run fails."""
    target = made()
    replace_method(target, "blocks.1.norm.forward", summed)

    traced: list[Tensor] = []

    def refusing(self: Block, x: Tensor) -> Any:
        if dispatching._get_current_dispatch_mode() is not None:
            traced.append(x)
        if len(traced) == 2:
            raise NotImplementedError("no tracing here")
        return x + self.feed(self.norm(x)) + x.tanh()

    replace_method(target, "blocks.1.forward", refusing)
    found = localized(tmp_path, target)
    codes = {suspect.module: suspect.code is not None for suspect in found.suspects}
    assert codes["blocks.1.norm"]
    assert not codes["blocks.1"]
    assert "Operations of blocks.1 were not traced: NotImplementedError: no tracing here." in found.notes


class Scores(nn.Module):
    """Attention whose mask is the least finite number."""

    scale = 0.25

    def forward(self, q: Tensor, k: Tensor) -> Any:
        mask = torch.full((6, 6), torch.finfo(q.dtype).min).triu(1)
        scores = q @ k.transpose(-1, -2) * self.scale
        return (scores + mask).softmax(-1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.scores = nn.Linear(32, 32), nn.Linear(32, 32), Scores()

    def forward(self, x: Tensor) -> Any:
        return self.scores(self.q(x), self.k(x))


@pytest.mark.spec("LCL-601")
def test_what_differs_before_a_finite_mask_is_not_hidden_by_it(tmp_path: Path) -> None:
    torch.manual_seed(1)
    right, wrong = Attention().eval(), Attention().eval()
    wrong.load_state_dict(right.state_dict())
    wrong.scores.scale = 0.5
    code = compared(tmp_path, right, wrong).suspects[0].code
    assert code is not None
    assert [place.op for place in code.reference] == ["aten.mul.Tensor(other=0.25)"]
    assert [place.op for place in code.target] == ["aten.mul.Tensor(other=0.5)"]


class Convolved(nn.Module):
    dilation = 1

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 3).reshape(1, 1, 3))

    def forward(self, x: Tensor) -> Any:
        x = x.transpose(0, 1) * 2
        return nn.functional.conv1d(x, self.weight, padding=self.dilation, dilation=self.dilation)


@pytest.mark.spec("LCL-602")
def test_operations_of_many_arguments_are_told_apart_by_all_of_them(tmp_path: Path) -> None:
    wrong = Convolved()
    wrong.dilation = 2
    code = compared(tmp_path, nn.Sequential(Convolved()), nn.Sequential(wrong)).suspects[0].code
    assert code is not None
    assert not code.is_alike
    assert ["dilation=[1]" in place.op for place in code.reference] == [True]
    assert ["dilation=[2]" in place.op for place in code.target] == [True]
