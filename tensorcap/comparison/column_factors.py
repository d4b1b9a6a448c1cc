"""Columns of a weight that were multiplied by numbers before it was rounded, as AWQ and SmoothQuant do.

The layer's input is divided by the same numbers: by the norm that makes it, or by the layer itself. Read
`column_factors`, then `undone_by`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tensorcap.comparison.layer_products import BIAS, Call, Product, floats_of, parameters_of
from tensorcap.comparison.weight_rounding import WeightNumbers
from tensorcap.runs import contents_of
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array

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
    reference: Archive,
    target: Archive,
    site: str,
    weight: Array,
    rounded: WeightNumbers,
    products: Sequence[Product],
    calls: Mapping[tuple[int, int, int], Call],
) -> Iterator[Factors]:
    """Yield what columns may have been multiplied by: what fits, a norm has lost, or the layer holds."""
    if not products or products[0].x.shape[1] != weight.shape[1]:
        return
    fitted = _fitted_factors(weight, rounded, products[0])
    if fitted is not None:
        yield Factors(fitted)
    inputs = {contents_of(call.input) for call in calls.values()}
    makers = {
        record.key.site
        for record in reference.records
        if record.digest and record.key.slot.startswith("output") and contents_of(record) in inputs
    }
    ours, theirs = (parameters_of(archive, makers) for archive in (reference, target))
    for name, record in ours.items():
        other = theirs.get(name)
        if other is not None and record.size == other.size == weight.shape[1]:
            sides = floats_of(reference, record), floats_of(target, other)
            if sides[0] is not None and sides[1] is not None and (sides[0] * sides[1]).all():
                yield Factors((sides[0] / sides[1]).reshape(-1))
    for (_, slot), record in parameters_of(target, {site}).items():
        if record.size == weight.shape[1] and slot not in (BIAS, "param.weight"):
            values = floats_of(target, record)
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


def undone_by(
    reference: Archive, target: Archive, site: str, calls: Iterable[Call], factors: Array
) -> dict[str, str]:
    """Which tensors differ because they are made of a scaled input: it, what holds it, and what scaled it."""
    reason = f"its columns are divided by what those of the weight of {site} were multiplied by"
    inputs = {contents_of(call.input) for call in calls}
    alike = [r for r in reference.records if r.digest and contents_of(r) in inputs]
    undone = {record.key.text: reason for record in alike}
    undone |= {call.input.key.text: reason for call in calls}
    makers = {record.key.site for record in alike if record.key.slot.startswith("output")}
    ours, theirs = (parameters_of(archive, makers) for archive in (reference, target))
    for name, record in ours.items():
        other = theirs.get(name)
        if other is None or record.shape != other.shape or record.size != factors.size:
            continue
        sides = floats_of(reference, record), floats_of(target, other)
        if sides[0] is None or sides[1] is None:
            continue
        wanted = sides[0].reshape(-1) * factors
        if np.linalg.norm(sides[1].reshape(-1) - wanted) <= _ALIKE * np.linalg.norm(wanted):
            undone[record.key.text] = reason
    return undone
