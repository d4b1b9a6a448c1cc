"""Pair the nodes of two graphs of one model, in which nodes of one name may be other operators.

The nodes of an exported graph are numbered by operator through the whole graph: with one more `mul` in a
module, as a dequantisation is, all later `mul_5` are `mul_6`. So a number alone says nothing; module,
operator, order and shape do.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

_NAME: Final = re.compile(r"(.*?)(?:_([1-9][0-9]*))?")
# What it is worth that two nodes are partners, no unit
_SAME_SHAPE: Final = 2.0  # but for axes of length 1
_SAME_SIZE: Final = 1.5  # an operator fused with a view of its result has another shape
_OTHER_SIZE: Final = 0.25  # less than a shift costs, so that only nodes of the expected number are paired
_SHIFT: Final = 1.0  # less than a node of the same shape is worth: one that has moved is found


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A node of a graph.

    Attributes:
        name: Its name: `mul_34`.
        site: The site that its records have.
        module: Site of the innermost module that it lies in; None if the run does not say.
        shape: Shape of its first output; None if it is not known.
    """

    name: str
    site: str
    module: str | None
    shape: tuple[int, ...] | None = None

    @property
    def operator(self) -> str:
        """The name without its number.

        Example:
            >>> GraphNode("mul_34", "mlp:mul_34", "mlp").operator, GraphNode("mul", "mlp:mul", "mlp").operator
            ('mul', 'mul')
        """
        match = _NAME.fullmatch(self.name)
        return match[1] if match else self.name

    @property
    def number(self) -> int:
        """Its number among the nodes of this operator; 0 of the first, which has none."""
        match = _NAME.fullmatch(self.name)
        return int(match[2]) if match and match[2] else 0


def pair_nodes(
    reference: Iterable[GraphNode], target: Iterable[GraphNode]
) -> list[tuple[GraphNode, GraphNode]]:
    """Find which nodes of two graphs are the same operators of a model.

    For each operator, both sides are sequences in the order of their numbers; some nodes of either side may
    be unknown. Of all ways to pair nodes in order, each with one of its module, that of the largest sum is
    taken (a chain of fragments, as in the comparison of genomes):

    1. A pair of equal shapes, but for axes of length 1, is worth 2; of as many elements, 1.5; of other sizes,
       or of one that is not known, as little as keeps nodes of the expected numbers together.
    2. A pair whose numbers differ by something else than those of the pair before costs 1. The first is
       expected to have equal numbers: so names that are equal stay paired, unless more nodes fit otherwise.

    Args:
        reference: Nodes of the reference's graph.
        target: Nodes of the target's graph.
    """
    ours, theirs = _by_operator(reference), _by_operator(target)
    pairs: list[tuple[GraphNode, GraphNode]] = []
    for operator, nodes in ours.items():
        pairs += _pair_operator(nodes, theirs.get(operator, []))
    return pairs


def _by_operator(nodes: Iterable[GraphNode]) -> dict[str, list[GraphNode]]:
    groups = defaultdict[str, list[GraphNode]](list)
    for node in nodes:
        groups[node.operator].append(node)
    return {operator: sorted(group, key=lambda node: node.number) for operator, group in groups.items()}


@dataclass(slots=True)
class _Chain:
    """The best chain of pairs that ends with one: its worth, its last pair, and the chain before."""

    worth: float
    pair: tuple[int, int]
    before: _Chain | None


def _pair_operator(
    reference: Sequence[GraphNode], target: Sequence[GraphNode]
) -> list[tuple[GraphNode, GraphNode]]:
    """The chain of the largest worth among nodes of one operator."""
    equal = _equal_names(reference, target)
    if len(equal) == len(target):
        return equal
    numbers = [node.number for node in target]
    ends: list[_Chain | None] = [None] * len(target)  # the best chain that ends with each node of the target
    by_shift: dict[int, _Chain] = {}  # the best chain by the difference of its last numbers
    for i, node in enumerate(reference):
        longer: list[tuple[int, _Chain]] = []
        best: _Chain | None = None  # of those that end before the node of the target
        for j, other in enumerate(target):
            worth = _worth(node, other)
            if worth:
                shift = numbers[j] - node.number
                straight = by_shift.get(shift)
                candidates = [_Chain(worth - (_SHIFT if shift else 0.0), (i, j), None)]
                if straight is not None:
                    candidates.append(_Chain(worth + straight.worth, (i, j), straight))
                if best is not None:
                    candidates.append(_Chain(worth + best.worth - _SHIFT, (i, j), best))
                longer.append((shift, max(candidates, key=lambda chain: chain.worth)))
            end = ends[j]
            if end is not None and (best is None or end.worth > best.worth):
                best = end
        for shift, chain in longer:
            j = chain.pair[1]
            end, straight = ends[j], by_shift.get(shift)
            if end is None or chain.worth > end.worth:
                ends[j] = chain
            if straight is None or chain.worth > straight.worth:
                by_shift[shift] = chain
    last = max((end for end in ends if end is not None), key=lambda chain: chain.worth, default=None)
    pairs = []
    while last is not None:
        i, j = last.pair
        pairs.append((reference[i], target[j]))
        last = last.before
    return pairs[::-1]


def _equal_names(
    reference: Sequence[GraphNode], target: Sequence[GraphNode]
) -> list[tuple[GraphNode, GraphNode]]:
    """Pairs of equal names in one module and of one size, in order."""
    known = {node.name: node for node in reference}
    return [(known[t.name], t) for t in target if t.name in known and _worth(known[t.name], t) >= _SAME_SIZE]


def _worth(node: GraphNode, other: GraphNode) -> float:
    """What it is worth that two nodes of one operator are partners; 0 if they cannot be."""
    if node.module is not None and other.module is not None and node.module != other.module:
        return 0.0
    if node.shape is None or other.shape is None:
        return _OTHER_SIZE
    if without_ones(node.shape) == without_ones(other.shape):
        return _SAME_SHAPE
    return _SAME_SIZE if math.prod(node.shape) == math.prod(other.shape) else _OTHER_SIZE


def without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape without its axes of length 1, along which nothing can be in another order.

    Example:
        >>> without_ones((1, 8, 32)), without_ones((8, 1, 32)), without_ones(())
        ((8, 32), (8, 32), ())
    """
    return tuple(size for size in shape if size != 1)
