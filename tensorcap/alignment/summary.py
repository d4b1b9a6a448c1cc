"""What a mapping comes to: counts by evidence, what is left over, and the order of execution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tensorcap.alignment.coverage import Coverage, coverage_of
from tensorcap.alignment.linking import Link
from tensorcap.alignment.mapping import LeftOver
from tensorcap.alignment.order import Order, order_of
from tensorcap_formats.archive import Archive


@dataclass(frozen=True, slots=True)
class MappingSummary:
    """What a mapping comes to on two archives.

    Attributes:
        path: The map file; empty for a mapping that was computed.
        evidence: Count of the reference's records by what they are mapped by; `key` is an equal key.
        reference: What became of the reference's records.
        target: What became of the target's.
        order: Both orders of execution over what is mapped; None where a side has none.
        tokens: Which tokens are compared and which are left out, as sentences; empty where all are.
    """

    path: str
    evidence: Mapping[str, int]
    reference: Coverage
    target: Coverage
    order: Order | None
    tokens: Sequence[str] = ()

    @property
    def exit_status(self) -> int:
        """0 if something is mapped and everything else of the reference is explained, else 1 (ALN-61)."""
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
    is_ordered = reference.is_ordered and target.is_ordered
    counts = {name: count for name, count in evidence.most_common() if count}
    return MappingSummary(path, counts, *covered, order_of(links) if is_ordered else None, tokens)
