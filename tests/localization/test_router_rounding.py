"""A router that computes in low precision, seen by how much more than its twin it rounds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tensorcap.rerun import replay
from tensorcap.session import capture_workload
from tensorcap.workload import Workload

WEIGHTS = "0/router/output.1"


def as_meant(logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, index = torch.topk(torch.softmax(logits.float(), -1), 3, -1)
    return (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), index


def wide(logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, index = torch.topk(torch.softmax(logits.float(), -1), 3, -1)
    return weights / weights.sum(-1, keepdim=True), index


def of_the_chosen(logits: Tensor) -> tuple[Tensor, Tensor]:
    chosen, index = torch.topk(logits.float(), 3, -1)
    return torch.softmax(chosen, -1).to(logits.dtype), index


def low(logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, index = torch.topk(torch.softmax(logits, -1), 3, -1)
    return weights / weights.sum(-1, keepdim=True), index


class TopKRouter(nn.Module):
    """Logits, and what a function makes of them."""

    def __init__(self, choose: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 64))
        self.choose = choose

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = functional.linear(x, self.weight)
        return (logits, *self.choose(logits))


class Model(nn.Module):
    """A router alone."""

    def __init__(self, choose: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.router = TopKRouter(choose)

    def forward(self, x: Tensor) -> Any:
        return self.router(x)


def workload(choose: Callable[[Tensor], tuple[Tensor, Tensor]], dtype: Any) -> Workload:
    generator = torch.Generator().manual_seed(3)
    model = Model(choose)
    with torch.no_grad():
        model.router.weight.copy_((torch.randn(8, 64, generator=generator) * 0.06).bfloat16())
    x = torch.randn(200, 64, generator=generator).bfloat16()
    return Workload(model.to(dtype).eval(), (x.to(dtype),))


@pytest.mark.spec("RPL-7")
@pytest.mark.parametrize(
    ("choose", "is_bad"),
    [
        pytest.param(as_meant, False, id="as-meant"),
        pytest.param(of_the_chosen, False, id="of-the-chosen"),
        pytest.param(low, True, id="low"),
    ],
)
def test_weights_of_experts_that_are_computed_in_low_precision_are_seen(
    tmp_path: Path, choose: Callable[[Tensor], tuple[Tensor, Tensor]], is_bad: bool
) -> None:
    trusted = workload(as_meant, torch.float32)
    capture_workload(trusted, tmp_path / "ref.h5")
    capture_workload(workload(choose, torch.bfloat16), tmp_path / "tgt.h5")
    found = replay(tmp_path / "ref.h5", tmp_path / "tgt.h5", reference_model=trusted)
    own = next(own for own in found.own_errors if own.key == WEIGHTS)
    assert own.is_bad == is_bad
    assert any(f.test == "twin_ratio" for f in own.findings) == is_bad


@pytest.mark.spec("RPL-7")
def test_weights_that_are_kept_in_a_narrower_dtype_are_no_mistake(tmp_path: Path) -> None:
    trusted = workload(wide, torch.float32)
    capture_workload(trusted, tmp_path / "ref.h5")
    capture_workload(workload(as_meant, torch.bfloat16), tmp_path / "tgt.h5")
    found = replay(tmp_path / "ref.h5", tmp_path / "tgt.h5", reference_model=trusted)
    own = next(own for own in found.own_errors if own.key == WEIGHTS)
    assert own.ratio is not None
    assert own.ratio > 1.5
    assert not own.is_bad
