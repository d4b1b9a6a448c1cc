"""Which mapping a comparison uses, what it covers, and what moved in the order of execution."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tensorcap.alignment import Alignment, Entry, LeftOver, align, aligned_if_needed, sides
from tensorcap.comparison import compare
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tests.support.archives import new_archive, write_archive

DRAWN = np.random.default_rng(5).standard_normal((6, 4, 16)).astype(np.float32)


def archive_of(path: Path, tensors: dict[str, Array], modules: dict[str, str] | None = None) -> Archive:
    """An archive of these tensors; modules by path, with their classes."""
    run = {"modules": [{"path": p, "class": c} for p, c in modules.items()]} if modules else {}
    return new_archive(path, tensors, run=run)


def linear(*sites: str) -> dict[str, str]:
    return dict.fromkeys(sites, "torch.nn.Linear")


def renamed(tmp_path: Path, *, knows_modules: bool) -> tuple[Archive, Archive]:
    """Two sites of unlike names, one of an equal one."""
    ones = {"first": DRAWN[0], "second": DRAWN[1], "last": DRAWN[2]}
    others = {"a": DRAWN[0], "b": DRAWN[1], "last": DRAWN[2]}
    return (
        archive_of(tmp_path / "r.h5", ones, linear(*ones) if knows_modules else None),
        archive_of(tmp_path / "t.h5", others, linear(*others) if knows_modules else None),
    )


@pytest.mark.spec("CMP-20")
def test_modules_that_names_leave_over_on_both_sides_are_mapped_by_values(
    tmp_path: Path,
) -> None:
    found = compare(*renamed(tmp_path, knows_modules=True))
    assert {pair.key: pair.status for pair in found.pairs} == {
        "0/first/output": "identical",
        "0/second/output": "identical",
        "0/last/output": "identical",
    }
    first = found.pairs[0].origin
    assert first is not None
    assert (first.target, first.steps, first.evidence) == (("0/a/output",), (), "values")
    assert found.mapping is not None
    assert (found.mapping.path, dict(found.mapping.evidence)) == ("", {"values": 2, "name": 1})


@pytest.mark.spec("CMP-20")
def test_values_alone_pair_no_files_that_list_no_modules(tmp_path: Path) -> None:
    found = compare(*renamed(tmp_path, knows_modules=False))
    assert found.counts == {"identical": 1, "missing-in-target": 2, "missing-in-reference": 2}
    assert found.mapping is None
    assert found.exit_status == 1


@pytest.mark.spec("CMP-20")
def test_names_that_differ_by_wrappers_pair_files_that_list_no_modules(tmp_path: Path) -> None:
    reference = archive_of(tmp_path / "r.h5", {"layers.0": DRAWN[0], "layers.1": DRAWN[1], "norm": DRAWN[2]})
    target = archive_of(
        tmp_path / "t.h5",
        {"_orig_mod.layers.0": DRAWN[0], "_orig_mod.layers.1": DRAWN[1] + 1, "_orig_mod.norm": DRAWN[2]},
    )
    found = compare(reference, target)
    assert found.counts == {"identical": 2, "diverged": 1}
    assert found.divergence is not None
    assert found.divergence.pair.key == "0/layers.1/output"


@pytest.mark.spec("CMP-20")
@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_arguments_of_other_names_are_paired_at_equal_sites(tmp_path: Path, factor: float) -> None:
    ones = {"0/norm/input.hidden_states": DRAWN[0], "0/norm/output": DRAWN[1], "0/head/output": DRAWN[2]}
    others = {
        "0/norm/input.args.0": DRAWN[0] * np.float32(factor),
        "0/norm/output": DRAWN[1] * np.float32(factor),
        "0/head/output": DRAWN[2],
    }
    reference = archive_of(tmp_path / "r.h5", ones, linear("norm", "head"))
    target = archive_of(tmp_path / "t.h5", others, linear("norm", "head"))
    found = compare(reference, target)
    origin = found.pairs[0].origin
    assert origin is not None
    assert (found.pairs[0].key, origin.target) == ("0/norm/input.hidden_states", ("0/norm/input.args.0",))
    assert found.pairs[0].status == ("identical" if factor == 1 else "diverged")
    aligned = aligned_if_needed(reference, target)  # by which localize, inject and bisect run the target
    assert aligned is not None
    assert "0/norm/input.hidden_states" in aligned.target
    assert compare(reference, target, mapping="none").counts["missing-in-target"] == 1


@pytest.mark.spec("CMP-20")
def test_none_pairs_equal_keys_alone(tmp_path: Path) -> None:
    found = compare(*renamed(tmp_path, knows_modules=True), mapping="none")
    assert found.counts == {"identical": 1, "missing-in-target": 2, "missing-in-reference": 2}


@pytest.mark.spec("CMP-20")
def test_a_computed_mapping_moves_no_elements_where_names_are_equal(tmp_path: Path) -> None:
    ones = {"first": DRAWN[0], "turned": DRAWN[1], "batched": DRAWN[2]}
    others = {"a": DRAWN[0], "turned": DRAWN[1].T, "batched": DRAWN[2][None]}
    reference = archive_of(tmp_path / "r.h5", ones, linear(*ones))
    target = archive_of(tmp_path / "t.h5", others, linear(*others))
    found = {pair.key: pair for pair in compare(reference, target).pairs}
    assert found["0/first/output"].status == "identical"
    assert found["0/batched/output"].status == "identical"
    assert found["0/turned/output"].status == "shape-mismatch"
    steps = {entry.target: entry.steps for entry in align(reference, target).alignment.entries}
    assert steps["turned",] == ("transpose 0 1",)
    assert compare(reference, target, mapping=align(reference, target).alignment).exit_status == 0


@pytest.mark.spec("CMP-8")
def test_a_pair_of_unlike_shapes_says_what_would_bring_it_together(tmp_path: Path) -> None:
    square = DRAWN[0][:, :4]
    reference = archive_of(tmp_path / "r.h5", {"turned": DRAWN[1], "other": DRAWN[2], "square": square})
    target = archive_of(tmp_path / "t.h5", {"turned": DRAWN[1].T, "other": DRAWN[3].T, "square": square.T})
    found = {pair.key: pair for pair in compare(reference, target).pairs}
    shapes = "[4, 16] in the reference, [16, 4] in the target"
    assert found["0/turned/output"].reason == f"{shapes}; would match after transpose 0 1"
    assert found["0/other/output"].reason == shapes
    assert found["0/square/output"].status == "diverged"


@pytest.mark.spec("CMP-21")
def test_what_a_mapping_explains_may_be_missing_and_what_it_does_not_is_unmapped(tmp_path: Path) -> None:
    reference = archive_of(
        tmp_path / "r.h5",
        {
            "first": DRAWN[0],
            "0/first/input.x": DRAWN[5],
            "drop.0": DRAWN[1],
            "drop.1": DRAWN[2],
            "odd": DRAWN[3],
            "even": DRAWN[4],
            "1/first/output": DRAWN[1],
        },
    )
    target = archive_of(tmp_path / "t.h5", {"a": DRAWN[0], "extra": DRAWN[5]})
    left = (
        LeftOver("reference", ("drop.{i}",), "dropout is absent"),
        LeftOver("reference", ("first/input.x",), "a closure holds it"),
        LeftOver("reference", ("odd",), "could be a", is_explained=False),
        LeftOver("target", ("ext*",), "a copy"),
    )
    alignment = Alignment((Entry(("first",), ("a",)),), left)
    found = {p.key: p for p in compare(reference, target, mapping=alignment).pairs}
    told = {key: (pair.status, pair.reason, pair.is_required) for key, pair in found.items()}
    assert told == {
        "0/first/output": ("identical", "", True),
        "0/first/input.x": ("explained", "a closure holds it", False),
        "0/drop.0/output": ("explained", "dropout is absent", False),
        "0/drop.1/output": ("explained", "dropout is absent", False),
        "0/odd/output": ("unmapped", "could be a", True),
        "0/even/output": ("unmapped", "no entry of the mapping has it", True),
        "1/first/output": ("missing-in-target", "", True),
        "0/extra/output": ("missing-in-reference", "a copy", False),
    }


@pytest.mark.spec("CMP-21")
def test_what_a_user_requires_may_not_be_missing_though_a_mapping_explains_it(tmp_path: Path) -> None:
    reference = archive_of(tmp_path / "r.h5", {"first": DRAWN[0], "drop": DRAWN[1]})
    target = archive_of(tmp_path / "t.h5", {"a": DRAWN[0]})
    left = LeftOver("reference", ("drop",), "dropout is absent")
    alignment = Alignment((Entry(("first",), ("a",)),), (left,))
    assert compare(reference, target, mapping=alignment).exit_status == 0
    assert compare(reference, target, mapping=alignment, require="drop").exit_status == 1
    assert compare(reference, target, mapping=alignment, require="first").exit_status == 0


@pytest.mark.spec("ALN-81")
def test_every_record_is_mapped_explained_or_neither(tmp_path: Path) -> None:
    reference = archive_of(
        tmp_path / "r.h5",
        {"first": DRAWN[0], "0/first/input.x": DRAWN[5], "drop": DRAWN[1], "odd": DRAWN[3], "same": DRAWN[4]},
    )
    target = archive_of(tmp_path / "t.h5", {"a": DRAWN[0], "same": DRAWN[4], "extra": DRAWN[5]})
    left = (
        LeftOver("reference", ("drop",), "dropout is absent"),
        LeftOver("reference", ("odd",), "could be a", is_explained=False),
    )
    found = align(reference, target, mapping=Alignment((Entry(("first",), ("a",)),), left)).summary
    assert (found.reference.records, found.reference.mapped, found.reference.explained) == (5, 2, 1)
    assert found.reference.unexplained == ("0/first/input.x", "0/odd/output")
    assert (found.target.records, found.target.mapped, found.target.explained) == (3, 2, 0)
    assert found.target.unexplained == ("0/extra/output",)
    assert found.evidence == {"user": 1, "key": 1}
    assert found.exit_status == 1


@pytest.mark.spec("ALN-80")
def test_the_least_moves_that_explain_another_order_are_told(tmp_path: Path) -> None:
    reference = archive_of(tmp_path / "r.h5", {name: DRAWN[i] for i, name in enumerate("abcde")})
    target = archive_of(tmp_path / "t.h5", {name: DRAWN["abcde".index(name)] for name in "acdbe"})
    entries = tuple(Entry((name,), (name,)) for name in "abcde")
    order = align(reference, target, mapping=Alignment(entries)).summary.order
    assert order is not None
    assert (order.results, order.moved, order.is_same) == (5, 1, False)
    (move,) = order.moves
    assert (move.key, move.target) == ("0/b/output", "0/b/output")
    assert (move.after, move.target_after) == ("0/a/output", "0/d/output")


@pytest.mark.spec("ALN-80")
def test_parts_of_a_fused_tensor_are_made_when_it_is(tmp_path: Path) -> None:
    reference = archive_of(tmp_path / "r.h5", {"q": DRAWN[0], "k": DRAWN[1], "o": DRAWN[2]})
    target = archive_of(tmp_path / "t.h5", {"qk": np.concatenate(DRAWN[:2], -1), "o": DRAWN[2]})
    entries = Entry(("q", "k"), ("qk",), steps=("split -1 2",)), Entry(("o",), ("o",))
    order = align(reference, target, mapping=Alignment(entries)).summary.order
    assert order is not None
    assert (order.results, order.moved) == (3, 0)


def test_sides_that_were_mapped_are_not_mapped_again(tmp_path: Path) -> None:
    reference, target = sides(*renamed(tmp_path, knows_modules=True))
    assert sides(reference, target) == (reference, target)


@pytest.mark.spec("CMP-20")
def test_numbers_that_are_no_tensors_are_compared_under_the_references_names(tmp_path: Path) -> None:
    for name, site, count in (("r.h5", "first", 3), ("t.h5", "a", 4)):
        tensors, values = {f"0/{site}/output.0": DRAWN[0]}, {f"0/{site}/output.1": count}
        write_archive(tmp_path / name, tensors, values=values)
    alignment = Alignment((Entry(("first",), ("a",)),))
    found = compare(tmp_path / "r.h5", tmp_path / "t.h5", mapping=alignment)
    assert [(v.key, v.reference, v.target) for v in found.value_differences] == [("0/first/output.1", 3, 4)]
