"""Which operation of one exported graph is which of another, although their names have other numbers.

A node is named by its operation and a number over the whole graph: one further multiplication, as of a weight
that is dequantised, shifts the names of all that come after. So nodes are paired by what they compute of
what, and names decide only where nothing is known of the other graph but them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from tensorcap_formats.run_info import ExportedNode

_NUMBER: Final = re.compile(r"_\d+$")


def pair_operations(reference: Sequence[ExportedNode], target: Sequence[ExportedNode]) -> dict[str, str]:
    """Pair the nodes of two graphs.

    For each node of the target, in order of execution, the partner is the free node of the reference of the
    same operation and module that has most inputs in common with it: weights by name, other nodes by their
    own partners, through nodes that have none. Of equals the first one is taken. Names of modules that the
    reference does not have are left out, unless all inputs are in common.

    Returns:
        The name in the target by that in the reference.
    """
    partner_of: dict[str, str] = {}  # by names in the target
    sources_of: dict[str, frozenset[str]] = {}  # of a node of the target without a partner
    free: dict[str, list[ExportedNode]] = {}
    for node in reference:
        free.setdefault(node.base, []).append(node)
    for node in target:
        inputs = {key: _sources(name, partner_of, sources_of) for key, name in node.inputs.items()}
        best: tuple[int, ExportedNode] | None = None
        for candidate in free.get(node.base, ()):
            score = _common(node, inputs, candidate)
            is_whole = score == len(candidate.inputs) + len(candidate.weights)
            if candidate.module == node.module or (is_whole and score):
                score = 2 * score + (candidate.module == node.module)
                if best is None or score > best[0]:
                    best = score, candidate
        if best is None:
            sources_of[node.node] = frozenset().union(*inputs.values())
        else:
            partner_of[node.node] = best[1].node
            free[node.base].remove(best[1])
    return {ours: theirs for theirs, ours in partner_of.items()}


def _sources(
    name: str, partner_of: Mapping[str, str], sources_of: Mapping[str, frozenset[str]]
) -> frozenset[str]:
    """Names in the reference of what an input of a node is made of; an input of the model has its own."""
    if name in partner_of:
        return frozenset({partner_of[name]})
    return sources_of.get(name, frozenset({name}))


def _common(node: ExportedNode, inputs: Mapping[str, Collection[str]], candidate: ExportedNode) -> int:
    """How many arguments of two nodes are the same."""
    weights = sum(candidate.weights.get(key) == name for key, name in node.weights.items())
    return weights + sum(candidate.inputs.get(key) in sources for key, sources in inputs.items())


def base_of_name(name: str) -> str:
    """The name of a node without its number.

    Example:
        >>> base_of_name("mul_12"), base_of_name("_softmax")
        ('mul', '_softmax')
    """
    return _NUMBER.sub("", name)
