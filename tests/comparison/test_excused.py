"""Rules that explain or accuse one tensor because of another need that one to be equal, not excused.

Who is excused, behind routers, is tested in `test_agreement`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensorcap.comparison import POLICY, Decision, Finding, Pair, compare, decide
from tensorcap.comparison.exchanged_operations import _first_wrong
from tensorcap.comparison.held_values import _Search
from tensorcap.comparison.operation_points import OperationPoints
from tensorcap.localization.error_origins import ErrorOrigins, Gap
from tests.comparison.conftest import MakeArchive

ROUNDED = Finding("growth", 0.1, 1.4, "within-rounding", "row error 0.1")
WRONG = Finding("gain", 9.0, 1.5, "diverged", "9 times")
BOTH = pytest.mark.parametrize("is_excused", [False, True])


def pairs_of(make: MakeArchive, judged: dict[str, Decision]) -> dict[str, Pair]:
    """Pairs of tensors of floats, in order, with what was decided of them."""
    rng = np.random.default_rng(3)
    ours = {key: rng.normal(size=(4, 8)).astype(np.float32) for key in judged}
    theirs = {key: values + np.float32(0.01) for key, values in ours.items()}
    found = compare(make(ours), make(theirs))
    return {pair.key: decide(pair, judged[pair.key]) for pair in found.pairs}


def rounded(*, is_excused: bool) -> Decision:
    return Decision.of_findings("policy", [ROUNDED], is_excused=is_excused)


@pytest.mark.spec("CMP-92")
def test_another_decision_ends_the_excuse_and_one_without_a_status_does_not(
    make_archive: MakeArchive,
) -> None:
    pair = pairs_of(make_archive, {"0/a/output": rounded(is_excused=True)})["0/a/output"]
    assert (pair.is_green, pair.is_equal) == (True, False)
    assert not decide(pair, Decision("values", None, "counted")).is_equal
    assert not pair.with_difference(None).is_equal
    assert decide(pair, Decision("tolerance", "match")).is_equal


@pytest.mark.spec("CMP-92", "SYN-21")
@BOTH
def test_an_operation_is_the_source_of_an_error_if_what_it_takes_is_equal(
    make_archive: MakeArchive, is_excused: bool
) -> None:
    pairs = pairs_of(make_archive, {"0/m:a/op": rounded(is_excused=is_excused)})
    flow = SimpleNamespace(nearest_inputs=lambda *_: ["0/m:a"], pairs=lambda _: list(pairs.values()))
    points: Any = SimpleNamespace(_known={"b": SimpleNamespace(where="0/m:b")}, flow=flow)
    assert OperationPoints._is_source(points, "b") is not is_excused


@pytest.mark.spec("CMP-92")
@BOTH
def test_an_exchange_of_operations_is_told_if_what_they_take_is_equal(
    make_archive: MakeArchive, is_excused: bool
) -> None:
    wrong = Decision.of_findings("policy", [WRONG])
    pairs = pairs_of(make_archive, {"0/m:a/op": rounded(is_excused=is_excused), "0/m:b/op": wrong})
    region: Any = SimpleNamespace(inputs={"0/m:a/op"}, results={"0/m:b/op"})
    assert _first_wrong(region, region, pairs) == ("" if is_excused else "0/m:b/op")


@pytest.mark.spec("CMP-92")
@BOTH
def test_another_value_in_a_place_is_explained_if_what_is_made_of_it_is_equal(
    make_archive: MakeArchive, is_excused: bool
) -> None:
    wrong = Decision.of_findings("policy", [WRONG])
    pairs = pairs_of(make_archive, {"0/m:a/op": wrong, "0/m:b/op": rounded(is_excused=is_excused)})
    flow: Any = SimpleNamespace(nearest_users=lambda *_: ["b"], pairs=lambda _: [pairs["0/m:b/op"]])
    nowhere: Any = None
    search = _Search(nowhere, nowhere, POLICY.precision("bfloat16"), flow)
    assert search.is_agreed_after(pairs["0/m:a/op"], {}) is not is_excused


@pytest.mark.spec("CMP-92", "LCL-260")
@BOTH
def test_what_is_not_known_is_proven_by_what_is_equal(make_archive: MakeArchive, is_excused: bool) -> None:
    """`first` has no record in the target, and is given to `second`, whose result both have."""
    rng = np.random.default_rng(4)
    x, hidden, result = (rng.normal(size=(4, 8)).astype(np.float32) for _ in range(3))
    sites = "", "block", "block.first", "block.second"
    run = {"modules": [{"path": site, "class": "my.M"} for site in sites], "scope": {"inputs": True}}
    tensors = {
        "0/block/input.x": x,
        "0/block.first/output": hidden,
        "0/block.second/input.x": hidden,
        "0/block.second/output": result,
        "0/block/output": result + 1,
    }
    known = {key: tensors[key] for key in ("0/block/input.x", "0/block.second/output", "0/block/output")}
    reference, target = make_archive(tensors, run=run), make_archive(known, run=run)
    key = "0/block.second/output"
    pairs = [
        decide(pair, rounded(is_excused=is_excused)) if pair.key == key else pair
        for pair in compare(reference, target).pairs
    ]
    gap = ErrorOrigins(reference, target, pairs).gap(next(p for p in pairs if p.key == "0/block/output"))
    assert ("block.first" in gap.modules) is is_excused


@pytest.mark.spec("CMP-92", "LCL-260")
@BOTH
def test_another_mistake_is_told_from_a_first_one_by_what_is_equal_before_it(
    make_archive: MakeArchive, monkeypatch: pytest.MonkeyPatch, is_excused: bool
) -> None:
    """Before one tensor that differs lie `a` and `b`, before the next one `b` and `c`."""
    wrong = Decision.of_findings("policy", [WRONG])
    keys = {"0/a/output": rounded(is_excused=is_excused), "0/b/output": wrong, "0/c/output": wrong}
    pairs = pairs_of(make_archive, keys)
    archive = make_archive({key: np.ones((4, 8), np.float32) for key in keys})
    origins = ErrorOrigins(archive, archive, list(pairs.values()))
    between = {"0/b/output": ("a", "b"), "0/c/output": ("b", "c")}
    known = {"0/a/output": pairs["0/a/output"]}
    monkeypatch.setattr(
        ErrorOrigins, "gap", lambda _, pair: Gap(dict.fromkeys(between[pair.key]), dict(known))
    )
    found = origins.module_of(pairs["0/b/output"], list(pairs.values()))
    assert (found == "b") is not is_excused
