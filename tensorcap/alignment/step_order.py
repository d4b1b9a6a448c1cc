"""Steps and calls of a target in the reference's order, if threads made them, and chance numbered them."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from tensorcap.runs import is_inner
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import ROOT_SITE, Key, module_of
from tensorcap_formats.run_info import RunInfo
from tensorcap_formats.view import ArchiveView

_Inputs = tuple[str, ...]  # digests of what a module was given in a step, or in a call
_Calls = dict[tuple[str, int, int], int]  # numbers of calls by site, step and number


class ReorderedArchive(ArchiveView):
    """A target whose steps, or calls of some sites, have other numbers.

    Attributes:
        steps: The new number of each step that gets another.
        calls: The new number of each call that gets another.
    """

    def __init__(self, target: Archive, steps: dict[int, int], calls: _Calls | None = None) -> None:
        self.steps, self.calls = steps, calls or {}
        sources = {self._renumbered(record.key).text: (record,) for record in target.records}
        records = [replace(record, key=self._renumbered(record.key)) for record in target.records]
        values = {self._renumbered(Key.parse(text)).text: value for text, value in target.values.items()}
        super().__init__(target, records, sources, values=values, is_direct=target.is_direct)

    @cached_property
    def info(self) -> RunInfo:
        """What the target's metadata say; the lists by step are left out."""
        info = self.source.info
        return replace(info, phases=(), threads=()) if self.steps else info

    def _renumbered(self, key: Key) -> Key:
        if key.is_bare:
            return key
        call = self.calls.get((module_of(key.site), key.step, key.call), key.call)
        return replace(key, step=self.steps.get(key.step, key.step), call=call)


def in_thread_order(reference: Archive, target: Archive) -> Archive:
    """View a target with the numbers of steps and calls that the reference has of the same inputs."""
    return in_call_order(reference, in_step_order(reference, target))


def in_call_order(reference: Archive, target: Archive) -> Archive:
    """View a target with the number of each call that of the reference's with the same inputs (CMP-150).

    1. Only of sites that several threads called in one step in both runs, if digests prove equality.
    2. Each call of the reference in a step, in order, takes the first of the target that was given the same.
    3. What is left keeps its order.
    """
    runs = reference, target
    sites = set(reference.info.threaded_sites) & set(target.info.threaded_sites)
    if not sites or not all(run.trusts_digests for run in runs):
        return target
    ours, theirs = (_inputs_by_call(run, sites) for run in runs)
    calls: _Calls = {}
    for place in ours.keys() & theirs.keys():
        site, step = place
        for number, other in _pair_by_inputs(ours[place], theirs[place]).items():
            if number != other:
                calls[site, step, number] = other
    return ReorderedArchive(target, {}, calls) if calls else target


def in_step_order(reference: Archive, target: Archive) -> Archive:
    """View a target with the number of each step that of the reference with the same inputs (CMP-34).

    1. Only if both runs say that several threads began steps, and their digests prove equality.
    2. Each step of the reference, in order, takes the first step of the target that was given the same.
    3. What is left keeps its order.
    """
    runs = reference, target
    if not all(run.trusts_digests and len(set(run.info.threads)) > 1 for run in runs):
        return target
    pairs = _pair_by_inputs(*map(_inputs_by_step, runs))
    steps = {step: number for step, number in pairs.items() if step != number}
    return ReorderedArchive(target, steps) if steps else target


def _pair_by_inputs(ours: dict[int, _Inputs], theirs: dict[int, _Inputs]) -> dict[int, int]:
    """The reference's numbers by the target's: the first that is free of equal inputs, the rest in order."""
    free = dict(theirs)
    pairs: dict[int, int] = {}
    for number, inputs in ours.items():
        partner = next((other for other, digests in free.items() if digests == inputs), None)
        if partner is not None:
            pairs[partner] = number
            del free[partner]
    used = set(pairs.values())
    left = [number for number in sorted({*ours, *theirs}) if number not in used]
    pairs.update(zip(free, left, strict=False))
    return pairs


def _inputs_by_call(archive: Archive, sites: set[str]) -> dict[tuple[str, int], dict[int, _Inputs]]:
    """What some sites were given in each call, by site and step."""
    calls: dict[tuple[str, int], dict[int, list[str]]] = {}
    for record in archive.records:
        key = record.key
        if not key.is_bare and key.site in sites and not key.rank and key.slot.startswith("input."):
            calls.setdefault((key.site, key.step), {}).setdefault(key.call, []).append(record.digest)
    return {
        place: {call: tuple(sorted(digests)) for call, digests in sorted(of_place.items())}
        for place, of_place in calls.items()
    }


def _inputs_by_step(archive: Archive) -> dict[int, _Inputs]:
    """What the model was given in each step, whatever the arguments are called."""
    steps: dict[int, list[str]] = {}
    for record in archive.records:
        key = record.key
        if not key.is_bare and key.site == ROOT_SITE and not is_inner(key) and key.slot.startswith("input."):
            steps.setdefault(key.step, []).append(record.digest)
    return {step: tuple(sorted(digests)) for step, digests in sorted(steps.items())}
