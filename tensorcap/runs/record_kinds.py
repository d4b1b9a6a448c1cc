"""Kinds of records by key (results, gradients, parameters, places within modules), and of modules by site."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from tensorcap_formats.keys import ROOT_SITE, Key

_GRADIENTS: Final = ("grad_output", "grad_input", "grad_param")
_PARAMETERS: Final = ("param", "buffer")
BESIDE_WEIGHT: Final = (
    "_packed",
    "_step",
    "_zero",
)  # behind the slot of a weight in few bits: how it is kept


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


def component_of(site: str) -> str:
    """What kind of module a site is: its path below the innermost number, or the whole without numbers.

    Example:
        >>> component_of("model.layers.2.mlp.act_fn"), component_of("model.layers.2"), component_of("lm_head")
        ('mlp.act_fn', 'layers', 'lm_head')
    """
    if site == ROOT_SITE:
        return "model"
    parts = site.split(".")
    at = next((i for i in reversed(range(len(parts))) if parts[i].isdigit()), None)
    if at is None:
        return site
    below = parts[at + 1 :]
    if below:
        return ".".join(below)
    return parts[at - 1] if at else "block"


@lru_cache(maxsize=4096)
def _kind(slot: str) -> str:
    """The first field of a slot, without the number of a second gradient: `grad_output:2`."""
    return slot.partition(".")[0].partition(":")[0]
