"""Some records of an archive, as an archive."""

from __future__ import annotations

from collections.abc import Iterable

from tensorcap_formats.archive import Archive
from tensorcap_formats.records import Record
from tensorcap_formats.view import ArchiveView


class Part(ArchiveView):
    """An archive that lacks some of another one's records.

    Args:
        whole: The other one; it stays the caller's to close.
        records: Those that are kept, in the order of their execution.
    """

    def __init__(self, whole: Archive, records: Iterable[Record]) -> None:
        kept = list(records)
        sources = {record.key.text: (record,) for record in kept}
        super().__init__(whole, kept, sources, root=whole.root, is_direct=whole.is_direct)
