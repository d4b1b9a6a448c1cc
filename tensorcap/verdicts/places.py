"""What kind of place a record is of, and the capture points that a run lists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from tensorcap_formats.keys import Key, escape

_GRADIENTS: Final = ("grad_output", "grad_input", "grad_param")
_HELD: Final = ("param", "buffer")


def is_inner(key: Key) -> bool:
    """Whether a record is of a place within a module's code: an op, a function, a probe."""
    return ":" in key.site and not key.is_bare


def is_result(key: Key) -> bool:
    """Whether a record is what a module returned."""
    return _kind(key) == "output" and not is_inner(key)


def is_gradient(key: Key) -> bool:
    """Whether a record is of the way back through the model."""
    return _kind(key) in _GRADIENTS and not is_inner(key)


def is_parameter(key: Key) -> bool:
    """Whether a record is what a module holds, and nothing that it computed."""
    return _kind(key) in _HELD and not is_inner(key)


def _kind(key: Key) -> str:
    """The first field of a slot, without the number of a second gradient: `grad_output:2`."""
    return key.slot.partition(".")[0].partition(":")[0]


def points_of(run: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The capture points that a run lists, those of a damaged list left out."""
    points = run.get("points")
    for point in points if isinstance(points, list) else ():
        if isinstance(point, Mapping) and isinstance(point.get("site"), str):
            yield point


def spellings(site: str) -> tuple[str, ...]:
    """A site as it is, and as a key spells it."""
    return (site, escape(site))
