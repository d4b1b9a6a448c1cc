"""What it takes to believe a hypothesis, on numbers that can be worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorcap.adapters import Operation
from tensorcap.diagnosis import Hypothesis, Scorer, rank_explanations
from tensorcap.diagnosis.code_mutations import classify_number
from tensorcap_formats.errors import UsageError
from tests.diagnosis.conftest import Diagnose

R = np.random.default_rng(2).standard_normal(64)


def hypothesis(kind: str = "x", *, count: int = 64, left: float = 0.0, **options: Any) -> Hypothesis:
    """One that explains a doubled tensor, but for a share of the error."""
    r = R[:count]
    return Hypothesis(kind, kind, 2 * r, 2 * r - left * r, r, **options)


@pytest.mark.spec("DIA-4")
@pytest.mark.parametrize(
    ("rounding", "inherited", "left", "is_within"),
    [
        pytest.param(0.0, 0.0, 0.009, True, id="below-1-percent"),
        pytest.param(0.0, 0.0, 0.011, False, id="above-1-percent"),
        pytest.param(0.01, 0.0, 0.079, True, id="below-4-roundings"),  # 0.079 of 0.5 is 0.0395
        pytest.param(0.01, 0.0, 0.082, False, id="above-4-roundings"),
        pytest.param(0.0, 0.02, 0.079, True, id="below-twice-what-arrives"),
        pytest.param(0.0, 0.02, 0.082, False, id="above-twice-what-arrives"),
        pytest.param(0.0, 0.3, 0.32, False, id="not-a-tenth-of-the-squared-error"),
    ],
)
def test_what_a_hypothesis_may_leave(rounding: float, inherited: float, left: float, is_within: bool) -> None:
    found = Scorer(rounding, inherited).score(hypothesis(left=left))
    assert found.before == pytest.approx(0.5)
    assert found.after == pytest.approx(left / 2) or not is_within
    assert found.is_within is is_within


@pytest.mark.spec("DIA-606")
@pytest.mark.parametrize(
    ("kind", "left", "options", "is_within"),
    [
        pytest.param("identity", 0.04, {"is_exact": True}, False, id="exact"),
        pytest.param("identity", 0.04, {}, True, id="not-exact"),
        pytest.param("holds", 0.04, {}, True, id="another-record"),
        pytest.param("holds", 0.06, {}, False, id="no-other-record"),
        pytest.param("factor", 0.06, {}, True, id="a-factor"),
    ],
)
def test_a_tensor_that_is_another_one_leaves_roundings_alone(
    kind: str, left: float, options: dict[str, bool], is_within: bool
) -> None:
    found = Scorer(1e-7, 0.2).score(hypothesis(kind, left=left, **options))
    assert found.before == pytest.approx(0.5)
    assert found.is_within is is_within


@pytest.mark.spec("DIA-7")
def test_each_fitted_number_needs_four_elements() -> None:
    scorer = Scorer(0.0, 0.0)
    assert not scorer.score(hypothesis(parameters=17)).is_within
    even = np.full(64, 3.0)  # all elements err alike, and all of them count
    assert scorer.score(Hypothesis("x", "x", 2 * even, 2 * even, even, parameters=16)).is_within


@pytest.mark.spec("DIA-7")
def test_an_outlier_counts_as_one_element() -> None:
    t = R.copy()
    t[5] += 100
    assert not Scorer(0.0, 0.0).score(Hypothesis("x", "x", t, t.copy(), R, parameters=1)).is_within


@pytest.mark.spec("DIA-8")
def test_few_values_and_many_alternatives_prove_nothing() -> None:
    scorer = Scorer(0.0, 0.0)
    assert not scorer.score(
        hypothesis(count=2, left=0.005)
    ).is_within  # 2/2 ln(1 / 0.005^2) = 10.6 < ln(10^9)
    assert scorer.score(hypothesis(count=16, left=0.005)).is_within
    assert not scorer.score(hypothesis(count=16, left=0.005, log_alternatives=80.0)).is_within


@pytest.mark.spec("DIA-9")
def test_fewer_numbers_come_first_and_make_more_needless() -> None:
    scorer = Scorer(1e-8, 0.0)
    found = [
        scorer.score(hypothesis("many", parameters=8)),
        scorer.score(hypothesis("one", parameters=1)),
        scorer.score(hypothesis("none")),
        scorer.score(hypothesis("only-here")),
        scorer.score(hypothesis("far", left=0.5)),
    ]
    assert [e.kind for e in rank_explanations(found)] == ["none", "one"]
    assert [e.kind for e in rank_explanations(found[3:])] == ["only-here"]


@pytest.mark.spec("DIA-9")
def test_a_parameter_that_is_rolled_says_why_a_result_is_in_another_order() -> None:
    scorer = Scorer(0.0, 0.0)
    order, rolled, guessed = (
        scorer.score(hypothesis(kind, log_alternatives=nats))
        for kind, nats in (("token-order", 0.0), ("parameter-shift", 0.4), ("parameter-shift", 2.0))
    )
    assert [e.kind for e in rank_explanations([order, rolled])] == ["parameter-shift"]
    assert [e.kind for e in rank_explanations([order, guessed])] == ["token-order", "parameter-shift"]


def test_a_family_can_be_left_out_by_its_name(diagnosed: Diagnose) -> None:
    r = np.random.default_rng(0).standard_normal((1, 12, 64))
    assert diagnosed(r, 3 * r).explanations[0].kind == "factor"
    without = diagnosed(r, 3 * r, without={"factors and offsets"})
    assert {"factor", "offset", "affine"}.isdisjoint(without.tried)
    assert "rounded" in without.tried


def test_a_family_that_does_not_exist_cannot_be_left_out(diagnosed: Diagnose) -> None:
    with pytest.raises(UsageError, match=r"without: is \['factors'\], expected some of: degenerate values, "):
        diagnosed(R, 3 * R, without={"factors"})


@pytest.mark.spec("DIA-47")
def test_a_few_outliers_in_one_token_are_no_place(diagnosed: Diagnose) -> None:
    r = np.random.default_rng(0).standard_normal((1, 12, 64))
    t = r.copy()
    t[0, 7, [3, 40, 50]] += 30
    assert diagnosed(r, t).status == "unexplained"


@pytest.mark.spec("DIA-17")
def test_two_values_at_a_limit_are_no_clamp(diagnosed: Diagnose) -> None:
    r = np.random.default_rng(0).standard_normal((1, 12, 64))
    r[0, [3, 8], [7, 60]] = 10
    assert diagnosed(r, np.minimum(r, 5)).status == "unexplained"


@pytest.mark.spec("DIA-606")
def test_what_is_near_to_its_own_wrong_input_is_not_called_skipped(diagnosed: Diagnose) -> None:
    rng = np.random.default_rng(3)
    x, y, given, noise = rng.standard_normal((4, 2, 8, 16))
    keys = "0/m/input.x", "0/m/output"
    ours, theirs = (dict(zip(keys, side, strict=True)) for side in ((x, y), (given, given + 0.15 * noise)))
    found = diagnosed(ours, theirs)
    assert "identity" not in [e.kind for e in found.explanations]
    same = diagnosed(ours, {**theirs, "0/m/output": given})
    assert same.explanations[0].kind == "identity"


@pytest.mark.spec("DIA-511")
@pytest.mark.parametrize(("is_whole", "kind"), [(True, "positions-differ"), (False, "offset")])
def test_a_number_that_is_added_to_places_is_one_of_places(is_whole: bool, kind: str) -> None:
    line = "position_ids = torch.arange(tokens) + past_seen_tokens"
    operation = Operation("add", "model.py:4", line, (), has_number=True, is_whole=is_whole)
    assert classify_number(operation, "1", 17)[0] == kind
