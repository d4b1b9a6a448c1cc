"""Nodes that round what they make to whole steps: what that does, and what a sum loses by it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tensorcap.comparison import compare
from tensorcap.comparison.rounded_nodes import inner_roundings, lost_operands, rounded_nodes, rounded_tensors
from tensorcap_formats.dtypes import Array
from tests.comparison.conftest import MakeArchive

DRAW = np.random.default_rng(3)
X = DRAW.standard_normal((16, 64))


def facts(name: str, op: str, inputs: list[str], **more: Any) -> dict[str, Any]:
    """Those of a node of the module `norm`, within its step."""
    return {
        f"{name}/op": {
            "op": f"onnx.{op}",
            "inputs": [{"name": "A", "record": key} for key in inputs],
            "outputs": [{"slot": "output", "record": f"{name}/output"}],
            "arguments": {},
            "order": int(DRAW.integers(1 << 40)),
            "module": "norm",
            "module_call": 0,
            "class": "Norm",
            **more,
        }
    }


def difference(steps: dict[int, tuple[Array, Array, float]]) -> tuple[dict[str, Array], dict[str, Any]]:
    """By step of a run: one operand less another, rounded to steps of the largest over 127."""
    tensors: dict[str, Array] = {}
    values: dict[str, Any] = {}
    for number, (x, mean, step) in steps.items():
        one, other, node = (f"{number}/norm:{name}" for name in ("Relu", "ReduceMean", "Sub"))
        tensors |= {
            f"{one}/output": x.astype(np.float32),
            f"{other}/output": mean.astype(np.float32),
            f"{node}/output": (np.rint((x - mean) / step) * step).astype(np.float32),
            f"{number}/norm/output": x.astype(np.float32),
        }
        values |= facts(one, "Relu", [f"{number}/norm/input"])
        values |= facts(other, "ReduceMean", [f"{one}/output"])
        values |= facts(node, "Sub", [f"{one}/output", f"{other}/output"], step=step, zero=0)
    return tensors, values


SMALL = DRAW.uniform(-0.01, 0.01, (16, 1))  # means, less than half a step of 0.03
MASK = np.where(np.arange(64) < 48, 0.0, -3e38)


@pytest.mark.spec("POL-621")
@pytest.mark.parametrize(
    ("x", "mean", "step", "count"),
    [
        pytest.param(X, SMALL, 0.03, 0, id="a mean that is as small as rounding"),
        pytest.param(-MASK[None] + 0 * X, X, 3e38 / 127, 1, id="scores beside a mask"),
        pytest.param(X * 1e-6, SMALL, 0.03, 2, id="all"),
    ],
)
def test_a_sum_loses_an_operand_where_it_has_little_else(
    make_archive: MakeArchive, x: Array, mean: Array, step: float, count: int
) -> None:
    tensors, values = difference({0: (x, mean, step)})
    archive = make_archive(tensors, values=values)
    lost = list(lost_operands(archive, rounded_nodes(archive)))
    assert len(lost) == count
    assert all("rounds a sum to steps" in one.text for one in lost)


@pytest.mark.spec("POL-621")
def test_what_is_lost_in_one_step_is_told_of_that(make_archive: MakeArchive) -> None:
    tensors, values = difference({0: (X, SMALL, 0.03), 1: (-MASK[None] + 0 * X, X, 3e38 / 127)})
    other = {key: value * np.float32(1.001) for key, value in tensors.items() if key.endswith("/norm/output")}
    found = compare(make_archive({**tensors, **other}), make_archive(tensors, values=values))
    told = [pair.key for pair in found.pairs if any("is lost" in finding.text for finding in pair.findings)]
    assert told == ["1/norm/output"]


@pytest.mark.spec("POL-622")
def test_rounding_of_several_steps_does_not_add_up(make_archive: MakeArchive) -> None:
    wanted = 0.03 / np.sqrt(12) / np.median(np.sqrt(np.square(X).mean(axis=1)))
    for count in (1, 9):
        tensors, values = difference(dict.fromkeys(range(count), (X, SMALL, 0.03)))
        archive = make_archive(tensors, values=values)
        assert inner_roundings(archive, rounded_nodes(archive)) == {"norm": pytest.approx(wanted, rel=0.02)}


@pytest.mark.spec("POL-656")
@pytest.mark.parametrize("is_weight", [False, True], ids=["two computed", "a weight"])
def test_operands_of_a_product_are_rounded_within_its_module(
    make_archive: MakeArchive, is_weight: bool
) -> None:
    tensors: dict[str, Array] = {}
    values: dict[str, Any] = {}
    for name, size in (("q", 1.0), ("k", 3.0)):
        step, node = size * 8 / 255, f"0/norm:{name}"
        made = (np.rint(size * X / step) + 128).clip(0, 255).astype(np.uint8)
        tensors |= {
            f"{node}/output.0": made,
            f"{node}/output.1": np.array([step], np.float32),
            f"{node}/output.2": np.array([128], np.uint8),
        }
        outputs = [{"slot": f"output.{i}", "record": f"{node}/output.{i}"} for i in range(3)]
        values |= facts(node, "DynamicQuantizeLinear", ["0/norm/input"], outputs=outputs)
    values |= facts("0/norm:scores", "MatMulInteger", ["0/norm:q/output.0", "0/norm:k/output.0"])
    if is_weight:
        values["0/norm:scores/op"]["inputs"][1] = {"name": "B", "parameter": "w"}
    archive = make_archive(tensors, values=values)
    wanted = {} if is_weight else {"norm": pytest.approx(np.sqrt(2) * 8 / 255 / np.sqrt(12), rel=0.05)}
    assert inner_roundings(archive, rounded_nodes(archive)) == wanted


@pytest.mark.parametrize("unreadable", ["", "0/norm/output"])
def test_what_a_module_hands_on_that_a_node_rounded_may_be_unreadable(
    make_archive: MakeArchive, unreadable: str
) -> None:
    tensors, values = difference({0: (X, SMALL, 0.03)})
    tensors["0/norm/output"] = tensors["0/norm:Sub/output"]
    archive = make_archive(tensors, values=values, unreadable=unreadable)
    found = [key for key, _ in rounded_tensors(archive, rounded_nodes(archive))]
    assert found == ([] if unreadable else ["0/norm/output"])
    statuses = {pair.key: pair.status for pair in compare(make_archive(tensors), archive).pairs}
    assert (statuses["0/norm/output"] == "unreadable") == bool(unreadable)
