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
from tensorcap.adapters.protocol import CalledRoot, RootPattern, number_root
from tensorcap.workload import replaced


class Roots:
    """Finds the root to capture, and counts the calls of all."""

    def __init__(self, pattern: str | None, take: Callable[[Any], bool]) -> None:
        """Look for a root.

        Args:
            pattern: A glob for its class, qualified or not; with `@N` behind it, for the N-th root of such
                a class, from 0. None for the first root that has weights.
            take: Gets the root before its call goes on; returns whether it takes it.
        """
        self._pattern = RootPattern(pattern)
        self._take = take
        self._is_searching = True
        self._called: list[CalledRoot] = []
        self._met: list[tuple[Module, CalledRoot]] = []
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

            with replaced(Layer, "__init_subclass__", with_new):
                yield self._called

    def _call(
        self, original: Callable[..., Any], layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        is_within = getattr(self._thread, "is_busy", False)
        if not isinstance(layer, Module) or not _is_tracing():
            return original(layer, *args, **kwargs)
        if is_within:
            is_taken = (
                self._is_searching
                and self._pattern.number is None
                and self._fits(layer)
                and self._choose(layer)
            )
        else:
            is_taken = self._meet(layer)
        self._thread.is_busy = True
        try:
            if is_taken:  # the capture has its own way around this very call
                return type(layer).__call__(layer, *args, **kwargs)
            return original(layer, *args, **kwargs)
        finally:
            self._thread.is_busy = is_within

    def _meet(self, module: Module) -> bool:
        """Count a call of an outermost module; whether it is taken now."""
        entry = self._entry(module)
        entry.calls += 1
        if not self._is_searching:
            return False
        if self._pattern.glob is None:
            return bool(module.raw_state_dict()) and self._choose(module)
        if self._pattern.number is None:
            return self._fits(module) and self._choose(module)
        fitting = [known for known, _ in self._met if self._fits(known)]
        return (
            len(fitting) > self._pattern.number
            and fitting[self._pattern.number] is module
            and self._choose(module)
        )

    def _choose(self, module: Module) -> bool:
        if not self._take(module):
            return False
        self._is_searching = False
        self._entry(module).is_taken = True
        return True

    def _entry(self, module: Module) -> CalledRoot:
        for known, entry in self._met:
            if known is module:
                return entry
        entry = number_root(type(module).__qualname__, self._called)
        self._met.append((module, entry))
        self._called.append(entry)
        return entry

    def _fits(self, module: Module) -> bool:
        return self._pattern.fits(type(module).__qualname__, type(module).__module__)


def _is_tracing() -> bool:
    try:
        return Graph.current is not None
    except LookupError:
        return False


def _subclasses(cls: Any) -> Iterator[type]:
    yield cls
    for inner in cls.__subclasses__():
        yield from _subclasses(inner)
