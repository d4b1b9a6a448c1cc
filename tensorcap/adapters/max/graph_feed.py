"""What a graph with switches is fed: archived tensors where a substitution has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from tensorcap.adapters.max.engine import Buffer, MaxDType, buffer_of, logical
from tensorcap.adapters.max.graph_plan import Built, Place
from tensorcap.adapters.max.inputs import Given
from tensorcap.adapters.max.trace_events import (
    Enter,
    Event,
    Inner,
    Leave,
    Lost,
    Passed,
    Plain,
    Printed,
    Tensor,
)
from tensorcap.recording.substitution import Kind, Substitution, no_fit
from tensorcap_formats.dtypes import DTYPES, cast
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import Key, module_site
from tensorcap_formats.records import Record

_OWN_RESULT: Final = "the model itself returns it, and nothing of the run comes after that"
_NO_SWITCH: Final = "nothing can stand for it: it is within a subgraph, or its shape is only computed"
_ELSEWHERE: Final = "it is within a subgraph, a branch or a loop of the graph"
_KINDS: Final[tuple[Kind, ...]] = ("input", "output")

_Leaf = Tensor | Plain | Printed | Lost


def feed(built: Built, given: Given, substitution: Substitution | None, step: int) -> list[Any]:
    """The inputs of a graph: the model's own, values for its switches, and which of those are on.

    Args:
        built: The graph.
        given: What the model is run on.
        substitution: What goes in, if anything does; it is told what became of each tensor.
        step: The number of the step that this run is.

    Raises:
        UsageError: A tensor does not fit.
    """
    exchange = _Exchange(built, given, step)
    if substitution is not None:
        try:
            exchange.fill(substitution)
        except UsageError as error:
            substitution.failure = error
            raise
    blanks: dict[Any, Any] = {}
    values = [
        exchange.values[place] if place in exchange.values else _blank(wanted, given, blanks)
        for place, wanted in built.switches.items()
    ]
    flags = [buffer_of(np.array(place in exchange.values), DTYPES["bool"]) for place in built.switches]
    return [*exchange.own, *values, *flags]


class _Exchange:
    """The values that go into one run.

    Attributes:
        own: The model's own inputs.
        values: Of the places at which another value is to stand.
    """

    def __init__(self, built: Built, given: Given, step: int) -> None:
        self.own = list(given.buffers)
        self.values: dict[Place, Any] = {}
        self._built = built
        self._given = given
        self._step = step

    def fill(self, substitution: Substitution) -> None:
        """Look up what a substitution has for each call."""
        for key, place, leaf, record in planned(self._built.events, substitution, self._step):
            wanted = self._built.switches.get(place)
            if leaf.is_input and not place.name:
                self.own[leaf.at], text = self._made(substitution, key, record, self._given.types[leaf.at])
            elif wanted is not None:
                self.values[place], text = self._made(substitution, key, record, wanted)
            else:
                substitution.note_left(key, _NO_SWITCH if place.name else _OWN_RESULT)
                continue
            substitution.note_injected(key, text)

    def _made(self, substitution: Substitution, key: Key, record: Record, wanted: Any) -> tuple[Any, str]:
        """An archived tensor as a buffer of the type that is wanted, and how it was cast."""
        made, text = archived(
            substitution, key, record, wanted.dtype, self._given.size_of(wanted.shape) or ()
        )
        return _on_device(made, wanted), text


def planned(
    events: Sequence[Event], substitution: Substitution, step: int
) -> Iterator[tuple[Key, Place, Tensor, Record]]:
    """The tensors of a run for which a substitution has others, each with its archived one.

    The substitution is told of those that it has none for, and of those that are not in the run.

    Args:
        events: What happens in the run.
        substitution: What is to stand where.
        step: The number of the step that the run is.
    """
    for name, call, leaves in _calls(events):
        site = module_site(name)
        for kind in _KINDS:
            found = substitution.planned(site, step, call, kind)
            if found is None:
                continue
            left = dict(found)
            for leaf in leaves:
                if leaf.slot.partition(".")[0] != kind or isinstance(leaf, Plain):
                    continue
                key, record = Key(site, leaf.slot, step, call), left.pop(leaf.slot, None)
                if record is None:
                    substitution.note_absent(key)
                elif not isinstance(leaf, Tensor):
                    substitution.note_left(key, leaf.reason if isinstance(leaf, Lost) else _ELSEWHERE)
                else:
                    yield key, Place(name, call, leaf.slot), leaf, record
            for slot in left:
                substitution.note_left(Key(site, slot, step, call))


def archived(
    substitution: Substitution, key: Key, record: Record, dtype: MaxDType, shape: tuple[int, ...]
) -> tuple[Any, str]:
    """An archived tensor as a buffer of a dtype, and how it was cast.

    Raises:
        UsageError: It does not fit.
    """
    archive = substitution.archive
    stored, wanted = archive.read(record), logical(dtype)
    if stored.shape != shape:
        raise no_fit(archive, key, stored.shape, shape)
    try:
        made, text = cast(stored, record.dtype, wanted)
    except UsageError as error:
        raise UsageError(f"{archive.path}: {key.text}: does not fit: {error}", hint=error.hint) from None
    return buffer_of(made, wanted), text


def _calls(events: Sequence[Event]) -> Iterator[tuple[str, int, list[_Leaf]]]:
    """Each call of a module: its name, its number, and the leaves of its arguments and its result."""
    counts: dict[str, int] = {}
    stack: list[tuple[str, int, list[_Leaf]]] = []
    for event in events:
        if isinstance(event, Enter):
            number = counts.get(event.name, 0)
            counts[event.name] = number + 1
            stack.append((event.name, number, []))
        elif isinstance(event, Passed):
            stack.append(("", -1, []))
        elif isinstance(event, Leave):
            call = stack.pop()
            if call[1] >= 0:
                yield call
        elif not isinstance(event, Inner):
            stack[-1][2].append(event)


def _blank(wanted: Any, given: Given, made: dict[Any, Any]) -> Any:
    """What stands at a switch that is off: zeros, one buffer for all of a type."""
    shape = given.size_of(wanted.shape) or ()
    key = (wanted.dtype.name, shape, str(wanted.device))
    if key not in made:
        made[key] = _on_device(Buffer.zeros(list(shape), wanted.dtype), wanted)
    return made[key]


def _on_device(made: Any, wanted: Any) -> Any:
    return made if wanted.device.is_cpu() else made.to(wanted.device.to_device())
