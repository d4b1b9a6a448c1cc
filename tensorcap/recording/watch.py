"""Record local variables of functions without an edit of their source.

For the time of a capture, a watched function gets a code object compiled from its own source that hands over
what it assigns; the original is put back afterwards. Every reference to the function runs the new code,
however it was imported. A call that is under way when the capture begins or ends goes on as it is.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Final, TypeVar

from tensorcap.recording.function_lookup import find_function
from tensorcap.recording.point import Point
from tensorcap.recording.probes import ValueReceiver, choose_under_way
from tensorcap.recording.recorder import Call
from tensorcap.recording.source_rewrite import RETURN, Source
from tensorcap_formats.errors import UsageError, abbreviate, did_you_mean
from tensorcap_formats.keys import ROOT_SITE

_T = TypeVar("_T")
_ALL: Final = "*"
_UNASSIGNED: Final = "assigned in none of its calls"


@dataclass(frozen=True)
class Watched:
    """A function to watch, which exists and can be watched.

    Attributes:
        texts: What the user asked to watch, all texts that name the function.
        function: The function as it was written, without its decorators.
        source: Its source.
        variables: Which of its variables, `return` included; all that hold tensors if empty.
    """

    texts: tuple[str, ...]
    function: FunctionType
    source: Source
    variables: frozenset[str]

    def wants(self, variable: str) -> bool:
        """Whether a variable is to be recorded; what the function returns always is."""
        return not self.variables or variable in self.variables or variable == RETURN


def find_watched(texts: Iterable[str], refuse: Callable[[object], str]) -> list[Watched]:
    """Find the functions of `MODULE:FUNCTION:VARIABLE,VARIABLE`, or `FILE.py:…`, before anything runs.

    Args:
        texts: What to watch; `*` stands for all variables that hold tensors.
        refuse: Returns why an object cannot be watched; an empty text if it can.

    Returns:
        Each function once.

    Raises:
        UsageError: There is no such module, function or variable, or it cannot be watched.
    """
    watched: dict[FunctionType, Watched] = {}
    for text in texts:
        where = f"watch {abbreviate(text)!r}"
        place, _, listed = text.rpartition(":")
        module, _, name = place.rpartition(":")
        variables = {variable.strip() for variable in listed.split(",")}
        if not (module and name and all(variables)):
            raise UsageError(
                f"{where}: expected MODULE:FUNCTION:VARIABLE[,VARIABLE]",
                hint="As in 'transformers.models.llama.modeling_llama:LlamaMLP.forward:*'.",
            )
        function = find_function(module, name, where, refuse)
        before = watched.get(function)
        source = before.source if before else Source(function, _original(function), where)
        for variable in sorted(variables - {_ALL, *source.names}):
            near = did_you_mean(variable, source.names) or ""
            hint = f"{near} It has: {', '.join(source.names)}.".lstrip()
            raise UsageError(f"{where}: {name} assigns no variable {abbreviate(variable)!r}", hint=hint)
        is_all = _ALL in variables or (before is not None and not before.variables)
        known = before.variables if before else frozenset()
        watched[function] = Watched(
            (*(before.texts if before else ()), text),
            function,
            source,
            frozenset() if is_all else known | variables,
        )
    return list(watched.values())


@contextmanager
def watch_functions(functions: Iterable[Watched], receiver: ValueReceiver) -> Iterator[None]:
    """Record variables of functions until the block ends, however it ends."""
    listeners = [_Listener(watched, receiver) for watched in functions]
    with ExitStack() as stack:
        for listener in listeners:
            _install(listener)
            stack.callback(_uninstall, listener)
        try:
            yield
        finally:
            for listener in listeners:
                listener.note_unmet()


def begin(key: int) -> Callable[[str, _T], _T]:
    """Begin a call of a watched function; its rewritten code calls this.

    Args:
        key: The function's number.

    Returns:
        A function that takes the name and the value of each variable, and returns the value.
    """
    rewritten = _REWRITTEN.get(key)
    if rewritten is None:  # the capture is over
        return _pass_on
    listeners = rewritten.listeners
    begun = [listener.begin(is_alone=len(listeners) == 1) for listener in choose_under_way(listeners)]
    recorders = [recorder for recorder in begun if recorder is not None]

    def record(name: str, value: _T) -> _T:
        for recorder in recorders:
            recorder(name, value)
        return value

    return record if recorders else _pass_on


def _pass_on(name: str, value: _T) -> _T:
    return value


class _Listener:
    """One capture that watches one function: the sites where it was called, and the variables assigned."""

    def __init__(self, watched: Watched, receiver: ValueReceiver) -> None:
        self.watched = watched
        self.name = watched.function.__qualname__
        self.receiver = receiver
        self.points: dict[str, Point] = {}
        self.assigned: dict[str, set[str]] = {}  # by site

    @property
    def is_under_way(self) -> bool:
        return self.receiver.is_under_way

    def begin(self, *, is_alone: bool) -> _VariableRecorder | None:
        call = self.receiver.begin(self.name, "function", is_alone=is_alone)
        return None if call is None else _VariableRecorder(self, call)

    def note_unmet(self) -> None:
        """Note the functions that were not called, and the variables that were not assigned."""
        recorder, variables = self.receiver.recorder, self.watched.variables
        if not self.points:
            point = recorder.place(ROOT_SITE, self.name, "function")
            if not point.lost and recorder.stopped is None:
                recorder.unmatched.extend(self.watched.texts)
        missing = variables.difference(*self.assigned.values())
        for site, point in self.points.items():
            for variable in sorted(missing):
                recorder.lose(point, variable, _UNASSIGNED)
            elsewhere = sorted(variables - missing - self.assigned[site])
            if elsewhere:
                point.note = f"{_UNASSIGNED}: {', '.join(elsewhere)}"


class _VariableRecorder:
    """Records the variables of one call of a function, for one capture."""

    def __init__(self, listener: _Listener, call: Call) -> None:
        site = call.point.site
        listener.points[site] = call.point
        self._assigned = listener.assigned.setdefault(site, set())
        self._watched = listener.watched
        self._taker = listener.receiver
        self._call = call
        self._counts: Counter[str] = Counter()

    def __call__(self, name: str, value: object) -> None:
        watched = self._watched
        if not watched.wants(name):  # another capture does
            return
        self._assigned.add(name)
        self._counts[name] += 1
        count = self._counts[name]
        slot = name if count == 1 else f"{name}:{count}"
        only_tensors = not watched.variables and name != RETURN
        self._taker.take(self._call, slot, value, only_tensors=only_tensors)
        if name == RETURN and count == 1:
            self._taker.recorder.finish(self._call)


@dataclass
class _Rewritten:
    """A function whose code is not its own at present.

    Attributes:
        function: The function.
        original: Its own code.
        current: The code that it has at present.
        listeners: The captures that watch it; a tuple that is replaced, as other threads iterate over it.
    """

    function: FunctionType
    original: CodeType
    current: CodeType
    listeners: tuple[_Listener, ...] = ()

    def rewrite(self, key: int) -> None:
        """Set code that hands over what the listeners want."""
        wants = [listener.watched.wants for listener in self.listeners]
        source = self.listeners[0].watched.source
        self.current = source.rewritten(key, lambda name: any(want(name) for want in wants))
        self.function.__code__ = self.current

    def restore(self) -> None:
        """Set the function's own code again, unless other code has replaced it meanwhile."""
        if self.function.__code__ is self.current:
            self.function.__code__ = self.original


_LOCK: Final = threading.Lock()
_KEYS: Final = itertools.count()
_REWRITTEN: Final[dict[int, _Rewritten]] = {}


def _key_of(function: FunctionType) -> int | None:
    return next((key for key, known in _REWRITTEN.items() if known.function is function), None)


def _original(function: FunctionType) -> CodeType:
    """The function's own code, which another capture may have replaced."""
    with _LOCK:
        key = _key_of(function)
        return function.__code__ if key is None else _REWRITTEN[key].original


def _install(listener: _Listener) -> None:
    function = listener.watched.function
    with _LOCK:
        key = _key_of(function)
        if key is None:
            key, rewritten = next(_KEYS), _Rewritten(function, function.__code__, function.__code__)
        else:
            rewritten = _REWRITTEN[key]
        rewritten.listeners = (*rewritten.listeners, listener)
        rewritten.rewrite(key)
        _REWRITTEN[key] = rewritten


def _uninstall(listener: _Listener) -> None:
    with _LOCK:
        key = _key_of(listener.watched.function)
        assert key is not None  # since `_install`
        rewritten = _REWRITTEN[key]
        rewritten.listeners = tuple(other for other in rewritten.listeners if other is not listener)
        if rewritten.listeners:
            rewritten.rewrite(key)
        else:
            del _REWRITTEN[key]
            rewritten.restore()
