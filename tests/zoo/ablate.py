"""What each test, pass and family decides alone: `make ablate`, or `python -m tests.zoo.ablate --help`.

Each test of the policy and of a replay, each pass of matching and each family of hypotheses is left out in
turn, on the zoo, the ports and the traps. The tables go into `specs/ablation.md`.
"""

from __future__ import annotations

import argparse
import fnmatch
import multiprocessing
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, Final

from tests.zoo import ablation_of_matching as matching
from tests.zoo import ablation_of_tests as tests
from tests.zoo.architectures import ARCHITECTURES
from tests.zoo.catalogue import ENTRIES
from tests.zoo.deep_models import ARCHITECTURES as DEEP_MODELS

PARTS: Final = ("policy", "matching", "hypotheses")
_PROCESSES: Final = 2


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table as Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def policy_tables(trials: Sequence[tests.Trial]) -> str:
    """What tests of the policy decide, and tests of a replay."""
    of_mistakes = ("fails in mistakes", "red alone", "named alone", "misnamed by it")
    head = ("setting", "test", *of_mistakes, "fails in ports", "ports red by it alone")
    policy = table(head, tests.policy_rows(trials))
    of_both = ("mistakes green without", "misnamed without", "named only without")
    of_mechanisms = ("setting", "mechanism", *of_both, "ports red without", "ports red only with")
    mechanisms = table(of_mechanisms, tests.mechanism_rows(trials))
    replay = table(
        ("test of a replay", "mistakes accused", "alone", "ports accused", "by it alone"),
        tests.replay_rows(trials),
    )
    return f"{policy}\n\n{mechanisms}\n\n{replay}"


def matching_tables(matches: Sequence[matching.Matched]) -> str:
    """What passes of matching decide."""
    whole = table(("all passes", "right", "wrong", "missing"), matching.whole_rows(matches))
    return f"{whole}\n\n{table(('pass', *matching.SITUATIONS, 'alone'), matching.pass_rows(matches))}"


def family_table(trials: Sequence[tests.Trial]) -> str:
    """What families of hypotheses decide."""
    of_each = [f"{what}, {by}" for by in tests.EVIDENCE for what in ("explains", "alone", "wrong by it")]
    head = ("family", *of_each, "kinds that it alone names")
    return table(head, tests.family_rows(trials))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; 2 if nothing is chosen."""
    parser = argparse.ArgumentParser(prog="tests.zoo.ablate", description=__doc__)
    parser.add_argument("--part", action="append", choices=PARTS, help="all if none is given")
    parser.add_argument(
        "--only",
        action="append",
        metavar="GLOB",
        help="names of entries of the zoo, of ports; zoo, traps, deep",
    )
    options = parser.parse_args(arguments)
    globs, parts = options.only or ["*"], options.part or list(PARTS)

    def chosen(names: Iterable[str]) -> list[str]:
        return [name for name in names if any(fnmatch.fnmatchcase(name, glob) for glob in globs)]

    entries = chosen(ENTRIES) if {"policy", "hypotheses"} & {*parts} else []
    ports = chosen(matching.groups()) if "matching" in parts else []
    deep = list(DEEP_MODELS) if "policy" in parts and chosen(["deep"]) else []
    if not (entries or ports or deep):
        print(f"no entry and no port is named {', '.join(globs)}", file=sys.stderr)
        return 2
    groups = [[n for n in entries if ENTRIES[n].architecture == a] for a in ARCHITECTURES]
    groups = sorted(filter(None, groups), key=len, reverse=True)
    began = time.perf_counter()
    with ProcessPoolExecutor(_PROCESSES, multiprocessing.get_context("spawn")) as pool:
        tried = [pool.submit(tests.try_apart, group, parts) for group in groups]
        tried += [pool.submit(tests.try_deep_apart, architecture) for architecture in deep]
        matched = [pool.submit(matching.match_apart, name) for name in ports]
        trials = [trial for done in tried for trial in done.result()]
        matches = _results(matched)
    if "policy" in parts and trials:
        print(policy_tables(trials), end="\n\n")
    if matches:
        print(matching_tables(matches), end="\n\n")
    if "hypotheses" in parts and trials:
        print(family_table(trials), end="\n\n")
    print(f"{len(entries)} entries and {len(ports)} ports in {time.perf_counter() - began:.0f} s")
    return 0


def _results(futures: Iterable[Future[Any]]) -> list[Any]:
    return [future.result() for future in futures]


if __name__ == "__main__":
    sys.exit(main())
