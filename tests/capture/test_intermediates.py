"""Reference runs of exported programs as folders for Core AI's debugger, without its packages."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tensorcap
from tensorcap.adapters import export_graph, protocol
from tensorcap.runs import Graph
from tensorcap.session import capture_workload
from tensorcap_formats.errors import MissingPackageError, TensorNotFoundError, UsageError, WriteError
from tensorcap_formats.open import open_archive

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch's own programs


class Net(nn.Module):
    """Has what Apple's writer drops: results of several tensors, a scatter, a top-k, a view at the end."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 8)
        self.register_buffer("scale", torch.arange(8.0))

    def forward(self, x: torch.Tensor) -> Any:
        """(2, 8) to sums, a scatter transposed, places, and the input."""
        h = self.norm(x) * self.scale
        a, b = self.up(h).split([3, 5], -1)
        values, places = torch.topk(b, 3, -1)
        spread = torch.slice_scatter(h, a, 1, 0, 3).repeat_interleave(2, 0)
        return {"sums": values + a * torch.tensor(2.0), "rest": (spread.T, places, x)}


def program(net: nn.Module, **inputs: torch.Tensor) -> torch.export.ExportedProgram:
    exported = torch.export.export(net, (), inputs, strict=False).run_decompositions()
    assert isinstance(exported, torch.export.ExportedProgram)
    return exported


def net_and_input(dtype: torch.dtype = torch.float32) -> tuple[Net, torch.Tensor]:
    torch.manual_seed(3)
    return Net().eval().to(dtype), torch.randn(2, 8).to(dtype)


def metadata(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "metadata.json").read_text())  # type: ignore[no-any-return]


def loaded(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Values by name, read as Apple's loader reads them."""
    entries = metadata(folder)
    return {
        name: np.load(folder / entry["data_file"])
        for kind in ("inputs", "outputs", "intermediates")
        for name, entry in entries[kind].items()
    }


@pytest.mark.spec("AIM-42", "AIM-43", "CAP-221")
def test_the_folder_has_what_torch_computes_for_every_node(tmp_path: Path) -> None:
    net, x = net_and_input()
    folder = tensorcap.save_intermediates(program(net, x=x), (x,), tmp_path / "net.aimodelintermediates")
    with torch.no_grad():
        mean = x.double().mean(-1, keepdim=True)
        deviation = 1 / (x.double().var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        up = nn.functional.linear(net.norm(x) * net.scale, net.up.weight, net.up.bias)
        best = up[:, 3:].topk(3)
        wanted = {
            "x": x,
            "norm_weight": net.norm.weight,
            "scale": net.scale,
            "lifted_tensor_0": torch.tensor(2.0),
            "native_layer_norm": net.norm(x),
            "native_layer_norm.1": mean,
            "native_layer_norm.2": deviation,
            "permute": net.up.weight.T,
            "addmm": up,
            "split_with_sizes": up[:, :3],
            "split_with_sizes.1": up[:, 3:],
            "topk": best.values,
            "topk.1": best.indices,
            "slice_scatter": torch.cat([up[:, :3], (net.norm(x) * net.scale)[:, 3:]], 1),
        }
    values = loaded(folder)
    for name, value in wanted.items():
        np.testing.assert_allclose(
            values[name].astype("f8"), value.detach().double().numpy(), rtol=0, atol=1e-5, err_msg=name
        )
    entries = metadata(folder)
    assert list(entries["inputs"]) == ["x"]
    outputs = entries["outputs"]
    assert {outputs[name]["node_target"] for name in outputs} == {
        *("aten.add.Tensor", "aten.permute.default", "getitem", "x")
    }
    results = net(x)
    returned = [results["sums"], *results["rest"]]
    read = [values[name] for name in outputs]
    for result in returned:
        assert any(a.shape == result.shape and np.allclose(a, result.detach().numpy()) for a in read)
    weights = {
        name: (entry["node_op"], entry["node_target"])
        for name, entry in entries["intermediates"].items()
        if entry["node_op"] == "get_attr"
    }
    assert weights == {
        "norm_weight": ("get_attr", "norm.weight"),
        "norm_bias": ("get_attr", "norm.bias"),
        "up_weight": ("get_attr", "up.weight"),
        "up_bias": ("get_attr", "up.bias"),
        "scale": ("get_attr", "scale"),
        "lifted_tensor_0": ("get_attr", "lifted_tensor_0"),
    }
    nodes = {node.name for node in program(net, x=x).graph.nodes if node.op == "call_function"}
    assert {e["node_name"] for kind in entries.values() for e in kind.values()} >= nodes
    assert entries["intermediates"]["topk.1"]["node_name"] == "topk"


@pytest.mark.spec("AIM-42", "AIM-46", "CAP-220")
def test_folder_and_archive_hold_the_same_values(tmp_path: Path) -> None:
    net, x = net_and_input()
    folder, path = tmp_path / "net.aimodelintermediates", tmp_path / "net.h5"
    tensorcap.save_intermediates(program(net, x=x), {"x": x}, folder, archive=path)
    with open_archive(folder) as written, open_archive(path) as run:
        assert written.is_ordered
        graph = Graph.of(run)
        for record in written.records:
            text = record.key.text
            value = run.load(run.get(text)) if text in run else graph.read(text)
            assert value.tobytes() == written.load(record).tobytes(), text
            assert value.shape == record.shape
        assert {record.key.text for record in run.records} <= {r.key.text for r in written.records}
        facts = run.values["0/up:addmm/op"]
        assert (facts["module"], facts["module_call"], facts["class"]) == ("up", 0, "Linear")
        assert run.run["graph"]["inputs"] == {"x": {"record": "0/@root/input.x"}}
        assert run.run["graph"]["weights"]["up.weight"] == {"parameter": "up.weight"}
        slots = [slot for output in run.run["graph"]["outputs"] for slot in output["slots"]]
        assert slots == ["output.sums", "output.rest.0", "output.rest.1", "output.rest.2"]
    difference = tensorcap.compare(path, folder)
    assert difference.exit_status == 0
    assert {pair.status for pair in difference.pairs} == {"identical"}


@pytest.mark.spec("AIM-44")
def test_bfloat16_keeps_its_name_and_its_bits(tmp_path: Path) -> None:
    net, x = net_and_input(torch.bfloat16)
    folder = tensorcap.save_intermediates(program(net, x=x), (x,), tmp_path / "net.aimodelintermediates")
    entry = metadata(folder)["intermediates"]["up_weight"]
    assert entry["torch_dtype"] == "torch.bfloat16"
    assert np.load(folder / entry["data_file"]).tolist() == net.up.weight.float().tolist()
    with open_archive(folder) as written:
        record = written.get("0/up/param.weight")
        assert record.dtype.name == "bfloat16"
        assert (
            written.read(record).tolist()
            == net.up.weight.detach().view(torch.int16).int().numpy().astype("u2").tolist()
        )


class Counter(nn.Module):
    count: torch.Tensor
    hidden: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("hidden", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        result: torch.Tensor = x + self.count + self.hidden
        return result


@pytest.mark.spec("CAP-220", "CAP-221")
def test_a_buffer_that_is_written_to_keeps_its_value_and_its_new_one_is_an_output(tmp_path: Path) -> None:
    exported = program(Counter(), x=torch.ones(2))
    for number in (1, 2):
        folder = tensorcap.save_intermediates(
            exported, (torch.tensor([5.0, 6.0]),), tmp_path / f"{number}.aimodelintermediates"
        )
        values = loaded(folder)
        assert values["count"].tolist() == [0, 0]
        assert values["hidden"].tolist() == [1, 1]
        outputs = [values[name].tolist() for name in metadata(folder)["outputs"]]
        assert sorted(outputs) == [[1.0, 1.0], [7.0, 8.0]]
    assert exported.state_dict["count"].tolist() == [0, 0]


@pytest.mark.spec("CAP-221")
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        pytest.param((), "found 0 values, expected 1: x", id="too few"),
        pytest.param({"y": torch.ones(2, 8)}, "found y, expected x", id="another name"),
        pytest.param(
            (torch.ones(3, 8),), r"input x .* found float32\[3, 8\], expected float32\[2, 8\]", id="shape"
        ),
        pytest.param((torch.ones(2, 8).half(),), r"found float16\[2, 8\]", id="dtype"),
        pytest.param((3,), "found a int", id="number"),
    ],
)
def test_inputs_that_the_program_does_not_take_are_refused(inputs: Any, message: str, tmp_path: Path) -> None:
    net, x = net_and_input()
    with pytest.raises(UsageError, match=message):
        tensorcap.save_intermediates(program(net, x=x), inputs, tmp_path / "net.aimodelintermediates")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.spec("AIM-45")
def test_what_cannot_be_written_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x = net_and_input()
    exported = program(net, x=x)
    with pytest.raises(UsageError, match=r"net: expected a name in \.aimodelintermediates"):
        tensorcap.save_intermediates(exported, (x,), tmp_path / "net")
    with pytest.raises(UsageError, match="a Net is no exported program, expected one of torch"):
        tensorcap.save_intermediates(net, (x,), tmp_path / "net.aimodelintermediates")
    with pytest.raises(UsageError, match="a Net is no compiled program with mappings"):
        tensorcap.save_intermediates(
            exported, (x,), tmp_path / "net.aimodelintermediates", coreai_program=net
        )

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", full)
        with pytest.raises(WriteError, match="No space left on device"):
            tensorcap.save_intermediates(exported, (x,), tmp_path / "net.aimodelintermediates")
    assert list(tmp_path.iterdir()) == []
    tensorcap.save_intermediates(exported, (x,), tmp_path / "net.aimodelintermediates")
    with pytest.raises(WriteError, match="is there already, expected a new folder"):
        tensorcap.save_intermediates(exported, (x,), tmp_path / "net.aimodelintermediates")


@pytest.mark.spec("AIM-45")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"level": "op"}, "expected a capture at level export", id="ops"),
        pytest.param({"level": "export", "slices": "[:1]"}, r"parts of tensors \(\[:1\]\)", id="slices"),
        pytest.param({"level": "export", "stats_only": True}, "only statistics were kept", id="statistics"),
    ],
)
def test_an_archive_without_the_values_of_a_graph_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    net, x = net_and_input()
    capture_workload(tensorcap.Workload(net, {"x": x}), tmp_path / "net.h5", **options)
    with open_archive(tmp_path / "net.h5") as run, pytest.raises(UsageError, match=message):
        export_graph(run, tmp_path / "net.aimodelintermediates")


@pytest.mark.spec("AIM-44", "AIM-45")
def test_what_is_left_out_is_counted_by_reason(tmp_path: Path) -> None:
    net, x = net_and_input()
    capture_workload(tensorcap.Workload(net, {"x": x}), tmp_path / "net.h5", level="export")
    with open_archive(tmp_path / "net.h5") as run:
        dump = export_graph(run, tmp_path / "net.aimodelintermediates")
        (reason,) = dump.left_out
        assert reason.startswith("weights, or views of them: the capture did not record parameters")
        assert dump.left_out[reason] == 5
        some = export_graph(run, tmp_path / "some.aimodelintermediates", only=["*:topk"])
        assert list(metadata(some.folder)["intermediates"]) == ["topk", "topk.1"]
        with pytest.raises(TensorNotFoundError, match="'nothing'"):
            export_graph(run, tmp_path / "none.aimodelintermediates", only=["nothing"])


@pytest.mark.spec("CAP-191")
def test_decompositions_of_a_package_that_is_absent_are_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name="coreai")

    net, x = net_and_input()
    monkeypatch.setattr(
        protocol, "import_module", lambda name: absent(name) if "coreai" in name else import_module(name)
    )
    with pytest.raises(
        MissingPackageError, match=r"^decompositions 'coreai' needs the package 'coreai'"
    ) as e:
        capture_workload(
            tensorcap.Workload(net, {"x": x}), tmp_path / "x.h5", level="export", decompositions="coreai"
        )
    assert e.value.hint == "Install it with: pip install 'tensorcap[coreai]'"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.spec("AIM-47")
def test_a_view_that_differs_is_seen_beside_the_archive_that_describes_it(tmp_path: Path) -> None:
    net, x = net_and_input()
    folder, path = tmp_path / "net.aimodelintermediates", tmp_path / "net.h5"
    tensorcap.save_intermediates(program(net, x=x), (x,), folder, archive=path)
    assert {pair.status for pair in tensorcap.compare(folder, path).pairs} == {"identical"}
    entry = metadata(folder)["intermediates"]["split_with_sizes.1"]
    values = np.load(folder / entry["data_file"])
    values[1, 2] += 1
    np.save(folder / entry["data_file"], values)
    for pair in (tensorcap.compare(folder, path), tensorcap.compare(path, folder)):
        statuses = {each.key: each.status for each in pair.pairs}
        assert statuses["0/@root:split_with_sizes/output.1"] == "diverged"
        assert statuses["0/@root:split_with_sizes/output.0"] == "identical"
