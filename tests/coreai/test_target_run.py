"""Runs of Core AI models under capture, with the real packages, against what torch computes itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("coreai_torch")

import tensorcap
from tensorcap.session import capture_workload
from tensorcap_formats.errors import UsageError


class Net(torch.nn.Module):
    """A multi-layer perceptron with a norm and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.up = torch.nn.Linear(8, 16)
        self.down = torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 8) to (batch, 4)."""
        return torch.softmax(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))), -1)


class Convolutional(torch.nn.Module):
    """Two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Conv2d(3, 4, 3, padding=1)
        self.two = torch.nn.Conv2d(4, 2, 3, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 3, 8, 8) to (batch, 2, 3, 3)."""
        result: torch.Tensor = self.two(torch.relu(self.one(x)))
        return result


def _both(net: torch.nn.Module, shape: tuple[int, ...], folder: Path) -> tuple[Any, Any]:
    torch.manual_seed(0)
    x = torch.randn(shape)
    target = tensorcap.CoreAIModel(net)
    capture_workload(
        tensorcap.Workload(net, {"x": x}), folder / "ref.h5", level="export", decompositions="coreai"
    )
    capture_workload(tensorcap.Workload(target, {"x": x.numpy()}), folder / "tgt.h5")
    return folder / "ref.h5", folder / "tgt.h5"


@pytest.mark.slow
@pytest.mark.spec("CAI-11", "CAI-12", "CAI-13")
@pytest.mark.parametrize(
    ("make", "shape", "pairs"),
    [pytest.param(Net, (2, 8), 5, id="mlp"), pytest.param(Convolutional, (2, 3, 8, 8), 4, id="conv")],
)
def test_operations_pair_with_the_exported_nodes_and_agree(
    make: type[torch.nn.Module], shape: tuple[int, ...], pairs: int, tmp_path: Path
) -> None:
    reference, target = _both(make().eval(), shape, tmp_path)
    with tensorcap.open_archive(reference) as ref, tensorcap.open_archive(target) as tgt:
        known = {record.key.text: record for record in ref.records}
        shared = [r for r in tgt.records if r.key.text in known and "input" not in r.key.slot]
        assert len(shared) == pairs
        for record in shared:
            np.testing.assert_allclose(
                tgt.read(record), ref.read(known[record.key.text]), rtol=0, atol=1e-6, err_msg=record.key.text
            )
        rows = tgt.run["operation_map"]
        assert {row["file"].rpartition("/")[2] for row in rows} == {"test_target_run.py"}
        assert {row["op_id"] in row["op_ids"] for row in rows} == {True}


@pytest.mark.slow
@pytest.mark.spec("CAI-14")
def test_a_mapped_operation_without_a_value_is_lost_with_the_reason(tmp_path: Path) -> None:
    _, target = _both(Net().eval(), (2, 8), tmp_path)
    with tensorcap.open_archive(target) as tgt:
        lost = [(p.site, p.slots, p.reason) for p in tgt.info.points if p.status == "not-capturable"]
    assert lost == [
        (
            "norm:native_layer_norm",
            ("output.0",),
            "no target value: no operation of the compiled program is mapped to it",
        )
    ]


@pytest.mark.spec("CAI-20")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"precision": "int3"}, "precision 'int3': expected fp32 or fp16", id="precision"),
        pytest.param({"mode": "fast"}, "mode 'fast': expected debug or release", id="mode"),
        pytest.param({"compute_units": "gpu"}, "for macOS only", id="compute units"),
    ],
)
def test_settings_that_there_are_none_of_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        tensorcap.CoreAIModel("net.aimodel", **options)


@pytest.mark.slow
@pytest.mark.spec("CAI-21")
def test_wrong_inputs_functions_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"found nothing, expected a Core AI asset, a folder NAME\.aimodel"):
        tensorcap.CoreAIModel(str(tmp_path / "net.aimodel"))(np.zeros(2))
    model = tensorcap.CoreAIModel(Net().eval())
    assert next(iter(model(np.zeros((2, 8), np.float32)).values())).shape == (2, 4)
    with pytest.raises(UsageError, match=r"input x: found float32\[3, 8\], expected float32\[2, 8\]"):
        model(np.zeros((3, 8), np.float32))
    with pytest.raises(UsageError, match=r"inputs: found 0 by position and y by name, expected x"):
        model(y=np.zeros((2, 8), np.float32))
    model.function = "other"
    with pytest.raises(UsageError, match=r"no function 'other', expected one of: main"):
        model(np.zeros((2, 8), np.float32))


@pytest.mark.slow
@pytest.mark.spec("CAP-191")
def test_a_reference_in_core_ais_decompositions_has_the_nodes_that_are_converted(tmp_path: Path) -> None:
    x = torch.randn(2, 8)
    net = Net().eval()
    paths = {name: tmp_path / f"{name or 'plain'}.h5" for name in ("", "coreai")}
    for name, path in paths.items():
        capture_workload(tensorcap.Workload(net, {"x": x}), path, level="export", decompositions=name)
    with tensorcap.open_archive(paths[""]) as plain, tensorcap.open_archive(paths["coreai"]) as decomposed:
        assert "0/up:linear/output" in plain
        up = net.norm(x).double() @ net.up.weight.double().T + net.up.bias.double()
        np.testing.assert_allclose(
            decomposed.read(decomposed.get("0/up:addmm/output")), up.detach().numpy(), rtol=0, atol=1e-5
        )
        assert decomposed.info.scope is not None
        assert decomposed.info.scope.decompositions == "coreai"


@pytest.mark.slow
@pytest.mark.spec("CAI-21")
def test_a_model_in_bfloat16_keeps_its_dtype(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 4).to(torch.bfloat16).eval()
    x = torch.randn(2, 8).to(torch.bfloat16)
    capture_workload(tensorcap.Workload(tensorcap.CoreAIModel(net), {"input": x}), tmp_path / "tgt.h5")
    with tensorcap.open_archive(tmp_path / "tgt.h5") as archive:
        record = archive.get("0/@root/output")
        assert {r.dtype.name for r in archive.records} == {"bfloat16"}
        assert np.array_equal(archive.load(archive.get("0/@root/input.input")), x.float().numpy())
        with torch.no_grad():
            np.testing.assert_allclose(archive.load(record), net(x).float().numpy(), rtol=2**-6, atol=2**-7)
