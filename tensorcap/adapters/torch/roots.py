"""The models that a program calls, found by watching every call of a torch module.

A *root* is the outermost module called in a thread. If that is a part of a larger model, which the
program calls by other methods (`vae.encode`, `model.get_input_embeddings()(ids)`), the root is the larger
one: the highest module around it that is more than a wrapper, which has one child and no parameter.
"""

from __future__ import annotations

import functools
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from tensorcap.adapters.protocol import CalledRoot, RootSearch
from tensorcap.adapters.torch.direct_calls import (
    Replacement,
    acquire,
    around_direct_calls,
    is_symbolic,
    release,
)
from tensorcap.adapters.torch.modules import unwrapped
from tensorcap.adapters.torch.scripted import script_as_written
from tensorcap.workload import replace_attribute

_is_compiling: Final = torch.compiler.is_compiling


class _KnownModule(NamedTuple):
    """A module that was the outermost of a call, and its root."""

    module: weakref.ref[nn.Module]
    root: CalledRoot


class _Thread(threading.local):
    is_busy = False  # with a call of a module


class Roots:
    """Finds the root to capture, and counts the calls of all."""

    def __init__(self, pattern: str | None, take: Callable[[nn.Module], bool]) -> None:
        """Look for a root; arguments as for `RootSearch`. A scripted root is taken only by a pattern."""
        self._search = RootSearch(pattern, take)
        self._taken: nn.Module | None = None
        self._known: dict[int, _KnownModule] = {}
        self._roots: list[weakref.ref[nn.Module]] = []  # of those that the search has
        self._lock = threading.RLock()
        self._thread = _Thread()
        self._process = os.getpid()

    @contextmanager
    def watch(self) -> Iterator[list[CalledRoot]]:
        """Watch every call of a module in the block, in all threads."""
        replacements: dict[type, Replacement | None] = {}
        with ExitStack() as stack:
            stack.callback(_release_all, replacements)
            for name in ("__init__", "__setstate__"):
                stack.enter_context(
                    replace_attribute(nn.Module, name, functools.partial(_wrap_maker, replacements))
                )
            stack.enter_context(replace_attribute(nn.Module, "__call__", self._wrap_call))
            stack.enter_context(around_direct_calls(self._within))
            stack.enter_context(script_as_written())
            yield self._search.called

    def _wrap_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        thread = self._thread

        @functools.wraps(original)
        def call(self_: Any, /, *args: Any, **kwargs: Any) -> Any:
            if _is_compiling():
                return original(self_, *args, **kwargs)
            if thread.is_busy:
                if not self._search.is_over:
                    self._look_inside(self_)
                return original(self_, *args, **kwargs)
            self._outermost(self_)
            thread.is_busy = True
            try:
                return original(self_, *args, **kwargs)
            finally:
                thread.is_busy = False

        return call

    @contextmanager
    def _within(self, module: nn.Module) -> Iterator[None]:
        """Do as `_wrap_call`, around a direct call of `forward`."""
        if self._thread.is_busy:
            if not self._search.is_over:
                self._look_inside(module)
            yield
            return
        self._outermost(module)
        self._thread.is_busy = True
        try:
            yield
        finally:
            self._thread.is_busy = False

    def _outermost(self, module: nn.Module) -> None:
        if is_symbolic() or torch._C._get_tracing_state() is not None:
            return  # no run of the model
        met = self._known.get(id(module))
        if met is None or met.module() is not module:
            if os.getpid() != self._process or getattr(module, "_is_replica", False):
                return  # a forked process, a thread of DataParallel
            with self._lock:
                met = self._known[id(module)] = self._find_root(module)
        met.root.calls += 1

    def _look_inside(self, module: nn.Module) -> None:
        """Choose a module that another calls, if the pattern asks for its class."""
        if self._search.number is None and self._fits(module):
            with self._lock:
                if not self._search.is_over and os.getpid() == self._process:
                    self._choose(module)

    def _find_root(self, module: nn.Module) -> _KnownModule:
        taken = self._taken
        if taken is not None and any(module is inner for inner in taken.modules()):
            return _KnownModule(weakref.ref(module), self._entry(taken))
        above = _ancestors(module)
        root = _root_of(module, above)
        entry = self._entry(root)
        if not self._search.is_over:
            self._consider(module, above, root)
        return _KnownModule(weakref.ref(module), entry)

    def _consider(self, module: nn.Module, above: list[nn.Module], root: nn.Module) -> None:
        """Choose a new root, or a module around the called one, if it is the wanted one."""
        if self._search.glob is None:
            is_scripted = isinstance(root, torch.jit.ScriptModule)
            if not is_scripted and next(root.parameters(), None) is not None:
                self._choose(root)
        elif self._search.number is None:
            for candidate in (module, *above):
                if self._fits(candidate):
                    self._choose(candidate)
                    break
        else:
            fitting = [r for r in (reference() for reference in self._roots) if r is None or self._fits(r)]
            if len(fitting) > self._search.number and fitting[self._search.number] is root:
                self._choose(root)

    def _fits(self, module: nn.Module) -> bool:
        return self._search.fits(*_name_of(module))

    def _choose(self, root: nn.Module) -> None:
        if self._search.take(root, self._entry(root)):
            self._taken = root
            self._known.clear()  # what was met before may be of this root

    def _entry(self, root: nn.Module) -> CalledRoot:
        for reference, entry in zip(self._roots, self._search.called, strict=True):
            if reference() is root:
                return entry
        self._roots.append(weakref.ref(root))
        return self._search.add(_name_of(root)[0])


def _wrap_maker(
    replacements: dict[type, Replacement | None], original: Callable[..., None]
) -> Callable[..., None]:
    """Replace the `forward` of every class when a module of it is made."""

    @functools.wraps(original)
    def make(self: Any, /, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if type(self) not in replacements and not _is_compiling():
            replacements[type(self)] = acquire(type(self))

    return make


def _release_all(replacements: dict[type, Replacement | None]) -> None:
    for replacement in replacements.values():
        if replacement is not None:
            release(replacement)


def _name_of(module: nn.Module) -> tuple[str, str]:
    """Name and module of the class that the user wrote; torch.compile and torch.jit make others of it."""
    if isinstance(module, torch.jit.ScriptModule):
        return str(module.original_name), type(module).__module__
    cls = type(unwrapped(module))
    return cls.__qualname__, cls.__module__


def _ancestors(module: nn.Module) -> list[nn.Module]:
    """All modules that hold this one, at any depth, the nearest first."""
    parents: dict[int, list[nn.Module]] = {}
    for candidate in gc.get_objects():
        if issubclass(type(candidate), nn.Module) and not isinstance(candidate, torch.jit.ScriptModule):
            for child in candidate.__dict__.get("_modules", {}).values():
                parents.setdefault(id(child), []).append(candidate)
    known = {id(module)}
    queue = [module]
    for inner in queue:  # it grows
        for parent in parents.get(id(inner), ()):
            if id(parent) not in known:
                known.add(id(parent))
                queue.append(parent)
    return queue[1:]


def _root_of(module: nn.Module, above: list[nn.Module]) -> nn.Module:
    """The highest module around this one that is more than a wrapper; itself if there are several."""
    models = [
        m
        for m in above
        if len({id(c) for c in m._modules.values()}) > 1 or any(p is not None for p in m._parameters.values())
    ]
    highest = [
        m
        for m in models
        if not any(m is inner for other in models if other is not m for inner in other.modules())
    ]
    return highest[0] if len(highest) == 1 else module
