"""`tcap replay` and `tcap localize`, as they print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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
@pytest.mark.spec("RPL-3")
def test_a_run_that_repeats_itself_is_reported_in_a_line(tcap: Any) -> None:
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
@pytest.mark.spec("RPL-5")
def test_the_target_is_run_on_what_the_reference_holds(tcap: Any) -> None:
    done = tcap("replay", "reference.h5", "--target-model", "m.py:target", "--json", status=1)
    found = json.loads(done.stdout)
    assert (done.exit_code, found["way"]) == (1, "forward")
    bad = [one for one in found["owns"] if one["status"] == "diverged"]
    assert [(one["module"], one["made"]) for one in bad] == [("1", "result")]
    done = tcap(
        "replay", "reference.h5", "--target-model", "m.py:reference", "--reference-model", "m.py:reference"
    )
    assert done.exit_code == 0
    assert "No module makes an error of its own: 7 tensors within rounding." in done.stdout


@pytest.mark.usefixtures("runs")
def test_replay_prints_how_each_leaf_rounds_beside_the_twin(tcap: Any) -> None:
    tcap("capture", "torch", "m.py:reference", "--dtype", "bfloat16", "-o", "low.h5")
    done = tcap("replay", "reference.h5", "low.h5", "--all")
    text = (
        "R of 3 results of leaves, against the model itself in bfloat16 on the same values: 1 to 1, median 1."
    )
    assert text in done.stdout
    rows = done.stdout.partition(text)[2].partition("\nNext: ")[0].splitlines()[2:]
    assert [row.split()[1] for row in rows if row] == ["0/0/output", "0/1/output", "0/2/output"]
    assert "R of" not in tcap("replay", "reference.h5", "target.h5", status=1).stdout


@pytest.mark.usefixtures("runs")
@pytest.mark.spec("LCL-2")
@pytest.mark.parametrize(("model", "by"), [("m.py:reference", "replay"), ("none", "archives")])
def test_localize_says_who_and_by_what(tcap: Any, model: str, by: str) -> None:
    done = tcap("localize", "reference.h5", "target.h5", "--reference-model", model, "--json", status=1)
    found = json.loads(done.stdout)
    assert found["by"] == by
    assert found["suspects"][0]["module"] == "1"
    assert found["suspects"][0]["diagnosis"]["kind"] == "activation"
    printed = tcap("localize", "reference.h5", "target.h5", "--reference-model", model, status=1).stdout
    assert "1. 1 (" in printed


@pytest.mark.usefixtures("runs")
@pytest.mark.spec("LCL-10", "LCL-20")
def test_localize_into_a_target_needs_neither_its_archive_nor_the_references_model(tcap: Any) -> None:
    done = tcap("localize", "reference.h5", "--target-model", "m.py:target", "--json", status=1)
    found = json.loads(done.stdout)
    assert (found["by"], found["exit_status"]) == ("injection", 1)
    assert [(one["module"], one["by"]) for one in found["suspects"]] == [("1", ["injection"])]
    assert found["suspects"][0]["examined"]["status"] == "explained"
    both = tcap(
        "localize",
        "reference.h5",
        "target.h5",
        "--target-model",
        "m.py:target",
        "--reference-model",
        "m.py:reference",
        status=1,
    )
    assert "by replay and injection: its own result is wrong for what the target gave it" in both.stdout
    assert "Explained by what is within: @root by 1." in both.stdout
    assert "Total error in execution order: a step at 0/1/output" in both.stdout
    right = tcap("localize", "reference.h5", "--target-model", "m.py:reference")
    assert "Nobody is accused." in right.stdout


@pytest.mark.usefixtures("runs")
@pytest.mark.spec("LCL-17")
def test_localize_is_given_a_repeated_run(tcap: Any) -> None:
    done = tcap("localize", "reference.h5", "target.h5", "--target-repeat", "target.h5", "--json", status=1)
    found = json.loads(done.stdout)
    assert found["noise"] == {"largest": 0.0, "first": None, "module": None}
    assert found["suspects"][0]["noise"] == 0.0
    other = tcap("localize", "reference.h5", "target.h5", "--target-repeat", "reference.h5", status=1)
    assert "The target does not repeat itself: 1 makes 0/1/output otherwise from run to run" in other.stdout
    assert "root cause: run-to-run noise" in other.stdout or "run to run 0." in other.stdout


@pytest.mark.usefixtures("runs")
@pytest.mark.spec("LCL-21", "LCL-22")
def test_the_files_of_the_equivalence_method_are_written_and_read(tcap: Any) -> None:
    files = "--stage2", "two.json", "--stage3", "three.json"
    tcap("equivalence", "archives", "reference.h5", "target.h5", *files, status=1)
    two, three = (json.loads(Path(name).read_text()) for name in files[1::2])
    assert [(one["component"], one["passed"]) for one in two["results"]] == [
        ("0", True),
        ("1", False),
        ("2", True),
        ("@root", True),
    ]
    assert [one["component"] for one in three["faults"]] == ["1"]
    for source in ("two.json", "three.json"):
        told = tcap("equivalence", "localize", "--from", source, "--json", status=1)
        assert [one["component"] for one in json.loads(told.stdout)["faults"]] == ["1"]
        assert (
            "1. 1 (error)" in tcap("equivalence", "localize", "--from", source, status=1).stdout
        )  # float32 has no twin, no R
    Path("good.json").write_text(
        json.dumps({"results": [{"component": "a", "r_ratio": 1.0, "passed": True}]})
    )
    assert (
        "No component failed."
        in tcap("equivalence", "localize", "--from", "good.json", "--stage3", "none.json").stdout
    )
    assert json.loads(Path("none.json").read_text()) == {"faults": [], "num_faults": 0}
    refused = tcap(
        "equivalence", "archives", "reference.h5", "target.h5", "--reference-model", "none", *files, status=2
    )
    assert "own errors are not known" in refused.stderr
    assert "expected REF TGT" in tcap("localize", "reference.h5", status=2).stderr
