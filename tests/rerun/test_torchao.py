"""Models that torchao quantises: their weights are recorded in floats, and right ones accuse nobody."""

from __future__ import annotations

import copy
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tensorcap.comparison import compare
from tensorcap.localization import localize
from tensorcap.session import capture_workload
from tensorcap.workload import Workload

quantization: Any = import_module("torchao.quantization")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
X = torch.randn(4, 16, 256, generator=torch.Generator().manual_seed(1))


def model() -> Any:
    torch.manual_seed(0)
    layers = nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 256), nn.LayerNorm(256), nn.Linear(256, 64)
    net = nn.Sequential(*layers).eval()
    with torch.no_grad():
        rows: Any = net[2].weight
        rows *= torch.exp(torch.randn(256, 1) / 2)  # of unlike size
    return net


def groups_of_4_bits() -> Any:
    granularity, int4 = quantization.PerGroup(32), vars(torch)["int4"]
    return quantization.IntxWeightOnlyConfig(weight_dtype=int4, granularity=granularity)


def wrong_scales(layer: Any) -> None:
    layer.weight.scale.copy_(torch.roll(layer.weight.scale, 1, 0))


@pytest.mark.spec("CAP-330", "POL-281")
@pytest.mark.parametrize("wrong", [False, True], ids=["right", "scales of the next row"])
@pytest.mark.parametrize(
    "config",
    [
        pytest.param("Int8WeightOnlyConfig", id="int8"),
        pytest.param(groups_of_4_bits, id="int4"),
        pytest.param("Float8WeightOnlyConfig", id="float8"),
        pytest.param("Int8DynamicActivationInt8WeightConfig", id="int8, inputs by row"),
        pytest.param("Int8DynamicActivationIntxWeightConfig", id="int8 groups, inputs by row"),
    ],
)
def test_a_model_of_torchao_is_as_its_rounding_predicts(tmp_path: Path, config: Any, *, wrong: bool) -> None:
    paths = tmp_path / "reference.h5", tmp_path / "target.h5"
    workload = Workload(model(), (X,))
    capture_workload(workload, paths[0], params=True)
    port = copy.deepcopy(model())
    quantization.quantize_(port, getattr(quantization, config)() if isinstance(config, str) else config())
    if wrong:
        wrong_scales(port[2])
    capture_workload(Workload(port, (X,)), paths[1], params=True)
    result = compare(*paths)
    assert result.exit_status == int(wrong)
    findings = {f.text for pair in result.pairs for f in pair.findings if f.test == "weight_rounding"}
    assert any("its scales are those of 1 row" in text for text in findings) == wrong
    suspects = localize(*paths, reference_model=workload).suspects
    assert [suspect.module for suspect in suspects] == (["2"] if wrong else [])
