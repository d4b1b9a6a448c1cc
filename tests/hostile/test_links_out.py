"""Nothing outside of the folder that was given is opened, whichever of its files or folders is a link."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorcap_formats.errors import TensorcapError, UnsafeFileError
from tensorcap_formats.foreign import read_asset
from tests.hostile.containers import CONTAINERS, available
from tests.hostile.fuzzing.runner import Guard, read_all


@pytest.fixture(scope="module")
def guard() -> Guard:
    guard = Guard()
    sys.addaudithook(guard)  # for good, and idle but while it watches
    return guard


def parts(folder: Path) -> Iterator[Path]:
    """All files and folders below a folder."""
    return (path for path in sorted(folder.rglob("*")))


def outcome(path: Path) -> str:
    """The error of reading everything, "" if there is none."""
    try:
        read_all(path)
    except TensorcapError as error:
        return str(error)
    return ""


FOLDERS = [
    name for name in available() if CONTAINERS[name].name in {"run", "run.zarr", "run.aimodelintermediates"}
]


@pytest.mark.parametrize("name", FOLDERS)
def test_no_link_leads_out(name: str, tmp_path: Path, guard: Guard) -> None:
    work = tmp_path / "work"
    work.mkdir()
    CONTAINERS[name].write(work)
    folder, outside = work / CONTAINERS[name].name, tmp_path / "elsewhere"
    assert outcome(folder) == ""
    for path in parts(folder):
        for target in (outside, Path(os.path.relpath(outside, path.parent))):
            path.rename(outside)  # with the very content, which would be taken
            path.symlink_to(target)
            with guard.watching(work):  # the journal of an archive is beside it
                message = outcome(folder)
            assert "\n" not in message, path
            path.unlink()
            outside.rename(path)
    assert outcome(folder) == ""


@pytest.mark.parametrize("name", FOLDERS)
def test_no_pipe_and_no_device_is_waited_for(name: str, tmp_path: Path, guard: Guard) -> None:
    CONTAINERS[name].write(tmp_path)
    folder = tmp_path / CONTAINERS[name].name
    for path in parts(folder):
        if path.is_dir():
            continue
        content = path.read_bytes()
        for put in (
            os.mkfifo,
            lambda place: os.symlink("/dev/zero", place),
            lambda place: os.symlink(place, place),
        ):
            path.unlink()
            put(path)
            with guard.watching(tmp_path):
                assert "\n" not in outcome(folder)
        path.unlink()
        path.write_bytes(content)
    assert outcome(folder) == ""


@pytest.mark.parametrize("name", ["main.mlirb", "main.hash", "metadata.json"])
def test_no_link_leads_out_of_an_asset(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "net.aimodel"
    folder.mkdir()
    for file, content in (("main.mlirb", "program"), ("main.hash", "x" * 32), ("metadata.json", "{}")):
        (folder / file).write_text(content)
    assert read_asset(folder).nbytes == 7
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to("../elsewhere")
    with pytest.raises(UnsafeFileError, match="is a link to a file outside of"):
        read_asset(folder)
