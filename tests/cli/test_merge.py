"""`tcap merge`, and the ranks in what other commands print."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tensorcap_formats.open import open_archive

X = np.arange(24, dtype="f4").reshape(2, 3, 4)
Tcap = Callable[..., Any]


@pytest.fixture
def ranks(write: Tcap) -> None:
    """Two ranks: of `a` a rule is recorded, of `b` none, `c` is equal."""
    for rank in range(2):
        rules = [{"rule": "concat -1", "known": "test", "keys": ["a"], "shape": [2, 3, 8]}]
        tensors = {"0/a/output": X + rank, "0/b/output": X * (1 + rank), "0/c/output": X}
        write(f"t.rank{rank}.h5", tensors, run={"ranks": {"rank": rank, "count": 2, "tensors": rules}})
    write(
        "ref.h5",
        {
            "0/a/output": np.concatenate([X, X + 1], -1),
            "0/b/output": np.concatenate([X, X * 2], 1),
            "0/c/output": X,
        },
    )


@pytest.mark.usefixtures("ranks")
@pytest.mark.spec("RNK-40")
def test_it_says_by_which_rules(tcap: Tcap, tcap_json: Tcap) -> None:
    result = tcap("merge", "t.rank1.h5", "t.rank0.h5", "-o", "all.h5", "--reference", "ref.h5")
    assert result.stdout.splitlines() == [
        "all.h5: 3 tensors of 2 ranks, 480 B",
        "       1  concat -1 (test)",
        "       1  concat 1 (by the reference's shape)",
        "       1  replicated (by values: every rank holds the same)",
    ]
    assert tcap_json("merge", "t.rank*.h5", "-o", "all.zarr", "--rule", "b=concat 1") == {
        "path": "all.zarr",
        "ranks": 2,
        "records": 3,
        "bytes": 480,
        "rules": [
            {"rule": "concat -1", "known": "test", "tensors": 1},
            {"rule": "concat 1", "known": "given", "tensors": 1},
            {"rule": "replicated", "known": "by values: every rank holds the same", "tensors": 1},
        ],
        "problems": [],
    }
    assert "No divergence" in tcap("compare", "ref.h5", "all.h5").stdout
    assert "No divergence" in tcap("compare", "ref.h5", "t.rank*.h5").stdout


@pytest.mark.usefixtures("ranks")
@pytest.mark.spec("RNK-40")
def test_problems_are_lines_and_status_1(tcap: Tcap, tcap_json: Tcap) -> None:
    lines = tcap("merge", "t.rank0.h5", "t.rank1.h5", "-o", "all.h5", status=1).stdout.splitlines()
    assert lines[0] == "all.h5: 4 tensors of 2 ranks, 480 B"
    assert lines[-2] == (
        "0/b/output: ranks hold unlike tensors, no rule is recorded, and no other tensor shows one"
    )
    assert lines[-1].startswith("--reference ARCHIVE, a run of the whole model, or --rule")
    (problem,) = tcap_json("merge", "t.rank*.h5", "-o", "all.h5", status=1)["problems"]
    assert (problem["key"], problem["kind"], problem["ranks"]) == ("0/b/output", "unmerged", [])
    with open_archive("all.h5") as archive:
        assert [r.key.text for r in archive.records] == [
            "0/a/output",
            "0/b/output",
            "rank1/0/b/output",
            "0/c/output",
        ]


def test_rows_of_their_own_have_a_hint(tcap: Tcap, write: Tcap) -> None:
    for rank in range(2):
        write(f"t.rank{rank}.h5", {"0/@root/input.x": X + rank, "0/@root/output": X - rank})
    assert "--rule '*=concat 0' joins them" in tcap("merge", "t.rank*.h5", "-o", "all.h5", status=1).stdout
    tcap("merge", "t.rank*.h5", "-o", "all.h5", "--rule", "*=concat 0")
    with open_archive("all.h5") as archive:
        assert archive.records[0].shape == (4, 3, 4)


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["t.rank0.h5", "-o", "o.h5"], "rank 1 of 2 missing"),
        (["t.rank0.h5", "t.rank0.h5", "-o", "o.h5"], "is of rank 0, as t.rank0.h5 is"),
        (["t.rank0.h5", "ref.h5", "-o", "o.h5"], "ref.h5: does not say which rank it is of"),
        (["t.rank*.h5", "-o", "o.h5", "--rule", "b"], "--rule expects GLOB=RULE"),
        (["t.rank*.h5", "-o", "o.h5", "--rule", "b=join 1"], "rule 'join 1' is none, expected one of"),
        (["t.rank*.h5", "-o", "o.h5", "--rule", "z=sum"], "rule 'z': fits no tensor"),
        (["t.rank*.h5", "-o", "t.rank0.h5"], "is the source or overlaps with it"),
    ],
)
def test_wrong_usage_is_one_line(tcap: Tcap, arguments: list[str], message: str) -> None:
    lines = tcap("merge", *arguments, status=2).stderr.splitlines()
    assert sum(message in line for line in lines) == 1
    assert not [line for line in lines if "Traceback" in line]


@pytest.mark.usefixtures("ranks")
def test_damaged_archives_are_status_3(tcap: Tcap, folder: Any) -> None:
    (folder / "t.rank1.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    assert tcap("merge", "t.rank0.h5", "t.rank1.h5", "-o", "o.h5", status=3).stderr.startswith(
        "Error: t.rank1"
    )
    assert not (folder / "o.h5").exists()


@pytest.mark.usefixtures("ranks")
@pytest.mark.spec("RNK-4")
def test_ls_and_show_say_the_rule_of_each_tensor(tcap: Tcap, tcap_json: Tcap) -> None:
    tcap("merge", "t.rank*.h5", "-o", "all.h5", status=1)
    rows = [line.split()[-1] for line in tcap("ls", "all.h5").stdout.splitlines()[1:]]
    assert rows == ["rule", "-1", "merged", "merged", "replicated"]
    records = tcap_json("ls", "all.h5")["records"]
    assert [r["rule"] and r["rule"]["rule"] for r in records] == ["concat -1", None, None, "replicated"]
    text = tcap("show", "all.h5", "0/a/output").stdout
    assert "  put together by concat -1 (test), 4 + 4 of axis 2\n" in text
    assert (
        "  rank 1 alone, not merged\n  ranks hold unlike tensors"
        in tcap("show", "all.h5", "rank1/0/b/output").stdout
    )
    run = tcap("show", "all.h5").stdout
    assert (
        "  ranks         2 merged: t.rank0.h5, t.rank1.h5\n  rules         1 concat -1, 1 replicated\n" in run
    )
    assert "  problem       0/b/output: ranks hold unlike tensors" in run


@pytest.mark.usefixtures("ranks")
def test_an_archive_of_one_rank_says_so(tcap: Tcap) -> None:
    assert "  ranks         rank 1 of 2\n" in tcap("show", "t.rank1.h5").stdout
    text = tcap("show", "t.rank1.h5", "0/a/output").stdout
    assert "  a part of the whole: concat -1 (test), the whole is [2, 3, 8]\n" in text
    assert "rule" not in tcap("ls", "ref.h5").stdout


@pytest.mark.usefixtures("ranks")
def test_a_path_without_ranks_is_told_where_they_are(tcap: Tcap) -> None:
    assert "There are archives of 2 ranks: name them as 't.rank*.h5'" in tcap("ls", "t.h5", status=3).stderr


@pytest.mark.usefixtures("ranks")
def test_other_commands_take_the_ranks_as_one(tcap: Tcap) -> None:
    assert tcap("check", "t.rank*.h5").stdout.startswith("t.rank*.h5: 4 tensors")
    assert tcap("convert", "t.rank*.h5", "one.npz").stdout.startswith("one.npz: 4 tensors")
    assert "Every reference tensor is mapped" in tcap("align", "ref.h5", "t.rank*.h5").stdout
