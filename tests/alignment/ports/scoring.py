"""How much of a mapping is right: of a port by its truth, of a trap by what may and may not be paired."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path

import numpy as np

from tensorcap.alignment import Alignment, Link, place_of, resolve
from tensorcap.alignment.match import propose
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import Key
from tests.alignment.ports.capturing import Run, outputs
from tests.alignment.ports.traps import Tensors, Trap
from tests.alignment.ports.truth import Pair
from tests.support.archives import new_archive

Sources = dict[str, frozenset[str]]  # the target's records behind each of the reference's

_DOUBT = re.compile(r"\b(but|ambiguous|conflict|contradict)")


def find_sources(links: Iterable[Link]) -> Sources:
    found: Sources = {}
    for link in links:
        all_of_it = frozenset(record.key.text for record in link.target)
        for i, record in enumerate(link.reference):
            one = frozenset({link.target[i].key.text}) if not link.layout.steps else all_of_it
            found[record.key.text] = one
    return found


def true_sources(pairs: Iterable[Pair]) -> dict[str, set[frozenset[str]]]:
    found: dict[str, set[frozenset[str]]] = {}
    for pair in pairs:
        for ones, others in pair.expanded():
            for key in ones:
                found.setdefault(key, set()).add(frozenset(others))
    return found


def wrong_links(run: Run, links: Iterable[Link]) -> list[tuple[str, list[str]]]:
    """Links that are not in the truth; of a site that only hands on, the values decide."""
    truth, originals = run.truth, run.truth.originals()
    exact = true_sources((*truth.pairs, *truth.extras, *truth.given))
    target = outputs(run.target)

    def values(keys: Iterable[str]) -> frozenset[bytes]:
        return frozenset(target[key].tobytes() for key in keys)

    wrong = []
    for key, sources in find_sources(links).items():
        if Key.parse(key).slot.partition(".")[0] != "output":
            continue
        original = key
        while original not in exact and originals.get(original, original) != original:
            original = originals[original]
        right = exact.get(original, set())
        if sources in right:
            continue
        if key in exact or not sources <= target.keys() or values(sources) not in map(values, right):
            wrong.append((key, sorted(sources)))
    return wrong


def archive_of(path: Path, tensors: Tensors) -> Archive:
    return new_archive(path, {f"0/{n}" if "/" in n else n: array for n, array in tensors.items()})


def is_told(alignment: Alignment, place: str) -> bool:
    """Whether a reader of the mapping learns that something is the matter with a site of the reference."""
    site = place.partition("/")[0]

    def has_it(places: tuple[str, ...]) -> bool:
        patterns = (re.sub(r"\\\{[^}]*\\\}", "[0-9]+", re.escape(p.partition("/")[0])) for p in places)
        return any(re.fullmatch(pattern, site) for pattern in patterns)

    return any(has_it(e.reference) and _DOUBT.search(e.reason) for e in alignment.entries) or any(
        left.side == "reference" and has_it(left.places) and not left.is_explained
        for left in alignment.left_over
    )


def unreached(alignment: Alignment, reference: Archive, target: Archive) -> tuple[set[str], set[str]]:
    """The records of both sides that are in no link, and neither they nor their sites left over."""
    links = resolve(alignment, reference, target).links
    found = []
    for name, archive in (("reference", reference), ("target", target)):
        linked = {r.key.text for link in links for r in getattr(link, name)}
        left = {place for each in alignment.left_over if each.side == name for place in each.places}
        places = {r.key.text: {r.key.site, place_of(r)} for r in archive.records}
        found.append({text for text, names in places.items() if text not in linked and not names & left})
    return found[0], found[1]


def broken_rules(
    trap: Trap, reference: Archive, target: Archive, *, without: Collection[str] = ()
) -> dict[str, set[object]]:
    """What is wrong with the mapping of a trap, by the rule of `Trap` that it breaks; none if all hold.

    Args:
        trap: What is right.
        reference: The archive of its reference.
        target: The archive of its target.
        without: Passes of matching that are left out.
    """
    alignment = propose(reference, target, by=trap.by, without=without).alignment
    pairs, by_values, turned, equal = set(), set(), set(), set()
    for link in resolve(alignment, reference, target).links:
        arrays, _ = link.layout.apply([target.read(r) for r in link.target], link.target[0].dtype)
        for record, array in zip(link.reference, arrays, strict=True):
            place = record.key.text.removeprefix("0/").removesuffix("/output")
            of_link = {(place, r.key.text.removeprefix("0/").removesuffix("/output")) for r in link.target}
            pairs |= of_link
            by_values |= of_link if link.entry.evidence == "values" else set()
            turned |= {place} if link.layout.steps else set()
            equal |= {place} if np.array_equal(reference.read(record), array) else set()
    of_reference, of_target = unreached(alignment, reference, target)
    broken: dict[str, set[object]] = {
        "unreached": {*of_reference, *of_target},
        "pairs": {*trap.pairs - pairs},
        "equal": {*set(trap.equal) - equal},
        "never": {*trap.never & pairs},
        "silent": {pair for pair in trap.silent & pairs if not is_told(alignment, pair[0])},
        "unproven": {pair for pair in trap.unproven & by_values if not is_told(alignment, pair[0])},
        "doubts": {place for place in trap.doubts if not is_told(alignment, place)},
        "sure": {place for place in trap.sure if is_told(alignment, place)},
        "as_is": {place for place in trap.as_is if place in turned and not is_told(alignment, place)},
    }
    return {rule: places for rule, places in broken.items() if places}
