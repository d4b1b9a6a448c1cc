"""Calls of MAX's layers, seen from outside: on their classes, as MAX itself does for its hooks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tensorcap.adapters.max.engine import Layer

Through = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]


@contextmanager
def watching(through: Through, classes: Iterable[type]) -> Iterator[Callable[[type], None]]:
    """Have calls of layers of these classes go through a function until the block ends.

    Args:
        through: Is given the original method, the layer and its arguments; gives what the caller gets.
        classes: The classes, of which the bases are watched too.

    Returns:
        What has a class watched that is made in the block.
    """
    wrapped: dict[type, tuple[Any, Any]] = {}

    def watch(cls: type) -> None:
        original = cls.__dict__.get("__call__")
        if original is not None and issubclass(cls, Layer) and cls not in wrapped:
            wrapped[cls] = original, _wrapped(through, original)
            cls.__call__ = wrapped[cls][1]  # type: ignore[method-assign] # as MAX does for its hooks

    try:
        for cls in dict.fromkeys(base for each in classes for base in each.__mro__):
            watch(cls)
        yield watch
    finally:
        for cls, (original, ours) in wrapped.items():
            if cls.__dict__.get("__call__") is ours:
                cls.__call__ = original  # type: ignore[method-assign]


def _wrapped(through: Through, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return through(original, self, args, kwargs)

    return call
