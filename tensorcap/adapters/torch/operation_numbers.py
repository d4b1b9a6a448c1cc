"""Numbers among the arguments of operations, which another one may stand for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

_COUNTED: Final = frozenset(  # operations whose whole numbers are no axes and no sizes
    {
        *("add", "sub", "mul", "div", "truediv", "floordiv", "floor_divide", "pow", "remainder", "mod"),
        *("clamp", "clip", "lt", "le", "gt", "ge", "eq", "ne", "minimum", "maximum", "rsub", "radd", "rmul"),
        *("topk", "roll", "triu", "tril", "arange", "bitwise_and"),
    }
)
_NOT_MUTATED: Final = frozenset({"dim", "dims", "axis", "dropout_p", "p", "momentum", "correction"})


def find_numbers(name: str, args: Any, kwargs: Mapping[str, Any]) -> dict[str, float]:
    """Find the numbers that an operation is given: by their place from 0, or by their name.

    Args:
        name: Of the operation, as torch calls it.
        args: What it was given.
        kwargs: Likewise.

    Example:
        >>> find_numbers("clamp", (None, -1.0), {"max": 1.0}), find_numbers("softmax", (None, -1), {})
        ({'1': -1.0, 'max': 1.0}, {})
    """
    is_counted = name.strip("_") in _COUNTED
    values = {**{str(at): arg for at, arg in enumerate(args)}, **kwargs}
    return {
        which: value
        for which, value in values.items()
        if which not in _NOT_MUTATED
        and (type(value) is float or (type(value) is int and is_counted))
        and math.isfinite(value)
    }


def with_number(args: Any, kwargs: Any, which: str, number: float) -> tuple[Any, Any]:
    """Put another number in the place of one; a whole number stays one if the other is whole.

    Args:
        args: What the operation is given.
        kwargs: Likewise.
        which: As `find_numbers` names it.
        number: The other one.

    Example:
        >>> with_number((None, 2), {}, "1", 3.0), with_number((None,), {"eps": 1e-5}, "eps", 0.5)
        (((None, 3), {}), ((None,), {'eps': 0.5}))
    """
    if which.isdigit():
        at = int(which)
        return (*args[:at], _like(args[at], number), *args[at + 1 :]), kwargs
    return args, {**kwargs, which: _like(kwargs[which], number)}


def _like(own: Any, number: float) -> float:
    return int(number) if type(own) is int and number == int(number) else number
