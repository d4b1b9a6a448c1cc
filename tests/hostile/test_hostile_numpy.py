""".npy and .npz files that lie, run code, or explode."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensorcap_formats.conversion import convert
from tensorcap_formats.errors import CorruptArchiveError, NotAnArchiveError, ReadError, UnsafeFileError
from tensorcap_formats.open import open_archive


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self.path), "w")  # harmless stand-in for a payload: creates a file


def npy(header: str, data: bytes = b"", *, version: int = 1, length: int | None = None) -> bytes:
    text = header.encode("latin-1")
    size = struct.pack("<H" if version == 1 else "<I", len(text) if length is None else length)
    return b"\x93NUMPY" + bytes([version, 0]) + size + text + data


def fields(descr: str = "'<f4'", order: str = "False", shape: str = "(1,)") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n"


CASES: dict[str, tuple[bytes, type[ReadError], str]] = {
    "magic-only": (b"\x93NUMPY", CorruptArchiveError, "begins with"),
    "version-9": (npy(fields(), version=9), CorruptArchiveError, "version is 9"),
    "header-cut": (npy(fields(), length=60_000), CorruptArchiveError, "header claims 60000 bytes"),
    "header-of-4-GiB": (
        npy(fields(), version=2, length=2**32 - 1),
        CorruptArchiveError,
        "header claims 4294967295 bytes",
    ),
    "header-code": (
        npy("__import__('os').system('true')"),
        CorruptArchiveError,
        "header is no Python literal",
    ),
    "header-deep": (npy("(" * 9000), CorruptArchiveError, "header is no Python literal"),
    "header-unhashable": (npy("{[]: 1}"), CorruptArchiveError, "header is no Python literal"),
    "header-nul": (npy("{\0}"), CorruptArchiveError, "header is no Python literal"),
    "header-a-list": (npy("[1]"), CorruptArchiveError, "header lacks"),
    "field-missing": (npy("{'descr': '<f4', 'shape': (1,)}"), CorruptArchiveError, "header lacks"),
    "shape-a-list": (npy(fields(shape="[1]")), CorruptArchiveError, r"shape is \[1\], expected a tuple"),
    "shape-negative": (npy(fields(shape="(-1,)")), CorruptArchiveError, "ARC-34"),
    "shape-true": (npy(fields(shape="(True,)")), CorruptArchiveError, "ARC-34"),
    "shape-absurd": (npy(fields(shape="(2**62,)")), CorruptArchiveError, "header is no Python literal"),
    "shape-huge": (npy(fields(shape=f"({2**62}, {2**62})")), CorruptArchiveError, "ARC-34"),
    "shape-empty-but-huge": (npy(fields(shape=f"(0, {2**62}, {2**62})")), CorruptArchiveError, "ARC-34"),
    "order-a-number": (npy(fields(order="7")), CorruptArchiveError, "fortran_order is 7"),
    "claims-4-GiB": (
        npy(fields(shape="(1073741824,)")),
        CorruptArchiveError,
        r"bytes, expected \d+ for <f4 of shape",
    ),
    "data-short": (npy(fields(), bytes(3)), CorruptArchiveError, "bytes, expected"),
    "data-long": (npy(fields(), bytes(5)), CorruptArchiveError, "bytes, expected"),
    "objects": (npy(fields("'|O'")), UnsafeFileError, "stored by pickle, which may run code"),
    "objects-in-a-structure": (npy(fields("[('a', '<f4'), ('b', '|O')]")), UnsafeFileError, "by pickle"),
    "descr-a-number": (npy(fields("5")), NotAnArchiveError, "holds '5', expected numbers"),
    "descr-unknown": (npy(fields("'<f16'")), NotAnArchiveError, "dtype '<f16' is no tensor dtype"),
    "descr-long": (npy(fields(repr("x" * 5000))), NotAnArchiveError, "is no tensor dtype"),
}


@pytest.mark.parametrize("inside", ["npy", "npz", "folder"])
@pytest.mark.parametrize("case", CASES)
def test_a_lie_is_one_line_and_allocates_nothing(tmp_path: Path, case: str, inside: str) -> None:
    data, error, reason = CASES[case]
    if case == "descr-a-number" and inside != "npy":
        error, reason = NotAnArchiveError, "holds no .npy"
    path = tmp_path / ("x" if inside == "folder" else f"x.{inside}")
    if inside == "npy":
        path.write_bytes(data)
    elif inside == "folder":
        path.mkdir()
        (path / "x.npy").write_bytes(data)
    else:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr("x.npy", data)
    tracemalloc.start()
    try:
        with pytest.raises(error, match=reason) as caught:
            open_archive(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_an_array_of_objects_runs_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    np.save(tmp_path / "x.npy", np.array([Evil(marker)], dtype=object), allow_pickle=True)
    with pytest.raises(UnsafeFileError, match="is an array of Python objects") as caught:
        open_archive(tmp_path / "x.npy")
    assert caught.value.hint is not None
    assert not marker.exists()


def member(
    name: str = "x.npy", *, array: np.ndarray[Any, Any] | None = None, method: int = zipfile.ZIP_DEFLATED
) -> bytes:
    data, out = io.BytesIO(), io.BytesIO()
    np.save(data, np.arange(1000.0) if array is None else array)
    with zipfile.ZipFile(out, "w", method) as file:
        file.writestr(name, data.getvalue())
    return out.getvalue()


def patched(data: bytes, field: str, value: bytes) -> bytes:
    """A zip file with one field of its central directory changed."""
    at = (
        data.index(b"PK\1\2")
        + {"flags": 8, "method": 10, "crc": 16, "packed": 20, "size": 24, "offset": 42}[field]
    )
    return data[:at] + value + data[at + len(value) :]


STORED = zipfile.ZIP_STORED
ZIPS: dict[str, tuple[Callable[[], bytes], type[ReadError], str]] = {
    "encrypted": (lambda: patched(member(), "flags", b"\1\0"), NotAnArchiveError, "is encrypted"),
    "bzip2": (lambda: member(method=zipfile.ZIP_BZIP2), NotAnArchiveError, "compressed by method 12"),
    "size-of-4-GiB": (
        lambda: patched(member(), "size", struct.pack("<I", 2**32 - 2)),
        UnsafeFileError,
        "claim to expand to 4294967294",
    ),
    "size-other-than-the-header-says": (
        lambda: patched(member(array=np.ones(9000)), "size", struct.pack("<I", 72200)),
        CorruptArchiveError,
        "has 72200 bytes, expected 72128",
    ),
    "crc": (lambda: patched(member(), "crc", b"\0\0\0\0"), CorruptArchiveError, "Bad CRC-32"),
    "stored-outside-the-file": (
        lambda: patched(
            patched(member(method=STORED), "size", struct.pack("<I", 10**8)),
            "packed",
            struct.pack("<I", 10**8),
        ),
        CorruptArchiveError,
        "do not fit into the file",
    ),
    "offset": (
        lambda: patched(member(method=STORED), "offset", struct.pack("<I", 7)),
        CorruptArchiveError,
        "there is no member at byte 7",
    ),
    "not-a-zip": (lambda: b"PK\3\4" + bytes(100), NotAnArchiveError, "is no zip file"),
    "cut": (lambda: member()[:-30], NotAnArchiveError, "is no zip file"),
    "no-arrays": (lambda: member("readme.txt"), NotAnArchiveError, "holds no .npy array"),
    "no-npy-inside": (
        lambda: member()[:0] + _zip("big.npy", bytes(50_000_000)),
        CorruptArchiveError,
        r"begins with b'\\x00",
    ),
    "dtypes-no-json": (lambda: _zip("__dtypes__.json", b"["), CorruptArchiveError, "is not JSON"),
    "dtypes-unknown": (
        lambda: _zip("__dtypes__.json", b'{"x":"float7"}'),
        CorruptArchiveError,
        "dtype 'float7' is unknown",
    ),
    "dtypes-of-another-size": (
        lambda: _zip("__dtypes__.json", b'{"x":"bfloat16"}', **{"x.npy": npy(fields(), bytes(4))}),
        CorruptArchiveError,
        "holds float32, expected the bits of bfloat16",
    ),
}


def _zip(name: str, data: bytes, **more: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for key, value in {name: data, **more}.items():
            file.writestr(key, value)
    return out.getvalue()


@pytest.mark.parametrize("case", ZIPS)
def test_a_zip_file_that_lies_is_refused(tmp_path: Path, case: str) -> None:
    make, error, reason = ZIPS[case]
    path = tmp_path / "x.npz"
    path.write_bytes(make())
    tracemalloc.start()
    try:
        with pytest.raises(error, match=reason):
            _read_all(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000


def _read_all(path: Path) -> None:
    with open_archive(path) as archive:
        for record in archive.records:
            for _ in archive.blocks(record):
                pass


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_members_of_one_name_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as file:
        for value in (1, 2):
            data = io.BytesIO()
            np.save(data, np.array([value]))
            file.writestr("x.npy", data.getvalue())
    with pytest.raises(CorruptArchiveError, match="two members have one name"):
        open_archive(tmp_path / "x.npz")


def test_a_bomb_in_zeros_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """512 MiB of zeros in half a megabyte, right in every field."""
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as file:  # noqa: SIM117
        with file.open("x.npy", "w", force_zip64=True) as out:
            out.write(npy(fields(shape=f"({2**27},)")))
            for _ in range(512):
                out.write(bytes(2**20))
    tracemalloc.start()
    try:
        with pytest.raises(UnsafeFileError, match="claim to expand to"):
            open_archive(tmp_path / "x.npz")
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["../../evil", "/abs/evil", "a\\..\\b", "ok/../../evil2", "x" * 5000])
def test_no_name_of_a_member_leads_out(tmp_path: Path, name: str) -> None:
    (tmp_path / "deep" / "out").mkdir(parents=True)
    (tmp_path / "x.npz").write_bytes(member(f"{name}.npy"))
    if len(name) == 5000:
        with pytest.raises(CorruptArchiveError, match="is 5000 bytes long"):
            open_archive(tmp_path / "x.npz")
        return
    with open_archive(tmp_path / "x.npz") as archive:
        for container in ("zarr", "h5", "npz"):
            convert(archive, tmp_path / "deep" / "out" / f"y.{container}")
    with zipfile.ZipFile(tmp_path / "deep" / "out" / "y.npz") as file:
        assert not any(n.startswith("/") or ".." in n.split("/") or "\\" in n for n in file.namelist())
    everything = {p.relative_to(tmp_path).parts[0] for p in tmp_path.rglob("*")}
    assert everything == {"deep", "x.npz"}
    assert {p.name for p in (tmp_path / "deep").iterdir()} == {"out"}
    assert {p.name for p in (tmp_path / "deep" / "out").iterdir()} == {"y.zarr", "y.h5", "y.npz"}


def test_a_link_out_of_a_folder_is_not_followed(tmp_path: Path) -> None:
    np.save(tmp_path / "secret.npy", np.ones(1))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.npy").symlink_to(tmp_path / "secret.npy")
    with pytest.raises(UnsafeFileError, match="is a link to a file outside"):
        open_archive(tmp_path / "folder")


def test_a_file_that_shrinks_while_it_is_open_is_an_error(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones(100))
    with open_archive(tmp_path / "x.npy") as archive:
        (tmp_path / "x.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:-8])
        with pytest.raises(CorruptArchiveError, match="when it was opened"):
            archive.read(archive.records[0])
