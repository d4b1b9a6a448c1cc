"""Conversions in which Core AI gave one id to two operations: neither has the other's value."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

pytest.importorskip("coreai_torch")

import tensorcap
from tensorcap.adapters.coreai.operation_map import Namesakes
from tensorcap.adapters.coreai.output_order import ResultType
from tensorcap.session import capture_workload

pytestmark = pytest.mark.slow


class Attention(torch.nn.Module):
    """Attention under a mask of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(32, 32, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, 32) to the same."""
        batch, tokens, _ = x.shape
        q, k, v = (f(x).view(batch, tokens, 4, 8).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(8))
        scores = scores + (1 - mask[:, None, None, :]) * -1e4
        mixed: torch.Tensor = self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, tokens, 32))
        return mixed


class Layer(torch.nn.Module):
    """Attention and a multi-layer perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(32), torch.nn.LayerNorm(32)
        self.attention = Attention()
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, 32) to the same."""
        x = x + self.attention(self.norm1(x), mask)
        out: torch.Tensor = x + self.down(torch.nn.functional.silu(self.up(self.norm2(x))))
        return out


class Encoder(torch.nn.Module):
    """Three layers, with a result for each token and one for the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 32)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(3))
        self.norm = torch.nn.LayerNorm(32)
        self.head = torch.nn.Linear(32, 50)
        self.pool = torch.nn.Linear(32, 3)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(batch, tokens) to (batch, tokens, 50) and (batch, 3)."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        x = self.norm(x)
        return self.head(x), torch.tanh(self.pool(x[:, 0]))


def workload() -> tensorcap.Workload:
    torch.manual_seed(0)
    mask = torch.ones(2, 7)
    mask[1, 5:] = 0
    return tensorcap.Workload(Encoder().eval(), {"tokens": torch.arange(14).reshape(2, 7), "mask": mask})


@pytest.mark.spec("CAI-221")
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_a_node_does_not_have_the_value_of_another_operation_of_its_number(
    precision: Literal["fp16", "fp32"], tmp_path: Path
) -> None:
    reference, target = tmp_path / "ref.h5", tmp_path / "tgt.h5"
    capture_workload(workload(), reference, level="export", decompositions="coreai")
    model = tensorcap.CoreAIModel(workload().model, precision=precision)
    capture_workload(tensorcap.Workload(model, workload().inputs), target)
    points = tensorcap.sync_points(reference, target)
    lost = {point.node: point.reason for point in points.points if "has the number" in point.reason}
    assert 1 <= len(lost) <= 4
    assert all(reason.startswith("no target value: coreai.") for reason in lost.values())
    assert points.counts.keys() == {"pass", "no target value", "no reference value", "not mapped"}
    assert points.counts["pass"] == 64
    assert points.exit_status == 0


@pytest.mark.spec("CAI-221")
@pytest.mark.parametrize(
    ("shape", "others", "is_own"),
    [
        pytest.param((2, 3), [(3, 2)], True, id="of its own type"),
        pytest.param((3, 2), [(3, 2)], False, id="of the other's type"),
        pytest.param((2, 3), [(3, 2), (2, 3)], False, id="of a type that both have"),
        pytest.param((2, 3), [None], False, id="the other's type is not known"),
    ],
)
def test_a_value_is_of_the_operation_whose_type_alone_it_has(
    shape: tuple[int, ...], others: list[tuple[int, ...] | None], is_own: bool
) -> None:
    types = tuple((None if each is None else ResultType(each, "f"),) for each in others)
    namesakes = Namesakes("coreai.add of add_1", (ResultType((2, 3), "f"),), types, hide=False)
    assert namesakes.are_excluded(np.zeros(shape, np.float16), 0) is is_own
