"""Weights of eight bits in the target: rounding them is no mistake of a module, and excuses no other one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from tensorcap.localization import localize
from tensorcap.session import capture_workload
from tensorcap.workload import Workload

STATES = torch.randn(4, 12, 32, generator=torch.Generator().manual_seed(4))


class Expert(nn.Module):
    def __init__(self, up: Any, down: Any) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.up(x)))
        return out


class Experts(nn.Module):
    """Experts in stacked weights, all for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(4, *size) / 6) for size in ((64, 32), (32, 64)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("edf,btef->bted", self.down, F.silu(torch.einsum("efd,btd->btef", self.up, x)))


class Layer(nn.Module):
    """Attention and a mixture of experts, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other_norm = nn.LayerNorm(32), nn.LayerNorm(32)
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.gate, self.experts = nn.Linear(32, 4), Experts()

    def qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.q(x), self.k(x), self.v(x)

    def mix(self, x: Tensor) -> Tensor:
        return self.experts(x)  # type: ignore[no-any-return]  # a module of ours

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.reshape(*x.shape[:2], 4, 8).transpose(1, 2) for part in self.qkv(self.norm(x)))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        h = self.other_norm(x)
        return x + torch.einsum("bted,bte->btd", self.mix(h), self.gate(h).softmax(-1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Int8Linear(nn.Module):
    """Weights in int8 with a scale a row."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        scale = weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        return F.linear(x, weight.to(x.dtype) * self.scale.to(x.dtype), self.bias)


def model() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Model().eval()


def each_in_int8(layer: Any) -> None:
    for name in ("q", "k", "v", "o", "gate"):
        part = getattr(layer, name)
        setattr(layer, name, Int8Linear(part.weight, part.bias))


def fused_in_int8(layer: Any) -> None:
    parts = layer.q, layer.k, layer.v
    layer.qkv_proj = Int8Linear(
        *(torch.cat([getattr(p, name) for p in parts]) for name in ("weight", "bias"))
    )
    layer.qkv_proj.bias = nn.Parameter(layer.qkv_proj.bias.detach())
    del layer.q, layer.k, layer.v
    layer.qkv = lambda x: layer.qkv_proj(x).chunk(3, -1)


def handed_on_in_parts(layer: Any) -> None:
    """The parts of a fused projection are results of modules that hold nothing, in the place of q, k, v."""
    fused_in_int8(layer)
    layer.parts = nn.ModuleList(nn.Identity() for _ in range(3))
    layer.qkv = lambda x: [
        part(made) for part, made in zip(layer.parts, layer.qkv_proj(x).chunk(3, -1), strict=True)
    ]


def experts_in_int8(layer: Any) -> None:
    experts = zip(layer.experts.up.detach(), layer.experts.down.detach(), strict=True)
    layer.experts = nn.ModuleList(Expert(Int8Linear(up), Int8Linear(down)) for up, down in experts)
    layer.mix = lambda x: torch.stack([expert(x) for expert in layer.experts], 2)


def suspects(
    folder: Path, plant: Callable[[Any], None], *, dtype: torch.dtype = torch.float32
) -> tuple[list[str], int]:
    """The suspects of a replay, and its exit status."""
    port = copy.deepcopy(model())
    plant(port)
    reference = Workload(model(), (STATES,))
    capture_workload(reference, folder / "ref.h5")
    capture_workload(Workload(port.to(dtype), (STATES.to(dtype),)), folder / "tgt.h5")
    result = localize(folder / "ref.h5", folder / "tgt.h5", reference_model=reference)
    return [suspect.module for suspect in result.suspects], result.exit_status


@pytest.mark.spec("RPL-101")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("quantise", [each_in_int8, fused_in_int8, handed_on_in_parts, experts_in_int8])
def test_rounding_of_weights_accuses_nobody(
    tmp_path: Path, quantise: Callable[[Any], None], dtype: torch.dtype
) -> None:
    def plant(port: Any) -> None:
        for layer in port.layers:
            quantise(layer)

    assert suspects(tmp_path, plant, dtype=dtype) == ([], 0)


@pytest.mark.spec("RPL-101")
def test_a_wrong_scale_of_one_weight_is_accused(tmp_path: Path) -> None:
    def plant(port: Any) -> None:
        for layer in port.layers:
            each_in_int8(layer)
        port.layers[1].v.scale[:16] *= 1.2

    assert suspects(tmp_path, plant) == (["layers.1.v"], 1)


@pytest.mark.spec("RPL-101")
def test_a_small_mistake_behind_rounded_weights_is_accused(tmp_path: Path) -> None:
    def plant(port: Any) -> None:
        for layer in port.layers:
            each_in_int8(layer)
        port.layers[1].other_norm.eps = 1e-3  # 0.1 % of its result, where weights round by 0.6 %

    assert suspects(tmp_path, plant) == (["layers.1.other_norm"], 1)
