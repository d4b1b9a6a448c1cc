"""The two ways of a branch: what each gives the same name, or returns, and of which class that is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tensorcap.source_analysis.source_file import code_text, dotted_name, last_name

RETURN: Final = "return"
_CLASS: Final = re.compile(r"_*[A-Z]\w*[a-z]\w*")
_NO_MODULE: Final = re.compile(r".*(?:Error|Exception|Warning|Exit)")
_LOGS: Final = re.compile(r"(?:logger|logging|log|warnings)\..*|print|warn")


@dataclass(frozen=True, slots=True)
class Branch:
    """A place where code goes one of two ways.

    Attributes:
        test: The condition.
        line: Of the condition.
        scope: Function and class around it, joined by dots; "" at the top of the file.
        taken: Statements if the condition holds; or the expression of a conditional expression.
        other: Statements otherwise, also those behind a branch that returns.
        before: Statements before it in its block, which set what only one way sets again.
        target: What a conditional expression is assigned to, "" if unknown.
    """

    test: ast.expr
    line: int
    scope: str
    taken: Sequence[ast.stmt] | ast.expr
    other: Sequence[ast.stmt] | ast.expr
    before: Sequence[ast.stmt] = ()
    target: str = ""


@dataclass(frozen=True, slots=True)
class ClassPair:
    """Two classes that one thing is of, by the way of a branch.

    Attributes:
        target: The thing: a name, or `return`.
        taken: Classes if the condition holds, `None` for nothing.
        other: Classes otherwise.
    """

    target: str
    taken: tuple[str, ...]
    other: tuple[str, ...]


def find_branches(tree: ast.Module) -> Iterator[Branch]:
    """All branches of a file, outer ones first: statements and conditional expressions."""
    yield from _in_block(tree.body, "", ())


def class_pairs(branch: Branch) -> list[ClassPair]:
    """What is of one class on one way of a branch and of another one on the other.

    1. Each way gives values to names, and a result.
    2. A value's class is that of the object that is made, or the class itself; if it is the same on both
       ways, the classes of its arguments count.
    3. A name that only one way sets has, on the other way, the value from before the branch.
    """
    if isinstance(branch.taken, ast.expr) and isinstance(branch.other, ast.expr):
        sides = [branch.taken], [branch.other]
        pair = _pair(branch.target or RETURN, *sides)
        return [pair] if pair else []
    if isinstance(branch.taken, ast.expr) or isinstance(branch.other, ast.expr):
        return []
    taken, other = _values(branch.taken), _values(branch.other)
    before = _values(branch.before)
    pairs = []
    for target in dict.fromkeys([*taken, *other]):
        default = before.get(target, [])[-1:]
        pair = _pair(target, taken.get(target, default), other.get(target, default))
        if pair:
            pairs.append(pair)
    return pairs


def is_refusal(way: Sequence[ast.stmt] | ast.expr) -> bool:
    """Whether a way does nothing but raise, assert or log."""
    return not isinstance(way, ast.expr) and all(
        isinstance(statement, ast.Raise | ast.Assert | ast.Pass)
        or (isinstance(statement, ast.Expr) and _is_remark(statement.value))
        for statement in way
    )


def way_texts(branch: Branch) -> tuple[str, str]:
    """What the two ways do, each as its first code that the other has not; "nothing" if there is none."""
    return _way_text(branch.taken, branch.other), _way_text(branch.other, branch.taken)


def _way_text(way: Sequence[ast.stmt] | ast.expr, other: Sequence[ast.stmt] | ast.expr) -> str:
    if isinstance(way, ast.expr):
        return code_text(way)
    common = set() if isinstance(other, ast.expr) else {ast.dump(statement) for statement in other}
    for statement in way:
        is_remark = isinstance(statement, ast.Expr) and _is_remark(statement.value)
        if is_remark or isinstance(statement, ast.Assert) or ast.dump(statement) in common:
            continue
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            return f"{'def' if isinstance(statement, ast.FunctionDef) else 'class'} {statement.name}"
        if isinstance(statement, ast.If):
            return f"if {code_text(statement.test)}: …"
        return code_text(statement)
    return "nothing"


def _is_remark(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return True
    return isinstance(node, ast.Call) and bool(_LOGS.fullmatch(dotted_name(node.func)))


def _in_block(block: Sequence[ast.stmt], scope: str, rest: Sequence[ast.stmt]) -> Iterator[Branch]:
    """Branches of a block of statements.

    Args:
        block: The statements.
        scope: Around it.
        rest: What runs behind the block, up to the end of its function.
    """
    for i, statement in enumerate(block):
        behind = [*block[i + 1 :], *rest]
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{scope}.{statement.name}" if scope else statement.name
            for part in [*statement.decorator_list, *getattr(statement, "bases", [])]:
                yield from _in_expression(part, scope, statement.name)
            yield from _in_block(statement.body, inner, ())
            continue
        if isinstance(statement, ast.If):
            leaves = _leaves(statement.body)
            other = statement.orelse or (behind if leaves else [])
            yield Branch(statement.test, statement.lineno, scope, statement.body, other, block[:i])
        yield from _in_statement(statement, scope)
        for inner_block in _blocks(statement):
            yield from _in_block(inner_block, scope, behind)


def _blocks(statement: ast.stmt) -> Iterator[Sequence[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(statement, name, None)
        if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
            yield block
    for handler in getattr(statement, "handlers", ()):
        yield handler.body
    for case in getattr(statement, "cases", ()):
        yield case.body


def _in_statement(statement: ast.stmt, scope: str) -> Iterator[Branch]:
    """Conditional expressions of a statement, without those of blocks in it."""
    target = ""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = dotted_name(statement.targets[0])
    elif isinstance(statement, ast.AnnAssign):
        target = dotted_name(statement.target)
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.expr):
            yield from _in_expression(child, scope, target)


def _in_expression(node: ast.expr, scope: str, target: str) -> Iterator[Branch]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.IfExp):
            yield Branch(inner.test, inner.lineno, scope, inner.body, inner.orelse, (), target)


def _leaves(block: Sequence[ast.stmt]) -> bool:
    """Whether a block ends its function or its loop."""
    return bool(block) and isinstance(block[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


def _values(block: Sequence[ast.stmt]) -> dict[str, list[ast.expr]]:
    """The values that a block gives to names, and what it returns, up to its first return."""
    values: dict[str, list[ast.expr]] = {}
    for statement in block:
        if isinstance(statement, ast.Return):
            values.setdefault(RETURN, []).append(statement.value or ast.Constant(None))
            break
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                if name := dotted_name(target):
                    values[name] = [statement.value]
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            values[dotted_name(statement.target)] = [statement.value]
        elif isinstance(statement, ast.ClassDef):
            values[statement.name] = list(statement.bases)
        elif isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                values[alias.asname or alias.name] = [ast.Name(alias.name)]
        elif isinstance(statement, ast.If | ast.With | ast.Try | ast.For):
            for inner in _blocks(statement):
                for name, more in _values(inner).items():
                    values.setdefault(name, []).extend(more)
    return values


def _pair(target: str, taken: Sequence[ast.expr], other: Sequence[ast.expr]) -> ClassPair | None:
    sides = [_classes(values) for values in (taken, other)]
    if sides[0] == sides[1]:  # one class, made with other parts
        sides = [_parts(values) for values in (taken, other)]
    first = [name for name in sides[0] if name not in sides[1]]
    second = [name for name in sides[1] if name not in sides[0]]
    if not first and not second:
        return None
    is_whole = first and second
    if not is_whole and not (_is_nothing(other) if first else _is_nothing(taken)):
        return None
    return ClassPair(target, tuple(first) or ("None",), tuple(second) or ("None",))


def _is_nothing(values: Sequence[ast.expr]) -> bool:
    return bool(values) and all(isinstance(v, ast.Constant) and v.value is None for v in values)


def _classes(values: Sequence[ast.expr]) -> list[str]:
    names = []
    for value in values:
        if isinstance(value, ast.IfExp):
            names += _classes([value.body, value.orelse])
        elif isinstance(value, ast.Call):
            if last_name(value.func) == "partial" and value.args:
                names += _classes([value.args[0]])
            else:
                names += _classes([value.func])
        elif isinstance(value, ast.Name | ast.Attribute) and _is_class(value):
            names.append(last_name(value))
    return list(dict.fromkeys(names))


def _parts(values: Sequence[ast.expr]) -> list[str]:
    """Classes of all objects that are made within values, other than the outermost."""
    names = []
    for value in values:
        for node in ast.walk(value):
            if isinstance(node, ast.Call) and node is not value and _is_class(node.func):
                names.append(last_name(node.func))
    return list(dict.fromkeys(names))


def _is_class(node: ast.expr) -> bool:
    """Whether a name is written as classes are; a member of a class, as of an enumeration, is none."""
    name = last_name(node)
    if not _CLASS.fullmatch(name) or _NO_MODULE.fullmatch(name):
        return False
    return not (isinstance(node, ast.Attribute) and _CLASS.fullmatch(last_name(node.value)))
