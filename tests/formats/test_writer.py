"""The writer: refusals, bounded memory, full disks, two processes, and nothing left open."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorcap_formats
from tensorcap_formats import output_path
from tensorcap_formats.dtypes import dtype
from tensorcap_formats.errors import NotAnArchiveError, UnfinishedArchiveError, UsageError, WriteError
from tensorcap_formats.keys import Key
from tensorcap_formats.open import open_archive
from tensorcap_formats.output_path import journal_path, partial_path
from tensorcap_formats.writing import Writer, recover

FLOAT32 = dtype("float32")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(tensorcap_formats.__file__).parents[1])}

HOLD_OPEN = """
import sys
import numpy as np
from tensorcap_formats.dtypes import dtype
from tensorcap_formats.keys import Key
from tensorcap_formats.writing import Writer

writer = Writer(sys.argv[1])
writer.add(Key("held", "output"), np.zeros(3, "<f4"), dtype("float32"), (3,))
print("ready", flush=True)
sys.stdin.readline()
"""

BOUNDED = """
import os, resource, sys
import numpy as np
from tensorcap_formats.dtypes import dtype
from tensorcap_formats.keys import Key
from tensorcap_formats.open import open_archive
from tensorcap_formats.writing import Writer

path, nbytes = sys.argv[1], int(sys.argv[2])
pattern = np.random.default_rng(0).integers(0, 256, (8 << 20) + 64, np.uint8)

def block(number):  # each 8 MiB block begins elsewhere in the pattern
    return pattern[number % 64 :][: 8 << 20]

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

count = nbytes // (8 << 20)
with open(os.devnull, "wb") as nothing:
    nothing.write(block(0))
before = peak()
writer = Writer(path)
writer.add_blocks(Key("big", "output"), map(block, range(count)), dtype("uint8"), (nbytes,))
writer.close()
with open_archive(path) as archive:
    done = 0
    for part in archive.blocks(archive.get("big/output")):
        number, at = divmod(done, 8 << 20)
        assert (part == block(number)[at : at + part.size]).all(), done
        done += part.size
    assert done == nbytes
print(peak() - before)
"""


def floats(*values: float) -> np.ndarray[Any, Any]:
    return np.array(values, "<f4")


def add(writer: Writer, site: str, *values: float) -> None:
    writer.add(Key(site, "output"), floats(*values), FLOAT32, (len(values),))


def write_previous(path: Path) -> bytes:
    writer = Writer(path)
    add(writer, "previous", 1.0, 2.0)
    writer.close()
    return path.read_bytes()


def open_files() -> set[str]:
    paths = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            paths.add(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # that of the listing itself
            continue
    return paths


@contextmanager
def another_process_writing(path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLD_OPEN, str(path)]
    with subprocess.Popen(
        command, env=ENVIRONMENT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        try:
            yield child
        finally:
            child.kill()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.h5"


def test_what_was_added_is_there_after_close_and_nothing_else_is(path: Path) -> None:
    writer = Writer(path, run={"seed": 1})
    add(writer, "a", 1.0, 2.0)
    add(writer, "b", 1.0, 2.0)
    writer.add(Key("c", "output"), np.array(5, "<i8"), dtype("int64"), ())
    writer.add_value("0/a/input.mask", None)
    assert (writer.records_count, writer.tensor_bytes, writer.stored_bytes) == (3, 24, 16)
    assert writer.close(run={"seed": 2}) == path
    assert os.listdir(path.parent) == ["run.h5"]
    with open_archive(path) as archive:
        assert [r.key.text for r in archive.records] == ["0/a/output", "0/b/output", "0/c/output"]
        assert [archive.read(r).tolist() for r in archive.records] == [[1.0, 2.0], [1.0, 2.0], 5]
        assert (archive.run, archive.values) == ({"seed": 2}, {"0/a/input.mask": None})
        assert (archive.is_ordered, archive.is_complete, archive.is_foreign) == (True, True, False)


@pytest.mark.spec("ARC-14")
def test_records_stand_in_the_order_of_their_numbers(path: Path) -> None:
    writer = Writer(path)
    for site, order in (("late", 7), ("early", 2), ("middle", 5)):
        writer.add(Key(site, "output"), floats(order), FLOAT32, (1,), order=order)
    writer.close()
    with open_archive(path) as archive:
        assert [(r.key.site, r.order, archive.read(r).item()) for r in archive.records] == [
            ("early", 2, 2.0),
            ("middle", 5, 5.0),
            ("late", 7, 7.0),
        ]


@pytest.mark.spec("ARC-21", "ARC-24")
def test_equal_bytes_are_stored_once_and_each_tensor_begins_at_a_multiple_of_64(path: Path) -> None:
    import h5py

    writer = Writer(path)
    zeros = np.zeros(1000, "<f4")
    for site in ("a", "b"):
        writer.add(Key(site, "output"), zeros, FLOAT32, (1000,))
    writer.add(Key("c", "output"), zeros, FLOAT32, (10, 100))
    writer.add(Key("d", "output"), zeros.view("<i4"), dtype("int32"), (1000,))
    writer.add_blocks(Key("e", "output"), [zeros[:300], zeros[300:]], FLOAT32, (1000,))
    add(writer, "f", 1.0)
    assert (writer.tensor_bytes, writer.stored_bytes) == (20_004, 4004)
    writer.close()
    with h5py.File(path) as file:
        datasets = {site: file[f"steps/0/{site}/output"] for site in "abcdef"}
        assert [d.id.get_offset() for d in datasets.values()] == [2048, 2048, 2048, 2048, 2048, 6080]
        assert datasets["a"] == datasets["b"] == datasets["e"]
        assert [h5py.h5o.get_info(d.id).rc for d in datasets.values()] == [3, 3, 1, 1, 3, 1]


def test_statistics_alone_are_kept_when_no_bytes_are_wanted(path: Path) -> None:
    writer = Writer(path, stats_only=True)
    add(writer, "a", 3.0, -4.0)
    writer.add_blocks(Key("b", "output"), [floats(1.0)], FLOAT32, (1,))
    writer.close()
    with open_archive(path) as archive:
        a, b = archive.records
        assert (a.stored, a.statistics and a.statistics.l2, a.nbytes) == (False, 5.0, 8)
        assert (b.stored, b.statistics and b.statistics.mean) == (False, 1.0)
        with pytest.raises(UsageError, match="only its statistics were kept"):
            archive.read(a)
    assert path.stat().st_size < 6000


@pytest.mark.parametrize(
    ("key", "bits", "logical", "shape", "message"),
    [
        pytest.param(Key("a", "output"), floats(1), "float32", (1,), "'0/a/output' stands", id="duplicate"),
        pytest.param(Key("b", "output"), floats(1), "int32", (1,), "expected <i4 for int32", id="dtype"),
        pytest.param(Key("b", "output"), floats(1), "float32", (2,), "1 elements, shape", id="size"),
        pytest.param(Key("b", "output"), floats(1), "float32", (1,) * 33, "ARC-34", id="rank"),
        pytest.param(Key("b", "output"), floats(1), "float32", (-1, -1), "ARC-34", id="negative"),
        pytest.param(Key("b c", "output"), floats(1), "float32", (1,), "NAM-4", id="unescaped"),
        pytest.param(Key("b/c", "output"), floats(1), "float32", (1,), "NAM-3", id="slash"),
        pytest.param(Key("..", "output"), floats(1), "float32", (1,), "NAM-4", id="parent"),
        pytest.param(Key("a\0", "output"), floats(1), "float32", (1,), "NAM-4", id="nul"),
        pytest.param(Key("x" * 5000, "output"), floats(1), "float32", (1,), "NAM-6", id="long"),
    ],
)  # fmt: skip
def test_a_wrong_tensor_is_refused_and_the_writer_goes_on(
    key: Key, bits: np.ndarray[Any, Any], logical: str, shape: tuple[int, ...], message: str, path: Path
) -> None:
    writer = Writer(path)
    add(writer, "a", 1.0)
    with pytest.raises(UsageError, match=message):
        writer.add(key, bits, dtype(logical), shape)
    with pytest.raises(UsageError, match=message.replace("1 elements, shape", "blocks hold 4 bytes")):
        writer.add_blocks(key, iter([bits]), dtype(logical), shape)
    add(writer, "z", 9.0)
    writer.close()
    with open_archive(path) as archive:
        assert [archive.read(r).tolist() for r in archive.records] == [[1.0], [9.0]]


def test_more_blocks_than_the_shape_has_are_refused_at_once(path: Path) -> None:
    def endless() -> Iterator[np.ndarray[Any, Any]]:
        while True:
            yield np.zeros(1000, "<f4")

    writer = Writer(path)
    with pytest.raises(UsageError, match="blocks hold more than 8000 bytes"):
        writer.add_blocks(Key("a", "output"), endless(), FLOAT32, (2, 1000))
    writer.abandon(discard=True)


def test_an_exception_in_the_middle_of_the_blocks_leaves_the_writer_usable(path: Path) -> None:
    def broken() -> Iterator[np.ndarray[Any, Any]]:
        yield floats(1, 2, 3)
        raise ZeroDivisionError

    writer = Writer(path)
    with pytest.raises(ZeroDivisionError):
        writer.add_blocks(Key("a", "output"), broken(), FLOAT32, (6,))
    add(writer, "a", 4.0)
    writer.close()
    with open_archive(path) as archive:
        assert [archive.read(r).tolist() for r in archive.records] == [[4.0]]


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(float("nan"), id="nan"),
        pytest.param(float("inf"), id="inf"),
        pytest.param({1, 2}, id="set"),
        pytest.param(b"x", id="bytes"),
        pytest.param({"a": [object()]}, id="object-inside"),
    ],
)
def test_a_value_or_a_run_without_a_json_form_is_refused(value: Any, path: Path) -> None:
    with pytest.raises(UsageError, match="has no JSON form"):
        Writer(path, run={"x": value})
    writer = Writer(path)
    with pytest.raises(UsageError, match=r"0/a/input\.x: value has no JSON form"):
        writer.add_value("0/a/input.x", value)
    add(writer, "a", 1.0)
    with pytest.raises(UsageError, match="run has no JSON form"):
        writer.close(run={"x": value})
    writer.close()
    with open_archive(path) as archive:
        assert len(archive) == 1


def test_a_writer_that_has_ended_says_so(path: Path) -> None:
    writer = Writer(path)
    add(writer, "a", 1.0)
    writer.close()
    with pytest.raises(UsageError, match="the writer has ended"):
        add(writer, "b", 1.0)
    with pytest.raises(UsageError, match="the writer has ended"):
        writer.close()
    writer.abandon()


def test_several_threads_may_write(path: Path) -> None:
    writer = Writer(path)

    def work(number: int) -> None:
        for i in range(100):
            add(writer, f"t{number}.{i}", number, i)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    with open_archive(path) as archive:
        assert len(archive) == 400
        for record in archive.records:
            number, i = record.key.site[1:].split(".")
            assert archive.read(record).tolist() == [float(number), float(i)]


# ---- the place of the output


@pytest.mark.parametrize(
    ("name", "content"),
    [
        pytest.param("run.h5", b"", id="empty-file"),
        pytest.param("run.h5", b"notes, not tensors\n", id="text"),
        pytest.param("run.h5", b"\x89HDF\r\n\x1a\n" + bytes(88), id="broken-hdf5"),
        pytest.param("run.safetensors", b"\x08\0\0\0\0\0\0\0{}      ", id="checkpoint"),
    ],
)
def test_something_else_at_the_output_path_is_refused_and_left_intact(
    name: str, content: bytes, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    before = open_files()
    with pytest.raises(WriteError, match="is not overwritten") as caught:
        Writer(path)
    assert "Move it away first" in str(caught.value.hint)
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == [name]
    assert open_files() == before


def test_a_checkpoint_at_the_output_path_is_refused_and_left_intact(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    path = tmp_path / "model.safetensors"
    save_file({"weight": np.ones(3, np.float32)}, path)
    content = path.read_bytes()
    with pytest.raises(WriteError, match="no archive of tensorcap is there and is not overwritten"):
        Writer(path)
    assert path.read_bytes() == content


def test_a_missing_folder_and_an_unknown_suffix_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="there is no folder"):
        Writer(tmp_path / "nowhere" / "run.h5")
    with pytest.raises(UsageError, match=r"suffix '\.txt' names no container"):
        Writer(tmp_path / "run.txt")
    with pytest.raises(UsageError, match="container 'tar' is unknown"):
        Writer(tmp_path / "run.h5", container="tar")
    assert os.listdir(tmp_path) == []


@pytest.mark.spec("ARC-3")
def test_an_archive_before_stays_until_the_new_one_is_complete(path: Path) -> None:
    previous = write_previous(path)
    writer = Writer(path)
    add(writer, "new", 3.0)
    assert path.read_bytes() == previous
    writer.close()
    with open_archive(path) as archive:
        assert [r.key.site for r in archive.records] == ["new"]


def test_an_unfinished_capture_is_not_overwritten(path: Path) -> None:
    writer = Writer(path)
    add(writer, "a", 1.0)
    writer.abandon()
    with pytest.raises(WriteError, match=r"an unfinished capture lies there, in run\.h5\.journal") as caught:
        Writer(path)
    assert f"tcap recover {path}" in str(caught.value.hint)
    assert recover(path).records == 1


@pytest.mark.spec("ARC-55")
@pytest.mark.parametrize("size", [1, 10, 40, None], ids=["torn", "torn", "torn", "whole"])
def test_a_capture_that_confirmed_nothing_is_begun_anew(path: Path, size: int | None) -> None:
    Writer(path).abandon()
    journal_path(path).write_bytes(journal_path(path).read_bytes()[:size] + b'{"key": "0/a' * (size is None))
    partial_path(path).write_bytes(b"unconfirmed")
    writer = Writer(path)
    add(writer, "a", 1.0)
    writer.close()
    assert sorted(os.listdir(path.parent)) == [path.name]
    journal_path(path).write_bytes(b"a text of somebody else")
    with pytest.raises(WriteError, match="an unfinished capture lies there"):
        Writer(path)


def test_a_discarded_capture_leaves_nothing(path: Path) -> None:
    writer = Writer(path)
    add(writer, "a", 1.0)
    writer.abandon(discard=True)
    assert os.listdir(path.parent) == []


@pytest.mark.spec("ARC-54")
def test_a_second_process_that_writes_the_path_is_refused_at_once(path: Path) -> None:
    write_previous(path)
    with another_process_writing(path):
        with pytest.raises(WriteError) as caught:
            Writer(path)
        assert str(caught.value) == f"{path}: another process is writing it"
        with pytest.raises(WriteError, match="another process is writing it"):
            recover(path)


def test_reading_while_another_process_writes_says_so(path: Path) -> None:
    with another_process_writing(path), pytest.raises(UnfinishedArchiveError) as caught:
        open_archive(path)
    assert str(caught.value) == f"{path}: another process is writing it"


def test_the_archive_before_is_read_with_a_warning_while_another_process_writes(path: Path) -> None:
    write_previous(path)
    with another_process_writing(path):
        with pytest.warns(
            UserWarning, match="another process is writing it anew; this is the archive before"
        ):
            archive = open_archive(path)
        assert [archive.read(r).tolist() for r in archive.records] == [[1.0, 2.0]]
        archive.close()


def test_the_hint_for_a_dead_writer_names_recover(path: Path) -> None:
    with another_process_writing(path) as child:
        child.kill()
    with pytest.raises(UnfinishedArchiveError, match="its writer died before it was complete") as caught:
        open_archive(path)
    assert caught.value.hint == f"Save what it holds with `tcap recover {path}`."
    assert recover(path).records == 1


def lay_traps(folder: Path, name: str) -> dict[str, bytes]:
    """Put things of the user beside an output, named as temporary files could be; return their contents."""
    for purpose in ("building", "replaced", "tmp", "tcap-1-1-aaaaaaaa.building", f"{os.getpid()}.building"):
        (folder / f"{name}.{purpose}").mkdir()
        (folder / f"{name}.{purpose}" / "precious").write_bytes(purpose.encode())
    return {str(p): p.read_bytes() for p in folder.rglob("precious")}


@pytest.mark.parametrize("name", ["run.h5", "run.zarr", "run.safetensors"])
def test_nothing_of_the_user_beside_the_output_is_touched(name: str, tmp_path: Path) -> None:
    traps = lay_traps(tmp_path, name)
    for value in (1.0, 2.0):
        writer = Writer(tmp_path / name)
        add(writer, "m", value)
        writer.close()
    assert {str(p): p.read_bytes() for p in tmp_path.rglob("precious")} == traps
    assert len(os.listdir(tmp_path)) == 1 + len(traps)


@pytest.mark.parametrize("suffix", [".h5", ".zarr", ".safetensors"])
def test_a_name_may_be_as_long_as_leaves_room_for_the_journal(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"{'ü' * 117}{suffix}"
    writer = Writer(path)
    add(writer, "m", 1.0)
    assert writer.close() == path
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.spec("ARC-55")
@pytest.mark.parametrize("kind", ["file", "link", "dangling"])
def test_a_partial_file_without_a_journal_is_somebody_elses(kind: str, path: Path) -> None:
    elsewhere = path.with_name("precious")
    if kind != "dangling":
        elsewhere.write_bytes(b"precious")
    if kind == "file":
        elsewhere.rename(partial_path(path))
    else:
        partial_path(path).symlink_to(elsewhere)
    before = sorted(os.listdir(path.parent))
    with pytest.raises(WriteError) as caught:
        Writer(path)
    assert str(caught.value) == f"{path}.partial: is there without a journal, and is not overwritten"
    assert caught.value.hint == "Move it away or delete it."
    assert sorted(os.listdir(path.parent)) == before
    assert kind == "dangling" or partial_path(path).read_bytes() == b"precious"


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_a_journal_that_is_no_regular_file_is_refused_at_once(kind: str, path: Path) -> None:
    if kind == "pipe":
        os.mkfifo(journal_path(path))
    else:
        path.with_name("precious").touch()
        journal_path(path).symlink_to(path.with_name("precious"))
    before = open_files()
    with pytest.raises(WriteError, match=r"run\.h5\.journal: (is no regular file|cannot be written)"):
        Writer(path)
    with pytest.raises(WriteError, match=r"run\.h5\.journal: (is no regular file|cannot be written)"):
        recover(path)
    with pytest.raises(NotAnArchiveError, match="there is no such file"):
        open_archive(path)
    assert open_files() == before
    assert kind == "pipe" or path.with_name("precious").read_bytes() == b""


@pytest.mark.parametrize("exists", [True, False], ids=["there", "dangling"])
@pytest.mark.parametrize("suffix", ["h5", "zarr"])
def test_an_output_that_is_a_link_is_written_where_it_points(
    exists: bool, suffix: str, tmp_path: Path
) -> None:
    real, link = tmp_path / "runs" / f"7.{suffix}", tmp_path / "latest"
    real.parent.mkdir()
    link.symlink_to(real)
    if exists:
        writer = Writer(real)
        add(writer, "previous", 1.0)
        writer.close()
    writer = Writer(link)
    add(writer, "new", 2.0)
    assert {f"7.{suffix}.journal", f"7.{suffix}.partial"} <= set(os.listdir(real.parent))
    with pytest.raises(WriteError, match="another process is writing it"):
        Writer(real)
    assert writer.close() == link
    assert link.readlink() == real
    assert os.listdir(real.parent) == [real.name]
    assert sorted(os.listdir(tmp_path)) == ["latest", "runs"]
    with open_archive(link) as archive:
        assert [r.key.site for r in archive.records] == ["new"]


def test_a_capture_to_a_link_is_recovered_by_the_link(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "latest.h5").symlink_to("runs/7.h5")
    writer = Writer(tmp_path / "latest.h5")
    add(writer, "m", 1.0)
    writer.abandon()
    with pytest.raises(UnfinishedArchiveError, match="its writer died"):
        open_archive(tmp_path / "latest.h5")
    assert recover(tmp_path / "latest.h5").records == 1
    assert os.listdir(tmp_path / "runs") == ["7.h5"]


@pytest.mark.parametrize("exchanges", [True, False], ids=["in one step", "in two steps"])
def test_a_folder_before_is_there_when_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, exchanges: bool
) -> None:
    path = tmp_path / "run.zarr"
    writer = Writer(path)
    add(writer, "previous", 1.0)
    writer.close()
    writer = Writer(path)
    add(writer, "new", 2.0)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", refuse)
        patched.setattr(output_path, "_exchange", refuse if exchanges else lambda *_: False)
        with pytest.raises(WriteError, match="No space left"):
            writer.close()
    with open_archive(path) as archive:
        assert [r.key.site for r in archive.records] == ["previous"]
    assert sorted(os.listdir(tmp_path)) == ["run.zarr", "run.zarr.journal", "run.zarr.partial"]
    assert recover(path).was_complete


# ---- full disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> None:
    with (folder / "ballast").open("ab", buffering=0) as file:
        for size in (65536, 4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def fail_in_data(writer: Writer) -> None:
    writer.add(Key("large", "output"), np.arange(65536, dtype="<f4"), FLOAT32, (65536,))


def fail_in_journal(writer: Writer) -> None:
    for i in range(100):
        writer.add(Key("x" * 3000, "output", step=i), floats(), FLOAT32, (0,))


def fail_at_close(writer: Writer) -> None:
    writer.close()


FAILURES = [
    pytest.param(fail_in_data, id="data"),
    pytest.param(fail_in_journal, id="journal"),
    pytest.param(fail_at_close, id="metadata"),
]


@pytest.mark.parametrize("failure", FAILURES)
def test_a_full_disk_loses_nothing_that_was_confirmed(failure: Any, small_disk: Path) -> None:
    path = small_disk / "run.h5"
    previous = write_previous(path)
    before = open_files()
    writer = Writer(path)
    for i in range(300):
        add(writer, f"m.{i}", i, i + 0.5)
    fill(small_disk)
    with pytest.raises(WriteError, match=r"No space left on device; \d+ tensors are safe in run.h5.partial"):
        failure(writer)
    confirmed = writer.records_count
    assert confirmed >= 300
    assert open_files() == before
    with pytest.raises(UsageError, match="the writer has ended"):
        add(writer, "more", 1.0)
    assert path.read_bytes() == previous
    with pytest.raises(WriteError) as caught:
        Writer(path)
    assert f"`tcap recover {path} -o OTHER.h5`" in str(caught.value.hint)

    fill(small_disk)
    with pytest.raises(WriteError, match=r"No space left on device; nothing is lost"):
        recover(path, output=small_disk / "saved.h5")
    assert path.read_bytes() == previous
    (small_disk / "ballast").unlink()
    recovered = recover(path, output=small_disk / "saved.h5")
    assert (recovered.records, recovered.lost, recovered.was_complete) == (confirmed, 0, False)
    assert path.read_bytes() == previous
    assert sorted(os.listdir(small_disk)) == ["run.h5", "saved.h5"]
    with open_archive(small_disk / "saved.h5") as archive:
        assert not archive.is_complete
        for i in range(300):
            assert archive.read(archive.get(f"0/m.{i}/output")).tolist() == [i, i + 0.5]
    assert open_files() == before


@pytest.mark.spec("ARC-53")
def test_what_nobody_confirmed_makes_room_for_a_recovery_on_a_full_disk(small_disk: Path) -> None:
    def interrupted() -> Iterator[np.ndarray[Any, Any]]:
        yield np.ones(1 << 18, "<f4")
        raise KeyboardInterrupt

    path = small_disk / "run.h5"
    writer = Writer(path)
    for i in range(300):
        add(writer, f"m.{i}", i, i + 0.5)
    with pytest.raises(KeyboardInterrupt):
        writer.add_blocks(Key("large", "output"), interrupted(), FLOAT32, (1 << 19,))
    writer.abandon()
    fill(small_disk)
    assert recover(path).records == 300


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """As a full disk, but without root: the system refuses to let any file grow beyond."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))  # Python ignores SIGXFSZ, so EFBIG comes
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("failure", FAILURES)
def test_a_file_that_may_not_grow_loses_nothing_that_was_confirmed(failure: Any, path: Path) -> None:
    previous = write_previous(path)
    writer = Writer(path)
    for i in range(300):
        add(writer, f"m.{i}", i, i + 0.5)
    limit = max(partial_path(path).stat().st_size, journal_path(path).stat().st_size) + 100
    with file_size_limit(limit):
        with pytest.raises(
            WriteError, match=r"File too large; \d+ tensors are safe in run.h5.partial"
        ) as caught:
            failure(writer)
        assert caught.value.hint == f"Make room, then `tcap recover {path} -o OTHER.h5` saves them."
        with pytest.raises(WriteError, match="File too large; nothing is lost"):
            recover(path, output=path.with_name("saved.h5"))
    assert path.read_bytes() == previous
    assert recover(path, output=path.with_name("saved.h5")).records == writer.records_count
    with open_archive(path.with_name("saved.h5")) as archive:
        assert archive.read(archive.get("m.299/output")).tolist() == [299, 299.5]


def test_no_file_stays_open_after_any_end(path: Path) -> None:
    before = open_files()
    for end in ("close", "abandon", "refused"):
        writer = Writer(path)
        add(writer, "a", 1.0)
        if end == "close":
            writer.close()
        elif end == "refused":
            with pytest.raises(UsageError):
                add(writer, "a", 1.0)
            writer.abandon(discard=True)
        else:
            with pytest.raises(WriteError):
                Writer(path)
            writer.abandon(discard=True)
        assert open_files() == before


def test_no_file_stays_open_when_publishing_fails(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    before = open_files()
    writer = Writer(path)
    add(writer, "a", 1.0)
    with monkeypatch.context() as patched:
        patched.setattr("tensorcap_formats.writing.writer.publish", refuse)
        with pytest.raises(KeyboardInterrupt):
            writer.close()
    assert open_files() == before
    recovered = recover(path)
    assert (recovered.records, recovered.was_complete) == (1, True)


# ---- memory


def test_a_tensor_is_written_straight_from_its_memory(path: Path) -> None:
    bits = np.arange(4 << 20, dtype="<f4")
    writer = Writer(path)
    half = bits[::2].copy()
    writer.add(Key("b", "output"), half, FLOAT32, half.shape)  # the first of a process keeps 1 MiB
    tracemalloc.start()
    try:
        writer.add(Key("a", "output"), bits, FLOAT32, bits.shape)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    writer.abandon(discard=True)
    assert peak < 1 << 20


@pytest.mark.parametrize(
    "mebibytes", [pytest.param(128, id="128MiB"), pytest.param(2048, id="2GiB", marks=pytest.mark.slow)]
)
def test_a_tensor_of_any_size_is_written_and_read_in_bounded_memory(mebibytes: int, path: Path) -> None:
    if shutil.disk_usage(path.parent).free < max(6 << 30 if mebibytes > 1000 else 0, 4 * mebibytes << 20):
        pytest.skip("the disk has too little room")
    command = [sys.executable, "-c", BOUNDED, str(path), str(mebibytes << 20)]
    done = subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True, text=True)
    path.unlink()
    assert int(done.stdout) < 100 << 20 if mebibytes > 1000 else int(done.stdout) < 32 << 20
