"""How far a search for what explains a suspect goes, and how far it went."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

MOST_WORK: Final = 1 << 36  # of a search, as `Search` counts it: half a minute to some minutes

Cause = TypeVar("Cause")


class Search:
    """A search among possible causes, each of which costs calls of a module.

    Work is counted in elements, and not in seconds, so that a search ends at the same cause everywhere.

    Attributes:
        left: Work that is left, in elements of tensors, arguments and results of calls; infinite if all
            causes are to be tried.
        possible: How many causes were found that are possible.
        tried: How many of them were tried.
    """

    def __init__(self, left: float = MOST_WORK) -> None:
        """Begin with no cause."""
        self.left = left
        self.possible = self.tried = 0

    @property
    def is_cut(self) -> bool:
        """Whether a possible cause was not tried."""
        return self.tried < self.possible

    def affordable(self, causes: Sequence[Cause], work: float) -> Iterator[Cause]:
        """Yield causes, the first ones first, until half of what is left is spent, so that others follow.

        Args:
            causes: Of one kind, the likeliest first.
            work: What each costs at least.
        """
        kept = self.left / 2
        for at, cause in enumerate(causes):
            if self.left - work < kept:
                self.possible += len(causes) - at
                return
            self.possible += 1
            self.tried += 1
            yield cause
