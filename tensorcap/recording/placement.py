"""What the tensors of one rank are parts of, for the archive of that rank (RNK-2, RNK-3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Placement:
    """What a rank's tensor is a part of.

    Attributes:
        rule: How the tensors of all ranks are put together, as `specs/ranks.md` has it: `concat -1`.
        known: How that is known: the class of a parallel layer, and the attribute that says it.
        mesh: Sizes by the names of the mesh's axes, the outermost first; () for one axis of all ranks.
        ranks: The ranks of the mesh, the last axis varying fastest; () for all.
        shape: Shape of the whole tensor; None if it is not known.
    """

    rule: str
    known: str
    mesh: tuple[tuple[str, int], ...] = ()
    ranks: tuple[int, ...] = ()
    shape: tuple[int, ...] | None = None

    @property
    def rules(self) -> tuple[str, ...]:
        """The rule along each axis of the mesh."""
        return tuple(part.rpartition(":")[2].strip() for part in self.rule.split(";"))

    def describe(self) -> dict[str, Any]:
        """The placement as an entry of the run metadata, without its keys."""
        entry: dict[str, Any] = {"rule": self.rule, "known": self.known}
        if self.mesh:
            entry["mesh"] = {"sizes": dict(self.mesh), "ranks": list(self.ranks)}
        return entry if self.shape is None else {**entry, "shape": list(self.shape)}


class PlacementLog:
    """The placements of a run, by key text."""

    def __init__(self) -> None:
        self._keys: dict[Placement, list[str]] = {}

    def add(self, key_text: str, placement: Placement) -> None:
        """Note the placement of a record."""
        self._keys.setdefault(placement, []).append(key_text)

    def describe(self) -> list[dict[str, Any]]:
        """The entries of the run metadata; records of one placement are together."""
        return [{**placement.describe(), "keys": keys} for placement, keys in self._keys.items()]
