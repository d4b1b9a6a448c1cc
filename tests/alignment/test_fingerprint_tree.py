"""Near fingerprints found in a tree, against a look at all pairs that numpy takes here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tensorcap.alignment.match import Fingerprint, NearestFingerprints, agreements
from tensorcap_formats.dtypes import Array

SIZE = 16  # elements of each tensor
UNRELATED = 0.1  # above which the distance of the second nearest says nothing


def drawn(count: int) -> Array:
    """Unrelated tensors, rows of a matrix."""
    return np.random.default_rng(0).standard_normal((count, SIZE))


def scaled(count: int) -> Array:
    """The same with norms from 1e-3 to 1e3."""
    return drawn(count) * np.logspace(-3, 3, count)[:, None]


def of_one_norm(count: int) -> Array:
    x = drawn(count)
    scaled: Array = x / np.linalg.norm(x, axis=1, keepdims=True)
    return scaled


def in_clusters(count: int) -> Array:
    """Ten tensors with much the same values in each copy."""
    noise = np.random.default_rng(1).standard_normal((count, SIZE))
    return drawn(10)[np.arange(count) % 10] * (1 + 1e-4 * noise)


def in_copies(count: int) -> Array:
    """Ten tensors, and copies of them."""
    return drawn(10)[np.arange(count) % 10]


def along_a_line(count: int) -> Array:
    """One tensor times factors, so that distances lie on one axis and many are equal."""
    return drawn(1) * (1 + np.arange(count)[:, None] / 8)


KINDS = [drawn, scaled, of_one_norm, in_clusters, in_copies, along_a_line]
COUNTS = [1, 2, 5, 64, 65, 700]


def fingerprints(tensors: Array) -> list[Fingerprint]:
    columns = (tensors.mean(1), np.sqrt((tensors**2).sum(1)), tensors.min(1), tensors.max(1))
    return [Fingerprint(SIZE, *map(float, row)) for row in zip(*columns, strict=True)]


def all_distances(ones: Sequence[Fingerprint], others: Sequence[Fingerprint]) -> Array:
    """Distances of all pairs, as specs/alignment.md defines them."""
    sides = [
        [np.array([getattr(one, name) for one in side]) for name in ("l2", "mean", "minimum", "maximum")]
        for side in (ones, others)
    ]
    sides = [[a[:, None] for a in sides[0]], [a[None, :] for a in sides[1]]]
    (l2, mean, low, high), (other_l2, other_mean, other_low, other_high) = sides
    norm = np.maximum(l2, other_l2)
    peak = np.maximum.reduce(np.broadcast_arrays(*map(np.abs, (low, high, other_low, other_high))))
    distance: Array = np.maximum.reduce(
        [
            np.abs(l2 - other_l2) / norm,
            np.abs(mean - other_mean) / (norm / SIZE**0.5),
            np.abs(low - other_low) / peak,
            np.abs(high - other_high) / peak,
        ]
    )
    return distance


@pytest.mark.spec("ALN-20")
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", KINDS)
def test_mutual_nearest_ones_are_those_of_all_pairs(kind: Callable[[int], Array], count: int) -> None:
    x = kind(count)
    noise = np.random.default_rng(2).standard_normal(x.shape)
    ones, others = fingerprints(x), fingerprints((x * (1 + 1e-3 * noise))[: max(1, count - 3)][::-1])
    distances = all_distances(ones, others)
    right, left = distances.argmin(1), distances.argmin(0)
    expected = {}
    for i, j in enumerate(right):
        if left[j] == i:
            rivals = [*np.delete(distances[i], j), *np.delete(distances[:, j], i)]
            expected[i, int(j)] = min([*rivals, UNRELATED])
    found = agreements(ones, others, 1e-9)
    assert {pair: agreement.other for pair, agreement in found.items()} == pytest.approx(expected, rel=1e-12)
    for (i, j), agreement in found.items():
        assert agreement.distance == pytest.approx(distances[i, j], rel=1e-12)


@pytest.mark.spec("ALN-20")
def test_of_equally_near_ones_the_first_is_the_nearest() -> None:
    (one,) = fingerprints(drawn(1))
    others = [Fingerprint(SIZE, one.mean, one.l2, one.minimum, one.maximum * factor) for factor in (1.5, 1.5)]
    others += fingerprints(drawn(300) * 40)
    ((pair, agreement),) = agreements([one], others, 1e-9).items()
    assert pair == (0, 0)
    assert agreement.other == UNRELATED  # the second is as near, and further than what counts


@pytest.mark.spec("ALN-21")
@pytest.mark.parametrize("apart", [0.0, 1e-3, 0.03, 0.2])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", KINDS)
def test_groups_are_what_chains_of_near_pairs_connect(
    kind: Callable[[int], Array], count: int, apart: float
) -> None:
    prints = fingerprints(kind(count))
    is_near = all_distances(prints, prints) <= apart
    first = np.arange(count)  # of those that are connected so far
    while (least := np.where(is_near, first[None, :], count).min(1)).tolist() != first.tolist():
        first = least
    names = [f"s{i:04}" for i in range(count)]
    expected = [tuple(names[i] for i in range(count) if first[i] == root) for root in np.unique(first)]
    assert NearestFingerprints(dict(zip(names, prints, strict=True))).groups(apart) == expected


@pytest.mark.spec("ALN-20")
@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_within_a_distance_is_what_all_pairs_give(kind: Callable[[int], Array]) -> None:
    x = kind(400)
    ones, others = fingerprints(x * 1.01), fingerprints(x)
    nearest = NearestFingerprints({f"s{i}": one for i, one in enumerate(others)})
    distances = all_distances(ones, others)
    for apart in (0.0, 0.0099, 0.02, 0.3):
        for i, one in enumerate(ones):
            within = {f"s{j}" for j in np.flatnonzero(distances[i] <= apart)}
            assert {*nearest.within(apart, one)} == within
    assert nearest.within(1.0, Fingerprint(SIZE + 1, 0.0, 1.0, -1.0, 1.0)) == []
