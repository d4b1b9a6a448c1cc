"""Faults among the results of component tests, also of the original tool's files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tensorcap.equivalence.component_result import ComponentResult, read_results, stage2_content
from tensorcap.equivalence.fault_localization import localize_faults, stage3_content
from tensorcap_formats.errors import UsageError


def original(**ratios: float) -> dict[str, object]:
    """A stage 2 file as the original tool writes it: in the order of its test files."""
    results = [{"component": n, "r_ratio": r, "passed": r < 1.2} for n, r in ratios.items()]
    passed = sum(r < 1.2 for r in ratios.values())
    return {"results": results, "passed": passed, "failed": len(ratios) - passed, "total": len(ratios)}


@pytest.mark.spec("EQV-40")
def test_the_earliest_step_is_named_where_the_original_names_the_largest() -> None:
    content = original(rotary=2.0, norm=1.0, gate=1.5, attn=20.0, decoder=40.0, lm_head=9.0)
    localized = localize_faults(read_results(content, "stage2.json"))
    assert [(fault.component, fault.pattern) for fault in localized.faults] == [
        ("gate", "step"),
        ("attn", "step"),
        ("decoder", "step"),
        ("lm_head", "step"),
        ("rotary", "spike"),
    ]
    written = stage3_content(localized)
    assert written["primary_fault"]["component"] == "gate"
    assert written["primary_fault"]["root_cause"] == "precision_ordering"
    assert written["num_faults"] == 5


@pytest.mark.spec("EQV-40")
def test_order_is_that_of_execution_and_what_is_within_explains() -> None:
    results = [  # as the tests run: the simplest first
        ComponentResult("norm", "norm", 5, 1.0, passed=True),
        ComponentResult("layers.1.mlp.down", "linear", 3, 5.0, passed=False),
        ComponentResult("layers.0.attn", "attention", 0, 2.0, passed=False),
        ComponentResult("layers.1.mlp", "mlp", 4, 90.0, passed=False),
        ComponentResult("embed", "embedding", 1, 1.0, passed=True),
        ComponentResult("layers.0", "layer", 2, 8.0, passed=False),
    ]
    localized = localize_faults(results)
    assert [fault.component for fault in localized.faults] == ["layers.0.attn", "layers.1.mlp.down"]
    assert localized.explained == (("layers.0", "layers.0.attn"), ("layers.1.mlp", "layers.1.mlp.down"))
    assert localized.faults[1].root_cause == "missing_multiplier"


@pytest.mark.spec("EQV-40")
def test_a_port_that_is_not_finite_is_told_in_words() -> None:
    verdict = "3 of 9 elements are finite on one side only"
    localized = localize_faults([ComponentResult("norm", ratio=math.inf, verdict=verdict)])
    assert localized.faults[0].description == f"{verdict}: a division by zero, an overflow, or a mask."


@pytest.mark.spec("EQV-41")
def test_results_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    results = (
        ComponentResult("a", "norm", 1, 1.0, 1.3, True, "fine", 0.99, 1.0, 12),
        ComponentResult("b", "mlp", 2, math.inf, 1.3, False, "spoiled", None, None, 7),
        ComponentResult("c", "linear", 3, error="the shapes differ"),
    )
    path = tmp_path / "stage2.json"
    path.write_text(json.dumps(stage2_content(results)))
    assert read_results(json.loads(path.read_text()), "stage2.json") == results
    assert json.loads(path.read_text())["failed"] == 2


@pytest.mark.spec("EQV-41")
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"faults": []}, "has no results"),
        ({"results": [{"component": "a", "passed": "yes"}]}, "passed: found 'yes', expected true or false"),
        ({"results": [], "total": 3}, "total: found 3, expected 0"),
    ],
)
def test_another_file_is_refused(content: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_results(content, "stage2.json")


@pytest.mark.spec("EQV-40")
def test_r_that_is_no_number_has_not_passed() -> None:
    content = {"results": [{"component": "a", "r_ratio": "nan", "passed": True}]}
    (fault,) = localize_faults(read_results(content, "stage2.json")).faults
    assert (fault.component, fault.pattern, fault.root_cause) == ("a", "error", "test_error")
