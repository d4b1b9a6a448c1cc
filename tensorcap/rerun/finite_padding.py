"""An archive whose padding is finite, so that it can stand in a run of another model.

A model may leave NaN in tokens that its mask leaves out, and never look at them. Another one multiplies them
by a weight of zero, which makes NaN of everything.
"""

from __future__ import annotations

import numpy as np

from tensorcap.comparison import Padding
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array, decode
from tensorcap_formats.records import Record
from tensorcap_formats.view import ArchiveView


def with_finite_padding(archive: Archive, other: Archive) -> Archive:
    """Put zeros for what is not finite in tokens that the masks of both runs leave out.

    Tensors of which the other run has as much that is not finite stay as they are; so do all if what is not
    finite has reached a token that counts, since the other model is to make that of the same values.

    Args:
        archive: Whose tensors are to stand in the other run's model; the caller closes it.
        other: The other run, under the same keys.

    Returns:
        The archive itself if there is nothing to put.
    """
    padding = Padding(archive, other)
    spoiled = {
        record.key.text
        for record in archive.records
        if record.dtype.kind == "float" and record.stored and "mask" not in record.key.slot
        if _is_less_finite(record, other.get(record.key) if record.key.text in other else None)
        if padding.left_out(record) is not None
    }
    if not spoiled or any(_reaches_tokens(archive, archive.get(key), padding) for key in spoiled):
        return archive
    return _FinitePadding(archive, padding, spoiled)


class _FinitePadding(ArchiveView):
    """An archive with zeros in its padding."""

    def __init__(self, archive: Archive, padding: Padding, spoiled: set[str]) -> None:
        super().__init__(
            archive, archive.records, {r.key.text: (r,) for r in archive.records}, is_direct=archive.is_direct
        )
        self._padding, self._spoiled = padding, spoiled

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        super()._read_flat(record, start, out)
        left_out = self._padding.left_out(record) if record.key.text in self._spoiled else None
        if left_out is not None:
            values = decode(out, record.dtype).astype(np.float64)
            part = left_out.reshape(-1)[start : start + out.size]
            out[part & ~np.isfinite(values)] = 0


def _is_less_finite(record: Record, other: Record | None) -> bool:
    """Whether more of a tensor may not be finite than of the other run's."""
    ours, theirs = (None if one is None else one.statistics for one in (record, other))
    count, fewer = (None if s is None else s.nan + s.posinf + s.neginf for s in (ours, theirs))
    return count != 0 and (count is None or fewer is None or count > fewer)


def _reaches_tokens(archive: Archive, record: Record, padding: Padding) -> bool:
    """Whether a tensor is not finite in tokens that no mask leaves out."""
    left_out = padding.left_out(record)
    return left_out is not None and not bool(np.isfinite(archive.load(record))[~left_out].all())
