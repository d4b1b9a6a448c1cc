"""What the code of a class computes with: values of the configuration, operations, casts.

A class has also what its base classes and the functions that it calls do, as far as they are in the sources;
functions of losses, which no inference calls, are left out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from tensorcap.source_analysis.source_file import SourceFile, dotted_name, last_name

_CONFIGURATION: Final = re.compile(r"(?:.*_)?config|cfg|conf")
_OTHER_CONFIGURATION: Final = re.compile(r"(?:neuron|generation|quantization|lora|mx|sampling)\w*config")
_OPERATIONS: Final = {
    **{name: name for name in ("abs", "exp", "log", "cos", "sin", "sqrt", "rsqrt", "mean", "var", "std")},
    **{name: name for name in ("relu", "gelu", "silu", "sigmoid", "tanh", "softplus", "elu", "mish")},
    **{
        name: name
        for name in ("softmax", "log_softmax", "layer_norm", "rms_norm", "group_norm", "batch_norm")
    },
    **{name: name for name in ("cumsum", "topk", "normalize", "scaled_dot_product_attention", "one_hot")},
    **{name: name for name in ("tril", "triu", "round", "floor", "erf", "interpolate", "conv1d", "conv2d")},
    **dict.fromkeys(("swish", "SiLU", "SiLUActivation"), "silu"),
    **dict.fromkeys(("GELU", "GELUActivation", "NewGELUActivation", "PytorchGELUTanh"), "gelu"),
    **dict.fromkeys(("clamp", "clamp_", "clip", "minimum", "maximum", "clamp_min", "clamp_max"), "clamp"),
    **dict.fromkeys(("masked_fill", "masked_fill_", "where"), "masked_fill"),
    **dict.fromkeys(("Softmax",), "softmax"),
    **dict.fromkeys(("Sigmoid",), "sigmoid"),
    **dict.fromkeys(("Tanh",), "tanh"),
    **dict.fromkeys(("ReLU",), "relu"),
}
"""Operations that change values, by the names that code has for them; those that move them only are none."""
_COVERS: Final = {"scaled_dot_product_attention": ("softmax", "masked_fill")}
_WIDE: Final = {"float": "float32", "double": "float64"}
_DTYPES: Final = frozenset({"float32", "float64", "float16", "bfloat16", "double", "half", "float"})
_MAX_DEPTH: Final = 8


@dataclass(slots=True)
class ClassContents:
    """What a class computes with, each with the place at which it first does.

    Attributes:
        name: Of the class.
        place: Of its definition.
        operations: By canonical name.
        casts: By dtype, as `float32`, or as `softmax in float32`.
    """

    name: str
    place: str
    operations: dict[str, str] = field(default_factory=dict)
    casts: dict[str, str] = field(default_factory=dict)


def configuration_reads(sources: Iterable[SourceFile]) -> dict[str, list[str]]:
    """The values that code reads from a configuration of the model, each with its places.

    These are `config.NAME`, `config["NAME"]`, `getattr(config, "NAME")` and `config.get("NAME")` of anything
    whose name ends in `config`, other than configurations of the run such as `neuron_config`.
    """
    reads: dict[str, list[str]] = {}
    for source in sources:
        written = {
            id(target)
            for node in ast.walk(source.tree)
            if isinstance(node, ast.Assign)
            for target in node.targets
        }
        called = {id(node.func) for node in ast.walk(source.tree) if isinstance(node, ast.Call)}
        for node in ast.walk(source.tree):
            name = _read_name(node) if id(node) not in written and id(node) not in called else ""
            if isinstance(node, ast.Call):
                name = _read_name(node)
            if name and not name.startswith("_") and not _CONFIGURATION.fullmatch(name):
                places = reads.setdefault(name, [])
                place = f"{source.path}:{getattr(node, 'lineno', 0)}"
                if place not in places:
                    places.append(place)
    return reads


def class_contents(sources: Sequence[SourceFile]) -> dict[str, ClassContents]:
    """What each class of the sources computes with, by its name."""
    classes = {name: (source, node) for source in sources for name, node in source.classes().items()}
    functions = {
        node.name: (source, node)
        for source in sources
        for node in source.tree.body
        if isinstance(node, ast.FunctionDef)
    }
    contents = {}
    for name, (source, node) in classes.items():
        one = ClassContents(name, f"{source.path}:{node.lineno}")
        for part_source, part in _parts(node, source, classes, functions):
            for operation, line in _operations(part):
                one.operations.setdefault(operation, f"{part_source.path}:{line}")
            for cast, line in _casts(part):
                one.casts.setdefault(cast, f"{part_source.path}:{line}")
        for operation in list(one.operations):
            for covered in _COVERS.get(operation, ()):
                one.operations.setdefault(covered, one.operations[operation])
        contents[name] = one
    return contents


def _parts(
    node: ast.ClassDef,
    source: SourceFile,
    classes: dict[str, tuple[SourceFile, ast.ClassDef]],
    functions: dict[str, tuple[SourceFile, ast.FunctionDef]],
) -> Iterator[tuple[SourceFile, ast.AST]]:
    """A class, its base classes and the functions that they call, each once."""
    pending: list[tuple[SourceFile, ast.AST, int]] = [(source, node, 0)]
    visited: set[int] = set()
    while pending:
        part_source, part, depth = pending.pop(0)
        if id(part) in visited or depth > _MAX_DEPTH:
            continue
        visited.add(id(part))
        yield part_source, part
        for base in getattr(part, "bases", ()):
            if last_name(base) in classes:
                pending.append((*classes[last_name(base)], depth + 1))
        for inner in ast.walk(part):
            if isinstance(inner, ast.Name) and inner.id in functions and "loss" not in inner.id:
                pending.append((*functions[inner.id], depth + 1))


def _read_name(node: ast.AST) -> str:
    """The name of the value that a node reads from a configuration, "" if it reads none."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _is_configuration(node.value):
        return node.attr
    if isinstance(node, ast.Subscript) and _is_configuration(node.value):
        return _text(node.slice)
    if isinstance(node, ast.Call):
        if last_name(node.func) == "getattr" and len(node.args) > 1 and _is_configuration(node.args[0]):
            return _text(node.args[1])
        if isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
            return _text(node.args[0]) if _is_configuration(node.func.value) else ""
    return ""


def _is_configuration(node: ast.expr) -> bool:
    name = last_name(node)
    return bool(_CONFIGURATION.fullmatch(name)) and not _OTHER_CONFIGURATION.fullmatch(name)


def _text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _operations(part: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(part):
        if isinstance(node, ast.Call) and (
            name := _OPERATIONS.get(last_name(node.func) or _method(node.func))
        ):
            yield name, node.lineno


def _casts(part: ast.AST) -> Iterator[tuple[str, int]]:
    """Casts to a dtype, and operations that are told one; a cast back to an input's dtype is none."""
    for node in ast.walk(part):
        if not isinstance(node, ast.Call):
            continue
        name = last_name(node.func) or _method(node.func)
        if name in _WIDE and not node.args and isinstance(node.func, ast.Attribute):
            yield _WIDE[name], node.lineno
        for keyword in node.keywords:
            if keyword.arg == "dtype" and (dtype := _dtype(keyword.value)):
                if name == "to":
                    yield dtype, node.lineno
                elif operation := _OPERATIONS.get(name):
                    yield f"{operation} in {dtype}", node.lineno
        if name in ("to", "type", "astype"):
            for argument in node.args:
                if dtype := _dtype(argument):
                    yield dtype, node.lineno


def _method(function: ast.expr) -> str:
    """The name of a method of any expression, as of `x.pow(2).mean`."""
    return function.attr if isinstance(function, ast.Attribute) else ""


def _dtype(node: ast.expr) -> str:
    """A dtype of torch that code names, "" for any other value."""
    if (
        isinstance(node, ast.Attribute)
        and node.attr in _DTYPES
        and dotted_name(node.value) in ("torch", "th")
    ):
        return {**_WIDE, "half": "float16"}.get(node.attr, node.attr)
    return ""
