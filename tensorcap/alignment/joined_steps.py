"""Steps of a run joined to one, where the other run was fed the same tokens in fewer steps.

A prompt may be fed whole or in chunks. Where both runs were fed the same ids, divided otherwise, the steps
between two places at which both divide them become one step in a view, before anything is paired: each tensor
is that of all their tokens, and a sentence says so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, count, zip_longest
from typing import Any, Final

import numpy as np

from tensorcap.alignment.layout import Shape
from tensorcap.alignment.tokens import ids_by_step
from tensorcap.runs import is_parameter
from tensorcap.wording import some
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.keys import Key
from tensorcap_formats.records import Record
from tensorcap_formats.run_info import RunInfo
from tensorcap_formats.view import ArchiveView

_STEPS: Final = 4096  # most steps of a run that are looked at

_SIDES: Final = ("reference", "target")

Steps = tuple[int, ...]
Shapes = frozenset[tuple[str, Shape]]


@dataclass(frozen=True, slots=True)
class _Parts:
    """A tensor of a joint step, and its parts in the steps that it is made of.

    Attributes:
        records: The parts, in order of steps.
        axis: The axis along which they follow each other.
        rows: The rows that this axis counts besides tokens, row by row; 1 if it counts tokens alone.
        keys: The axis of a mask that counts keys, of which an earlier step has fewer; None for other tensors.
    """

    records: tuple[Record, ...]
    axis: int
    rows: int = 1
    keys: int | None = None

    @property
    def shape(self) -> Shape:
        last = list(self.records[-1].shape)
        last[self.axis] = sum(record.shape[self.axis] for record in self.records)
        return tuple(last)

    def joined(self, arrays: Sequence[Array]) -> Array:
        if self.keys is not None:
            blocked = _blocked(arrays)
            size = arrays[-1].shape[self.keys]
            arrays = [_widened(array, self.keys, size, blocked) for array in arrays]
        if self.rows > 1:
            arrays = [
                a.reshape(*a.shape[: self.axis], self.rows, -1, *a.shape[self.axis + 1 :]) for a in arrays
            ]
        joined = np.concatenate(arrays, self.axis + (self.rows > 1))
        return joined.reshape(self.shape)

    def split(self, whole: Array) -> list[Array]:
        """The parts of a tensor of all tokens: what `joined` undoes."""
        shape, axis = whole.shape, self.axis
        if self.rows > 1:
            whole = whole.reshape(*shape[:axis], self.rows, -1, *shape[axis + 1 :])
        ends = np.cumsum([record.shape[axis] // self.rows for record in self.records])[:-1]
        arrays = [
            part.reshape(*shape[:axis], -1, *shape[axis + 1 :])
            for part in np.split(whole, ends, axis + (self.rows > 1))
        ]
        if self.keys is not None:
            known = [range(record.shape[self.keys]) for record in self.records]
            arrays = [np.take(array, keys, self.keys) for array, keys in zip(arrays, known, strict=True)]
        return arrays


@dataclass(frozen=True, slots=True)
class _Division:
    """Which steps of a run become one.

    Attributes:
        steps: The number of each joint step, and the steps that it is made of.
        lengths: How many tokens a row each step was fed.
        rows: How many rows.
    """

    steps: Mapping[int, Steps]
    lengths: Mapping[int, int]
    rows: int

    def renumbered(self, key: Key) -> Key:
        number = next((n for n, joint in self.steps.items() if key.step in joint), key.step)
        return key if key.is_bare else replace(key, step=number)

    def choices(self, archive: Archive) -> dict[Key, Sequence[Record | _Parts]]:
        """What each tensor of a joint step may be, the likeliest first; nothing for what cannot be joined."""
        before = dict(zip(self.lengths, accumulate(self.lengths.values(), initial=0), strict=False))
        numbers = {step: number for number, joint in self.steps.items() for step in joint}
        by_key: dict[Key, list[Record]] = {}
        for record in archive.records:
            key = record.key
            number = numbers.get(key.step, key.step)
            key = key if key.is_bare or number == key.step else replace(key, step=number)
            by_key.setdefault(key, []).append(record)
        found: dict[Key, Sequence[Record | _Parts]] = {}
        for key, parts in by_key.items():
            joint = () if key.is_bare else self.steps.get(key.step, ())
            if len(joint) < 2:
                found[key] = parts[:1]
            else:
                lengths = [self.lengths[step] for step in joint]
                found[key] = _ways_to_join(parts, lengths, before[joint[0]], self.rows)
        return found

    def shapes(self, archive: Archive) -> Shapes:
        """Kinds and shapes that tensors of a run may have."""
        choices = self.choices(archive).values()
        return frozenset((_kind(choice), choice.shape) for ways in choices for choice in ways)


class JoinedArchive(ArchiveView):
    """An archive some steps of which are joined to one.

    Of a tensor that has no axis of the tokens, what the first step was given and what the last one gave
    counts. What only some of the steps have and what cannot be joined is left out.

    Args:
        source: The archive; the caller closes it.
        division: The steps.
        shapes: Kinds and shapes that tensors of the other run have, which decide between axes of equal size.
        text: What was joined, a sentence.
    """

    def __init__(self, source: Archive, division: _Division, shapes: Shapes, text: str) -> None:
        self.text = text
        self._division, self._shapes = division, shapes
        self._parts: dict[str, _Parts] = {}
        records: list[Record] = []
        sources: dict[str, tuple[Record, ...]] = {}
        for key, choices in division.choices(source).items():
            fitting = (choice for choice in choices if (_kind(choice), choice.shape) in shapes)
            found = next(fitting, next(iter(choices), None))
            if isinstance(found, _Parts):
                self._parts[key.text] = found
                first = found.records[0]
                records.append(replace(first, key=key, shape=found.shape, digest="", statistics=None))
                sources[key.text] = found.records
            elif found is not None:
                records.append(replace(found, key=key))
                sources[key.text] = (found,)
        values: dict[str, Any] = {}
        for text, value in source.values.items():
            values.setdefault(division.renumbered(Key.parse(text)).text, value)
        super().__init__(source, records, sources, values=values)

    @cached_property
    def info(self) -> RunInfo:
        """What the source's metadata say; the lists by step are those of first steps."""
        info = self.source.info
        firsts = [joint[0] for _, joint in sorted(self._division.steps.items())]
        phases = tuple(info.phases[step] for step in firsts if step < len(info.phases))
        return replace(info, phases=phases, threads=(), inputs={})

    def of_run(self, run: Archive) -> JoinedArchive:
        """View another run of the same model, in the same steps, so."""
        return JoinedArchive(run, self._division, self._shapes, self.text)

    def parts_of(self, record: Record) -> Sequence[Record]:
        """The source's records that a record of another run, under a key of this view, stands for.

        There are none if it has another shape than the tensor of all tokens.
        """
        text = record.key.text
        parts = self._parts.get(text)
        if parts is not None and parts.shape != record.shape:
            return ()
        return self.sources.get(text, ())

    def split(self, record: Record, whole: Array) -> list[Array]:
        """A tensor of all tokens, in the parts that `parts_of` names."""
        parts = self._parts.get(record.key.text)
        return [whole] if parts is None else parts.split(whole)

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        parts = self._parts.get(record.key.text)
        if parts is None:
            super()._read_flat(record, start, out)
            return
        (whole,) = self._computed(parts, lambda: [parts.joined([self.source.read(r) for r in parts.records])])
        out[:] = whole[start : start + out.size]


class _SplitArchive(ArchiveView):
    """An archive with joint steps, in the steps that another run's view joined."""

    def __init__(self, archive: Archive, joined: JoinedArchive) -> None:
        self._joined = joined
        self._at: dict[str, tuple[Record, int]] = {}
        records: list[Record] = []
        sources: dict[str, tuple[Record, ...]] = {}
        for record in archive.records:
            parts = joined.parts_of(record)
            for number, part in enumerate(parts):
                key, text = part.key, part.key.text
                if len(parts) == 1:
                    records.append(replace(record, key=key, order=part.order))
                else:
                    own = replace(record, key=key, order=part.order, shape=part.shape)
                    records.append(replace(own, digest="", statistics=None))
                    self._at[text] = record, number
                sources[text] = (record,)
        records.sort(key=lambda record: record.order)
        super().__init__(archive, records, sources, values={}, root=archive.root)

    def _read_flat(self, record: Record, start: int, out: Array) -> None:
        whole, number = self._at.get(record.key.text, (record, -1))
        if number < 0:
            super()._read_flat(record, start, out)
            return
        parts = self._computed(whole, lambda: self._joined.split(whole, self.source.read(whole)))
        out[:] = parts[number][start : start + out.size]


def in_own_steps(
    archive: Archive, view: Archive, keys: Collection[str] = ()
) -> tuple[Archive, frozenset[str]]:
    """View tensors under keys of a view of another run in that run's own steps, if the view joined some.

    Args:
        archive: The tensors.
        view: The view of the other run.
        keys: Key texts of some of them.

    Returns:
        The tensors, and the key texts of those in the run's own steps.
    """
    joined = joined_steps_of(view)
    if joined is None:
        return archive, frozenset(keys)
    split = _SplitArchive(archive, joined)
    return split, frozenset(text for text, (whole,) in split.sources.items() if whole.key.text in keys)


def in_same_steps(reference: Archive, target: Archive) -> tuple[Archive, Archive]:
    """View two archives with one step for the same tokens (ALN-307).

    1. Both runs were fed ids in all steps, of as many rows, and divided them otherwise.
    2. The ids of the rows up to each place at which both runs divide them are equal. The steps between two
       such places are joined; those behind the first other id stay as they are.

    Returns:
        The views; an archive of which nothing is joined is returned as it is.

    Raises:
        ReadError: Ids cannot be read.
    """
    sides = [ids_by_step(archive) for archive in (reference, target)]
    shapes = [[record.shape for record in ids.values()] for ids in sides]
    if shapes[0] == shapes[1] or not all(0 < len(of_side) <= _STEPS for of_side in shapes):
        return reference, target
    rows = {shape[:-1] for of_side in shapes for shape in of_side}
    if len(rows) != 1 or any(len(shape) != 2 for of_side in shapes for shape in of_side):
        return reference, target
    lengths = [{step: record.shape[1] for step, record in ids.items()} for ids in sides]
    values = [
        np.concatenate([archive.load(record) for record in ids.values()], axis=1)
        for archive, ids in zip((reference, target), sides, strict=True)
    ]
    joint = _joint_steps(lengths[0], lengths[1], *values)
    if joint is None:
        return reference, target
    ((batch,),) = rows
    divisions = [
        _Division({number: steps[i] for number, steps in joint.items() if steps[i]}, lengths[i], batch)
        for i in range(2)
    ]
    views: list[Archive] = []
    for i, archive in enumerate((reference, target)):
        if all(steps == (number,) for number, steps in divisions[i].steps.items()):
            views.append(archive)
            continue
        texts = [
            f"steps {steps[0]} to {steps[-1]} of the {_SIDES[i]}, of "
            f"{_numbers([lengths[i][step] for step in steps])} tokens, were compared as one: the "
            f"{_SIDES[1 - i]} was fed the same tokens in "
            + (f"step {theirs[0]}" if len(theirs := joint[number][1 - i]) == 1 else f"{len(theirs)} others")
            for number, steps in divisions[i].steps.items()
            if len(steps) > 1
        ]
        others = divisions[1 - i].shapes((target, reference)[i])
        views.append(JoinedArchive(archive, divisions[i], others, "; ".join(texts)))
    return views[0], views[1]


def joined_steps_of(archive: Archive | None) -> JoinedArchive | None:
    """The view that joined steps, among those that an archive is seen through; None if there is none."""
    while isinstance(archive, ArchiveView) and not isinstance(archive, JoinedArchive):
        archive = archive.source
    return archive if isinstance(archive, JoinedArchive) else None


def _numbers(numbers: Sequence[int]) -> str:
    texts = [str(number) for number in numbers]
    return " and ".join(texts) if len(texts) < 4 else some(texts, 4)


def _joint_steps(
    ours: Mapping[int, int], theirs: Mapping[int, int], ids: Array, other_ids: Array
) -> dict[int, tuple[Steps, Steps]] | None:
    """The steps of both sides between the places at which both divide the tokens, by the number they get.

    Args:
        ours: Tokens of each step of the reference, in order.
        theirs: Those of the target.
        ids: All ids of the reference (row, token).
        other_ids: All ids of the target (row, token).

    Returns:
        None if there is nothing to join. Behind the last such place step follows step.
    """
    ends = [np.cumsum([*lengths.values()]).tolist() for lengths in (ours, theirs)]
    known = min(ids.shape[1], other_ids.shape[1])
    unlike = np.flatnonzero((ids[:, :known] != other_ids[:, :known]).any(axis=0))
    equal = int(unlike[0]) if len(unlike) else known
    joint: list[tuple[Steps, Steps]] = []
    at = [0, 0]
    numbers = [*ours], [*theirs]
    for end in sorted(set(ends[0]).intersection(ends[1])):
        if end > equal:
            break
        following = [of_side.index(end) + 1 for of_side in ends]
        first, second = (tuple(numbers[i][at[i] : following[i]]) for i in range(2))
        joint.append((first, second))
        at = following
    if all(len(first) == len(second) == 1 for first, second in joint):
        return None
    left = [[(step,) for step in of_side[start:]] for of_side, start in zip(numbers, at, strict=True)]
    joint += zip_longest(left[0], left[1], fillvalue=())
    behind = count(max(ours) + 1)
    return {first[0] if first else next(behind): (first, second) for first, second in joint}


def _kind(choice: Record | _Parts) -> str:
    return (choice if isinstance(choice, Record) else choice.records[0]).dtype.kind


def _ways_to_join(
    parts: Sequence[Record], lengths: Sequence[int], before: int, rows: int
) -> Sequence[Record | _Parts]:
    """What of some records, in order of steps, may be the tensor of all their tokens, the likeliest first.

    Args:
        parts: The records, of one key but for the step.
        lengths: The tokens of each step.
        before: How many tokens a row came before.
        rows: How many rows there are.
    """
    first, last = parts[0], parts[-1]
    if is_parameter(first.key):
        return [first]
    if len(parts) < len(lengths):  # what some steps lack: a cache before the first, a head behind the last
        return []
    own = [record.shape for record in parts]
    if len({(len(shape), record.dtype) for shape, record in zip(own, parts, strict=True)}) > 1:
        return []
    if first.digest and all(
        record.digest == first.digest and record.shape == first.shape for record in parts
    ):
        return [first]
    choices: list[Record | _Parts] = [
        _Parts(tuple(parts), axis, times)
        for axis in (*range(1, len(first.shape)), 0)[: len(first.shape)]
        for times in ((1, rows) if rows > 1 else (1,))
        if [shape[axis] for shape in own] == [times * length for length in lengths]
        and len({shape[:axis] + shape[axis + 1 :] for shape in own}) == 1
    ]
    *_, queries, keys = (-1, -1, *range(len(first.shape)))
    if (
        queries >= 0
        and (first.dtype.is_native or first.dtype.kind == "bool")
        and [shape[queries] for shape in own] == [*lengths]
        and _are_ends([shape[keys] for shape in own], lengths, before)
        and len({shape[:queries] for shape in own}) == 1
    ):
        choices.append(_Parts(tuple(parts), queries, keys=keys))
    counts_all = any(_are_ends([shape[i] for shape in own], lengths, before) for i in range(len(own[0])))
    choices.append(last if counts_all or not first.key.slot.startswith("input") else first)
    return choices


def _are_ends(sizes: Sequence[int], lengths: Sequence[int], before: int) -> bool:
    """Whether sizes are those of all tokens up to the end of each step."""
    return all(size == before + end for size, end in zip(sizes, accumulate(lengths), strict=True))


def _blocked(masks: Sequence[Array]) -> Any:
    """The value by which masks say that nothing attends to a key."""
    if not np.issubdtype(masks[0].dtype, np.floating):
        return masks[0].dtype.type(0)
    least = min(mask.min() for mask in masks if mask.size)
    return least if least < 0 else np.finfo(masks[0].dtype).min


def _widened(mask: Array, axis: int, size: int, value: Any) -> Array:
    """A mask with keys that come later."""
    shape = list(mask.shape)
    shape[axis] = size - mask.shape[axis]
    return np.concatenate([mask, np.full(shape, value, mask.dtype)], axis)
