"""Compile a function anew from its source, so that it hands over its variables as it assigns them.

The whole file is parsed and compiled again, under its own name and with its own line numbers, so that
closures, `super()` and private names are those of the original; then the function's code is taken out of it.
The source on the disk is only read.
"""

from __future__ import annotations

import ast
import linecache
import warnings
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any, Final, TypeVar

from tensorcap_formats.errors import UsageError

_Node = TypeVar("_Node", bound=ast.AST)
_Block = TypeVar("_Block", ast.For, ast.With, ast.match_case)
RETURN: Final = "return"  # stands for what the function returns; no variable can have this name
_HAND_OVER: Final = "__tensorcap__"  # the one local variable that is added; not mangled in a class
_SCOPES: Final = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Lambda,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)
_SHOWS_LOCALS: Final = ("locals", "vars", "dir")
_PARTS: Final = (  # of a code object, which tell whether two were made of the same source
    "co_name",
    "co_firstlineno",
    "co_code",
    "co_flags",
    "co_names",
    "co_varnames",
    "co_freevars",
    "co_cellvars",
    "co_linetable",
)


class Source:
    """A function's source, from which it can be compiled anew.

    Attributes:
        names: The variables that it assigns, its parameters first, and `return`.
    """

    def __init__(self, function: FunctionType, code: CodeType, where: str) -> None:
        """Read the source.

        Args:
            function: The function.
            code: Its own code, which is not its `__code__` while it is watched.
            where: The beginning of error messages.

        Raises:
            UsageError: There is no source, it is not what the function was compiled from, or the function
                is of a kind that is not supported.
        """
        self._where = where
        self._code = code
        file = self._code.co_filename
        linecache.checkcache(file)
        self._text = "".join(linecache.getlines(file, function.__globals__))
        if not self._text:
            raise UsageError(f"{where}: its source is not to be found, expected it in {file!r}")
        tree, node = self._parse()
        if not _is_same(self._compile(tree), self._code):
            raise self._changed()
        if isinstance(node, ast.AsyncFunctionDef):
            raise UsageError(f"{where}: is a coroutine function, which cannot be watched")
        for call in _calls(node):
            if call in _SHOWS_LOCALS:
                raise UsageError(
                    f"{where}: calls {call}(), which would show a variable of ours; it cannot be watched"
                )
        rewriter = _Rewriter(0, lambda name: True)
        rewriter.rewrite(node)
        self.names = tuple(dict.fromkeys(rewriter.names))

    def rewritten(self, key: int, wants: Callable[[str], bool]) -> CodeType:
        """Compile the function so that it hands variables over.

        Args:
            key: The number that it passes to `tensorcap.recording.watch.begin`.
            wants: Whether a variable of this name is handed over.
        """
        tree, node = self._parse()
        _Rewriter(key, wants).rewrite(node)
        code = self._compile(tree)
        if code is None or code.co_freevars != self._code.co_freevars:
            raise self._changed()
        return code

    def _parse(self) -> tuple[ast.Module, ast.FunctionDef | ast.AsyncFunctionDef]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # were given when the file was imported
                tree = ast.parse(self._text)
        except (SyntaxError, ValueError):
            raise self._changed() from None
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                if (node.name, first) == (self._code.co_name, self._code.co_firstlineno):
                    return tree, node
        if self._code.co_name == "<lambda>":
            raise UsageError(f"{self._where}: is a lambda, expected a function written with def")
        raise self._changed()

    def _compile(self, tree: ast.Module) -> CodeType | None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole = compile(tree, self._code.co_filename, "exec", dont_inherit=True)
        for code in _codes(whole):
            if (code.co_name, code.co_firstlineno) == (self._code.co_name, self._code.co_firstlineno):
                return code
        return None

    def _changed(self) -> UsageError:
        return UsageError(
            f"{self._where}: its source in {self._code.co_filename!r} is not what it was compiled from",
            hint="If the file was edited, start again; code that something else rewrote cannot be watched.",
        )


class _Rewriter(ast.NodeTransformer):
    """Adds calls to a function that hand over its variables, each right after it is assigned.

    Attributes:
        names: The variables that it assigns, in the order of the text, wanted or not.
    """

    def __init__(self, key: int, wants: Callable[[str], bool]) -> None:
        self.names: list[str] = []
        self._key = key
        self._wants = wants

    def rewrite(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Change the function in place."""
        at = function.body[0]
        arguments = function.args
        parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        parameters += [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
        entry: list[ast.stmt] = [
            ast.ImportFrom("tensorcap.recording.watch", [ast.alias("begin", _HAND_OVER)], 0),
            ast.Assign([ast.Name(_HAND_OVER, ast.Store())], _call(ast.Constant(self._key))),
            *self._hand_over([p.arg for p in parameters], at),
        ]
        entry = [_at(statement, at) for statement in entry]
        last = function.body[-1]
        body = self._visit_body(function.body)
        end = _at(ast.Expr(_call(ast.Constant(RETURN), ast.Constant(None))), last)
        function.body = [*entry, *body, end]
        self.names.append(RETURN)

    def visit(self, node: ast.AST) -> Any:
        """Leave nested scopes, which have variables of their own, as they are."""
        return node if isinstance(node, _SCOPES) else super().visit(node)

    def visit_Return(self, node: ast.Return) -> ast.AST:
        self.generic_visit(node)
        value = node.value or ast.Constant(None)
        node.value = _at(_call(ast.Constant(RETURN), value), value if node.value else node)
        return node

    def visit_Assign(self, node: ast.Assign) -> list[ast.stmt]:
        return self._follow(node, [name for target in node.targets for name in _names(target)])

    def visit_AugAssign(self, node: ast.AugAssign) -> list[ast.stmt]:
        return self._follow(node, _names(node.target))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> list[ast.stmt]:
        return self._follow(node, _names(node.target) if node.value else [])

    def visit_Expr(self, node: ast.Expr) -> list[ast.stmt]:
        return self._follow(node, _changed_in_place(node.value))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.AST:
        self.generic_visit(node)
        if not self._takes(node.target.id):
            return node
        return _at(_call(ast.Constant(node.target.id), node), node)

    def visit_For(self, node: ast.For) -> ast.For:
        return self._precede(node, node, _names(node.target))

    def visit_With(self, node: ast.With) -> ast.With:
        targets = [item.optional_vars for item in node.items if item.optional_vars is not None]
        return self._precede(node, node, [name for target in targets for name in _names(target)])

    def visit_match_case(self, node: ast.match_case) -> ast.match_case:
        names = [getattr(p, "name", None) or getattr(p, "rest", None) for p in ast.walk(node.pattern)]
        return self._precede(node, node.pattern, [name for name in names if name])

    def _follow(self, node: ast.stmt, names: list[str]) -> list[ast.stmt]:
        self.generic_visit(node)
        return [node, *self._hand_over(names, node)]

    def _precede(self, node: _Block, at: ast.AST, names: list[str]) -> _Block:
        """Hand over variables at the beginning of a block."""
        added: list[ast.stmt] = self._hand_over(names, at)
        self.generic_visit(node)
        node.body = [*added, *node.body]
        return node

    def _visit_body(self, body: list[ast.stmt]) -> list[ast.stmt]:
        block = ast.Module(body, [])
        self.generic_visit(block)
        return block.body

    def _hand_over(self, names: list[str], at: ast.AST) -> list[ast.stmt]:
        return [
            _at(ast.Expr(_call(ast.Constant(name), ast.Name(name, ast.Load()))), at)
            for name in dict.fromkeys(names)
            if self._takes(name)
        ]

    def _takes(self, name: str) -> bool:
        self.names.append(name)
        return self._wants(name)


def _call(*arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(_HAND_OVER, ast.Load()), list(arguments), [])


def _at(node: _Node, at: ast.AST) -> _Node:
    """The node, with the line numbers of another for all its new parts."""
    return ast.fix_missing_locations(ast.copy_location(node, at))


def _names(target: ast.AST) -> list[str]:
    """The variables that a target assigns, or changes: `x`, `(x, *y)`, `x[i]`."""
    if isinstance(target, ast.Name):
        return [target.id]
    if isinstance(target, (ast.Tuple, ast.List)):
        return [name for element in target.elts for name in _names(element)]
    if isinstance(target, (ast.Starred, ast.Subscript)):
        return _names(target.value)
    return []


def _changed_in_place(value: ast.expr) -> list[str]:
    """The variable that a statement `x.add_(y)` changes."""
    changed: ast.expr = value
    while isinstance(changed, ast.Call) and isinstance(changed.func, ast.Attribute):
        if not changed.func.attr.endswith("_") or changed.func.attr.startswith("_"):
            return []
        changed = changed.func.value
    return [] if changed is value else _names(changed)


def _calls(function: ast.AST) -> Iterator[str]:
    """Names of the functions that a function calls without arguments."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
            yield node.func.id


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _is_same(one: CodeType | None, other: CodeType) -> bool:
    """Whether two code objects were compiled from the same text on the same lines."""
    if one is None or any(getattr(one, part) != getattr(other, part) for part in _PARTS):
        return False
    return len(one.co_consts) == len(other.co_consts) and all(
        _is_same_constant(*pair) for pair in zip(one.co_consts, other.co_consts, strict=True)
    )


def _is_same_constant(one: object, other: object) -> bool:
    if isinstance(one, CodeType) and isinstance(other, CodeType):
        return _is_same(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_is_same_constant, one, other))
    return type(one) is type(other) and one == other
