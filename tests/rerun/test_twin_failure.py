"""A model that does not run in the target's precision: its replay goes on without a twin, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tensorcap.rerun import replay
from tensorcap.session import capture_workload
from tensorcap.workload import Workload


class Placed(nn.Module):
    """Rows and their places, from a table that stays in float32 whatever the model is cast to, and a norm."""

    def __init__(self, *, casts: bool, factor: float = 1.0) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.table = torch.linspace(-1, 1, 8)  # no buffer
        self.casts, self.factor = casts, factor

    def forward(self, x: Tensor) -> Tensor:
        table = self.table.to(x.dtype) if self.casts else self.table
        result: Tensor = self.norm(self.inner(x) * self.factor + table)
        return result


@pytest.mark.parametrize("factor", [1.0, 1.5], ids=["right", "wrong"])
def test_a_model_that_does_not_run_in_the_targets_precision_has_no_twin(
    tmp_path: Path, factor: float
) -> None:
    torch.manual_seed(0)
    reference, x = Placed(casts=False).eval(), torch.randn(4, 8)
    target = Placed(casts=True, factor=factor).eval()
    target.load_state_dict(reference.state_dict())
    target.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match="mixed dtype"):
        Placed(casts=False).to(torch.bfloat16)(x.bfloat16())
    capture_workload(Workload(reference, {"x": x}), tmp_path / "r.h5")
    capture_workload(Workload(target, {"x": x.bfloat16()}), tmp_path / "t.h5")
    result = replay(tmp_path / "r.h5", tmp_path / "t.h5", reference_model=Workload(reference, {"x": x}))
    assert bool(result.bad) == (factor != 1.0)
    (note,) = [note for note in result.notes if "no twin" in note]
    assert note.startswith(
        "The reference's model does not run in bfloat16 on the target's values (RuntimeError: "
    )
