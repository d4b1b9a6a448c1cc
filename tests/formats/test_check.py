"""What `check_archive` finds."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from tensorcap_formats import check
from tensorcap_formats.check import Problem, check_archive
from tensorcap_formats.dtypes import dtype
from tensorcap_formats.errors import CorruptArchiveError
from tensorcap_formats.keys import Key
from tensorcap_formats.open import open_archive
from tensorcap_formats.writing import Writer
from tests.support.progress import RecordedProgress

SUFFIXES = ["h5", "zarr", "safetensors"]


def write(path: Path, *, complete: bool = True) -> Path:
    writer = Writer(path)
    for site, value in (("a", 1), ("b", 2), ("same", 1)):
        writer.add(Key(site, "output"), np.full(4000, value, "<i4"), dtype("int32"), (4000,))
    writer.add(Key("empty", "output"), np.empty(0, "<i4"), dtype("int32"), (0,))
    return writer.close(complete=complete)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_archive_in_order_has_no_problem(tmp_path: Path, suffix: str) -> None:
    progress = RecordedProgress()
    with open_archive(write(tmp_path / f"x.{suffix}")) as archive:
        assert check_archive(archive, progress=progress).problems == []
    assert progress.stages == ["checking"]
    assert progress.advances[-1] == (32_000, 32_000)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_each_tensor_whose_bytes_changed_is_named(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"x.{suffix}")
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            data = file.read_bytes()
            file.write_bytes(data.replace(b"\2\0\0\0" * 4000, b"\2\0\0\0" * 3999 + b"\3\0\0\0"))
    with open_archive(path) as archive:
        problems = check_archive(archive).problems
    assert [p.key for p in problems] == ["0/b/output"]
    assert "digest of its bytes is" in problems[0].what
    assert not problems[0].is_warning


def test_a_chunk_that_was_lost_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "x.zarr")
    (path / "steps/0/b/output/c/0").unlink()
    with open_archive(path) as archive:
        (problem,) = check_archive(archive).problems
    assert problem.key == "0/b/output"
    assert "a chunk of the array is missing" in problem.what


def test_a_run_that_ended_by_an_error_is_a_warning(tmp_path: Path) -> None:
    with open_archive(write(tmp_path / "x.h5", complete=False)) as archive:
        assert check_archive(archive).problems == [
            Problem("", "the run that wrote it did not end as it should", is_warning=True)
        ]


def changed(tmp_path: Path, **fields: object) -> list[str]:
    """Problems of an archive whose index was changed."""
    path = write(tmp_path / "x.zarr")
    chunk = path / "index/c/0"
    index = {**json.loads(chunk.read_bytes()), **fields}
    del index["seal"]
    body = json.dumps(index).encode()[:-1]
    seal = hashlib.blake2b(body + (path / "run/c/0").read_bytes(), digest_size=16).hexdigest()
    text = body + f',"seal":"{seal}"}}'.encode()
    chunk.write_bytes(text)
    metadata = json.loads((path / "index/zarr.json").read_text())
    metadata["shape"] = metadata["chunk_grid"]["configuration"]["chunk_shape"] = [len(text)]
    (path / "index/zarr.json").write_text(json.dumps(metadata))
    with open_archive(path) as archive:
        return [problem.what for problem in check_archive(archive).problems]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"nan": [0, 4001, 0, 0]}, "statistics count 4001 special values of 4000"),
        ({"zeros": [-1, 0, 0, 0]}, "statistics count -1 special values of 4000"),
        ({"min": [9, 2, 1, None], "minimum": [9, 2, 1, None]}, "minimum 9 above maximum 1"),
        ({"minimum": [None, 2, 1, None]}, "have minimum None and maximum 1 of 4000 finite values"),
    ],
    ids=["counts", "negative", "order", "none"],
)
def test_an_index_that_cannot_be_right_is_named(
    tmp_path: Path, fields: dict[str, object], reason: str
) -> None:
    (what,) = changed(tmp_path, **fields)
    assert reason in what


@pytest.mark.spec("ARC-36")
def test_a_wrong_root_hash_is_refused_or_named(tmp_path: Path) -> None:
    with pytest.raises(CorruptArchiveError, match=r"root hash of its records is .*\(ARC-36\)"):
        changed(tmp_path, root="0" * 32)
    with open_archive(write(tmp_path / "x.h5")) as archive:
        archive.root = "0" * 32
        (problem,) = check_archive(archive).problems
    assert "root hash of the index is" in problem.what


def test_digests_that_cannot_be_computed_are_said_not_to_be_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "x.h5")
    monkeypatch.setattr(check, "ALGORITHMS", {})
    with open_archive(path) as archive:
        (problem,) = check_archive(archive).problems
    assert "were not checked" in problem.what


def test_a_file_from_elsewhere_is_read_whole(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", a=np.arange(1000), b=np.ones(3), text=np.array(["t"]))
    with open_archive(tmp_path / "x.npz") as archive:
        assert check_archive(archive).problems == [
            Problem("text", "is not read: an array of '<U1'", is_warning=True)
        ]
    np.savez(tmp_path / "x.npz", a=np.arange(1000), v=np.zeros(2, "V2"))
    with open_archive(tmp_path / "x.npz") as archive:
        (problem,) = check_archive(archive).problems
    assert problem.key == "v"
    assert "does not tell what its bytes are" in problem.what
