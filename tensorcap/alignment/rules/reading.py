"""Rule files: TOML of renamings, fusions and what is expected, and functions for what data cannot say."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast, get_args

from tensorcap.alignment.rules.functions import load_function
from tensorcap.alignment.rules.renaming import NamePattern, Rename
from tensorcap.alignment.rules.ruleset import Expected, Fused, Rules, Side
from tensorcap_formats.errors import ReadError, UsageError, abbreviate

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_HEAD: Final = ("name", "ecosystems", "signs", "function")
_TABLES: Final = {
    "rename": ("from", "to", "at", "example", "examples"),
    "fused": ("parts", "whole", "axis", "example", "examples"),
    "expected": ("only_in", "sites", "classes", "reason", "example", "examples"),
}
Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class RuleFile:
    """One rule file.

    Attributes:
        name: What it is called.
        ecosystems: Those of the reference and of the target, for whom it speaks; empty where it is for any.
        signs: Patterns of qualified class names, of which one tells the second ecosystem.
        rules: What it says; `only_in` of what is expected is `reference` for the first ecosystem.
    """

    name: str
    ecosystems: tuple[str, ...]
    signs: tuple[str, ...]
    rules: Rules


def read_rules(path: str | os.PathLike[str]) -> Rules:
    """Read a user's rule file.

    Raises:
        ReadError: It, or the file of a function that it names, cannot be read or is no TOML.
        UsageError: A rule makes no sense; the message says at which line its table begins.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ReadError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ReadError(f"{path}: is no TOML: {error}") from error
    return parse_rules(text, str(path)).rules


def parse_rules(text: str, path: str) -> RuleFile:
    """Read the text of a rule file.

    Args:
        text: The text.
        path: Where it stands; functions are looked for beside it.

    Raises:
        ReadError: It is no TOML, or the file of a function cannot be read.
        UsageError: A rule makes no sense.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ReadError(f"{path}: is no TOML: {error}") from error
    for name in tables:
        if name not in (*_HEAD, *_TABLES):
            known = ", ".join((*_HEAD, *(f"[[{table}]]" for table in _TABLES)))
            raise UsageError(f"{path}:{_line_of(text, name)}: has {abbreviate(name)!r}, expected {known}")
    name = _text(tables, "name", path, default=Path(path).stem)
    ecosystems = _texts(tables, "ecosystems", path)
    if len(ecosystems) not in (0, 2):
        raise UsageError(f"{path}: ecosystems names {len(ecosystems)}, expected two")
    functions: tuple[Callable[[str], str], ...] = ()
    if "function" in tables:
        where = f"{path}:{_line_of(text, 'function')}"
        functions = (load_function(_text(tables, "function", where), Path(path).parent, where),)
    read = {kind: list(_tables(tables, kind, text, path)) for kind in _TABLES}
    rules = Rules(
        functions,
        tuple(rename for table, where in read["rename"] for rename in _renames(table, where)),
        tuple(_fused(table, where) for table, where in read["fused"]),
        tuple(_expected(table, where, ecosystems) for table, where in read["expected"]),
    )
    if not (functions or rules.renames or rules.fused or rules.expected):
        raise UsageError(f"{path}: has no rule, expected [[rename]], [[fused]], [[expected]] or a function")
    return RuleFile(name, ecosystems, _texts(tables, "signs", path), rules)


def _tables(
    tables: Mapping[str, Any], kind: str, text: str, path: str
) -> Iterator[tuple[Mapping[str, Any], str]]:
    found = tables.get(kind, [])
    if not isinstance(found, list) or not all(isinstance(table, dict) for table in found):
        raise UsageError(f"{path}:{_line_of(text, kind)}: {kind} is no list of tables, expected [[{kind}]]")
    header = re.compile(rf"\s*\[\[\s*{kind}\s*\]\]")
    lines = [number for number, line in enumerate(text.splitlines(), 1) if header.match(line)]
    for i, table in enumerate(found):
        where = f"{path}:{lines[i] if i < len(lines) else _line_of(text, kind)}"
        for name in table:
            if name not in _TABLES[kind]:
                known = ", ".join(_TABLES[kind])
                raise UsageError(f"{where}: [[{kind}]] has {abbreviate(name)!r}, expected {known}")
        yield table, where


def _line_of(text: str, name: str) -> int:
    """The line at which a key of the file stands first."""
    key = re.compile(rf"\s*(\[\[?\s*)?[\"']?{re.escape(name)}\b")
    return next((i for i, line in enumerate(text.splitlines(), 1) if key.match(line)), 1)


def _renames(table: Mapping[str, Any], where: str) -> Iterator[Rename]:
    patterns, at = _texts(table, "from", where), _text(table, "at", where, default="anywhere")
    if not patterns:
        raise UsageError(f"{where}: [[rename]] has no 'from', expected a name or a list of names")
    to, examples = _text(table, "to", where), _examples(table, where)
    for pattern in patterns:
        try:
            yield Rename.parse(pattern, to, at=at, where=where, examples=examples)
        except UsageError as error:
            raise UsageError(f"{where}: {error}", hint=error.hint) from None
        examples = ()


def _fused(table: Mapping[str, Any], where: str) -> Fused:
    parts, whole = _texts(table, "parts", where), _text(table, "whole", where)
    if len(set(parts)) < max(2, len(parts)):
        raise UsageError(f"{where}: parts are {', '.join(parts) or 'none'}, expected two or more, each once")
    dotted = next((name for name in (*parts, whole) if "." in name or not name), None)
    if dotted is not None:
        raise UsageError(f"{where}: {dotted!r}, expected the last component of a name")
    axis = table.get("axis")
    if axis is not None and (not isinstance(axis, int) or isinstance(axis, bool)):
        raise UsageError(f"{where}: axis is {abbreviate(repr(axis))}, expected a whole number")
    return Fused(parts, whole, where, axis, _examples(table, where))


def _expected(table: Mapping[str, Any], where: str, ecosystems: tuple[str, ...]) -> Expected:
    reason = _text(table, "reason", where)
    if not reason:
        raise UsageError(f"{where}: [[expected]] has an empty reason, expected why it is no bug")
    sides = {**dict(zip(get_args(Side), get_args(Side), strict=True))}
    sides |= dict(zip(ecosystems, get_args(Side), strict=False))
    only_in = _text(table, "only_in", where, default="")
    if only_in and only_in not in sides:
        raise UsageError(f"{where}: only_in {only_in!r}, expected one of {', '.join(sides)}")
    sites, classes = _texts(table, "sites", where), _texts(table, "classes", where)
    if not sites and not classes:
        raise UsageError(f"{where}: [[expected]] has no sites and no classes, expected one of them")
    try:
        patterns = tuple(NamePattern.parse(site, "end") for site in sites)
    except UsageError as error:
        raise UsageError(f"{where}: {error}", hint=error.hint) from None
    side = cast("Side", sides[only_in]) if only_in else None
    return Expected(reason, where, side, patterns, classes, _examples(table, where))


def _examples(table: Mapping[str, Any], where: str) -> Pairs:
    listed = table.get("examples", [table["example"]] if "example" in table else [])
    pairs = []
    for pair in listed if isinstance(listed, list) else [listed]:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(name, str) for name in pair):
            raise UsageError(f"{where}: example {abbreviate(str(pair))}, expected two names")
        pairs.append((pair[0], pair[1]))
    return tuple(pairs)


def _text(table: Mapping[str, Any], name: str, where: str, *, default: str | None = None) -> str:
    found = table.get(name, default)
    if found is None:
        raise UsageError(f"{where}: has no {name!r}, expected a text")
    if not isinstance(found, str):
        raise UsageError(f"{where}: {name} is {abbreviate(repr(found))}, expected a text")
    return found


def _texts(table: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    """A text or a list of texts; nothing where it is not there."""
    found = table.get(name, [])
    texts = [found] if isinstance(found, str) else found
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{where}: {name} is {abbreviate(repr(found))}, expected a text or a list of texts")
    return tuple(texts)
