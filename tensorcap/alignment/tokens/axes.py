"""Where a tensor has the tokens of a step: which of its axes count them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from tensorcap.alignment.layout import Dims, Shape, token_dims
from tensorcap.alignment.tokens.sequences import Tokens
from tensorcap_formats.dtypes import Array

Axes = tuple[int, ...]  # batch and position, or the one that counts all tokens

_PACKED: Final = Dims.parse("t")


@dataclass(frozen=True, slots=True)
class TokenAxes:
    """Where a tensor has tokens.

    Attributes:
        grid: Rows and positions of the step, or the number of its tokens.
        axes: The axes that count them.
        cells: Which tokens of the step they are, in order.
        is_last: Whether they are the last one of each sequence only.
        is_shared: Whether the tensor has one row, which all rows share.
    """

    grid: Shape
    axes: Axes
    cells: Array
    is_last: bool = False
    is_shared: bool = False

    def rows(self, array: Array) -> Array:
        """The tensor with its tokens along the first axis."""
        front = np.moveaxis(array, self.axes, range(len(self.axes)))
        if self.is_shared:
            front = np.broadcast_to(front, (self.grid[0], *front.shape[1:]))
        rows: Array = front.reshape(len(self.cells), *front.shape[len(self.axes) :])
        return rows

    def rest(self, shape: Shape) -> Shape:
        """The shape of one token."""
        return tuple(size for axis, size in enumerate(shape) if axis not in self.axes)

    def place(self, row: int) -> str:
        """Which token one along the first axis is."""
        at = [int(i) for i in np.unravel_index(self.cells[row], self.grid)]
        return f"token {at[0]}" if len(at) == 1 else f"row {at[0]}, position {at[1]}"


def find_token_axes(
    tokens: Tokens, step: int, shape: Shape, dims: Dims | None, *, is_last: bool
) -> list[TokenAxes]:
    """Find all ways to read a tensor as one that has tokens; none if it has none.

    Args:
        tokens: The tokens of the run.
        step: The tensor's step.
        shape: Its shape.
        dims: Names of its axes, of which `b` and `s`, or `t`, count tokens; found by size if None.
        is_last: Whether it may have the last token of each sequence only.
    """
    grid = tokens.grids[step]
    cells = np.arange(math.prod(grid))
    if dims is not None and len(grid) == 1:
        dims = token_dims(_PACKED, dims)
    options = []
    for axes in _axes(shape, grid, dims):
        sizes = tuple(shape[axis] for axis in axes)
        if sizes == grid[-len(axes) :] or sizes == (len(cells),):
            options.append(TokenAxes(grid, axes, cells))
        elif sizes == (1, *grid[1:]) and len(grid) == 2:
            options.append(TokenAxes(grid, axes, cells, is_shared=True))
    if options or not (is_last or step in tokens.last_only):
        return options
    last = tokens.last_cells(step)
    axes = _last_axes(shape, dims)
    sizes = tuple(shape[axis] for axis in axes)
    return [TokenAxes(grid, axes, last, is_last=True)] if sizes in ((len(last),), (len(last), 1)) else []


def _axes(shape: Shape, grid: Shape, dims: Dims | None) -> list[Axes]:
    """Axes that may be those of tokens, by name or by where they stand; their sizes are not looked at."""
    if dims is not None:
        named = [[dims.at(name, len(shape)) for name in names] for names in ("bs", "t")]
        return [tuple(axis for axis in axes if axis is not None) for axes in named if None not in axes]
    pairs: list[Axes] = [(0, axis) for axis in range(1, len(shape))] if len(grid) == 2 else []
    fitting = [axes for axes in pairs if shape[0] in (grid[0], 1) and shape[axes[1]] == grid[1]]
    return fitting or ([(0,)] if shape else [])


def _last_axes(shape: Shape, dims: Dims | None) -> Axes:
    """Axes of a tensor that has the last tokens only."""
    if dims is None:
        return (0, 1) if len(shape) > 1 and shape[1] == 1 else (0,) if shape else ()
    named = (dims.at("b", len(shape)), dims.at("s", len(shape)))
    return tuple(axis for axis in named if axis is not None)
