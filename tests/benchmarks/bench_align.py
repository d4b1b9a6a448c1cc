"""Measure alignment against the budgets of issue and design: 20,000 records on each side.

A model of 400 layers of 50 modules each: by names alone, by all evidence under equal and under other names,
by values under random names, and with tokens matched in every entry. Times are of `align`, mapping
and links, in this process; opening both archives is the measure beside it.

Usage: python tests/benchmarks/bench_align.py [--json] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tensorcap.alignment import Aligned, Alignment, Entry, align
from tensorcap.alignment.tokens import TokenRule
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import dtype
from tensorcap_formats.keys import Key
from tensorcap_formats.open import open_archive
from tensorcap_formats.writing import Writer

LAYERS = 400
PARTS = 50
FLOAT32 = dtype("float32")
INT64 = dtype("int64")
TOKENS = 8
WITHOUT_VALUES_SECONDS = 5.0
WITH_VALUES_SECONDS = 15.0


@dataclass(frozen=True)
class Row:
    """One line of the result; `budget` is None for what is only reported."""

    what: str
    seconds: float
    budget: float | None = None

    @property
    def holds(self) -> bool | None:
        return None if self.budget is None else self.seconds <= self.budget


def write(path: Path, names: Iterable[str], noise: float = 0.0) -> Path:
    """An archive of a run in which every module gave other values; another seed for the noise of a port."""
    writer = Writer(path)
    ids = np.arange(TOKENS)[None]
    writer.add(Key("@root", "input.input_ids"), ids, INT64, ids.shape)
    listed = list(names)
    for i, name in enumerate(listed):
        drawn = np.random.default_rng(i).standard_normal((1, TOKENS, 8), dtype=np.float32)
        if noise:
            drawn *= 1 + noise * np.random.default_rng([1, i]).standard_normal(drawn.shape)
        writer.add(Key(name, "output"), drawn.astype(np.float32), FLOAT32, drawn.shape)
    writer.close(run={"modules": [{"path": name, "class": "torch.nn.Linear"} for name in listed]})
    return path


def timed(what: Callable[[], object]) -> float:
    start = time.perf_counter()
    what()
    return time.perf_counter() - start


def measure(folder: Path) -> list[Row]:
    sites = [f"model.layers.{i}.part.p{j}" for i in range(LAYERS) for j in range(PARTS)]
    others = [f"h.{i}.piece.q{(7 * j + 3) % PARTS}x" for i in range(LAYERS) for j in range(PARTS)]
    draw = random.Random(0)
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    meaningless = ["".join(draw.choices(alphabet, k=14)) for _ in sites]
    paths = [
        write(folder / "reference.h5", sites),
        write(folder / "equal.h5", sites, 1e-6),
        write(folder / "other.h5", others, 1e-6),
        write(folder / "random.h5", meaningless, 1e-6),
    ]
    reference, equal, other, nameless = (open_archive(path) for path in paths)
    rows = [Row("opening both archives", timed(lambda: [open_archive(path) for path in paths[:2]]))]
    for what, target, by, budget in (
        ("equal names, names alone", equal, "names", WITHOUT_VALUES_SECONDS),
        ("equal names, all evidence", equal, "all", WITH_VALUES_SECONDS),
        ("other names, all evidence", other, "all", WITH_VALUES_SECONDS),
        ("random names, values alone", nameless, "values", WITH_VALUES_SECONDS),
    ):
        found: list[Aligned] = []
        took = timed(lambda t=target, b=by, f=found: f.append(align(reference, t, by=b)))  # type: ignore[misc]
        mapped = found[0].summary.reference.mapped
        if mapped < len(sites):
            raise RuntimeError(f"{what}: {mapped} of {len(reference)} are mapped")
        rows.append(Row(what, took, budget))
    rows.append(
        Row("a map that matches tokens", timed(lambda: tokens(reference, equal)), WITHOUT_VALUES_SECONDS)
    )
    return rows


def tokens(reference: Archive, target: Archive) -> None:
    numbers = tuple(map(str, range(LAYERS)))
    places = [f"model.layers.{{i}}.part.p{j}" for j in range(PARTS)]
    entries = tuple(Entry((place,), (place,), {"i": numbers}) for place in places)
    align(reference, target, mapping=Alignment(entries, tokens=TokenRule("match_tokens")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        rows = measure(folder)
    finally:
        shutil.rmtree(folder)
    if options.json:
        print(json.dumps([{**asdict(row), "holds": row.holds} for row in rows], indent=1))
    else:
        for row in rows:
            budget = "" if row.budget is None else f"{'within' if row.holds else 'ABOVE'} {row.budget:g} s"
            print(f"{row.what:<40} {row.seconds:7.2f} s  {budget}")
    return int(any(row.holds is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
