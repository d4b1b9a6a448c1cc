"""Candidate layouts: the steps that shapes allow from one side's tensors to the other's, the plainest first.

Candidates are few and each is written as the steps that a reader would write.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from tensorcap.alignment.layout.axis_patterns import Shape, groups_text
from tensorcap.alignment.layout.layout import Layout
from tensorcap_formats.errors import UsageError

Steps = tuple[str, ...]
LayoutChoice = tuple[Steps, tuple[int, ...]]  # and the order in which the reference's tensors come out

_AXES: Final = 6
_NAMES: Final = "abcdefgh"
_HEADS: Final = range(4, 513)  # elements of a head
_PARTS: Final = 4  # tensors whose order in a fused one is looked for


def plain(reference: Sequence[Shape], target: Sequence[Shape]) -> Steps | None:
    """Steps from one tensor to another that move no element; None if there are none."""
    if len(reference) != 1 or len(target) != 1:
        return None
    layouts = rearranged(target[0], reference[0], may_permute=False)
    return next((steps for steps in layouts if not Layout.parse(steps).moves), None)


def only_order(reference: Shape, target: Shape) -> Steps | None:
    """Steps that put the axes of a tensor in another order, if one order alone fits; else None."""
    orders = [*_permuted(target, reference)] if max(len(reference), len(target)) <= _AXES else []
    return orders[0] if len(orders) == 1 else None


def candidates(reference: Sequence[Shape], target: Sequence[Shape]) -> Iterator[LayoutChoice]:
    """Steps that these shapes allow, the plainest first, with the order in which the reference's come out."""
    if len(reference) == len(target) == 1:
        yield from ((steps, (0,)) for steps in rearranged(target[0], reference[0]))
    elif len(target) == 1:
        yield from _split(reference, target[0])
    elif len(reference) == 1:
        yield from _joined(reference[0], target)


def reordered(reference: Shape, target: Shape) -> Iterator[LayoutChoice]:
    """Steps that change the order of elements along an axis, besides what `candidates` gives."""
    for before in rearranged(target, reference, may_permute=False):
        yield from (((*before, *steps), (0,)) for steps in _reordered(reference))


def rearranged(before: Shape, after: Shape, *, may_permute: bool = True) -> Iterator[Steps]:
    """Steps that only rearrange axes."""
    if before == after:
        yield ()
    if max(len(before), len(after)) > _AXES or math.prod(before) != math.prod(after):
        return
    core, wanted = _core(before), _core(after)
    if before != after and core == wanted:
        yield _ones(before, after)
    if may_permute:
        yield from _permuted(before, after)
    if core != wanted:
        yield from _regrouped(before, after)


def _ones(before: Shape, after: Shape) -> Steps:
    """Steps that leave out and put in axes of one element."""
    steps: list[str] = []
    now = list(before)
    while len(now) > len(after) and 1 in now:
        at = next(
            (i for i in range(len(now)) if now[i] == 1 and (i >= len(after) or after[i] != 1)), now.index(1)
        )
        del now[at]
        steps.append(f"squeeze {at}")
    while len(now) < len(after):
        at = next(
            (i for i in range(len(after)) if after[i] == 1 and (i >= len(now) or now[i] != 1)), len(now)
        )
        now.insert(at, 1)
        steps.append(f"unsqueeze {at}")
    if tuple(now) != after:
        return (_pattern(_single(before), before, after),)
    return tuple(steps)


def _permuted(before: Shape, after: Shape) -> Iterator[Steps]:
    axes = [i for i, size in enumerate(before) if size != 1]
    if len(axes) != len(_core(after)):
        return
    for order in itertools.permutations(axes):
        if list(order) == axes or [before[i] for i in order] != _core(after):
            continue
        swapped = [k for k, axis in enumerate(order) if axis != axes[k]]
        if len(before) == len(after) == len(axes) and len(swapped) == 2:
            yield (f"transpose {swapped[0]} {swapped[1]}",)
        else:
            yield (_pattern([[i] for i in order], before, after),)


def _pattern(groups: Iterable[Sequence[int]], before: Shape, after: Shape) -> str:
    """The rearrangement whose groups of axes, in this order, are the axes after."""
    return f'rearrange "{_axes_text(_single(before), before)} -> {_axes_text(groups, after)}"'


def _single(shape: Shape) -> list[list[int]]:
    """Each axis as a group by itself, save those of one element."""
    return [[i] for i, size in enumerate(shape) if size != 1]


def _axes_text(groups: Iterable[Sequence[int]], shape: Shape) -> str:
    """One side of a pattern: the names in each group of axes, and `1` for axes of one element."""
    each = iter(groups)
    return groups_text(tuple(() if size == 1 else tuple(_NAMES[i] for i in next(each)) for size in shape))


def _regrouped(before: Shape, after: Shape) -> Iterator[Steps]:
    """Steps that make one axis of several or several of one, with any order of the finer side's axes."""
    fine, coarse = (before, after) if len(_core(before)) >= len(_core(after)) else (after, before)
    axes = [i for i, size in enumerate(fine) if size != 1]
    for order in sorted(itertools.permutations(axes), key=lambda o: (list(o) != axes, o)):
        groups = _grouped(order, fine, _core(coarse))
        if groups is None:
            continue
        if fine is before:
            yield (_pattern(groups, before, after),)
        else:
            coarse_text, fine_text = _axes_text(groups, coarse), _axes_text(_single(fine), fine)
            sizes = "".join(f" {_NAMES[i]}={fine[i]}" for g in groups if len(g) > 1 for i in g[:-1])
            yield (f'rearrange "{coarse_text} -> {fine_text}"{sizes}',)


def _core(shape: Shape) -> list[int]:
    return [size for size in shape if size != 1]


def _grouped(order: Sequence[int], fine: Shape, coarse: Sequence[int]) -> list[list[int]] | None:
    groups: list[list[int]] = []
    rest = list(order)
    for size in coarse:
        group: list[int] = []
        while rest and math.prod(fine[i] for i in group) < size:
            group.append(rest.pop(0))
        if math.prod(fine[i] for i in group) != size:
            return None
        groups.append(group)
    return None if rest else groups


def _reordered(shape: Shape) -> Iterator[Steps]:
    """Steps that change the order of elements along an axis: rotary halves, parts that are interleaved."""
    for axis in dict.fromkeys((len(shape) - 1, 0)):
        for head in _divisors(shape[axis]) if shape else ():
            if head in _HEADS and head % 2 == 0:
                place = "" if axis == len(shape) - 1 else f" axis={axis}"
                yield (f"rope_halves {head}{place}",)
                yield (f"rope_interleaved {head}{place}",)
        for outer in _divisors(shape[axis]) if shape else ():
            for inner in _divisors(shape[axis] // outer):
                if outer > 1 and inner > 1:
                    yield (_exchanged(axis, len(shape), outer, inner),)


def _exchanged(axis: int, ndim: int, outer: int, inner: int) -> str:
    """The step that exchanges the two outer factors of an axis: parts by heads, heads by parts."""
    before, after = (_with_axis(text, axis, ndim) for text in ("(g p x)", "(p g x)"))
    return f'rearrange "{before} -> {after}" g={outer} p={inner}'


def _with_axis(text: str, axis: int, ndim: int) -> str:
    """Names of all axes, one of them replaced."""
    return " ".join(text if i == axis else _NAMES[i] for i in range(ndim))


def _split(reference: Sequence[Shape], target: Shape) -> Iterator[LayoutChoice]:
    """Steps from one tensor to several that are stacked or fused in it."""
    count = len(reference)
    plain = tuple(range(count))
    orders = list(itertools.permutations(plain)) if count <= _PARTS else [plain]
    if len(set(reference)) == 1:
        for axis, size in enumerate(target):
            if size == count:
                inner = target[:axis] + target[axis + 1 :]
                for steps in rearranged(inner, reference[0]):
                    yield from (((f"unstack {axis}", *steps), order) for order in orders)
    for axis, sizes in _joint_axes(reference):
        whole = _resized(reference[0], axis, sum(sizes))
        for before in rearranged(target, whole, may_permute=len(target) == 2):
            for groups in _divisors(math.gcd(*sizes)):
                for order in orders:
                    yield (*before, *_cut(axis, len(whole), [sizes[i] for i in order], groups)), order


def _joint_axes(shapes: Sequence[Shape]) -> Iterator[tuple[int, list[int]]]:
    """The axes along which tensors may lie one after the other, the last first, and their sizes there."""
    if len({len(shape) for shape in shapes}) > 1:
        return
    for axis in reversed(range(len(shapes[0]))):
        if len({shape[:axis] + shape[axis + 1 :] for shape in shapes}) == 1:
            yield axis, [shape[axis] for shape in shapes]


def _resized(shape: Shape, axis: int, size: int) -> Shape:
    return (*shape[:axis], size, *shape[axis + 1 :])


def _cut(axis: int, ndim: int, sizes: Sequence[int], groups: int) -> Steps:
    """Steps that split an axis into parts of these sizes, which may be interleaved in groups."""
    if groups == 1:
        return (f"split {axis} {_listed(sizes)}",)
    first, last = _interleaved(axis, ndim, groups)
    return first, f"split {axis + 1} {_listed([size // groups for size in sizes])}", last


def _listed(sizes: Sequence[int]) -> str:
    return str(len(sizes)) if len(set(sizes)) == 1 else ",".join(map(str, sizes))


def _joined(reference: Shape, target: Sequence[Shape]) -> Iterator[LayoutChoice]:
    """Steps from several tensors to one: shards, parts, layers, or sums."""
    count = len(target)
    if len(set(target)) == 1:
        yield from ((("sum", *steps), (0,)) for steps in rearranged(target[0], reference))
    for axis, sizes in _joint_axes(target):
        for copies in (c for c in _divisors(count) if c < count):
            kept = sizes[::copies]
            whole = _resized(target[0], axis, sum(kept))
            first = (f"dereplicate {copies}",) if copies > 1 else ()
            for after in rearranged(whole, reference, may_permute=len(whole) == 2):
                yield (*first, f"concat {axis}", *after), (0,)
                for groups in [g for g in _divisors(math.gcd(*kept)) if g > 1]:
                    yield (*first, *_merged(axis, len(whole), groups), *after), (0,)
    if len(set(target)) == 1:
        for axis in range(len(target[0]) + 1):
            stacked = (*target[0][:axis], count, *target[0][axis:])
            if stacked == reference:
                yield (f"stack {axis}",), (0,)


def _merged(axis: int, ndim: int, groups: int) -> Steps:
    """Steps that concatenate tensors in interleaved groups."""
    first, last = _interleaved(axis, ndim, groups)
    return first, f"concat {axis + 1}", last


def _interleaved(axis: int, ndim: int, groups: int) -> tuple[str, str]:
    """The steps that split an axis into groups, and merge it again."""
    together, apart = (_with_axis(text, axis, ndim) for text in ("(g x)", "g x"))
    return f'rearrange "{together} -> {apart}" g={groups}', f'rearrange "{apart} -> {together}"'


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)}) if number else [1]


def fits(candidate: LayoutChoice, reference: Sequence[Shape], target: Sequence[Shape]) -> bool:
    """Whether a candidate makes tensors of the reference's shapes."""
    steps, order = candidate
    try:
        shapes = Layout.parse(steps).shapes(target)
    except UsageError:
        return False
    return shapes == tuple(reference[i] for i in order)


def fits_shapes(steps: Steps, reference: Shape, target: Shape) -> bool:
    """Whether steps make a tensor of one shape of one of another."""
    return fits((steps, (0,)), [reference], [target])
