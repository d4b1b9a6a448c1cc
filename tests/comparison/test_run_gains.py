"""One token, or one result, that is off by far more than all before it, in runs of low precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tensorcap.comparison import Comparison, compare
from tensorcap_formats.dtypes import Array
from tests.support.findings import findings_of

MakeArchive = Callable[..., Any]
BF16 = {"dtype": "bfloat16", "compute_dtype": "bfloat16"}


def normal(seed: int, *shape: int) -> Array:
    values: Array = np.random.default_rng(seed).standard_normal(shape or (2, 32, 64)).astype(np.float32)
    return values


def off_by(values: Array, error: float) -> Array:
    """Values of which each is off by a relative error, in either direction."""
    signs = np.where(normal(9, *values.shape) > 0, 1, -1)
    return (values * (1 + error * signs)).astype(np.float32)


X, MADE, SUM = (normal(seed) for seed in range(3))
BLOCKS = {
    "0/layers.0/input.x": X,
    "0/layers.0.fc/input.x": X,
    "0/layers.0.fc/output": MADE,
    "0/layers.0/output": SUM,
    "0/head/input.x": SUM,
}
ROUTED = {
    "0/layers.0/input.x": X,
    "0/layers.0.gate/input.x": X,
    "0/layers.0.gate/output": normal(5, 2, 32, 8),  # what it chose is not known
    "0/layers.0/output": SUM,
    "0/head/input.x": SUM,
}


def row_gains(comparison: Comparison) -> dict[str, tuple[float, str]]:
    return findings_of(comparison, "row_gain")


def compared(make_archive: MakeArchive, token: float, *, others: float = 0.01, run: Any = BF16) -> Comparison:
    target = {text: off_by(values, 0.01) for text, values in BLOCKS.items()}
    wrong = off_by(SUM, others)
    wrong[1, -1] = SUM[1, -1] * (1 + token)
    target["0/layers.0/output"] = target["0/head/input.x"] = wrong
    return compare(make_archive(BLOCKS, run=run), make_archive(target, run=run))


@pytest.mark.spec("POL-680")
@pytest.mark.parametrize(
    ("token", "gain", "status"),
    [
        pytest.param(0.08, 6.93, "suspect", id="suspect"),
        pytest.param(0.2, 17.32, "diverged", id="diverged"),
    ],
)
def test_one_wrong_token_of_64_is_found_in_the_module_that_made_it(
    make_archive: MakeArchive, token: float, gain: float, status: str
) -> None:
    found = compared(make_archive, token)
    # token / sqrt(0.01**2 + (2 * 0.425 / 2**8) ** 2), the error before out of a histogram, times the norm of
    # this row over that of the median one
    sizes = np.sqrt((SUM.reshape(-1, 64).astype(np.float64) ** 2).sum(axis=1))
    assert sizes[-1] / np.median(sizes) == pytest.approx(0.9127, abs=1e-3)
    value, found_status = row_gains(found)["0/layers.0/output"]
    assert value == pytest.approx(gain, rel=0.03)
    assert (found_status, len(row_gains(found))) == (status, 1)
    assert found.divergence is not None
    assert (found.divergence.module, found.divergence.is_growth) == ("layers.0", False)


@pytest.mark.spec("POL-680")
def test_a_row_that_is_off_no_more_than_what_is_expected_or_than_others_is_no_finding(
    make_archive: MakeArchive,
) -> None:
    assert row_gains(compared(make_archive, 0.02)) == {}
    assert row_gains(compared(make_archive, 0.08, others=0.02)) == {}


@pytest.mark.spec("POL-680")
def test_a_row_that_is_smaller_than_others_is_no_wrong_token(make_archive: MakeArchive) -> None:
    reference, target = dict(BLOCKS), {text: off_by(values, 0.01) for text, values in BLOCKS.items()}
    small, wrong = SUM.copy(), off_by(SUM, 0.01)
    small[1, -1] *= 0.1
    wrong[1, -1] = small[1, -1] * 1.2
    for text in ("0/layers.0/output", "0/head/input.x"):
        reference[text], target[text] = small, wrong
    assert row_gains(compare(make_archive(reference), make_archive(target, run=BF16))) == {}


@pytest.mark.spec("POL-680", "POL-31")
def test_padding_beside_a_row_that_is_smaller_than_others_is_no_wrong_token(
    make_archive: MakeArchive,
) -> None:
    mask = np.ones((2, 32), np.int64)
    mask[1, :5] = 0
    inputs = {"0/@root/input.input_ids": np.ones((2, 32), np.int64), "0/@root/input.attention_mask": mask}
    reference, target = dict(BLOCKS), {text: off_by(values, 0.01) for text, values in BLOCKS.items()}
    small, made = SUM.copy(), off_by(SUM, 0.01)
    small[1, -1] *= 0.1
    made[1, -1] = small[1, -1] * 1.2
    made[1, :5] += 1
    for text in ("0/layers.0/output", "0/head/input.x"):
        reference[text], target[text] = small, made
    sides = make_archive({**inputs, **reference}), make_archive({**inputs, **target}, run=BF16)
    assert row_gains(compare(*sides)) == {}


@pytest.mark.spec("POL-680")
def test_float32_runs_are_not_tested_by_their_worst_row(make_archive: MakeArchive) -> None:
    assert row_gains(compared(make_archive, 0.2, run={"dtype": "float32", "compute_dtype": "float32"})) == {}


def run_gains(comparison: Comparison) -> dict[str, tuple[float, str]]:
    return findings_of(comparison, "run_gain")


@pytest.mark.spec("POL-681")
def test_a_result_far_past_all_before_is_its_modules_where_nothing_else_judges_it(
    make_archive: MakeArchive,
) -> None:
    target = {text: off_by(values, 0.01) for text, values in ROUTED.items()}
    target["0/layers.0/output"] = target["0/head/input.x"] = off_by(SUM, 0.6)
    found = compare(make_archive(ROUTED), make_archive(target, run=BF16))
    # 0.6 / sqrt(0.01**2 + (2 * 0.425 / 2**8) ** 2), with errors out of a histogram
    assert [(key, status) for key, (_, status) in run_gains(found).items()] == [
        ("0/layers.0/output", "suspect")
    ]
    assert run_gains(found)["0/layers.0/output"][0] == pytest.approx(56.9, rel=0.05)
    assert found.divergence is not None
    assert (found.divergence.module, found.divergence.is_growth) == ("layers.0", False)


@pytest.mark.spec("POL-681")
@pytest.mark.parametrize(
    ("before", "error"),
    [
        pytest.param(0.0, 0.05, id="less-than-three-limits"),
        pytest.param(0.01, 0.09, id="nine-times-all-before"),
    ],
)
def test_errors_that_grew_by_less_name_no_module(
    make_archive: MakeArchive, before: float, error: float
) -> None:
    target = {text: off_by(values, before) for text, values in ROUTED.items()}
    target["0/layers.0/output"] = target["0/head/input.x"] = off_by(SUM, error)
    found = compare(make_archive(ROUTED), make_archive(target, run=BF16))
    assert run_gains(found) == {}
    assert found.divergence is not None
    assert found.divergence.is_growth


@pytest.mark.spec("POL-681")
def test_a_module_whose_argument_was_not_compared_is_not_named(make_archive: MakeArchive) -> None:
    target = {text: off_by(values, 0.01) for text, values in ROUTED.items()}
    target["0/layers.0/output"] = target["0/head/input.x"] = off_by(SUM, 0.6)
    del target["0/layers.0/input.x"]
    assert run_gains(compare(make_archive(ROUTED), make_archive(target, run=BF16))) == {}
