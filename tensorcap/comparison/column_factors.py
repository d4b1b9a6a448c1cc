"""Columns of a weight that were multiplied by numbers before it was rounded, as AWQ and SmoothQuant do.

The layer's input is divided by the same numbers: by the norm that makes it, or by the layer itself. Read
`column_factors`, then `undone_by`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tensorcap.comparison.layer_products import BIAS, Product, floats_of
from tensorcap.comparison.record_index import RecordIndex
from tensorcap.comparison.weight_rounding import WeightNumbers
from tensorcap_formats.dtypes import Array
from tensorcap_formats.records import Record

_ALIKE: Final = 0.1  # by which fitted factors may be off, relative
_MOST: Final = 0.98  # of the columns have to have such factors
_LEFT: Final = 0.5  # of how inputs differ, that factors may leave


@dataclass(frozen=True, slots=True)
class Factors:
    """Numbers that columns of a weight may have been multiplied by before it was rounded, `[inputs]`.

    Attributes:
        factors: The numbers.
        is_inside: Whether the layer itself divides its input by them, and not what it is given by.
    """

    factors: Array
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
    """Yield what columns may have been multiplied by: what fits, a norm has lost, or the layer holds.

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
    fitted = _fitted_factors(trusted, weight, products[0])
    if fitted is not None:
        yield Factors(fitted)
    for ours, theirs in _parameters_of_makers(reference, target, inputs):
        if ours.size == theirs.size == columns:
            sides = floats_of(reference.archive, ours), floats_of(target.archive, theirs)
            if sides[0] is not None and sides[1] is not None and (sides[0] * sides[1]).all():
                yield Factors((sides[0] / sides[1]).reshape(-1))
    for slot, record in target.parameters(site).items():
        if record.size == columns and slot not in (BIAS, "param.weight"):
            values = floats_of(target.archive, record)
            if values is not None and values.all():
                yield Factors(values.reshape(-1), is_inside=True)
                yield Factors(1 / values.reshape(-1), is_inside=True)


def _fitted_factors(reference: Array, weight: WeightNumbers, product: Product) -> Array | None:
    """The numbers that columns of a weight were multiplied by before it was rounded; None if there are none.

    They are fitted to the weight, by least squares, and have to be those that the input's columns were
    divided by.
    """
    sizes = np.square(product.given).sum(axis=0), np.square(reference).sum(axis=0)
    if not (sizes[0] > 0).all() or not (sizes[1] > 0).all():
        return None
    divided: Array = (product.x * product.given).sum(axis=0) / sizes[0]
    factors: Array = (weight.values * reference).sum(axis=0) / sizes[1]
    rest = float(np.linalg.norm(product.x - product.given * divided))
    is_other = np.abs(factors - 1) > _ALIKE
    is_known = rest <= _LEFT * float(np.linalg.norm(product.x - product.given)) and is_other.mean() > 0.5
    is_inverse = np.abs(factors * divided - 1) <= _ALIKE
    return factors if is_known and is_inverse.mean() >= _MOST else None


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


def undone_by(
    reference: RecordIndex, target: RecordIndex, site: str, inputs: Collection[Record], factors: Array
) -> dict[str, str]:
    """Which tensors differ because they are made of a scaled input: it, what holds it, and what scaled it.

    Args:
        reference: The trusted archive's records.
        target: Those of the archive under test, under the reference's keys.
        site: That of the layer that is given the input.
        inputs: What the reference's layer was given.
        factors: What columns of the input are multiplied by, `[inputs]`.

    Returns:
        A reason for each, by key text.

    Raises:
        OSError, ReadError: A parameter cannot be read.
    """
    reason = f"its columns are divided by what those of the weight of {site} were multiplied by"
    undone = {record.key.text: reason for given in inputs for record in (given, *reference.holders(given))}
    scaled = _scaled_parameters(reference, target, inputs, factors)
    return undone | dict.fromkeys((record.key.text for record in scaled), reason)


def has_divided_maker(
    reference: RecordIndex, target: RecordIndex, inputs: Iterable[Record], factors: Array
) -> bool:
    """Whether a parameter of what makes a layer's input is divided by numbers, `[inputs]`, as gains are.

    Raises:
        OSError, ReadError: A parameter cannot be read.
    """
    return any(True for _ in _scaled_parameters(reference, target, inputs, 1 / factors))


def _scaled_parameters(
    reference: RecordIndex, target: RecordIndex, inputs: Iterable[Record], factors: Array
) -> Iterator[Record]:
    """Yield the reference's parameters of modules that make an input, of which the target's are a product."""
    for ours, theirs in _parameters_of_makers(reference, target, inputs):
        if ours.shape != theirs.shape or ours.size != factors.size:
            continue
        sides = floats_of(reference.archive, ours), floats_of(target.archive, theirs)
        if sides[0] is None or sides[1] is None:
            continue
        own, made = sides[0].reshape(-1), sides[1].reshape(-1)
        for shift in (0.0, 1.0):  # of gains that are added to 1
            wanted = (own + shift) * factors - shift
            if np.linalg.norm(made - wanted) <= _ALIKE * np.linalg.norm(wanted - own):
                yield ours
                break


def is_divided_by(product: Product, factors: Array) -> bool:
    """Whether what a layer is given is the reference's with its columns divided by numbers, `[inputs]`."""
    if product.x.shape[1] != len(factors):
        return False
    rest = float(np.linalg.norm(product.x * factors - product.given))
    return rest <= _LEFT * float(np.linalg.norm(product.x - product.given))


def columns_of_inputs(product: Product) -> str:
    """What columns of an input are beside the reference's, as the end of a sentence."""
    sizes = np.square(product.given).sum(axis=0)
    factors = (product.x * product.given).sum(axis=0)[sizes > 0] / sizes[sizes > 0]
    if np.isclose(factors, 1, atol=_ALIKE).all():
        return ", and its input is not divided by these"
    low, high = factors.min(initial=1.0), factors.max(initial=1.0)
    return f", and the columns of its input are those of the reference times {low:.3g} to {high:.3g}"
