"""Two runs of compiled programs: operations that bear only numbers, and values that neither program has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tensorcap.runs import is_inner
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import ROOT_SITE, module_of, unescape
from tensorcap_formats.run_info import PointInfo


@dataclass(frozen=True, slots=True)
class ProgramPair:
    """What of two compiled programs cannot be compared (CMP-160).

    Attributes:
        numbered: Sites of operations of no node, which are named by numbers that another program gives to
            other operations; empty if both are one program.
        lacking: Sites and slots of which neither program has a value.
    """

    numbered: frozenset[str] = frozenset()
    lacking: frozenset[tuple[str, str]] = frozenset()

    @classmethod
    def of(cls, reference: Archive, target: Archive) -> ProgramPair:
        """Find it out; nothing, unless both runs are of compiled programs."""
        ours, theirs = reference.info.operation_map, target.info.operation_map
        if not (ours and theirs):
            return cls()
        lacking = frozenset(_lost(reference.info.points)) & frozenset(_lost(target.info.points))
        if ours == theirs:
            return cls(lacking=lacking)
        nodes = {row.node for row in (*ours, *theirs)}
        sites = {r.key.site for r in (*reference.records, *target.records) if is_inner(r.key)}
        numbered = {
            site
            for site in sites
            if module_of(site) == ROOT_SITE and unescape(site.partition(":")[2]) not in nodes
        }
        return cls(frozenset(numbered), lacking)


def _lost(points: Iterable[PointInfo]) -> Iterable[tuple[str, str]]:
    for point in points:
        if point.status == "not-capturable":
            yield from ((point.site, slot) for slot in point.slots or ("output",))
