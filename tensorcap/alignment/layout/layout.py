"""A layout: the steps from one side's tensors to the other's, parsed, checked on shapes, done, undone."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from tensorcap.alignment.layout.multi_tensor_steps import MULTI_TENSOR_STEPS
from tensorcap.alignment.layout.steps import STEPS, Shapes, Step
from tensorcap_formats.dtypes import DTYPES, Array, DType, decode
from tensorcap_formats.errors import UsageError, abbreviate

_CALL: Final = re.compile(r"\s*(\w+)\((.*)\)\s*", re.DOTALL)

_CLASSES: Final = {
    step.name: step for step in sorted((*STEPS, *MULTI_TENSOR_STEPS), key=lambda step: step.name)
}

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
        dtypes = _each(dtype)
        for step in self.steps:
            dtypes = [_dtype_after(step, dtypes)]
        return dtypes[0]

    def apply(self, arrays: Sequence[Array], dtype: DTypeOrEach) -> tuple[list[Array], DType]:
        """The tensors that come out, and their dtype: behind a step that computes, float64 or complex128.

        Args:
            arrays: Stored elements of the tensors.
            dtype: Their logical dtype, or that of each.

        Raises:
            UsageError: A step does not fit the shapes, the dtypes, or the values.
        """
        self.shapes([array.shape for array in arrays])
        results, dtypes = list(arrays), _each(dtype)
        for step in self.steps:
            after = _dtype_after(step, dtypes)
            if step.is_arithmetic:
                each = dtypes * len(results) if len(dtypes) == 1 else dtypes
                results = [decode(array, own) for array, own in zip(results, each, strict=True)]
            results, dtypes = step.apply(results), [after]
        return results, dtypes[0]

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
            shapes_after, expected = [list(a.shape) for a in arrays], [list(s) for s in before[-1]]
            raise UsageError(f"layout: found shapes {shapes_after}, expected {expected}")
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
        each_shapes: list[Shapes] = [tuple(map(tuple, shapes))]
        if not each_shapes[0]:
            raise UsageError("layout: there are no tensors")
        for step in self.steps:
            each_shapes.append(step.shapes(each_shapes[-1]))
        return each_shapes

    def _each_natural(self, natural: Sequence[Array] | None) -> list[list[Array] | None]:
        """The natural tensors before each step."""
        if natural is None:
            return [None] * len(self.steps)
        each_natural = [list(natural)]
        for step in self.steps[:-1]:
            each_natural.append(step.apply(each_natural[-1]))
        return [*each_natural]


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
    if name not in _CLASSES:
        close = difflib.get_close_matches(name, _CLASSES, n=3)
        known = f"Known are {', '.join(_CLASSES)}."
        hint = f"Did you mean {' or '.join(map(repr, close))}?" if close else known
        raise UsageError(f"step {abbreviate(text)!r}: is unknown", hint=hint)
    step = _CLASSES[name]
    plain = [word for word in words if "=" not in word]
    named = dict(word.split("=", 1) for word in words if "=" in word)
    if len(plain) + len(named) < len(words):
        raise UsageError(f"step {abbreviate(text)!r}: says one argument twice, expected '{step.usage}'")
    try:
        return step.from_words(*plain, **named)
    except UsageError as error:
        raise UsageError(f"step {abbreviate(text)!r}: {error}", hint=error.hint) from None
    except (TypeError, ValueError):
        raise UsageError(f"step {abbreviate(text)!r}: expected '{step.usage}'") from None


def _words(text: str) -> list[str]:
    """A step's name and arguments, from `squeeze 0` or `squeeze(0)`."""
    called = _CALL.fullmatch(text)
    if called is None:
        return shlex.split(text)
    reader = shlex.shlex(called[2], posix=True)
    reader.whitespace, reader.whitespace_split, reader.commenters = ", \t\n", True, ""
    return [called[1], *reader]
