"""Static networks of torch.ao: batch norms and ReLUs in convolutions, sums and inputs on whole steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao import quantization as torch_ao
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

from tensorcap.comparison import compare
from tensorcap.localization import localize
from tensorcap.session import capture_workload
from tensorcap.workload import Workload

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
]

Plant = Callable[[Any], None]


class Block(nn.Module):
    """Two convolutions with norms, one of them by channel, around which the input is added."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(size, size, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(size, size, 3, padding=1, groups=size, bias=False)
        self.bn1, self.bn2 = (nn.BatchNorm2d(size) for _ in range(2))
        self.relu1, self.relu2 = nn.ReLU(inplace=True), nn.ReLU()

    def forward(self, x: Tensor) -> Any:
        return self.relu2(x + self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x))))))


class Network(nn.Module):
    """A stem with a norm, two blocks and a head."""

    def __init__(self, size: int = 12) -> None:
        super().__init__()
        self.stem, self.bn, self.relu = nn.Conv2d(3, size, 3, stride=2), nn.BatchNorm2d(size), nn.ReLU()
        self.block1, self.block2 = Block(size), Block(size)
        self.head = nn.Linear(size, 10)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.block2(self.block1(self.relu(self.bn(self.stem(x))))).mean((2, 3)))


def images(seed: int) -> Tensor:
    return torch.randn(4, 3, 17, 17, generator=torch.Generator().manual_seed(seed))


def trained() -> nn.Module:
    torch.manual_seed(4)
    net = Network()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1, 0.3)
            nn.init.normal_(module.bias, 0, 0.3)
    with torch.no_grad():
        for seed in range(4):
            net(images(50 + seed))
    return net.eval()


def quantised(net: nn.Module, plant: Plant | None) -> Any:
    torch.backends.quantized.engine = "x86"
    port: Any = prepare_fx(copy.deepcopy(net), torch_ao.get_default_qconfig_mapping("x86"), (images(0),))
    with torch.no_grad():
        for seed in range(8):
            port(images(seed))
    port = convert_fx(port)
    if plant is not None:
        plant(port)
    return port


def scales_rolled(port: Any) -> None:
    layer = port.block2.conv1
    weight = layer.weight()
    scales, zeros = weight.q_per_channel_scales().roll(1), weight.q_per_channel_zero_points()
    make: Any = torch._make_per_channel_quantized_tensor
    layer.set_weight_bias(make(weight.int_repr(), scales, zeros, 0), layer.bias())


def range_too_small(port: Any) -> None:
    port.block1.conv2.scale /= 4


@pytest.mark.spec("POL-640", "POL-641", "RPL-206")
@pytest.mark.parametrize(
    ("plant", "guilty"),
    [(None, ""), (scales_rolled, "block2.conv1"), (range_too_small, "block1.conv2")],
)
def test_a_static_network_with_norms_is_as_its_rounding_predicts(
    tmp_path: Path, plant: Plant | None, guilty: str
) -> None:
    net = trained()
    paths = tmp_path / "reference.h5", tmp_path / "target.h5"
    for path, model in zip(paths, (net, quantised(net, plant)), strict=True):
        capture_workload(Workload(model, (images(0),)), path, params=True)
    found = compare(*paths)
    assert found.exit_status == (1 if guilty else 0)
    replayed = localize(*paths, reference_model=Workload(net, (images(0),)))
    assert replayed.exit_status == localize(*paths).exit_status == (1 if guilty else 0)
    assert [suspect.module for suspect in replayed.suspects][:1] == ([guilty] if guilty else [])
    if not guilty:
        assert found.layers is not None
        assert all(0.75 < error.ratio < 1.25 for error in found.layers.results.values())
