"""Rounding to bfloat16: to the nearest value, ties to even, as ml_dtypes does it and not our own code."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from tensorcap_formats.dtypes import Array


def bfloat16(values: Any) -> Array:
    """Round, and keep the dtype: an array that an archive stores as bfloat16."""
    rounded: Array = np.asarray(values, np.float32).astype(ml_dtypes.bfloat16)
    return rounded


def bfloat16_bits(values: Any) -> Array:
    """Round, and give the bits as uint16."""
    return bfloat16(values).view(np.uint16)


def to_bfloat16(values: Any) -> Array:
    """Round, and give the values as float32."""
    return bfloat16(values).astype(np.float32)
