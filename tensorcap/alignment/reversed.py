"""The reference as the target would name it: an archive whose records a mapping makes, backwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from tensorcap.alignment.gathering import Gather
from tensorcap.alignment.joining import Sum
from tensorcap.alignment.layout import Layout
from tensorcap.alignment.linking import Link
from tensorcap.alignment.token_axes import Held
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array, dtype_of
from tensorcap_formats.errors import ReadError, UsageError
from tensorcap_formats.records import Record
from tensorcap_formats.run_info import RunInfo
from tensorcap_formats.view import ArchiveView


class ReversedArchive(ArchiveView):
    """A reference under the target's keys, its tensors in the target's layout.

    Records that no link is about are those of the same key and shape. What the reference has not, such as
    padding or tokens that only the target was given, is filled from the target's own tensors. A record that
    is at most renamed keeps its dtype and its digest; any other has values, in float32 where the reference
    has a narrower float, and neither statistics nor digest. Arguments and results that are no tensors are
    left out, as they have keys of the reference.

    Attributes:
        left_out: Keys of the target that are mapped and cannot be made, and why.
    """

    def __init__(self, reference: Archive, target: Archive, links: Iterable[Link]) -> None:
        self._target = target
        self.left_out: dict[str, str] = {}
        self._made_of: dict[str, tuple[Link, int]] = {}
        self._why: dict[tuple[object, ...], str] = {}
        sources: dict[str, Sequence[Record]] = {}
        given = list(links)
        known = {record.key.text for link in given for record in link.target}
        ours = {record.key.text: record for record in reference.records}
        records: list[Record] = []
        for link in sorted(given, key=lambda link: (not link.is_renaming, len(link.target))):
            free = [p for p, r in enumerate(link.target) if r.key.text not in self._made_of]
            reason = self._why_not(link) if free else ""
            for part in free:
                theirs = link.target[part]
                if reason:
                    self.left_out.setdefault(theirs.key.text, reason)
                    continue
                self.left_out.pop(theirs.key.text, None)
                self._made_of[theirs.key.text] = link, part
                sources[theirs.key.text] = (link.reference[part],) if link.is_renaming else link.reference
                if link.is_renaming:
                    records.append(replace(ours[link.reference[part].key.text], key=theirs.key))
                else:
                    dtype = dtype_of(np.empty(0, self._dtype(link)))
                    made = replace(link.reference[0], key=theirs.key, dtype=dtype, shape=theirs.shape)
                    stored = all(record.stored for record in link.reference)
                    records.append(replace(made, stored=stored, digest="", statistics=None))
        linked = {record.key.text for link in given for record in link.reference}
        for theirs in target.records:
            text = theirs.key.text
            own = None if text in linked or text in known else ours.get(text)
            if own is not None and own.shape == theirs.shape:
                sources[text] = (own,)
                records.append(own)
        records.sort(key=lambda record: record.order)
        super().__init__(
            reference,
            records,
            sources,
            values={},
            root=reference.root,
        )

    @cached_property
    def info(self) -> RunInfo:
        """What the reference's metadata say; its aliases are none of the target's."""
        return replace(self.source.info, aliases={})

    def _why_not(self, link: Link) -> str:
        """Why a link cannot be undone; "" if it can. Tried on zeros, once for each entry and its shapes."""
        if link.is_renaming:
            return ""
        shapes = tuple(record.shape for record in (*link.reference, *link.target))
        name = (id(link.entry), bool(link.gathers), shapes)
        if name not in self._why:
            zeros = [np.zeros(record.shape, self._dtype(link)) for record in link.reference]
            naturals = [np.zeros(record.shape, self._dtype(link)) for record in link.target]
            try:
                _undone(link, zeros, naturals)
                self._why[name] = ""
            except UsageError as error:
                self._why[name] = str(error)
        return self._why[name]

    def _dtype(self, link: Link) -> str:
        return max((_values_of(record) for record in link.reference), key=np.dtype)

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        text = record.key.text
        link, part = self._made_of.get(text, (None, 0))
        if link is None or link.is_renaming:
            super()._read_flat(record, start, out)
            return
        tensors = self._computed(link, lambda: self._undo_link(link, text))
        out[:] = tensors[part][start : start + out.size]

    def _undo_link(self, link: Link, text: str) -> list[Array]:
        dtype = self._dtype(link)
        ours = [self.source.load(record).astype(dtype) for record in link.reference]
        naturals = [self._target.load(record).astype(dtype) for record in link.target]
        try:
            return _undone(link, ours, naturals)
        except UsageError as error:
            raise ReadError(f"{self.path}: {text}: {error}", hint=error.hint) from None


def _values_of(record: Record) -> str:
    """The numpy dtype of a record's values."""
    dtype = record.dtype
    if dtype.is_native:
        return dtype.storage
    return {"float": "<f4", "complex": "<c8", "int": "|i1", "uint": "|u1"}[dtype.kind]


def _undone(link: Link, reference: Sequence[Array], naturals: Sequence[Array]) -> list[Array]:
    """The target's tensors of which a link makes the reference's."""
    if not link.gathers:
        return _undo(link.layout, reference, naturals)
    count = len(naturals) // len(link.gathers[0].steps)
    runs = [naturals[start : start + count] for start in range(0, len(naturals), count)]
    laid = [_laid(link.layout, run) for run in runs]
    for part, gather in enumerate(link.gathers):
        filled = _filled(gather, reference[part], [run[part] for run in laid])
        for run, array in zip(laid, filled, strict=True):
            run[part] = array
    return [array for run, own in zip(laid, runs, strict=True) for array in _undo(link.layout, run, own)]


def _undo(layout: Layout, arrays: Sequence[Array], naturals: Sequence[Array]) -> list[Array]:
    if not layout.steps:
        return list(arrays)
    first = layout.steps[0]
    if isinstance(first, Sum) and len(first.shapes(tuple(array.shape for array in naturals))) == 1:
        natural = sum(naturals[1:], naturals[0])
        (whole,) = _undo(Layout(layout.steps[1:]), arrays, [natural])
        return [whole, *map(np.zeros_like, naturals[1:])]
    return layout.undo(arrays, [array.shape for array in naturals], naturals)


def _laid(layout: Layout, arrays: Sequence[Array]) -> list[Array]:
    made, _ = layout.apply(arrays, [dtype_of(array) for array in arrays])
    return list(made)


def _filled(gather: Gather, reference: Array, naturals: Sequence[Array]) -> list[Array]:
    """The target's tensors with the reference's tokens in the places of the same tokens."""
    if any(held.is_shared for held in gather.target):
        raise UsageError("one row stands for all: its tokens cannot be put back")
    parts = [held.rows(array) for held, array in zip(gather.target, naturals, strict=True)]
    rows = np.concatenate(parts)
    rows[gather.target_rows] = gather.reference.rows(reference)[gather.reference_rows]
    ends = np.cumsum([len(part) for part in parts])[:-1]
    found = zip(gather.target, naturals, np.split(rows, ends), strict=True)
    return [_unrowed(held, array.shape, part) for held, array, part in found]


def _unrowed(held: Held, shape: tuple[int, ...], rows: Array) -> Array:
    """A tensor of this shape out of its tokens along the first axis: `Held.rows` backwards."""
    front = rows.reshape(*(shape[axis] for axis in held.axes), *held.rest(shape))
    return np.moveaxis(front, range(len(held.axes)), held.axes)
