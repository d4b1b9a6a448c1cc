"""Map files: a mapping as TOML, to be read and edited by people."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast, get_args

from tensorcap.alignment.layout import Dims
from tensorcap.alignment.mapping import (
    Alignment,
    Entry,
    Evidence,
    LeftOver,
    parse_values,
    values_text,
)
from tensorcap.alignment.tokens import How, TokenRule
from tensorcap_formats.errors import ReadError, UsageError, WriteError, abbreviate
from tensorcap_formats.output_path import is_stream, publish_text
from tensorcap_formats.writing import refuse_to_replace_archive

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from tomlkit.items import Item

_KINDS: Final = ("pair", "left_over")
_PAIR: Final = ("reference", "target", "steps", "dims", "reference_dims", "evidence", "reason")
_TOKENS: Final = ("step", "dims", "reference", "target")
_LEFT: Final = ("side", "sites", "reason", "explained")


def parse_map(text: str, path: str | os.PathLike[str]) -> Alignment:
    """Read the text of a map file.

    Args:
        text: The text.
        path: Where it is from, for messages.

    Raises:
        ReadError: It is no TOML.
        UsageError: An entry makes no sense; the message says at which line it begins.
    """
    tables = parse_toml(text, path)
    for name in tables:
        if name not in (*_KINDS, "tokens"):
            raise UsageError(f"{path}: has a table {name!r}, expected [[pair]], [[left_over]] and [tokens]")
    pairs, lefts = (_tables(path, tables, kind, header_lines(text, kind)) for kind in _KINDS)
    entries = [_entry(table, where) for table, where in pairs]
    left = [_left(table, where) for table, where in lefts]
    rule = _token_rule(tables["tokens"], f"{path}: [tokens]") if "tokens" in tables else None
    if not entries and rule is None:
        raise UsageError(f"{path}: has no [[pair]] and no [tokens]")
    return Alignment(tuple(entries), tuple(left), rule)


def write_map(
    alignment: Alignment, path: str | os.PathLike[str], *, title: str = "", replace: bool = False
) -> None:
    """Write a map file.

    Args:
        alignment: What to write.
        path: Where to.
        title: Lines that stand first, as a comment.
        replace: Whether a file that is there may be replaced.

    Raises:
        WriteError: A file is there, or it cannot be written.
    """
    write_text(map_text(alignment, title=title), path, replace=replace)


def write_text(text: str, path: str | os.PathLike[str], *, replace: bool) -> None:
    """Write a text as a file, or to a pipe or a device.

    Raises:
        WriteError: A file is there and not to be replaced, or an archive is; or it cannot be written.
    """
    path = Path(path)
    if not is_stream(path):
        if not replace and os.path.lexists(path):
            raise WriteError(f"{path}: is there already", hint="Replace it with --force.")
        refuse_to_replace_archive(path)
    with publish_text(path, beginning="") as file:
        file.write(text)


def map_text(alignment: Alignment, *, title: str = "") -> str:
    """A map file's text, which `parse_map` reads back."""
    import tomlkit

    document = tomlkit.document()
    for line in title.splitlines():
        document.add(tomlkit.comment(line))
    tables = {
        "tokens": _rule_table(alignment.tokens) if alignment.tokens else {},
        "pair": [_entry_table(entry) for entry in alignment.entries],
        "left_over": [_left_table(left) for left in alignment.left_over],
    }
    for name, table in tables.items():
        if table:
            document.add(name, tomlkit.item(table))
    return document.as_string()


def _rule_table(rule: TokenRule) -> dict[str, Item]:
    members = {"step": rule.step, "dims": rule.dims, "reference": rule.reference, "target": rule.target}
    return {name: _item(value) for name, value in members.items() if value}


def _entry_table(entry: Entry) -> dict[str, Item]:
    members = {
        "reference": _places(entry.reference),
        "target": _places(entry.target),
        **{name: values_text(values) for name, values in entry.variables.items()},
        "steps": entry.steps,
        "dims": entry.dims,
        "reference_dims": entry.reference_dims,
        "evidence": entry.evidence,
        "reason": entry.reason,
    }
    return {name: _item(value) for name, value in members.items() if value}


def _left_table(left: LeftOver) -> dict[str, Item]:
    members = {"side": left.side, "sites": left.places, "reason": left.reason}
    explained = {} if left.is_explained else {"explained": False}
    return {name: _item(value) for name, value in {**members, **explained}.items()}


def _places(places: tuple[str, ...]) -> str | tuple[str, ...]:
    return places[0] if len(places) == 1 else places


def _item(value: Any) -> Item:
    """A value as TOML; a literal string if the text has quotes of its own."""
    import tomlkit

    if isinstance(value, str):
        return tomlkit.string(value, literal='"' in value and "'" not in value and value.isprintable())
    if isinstance(value, tuple):
        array = tomlkit.array()
        array.extend(map(_item, value))
        return array
    if isinstance(value, Mapping):
        table = tomlkit.inline_table()
        table.update({name: _item(inner) for name, inner in value.items()})
        return table
    item: Item = tomlkit.item(value)
    return item


def parse_toml(text: str, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Parse a TOML file's text.

    Raises:
        ReadError: It is no TOML.
    """
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also of numbers of too many digits
        raise ReadError(f"{path}: is no TOML: {error}") from None


def header_lines(text: str, kind: str) -> list[int]:
    """The line numbers at which tables of a kind begin."""
    header = re.compile(rf"\s*\[\[\s*{kind}\s*\]\]")
    return [number for number, line in enumerate(text.splitlines(), 1) if header.match(line)]


def _tables(
    path: object, tables: Mapping[str, Any], kind: str, lines: list[int]
) -> Iterator[tuple[Mapping[str, Any], str]]:
    listed = tables.get(kind, [])
    if not isinstance(listed, list) or not all(isinstance(table, dict) for table in listed):
        raise UsageError(f"{path}: {kind} is no list of tables, expected [[{kind}]]")
    for i, table in enumerate(listed):
        yield table, f"{path}:{lines[i] if i < len(lines) else 1}"


def _entry(table: Mapping[str, Any], where: str) -> Entry:
    reference, target = (_texts(table, name, where) for name in ("reference", "target"))
    variables = {}
    for name, value in table.items():
        if name in _PAIR:
            continue
        try:
            variables[name] = parse_values(_listed(value))
        except UsageError as error:
            raise UsageError(f"{where}: {name}: {error}") from None
    evidence = table.get("evidence", "user")
    if evidence not in get_args(Evidence):
        raise UsageError(f"{where}: evidence {evidence!r}, expected one of {', '.join(get_args(Evidence))}")
    steps = _texts(table, "steps", where) if "steps" in table else ()
    texts = {name: _text(table, name, where) for name in ("reason", "dims", "reference_dims")}
    entry = Entry(reference, target, variables, steps, cast("Evidence", evidence), where=where, **texts)
    entry.check()
    return entry


def _listed(value: object) -> str:
    """Numbers of a variable as one text, which a file may give as a text, a number or a list of either."""
    parts = value if isinstance(value, list) else [value]
    if not all(isinstance(part, (str, int)) for part in parts):
        raise UsageError("expected numbers, as 3 or '0-31' or [3, 7]")
    return ",".join(map(str, parts))


def _token_rule(table: object, where: str) -> TokenRule:
    if not isinstance(table, dict):
        raise UsageError(f"{where}: expected a table")
    for name in table:
        if name not in _TOKENS:
            raise UsageError(f"{where}: has {name!r}, expected {', '.join(_TOKENS)}")
    sides = [table.get(name, {}) for name in ("reference", "target")]
    for side in sides:
        if not isinstance(side, dict) or not all(isinstance(place, str) for place in side.values()):
            raise UsageError(f"{where}: found {abbreviate(repr(side))}, expected places by role")
    step, dims = (_text(table, name, where) for name in ("step", "dims"))
    try:
        Dims.parse(dims)
    except UsageError as error:
        raise UsageError(f"{where}: {error}", hint=error.hint) from None
    return TokenRule(cast("How", step), dims, *sides)


def _left(table: Mapping[str, Any], where: str) -> LeftOver:
    for name in table:
        if name not in _LEFT:
            raise UsageError(f"{where}: has {name!r}, expected {', '.join(_LEFT)}")
    side = table.get("side")
    if side not in ("reference", "target"):
        raise UsageError(f"{where}: side {side!r}, expected 'reference' or 'target'")
    is_explained = table.get("explained", True)
    if not isinstance(is_explained, bool):
        raise UsageError(f"{where}: explained: found {is_explained!r}, expected true or false")
    return LeftOver(side, _texts(table, "sites", where), _text(table, "reason", where), is_explained)


def _texts(table: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    value = table.get(name)
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not listed or not all(isinstance(v, str) and v for v in listed):
        shown = "nothing" if value is None else abbreviate(repr(value))
        raise UsageError(f"{where}: {name}: found {shown}, expected a text or a list of texts")
    return tuple(listed)


def _text(table: Mapping[str, Any], name: str, where: str) -> str:
    value = table.get(name, "")
    if not isinstance(value, str):
        raise UsageError(f"{where}: {name}: found {abbreviate(repr(value))}, expected a text")
    return value
