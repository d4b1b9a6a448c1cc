"""The second zoo in two halves: one to look at, and one that is run once, at the end."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Final

from tests.zoo.entry import Correct, Entry, Mistake
from tests.zoo.second.dev import decoders, diffusion, encoders, experts, recurrent, vision

_DEV: Final = (vision, diffusion, encoders, recurrent, experts, decoders)
_HELD_OUT: Final[tuple[ModuleType, ...]] = ()


def _entries(parts: tuple[ModuleType, ...]) -> Mapping[str, Entry]:
    return {entry.name: entry for part in parts for entry in (*part.MISTAKES, *part.CORRECT)}


HALVES: Final[Mapping[str, Mapping[str, Entry]]] = {"dev": _entries(_DEV), "held-out": _entries(_HELD_OUT)}

_ALL: Final = [entry for half in HALVES.values() for entry in half.values()]
SECOND_MISTAKES: Final = [entry for entry in _ALL if isinstance(entry, Mistake)]
SECOND_CORRECT: Final = [entry for entry in _ALL if isinstance(entry, Correct)]
