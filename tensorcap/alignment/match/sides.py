"""One archive as the matching sees it: roles, prints of what sites gave, sites with equal values."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from tensorcap.alignment.match.fingerprints import (
    Fingerprint,
    Fingerprints,
    NearestFingerprints,
    groups,
    values_of,
)
from tensorcap.alignment.names.site_templates import Index, Member, Survey, site_templates
from tensorcap_formats.records import Record
from tensorcap_formats.statistics import Statistics


class Side:
    """One archive as the matching sees it.

    A *site* here is one of its results: its main one goes under its name, others under `SITE/SLOT`.

    Attributes:
        roles: By name.
        by_site: Role and numbers of each site.
        results_of: The results of each module, the main one first.
        prints: Of the results, by site.
        groups: Sites whose results are equal.
        by_l2: The prints by the logarithm of their l2.
        group_of: The number of each site's group.
        rounding: Of the coarsest dtype.
    """

    def __init__(self, survey: Survey, prints: Fingerprints, *, uses_values: bool) -> None:
        self.roles = site_templates(survey)
        self.by_site = {
            m.site: (role, index) for role in self.roles.values() for index, m in role.members.items()
        }
        self.results_of: dict[str, list[str]] = defaultdict(list)
        for site in self.by_site:
            self.results_of[self.module(site)].append(site)
        self._prints = prints
        self._uses_values = uses_values
        self._takers: dict[str, list[str]] = defaultdict(list)
        for site, (role, index) in self.by_site.items():
            for record in role.members[index].arguments.values():
                if record.digest:
                    self._takers[record.digest].append(site)
        self.prints: dict[str, Fingerprint] = {}
        if uses_values:
            for site in self.by_site:
                found = values_of(_distinct(self.records(site)), prints)
                if found is not None:
                    self.prints[site] = found
        self.by_l2 = NearestFingerprints(self.prints, lambda one: math.log(one.l2))
        self.rounding = prints.rounding
        self.group(self.rounding)

    def group(self, rounding: float) -> None:
        """Find the sites whose results are equal within so much."""
        self.groups = groups(self.prints, rounding)
        self.group_of = {site: i for i, group in enumerate(self.groups) for site in group}

    def module(self, site: str) -> str:
        """The name of the module that gave a result."""
        return self.result(site).key.site

    def member(self, site: str) -> Member:
        """A site as its role has it."""
        role, index = self.by_site[site]
        return role.members[index]

    def result(self, site: str) -> Record:
        """What a site gave, of several ranks the first."""
        result = self.member(site).result
        assert result is not None
        return result

    def place(self, site: str) -> str:
        """A site as a place of a mapping, with its slot where its module gave several results."""
        module = self.module(site)
        is_one = site == module and len(self.results_of[module]) == 1
        return site if is_one else f"{module}/{self.result(site).key.slot}"

    def site(self, role: str, index: Index) -> str:
        """The site of a member."""
        return self.roles[role].members[index].site

    def records(self, site: str) -> tuple[Record, ...]:
        """What a site gave: one tensor, or one of each rank where they are not all equal."""
        member = self.member(site)
        is_shared = len({(r.digest, r.shape) for r in member.shards}) == 1 and member.shards[0].digest
        if member.shards and not is_shared:
            return member.shards
        return (member.result,) if member.result else ()

    def takers_of(self, record: Record) -> list[str]:
        """The sites that were given the values of a record."""
        return self._takers.get(record.digest, [])

    def print_of(self, record: Record) -> Fingerprint | None:
        """The print of a record; None where it proves nothing, or values are not to be used."""
        return self._prints.of(record) if self._uses_values else None

    def statistics_of(self, record: Record) -> Statistics | None:
        """The statistics of a record; None where they are not known, or values are not to be used."""
        return self._prints.statistics(record) if self._uses_values else None

    def print_of_all(self, records: Sequence[Record]) -> Fingerprint | None:
        """The print of several records together; None where `print_of` gives none of one of them."""
        return values_of(records, self._prints) if self._uses_values else None

    def order(self, site: str) -> int:
        """When a site gave its first result."""
        return self.records(site)[0].order

    def arguments(self, role: str, index: Index) -> list[Fingerprint]:
        """Prints of what a member was given."""
        found = map(self.print_of, self.roles[role].members[index].arguments.values())
        return [one for one in found if one is not None]


def _distinct(records: Sequence[Record]) -> list[Record]:
    """Records without the copies of the one before, such as KV heads that several ranks hold."""
    return [
        record
        for i, record in enumerate(records)
        if i == 0 or not record.digest or record.digest != records[i - 1].digest
    ]
