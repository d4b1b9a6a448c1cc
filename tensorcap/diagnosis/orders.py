"""Propose another order of the same values: axes swapped, slices moved, layouts of heads and of rotation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from tensorcap.diagnosis.context import PairContext
from tensorcap.diagnosis.hypothesis import Hypothesis
from tensorcap.diagnosis.values import Values, evenly_spaced, listed
from tensorcap_formats.float_formats import rounded

_WIDEST: Final = 4096  # slices of an axis whose order is looked for; the cost grows with its square
_SAMPLE: Final = 256  # elements of a slice by which it is recognised
_MOST_AXES: Final = 5  # all orders of which are tried
_MOST_STARTS: Final = 65  # offsets at which a shorter axis is looked for in a longer one
_SHOWN: Final = 16  # indices of an order that its text has
_MOST_SOURCES: Final = 64  # and that its facts have
_SAME_DISTANCE: Final = 1e-9  # two slices of distances that near, relative to their size, are equally near
_REPEATED_HINT: Final = "An index is cut off, or points to the same place several times."
_ONE_SEQUENCE_HINT: Final = (
    "What differs from sequence to sequence, as positions behind padding do, is not looked at."
)
_LEAST_DISTINCT: Final = 0.5  # share of the slices that have to be taken, if some are taken repeatedly
_LEAST_ELEMENTS: Final = 16  # distinct ones, of an order that may be any
_MOST_ELEMENTS: Final = 1 << 20
_MOST_STRIDES: Final = 6
_HINTS: Final = {
    "token": "Tokens are shifted: a begin token on one side, another padding side, or positions off by some.",
    "channel": "Channels are in another order: the layout of fused or rotated weights.",
    "head": "Heads are in another order: how they are split, repeated or gathered.",
    "batch": "Sequences are in another order.",
    "row": "Rows of a weight are in another order: heads, the layout of rotary embeddings, fused parts.",
    "column": "Columns of a weight are in another order: its inputs lie otherwise.",
}
_HEAD_SPLIT_HINT: Final = (
    "Heads are split as (head_dim, heads) on one side and as (heads, head_dim) on the other."
)


def propose_orders(context: PairContext) -> Iterator[Hypothesis]:
    """Propose orders of axes, of slices along each axis, layouts of channels, and signs of channels."""
    r, t = context.r, context.t
    if min(r.size, t.size) < 4:
        return
    if not context.is_same_shape:
        yield from _propose_other_shapes(context)
        return
    yield from _propose_swaps(context)
    yield from _propose_head_layouts(context)
    for axis in range(r.ndim):
        if r.shape[axis] > 1:
            yield from _propose_moves(context, axis)
    yield from _propose_signs(context)
    yield from _propose_reversed_halves(context)
    if r.ndim >= 3 and r.shape[0] > 1:
        yield from _propose_shifts_by_sequence(context)
    yield from _propose_any_order(context)


def _propose_reversed_halves(context: PairContext) -> Iterator[Hypothesis]:
    """Propose that half of the channels have their tokens from last to first, as a direction makes them."""
    r, width = context.r, context.r.shape[-1]
    if width % 2 or r.dtype.kind != "f":
        return
    for axis in (axis for axis in range(r.ndim - 1) if r.shape[axis] > 2):
        for name, half in (("first", slice(0, width // 2)), ("second", slice(width // 2, width))):
            predicted = r.copy()
            predicted[..., half] = np.flip(r[..., half], axis)
            yield context.propose(
                "half-order",
                f"the {name} half of the target's channels has axis {axis} from the last to the first",
                predicted,
                log_alternatives=math.log(2 * (r.ndim - 1)),
                hint="What one direction of a recurrent layer makes is not turned back.",
                facts={"axis": axis, "half": name},
            )


def _propose_any_order(context: PairContext) -> Iterator[Hypothesis]:
    """Propose the same elements in another order, whatever it is; it is told by strides if it has these.

    Elements of both sides correspond by their ranks. As one of n! orders it counts far less than any order
    of slices. Elements in low precision have many neighbours: there all have to be equal.
    """
    r, t = context.r.reshape(-1), context.t.reshape(-1)
    if not _LEAST_ELEMENTS <= r.size <= _MOST_ELEMENTS or context.reference.dtype.kind != "float":
        return
    ours, theirs = np.argsort(r, kind="stable"), np.argsort(t, kind="stable")
    r_sorted, t_sorted = r[ours], t[theirs]
    if len(np.unique(r_sorted)) < _LEAST_ELEMENTS:
        return
    if context.is_narrow:
        r_sorted = rounded(r_sorted, context.target.dtype.name)
    allowed = 0.0 if context.is_narrow else context.tolerance()
    if np.abs(r_sorted - t_sorted).max() > allowed * max(abs(t_sorted[0]), abs(t_sorted[-1])):
        return
    predicted, sources = np.empty_like(t), np.empty(t.size, int)
    predicted[theirs], sources[theirs] = r_sorted, ours
    strides = _read_strides(sources)
    how = ""
    if not strides and any(not context.is_erring(axis).all() for axis in range(context.t.ndim)):
        return  # where the error is says more
    if strides:
        sizes, steps = zip(*strides, strict=True)
        how = f", as if read by axes of {listed(sizes, 8)} elements that lie {listed(steps, 8)} apart"
    yield context.propose(
        "element-order",
        f"the target has the elements of the reference in another order{how}",
        predicted.reshape(context.t.shape),
        log_alternatives=math.lgamma(r.size + 1),
        hint="Axes are exchanged before the elements are laid out anew, or an index has another order.",
        facts={"strides": [[int(size), int(step)] for size, step in strides]},
    )


def _read_strides(sources: Values) -> list[tuple[int, int]]:
    """Read an order as that of a strided tensor: size and stride of each axis, the outermost first.

    Returns:
        Nothing if it is not the order of a tensor of few axes.
    """
    strides: list[tuple[int, int]] = []
    known = 1
    while known < len(sources):
        if len(strides) == _MOST_STRIDES or len(sources) % known:
            return []
        starts = sources[::known]
        step = int(starts[1] - starts[0])
        steps = np.flatnonzero(np.diff(starts) != step)
        size = int(steps[0]) + 1 if steps.size else len(starts)
        strides.insert(0, (size, step))
        known *= size
    axes = [np.arange(size) * step for size, step in strides]
    laid_out = sources[0] + sum(np.meshgrid(*axes, indexing="ij")) if axes else sources
    return strides if np.array_equal(np.reshape(laid_out, -1), sources) else []


def _propose_swaps(context: PairContext) -> Iterator[Hypothesis]:
    r = context.r
    hint = "A tensor or a square weight is transposed."
    for one, other in itertools.combinations(range(r.ndim), 2):
        if r.shape[one] == r.shape[other] > 1:
            text = f"the target is the reference with axes {one} and {other} swapped"
            facts = {"axes": [one, other]}
            yield context.propose("transposed", text, np.swapaxes(r, one, other), hint=hint, facts=facts)


def _propose_other_shapes(context: PairContext) -> Iterator[Hypothesis]:
    """Propose, of two shapes, a reshape, another order of axes, or an axis that is longer on one side.

    1. Of as many elements: the same order, or the axes of the reference in any order.
    2. Of shapes that differ in one axis: the shorter side is part of the longer one, from any start.
    """
    r, t = context.r, context.t
    if r.size == t.size:
        yield from _propose_reshapes(context)
        return
    differing = [axis for axis in range(r.ndim) if r.ndim == t.ndim and r.shape[axis] != t.shape[axis]]
    if len(differing) != 1:
        return
    (axis,) = differing
    name = context.axis_name(axis)
    longer, shorter = (r, t) if r.shape[axis] > t.shape[axis] else (t, r)
    extra = longer.shape[axis] - shorter.shape[axis]
    side = "reference" if longer is r else "target"
    more = f"{extra} {_plural(name, extra)} more"
    where = name if name.startswith("axis ") else f"its {_plural(name)}"
    all_hint = f"The {side} has all tokens, and the other side the last one alone."
    for start in dict.fromkeys((*range(min(extra + 1, _MOST_STARTS)), extra)):
        yield Hypothesis(
            "token-shift" if name == "token" else "padded",
            (f"the {side} has {more}: " if name == "token" else f"the {side} is padded: it has {more}, ")
            + f"{start} before and {extra - start} behind those that both have",
            shorter,
            _slices(longer, axis, start, start + shorter.shape[axis]),
            None,
            log_alternatives=math.log(extra + 1),
            hint=f"The {side} is padded along {where}."
            if name != "token"
            else all_hint
            if shorter.shape[axis] == 1 and start == extra
            else _HINTS["token"],
            facts={"axis": axis, "before": start, "behind": extra - start, "longer": side},
        )


def _propose_reshapes(context: PairContext) -> Iterator[Hypothesis]:
    """Propose the same values in another shape, and with their axes in any other order."""
    r, t = context.r, context.t
    text = f"the target holds the same values in the same order in another shape, {t.shape} for {r.shape}"
    yield context.propose("reshaped", text, r.reshape(t.shape), hint="Compare with a step that reshapes.")
    if not 2 <= r.ndim <= _MOST_AXES:
        return
    for order in itertools.permutations(range(r.ndim)):
        moved = np.transpose(r, order)
        if order != tuple(range(r.ndim)) and (moved.shape == t.shape or moved.ndim != t.ndim):
            yield context.propose(
                "transposed",
                f"the target is the reference with its axes in the order {order}",
                moved.reshape(t.shape),
                log_alternatives=math.log(math.factorial(r.ndim)),
                hint="Compare with a step that permutes axes, or look for a transpose on one side.",
                facts={"axes": list(order)},
            )


def _propose_moves(context: PairContext, axis: int) -> Iterator[Hypothesis]:
    """Propose that slices along an axis lie elsewhere along it.

    1. For each slice of the target the nearest one of the reference is found.
    2. If they are in another order, each once, that is proposed, with its name; if some are taken repeatedly,
       that is proposed unless most are.
    3. So are the two commonest shifts.
    4. Shifts by one are proposed in any case: noise may hide them.
    """
    r, t = context.r, context.t
    size, name = r.shape[axis], context.axis_name(axis)
    if size <= _WIDEST and r.size // size >= 2:
        sources = _find_nearest(np.moveaxis(r, axis, 0), np.moveaxis(t, axis, 0))
        if not np.array_equal(sources, np.arange(size)):
            distinct = len(np.unique(sources))
            if distinct == size:
                yield _propose_order(context, axis, sources)
            elif distinct >= _LEAST_DISTINCT * size and not _is_cut_shift(sources):
                yield context.propose(
                    f"{name.replace(' ', '-')}-order",
                    f"{_plural(name)} of the target are those of the reference, of which some are taken "
                    f"repeatedly: {listed(sources, _SHOWN)}",
                    np.take(r, sources, axis),
                    log_alternatives=size * math.log(size),
                    hint=_ONE_SEQUENCE_HINT if name == "batch" else _REPEATED_HINT,
                    facts={"axis": axis, "sources": sources[:_MOST_SOURCES].tolist()},
                )
            elif _is_cut_shift(sources):
                yield _propose_cut_shift(context, axis, sources)
            shifts, counts = np.unique(sources - np.arange(size), return_counts=True)
            for shift in shifts[np.argsort(-counts, kind="stable")][:2].tolist():
                if 0 < abs(shift) <= size / 2:
                    yield _propose_shift(context, axis, shift)
    for shift in (-1, 1):
        if size > 2:
            yield _propose_shift(context, axis, shift)


def _is_cut_shift(sources: Values) -> bool:
    """Whether slices are moved by a number, and the one at the end stands in for those that would come in."""
    size = len(sources)
    by = int(sources[size // 2]) - size // 2
    return by != 0 and np.array_equal(sources, np.clip(np.arange(size) + by, 0, size - 1))


def _propose_cut_shift(context: PairContext, axis: int, sources: Values) -> Hypothesis:
    """Propose that slices of an axis are moved, and the last of them is repeated."""
    name, size = context.axis_name(axis), len(sources)
    by = int(sources[size // 2]) - size // 2
    where, end = ("behind", "last") if by > 0 else ("before", "first")
    return context.propose(
        f"{name.replace(' ', '-')}-shift",
        f"each {name} of the target is that of the reference {abs(by)} {where} it, the {end} one repeated",
        np.take(context.r, sources, axis),
        log_alternatives=math.log(2 * size),
        hint="A window, a state or a cache is moved once more, or not at all.",
        facts={"axis": axis, "shift": by},
    )


def _propose_order(context: PairContext, axis: int, sources: Values) -> Hypothesis:
    """Propose that the slices of an axis are in another order, each once."""
    name = context.axis_name(axis)
    has_heads = name in ("channel", "row", "column")
    pattern, log_alternatives = _name_order(sources, context.head_dim if has_heads else None)
    kind, hint = f"{name.replace(' ', '-')}-order", _HINTS.get(name, "")
    if pattern.startswith("a grid"):
        kind, hint = (
            f"{name.replace(' ', '-')}-shift",
            "The direction of a roll, or what it is by, is another one.",
        )
    if pattern.startswith(("halves", "pairs")):
        kind = "rotary-layout"
        hint = "The layout of rotary embeddings: halves on one side, interleaved pairs on the other."
    return context.propose(
        kind,
        f"{_plural(name)} of the target are those of the reference in another order: {pattern}",
        np.take(context.r, sources, axis),
        log_alternatives=log_alternatives,
        hint=hint,
        facts={"axis": axis, "sources": sources[:_MOST_SOURCES].tolist()},
    )


def _propose_shift(context: PairContext, axis: int, shift: int) -> Hypothesis:
    """Propose that the target at i is the reference at i + shift; the ends that fall out are left out."""
    r, t = context.r, context.t
    size, name = r.shape[axis], context.axis_name(axis)
    start, stop = max(0, -shift), min(size, size - shift)
    where = "behind" if shift > 0 else "before"
    return Hypothesis(
        f"{name.replace(' ', '-')}-shift",
        f"each {name} of the target is that of the reference {abs(shift)} {where} it",
        _slices(t, axis, start, stop),
        _slices(r, axis, start + shift, stop + shift),
        _slices(r, axis, start, stop),
        log_alternatives=math.log(2 * size),
        hint=_HINTS.get(name, ""),
        facts={"axis": axis, "shift": shift},
    )


def _propose_shifts_by_sequence(context: PairContext) -> Iterator[Hypothesis]:
    """Propose that each sequence of a batch is rolled by a number of its own: padding on the other side."""
    r, t = context.r, context.t
    axis = context.find_axis("token", start=1)
    if axis is None or not 1 < r.shape[axis] <= _WIDEST:
        return
    size = r.shape[axis]
    shifts, rolled = [], np.empty_like(r)
    for row in range(r.shape[0]):
        moved = _find_nearest(np.moveaxis(r[row], axis - 1, 0), np.moveaxis(t[row], axis - 1, 0))
        values, counts = np.unique((moved - np.arange(size)) % size, return_counts=True)
        shifts.append(int(values[counts.argmax()]))
        rolled[row] = np.roll(r[row], -shifts[-1], axis - 1)
    if len(set(shifts)) > 1:
        yield context.propose(
            "padding-side",
            f"each sequence is rolled by a number of tokens of its own: {shifts[:8]}",
            rolled,
            log_alternatives=len(shifts) * math.log(size),
            hint="Padding is on the left on one side and on the right on the other.",
            facts={"shifts": shifts},
        )


def _propose_head_layouts(context: PairContext) -> Iterator[Hypothesis]:
    """Propose another nesting of channels: heads, parts of a head, and tokens."""
    r = context.r
    width, head_dim = r.shape[-1], context.head_dim
    counts = {n for n in (context.heads, context.kv_heads, 3, head_dim) if n and 1 < n < width}
    log_alternatives = math.log(2 * len(counts) + 4)
    for count in sorted(counts):
        if width % count:
            continue
        for one, other in ((count, width // count), (width // count, count)):
            split = r.reshape(*r.shape[:-1], one, other)
            yield context.propose(
                "head-nesting",
                f"channels are nested otherwise: {count} groups of {width // count} side by side, or "
                "interleaved",
                np.swapaxes(split, -1, -2).reshape(r.shape),
                log_alternatives=log_alternatives,
                hint=_HEAD_SPLIT_HINT,
                facts={"groups": one},
            )
    if r.ndim == 3 and head_dim and width % head_dim == 0 and width > head_dim and r.shape[1] > 1:
        split = r.reshape(r.shape[0], r.shape[1], width // head_dim, head_dim)
        yield context.propose(
            "heads-not-moved-back",
            "heads were not moved back behind tokens before they were joined",
            split.transpose(0, 2, 1, 3).reshape(r.shape),
            log_alternatives=log_alternatives,
            hint="A transpose of heads and tokens is missing before a reshape.",
        )


def _propose_signs(context: PairContext) -> Iterator[Hypothesis]:
    """Propose that the sign of some channels is turned; the text names halves and alternate channels."""
    r, t = context.r, context.t
    turned = (r * t).sum(axis=tuple(range(r.ndim - 1))) < 0
    count, width = int(turned.sum()), r.shape[-1] if r.ndim else 1
    if not 0 < count < width:
        return
    each = context.head_dim or width
    pattern, log_alternatives = f"{count} of {width} channels", width * math.log(2)
    hint = "A sign is turned in some channels."
    for size in dict.fromkeys((each, width)):
        if size % 2 or width % size:
            continue
        within = turned.reshape(-1, size)
        layouts = {"first half": within[:, : size // 2], "second half": within[:, size // 2 :]}
        layouts |= {"even channels": within[:, ::2], "odd channels": within[:, 1::2]}
        for name, part in layouts.items():
            if part.all() and count == part.size:
                pattern, log_alternatives = f"the {name} of every {size} channels", math.log(8)
                hint = "The sign within the rotation of halves (rotate_half), or that of the sine, is turned."
                break
    yield context.propose(
        "channel-signs",
        f"the sign is turned in {pattern}",
        np.where(turned, -r, r),
        log_alternatives=log_alternatives,
        hint=hint,
        facts={"channels": np.flatnonzero(turned)[:_MOST_SOURCES].tolist()},
    )


def _find_nearest(r: Values, t: Values) -> Values:
    """Find, for each slice of `t` along the first axis, the nearest slice of `r`.

    Of slices of `r` that are equal each is taken once as long as there are some: among repeated heads an
    order is one all the same.
    """
    size = len(r)
    ours, theirs = r.reshape(size, -1), t.reshape(size, -1)
    if ours.shape[1] > _SAMPLE:
        picked = evenly_spaced(ours.shape[1], _SAMPLE)
        ours, theirs = ours[:, picked], theirs[:, picked]
    squares = (ours * ours).sum(axis=1)
    scale = float(squares.mean()) or 1.0
    distance = (squares[None, :] - 2 * theirs @ ours.T) / scale
    near = distance.argmin(axis=1)
    # If the slice at the same place is as near, as among equal slices, nothing has moved.
    same = np.arange(size)
    stays = distance[same, same] <= distance[same, near] + _SAME_DISTANCE
    return _take_equal_ones_in_turn(ours, np.where(stays, same, near))


def _take_equal_ones_in_turn(slices: Values, sources: Values) -> Values:
    """Replace sources that occur repeatedly by equal slices that do not occur, as far as there are some."""
    unused = np.setdiff1d(np.arange(len(slices)), sources)
    if not len(unused):
        return sources
    same, turned = np.arange(len(slices)), sources.copy()
    by_value: dict[bytes, list[int]] = {}
    for index in unused.tolist():
        by_value.setdefault(slices[index].tobytes(), []).append(index)
    seen = set(sources[sources == same].tolist())
    for at in np.flatnonzero(sources != same).tolist():
        source = int(sources[at])
        others = by_value.get(slices[source].tobytes())
        if source in seen and others:
            turned[at] = others.pop(0)
        seen.add(source)
    return turned


def _name_order(sources: Values, head_dim: int | None) -> tuple[str, float]:
    """Name an order, and count the orders of that name.

    1. Reversed, or rolled by a number.
    2. Of rows and columns of a grid that are both rolled.
    3. Halves put alternately or the other way round, within heads or the whole.
    4. Blocks in another order, the largest blocks first.
    5. Any other order is the list of its indices.

    Returns:
        The name, and the natural logarithm of the count.
    """
    size = len(sources)
    same = np.arange(size)
    if np.array_equal(sources, same[::-1]):
        return "reversed", math.log(2)
    rolls = (sources - same) % size
    if (rolls == rolls[0]).all():
        by = int(-rolls[0] % size)
        return f"rolled by {by if by <= size / 2 else by - size}", math.log(size)
    for columns in (count for count in range(2, size // 2 + 1) if size % count == 0):
        grid = np.stack(np.divmod(sources, columns)).reshape(2, -1, columns)
        moved = grid - np.stack(np.divmod(same, columns)).reshape(grid.shape)
        rows = size // columns
        down, right = int(moved[0, 0, 0]) % rows, int(moved[1, 0, 0]) % columns
        if (moved[0] % rows == down).all() and (moved[1] % columns == right).all():
            shown = (
                f"a grid of {rows} rows and {columns} columns rolled by {-down % rows} and {-right % columns}"
            )
            return shown, 2 * math.log(size)
    for part in dict.fromkeys(p for p in (head_dim, size) if p and p % 2 == 0 and size % p == 0 and p > 2):
        split = same.reshape(-1, 2, part // 2)
        if np.array_equal(sources, split.transpose(0, 2, 1).reshape(-1)):
            return f"pairs where the reference has halves, in each {part}", math.log(8)
        split = same.reshape(-1, part // 2, 2)
        if np.array_equal(sources, split.transpose(0, 2, 1).reshape(-1)):
            return f"halves where the reference has pairs, in each {part}", math.log(8)
    divisors = (part for part in range(size // 2, 1, -1) if size % part == 0)
    for part in dict.fromkeys((head_dim or 0, *divisors)):
        if not 1 < part < size or size % part:
            continue
        blocks = sources.reshape(-1, part)
        if (blocks == blocks[:, :1] + np.arange(part)).all() and (blocks[:, 0] % part == 0).all():
            order = blocks[:, 0] // part
            count = len(order) * math.log(len(order)) + math.log(size)
            return f"blocks of {part} in the order {listed(order, _SHOWN)}", count
    return listed(sources, _SHOWN), size * math.log(size)


def _slices(values: Values, axis: int, start: int, stop: int) -> Values:
    return values[(slice(None),) * axis + (slice(start, stop),)]


def _plural(name: str, count: int = 2) -> str:
    """What an axis counts: `channels`, `indices of axis 1`; of one `channel`, `index of axis 1`."""
    if name.startswith("axis "):
        return f"{'index' if count == 1 else 'indices'} of {name}"
    one = "sequence" if name == "batch" else name
    return one if count == 1 else f"{one}s"
