"""Layers of two archives are ranked by the errors that they make themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from tensorcap.sensitivities import archive_sensitivity
from tensorcap.session import capture_workload
from tensorcap.workload import Workload
from tensorcap_cli.main import main
from tensorcap_formats.errors import UsageError
from tests.rerun.quantised_layers import Bytes, Nibbles

X = torch.randn(40, 64, generator=torch.Generator().manual_seed(7))


def archives(folder: Path, *, params: bool | None) -> tuple[Any, Any, tuple[Path, Path]]:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64) for _ in range(3)]
    net = nn.Sequential(*layers).eval()
    port = nn.Sequential(Bytes(layers[0]), Nibbles(layers[1], 64), Bytes(layers[2])).eval()
    paths = folder / "ref.h5", folder / "tgt.h5"
    for path, model in zip(paths, (net, port), strict=True):
        capture_workload(Workload(model, (X,)), path, params=params)
    return net, port, paths


@pytest.mark.spec("SEN-20")
def test_the_layer_of_fewest_bits_comes_first(tmp_path: Path) -> None:
    net, port, paths = archives(tmp_path, params=True)
    result = archive_sensitivity(*paths)
    assert result.layers[0].name == "1"
    with torch.no_grad():
        given = port[0](X)
        wanted = net[1](given)
        own = float((port[1](given) - wanted).norm() / wanted.norm())
    assert np.isclose(result.layers[0].own, own, rtol=1e-3)
    found = CliRunner().invoke(main, ["sensitivity", *map(str, paths)])
    assert found.exit_code == 0
    assert found.output.splitlines()[1].split()[0] == "1"
    found = CliRunner().invoke(main, ["sensitivity", *map(str, paths), "--json"])
    assert json.loads(found.stdout)["layers"][0]["name"] == "1"


@pytest.mark.spec("SEN-20")
def test_archives_without_weights_and_goals_of_archives_are_refused(tmp_path: Path) -> None:
    _, _, paths = archives(tmp_path, params=False)
    with pytest.raises(UsageError, match="holds no quantised layer with its weight, input and result"):
        archive_sensitivity(*paths)
    found = CliRunner().invoke(main, ["sensitivity", *map(str, paths), "--goal", "kl=1"])
    assert found.exit_code == 2
    assert "Archives are ranked without a run" in found.output
