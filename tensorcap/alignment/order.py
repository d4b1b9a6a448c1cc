"""Order of execution: whether two runs compute paired results in the same order, and what first moved."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tensorcap.alignment.links import Link
from tensorcap_formats.keys import Key
from tensorcap_formats.records import Record

_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class Move:
    """A tensor that the target makes at another place among the others.

    Attributes:
        key: Key text of the reference's record.
        target: Key text of the target's record; of several, the last.
        after: Key text of the reference's record that it comes after there; empty for the first of all.
        target_after: Key text of the reference's record whose counterpart it comes after in the target.
    """

    key: str
    target: str
    after: str
    target_after: str


@dataclass(frozen=True, slots=True)
class Order:
    """Both orders of execution over the results that are mapped.

    Attributes:
        results: Count of results of the reference whose places were compared.
        moved: Count of those that have to be moved, at least, to make the two orders the same.
        moves: The first of these.
    """

    results: int
    moved: int
    moves: tuple[Move, ...]

    @property
    def is_same(self) -> bool:
        """Whether nothing moved."""
        return not self.moved


def linked_results(links: Sequence[Link]) -> Iterator[tuple[Record, Record]]:
    """Yield the results that links are about, but for those whose tokens were matched over steps.

    A result that is made of several tensors counts as made with the last of them.
    """
    for link in links:
        if not link.gathers and all(_is_result(source.key) for source in link.target):
            last = max(link.target, key=lambda source: source.order)
            yield from ((record, last) for record in link.reference)


def order_between(pairs: Iterable[tuple[Record, Record]]) -> Order:
    """Compare the order of results, each of the reference with the one of the target that it belongs to.

    Those that stay are a longest non-decreasing subsequence of the target's order numbers, taken in the
    reference's order.
    """
    ordered = sorted((pair for pair in pairs if _is_result(pair[0].key)), key=lambda pair: pair[0].order)
    places = [target.order for _, target in ordered]
    staying = set(longest_rising(places))
    moved = [i for i in range(len(ordered)) if i not in staying]
    in_target = sorted(range(len(ordered)), key=lambda i: (places[i], i))
    rank = {number: place for place, number in enumerate(in_target)}
    moves = []
    for i in moved[:_SHOWN]:
        record, target = ordered[i]
        before = ordered[i - 1][0].key.text if i else ""
        there = ordered[in_target[rank[i] - 1]][0].key.text if rank[i] else ""
        moves.append(Move(record.key.text, target.key.text, before, there))
    return Order(len(ordered), len(moved), tuple(moves))


def _is_result(key: Key) -> bool:
    return key.is_bare or key.slot.partition(".")[0] == "output"


def longest_rising(places: Sequence[int], *, is_strict: bool = False) -> list[int]:
    """Find a longest subsequence that does not decrease, or that increases if strict; give its positions."""
    find = bisect.bisect_left if is_strict else bisect.bisect_right
    ends: list[int] = []  # by length: the smallest place that a subsequence of this length may end with
    positions: list[int] = []  # and where that is
    before: list[int] = []
    for i, place in enumerate(places):
        at = find(ends, place)
        before.append(positions[at - 1] if at else -1)
        ends[at : at + 1], positions[at : at + 1] = [place], [i]
    chain: list[int] = []
    i = positions[-1] if positions else -1
    while i >= 0:
        chain.append(i)
        i = before[i]
    return chain[::-1]
