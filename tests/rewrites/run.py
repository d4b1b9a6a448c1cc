"""Capture and compare every entry as a user would: `python -m tests.rewrites.run [--only GLOB]`."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from tests.rewrites.catalogue import MISTAKE_FACTOR, Entry, Run

FAMILIES: Final = ("gpt2", "llama", "gemma3", "qwen3_moe", "bert", "t5", "vit", "whisper", "resnet", "mamba")


@dataclass(frozen=True)
class Outcome:
    """What compare said of an entry, and what plain torch says.

    Attributes:
        exit_status: Of `tcap compare REF TGT`; -1 if capture or compare raised.
        divergence: The first divergence as it is reported, or the error.
        report: What `tcap compare REF TGT` prints.
        error: The relative distance of the main results; no unit.
        problem: Why the entry does not prove what it claims; empty if it does.
        seconds: For both captures and the comparison.
    """

    name: str
    kind: str
    is_right: bool
    guilty: str
    exit_status: int
    divergence: str
    report: str
    error: float
    problem: str
    seconds: float

    @property
    def names_guilty(self) -> bool:
        """Is the first divergence at the guilty module, inside it, or at one that holds it?"""
        parts = self.divergence.removeprefix("FIRST DIVERGENCE").split()
        site = parts[0].split("/")[1].split("@")[0] if parts and "/" in parts[0] else ""
        return bool(site) and (
            f"{site}.".startswith(f"{self.guilty}.") or f"{self.guilty}.".startswith(f"{site}.")
        )

    @property
    def is_as_expected(self) -> bool:
        return (self.exit_status == 0) == self.is_right and self.exit_status >= 0


def entries() -> dict[str, Entry]:
    """Every entry of the catalogue by name."""
    families = [importlib.import_module(f"tests.rewrites.{name}").FAMILY for name in FAMILIES]
    return {entry.name: entry for family in families for entry in family.entries}


def problem_of(entry: Entry, catalogue: dict[str, Entry]) -> tuple[float, str]:
    """The error of an entry in plain torch, and why it does not prove what it claims."""
    try:
        error = entry.error()
    except Exception as failure:
        return float("nan"), f"{type(failure).__name__}: {failure}"
    if entry.is_right:
        return (
            error,
            "" if error <= entry.tolerance else f"error {error:.2g}, expected at most {entry.tolerance:g}",
        )
    least = MISTAKE_FACTOR * max(catalogue[entry.beside].error(), 1e-7)
    return error, f"error {error:.2g}, expected more than {least:.2g}" if error <= least else ""


def compare_as_user(reference: Run, target: Run) -> tuple[int, str, str]:
    """Exit status, first divergence and text of `tcap compare REF TGT` without options."""
    import torch
    from click.testing import CliRunner

    import tensorcap
    from tensorcap_cli.main import main as tcap

    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder) / name) for name in ("ref.h5", "tgt.h5")]
        for run, path in zip((reference, target), paths, strict=True):
            with tensorcap.capture(run.model, path), torch.no_grad():
                run()
        printed = CliRunner().invoke(tcap, ["compare", *paths])
    if printed.exception and not isinstance(printed.exception, SystemExit):
        raise printed.exception
    lines = [line for line in printed.output.splitlines() if line.startswith("FIRST DIVERGENCE")]
    return printed.exit_code, "".join(lines), printed.output


def outcome_of(name: str, *, with_proof: bool = True) -> Outcome:
    """Judge an entry by tensorcap and by plain torch."""
    catalogue = entries()
    entry = catalogue[name]
    error, problem = problem_of(entry, catalogue) if with_proof else (0.0, "")
    start = time.perf_counter()
    try:
        status, divergence, report = compare_as_user(entry.reference(), entry.target())
    except Exception as failure:  # a comparison that dies is an outcome, too
        status, divergence, report = -1, f"{type(failure).__name__}: {failure}", traceback.format_exc()
    seconds = time.perf_counter() - start
    return Outcome(
        name, entry.kind, entry.is_right, entry.guilty, status, divergence, report, error, problem, seconds
    )


def settle_process() -> None:
    """One thread a process, and no warnings of frameworks between the lines of the log."""
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


def describe(outcome: Outcome) -> str:
    """One line of the log."""
    expected = "green" if outcome.is_right else "red"
    verdict = "as expected" if outcome.is_as_expected else "NOT AS EXPECTED"
    place = "" if outcome.is_right or outcome.names_guilty else f"  (guilty: {outcome.guilty})"
    line = (
        f"{outcome.name:42} expected {expected:5} exit {outcome.exit_status:2} {verdict:15} "
        f"error {outcome.error:7.1e} {outcome.seconds:5.1f} s  {outcome.divergence}{place}"
    )
    return f"{line}\n    NOT PROVEN: {outcome.problem}" if outcome.problem else line


def summary(outcomes: Sequence[Outcome]) -> str:
    """One line: correct ports that are green, and mistakes that are red."""
    right = [outcome for outcome in outcomes if outcome.is_right]
    wrong = [outcome for outcome in outcomes if not outcome.is_right]
    return (
        f"correct ports green: {sum(outcome.is_as_expected for outcome in right)} of {len(right)}; "
        f"mistakes red: {sum(outcome.is_as_expected for outcome in wrong)} of {len(wrong)}, "
        f"{sum(outcome.names_guilty for outcome in wrong)} of them first at the guilty module"
    )


def run(names: Sequence[str], log: Callable[[str], Any] = print, workers: int = 2) -> list[Outcome]:
    """Judge entries, in processes of their own."""
    outcomes = []
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=settle_process) as pool:
        for outcome in pool.map(outcome_of, names):
            log(describe(outcome))
            outcomes.append(outcome)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only",
        action="append",
        metavar="GLOB",
        help="entries whose names match, as 'gpt2/*'; may be repeated",
    )
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="write all outcomes, with the printed reports"
    )
    options = parser.parse_args()
    globs = options.only or ["*"]
    outcomes = run([name for name in entries() if any(fnmatchcase(name, glob) for glob in globs)])
    if options.json:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    print(f"\n{summary(outcomes)}")
    return 0 if all(outcome.is_as_expected and not outcome.problem for outcome in outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
