"""A layout: the steps from one side's tensors to the other's, parsed, checked on shapes, done, undone."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from tensorcap.alignment.layout.multi_tensor_steps import (
    Concat,
    Dereplicate,
    Split,
    Stack,
    Sum,
    TakeRank,
    Unstack,
)
from tensorcap.alignment.layout.patterns import Pattern
from tensorcap.alignment.layout.steps import (
    CutVocab,
    Flip,
    Rearrange,
    Repeat,
    Rope,
    Shapes,
    Slice,
    Squeeze,
    Step,
    Transpose,
    Unrepeat,
    Unsqueeze,
)
from tensorcap_formats.dtypes import DTYPES, Array, DType, decode
from tensorcap_formats.errors import UsageError, abbreviate

_CALL: Final = re.compile(r"\s*(\w+)\((.*)\)\s*", re.DOTALL)

DTypeOrEach = DType | Sequence[DType]  # of all tensors, or of each


@dataclass(frozen=True, slots=True)
class Layout:
    """Steps that are done one after the other.

    Example:
        >>> layout = Layout.parse(["split -1 4,2,2", "concat -1", 'rearrange "b (h d) -> b h d" d=2'])
        >>> layout.shapes([(3, 8)])
        ((3, 4, 2),)
    """

    steps: tuple[Step, ...] = ()

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Layout:
        """Read steps as `texts` writes them.

        Raises:
            UsageError: A step is unknown, or its arguments make no sense.
        """
        return cls(tuple(map(parse_step, texts)))

    @property
    def texts(self) -> tuple[str, ...]:
        """The steps as texts."""
        return tuple(step.text for step in self.steps)

    @property
    def moves(self) -> bool:
        """Whether it does more than to give the same elements, in the same order, another shape."""
        return any(step.moves for step in self.steps)

    def shapes(self, shapes: Iterable[Sequence[int]]) -> Shapes:
        """The shapes that come out; no data is read.

        Raises:
            UsageError: A step does not fit.
        """
        return self._each(shapes)[-1]

    def dtype(self, dtype: DTypeOrEach) -> DType:
        """The dtype of what comes out, for tensors of this dtype, or of these.

        Raises:
            UsageError: A step does not take tensors of such dtypes.
        """
        found = _each(dtype)
        for step in self.steps:
            found = [_dtype_after(step, found)]
        return found[0]

    def apply(self, arrays: Sequence[Array], dtype: DTypeOrEach) -> tuple[list[Array], DType]:
        """The tensors that come out, and their dtype: behind a step that computes, float64 or complex128.

        Args:
            arrays: Stored elements of the tensors.
            dtype: Their logical dtype, or that of each.

        Raises:
            UsageError: A step does not fit the shapes, the dtypes, or the values.
        """
        self.shapes([array.shape for array in arrays])
        found, dtypes = list(arrays), _each(dtype)
        for step in self.steps:
            after = _dtype_after(step, dtypes)
            if step.is_arithmetic:
                each = dtypes * len(found) if len(dtypes) == 1 else dtypes
                found = [decode(array, own) for array, own in zip(found, each, strict=True)]
            found, dtypes = step.apply(found), [after]
        return found, dtypes[0]

    def undo(
        self, arrays: Sequence[Array], shapes: Iterable[Sequence[int]], natural: Sequence[Array] | None = None
    ) -> list[Array]:
        """The tensors that `apply` would make these of.

        Args:
            arrays: Stored elements of what comes out.
            shapes: The shapes of what goes in.
            natural: Tensors of these shapes; elements that the steps leave out are taken from them.

        Raises:
            UsageError: A step cannot be undone, or the arrays have not the shapes that come out.
        """
        before = self._each(shapes)
        if tuple(array.shape for array in arrays) != before[-1]:
            found, expected = ([list(s) for s in some] for some in ((a.shape for a in arrays), before[-1]))
            raise UsageError(f"layout: found shapes {found}, expected {expected}")
        for array, shape in zip(natural or (), before[0], strict=bool(natural)):
            if array.shape != shape or array.dtype != arrays[0].dtype:
                raise UsageError(
                    f"layout: found a natural tensor {list(array.shape)} of {array.dtype}, "
                    f"expected {list(shape)} of {arrays[0].dtype}"
                )
        filled = self._each_natural(natural)
        result = list(arrays)
        for step, inner, rest in zip(reversed(self.steps), before[-2::-1], filled[::-1], strict=True):
            result = step.undo(result, inner, rest)
        return [np.ascontiguousarray(array) for array in result]

    def _each(self, shapes: Iterable[Sequence[int]]) -> list[Shapes]:
        """The shapes before each step, and after the last."""
        found: list[Shapes] = [tuple(map(tuple, shapes))]
        if not found[0]:
            raise UsageError("layout: there are no tensors")
        for step in self.steps:
            found.append(step.shapes(found[-1]))
        return found

    def _each_natural(self, natural: Sequence[Array] | None) -> list[list[Array] | None]:
        """The natural tensors before each step."""
        if natural is None:
            return [None] * len(self.steps)
        found = [list(natural)]
        for step in self.steps[:-1]:
            found.append(step.apply(found[-1]))
        return [*found]


def _each(dtype: DTypeOrEach) -> list[DType]:
    return [dtype] if isinstance(dtype, DType) else list(dtype)


def _dtype_after(step: Step, dtypes: Sequence[DType]) -> DType:
    """The dtype of what a step gives.

    Raises:
        UsageError: It does not take tensors of such dtypes.
    """
    for dtype in dtypes:
        if dtype.packed > 1:
            raise step.refuse(f"elements of {dtype.name} are packed, two in a byte")
        if step.is_arithmetic and not dtype.is_inexact:
            raise step.refuse(f"found tensors of {dtype.name}, expected floats")
    if step.is_arithmetic:
        return DTYPES["complex128" if any(dtype.kind == "complex" for dtype in dtypes) else "float64"]
    names = list(dict.fromkeys(dtype.name for dtype in dtypes))
    if len(names) > 1:
        raise step.refuse(f"found tensors of {' and '.join(names)}, expected one dtype")
    return dtypes[0]


@lru_cache(maxsize=4096)
def parse_step(text: str) -> Step:
    """Read one step.

    Raises:
        UsageError: It is unknown, or its arguments make no sense.

    Example:
        >>> parse_step("slice 1 -1:").shapes(((2, 5, 8),))
        ((2, 1, 8),)
        >>> parse_step("slice(1, -1:)").text
        'slice 1 -1:'
    """
    try:
        name, *words = _words(text)
    except ValueError as error:
        reason = "nothing" if not text.strip() else str(error)
        raise UsageError(f"step {abbreviate(text)!r}: {reason}, expected a name and arguments") from None
    if name not in _STEPS:
        close = difflib.get_close_matches(name, _STEPS, n=3)
        known = f"Known are {', '.join(_STEPS)}."
        hint = f"Did you mean {' or '.join(map(repr, close))}?" if close else known
        raise UsageError(f"step {abbreviate(text)!r}: is unknown", hint=hint)
    usage, make = _STEPS[name]
    plain = [word for word in words if "=" not in word]
    named = dict(word.split("=", 1) for word in words if "=" in word)
    if len(plain) + len(named) < len(words):
        raise UsageError(f"step {abbreviate(text)!r}: says one argument twice, expected '{usage}'")
    try:
        return make(*plain, **named)
    except UsageError as error:
        raise UsageError(f"step {abbreviate(text)!r}: {error}", hint=error.hint) from None
    except (TypeError, ValueError):
        raise UsageError(f"step {abbreviate(text)!r}: expected '{usage}'") from None


def _words(text: str) -> list[str]:
    """A step's name and arguments, from `squeeze 0` or `squeeze(0)`."""
    called = _CALL.fullmatch(text)
    if called is None:
        return shlex.split(text)
    reader = shlex.shlex(called[2], posix=True)
    reader.whitespace, reader.whitespace_split, reader.commenters = ", \t\n", True, ""
    return [called[1], *reader]


def _rearrange(pattern: str, **sizes: str) -> Step:
    return Rearrange(Pattern.parse(pattern, {name: int(size) for name, size in sizes.items()}))


def _slice(axis: str, ends: str) -> Step:
    start, stop = (int(end) if end else None for end in ends.split(":"))
    return Slice(int(axis), start, stop)


def _split(axis: str, parts: str) -> Step:
    sizes = tuple(int(part) for part in parts.split(","))
    return Split(int(axis), sizes if len(sizes) > 1 else sizes[0])


def _rope(*, to_halves: bool) -> Callable[..., Step]:
    def make(head: str, rotary: str | None = None, axis: str = "-1") -> Step:
        return Rope(int(head), None if rotary is None else int(rotary), int(axis), to_halves)

    return make


def _of(step: Callable[..., Step], count: int) -> Callable[..., Step]:
    """A maker of steps whose arguments are so many whole numbers."""

    def make(*numbers: str, **named: str) -> Step:
        if len(numbers) != count:
            raise TypeError
        return step(*map(int, numbers), **{name: int(number) for name, number in named.items()})

    return make


_STEPS: Final[dict[str, tuple[str, Callable[..., Step]]]] = {  # usage, maker
    "concat": ("concat AXIS of=COUNT", _of(Concat, 1)),
    "cut_vocab": ("cut_vocab SIZE", _of(CutVocab, 1)),
    "dereplicate": ("dereplicate COPIES", _of(Dereplicate, 1)),
    "flip": ("flip AXIS", _of(Flip, 1)),
    "rearrange": ('rearrange "AXES -> AXES" NAME=SIZE', _rearrange),
    "repeat": ("repeat AXIS COPIES", _of(Repeat, 2)),
    "rope_halves": ("rope_halves HEAD rotary=SIZE axis=AXIS", _rope(to_halves=True)),
    "rope_interleaved": ("rope_interleaved HEAD rotary=SIZE axis=AXIS", _rope(to_halves=False)),
    "slice": ("slice AXIS START:STOP", _slice),
    "split": ("split AXIS PARTS", _split),
    "squeeze": ("squeeze AXIS", _of(Squeeze, 1)),
    "stack": ("stack AXIS", _of(Stack, 1)),
    "sum": ("sum of=COUNT", _of(Sum, 0)),
    "take_rank": ("take_rank RANK", _of(TakeRank, 1)),
    "transpose": ("transpose AXIS AXIS", _of(Transpose, 2)),
    "unrepeat": ("unrepeat AXIS COPIES", _of(Unrepeat, 2)),
    "unsqueeze": ("unsqueeze AXIS", _of(Unsqueeze, 1)),
    "unstack": ("unstack AXIS", _of(Unstack, 1)),
}
