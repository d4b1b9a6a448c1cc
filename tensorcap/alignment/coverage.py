"""Coverage of a mapping: how many records are mapped, explained, or neither, and by which evidence."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tensorcap.alignment.links import Link
from tensorcap.alignment.mapping import LeftOver, SideName
from tensorcap.alignment.order import Order, linked_results, order_between
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import Key
from tensorcap_formats.records import Record

_OF_RESULTS: Final = ("it has the values of ", "it has no values ")  # beginnings of what is said of results
_ROLES: Final = {"input": "an argument", "param": "a parameter", "buffer": "a buffer"}  # by kind of slot
_VARIABLE: Final = re.compile(r"\\\{[^}]*\\\}")  # in an escaped place


class Reasons:
    """Why records of one side have no counterpart, as a mapping says it of sites, `SITE/SLOT` or globs."""

    def __init__(self, left_over: Iterable[LeftOver], side: SideName) -> None:
        self._exact: dict[str, LeftOver] = {}
        self._globs: list[tuple[re.Pattern[str], LeftOver]] = []
        for left in left_over:
            if left.side != side:
                continue
            for place in left.places:
                if "*" in place or "{" in place:
                    self._globs.append((_pattern(place), left))
                else:
                    self._exact.setdefault(place, left)

    def of(self, key: Key) -> LeftOver | None:
        """What is said of a record, of its slot before its site.

        What is said of the results of a site is not said of what it was given, or holds, in the same words.
        """
        site = f"rank{key.rank}/{key.site}" if key.rank else key.site
        for place in (f"{site}/{key.slot}", site):
            globs = (left for glob, left in self._globs if glob.fullmatch(place))
            left_over = self._exact.get(place) or next(globs, None)
            if left_over is None:
                continue
            role = _ROLES.get(key.slot.partition(".")[0])
            if place == site and role and left_over.reason.startswith(_OF_RESULTS):
                return replace(
                    left_over, reason=f"{role} of {site}, which {left_over.reason.removeprefix('it ')}"
                )
            return left_over
        return None


def _pattern(place: str) -> re.Pattern[str]:
    """A place with `*` for anything, and variables for numbers."""
    parts = (re.escape(part) for part in place.split("*"))
    return re.compile(".*".join(_VARIABLE.sub("[0-9]+", part) for part in parts))


@dataclass(frozen=True, slots=True)
class Coverage:
    """What became of the records of one side.

    Attributes:
        records: Count of all.
        mapped: Count of those that have a counterpart.
        explained: Count of those that have none, which is explained.
        unexplained: Key texts of the others, in execution order.
    """

    records: int
    mapped: int
    explained: int
    unexplained: tuple[str, ...]


def coverage_of(
    links: Sequence[Link], left_over: Sequence[LeftOver], reference: Archive, target: Archive
) -> tuple[Coverage, Coverage]:
    """Count what a mapping covers of the reference and of the target; equal keys that are left pair, too."""
    linked = {record.key.text for link in links for record in link.reference}
    target_linked = {record.key.text for link in links for record in link.target}
    equal = {record.key.text for record, _ in _equal_keys(links, reference, target)}
    return (
        _count_records(reference, linked | equal, Reasons(left_over, "reference")),
        _count_records(target, target_linked | equal, Reasons(left_over, "target")),
    )


def _equal_keys(
    links: Sequence[Link], reference: Archive, target: Archive
) -> Iterator[tuple[Record, Record]]:
    """Records of equal keys that no link is about."""
    linked = {record.key.text for link in links for record in link.reference}
    target_linked = {record.key.text for link in links for record in link.target}
    rest = {record.key.text: record for record in target.records if record.key.text not in target_linked}
    for record in reference.records:
        if record.key.text in rest and record.key.text not in linked:
            yield record, rest[record.key.text]


def _count_records(archive: Archive, mapped: set[str], reasons: Reasons) -> Coverage:
    explained, unexplained = 0, []
    for record in archive.records:
        if record.key.text in mapped:
            continue
        explanation = reasons.of(record.key)
        if explanation is not None and explanation.is_explained:
            explained += 1
        else:
            unexplained.append(record.key.text)
    count = len(archive.records)
    return Coverage(count, count - explained - len(unexplained), explained, tuple(unexplained))


@dataclass(frozen=True, slots=True)
class MappingSummary:
    """What a mapping comes to on two archives.

    Attributes:
        path: The map file; empty for a mapping that was computed.
        evidence: Count of the reference's records by what they are mapped by; `key` is an equal key.
        reference: What became of the reference's records.
        target: What became of the target's.
        order: Both orders of execution over what is mapped; None if a side has none.
        tokens: Which tokens are compared and which are left out, as sentences; empty if all are.
    """

    path: str
    evidence: Mapping[str, int]
    reference: Coverage
    target: Coverage
    order: Order | None
    tokens: Sequence[str] = ()

    @property
    def exit_status(self) -> int:
        """0 if something is mapped and everything else of the reference is explained, else 1 (ALN-81)."""
        return 0 if self.reference.mapped and not self.reference.unexplained else 1


def summary_of(
    links: Sequence[Link],
    left_over: Sequence[LeftOver],
    reference: Archive,
    target: Archive,
    *,
    path: str = "",
    tokens: Sequence[str] = (),
) -> MappingSummary:
    """Sum up a mapping.

    Args:
        links: What `resolve` makes of its entries.
        left_over: What it says has no counterpart.
        reference: The trusted archive.
        target: The archive under test, under its own keys.
        path: The map file; empty for one that was computed.
        tokens: What is said of tokens that are matched.
    """
    covered = coverage_of(links, left_over, reference, target)
    evidence = Counter[str]()
    for link in links:
        evidence[link.entry.evidence] += len(link.reference)
    evidence["key"] += covered[0].mapped - evidence.total()
    order = None
    if reference.is_ordered and target.is_ordered:
        order = order_between([*linked_results(links), *_equal_keys(links, reference, target)])
    counts = {name: count for name, count in evidence.most_common() if count}
    return MappingSummary(path, counts, *covered, order, tokens)
