"""Modules that are called without a tensor: what they make is all their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BeitConfig, BeitModel

from tensorcap import localize
from tensorcap.session import capture_workload
from tensorcap.workload import Workload

BIAS = "layers.1.relative_position_bias"


def beit() -> Any:
    """A BEiT whose layers each have a table of biases by relative position, called with a window's size."""
    torch.manual_seed(0)
    make_config: Any = BeitConfig  # whose stubs lack what it takes
    model: Any = BeitModel(
        make_config(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            image_size=32,
            patch_size=8,
            use_relative_position_bias=True,
            use_mean_pooling=True,
            out_indices=[1, 2],
        )
    )
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.ndim > 1 else 0.1))
        for name, parameter in model.named_parameters():
            if ("norm" in name and name.endswith("weight")) or "lambda" in name:
                parameter.add_(1.0)
    return model


def transposed(module: Any, *args: Any, **options: Any) -> torch.Tensor:
    """Biases of key by query instead of query by key."""
    bias: torch.Tensor = type(module).forward(module, *args, **options)
    return bias.transpose(-1, -2).contiguous()


class TablePerCall(nn.Module):
    """A cosine of each position, of as many positions as it is told, from where it is told."""

    def forward(self, count: int, start: int) -> torch.Tensor:
        return torch.cos(torch.arange(start, start + count)[:, None] / torch.arange(1, 9))


class Adder(nn.Module):
    """Adds a table of positions to what it is given."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.table, self.fc, self.start = TablePerCall(), nn.Linear(8, 8), start

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc(x + self.table(x.shape[0], self.start).to(x.dtype))
        return out


def suspects(folder: Path, reference: Workload, target: Workload) -> list[str]:
    capture_workload(reference, folder / "reference.h5")
    capture_workload(target, folder / "target.h5")
    found = localize(folder / "reference.h5", folder / "target.h5", target_model=target)
    return [suspect.module for suspect in found.suspects]


@pytest.mark.spec("LCL-110")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_table_of_positions_is_accused_and_not_the_module_that_calls_it(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    wrong = beit()
    module = wrong.get_submodule(BIAS)
    module.forward = transposed.__get__(module)
    torch.manual_seed(1)
    pixels = torch.randn(2, 3, 32, 32)
    reference = Workload(beit(), {"pixel_values": pixels}, seed=0)
    target = Workload(wrong.to(dtype), {"pixel_values": pixels.to(dtype)}, seed=0)
    assert suspects(tmp_path, reference, target) == [BIAS]


@pytest.mark.spec("POL-210")
@pytest.mark.parametrize("is_right", [pytest.param(True, id="right"), pytest.param(False, id="wrong")])
def test_archives_alone_accuse_a_wrong_table_of_positions_in_low_precision(
    tmp_path: Path, is_right: bool
) -> None:
    port = beit()
    if not is_right:
        module = port.get_submodule(BIAS)
        module.forward = transposed.__get__(module)
    torch.manual_seed(1)
    pixels = torch.randn(2, 3, 32, 32)
    capture_workload(Workload(beit(), {"pixel_values": pixels}), tmp_path / "reference.h5")
    target = Workload(port.to(torch.bfloat16), {"pixel_values": pixels.to(torch.bfloat16)})
    capture_workload(target, tmp_path / "target.h5")
    found = localize(tmp_path / "reference.h5", tmp_path / "target.h5")
    assert [suspect.module for suspect in found.suspects] == ([] if is_right else [BIAS])


@pytest.mark.spec("LCL-110")
def test_a_table_that_is_told_another_number_is_not_accused(tmp_path: Path) -> None:
    sides = []
    for start in (0, 3):
        torch.manual_seed(0)
        sides.append(Workload(Adder(start).eval(), {"x": torch.ones(5, 8)}, seed=0))
    assert "table" not in suspects(tmp_path, *sides)


@pytest.mark.spec("POL-210")
def test_archives_alone_do_not_accuse_a_table_that_is_told_another_number(tmp_path: Path) -> None:
    for start, name in ((0, "reference"), (3, "target")):
        torch.manual_seed(0)
        module = Adder(start).eval().to(torch.float32 if start == 0 else torch.bfloat16)
        given = torch.ones(64, 8, dtype=next(module.parameters()).dtype)
        capture_workload(Workload(module, {"x": given}), tmp_path / f"{name}.h5")
    found = localize(tmp_path / "reference.h5", tmp_path / "target.h5")
    assert "table" not in [suspect.module for suspect in found.suspects]
