"""Class names, and the source text of the classes of modules, for the metadata of a run."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
from collections.abc import Iterable
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final

from tensorcap.workload.metadata import redact

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
            text = "".join(lines[span[0] - 1 : span[1]])
            sources[name] = {"file": redact(file), "line": span[0], "text": redact(text)}
    return sources


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
