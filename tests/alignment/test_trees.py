"""Module trees: of archives and real models, folded, and compared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap.alignment.names import tree_differences
from tensorcap.runs import Tree, compressed, full, paths, tree_lines
from tensorcap_formats.dtypes import DTYPES
from tensorcap_formats.keys import Key
from tensorcap_formats.open import open_archive
from tensorcap_formats.run_info import RunInfo
from tensorcap_formats.writing import Writer

Modules = Mapping[str, tuple[str, Mapping[str, tuple[int, ...]]]]


def _tree(modules: Modules, *, never: tuple[str, ...] = (), config: dict[str, Any] | None = None) -> Tree:
    run = {
        "model": {"config": config},
        "modules": [
            {
                "path": path,
                "class": f"pkg.{cls}",
                "parameters": {n: {"shape": list(s), "dtype": "float32"} for n, s in shapes.items()},
            }
            for path, (cls, shapes) in modules.items()
        ],
        "points": [{"site": site, "status": "never-called"} for site in never],
    }
    found = Tree.of_run("run", RunInfo.of(run))
    assert found is not None
    return found


def _layers(*widths: int, act: str = "SiLU") -> dict[str, tuple[str, dict[str, tuple[int, ...]]]]:
    """A model of layers, each a projection of some width and an activation."""
    modules: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
        "": ("Model", {}),
        "layers": ("ModuleList", {}),
    }
    for i, width in enumerate(widths):
        modules[f"layers.{i}"] = ("Layer", {})
        modules[f"layers.{i}.proj"] = ("Linear", {"weight": (width, 4)})
        modules[f"layers.{i}.act_fn"] = (act, {})
    return modules


def _found(reference: Modules, target: Modules) -> list[tuple[str, str, str, str]]:
    return [
        (d.kind, d.place, d.reference, d.target) for d in tree_differences(_tree(reference), _tree(target))
    ]


def _under(prefix: str, modules: Modules) -> Modules:
    return {prefix + ("." if path else "") + path: facts for path, facts in modules.items()}


@pytest.mark.spec("ALN-60")
def test_layers_fold_if_shapes_are_equal_too() -> None:
    tree = _tree(_layers(8, 8, 8, 6, 8), never=("layers.0.act_fn", "layers.3.act_fn"))
    assert list(tree_lines(tree.root, shapes=True)) == [
        "model: Model",
        "├─ layers[0..2,4] (4): Layer",
        "│  ├─ proj: Linear  weight[8x4]",
        "│  └─ act_fn: SiLU  (never called: 1 of 4)",
        "└─ layers[3]: Layer",
        "   ├─ proj: Linear  weight[6x4]",
        "   └─ act_fn: SiLU  (never called)",
    ]
    assert list(tree_lines(tree.root, depth=2)) == [
        "model: Model",
        "├─ layers[0..2,4] (4): Layer",
        "└─ layers[3]: Layer",
    ]


@pytest.mark.spec("ALN-60")
def test_a_file_without_modules_gives_a_tree_of_its_names(tmp_path: Path) -> None:
    one = np.ones(2, np.float32)
    tensors: dict[str, Any] = {"layers.0.weight": one, "layers.1.weight": one, "norm": one}
    np.savez(tmp_path / "a.npz", **tensors)
    with open_archive(tmp_path / "a.npz") as archive:
        tree = Tree.of(archive)
    assert not tree.has_modules
    assert list(tree_lines(tree.root)) == ["model", "├─ layers[0..1] (2)", "│  └─ weight", "└─ norm"]


@pytest.mark.parametrize(
    ("modules", "lines"),
    [
        pytest.param({"a": 1}, ["model", "└─ x"], id="no-list-is-as-none"),
        pytest.param([{"path": "a", "class": "A"}, 3], ["model", "└─ a: A"], id="no-object"),
        pytest.param([{"path": "a", "parameters": [1]}], ["model", "└─ a"], id="parameters"),
    ],
)
def test_what_is_damaged_in_a_list_of_modules_is_left_out(
    tmp_path: Path, modules: Any, lines: list[str]
) -> None:
    writer = Writer(tmp_path / "a.h5", run={"modules": modules})
    writer.add(Key.parse("0/x/output"), np.ones(2, np.float32), DTYPES["float32"], (2,))
    writer.close()
    with open_archive(tmp_path / "a.h5") as archive:
        assert list(tree_lines(Tree.of(archive).root)) == lines


@pytest.mark.spec("ALN-61")
def test_the_three_files_have_their_forms() -> None:
    modules: Modules = {"": ("M", {}), "q": ("Linear", {"w": (2,)}), "k": ("Linear", {"w": (1,)})}
    modules = {**modules, "v": ("Linear", {"w": (1,)}), "a": ("Act", {}), "a.b": ("Act", {})}
    root = _tree(modules).root
    assert full(root) == {
        "name": "model",
        "type": "M",
        "children": [
            {"name": "q", "type": "Linear", "children": []},
            {"name": "k", "type": "Linear", "children": []},
            {"name": "v", "type": "Linear", "children": []},
            {"name": "a", "type": "Act", "children": [{"name": "b", "type": "Act", "children": []}]},
        ],
    }
    assert [child["names"] for child in compressed(root)["children"]] == [["q"], ["k", "v"], ["a"]]
    assert paths(root) == ["q", "k", "v", "a", "a.b"]


@pytest.mark.spec("ALN-62")
def test_equal_trees_do_not_differ_in_whatever_wrappers() -> None:
    modules = _layers(8, 8)
    assert _found(modules, modules) == []
    for prefix, outer in (("module", "DDP"), ("_orig_mod", "Optimized"), ("module._orig_mod", "DDP")):
        assert _found(modules, {"": (outer, {}), **_under(prefix, modules)}) == []
    peft = {"": ("Peft", {}), "base_model": ("Lora", {}), **_under("base_model.model", modules)}
    assert _found(modules, peft) == []


@pytest.mark.spec("ALN-62")
def test_a_doubled_name_is_one_and_lists_in_lists_are_two() -> None:
    plain: Modules = {"": ("M", {}), "o_proj": ("Linear", {"weight": (4, 4)})}
    doubled: Modules = {"": ("M", {}), "o_proj": ("GQA", {}), "o_proj.o_proj": ("Linear", {"weight": (4, 4)})}
    assert _found(plain, doubled) == []
    nested: Modules = {"": ("S", {}), "0": ("S", {}), "0.0": ("Linear", {"weight": (1,)})}
    assert _found({**nested, "0.0": ("Linear", {"weight": (2,)})}, nested) == [
        ("shape", "0.0.weight", "2", "1")
    ]


@pytest.mark.spec("ALN-62")
@pytest.mark.parametrize(
    ("target", "expected"),
    [
        pytest.param(_layers(*[8] * 47), [("count", "layers", "48: [0..47]", "47: [0..46]")], id="47-layers"),
        pytest.param(
            _layers(*[8] * 48, act="GELU"),
            [("activation", "layers[0..47].act_fn", "SiLU", "GELU")],
            id="activation",
        ),
        pytest.param(_layers(*[8] * 48, act="SiLUActivation"), [], id="same-activation"),
        pytest.param(
            _layers(*[8] * 3, 6, *[8] * 44), [("shape", "layers.3.proj.weight", "8x4", "6x4")], id="shape"
        ),
        pytest.param(
            {p: f for p, f in _layers(*[8] * 48).items() if not p.endswith("act_fn")},
            [("missing", "layers[0..47].act_fn", "SiLU", "")],
            id="missing-activation",
        ),
        pytest.param(
            {**_layers(*[8] * 48), "layers.1.drop": ("Dropout", {})},
            [("extra", "layers.1.drop", "", "Dropout")],
            id="extra",
        ),
        pytest.param(
            {**_layers(*[8] * 48), "layers.5.proj": ("Conv1D", {"weight": (8, 4)})},
            [("type", "layers.5.proj", "Linear", "Conv1D")],
            id="type",
        ),
        pytest.param(
            {p.replace(".proj", ".mlp.proj"): f for p, f in _layers(*[8] * 48).items()},
            [
                ("extra", "layers[0..47].mlp", "", "a module"),
                ("nested", "layers[0..47].proj", "layers[0..47].proj", "layers[0..47].mlp.proj"),
            ],
            id="nested",
        ),
    ],
)
def test_each_kind_of_difference_is_named_once(
    target: Modules, expected: list[tuple[str, str, str, str]]
) -> None:
    assert _found(_layers(*[8] * 48), target) == expected


@pytest.mark.spec("ALN-62")
def test_of_two_equal_subtrees_elsewhere_none_is_chosen() -> None:
    norm = ("Norm", {"weight": (4,)})
    reference: Modules = {"": ("M", {}), "norm": norm}
    target: Modules = {"": ("M", {}), "a": ("X", {}), "a.norm": norm, "b": ("Y", {}), "b.norm": norm}
    assert {kind for kind, *_ in _found(reference, target)} == {"missing", "extra"}


@pytest.mark.spec("ALN-62")
def test_the_order_of_modules_changes_nothing() -> None:
    reference, target = _layers(8, 6), _layers(8, 8, 8, act="GELU")
    turned = dict(reversed(target.items()))
    assert sorted(_found(reference, target)) == sorted(_found(reference, turned))


@pytest.mark.spec("ALN-62")
def test_activations_of_the_configuration_are_compared() -> None:
    trees = [
        _tree(_layers(8), config={"text": {"hidden_act": act}, "max_action": "x"}) for act in ("silu", "gelu")
    ]
    (found,) = tree_differences(*trees)
    assert (found.kind, found.place) == ("activation", "config.text.hidden_act")
    assert (found.reference, found.target) == ("silu", "gelu")
