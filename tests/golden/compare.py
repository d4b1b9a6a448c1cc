"""Compare folders of golden results: `python -m tests.golden.compare A B`; exit status 1 if they differ."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

_LINES = 40  # of a diff of one file


def compare(one: Path, other: Path, *, only: str = "*", lines: int = _LINES) -> int:
    """Print the differences of two folders, each file's diff cut after some lines; 1 if there are any."""
    files = [_files(side, only) for side in (one, other)]
    differing = [name for name in sorted(files[0] | files[1]) if _bytes(one / name) != _bytes(other / name)]
    alone = {
        side / name
        for side, others in ((one, other), (other, one))
        for name in _batches(side) - _batches(others)
    }
    for folder in sorted(alone):
        print(f"only there: {folder}")
    for name in differing:
        if {one / Path(name).parts[0], other / Path(name).parts[0]} & alone:
            continue
        if name not in files[0] or name not in files[1]:
            print(f"only in {one if name in files[0] else other}: {name}")
            continue
        diff = list(_diff(one / name, other / name))
        print("\n".join(diff[:lines]))
        if len(diff) > lines:
            print(f"... {len(diff) - lines} more lines; diff {one / name} {other / name}")
    print(f"{len(files[0] | files[1])} files, {len(differing)} differ")
    return 1 if differing or not files[0] else 0


def _files(folder: Path, only: str) -> set[str]:
    names = (p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
    return {str(n) for n in names if n.match(only) and not (len(n.parts) == 1 and n.suffix == ".log")}


def _batches(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_dir()}


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _diff(one: Path, other: Path) -> Iterator[str]:
    before, after = (path.read_text(errors="replace").splitlines() for path in (one, other))
    return difflib.unified_diff(before, after, str(one), str(other), lineterm="", n=1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the two folders that are named; batches that are in one only count as differences."""
    parser = argparse.ArgumentParser(prog="tests.golden.compare", description="Compare golden results.")
    parser.add_argument("one", type=Path)
    parser.add_argument("other", type=Path)
    parser.add_argument("--only", default="*", metavar="GLOB", help="paths of files, such as 'judge/*'")
    parser.add_argument("--lines", type=int, default=_LINES, help="of a diff of one file")
    chosen = parser.parse_args(arguments)
    return compare(chosen.one, chosen.other, only=chosen.only, lines=chosen.lines)


if __name__ == "__main__":
    sys.exit(main())
