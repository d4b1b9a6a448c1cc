"""The reference with those tokens only that the target has as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tensorcap.alignment.gathering import Gather
from tensorcap.alignment.linking import Link
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.records import Record


class GatheredArchive(Archive):
    """A reference whose tensors are reduced to the tokens that links compare.

    A record of which all tokens count, or that has none, stays as it is. Any other has its tokens along its
    first axis, and neither statistics nor digest.

    Attributes:
        gathers: Those that reduce a record, by key text.
    """

    def __init__(self, reference: Archive, links: Sequence[Link]) -> None:
        self._reference = reference
        self.gathers: dict[str, Gather] = {}
        self._sources = {record.key.text: record for record in reference.records}
        self._kept: tuple[str, Array] | None = None  # the last tensor that was read
        for link in links:
            for record, found in zip(link.reference, link.gathers, strict=bool(link.gathers)):
                if not found.is_whole:
                    self.gathers[record.key.text] = found
        super().__init__(
            reference.path,
            reference.container,
            [self._reduced(record) for record in reference.records],
            is_foreign=reference.is_foreign,
            is_ordered=reference.is_ordered,
            is_complete=reference.is_complete,
            run=reference.run,
            values=reference.values,
            algorithm=reference.algorithm,
            root=None if self.gathers else reference.root,
            trusts_digests=reference.trusts_digests,
            skipped=reference.skipped,
        )
        self.is_direct = reference.is_direct and not self.gathers

    def remark(self, record: Record) -> str:
        """What is to be known of the tensor behind it."""
        return self._reference.remark(self._sources[record.key.text])

    def close(self) -> None:
        """Let go of the tensors; the reference stays open, it is the caller's."""
        self._kept = None

    def _reduced(self, record: Record) -> Record:
        found = self.gathers.get(record.key.text)
        if found is None:
            return record
        return replace(record, shape=found.shape(record.shape), digest="", statistics=None)

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        text = record.key.text
        if text not in self.gathers:
            self._reference.read_into(self._sources[text], start, out)
            return
        kept = self._kept  # another thread may set it
        if kept is None or kept[0] != text:
            whole = self._reference.read(self._sources[text])
            kept = self._kept = text, self.gathers[text].of_reference(whole).reshape(-1)
        out[:] = kept[1][start : start + out.size]
