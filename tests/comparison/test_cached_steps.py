"""Steps of a few tokens that read caches: correct ones are not suspect, and wrong ones still are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tensorcap.comparison import POLICY, compare
from tensorcap.comparison.policy_tests import judge_gain, judge_own_error, judge_tail, judge_total_error
from tensorcap.rerun.replay_tests import judge_bits, judge_other_values, judge_replayed, judge_twin
from tensorcap.runs import Calls
from tensorcap_formats.dtypes import Array

MakeArchive = Callable[..., Any]
BF16 = {"dtype": "bfloat16"}
ROUNDING = 0.425 * 2**-8


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def off(x: Array, error: float, seed: int = 9) -> Array:
    """The same with a relative error of exactly this much in each row."""
    noise = normal(*x.shape, seed=seed)
    sizes = np.linalg.norm(x, axis=-1, keepdims=True) / np.linalg.norm(noise, axis=-1, keepdims=True)
    made: Array = (x + error * sizes * noise).astype(np.float32)
    return made


@pytest.mark.spec("POL-30")
@pytest.mark.parametrize(
    ("elements", "factor"),
    [(4, 2.5), (36, 1.5), (64, 1.375), (100, 1.3), (900, 1.1), (90_000, 1.01)],
)
def test_limits_are_widened_by_three_deviations_of_a_ratio(elements: int, factor: float) -> None:
    precision = POLICY.precision("bfloat16")
    found = {
        "gain": judge_gain(0.01, 0.01, precision, is_core=False, elements=elements).limit / 1.5,
        "attention_gain": judge_gain(0.01, 0.01, precision, is_core=True, elements=elements).limit / 4,
        "own_error_leaf": judge_own_error(0.01, precision, is_leaf=True, elements=elements).limit / 2.5,
        "own_error_composite": judge_own_error(0.01, precision, is_leaf=False, elements=elements).limit / 6,
        "twin_ratio": judge_twin(1.0, elements).limit / 1.2,
        "growth": judge_total_error(0.01, 0, precision, elements=elements).limit / (4 * ROUNDING),
    }
    assert found == pytest.approx(dict.fromkeys(found, factor))
    replayed, tail = judge_replayed(0.01, 0.02, precision, is_leaf=True, elements=elements)
    assert replayed.limit == pytest.approx(2 * factor)
    of_tail = {4: 2.5, 36: 1.5, 64: 1.375, 100: 1.375, 900: 1.375, 90_000: 1 + 3 / 4500**0.5}
    assert tail.limit == pytest.approx(3 * of_tail[elements])
    worst = judge_tail(0.01, 0.01, precision, is_core=False, elements=elements)
    assert worst.limit == pytest.approx(1.8 * of_tail[elements])


@pytest.mark.spec("POL-30")
def test_a_ratio_of_two_rms_over_n_elements_is_off_by_one_in_the_root_of_n() -> None:
    for count in (32, 64, 512):
        drawn = np.random.default_rng(count).standard_normal((2, 20_000, count))
        one, other = np.sqrt((drawn**2).mean(axis=-1))
        assert (one / other).std() * count**0.5 == pytest.approx(1, rel=0.06)


@pytest.mark.spec("POL-30")
def test_a_share_of_few_elements_may_be_one_element() -> None:
    assert judge_bits(1 / 64, 64).status == "within-rounding"
    assert judge_bits(5 / 64, 64).status == "diverged"
    assert judge_bits(0.0015, 10**6).status == "suspect"
    assert judge_bits(0.0055, 10**6).status == "diverged"
    assert judge_other_values(1 / 64, 64).status == "within-rounding"
    assert judge_other_values(0.0105, 10**6).status == "suspect"


@pytest.mark.spec("POL-10", "POL-30")
@pytest.mark.parametrize(
    ("rows", "gain", "status"), [(1, 1.9, "within-rounding"), (1, 4.0, "diverged"), (64, 1.9, "suspect")]
)
def test_a_leaf_of_one_token_may_seem_to_gain_more(
    make_archive: MakeArchive, rows: int, gain: float, status: str
) -> None:
    x, y = normal(rows, 64), normal(rows, 64, seed=1)
    error = 0.005
    out = gain * np.hypot(error, 2 * ROUNDING)
    run = {**BF16, "modules": [{"path": "proj", "class": "Linear", "parameters": {}}]}
    archives = [
        make_archive({"0/proj/input.x": a, "0/proj/output": b}, run=run)
        for a, b in ((x, y), (off(x, error), off(y, out)))
    ]
    (pair,) = (p for p in compare(*archives).pairs if p.key == "0/proj/output")
    (found,) = (f for f in pair.findings if f.test == "gain")
    assert found.status == status


def cached(slot: str = "past_key_values", *, kept: str = "same", seed: int = 0) -> dict[str, Array]:
    """Two steps of three blocks; the second is given what the first left."""
    keys = normal(40, 64, seed=seed)
    left = {"same": keys, "more": normal(41, 64, seed=seed)}[kept]
    tensors = {f"0/layers.{i}/output": normal(8, 64, seed=i + 1) for i in range(3)}
    tensors |= {f"0/@root/output.{slot}.2": keys, f"1/@root/input.{slot}.2": left}
    return tensors | {
        "1/@root/input.hidden_states": normal(1, 64, seed=7),
        "1/layers.0/output": normal(1, 64),
    }


@pytest.mark.spec("POL-13")
@pytest.mark.parametrize(
    ("slot", "kept", "depth"),
    [
        pytest.param("past_key_values", "same", 3, id="the-same-bytes"),
        pytest.param("encoder_outputs", "same", 3, id="the-same-bytes-under-any-name"),
        pytest.param("cache", "more", 3, id="a-state-by-its-name"),
        pytest.param("encoder_outputs", "more", 0, id="anything-else"),
    ],
)
def test_what_an_earlier_step_left_has_its_depth(
    make_archive: MakeArchive, slot: str, kept: str, depth: int
) -> None:
    archive = make_archive(cached(slot, kept=kept))
    calls = Calls(archive)
    assert calls.depth(archive.get(f"1/@root/input.{slot}.2")) == depth
    assert calls.depth(archive.get("1/@root/input.hidden_states")) == 0
    assert calls.depth(archive.get("1/layers.0/output")) == 1


@pytest.mark.spec("POL-13")
def test_a_cache_is_not_suspect_for_errors_of_its_own_depth(make_archive: MakeArchive) -> None:
    right = cached()
    wrong = {key: off(x, 0.02) for key, x in right.items()}
    found = compare(make_archive(right, run=BF16), make_archive(wrong, run=BF16))
    by_key = {pair.key: pair.status for pair in found.pairs}
    assert by_key["1/@root/input.past_key_values.2"] == "within-rounding"
    assert by_key["1/@root/input.hidden_states"] == "suspect"  # of no depth: 4 roundings, 0.0066 * 1.375


def attention(step: int, rows: int, seed: int) -> dict[str, Array]:
    names = ("q", "k", "v")
    x = normal(rows, 64, seed=seed)
    tensors = {f"{step}/a/input.x": x}
    for at, name in enumerate(names):
        tensors |= {
            f"{step}/a.{name}/input.x": x,
            f"{step}/a.{name}/output": normal(rows, 64, seed=seed + 1 + at),
        }
    core = normal(rows, 64, seed=seed + 5)
    last = normal(rows, 64, seed=seed + 6)
    return tensors | {f"{step}/a.o/input.x": core, f"{step}/a.o/output": last, f"{step}/a/output": last}


@pytest.mark.spec("POL-11")
@pytest.mark.parametrize(("kept", "status"), [(0.05, "within-rounding"), (0.005, "diverged")])
def test_a_core_reads_what_earlier_steps_left(make_archive: MakeArchive, kept: float, status: str) -> None:
    run = {
        **BF16,
        "modules": [
            {"path": "a", "class": "Attention", "parameters": {}},
            *({"path": f"a.{n}", "class": "Linear", "parameters": {}} for n in "qkvo"),
        ],
    }
    right = attention(0, 16, 10) | attention(1, 1, 20)
    wrong = {
        key: off(x, {"0": kept, "1": 0.005}[key[0]] if ".o/" not in key else 0.06) for key, x in right.items()
    }
    found = compare(make_archive(right, run=run), make_archive(wrong, run=run))
    (pair,) = (p for p in found.pairs if p.key == "1/a.o/input.x")
    assert {f.status for f in pair.findings if f.test == "attention_gain"} == {status}


def routed(flipped: int, rows: int, error: float) -> tuple[dict[str, Array], dict[str, Array]]:
    """A router, of which some rows flip at a near tie, and what comes behind it, in two steps."""
    scores = np.tile(np.array([3.0, 2.0, 1.0, 0.0], np.float32), (rows, 1))
    scores[:flipped] = [2.001, 2.0, 1.0, 0.0]
    noisy = off(scores, 0.003)
    chosen = np.zeros((rows, 1), np.int64)
    other = chosen.copy()
    other[:flipped] = 1
    sides = []
    for made, choices in ((scores, chosen), (noisy, other)):
        sides.append({"0/layers.0.gate/output.0": made, "0/layers.0.gate/output.1": choices})
    for key, count in (("0/layers.1/output", rows), ("1/layers.1/output", 64)):
        x = normal(count, 64, seed=3)
        sides[0][key], sides[1][key] = x, off(x, error)
    return sides[0], sides[1]


@pytest.mark.spec("POL-13")
@pytest.mark.parametrize(
    ("flipped", "rows", "error", "of_step", "later"),
    [
        pytest.param(0, 64, 0.05, "suspect", "suspect", id="no-flips"),
        pytest.param(2, 64, 0.05, "suspect", "within-rounding", id="a-few-flips"),
        pytest.param(2, 64, 0.5, "suspect", "suspect", id="too-much"),
        pytest.param(40, 64, 0.5, "within-rounding", "suspect", id="most-rows-flip"),
        pytest.param(40, 64, 1.6, "suspect", "suspect", id="more-than-unlike"),
    ],
)
def test_errors_may_grow_more_behind_a_router_that_chose_other_experts(
    make_archive: MakeArchive, flipped: int, rows: int, error: float, of_step: str, later: str
) -> None:
    reference, target = (make_archive(side, run=BF16) for side in routed(flipped, rows, error))
    by_key = {pair.key: pair for pair in compare(reference, target).pairs}
    grown = [
        {f.status for f in by_key[f"{step}/layers.1/output"].findings if f.test == "growth"}
        for step in (0, 1)
    ]
    assert grown == [{of_step}, {later}]
