"""Where the error lies, against float64 numpy."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tensorcap.metrics import Location, locate
from tensorcap_formats.dtypes import Array, dtype
from tensorcap_formats.errors import UsageError

MakeArchive = Callable[..., Any]
Locate = Callable[..., Location]


@pytest.fixture
def find(make_archive: MakeArchive) -> Locate:
    def run(reference: Any, target: Any, **options: Any) -> Location:
        ours, theirs = make_archive({"a": reference}), make_archive({"a": target})
        return locate(ours, ours.records[0], theirs, theirs.records[0], **options)

    return run


def shares(squares: Array, axis: int) -> list[tuple[int, float]]:
    """The five largest shares by index, from all squares at once."""
    sums = squares.sum(axis=tuple(a for a in range(squares.ndim) if a != axis))
    order = sorted(range(len(sums)), key=lambda i: (-sums[i], i))[:5]
    return [(i, sums[i] / squares.sum()) for i in order if sums[i] > 0]


def cells(squares: Array) -> Array:
    """The map, element by element."""
    lines = squares.reshape(-1, squares.shape[-1])
    height, width = min(256, lines.shape[0]), min(256, lines.shape[1])
    out = np.zeros((height, width))
    i, j = np.indices(lines.shape)
    np.add.at(out, (i * height // lines.shape[0], j * width // lines.shape[1]), lines)
    return out


@pytest.mark.spec("LOC-1", "LOC-2", "LOC-3", "LOC-5")
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((7,), id="vector"),
        pytest.param((3, 5, 16, 24), id="four-axes"),
        pytest.param((300, 700), id="more-than-the-map"),
        pytest.param((2, 70_001), id="rows-longer-than-a-block"),
        pytest.param((50_000, 1), id="narrow"),
        pytest.param((1, 1, 3), id="sizes-of-one"),
        pytest.param((1009, 257), id="prime"),
    ],
)
def test_shares_and_map_are_those_of_numpy(find: Locate, shape: tuple[int, ...]) -> None:
    generator = np.random.default_rng(0)
    reference = generator.normal(size=shape).astype(np.float32)
    target = (reference * (1 + generator.normal(size=shape) ** 3 / 100)).astype(np.float32)
    squares = (target.astype(np.float64) - reference.astype(np.float64)) ** 2
    found = find(reference, target)
    assert [axis.size for axis in found.axes] == list(shape)
    for axis in found.axes:
        expected = shares(squares, axis.axis)
        assert [share.index for share in axis.top] == [index for index, _ in expected]
        assert [share.share for share in axis.top] == pytest.approx([s for _, s in expected], rel=1e-12)
        assert axis.step == 1
    wanted = cells(squares)
    assert (found.map.rows, found.map.columns) == wanted.shape
    levels = np.frombuffer(found.map.levels, np.uint8).reshape(wanted.shape)
    assert ((levels == 0) == (wanted == 0)).all()
    decibels = 10 * np.log10(wanted.max() / wanted[wanted > 0])
    assert np.abs((255 - levels[wanted > 0]) / 2 - np.minimum(decibels, 127)).max() <= 0.2501


def test_one_wrong_head_is_named(find: Locate) -> None:
    reference = np.ones((1, 4, 8, 16), np.float32)
    target = reference.copy()
    target[0, 2, 5:] = 2
    head, token = find(reference, target).axes[1:3]
    assert [(share.index, share.share) for share in head.top] == [(2, 1.0)]
    assert [(share.index, share.share) for share in token.top] == [(i, 1 / 3) for i in (5, 6, 7)]


@pytest.mark.spec("LOC-1")
def test_nonfinite_elements_and_sentinels_have_no_weight(find: Locate) -> None:
    lowest = float(np.finfo(np.float32).min)
    reference = np.array([[math.nan, 1, 2, lowest], [math.inf, 1, 2, -1e9]], np.float32)
    target = np.array([[0, 1, 3, -65504], [math.inf, 1, 2, lowest]], np.float32)
    found = find(reference, target)
    assert [(share.index, share.share) for axis in found.axes for share in axis.top] == [(0, 1.0), (2, 1.0)]


@pytest.mark.spec("LOC-1")
def test_masks_are_located_by_count(find: Locate) -> None:
    reference = np.array([[math.nan, 1, math.inf, 1j], [0, 1, 2, 3]])
    target = np.array([[math.nan, math.nan, -math.inf, 100], [math.nan, 1, 2, 3]])
    found = find(reference, target, masks=True)
    assert found.of == "mask mismatches"
    assert [share.share for share in found.axes[0].top] == pytest.approx([2 / 3, 1 / 3])
    assert [share.index for share in found.axes[1].top] == [0, 1, 2]


@pytest.mark.spec("LOC-1")
@pytest.mark.parametrize(
    ("reference", "target", "expected"),
    [
        pytest.param(
            np.array([0, 2**63 - 1, 5]), np.array([0, 2**63 - 2, 3]), [(2, 0.8), (1, 0.2)], id="int64"
        ),
        pytest.param(
            np.array([0, 255], np.uint8), np.array([3, 251], np.uint8), [(1, 0.64), (0, 0.36)], id="uint8"
        ),
        pytest.param(np.array([True, True]), np.array([True, False]), [(1, 1.0)], id="bool"),
        pytest.param(np.array([1j, 2]), np.array([1j + 3, 2 + 4j]), [(1, 0.64), (0, 0.36)], id="complex"),
        pytest.param(
            (np.array([0x21, 0x02], np.uint8), dtype("float4_e2m1fn_x2")),
            (np.array([0x01, 0x02], np.uint8), dtype("float4_e2m1fn_x2")),
            [(1, 1.0)],
            id="packed",
        ),
    ],
)
def test_every_kind_of_number_is_located(
    find: Locate, reference: Any, target: Any, expected: list[tuple[int, float]]
) -> None:
    (axis,) = find(reference, target).axes
    assert [share.index for share in axis.top] == [index for index, _ in expected]
    assert [share.share for share in axis.top] == pytest.approx([share for _, share in expected])


@pytest.mark.spec("LOC-5")
@pytest.mark.parametrize("scale", [1e-250, 1e250, 1.7e308])
def test_extreme_errors_neither_overflow_nor_vanish(find: Locate, scale: float) -> None:
    reference, target = np.array([1.0, -1.0, 0.5]) * scale, np.array([-1.0, 1.0, 0.5]) * scale
    target[0] = 0
    largest = float(2 * scale) if scale < 1e308 else math.inf
    (axis,) = find(reference, target, largest=largest).axes
    assert [share.index for share in axis.top] == [1, 0]
    assert [share.share for share in axis.top] == pytest.approx([0.8, 0.2])


@pytest.mark.spec("LOC-4")
def test_levels_of_the_map_are_half_decibels(find: Locate) -> None:
    reference = np.zeros(5)
    target = np.array([0, 1, 0.1, 10**-0.6, 1e-30])
    assert list(find(reference, target).map.levels) == [0, 255, 215, 231, 1]


@pytest.mark.spec("LOC-2")
def test_a_very_long_axis_is_summed_by_ranges(find: Locate) -> None:
    size = (1 << 20) + 7
    reference = np.zeros(size, np.int8)
    target = reference.copy()
    target[[999_999, 2, 3]] = 2, 1, 1
    (axis,) = find(reference, target).axes
    assert axis.step == 2
    assert [share.index for share in axis.top] == [999_998, 2]
    assert [share.share for share in axis.top] == pytest.approx([2 / 3, 1 / 3])


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (4, 0)])
def test_tensors_without_axes_or_elements_have_no_shares(find: Locate, shape: tuple[int, ...]) -> None:
    found = find(np.zeros(shape), np.ones(shape))
    assert all(not axis.top for axis in found.axes)
    assert len(found.axes) == len(shape)


def test_unlike_shapes_are_refused(find: Locate) -> None:
    with pytest.raises(UsageError, match=r"a: shapes \[2\] and \[3\] differ, expected equal ones"):
        find(np.zeros(2), np.zeros(3))


@pytest.mark.spec("LOC-5")
def test_memory_does_not_grow_with_the_tensor(find: Locate) -> None:
    reference = np.ones((64, 64, 1024), np.float32)
    tracemalloc.start()
    try:
        found = find(reference, reference + np.float32(1))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.axes[0].top[0].share == pytest.approx(1 / 64)
    assert peak < 3 * reference.nbytes  # the target and what the archives of the test hold are in it
