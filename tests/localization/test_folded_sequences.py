"""Sequences in which batch norms are folded into convolutions, so that their numbers are of other modules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from tensorcap.alignment.match import pair_numbered_children
from tensorcap.comparison import compare
from tensorcap.localization import localize
from tensorcap.session import capture_workload
from tensorcap.workload import Workload
from tensorcap_formats.open import open_archive


class Convolutional(nn.Module):
    """A sequence of convolutions, norms and ReLUs as VGG has it, and a head."""

    def __init__(self, features: nn.Sequential) -> None:
        super().__init__()
        self.features = features
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(x).mean((2, 3)))
        return out


def trained() -> Convolutional:
    """0 conv, 1 norm, 2 ReLU, 3 pool, 4 conv, 5 norm, 6 ReLU, 7 conv, 8 norm, 9 ReLU."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    channels = 3
    for width in (16, 0, 24, 32):
        if not width:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    model = Convolutional(nn.Sequential(*layers)).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.running_mean.normal_(0, 0.5)
                module.running_var.uniform_(0.5, 1.5)
                module.weight.normal_(1, 0.2)
                module.bias.normal_(0, 0.2)
    return model


def folded(*, wrong: int | None = None) -> Convolutional:
    """The same without norms: 0 conv, 1 ReLU, 2 pool, 3 conv, 4 ReLU, 5 conv, 6 ReLU."""
    model = trained()
    layers = list(model.features)
    kept: list[nn.Module] = []
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        if isinstance(layer, nn.Conv2d) and isinstance(following, nn.BatchNorm2d):
            kept.append(fuse_conv_bn_eval(layer, following))
        elif not isinstance(layer, nn.BatchNorm2d):
            kept.append(layer)
    model.features = nn.Sequential(*kept)
    if wrong is not None:
        convolution = kept[wrong]
        assert isinstance(convolution, nn.Conv2d)
        convolution.weight.data = convolution.weight.data.flip(-1)
    return model.eval()


def captured(folder: Path, target: nn.Module, dtype: torch.dtype = torch.float32) -> tuple[Path, Path]:
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    capture_workload(Workload(trained(), (x,)), folder / "ref.h5")
    capture_workload(Workload(target.to(dtype), (x.to(dtype),)), folder / "tgt.h5")
    return folder / "ref.h5", folder / "tgt.h5"


@pytest.mark.spec("ALN-180")
def test_children_are_paired_in_their_order_where_numbers_are_of_other_modules(tmp_path: Path) -> None:
    with open_archive(captured(tmp_path, folded())[0]) as ours, open_archive(tmp_path / "tgt.h5") as theirs:
        entries = pair_numbered_children(ours, theirs)
    pairs = {entry.reference[0]: entry.target[0] for entry in entries}
    numbers = {0: 0, 2: 1, 3: 2, 4: 3, 6: 4, 7: 5, 9: 6}
    assert pairs == {f"features.{one}": f"features.{other}" for one, other in numbers.items()}


@pytest.mark.spec("ALN-180")
def test_numbers_of_a_shorter_list_of_equal_layers_are_left_as_they_are(tmp_path: Path) -> None:
    def stack(count: int) -> nn.Sequential:
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(count))
        return nn.Sequential(*layers)

    x = torch.ones(2, 8)
    for name, count in (("ref", 3), ("tgt", 2)):
        capture_workload(Workload(stack(count), (x,)), tmp_path / f"{name}.h5")
    with open_archive(tmp_path / "ref.h5") as ours, open_archive(tmp_path / "tgt.h5") as theirs:
        assert pair_numbered_children(ours, theirs) == ()


@pytest.mark.spec("ALN-180", "CMP-170")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_port_without_norms_is_green_and_accuses_nobody(tmp_path: Path, dtype: torch.dtype) -> None:
    paths = captured(tmp_path, folded(), dtype)
    compared = compare(*paths)
    assert (compared.exit_status, compared.divergence) == (0, None)
    reasons = {pair.key: pair.reason for pair in compared.pairs if pair.status == "explained"}
    assert "0/features.4/output" in reasons
    found = localize(*paths)
    assert (found.suspects, found.exit_status) == ((), 0)


@pytest.mark.sampled
@pytest.mark.spec("ALN-180", "CMP-170", "LCL-130")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by", ["archives", "replay", "injection"])
def test_a_wrong_convolution_among_folded_ones_is_accused_first(
    tmp_path: Path, dtype: torch.dtype, by: str
) -> None:
    target = folded(wrong=3)
    paths = captured(tmp_path, target, dtype)
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    found = localize(
        *paths,
        reference_model=Workload(trained(), (x,)) if by == "replay" else None,
        target_model=Workload(target, (x.to(dtype),)) if by == "injection" else None,
    )
    assert found.suspects[0].module == "features.4"  # the fourth of the target, as the reference numbers it
    assert "features.0" not in [suspect.module for suspect in found.suspects]
