"""Class names, and the source text of classes of modules and of functions that ran ops, for the metadata."""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import sys
from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final

from tensorcap.workload.metadata import redact

_MOST: Final = 8 << 20  # characters of all texts of a run: a model with a thousand classes has less

NAMED: Final = (type, FunctionType, MethodType, BuiltinFunctionType)  # have a qualified name themselves


def class_name(thing: object) -> str:
    """The qualified class name of an object, or of the class or function itself."""
    named = thing if isinstance(thing, NAMED) else type(thing)
    module = getattr(named, "__module__", None)
    name = str(getattr(named, "__qualname__", type(thing).__qualname__))
    return name if module in (None, "builtins") else f"{module}.{name}"


def find_sources(modules: Iterable[object]) -> dict[str, Any]:
    """Find the file, line and text of the classes of modules; those written in C have none."""
    sources: dict[str, Any] = {}
    room = _MOST
    for module in modules:
        cls = type(module)
        name = class_name(cls)
        if name in sources:
            continue
        file = file_of(cls)
        lines = linecache.getlines(file) if file else []
        if not file or not lines:
            continue
        span = _class_lines("".join(lines)).get(cls.__qualname__.replace("<locals>.", ""))
        if span is not None:
            text = redact("".join(lines[span[0] - 1 : span[1]]))
            if len(text) <= room:
                room -= len(text)
                sources[name] = {"file": redact(file), "line": span[0], "text": text}
    return sources


def find_functions(lines: Iterable[tuple[str, int]], known: Mapping[str, Any]) -> dict[str, Any]:
    """Find the text of the function or method around each line that no known text has.

    Args:
        lines: File, as `redact` left it, and line.
        known: Texts as `find_sources` gives them.

    Returns:
        Texts of the same form, named `FILE:FUNCTION`; `known` and they have 8 Mi characters at most.
    """
    room = _MOST - sum(len(entry["text"]) for entry in known.values())
    spans: dict[str, list[tuple[int, int]]] = {}
    for entry in known.values():
        end = entry["line"] + entry["text"].count("\n")
        spans.setdefault(entry["file"], []).append((entry["line"], end))
    sources: dict[str, Any] = {}
    for file, line in sorted(set(lines)):
        of_file = spans.setdefault(file, [])
        if any(first <= line < last for first, last in of_file):
            continue
        text = linecache.getlines(os.path.expanduser(file))
        span = next((s for s in _function_lines("".join(text)) if s[1] <= line <= s[2]), None)
        if span is None:
            continue
        name, first, last = span
        body = redact("".join(text[first - 1 : last]))
        room -= len(body)
        if room < 0:
            break
        of_file.append((first, last + 1))
        sources[f"{file}:{name}"] = {"file": file, "line": first, "text": body}
    return sources


@lru_cache(maxsize=64)
def _function_lines(text: str) -> tuple[tuple[str, int, int], ...]:
    """Qualified name, first and last line of each function of a file that is in no other function."""
    lines = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                lines.append((prefix + child.name, first, child.end_lineno or child.lineno))
            elif not isinstance(child, ast.expr):
                visit(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix)

    try:
        visit(ast.parse(text), "")
    except (SyntaxError, ValueError, RecursionError):  # changed since it was imported
        return ()
    return tuple(lines)


@lru_cache(maxsize=64)
def _class_lines(text: str) -> dict[str, tuple[int, int]]:
    """First and last line of each class of a file, by qualified name without `<locals>`."""
    lines: dict[str, tuple[int, int]] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                lines[prefix + child.name] = (first, child.end_lineno or child.lineno)
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                visit(child, f"{prefix}{child.name}.")
            elif not isinstance(child, ast.expr):
                visit(child, prefix)

    try:
        visit(ast.parse(text), "")
    except (SyntaxError, ValueError, RecursionError):  # changed since it was imported
        return {}
    return lines


def file_of(cls: type) -> str | None:
    """The file that a class is written in, if there is one."""
    module = sys.modules.get(cls.__module__)
    try:
        return inspect.getsourcefile(cls) or getattr(module, "__file__", None)
    except (TypeError, OSError):
        return getattr(module, "__file__", None)
