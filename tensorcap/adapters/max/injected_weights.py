"""Archived tensors as weights of a graph, which so keeps the inputs that its program gives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tensorcap.adapters.max.engine import TensorValue, Weight
from tensorcap.adapters.max.graph_feed import archived, planned
from tensorcap.adapters.max.graph_plan import Place
from tensorcap.adapters.max.trace_events import Event
from tensorcap.recording.substitution import Kind, Substitution
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import Key, module_site

_UNKNOWN_SHAPE: Final = "its shape is known only when the graph is run, and a weight has one before"


class Planted:
    """Puts a weight at each place of a graph for which a substitution has a tensor, in the first step.

    Attributes:
        values: The weights, by name.
    """

    def __init__(self, substitution: Substitution) -> None:
        self.values: dict[str, Any] = {}
        self._substitution = substitution
        self._casts: dict[Place, str] = {}

    def __call__(self, name: str, call: int, kind: Kind, slot: str, value: TensorValue) -> TensorValue:
        """Make an archived tensor a weight, if there is one for this value and its shape is known."""
        site = module_site(name)
        record = (self._substitution.planned(site, 0, call, kind) or {}).get(slot)
        if record is None or not all(str(dim).isdigit() for dim in value.shape):
            return value
        key, shape = Key(site, slot, 0, call), tuple(int(str(dim)) for dim in value.shape)
        try:
            made, text = archived(self._substitution, key, record, value.dtype, shape)
        except UsageError as error:
            self._substitution.failure = error
            raise
        weight = Weight(f"tensorcap.{key.text}", value.dtype, list(shape), value.device, align=1)
        self.values[weight.name] = made
        self._casts[Place(name, call, slot)] = text
        return TensorValue(weight)

    def tell(self, events: Sequence[Event]) -> None:
        """Tell the substitution what became of each tensor in a run."""
        for key, place, _, _ in planned(events, self._substitution, 0):
            if place in self._casts:
                self._substitution.note_injected(key, self._casts[place])
            else:
                self._substitution.note_left(key, _UNKNOWN_SHAPE)
