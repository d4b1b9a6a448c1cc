"""The guilty module is found by grafting the reference's results into running targets."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensorcap
from tensorcap.localization import bisect_live
from tensorcap.workload import Workload
from tensorcap_formats.errors import UsageError
from tests.support.progress import RecordedProgress

INPUT = torch.linspace(-1, 1, 4 * 16).reshape(4, 16)


class Cell(nn.Module):
    """A residual block: what happens between its two children is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.out = nn.Linear(16, 16)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.out(torch.tanh(self.fc(x)) * self.scale)
        return made


def chain(count: int = 20) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(Cell() for _ in range(count)), nn.Linear(16, 8)).eval()


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    model = chain()
    with torch.no_grad(), tensorcap.capture(model, tmp_path / "ref.h5"):
        model(INPUT)
    return tmp_path / "ref.h5"


@pytest.mark.spec("BIS-10")
def test_a_wrong_module_is_named_by_about_log2_runs(reference: Path) -> None:
    target = chain()
    with torch.no_grad():
        target[13].fc.weight.mul_(1.2)
    found = bisect_live(reference, Workload(target, (INPUT,)))
    assert (found.key, found.module, found.blame) == ("0/13.fc/output", "13.fc", "module")
    assert found.cuts == 61
    assert len(found.runs) <= 2 + 6
    assert [run.is_good for run in found.runs[:2]] == [True, False]


@pytest.mark.spec("BIS-12")
def test_the_code_between_children_is_blamed_for_what_it_hands_on(reference: Path) -> None:
    target = chain()
    target[7].scale = 1.1
    found = bisect_live(reference, Workload(target, (INPUT,)))
    assert (found.key, found.module, found.blame) == ("0/7.out/output", "7", "caller")


@pytest.mark.spec("BIS-13")
def test_a_right_target_has_no_guilty_module(reference: Path) -> None:
    found = bisect_live(reference, Workload(chain(), (INPUT,)))
    assert (found.key, found.exit_status, len(found.runs)) == ("", 0, 2)


@pytest.mark.spec("BIS-10")
def test_the_target_is_as_it_was(reference: Path) -> None:
    target = chain()
    with torch.no_grad():
        target[3].out.bias.add_(0.5)
        before = target(INPUT)
        bisect_live(reference, Workload(target, (INPUT,)))
        assert torch.equal(target(INPUT), before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in target.modules())


@pytest.mark.spec("BIS-12")
def test_the_op_is_named_where_ops_are_asked_for(tmp_path: Path) -> None:
    model = chain(6)
    with torch.no_grad(), tensorcap.capture(model, tmp_path / "ref.h5", level="op"):
        model(INPUT)
    target = chain(6)
    target[4].scale = 1.1
    found = bisect_live(tmp_path / "ref.h5", Workload(target, (INPUT,)), level="op")
    assert found.module == "4"
    assert found.divergence is not None
    assert found.divergence.pair.key == "0/4:aten.mul.Tensor/output"


def test_ops_that_the_reference_lacks_are_made_or_asked_for(reference: Path) -> None:
    target = chain()
    target[4].scale = 1.1
    with pytest.raises(UsageError, match=r"has no ops, expected those of 4\.out"):
        bisect_live(reference, Workload(target, (INPUT,)), level="op")
    asked = []

    def make(path: Path, sites: tuple[str, ...]) -> Path:
        asked.append(sites)
        model = chain()
        with torch.no_grad(), tensorcap.capture(model, path, level="op", ops_in=sites):
            model(INPUT)
        return path

    found = bisect_live(reference, Workload(target, (INPUT,)), level="op", reference_ops=make)
    assert asked == [("4.out", "4")]
    assert found.divergence is not None
    assert found.divergence.pair.key == "0/4:aten.mul.Tensor/output"


class OtherCell(nn.Module):
    """A `Cell` whose children have other names."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.up = cell.fc
        self.down = cell.out
        self.scale = cell.scale

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.down(torch.tanh(self.up(x)) * self.scale)
        return made


class OtherChain(nn.Module):
    """A `chain` whose modules have other names."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        *cells, head = model
        self.blocks = nn.ModuleList(map(OtherCell, cells))
        self.head = head

    def forward(self, input: Tensor) -> Tensor:
        for block in self.blocks:
            input = block(input)
        result: Tensor = self.head(input)
        return result


@pytest.mark.spec("BIS-12")
def test_ops_are_asked_for_by_the_names_of_the_reference(reference: Path) -> None:
    target = chain()
    target[4].scale = 1.1
    asked = []

    def make(path: Path, sites: tuple[str, ...]) -> Path:
        asked.append(sites)
        model = chain()
        with torch.no_grad(), tensorcap.capture(model, path, level="op", ops_in=sites):
            model(INPUT)
        return path

    found = bisect_live(
        reference, Workload(OtherChain(target).eval(), (INPUT,)), level="op", reference_ops=make
    )
    assert (found.key, found.module, found.blame) == ("0/blocks.4.down/output", "4", "caller")
    assert asked == [("4.out", "4")]
    assert found.divergence is not None
    assert found.divergence.pair.key == "0/4:aten.mul.Tensor/output"


@pytest.mark.spec("BIS-14")
def test_a_check_of_the_users_own_judges(reference: Path, tmp_path: Path) -> None:
    target = chain()
    with torch.no_grad():
        target[11].out.weight.mul_(-1)
        good = float(chain()(INPUT).sum())
    script = tmp_path / "check.py"
    script.write_text(
        "import os, sys, tensorcap\n"
        "archive = tensorcap.open_archive(os.environ['TCAP_RUN'])\n"
        f"sys.exit(abs(float(archive.load(archive.get('0/@root/output')).sum()) - {good}) > 1e-3)\n"
    )
    found = bisect_live(reference, Workload(target, (INPUT,)), check=f"{sys.executable} {script}")
    assert found.key == "0/11.out/output"
    assert all(run.error is None for run in found.runs)
    with pytest.raises(UsageError, match="ended with 125, expected 0 for good"):
        bisect_live(reference, Workload(target, (INPUT,)), check="exit 125")


class Interrupted(RecordedProgress):
    """Ends the search in its fifth run."""

    def advance(self, done: int, total: int | None) -> None:
        super().advance(done, total)
        if done == 5:
            raise KeyboardInterrupt


@pytest.mark.spec("BIS-15")
def test_an_interrupted_search_goes_on(reference: Path, tmp_path: Path) -> None:
    target = chain()
    with torch.no_grad():
        target[13].fc.weight.mul_(1.2)
    with pytest.raises(KeyboardInterrupt):
        bisect_live(reference, Workload(target, (INPUT,)), state=tmp_path / "state", progress=Interrupted())
    before = len((tmp_path / "state").read_text().splitlines()) - 1
    with open(tmp_path / "state", "a") as state:
        state.write('{"cut": "0/3')  # of a process that was killed while it wrote
    progress = RecordedProgress()
    found = bisect_live(
        reference,
        Workload(target, (INPUT,)),
        state=tmp_path / "state",
        progress=progress,
    )
    assert found.module == "13.fc"
    assert before == 4
    assert (
        len(progress.stages) == 1 + (len(found.runs) - before) + 1
    )  # as it is, those that are left, within the module
    with pytest.raises(UsageError, match="is of another search"):
        bisect_live(reference, Workload(target, (INPUT,)), state=tmp_path / "state", limit=0.5)
    (tmp_path / "state").write_text(json.dumps({}) + "\n{\n")
    with pytest.raises(UsageError, match="is no state of a bisection"):
        bisect_live(reference, Workload(target, (INPUT,)), state=tmp_path / "state")


@pytest.mark.spec("BIS-11")
def test_rounding_of_a_low_precision_target_is_no_mistake(reference: Path) -> None:
    target = chain().bfloat16()
    found = bisect_live(reference, Workload(target, (INPUT.bfloat16(),)))
    assert found.exit_status == 0
    assert found.runs[-1].error is not None
    assert found.runs[-1].error > 1e-3
    wrong = chain()
    with torch.no_grad():
        wrong[2].out.weight.mul_(2)
    found = bisect_live(reference, Workload(wrong.bfloat16(), (INPUT.bfloat16(),)))
    assert found.module == "2.out"


class Turn(nn.Module):
    """A leaf of four ops, the third of which has a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.orthogonal_(torch.empty(16, 16)))
        self.factor = 0.1

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + torch.sin(torch.matmul(x, self.weight)) * self.factor
        return made


@pytest.mark.spec("BIS-12")
def test_sixty_four_modules_take_at_most_eight_runs_to_the_module_and_its_op(tmp_path: Path) -> None:
    def model() -> Any:
        torch.manual_seed(1)
        return nn.Sequential(*(Turn() for _ in range(64))).eval()

    right, wrong = model(), model()
    with torch.no_grad(), tensorcap.capture(right, tmp_path / "ref.h5", level="op"):
        right(INPUT)
    wrong[41].factor = 0.11
    found = bisect_live(tmp_path / "ref.h5", Workload(wrong, (INPUT,)), level="op")
    assert (found.module, found.cuts) == ("41", 64)
    assert len(found.runs) <= 8
    assert found.divergence is not None
    assert found.divergence.pair.key == "0/41:aten.mul.Tensor/output"
