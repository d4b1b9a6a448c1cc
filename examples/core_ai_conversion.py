"""A model for Apple's Core AI, and what was given to its converter, with one mistake. Used by the README."""

import torch
from torch import nn

import tensorcap


class Block(nn.Module):
    """A layer norm and a multi-layer perceptron, added to its input."""

    def __init__(self, approximate: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.act = nn.GELU(approximate)
        self.down = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 32) to (batch, 32)."""
        hidden = self.act(4 * self.up(self.norm(x)))
        out: torch.Tensor = x + self.down(hidden)
        return out


def make(approximate: str = "none") -> tensorcap.Workload:
    """Three blocks, of which the second has a GELU that may be approximated."""
    torch.manual_seed(0)
    model = nn.Sequential(Block("none"), Block(approximate), Block("none")).eval()
    return tensorcap.Workload(model, {"input": torch.randn(4, 32)})


def reference() -> tensorcap.Workload:
    """The model in PyTorch."""
    return make()


def converted() -> tensorcap.Workload:
    """A Core AI model: somebody took GELU by tanh before converting it."""
    workload = make("tanh")
    return tensorcap.Workload(tensorcap.CoreAIModel(workload.model), workload.inputs)
