"""One archive as the matching sees it: site templates, fingerprints of results, groups of equal values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType

from tensorcap.alignment.match.fingerprints import (
    Fingerprint,
    Fingerprints,
    NearestFingerprints,
)
from tensorcap.alignment.names import Index, Member, Survey, are_equal, collect_site_templates
from tensorcap_formats.keys import ROOT_SITE
from tensorcap_formats.records import Record
from tensorcap_formats.statistics import Statistics


class Side:
    """One archive as the matching sees it.

    A *site* here is one of its results: its main one goes under its name, others under `SITE/SLOT`.

    Attributes:
        templates: The site templates, by name.
        by_site: The template and the numbers of each site.
        results_of: The results of each module, the main one first.
        fingerprints: Of the results, by site.
        groups: Sites whose results are equal.
        nearest: Finds those fingerprints that are near to one.
        group_of: The number of each site's group.
        rounding: Of the coarsest dtype.
        growing: Sites whose results grow from step to step, as what a cache holds.
        operands: Digests of what an operation takes, by its site.
    """

    def __init__(
        self,
        survey: Survey,
        fingerprints: Fingerprints,
        operands: Mapping[str, frozenset[str]] = MappingProxyType({}),
    ) -> None:
        self.operands = operands
        self.templates = collect_site_templates(survey)
        self.by_site = {
            m.site: (template, index)
            for template in self.templates.values()
            for index, m in template.members.items()
        }
        self.results_of: dict[str, list[str]] = defaultdict(list)
        for site in self.by_site:
            self.results_of[self.module(site)].append(site)
        self._fingerprints = fingerprints
        self._by_digest: dict[str, list[str]] = defaultdict(list)
        for site in self.by_site:
            self._by_digest[self.result(site).digest].append(site)
        self._consumers: dict[str, list[str]] = defaultdict(list)
        for site, (template, index) in self.by_site.items():
            for record in template.members[index].arguments.values():
                if record.digest:
                    self._consumers[record.digest].append(site)
        self.fingerprints: dict[str, Fingerprint] = {}
        for site in self.by_site:
            fingerprint = fingerprints.joint_fingerprint(_distinct(self.records(site)))
            if fingerprint is not None:
                self.fingerprints[site] = fingerprint
        self.nearest = NearestFingerprints(self.fingerprints)
        self.rounding = fingerprints.rounding
        self.growing = {
            s for s in self.by_site if (self.module(s), self.result(s).key.slot) in survey.growing
        }
        self.group(self.rounding)

    def group(self, rounding: float) -> None:
        """Find the sites whose results are equal within so much."""
        self.groups = self.nearest.groups(rounding)
        self.group_of = {site: i for i, group in enumerate(self.groups) for site in group}

    def module(self, site: str) -> str:
        """The name of the module that gave a result."""
        return self.result(site).key.site

    @cached_property
    def modules(self) -> Mapping[str, int]:
        """The modules that gave a result, without the model itself, and how many elements it has."""
        sites = (site for site in self.by_site if site == self.module(site) and site != ROOT_SITE)
        return {site: self.size(site) for site in sites}

    def member(self, site: str) -> Member:
        """A site as its site template has it."""
        template, index = self.by_site[site]
        return template.members[index]

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

    def records(self, site: str) -> tuple[Record, ...]:
        """What a site gave: one tensor, or one of each rank where they are not all equal."""
        member = self.member(site)
        if member.shards and not are_equal(member.shards):
            return member.shards
        return (member.result,) if member.result else ()

    def size(self, site: str) -> int:
        """How many elements a site gave, those of all ranks together."""
        return sum(record.size for record in self.records(site))

    def consumers_of(self, record: Record) -> list[str]:
        """The sites that were given the values of a record."""
        return self._consumers.get(record.digest, [])

    def sites_with(self, digest: str) -> list[str]:
        """The sites whose result has a digest; none if there is no digest."""
        return self._by_digest.get(digest, []) if digest else []

    def fingerprint_of(self, record: Record) -> Fingerprint | None:
        """The fingerprint of a record; None if it proves nothing, or values are not to be used."""
        return self._fingerprints.fingerprint(record)

    def statistics_of(self, record: Record) -> Statistics | None:
        """The statistics of a record; None if they are not known, or values are not to be used."""
        return self._fingerprints.statistics(record)

    def joint_fingerprint_of(self, records: Sequence[Record]) -> Fingerprint | None:
        """The fingerprint of several records together; None if `fingerprint_of` gives none of one of them."""
        return self._fingerprints.joint_fingerprint(records)

    def order(self, site: str) -> int:
        """When a site gave its first result."""
        return self.records(site)[0].order

    def arguments(self, template: str, index: Index) -> list[Fingerprint]:
        """Fingerprints of what a member was given."""
        known = map(self.fingerprint_of, self.templates[template].members[index].arguments.values())
        return [one for one in known if one is not None]


def sizes_of(records: Sequence[Record]) -> set[int]:
    """Numbers of elements: of all ranks together, and of each."""
    return {sum(record.size for record in records), records[0].size}


def _distinct(records: Sequence[Record]) -> list[Record]:
    """Records without the copies of the one before, such as KV heads that several ranks hold."""
    return [
        record
        for i, record in enumerate(records)
        if i == 0 or not record.digest or record.digest != records[i - 1].digest
    ]
