"""Merge rules: how a tensor is put together from what the ranks of a run hold (RNK-10 to RNK-14).

replicated                          every rank holds all of it
concat 2                            ranks hold parts along an axis, in their order; -1 is the last axis
concat -1 parts=2                   each rank's part is itself of two parts, as a fused gate and up projection
concat -1 parts=64,16,16            parts of these sizes, as fused queries, keys and values
concat 1 copies=2                   each two ranks in succession hold copies, as of KV heads
concat -1 parts=64,16,16 copies=1,2,2   of each part each so many ranks in succession hold copies
concat 1 rounds=2                   copies too, but of all parts, one round of ranks after the other
concat -1 cut=50257                 what is behind this size is padding, as of a vocabulary
sum, avg, max, min                  each rank holds a term of all elements, as before an all-reduce
alone                               one rank has it, as a stage of a pipeline

On a mesh of several axes each has a rule, the outermost first: `dp: replicated; tp: concat 2`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from tensorcap_formats.dtypes import Array, DType, decode, encode
from tensorcap_formats.errors import UsageError, abbreviate

Shape = tuple[int, ...]

_WHOLE: Final = ("replicated", "alone")
_TERMS: Final = ("sum", "avg", "max", "min")
_FORMS: Final = (
    "replicated, alone, sum, avg, max, min, or concat AXIS [parts=N] [copies=N] [rounds=N] [cut=SIZE]"
)
_MESH_AXIS: Final = re.compile(r"\s*(?:([A-Za-z_]\w*)\s*:)?\s*([^:]+?)\s*")


@dataclass(frozen=True, slots=True)
class Rule:
    """What the ranks along one axis of a mesh hold of a tensor.

    Attributes:
        kind: `replicated`, `alone`, `concat`, `sum`, `avg`, `max` or `min`.
        axis: Of `concat`, the axis; negative from the end.
        parts: Of `concat`, of how many equal parts each rank's part is made, or their sizes.
        copies: Of `concat`, how many ranks in succession hold the same.
        part_copies: The same of each of `parts` by itself, which have sizes then; () if all have `copies`.
        rounds: Of `concat`, how often the ranks hold all parts anew.
        cut: Of `concat`, the size that is left of the axis; None for all of it.
    """

    kind: str
    axis: int = 0
    parts: tuple[int, ...] = (1,)
    copies: int = 1
    rounds: int = 1
    cut: int | None = None
    part_copies: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Read one rule.

        Raises:
            UsageError: It is none.

        Example:
            >>> Rule.parse("concat -1 parts=2 cut=100").text
            'concat -1 parts=2 cut=100'
        """
        kind, *words = text.split() or [""]
        if kind in (*_WHOLE, *_TERMS) and not words:
            return cls(kind)
        try:
            if kind != "concat":
                raise ValueError
            options = dict(word.split("=") for word in words[1:])
            if len(options) != len(words) - 1:
                raise ValueError
            parts, copies = (
                tuple(int(part) for part in options.pop(name, "1").split(",")) for name in ("parts", "copies")
            )
            rounds, cut = int(options.pop("rounds", "1")), options.pop("cut", None)
            size = None if cut is None else int(cut)
            is_of_parts = len(copies) > 1
            if options or min(*parts, *copies, rounds, 1 if size is None else size) < 1:
                raise ValueError
            if is_of_parts and (len(copies) != len(parts) or rounds > 1):
                raise ValueError
            return cls(
                kind,
                int(words[0]),
                parts,
                1 if is_of_parts else copies[0],
                rounds,
                size,
                copies if is_of_parts else (),
            )
        except (ValueError, IndexError, TypeError):
            raise UsageError(f"rule {abbreviate(text)!r} is none, expected one of: {_FORMS}") from None

    @property
    def text(self) -> str:
        """The rule as `parse` reads it."""
        if self.kind != "concat":
            return self.kind
        words = [f"concat {self.axis}"]
        if self.parts != (1,):
            words.append(f"parts={','.join(map(str, self.parts))}")
        if self.part_copies:
            words.append(f"copies={','.join(map(str, self.part_copies))}")
        words += [f"{name}={n}" for name in ("copies", "rounds") if (n := getattr(self, name)) > 1]
        return " ".join(words if self.cut is None else [*words, f"cut={self.cut}"])

    def at(self, ndim: int) -> int:
        """Of `concat`, the axis counted from the first, in a tensor of `ndim` axes.

        Raises:
            UsageError: There is no such axis.
        """
        if not -ndim <= self.axis < ndim:
            raise UsageError(f"{self.text} of a tensor of {ndim} axes")
        return self.axis % ndim

    def distinct(self, count: int) -> list[list[int]]:
        """The numbers of ranks, of `count`, that hold each distinct part: copies are together.

        Raises:
            UsageError: The copies do not divide the ranks.
        """
        if self.kind in _WHOLE:
            return [list(range(count))]
        if self.kind in _TERMS:
            return [[i] for i in range(count)]
        copied = self.copies * self.rounds
        if count % copied:
            raise UsageError(f"{self.text} of {count} ranks, which {copied} does not divide")
        held = count // copied
        return [
            [
                r * held * self.copies + p * self.copies + c
                for r in range(self.rounds)
                for c in range(self.copies)
            ]
            for p in range(held)
        ]

    def shape(self, shapes: Sequence[Shape]) -> Shape:
        """The shape of the whole tensor.

        Args:
            shapes: Those of the ranks' tensors, in their order.

        Raises:
            UsageError: They do not fit the rule.
        """
        first = shapes[0]
        if self.kind != "concat":
            self._require_alike(shapes)
            return first
        at = self.at(len(first))
        self._require_alike([shape[:at] + shape[at + 1 :] for shape in shapes], shapes)
        held = [shapes[members[0]] for members in self.distinct(len(shapes))]
        for shape in held:
            self._widths(shape[at])
        size = sum(shape[at] for shape in held)
        if self.part_copies:
            size = sum(self._part_sizes(len(held)))
        if self.cut is not None:
            if self.cut > size:
                raise UsageError(f"{self.text} of {size}, which is less")
            size = self.cut
        return (*first[:at], size, *first[at + 1 :])

    def merge(self, arrays: Sequence[Array], dtype: DType) -> Array:
        """Put tensors of stored elements together; of copies the first is taken.

        Sums are taken in float64 and rounded once.
        """
        if self.kind in _WHOLE:
            return arrays[0]
        if self.kind in _TERMS:
            return _reduced(self.kind, arrays, dtype)
        return self.join([arrays[members[0]] for members in self.distinct(len(arrays))])

    def join(self, held: Sequence[Array]) -> Array:
        """Join distinct parts along the axis."""
        at = self.at(held[0].ndim)
        pieces = [np.split(array, np.cumsum(self._widths(array.shape[at]))[:-1], at) for array in held]
        copies = self.part_copies or (1,) * len(pieces[0])
        parts = zip(zip(*pieces, strict=True), copies, strict=True)
        whole = np.concatenate([piece for part, each in parts for piece in part[::each]], at)
        return whole if self.cut is None else whole.take(np.arange(self.cut), at)

    def split(self, whole: Array, count: int) -> list[Array]:
        """The tensors of ranks that are a whole one together: what `merge` puts together, by rank.

        Args:
            whole: The whole tensor.
            count: How many ranks there are.

        Raises:
            UsageError: It is no `concat`, its size is cut, or the parts do not divide the axis.
        """
        if self.kind != "concat" or self.cut is not None:
            raise UsageError(
                f"{self.text}: nothing says what each rank holds of a tensor of {list(whole.shape)}"
            )
        members = self.distinct(count)
        at, held = self.at(whole.ndim), len(members)
        sizes = self._sizes_in_whole(whole.shape[at], held)
        copies = self.part_copies or (1,) * len(sizes)
        parts = np.split(whole, np.cumsum(sizes)[:-1], at)
        pieces = [np.split(part, held // each, at) for part, each in zip(parts, copies, strict=True)]
        tensors: list[Array] = [whole] * count
        for number, ranks in enumerate(members):
            own = [part[number // each] for part, each in zip(pieces, copies, strict=True)]
            for rank in ranks:
                tensors[rank] = np.concatenate(own, at)
        return tensors

    def unlike_copies(self, arrays: Sequence[Array]) -> tuple[int, int] | None:
        """Two ranks, by number, that should hold the same part and do not; None if all that should do.

        Args:
            arrays: The ranks' tensors, of a rule whose parts have copies of their own.
        """
        at = self.at(arrays[0].ndim)
        pieces = [np.split(array, np.cumsum(self._widths(array.shape[at]))[:-1], at) for array in arrays]
        for part, each in enumerate(self.part_copies):
            for rank, own in enumerate(pieces):
                first = rank - rank % each
                if own[part].tobytes() != pieces[first][part].tobytes():
                    return first, rank
        return None

    def _sizes_in_whole(self, size: int, held: int) -> list[int]:
        """The sizes of the parts of a whole tensor along the axis; `held` ranks have distinct ones."""
        if self.part_copies:
            sizes = self._part_sizes(held)
            if sum(sizes) != size:
                raise UsageError(f"{self.text} of {held} ranks gives {sum(sizes)}, and the axis has {size}")
            return sizes
        if size % held:
            raise UsageError(f"{self.text} of an axis of {size}, which {held} does not divide")
        return [held * width for width in self._widths(size // held)]

    def _widths(self, size: int) -> Sequence[int]:
        """The sizes of the parts of one rank's part."""
        if len(self.parts) > 1:
            if sum(self.parts) != size:
                raise UsageError(f"{self.text} of an axis of {size}, expected {sum(self.parts)}")
            return self.parts
        count = self.parts[0]
        if size % count:
            raise UsageError(f"{self.text} of an axis of {size}, which {count} does not divide")
        return (size // count,) * count

    def _part_sizes(self, held: int) -> list[int]:
        """The sizes of parts in the whole, of which each has copies of its own on ranks in succession."""
        for copies in self.part_copies:
            if held % copies:
                raise UsageError(f"{self.text} of {held} ranks, which {copies} does not divide")
        pairs = zip(self.parts, self.part_copies, strict=True)
        return [width * (held // copies) for width, copies in pairs]

    def _require_alike(self, looked_at: Sequence[Shape], shapes: Sequence[Shape] | None = None) -> None:
        if len(set(looked_at)) > 1:
            other = next(i for i, shape in enumerate(looked_at) if shape != looked_at[0])
            shapes = shapes or looked_at
            where = f" beside axis {self.axis}" if self.kind == "concat" else ""
            raise UsageError(f"{self.text}: shapes {list(shapes[0])} and {list(shapes[other])} differ{where}")


@dataclass(frozen=True, slots=True)
class MeshRule:
    """A rule for each axis of the mesh of ranks that hold a tensor.

    Attributes:
        rules: By mesh axis, the outermost first.
        axes: Names of the mesh axes.
        sizes: How many ranks each has; () for one axis of all ranks.
        ranks: The ranks of the mesh, the last axis varying fastest; () for all in order.
        shape: Shape of the whole tensor, if it was recorded.
    """

    rules: tuple[Rule, ...]
    axes: tuple[str, ...] = ("",)
    sizes: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    shape: Shape | None = field(default=None, compare=False)

    @classmethod
    def parse(cls, text: str, mesh: Mapping[str, Any] | None = None, shape: Shape | None = None) -> MeshRule:
        """Read the rules of all mesh axes.

        Args:
            text: A rule, or several, each with the name of its axis before it.
            mesh: `sizes` by the names of the axes, and `ranks`, as the run metadata have it; None for one
                axis of all ranks.
            shape: The shape of the whole tensor.

        Raises:
            UsageError: It is no rule, or the mesh contradicts it.

        Example:
            >>> MeshRule.parse("dp: replicated; tp: concat 2").text
            'dp: replicated; tp: concat 2'
        """
        matches = [_MESH_AXIS.fullmatch(part) for part in text.split(";")]
        rules = tuple(Rule.parse(match[2]) for match in matches if match)
        if len(rules) < len(matches) or not rules:
            raise UsageError(f"rule {abbreviate(text)!r} is none, expected one of: {_FORMS}")
        names = tuple(match[1] or "" for match in matches if match)
        if mesh is None:
            return cls(rules, names, shape=shape)
        sizes, ranks = mesh.get("sizes"), mesh.get("ranks")
        if not isinstance(sizes, Mapping) or not isinstance(ranks, list):
            raise UsageError(f"mesh {mesh!r} has no sizes or no ranks")
        if len(sizes) != len(rules) or math.prod(sizes.values()) != len(ranks) or len({*ranks}) != len(ranks):
            raise UsageError(f"mesh of sizes {dict(sizes)} and ranks {ranks} does not fit the rule {text!r}")
        return cls(rules, tuple(sizes), tuple(sizes.values()), tuple(ranks), shape)

    @property
    def text(self) -> str:
        """The rules as `parse` reads them."""
        if len(self.rules) == 1:
            return self.rules[0].text
        return "; ".join(f"{name}: {rule.text}" for name, rule in zip(self.axes, self.rules, strict=True))

    @property
    def mesh(self) -> dict[str, Any] | None:
        """The mesh as the run metadata have it; None for one axis of all ranks."""
        if not self.ranks:
            return None
        return {"sizes": dict(zip(self.axes, self.sizes, strict=True)), "ranks": list(self.ranks)}

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds all of the tensor."""
        return all(rule.kind in _WHOLE for rule in self.rules)

    def over(self, count: int) -> MeshRule:
        """The rule with its mesh, of `count` ranks if it has none."""
        return self if self.sizes else replace(self, sizes=(count,))

    def merged_shape(self, shapes: Sequence[Shape]) -> Shape:
        """The shape of the whole tensor of those of the mesh's ranks, in the mesh's order."""
        level: list[Shape] = list(shapes)
        for rule, size in self._inner_first(len(shapes)):
            level = [rule.shape(level[i : i + size]) for i in range(0, len(level), size)]
        return level[0]

    def merge(self, arrays: Sequence[Array], dtype: DType) -> Array:
        """Put the tensors of the mesh's ranks together, in the mesh's order."""
        level = list(arrays)
        for rule, size in self._inner_first(len(arrays)):
            level = [rule.merge(level[i : i + size], dtype) for i in range(0, len(level), size)]
        return level[0]

    def copies(self, count: int) -> list[list[int]]:
        """The numbers of the mesh's ranks, those together that are to hold the same."""
        groups: dict[tuple[int, ...], list[int]] = {}
        axes = [
            {member: i for i, members in enumerate(rule.distinct(size)) for member in members}
            for rule, size in reversed(self._inner_first(count))
        ]
        sizes = [len(parts) for parts in axes]
        for number, place in enumerate(np.ndindex(*sizes)):
            held = tuple(parts[i] for parts, i in zip(axes, place, strict=True))
            groups.setdefault(held, []).append(number)
        return list(groups.values())

    def owners(self, axis: int, ndim: int, sizes: Sequence[int]) -> Array:
        """Which of the mesh's ranks, by number, holds each index of an axis of the whole tensor.

        Args:
            axis: The axis, from 0.
            ndim: How many axes the tensor has.
            sizes: The size of that axis in the tensor of each rank of the mesh.

        Returns:
            One number for each index; of copies and of sums the first.
        """
        level = [np.full(size, i) for i, size in enumerate(sizes)]
        for rule, size in self._inner_first(len(sizes)):
            along = rule.kind == "concat" and rule.at(ndim) == axis
            runs = [level[i : i + size] for i in range(0, len(level), size)]
            flat = replace(rule, axis=0)
            level = [flat.join([r[m[0]] for m in rule.distinct(size)]) if along else r[0] for r in runs]
        return level[0]

    def concat_axes(self, ndim: int) -> list[int]:
        """The axes of the tensor that ranks hold parts of."""
        return sorted({rule.at(ndim) for rule in self.rules if rule.kind == "concat"})

    def _inner_first(self, count: int) -> list[tuple[Rule, int]]:
        sizes = self.sizes or (count,)
        if math.prod(sizes) != count or len(sizes) != len(self.rules):
            raise UsageError(f"{self.text}: a mesh of {math.prod(sizes)} ranks, and {count} have the tensor")
        return list(zip(reversed(self.rules), reversed(sizes), strict=True))


def _reduced(kind: str, arrays: Sequence[Array], dtype: DType) -> Array:
    values = [decode(array, dtype) for array in arrays]
    if kind in ("max", "min"):
        function = np.maximum if kind == "max" else np.minimum
        best = function.reduce(values)
        if dtype.is_native:
            return np.asarray(best, dtype.storage)
        return encode(best.astype(np.float64), dtype)
    if dtype.kind in ("float", "complex"):
        wide = np.complex128 if dtype.kind == "complex" else np.float64
        total = np.zeros(values[0].shape, wide)
        for value in values:
            total += value
        return encode(total / (len(values) if kind == "avg" else 1), dtype)
    total = np.sum(values, axis=0, dtype=np.int64)
    return np.asarray(total // len(values) if kind == "avg" else total).astype(dtype.storage)
