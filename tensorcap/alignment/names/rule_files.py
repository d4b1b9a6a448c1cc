"""Rule files: TOML of renamings, fusions and expected absences; the files that come with tensorcap.

A file may name a function for names that no pattern can tell: `names.py:canonical`. Its contract is
`def canonical(site: str) -> str`: it gets a name as it was captured, of either side, and returns the name
that both sides share. Numbers that count (layers, experts) come as numbers that stand for all of them,
1000000 for the first, 2000000 for the second; they belong in the result, plus or minus their offset.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Final

from tensorcap.alignment.map_file import header_lines, parse_toml
from tensorcap.alignment.mapping import SIDE_NAMES, SideName
from tensorcap.alignment.names.name_patterns import NamePattern, Rename
from tensorcap.alignment.names.rulesets import Expected, Fused, Rules
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import ReadError, UsageError, abbreviate

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
        name: Its name.
        signs: Patterns of qualified class names, any of which identifies the second ecosystem.
        rules: Its rules; `only_in` of an expected absence is `reference` for the first ecosystem.
    """

    name: str
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
    tables = parse_toml(text, path)
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
    return RuleFile(name, _texts(tables, "signs", path), rules)


def _tables(
    tables: Mapping[str, Any], kind: str, text: str, path: str
) -> Iterator[tuple[Mapping[str, Any], str]]:
    listed = tables.get(kind, [])
    if not isinstance(listed, list) or not all(isinstance(table, dict) for table in listed):
        raise UsageError(f"{path}:{_line_of(text, kind)}: {kind} is no list of tables, expected [[{kind}]]")
    lines = header_lines(text, kind)
    for i, table in enumerate(listed):
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
    sides = {side: side for side in SIDE_NAMES} | dict(zip(ecosystems, SIDE_NAMES, strict=False))
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
    side = sides[only_in] if only_in else None
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
    value = table.get(name, default)
    if value is None:
        raise UsageError(f"{where}: has no {name!r}, expected a text")
    if not isinstance(value, str):
        raise UsageError(f"{where}: {name} is {abbreviate(repr(value))}, expected a text")
    return value


def _texts(table: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    """A text or a list of texts; empty if the key is absent."""
    value = table.get(name, [])
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{where}: {name} is {abbreviate(repr(value))}, expected a text or a list of texts")
    return tuple(texts)


def load_function(text: str, folder: Path, where: str) -> Callable[[str], str]:
    """Load a function, running the file that it is in.

    Args:
        text: `FILE.py:FUNCTION`, the file beside the rule file.
        folder: Where that is.
        where: Place of the text, for messages.

    Returns:
        The function; it raises a UsageError of one line if the user's fails, or gives no name.

    Raises:
        ReadError: The file cannot be read.
        UsageError: The text names no function of it, or the file fails.
    """
    file, _, name = text.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise UsageError(f"{where}: function {abbreviate(text)!r}, expected 'FILE.py:FUNCTION'")
    path = folder / file
    try:
        source = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ReadError(f"{where}: function {text!r}: {path} cannot be read: {error.strerror}") from error
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
    except Exception as error:
        raise UsageError(f"{where}: {_describe_error(error, path)}, expected a file that runs") from error
    function = getattr(module, name, None)
    if not callable(function):
        known = ", ".join(n for n, value in vars(module).items() if isinstance(value, FunctionType))
        raise UsageError(f"{where}: {path} has no function {name!r}", hint=f"It has {known or 'none'}.")

    def canonical(site: str) -> str:
        call = f"{name}({abbreviate(site)!r})"
        try:
            result = function(site)
        except Exception as error:
            raise UsageError(f"{where}: {call}: {_describe_error(error, path)}, expected a name") from error
        if not isinstance(result, str) or not result:
            raise UsageError(f"{where}: {call} gave {abbreviate(repr(result))}, expected a name")
        return result

    return canonical


def _describe_error(error: Exception, path: Path) -> str:
    """An exception in one line, with the line of the user's file that it comes from."""
    traceback, line = error.__traceback__, getattr(error, "lineno", None)
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == str(path):
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    message = abbreviate(" ".join(str(error).split()))
    return f"{path}:{line or 1}: {type(error).__name__}: {message}".rstrip(": ")


_ORDER: Final = ("wrappers", "transformers", "neuron", "max", "vllm", "gguf")
_OTHER: Final[dict[SideName, SideName]] = {"reference": "target", "target": "reference"}


@cache
def catalogue() -> tuple[RuleFile, ...]:
    """All rule files of the catalogue, in the order in which they apply."""
    folder = files("tensorcap.alignment.names")
    return tuple(
        parse_rules((folder / f"{name}.toml").read_text(encoding="utf-8"), f"{name}.toml") for name in _ORDER
    )


def wrapper_rules() -> Rules:
    """The rules that remove what wrappers put before names, and doubled components."""
    return catalogue()[0].rules


def builtin_rules(reference: Archive, target: Archive) -> Rules:
    """Choose the rules of the catalogue for two archives.

    Names of all ecosystems are made equal, whichever the runs are of. What is missing in one ecosystem is
    expected only if the classes of one run, and not of the other, say that it is of that ecosystem.
    """
    classes = [_classes(archive) for archive in (reference, target)]
    chosen = []
    for file in catalogue():
        rules = file.rules
        if file.signs:
            is_of = [any(fnmatchcase(c, sign) for c in side for sign in file.signs) for side in classes]
            expected = rules.expected if is_of[0] != is_of[1] else ()
            if is_of[0]:  # the ecosystem that the file calls the target's is the reference's
                expected = tuple(
                    replace(one, only_in=_OTHER[one.only_in] if one.only_in else None) for one in expected
                )
            rules = replace(rules, expected=expected)
        chosen.append(rules)
    return Rules().before(*chosen)


def _classes(archive: Archive) -> set[str]:
    return {module.class_name for module in archive.info.modules.values()}
