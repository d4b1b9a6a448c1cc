"""Archives made of another archive's records: fewer of them, under other keys, or in another layout."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.records import Record
from tensorcap_formats.run_info import RunInfo


class ArchiveView(Archive):
    """Base class of archives that hold no bytes and read those of a source.

    The file, its order and completeness, the run's metadata and what was skipped are the source's, unless a
    view says otherwise. A record with one source record and the same elements is read from it; a view
    overrides `_read_flat` for the records that it computes.

    Args:
        source: The archive that is read. The caller closes it, when the view is read no more.
        records: The view's records, in execution order; their rows are numbered anew.
        sources: The source's records behind each record, by key text of the view; none for what was read
            already.
        values: Arguments and results that are no tensors, if they differ from the source's.
        root: The source's root hash, if the view still stands for all that the source holds.
        is_direct: As `Archive.is_direct`.

    Attributes:
        source: The archive that is read.
        sources: The source's records behind each record, by key text of the view.
    """

    def __init__(
        self,
        source: Archive,
        records: Iterable[Record],
        sources: Mapping[str, Sequence[Record]],
        *,
        values: Mapping[str, Any] | None = None,
        root: str | None = None,
        is_direct: bool = False,
    ) -> None:
        super().__init__(
            source.path,
            source.container,
            [r if r.row == row else replace(r, row=row) for row, r in enumerate(records)],
            is_foreign=source.is_foreign,
            is_ordered=source.is_ordered,
            is_complete=source.is_complete,
            run=source.run,
            values=source.values if values is None else values,
            algorithm=source.algorithm,
            root=root,
            trusts_digests=source.trusts_digests,
            skipped=source.skipped,
            problems=source.problems,
        )
        self.is_direct = is_direct
        self.checks_digests = source.checks_digests
        self.source = source
        self.sources = sources
        self._kept: tuple[object, Sequence[Array]] | None = None

    @cached_property
    def info(self) -> RunInfo:
        """The run metadata, parsed, as they are for the view's records."""
        return self.source.info

    def of_rank(self, rank: int) -> ArchiveView | None:
        """The same view of the source as one of its ranks has it."""
        source = self.source.of_rank(rank)
        if source is None:
            return None
        view = copy.copy(self)
        view.source, view._kept = source, None
        return view

    def verify(self, record: Record) -> None:
        """Read the source's tensors behind the record, and check them."""
        for one in self.sources.get(record.key.text, ()):
            self.source.verify(one)

    def remark(self, record: Record) -> str:
        """The remarks on the source's tensors behind the record."""
        remarks = (self.source.remark(one) for one in self.sources.get(record.key.text, ()))
        return "; ".join(dict.fromkeys(remark for remark in remarks if remark))

    def close(self) -> None:
        """Drop computed tensors; the source stays open."""
        self._kept = None

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        self.source.read_into(self.sources[record.key.text][0], start, out)

    def _computed(self, origin: object, compute: Callable[[], Iterable[Array]]) -> Sequence[Array]:
        """Arrays that are computed of an object, flat; kept until those of another object are asked for."""
        kept = self._kept  # another thread may set it
        if kept is None or kept[0] is not origin:
            kept = self._kept = origin, [array.reshape(-1) for array in compute()]
        return kept[1]


def recorded(archive: Archive, record: Record) -> tuple[Archive, Record | None]:
    """The archive behind all views, and the record of it that a view's record is.

    Returns:
        No record, if it is made of several, or of none.
    """
    own: Record | None = record
    while isinstance(archive, ArchiveView):
        sources = archive.sources.get(own.key.text, ()) if own is not None else ()
        own = sources[0] if len(sources) == 1 else None
        archive = archive.source
    return archive, own
