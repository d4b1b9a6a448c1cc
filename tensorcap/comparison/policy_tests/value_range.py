"""Do values leave the range of the target's precision, at its upper end or its lower? See POL-140, POL-163.

A value beyond the largest finite one of a precision, or of a model's own clamp just below it, is replaced by
that limit; of one below the smallest normal one hardly a bit is left. Neither is rounding, so that neither a
twin nor the depth of the model excuses it. Only the call in which values leave the range is guilty of it:
what is handed on, or computed from them, is wrong too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tensorcap.comparison.pair import Finding
from tensorcap.comparison.policy import POLICY
from tensorcap.comparison.policy_tests.context import Context, MeasuredPair, PolicyTest
from tensorcap.runs import Call, enclosing_sites, is_gradient, is_inner
from tensorcap.wording import conjugated, counted
from tensorcap_formats.float_formats import FLOAT_FORMATS
from tensorcap_formats.records import Record

_NEAR_LIMIT: Final = 0.9  # of the largest value: models clamp there (Pegasus, T5: 64,504 of 65,504)
_ROUNDINGS: Final = 4.0  # by which a value has to exceed a limit to be cut by it
_SMALLEST_VALUES: Final = 4.0  # that an error of what they alone represent may be: in products, too
_MASKED: Final = 1e8  # no sum of values in range, but a number that masks what it is added to


@dataclass(frozen=True, slots=True)
class CutValues:
    """Values of a tensor that a range cut.

    Attributes:
        count: How many.
        limit: What their magnitudes were cut to.
        largest: The largest magnitude in the reference.
        range: The largest finite value of the precision.
        precision: Its name.
    """

    count: int
    limit: float
    largest: float
    range: float
    precision: str

    def finding(self) -> Finding:
        """The finding `range`."""
        text = (
            f"{counted(self.count, 'value')} of up to {self.largest:.6g} in the reference "
            f"{conjugated(self.count, 'are')} cut to {self.limit:.6g}: "
            f"{self.precision} holds at most {self.range:.6g}"
        )
        return Finding("range", self.largest / self.limit, 1.0, "diverged", text)


class RangeTest(PolicyTest):
    """Tests `range`."""

    names = ("range",)
    is_local = True
    is_evidence = True

    def judge(self, context: Context) -> Iterator[tuple[str, Finding]]:
        """Judge tensors with values beyond the range, unless an earlier one of the same call has such."""
        beyond: list[Record] = []
        calls: dict[tuple[int, int, str], list[Call]] = {}
        for pair in context.open_floats():
            values = find_cut_values(context, pair)
            finding = _find_underflow(context, pair) if values is None else values.finding()
            if finding is None:
                continue
            if not calls:
                for call in context.calls.calls:
                    calls.setdefault(call.place[:3], []).append(call)
            start = _start_of_maker(pair.reference, calls)
            is_first = not any(
                start <= one.order < pair.reference.order and one.key.step == pair.reference.key.step
                for one in beyond
            )
            beyond.append(pair.reference)
            if is_first:
                yield pair.key, finding


def find_cut_values(context: Context, pair: MeasuredPair) -> CutValues | None:
    """Find values of a pair that the range of its precision cut; None if there are none.

    1. The reference has a magnitude beyond the largest finite value of the precision, less a tenth.
    2. The target's largest magnitude, its limit, is within that tenth.
    3. Cut are elements at the limit whose value in the reference is beyond it by more than some roundings,
       and is no number of a mask.
    """
    precision = pair.precision
    largest = FLOAT_FORMATS[precision.name].largest if precision.name in FLOAT_FORMATS else np.inf
    statistics = pair.reference.statistics
    if largest > _MASKED or is_gradient(pair.reference.key):
        return None
    ends = () if statistics is None else (statistics.minimum, statistics.maximum)
    sizes_at_ends = [abs(end) for end in ends if end is not None]
    if sizes_at_ends and max(sizes_at_ends) <= _NEAR_LIMIT * largest:
        return None
    if not (pair.reference.stored and pair.target.stored):
        return None
    r = context.reference.load(pair.reference).astype(np.float64)
    t = context.target.load(pair.target).astype(np.float64)
    if r.shape != t.shape:
        return None
    sizes, limit = np.abs(r), float(np.abs(t, where=np.isfinite(t), out=np.zeros_like(t)).max(initial=0.0))
    if not _NEAR_LIMIT * largest <= limit <= largest:
        return None
    beyond = limit * (1 + _ROUNDINGS * precision.unit)
    is_cut = (t == np.copysign(limit, r)) & (sizes > beyond) & (sizes < _MASKED)
    count = int(is_cut.sum())
    return CutValues(count, limit, float(sizes[is_cut].max()), largest, precision.name) if count else None


def _find_underflow(context: Context, pair: MeasuredPair) -> Finding | None:
    """Find that a tensor differs because its values lie below what its precision holds in full (POL-163).

    1. The RMS of the reference is below the smallest normal value.
    2. The row error is more than that of one block, and in units of the tensor a few of the smallest values
       at most: a larger error has other reasons.
    """
    form = FLOAT_FORMATS.get(pair.precision.name)
    statistics, error = pair.reference.statistics, context.errors.get(pair.key)
    if form is None or statistics is None or not statistics.l2 or error is None:
        return None
    size = statistics.l2 / math.sqrt(pair.reference.size)
    if size >= form.smallest_normal:
        return None
    limit = POLICY.envelope_at(0, pair.precision) * POLICY.widened_by(pair.elements)
    if not limit < error <= _SMALLEST_VALUES * form.smallest / size:
        return None
    name, least = pair.precision.name, form.smallest_normal
    text = f"values of about {size:.2g} are below {least:.2g}: {name} holds these with fewer bits, or none"
    return Finding("range", least / size, 1.0, "diverged", text)


def _start_of_maker(record: Record, calls: dict[tuple[int, int, str], list[Call]]) -> int:
    """Order of the beginning of the call whose code made a tensor; 0 if it is not known."""
    key = record.key
    is_result = key.slot.startswith("output") and not is_inner(key)
    sites = (key.site,) if is_result else enclosing_sites(key.site)
    for site in sites:
        of_site: Sequence[Call] = calls.get((key.rank, key.step, site), ())
        starts = [call.start for call in of_site if call.start <= record.order]
        if starts:
            return max(starts)
    return 0
