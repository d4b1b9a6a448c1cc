"""Eight models of transformers and ports of them: the whole mapping is found, and nothing but the mapping."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tensorcap.alignment import Alignment, Link, resolve
from tensorcap.alignment.match import propose
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.keys import Key
from tests.alignment.ports.capturing import Run, is_close, outputs
from tests.alignment.ports.scoring import find_sources, true_sources, wrong_links
from tests.alignment.ports.truth import Pair
from tests.support.archives import new_archive


class Proposal(NamedTuple):
    run: Run
    alignment: Alignment
    links: list[Link]


@pytest.fixture(scope="module")
def proposal(run: Run) -> Proposal:
    alignment = propose(run.reference, run.target).alignment
    return Proposal(run, alignment, resolve(alignment, run.reference, run.target).links)


def test_every_pair_is_found(proposal: Proposal) -> None:
    found = find_sources(proposal.links)
    demanded = true_sources(proposal.run.truth.pairs)
    assert [key for key in demanded if key not in found] == []


def test_no_pair_is_wrong(proposal: Proposal) -> None:
    assert wrong_links(proposal.run, proposal.links) == []


def test_every_link_is_equal_to_rounding_under_its_steps(proposal: Proposal) -> None:
    reference, target = proposal.run.reference, proposal.run.target
    for link in proposal.links:
        arrays = [target.read(record) for record in link.target]
        made, _ = link.layout.apply(arrays, link.target[0].dtype)
        for record, array in zip(link.reference, made, strict=True):
            own = reference.read(record)
            assert is_close(own, array), (record.key.text, link.entry.text, link.layout.texts)


def sites_of(keys: Iterable[str]) -> set[str]:
    return {Key.parse(key).site for key in keys}


def listed(alignment: Alignment, side: str, sites: Iterable[str]) -> set[str]:
    """Those of the sites that are left over as a whole; `{…}` in a place stands for any number."""
    patterns = [
        re.sub(r"\\\{[^}]*\\\}", "[0-9]+", re.escape(place))
        for left in alignment.left_over
        if left.side == side
        for place in left.places
    ]
    return {site for site in sites if any(re.fullmatch(pattern, site) for pattern in patterns)}


@pytest.mark.parametrize("side", ["reference", "target"])
def test_what_is_left_over_is_what_has_no_counterpart(proposal: Proposal, side: str) -> None:
    run, i = proposal.run, side == "target"
    present = outputs(run.target if i else run.reference)
    choices = true_sources((*run.truth.pairs, *run.truth.extras))
    demanded = sites_of(
        key
        for pair in run.truth.pairs
        for ones, others in pair.expanded()
        if all(len(choices[one]) == 1 for one in ones)
        for key in (others if i else ones)
    )
    paired = {key for pair in run.truth.pairs for sides in pair.expanded() for key in sides[i]}
    others = {key for pair in run.truth.extras for sides in pair.expanded() for key in sides[i]}
    if side == "reference":
        others |= {key for pair in run.truth.given for ones, _ in pair.expanded() for key in ones}
    others |= run.truth.originals().keys() & present.keys()
    lone = sites_of(run.truth.lone(side)) - sites_of(paired | others)
    left = listed(proposal.alignment, side, sites_of(present))
    assert lone - left == set()
    assert left & demanded == set()


@pytest.mark.spec("ALN-38")
def test_every_record_is_in_a_link_or_left_over(proposal: Proposal) -> None:
    for name, archive in (("reference", proposal.run.reference), ("target", proposal.run.target)):
        linked = {record.key.text for link in proposal.links for record in getattr(link, name)}
        left = {p for each in proposal.alignment.left_over if each.side == name for p in each.places}
        keys = [record.key for record in archive.records if record.key.text not in linked]
        assert {key.text for key in keys if not {key.site, f"{key.site}/{key.slot}"} & left} == set()


class Nameless(NamedTuple):
    """An archive of the same results under names and in an order that mean nothing.

    Of results with the same elements, in whatever order, there is one.
    """

    archive: Archive
    first: dict[bytes, str]  # by elements: the key that they had before
    before: dict[str, str]  # the key that a record had before


def elements(array: Array) -> bytes:
    return np.sort(array, axis=None).tobytes()


def nameless(archive: Archive, path: Path, seed: int) -> Nameless:
    chance = random.Random(seed)
    first: dict[bytes, str] = {}
    for key, array in sorted(outputs(archive).items()):
        first.setdefault(elements(array), key)
    shuffled = list(first.values())
    chance.shuffle(shuffled)
    renamed, before = {}, {}
    for key in shuffled:
        record = archive.get(key)
        new = f"0/{''.join(chance.choices('bcdfghjklmnpqrstvwxz', k=12))}/output"
        renamed[new] = archive.read(record), record.dtype
        before[new] = key
    return Nameless(new_archive(path, renamed), first, before)


def test_values_alone_recover_every_pair_of_two_tensors(run: Run, tmp_path: Path) -> None:
    one, other = nameless(run.reference, tmp_path / "ref.h5", 1), nameless(run.target, tmp_path / "tgt.h5", 2)
    alignment = propose(one.archive, other.archive, by="values").alignment
    found = {
        one.before[key]: frozenset(other.before[source] for source in sources)
        for key, sources in find_sources(resolve(alignment, one.archive, other.archive).links).items()
    }
    arrays = outputs(run.reference), outputs(run.target)

    def renamed(pairs: Iterable[Pair]) -> Iterator[tuple[list[str], frozenset[str]]]:
        for pair in pairs:
            for ones, others in pair.expanded():
                sources = (other.first[elements(arrays[1][key])] for key in others)
                yield [one.first[elements(arrays[0][key])] for key in ones], frozenset(sources)

    right: dict[str, set[frozenset[str]]] = {}
    for keys, sources in renamed((*run.truth.pairs, *run.truth.extras)):
        for key in keys:
            right.setdefault(key, set()).add(sources)
    demanded = {keys[0] for keys, sources in renamed(run.truth.pairs) if len(keys) == 1 and len(sources) == 1}
    assert {key: sorted(s) for key, s in found.items() if s not in right.get(key, ())} == {}
    assert len(demanded) > 5
    assert demanded - found.keys() == set()
