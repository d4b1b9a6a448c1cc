"""Steps of a target in the reference's order, if threads called the model, so that chance numbered them."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from tensorcap.runs import is_inner
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import ROOT_SITE, Key
from tensorcap_formats.run_info import RunInfo
from tensorcap_formats.view import ArchiveView

_Inputs = tuple[str, ...]  # digests of what the model was given in a step


class ReorderedArchive(ArchiveView):
    """A target whose steps have other numbers.

    Attributes:
        steps: The new number of each step that gets another.
    """

    def __init__(self, target: Archive, steps: dict[int, int]) -> None:
        self.steps = steps
        sources = {self._renumbered(record.key).text: (record,) for record in target.records}
        records = [replace(record, key=self._renumbered(record.key)) for record in target.records]
        values = {self._renumbered(Key.parse(text)).text: value for text, value in target.values.items()}
        super().__init__(target, records, sources, values=values, is_direct=target.is_direct)

    @cached_property
    def info(self) -> RunInfo:
        """What the target's metadata say; the lists by step are left out."""
        return replace(self.source.info, phases=(), threads=())

    def _renumbered(self, key: Key) -> Key:
        return key if key.is_bare else replace(key, step=self.steps.get(key.step, key.step))


def in_step_order(reference: Archive, target: Archive) -> Archive:
    """View a target with the number of each step that of the reference with the same inputs (CMP-34).

    1. Only if both runs say that several threads began steps, and their digests prove equality.
    2. Each step of the reference, in order, takes the first step of the target that was given the same.
    3. What is left keeps its order.
    """
    runs = reference, target
    if not all(run.trusts_digests and len(set(run.info.threads)) > 1 for run in runs):
        return target
    ours, theirs = map(_inputs_by_step, runs)
    free = dict(theirs)
    pairs: dict[int, int] = {}
    for step, inputs in ours.items():
        partner = next((other for other, given in free.items() if given == inputs), None)
        if partner is not None:
            pairs[partner] = step
            del free[partner]
    used = set(pairs.values())
    left = [step for step in sorted({*ours, *theirs}) if step not in used]
    pairs.update(zip(free, left, strict=False))
    steps = {step: number for step, number in pairs.items() if step != number}
    return ReorderedArchive(target, steps) if steps else target


def _inputs_by_step(archive: Archive) -> dict[int, _Inputs]:
    """What the model was given in each step, whatever the arguments are called."""
    steps: dict[int, list[str]] = {}
    for record in archive.records:
        key = record.key
        if not key.is_bare and key.site == ROOT_SITE and not is_inner(key) and key.slot.startswith("input."):
            steps.setdefault(key.step, []).append(record.digest)
    return {step: tuple(sorted(digests)) for step, digests in sorted(steps.items())}
