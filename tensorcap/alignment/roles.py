"""Roles: results that are the same in every layer, apart from those that only share a name but for a number.

A site's main result goes under the site's name, every other one is a role of its own, `SITE/SLOT`.

`layers.3.mlp` and `layers.7.mlp` have one role; `net.0` and `net.2` of a sequence of unlike modules have two,
and so have a decoder block's `layer.0` and `layer.1`, of which one is attention and one is not.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tensorcap.alignment.survey import HELD, Member, Survey, split_numbers
from tensorcap_formats.keys import natural
from tensorcap_formats.records import Record

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
class Role:
    """Sites that do the same, by their main result; or another result of such sites.

    Attributes:
        name: With `{0}`, `{1}` … for the numbers that count.
        members: By those numbers.
        order: When the first member gave its result; its place among names where no order is known.
        inside: Names of the roles that lie inside its site.
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
        """The name of the role around it; of another result, that of its site.

        Of a parameter it is that of the module around its module, with the parameter's own.
        """
        if self.slot.startswith(HELD):
            return f"{self.site.rpartition('.')[0]}/{self.slot}"
        return self.site if self.slot else self.name.rpartition(".")[0]

    @property
    def is_held(self) -> bool:
        """Whether it is what modules hold: parameters, or the tensors of a file without slots."""
        return self.slot.startswith(HELD) or self.record.key.is_bare

    @property
    def family(self) -> str:
        """What kind of module it is by its class, or by its name where no class is known; or empty."""
        if self.slot:
            return ""
        said = (self.first.module or self.name).rpartition(".")[2].lower()
        fitting = (kind for kind, words in _FAMILIES.items() if any(word in said for word in words))
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


def roles_of(survey: Survey) -> dict[str, Role]:
    """The roles of all sites that gave something, in natural order of names; other results come last."""
    members = {m.site: m for t in survey.templates.values() for m in t.members.values() if m.result}
    literal = _literal({site: (m.module, *sorted(m.parameters.items())) for site, m in members.items()})
    found: dict[str, Role] = {}
    for site in sorted(members, key=natural):
        name, index = _named(site, literal)
        found.setdefault(name, Role(name)).members[index] = members[site]
    further = {name: role for main in found.values() for name, role in _further(main)}
    for role in (*found.values(), *further.values()):
        role.order = min(m.result.order for m in role.members.values() if m.result)
    for role in found.values():
        above = role.parent
        while above:
            if above in found:
                found[above].inside.add(role.name)
            above = above.rpartition(".")[0]
    return found | further


def _further(main: Role) -> Iterator[tuple[str, Role]]:
    """The roles of the other results of a role's sites; what lies inside those lies inside it too."""
    kinds = {slot: records[0].shape for m in main.members.values() for slot, records in m.further.items()}
    if not kinds:
        return
    literal, found = _literal(kinds), dict[str, Role]()
    for index, member in main.members.items():
        for slot in sorted(member.further, key=natural):
            records = member.further[slot]
            name, rest = _named(slot, literal, len(index))
            shards = records if len(records) > 1 else ()
            made = Member(f"{member.site}/{slot}", records[0], {}, {}, "", member.calls, shards)
            role = Role(f"{main.name}/{name}", inside=main.inside, slot=name)
            found.setdefault(role.name, role).members[index + rest] = made
    yield from found.items()


def _named(site: str, literal: Mapping[str, frozenset[int]], before: int = 0) -> tuple[str, Index]:
    """The name of a site's role, and its numbers that count; those before it have numbers of their own."""
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
    found: dict[str, frozenset[int]] = {}
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
            found[prefix] = frozenset(children)
    return found


def _are_alike(one: set[tuple[object, ...]], other: set[tuple[object, ...]]) -> bool:
    return len(one & other) >= _ALIKE * len(one | other)


def pattern(role: Role, variables: Sequence[str], offsets: Sequence[int]) -> str:
    """A role's name as a place with variables: `layers.{i+1}.mlp`."""

    def fill(found: re.Match[str]) -> str:
        at = int(found[1])
        offset = f"{offsets[at]:+d}" if offsets[at] else ""
        return f"{{{variables[at]}{offset}}}"

    return re.sub(r"\{(\d+)\}", fill, role.name)
