"""Where the limits of a replay come from: `python -m tests.zoo.calibrate`, a table for `specs/policy.md`.

Of each statistic: the largest value that a right module has, of correct ports and of mistakes in others, and
the least that a guilty one has beyond the limit. Values are what they would be of many elements (POL-30).
"""

from __future__ import annotations

import argparse
import fnmatch
import math
import multiprocessing
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from tensorcap.comparison import POLICY, Finding
from tensorcap.rerun import OwnError, replay
from tensorcap.session import capture_workload
from tests.zoo.architectures import ARCHITECTURES
from tests.zoo.catalogue import ENTRIES
from tests.zoo.effect import is_exercised
from tests.zoo.entry import DTYPES, Entry, Mistake, build

_PROCESSES: Final = 2
_OWN: Final = ("own_error_leaf", "own_error_composite")

# Green limits of many elements, by statistic, in the order of the table
LIMITS: Final[Mapping[str, float]] = {
    "own_error_leaf": POLICY.replayed_leaf.green,
    "own_error_leaf, worst rows": POLICY.replayed_tail * POLICY.replayed_leaf.green,
    "own_error_composite": POLICY.replayed_composite.green,
    "own_error_composite, worst rows": POLICY.replayed_tail * POLICY.replayed_composite.green,
    "twin_ratio": POLICY.twin_ratio.green,
    "ulp_share, more than 1 ulp": POLICY.twin_bits.green,
    "ulp_share, other values": POLICY.twin_values,
    "outlier_element": 1.0,
    "own, float32": POLICY.wide_own.green,
}


@dataclass(frozen=True)
class Value:
    """One statistic of one module in one run.

    Attributes:
        statistic: A key of `LIMITS`.
        value: What it would be of many elements; of E, in units of its limit.
        entry: Name of the entry.
        module: Its site.
        is_guilty: Whether it is the guilty one, or one that it makes wrong by itself.
    """

    statistic: str
    value: float
    entry: str
    module: str
    is_guilty: bool


def values_of(own: OwnError, *, is_wide: bool) -> Iterator[tuple[str, float]]:
    """The statistics of what a module made that decide on it: with a twin that is as far off, A does not."""
    is_excused = own.ratio is not None and own.ratio <= POLICY.twin_ratio.green
    for finding in own.findings:
        name = _statistic(finding, is_wide=is_wide)
        if name is not None and not (finding.test in _OWN and is_excused):
            # E and C are compared by parts of their limits, which depend on the tensor
            yield name, finding.value / finding.limit * LIMITS[name]


def _statistic(finding: Finding, *, is_wide: bool) -> str | None:
    if finding.test in _OWN:
        if is_wide:
            return "own, float32"
        return f"{finding.test}, worst rows" if "worst rows" in finding.text else finding.test
    if finding.test == "ulp_share":
        return "ulp_share, more than 1 ulp" if "ulp" in finding.text else "ulp_share, other values"
    return finding.test if finding.test in LIMITS else None


def measure(entries: Sequence[Entry], dtypes: Sequence[str], folder: Path) -> list[Value]:
    """Replay entries of one architecture."""
    reference = folder / "reference.h5"
    found = []
    for entry in entries:
        for dtype in dtypes:
            guilty = set()
            if isinstance(entry, Mistake):
                if not is_exercised(entry, dtype):
                    continue
                guilty = {entry.guilty, *entry.also}
            pair = build(entry, dtype)
            if not reference.exists():
                capture_workload(pair.reference, reference)
            target, mapping = folder / "target.h5", None
            torch.manual_seed(0)
            capture_workload(pair.target, target)
            if not isinstance(entry, Mistake) and entry.mapping is not None:
                mapping = folder / "map.toml"
                mapping.write_text(entry.mapping)
            done = replay(reference, target, reference_model=replace(pair.reference, seed=0), mapping=mapping)
            found += [
                Value(name, value, entry.name, own.module, own.module in guilty)
                for own in done.own_errors
                for name, value in values_of(own, is_wide=dtype == "float32")
            ]
            target.unlink()
    return found


def _measure_apart(names: Sequence[str], dtypes: Sequence[str]) -> list[Value]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        return measure([ENTRIES[name] for name in names], dtypes, Path(folder))


@dataclass(frozen=True)
class Row:
    """What the zoo says of one limit.

    Attributes:
        statistic: A key of `LIMITS`.
        right: The largest value of a right module; None where it was never measured.
        where: Entry and module of that.
        caught: Mistakes whose module has a value beyond the limit.
        alone: Those that no other statistic shows.
        guilty: The least such value; None without one.
    """

    statistic: str
    right: float | None
    where: str
    caught: int
    alone: int
    guilty: float | None


def rows_of(values: Iterable[Value]) -> list[Row]:
    """The rows of the table."""
    right: dict[str, Value] = {}
    worst: dict[str, dict[str, float]] = {name: {} for name in LIMITS}  # of the guilty, by entry
    for value in values:
        if value.is_guilty:
            of = worst[value.statistic]
            of[value.entry] = max(value.value, of.get(value.entry, 0.0))
        elif value.statistic not in right or value.value > right[value.statistic].value:
            right[value.statistic] = value
    beyond = {name: {e: v for e, v in of.items() if v > LIMITS[name]} for name, of in worst.items()}
    rows = []
    for name in LIMITS:
        others = {entry for other, of in beyond.items() if other != name for entry in of}
        first = right.get(name)
        rows.append(
            Row(
                name,
                None if first is None else first.value,
                "" if first is None else f"{first.entry}: {first.module}",
                len(beyond[name]),
                len(beyond[name].keys() - others),
                min(beyond[name].values(), default=None),
            )
        )
    return rows


def table(rows: Sequence[Row]) -> str:
    """The table as Markdown."""
    lines = [
        "| statistic | green up to | largest of right | margin | mistakes beyond | by it alone | least |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        limit = LIMITS[row.statistic]
        margin = "–" if not row.right else f"{limit / row.right:.2g}"
        counts = row.caught, row.alone, _text(row.guilty)
        cells = (row.statistic, f"{limit:g}", _text(row.right), margin, *counts)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _text(value: float | None) -> str:
    return "–" if value is None else "∞" if math.isinf(value) else f"{value:.3g}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and on stderr where the largest values of right modules are."""
    parser = argparse.ArgumentParser(prog="tests.zoo.calibrate", description=__doc__)
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="both if none is given")
    parser.add_argument("--only", action="append", metavar="GLOB", help="names of entries")
    given = parser.parse_args(arguments)
    names = [n for n in ENTRIES if any(fnmatch.fnmatchcase(n, glob) for glob in given.only or ["*"])]
    groups = [[n for n in names if ENTRIES[n].architecture == a] for a in ARCHITECTURES]
    dtypes = given.dtype or list(DTYPES)
    values: list[Value] = []
    with ProcessPoolExecutor(_PROCESSES, multiprocessing.get_context("spawn")) as pool:
        for done in [pool.submit(_measure_apart, group, dtypes) for group in groups if group]:
            values += done.result()
    rows = rows_of(values)
    print(table(rows))
    for row in rows:
        print(f"{row.statistic}: {row.where}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
