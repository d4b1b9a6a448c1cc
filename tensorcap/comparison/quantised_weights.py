"""The precision of a target whose weights are whole numbers: what their rounding does to results (POL-4)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from tensorcap.comparison.policy import POLICY, Precision
from tensorcap_formats.run_info import ModuleInfo, RunInfo, TensorInfo

_BITS: Final[Mapping[str, int]] = {"int8": 8, "uint8": 8, "int16": 16, "int32": 32, "int64": 64}
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
    """Yield the bits of each weight of the target that holds whole numbers, and floats in the reference."""
    for site, module in target.modules.items():
        integers = [t for t in _tensors(module) if t.dtype in _BITS and len(t.shape or ()) >= _MATRIX]
        weights = _tensors(reference.modules[site]) if site in reference.modules else []
        if not integers or any(weight.dtype in _BITS for weight in weights):
            continue
        count = max((math.prod(weight.shape) for weight in weights if weight.shape), default=0)
        held = max(math.prod(t.shape or ()) * _BITS[t.dtype] for t in integers)
        yield min(_COMMON, key=lambda bits: abs(bits - held / count)) if count else _COMMON[0]


def _tensors(module: ModuleInfo) -> list[TensorInfo]:
    return [*module.parameters.values(), *module.buffers.values()]
