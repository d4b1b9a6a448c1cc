"""Where the code of a port takes another class, or another way, on the device than on a CPU.

What runs on a CPU then proves nothing of the other class. Each finding names the second test that it
calls for.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from tensorcap.source_analysis.branches import (
    RETURN,
    Branch,
    class_pairs,
    find_branches,
    is_refusal,
    way_texts,
)
from tensorcap.source_analysis.source_file import SourceFile, code_text, last_name
from tensorcap.source_analysis.switches import Switches, SwitchKind

_FACTORY: Final = re.compile(r"(?:get|make|build|create)_(.+?)(?:_cls|_class)?")
_KERNEL_PACKAGES: Final = frozenset(
    {"flash_attn", "neuronxcc", "nki", "nkilib", "torch_neuronx", "torch_xla", "triton", "xformers"}
)
_KERNEL_PARTS: Final = re.compile(
    r"(?:.*\.)?(?:nki|\w*kernels?|xla_impl|flash_attn\w*|nkilib|triton|xformers)(?:\..*)?"
)
SIDES: Final[dict[SwitchKind, tuple[str, str]]] = {
    "cpu": ("on a CPU", "on the device"),
    "tp-size": ("on one rank", "on several ranks"),
    "kernel": ("without the kernel", "with the kernel"),
}


@dataclass(frozen=True, slots=True)
class Divergence:
    """One place at which code goes one way where a port is debugged, and another on the device.

    Attributes:
        file: The source file.
        line: Of the condition.
        scope: Function and class around it, "" at the top of the file.
        switch: What the condition depends on.
        test: The condition.
        target: What is given the class, or is given by the function.
        here: Class, or code, on a CPU, on one rank, without the kernel.
        there: Class, or code, on the device, on several ranks, with the kernel.
        is_class: Whether `here` and `there` are names of classes.
    """

    file: str
    line: int
    scope: str
    switch: SwitchKind
    test: str
    target: str
    here: str
    there: str
    is_class: bool

    @property
    def component(self) -> str:
        """The part of the model: `rmsnorm` of a function `get_rmsnorm_cls`, `norm` of `self.norm`."""
        name = self.scope.rpartition(".")[2] if self.target == RETURN else self.target.rpartition(".")[2]
        match = _FACTORY.fullmatch(name)
        return match[1] if match else name

    @property
    def place(self) -> str:
        """File and line."""
        return f"{self.file}:{self.line}"

    @property
    def dual_test(self) -> str:
        """The second test that is needed, since the first shows only one of the two ways."""
        here, there = SIDES[self.switch]
        if self.switch == "tp-size":
            return (
                f"One rank runs {self.here} and never {self.there}: compare with the reference at TP=1, and "
                "at TP=2 or more with the ranks merged."
            )
        if self.switch == "kernel":
            return (
                "Compile with the flag off and on, and compare both with the reference: "
                f"{self.there} runs only with it."
            )
        if self.here == "None":
            return (
                f"A CPU runs no {self.there}: compare its output captured on the device with the reference."
            )
        if self.there == "None":
            return f"The device runs no {self.here}: compare what it runs in its place with the reference."
        if not self.is_class:
            return f"A run {here} does not run the code that runs {there}: compare both with the reference."
        return (
            f"A CPU runs {self.here} and never {self.there}: give both the same weights and inputs, "
            f"{self.here} on the CPU and {self.there} on the device, and compare both with the reference."
        )


@dataclass(frozen=True, slots=True)
class KernelFlag:
    """A setting that turns a kernel on, and where it decides.

    Attributes:
        file: The source file.
        name: Of the setting.
        lines: At which a branch depends on it.
        functions: In which.
    """

    file: str
    name: str
    lines: tuple[int, ...]
    functions: tuple[str, ...]

    @property
    def dual_test(self) -> str:
        """The second test that is needed."""
        return f"Capture with {self.name} off and on: what its kernel computes calls no submodule."


@dataclass(frozen=True, slots=True)
class KernelImport:
    """What is imported from a package of kernels.

    Attributes:
        file: The source file.
        line: Of the import.
        module: From which it is imported.
        names: What is imported, by the names in the file.
        users: Functions and classes that use it.
        is_optional: Whether a failure of the import is caught, so that other code runs without it.
    """

    file: str
    line: int
    module: str
    names: tuple[str, ...]
    users: tuple[str, ...]
    is_optional: bool

    @property
    def dual_test(self) -> str:
        """The second test that is needed."""
        if self.is_optional:
            return f"Without {self.module} other code runs: run once with the package and once without."
        return "No CPU runs it: compare what its users give, captured on the device, with the reference."


def find_divergences(source: SourceFile) -> list[Divergence]:
    """Find all places of a file at which a switch decides, in order of lines."""
    switches = Switches(source.tree)
    divergences: dict[tuple[int, str, str, str, str], Divergence] = {}
    for branch in find_branches(source.tree):
        for kind, is_taken_here in switches.kinds(branch.test):
            for divergence in _of_branch(source, branch, kind, is_taken_here):
                key = (divergence.line, kind, divergence.target, divergence.here, divergence.there)
                divergences.setdefault(key, divergence)
    return sorted(divergences.values(), key=lambda divergence: divergence.line)


def find_kernel_flags(source: SourceFile) -> list[KernelFlag]:
    """Find the settings of kernels on which a branch of a file depends."""
    switches = Switches(source.tree)
    places: dict[str, list[tuple[int, str]]] = {}
    for branch in find_branches(source.tree):
        for name in switches.kernel_flags(branch.test):
            places.setdefault(name, []).append((branch.line, branch.scope))
    return [
        KernelFlag(
            str(source.path),
            name,
            tuple(sorted({line for line, _ in where})),
            tuple(dict.fromkeys(scope for _, scope in where if scope)),
        )
        for name, where in places.items()
    ]


def find_kernel_imports(source: SourceFile) -> list[KernelImport]:
    """Find what a file imports from packages of kernels, and who uses it."""
    optional = {
        id(node)
        for attempt in ast.walk(source.tree)
        if isinstance(attempt, ast.Try) and any(_catches_import(handler) for handler in attempt.handlers)
        for statement in attempt.body
        for node in ast.walk(statement)
    }
    users = _users(source.tree)
    imports = []
    for node in ast.walk(source.tree):
        for module, names in _imported(node):
            if module.partition(".")[0] not in _KERNEL_PACKAGES or not _KERNEL_PARTS.fullmatch(module):
                continue
            imports.append(
                KernelImport(
                    str(source.path),
                    getattr(node, "lineno", 0),
                    module,
                    names,
                    tuple(dict.fromkeys(user for name in names for user in users.get(name, ()))),
                    id(node) in optional,
                )
            )
    return imports


def divergence_entry(divergence: Divergence) -> dict[str, Any]:
    """An entry as the Equivalence method's `detect_class_divergence` has it, with what it lacks."""
    entry: dict[str, Any] = {
        "component": divergence.component,
        "cpu_class": divergence.here,
        "device_class": divergence.there,
        "source_location": divergence.place,
        "pattern": f"{divergence.switch}: {divergence.test}",
        "recommendation": divergence.dual_test,
        "switch": divergence.switch,
        "is_class": divergence.is_class,
        "scope": divergence.scope,
    }
    if divergence.target == RETURN:
        entry["factory_function"] = divergence.scope.rpartition(".")[2]
    return entry


def _of_branch(
    source: SourceFile, branch: Branch, kind: SwitchKind, is_taken_here: bool
) -> Iterator[Divergence]:
    """Divergences of a branch that a switch decides: its pairs of classes, or else its two ways."""
    common = (str(source.path), branch.line, branch.scope, kind, code_text(branch.test))
    pairs = class_pairs(branch)
    for pair in pairs:
        ways = ("/".join(pair.taken), "/".join(pair.other))
        here, there = ways if is_taken_here else ways[::-1]
        yield Divergence(*common, pair.target, here, there, is_class=True)
    if pairs or kind == "kernel" or (is_refusal(branch.taken) and branch.taken):
        return  # kernels have a list of their own
    if not isinstance(branch.other, ast.expr) and branch.other and is_refusal(branch.other):
        return
    texts = way_texts(branch)
    here, there = texts if is_taken_here else texts[::-1]
    yield Divergence(*common, branch.target or "code", here, there, is_class=False)


def _catches_import(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    types: Iterable[ast.expr] = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(last_name(each) in ("ImportError", "ModuleNotFoundError", "Exception") for each in types)


def _imported(node: ast.AST) -> Iterator[tuple[str, tuple[str, ...]]]:
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module, tuple(alias.asname or alias.name for alias in node.names)
    elif isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name, (alias.asname or alias.name.partition(".")[0],)


def _users(tree: ast.Module) -> dict[str, list[str]]:
    """The functions and methods that use each name."""
    users: dict[str, list[str]] = {}

    def visit(node: ast.AST, scope: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{scope}.{child.name}" if scope else child.name
            elif isinstance(child, ast.Name) and scope:
                users.setdefault(child.id, []).append(scope)
            visit(child, inner)

    visit(tree, "")
    return users
