"""Hostile JSON: one value of a text exchanged for one that a reader does not expect."""

from __future__ import annotations

import json
import random
from typing import Any, Final

_MARK: Final = "@raw@"
_DEEP: Final = 20_000
_TEXTS: Final = (  # as they stand in the file
    "null",
    "true",
    "-1",
    "0",
    "0.5",
    "-0.0",
    "1e999",
    "NaN",
    "-Infinity",
    "2147483648",
    "4294967295",
    "9223372036854775807",
    "18446744073709551616",
    "1" + "0" * 400,
    "1" * 5000,
    '""',
    '"\\u0000"',
    '"\\ud800"',
    '"\\u001b[2J\\u202e\\u0007name\\r\\nanother line"',
    '"../../outside"',
    '"/etc/hostname"',
    '"' + "x" * 4000 + '"',
    '"float32"',
    '"float4_e2m1fn_x2"',
    "[]",
    "{}",
    "[1, 2, 3]",
    "[0, 9223372036854775807, 9223372036854775807]",
    "[4294967296, 4294967296]",
    "[[[[]]]]",
    "[" * _DEEP + "]" * _DEEP,
    '{"a":' * _DEEP + "1" + "}" * _DEEP,
    '{"a": 1, "a": 2}',
)


def mutated_json(text: str, draw: random.Random) -> str:
    """The text of a JSON value with one or two of its parts changed."""
    value = json.loads(text)
    raw: list[str] = []
    for _ in range(draw.choice((1, 1, 1, 2))):
        value = _mutated(value, draw, raw)
    result = json.dumps(value, ensure_ascii=draw.random() < 0.5, separators=(",", ":"))
    for number, part in enumerate(raw):
        result = result.replace(f'"{_MARK}{number}"', part)
    return result


def _mutated(value: Any, draw: random.Random, raw: list[str]) -> Any:
    places = _places(value)
    if not places:
        return _hostile(draw, raw)
    holder, name = draw.choice(places)
    kind = draw.randrange(8)
    if kind == 0 and isinstance(holder, dict):
        del holder[name]
    elif kind == 1 and isinstance(holder, dict):
        holder[_name(draw)] = holder.pop(name)
    elif kind == 2:
        other, from_name = draw.choice(places)
        if from_name in other if isinstance(other, dict) else from_name < len(other):
            holder[name] = json.loads(json.dumps(other[from_name]))
    elif kind == 3 and isinstance(holder, list):
        holder.insert(name, holder[name])
    elif kind == 4 and isinstance(holder, list):
        del holder[name]
    elif kind == 5 and isinstance(holder[name], int):
        holder[name] = holder[name] + draw.choice((-1, 1, -(2**31), 2**31, 2**32, 2**63))
    else:
        holder[name] = _hostile(draw, raw)
    return value


def _hostile(draw: random.Random, raw: list[str]) -> str:
    raw.append(draw.choice(_TEXTS))
    return f"{_MARK}{len(raw) - 1}"


def _name(draw: random.Random) -> str:
    return draw.choice(
        ("", "x", "../x", "/x", "a\x1b[2J", "\ud800", "n" * 3000, "0/m/output", "\u202e", "a\nb")
    )


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a value that can be assigned to."""
    places: list[tuple[Any, Any]] = []
    rest = [value]
    while rest:
        holder = rest.pop()
        items = holder.items() if isinstance(holder, dict) else enumerate(holder)
        for name, item in items:
            places.append((holder, name))
            if isinstance(item, dict | list):
                rest.append(item)
    return places if isinstance(value, dict | list) else []
