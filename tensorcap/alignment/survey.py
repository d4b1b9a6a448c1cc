"""What one archive says of its sites, folded over indices: forty templates instead of ten thousand sites.

A site's name is folded by its numbers: `model.layers.3.mlp` is the member `("3",)` of the template
`model.layers.{0}.mlp`. Members of a template have one role, so a mapping is found between templates, and a
table of numbers tells which member is which.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tensorcap.alignment.resolution import main_of
from tensorcap_formats.archive import Archive
from tensorcap_formats.records import Record
from tensorcap_formats.run_info import ModuleInfo

Index = tuple[str, ...]

HELD: Final = ("param.", "buffer.", "grad_param.")

# A whole component, or the end of one behind a low line (`layers_3`); names from elsewhere may have `/`.
_NUMBER: Final = re.compile(r"(?<![^./_])(?:0|[1-9]\d*)(?![^./])")


@dataclass(frozen=True, slots=True)
class Member:
    """One site.

    Attributes:
        site: Its name.
        result: The main tensor that its first call gave, or the first; None where it gave none.
        arguments: The tensors that its first call took, by name.
        parameters: Shapes of its own parameters, by name.
        module: Qualified name of its class; empty where it is not known.
        calls: How often it was called; None where that is not known.
        shards: The main tensors of all ranks, in order; empty where there is one rank only.
        further: The other tensors that its first call gave, by slot, those of all ranks in order.
        beside: Parameters, buffers and gradients, by slot: one tensor, or one of each rank.
    """

    site: str
    result: Record | None
    arguments: Mapping[str, Record]
    parameters: Mapping[str, tuple[int, ...]]
    module: str
    calls: int | None
    shards: tuple[Record, ...] = ()
    further: Mapping[str, tuple[Record, ...]] = field(default_factory=dict)
    beside: Mapping[str, tuple[Record, ...]] = field(default_factory=dict)

    @property
    def results(self) -> dict[str, Record]:
        """All tensors that its first call gave, by slot; of several ranks the first."""
        main = {self.result.key.slot: self.result} if self.result else {}
        return {**main, **{slot: records[0] for slot, records in self.further.items()}}

    @property
    def held(self) -> dict[str, tuple[Record, ...]]:
        """What the module holds: parameters, buffers, and what was added up for parameters as gradients."""
        return {slot: found for slot, found in self.beside.items() if slot.startswith(HELD)}


@dataclass(slots=True)
class Template:
    """Sites whose names differ in numbers only.

    Attributes:
        name: With `{0}`, `{1}` … for the numbers.
        members: By their numbers, in natural order.
    """

    name: str
    members: dict[Index, Member] = field(default_factory=dict)

    @property
    def parent(self) -> str:
        """The name of the template that it lies in; empty for the root's children."""
        return self.name.rpartition(".")[0]

    @property
    def first(self) -> Member:
        """The first member."""
        return next(iter(self.members.values()))


@dataclass(frozen=True, slots=True)
class Survey:
    """The sites of an archive.

    Attributes:
        templates: By name, in the order of the module tree, or of first results where there is none.
        never_called: Why sites that are registered were never called, "" where that is not known.
    """

    templates: Mapping[str, Template]
    never_called: Mapping[str, str]

    @classmethod
    def of(cls, archive: Archive) -> Survey:
        """Survey an archive."""
        results, arguments = _first_calls(archive)
        beside = _beside(archive)
        listed = archive.info.modules
        points = {point.site: point for point in archive.info.points if not point.slots}
        templates: dict[str, Template] = {}
        for site in dict.fromkeys([*listed, *results, *arguments, *beside]):
            module, point = listed.get(site), points.get(site)
            slots = results.get(site, {})
            firsts = {slot: records[0] for slot, records in slots.items()}
            main = main_of(firsts) or next(iter(firsts.values()), None)
            shards = slots[main.key.slot] if main else ()
            member = Member(
                site,
                main,
                arguments.get(site, {}),
                _shapes(module),
                module.class_name if module else "",
                point.calls if point else None,
                shards if len(shards) > 1 else (),
                {slot: records for slot, records in slots.items() if records[0] is not main},
                beside.get(site, {}),
            )
            name, index = fold(site)
            templates.setdefault(name, Template(name)).members[index] = member
        for template in templates.values():
            ordered = sorted(template.members.items(), key=lambda item: [*map(int, item[0])])
            template.members = dict(ordered)
        never = {site: point.reason for site, point in points.items() if point.status == "never-called"}
        return cls(templates, never)


def fold(site: str) -> tuple[str, Index]:
    """The template of a site, and its numbers.

    Example:
        >>> fold("model.layers.3.experts.12.w1")
        ('model.layers.{0}.experts.{1}.w1', ('3', '12'))
    """
    numbers = tuple(_NUMBER.findall(site))
    counter = iter(range(len(numbers)))
    return _NUMBER.sub(lambda _: f"{{{next(counter)}}}", site), numbers


def split_numbers(site: str) -> list[tuple[str, str | None]]:
    """The texts of a site with the number that follows each; None behind the last.

    Example:
        >>> split_numbers("layers.3.mlp")
        [('layers.', '3'), ('.mlp', None)]
    """
    texts, numbers = _NUMBER.split(site), _NUMBER.findall(site)
    return list(zip(texts, [*numbers, None], strict=True))


def _first_calls(
    archive: Archive,
) -> tuple[dict[str, dict[str, tuple[Record, ...]]], dict[str, dict[str, Record]]]:
    """Results of each site's first call, by slot, those of all ranks in order; and its arguments."""
    ranks: dict[str, dict[str, dict[int, Record]]] = {}
    arguments: dict[str, dict[str, Record]] = {}
    first: dict[str, tuple[int, int]] = {}
    for record in archive.records:
        key = record.key
        call = first.setdefault(key.site, (key.step, key.call))
        if (key.step, key.call) != call:
            continue
        kind, _, name = key.slot.partition(".")
        if kind == "output" or key.is_bare:
            ranks.setdefault(key.site, {}).setdefault(key.slot, {})[key.rank] = record
        elif kind == "input" and not key.rank:
            arguments.setdefault(key.site, {})[name] = record
    results = {
        site: {slot: tuple(found[r] for r in sorted(found)) for slot, found in slots.items() if 0 in found}
        for site, slots in ranks.items()
    }
    return results, arguments


def _beside(archive: Archive) -> dict[str, dict[str, tuple[Record, ...]]]:
    """What is neither result nor argument, by site and slot; of each rank, where ranks hold unlike ones."""
    found: dict[str, dict[str, dict[int, Record]]] = {}
    for record in sorted(archive.records, key=lambda r: (r.key.step, r.key.call)):  # calls go back in reverse
        key = record.key
        if not key.is_bare and key.slot.startswith((*HELD, "grad_")):
            found.setdefault(key.site, {}).setdefault(key.slot, {}).setdefault(key.rank, record)
    return {
        site: {
            slot: _unlike([ranks[rank] for rank in sorted(ranks)])
            for slot, ranks in slots.items()
            if 0 in ranks
        }
        for site, slots in found.items()
    }


def _unlike(records: Sequence[Record]) -> tuple[Record, ...]:
    is_same = len({(record.digest, record.shape) for record in records}) == 1 and records[0].digest
    return (records[0],) if is_same else tuple(records)


def _shapes(module: ModuleInfo | None) -> dict[str, tuple[int, ...]]:
    parameters = module.parameters.items() if module else ()
    return {name: tensor.shape for name, tensor in parameters if tensor.shape is not None}
