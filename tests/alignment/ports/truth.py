"""The true mapping of a port as literal data, and the records that it names.

A place is a record's key without its step, and without its slot where that is `output`. `{i}`, `{i+1}` and
`{i-1}` stand for the indices of layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorcap_formats.dtypes import Array

if TYPE_CHECKING:
    from torch import nn

LAYERS = 3
Convert = Callable[..., Any]  # the target's tensors -> the reference's, one or a list
Records = tuple[str, ...]  # key texts


def same(x: Array) -> Array:
    return x


def add(x: Array, y: Array) -> Array:
    return x.astype(np.float64) + y


def cut(*sizes: int) -> Callable[[Array], list[Array]]:
    return lambda x: np.split(x, np.cumsum(sizes)[:-1], axis=-1)


@dataclass(frozen=True)
class Pair:
    """Places that belong together, and how the target's tensors become the reference's."""

    reference: str | tuple[str, ...]
    target: str | tuple[str, ...]
    convert: Convert = same
    layers: Iterable[int] = range(LAYERS)

    def expanded(self) -> Iterator[tuple[Records, Records]]:
        sides = [(side,) if isinstance(side, str) else side for side in (self.reference, self.target)]
        is_folded = any("{" in place for side in sides for place in side)
        for i in self.layers if is_folded else (0,):
            yield tuple(key(p, i) for p in sides[0]), tuple(key(p, i) for p in sides[1])

    def converted(self, arrays: list[Array]) -> list[Array]:
        found = self.convert(*arrays)
        return list(found) if isinstance(found, (list, tuple)) else [found]


@dataclass(frozen=True)
class Truth:
    """What is true of all output records of a reference and its port.

    Attributes:
        pairs: What has to be found.
        extras: Further pairs that are true; one may be found, none has to be.
        alike: Places of a side whose tensor is always that of another place of it.
        reference_only: Places that have no counterpart.
        target_only: Places that have none.
        given: Results of the reference that the target has as an argument only; they may be found.
    """

    pairs: tuple[Pair, ...]
    extras: tuple[Pair, ...] = ()
    alike: Mapping[str, str] = field(default_factory=dict)
    reference_only: tuple[str, ...] = ()
    target_only: tuple[str, ...] = ()
    given: tuple[Pair, ...] = ()

    def originals(self) -> dict[str, str]:
        """The record that each record of `alike` equals."""
        return {key(a, i): key(b, i) for a, b in self.alike.items() for i in range(LAYERS)}

    def lone(self, side: str) -> set[str]:
        places = self.reference_only if side == "reference" else self.target_only
        return {key(place, i) for place in places for i in range(LAYERS)}


@dataclass(frozen=True)
class Port:
    """Two models with their inputs, which give the same, and the truth about them."""

    name: str
    reference: Callable[[], tuple[nn.Module, dict[str, Any]]]
    target: Callable[[Mapping[str, Any], dict[str, Any]], tuple[nn.Module, dict[str, Any]]]
    truth: Truth


def key(place: str, i: int) -> str:
    filled = re.sub(r"\{i([+-]\d+)?\}", lambda found: str(i + int(found[1] or 0)), place)
    return f"0/{filled}" if "/" in filled else f"0/{filled}/output"
