"""Lay out the result of an operation otherwise: other axes first, other parts, other places, in its shape."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

Options = Iterator[tuple[str, Callable[[], Any]]]

_LAYOUTS: Final = frozenset(
    {
        *("view", "reshape", "flatten", "unflatten", "permute", "transpose", "swapaxes", "swapdims"),
        *("movedim", "moveaxis", "contiguous", "repeat_interleave", "repeat", "tile", "t"),
    }
)
_SPLITS: Final = frozenset({"chunk", "split", "unbind", "tensor_split"})
_JOINS: Final = frozenset({"cat", "concat"})
_MOST_AXES: Final = 4  # that are put into all orders; of more, two are exchanged or one is moved
_LARGEST_NUMBERED: Final = 1 << 18  # elements of a tensor whose layouts are told apart by numbering them
_MOST_PARTS: Final = 4  # of a split that are put into all orders
_INPUT_AXES: Final[Mapping[str, int]] = {  # the axis of the first operand that is summed over
    **{"linear": -1, "matmul": -1, "bmm": -1, "__matmul__": -1},
    **{"conv1d": 1, "conv2d": 1, "conv3d": 1},
}
_PARTS_OF_SUMS: Final = (2, 4, 8)
_MOST_ORDERS: Final = 64
_MOST_GROUPS: Final = 64


def layout_options(name: str, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> Options:
    """List other layouts of what an operation returns, in words, each made only when it is called.

    1. What is laid out or repeated anew has its axes in another order before, or its sizes behind.
    2. Parts of a split, of one size or of several, lie in another order, or are taken alternately; those that
       are joined are put alternately.
    3. A slice begins one index earlier or later, at the other end, or takes alternate ones or a block.
    4. A product with a weight sums over a part of its inputs, or has them in another order.

    Args:
        name: Of the operation, as torch calls it.
        func: The operation.
        args: What it was given.
        kwargs: Likewise.
        result: What it returned.
    """
    if not args:
        return
    x = args[0]
    if name in _JOINS and isinstance(result, torch.Tensor):
        yield from _join_options(x, kwargs.get("dim", args[1] if len(args) > 1 else 0))
    if not isinstance(x, torch.Tensor):
        return
    if name in _SPLITS:
        default = 0 if name == "unbind" else None
        axis = kwargs.get("dim", args[-1] if len(args) > (1 if name == "unbind" else 2) else default or 0)
        yield from _split_options(x, result, axis, is_removed=name == "unbind")
    if not isinstance(result, torch.Tensor) or not result.numel():
        return
    if name in _LAYOUTS and x.numel() == result.numel():
        yield from _rearranged(x, result)
    elif name in ("repeat_interleave", "repeat", "tile"):
        yield from _repetition_options(x, result)
    elif name == "__getitem__":
        yield from _slice_options(x, args[1], result)
    elif name in _INPUT_AXES and x.is_floating_point():
        yield from _transposed_operands(func, args, kwargs)
        weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
        if isinstance(weight, torch.Tensor) and x.ndim > 1:
            for words, change in _input_options(x, _INPUT_AXES[name] % x.ndim):
                yield words, lambda change=change: func(change(), *args[1:], **kwargs)  # type: ignore[misc]


def axis_orders(size: int) -> dict[str, torch.Tensor]:
    """Orders of an axis that is cut into equal blocks: taken in turn, reversed within each, blocks reversed.

    Args:
        size: Of the axis.

    Example:
        >>> axis_orders(4)["in turn from 2 blocks"].tolist()
        [0, 2, 1, 3]
    """
    same = torch.arange(size)
    orders: dict[str, torch.Tensor] = {"reversed": same.flip(0)}
    for count in (n for n in range(2, size // 2 + 1) if size % n == 0):
        blocks = same.view(count, -1)
        orders[f"in turn from {count} blocks"] = blocks.T.reshape(-1)
        orders[f"reversed within blocks of {size // count}"] = blocks.flip(1).reshape(-1)
        orders[f"with its {count} blocks reversed"] = blocks.flip(0).reshape(-1)
    return dict(itertools.islice(orders.items(), _MOST_ORDERS))


def _rearranged(x: torch.Tensor, result: torch.Tensor) -> Options:
    """Put axes of the operand into another order before its elements are read, or sizes of the result.

    Layouts that read the elements in the same order are told once.
    """
    numbers = torch.arange(x.numel()).view(x.shape) if x.numel() <= _LARGEST_NUMBERED else None
    seen: set[bytes] = set()
    if numbers is not None:
        seen.add(numbers.reshape(result.shape).numpy().tobytes())

    def is_new(make: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        if numbers is None:
            return True
        order = make(numbers).contiguous().numpy().tobytes()
        is_first = order not in seen
        seen.add(order)
        return is_first

    shape = tuple(result.shape)
    for order in _orders_of_axes(x.shape):

        def laid_out(y: torch.Tensor, order: Sequence[int] = order) -> torch.Tensor:
            return y.permute(*order).reshape(shape)

        if is_new(laid_out):
            words = f"axes {', '.join(map(str, order))} of its operand read in this order"
            yield words, lambda f=laid_out: f(x)  # type: ignore[misc]
    for order in _orders_of_axes(shape):

        def cut(y: torch.Tensor, order: Sequence[int] = order) -> torch.Tensor:
            back = sorted(range(len(order)), key=lambda at: order[at])
            return y.reshape([shape[axis] for axis in order]).permute(*back)

        if is_new(cut):
            yield f"axes {', '.join(map(str, order))} of its result cut in this order", lambda f=cut: f(x)  # type: ignore[misc]


def _orders_of_axes(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Orders of axes, those of one element in their places: all of few axes, else exchanges and moves."""
    long = [axis for axis, size in enumerate(shape) if size > 1]
    same = tuple(range(len(long)))
    orders: Iterator[tuple[int, ...]]
    if len(long) <= _MOST_AXES:
        orders = itertools.permutations(same)
    else:
        moved = []
        for start, end in itertools.permutations(same, 2):
            rest = [axis for axis in same if axis != start]
            moved.append((*rest[:end], start, *rest[end:]))
            exchanged = list(same)
            exchanged[start], exchanged[end] = end, start
            moved.append(tuple(exchanged))
        orders = iter(dict.fromkeys([same, *moved]))
    for order in orders:
        whole = list(range(len(shape)))
        for place, axis in zip(long, order, strict=True):
            whole[place] = long[axis]
        yield tuple(whole)


def _repetition_options(x: torch.Tensor, result: torch.Tensor) -> Options:
    """Repeat the whole in the place of each element, or the other way round, along one axis."""
    axes = [a for a in range(result.ndim) if x.ndim != result.ndim or x.shape[a] != result.shape[a]]
    if x.ndim != result.ndim or len(axes) != 1:
        return
    (axis,) = axes
    count = result.shape[axis] // max(x.shape[axis], 1)
    if count > 1 and x.shape[axis] > 1:
        yield "each repeated in its place", lambda: x.repeat_interleave(count, axis)
        yield (
            "the whole repeated",
            lambda: x.repeat([count if one == axis else 1 for one in range(x.ndim)]),
        )


def _split_options(x: torch.Tensor, parts: Any, axis: int, *, is_removed: bool) -> Options:
    """Take parts of a split in another order, or alternately if they have one size."""
    if not isinstance(parts, (tuple, list)) or not 1 < len(parts) <= _MOST_PARTS:
        return
    axis %= x.ndim
    sizes = [1 if is_removed else part.shape[axis] for part in parts]
    for order in itertools.permutations(range(len(parts))):
        moved = sum(at != part for at, part in enumerate(order))
        if moved > (2 if len(set(sizes)) == 1 else 0):  # two of one size are exchanged by name

            def taken(order: Sequence[int] = order) -> tuple[torch.Tensor, ...]:
                pieces = torch.split(x, [sizes[at] for at in order], axis)
                return tuple(pieces[order.index(at)] for at in range(len(order)))

            yield f"parts in the order {', '.join(map(str, order))}", taken
    if len(set(sizes)) == 1 and not is_removed:
        count = len(parts)

        def alternate() -> tuple[torch.Tensor, ...]:
            index = torch.arange(0, x.shape[axis], count, device=x.device)
            return tuple(x.index_select(axis, index + at) for at in range(count))

        yield "parts taken alternately", alternate

    for count in group_counts(math.gcd(*sizes)) if not is_removed else ():

        def grouped(count: int = count) -> tuple[torch.Tensor, ...]:
            groups = x.reshape(*x.shape[:axis], count, -1, *x.shape[axis + 1 :])
            pieces = torch.split(groups, [size // count for size in sizes], axis + 1)
            return tuple(piece.flatten(axis, axis + 1) for piece in pieces)

        yield f"parts lying in each of {count} groups", grouped
    if axis == x.ndim - 1 > 0 and x.shape[axis - 1] > 1 and not is_removed:
        count = x.shape[axis - 1]

        def whole() -> tuple[torch.Tensor, ...]:
            pieces = torch.split(x.flatten(-2), [size * count for size in sizes], -1)
            return tuple(piece.reshape(*piece.shape[:-1], count, -1) for piece in pieces)

        yield f"parts lying as wholes, and not in each of {count} groups", whole


def group_counts(size: int) -> Iterator[int]:
    """Counts of groups of more than one member that a size is divided into, from 2 on, not too large."""
    yield from (n for n in range(2, min(size // 2, _MOST_GROUPS) + 1) if size % n == 0)


def _transposed_operands(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Options:
    """Exchange two axes of one size of an operand of a product."""
    for at, operand in enumerate(args[:2]):
        if not isinstance(operand, torch.Tensor) or operand.ndim < 2:
            continue
        for one, other in itertools.combinations(range(operand.ndim), 2):
            if operand.shape[one] == operand.shape[other] > 1:

                def transposed(at: int = at, axes: tuple[int, int] = (one, other)) -> torch.Tensor:
                    changed = args[at].transpose(*axes)
                    return func(*args[:at], changed, *args[at + 1 :], **kwargs)  # type: ignore[no-any-return]

                yield f"axes {one} and {other} of operand {at + 1} exchanged", transposed


def _join_options(parts: Any, axis: int) -> Options:
    if not isinstance(parts, (tuple, list)) or not 1 < len(parts) <= _MOST_PARTS:
        return
    if not all(isinstance(part, torch.Tensor) for part in parts):
        return
    if len({tuple(part.shape) for part in parts}) == 1 and parts[0].shape[axis] > 1:
        at = axis % parts[0].ndim
        yield "parts put alternately", lambda: torch.stack(list(parts), at + 1).flatten(at, at + 1)


def _slice_options(x: torch.Tensor, index: Any, result: torch.Tensor) -> Options:
    """Take as many from another place of each axis that is cut."""
    items = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(item, torch.Tensor) for item in items) or result.ndim == 0:
        return
    if Ellipsis in items:
        at = items.index(Ellipsis)
        used = sum(item is not None for item in items) - 1
        items[at : at + 1] = [slice(None)] * (x.ndim - used)
    axis = -1
    for at, item in enumerate(items):
        axis += item is not None
        if not isinstance(item, slice) or axis >= x.ndim:
            continue
        size = x.shape[axis]
        start, stop, step = item.indices(size)
        count = len(range(start, stop, step))
        if not 0 < count < size:
            continue
        others = itertools.chain(
            _other_slices(size, start, step, count), _other_extents(size, start, step, count)
        )
        for words, other in others:
            changed = (*items[:at], other, *items[at + 1 :])
            yield f"{words} along axis {axis} taken", lambda changed=changed: x[changed]  # type: ignore[misc]


def _other_slices(size: int, start: int, step: int, count: int) -> Iterator[tuple[str, slice]]:
    last = start + (count - 1) * step
    if step == 1:
        places = {"the ones before": start - 1, "the ones behind": start + 1, "the first ones": 0}
        places["the last ones"] = size - count
        for words, other in places.items():
            if other != start and 0 <= other <= size - count:
                yield words, slice(other, other + count)
        if size % count == 0:
            stride = size // count
            yield "alternate ones", slice(start // count, None, stride)
    elif step > 1 and last < size and size % step == 0:
        for offset in range(step):
            if offset != start:
                yield f"those from {offset} on", slice(offset, None, step)
        block = size // step
        yield "a block", slice(start * block, start * block + count)


def _other_extents(size: int, start: int, step: int, count: int) -> Iterator[tuple[str, slice]]:
    """Slices of another length: of one index more or less at an end, of all to an end, and of all."""
    if step != 1:
        return
    stop = start + count
    extents = {
        "one more at the beginning": (start - 1, stop),
        "one more at the end": (start, stop + 1),
        "one less at the beginning": (start + 1, stop),
        "one less at the end": (start, stop - 1),
        "all of them": (0, size),
    }
    seen = {(start, stop)}
    for words, (first, last) in extents.items():
        if 0 <= first < last <= size and (first, last) not in seen:
            seen.add((first, last))
            yield words, slice(first, last)


def _input_options(x: torch.Tensor, axis: int) -> Options:
    """Make the operand without a part of what is summed, or with that in another order."""
    size = x.shape[axis]
    for count in _PARTS_OF_SUMS:
        if size % count or size <= count:
            continue
        for which in range(count):
            is_in = torch.arange(size, device=x.device) // (size // count) == which
            mask = is_in.view([-1 if at == axis else 1 for at in range(x.ndim)])
            yield f"part {which} of {count} of its inputs summed", lambda mask=mask: x * mask  # type: ignore[misc]
    for words, order in axis_orders(size).items():
        yield f"its inputs {words}", lambda o=order: x.index_select(axis, o.to(x.device))  # type: ignore[misc]
