"""What differs in the free runs and is undone there accuses nobody by its own error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from tensorcap.comparison import Comparison, Finding, Pair, compare, first_divergence
from tensorcap.localization.evidence import EvidenceSource, Totals, evidence_of_injection
from tensorcap.rerun import InjectedRun, OwnError
from tests.comparison.conftest import MemoryArchive

X = np.random.default_rng(4).normal(size=(8, 64)).astype(np.float32)


def free(status: Any) -> Comparison:
    """The comparison of two runs, with this status of a pair that differs."""
    runs = [MemoryArchive({"0/m/output": values}) for values in (X, X + 1)]
    found = compare(*runs)
    (pair,) = found.pairs
    changed = Pair(pair.key, status, pair.reference, pair.target, pair.difference)
    return type(found)(**{**{n: getattr(found, n) for n in found.__dataclass_fields__}, "pairs": (changed,)})


@pytest.mark.spec("LCL-130")
@pytest.mark.parametrize(
    ("key", "made", "status", "expected"),
    [
        pytest.param("0/m/output", "result", "explained", True, id="result"),
        pytest.param("0/m/output", "argument", "explained", True, id="result-that-shows-what-lies-before"),
        pytest.param("0/m/output", "state", "explained", True, id="state"),
        pytest.param("0/m/output", "result", "diverged", False, id="not-undone"),
        pytest.param("0/m/input.x", "argument", "explained", False, id="argument"),
    ],
)
def test_a_result_that_is_undone_in_the_free_run_accuses_nobody(
    key: str, made: Literal["result", "argument", "state"], status: str, expected: bool
) -> None:
    own = OwnError(key, "m", made, True, 0.8, None, "diverged", (), False)
    assert Totals(free(status)).explain(own) is expected


def injected(
    free_status: Any,
    free_error: float,
    own_errors: tuple[OwnError, ...],
    *,
    status: Any = None,
    findings: tuple[Finding, ...] = (),
) -> EvidenceSource:
    """What an injected run shows in which the result of m is handed on to n, and both differ by 1."""
    keys = "0/m/output", "0/n/input.x"
    reference = MemoryArchive(dict.fromkeys(keys, X), is_ordered=True)
    natural = MemoryArchive(dict.fromkeys(keys, X + 1))
    alone = compare(reference, MemoryArchive(dict.fromkeys(keys, X + np.float32(free_error))))
    found = compare(reference, natural)
    if status is not None:
        found = with_status(found, status, findings)
        found = replace(found, divergence=first_divergence(reference, found.pairs))
    run = InjectedRun(Path("injected.h5"), reference, natural, found, own_errors, ())
    return evidence_of_injection(run, with_status(alone, free_status))


def with_status(comparison: Comparison, status: Any, findings: tuple[Finding, ...] = ()) -> Comparison:
    pairs = [replace(pair, status=status, findings=findings or pair.findings) for pair in comparison.pairs]
    return replace(comparison, pairs=tuple(pairs))


def accused(source: EvidenceSource) -> list[str]:
    return [one.module for one in source.evidence]


@pytest.mark.spec("LCL-301")
@pytest.mark.parametrize(
    ("status", "error", "expected"),
    [
        pytest.param("explained", 1.0, [], id="explained"),
        pytest.param("within-rounding", 1e-6, [], id="far-more-than-in-the-free-run"),
        pytest.param("diverged", 1.0, ["m"], id="as-much"),
    ],
)
def test_the_first_divergence_of_an_injected_run_is_held_against_the_free_run(
    status: str, error: float, expected: list[str]
) -> None:
    assert accused(injected(status, error, ())) == expected


@pytest.mark.spec("LCL-301")
@pytest.mark.parametrize("status", ["explained", "diverged"])
def test_who_hands_on_what_is_undone_is_not_accused(status: str) -> None:
    result = OwnError("0/m/output", "m", "result", True, 0.8, None, "diverged", (), False)
    argument = OwnError("0/n/input.x", "@root", "argument", False, 0.8, None, "diverged", (), False)
    assert accused(injected(status, 1.0, (result, argument))) == (["m"] if status == "diverged" else [])


@pytest.mark.spec("LCL-301")
@pytest.mark.parametrize(
    ("key", "expected", "expected_first"),
    [
        pytest.param("0/m/output", [], [], id="that-result"),
        pytest.param("0/m/output.1", ["@root"], ["m"], id="another"),
    ],
)
def test_who_hands_on_a_result_is_excused_by_that_result_alone(
    key: str, expected: list[str], expected_first: list[str]
) -> None:
    excused = OwnError(key, "m", "result", True, 0.8, None, "diverged", (), False)
    argument = OwnError("0/n/input.x", "@root", "argument", False, 0.8, None, "diverged", (), False)
    keys = "0/m/output", "0/m/output.1", "0/n/input.x"
    reference = MemoryArchive(dict(zip(keys, (X, X[::-1], X), strict=True)), is_ordered=True)
    natural = MemoryArchive(dict(zip(keys, (X + 1, X[::-1], X + 1), strict=True)))
    found = compare(reference, natural)
    pairs = [replace(p, status="explained" if p.key == key else "diverged") for p in found.pairs]
    for errors in ((excused, argument), ()):
        run = InjectedRun(Path("injected.h5"), reference, natural, found, errors, ())
        source = evidence_of_injection(run, replace(found, pairs=tuple(pairs)))
        assert accused(source) == (expected if errors else expected_first)


@pytest.mark.spec("LCL-301", "LCL-70")
@pytest.mark.parametrize(
    ("status", "findings", "noted"),
    [
        pytest.param("diverged", (), ("0/m/output", "0/n/input.x"), id="would-accuse"),
        pytest.param("explained", (), (), id="explained"),
        pytest.param("suspect", (Finding("growth", 2.0, 1.0, "suspect", ""),), (), id="only-grew"),
    ],
)
def test_what_would_accuse_nobody_is_not_noted_for_its_total_error(
    status: str, findings: tuple[Finding, ...], noted: tuple[str, ...]
) -> None:
    source = injected("suspect", 1e-6, (), status=status, findings=findings)
    assert (accused(source), source.unjudged) == ([], noted)
    source = injected("within-rounding", 1e-6, (), status=status, findings=findings)
    assert (accused(source), source.unjudged, bool(source.notes)) == ([], (), bool(noted))
