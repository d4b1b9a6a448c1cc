"""Measure comparison against the budgets of the design, as ratios within one run.

Two workloads, of which every pair has diverged, are compared by `tcap compare` as a whole process, and by
plain numpy; a plain warm read of the same bytes is the measure. Then the engines, on one core, against a dot
product of the same arrays.

Usage: python tests/benchmarks/bench_compare.py [--json] [--folder FOLDER] [--big] [--many] [--identical]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tensorcap.metrics import NumpyEngine, Operands
from tensorcap.metrics.compiled_engine import CompiledEngine
from tensorcap_formats.conversion import convert
from tensorcap_formats.dtypes import bits_of, dtype, dtype_of
from tensorcap_formats.keys import Key
from tensorcap_formats.open import open_archive
from tensorcap_formats.output_path import remove
from tensorcap_formats.writing import Writer

Array = np.ndarray[Any, Any]
ROOT = Path(__file__).parents[2]
FLOAT32 = dtype("float32")
BIG_BYTES = 4 << 30
BIG_FREE_BYTES = 20 << 30
RSS_BUDGET_MB = 250
REPEATS = 3
BYTECODE = tempfile.TemporaryDirectory()
MANY = 100_000
FEW = 1_000
# The least that a process does which compares: read both, subtract, largest error
BARE = """
import sys
import numpy as np
from tensorcap_formats.open import open_archive
with open_archive(sys.argv[1]) as reference, open_archive(sys.argv[2]) as target:
    for record in reference.records:
        np.abs(reference.read(record) - target.read(target.get(record.key))).max()
"""
LAUNCHER = """
import json, resource, subprocess, sys, time
start = time.perf_counter()
done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
wall, used = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
cpu = used.ru_utime + used.ru_stime
print(json.dumps(dict(status=done.returncode, output=done.stdout, wall=wall, cpu=cpu, peak=used.ru_maxrss)))
"""


@dataclass(frozen=True)
class Row:
    """One line of the result; `budget` is None for what is only reported."""

    what: str
    measured: float
    unit: str
    budget: float | None = None
    rule: str = ""

    @property
    def holds(self) -> bool | None:
        return None if self.budget is None else self.measured <= self.budget


@dataclass(frozen=True)
class Usage:
    """What a process took."""

    wall: float
    cpu: float
    peak_mb: float
    output: str


def build(folder: Path, name: str, count: int, elements: int) -> tuple[Path, Path]:
    """Normal numbers and the same with 1e-3 of noise, but for two tensors with 30 %."""
    columns = min(4096, elements, max(64, int(elements**0.5)))
    shape = 1, elements // columns, columns
    paths = folder / f"{name}-reference.h5", folder / f"{name}-target.h5"
    writers = [Writer(path) for path in paths]
    for i in range(count):
        random = np.random.default_rng(1000 + i)
        reference = random.standard_normal(shape, dtype=np.float32)
        error = np.float32(0.3 if i in (count // 2, count - 1) else 1e-3)
        target = reference * (1 + error * random.standard_normal(shape, dtype=np.float32))
        key = Key(f"model.layers.{i // 8}.part{i % 8}", "output")
        for writer, values in zip(writers, (reference, target), strict=True):
            writer.add(key, values, FLOAT32, shape)
    for writer in writers:
        writer.close()
    return paths


def read_plainly(paths: tuple[Path, ...]) -> float:
    """Seconds to read every byte once into a buffer of 1 MiB; the second time, from the page cache."""
    buffer = memoryview(bytearray(1 << 20))
    for _ in range(2):
        start = time.perf_counter()
        for path in paths:
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
        seconds = time.perf_counter() - start
    return seconds


def numpy_floor(paths: tuple[Path, Path]) -> float:
    """Seconds for the least that a float32 script does: largest and mean error, and a cosine."""
    start = time.perf_counter()
    with open_archive(paths[0]) as reference, open_archive(paths[1]) as target:
        for record in reference.records:
            x, y = reference.read(record).ravel(), target.read(target.get(record.key)).ravel()
            d = np.abs(x - y)
            cosine = float(np.dot(x, y)) / (float(np.dot(x, x)) * float(np.dot(y, y))) ** 0.5
            _ = d.max(), d.mean(), cosine
    return time.perf_counter() - start


def run(arguments: list[str], **environment: str) -> Usage:
    """Run `tcap` as a whole process."""
    return launch(["-m", "tensorcap_cli", *arguments], **environment)


def launch(arguments: list[str], **environment: str) -> Usage:
    """Run an interpreter from a small process: on Linux a child's peak memory counts its parent's.

    Modules are compiled once, as those of an installed package are, whatever the environment says.
    """
    paths = os.pathsep.join(str(ROOT / part) for part in (".", "formats", "cli"))
    done = subprocess.run(
        [sys.executable, "-S", "-c", LAUNCHER, sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={
            **os.environ,
            "PYTHONPATH": paths,
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPYCACHEPREFIX": BYTECODE.name,
            **environment,
        },
    )
    found = json.loads(done.stdout)
    if found["status"] not in (0, 1):
        raise RuntimeError(found["output"])
    peak = found["peak"] / (1 << 20 if sys.platform == "darwin" else 1 << 10)
    return Usage(found["wall"], found["cpu"], peak, found["output"])


def best(arguments: list[str]) -> Usage:
    return min((run(arguments) for _ in range(REPEATS)), key=lambda usage: usage.wall)


def whole_process(folder: Path) -> list[Row]:
    rows = []
    for name, count, kib in (("400 x 4 MiB", 400, 4096), ("3,000 x 16 KiB", 3000, 16)):
        paths = build(folder, f"{count}", count, kib * 256)
        read = min(read_plainly(paths) for _ in range(REPEATS))
        usage = best(["compare", *map(str, paths)])
        as_json = best(["compare", "--json", *map(str, paths)])
        bare = min(launch(["-c", BARE, *map(str, paths)]).cpu for _ in range(REPEATS))
        is_large = kib > 1024
        rows += [
            Row(f"{name}: plain warm read", read, "s"),
            Row(f"{name}: numpy floor", numpy_floor(paths), "s"),
            Row(
                f"{name}: tcap compare",
                usage.wall,
                "s",
                2 * read + 0.8 if is_large else 1.2,
                "2 x read + 0.8 s" if is_large else "1.2 s",
            ),
            Row(f"{name}: over a plain read", usage.wall / read, "x"),
            Row(f"{name}: CPU time", usage.cpu, "s"),
            Row(
                f"{name}: CPU time over numpy's of subtract and max",
                usage.cpu / bare,
                "x",
                None if is_large else 3.0,
                "" if is_large else "3 x",
            ),
            Row(f"{name}: CPU time of --json over that of text", as_json.cpu / usage.cpu, "x", 1.5, "1.5 x"),
            Row(f"{name}: peak memory", usage.peak_mb, "MB", RSS_BUDGET_MB, f"{RSS_BUDGET_MB} MB"),
        ]
        for path in paths:
            path.unlink()
    return rows


def identical_pairs(folder: Path) -> list[Row]:
    """Archives of 1 GiB with the same bytes, which are hashed and not measured."""
    rows = []
    first, other = build(folder, "same", 256, 1 << 20)
    other.unlink()
    tiny = build(folder, "tiny", 2, 64)  # what a process takes that reads nearly nothing
    start = min(run(["compare", str(tiny[0]), str(tiny[0])]).cpu for _ in range(REPEATS))
    for suffix in (".h5", ".zarr", ".safetensors"):
        paths = [folder / f"{side}{suffix}" for side in ("reference", "target")]
        with open_archive(first) as archive:
            for path in paths:
                convert(archive, path)
        files = tuple(file for path in paths for file in (path, *path.rglob("*")) if file.is_file())
        begin = time.process_time()
        read = min(read_plainly(files) for _ in range(REPEATS))
        read_cpu = (time.process_time() - begin) / (2 * REPEATS)
        usages = [run(["compare", *map(str, paths)]) for _ in range(REPEATS)]
        if not all("256 identical" in usage.output for usage in usages):
            raise RuntimeError(usages[0].output)
        wall, cpu = min(usage.wall for usage in usages), min(usage.cpu for usage in usages)
        rows += [
            Row(f"identical {suffix}, 2 x 1 GiB: plain warm read", read, "s"),
            Row(f"identical {suffix}, 2 x 1 GiB: tcap compare", wall, "s"),
            Row(f"identical {suffix}, 2 x 1 GiB: over a plain read", wall / read, "x"),
            Row(f"identical {suffix}, 2 x 1 GiB: CPU time over it", (cpu - start) / read_cpu, "x"),
        ]
        for path in paths:
            remove(path)
    return rows


def many_pairs(folder: Path) -> list[Row]:
    """100,000 tensors of 64 bytes that all differ: compared, aligned, and a list of one side.

    Memory for each record is what a process takes more than with few records.
    """
    few, paths = (build(folder, name, count, 16) for name, count in (("few", FEW), ("many", MANY)))
    megabytes = sum(path.stat().st_size for path in paths) / (1 << 20)
    bare = launch(["-c", BARE, *map(str, paths)])
    measures: dict[tuple[str, str], dict[str, float]] = {}  # by name and unit, the value of each command
    for command, sides in (("ls", 1), ("compare", 2), ("compare --json", 2), ("align", 2)):
        usage, base = (run([*command.split(), *map(str, files[:sides])]) for files in (paths, few))
        further_mb = usage.peak_mb - base.peak_mb
        for name, unit, value in (
            ("CPU time", "s", usage.cpu),
            ("CPU time over numpy's", "x", usage.cpu / bare.cpu),
            ("peak memory", "MB", usage.peak_mb),
            ("memory over files", "x", usage.peak_mb / (megabytes * sides / 2)),
            ("memory for each record", "bytes", further_mb * (1 << 20) / (sides * (MANY - FEW))),
        ):
            measures.setdefault((name, unit), {})[command] = value
    for name, unit in (("CPU time", "s"), ("peak memory", "MB")):
        values = measures[name, unit]
        measures[f"{name} over that of ls", "x"] = {c: value / values["ls"] for c, value in values.items()}
    rows = [Row(f"{MANY:,} pairs: numpy's subtract and max, CPU time", bare.cpu, "s")]
    for (name, unit), values in measures.items():
        rows += [Row(f"{MANY:,} records, {name}: tcap {c}", value, unit) for c, value in values.items()]
    return rows


def big_pair(folder: Path) -> list[Row]:
    """Two tensors of 4 GiB."""
    paths = folder / "big-reference.h5", folder / "big-target.h5"
    shape = BIG_BYTES // 4 // 4096, 4096
    for path, error in zip(paths, (0.0, 1e-3), strict=True):
        block = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32) * np.float32(1 + error)
        writer = Writer(path)
        blocks = (block for _ in range(BIG_BYTES // block.nbytes))
        writer.add_blocks(Key("big", "output"), blocks, FLOAT32, shape)
        writer.close()
    read = read_plainly(paths)
    usage = run(["compare", *map(str, paths)])
    return [
        Row("pair of 4 GiB: plain read", read, "s"),
        Row("pair of 4 GiB: tcap compare", usage.wall, "s"),
        Row("pair of 4 GiB: peak memory", usage.peak_mb, "MB", RSS_BUDGET_MB, f"{RSS_BUDGET_MB} MB"),
    ]


def first_run(folder: Path) -> list[Row]:
    """With no kernels compiled yet."""
    paths = build(folder, "first", 20, 4096 * 256)
    environment = {"XDG_CACHE_HOME": str(folder / "cache"), "TCAP_ENGINE": "numba"}
    usage = run(["compare", *map(str, paths)], **environment)
    assert "once per machine" in usage.output
    return [Row("first run, kernels compiled", usage.wall, "s", 15.0, "15 s")]


def seconds(action: Callable[[], object]) -> float:
    """The least of several runs."""
    found = []
    for _ in range(7):
        start = time.perf_counter()
        action()
        found.append(time.perf_counter() - start)
    return min(found)


def kernels() -> list[Row]:
    """One core, arrays of 64 MiB, in gigabytes of both sides a second."""
    random = np.random.default_rng(0)
    one, other = (random.standard_normal(16 << 20, dtype=np.float32) for _ in range(2))
    took = seconds(lambda: [one[i : i + 8192].dot(other[i : i + 8192]) for i in range(0, one.size, 8192)])
    rows = [Row("dot product of as many bytes", 2 * one.nbytes / took / 1e9, "GB/s")]
    kinds = (
        "float32",
        "bfloat16",
        "float16",
        "float8_e4m3fn",
        "float8_e5m2",
        "float64",
        "int64",
        "int32",
        "int16",
        "uint8",
        "bool",
    )
    for name in kinds:
        size = (64 << 20) // dtype(name).itemsize
        kind = getattr(ml_dtypes, name, None) or np.dtype(name)
        values = random.standard_normal(min(size, 1 << 22), dtype=np.float32)
        noise = 1 + np.float32(1e-3) * random.standard_normal(values.size, dtype=np.float32)
        if name.startswith(("int", "uint", "bool")):
            values, noise = np.abs(values) * 50, np.ones_like(values)
        reference = np.resize(values.astype(kind), size)
        target = np.resize((values * noise).astype(kind), size)
        if name.startswith(("int", "uint", "bool")):
            target[::2] = reference[::2] == 0
        operands = Operands(dtype_of(reference), dtype_of(target), (size // 4096, 4096))
        sides = [bits_of(side) for side in (reference, target)]
        engine = CompiledEngine if CompiledEngine.can_measure(operands) else NumpyEngine
        for label, pair in (("", sides), (", identical", [sides[0], sides[0]])):
            took = seconds(lambda e=engine, o=operands, p=pair: e(o).add(*p))  # type: ignore[misc]  # bound at once
            rate = 2 * sides[0].nbytes / took / 1e9
            how = "compiled" if engine is CompiledEngine else "numpy"
            rows.append(Row(f"{name}{label}, {how}", rate, "GB/s"))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--big", action="store_true", help="also compare a pair of 4 GiB")
    parser.add_argument("--many", action="store_true", help=f"also compare and align {MANY:,} small pairs")
    parser.add_argument("--identical", action="store_true", help="compare archives of the same bytes alone")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        if options.identical:
            rows = identical_pairs(folder)
        else:
            rows = [*first_run(folder), *whole_process(folder), *kernels()]
        if options.many:
            rows += many_pairs(folder)
        if options.big:
            if shutil.disk_usage(folder).free < BIG_FREE_BYTES:
                parser.error(f"--big needs {BIG_FREE_BYTES >> 30} GiB of free disk")
            rows += big_pair(folder)
    finally:
        shutil.rmtree(folder)
    if options.json:
        print(json.dumps([{**asdict(row), "holds": row.holds} for row in rows], indent=1))
    else:
        for row in rows:
            verdict = {None: "", True: f"within {row.rule}", False: f"ABOVE {row.rule}"}[row.holds]
            print(f"{row.what:<62} {row.measured:9.2f} {row.unit:<5} {verdict}")
    return int(any(row.holds is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
