"""Typed values from JSON: the inverse of `json_values.json_value`, driven by annotations, through cattrs.

cattrs converts what it is given (`int("1")`); a saved comparison is not trusted, so a value of another JSON
kind than the annotation's is refused here.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, get_args, get_origin

from cattrs import BaseValidationError, Converter, transform_error
from cattrs.cols import homogenous_tuple_structure_factory, is_mapping, is_sequence, mapping_structure_factory
from cattrs.gen import make_dict_structure_fn, make_hetero_tuple_structure_fn

from tensorcap_formats.errors import abbreviate

_NUMBERS: Final = {bool, int, float, complex, type(None)}
_Hook = Callable[[Any, Any], Any]


def decode_as(kind: Any, value: Any, converter: Converter | None = None) -> Any:
    """Convert a JSON value to the type of an annotation.

    Args:
        kind: A dataclass, a scalar type, a tuple, a mapping with texts as keys, or a union of such.
        value: As `json_value` converts it. Members that the dataclass does not have are left out.
        converter: One of `json_converter` that knows further types, or None.

    Raises:
        TypeError: The value is of another kind.
        ValueError: A member is missing or of another kind, a text is no number, or none of those that are
            allowed.

    Example:
        >>> decode_as(tuple[float | None, ...], [1.5, "inf", None])
        (1.5, inf, None)
    """
    try:
        return (converter or _converter()).structure(value, kind)
    except BaseValidationError as error:
        raise ValueError(transform_error(error, format_exception=_text)[0]) from None


def json_converter() -> Converter:
    """Make a converter from JSON to our types, to which a reader adds its own."""
    converter = Converter()
    for kind in (bool, int, str):
        converter.register_structure_hook(kind, lambda value, kind: _checked(kind, value))
    converter.register_structure_hook(float, lambda value, _: _float(value))
    converter.register_structure_hook(complex, lambda value, _: complex(*map(_float, _checked(list, value))))
    converter.register_structure_hook(
        bytes, lambda value, _: base64.b64decode(_checked(str, value), validate=True)
    )
    converter.register_structure_hook(Path, lambda value, _: Path(_checked(str, value)))
    converter.register_structure_hook_factory(_is_union_of_numbers, _number)
    for is_kind, json_kind, factory in (
        (is_sequence, list, homogenous_tuple_structure_factory),
        (_is_tuple_of_unlike, list, make_hetero_tuple_structure_fn),
        (is_mapping, dict, mapping_structure_factory),
        (is_dataclass, dict, make_dict_structure_fn),
    ):
        converter.register_structure_hook_factory(is_kind, _from(json_kind, factory))
    return converter


@cache
def _converter() -> Converter:
    return json_converter()


def _from(json_kind: type, factory: Callable[[Any, Converter], _Hook]) -> Callable[[Any, Converter], _Hook]:
    """A factory of hooks that take values of one JSON kind only."""

    def guarded(kind: Any, converter: Converter) -> _Hook:
        structure = factory(kind, converter)
        return lambda value, _: structure(_checked(json_kind, value), kind)

    return guarded


def _text(error: BaseException, _: type | None) -> str:
    return f"lacks {error}" if isinstance(error, KeyError) else abbreviate(str(error))


def _is_tuple_of_unlike(kind: Any) -> bool:
    return get_origin(kind) is tuple and not is_sequence(kind)


def _is_union_of_numbers(kind: Any) -> bool:
    return len(get_args(kind)) > 1 and set(get_args(kind)) <= _NUMBERS and get_origin(kind) is not tuple


def _number(kind: Any) -> _Hook:
    kinds = get_args(kind)

    def structure(value: Any, _: Any) -> Any:
        if value is None and type(None) in kinds:
            return None
        if complex in kinds and isinstance(value, list):
            return complex(*map(_float, value))
        if int in kinds and isinstance(value, int):
            return value
        return _float(value) if float in kinds else _checked(kinds[0], value)

    return structure


def _float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"{value!r} is no number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError("an integer is beyond float64") from None


def _checked(kind: type, value: Any) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
