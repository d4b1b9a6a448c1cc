"""What the ports of the fourth zoo share, next to the parts of the third."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.utils.generic import ModelOutput

from tests.zoo.planting import Plant
from tests.zoo.third.parts import kept, linear


@dataclass
class Scores(ModelOutput):
    """What a decoder gives: scores, and what the next call needs of this one."""

    logits: Tensor | None = None
    cache: tuple[Any, ...] | None = None


class Rms(nn.Module):
    """Root mean square norm; its gain is kept as it is applied."""

    def __init__(self, gain: Tensor, eps: float) -> None:
        super().__init__()
        self.gain, self.eps = kept(gain), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.gain


class Gated(nn.Module):
    """A gated feed-forward whose gate and input are one projection."""

    def __init__(self, gate: Tensor, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.wide, self.down = linear(torch.cat((gate, up))), linear(down)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = self.wide(x).chunk(2, -1)
        return gate, up

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.parts(x)
        out: Tensor = self.down(functional.silu(gate) * up)
        return out


class Experts(nn.Module):
    """All experts computed for all tokens, and weighted; those that are not chosen have weight zero."""

    def __init__(self, moe: Any) -> None:
        super().__init__()
        self.gate_up, self.down = kept(moe.experts.gate_up_proj), kept(moe.experts.down_proj)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        gate, up = torch.einsum("btd,efd->betf", x, self.gate_up).chunk(2, -1)
        outs = torch.einsum("betf,edf->betd", functional.silu(gate) * up, self.down)
        return torch.einsum("betd,bte->btd", outs, weights)


class Router(nn.Module):
    """Weights of all experts for each token, zero for those beyond the first few."""

    def __init__(self, gate: Any) -> None:
        super().__init__()
        self.score, self.count = linear(gate.weight), gate.top_k

    def weigh(self, scores: Tensor) -> Tensor:
        weights = scores.softmax(-1, dtype=torch.float32)
        best = weights.topk(self.count, -1)
        return torch.zeros_like(weights).scatter(-1, best.indices, best.values)

    def forward(self, x: Tensor) -> Tensor:
        return self.weigh(self.score(x)).to(x.dtype)


def convolve(x: Tensor, kernel: Tensor) -> Tensor:
    """Causal convolution of each channel (batch, channels, length), with kernels (channels, taps)."""
    padded = functional.pad(x, (kernel.shape[-1] - 1, 0))
    return functional.conv1d(padded, kernel[:, None], groups=kernel.shape[0])


def together(*plants: Plant) -> Plant:
    """Several changes of a port that are one mistake."""

    def plant(model: Any) -> None:
        for change in plants:
            change(model)

    return plant
