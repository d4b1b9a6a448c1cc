"""Which of several processes this is that run one model together."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tensorcap.adapters import Adapter


@dataclass(frozen=True, slots=True)
class ProcessRank:
    """A process among those of one run.

    Attributes:
        rank: Its number, from 0.
        count: How many there are, 2 at least.
    """

    rank: int
    count: int


def process_rank(adapter: Adapter | None = None) -> ProcessRank | None:
    """Which of several processes this is; None if it is the only one.

    What the framework knows counts, else `RANK` and `WORLD_SIZE`, which launchers such as torchrun set
    before a script begins.

    Args:
        adapter: The adapter of the model; None before there is one.
    """
    known = None if adapter is None else adapter.process_rank()
    if known is None:
        texts = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
        if not all(text.isascii() and text.isdigit() for text in texts):
            return None
        known = int(texts[0]), int(texts[1])
    rank = ProcessRank(*known)
    return rank if rank.count > 1 and rank.rank < rank.count else None
