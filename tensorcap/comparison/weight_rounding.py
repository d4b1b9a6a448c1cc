"""Is a quantised weight the reference's, rounded to the numbers that it may have? If not, what is wrong?

In: the reference's values, the target's, and the grid of numbers, steps and zero points that the target says
it has, or that its values lie on. Out: how far its errors are from those of rounding to the nearest number.
Read `WeightNumbers`, then `measure_rounding`; `weight_mistakes` names what is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

import numpy as np

from tensorcap_formats.dtypes import DTYPES, Array, decode
from tensorcap_formats.float_formats import UNIT_ROUNDOFFS

_FEEDBACK: Final = 3.0  # times that error, up to which numbers may be chosen for the results' sake
_EVEN: Final = 2.0  # how much larger than all of them errors of a part are then
_MOST: Final = 8.0  # times that error, that a part may be off whose inputs are small
_SLACK: Final = 0.02  # steps that rounding of a scale may put a value off
_SPREAD: Final = 4.5  # standard deviations of a sum of n squared errors, times their own of 0.9 of the mean
_TAIL: Final = 7.0  # nats, of the largest of some hundred outputs
_BLOCK: Final = 1 << 21  # elements that are measured at a time
_FEW: Final = 64  # groups of values that are looked at before all
_SAMPLE: Final = 4096  # values of each, the same
_BYTE: Final = 127  # the largest number of 8 bits with a sign
_EQUAL_STEPS: Final = 1e-4  # by which products of steps in float32 may be off, relative
_PART: Final = 16  # neighbours in a row, as the smallest usual group
_NF4: Final = (  # quantiles of the normal distribution (Dettmers et al., QLoRA, 2023, appendix E)
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@lru_cache
def levels_of(number: str) -> tuple[float, ...]:
    """Return all finite values of a format of numbers, ascending; nothing of one that is not known.

    Example:
        >>> levels_of("int4")[0], levels_of("uint4")[-1], levels_of("float8_e4m3fn")[-1]
        (-8.0, 15.0, 448.0)
    """
    if number == "nf4":
        return _NF4
    if number in ("MXFP4", "fp4", "float4_e2m1fn"):
        scale = 6.0 if number == "fp4" else 1.0  # bitsandbytes has the largest at 1
        return tuple(sorted({sign * level / scale for level in _E2M1 for sign in (1, -1)}))
    if number.startswith("float8") and number in DTYPES:
        values = decode(np.arange(256, dtype=np.uint8), DTYPES[number]).astype(np.float64)
        return tuple(np.unique(values[np.isfinite(values)]).tolist())
    kind, digits = number.rstrip("0123456789"), number.lstrip("uint")
    if kind not in ("int", "uint") or not digits or not 1 < int(digits) <= 8:
        return ()
    low = -(2 ** (int(digits) - 1)) if kind == "int" else 0
    return tuple(float(level) for level in range(low, low + 2 ** int(digits)))


@dataclass(frozen=True)
class WeightNumbers:
    """A quantised weight: its numbers, and what they stand for.

    Attributes:
        number: The format of one number.
        values: The weight in floats, float64.
        steps: What numbers are multiplied by: in the shape of the weight, or one for each block of it.
        zeros: The numbers that stand for 0, likewise; None if that is 0.
        unit: Unit roundoff of what weights and steps were rounded to besides, no unit.
    """

    number: str
    values: Array
    steps: Array
    zeros: Array | None = None
    unit: float = 0.0

    @cached_property
    def matrix(self) -> WeightNumbers:
        """The same with all axes behind the first as one."""
        if self.values.ndim == 2:
            return self
        rows = len(self.values)

        def flat(side: Array) -> Array:
            if side.size in (1, rows):
                return side.reshape(-1, 1)
            return spread(side, self.values.shape).reshape(rows, -1)

        zeros = None if self.zeros is None else flat(self.zeros)
        return WeightNumbers(self.number, self.values.reshape(rows, -1), flat(self.steps), zeros, self.unit)

    @cached_property
    def levels(self) -> Array:
        """All numbers that there are, ascending."""
        return np.array(levels_of(self.number))

    @cached_property
    def wide_steps(self) -> Array:
        """The step of each element."""
        return spread(self.steps, self.values.shape)

    @cached_property
    def wide_zeros(self) -> Array | float:
        """The zero point of each element."""
        return 0.0 if self.zeros is None else spread(self.zeros, self.values.shape)

    def in_steps(self, values: Array) -> Array:
        """Return values in units of the steps, as numbers that are not rounded."""
        steps = np.where(self.wide_steps == 0, np.inf, self.wide_steps)
        whole: Array = values / steps + self.wide_zeros
        return whole

    @cached_property
    def numbers(self) -> Array:
        """The number of each element."""
        return self.in_steps(self.values)

    @cached_property
    def places(self) -> Array:
        """The place of each number among `levels`."""
        if self._is_whole:
            places: Array = np.floor(self.numbers + (0.5 - self.levels[0]))
            return np.clip(places, 0, len(self.levels) - 1).astype(np.intp)
        at = np.searchsorted(self.levels, self.numbers)
        at = np.clip(at, 1, len(self.levels) - 1)
        return at - (self.numbers - self.levels[at - 1] < self.levels[at] - self.numbers)

    @property
    def _is_whole(self) -> bool:
        """Whether the levels are whole numbers, one after the other."""
        return self.number.startswith(("int", "uint"))

    def in_parts(self, size: int = 0) -> Iterator[tuple[slice, WeightNumbers]]:
        """Yield rows after rows, so many or those of a few million elements, with the rows that they are."""
        rows = len(self.values)
        size = size or max(1, _BLOCK * rows // max(1, self.values.size))
        for start in range(0, rows, size):
            part = slice(start, min(start + size, rows))
            yield part, self.at(part)

    def at(self, rows: slice | Array) -> WeightNumbers:
        """The same of some rows."""
        if isinstance(rows, slice) and rows == slice(None):
            return self
        zeros = None if self.zeros is None else self._blocks_at(self.zeros, rows)
        return WeightNumbers(
            self.number, self.values[rows], self._blocks_at(self.steps, rows), zeros, self.unit
        )

    def _blocks_at(self, blocks: Array, rows: slice | Array) -> Array:
        """Numbers of blocks, for each of some rows if they are not the same for all."""
        if len(blocks) == 1:
            return blocks
        whole = len(self.values)
        if len(blocks) < whole:
            blocks = np.repeat(blocks, _block(len(blocks), whole), axis=0)[:whole]
        return blocks[rows]

    @property
    def are_on_levels(self) -> bool:
        """Whether the values are numbers of the format, times these steps, rounded to `unit`."""
        gaps = np.diff(self.levels).min()
        _, part = next(self.in_parts())
        numbers = part.numbers
        slack = _SLACK + max(self.unit, 1e-6) * np.abs(numbers)
        off = np.abs(numbers - self.levels[part.places])
        return bool((off <= slack * np.maximum(gaps, np.abs(numbers) * 1e-3)).mean() > 0.99)

    @cached_property
    def halves(self) -> tuple[Array, Array]:
        """Half the distance of each number to the next below and above; of the ends that to the other one."""
        if self._is_whole:
            half: Array = np.broadcast_to(0.5, self.values.shape)
            return half, half
        gaps = np.diff(self.levels) / 2
        below, above = np.append(gaps[0], gaps), np.append(gaps, gaps[-1])
        if self.number == "MXFP4":  # whose largest values are cut from up to 8 (6.3 of the specification)
            below[0] = above[-1] = 2.0
        return below[self.places], above[self.places]

    @cached_property
    def variances(self) -> Array:
        """The mean squared error of each element that rounding to the nearest number makes, in its own unit.

        What is rounded to a number is spread evenly from halfway to the next one below to halfway above. A
        step that was rounded is off by up to its unit, for all that share it.
        """
        below, above = self.halves
        variances: Array = (below**3 + above**3) / (3 * (below + above)) * self.wide_steps**2
        return variances + np.square(self.unit * self.values)

    def misses(self, reference: Array) -> tuple[Array, Array, Array]:
        """Find the elements whose number is not the nearest to the reference's.

        Args:
            reference: float64, in the shape of the weight.

        Returns:
            How many steps the reference's lies from each number; whether it is nearer to the next number
            below, and to the next above, by more than rounding of a scale may put it.
        """
        off = self.in_steps(reference) - self.numbers
        below, above = self.halves
        slack = _SLACK * (below + above)
        return off, off < -below - slack, off > above + slack

    @property
    def scope(self) -> str:
        """What shares a scale, in words.

        Example:
            >>> WeightNumbers("int8", np.zeros((4, 64)), np.ones((4, 2))).scope
            '32 values'
        """
        shape, counts = self.values.shape, self.steps.shape
        if self.steps.size == 1:
            return "the whole tensor"
        sizes = [whole // count if count else whole for whole, count in zip(shape, counts, strict=True)]
        if math.prod(counts[1:]) == 1:
            return "each row" if sizes[0] == 1 else f"{sizes[0]} rows"
        if math.prod(counts[:-1]) == 1:
            return "each column" if sizes[-1] == 1 else f"{sizes[-1]} columns"
        if all(size == 1 for size in sizes):
            return "groups of columns in another order"
        if all(size == 1 for size in sizes[:-1]):
            return f"{sizes[-1]} values"
        return "blocks of " + " x ".join(map(str, sizes))

    @property
    def text(self) -> str:
        """The numbers in words."""
        return f"{self.number} with a scale for {self.scope}"


@dataclass(frozen=True, slots=True)
class Rounding:
    """How the errors of a quantised weight lie to those of rounding to the nearest number.

    Attributes:
        ratio: RMS of all errors over what rounding makes; inf if no error may be.
        worst: The largest ratio of a row, a column or a part of a row, over what chance allows it.
        uneven: The same with the errors of columns for which the recorded inputs have less energy than on
            average in proportion to that; as `worst` without inputs.
        cut: Where numbers are the nearest but for values that ranges cut off by choice, what that makes of
            products over what rounding in whole ranges would (`cut_of_choice`); else None.
        clipped: Count of elements that lie beyond the range of numbers.
        is_nearest: Whether each number is the nearest one.
        feedback: RMS of the errors of products with the recorded inputs over what independent errors of
            rounding make of them; None without inputs.
    """

    ratio: float
    worst: float
    clipped: int
    is_nearest: bool
    feedback: float | None = None
    uneven: float = math.inf
    cut: float | None = None

    @property
    def value(self) -> float:
        """The ratio that is judged."""
        if self.is_nearest or self.cut is not None:
            return min(self.ratio, 1.0)
        weights = max(self.ratio, self.worst)
        is_even = self.ratio <= _FEEDBACK and self.uneven <= _EVEN * self.ratio and self.worst <= _MOST
        return min(weights, self.feedback) if self.feedback is not None and is_even else weights


def measure_rounding(reference: Array, weight: WeightNumbers, inputs: Array | None = None) -> Rounding:
    """Measure how a quantised weight lies to the reference's.

    Args:
        reference: float64, in the shape of the weight.
        weight: The target's.
        inputs: What the layer was given, `[rows, inputs]`, float64, if all of it goes into each output.
    """
    ends = len(weight.levels) - 1
    columns = reference.size // max(1, len(reference))
    totals, by_column = np.zeros(2), np.zeros((2, columns))
    beyond, is_nearest, worst = 0, True, 0.0
    made, independent = [], []
    energy, portions, uneven = None, np.ones(columns), 0.0
    if inputs is not None and inputs.shape[-1] == columns:
        energy = np.square(inputs).sum(axis=0)
        portions = np.minimum(1.0, energy / max(float(energy.mean()), 1e-300))
    for part, rows in weight.in_parts():
        errors = rows.values - reference[part]
        _, is_below, is_above = rows.misses(reference[part])
        is_nearest &= not (is_above.any() or is_below.any())
        beyond += int((is_above & (rows.places == ends)).sum() + (is_below & (rows.places == 0)).sum())
        sides = [side.reshape(len(errors), -1) for side in (np.square(errors), rows.variances)]
        totals += [side.sum() for side in sides]
        by_column += [side.sum(axis=0) for side in sides]
        worst = max(worst, _worst_part(*sides))
        uneven = max(uneven, _worst_part(sides[0] * portions, sides[1]))
        if energy is not None and inputs is not None:
            made.append(np.square(inputs @ errors.reshape(len(errors), -1).T).sum(axis=0))
            independent.append(sides[1] @ energy)
    worst = max(worst, _worst_of(by_column[0], by_column[1], len(reference)))
    uneven = max(uneven, _worst_of(by_column[0] * portions, by_column[1], len(reference)))
    feedback = None
    if energy is not None and inputs is not None:
        outputs, expected = np.concatenate(made), np.concatenate(independent)
        ratios = np.sqrt(outputs / np.maximum(expected, 1e-300)) / chance_of_rows(inputs)
        feedback = max(_ratio(outputs.sum(), expected.sum()), float(ratios.max(initial=0.0)))
    return Rounding(_ratio(*totals), worst, beyond, is_nearest, feedback, uneven)


def is_wide_step(reference: Array, values: Array, steps: Array, products: Array | None = None) -> bool:
    """Whether these are the steps of numbers of 16 bits or more that stand for a tensor.

    The target's values are whole numbers of them. And they are finer than those of 8 bits, for which nobody
    takes wide numbers; or, of a bias, each is that of the sums it is added to: that of inputs times weights.

    Args:
        reference: float64.
        values: The target's, likewise.
        steps: What its numbers are multiplied by, one for each block.
        products: The step of inputs times those of weights, `[outputs]` or `[1]`; None if it is not known.

    Example:
        >>> bias = np.array([0.5, -0.25])
        >>> [is_wide_step(bias, np.rint(bias / s) * s, np.array([s])) for s in (1e-3, 0.1, 10.0)]
        [True, False, False]
        >>> is_wide_step(bias, np.array([0.5, -0.2]), np.array([0.1]), products=np.array([0.1]))
        True
    """
    wide = spread(steps, values.shape)
    if not (wide > 0).all():
        return False
    if not are_whole(values / wide).all():
        return False
    if wide.max(initial=0.0) <= np.abs(reference).max(initial=0.0) / _BYTE:
        return True
    if products is None or products.size not in (1, wide.size):
        return False
    return bool(np.allclose(wide.reshape(-1), products, rtol=_EQUAL_STEPS, atol=0))


def are_whole(numbers: Array) -> Array:
    """Whether each is a whole number, but for rounding of a scale and of values in float32.

    Example:
        >>> are_whole(np.array([3.0, -2.01, 0.5])).tolist()
        [True, True, False]
    """
    slack = _SLACK + 2 * UNIT_ROUNDOFFS["float32"] * np.abs(numbers)
    is_whole: Array = np.abs(numbers - np.rint(numbers)) <= slack
    return is_whole


def measure_wide(reference: Array, values: Array, steps: Array) -> Rounding:
    """Measure how numbers of 16 bits or more lie to the reference's, none of which is cut off.

    Args:
        reference: float64.
        values: The target's, likewise.
        steps: What its numbers are multiplied by, one for each block.
    """
    wide = spread(steps, values.shape)
    errors = values - reference
    slack = _SLACK * wide + UNIT_ROUNDOFFS["float32"] * np.abs(reference)
    is_nearest = bool((np.abs(errors) <= wide / 2 + slack).all())
    return Rounding(
        _ratio(float(np.square(errors).sum()), float(np.square(wide).sum() / 12)), 0.0, 0, is_nearest
    )


def chance_of(count: int) -> float:
    """How many times what is expected the RMS of so many errors may be by chance."""
    return math.sqrt(1 + _SPREAD / math.sqrt(max(1, count)))


def chance_of_rows(x: Array) -> float:
    """How many times what is expected the RMS of one output may be by chance, of weights with unknown errors.

    It is a sum of squares along the directions that rows lie in, (tr G)^2 / |G|^2 by energy, of G = x x'. Of
    few the tail is that of chi-squared, 1 + 2 sqrt(t / n) + 2 t / n (Laurent and Massart, 2000, lemma 1).

    Args:
        x: What a layer was given, `[rows, inputs]`.
    """
    gram = x @ x.T
    count = max(1.0, float(np.trace(gram) ** 2 / max(float(np.square(gram).sum()), 1e-300)))
    return math.sqrt(1 + 2 * math.sqrt(_TAIL / count) + 2 * _TAIL / count)


def _ratio(squares: float, expected: float) -> float:
    if expected > 0:
        return float(np.sqrt(squares / expected))
    return math.inf if squares > 0 else 0.0


def _worst_part(squares: Array, expected: Array) -> float:
    """The largest ratio of a row, or of neighbours in a row, over what chance allows so few."""
    worst = _worst_of(squares.sum(axis=1), expected.sum(axis=1), squares.shape[1])
    if squares.shape[1] % _PART:
        return worst
    made, wanted = (side.reshape(-1, _PART).sum(axis=1) for side in (squares, expected))
    return max(worst, _worst_of(made, wanted, _PART))


def _worst_of(made: Array, wanted: Array, count: int) -> float:
    """The largest ratio of sums of so many squared errors, over what chance allows."""
    if count < _PART:
        return 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(wanted > 0, made / wanted, np.where(made > 0, np.inf, 0.0))
    return math.sqrt(float(ratios.max(initial=0.0))) / chance_of(count)


def spread(blocks: Array, shape: tuple[int, ...]) -> Array:
    """Repeat numbers over the blocks of a tensor that they are of.

    Example:
        >>> spread(np.array([[1.0, 2.0]]), (1, 4)).tolist()
        [[1.0, 1.0, 2.0, 2.0]]
    """
    if blocks.size == 1:
        return np.broadcast_to(blocks.reshape((1,) * len(shape)), shape)
    if blocks.ndim != len(shape):
        blocks = blocks.reshape(-1, *(1,) * (len(shape) - 1))
    for axis, (count, whole) in enumerate(zip(blocks.shape, shape, strict=True)):
        if 1 < count < whole:
            blocks = np.repeat(blocks, _block(count, whole), axis=axis).take(range(whole), axis=axis)
    return np.broadcast_to(blocks, shape)


def _block(count: int, whole: int) -> int:
    """How many elements of an axis a block has; the last may be cut."""
    if whole % count == 0:
        return whole // count
    return next((size for size in (128, 64, 32) if -(-whole // size) == count), -(-whole // count))


def find_numbers(values: Array) -> WeightNumbers | None:
    """Find the numbers of a weight that does not say them, from its values alone.

    Values that may share a scale have few distinct ones, which are whole numbers of one step apart: all, each
    row, each column, or groups of 256 to 16 neighbours. The step is the smallest distance between two, or a
    half, third or quarter of that.

    Args:
        values: float64, two axes or more.

    Returns:
        Numbers of as few bits as possible, 4 or 8, with their zero points; None if none fit.
    """
    if values.ndim < 2 or values.size < 4 * _PART or not np.isfinite(values).all():
        return None
    for bits in (4, 8):
        for rows, shape, is_transposed in _groupings(values):
            if common_steps(rows[:_FEW, :_SAMPLE], 2**bits - 1) is None:
                continue
            steps = common_steps(rows, 2**bits - 1)
            if steps is None:
                continue
            low, high = (np.rint(ends / steps) for ends in (rows.min(axis=1), rows.max(axis=1)))
            half = 2 ** (bits - 1)
            is_signed = bool((low >= -half).all() and (high < half).all())
            sides = [side.reshape(shape) for side in (steps, -low)]
            own_steps, zeros = (side.T for side in sides) if is_transposed else sides
            return WeightNumbers(
                f"int{bits}" if is_signed else f"uint{bits}", values, own_steps, None if is_signed else zeros
            )
    return None


def unit_of(values: Array) -> float:
    """The unit roundoff of the narrowest dtype that holds values; 0 if that is float32 or wider.

    Example:
        >>> unit_of(np.array([0.5, 0.0078125])) == 2.0**-8, unit_of(np.array([0.1]))
        (True, 0.0)
    """
    bits = values.astype(np.float32).view(np.uint32)
    if not (values == values.astype(np.float32)).all():
        return 0.0
    for name, low in (("bfloat16", 16), ("float16", 13)):
        if not (bits & ((1 << low) - 1)).any():
            return UNIT_ROUNDOFFS[name]
    return 0.0


def _groupings(values: Array) -> Iterator[tuple[Array, tuple[int, ...], bool]]:
    """Values that may share a scale as rows, the shape of their scales, and whether rows are columns."""
    ones = (1,) * values.ndim
    yield values.reshape(1, -1), ones, False
    yield values.reshape(len(values), -1), (len(values), *ones[1:]), False
    if values.ndim != 2:
        return
    yield values.T, (values.shape[1], 1), True
    for size in (256, 128, 64, 32, 16):
        for side, is_transposed in ((values, False), (values.T, True)):
            count = side.shape[1] // size
            if side.shape[1] % size == 0 and count > 1:
                yield side.reshape(-1, size), (len(side), count), is_transposed


def common_steps(rows: Array, most: int) -> Array | None:
    """Return the step of each row that its values are whole numbers of, at most so many apart.

    None if a row has none.
    """
    ordered = np.sort(rows, axis=1)
    gaps = np.diff(ordered, axis=1)
    largest = np.abs(rows).max(axis=1)
    gaps[gaps <= 1e-5 * largest[:, None]] = np.inf
    least = gaps.min(axis=1, initial=np.inf)
    is_varied = np.isfinite(least)
    if not is_varied.any():
        return None
    steps = np.where(is_varied, least, np.nan)
    is_open = is_varied.copy()
    for divisor in (1, 2, 3, 4):
        tried = steps[is_open] / divisor
        numbers = rows[is_open] / tried[:, None]
        fits = are_whole(numbers).all(axis=1)
        fits &= np.rint(numbers.max(axis=1) - numbers.min(axis=1)) <= most
        places = np.flatnonzero(is_open)[fits]
        steps[places] = tried[fits]
        is_open[places] = False
    if is_open.any():
        return None
    steps[~is_varied] = np.median(steps[is_varied])
    return steps
