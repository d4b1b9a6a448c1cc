"""The data-flow graph: attention recomputed from it, its edges, and what a damaged archive says."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tensorcap
from tensorcap.alignment import Alignment, Entry, sides
from tensorcap.runs import Graph
from tensorcap_formats.errors import CorruptArchiveError, ReadError, TensorNotFoundError
from tests.support.archives import new_archive
from tests.support.transformers_models import LLAMA, random_model

IDS = torch.tensor([[3, 7, 11, 13, 17, 19], [23, 29, 31, 37, 41, 43]])


def llama(attention: str, *, heads: int = 4) -> Any:
    sizes = {**LLAMA, "num_key_value_heads": heads, "max_position_embeddings": 64}
    return random_model("LlamaModel", **sizes, attn_implementation=attention)


def probabilities(graph: Graph, node: Any) -> np.ndarray[Any, Any]:
    """Softmax of the scores of fused attention in float64, from what the op was given."""
    q, k = (graph.read(node.input(name)).astype("f8") for name in ("query", "key"))
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)  # grouped heads
    scores = q @ np.swapaxes(k, -1, -2) * node.arguments["scale"]
    if any(value.name == "attn_mask" for value in node.inputs):
        mask = graph.read(node.input("attn_mask"))
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    scores = np.maximum(scores, -1e30)  # what is masked everywhere has equal scores
    if node.arguments.get("is_causal"):
        scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -1e30)
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("padded", [False, True])
def test_probabilities_of_fused_attention_equal_those_of_the_eager_model(
    tmp_path: Path, heads: int, padded: bool, grad: Callable[[], AbstractContextManager[None]]
) -> None:
    fused, eager = llama("sdpa", heads=heads), llama("eager", heads=heads)
    eager.load_state_dict(fused.state_dict())
    mask = torch.ones_like(IDS)
    if padded:
        mask[1, :2] = 0
    with grad():
        expected = eager(IDS, attention_mask=mask, output_attentions=True).attentions
        with tensorcap.capture(fused, tmp_path / "a.h5", level="op", ops_in="layers.*.self_attn"):
            fused(IDS, attention_mask=mask)
    with tensorcap.open_archive(tmp_path / "a.h5") as archive:
        graph = Graph.of(archive)
        nodes = [node for node in graph.nodes if "scaled_dot_product" in node.op]
        assert [node.op for node in nodes] == 2 * [
            "aten._scaled_dot_product_flash_attention_for_cpu.default"
            if grad is torch.no_grad
            else "aten.scaled_dot_product_attention.default"
        ]
        for layer, (node, eager_probabilities) in enumerate(zip(nodes, expected, strict=True)):
            assert node.module == f"layers.{layer}.self_attn"
            assert node.class_name == "LlamaAttention"
            assert str(node.file).endswith("sdpa_attention.py")
            found = probabilities(graph, node)
            rows = slice(2, None) if padded else slice(None)  # padding has no row of its own to look at
            assert found.shape == (2, 4, 6, 6)
            assert np.abs(found[:, :, rows].sum(-1) - 1).max() < 1e-9
            assert np.abs(found - eager_probabilities.numpy())[:, :, rows].max() < 1e-6


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.up(x).relu()


@pytest.fixture
def residual(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "ref.h5"
    with torch.no_grad(), tensorcap.capture(Residual(), path, level="op", params=True) as cap:
        cap._model(torch.ones(1, 4))
    return path


def test_producers_and_consumers_follow_the_data(residual: Path) -> None:
    with tensorcap.open_archive(residual) as archive:
        graph = Graph.of(archive)
        transpose, product, relu, add = graph.nodes
        assert [node.order for node in graph.nodes] == sorted(node.order for node in graph.nodes)
        assert graph.producer(product.input("mat2")) is transpose
        assert graph.producer(relu.input("self")) is product
        assert graph.producer(add.input("other")) is relu
        assert graph.producer(add.input("self")) is None
        assert graph.producer(transpose.input("self")) is None
        assert graph.consumers("0/@root/input.x") == (product, add)
        assert graph.consumers("0/up:aten.mm.default/output") == (relu,)
        assert graph.consumers("0/@root:aten.add.Tensor/output") == ()
        assert graph.node("0/up:aten.mm.default/output") is graph.node("0/up:aten.mm.default") is product


def test_weights_are_read_from_their_own_records(residual: Path) -> None:
    with tensorcap.open_archive(residual) as archive:
        graph = Graph.of(archive)
        weight = archive.load(archive.get("0/up/param.weight"))
        transpose, product, *_ = graph.nodes
        assert np.array_equal(graph.read(transpose.input("self")), weight)
        assert np.array_equal(graph.read(product.input("mat2")), weight.T)
        assert np.array_equal(graph.read("0/up:aten.t.default/output"), weight.T)
        assert np.allclose(graph.read(product.outputs[0]), np.ones((1, 4)) @ weight.T)


def test_what_is_not_there_is_named_with_near_names(residual: Path, tmp_path: Path) -> None:
    with tensorcap.open_archive(residual) as archive:
        graph = Graph.of(archive)
        with pytest.raises(TensorNotFoundError, match="no tensor 'mat1' among 2") as caught:
            graph.nodes[1].input("mat1")
        assert caught.value.hint == "Did you mean 'mat2'?"
        with pytest.raises(TensorNotFoundError, match=r"'0/up:aten.mm.defalt'"):
            graph.node("0/up:aten.mm.defalt")
    path = tmp_path / "no_params.h5"
    model = Residual()
    with torch.no_grad(), tensorcap.capture(model, path, level="op"):
        model(torch.ones(1, 4))
    with tensorcap.open_archive(path) as archive:
        graph = Graph.of(archive)
        with pytest.raises(TensorNotFoundError, match=r"holds no parameter 'up.weight'") as caught:
            graph.read(graph.nodes[1].input("mat2"))
        assert caught.value.hint == "Capture with --params."
    with torch.no_grad(), tensorcap.capture(model, path):
        model(torch.ones(1, 4))
    with tensorcap.open_archive(path) as archive, pytest.raises(TensorNotFoundError, match="holds no ops"):
        Graph.of(archive)


def test_a_parameter_that_was_written_to_is_not_read_from_its_earlier_record(tmp_path: Path) -> None:
    model: Any = Residual()
    with torch.no_grad(), tensorcap.capture(model, tmp_path / "a.h5", level="op", params=True):
        model(torch.ones(1, 4))
        model.up.weight.mul_(2)
        model(torch.ones(1, 4))
    with tensorcap.open_archive(tmp_path / "a.h5") as archive:
        graph = Graph.of(archive)
        first, second = (node for node in graph.nodes if node.op == "aten.t.default")
        graph.read(first.input("self"))
        with pytest.raises(TensorNotFoundError, match=r"'up\.weight' was written to 1 times before"):
            graph.read(second.input("self"))


FACTS = {
    "op": "aten.t.default",
    "order": 1,
    "module": "fc",
    "module_call": 0,
    "class": "Linear",
    "inputs": [],
    "arguments": {},
}
VIEW = {"slot": "output", "view_of": "0/fc/x", "shape": [2], "strides": [1], "offset": 2, "dtype": "float32"}


def written(path: Path, output: Any) -> tensorcap.Archive:
    facts = {"0/fc:aten.t.default/op": {**FACTS, "outputs": [output]}}
    return new_archive(path, {"0/fc/x": np.arange(4, dtype="<f4")}, values=facts)


@pytest.mark.spec("CAP-13")
@pytest.mark.parametrize(
    ("change", "values"),
    [
        pytest.param({}, [2, 3], id="offset"),
        pytest.param({"shape": [2, 2], "strides": [1, 2], "offset": 0}, [[0, 2], [1, 3]], id="transposed"),
        pytest.param({"shape": [3, 2], "strides": [0, 3], "offset": 0}, 3 * [[0, 3]], id="expanded"),
        pytest.param({"shape": [2, 3], "strides": [1, 1], "offset": 0}, [[0, 1, 2], [1, 2, 3]], id="overlap"),
        pytest.param({"dtype": "uint8", "offset": 6}, [128, 63], id="bytes of 1.0"),
        pytest.param({"shape": [], "strides": [], "offset": 3}, 3, id="number"),
        pytest.param({"dtype": "float64", "shape": [1], "offset": 1}, [32 + 2**-17], id="wider"),
    ],
)
def test_a_view_is_read_as_specified(tmp_path: Path, change: dict[str, Any], values: Any) -> None:
    with written(tmp_path / "a.h5", {**VIEW, **change}) as archive:
        assert Graph.of(archive).read("0/fc:aten.t.default/output").tolist() == values


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"offset": 3}, "has 16 bytes, and a view of it goes to byte 20", id="beyond-the-end"),
        pytest.param({"shape": [1 << 40], "strides": [1 << 40]}, "goes to byte", id="far-beyond"),
        pytest.param({"shape": [1 << 62], "strides": [0]}, "does not fit into memory", id="huge"),
        pytest.param({"offset": -1}, "expected whole numbers", id="negative"),
        pytest.param({"shape": [2, 2]}, "2 axes and 1 strides", id="axes"),
        pytest.param({"dtype": "float33"}, "'float33'", id="dtype"),
        pytest.param({"record": "0/fc/x"}, "refers to 2 tensors", id="two-bases"),
        pytest.param({"view_of": 7}, "refers to", id="no-text"),
    ],
)
def test_a_view_that_cannot_be_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with (
        written(tmp_path / "a.h5", {**VIEW, **change}) as archive,
        pytest.raises(ReadError, match=message),
    ):
        Graph.of(archive).read("0/fc:aten.t.default/output")


@pytest.mark.parametrize("kind", ["view", "record"])
def test_an_output_that_refers_to_another_op_is_refused(tmp_path: Path, kind: str) -> None:
    with (
        written(tmp_path / "a.h5", {"slot": "output", kind: "0/fc:aten.t.default/output.1"}) as archive,
        pytest.raises(CorruptArchiveError, match="refers to that of another op"),
    ):
        Graph.of(archive)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.fc = nn.Linear(4, 4)

    def forward(self, ids: Any) -> Any:
        rows = self.embed(ids)
        return self.fc(rows + rows)


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Any) -> Any:
        return self.inner(ids)


def embedded_and_wrapped(tmp_path: Path) -> tuple[Path, Path]:
    """Two captures of one model at level op: as it is, and as the module `inner` of another."""
    torch.manual_seed(0)
    model = Embedded()
    paths = tmp_path / "ref.h5", tmp_path / "tgt.h5"
    for path, port in zip(paths, (model, Wrapped(model)), strict=True):
        with torch.no_grad(), tensorcap.capture(port, path, level="op"):
            port(torch.tensor([[1, 2, 4]]))
    return paths


def test_ops_of_a_wrapped_model_are_compared_with_those_of_the_bare_one(tmp_path: Path) -> None:
    comparison = tensorcap.compare(*embedded_and_wrapped(tmp_path))
    statuses = {pair.key: pair.status for pair in comparison.pairs}
    for key in (
        "0/embed:aten.embedding.default/output",
        "0/@root:aten.add.Tensor/output",
        "0/fc:aten.addmm.default/output",
    ):
        assert statuses[key] == "identical"


def test_references_between_ops_are_renamed_with_their_records(tmp_path: Path) -> None:
    reference, target = embedded_and_wrapped(tmp_path)
    with tensorcap.open_archive(reference) as trusted, tensorcap.open_archive(target) as tested:
        bare, mapped = (Graph.of(archive) for archive in sides(trusted, tested))
        node = mapped.node("0/@root:aten.add.Tensor")
        assert [(value.name, value.key) for value in node.inputs] == [
            ("self", "0/embed:aten.embedding.default/output"),
            ("other", "0/embed:aten.embedding.default/output"),
        ]
        assert (node.module, mapped.node("0/fc:aten.addmm.default").module) == ("@root", "fc")
        assert [value.parameter for value in mapped.node("0/embed:aten.embedding.default").inputs] == [
            "embed.weight",
            None,
        ]
        for value, own in zip(node.inputs, bare.node(node.where).inputs, strict=True):
            assert np.array_equal(mapped.read(value), bare.read(own))


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param({"outputs": [{"slot": "output", "record": "0/a b//"}]}, id="no-key"),
        pytest.param({"inputs": [7], "outputs": []}, id="no-reference"),
        pytest.param({"inputs": "x", "outputs": []}, id="no-list"),
    ],
)
def test_damaged_references_are_refused_in_a_view_as_in_the_archive(
    tmp_path: Path, facts: dict[str, Any]
) -> None:
    values = {"0/tgt:aten.t.default/op": {**FACTS, **facts}}
    reference = new_archive(tmp_path / "a.h5", {"0/ref:aten.t.default/output": np.zeros(2)})
    target = new_archive(tmp_path / "b.h5", {"0/tgt:aten.t.default/output": np.zeros(2)}, values=values)
    mapping = Alignment((Entry(("ref:aten.t.default",), ("tgt:aten.t.default",)),))
    with reference, target:
        _, mapped = sides(reference, target, mapping)
        for archive in (target, mapped):
            with pytest.raises(CorruptArchiveError, match="is not as specified"):
                Graph.of(archive)
