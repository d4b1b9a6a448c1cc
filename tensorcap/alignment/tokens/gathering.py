"""Tensors reduced to the tokens that both sides have, one after the other along their first axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tensorcap.alignment.layout import Dims, Shape
from tensorcap.alignment.tokens.axes import Axes, TokenAxes, find_token_axes
from tensorcap.alignment.tokens.token_pairs import TokenAlignment
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import UsageError


@dataclass(frozen=True, slots=True)
class Gather:
    """What of a tensor of the reference, and of the target's tensors, is the same tokens.

    Attributes:
        reference: Where the reference's tensor has tokens.
        target: Where the target's tensors have, one for each of its steps.
        reference_rows: Which of the reference's tokens count, in order.
        target_rows: Which of the target's they are, all its tensors one after the other.
        steps: The target's steps.
    """

    reference: TokenAxes
    target: tuple[TokenAxes, ...]
    reference_rows: Array
    target_rows: Array
    steps: tuple[int, ...]

    def is_same(self, step: int) -> bool:
        """Whether nothing changes: all tokens of a step of both sides, and in the same places."""
        return (
            self._has_all
            and self.steps == (step,)
            and self.target[0].axes == self.reference.axes
            and self.target[0].is_shared == self.reference.is_shared
            and np.array_equal(self.target_rows, np.arange(len(self.target[0].cells)))
        )

    @property
    def is_in_place(self) -> bool:
        """Whether the tokens that count lie in one step of the target, in the same places."""
        ours, theirs = self.reference, self.target[0]
        return (
            len(self.target) == 1
            and ours.grid == theirs.grid
            and np.array_equal(ours.cells[self.reference_rows], theirs.cells[self.target_rows])
        )

    @property
    def is_whole(self) -> bool:
        """Whether all tokens of the reference's tensor count, so that it stays as it is."""
        return self._has_all and not self.reference.is_shared

    def shape(self, whole: Shape) -> Shape:
        """The shape of what counts, on both sides, where the reference's tensor has this one."""
        return whole if self.is_whole else (len(self.reference_rows), *self.reference.rest(whole))

    def of_reference(self, array: Array) -> Array:
        """What counts of the reference's tensor."""
        return array if self.is_whole else self.reference.rows(array)[self.reference_rows]

    def of_target(self, arrays: Sequence[Array], whole: Shape) -> Array:
        """What counts of the target's tensors, in the layout of the reference's."""
        parts = [axes.rows(array) for axes, array in zip(self.target, arrays, strict=True)]
        rows: Array = (np.concatenate(parts) if len(parts) > 1 else parts[0])[self.target_rows]
        if not self.is_whole:
            return rows
        axes = self.reference.axes
        front = rows.reshape(*(whole[axis] for axis in axes), *rows.shape[1:])
        return np.moveaxis(front, range(len(axes)), axes)

    def where(self, row: int) -> str:
        """Which token a row is."""
        ours = self.reference.place(int(self.reference_rows[row]))
        at = int(self.target_rows[row])
        ends = np.cumsum([len(axes.cells) for axes in self.target])
        number = int(np.searchsorted(ends, at, side="right"))
        theirs = self.target[number].place(at - int(ends[number - 1]) if number else at)
        return f"{ours}; in the target's step {self.steps[number]} {theirs}"

    @property
    def _has_all(self) -> bool:
        return len(self.reference_rows) == len(self.reference.cells)


class Gathering:
    """Gathers for the tensors of two runs.

    Attributes:
        tokens: Which tokens belong together.
        dims: Axes of tensors whose token axes do not follow from shapes.
    """

    def __init__(self, tokens: TokenAlignment, dims: Dims | None = None) -> None:
        self.tokens = tokens
        self.dims = dims
        self._rows: dict[tuple[int, tuple[bool, ...]], tuple[Array, Array]] = {}
        self._steps: dict[int, tuple[int, ...]] = {}

    def steps(self, step: int) -> tuple[int, ...]:
        """The steps of the target that have tokens of a step of the reference."""
        if step not in self._steps:
            self._steps[step] = tuple(dict.fromkeys(self.tokens.of_step(step)[:, 2].tolist()))
        return self._steps[step]

    def is_in_place(self, step: int) -> bool:
        """Whether all valid tokens of a step lie at the same positions of both sides."""
        pairs = self.tokens.of_step(step)
        grids = self.tokens.reference.grids[step], self.tokens.target.grids.get(step)
        return grids[0] == grids[1] and np.array_equal(pairs[:, :2], pairs[:, 2:])

    def gather(
        self,
        step: int,
        shape: Shape,
        shapes: Sequence[Shape],
        *,
        dims: tuple[Dims | None, Dims | None] = (None, None),
        is_last: bool = False,
    ) -> Gather | None:
        """How a tensor of the reference and tensors of the target come to have the same tokens.

        Args:
            step: The reference's step.
            shape: Its tensor's shape.
            shapes: Those of the target's tensors, one for each step of `steps`.
            dims: Axes of the reference's tensor, and of the target's.
            is_last: Whether a tensor may have one token of each sequence only, the last.

        Returns:
            None if the reference's tensor has no tokens.

        Raises:
            UsageError: Several axes may count tokens; the target's tensors have no tokens; or the two have no
                token in common.
        """
        steps = self.steps(step)
        asked = [(self.tokens.reference, step, shape, dims[0])]
        asked += [(self.tokens.target, *each, dims[1]) for each in zip(steps, shapes, strict=True)]
        choices: list[list[TokenAxes]] = []
        for tokens, number, own, named in asked:
            options = find_token_axes(tokens, number, own, named or self.dims, is_last=is_last)
            if not options and named is None:
                options = find_token_axes(tokens, number, own, None, is_last=is_last)
            if not options and not choices and (named is None or not {"s", "t"} & {*named.names}):
                return None
            if not options:
                side, grid = "target" if choices else "reference", list(tokens.grids[number])
                raise UsageError(f"the {side}'s {list(own)} has no axes for the tokens {grid}")
            choices.append(options)
        reference, *target = _chosen(choices, [shape, *shapes])
        one = reference.rest(shape)
        for axes, own in zip(target, shapes, strict=True):
            if axes.rest(own) != one:
                raise UsageError(
                    f"a token is {list(one)} in the reference, {list(axes.rest(own))} in the target"
                )
        rows = self._rows_of(step, reference, target)
        if not len(rows[0]):
            raise UsageError("the two tensors have no token in common")
        return Gather(reference, tuple(target), *rows, steps)

    def _rows_of(self, step: int, reference: TokenAxes, target: Sequence[TokenAxes]) -> tuple[Array, Array]:
        """Rows of both sides that are the same tokens, in the reference's order."""
        name = step, tuple(axes.is_last for axes in (reference, *target))
        if name not in self._rows:
            row_of = {int(cell): row for row, cell in enumerate(reference.cells)}
            places = [
                (n, int(c)) for n, axes in zip(self.steps(step), target, strict=True) for c in axes.cells
            ]
            other_of = {place: row for row, place in enumerate(places)}
            rows = [
                (row_of[cell], other_of[number, other])
                for _, cell, number, other in self.tokens.of_step(step).tolist()
                if cell in row_of and (number, other) in other_of
            ]
            ours, theirs = np.array(sorted(rows), np.int64).reshape(-1, 2).T
            self._rows[name] = ours, theirs
        return self._rows[name]


def _chosen(choices: Sequence[Sequence[TokenAxes]], shapes: Sequence[Shape]) -> list[TokenAxes]:
    """Of what each tensor may be read as one, the same axes for all of them where there are such.

    Raises:
        UsageError: There are several ways, and they differ.
    """
    common = set[Axes].intersection(*({option.axes for option in options} for options in choices))
    chosen = []
    for options, shape in zip(choices, shapes, strict=True):
        fitting = [option for option in options if option.axes in common] or options
        if len(fitting) > 1 and fitting[0].grid[-1] > 1:
            several = " and ".join(str(option.axes[-1]) for option in fitting)
            raise UsageError(
                f"axes {several} of {list(shape)} may both count the tokens {list(fitting[0].grid)}",
                hint="Say which by dims: 'b s ...' or 'b h s d'.",
            )
        chosen.append(fitting[0])
    return chosen
