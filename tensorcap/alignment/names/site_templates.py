"""Site templates: the sites of an archive folded over their numbers, forty instead of ten thousand.

1. `Survey` lists the sites, each with its tensors and its class.
2. `collect_site_templates` folds numbers that count: `layers.3.mlp` and `layers.7.mlp` are members of one
   template, `net.0` and `net.2` of a sequence of unlike modules are not, nor are the `layer.0` and `layer.1`
   of a decoder block of which one is attention.
3. A site's main result goes under its name, every other one is a template of its own, `SITE/SLOT`.

`name_of` gives a template its canonical name: by rules, or without what wrappers add.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tensorcap.alignment.names.rule_files import wrapper_rules
from tensorcap.alignment.resolution import main_of
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import natural
from tensorcap_formats.records import Record
from tensorcap_formats.run_info import ModuleInfo

PARAMETER_SLOTS: Final = ("param.", "buffer.", "grad_param.")

# A whole component, or the end of one behind a low line (`layers_3`); names from elsewhere may have `/`.
_NUMBER: Final = re.compile(r"(?<![^./_])(?:0|[1-9]\d*)(?![^./])")


@dataclass(frozen=True, slots=True)
class Member:
    """One site.

    Attributes:
        site: Its name.
        result: The main tensor that its first call gave, or the first; None if it gave none.
        arguments: The tensors that its first call took, by name.
        parameters: Shapes of its own parameters, by name.
        module: Qualified name of its class; empty if it is not known.
        calls: How often it was called; None if that is not known.
        shards: The main tensors of all ranks, in order; empty if there is one rank only.
        other_results: The other tensors that its first call gave, by slot, those of all ranks in order.
        other_tensors: Parameters, buffers and gradients, by slot: one tensor, or one of each rank.
    """

    site: str
    result: Record | None
    arguments: Mapping[str, Record]
    parameters: Mapping[str, tuple[int, ...]]
    module: str
    calls: int | None
    shards: tuple[Record, ...] = ()
    other_results: Mapping[str, tuple[Record, ...]] = field(default_factory=dict)
    other_tensors: Mapping[str, tuple[Record, ...]] = field(default_factory=dict)

    @property
    def results(self) -> dict[str, Record]:
        """All tensors that its first call gave, by slot; of several ranks the first."""
        main = {self.result.key.slot: self.result} if self.result else {}
        return {**main, **{slot: records[0] for slot, records in self.other_results.items()}}

    @property
    def parameter_tensors(self) -> dict[str, tuple[Record, ...]]:
        """Parameters, buffers, and the gradients that were added up for parameters, by slot."""
        tensors = self.other_tensors.items()
        return {slot: records for slot, records in tensors if slot.startswith(PARAMETER_SLOTS)}


@dataclass(frozen=True, slots=True)
class Survey:
    """The sites of an archive.

    Attributes:
        members: By site.
        never_called: Why sites that are registered were never called, "" if that is not known.
        growing: Sites and slots of results that grow from step to step beside their module's main one, as
            what a cache holds.
    """

    members: Mapping[str, Member]
    never_called: Mapping[str, str]
    growing: frozenset[tuple[str, str]] = frozenset()

    @classmethod
    def of(cls, archive: Archive) -> Survey:
        """Survey an archive."""
        results, arguments = _first_calls(archive)
        other_tensors = _other_tensors(archive)
        listed = archive.info.modules
        points = {point.site: point for point in archive.info.points if not point.slots}
        members: dict[str, Member] = {}
        for site in dict.fromkeys([*listed, *results, *arguments, *other_tensors]):
            module, point = listed.get(site), points.get(site)
            slots = results.get(site, {})
            firsts = {slot: records[0] for slot, records in slots.items()}
            main = main_of(firsts) or next(iter(firsts.values()), None)
            shards = slots[main.key.slot] if main else ()
            members[site] = Member(
                site,
                main,
                arguments.get(site, {}),
                _shapes(module),
                module.class_name if module else "",
                point.calls if point else None,
                shards if len(shards) > 1 else (),
                {slot: records for slot, records in slots.items() if records[0] is not main},
                other_tensors.get(site, {}),
            )
        never = {site: point.reason for site, point in points.items() if point.status == "never-called"}
        return cls(members, never, frozenset(_growing(archive, members)))


def fold(site: str) -> tuple[str, tuple[str, ...]]:
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
    return {site: _in_rank_order(slots) for site, slots in ranks.items()}, arguments


def _growing(archive: Archive, members: Mapping[str, Member]) -> Iterator[tuple[str, str]]:
    """Sites and slots of results that hold more in the last step than in the first, unlike the main one."""
    last: dict[str, int] = {}
    for record in archive.records:
        last[record.key.site] = max(record.key.step, last.get(record.key.site, 0))
    sizes: dict[str, dict[str, int]] = defaultdict(dict)
    for record in archive.records:
        key = record.key
        if key.step == last[key.site] and not key.rank and key.slot.startswith("output"):
            sizes[key.site].setdefault(key.slot, record.size)
    for site, member in members.items():
        main, at_end = member.result, sizes.get(site, {})
        if (
            main is None
            or main.key.step == last[site]
            or at_end.get(main.key.slot, main.size + 1) > main.size
        ):
            continue
        for slot, records in member.other_results.items():
            if at_end.get(slot, 0) > records[0].size:
                yield site, slot


def _in_rank_order(slots: Mapping[str, Mapping[int, Record]]) -> dict[str, tuple[Record, ...]]:
    """The records of all ranks by slot, of slots that rank 0 has."""
    return {slot: tuple(ranks[r] for r in sorted(ranks)) for slot, ranks in slots.items() if 0 in ranks}


def _other_tensors(archive: Archive) -> dict[str, dict[str, tuple[Record, ...]]]:
    """What is neither result nor argument, by site and slot; of each rank, where ranks hold unlike ones."""
    ranks_by_slot: dict[str, dict[str, dict[int, Record]]] = {}
    for record in sorted(archive.records, key=lambda r: (r.key.step, r.key.call)):  # calls go back in reverse
        key = record.key
        if not key.is_bare and key.slot.startswith((*PARAMETER_SLOTS, "grad_")):
            ranks_by_slot.setdefault(key.site, {}).setdefault(key.slot, {}).setdefault(key.rank, record)
    return {
        site: {
            slot: records[:1] if are_equal(records) else records
            for slot, records in _in_rank_order(slots).items()
        }
        for site, slots in ranks_by_slot.items()
    }


def are_equal(records: Sequence[Record]) -> bool:
    """Whether tensors of several ranks have one digest and one shape."""
    return len({(record.digest, record.shape) for record in records}) == 1 and bool(records[0].digest)


def _shapes(module: ModuleInfo | None) -> dict[str, tuple[int, ...]]:
    parameters = module.parameters.items() if module else ()
    return {name: tensor.shape for name, tensor in parameters if tensor.shape is not None}


Index = tuple[int, ...]

_ALIKE: Final = 0.5  # of the names below two children of a list, shared by both
_FEW: Final = 4
_FAMILIES: Final = {
    "norm": ("norm", "ln"),
    "embedding": ("embed",),
    "convolution": ("conv",),
    "attention": ("attention", "attn"),
    "mlp": ("mlp", "feedforward", "ffn"),
    "activation": ("gelu", "silu", "relu", "activation", "swish", "tanh", "softmax", "sigmoid"),
    "dropout": ("dropout", "droppath", "identity"),
    "rotary": ("rotary", "rope"),
    "linear": ("linear", "dense", "conv1d", "projection"),
}


@dataclass(slots=True)
class SiteTemplate:
    """Sites that do the same, by their main result; or another result of such sites.

    Attributes:
        name: With `{0}`, `{1}` … for the numbers that count.
        members: By those numbers.
        order: When the first member gave its result; its place among names where no order is known.
        inside: Names of the site templates that lie inside its site.
        slot: Which result or parameter it is, as in its name; empty for the main result.
    """

    name: str
    members: dict[Index, Member] = field(default_factory=dict)
    order: int = 0
    inside: set[str] = field(default_factory=set)
    slot: str = ""

    @property
    def first(self) -> Member:
        """The first member."""
        return self.members[min(self.members)]

    @property
    def rank(self) -> int:
        """How many numbers count."""
        return len(next(iter(self.members)))

    @property
    def site(self) -> str:
        """The name without the slot."""
        return self.name.removesuffix(f"/{self.slot}") if self.slot else self.name

    @property
    def parent(self) -> str:
        """The name of the site template around it; of another result, that of its site.

        Of a parameter it is that of the module around its module, with the parameter's own.
        """
        if self.slot.startswith(PARAMETER_SLOTS):
            return f"{self.site.rpartition('.')[0]}/{self.slot}"
        return self.site if self.slot else self.name.rpartition(".")[0]

    @property
    def is_parameter(self) -> bool:
        """Whether it is parameters and buffers: parameters, or the tensors of a file without slots."""
        return self.slot.startswith(PARAMETER_SLOTS) or self.record.key.is_bare

    @property
    def family(self) -> str:
        """What kind of module it is by its class, or by its name where no class is known; or empty."""
        if self.slot:
            return ""
        name = (self.first.module or self.name).rpartition(".")[2].lower()
        fitting = (kind for kind, words in _FAMILIES.items() if any(word in name for word in words))
        return next(fitting, "")

    @property
    def parameters(self) -> list[tuple[int, ...]]:
        """Shapes of its own parameters, sizes sorted, the largest first."""
        return sorted((tuple(sorted(s)) for s in self.first.parameters.values()), reverse=True)

    @property
    def record(self) -> Record:
        """The result of the first member."""
        result = self.first.result
        assert result is not None
        return result


def collect_site_templates(survey: Survey) -> dict[str, SiteTemplate]:
    """Group all sites with results into templates, in natural order of names; other results come last."""
    members = {site: member for site, member in survey.members.items() if member.result}
    literal = _literal({site: (m.module, *sorted(m.parameters.items())) for site, m in members.items()})
    templates: dict[str, SiteTemplate] = {}
    for site in sorted(members, key=natural):
        name, index = _named(site, literal)
        templates.setdefault(name, SiteTemplate(name)).members[index] = members[site]
    other_results = {name: template for main in templates.values() for name, template in _other_results(main)}
    for template in (*templates.values(), *other_results.values()):
        template.order = min(m.result.order for m in template.members.values() if m.result)
    for template in templates.values():
        above = template.parent
        while above:
            if above in templates:
                templates[above].inside.add(template.name)
            above = above.rpartition(".")[0]
    return templates | other_results


def _other_results(main: SiteTemplate) -> Iterator[tuple[str, SiteTemplate]]:
    """Make the templates of the other results of a template's sites; they contain what it contains."""
    kinds = {
        slot: records[0].shape for m in main.members.values() for slot, records in m.other_results.items()
    }
    if not kinds:
        return
    literal, templates = _literal(kinds), dict[str, SiteTemplate]()
    for index, member in main.members.items():
        for slot in sorted(member.other_results, key=natural):
            records = member.other_results[slot]
            name, rest = _named(slot, literal, len(index))
            shards = records if len(records) > 1 else ()
            member_of_slot = Member(f"{member.site}/{slot}", records[0], {}, {}, "", member.calls, shards)
            template = SiteTemplate(f"{main.name}/{name}", inside=main.inside, slot=name)
            templates.setdefault(template.name, template).members[index + rest] = member_of_slot
    yield from templates.items()


def _named(site: str, literal: Mapping[str, frozenset[int]], before: int = 0) -> tuple[str, Index]:
    """The name of a site's template, and its numbers that count; `before` numbers come before them."""
    name, prefix = "", ""
    index: list[int] = []
    for text, number in split_numbers(site):
        name, prefix = name + text, prefix + text
        if number is None:
            break
        if int(number) in literal.get(prefix, ()):
            name += number
        else:
            name += f"{{{before + len(index)}}}"
            index.append(int(number))
        prefix += "#"
    return name, tuple(index)


def _literal(kinds_of: Mapping[str, tuple[object, ...]]) -> dict[str, frozenset[int]]:
    """For each list of modules, by its name with `#` for numbers, the numbers that are names.

    Numbers of a list count if what lies below some of its children is alike; those of single modules only if
    all are, and are many. Those of `ln_1` and `ln_2`, which hold next to nothing, are names.
    """
    below: dict[str, dict[int, set[tuple[object, ...]]]] = defaultdict(lambda: defaultdict(set))
    for site, kind_of in kinds_of.items():
        parts = split_numbers(site)
        for i in range(len(parts) - 1):
            prefix = "#".join(text for text, _ in parts[: i + 1])
            rest = "#".join(text for text, _ in parts[i + 1 :])
            below[prefix][int(parts[i][1] or 0)].add((rest, *(() if rest else kind_of)))
    literal: dict[str, frozenset[int]] = {}
    for prefix, children in below.items():
        kinds: list[list[int]] = []
        for number in sorted(children):
            kind = next((k for k in kinds if _are_alike(children[k[0]], children[number])), None)
            if kind is None:
                kinds.append([number])
            else:
                kind.append(number)
        are_single = all(not rest[0] for names in children.values() for rest in names)
        are_small = prefix.endswith("_") and max(map(len, children.values())) < _FEW
        is_mixed = len(kinds) > 1 and (are_single or len(kinds) == len(children))
        if is_mixed or are_small or (are_single and len(children) < _FEW):
            literal[prefix] = frozenset(children)
    return literal


def _are_alike(one: set[tuple[object, ...]], other: set[tuple[object, ...]]) -> bool:
    return len(one & other) >= _ALIKE * len(one | other)


def pattern(template: SiteTemplate, variables: Sequence[str], offsets: Sequence[int]) -> str:
    """A site template's name as a place with variables: `layers.{i+1}.mlp`."""

    def fill(number: re.Match[str]) -> str:
        at = int(number[1])
        offset = f"{offsets[at]:+d}" if offsets[at] else ""
        return f"{{{variables[at]}{offset}}}"

    return re.sub(r"\{(\d+)\}", fill, template.name)


Canonical = Callable[[str], str]

_MARK: Final = 1_000_000  # stands for a number of a site template; rules may add to it


def plain_name(site: str) -> str:
    """A site's name without what wrappers put before it, and without doubled components.

    Example:
        >>> plain_name("module._orig_mod.layers.2.o_proj.o_proj")
        'layers.2.o_proj'
    """
    return wrapper_rules().canonical(site)


def name_of(template: SiteTemplate, canonical: Canonical) -> tuple[str, Index]:
    """A site template's name, with `{0}` … for its numbers, and what is added to each of them.

    Example:
        >>> name_of(SiteTemplate("blocks.{0}.mlp"), lambda site: site.replace("blocks", "layers"))
        ('layers.{0}.mlp', (0,))
    """
    added: dict[int, int] = {}
    numbers = set(map(int, re.findall(r"\{(\d+)\}", template.site)))

    def unmark(mark: re.Match[str]) -> str:
        number = round(int(mark[0]) / _MARK) - 1
        if number not in numbers:  # of the name itself
            return mark[0]
        added[number] = int(mark[0]) - (number + 1) * _MARK
        return f"{{{number}}}"

    marked = re.sub(r"\{(\d+)\}", lambda number: str((int(number[1]) + 1) * _MARK), template.site)
    name = re.sub(r"(?<!\d)\d{6,9}(?!\d)", unmark, canonical(marked))
    in_slot = (0,) * template.slot.count("{")
    slot = f"/{template.slot}" if template.slot else ""
    return name + slot, tuple(added[number] for number in sorted(added)) + in_slot
