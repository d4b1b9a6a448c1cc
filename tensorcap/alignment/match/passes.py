"""Passes of matching: what a pass is, how a list of them is run, and the passes by names and by values.

Each pass looks at what is paired so far and pairs more by one kind of clue, the more certain passes first. To
add a pass, write a function of the `MatchState` and list it in `proposal.PASSES`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field

from tensorcap.alignment.match.candidates import Candidate, FoldedWeights, Fusion, Place
from tensorcap.alignment.match.contents import Contents
from tensorcap.alignment.match.matching import Matching
from tensorcap.alignment.match.slots import Slots
from tensorcap.alignment.names import Rules
from tensorcap.runs import enclosing_sites
from tensorcap.wording import fault_text
from tensorcap_formats.errors import TensorcapError


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
        contents: What the modules of both sides hold.
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
    contents: Contents = field(default_factory=Contents)
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


def pair_by_parameters(state: MatchState) -> None:
    """Pair main outputs of modules that alone on both sides hold the same parameters, bit for bit or rounded.

    Where values differ from the beginning on, as behind a wrong embedding, parameters prove what results
    cannot.

    1. Modules are paired whose set of parameters no other module of their side has.
    2. So are those that are left, one of which has some of the other's and no others, as one without a bias.
    3. Of the modules right around these, two are paired if all that lies in the one is paired with what lies
       in the other, and what else lies in either has as many elements of parameters, as three projections
       and a fused one have; so outwards. So are modules at whatever distance, if all pairs in the one lie in
       the other.
    4. Modules that hold the same parameters within, at whatever depth, and no others, are paired likewise, as
       an attention whose matrices are its own parameters and one of linear layers, unless the values of a
       layer refute it.
    """
    pairs = _modules_of_equal_parameters(state)
    pairs += _modules_that_lack_parameters(state, pairs)
    rest = [
        _elements_within(known, {sites[i] for sites in pairs}) for i, known in enumerate(state.parameters)
    ]
    proven = list(pairs)
    while pairs:
        _accept_proven_sites(state, pairs)
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
    _accept_proven_sites(state, [pair for pair in around_all if rest[0][pair[0]] == rest[1][pair[1]]])
    _accept_proven_sites(state, _modules_of_equal_contents(state), refuses_differing=True)


def _modules_of_equal_parameters(state: MatchState) -> list[tuple[str, str]]:
    """Sites of both sides whose parameters are equal, and no other's on their side.

    A block that holds those of its experts itself, beside modules with others, is not the experts.
    """
    sites_of: list[dict[frozenset[ParameterMark], list[str]]] = [defaultdict(list), defaultdict(list)]
    for parameters, of_side in zip(state.parameters, sites_of, strict=True):
        for site, digests in parameters.items():
            of_side[digests].append(site)
    both = ((sites, sites_of[1].get(digests, [])) for digests, sites in sites_of[0].items())
    pairs = [(sites[0], others[0]) for sites, others in both if len(sites) == len(others) == 1]
    return [pair for pair in pairs if _hold_alike(state, *pair)]


def _modules_around_all(state: MatchState, pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Sites of both sides that alone on their side lie around two pairs or more, and around no others."""
    sites_of: list[dict[frozenset[int], list[str]]] = [defaultdict(list), defaultdict(list)]
    for i, of_side in enumerate(sites_of):
        within: dict[str, set[int]] = defaultdict(set)
        for number, sites in enumerate(pairs):
            for outer in enclosing_sites(sites[i]):
                within[outer].add(number)
        for site, numbers in within.items():
            if site in state.matching.sides[i].by_site and len(numbers) > 1:
                of_side[frozenset(numbers)].append(site)
    both = ((sites, sites_of[1].get(numbers, [])) for numbers, sites in sites_of[0].items())
    return [(sites[0], others[0]) for sites, others in both if len(sites) == len(others) == 1]


def _hold_alike(state: MatchState, site: str, other: str) -> bool:
    """Whether both of two modules hold parameters in modules within, or neither does."""
    sides = zip(state.parameters, (site, other), strict=True)
    holds = [any(name.startswith(f"{outer}.") for name in known) for known, outer in sides]
    return holds[0] == holds[1]


def _modules_of_equal_contents(state: MatchState) -> list[tuple[str, str]]:
    """Sites of both sides that hold equal parameters, with those of modules within, and no other's do."""
    sites_of: list[dict[frozenset[ParameterMark], list[str]]] = [defaultdict(list), defaultdict(list)]
    for known, side, of_side in zip(state.parameters, state.matching.sides, sites_of, strict=True):
        within: dict[str, set[ParameterMark]] = defaultdict(set)
        for site, marks in known.items():
            for outer in (site, *enclosing_sites(site)):
                within[outer] |= marks
        for site, contents in within.items():
            if site in side.by_site:
                of_side[frozenset(contents)].append(site)
    both = ((sites, sites_of[1].get(contents, [])) for contents, sites in sites_of[0].items())
    return [(sites[0], others[0]) for sites, others in both if len(sites) == len(others) == 1]


def _modules_that_lack_parameters(
    state: MatchState, pairs: Sequence[tuple[str, str]]
) -> list[tuple[str, str]]:
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


def _accept_proven_sites(
    state: MatchState, pairs: Sequence[tuple[str, str]], *, refuses_differing: bool = False
) -> None:
    """Accept pairs of sites that are free and whose results have as many elements.

    Args:
        state: What is known.
        pairs: Of sites.
        refuses_differing: Whether no layer is paired where values refute one.
    """
    matching = state.matching
    places: dict[tuple[str, str], list[Place]] = defaultdict(list)
    for sites in pairs:
        if all(site in side.by_site for side, site in zip(matching.sides, sites, strict=True)):
            (one, a), (other, b) = (
                side.by_site[site] for side, site in zip(matching.sides, sites, strict=True)
            )
            candidate = Candidate(one.name, other.name, ())
            is_possible = matching.is_free(candidate, (a, b)) and matching.sizes_fit(candidate, (a, b))
            if is_possible and not state.contents.differ(*sites):
                places[one.name, other.name].append((a, b))
    for (name, other_name), of_pair in places.items():
        proven = Candidate(name, other_name, (), has_equal_parameters=True)
        if not (refuses_differing and any(matching.is_refuted(proven, place) for place in of_pair)):
            matching.accept(proven, tuple(sorted(of_pair)))


def pair_remaining_names(state: MatchState) -> None:
    """Pair templates of equal names and unlike numbers of elements, if both are free to the end."""
    state.matching.accept_misfits()
