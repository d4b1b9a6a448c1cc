"""Small models, exported to ExecuTorch with portable kernels, and their references."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tensorcap

ROWS = torch.randn((2, 5, 16), generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """A block of attention and an MLP."""

    def __init__(self, approximate: str = "none", eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16, eps=eps)
        self.query = nn.Linear(16, 16)
        self.key = nn.Linear(16, 16)
        self.value = nn.Linear(16, 16)
        self.out = nn.Linear(16, 16)
        self.up = nn.Linear(16, 24)
        self.act = nn.GELU(approximate)
        self.down = nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        scores = self.query(h) @ self.key(h).transpose(-1, -2) / 4
        x = x + self.out(torch.softmax(scores, -1) @ self.value(h))
        result: torch.Tensor = x + self.down(self.act(self.up(x)))
        return result


class Net(nn.Module):
    """Two blocks."""

    def __init__(self, **wrong: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block(**wrong)])
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(x)
        return result


def reference() -> tensorcap.Workload:
    return tensorcap.Workload(Net().eval(), {"x": ROWS})


def write(folder: Path, model: nn.Module | None = None, **wrong: Any) -> Path:
    """A program of a port, or of another model, and its ETRecord beside it."""
    from executorch.devtools import generate_etrecord
    from executorch.exir import EdgeCompileConfig, to_edge

    exported = torch.export.export((model or Net(**wrong)).eval(), (ROWS,))
    edge = to_edge(exported, compile_config=EdgeCompileConfig(_check_ir_validity=False))
    kept = copy.deepcopy(edge)
    program = edge.to_executorch()
    (folder / "net.pte").write_bytes(program.buffer)
    generate_etrecord(str(folder / "net.etrecord"), kept, program)
    return folder / "net.pte"
