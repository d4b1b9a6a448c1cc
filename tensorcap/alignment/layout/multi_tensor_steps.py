"""Layout steps that take several tensors or give several: joined, parted, added, copies left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tensorcap.alignment.layout.axis_patterns import Shape
from tensorcap.alignment.layout.steps import Arrays, Shapes, Step, unlike
from tensorcap.wording import conjugated
from tensorcap_formats.dtypes import Array


@dataclass(frozen=True)
class Concat(Step):
    """Join tensors along an axis: all of them, or each run of `of`."""

    name = "concat"
    usage = "concat AXIS of=COUNT"
    at: int
    of: int | None = None

    def shapes(self, shapes: Shapes) -> Shapes:
        return tuple(self._joined(run) for run in self.runs(shapes, self.of))

    def apply(self, arrays: Arrays) -> list[Array]:
        return [np.concatenate(run, self.at) for run in self.runs(arrays, self.of)]

    def undo(self, arrays: Arrays, shapes: Shapes, natural: Arrays | None) -> list[Array]:
        parts: list[Array] = []
        for array, run in zip(arrays, self.runs(shapes, self.of), strict=True):
            at = self.axis(self.at, len(run[0]))
            parts += np.split(array, np.cumsum([shape[at] for shape in run[:-1]]), at)
        return parts

    def _joined(self, shapes: Sequence[Shape]) -> Shape:
        at = self.axis(self.at, len(shapes[0]))
        others = {shape[:at] + shape[at + 1 :] for shape in shapes}
        if len({len(shape) for shape in shapes}) > 1 or len(others) > 1:
            raise self.refuse(f"shapes {_listed(shapes)} differ in more than axis {self.at}")
        return (*shapes[0][:at], sum(shape[at] for shape in shapes), *shapes[0][at + 1 :])


@dataclass(frozen=True)
class Split(Step):
    """Part one tensor along an axis, into equal parts or parts of given sizes."""

    name = "split"
    usage = "split AXIS PARTS"
    at: int
    parts: int | tuple[int, ...]

    @classmethod
    def from_words(cls, axis: str, parts: str) -> Step:  # type: ignore[override]  # its words are known
        sizes = tuple(int(part) for part in parts.split(","))
        return cls(int(axis), sizes if len(sizes) > 1 else sizes[0])

    @property
    def text(self) -> str:
        parts = self.parts if isinstance(self.parts, int) else ",".join(map(str, self.parts))
        return f"split {self.at} {parts}"

    def shapes(self, shapes: Shapes) -> Shapes:
        (shape,) = self.only(shapes)
        at = self.axis(self.at, len(shape))
        sizes = self._sizes(shape[at])
        return tuple((*shape[:at], size, *shape[at + 1 :]) for size in sizes)

    def apply(self, arrays: Arrays) -> list[Array]:
        sizes = self._sizes(arrays[0].shape[self.at])
        return np.split(arrays[0], np.cumsum(sizes[:-1]), self.at)

    def undo(self, arrays: Arrays, shapes: Shapes, natural: Arrays | None) -> list[Array]:
        return [np.concatenate(arrays, self.at)]

    def _sizes(self, whole: int) -> tuple[int, ...]:
        if isinstance(self.parts, tuple):
            if min(self.parts) < 1:
                raise self.refuse(f"found a part of {min(self.parts)}, expected 1 or more")
            if sum(self.parts) != whole:
                raise self.refuse(f"axis {self.at} has {whole} elements, the parts {sum(self.parts)}")
            return self.parts
        if self.parts < 1 or whole % self.parts:
            raise self.refuse(f"axis {self.at} has {whole} elements, expected a multiple of {self.parts}")
        return (whole // self.parts,) * self.parts


@dataclass(frozen=True)
class Stack(Step):
    """Put equal tensors on top of each other, along a new axis."""

    name = "stack"
    usage = "stack AXIS"
    at: int

    def shapes(self, shapes: Shapes) -> Shapes:
        if len(set(shapes)) > 1:
            raise self.refuse(f"shapes {_listed(shapes)} are not equal")
        at = self.axis(self.at, len(shapes[0]) + 1, of=1)
        return ((*shapes[0][:at], len(shapes), *shapes[0][at:]),)

    def apply(self, arrays: Arrays) -> list[Array]:
        return [np.stack(arrays, self.at)]

    def undo(self, arrays: Arrays, shapes: Shapes, natural: Arrays | None) -> list[Array]:
        return list(np.moveaxis(arrays[0], self.at, 0))


@dataclass(frozen=True)
class Unstack(Step):
    """Part one tensor into those that an axis counts, which goes."""

    name = "unstack"
    usage = "unstack AXIS"
    at: int

    def shapes(self, shapes: Shapes) -> Shapes:
        (shape,) = self.only(shapes)
        at = self.axis(self.at, len(shape))
        if not shape[at]:
            raise self.refuse(f"axis {self.at} has no elements")
        return (shape[:at] + shape[at + 1 :],) * shape[at]

    def apply(self, arrays: Arrays) -> list[Array]:
        return list(np.moveaxis(arrays[0], self.at, 0))

    def undo(self, arrays: Arrays, shapes: Shapes, natural: Arrays | None) -> list[Array]:
        return [np.stack(arrays, self.at)]


@dataclass(frozen=True)
class Sum(Step):
    """Add tensors element by element: partial sums of ranks, a residual that is kept apart."""

    name = "sum"
    usage = "sum of=COUNT"
    is_arithmetic = True
    of: int | None = None

    def shapes(self, shapes: Shapes) -> Shapes:
        runs = self.runs(shapes, self.of)
        for run in runs:
            if len(set(run)) > 1:
                raise self.refuse(f"shapes {_listed(run)} are not equal")
        return tuple(run[0] for run in runs)

    def apply(self, arrays: Arrays) -> list[Array]:
        return [self._added(run) for run in self.runs(arrays, self.of)]

    def undo(self, arrays: Arrays, shapes: Shapes, natural: Arrays | None) -> list[Array]:
        raise self.refuse("cannot be undone: what each tensor added is lost")

    def _added(self, arrays: Arrays) -> Array:
        kinds = np.result_type(np.float64, *arrays)  # float64, or complex128
        total = arrays[0].astype(kinds)
        for array in arrays[1:]:
            total += array
        return total


@dataclass(frozen=True)
class TakeRank(Step):
    """Take one of several tensors."""

    name = "take_rank"
    usage = "take_rank RANK"
    rank: int

    def shapes(self, shapes: Shapes) -> Shapes:
        if not 0 <= self.rank < len(shapes):
            raise self.refuse(f"there are {len(shapes)} tensors, numbered from 0")
        return (shapes[self.rank],)

    def apply(self, arrays: Arrays) -> list[Array]:
        return [arrays[self.rank]]

    def undo(self, arrays: Arrays, shapes: Shapes, natural: Arrays | None) -> list[Array]:
        if natural is None:
            raise self.refuse("cannot be undone: it leaves tensors out")
        return [arrays[0] if i == self.rank else other for i, other in enumerate(natural)]


@dataclass(frozen=True)
class Dereplicate(Step):
    """Keep one of each run of copies, as of KV heads that several ranks hold."""

    name = "dereplicate"
    usage = "dereplicate COPIES"
    copies: int

    def shapes(self, shapes: Shapes) -> Shapes:
        self.runs(shapes, self.copies)
        for i, shape in enumerate(shapes):
            first = i - i % self.copies
            if shape != shapes[first]:
                raise self.refuse(f"tensors {first} and {i} are no copies: {_listed((shapes[first], shape))}")
        return shapes[:: self.copies]

    def apply(self, arrays: Arrays) -> list[Array]:
        for i, array in enumerate(arrays):
            first = i - i % self.copies
            count = 0 if i == first else unlike(arrays[first], array)
            if count:
                raise self.refuse(
                    f"tensors {first} and {i} are no copies: {count} of {array.size} elements "
                    f"{conjugated(count, 'differ')}",
                    "Compare one of them with take_rank.",
                )
        return list(arrays[:: self.copies])

    def undo(self, arrays: Arrays, shapes: Shapes, natural: Arrays | None) -> list[Array]:
        return [array for array in arrays for _ in range(self.copies)]


MULTI_TENSOR_STEPS: Final[tuple[type[Step], ...]] = (
    Concat,
    Dereplicate,
    Split,
    Stack,
    Sum,
    TakeRank,
    Unstack,
)


def _listed(shapes: Sequence[Shape]) -> str:
    return " and ".join(str(list(shape)) for shape in shapes[:4])
