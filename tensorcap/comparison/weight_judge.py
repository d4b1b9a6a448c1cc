"""Weights in few bits of a target: is each the reference's, rounded to the numbers that it may have?

The numbers are those that the target says (`param.NAME_step`, `param.NAME_zero`), or else those that its
values lie on (`weight_rounding`). Read `judge_weight` first, then `QuantisedWeight`: what is said of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from tensorcap.comparison.clipped_weights import cut_of_choice
from tensorcap.comparison.cut_values import MOST_CUT
from tensorcap.comparison.layer_parts import FoldedNorm
from tensorcap.comparison.layer_products import Call, first_rows, floats_of, parameters_of
from tensorcap.comparison.other_weights import OtherWeights
from tensorcap.comparison.pair import Finding
from tensorcap.comparison.policy import POLICY, Precision
from tensorcap.comparison.quantised_weights import packed_weights
from tensorcap.comparison.weight_mistakes import WeightMistake, find_weight_mistake
from tensorcap.comparison.weight_rounding import (
    Rounding,
    WeightNumbers,
    find_numbers,
    is_wide_step,
    levels_of,
    measure_rounding,
    measure_wide,
    unit_of,
)
from tensorcap.wording import counted
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import ReadError
from tensorcap_formats.float_formats import UNIT_ROUNDOFFS
from tensorcap_formats.keys import unescape
from tensorcap_formats.records import Record
from tensorcap_formats.run_info import ModuleInfo

_WIDE: Final = ("int16", "uint16", "int32")  # formats of numbers that are too many to be told apart by values
_WEIGHT_STEP: Final = "param.weight_step"
_OFF_STEP: Final = 0.02  # steps that a value may be off, besides its own rounding
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


def judge_quantised_weight(
    reference: Archive, ours: Record, target: Archive, theirs: Record
) -> QuantisedWeight | None:
    """Judge a weight that a target holds in few bits, by its values alone; None if its numbers are not known.

    Args:
        reference: The trusted archive.
        ours: Its weight.
        target: The archive under test.
        theirs: Its weight, in floats.
    """
    site, name = theirs.key.site, unescape(theirs.key.slot.partition(".")[2])
    if (site, name) not in packed_weights(target.info):
        return None
    trusted = floats_of(reference, ours)
    module = target.info.modules.get(site)
    weight = numbers_of(target, theirs, parameters_of(target, {site}), module, name)
    if trusted is None or weight is None or trusted.shape != weight.values.shape:
        return None
    precision = POLICY.precision_of_runs(reference.info, target.info)
    return judge_weight(trusted, with_unit(weight, precision), None)


def judge_weight(reference: Array, weight: WeightNumbers, inputs: Array | None) -> QuantisedWeight:
    """Judge a weight in few bits.

    Args:
        reference: float64, in the shape of the weight.
        weight: The target's.
        inputs: What its layer was given, `[rows, inputs]`, float64; None if that is not known.
    """
    rounding = measure_rounding(reference, weight, inputs)
    if not is_rounded(rounding) and rounding.clipped:
        cut = cut_of_choice(reference, weight, inputs)
        rounding = replace(rounding, cut=cut if cut is not None and cut <= MOST_CUT else None)
    mistake = WeightMistake() if is_rounded(rounding) else find_weight_mistake(reference, weight)
    return QuantisedWeight(weight.text, rounding, mistake)


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


def numbers_of(
    target: Archive,
    record: Record,
    parameters: Mapping[tuple[str, str], Record],
    module: ModuleInfo | None,
    name: str,
) -> WeightNumbers | None:
    """The numbers of a weight: those that the target says if its values lie on them, else found in these."""
    values = floats_of(target, record)
    if values is None:
        return None
    key = record.key
    steps, zeros = (parameters.get((key.site, f"{key.slot}_{end}")) for end in ("step", "zero"))
    named = module.settings.get("numbers") if module is not None else None
    number = named.get(name) if isinstance(named, Mapping) else None
    if isinstance(number, str) and levels_of(number) and steps is not None:
        sides = [None if side is None else floats_of(target, side) for side in (steps, zeros)]
        if sides[0] is not None and sides[0].ndim == values.ndim:
            weight = WeightNumbers(number, values, sides[0], sides[1])
            rounded = replace(weight, unit=unit_of(values))
            for found in (weight, rounded):  # a product in a narrow dtype is rounded
                if found.are_on_levels:
                    return found
    return find_numbers(values)


def wide_rounding(
    target: Archive,
    record: Record,
    parameters: Mapping[tuple[str, str], Record],
    module: ModuleInfo | None,
    reference: Array,
    calls: Iterable[Call],
) -> QuantisedWeight | None:
    """A bias of 16 or 32 bits held against the reference's; None if it is none, or has no step of one."""
    name = unescape(record.key.slot.partition(".")[2])
    named = module.settings.get("numbers") if module is not None else None
    number = named.get(name) if isinstance(named, Mapping) else None
    beside = parameters.get((record.key.site, f"{record.key.slot}_step"))
    if number not in _WIDE or beside is None:
        return None
    values, steps = floats_of(target, record), floats_of(target, beside)
    if values is None or steps is None or steps.ndim != values.ndim:
        return None
    of_weight = parameters.get((record.key.site, _WEIGHT_STEP))
    products = floats_of(target, of_weight) if of_weight is not None else None
    if products is not None and products.all():
        step = module.settings.get("input_step") if module is not None else None
        products = products.reshape(-1)
        if not isinstance(step, float):
            step = float(steps.reshape(-1)[0] / products[0])
            step = step if _has_inputs_in_steps(target, calls, step) else math.nan
        products = products * step
    if not is_wide_step(reference, values, steps, products):
        return None
    return QuantisedWeight(f"{number}", measure_wide(reference, values, steps))


def _has_inputs_in_steps(target: Archive, calls: Iterable[Call], step: float) -> bool:
    """Whether what a module was given are whole numbers of a step, and several of them."""
    for call in calls:
        values = floats_of(target, call.input)
        if values is None or not values.size:
            continue
        numbers = first_rows(values) / step
        slack = _OFF_STEP + 2 * UNIT_ROUNDOFFS["float32"] * np.abs(numbers)
        whole = np.rint(numbers)
        if (np.abs(numbers - whole) <= slack).all() and np.unique(whole).size >= _FEWEST_NUMBERS:
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
