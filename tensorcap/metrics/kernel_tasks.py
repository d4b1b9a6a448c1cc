"""Compiled: the state of a comparison set back, and the result of a whole tensor taken from it.

With them one call measures many small tensors, of which each would otherwise cost more to begin and to end
than to compare.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from tensorcap.metrics.kernel_loops import OPTIONS, i64, u32
from tensorcap.metrics.kernel_state import (
    APART,
    ELEMENTS,
    ERRORS,
    MOMENTS,
    PLACES,
    RESULT_ERROR_BINS,
    RESULT_ROW_BINS,
    ROW_BINS,
    ROW_SPAN,
    ROWS,
    SPANS,
    UNEQUAL,
)


@njit(**OPTIONS)
def clear(state, errors_at, tables, table_bins):
    """Forget what was added before, in the kernel whose tables of errors are given."""
    rows = state[ROWS : ROWS + ROW_BINS // 2].view(np.uint32)
    rows[state[ROW_SPAN] : state[ROW_SPAN + 1] + 1] = u32(0)
    state[errors_at : errors_at + tables * table_bins // 2] = 0
    state[:ERRORS] = 0
    state[PLACES:SPANS] = -1
    state[ROW_SPAN] = ROW_BINS
    state[ROW_SPAN + 1] = -1
    spans = state[SPANS:MOMENTS].view(np.float64)
    spans[0] = np.inf
    spans[1] = -np.inf
    spans[2] = np.inf
    spans[3] = -np.inf


@njit(**OPTIONS)
def take(state, errors_at, tables, table_bins, result, numbers, counts, at):
    """Copy totals into `result`, and the bins that are not empty to `numbers` and `counts` from `at` on.

    Bins of errors come first, then those of rows. One table that all others are added to is read two bins at
    a time, since hardly any is filled. If its bins are those of float32, they are counted from 1 on, and 0 is
    for no error at all, which the first bin has counted, too.
    """
    for word in range(ERRORS):  # slices that may overlap would be copied, and copies allocated
        result[word] = state[word]
    first = at
    table = state[errors_at : errors_at + table_bins // 2].view(np.uint32)
    for i in range(1, tables):
        start = errors_at + i * (table_bins // 2)
        further = state[start : start + table_bins // 2].view(np.uint32)
        for number in range(table_bins):
            table[number] += further[number]
    is_narrow = i64(table_bins != ROW_BINS)
    if is_narrow:
        zeros = state[ELEMENTS] - state[APART] - state[UNEQUAL]
        table[0] -= u32(zeros)
        if zeros:
            numbers[at] = 0
            counts[at] = zeros
            at += 1
    for word in range(table_bins // 2):
        if state[errors_at + word]:
            for number in (2 * word, 2 * word + 1):
                if table[number]:
                    numbers[at] = number + is_narrow
                    counts[at] = table[number]
                    at += 1
    result[RESULT_ERROR_BINS] = at - first
    first = at
    rows = state[ROWS : ROWS + ROW_BINS // 2].view(np.uint32)
    for number in range(state[ROW_SPAN], state[ROW_SPAN + 1] + 1):
        if rows[number]:
            numbers[at] = number
            counts[at] = rows[number]
            at += 1
    result[RESULT_ROW_BINS] = at - first
    return at
