"""Parameters and buffers: no results of a computation, so that nothing but their own rounding is allowed."""

from __future__ import annotations

from tensorcap.metrics.difference import Difference, Tolerance
from tensorcap.verdicts.pair import Finding, Pair
from tensorcap.verdicts.places import is_parameter
from tensorcap_formats.dtypes import DType
from tensorcap_formats.float_formats import DTYPE_FORMATS, UNIT_ROUNDOFFS
from tensorcap_formats.records import Record


def rounding_of(ours: Record, theirs: Record) -> Tolerance | None:
    """What one rounding to the coarser dtype of a parameter's two records may do to an element.

    Returns:
        None for records that are no parameters; a tolerance of nothing where the dtypes are the same.
    """
    if not is_parameter(ours.key):
        return None
    coarse = coarser(ours.dtype, theirs.dtype)
    if coarse is None or ours.dtype.name == theirs.dtype.name:
        return Tolerance(0.0, 0.0)
    form = DTYPE_FORMATS[coarse.name]
    return Tolerance(form.unit_roundoff, form.smallest / 2)


def same_numbers(pair: Pair, found: Difference) -> Finding:
    """Judge a parameter that was measured with the tolerance of its rounding (POL-28)."""
    unlike = found.unequal if found.mismatches is None else found.mismatches
    text = f"{unlike} of {found.measured} numbers that the model holds are not those of the reference"
    if pair.reference and pair.target and pair.reference.dtype.name != pair.target.dtype.name:
        coarse = coarser(pair.reference.dtype, pair.target.dtype)
        text += f", rounded to {coarse.name}" if coarse else ""
    return Finding("parameter", unlike, 0, "diverged" if unlike else "within-rounding", text)


def coarser(one: DType, other: DType) -> DType | None:
    """The one of two dtypes that rounds more; None where one does not round floats."""
    if one.name not in UNIT_ROUNDOFFS or other.name not in UNIT_ROUNDOFFS:
        return None
    return max((one, other), key=lambda dtype: UNIT_ROUNDOFFS[dtype.name])
