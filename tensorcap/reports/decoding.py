"""Typed values from JSON: the inverse of `reporting.json_value`, driven by annotations."""

from __future__ import annotations

import base64
import types
from collections.abc import Callable, Mapping
from collections.abc import Mapping as MappingType
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

_UNIONS: Final = (Union, types.UnionType)
_NUMBERS: Final = (bool, int, float, complex)


def decode_as(kind: Any, value: Any) -> Any:
    """A JSON value as what an annotation says.

    Args:
        kind: A dataclass, a scalar type, a tuple, a mapping with texts as keys, or a union of such.
        value: As `json_value` made it. Members that the dataclass does not have are left out.

    Raises:
        TypeError: The value is of another kind, or a member is missing.
        ValueError: A text is no number, or none of those that are allowed.

    Example:
        >>> decode_as(tuple[float | None, ...], [1.5, "inf", None])
        (1.5, inf, None)
    """
    return _decoder(kind)(value)


@cache
def _decoder(kind: Any) -> Callable[[Any], Any]:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value: value
    if origin in _UNIONS:
        return _union(arguments)
    if origin is Literal:
        return _one_of(arguments)
    if origin is tuple:
        return _tuple(arguments)
    if origin in (dict, MappingType, Mapping):
        item = _decoder(arguments[1])
        return lambda value: {key: item(entry) for key, entry in _checked(dict, value).items()}
    if is_dataclass(kind):
        return _dataclass(kind)
    if kind is float:
        return _float
    if kind is complex:
        return lambda value: complex(*map(_float, _checked(list, value)))
    if kind is bytes:
        return lambda value: base64.b64decode(_checked(str, value), validate=True)
    if kind is Path:
        return lambda value: Path(_checked(str, value))
    return lambda value: _checked(kind, value)


def _union(arguments: tuple[Any, ...]) -> Callable[[Any], Any]:
    chosen = [argument for argument in arguments if argument is not type(None)]
    if all(argument in _NUMBERS for argument in chosen):
        return _number(chosen, is_optional=len(chosen) < len(arguments))
    if len(chosen) != 1:
        raise TypeError(f"no JSON value is one of {arguments}")
    inner = _decoder(chosen[0])
    return lambda value: None if value is None else inner(value)


def _number(kinds: list[Any], *, is_optional: bool) -> Callable[[Any], Any]:
    def decode(value: Any) -> Any:
        if value is None and is_optional:
            return None
        if complex in kinds and isinstance(value, list):
            return complex(*map(_float, value))
        if int in kinds and isinstance(value, int):
            return value
        return _float(value) if float in kinds else _checked(kinds[0], value)

    return decode


def _one_of(arguments: tuple[Any, ...]) -> Callable[[Any], Any]:
    def decode(value: Any) -> Any:
        if value not in arguments:
            raise ValueError(f"{value!r} is none of {', '.join(map(repr, arguments))}")
        return value

    return decode


def _tuple(arguments: tuple[Any, ...]) -> Callable[[Any], Any]:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        item = _decoder(arguments[0])
        return lambda value: tuple(map(item, _checked(list, value)))
    items = [_decoder(argument) for argument in arguments]
    return lambda value: tuple(item(entry) for item, entry in zip(items, _checked(list, value), strict=True))


def _dataclass(kind: Any) -> Callable[[Any], Any]:
    hints = get_type_hints(kind)
    decoders = [(f.name, _decoder(hints[f.name]), f) for f in fields(kind)]

    def decode(value: Any) -> Any:
        members = _checked(dict, value)
        found = {}
        for name, decoder, about in decoders:
            if name in members:
                found[name] = decoder(members[name])
            elif about.default is MISSING and about.default_factory is MISSING:
                raise TypeError(f"{kind.__name__} has no {name!r}")
        return kind(**found)

    return decode


def _float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"{value!r} is no number")
    return float(value)


def _checked(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{value!r} is no {getattr(kind, '__name__', kind)}")
    return value
