"""Weights of two models, held against each other without a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensorcap
from tensorcap.diagnosis import diagnose
from tensorcap.localization import WeightComparison, compare_weights, ranking, weights
from tensorcap.port_verification import Runnable, verify
from tensorcap.reports.verification_text import weights_text
from tensorcap.workload import Workload
from tests.support.progress import RecordedProgress

X = torch.linspace(-1, 1, 12).reshape(2, 6)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)
        self.spare = nn.Linear(3, 3, bias=False)  # never called

    def forward(self, x: Tensor) -> Any:
        return self.down(torch.relu(self.up(x)))

    @staticmethod
    def layer(seed: int) -> nn.Linear:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return nn.Linear(24, 24)


class Product(nn.Module):
    """A product that holds its weight the other way round."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().T.contiguous())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def model() -> Any:
    torch.manual_seed(0)
    return Model().eval()


def changed(name: str, factor: float) -> Any:
    made = model()
    with torch.no_grad():
        made.get_parameter(name).mul_(factor)
    return made


@pytest.mark.spec("VER-6")
def test_the_same_numbers_are_the_same(tmp_path: Path) -> None:
    found = compare_weights(model(), model())
    assert found is not None
    assert (found.comparison.compared, found.unlike, found.diagnosis, found.exit_status) == (3, (), None, 0)


@pytest.mark.spec("VER-6", "VER-31")
def test_the_worst_of_those_that_differ_comes_first_with_what_it_is() -> None:
    port = changed("up.weight", 1.01)
    with torch.no_grad():
        port.down.weight.mul_(3)
    found = compare_weights(model(), port)
    assert found is not None
    assert [pair.key for pair in found.unlike] == ["0/down/param.weight", "0/up/param.weight"]
    assert found.diagnosis is not None
    assert "times 3" in found.diagnosis.explanations[0].text
    assert found.exit_status == 1


@pytest.mark.spec("VER-6")
def test_a_weight_that_lies_the_other_way_round_is_the_same() -> None:
    port = model()
    port.up, port.down = Product(port.up.weight), Product(port.down.weight)
    found = compare_weights(model(), port)
    assert found is not None
    assert (found.comparison.compared, found.unlike) == (3, ())
    with torch.no_grad():
        port.down.weight[3, 2] += 0.5
    found = compare_weights(model(), port)
    assert found is not None
    assert [pair.key for pair in found.unlike] == ["0/down/param.weight"]


@pytest.mark.spec("VER-6")
def test_a_weight_without_a_counterpart_is_counted_and_no_failure() -> None:
    port = model()
    port.down.bias = nn.Parameter(torch.zeros(6))
    found = compare_weights(port, model())
    assert found is not None
    assert (found.comparison.records, found.comparison.compared, found.exit_status) == (4, 3, 0)


@pytest.mark.spec("VER-621")
def test_a_wrong_weight_is_that_of_the_module_whose_bias_belongs_there() -> None:
    def layers() -> nn.ModuleList:
        return nn.ModuleList(Model.layer(seed) for seed in range(3))

    port = nn.ModuleDict({"0": nn.ModuleDict({"core": layers()})})
    with torch.no_grad():
        port.get_parameter("0.core.1.weight").copy_(port.get_parameter("0.core.2.weight").flip(0))
    found = compare_weights(nn.ModuleDict({"blocks": layers()}), port)
    assert found is not None
    assert [pair.key for pair in found.unlike] == ["0/blocks.1/param.weight"]
    assert found.not_compared == {}


@pytest.mark.spec("VER-6", "VER-31")
def test_a_weight_that_was_not_compared_is_named_with_the_reason() -> None:
    port = model()
    port.down.bias = nn.Parameter(torch.zeros(6))
    found = compare_weights(port, model())
    assert found is not None
    assert found.not_compared == {"0/down/param.bias": "the target has none of that name, shape or values"}
    assert found.to_json()["not_compared"] == dict(found.not_compared)
    found = compare_weights(model(), port)
    assert found is not None
    assert found.not_compared == {"0/down/param.bias": "only the target has it"}


@pytest.mark.spec("VER-33")
def test_weights_that_are_rounded_are_not_told_as_the_same() -> None:
    assert weights_text(compared(model(), model())).endswith(" compared, all of them the same numbers.")
    in_bfloat16 = model().to(torch.bfloat16)
    told = " compared, all of them the same numbers, 3 of them but for rounding, as to few bits."
    assert weights_text(compared(model(), in_bfloat16)).endswith(told)


def compared(reference: nn.Module, target: nn.Module) -> WeightComparison:
    found = compare_weights(reference, target)
    assert found is not None
    return found


def attention(names: Sequence[str], weights: Sequence[int]) -> nn.Module:
    """Projections under these names, each with the weights of that number."""
    net = nn.Module()
    net.attention = nn.Module()
    for name, number in zip(names, weights, strict=True):
        generator = torch.Generator().manual_seed(number)
        layer = nn.Linear(8, 8, bias=False)
        layer.weight = nn.Parameter(torch.randn(8, 8, generator=generator))
        setattr(net.attention, name, layer)
    return net


@pytest.mark.spec("VER-6", "VER-31")
def test_weights_under_the_name_of_another_projection_are_said_to_be_so() -> None:
    reference = attention(("query", "key", "value"), (1, 2, 3))
    found = compare_weights(reference, attention(("to_q", "to_k", "to_v"), (2, 1, 3)))
    assert found is not None
    exchanged = {"attention.query": "attention.to_k", "attention.key": "attention.to_q"}
    assert (found.unlike, found.exchanged) == ((), exchanged)
    assert found.to_json()["exchanged"] == exchanged
    told = "attention.to_q has those of attention.key, attention.to_k has those of attention.query"
    assert found.exchanged_text == told
    port = attention(("to_q", "to_k", "to_v", "out"), (2, 1, 3, 5))
    found = compare_weights(attention(("query", "key", "value", "out"), (1, 2, 3, 4)), port)
    assert found is not None
    assert [pair.key for pair in found.unlike] == ["0/attention.out/param.weight"]
    assert weights_text(found).endswith(f" Not by name: {told}.")
    found = compare_weights(reference, attention(("to_q", "to_k", "to_v"), (1, 2, 3)))
    assert found is not None
    assert (found.unlike, found.exchanged) == ((), {})


class Experts(nn.Module):
    """Two layers of experts, all of a layer in one tensor, or their matrices apart as in checkpoints."""

    def __init__(self, *, is_apart: bool, is_transposed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList()
        for _ in range(2):
            both, down = torch.randn(5, 2 * 12, 8), torch.randn(5, 8, 12)
            layer = nn.Module()
            if is_apart:
                layer.experts = nn.ModuleList()
                for at in range(5):
                    expert = nn.Module()
                    for name, matrix in (("w1", both[at, :12]), ("w2", down[at]), ("w3", both[at, 12:])):
                        setattr(expert, name, nn.Parameter(matrix.clone()))
                    layer.experts.append(expert)
            else:
                layer.moe = nn.Module()
                layer.moe.wi = nn.Parameter((both.mT if is_transposed else both).contiguous())
                layer.moe.wo = nn.Parameter(down)
            self.layers.append(layer)


@pytest.mark.spec("VER-6")
@pytest.mark.parametrize("is_transposed", [False, True])
def test_experts_in_one_tensor_are_compared_with_two_matrices_an_expert(is_transposed: bool) -> None:
    apart, whole = Experts(is_apart=True), Experts(is_apart=False, is_transposed=is_transposed)
    for sides in ((apart, whole), (whole, apart)):
        found = compare_weights(*sides)
        assert found is not None
        assert (found.not_compared, found.unlike) == ({}, ())
        assert found.comparison.compared == found.comparison.records
    with torch.no_grad():
        apart.get_parameter("layers.1.experts.3.w3").mul_(2)
    found = compare_weights(apart, whole)
    assert found is not None
    assert [pair.key for pair in found.unlike] == ["0/layers.1.experts.3/param.w3"]
    found = compare_weights(whole, apart)
    assert found is not None
    assert [pair.key for pair in found.unlike] == ["0/layers.1.moe/param.wi"]


def stacks(names: tuple[str, str], *, is_apart: bool, swapped: tuple[int, ...] = ()) -> nn.Module:
    """Three layers of four experts: gate and up in one tensor, or apart under two names, some exchanged."""
    generator = torch.Generator().manual_seed(3)
    net = nn.Module()
    net.layers = nn.ModuleList()
    for number in range(3):
        layer, gate_up = nn.Module(), torch.randn(4, 12, 5, generator=generator)
        if is_apart:
            layer.experts = nn.ModuleList(nn.Module() for _ in range(4))
            for expert, matrices in zip(layer.experts, gate_up, strict=True):
                halves = matrices.chunk(2)[:: -1 if number in swapped else 1]
                for name, matrix in zip(names, halves, strict=True):
                    setattr(expert, name, nn.Parameter(matrix.clone()))
        else:
            layer.gate_up_proj = nn.Parameter(gate_up)
        net.layers.append(layer)
    return net


@pytest.mark.spec("VER-6")
@pytest.mark.parametrize("is_apart", [True, False])
@pytest.mark.parametrize(
    ("names", "swapped", "wrong"),
    [
        pytest.param(("gate", "up"), (), [], id="right"),
        pytest.param(("gate", "up"), (1,), [1], id="one layer"),
        pytest.param(("up_proj", "gate_proj"), (), [0, 1, 2], id="all layers, by their names"),
        pytest.param(("w3", "w1"), (2,), [2], id="one layer of three without words"),
        pytest.param(("w3", "w1"), (), [], id="names without words"),
    ],
)
def test_exchanged_matrices_of_experts_are_unlike_in_their_own_layer(
    names: tuple[str, str], swapped: tuple[int, ...], wrong: list[int], is_apart: bool
) -> None:
    apart, whole = stacks(names, is_apart=True, swapped=swapped), stacks(names, is_apart=False)
    found = compare_weights(apart, whole) if is_apart else compare_weights(whole, apart)
    assert found is not None
    assert sorted({int(pair.key.split(".")[1].split("/")[0]) for pair in found.unlike}) == wrong
    assert found.not_compared == {}


@pytest.mark.spec("VER-6")
@pytest.mark.parametrize("wrong", [0, 1])
def test_transposed_matrices_of_experts_are_unlike_in_their_own_layer_of_two(wrong: int) -> None:
    generator = torch.Generator().manual_seed(5)
    whole, apart = nn.Module(), nn.Module()
    whole.layers, apart.layers = nn.ModuleList(), nn.ModuleList()
    for number in range(2):
        down = torch.randn(4, 6, 6, generator=generator)
        layer, other = nn.Module(), nn.Module()
        layer.down_proj = nn.Parameter(down)
        other.experts = nn.ModuleList(nn.Module() for _ in range(4))
        for expert, matrix in zip(other.experts, down.mT if number == wrong else down, strict=True):
            expert.down = nn.Parameter(matrix.clone().contiguous())
        whole.layers.append(layer)
        apart.layers.append(other)
    found = compare_weights(whole, apart)
    assert found is not None
    assert [pair.key for pair in found.unlike] == [f"0/layers.{wrong}/param.down_proj"]


@pytest.mark.spec("VER-6")
@pytest.mark.parametrize("params", [True, False])
def test_an_archive_stands_for_the_reference_if_it_holds_parameters(tmp_path: Path, params: bool) -> None:
    reference = model()
    with torch.no_grad(), tensorcap.capture(reference, tmp_path / "ref.h5", params=params):
        reference(X)
    with tensorcap.open_archive(tmp_path / "ref.h5") as archive:
        found = compare_weights(archive, changed("up.weight", 2.0))
    if params:
        assert found is not None
        assert [pair.key for pair in found.unlike] == ["0/up/param.weight"]
        assert found.comparison.records == 3
    else:
        assert found is None


@pytest.mark.spec("VER-6")
def test_a_model_without_parameters_is_not_looked_at() -> None:
    assert compare_weights(nn.ReLU(), model()) is None
    assert compare_weights(model(), nn.ReLU()) is None


def named_modules(names: tuple[str, str, str], banks: list[Tensor], head: Tensor, norm: Tensor) -> nn.Module:
    """Two layers with a bank of four matrices each, a norm's weight and a head, under names of their own."""
    layers, bank, last = names
    net = nn.Module()
    stack = nn.ModuleList(nn.Module() for _ in banks)
    for layer, matrices in zip(stack, banks, strict=True):
        setattr(layer, bank, nn.Parameter(matrices.clone()))
    for name, part in ((layers, stack), (last, nn.Module()), (f"{last}_norm", nn.Module())):
        net.add_module(name, part)
    getattr(net, last).weight = nn.Parameter(head)
    getattr(net, f"{last}_norm").weight = nn.Parameter(norm)
    return net


@pytest.mark.spec("VER-240")
def test_what_is_wrong_with_weights_is_known_of_each_module_that_has_them() -> None:
    generator = torch.Generator().manual_seed(7)
    banks = [torch.randn(4, 6, 5, generator=generator) for _ in range(2)]
    head, norm = torch.randn(16, 6, generator=generator), 1 + 0.1 * torch.randn(6, generator=generator)
    coarse = head.to(torch.float8_e4m3fn).to(torch.bfloat16).float()
    ours = named_modules(("layers", "experts", "head"), banks, head, norm)
    theirs = named_modules(("stages", "inward", "predict"), [b.roll(1, 0) for b in banks], coarse, norm)
    found = compare_weights(ours, theirs)
    assert found is not None
    assert sorted(p.key for p in found.unlike) == [f"0/layers.{i}/param.experts" for i in (0, 1)]
    for i in (0, 1):
        explained = found.explain(f"layers.{i}")
        assert explained is not None
        assert explained.explanations[0].text == (
            "in its parameter experts rows of the target are those of the reference in another order: "
            "rolled by 1"
        )
    rounded = found.explain("head")  # the only one of its shape that is left on both sides
    assert rounded is not None
    assert rounded.explanations[0].text == (
        "in its parameter weight the target is the reference rounded to float8_e4m3fn"
    )
    assert "0/head/param.weight" in found.not_compared  # it may be another one: no failure by itself
    assert found.explain("head_norm") is None
    same = compare_weights(ours, named_modules(("stages", "inward", "predict"), banks, head, norm))
    assert same is not None
    assert (same.unlike, same.not_compared, same.explain("layers.0")) == ((), {}, None)


@pytest.mark.spec("VER-240")
def test_what_is_wrong_with_a_layer_is_not_what_is_wrong_with_another_one() -> None:
    """Both are in another order, each in its own; the third has other values, in no order."""
    generator = torch.Generator().manual_seed(8)
    banks = [torch.randn(6, 7, 5, generator=generator) for _ in range(4)]
    wrong = [
        banks[0].roll(1, 0),
        banks[1].roll(2, 0),
        torch.randn(6, 7, 5, generator=generator) / 4,
        banks[3],
    ]
    head, norm = torch.randn(16, 6, generator=generator), torch.ones(6)
    names = "layers", "experts", "head"
    found = compare_weights(named_modules(names, banks, head, norm), named_modules(names, wrong, head, norm))
    assert found is not None
    assert len(found.unlike) == 3
    explained = [found.explain(f"layers.{layer}") for layer in range(4)]
    texts = [one.explanations[0].text.partition(" of the target ")[2] if one else "" for one in explained]
    order = "are those of the reference in another order: rolled by"
    assert texts == [f"{order} 1", f"{order} 2", "", ""]


@pytest.mark.spec("VER-240")
def test_a_few_parameters_are_diagnosed_by_all_hypotheses(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[str, bool]] = []

    def counted(ours: Any, theirs: Any, key: str, **options: Any) -> Any:
        tried.append((key, not options.get("without")))
        return diagnose(ours, theirs, key, **options)

    def net(name: str, factor: float) -> nn.Module:
        """Eight parts of a shape of their own, in each of two layers of the same shapes."""
        generator = torch.Generator().manual_seed(9)
        layers = nn.ModuleList(nn.Module() for _ in range(2))
        for layer in layers:
            for place in "abcdefgh":
                part = nn.Module()
                matrix = torch.randn(8, 10 + ord(place), generator=generator)
                part.weight = nn.Parameter(matrix * factor)
                layer.add_module(f"{name}_{place}", part)
        return nn.Sequential(layers)

    monkeypatch.setattr(weights, "diagnose", counted)
    found = compare_weights(net("proj", 1.0), net("dense", 1.25))
    assert found is not None
    by_all = [key for key, is_by_all in tried if is_by_all]
    assert len(by_all) == 3
    assert len(tried) == 6  # and each in the other layer
    for key, _ in tried:
        explained = found.explain(key.split("/")[1])
        assert explained is not None
        assert (
            explained.explanations[0].text == "in its parameter weight the target is the reference times 1.25"
        )


@pytest.mark.spec("VER-240")
def test_a_suspect_that_its_values_do_not_explain_is_explained_by_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorcap.adapters.torch.adapter import TorchAdapter

    describe = TorchAdapter.describe

    def of_another(self: Any, made: Any, **options: Any) -> Any:
        about = describe(self, made, **options)
        return {**about, "framework": {"name": "other"}} if made is port else about

    port = model()
    with torch.no_grad():
        port.up.weight.copy_(model().up.weight.roll(1, 0))
    monkeypatch.setattr(TorchAdapter, "describe", of_another)
    monkeypatch.setattr(ranking, "_diagnose", lambda *_, **__: None)
    run = Workload(port, (X,))
    found = verify(Workload(model(), (X,)), Runnable(lambda _: (run, {})), tmp_path / "report")
    suspect = found.localization.suspects[0]
    assert (suspect.module, suspect.cause) == ("up", "row-order")
    assert suspect.diagnosis is not None
    assert suspect.diagnosis.text.startswith("in its parameter weight rows of the target are those of the ")


@pytest.mark.spec("VER-6", "VER-31")
def test_weights_of_one_framework_are_not_looked_at(tmp_path: Path) -> None:
    found = verify(Workload(model(), (X,)), Workload(changed("up.weight", 2.0), (X,)), tmp_path / "report")
    assert found.weights is None
    assert '"weights": null' in (tmp_path / "report" / "verify.json").read_text()


@pytest.mark.spec("VER-6", "VER-40")
def test_wrong_weights_of_another_framework_are_reported_first_and_are_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorcap.adapters.torch.adapter import TorchAdapter

    progress = RecordedProgress()
    describe = TorchAdapter.describe

    def of_another(self: Any, made: Any, **options: Any) -> Any:
        about = describe(self, made, **options)
        return {**about, "framework": {"name": "other"}} if made is port else about

    port = changed("spare.weight", 2.0)
    monkeypatch.setattr(TorchAdapter, "describe", of_another)
    run = Workload(port, (X,))
    found = verify(
        Workload(model(), (X,)), Runnable(lambda _: (run, {})), tmp_path / "report", progress=progress
    )
    assert found.weights is not None
    assert (found.free.exit_status, found.exit_status) == (0, 1)
    assert found.summary[2].startswith("Weights: 3 of 3 parameters compared, 1 of them not the same numbers")
    assert progress.stages[:4] == [
        "capturing the reference",
        "comparing weights",
        "1 of 3 weights are not the same numbers; going on",
        "capturing the target",
    ]


def test_two_archives_are_opened_and_not_captured(tmp_path: Path) -> None:
    runs = tmp_path / "ref.h5", tmp_path / "tgt.h5"
    for path in runs:
        with torch.no_grad(), tensorcap.capture(traced := model(), path):
            traced(X)
    progress = RecordedProgress()
    verify(*runs, tmp_path / "report", progress=progress)
    assert progress.stages[:2] == ["opening the reference", "opening the target"]
