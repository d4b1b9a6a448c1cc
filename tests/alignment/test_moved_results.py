"""Results that are equal bit for bit under other names, and entries that name a call."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from tensorcap.alignment import Alignment, Entry, align, resolve, write_map
from tensorcap.comparison import Comparison, compare
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import UsageError
from tests.support.archives import new_archive

_RNG = np.random.default_rng(23)
FAR, NEAR, X, Y = (_RNG.standard_normal((4, 8)).astype(np.float32) for _ in range(4))

Tensors = dict[str, Array]

TWO_TABLES = {
    "0/far/input.x": X,
    "0/far/output": FAR,
    "0/near/input.x": X,
    "0/near/output": NEAR,
    "0/first/input.table": NEAR,
    "0/first/output": X + 1,
    "0/last/input.table": FAR,
    "0/last/output": X + 2,
}
TWO_CALLS = {
    "0/far/input.x": X,
    "0/far/output": NEAR,
    "0/far@1/input.x": X,
    "0/far@1/output": FAR,
    **{key: TWO_TABLES[key] for key in TWO_TABLES if "near/" not in key and "far/" not in key},
}


def archive(path: Path, tensors: Tensors, *, lists_modules: bool = True) -> Archive:
    sites = dict.fromkeys(key.split("/")[1].partition("@")[0] for key in tensors)
    run = {"modules": [{"path": site, "class": "Block"} for site in sites if site]} if lists_modules else {}
    return new_archive(path, tensors, run=run)


def compared(tmp_path: Path, one: Tensors, other: Tensors, *, lists_modules: bool = True) -> Comparison:
    return compare(
        archive(tmp_path / "r.h5", one, lists_modules=lists_modules),
        archive(tmp_path / "t.h5", other, lists_modules=lists_modules),
    )


def moved(comparison: Comparison) -> dict[str, str]:
    """The target's keys of pairs of unlike keys."""
    return {
        pair.key: pair.origin.target[0]
        for pair in comparison.pairs
        if pair.origin is not None and pair.origin.target != (pair.key,)
    }


@pytest.mark.spec("ALN-44")
def test_two_tables_that_became_two_calls_of_one_module_are_paired_by_values(tmp_path: Path) -> None:
    comparison = compared(tmp_path, TWO_TABLES, TWO_CALLS)
    assert moved(comparison) == {
        "0/far/input.x": "0/far@1/input.x",
        "0/far/output": "0/far@1/output",
        "0/near/input.x": "0/far/input.x",
        "0/near/output": "0/far/output",
    }
    assert (comparison.counts, comparison.exit_status) == ({"identical": 8}, 0)
    assert comparison.warnings == (
        "Paired by values, since the target's records of these names hold others: "
        "0/far/output with 0/far@1/output.",
    )


@pytest.mark.spec("ALN-44")
def test_hidden_states_that_are_counted_from_another_layer_are_paired_by_values(tmp_path: Path) -> None:
    states = [_RNG.standard_normal((4, 8)).astype(np.float32) for _ in range(5)]
    blocks = {f"0/block.{i}/output": state for i, state in enumerate(states)}
    one = blocks | {f"0/@root/output.states.{i}": states[i] for i in range(4)}
    other = blocks | {f"0/@root/output.states.{i}": states[i + 1] for i in range(4)}
    comparison = compared(tmp_path, one, other)
    assert moved(comparison) == {
        f"0/@root/output.states.{i + 1}": f"0/@root/output.states.{i}" for i in range(3)
    }
    assert comparison.divergence is None
    assert "0/@root/output.states.1 with 0/@root/output.states.0" in comparison.warnings[0]


@pytest.mark.spec("ALN-44")
def test_results_that_are_exchanged_and_used_as_they_are_named_stay_a_mistake(tmp_path: Path) -> None:
    one = {"0/q/output": FAR, "0/k/output": NEAR, "0/core/input.q": FAR, "0/core/output": X}
    other = {"0/q/output": NEAR, "0/k/output": FAR, "0/core/input.q": NEAR, "0/core/output": Y}
    comparison = compared(tmp_path, one, other)
    assert moved(comparison) == {}
    assert comparison.divergence is not None
    assert comparison.divergence.pair.key == "0/q/output"


@pytest.mark.spec("ALN-44")
def test_results_are_not_moved_by_values_that_others_hold_as_well(tmp_path: Path) -> None:
    other = {**TWO_CALLS, "0/far@2/output": FAR}
    comparison = compared(tmp_path, TWO_TABLES, other)
    assert moved(comparison).get("0/far/output") is None


@pytest.mark.spec("ALN-44")
@pytest.mark.parametrize(
    ("values", "other_values"),
    [
        pytest.param(np.ones(32, np.float32), np.zeros(32, np.float32), id="constant"),
        pytest.param(X[0], Y[0], id="few-elements"),
    ],
)
def test_values_that_chance_may_repeat_move_nothing(
    tmp_path: Path, values: Array, other_values: Array
) -> None:
    one = {"0/a/output": values, "0/b/output": other_values, "0/c/input.x": values, "0/c/output": X}
    other = {"0/a/output": other_values, "0/b/output": values, "0/c/input.x": values, "0/c/output": X}
    assert moved(compared(tmp_path, one, other)) == {}


@pytest.mark.spec("ALN-44")
def test_parameters_and_files_that_list_no_modules_are_paired_by_names(tmp_path: Path) -> None:
    assert moved(compared(tmp_path, TWO_TABLES, TWO_CALLS, lists_modules=False)) == {}
    one = {"0/a/param.weight": FAR, "0/b/param.weight": NEAR, "0/b/output": FAR}
    other = {"0/a/param.weight": NEAR, "0/b/param.weight": FAR, "0/b/output": FAR}
    assert moved(compared(tmp_path, one, other)) == {}


@pytest.mark.spec("ALN-44")
def test_a_map_that_was_written_pairs_moved_calls_as_it_was_computed(tmp_path: Path) -> None:
    one, other = archive(tmp_path / "r.h5", TWO_TABLES), archive(tmp_path / "t.h5", TWO_CALLS)
    alignment = align(one, other).alignment
    texts = [entry.text for entry in alignment.entries]
    assert texts[:2] == ["far@0 = far@1", "near@0 = far@0"]
    write_map(alignment, tmp_path / "map.toml")
    comparison = compare(one, other, mapping=tmp_path / "map.toml")
    assert (comparison.counts, comparison.exit_status) == ({"identical": 8}, 0)


def linked(archives: tuple[Archive, Archive], entries: Iterable[Entry]) -> dict[str, str]:
    links = resolve(Alignment(tuple(entries)), *archives).links
    return {link.reference[0].key.text: link.target[0].key.text for link in links}


@pytest.mark.spec("ALN-6")
@pytest.mark.spec("ALN-1")
def test_an_entry_that_names_a_call_goes_before_one_that_does_not(tmp_path: Path) -> None:
    calls = {"0/act/output": X, "0/act@1/output": Y, "0/act@2/output": FAR, "1/act/output": NEAR}
    other_calls = {**calls, "1/act@1/output": NEAR}
    archives = archive(tmp_path / "r.h5", calls), archive(tmp_path / "t.h5", other_calls)
    entries = [Entry(("act",), ("act",)), Entry(("act@0/output",), ("act@1/output",))]
    assert linked(archives, entries) == {
        "0/act/output": "0/act@1/output",
        "0/act@2/output": "0/act@2/output",
        "1/act/output": "1/act@1/output",
    }


@pytest.mark.spec("ALN-6")
def test_a_call_that_is_named_on_one_side_alone_is_a_usage_error(tmp_path: Path) -> None:
    archives = archive(tmp_path / "r.h5", TWO_TABLES), archive(tmp_path / "t.h5", TWO_CALLS)
    with pytest.raises(UsageError, match="none with the same step and call"):
        linked(archives, [Entry(("far",), ("far@1",))])
