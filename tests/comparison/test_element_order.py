"""The same elements in another order are known by values, and explained if what comes of them agrees."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest

from tensorcap.comparison import Comparison, compare
from tensorcap.comparison.element_order import find_order
from tensorcap_formats.dtypes import Array
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

    @pytest.mark.spec("CMP-250")
    @pytest.mark.parametrize(("rows", "elements"), [(24, 1), (100, 1), (8, 2), (100, 2)])
    def test_other_values_are_no_order_of_these(self, rows: int, elements: int) -> None:
        found = find_order(*(RNG.normal(size=(rows, elements)) for _ in range(2)))
        assert found is not None
        assert not found.is_proven

    @pytest.mark.spec("CMP-250")
    def test_an_order_is_proven_by_more_elements_than_indices(self) -> None:
        rows = RNG.normal(size=(100, 4))
        proofs = {}
        for elements in (1, 2, 4):
            found = find_order(rows[:, :elements], rows[::-1, :elements] * (1 + 2.0**-9))
            assert found is not None
            proofs[elements] = found.is_proven, found.moved
        assert proofs == {1: (False, (0,)), 2: (True, (0,)), 4: (True, (0,))}

    @pytest.mark.spec("CMP-250")
    def test_ones_and_zeros_have_an_order_of_their_counts_alone(self) -> None:
        mask = (np.arange(64) % 3 > 0).astype(np.float64)
        found = find_order(mask, np.roll(mask, 1))
        assert found is not None
        assert (found.error, found.is_proven) == (0.0, False)


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


@pytest.mark.spec("CMP-250")
@pytest.mark.parametrize(("elements", "expected"), [(1, "diverged"), (4, "explained")])
def test_numbers_of_tokens_in_another_order_are_explained_if_tokens_are_known_by_them(
    make_archive: MakeArchive, elements: int, expected: str
) -> None:
    numbers = RNG.normal(size=(24, elements)).astype(np.float32)
    right = RNG.normal(size=(6, 4)).astype(np.float32)
    found = compare(
        block(make_archive, numbers, right, "float32"),
        block(make_archive, numbers[::-1], right * np.float32(1 + 2.0**-9), "bfloat16"),
    )
    assert status(found, "0/block.norm/output") == expected


NESTED: Final = ("", "block", "block.inner", "block.inner.norm", "block.proj")


@pytest.mark.spec("CMP-55", "CMP-250")
@pytest.mark.parametrize(
    ("spread", "expected"),
    [
        pytest.param(1.0, "explained", id="rows-are-unlike"),
        pytest.param(0.02, "diverged", id="rows-are-nearly-alike"),
    ],
)
def test_another_order_within_what_is_explained_needs_what_is_green_around_both(
    make_archive: MakeArchive, spread: float, expected: str
) -> None:
    """Its order makes a difference of 1.4 times the spread; what is green around is off by 1 %."""
    rng = np.random.default_rng(5)
    mean, result = rng.normal(size=4), rng.normal(size=(8, 4)).astype(np.float32)
    rows = (mean + spread * rng.normal(size=(8, 6, 4))).astype(np.float32)
    inner, projected = (rng.normal(size=(8, 4)).astype(np.float32) for _ in range(2))

    def nested(norm: Any, inner: Any, projected: Any, result: Any, dtype: str) -> Any:
        tensors = {
            "0/block/input.x": ROWS[0],
            "0/block.inner.norm/output": norm,
            "0/block.inner/output": inner,
            "0/block.proj/input": inner,
            "0/block.proj/output": projected,
            "0/block/output": result,
            "0/@root/output": result,
        }
        modules = [{"path": path, "class": "my.Module"} for path in NESTED]
        return make_archive(tensors, run={"modules": modules, "scope": {"inputs": True}, "dtype": dtype})

    found = compare(
        nested(rows, inner, projected, result, "float32"),
        nested(rows[::-1], inner * 3, projected, result * np.float32(1.01), "bfloat16"),
    )
    around = [status(found, f"0/{key}/output") for key in ("block.inner", "block", "@root")]
    assert around == ["explained", "within-rounding", "within-rounding"]
    assert status(found, "0/block.inner.norm/output") == expected


@pytest.mark.spec("CMP-55")
@pytest.mark.parametrize(
    ("is_out_right", "is_the_end", "expected"),
    [(True, True, "explained"), (False, True, "diverged"), (True, False, "diverged")],
)
def test_channels_in_another_order_are_explained_if_the_call_that_ends_their_module_agrees(
    make_archive: MakeArchive, is_out_right: bool, is_the_end: bool, expected: str
) -> None:
    """As of fused projections, laid out otherwise: the port has no module for the attention itself."""
    fused, out, result, other = (RNG.normal(size=(8, 6, 4)).astype(np.float32) for _ in range(4))

    def layer(fused: Any, out: Any, result: Any, dtype: str) -> Any:
        tensors = {
            "0/block/input.x": ROWS,
            "0/block.attn.qkv/output": fused,
            "0/block.attn.out/output": out,
            "0/block.attn/output": out if is_the_end else other,
            "0/block/output": result,
            "0/@root/output": result,
        }
        if dtype == "bfloat16":
            del tensors["0/block.attn/output"]
        paths = ("", "block", "block.attn", "block.attn.qkv", "block.attn.out")
        modules = [{"path": path, "class": "my.Module"} for path in paths]
        return make_archive(tensors, run={"modules": modules, "scope": {"inputs": True}, "dtype": dtype})

    almost = out * np.float32(1 + 2.0**-9) if is_out_right else out + np.float32(0.1)
    right = result * np.float32(1 + 2.0**-9)
    found = compare(layer(fused, out, result, "float32"), layer(fused[..., ::-1], almost, right, "bfloat16"))
    assert status(found, "0/block.attn.qkv/output") == expected


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
def test_a_state_in_another_order_in_the_last_step_alone_is_not_proven_by_other_layers(
    make_archive: MakeArchive,
) -> None:
    rng = np.random.default_rng(6)
    states = [[rng.normal(size=(1, 2, 7, 4)).astype(np.float32) for _ in range(3)] for _ in range(4)]

    def layers(*rolls: tuple[int, int, int]) -> Any:
        tensors: dict[str, Any] = {}
        for step in range(3):
            tensors[f"{step}/@root/output.logits"] = LOGITS[step]
            for layer, roll in enumerate(rolls):
                for at, name in enumerate(("keys", "values")):
                    state = np.roll(states[2 * layer + at][step], roll[step], axis=2)
                    tensors[f"{step}/@root/output.cache.layers.{layer}.{name}"] = state
        return make_archive(tensors, run={"modules": MODULES, "scope": {"inputs": True}, "dtype": "float32"})

    found = compare(layers((0, 0, 0), (0, 0, 0)), layers((0, 1, 2), (0, 0, 2)))
    assert [status(found, f"2/@root/output.cache.layers.{layer}.keys") for layer in (0, 1)] == [
        "explained",
        "diverged",
    ]


@pytest.mark.spec("CMP-250")
@pytest.mark.parametrize(
    ("places", "off", "expected"),
    [
        pytest.param([8, 9, 2, 3, 4, 5, 6, 7], 0, "explained", id="the-newest-in-the-place-of-the-oldest"),
        pytest.param([9, 8, 2, 3, 4, 5, 6, 7], 0, "diverged", id="not-in-their-order"),
        pytest.param([2, 3, 8, 9, 4, 5, 6, 7], 0, "diverged", id="in-another-place"),
        pytest.param([9, 2, 3, 4, 5, 6, 7, 8], 0, "diverged", id="and-the-others-are-moved"),
        pytest.param([8, 9, 2, 3, 4, 5, 6, 7], 1, "diverged", id="and-the-results-differ"),
    ],
)
def test_a_ring_that_first_turns_in_the_last_step_shows_that_it_is_one(
    make_archive: MakeArchive, places: list[int], off: float, expected: str
) -> None:
    keys, values = (RNG.normal(size=(1, 2, 10, 4)).astype(np.float32) for _ in range(2))
    window, other = list(range(2, 10)), [LOGITS[0], LOGITS[1] + off]

    def states(side: Array, last: list[int]) -> list[Any]:
        return [side[:, :, :8], side[:, :, last]]

    reference, target = (
        decoded(make_archive, states(keys, last), states(values, last), made, steps=2)
        for last, made in ((window, LOGITS), (places, other))
    )
    found = compare(reference, target)
    key = "1/@root/output.cache.layers.0.keys"
    assert status(found, key) == expected
    if expected == "explained":
        reason = next(p.reason for p in found.pairs if p.key == key)
        assert (
            reason == "it holds the same in another order along axis 2, and what the step makes of it agrees"
        )
        assert found.exit_status == 0


@pytest.mark.spec("CMP-250")
def test_a_ring_that_lost_a_token_differs(make_archive: MakeArchive) -> None:
    keys, values = rolled(KEYS, 0, 1, 2), rolled(VALUES, 0, 1, 2)
    keys[2][:, :, 3] = KEYS[0][:, :, 0]  # an older one in its place
    reference = decoded(make_archive, KEYS, VALUES, LOGITS)
    found = compare(reference, decoded(make_archive, keys, values, LOGITS))
    assert status(found, "2/@root/output.cache.layers.0.keys") == "diverged"
