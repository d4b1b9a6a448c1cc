"""Who made what a suspect is given, where the target has no such tensor but a function of its own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tensorcap.localization import Localization, localize, ranking
from tensorcap.session import capture_workload
from tensorcap.workload import Workload
from tests.support.archives import new_archive

PLACES, WIDTH = 12, 16


def places_of(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1])


def tables_of(places: Tensor) -> tuple[Tensor, Tensor]:
    angles = places[:, None] * torch.linspace(0.05, 0.9, WIDTH)
    return angles.cos(), angles.sin()


class Tables(nn.Module):
    def forward(self, places: Tensor) -> tuple[Tensor, Tensor]:
        angles = places[:, None] * torch.linspace(0.05, 0.9, WIDTH)
        return angles.cos(), angles.sin()


class Mixer(nn.Module):
    """Rotated by tables that it is given; or by some of its own, if it has any."""

    def __init__(self, own: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.own, self.out = own, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, tables: Any = None) -> Tensor:
        cosines, sines = self.own(x) if tables is None else tables
        turned = x * cosines + x.roll(WIDTH // 2, -1) * sines
        out: Tensor = self.out(turned.tanh().cumsum(1))
        return out


class Reference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables, self.mixer = Tables(), Mixer()

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1])
        out: Tensor = self.mixer(x.sin(), self.tables(positions))
        return out + x


class Port(nn.Module):
    def __init__(self, own: Any) -> None:
        super().__init__()
        self.mixer = Mixer(own)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mixer(x.sin())
        return out + x


def of_the_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    return tables_of(places_of(x))


def exchanged(x: Tensor) -> tuple[Tensor, Tensor]:
    """Sines in the place of cosines, and cosines for sines."""
    cosines, sines = tables_of(places_of(x))
    return sines, cosines


def of_larger_angles(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest rate is 1, and not 0.9."""
    angles = places_of(x)[:, None] * torch.linspace(0.05, 1.0, WIDTH)
    return angles.cos(), angles.sin()


def counted_down(x: Tensor) -> tuple[Tensor, Tensor]:
    return tables_of(places_of(x).flip(0))


def localized(own: Any, folder: Path) -> Localization:
    x = torch.from_numpy(np.random.default_rng(3).standard_normal((2, PLACES, WIDTH)).astype(np.float32))
    reference, target = (Workload(model.eval(), {"x": x}, seed=0) for model in (Reference(), Port(own)))
    capture_workload(reference, folder / "ref.h5")
    capture_workload(target, folder / "tgt.h5")
    return localize(folder / "ref.h5", folder / "tgt.h5", reference_model=reference)


@pytest.mark.spec("LCL-510")
def test_the_module_that_made_what_a_suspect_is_given_is_suspected(tmp_path: Path) -> None:
    found = localized(of_larger_angles, tmp_path)
    assert [suspect.module for suspect in found.suspects] == ["tables"]
    mistake = found.suspects[0].diagnosis
    assert mistake is not None
    assert mistake.kind == "factor"
    assert "which mixer is given" in mistake.text


@pytest.mark.spec("LCL-510")
def test_places_that_are_counted_down_are_a_mistake_of_the_tables(tmp_path: Path) -> None:
    found = localized(counted_down, tmp_path)
    assert [suspect.module for suspect in found.suspects] == ["tables"]
    assert found.suspects[0].cause == "index-order"


@pytest.mark.spec("LCL-510")
def test_what_the_suspect_does_itself_is_its_own(tmp_path: Path) -> None:
    found = localized(exchanged, tmp_path)
    assert [suspect.module for suspect in found.suspects] == ["mixer"]


@pytest.mark.spec("LCL-510")
def test_a_port_that_makes_it_itself_is_not_accused(tmp_path: Path) -> None:
    assert not localized(of_the_reference, tmp_path).suspects


@pytest.mark.spec("LCL-510")
@pytest.mark.parametrize(
    ("offsets", "maker"),
    [
        pytest.param(np.linspace(0, 1, 32, dtype=np.float32).reshape(4, 8), "noise", id="telling"),
        pytest.param(np.zeros((4, 8), np.float32), "mixer", id="zeros"),
        pytest.param(np.array([1, 2, 3], np.float32), "mixer", id="few"),
    ],
)
def test_who_made_what_others_are_equal_to_by_chance_is_not_known(
    tmp_path: Path, offsets: Any, maker: str
) -> None:
    """Before `mixer`, which gives `mixer.sum` offsets, `noise` made a tensor that is equal to them."""
    x = np.random.default_rng(1).normal(size=(4, 8)).astype(np.float32)
    given = {"0/mixer/input.x": x, "0/mixer.sum/input.x": x}
    made = {"0/mixer.sum/output": x + 1, "0/mixer/output": x + 1}
    sides = {"0/noise/output": offsets, **given, "0/mixer.sum/input.offsets": offsets, **made}
    paths = "", "noise", "mixer", "mixer.sum"
    run = {"modules": [{"path": path, "class": "my.Module"} for path in paths], "scope": {"inputs": True}}
    source: Any = SimpleNamespace(
        reference=new_archive(tmp_path / "ref.h5", sides, run=run),
        target=new_archive(tmp_path / "tgt.h5", {**given, **made}, run=run),
    )
    found = ranking._find_makers(source, "mixer.sum", "0/mixer.sum/output")
    first = "0/noise/output" if maker == "noise" else "0/mixer.sum/input.offsets"
    assert found == [(maker, {"input.offsets": first})]
