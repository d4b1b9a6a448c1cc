""".max files that lie, and dumps that lead astray."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path

import pytest

from tensorcap_formats.errors import (
    CorruptArchiveError,
    NewerVersionError,
    NotAnArchiveError,
    ReadError,
    UnsafeFileError,
)
from tensorcap_formats.open import open_archive

MAGIC = bytes.fromhex("93f09f94a52b2b93")


def made(
    *,
    version: tuple[int, int] = (0, 1),
    metadata: int | None = None,
    label: bytes = b"x",
    label_size: int | None = None,
    code: int = 81,
    shape: tuple[int, ...] = (1,),
    rank: int | None = None,
    offset: int | None = None,
    data: bytes = b"\0\0\x80\x3f",
) -> bytes:
    count = len(shape) if rank is None else rank
    size = 4 + len(label) + 2 + 4 * count + 8
    return (
        MAGIC
        + struct.pack("<IIQ", *version, size if metadata is None else metadata)
        + struct.pack("<I", len(label) if label_size is None else label_size)
        + label
        + bytes([code, count])
        + struct.pack(f"<{len(shape)}I", *shape)
        + struct.pack("<Q", 24 + size if offset is None else offset)
        + data
    )


CASES: dict[str, tuple[bytes, type[ReadError], str]] = {
    "empty": (b"", NotAnArchiveError, "begins with b''"),
    "half-a-magic": (MAGIC[:5], NotAnArchiveError, "begins with"),
    "wrong-magic": (b"x" + made()[1:], NotAnArchiveError, "begins with"),
    "magic-only": (MAGIC, CorruptArchiveError, "has 8 bytes, expected at least 28"),
    "cut-before-the-label-ends": (made(label=b"abc")[:30], CorruptArchiveError, "has 30 bytes, expected"),
    "cut-in-the-shape": (made(shape=(1, 1))[:36], CorruptArchiveError, "has 36 bytes, expected"),
    "cut-in-the-elements": (made()[:-1], CorruptArchiveError, "has 46 bytes, expected 47"),
    "one-byte-more": (made() + b"\0", CorruptArchiveError, "has 48 bytes, expected 47"),
    "newer-version": (made(version=(1, 0)), NewerVersionError, r"is of version 1.0, expected 0"),
    "two-tensors": (made(metadata=38), NotAnArchiveError, "has 38 bytes of metadata, expected 19"),
    "metadata-of-2-to-the-64": (made(metadata=2**64 - 1), NotAnArchiveError, "bytes of metadata, expected"),
    "metadata-too-small": (made(metadata=0), NotAnArchiveError, "has 0 bytes of metadata"),
    "label-of-4-GiB": (made(label_size=2**32 - 1), CorruptArchiveError, "a label of 4294967295 bytes"),
    "no-label": (made(label=b""), CorruptArchiveError, "a label of 0 bytes"),
    "label-no-utf8": (made(label=b"\xff\xfe"), CorruptArchiveError, "is no UTF-8"),
    "rank-255": (made(shape=(1,) * 255), CorruptArchiveError, "expected up to 32 sizes"),
    "rank-255-of-a-short-file": (made(rank=255), CorruptArchiveError, "bytes, expected at least"),
    "shape-overflows": (made(shape=(2**32 - 1,) * 4), CorruptArchiveError, "expected up to 32 sizes"),
    "shape-overflows-to-nothing": (
        made(shape=(2**31,) * 31 + (4,)),
        CorruptArchiveError,
        "expected up to 32 sizes",
    ),
    "shape-larger-than-the-file": (
        made(shape=(2**31, 2**20)),
        CorruptArchiveError,
        "has 51 bytes, expected 9007199254741039",
    ),
    "absurd-beside-an-empty-axis": (made(shape=(0, 2**32 - 1, 2**32 - 1)), CorruptArchiveError, "32 sizes"),
    "elements-in-the-header": (made(offset=0), CorruptArchiveError, "begin at byte 0, expected 43 or later"),
    "elements-that-begin-in-the-header": (
        made(offset=40, data=b"\0"),
        CorruptArchiveError,
        "begin at byte 40, expected 43 or later",
    ),
    "elements-behind-the-file": (made(offset=2**63), CorruptArchiveError, "has 47 bytes, expected"),
    "code-0": (made(code=0), NotAnArchiveError, "dtype code 0 is unknown"),
    "code-255": (made(code=255), NotAnArchiveError, "dtype code 255 is unknown"),
}


@pytest.mark.spec("MXF-2", "MXF-3", "MXF-4", "MXF-5", "MXF-7")
@pytest.mark.parametrize("case", CASES)
def test_files_that_lie_are_refused_in_one_line(tmp_path: Path, case: str) -> None:
    data, kind, message = CASES[case]
    path = tmp_path / "x.max"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(kind, match=message) as caught:
            open_archive(path)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()
    assert type(caught.value) is kind
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.spec("MXF-3")
def test_a_newer_minor_version_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.max").write_bytes(made(version=(0, 9)))
    with open_archive(tmp_path / "x.max") as archive:
        assert archive.read(archive.records[0]).tolist() == [1.0]


def test_a_file_that_is_written_over_while_it_is_open_is_not_read_as_before(tmp_path: Path) -> None:
    path = tmp_path / "x.max"
    path.write_bytes(made())
    with open_archive(path) as archive:
        path.write_bytes(made(shape=(2,), data=bytes(8)))
        with pytest.raises(CorruptArchiveError, match="has 51 bytes, 47 when it was opened"):
            archive.read(archive.records[0])


def test_a_link_out_of_a_dump_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret.max").write_bytes(made())
    folder = tmp_path / "dump"
    folder.mkdir()
    (folder / "a-output.max").symlink_to(tmp_path / "secret.max")
    with pytest.raises(UnsafeFileError, match="is a link to a file outside of"):
        open_archive(folder)


def test_a_pickle_in_a_dump_runs_no_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return open, (str(tmp_path / "ran"), "w")

    import pickle

    folder = tmp_path / "dump"
    folder.mkdir()
    (folder / "a-output.pt").write_bytes(pickle.dumps(Evil()))
    (folder / "b-output.max").write_bytes(made())
    with open_archive(folder) as archive:
        assert "is a bare pickle" in archive.skipped["a-output.pt"]
        assert not archive.is_complete
    assert not (tmp_path / "ran").exists()


def test_names_that_are_no_text_are_reported_and_harm_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    folder.mkdir()
    (folder / "a-output.max").write_bytes(made())
    with open(os.fsencode(folder) + b"/\xff-output.max", "wb") as file:
        file.write(made())
    with open_archive(folder) as archive:
        assert len(archive) == 2
