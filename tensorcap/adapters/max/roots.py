"""The models that a program makes graphs of, found by watching every call of a MAX layer.

A *root* is the outermost module that is called while a graph is made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tensorcap.adapters.max.engine import Graph, Layer, Module
from tensorcap.adapters.max.hooks import wrap_calls
from tensorcap.adapters.protocol import CalledRoot, RootSearch
from tensorcap.workload import replace_attribute


class Roots:
    """Finds the root to capture, and counts the calls of all."""

    def __init__(self, pattern: str | None, take: Callable[[Any], bool]) -> None:
        """Look for a root; arguments as for `RootSearch`."""
        self._search = RootSearch(pattern, take)
        self._known: list[tuple[Module, CalledRoot]] = []
        self._thread = threading.local()

    @contextmanager
    def watch(self) -> Iterator[list[CalledRoot]]:
        """Watch every call of a layer in the block, also of classes that are defined in it."""
        with wrap_calls(self._call, _subclasses(Layer)) as wrap:

            def with_new(original: Any) -> Any:
                def initialise(cls: Any, /, **options: Any) -> None:
                    original.__func__(cls, **options)
                    wrap(cls)

                return classmethod(initialise)

            with replace_attribute(Layer, "__init_subclass__", with_new):
                yield self._search.called

    def _call(
        self, original: Callable[..., Any], layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        is_within = getattr(self._thread, "is_busy", False)
        if not isinstance(layer, Module) or not _is_tracing():
            return original(layer, *args, **kwargs)
        if is_within:
            is_wanted = not self._search.is_over and self._search.number is None and self._fits(layer)
            is_taken = is_wanted and self._search.take(layer, self._entry(layer))
        else:
            is_taken = self._count_outermost(layer)
        self._thread.is_busy = True
        try:
            if is_taken:  # the capture has its own way around this very call
                return type(layer).__call__(layer, *args, **kwargs)
            return original(layer, *args, **kwargs)
        finally:
            self._thread.is_busy = is_within

    def _count_outermost(self, module: Module) -> bool:
        """Count a call of an outermost module; whether it is taken now."""
        entry = self._entry(module)
        entry.calls += 1
        if self._search.is_over:
            return False
        if self._search.glob is None:
            is_wanted = bool(module.raw_state_dict())
        elif self._search.number is None:
            is_wanted = self._fits(module)
        else:
            fitting = [known for known, _ in self._known if self._fits(known)]
            is_wanted = len(fitting) > self._search.number and fitting[self._search.number] is module
        return is_wanted and self._search.take(module, entry)

    def _entry(self, module: Module) -> CalledRoot:
        for known, entry in self._known:
            if known is module:
                return entry
        self._known.append((module, self._search.add(type(module).__qualname__)))
        return self._known[-1][1]

    def _fits(self, module: Module) -> bool:
        return self._search.fits(type(module).__qualname__, type(module).__module__)


def _is_tracing() -> bool:
    try:
        return Graph.current is not None
    except LookupError:
        return False


def _subclasses(cls: Any) -> Iterator[type]:
    yield cls
    for inner in cls.__subclasses__():
        yield from _subclasses(inner)
