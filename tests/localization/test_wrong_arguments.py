"""A module that is right for its own arguments is not wrong for giving other values for others."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402 - after the check that it is there
from torch.nn import functional as F  # noqa: E402, N812 - as everybody calls it

import tensorcap  # noqa: E402
from tensorcap import Workload, verify  # noqa: E402
from tensorcap.localization.evidence import Totals  # noqa: E402

X = torch.randn(6, 16, generator=torch.Generator().manual_seed(3))


class Gated(nn.Module):
    """The product of two arguments, one of them through an activation: the first, or the second."""

    def __init__(self, *, is_turned: bool) -> None:
        super().__init__()
        self.is_turned = is_turned

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.silu(y) * x if self.is_turned else F.silu(x) * y


class Block(nn.Module):
    def __init__(self, *, is_turned: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.gate, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)
        self.product = Gated(is_turned=is_turned)

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.up(x), self.gate(x)
        out: Tensor = self.down(self.product(up, gate) if self.product.is_turned else self.product(gate, up))
        return out


@pytest.mark.spec("LCL-70")
def test_arguments_that_do_not_belong_together_accuse_no_module(tmp_path: Path) -> None:
    reference, target = (Workload(Block(is_turned=turned).eval(), (X,)) for turned in (False, True))
    report = verify(reference, target, tmp_path / "report")
    assert "product" not in {suspect.module for suspect in report.suspects}
    assert "down" not in {suspect.module for suspect in report.suspects}


@pytest.mark.spec("LCL-70")
@pytest.mark.parametrize(("own", "is_far"), [(0.5, True), (0.08, False)])
def test_an_own_error_far_above_the_total_one_is_noted(tmp_path: Path, own: float, is_far: bool) -> None:
    for name, factor in (("r.h5", 1.0), ("t.h5", 1.01)):  # a total error of 0.01
        model = nn.Identity()
        with tensorcap.capture(model, tmp_path / name):
            model(X * factor)
    totals = Totals(tensorcap.compare(tmp_path / "r.h5", tmp_path / "t.h5"))
    assert totals.are_exceeded_by("0/@root/output", own) is is_far
    assert list(totals.exceeded) == ["0/@root/output"] * is_far
    assert len(totals.notes) == is_far


@pytest.mark.spec("LCL-6", "LCL-70")
@pytest.mark.parametrize(("given", "is_open"), [(X, False), (X * 1.01, True)], ids=["equal", "unlike"])
def test_what_is_right_in_the_free_run_is_not_left_open(tmp_path: Path, given: Tensor, is_open: bool) -> None:
    for name, x in (("r.h5", X), ("t.h5", given)):
        model = nn.Identity()
        with tensorcap.capture(model, tmp_path / name):
            model(x)
    totals = Totals(tensorcap.compare(tmp_path / "r.h5", tmp_path / "t.h5"))
    totals.are_exceeded_by("0/@root/output", 0.5)
    assert list(totals.unjudged) == ["0/@root/output"] * is_open
