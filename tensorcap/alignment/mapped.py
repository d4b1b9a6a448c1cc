"""The target as the reference would name it: an archive whose records are made of another's by a mapping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from tensorcap.alignment.gathered import GatheredArchive
from tensorcap.alignment.linking import Link
from tensorcap.alignment.mapping import Alignment, LeftOver
from tensorcap.alignment.resolution import resolve, token_alignments
from tensorcap.alignment.summary import MappingSummary, summary_of
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import ReadError, UsageError
from tensorcap_formats.keys import ROOT_SITE, Key, inner_site
from tensorcap_formats.records import Record
from tensorcap_formats.run_info import RunInfo
from tensorcap_formats.view import ArchiveView

_UNMAPPED = "unmapped"  # stands before the site of a record that nothing was mapped to


class MappedArchive(ArchiveView):
    """A target under the reference's keys, its tensors in the reference's layout.

    A record that is only renamed keeps its statistics and digest. Any other is made, when it is read, of
    the tensors that its steps take, and has neither. A record of the target that is part of no link keeps
    its key, unless that is the key of a record of the reference that a link makes: then it gets another.

    Attributes:
        links: The link that made a record, by key text.
        left_over: What the mapping says has no counterpart.
    """

    def __init__(
        self,
        reference: Archive,
        target: Archive,
        links: Sequence[Link],
        *,
        left_over: Sequence[LeftOver] = (),
        map_path: str = "",
        tokens: Sequence[str] = (),
    ) -> None:
        self.left_over = left_over
        self._summed_up = partial(
            summary_of, links, left_over, reference, target, path=map_path, tokens=tokens
        )
        self._names = names = _names(links)
        self.links: dict[str, Link] = {}
        self._parts: dict[str, int] = {}
        records, sources = self._linked(links)
        taken = set(sources)
        used = {source.key.text for behind in sources.values() for source in behind}
        for record in target.records:
            if record.key.text in used:
                continue
            key = _elsewhere(record.key) if record.key.text in taken else record.key
            records.append(replace(record, key=key))
            sources[key.text] = (record,)
        records.sort(key=lambda record: record.order)
        super().__init__(
            target,
            records,
            sources,
            values=_renamed_values(target.values, names),
            is_direct=target.is_direct and all(link.is_renaming for link in links),
        )

    @cached_property
    def info(self) -> RunInfo:
        """What the target's metadata say, with the reference's names for sites that are one of its."""
        info, names = self.source.info, self._names
        return replace(
            info,
            modules={
                site if site == ROOT_SITE else names.get(site, site): module  # the model stays the model
                for site, module in info.modules.items()
            },
            points=tuple(replace(point, site=names.get(point.site, point.site)) for point in info.points),
        )

    @cached_property
    def summary(self) -> MappingSummary:
        """What the mapping comes to."""
        return self._summed_up()

    def _linked(self, links: Sequence[Link]) -> tuple[list[Record], dict[str, Sequence[Record]]]:
        records: list[Record] = []
        sources: dict[str, Sequence[Record]] = {}
        for link in links:
            made = zip(link.reference, link.shapes, link.dtypes, strict=True)
            for part, (own, shape, dtype) in enumerate(made):
                text = own.key.text
                self.links[text], self._parts[text] = link, part
                if link.is_renaming:
                    sources[text] = (link.target[part],)
                    records.append(replace(link.target[part], key=own.key))
                else:
                    sources[text] = link.target
                    source, stored = link.target[0], all(record.stored for record in link.target)
                    record = replace(source, key=own.key, dtype=dtype, shape=shape, stored=stored)
                    records.append(replace(record, digest="", statistics=None))
        return records, sources

    def remark(self, record: Record) -> str:
        """What is to be known of the tensors behind it, and of what the link does to them."""
        link = self.links.get(record.key.text)
        remarks = super().remark(record), link.remark if link else ""
        return "; ".join(dict.fromkeys(remark for remark in remarks if remark))

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        text = record.key.text
        link = self.links.get(text)
        if link is None or link.is_renaming:
            super()._read_flat(record, start, out)
            return
        try:
            tensors = self._computed(link, lambda: link.made(self.source.read))
        except UsageError as error:
            raise ReadError(f"{self.path}: {text}: {error}", hint=error.hint) from None
        out[:] = tensors[self._parts[text]][start : start + out.size]


def _elsewhere(key: Key) -> Key:
    return replace(key, site=inner_site(_UNMAPPED, key.site)) if key.slot else Key(f"{_UNMAPPED}:{key.site}")


def _renamed_values(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Arguments and results that are no tensors, under the reference's names of their sites."""
    found: dict[str, Any] = {}
    for text, value in values.items():
        key = Key.parse(text)
        name = names.get(key.site)
        found[text if name is None else replace(key, site=name).text] = value
    return found


def _names(links: Sequence[Link]) -> dict[str, str]:
    """The reference's names of the target's sites, of those whose results are those of one of its sites."""
    names: dict[str, set[str]] = {}
    for link in links:
        for source in link.target:
            if source.key.is_bare or source.key.slot.startswith("output"):
                names.setdefault(source.key.site, set()).update(r.key.site for r in link.reference)
    return {name: next(iter(found)) for name, found in names.items() if len(found) == 1}


def mapped(
    alignment: Alignment, reference: Archive, target: Archive, *, path: str = ""
) -> tuple[GatheredArchive, MappedArchive]:
    """Both sides as `compare` takes them: the target under the reference's keys and in its layout.

    Args:
        alignment: The mapping.
        reference: The trusted archive.
        target: The archive under test.
        path: The map file; empty for a mapping that was computed.

    Returns:
        The reference, reduced to the tokens that both sides have where the mapping matches tokens, and the
        target. They read from the archives given, which the caller closes.

    Raises:
        UsageError: An entry of the mapping does not fit the archives.
    """
    links = resolve(alignment, reference, target)
    tokens = tuple(found.text for found in token_alignments(alignment, reference, target))
    tested = MappedArchive(
        reference, target, links, left_over=alignment.left_over, map_path=path, tokens=tokens
    )
    return GatheredArchive(reference, links), tested
