"""Bands of rows that are kept for the reads that follow."""

from __future__ import annotations

from typing import Any

import numpy as np

from tensorcap_formats.flat_arrays import Bands


def test_a_band_is_loaded_once_for_all_reads_in_it_and_anew_for_another_array() -> None:
    array = np.arange(70).reshape(10, 7)
    loaded: list[tuple[int, int]] = []

    def load(first: int, end: int) -> np.ndarray[Any, Any]:
        loaded.append((first, end))
        return array[first:end].reshape(-1)

    bands = Bands()
    out = np.empty(10, np.int64)
    for start in range(0, 70, 10):
        bands.read("one", (10, 7), 4, load, start, out)
        assert out.tolist() == list(range(start, start + 10))
    assert loaded == [(0, 4), (4, 8), (8, 10)]
    bands.read("two", (10, 7), 4, load, 60, out)
    bands.clear()
    bands.read("two", (10, 7), 4, load, 60, out)
    assert loaded[3:] == [(8, 10), (8, 10)]
