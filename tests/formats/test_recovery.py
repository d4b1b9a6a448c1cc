"""Recovery: a capture killed at any moment gives back every tensor that its journal confirmed."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import tensorcap_formats
from tensorcap_formats.dtypes import dtype
from tensorcap_formats.errors import ReadError, UnfinishedArchiveError, WriteError
from tensorcap_formats.keys import Key
from tensorcap_formats.open import open_archive
from tensorcap_formats.output_path import journal_path, partial_path
from tensorcap_formats.writing import Writer, recover
from tests.support.progress import RecordedProgress

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(tensorcap_formats.__file__).parents[1])}
KILLS = 30
QUICK = 6
CONTENT = '''
import numpy as np

def content(seed, number):
    """The bits of tensor `number`, the same in every process; every fifth repeats the one before."""
    if number % 5 == 4:
        number -= 1
    random = np.random.default_rng([seed, number])
    size = random.choice([0, 1, 7, 100, 1000, 5000, 20000, 70000])
    return random.integers(0, 2**32, size, np.uint32).view("<f4")
'''
CAPTURE = (
    CONTENT
    + """
import os, sys
from tensorcap_formats.dtypes import dtype
from tensorcap_formats.keys import Key
from tensorcap_formats.writing import Writer

def say(text):
    os.write(1, f"{text}\\n".encode())

path, seed, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
writer = Writer(path, run={"seed": seed})
for number in range(count):
    bits = content(seed, number)
    writer.add(Key(f"layers.{number}", "output"), bits, dtype("float32"), bits.shape)
    if number % 20 == 0:
        bits = bits[::2].copy()
        blocks = np.array_split(bits, 3)
        writer.add_blocks(Key(f"half.{number}", "output"), blocks, dtype("float32"), bits.shape)
    say(writer.records_count)
for number in range(4000):
    writer.add(Key(f"tiny.{number}", "output"), bits[:0], dtype("float32"), (0,))
say(writer.records_count)
say("closing")
writer.close()
say("closed")
"""
)
RECOVER = """
import os, sys
from tensorcap_formats.writing import recover

os.write(1, b"recovering\\n")
recover(sys.argv[1])
os.write(1, b"recovered\\n")
"""

namespace: dict[str, Any] = {}
exec(CONTENT, namespace)
content = namespace["content"]


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE)


def kill_after(child: subprocess.Popen[str], line: str, seconds: float) -> list[str]:
    """Kill the child some time after it said `line`; return all that it said."""
    lines = []
    assert child.stdout is not None
    for text in child.stdout:
        lines.append(text.strip())
        if lines[-1] == line:
            break
    time.sleep(seconds)
    child.kill()
    lines += [text.strip() for text in child.stdout]
    child.stdout.close()
    child.wait()
    return lines


def assert_nothing_opens(path: Path) -> None:
    with pytest.raises(UnfinishedArchiveError, match="its writer died before it was complete"):
        open_archive(path)
    with pytest.raises(ReadError):
        open_archive(partial_path(path))
    with pytest.raises(OSError, match="signature not found"):
        h5py.File(partial_path(path))


def is_hdf5(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(8) == b"\x89HDF\r\n\x1a\n"


def assert_content(path: Path, seed: int) -> int:
    with open_archive(path) as archive:
        for record in archive.records:
            kind, _, number = record.key.site.partition(".")
            expected = content(seed, int(number)) if kind != "tiny" else np.empty(0, "<f4")
            expected = expected[::2] if kind == "half" else expected
            assert archive.read(record).tobytes() == expected.tobytes(), record.key.text
        return len(archive)


def moments() -> list[Any]:
    return [
        pytest.param(seed, id=f"kill{seed}", marks=[] if seed < QUICK else pytest.mark.slow)
        for seed in range(KILLS)
    ]


@pytest.mark.spec("ARC-40", "ARC-52", "ARC-53")
@pytest.mark.parametrize("seed", moments())
def test_a_capture_killed_at_any_moment_loses_nothing_that_was_confirmed(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    draw = random.Random(seed)
    in_close = seed % 3 == 2
    child = start(CAPTURE, path, seed, 20 if in_close else 10_000)
    lines = kill_after(child, "closing" if in_close else "2", draw.uniform(0, 0.3 if in_close else 0.4))
    confirmed = max((int(text) for text in lines if text.isdecimal()), default=0)

    if journal_path(path).exists():
        if partial_path(path).exists() and not is_hdf5(partial_path(path)):
            assert_nothing_opens(path)
        for _ in range(2):  # recovery may be killed too
            child = start(RECOVER, path)
            kill_after(child, "recovering", draw.uniform(0, 0.1))
            if not journal_path(path).exists():
                break
        else:
            assert recover(path).lost == 0
    assert assert_content(path, seed) >= confirmed
    assert os.listdir(tmp_path) == ["run.h5"]
    with h5py.File(path) as file:
        assert file["steps/0/layers.0/output"][...].tobytes() == content(seed, 0).tobytes()


def capture(path: Path, count: int = 3) -> None:
    """Leave an unfinished capture of `count` tensors."""
    writer = Writer(path, run={"seed": 5})
    for i in range(count):
        writer.add(Key(f"m.{i}", "output"), np.full(100, i, "<f4"), dtype("float32"), (100,))
    writer.add_value("0/m.0/input.mask", None)
    writer.abandon()


def finish_without_rename(path: Path, monkeypatch: pytest.MonkeyPatch, *, complete: bool) -> None:
    """Leave what a kill between the superblock and the rename leaves."""

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    module = "writer" if complete else "recovery"
    with monkeypatch.context() as patched:
        patched.setattr(f"tensorcap_formats.writing.{module}.publish", killed)
        if not complete:
            capture(path)
            with pytest.raises(KeyboardInterrupt):
                recover(path, output=path.with_name("elsewhere.h5"))
            return
        writer = Writer(path)
        writer.add(Key("new", "output"), np.ones(2, "<f4"), dtype("float32"), (2,))
        with pytest.raises(KeyboardInterrupt):
            writer.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.h5"


@pytest.mark.spec("ARC-53")
def test_a_recovered_archive_says_that_it_is_not_complete(path: Path) -> None:
    capture(path)
    progress = RecordedProgress()
    recovered = recover(path, progress=progress)
    assert (recovered.path, recovered.records, recovered.lost, recovered.torn, recovered.was_complete) == (
        path,
        3,
        0,
        0,
        False,
    )
    assert progress.stages == ["checking"]
    assert progress.advances == [(400, 1200), (800, 1200), (1200, 1200)]
    with open_archive(path) as archive:
        assert not archive.is_complete
        assert archive.values == {"0/m.0/input.mask": None}
        assert archive.run["seed"] == 5
        assert archive.run["error"] == {
            "type": "Killed",
            "message": "the writer ended before the archive was complete, 3 tensors are left",
            "last_point": "0/m.2/output",
        }


@pytest.mark.spec("ARC-53")
def test_a_tensor_with_altered_bytes_is_lost_and_those_that_share_its_bytes_too(path: Path) -> None:
    writer = Writer(path)
    for i, value in enumerate([0, 1, 1, 2]):
        writer.add(Key(f"m.{i}", "output"), np.full(100, value, "<f4"), dtype("float32"), (100,))
    writer.abandon()
    with partial_path(path).open("r+b") as file:
        file.seek(2048 + 448 + 10)  # in the second of the three tensors that are stored
        file.write(b"\xaa")
    recovered = recover(path)
    assert (recovered.records, recovered.lost) == (2, 2)
    with open_archive(path) as archive:
        assert [r.key.site for r in archive.records] == ["m.0", "m.3"]
        assert [archive.read(r)[0] for r in archive.records] == [0.0, 2.0]


def test_an_incomplete_archive_never_replaces_the_one_before(path: Path) -> None:
    writer = Writer(path)
    writer.add(Key("previous", "output"), np.ones(2, "<f4"), dtype("float32"), (2,))
    writer.close()
    previous = path.read_bytes()
    capture(path)
    with pytest.raises(WriteError, match="which an incomplete one does not replace") as caught:
        recover(path)
    assert caught.value.hint == "Give another path with -o."
    assert path.read_bytes() == previous
    assert recover(path, output=path.with_name("saved.h5")).records == 3
    assert path.read_bytes() == previous


def test_a_complete_archive_that_was_not_renamed_replaces_the_one_before(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(path)
    writer.add(Key("previous", "output"), np.ones(2, "<f4"), dtype("float32"), (2,))
    writer.close()
    finish_without_rename(path, monkeypatch, complete=True)
    recovered = recover(path)
    assert (recovered.records, recovered.lost, recovered.was_complete) == (1, 0, True)
    with open_archive(path) as archive:
        assert ([r.key.site for r in archive.records], archive.is_complete) == (["new"], True)


def test_a_killed_recovery_is_not_taken_for_a_complete_archive(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Writer(path)
    writer.add(Key("previous", "output"), np.ones(2, "<f4"), dtype("float32"), (2,))
    writer.close()
    finish_without_rename(path, monkeypatch, complete=False)
    with pytest.raises(WriteError, match="which an incomplete one does not replace"):
        recover(path)
    recovered = recover(path, output=path.with_name("saved.h5"))
    assert (recovered.records, recovered.lost, recovered.was_complete) == (3, 0, False)


def test_a_writer_killed_after_the_rename_leaves_only_its_journal_to_remove(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish_without_rename(path, monkeypatch, complete=True)
    partial_path(path).rename(path)
    recovered = recover(path)
    assert (recovered.records, recovered.lost, recovered.was_complete) == (1, 0, True)
    assert os.listdir(path.parent) == ["run.h5"]


def test_there_is_nothing_to_recover_where_nothing_was_written(path: Path) -> None:
    with pytest.raises(UnfinishedArchiveError, match=r"there is no run\.h5\.journal, nothing to recover"):
        recover(path)
    capture(path, 0)
    with pytest.raises(UnfinishedArchiveError, match="the journal confirms no tensor") as caught:
        recover(path)
    assert caught.value.hint == "Delete run.h5.journal and run.h5.partial."


def test_a_recovered_archive_may_become_another_container(path: Path) -> None:
    capture(path)
    output = path.with_name("saved.safetensors")
    assert recover(path, output=output).records == 3
    assert os.listdir(path.parent) == ["saved.safetensors"]
    with open_archive(output) as archive:
        assert archive.container == "safetensors"
        assert archive.read(archive.records[2]).tolist() == [2.0] * 100


def test_a_capture_of_statistics_alone_is_recovered(path: Path) -> None:
    writer = Writer(path, stats_only=True)
    writer.add(Key("m", "output"), np.ones(4, "<f4"), dtype("float32"), (4,))
    writer.abandon()
    assert recover(path).records == 1
    with open_archive(path) as archive:
        assert archive.records[0].statistics is not None
        assert archive.records[0].statistics.l2 == 2.0


@pytest.fixture
def other_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system."""
    place = Path("/dev/shm")
    if not os.access(place, os.W_OK) or place.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no other file system to write to")
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


@pytest.mark.parametrize("name", ["saved.h5", "saved.zarr"])
def test_a_recovered_archive_may_be_put_on_another_file_system(
    name: str, path: Path, other_disk: Path
) -> None:
    capture(path)
    assert recover(path, output=other_disk / name).records == 3
    assert os.listdir(path.parent) == []
    assert os.listdir(other_disk) == [name]
    with open_archive(other_disk / name) as archive:
        assert archive.read(archive.records[2]).tolist() == [2.0] * 100


def test_nothing_is_lost_when_the_other_file_system_is_full(
    path: Path, other_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    capture(path)
    with monkeypatch.context() as patched:
        patched.setattr("shutil.copyfileobj", full)
        with pytest.raises(WriteError, match="No space left on device; nothing is lost"):
            recover(path, output=other_disk / "saved.h5")
    assert os.listdir(other_disk) == []
    assert recover(path, output=other_disk / "saved.h5").records == 3


@pytest.mark.spec("ARC-57")
def test_a_forked_process_keeps_no_lock_and_cannot_write(path: Path) -> None:
    code = """
import os, sys, time
import numpy as np
from tensorcap_formats.dtypes import dtype
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import Key
from tensorcap_formats.writing import Writer

writer = Writer(sys.argv[1])
writer.add(Key("m", "output"), np.ones(2, "<f4"), dtype("float32"), (2,))
if os.fork():
    os._exit(9)
try:
    print(writer.close(), flush=True)
except UsageError as error:
    print(error, flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(
        command, env=ENVIRONMENT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        line = parent.stdout.readline()
        assert parent.wait() == 9
        assert line.strip() == f"{path}: is written by the process that this one was forked from"
        assert recover(path).records == 1  # while the forked process still lives
        parent.stdin.close()


@pytest.mark.spec("ARC-53")
def test_a_recovery_to_another_path_may_be_repeated_after_a_kill_at_its_end(path: Path) -> None:
    output = path.with_name("saved.h5")
    capture(path)
    journal = journal_path(path).read_bytes()
    assert recover(path, output=output).records == 3
    journal_path(path).write_bytes(journal)  # as if it had been killed before it removed this
    again = recover(path, output=output)
    assert (again.path, again.records, again.lost) == (output, 3, 0)
    assert os.listdir(path.parent) == ["saved.h5"]


@pytest.mark.spec("ARC-53")
def test_a_recovery_killed_before_it_removed_what_it_had_copied_may_be_repeated(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = path.with_name("saved.zarr")
    capture(path)

    def killed(_: Path, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            recover(path, output=output)
    assert partial_path(path).exists()
    again = recover(path, output=output)
    assert (again.path, again.records, again.lost) == (output, 3, 0)
    assert os.listdir(path.parent) == ["saved.zarr"]
