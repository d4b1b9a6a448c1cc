"""What lies at a path is told from its content; everything that cannot be opened is one error."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tensorcap_formats.dtypes import dtype
from tensorcap_formats.errors import NotAnArchiveError, ReadError, UnfinishedArchiveError
from tensorcap_formats.keys import Key
from tensorcap_formats.open import open_archive
from tensorcap_formats.writing import Writer


def write(path: Path, container: str | None = None) -> Path:
    writer = Writer(path, container=container)
    writer.add(Key("m", "output"), np.array([1, 2], "<f4"), dtype("float32"), (2,))
    return writer.close()


def open_files() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("container", ["hdf5", "safetensors"])
@pytest.mark.parametrize("name", ["run", "run.dat", "run.pt", "run.npz", "run.zarr", "run.h5"])
def test_an_archive_under_any_name_is_opened_as_what_it_is(container: str, name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "run", container).rename(tmp_path / name)
    with open_archive(path) as archive:
        assert (archive.container, archive.is_foreign) == (container, False)
        assert archive.read(archive.records[0]).tolist() == [1.0, 2.0]
    with open_archive(str(path)) as archive:
        assert archive.path == path


def test_a_link_to_an_archive_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link.h5").symlink_to(write(tmp_path / "run.h5"))
    with open_archive(tmp_path / "link.h5") as archive:
        assert len(archive) == 1


def make_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("readme.txt", "no tensors")


def make_folder(path: Path) -> None:
    path.mkdir()
    (path / "a.txt").write_text("a")


NOT_ARCHIVES: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "empty": lambda path: path.write_bytes(b""),
    "one-byte": lambda path: path.write_bytes(b"\x89"),
    "text": lambda path: path.write_text("import torch\n" * 100),
    "json": lambda path: path.write_text('{"weights": [1, 2]}'),
    "random": lambda path: path.write_bytes(np.random.default_rng(0).bytes(10_000)),
    "zip": make_zip,
    "broken-zip": lambda path: path.write_bytes(b"PK\x03\x04" + bytes(100)),
    "empty-folder": lambda path: path.mkdir(),
    "folder-of-text": make_folder,
    "pipe": lambda path: os.mkfifo(path),
    "link-to-nothing": lambda path: path.symlink_to("nowhere"),
    "link-to-itself": lambda path: path.symlink_to(path),
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", list(NOT_ARCHIVES))
def test_what_is_no_archive_is_one_error_and_nothing_stays_open(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    NOT_ARCHIVES[kind](path)
    before = open_files()
    with pytest.raises(NotAnArchiveError) as caught:
        open_archive(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert open_files() == before


@pytest.mark.parametrize("text", ["a\0b", "x" * 5000, "", "\udcff", "/proc/self/mem/x"], ids=repr)
def test_a_path_that_cannot_be_is_one_error(text: str) -> None:
    with pytest.raises(ReadError):
        open_archive(text)


def test_a_file_of_zeros_is_taken_for_an_unfinished_archive(tmp_path: Path) -> None:
    (tmp_path / "run.h5").write_bytes(bytes(5000))
    with pytest.raises(UnfinishedArchiveError, match="begins with zeros"):
        open_archive(tmp_path / "run.h5")


def test_a_file_that_the_system_refuses_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "run.h5")
    real = os.open

    def refuse(name: str | Path, *rest: int) -> int:
        if Path(name) == path:
            raise PermissionError(13, "Permission denied")
        return real(name, *rest)

    with monkeypatch.context() as patched:
        patched.setattr("os.open", refuse)
        with pytest.raises(ReadError, match="cannot be opened: Permission denied"):
            open_archive(path)
        patched.setattr("os.listdir", lambda path: refuse(tmp_path / "run.h5"))
        with pytest.raises(ReadError, match="cannot be opened: Permission denied"):
            open_archive(tmp_path)
