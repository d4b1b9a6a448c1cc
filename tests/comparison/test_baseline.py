"""The three-way test: reference, target, and a baseline in the target's precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tensorcap.comparison import Ratio, compare, label_of

MakeArchive = Callable[..., Any]
X = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
NOISE = np.where(np.random.default_rng(1).standard_normal(X.shape) > 0, 1, -1).astype(np.float32)


def off(relative: float) -> Any:
    return X * (1 + np.float32(relative) * NOISE)


@pytest.mark.spec("POL-60", "POL-61")
def test_the_error_is_reported_in_units_of_the_baselines(make_archive: MakeArchive) -> None:
    keys = ["0/a/output", "0/b/output", "0/c/output", "0/d/output", "0/e/output"]
    target = [off(3e-3), off(3e-3), X, off(1e-3), off(1e-3)]
    twin = [off(1e-3), X, X, off(1e-3)]
    comparison = compare(
        make_archive(dict.fromkeys(keys, X)),
        make_archive(dict(zip(keys, target, strict=True))),
        baseline=make_archive(dict(zip(keys[:4], twin, strict=True)), name="twin"),
        compute_dtype="bfloat16",
    )
    found = [pair.baseline for pair in comparison.pairs]
    assert found[0] is not None
    assert found[0].state == "measured"
    assert found[0].r == pytest.approx(3.0, rel=1e-3)
    assert found[1] == Ratio("baseline-exact", math.inf, label="the baseline is exact here")
    assert found[2] == Ratio("both-exact", 1.0, label="exact")
    assert found[3] == Ratio("measured", 1.0, 1.0, "equivalent")
    assert found[4] == Ratio("undefined")
    assert comparison.baseline is not None
    assert comparison.baseline.path.name == "twin"


@pytest.mark.spec("POL-61")
def test_a_run_off_by_less_than_a_tenth_of_a_millionth_is_exact(make_archive: MakeArchive) -> None:
    reference = make_archive({"a": X.astype(np.float64)})
    target, twin = (make_archive({"a": X.astype(np.float64) * (1 + error)}) for error in (1e-3, 1e-8))
    (pair,) = compare(reference, target, baseline=twin, compute_dtype="bfloat16").pairs
    assert pair.baseline is not None
    assert pair.baseline.state == "baseline-exact"
    (pair,) = compare(reference, target, baseline=twin).pairs  # float64: 1e-8 is a lot
    assert pair.baseline is not None
    assert pair.baseline.r == pytest.approx(1e5, rel=1e-3)


@pytest.mark.spec("POL-62")
def test_a_ratio_is_a_label_and_no_verdict(make_archive: MakeArchive) -> None:
    values = (0.5, 1.0, 1.1, 2.0, 5.0, 50.0, 500.0)
    assert [label_of(value) for value in values] == [
        "over-precise",
        "equivalent",
        "equivalent within 1.2",
        "precision or order of operations",
        "a factor is missing",
        "a step is missing",
        "another computation",
    ]
    archives = make_archive({"a": X}), make_archive({"a": off(1e-3)})
    comparison = compare(*archives, baseline=make_archive({"a": off(1e-6)}), compute_dtype="bfloat16")
    assert comparison.pairs[0].baseline is not None
    assert comparison.pairs[0].baseline.label == "another computation"
    assert (comparison.counts, comparison.exit_status) == ({"within-rounding": 1}, 0)


@pytest.mark.spec("POL-63")
def test_sigma_is_over_all_steps_of_a_site(make_archive: MakeArchive) -> None:
    keys = ["0/a/output", "1/a/output"]
    comparison = compare(
        make_archive(dict.fromkeys(keys, X)),
        make_archive({keys[0]: off(1e-3), keys[1]: off(7e-3)}),
        baseline=make_archive({keys[0]: off(1e-3), keys[1]: off(1e-3)}),
        compute_dtype="bfloat16",
    )
    found = [pair.baseline for pair in comparison.pairs]
    assert [ratio and ratio.r for ratio in found] == pytest.approx([1.0, 7.0], rel=1e-3)
    assert [ratio and ratio.sigma for ratio in found] == pytest.approx([5.0, 5.0], rel=1e-3)
