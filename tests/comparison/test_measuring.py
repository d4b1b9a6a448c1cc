"""Reading and measuring pairs of records: threads, parts, errors, memory, and which engine does it."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tensorcap.metrics import Difference, Tolerance, machine_code, measure, measure_pairs, measurement
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array, dtype
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import Key
from tensorcap_formats.records import Record
from tests.support.archives import new_archive
from tests.support.progress import RecordedProgress

MakeArchive = Callable[..., Any]
ARGUMENTS = ", ".join(["i64"] * 6)  # of the compiled kernel, in LLVM's language


@pytest.fixture(params=["numpy", "numba"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TCAP_ENGINE", request.param)
    return str(request.param)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts and buffers so small that tests reach several of them."""
    monkeypatch.setattr(measurement, "_PART_BYTES", 128 * 1024)
    monkeypatch.setattr(measurement, "_SMALL_BYTES", 1)


def tensors(count: int = 6, size: int = 100_000) -> tuple[dict[str, Array], dict[str, Array]]:
    random = np.random.default_rng(0)
    reference, target = {}, {}
    for i in range(count):
        x = random.standard_normal((size // 250, 250)).astype(np.float32)
        reference[f"0/layers.{i}/output"] = x
        target[f"0/layers.{i}/output"] = x + random.standard_normal(x.shape).astype(np.float32) * np.float32(
            1e-3
        )
    return reference, target


def all_pairs(reference: Archive, target: Archive) -> list[tuple[Record, Record]]:
    return list(zip(reference.records, target.records, strict=True))


@pytest.mark.spec("MET-40")
@pytest.mark.usefixtures("engine", "small_parts")
def test_numbers_do_not_depend_on_threads_buffers_or_containers(
    tmp_path: Path, make_archive: MakeArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = tensors()
    found = []
    archives = [tuple(make_archive(side) for side in sides)]
    for suffix in (".h5", ".safetensors", ".zarr"):
        archives.append(tuple(new_archive(tmp_path / f"{i}{suffix}", side) for i, side in enumerate(sides)))
    for reference, target in archives:
        for threads in (1, 2, 5):
            for buffer_bytes in (64, 512):
                monkeypatch.setattr(measurement, "_BUFFER_BYTES", buffer_bytes * 1024)
                pairs = all_pairs(reference, target)
                found.append(list(measure_pairs(reference, target, pairs, threads=threads)))
        reference.close()
        target.close()
    assert len(found) == 24
    assert all(one == found[0] for one in found)
    assert [type(difference) for difference in found[0]] == [Difference] * 6


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("threads", [1, 3])
def test_an_unreadable_side_spoils_its_own_pair_only(make_archive: MakeArchive, threads: int) -> None:
    reference, target = (make_archive(side) for side in tensors())
    target.unreadable = "0/layers.3/output"
    found = list(measure_pairs(reference, target, all_pairs(reference, target), threads=threads))
    assert [isinstance(one, OSError) for one in found] == [False, False, False, True, False, False]
    assert "0/layers.3/output: ends early" in str(found[3])
    with pytest.raises(OSError, match="ends early"):
        measure(reference, reference.records[3], target, target.records[3])


@pytest.mark.usefixtures("small_parts")
def test_a_failure_that_is_no_unreadable_tensor_ends_the_whole(make_archive: MakeArchive) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    reference, target = (make_archive(side) for side in tensors())
    target._read_flat = fail
    with pytest.raises(ZeroDivisionError):
        list(measure_pairs(reference, target, all_pairs(reference, target), threads=3))


@pytest.mark.usefixtures("small_parts")
def test_threads_end_when_nobody_wants_the_rest(make_archive: MakeArchive) -> None:
    reference, target = (make_archive(side) for side in tensors(40, 50_000))
    results = measure_pairs(reference, target, all_pairs(reference, target), threads=3)
    next(results)
    results.close()  # type: ignore[attr-defined]  # it is a generator
    reads = reference.reads
    assert reads < 40
    assert reference.reads == reads


def test_each_pair_may_have_its_own_tolerance(make_archive: MakeArchive) -> None:
    reference, target = (make_archive(side) for side in tensors(3, 1000))
    found = measure_pairs(
        reference,
        target,
        all_pairs(reference, target),
        tolerance=[None, Tolerance(0.0, 0.0), Tolerance(0.0, 1.0)],
    )
    assert [one.mismatches for one in found if isinstance(one, Difference)] == [None, 1000, 0]


def test_progress_counts_bytes_of_the_reference(make_archive: MakeArchive) -> None:
    reference, target = (make_archive(side) for side in tensors(3, 1000))
    progress = RecordedProgress()
    list(measure_pairs(reference, target, all_pairs(reference, target), progress=progress))
    assert progress.advances == [(4000, 12000), (8000, 12000), (12000, 12000)]


def test_an_engine_that_there_is_not_is_refused(
    make_archive: MakeArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TCAP_ENGINE", "fast")
    reference, target = (make_archive(side) for side in tensors(1, 1000))
    with pytest.raises(UsageError, match="TCAP_ENGINE: is 'fast', expected 'numba' or 'numpy'"):
        measure(reference, reference.records[0], target, target.records[0])


@pytest.mark.parametrize(
    ("values", "unequal"),
    [
        pytest.param(np.array([1.0, 2.0, 1e200]), 2, id="squares_overflow"),
        pytest.param(np.array([1, 2, 2**53 + 1]), 3, id="integers_above_float64"),
    ],
)
def test_what_compiled_code_refuses_is_measured_by_numpy(
    make_archive: MakeArchive, monkeypatch: pytest.MonkeyPatch, values: Array, unequal: int
) -> None:
    reference, target = make_archive({"a": values}), make_archive({"a": values - 1})
    monkeypatch.setenv("TCAP_ENGINE", "numba")
    found = measure(reference, reference.records[0], target, target.records[0])
    monkeypatch.setenv("TCAP_ENGINE", "numpy")
    assert measure(reference, reference.records[0], target, target.records[0]) == found
    assert found.unequal == unequal
    assert found.mean_rel == pytest.approx(0.5)  # of 1, 1/2 and nearly nothing


def test_without_numba_numpy_gives_the_same(
    make_archive: MakeArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, target = (make_archive(side) for side in tensors(1, 1000))
    records = reference.records[0], target.records[0]
    monkeypatch.setattr(measurement, "_WORTH_LOADING_BYTES", 0)
    monkeypatch.setattr(machine_code, "is_available", lambda: False)
    found = measure(reference, records[0], target, records[1])
    monkeypatch.setenv("TCAP_ENGINE", "numpy")
    assert measure(reference, records[0], target, records[1]) == found
    monkeypatch.setenv("TCAP_ENGINE", "numba")
    with pytest.raises(UsageError, match="which is not installed"):
        measure(reference, records[0], target, records[1])


def test_kernels_that_cannot_be_compiled_are_replaced_with_a_warning(
    make_archive: MakeArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(kernel: str) -> None:
        raise RuntimeError(f"{kernel}: no such instruction")

    reference, target = (make_archive(side) for side in tensors(1, 1000))
    for name in ("_WORTH_LOADING_BYTES", "_WORTH_COMPILING_BYTES"):
        monkeypatch.setattr(measurement, name, 0)
    monkeypatch.setattr(machine_code, "load", fail)
    with pytest.warns(UserWarning, match="numpy is slower: narrow: no such instruction"):
        found = measure(reference, reference.records[0], target, target.records[0])
    assert found.unequal == 1000


def fail_to_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("numba.extending.intrinsic")
    for name in ("kernels", "kernel_loops"):
        monkeypatch.delitem(sys.modules, f"tensorcap.metrics.{name}", raising=False)


def compile_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    result = SimpleNamespace(signatures=[0], overloads={0: object()})
    monkeypatch.setattr("tensorcap.metrics.kernels.njit", lambda *_, **__: lambda _: result)


def compile_to(*code: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(
        "tensorcap.metrics.kernels.compile_feed", lambda: ("feed", "\n".join(code))
    )


def lack_llvm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)


@pytest.mark.parametrize(
    ("provoke", "reason"),
    [
        pytest.param(lack_llvm, ".*llvmlite.binding", id="llvmlite"),
        pytest.param(fail_to_import, "cannot import name 'intrinsic'", id="import"),
        pytest.param(compile_to_nothing, "'object' object has no attribute 'fndesc'", id="attribute"),
        pytest.param(
            compile_to(
                "declare i32 @NRT_new(ptr)",
                f"define i32 @feed(ptr %0, ptr %1, {ARGUMENTS}) {{",
                "%r = call i32 @NRT_new(ptr %0)",
                "ret i32 %r",
                "}",
            ),
            "numba's code calls 'NRT_new', which is not known",
            id="symbol",
        ),
        pytest.param(
            compile_to(f"define i32 @feed(ptr %0, {ARGUMENTS}) {{", "ret i32 0", "}"),
            f"numba's function takes ptr, {ARGUMENTS}, expected two addresses and {ARGUMENTS}",
            id="signature",
        ),
        pytest.param(
            compile_to("define void @other() {", "ret void", "}"),
            "numba's code has no function 'feed'",
            id="name",
        ),
    ],
)
def test_without_the_private_parts_of_numba_that_are_expected_numpy_measures(
    make_archive: MakeArchive,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    provoke: Callable[[pytest.MonkeyPatch], None],
    reason: str,
) -> None:
    # Fakes: what a numba of tomorrow may change cannot be provoked with the one that is installed.
    reference, target = (make_archive(side) for side in tensors(1, 1000))
    pairs = [(reference.records[0], target.records[0])]
    monkeypatch.setattr(measurement, "_WORTH_LOADING_BYTES", 0)
    monkeypatch.setattr(measurement, "_WORTH_COMPILING_BYTES", 0 if provoke is not lack_llvm else 1 << 40)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    monkeypatch.setattr(machine_code, "load", machine_code.load.__wrapped__)
    provoke(monkeypatch)
    with pytest.warns(UserWarning, match=f"numpy is slower: {reason}"):
        (found,) = measure_pairs(reference, target, pairs)
    assert isinstance(found, Difference)
    assert found.unequal == 1000
    assert not list(tmp_path.rglob("*.o"))


def test_a_little_work_does_not_load_compiled_code(tmp_path: Path) -> None:
    new_archive(tmp_path / "a.h5", tensors(1, 1000)[0]).close()
    code = (
        "import sys\n"
        "from tensorcap.metrics.measurement import measure\n"
        "from tensorcap_formats.open import open_archive\n"
        f"a = open_archive({str(tmp_path / 'a.h5')!r})\n"
        "assert measure(a, a.records[0], a, a.records[0]).same_bits\n"
        "assert not {'numba', 'llvmlite'} & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)}, timeout=600
    )


class Huge(Archive):
    """Ones, as many as are asked for."""

    def _read_flat(self, record: Any, start: int, out: Array) -> None:
        out[:] = 0x3F80 if record.dtype.name == "bfloat16" else 1.0

    def close(self) -> None:
        """There is nothing to close."""


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_memory_does_not_grow_with_the_tensor(name: str) -> None:
    machine_code.load()  # what it needs is not counted
    record = Record(Key("a", "output"), dtype(name), (16, 1 << 20), 0, "", None, True, 0)
    archive = Huge(Path("huge"), "memory", [record])
    measure(archive, record, archive, record)
    tracemalloc.start()
    found = measure(archive, record, archive, record)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.same_bits
    assert peak < 8 << 20  # 32 or 64 MiB on each side


def test_a_range_is_read_into_memory_that_is_given(make_archive: MakeArchive) -> None:
    archive = make_archive({"a": np.arange(10, dtype=np.int16)})
    out = np.zeros(4, np.int16)
    archive.read_into(archive.records[0], 3, out)
    assert out.tolist() == [3, 4, 5, 6]
    for start in (-1, 7):
        with pytest.raises(UsageError, match=f"has no elements {start} to {start + 4} among 10"):
            archive.read_into(archive.records[0], start, out)


def test_machine_code_of_others_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    if sys.platform == "darwin":
        pytest.skip("the cache lies in the home")
    path = machine_code._cache_path()
    assert machine_code._read(path) is None
    machine_code._write(path, b"name\ncode")
    assert machine_code._read(path) == b"name\ncode"
    assert (path.parent.stat().st_mode & 0o77, path.stat().st_mode & 0o77) == (0, 0)
    path.chmod(0o620)
    assert machine_code._read(path) is None
    path.chmod(0o600)
    path.parent.chmod(0o770)
    assert machine_code._read(path) is None
    path.parent.chmod(0o700)
    path.write_bytes(path.read_bytes() + b"x")
    assert machine_code._read(path) is None


def test_without_a_folder_for_it_machine_code_is_made_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    path = machine_code._cache_path()
    machine_code._write(path, b"name\ncode")
    assert machine_code._read(path) is None
