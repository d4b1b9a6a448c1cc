"""Verify the two ports, right and with each mistake: `python -m tests.max.ports.run --help`."""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from tensorcap import open_archive
from tensorcap_formats.dtypes import Array
from tests.max.ports.mistakes import MISTAKES, PORTS, Mistake, source
from tests.zoo.localisers import zoo_kind

DTYPES: Final = ("float32", "bfloat16")
NAMES: Final = (*PORTS, *MISTAKES)
_ROOT: Final = Path(__file__).parents[3]
_PYTHONPATH: Final = os.pathsep.join(str(_ROOT / part) for part in (".", "formats", "cli"))
_TIMEOUT_SECONDS: Final = 1800  # of a compiler that hangs
_HEADS: Final = (
    "entry",
    "dtype",
    "result differs by",
    "guilty",
    "guilty first",
    "innocents",
    "kind",
    "status",
    "seconds",
)


@dataclass(frozen=True)
class Outcome:
    """What `tcap verify` reports of a port.

    Attributes:
        name: A port's, if it is right, or a mistake's.
        dtype: Of the target.
        status: The command's exit status.
        seconds: How long it took, compiling included.
        difference: Greatest difference of the model's results, relative to the greatest value of the
            reference's; None if there is no report.
        suspects: The accused modules and what is said to be wrong with them, as the zoo calls it.
        message: What the command printed, if there is no report.
    """

    name: str
    dtype: str
    status: int
    seconds: float
    difference: float | None
    suspects: tuple[tuple[str, str | None], ...]
    message: str = ""

    @property
    def mistake(self) -> Mistake | None:
        """The mistake; None for a right port."""
        return MISTAKES.get(self.name)

    @property
    def right_answers(self) -> set[str]:
        """Sites that may be accused."""
        return {self.mistake.guilty, *self.mistake.also} if self.mistake else set()

    @property
    def is_guilty_first(self) -> bool:
        """Whether the first suspect is a right answer."""
        return bool(self.suspects) and self.suspects[0][0] in self.right_answers

    @property
    def innocents(self) -> list[str]:
        """Suspects that are no right answer."""
        return [module for module, _ in self.suspects if module not in self.right_answers]

    @property
    def is_kind_right(self) -> bool:
        """Whether the first right answer among the suspects has a kind that is true of the mistake."""
        if self.mistake is None:
            return False
        kinds = {self.mistake.kind, *self.mistake.also_kinds}
        return next((kind in kinds for module, kind in self.suspects if module in self.right_answers), False)

    @property
    def is_green(self) -> bool:
        """Whether nothing is said to be wrong."""
        return self.status == 0 and not self.suspects

    def row(self) -> tuple[str, ...]:
        """A line of the table."""
        difference = "none" if self.difference is None else f"{self.difference:.1e}"
        answer = self.mistake.guilty if self.mistake else "nobody"
        accused = ", ".join(f"{module} ({kind})" for module, kind in self.suspects) or "nobody"
        if self.mistake is None:
            first, kind = ("green" if self.is_green else f"NOT green: {accused}"), ""
        else:
            first = "yes" if self.is_guilty_first else f"NO: {accused}"
            kind = "right" if self.is_kind_right else f"NO: {self._kinds()}, right is {self.mistake.kind}"
        innocents = ", ".join(self.innocents) or "none"
        status, seconds = str(self.status), f"{self.seconds:.0f}"
        return (self.name, self.dtype, difference, answer, first, innocents, kind, status, seconds)

    def _kinds(self) -> str:
        kinds = [kind or "nothing" for module, kind in self.suspects if module in self.right_answers]
        return kinds[0] if kinds else "not accused"


def verify(name: str, dtype: str, folder: Path) -> Outcome:
    """Write the file of a port and verify it.

    Args:
        name: A port's, or a mistake's.
        dtype: Of the target; the reference is in float32.
        folder: Where the file and the folder of reports go.
    """
    mistake = MISTAKES.get(name)
    port = mistake.port if mistake else name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{port}.py").write_text(mistake.source() if mistake else source(port), encoding="utf-8")
    sides = (f"{port}.py:reference", f"{port}.py:port", "--dtype", dtype)
    options = ("-o", "report", "--force", "--timeout", str(_TIMEOUT_SECONDS))
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "tensorcap_cli", "verify", *sides, *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": _PYTHONPATH},
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - began
    report = folder / "report" / "verify.json"
    if not report.exists():
        return Outcome(name, dtype, done.returncode, seconds, None, (), done.stdout + done.stderr)
    suspects = json.loads(report.read_text(encoding="utf-8"))["suspects"]
    difference = _difference(report.parent / "reference.h5", report.parent / "target.h5")
    accused = tuple((s["module"], zoo_kind((s["diagnosis"] or {}).get("kind"))) for s in suspects)
    return Outcome(name, dtype, done.returncode, seconds, difference, accused)


def _difference(reference: Path, target: Path) -> float:
    """Greatest difference of results of the models, relative to the greatest value of each."""
    pairs = list(zip(_results(reference), _results(target), strict=True))
    return max(float(np.abs(ours - theirs).max() / np.abs(ours).max()) for ours, theirs in pairs)


def _results(path: Path) -> list[Array]:
    """What the model itself returns, without a batch axis."""
    with open_archive(path) as archive:
        return [
            np.squeeze(archive.load(record)).astype(np.float64)
            for record in archive.records
            if record.key.site == "@root" and record.key.slot.startswith("output")
        ]


def _run(names: Sequence[str], dtypes: Sequence[str], folder: Path) -> Iterator[Outcome]:
    for dtype in dtypes:
        for name in names:
            outcome = verify(name, dtype, folder / f"{name}-{dtype}")
            print(f"{name} {dtype}: {outcome.seconds:.0f} s {outcome.message}", file=sys.stderr, flush=True)
            yield outcome


def _counts(outcomes: Sequence[Outcome], dtype: str) -> str:
    mistakes = [o for o in outcomes if o.dtype == dtype and o.mistake]
    ports = [o for o in outcomes if o.dtype == dtype and not o.mistake]
    first, kinds = sum(o.is_guilty_first for o in mistakes), sum(o.is_kind_right for o in mistakes)
    accused, green = sum(bool(o.innocents) for o in mistakes), sum(o.is_green for o in ports)
    return (
        f"{dtype}: of {len(mistakes)} mistakes guilty first {first}, kind right {kinds}, "
        f"with innocents accused {accused}; right ports green {green} of {len(ports)}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row for each entry as it is verified, and the counts; 2 if no entry is chosen."""
    parser = argparse.ArgumentParser(prog="tests.max.ports.run", description=__doc__)
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="both if none is given")
    parser.add_argument("--only", action="append", metavar="GLOB", help="names of ports and mistakes")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where the files and reports are kept")
    chosen = parser.parse_args(arguments)
    names = [n for n in NAMES if any(fnmatch.fnmatchcase(n, glob) for glob in chosen.only or ["*"])]
    if not names:
        print(f"no entry is named {', '.join(chosen.only)}; there are {', '.join(NAMES)}", file=sys.stderr)
        return 2
    dtypes = chosen.dtype or DTYPES
    print(f"| {' | '.join(_HEADS)} |\n|{'---|' * len(_HEADS)}", flush=True)
    outcomes = []
    with tempfile.TemporaryDirectory() as temporary:
        for outcome in _run(names, dtypes, chosen.keep or Path(temporary)):
            outcomes.append(outcome)
            print(f"| {' | '.join(outcome.row())} |", flush=True)
    print("", *(_counts(outcomes, dtype) for dtype in dtypes), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
