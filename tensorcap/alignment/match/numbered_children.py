"""Pair the children of a list or sequence of modules whose numbers say something else on each side (ALN-180).

Where a side has fewer modules (batch norms folded into convolutions), all behind the first are numbered
otherwise, and equal names are those of other modules.

1. The numbers of a container are *contradicted* if its sides have unlike counts of children, and a number is
   of modules one of which has parameters and the other none, or parameters of other shapes, or that have
   none and are of other classes.
2. Its children are then paired in their order (Needleman-Wunsch without a price for gaps), by parameters of
   equal digests or equal shapes, and by their class if neither has parameters; unlike ones are no pair.
3. Modules within a pair belong together by their paths in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from tensorcap.alignment.mapping import Entry
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import ROOT_SITE
from tensorcap_formats.run_info import ModuleInfo

_EQUAL_DIGESTS: Final = 8  # weighs more than any others between which it might lie
_EQUAL_SHAPES: Final = 4
_EQUAL_CLASS: Final = 1  # of modules without parameters: all that is known
_REASON: Final = "children of {container} in their order, as numbers are of other modules there"


def pair_numbered_children(reference: Archive, target: Archive) -> tuple[Entry, ...]:
    """Pair the children of containers whose numbers are contradicted; none if there are no such.

    Args:
        reference: The trusted archive.
        target: The archive under test.
    """
    ours, theirs = (_Children(archive) for archive in (reference, target))
    entries: list[Entry] = []
    for container in ours.of:
        if container not in theirs.of or not _is_contradicted(ours, theirs, container):
            continue
        reason = _REASON.format(container=container or "the model")
        for one, other in _in_order(ours, theirs, container):
            for site, partner in _with_descendants(ours, theirs, one, other):
                entries.append(Entry((site,), (partner,), evidence="structure", reason=reason))
    return tuple(entries)


class _Children:
    """The numbered children of each container of a run, and the parameters of each child.

    Args:
        archive: The run.

    Attributes:
        modules: All modules by site.
        sites: Sites that have records.
        of: Sites of children, by that of their container, in the order of their numbers.
    """

    def __init__(self, archive: Archive) -> None:
        self.modules: Mapping[str, ModuleInfo] = archive.info.modules
        self.sites = dict.fromkeys(record.key.site for record in archive.records)
        numbers: dict[str, list[int]] = defaultdict(list)
        self._parameters: dict[str, list[tuple[str, tuple[int, ...], str]]] = defaultdict(list)
        for site, module in self.modules.items():
            container, _, number = site.rpartition(".")
            if number.isdecimal():
                numbers[container].append(int(number))
            for name, info in module.parameters.items():
                for around in _from_itself(site):
                    path = f"{site}.{name}".removeprefix(f"{around}.")
                    self._parameters[around].append((path, info.shape or (), info.digest or ""))
        self.of = {
            container: [f"{container}.{n}" if container else str(n) for n in sorted(known)]
            for container, known in numbers.items()
        }

    def shapes(self, site: str) -> list[tuple[str, tuple[int, ...]]]:
        """Paths and shapes of all parameters of a child and of modules within it."""
        return sorted((path, shape) for path, shape, _ in self._parameters.get(site, ()))

    def digests(self, site: str) -> list[str]:
        """Their digests, in the order of their paths."""
        return [digest for _, _, digest in sorted(self._parameters.get(site, ()))]


def _from_itself(site: str) -> Iterator[str]:
    """A site and those around it."""
    while site and site != ROOT_SITE:
        yield site
        site = site.rpartition(".")[0]


def _is_contradicted(ours: _Children, theirs: _Children, container: str) -> bool:
    """Whether both have unlike counts of children, and one number is of modules that cannot be the same."""
    mine, other = ours.of[container], theirs.of[container]
    if len(mine) == len(other):
        return False
    return any(_score(ours, theirs, site, site) is None for site in set(mine) & set(other))


def _score(ours: _Children, theirs: _Children, one: str, other: str) -> float | None:
    """How much speaks for two children to be the same; None if they cannot be."""
    shapes = ours.shapes(one), theirs.shapes(other)
    is_same_class = ours.modules[one].short_class == theirs.modules[other].short_class
    if not any(shapes):
        return _EQUAL_CLASS if is_same_class else None
    mine, others = (dict(side) for side in shapes)
    shared = mine.keys() & others.keys()
    if not shared or any(mine[path] != others[path] for path in shared):
        return None
    if not is_same_class and mine != others:
        return None  # a convolution with a bias and a norm
    digests = ours.digests(one), theirs.digests(other)
    return _EQUAL_DIGESTS if mine == others and digests[0] == digests[1] else _EQUAL_SHAPES


def _in_order(ours: _Children, theirs: _Children, container: str) -> list[tuple[str, str]]:
    """Pair children in their order so that most speaks for all pairs together."""
    mine, others = ours.of[container], theirs.of[container]
    scores = [[_score(ours, theirs, one, other) or 0.0 for other in others] for one in mine]
    best = [[0.0] * (len(others) + 1) for _ in range(len(mine) + 1)]
    for i in reversed(range(len(mine))):
        for j in reversed(range(len(others))):
            with_pair = scores[i][j] + best[i + 1][j + 1] if scores[i][j] else 0.0
            best[i][j] = max(with_pair, best[i + 1][j], best[i][j + 1])
    return list(_walk(mine, others, scores, best))


def _walk(
    mine: Sequence[str],
    others: Sequence[str],
    scores: Sequence[Sequence[float]],
    best: Sequence[Sequence[float]],
) -> Iterator[tuple[str, str]]:
    """Yield the pairs of a best path."""
    i = j = 0
    while i < len(mine) and j < len(others):
        if scores[i][j] and best[i][j] == scores[i][j] + best[i + 1][j + 1]:
            yield mine[i], others[j]
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            i += 1
        else:
            j += 1


def _with_descendants(ours: _Children, theirs: _Children, one: str, other: str) -> Iterator[tuple[str, str]]:
    """Yield a pair of children, and the modules of equal paths within, as far as both sides have records."""
    for site in ours.sites:
        if site == one or site.startswith(f"{one}."):
            partner = other + site[len(one) :]
            if partner in theirs.sites:
                yield site, partner
