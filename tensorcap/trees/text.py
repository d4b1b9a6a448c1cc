"""A module tree as text, folded: `layers[0..47] (48): LlamaDecoderLayer`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from tensorcap.trees.tree import Node, Shape, grouped

_LISTS: Final = ("ModuleList", "")  # what a list's members say is all that there is to say of it


def tree_lines(root: Node, *, depth: int | None = None, shapes: bool = False) -> Iterator[str]:
    """The lines of a tree.

    Args:
        root: The model.
        depth: How many levels below the root are told; all if None.
        shapes: Whether parameters are told.
    """
    yield _line(root.name, [root], shapes)
    yield from _below([root], "", depth, shapes)


def _below(group: Sequence[Node], indent: str, depth: int | None, shapes: bool) -> Iterator[str]:
    """What equal modules have in them."""
    items = _items(group) if depth != 0 else []
    for i, (label, nodes, levels) in enumerate(items, 1):
        branch, rest = ("└─ ", "   ") if i == len(items) else ("├─ ", "│  ")
        yield f"{indent}{branch}{_line(label, nodes, shapes)}"
        left = None if depth is None else max(depth - levels, 0)
        yield from _below(nodes, indent + rest, left, shapes)


def _items(group: Sequence[Node]) -> list[tuple[str, list[Node], int]]:
    """The lines below equal modules: label, modules of all of them, levels that the line goes down."""
    items: list[tuple[str, list[Node], int]] = []
    for name, nodes in _folded(group):
        first = nodes[0]
        is_list = first.type in _LISTS and not first.shapes and not first.name.isdigit()
        if is_list and first.children and all(child.name.isdigit() for child in first.children):
            items += [(f"{name}{label}", members, 2) for label, members in _folded(nodes)]
        else:
            items.append((name, nodes, 1))
    return items


def _folded(group: Sequence[Node]) -> list[tuple[str, list[Node]]]:
    """Children of equal modules, equal members of lists together; they stand in the same places."""
    found = []
    places = {child.path: i for i, child in enumerate(group[0].children)}
    for inner in grouped(group[0].children, numbers_only=True):
        label = inner[0].name
        if label.isdigit():
            count = f" ({len(inner)})" if len(inner) > 1 else ""
            label = f"[{ranges([node.name for node in inner])}]{count}"
        found.append((label, [node.children[places[child.path]] for node in group for child in inner]))
    return found


def _line(label: str, nodes: Sequence[Node], shapes: bool) -> str:
    first = nodes[0]
    text = f"{label}: {first.type}" if first.type else label
    if shapes and first.shapes:
        text += "  " + " ".join(f"{name}[{shape_text(shape)}]" for name, shape in first.shapes.items())
    never = sum(node.is_never_called for node in nodes)
    if never:
        text += "  (never called)" if never == len(nodes) else f"  (never called: {never} of {len(nodes)})"
    return text


def shape_text(shape: Shape) -> str:
    """A shape as the command line has it.

    Example:
        >>> shape_text((4, 2)), shape_text(()), shape_text(None)
        ('4x2', '()', '?')
    """
    return "?" if shape is None else "x".join(map(str, shape)) or "()"


def ranges(names: Sequence[str]) -> str:
    """Numbers in runs.

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
