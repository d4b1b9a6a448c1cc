"""R, cosine, KL, first choices and percentiles of logits, against numpy in float64 written here."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tensorcap.equivalence.gates import Gate
from tensorcap.equivalence.logit_rows import compare_rows, error_directions, shared_columns, spread
from tensorcap_formats.errors import CaptureError, UsageError

RNG = np.random.default_rng(7)
SOURCE = RNG.normal(size=50).astype(np.float32)
TWIN = (SOURCE + 0.01 * RNG.normal(size=50)).astype(np.float32)
TARGET = (SOURCE + 0.02 * RNG.normal(size=50)).astype(np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64))
    return np.asarray(e / e.sum())


@pytest.mark.spec("EQL-10", "EQL-11")
def test_metrics_of_a_position_are_those_of_plain_numpy() -> None:
    s, w, t = (side.astype(np.float64) for side in (SOURCE, TWIN, TARGET))
    row = compare_rows(SOURCE, TWIN, TARGET, where="here")
    assert row.r_ratio == pytest.approx(math.sqrt(((t - s) ** 2).sum() / ((w - s) ** 2).sum()), rel=1e-12)
    assert row.relative_l2 == pytest.approx(math.sqrt(((t - s) ** 2).sum() / (s**2).sum()), rel=1e-12)
    assert row.cosine == pytest.approx((s * t).sum() / math.sqrt((s**2).sum() * (t**2).sum()), rel=1e-12)
    p, q = softmax(SOURCE), softmax(TARGET)
    assert row.kl == pytest.approx(float((p * np.log(p / q)).sum()), rel=1e-9)
    for k, agreement in ((1, row.top1), (5, row.top5), (10, row.top10)):
        shared = set(np.argsort(-s)[:k].tolist()) & set(np.argsort(-t)[:k].tolist())
        assert agreement == len(shared) / k
    largest = np.sort(s)
    assert row.margin == pytest.approx(largest[-1] - largest[-2])
    assert row.error == pytest.approx(math.sqrt(((t - s) ** 2).mean()))


@pytest.mark.spec("EQL-12")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_position_that_is_not_finite_has_no_numbers(value: float) -> None:
    target = TARGET.copy()
    target[3] = value
    row = compare_rows(SOURCE, TWIN, target, where="here")
    assert not row.is_defined
    assert (row.r_ratio, row.cosine, row.kl, row.top1, row.relative_l2) == (None,) * 5
    zero = compare_rows(SOURCE, TWIN, np.zeros_like(TARGET), where="here")
    assert zero.cosine is None


@pytest.mark.spec("EQL-12")
def test_a_token_that_all_sides_rule_out_is_left_out() -> None:
    masked = [np.append(side, np.float32(-np.inf)) for side in (SOURCE, TWIN, TARGET)]
    one, other = compare_rows(*masked, where="here"), compare_rows(SOURCE, TWIN, TARGET, where="here")
    assert (one.r_ratio, one.cosine) == (other.r_ratio, other.cosine)
    assert one.kl == pytest.approx(other.kl)
    assert not compare_rows(masked[0], masked[1], np.append(TARGET, np.float32(0)), where="here").is_defined


@pytest.mark.spec("EQL-12")
@pytest.mark.parametrize(
    ("source", "twin", "message"),
    [
        pytest.param(
            [np.nan, 1], [0, 1], "prompt 2, position 0: the source gives logits that are not", id="source"
        ),
        pytest.param([0, 1], [np.inf, 1], "prompt 2, position 0: the source in the target's prec", id="twin"),
        pytest.param(
            [0, 0], [0, 1], "prompt 2, position 0: the source gives logits that are all zero", id="zero"
        ),
        pytest.param(
            [-np.inf] * 2, [-np.inf] * 2, "the source gives logits that are not finite", id="ruled-out"
        ),
    ],
)
def test_nothing_is_judged_by_a_source_that_is_not_finite(
    source: list[float], twin: list[float], message: str
) -> None:
    sides = [np.array(side, np.float32) for side in (source, twin)]
    target = sides[1] if math.isinf(source[0]) else np.array([0, 1], np.float32)
    with pytest.raises(CaptureError, match=message):
        compare_rows(sides[0], sides[1], target, where="prompt 2, position 0")


@pytest.mark.spec("EQL-11")
def test_r_of_an_exact_baseline_is_infinite_and_of_two_exact_ones_is_one() -> None:
    assert compare_rows(SOURCE, SOURCE, TARGET, where="").r_ratio == math.inf
    same = compare_rows(SOURCE, SOURCE, SOURCE, where="")
    assert (same.r_ratio, same.cosine, same.kl) == (1.0, 1.0, 0.0)
    # an error of float32 is none of float64
    wide = SOURCE.astype(np.float64)
    near, far = wide * (1 + 3e-8), wide * (1 + 6e-8)
    assert compare_rows(wide, near, far, where="").r_ratio == pytest.approx(2.0, rel=1e-6)


@pytest.mark.spec("EQL-13")
def test_percentiles_are_numpys() -> None:
    values = RNG.lognormal(size=37)
    up, down = spread(values.tolist()), spread(values.tolist(), is_better_if_higher=True)
    assert up.tail == pytest.approx(np.percentile(values, 95), rel=1e-12)
    assert (up.median, up.best_tail) == pytest.approx(
        (float(np.percentile(values, 50)), float(np.percentile(values, 5)))
    )
    assert down.tail == pytest.approx(np.percentile(values, 5), rel=1e-12)
    assert (up.mean, up.worst, down.worst) == pytest.approx((values.mean(), values.max(), values.min()))


@pytest.mark.spec("EQL-12", "EQL-13")
def test_an_undefined_position_is_worse_than_any_number() -> None:
    few = spread([1.0] * 19 + [None])  # 0.95 of 19 is 18.05: between the last number and none
    assert (few.mean, few.worst, few.tail, few.median) == (None, None, None, 1.0)
    many = spread([0.99] * 99 + [None], is_better_if_higher=True)
    assert (many.tail, many.worst) == (0.99, None)
    assert spread([None, None]).median is None


@pytest.mark.spec("EQL-14")
def test_directions_of_errors_are_as_many_as_their_covariance_has() -> None:
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(400, 40)))[0]
    errors = rng.normal(size=(128, 40)) @ basis.T
    assert error_directions(errors) == pytest.approx(40, rel=0.1)
    scaled = errors * rng.lognormal(size=(128, 1))  # of unlike size
    assert error_directions(scaled) == pytest.approx(error_directions(errors), rel=1e-9)
    assert error_directions(errors[:1]) == math.inf
    assert error_directions(np.outer(rng.normal(size=9), errors[0])) == pytest.approx(1.0)


@pytest.mark.spec("EQL-15")
def test_padding_is_cut_by_a_configuration_only() -> None:
    assert shared_columns({"source": 256, "target": 256}, []).count == 256
    padded = shared_columns({"source": 256, "target": 320}, [256])
    assert padded.count == 256
    assert padded.remark == (
        "Logits from 256 on are padding, as a configuration's vocab_size says, and left out (source 256, "
        "target 320)."
    )
    assert shared_columns({"source": 320, "target": 320}, [300, 320]).count == 300
    for widths, sizes in (({"source": 256, "target": 320}, []), ({"source": 256, "target": 200}, [256])):
        with pytest.raises(UsageError, match="logits of unlike numbers"):
            shared_columns(widths, sizes)


@pytest.mark.spec("EQL-16")
@pytest.mark.parametrize(
    ("value", "relation", "passed"),
    [
        (1.2, "below", False),
        (1.19, "below", True),
        (0.95, "at least", True),
        (0.5, "more than", False),
        (0.0, "at most", True),
        (math.nan, "below", False),
        (math.nan, "at most", False),
        (None, "at least", False),
        (math.inf, "below", False),
    ],
)
def test_a_gate_is_passed_by_a_number_that_lies_as_it_has_to(
    value: float | None, relation: str, passed: bool
) -> None:
    limit = {"below": 1.2, "at least": 0.95, "more than": 0.5, "at most": 0.0}[relation]
    assert Gate("x", value, relation, limit).passed is passed  # type: ignore[arg-type] # of the four


def test_a_number_near_to_the_limit_of_its_gate_is_told_from_it() -> None:
    assert Gate("R p95", 1.20004, "below", 1.2).text == "R p95 is 1.20004, expected below 1.2: failed"
    assert Gate("R p95", 1.2, "below", 1.2).text == "R p95 is 1.2, expected below 1.2: failed"
