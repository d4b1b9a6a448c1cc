"""The source text of modules, as an archive keeps it: which text is of a row, and which line of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from typing import Any, Final

_LONGEST: Final = 1 << 19  # characters of a text that is coloured: more would take seconds
_FORWARD: Final = re.compile(r"\s*(?:async\s+)?def (?:forward|__call__)\b")


@dataclass(frozen=True, slots=True)
class SourceText:
    """The text of a class or a function.

    Attributes:
        name: Its qualified name.
        file: The file that it stands in.
        first: Number of its first line.
        text: The text.
    """

    name: str
    file: str
    first: int
    text: str

    @property
    def last(self) -> int:
        """Number of its last line."""
        return self.first + max(0, len(self.text.splitlines()) - 1)


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A text with the line that is marked.

    Attributes:
        source: The text.
        line: The line that is marked; None if none is known.
        why: What the line is, as a phrase.
    """

    source: SourceText
    line: int | None
    why: str

    def lines(self) -> Iterator[tuple[int, str]]:
        """Number and HTML of each line, with colours."""
        return enumerate(_coloured(self.source.text), self.source.first)


@dataclass(frozen=True, slots=True)
class SourceTexts:
    """The texts that an archive keeps, by qualified name of the class or function."""

    by_name: Mapping[str, SourceText]

    @classmethod
    def of(cls, run: Mapping[str, Any]) -> SourceTexts:
        """Read them off a run's metadata; what is damaged counts as absent."""
        entries = run.get("sources")
        texts = {}
        for name, entry in entries.items() if isinstance(entries, Mapping) else ():
            if not isinstance(entry, Mapping):
                continue
            file, line, text = (entry.get(member) for member in ("file", "line", "text"))
            if isinstance(file, str) and isinstance(text, str) and type(line) is int and line > 0:
                texts[str(name)] = SourceText(str(name), file, line, text)
        return cls(texts)

    def of_line(self, file: str | None, line: int | None) -> Excerpt | None:
        """The innermost text that has a line of a file, with that line marked."""
        if not file or not line:
            return None
        around = [s for s in self.by_name.values() if s.file == file and s.first <= line <= s.last]
        if not around:
            return None
        return Excerpt(min(around, key=lambda s: s.last - s.first), line, "the line that ran the op")

    def call_of(self, child: str, class_name: str) -> Excerpt | None:
        """The text of a class with the line that calls a child marked; None if no line of it does.

        Args:
            child: Path of the child below the module.
            class_name: The class's qualified name.
        """
        source = self.by_name.get(class_name)
        if source is None:
            return None
        lines = source.text.splitlines()
        name = re.escape(child.partition(".")[0])
        at = _first(lines, re.compile(rf".*\bself\.{name}\s*\(")) or _first(
            lines, re.compile(rf".*\bin .*\bself\.{name}\b")
        )
        return None if at is None else Excerpt(source, source.first + at, f"where it calls {child}")

    def of_class(self, class_name: str) -> Excerpt | None:
        """The text of a class with the line that its call begins with marked."""
        source = self.by_name.get(class_name)
        if source is None:
            return None
        at = _first(source.text.splitlines(), _FORWARD)
        return Excerpt(source, None if at is None else source.first + at, "where its call begins")


def _first(lines: Sequence[str], pattern: re.Pattern[str]) -> int | None:
    return next((at for at, line in enumerate(lines) if pattern.match(line)), None)


@lru_cache(maxsize=64)
def _coloured(text: str) -> tuple[str, ...]:
    """The lines of Python source as HTML: escaped, with spaces for what is not printable."""
    text = "".join(c if c.isprintable() or c in "\t\n" else " " for c in text)
    if len(text) > _LONGEST:
        return tuple(escape(line) for line in text.removesuffix("\n").split("\n"))
    from pygments import lex
    from pygments.lexers.python import PythonLexer
    from pygments.token import STANDARD_TYPES

    lines = [""]
    for kind, value in lex(text, PythonLexer(stripnl=False, ensurenl=False)):
        style = STANDARD_TYPES.get(kind) or STANDARD_TYPES.get(kind.parent, "")
        for number, part in enumerate(value.split("\n")):
            if number:
                lines.append("")
            if part:
                lines[-1] += f'<span class="{style}">{escape(part)}</span>' if style else escape(part)
    return tuple(lines if lines[-1] else lines[:-1])
