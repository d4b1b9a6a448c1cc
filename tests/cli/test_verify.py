"""`tcap verify` at the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.cli.conftest import ROOT, Tcap

MODELS = ROOT / "examples" / "models.py"
PORTS = f"""
import sys
sys.path.insert(0, {str(MODELS.parent)!r})
import models
import tensorcap

PORTS = {{"llama": tensorcap.Port(models.reference, models.port, dtypes=("float32",))}}
twin = tensorcap.Port(models.reference, models.reference)
"""


@pytest.mark.spec("VER-32")
@pytest.mark.spec("VER-40")
def test_the_wrong_activation_is_named_with_what_it_is(tcap: Tcap, folder: Path) -> None:
    done = tcap("verify", f"{MODELS}:reference", f"{MODELS}:port", "-o", "report", status=1)
    lines = done.stdout.splitlines()
    accused = [line for line in lines if line.startswith(("1. ", "2. "))]
    assert len(accused) == 1
    assert accused[0].startswith("1. model.layers.2.mlp.act_fn (SiLUActivation) is wrong: its own error is ")
    assert "gelu tanh where the reference has silu" in accused[0]
    assert any("only inherit an error" in line for line in lines)
    assert any(line.startswith("The execution order is the same: ") for line in lines)
    assert lines == (folder / "report" / "summary.txt").read_text().splitlines()
    assert "injecting …" in done.stderr


@pytest.mark.spec("VER-1")
@pytest.mark.spec("VER-4")
@pytest.mark.spec("VER-40")
def test_the_reference_in_bfloat16_is_not_accused(tcap_json: Any, folder: Path) -> None:
    told = tcap_json("verify", f"{MODELS}:reference", "--dtype", "bfloat16", "-o", "report")
    assert (told["exit_status"], told["suspects"]) == (0, [])
    assert (told["reference"]["dtype"], told["target"]["dtype"]) == ("float32", "bfloat16")
    assert "Nothing is wrong that these runs show." in told["summary"]
    assert told == json.loads((folder / "report" / "verify.json").read_text())


@pytest.mark.spec("VER-1")
@pytest.mark.spec("VER-4")
def test_a_port_is_found_by_its_name(tcap: Tcap, folder: Path) -> None:
    (folder / "ports.py").write_text(PORTS)
    assert "model.layers.2.mlp.act_fn" in tcap("verify", "ports.py:llama", "-o", "one", status=1).stdout
    assert "Nothing is wrong" in tcap("verify", "ports.py:twin", "-o", "two").stdout
    refused = tcap("verify", "ports.py:llama", "--dtype", "bfloat16", "-o", "three", status=2)
    assert "port: dtype: found bfloat16, expected float32" in refused.stderr
    refused = tcap("verify", "ports.py:llama", "--prompt", "a", "-o", "three", status=2)
    assert "--prompt is not for a Port" in refused.stderr


@pytest.mark.spec("VER-1")
@pytest.mark.spec("VER-20")
def test_wrong_usage_is_refused_before_anything_runs(tcap: Tcap, folder: Path) -> None:
    missing = tcap("verify", f"{MODELS}:reference", "-o", "report", status=2)
    assert "expected TARGET, or what to change" in missing.stderr
    (folder / "mine").mkdir()
    refused = tcap("verify", f"{MODELS}:reference", f"{MODELS}:port", "-o", "mine", "--force", status=2)
    assert "mine: exists and is no report" in refused.stderr
    assert "runs in" not in refused.stderr
    tcap("verify", "no.h5", "no2.h5", "-o", "report", status=3)
    assert [path.name for path in folder.iterdir()] == ["mine"]
