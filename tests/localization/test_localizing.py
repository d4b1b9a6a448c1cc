"""Whom replay, injection and archives accuse, and what the errors around them look like."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from tensorcap.alignment import Alignment, Entry
from tensorcap.comparison import compare
from tensorcap.diagnosis import Diagnosis, Explanation
from tensorcap.localization import (
    Curve,
    CurvePoint,
    Evidence,
    EvidenceSource,
    Suspect,
    change_points,
    localize,
    rank_suspects,
)
from tensorcap.localization.grouping import group_suspects
from tensorcap.reports.suspects import context_lines, suspect_lines
from tensorcap.session import capture_workload
from tensorcap.workload import Workload
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError
from tensorcap_formats.open import open_archive

X = torch.linspace(-1, 1, 32 * 8).reshape(32, 8)


class Block(nn.Module):
    """Half of its input and an MLP: `scale` is its own code, between its children."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.fc = nn.Linear(8, 8)
        self.act = nn.GELU()
        self.out = nn.Linear(8, 8)
        self.scale, self.gain = 1.0, gain

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.gain * x + self.out(self.act(self.fc(self.norm(x))) * self.scale)
        return made


def chain(gain: float = 1.0, count: int = 6) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(gain) for _ in range(count))).eval()


def captured(folder: Path, target: Any, reference: Any = None, x: Tensor = X) -> tuple[Path, Path]:
    capture_workload(Workload(reference or chain(), (X,)), folder / "ref.h5")
    capture_workload(Workload(target, (x,)), folder / "tgt.h5")
    return folder / "ref.h5", folder / "tgt.h5"


def points(text: str) -> list[CurvePoint]:
    """A curve of errors that are written one by one; 0 is green."""
    values = [float(value) for value in text.split()]
    return [CurvePoint(f"0/m{at}/output", f"m{at}", value, value > 0) for at, value in enumerate(values)]


@pytest.mark.spec("LCL-14")
@pytest.mark.parametrize(
    ("curve", "values", "told"),
    [
        pytest.param("total", "0 0 .1 .2 .2 .1", [("step", 2, 4)], id="what-follows-is-wrong"),
        pytest.param("total", "0 .1 0 0 0 0", [("spike", 1, 1)], id="nothing-follows"),
        pytest.param(
            "total", "0 .1 0 0 .1 .2 .1 .3 .1 .1", [("step", 1, 7)], id="beside-it-others-are-right"
        ),
        pytest.param("total", "0 .01 .02 .04 .08 .16 .9 .1", [("step", 1, 7)], id="largest-in-a-later-block"),
        pytest.param(
            "total",
            "0 .01 .01 .01 .5 .5 .4",
            [("step", 1, 6), ("step", 4, 3)],
            id="a-second-on-top-of-the-first",
        ),
        pytest.param(
            "total", ".5 0 0 0 0 0 0 0 0 .1 .1 .1", [("step", 9, 3), ("spike", 0, 1)], id="steps-first"
        ),
        pytest.param("total", "0 .1 .1 .1 0 .1 .1", [("step", 1, 5)], id="after-a-step-no-new-one"),
        pytest.param("own", "0 .1 0 .1 0", [("spike", 1, 1), ("spike", 3, 1)], id="two-modules"),
        pytest.param("own", ".1 .1 0 .1 .1 .1", [("step", 3, 3), ("spike", 0, 2)], id="three-in-a-row"),
        pytest.param("own", "0 0 .1 .1", [("step", 2, 2)], id="two-at-the-end"),
        pytest.param("own", "0 0 0 .1", [("spike", 3, 1)], id="the-last-alone"),
        pytest.param(
            "own", "2 0 1.5 20 40 9", [("step", 2, 4), ("step", 3, 3), ("spike", 0, 1)], id="documented"
        ),
        pytest.param("own", "0 inf inf inf 0", [("step", 1, 3)], id="infinite"),
        pytest.param("own", "0 0 0", [], id="nothing-wrong"),
    ],
)
def test_a_curve_changes_where_errors_begin(curve: Curve, values: str, told: list[Any]) -> None:
    found = change_points(points(values), curve)
    assert [(one.kind, int(one.module[1:]), one.length) for one in found] == told


def amplifying() -> Any:
    """Twenty layers: what is in line with the input shrinks by a fifth, all else grows by a tenth."""
    signal = torch.full((8, 8), 1 / 8)
    layers = [nn.Linear(8, 8) for _ in range(20)]
    for layer in layers:
        layer.weight.data = 1.1 * torch.eye(8) - 0.3 * signal
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers).eval()


@pytest.mark.spec("LCL-1", "LCL-4", "LCL-10", "LCL-14")
@pytest.mark.parametrize("by", ["archives", "replay", "injection"])
def test_the_first_wrong_layer_is_guilty_and_not_the_worst(tmp_path: Path, by: str) -> None:
    target = amplifying()
    target[2].bias.data[3] = 2e-3
    given = torch.ones(4, 8) * torch.linspace(1, 2, 4)[:, None]
    capture_workload(Workload(amplifying(), (given,)), tmp_path / "ref.h5")
    capture_workload(Workload(target, (given,)), tmp_path / "tgt.h5")
    with torch.no_grad():
        right, wrong, errors = given, given, []
        for one, other in zip(amplifying(), target, strict=True):
            right, wrong = one(right), other(wrong)
            errors.append(float((wrong - right).norm() / right.norm()))
    assert errors[1] == 0
    assert errors[19] == max(errors) > 100 * errors[2] > 0.01
    found = localize(
        tmp_path / "ref.h5",
        tmp_path / "tgt.h5",
        reference_model=Workload(amplifying(), (given,)) if by == "replay" else None,
        target_model=Workload(target, (given,)) if by == "injection" else None,
    )
    assert (found.suspects[0].module, found.suspects[0].by) == ("2", (by,))
    total = [change for change in found.changes if change.curve == "total"]
    first = total[0]
    assert (first.kind, first.key, first.before, first.length) == ("step", "0/2/output", 0.0, 19)
    own = [(one.kind, one.module, one.length) for one in found.changes if one.curve == "own"]
    assert own == ([] if by == "archives" else [("spike", "2", own[0][2])])
    assert any("a step at 0/2/output" in text for text in context_lines(found))


@pytest.mark.spec("LCL-4")
@pytest.mark.parametrize(("factor", "status"), [(1.007, "suspect"), (1.1, "diverged")])
def test_archives_alone_name_a_suspect_if_it_is_clear(tmp_path: Path, factor: float, status: str) -> None:
    class ScaledLinear(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = super().forward(x)
            return made * factor if self.weight.dtype == torch.bfloat16 and self.in_features == 65 else made

    def make(dtype: Any) -> Workload:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 65), ScaledLinear(65, 64), nn.Linear(64, 64))
        x = torch.randn(128, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
        return Workload(model.to(dtype), (x.to(dtype),))

    torch.manual_seed(0)
    capture_workload(make(torch.float32), tmp_path / "ref.h5")
    capture_workload(make(torch.bfloat16), tmp_path / "tgt.h5")
    (pair,) = [p for p in compare(tmp_path / "ref.h5", tmp_path / "tgt.h5").pairs if p.key == "0/1/output"]
    assert pair.status == status
    found = localize(tmp_path / "ref.h5", tmp_path / "tgt.h5")
    assert [one.module for one in found.suspects] == ([] if status == "suspect" else ["1"])
    assert any("0/1/output stands out a little" in note for note in found.notes) == (status == "suspect")
    assert found.open == (("0/1/output",) if status == "suspect" else ())
    assert found.exit_status == 1


@pytest.mark.spec("LCL-10", "LCL-13")
def test_an_injected_run_names_suspects_without_the_references_model(tmp_path: Path) -> None:
    target = chain()
    with torch.no_grad():
        target[2].out.weight[0].mul_(-1)
    target[4].scale = 1.5
    reference, archive = captured(tmp_path, target)
    weights = {name: value.clone() for name, value in target.state_dict().items()}
    with torch.no_grad():
        before = target(X)
    found = localize(reference, archive, target_model=Workload(target, (X,)))
    assert found.by == "injection"
    assert [(one.module, one.key) for one in found.suspects] == [
        ("2.out", "0/2.out/output"),
        ("4", "0/4.out/input.input"),
    ]
    assert all(one.is_own for one in found.suspects)
    assert found.explained == (("2", "2.out"), ("@root", "2.out"))
    with torch.no_grad():
        assert torch.equal(target(X), before)
    assert all(torch.equal(target.state_dict()[name], value) for name, value in weights.items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in target.modules())
    alone = localize(reference, target_model=Workload(target, (X,)))
    assert [one.module for one in alone.suspects] == ["2.out", "4"]
    with pytest.raises(UsageError, match="no target"):
        localize(reference, None)


@pytest.mark.spec("LCL-12")
def test_a_second_witness_confirms_the_first(tmp_path: Path) -> None:
    target = chain()
    target[3].act = nn.ReLU()
    reference, archive = captured(tmp_path, target)
    found = localize(
        reference, archive, reference_model=Workload(chain(), (X,)), target_model=Workload(target, (X,))
    )
    assert [(one.module, one.by) for one in found.suspects] == [("3.act", ("replay", "injection"))]
    assert found.suspects[0].cause == "activation"


def accusing(by: Any, archive: Archive, *modules: str) -> EvidenceSource:
    found = (Evidence(one, (f"0/{one}/output",), "diverged", (), 0.1, None, "it is wrong") for one in modules)
    return EvidenceSource(by, archive, archive, None, tuple(found), (), (), ())


@pytest.mark.spec("LCL-12")
def test_what_a_second_witness_says_less_exactly_is_no_second_suspect(tmp_path: Path) -> None:
    reference, target = captured(tmp_path, chain())
    with open_archive(reference) as ours, open_archive(target) as theirs:
        free = compare(ours, theirs)
        first, second = (
            accusing("replay", ours, "3.act", "1"),
            accusing("injection", ours, "3", "1.fc", "5.out"),
        )
        found = rank_suspects(ours, theirs, free, [first, second])
    assert [(one.module, one.by) for one in found.suspects] == [
        ("3.act", ("replay",)),
        ("1", ("replay",)),
        ("5.out", ("injection",)),
    ]


class Spiked(nn.Module):
    """The identity, but for one element of one row."""

    def forward(self, x: Tensor) -> Tensor:
        made = nn.functional.gelu(x)
        made[7, 3] += 5
        return made


@pytest.mark.spec("LCL-10")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_wrong_element_makes_a_suspect_if_nothing_else_does(tmp_path: Path, dtype: Any) -> None:
    def model(act: nn.Module) -> Any:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 64), act, nn.Linear(64, 64)).eval()

    capture_workload(Workload(model(nn.GELU()), (X,)), tmp_path / "ref.h5")
    target = model(Spiked()).to(dtype)
    found = localize(tmp_path / "ref.h5", target_model=Workload(target, (X.to(dtype),)))
    assert [one.module for one in found.suspects] == ["1"]


@pytest.mark.spec("LCL-10")
def test_an_outlier_from_a_rounded_argument_makes_no_suspect(tmp_path: Path) -> None:
    x = torch.linspace(1, 2, 64 * 8).reshape(64, 8)
    x[5, 0], x[5, 1] = 1.0037, 1.0011  # which are one number in bfloat16

    def model() -> Any:
        layer = nn.Linear(8, 4, bias=False)
        layer.weight.data = torch.tensor([1.0, -1.0] + [0.0] * 6).expand(4, 8).clone()
        return nn.Sequential(nn.Identity(), layer, nn.Tanh()).eval()

    x[:, 1] -= torch.where(torch.arange(64) == 5, 0.0, 3.0)
    target = model()
    target[2] = nn.GELU()
    capture_workload(Workload(model(), (x,)), tmp_path / "ref.h5")
    target, given = target.bfloat16(), x.bfloat16()
    found = localize(tmp_path / "ref.h5", target_model=Workload(target, (given,)))
    assert [one.module for one in found.suspects] == ["2"]


class NoisyNorm(nn.LayerNorm):
    """A norm with an error of its own, as of a few roundings more."""

    size = 0.0

    def forward(self, x: Tensor) -> Tensor:
        signs = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).sign()
        return (super().forward(x).float() * (1 + self.size * signs)).to(x.dtype)


@pytest.mark.spec("LCL-300")
@pytest.mark.parametrize(
    ("dtype", "size", "suspects"),
    [
        pytest.param(torch.bfloat16, 0.003, [], id="a-little-in-bfloat16"),
        pytest.param(torch.bfloat16, 0.009, ["1"], id="more-in-bfloat16"),
        pytest.param(torch.float32, 5e-5, ["1"], id="a-little-in-float32"),
    ],
)
def test_a_little_above_a_limit_of_low_precision_is_a_note(
    tmp_path: Path, dtype: Any, size: float, suspects: list[str]
) -> None:
    def model(norm: type[nn.LayerNorm]) -> Any:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 256), norm(256), nn.Linear(256, 64)).eval()

    capture_workload(Workload(model(nn.LayerNorm), (X,)), tmp_path / "ref.h5")
    target = model(NoisyNorm).to(dtype)
    target[1].size = size
    found = localize(tmp_path / "ref.h5", target_model=Workload(target, (X.to(dtype),)))
    assert ([one.module for one in found.suspects], found.exit_status) == (suspects, 1)
    said = [note for note in found.notes if "stands out a little, as now and then in a correct port" in note]
    assert len(said) == (not suspects)


class NoisyBlock(nn.Module):
    """A residual, of which the norm within makes a little error of its own."""

    def __init__(self, gain: float, size: float) -> None:
        super().__init__()
        self.norm, self.fc, self.gain = NoisyNorm(256), nn.Linear(256, 256), gain
        self.norm.size = size

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.gain * x + self.fc(self.norm(x))
        return made


@pytest.mark.spec("LCL-300")
@pytest.mark.parametrize(("gain", "suspects"), [(1.0, []), (0.5, ["1"])], ids=["right", "wrong"])
def test_what_stands_out_a_little_hides_no_mistake_of_the_code_around_it(
    tmp_path: Path, gain: float, suspects: list[str]
) -> None:
    def model(gain: float, size: float) -> Any:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 256), NoisyBlock(gain, size), nn.Linear(256, 64)).eval()

    capture_workload(Workload(model(1.0, 0.0), (X,)), tmp_path / "ref.h5")
    target = Workload(model(gain, 0.003).to(torch.bfloat16), (X.bfloat16(),))
    found = localize(tmp_path / "ref.h5", target_model=target)
    assert [one.module for one in found.suspects] == suspects
    assert found.notes[0].startswith("0/1.norm/output stands out a little")


class WithFunction(nn.Module):
    """The same as a block under names of its own, with the quick GELU as a function."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.scale, self.expand, self.shrink = block.norm, block.fc, block.out

    def forward(self, x: Tensor) -> Tensor:
        wide = self.expand(self.scale(x))
        made: Tensor = x + self.shrink(wide * torch.sigmoid(1.702 * wide))
        return made


@pytest.mark.spec("DIA-420")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_function_of_the_port_was_given_is_known_in_a_replay(tmp_path: Path, dtype: Any) -> None:
    x, own = torch.randn(32, 8, generator=torch.Generator().manual_seed(1)) * 2, chain(count=3)
    port = nn.Sequential(*(WithFunction(block) for block in chain(count=3))).eval().to(dtype)
    capture_workload(Workload(own, (x,)), tmp_path / "ref.h5")
    capture_workload(Workload(port, (x.to(dtype),)), tmp_path / "tgt.h5")
    found = localize(tmp_path / "ref.h5", tmp_path / "tgt.h5", reference_model=Workload(own, (x,)))
    suspect = found.suspects[0]
    assert suspect.name == "{0-2}.act"
    assert suspect.diagnosis is not None
    assert suspect.diagnosis.text.startswith("the target is quick gelu of its input.input")


class Renamed(nn.Module):
    """A block's argument under another name."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.norm, self.fc, self.act, self.out = block.norm, block.fc, block.act, block.out

    def forward(self, hidden: Tensor) -> Tensor:
        made: Tensor = hidden + self.out(self.act(self.fc(self.norm(hidden))))
        return made


@pytest.mark.spec("LCL-11", "POL-81")
def test_what_was_left_as_it_was_is_looked_at_and_accuses_nobody_who_inherits(tmp_path: Path) -> None:
    target = chain()
    target[4] = Renamed(target[4])  # by equal keys input.x is not its input.hidden: that is not replaced
    with torch.no_grad():
        target[3].out.weight.mul_(1.05)
        target[3].out.bias.mul_(1.05)
    reference, archive = captured(tmp_path, target)
    found = localize(reference, archive, target_model=Workload(target, (X,)), mapping="none")
    assert [one.module for one in found.suspects] == ["3.out"]
    assert any("0/4/input.hidden" in note and "may be inherited" in note for note in found.notes)
    paired = localize(reference, archive, target_model=Workload(target, (X,)))  # by values: it is replaced
    assert [one.module for one in paired.suspects] == ["3.out"]
    assert not any("may be inherited" in note for note in paired.notes)
    with torch.no_grad():
        target[4].norm.weight.mul_(1.5)
    _, archive = captured(tmp_path, target)
    found = localize(reference, archive, target_model=Workload(target, (X,)))
    assert [one.module for one in found.suspects] == ["3.out", "4.norm"]


@pytest.mark.spec("LCL-11")
def test_a_renamed_argument_is_compared_with_its_counterpart(tmp_path: Path) -> None:
    class Other(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            made: Tensor = torch.relu(hidden)
            return made

    target = chain()
    target[2].act = Other()
    reference, archive = captured(tmp_path, target)
    found = localize(reference, archive, target_model=Workload(target, (X,)))
    assert [one.module for one in found.suspects] == ["2.act"]


@pytest.mark.spec("POL-81")
def test_what_a_map_lost_makes_no_second_suspect(tmp_path: Path) -> None:
    target = chain()
    with torch.no_grad():
        target[3].out.weight.mul_(1.05)
        target[3].out.bias.mul_(1.05)
    renamed = nn.ModuleDict({"blocks": target})

    class Port(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = renamed["blocks"]

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.blocks(x)
            return made

    capture_workload(Workload(chain(), (X,)), tmp_path / "ref.h5")
    capture_workload(Workload(Port().eval(), (X,)), tmp_path / "tgt.h5")
    slots = [
        *(
            f"{at}.{name}/{slot}"
            for at in range(6)
            for name in ("norm", "fc", "act", "out")
            for slot in ("input.input", "output")
        ),
        *(f"{at}/output" for at in range(6)),
        *(f"{at}/input.x" for at in range(6) if at != 4),  # which is what was lost
    ]
    mapping = Alignment(tuple(Entry((slot,), (f"blocks.{slot}",)) for slot in slots))
    found = localize(
        tmp_path / "ref.h5", tmp_path / "tgt.h5", target_model=Workload(Port().eval(), (X,)), mapping=mapping
    )
    assert [one.module for one in found.suspects] == ["3.out"]


class Exploding(nn.Module):
    """Overflows in its own code, between its children, or in a leaf."""

    def __init__(self, *, between: bool) -> None:
        super().__init__()
        self.fc, self.last, self.between = nn.Linear(8, 8), nn.Linear(8, 8), between

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.fc(x)
        if self.between:
            made = made * 1e30 * 1e30
        last: Tensor = self.last(made)
        return last


@pytest.mark.spec("LCL-5", "LCL-15")
def test_where_values_stop_being_finite_is_reported_with_what_went_in(tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference = Exploding(between=False)
    target = Exploding(between=True)
    target.load_state_dict(reference.state_dict())
    ref, tgt = captured(tmp_path, target, reference)
    origin = localize(ref, tgt).nonfinite
    assert origin is not None
    assert (origin.key, origin.module) == ("0/last/input.input", "@root")
    assert origin.tensor.inf == origin.tensor.more == 32 * 8
    assert [(one.key, one.is_finite) for one in origin.operands] == [
        ("0/@root/input.x", True),
        ("0/fc/output", True),
    ]
    with torch.no_grad():
        largest = float(target.fc(X).abs().max())
    assert origin.operands[1].largest == pytest.approx(largest)
    with torch.no_grad():
        target.between = False
        target.fc.weight[2, 3] = math.nan
    ref, tgt = captured(tmp_path, target, reference)
    found = localize(ref, tgt, reference_model=Workload(reference, (X,)))
    assert found.nonfinite is not None
    assert (found.nonfinite.key, found.nonfinite.tensor.nan) == ("0/fc/output", 32)
    assert [one.key for one in found.nonfinite.operands] == ["0/fc/input.input"]
    text = next(text for text in context_lines(found) if "finite" in text)
    assert text == (
        "Values stop being finite at 0/fc/output, made by fc: of 256 elements 32 are NaN and 0 infinite; "
        "its 1 operand finite, up to 1: 0/fc/input.input."
    )


class Again(nn.Module):
    """Calls one module twice, the second time with what makes it overflow."""

    def __init__(self, block: nn.Module, factor: float) -> None:
        super().__init__()
        self.block, self.factor = block, factor

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.block(self.block(x) * self.factor)
        return made


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.fc(x) ** 8
        return made


class Dividing(nn.Module):
    """Divides by zero, under a name for its argument that the reference does not have."""

    def forward(self, given: Tensor) -> Tensor:
        made: Tensor = nn.functional.gelu(given) / (given - given.max())
        return made


@pytest.mark.spec("LCL-15", "ALN-31")
@pytest.mark.parametrize(
    ("mapping", "operand"),
    [
        pytest.param("none", ("0/1.act/input.given", True, None), id="by-its-own-name"),
        pytest.param(None, ("0/1.act/input.input", True, 0), id="paired-by-values"),
    ],
)
def test_an_operand_under_another_name_is_named_by_it(
    tmp_path: Path, mapping: Literal["none"] | None, operand: tuple[str, bool, int | None]
) -> None:
    target = chain()
    target[1].act = Dividing()
    ref, tgt = captured(tmp_path, target)
    found = localize(ref, tgt, target_model=Workload(target, (X,)), mapping=mapping)
    assert found.nonfinite is not None
    assert [(one.key, one.is_finite, one.more) for one in found.nonfinite.operands] == [operand]
    assert [one.module for one in found.suspects] == ["1.act"]
    assert found.suspects[0].reason.endswith("of 256 elements are finite on one side only")
    own = [one.key for one in found.changes if one.curve == "own"]
    assert own == ["0/1.act/output"]  # what its block hands on is explained by it


@pytest.mark.spec("LCL-15")
def test_operands_are_those_of_the_call_that_overflows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    block = Squared()
    ref, tgt = captured(tmp_path, Again(block, 1e12), Again(block, 1.0))
    origin = localize(ref, tgt).nonfinite
    assert origin is not None
    assert origin.key == "0/block@1/output"
    assert [one.key for one in origin.operands] == ["0/block@1/input.x", "0/block.fc@1/output"]


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x * (1 + 0.1 * torch.randn_like(x))
        return made


@pytest.mark.spec("LCL-17")
def test_what_differs_from_run_to_run_is_told_apart_from_a_mistake(tmp_path: Path) -> None:
    target = chain()
    target[1].act = nn.Sequential(nn.GELU(), Noisy())
    with torch.no_grad():
        target[4].out.weight.mul_(-1)
    reference, archive = captured(tmp_path, target)
    capture_workload(Workload(target, (X,)), tmp_path / "again.h5")
    found = localize(
        reference, archive, reference_model=Workload(chain(), (X,)), target_repeat=tmp_path / "again.h5"
    )
    assert found.noise is not None
    assert (found.noise.first, found.noise.module) == ("0/1.act/output", "1.act")
    assert [one.module for one in found.suspects] == ["4.out", "1.act"]  # the mistake first
    mistake, noisy = found.suspects
    assert noisy.cause == "run-to-run noise"
    assert noisy.noise is not None
    assert 0.03 < noisy.noise < 0.3
    assert mistake.cause != "run-to-run noise"
    first = next(change for change in found.changes if change.curve == "total")
    assert first.module == "4.out"
    assert any("does not repeat itself: 1.act" in note for note in found.notes)
    quiet = chain()
    reference, archive = captured(tmp_path, quiet)
    same = localize(reference, archive, target_repeat=archive)
    assert same.noise is not None
    assert (same.noise.largest, same.noise.first) == (0.0, "")


@pytest.mark.spec("LCL-20")
def test_results_are_json_with_all_that_was_found(tmp_path: Path) -> None:

    target = chain()
    target[3].act = nn.ReLU()
    reference, archive = captured(tmp_path, target)
    told = json.loads(
        json.dumps(
            localize(reference, archive, reference_model=Workload(chain(), (X,))).to_json(), allow_nan=False
        )
    )
    assert told["by"] == "replay"
    assert told["explained"] == [{"module": "3", "child": "3.act"}, {"module": "@root", "child": "3.act"}]
    assert [(one["curve"], one["kind"], one["key"]) for one in told["changes"]] == [
        ("own", "spike", "0/3.act/output"),
        ("total", "step", "0/3.act/output"),
    ]
    assert (told["nonfinite"], told["noise"], told["over_precise"]) == (None, None, [])


class Norm(nn.Module):
    """Rounds its result before it is scaled, unless told to round once."""

    def __init__(self, *, rounds: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.7, 1.6, 64))
        self.rounds = rounds

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        once: Tensor = (wide * self.weight.float()).to(x.dtype)
        twice: Tensor = wide.to(x.dtype) * self.weight
        return twice if self.rounds else once


class Distorted(nn.Module):
    """Up to two percent off, by a rule that no hypothesis has."""

    def forward(self, x: Tensor) -> Tensor:
        away = torch.sin(torch.arange(x.numel()) ** 2 * 0.7).reshape(x.shape)
        made: Tensor = (nn.functional.silu(x.float()) * (1 + 0.02 * away)).to(x.dtype)
        return made


@pytest.mark.spec("LCL-16")
def test_a_root_cause_is_recognised_by_r_and_more_precision_is_no_mistake(tmp_path: Path) -> None:
    def model(norm: nn.Module, act: nn.Module) -> Any:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 64), norm, nn.Linear(64, 64), act, nn.Linear(64, 8)).eval()

    reference = model(Norm(), nn.SiLU())
    target = model(Norm(rounds=False), Distorted()).bfloat16()
    ref, tgt = captured(tmp_path, target, reference, X.bfloat16())
    found = localize(ref, tgt, reference_model=Workload(reference, (X,)))
    assert [one.module for one in found.suspects] == ["3"]
    suspect = found.suspects[0]
    assert suspect.diagnosis is None
    assert suspect.ratio is not None
    assert 3 < suspect.ratio < 10
    assert suspect.cause == "a factor is missing"  # which R alone says, as its bands are documented
    assert [one.module for one in found.over_precise] == ["1"]
    assert 0.5 < found.over_precise[0].ratio < 0.85
    assert any("1: rounds less than the reference's model" in note for note in found.notes)


@pytest.mark.spec("LCL-1")
def test_a_replay_that_does_not_fit_leaves_the_archives_and_a_note(tmp_path: Path) -> None:
    target = chain()
    target[3].act = nn.SiLU()
    reference, archive = captured(tmp_path, target)
    other = Workload(nn.Sequential(nn.Flatten(), nn.Linear(8, 3)), (X,))
    found = localize(reference, archive, reference_model=other)
    assert found.by == "archives"
    assert [one.module for one in found.suspects] == ["3.act"]
    assert any(note.startswith("No replay: ") for note in found.notes)


@pytest.mark.spec("LCL-1")
def test_a_replay_that_was_asked_for_and_not_made_is_no_success(tmp_path: Path) -> None:
    reference, archive = captured(tmp_path, chain())
    other = Workload(nn.Sequential(nn.Flatten(), nn.Linear(8, 3)), (X,))
    found = localize(reference, archive, reference_model=other)
    assert (found.suspects, found.exit_status) == ((), 1)


@pytest.mark.spec("LCL-10")
def test_a_target_into_which_nothing_fits_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise UsageError("1.fc/input.x: [4, 8] does not fit [8, 4]")

    reference, archive = captured(tmp_path, chain())
    monkeypatch.setattr("tensorcap.rerun.injected_run.inject", refused)
    with pytest.raises(UsageError, match="does not fit"):
        localize(reference, archive, target_model=Workload(chain(), (X,)))
    both = localize(
        reference, archive, reference_model=Workload(chain(), (X,)), target_model=Workload(chain(), (X,))
    )
    assert (both.by, both.suspects) == ("replay", ())
    assert "No injection: 1.fc/input.x: [4, 8] does not fit [8, 4]." in both.notes


def suspect(**members: Any) -> Suspect:
    """A suspect of which little is known."""
    known: dict[str, Any] = {
        "module": "3.act",
        "class_name": "torch.nn.modules.activation.GELU",
        "key": "0/3.act/output",
        "by": ("archives",),
        "status": "diverged",
        "findings": (),
        **dict.fromkeys(("own", "inherited", "total", "ratio", "noise", "examined")),
        "cause": "",
        "reason": "3.act made this tensor.",
    }
    return Suspect(**{**known, **members})


def diagnosis(status: Any, *explanations: Explanation) -> Diagnosis:
    key = "0/3.act/output"
    return Diagnosis(key, key, status, 0.5, 6e-8, "float32", 0.0, explanations, {}, ())


def test_what_is_not_known_of_a_suspect_is_left_out() -> None:
    assert suspect_lines(2, suspect()) == [
        "2. 3.act (GELU)",
        "error: diverged (at 0/3.act/output)",
        "by archives: 3.act made this tensor.",
    ]


def test_each_error_of_a_suspect_is_named_and_what_explains_it_and_what_does_not() -> None:
    errors = {"own": 0.5, "inherited": 0.0, "total": 0.25, "noise": 0.001, "ratio": 48.53}
    text = "the target is silu of its input"
    mistake = Explanation("activation", text, "Another activation.", 0.5, 2e-8, 1e-7, 0, 256, 9.0, {})
    explained = diagnosis("explained", mistake)
    lines = suspect_lines(
        1, suspect(by=("replay", "injection"), examined=explained, cause="activation", **errors)
    )
    assert lines[1:] == [
        "error: own 0.5, inherited 0, total 0.25, from run to run 0.001, R 48.5 (at 0/3.act/output)",
        "by replay and injection: 3.act made this tensor.",
        "explained: the target is silu of its input (leaves 2e-08)",
        "Another activation.",
    ]
    noisy = suspect_lines(1, suspect(examined=explained, cause="run-to-run noise"))
    assert noisy[-1] == "root cause: run-to-run noise"
    unexplained = suspect_lines(1, suspect(examined=diagnosis("unexplained"), cause="another computation"))
    assert unexplained[-2:] == ["no hypothesis explains its values", "root cause: another computation"]


@pytest.mark.spec("LCL-61", "LCL-650")
def test_one_of_many_layers_that_was_not_diagnosed_has_the_explanation_of_the_others() -> None:
    """What R means says nothing against it; what others are explained by is told where it is turned round."""
    facts = {"setting": "rope", "reference": 0, "target": 1}
    text = "the target is what Attention makes with 1 in the place of 0 for its setting rope"
    first = Explanation("rotary-layout", text, "", 0.5, 0.0, 1e-7, 0, 256, 9.0, facts)
    turned = {**facts, "reference": 1, "target": 0}
    other = replace(first, text=text.replace("1 in the place of 0", "0 in the place of 1"), facts=turned)
    known: list[dict[str, Any]] = [
        {"examined": diagnosis("explained", first), "cause": "rotary-layout"},
        {"examined": diagnosis("explained", other), "cause": "rotary-layout"},
        {"cause": "a step is missing"},
    ]
    named = [
        suspect(module=f"{n}.act", key=f"0/{n}.act/output", own=0.5, ratio=48.5, **one)
        for n, one in enumerate(known)
    ]
    (one,) = group_suspects(named)
    assert one.modules == ("0.act", "1.act", "2.act")
    assert [module for module, _ in one.other_mistakes] == ["1.act"]
    assert f"of 1.act: {other.text} (leaves 0)" in suspect_lines(1, one)
    assert suspect_lines(1, named[2])[-1] == "an R of that size usually means: a step is missing"
    many = [replace(named[1], module=f"{n}.act", key=f"0/{n}.act/output") for n in range(1, 6)]
    (one,) = group_suspects([named[0], *many])
    assert "2 more modules are explained otherwise; tcap localize --all says how" in suspect_lines(1, one)
    assert sum(line.startswith("of ") for line in suspect_lines(1, one, show_all=True)) == 5


class _Odd(nn.Module):
    """What no hypothesis knows."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.flip(0) + 0.3 * torch.sin(5 * x)).relu()


@pytest.mark.spec("DIA-115", "LCL-80")
@pytest.mark.parametrize("with_model", [False, True])
def test_a_dropout_that_a_port_does_without_is_not_skipped(tmp_path: Path, with_model: bool) -> None:
    """In evaluation its result is its argument: whatever is wrong there, the module before it made."""
    torch.manual_seed(0)
    up, down = nn.Linear(8, 8), nn.Linear(8, 4)
    models: list[Any] = [nn.Module(), nn.Module()]
    for model, act in zip(models, (nn.ReLU(), _Odd()), strict=True):
        model.up, model.act, model.down = up, act, down
    models[0].dropout = nn.Dropout(0.1)
    models[0].forward = lambda x: models[0].down(models[0].dropout(models[0].act(models[0].up(x))))
    models[1].forward = lambda x: models[1].down(models[1].act(models[1].up(x)))
    paths = tmp_path / "reference.h5", tmp_path / "target.h5"
    for model, path in zip(models, paths, strict=True):
        capture_workload(Workload(model.eval(), (X,)), path)
    reference = Workload(models[0], (X,), seed=0) if with_model else None
    assert [suspect.module for suspect in localize(*paths, reference_model=reference).suspects] == ["act"]
