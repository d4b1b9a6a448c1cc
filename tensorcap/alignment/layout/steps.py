"""Layout steps: named, parameterised operations from one side's tensors to the other's layout.

A step takes a list of tensors and gives a list. Its shapes are checked without data; it works on views if a
view will do; if nothing is lost it can be undone. Most steps move stored elements and never look at them, so
they serve every dtype. Here are the steps that treat each tensor by itself, `multi_tensor_steps` has the
rest.

To add a step, write its class and list it in `STEPS` (or `MULTI_TENSOR_STEPS`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, ClassVar, Final, TypeVar

import numpy as np

from tensorcap.alignment.layout.axis_patterns import Pattern, Shape
from tensorcap.wording import conjugated
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import UsageError

Shapes = tuple[Shape, ...]
Arrays = Sequence[Array]
Item = TypeVar("Item", Shape, Array)


class Step:
    """One step; `layout.parse_step` reads its `text` back. Subclasses are dataclasses of its arguments.

    Attributes:
        name: Its name in texts.
        usage: Its name and arguments, for messages.
        is_arithmetic: Whether it computes with values, so that it needs them decoded.
    """

    name: ClassVar[str]
    usage: ClassVar[str]
    is_arithmetic: ClassVar[bool] = False

    @classmethod
    def from_words(cls, *words: str, **named: str) -> Step:
        """Make the step of the words behind its name; by default whole numbers, the fields of the class.

        Raises:
            TypeError: There are too few words, or too many.
            ValueError: A word is no number.
            UsageError: A number makes no sense.
        """
        arguments: tuple[Field[Any], ...] = fields(cls)  # type: ignore[arg-type]  # all subclasses are
        if len(words) != sum(argument.default is MISSING for argument in arguments):
            raise TypeError
        return cls(*map(int, words), **{name: int(word) for name, word in named.items()})

    @property
    def moves(self) -> bool:
        """Whether elements may change their order, or get lost, so that more than the shape is another."""
        return True

    @property
    def text(self) -> str:
        """The step as `layout.parse_step` reads it; by default its name and fields, optional ones named."""
        arguments: tuple[Field[Any], ...] = fields(self)  # type: ignore[arg-type]  # all subclasses are
        words = [self.name]
        for argument in arguments:
            value = getattr(self, argument.name)
            if argument.default is MISSING:
                words.append(str(value))
            elif value != argument.default:
                words.append(f"{argument.name}={value}")
        return " ".join(words)

    def shapes(self, shapes: Shapes) -> Shapes:
        """The shapes after the step.

        Raises:
            UsageError: The step does not fit tensors of these shapes.
        """
        raise NotImplementedError

    def apply(self, arrays: Arrays) -> list[Array]:
        """The tensors after the step, whose shapes have been checked.

        Raises:
            UsageError: The values are not as the step says (copies that are not equal).
        """
        raise NotImplementedError

    def undo(self, arrays: Arrays, shapes: Shapes, natural: Arrays | None) -> list[Array]:
        """The tensors before the step, of these shapes.

        Args:
            arrays: The tensors after the step.
            shapes: The shapes before it.
            natural: Tensors of these shapes, for the elements that the step leaves out.

        Raises:
            UsageError: The step lost what would be needed.
        """
        raise NotImplementedError

    def refuse(self, reason: str, hint: str | None = None) -> UsageError:
        """The error that says why this step cannot be done."""
        return UsageError(f"step {self.text!r}: {reason}", hint=hint)

    def only(self, shapes: Shapes) -> Shapes:
        """The shapes of a step that takes one tensor.

        Raises:
            UsageError: There are more, or none.
        """
        if len(shapes) != 1:
            raise self.refuse(f"found {len(shapes)} tensors, expected one")
        return shapes

    def runs(self, items: Sequence[Item], of: int | None) -> list[Sequence[Item]]:
        """Split items into runs of `of`; one run of all of them if it is None.

        Raises:
            UsageError: Some are left.
        """
        count = len(items) if of is None else of
        if count < 1 or len(items) % count:
            raise self.refuse(f"there are {len(items)} tensors, expected a multiple of {count}")
        return [items[start : start + count] for start in range(0, len(items), count)]

    def axis(self, axis: int, ndim: int, *, of: int = 0) -> int:
        """An axis counted from the front.

        Args:
            axis: As it was given, negative from the end.
            ndim: How many axes there are.
            of: How many more than those of the tensors that come in.
        """
        if not -ndim <= axis < ndim:
            raise self.refuse(f"there is no axis {axis}, the tensor has {ndim - of}")
        return axis % ndim


class EachStep(Step):
    """A step that takes every tensor for itself."""

    def shapes(self, shapes: Shapes) -> Shapes:
        return tuple(self.shape(shape) for shape in shapes)

    def apply(self, arrays: Arrays) -> list[Array]:
        return [self.one(array) for array in arrays]

    def undo(self, arrays: Arrays, shapes: Shapes, natural: Arrays | None) -> list[Array]:
        whole: Sequence[Array | None] = natural or [None] * len(arrays)
        return [self.undo_one(*each) for each in zip(arrays, shapes, whole, strict=True)]

    def shape(self, shape: Shape) -> Shape:
        """The shape of one tensor after the step."""
        raise NotImplementedError

    def one(self, array: Array) -> Array:
        """One tensor after the step."""
        raise NotImplementedError

    def undo_one(self, array: Array, shape: Shape, natural: Array | None) -> Array:
        """One tensor before the step."""
        raise NotImplementedError


@dataclass(frozen=True)
class Rearrange(EachStep):
    """Rearrange axes by a pattern in the notation of einops."""

    name = "rearrange"
    usage = 'rearrange "AXES -> AXES" NAME=SIZE'
    pattern: Pattern

    @classmethod
    def from_words(cls, pattern: str, **sizes: str) -> Step:  # type: ignore[override]  # its words are known
        return cls(Pattern.parse(pattern, {name: int(size) for name, size in sizes.items()}))

    @property
    def moves(self) -> bool:
        left, right = (
            [n for group in side for n in group] for side in (self.pattern.left, self.pattern.right)
        )
        return left != right

    @property
    def text(self) -> str:
        sizes = "".join(f" {name}={size}" for name, size in self.pattern.sizes.items())
        return f'rearrange "{self.pattern.text}"{sizes}'

    def shape(self, shape: Shape) -> Shape:
        return self.pattern.shape(shape)

    def one(self, array: Array) -> Array:
        return _rearranged(array, self.pattern)

    def undo_one(self, array: Array, shape: Shape, natural: Array | None) -> Array:
        return _rearranged(array, self.pattern.reversed(shape))


@dataclass(frozen=True)
class Flip(EachStep):
    """Reverse an axis: count it from its end."""

    name = "flip"
    usage = "flip AXIS"
    at: int

    def shape(self, shape: Shape) -> Shape:
        self.axis(self.at, len(shape))
        return shape

    def one(self, array: Array) -> Array:
        return np.flip(array, self.at)

    def undo_one(self, array: Array, shape: Shape, natural: Array | None) -> Array:
        return np.flip(array, self.at)


@dataclass(frozen=True)
class Transpose(EachStep):
    """Exchange two axes."""

    name = "transpose"
    usage = "transpose AXIS AXIS"
    first: int
    second: int

    def shape(self, shape: Shape) -> Shape:
        sizes = list(shape)
        a, b = (self.axis(axis, len(shape)) for axis in (self.first, self.second))
        sizes[a], sizes[b] = sizes[b], sizes[a]
        return tuple(sizes)

    def one(self, array: Array) -> Array:
        return array.swapaxes(self.first, self.second)

    def undo_one(self, array: Array, shape: Shape, natural: Array | None) -> Array:
        return self.one(array)


@dataclass(frozen=True)
class Squeeze(EachStep):
    """Leave out an axis of one element."""

    name = "squeeze"
    usage = "squeeze AXIS"
    moves = False
    at: int

    def shape(self, shape: Shape) -> Shape:
        at = self.axis(self.at, len(shape))
        if shape[at] != 1:
            raise self.refuse(f"axis {self.at} has {shape[at]} elements, expected 1")
        return shape[:at] + shape[at + 1 :]

    def one(self, array: Array) -> Array:
        return array.squeeze(self.at)

    def undo_one(self, array: Array, shape: Shape, natural: Array | None) -> Array:
        return array.reshape(shape)


@dataclass(frozen=True)
class Unsqueeze(EachStep):
    """Put in an axis of one element."""

    name = "unsqueeze"
    usage = "unsqueeze AXIS"
    moves = False
    at: int

    def shape(self, shape: Shape) -> Shape:
        at = self.axis(self.at, len(shape) + 1, of=1)
        return (*shape[:at], 1, *shape[at:])

    def one(self, array: Array) -> Array:
        return np.expand_dims(array, self.at)

    def undo_one(self, array: Array, shape: Shape, natural: Array | None) -> Array:
        return array.squeeze(self.at)


@dataclass(frozen=True)
class Slice(EachStep):
    """Keep a range of an axis."""

    name = "slice"
    usage = "slice AXIS START:STOP"
    at: int
    start: int | None = None
    stop: int | None = None

    @classmethod
    def from_words(cls, axis: str, ends: str) -> Step:  # type: ignore[override]  # its words are known
        start, stop = (int(end) if end else None for end in ends.split(":"))
        return cls(int(axis), start, stop)

    @property
    def text(self) -> str:
        ends = ["" if end is None else str(end) for end in (self.start, self.stop)]
        return f"slice {self.at} {':'.join(ends)}"

    def shape(self, shape: Shape) -> Shape:
        at = self.axis(self.at, len(shape))
        kept = len(range(*slice(self.start, self.stop).indices(shape[at])))
        if any(end is not None and not -shape[at] <= end <= shape[at] for end in (self.start, self.stop)):
            raise self.refuse(f"reaches outside axis {self.at}, which has {shape[at]} elements")
        if not kept and shape[at]:
            raise self.refuse(f"keeps nothing of axis {self.at}, which has {shape[at]} elements")
        return (*shape[:at], kept, *shape[at + 1 :])

    def one(self, array: Array) -> Array:
        return array[self._index(array.ndim)]

    def undo_one(self, array: Array, shape: Shape, natural: Array | None) -> Array:
        if array.shape == shape:
            return array
        if natural is None:
            raise self.refuse("cannot be undone: it leaves elements out")
        whole = natural.copy()
        whole[self._index(len(shape))] = array
        return whole

    def _index(self, ndim: int) -> tuple[slice, ...]:
        at = self.axis(self.at, ndim)
        return (*(slice(None),) * at, slice(self.start, self.stop))


class CutVocab(Slice):
    """Leave out what pads the vocabulary, the last axis."""

    name = "cut_vocab"
    usage = "cut_vocab SIZE"

    @classmethod
    def from_words(cls, size: str) -> Step:  # type: ignore[override]  # its words are known
        if int(size) < 1:
            raise UsageError(f"found a size of {size}, expected 1 or more")
        return cls(-1, None, int(size))

    @property
    def text(self) -> str:
        return f"cut_vocab {self.stop}"


@dataclass(frozen=True)
class Repeat(EachStep):
    """Let each element of an axis stand several times in succession, as KV heads do for their queries."""

    name = "repeat"
    usage = "repeat AXIS COPIES"
    at: int
    copies: int

    def __post_init__(self) -> None:
        if self.copies < 1:
            raise UsageError(f"found {self.copies} copies, expected 1 or more")

    def shape(self, shape: Shape) -> Shape:
        at = self.axis(self.at, len(shape))
        return (*shape[:at], shape[at] * self.copies, *shape[at + 1 :])

    def one(self, array: Array) -> Array:
        return array.repeat(self.copies, self.at)

    def undo_one(self, array: Array, shape: Shape, natural: Array | None) -> Array:
        return self._first(array)

    def _first(self, array: Array) -> Array:
        """Every first of the copies, which are equal bit for bit."""
        at = self.axis(self.at, array.ndim)
        apart = array.reshape((*array.shape[:at], -1, self.copies, *array.shape[at + 1 :]))
        first: Array = apart.take(0, at + 1)
        for i in range(1, self.copies):
            count = unlike(first, apart.take(i, at + 1))
            if count:
                raise self.refuse(
                    f"found no copies: {count} of {first.size} elements {conjugated(count, 'differ')}"
                )
        return first


class Unrepeat(Repeat):
    """Keep one of each run of equal elements of an axis."""

    name = "unrepeat"
    usage = "unrepeat AXIS COPIES"

    def shape(self, shape: Shape) -> Shape:
        at = self.axis(self.at, len(shape))
        if shape[at] % self.copies:
            raise self.refuse(
                f"axis {self.at} has {shape[at]} elements, expected a multiple of {self.copies}"
            )
        return (*shape[:at], shape[at] // self.copies, *shape[at + 1 :])

    def one(self, array: Array) -> Array:
        return self._first(array)

    def undo_one(self, array: Array, shape: Shape, natural: Array | None) -> Array:
        return array.repeat(self.copies, self.at)


@dataclass(frozen=True)
class Rope(EachStep):
    """Reorder the elements of each head between the two layouts of rotary embeddings.

    Halves: `x[i]` and `x[i + d/2]` are rotated together (GPT-NeoX, transformers). Interleaved: `x[2 i]` and
    `x[2 i + 1]` are (RoFormer, Llama's own code).

    Attributes:
        head: Elements of a head.
        rotary: How many of its first elements are rotated; all if None.
        at: The axis along which heads follow each other.
        to_halves: Which of the two layouts comes out.
    """

    to_halves: ClassVar[bool]
    head: int
    rotary: int | None = None
    at: int = -1

    @classmethod
    def from_words(cls, head: str, rotary: str | None = None, axis: str = "-1") -> Step:  # type: ignore[override]  # its words are known
        return cls(int(head), None if rotary is None else int(rotary), int(axis))

    @property
    def text(self) -> str:
        rotary = "" if self.rotary is None else f" rotary={self.rotary}"
        axis = "" if self.at == -1 else f" axis={self.at}"
        return f"{self.name} {self.head}{rotary}{axis}"

    def shape(self, shape: Shape) -> Shape:
        at = self.axis(self.at, len(shape))
        rotary = self.head if self.rotary is None else self.rotary
        if self.head < 2 or rotary % 2 or not 0 < rotary <= self.head:
            raise self.refuse(f"{rotary} of {self.head} elements, expected an even number within a head")
        if shape[at] % self.head:
            raise self.refuse(f"axis {self.at} has {shape[at]} elements, expected heads of {self.head}")
        return shape

    def one(self, array: Array) -> Array:
        return self._reordered(array, to_halves=self.to_halves)

    def undo_one(self, array: Array, shape: Shape, natural: Array | None) -> Array:
        return self._reordered(array, to_halves=not self.to_halves)

    def _reordered(self, array: Array, *, to_halves: bool) -> Array:
        rotary = self.head if self.rotary is None else self.rotary
        pairs = np.arange(rotary).reshape((-1, 2) if to_halves else (2, -1)).T.reshape(-1)
        order = np.concatenate([pairs, np.arange(rotary, self.head)])
        heads = array.shape[self.at] // self.head
        whole = (np.arange(heads)[:, None] * self.head + order).reshape(-1)
        reordered: Array = array.take(whole, axis=self.at)
        return reordered


class RopeHalves(Rope):
    """Reorder heads from interleaved pairs to halves."""

    name = "rope_halves"
    usage = "rope_halves HEAD rotary=SIZE axis=AXIS"
    to_halves = True


class RopeInterleaved(Rope):
    """Reorder heads from halves to interleaved pairs."""

    name = "rope_interleaved"
    usage = "rope_interleaved HEAD rotary=SIZE axis=AXIS"
    to_halves = False


STEPS: Final[tuple[type[Step], ...]] = (
    CutVocab,
    Flip,
    Rearrange,
    Repeat,
    RopeHalves,
    RopeInterleaved,
    Slice,
    Squeeze,
    Transpose,
    Unrepeat,
    Unsqueeze,
)


def _rearranged(array: Array, pattern: Pattern) -> Array:
    apart, order, shape = pattern.moves(array.shape)
    return array.reshape(apart).transpose(order).reshape(shape)


def unlike(one: Array, other: Array) -> int:
    """How many elements have not the same bits."""
    bits = [np.ascontiguousarray(array).view(np.uint8).reshape(array.size, -1) for array in (one, other)]
    return int((bits[0] != bits[1]).any(axis=1).sum()) if one.size else 0
