"""What is wrong with a quantised weight that is not the reference's, rounded: mistakes are undone and tried.

A mistake is named if the weight without it is the reference's, rounded to the nearest number, but for a few
elements; of a weight whose errors make up for each other in products (GPTQ), if it would be green. In the
order in which they are tried: zero points, the sign of whole numbers, ranges that are too small, rounding
that is none, a few rows, columns or elements; other readings of the same bits (`weight_readings`); scales
times factors, or of other groups; columns times factors, in another order, or rotated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tensorcap.comparison.policy import POLICY
from tensorcap.comparison.weight_readings import readings
from tensorcap.comparison.weight_rounding import WeightNumbers, measure_rounding, spread
from tensorcap.wording import counted
from tensorcap_formats.dtypes import Array

_RIGHT: Final = 1.3  # times the error of rounding, RMS, of a weight without the mistake
_ROUNDED_TWICE: Final = 2.0  # the same, of a weight whose large values wrapped around
_FEEDBACK: Final = 3.0  # the same, of one whose errors make up for each other
_LEFT_OUT: Final = 0.02  # of the elements may be wrong all the same
_FAR: Final = 2.0  # standard deviations of rounding, of which the largest error is 1.7
_LARGEST: Final = 1 << 20  # elements that are looked at
_SOME: Final = 32  # rows that are looked at before all
_LEAST: Final = 8  # elements that share a zero point
_FEW: Final = 4  # rows or columns that are named
_NEAREST: Final = 1.05  # steps that a number is off, of a value that was rounded before
_PART: Final = 16  # neighbours that share a scale, at least
_ALIKE: Final = 0.1  # by which a fitted scale may be off, relative
_MANY: Final = 0.1  # of the numbers have to be others with their signs read otherwise
_CUT: Final = 0.5  # share of the squared error that clipped elements make, to be what is wrong
_MOST_GROUPS: Final = 64  # among which those of columns are looked for
_LONGEST: Final = 4096  # columns whose order is looked for
_ROTATED: Final = 512  # rows whose products among each other are looked at
_TELLING: Final = 5.0  # times what rounding makes, that these products, and errors, have to be, RMS


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


def find_weight_mistake(
    reference: Array, weight: WeightNumbers, inputs: Array | None = None
) -> WeightMistake:
    """Find the mistake that explains why a weight is not the reference's, rounded.

    Args:
        reference: float64, in the shape of the weight.
        weight: The target's.
        inputs: What the layer was given, `[rows, inputs]`, float64; None if that is not known.
    """
    rows = max(1, _LARGEST * len(reference) // max(1, reference.size))
    if rows < len(reference):  # the first rows stand for all
        _, weight = next(weight.in_parts(rows))
        reference = reference[: len(weight.values)]
    matrix = reference.reshape(len(reference), -1)
    trial = _Trial(matrix, inputs if inputs is not None and inputs.shape[1] == matrix.shape[1] else None)
    for kind, describe in _OF_NUMBERS.items():
        text = describe(trial, weight.matrix)
        if text:
            return WeightMistake(kind, text)
    if trial.is_right(weight.matrix):  # but for a few elements, which no reading of all explains
        text = _few_places(trial, weight.matrix)
        return WeightMistake("weight-part", text) if text else WeightMistake()
    for reading in readings(weight):
        if reading.text and trial.is_right(reading.weight):
            return WeightMistake(reading.kind, reading.text)
    for kind, describe in _OF_VALUES.items():
        text = describe(trial, weight.matrix)
        if text:
            return WeightMistake(kind, text)
    return WeightMistake()


@dataclass(frozen=True, slots=True)
class _Trial:
    """Is a weight the reference's, rounded?

    Attributes:
        reference: `[rows, columns]`, float64.
        inputs: What the layer was given, `[rows, columns]`; None if that is not known.
    """

    reference: Array
    inputs: Array | None

    def is_right(self, weight: WeightNumbers) -> bool:
        """Whether a weight is the reference's but for rounding, and but for a few elements."""
        if not np.isfinite(weight.values).all() or not self._is_near(weight):
            return False
        squares, variances = np.square(weight.values - self.reference), weight.variances
        limit = np.quantile(squares / np.maximum(variances, 1e-300), 1 - _LEFT_OUT)
        is_kept = squares <= limit * variances
        if squares[is_kept].sum() <= _RIGHT**2 * variances[is_kept].sum() and limit < 16:
            return True
        if self.inputs is None or squares.sum() > _FEEDBACK**2 * variances.sum():
            return False
        rounding = measure_rounding(self.reference, weight, self.inputs)
        return POLICY.quantised.status(rounding.value) == "within-rounding"

    def _is_near(self, weight: WeightNumbers) -> bool:
        """Whether a few rows are about as far off as rounding makes them, which costs little to ask."""
        rows = len(weight.values)
        every = rows // _SOME + 1
        sides = [weight.steps, weight.zeros]
        if every == 1 or any(side is not None and len(side) not in (1, rows) for side in sides):
            return True
        steps, zeros = (side if side is None or len(side) == 1 else side[::every] for side in sides)
        assert steps is not None
        few = replace(weight, values=weight.values[::every], steps=steps, zeros=zeros)
        squares = np.square(few.values - self.reference[::every])
        return bool(np.median(squares / np.maximum(few.variances, 1e-300)) <= _FEEDBACK**2)

    def are_right(self, weight: WeightNumbers, values: Array, steps: Array | None = None) -> bool:
        """The same of other values at the steps of a weight, or at others."""
        steps = np.array(weight.wide_steps) if steps is None else steps
        return self.is_right(replace(weight, values=values, steps=steps, zeros=None))


def _zero_points(trial: _Trial, weight: WeightNumbers) -> str:
    """Every number of a group is off by the same whole number of steps."""
    if not weight.number.startswith(("int", "uint")):
        return ""
    if weight.values.size < _LEAST * weight.steps.size:
        return ""
    off = weight.numbers - weight.in_steps(trial.reference)
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
    if not trial.are_right(weight, values):
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


def _signs(trial: _Trial, weight: WeightNumbers) -> str:
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
            if trial.are_right(weight, (other - zeros) * weight.wide_steps):
                return (
                    "the sign bit of its numbers is read wrongly, as where unsigned numbers are read as "
                    f"signed: they are {half} or {2 * half} off"
                )
    return ""


def _wrapping(trial: _Trial, weight: WeightNumbers) -> str:
    """Values beyond the largest number stand at the other end, as many numbers off as there are."""
    count = len(weight.levels)
    if not weight.number.startswith(("int", "uint")):
        return ""
    wanted = weight.in_steps(trial.reference)
    turns = np.rint((wanted - weight.numbers) / count)
    is_beyond = (wanted > weight.levels[-1]) | (wanted < weight.levels[0])
    if not turns.any() or not is_beyond[turns != 0].all():
        return ""
    rest = wanted - weight.numbers - turns * count
    if (np.abs(rest) > _NEAREST).any():
        return ""
    if np.square(rest * weight.wide_steps).sum() > _ROUNDED_TWICE**2 * weight.variances.sum():
        return ""
    at = np.unravel_index(np.argmax(np.abs(turns)), turns.shape)
    text = f"{counted(int((turns != 0).sum()), 'value')} beyond the largest number wrapped around"
    became = f"{trial.reference[at]:.3g} became {weight.values[at]:.3g}"
    return f"{text} to the other end, {count} steps off: {became}"


def _clipping(trial: _Trial, weight: WeightNumbers) -> str:
    """Values beyond the largest number are cut, and all others are right."""
    wanted = weight.in_steps(trial.reference)
    below, above = weight.halves
    last = len(weight.levels) - 1
    first = int(weight.places.min() == 1)  # of numbers that are as many on both sides of 0
    off = wanted - weight.numbers
    is_cut = ((weight.places == last) & (off > above)) | ((weight.places == first) & (off < -below))
    squares = np.square(weight.values - trial.reference)
    if not is_cut.any() or squares[is_cut].sum() < _CUT * squares.sum():
        return ""
    rest = ~is_cut
    if squares[rest].sum() > _RIGHT**2 * weight.variances[rest].sum():
        return ""
    at = np.unravel_index(np.argmax(np.where(is_cut, squares, 0)), squares.shape)
    text = f"{counted(int(is_cut.sum()), 'value')} beyond the largest number cut off"
    where = _named(is_cut)
    text += f", in {where}" if where else ""
    return f"{text}: {trial.reference[at]:.3g} became {weight.values[at]:.3g}"


def _named(is_it: Array) -> str:
    """The few columns, or rows, that elements of a matrix lie in, in words; "" if they are many."""
    for axis, name in ((1, "column"), (0, "row")):
        places = np.flatnonzero(is_it.any(axis=1 - axis))
        if len(places) <= _FEW:
            return f"{name}{'s' * (len(places) > 1)} {', '.join(map(str, places.tolist()))}"
    return ""


def _truncation(trial: _Trial, weight: WeightNumbers) -> str:
    """Each number is one of the two next to the value, and not the nearest."""
    off = weight.in_steps(trial.reference) - weight.numbers
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


def _few_places(trial: _Trial, weight: WeightNumbers) -> str:
    """A few columns, rows or elements are wrong, and all others are the reference's, rounded."""
    squares = np.square(weight.values - trial.reference)
    is_wrong = squares > _FAR**2 * weight.variances
    if not is_wrong.any() or squares[is_wrong].sum() < _CUT * squares.sum():
        return ""
    where = _named(is_wrong) or f"{int(is_wrong.sum())} of {is_wrong.size} elements"
    verb = "is" if where.startswith(("column ", "row ")) else "are"
    what = "0" if not weight.values[is_wrong].any() else "wrong"
    at = np.unravel_index(np.argmax(squares), squares.shape)
    became = "" if what == "0" else f": {trial.reference[at]:.3g} became {weight.values[at]:.3g}"
    return f"{where} of it {verb} {what}, and the rest is as it should be{became}"


def _scales(trial: _Trial, weight: WeightNumbers) -> str:
    """Numbers are right and stand at scales times a factor, or of other groups.

    The scale that the reference's values ask for is fitted for each part of a row, by least squares.
    """
    shape = trial.reference.shape
    plain = weight.numbers - weight.wide_zeros
    own = shape[1] // weight.steps.shape[1] if weight.steps.ndim == len(shape) else shape[1]
    for size in dict.fromkeys((own, *(shape[1] >> power for power in range(shape[1].bit_length())))):
        if size < _PART or shape[1] % size:
            continue
        parts, wanted = (side.reshape(shape[0], -1, size) for side in (plain, trial.reference))
        fitted = (parts * wanted).sum(axis=-1) / np.maximum(np.square(parts).sum(axis=-1), 1e-300)
        by_part = np.repeat(fitted, size, axis=1)
        if not trial.are_right(weight, plain * by_part, np.abs(by_part)):
            continue
        if size != own:
            of_own, of_fit = (f"groups of {n}" if n < shape[1] else "whole rows" for n in (own, size))
            of_own = "single columns" if own == 1 else of_own
            return f"its scales are of {of_own}, and its numbers were rounded in {of_fit}"
        return _factor_text(fitted / np.array(weight.wide_steps)[:, ::size])
    return ""


def _factor_text(factors: Array) -> str:
    """What scales are beside those that the reference's values ask for, by row and group."""
    middle = float(np.median(factors))
    if np.abs(factors / middle - 1).max() <= _ALIKE:
        return f"all its scales are {_in_powers(1 / middle)} what they have to be"
    is_wrong = np.abs(factors - 1) > _ALIKE
    alike = factors[is_wrong]
    if alike.size and np.abs(alike / np.median(alike) - 1).max() <= _ALIKE:
        where = f"{alike.size} of {factors.size} scales {'is' if alike.size == 1 else 'are'}"
        return f"{where} {_in_powers(1 / float(np.median(alike)))} what has to stand there"
    return "its numbers stand at scales of other rows or groups"


def _in_powers(factor: float) -> str:
    """A factor in words; of a power of two, too, of exponents that are off."""
    power = round(float(np.log2(abs(factor)))) if factor else 0
    if power and abs(factor / 2.0**power - 1) <= _ALIKE / 4:
        return f"{2.0**power:g} times (an exponent that is {abs(power)} off)"
    return f"{factor:.3g} times"


def _groups(trial: _Trial, weight: WeightNumbers) -> str:
    """Columns are of other groups than those whose scales they have; of each column the best is taken."""
    if all(side is None or side.shape[1:] == (1,) for side in (weight.steps, weight.zeros)):
        return ""
    steps = np.broadcast_to(weight.wide_steps, weight.values.shape)
    zeros = np.broadcast_to(weight.wide_zeros, weight.values.shape)
    both, own = np.unique(np.concatenate([steps, zeros]), axis=1, return_inverse=True)
    count = both.shape[1]
    if not 1 < count <= min(_MOST_GROUPS, steps.shape[1] // 2):
        return ""
    errors = [
        np.square((weight.numbers - zero[:, None]) * step[:, None] - trial.reference).sum(axis=0)
        for step, zero in (np.split(column, 2) for column in both.T)
    ]
    best = np.argmin(errors, axis=0)
    step, zero = np.split(both[:, best], 2)
    if not trial.are_right(weight, (weight.numbers - zero) * step, step):
        return ""
    moved = int((best != own.reshape(-1)).sum())
    return (
        f"{moved} of its {len(best)} columns have scales of other groups than their own, as where the order "
        "of groups (g_idx, act-order) is another"
    )


def _columns(trial: _Trial, weight: WeightNumbers) -> str:
    """Columns are the reference's times numbers, which are fitted by least squares."""
    reference = trial.reference
    sizes = np.square(reference).sum(axis=0)
    if len(reference) < _PART or not (sizes > 0).all():
        return ""
    factors = (weight.values * reference).sum(axis=0) / sizes
    if not replace(trial, reference=reference * factors).is_right(weight):
        return ""
    if np.allclose(np.abs(factors), 1, atol=_ALIKE):
        return f"{int((factors < 0).sum())} of its {len(factors)} columns have the other sign"
    low, high = factors.min(), factors.max()
    return f"its columns are the reference's times factors of {low:.3g} to {high:.3g}"


def _permutation(trial: _Trial, weight: WeightNumbers) -> str:
    """Columns, or rows, are the reference's in any other order: each is most like another one."""
    for axis, name in ((1, "columns"), (0, "rows")):
        ours, theirs = (side.T if axis else side for side in (trial.reference, weight.values))
        if len(ours) > _LONGEST or ours.shape[1] < _PART:
            continue
        ours, theirs = (side[:, : _ROTATED // 2] for side in (ours, theirs))
        sizes = np.maximum(np.linalg.norm(ours, axis=1), 1e-300)
        order = np.argmax(theirs @ (ours / sizes[:, None]).T, axis=1)
        if len(np.unique(order)) < len(order) or (order == np.arange(len(order))).all():
            continue
        own = replace(trial, reference=np.take(trial.reference, order, axis=axis), inputs=None)
        if own.is_right(weight):
            return f"its {name} are the reference's in another order"
    return ""


def _rotation(trial: _Trial, weight: WeightNumbers) -> str:
    """Rows have the products among each other that the reference's have: they are these, rotated.

    Of W' = W R + E with an orthogonal R, W' W'^T - W W^T is made of rounding alone: of rows i and j, of
    variance |W_i|^2 v_j + |W_j|^2 v_i for the mean v of their elements.
    """
    if np.square(weight.values - trial.reference).sum() < _TELLING**2 * weight.variances.sum():
        return ""
    for is_input in (True, False):
        ours, theirs, variances = (
            (side if is_input else side.T)[:_ROTATED]
            for side in (
                trial.reference,
                weight.values,
                np.broadcast_to(weight.variances, weight.values.shape),
            )
        )
        if len(ours) < _PART:
            continue
        sizes, noise = np.square(ours).sum(axis=1), variances.mean(axis=1)
        expected = np.outer(sizes, noise) + np.outer(noise, sizes)
        products = ours @ ours.T
        error = theirs @ theirs.T - products
        apart = ~np.eye(len(ours), dtype=bool)
        error, expected, products = error[apart], expected[apart].sum(), products[apart]
        is_telling = np.square(products).sum() > _TELLING**2 * expected
        if is_telling and np.square(error).sum() <= _RIGHT**2 * expected:
            what = "inputs" if is_input else "outputs"
            return f"it is the reference's with its {what} rotated, rounded"
    return ""


def find_other_layer(
    reference: Array,
    weight: WeightNumbers,
    mistake: WeightMistake,
    others: Iterable[tuple[str, Callable[[], WeightNumbers | None]]],
) -> WeightMistake:
    """Find the layer of the target whose scales, or numbers, a wrong weight has, or that has its own.

    Args:
        reference: float64, in the shape of the weight.
        weight: The target's.
        mistake: What is known to be wrong with it.
        others: Key texts of other weights of the target of this shape, and the numbers of their first rows.

    Returns:
        The mistake; as given if there is no such layer.
    """
    is_of_scales = mistake.kind == "weight-scales"
    if mistake.text and not is_of_scales:
        return mistake
    for key, load in others:
        other = load()
        if other is None or other.number != weight.number:
            continue
        rows = len(other.values)
        _, own = next(weight.matrix.in_parts(rows))
        trial, numbers = _Trial(reference.reshape(len(reference), -1)[:rows], None), np.rint(own.numbers)
        if is_of_scales and other.steps.shape == own.steps.shape and own.steps.size > 1:
            if np.array_equal(other.steps, own.steps):
                return WeightMistake(mistake.kind, f"its scales are those of {key}, of another layer")
            steps = np.array(other.wide_steps)
            if trial.are_right(own, (own.numbers - own.wide_zeros) * steps, steps):
                return WeightMistake(mistake.kind, f"its scales are held by {key}, another layer")
        elif not mistake.text and np.ptp(numbers) and np.array_equal(np.rint(other.numbers), numbers):
            return WeightMistake(
                "weight-numbers", f"its numbers are those of {key}, of another layer, at scales of its own"
            )
    return mistake


def find_bias_mistake(reference: Array, values: Array, steps: Array, scales: Array | None) -> WeightMistake:
    """Find why a bias of 16 or 32 bits is not the reference's, rounded.

    Args:
        reference: `[outputs]`, float64.
        values: The target's.
        steps: What its numbers are multiplied by.
        scales: Those of the weight beside it; None if they are not known.
    """
    size = float(np.square(reference).sum())
    if not size:
        return WeightMistake()
    own = np.ones_like(reference)
    ways = [("the reference's", own)]
    if scales is not None and scales.size in (1, reference.size) and (scales > 0).all():
        wide = np.broadcast_to(scales.reshape(-1), reference.shape)
        ways += [("the reference's times the scales of its weight", wide)]
        ways += [("the reference's over the scales of its weight", 1 / wide)]
    slack = np.linalg.norm(np.broadcast_to(spread(steps, values.shape), values.shape))
    for text, factors in ways:
        wanted = reference * factors
        factor = float((values * wanted).sum() / np.square(wanted).sum())
        if np.linalg.norm(values - factor * wanted) > _LEFT_OUT * np.linalg.norm(values) + slack:
            continue
        if np.linalg.norm(values) > slack:
            times = f"{factor:.3g} times " if factors is own else ""
            return WeightMistake("weight-scales", f"it is {times}{text}")
    return WeightMistake()


_Describe = Callable[[_Trial, WeightNumbers], str]
_OF_NUMBERS: Final[Mapping[str, _Describe]] = {  # in the order of trials
    "weight-zero-point": _zero_points,
    "weight-sign": _signs,
    "weight-wrapped": _wrapping,
    "weight-clipped": _clipping,
    "weight-truncated": _truncation,
}
_OF_VALUES: Final[Mapping[str, _Describe]] = {  # after other readings of the same bits
    "weight-scales": _scales,
    "weight-groups": _groups,
    "weight-columns": _columns,
    "weight-order": _permutation,
    "weight-rotated": _rotation,
}
