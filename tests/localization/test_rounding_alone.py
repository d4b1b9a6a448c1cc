"""A norm that a port computes in bfloat16, where the model computes it in float32: rounding, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tensorcap.comparison import compare
from tensorcap.localization import localize
from tensorcap.session import capture_workload
from tensorcap.workload import Workload

WIDTH = 64


class Norm(nn.Module):
    """RMS norm, whose mean of squares is in float32, or in the dtype of what it is given."""

    def __init__(self, *, is_wide: bool) -> None:
        super().__init__()
        self.is_wide = is_wide
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(WIDTH, generator=torch.Generator().manual_seed(2)))

    def forward(self, x: Tensor) -> Tensor:
        h = x.float() if self.is_wide else x
        out: Tensor = (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight
        return out


def model(*, is_wide: bool = True) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(WIDTH, WIDTH), Norm(is_wide=is_wide)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 32)).eval()


@pytest.mark.spec("LCL-660")
def test_who_only_rounds_otherwise_is_named_in_a_note_and_not_accused(tmp_path: Path) -> None:
    x = torch.randn(2, 40, WIDTH, generator=torch.Generator().manual_seed(1))
    reference = Workload(model(), (x,))
    capture_workload(reference, tmp_path / "ref.h5")
    capture_workload(Workload(model(is_wide=False).bfloat16(), (x.bfloat16(),)), tmp_path / "tgt.h5")
    assert compare(tmp_path / "ref.h5", tmp_path / "tgt.h5").exit_status == 0
    found = localize(tmp_path / "ref.h5", tmp_path / "tgt.h5", reference_model=reference)
    assert [suspect.module for suspect in found.suspects] == []
    assert found.exit_status == 0
    (note,) = (note for note in found.notes if "rounds otherwise" in note or "round otherwise" in note)
    assert "nobody is accused of that" in note
