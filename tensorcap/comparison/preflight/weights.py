"""The parameters and buffers that a run knows of, and what digests and statistics say of two of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from tensorcap.comparison.quantised_weights import kept_beside
from tensorcap.runs import is_parameter
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import DTYPES
from tensorcap_formats.float_formats import UNIT_ROUNDOFFS
from tensorcap_formats.keys import ROOT_SITE, unescape
from tensorcap_formats.records import Record
from tensorcap_formats.run_info import TensorInfo
from tensorcap_formats.statistics import Statistics

WeightId = tuple[int, str, str]  # rank, site, name
WeightKind = Literal["parameters", "buffers"]
# equal: bit for bit. rounded: equal as far as statistics show, but for rounding. moved: so but for the order.
# other: not the same numbers. unknown: nothing is known of the values of a side.
Likeness = Literal["equal", "rounded", "moved", "other", "unknown"]

_SLOTS: Final[Mapping[WeightKind, str]] = {"parameters": "param", "buffers": "buffer"}
_ROUNDINGS: Final = 4.0  # unit roundoffs of the coarser dtype between two runs of one computation
_ORDER: Final = 1e-12  # relative difference of float64 sums over the same numbers in another order
_LEAST: Final = 16  # elements; fewer are equal by chance


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter or a buffer of one run.

    Attributes:
        site: Site of its module.
        name: Its name in the module.
        info: Shape, dtype, digest and statistics, as far as they are known.
        record: Its record, if its values were recorded.
    """

    site: str
    name: str
    info: TensorInfo
    record: Record | None = None

    @property
    def text(self) -> str:
        """The key of its record, or its name in the model.

        Example:
            >>> Weight("@root", "scale", TensorInfo()).text, Weight("norm", "weight", TensorInfo()).text
            ('scale', 'norm.weight')
        """
        if self.record is not None:
            return self.record.key.text
        return self.name if self.site == ROOT_SITE else f"{self.site}.{self.name}"

    @property
    def is_telling(self) -> bool:
        """Whether another one of equal bits holds the same by no chance."""
        statistics = self.info.statistics
        is_varied = statistics is not None and statistics.minimum != statistics.maximum
        return is_varied and self.info.digest != "" and math.prod(self.info.shape or (0,)) >= _LEAST

    @property
    def contents(self) -> tuple[str, str]:
        """What its equals have in common."""
        return self.info.digest, self.info.dtype


def weights_of(archive: Archive, kind: WeightKind) -> dict[WeightId, Weight]:
    """Return the parameters or the buffers of a run by rank, site and name, recorded or described."""
    weights = {}
    beside = kept_beside(archive.info)
    for site, module in archive.info.modules.items():
        for name, info in getattr(module, kind).items():
            weights[0, site, name] = Weight(site, name, info)
    for record in archive.records:
        prefix, _, rest = record.key.slot.partition(".")
        is_own = (record.key.site, record.key.slot) not in beside
        if prefix == _SLOTS[kind] and is_parameter(record.key) and is_own:
            key, name = record.key, unescape(rest)
            digest = f"{archive.algorithm}:{record.digest}" if record.digest and archive.algorithm else ""
            info = TensorInfo(record.shape, record.dtype.name, "", digest, record.statistics)
            weights[key.rank, key.site, name] = Weight(key.site, name, info, record)
    return weights


def compare_contents(ours: TensorInfo, theirs: TensorInfo) -> Likeness:
    """Compare the values of two tensors by digests and statistics alone.

    1. Equal digests of one dtype: equal.
    2. Least and largest value, mean, l2 norm and the counts of what is not finite agree within the rounding
       of the coarser dtype: `rounded`. If they agree far beyond that, the largest and least values are the
       same, and digests show that bits differ: `moved`, the same numbers in another order.
    3. Else they are other numbers.
    """
    if ours.digest and (ours.digest, ours.dtype) == (theirs.digest, theirs.dtype):
        return "equal"
    one, other = ours.statistics, theirs.statistics
    if one is None or other is None:
        return "unknown"
    if (one.nan, one.posinf, one.neginf) != (other.nan, other.posinf, other.neginf):
        return "other"
    algorithms = [info.digest.partition(":")[0] for info in (ours, theirs)]
    differ_in_bits = ours.dtype == theirs.dtype and algorithms[0] == algorithms[1] != ""
    have_same_ends = (one.minimum, one.maximum) == (other.minimum, other.maximum)
    if differ_in_bits and have_same_ends and _agree(one, other, _ORDER):
        return "moved" if math.prod(ours.shape or ()) > 1 else "other"
    roundoff = max(UNIT_ROUNDOFFS.get(info.dtype, 0.0) for info in (ours, theirs))
    return "rounded" if _agree(one, other, max(_ROUNDINGS * roundoff, _ORDER)) else "other"


def _agree(one: Statistics, other: Statistics, tolerance: float) -> bool:
    """Whether statistics agree, relative to the largest magnitude, or to the norm."""
    ends = [one.minimum, one.maximum, other.minimum, other.maximum]
    scale = max((abs(end) for end in ends if end is not None), default=0.0)
    pairs = (
        (one.minimum, other.minimum, scale),
        (one.maximum, other.maximum, scale),
        (one.mean, other.mean, scale),
        (one.l2, other.l2, one.l2 or 0.0),
    )
    return all(
        a == b or (a is not None and b is not None and abs(a - b) <= tolerance * unit) for a, b, unit in pairs
    )


def is_quantised(ours: TensorInfo, theirs: TensorInfo) -> bool:
    """Whether one of two tensors holds integers for the floats of the other, or is of a class that does."""
    kinds = [_kind(info) for info in (ours, theirs)]
    return kinds[0] != kinds[1] and "float" in kinds and ("int" in kinds or "class" in kinds)


def _kind(info: TensorInfo) -> str:
    if info.class_name:
        return "class"
    logical = DTYPES.get(info.dtype)
    if logical is None:
        return "int" if info.dtype.startswith(("q", "int", "uint")) else ""
    return {"uint": "int"}.get(logical.kind, logical.kind)


def values_text(info: TensorInfo) -> str:
    """The range of a tensor's values, for a sentence.

    Example:
        >>> values_text(TensorInfo((4,), "float32", "", "", Statistics(0.5, 2.0, 1.0, 2.4, 0, 0, 0, 0)))
        '0.5 to 2, RMS 1.2'
    """
    s = info.statistics
    if s is None or s.minimum is None or s.maximum is None:
        return info.dtype or "unknown values"
    count = math.prod(info.shape or ()) - s.nan - s.posinf - s.neginf
    rms = f", RMS {s.l2 / math.sqrt(count):.4g}" if s.l2 is not None and count > 0 else ""
    return f"{s.minimum:.4g} to {s.maximum:.4g}{rms}"
