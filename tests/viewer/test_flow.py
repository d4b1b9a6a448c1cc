"""The neighbourhood of a row, from what a run recorded of its data flow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap.viewer import Subject, open_subject
from tests.support.archives import write_archive

GENERATOR = np.random.default_rng(2)


def values(count: int) -> list[Any]:
    return [GENERATOR.standard_normal((2, 3)).astype(np.float32) for _ in range(count)]


def drawn(subject: Subject, key: str) -> list[tuple[str, bool]]:
    """Boxes from top to bottom, and whether they are what is looked at."""
    picture = subject.flows[0].around(subject.rows[subject.numbers[key]])
    if picture is None:
        return []
    return [(box.label, box.is_centre) for box in sorted(picture.boxes, key=lambda box: (box.y, box.x))]


def fact(order: int, op: str, inputs: list[Any], outputs: list[Any]) -> dict[str, Any]:
    return {
        "op": f"aten.{op}.default",
        "order": order,
        "module": "fc",
        "module_call": 0,
        "class": "Linear",
        "file": "f.py",
        "line": order,
        "function": "forward",
        "inputs": [{"name": f"x{n}", **reference} for n, reference in enumerate(inputs)],
        "arguments": {},
        "outputs": [{"slot": "output", **reference} for reference in outputs],
    }


@pytest.mark.spec("VIEW-24")
def test_ops_have_what_they_take_and_what_takes_their_results_two_steps_each_way(tmp_path: Path) -> None:
    names = ["a", "b", "mul", "add", "neg", "exp"]
    tensors = dict(zip((f"0/fc:aten.{name}/output" for name in names), values(6), strict=True))

    def at(name: str) -> dict[str, Any]:
        return {"record": f"0/fc:aten.{name}/output"}

    view = {"view_of": "0/fc:aten.mul/output", "shape": [6], "strides": [1], "offset": 0, "dtype": "float32"}
    facts = {
        "0/fc:aten.a/op": fact(0, "a", [], [at("a")]),
        "0/fc:aten.b/op": fact(1, "b", [at("a")], [at("b")]),
        "0/fc:aten.mul/op": fact(2, "mul", [at("a"), at("b")], [at("mul")]),
        "0/fc:aten.view/op": fact(3, "view", [at("mul")], [view]),
        "0/fc:aten.add/op": fact(4, "add", [{"view": "0/fc:aten.view/output"}], [at("add")]),
        "0/fc:aten.neg/op": fact(5, "neg", [at("add")], [at("neg")]),
        "0/fc:aten.exp/op": fact(6, "exp", [at("neg")], [at("exp")]),
    }
    subject = open_subject(write_archive(tmp_path / "a.h5", tensors, values=facts))
    labels = drawn(subject, "0/fc:aten.mul/output")
    # The view, which has no row, is passed; `exp` is three steps away.
    assert labels == [
        ("a.default", False),
        ("b.default", False),
        ("mul.default", True),
        ("add.default", False),
        ("neg.default", False),
    ]
    picture = subject.flows[0].around(subject.rows[subject.numbers["0/fc:aten.mul/output"]])
    assert picture is not None
    assert {box.title for box in picture.boxes if box.is_centre} == {"0/fc:aten.mul, f.py:2"}
    assert len(picture.lines) == 4
    subject.close()


@pytest.mark.spec("VIEW-91")
def test_an_op_that_only_the_target_has_stands_in_the_flow_of_the_target(tmp_path: Path) -> None:
    x, taken, ours, theirs, end = values(5)
    paths = []
    for name, op, value in (("r.h5", "silu", ours), ("t.h5", "gelu", theirs)):
        tensors = {"0/fc:aten.mm/output": taken, f"0/fc:aten.{op}/output": value, "0/fc:aten.neg/output": end}
        steps = [("mm", []), (op, ["mm"]), ("neg", [op])]
        facts = {
            f"0/fc:aten.{step}/op": fact(
                order,
                step,
                [{"record": f"0/fc:aten.{source}/output"} for source in sources],
                [{"record": f"0/fc:aten.{step}/output"}],
            )
            for order, (step, sources) in enumerate(steps)
        }
        paths.append(write_archive(tmp_path / name, {"0/@root/input.x": x, **tensors}, values=facts))
    subject = open_subject(*paths)
    row = subject.rows[subject.numbers["0/fc:aten.gelu/output"]]
    picture = subject.flow_of(row).around(row)
    assert picture is not None
    boxes = sorted(picture.boxes, key=lambda box: box.y)
    assert [(box.label, box.colour) for box in boxes] == [
        ("mm.default", "green"),
        ("gelu.default", "grey"),
        ("neg.default", "green"),
    ]
    assert drawn(subject, "0/fc:aten.neg/output")[0] == ("mm.default", False)
    last = subject.rows[subject.numbers["0/fc:aten.neg/output"]]
    taken = {side: subject.flow_of(last, side).around(last) for side in ("reference", "target")}
    assert {side: one and sorted(box.label for box in one.boxes) for side, one in taken.items()} == {
        "reference": ["mm.default", "neg.default", "silu.default"],
        "target": ["gelu.default", "mm.default", "neg.default"],
    }
    assert subject.flow_of(row, "reference") is subject.flows[1]
    node = subject.flows[1].node(row)
    assert node is not None
    assert node.line == 1
    subject.close()


@pytest.mark.spec("VIEW-24")
def test_modules_are_joined_by_the_bytes_that_they_hand_on(tmp_path: Path) -> None:
    a, b, c = values(3)
    tensors = {
        "0/@root/input.x": a,
        "0/block/input.x": a,
        "0/block.up/input.x": a,
        "0/block.up/output": b,
        "0/block.down/input.x": b,
        "0/block.down/output": c,
        "0/block/output": c,
        "0/norm/input.x": c,
        "0/norm/output": a * 2,
    }
    subject = open_subject(write_archive(tmp_path / "a.h5", tensors))
    # The block hands on what its last child made: the child is the source.
    assert drawn(subject, "0/block.down/output") == [("up", False), ("down", True), ("norm", False)]
    assert drawn(subject, "0/norm/output") == [("up", False), ("down", False), ("norm", True)]
    assert drawn(subject, "0/block/output") == []
    subject.close()


@pytest.mark.spec("VIEW-24")
def test_the_flow_of_one_of_several_results_is_its_own(tmp_path: Path) -> None:
    x, hidden, bias, after, end = values(5)
    tensors = {
        "0/block.0.attention/input.x": x,
        "0/block.0.attention/output.0": hidden,
        "0/block.0.attention/output.1": bias,
        "0/block.0.dropout/input": hidden,
        "0/block.0.dropout/output": after,
        "0/block.1.attention/input.x": after,
        "0/block.1.attention/input.bias": bias,
        "0/block.1.attention/output": end,
    }
    subject = open_subject(write_archive(tmp_path / "a.h5", tensors))

    def places(key: str) -> list[str]:
        picture = subject.flows[0].around(subject.rows[subject.numbers[key]])
        assert picture is not None
        return [f"{box.module} {box.label}" for box in sorted(picture.boxes, key=lambda box: (box.y, box.x))]

    first, dropout, second = "block.0 attention", "block.0 dropout", "block.1 attention"
    assert places("0/block.0.attention/output.0") == [first, dropout, second]
    assert places("0/block.0.attention/output.1") == [first, second]
    assert places("0/block.1.attention/input.bias") == [first, second]
    assert places("0/block.1.attention/input.x") == [first, dropout, second]
    assert sorted(places("0/block.1.attention/output")) == sorted([first, dropout, second])
    subject.close()


@pytest.mark.spec("VIEW-24")
def test_a_picture_of_many_neighbours_says_how_many_it_leaves_out(tmp_path: Path) -> None:
    x, *others = values(10)
    tensors = {"0/a/output": x}
    for number, value in enumerate(others):
        tensors[f"0/b{number}/input.x"] = x
        tensors[f"0/b{number}/output"] = value
    subject = open_subject(write_archive(tmp_path / "a.h5", tensors))
    picture = subject.flows[0].around(subject.rows[0])
    assert picture is not None
    assert (len(picture.boxes), picture.more) == (5, 5)
    subject.close()


@pytest.mark.parametrize("damage", [{"order": "x"}, {"inputs": 3}, {"outputs": [{"slot": 4}]}])
def test_damaged_facts_of_ops_leave_no_picture_and_no_error(tmp_path: Path, damage: Any) -> None:
    facts = {"0/fc:aten.a/op": {**fact(0, "a", [], []), **damage}}
    subject = open_subject(
        write_archive(tmp_path / "a.h5", {"0/fc:aten.a/output": values(1)[0]}, values=facts)
    )
    assert drawn(subject, "0/fc:aten.a/output") == []
    subject.close()
