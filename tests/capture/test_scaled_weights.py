"""Weights that modules keep in int8 and MXFP4 beside their scales: recorded in floats, and judged."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from tensorcap.adapters.torch.packed_weights import quantised_weights
from tensorcap.comparison import compare
from tensorcap.session import capture_workload
from tensorcap.workload import Workload
from tensorcap_formats.dtypes import Array
from tensorcap_formats.open import open_archive

LEVELS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
X = torch.randn(4, 10, 64, generator=torch.Generator().manual_seed(2))


class Int8(nn.Module):
    """A layer of int8 with a scale for each of some rows, or for blocks of 32 inputs."""

    def __init__(self, layer: nn.Linear, form: str = "rows", factor: float = 1.0) -> None:
        super().__init__()
        weight = layer.weight.detach()
        blocks = weight.reshape(len(weight), -1, 32) if form == "blocks" else weight[:, None]
        largest = blocks.abs().amax(-1)  # [rows, blocks]
        scale = largest / 127 if form != "one" else largest.max().reshape(1) / 127
        wide = scale.repeat_interleave(weight.shape[1] // scale.shape[-1], -1) if form == "blocks" else scale
        self.weight = nn.Parameter(torch.round(weight / wide).to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(scale * factor, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        blocks = self.scale.shape[-1] if self.scale.ndim > 1 else 1
        wide = self.scale.repeat_interleave(self.weight.shape[1] // blocks, -1)
        return functional.linear(x, self.weight.float() * wide)


class Mxfp4(nn.Module):
    """A layer of MXFP4: numbers of four bits, two in a byte, and an exponent for each 32 inputs."""

    def __init__(self, layer: nn.Linear, added: int = 0) -> None:
        super().__init__()
        groups = layer.weight.detach().reshape(layer.out_features, -1, 32)
        exponent = torch.floor(torch.log2(groups.abs().amax(-1))) - 2
        numbers = groups / torch.exp2(exponent)[..., None]
        nearest = (numbers.abs()[..., None] - torch.tensor(LEVELS)).abs().argmin(-1)
        codes = (nearest + 8 * (numbers < 0)).to(torch.uint8).reshape(*groups.shape[:2], 16, 2)
        self.register_buffer("weight_blocks", codes[..., 0] | (codes[..., 1] << 4))
        self.register_buffer("weight_scales", (exponent + 127 + added).to(torch.uint8))
        self.weight_blocks: torch.Tensor
        self.weight_scales: torch.Tensor

    def values(self) -> Any:
        """The weight by plain numpy, a number at a time."""
        blocks, scales = self.weight_blocks.numpy(), self.weight_scales.numpy()
        rows = []
        for row, exponents in zip(blocks, scales, strict=True):
            for group, exponent in zip(row, exponents, strict=True):
                for byte in group.tolist():
                    for code in (byte & 15, byte >> 4):
                        number = -LEVELS[code - 8] if code >= 8 else LEVELS[code]
                        rows.append(number * 2.0 ** (int(exponent) - 127))
        return np.array(rows, "f4").reshape(len(blocks), -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, torch.from_numpy(self.values()))


def model() -> Any:
    torch.manual_seed(0)
    layers = (nn.Linear(64, 128, bias=False), nn.ReLU(), nn.Linear(128, 64, bias=False), nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(64, 96, bias=False)).eval()


def captured(folder: Path, name: str, net: nn.Module) -> Path:
    path = folder / f"{name}.h5"
    capture_workload(Workload(net, (X,)), path, params=True)
    return path


def port(**layers: nn.Module) -> Any:
    net = copy.deepcopy(model())
    for name, layer in {"0": Int8(net[0]), "2": Int8(net[2]), "4": Mxfp4(net[4]), **layers}.items():
        net[int(name)] = layer
    return net


@pytest.mark.spec("CAP-290")
def test_weights_beside_scales_are_recorded_in_floats_and_as_they_are(tmp_path: Path) -> None:
    first, last = Int8(model()[0]), Mxfp4(model()[4])
    with open_archive(captured(tmp_path, "t", port(**{"0": first, "4": last}))) as archive:
        weight, kept = archive.get("0/0/param.weight"), archive.get("0/0/param.weight_packed")
        assert (weight.dtype.name, kept.dtype.name) == ("float32", "int8")
        expected = first.weight.numpy().astype("f8") * first.scale.numpy().astype("f8")
        assert np.allclose(archive.load(weight), expected, rtol=1e-6, atol=0)
        assert np.array_equal(archive.load(kept), first.weight.numpy())
        assert np.array_equal(archive.load(archive.get("0/4/param.weight")), last.values())
        assert archive.get("0/4/buffer.weight_blocks").shape == (96, 2, 16)
        assert archive.info.modules["0"].settings["dequantised"] == ["weight"]
        assert archive.info.modules["0"].parameters["weight"].dtype == "int8"


@pytest.mark.spec("CAP-290", "POL-181", "PRE-130")
@pytest.mark.parametrize("form", ["rows", "one", "blocks"])
def test_rightly_rounded_weights_are_green(tmp_path: Path, form: str) -> None:
    reference = captured(tmp_path, "r", model())
    target = captured(tmp_path, "t", port(**{"0": Int8(model()[0], form)}))
    result = compare(reference, target)
    assert result.exit_status == 0
    texts = {p.key: p.findings[0].text for p in result.pairs if p.key.endswith("/param.weight")}
    scope = {"rows": "each row", "one": "the whole tensor", "blocks": "32 values"}[form]
    assert texts["0/0/param.weight"] == f"the reference's, rounded to int8 with a scale for {scope}"
    assert texts["0/4/param.weight"] == "the reference's, rounded to MXFP4 with a scale for 32 values"


@pytest.mark.spec("CAP-290", "POL-181", "PRE-130")
@pytest.mark.parametrize(
    ("name", "layer"),
    [
        pytest.param("0", lambda net: Int8(net[0], factor=1.25), id="int8"),
        pytest.param("2", lambda net: Int8(net[2], "blocks", 0.5), id="int8 blocks"),
        pytest.param("4", lambda net: Mxfp4(net[4], added=1), id="MXFP4, twice as much"),
        pytest.param("4", lambda net: Mxfp4(net[4], added=-1), id="MXFP4, half as much"),
    ],
)
def test_a_wrong_scale_is_seen_before_any_activation(tmp_path: Path, name: str, layer: Any) -> None:
    reference = captured(tmp_path, "r", model())
    result = compare(reference, captured(tmp_path, "t", port(**{name: layer(model())})))
    assert result.exit_status == 1
    assert result.divergence is not None
    assert (result.divergence.pair.key, result.divergence.module) == (f"0/{name}/param.weight", name)


@pytest.mark.spec("CAP-290")
@pytest.mark.parametrize(
    "tensors",
    [
        pytest.param({"weight": torch.ones(4, 8, dtype=torch.int8)}, id="no scale"),
        pytest.param(
            {"weight": torch.ones(4, 8, dtype=torch.int8), "scale": torch.ones(3)}, id="of another count"
        ),
        pytest.param(
            {"weight": torch.ones(4, 8, dtype=torch.int8), "scale": torch.ones(4, dtype=torch.int32)},
            id="whole numbers",
        ),
        pytest.param(
            {"a_blocks": torch.ones(4, 2, 16, dtype=torch.uint8), "a_scales": torch.ones(4, 2)}, id="floats"
        ),
        pytest.param({"weight": torch.ones(4, 8), "weight_scale": torch.ones(4)}, id="no few bits"),
    ],
)
def test_other_tensors_stay_what_they_are(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    holder = nn.ReLU()
    for name, tensor in tensors.items():
        holder.register_buffer(name, tensor)
    with open_archive(captured(tmp_path, "t", nn.Sequential(holder))) as archive:
        slots = {r.key.slot for r in archive.records if r.key.slot.startswith(("param.", "buffer."))}
        assert slots == {f"buffer.{name}" for name in tensors}


class TwoInAByte(nn.Module):
    """A layer of its own: numbers of four bits, two in a byte, in groups of four with a zero point each."""

    def __init__(self, *, is_high_first: bool) -> None:
        super().__init__()
        random = np.random.default_rng(3)
        self.numbers = random.integers(0, 16, (6, 16), dtype=np.uint8)
        self.scales = random.random((6, 4), dtype=np.float32) + 0.5
        self.zeros = random.integers(4, 12, (6, 4), dtype=np.uint8)
        first, second = self.numbers[:, ::2], self.numbers[:, 1::2]
        packed = first << 4 | second if is_high_first else second << 4 | first
        self.register_buffer("packed", torch.from_numpy(packed))
        self.register_buffer("zero", torch.from_numpy(self.zeros))
        self.scale = nn.Parameter(torch.from_numpy(self.scales))

    @property
    def weight_in_floats(self) -> Array:
        groups = self.numbers.reshape(6, 4, 4).astype(np.float32) - self.zeros[..., None]
        weight: Array = (groups * self.scales[..., None]).reshape(6, 16)
        return weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.from_numpy(self.weight_in_floats).T


@pytest.mark.spec("CAP-330")
@pytest.mark.parametrize("is_high_first", [False, True])
def test_two_numbers_in_a_byte_of_a_layer_that_does_not_say_its_inputs(*, is_high_first: bool) -> None:
    layer = TwoInAByte(is_high_first=is_high_first)
    found = quantised_weights(layer)
    assert [*found] == ["weight"]
    assert found["weight"].number == "uint4"
    np.testing.assert_array_equal(found["weight"].values().detach().numpy(), layer.weight_in_floats)
