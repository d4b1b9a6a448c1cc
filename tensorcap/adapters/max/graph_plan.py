"""What a graph of a MAX model is made of, what it tells, and the graph once compiled. Imports no MAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tensorcap.adapters.max.engine import InferenceSession, TensorType
    from tensorcap.adapters.max.trace_events import Event


class Place(NamedTuple):
    """Where a value can be exchanged: a tensor of a call, counted from 0 within one run of the graph."""

    name: str
    call: int
    slot: str


@dataclass(frozen=True)
class Told:
    """What a graph tells besides what the model gives.

    Attributes:
        names: Of the modules whose calls it tells of.
        inputs: Whether their arguments too; those of the model itself in any case.
        room: The kinds of values that have switches.
        prints: Whether it prints what it cannot give out.
    """

    names: frozenset[str]
    inputs: bool = True
    room: frozenset[str] = frozenset()
    prints: bool = False

    def covers(self, other: Told) -> bool:
        """Whether a graph that tells this can stand for one that tells the other."""
        is_more = self.names >= other.names and self.inputs >= other.inputs and self.room >= other.room
        return is_more and self.prints == other.prints


@dataclass(frozen=True)
class Built:
    """A graph of a model, compiled.

    Attributes:
        session: Which compiled it.
        artifact: What it made.
        events: What happens in the model, in order.
        own_slots: Of the model's own outputs, which come first.
        taps: How many further outputs it has.
        switches: Places whose values can be exchanged, with the type of what goes in. The graph has an input
            for each after the model's own, and behind those as many flags.
        seconds: What making it took.
        signature: Of the arguments that it is for.
        told: What it tells; None of a control.
        unused: Names of modules with weights of which none is in it.
    """

    session: InferenceSession
    artifact: Any
    events: Sequence[Event]
    own_slots: Sequence[str]
    taps: int
    switches: Mapping[Place, TensorType]
    seconds: float
    signature: tuple[Any, ...]
    told: Told | None
    unused: frozenset[str]


@dataclass
class Compiled:
    """What was compiled of a module, and by which session; holds no module.

    Attributes:
        session: Made when the first graph is compiled.
        graphs: All of them, so that none is compiled twice.
        tapped: Runs the model in the capture that is under way.
    """

    session: Any = None
    graphs: list[Built] = field(default_factory=list)
    tapped: Callable[[Sequence[Any], Mapping[str, Any]], list[Any]] | None = None


@dataclass(eq=False)
class GraphSource:
    """A module, and what a graph of it takes; `MaxModel` says what each attribute is."""

    module: Any
    input_types: Sequence[Any] | Mapping[str, Any] = ()
    weights: Mapping[str, Any] | None = None
    devices: Sequence[Any] = ()
    forward: Callable[..., Any] | None = None
    control: bool = True
    extensions: Sequence[Any] = ()
    compiled: Compiled = field(default_factory=Compiled, repr=False)
