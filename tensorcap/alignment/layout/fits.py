"""Find the layout that makes one side's tensors the other's: candidates are tried on values.

One is taken if the values agree after it, and do so far better than after any other; if no values agree,
only if there is no other candidate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tensorcap.alignment.layout.axis_patterns import Shape
from tensorcap.alignment.layout.layout import Layout
from tensorcap.alignment.layout.layout_candidates import LayoutChoice, Steps, candidates, fits, reordered
from tensorcap.alignment.layout.multi_tensor_steps import Dereplicate
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array, decode
from tensorcap_formats.errors import UsageError
from tensorcap_formats.records import Record

_FAR: Final = 2.5  # times worse: another layout
CLOSE: Final = 0.4  # residual up to which values agree; unrelated ones leave 1.4
_EXACT: Final = 2.0**-16  # residual at which nothing better is looked for, or so many roundings
_ROUNDINGS: Final = 16
_IN_FEW_BITS: Final = 0.1  # residual of rounded weights: that of other elements is far larger
_MOST: Final = 1 << 26  # elements that are read for one layout


@dataclass(frozen=True, slots=True)
class Fit:
    """A layout and how well it fits.

    Attributes:
        steps: From the target's tensors to the reference's.
        order: In which the reference's tensors come out.
        residual: Relative error that is left, no unit; None if nothing was read.
        other: The least that any other layout leaves.
        choices: How many layouts were possible.
        is_sure: Whether values, or there being no choice, speak for it.
        is_proven: Whether the values agree after it, and after no other.
        typical: Half of all errors are at least that, relative to what half of all elements are: large where
            few elements are all that agrees; None if nothing was read, or nothing agrees.
    """

    steps: Steps
    order: tuple[int, ...]
    residual: float | None
    other: float
    choices: int
    is_sure: bool
    is_proven: bool = False
    typical: float | None = None


def find_layout(
    reference: Sequence[Record],
    target: Sequence[Record],
    archives: tuple[Archive, Archive] | None,
    rounding: float,
    *,
    among: Sequence[LayoutChoice] | None = None,
) -> Fit | None:
    """Find the steps from some tensors of the target to some of the reference.

    1. Candidates are the steps that shapes allow, the plainest first; without values the first is taken, and
       it is sure only if it is the only one or moves nothing.
    2. Each is applied to the values; the one with the smallest residual is taken, the plainest of about
       equal ones. It is proven if any other leaves `_FAR` times as much.
    3. Unless one is exact, or is proven and leaves no more than weights in few bits do, layouts that reorder
       elements along an axis (rotary halves, interleaved parts) are tried, too.

    Args:
        reference: Records of the reference.
        target: Records of the target.
        archives: The two to read them from; None to go by shapes alone, as where a tensor is damaged.
        rounding: Relative rounding of the runs, below which residuals say nothing.
        among: The layouts that come into question; by default all that shapes allow.

    Returns:
        The best layout; None if none is possible.
    """
    shapes = [r.shape for r in reference], [t.shape for t in target]
    allowed = candidates(*shapes) if among is None else among
    layouts = [c for c in dict.fromkeys(allowed) if fits(c, *shapes)]
    if not layouts:
        return None
    records = (*reference, *target)
    is_readable = all(r.stored for r in records) and sum(r.size for r in records) <= _MOST
    values = _read_sides(archives, (reference, target)) if archives is not None and is_readable else None
    if values is None:
        steps, order = layouts[0]
        return Fit(steps, order, None, math.inf, len(layouts), len(layouts) == 1 or not steps)
    references, sources = values
    residuals = [_measure_residual(candidate, references, sources) for candidate in layouts]
    best_plain = _choose(layouts, residuals, shapes, rounding)
    best_plain = replace(best_plain, typical=_measure_typical_error(best_plain, references, sources))
    if min(residuals) <= max(_EXACT, _ROUNDINGS * rounding) or len(records) > 2 or among:
        return best_plain
    if best_plain.is_proven and min(residuals) <= _IN_FEW_BITS:
        return best_plain
    further = [c for c in reordered(shapes[0][0], shapes[1][0]) if fits(c, *shapes)]
    residuals += [_measure_residual(candidate, references, sources) for candidate in further]
    best = _choose([*layouts, *further], residuals, shapes, rounding)
    if best.residual is None or best.residual > CLOSE:
        return best_plain
    return replace(best, typical=_measure_typical_error(best, references, sources))


def _choose(
    layouts: Sequence[LayoutChoice],
    residuals: Sequence[float],
    shapes: tuple[list[Shape], list[Shape]],
    rounding: float,
) -> Fit:
    """The best of some layouts; the plainest of those that are about as good."""
    best = min(range(len(residuals)), key=lambda i: (residuals[i] > 2 * min(residuals) + rounding, i))
    floor = max(residuals[best], rounding)
    moves = _trace_elements(layouts[best], *shapes)
    rest = [
        residual
        for i, residual in enumerate(residuals)
        if i != best and (residual >= _FAR * floor or _trace_elements(layouts[i], *shapes) != moves)
    ]
    is_proven = residuals[best] <= CLOSE and all(residual >= _FAR * floor for residual in rest)
    is_plain = not layouts[0][0]
    if not is_proven and is_plain and not residuals[0] > _FAR * floor:
        best = 0
    is_sure = is_proven or len(layouts) == 1 or (is_plain and best == 0)
    steps, order = layouts[best]
    return Fit(steps, order, residuals[best], min(rest, default=math.inf), len(layouts), is_sure, is_proven)


def _read_sides(
    archives: tuple[Archive, Archive], records: tuple[Sequence[Record], Sequence[Record]]
) -> tuple[list[Array], list[Array]] | None:
    """Values of the reference's records and of the target's; None if one is damaged."""
    try:
        references, sources = (
            [_read_values(archive, record) for record in side]
            for archive, side in zip(archives, records, strict=True)
        )
    except OSError:  # the comparison says so
        return None
    return references, sources


def _read_values(archive: Archive, record: Record) -> Array:
    values = decode(archive.read(record), record.dtype)
    return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)


def _apply_steps(steps: Steps, sources: Sequence[Array]) -> list[Array] | None:
    arrays: list[Array] = list(sources)
    try:
        for step in Layout.parse(steps).steps:
            arrays = step.apply(arrays)
    except UsageError:  # copies that are none
        return None
    return arrays


def _trace_elements(
    candidate: LayoutChoice, reference: Sequence[Shape], target: Sequence[Shape]
) -> list[bytes]:
    """Which element comes to stand where, so that two ways to write one layout are known as one."""
    steps, order = candidate
    ends = [0, *itertools.accumulate(map(math.prod, target))]
    spans = zip(ends, ends[1:], target, strict=False)
    numbered = [np.arange(start, end).reshape(shape) for start, end, shape in spans]
    added = []
    for step in Layout.parse(steps).steps:
        if step.is_arithmetic:  # of what is added up, the first says where elements lie
            added.append(step.text.encode())
            numbered = numbered[:1]
            continue
        numbered = numbered[:: step.copies] if isinstance(step, Dereplicate) else step.apply(numbered)
    return added + [
        array.tobytes() for _, array in sorted(zip(order, numbered, strict=True), key=lambda p: p[0])
    ]


def residual(
    fit: Fit, reference: Sequence[Record], target: Sequence[Record], archives: tuple[Archive, Archive]
) -> float | None:
    """The relative error that a layout leaves between some tensors of both sides.

    None if it does not fit, or if a tensor is damaged.
    """
    if not fits((fit.steps, fit.order), [r.shape for r in reference], [t.shape for t in target]):
        return None
    values = _read_sides(archives, (reference, target))
    return None if values is None else _measure_residual((fit.steps, fit.order), *values)


def _measure_typical_error(fit: Fit, references: Sequence[Array], sources: Sequence[Array]) -> float | None:
    """The median error relative to the median element, the worst of all tensors."""
    results = _apply_steps(fit.steps, sources)
    if results is None or fit.residual is None or fit.residual > CLOSE:
        return None
    worst = 0.0
    for i, values in zip(fit.order, results, strict=True):
        finite = np.isfinite(values) & np.isfinite(references[i])
        scale = np.median(np.abs(references[i][finite])) if finite.any() else 0.0
        if scale:
            error = np.abs(values[finite] - references[i][finite])
            worst = max(worst, float(np.median(error) / scale))
    return worst


def _measure_residual(
    candidate: LayoutChoice, references: Sequence[Array], sources: Sequence[Array]
) -> float:
    """The error that a layout leaves, relative to the reference; the worst of all tensors."""
    steps, order = candidate
    results = _apply_steps(steps, sources)
    if results is None:
        return math.inf
    worst = 0.0
    for i, values in zip(order, results, strict=True):
        reference = references[i]
        is_same = (values == reference) | (np.isnan(values) & np.isnan(reference))
        with np.errstate(invalid="ignore", over="ignore"):
            error = np.linalg.norm(np.where(is_same, 0, values - reference).ravel())
            scale = np.linalg.norm(reference[np.isfinite(reference)])
            residual = float(error / scale) if scale else (0.0 if error == 0 else math.inf)
        worst = max(worst, residual if math.isfinite(residual) else math.inf)
    return worst
