"""Everything that the zoos hold, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tests.zoo.correct import CORRECT
from tests.zoo.dense_mistakes import DENSE_MISTAKES
from tests.zoo.entry import Entry
from tests.zoo.expert_mistakes import EXPERT_MISTAKES
from tests.zoo.fifth.catalogue import FIFTH_ENTRIES
from tests.zoo.fourth.catalogue import FOURTH_ENTRIES
from tests.zoo.gemma_mistakes import GEMMA_MISTAKES
from tests.zoo.other_mistakes import OTHER_MISTAKES
from tests.zoo.second.catalogue import HALVES
from tests.zoo.third.catalogue import THIRD_ENTRIES

MISTAKES: Final = (*DENSE_MISTAKES, *GEMMA_MISTAKES, *EXPERT_MISTAKES, *OTHER_MISTAKES)
_ALL: Final[tuple[Entry, ...]] = (*MISTAKES, *CORRECT)
ENTRIES: Final[Mapping[str, Entry]] = {entry.name: entry for entry in _ALL}

# Of all zoos.
ALL_ENTRIES: Final[Mapping[str, Entry]] = {
    **ENTRIES,
    **HALVES["dev"],
    **HALVES["held-out"],
    **THIRD_ENTRIES,
    **FOURTH_ENTRIES,
    **FIFTH_ENTRIES,
}
