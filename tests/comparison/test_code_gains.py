"""What the code of a module between the modules that it calls adds to errors."""

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
F32 = {"dtype": "float32", "compute_dtype": "float32"}


def normal(seed: int, *shape: int) -> Array:
    values: Array = np.random.default_rng(seed).standard_normal(shape or (64, 64)).astype(np.float32)
    return values


def off_by(values: Array, error: float, seed: int = 9) -> Array:
    """Values of which each is off by a relative error, in either direction."""
    signs = np.where(normal(seed, *values.shape) > 0, 1, -1)
    return (values * (1 + error * signs)).astype(np.float32)


X, NORMED, HANDED, MADE = (normal(seed) for seed in range(4))
BLOCK = {
    "0/block/input.x": X,
    "0/block.norm/input.x": X,
    "0/block.norm/output": NORMED,
    "0/block.fc/input.x": HANDED,
    "0/block.fc/output": MADE,
    "0/block/output": MADE,
}


def code_gains(comparison: Comparison) -> dict[str, tuple[float, str]]:
    return findings_of(comparison, "code_gain")


@pytest.mark.spec("POL-210")
@pytest.mark.parametrize(
    ("error", "gain", "status"),
    [
        pytest.param(0.03, 2.847, "within-rounding", id="green"),
        pytest.param(0.05, 4.745, "suspect", id="suspect"),
        pytest.param(0.07, 6.643, "diverged", id="diverged"),
    ],
)
def test_what_code_hands_on_is_held_against_the_largest_error_of_all_it_had(
    make_archive: MakeArchive, error: float, gain: float, status: str
) -> None:
    half = HANDED[:, :32]  # of another size than all else, so that it is no sum of these
    reference = {**BLOCK, "0/block.fc/input.x": half}
    target = {text: off_by(values, 0.01) for text, values in reference.items()}
    target["0/block.fc/input.x"] = off_by(half, error)
    found = compare(make_archive(reference), make_archive(target, run=BF16))
    value, found_status = code_gains(found)["0/block.fc/input.x"]
    # error / sqrt(0.01**2 + (2 * 0.425 / 2**8) ** 2), with quantiles out of a histogram
    assert value == pytest.approx(gain, rel=0.03)
    assert found_status == status
    if status == "diverged":
        assert found.divergence is not None
        assert (found.divergence.module, found.divergence.pair.key) == ("block", "0/block.fc/input.x")


@pytest.mark.spec("POL-210", "POL-211")
def test_what_is_made_of_something_wrong_is_no_fault_of_the_code(make_archive: MakeArchive) -> None:
    target = {text: off_by(values, 0.01) for text, values in BLOCK.items()}
    target["0/block.norm/output"] = off_by(NORMED, 0.6)
    target["0/block.fc/input.x"] = off_by(HANDED, 0.6)
    found = compare(make_archive(BLOCK), make_archive(target, run=BF16))
    assert found.divergence is not None
    assert found.divergence.module == "block.norm"
    assert code_gains(found)["0/block.fc/input.x"][1] == "within-rounding"


@pytest.mark.spec("POL-210")
def test_float32_runs_are_not_tested_by_the_gain_of_code(make_archive: MakeArchive) -> None:
    found = compare(make_archive(BLOCK, run=F32), make_archive({**BLOCK, "0/block.fc/input.x": X}, run=F32))
    assert code_gains(found) == {}


@pytest.mark.spec("POL-210")
def test_a_sum_that_cancels_is_held_against_its_terms(make_archive: MakeArchive) -> None:
    reference = {**BLOCK, "0/block.norm/output": (X + 0.05 * HANDED).astype(np.float32)}
    target = {text: off_by(values, 0.01) for text, values in reference.items()}
    difference = target["0/block.norm/output"] - off_by(X, 0.01, seed=8)  # 0.05 times as large as its terms
    target["0/block.fc/input.x"] = difference
    reference["0/block.fc/input.x"] = (reference["0/block.norm/output"] - X).astype(np.float32)
    found = compare(make_archive(reference), make_archive(target, run=BF16))
    value, status = code_gains(found)["0/block.fc/input.x"]
    assert np.linalg.norm(difference - 0.05 * HANDED) > 0.2 * np.linalg.norm(0.05 * HANDED)
    assert (value < 2, status) == (True, "within-rounding")


ROUTED = {
    "0/moe/input.x": X,
    "0/moe.gate/input.x": X,
    "0/moe.gate/output.0": normal(5, 64, 8),
    "0/moe.experts/input.x": HANDED,
    "0/moe.experts/output": MADE,
    "0/moe/output": MADE,
    "0/head/input.x": NORMED,
}


@pytest.mark.spec("POL-210", "POL-211")
@pytest.mark.parametrize("others", [None, False, True], ids=["unknown", "the-same", "others"])
def test_behind_choices_that_may_be_others_no_code_is_judged(
    make_archive: MakeArchive, others: bool | None
) -> None:
    reference = dict(ROUTED)
    if others is not None:
        best = np.argsort(-ROUTED["0/moe.gate/output.0"], axis=-1)
        reference = dict(list(ROUTED.items())[:3])
        reference["0/moe.gate/output.1"] = best[:, :2].astype(np.int64)
        reference.update(list(ROUTED.items())[3:])
    target = {text: off_by(v, 0.01) if v.dtype == np.float32 else v.copy() for text, v in reference.items()}
    target["0/moe.experts/input.x"] = off_by(HANDED, 0.6)
    if others:
        target["0/moe.gate/output.1"] = best[:, 1:3].astype(np.int64)
    found = compare(make_archive(reference), make_archive(target, run=BF16))
    expected = "diverged" if others is False else None
    assert code_gains(found).get("0/moe.experts/input.x", (0.0, None))[1] == expected


@pytest.mark.spec("POL-210")
def test_errors_that_caches_may_hold_count_in_later_steps(make_archive: MakeArchive) -> None:
    later = {f"1{text[1:]}": values for text, values in BLOCK.items()}
    reference = {**BLOCK, **later}
    target = {text: off_by(values, 0.01) for text, values in reference.items()}
    target["0/block.fc/output"] = off_by(MADE, 0.6)
    target["1/block.fc/input.x"] = off_by(HANDED, 0.6)
    found = compare(make_archive(reference), make_archive(target, run=BF16))
    assert code_gains(found)["1/block.fc/input.x"][1] == "within-rounding"


@pytest.mark.spec("POL-210")
@pytest.mark.parametrize(("handed_on", "has_gain"), [(True, False), (False, True)])
def test_an_argument_that_the_target_lacks_has_the_error_of_what_holds_the_same_before(
    make_archive: MakeArchive, handed_on: bool, has_gain: bool
) -> None:
    given = {"0/block.attn/input.x": NORMED, "0/block.attn.q/input.x": NORMED if handed_on else HANDED}
    reference = {**BLOCK, **given, "0/block.attn.q/output": MADE, "0/block.attn/output": MADE}
    target = {text: off_by(values, 0.3) for text, values in reference.items() if text not in given}
    target["0/block.attn.q/input.x"] = off_by(given["0/block.attn.q/input.x"], 0.3 if handed_on else 3.0)
    ordered = {text: target[text] for text in reference if text in target}
    found = code_gains(compare(make_archive(reference), make_archive(ordered, run=BF16)))
    status = found.get("0/block.attn.q/input.x", (0.0, "within-rounding"))[1]
    assert (status == "diverged") is has_gain
