"""Right-looking but wrong pairs are not accepted silently, wrong-looking but right ones are found."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tensorcap.alignment.mapping import Alignment
from tensorcap.alignment.match.proposal import propose
from tensorcap.alignment.match.unmatched import place_of
from tensorcap.alignment.resolution import resolve
from tensorcap_formats.archive import Archive
from tests.alignment.ports.traps import TRAPS, Tensors
from tests.support.archives import new_archive

_DOUBT = re.compile(r"\b(but|ambiguous|conflict|contradict)")


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


@pytest.mark.spec("ALN-80", "ALN-84")
@pytest.mark.parametrize("name", TRAPS)
def test_what_looks_right_and_what_is_right_are_kept_apart(name: str, tmp_path: Path) -> None:
    trap = TRAPS[name]
    reference, target = (
        archive_of(tmp_path / file, side) for file, side in (("r.h5", trap.reference), ("t.h5", trap.target))
    )
    alignment = propose(reference, target, by=trap.by).alignment
    assert unreached(alignment, reference, target) == (set(), set())
    found, by_values, turned, equal = set(), set(), set(), set()
    for link in resolve(alignment, reference, target).links:
        made, _ = link.layout.apply([target.read(r) for r in link.target], link.target[0].dtype)
        for record, array in zip(link.reference, made, strict=True):
            place = record.key.text.removeprefix("0/").removesuffix("/output")
            pairs = {(place, r.key.text.removeprefix("0/").removesuffix("/output")) for r in link.target}
            found |= pairs
            by_values |= pairs if link.entry.evidence == "values" else set()
            turned |= {place} if link.layout.steps else set()
            equal |= {place} if np.array_equal(reference.read(record), array) else set()
    assert trap.pairs - found == set()
    assert set(trap.equal) - equal == set()
    assert trap.never & found == set()
    assert {pair for pair in trap.silent & found if not is_told(alignment, pair[0])} == set()
    assert {pair for pair in trap.unproven & by_values if not is_told(alignment, pair[0])} == set()
    assert {place for place in trap.doubts if not is_told(alignment, place)} == set()
    assert {place for place in trap.sure if is_told(alignment, place)} == set()
    assert {place for place in trap.as_is if place in turned and not is_told(alignment, place)} == set()
