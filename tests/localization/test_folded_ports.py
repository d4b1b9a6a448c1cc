"""Ports that fold factors into weights accuse nobody for it, beside a mistake in all layers either."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn

from tensorcap.alignment import align, aligned_sides
from tensorcap.comparison import compare
from tensorcap.localization import gather_evidence, localize
from tensorcap.session import capture_workload
from tensorcap.workload import Workload
from tensorcap_formats.open import opened_both
from tests.zoo.catalogue import ALL_ENTRIES
from tests.zoo.entry import build

WIDTH: Final = 24
INNOCENT: Final = (
    "embed",
    "norm",
    "head",
    *(f"layers.{i}.mixer{end}" for i in (0, 1) for end in ("", ".out")),
)


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        return self.out(torch.tanh(self.into(x)).cumsum(1) / 4)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 5) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        return nn.functional.gelu(x @ self.up) @ self.down


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.mixer, self.norm2, self.mlp = norm(), Mixer(), norm(), Experts()

    def forward(self, x: torch.Tensor) -> Any:
        x = x + 0.3 * self.mixer(self.norm1(x))
        return x + 0.3 * self.mlp(self.norm2(x))


def norm() -> Any:
    made = nn.LayerNorm(WIDTH)
    nn.init.uniform_(made.weight, 0.4, 2.0)
    return made


class Model(nn.Module):
    """Multipliers of embeddings, of residuals and of logits, all behind their modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(40, WIDTH), nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = norm(), nn.Linear(WIDTH, 40, bias=False)

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.embed(ids) * 6
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) / 4


class PortedBlock(nn.Module):
    """A layer of which the experts' weights are its own."""

    def __init__(self, layer: Any, *, is_right: bool) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (
            linear(layer.mixer.into, 1),
            linear(layer.mixer.out, 0.3),
            *norms(layer),
        )
        self.up, self.down = nn.Parameter(layer.mlp.up.data), nn.Parameter(0.3 * layer.mlp.down.data)
        self.act: Any = nn.functional.gelu if is_right else nn.functional.relu

    def forward(self, x: torch.Tensor) -> Any:
        x = x + self.b(torch.tanh(self.a(self.c(x))).cumsum(1) / 4)
        return x + self.act(self.d(x) @ self.up) @ self.down


def linear(layer: Any, factor: float) -> Any:
    made = nn.Linear(WIDTH, layer.out_features, bias=False)
    made.weight.data = factor * layer.weight.data
    return made


def norms(layer: Any) -> tuple[Any, Any]:
    return layer.norm1, layer.norm2


class Port(nn.Module):
    """Embeddings are six times as large, what is added is 0.3 of it, and logits a quarter, all in weights."""

    def __init__(self, model: Any, *, is_right: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(40, WIDTH)
        self.table.weight.data = 6 * model.embed.weight.data
        self.stack = nn.Sequential(*(PortedBlock(layer, is_right=is_right) for layer in model.layers))
        self.last, self.out = model.norm, linear(model.head, 0.25)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.out(self.last(self.stack(self.table(tokens))))


@pytest.fixture(scope="module", params=[True, False], ids=["right", "wrong"])
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[bool, Workload, Workload, Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    torch.manual_seed(8)
    model, ids = Model().eval(), torch.randint(40, (2, 10))
    reference = Workload(model, {"ids": ids})
    target = Workload(Port(model, is_right=request.param).eval(), {"tokens": ids})
    capture_workload(reference, folder / "ref.h5")
    capture_workload(target, folder / "tgt.h5")
    return request.param, reference, target, folder / "ref.h5", folder / "tgt.h5"


@pytest.mark.spec("CMP-260", "LCL-263")
@pytest.mark.parametrize("way", ["archives", "replay", "injection"])
def test_nobody_is_accused_of_a_multiplier_in_the_weights(
    way: str, runs: tuple[bool, Workload, Workload, Path, Path]
) -> None:
    is_right, reference, target, *archives = runs
    models: dict[str, Any] = {
        "archives": {},
        "replay": {"reference_model": reference},
        "injection": {"target_model": target},
    }[way]
    with ExitStack() as stack:
        trusted, tested = stack.enter_context(opened_both(*archives))
        ours, theirs, aligned = aligned_sides(trusted, tested, None)
        free = compare(ours, theirs, mapping="none")
        gathered = gather_evidence(
            stack, trusted, tested, free, compared=(ours, theirs), aligned=aligned, **models
        )
    accused = [one.module for source in gathered.sources for one in source.evidence]
    assert not set(accused) & set(INNOCENT)
    assert (accused == []) is is_right
    assert all(module.startswith("layers.") for module in accused)


class Branch(nn.Module):
    """A residual branch whose multiplier is in its weights, behind them, or both."""

    def __init__(self, *, is_folded: bool, behind: float) -> None:
        super().__init__()
        self.norm, self.into, self.out = norm(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if is_folded:
            for one in self.out.parameters():
                one.data *= 0.3
        self.behind = behind

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.behind * self.out(torch.tanh(self.into(self.norm(x))))


def branches(*behind: float, is_folded: bool = True) -> Any:
    torch.manual_seed(8)
    return nn.Sequential(*(Branch(is_folded=is_folded, behind=one) for one in behind)).eval()


@pytest.mark.spec("LCL-263")
@pytest.mark.parametrize("way", ["replay", "injection", "both"])
@pytest.mark.parametrize("wrong", [0, 2])
def test_a_multiplier_in_the_weights_and_behind_them_is_a_mistake(
    way: str, wrong: int, tmp_path: Path
) -> None:
    """Of one layer; in others the weights alone have it."""
    x = torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(3))
    behind = [1.0, 1.0, 1.0]
    behind[wrong] = 0.3
    reference = Workload(branches(0.3, 0.3, 0.3, is_folded=False), (x,))
    target = Workload(branches(*behind), (x,))
    capture_workload(reference, tmp_path / "ref.h5")
    capture_workload(target, tmp_path / "tgt.h5")
    found = localize(
        tmp_path / "ref.h5",
        tmp_path / "tgt.h5",
        reference_model=None if way == "injection" else reference,
        target_model=None if way == "replay" else target,
    )
    expected = str(wrong) if way == "injection" else f"{wrong}.out"
    assert [suspect.module for suspect in found.suspects] == [expected]


@pytest.mark.spec("CMP-260")
def test_the_first_divergence_is_the_mistake(runs: tuple[bool, Workload, Workload, Path, Path]) -> None:
    is_right, _, _, *archives = runs
    comparison = compare(*archives)
    assert comparison.exit_status == (not is_right)
    first = "" if comparison.divergence is None else comparison.divergence.module
    assert first == ("" if is_right else "layers.0")


@pytest.mark.spec("ALN-140")
def test_layers_are_paired_by_parameters_within_and_not_with_experts_whose_weights_they_hold(
    tmp_path: Path,
) -> None:
    torch.manual_seed(8)
    model, ids = Model().eval(), torch.randint(40, (2, 10))
    port: Any = Port(model, is_right=True).eval()
    port.table.weight.data = port.table.weight.data.flip(0)  # all values differ
    layers: Any = model.layers
    port.stack[1].down.data = layers[1].mlp.down.data  # which the factor is forgotten in
    capture_workload(Workload(model, {"ids": ids}), tmp_path / "ref.h5")
    capture_workload(Workload(port, {"tokens": ids}), tmp_path / "tgt.h5")
    sources = align(tmp_path / "ref.h5", tmp_path / "tgt.h5").target.sources
    keys = [f"0/layers.{at}{part}/output" for at in (0, 1) for part in ("", ".mlp")]
    partners = [[source.key.text for source in sources.get(key, ())] for key in keys]
    assert partners == [["0/stack.0/output"], [], ["0/stack.1/output"], []]


class Body(nn.Module):
    """Layers and a norm."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.layers, self.norm = model.layers, model.norm

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Shifted(nn.Module):
    """A norm that keeps its weight minus one."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(made.weight.data - 1), nn.Parameter(made.bias.data + 0.1)

    def forward(self, x: torch.Tensor) -> Any:
        return nn.functional.layer_norm(x, (WIDTH,), self.weight + 1, self.bias - 0.1)


@pytest.mark.spec("ALN-311")
def test_a_model_that_ends_with_a_norm_is_not_the_stack_that_ends_with_a_layer(tmp_path: Path) -> None:
    torch.manual_seed(8)
    model, ids = Model().eval(), torch.randint(40, (2, 10))
    reference = nn.Sequential(model.embed, Body(model), model.head).eval()
    port = Port(model, is_right=False).eval()
    port.last = Shifted(model.norm)
    capture_workload(Workload(reference, {"input": ids}), tmp_path / "ref.h5")
    capture_workload(Workload(port, {"tokens": ids}), tmp_path / "tgt.h5")
    sources = align(tmp_path / "ref.h5", tmp_path / "tgt.h5").target.sources
    assert [source.key.text for source in sources["0/1.norm/output"]] == ["0/last/output"]


@pytest.mark.slow
@pytest.mark.spec("ALN-311")
def test_what_hands_on_a_part_of_the_last_module_lacks_the_rest_of_it(tmp_path: Path) -> None:
    """A tower of images whose head adds nothing to what its feed-forward makes, and has its query folded."""
    pair = build(ALL_ENTRIES["siglip_probe_without_residual"], "float32")
    capture_workload(pair.reference, tmp_path / "ref.h5")
    capture_workload(pair.target, tmp_path / "tgt.h5")
    found = localize(tmp_path / "ref.h5", tmp_path / "tgt.h5")
    assert [suspect.module for suspect in found.suspects] == ["vision_model.head"]
