"""Measure alignment against the budgets of issue and design: 20,000 records on each side.

A model of 400 layers of 50 modules each: by names alone, by all evidence under equal and under other names,
by values under random names, and with tokens matched in every entry. Times are of `align`, mapping
and links, in this process. As ratios within one run: each over opening both archives, and how much more time
each record takes than in a quarter of the model. The whole command with 100,000 records on each side is in
`bench_compare.py --many`.

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
OPENING = "opening both archives"
EQUAL_BY_NAMES = "equal names, names alone"
EQUAL = "equal names, all evidence"
OTHER = "other names, all evidence"
RANDOM = "random names, values alone"
TOKENS_MATCHED = "a map that matches tokens"
BUDGETS = {EQUAL_BY_NAMES: 5.0, EQUAL: 15.0, OTHER: 15.0, RANDOM: 15.0, TOKENS_MATCHED: 5.0}  # seconds
GROWTH = 1.5  # times as long for each record, of four times as many


@dataclass(frozen=True)
class Row:
    """One line of the result; `budget` is None for what is only reported."""

    what: str
    measured: float
    unit: str
    budget: float | None = None

    @property
    def holds(self) -> bool | None:
        return None if self.budget is None else self.measured <= self.budget


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
    """CPU seconds of this process, which other ones do not add to."""
    start = time.process_time()
    what()
    return time.process_time() - start


def measure(folder: Path) -> list[Row]:
    """All times of the model, those of opening it, and of a quarter of it for each record."""
    times = measure_model(folder, LAYERS)
    quarter = measure_model(folder, LAYERS // 4)
    opening = times[OPENING]
    rows = [Row(OPENING, opening, "s")]
    for what, seconds in times.items():
        if what != OPENING:
            growth = seconds / quarter[what] / 4
            rows += [
                Row(what, seconds, "s", BUDGETS[what]),
                Row(f"{what}, over opening", seconds / opening, "x"),
                Row(f"{what}, each record over one of a quarter", growth, "x", GROWTH),
            ]
    return rows


def measure_model(folder: Path, layers: int) -> dict[str, float]:
    """Seconds of opening and of aligning a model of so many layers in all ways."""
    sites = [f"model.layers.{i}.part.p{j}" for i in range(layers) for j in range(PARTS)]
    others = [f"h.{i}.piece.q{(7 * j + 3) % PARTS}x" for i in range(layers) for j in range(PARTS)]
    draw = random.Random(0)
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    meaningless = ["".join(draw.choices(alphabet, k=14)) for _ in sites]
    paths = [
        write(folder / "reference.h5", sites),
        write(folder / "equal.h5", sites, 1e-6),
        write(folder / "other.h5", others, 1e-6),
        write(folder / "random.h5", meaningless, 1e-6),
    ]
    times = {OPENING: timed(lambda: [open_archive(path) for path in paths[:2]])}
    reference, equal, other, nameless = (open_archive(path) for path in paths)
    for what, target, by in (
        (EQUAL_BY_NAMES, equal, "names"),
        (EQUAL, equal, "all"),
        (OTHER, other, "all"),
        (RANDOM, nameless, "values"),
    ):
        found: list[Aligned] = []
        times[what] = timed(lambda t=target, b=by, f=found: f.append(align(reference, t, by=b)))  # type: ignore[misc]
        mapped = found[0].summary.reference.mapped
        if mapped < len(sites):
            raise RuntimeError(f"{what}: {mapped} of {len(reference)} are mapped")
    times[TOKENS_MATCHED] = timed(lambda: tokens(reference, equal, layers))
    for path in paths:
        path.unlink()
    return times


def tokens(reference: Archive, target: Archive, layers: int) -> None:
    numbers = tuple(map(str, range(layers)))
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
            verdict = "within" if row.holds else "ABOVE"
            budget = "" if row.budget is None else f"{verdict} {row.budget:g} {row.unit}"
            print(f"{row.what:<66} {row.measured:7.2f} {row.unit:<2} {budget}")
    return int(any(row.holds is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
