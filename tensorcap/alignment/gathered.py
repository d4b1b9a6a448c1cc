"""The reference with those tokens only that the target has as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tensorcap.alignment.gathering import Gather
from tensorcap.alignment.linking import Link
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.records import Record
from tensorcap_formats.view import ArchiveView


class GatheredArchive(ArchiveView):
    """A reference whose tensors are reduced to the tokens that links compare.

    A record of which all tokens count, or that has none, stays as it is. Any other has its tokens along its
    first axis, and neither statistics nor digest.

    Attributes:
        gathers: Those that reduce a record, by key text.
    """

    def __init__(self, reference: Archive, links: Sequence[Link]) -> None:
        self.gathers: dict[str, Gather] = {}
        for link in links:
            for record, found in zip(link.reference, link.gathers, strict=bool(link.gathers)):
                if not found.is_whole:
                    self.gathers[record.key.text] = found
        super().__init__(
            reference,
            [self._reduced(record) for record in reference.records],
            {record.key.text: (record,) for record in reference.records},
            root=None if self.gathers else reference.root,
            is_direct=reference.is_direct and not self.gathers,
        )

    def _reduced(self, record: Record) -> Record:
        found = self.gathers.get(record.key.text)
        if found is None:
            return record
        return replace(record, shape=found.shape(record.shape), digest="", statistics=None)

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        text = record.key.text
        if text not in self.gathers:
            super()._read_flat(record, start, out)
            return
        (whole,) = self.sources[text]
        (rows,) = self._computed(whole, lambda: [self.gathers[text].of_reference(self.source.read(whole))])
        out[:] = rows[start : start + out.size]
