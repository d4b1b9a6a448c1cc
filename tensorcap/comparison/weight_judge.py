"""Weights in few bits of a target: is each the reference's, rounded to the numbers that it may have?

The numbers are those that the target says (`param.NAME_step`, `param.NAME_zero`), or else those that its
values lie on (`weight_rounding`). Read `judge_weight` first, then `QuantisedWeight`: what is said of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np

from tensorcap.comparison.clipped_weights import cut_of_choice
from tensorcap.comparison.cut_values import MOST_CUT
from tensorcap.comparison.layer_parts import FoldedNorm
from tensorcap.comparison.layer_products import BIAS, Call, first_rows, floats_of
from tensorcap.comparison.other_weights import OtherWeights
from tensorcap.comparison.pair import Finding
from tensorcap.comparison.policy import POLICY, Precision
from tensorcap.comparison.quantised_weights import packed_weights
from tensorcap.comparison.record_index import RecordIndex
from tensorcap.comparison.weight_mistakes import WeightMistake, find_bias_mistake, find_weight_mistake
from tensorcap.comparison.weight_rounding import (
    Rounding,
    WeightNumbers,
    are_whole,
    find_numbers,
    is_wide_step,
    levels_of,
    measure_rounding,
    measure_wide,
    spread,
    unit_of,
)
from tensorcap.runs import BESIDE_WEIGHT
from tensorcap.wording import counted
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array, decode
from tensorcap_formats.errors import ReadError
from tensorcap_formats.keys import unescape
from tensorcap_formats.records import Record

_WIDE: Final = ("int16", "uint16", "int32")  # formats of numbers that are too many to be told apart by values
_WEIGHT_STEP: Final = "param.weight_step"
_FEW: Final = 4096  # elements that tell the numbers of one weight from those of another
_FEWEST_NUMBERS: Final = 8  # of inputs: fewer lie on many a step


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """What became of a quantised weight.

    Attributes:
        text: Its numbers in words.
        rounding: Its errors beside those of rounding to the nearest number.
        mistake: What is wrong with it, if that is known.
        of_results: The largest own error over predicted error of its layer's results, if these are what
            rounding predicts, and the layer computes with more than this weight; None otherwise.
    """

    text: str
    rounding: Rounding
    mistake: WeightMistake = field(default_factory=WeightMistake)
    of_results: float | None = None

    @property
    def rounded_to(self) -> str:
        """The numbers that it is the reference's rounded to, by its values alone; "" if it is not."""
        by_values = replace(self.rounding, feedback=None)
        return self.text if POLICY.quantised.status(by_values.value) == "within-rounding" else ""

    @property
    def finding(self) -> Finding:
        """The finding of its pair."""
        rounding = self.rounding
        if self.of_results is not None:
            text = (
                f"its layer computes with more than it, and is off by what rounding to {self.text} predicts"
            )
            return POLICY.quantised.finding("weight_rounding", self.of_results, text)
        text = f"the reference's, rounded to {self.text}"
        if POLICY.quantised.status(rounding.value) != "within-rounding":
            text = f"not {text}"
            if self.mistake.text:
                text += f": {self.mistake.text}"
            elif math.isfinite(rounding.value):
                text += f": errors are {rounding.value:.3g} times those of rounding"
        elif rounding.cut is not None:
            text += (
                f"; {counted(rounding.clipped, 'value')} beyond the largest number cut off, as a search for "
                f"ranges may choose: products are off by {rounding.cut:.3g} times what whole ranges make"
            )
        elif not rounding.is_nearest:
            beside = f"{rounding.feedback:.3g} times in its products" if rounding.feedback is not None else ""
            if rounding.clipped:
                beside = (
                    f"{rounding.clipped} values beyond the largest number{', ' if beside else ''}{beside}"
                )
            text += f", not each to the nearest: errors are {rounding.ratio:.3g} times those of rounding"
            text += f" ({beside})" if beside else ""
        return POLICY.quantised.finding("weight_rounding", rounding.value, text)


class PackedWeights:
    """The weights of a target that it keeps in few bits, and which numbers they are.

    Attributes:
        index: The target's records.
        names: Site and name of each.
    """

    def __init__(self, index: RecordIndex) -> None:
        self.index = index
        self.names = packed_weights(index.archive.info)

    def read(self, record: Record) -> WeightNumbers | None:
        """Read the numbers of a weight: those that the target says if its values lie on them, else found.

        Args:
            record: The weight, in floats.

        Returns:
            None if it is kept in floats, or if its numbers are not known.

        Raises:
            OSError, ReadError: It cannot be read.
        """
        site, name = record.key.site, _name_of(record)
        values = floats_of(self.index.archive, record) if (site, name) in self.names else None
        if values is None:
            return None
        stated = self._stated(record)
        if stated is not None:
            weight = WeightNumbers(stated[0], values, *stated[1:])
            rounded = replace(weight, unit=unit_of(values))  # a product in a narrow dtype
            for numbers in (weight, rounded):
                if numbers.are_on_levels:
                    return numbers
        return find_numbers(values)

    def others_of_shape(
        self, record: Record, columns: int
    ) -> Iterator[tuple[str, Callable[[], WeightNumbers | None]]]:
        """Yield key texts of the other weights in few bits of a shape, and what reads their first rows.

        Args:
            record: The weight.
            columns: Elements of a row of it.
        """
        rows = max(1, _FEW // max(1, columns))
        for other in self._parameters():
            is_other = other.key != record.key and other.shape == record.shape and other.dtype.kind == "float"
            if is_other and not other.key.slot.endswith(BESIDE_WEIGHT):
                yield other.key.text, partial(self._first_numbers, other, rows)

    def held_beside(self, record: Record) -> Mapping[str, Array]:
        """What a layer holds beside a weight and a bias, by slot: floats, and rows of whole numbers."""
        beside: dict[str, Array] = {}
        own_slot, target = record.key.slot, self.index.archive
        for slot, other in self.index.parameters(record.key.site).items():
            if slot in (own_slot, BIAS) or (slot.startswith(own_slot) and slot.endswith(BESIDE_WEIGHT)):
                continue
            is_index = other.dtype.is_whole and len(other.shape) == 1
            values = target.load(other).astype(np.float64) if is_index else floats_of(target, other)
            if values is not None and values.ndim:
                beside[slot] = values
        return beside

    def judge_wide(self, record: Record, reference: Array, calls: Iterable[Call]) -> QuantisedWeight | None:
        """Judge a bias of 16 or 32 bits; None if it is none, or has no step of one.

        Args:
            record: The bias, in floats.
            reference: The reference's, float64.
            calls: The target's calls of the module.

        Raises:
            OSError, ReadError: It, or what the module was given, cannot be read.
        """
        number, target = self._number(record), self.index.archive
        steps = self._beside(record, "step") if number in _WIDE else None
        values = None if steps is None else floats_of(target, record)
        if values is None or steps is None or steps.ndim != values.ndim:
            return None
        of_weight = self.index.parameters(record.key.site).get(_WEIGHT_STEP)
        products = floats_of(target, of_weight) if of_weight is not None else None
        if products is not None and products.all():
            step = self._setting(record.key.site, "input_step")
            products = products.reshape(-1)
            if not isinstance(step, float):
                step = float(steps.reshape(-1)[0] / products[0])
                step = step if _has_inputs_in_steps(target, calls, step) else math.nan
            products = products * step
        if not is_wide_step(reference, values, steps, products):
            return None
        rounding = measure_wide(reference, values, steps)
        if is_rounded(rounding):
            return QuantisedWeight(number, rounding)
        scales = None if of_weight is None else floats_of(target, of_weight)
        mistake = find_bias_mistake(reference, values, steps, scales)
        if not mistake.text:
            held = self._holder_of_numbers(record, np.rint(values / spread(steps, values.shape)))
            if held is not None:
                mistake = WeightMistake("weight-numbers", f"its numbers are those of {held.key.text}")
        return QuantisedWeight(number, rounding, mistake)

    def _holder_of_numbers(self, record: Record, numbers: Array) -> Record | None:
        """The last other parameter of a slot and a shape with the same numbers, if these are not all one."""
        target, holder = self.index.archive, None
        for other in self._parameters() if np.ptp(numbers) else ():
            if other.key.slot == record.key.slot and other.key != record.key and other.shape == record.shape:
                held, steps = floats_of(target, other), self._beside(other, "step")
                if held is None or steps is None or steps.ndim != held.ndim:
                    continue
                if np.array_equal(np.rint(held / spread(steps, held.shape)), numbers):
                    holder = other
        return holder

    def _parameters(self) -> Iterator[Record]:
        """The parameters of the modules that have weights in few bits."""
        for site in sorted({site for site, _ in self.names}):
            yield from self.index.parameters(site).values()

    def _stated(self, record: Record) -> tuple[str, Array, Array | None] | None:
        """The format of a weight's numbers, their steps and zero points, as the target says; None if not."""
        number = self._number(record)
        steps = self._beside(record, "step") if levels_of(number) else None
        if steps is None or steps.ndim != len(record.shape):
            return None
        return number, steps, self._beside(record, "zero")

    def _first_numbers(self, record: Record, rows: int) -> WeightNumbers | None:
        """The numbers of the first rows of a weight, as the target says them; None if it says nothing."""
        stated = self._stated(record)
        if stated is None or not record.shape:
            return None
        number, steps, zeros = stated
        rows = min(rows, record.shape[0])
        count = math.prod(record.shape[1:])
        values = decode(self.index.archive.read_range(record, 0, rows * count), record.dtype).astype(
            np.float64
        )
        whole = WeightNumbers(number, np.empty(record.shape), steps, zeros).matrix
        _, few = next(whole.in_parts(rows))
        return replace(few, values=values.reshape(rows, count))

    def _number(self, record: Record) -> str:
        """The format of the numbers of a weight that the target says; "" if it says none."""
        named = self._setting(record.key.site, "numbers")
        number = named.get(_name_of(record)) if isinstance(named, Mapping) else None
        return number if isinstance(number, str) else ""

    def _setting(self, site: str, name: str) -> object:
        module = self.index.archive.info.modules.get(site)
        return None if module is None else module.settings.get(name)

    def _beside(self, record: Record, end: str) -> Array | None:
        """The steps or zero points that are recorded beside a weight."""
        beside = self.index.parameters(record.key.site).get(f"{record.key.slot}_{end}")
        return None if beside is None else floats_of(self.index.archive, beside)


def _name_of(record: Record) -> str:
    """The name of a parameter in its module."""
    return unescape(record.key.slot.partition(".")[2])


def judge_by_values(
    packed: PackedWeights, reference: Archive, ours: Record, theirs: Record, precision: Precision | None
) -> QuantisedWeight | None:
    """Judge a weight in few bits by its values alone; None if its numbers are not known, or it has none.

    Args:
        packed: The weights in few bits of the target.
        reference: The trusted archive.
        ours: Its weight.
        theirs: The target's weight, in floats.
        precision: What both runs computed in.

    Raises:
        OSError, ReadError: One of the two cannot be read.
    """
    weight = packed.read(theirs)
    trusted = floats_of(reference, ours) if weight is not None else None
    if trusted is None or weight is None or trusted.shape != weight.values.shape:
        return None
    weight = with_unit(weight, precision)
    judged = judge_weight(trusted, weight, None)
    if is_rounded(judged.rounding):
        return judged
    return replace(judged, mistake=find_weight_mistake(trusted, weight))


def judge_weight(reference: Array, weight: WeightNumbers, inputs: Array | None) -> QuantisedWeight:
    """Judge a weight in few bits; what is wrong with it is not looked for.

    Args:
        reference: float64, in the shape of the weight.
        weight: The target's.
        inputs: What its layer was given, `[rows, inputs]`, float64; None if that is not known.
    """
    rounding = measure_rounding(reference, weight, inputs)
    if not is_rounded(rounding) and rounding.clipped:
        cut = cut_of_choice(reference, weight, inputs)
        rounding = replace(rounding, cut=cut if cut is not None and cut <= MOST_CUT else None)
    return QuantisedWeight(weight.text, rounding)


def judge_with_norm(
    reference: Array, weight: WeightNumbers, inputs: Array | None, norm: FoldedNorm | None
) -> tuple[QuantisedWeight, FoldedNorm | None]:
    """Judge a weight, or what it is with the norm behind it folded in if it is nearer to that.

    Returns:
        What became of it, and the norm if it is folded in.
    """
    if norm is None or norm.factors.shape != (len(reference),):
        return judge_weight(reference, weight, inputs), None
    scaled = reference * norm.factors.reshape(-1, *(1,) * (reference.ndim - 1))
    ratios = [measure_rounding(side, weight).ratio for side in (reference, scaled)]
    if ratios[0] <= ratios[1]:
        return judge_weight(reference, weight, inputs), None
    judged = judge_weight(scaled, weight, inputs)
    return replace(judged, text=f"{judged.text}, with {norm.site} folded in"), norm


def is_rounded(rounding: Rounding) -> bool:
    """Whether a weight is what it was held against, rounded."""
    return POLICY.quantised.status(rounding.value) == "within-rounding"


def with_unit(weight: WeightNumbers, precision: Precision | None) -> WeightNumbers:
    """A weight with the rounding that it, its steps, and the runs, have besides."""
    units = [
        weight.unit,
        unit_of(weight.steps),
        *(p.unit for p in (precision,) if p is not None and not p.is_wide),
    ]
    return replace(weight, unit=max(units))


def _has_inputs_in_steps(target: Archive, calls: Iterable[Call], step: float) -> bool:
    """Whether what a module was given are whole numbers of a step, and several of them."""
    for call in calls:
        values = floats_of(target, call.input)
        if values is None or not values.size:
            continue
        numbers = first_rows(values) / step
        if are_whole(numbers).all() and np.unique(np.rint(numbers)).size >= _FEWEST_NUMBERS:
            return True
    return False


def held_weight(
    others: OtherWeights, ours: Record, target: Archive, theirs: Record, weight: WeightNumbers
) -> WeightMistake:
    """Which other weight of the reference it is, rounded, if it is one."""

    def is_held(record: Record) -> bool:
        values = floats_of(others.reference, record)
        return values is not None and is_rounded(measure_rounding(values, weight))

    try:
        held = others.find(ours, target, theirs, is_held)
    except (OSError, ReadError):  # the comparison says so
        held = None
    return WeightMistake() if held is None else WeightMistake.of_other(held.key.text)
