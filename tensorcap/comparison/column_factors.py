"""Columns of a weight that were multiplied by numbers before it was rounded, as AWQ and SmoothQuant do.

The layer's input is divided by the same numbers: by the norm that makes it, or by the layer itself. Read
`column_factors`, then `divided_tensors` and `divided_parameters`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tensorcap.comparison.layer_products import BIAS, Product, floats_of
from tensorcap.comparison.record_index import RecordIndex
from tensorcap.comparison.weight_rounding import WeightNumbers
from tensorcap.runs import BESIDE_WEIGHT
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.records import Record

_ALIKE: Final = 0.1  # by which fitted factors may be off, relative
_MOST: Final = 0.98  # of the columns have to have such factors
_LEFT: Final = 0.5  # of how inputs differ, that factors may leave
_CLIPPED: Final = 0.03  # by which values that are cut off a weight put its factors off, relative
_DEVIATIONS: Final = 4.0  # standard ones, that half of the factors of a weight and an input may be apart
_FAR: Final = 10.0  # the same, of one: of numbers that are nearly all 0 rounding is not even


@dataclass(frozen=True, slots=True)
class Factors:
    """Numbers that columns of a weight may have been multiplied by before it was rounded, `[inputs]`.

    Attributes:
        factors: The numbers.
        divisors: What columns of its input are divided by: the same, as the input itself has them if these
            are equal but for what fits are off by.
        is_inside: Whether the layer itself divides its input by them, and not what it is given by.
    """

    factors: Array
    divisors: Array
    is_inside: bool = False


def column_factors(
    reference: RecordIndex,
    target: RecordIndex,
    site: str,
    trusted: Array,
    weight: WeightNumbers,
    products: Sequence[Product],
    inputs: Collection[Record],
) -> Iterator[Factors]:
    """Yield what columns may have been multiplied by: what a norm has lost, what fits, or the layer holds.

    Args:
        reference: The trusted archive's records.
        target: Those of the archive under test, under the reference's keys.
        site: That of the layer.
        trusted: The reference's weight, `[outputs, inputs]`, float64.
        weight: The target's.
        products: The layer's calls.
        inputs: What the reference's layer was given in these.

    Raises:
        OSError, ReadError: A parameter cannot be read.
    """
    columns = trusted.shape[1]
    if not products or products[0].x.shape[1] != columns:
        return
    for ours, theirs in _parameters_of_makers(reference, target, inputs):
        if ours.size == theirs.size == columns:
            sides = floats_of(reference.archive, ours), floats_of(target.archive, theirs)
            if sides[0] is not None and sides[1] is not None and (sides[0] * sides[1]).all():
                lost = (sides[0] / sides[1]).reshape(-1)
                if (lost != 1).any():
                    yield Factors(lost, lost)
    fitted = _fitted_factors(trusted, weight, products[0])
    if fitted is not None:
        yield fitted
    for slot, record in target.parameters(site).items():
        if record.size == columns and slot not in (BIAS, "param.weight") and not slot.endswith(BESIDE_WEIGHT):
            values = floats_of(target.archive, record)
            if values is not None and values.all():
                for factors in (values.reshape(-1), 1 / values.reshape(-1)):
                    yield Factors(factors, factors, is_inside=True)


def _fitted_factors(reference: Array, weight: WeightNumbers, product: Product) -> Factors | None:
    """The numbers that columns of a weight were multiplied by before it was rounded; None if there are none.

    They are fitted to the weight, by least squares, and have to be those that the input's columns were
    divided by.
    """
    sizes = np.square(product.given).sum(axis=0), np.square(reference).sum(axis=0)
    if not (sizes[0] > 0).all() or not (sizes[1] > 0).all():
        return None
    divided: Array = (product.x * product.given).sum(axis=0) / sizes[0]
    factors: Array = (weight.values * reference).sum(axis=0) / sizes[1]
    left = product.x - product.given * divided
    is_other = np.abs(factors - 1) > _ALIKE
    differs = float(np.linalg.norm(product.x - product.given))
    is_known = float(np.linalg.norm(left)) <= _LEFT * differs and is_other.mean() > 0.5
    off = np.abs(factors * divided - 1)
    if not is_known or (off <= _ALIKE).mean() < _MOST:
        return None
    deviations = (  # of slopes fitted by least squares, relative
        np.sqrt((weight.variances * np.square(reference)).sum(axis=0)) / sizes[1] * np.abs(divided),
        np.sqrt(np.square(left).sum(axis=0) / len(left) / sizes[0]) * np.abs(factors),
    )
    deviation = np.hypot(*deviations)
    is_same = (divided != 0) & (off <= np.maximum(_ALIKE, _FAR * deviation))
    is_same &= np.median(off) <= max(_CLIPPED, _DEVIATIONS * float(np.median(deviation)))
    return Factors(factors, np.where(is_same, 1 / np.where(is_same, divided, 1), factors))


def _parameters_of_makers(
    reference: RecordIndex, target: RecordIndex, inputs: Iterable[Record]
) -> Iterator[tuple[Record, Record]]:
    """Yield the parameters of modules that make what a layer is given, of both sides."""
    made = [record for given in inputs for record in reference.holders(given)]
    for site in {record.key.site: None for record in made if record.key.slot.startswith("output")}:
        theirs = target.parameters(site)
        yield from (
            (ours, theirs[slot]) for slot, ours in reference.parameters(site).items() if slot in theirs
        )


def divided_tensors(
    reference: RecordIndex, target: Archive, inputs: Iterable[Record], divisors: Array
) -> Iterator[str]:
    """Yield what a layer was given, and what holds the same in the reference, where the target divides it.

    Most of its elements are nearer to the reference's if its columns are multiplied again: code between a
    norm and the layer may divide what the norm makes.

    Args:
        reference: The trusted archive's records.
        target: The archive under test, under the reference's keys.
        inputs: What the reference's layer was given.
        divisors: What columns may be divided by, `[inputs]`; of a convolution channels, `[channels, 1, …]`.

    Yields:
        Key texts.

    Raises:
        OSError, ReadError: A tensor cannot be read.
    """
    held = {record.key.text: record for given in inputs for record in (given, *reference.holders(given))}
    for key, ours in held.items():
        theirs = target.get(key) if key in target else None
        if theirs is None or theirs.shape != ours.shape or not (ours.stored and theirs.stored):
            continue
        if ours.shape[-divisors.ndim :][:1] != divisors.shape[:1]:
            continue
        x, y = (a.load(r).astype(np.float64) for a, r in ((reference.archive, ours), (target, theirs)))
        errors, whole = np.abs(y - x), np.abs(y * divisors - x)
        if np.count_nonzero(whole < errors) > np.count_nonzero(errors < whole):
            yield key


def divided_parameters(
    reference: RecordIndex, target: RecordIndex, inputs: Iterable[Record], divisors: Array
) -> Iterator[str]:
    """Yield the parameters that scale what a layer is given, as a norm's, where the target divides them.

    Args:
        reference: The trusted archive's records.
        target: Those of the archive under test, under the reference's keys.
        inputs: What the reference's layer was given.
        divisors: What columns of the input are divided by, `[inputs]`.

    Yields:
        Key texts.

    Raises:
        OSError, ReadError: A parameter cannot be read.
    """
    for ours, theirs in _parameters_of_makers(reference, target, inputs):
        if ours.shape != theirs.shape or ours.size != divisors.size:
            continue
        sides = floats_of(reference.archive, ours), floats_of(target.archive, theirs)
        if sides[0] is None or sides[1] is None:
            continue
        own, made = sides[0].reshape(-1), sides[1].reshape(-1)
        for shift in (0.0, 1.0):  # of gains that are added to 1
            wanted = (own + shift) / divisors - shift
            if np.linalg.norm(made - wanted) <= _ALIKE * np.linalg.norm(wanted - own):
                yield ours.key.text
                break


def has_divided_maker(
    reference: RecordIndex, target: RecordIndex, inputs: Iterable[Record], divisors: Array
) -> bool:
    """Whether a parameter of what makes a layer's input is divided by numbers, `[inputs]`, as gains are.

    Raises:
        OSError, ReadError: A parameter cannot be read.
    """
    return any(divided_parameters(reference, target, inputs, divisors))


def is_divided_by(product: Product, divisors: Array) -> bool:
    """Whether what a layer is given is the reference's with its columns divided by numbers, `[inputs]`."""
    if product.x.shape[1] != len(divisors):
        return False
    rest = float(np.linalg.norm(product.x * divisors - product.given))
    return rest <= _LEFT * float(np.linalg.norm(product.x - product.given))


def columns_of_inputs(product: Product) -> str:
    """What columns of an input are beside the reference's, as the end of a sentence."""
    sizes = np.square(product.given).sum(axis=0)
    factors = (product.x * product.given).sum(axis=0)[sizes > 0] / sizes[sizes > 0]
    if np.isclose(factors, 1, atol=_ALIKE).all():
        return ", and its input is not divided by these"
    low, high = factors.min(initial=1.0), factors.max(initial=1.0)
    return f", and the columns of its input are those of the reference times {low:.3g} to {high:.3g}"
