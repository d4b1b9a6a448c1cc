"""Folders that Apple's own writer makes, against Apple's own loader."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("coreai_torch")

from coreai_torch.debugging.torch_utils import load_intermediates, save_intermediates

import tensorcap
from tensorcap_formats.errors import UsageError
from tensorcap_formats.open import open_archive
from tests.coreai.conversion import converted, exported
from tests.coreai.models import make, make_inputs

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch's own programs


class Net(torch.nn.Module):
    """A linear layer and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 8) to (batch, 6)."""
        return torch.softmax(self.up(x), -1)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.spec("AIM-42", "AIM-46")
@pytest.mark.parametrize("name", ["mlp", "convnet", "decoder", "llama"])
def test_apple_loads_what_we_write_with_the_values_of_its_own_writer(name: str, tmp_path: Path) -> None:
    inputs = make_inputs(name)
    program = exported(make(name), inputs)
    asset = converted(program)
    folder, path = tmp_path / "net.aimodelintermediates", tmp_path / "net.h5"
    tensorcap.save_intermediates(program, inputs, folder, coreai_program=asset, archive=path)
    ours = load_intermediates(folder)
    written = save_intermediates(program, tuple(inputs.values()), tmp_path, coreai_program=asset)
    theirs = load_intermediates(Path(written).parent)
    assert ours.mappings == theirs.mappings
    assert list(ours.inputs) == list(theirs.inputs)
    assert theirs.outputs.keys() <= ours.outputs.keys()  # Apple's lack final views
    assert len(ours.outputs) == 1
    mine, known = ({**run.inputs, **run.outputs, **run.intermediates} for run in (ours, theirs))
    assert known.keys() < mine.keys()
    for node, value in known.items():  # Apple runs views on copies, so that matrix products round otherwise
        assert mine[node].dtype == value.dtype
        own, other = mine[node].detach().double().numpy(), value.detach().double().numpy()
        peak = np.abs(other[np.isfinite(other)]).max(initial=0)
        limit = 64 * 2.0**-23 * peak  # sums of up to 64 products
        np.testing.assert_allclose(own, other, rtol=0, atol=limit, err_msg=node)
    with open_archive(folder) as read, open_archive(path) as run:
        assert len(read.records) >= len(mine)
        entries = json.loads((folder / "metadata.json").read_text())
        for kind in ("inputs", "outputs", "intermediates"):
            for node, entry in entries[kind].items():
                assert read.load(read.get(entry["keys"][0])).tolist() == mine[node].tolist()
        assert run.info.mappings == read.info.mappings
        mapped = {
            name
            for source in run.info.mappings["sources"]["torch"].values()
            for name in source["identifiers"]
        }
        assert mapped <= mine.keys()  # each node that the Debugger maps has a value


@pytest.mark.slow
@pytest.mark.spec("AIM-44")
def test_apple_loads_bfloat16_as_bfloat16(tmp_path: Path) -> None:
    x = torch.randn(2, 8).bfloat16()
    program = exported(Net().eval().bfloat16(), {"x": x})
    folder = tensorcap.save_intermediates(program, (x,), tmp_path / "net.aimodelintermediates")
    loaded = load_intermediates(folder)
    assert {value.dtype for value in loaded.intermediates.values()} == {torch.bfloat16}
    assert torch.equal(loaded.inputs["x"], x)
    written = save_intermediates(program, (x,), tmp_path)
    assert load_intermediates(Path(written).parent).inputs["x"].dtype == torch.float32  # Apple's loses it


@pytest.mark.slow
@pytest.mark.spec("AIM-45")
def test_what_is_no_core_ai_program_is_refused(tmp_path: Path) -> None:
    x = torch.randn(2, 8)
    program = exported(Net().eval(), {"x": x})
    asset = converted(program).save_asset(tmp_path / "net.aimodel")
    with pytest.raises(UsageError, match="a AIModelAsset is no compiled program with mappings"):
        tensorcap.save_intermediates(
            program, (x,), tmp_path / "net.aimodelintermediates", coreai_program=asset
        )
