from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn


@pytest.fixture
def hooks() -> Callable[[nn.Module], int]:
    """Count everything that a capture could leave on a model."""

    def count(model: nn.Module) -> int:
        return sum(
            len(m._forward_hooks)
            + len(m._forward_pre_hooks)
            + len(m._forward_hooks_with_kwargs)
            + len(m._forward_pre_hooks_with_kwargs)
            + len(m._forward_hooks_always_called)
            + ("forward" in vars(m))
            for m in model.modules()
        )

    return count


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ref.h5"


@pytest.fixture(autouse=True)
def _fixed_state() -> None:
    torch.manual_seed(0)


@pytest.fixture
def small() -> Any:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
