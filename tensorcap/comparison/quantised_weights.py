"""The precision of a target whose weights are whole numbers: what their rounding does to results (POL-4)."""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import replace
from typing import Final

from tensorcap.comparison.policy import POLICY, Precision
from tensorcap_formats.float_formats import UNIT_ROUNDOFFS
from tensorcap_formats.records import Record
from tensorcap_formats.run_info import ModuleInfo, RunInfo, TensorInfo

_BITS: Final[Mapping[str, int]] = {"int8": 8, "uint8": 8, "int32": 32}  # dtypes that hold packed weights
_BYTES: Final = ("int8", "uint8")
_COMMON: Final = (8, 4, 3, 2)  # bits of a weight
_MATRIX: Final = 2  # axes
_PEAK: Final = 4.0  # largest weight of a group over their RMS: of 64 to 16,384 normal values 2.5 to 4.2


def quantised_precision(
    reference: RunInfo, target: RunInfo, precision: Precision, records: Collection[Record] = ()
) -> Precision:
    """Return the precision that a target with quantised weights can agree in; the runs' own without any.

    A weight of b bits is rounded to `2^(b - 1) - 1` steps of its group's largest value, with an error that is
    spread evenly over a step: an RMS of `step / sqrt(12)`, which a matrix product hands on whole. It counts
    for what such a module makes, and for what comes after that in the same step.

    Args:
        reference: What the reference's metadata say.
        target: What the target's metadata say, with sites under the reference's names.
        precision: What both runs computed in.
        records: The reference's, if they have an order of execution; without them it counts everywhere.
    """
    bits = quantised_bits(reference, target)
    if not bits:
        return precision
    rounded = precision_of_bits(precision, min(bits.values()))
    if not rounded.weights:
        return precision
    return replace(rounded, weights_from=_first_results(records, bits))


def precision_of_bits(precision: Precision, bits: int) -> Precision:
    """Return the precision of a product with weights of some bits; the given one if that is coarser."""
    rounding = _PEAK / ((2 ** (bits - 1) - 1) * math.sqrt(12))
    if rounding <= precision.rounding:
        return precision
    return replace(
        precision, unit=rounding / POLICY.rounding, rounding=rounding, weights=f"int{bits}", weights_from=()
    )


def quantised_bits(reference: RunInfo, target: RunInfo) -> dict[str, int]:
    """Return the bits of each weight of the target that holds whole numbers in the place of floats, by site.

    Args:
        reference: What the reference's metadata say.
        target: What the target's metadata say, with sites under the reference's names.
    """
    return dict(_quantised_bits(reference, target))


def _first_results(records: Collection[Record], sites: Collection[str]) -> tuple[tuple[int, int], ...]:
    """By step, when the first of some modules gave a result; nothing if one of them never did."""
    first: dict[int, int] = {}
    called = set()
    for record in records:
        if record.key.slot.startswith("output") and record.key.site in sites:
            called.add(record.key.site)
            first[record.key.step] = min(record.order, first.get(record.key.step, record.order))
    return tuple(first.items()) if all(site in called for site in sites) else ()


def _quantised_bits(reference: RunInfo, target: RunInfo) -> Iterator[tuple[str, int]]:
    """Yield site and bits of each weight of the target that holds whole numbers in the place of floats.

    A table of indices beside a weight is none, nor is one in a module that has no weight.
    """
    for site, module in target.modules.items():
        integers = max(map(_bits_held, _matrices(module, _BITS)), default=0)
        floats = max(map(_count, _matrices(module, UNIT_ROUNDOFFS)), default=0)
        if site in reference.modules:
            trusted = reference.modules[site]
            count = max(map(_count, _matrices(trusted, UNIT_ROUNDOFFS)), default=0)
            if integers and floats < count and not any(_matrices(trusted, _BITS)):
                yield site, min(_COMMON, key=lambda bits: abs(bits - integers / count))
        elif any(_matrices(module, _BYTES)) and floats < integers / _COMMON[0]:
            yield site, _COMMON[0]


def _matrices(module: ModuleInfo, dtypes: Container[str]) -> Iterator[TensorInfo]:
    """Yield the tensors of a module of two axes or more in some dtypes."""
    for tensor in (*module.parameters.values(), *module.buffers.values()):
        if tensor.dtype in dtypes and len(tensor.shape or ()) >= _MATRIX:
            yield tensor


def _count(tensor: TensorInfo) -> int:
    return math.prod(tensor.shape or ())


def _bits_held(tensor: TensorInfo) -> int:
    return _count(tensor) * _BITS[tensor.dtype]
