"""`tcap replay` and `tcap localize`, as they print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

MODEL = """
import torch
from torch import nn
from tensorcap import Workload

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)).eval()

def reference():
    return Workload(make(), (torch.linspace(-2, 2, 64).reshape(4, 16),))

def target():
    made = reference()
    made.model[1] = nn.ReLU()
    return made
"""


@pytest.fixture
def runs(tcap: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.py").write_text(MODEL)
    for name in ("reference", "target"):
        assert tcap("capture", "torch", f"m.py:{name}", "-o", f"{name}.h5").exit_code == 0


@pytest.mark.usefixtures("runs")
@pytest.mark.spec("RPL-2")
def test_a_run_that_repeats_itself_is_told_in_a_line(tcap: Any) -> None:
    done = tcap("replay", "reference.h5")
    assert done.exit_code == 0
    assert "gives its own 7 tensors back bit for bit" in done.stdout


@pytest.mark.usefixtures("runs")
@pytest.mark.spec("RPL-1")
def test_replay_names_the_module_that_makes_the_error(tcap: Any) -> None:
    done = tcap("replay", "reference.h5", "target.h5", "--json", status=1)
    found = json.loads(done.stdout)
    assert (done.exit_code, found["exit_status"]) == (1, 1)
    bad = [one for one in found["owns"] if one["status"] == "diverged"]
    assert [(one["module"], one["made"]) for one in bad] == [("1", "result")]
    assert "0/1/output" in tcap("replay", "reference.h5", "target.h5", status=1).stdout


@pytest.mark.usefixtures("runs")
@pytest.mark.spec("RPL-4")
def test_the_target_is_run_on_what_the_reference_holds(tcap: Any) -> None:
    done = tcap("replay", "reference.h5", "--target", "m.py:target", "--json", status=1)
    found = json.loads(done.stdout)
    assert (done.exit_code, found["way"]) == (1, "forward")
    bad = [one for one in found["owns"] if one["status"] == "diverged"]
    assert [(one["module"], one["made"]) for one in bad] == [("1", "result")]
    done = tcap("replay", "reference.h5", "--target", "m.py:reference", "--reference", "m.py:reference")
    assert done.exit_code == 0
    assert "No module makes an error of its own: 7 tensors within rounding." in done.stdout


@pytest.mark.usefixtures("runs")
@pytest.mark.spec("LCL-2")
@pytest.mark.parametrize(("model", "by"), [("m.py:reference", "replay"), ("none", "archives")])
def test_localize_says_who_and_by_what(tcap: Any, model: str, by: str) -> None:
    done = tcap("localize", "reference.h5", "target.h5", "--reference", model, "--json", status=1)
    found = json.loads(done.stdout)
    assert found["by"] == by
    assert found["suspects"][0]["module"] == "1"
    assert found["suspects"][0]["diagnosis"]["kind"] == "activation"
    printed = tcap("localize", "reference.h5", "target.h5", "--reference", model, status=1).stdout
    assert "1. 1 (" in printed
