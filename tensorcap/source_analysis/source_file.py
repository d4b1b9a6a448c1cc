"""Source files of Python, parsed and never imported."""

from __future__ import annotations

import ast
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tensorcap_formats.errors import ReadError, UsageError

_MAX_BYTES: Final = 16 * 1024 * 1024
_MAX_DEPTH: Final = 200  # of the syntax; what reads it calls itself for each level, a few times over
_SHOWN: Final = 90  # characters of code in a sentence


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One parsed file.

    Attributes:
        path: As it was named, or below the folder that was.
        tree: Its syntax tree.
    """

    path: Path
    tree: ast.Module

    def classes(self) -> dict[str, ast.ClassDef]:
        """The classes of the file by name, also those within functions and branches; the last one counts."""
        return {node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)}


def read_sources(paths: Iterable[str | os.PathLike[str]]) -> list[SourceFile]:
    """Parse files, and all .py files below folders.

    Raises:
        UsageError: A folder holds no .py file.
        ReadError: There is no such file, or it is no Python that this version can parse.
    """
    sources = []
    for path in map(Path, paths):
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        if not files:
            raise UsageError(f"{path}: holds no .py file, expected Python sources")
        sources += [_read(file) for file in files]
    return sources


def _read(path: Path) -> SourceFile:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ReadError(f"{path}: has more than {_MAX_BYTES} bytes, expected Python source")
        content = path.read_bytes()
    except OSError as error:
        if isinstance(error, ReadError):
            raise
        raise ReadError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        with warnings.catch_warnings():  # of escapes in texts, which are not ours to judge
            warnings.simplefilter("ignore")
            tree = ast.parse(content, str(path))
        if _depth(tree) > _MAX_DEPTH:
            raise RecursionError(f"it nests deeper than {_MAX_DEPTH} levels")
        return SourceFile(path, tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        where = f"{path}:{line}" if line else str(path)
        reason = getattr(error, "msg", None) or error
        raise ReadError(f"{where}: is no Python that can be parsed: {reason}") from None


def _depth(tree: ast.AST) -> int:
    """How deep a tree nests, as far as it is of interest whether that is too deep."""
    level, depth = [tree], 0
    while level and depth <= _MAX_DEPTH:
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        depth += 1
    return depth


def last_name(node: ast.expr) -> str:
    """The last part of a dotted name, "" of anything else.

    Example:
        >>> last_name(ast.parse("a.b.c", mode="eval").body), last_name(ast.parse("f()", mode="eval").body)
        ('c', '')
    """
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def dotted_name(node: ast.expr) -> str:
    """A dotted name as it is written, "" of anything else.

    Example:
        >>> dotted_name(ast.parse("self.mlp.up", mode="eval").body)
        'self.mlp.up'
    """
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def code_text(node: ast.AST) -> str:
    r"""Code in one short line.

    Example:
        >>> code_text(ast.parse("f(1,\n  2)").body[0])
        'f(1, 2)'
    """
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
