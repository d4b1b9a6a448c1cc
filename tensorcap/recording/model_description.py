"""Digests of weights and settings of modules, for the description of a model: no values are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from tensorcap.workload import jsonable
from tensorcap_formats.digests import ALGORITHMS, DEFAULT_ALGORITHM
from tensorcap_formats.dtypes import Array, DType
from tensorcap_formats.statistics import StatisticsBuilder

_BLOCK: Final = 1 << 17  # elements that are hashed and summed up while they are in a core's cache
_LONGEST_TEXT: Final = 80  # characters; a longer text is no setting
_MOST_NUMBERS: Final = 16  # in a tuple; a longer one is data


def summarize_weight(bits: Array, dtype: DType) -> dict[str, Any]:
    """Return `digest` and `statistics` of a weight (`specs/archive.md`, ARC-73).

    Args:
        bits: Its stored elements, of any shape.
        dtype: Their logical dtype.
    """
    flat = bits.reshape(-1)
    hasher, builder = ALGORITHMS[DEFAULT_ALGORITHM](), StatisticsBuilder(dtype)
    for start in range(0, flat.size, _BLOCK):
        block = flat[start : start + _BLOCK]
        hasher.update(block.view("u1"))
        builder.add(block)
    return {
        "digest": f"{DEFAULT_ALGORITHM}:{hasher.hexdigest()}",
        "statistics": asdict(builder.result()),
    }


def attribute_settings(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings among a module's attributes, as JSON values.

    Attributes that are None, bools, numbers, short texts or tuples of numbers; names that begin with an
    underscore are left out.

    Example:
        >>> attribute_settings({"eps": 1e-6, "_cache": 3, "names": ("q", "k")})
        {'eps': 1e-06}
    """
    return {
        name: jsonable(value)
        for name, value in attributes.items()
        if not name.startswith("_") and is_setting(value)
    }


def is_setting(value: object) -> bool:
    """Whether a value is None, a bool, a number, a short text or a short tuple of numbers."""
    if isinstance(value, str):
        return len(value) <= _LONGEST_TEXT
    if isinstance(value, tuple | list):
        return len(value) <= _MOST_NUMBERS and all(type(item) in (bool, int, float) for item in value)
    return value is None or isinstance(value, bool | int | float)
