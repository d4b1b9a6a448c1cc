"""What each pass of matching decides alone, on ports with their truth, on ports of the zoo and on traps.

Ports are matched as they are, by values alone, and with a mistake in one leaf or, as a mistake of porting is,
in the same leaf of every layer. Of the ports as they are, parameters count too, which are right if they are
equal to rounding. Ports of the zoo have usual names; what belongs together there is known from the run in
float32, and asked for in bfloat16 and with noise in the first leaf.
"""

from __future__ import annotations

import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Final

import torch
from torch import nn

import tensorcap
from tensorcap.alignment import Link, resolve
from tensorcap.alignment.match import By, parameter_pairs, proposal, propose
from tensorcap.runs import is_parameter
from tensorcap.session import capture_workload
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import Key
from tests.alignment.conftest import PORTS
from tests.alignment.ports.capturing import Run, captured, is_close
from tests.alignment.ports.scoring import archive_of, broken_rules, find_sources, true_sources, wrong_links
from tests.alignment.ports.traps import TRAPS
from tests.alignment.test_mistakes import MISTAKES, damaged, leaves
from tests.zoo.correct import OTHERWISE
from tests.zoo.entry import Correct, build

PASS_NAMES: Final = tuple(dict.fromkeys(p.name for p in (*proposal.PASSES, *parameter_pairs.PASSES)))
SITUATIONS: Final = (
    "port",
    "parameters",
    "by values",
    "noise",
    "factor",
    "reversed",
    "zoo",
    "zoo, noise",
    "trap",
)
ALL: Final = ""  # the pass that is left out if none is
_WITHOUT_LEAVES: Final = ("t5",)  # a scan, which only hands results out
_TRAP: Final = "traps"
_ZOO: Final = "zoo"
_MISTAKES: Final = {"noise": "noisy", "factor": "scaled", "reversed": "reversed"}  # by situation
_EVERYWHERE: Final = ("factor", "reversed")  # in every layer, as a mistake of porting is
_EVERY: Final = {"noise": 1, "factor": 2, "reversed": 1}  # of so many leaves one has it


@dataclass(frozen=True)
class Tally:
    """The pairs of a mapping, or the rules of traps, that are right, wrong and missing, by name."""

    right: frozenset[str]
    wrong: frozenset[str]
    missing: frozenset[str]


@dataclass
class Matched:
    """A port, or all traps, matched with all passes and without each.

    Attributes:
        name: Of the port.
        tallies: By situation, and by the pass that was left out.
    """

    name: str
    tallies: dict[tuple[str, str], Tally] = field(default_factory=dict)

    def add(self, situation: str, without: str, tally: Tally) -> None:
        """Add a tally to what a situation has already."""
        known = self.tallies.get((situation, without))
        if known is not None:
            tally = Tally(known.right | tally.right, known.wrong | tally.wrong, known.missing | tally.missing)
        self.tallies[situation, without] = tally


def groups() -> list[str]:
    """What is matched apart, what takes longest first."""
    return ["t5", _ZOO, _TRAP, *(name for name in PORTS if name != "t5")]


def match_apart(name: str) -> Matched:
    """Match one port or all traps, in a process of its own."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    matched = Matched(name)
    with tempfile.TemporaryDirectory() as folder:
        if name == _TRAP:
            _match_traps(matched, Path(folder))
        elif name == _ZOO:
            for port in OTHERWISE:
                if port.mapping is None:
                    _match_zoo_port(matched, port, Path(folder))
        else:
            _match_port(matched, Path(folder))
    print(f"{name}: done", file=sys.stderr)
    return matched


def _match_port(matched: Matched, folder: Path) -> None:
    port = import_module(f"tests.alignment.ports.{matched.name}").PORT
    run = captured(port, folder, params=True)
    for name in (ALL, *PASS_NAMES):
        links = _links(run.reference, run.target, name)
        matched.add("port", name, _tally(run, links))
        matched.add("parameters", name, _parameter_tally(run, links))
        matched.add("by values", name, _tally(run, _links(run.reference, run.target, name, by="values")))
    if matched.name in _WITHOUT_LEAVES:
        return
    model, inputs = port.reference()
    other, others = port.target(model.state_dict(), inputs)
    other.eval()
    for situation, mistake in _MISTAKES.items():
        for site in list(leaves(other))[:: _EVERY[situation]]:
            hooks = [
                module.register_forward_hook(
                    lambda _, __, output, change=MISTAKES[mistake]: damaged(output, change)
                )
                for module in _places(other, site, is_everywhere=situation in _EVERYWHERE)
            ]
            with torch.no_grad(), tensorcap.capture(other, folder / "wrong.h5"):
                other(**others)
            for hook in hooks:
                hook.remove()
            with tensorcap.open_archive(folder / "wrong.h5") as target:
                wrong = run._replace(target=target)
                for name in (ALL, *PASS_NAMES):
                    links = _links(run.reference, target, name)
                    matched.add(situation, name, _tally(wrong, links, prefix=f"{site}: "))


def _places(model: nn.Module, site: str, *, is_everywhere: bool) -> list[nn.Module]:
    """The module of a site, or those at its place in every layer."""
    pattern = re.sub(r"\d+", r"\\d+", re.escape(site)) if is_everywhere else re.escape(site)
    return [module for path, module in model.named_modules() if re.fullmatch(pattern, path)]


def _match_zoo_port(matched: Matched, port: Correct, folder: Path) -> None:
    """Match a port of the zoo; one whose sites have the reference's names needs no matching."""
    wide, narrow = build(port, "float32"), build(port, "bfloat16")
    first = next(m for m in narrow.target.model.modules() if not list(m.children()))
    archives = {}
    for name, workload in (("reference", wide.reference), ("truth", wide.target), ("zoo", narrow.target)):
        capture_workload(workload, folder / f"{name}.h5")
    hook = first.register_forward_hook(
        lambda _, __, output: damaged(output, lambda x: MISTAKES["noisy"](x).to(x.dtype))
    )
    capture_workload(narrow.target, folder / "zoo, noise.h5")
    hook.remove()
    with ExitStack() as stack:
        for name in ("reference", "truth", "zoo", "zoo, noise"):
            archives[name] = stack.enter_context(tensorcap.open_archive(folder / f"{name}.h5"))
        reference, truth = archives.pop("reference"), archives.pop("truth")
        if {r.key.site for r in reference.records} == {r.key.site for r in truth.records}:
            return
        right = find_sources(_equal_links(reference, truth))
        for situation, target in archives.items():
            for name in (ALL, *PASS_NAMES):
                sources = find_sources(_links(reference, target, name))
                same = {key for key in right if sources.get(key) == right[key]}
                other = {key for key in right.keys() & sources.keys() if sources[key] != right[key]}
                parts = same, other, right.keys() - same - other
                matched.add(
                    situation, name, Tally(*(frozenset(f"{port.name}: {k}" for k in p) for p in parts))
                )


def _equal_links(reference: Archive, target: Archive) -> list[Link]:
    """The links of results that are equal to rounding under their steps."""
    equal = []
    for link in resolve(propose(reference, target).alignment, reference, target).links:
        arrays, _ = link.layout.apply([target.read(r) for r in link.target], link.target[0].dtype)
        pairs = zip(link.reference, arrays, strict=True)
        if all(is_close(reference.read(record), array) for record, array in pairs):
            equal.append(link)
    return equal


def _match_traps(matched: Matched, folder: Path) -> None:
    for trap_name, trap in TRAPS.items():
        reference = archive_of(folder / f"{trap_name}-r.h5", trap.reference)
        target = archive_of(folder / f"{trap_name}-t.h5", trap.target)
        for name in (ALL, *PASS_NAMES):
            broken = broken_rules(trap, reference, target, without={name} - {ALL})
            missing = {f"{trap_name}: {rule}" for rule in broken if rule in ("pairs", "equal")}
            wrong = {f"{trap_name}: {rule}" for rule in broken} - missing
            right = frozenset() if broken else frozenset({trap_name})
            matched.add("trap", name, Tally(right, frozenset(wrong), frozenset(missing)))


def _links(reference: Archive, target: Archive, without: str, *, by: By = "all") -> list[Link]:
    alignment = propose(reference, target, by=by, without={without} - {ALL}).alignment
    return resolve(alignment, reference, target).links


def _tally(run: Run, links: Sequence[Link], *, prefix: str = "") -> Tally:
    """Tell results that are paired as the truth has it from wrong ones, and from those it demands besides."""
    demanded = true_sources(run.truth.pairs)
    wrong = {key for key, _ in wrong_links(run, links)}
    right = {key for key in find_sources(links) if Key.parse(key).slot.startswith("output")} - wrong
    return Tally(
        *(frozenset(prefix + key for key in keys) for keys in (right, wrong, demanded.keys() - right))
    )


def _parameter_tally(run: Run, links: Sequence[Link]) -> Tally:
    right: set[str] = set()
    wrong: set[str] = set()
    for link in links:
        if not is_parameter(link.reference[0].key):
            continue
        arrays, _ = link.layout.apply([run.target.read(r) for r in link.target], link.target[0].dtype)
        for record, array in zip(link.reference, arrays, strict=True):
            is_right = is_close(run.reference.read(record), array)
            (right if is_right else wrong).add(record.key.text)
    every = {record.key.text for record in run.reference.records if is_parameter(record.key)}
    return Tally(frozenset(right), frozenset(wrong), frozenset(every - right - wrong))


def whole_rows(matches: Sequence[Matched]) -> Iterator[tuple[object, ...]]:
    """By situation, what all passes together get right and wrong, and what they miss."""
    for situation in SITUATIONS:
        tallies = [m.tallies[situation, ALL] for m in matches if (situation, ALL) in m.tallies]
        yield (
            situation,
            sum(len(tally.right) for tally in tallies),
            sum(len(tally.wrong) for tally in tallies),
            sum(len(tally.missing) for tally in tallies),
        )


def pass_rows(matches: Sequence[Matched]) -> Iterator[tuple[object, ...]]:
    """By pass and situation: what is right only with it, and wrong only with it (-) or without it (+)."""
    for name in PASS_NAMES:
        cells, alone = [], 0
        for situation in SITUATIONS:
            pairs = [
                (m.tallies[situation, ALL], m.tallies[situation, name])
                for m in matches
                if (situation, ALL) in m.tallies
            ]
            lost = sum(len(whole.right - less.right) for whole, less in pairs)
            gained = sum(len(less.right - whole.right) for whole, less in pairs)
            worse = sum(len(less.wrong - whole.wrong) for whole, less in pairs)
            better = sum(len(whole.wrong - less.wrong) for whole, less in pairs)
            alone += lost
            parts = [str(lost)] + [
                f"{sign}{count} {what}"
                for sign, count, what in (
                    ("+", gained, "right"),
                    ("+", worse, "wrong"),
                    ("-", better, "wrong"),
                )
                if count
            ]
            cells.append(", ".join(parts))
        yield name, *cells, alone
