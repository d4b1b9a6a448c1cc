"""Tensors of a few elements that are equal bit for bit, and each the only one of its contents on its side.

Statistics of so few elements prove nothing, since many tensors come near them; all bits of numbers that are
not round do.
"""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import suppress
from typing import Final

import numpy as np

from tensorcap.alignment.match.candidates import Candidate
from tensorcap.alignment.match.fingerprints import FEW, Agreement
from tensorcap.alignment.match.passes import MatchState
from tensorcap.alignment.match.sides import Side
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import TensorcapError

_LEAST_NATS: Final = 24.0  # 35 bits: one in 2e10 pairs is equal by chance
_ROUND: Final = 256.0  # multiples of 1 / 256 are numbers that people write, or that initialisers give
_BITS_OF_MANTISSA: Final = math.log(2) * 12  # nats of a number of float32 that isn't round, taken low

_Contents = tuple[str, tuple[int, ...], bytes]  # dtype, shape and stored elements


def pair_equal_contents(state: MatchState) -> None:
    """Pair sites that are left, of at least two and fewer than eight elements, by their contents.

    1. Contents are dtype, shape and all bits; only numbers that are not round say anything.
    2. They are paired if each side has them once, paired sites included, and they say enough.
    """
    matching = state.matching
    if not state.slots.reads_values:
        return
    known = [
        _by_contents(side, archive)
        for side, archive in zip(matching.sides, state.slots.archives, strict=True)
    ]
    for contents, sites in known[0].items():
        others = known[1].get(contents, [])
        if len(sites) != 1 or len(others) != 1:
            continue
        left, right = sites[0], others[0]
        if matching.has_partner(0, left) or matching.has_partner(1, right):
            continue
        (template, index), (other, other_index) = (
            side.by_site[site] for side, site in zip(matching.sides, (left, right), strict=True)
        )
        place = index, other_index
        agreement = Agreement(0.0, math.inf, _LEAST_NATS)
        matching.accept(Candidate(template.name, other.name, (place,), {place: agreement}), (place,))


def _by_contents(side: Side, archive: Archive) -> dict[_Contents, list[str]]:
    """Sites of few elements by their contents, as far as these say enough."""
    sites: dict[_Contents, list[str]] = defaultdict(list)
    for site in side.by_site:
        records = side.records(site)
        if len(records) != 1 or not 2 <= records[0].size < FEW or not records[0].stored:
            continue
        record = records[0]
        if record.dtype.kind != "float" or record.dtype.packed > 1:
            continue
        with suppress(TensorcapError):
            values = archive.load(record).astype(np.float64)
            is_said = np.isfinite(values) & (values * _ROUND != np.rint(values * _ROUND))
            if len(np.unique(values[is_said])) * _BITS_OF_MANTISSA >= _LEAST_NATS:
                sites[record.dtype.name, record.shape, archive.read(record).tobytes()].append(site)
    return sites
