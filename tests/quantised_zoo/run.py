"""Score `tcap compare` and `tcap localize` on quantised targets, as a user runs them.

Right targets have to end with 0, mistakes with 1, the guilty module first and the mistake named. Names are
words that each entry lists, looked for in what is said of the guilty module; `--json` keeps the reports.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from multiprocessing import get_context
from pathlib import Path
from typing import Final

from tensorcap.workload import Workload
from tests.quantised_zoo.catalogue import ENTRIES
from tests.quantised_zoo.entry import Entry

WAYS: Final = ("compare", "localize", "both")


@dataclass(frozen=True)
class Outcome:
    """What a command said of an entry.

    Attributes:
        way: `compare`, `localize` of two archives with the reference's model, or `both` models.
        exit_status: Of the command; -1 if it, or a capture, raised.
        first: The site that is accused first; empty if none is.
        report: What it printed, or the traceback.
        seconds: Of the command alone.
    """

    name: str
    way: str
    exit_status: int
    first: str
    report: str
    seconds: float

    @property
    def entry(self) -> Entry:
        return ENTRIES[self.name]

    @property
    def is_as_expected(self) -> bool:
        return self.exit_status == (0 if self.entry.is_right else 1)

    @property
    def is_guilty_first(self) -> bool:
        return self.first in self.entry.guilty

    @property
    def is_named(self) -> bool:
        """Is a word of the entry in what is said of the guilty module?"""
        said = "\n".join(block for site, block in blocks(self.report) if site in self.entry.guilty).lower()
        return any(word.lower() in said for word in self.entry.words)


def blocks(report: str) -> Iterator[tuple[str, str]]:
    """Sites and the lines about them: a suspect's block, or that of a divergence."""
    for match in re.finditer(r"^\d+\. (\S+) .*(?:\n  .*)*", report, re.MULTILINE):
        yield match[1], match[0].split("\n", 1)[-1]
    for match in re.finditer(r"^FIRST DIVERGENCE  \d+/([^/\s]+)/.*(?:\n  .*)*", report, re.MULTILINE):
        yield match[1], match[0].split("\n", 1)[-1]
    for match in re.finditer(r"^  \d+/([^/\s]+)/.*\n((?:    .*\n)+)", report, re.MULTILINE):
        yield match[1], match[2]


def _model(entry: Entry, folder: Path) -> tuple[str, str]:
    """The reference's and the target's model, as a command takes them."""
    line = f"from tests.quantised_zoo.catalogue import ENTRIES\n\nENTRY = ENTRIES[{entry.name!r}]\n"
    text = "\n\ndef reference():\n    return ENTRY.reference()\n"
    text += f"\n\ndef target():\n    return ENTRY.target({str(folder)!r})\n"
    (folder / "model.py").write_text(line + text)
    target = entry.target(folder)
    return f"{folder}/model.py:reference", (
        f"{folder}/model.py:target" if isinstance(target, Workload) else str(target)
    )


def outcomes_of(name: str, ways: Sequence[str]) -> list[Outcome]:
    """Capture both sides of an entry, and ask."""
    from click.testing import CliRunner

    from tensorcap_cli.main import main as tcap

    def run(*words: str) -> tuple[int, str, float]:
        began = time.perf_counter()
        try:
            result = CliRunner().invoke(tcap, words, catch_exceptions=False)
        except Exception:  # a command that dies is an outcome, too
            return -1, traceback.format_exc(), time.perf_counter() - began
        return result.exit_code, result.output, time.perf_counter() - began

    with tempfile.TemporaryDirectory() as given:
        folder = Path(given)
        reference, target = _model(ENTRIES[name], folder)
        archives = [str(folder / "ref.h5"), str(folder / "tgt.h5")]
        kind = ["onnx", target, "--like", archives[0]] if target.endswith(".onnx") else ["torch", target]
        for words in (["torch", reference, "-o", archives[0]], [*kind, "-o", archives[1]]):
            status, text, _ = run("capture", *words, "--params")
            if status:
                return [Outcome(name, way, -1, "", text, 0.0) for way in ways]
        commands = {
            "compare": ["compare", *archives],
            "localize": ["localize", *archives],
            "both": ["localize", *archives, "--target-model", target],
        }
        outcomes = []
        for way in ways:
            status, text, seconds = run(*commands[way])
            first = next((site for site, _ in blocks(text)), "") if status > 0 else ""
            outcomes.append(Outcome(name, way, status, first, text, seconds))
    return outcomes


def _settle() -> None:
    """One thread a process, and no warnings of packages between the lines of the log."""
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


def line_of(outcome: Outcome) -> str:
    """One line of the log."""
    entry = outcome.entry
    if entry.is_right:
        said = "" if outcome.is_as_expected else f"ACCUSED {outcome.first or 'nobody'}"
    else:
        said = f"{'first' if outcome.is_guilty_first else f'NOT FIRST, but {outcome.first or chr(45)}'}, " + (
            "named" if outcome.is_named else "not named"
        )
    kind = "right" if entry.is_right else "mistake"
    line = f"{outcome.name:34} {outcome.way:9} {kind:8} exit {outcome.exit_status:2}"
    return f"{line}  {outcome.seconds:5.1f} s  {said}"


def summary(outcomes: Sequence[Outcome]) -> str:
    """A line for each way."""
    lines = []
    for way in WAYS:
        chosen = [outcome for outcome in outcomes if outcome.way == way]
        right = [outcome for outcome in chosen if outcome.entry.is_right]
        wrong = [outcome for outcome in chosen if not outcome.entry.is_right]
        if chosen:
            lines.append(
                f"{way}: right ones 0: {sum(o.is_as_expected for o in right)} of {len(right)}; mistakes 1: "
                f"{sum(o.is_as_expected for o in wrong)} of {len(wrong)}, guilty first "
                f"{sum(o.is_guilty_first for o in wrong)}, named {sum(o.is_named for o in wrong)}"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the scores; 1 if an exit status is not as it should be, 2 if no entry is chosen."""
    parser = argparse.ArgumentParser(
        prog="tests.quantised_zoo.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", action="append", metavar="GLOB", help="names of entries, as 'gptq/*'")
    parser.add_argument("--way", action="append", choices=WAYS, help="all if none is given")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all outcomes, with the reports")
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    given = parser.parse_args(arguments)
    names = [n for n in ENTRIES if any(fnmatchcase(n, glob) for glob in given.only or ["*"])]
    if not names:
        parser.error(f"no entry is named {', '.join(given.only)}")
    outcomes: list[Outcome] = []
    with ProcessPoolExecutor(given.processes, get_context("spawn"), _settle) as pool:
        for found in pool.map(outcomes_of, names, [given.way or WAYS] * len(names)):
            for outcome in found:
                print(line_of(outcome), flush=True)
            outcomes += found
            if given.json:
                given.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    print(f"\n{summary(outcomes)}")
    return 0 if all(outcome.is_as_expected for outcome in outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
