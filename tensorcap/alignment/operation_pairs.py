"""Which operation of one exported graph is which of another, although their names have other numbers.

A node is named by its operation and a number over the whole graph: one further multiplication, as of a weight
that is dequantised, shifts the names of all that come after. So nodes are paired by what they compute of
what. Of a graph of which names alone are known, `node_sequences` pairs them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tensorcap_formats.run_info import ExportedNode


def pair_operations(reference: Sequence[ExportedNode], target: Sequence[ExportedNode]) -> dict[str, str]:
    """Pair the nodes of two graphs.

    1. For each node of the target, in order of execution, the partner is the free node of the reference of
       the same operation and module that has most inputs in common with it: weights by name, other nodes by
       their own partners, through nodes that have none. Of equals the first one is taken; of another module
       one with all inputs in common.
    2. Nodes that are left, and have no input in common, are paired in order within their module.

    Returns:
        The name in the target by that in the reference.
    """
    pairing = _Pairing(reference)
    left = [node for node in target if not pairing.add(node, least=1 if node.inputs or node.weights else 0)]
    for node in left:
        pairing.add(node, least=0)
    return {ours: theirs for theirs, ours in pairing.partner_of.items()}


class _Pairing:
    """Pairs of nodes, as far as they are known.

    Args:
        reference: The nodes of the reference's graph.

    Attributes:
        partner_of: Names in the reference by those in the target.
    """

    def __init__(self, reference: Sequence[ExportedNode]) -> None:
        self.partner_of: dict[str, str] = {}
        self._sources_of: dict[str, frozenset[str]] = {}  # of a node of the target without a partner
        self._free: dict[str, list[ExportedNode]] = {}
        for node in reference:
            self._free.setdefault(node.base, []).append(node)

    def add(self, node: ExportedNode, least: int) -> bool:
        """Find the partner of a node of the target, with so many inputs in common; whether there is one."""
        inputs = {key: self._sources(name) for key, name in node.inputs.items()}
        best: tuple[int, ExportedNode] | None = None
        for candidate in self._free.get(node.base, ()):
            score = _common(node, inputs, candidate)
            is_whole = score == len(candidate.inputs) + len(candidate.weights)
            if score >= least and (candidate.module == node.module or (is_whole and score)):
                score = 2 * score + (candidate.module == node.module)
                if best is None or score > best[0]:
                    best = score, candidate
        if best is None:
            self._sources_of[node.node] = frozenset().union(*inputs.values())
            return False
        self.partner_of[node.node] = best[1].node
        self._free[node.base].remove(best[1])
        return True

    def _sources(self, name: str) -> frozenset[str]:
        """Names in the reference of what an input is made of; an input of the model has its own."""
        if name in self.partner_of:
            return frozenset({self.partner_of[name]})
        return self._sources_of.get(name, frozenset({name}))


def _common(node: ExportedNode, inputs: Mapping[str, Collection[str]], candidate: ExportedNode) -> int:
    """How many arguments of two nodes are the same."""
    weights = sum(candidate.weights.get(key) == name for key, name in node.weights.items())
    return weights + sum(candidate.inputs.get(key) in sources for key, sources in inputs.items())
