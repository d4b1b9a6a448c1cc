"""What a record holds, by its digest: records of equal contents in a step are one value that is handed on."""

from __future__ import annotations

import math
from typing import Final

from tensorcap_formats.records import Record

_LEAST: Final = 16  # elements; fewer are equal by chance

Contents = tuple[object, ...]


def contents_of(record: Record) -> Contents:
    """What records of one value on a rank in a step have in common."""
    return record.key.rank, record.key.step, record.digest, record.dtype.name, record.shape


def is_telling(record: Record) -> bool:
    """Whether a record of equal contents holds the same by no chance."""
    statistics = record.statistics
    is_varied = statistics is not None and statistics.minimum != statistics.maximum
    return record.digest != "" and record.size >= _LEAST and is_varied


def rms_of(record: Record) -> float:
    """The RMS of a tensor by its statistics; 0 if it is not known."""
    statistics = record.statistics
    return 0.0 if statistics is None else (statistics.l2 or 0.0) / math.sqrt(max(1, record.size))
