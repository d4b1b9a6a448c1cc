"""Archives of ranks put together, of numpy shards: every rule, recorded, given, by shape and by values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap_formats.archive import Archive
from tensorcap_formats.check import check_archive
from tensorcap_formats.dtypes import DTYPES
from tensorcap_formats.errors import NotAnArchiveError, UsageError
from tensorcap_formats.keys import Key
from tensorcap_formats.merge import merge
from tensorcap_formats.open import open_archive, open_ranks
from tensorcap_formats.ranks import MeshRule, Rule, rank_path
from tests.support.archives import write_archive

Shards = Mapping[str, Sequence[Any]]

X = np.arange(24, dtype="f4").reshape(2, 3, 4)
Y = np.random.default_rng(1).normal(size=(2, 3, 8)).astype("f4")


def write_ranks(
    folder: Path, shards: Shards, *, tensors: Sequence[Mapping[str, Any]] = (), **run: Any
) -> list[Path]:
    """Write an archive for each rank; a None is left out."""
    count = max(len(parts) for parts in shards.values())
    return [
        write_archive(
            folder / f"t.rank{rank}.h5",
            {key: parts[rank] for key, parts in shards.items() if parts[rank] is not None},
            run={"ranks": {"rank": rank, "count": count, "tensors": list(tensors)}, **run},
        )
        for rank in range(count)
    ]


def merged(folder: Path, shards: Shards, whole: Mapping[str, Any] | None = None, **options: Any) -> Archive:
    """Write ranks, and open them as one; `whole` are the reference's tensors."""
    rules = options.pop("rules", None)
    paths = write_ranks(folder, shards, **options)
    reference = None if whole is None else open_archive(write_archive(folder / "ref.h5", whole))
    return open_ranks(paths, folder / "t.rank*.h5", rules=rules, reference=reference)


def rule_of(archive: Archive, key: str) -> str:
    """The rule of a tensor, and how it is known."""
    assert archive.info.ranks is not None
    return next(f"{e.rule} ({e.known})" for e in archive.info.ranks.tensors if key in e.keys)


def problems(archive: Archive) -> list[tuple[str, str, str]]:
    """Key, kind and text of each problem."""
    assert archive.info.ranks is not None
    return [(p.key, p.kind, p.text) for p in archive.info.ranks.problems]


def recorded(rule: str, *keys: str, **further: Any) -> list[dict[str, Any]]:
    return [{"rule": rule, "known": "test", "keys": list(keys), **further}]


# Rules, applied to literal arrays -------------------------------------------------------------------

A, B, C, D = ([n, n + 1] for n in (10, 20, 30, 40))


@pytest.mark.spec("RNK-10", "RNK-11")
@pytest.mark.parametrize(
    ("text", "parts", "whole"),
    [
        pytest.param("replicated", [A, A], A, id="replicated"),
        pytest.param("concat 0", [A, B], [10, 11, 20, 21], id="concat"),
        pytest.param("concat -1", [[A], [B]], [[10, 11, 20, 21]], id="last axis"),
        pytest.param("concat 0", [A, [20], []], [10, 11, 20], id="unlike sizes, one empty"),
        pytest.param("concat 0 parts=2", [A, B], [10, 20, 11, 21], id="two parts each"),
        pytest.param("concat 0 parts=2,1", [[1, 2, 3], [4, 5, 6]], [1, 2, 4, 5, 3, 6], id="parts of sizes"),
        pytest.param("concat 0 copies=2", [A, A, B, B], [10, 11, 20, 21], id="copies in succession"),
        pytest.param("concat 0 rounds=2", [A, B, A, B], [10, 11, 20, 21], id="copies in rounds"),
        pytest.param("concat 0 cut=3", [A, B], [10, 11, 20], id="padding cut"),
        pytest.param("concat 0 parts=2 copies=2 cut=3", [A, A, B, B], [10, 20, 11], id="all together"),
        pytest.param(
            "concat 0 parts=1,1 copies=1,2",
            [[1, 7], [2, 7], [3, 8], [4, 8]],
            [1, 2, 3, 4, 7, 8],
            id="copies of one part alone",
        ),
        pytest.param("sum", [A, B, C], [60, 63], id="sum"),
        pytest.param("avg", [A, C], [20, 21], id="avg"),
        pytest.param("max", [A, [5, 50]], [10, 50], id="max"),
        pytest.param("min", [A, [5, 50]], [5, 11], id="min"),
        pytest.param("alone", [A], A, id="alone"),
    ],
)
def test_rules_put_tensors_together(text: str, parts: list[Any], whole: Any) -> None:
    rule = MeshRule.parse(text)
    arrays = [np.array(part, "f4") for part in parts]
    assert rule.merge(arrays, DTYPES["float32"]).tolist() == whole
    assert rule.merged_shape([array.shape for array in arrays]) == np.shape(whole)
    assert rule.text == text
    assert [a.tolist() for a in arrays] == parts


@pytest.mark.spec("RNK-13")
@pytest.mark.parametrize(
    ("text", "whole", "copies", "owners"),
    [
        pytest.param(
            "a: concat 0; b: concat 0",
            [*A, *B, *C, *D],
            [[0], [1], [2], [3]],
            [0, 0, 1, 1, 2, 2, 3, 3],
            id="one axis",
        ),
        pytest.param(
            "a: replicated; b: concat 0", [*A, *B], [[0, 2], [1, 3]], [0, 0, 1, 1], id="copies of parts"
        ),
        pytest.param(
            "a: concat 0; b: replicated", [*A, *C], [[0, 1], [2, 3]], [0, 0, 2, 2], id="parts of copies"
        ),
        pytest.param("a: sum; b: concat 0", [40, 42, 60, 62], [[0], [1], [2], [3]], [0, 0, 1, 1], id="terms"),
    ],
)
def test_a_mesh_has_a_rule_for_each_axis(
    text: str, whole: list[int], copies: list[list[int]], owners: list[int]
) -> None:
    rule = MeshRule.parse(text, {"sizes": {"a": 2, "b": 2}, "ranks": [0, 1, 2, 3]})
    arrays = [np.array(part, "f4") for part in (A, B, C, D)]
    assert rule.merge(arrays, DTYPES["float32"]).tolist() == whole
    assert rule.copies(4) == copies
    assert rule.owners(0, 1, [2, 2, 2, 2]).tolist() == owners
    assert MeshRule.parse(rule.text, rule.mesh) == rule


def test_owners_follow_parts_copies_and_cuts() -> None:
    rule = MeshRule.parse("concat 1 parts=2 copies=2 cut=7")
    assert rule.owners(1, 2, [4, 4, 4, 4]).tolist() == [0, 0, 2, 2, 0, 0, 2]


@pytest.mark.spec("RNK-12")
def test_sums_are_rounded_once() -> None:
    ones = np.array([1.0, 256.0], "f4").view("<u4") >> 16
    eighth = np.array([2**-8, 1.0], "f4").view("<u4") >> 16
    terms = [ones.astype("<u2"), eighth.astype("<u2"), eighth.astype("<u2")]
    total = MeshRule.parse("sum").merge(terms, DTYPES["bfloat16"])
    # One by one, 1 + 2^-8 is a tie that goes to 1 in bfloat16, and 256 + 1 to 256: twice, nothing is added
    assert (total.astype("<u4") << 16).view("f4").tolist() == [1.0078125, 258.0]
    large = [np.array([2**53], "<i8"), np.array([1], "<i8")]
    assert MeshRule.parse("sum").merge(large, DTYPES["int64"]).tolist() == [2**53 + 1]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "concat",
        "concat x",
        "concat 0 parts=0",
        "concat 0 of=2",
        "concat 0 copies",
        "sum 1",
        "join 0",
        "a: sum;",
    ],
)
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is none, expected one of"):
        MeshRule.parse(text)


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        ("concat 2", [(2, 3), (2, 3)], "of a tensor of 2 axes"),
        ("concat 1", [(2, 3), (4, 3)], r"shapes \[2, 3\] and \[4, 3\] differ beside axis 1"),
        ("sum", [(2, 3), (2, 4)], r"shapes \[2, 3\] and \[2, 4\] differ"),
        ("concat 0 copies=2", [(2,), (2,), (2,)], "of 3 ranks, which 2 does not divide"),
        ("concat 0 parts=2", [(3,), (3,)], "of an axis of 3, which 2 does not divide"),
        ("concat 0 parts=2,2", [(3,), (3,)], "of an axis of 3, expected 4"),
        ("concat 0 cut=9", [(4,), (4,)], "of 8, which is less"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(text: str, shapes: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        MeshRule.parse(text).merged_shape(shapes)


# Archives: recorded rules ---------------------------------------------------------------------------


@pytest.mark.spec("RNK-3", "RNK-4")
def test_recorded_rules_are_followed_and_kept(tmp_path: Path) -> None:
    tensors = [
        {"rule": "concat -1", "known": "ColumnParallelLinear", "keys": ["*.up"], "shape": [2, 3, 8]},
        {"rule": "sum", "known": "RowParallelLinear", "keys": ["0/a.up/output", "0/*.down/output"]},
    ]
    shards = {"0/a.up/output": [X, X + 1], "0/b.up/output": [X, X + 1], "0/a.down/output": [X, X]}
    archive = merged(tmp_path, shards, tensors=tensors)
    assert np.array_equal(archive.load(archive.get("0/b.up/output")), np.concatenate([X, X + 1], -1))
    assert np.array_equal(archive.load(archive.get("0/a.up/output")), X + X + 1)  # the exact key
    assert np.array_equal(archive.load(archive.get("0/a.down/output")), X + X)  # though copies: recorded
    assert rule_of(archive, "0/b.up/output") == "concat -1 (ColumnParallelLinear)"
    assert archive.run["ranks"]["archives"] == ["t.rank0.h5", "t.rank1.h5"]
    entry = next(e for e in archive.run["ranks"]["tensors"] if e["rule"] == "concat -1")
    assert entry == {
        "rule": "concat -1",
        "known": "ColumnParallelLinear",
        "sizes": {"2": [4, 4]},
        "keys": ["0/b.up/output"],
    }
    assert problems(archive) == []


def test_globs_are_those_of_keys(tmp_path: Path) -> None:
    archive = merged(tmp_path, {"0/a/output": [X, X + 1]}, tensors=recorded("concat 0", "a"))
    assert archive.records[0].shape == (4, 3, 4)


@pytest.mark.spec("RNK-13")
def test_groups_of_a_larger_run_hold_copies(tmp_path: Path) -> None:
    parts = [X, X + 1, X, X + 1]
    for rank, part in enumerate(parts):
        group = [0, 1] if rank < 2 else [2, 3]
        entries = recorded("concat 1", "0/a/output", mesh={"sizes": {"tp": 2}, "ranks": group})
        run = {"ranks": {"rank": rank, "count": 4, "tensors": entries}}
        write_archive(tmp_path / f"t.rank{rank}.h5", {"0/a/output": part}, run=run)
    with open_archive(tmp_path / "t.rank*.h5") as archive:
        assert np.array_equal(archive.load(archive.records[0]), np.concatenate([X, X + 1], 1))
        assert rule_of(archive, "0/a/output") == "group: replicated; tp: concat 1 (test)"
    write_archive(
        tmp_path / "t.rank3.h5",
        {"0/a/output": X + 2},
        run={"ranks": {"rank": 3, "count": 4, "tensors": entries}},
    )
    with open_archive(tmp_path / "t.rank*.h5") as archive:
        assert [key for key, kind, _ in problems(archive) if kind == "unmerged"] == ["0/a/output"]
        assert "groups of ranks hold unlike tensors" in problems(archive)[0][2]


@pytest.mark.spec("RNK-25")
def test_a_shape_that_was_recorded_is_held_against_the_whole(tmp_path: Path) -> None:
    archive = merged(tmp_path, {"0/a/output": [X, X]}, tensors=recorded("concat 2", "*", shape=[2, 3, 9]))
    assert problems(archive) == [
        ("0/a/output", "shape", "concat 2 (test) gives [2, 3, 8], and [2, 3, 9] was recorded")
    ]


def test_ranks_that_record_unlike_rules_are_not_merged(tmp_path: Path) -> None:
    for rank, rule in enumerate(("concat 0", "concat 1")):
        run = {"ranks": {"rank": rank, "count": 2, "tensors": recorded(rule, "*")}}
        write_archive(tmp_path / f"t.rank{rank}.h5", {"0/a/output": X + rank}, run=run)
    with open_archive(tmp_path / "t.rank*.h5") as archive:
        assert [r.key.text for r in archive.records] == ["0/a/output", "rank1/0/a/output"]
        assert problems(archive)[0][2] == "rank 0 recorded 'concat 0', and rank 1 'concat 1'"


@pytest.mark.spec("RNK-25", "RNK-26")
def test_a_rule_that_does_not_fit_leaves_the_tensor_with_each_rank(tmp_path: Path) -> None:
    archive = merged(tmp_path, {"0/a/output": [X, X[:1]]}, tensors=recorded("concat 2", "*"))
    assert [(r.key.text, r.shape) for r in archive.records] == [
        ("0/a/output", (2, 3, 4)),
        ("rank1/0/a/output", (1, 3, 4)),
    ]
    (key, kind, text), *more = problems(archive)
    assert (key, kind, more) == ("0/a/output", "shape", [])
    assert text == "concat 2: shapes [2, 3, 4] and [1, 3, 4] differ beside axis 2 (test)"


# Copies ---------------------------------------------------------------------------------------------


@pytest.mark.spec("RNK-21")
def test_equal_tensors_are_one(tmp_path: Path) -> None:
    archive = merged(tmp_path, {"0/a/output": [X, X, X]})
    assert [(r.key.text, r.shape) for r in archive.records] == [("0/a/output", (2, 3, 4))]
    assert rule_of(archive, "0/a/output") == "replicated (by values: every rank holds the same)"
    assert archive.records[0].digest
    assert archive.records[0].statistics is not None


@pytest.mark.spec("RNK-24", "RNK-5")
def test_copies_that_differ_are_named_with_their_rank(tmp_path: Path) -> None:
    other = X.copy()
    other[0, 1, 2] += 0.5
    archive = merged(tmp_path, {"0/a/output": [X, X, other, X]}, tensors=recorded("replicated", "*"))
    assert np.array_equal(archive.load(archive.records[0]), X)
    assert problems(archive) == [
        (
            "0/a/output",
            "unequal",
            "rank 2 holds another tensor than rank 0, where replicated (test) says the same; "
            "1 of 24 elements differ, by 0.5 at most",
        )
    ]
    assert archive.info.ranks is not None
    assert archive.info.ranks.problems[0].ranks == (2,)


def test_of_two_unlike_copies_either_may_be_wrong(tmp_path: Path) -> None:
    archive = merged(tmp_path, {"0/a/output": [X, X + 1]}, tensors=recorded("replicated", "*"))
    assert archive.info.ranks is not None
    assert archive.info.ranks.problems[0].ranks == (0, 1)


def test_bits_are_compared_and_not_values(tmp_path: Path) -> None:
    zeros = [np.zeros(8, "f4"), -np.zeros(8, "f4")]
    archive = merged(tmp_path, {"0/a/output": zeros}, tensors=recorded("replicated", "*"))
    assert [kind for _, kind, _ in problems(archive)] == ["unequal"]


@pytest.mark.spec("RNK-24")
def test_nearly_equal_copies_are_never_a_sum(tmp_path: Path) -> None:
    noisy = Y * np.float32(1.0001)
    archive = merged(tmp_path, {"0/a/output": [Y, noisy]}, {"0/a/output": Y})
    assert np.array_equal(archive.load(archive.records[0]), Y)
    assert rule_of(archive, "0/a/output") == "replicated (by the reference's shape)"
    assert [kind for _, kind, _ in problems(archive)] == ["unequal"]


def test_what_ranks_hold_unlike_throughout_may_be_terms(tmp_path: Path) -> None:
    other = np.random.default_rng(5).normal(size=Y.shape).astype("f4")
    archive = merged(tmp_path, {"0/a/output": [Y, other]}, tensors=recorded("replicated", "*"))
    assert problems(archive)[0][2].endswith("at most, as terms of a sum would that was not taken")


@pytest.mark.parametrize(
    ("rule", "parts", "ranks"),
    [
        pytest.param(
            "concat 0 copies=2", [A, A, B, C], "rank 3 holds another tensor than rank 2", id="second"
        ),
        pytest.param(
            "concat 0 copies=2", [A, B, A, B], "rank 1 holds another tensor than rank 0", id="order"
        ),
        pytest.param(
            "concat 0 rounds=2", [A, A, B, B], "rank 2 holds another tensor than rank 0", id="rounds"
        ),
    ],
)
def test_copies_of_parts_are_compared(tmp_path: Path, rule: str, parts: list[Any], ranks: str) -> None:
    shards = {"0/k/output": [np.array(part, "f4") for part in parts]}
    archive = merged(tmp_path, shards, tensors=recorded(rule, "*"))
    assert problems(archive)[0][2].startswith(ranks)


# By the reference's shape ---------------------------------------------------------------------------


@pytest.mark.spec("RNK-22")
@pytest.mark.parametrize(
    ("parts", "shape", "rule"),
    [
        pytest.param([X, X + 1], (2, 6, 4), "concat 1", id="parts"),
        pytest.param([X, X[:, :1]], (2, 4, 4), "concat 1", id="uneven parts"),
        pytest.param([X, X], (2, 3, 8), "concat 2", id="equal parts: the wrong rank's"),
        pytest.param([X, X, X + 1, X + 1], (2, 3, 8), "concat 2 copies=2", id="copies in succession"),
        pytest.param([X, X + 1, X, X + 1], (2, 3, 8), "concat 2 rounds=2", id="copies in rounds"),
        pytest.param([X, X], (2, 3, 4), "replicated", id="replicated"),
        pytest.param([X, X + 1], (2, 3, 7), "concat 2 cut=7", id="padding"),
    ],
)
def test_the_shape_of_a_reference_shows_the_rule(
    tmp_path: Path, parts: list[Any], shape: tuple[int, ...], rule: str
) -> None:
    whole = {"0/a/output": np.zeros(shape, "f4")}  # whose values say nothing
    archive = merged(tmp_path, {"0/a/output": parts}, whole)
    assert archive.records[0].shape == shape
    assert rule_of(archive, "0/a/output").partition(" (")[0] == rule
    assert problems(archive) == []


@pytest.mark.spec("RNK-22", "RNK-24")
def test_unlike_copies_of_too_few_heads_are_a_problem(tmp_path: Path) -> None:
    parts = [X, X + 1, X + 2, X + 3]
    archive = merged(tmp_path, {"0/k/output": parts}, {"0/k/output": np.zeros((2, 3, 8), "f4")})
    assert rule_of(archive, "0/k/output").startswith("concat 2 copies=2")
    assert [kind for _, kind, _ in problems(archive)] == ["unequal", "unequal"]


@pytest.mark.spec("RNK-25")
def test_a_recorded_rule_is_held_against_the_reference(tmp_path: Path) -> None:
    shards = {"0/a/output": [X, X + 1]}
    archive = merged(tmp_path, shards, {"0/a/output": np.zeros((2, 3, 8))}, tensors=recorded("concat 0", "*"))
    assert archive.records[0].shape == (4, 3, 4)
    assert problems(archive) == [
        (
            "0/a/output",
            "shape",
            "concat 0 (test) gives [4, 3, 4], the reference has [2, 3, 8], as concat 2 would give",
        )
    ]


def test_a_reference_of_other_tokens_is_no_problem(tmp_path: Path) -> None:
    archive = merged(tmp_path, {"0/a/output": [X, X]}, {"0/a/output": np.zeros((2, 2, 4))})
    assert problems(archive) == []


# By values ------------------------------------------------------------------------------------------


@pytest.mark.spec("RNK-23")
def test_terms_that_add_up_to_a_later_tensor_are_a_sum(tmp_path: Path) -> None:
    terms = np.random.default_rng(2).normal(size=(4, 2, 3, 8)).astype("f4")
    total = ((terms[0] + terms[1]) + terms[2]) + terms[3]  # one by one, as an all-reduce
    shards: Shards = {"0/o/output": list(terms), "0/attn/output": [total] * 4}
    archive = merged(tmp_path, shards)
    assert rule_of(archive, "0/o/output") == "sum (by values: adds up to 0/attn/output)"
    exact = terms.astype("f8").sum(axis=0)
    assert np.abs(archive.load(archive.get("0/o/output")) - exact).max() <= 2**-24 * np.abs(exact).max()


@pytest.mark.spec("RNK-24")
def test_terms_that_add_up_to_nothing_are_no_sum(tmp_path: Path) -> None:
    terms = np.random.default_rng(2).normal(size=(2, 2, 3, 8)).astype("f4")
    shards: Shards = {"0/o/output": list(terms), "0/attn/output": [terms.sum(0) * np.float32(1.001)] * 2}
    archive = merged(tmp_path, shards, {"0/o/output": np.zeros((2, 3, 8))})
    assert [r.key.text for r in archive.records] == ["0/o/output", "rank1/0/o/output", "0/attn/output"]
    assert problems(archive) == [
        (
            "0/o/output",
            "unmerged",
            "ranks hold unlike tensors of the reference's shape, and no later tensor is their sum: an "
            "all-reduce is missing, or they are terms of a sum that is not recorded",
        )
    ]


@pytest.mark.spec("RNK-23")
def test_parts_that_joined_are_another_tensor(tmp_path: Path) -> None:
    shards: Shards = {"0/q/output": [Y[..., :4], Y[..., 4:]], "0/gather/output": [Y, Y]}
    archive = merged(tmp_path, shards)
    assert rule_of(archive, "0/q/output") == "concat 2 (by values: joined, it is 0/gather/output)"
    scattered = {"0/a/input.x": [Y, Y], "0/a/output": [Y[:, :1], Y[:, 1:]]}
    (tmp_path / "b").mkdir()
    archive = merged(tmp_path / "b", scattered)
    assert np.array_equal(archive.load(archive.get("0/a/output")), Y)


@pytest.mark.spec("RNK-23")
def test_the_same_tensor_and_what_is_computed_of_it_have_its_rule(tmp_path: Path) -> None:
    parts = [Y[..., :4], Y[..., 4:]]
    shards = {"0/up/output": parts, "0/act/input.x": parts, "0/act/output": [np.tanh(p) for p in parts]}
    archive = merged(tmp_path, shards, tensors=recorded("concat -1", "0/up/output"))
    assert rule_of(archive, "0/act/input.x") == "concat -1 (the same tensor as 0/up/output)"
    assert rule_of(archive, "0/act/output") == "concat -1 (as its argument 0/act/input.x)"
    assert np.array_equal(archive.load(archive.get("0/act/output")), np.tanh(Y))


@pytest.mark.spec("RNK-23")
def test_halves_of_a_fused_projection_are_seen_by_what_they_make(tmp_path: Path) -> None:
    gate, up = np.random.default_rng(3).normal(size=(2, 2, 3, 8)).astype("f4")
    fused = [np.concatenate([gate[..., s], up[..., s]], -1) for s in (slice(0, 4), slice(4, 8))]
    product = gate / (1 + np.exp(-gate)) * up
    parts = [product[..., :4], product[..., 4:]]
    shards = {"0/gate_up/output": fused, "0/down/input.x": parts}
    whole = {"0/gate_up/output": np.zeros((2, 3, 16)), "0/down/input.x": np.zeros((2, 3, 8))}
    archive = merged(tmp_path, shards, whole)
    assert np.array_equal(archive.load(archive.get("0/gate_up/output")), np.concatenate([gate, up], -1))
    assert rule_of(archive, "0/down/input.x").startswith("concat 2 (")
    shards["0/down/input.x"] = [p + 1 for p in parts]
    (tmp_path / "b").mkdir()
    archive = merged(tmp_path / "b", shards, whole)  # nothing proves halves
    assert rule_of(archive, "0/gate_up/output").startswith("concat 2 (")


@pytest.mark.spec("RNK-26")
def test_what_nothing_proves_stays_with_its_rank(tmp_path: Path) -> None:
    archive = merged(tmp_path, {"0/a/output": [X, X + 1], "0/b/output": [X, X]})
    assert [r.key.text for r in archive.records] == ["0/a/output", "rank1/0/a/output", "0/b/output"]
    assert np.array_equal(archive.load(archive.get("rank1/0/a/output")), X + 1)
    assert [(key, kind) for key, kind, _ in problems(archive)] == [("0/a/output", "unmerged")]


@pytest.mark.spec("RNK-21")
def test_a_given_rule_goes_before_all_others(tmp_path: Path) -> None:
    archive = merged(
        tmp_path,
        {"0/a/output": [X, X + 1]},
        {"0/a/output": np.zeros((2, 3, 8))},
        tensors=recorded("concat 1", "*"),
        rules={"a": "concat -1"},
    )
    assert archive.records[0].shape == (2, 3, 8)
    assert rule_of(archive, "0/a/output") == "concat -1 (given)"


def test_a_given_rule_that_fits_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="rule 'zz': fits no tensor"):
        merged(tmp_path, {"0/a/output": [X, X]}, rules={"zz": "sum"})


# Sites and order ------------------------------------------------------------------------------------


@pytest.mark.spec("RNK-21", "RNK-27")
def test_stages_of_a_pipeline_follow_each_other(tmp_path: Path) -> None:
    shards: Shards = {
        "0/@root/input.x": [X, X],
        "0/layers.0/output": [X, None],
        "0/layers.1/output": [None, X + 1],
        "0/@root/output": [X + 2, X + 2],
    }
    archive = merged(tmp_path, shards)
    assert [r.key.text for r in archive.records] == list(shards)
    assert [r.order for r in archive.records] == [0, 1, 2, 3]
    assert rule_of(archive, "0/layers.1/output") == "alone (rank 1 alone has the module)"
    assert np.array_equal(archive.load(archive.get("0/layers.1/output")), X + 1)


@pytest.mark.spec("RNK-26")
def test_a_tensor_that_one_rank_lacks_is_a_problem(tmp_path: Path) -> None:
    archive = merged(tmp_path, {"0/a/input.x": [X, X], "0/a/output": [X, None]})
    assert problems(archive) == [
        ("0/a/output", "unmerged", "missing on rank 1, and no rule says that it may be")
    ]


@pytest.mark.spec("RNK-27")
def test_parameters_that_ranks_describe_unlike_are_left_out(tmp_path: Path) -> None:
    for rank, rows in enumerate((2, 3)):
        weights = {"w": {"shape": [rows, 4], "dtype": "float32"}, "b": {"shape": [4], "dtype": "float32"}}
        modules = [{"path": "a", "class": "Linear", "parameters": weights}]
        run = {"ranks": {"rank": rank, "count": 2}, "modules": modules, "dtype": "float32"}
        write_archive(tmp_path / f"t.rank{rank}.h5", {"0/a/output": X}, run=run)
    with open_archive(tmp_path / "t.rank*.h5") as archive:
        assert list(archive.info.modules["a"].parameters) == ["b"]
        assert archive.info.dtype == "float32"


# Containers, bits, statistics -----------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".h5", ".zarr", ".safetensors"])
def test_merged_archives_are_written_in_every_container(tmp_path: Path, suffix: str) -> None:
    if suffix == ".zarr":
        pytest.importorskip("zarr")
    paths = write_ranks(
        tmp_path, {"0/a/output": [X, X + 1], "0/b/output": [Y, Y]}, tensors=recorded("concat 1", "a")
    )
    result = merge(reversed(paths), tmp_path / f"all{suffix}")
    assert (result.ranks, result.records, result.exit_status) == (2, 2, 0)
    assert result.rules == {
        ("concat 1", "test"): 1,
        ("replicated", "by values: every rank holds the same"): 1,
    }
    with open_archive(result.path) as archive:
        assert check_archive(archive).problems == []
        assert np.array_equal(archive.load(archive.get("a")), np.concatenate([X, X + 1], 1))
        assert archive.get("a").statistics is not None
        assert archive.info.ranks is not None
        assert archive.info.ranks.is_merged


def test_bits_of_every_dtype_are_joined_as_they_are(tmp_path: Path) -> None:
    bits = np.arange(256, dtype="u1")
    nans = np.array([0x7FC1, 0xFFFF, 0x8000, 1], "<u2")
    keys = {"0/a/output": (bits, "float8_e4m3fn"), "0/b/output": (nans, "bfloat16")}
    for rank in range(2):
        tensors = {
            key: (values[::-1].copy() if rank else values, DTYPES[name])
            for key, (values, name) in keys.items()
        }
        write_archive(tmp_path / f"t.rank{rank}.h5", tensors)
    rules = {"*": "concat 0"}
    with open_ranks(sorted(tmp_path.glob("*.h5")), tmp_path / "t", rules=rules) as archive:
        for key, (values, _) in keys.items():
            joined = archive.read(archive.get(key))
            assert joined.tobytes() == values.tobytes() + values[::-1].tobytes()
    with open_ranks(sorted(tmp_path.glob("*.h5")), tmp_path / "t", rules={"*": "sum"}) as archive:
        assert problems(archive)[0][2] == "sum: tensors of float8_e4m3fn are not added (given)"


def test_archives_of_statistics_alone_keep_what_is_equal(tmp_path: Path) -> None:
    for rank in range(2):
        run = {"ranks": {"rank": rank, "count": 2, "tensors": recorded("concat 0", "a")}}
        tensors = {"0/a/output": X + rank, "0/b/output": X}
        write_archive(tmp_path / f"t.rank{rank}.h5", tensors, run=run, stats_only=True)
    with open_archive(tmp_path / "t.rank*.h5") as archive:
        assert problems(archive) == [
            ("0/a/output", "shape", "concat 0: only its statistics were kept (test)")
        ]
        assert rule_of(archive, "0/b/output").startswith("replicated")


def test_files_from_elsewhere_are_merged_by_their_names(tmp_path: Path) -> None:
    for rank in range(2):
        np.savez(tmp_path / f"w_rank_{rank}.npz", w=X + rank, b=X)
    rules = {"w": "concat -1"}
    result = merge([tmp_path / "w_rank_1.npz", tmp_path / "w_rank_0.npz"], tmp_path / "all.h5", rules=rules)
    with open_archive(result.path) as archive:
        assert np.array_equal(archive.load(archive.get("w")), np.concatenate([X, X + 1], -1))
        assert archive.get("b").shape == X.shape


# Which archives -------------------------------------------------------------------------------------


@pytest.mark.spec("RNK-20")
def test_a_pattern_opens_all_ranks(tmp_path: Path) -> None:
    write_ranks(tmp_path, {"0/a/output": [X, X]})
    with open_archive(tmp_path / "t.rank*.h5") as archive:
        assert len(archive) == 1
        assert archive.path == tmp_path / "t.rank*.h5"
    with pytest.raises(NotAnArchiveError, match="no file fits the pattern"):
        open_archive(tmp_path / "u.rank*.h5")
    with pytest.raises(NotAnArchiveError) as error:
        open_archive(tmp_path / "t.h5")
    assert error.value.hint is not None
    assert "archives of 2 ranks" in error.value.hint


@pytest.mark.spec("RNK-20")
@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        pytest.param([(0, 3), (2, 3)], "rank 1 of 3 missing: there are archives of 0, 2", id="missing"),
        pytest.param([(0, 4)], "ranks 1, 2, 3 of 4 missing: there are archives of 0", id="several"),
        pytest.param([(0, 2), (0, 2)], "is of rank 0, as .*n0.h5 is; expected one of each", id="doubled"),
        pytest.param([(0, 2), (1, 3)], "is of a run of 3 ranks, .* is of 2; expected one run", id="counts"),
        pytest.param([(None, 2)], "does not say which rank it is of, expected rankN", id="unknown"),
    ],
)
def test_archives_that_are_not_all_ranks_of_one_run_are_refused(
    tmp_path: Path, ranks: list[tuple[int | None, int]], message: str
) -> None:
    paths = []
    for i, (rank, count) in enumerate(ranks):
        run = {"ranks": {"count": count, **({} if rank is None else {"rank": rank})}}
        paths.append(write_archive(tmp_path / f"n{i}.h5", {"0/a/output": X}, run=run))
    with pytest.raises(UsageError, match=message):
        open_ranks(paths, tmp_path / "n*.h5")


@pytest.mark.spec("RNK-20")
@pytest.mark.parametrize(
    ("tensors", "run", "message"),
    [
        ({"0/a/output": X, "1/a/output": X}, {}, "rank 1 has steps 0 to 1, rank 0 0; expected the same"),
        ({"0/a/output": X}, {"model": {"class": "Other"}}, "rank 1 is of a model Other, rank 0 unknown"),
        ({"rank1/0/a/output": X}, {}, "names a rank in an archive of one rank"),
    ],
)
def test_ranks_of_unlike_runs_are_refused(
    tmp_path: Path, tensors: dict[str, Any], run: dict[str, Any], message: str
) -> None:
    write_archive(tmp_path / "t.rank0.h5", {"0/a/output": X})
    write_archive(tmp_path / "t.rank1.h5", tensors, run=run)
    with pytest.raises(UsageError, match=message):
        open_archive(tmp_path / "t.rank*.h5")


def test_a_merged_archive_is_not_merged_again(tmp_path: Path) -> None:
    paths = write_ranks(tmp_path, {"0/a/output": [X, X]})
    result = merge(paths, tmp_path / "all.rank0.h5")
    with pytest.raises(UsageError, match="holds all ranks already"):
        merge([result.path, paths[1]], tmp_path / "twice.h5")
    with pytest.raises(UsageError, match="is the source or overlaps"):
        merge(paths, paths[0])


@pytest.mark.spec("RNK-1")
@pytest.mark.parametrize(
    ("path", "rank", "expected"),
    [
        ("out/tgt.h5", 0, "out/tgt.rank0.h5"),
        ("tgt.rank1.h5", 1, "tgt.rank1.h5"),
        ("tgt.rank1.h5", 11, "tgt.rank1.rank11.h5"),
        ("frank1.h5", 1, "frank1.rank1.h5"),
        ("a.zarr", 12, "a.rank12.zarr"),
    ],
)
def test_each_rank_has_a_path(path: str, rank: int, expected: str) -> None:
    assert str(rank_path(Path(path), rank)) == expected


def test_paths_of_ranks_are_distinct() -> None:
    for name in ("tgt.h5", "tgt.rank1.h5", "rank0.h5", "a.rank1.rank2.h5"):
        assert len({rank_path(Path(name), rank) for rank in range(130)}) == 130


def test_ranks_of_unlike_algorithms_are_compared_by_their_bytes(tmp_path: Path) -> None:
    paths = write_ranks(
        tmp_path, {"0/a/output": [X, X], "0/b/output": [X, X + 1]}, tensors=recorded("concat 0", "b")
    )
    archives = [open_archive(path) for path in paths]
    archives[1].algorithm = "blake2b_128"
    from tensorcap_formats.ranks import merge_ranks

    with merge_ranks(archives, tmp_path / "t") as archive:
        assert rule_of(archive, "0/a/output").startswith("replicated")
        assert archive.algorithm is None
        assert archive.get("a").digest == ""
        assert archive.get("b").shape == (4, 3, 4)


def test_keys_keep_their_rank_if_they_are_bare(tmp_path: Path) -> None:
    for rank in range(2):
        np.savez(tmp_path / f"w.rank{rank}.npz", w=X + rank)
    with open_archive(tmp_path / "w.rank*.npz") as archive:
        assert [r.key for r in archive.records] == [Key("rank0/w"), Key("rank1/w")]


def test_rules_have_one_text() -> None:
    assert Rule.parse("concat  -1   cut=5 parts=2").text == "concat -1 parts=2 cut=5"


@pytest.mark.spec("RNK-11")
@pytest.mark.parametrize(
    ("text", "whole", "parts"),
    [
        pytest.param("concat 0", [1, 2, 3, 4], [[1], [2], [3], [4]], id="parts"),
        pytest.param(
            "concat -1 parts=2",
            [[1, 2, 3, 4, 5, 6, 7, 8]],
            [[[1, 5]], [[2, 6]], [[3, 7]], [[4, 8]]],
            id="two",
        ),
        pytest.param("concat 0 copies=2", [1, 2], [[1], [1], [2], [2]], id="copies"),
        pytest.param("concat 0 rounds=2", [1, 2], [[1], [2], [1], [2]], id="rounds"),
        pytest.param(
            "concat 0 parts=2,1 copies=1,2",
            [1, 2, 3, 4, 5, 6, 7, 8, 91, 92],
            [[1, 2, 91], [3, 4, 91], [5, 6, 92], [7, 8, 92]],
            id="copies of one part alone",
        ),
    ],
)
def test_a_whole_tensor_is_split_into_what_ranks_hold(text: str, whole: Any, parts: list[Any]) -> None:
    held = Rule.parse(text).split(np.array(whole, "f4"), 4)
    assert [part.tolist() for part in held] == parts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sum", "nothing says what each rank holds of a tensor of"),
        ("concat 0 cut=3", "nothing says what each rank holds of a tensor of"),
        ("concat 0", "concat 0 of an axis of 6, which 4 does not divide"),
        ("concat 0 parts=2,1 copies=1,2", "of 4 ranks gives 10, and the axis has 6"),
    ],
)
def test_what_does_not_say_who_holds_what_is_not_split(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Rule.parse(text).split(np.zeros(6, "f4"), 4)


@pytest.mark.spec("RNK-60")
def test_copies_of_one_part_are_compared_by_themselves(tmp_path: Path) -> None:
    key, rule = "0/a.Wqkv/output", recorded("concat -1 parts=2,1 copies=1,2", "0/a.Wqkv/output")
    held = [[1, 2, 91], [3, 4, 91], [5, 6, 92], [7, 8, 92]]
    for name in ("right", "wrong"):
        (tmp_path / name).mkdir()
    right = merged(tmp_path / "right", {key: [np.array(part, "f4") for part in held]}, tensors=rule)
    assert problems(right) == []
    assert right.load(right.get(key)).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 91, 92]
    held[3] = [7, 8, 93]
    wrong = merged(tmp_path / "wrong", {key: [np.array(part, "f4") for part in held]}, tensors=rule)
    text = "rank 3 holds another part than rank 2, where concat -1 parts=2,1 copies=1,2 (test) says the same"
    assert problems(wrong) == [(key, "unequal", text)]


@pytest.mark.spec("RNK-60")
@pytest.mark.parametrize(
    ("shards", "tensors", "text"),
    [
        pytest.param(
            [X, X, X[:1]],
            (),
            "rank 0 has [2, 3, 4] and rank 2 has [1, 3, 4]; no rule is recorded, and nothing shows along "
            "which axis its parts belong together",
            id="no rule",
        ),
        pytest.param(
            [X, X, X[:1]],
            recorded("replicated", "0/a/output"),
            "replicated: shapes [2, 3, 4] and [1, 3, 4] differ (test); rank 0 has [2, 3, 4] and rank 2 has "
            "[1, 3, 4]",
            id="copies",
        ),
        pytest.param(
            [X, X.astype("f2"), X],
            recorded("replicated", "0/a/output"),
            "rank 0 holds it in float32, rank 1 in float16 (test)",
            id="dtypes",
        ),
    ],
)
def test_ranks_of_unlike_shapes_and_dtypes_are_told(
    tmp_path: Path, shards: list[Any], tensors: Any, text: str
) -> None:
    assert [found[2] for found in problems(merged(tmp_path, {"0/a/output": shards}, tensors=tensors))] == [
        text
    ]


@pytest.mark.spec("RNK-20")
def test_ranks_of_unlike_models_are_no_run(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    first = write_ranks(tmp_path / "a", {"0/m/output": [X, X]}, model={"class": "A"})
    other = write_ranks(tmp_path / "b", {"0/m/output": [X, X]}, model={"class": "B"})
    with pytest.raises(UsageError, match="rank 1 is of a model B, rank 0 A; expected the same") as refused:
        open_ranks([first[0], other[1]], tmp_path / "t.rank*.h5")
    assert refused.value.hint == "Name only the archives of one run."


def test_an_archive_of_ranks_is_read_as_each_of_them_has_it(tmp_path: Path) -> None:
    archive = merged(
        tmp_path,
        {"0/a/output": [X, 2 * X], "0/b/output": [Y[..., :4], Y[..., 4:]]},
        tensors=recorded("replicated", "0/a/output") + recorded("concat -1", "0/b/output"),
    )
    own = archive.of_rank(1)
    assert own is not None
    assert np.array_equal(own.load(own.get("0/a/output")), 2 * X)
    assert np.array_equal(own.load(own.get("0/b/output")), Y)
    assert np.array_equal(archive.load(archive.get("0/a/output")), X)
    with open_archive(write_archive(tmp_path / "one.h5", {"0/a/output": X})) as one:
        assert one.of_rank(0) is None
