"""Evidence for and against a pair.

*Proven* is what values say: they agree to rounding, nothing else has them, and no other layout fits.
*Plausible* is what names, structure, order and shapes say if values say nothing; the reason reports if
something else would do as well (`ambiguous`). *Contradicted* is a pair whose values differ by more than
rounding, or that values put together in another way than names and shapes do; it may be right all the same,
since the target may be wrong, and the reason reports what contradicts it (`but …`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Final

from tensorcap.alignment.layout import Fit
from tensorcap.alignment.mapping import Evidence
from tensorcap.alignment.match.candidates import Candidate, Fusion, Place
from tensorcap.alignment.match.fingerprints import Fingerprint, rounding_of, statistics_distance
from tensorcap.alignment.match.match_weights import WEIGHTS
from tensorcap.alignment.match.matching import Matching
from tensorcap.alignment.match.pairs import RecordPair
from tensorcap.alignment.names import USUAL_ORDER, Index, SiteTemplate, name_words
from tensorcap.wording import conjugated, some
from tensorcap_formats.records import Record

Shapes = tuple[str, str, tuple[int, ...], tuple[int, ...]]  # classes of two modules, shapes of what they hold

_SHOWN: Final = 3
_ROUNDINGS: Final = 8  # of the coarser run, by which equal values differ at most
_LEAST: Final = 2.0**-16  # that they may differ by, however fine the dtype: sums in another order
_UNRELATED: Final = 0.1  # of the size of most elements, by which errors are no rounding
_TIED: Final = "ambiguous by values: others have the same, settled by order of results"
_TIED_IN_NO_ORDER: Final = "ambiguous by values: others have the same, so that it makes no difference which"
_TRANSPOSE: Final = ("transpose 0 1",)


class PairEvidence:
    """Decides and words what pairs are known by, and what speaks against them.

    Args:
        matching: The pairs.
        shapes: Shapes of parameters that other pairs of modules have.

    Attributes:
        bound: How far equal values of floating dtypes may be apart, relative to their size.
    """

    def __init__(self, matching: Matching, shapes: Iterable[Shapes] = ()) -> None:
        self._matching = matching
        self._shapes = list(shapes)
        self.bound = max(_ROUNDINGS * max(side.rounding for side in matching.sides), _LEAST)

    @cached_property
    def _transposed(self) -> Mapping[tuple[str, str], bool]:
        """Of each two classes of modules, whether matrices that they hold are transposed, if all agree.

        Those of unlike sizes show it. What is not in it is not known.
        """
        observed: dict[tuple[str, str], set[bool]] = defaultdict(set)
        pairs = map(self._matching.templates_of, self._matching.accepted)
        shapes = (
            (one.first.module, other.first.module, one.record.shape, other.record.shape)
            for one, other in pairs
            if one.is_parameter
        )
        for module, target_module, shape, target_shape in (*shapes, *self._shapes):
            if len(shape) == 2 and shape[0] != shape[1] and target_shape in (shape, shape[::-1]):
                observed[module, target_module].add(shape != target_shape)
        return {classes: answers.pop() for classes, answers in observed.items() if len(answers) == 1}

    @cached_property
    def _shuffled(self) -> set[tuple[str, str]]:
        """Site templates whose members belong together in another order, by their numbers."""
        places: dict[tuple[str, str], list[Place]] = defaultdict(list)
        for candidate in self._matching.accepted:
            places[candidate.reference, candidate.target] += candidate.places
        return {templates for templates, paired in places.items() if not _is_ascending(paired)}

    def explain_pair(
        self,
        candidate: Candidate,
        place: Place,
        records: RecordPair,
        fit: Fit | None,
        residuals: Sequence[float | None],
    ) -> tuple[Evidence, str]:
        """Evidence and reason of a pair of site templates.

        Args:
            candidate: The pair.
            place: The members whose tensors were read.
            records: Of those.
            fit: Their layout; None if there is none.
            residuals: What it leaves in each place.
        """
        reasons, doubts = self._describe_agreement(candidate), self._find_rival_doubts(candidate)
        evidence = candidate.evidence
        sites = zip(self._matching.sites_of(candidate, place), self._matching.sides, strict=True)
        has_fingerprints = all(site in side.fingerprints for site, side in sites)
        if fit is None:
            doubts.append(_describe_shapes(records))
        else:
            is_open = fit.choices > 1 and not fit.is_proven
            agrees = fit.residual is not None and fit.residual <= _UNRELATED and fit.is_proven
            if evidence == "structure" and has_fingerprints and agrees and not candidate.is_tied:
                evidence = "values"
            elif evidence == "values" and is_open:
                evidence = "shape"
                doubts.append("ambiguous: other layouts fit as well")
            reasons += _describe_read(fit)
            templates = self._matching.templates_of(candidate)
            is_transposed = self.is_transposed(*templates) if templates[0].is_parameter else None
            distances = _take_larger(self._measure_distances(candidate), residuals)
            doubts += self.doubts(records, distances, fit, is_transposed=is_transposed)
            doubts += self._find_argument_doubts(candidate) if not doubts else []
        return evidence, "; ".join([*reasons, *doubts])

    def is_transposed(self, one: SiteTemplate, other: SiteTemplate) -> bool | None:
        """Whether weights of the modules of two site templates are transposed; None if unknown."""
        return self._transposed.get((one.first.module, other.first.module))

    def explain_handed_on(self, candidate: Candidate, records: RecordPair, fit: Fit) -> str:
        """The reason why results are what the target has as an argument."""
        distances = [agreement.distance for agreement in candidate.agreeing.values()]
        doubts = self.doubts(records, distances, fit)
        return "; ".join([*self._describe_agreement(candidate), *_describe_read(fit), *doubts])

    def explain_fusion(
        self,
        fusion: Fusion,
        records: RecordPair,
        fit: Fit,
        residuals: Sequence[float | None],
        *,
        is_parameter: bool,
    ) -> tuple[Evidence, str]:
        """Evidence and reason of parts and their whole, or of what they hold, with the fusion's layout."""
        agreeing = {} if is_parameter else fusion.agreeing
        distances = {index: agreement.distance for index, agreement in agreeing.items()}
        reasons = ["their shapes add up"]
        if distances:
            reasons = [_count_text(len(distances), len(fusion.places), max(distances.values()), None)]
        doubts = [_TIED] if fusion.is_tied else []
        doubts += self.doubts(records, _take_larger([*map(distances.get, fusion.places)], residuals), fit)
        if fusion.axis is None and not fusion.is_sum:
            doubts += order_doubt([fusion.parts[i] for i in fusion.order], fusion.whole)
        elif list(fusion.order) != sorted(fusion.order):
            doubts.append(f"but they stand in the order {', '.join(map(str, fusion.order))}")
        doubts += self._describe_other_orders(fusion)
        is_read = fit.residual is not None and fit.residual <= _UNRELATED
        evidence: Evidence = "structure" if fusion.is_tied else "values" if distances or is_read else "shape"
        if fusion.is_by_rule:
            evidence, reasons = "rule", ["by the rule of their names", *reasons]
        return evidence, "; ".join([*reasons, *_describe_read(fit), *doubts])

    def _describe_other_orders(self, fusion: Fusion) -> list[str]:
        """Which members of a fusion have another layout than most, and which."""
        by_layout: dict[str, list[str]] = defaultdict(list)
        for index, layout in fusion.others.items():
            order = layout.fit.order if fusion.is_split else layout.order
            words = f"after {', '.join(layout.fit.steps)}"
            if order != fusion.order and fusion.axis is None:
                words = f"in the order {', '.join(fusion.parts[i].rpartition('.')[2] for i in order)}"
            by_layout[words].append(fusion.places[index][1])
        return [f"but {some(sites)} would agree {words}" for words, sites in by_layout.items()]

    def explain_parameters(
        self,
        evidence: Evidence,
        pairs: Sequence[RecordPair],
        records: RecordPair,
        fit: Fit | None,
        residuals: Sequence[float | None],
        *,
        is_transposed: bool | None,
    ) -> tuple[Evidence, str]:
        """Evidence and reason of what modules that belong together hold.

        Args:
            evidence: What the modules are known by, if their slots have one name.
            pairs: The tensors of all members.
            records: Those that were read.
            fit: Their layout; None if there is none.
            residuals: What it leaves of all members.
            is_transposed: Whether it is a matrix that should be transposed; None if that is not known.
        """
        reasons = ["of modules that belong together"]
        side, target_side = self._matching.sides
        known = [
            _distance(side.joint_fingerprint_of(tensors), target_side.joint_fingerprint_of(target_tensors))
            for tensors, target_tensors in pairs
        ]
        near = [apart for apart in known if apart is not None and apart <= self.tolerance(*records)]
        distances = _take_larger([self._measure_distance(*pair) for pair in pairs], residuals)
        if near:
            reasons.append(_count_text(len(near), len(pairs), max(near), None))
        if fit is None:
            return "structure", "; ".join([*reasons, _describe_shapes(records)])
        doubts = self.doubts(records, distances, fit, is_transposed=is_transposed)
        if fit.choices > 1 and not fit.is_proven and not doubts:
            doubts.append("ambiguous: other layouts fit as well")
        is_proven = near and not [d for d in distances if d > self.tolerance(*records)] and fit.is_proven
        kind = evidence if evidence in ("name", "rule") else "values" if is_proven else "structure"
        return kind, "; ".join([*reasons, *_describe_read(fit), *doubts])

    def doubts(
        self,
        records: RecordPair,
        distances: Sequence[float],
        fit: Fit,
        *,
        is_transposed: bool | None = None,
    ) -> list[str]:
        """What the values say against a pair.

        Args:
            records: What was read of it.
            distances: How far the fingerprints of its members are apart.
            fit: The layout.
            is_transposed: Whether it is a matrix that should be transposed; None if that is not known.
        """
        reasons = []
        bound = self.tolerance(*records)
        far = [distance for distance in distances if distance > bound]
        worst = max([*far, fit.residual or 0.0])
        if math.isinf(worst):
            reasons.append("but not all values are finite")
        elif worst > bound:
            some = f" of {len(far)} of {len(distances)}" if 0 < len(far) < len(distances) else ""
            reasons.append(f"but values{some} differ by {worst:.1g}, expected at most {bound:.1g}")
        elif fit.typical is not None and fit.typical > max(_UNRELATED, bound):
            reasons.append(
                f"but half of the elements differ by {fit.typical:.1g} or more, the largest are equal"
            )
        reference, target = records
        if len(reference) == len(target) == 1 and reference[0].shape == target[0].shape:
            is_matrix = reference[0].shape[:1] == reference[0].shape[1:]
            if fit.steps and fit.is_sure and not (is_transposed and fit.steps == _TRANSPOSE):
                reasons.append("but shapes are equal, so that values alone ask for these steps")
            elif is_transposed and is_matrix and not fit.steps:
                reasons.append("but it is not transposed, as those of unlike sizes are")
        return reasons

    def tolerance(self, reference: Sequence[Record], target: Sequence[Record]) -> float:
        """How far equal values may be apart, relative to their size; whole numbers not at all."""
        coarsest = max(rounding_of(record) for record in (*reference, *target))
        return max(self.bound, _ROUNDINGS * coarsest) if coarsest else 0.0

    def _describe_agreement(self, candidate: Candidate) -> list[str]:
        name = f"both are the {candidate.role} by name" if candidate.role else "the same name"
        reasons = [name] if candidate.is_named else []
        if candidate.because:
            reasons.append(candidate.because)
        agreed = (candidate.agreeing[p] for p in candidate.places if p in candidate.agreeing)
        agreements = [agreement for agreement in agreed if agreement.nats >= WEIGHTS.reported_least]
        if agreements:
            worst, other = max(a.distance for a in agreements), min(a.other for a in agreements)
            reasons.append(_count_text(len(agreements), len(candidate.places), worst, other))
        return reasons

    def _find_rival_doubts(self, candidate: Candidate) -> list[str]:
        """What other tensors say: that they have the same values, or those that this one should have."""
        doubts = []
        if candidate.is_tied:
            doubts.append(_TIED if self._matching.is_ordered else _TIED_IN_NO_ORDER)
        if candidate.is_named:
            others = [self._matching.find_values_elsewhere(candidate, place) for place in candidate.places]
            elsewhere = sorted({name for name in others if name})
            if elsewhere:
                doubts.append(f"but the values are those of {', '.join(elsewhere[:_SHOWN])}")
        if (candidate.reference, candidate.target) in self._shuffled:
            doubts.append("but their numbers do not rise together")
        return doubts

    def _find_argument_doubts(self, candidate: Candidate) -> list[str]:
        """What arguments of equal names say, as far as they are known."""
        side, target_side = self._matching.sides
        far: dict[str, float] = {}
        for place in candidate.places:
            member, target_member = self._matching.members_of(candidate, place)
            for name in member.arguments.keys() & target_member.arguments.keys():
                one, other = member.arguments[name], target_member.arguments[name]
                distance = _distance(side.fingerprint_of(one), target_side.fingerprint_of(other))
                if distance is not None and distance > self.tolerance([one], [other]):
                    far[name] = max(distance, far.get(name, 0.0))
        return [f"but its argument {name} differs by {apart:.1g}" for name, apart in sorted(far.items())]

    def _measure_distances(self, candidate: Candidate) -> list[float | None]:
        """How far the values of all members are apart at least; None if it is not known."""
        pairs = (self._matching.records_of(candidate, place) for place in candidate.places)
        return [self._measure_distance(*pair) for pair in pairs]

    def _measure_distance(self, reference: Sequence[Record], target: Sequence[Record]) -> float | None:
        """How far values are apart at least, by their statistics; None if these are not of one count."""
        one, other = self._matching.sides
        if len(reference) == len(target) == 1 and reference[0].size == target[0].size:
            statistics, target_statistics = one.statistics_of(reference[0]), other.statistics_of(target[0])
            if statistics is None or target_statistics is None:
                return None
            return statistics_distance(statistics, target_statistics, reference[0].size)
        return _distance(one.joint_fingerprint_of(reference), other.joint_fingerprint_of(target))


def _distance(one: Fingerprint | None, other: Fingerprint | None) -> float | None:
    """How far fingerprints are apart; None if one is not known, or they are of other counts."""
    return None if one is None or other is None or one.size != other.size else one.distance(other)


def _describe_shapes(records: RecordPair) -> str:
    shapes = " and ".join(str(list(side[0].shape)) for side in records)
    return f"but shapes {shapes} differ, no layout fits"


def _take_larger(distances: Sequence[float | None], residuals: Sequence[float | None]) -> list[float]:
    """The larger of two numbers in each place where one of them is known."""
    known = ([x for x in pair if x is not None] for pair in zip(distances, residuals, strict=True))
    return [max(numbers) for numbers in known if numbers]


def order_doubt(parts: Sequence[str], whole: str) -> list[str]:
    """What names say against an order of parts in their whole.

    Args:
        parts: Names of the parts, in that order.
        whole: Its name.

    Example:
        >>> order_doubt(["mlp.up_proj", "mlp.gate_proj"], "mlp.gate_up_proj")
        ['but its parts are up, gate by values and gate, up by name']
    """
    own, _ = _own_words(parts, whole)
    named, by = _usual_order(parts, whole)
    if not named or named == own:
        return []
    return [f"but its parts are {', '.join(own)} by values and {', '.join(named)} {by}"]


def order_by_names(parts: Sequence[str], whole: str) -> tuple[int, ...]:
    """The order that names give parts in their whole; nothing if they give none.

    Example:
        >>> order_by_names(["attn.k_proj", "attn.q_proj", "attn.v_proj"], "attn.qkv_proj")
        (1, 0, 2)
    """
    own, _ = _own_words(parts, whole)
    named, _ = _usual_order(parts, whole)
    return tuple(map(own.index, named))


def _own_words(parts: Sequence[str], whole: str) -> tuple[list[str], list[str]]:
    """The word of each part that not all of them have, and the words of the whole."""
    names = [*parts, whole]
    while all("." in name for name in names) and len({name.rpartition(".")[2] for name in names}) == 1:
        names = [name.rpartition(".")[0] for name in names]  # `weight`, in a file without slots
    *parts, whole = names
    words = [name_words(part) for part in parts]
    shared = set.intersection(*map(set, words))
    return [
        next((word for word in name_words if word not in shared), "") for name_words in words
    ], name_words(whole)


def _usual_order(parts: Sequence[str], whole: str) -> tuple[list[str], str]:
    """The own words of parts in the order in which they mostly stand, and what says so."""
    own, words = _own_words(parts, whole)
    named = _find_named_order(own, words)
    if named:
        return named, "by name"
    if all(word in USUAL_ORDER for word in own):
        return sorted(own, key=lambda word: USUAL_ORDER[word]), "as a rule"
    return [], ""


def _find_named_order(own: Sequence[str], whole: Sequence[str]) -> list[str]:
    """The order of the parts' own words in the words of the whole, or of their initials: `qkv`, `Wqkv`."""
    if not all(own) or len(set(own)) < len(own):
        return []
    text = "_".join(whole)
    if all(word in (whole if len(word) == 1 else text) for word in own):
        return sorted(own, key=text.index if min(map(len, own)) > 1 else whole.index)
    initials = {word[0]: word for word in own}
    for word in whole:
        letters = word.removeprefix("w")
        if len(initials) == len(own) and sorted(letters) == sorted(initials):
            return [initials[letter] for letter in letters]
    return []


def _is_ascending(places: Sequence[Place]) -> bool:
    """Whether both sides' numbers rise together."""
    ordered: list[Index] = [b for _, b in sorted(places)]
    return ordered == sorted(ordered)


def _count_text(count: int, whole: int, distance: float, other: float | None) -> str:
    rest = "" if other is None or other == float("inf") else f", next best {other:.1g}"
    return f"values: {count} of {whole} {conjugated(count, 'agree')} within {distance:.1g}{rest}"


def _describe_read(fit: Fit) -> list[str]:
    """How well a layout fits what was read; nothing if nothing was."""
    if fit.residual is None:
        return []
    rest = f", any other layout {fit.other:.1g}" if fit.other != float("inf") else ""
    return [f"values that were read differ by {fit.residual:.1g}{rest}"]
