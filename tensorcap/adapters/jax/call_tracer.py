"""Calls of modules and probes, as JAX traces or runs the code around them.

Code that JAX compiles runs once as Python, on tracers, and later without Python. So each call leaves a
callback in what is compiled, before and behind it, ordered among all of them; code that is not compiled calls
it at once.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import jax
from jax.experimental import io_callback

from tensorcap.adapters.jax.event_recorder import Entry, Event, EventRecorder
from tensorcap.adapters.jax.model import TAP_RECEIVERS
from tensorcap.adapters.jax.tensors import ARRAYS, array_in, kinds
from tensorcap.adapters.protocol import NotCapturableError
from tensorcap.recording import Recorder, Substitution, argument_slots, leaf_slot, rebuild, walk
from tensorcap_formats.keys import PROBES, ROOT_SITE, module_site

# What is compiled under a capture has its callbacks, so JAX must keep it apart from what is compiled without.
_COMPILED_FOR: Final = jax.make_user_context(None)
_NUMBERS: Final = itertools.count(1)
_SEVERAL: Final = "outside of a call of a model, while several captures were under way"


class _Stack(threading.local):
    """The modules whose code runs in each thread, outermost first."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []


class CallTracer:
    """Reports calls to a recorder, in the order in which they run.

    Attributes:
        classes: The class of each module that was called, by its path.
        is_on: Whether calls are reported.
    """

    def __init__(
        self,
        recorder: Recorder,
        names: Collection[str],
        *,
        inputs: bool,
        substitution: Substitution | None,
    ) -> None:
        self.classes: dict[str, type] = {}
        self.is_on = True
        self._recorder = recorder
        self._names = set(names)
        self._inputs = inputs
        self._substitution = substitution
        self._events = EventRecorder(recorder, substitution)
        self._stack = _Stack()
        self._tokens = itertools.count(1)
        self._number = next(_NUMBERS)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Have JAX compile anew in the block, and wait at its end for what is under way."""
        TAP_RECEIVERS.append(self)
        try:
            with _COMPILED_FOR(self._number):
                yield
        finally:
            TAP_RECEIVERS.remove(self)
            jax.effects_barrier()
            self._events.close()

    @contextmanager
    def off(self) -> Iterator[None]:
        """Report nothing in the block, in which JAX runs what it compiles without a capture."""
        self.is_on = False
        try:
            with _COMPILED_FOR(None):
                yield
        finally:
            self.is_on = True

    @property
    def is_under_way(self) -> bool:
        """Whether a call of the model is under way in this thread."""
        return bool(self._stack.calls)

    def is_part_of_last_call(self, module: object) -> bool:
        """Whether a call is one of the base class's, within that of the module itself."""
        return bool(self._stack.calls) and self._stack.calls[-1][1] is module

    def call(
        self,
        path: str,
        module: object,
        names: Sequence[str],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        run: Callable[..., Any],
    ) -> Any:
        """Run a call of a module, and report it.

        Args:
            path: The module's path, "" for the model.
            module: The module.
            names: The names of its positional arguments.
            args: Its positional arguments.
            kwargs: Its other arguments.
            run: Makes the call.

        Returns:
            What its caller gets.
        """
        stack = self._stack.calls
        is_outermost = not path and all(above for above, _ in stack)
        is_reported = not path or self._is_wanted(path)
        point = self._recorder.points[path]
        self.classes.setdefault(path, type(module))
        values = [*args, *kwargs.values()]
        token = next(self._tokens)
        if is_reported:
            slots = list(argument_slots(names, len(args), kwargs))
            with_inputs = self._inputs or is_outermost
            event = Event("begin", point, token, is_outermost)
            values = self._report(event, list(zip(slots, values, strict=True)), is_recorded=with_inputs)
        stack.append((path, module))
        try:
            result = run(*values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))
        finally:
            stack.pop()
        if is_reported:
            (result,) = self._report(Event("end", point, token, is_outermost), [("output", result)])
        return result

    def tapped(self, path: str, value: Any) -> Any:
        """Report a value as the result of a module, and return what the code goes on with."""
        if not self.is_on or not self._is_wanted(path):
            return value
        point, token = self._recorder.points[path], next(self._tokens)
        self._report(Event("begin", point, token), [])
        (value,) = self._report(Event("end", point, token), [("output", value)])
        return value

    def probed(self, name: str, value: object, *, is_alone: bool) -> None:
        """Report the value of a probe, and the module that it lies in."""
        if not self.is_on:
            return
        stack = self._stack.calls
        if not is_alone and not stack:
            if self._recorder.is_recording:
                self._recorder.lose(self._recorder.place(PROBES, name, "probe"), "value", _SEVERAL)
            return
        module = module_site(stack[-1][0]) if stack and stack[-1][0] else ROOT_SITE
        self._report(Event("probe", None, name=name, module=module), [("value", value)])

    def _report(
        self, event: Event, slotted: Sequence[tuple[str, Any]], *, is_recorded: bool = True
    ) -> list[Any]:
        """Leave a callback, and return the values that the code goes on with."""
        jax.effects_barrier()  # what is under way comes before what is not compiled
        entries: list[Entry] = []
        arrays: list[Any] = []
        is_replaced = self._is_replaced(event)
        for slot, value in slotted if is_recorded or is_replaced else ():
            self._list_leaves(slot, value, entries, arrays)
        values = [value for _, value in slotted]
        if not is_replaced:
            jax.debug.callback(partial(self._events.take, event, tuple(entries)), *arrays, ordered=True)
            return values
        shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
        exchange = partial(self._events.exchange, event, tuple(entries))
        after = io_callback(exchange, shapes, *arrays, ordered=True)
        by_slot = {entry.slot: after[entry.position] for entry in entries if entry.position is not None}
        return [rebuild(value, kinds(), partial(_exchanged, by_slot, slot)) for slot, value in slotted]

    def _is_wanted(self, path: str) -> bool:
        """Whether calls of a module are recorded; of one that was not known before, as its site says."""
        if path not in self._recorder.points and self._recorder.module(path).wanted is not False:
            self._names.add(path)
        return path in self._names

    def _is_replaced(self, event: Event) -> bool:
        """Whether archived values may stand in a call's place: of these sites it is not known when."""
        substitution = self._substitution
        if substitution is None or event.point is None:
            return False
        kind = "input" if event.kind == "begin" else "output"
        return kind in substitution.kinds and substitution.binds(event.point.site)

    def _list_leaves(self, slot: str, value: Any, entries: list[Entry], arrays: list[Any]) -> None:
        replaceable: set[str] = set()

        def note(name: str, array: Any) -> Any:
            if isinstance(array, ARRAYS):
                replaceable.add(name)
            return array

        rebuild(value, kinds(), note)
        for leaf in walk(value, kinds()):
            own = leaf_slot(slot, leaf.name)
            if not leaf.is_tensor:
                entries.append(Entry(own, value=leaf.value, reason=leaf.reason))
                continue
            try:
                arrays.append(array_in(leaf.value))
            except NotCapturableError as error:
                entries.append(Entry(own, reason=str(error)))
                continue
            entries.append(Entry(own, len(arrays) - 1, is_replaceable=leaf.name in replaceable))


def _exchanged(by_slot: Mapping[str, Any], slot: str, name: str, array: Any) -> Any:
    return by_slot.get(leaf_slot(slot, name), array) if isinstance(array, ARRAYS) else array
