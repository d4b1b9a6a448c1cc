"""Replace an attribute of another package's class or module until a block ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replace_attribute(owner: Any, name: str, make_replacement: Callable[[Any], Any]) -> Iterator[None]:
    """Replace an attribute by what a function makes of it, until the block ends.

    If other code has replaced it meanwhile, it stays as it is.

    Args:
        owner: A class or a module that has it itself.
        name: Its name.
        make_replacement: Takes the attribute, and returns what takes its place.

    Example:
        >>> import math
        >>> with replace_attribute(math, "pi", lambda pi: 3):
        ...     math.pi
        3
        >>> round(math.pi, 4)
        3.1416
    """
    original = vars(owner)[name]
    replacement = make_replacement(original)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if vars(owner)[name] is replacement:
            setattr(owner, name, original)
