"""Equivalence's stage 2 and stage 3 files, read and written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tensorcap.localization import Suspect
from tensorcap.reports.equivalence import (
    Component,
    components,
    faults,
    read_faults,
    stage2,
    stage3,
    write_stage,
)
from tensorcap.rerun import OwnError
from tensorcap_formats.errors import ReadError, UsageError

# R of each component, in execution order: the method's documents say that the earliest step is to blame
RATIOS = [("rotary", 2.0), ("norm", 1.0), ("gate", 1.5), ("attn", 20.0), ("decoder", 40.0), ("lm_head", 9.0)]


def as_stage2(ratios: list[tuple[str, float | None]], limit: float = 1.2) -> dict[str, Any]:
    results = [{"component": name, "r_ratio": r, "passed": r is not None and r < limit} for name, r in ratios]
    passed = sum(one["passed"] is True for one in results)
    return {"results": results, "passed": passed, "failed": len(results) - passed, "total": len(results)}


def written(folder: Path, content: object) -> Path:
    path = folder / "stage.json"
    path.write_text(json.dumps(content))
    return path


@pytest.mark.spec("LCL-22")
def test_the_earliest_step_is_the_primary_fault(tmp_path: Path) -> None:
    found = read_faults(written(tmp_path, as_stage2(list(RATIOS))))
    assert [(one.component, one.pattern, one.root_cause) for one in found] == [
        ("gate", "step", "precision_ordering"),
        ("attn", "step", "missing_algorithm"),
        ("decoder", "step", "missing_algorithm"),
        ("lm_head", "step", "missing_multiplier"),
        ("rotary", "spike", "precision_ordering"),
    ]
    told = stage3(found)
    assert (told["num_faults"], told["primary_fault"]["component"]) == (5, "gate")
    assert set(told["faults"][0]) == {"component", "r_ratio", "pattern", "root_cause", "description"}
    assert stage3(()) == {"faults": [], "num_faults": 0}


@pytest.mark.spec("LCL-22")
@pytest.mark.parametrize(
    ("name", "ratio", "cause", "says"),
    [
        ("rotary_emb", 130.0, "missing_algorithm", "rotary frequencies"),
        ("mlp.router", 1774.0, "routing_ignored", "routing weights"),
        ("mlp", 31.7, "missing_algorithm", "another computation"),
        ("norm", 1.85, "precision_ordering", "variance in low precision"),
        ("o_proj", 4.0, "missing_multiplier", "factor"),
        ("act", 0.5, "over_precision", "more precise"),
        ("act", 0.9, "unknown", "within tolerance"),
    ],
)
def test_a_root_cause_is_recognised_by_bands_of_r(name: str, ratio: float, cause: str, says: str) -> None:
    (found,) = faults([Component(name, ratio, passed=False)])
    assert found.root_cause == cause
    assert says in found.description


@pytest.mark.spec("LCL-22")
def test_spikes_are_told_from_the_largest_r_and_errors_last() -> None:
    ratios = [("a", 2.0), ("b", 1.0), ("c", None), ("d", 1.0), ("e", 9.0)]
    found = faults([Component(name, r, r == 1.0, "it crashed" if r is None else "") for name, r in ratios])
    assert [(one.component, one.pattern) for one in found] == [("e", "spike"), ("a", "spike"), ("c", "error")]
    assert (found[2].root_cause, found[2].description) == ("test_error", "It crashed.")


def own(key: str, status: Any, ratio: float | None = None, made: Any = "result") -> OwnError:
    return OwnError(key, key.split("/")[1], made, True, 0.1, ratio, status, (), is_precise=False)


@pytest.mark.spec("LCL-21")
def test_a_replay_is_written_as_stage_2_with_each_module_once(tmp_path: Path) -> None:
    owns = [
        own("0/a/output", "within-rounding", 1.01),
        own("0/b/input.x", "diverged", 9.0, "argument"),
        own("0/b/output.0", "diverged", 30.0),
        own("0/b/output.1", "within-rounding", 1.0),
        own("0/c/output", "unjudged"),
        own("1/a/output", "within-rounding", 1.1),
        own("0/d/output", "diverged", math.inf),
    ]
    path = tmp_path / "stage2.json"
    write_stage(path, stage2(components(owns)))
    told = json.loads(path.read_text())
    assert (told["passed"], told["failed"], told["total"]) == (1, 3, 4)
    assert told["results"] == [
        {"component": "a", "r_ratio": 1.1, "passed": True},
        {"component": "b", "r_ratio": 30.0, "passed": False},
        {"component": "c", "r_ratio": None, "passed": False, "error": "0/c/output could not be judged"},
        {"component": "d", "r_ratio": math.inf, "passed": False},
    ]
    assert [one.component for one in read_faults(path)] == ["b", "d", "c"]


def suspect(module: str, reason: str) -> Suspect:
    return Suspect(
        module=module,
        class_name="Block",
        key=f"0/{module}/output",
        by=("replay",),
        status="diverged",
        findings=(),
        own=0.1,
        inherited=None,
        total=None,
        ratio=None,
        noise=None,
        cause="",
        reason=reason,
        examined=None,
    )


@pytest.mark.spec("LCL-21", "LCL-22")
def test_every_module_that_is_accused_is_a_fault(tmp_path: Path) -> None:
    owns = [
        own("0/a/output", "within-rounding", 1.01),
        own("0/b/input.x", "diverged", 9.0, "argument"),
        own("0/c/input.x", "diverged", None, "argument"),
    ]
    accused = [suspect("b", "what it hands on is wrong"), suspect("e", "it comes first")]
    path = tmp_path / "stage2.json"
    write_stage(path, stage2(components(owns, accused)))
    assert json.loads(path.read_text())["results"] == [
        {"component": "a", "r_ratio": 1.01, "passed": True},
        {"component": "b", "r_ratio": 9.0, "passed": False},
        {"component": "e", "r_ratio": None, "passed": False, "error": "it comes first"},
    ]
    assert [(one.component, one.description) for one in read_faults(path)][1] == ("e", "It comes first.")


@pytest.mark.spec("LCL-22")
def test_a_stage_3_file_is_read_with_its_primary_fault_first(tmp_path: Path) -> None:
    listed = [
        {"component": name, "r_ratio": r, "pattern": "step", "root_cause": "x", "description": "y"}
        for name, r in (("attn", 20.0), ("gate", 1.5))
    ]
    content = {"faults": listed, "num_faults": 2, "primary_fault": listed[1]}
    assert [one.component for one in read_faults(written(tmp_path, content))] == ["gate", "attn"]
    assert read_faults(written(tmp_path, {"faults": [], "num_faults": 0})) == ()


@pytest.mark.spec("LCL-22")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"passed": 5}, r"passed: found 5, expected 1"),
        (
            {"results": [{"component": "a", "r_ratio": 1.0}]},
            "result 1: passed: found None, expected true or false",
        ),
        ({"results": [{"component": 3, "passed": True}]}, "result 1: component: found 3, expected a text"),
        (
            {"results": [{"component": "a", "passed": True, "r_ratio": "big"}]},
            "r_ratio: found 'big', expected a number",
        ),
        ({"results": None}, "neither results"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(tmp_path: Path, change: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read_faults(written(tmp_path, {**as_stage2(list(RATIOS)), **change}))
    (tmp_path / "no.json").write_text("{")
    with pytest.raises(ReadError, match="is no JSON"):
        read_faults(tmp_path / "no.json")


@pytest.mark.spec("LCL-22")
def test_an_r_that_is_nan_is_no_pass(tmp_path: Path) -> None:
    entry = {"component": "a", "r_ratio": math.nan, "passed": True}
    (found,) = read_faults(written(tmp_path, {"results": [entry]}))
    assert (found.pattern, found.root_cause) == ("error", "test_error")
