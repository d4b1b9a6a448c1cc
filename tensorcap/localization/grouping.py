"""Suspects with one explanation in many layers are one suspect: `layers.{3-5}` (LCL-61)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from tensorcap.comparison import label_of
from tensorcap.localization.suspect import Suspect, find_mistake
from tensorcap.wording import name_pattern

_ALIKE: Final = 8.0  # times another one's own error, that a suspect may have which was not diagnosed


def group_suspects(suspects: Iterable[Suspect]) -> list[Suspect]:
    """Put suspects with one explanation in many layers into one, at the place of the first of them.

    1. Alike are suspects whose modules and tensors have names that differ in numbers only, of one class, with
       one status.
    2. Of these, those belong together that have the same root cause, by a diagnosis that explains them.
    3. One that was not diagnosed, of which nothing is known but what R means, belongs to those before it if
       its own error is at most eight times larger or smaller than that of one of them.
    """
    groups: list[list[Suspect]] = []
    for suspect in suspects:
        group = next((g for g in groups if _belongs(suspect, g)), None)
        if group is None:
            groups.append([suspect])
        else:
            group.append(suspect)
    return [replace(first, others=tuple(others)) for first, *others in groups]


def kind_of_place(suspect: Suspect) -> tuple[object, ...]:
    """What suspects of one place in many layers have in common."""
    names = name_pattern(suspect.module), name_pattern(suspect.key)
    return (*names, suspect.class_name, suspect.status, suspect.by)


def _belongs(suspect: Suspect, group: Sequence[Suspect]) -> bool:
    if kind_of_place(suspect) != kind_of_place(group[0]) or find_mistake(group[0].examined) is None:
        return False
    said_by_ratio = "" if suspect.ratio is None else label_of(suspect.ratio)
    if suspect.examined is not None or suspect.cause not in ("", said_by_ratio):
        return suspect.cause == group[0].cause
    return any(_are_alike(suspect.own, one.own) for one in group if one.examined is not None)


def _are_alike(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return one <= _ALIKE * other and other <= _ALIKE * one
