"""zarr stores that lost something, lie, or lead elsewhere."""

from __future__ import annotations

import json
import lzma
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numcodecs
import numpy as np
import pytest
import zarr
import zarr.codecs.numcodecs
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
        ReadError,
        "x: its chunks are by codec 'nothing', of whose result the size is not known",
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
            4, 2**31 - 1, CorruptArchiveError, "x: a chunk: .* 2147483647 bytes .*, expected 8192", id="bomb"
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


def traced_peak(path: Path, error: type[Exception], reason: str) -> int:
    """The most bytes that a refusal to read a store took."""
    tracemalloc.start()
    try:
        with pytest.raises(error, match=reason) as caught:
            read_all(path)
        assert "\n" not in str(caught.value)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def chunk_of(store: Path) -> Path:
    files = (path for path in store.rglob("*") if path.is_file() and "z" not in path.name)
    return max(files, key=lambda path: path.stat().st_size)


RAW_LZMA: Any = numcodecs.LZMA(format=lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2, "preset": 1}])
COMPRESSORS: dict[str, Any] = {
    "blosc": numcodecs.Blosc(),
    "bz2": numcodecs.BZ2(),
    "gzip": numcodecs.GZip(),
    "lz4": numcodecs.LZ4(),
    "lzma": numcodecs.LZMA(preset=1),
    "lzma-raw": RAW_LZMA,
    "zlib": numcodecs.Zlib(),
    "zstd": numcodecs.Zstd(),
}
V3: Any = zarr.codecs.numcodecs
FILTERS: dict[str, tuple[int, str, Callable[[], dict[str, Any]]]] = {
    "delta": (2, "<i4", lambda: {"filters": [numcodecs.Delta("<i4", astype="<i8")]}),
    "fixedscaleoffset": (
        2,
        "<f8",
        lambda: {"filters": [numcodecs.FixedScaleOffset(0, 1, "<f8", astype="<i2")]},
    ),
    "quantize": (2, "<f4", lambda: {"filters": [numcodecs.Quantize(3, "<f4", astype="<f4")]}),
    "astype": (2, "<f8", lambda: {"filters": [numcodecs.AsType("<f4", "<f8"), numcodecs.Delta("<f4")]}),
    "packbits": (2, "|b1", lambda: {"filters": [numcodecs.PackBits()]}),
    "checksum": (2, "<i4", lambda: {"filters": [numcodecs.CRC32()]}),
    "shuffle": (2, "<i4", lambda: {"filters": [numcodecs.Shuffle(4)]}),
    "none": (2, "<i4", lambda: {"compressors": None}),
    "delta-3": (3, "<i4", lambda: {"filters": [V3.Delta(dtype="int32", astype="int64")]}),
    "astype-3": (3, "<f8", lambda: {"filters": [V3.AsType(encode_dtype="<f4", decode_dtype="<f8")]}),
    "bitround-3": (3, "<f4", lambda: {"filters": [V3.BitRound(keepbits=20)]}),
    "scale-3": (3, "<f4", lambda: {"filters": [V3.FixedScaleOffset(offset=0, scale=1, astype="<i2")]}),
    "shuffle-3": (3, "<i4", lambda: {"compressors": [V3.Shuffle(), V3.Zlib()]}),
    "checksum-3": (3, "<i4", lambda: {"compressors": [zarr.codecs.GzipCodec(), zarr.codecs.Crc32cCodec()]}),
    "shards-of-shards": (
        3,
        "<i4",
        lambda: {
            "shards": (10, 12),
            "chunks": (5, 6),
            "serializer": zarr.codecs.ShardingCodec(
                chunk_shape=(5, 3), codecs=[zarr.codecs.BytesCodec(), zarr.codecs.ZstdCodec()]
            ),
            "compressors": None,
        },
    ),
}


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in")
@pytest.mark.parametrize("case", FILTERS)
def test_chunks_behind_filters_and_checksums_are_read(case: str, tmp_path: Path) -> None:
    version, dtype, options = FILTERS[case]
    values = (np.arange(9 * 12) % 2).reshape(9, 12).astype(dtype)
    group: Any = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=version)  # type: ignore[arg-type]
    group.create_array("x", data=values, **{"chunks": (5, 12), **options()})
    with open_archive(tmp_path / "x.zarr") as archive:
        np.testing.assert_array_equal(archive.load(archive.get("x")), values)


@pytest.mark.spec("ARC-85")
@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in")
@pytest.mark.parametrize("version", ["2", "3", "shards"])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_chunk_that_decodes_to_more_than_its_elements_is_refused_before(
    name: str, version: str, tmp_path: Path
) -> None:
    codec = COMPRESSORS[name]
    options: dict[str, Any] = {"compressors": codec}
    if version != "2":
        configuration = {**codec.get_config()}
        options["compressors"] = getattr(V3, type(codec).__name__)(**configuration)
    group: Any = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=2 if version == "2" else 3)
    values = np.arange(1000, dtype="<f4")
    shards = {"shards": (1000,)} if version == "shards" else {}
    group.create_array("x", data=values, chunks=(500,), **shards, **options)
    with open_archive(tmp_path / "x.zarr") as archive:
        np.testing.assert_array_equal(archive.load(archive.get("x")), values)
    bomb = bytes(codec.encode(bytes(1 << 23)))
    if version == "shards":
        entries = np.array([[0, len(bomb)], [2**64 - 1, 2**64 - 1]], "<u8").tobytes()
        bomb += entries + google_crc32c.value(entries).to_bytes(4, "little")
    chunk_of(tmp_path / "x.zarr").write_bytes(bomb)
    peak = traced_peak(tmp_path / "x.zarr", CorruptArchiveError, "x: a chunk: .*, expected 2000")
    assert peak < 3_000_000


def zstd_of_zeros(blocks: int) -> bytes:
    """A zstd frame that does not say its size, of so many blocks of 128 KiB (RFC 8878, 3.1.1)."""
    heads = ((1 << 20) | 2 | (number == blocks - 1) for number in range(blocks))  # 128 KiB, RLE, last
    return bytes.fromhex("28b52ffd 00 38") + b"".join(head.to_bytes(3, "little") + b"\0" for head in heads)


@pytest.mark.parametrize("version", [2, 3])
def test_a_zstd_frame_that_does_not_say_its_size_is_read_to_that_of_the_chunk(
    version: Any, tmp_path: Path
) -> None:
    codec: Any = numcodecs.Zstd() if version == 2 else zarr.codecs.ZstdCodec()
    group = zarr.open_group(tmp_path / "x.zarr", mode="w", zarr_format=version)
    group.create_array("x", data=np.arange(1 << 17, dtype="|u1"), chunks=(1 << 17,), compressors=codec)
    chunk = chunk_of(tmp_path / "x.zarr")
    chunk.write_bytes(zstd_of_zeros(1))
    with open_archive(tmp_path / "x.zarr") as archive:
        assert not archive.load(archive.get("x")).any()
    chunk.write_bytes(zstd_of_zeros(100))
    assert traced_peak(tmp_path / "x.zarr", CorruptArchiveError, "x: a chunk: cannot be decoded") < 2_000_000


def filtered(*filters: dict[str, Any], dtype: str = "<f4") -> Callable[[Path], object]:
    return lambda path: edit(path / "x/.zarray", filters=list(filters), dtype=dtype, compressor=None)


TO_TEXT = {"id": "astype", "encode_dtype": "<f4", "decode_dtype": "|S1000000"}
WIDER = {"id": "astype", "encode_dtype": "|i1", "decode_dtype": "<c16"}
GROWTH: dict[str, tuple[Callable[[Path], object], type[ReadError], str]] = {
    "elements-of-a-megabyte": (filtered(TO_TEXT), CorruptArchiveError, "expected numbers of 4 bytes"),
    "a-type-twice": (
        filtered(WIDER, WIDER, dtype="<c16"),
        CorruptArchiveError,
        "expected numbers of 1 bytes",
    ),
    "bits-of-bits": (
        filtered(*[{"id": "packbits"}] * 7, dtype="|b1"),
        ReadError,
        "its chunks are by codec 'packbits'",
    ),
    "texts": (filtered({"id": "vlen-utf8"}), ReadError, "are by codec 'vlen-utf8', of whose result"),
    "twice": (filtered({"id": "zlib"}, {"id": "zstd"}), ReadError, "x: its chunks are compressed twice"),
}


@pytest.mark.spec("ARC-85")
@pytest.mark.parametrize("case", GROWTH)
def test_filters_do_not_make_more_of_a_chunk(foreign: Path, case: str) -> None:
    damage, error, reason = GROWTH[case]
    damage(foreign)
    assert traced_peak(foreign, error, reason) < 2_000_000


@pytest.mark.spec("ARC-85")
@pytest.mark.parametrize("nested", [False, True])
def test_a_shard_of_more_chunks_than_its_index_has_room_for_is_refused(tmp_path: Path, nested: bool) -> None:
    group: Any = zarr.open_group(tmp_path / "x.zarr", mode="w")
    group.create_array("x", data=np.arange(1 << 16, dtype="|u1"), chunks=(1 << 16,), shards=(1 << 16,))
    metadata = json.loads((tmp_path / "x.zarr/x/zarr.json").read_text())
    shard = metadata["codecs"][0]
    inner = {"name": "sharding_indexed", "configuration": {**shard["configuration"], "chunk_shape": [1]}}
    if nested:
        inner = {"name": "sharding_indexed", "configuration": {**shard["configuration"], "codecs": [inner]}}
    edit(tmp_path / "x.zarr/x/zarr.json", codecs=[inner])
    chunk_of(tmp_path / "x.zarr").write_bytes(bytes(100))
    peak = traced_peak(tmp_path / "x.zarr", CorruptArchiveError, "the index of a shard has 1048576 bytes")
    assert peak < 2_000_000


@pytest.mark.spec("ARC-85")
def test_chunks_of_a_shard_that_share_their_bytes_are_refused(tmp_path: Path) -> None:
    """The library copies the bytes of each chunk before it decodes one."""
    group: Any = zarr.open_group(tmp_path / "x.zarr", mode="w")
    zeros: Any = np.zeros(999, "|u1")
    group.create_array("x", data=zeros, chunks=(1,), shards=(1000,), compressors=None)
    entries = np.tile(np.array([0, 100_000], "<u8"), 1000).tobytes()
    content = bytes(100_000) + entries + google_crc32c.value(entries).to_bytes(4, "little")
    (tmp_path / "x.zarr/x/c").mkdir(parents=True)
    (tmp_path / "x.zarr/x/c/0").write_bytes(content)
    peak = traced_peak(tmp_path / "x.zarr", CorruptArchiveError, "the chunks of a shard have 100000000 bytes")
    assert peak < 5_000_000


def test_attributes_that_look_like_a_codec_are_left_alone(tmp_path: Path) -> None:
    group: Any = zarr.open_group(tmp_path / "x.zarr", mode="w")
    attributes = {"a": {"name": "blosc"}, "b": {"id": "blosc"}}
    group.create_array("x", data=np.arange(3, dtype="<f4"), attributes=attributes)
    with open_archive(tmp_path / "x.zarr") as archive:
        np.testing.assert_array_equal(archive.load(archive.get("x")), [0, 1, 2])


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
