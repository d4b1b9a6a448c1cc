"""Measure localisers on the zoo: `make zoo`, or `python -m tests.zoo.run --help`."""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Final

import torch

from tensorcap.session import capture_workload
from tests.zoo.architectures import ALL_ARCHITECTURES
from tests.zoo.catalogue import ALL_ENTRIES, ENTRIES
from tests.zoo.effect import is_exercised
from tests.zoo.entry import DTYPES, Entry, Mistake, build
from tests.zoo.fifth.catalogue import FIFTH_ENTRIES
from tests.zoo.fourth.catalogue import FOURTH_ENTRIES
from tests.zoo.localisers import LOCALISERS, Suspect
from tests.zoo.scoring import Outcome, Score
from tests.zoo.second.catalogue import HALVES
from tests.zoo.third.catalogue import THIRD_ENTRIES

_PROCESSES: Final = 2


def measure(
    entries: Sequence[Entry], dtypes: Sequence[str], localisers: Sequence[str], folder: Path
) -> list[Outcome]:
    """Capture both sides of entries, and ask localisers.

    Args:
        entries: Entries of one architecture, which have one reference.
        dtypes: Of the targets.
        localisers: Names of `LOCALISERS`.
        folder: Where archives may lie.
    """
    reference = folder / "reference.h5"
    outcomes = []
    for entry in entries:
        for dtype in dtypes:
            pair = build(entry, dtype)
            if not reference.exists():
                capture_workload(pair.reference, reference)
            target = folder / f"{entry.name}-{dtype}.h5"
            torch.manual_seed(0)
            capture_workload(pair.target, target)
            mapping = None
            if not isinstance(entry, Mistake) and entry.mapping is not None:
                mapping = folder / f"{entry.name}.toml"
                mapping.write_text(entry.mapping)
            shows = isinstance(entry, Mistake) and is_exercised(entry, dtype)
            for name in localisers:
                began, error = time.perf_counter(), None
                suspects: Sequence[Suspect] = ()
                try:
                    suspects = LOCALISERS[name](reference, target, pair.reference, pair.target, mapping)
                except Exception as failure:  # whatever it is, it is told by name and counts as a miss
                    error = f"{type(failure).__name__}: {failure}"
                seconds = time.perf_counter() - began
                outcomes.append(Outcome(entry, dtype, name, shows, suspects, seconds, error))
            target.unlink()
    return outcomes


def _measure_apart(
    names: Sequence[str], dtypes: Sequence[str], localisers: Sequence[str]
) -> list[dict[str, object]]:
    """As `measure`, in a process of its own: entries hold functions, so that names go in and come out."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        found = measure([ALL_ENTRIES[name] for name in names], dtypes, localisers, Path(folder))
    return [{**vars(outcome), "entry": outcome.entry.name} for outcome in found]


def measured(names: Sequence[str], dtypes: Sequence[str], localisers: Sequence[str]) -> list[Outcome]:
    """Measure on two processes, those of one architecture together, and tell on stderr how far it is."""
    groups = [[n for n in names if ALL_ENTRIES[n].architecture == a] for a in ALL_ARCHITECTURES]
    groups = sorted(filter(None, groups), key=len, reverse=True)
    order = {name: at for at, name in enumerate(ALL_ENTRIES)}
    outcomes: list[Outcome] = []
    with ProcessPoolExecutor(_PROCESSES, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(_measure_apart, group, dtypes, localisers): group for group in groups}
        for done in as_completed(running):
            for parts in done.result():
                entry = ALL_ENTRIES[str(parts.pop("entry"))]
                outcomes.append(Outcome(entry=entry, **parts))  # type: ignore[arg-type]  # the fields of an outcome
            print(f"{ALL_ENTRIES[running[done][0]].architecture}: done", file=sys.stderr)
    return sorted(outcomes, key=lambda o: order[o.entry.name])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the scores; 2 if no entry is chosen."""
    parser = argparse.ArgumentParser(prog="tests.zoo.run", description="Measure localisers on the zoo.")
    parser.add_argument("--localiser", action="append", choices=LOCALISERS, help="all if none is given")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="both if none is given")
    parser.add_argument(
        "--zoo",
        choices=("first", "second", "third", "fourth", "fifth"),
        default="first",
        help="the first if not given",
    )
    parser.add_argument("--half", choices=HALVES, help="of the second zoo; the held-out one is for the end")
    parser.add_argument("--only", action="append", metavar="GLOB", help="names of entries")
    parser.add_argument("--json", action="store_true", help="scores and outcomes as one object")
    parser.add_argument("--times", action="store_true", help="how long each entry took")
    given = parser.parse_args(arguments)
    if (given.zoo == "second") != (given.half is not None):
        parser.error("the second zoo, and it alone, is measured by halves: --zoo second --half dev")
    zoos = {
        "first": ENTRIES,
        "third": THIRD_ENTRIES,
        "fourth": FOURTH_ENTRIES,
        "fifth": FIFTH_ENTRIES,
    }
    entries = HALVES[given.half] if given.half is not None else zoos[given.zoo]
    names = [n for n in entries if any(fnmatch.fnmatchcase(n, glob) for glob in given.only or ["*"])]
    if not names:
        print(f"no entry of the zoo is named {', '.join(given.only)}", file=sys.stderr)
        return 2
    localisers, dtypes = given.localiser or list(LOCALISERS), given.dtype or list(DTYPES)
    began = time.perf_counter()
    outcomes = measured(names, dtypes, localisers)
    seconds = time.perf_counter() - began
    scores = [
        Score(name, dtype, [o for o in outcomes if (o.localiser, o.dtype) == (name, dtype)])
        for name in localisers
        for dtype in dtypes
    ]
    if given.json:
        whole = {"scores": [s.as_json() for s in scores], "outcomes": [o.as_json() for o in outcomes]}
        print(json.dumps({**whole, "seconds": round(seconds, 1)}, indent=1))
        return 0
    for score in scores:
        print("\n".join(score.lines()), end="\n\n")
    if given.times:
        for outcome in outcomes:
            print(f"{outcome.seconds:6.2f} s  {outcome.localiser}  {outcome.dtype}  {outcome.entry.name}")
    print(f"{len(names)} entries in {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
