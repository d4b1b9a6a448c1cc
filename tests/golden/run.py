"""Golden results of a tree: what its commands print and write, to be held against those of another tree.

    python -m tests.golden.run OUT                    the tree that this file is in
    python -m tests.golden.run OUT --tree DIR         another one, which need not have this program
    python -m tests.golden.run OUT --full             all of the zoo and all ports too
    make golden REF=COMMIT                            this tree against a commit

A guard for changes that are none of behaviour. Results are for two trees on one machine (values depend on the
processor and on versions), so that none are committed. Each batch runs in a process of its own, always in the
same folder, on a copy of the tree: so paths are equal, and the tree may be edited meanwhile.
"""

from __future__ import annotations

import argparse
import fcntl
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.golden.compare import compare
from tests.golden.scenarios import DEFAULT, FULL, Batch

ROOT: Final = Path(__file__).resolve().parents[2]
PLACE: Final = Path("/tmp/tensorcap-golden")  # the same for every tree: archives hold paths of models
_PARTS: Final = ("cli", "examples", "formats", "tensorcap", "tests")


def record(tree: Path, out: Path, batches: Mapping[str, Batch]) -> int:
    """Record batches of a tree in place of those that `out` has; the count of batches that failed."""
    out.mkdir(parents=True, exist_ok=True)
    PLACE.mkdir(exist_ok=True)
    with (PLACE / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another run in {PLACE}", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        copy, work = PLACE / "tree", PLACE / "work"
        for folder in (copy, work):
            shutil.rmtree(folder, ignore_errors=True)
        for part in _PARTS:
            shutil.copytree(tree / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copyfile(Path(__file__).with_name("record.py"), PLACE / "record.py")
        failed = [name for name, batch in batches.items() if not _record(name, batch, copy, work, out)]
        shutil.rmtree(work, ignore_errors=True)
    if failed:
        print(f"failed: {', '.join(failed)}; see the logs in {out}", file=sys.stderr)
    return len(failed)


def _record(name: str, batch: Batch, tree: Path, work: Path, out: Path) -> bool:
    began = time.perf_counter()
    shutil.rmtree(out / name, ignore_errors=True)
    python = Path(sys.prefix).resolve() / "bin" / "python"
    has_old_names = not (tree / "cli" / "tensorcap_cli" / "commands").is_dir()
    given = json.dumps(batch.as_json(has_old_names=has_old_names)).replace("{tree}", str(tree))
    with (out / f"{name}.log").open("w") as log:
        done = subprocess.run(
            [str(python), "-P", str(PLACE / "record.py"), str(work / name), str(out.resolve() / name)],
            input=given,
            stdout=log,
            stderr=log,
            text=True,
            env=_environment(tree),
            check=False,
        )
    shutil.rmtree(work / name, ignore_errors=True)
    print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return done.returncode == 0


def _environment(tree: Path) -> dict[str, str]:
    kept = {
        name: os.environ[name] for name in ("HOME", "PATH", "TMPDIR", "XDG_CACHE_HOME") if name in os.environ
    }
    return {
        **kept,
        "COLUMNS": "100",
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
        "NUMBA_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join(str(tree / part) for part in (".", "formats", "cli")),
        "TERM": "dumb",
    }


def compare_with(ref: str, batches: Mapping[str, Batch]) -> int:
    """Record this tree and that of a commit, and compare; 0 if all is equal."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", str(folder / "tree"), ref], check=True)
        try:
            failed = record(folder / "tree", folder / "before", batches)
        finally:
            subprocess.run([*git, "remove", "--force", str(folder / "tree")], check=True)
        failed += record(ROOT, folder / "now", batches)
        return max(compare(folder / "before", folder / "now"), min(failed, 1))


def main(arguments: Sequence[str] | None = None) -> int:
    """Record, or record and compare; 0 if every batch ran and, with --ref, all is equal."""
    parser = argparse.ArgumentParser(prog="tests.golden.run", description="Record golden results of a tree.")
    parser.add_argument("out", nargs="?", type=Path, help="a folder; batches that it has are recorded anew")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the tree under test; by default this one")
    parser.add_argument("--ref", metavar="COMMIT", help="record this tree and a commit's, and compare")
    parser.add_argument("--only", action="append", metavar="GLOB", help="names of batches")
    parser.add_argument("--full", action="store_true", help="all of the zoo and all ports too")
    parser.add_argument("--list", action="store_true", help="print the names of batches")
    chosen = parser.parse_args(arguments)
    every = FULL if chosen.full else DEFAULT
    globs = chosen.only or ["*"]
    batches = {n: b for n, b in every.items() if any(fnmatch.fnmatchcase(n, glob) for glob in globs)}
    if chosen.list:
        print("\n".join(batches))
        return 0
    if not batches or (chosen.out is None) == (chosen.ref is None):
        parser.error("expected OUT or --ref, and a glob that matches a batch")
    if chosen.ref is not None:
        return compare_with(chosen.ref, batches)
    return min(record(chosen.tree.resolve(), chosen.out, batches), 1)


if __name__ == "__main__":
    sys.exit(main())
