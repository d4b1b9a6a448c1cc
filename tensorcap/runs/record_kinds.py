"""Kinds of records by key: results, gradients, parameters, and places within a module's code."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from tensorcap_formats.keys import Key

_GRADIENTS: Final = ("grad_output", "grad_input", "grad_param")
_PARAMETERS: Final = ("param", "buffer")


def is_inner(key: Key) -> bool:
    """Whether a record is of a place within a module's code: an op, a function, a probe."""
    return ":" in key.site and key.slot != ""


def is_result(key: Key) -> bool:
    """Whether a record is what a module returned."""
    return _kind(key.slot) == "output" and not is_inner(key)


def is_gradient(key: Key) -> bool:
    """Whether a record is a gradient, of the backward pass."""
    return _kind(key.slot) in _GRADIENTS and not is_inner(key)


def is_parameter(key: Key) -> bool:
    """Whether a record is a parameter or a buffer of a module."""
    return _kind(key.slot) in _PARAMETERS and not is_inner(key)


@lru_cache(maxsize=4096)
def _kind(slot: str) -> str:
    """The first field of a slot, without the number of a second gradient: `grad_output:2`."""
    return slot.partition(".")[0].partition(":")[0]
