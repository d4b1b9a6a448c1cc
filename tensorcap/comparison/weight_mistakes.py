"""What is wrong with a quantised weight that is not the reference's, rounded: mistakes are undone and tried.

A mistake is named if the weight without it is the reference's, rounded to the nearest number, but for a few
elements. In the order in which they are tried: zero points, the sign of whole numbers, ranges that are too
small, rounding that is none, scales, and the order of packed numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from tensorcap.comparison.weight_rounding import WeightNumbers, spread
from tensorcap.wording import counted
from tensorcap_formats.dtypes import Array

_RIGHT: Final = 1.3  # times the error of rounding, RMS, of a weight without the mistake
_LEFT_OUT: Final = 0.02  # of the elements may be wrong all the same
_LARGEST: Final = 1 << 20  # elements that are looked at
_LEAST: Final = 8  # elements that share a zero point
_FEW: Final = 4  # columns that are named
_NEAREST: Final = 0.55  # steps that the nearest number is off, with what a rounded scale adds
_PART: Final = 16  # neighbours that share a scale, at least
_ALIKE: Final = 0.1  # by which a fitted scale may be off, relative
_OTHER_AXIS: Final = "its scales are those of the other axis, of rows for columns or the reverse"
_MANY: Final = 0.1  # of the numbers have to be others with their signs read otherwise
_AWQ: Final = (0, 2, 4, 6, 1, 3, 5, 7)
_CUT: Final = 0.5  # share of the squared error that clipped elements make, to be what is wrong


@dataclass(frozen=True, slots=True)
class WeightMistake:
    """What is wrong with a weight.

    Attributes:
        kind: What such a mistake is called; "" if nothing is wrong, or if it is not known.
        text: The same in words.
        held: Key text of the weight of the reference that is held in the place of this one; "" if none is.
    """

    kind: str = ""
    text: str = ""
    held: str = ""

    @classmethod
    def of_other(cls, held: str) -> WeightMistake:
        """The mistake that another weight of the reference is held, as that of another layer."""
        return cls("other-weights", f"it is the reference's {held}, rounded", held)


def find_weight_mistake(reference: Array, weight: WeightNumbers) -> WeightMistake:
    """Find the mistake that explains why a weight is not the reference's, rounded."""
    rows = max(1, _LARGEST * len(reference) // max(1, reference.size))
    if rows < len(reference):  # the first rows stand for all
        _, weight = next(weight.in_parts(rows))
        reference = reference[: len(weight.values)]
    for kind, describe in _MISTAKES.items():
        text = describe(reference, weight)
        if text:
            return WeightMistake(kind, text)
    return WeightMistake()


def _is_right(reference: Array, weight: WeightNumbers, values: Array, steps: Array | None = None) -> bool:
    """Whether values are the reference's but for rounding to steps, and but for a few elements."""
    variances = weight.variances
    if steps is not None:
        scaled = np.where(weight.wide_steps == 0, 1.0, weight.wide_steps)
        variances = variances * np.square(steps / scaled)
    squares = np.square(values - reference)
    limit = np.quantile(squares / np.maximum(variances, 1e-300), 1 - _LEFT_OUT)
    is_kept = squares <= limit * variances
    return bool(squares[is_kept].sum() <= _RIGHT**2 * variances[is_kept].sum()) and limit < 16


def _zero_points(reference: Array, weight: WeightNumbers) -> str:
    """Every number of a group is off by the same whole number of steps."""
    if not weight.number.startswith(("int", "uint")):
        return ""
    if weight.values.size < _LEAST * weight.steps.size:
        return ""
    off = weight.numbers - weight.in_steps(reference)
    blocks = weight.steps.shape if weight.steps.ndim == off.ndim else (1,) * off.ndim
    if any(whole % count for count, whole in zip(blocks, off.shape, strict=True)):
        return ""
    parts, axes = [], []
    for axis, (count, whole) in enumerate(zip(blocks, off.shape, strict=True)):
        parts += [count, whole // count]
        axes.append(2 * axis + 1)
    shifts = np.rint(np.median(off.reshape(parts), axis=tuple(axes)))
    if not shifts.any():
        return ""
    values = (weight.numbers - spread(shifts, off.shape) - weight.wide_zeros) * weight.wide_steps
    if not _is_right(reference, weight, values):
        return ""
    wrong = shifts[shifts != 0]
    where = "" if wrong.size == shifts.size else f" in {wrong.size} of {shifts.size} groups"
    half = len(weight.levels) // 2
    if (np.abs(wrong) == half).all():
        other = "signed" if weight.number.startswith("u") else "unsigned"
        kind = "signed" if other == "unsigned" else "unsigned"
        return f"its numbers are {other} ones read as {kind}: all are {half} steps off{where}"
    sizes = np.unique(np.abs(wrong))
    size = f"{int(sizes[0])}" if sizes.size == 1 else f"{int(sizes[0])} to {int(sizes[-1])}"
    return (
        f"its zero point is {size} off{where}: all numbers are too {'large' if wrong.mean() > 0 else 'small'}"
    )


def _signs(reference: Array, weight: WeightNumbers) -> str:
    """Numbers have the sign bit that those without a sign have, or are without the shift that these need."""
    half = len(weight.levels) // 2
    if not weight.number.startswith(("int", "uint")):
        return ""
    numbers = weight.numbers
    others = [
        np.where(numbers < 0, numbers + 2 * half, numbers),
        np.where(numbers >= half, numbers - 2 * half, numbers),
        np.where(numbers >= 0, numbers - half, numbers + half),
    ]
    for other in others:
        if (other != numbers).mean() < _MANY:
            continue
        for zeros in (weight.wide_zeros, 0.0, float(half)):
            if _is_right(reference, weight, (other - zeros) * weight.wide_steps):
                return (
                    "the sign bit of its numbers is read wrongly, as where unsigned numbers are read as "
                    f"signed: they are {half} or {2 * half} off"
                )
    return ""


def _wrapping(reference: Array, weight: WeightNumbers) -> str:
    """Values beyond the largest number stand at the other end, as many numbers off as there are."""
    count = len(weight.levels)
    if not weight.number.startswith(("int", "uint")):
        return ""
    wanted = weight.in_steps(reference)
    turns = np.rint((wanted - weight.numbers) / count)
    is_beyond = (wanted > weight.levels[-1]) | (wanted < weight.levels[0])
    if not turns.any() or not is_beyond[turns != 0].all():
        return ""
    if (np.abs(wanted - weight.numbers - turns * count) > _NEAREST).any():
        return ""
    at = np.unravel_index(np.argmax(np.abs(turns)), turns.shape)
    text = f"{counted(int((turns != 0).sum()), 'value')} beyond the largest number wrapped around"
    became = f"{reference[at]:.3g} became {weight.values[at]:.3g}"
    return f"{text} to the other end, {count} steps off: {became}"


def _clipping(reference: Array, weight: WeightNumbers) -> str:
    """Values beyond the largest number are cut, and all others are right."""
    wanted = weight.in_steps(reference)
    below, above = weight.halves
    ends = len(weight.levels) - 1
    off = wanted - weight.numbers
    is_cut = ((weight.places == ends) & (off > above)) | ((weight.places == 0) & (off < -below))
    squares = np.square(weight.values - reference)
    if not is_cut.any() or squares[is_cut].sum() < _CUT * squares.sum():
        return ""
    rest = ~is_cut
    if squares[rest].sum() > _RIGHT**2 * weight.variances[rest].sum():
        return ""
    at = np.unravel_index(np.argmax(np.where(is_cut, squares, 0)), squares.shape)
    text = f"{counted(int(is_cut.sum()), 'value')} beyond the largest number cut off"
    for axis, name in ((-1, "column"), (0, "row")):
        places = np.flatnonzero(
            is_cut.any(axis=tuple(a for a in range(is_cut.ndim) if a != axis % is_cut.ndim))
        )
        if len(places) <= _FEW:
            text += f", in {name}{'s' * (len(places) > 1)} {', '.join(map(str, places.tolist()))}"
            break
    return f"{text}: {reference[at]:.3g} became {weight.values[at]:.3g}"


def _scales(reference: Array, weight: WeightNumbers) -> str:
    """Numbers are right and stand at other scales: of the other axis, other rows or groups, times a factor.

    The scale that the reference's values ask for is fitted for each part of a row, by least squares.
    """
    shape = reference.shape
    plain = weight.numbers - weight.wide_zeros
    steps = np.array(weight.wide_steps)
    for text, other in _arrangements(weight, undone=True):
        if _is_right(reference, weight, plain * other, other):
            return text
    if reference.ndim != 2:
        return ""
    own = shape[1] // weight.steps.shape[1] if weight.steps.ndim == 2 else shape[1]
    for size in dict.fromkeys((own, *(shape[1] >> power for power in range(shape[1].bit_length())))):
        if size < _PART or shape[1] % size:
            continue
        parts, wanted = (side.reshape(shape[0], -1, size) for side in (plain, reference))
        fitted = (parts * wanted).sum(axis=-1) / np.maximum(np.square(parts).sum(axis=-1), 1e-300)
        by_part = np.repeat(fitted, size, axis=1)
        if not _is_right(reference, weight, plain * by_part, np.abs(by_part)):
            continue
        if size != own:
            of_own, of_fit = (f"groups of {n}" if n < shape[1] else "whole rows" for n in (own, size))
            of_own = "single columns" if own == 1 else of_own
            return f"its scales are of {of_own}, and its numbers were rounded in {of_fit}"
        return _factor_text(fitted / steps[:, ::size])
    return ""


def _factor_text(factors: Array) -> str:
    """What scales are beside those that the reference's values ask for, by row and group."""
    middle = float(np.median(factors))
    if np.abs(factors / middle - 1).max() <= _ALIKE:
        return f"all its scales are {1 / middle:.3g} times what they have to be"
    is_wrong = np.abs(factors - 1) > _ALIKE
    alike = factors[is_wrong]
    if alike.size and np.abs(alike / np.median(alike) - 1).max() <= _ALIKE:
        where = f"{counted(alike.size, 'scale', 'are')} of {factors.size}"
        return f"{where} {1 / float(np.median(alike)):.3g} times what has to stand there"
    return "its numbers stand at scales of other rows or groups"


def _arrangements(weight: WeightNumbers, *, undone: bool) -> Iterator[tuple[str, Array]]:
    """Other places of the same scales, with the step of each element.

    The words are of a mistake that a weight has and that these places undo, or that a layer makes of a right
    weight.
    """
    shape, steps = weight.values.shape, weight.steps
    if steps.ndim != 2 or steps.size == 1 or len(shape) != 2:
        return
    rows, groups = steps.shape
    if groups == 1 and rows == shape[1]:
        yield _OTHER_AXIS, spread(steps.T, shape)
    if rows == 1 and groups == shape[0]:
        yield _OTHER_AXIS, spread(steps.T, shape)
    if rows > 1 and groups > 1:
        yield "scales of rows and groups are exchanged", spread(steps.reshape(groups, rows).T, shape)
        yield "scales of rows and groups are exchanged", spread(steps.T.reshape(rows, groups), shape)
    for axis, name in ((0, "row"), (1, "group" if groups < shape[1] else "column")):
        count = steps.shape[axis]
        for by in dict.fromkeys((1, -1, 2, -2, count // 2)):
            if count > 1 and by % count:
                ahead = f"{counted(abs(by), name)} {'behind' if (by > 0) == undone else 'ahead'}"
                yield f"its scales are those of {ahead}", spread(np.roll(steps, -by, axis=axis), shape)
        if count > 1:
            yield f"its scales are in the reverse order of {name}s", spread(np.flip(steps, axis=axis), shape)
    if 1 < groups < shape[1]:
        size = shape[1] // groups
        yield (
            "each scale is that of every "
            f"{groups}th column, and its numbers were rounded in groups of {size} neighbours, or the reverse",
            np.tile(steps, (shape[0] // rows, size)),
        )


def _orders(reference: Array, weight: WeightNumbers) -> str:
    """Numbers lie in another order, as where packed ones are taken apart in another."""
    if reference.ndim != 2:
        return ""
    for axis, name in ((1, "columns"), (0, "rows")):
        size = reference.shape[axis]
        for text, order in _packed_orders(size):
            numbers = np.take(weight.numbers, order, axis=axis)
            values = (numbers - weight.wide_zeros) * weight.wide_steps
            if _is_right(reference, weight, values):
                return f"{text.format(name)}: its numbers are packed in another order than they are taken out"
            moved = np.take(weight.values, order, axis=axis)  # scales and zero points with them
            steps = np.take(np.array(weight.wide_steps), order, axis=axis)
            if _is_right(reference, weight, moved, steps):
                return f"{text.format(name)}: its numbers are packed in another order than they are taken out"
    if reference.shape[0] == reference.shape[1] and _is_right(
        reference, weight, weight.values.T, np.array(weight.wide_steps).T
    ):
        return "it is transposed"
    return ""


def _packed_orders(size: int) -> Iterator[tuple[str, Array]]:
    """Orders of an axis, in words."""
    places = np.arange(size)
    eights: list[tuple[str, Callable[[], Array]]] = [
        ("each eight {} are in the order 0, 2, 4, 6, 1, 3, 5, 7", lambda: np.array(_AWQ)),
        ("each eight {} are in the order 0, 4, 1, 5, 2, 6, 3, 7", lambda: np.argsort(_AWQ)),
        ("each eight {} are in the reverse order", lambda: np.arange(8)[::-1]),
    ]
    if size % 2 == 0:
        yield "each two {} are exchanged", places ^ 1
        halves = places.reshape(2, -1)
        yield "even and odd {} lie in two halves", halves.T.reshape(-1)
        yield "even and odd {} lie in two halves", places.reshape(-1, 2).T.reshape(-1)
    if size % 8 == 0:
        for text, order in eights:
            yield text, (places.reshape(-1, 8)[:, order()]).reshape(-1)
    if size % 4 == 0:
        yield "each four {} are in the reverse order", places.reshape(-1, 4)[:, ::-1].reshape(-1)


def alternatives(weight: WeightNumbers) -> Iterator[tuple[str, Array]]:
    """Yield what a layer may multiply by that reads its weight wrongly, in words and as values."""
    plain, steps, zeros = weight.numbers - weight.wide_zeros, np.array(weight.wide_steps), weight.wide_zeros
    half = len(weight.levels) // 2
    for by in (1, -1, half, -half):
        yield f"with a zero point that is {by:+d} off", (plain - by) * steps
    if weight.zeros is not None:
        yield "without its zero point", weight.numbers * steps
    for text, other in _arrangements(weight, undone=False):
        if other.shape == plain.shape:  # of scales of columns the other axis has another length
            yield f"where {text}", plain * other
    if weight.values.ndim != 2:
        return
    for axis, name in ((1, "columns"), (0, "rows")):
        for text, order in _packed_orders(weight.values.shape[axis]):
            numbers = np.take(weight.numbers, order, axis=axis)
            yield f"where {text.format(name)}", (numbers - zeros) * steps
    rows, groups = weight.steps.shape if weight.steps.ndim == 2 else (1, 1)
    if 1 < groups < weight.values.shape[1]:
        size = weight.values.shape[1] // groups
        for other in (2 * size, size // 2):
            places = np.arange(weight.values.shape[1]) // max(1, other) % groups
            text = f"with scales of groups of {other}, where they are of {size}"
            yield text, plain * spread(weight.steps, (len(plain), groups))[:, places]
    if rows > 1:
        yield "with one scale for all rows", plain * steps[:1]


def _truncation(reference: Array, weight: WeightNumbers) -> str:
    """Each number is one of the two next to the value, and not the nearest."""
    off = weight.in_steps(reference) - weight.numbers
    below, above = (2 * side for side in weight.halves)
    slack = 0.05
    if ((off > above * (1 + slack)) | (off < -below * (1 + slack))).mean() > _LEFT_OUT:
        return ""
    if (off >= -slack * below).mean() > 1 - _LEFT_OUT:
        return "its numbers are rounded down, not to the nearest"
    sign = np.sign(weight.numbers - weight.wide_zeros)
    if (off * sign >= -slack * np.maximum(below, above))[sign != 0].mean() > 1 - _LEFT_OUT:
        return "its numbers are cut off towards zero, not rounded to the nearest"
    return ""


_MISTAKES: Final[Mapping[str, Callable[[Array, WeightNumbers], str]]] = {  # in the order of trials
    "weight-zero-point": _zero_points,
    "weight-sign": _signs,
    "weight-wrapped": _wrapping,
    "weight-clipped": _clipping,
    "weight-truncated": _truncation,
    "weight-scales": _scales,
    "weight-order": _orders,
}
