"""Mistakes of several ranks, planted by numpy into what each of them holds, and named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap.diagnosis import Diagnosis, diagnose
from tensorcap_formats.dtypes import Array
from tensorcap_formats.open import open_archive, open_ranks
from tests.diagnosis.conftest import write_in

PRECISIONS = ("float32", "bfloat16")
RNG = np.random.default_rng(17)
X = RNG.standard_normal((2, 12, 32))
W = RNG.standard_normal((64, 32)) / 4
B = RNG.standard_normal(64)
RESIDUAL = RNG.standard_normal((2, 12, 64))
Y = X @ W.T + B
TERMS = [X[..., k : k + 8] @ W[:, k : k + 8].T for k in range(0, 32, 8)]
PIECES = np.split(Y, 4, -1)
RULES = {
    "replicated": "replicated",
    "sum": "sum",
    "columns": "concat -1",
    "fused": "concat -1 parts=2",
    "copies": "concat -1 copies=2",
}


def diagnosed(
    folder: Path, held: Sequence[Array], rule: str, *, whole: Array = Y, precision: str = "float32"
) -> Diagnosis:
    """Diagnose `0/m/output`, of which each rank holds something, beside an equal bias and residual."""
    beside = {"0/m/param.bias": B, "0/r/output": RESIDUAL}
    reference = write_in(folder / "ref.h5", {"0/m/output": whole, **beside}, precision="float32", run={})
    paths = []
    for rank, tensor in enumerate(held):
        ranks = {"rank": rank, "count": len(held), "tensors": [{"rule": rule, "keys": ["0/m/output"]}]}
        tensors = {"0/m/output": tensor, **beside}
        paths.append(
            write_in(folder / f"t.rank{rank}.h5", tensors, precision=precision, run={"ranks": ranks})
        )
    with open_archive(reference) as ours, open_ranks(paths, folder / "t.rank*.h5") as theirs:
        return diagnose(ours, theirs, "0/m/output")


def pieces(*numbers: int) -> list[Array]:
    return [PIECES[number] for number in numbers]


HALVES = np.split(Y, 2, -1)  # as of a gate and an up projection
KEYS = np.split(Y, 2, -1)  # two heads, on two ranks each


@pytest.mark.spec("DIA-300", "DIA-301")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("held", "rule", "kind"),
    [
        pytest.param([4 * (Y - B) + B] * 4, "replicated", "reduced-again", id="a sum taken twice"),
        pytest.param([2 * Y - B] * 4, "replicated", "reduced-again", id="twice over pairs of ranks"),
        pytest.param([(Y - B) / 4 + B] * 4, "replicated", "reduced-mean", id="a mean for a sum"),
        pytest.param([Y + 3 * B] * 4, "replicated", "bias-on-ranks", id="a bias of each rank"),
        pytest.param([term + B for term in TERMS], "sum", "bias-on-ranks", id="terms with a bias each"),
        pytest.param([Y + 3 * RESIDUAL] * 4, "replicated", "term-on-ranks", id="a residual of each rank"),
        pytest.param([term + B for term in TERMS], "replicated", "reduce-missing", id="no sum taken"),
        pytest.param(pieces(0, 1, 2, 3), "fused", "fused-cut", id="a fused tensor cut as one"),
        pytest.param(
            [np.concatenate([np.split(half, 4, -1)[i] for half in HALVES], -1) for i in range(4)],
            "columns",
            "fused-cut",
            id="one cut as a fused one",
        ),
        pytest.param(
            [KEYS[i] for i in (0, 1, 0, 1)], "copies", "repeats-order", id="heads repeated as a whole"
        ),
        pytest.param(pieces(0, 0, 2, 3), "columns", "rank-parts", id="another rank's part"),
        pytest.param(pieces(1, 0, 3, 2), "columns", "rank-parts", id="parts exchanged"),
    ],
)
def test_a_mistake_of_ranks_is_named(
    tmp_path: Path, held: list[Array], rule: str, kind: str, precision: str
) -> None:
    diagnosis = diagnosed(tmp_path, held, RULES[rule], precision=precision)
    assert diagnosis.explanations[0].kind == kind, [e.text for e in diagnosis.explanations]


@pytest.mark.spec("DIA-301")
def test_the_rank_that_has_anothers_part_is_told(tmp_path: Path) -> None:
    first = diagnosed(tmp_path, pieces(0, 0, 2, 3), RULES["columns"]).explanations[0]
    assert first.text == "ranks have other parts than their own: rank 1 has that of rank 0"
    assert first.facts == {"parts": [[1, 0]]}


@pytest.mark.spec("DIA-300", "DIA-301")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("held", "rule", "whole"),
    [
        pytest.param(TERMS, "sum", Y - B, id="terms"),
        pytest.param(pieces(0, 1, 2, 3), "columns", Y, id="parts"),
        pytest.param([KEYS[i] for i in (0, 0, 1, 1)], "copies", Y, id="copies"),
    ],
)
def test_of_right_ranks_with_noise_nothing_is_said_of_ranks(
    tmp_path: Path, held: list[Array], rule: str, whole: Array, precision: str
) -> None:
    noise = 0.05 * RNG.standard_normal(Y.shape)
    diagnosis = diagnosed(tmp_path, held, RULES[rule], whole=whole + noise, precision=precision)
    kinds = {explanation.kind for explanation in diagnosis.explanations}
    said = ("reduce", "rank", "fused-cut", "repeats", "bias-on", "term-on")
    assert not [kind for kind in kinds if kind.startswith(said)]


@pytest.mark.spec("DIA-300")
def test_of_a_run_of_one_process_nothing_is_said_of_ranks(tmp_path: Path) -> None:
    reference = write_in(tmp_path / "ref.h5", {"0/m/output": Y}, precision="float32", run={})
    target = write_in(tmp_path / "tgt.h5", {"0/m/output": 4 * Y}, precision="float32", run={})
    with open_archive(reference) as ours, open_archive(target) as theirs:
        tried: dict[str, Any] = diagnose(ours, theirs, "0/m/output").tried
    assert "reduced-again" not in tried
