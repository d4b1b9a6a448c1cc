"""The outputs of a Core AI model: the runtime gives them in an order that changes with each run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("coreai_torch")

import tensorcap
from tensorcap.session import capture_workload
from tensorcap_formats.open import open_archive

pytestmark = pytest.mark.slow


class Several(torch.nn.Module):
    """Eight results, of which the number of the last axis grows."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(batch, 8) to (batch, 1) up to (batch, 8)."""
        return tuple(torch.tanh(x[:, : size + 1]) for size in range(8))


@pytest.mark.spec("CAI-220")
def test_outputs_are_recorded_in_the_order_of_the_function(tmp_path: Path) -> None:
    workload = tensorcap.Workload(tensorcap.CoreAIModel(Several().eval()), {"x": np.ones((2, 8), np.float32)})
    capture_workload(workload, tmp_path / "tgt.h5")
    with open_archive(tmp_path / "tgt.h5") as archive:
        outputs = [r for r in archive.records if r.key.text.startswith("0/@root/output")]
    assert [record.shape for record in outputs] == [(2, size) for size in range(1, 9)]
    assert [array.shape for array in workload.model(np.ones((2, 8), np.float32)).values()] == [
        (2, size) for size in range(1, 9)
    ]
