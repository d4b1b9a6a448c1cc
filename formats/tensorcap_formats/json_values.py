"""Values as JSON has them: dataclasses as objects, and numbers that JSON lacks as strings or lists."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache, singledispatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_PLAIN: Final = frozenset({type(None), bool, int, str})  # as they are


@singledispatch
def json_value(value: object) -> Any:
    """Convert a value to what `json.dumps` takes with `allow_nan=False`.

    Dataclasses become objects of all their fields; types that are to look otherwise are registered.

    Example:
        >>> json_value({"psnr": float("inf"), "at": (1, 2), "value": 1 - 2j})
        {'psnr': 'inf', 'at': [1, 2], 'value': [1.0, -2.0]}
    """
    if is_dataclass(value) and not isinstance(value, type):
        return json_object(value)
    if isinstance(value, Mapping):
        return {key: json_value(item) for key, item in value.items()}
    return value


@json_value.register
def _(value: float) -> Any:
    return value if math.isfinite(value) else str(value)


@json_value.register
def _(value: complex) -> Any:
    return [json_value(value.real), json_value(value.imag)]


@json_value.register(list)
@json_value.register(tuple)
def _(value: list[Any] | tuple[Any, ...]) -> Any:
    return [
        item
        if type(item) in _PLAIN
        else list(item)
        if type(item) is tuple and _PLAIN.issuperset(map(type, item))
        else json_value(item)
        for item in value
    ]


@json_value.register
def _(value: Path) -> Any:
    return str(value)


def json_object(value: DataclassInstance) -> dict[str, Any]:
    """All fields of a dataclass, as `json_value` has each."""
    members = {}
    for name in _field_names(type(value)):
        member = getattr(value, name)
        is_plain = type(member) in _PLAIN or (type(member) is float and math.isfinite(member))
        members[name] = member if is_plain else json_value(member)
    return members


@cache
def _field_names(kind: type[DataclassInstance]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))
