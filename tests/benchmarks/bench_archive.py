"""Measure the archive against the budgets of the design, as ratios within one run.

Usage: python tests/benchmarks/bench_archive.py [--json] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tensorcap_formats.dtypes import dtype
from tensorcap_formats.keys import Key
from tensorcap_formats.open import open_archive
from tensorcap_formats.writing import Writer, recover

Array = np.ndarray[Any, Any]
FLOAT32 = dtype("float32")
SMALL, SMALL_COUNT = 256, 10_000  # elements of 4 bytes: 1 KiB
LARGE, LARGE_COUNT = 1 << 20, 400  # 4 MiB
SECONDS_A_TENSOR = 1e-4


@dataclass(frozen=True)
class Row:
    """One line of the result; `budget` is None for what is only reported."""

    what: str
    measured: float
    unit: str
    budget: float | None
    rule: str

    @property
    def holds(self) -> bool | None:
        return None if self.budget is None else self.measured <= self.budget


@dataclass(frozen=True)
class Seconds:
    wall: float
    cpu: float


def best(action: Callable[[], object], times: int = 3, *, writes: Path | None = None) -> Seconds:
    """The least wall and CPU time of a few runs; the file that each `writes` is removed before it."""
    walls, cpus = [], []
    for _ in range(times):
        if writes:
            writes.unlink(missing_ok=True)
        wall, cpu = time.perf_counter(), time.process_time()
        action()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return Seconds(min(walls), min(cpus))


def tensors(size: int, count: int) -> Iterator[Array]:
    """`count` unequal tensors in one memory, as modules give them that reuse it."""
    values = np.random.default_rng(0).standard_normal(size).astype("<f4")
    for number in range(count):
        values[0] = number
        yield values


def write(path: Path, size: int, count: int, *, stats_only: bool = False) -> Writer:
    writer = Writer(path, stats_only=stats_only)
    for number, values in enumerate(tensors(size, count)):
        key = Key(f"model.layers.{number // 8}.part{number % 8}", "output")
        writer.add(key, values, FLOAT32, (size,))
    return writer


def append(path: Path, size: int, count: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for values in tensors(size, count):
        os.write(fd, values.data)
    os.close(fd)


def clone(size: int, count: int) -> None:
    kept = [values.copy() for values in tensors(size, count)]
    assert len(kept) == count


def small_tensors(folder: Path) -> Iterator[Row]:
    path, plain = folder / "small.h5", folder / "plain"
    base = best(lambda: append(plain, SMALL, SMALL_COUNT), writes=plain)
    ours = best(lambda: write(path, SMALL, SMALL_COUNT).close(), writes=path)
    for kind in ("wall", "cpu"):
        append_seconds = getattr(base, kind)
        yield Row(
            f"write {SMALL_COUNT} x 1 KiB, {kind}",
            getattr(ours, kind),
            "s",
            3 * append_seconds + SMALL_COUNT * SECONDS_A_TENSOR,
            f"3 x plain append ({append_seconds:.3f} s) + 0.1 ms a tensor",
        )
    overhead = (path.stat().st_size - SMALL_COUNT * SMALL * 4) / SMALL_COUNT
    yield Row("overhead of the file", overhead, "bytes a tensor", None, "reported")

    def list_all() -> None:
        with open_archive(path) as archive:
            lines = [(r.key.text, r.shape, r.dtype.name, r.statistics) for r in archive.records]
            assert len(lines) == SMALL_COUNT

    yield Row(f"open and list {SMALL_COUNT}, warm", best(list_all, 5).wall, "s", 0.2, "0.2 s")


def cpu_in_fresh_memory(action: Callable[[], object]) -> float:
    """CPU seconds of an action in a process of its own, which has no memory to use again."""
    child = os.fork()
    if child == 0:
        action()
        os._exit(0)
    _, status, usage = os.wait4(child, 0)
    if status:
        raise ChildProcessError(status)
    return usage.ru_utime + usage.ru_stime


def large_tensors(folder: Path) -> Iterator[Row]:
    """Medians of rounds, since what fresh memory costs, and so a clone, varies with the machine's state."""
    path = folder / "large.h5"
    actions: dict[str, Callable[[], object]] = {
        "clone": lambda: clone(LARGE, LARGE_COUNT),
        "plain append": lambda: append(path, LARGE, LARGE_COUNT),
        "write": lambda: write(path, LARGE, LARGE_COUNT).close(),
        "statistics": lambda: write(path, LARGE, LARGE_COUNT, stats_only=True).close(),
    }
    seconds: dict[str, list[float]] = {what: [] for what in actions}
    for _ in range(7):
        for what, action in actions.items():
            seconds[what].append(cpu_in_fresh_memory(action))
            path.unlink(missing_ok=True)
    base = statistics.median(seconds["clone"])
    extra = LARGE_COUNT * SECONDS_A_TENSOR
    for what, factor in (("write", 2.0), ("statistics", 1.2), ("plain append", None)):
        rule = f"{factor} x clone ({base:.3f} s) + 0.1 ms a tensor" if factor else "reported"
        budget = factor * base + extra if factor else None
        yield Row(f"{what}, {LARGE_COUNT} x 4 MiB, CPU", statistics.median(seconds[what]), "s", budget, rule)


def recovery(folder: Path) -> Iterator[Row]:
    path = folder / "killed.h5"
    write(path, LARGE, 100).abandon()
    seconds = best(lambda: recover(path), 1).wall
    yield Row("recover 100 x 4 MiB", 100 * LARGE * 4 / seconds / 1e6, "MB/s", None, "reported")


def commands(folder: Path) -> Iterator[Row]:
    tcap = shutil.which("tcap", path=str(Path(sys.executable).parent))
    if tcap is None:
        return
    for arguments in (["--help"], ["ls", str(folder / "small.h5")]):
        run = [tcap, *arguments]
        seconds = best(lambda run=run: subprocess.run(run, check=True, stdout=subprocess.DEVNULL)).wall  # type: ignore[misc]
        yield Row(f"tcap {arguments[0]}, whole process", seconds, "s", None, "reported")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON list instead of a table")
    parser.add_argument("--folder", type=Path, help="where to write; 2 GB are needed")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for part in (small_tensors, large_tensors, recovery, commands):
            rows += list(part(Path(folder)))
    if options.json:
        print(json.dumps([{**asdict(row), "holds": row.holds} for row in rows]))
        return
    for row in rows:
        verdict = {True: "holds", False: "EXCEEDED", None: ""}[row.holds]
        budget = "" if row.budget is None else f"{row.budget:9.3f}"
        print(f"{row.what:38} {row.measured:9.3f} {row.unit:15} {budget:>9} {verdict:9} {row.rule}")


if __name__ == "__main__":
    main()
