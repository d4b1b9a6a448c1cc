"""Tensors of a target that lie on whole steps, as code between its modules rounds them.

A statically quantised network rounds what it is given, sums and means by code of its own, of which no
module says the step. It is found in the values. Read `stepped_tensors`, then `find_step`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from tensorcap.comparison.layer_products import floats_of
from tensorcap.comparison.weight_rounding import are_whole, common_steps
from tensorcap.runs import contents_of, is_parameter, is_telling
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import ReadError
from tensorcap_formats.records import Record

_NUMBERS: Final = 256  # that eight bits tell apart
_FEWEST: Final = 8  # numbers that are seen: fewer lie on many a step
_LEAST: Final = 16  # elements
_SAMPLE: Final = 4096  # elements that are looked at before all


@dataclass(frozen=True, slots=True)
class SteppedTensor:
    """A tensor that was rounded to whole steps.

    Attributes:
        key: Its key text, the reference's.
        step: In the unit of the values.
        values: The target's, float64.
        before: What it was before, the target's too, if it is handed on by the reference; None if it is
            not, or if that is not known.
    """

    key: str
    step: float
    values: Array
    before: Array | None


def stepped_tensors(reference: Archive, target: Archive, known: Collection[str]) -> Iterator[SteppedTensor]:
    """Yield the tensors of a target on whole steps that the reference has in finer values.

    Args:
        reference: The trusted archive.
        target: The archive under test, under the reference's keys.
        known: Digests of what modules made that say their step themselves: what holds the same is not rounded
            again.
    """
    alike: dict[object, list[Record]] = defaultdict(list)  # of the reference, in order of execution
    for ours in reference.records:
        if ours.dtype.kind != "float" or is_parameter(ours.key) or ours.size < _LEAST:
            continue
        theirs = target.get(ours.key.text) if ours.key.text in target else None
        if theirs is None or theirs.shape != ours.shape or not (ours.stored and theirs.stored):
            continue
        contents = contents_of(ours) if is_telling(ours) else ours.key.text
        alike[contents].append(ours)
        if theirs.digest and (theirs.digest in known or theirs.digest == ours.digest):
            continue
        try:
            found = _stepped(reference, target, ours, theirs, alike[contents][:-1])
        except (OSError, ReadError):  # the comparison says so
            continue
        if found is not None:
            yield found


def _stepped(
    reference: Archive, target: Archive, ours: Record, theirs: Record, earlier: list[Record]
) -> SteppedTensor | None:
    """A tensor on whole steps, with the nearest earlier one of those that hold the same in the reference."""
    values = floats_of(target, theirs)
    step = None if values is None else find_step(values)
    wanted = floats_of(reference, ours) if step is not None else None
    if values is None or step is None or wanted is None or find_step(wanted) == step:
        return None
    for record in reversed(earlier):
        other = target.get(record.key.text)
        if other.digest and other.digest == theirs.digest:  # it is handed on as it is
            break
        before = floats_of(target, other)
        if before is not None and before.shape == values.shape:
            return SteppedTensor(ours.key.text, step, values, before)
    return SteppedTensor(ours.key.text, step, values, None)


def find_step(values: Array) -> float | None:
    """Find the step that values are whole numbers of, 256 in all; None if there is none.

    Example:
        >>> round(find_step(np.arange(-20.0, 44.0) * 0.25), 4)
        0.25
        >>> find_step(np.sqrt(np.arange(64.0))) is None
        True
    """
    flat = values.reshape(-1)
    sample = np.unique(flat[:: max(1, flat.size // _SAMPLE)])
    if not _FEWEST <= sample.size <= _NUMBERS:
        return None
    steps = common_steps(sample[None], _NUMBERS - 1)
    if steps is None:
        return None
    step = float(steps[0])
    numbers = flat / step
    return step if np.ptp(np.rint(numbers)) < _NUMBERS and are_whole(numbers).all() else None
