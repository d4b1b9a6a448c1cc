"""What the zoo holds: mistakes of porting, each in one module, and ports that are right though different."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from tensorcap.workload import Workload
from tests.zoo.architectures import ALL_ARCHITECTURES, make

Kind = Literal[
    "activation",
    "axis",
    "bias",
    "cache",
    "capacity",
    "clip",
    "dropout",
    "expert_order",
    "factor",
    "frequencies",
    "groups",
    "heads",
    "interpolation",
    "mask",
    "missing_module",
    "norm_eps",
    "norm_one_plus",
    "offset",
    "order",
    "other_weights",
    "padding",
    "partial_sum",
    "permutation",
    "pooling",
    "position",
    "precision",
    "quantisation",
    "residual",
    "rope",
    "router_order",
    "shift",
    "softcap",
    "state",
    "statistics",
    "tied_head",
    "transposition",
    "window",
    "wiring",
]
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Mistake:
    """A mistake in one module.

    Attributes:
        name: Of the entry.
        architecture: A key of `ALL_ARCHITECTURES`.
        guilty: Site of the module whose own computation is wrong, `@root` for the model itself.
        kind: The hypothesis that explains it.
        plant: Makes the mistake in a model.
        also: Further sites that are as right an answer.
        also_kinds: Further hypotheses that are true of it.
    """

    name: str
    architecture: str
    guilty: str
    kind: Kind
    plant: Callable[[Any], None]
    also: tuple[str, ...] = ()
    also_kinds: tuple[Kind, ...] = ()

    def change(self, model: Any) -> Any:
        """The model with the mistake."""
        self.plant(model)
        return model


@dataclass(frozen=True)
class PortedMistake(Mistake):
    """A mistake in a port that somebody wrote anew, whose modules have other names than the reference's.

    `guilty` and `also` are sites of the reference, `plant` works on the port.

    Attributes:
        port: Makes the correct port of a model.
        in_words: The mistake as a user would call it.
        words: Of a report, any of which names the mistake; upper and lower case are the same.
    """

    port: Callable[[Any], Any] = field(kw_only=True)
    in_words: str = field(kw_only=True)
    words: tuple[str, ...] = field(kw_only=True)

    def change(self, model: Any) -> Any:
        """The port with the mistake."""
        port = self.port(model).eval()
        self.plant(port)
        return port


@dataclass(frozen=True)
class Correct:
    """A port that computes the same in another way.

    Attributes:
        name: Of the entry.
        architecture: A key of `ALL_ARCHITECTURES`.
        change: Makes the port of a model: changes it, or returns another.
        mapping: A map file's text, where layouts differ that nothing but the author can know.
        relaid: Ends of sites whose results have another layout, so that they are equal only through the
            mapping.
    """

    name: str
    architecture: str
    change: Callable[[Any], Any]
    mapping: str | None = None
    relaid: tuple[str, ...] = ()


Entry = Mistake | Correct


@dataclass(frozen=True)
class Pair:
    """A reference and a target, ready to run."""

    reference: Workload
    target: Workload


def build(entry: Entry, dtype: str) -> Pair:
    """Make the reference, in float32, and the target of an entry, in a dtype."""
    architecture = ALL_ARCHITECTURES[entry.architecture]
    target = entry.change(make(entry.architecture, dtype))
    return Pair(architecture.workload(make(entry.architecture)), architecture.workload(target))
