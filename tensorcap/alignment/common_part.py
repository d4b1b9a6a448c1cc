"""The part of two runs that both have: rows of a batch without padding, a vocabulary without padding.

A run of one row is compared with that row of the other run's batch, and logits of a padded vocabulary in the
words that both sides know. What only one run has is cut off in a view of its archive, before anything is
paired, and a sentence says so.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from tensorcap.alignment.choice_order import in_one_order
from tensorcap.alignment.joined_steps import JoinedArchive, in_same_steps
from tensorcap.alignment.layout import Shape
from tensorcap.alignment.tokens import ROLES, is_mask
from tensorcap.runs import is_parameter, is_result
from tensorcap.wording import counted, some
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array, dtype_of
from tensorcap_formats.keys import ROOT_SITE
from tensorcap_formats.records import Record
from tensorcap_formats.run_info import RunInfo, TensorInfo
from tensorcap_formats.view import ArchiveView

Part = Mapping[int, Array]  # the indices that are kept, by axis
_Inputs = Mapping[tuple[int, str], Record]  # by step and slot

_POSITION_AXES: Final = ((2, 3), (2,), (3,), (1,))  # queries and keys, behind heads, of a mask; before heads
_MOST: Final = 1 << 24  # elements of an input or of logits that are read
_SAME_FLOAT: Final = 2.0**-8  # relative error of one input in two float dtypes: the rounding of bfloat16
_SAME_SUM: Final = 1e-6  # of sums in float64 of one set of numbers, in another order
_AGREEING: Final = 0.2  # relative error up to which logits are those of the same words; others leave 1.4


class CutArchive(ArchiveView):
    """An archive of whose tensors parts were cut off.

    A record that is cut has neither statistics nor digest; any other stays as it is.

    Args:
        source: The archive; the caller closes it.
        parts: What is kept of records, by key text.
        text: What was cut off, a sentence.
        info: The run metadata as they are for what is kept.
    """

    def __init__(self, source: Archive, parts: Mapping[str, Part], text: str, info: RunInfo) -> None:
        self._parts = parts
        self._info = info
        self.text = text
        super().__init__(
            source,
            [_reduced(record, parts.get(record.key.text)) for record in source.records],
            {record.key.text: (record,) for record in source.records},
        )

    @cached_property
    def info(self) -> RunInfo:
        """What the source's metadata say, as it is for what is kept."""
        return self._info

    def of_run(self, run: Archive) -> CutArchive:
        """View another run of the same model so: its tensors of the shapes that were cut."""
        shapes = {record.key.text: record.shape for record in run.records}
        cut = ((text, part, self.sources[text][0].shape) for text, part in self._parts.items())
        parts = {text: part for text, part, shape in cut if shapes.get(text) == shape}
        return CutArchive(run, parts, self.text, run.info)

    def put_into_whole(self, other: Archive) -> Archive:
        """View another run's tensors, which are of what is kept, in the tensors that this was cut off."""
        wholes = {
            record.key.text: self.sources[record.key.text][0]
            for record in other.records
            if record.key.text in self._parts and self.get(record.key.text).shape == record.shape
        }
        return _WholeArchive(other, self.source, wholes, self._parts)

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        part = self._parts.get(record.key.text)
        if part is None:
            super()._read_flat(record, start, out)
            return
        (whole,) = self.sources[record.key.text]
        (kept,) = self._computed(whole, lambda: [_take(self.source.read(whole), part)])
        out[:] = kept[start : start + out.size]


class _WholeArchive(ArchiveView):
    """An archive whose tensors stand in larger ones of another run, in the places of the same tokens.

    Args:
        archive: The archive; the caller closes it.
        around: The other run, under the same keys.
        wholes: Its records of the larger tensors, by key text.
        parts: The places in them.
    """

    def __init__(
        self, archive: Archive, around: Archive, wholes: Mapping[str, Record], parts: Mapping[str, Part]
    ) -> None:
        self._around, self._wholes, self._parts = around, wholes, parts
        super().__init__(
            archive,
            [self._enlarged(record) for record in archive.records],
            {record.key.text: (record,) for record in archive.records},
        )

    def _enlarged(self, record: Record) -> Record:
        whole = self._wholes.get(record.key.text)
        if whole is None:
            return record
        like = whole if _are_masks_of_two_kinds(record, whole) else record
        dtype = dtype_of(np.empty(0, values_dtype(like)))
        return replace(record, shape=whole.shape, dtype=dtype, digest="", statistics=None)

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        whole = self._wholes.get(record.key.text)
        if whole is None:
            super()._read_flat(record, start, out)
            return
        (inner,) = self.sources[record.key.text]
        (filled,) = self._computed(whole, lambda: [self._filled(inner, whole)])
        out[:] = filled[start : start + out.size]

    def _filled(self, inner: Record, whole: Record) -> Array:
        values, natural = self.source.load(inner), self._around.load(whole)
        if _are_masks_of_two_kinds(inner, whole):
            values = values == 0 if natural.dtype == bool else np.where(values, 0, natural.min())
        filled = natural.astype(values.dtype)
        part = self._parts[inner.key.text]
        filled[np.ix_(*(part.get(axis, np.arange(size)) for axis, size in enumerate(whole.shape)))] = values
        return filled


def _are_masks_of_two_kinds(one: Record, other: Record) -> bool:
    """Whether of two tensors one says by truth, the other by numbers to add, what is attended to (POL-24)."""
    return {one.dtype.kind, other.dtype.kind} == {"bool", "float"}


def values_dtype(record: Record) -> str:
    """The numpy dtype of a record's values."""
    dtype = record.dtype
    if dtype.is_native:
        return dtype.storage
    return {"float": "<f4", "complex": "<c8", "int": "|i1", "uint": "|u1"}[dtype.kind]


def _reduced(record: Record, part: Part | None) -> Record:
    """The record of what is kept."""
    if part is None:
        return record
    shape = tuple(len(part[axis]) if axis in part else size for axis, size in enumerate(record.shape))
    return replace(record, shape=shape, digest="", statistics=None)


def cut_texts(archive: Archive) -> tuple[str, ...]:
    """What was cut off an archive, and which steps were joined, a sentence each."""
    if isinstance(archive, (CutArchive, JoinedArchive)):
        texts = (*cut_texts(archive.source), archive.text)
        return tuple(text for text in texts if text)
    return ()


def fed_in_common(reference: Archive, target: Archive) -> tuple[Archive, Archive]:
    """View two archives in the rows that both were fed: the second step of `in_common`."""
    target = _rows_of(target, "target", reference, "reference") or target
    reference = _rows_of(reference, "reference", target, "target") or reference
    return reference, target


def in_common(reference: Archive, target: Archive) -> tuple[Archive, Archive]:
    """View two archives as far as both have the same rows, and the same words.

    1. If both were fed the same tokens in other steps, steps are joined until both have the same.
    2. If one run was fed some rows of what the other was fed, the others are cut off the other one, and
       padding of those rows that it was not fed.
    3. If one run has logits of more words, and those of the words that both have agree, the rest is cut off.
    4. If both chose the same experts in another order, they are sorted.

    Returns:
        The views; an archive of which nothing is cut off is returned as it is.

    Raises:
        ReadError: Inputs or logits cannot be read.
    """
    reference, target = fed_in_common(*in_same_steps(reference, target))
    target = _words_of(target, "target", reference, "reference") or target
    reference = _words_of(reference, "reference", target, "target") or reference
    return in_one_order(reference, target)


def _take(array: Array, part: Part) -> Array:
    for axis, kept in part.items():
        array = np.take(array, kept, axis)
    return array


# --- Rows of a batch


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a batch, and the positions of them, that another run was fed.

    Attributes:
        batch: How many rows the batch has.
        rows: Those that the other run was fed, in its order.
        length: How many positions the rows have; 0 if none are cut off.
        positions: Those that the other run was fed; empty if none are cut off.
    """

    batch: int
    rows: tuple[int, ...]
    length: int = 0
    positions: range = range(0)

    def text(self, side: str, other: str) -> str:
        one = len(self.rows) == 1
        rows = f"row {self.rows[0]}" if one else f"rows {some([str(row) for row in self.rows], 4)}"
        text = f"{rows} of the {side}'s batch of {self.batch}"
        if self.positions:
            first, last = self.positions[0], self.positions[-1]
            text += f", positions {first} to {last} of {self.length}; the others are padding"
        return f"{text}: the {other} was fed no more, and no more was compared"

    def part(self, shape: Shape, other: Shape | None, shapes: Collection[Shape] = ()) -> Part | None:
        """What is kept of a tensor.

        Args:
            shape: Its shape.
            other: The shape of the other run's tensor of that key; None if it has none.
            shapes: The shapes of all tensors of the other run.

        Returns:
            None if all is kept: the other's tensor has the same shape, or one that rows do not explain.
        """
        if other is not None:
            return self._to_shape(shape, other)
        part: dict[int, Array] = {}
        if self.rows == tuple(range(self.batch)):
            pass
        elif shape[:1] == (self.batch,):
            part[0] = np.array(self.rows)
        elif self.length and shape[:1] == (self.batch * self.length,):
            part[0] = self._tokens()
        if self.positions and len(shape) > 1:
            part |= dict.fromkeys(self._position_axes(shape, shapes), np.array(self.positions))
        return part or None

    def _position_axes(self, shape: Shape, shapes: Collection[Shape]) -> Sequence[int]:
        """The axes of positions: the second, or of four axes those that give a shape that the other run has.

        A head may be as wide as the rows are long, and positions come before heads or behind them.
        """
        if len(shape) < 4:
            return [axis for axis in (1,) if shape[axis] == self.length]
        ways = [axes for axes in _POSITION_AXES if all(shape[axis] == self.length for axis in axes)]
        batch = (len(self.rows), *shape[1:])
        kept = len(self.positions)
        cut = {axes: tuple(kept if i in axes else size for i, size in enumerate(batch)) for axes in ways}
        return next((axes for axes in ways if cut[axes] in shapes), next(iter(ways), ()))

    def _to_shape(self, shape: Shape, other: Shape) -> Part | None:
        if shape == other or len(shape) != len(other):
            return None
        part: dict[int, Array] = {}
        for axis, (size, kept) in enumerate(zip(shape, other, strict=True)):
            if size == kept:
                continue
            if self.positions and (size, kept) == (self.length, len(self.positions)):
                part[axis] = np.array(self.positions)
            elif axis:
                return None
            elif self.positions and size == self.batch * self.length and kept == len(self._tokens()):
                part[axis] = self._tokens()
            elif size % self.batch == 0 and size // self.batch * len(self.rows) == kept:
                each = size // self.batch
                part[axis] = np.concatenate([np.arange(row * each, (row + 1) * each) for row in self.rows])
            else:
                return None
        return part

    def _tokens(self) -> Array:
        """The rows' tokens among those of the whole batch, one after the other."""
        positions = np.array(self.positions or range(self.length))
        tokens: Array = (np.array(self.rows)[:, None] * self.length + positions).reshape(-1)
        return tokens


def _rows_of(larger: Archive, side: str, smaller: Archive, other: str) -> CutArchive | None:
    """View an archive in the rows that another run was fed; None if it was fed other ones, or as many."""
    rows = _find_rows(larger, smaller)
    if rows is None:
        return None
    shapes = {record.key.text: record.shape for record in smaller.records}
    present = set(shapes.values())
    parts = {
        record.key.text: part
        for record in larger.records
        if not is_parameter(record.key)
        and record.dtype.packed == 1
        and (part := rows.part(record.shape, shapes.get(record.key.text), present)) is not None
    }
    info = larger.info
    hashes = {key: "" if key in parts else sha256 for key, sha256 in info.inputs.items()}
    return CutArchive(larger, parts, rows.text(side, other), replace(info, inputs=hashes))


def _find_rows(larger: Archive, smaller: Archive) -> _Rows | None:
    """Find the rows of one run's inputs that another run was fed, in every step; None if there are none.

    1. Inputs pair by name, else as the only one of their kind, such as a mask. Floats of later steps are what
       runs made of earlier ones, and do not count.
    2. The sizes of the first axis that differ are those of the batch; the lengths of integers that differ
       are those with and without padding, which a mask of the larger run has to confirm.
    3. Each row of the smaller run is the first free row of the larger one whose inputs are equal in all bits.
    """
    pairs = list(_common_inputs((larger, smaller), (_inputs(larger), _inputs(smaller))))
    if not pairs or any(record.size > _MOST for pair in pairs for record in pair):
        return None
    batches = {(a.shape[0], b.shape[0]) for a, b in pairs if a.shape[0] != b.shape[0] and len(a.shape) > 1}
    ids = [(a, b) for a, b in pairs if a.dtype.is_whole and len(a.shape) == len(b.shape) == 2]
    lengths = {(a.shape[1], b.shape[1]) for a, b in ids if a.shape[1] != b.shape[1]}
    if len(batches) > 1 or len(lengths) > 1 or not (batches or lengths):
        return None
    batch, count = next(iter(batches), ids[0][0].shape[:1] * 2 if ids else (0, 0))
    length, kept = next(iter(lengths), (ids[0][0].shape[1],) * 2 if ids else (0, 0))
    if batch < count or length < kept or not count:
        return None
    values = [(larger.load(a), smaller.load(b)) for a, b in pairs]
    if length == kept:
        rows = _equal_rows(values, batch, count, range(0), 0)
        return None if rows is None else _Rows(batch, rows, length)
    mask = _mask_of(larger, (batch, length))
    if mask is None or len({record.key.step for record, _ in pairs}) > 1:
        return None
    is_told = _mask_of(smaller, (count, kept)) is not None
    for start in range(length - kept + 1):
        positions = range(start, start + kept)
        rows = _equal_rows(values, batch, count, positions, length)
        if rows is not None and _is_padding_cut(mask[list(rows)], positions, is_told=is_told):
            return _Rows(batch, rows, length, positions)
    return None


def _inputs(archive: Archive) -> dict[tuple[int, str], Record]:
    """What a run was fed, by step and slot, save single numbers and what it made itself."""
    return {
        (record.key.step, record.key.slot): record
        for record in archive.records
        if record.key.site == ROOT_SITE
        and record.key.slot.partition(".")[0] == "input"
        and record.key.call == record.key.rank == 0
        and record.shape
        and record.stored
        and record.dtype.packed == 1
        and (record.dtype.kind != "float" or record.key.step == 0)
    }


def _common_inputs(
    archives: tuple[Archive, Archive], inputs: tuple[_Inputs, _Inputs]
) -> Iterator[tuple[Record, Record]]:
    """Pairs of inputs of one name; else the only ones of their step, kind and number of axes."""
    ours, theirs = inputs
    if ours.keys() & theirs.keys():
        yield from ((record, theirs[place]) for place, record in ours.items() if place in theirs)
        return
    kinds = [_by_kind(archive, side.values()) for archive, side in zip(archives, inputs, strict=True)]
    for kind, records in kinds[0].items():
        if len(records) == len(kinds[1].get(kind, ())) == 1:
            yield records[0], kinds[1][kind][0]


def _by_kind(archive: Archive, records: Collection[Record]) -> dict[tuple[object, ...], list[Record]]:
    by_kind: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        kind = "mask" if is_mask(archive, record, records) else record.dtype.kind
        by_kind.setdefault((record.key.step, kind, len(record.shape)), []).append(record)
    return by_kind


def _mask_of(archive: Archive, shape: Shape) -> Array | None:
    """The mask of the tokens that a run was fed: True where one is no padding (row, position)."""
    inputs = _inputs(archive)
    named = [inputs.get((0, f"input.{name}")) for name in ROLES["mask"]]
    masks = [record for record in named if record is not None and record.shape == shape]
    if not masks:
        first = [record for (step, _), record in inputs.items() if step == 0 and record.shape == shape]
        masks = [record for record in first if is_mask(archive, record, first)]
        masks = masks if len(masks) == 1 else []
    return None if not masks else np.asarray(archive.load(masks[0]) != 0)


def _is_padding_cut(mask: Array, positions: range, *, is_told: bool) -> bool:
    """Whether all other positions of some rows are padding, and these are not, or both sides mask them."""
    kept = np.zeros(mask.shape[1], np.bool_)
    kept[list(positions)] = True
    return not mask[:, ~kept].any() and (is_told or bool(mask[:, kept].all()))


def _equal_rows(
    values: Sequence[tuple[Array, Array]], batch: int, count: int, positions: range, length: int
) -> tuple[int, ...] | None:
    """The row of the larger run that each row of the smaller one equals; None if one has none."""
    window = np.array(positions)

    def kept(array: Array, shape: Shape) -> Array:
        sizes = enumerate(zip(array.shape, shape, strict=True))
        axes = [axis for axis, sizes in sizes if sizes == (length, len(positions))] if positions else []
        return _take(array, dict.fromkeys(axes, window))

    by_row: list[tuple[Array, Array]] = []
    for ours, theirs in values:
        if ours.ndim != theirs.ndim:
            return None
        if (len(ours), len(theirs)) == (batch, count) and ours.ndim > 1:
            by_row.append((ours, theirs))
        elif not _are_equal(kept(ours, theirs.shape), theirs):
            return None
    rows: list[int] = []
    for other in range(count):
        free = (row for row in range(batch) if row not in rows)
        equal = (
            row
            for row in free
            if all(_are_equal(kept(ours[row], theirs.shape[1:]), theirs[other]) for ours, theirs in by_row)
        )
        row = next(equal, None)
        if row is None:
            return None
        rows.append(row)
    return tuple(rows) if by_row else None


def _are_equal(ours: Array, theirs: Array) -> bool:
    """Whether two inputs are the same, floats of unlike dtypes to rounding."""
    if ours.shape != theirs.shape:
        return False
    if ours.dtype != theirs.dtype and "f" in (ours.dtype.kind, theirs.dtype.kind):
        return bool(np.allclose(theirs, ours, rtol=_SAME_FLOAT, atol=1e-6))
    return bool(np.array_equal(ours, theirs))


# --- Words of a vocabulary


def _words_of(larger: Archive, side: str, smaller: Archive, other: str) -> CutArchive | None:
    """View an archive without the logits of words that another run has not; None if there are none.

    1. The one result of both models that has more columns on one side is their logits.
    2. A matrix of the model has as many rows as there are columns, on both sides.
    3. The columns that both have agree, or the matrix is the other one and zeros, as statistics prove: words
       that stand in other places are no padding.
    """
    results = [_logits(archive) for archive in (larger, smaller)]
    common = results[0].keys() & results[1].keys()
    pairs = [(results[0][step], results[1][step]) for step in sorted(common)]
    sizes = {(ours.shape[-1], theirs.shape[-1]) for ours, theirs in pairs}
    if len(sizes) != 1 or any(len(ours.shape) != len(theirs.shape) for ours, theirs in pairs):
        return None
    ((padded, count),) = sizes
    if padded <= count or not (_has_head(larger.info, padded) and _has_head(smaller.info, count)):
        return None
    agrees = _agree(larger, smaller, *pairs[0], count)
    matrices = _padded_with_zeros(larger.info, smaller.info, padded, count)
    if not (agrees or matrices):
        return None
    shapes = {record.key.text: record.shape for record in smaller.records}
    heads = {(record.digest, record.shape) for record, _ in pairs if record.digest}
    parts: dict[str, Part] = {}
    kept = np.arange(count)
    for record in larger.records:
        is_head = (record.digest, record.shape) in heads or any(record is ours for ours, _ in pairs)
        shape = shapes.get(record.key.text)
        axis = 0 if is_parameter(record.key) else len(record.shape) - 1
        if record.dtype.packed > 1 or not (record.shape and record.shape[axis] == padded):
            continue
        is_like = shape is not None and len(shape) == len(record.shape) and shape[axis] == count
        if is_like if shape is not None else is_head and is_result(record.key):
            parts[record.key.text] = {axis: kept}
    text = (
        f"the {side}'s vocabulary is padded from {count} to {padded}, which the {other}'s is not: "
        + (f"the first {count} of its logits agree" if agrees else "zeros are all that its weights have more")
        + ", and no others were compared"
    )
    wins = _count_padding_wins(larger, pairs[0][0], count)
    if wins:
        text += f"; a word of the padding has the largest logit of {counted(wins, 'row')}"
    return CutArchive(larger, parts, text, _without_words(larger.info, padded, count, matrices))


def _logits(archive: Archive) -> dict[int, Record]:
    """The main result of the model in each step: its logits, if it has such."""
    return {
        record.key.step: record
        for record in archive.records
        if record.key.site == ROOT_SITE
        and record.key.slot in ("output", "output.logits", "output.0")
        and record.key.call == record.key.rank == 0
        and record.dtype.kind == "float"
        and record.dtype.packed == 1
        and len(record.shape) > 1
        and record.stored
    }


def _has_head(info: RunInfo, count: int) -> bool:
    """Whether a module has a matrix of a row a word; true if the run lists no parameters."""
    shapes = [about.shape for module in info.modules.values() for about in module.parameters.values()]
    return not shapes or any(len(shape or ()) == 2 and count in (shape or ()) for shape in shapes)


def _agree(larger: Archive, smaller: Archive, ours: Record, theirs: Record, count: int) -> bool:
    """Whether the first columns of logits agree, of the last positions that both have."""
    if max(ours.size, theirs.size) > _MOST:
        return False
    one, two = larger.load(ours)[..., :count], smaller.load(theirs)
    if one.ndim == 3:
        last = min(one.shape[1], two.shape[1])
        one, two = one[:, -last:], two[:, -last:]
    if one.shape != two.shape:
        return False
    one, two = one.astype(np.float64), two.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.linalg.norm(one - two) <= _AGREEING * np.linalg.norm(two))


def _count_padding_wins(archive: Archive, logits: Record, count: int) -> int:
    """In how many rows of the first logits a word of the padding has the largest one."""
    values = archive.load(logits)
    return int((values[..., count:].max(-1) > values[..., :count].max(-1)).sum())


def _padded_with_zeros(larger: RunInfo, smaller: RunInfo, padded: int, count: int) -> dict[str, TensorInfo]:
    """The smaller run's parameters by digests of those of the larger run that hold them and zeros behind.

    Sums, squares and extremes are equal, and there are as many zeros more as elements.
    """
    known = _with_rows(smaller, count)
    return {
        about.digest: other
        for about in _with_rows(larger, padded)
        for other in known
        if (about.shape or ())[1:] == (other.shape or ())[1:] and _holds_with_zeros(about, other)
    }


def _with_rows(info: RunInfo, rows: int) -> list[TensorInfo]:
    parameters = (about for module in info.modules.values() for about in module.parameters.values())
    return [about for about in parameters if about.shape and about.shape[0] == rows and about.digest]


def _holds_with_zeros(one: TensorInfo, other: TensorInfo) -> bool:
    ours, theirs = one.statistics, other.statistics
    if ours is None or theirs is None or None in (ours.mean, theirs.mean, ours.l2, theirs.l2):
        return False
    sizes = math.prod(one.shape or ()), math.prod(other.shape or ())
    sums = (ours.mean or 0) * sizes[0], (theirs.mean or 0) * sizes[1]
    size = theirs.l2 or 0.0
    return (
        ours.zeros - theirs.zeros == sizes[0] - sizes[1]
        and (ours.minimum, ours.maximum) == (theirs.minimum, theirs.maximum)
        and math.isclose(ours.l2 or 0.0, size, rel_tol=_SAME_SUM)
        and abs(sums[0] - sums[1]) <= _SAME_SUM * size
        and size > 0
    )


def _without_words(info: RunInfo, padded: int, count: int, matrices: Mapping[str, TensorInfo]) -> RunInfo:
    """The run metadata of a model without the padding of its vocabulary; `matrices` as they are without."""
    modules = {
        site: replace(
            module,
            parameters={
                name: _without_rows(about, count, matrices)
                if about.shape and len(about.shape) < 3 and about.shape[0] == padded
                else about
                for name, about in module.parameters.items()
            },
        )
        for site, module in info.modules.items()
    }
    sizes = {name: count for name, size in info.config.items() if name == "vocab_size" and size == padded}
    return replace(info, modules=modules, config={**info.config, **sizes})


def _without_rows(about: TensorInfo, count: int, matrices: Mapping[str, TensorInfo]) -> TensorInfo:
    """A parameter without padding: its digest is not known, its statistics are if padding is of zeros."""
    same = matrices.get(about.digest)
    statistics = None if same is None else same.statistics
    return replace(about, shape=(count, *(about.shape or ())[1:]), digest="", statistics=statistics)
