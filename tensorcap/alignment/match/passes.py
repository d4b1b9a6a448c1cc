"""Passes of matching: what a pass is, how a list of them is run, and the passes by names and by values.

Each pass looks at what is paired so far and pairs more by one kind of clue, the more certain passes first. To
add a pass, write a function of the `MatchState` and list it in `proposal.PASSES`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tensorcap.alignment.match.candidates import Candidate, FoldedWeights, Fusion, Place
from tensorcap.alignment.match.contents import SitePair
from tensorcap.alignment.match.matching import Matching
from tensorcap.alignment.match.slots import Slots
from tensorcap.alignment.names import Rules
from tensorcap.runs import enclosing_sites, lies_within
from tensorcap.wording import fault_text
from tensorcap_formats.errors import TensorcapError

_EQUAL_PARAMETERS: Final = "the parameters that both hold, in themselves or within, are the same"


@dataclass(frozen=True, slots=True)
class ParameterMark:
    """What tells a parameter from others, on either side.

    Attributes:
        text: Its digest; or its shape and its ends, where one side rounds it.
        is_constant: Whether it has one value only, so that others may have it too.
        size: Number of its elements.
    """

    text: str
    is_constant: bool
    size: int


@dataclass(slots=True)
class MatchState:
    """What the passes read, and what they have found so far.

    Attributes:
        matching: The site templates of both sides, and the pairs of them.
        slots: Finds layouts between tensors.
        rules: What names mean.
        sums: Fusions by adding that statistics allow, not all of them true.
        fusions: Several tensors of one side that are one of the other; those without a layout are reported
            as left over.
        handed_on: Pairs of a template of the reference and one of the target that was given its results, with
            the name of the argument.
        folded: Modules of the reference whose weights the target has with those of a norm behind them.
        parameters: What tells the parameters of each module of both sides that has some, by site.
        failed: Passes that ended in an exception, a sentence each; what they and others had paired stands.
    """

    matching: Matching
    slots: Slots
    rules: Rules
    sums: list[Fusion] = field(default_factory=list)
    fusions: list[Fusion] = field(default_factory=list)
    handed_on: list[tuple[Candidate, str]] = field(default_factory=list)
    folded: list[FoldedWeights] = field(default_factory=list)
    parameters: tuple[Mapping[str, frozenset[ParameterMark]], ...] = ({}, {})
    failed: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of matching.

    Attributes:
        name: Its name, by which it can be left out; passes that make no sense without each other share one.
        run: Pairs site templates of the state.
        needs_values: Whether it is left out if values are not to be used.
    """

    name: str
    run: Callable[[MatchState], None]
    needs_values: bool = True

    @property
    def words(self) -> str:
        """Its name in words."""
        return self.name.replace("_", " ")


def run_passes(
    passes: Sequence[Pass], state: MatchState, *, uses_values: bool, without: Collection[str] = ()
) -> None:
    """Run passes in their order; one that fails loses its own pairs alone.

    Args:
        passes: The passes.
        state: What they read and change.
        uses_values: Whether those that need values are run.
        without: Names of passes to leave out.
    """
    for each in passes:
        if each.name not in without and (uses_values or not each.needs_values):
            try:
                each.run(state)
            except TensorcapError:
                raise
            except Exception as error:  # a fault of ours, which no other pass may be lost by
                state.failed.append(f"Matching by {each.words} could not be run: {fault_text(error)}.")


def pair_by_names(state: MatchState) -> None:
    """Pair site templates of equal names.

    1. Candidates are templates whose names are equal once rules have renamed both sides.
    2. One that is a part of a sum and its whole is left out: `o_proj` is not `o_proj + residual`.
    3. The others are accepted greedily, see `Matching.accept_best`.
    """
    state.matching.accept_named({(fusion.whole, part) for fusion in state.sums for part in fusion.parts})


def pair_main_outputs_by_values(state: MatchState) -> None:
    """Pair main outputs that values prove, leaves before modules that contain others, until nothing changes.

    1. Candidates are templates whose fingerprints are each other's nearest, see `fingerprints.agreements`.
    2. They are accepted greedily, see `Matching.accept_best`.
    3. Pairs of leaves are evidence for the modules around them, and those for further leaves.
    """
    state.matching.accept_proven(is_plain=True)


def pair_all_outputs_by_values(state: MatchState) -> None:
    """Pair whatever values prove or names say, further outputs and lists of unlike ranks included."""
    state.matching.accept_proven(is_plain=False)


def pair_tied(state: MatchState) -> None:
    """Pair what values prove where runs without an order have several sites of equal values."""
    state.matching.accept_tied()


def pair_by_parameters(state: MatchState) -> None:
    """Pair main outputs of modules that alone on both sides hold the same parameters, bit for bit or rounded.

    Where values differ from the beginning on, as behind a wrong embedding, parameters prove what results
    cannot.

    1. Modules are paired whose set of parameters no other module of their side has.
    2. So are those that are left, one of which has some of the other's and no others, as one without a bias.
    3. Of the modules right around these, two are paired if all that lies in the one is paired with what lies
       in the other, and what else lies in either has as many elements of parameters, as three projections
       and a fused one have; so outwards. So are modules at any distance that alone lie around the same pairs,
       two at least.
    4. Modules that hold the same parameters within, at whatever depth, and no others, are paired likewise, as
       an attention whose matrices are its own parameters and one of linear layers, unless the values of a
       layer refute it.

    None are paired of which one holds a parameter that the other does not, though its side has it.
    """
    pairs = _modules_of_equal_parameters(state)
    pairs += _modules_that_lack_parameters(state, pairs)
    rest = [
        _elements_within(known, {sites[i] for sites in pairs}) for i, known in enumerate(state.parameters)
    ]
    proven = list(pairs)
    while pairs:
        _accept_proven(state, pairs)
        around: tuple[dict[str, set[str]], dict[str, set[str]]] = (defaultdict(set), defaultdict(set))
        for site, other in pairs:
            outer, other_outer = (name.rpartition(".")[0] for name in (site, other))
            if outer and other_outer:
                around[0][outer].add(other_outer)
                around[1][other_outer].add(outer)
        pairs = [
            (outer, next(iter(others)))
            for outer, others in around[0].items()
            if len(others) == 1 and len(around[1][next(iter(others))]) == 1
        ]
        pairs = [(site, other) for site, other in pairs if rest[0][site] == rest[1][other]]
    around_all = _modules_around_all(state, proven)
    _accept_proven(state, [pair for pair in around_all if rest[0][pair[0]] == rest[1][pair[1]]])
    _accept_proven(state, _modules_of_equal_contents(state), refuses_differing=True)


def _modules_of_equal_parameters(state: MatchState) -> list[SitePair]:
    """Sites of both sides whose parameters are equal, and no other's on their side.

    A block that holds those of its experts itself, beside modules with others, is not the experts.
    """
    return [pair for pair in _pair_lone(state.parameters) if _hold_alike(state, *pair)]


def _modules_around_all(state: MatchState, pairs: Sequence[SitePair]) -> list[SitePair]:
    """Sites of both sides that alone on their side lie around two pairs or more, and around no others."""
    around: list[dict[str, frozenset[int]]] = []
    for i, side in enumerate(state.matching.sides):
        within: dict[str, set[int]] = defaultdict(set)
        for number, sites in enumerate(pairs):
            for outer in enclosing_sites(sites[i]):
                within[outer].add(number)
        around.append(
            {s: frozenset(numbers) for s, numbers in within.items() if s in side.by_site and len(numbers) > 1}
        )
    return _pair_lone(around)


def _pair_lone(held: Sequence[Mapping[str, Hashable]]) -> list[SitePair]:
    """Pair the sites of both sides of which the same is known, and of no other of their side."""
    sites_of: list[dict[Hashable, list[str]]] = [defaultdict(list), defaultdict(list)]
    for of_side, known in zip(sites_of, held, strict=True):
        for site, each in known.items():
            of_side[each].append(site)
    both = ((sites, sites_of[1].get(each, [])) for each, sites in sites_of[0].items())
    return [(sites[0], others[0]) for sites, others in both if len(sites) == len(others) == 1]


def _hold_alike(state: MatchState, site: str, other: str) -> bool:
    """Whether both of two modules hold parameters in modules within, or neither does."""
    sides = zip(state.parameters, (site, other), strict=True)
    holds = [any(lies_within(name, outer) for name in known) for known, outer in sides]
    return holds[0] == holds[1]


def _modules_of_equal_contents(state: MatchState) -> list[SitePair]:
    """Sites of both sides that hold equal parameters, with those of modules within, and no other's do."""
    contents: list[dict[str, frozenset[ParameterMark]]] = []
    for known, side in zip(state.parameters, state.matching.sides, strict=True):
        within: dict[str, set[ParameterMark]] = defaultdict(set)
        for site, marks in known.items():
            for outer in (site, *enclosing_sites(site)):
                within[outer] |= marks
        contents.append({site: frozenset(marks) for site, marks in within.items() if site in side.by_site})
    return _pair_lone(contents)


def _modules_that_lack_parameters(state: MatchState, pairs: Sequence[SitePair]) -> list[SitePair]:
    """Sites of both sides, in no pair yet, of which one holds a part of the other's parameters and no others.

    A parameter that both hold is no constant, and no other site holds it. What the one lacks, no other site
    of its side holds: a module that has the words and the places is not the embedding of places.
    """
    holders: list[dict[ParameterMark, list[str]]] = [defaultdict(list), defaultdict(list)]
    for i, known in enumerate(state.parameters):
        paired = {sites[i] for sites in pairs}
        for site, marks in known.items():
            for mark in marks if site not in paired else ():
                holders[i][mark].append(site)
    ours, theirs = state.parameters
    held = [
        {mark for marks in known.values() for mark in marks if not mark.is_constant}
        for known in (ours, theirs)
    ]
    options: tuple[dict[str, set[str]], dict[str, set[str]]] = (defaultdict(set), defaultdict(set))
    for mark, sites in holders[0].items():
        others = holders[1].get(mark, [])
        if mark.is_constant or len(sites) != 1 or len(others) != 1:
            continue
        one, other = ours[sites[0]], theirs[others[0]]
        is_elsewhere = bool((other - one) & held[0] or (one - other) & held[1])
        if (one <= other or other <= one) and not is_elsewhere:
            options[0][sites[0]].add(others[0])
            options[1][others[0]].add(sites[0])
    return [
        (site, other)
        for site, others in options[0].items()
        for other in others
        if len(others) == len(options[1][other]) == 1 and _hold_alike(state, site, other)
    ]


def _elements_within(known: Mapping[str, frozenset[ParameterMark]], paired: Container[str]) -> Counter[str]:
    """How many elements of parameters each module holds, in itself or within, of modules in no pair."""
    elements: Counter[str] = Counter()
    for site, marks in known.items():
        if site not in paired:
            size = sum(mark.size for mark in marks)
            elements.update(dict.fromkeys((site, *enclosing_sites(site)), size))
    return elements


def _accept_proven(state: MatchState, pairs: Iterable[SitePair], *, refuses_differing: bool = False) -> None:
    """Accept pairs that parameters prove, see `accept_sites`."""
    possible = [pair for pair in pairs if not state.matching.contents.differ(*pair)]
    accept_sites(
        state,
        dict.fromkeys(possible, _EQUAL_PARAMETERS),
        has_equal_parameters=True,
        refuses_differing=refuses_differing,
    )


def accept_sites(
    state: MatchState,
    pairs: Mapping[SitePair, str],
    *,
    has_equal_parameters: bool = False,
    refuses_differing: bool = False,
) -> None:
    """Accept pairs of sites that are free and whose results have as many elements.

    Args:
        state: What is known.
        pairs: Of sites, and what speaks for each, in words.
        has_equal_parameters: Whether that is what they hold.
        refuses_differing: Whether no layer is paired where values refute one.
    """
    matching = state.matching
    places: dict[tuple[str, str, str], list[Place]] = defaultdict(list)
    refuted: set[tuple[str, str]] = set()
    for (site, other), because in pairs.items():
        if site not in matching.sides[0].by_site or other not in matching.sides[1].by_site:
            continue
        (one, a), (two, b) = matching.sides[0].by_site[site], matching.sides[1].by_site[other]
        candidate = Candidate(one.name, two.name, ())
        if matching.is_free(candidate, (a, b)) and matching.sizes_fit(candidate, (a, b)):
            places[one.name, two.name, because].append((a, b))
            if refuses_differing and matching.is_refuted(candidate, (a, b)):
                refuted.add((one.name, two.name))
    for (name, other_name, because), of_pair in places.items():
        if (name, other_name) not in refuted:
            candidate = Candidate(
                name, other_name, (), has_equal_parameters=has_equal_parameters, because=because
            )
            matching.accept(candidate, tuple(sorted(of_pair)))


def pair_remaining_names(state: MatchState) -> None:
    """Pair templates of equal names and unlike numbers of elements, if both are free to the end."""
    state.matching.accept_misfits()
