"""What differs in the free runs and is undone there accuses nobody by its own error."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest

from tensorcap.comparison import Comparison, Pair, compare
from tensorcap.localization.evidence import Totals
from tensorcap.rerun import OwnError
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
