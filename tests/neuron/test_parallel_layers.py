"""What the classes of parallel layers say of their tensors, and how a port's application is run on a CPU.

Layers have the names and attributes of NxD's and no values that matter: ranks are those of the environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorcap
from tensorcap.adapters.neuron.model import inner_model, is_application
from tensorcap_formats.errors import UsageError


class Layer(nn.Module):
    """Returns its argument; has the attributes that it is given."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        return input_ * 1.5


class ColumnParallelLinear(Layer):
    pass


class RowParallelLinear(Layer):
    pass


class ParallelEmbedding(Layer):
    pass


class LmHead(ColumnParallelLinear):
    """A class of a port's own."""


def rules_of(net: nn.Module, path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, str]]:
    """The rule of each key that has one, and how it is known, as rank 0 of four records them."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    with tensorcap.capture(net, path / "a.h5", params=True):
        net(torch.ones(2, 8))
    with tensorcap.open_archive(path / "a.rank0.h5") as archive:
        assert archive.info.ranks is not None
        return {key: (e.rule, e.known) for e in archive.info.ranks.tensors for key in e.keys}


@pytest.mark.spec("NRN-151")
@pytest.mark.parametrize(
    ("layer", "argument", "result"),
    [
        (
            ColumnParallelLinear(gather_output=True),
            ("replicated", "ColumnParallelLinear"),
            ("replicated", "ColumnParallelLinear, gather_output true"),
        ),
        (
            ColumnParallelLinear(gather_output=False),
            ("replicated", "ColumnParallelLinear"),
            ("concat -1", "ColumnParallelLinear, gather_output false"),
        ),
        (
            ColumnParallelLinear(gather_output=False, stride=2),
            ("replicated", "ColumnParallelLinear"),
            ("concat -1 parts=2", "ColumnParallelLinear, gather_output false, stride 2"),
        ),
        (
            LmHead(gather_output=False, pad_size=3, output_size=32),
            ("replicated", "ColumnParallelLinear"),
            ("concat -1 cut=29", "ColumnParallelLinear, gather_output false, pad_size 3"),
        ),
        (
            ColumnParallelLinear(gather_output=False, sequence_parallel_enabled=True, sequence_dimension=1),
            None,
            ("concat -1", "ColumnParallelLinear, gather_output false"),
        ),
        (
            RowParallelLinear(input_is_parallel=True, reduce_output=True),
            ("concat -1", "RowParallelLinear, input_is_parallel true"),
            ("replicated", "RowParallelLinear, reduce_output true"),
        ),
        (
            RowParallelLinear(input_is_parallel=False, reduce_output=False),
            ("replicated", "RowParallelLinear, input_is_parallel false"),
            ("sum", "RowParallelLinear, reduce_output false"),
        ),
        (
            RowParallelLinear(
                input_is_parallel=True,
                reduce_output=True,
                sequence_parallel_enabled=True,
                sequence_dimension=1,
            ),
            ("concat -1", "RowParallelLinear, input_is_parallel true"),
            ("concat 1", "RowParallelLinear, sequence_parallel_enabled true"),
        ),
        (ParallelEmbedding(), None, ("replicated", "ParallelEmbedding")),
        (
            ParallelEmbedding(sequence_parallel_enabled=True, sequence_dimension=0),
            None,
            ("concat 0", "ParallelEmbedding, sequence_parallel_enabled true"),
        ),
        (ColumnParallelLinear(), None, None),  # of another library, which says nothing
        (RowParallelLinear(), None, None),
        (Layer(gather_output=False), None, None),
    ],
)
def test_a_class_and_its_attributes_say_what_ranks_hold(
    layer: nn.Module,
    argument: tuple[str, str] | None,
    result: tuple[str, str] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rules = rules_of(nn.Sequential(nn.Identity(), layer), tmp_path, monkeypatch)
    assert rules.get("0/1/input.input_") == argument
    assert rules.get("0/1/output") == result


@pytest.mark.spec("NRN-151")
def test_marks_of_parameters_say_along_which_axis_they_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Layer()
    marks: dict[str, dict[str, Any]] = {
        "columns": {"tensor_model_parallel": True, "partition_dim": 1, "partition_stride": 1},
        "fused": {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 2},
        "bias": {"tensor_model_parallel": False, "partition_dim": -1},
        "plain": {},
    }
    for name, values in marks.items():
        parameter = nn.Parameter(torch.zeros(4, 4))
        for mark, value in values.items():
            setattr(parameter, mark, value)
        layer.register_parameter(name, parameter)
    rules = rules_of(nn.Sequential(layer), tmp_path, monkeypatch)
    assert rules == {
        "0/0/param.columns": ("concat 1", "partition_dim 1 of the parameter"),
        "0/0/param.fused": ("concat 0 parts=2", "partition_dim 0 of the parameter, partition_stride 2"),
    }


@pytest.mark.spec("NRN-151")
def test_an_activation_between_parallel_layers_has_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = nn.Sequential()
    net.add_module("gate_proj", ColumnParallelLinear(gather_output=False))
    net.add_module("act_fn", nn.SiLU())
    net.add_module("norm", nn.LayerNorm(8))
    net.add_module("down_proj", RowParallelLinear(input_is_parallel=True, reduce_output=True))
    rules = rules_of(net, tmp_path, monkeypatch)
    inferred = ("concat -1", "inferred: an activation between gate_proj and down_proj")
    assert rules["0/act_fn/input.input"] == rules["0/act_fn/output"] == inferred
    assert "0/norm/output" not in rules


class Wrapper:
    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = model


class Application:
    """An application whose two wrappers share a module, once it is on a CPU."""

    def __init__(self, *modules: nn.Module) -> None:
        self.models = [Wrapper(), Wrapper()]
        self.modules, self.calls = modules, 0

    def to_cpu(self) -> None:
        self.calls += 1
        for wrapper, module in zip(self.models, self.modules, strict=False):
            wrapper.model = module


@pytest.mark.spec("NRN-150")
def test_the_inner_module_of_an_application_is_made_once() -> None:
    module = nn.Linear(2, 2)
    application = Application(module, module)
    assert is_application(application)
    assert not is_application(module)
    assert inner_model(application) is inner_model(application) is module
    assert application.calls == 1


@pytest.mark.spec("NRN-150")
@pytest.mark.parametrize(
    ("modules", "text"),
    [
        ((), "wrappers call one module on a CPU, found none"),
        ((nn.Linear(2, 2), nn.ReLU()), "found 2: torch.nn.modules.linear.Linear, torch.nn"),
    ],
)
def test_an_application_of_no_module_or_of_several_is_refused(
    modules: tuple[nn.Module, ...], text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        inner_model(Application(*modules))
