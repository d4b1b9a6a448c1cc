"""Projections that hold the values of another one beside them, paired by what their names say.

Values that are found elsewhere may be those of weights that were loaded under another name, or of a port
whose names are exchanged, in code and weights alike. What is made of them tells the two apart, where it was
made of right values: behind a mistake everything differs, and tells nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tensorcap.alignment.match.candidates import Candidate, Place
from tensorcap.alignment.match.matching import Matching
from tensorcap.alignment.match.passes import MatchState
from tensorcap.alignment.match.sides import Side
from tensorcap.alignment.names import are_exchanged, projection_role


@dataclass(frozen=True, slots=True)
class _Move:
    """A member of the reference that belongs to another one of the target than it is paired with.

    Attributes:
        candidate: The pair.
        place: The members of the pair.
        right: The site template of the target whose name says what the reference's is.
    """

    candidate: Candidate
    place: Place
    right: str


def pair_named_projections(state: MatchState) -> None:
    """Pair projections as their names say, if values pair them otherwise and what comes of them differs.

    1. Of each pair of a query, key, value, gate or up with another one of these, the module of the target is
       looked up that lies beside its partner and alone has the name of its role.
    2. It takes the partner's place in all layers where what is made of the reference's result differs, if
       results agree in one of these, and in none of them with what is made of them: else the port's names
       are exchanged in code and weights alike. Its own partner has to be moved too, or it has none.
    3. Those beside them that are free then, as where one has the values of two, are paired likewise.
    """
    matching = state.matching
    if not matching.uses_names:
        return
    exchanged: dict[tuple[str, str], list[Candidate]] = defaultdict(list)
    for candidate in matching.accepted:
        if not candidate.is_named and are_exchanged(candidate.reference, candidate.target):
            exchanged[candidate.reference, candidate.target].append(candidate)
    moves = {
        matching.sites_of(move.candidate, move.place)[0]: move
        for candidates in exchanged.values()
        for move in _moves_of(matching, candidates)
    }
    before = -1
    while before != len(moves):
        before = len(moves)
        moves = {site: move for site, move in moves.items() if _is_free(matching, move, moves)}
    places: dict[tuple[str, str], list[Place]] = defaultdict(list)
    for move in moves.values():
        matching.release(move.candidate, move.place)
        places[move.candidate.reference, move.right].append(move.place)
    for (reference, right), of_pair in places.items():
        _accept(matching, reference, right, of_pair)
    for reference, right in places:
        for left, other in _free_beside(matching, reference, right):
            _accept(matching, left, other, places[reference, right])


def _moves_of(matching: Matching, candidates: Sequence[Candidate]) -> Iterator[_Move]:
    """What is moved of the pairs of two site templates."""
    one, other = matching.templates_of(candidates[0])
    if one.slot or other.slot:
        return
    right = _beside(matching.sides[1], other.name).get(projection_role(one.name))
    if right is None or projection_role(other.name) not in _beside(matching.sides[0], one.name):
        return
    members = [(candidate, place) for candidate in candidates for place in candidate.places]
    sites = [matching.sites_of(candidate, place) for candidate, place in members]
    agreeing = [left for left, partner in sites if matching.are_near(left, partner)]
    if not agreeing or not all(_is_spoilt(matching, left) for left in agreeing):
        return
    moved = Candidate(one.name, right, ())
    for (candidate, place), (left, _) in zip(members, sites, strict=True):
        fits = place[1] in matching.sides[1].templates[right].members and matching.sizes_fit(moved, place)
        if fits and _is_spoilt(matching, left):
            yield _Move(candidate, place, right)


def _is_spoilt(matching: Matching, site: str) -> bool:
    """Whether what comes of a projection's values differs, and nothing that its module makes after it agrees.

    A block without a module of its own for attention may err in what follows that.
    """
    side = matching.sides[0]
    parent, order = site.rpartition(".")[0], side.order(site)
    after = [
        other
        for other in matching.partner[0]
        if other.rpartition(".")[0] == parent and side.order(other) > order and not projection_role(other)
    ]
    return matching.is_spoilt(0, site) and not any(
        matching.are_near(other, matching.partner[0][other]) for other in after
    )


def _beside(side: Side, name: str) -> dict[str, str]:
    """The site templates of the module that one lies in by what their names say, if that is said of one."""
    parent = name.rpartition(".")[0]
    beside = [
        template.name
        for template in side.templates.values()
        if not template.slot and template.name.rpartition(".")[0] == parent
    ]
    roles = Counter(map(projection_role, beside))
    return {role: other for other in beside if roles[role := projection_role(other)] == 1 and role}


def _is_free(matching: Matching, move: _Move, moves: Mapping[str, _Move]) -> bool:
    """Whether the right module has no partner, or one that is moved as well."""
    site = matching.sides[1].templates[move.right].members[move.place[1]].site
    return (1, site) not in matching.fused and matching.partner[1].get(site, "") in {"", *moves}


def _free_beside(matching: Matching, reference: str, target: str) -> Iterator[tuple[str, str]]:
    """Site templates of one role beside two that are paired."""
    beside, others = (
        _beside(side, name) for side, name in zip(matching.sides, (reference, target), strict=True)
    )
    yield from ((beside[role], others[role]) for role in beside if role in others)


def _accept(matching: Matching, reference: str, target: str, places: Iterable[Place]) -> None:
    """Pair the members of two site templates that are free and have as many elements."""
    role = projection_role(reference)
    named = Candidate(reference, target, (), is_named=True, is_by_rule=True, role=role)
    templates = matching.templates_of(named)
    fitting = [
        place
        for place in sorted(places)
        if all(index in template.members for index, template in zip(place, templates, strict=True))
        and matching.is_free(named, place)
        and matching.sizes_fit(named, place)
    ]
    if fitting:
        matching.accept(named, tuple(fitting))
