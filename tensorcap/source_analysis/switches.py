"""Which expressions depend on the place where a model runs, and what they are there.

Three kinds of switch: whether the model runs on a CPU, how many tensor-parallel ranks there are, and whether
a kernel flag is set. A test is evaluated with a switch on either side, and with all else unknown.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from tensorcap.source_analysis.source_file import dotted_name, last_name

SwitchKind = Literal["cpu", "tp-size", "kernel"]
KINDS: Final[tuple[SwitchKind, ...]] = ("cpu", "tp-size", "kernel")

_ON_CPU: Final = frozenset({"NXD_CPU_MODE", "cpu_mode", "is_cpu", "is_cpu_mode", "on_cpu", "run_on_cpu"})
_ON_DEVICE: Final = frozenset(
    {"is_cuda", "is_neuron", "is_neuron_device", "is_xla", "is_xla_available", "on_device", "on_neuron"}
)
_RANKS: Final = frozenset(
    {
        "get_tensor_model_parallel_size",
        "get_tensor_model_parallel_world_size",
        "get_world_size",
        "tensor_model_parallel_size",
        "tensor_parallel_size",
        "tp_degree",
        "tp_size",
        "world_size",
    }
)
_DEVICE_TYPES: Final = frozenset({"cuda", "hpu", "neuron", "privateuseone", "tpu", "xla", "xpu"})
_KERNEL: Final = re.compile(r"(?:.*_)?kernels?(?:_.*)?")
_FLAG: Final = re.compile(r"(?:.*_)?(?:enabled?|disabled?|use|used|fused?)(?:_.*)?")
_MANY_RANKS: Final = 8
_UNKNOWN: Final = object()
_COMPARISONS: Final[Mapping[type[ast.cmpop], Callable[[Any, Any], Any]]] = {
    ast.Eq: operator.eq,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.eq,
    ast.IsNot: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.NotEq: operator.ne,
}


def is_kernel_flag(name: str) -> bool:
    """Whether a name is that of a setting which turns a kernel on.

    Example:
        >>> is_kernel_flag("mlp_kernel_enabled"), is_kernel_flag("kernel_size"), is_kernel_flag("use_kernel")
        (True, False, True)
    """
    return bool(_KERNEL.fullmatch(name) and _FLAG.fullmatch(name))


class Switches:
    """The switches of a file: the names above, and what the file itself calls by other names."""

    def __init__(self, tree: ast.Module) -> None:
        """Find variables, attributes and functions that are no more than a switch under another name."""
        self._aliases: dict[str, ast.expr] = {}
        self._resolving: set[str] = set()
        for _ in range(2):  # an alias of an alias
            self._aliases = {**self._aliases, **self._find_aliases(tree)}

    def kinds(self, test: ast.expr) -> list[tuple[SwitchKind, bool]]:
        """The kinds of switch that decide a test, each with what the test is where the model is debugged.

        Args:
            test: The condition of a branch.

        Returns:
            With each kind, whether the first branch is taken on a CPU, on one rank, or without the kernel.
        """
        decided: list[tuple[SwitchKind, bool]] = []
        for kind in KINDS:
            here, there = (self._truth(test, kind, is_here) for is_here in (True, False))
            if here is _UNKNOWN or there is _UNKNOWN or here == there:
                continue
            decided.append((kind, bool(here)))
        return decided

    def kernel_flags(self, test: ast.expr) -> list[str]:
        """Names of the kernel flags in a test."""
        names = [last_name(node) for node in ast.walk(test) if isinstance(node, ast.Name | ast.Attribute)]
        return list(dict.fromkeys(name for name in names if is_kernel_flag(name)))

    def _find_aliases(self, tree: ast.Module) -> dict[str, ast.expr]:
        """Names that are given the value of a switch, and of nothing else, in the whole file."""
        values: dict[str, list[ast.expr]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if name := dotted_name(target):
                        values.setdefault(name, []).append(node.value)
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
                if name := dotted_name(node.target):
                    values.setdefault(name, []).append(node.value)
            elif isinstance(node, ast.FunctionDef) and isinstance(node.body[-1], ast.Return):
                result = node.body[-1].value
                if result is not None and len([n for n in ast.walk(node) if isinstance(n, ast.Return)]) == 1:
                    values.setdefault(f"{node.name}()", []).append(result)
        return {
            name: first
            for name, (first, *others) in values.items()
            if all(ast.dump(other) == ast.dump(first) for other in others)
            and any(self._value(first, kind, True) is not _UNKNOWN for kind in ("cpu", "tp-size"))
            and not isinstance(first, ast.Constant)
        }

    def _truth(self, node: ast.expr, kind: SwitchKind, is_here: bool) -> object:
        value = self._value(node, kind, is_here)
        return value if value is _UNKNOWN else bool(value)

    def _value(self, node: ast.expr, kind: SwitchKind, is_here: bool) -> Any:
        """What an expression is on one side of a switch; of `and` and `or` what is not known is left out.

        Args:
            node: The expression.
            kind: The switch.
            is_here: On a CPU, on one rank, without the kernel; else on the device, on several, with it.
        """
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.NamedExpr):
            return self._value(node.value, kind, is_here)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            value = self._value(node.operand, kind, is_here)
            return value if value is _UNKNOWN else not value
        if isinstance(node, ast.BoolOp):
            values = [self._truth(each, kind, is_here) for each in node.values]
            known = [value for value in values if value is not _UNKNOWN]
            together = all if isinstance(node.op, ast.And) else any
            return together(known) if known else _UNKNOWN
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self._comparison(node, kind, is_here)
        if isinstance(node, ast.Call):
            return self._call(node, kind, is_here)
        return self._named(node, kind, is_here)

    def _comparison(self, node: ast.Compare, kind: SwitchKind, is_here: bool) -> Any:
        left, right = (self._value(side, kind, is_here) for side in (node.left, node.comparators[0]))
        if left is _UNKNOWN or right is _UNKNOWN:
            return _UNKNOWN
        if isinstance(left, bool) and isinstance(right, str):  # a variable of the environment
            left = "1" if left else "0"
        compare = _COMPARISONS.get(type(node.ops[0]))
        if compare is None:
            return _UNKNOWN
        try:
            return compare(left, right)
        except TypeError:
            return _UNKNOWN

    def _call(self, node: ast.Call, kind: SwitchKind, is_here: bool) -> Any:
        name = last_name(node.func)
        if name in ("bool", "int", "str", "lower", "getattr", "get", "getenv"):
            first = node.func.value if name == "lower" and isinstance(node.func, ast.Attribute) else None
            for argument in [first] if first is not None else node.args[:2]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    if (value := _switch_value(argument.value, kind, is_here)) is not _UNKNOWN:
                        return value
                elif (value := self._value(argument, kind, is_here)) is not _UNKNOWN and name not in (
                    "get",
                    "getattr",
                    "getenv",
                ):
                    return value
            return _UNKNOWN
        if f"{name}()" in self._aliases:
            return self._alias_value(f"{name}()", kind, is_here)
        if name == "is_available" and dotted_name(node.func).startswith("torch.cuda"):
            return not is_here if kind == "cpu" else _UNKNOWN
        return _switch_value(name, kind, is_here)

    def _alias_value(self, name: str, kind: SwitchKind, is_here: bool) -> Any:
        """What stands for a name; unknown where that leads back to the name itself."""
        if name in self._resolving:
            return _UNKNOWN
        self._resolving.add(name)
        try:
            return self._value(self._aliases[name], kind, is_here)
        finally:
            self._resolving.discard(name)

    def _named(self, node: ast.expr, kind: SwitchKind, is_here: bool) -> Any:
        name = dotted_name(node)
        if name in self._aliases and name not in self._resolving:
            return self._alias_value(name, kind, is_here)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):  # os.environ["…"]
            return _switch_value(str(node.slice.value), kind, is_here)
        if isinstance(node, ast.Attribute) and node.attr == "type" and "device" in ast.unparse(node.value):
            return _DeviceType(is_cpu=is_here) if kind == "cpu" else _UNKNOWN
        return _switch_value(last_name(node), kind, is_here)


class _DeviceType:
    """The type of the device: equal to `cpu` on a CPU, and to that of any accelerator else."""

    def __init__(self, *, is_cpu: bool) -> None:
        self._is_cpu = is_cpu

    def __eq__(self, other: object) -> bool:
        return other == "cpu" if self._is_cpu else other in _DEVICE_TYPES

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]  # it is equal to texts that are unequal


def _switch_value(name: str, kind: SwitchKind, is_here: bool) -> Any:
    """The value of a name if it is one of the switch, else unknown."""
    if kind == "cpu" and name in _ON_CPU:
        return is_here
    if kind == "cpu" and name in _ON_DEVICE:
        return not is_here
    if kind == "tp-size" and name in _RANKS:
        return 1 if is_here else _MANY_RANKS
    if kind == "kernel" and is_kernel_flag(name):
        return is_here if "disable" in name else not is_here
    return _UNKNOWN
