"""The same elements in another order are known by values, and explained if what comes of them agrees."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest

from tensorcap.comparison import Comparison, compare
from tensorcap.comparison.element_order import find_order
from tests.comparison.conftest import MakeArchive

RNG: Final = np.random.default_rng(11)
ROWS: Final = RNG.normal(size=(8, 6, 4)).astype(np.float32)
MODULES: Final = [{"path": path, "class": "my.Module"} for path in ("", "block", "block.norm")]


def status(comparison: Comparison, key: str) -> str:
    return next(pair.status for pair in comparison.pairs if pair.key == key)


class TestOrder:
    @pytest.mark.spec("CMP-250")
    def test_orders_along_several_axes_are_found_together(self) -> None:
        batch, tokens = [0, 2, 1, 3, 4, 6, 5, 7], [5, 0, 1, 2, 3, 4]
        found = find_order(ROWS, ROWS[batch][:, tokens])
        assert found is not None
        assert found.orders[:2] == ((0, 2, 1, 3, 4, 6, 5, 7), (1, 2, 3, 4, 5, 0))
        assert (found.moved, found.error) == ((0, 1), 0.0)

    @pytest.mark.spec("CMP-250")
    def test_what_rounding_leaves_is_told(self) -> None:
        off = ROWS[:, ::-1] * np.float32(1 + 2.0**-9)
        found = find_order(ROWS, off)
        assert found is not None
        assert found.moved == (1,)
        assert found.error == pytest.approx(2.0**-9, rel=1e-3)

    @pytest.mark.spec("CMP-250")
    def test_equal_slices_take_one_each(self) -> None:
        ring = np.zeros((6, 4))
        ring[:2] = ROWS[0, :2]
        found = find_order(ring, np.roll(ring, 1, axis=0))
        assert found is not None
        assert (found.orders[0][:2], found.error) == ((1, 2), 0.0)
        assert sorted(found.orders[0]) == [0, 1, 2, 3, 4, 5]

    @pytest.mark.spec("CMP-250")
    @pytest.mark.parametrize("reference", [np.zeros((2, 2)), np.full((2, 2), np.inf), np.ones((1, 1025))])
    def test_nothing_is_said_of_zeros_of_what_is_not_finite_and_of_long_axes(self, reference: Any) -> None:
        assert find_order(reference, reference) is None


def block(make: MakeArchive, inner: Any, result: Any, dtype: str) -> Any:
    tensors = {
        "0/block/input.x": ROWS[0],
        "0/block.norm/output": inner,
        "0/block/output": result,
        "0/@root/output": result,
    }
    return make(tensors, run={"modules": MODULES, "scope": {"inputs": True}, "dtype": dtype})


@pytest.mark.spec("CMP-55")
@pytest.mark.parametrize(
    ("inner", "is_result_right", "expected"),
    [
        pytest.param(ROWS[::-1], True, "explained", id="in-another-order"),
        pytest.param(ROWS[::-1], False, "diverged", id="and-the-result-differs"),
        pytest.param(ROWS[:, :, ::-1], True, "diverged", id="channels-in-another-order"),
        pytest.param(np.where(np.arange(8)[:, None, None] == 3, ROWS[2], ROWS), True, "diverged", id="twice"),
    ],
)
def test_another_order_is_explained_if_the_module_around_agrees(
    make_archive: MakeArchive, inner: Any, is_result_right: bool, expected: str
) -> None:
    right = RNG.normal(size=(6, 4)).astype(np.float32)
    almost = right * np.float32(1 + 2.0**-9) if is_result_right else right + 1  # as bfloat16 rounds it
    found = compare(
        block(make_archive, ROWS, right, "float32"), block(make_archive, inner, almost, "bfloat16")
    )
    assert status(found, "0/block.norm/output") == expected


def decoded(
    make: MakeArchive, keys: list[Any], values: list[Any], logits: list[Any], *, steps: int = 3
) -> Any:
    tensors: dict[str, Any] = {}
    for step in range(steps):
        tensors[f"{step}/@root/output.logits"] = logits[step]
        tensors[f"{step}/@root/output.cache.layers.0.keys"] = keys[step]
        tensors[f"{step}/@root/output.cache.layers.0.values"] = values[step]
    return make(tensors, run={"modules": MODULES, "scope": {"inputs": True}, "dtype": "float32"})


KEYS, VALUES = ([RNG.normal(size=(1, 2, 7, 4)).astype(np.float32) for _ in range(3)] for _ in range(2))
LOGITS: Final = [RNG.normal(size=(1, 5)).astype(np.float32) for _ in range(3)]


def rolled(states: list[Any], *by: int) -> list[Any]:
    return [np.roll(state, n, axis=2) for state, n in zip(states, by, strict=True)]


@pytest.mark.spec("CMP-250")
def test_a_ring_is_explained_if_later_steps_agree(make_archive: MakeArchive) -> None:
    reference = decoded(make_archive, KEYS, VALUES, LOGITS)
    ring = decoded(make_archive, rolled(KEYS, 0, 1, 2), rolled(VALUES, 0, 1, 2), LOGITS)
    found = compare(reference, ring)
    assert (status(found, "1/@root/output.cache.layers.0.keys"), found.exit_status) == ("explained", 0)
    reason = next(p.reason for p in found.pairs if p.key == "2/@root/output.cache.layers.0.values")
    assert reason == "it holds the same in another order along axis 2, and what later steps make of it agrees"


@pytest.mark.spec("CMP-250")
@pytest.mark.parametrize(
    ("keys", "values", "logits", "steps"),
    [
        pytest.param(rolled(KEYS, 0, 1, 1), VALUES, LOGITS, 3, id="keys-alone"),
        pytest.param(rolled(KEYS, 0, 1, 2), rolled(VALUES, 0, 2, 2), LOGITS, 3, id="values-otherwise"),
        pytest.param(
            rolled(KEYS, 0, 1, 2),
            rolled(VALUES, 0, 1, 2),
            [*LOGITS[:2], LOGITS[2] + 1],
            3,
            id="later-step-differs",
        ),
        pytest.param(rolled(KEYS, 0, 1, 2), rolled(VALUES, 0, 1, 2), LOGITS, 2, id="no-later-step"),
    ],
)
def test_a_state_in_another_order_differs_if_nothing_shows_that_it_is_read_so(
    make_archive: MakeArchive, keys: list[Any], values: list[Any], logits: list[Any], steps: int
) -> None:
    reference = decoded(make_archive, KEYS, VALUES, LOGITS, steps=steps)
    found = compare(reference, decoded(make_archive, keys, values, logits, steps=steps))
    assert status(found, "1/@root/output.cache.layers.0.keys") == "diverged"
    assert found.exit_status == 1


@pytest.mark.spec("CMP-250")
def test_a_ring_that_lost_a_token_differs(make_archive: MakeArchive) -> None:
    keys, values = rolled(KEYS, 0, 1, 2), rolled(VALUES, 0, 1, 2)
    keys[2][:, :, 3] = KEYS[0][:, :, 0]  # an older one in its place
    reference = decoded(make_archive, KEYS, VALUES, LOGITS)
    found = compare(reference, decoded(make_archive, keys, values, LOGITS))
    assert status(found, "2/@root/output.cache.layers.0.keys") == "diverged"
