"""Patterns of module names, and what they are replaced by: whole components only, never parts of words.

`module` fits `module.fc` and not `submodule.fc`. `{i}` stands for a number, `{*x}` for any component that is
no number, `{x:a|b}` for one of these, `*` for any characters of a component. A variable that stands twice
is the same both times. In a replacement, `{i+1}` and `{i-1}` are the numbers beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, cast, get_args

from tensorcap_formats.errors import UsageError, abbreviate
from tensorcap_formats.keys import ROOT_SITE

At = Literal["anywhere", "start", "end", "whole"]

_VARIABLE: Final = re.compile(r"\{(\*?)([a-z_]\w*)(?::([^{}]*))?\}")
_FILLED: Final = re.compile(r"\{\*?([a-z_]\w*)([+-]\d+)?\}")


@dataclass(frozen=True, slots=True)
class NamePattern:
    """Components of a name.

    Attributes:
        text: As it was written.
        at: Where in a name they have to stand.
        regex: What fits it.
        needle: Text that every name that fits has in it; says quickly that a name does not.
        numbers: The variables that stand for numbers.
    """

    text: str
    at: At
    regex: re.Pattern[str]
    needle: str
    numbers: frozenset[str]

    @classmethod
    def parse(cls, text: str, at: str = "anywhere") -> NamePattern:
        """Read a pattern.

        Raises:
            UsageError: It makes no sense.
        """
        if at not in get_args(At):
            raise UsageError(f"at {abbreviate(at)!r}, expected one of {', '.join(get_args(At))}")
        numbers: dict[str, bool] = {}
        fixed: list[str] = []
        parts = [_component(part, numbers, fixed, text) for part in text.split(".")]
        before = r"^" if at in ("start", "whole") else r"(?:^|(?<=\.))"
        after = r"$" if at in ("end", "whole") else r"(?=\.|$)"
        regex = re.compile(before + r"\.".join(parts) + after)
        needle = max(fixed, key=len, default="")
        return cls(
            text, cast("At", at), regex, needle, frozenset(n for n, is_number in numbers.items() if is_number)
        )

    def fits(self, name: str) -> bool:
        """Whether it stands in a name."""
        return self.needle in name and self.regex.search(name) is not None


def _component(part: str, numbers: dict[str, bool], fixed: list[str], text: str) -> str:
    """The expression of one component; its variables go to `numbers`, its literal texts to `fixed`."""
    expression = ""
    if not part:
        raise UsageError(f"name {abbreviate(text)!r}: a component is empty")
    for literal, variable in _pieces(part):
        if "{" in literal or "}" in literal:
            hint = "Variables are {i} for a number, {*x} for a name, {x:a|b} for one of some names."
            raise UsageError(f"name {abbreviate(text)!r}: {literal!r} is no variable", hint=hint)
        fixed += literal.split("*")
        expression += r"[^.]*".join(map(re.escape, literal.split("*")))
        if variable is None:
            continue
        is_name, name, choices = variable.groups()
        if is_name and choices is not None:
            raise UsageError(f"name {abbreviate(text)!r}: {variable[0]!r}, expected {{*x}} or {{x:a|b}}")
        if name in numbers:
            expression += f"(?P={name})"
            continue
        numbers[name] = not is_name and choices is None
        if choices is not None:
            expression += f"(?P<{name}>{'|'.join(map(re.escape, choices.split('|')))})"
        else:
            expression += rf"(?P<{name}>(?!\d+(?:\.|$))[^.]+)" if is_name else rf"(?P<{name}>\d+)"
    return expression


def _pieces(part: str) -> Iterator[tuple[str, re.Match[str] | None]]:
    start = 0
    for variable in _VARIABLE.finditer(part):
        yield part[start : variable.start()], variable
        start = variable.end()
    yield part[start:], None


@dataclass(frozen=True, slots=True)
class Rename:
    """Components that are replaced.

    Attributes:
        pattern: What is replaced.
        to: What by; nothing if it is empty.
        where: Where it was written, `rules.toml:12`.
        examples: Two names each that the file's rules make equal.
    """

    pattern: NamePattern
    to: str
    where: str
    examples: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(
        cls, text: str, to: str, *, at: str, where: str, examples: tuple[tuple[str, str], ...] = ()
    ) -> Rename:
        """Read a renaming.

        Raises:
            UsageError: A pattern makes no sense, or what it is replaced by uses a variable that it has not.
        """
        pattern = NamePattern.parse(text, at)
        for name, offset in _FILLED.findall(to):
            if name not in pattern.regex.groupindex:
                raise UsageError(f"to {abbreviate(to)!r}: there is no variable {name!r} in {text!r}")
            if offset and name not in pattern.numbers:
                raise UsageError(f"to {abbreviate(to)!r}: {name!r} is no number, expected no offset")
        if "{" in _FILLED.sub("", to) or "*" in _FILLED.sub("", to):
            raise UsageError(f"to {abbreviate(to)!r}: expected a name with variables such as {{i}}")
        return cls(pattern, to, where, examples)

    def applied(self, name: str) -> str:
        """The name with every fit replaced, from left to right; where an index would be negative it stays."""
        if self.pattern.needle not in name:
            return name
        changed = self.pattern.regex.sub(self._filled, name)
        return ".".join(filter(None, changed.split("."))) or ROOT_SITE if changed != name else name

    def _filled(self, match: re.Match[str]) -> str:
        values: dict[str, str] = match.groupdict()
        for name, offset in _FILLED.findall(self.to):
            if offset and int(values[name]) + int(offset) < 0:
                return match[0]

        def fill(variable: re.Match[str]) -> str:
            value = values[variable[1]]
            return str(int(value) + int(variable[2])) if variable[2] else value

        return _FILLED.sub(fill, self.to)
