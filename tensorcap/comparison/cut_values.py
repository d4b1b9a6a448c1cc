"""Values that a static quantisation cuts: those beyond what its least and largest numbers stand for.

Ranges come of a calibration, whose choice it is to cut a few values for smaller steps. A channel that is cut
as a whole, or many values, are no such choice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tensorcap.runs import is_fact
from tensorcap.wording import some
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import ReadError
from tensorcap_formats.records import Record

MOST_CUT: Final = 2.0  # times what rounding makes, that cutting values may make by choice of a calibration
_MOST: Final = 0.01  # of the values may be cut by choice: percentiles and entropies cut fewer
_ROWS: Final = 8  # that a channel has, to be told from one value
_NEEDED: Final = 0.125  # of a range: three bits of eight stand for nothing
_FIXED: Final = ((0.0, 1.0), (-1.0, 1.0))  # ranges of sigmoids and softmaxes, and of hyperbolic tangents
_OF_FIXED: Final = 0.02  # that their ends may be off by: some steps
_HALF: Final = 0.501  # of a step, and what float32 adds
_WHOLE: Final = 0.5  # of the values of a channel, to be cut as a whole


@dataclass(frozen=True, slots=True)
class CutValues:
    """What a range cuts of a tensor.

    Attributes:
        error: What was taken off each value, in the tensor's shape.
        share: Of the values that were cut.
        text: The same in words, as the end of a sentence.
        channels: Those of the last axis that are cut as a whole.
    """

    error: Array
    share: float
    text: str
    channels: tuple[int, ...]

    @property
    def is_choice(self) -> bool:
        """Whether it is as a calibration may choose: few values, and no channel as a whole."""
        return self.share <= _MOST and not self.channels


def find_cut(values: Array, ends: object, step: object, what: str) -> CutValues | None:
    """Find what a range cuts of values; None if that is nothing, or if the range is not known.

    Args:
        values: What they are without rounding, `[rows, channels]`.
        ends: The least and the largest value of the range.
        step: What numbers are multiplied by: a value half a step beyond is only rounded.
        what: What the values are of, in words.
    """
    if not (isinstance(ends, list) and len(ends) == 2 and isinstance(step, float)):
        return None
    low, high = ends
    if not (isinstance(low, float) and isinstance(high, float)):
        return None
    error = np.clip(values, low, high) - values
    is_cut = np.abs(error) > step / 2
    if not is_cut.any():
        return None
    at = np.unravel_index(np.argmax(np.abs(error)), error.shape)
    share = float(is_cut.mean())
    by_channel = is_cut.reshape(-1, is_cut.shape[-1]) if is_cut.ndim else is_cut.reshape(1, 1)
    channels = np.flatnonzero(by_channel.mean(axis=0) >= _WHOLE)
    whole = tuple(channels.tolist()) if len(by_channel) >= _ROWS else ()
    percent = float(f"{100 * share:.2g}")
    text = (
        f"{percent:g} % of {what} lie beyond the calibrated range {low:.3g} to {high:.3g} and are cut, "
        f"{values[at]:.3g} to {min(max(values[at], low), high):.3g}"
    )
    text += f"; most of channel {some(list(map(str, whole)))}" if whole else ""
    return CutValues(error, share, text, whole)


def cut_inputs(x: Array, settings: Mapping[str, Any]) -> CutValues | None:
    """What the range of a layer's inputs cuts of them."""
    return find_cut(x, settings.get("input_range"), settings.get("input_step"), "its inputs")


def cut_results(wanted: Array, settings: Mapping[str, Any]) -> CutValues | None:
    """What the range of a layer's results cuts of them."""
    return find_cut(wanted, settings.get("output_range"), settings.get("output_step"), "its results")


@dataclass(frozen=True, slots=True)
class UsedRange:
    """How much of a range values need.

    Attributes:
        share: Of the range, 0 to 1.
        text: The same in words.
    """

    share: float
    text: str

    @property
    def is_spare(self) -> bool:
        """Whether values need so small a part of it that it is another tensor's."""
        return 0 < self.share < _NEEDED


def used_range(least: float, most: float, ends: object, what: str) -> UsedRange | None:
    """Return how much of a range values need; None if it is not known, or one that operators have by nature.

    Args:
        least: The smallest value of all.
        most: The largest one.
        ends: The least and the largest value of the range.
        what: What the values are of, in words.

    Example:
        >>> used_range(-1.0, 3.0, [-64.0, 64.0], "its results").text
        'its results, -1 to 3, need 3.1 % of the calibrated range -64 to 64'
    """
    if not (isinstance(ends, list) and len(ends) == 2 and all(isinstance(end, float) for end in ends)):
        return None
    low, high = ends
    if not high > low or any(np.allclose(ends, fixed, rtol=0, atol=_OF_FIXED) for fixed in _FIXED):
        return None
    share = (max(most, 0.0) - min(least, 0.0)) / (high - low)
    needed = f"{least:.3g} to {most:.3g}, need {100 * share:.2g} %"
    return UsedRange(share, f"{what}, {needed} of the calibrated range {low:.3g} to {high:.3g}")


class RoundedArguments:
    """What modules and nodes of a target that round what they are given to whole steps of a range make of it.

    Args:
        target: The target, under the reference's keys.
    """

    def __init__(self, target: Archive) -> None:
        self._target = target
        self._grids: dict[str, set[tuple[float, float, float]]] = defaultdict(set)
        for record in target.records:
            module = target.info.modules.get(record.key.site)
            settings = module.settings if module is not None and record.key.slot.startswith("input") else {}
            step, ends = settings.get("input_step"), settings.get("input_range")
            if isinstance(step, float) and ends:
                self._grids[record.digest or record.key.text].add((step, *ends))
        for text, value in target.values.items():
            made = f"{text.rpartition('/')[0]}/output"
            is_node = is_fact(text, value) and isinstance(value, Mapping)
            if not is_node or value.get("op") != "QuantizeLinear" or made not in target:
                continue
            taken: Mapping[str, Any] = next(iter(value.get("inputs", ())), {})
            step, zero, given = value.get("step"), value.get("zero"), taken.get("record", "")
            dtype = target.get(made).dtype
            if isinstance(step, float) and given in target and dtype.name in ("int8", "uint8"):
                limits, source = np.iinfo(dtype.name), target.get(given)
                ends = ((limit - (zero or 0.0)) * step for limit in (limits.min, limits.max))
                self._grids[source.digest or given].add((step, *ends))

    def are(self, record: Record, archive: Archive, other: Record) -> bool:
        """Whether what is given a tensor of the target and rounds it makes another one of it.

        Args:
            record: The tensor, as it was given.
            archive: That of the other one.
            other: The other one; half a step may lie between.
        """
        grids = self._grids.get(record.digest or record.key.text, ())
        if not grids or record.shape != other.shape or not (record.stored and other.stored):
            return False
        try:
            values, rounded = self._target.load(record), archive.load(other).astype(np.float64)
        except (OSError, ReadError):  # the comparison says so
            return False
        return any(
            (np.abs(np.clip(values.astype(np.float64), low, high) - rounded) <= step * _HALF).all()
            for step, low, high in grids
        )
