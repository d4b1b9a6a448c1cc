"""Mutations that make a module do what another layer does, and other tables that positions are rotated by.

Layers of one class differ in their settings, and in the masks and tables of positions that they are given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from tensorcap.adapters import Absent, CallMutation, Edit, Replaced, Rerun
from tensorcap.diagnosis.attention import list_tables, read_angles
from tensorcap.diagnosis.context import PairContext, values_of
from tensorcap.diagnosis.mutations import Mutation, classify_setting
from tensorcap.diagnosis.values import Values
from tensorcap.wording import joined_name, name_pattern, some
from tensorcap_formats.keys import module_of
from tensorcap_formats.records import Record

_MOST_LAYERS: Final = 6  # that differ from each other, whose settings and arguments are taken
_MOST_SITES: Final = 24  # of layers that are looked at, the nearest ones
_PLACES: Final = ("mask", "position", "rotary", "cos", "sin", "freqs")  # words for what a layer is told by
_TABLES: Final = "position_embeddings"
_HINT: Final = "Which layers do what is a schedule: it is shifted, or this layer has the kind of another one."
_ROTATION_HINT: Final = "Rotary positions: of which channels, of which base, stretched, with which sign."


@dataclass
class _Other:
    """What another layer has otherwise.

    Attributes:
        settings: Of its module, by name.
        arguments: What it is given, by slot; None if it is not given that.
        sites: Of the layers that have all of that.
    """

    settings: Mapping[str, Any]
    arguments: Mapping[str, Record | None]
    sites: list[str] = field(default_factory=list)


def take_layers(context: PairContext, rerun: Rerun) -> Iterator[Mutation]:
    """Take the settings of another layer's module, and the masks and positions that this is given.

    1. Layers of the same class whose names differ in numbers are looked at, the nearest first.
    2. What such a layer has otherwise is taken together, and then settings, masks and positions alone.
    """
    for other in _list_others(context, rerun):
        where = joined_name(other.sites)
        edits = {slot: _edit(context, one) for slot, one in other.arguments.items()}
        masks = {slot: edit for slot, edit in edits.items() if "mask" in slot}
        positions = {slot: edit for slot, edit in edits.items() if slot not in masks}
        ways = [(other.settings, edits)]
        if sum(map(bool, (other.settings, masks, positions))) > 1:
            ways += [(other.settings, {}), ({}, masks), ({}, positions)]
        for settings, arguments in ways:
            if not settings and not arguments:
                continue
            parts = [
                f"{value!r} in the place of {rerun.settings[name]!r} for its setting {name}"
                for name, value in settings.items()
            ]
            parts += dict.fromkeys(slot.split(".")[1] for slot in arguments)
            text = f"with {some(parts)} of {where}" if arguments else f"with {some(parts)}, as {where} has it"
            kind = _classify(rerun, settings, arguments)
            facts: dict[str, Any] = {"as": list(other.sites)}
            if len(settings) == 1 and not arguments:
                ((name, value),) = settings.items()
                facts |= {"setting": name, "reference": rerun.settings[name], "target": value}
            yield Mutation(kind, text, _HINT, CallMutation(settings=settings, arguments=arguments), facts)


def take_tables(context: PairContext, rerun: Rerun) -> Iterator[Mutation]:
    """Take other tables of cosines and sines than those that the module is given, and none.

    A table that has each frequency twice, in halves or beside each other, is made again like that.
    """
    names = [f"input.{_TABLES}.{number}" for number in (0, 1)]
    records = _places_by_site(context).get(rerun.site, {})
    if any(name not in rerun.arguments or records.get(name) is None for name in names):
        return
    cosines, sines = (values_of(context.reference_archive, records[name]) for name in names)
    if cosines.shape != sines.shape or cosines.ndim != 3 or cosines.shape[-1] < 2:
        return
    angles = read_angles(cosines, sines)
    half = cosines.shape[-1] // 2
    is_twice = angles.shape[-1] != cosines.shape[-1]
    is_halves = is_twice and np.array_equal(cosines[..., :half], cosines[..., half:])

    def spread(table: Values) -> Values:
        if not is_twice:
            return table
        return np.concatenate((table, table), -1) if is_halves else np.repeat(table, 2, -1)

    channels = rerun.settings.get("head_dim") or context.head_dim or cosines.shape[-1]
    tables = {"sines of the opposite sign": angles.conj(), "no rotation": np.ones_like(angles)}
    tables |= {name: table for name, table, first in list_tables(angles, channels) if not first}
    for name, table in tables.items():
        sides = np.asarray(table.real), np.asarray(table.imag)
        edits: dict[str, Edit] = {n: Replaced(spread(side)) for n, side in zip(names, sides, strict=True)}
        how = f"with a rotation of {name}" if "channels" in name else f"with {name} in its {_TABLES}"
        call = CallMutation(arguments=edits)
        yield Mutation("attention-rotation", how, _ROTATION_HINT, call, {"table": name})


def _list_others(context: PairContext, rerun: Rerun) -> Iterator[_Other]:
    """List what other layers have otherwise, those that have the same together."""
    archive, own_site = context.reference_archive, rerun.site
    own = archive.info.modules.get(own_site)
    pattern = name_pattern(own_site)
    modules = list(archive.info.modules)
    if own is None or pattern == own_site:
        return
    at = modules.index(own_site)
    sites = [
        site
        for site, module in archive.info.modules.items()
        if site != own_site and name_pattern(site) == pattern and module.class_name == own.class_name
    ]
    given = _places_by_site(context)
    mine = given.get(own_site, {})
    others: dict[tuple[Any, ...], _Other] = {}
    order = {site: abs(place - at) for place, site in enumerate(modules)}
    for site in sorted(sites, key=order.__getitem__)[:_MOST_SITES]:
        settings = {
            name: value
            for name, value in rerun.settings_of(site).items()
            if name in rerun.settings and value != rerun.settings[name]
        }
        theirs = given.get(site, {})
        if not theirs and mine:  # it is not called, or not recorded
            theirs = mine
        differing = {
            slot: theirs.get(slot)
            for slot in dict.fromkeys((*mine, *theirs))
            if _contents(mine.get(slot)) != _contents(theirs.get(slot))
        }
        if settings or differing:
            key = (
                tuple(sorted((name, repr(value)) for name, value in settings.items())),
                tuple(sorted((slot, _contents(one)) for slot, one in differing.items())),
            )
            others.setdefault(key, _Other(settings, differing)).sites.append(site)
    yield from list(others.values())[:_MOST_LAYERS]


def _places_by_site(context: PairContext) -> dict[str, dict[str, Record]]:
    """Masks and positions that the reference gives modules in the step of the pair, by site and slot."""
    key = context.reference.key
    found: dict[str, dict[str, Record]] = {}
    for record in context.reference_archive.records:
        slot, own = record.key.slot, record.key
        is_of_step = (own.step, own.call, own.rank) == (key.step, 0, key.rank)
        if slot.startswith("input.") and is_of_step and record.stored and any(w in slot for w in _PLACES):
            found.setdefault(module_of(own.site), {})[slot] = record
    return found


def _contents(record: Record | None) -> str:
    return "" if record is None else f"{record.dtype.name} {record.shape} {record.digest}"


def _edit(context: PairContext, record: Record | None) -> Edit:
    if record is None:
        return Absent()
    archive = context.reference_archive
    is_inexact = record.dtype.is_inexact  # truth values and indices stay what they are
    return Replaced(values_of(archive, record) if is_inexact else archive.load(record))


def _classify(rerun: Rerun, settings: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """Name the kind of mistake by what is another layer's: one setting, the mask, positions, or more."""
    kinds = {classify_setting(name, rerun.class_name)[0] for name in settings}
    kinds |= {"attention-mask" if "mask" in slot else "attention-rotation" for slot in arguments}
    return kinds.pop() if len(kinds) == 1 else "layer-schedule"
