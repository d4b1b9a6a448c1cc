"""Folders that Apple's own writer makes, against Apple's own loader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("coreai_torch")

from coreai_torch.debugging.torch_utils import load_intermediates, save_intermediates

from tensorcap_formats.open import open_archive
from tests.coreai.conversion import converted, exported


class Net(torch.nn.Module):
    """A linear layer and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 8) to (batch, 6)."""
        return torch.softmax(self.up(x), -1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch's own modules of programs
@pytest.mark.spec("AIM-2", "AIM-6", "AIM-10", "AIM-11")
def test_what_apple_writes_is_read_with_the_values_that_apple_loads(tmp_path: Path) -> None:
    inputs = {"x": torch.randn(2, 8)}
    program = exported(Net().eval(), inputs)
    written = save_intermediates(program, (inputs["x"],), tmp_path, coreai_program=converted(program))
    folder = Path(written).parent
    loaded = load_intermediates(folder)
    with open_archive(folder) as archive:
        values = {record.key.text: archive.read(record).tolist() for record in archive.records}
        assert archive.info.mappings == json.loads(Path(written).read_text())["mappings"]
        assert archive.info.mappings["outputs"]
    assert list(values.items()) == [
        ("0/up/param.weight", loaded.intermediates["up_weight"].tolist()),
        ("0/up/param.bias", loaded.intermediates["up_bias"].tolist()),
        ("0/@root/input.x", loaded.inputs["x"].tolist()),
        ("0/@root:addmm/output", loaded.intermediates["addmm"].tolist()),
        ("0/@root:_softmax/output", loaded.outputs["_softmax"].tolist()),
    ]
