"""Measure what a folder of `.max` files costs in place of an archive, as a ratio within one run.

A folder of 400 files of 4 MiB is compared with an archive, and an archive of the same tensors with it, by
`tcap compare` as a whole process, in turns; the best of each counts.

Usage: python tests/benchmarks/bench_max_files.py [--json] [--folder FOLDER] [--count COUNT]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tensorcap.adapters import export
from tensorcap_formats.open import open_archive
from tests.benchmarks.bench_compare import Row, Usage, build, read_plainly, run

BUDGET = 1.3
ROUNDS = 5


@contextmanager
def workspace(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def measure(folder: Path, count: int) -> list[Row]:
    reference, target = build(folder, "max", count, 4096)
    dump = folder / "dump"
    with open_archive(target) as archive:
        export(archive, dump, layout="max")
    files = tuple(sorted(dump.iterdir()))
    read_plainly((reference, target))
    read_plainly(files)
    cases = {"archive with archive": target, "archive with .max files": dump}
    found: dict[str, list[Usage]] = {name: [] for name in cases}
    for _ in range(ROUNDS):
        for name, path in cases.items():
            found[name].append(run(["compare", str(reference), str(path)]))
    best = {name: min(runs, key=lambda usage: usage.wall) for name, runs in found.items()}
    cpu = {name: min(usage.cpu for usage in runs) for name, runs in found.items()}
    one, other = cases
    rows = [
        Row(f"{name}: {what}", value, unit)
        for name, usage in best.items()
        for what, value, unit in (
            ("wall time", usage.wall, "s"),
            ("CPU time", cpu[name], "s"),
            ("peak memory", usage.peak_mb, "MB"),
        )
    ]
    rows.append(Row("ratio of CPU times", cpu[other] / cpu[one], "x"))
    rows.append(Row("ratio of wall times", best[other].wall / best[one].wall, "x", BUDGET, f"{BUDGET} x"))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--count", type=int, default=400)
    options = parser.parse_args()
    with workspace(options.folder) as folder:
        rows = measure(folder, options.count)
    if options.json:
        print(json.dumps([{**asdict(row), "holds": row.holds} for row in rows], indent=2))
    else:
        for row in rows:
            rule = f"  budget {row.rule}: {'held' if row.holds else 'BROKEN'}" if row.budget else ""
            print(f"{row.what:<40}{row.measured:10.2f} {row.unit:<3}{rule}")
    return int(any(row.holds is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
