"""Which op of the reference is which of the target, where one run needs ops that the other does not (CMP-70).

Ops of one name are numbered within a module's call, so that one more of them, a cast say, would shift all
that follow. The ops and the calls of modules in a call are two sequences: what they have in common, in
order, is paired.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

from tensorcap.verdicts.ops import Ops, ops_of, places
from tensorcap.verdicts.places import is_inner
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import ROOT_SITE, Key, module_of
from tensorcap_formats.records import Record

_Call = tuple[int, int, str, int]  # rank, step, site of the module, number of the call


class _Step(NamedTuple):
    """What is passed in a call of a module: an op, or the call of a module within it.

    Attributes:
        name: Name of the op, or the site of the module.
        shapes: Shapes of the op's records; of a module none.
        place: The op's place; "" for a module.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    place: str


def partner_texts(reference: Archive, target: Archive) -> Callable[[Record], str | None]:
    """How to find the key text of the target's record for one of the reference's; None where it has none."""
    ours, theirs = ops_of(reference), ops_of(target)
    partners = pair_ops(reference, ours, target, theirs)

    def find(record: Record) -> str | None:
        if ours and theirs and (place := record.key.where) in ours:
            return f"{partners[place]}/{record.key.slot}" if place in partners else None
        text = record.key.text
        return text if text in target else target.canonical(text)

    return find


def pair_ops(reference: Archive, ours: Ops, target: Archive, theirs: Ops) -> dict[str, str]:
    """The place of the target's op by that of the reference's, of all that have a partner.

    Args:
        reference: The trusted archive.
        ours: Its ops.
        target: The archive under test.
        theirs: Its ops.
    """
    if not (ours and theirs):
        return {}
    trusted, tested = _sequences(reference, ours, target.info.aliases), _sequences(target, theirs, {})
    found: dict[str, str] = {}
    for call, steps in trusted.items():
        others = tested.get(call, ())
        if len(steps) == len(others) and all(a[:2] == b[:2] for a, b in zip(steps, others, strict=True)):
            found.update((a.place, b.place) for a, b in zip(steps, others, strict=True))
        else:
            found.update(_common(steps, others))
    found.pop("", None)
    return found


def _common(steps: Sequence[_Step], others: Sequence[_Step]) -> dict[str, str]:
    """What two sequences have in common by name and shapes, and what is between by name alone."""
    found: dict[str, str] = {}
    matcher = SequenceMatcher(None, [s[:2] for s in steps], [s[:2] for s in others], autojunk=False)
    for tag, i, j, k, m in matcher.get_opcodes():
        if tag == "equal":
            found.update((a.place, b.place) for a, b in zip(steps[i:j], others[k:m], strict=True))
        elif tag == "replace":
            rest, other = steps[i:j], others[k:m]
            by_name = SequenceMatcher(None, [s.name for s in rest], [s.name for s in other], autojunk=False)
            for block in by_name.get_matching_blocks():
                for n in range(block.size):
                    found[rest[block.a + n].place] = other[block.b + n].place
    return found


def _sequences(archive: Archive, ops: Ops, aliases: Mapping[str, str]) -> dict[_Call, list[_Step]]:
    """What is passed in each call of a module that has ops, in execution order.

    Args:
        archive: Of the run.
        ops: Its ops.
        aliases: Names of modules under which the other run has them, by those of this one.
    """
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for record in archive.records:
        if is_inner(record.key):
            shapes.setdefault(record.key.where, []).append(record.shape)
    of_ops = set(places(archive, ops))
    numbers: dict[tuple[int, int, str], int] = {}  # of the call that is under way, as far as records tell
    found: dict[_Call, list[_Step]] = {}
    seen: set[str] = set()
    for record in archive.records:
        key = record.key
        place = key.where
        if key.is_bare or place in seen:
            continue
        seen.add(place)
        if place in of_ops:
            module = module_of(key.site)
            call = (key.rank, key.step, aliases.get(module, module), ops.module_call(place))
            step = _Step(ops.op(place), tuple(shapes[place]), place)
            found.setdefault(call, []).append(step)
        elif not is_inner(key):
            around = _around(key, numbers)
            if around is not None:
                rank, number_of_step, module, number = around
                call = (rank, number_of_step, aliases.get(module, module), number)
                found.setdefault(call, []).append(_Step(aliases.get(key.site, key.site), (), ""))
            numbers[key.rank, key.step, key.site] = key.call
    return found


def _around(key: Key, numbers: Mapping[tuple[int, int, str], int]) -> _Call | None:
    """The call of the nearest module around a module that was called; None for the root."""
    site = key.site
    while site != ROOT_SITE:
        site = site.rpartition(".")[0] or ROOT_SITE
        number = numbers.get((key.rank, key.step, site))
        if number is not None:
            return key.rank, key.step, site, number
    return None
