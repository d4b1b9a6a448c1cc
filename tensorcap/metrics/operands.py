"""A pair of tensors to measure: dtypes, shape, tolerance, and how its elements form rows and blocks."""

from __future__ import annotations

import math
from typing import Final

from tensorcap.metrics.difference import Tolerance
from tensorcap.metrics.kernel_state import BLOCK
from tensorcap_formats.dtypes import DType
from tensorcap_formats.float_formats import FLOAT_FORMATS, FloatFormat
from tensorcap_formats.light_dataclass import light_dataclass

_LEAST_ROW: Final = 64  # values in a row (MET-10)


@light_dataclass(frozen=True, slots=True)
class Operands:
    """Two tensors of one shape.

    Attributes:
        reference: Dtype of the trusted side.
        target: Dtype of the side under test; packs as many values into a stored element.
        stored_shape: Shape of both, in stored elements.
        tolerance: The error that is allowed, or None.
    """

    reference: DType
    target: DType
    stored_shape: tuple[int, ...]
    tolerance: Tolerance | None = None

    @property
    def is_exact(self) -> bool:
        """Whether both sides are integers or bools, so that errors are integers."""
        return not (self.reference.is_inexact or self.target.is_inexact)

    @property
    def is_complex(self) -> bool:
        """Whether one of the sides is complex."""
        return "complex" in (self.reference.kind, self.target.kind)

    @property
    def format(self) -> FloatFormat | None:
        """The format in which distances are counted: the target's; None if they are undefined (MET-27)."""
        is_real = self.reference.kind != "complex" and self.reference.packed == 1
        form = FLOAT_FORMATS.get(self.target.name)
        return form if is_real and form is not None and form.is_signed else None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in values."""
        shape, packed = self.stored_shape, self.reference.packed
        return (*shape[:-1], (shape or (1,))[-1] * packed) if packed > 1 else shape

    @property
    def size(self) -> int:
        """Number of values on each side."""
        return math.prod(self.shape)

    @property
    def row(self) -> int:
        """Values in a row (MET-10), before it is cut into blocks; at least 1.

        Example:
            >>> from tensorcap_formats.dtypes import dtype
            >>> float32 = dtype("float32")
            >>> [Operands(float32, float32, shape).row for shape in ((5, 4096), (5, 6, 7, 8), (3, 3), ())]
            [4096, 336, 9, 1]
        """
        row = 1
        for size in reversed(self.shape):
            row *= size
            if row >= _LEAST_ROW:
                break
        return max(row, 1)

    def cut(self, start: int, limit: int, unit: int = BLOCK) -> int:
        """Find where to stop reading: the last end of a block that is at most `limit` values from `start`.

        Blocks are whole rows as far as they fit into `unit`, or, of longer rows, pieces of `unit`; sums are
        bit-equal however a tensor is read, as long as it is read in whole blocks.

        Args:
            start: Number of a value that begins a block.
            limit: At least `unit`.
            unit: Values in a block at most.
        """
        row, end = self.row, start + limit
        if end >= self.size:
            return self.size
        if row <= unit:
            return start + limit // (unit // row * row) * (unit // row * row)
        return end - end % row % unit
