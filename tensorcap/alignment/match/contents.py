"""What modules hold, at whatever depth, by their parameters, which any layout leaves the same.

Where values differ, as behind a mistake, parameters prove which module is which, though a port has written
one module where the reference has several, has moved its matrices, or has fused some of them.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tensorcap.alignment.layout import Shape
from tensorcap.runs import enclosing_sites, lies_within
from tensorcap_formats.archive import Archive
from tensorcap_formats.float_formats import rounded
from tensorcap_formats.run_info import RunInfo, TensorInfo

_NARROW: Final = ("bfloat16", "float16")
_UNLIKE: Final = 0.1  # of the elements of two modules that are taken to be as many: padding is more

_Held = tuple[frozenset[int], frozenset[int]]  # numbers of parameters, and of pairs
SitePair = tuple[str, str]  # of the reference and of the target


@dataclass(frozen=True, slots=True)
class Contents:
    """What the modules of both sides hold.

    Attributes:
        shared: By side and site, which parameters it holds of those that both sides have once, by numbers.
        elements: By side and site, how many elements it holds of parameters of two axes and more.
    """

    shared: tuple[Mapping[str, frozenset[int]], ...] = ({}, {})
    elements: tuple[Mapping[str, int], ...] = ({}, {})

    @classmethod
    def of(cls, archives: tuple[Archive, Archive]) -> Contents:
        """Read what modules hold; nothing is known of parameters without statistics and digests."""
        narrow = narrow_dtype(archives)
        sites_of = [_sites_by_mark(archive, narrow) for archive in archives]
        numbers = [
            mark
            for mark, sites in sites_of[0].items()
            if len(sites) == 1 and len(sites_of[1].get(mark, ())) == 1
        ]
        places = [[of_side[mark][0] for mark in numbers] for of_side in sites_of]
        return cls(
            tuple(_numbers_within(enumerate(sites)) for sites in places),
            tuple(_elements_within(archive) for archive in archives),
        )

    def differ(self, site: str, other: str) -> bool:
        """Whether one of two modules holds a parameter that the other does not, though its side has it."""
        of_site, of_other = self.shared[0].get(site), self.shared[1].get(other)
        return bool(of_site) and bool(of_other) and of_site != of_other

    def pairs(
        self,
        proven: Iterable[SitePair],
        sizes: tuple[Mapping[str, int], Mapping[str, int]],
        is_known: Callable[[str, str], bool] = lambda site, other: False,
        *,
        is_certain: bool = False,
    ) -> Iterator[SitePair]:
        """Yield modules that hold the same, and no others but modules around or within them do.

        1. They hold the same parameters of those that both sides have, and the same modules of pairs that are
           proven, one at least.
        2. Of several that lie within each other, those are taken whose like are pairs.
        3. Else, or if one thing alone is the same, those are taken that hold about as many elements, and gave
           as many; of those the outmost, or all in turn if they are as many on both sides.

        Args:
            proven: Pairs of modules.
            sizes: How many elements the modules of both sides gave that gave results.
            is_known: Whether other layers' modules like two are pairs.
            is_certain: Whether none is taken where one side has more such modules than the other.
        """
        pairs = list(proven)
        chains: list[dict[_Held, list[str]]] = []
        for i, of_side in enumerate(sizes):
            paired = _numbers_within((number, pair[i]) for number, pair in enumerate(pairs))
            chain: dict[_Held, list[str]] = defaultdict(list)
            for site in sorted(of_side, key=lambda s: (s.count("."), s)):
                held = self.shared[i].get(site, frozenset()), paired.get(site, frozenset())
                if any(held):
                    chain[held].append(site)
            chains.append(chain)
        for held, sites in chains[0].items():
            others = chains[1].get(held, [])
            fitting = [(a, b) for a in sites for b in others if sizes[0][a] == sizes[1][b]]
            alike = [pair for pair in fitting if is_known(*pair)]
            if alike:
                yield from alike
            elif len(sites) == len(others) == 1 and sum(map(len, held)) > 1:
                yield sites[0], others[0]
            elif others and all(map(_is_chain, (sites, others))):
                yield from self._outmost(fitting, is_certain=is_certain)

    def _outmost(self, pairs: Sequence[SitePair], *, is_certain: bool) -> Iterator[SitePair]:
        both = [pair for pair in pairs if self.hold_as_many(*pair)]
        left, right = ([*dict.fromkeys(pair[i] for pair in both)] for i in (0, 1))
        if len(left) == len(right):
            yield from zip(left, right, strict=True)
        elif left and right and not is_certain:
            yield left[0], right[0]

    def hold_as_many(self, site: str, other: str) -> bool:
        """Whether two modules hold about as many elements in their matrices."""
        one, two = self.elements[0].get(site, 0), self.elements[1].get(other, 0)
        return abs(one - two) <= _UNLIKE * max(one, two)


def modules_in_few_bits(info: RunInfo) -> set[str]:
    """The modules that hold weights in few bits, which are recorded as floats too (CAP-330)."""
    return {path for path, module in info.modules.items() if module.settings.get("dequantised")}


def narrow_dtype(archives: tuple[Archive, Archive]) -> str:
    """The narrow dtype that parameters of one side alone have, being the other's rounded; or ""."""
    dtypes = [{parameter.dtype for _, parameter in _parameters(archive)} for archive in archives]
    return next((name for name in _NARROW if (name in dtypes[0]) != (name in dtypes[1])), "")


def _parameters(archive: Archive) -> Iterator[tuple[str, TensorInfo]]:
    """The parameters of an archive, with the site of their module."""
    for path, module in archive.info.modules.items():
        for parameter in module.parameters.values():
            yield path, parameter


def _sites_by_mark(archive: Archive, narrow: str) -> Mapping[object, list[str]]:
    """The modules that hold each parameter, by what no layout changes: its sizes, and its ends, rounded."""
    sites: dict[object, list[str]] = defaultdict(list)
    for path, parameter in _parameters(archive):
        statistics = parameter.statistics
        if statistics is None or statistics.minimum == statistics.maximum or parameter.shape is None:
            continue
        ends = np.array([statistics.minimum, statistics.maximum], float)
        marks = tuple((rounded(ends, narrow) if narrow else ends).tolist())
        sites[sorted_sizes(parameter.shape), marks].append(path)
    return sites


def sorted_sizes(shape: Shape) -> Shape:
    """The sizes of a tensor's axes, sorted, without those of one element: what no layout changes."""
    return tuple(sorted(size for size in shape if size > 1))


def _numbers_within(places: Iterable[tuple[int, str]]) -> Mapping[str, frozenset[int]]:
    """The numbers of the places that lie at or within each site."""
    within: dict[str, set[int]] = defaultdict(set)
    for number, site in places:
        for outer in (site, *enclosing_sites(site)):
            within[outer].add(number)
    return {site: frozenset(numbers) for site, numbers in within.items()}


def _elements_within(archive: Archive) -> Mapping[str, int]:
    elements: Counter[str] = Counter()
    for path, parameter in _parameters(archive):
        sizes = sorted_sizes(parameter.shape or ())
        size = math.prod(sizes) if len(sizes) > 1 else 0
        elements.update(dict.fromkeys((path, *enclosing_sites(path)), size))
    return elements


def _is_chain(sites: Sequence[str]) -> bool:
    """Whether each of some sites, outmost first, lies within the one before."""
    return all(lies_within(inner, outer) for outer, inner in itertools.pairwise(sites))
