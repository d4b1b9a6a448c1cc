"""What a graph with switches is fed: archived tensors where a substitution has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from tensorcap.adapters._max.building import Built, Place
from tensorcap.adapters._max.engine import Buffer, buffer_of, logical
from tensorcap.adapters._max.given import Given
from tensorcap.adapters._max.tracing import Enter, Event, Leave, Lost, Passed, Plain, Tensor
from tensorcap.casting import cast
from tensorcap.substitution import Kind, Substitution, no_fit
from tensorcap_formats.dtypes import DTYPES
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import Key, module_site
from tensorcap_formats.records import Record

_OWN_RESULT: Final = "the model itself returns it, and nothing of the run comes after that"
_NO_SWITCH: Final = "its shape is known only from what is computed"
_KINDS: Final[tuple[Kind, ...]] = ("input", "output")


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
        for name, call, leaves in _calls(self._built.events):
            site = module_site(name)
            for kind in _KINDS:
                planned = substitution.planned(site, self._step, call, kind)
                if planned is None:
                    continue
                left = dict(planned)
                for leaf in leaves:
                    if leaf.slot.partition(".")[0] == kind:
                        key = Key(site, leaf.slot, self._step, call)
                        self._exchange(substitution, key, Place(name, call, leaf.slot), leaf, left)
                for slot in left:
                    substitution.note_left(Key(site, slot, self._step, call))

    def _exchange(
        self,
        substitution: Substitution,
        key: Key,
        place: Place,
        leaf: Tensor | Plain | Lost,
        left: dict[str, Record],
    ) -> None:
        if isinstance(leaf, Plain):
            return
        record = left.pop(leaf.slot, None)
        wanted = self._built.switches.get(place)
        is_own = isinstance(leaf, Tensor) and leaf.is_input and not place.name
        if record is None:
            substitution.note_absent(key)
        elif isinstance(leaf, Lost):
            substitution.note_left(key, leaf.reason)
        elif is_own:
            made, cast_text = self._made(substitution, key, record, self._given.types[leaf.at])
            self.own[leaf.at] = made
            substitution.note_injected(key, cast_text)
        elif wanted is None:
            substitution.note_left(key, _NO_SWITCH if place.name else _OWN_RESULT)
        else:
            self.values[place], cast_text = self._made(substitution, key, record, wanted)
            substitution.note_injected(key, cast_text)

    def _made(self, substitution: Substitution, key: Key, record: Record, wanted: Any) -> tuple[Any, str]:
        """An archived tensor as a buffer of the type that is wanted, and how it was cast."""
        archive = substitution.archive
        stored = archive.read(record)
        shape = self._given.size_of(wanted.shape) or ()
        if stored.shape != shape:
            raise no_fit(archive, key, stored.shape, shape)
        try:
            made, text = cast(stored, record.dtype, logical(wanted.dtype))
        except UsageError as error:
            raise UsageError(f"{archive.path}: {key.text}: does not fit: {error}", hint=error.hint) from None
        return _on_device(buffer_of(made, logical(wanted.dtype)), wanted), text


def _calls(events: Sequence[Event]) -> Iterator[tuple[str, int, list[Tensor | Plain | Lost]]]:
    """Each call of a module: its name, its number, and the leaves of its arguments and its result."""
    counts: dict[str, int] = {}
    stack: list[tuple[str, int, list[Tensor | Plain | Lost]]] = []
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
        else:
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
