"""Runs of several ranks compared: unlike copies, tensors apart, and the rank that an error lies with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorcap
from tensorcap.comparison import Comparison, Pair, compare
from tests.support.archives import write_archive

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(2, 4, 16, 64)).astype("f4")
RUN = {"dtype": "float32", "compute_dtype": "float32"}
Shards = Mapping[str, Sequence[Any]]


def write(
    folder: Path, shards: Shards, whole: Mapping[str, Any], *rules: tuple[str, str]
) -> tuple[Path, Path]:
    """Write a reference, and an archive for each rank; return their paths."""
    tensors = [{"rule": rule, "known": "test", "keys": [key]} for key, rule in rules]
    count = len(next(iter(shards.values())))
    for rank in range(count):
        run = {**RUN, "ranks": {"rank": rank, "count": count, "tensors": tensors}}
        write_archive(
            folder / f"t.rank{rank}.h5", {key: parts[rank] for key, parts in shards.items()}, run=run
        )
    return write_archive(folder / "ref.h5", whole, run=RUN), folder / "t.rank*.h5"


def pair_of(comparison: Comparison, key: str) -> Pair:
    return next(pair for pair in comparison.pairs if pair.key == key)


def texts(pair: Pair) -> list[str]:
    return [finding.text for finding in pair.findings]


@pytest.mark.spec("RNK-32")
@pytest.mark.parametrize("is_written", [False, True])
def test_the_rank_of_a_wrong_part_is_named(tmp_path: Path, is_written: bool) -> None:
    wrong = Y[..., 32:] * 1.5
    shards = {"0/a/input.x": [X, X], "0/a/output": [Y[..., :32] * (1 + 1e-7), wrong]}
    reference, target = write(
        tmp_path, shards, {"0/a/input.x": X, "0/a/output": Y}, ("0/a/output", "concat 2")
    )
    if is_written:
        target = tensorcap.merge([target], tmp_path / "all.h5").path
    comparison = compare(reference, target)
    pair = pair_of(comparison, "0/a/output")
    assert pair.status == "diverged"
    assert texts(pair)[-1] == "all of it in rank 1's part: indices 32 to 63 of axis 2"
    assert comparison.exit_status == 1
    (finding,) = [f for f in pair.findings if f.test == "rank_part"]
    assert finding.status == "unjudged"
    assert finding.value == pytest.approx(1.0)


@pytest.mark.spec("RNK-32")
@pytest.mark.parametrize(
    ("rank", "other", "text"),
    [
        (1, 0, "rank 1's part: indices 16 to 31 of axis 2, which is the reference's part of rank 0"),
        (0, 3, "rank 0's part: indices 0 to 15 of axis 2, which is the reference's part of rank 3"),
    ],
)
def test_the_part_of_another_rank_is_told(tmp_path: Path, rank: int, other: int, text: str) -> None:
    parts = np.split(Y, 4, -1)
    parts[rank] = parts[other] * np.float32(1 + 1e-6)
    reference, target = write(tmp_path, {"0/a/output": parts}, {"0/a/output": Y}, ("*", "concat 2"))
    assert texts(pair_of(compare(reference, target), "0/a/output"))[-1] == f"all of it in {text}"


@pytest.mark.spec("RNK-32")
def test_parts_of_parts_are_told_by_their_indices(tmp_path: Path) -> None:
    parts = [
        np.concatenate([Y[..., :16], Y[..., 32:48]], -1),
        np.concatenate([Y[..., 16:32], Y[..., 48:]], -1) + 1,
    ]
    reference, target = write(tmp_path, {"0/a/output": parts}, {"0/a/output": Y}, ("*", "concat -1 parts=2"))
    pair = pair_of(compare(reference, target), "0/a/output")
    assert texts(pair)[-1] == "all of it in rank 1's part: indices 16 to 31 and 48 to 63 of axis 2"


@pytest.mark.spec("RNK-32")
def test_no_rank_is_named_for_an_error_everywhere(tmp_path: Path) -> None:
    parts = [Y[..., :32] * 1.5, Y[..., 32:] * 1.5]
    reference, target = write(tmp_path, {"0/a/output": parts}, {"0/a/output": Y}, ("*", "concat 2"))
    pair = pair_of(compare(reference, target), "0/a/output")
    assert pair.status == "diverged"
    assert "rank" not in " ".join(texts(pair))


@pytest.mark.spec("RNK-32")
def test_the_rank_of_nan_is_named(tmp_path: Path) -> None:
    wrong = Y[..., 32:].copy()
    wrong[1, 2, 3] = np.nan
    shards = {"0/a/output": [Y[..., :32], wrong]}
    reference, target = write(tmp_path, shards, {"0/a/output": Y}, ("*", "concat 2"))
    pair = pair_of(compare(reference, target), "0/a/output")
    assert pair.status == "nonfinite"
    assert texts(pair)[-1].startswith("all of it in rank 1's part")


@pytest.mark.spec("RNK-32")
def test_the_rank_is_named_under_other_names_too(tmp_path: Path) -> None:
    shards = {"0/net.a/input.x": [X, X], "0/net.a/output": [Y[..., :32], Y[..., 32:] * 1.5]}
    whole = {"0/a/input.x": X, "0/a/output": Y}
    reference, target = write(
        tmp_path, shards, whole, ("net.a", "concat 2"), ("0/net.a/input.x", "replicated")
    )
    (tmp_path / "map.toml").write_text('[[pair]]\nreference = "a"\ntarget = "net.a"\n')
    comparison = compare(reference, target, mapping=tmp_path / "map.toml")
    assert texts(pair_of(comparison, "0/a/output"))[-1].startswith("all of it in rank 1's part")


@pytest.mark.spec("RNK-30")
def test_unlike_copies_are_red_though_the_first_is_right(tmp_path: Path) -> None:
    shards = {"0/a/output": [Y, Y + 1], "0/b/output": [X, X - 1], "0/c/output": [X, X]}
    whole = {"0/a/output": Y, "0/b/output": X, "0/c/output": X}
    reference, target = write(tmp_path, shards, whole, ("*", "replicated"))
    comparison = compare(reference, target)
    assert comparison.exit_status == 1
    assert comparison.divergence is not None
    assert comparison.divergence.pair.key == "0/a/output"
    findings = {pair.key: [(f.test, f.status) for f in pair.findings] for pair in comparison.pairs}
    assert findings["0/a/output"] == [("unequal_copies", "diverged")]
    assert findings["0/b/output"] == [("unequal_since", "diverged")]
    assert texts(pair_of(comparison, "0/b/output"))[0].endswith("; so since 0/a/output")
    assert pair_of(comparison, "0/c/output").status == "identical"
    suspects = tensorcap.localize(reference, target).suspects
    assert [(suspect.module, suspect.status) for suspect in suspects] == [("a", "diverged")]


@pytest.mark.spec("RNK-31")
def test_a_tensor_of_one_rank_alone_is_not_green(tmp_path: Path) -> None:
    shards = {"0/a/output": [Y, X], "0/b/output": [X, X]}
    reference, target = write(tmp_path, shards, {"0/a/output": Y, "0/b/output": X})
    pair = pair_of(compare(reference, target), "0/a/output")
    assert (pair.status, pair.findings[0].test) == ("suspect", "unmerged")
    assert "no later tensor is their sum" in pair.findings[0].text


@pytest.mark.spec("RNK-31")
def test_a_rule_that_gives_another_shape_is_told(tmp_path: Path) -> None:
    shards = {"0/a/output": [Y[..., :32], Y[..., 32:]]}
    reference, target = write(tmp_path, shards, {"0/a/output": Y}, ("*", "concat 0"))
    pair = pair_of(compare(reference, target), "0/a/output")
    assert pair.status == "shape-mismatch"
    assert (
        "concat 0 (test) gives [8, 16, 32], the reference has [4, 16, 64], as concat 2 would" in pair.reason
    )


@pytest.mark.spec("RNK-31")
def test_problems_of_tensors_that_the_reference_lacks_are_warnings(tmp_path: Path) -> None:
    shards = {"0/a/output": [X, X], "0/own/output": [Y, Y + 1]}
    reference, target = write(tmp_path, shards, {"0/a/output": X}, ("*", "replicated"))
    (warning,) = compare(reference, target).warnings
    assert warning.startswith(
        "Ranks of the target do not agree about 1 tensor, first 0/own/output: rank 1 holds another tensor"
    )
    (warning,) = compare(reference, tmp_path / "t.rank1.h5").warnings
    assert warning == "The target is of rank 1 of 2 alone: its tensors may be parts; see tcap merge."


def test_sums_need_not_repeat_what_the_model_added(tmp_path: Path) -> None:
    terms = RANDOM.normal(size=(4, 4, 16, 64)).astype("f4")
    total = ((terms[0] + terms[1]) + terms[2]) + terms[3]
    shards: Shards = {"0/o/output": list(terms), "0/attn/output": [total] * 4}
    whole = {"0/o/output": total, "0/attn/output": total}
    reference, target = write(tmp_path, shards, whole, ("0/o/output", "sum"))
    comparison = compare(reference, target)
    assert comparison.exit_status == 0
    assert pair_of(comparison, "0/attn/output").status == "identical"


@pytest.mark.parametrize(
    "sizes", [{"2": [10**15, 1]}, {"x": [1]}, {"9": [32, 32]}, {"2": ["a"]}, {"2": 3}, {"2": [-1, 65]}]
)
def test_damaged_sizes_name_no_rank(tmp_path: Path, sizes: Any) -> None:
    entry = {"rule": "concat 2", "known": "test", "keys": ["0/a/output"], "sizes": sizes}
    ranks = {"count": 2, "archives": ["a", "b"], "tensors": [entry, {"rule": "no rule", "keys": ["*"]}]}
    target = write_archive(tmp_path / "t.h5", {"0/a/output": Y * 2}, run={**RUN, "ranks": ranks})
    reference = write_archive(tmp_path / "ref.h5", {"0/a/output": Y}, run=RUN)
    assert pair_of(compare(reference, target), "0/a/output").status == "diverged"
