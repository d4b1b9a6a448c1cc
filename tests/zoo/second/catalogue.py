"""The second zoo in two halves: one to look at, and one that is run once, at the end.

Whoever writes what judges reads neither the entries of the held-out half nor what is said of them one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Final

from tests.zoo.entry import Correct, Entry, Mistake

_SUBJECTS: Final = ("vision", "diffusion", "encoders", "recurrent", "experts", "decoders")


def _entries(folder: str) -> Mapping[str, Entry]:
    parts = [import_module(f"tests.zoo.second.{folder}.{subject}") for subject in _SUBJECTS]
    return {entry.name: entry for part in parts for entry in (*part.MISTAKES, *part.CORRECT)}


HALVES: Final[Mapping[str, Mapping[str, Entry]]] = {"dev": _entries("dev"), "held-out": _entries("held_out")}

_ALL: Final = [entry for half in HALVES.values() for entry in half.values()]
SECOND_MISTAKES: Final = [entry for entry in _ALL if isinstance(entry, Mistake)]
SECOND_CORRECT: Final = [entry for entry in _ALL if isinstance(entry, Correct)]
