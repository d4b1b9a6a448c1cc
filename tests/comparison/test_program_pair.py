"""Two runs of compiled programs: operations that bear only numbers, and values that neither program has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tensorcap.comparison import compare

MakeArchive = Callable[..., Any]
VALUES = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
LOST = {"site": "norm:norm", "status": "not-capturable", "kind": "op", "slots": ["output"], "reason": "fused"}


def run(op_id: int, points: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    """The metadata of a run of a program whose node `mul` is the operation of that number."""
    row = {"node": "mul", "module": "", "output": 0, "op": "core.mul", "op_id": op_id, "op_ids": [op_id]}
    return {"operation_map": [{**row, "op_output": 0}], "points": list(points), "dtype": "float32"}


def tensors(number: int, inner: Any) -> dict[str, Any]:
    return {
        "0/@root/input.x": VALUES,
        f"0/@root:rsqrt_{number}/output": inner,
        "0/@root:mul/output": 2 * VALUES,
        "0/@root/output": 2 * VALUES,
    }


def statuses(comparison: Any) -> dict[str, str]:
    return {pair.key: pair.status for pair in comparison.pairs}


@pytest.mark.spec("CMP-160")
@pytest.mark.parametrize("number", [pytest.param(7, id="the same number"), pytest.param(8, id="another")])
def test_operations_of_no_node_are_not_held_against_those_of_another_program(
    number: int, make_archive: MakeArchive
) -> None:
    reference = make_archive(tensors(7, VALUES), run=run(9))
    comparison = compare(reference, make_archive(tensors(number, -VALUES), run=run(10)))
    assert statuses(comparison) == {
        "0/@root/input.x": "identical",
        "0/@root:rsqrt_7/output": "excluded",
        "0/@root:mul/output": "identical",
        "0/@root/output": "identical",
    }
    assert comparison.exit_status == 0


@pytest.mark.spec("CMP-160")
def test_operations_of_no_node_are_compared_within_one_program(make_archive: MakeArchive) -> None:
    reference = make_archive(tensors(7, VALUES), run=run(9))
    comparison = compare(reference, make_archive(tensors(7, -VALUES), run=run(9)))
    assert statuses(comparison)["0/@root:rsqrt_7/output"] not in ("excluded", "identical")


@pytest.mark.spec("CMP-160")
@pytest.mark.parametrize(
    ("points", "status"),
    [
        pytest.param((LOST,), "explained", id="neither"),
        pytest.param((), "excluded", id="the target has it"),
    ],
)
def test_what_neither_program_has_a_value_of_is_explained(
    points: tuple[dict[str, Any], ...], status: str, make_archive: MakeArchive
) -> None:
    reference = make_archive(tensors(7, VALUES), run=run(9, (LOST,)))
    comparison = compare(reference, make_archive(tensors(7, VALUES), run=run(9, points)))
    assert statuses(comparison)["0/norm:norm/output"] == status
