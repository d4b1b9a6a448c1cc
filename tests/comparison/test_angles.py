"""Tables of sines and cosines in low precision: what rounding makes of angles, and what it does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tensorcap.comparison import Pair, compare
from tensorcap_formats.dtypes import Array
from tensorcap_formats.float_formats import rounded

MakeArchive = Callable[..., Any]
KEY = "0/positions/output"
LATE = 1000  # a position whose product with a frequency of 1 has an error of several turns in bfloat16


def table(
    positions: Any, dtype: str = "", *, base: float = 1e4, width: int = 32, side_by_side: bool = False
) -> Array:
    """Sines and cosines of positions, each step rounded to a dtype, float64 without one (position, width)."""

    def step(x: Any) -> Array:
        return np.asarray(rounded(np.asarray(x, np.float64), dtype) if dtype else x, np.float64)

    half = width // 2
    frequencies = step(np.exp(step(step(np.arange(half)) * step(-math.log(base) / (half - 1)))))
    angles = step(step(np.asarray(positions, np.float64))[:, None] * frequencies)
    parts = step(np.sin(angles)), step(np.cos(angles))
    if side_by_side:
        return np.stack(parts, axis=-1).reshape(len(angles), width)
    return np.concatenate(parts, axis=1)


def judged(make_archive: MakeArchive, reference: Array, target: Array, dtype: str, **more: Array) -> Pair:
    sides = (
        make_archive({**more, KEY: side.astype(np.float32)}, run={"dtype": run})
        for side, run in ((reference, "float32"), (target, dtype))
    )
    return next(pair for pair in compare(*sides).pairs if pair.key == KEY)


def names_of(pair: Pair) -> list[str]:
    return [finding.test for finding in pair.findings]


@pytest.mark.spec("POL-300")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("side_by_side", [False, True], ids=["halves", "side-by-side"])
@pytest.mark.parametrize(
    "positions",
    [
        pytest.param(range(28), id="few"),
        pytest.param(range(600), id="many"),
        pytest.param(range(40, -40, -1), id="distances"),
        pytest.param([LATE], id="a-late-one"),
        pytest.param(range(LATE, LATE + 8), id="late-ones"),
    ],
)
def test_angles_that_were_rounded_are_right(
    make_archive: MakeArchive, positions: Any, dtype: str, *, side_by_side: bool
) -> None:
    right, low = (table(positions, name, side_by_side=side_by_side) for name in ("", dtype))
    pair = judged(make_archive, right, low, dtype)
    assert (pair.status, names_of(pair)) == ("within-rounding", ["angles"])
    assert pair.findings[0].value < 0.7


@pytest.mark.spec("POL-300")
@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(table(range(28), "bfloat16", base=5e3), id="base"),
        pytest.param(table(range(1, 29), "bfloat16"), id="one-further"),
        pytest.param(table(range(28), "bfloat16")[::-1], id="backwards"),
        pytest.param(np.roll(table(range(28), "bfloat16"), 16, axis=1), id="cosines-first"),
        pytest.param(1.05 * table(range(28), "bfloat16"), id="stretched"),
    ],
)
def test_other_angles_are_wrong(make_archive: MakeArchive, wrong: Array) -> None:
    pair = judged(make_archive, table(range(28)), wrong, "bfloat16")
    assert pair.status == "diverged"
    assert [f.test for f in pair.findings if f.status == "diverged"] == ["angles"]


@pytest.mark.spec("POL-300")
def test_in_float32_angles_have_no_test_of_their_own(make_archive: MakeArchive) -> None:
    right = table(range(28))
    pair = judged(make_archive, right, right * (1 + 1e-3), "float32")
    assert (pair.status, "angles" in names_of(pair)) == ("diverged", False)


@pytest.mark.spec("POL-300")
@pytest.mark.parametrize(
    "other",
    [
        pytest.param(np.sign(np.random.default_rng(0).standard_normal((28, 32))), id="signs"),
        pytest.param(np.random.default_rng(0).standard_normal((28, 32)), id="numbers"),
        pytest.param(table(range(28))[:, :16], id="sines-alone"),
    ],
)
def test_what_is_no_table_of_both_is_judged_as_ever(make_archive: MakeArchive, other: Array) -> None:
    pair = judged(make_archive, other, rounded(1.02 * other, "bfloat16"), "bfloat16")
    assert "angles" not in names_of(pair)
    assert "growth" in names_of(pair)


@pytest.mark.spec("POL-300")
def test_places_that_a_mask_of_the_call_leaves_out_have_any_angle(make_archive: MakeArchive) -> None:
    right = np.stack([table(range(28)), table(range(28))])
    low = np.stack([table(range(28), "bfloat16")] * 2)
    low[1, 20:] = table(range(500, 508), "bfloat16")
    mask = np.ones((2, 28), bool)
    mask[1, 20:] = False
    given = {"0/positions/input.mask": mask}
    assert judged(make_archive, right, low, "bfloat16", **given).status == "within-rounding"
    assert judged(make_archive, right, low, "bfloat16").status == "diverged"
    low[1, 19] = table([500], "bfloat16")
    assert judged(make_archive, right, low, "bfloat16", **given).status == "diverged"


@pytest.mark.spec("POL-300")
def test_a_mask_that_keeps_no_place_leaves_none_out(make_archive: MakeArchive) -> None:
    right, wrong = table(range(28))[None], table(range(1, 29), "bfloat16")[None]
    for slot in ("mask", "padding_mask"):  # one that names what is left out has nothing to leave out
        given = {f"0/positions/input.{slot}": np.zeros((1, 28), bool)}
        assert judged(make_archive, right, wrong, "bfloat16", **given).status == "diverged"
    padded = np.arange(28)[None] >= 20
    low = np.where(padded[..., None], table(range(500, 528), "bfloat16"), table(range(28), "bfloat16"))
    given = {"0/positions/input.padding_mask": padded}
    assert judged(make_archive, right, low, "bfloat16", **given).status == "within-rounding"


@pytest.mark.spec("POL-300")
def test_pairs_may_lie_along_the_channels_of_an_image(make_archive: MakeArchive) -> None:
    right, low, wrong = (
        np.tile(table(places, name, side_by_side=True).T[None, :, :, None], (2, 1, 1, 3))
        for places, name in ((range(6), ""), (range(6), "bfloat16"), (range(1, 7), "bfloat16"))
    )
    assert judged(make_archive, right, low, "bfloat16").status == "within-rounding"
    pair = judged(make_archive, right, wrong, "bfloat16")
    assert (pair.status, "angles" in names_of(pair)) == ("diverged", True)
