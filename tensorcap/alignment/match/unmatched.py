"""Explain what is left over on both sides: sites without a partner, and records that no entry reaches.

Nothing is silent: each record of a run is in a link or is named here. It is *explained* if the reason is
known to do no harm: its values have a counterpart under another name, or what is computed from it agrees.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from tensorcap.alignment.layout import CLOSE
from tensorcap.alignment.links import Link, place_of
from tensorcap.alignment.mapping import SIDE_NAMES, WITH_OTHER_VALUES, Entry, LeftOver, unexplained
from tensorcap.alignment.match.contents import modules_in_few_bits
from tensorcap.alignment.match.derived_outputs import ScaledResults
from tensorcap.alignment.match.matching import Matching
from tensorcap.alignment.match.slots import Slots
from tensorcap.alignment.names import Rules, Survey, fold
from tensorcap.runs import is_telling
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import ROOT_SITE
from tensorcap_formats.records import Record
from tensorcap_formats.run_info import RunInfo

Reason = tuple[str, bool]  # and whether it explains
Rivals = tuple[Mapping[str, Sequence[str]], Mapping[str, Sequence[str]]]

_UNKNOWN: Final = "no counterpart was found"
_SHOWN: Final = 3
_BEYOND: Final = 4.0  # of what usual pairs differ by, that a result with other values differs by at least
_LAST: Final = 8  # usual pairs
_MOST_READ: Final = 2**26  # elements of results that may be lost ones


class Unmatched:
    """Says why sites and records have no counterpart.

    Args:
        matching: What is paired.
        surveys: The sites of both runs.
        slots: Finds layouts, and says how far equal values may be apart.
        rules: What says which modules only one side has.
        target_run: The target's run metadata.
    """

    def __init__(
        self,
        matching: Matching,
        surveys: tuple[Survey, Survey],
        slots: Slots,
        rules: Rules,
        target_run: RunInfo,
    ) -> None:
        self._matching = matching
        self._slots = slots
        self._surveys = surveys
        self._rules = rules
        self._target_run = target_run
        self._classes = [
            {site: member.module for site, member in survey.members.items()} for survey in surveys
        ]
        self._uncalled = [
            {
                rules.canonical(site): why
                for site, why in survey.never_called.items()
                if site not in side.by_site
            }
            for survey, side in zip(surveys, matching.sides, strict=True)
        ]
        self._rivals = rivals(matching)
        in_few_bits = modules_in_few_bits(target_run)
        self._has_few_bits, self._may_read = bool(in_few_bits), _MOST_READ
        self._in_few_bits = {  # modules without a partner, and how many numbers they hold
            site: max((record.size for (record, *_) in member.parameter_tensors.values()), default=0)
            for site, member in surveys[1].members.items()
            if site in in_few_bits and site in matching.sides[1].by_site and not matching.has_partner(1, site)
        }
        self._scaled = ScaledResults(matching, slots.judge.bound)

    def sites(self) -> list[LeftOver]:
        """The results that are in no entry, by site or by slot, and the sites that were never called."""
        matching = self._matching
        left_over: list[LeftOver] = []
        for i, name in enumerate(SIDE_NAMES):
            side = matching.sides[i]
            explained = {site: self._explain_site(i, site) for site in side.by_site if self._is_left(i, site)}
            whole = {module for module, sites in side.results_of.items() if explained.keys() >= {*sites}}
            for template in side.templates.values():
                reasons: dict[Reason, list[str]] = defaultdict(list)
                for member in template.members.values():
                    if member.site not in explained:
                        continue
                    module = side.module(member.site)
                    if module not in whole:
                        reasons[explained[member.site]].append(side.place(member.site))
                    elif not template.slot:  # none of its results has a partner: once, the gravest reason
                        gravest = min((explained[s] for s in side.results_of[module]), key=lambda r: r[1])
                        reasons[gravest].append(module)
                known = next((reason for reason, is_explained in reasons if is_explained), None)
                for (reason, is_explained), sites in reasons.items():
                    if known is not None and reason == _UNKNOWN:  # one site template, one reason
                        reason, is_explained = f"as others of {template.name}: {known}", True
                    left_over.append(LeftOver(name, tuple(sites), reason, is_explained))
            never = [site for site in self._surveys[i].never_called if site not in side.by_site]
            if never:
                left_over.append(LeftOver(name, tuple(never), "never called"))
        return left_over

    def _is_left(self, side: int, site: str) -> bool:
        is_handed_on = side == 0 and site in self._matching.handed_on
        return not is_handed_on and not self._matching.has_partner(side, site)

    def records(
        self,
        archives: tuple[Archive, Archive],
        links: Sequence[Link],
        left: Sequence[LeftOver],
        contested: Rivals,
    ) -> list[LeftOver]:
        """The records that are in no link and at no site that is left over.

        Args:
            archives: Both runs.
            links: What the entries make of them.
            left: What is left over already.
            contested: By place, what it could be.
        """
        left_over = []
        for i, name in enumerate(SIDE_NAMES):
            linked = {r.key.text for link in links for r in (link.target if i else link.reference)}
            reasons = {place: known for known in left if known.side == name for place in known.places}
            places_by_reason: dict[Reason, dict[str, None]] = defaultdict(dict)
            for record, reason in self._unlinked(i, archives, linked, reasons, contested[i]):
                places_by_reason[reason][place_of(record)] = None
            left_over += [
                LeftOver(name, tuple(places), *reason) for reason, places in places_by_reason.items()
            ]
        return left_over

    def _unlinked(
        self,
        i: int,
        archives: tuple[Archive, Archive],
        linked: set[str],
        left: Mapping[str, LeftOver],
        contested: Mapping[str, Sequence[str]],
    ) -> Iterator[tuple[Record, Reason]]:
        records = archives[i].records
        by_digest: dict[str, Record] = {}
        for record in records:  # the linked first
            if record.digest and record.key.text in linked:
                by_digest.setdefault(record.digest, record)
        for record in records:
            if record.digest and record.key.site in left and record.key.slot.startswith("output"):
                by_digest.setdefault(record.digest, record)
        made = {
            record.digest: record
            for record in archives[1 - i].records
            if is_telling(record) and record.key.slot.startswith("output")
        }
        places = {place_of(record) for record in records if record.key.text in linked}
        steps = {record.key.step for record in archives[1 - i].records}
        for record in records:
            key, place = record.key, place_of(record)
            if key.text in linked or key.site in left or place in left:
                continue
            same = by_digest.get(record.digest)
            if same is not None and same.key.site in left:
                known = left[same.key.site]
                yield (
                    record,
                    (f"it is what {fold(known.places[0])[0]} gave: {known.reason}", known.is_explained),
                )
            elif same is not None:
                yield (
                    record,
                    (f"it holds what {fold(place_of(same))[0]} holds, which has a counterpart", True),
                )
            elif place in places and key.step not in steps:
                yield record, (f"the {SIDE_NAMES[1 - i]} has no step {key.step}", True)
            elif place in places:
                yield record, (f"the {SIDE_NAMES[1 - i]} has fewer calls", False)
            elif key.slot.startswith("input.") and is_telling(record) and record.digest in made:
                other = fold(place_of(made[record.digest]))[0]
                yield record, (f"it holds what {other} of the {SIDE_NAMES[1 - i]} gave", True)
            elif contested.get(place):
                yield record, (_could_be(contested[place]), False)
            elif key.slot.startswith("grad_"):
                yield record, (_UNKNOWN, False)
            else:
                yield record, self._explain_record(i, record)

    def _explain_record(self, i: int, record: Record) -> Reason:
        """Why a record of a site has no counterpart: of a site without results, or beside those."""
        matching, site = self._matching, record.key.site
        other = matching.partner[i].get(site)
        where = f" at {matching.sides[1 - i].by_site[other][0].name}" if other is not None else ""
        if site not in matching.sides[i].by_site or record.key.rank:
            return self._explain_by_rule(i, site)
        is_result = record.key.slot.partition(".")[0] == "output"
        consumers = matching.sides[i].consumers_of(record) if is_result else [site]
        if matching.is_confirmed(i, site, consumers):
            return f"{_UNKNOWN}{where}, and what comes of it agrees", True
        return f"{_UNKNOWN}{where}", False

    def _explain_site(self, i: int, site: str) -> Reason:
        """Why a site has no partner, and whether that suffices."""
        matching = self._matching
        side = matching.sides[i]
        rivals = dict.fromkeys(self._rivals[i].get(site, ()))
        options = [other for other in rivals if other not in matching.partner[1 - i]]
        options = options or self._unpaired_weights(i, site)
        if options:
            return _could_be(options), False
        group = side.groups[side.group_of[site]] if site in side.group_of else ()
        known = [other for other in group if matching.has_partner(i, other)]
        if known:
            template = side.by_site[known[0]][0]
            return f"it has the values of {template.name}, which has a counterpart", True
        uncalled = self._explain_uncalled(i, side.module(site))
        if uncalled and matching.is_confirmed(i, site):
            return f"{uncalled}, and what comes of it agrees", True
        fingerprint, other_side = side.fingerprints.get(site), SIDE_NAMES[1 - i]
        if fingerprint is not None:
            scaled = next(iter(self._scaled.find(i, fingerprint).values()), "")
            if scaled:
                return scaled, False
            near = matching.find_near(i, site)
            known = [other for other in near if matching.has_partner(1 - i, other)]
            if known:
                owner = f"{matching.sides[1 - i].by_site[known[0]][0].name} of the {other_side}"
                return f"it has the values of {owner}, which has another counterpart", True
            head = self._find_left_out_head(site) if i == 0 and not near else ""
            if head:
                return (
                    f"the target's code leaves out the weights of {head}, and its other results agree",
                    True,
                )
            alike = self._find_alike(site) if i == 0 and not near else []
            if alike:
                return WITH_OTHER_VALUES + _some(alike), False
            if not near and matching.is_confirmed(i, site):
                return f"nothing in the {other_side} has its values, and what comes of them agrees", True
        elif side.by_site[site][0].slot and matching.is_confirmed(i, site):
            return "it has no values to be found by, and what comes of them agrees", True
        return self._explain_by_rule(i, side.module(site))

    def _unpaired_weights(self, i: int, site: str) -> list[str]:
        """Modules of the target without a partner whose weights in few bits may be those of a reference's.

        Nothing that lacks a partner beside such a one is explained: what comes of it may agree in spite of a
        wrong weight, as errors of rounding are large.
        """
        member = self._surveys[0].members.get(site) if i == 0 else None
        if member is None:
            return []
        one, other = self._matching.sides
        sizes = {math.prod(shape) for shape in member.parameters.values() if len(shape) > 1}
        return [
            theirs
            for theirs, kept in self._in_few_bits.items()
            if kept in sizes and one.size(site) == other.size(theirs)
        ]

    def _find_alike(self, site: str) -> list[str]:
        """Results of a target with weights in few bits that may be a reference's, though they differ.

        They are as large, those of the reference are not near them, and what differs is less than what they
        have in common. That what comes of it agrees does not explain such a one: by what few bits round off
        mistakes may agree as well.
        """
        matching, (one, other) = self._matching, self._matching.sides
        if not self._has_few_bits:
            return []
        mine, records = one.fingerprints[site], one.records(site)
        near: dict[str, str] = {}
        for theirs in other.nearest.within(CLOSE, mine):
            if not matching.has_partner(1, theirs) and not matching.find_near(1, theirs):
                near.setdefault(other.result(theirs).digest or theirs, theirs)
        alike = {}
        for theirs in sorted(near.values(), key=lambda t: mine.distance(other.fingerprints[t]))[:_SHOWN]:
            self._may_read -= 2 * mine.size
            fit = self._slots.find_layout(records, other.records(theirs)) if self._may_read > 0 else None
            if fit is not None and fit.residual is not None and fit.residual <= CLOSE:
                alike[theirs] = fit.residual
        usual = self._usual_residual(one.order(site)) if alike else 0.0
        return [t for t in sorted(alike, key=alike.__getitem__) if alike[t] > _BEYOND * usual]

    def _usual_residual(self, order: int) -> float:
        """What layouts of the last pairs before a result of the reference, or of the first, leave, mostly."""
        matching, (one, other) = self._matching, self._matching.sides
        pairs = sorted((one.order(mine), mine, theirs) for mine, theirs in matching.partner[0].items())
        end = bisect.bisect_left(pairs, (order,))
        fits = (
            self._slots.find_layout(one.records(mine), other.records(theirs))
            for _, mine, theirs in pairs[max(0, end - _LAST) : end] or pairs[:_LAST]
        )
        left = [fit.residual for fit in fits if fit is not None and fit.residual is not None]
        return statistics.median(left) if left else 0.0

    def _find_left_out_head(self, site: str) -> str:
        """The part of the reference, such as `pooler`, that makes a result of the model; "" if there is none.

        The target's code leaves out its weights, nothing in it has a partner, and other results agree.
        """
        matching = self._matching
        side, members = matching.sides[0], self._surveys[0].members
        results = [s for s in side.results_of[ROOT_SITE] if matching.has_partner(0, s)]
        agree = all(
            s in matching.partner[0] and matching.are_near(s, matching.partner[0][s]) for s in results
        )
        if side.module(site) != ROOT_SITE or not results or not agree:
            return ""
        makers = [side.module(s) for s in side.sites_with(side.result(site).digest)]
        for head in dict.fromkeys(maker.partition(".")[0] for maker in makers if maker != ROOT_SITE):
            within = [s for s in members if s == head or s.startswith(f"{head}.")]
            weights = [f"{s}.{name}" for s in within for name in members[s].parameters]
            paired = [s for s in side.by_site if side.module(s) in within and matching.has_partner(0, s)]
            if weights and not paired and all(map(self._target_run.leaves_out, weights)):
                return head
        return ""

    def _explain_by_rule(self, i: int, site: str) -> Reason:
        """Whether a rule says that only this side has a module, and why."""
        reason = self._rules.reason(SIDE_NAMES[i], site, self._classes[i].get(site, ""))
        if reason:
            return f"no counterpart by rule: {reason}", True
        return self._explain_uncalled(i, site) or _UNKNOWN, False

    def _explain_uncalled(self, i: int, site: str) -> str:
        """What is to be said if the other side has a module of the name, and never called it; else ""."""
        why = self._uncalled[1 - i].get(self._rules.canonical(site))
        if why is None:
            return ""
        return f"the {SIDE_NAMES[1 - i]} never calls the module of this name" + (f" ({why})" if why else "")


def leave_over(entry: Entry, reason: str) -> list[LeftOver]:
    """What an entry that fits no records leaves over."""
    left, right = (dict.fromkeys(itertools.chain(*side)) for side in zip(*entry.expanded(), strict=True))
    return unexplained(left, right, reason)


def rivals(matching: Matching) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """What each site that is contested could be, best first."""
    options: tuple[dict[str, list[str]], dict[str, list[str]]] = (defaultdict(list), defaultdict(list))
    for candidate in matching.contested:
        for place in candidate.places:
            left, right = matching.sites_of(candidate, place)
            if left not in matching.partner[0] and right not in matching.partner[1]:
                options[0][left].append(right)
                options[1][right].append(left)
    return options


def _could_be(options: Sequence[str]) -> str:
    return f"could be {_some(options)}"


def _some(options: Sequence[str]) -> str:
    more = f" and {len(options) - _SHOWN} more" if len(options) > _SHOWN else ""
    return f"{' or '.join(options[:_SHOWN])}{more}"
