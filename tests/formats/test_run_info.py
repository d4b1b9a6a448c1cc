"""What run metadata say once they are parsed, and that nothing damaged in them raises or is passed on."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from tensorcap_formats.run_info import (
    ErrorInfo,
    ExportedNode,
    InjectedSlot,
    InjectionInfo,
    MappedOperation,
    ModuleInfo,
    PointInfo,
    RankProblem,
    RanksInfo,
    RunInfo,
    ScopeInfo,
    StopInfo,
    TensorInfo,
    TensorRule,
    WorkloadInfo,
)

RUN: dict[str, Any] = {
    "framework": {"name": "torch", "version": "2.6", "settings": {"deterministic_algorithms": True}},
    "model": {
        "class": "zoo.Net",
        "file": "net.py",
        "config": {"hidden_size": 8},
        "attn_implementation": "sdpa",
        "left_out_weights": ["pooler.weight", 3],
    },
    "modules": [
        {
            "path": "",
            "class": "zoo.Net",
            "training": False,
            "parameters": {"weight": {"shape": [2, 3], "dtype": "float32"}, "lazy": {"shape": None}},
            "buffers": {"mean": {"shape": [], "dtype": "float64"}},
        },
        {"path": "a b", "class": "Linear"},
    ],
    "aliases": {"head": "embed"},
    "dtype": "bfloat16",
    "compute_dtype": "float32",
    "device": "cpu",
    "packages": {"torch": "2.6"},
    "workload": {"kind": "function", "path": "m.py:make", "options": {"seed": 3}},
    "inputs": {"0/@root/input.x": {"sha256": "ab"}, "0/@root/input.y": {}},
    "scope": {
        "include": ["layers.*"],
        "exclude": ["*.norm"],
        "inputs": False,
        "level": "op",
        "decompositions": "coreai",
        "ops_in": ["*.mlp"],
        "watch": ["m:f:x"],
        "slices": ["[:2]"],
        "steps": "1-2",
        "sample": 4,
        "max_bytes": 900,
        "grads": True,
        "params": True,
        "eager": True,
        "inner": True,
    },
    "dump": "log",
    "points": [
        {"site": "a%20b", "status": "never-called", "calls": 0, "kind": "function", "reason": "unused"},
        {"site": "@root", "status": "not-capturable", "calls": 2, "slots": ["output.1"], "unfinished": 1},
    ],
    "steps": 3,
    "phases": ["prefill", "decode", "decode"],
    "threads": [0, 1, 0],
    "threaded_sites": ["a%20b"],
    "ranks": {
        "count": 2,
        "rank": 1,
        "archives": ["t.rank0.h5", "t.rank1.h5"],
        "tensors": [
            {
                "rule": "concat 2",
                "keys": ["0/a%20b/output"],
                "known": "DTensor",
                "mesh": {"sizes": {"tp": 2}, "ranks": [0, 1]},
                "shape": [2, 8],
                "sizes": {"1": [4, 4]},
            }
        ],
        "problems": [{"key": "0/c/output", "kind": "unequal", "text": "unlike", "ranks": [1]}],
    },
    "stopped": {"at": "2/a%20b/output", "max_bytes": 900},
    "injected": {
        "source": "ref.h5",
        "root": "00ff",
        "map": "[tensorcap]",
        "slots": [
            {"site": "a%20b", "slot": "input.x", "status": "injected", "calls": {"0": "0,2-3"}},
            {"site": "a%20b", "slot": "output", "status": "left", "reason": "no leaf"},
        ],
    },
    "error": {"type": "ValueError", "message": "boom", "last_point": "0/a%20b"},
    "notes": ["one", "two"],
    "control": [{"slot": "output", "identical": True}],
    "duration_seconds": 1.5,
    "exported_nodes": [
        {
            "node": "mm_1",
            "op": "aten.mm.default",
            "module": "up",
            "inputs": {"self": "view"},
            "weights": {"mat2": "up.w"},
            "arguments": {"n": 1},
            "shapes": [[2, 3]],
            "outputs": [0],
            "file": "net.py",
            "line": 12,
        }
    ],
    "operation_map": [
        {
            "node": "mm_1",
            "module": "up",
            "output": 1,
            "op": "coreai.matmul",
            "op_id": 7,
            "op_ids": [5, 7],
            "op_output": 2,
            "file": "net.py",
            "line": 12,
        },
        {"node": "add", "op": "coreai.add"},
        {"node": "no operation"},
    ],
    "mappings": {"sources": {"torch": {"3": {"identifiers": ["mm"]}}}},
}
PARSED: dict[str, Any] = {
    "framework": "torch",
    "settings": {"deterministic_algorithms": True},
    "model_class": "zoo.Net",
    "model_file": "net.py",
    "config": {"hidden_size": 8},
    "attention_implementation": "sdpa",
    "left_out_weights": ("pooler.weight",),
    "modules": {
        "@root": ModuleInfo(
            "",
            "zoo.Net",
            False,
            {"weight": TensorInfo((2, 3), "float32"), "lazy": TensorInfo(None, "")},
            {"mean": TensorInfo((), "float64")},
        ),
        "a%20b": ModuleInfo("a b", "Linear", None, {}, {}),
    },
    "aliases": {"head": "embed"},
    "dtype": "bfloat16",
    "compute_dtype": "float32",
    "device": "cpu",
    "packages": {"torch": "2.6"},
    "workload": WorkloadInfo("m.py:make", {"seed": 3}),
    "inputs": {"0/@root/input.x": "ab", "0/@root/input.y": ""},
    "scope": ScopeInfo(
        include=("layers.*",),
        exclude=("*.norm",),
        inputs=False,
        level="op",
        decompositions="coreai",
        ops_in=("*.mlp",),
        watch=("m:f:x",),
        slices=("[:2]",),
        steps="1-2",
        sample=4,
        max_bytes=900,
        grads=True,
        params=True,
        eager=True,
        inner=True,
    ),
    "dump": "log",
    "points": (
        PointInfo("a%20b", "never-called", "function", "unused", 0, 0, ()),
        PointInfo("@root", "not-capturable", "module", "", 2, 1, ("output.1",)),
    ),
    "steps": 3,
    "phases": ("prefill", "decode", "decode"),
    "threads": (0, 1, 0),
    "threaded_sites": ("a%20b",),
    "ranks": RanksInfo(
        2,
        1,
        ("t.rank0.h5", "t.rank1.h5"),
        (
            TensorRule(
                "concat 2",
                ("0/a%20b/output",),
                "DTensor",
                {"sizes": {"tp": 2}, "ranks": [0, 1]},
                (2, 8),
                {"1": (4, 4)},
            ),
        ),
        (RankProblem("0/c/output", "unequal", "unlike", (1,)),),
    ),
    "stopped": StopInfo("2/a%20b/output", 900),
    "injected": InjectionInfo(
        "ref.h5",
        "00ff",
        "[tensorcap]",
        (
            InjectedSlot("a%20b", "input.x", "injected", "", {0: "0,2-3"}),
            InjectedSlot("a%20b", "output", "left", "no leaf", {}),
        ),
    ),
    "error": ErrorInfo("ValueError", "boom"),
    "notes": ("one", "two"),
    "control": ({"slot": "output", "identical": True},),
    "duration_seconds": 1.5,
    "operation_map": (
        MappedOperation("mm_1", "up", 1, "coreai.matmul", 7, (5, 7), 2, "net.py", 12),
        MappedOperation("add", op="coreai.add"),
    ),
    "exported_nodes": (
        ExportedNode(
            node="mm_1",
            op="aten.mm.default",
            module="up",
            inputs={"self": "view"},
            weights={"mat2": "up.w"},
            arguments={"n": 1},
            shapes=((2, 3),),
            outputs=(0,),
            file="net.py",
            line=12,
        ),
    ),
    "mappings": {"sources": {"torch": {"3": {"identifiers": ["mm"]}}}},
}
DAMAGE = [
    pytest.param(None, id="null"),
    pytest.param([], id="empty-list"),
    pytest.param([1, None, "text", [2], {"x": 1}], id="list"),
    pytest.param({}, id="empty-object"),
    pytest.param({"a": 1, "b": None, "c": [3]}, id="object"),
    pytest.param(-7.5, id="number"),
    pytest.param(True, id="true"),
    pytest.param("a text \ud800", id="text"),
]


@pytest.mark.spec("ARC-70")
def test_whole_metadata_are_parsed() -> None:
    info = RunInfo.of(RUN)
    assert {field.name: getattr(info, field.name) for field in fields(info)} == PARSED


@pytest.mark.spec("ARC-70")
def test_every_entry_may_be_absent() -> None:
    assert RunInfo.of({}) == RunInfo()
    for name in RUN:
        RunInfo.of({other: value for other, value in RUN.items() if other != name})


def _places(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Where in a JSON value anything else could stand."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [
        *([path] if path else []),
        *(place for key, each in inner for place in _places(each, (*path, key))),
    ]


def _replaced(value: Any, path: tuple[str | int, ...], new: Any) -> Any:
    if not path:
        return new
    key, rest = path[0], path[1:]
    if isinstance(value, list):
        return [_replaced(each, rest, new) if i == key else each for i, each in enumerate(value)]
    return {name: _replaced(each, rest, new) if name == key else each for name, each in value.items()}


@pytest.mark.parametrize("damage", DAMAGE)
def test_no_damage_of_any_part_raises_or_changes_another_entry(damage: Any) -> None:
    together = {"framework": {"framework", "settings"}}
    together["model"] = {
        "model_class",
        "model_file",
        "config",
        "attention_implementation",
        "left_out_weights",
    }
    for place in _places(RUN):
        info = RunInfo.of(_replaced(RUN, place, damage))
        altered = {field.name for field in fields(info) if getattr(info, field.name) != PARSED[field.name]}
        assert altered <= together.get(str(place[0]), {str(place[0])}), place


@pytest.mark.parametrize(
    ("run", "name", "expected"),
    [
        pytest.param({"framework": ["torch"]}, "framework", "", id="list-for-an-object"),
        pytest.param({"framework": {"name": 3}}, "framework", "", id="number-for-a-text"),
        pytest.param({"model": "zoo.Net"}, "config", {}, id="text-for-an-object"),
        pytest.param({"modules": {"path": ""}}, "modules", {}, id="object-for-a-list"),
        pytest.param(
            {"modules": [3, {"class": "A"}, {"path": 4}, {"path": "x", "class": 5, "training": "no"}]},
            "modules",
            {"x": ModuleInfo("x", "", None)},
            id="modules-without-a-path",
        ),
        pytest.param(
            {
                "modules": [
                    {"path": "x", "parameters": {"w": 3, "v": {"shape": [2, -1]}, "u": {"shape": [True]}}}
                ]
            },
            "modules",
            {"x": ModuleInfo("x", parameters={"w": TensorInfo(), "v": TensorInfo(), "u": TensorInfo()})},
            id="shapes-that-are-none",
        ),
        pytest.param({"aliases": {"a": "b", "c": 4}}, "aliases", {"a": "b"}, id="a-number-among-aliases"),
        pytest.param({"points": [{"status": "captured"}, 3]}, "points", (), id="points-without-a-site"),
        pytest.param(
            {"points": [{"site": "x", "calls": "2", "slots": "output"}]},
            "points",
            (PointInfo("x"),),
            id="a-point-that-is-damaged",
        ),
        pytest.param({"scope": {}}, "scope", None, id="empty-scope"),
        pytest.param({"scope": {"include": "x", "sample": -1}}, "scope", ScopeInfo(), id="text-for-globs"),
        pytest.param({"steps": True}, "steps", None, id="true-for-a-count"),
        pytest.param({"threads": [0, "1", True]}, "threads", (0, -1, -1), id="threads"),
        pytest.param({"phases": ["prefill", 3, "decode"]}, "phases", ("prefill", "", "decode"), id="phases"),
        pytest.param({"stopped": True}, "stopped", None, id="true-for-an-object"),
        pytest.param({"stopped": {"at": 3}}, "stopped", StopInfo("", None), id="stopped-somewhere"),
        pytest.param({"injected": []}, "injected", None, id="injected-list"),
        pytest.param(
            {"injected": {"slots": [{"site": "a"}, {"site": "a", "slot": "b", "calls": {"x": "0", "1": 2}}]}},
            "injected",
            InjectionInfo(slots=(InjectedSlot("a", "b"),)),
            id="calls-that-are-no-numbers",
        ),
        pytest.param({"error": "ValueError"}, "error", ErrorInfo("ValueError"), id="error-as-a-text"),
        pytest.param({"error": {"type": 3, "message": "m"}}, "error", ErrorInfo("", "m"), id="error-type"),
        pytest.param({"duration_seconds": "long"}, "duration_seconds", None, id="text-for-a-number"),
    ],
)
def test_a_damaged_entry_counts_as_absent(run: dict[str, Any], name: str, expected: object) -> None:
    assert getattr(RunInfo.of(run), name) == expected
