"""What both exporters of torch write, against the torch model: mapped without a file, mistakes named."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import tensorcap
from tensorcap.comparison import compare
from tensorcap.session import capture_workload
from tests.onnx.graphs import model, save

pytest.importorskip("onnxscript")


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(size, size, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(size)
        self.act = nn.ReLU()

    def forward(self, x: Any) -> Any:
        return self.act(self.bn(self.conv(x)) + x)


class ResNet(nn.Module):
    """Batch norms that both exporters fold into their convolutions, and a Linear and a norm at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(Block(8), Block(8))
        self.head = nn.Linear(8, 5)
        self.norm = nn.LayerNorm(5)

    def forward(self, x: Any) -> Any:
        return self.norm(self.head(self.blocks(self.stem(x)).mean((2, 3))))


class Attention(nn.Module):
    def __init__(self, size: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(size, size) for _ in range(4))

    def forward(self, x: Any) -> Any:
        q, k, v = (
            each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Encoder(nn.Module):
    """Two layers of attention and a feed-forward part whose activation is one shared module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"attn": Attention(), "norm": nn.LayerNorm(16), "up": nn.Linear(16, 16)})
            for _ in range(2)
        )
        self.act = nn.GELU()

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids)
        layer: Any
        for layer in self.layers:
            x = layer["norm"](x + layer["attn"](x))
            x = x + self.act(layer["up"](x))
        return x


def made(kind: str) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(0)
    if kind == "resnet":
        net: Any = ResNet()
        for block in net.blocks:
            nn.init.uniform_(block.bn.running_mean, -1, 1)
            nn.init.uniform_(block.bn.running_var, 0.5, 2)
            nn.init.uniform_(block.bn.weight, 0.5, 2)
        return net.eval(), torch.randn(2, 3, 6, 6)
    return Encoder().eval(), torch.arange(12).reshape(2, 6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """References and exports of both models."""
    folder = tmp_path_factory.mktemp("exports")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in ("resnet", "encoder"):
            net, x = made(kind)
            capture_workload(tensorcap.Workload(net, (x,)), folder / f"{kind}.h5")
            for dynamo in (True, False):
                path = folder / f"{kind}-{dynamo}.onnx"
                torch.onnx.export(net, (x,), path, dynamo=dynamo, verbose=False)
    return folder


def target(path: Path, kind: str) -> Path:
    """A capture of a model on the inputs of the reference."""
    _, x = made(kind)
    capture_workload(tensorcap.Workload(tensorcap.OnnxModel(path), (x.numpy(),)), path.with_suffix(".h5"))
    return path.with_suffix(".h5")


EXPORTERS = pytest.mark.parametrize("dynamo", [True, False], ids=["torch.export", "TorchScript"])


@EXPORTERS
@pytest.mark.parametrize("kind", ["resnet", "encoder"])
def test_a_right_export_accuses_nobody(kind: str, dynamo: bool, folder: Path) -> None:
    comparison = compare(folder / f"{kind}.h5", target(folder / f"{kind}-{dynamo}.onnx", kind))
    red = {p.key: p.status for p in comparison.pairs if not p.is_green and p.status not in ALLOWED}
    assert (comparison.exit_status, red) == (0, {})
    greens = {p.key for p in comparison.pairs if p.is_compared and p.is_green}
    wanted = {
        "resnet": ["blocks.1.act", "head", "norm"],
        "encoder": ["layers.1.attn.q", "layers.1.attn", "layers.0.up"],
    }
    assert {f"0/{site}/output" for site in wanted[kind]} <= greens
    assert "0/act@1/output" in greens or kind == "resnet"


ALLOWED = ("missing-in-reference", "explained", "excluded")


@EXPORTERS
def test_a_weight_of_another_layer_is_named(dynamo: bool, folder: Path, tmp_path: Path) -> None:
    loaded = onnx.load(folder / f"encoder-{dynamo}.onnx")
    net, _ = made("encoder")
    weight = net.layers[1]["up"].weight.detach().numpy()
    for stored in loaded.graph.initializer:
        values = numpy_helper.to_array(stored)
        for other in (weight, weight.T):
            if np.array_equal(values, other):
                stored.CopyFrom(numpy_helper.from_array(np.roll(values, 1, 0), stored.name))
    onnx.save(loaded, tmp_path / "wrong.onnx")
    comparison = compare(folder / "encoder.h5", target(tmp_path / "wrong.onnx", "encoder"))
    assert comparison.exit_status == 1
    assert comparison.divergence is not None
    assert comparison.divergence.module == "layers.1.up"


@EXPORTERS
@pytest.mark.spec("LCL-600")
def test_operations_of_the_graph_are_named_where_code_differs(
    dynamo: bool, folder: Path, tmp_path: Path
) -> None:
    net, ids = made("encoder")
    net.act = nn.GELU(approximate="tanh")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, (ids,), tmp_path / "wrong.onnx", dynamo=dynamo, verbose=False)
    archive = target(tmp_path / "wrong.onnx", "encoder")
    right, _ = made("encoder")
    found = tensorcap.localize(
        folder / "encoder.h5",
        archive,
        reference_model=tensorcap.Workload(right, (ids,)),
        target_model=tensorcap.Workload(tensorcap.OnnxModel(tmp_path / "wrong.onnx"), (ids.numpy(),)),
    )
    code = found.suspects[0].code
    assert code is not None
    assert [place.op for place in code.reference][:1] == ["aten.gelu"]
    assert "Gelu(approximate='tanh')" in [place.op for place in code.target]


@pytest.mark.spec("ONX-3")
def test_repeated_nodes_of_torch_export_are_calls(tmp_path: Path) -> None:
    scope = {"pkg.torch.onnx.name_scopes": "['', 'fc', 'linear']"}
    nodes = []
    for n in range(2):
        nodes.append(helper.make_node("MatMul", [f"t{n}", "fc.weight"], [f"m{n}"]))
        nodes.append(helper.make_node("Add", [f"m{n}", "fc.bias"], [f"t{n + 1}"]))
    for node in nodes:
        node.metadata_props.extend(onnx.StringStringEntryProto(key=k, value=v) for k, v in scope.items())
    weights: dict[str, Any] = {
        "fc.weight": np.eye(4, dtype=np.float32) * 2,
        "fc.bias": np.ones(4, np.float32),
    }
    path = save(model(nodes, [("t0", TensorProto.FLOAT, [1, 4])], ["t2"], weights), tmp_path / "twice.onnx")
    workload = tensorcap.Workload(tensorcap.OnnxModel(path), {"t0": np.zeros((1, 4), np.float32)})
    capture_workload(workload, tmp_path / "twice.h5")
    with tensorcap.open_archive(tmp_path / "twice.h5") as archive:
        assert archive.read(archive.get("0/fc/output")).tolist() == [[1, 1, 1, 1]]
        assert archive.read(archive.get("0/fc@1/output")).tolist() == [[3, 3, 3, 3]]


@pytest.mark.spec("ALN-310")
def test_what_a_graph_was_exported_with_around_the_model_is_left_out_of_names(tmp_path: Path) -> None:
    class Wrapper(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, ids: Any) -> Any:
            states = self.net(ids)
            return states, states.mean(1)

    net, ids = made("encoder")
    capture_workload(tensorcap.Workload(net, (ids,)), tmp_path / "ref.h5")
    wrong, _ = made("encoder")
    nn.init.normal_(wrong.embed.weight)  # from here on no value says what belongs together
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(Wrapper(wrong), (ids,), tmp_path / "net.onnx", dynamo=False)
    comparison = compare(tmp_path / "ref.h5", target(tmp_path / "net.onnx", "encoder"))
    assert comparison.divergence is not None
    assert comparison.divergence.module == "embed"
    compared = {p.key for p in comparison.pairs if p.is_compared}
    assert {"0/layers.1.attn.q/output", "0/layers.0.up/output"} <= compared
