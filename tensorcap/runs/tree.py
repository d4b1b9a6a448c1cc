"""The module tree of a run, from the metadata of an archive or of an adapter.

As text it is folded: `layers[0..47] (48): LlamaDecoderLayer`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import ROOT_SITE
from tensorcap_formats.run_info import RunInfo

Shape = tuple[int, ...] | None  # None for a parameter that has no shape yet

ROOT: Final = "model"  # what the root is called in the Equivalence method's files
_ACTIVATION_KEY: Final = re.compile(r"(?:^|_)(?:act|activation)(?:_|$)|^feed_forward_proj$")


@dataclass(frozen=True)
class TreeNode:
    """A module.

    Attributes:
        name: The last component of its path; `model` for the root.
        path: Its path; empty for the root.
        type: Its class, without the package; empty if it is not known.
        shapes: Shapes of its own parameters, by name; None if they are not known.
        children: The modules in it, in the order of the model.
        is_never_called: Whether the run had no call of it.
    """

    name: str
    path: str
    type: str
    shapes: Mapping[str, Shape] | None
    children: tuple[TreeNode, ...] = ()
    is_never_called: bool = False

    @cached_property
    def signature(self) -> str:
        """Equal for modules of equal type and shapes that have equal modules of equal names in them."""
        shapes = None if self.shapes is None else sorted(self.shapes.items())
        inner = [(child.name, child.signature) for child in self.children]
        return hashlib.sha1(repr((self.type, shapes, inner)).encode(), usedforsecurity=False).hexdigest()

    def walk(self) -> Iterator[TreeNode]:
        """Iterate over the module and all in it, each before those in it."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True)
class Tree:
    """A module tree.

    Attributes:
        source: The archive or model that it is read from.
        root: The model.
        has_modules: Whether modules were listed; if not, the tree is of the names of tensors.
        activations: Entries of the configuration that name an activation.
    """

    source: str
    root: TreeNode
    has_modules: bool = True
    activations: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, archive: Archive) -> Tree:
        """Read the tree of an archive; of its sites' names if it lists no modules.

        Raises:
            UsageError: It holds nothing.
        """
        tree = cls.of_run(str(archive.path), archive.info)
        if tree is not None:
            return tree
        sites = dict.fromkeys(record.key.site.partition(":")[0] for record in archive.records)
        paths = {"" if site == ROOT_SITE else site.replace("/", "."): _Facts() for site in sites}
        if not paths:
            raise UsageError(f"{archive.path}: holds neither modules nor tensors")
        return cls(str(archive.path), _build_tree(paths), has_modules=False)

    @classmethod
    def of_run(cls, source: str, info: RunInfo) -> Tree | None:
        """Read the tree of a run's metadata; None if they list no modules."""
        if not info.modules:
            return None
        never = {point.site for point in info.points if point.status == "never-called"}
        facts = {
            module.path: _Facts(
                module.short_class,
                {name: tensor.shape for name, tensor in module.parameters.items()},
                site in never,
            )
            for site, module in info.modules.items()
        }
        return cls(source, _build_tree(facts), activations=_activations(info.config))


@dataclass(frozen=True)
class _Facts:
    type: str = ""
    shapes: Mapping[str, Shape] | None = None
    is_never_called: bool = False


def _activations(config: Mapping[str, Any]) -> dict[str, str]:
    activations: dict[str, str] = {}

    def visit(entries: object, prefix: str) -> None:
        for key, value in entries.items() if isinstance(entries, Mapping) else ():
            if isinstance(value, str) and _ACTIVATION_KEY.search(str(key)):
                activations[f"{prefix}{key}"] = value
            visit(value, f"{prefix}{key}.")

    visit(config, "")
    return activations


def _build_tree(facts: Mapping[str, _Facts]) -> TreeNode:
    """Build the tree of modules by path; for modules that are only part of a path nothing is known."""
    children: dict[str, dict[str, None]] = {"": {}}
    for path in facts:
        while path:
            parent = path.rpartition(".")[0]
            is_known = path in children.setdefault(parent, {})
            children[parent][path] = None
            children.setdefault(path, {})
            if is_known:
                break
            path = parent
    nodes: dict[str, TreeNode] = {}
    for path in sorted(children, key=lambda path: -path.count(".") if path else 1):
        known = facts.get(path, _Facts())
        inner = tuple(nodes[child] for child in children[path])
        name = path.rpartition(".")[2] or ROOT
        nodes[path] = TreeNode(name, path, known.type, known.shapes, inner, known.is_never_called)
    return nodes[""]


def grouped(nodes: tuple[TreeNode, ...], *, numbers_only: bool) -> list[list[TreeNode]]:
    """Group modules of one parent that are equal in all but their name.

    Args:
        nodes: Modules of one parent.
        numbers_only: Whether only members of lists, whose names are numbers, are grouped.
    """
    groups: dict[object, list[TreeNode]] = {}
    for node in nodes:
        is_alone = numbers_only and not node.name.isdigit()
        groups.setdefault(node.path if is_alone else (node.signature,), []).append(node)
    return list(groups.values())


def full(node: TreeNode, depth: int | None = None) -> dict[str, Any]:
    """Return the full tree, to `depth` levels below the root, as the Equivalence method writes it."""
    inner = [full(child, below(depth)) for child in node.children] if depth != 0 else []
    return {"name": node.name, "type": node.type, "children": inner}


def compressed(node: TreeNode, depth: int | None = None) -> dict[str, Any]:
    """Return the compressed tree, as the Equivalence method writes it, but not across unequal shapes."""
    return _compressed([node], depth)


def _compressed(group: list[TreeNode], depth: int | None) -> dict[str, Any]:
    inner = grouped(group[0].children, numbers_only=False) if depth != 0 else []
    return {
        "type": group[0].type,
        "names": [node.name for node in group],
        "children": [_compressed(child, below(depth)) for child in inner],
    }


def paths(node: TreeNode, depth: int | None = None) -> list[str]:
    """List the paths of all modules but the root, each before those in it."""
    all_paths = (inner.path for inner in node.walk() if inner.path)
    return [path for path in all_paths if depth is None or path.count(".") < depth]


def below(depth: int | None) -> int | None:
    """Return the depth one level further down."""
    return None if depth is None else depth - 1


_LISTS: Final = ("ModuleList", "")  # shown by their members alone


def tree_lines(root: TreeNode, *, depth: int | None = None, shapes: bool = False) -> Iterator[str]:
    """Render a tree as lines of text.

    Args:
        root: The model.
        depth: How many levels below the root are shown; all if None.
        shapes: Whether shapes of parameters are shown.
    """
    yield _line(root.name, [root], shapes)
    yield from _below([root], "", depth, shapes)


def _below(group: Sequence[TreeNode], indent: str, depth: int | None, shapes: bool) -> Iterator[str]:
    """Yield the lines below equal modules."""
    items = _items(group) if depth != 0 else []
    for i, (label, nodes, levels) in enumerate(items, 1):
        branch, rest = ("└─ ", "   ") if i == len(items) else ("├─ ", "│  ")
        yield f"{indent}{branch}{_line(label, nodes, shapes)}"
        left = None if depth is None else max(depth - levels, 0)
        yield from _below(nodes, indent + rest, left, shapes)


def _items(group: Sequence[TreeNode]) -> list[tuple[str, list[TreeNode], int]]:
    """List the entries below equal modules: label, modules in all of them, levels that it goes down."""
    items: list[tuple[str, list[TreeNode], int]] = []
    for name, nodes in _folded(group):
        first = nodes[0]
        is_list = first.type in _LISTS and not first.shapes and not first.name.isdigit()
        if is_list and first.children and all(child.name.isdigit() for child in first.children):
            items += [(f"{name}{label}", members, 2) for label, members in _folded(nodes)]
        else:
            items.append((name, nodes, 1))
    return items


def _folded(group: Sequence[TreeNode]) -> list[tuple[str, list[TreeNode]]]:
    """Group children of equal modules by place, and equal members of lists."""
    groups = []
    places = {child.path: i for i, child in enumerate(group[0].children)}
    for inner in grouped(group[0].children, numbers_only=True):
        label = inner[0].name
        if label.isdigit():
            count = f" ({len(inner)})" if len(inner) > 1 else ""
            label = f"[{ranges([node.name for node in inner])}]{count}"
        groups.append((label, [node.children[places[child.path]] for node in group for child in inner]))
    return groups


def _line(label: str, nodes: Sequence[TreeNode], shapes: bool) -> str:
    first = nodes[0]
    text = f"{label}: {first.type}" if first.type else label
    if shapes and first.shapes:
        text += "  " + " ".join(f"{name}[{shape_text(shape)}]" for name, shape in first.shapes.items())
    never = sum(node.is_never_called for node in nodes)
    if never:
        text += "  (never called)" if never == len(nodes) else f"  (never called: {never} of {len(nodes)})"
    return text


def shape_text(shape: Shape) -> str:
    """Format a shape as the command line prints it.

    Example:
        >>> shape_text((4, 2)), shape_text(()), shape_text(None)
        ('4x2', '()', '?')
    """
    return "?" if shape is None else "x".join(map(str, shape)) or "()"


def ranges(names: Sequence[str]) -> str:
    """Format numbers as text, runs of them as spans.

    Example:
        >>> ranges(["0", "1", "2", "4", "6", "7"])
        '0..2,4,6..7'
    """
    runs: list[list[int]] = []
    for number in sorted({int(name) for name in names}):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)
