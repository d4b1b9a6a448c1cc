"""What differs in the free runs and is undone there accuses nobody by its own error."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from tensorcap.comparison import Comparison, Pair, compare
from tensorcap.localization.evidence import Totals, evidence_of_injection
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


def injected(free_status: Any, free_error: float, own_errors: tuple[OwnError, ...]) -> list[str]:
    """Whom an injected run accuses in which the result of m is handed on to n, and both differ by 1."""
    keys = "0/m/output", "0/n/input.x"
    reference = MemoryArchive(dict.fromkeys(keys, X), is_ordered=True)
    natural = MemoryArchive(dict.fromkeys(keys, X + 1))
    found = compare(reference, natural)
    alone = compare(reference, MemoryArchive(dict.fromkeys(keys, X + np.float32(free_error))))
    pairs = tuple(Pair(p.key, free_status, p.reference, p.target, p.difference) for p in alone.pairs)
    changed = type(alone)(**{**{n: getattr(alone, n) for n in alone.__dataclass_fields__}, "pairs": pairs})
    run = InjectedRun(Path("injected.h5"), reference, natural, found, own_errors, ())
    return [one.module for one in evidence_of_injection(run, changed).evidence]


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
    assert injected(status, error, ()) == expected


@pytest.mark.spec("LCL-301")
@pytest.mark.parametrize("status", ["explained", "diverged"])
def test_who_hands_on_what_is_undone_is_not_accused(status: str) -> None:
    result = OwnError("0/m/output", "m", "result", True, 0.8, None, "diverged", (), False)
    argument = OwnError("0/n/input.x", "@root", "argument", False, 0.8, None, "diverged", (), False)
    assert injected(status, 1.0, (result, argument)) == (["m"] if status == "diverged" else [])
