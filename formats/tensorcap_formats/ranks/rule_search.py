"""Find the merge rules that nobody recorded: by shapes of a reference, and by the values of the ranks.

Values are held against other tensors of the same run only. What no rule is proven of stays apart: tensors of
one shape and unlike values may be parts, terms of a sum, or copies that differ by mistake.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from tensorcap_formats.dtypes import Array, DType, decode
from tensorcap_formats.errors import UsageError
from tensorcap_formats.float_formats import FLOAT_FORMATS
from tensorcap_formats.ranks.members import Members, Shards
from tensorcap_formats.ranks.recorded import KnownRule
from tensorcap_formats.ranks.rule import MeshRule, Rule, Shape

_NEIGHBOURS: Final = 8  # tensors of fitting shape, next in execution order, that one is held against
_ROWS: Final = 16  # of a fused projection, that its two halves are recognized by
_PASSES: Final = 3  # a rule may follow from another that is found in the same pass


def rule_by_shape(shapes: Sequence[Shape], whole: Shape, labels: Sequence[int]) -> Rule | None:
    """Find the rule that gives a known shape; None if there is none.

    1. One axis may differ between a rank's shape and the whole; it is the one that ranks hold parts of.
    2. If all ranks together have as much of it as the whole, they are joined.
    3. If they have N times as much, they hold copies: of ranks in succession if those are equal, of all
       parts anew if ranks that lie further apart are, and the former if neither is (then a copy is wrong).
    4. If they have more, but less than twice as much, the rest is padding.

    Args:
        shapes: Of the ranks, in order.
        whole: Of the reference.
        labels: A number for each rank; of equal tensors the same.
    """
    ndim = len(whole)
    if any(len(shape) != ndim for shape in shapes):
        return None
    for axis in range(ndim):
        rest = whole[:axis] + whole[axis + 1 :]
        if any(shape[:axis] + shape[axis + 1 :] != rest for shape in shapes):
            continue
        total, full, count = sum(shape[axis] for shape in shapes), whole[axis], len(shapes)
        if total == full:
            return Rule("concat", axis)
        if total < full or not full or len({shape[axis] for shape in shapes}) > 1:
            continue
        copies = total // full if total % full == 0 else 0
        if copies == count:
            return Rule("replicated")
        if copies and count % copies == 0:
            held = count // copies
            if [i // copies for i in range(count)] == _numbered(labels):
                return Rule("concat", axis, copies=copies)
            if [i % held for i in range(count)] == _numbered(labels):
                return Rule("concat", axis, rounds=copies)
            return Rule("concat", axis, copies=copies)
        if total < 2 * full:
            return Rule("concat", axis, cut=full)
    return None


class RuleSearch:
    """The search for rules among the tensors of one run."""

    def __init__(self, members: Members, known: Mapping[str, KnownRule]) -> None:
        """Prepare the search.

        Args:
            members: The archives.
            known: Rules that are known already, by key text.
        """
        self._members = members
        self._shards = members.shards
        self._place = {shards.text: i for i, shards in enumerate(self._shards)}
        self._known = dict(known)
        self._by_content: dict[tuple[object, ...], str] = {}
        self._wholes: dict[tuple[int, str, Shape], list[int]] = {}
        self._inputs: dict[tuple[int, str, int], list[str]] = {}
        for shards in self._shards:
            if shards.key.slot.startswith("input"):
                place = shards.key.step, shards.key.site, shards.key.call
                self._inputs.setdefault(place, []).append(shards.text)
            if shards.text in self._known:
                self._note(shards, self._known[shards.text])

    def find(self, unknown: Sequence[Shards]) -> dict[str, KnownRule]:
        """Find rules of tensors that the ranks hold unlike values of, by key text, as far as values tell."""
        results: dict[str, KnownRule] = {}
        left = list(unknown)
        for _ in range(_PASSES):
            before = len(left)
            for shards in list(left):
                rule = self._same(shards) or self._computed(shards) or self._like_input(shards)
                if rule is not None:
                    results[shards.text] = self._known[shards.text] = rule
                    self._note(shards, rule)
                    left.remove(shards)
            if len(left) == before:
                break
        return results

    def _note(self, shards: Shards, known: KnownRule) -> None:
        if all(shards.content):
            self._by_content.setdefault(_content(shards), shards.text)
        if known.rule.is_replicated and len(shards.ranks) == len(self._members) and shards.is_stored:
            kind = shards.key.step, shards.dtype.name, shards.shapes[0]
            self._wholes.setdefault(kind, []).append(self._place[shards.text])

    def _same(self, shards: Shards) -> KnownRule | None:
        """The rule of the same tensor under another key, as an output that is the next module's input."""
        text = self._by_content.get(_content(shards)) if all(shards.content) else None
        if text is None or text == shards.text:
            return None
        return KnownRule(self._known[text].rule, "the same tensor as", text)

    def _computed(self, shards: Shards) -> KnownRule | None:
        """The rule by which the ranks' tensors make a tensor that all ranks hold: its sum, or joined."""
        if not shards.is_stored or len(shards.ranks) != len(self._members):
            return None
        here, arrays = self._place[shards.text], None
        if len(set(shards.shapes)) == 1 and shards.dtype.name in FLOAT_FORMATS:
            for whole in self._near(shards, shards.shapes[0], after=here):
                arrays = arrays or self._members.read(shards)
                if _is_sum(arrays, self._first(whole), shards.dtype):
                    return self._proven(Rule("sum"), shards, "adds up to", whole)
        for axis in range(len(shards.shapes[0])):
            rule = Rule("concat", axis)
            try:
                shape = rule.shape(shards.shapes)
            except UsageError:
                continue
            for whole in self._near(shards, shape):
                arrays = arrays or self._members.read(shards)
                if rule.merge(arrays, shards.dtype).tobytes() == self._first(whole).tobytes():
                    return self._proven(rule, shards, "joined, it is", whole)
        return None

    def _like_input(self, shards: Shards) -> KnownRule | None:
        """The rule of an argument of the same call that ranks hold parts of, in the same shape.

        What a module computes of a part, element by element or row by row, is a part in the same place.
        """
        if shards.key.slot.startswith("input"):
            return None
        rules = {}
        for text in self._inputs.get((shards.key.step, shards.key.site, shards.key.call), ()):
            one = self._shards[self._place[text]]
            known = self._known.get(text)
            if known is None or one.shapes != shards.shapes or one.ranks != shards.ranks:
                continue
            if any(rule.kind == "concat" for rule in known.rule.rules):
                rules[replace(known.rule, shape=None)] = text
        if len(rules) != 1:
            return None
        (rule, text), *_ = rules.items()
        return KnownRule(rule, "as its argument", text)

    def _near(self, shards: Shards, shape: Shape, after: int | None = None) -> Iterator[Shards]:
        """Tensors that all ranks hold of a shape, nearest in execution order."""
        here = self._place[shards.text]
        places = self._wholes.get((shards.key.step, shards.dtype.name, shape), [])
        if after is not None:
            places = [place for place in places if place > after]
        for place in sorted(places, key=lambda place: abs(place - here))[:_NEIGHBOURS]:
            yield self._shards[place]

    def _first(self, shards: Shards) -> Array:
        return self._members.archives[shards.ranks[0]].read(shards.records[0])

    def _proven(self, rule: Rule, shards: Shards, how: str, whole: Shards) -> KnownRule:
        return KnownRule(MeshRule((rule,), sizes=(len(shards.ranks),)), f"by values: {how}", whole.text)

    def is_fused(self, shards: Shards, axis: int) -> bool:
        """Whether each rank's tensor is a gate and the values that it is multiplied with, in halves.

        A later tensor of the same rank is then `f(gate) * values`, of a usual activation `f`.
        """
        size = shards.shapes[0][axis]
        if (
            size % 2
            or not shards.is_stored
            or shards.dtype.name not in FLOAT_FORMATS
            or 0 in shards.shapes[0]
        ):
            return False
        half = (*shards.shapes[0][:axis], size // 2, *shards.shapes[0][axis + 1 :])
        here = self._place[shards.text]
        later = [
            other
            for other in self._shards[here + 1 : here + 1 + 2 * _NEIGHBOURS]
            if other.key.step == shards.key.step
            and other.ranks[0] == shards.ranks[0]
            and other.shapes[0] == half
            and other.dtype == shards.dtype
            and other.is_stored
        ]
        if not later:
            return False
        rows = np.moveaxis(decode(self._first(shards), shards.dtype), axis, -1).reshape(-1, size)[:_ROWS]
        gate, values = np.split(rows.astype(np.float64), 2, -1)
        limit = 64 * FLOAT_FORMATS[shards.dtype.name].unit_roundoff
        for other in later:
            product = np.moveaxis(decode(self._first(other), other.dtype), axis, -1)
            product = product.reshape(-1, size // 2)[:_ROWS].astype(np.float64)
            scale = float(np.linalg.norm(product))
            for activated in _activations(gate):
                error = float(np.linalg.norm(activated * values - product))
                if scale and error <= min(limit, 0.1) * scale:
                    return True
        return False


def _content(shards: Shards) -> tuple[object, ...]:
    return (shards.ranks, shards.content, shards.shapes, shards.dtype.name)


def _numbered(labels: Sequence[int]) -> list[int]:
    numbers = {label: i for i, label in enumerate(dict.fromkeys(labels))}
    return [numbers[label] for label in labels]


def _is_sum(terms: Sequence[Array], whole: Array, dtype: DType) -> bool:
    """Whether a tensor is the sum of others, within the error of adding them one by one.

    `|fl(sum) - sum| <= (n - 1) u sum |x_i| + O(u^2)` (Higham, Accuracy and Stability, 4.2); one unit more for
    the dtype that the sum is stored in.
    """
    values = [decode(term, dtype).astype(np.float64) for term in terms]
    if not all(np.isfinite(value).all() for value in values):
        return False
    magnitude = np.sum(np.abs(values), axis=0)
    if not magnitude.any():
        return False
    form = FLOAT_FORMATS[dtype.name]
    bound = 1.01 * len(values) * form.unit_roundoff * magnitude + len(values) * form.smallest
    return bool((np.abs(np.sum(values, axis=0) - decode(whole, dtype)) <= bound).all())


def _activations(x: Array) -> Iterator[Array]:
    """SiLU, GELU, GELU by tanh, ReLU, sigmoid, and none, of float64."""
    with np.errstate(over="ignore"):
        sigmoid = 1 / (1 + np.exp(-x))
    yield x * sigmoid
    yield x * 0.5 * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2)))
    yield 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    yield np.maximum(x, 0)
    yield sigmoid
    yield x
