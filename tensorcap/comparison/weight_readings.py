"""What the bits of a quantised weight are by other readings, of which one is right and the other a mistake.

A reader may take numbers for those of another format, unpack them in another order, leave zero points out, or
lay scales over other blocks. Where a weight is wrong, `weight_mistakes` looks for the reading by which it is
the reference's; where a layer's result is not what its weight makes, `layer_mistakes` for the one that makes
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Final

import numpy as np

from tensorcap.comparison.weight_rounding import WeightNumbers, levels_of
from tensorcap.wording import counted
from tensorcap_formats.dtypes import DTYPES, Array, decode

_OTHER_AXIS: Final = "those of the other axis, of rows for columns or the reverse"
_AWQ: Final = (0, 2, 4, 6, 1, 3, 5, 7)
_PACKED: Final = "numbers are packed in another order than they are taken out"
_MATRIX: Final = 2  # axes
_ALL: Final = slice(None)
_FAMILIES: Final = (  # formats of as many bits
    (
        "int8",
        "uint8",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
    ),
    ("int4", "uint4", "MXFP4", "nf4"),
)

_Move = Callable[[Array], Array]
_Rows = slice | Array


@dataclass(frozen=True, slots=True)
class Reading:
    """A weight by another reading of its bits.

    Attributes:
        kind: What such a mistake is called.
        text: What is wrong with a weight that is the reference's if it is read so; "" if none is.
        made: What a layer does that reads its weight so, behind "it is what its weight makes".
        weight: The weight, `[rows, columns]`; values may not be finite, where the other format has none.
    """

    kind: str
    text: str
    made: str
    weight: WeightNumbers


def readings(weight: WeightNumbers, rows: slice | Array = _ALL) -> Iterator[Reading]:
    """Yield a weight by other readings, the most usual mistakes first.

    Args:
        weight: The weight.
        rows: Those of it that are read.

    Example:
        >>> weight = WeightNumbers("int8", np.array([[2.0, -2.0], [6.0, 3.0]]), np.array([[2.0], [3.0]]))
        >>> next(reading.weight.values for reading in readings(weight)).tolist()
        [[2.0, 510.0], [6.0, 3.0]]
    """
    matrix = weight.matrix
    few = matrix.at(rows)
    yield from _formats(few)
    yield from _zero_points(few)
    yield from _arrangements(matrix, few, rows)
    for reading in _kernels(weight):
        yield replace(reading, weight=reading.weight.at(rows))
    yield from _orders(matrix, few, rows)


def _with(weight: WeightNumbers, numbers: Array, steps: Array, zeros: Array | float) -> WeightNumbers:
    """A weight of other numbers, steps and zero points, one for each element."""
    wide = np.broadcast_to(zeros, numbers.shape)
    with np.errstate(invalid="ignore"):
        return replace(
            weight, values=(numbers - wide) * steps, steps=steps, zeros=wide if wide.any() else None
        )


# --- formats of numbers


@lru_cache
def table_of(number: str) -> Array:
    """Return what each code of a format stands for, from all bits 0 on; nothing of one that is not known.

    Example:
        >>> table_of("int4").tolist()[6:10], table_of("MXFP4").tolist()[6:10]
        ([6.0, 7.0, -8.0, -7.0], [4.0, 6.0, -0.0, -0.5])
    """
    if number.startswith("float8") and number in DTYPES:
        return decode(np.arange(256, dtype=np.uint8), DTYPES[number]).astype(np.float64)
    levels = np.array(levels_of(number))
    if number == "MXFP4":
        above = np.unique(np.abs(levels))
        return np.concatenate([above, -above])
    if number.startswith("int") and levels.size:
        return np.roll(levels, levels.size // 2)
    return levels


def codes_of(weight: WeightNumbers) -> Array | None:
    """Return the code of each number, which its bits are; None of a format that is not known."""
    table = table_of(weight.number)
    if not table.size:
        return None
    _, first = np.unique(table[np.isfinite(table)], return_index=True)
    codes = np.flatnonzero(np.isfinite(table))[first][weight.places]
    half = table.size // 2
    if table[half] == 0:  # a zero with a sign
        codes = np.where((table[codes] == 0) & np.signbit(weight.values), half, codes)
    return codes


def _formats(weight: WeightNumbers) -> Iterator[Reading]:
    """The same bits as numbers of other formats."""
    codes, own = codes_of(weight), weight.number
    family = next((names for names in _FAMILIES if own in names), ())
    if codes is None:
        return
    table = table_of(own)
    half = table.size // 2
    zeros = [weight.wide_zeros, *([0.0] if weight.zeros is not None else []), float(half)]
    for other in family:
        others = table_of(other)
        if other == own or not others.size:
            continue
        is_both = np.isfinite(table) & np.isfinite(others) & (table != 0)
        factors = others[is_both] / table[is_both]
        numbers = others[codes]
        if np.ptp(factors) == 0 and np.isfinite(numbers).all():  # a factor of all scales, and told as that
            continue
        are_whole = "int" in own and "int" in other
        made = f"with its {own} numbers read as {other}"
        if are_whole:
            signs = ("unsigned", "signed") if own.startswith("u") else ("signed", "unsigned")
            made = f"with its {signs[0]} numbers read as {signs[1]}"
        text = "" if are_whole else f"its numbers are {other} ones, read as {own}"
        for zero in zeros if "int" in other else [0.0]:
            yield Reading(
                "weight-format",
                text,
                made,
                replace(_with(weight, numbers, np.array(weight.wide_steps), zero), number=other),
            )
    if "int" in own:
        made = "with the sign bit of its numbers the other way round"
        numbers = table[codes ^ half]
        for zero in zeros:
            yield Reading("weight-sign", "", made, _with(weight, numbers, np.array(weight.wide_steps), zero))


def _zero_points(weight: WeightNumbers) -> Iterator[Reading]:
    """Zero points that are off by one, or by half the numbers, or left out."""
    numbers, steps = weight.numbers, np.array(weight.wide_steps)
    half = len(weight.levels) // 2
    for by in (1, -1, half, -half):
        made = f"with a zero point that is {by:+d} off"
        yield Reading("weight-zero-point", "", made, _with(weight, numbers, steps, weight.wide_zeros + by))
    if weight.zeros is not None:
        yield Reading("weight-zero-point", "", "without its zero point", _with(weight, numbers, steps, 0.0))


# --- places of scales and zero points


def _arrangements(weight: WeightNumbers, few: WeightNumbers, rows: _Rows) -> Iterator[Reading]:
    """The same scales and zero points over other blocks, of the few rows that are read."""
    steps, zeros = weight.steps, weight.zeros
    if steps.ndim != _MATRIX or steps.size == 1:
        return
    are_alike = zeros is not None and zeros.shape == steps.shape and bool(np.ptp(zeros))
    own = np.array(few.wide_steps), few.wide_zeros
    for text, made, move in _moves(weight):
        moved = replace(weight, steps=move(steps)).at(rows).wide_steps
        whole = [("scales", moved, own[1])]
        if are_alike and zeros is not None:
            of_zeros = replace(weight, steps=move(zeros)).at(rows).wide_steps
            both = ("scales and zero points", moved, of_zeros)
            whole = [both, *whole, ("zero points", own[0], of_zeros)]
        for what, own_steps, own_zeros in whole:
            yield Reading(
                "weight-scales" if "scales" in what else "weight-zero-point",
                text.format(what),
                made.format(what),
                _with(few, few.numbers, own_steps, own_zeros),
            )
    yield from _powers_of_two(few)


def _moves(weight: WeightNumbers) -> Iterator[tuple[str, str, _Move]]:
    """Other places of scales: what is wrong with a weight that they undo, what a layer does, and how.

    A move makes scales of blocks of others.
    """
    shape, steps = weight.values.shape, weight.steps
    rows, groups = steps.shape
    if (groups == 1 and rows == shape[1]) or (rows == 1 and groups == shape[0]):
        yield f"its {{}} are {_OTHER_AXIS}", f"where its {{}} are {_OTHER_AXIS}", lambda s: s.T
    if rows > 1 and groups > 1:
        for move in (lambda s: s.reshape(groups, rows).T, lambda s: s.T.reshape(rows, groups)):
            yield (
                "{} of rows and groups are exchanged",
                "where {} of rows and groups are exchanged (transposed)",
                move,
            )
    size = shape[1] // groups
    for axis, name in ((0, "row"), (1, "group" if groups < shape[1] else "column")):
        count = steps.shape[axis]
        for by in dict.fromkeys((1, -1, 2, -2, count // 2)):
            if count > 1 and by % count:
                behind, ahead = "behind" if by > 0 else "ahead", "ahead" if by > 0 else "behind"
                yield (
                    f"its {{}} are those of {counted(abs(by), name)} {behind}",
                    f"where its {{}} are those of {counted(abs(by), name)} {ahead}",
                    lambda s, by=by, axis=axis: np.roll(s, -by, axis=axis),  # type: ignore[misc]  # a default binds it
                )
        if count > 1:
            yield (
                f"its {{}} are in the reverse order of {name}s",
                f"where its {{}} are in the reverse order of {name}s",
                lambda s, axis=axis: np.flip(s, axis=axis),  # type: ignore[misc]
            )
    if 1 < groups < shape[1]:
        text = (
            f"those of every {groups}th column, and its numbers were rounded in groups of {size} neighbours, "
            "or the reverse"
        )
        if (shape[0] % rows, shape[1] % groups) == (0, 0):
            yield (
                f"its {{}} are {text}",
                f"where its {{}} are {text}",
                lambda s: np.tile(s, (shape[0] // rows, size)),
            )
        for other in (2 * size, size // 2):
            places = np.arange(shape[1]) // max(1, other) % groups
            yield (
                f"its {{}} are of groups of {size}, and its numbers were rounded in groups of {other}",
                f"with {{}} of groups of {other}, where they are of {size}",
                lambda s, places=places: s[:, places],  # type: ignore[misc]
            )
    if rows > 1:
        yield "", "with {} of the first row for all rows", lambda s: s[:1]


def _powers_of_two(weight: WeightNumbers) -> Iterator[Reading]:
    """Scales that are rounded to powers of two, as numbers without a mantissa are."""
    steps = np.array(weight.wide_steps)
    if not (steps > 0).all():
        return
    exponents = np.log2(steps)
    if (exponents == np.rint(exponents)).all():
        return
    for name, rounded in (("down", np.floor), ("up", np.ceil), ("to the nearest", np.rint)):
        made = f"with its scales rounded {name} to powers of two"
        powers = np.exp2(rounded(exponents))
        yield Reading("weight-scales", "", made, _with(weight, weight.numbers, powers, weight.wide_zeros))


# --- order of numbers


def _orders(weight: WeightNumbers, few: WeightNumbers, rows: _Rows) -> Iterator[Reading]:
    """Numbers in another order, with their scales or without; transposed ones too."""
    height, columns = weight.values.shape
    own = _elements(few)
    if height == columns:
        made = "where it is transposed"
        numbers, steps, zeros = (side.T[rows] for side in _elements(weight))
        yield Reading("weight-order", "it is transposed", made, _with(few, numbers, steps, zeros))
        text = "its numbers are transposed, and its scales are not"
        yield Reading("weight-order", text, f"where {text}", _with(few, numbers, *own[1:]))
    else:
        text = f"its numbers are those of [{columns}, {height}], read as [{height}, {columns}]"
        turned = weight.numbers.reshape(columns, height).T[rows]
        yield Reading("weight-order", text, f"where {text}", _with(few, turned, *own[1:]))

    def taken(order: Callable[[int], Array], axis: int) -> tuple[Array, Array, Array]:
        """The elements of the rows that are read with an axis in an order."""
        if axis:
            numbers, steps, zeros = (side[:, order(columns)] for side in own)
            return numbers, steps, zeros
        return _elements(weight.at(order(height)[rows]))

    for (axis, name), (what, count, order) in product(((1, "columns"), (0, "rows")), _ORDERS):
        if weight.values.shape[axis] % count:
            continue
        numbers, *moved = taken(order, axis)
        text, made = (f"{what.format(name)}: {how}" for how in (f"its {_PACKED}", _PACKED))
        others = [own[1:], moved]
        if weight.zeros is not None and np.ptp(weight.zeros):  # packed likewise, along either axis
            others += [
                (own[1], taken(order, along)[2])
                for along, size in enumerate(weight.values.shape)
                if size % count == 0
            ]
        for steps, zeros in others:
            yield Reading("weight-order", text, f"where {made}", _with(few, numbers, steps, zeros))


def _elements(weight: WeightNumbers) -> tuple[Array, Array, Array]:
    """The number, the step and the zero point of each element."""
    zeros = np.broadcast_to(weight.wide_zeros, weight.values.shape)
    return weight.numbers, np.array(weight.wide_steps), zeros


def _of_each(order: Sequence[int]) -> Callable[[int], Array]:
    """An order of so many neighbours, for an axis of a size."""
    return lambda size: (np.arange(size).reshape(-1, len(order))[:, list(order)]).reshape(-1)


_ORDERS: Final[
    tuple[tuple[str, int, Callable[[int], Array]], ...]
] = (  # in words, of what their size is a multiple
    ("each two {} are exchanged", 2, _of_each((1, 0))),
    ("even and odd {} lie in two halves", 2, lambda size: np.arange(size).reshape(2, -1).T.reshape(-1)),
    ("even and odd {} lie in two halves", 2, lambda size: np.arange(size).reshape(-1, 2).T.reshape(-1)),
    ("each eight {} are in the order 0, 2, 4, 6, 1, 3, 5, 7", 8, _of_each(_AWQ)),
    ("each eight {} are in the order 0, 4, 1, 5, 2, 6, 3, 7", 8, _of_each(np.argsort(_AWQ).tolist())),
    ("each eight {} are in the reverse order", 8, _of_each(range(7, -1, -1))),
    ("each four {} are in the reverse order", 4, _of_each(range(3, -1, -1))),
)


def _kernels(weight: WeightNumbers) -> Iterator[Reading]:
    """Kernels of a convolution that are turned, or whose axes are exchanged."""
    ndim = weight.values.ndim
    if ndim <= _MATRIX:
        return
    numbers, steps, zeros = (
        weight.numbers,
        np.array(weight.wide_steps),
        np.broadcast_to(weight.wide_zeros, weight.values.shape),
    )
    space = tuple(range(2, ndim))
    moves: list[tuple[str, _Move]] = []
    if weight.values.shape[0] == weight.values.shape[1]:
        moves.append(("its axes of inputs and outputs are exchanged", lambda a: a.swapaxes(0, 1)))
    moves.append(("its kernel is turned by half a turn", lambda a: np.flip(a, space)))
    if len(space) > 1:
        for axis in space:
            moves.append(
                (f"its kernel is flipped along axis {axis}", lambda a, axis=axis: np.flip(a, axis))  # type: ignore[misc]
            )
        if weight.values.shape[-1] == weight.values.shape[-2]:
            moves.append(("its kernel is transposed", lambda a: a.swapaxes(-1, -2)))
    for text, move in moves:
        alone = _with(weight, move(numbers), steps, zeros)
        whole = _with(weight, move(numbers), move(steps), move(zeros))
        for moved in (alone, whole):
            yield Reading("weight-order", text, f"where {text}", moved.matrix)
