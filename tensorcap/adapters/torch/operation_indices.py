"""Do something else in the place of an operation that makes whole numbers or truth values: places, masks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch

Options = Iterator[tuple[str, Callable[[], Any]]]

_COMPARISONS: Final[Mapping[str, Callable[..., torch.Tensor]]] = {
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "eq": torch.eq,
    "ne": torch.ne,
}
_SIGNS: Final[Mapping[str, str]] = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_JUNCTIONS: Final[Mapping[str, str]] = {
    "and": "or",
    "logical_and": "or",
    "bitwise_and": "or",
    "or": "and",
    "logical_or": "and",
    "bitwise_or": "and",
}
_COUNTED: Final = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FIRST: Final = range(3)  # places that counts begin with
_LARGEST: Final = 1 << 22  # elements of what is laid out otherwise


def counts_up(places: torch.Tensor) -> bool:
    """Whether whole numbers count up by one along the last axis, as places do but for what is padded.

    Args:
        places: Of at least one axis.

    Example:
        >>> counts_up(torch.tensor([1, 2, 3, 4, 0])), counts_up(torch.tensor([3, 1, 2, 0, 5]))
        (True, False)
    """
    steps = places[..., 1:] - places[..., :-1]
    return steps.numel() > 0 and 2 * int((steps == 1).sum()) >= steps.numel()


def index_options(name: str, args: Any, result: Any) -> Options:
    """List what an operation can make of whole numbers or truth values instead, in words.

    1. A comparison is another one; of two masks the one holds or the other, and not both.
    2. Whole numbers have the opposite sign; those that count up do so throughout, from 0, 1 or 2.
    3. Two axes of one size are exchanged, or an axis is turned round.

    Nothing where the numbers are not on a CPU: an index out of range spoils other devices for the process.

    Args:
        name: Of the operation, as torch calls it.
        args: What it was given.
        result: What it returned.
    """
    if not isinstance(result, torch.Tensor) or result.dtype not in _COUNTED:
        return
    if result.device.type != "cpu" or not args or not result.ndim or not 1 < result.numel() <= _LARGEST:
        return
    base = name.strip("_")
    if base in _COMPARISONS and len(args) > 1:
        for other, compare in _COMPARISONS.items():
            if other != base:
                yield f"{_SIGNS[other]} for {_SIGNS[base]}", lambda f=compare: f(args[0], args[1])  # type: ignore[misc]
    if base in _JUNCTIONS and len(args) > 1 and result.dtype == torch.bool:
        join = torch.logical_or if _JUNCTIONS[base] == "or" else torch.logical_and
        yield f"`{_JUNCTIONS[base]}` of its masks", lambda: join(args[0], args[1])
    if result.dtype != torch.bool and result.any():
        yield "the opposite sign of its numbers", lambda: -result
        count = torch.arange(result.shape[-1], dtype=result.dtype)
        for first in _FIRST if counts_up(result) else ():
            counted = (count + first).expand(result.shape)
            if not torch.equal(counted, result):
                yield f"its places counted from {first} on", lambda counted=counted: counted.clone()  # type: ignore[misc]
    for one, other_axis in itertools.combinations(range(result.ndim), 2):
        if result.shape[one] == result.shape[other_axis] > 1:
            axes = one, other_axis
            yield (
                f"axes {one} and {other_axis} of its places exchanged",
                lambda axes=axes: result.transpose(*axes),  # type: ignore[misc]
            )
    for axis in range(result.ndim):
        if result.shape[axis] > 1:
            yield f"its places reversed along axis {axis}", lambda axis=axis: result.flip(axis)  # type: ignore[misc]
