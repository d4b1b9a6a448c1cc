"""`tcap plan` prints what a device can capture, and the configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Tcap


@pytest.mark.spec("NRN-64")
def test_equal_layers_share_a_line_and_the_configuration_is_written(folder: Path, tcap: Tcap) -> None:
    layers = "".join(
        f"layers.{i}: Layer\nlayers.{i}.self_attn: Attention\nlayers.{i}.self_attn.o_proj: Out\n"
        for i in range(3)
    )
    (folder / "modules.txt").write_text(f"layers: ModuleList\n{layers}")
    (folder / "points.txt").write_text("layers\nlayers.*.self_attn\n")
    result = tcap("plan", "modules.txt", "--points", "points.txt", "-o", "config.json", status=1)
    lines = result.stdout.splitlines()
    assert lines[0] == "4 points of modules.txt: 3 modules, 3 outputs more of the graph"
    assert "CAPTURED UNDER ANOTHER MODULE  3" in lines
    assert "  layers.{}.self_attn: 3 points (0, 1, 2) = layers.{}.self_attn.o_proj" in lines
    assert "NOT CAPTURABLE  1" in lines
    assert "note: not run on a device: read in NxDI's sources of July 2026" in result.stderr
    config = json.loads((folder / "config.json").read_text())
    assert config["tensor_capture_config"]["modules_to_capture"] == [
        f"layers.{i}.self_attn.o_proj" for i in range(3)
    ]
    (folder / "results.txt").write_text("".join(f"layers.{i}/output.0\n" for i in range(3)))
    printed = tcap("plan", "modules.txt", "--points", "results.txt").stdout.splitlines()
    assert "  layers.{}/output.0: 3 points (0, 1, 2)" in printed
    content = json.loads(tcap("plan", "modules.txt", "--only", "layers.?", "--json").stdout)
    assert (content["format"], content["extra_outputs"]) == ("tensorcap-plan", 3)
