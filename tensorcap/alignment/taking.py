"""Results of the reference that the target has only as arguments: a sum or an activation without a module."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from tensorcap.alignment.candidates import ENOUGH, Candidate, Place
from tensorcap.alignment.evidence import Agreement, Print, Prints, agreements
from tensorcap.alignment.matching import Matching
from tensorcap.alignment.roles import Index


def taken_results(matching: Matching, prints: Prints) -> list[tuple[Candidate, str]]:
    """Pairs of a role without a partner and a role of the target that was given its results, and as what.

    Args:
        matching: What is paired already.
        prints: Of the target's records.
    """
    one, other = matching.sides
    groups = [g for g in one.groups if not any(matching.has_partner(0, site) for site in g)]
    taken: dict[tuple[str, ...], tuple[int, str, str]] = {}  # the first that took it
    found: dict[tuple[str, ...], Print] = {}
    for site, (role, index) in other.by_site.items():
        member = role.members[index]
        for name, record in sorted(member.arguments.items()):
            known = prints.of(record)
            if known is not None:
                place = record.order, site, name
                at = (record.digest,) if record.digest else (site, name)
                taken[at] = min(place, taken.get(at, place))
                found[at] = known
    keys = sorted(taken, key=lambda at: taken[at])
    near = agreements([one.prints[g[0]] for g in groups], [found[at] for at in keys], matching.rounding)
    proofs: dict[tuple[str, str, str, Index | Place], dict[Place, Agreement]] = defaultdict(dict)
    for (i, j), agreement in sorted(near.items()):
        _, site, name = taken[keys[j]]
        role, b = other.by_site[site]
        first, a = one.by_site[min(groups[i], key=lambda s: (one.order(s), s))]
        shift = tuple(y - x for x, y in zip(a, b, strict=True)) if len(a) == len(b) else (a, b)
        proofs[first.name, role.name, name, shift][a, b] = agreement
    return list(_settled(proofs))


def _settled(
    proofs: dict[tuple[str, str, str, Index | Place], dict[Place, Agreement]],
) -> Iterable[tuple[Candidate, str]]:
    """The proofs that suffice, the best first, each result once."""
    done: set[tuple[str, Index]] = set()
    found = [
        (Candidate(reference, target, tuple(sorted(agreeing)), agreeing), name)
        for (reference, target, name, _), agreeing in proofs.items()
    ]
    for candidate, name in sorted(found, key=lambda pair: (*pair[0].order, pair[1])):
        candidate.places = tuple(p for p in candidate.places if (candidate.reference, p[0]) not in done)
        candidate.agreeing = {place: candidate.agreeing[place] for place in candidate.places}
        if candidate.nats >= ENOUGH:
            done.update((candidate.reference, a) for a, _ in candidate.places)
            yield candidate, name
