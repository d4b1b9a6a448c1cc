"""Differences of two module trees, by names without wrappers."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from tensorcap.alignment.names.site_templates import fold, plain_name
from tensorcap.runs import Shape, Tree, TreeNode, ranges, shape_text

Kind = Literal["missing", "extra", "nested", "count", "type", "activation", "shape"]
KINDS: Final[tuple[Kind, ...]] = ("missing", "extra", "nested", "count", "type", "activation", "shape")

_ACTIVATION: Final = re.compile(r"relu|gelu|silu|swish|sigmoid|tanh|softplus|mish|[cs]elu$|^elu|glu$", re.I)
_ACTIVATION_NAME: Final = re.compile(r"^(?:act|activation|nonlinearity)(?:_|$)|_act(?:_fn)?$", re.I)


@dataclass(frozen=True, slots=True)
class TreeDifference:
    """One kind of difference at one place, or at places whose names differ in numbers only.

    Attributes:
        kind: What differs.
        paths: Modules of the reference, or of the target if they are `extra`; `config.KEY` of an entry of
            the configuration.
        reference: What the reference has there; empty for nothing.
        target: What the target has there; empty for nothing.
    """

    kind: Kind
    paths: tuple[str, ...]
    reference: str
    target: str

    @property
    def place(self) -> str:
        """The paths as one text.

        Example:
            >>> TreeDifference("type", ("layers.0.mlp", "layers.1.mlp"), "A", "B").place
            'layers[0..1].mlp'
        """
        template, first = fold(self.paths[0])
        numbers = [fold(path)[1] for path in self.paths]
        columns = [list(dict.fromkeys(column)) for column in zip(*numbers, strict=True)]
        if math.prod(map(len, columns)) != len(self.paths):
            return f"{self.paths[0]} and {len(self.paths) - 1} more"
        text = template
        for i, column in enumerate(columns):
            if len(column) == 1:
                text = text.replace(f"{{{i}}}", first[i])
            else:
                text = re.sub(rf"\.?\{{{i}\}}", f"[{ranges(column)}]", text)
        return text or "(the model)"


def tree_differences(reference: Tree, target: Tree) -> list[TreeDifference]:
    """List the differences of two trees, missing modules first.

    Wrappers do not count: names are compared as the naming of mappings has them, and doubled ones are one.
    Types and shapes are compared if both trees know them.
    """
    walk = _Comparison()
    walk.compare(_plain(reference.root), _plain(target.root))
    differences = [*walk.differences, *_placed(walk.missing, walk.extra)]
    for key, activation in reference.activations.items():
        target_activation = target.activations.get(key, activation)
        if activation != target_activation:
            place = (f"config.{key}",)
            differences.append(TreeDifference("activation", place, activation, target_activation))
    return _folded(differences)


class _Comparison:
    """One walk through both trees."""

    def __init__(self) -> None:
        self.differences: list[TreeDifference] = []
        self.missing: list[TreeNode] = []
        self.extra: list[TreeNode] = []

    def compare(self, ours: TreeNode, theirs: TreeNode) -> None:
        if ours.type and theirs.type and _type(ours) != _type(theirs):
            kind: Kind = "activation" if _is_activation(ours) or _is_activation(theirs) else "type"
            self.differences.append(TreeDifference(kind, (ours.path,), ours.type, theirs.type))
        if ours.shapes is not None and theirs.shapes is not None:
            self.differences += _shapes(ours.path, ours.shapes, theirs.shapes)
        inner, others = ({child.name: child for child in node.children} for node in (ours, theirs))
        for name, child in inner.items():
            if name in others:
                self.compare(child, others[name])
        lacks = [child for name, child in inner.items() if name not in others]
        more = [child for name, child in others.items() if name not in inner]
        if inner and others and all(name.isdigit() for name in (*inner, *others)) and (lacks or more):
            counts = [f"{len(side)}: [{ranges(list(side))}]" for side in (inner, others)]
            self.differences.append(TreeDifference("count", (ours.path,), *counts))
        else:
            self.missing += lacks
            self.extra += more


def _plain(root: TreeNode) -> TreeNode:
    """The tree without wrappers: a wrapped module takes the place of its wrapper."""
    return replace(_unwrapped(root, ""), name=root.name, path="")


def _unwrapped(node: TreeNode, path: str) -> TreeNode:
    children: list[TreeNode] = []
    for child in node.children:
        inner = f"{path}.{child.name}" if path else child.name
        if child.name == "base_model" and any(below.name == "model" for below in child.children):
            child = next(below for below in child.children if below.name == "model")
            inner = path
        elif _is_wrapped(node, child):
            inner = path
        if inner != path:
            children.append(_unwrapped(child, inner))
            continue
        core = _unwrapped(child, path)
        node = replace(node, type=core.type, shapes=core.shapes)
        names = {below.name for below in core.children}
        children = [*core.children, *(c for c in children if c.name not in names)]
    return replace(node, path=path, children=tuple(children))


def _is_wrapped(node: TreeNode, child: TreeNode) -> bool:
    if child.name.isdigit():  # a list in a list
        return False
    if child.name == node.name and node.path:
        return True
    return plain_name(f"{child.name}.x") == "x"


def _shapes(path: str, ours: Mapping[str, Shape], theirs: Mapping[str, Shape]) -> Iterator[TreeDifference]:
    for name in dict.fromkeys([*ours, *theirs]):
        shape, target_shape = (shape_text(side[name]) if name in side else "" for side in (ours, theirs))
        if shape != target_shape and "?" not in (shape, target_shape):
            yield TreeDifference("shape", (f"{path}.{name}" if path else name,), shape, target_shape)


def _type(node: TreeNode) -> str:
    """The class name in lower case, without the suffix `Activation`."""
    return re.sub(r"Activation$", "", node.type).lower()


def _is_activation(node: TreeNode) -> bool:
    is_named = bool(_ACTIVATION_NAME.search(node.name)) and not node.children
    return is_named or bool(_ACTIVATION.search(node.type) and not node.children and not node.shapes)


def _placed(missing: list[TreeNode], extra: list[TreeNode]) -> Iterator[TreeDifference]:
    """Tell moved modules from missing and extra ones.

    A sub-tree has moved if exactly one of the other side is equal to it, with the same last name and the same
    numbers.
    """
    ours, theirs = ([node for top in tops for node in top.walk()] for tops in (missing, extra))
    keys = [Counter(map(_key, side)) for side in (ours, theirs)]
    there = {_key(node): node for node in theirs if keys[1][_key(node)] == 1}
    moved: dict[str, str] = {}
    taken: set[str] = set()
    for node in ours:
        other = there.get(_key(node)) if keys[0][_key(node)] == 1 else None
        if other is not None and node.path not in moved:
            pairs = zip(node.walk(), other.walk(), strict=True)
            for one, two in pairs:
                moved[one.path] = two.path
                taken.add(two.path)
            yield TreeDifference("nested", (node.path,), node.path, other.path)
    for top in missing:
        yield from (TreeDifference("missing", (n.path,), _of(n), "") for n in _rest(top, moved.keys()))
    for top in extra:
        yield from (TreeDifference("extra", (n.path,), "", _of(n)) for n in _rest(top, taken))


def _key(node: TreeNode) -> tuple[str, tuple[str, ...], str]:
    return node.name, fold(node.path)[1], node.signature


def _rest(node: TreeNode, gone: Collection[str]) -> Iterator[TreeNode]:
    """The sub-trees of which nothing has moved, and the modules of which a part has."""
    if node.path in gone:
        return
    if any(inner.path in gone for inner in node.walk()):
        yield replace(node, children=())
        for child in node.children:
            yield from _rest(child, gone)
    else:
        yield node


def _of(node: TreeNode) -> str:
    count = sum(1 for _ in node.walk()) - 1
    name = node.type or "a module"
    return f"{name} and {count} in it" if count else name


def _folded(differences: list[TreeDifference]) -> list[TreeDifference]:
    """Join differences whose paths differ in numbers only."""
    groups: dict[object, list[TreeDifference]] = {}
    for difference in differences:
        what: tuple[str, ...] = (difference.reference, difference.target)
        if difference.kind == "nested":
            what = tuple(fold(path)[0] for path in what)
        groups.setdefault((difference.kind, fold(difference.paths[0])[0], what), []).append(difference)
    folded = []
    for group in groups.values():
        first, paths = group[0], tuple(path for difference in group for path in difference.paths)
        reference, target = first.reference, first.target
        if first.kind == "nested":
            others = tuple(difference.target for difference in group)
            reference = TreeDifference("nested", paths, "", "").place
            target = TreeDifference("nested", others, "", "").place
        folded.append(TreeDifference(first.kind, paths, reference, target))
    return sorted(folded, key=lambda difference: KINDS.index(difference.kind))
