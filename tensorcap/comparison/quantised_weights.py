"""The precision of a target whose weights are whole numbers: what their rounding does to results (POL-4)."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from typing import Final

from tensorcap.comparison.policy import POLICY, Precision
from tensorcap_formats.float_formats import UNIT_ROUNDOFFS
from tensorcap_formats.run_info import ModuleInfo, RunInfo, TensorInfo

_BITS: Final[Mapping[str, int]] = {"int8": 8, "uint8": 8, "int32": 32}  # dtypes that hold packed weights
_BYTES: Final = ("int8", "uint8")
_COMMON: Final = (8, 4, 3, 2)  # bits of a weight
_MATRIX: Final = 2  # axes
_PEAK: Final = 4.0  # largest weight of a group over their RMS: of 64 to 16,384 normal values 2.5 to 4.2


def quantised_precision(reference: RunInfo, target: RunInfo, precision: Precision) -> Precision:
    """Return the precision that a target with quantised weights can agree in; the runs' own without any.

    A weight of b bits is rounded to `2^(b - 1) - 1` steps of its group's largest value, with an error that is
    spread evenly over a step: an RMS of `step / sqrt(12)`, which a matrix product hands on whole.

    Args:
        reference: What the reference's metadata say.
        target: What the target's metadata say, with sites under the reference's names.
        precision: What both runs computed in.
    """
    bits = min(_quantised_bits(reference, target), default=None)
    if bits is None:
        return precision
    rounding = _PEAK / ((2 ** (bits - 1) - 1) * math.sqrt(12))
    if rounding <= precision.rounding:
        return precision
    return replace(precision, unit=rounding / POLICY.rounding, rounding=rounding, weights=f"int{bits}")


def _quantised_bits(reference: RunInfo, target: RunInfo) -> Iterator[int]:
    """Yield the bits of each weight of the target that holds whole numbers in the place of floats.

    A table of indices beside a weight is none, nor is one in a module that has no weight.
    """
    for site, module in target.modules.items():
        integers = max(map(_bits_held, _matrices(module, _BITS)), default=0)
        floats = max(map(_count, _matrices(module, UNIT_ROUNDOFFS)), default=0)
        if site in reference.modules:
            trusted = reference.modules[site]
            count = max(map(_count, _matrices(trusted, UNIT_ROUNDOFFS)), default=0)
            if integers and floats < count and not any(_matrices(trusted, _BITS)):
                yield min(_COMMON, key=lambda bits: abs(bits - integers / count))
        elif any(_matrices(module, _BYTES)) and floats < integers / _COMMON[0]:
            yield _COMMON[0]


def _matrices(module: ModuleInfo, dtypes: Container[str]) -> Iterator[TensorInfo]:
    """Yield the tensors of a module of two axes or more in some dtypes."""
    for tensor in (*module.parameters.values(), *module.buffers.values()):
        if tensor.dtype in dtypes and len(tensor.shape or ()) >= _MATRIX:
            yield tensor


def _count(tensor: TensorInfo) -> int:
    return math.prod(tensor.shape or ())


def _bits_held(tensor: TensorInfo) -> int:
    return _count(tensor) * _BITS[tensor.dtype]
