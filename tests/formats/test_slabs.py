"""Flat ranges of n-dimensional arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorcap_formats.flat_arrays import Slabs, read_flat, rectangles

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@settings(max_examples=200)
@given(SHAPES, st.data())
def test_any_flat_range_is_what_numpy_cuts_from_the_flattened_array(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    array = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    start = data.draw(st.integers(0, array.size))
    out = np.full(data.draw(st.integers(0, array.size - start)), -1, np.int32)
    read_flat(array, shape, start, out)
    assert out.tolist() == array.reshape(-1)[start : start + out.size].tolist()


class Counting:
    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array, self.elements = array, 0

    def __getitem__(self, selection: Any) -> Any:
        part = self.array[selection]
        self.elements += part.size
        return part


def test_nothing_beyond_the_range_is_read() -> None:
    source = Counting(np.arange(2 * 3 * 1000).reshape(2, 3, 1000))
    out = np.empty(1700, np.int64)
    read_flat(source, (2, 3, 1000), 1500, out)
    assert source.elements == 1700
    assert out[[0, -1]].tolist() == [1500, 3199]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_a_single_element_is_read_at_any_rank(shape: tuple[int, ...]) -> None:
    out = np.zeros(1)
    read_flat(np.full(shape, 7.0), shape, 0, out)
    assert out.tolist() == [7.0]


def test_a_range_has_at_most_two_selections_for_each_axis() -> None:
    assert len(list(rectangles((9, 9, 9, 9), 1, 9**4 - 2))) == 7


def test_chunks_are_filled_from_blocks_of_any_size_and_end_in_zeros() -> None:
    slabs = Slabs((5,), (3,))
    blocks = [np.array(block) for block in ([1], [2, 3, 4], [5])]
    chunks = [chunk.tolist() for chunk in slabs.fill(blocks, np.dtype(np.int64))]
    assert chunks == [[1, 2, 3], [4, 5, 0]]
