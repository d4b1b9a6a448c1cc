"""zarr stores that lost something, lie, or lead elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec

from tensorcap_formats.conversion import convert
from tensorcap_formats.dtypes import dtype
from tensorcap_formats.errors import (
    CorruptArchiveError,
    NewerVersionError,
    NotAnArchiveError,
    ReadError,
    UnsafeFileError,
)
from tensorcap_formats.keys import Key
from tensorcap_formats.open import open_archive
from tensorcap_formats.writing import Writer

ARRAY = "steps/0/m/output"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    writer = Writer(tmp_path / "x.zarr")
    writer.add(Key("m", "output"), np.full(1000, 3, "<i4"), dtype("int32"), (10, 100))
    return writer.close()


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def read_all(path: Path) -> None:
    with open_archive(path) as archive:
        for record in archive.records:
            for _ in archive.blocks(record):
                pass


def grid(*chunk: int) -> dict[str, object]:
    return {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}}}


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "chunk-lost": (lambda p: (p / ARRAY / "c/0/0").unlink(), "a chunk of the array is missing"),
    "chunk-short": (
        lambda p: (p / ARRAY / "c/0/0").write_bytes(bytes(3999)),
        "chunk has 3999 bytes, expected 4000",
    ),
    "chunk-long": (
        lambda p: (p / ARRAY / "c/0/0").write_bytes(bytes(4001)),
        "chunk has 4001 bytes, expected 4000",
    ),
    "array-lost": (lambda p: shutil.rmtree(p / ARRAY), f"array '{ARRAY}' is missing"),
    "metadata-lost": (lambda p: (p / ARRAY / "zarr.json").unlink(), f"array '{ARRAY}' is missing"),
    "metadata-no-json": (lambda p: (p / ARRAY / "zarr.json").write_text("{"), "is not JSON"),
    "index-lost": (lambda p: shutil.rmtree(p / "index"), "metadata of the array is missing"),
    "run-chunk-lost": (lambda p: (p / "run/c/0").unlink(), "a chunk of the array is missing"),
    "root-no-json": (lambda p: (p / "zarr.json").write_text("no"), "is not JSON"),
    "other-shape": (lambda p: edit(p / ARRAY / "zarr.json", shape=[100, 10]), "expected slabs"),
    "shape-that-does-not-fit-the-index": (
        lambda p: edit(p / ARRAY / "zarr.json", shape=[9, 100], **grid(9, 100)),
        r"has shape \(9, 100\), expected \(10, 100\)",
    ),
    "absurd-shape": (lambda p: edit(p / ARRAY / "zarr.json", shape=[2**62, 2**62]), "ARC-34"),
    "no-shape": (lambda p: edit(p / ARRAY / "zarr.json", shape="10"), "ARC-34"),
    "absurd-chunk": (
        lambda p: edit(p / ARRAY / "zarr.json", **grid(2**40, 100)),
        "expected slabs of at most",
    ),
    "chunk-of-0": (lambda p: edit(p / ARRAY / "zarr.json", **grid(0, 100)), "expected slabs"),
    "chunk-grid-a-text": (lambda p: edit(p / ARRAY / "zarr.json", chunk_grid="x"), "expected slabs"),
    "other-dtype": (lambda p: edit(p / ARRAY / "zarr.json", data_type="float32"), "holds 'float32'"),
    "unknown-codec": (
        lambda p: edit(p / ARRAY / "zarr.json", codecs=[{"name": "numcodecs.pickle"}]),
        "numcodecs.pickle",
    ),
    "codecs-a-number": (lambda p: edit(p / ARRAY / "zarr.json", codecs=7), "by codecs 7"),
    "other-chunk-names": (
        lambda p: edit(p / ARRAY / "zarr.json", chunk_key_encoding={"name": "v2"}),
        "default encoding",
    ),
    "index-claims-4-EiB": (
        lambda p: edit(p / "index/zarr.json", shape=[2**62], **grid(2**24)),
        "chunk has",
    ),
    "index-of-two-axes": (
        lambda p: edit(p / "index/zarr.json", shape=[1, 10], **grid(1, 10)),
        "has 2 axes, expected 1",
    ),
}


@pytest.mark.spec("ARC-4", "ARC-61", "ARC-66")
@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_one_line_and_never_zeros(store: Path, case: str) -> None:
    damage, reason = DAMAGE[case]
    damage(store)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptArchiveError, match=reason) as caught:
            read_all(store)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000
    assert "\n" not in str(caught.value)


def test_a_newer_major_version_is_named(store: Path) -> None:
    edit(store / "zarr.json", attributes={"tensorcap": "2.0"})
    with pytest.raises(NewerVersionError, match=r"archive format is 2\.0"):
        open_archive(store)


@pytest.mark.parametrize("what", ["chunk", "folder"])
def test_a_link_out_of_our_store_is_not_followed(store: Path, tmp_path: Path, what: str) -> None:
    secret = tmp_path / "secret"
    link = store / ARRAY / "c/0/0" if what == "chunk" else store / ARRAY
    link.rename(secret)
    link.symlink_to(secret)
    with pytest.raises(UnsafeFileError, match="is a link to a file outside"):
        read_all(store)


@pytest.mark.parametrize(
    ("chunk", "reason"),
    [
        pytest.param(b"", "holds None bytes, expected 4000", id="empty"),
        pytest.param(b"garbage", "holds None bytes", id="garbage"),
        pytest.param(
            bytes.fromhex("28b52ffd e0 0000000001000000 010000"), "holds 4294967296 bytes", id="claims-4-GiB"
        ),
        pytest.param(
            bytes.fromhex("28b52ffd 60 a00e 000000"), "is no zstd frame", id="holds-less-than-it-says"
        ),
        pytest.param(b"x" * 100_000, "more than the 4000 that it holds", id="too-long"),
    ],
)
def test_a_compressed_chunk_that_lies_is_refused(
    store: Path, tmp_path: Path, chunk: bytes, reason: str
) -> None:
    with open_archive(store) as archive:
        convert(archive, tmp_path / "y.zarr", compress="zstd")
    (tmp_path / "y.zarr" / ARRAY / "c/0/0").write_bytes(chunk)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptArchiveError, match=reason):
            read_all(tmp_path / "y.zarr")
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_a_compressed_chunk_of_another_size_is_refused(store: Path, tmp_path: Path) -> None:
    with open_archive(store) as archive:
        convert(archive, tmp_path / "y.zarr", compress="zstd")
    other = tmp_path / "y.zarr" / "run/c/0"
    shutil.copy(other, tmp_path / "y.zarr" / ARRAY / "c/0/0")
    with pytest.raises(CorruptArchiveError, match="holds 2 bytes, expected 4000"):
        read_all(tmp_path / "y.zarr")


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    group = zarr.open_group(tmp_path / "f.zarr", mode="w", zarr_format=2)
    group.create_array("x", data=np.arange(10, dtype="<f4"))
    return tmp_path / "f.zarr"


@pytest.mark.parametrize(
    "change",
    [{"filters": [{"id": "pickle"}]}, {"compressor": {"id": "pickle", "protocol": 5}}],
    ids=["filter", "compressor"],
)
def test_chunks_by_pickle_are_refused(foreign: Path, change: dict[str, object], tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    edit(foreign / "x/.zarray", **change)
    (foreign / "x/0").write_bytes(f"cbuiltins\nopen\n(V{marker}\nVw\ntR.".encode())
    with pytest.raises(UnsafeFileError, match="its chunks are pickles"):
        read_all(foreign)
    assert not marker.exists()


def test_an_array_of_objects_is_skipped(foreign: Path) -> None:
    edit(foreign / "x/.zarray", dtype="|O")
    with open_archive(foreign) as archive:
        assert len(archive) == 0
        assert archive.skipped == {"x": "an array of '|O'"}


def test_a_link_out_of_a_foreign_store_is_not_followed(foreign: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(40))
    (foreign / "x/0").unlink()
    (foreign / "x/0").symlink_to(tmp_path / "secret")
    with pytest.raises(UnsafeFileError, match="is a link to a file outside"):
        open_archive(foreign)


FOREIGN_DAMAGE: dict[str, tuple[Callable[[Path], object], type[ReadError], str]] = {
    "no-json": (lambda p: (p / "x/.zarray").write_text("[]"), CorruptArchiveError, "is a JSON list"),
    "absurd-shape": (lambda p: edit(p / "x/.zarray", shape=[2**80]), CorruptArchiveError, "ARC-34"),
    "no-chunks": (lambda p: edit(p / "x/.zarray", chunks=None), CorruptArchiveError, "cannot be decoded"),
    "garbage": (lambda p: (p / "x/0").write_bytes(b"junk"), CorruptArchiveError, "cannot be decoded"),
    "bomb": (
        lambda p: edit(p / "x/.zarray", shape=[2**32], chunks=[2**32]),
        UnsafeFileError,
        "claim to expand to 17179869184",
    ),
    "unknown-codec": (
        lambda p: edit(p / "x/.zarray", compressor={"id": "nothing"}),
        CorruptArchiveError,
        "cannot be decoded",
    ),
}


@pytest.mark.parametrize("case", FOREIGN_DAMAGE)
def test_a_foreign_store_that_lies_is_refused(foreign: Path, case: str) -> None:
    damage, error, reason = FOREIGN_DAMAGE[case]
    damage(foreign)
    tracemalloc.start()
    try:
        with pytest.raises(error, match=reason):
            read_all(foreign)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("version", "options"),
    [
        pytest.param(2, {"compressors": numcodecs.Blosc()}, id="version 2"),
        pytest.param(3, {"compressors": BloscCodec()}, id="version 3"),
        pytest.param(3, {"compressors": BloscCodec(), "shards": (64, 64)}, id="shards"),
    ],
)
@pytest.mark.parametrize(
    ("at", "size", "error", "reason"),
    [
        pytest.param(12, 100_000, CorruptArchiveError, "bytes, expected the 100000 that it says", id="chunk"),
        pytest.param(
            4, 2**31 - 1, UnsafeFileError, r"x: a chunk: \d+ stored bytes claim .* 2147483647", id="bomb"
        ),
    ],
)
def test_a_chunk_of_blosc_is_not_decoded_by_a_size_that_lies(
    version: Any, options: Any, at: int, size: int, error: Any, reason: str, tmp_path: Path
) -> None:
    values = np.random.default_rng(0).uniform(size=(64, 64)).astype("<f4")
    group = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=version)
    group.create_array("x", data=values, chunks=(32, 64), **options)
    with open_archive(tmp_path / "x.zarr") as archive:
        np.testing.assert_array_equal(archive.load(archive.get("x")), values)
    chunk = max(tmp_path.rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
    content = bytearray(chunk.read_bytes())
    content[at : at + 4] = size.to_bytes(4, "little")  # of the first chunk, or of what comes of it
    chunk.write_bytes(content)
    with pytest.raises(error, match=reason):
        read_all(tmp_path / "x.zarr")


def test_a_folder_that_is_no_store_is_no_archive(tmp_path: Path) -> None:
    from tensorcap_formats.zarr import open_zarr

    with pytest.raises(NotAnArchiveError, match=r"has no zarr\.json"):
        open_zarr(tmp_path)


def test_keys_that_differ_in_case_never_overwrite_each_other(tmp_path: Path) -> None:
    """On a file system that ignores case the second array's folder exists: an error, not a mixture."""
    from tensorcap_formats.zarr.writer import write_array

    write_array(tmp_path / "a", [np.ones(1)], (1,), "<f8", "float64", compress=False)
    with pytest.raises(FileExistsError):
        write_array(tmp_path / "a", [np.ones(1)], (1,), "<f8", "float64", compress=False)


def test_attributes_of_any_kind_do_not_confuse(foreign: Path) -> None:
    group: Any = zarr.open_group(foreign.parent / "g.zarr", mode="w", attributes={"other": [1]})
    group.create_array("x", data=np.ones(1))
    choices: list[object] = [[], "text", {"tensorcap": 1}]
    for attributes in choices:
        edit(foreign.parent / "g.zarr/zarr.json", attributes=attributes)
        if attributes == {"tensorcap": 1}:
            with pytest.raises(CorruptArchiveError, match="version is 1"):
                open_archive(foreign.parent / "g.zarr")
        else:
            with open_archive(foreign.parent / "g.zarr") as archive:
                assert len(archive) == 1


@pytest.mark.parametrize("version", [2, 3])
def test_a_pipe_in_the_place_of_a_chunk_of_another_writer_is_refused(version: int, tmp_path: Path) -> None:
    path = tmp_path / "x.zarr"
    group = zarr.open_group(str(path), mode="w", zarr_format=version)  # type: ignore[arg-type]
    group.create_array("a", data=np.arange(24, dtype="f4").reshape(4, 6), chunks=(2, 3))
    chunk = path / "a" / ("1.1" if version == 2 else "c/1/1")
    chunk.unlink()
    os.mkfifo(chunk)  # a reader would wait for ever
    with pytest.raises(CorruptArchiveError, match="is no regular file, expected a chunk"):
        read_all(path)
