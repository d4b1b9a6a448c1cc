"""Data of the graphs of a MAX model: source, instrumentation, compiled graph. Imports no MAX."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tensorcap.adapters.max.engine import InferenceSession, TensorType
    from tensorcap.adapters.max.trace_events import Event


class InjectionPoint(NamedTuple):
    """A tensor of a call that may be replaced; calls are counted from 0 within one run of the graph."""

    name: str
    call: int
    slot: str


@dataclass(frozen=True)
class Instrumentation:
    """The taps and switches that are added to a graph.

    Attributes:
        names: The modules whose calls are traced, by name.
        inputs: Whether their arguments are given out too; those of the model itself always are.
        injectable: The kinds of values, `input` or `output`, that get switches.
        prints: Whether the graph prints the values that it cannot give out.
    """

    names: frozenset[str]
    inputs: bool = True
    injectable: frozenset[str] = frozenset()
    prints: bool = False

    @classmethod
    def of_rerun(cls, names: Collection[str], *, prints: bool = False) -> Instrumentation:
        """What a graph needs for all that runs a model on archived values, so that one is compiled for all.

        Injection replaces arguments, and bisection results; a switch costs less than a further graph.
        """
        return cls(frozenset(names), True, frozenset({"input", "output"}), prints)

    def covers(self, other: Instrumentation) -> bool:
        """Whether a graph with this instrumentation can stand for one with the other."""
        has_all = self.names >= other.names and self.inputs >= other.inputs
        return has_all and self.injectable >= other.injectable and self.prints == other.prints


@dataclass(frozen=True)
class CompiledGraph:
    """A compiled graph of a model.

    Attributes:
        text: What it is, for whoever waits: its model, and what is added.
        session: The session that compiled it.
        artifact: The result of compiling it.
        events: The trace of the model, in order.
        own_slots: The slots of the model's own outputs, which come first.
        taps: How many further outputs the graph has.
        switches: The points at which a value can be replaced, each with the type of the replacement. The
            graph has an input for each after the model's own, and behind those as many flags.
        seconds: How long tracing and compiling took.
        signature: The signature of the inputs that it is for.
        instrumentation: What is added to it; None for a control.
        unused: The names of modules that have weights of which none is in the graph.
        is_cached: Whether MAX had compiled it before, in this process or another one.
    """

    text: str
    session: InferenceSession
    artifact: Any
    events: Sequence[Event]
    own_slots: Sequence[str]
    taps: int
    switches: Mapping[InjectionPoint, TensorType]
    seconds: float
    signature: tuple[Any, ...]
    instrumentation: Instrumentation | None
    unused: frozenset[str]
    is_cached: bool


@dataclass
class CompileCache:
    """The graphs that were compiled of a module, and their session; holds no module.

    Attributes:
        session: Made when the first graph is compiled.
        graphs: All of them, so that none is compiled twice.
        tapped_run: Runs the model in the capture that is under way; None outside of one.
    """

    session: Any = None
    graphs: list[CompiledGraph] = field(default_factory=list)
    tapped_run: Callable[[Sequence[Any], Mapping[str, Any]], list[Any]] | None = None


@dataclass(eq=False)
class GraphSource:
    """A module and the settings of its graphs; `MaxModel` describes each attribute."""

    module: Any
    input_types: Sequence[Any] | Mapping[str, Any] = ()
    weights: Mapping[str, Any] | None = None
    devices: Sequence[Any] = ()
    forward: Callable[..., Any] | None = None
    control: bool = True
    extensions: Sequence[Any] = ()
    keeps_state: bool = True
    left_out_weights: Sequence[str] = ()
    compiled: CompileCache = field(default_factory=CompileCache, repr=False)


def source_of(model: Any) -> GraphSource:
    """The model itself; of a module, a source with no settings."""
    return model if isinstance(model, GraphSource) else GraphSource(model)
