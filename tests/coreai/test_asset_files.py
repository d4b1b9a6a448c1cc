"""Assets as files: what is in them, with the real packages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("coreai_torch")

from coreai_torch import TorchConverter

from tensorcap_cli.main import main
from tests.coreai.conversion import exported
from tests.coreai.models import make, make_inputs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # of torch's own programs
]


def tcap(*arguments: str) -> str:
    result = CliRunner().invoke(main, list(arguments), prog_name="tcap", catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The MLP in both modes."""
    folder = tmp_path_factory.mktemp("assets")
    for mode in ("DEBUG", "RELEASE"):
        program = exported(make("mlp"), make_inputs("mlp"))
        converter = TorchConverter(mode=getattr(TorchConverter.Mode, mode)).add_exported_program(program)
        converter.to_coreai().save_asset(folder / f"{mode.lower()}.aimodel")
    return folder


@pytest.mark.spec("CAI-90", "CAI-91")
def test_operations_have_nodes_modules_and_lines(assets: Path) -> None:
    asset: dict[str, Any] = json.loads(tcap("ls", str(assets / "debug.aimodel"), "--json"))
    assert asset["is_intact"]
    assert asset["producer"].startswith("coreai-core ")
    rows = {name: row for row in asset["operations"] for name in row["holds"]}
    program = exported(make("mlp"), make_inputs("mlp"))
    addmm = [node.name for node in program.graph.nodes if node.target is torch.ops.aten.addmm.default]
    assert len(addmm) == 7
    assert rows.keys() >= set(addmm)
    lines = (Path(__file__).parent / "models.py").read_text().splitlines()
    gelu = rows["gelu"]
    assert gelu["modules"] == ["Mlp$1", "Block$1"]
    assert (Path(gelu["file"]).name, "functional.gelu" in lines[gelu["line"] - 1]) == ("models.py", True)
    assert gelu["types"] == ["tensor<4x64xf32>"]
    assert "gelu" in gelu["made_of"]
    text = tcap("ls", str(assets / "debug.aimodel"))
    assert "Mlp$1.Block$1.Linear$3" in text
    assert f"models.py:{gelu['line']}" in text


@pytest.mark.spec("CAI-92")
def test_of_release_mode_it_is_told_what_is_lost(assets: Path) -> None:
    for verb in ("show", "ls"):
        text = tcap(verb, str(assets / "release.aimodel"))
        assert "none: converted in release mode, so that the torch nodes, modules and lines" in text
    assert "locations     of 36 of 36 operations" in tcap("show", str(assets / "debug.aimodel"))
