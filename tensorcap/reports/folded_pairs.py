"""Pairs folded to the facts that they show: one row for one tensor, and one for layers that share a fault."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from tensorcap.comparison import Pair, by_error, contents
from tensorcap.wording import name_pattern, product_name


@dataclass(frozen=True, slots=True)
class FoldedPairs:
    """Pairs that are one row.

    Attributes:
        pair: The one of them that errs most, whose numbers the row shows.
        name: Their key text, with the numbers of all layers and steps: `0/layers.{3-5}.mlp/output`.
        keys: Key texts of all of them, also of those that hold the same tensor.
        places: Count of layers and steps that are folded, at least 1.
    """

    pair: Pair
    name: str
    keys: tuple[str, ...]
    places: int

    @property
    def also(self) -> int:
        """Count of keys that hold the same tensors as those in the name."""
        return len(self.keys) - self.places


def fold_pairs(pairs: Iterable[Pair]) -> list[FoldedPairs]:
    """Fold pairs, each row in the place of the first of its pairs.

    1. Keys with equal contents on both sides and one status hold one tensor: the first stands for them.
    2. Tensors of one pattern of name, one status, one set of failing tests and one reason are those of layers
       that share a fault. If their numbers are no whole ranges, each step is folded alone.
    """
    tensors: dict[object, list[Pair]] = {}
    for pair in pairs:
        same = contents(pair)
        tensors.setdefault((same, pair.status) if same else pair.key, []).append(pair)
    pattern_of_reason = cache(name_pattern)  # many pairs have the same
    faults: dict[object, list[list[Pair]]] = {}
    for shared in tensors.values():
        first = shared[0]
        tests = frozenset([f.test for f in first.findings if f.status == first.status])
        names = name_pattern(first.key), pattern_of_reason(first.reason)
        faults.setdefault((*names, first.status, tests, first.is_required), []).append(shared)
    return [row for members in faults.values() for row in _rows(members)]


def _rows(members: list[list[Pair]]) -> list[FoldedPairs]:
    """One row, or one for each step if the numbers of layers and steps are no whole ranges."""
    names = [shared[0].key for shared in members]
    name = product_name(names)
    if name is not None:
        return [_row(name, members)]
    by_step: dict[str, list[list[Pair]]] = {}
    for shared in members:
        by_step.setdefault(shared[0].key.partition("/")[0], []).append(shared)
    if len(by_step) == 1:
        return [_row(f"{names[0]} and {len(names) - 1} more of {name_pattern(names[0])}", members)]
    return [row for of_step in by_step.values() for row in _rows(of_step)]


def _row(name: str, members: Sequence[Sequence[Pair]]) -> FoldedPairs:
    largest = max((shared[0] for shared in members), key=by_error)
    return FoldedPairs(largest, name, tuple(p.key for shared in members for p in shared), len(members))
