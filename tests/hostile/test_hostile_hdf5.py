"""HDF5 files that lie, are damaged, or want to be dangerous: right bytes, or exactly one of our errors."""

from __future__ import annotations

import bz2
import hashlib
import json
import os
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import tensorcap_formats
from tensorcap_formats.dtypes import dtype
from tensorcap_formats.errors import (
    CorruptArchiveError,
    NewerVersionError,
    NotAnArchiveError,
    ReadError,
    UnfinishedArchiveError,
    UnsafeFileError,
)
from tensorcap_formats.hdf5 import finish_flat_file
from tensorcap_formats.hdf5.flat_file import Note
from tensorcap_formats.index import Index, encode_index, root_hash
from tensorcap_formats.keys import Key
from tensorcap_formats.open import open_archive
from tensorcap_formats.records import Record
from tensorcap_formats.statistics import Statistics
from tensorcap_formats.writing import Writer

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(tensorcap_formats.__file__).parents[1])}
FLOAT32 = dtype("float32")
NOTHING = Statistics(None, None, None, None, 0, 0, 0, 0)
DIGEST = "d11372a3f8d4096998cd4bf727a9d2ae"  # of the float32 values 1 and -2

# Opens and reads everything with little memory to spare, and says what came of it in one line.
READ_ALL = """
import resource, sys
import h5py, numpy
from tensorcap_formats.errors import TensorcapError
from tensorcap_formats.open import open_archive

def size():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()

limit = size() + (192 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    with open_archive(sys.argv[1]) as archive:
        print("opened", len(archive))
        for record in archive.records:
            try:
                archive.read(record)
                print("read")
            except TensorcapError as error:
                print(type(error).__name__, str(error))
            try:
                for block in archive.blocks(record):
                    pass
                print("read")
            except TensorcapError as error:
                print(type(error).__name__, str(error))
except TensorcapError as error:
    print(type(error).__name__, str(error))
"""

# Alters one byte at a time, opens, reads everything. A process of its own: a crash of the library is seen.
FLIP = """
import sys
import numpy as np
from tensorcap_formats.digests import digest
from tensorcap_formats.errors import ReadError
from tensorcap_formats.open import open_archive

path, first, last, count, seed = sys.argv[1], *map(int, sys.argv[2:])
original = open(path, "rb").read()
with open_archive(path) as archive:
    truth = {r.key.text: (r.dtype.name, r.shape, archive.read(r).tobytes()) for r in archive.records}
    assert not archive.is_foreign
draw = np.random.default_rng(seed)
places = range(first, last) if count == 0 else draw.integers(first, last, count).tolist()
outcomes = {"same": 0, "refused": 0, "tensor refused": 0}
for at in places:
    altered = bytearray(original)
    altered[at] ^= int(draw.integers(1, 256))
    with open(path, "wb") as file:
        file.write(altered)
    print("at", at, hex(altered[at]), file=sys.stderr, flush=True)
    try:
        archive = open_archive(path)
    except ReadError as error:
        assert "\\n" not in str(error), error
        outcomes["refused"] += 1
        continue
    outcome = "same"
    with archive:
        assert not archive.is_foreign
        assert [r.key.text for r in archive.records] == list(truth)
        for record in archive.records:
            try:
                data = archive.read(record).tobytes()
            except ReadError as error:
                assert "\\n" not in str(error), error
                outcome = "tensor refused"
                continue
            assert (record.dtype.name, record.shape, data) == truth[record.key.text], record
            assert digest(data, archive.algorithm) == record.digest
    outcomes[outcome] += 1
print(*outcomes.values())
"""


def run(code: str, *arguments: object) -> list[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def write_small(path: Path) -> Path:
    writer = Writer(path, run={"seed": 1})
    for i, name in enumerate(["float32", "bfloat16", "bool", "float8_e4m3fn"]):
        bits = np.arange(24, dtype="u1").view("u1") % 2
        bits = bits.view(dtype(name).storage)
        writer.add(Key(f"m.{i}", "output"), bits, dtype(name), bits.shape)
        writer.add(Key(f"m.{i}", "input.x"), bits[::-1].copy(), dtype(name), bits.shape)
    writer.add(Key("empty", "output"), np.empty((0, 3), "<f4"), FLOAT32, (0, 3))
    writer.add_value("0/m.0/input.mask", None)
    return writer.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.h5"


# ---- damage


def tail_of(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[120:128], "little")


@pytest.mark.spec("ARC-40")
def test_an_archive_cut_anywhere_is_one_error(path: Path) -> None:
    whole = write_small(path).read_bytes()
    tail = tail_of(path)
    interesting = {
        0,
        1,
        7,
        8,
        95,
        96,
        191,
        192,
        2047,
        2048,
        2049,
        len(whole) // 2,
        tail,
        tail + 1,
        len(whole) - 9,  # the last 8 bytes are none of HDF5's
    }
    before = os.listdir("/proc/self/fd")
    for length in sorted(interesting | set(range(0, len(whole) - 8, 131))):
        path.write_bytes(whole[:length])
        with pytest.raises(ReadError) as caught:
            open_archive(path)
        kinds = (CorruptArchiveError,) if length >= 96 else (CorruptArchiveError, NotAnArchiveError)
        assert type(caught.value) in kinds, (length, caught.value)
        assert "\n" not in str(caught.value)
    assert os.listdir("/proc/self/fd") == before


def test_an_archive_with_more_behind_it_is_still_read(path: Path) -> None:
    write_small(path)
    with path.open("ab") as file:
        file.write(b"appended by somebody")
    with open_archive(path) as archive:
        assert archive.read(archive.get("m.2/output")).tolist() == [False, True] * 12


@pytest.mark.spec("ARC-45")
def test_any_byte_of_the_note_may_be_wrong_and_the_archive_is_read_all_the_same(path: Path) -> None:
    write_small(path)
    assert run(FLIP, path, 96, 192, 0, 1) == ["96 0 0"]


def test_any_byte_of_the_superblock_may_be_wrong(path: Path) -> None:
    write_small(path)
    same, refused, in_tensors = map(int, run(FLIP, path, 0, 96, 0, 1)[0].split())
    assert (refused, in_tensors, same) == (8, 0, 88)  # only the signature is needed, given the note


@pytest.mark.spec("ARC-36")
@pytest.mark.parametrize(
    ("seed", "count"), [(2, 200), pytest.param(3, 3000, marks=pytest.mark.slow)], ids=["200", "3000"]
)
def test_any_byte_of_the_tail_may_be_wrong(seed: int, count: int, path: Path) -> None:
    size = write_small(path).stat().st_size
    same, refused, in_tensors = map(int, run(FLIP, path, tail_of(path), size, count, seed)[0].split())
    assert same + refused + in_tensors == count
    assert min(same, refused, in_tensors) > 0


@pytest.mark.spec("ARC-40")
def test_an_archive_whose_superblock_was_not_written_is_unfinished(path: Path) -> None:
    whole = write_small(path).read_bytes()
    path.write_bytes(bytes(96) + whole[96:])
    with pytest.raises(UnfinishedArchiveError, match="begins with zeros"):
        open_archive(path)


# ---- lies of the index, in a file of our own form


def forge_flat(path: Path, offset: int | None, shape: tuple[int, ...] = (2,)) -> None:
    data = bytes.fromhex("0000803f000000c0")
    path.write_bytes(bytes(2048) + data)
    fd = os.open(path, os.O_RDWR)
    finish_flat_file(fd, Index([record(shape)], {}, {}, "xxh3_128"), [offset], 2048 + len(data))
    os.close(fd)


def forge_note(path: Path, **changes: Any) -> None:
    """Write a good file whose note, rightly guarded, says other things."""
    forge_flat(path, 2048)
    whole = path.read_bytes()
    note = Note.unpack(whole)
    assert note is not None
    forged = replace(note, **changes).guarded([whole[note.tail_at :]])
    path.write_bytes(whole[:96] + forged.pack() + whole[192:])


def record(shape: tuple[int, ...] = (2,)) -> Record:
    return Record(Key.parse("0/m/output"), FLOAT32, shape, 0, DIGEST, NOTHING, stored=True, row=0)


def test_the_form_of_the_forgeries_is_good(path: Path) -> None:
    forge_flat(path, 2048)
    assert run(READ_ALL, path) == ["opened 1", "read", "read"]


@pytest.mark.spec("ARC-42")
@pytest.mark.parametrize(
    ("offset", "shape"),
    [
        pytest.param(0, (2,), id="superblock"),
        pytest.param(2047, (2,), id="before-the-tensors"),
        pytest.param(2048, (17,), id="into-the-tail"),
        pytest.param(2112, (2,), id="in-the-tail"),
        pytest.param(10**9, (2,), id="behind-the-end"),
        pytest.param(2**64 - 8, (2,), id="wraps-around"),
        pytest.param(None, (2,), id="nowhere"),
        pytest.param(2048, (2**40,), id="4TiB"),
        pytest.param(2048, (2**31, 2**29), id="4EiB"),
    ],
)
def test_an_offset_outside_the_tensors_is_refused(
    offset: int | None, shape: tuple[int, ...], path: Path
) -> None:
    forge_flat(path, offset, shape)
    (line,) = run(READ_ALL, path)
    assert line.startswith(f"CorruptArchiveError {path}: 0/m/output: ")
    assert line.endswith("expected between 2048 and 2112 (ARC-42)")


@pytest.mark.spec("ARC-42")
@pytest.mark.parametrize("count", [0, 2])
def test_a_table_with_another_number_of_offsets_is_refused(count: int, path: Path) -> None:
    forge_note(path, offsets_count=count)
    with pytest.raises(CorruptArchiveError, match=rf"table has {count} offsets, expected .* 1 .*\(ARC-42\)"):
        open_archive(path)


@pytest.mark.spec("ARC-45")
@pytest.mark.parametrize(
    "changes",
    [
        {"offsets_count": 10**15},
        {"offsets_at": 2**63},
        {"index_at": 0},
        {"run_size": 2**64 - 1},
        {"tail_at": 0},
        {"file_size": 10**15},
    ],
    ids=str,
)
def test_a_note_that_points_out_of_the_file_is_not_believed(changes: dict[str, int], path: Path) -> None:
    forge_note(path, **changes)
    with open_archive(path) as archive:
        assert archive.read(archive.records[0]).tolist() == [1.0, -2.0]


# ---- lies in a file that another tool wrote


def index_of(records: list[Record]) -> dict[str, Any]:
    index: dict[str, Any] = json.loads(encode_index(Index(records, {}, {}, "xxh3_128"))[0])
    del index["seal"]
    return index


def sealed(index: dict[str, Any]) -> bytes:
    """The text of an index, as it would be for the run `{}`."""
    body = json.dumps(index, separators=(",", ":")).encode()[:-1]
    seal = hashlib.blake2b(body + b"{}", digest_size=16).hexdigest()
    return body + f',"seal":"{seal}"}}'.encode()


def forge(path: Path, make: Callable[[h5py.File], object] = lambda file: None, **changes: Any) -> None:
    """Write an archive with h5py: one record `0/m/output`, its index altered, its dataset made by `make`."""
    shape = tuple(changes.pop("shape_", (2,)))
    index = index_of([record(shape)])
    index.update(changes)
    with h5py.File(path, "w") as file:
        for name, text in (("index", sealed(index)), ("run", b"{}")):
            file[name] = np.array(text, f"S{len(text)}")
        make(file)


def good(file: h5py.File) -> None:
    file["steps/0/m/output"] = np.array([1, -2], "<f4")


def test_an_archive_that_another_tool_wrote_is_ours(path: Path) -> None:
    forge(path, good)
    assert run(READ_ALL, path) == ["opened 1", "read", "read"]


@pytest.mark.parametrize(
    ("changes", "error", "clause"),
    [
        pytest.param({"tensorcap": "2.0"}, NewerVersionError, "ARC-5", id="newer-major"),
        pytest.param({"must_understand": ["x"]}, NewerVersionError, "ARC-6", id="must-understand"),
        pytest.param({"order": []}, CorruptArchiveError, "ARC-30", id="short-column"),
        pytest.param({"order": ["0"]}, CorruptArchiveError, "ARC-31", id="column-of-text"),
        pytest.param({"digest": "0" * 31}, CorruptArchiveError, "ARC-33", id="short-digest"),
        pytest.param({"shape": [[2**40, 2**40]]}, CorruptArchiveError, "ARC-34", id="absurd-shape"),
        pytest.param({"values": []}, CorruptArchiveError, "ARC-35", id="values"),
        pytest.param({"root": "0" * 32}, CorruptArchiveError, "ARC-36", id="root"),
        pytest.param({"key": ["../../evil"]}, CorruptArchiveError, "NAM-4", id="parent-key"),
        pytest.param({"key": ["a\0b"]}, CorruptArchiveError, "NAM-4", id="nul-key"),
        pytest.param({"key": ["x" * 65536]}, CorruptArchiveError, "NAM-6", id="64KiB-key"),
    ],
)
def test_an_index_that_lies_is_one_error(
    changes: dict[str, Any], error: type[ReadError], clause: str, path: Path
) -> None:
    forge(path, good, **changes)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(error, match=rf"\({clause}\)") as caught:
        open_archive(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value)) < 600
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.spec("ARC-32")
def test_two_records_of_one_key_are_one_error(path: Path) -> None:
    forge(path, good)
    with h5py.File(path, "r+") as file:
        del file["index"]
        text = sealed(index_of([record()] * 2))
        file["index"] = np.array(text, f"S{len(text)}")
    with pytest.raises(CorruptArchiveError, match=r"key '0/m/output' stands twice \(ARC-32\)"):
        open_archive(path)


def external(file: h5py.File) -> None:
    secret = Path(file.filename).with_name("secret.bin")
    secret.write_bytes(bytes.fromhex("0000803f000000c0"))
    group = file.require_group("steps/0/m")
    group.create_dataset("output", (2,), "<f4", external=[(str(secret), 0, 8)])


def virtual(file: h5py.File) -> None:
    other = Path(file.filename).with_name("other.h5")
    with h5py.File(other, "w") as source:
        source["x"] = np.array([1, -2], "<f4")
    layout = h5py.VirtualLayout((2,), "<f4")
    layout[:] = h5py.VirtualSource(str(other), "x", (2,))
    file.require_group("steps/0/m").create_virtual_dataset("output", layout)


def soft(file: h5py.File) -> None:
    file["elsewhere"] = np.array([1, -2], "<f4")
    file["steps/0/m/output"] = h5py.SoftLink("/elsewhere")


def external_link(file: h5py.File) -> None:
    other = Path(file.filename).with_name("other.h5")
    with h5py.File(other, "w") as source:
        source["x"] = np.array([1, -2], "<f4")
    file["steps/0/m/output"] = h5py.ExternalLink(str(other), "/x")


def soft_group(file: h5py.File) -> None:
    file["elsewhere/output"] = np.array([1, -2], "<f4")
    file["steps/0/m"] = h5py.SoftLink("/elsewhere")


@pytest.mark.spec("ARC-21")
@pytest.mark.parametrize("make", [external, virtual, soft, external_link, soft_group])
def test_nothing_is_followed_out_of_the_file(make: Callable[[h5py.File], object], path: Path) -> None:
    forge(path, make)
    with open_archive(path) as archive, pytest.raises(UnsafeFileError, match=r"0/m/output: .*\(ARC-21\)$"):
        archive.read(archive.records[0])


@pytest.mark.spec("ARC-21")
@pytest.mark.parametrize("make", [external, virtual])
def test_nothing_is_followed_out_of_a_file_from_elsewhere(
    make: Callable[[h5py.File], object], path: Path
) -> None:
    with h5py.File(path, "w") as file:
        make(file)
    with pytest.raises(UnsafeFileError, match=r"output: keeps its bytes in other files.*\(ARC-21\)"):
        open_archive(path)


@pytest.mark.spec("ARC-21")
def test_an_index_that_lies_in_another_file_is_not_read(path: Path) -> None:
    text = sealed(index_of([record()]))
    path.with_name("index.json").write_bytes(text)
    with h5py.File(path, "w") as file:
        good(file)
        file["run"] = np.array(b"{}", "S2")
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_external(bytes(path.with_name("index.json")), 0, len(text))
        kind, space = h5py.h5t.py_create(np.dtype(f"S{len(text)}")), h5py.h5s.create(h5py.h5s.SCALAR)
        h5py.h5d.create(file.id, b"index", kind, space, properties)
    with pytest.raises(UnsafeFileError, match=r"index: keeps its bytes in other files.*\(ARC-21\)"):
        open_archive(path)


def missing(file: h5py.File) -> None:
    file.require_group("steps/0/m")


def a_group(file: h5py.File) -> None:
    file.require_group("steps/0/m/output")


def a_text(file: h5py.File) -> None:
    file["steps/0/m/output"] = np.array([b"abcd", b"efgh"])


def other_size(file: h5py.File) -> None:
    file["steps/0/m/output"] = np.array([1, -2], "<f8")


def unwritten(file: h5py.File) -> None:
    file.create_dataset("steps/0/m/output", (2,), "<f4")


def unwritten_chunk(file: h5py.File) -> None:
    file.create_dataset("steps/0/m/output", (2,), "<f4", chunks=(1,))[0] = 1.0


def null_space(file: h5py.File) -> None:
    file["steps/0/m/output"] = h5py.Empty("<f4")


def unknown_filter(file: h5py.File) -> None:
    dataset = file.create_dataset("steps/0/m/output", (2,), "<f4", chunks=(2,), compression="gzip")
    dataset.id.write_direct_chunk((0,), b"no deflate stream")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        pytest.param(missing, r"\(ARC-20\)", id="missing"),
        pytest.param(a_group, r"\(ARC-20\)", id="a-group"),
        pytest.param(null_space, r"\(ARC-20\)", id="null-space"),
        pytest.param(other_size, r"\(ARC-22\)", id="other-size"),
        pytest.param(unwritten, r"never written \(ARC-23\)", id="unwritten"),
        pytest.param(unwritten_chunk, r"1 of 2 chunks are there \(ARC-23\)", id="unwritten-chunk"),
        pytest.param(a_text, "digest of its bytes", id="text"),
        pytest.param(unknown_filter, r"the chunk at \[0\] cannot be decoded", id="broken-chunk"),
    ],
)
def test_a_dataset_that_is_not_what_the_index_says_is_one_error(
    make: Callable[[h5py.File], object], reason: str, path: Path
) -> None:
    forge(path, make)
    with open_archive(path) as archive:
        for _ in range(2):
            with pytest.raises(CorruptArchiveError, match=rf"0/m/output: .*{reason}"):
                archive.read(archive.records[0])


# ---- what would take much memory


def huge_unwritten(file: h5py.File) -> None:
    file.create_dataset("steps/0/m/output", (2**40,), "<f4", chunks=(2**20,))


def huge_late(file: h5py.File) -> None:
    file.create_dataset("steps/0/m/output", (2**40,), "<f4")


def bomb(shape: tuple[int, ...], chunk: int) -> Callable[[h5py.File], object]:
    """Zeros that unpack to the whole shape from a thousandth of it: each chunk is the same few bytes."""

    def make(file: h5py.File) -> None:
        options: dict[str, Any] = {"chunks": (chunk,), "compression": "gzip"}
        dataset = file.create_dataset("steps/0/m/output", shape, "<f4", **options)
        packed = zlib.compress(bytes(4 * chunk), 9)
        for start in range(0, shape[0], chunk):
            dataset.id.write_direct_chunk((start,), packed)

    return make


@pytest.mark.parametrize(
    ("make", "shape", "expected"),
    [
        pytest.param(huge_unwritten, (2**40,), "CorruptArchiveError .*ARC-23", id="no-chunks"),
        pytest.param(huge_late, (2**40,), "CorruptArchiveError .*ARC-23", id="never-allocated"),
        pytest.param(good, (2**40,), "CorruptArchiveError .*ARC-20", id="dataset-is-small"),
        pytest.param(missing, (2**60,), "CorruptArchiveError .*ARC-20", id="dataset-is-missing"),
        pytest.param(bomb((2**27,), 2**27), (2**27,), "UnsafeFileError .*expand", id="one-huge-chunk"),
    ],
)
def test_what_would_take_much_memory_is_refused_before_it_does(
    make: Callable[[h5py.File], object], shape: tuple[int, ...], expected: str, path: Path
) -> None:
    forge(path, make, shape_=shape)
    opened, read, blocks = run(READ_ALL, path)
    assert opened == "opened 1"
    assert "do not fit into memory" in read or re.match(expected, read)
    assert re.match(expected, blocks), blocks


def test_zeros_that_unpack_to_much_are_read_in_blocks_from_an_archive_of_ours(path: Path) -> None:
    forge(path, bomb((2**26,), 2**20), shape_=(2**26,))
    opened, read, blocks = run(READ_ALL, path)
    assert opened == "opened 1"
    assert "do not fit into memory" in read
    assert blocks.startswith("CorruptArchiveError")
    assert "digest of its bytes" in blocks  # that of other bytes: all were read


@pytest.mark.parametrize("chunk", [2**20, 2**27], ids=["small-chunks", "large-chunks"])
def test_a_file_from_elsewhere_that_unpacks_to_4_gib_is_refused(chunk: int, path: Path) -> None:
    with h5py.File(path, "w") as file:
        bomb((2**30,), chunk)(file)
    assert path.stat().st_size < 8_000_000
    opened, read, blocks = run(READ_ALL, path)
    assert opened == "opened 1"
    assert "do not fit into memory" in read or read.startswith("UnsafeFileError")
    assert blocks.startswith("UnsafeFileError")


@pytest.mark.parametrize("make", [huge_unwritten, huge_late])
def test_a_file_from_elsewhere_that_claims_4_tib_is_refused(
    make: Callable[[h5py.File], object], path: Path
) -> None:
    with h5py.File(path, "w") as file:
        make(file)
    opened, read, blocks = run(READ_ALL, path)
    assert opened == "opened 1"
    assert "do not fit into memory" in read or "(ARC-23)" in read
    assert "(ARC-23)" in blocks


def test_an_index_that_claims_to_be_huge_is_refused(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("index", (), "S2000000000")
        file["x"] = np.ones(2)
    (line,) = run(READ_ALL, path)
    assert "index declares 2000000000 bytes, more than the file has" in line


# ---- shapes of the tree


def test_groups_that_contain_themselves_end(path: Path) -> None:
    with h5py.File(path, "w") as file:
        group = file.create_group("a/b")
        group["self"] = group
        group["root"] = file["/"]
        file["a/again"] = file["a"]
        group["x"] = np.array([5], "<i4")
        group["x2"] = group["x"]
    with open_archive(path) as archive:
        assert [r.key.text for r in archive.records] == ["a/b/x", "a/b/x2"]
        assert [archive.read(r).tolist() for r in archive.records] == [[5], [5]]


@pytest.mark.spec("ARC-85")
def test_an_index_of_a_group_that_is_its_own_neighbour_ends(path: Path) -> None:
    """Nodes of a version 1 B-tree name their right neighbour 16 bytes on (HDF5 file format, III.A.1)."""
    with h5py.File(path, "w", libver="earliest") as file:
        file["a/x"] = np.array([5], "<i4")
    data = bytearray(path.read_bytes())
    for node in [found.start() for found in re.finditer(b"TREE", bytes(data))]:
        data[node + 16 : node + 24] = node.to_bytes(8, "little")
    path.write_bytes(data)
    assert run(READ_ALL, path) == ["opened 1", "read", "read"]


def test_two_thousand_nested_groups_are_walked(path: Path) -> None:
    with h5py.File(path, "w") as file:
        group = file
        for _ in range(2000):
            group = group.create_group("g")
        group["x"] = np.array([5], "<i4")
    with open_archive(path) as archive:
        (record,) = archive.records
        assert record.key.text == "g/" * 2000 + "x"
        assert archive.read(record).tolist() == [5]


@pytest.mark.spec("NAM-6")
def test_a_name_that_is_too_long_for_a_key_is_one_error(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["x" * 5000] = np.ones(1)
    with pytest.raises(CorruptArchiveError, match=r"is 5000 bytes long, expected 1 to 4096 \(NAM-6\)"):
        open_archive(path)


@pytest.mark.spec("NAM-5")
def test_names_from_elsewhere_are_escaped(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_group("ok").create_dataset("a\\..\\b", data=np.ones(1))
        file["..."] = np.ones(1)
        file["$(rm -rf)\n"] = np.ones(1)
        h5py.Group(file.id)["..x"] = np.ones(1)
    with open_archive(path) as archive:
        assert sorted(r.key.text for r in archive.records) == [
            "%24%28rm%20-rf%29%0A",
            "...",
            "..x",
            "ok/a%5C..%5Cb",
        ]


@pytest.mark.spec("ARC-23")
def test_unwritten_parts_of_a_foreign_file_are_one_error_for_that_tensor(
    path: Path,
) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("chunked", (100,), "<f4", chunks=(10,))[:50] = 1.0
        file.create_dataset("late", (100,), "<f4")
        file["good"] = np.ones(3)
    with open_archive(path) as archive:
        for name, reason in (("chunked", "5 of 10 chunks are there"), ("late", "never written")):
            for read in (archive.read, lambda record: list(archive.blocks(record))):
                with pytest.raises(CorruptArchiveError, match=rf"{name}: .*{reason} \(ARC-23\)"):
                    read(archive.get(name))
        assert archive.read(archive.get("good")).tolist() == [1.0] * 3


def test_a_file_without_any_number_is_no_archive(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["a"] = "text"
        file["b"] = np.zeros(2, [("x", "i4")])
    with pytest.raises(NotAnArchiveError, match="none of its 2 HDF5 objects is a numeric dataset"):
        open_archive(path)


def test_root_hash_is_over_key_dtype_shape_and_digest() -> None:
    # b2sum -l 128 of "0/m/output\tfloat32\t2\td11372a3f8d4096998cd4bf727a9d2ae\n"
    assert root_hash([record()]) == "a86d2ffd689a4c832069d460ebd11843"


# ---- chunks

BOMB = bytes(1 << 23)
CHUNK = np.arange(1000, dtype="<f4")


def a_chunk(path: Path, values: Any = CHUNK, **options: Any) -> bytes:
    """Write a file of one chunk; return the chunk."""
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("x", data=values, chunks=values.shape, **options)
        chunk: bytes = dataset.id.read_direct_chunk((0,))[1]
    return chunk


def put_chunk(path: Path, content: bytes, values: Any = CHUNK, *, mask: int = 0, **options: Any) -> None:
    """Write a file of one chunk that has such bytes in the place of its own."""
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("x", values.shape, values.dtype, chunks=values.shape, **options)
        dataset.id.write_direct_chunk((0,), content, mask)


def plugin(name: str, **options: Any) -> dict[str, Any]:
    """A filter of hdf5plugin."""
    return dict(getattr(pytest.importorskip("hdf5plugin"), name)(**options))


GZIP: dict[str, Any] = {"compression": "gzip"}
CHUNK_FILTERS: dict[str, Callable[[], dict[str, Any]]] = {
    "gzip": lambda: {**GZIP, "shuffle": True, "fletcher32": True},
    "lzf": lambda: {"compression": "lzf", "shuffle": True},
    "szip": lambda: {"compression": "szip"},
    "checksum": lambda: {"fletcher32": True},
    "bz2": lambda: plugin("BZip2"),
    "bitshuffle": lambda: plugin("Bitshuffle"),
    "bitshuffle-zstd": lambda: plugin("Bitshuffle", cname="zstd"),
    "bitshuffle-alone": lambda: plugin("Bitshuffle", cname="none"),
    "blosc": lambda: plugin("Blosc"),
    "blosc2": lambda: {**plugin("Blosc2"), "fletcher32": True},
    "lz4": lambda: plugin("LZ4"),
    "zstd": lambda: plugin("Zstd"),
}


@pytest.mark.parametrize("case", CHUNK_FILTERS)
@pytest.mark.parametrize("kind", ["repeats", "noise", "zeros"])
def test_chunks_by_each_filter_are_read(case: str, kind: str, path: Path) -> None:
    draw = np.random.default_rng(0)
    values = {"repeats": CHUNK % 7, "noise": draw.normal(size=1000).astype("<f4"), "zeros": CHUNK * 0}[kind]
    for shape, chunks in [((1000,), (300,)), ((40, 25), (13, 11))]:
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=values.reshape(shape), chunks=chunks, **CHUNK_FILTERS[case]())
        with open_archive(path) as archive:
            np.testing.assert_array_equal(archive.load(archive.get("x")), values.reshape(shape))


@pytest.mark.parametrize("options", [{}, GZIP, {**GZIP, "shuffle": True}], ids=["alone", "gzip", "shuffled"])
def test_integers_in_as_few_bits_as_they_need_are_read_if_all_bits_are_there(
    options: dict[str, Any], path: Path
) -> None:
    values = np.arange(1000, dtype="<i4")
    a_chunk(path, values, scaleoffset=0, **options)
    with open_archive(path) as archive:
        np.testing.assert_array_equal(archive.load(archive.get("x")), values)
    chunk = a_chunk(path, values, scaleoffset=0)
    put_chunk(path, chunk[:100], values, scaleoffset=0)  # the library would go on in memory behind it
    with pytest.raises(
        CorruptArchiveError, match=r"x: the chunk at .* expected 1271 for 1000 elements of 10 b"
    ):
        read_all(path)


def read_all(path: Path) -> None:
    with open_archive(path) as archive:
        for record in archive.records:
            for _ in archive.blocks(record):
                pass


def lz4_of(size: int) -> bytes:
    return struct.pack(">QII", size, size, size) + bytes(size)  # of a block that is not compressed


PACKED: dict[str, tuple[Callable[[bytes], bytes], Callable[[], dict[str, Any]]]] = {
    "left-out": (bytes, lambda: {**GZIP, "mask": 1}),
    "checksum": (lambda data: data + bytes(4), lambda: {"fletcher32": True}),
    "gzip": (zlib.compress, lambda: GZIP),
    "bz2": (bz2.compress, lambda: plugin("BZip2")),
    "lz4": (lambda data: lz4_of(len(data)), lambda: plugin("LZ4")),
    "lzf": (lambda data: b"\0\0" + b"\xe0\xff\0" * (len(data) // 264), lambda: {"compression": "lzf"}),
    "szip": (lambda data: struct.pack("<I", len(data)) + bytes(9), lambda: {"compression": "szip"}),
    "zstd": (
        lambda data: bytes(pytest.importorskip("numcodecs").Zstd().encode(data)),
        lambda: plugin("Zstd"),
    ),
    "blosc": (
        lambda data: bytes(pytest.importorskip("numcodecs").Blosc().encode(data)),
        lambda: plugin("Blosc"),
    ),
}


@pytest.mark.spec("ARC-85")
@pytest.mark.parametrize("case", PACKED)
@pytest.mark.parametrize("size", [100, 1 << 20])
def test_a_chunk_that_decodes_to_more_or_less_than_its_elements_is_refused(
    case: str, size: int, path: Path
) -> None:
    """Of less the library would give what lies in memory behind it, of more it would make room for all."""
    pack, options = PACKED[case]
    put_chunk(path, pack(bytes(size)), **options())
    with pytest.raises(
        CorruptArchiveError, match=r"x: the chunk at \[0\] (decodes to|has) .* 4000 "
    ) as caught:
        read_all(path)
    assert "\n" not in str(caught.value)


def test_a_chunk_without_filters_that_has_fewer_bytes_than_its_elements_is_refused(path: Path) -> None:
    put_chunk(path, bytes(100))
    with pytest.raises(
        CorruptArchiveError, match=r"x: the chunk at \[0\] decodes to 100, expected 4000 bytes"
    ):
        read_all(path)


@pytest.mark.parametrize("case", ["gzip", "lzf", "bz2", "lz4", "zstd", "blosc", "blosc2", "bitshuffle"])
@pytest.mark.parametrize("by", [1, 20])
def test_a_chunk_that_is_cut_short_is_refused(case: str, by: int, path: Path) -> None:
    options = CHUNK_FILTERS[case]()
    options.pop("fletcher32", None)
    values = np.random.default_rng(0).integers(0, 99, 1003).astype("<f4")
    put_chunk(path, a_chunk(path, values, **options)[:-by], values, **options)
    with pytest.raises(
        CorruptArchiveError, match=r"x: the chunk at \[0\] (cannot be decoded: it|decodes to) "
    ):
        read_all(path)


def test_a_chunk_by_a_filter_that_does_not_say_its_size_is_refused(path: Path) -> None:
    a_chunk(path, **plugin("Zfp", reversible=True))
    with pytest.raises(
        ReadError, match="x: of what HDF5 filters 32013 make of its chunks the size is not known"
    ):
        read_all(path)


def test_a_chunk_of_our_archive_that_another_tool_packed_is_looked_at_too(path: Path) -> None:
    write_small(path)
    with h5py.File(path, "a") as file:
        bits = file["steps/0/m.0/output"][...]
        del file["steps/0/m.0/output"]
        dataset = file.create_dataset("steps/0/m.0/output", data=bits, chunks=bits.shape, **GZIP)
        dataset.id.write_direct_chunk((0,) * bits.ndim, zlib.compress(BOMB))
    with pytest.raises(CorruptArchiveError, match=r"m\.0/output: the chunk at .* has .* more than the"):
        read_all(path)


@pytest.mark.spec("ARC-85")
def test_a_group_of_compressed_names_is_refused(path: Path) -> None:
    """Names lie in a heap that may have filters: 522 kB took 512 MiB before its checksum was found wrong."""
    properties = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
    filters = h5py.h5p.PropDCID(properties.id)
    h5py.h5i.inc_ref(filters)
    filters.set_deflate(6)
    with h5py.File(path, "w", libver="latest") as file:
        file["x"] = CHUNK
        group = h5py.Group(h5py.h5g.create(file.id, b"g", gcpl=properties))
        for number in range(20):
            group[f"x{number}"] = file["x"]
    with pytest.raises(UnsafeFileError, match="the names in group '/g' are compressed"):
        read_all(path)


def test_a_zstd_chunk_that_is_damaged_is_refused(path: Path) -> None:
    """The filter of hdf5plugin takes the number of an error for a size, and gives what its memory holds."""
    pytest.importorskip("numcodecs")
    options = plugin("Zstd")
    chunk = bytearray(a_chunk(path, np.sin(CHUNK).round(1), **options))
    chunk[len(chunk) // 2 :] = bytes(len(chunk) - len(chunk) // 2)
    put_chunk(path, bytes(chunk), **options)
    with pytest.raises(CorruptArchiveError, match=r"x: the chunk at \[0\] cannot be decoded: Zstd"):
        read_all(path)
