"""What a replay allows a module, by what the reference's own run in the target's precision loses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from tensorcap.comparison import POLICY, Finding
from tensorcap.rerun import OwnError
from tensorcap.rerun.replay_judge import ReplayRuns, judge_replay
from tensorcap.rerun.replay_tests import judge_outliers_of_twin
from tests.support.archives import new_archive

ROUNDING: Final = 0.425 * 2.0**-8  # of bfloat16, relative
GIVEN, MADE = "0/block.bn/input.x", "0/block.bn/output"
Judge = Callable[..., OwnError]


def unit_rows(shape: tuple[int, int], seed: int) -> Any:
    """Rows of norm 1."""
    values = np.random.default_rng(seed).normal(size=shape)
    return values / np.linalg.norm(values, axis=1, keepdims=True)


@pytest.fixture
def judged(tmp_path: Path) -> Judge:
    """The own error of what a module made, by how far the target and the twin are from the exact result."""

    def judge(
        exact: Any, target: Any, twin: Any, *, class_name: str = "my.Block", released: tuple[str, ...] = ()
    ) -> OwnError:
        modules = [{"path": path, "class": name} for path, name in (("", "my.M"), ("block.bn", class_name))]
        given = unit_rows(exact.shape, seed=9).astype(np.float32)
        reference, of_target, of_twin = (
            new_archive(
                tmp_path / f"{name}.h5",
                {GIVEN: given, MADE: values.astype(np.float32)},
                run={"modules": modules, "scope": {"inputs": True}, "dtype": dtype},
            )
            for name, values, dtype in (
                ("reference", exact, "float32"),
                ("target", target, "bfloat16"),
                ("twin", twin, "bfloat16"),
            )
        )
        runs = ReplayRuns(reference, of_target, of_twin, POLICY.precision("bfloat16"), "bfloat16")
        replay = judge_replay(reference, runs, "reverse", [GIVEN, MADE], [], released)
        return next(own for own in replay.own_errors if own.key == MADE)

    return judge


def apart(exact: Any, roundings: float, seed: int) -> Any:
    """Values whose rows are that many roundings off."""
    return exact + roundings * ROUNDING * unit_rows(exact.shape, seed=seed)


@pytest.mark.spec("RPL-7", "POL-30")
@pytest.mark.parametrize(
    ("shape", "is_green"),
    [
        pytest.param((4, 16), True, id="64-elements"),  # 1.2 (1 + 3 / 8) = 1.65
        pytest.param((64, 64), False, id="4096-elements"),  # 1.2 (1 + 3 / 64) = 1.26
    ],
)
def test_few_elements_may_be_farther_off_than_the_twin(
    judged: Judge, shape: tuple[int, int], is_green: bool
) -> None:
    exact = unit_rows(shape, seed=1)
    own = judged(exact, apart(exact, 9.0, seed=2), apart(exact, 6.0, seed=3))
    assert own.ratio == pytest.approx(1.5, rel=1e-3)
    assert own.is_bad is not is_green


@pytest.mark.spec("RPL-100")
@pytest.mark.parametrize(
    ("roundings", "released", "is_green"),
    [
        pytest.param(9.0, (GIVEN,), True, id="folded"),  # R 1.5, at most 2
        pytest.param(15.0, (GIVEN,), False, id="folded-and-wrong"),  # R 2.5
        pytest.param(9.0, (), False, id="alone"),
    ],
)
def test_weights_that_are_folded_are_rounded_once_more(
    judged: Judge, roundings: float, released: tuple[str, ...], is_green: bool
) -> None:
    exact = unit_rows((64, 64), seed=1)
    target, twin = apart(exact, roundings, seed=2), apart(exact, 6.0, seed=3)
    own = judged(exact, target, twin, class_name="torch.nn.BatchNorm2d", released=released)
    assert own.is_bad is not is_green


@pytest.mark.spec("RPL-205")
@pytest.mark.parametrize(
    ("of_twin", "is_green"),
    [
        pytest.param(0.0, False, id="exact-twin"),
        pytest.param(0.3, False, id="less-than-half"),
        pytest.param(0.6, True, id="other-neighbour"),
    ],
)
def test_an_outlier_that_the_model_has_itself_in_that_precision_is_no_mistake(
    judged: Judge, of_twin: float, is_green: bool
) -> None:
    exact = unit_rows((64, 64), seed=1)
    exact[5] = 1 / 8  # rows have an RMS of 1 / 8
    target, twin = exact.copy(), exact.copy()
    target[5, 7] += 2.0 / 8  # 1.0 of the element and its row together
    twin[5, 7] += of_twin * 2.0 / 8
    own = judged(exact, target, twin)
    finding = next(f for f in own.findings if f.test == "outlier_element")
    assert finding.value == pytest.approx(1.0, rel=1e-3)
    assert (finding.status == "within-rounding") is is_green
    assert own.is_bad is not is_green


@pytest.mark.spec("RPL-205")
def test_one_element_that_the_model_has_wrong_excuses_no_other_one(judged: Judge) -> None:
    exact = unit_rows((64, 64), seed=1)
    target, twin = exact.copy(), exact.copy()
    twin[5, 7] += 4.0
    for place in ((9, 3), (5, 3), (9, 7)):
        target[5, 7] = exact[5, 7] + 2.0
        target[place] += 0.5
        own = judged(exact, target, twin)
        finding = next(f for f in own.findings if f.test == "outlier_element")
        size = abs(exact[place]) + 1 / 8
        assert (own.is_bad, finding.status) == (True, "diverged")
        assert finding.value == pytest.approx(0.5 / size, rel=1e-3)
        target[place] = exact[place]
    assert not judged(exact, target, twin).is_bad


@pytest.mark.spec("RPL-205")
def test_what_the_model_has_wrong_in_a_part_it_may_have_right_in_an_element_of_that(judged: Judge) -> None:
    """Positions in the thousands, of which bfloat16 keeps every tenth, by frequencies near 1."""
    exact = unit_rows((64, 64), seed=1)
    rng = np.random.default_rng(4)
    target, twin = exact.copy(), exact.copy()
    for side in (target, twin):
        side[40:, :8] += 2 * rng.uniform(-1, 1, size=(24, 8))
    twin[50, 3] = exact[50, 3]
    assert not judged(exact, target, twin).is_bad
    target[10, 20] += 2
    assert judged(exact, target, twin).is_bad


@pytest.mark.spec("RPL-205")
def test_the_limit_of_an_outlier_is_twice_that_of_the_model() -> None:
    finding = Finding("outlier_element", 0.5, 0.04, "diverged", "one element is off by 0.5 of its row")
    right, wrong = (
        judge_outliers_of_twin(finding, np.array([[0.0, 0.5]]), np.array([[0.0, twin]]))
        for twin in (0.25, 0.249)
    )
    assert (right.status, right.limit, wrong.status) == ("within-rounding", 0.5, "diverged")
    assert right.text.endswith("and by 0.25 in the model in that precision")


@pytest.mark.spec("RPL-205")
def test_what_was_not_measured_is_no_outlier() -> None:
    finding = Finding("outlier_element", 0.5, 0.04, "diverged", "one element is off by 0.5 of its row")
    own, twin = np.array([[3.0, 0.5]]), np.array([[0.0, 0.3]])
    assert judge_outliers_of_twin(finding, own, twin).status == "within-rounding"
    assert judge_outliers_of_twin(finding, own[:, :1], twin[:, :1]) is finding
