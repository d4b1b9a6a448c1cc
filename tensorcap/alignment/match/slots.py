"""Layouts between the tensors of paired sites, each found once, and pairs of their arguments."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from tensorcap.alignment.layout import (
    CLOSE,
    Fit,
    Layout,
    LayoutChoice,
    find_layout,
    fits_shapes,
    only_order,
    plain,
    residual,
)
from tensorcap.alignment.links import place_of
from tensorcap.alignment.mapping import Evidence
from tensorcap.alignment.match.candidates import Candidate, Place
from tensorcap.alignment.match.fingerprints import Fingerprints
from tensorcap.alignment.match.matching import Matching
from tensorcap.alignment.match.pair_evidence import PairEvidence, Shapes
from tensorcap.alignment.match.pairs import RecordPair
from tensorcap.alignment.names import Member
from tensorcap.alignment.resolution import pair_slots
from tensorcap_formats.archive import Archive
from tensorcap_formats.records import Record
from tensorcap_formats.run_info import ModuleInfo

Steps = tuple[str, ...]
SlotPair = tuple[str, str]  # slot of the reference, slot of the target

_MATRICES: Final = "with matrices"
_WEIGHTS: Final = "with weights"
_READ: Final = 128  # members of a site template that are read: the layers of most models
_MOST: Final = 1 << 24  # elements of them
_UNDONE: Final = 8.0  # how much smaller a result's distance is than an argument's that it does not come from


@dataclass(frozen=True, slots=True)
class ArgumentPair:
    """Arguments of two sites that belong together.

    Attributes:
        reference: The one's slot.
        target: The other's.
        steps: From the target's tensor to the reference's.
        evidence: What they are known by.
        reason: Why, for a reader.
    """

    reference: str
    target: str
    steps: Steps
    evidence: Evidence
    reason: str


class Slots:
    """Finds layouts between the tensors of paired sites, each of them once.

    Attributes:
        fingerprints: Of both sides.
        matching: What is paired.
        judge: Decides and words the evidence of pairs.
        covered: Results of the reference besides main ones that an entry of their site pairs.
        given: Results of the reference that the target has as an argument alone, where values do not show it:
            by site, the argument's place and its steps.
    """

    def __init__(
        self,
        archives: tuple[Archive, Archive],
        fingerprints: tuple[Fingerprints, Fingerprints],
        matching: Matching,
        *,
        read_values: bool,
        shapes: Iterable[Shapes] = (),
    ) -> None:
        self.archives = archives
        self.reads_values = read_values
        self.fingerprints = fingerprints
        self._fits: dict[tuple[object, ...], Fit | None] = {}
        self._usual: dict[tuple[object, object], Counter[Steps]] = defaultdict(Counter)
        self.matching = matching
        self.judge = PairEvidence(matching, shapes)
        self.covered: set[str] = set()
        self.given: dict[str, tuple[str, Steps]] = {}

    def for_pairs(self, matching: Matching, shapes: Iterable[Shapes]) -> Slots:
        """Make the same for other pairs of the same archives; see `PairEvidence` for shapes."""
        return Slots(self.archives, self.fingerprints, matching, read_values=self.reads_values, shapes=shapes)

    def find_layout(
        self,
        reference: Sequence[Record],
        target: Sequence[Record],
        *,
        among: Sequence[LayoutChoice] | None = None,
    ) -> Fit | None:
        """Find the layout from some tensors of the target to some of the reference."""
        if among is not None:
            archives = self.archives if self.reads_values else None
            return find_layout(reference, target, archives, self.matching.rounding, among=among)
        key = tuple(
            tuple((r.digest or r.key, r.shape, r.dtype.name) for r in side) for side in (reference, target)
        )
        if key not in self._fits:
            self._fits[key] = self._search_layout(reference, target)
        return self._fits[key]

    def _search_layout(self, reference: Sequence[Record], target: Sequence[Record]) -> Fit | None:
        if len(reference) == len(target) == 1:
            one, other = reference[0], target[0]
            is_square = len({size for size in one.shape if size > 1}) < sum(size > 1 for size in one.shape)
            if one.shape == other.shape and one.digest and one.digest == other.digest and not is_square:
                return Fit((), (0,), 0.0, float("inf"), 1, is_sure=True, is_proven=True)
        archives = self.archives if self.reads_values else None
        return find_layout(reference, target, archives, self.matching.rounding)

    def residuals(self, fit: Fit | None, pairs: Sequence[RecordPair]) -> list[float | None]:
        """Measure the relative error that a layout leaves in each pair; None if nothing was read."""
        errors: list[float | None] = [None] * len(pairs)
        if fit is None or fit.residual is None:
            return errors
        left = _MOST
        for i, (reference, target) in enumerate(pairs[:_READ]):
            records = (*reference, *target)
            left -= sum(record.size for record in records)
            if not self.reads_values or left < 0 or not all(record.stored for record in records):
                continue
            is_same = len(records) == 2 and records[0].digest and records[0].digest == records[1].digest
            if is_same and not fit.steps:
                errors[i] = 0.0
            else:
                errors[i] = residual(fit, reference, target, self.archives)
        return errors

    def hold_the_same(self, reference: Sequence[Record], target: Sequence[Record]) -> bool:
        """Whether tensors may hold the same values in some order, as far as statistics are known."""
        sides = zip(self.matching.sides, (reference, target), strict=True)
        one, other = (side.joint_fingerprint_of(records) for side, records in sides)
        if one is None or other is None:
            return True
        return one.distance(other) <= self.judge.tolerance(reference, target)

    def arguments(self, candidate: Candidate) -> dict[Place, list[ArgumentPair]]:
        """Pair the arguments of each two sites: those with equal values.

        If results differ, arguments may, too: then those are paired that have equal values in other layers,
        or equal names, or that are the only ones left of their kind or size, or stand in the same order, but
        none that differ in a layer whose results agree.
        """
        near = {
            place: self.near_arguments(*self.matching.members_of(candidate, place))
            for place in candidate.places
        }
        by_names: dict[tuple[frozenset[str], ...], dict[tuple[str, str], None]] = defaultdict(dict)
        for place, pairs in near.items():
            by_names[self._names(candidate, place)] |= dict.fromkeys(pairs)
        paired = {}
        refuted = self._refuted(candidate, near)
        for place, pairs in near.items():
            reference, target = (member.arguments for member in self.matching.members_of(candidate, place))
            known = by_names[self._names(candidate, place)]
            reasons: dict[tuple[str, str], tuple[Evidence, str]] = {}
            reasons |= dict.fromkeys(pairs, ("values", "what the two were given, with equal values"))
            others = self._others(reference, target, known, [*reasons])
            if self._is_handed_on(candidate, place):
                others = {}
            for pair, reason in others.items():
                is_refuted = (self._names(candidate, place), pair) in refuted
                if not (is_refuted or self._contradicts(candidate, place, pair)):
                    reasons[pair] = reason
            is_wrong = self.matching.are_near(*self.matching.sites_of(candidate, place)) is False
            paired[place] = [
                ArgumentPair(f"input.{a}", f"input.{b}", fit[0], evidence, reason + fit[1])
                for (a, b), (evidence, reason) in reasons.items()
                if (fit := self.find_steps(reference[a], target[b], is_wrong=is_wrong)) is not None
            ]
        return paired

    def _refuted(
        self, candidate: Candidate, near: Mapping[Place, Sequence[tuple[str, str]]]
    ) -> set[tuple[tuple[frozenset[str], ...], tuple[str, str]]]:
        """Arguments of unlike values in layers whose results agree, with the names of all of their calls."""
        refuted = set()
        for place, pairs in near.items():
            if self.matching.are_near(*self.matching.sites_of(candidate, place)):
                one, other = self.matching.members_of(candidate, place)
                names = self._names(candidate, place)
                others = self._others(one.arguments, other.arguments, {}, pairs)
                refuted |= {(names, pair) for pair in others if self._contradicts(candidate, place, pair)}
        return refuted

    def _is_handed_on(self, candidate: Candidate, place: Place) -> bool:
        """Whether one module only hands a result on that the other makes with weights of what it is given.

        Such are a dropout, which a port has no module for, and the attention before it, whose result it has.
        So is a norm, which has no matrix, whose partner has: a convolution that it is folded into.
        """
        sites = self.matching.sites_of(candidate, place)
        modules = [side.module(site) for side, site in zip(self.matching.sides, sites, strict=True)]
        works = [known.get(module, "") for known, module in zip(self._works, modules, strict=True)]
        return {*works} in ({"alone", _MATRICES}, {"alone", _WEIGHTS}, {_WEIGHTS, _MATRICES})

    @cached_property
    def _works(self) -> tuple[Mapping[str, str], ...]:
        """What each module of both sides works with: matrices or other weights in it, modules, or alone."""
        works: tuple[dict[str, str], ...] = ({}, {})
        for archive, known in zip(self.archives, works, strict=True):
            infos = archive.info.modules
            around = {path: _modules_around(path) for path in infos}
            known |= dict.fromkeys(infos, "alone")
            known |= dict.fromkeys((outer for path in infos for outer in around[path]), "of modules")
            for work, has in ((_WEIGHTS, _has_weights), (_MATRICES, _has_matrices)):
                for path, info in infos.items():
                    if has(info):
                        known |= dict.fromkeys((path, *around[path]), work)
        return works

    def _names(self, candidate: Candidate, place: Place) -> tuple[frozenset[str], ...]:
        """The argument names of two members; layers with others say nothing of this one."""
        return tuple(frozenset(member.arguments) for member in self.matching.members_of(candidate, place))

    def near_arguments(self, one: Member, other: Member) -> list[tuple[str, str]]:
        """Pair arguments with equal values: those of equal names; of the rest as many as have them on the
        other side, in the order of the signature.
        """
        near = {
            name: [key for key, partner in other.arguments.items() if self._agree(record, partner)]
            for name, record in one.arguments.items()
        }
        pairs = {name: name for name, keys in near.items() if name in keys}
        rest = {
            name: [key for key in keys if key not in pairs]
            for name, keys in near.items()
            if name not in pairs
        }
        for keys in rest.values():
            names = [name for name, others in rest.items() if others == keys]
            if len(names) == len(keys):
                pairs |= zip(names, keys, strict=True)
        return [(name, pairs[name]) for name in near if name in pairs]

    def _agree(self, record: Record, other: Record) -> bool:
        """Whether two arguments have equal values, bit for bit or as near as pairs before them."""
        sides = self.matching.sides
        fingerprints = sides[0].fingerprint_of(record), sides[1].fingerprint_of(other)
        if self.matching.is_near(*fingerprints, record.order):
            return True
        uses_values = all(side.uses_values for side in self.fingerprints)
        return uses_values and record.digest != "" and _contents(record) == _contents(other)

    def _are_near(self, record: Record, other: Record) -> bool | None:
        """Whether two tensors have near values; None if values are unknown, or not to be used."""
        if record.dtype.is_whole and other.dtype.is_whole:
            fit = self.find_layout([record], [other])
            return None if fit is None or fit.residual is None else fit.residual == 0
        sides = self.matching.sides
        return self.matching.is_near(
            sides[0].fingerprint_of(record), sides[1].fingerprint_of(other), record.order
        )

    @staticmethod
    def _others(
        one: Mapping[str, Record],
        other: Mapping[str, Record],
        known: Mapping[tuple[str, str], None],
        done: Iterable[tuple[str, str]],
    ) -> dict[tuple[str, str], tuple[Evidence, str]]:
        """Pair the rest: as in other layers, by equal names, alone of a kind or size, in one order."""
        pairs: dict[tuple[str, str], tuple[Evidence, str]] = {}

        def rest(side: int) -> dict[str, Record]:
            used = {pair[side] for pair in (*done, *pairs)}
            return {name: record for name, record in (one, other)[side].items() if name not in used}

        def add(new: Iterable[tuple[str, str]], evidence: Evidence, reason: str) -> None:
            fitting = [(a, b) for a, b in new if one[a].size == other[b].size]
            pairs.update(dict.fromkeys(fitting, (evidence, f"what the two were given, {reason}")))

        left, right = rest(0), rest(1)
        add(
            [(a, b) for a, b in known if a in left and b in right],
            "values",
            "with equal values in other layers",
        )
        left, right = rest(0), rest(1)
        add([(name, name) for name in left if name in right], "name", "of the same name")
        for kind in (_kind, _kind_and_size):
            add(_lone_pairs(rest(0), rest(1), kind), "structure", "alone of its size")
        left, right = rest(0), rest(1)
        if [*map(_kind_and_size, left.values())] == [*map(_kind_and_size, right.values())]:
            add(zip(left, right, strict=True), "structure", "in the same order")
        return pairs

    def _contradicts(self, candidate: Candidate, place: Place, pair: tuple[str, str]) -> bool:
        """Whether two arguments differ though results agree, or, if names differ too, may agree.

        A difference of which the results keep a part says nothing: the argument may be as wrong as they are.
        """
        one, other = (
            m.arguments[name]
            for m, name in zip(self.matching.members_of(candidate, place), pair, strict=True)
        )
        if self._are_near(one, other) is not False:
            return False
        sites = self.matching.sites_of(candidate, place)
        results_are = self.matching.are_near(*sites)
        if pair[0] != pair[1] and results_are is False and self._are_right(one, other):
            return not self._take_one_each(candidate, place)
        if results_are and self._distance(one, other) <= _UNDONE * self.matching.distance_between(*sites):
            return False
        return results_are is not False if pair[0] != pair[1] else results_are is True

    def _take_one_each(self, candidate: Candidate, place: Place) -> bool:
        """Whether two modules of the same weights are given one tensor of floats each: whatever that is.

        A shortcut that is given the norm's result holds another tensor that is right, and is wrong by it.
        """
        sites = self.matching.sites_of(candidate, place)
        modules = [side.module(site) for side, site in zip(self.matching.sides, sites, strict=True)]
        are_leaves = all(
            known.get(module) == _MATRICES and not side.by_site[site][0].inside
            for known, module, side, site in zip(
                self._works, modules, self.matching.sides, sites, strict=True
            )
        )
        is_proven = candidate.has_equal_parameters or bool(candidate.because)
        members = self.matching.members_of(candidate, place)
        given = [[r for r in m.arguments.values() if r.dtype.kind == "float"] for m in members]
        return are_leaves and is_proven and [*map(len, given)] == [1, 1]

    def _are_right(self, record: Record, other: Record) -> bool:
        """Whether both are made or used by modules whose results agree, so that neither is wrong.

        Those that a pair makes are one thing, however far off.
        """
        one, two = self.matching.sides
        made = set(two.sites_with(other.digest))
        if any(self.matching.partner[0].get(site) in made for site in one.sites_with(record.digest)):
            return False
        return all(self._is_of_right(i, each) for i, each in enumerate((record, other)))

    def _is_of_right(self, i: int, record: Record) -> bool:
        side, partner = self.matching.sides[i], self.matching.partner[i]
        makers = [side.module(site) for site in side.sites_with(record.digest)]
        for site in (*makers, *side.consumers_of(record)):
            if site in partner:
                sites = (site, partner[site]) if i == 0 else (partner[site], site)
                if self.matching.are_near(*sites):
                    return True
        return False

    def _distance(self, record: Record, other: Record) -> float:
        one, two = (
            side.fingerprint_of(r) for side, r in zip(self.matching.sides, (record, other), strict=True)
        )
        return math.inf if one is None or two is None else one.distance(two)

    def find_steps(
        self, reference: Record, target: Record, *, is_wrong: bool = False
    ) -> tuple[Steps, str] | None:
        """Find the steps between two tensors, and the doubt that a reason should add.

        Args:
            reference: The reference's.
            target: The target's.
            is_wrong: Whether what comes of them differs, so that they may.

        Returns:
            None if no layout is certain, or none makes equal values equal, and no mistake explains that.
        """
        fit = self.find_layout([reference], [target])
        is_lost = self._are_near(reference, target) and fit is not None and (fit.residual or 0.0) > CLOSE
        is_otherwise = is_wrong and self.is_laid_out_otherwise(fit, [reference], [target])
        if fit is not None and fit.is_sure and not is_lost and not is_otherwise:
            return fit.steps, ""
        steps = self.usual_layout([reference], [target]) if is_wrong else None
        return None if steps is None else (steps, f"; but {describe_lack(fit, is_lost=bool(is_lost))}")

    def learn(self) -> None:
        """Count the layouts that values prove: most other tensors are laid out like them."""
        for candidate in self.matching.accepted:
            best = min(candidate.agreeing, key=lambda p: (candidate.agreeing[p].distance, p), default=None)
            member, target_member = self.matching.members_of(candidate, best or candidate.places[0])
            pairs = [] if best is None else [self.matching.records_of(candidate, best)]
            pairs += [
                ([member.arguments[a]], [target_member.arguments[b]])
                for a, b in self.near_arguments(member, target_member)
            ]
            for reference, target in pairs:
                fit = self.find_layout(reference, target) if len(reference) == len(target) == 1 else None
                if fit is not None and fit.is_proven:
                    shapes = reference[0].shape, target[0].shape
                    self._usual[shapes][fit.steps] += 1
                    self._usual[len(shapes[0]), len(shapes[1])][fit.steps] += 1

    def usual_layout(self, reference: Sequence[Record], target: Sequence[Record]) -> Steps | None:
        """The layout of most pairs of such shapes, or else one that moves no element, or the only order."""
        known = self.known_layout(reference, target)
        if known is not None or len(reference) != 1 or len(target) != 1:
            return known
        shape, other = reference[0].shape, target[0].shape
        steps = plain([shape], [other])
        if steps is None and not self.hold_the_same(reference, target):
            return only_order(shape, other)
        return steps

    def known_layout(self, reference: Sequence[Record], target: Sequence[Record]) -> Steps | None:
        """The layout that most pairs of such shapes have; None if none is known."""
        if len(reference) != 1 or len(target) != 1:
            return None
        shape, other = reference[0].shape, target[0].shape
        for kind in ((shape, other), (len(shape), len(other))):
            known = {k: n for k, n in self._usual[kind].items() if fits_shapes(k, shape, other)}
            for steps, count in known.items():
                if 2 * count > sum(known.values()):
                    return steps
        return None

    def is_laid_out_otherwise(
        self, fit: Fit | None, reference: Sequence[Record], target: Sequence[Record]
    ) -> bool:
        """Whether two tensors agree in no layout, not as they are either, while most like them are moved."""
        if fit is None or fit.steps or fit.is_proven or fit.residual is None or fit.residual <= CLOSE:
            return False
        return self.known_layout(reference, target) not in (None, ())

    def steps_of_member(self, steps: Steps, reference: Sequence[Record], target: Sequence[Record]) -> Steps:
        """The layout of a member: that of most, or a certain one of its own if its shapes do not fit that."""
        if len(reference) != 1 or len(target) != 1:
            return steps
        if fits_shapes(steps, reference[0].shape, target[0].shape):
            return steps
        own = self.find_layout(reference, target)
        return own.steps if own is not None and own.is_sure else steps

    def is_whole(
        self, candidate: Candidate, place: Place, steps: Steps, argument_pairs: Sequence[ArgumentPair]
    ) -> bool:
        """Whether one entry of the two sites, with these steps, pairs exactly what belongs together.

        A result that alone differs gets an entry with a reason of its own.
        """
        member, target_member = self.matching.members_of(candidate, place)
        keys = [m.result.key for m in (member, target_member) if m.result and not m.result.key.is_bare]
        if len(keys) < 2:
            return True
        expected = {(keys[0].slot, keys[1].slot), *((t.reference, t.target) for t in argument_pairs)}
        is_near = self.matching.are_near(*self.matching.sites_of(candidate, place))
        for left, right in self.other_results(member, target_member):
            is_odd = self._are_near(left, right) is False
            if self.find_steps(left, right) != (steps, "") or (is_odd and is_near):
                return False
            expected.add((left.key.slot, right.key.slot))
        mine_by, theirs_by = (
            {r.key.slot: r for r in (*m.results.values(), *m.arguments.values())}
            for m in (member, target_member)
        )
        pairs = pair_slots(mine_by, theirs_by, Layout.parse(steps))
        slots = {(record.key.slot, partner.key.slot) for record, partner in pairs}
        return slots == expected and all(t.steps == steps and "but " not in t.reason for t in argument_pairs)

    def note_given(self, record: Record, target: Record, steps: Steps) -> None:
        """Note that an argument of the target is what an argument of the reference is, behind a mistake.

        What first gave that in the reference, as an activation, is then what the target has as an argument,
        if nothing else is paired with it.
        """
        one = self.matching.sides[0]
        alike = one.sites_with(record.digest)
        first = min(alike, key=lambda site: (one.order(site), site), default="")
        is_free = not any(
            self.matching.has_partner(0, site) or site in self.matching.handed_on for site in alike
        )
        if first and is_free and self._are_near(record, target) is False:
            shape = one.result(first).shape
            own: Steps | None = steps
            if shape != record.shape:  # what the steps move is known of the argument's axes alone
                own = None if steps else plain([shape], [target.shape])
            if own is not None:
                self.given.setdefault(first, (place_of(target), own))

    def other_results(self, one: Member, other: Member) -> list[tuple[Record, Record]]:
        """Results of two sites, besides their main ones, that are paired with each other."""
        partner = self.matching.partner[0]
        sites = ((slot, partner.get(f"{one.site}/{slot}", "")) for slot in one.other_results)
        return [
            (one.other_results[slot][0], other.other_results[theirs][0])
            for slot, site in sites
            if (theirs := site.removeprefix(f"{other.site}/")) in other.other_results
        ]


def _has_weights(info: ModuleInfo) -> bool:
    return bool(info.parameters or info.buffers)


def _has_matrices(info: ModuleInfo) -> bool:
    """Whether a module holds a matrix, as a buffer too; whole numbers are one that is packed."""
    held = (*info.parameters.values(), *info.buffers.values())
    return any(
        tensor.dtype.startswith(("int", "uint")) or sum(size > 1 for size in tensor.shape or ()) > 1
        for tensor in held
        if tensor.shape != ()
    )


def _modules_around(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _contents(record: Record) -> tuple[object, ...]:
    return record.digest, record.dtype.name, record.shape


def _kind(record: Record) -> object:
    return "whole" if record.dtype.is_whole else record.dtype.kind


def _kind_and_size(record: Record) -> object:
    return _kind(record), record.size


def _lone_pairs(
    one: Mapping[str, Record], other: Mapping[str, Record], kind: Callable[[Record], object]
) -> list[tuple[str, str]]:
    """Pair arguments that are alone of their kind on both sides."""
    sides: list[dict[object, list[str]]] = [defaultdict(list), defaultdict(list)]
    for names, records in zip(sides, (one, other), strict=True):
        for name, record in records.items():
            names[kind(record)].append(name)
    both = ((names, sides[1].get(each, ())) for each, names in sides[0].items())
    return [(ours[0], theirs[0]) for ours, theirs in both if len(ours) == len(theirs) == 1]


def describe_lack(fit: Fit | None, *, is_lost: bool) -> str:
    """Say why a pair that belongs together has no certain layout."""
    if is_lost:
        return "their elements are in different orders and no layout brings them together"
    if fit is None:
        return "no layout fits their shapes"
    return f"{fit.choices} layouts fit their shapes and none is certain"
