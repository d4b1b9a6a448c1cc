"""Candidates: site templates that may belong together, alone or fused, and how similar two templates are."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tensorcap.alignment.layout import Fit, Shape
from tensorcap.alignment.mapping import Evidence
from tensorcap.alignment.match.fingerprints import Agreement
from tensorcap.alignment.match.match_weights import WEIGHTS
from tensorcap.alignment.names import Index, SiteTemplate, name_of, plain_name
from tensorcap_formats.records import Record

Item = TypeVar("Item")
Place = tuple[Index, Index]  # numbers of the reference's member, and of the target's
Named = tuple[SiteTemplate, Index]  # a site template, and what its rules add to its numbers


@dataclass(slots=True)
class Candidate:
    """A site template of the reference that may be a site template of the target.

    Attributes:
        reference: The one's name.
        target: The other's.
        places: Members that would belong together.
        agreeing: How the values of some of them agree.
        is_named: Whether their names are equal, by rules.
        is_by_rule: Whether they are so by rules only.
        role: What the names of both say that they are, as a query; "" if that is not what pairs them.
        has_equal_parameters: Whether its modules alone hold these parameters, bit for bit or rounded.
        because: What else speaks for it, in words; "" if names and values alone do.
        is_tied: Whether others have equal values, so that only the order of results decides.
        similarity: What structure, shapes and arguments say, in nats.
    """

    reference: str
    target: str
    places: tuple[Place, ...]
    agreeing: dict[Place, Agreement] = field(default_factory=dict)
    is_named: bool = False
    is_by_rule: bool = False
    role: str = ""
    has_equal_parameters: bool = False
    because: str = ""
    is_tied: bool = False
    similarity: float = 0.0

    @property
    def nats(self) -> float:
        """What the values prove."""
        return sum(agreement.nats for agreement in self.agreeing.values())

    @property
    def score(self) -> float:
        """What speaks for it altogether."""
        return self.nats + self.similarity

    @property
    def order(self) -> tuple[float, str, str]:
        """The better first; names settle nothing, they only make the order the same every time."""
        return -self.score, self.reference, self.target

    @property
    def evidence(self) -> Evidence:
        """What it is known by."""
        if self.is_named:
            return "rule" if self.is_by_rule else "name"
        is_proven = self.has_equal_parameters or (self.nats >= WEIGHTS.proof and not self.is_tied)
        return "values" if is_proven else "structure"


@dataclass(frozen=True, slots=True)
class Placed:
    """A layout, and the order in which it takes the target's tensors.

    Attributes:
        fit: The layout.
        order: The order.
    """

    fit: Fit
    order: tuple[int, ...]

    @property
    def key(self) -> object:
        """What makes it the same layout as another one."""
        return self.fit.steps, self.fit.order, self.order

    def of(
        self, pair: tuple[Sequence[Record], Sequence[Record]]
    ) -> tuple[Sequence[Record], Sequence[Record]]:
        """The tensors of both sides, the target's in that order."""
        return pair[0], [pair[1][i] for i in self.order]


@dataclass(frozen=True, slots=True)
class Fusion:
    """Parts and the whole that they make.

    Attributes:
        is_split: Whether the parts are the reference's, so that the target's tensor is to be split.
        parts: Names of the site templates that are parts, sorted; of one site template if `axis` is not None.
        axis: Which number of that site template counts the parts; None if each part is a site template.
        whole: Name of the site template that is the whole.
        places: The sites of the parts, and of the whole, by the whole's numbers.
        shift: By how much the numbers of parts are ahead of the whole's.
        agreeing: How the values of some of them agree.
        is_sum: Whether the parts are added up, not joined.
        is_tied: Whether others have equal values, so that only the order of results decides.
        is_by_rule: Whether it follows from a rule of names.
        similarity: What nesting, classes and parameters say, in nats.
        fit: The layout; None if none is certain.
        order: In which the layout takes or gives the parts.
        others: The layouts of members that values give another one, by the whole's numbers.
    """

    is_split: bool
    parts: tuple[str, ...]
    axis: int | None
    whole: str
    places: Mapping[Index, tuple[tuple[str, ...], str]]
    shift: Index
    agreeing: Mapping[Index, Agreement] = field(default_factory=dict)
    is_sum: bool = False
    is_tied: bool = False
    is_by_rule: bool = False
    similarity: float = 0.0
    fit: Fit | None = None
    order: tuple[int, ...] = ()
    others: Mapping[Index, Placed] = field(default_factory=dict)

    @property
    def score(self) -> float:
        """What speaks for it altogether."""
        return self.nats + self.similarity

    @property
    def nats(self) -> float:
        """What the values prove."""
        return sum(agreement.nats for agreement in self.agreeing.values())

    def turned(self, pair: tuple[Item, Item]) -> tuple[Item, Item]:
        """What belongs to the parts and to the whole, in the order reference, target; or back."""
        return pair if self.is_split else pair[::-1]

    @property
    def sites(self) -> set[tuple[int, str]]:
        """All sites, with the number of their side."""
        part = 0 if self.is_split else 1
        return {
            each
            for parts, whole in self.places.values()
            for each in (*((part, site) for site in parts), (1 - part, whole))
        }


@dataclass(frozen=True, slots=True)
class FoldedWeights:
    """A module of the reference that is one with the norm behind it in the target.

    Attributes:
        site: The module.
        target: The target's, which has the result of that norm.
    """

    site: str
    target: str


def shift_between(a: Index, b: Index) -> Index | Place:
    """What is added to one member's numbers to give the other's; both of them if they are not as many."""
    return tuple(y - x for x, y in zip(a, b, strict=True)) if len(a) == len(b) else (a, b)


def places_like(one: SiteTemplate, other: SiteTemplate, place: Place) -> tuple[Place, ...]:
    """Members whose numbers differ as those of a place do; it alone if the two have not as many."""
    if one.rank != other.rank:
        return (place,)
    return shifted_places(one, other, tuple(y - x for x, y in zip(*place, strict=True)))


def shifted_places(one: SiteTemplate, other: SiteTemplate, offsets: Index) -> tuple[Place, ...]:
    """Members whose numbers differ by these offsets."""
    places = ((a, tuple(x + y for x, y in zip(a, offsets, strict=True))) for a in one.members)
    return tuple((a, b) for a, b in places if b in other.members)


def namesakes(ones: Sequence[Named], others: Sequence[Named]) -> Iterator[tuple[Named, Named]]:
    """Site templates of both sides whose names mean the same: those of equal names, else of equal names but
    for wrappers, else all; of names within one another the inmost, which is what wrappers wrap.
    """
    for same in (
        lambda template: template.name,
        lambda template: name_of(template, plain_name)[0],
        lambda _: "",
    ):
        by_name: list[dict[str, list[Named]]] = [defaultdict(list), defaultdict(list)]
        for side, named_templates in zip(by_name, (ones, others), strict=True):
            for named in named_templates:
                side[same(named[0])].append(named)
        shared = by_name[0].keys() & by_name[1].keys()
        for name in sorted(shared):
            yield from itertools.product(_inmost(by_name[0][name]), _inmost(by_name[1][name]))
        ones, others = ([r for r in side if same(r[0]) not in shared] for side in (ones, others))


def _inmost(templates: Sequence[Named]) -> list[Named]:
    """Site templates that none of the others lies in."""
    return [one for one in templates if not any(r.name.startswith(f"{one[0].name}.") for r, _ in templates)]


def shape_of(template: SiteTemplate) -> Shape:
    """The sizes of a site template's results, sorted, without those of one element."""
    return tuple(sorted(size for size in template.record.shape if size != 1))


def template_similarity(reference: SiteTemplate, target: SiteTemplate) -> float:
    """Log-odds that two site templates correspond, from structure alone: no names, no values.

    Sums independent clues: being the main output, nesting, kind of module, output size, parameter shapes.
    The last two say nothing if a side is sharded over ranks. Unit: nats.
    """
    score = WEIGHTS.main_output_differs if bool(reference.slot) != bool(target.slot) else 0.0
    if bool(reference.inside) != bool(target.inside):
        score += WEIGHTS.nesting_differs
    if reference.family and target.family:
        score += WEIGHTS.family_equal if reference.family == target.family else WEIGHTS.family_differs
    if reference.first.shards or target.first.shards:
        return score
    if math.prod(shape_of(reference)) != math.prod(shape_of(target)):
        score += WEIGHTS.size_differs
    return score + _parameter_similarity(reference, target)


def _parameter_similarity(reference: SiteTemplate, target: SiteTemplate) -> float:
    """What the shapes of the modules' own parameters say, in nats."""
    shapes, target_shapes = reference.parameters, target.parameters
    if shapes and target_shapes:
        if shapes == target_shapes:
            return WEIGHTS.parameters_equal
        is_main_equal = shapes[0] == target_shapes[0]
        return WEIGHTS.largest_parameter_equal if is_main_equal else WEIGHTS.parameters_differ
    is_known = bool(reference.first.module and target.first.module)
    return WEIGHTS.parameters_one_sided if (shapes or target_shapes) and is_known else 0.0
