"""Attributes of somebody else's that are replaced for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, around: Callable[[Any], Any]) -> Iterator[None]:
    """Replace an attribute by what a function makes of it, until the block ends.

    If somebody has replaced it anew by then, it stays as it is.

    Args:
        owner: A class or a module that has it itself.
        name: Its name.
        around: Is given the attribute, and gives what takes its place.

    Example:
        >>> import math
        >>> with replaced(math, "pi", lambda pi: 3):
        ...     math.pi
        3
        >>> round(math.pi, 4)
        3.1416
    """
    original = vars(owner)[name]
    replacement = around(original)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if vars(owner)[name] is replacement:
            setattr(owner, name, original)
