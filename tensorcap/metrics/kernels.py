"""Compiled comparison of narrow dtypes: every element and row metric in one pass over both sides.

Narrow are floats of at most 32 bits, and integers of at most 16, which float32 holds exactly; for all others
see `wide_kernels`.

Both sides are widened, one block at a time, into float32 scratch that stays in the first-level cache; then
the short loops of `kernel_loops` run over the scratch. Blocks whose widened bits are equal skip all but the
sums.

All state is one array of 64-bit words (see `kernel_state`), so that the machine code has one entry, which
takes numbers and addresses and can be kept on disk (see `machine_code`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from tensorcap.metrics.kernel_loops import (
    INFINITY,
    LARGE,
    LARGE_RATIO,
    OPTIONS,
    SENTINEL_ORDER,
    add_sums,
    bits_of,
    count_apart,
    count_errors,
    count_zeros,
    exact_error,
    exact_mismatches,
    exact_outlier,
    exact_ratio,
    exact_ratio_sum,
    f32,
    f64,
    find_error,
    find_extremes,
    find_mismatch,
    find_ratio,
    float_of,
    i32,
    i64,
    largest_distance,
    largest_scaled_distance,
    ordered,
    relative_errors,
    row_outlier,
    set_apart,
    u32,
    widen,
)
from tensorcap.metrics.kernel_state import (
    APART,
    BINS,
    BLOCK,
    COUNTS,
    ELEMENTS,
    ERROR,
    ERROR_BINS,
    ERRORS,
    MAXIMA,
    MISMATCH,
    MISMATCHES,
    MOMENTS,
    OUTLIER,
    PLACES,
    RATIO,
    RESULT_WORDS,
    RESULTS,
    RMS,
    ROW_BINS,
    ROW_SPAN,
    ROWS,
    SPANS,
    SUMS,
    TASK_ATOL,
    TASK_BASE,
    TASK_CAP,
    TASK_ROW,
    TASK_RTOL,
    TASK_SCALE,
    TASK_SHIFT,
    TASK_SIZE,
    TASK_WORDS,
    TASK_X,
    TASK_Y,
    ULPS,
    UNEQUAL,
    UNLIKE,
    WIDE_WORDS,
    ZERO_ROWS,
    ZEROS,
    ZEROS_HIT,
    X,
    Y,
)
from tensorcap.metrics.kernel_tasks import clear, take


@intrinsic
def at_address(context, address):
    """The address as a pointer."""
    return types.voidptr(types.int64), lambda c, b, s, a: b.inttoptr(a[0], ir.IntType(8).as_pointer())


@njit(**OPTIONS)
def _add_rows(x, y, n, row, sums, rows, row_span, counts, rms):
    """Sums of a block, row by row; each row's error into the histogram, its RMS kept for the outliers."""
    for number, low in enumerate(range(0, n, row)):
        high = min(low + row, n)
        dd, rr, _ = add_sums(x, y, low, high, sums)
        rms[number] = np.sqrt(rr / (high - low))
        if rr > 0:
            bin = i64(bits_of(f32(np.sqrt(dd / rr))) >> i32(18))
            rows[bin] += u32(1)
            row_span[0] = min(row_span[0], bin)
            row_span[1] = max(row_span[1], bin)
        elif dd > 0:
            counts[ZERO_ROWS] += 1


@njit(**OPTIONS)
def _add_moments(block, n, moments):
    """Moments of a block from its sums: float32 has no spread that they would lose."""
    mean_r = block[2] / n
    mean_t = block[4] / n
    rr = max(block[3] - block[2] * mean_r, 0.0)
    tt = max(block[5] - block[4] * mean_t, 0.0)
    rt = block[6] - block[2] * mean_t
    join_moments(n, mean_r, mean_t, rr, tt, rt, moments)


@njit(**OPTIONS)
def join_moments(n, mean_r, mean_t, rr, tt, rt, moments):
    """Count, means and centred products of a block joined with those so far (Chan, Golub, LeVeque)."""
    before = moments[0]
    count = before + n
    r = mean_r - moments[1]
    t = mean_t - moments[2]
    weight = before * n / count
    moments[0] = count
    moments[1] += r * n / count
    moments[2] += t * n / count
    moments[3] += rr + r * r * weight
    moments[4] += tt + t * t * weight
    moments[5] += rt + r * t * weight


@njit(**OPTIONS)
def _add_outliers(x, y, n, row, error, is_large, at, maxima, places, rms):
    """Outliers of rows in which one could be above the largest so far; `error`: the block's largest |d|."""
    for number, low in enumerate(range(0, n, row)):
        high = min(low + row, n)
        scale = rms[number]
        # half as much again as float64 divides wrong, so that nothing is left out by rounding
        if scale > 0 and error * (1 + 2.0**-50) >= maxima[OUTLIER] * scale and error > 0:
            bits = row_outlier(x, y, low, high, f32(scale))
            if is_large or bits >= INFINITY or f64(float_of(bits)) * (1 + 2.0**-20) >= maxima[OUTLIER]:
                outlier, place = exact_outlier(x, y, low, high, scale)
                if outlier > maxima[OUTLIER]:
                    maxima[OUTLIER] = outlier
                    places[OUTLIER] = at + place


@njit(**OPTIONS)
def feed(
    x_raw, x_kind, x_table, y_raw, y_kind, y_table, n, base, row, atol, rtol, scale, shift, cap, state
):  # fmt: skip
    """Add `n` elements of both sides, of which the first has number `base` and begins a block.

    `row` is the length of a row, of which those above a block are cut into blocks. `scale`, `shift` and `cap`
    describe the format in which distances are counted (see `FloatFormat.numbers`); no cap, no distances.
    """
    x = state[X : X + BLOCK // 2].view(np.float32)
    y = state[Y : Y + BLOCK // 2].view(np.float32)
    bins = state[BINS : BINS + BLOCK // 4].view(np.uint16)
    rms = state[RMS : RMS + 64].view(np.float64)
    results = state[RESULTS : RESULTS + 8]
    counts = state[COUNTS : COUNTS + 24]
    sums = state[SUMS : SUMS + 8].view(np.float64)
    block = state[SUMS + 8 : SUMS + 16].view(np.float64)
    maxima = state[MAXIMA : MAXIMA + 4].view(np.float64)
    places = state[PLACES : PLACES + 4]
    spans = state[SPANS : SPANS + 4].view(np.float64)
    moments = state[MOMENTS : MOMENTS + 6].view(np.float64)
    errors = state[ERRORS : ERRORS + 2 * ERROR_BINS].view(np.uint32)
    rows = state[ROWS : ROWS + ROW_BINS // 2].view(np.uint32)
    row_span = state[ROW_SPAN : ROW_SPAN + 2]
    is_extreme = rtol > LARGE  # infinite as float32, and no number where the reference is zero
    step = (BLOCK // row) * row if row <= BLOCK else BLOCK
    at = 0
    while at < n:
        m = min(step, n - at)
        if row > BLOCK:
            m = min(m, row - (base + at) % row)
        widen(x_raw, x_kind, at, m, x, x_table)
        widen(y_raw, y_kind, at, m, y, y_table)
        unlike = find_extremes(x, y, m, results)
        counts[ELEMENTS] += m
        apart = i64(0)
        if (
            results[0] >= INFINITY
            or results[1] <= SENTINEL_ORDER
            or results[2] >= INFINITY
            or results[3] <= SENTINEL_ORDER
        ):
            apart = i64(count_apart(x, y, m))
        counts[APART] += apart
        x_max = f64(float_of(ordered(i32(results[0]))))
        x_min = f64(float_of(ordered(i32(results[1]))))
        if apart:
            set_apart(x, y, m, base + at, counts, spans)
        else:
            spans[0] = min(spans[0], x_min)
            spans[1] = max(spans[1], x_max)
            spans[2] = min(spans[2], f64(float_of(ordered(i32(results[3])))))
            spans[3] = max(spans[3], f64(float_of(ordered(i32(results[2])))))
        is_large = apart > 0 or x_max > LARGE or x_min < -LARGE
        block[:] = 0.0
        _add_rows(x, y, m, row, block, rows, row_span, counts, rms)
        for i in range(7):
            sums[i] += block[i]
        if m > apart:
            _add_moments(block, m - apart, moments)
        if unlike == 0:
            counts[ZEROS] += count_zeros(x, m) - apart
            errors[0] += u32(m - apart)
            at += m
            continue
        counts[UNLIKE] = 1
        total = relative_errors(x, y, m, f32(atol), f32(rtol), results)
        counts[ZEROS] += results[4] - apart
        counts[ZEROS_HIT] += results[5]
        counts[UNEQUAL] += results[6]
        error = f64(float_of(i32(results[2])))
        ratio = f64(float_of(i32(results[3])))
        mismatches = results[0]
        if is_extreme or results[1] != mismatches:
            mismatches = i64(exact_mismatches(x, y, m, atol, rtol))
        if mismatches and counts[MISMATCHES] == 0:
            places[MISMATCH] = base + at + find_mismatch(x, y, m, atol, rtol)
        counts[MISMATCHES] += mismatches
        error *= 1 + 2.0**-22
        if results[2] > 0 and error >= maxima[ERROR]:
            error = exact_error(x, y, m)
            if error > maxima[ERROR]:
                maxima[ERROR] = error
                places[ERROR] = base + at + find_error(x, y, m, error)
        if results[3] >= LARGE_RATIO or (results[3] > 0 and ratio * (1 + 2.0**-21) >= maxima[RATIO]):
            ratio = exact_ratio(x, y, m)
            if results[3] >= LARGE_RATIO:
                total = exact_ratio_sum(x, y, m)
            if ratio > maxima[RATIO]:
                maxima[RATIO] = ratio
                places[RATIO] = base + at + find_ratio(x, y, m, ratio)
        sums[7] += total
        if cap > 0:
            if scale == f32(1):
                distance = largest_distance(x, y, m, shift, cap)
            else:
                distance = largest_scaled_distance(x, y, m, scale, shift, cap)
            counts[ULPS] = max(counts[ULPS], i64(distance) + i64(2**31))
        count_errors(x, y, m, errors, bins)
        errors[0] -= u32(apart)
        _add_outliers(x, y, m, row, error, is_large, base + at, maxima, places, rms)
        at += m


def _feed_task(task, numbers, state):
    """Feed what a task describes; `numbers` are its words as float64."""
    n = task[TASK_SIZE]
    feed(
        carray(at_address(task[TASK_X]), n * 4, np.uint8),
        task[TASK_X + 1],
        carray(at_address(task[TASK_X + 2]), 256, f32),
        carray(at_address(task[TASK_Y]), n * 4, np.uint8),
        task[TASK_Y + 1],
        carray(at_address(task[TASK_Y + 2]), 256, f32),
        n,
        task[TASK_BASE],
        task[TASK_ROW],
        numbers[TASK_ATOL],
        numbers[TASK_RTOL],
        f32(numbers[TASK_SCALE]),
        i32(task[TASK_SHIFT]),
        i32(task[TASK_CAP]),
        state,
    )


def compile_feed(
    feed_task: Callable[..., None] = _feed_task,
    *,
    errors_at: int = ERRORS,
    tables: int = 4,
    table_bins: int = ERROR_BINS,
) -> tuple[str, str]:
    """Compile a function that feeds one task after the other, all things given as addresses.

    Its arguments are a table of tasks, how many there are, a state, and room for the results of each, and for
    the numbers and counts of their bins (see `kernel_tasks.take`). Without room for results the tasks are
    added up in the state, else each of them is a tensor of its own, unless a kernel refuses it.

    Args:
        feed_task: Feeds one of them.
        errors_at: Where the kernel has its tables of errors in the state.
        tables: How many there are.
        table_bins: How many bins each has.

    Returns:
        Name of the function, and a module in LLVM's language that holds it. It is called as numba calls its
        own: addresses of the result and of the exception, then the arguments; it gives 0 if all went well.
    """
    feed_one = njit(**OPTIONS)(feed_task)

    def feed_tasks(tasks, count, state, results, numbers, counts):
        words = carray(at_address(tasks), (count, TASK_WORDS), i64)
        floats = carray(at_address(tasks), (count, TASK_WORDS), f64)
        memory = carray(at_address(state), WIDE_WORDS, i64)
        rows = carray(at_address(results), (count, RESULT_WORDS), i64)
        bins = carray(at_address(numbers), count * 2 * ROW_BINS, i64)
        filled = carray(at_address(counts), count * 2 * ROW_BINS, i64)
        at = 0
        for i in range(count):
            if results:
                clear(memory, errors_at, tables, table_bins)
            feed_one(words[i], floats[i], memory)
            if results:
                at = take(memory, errors_at, tables, table_bins, rows[i], bins, filled, at)

    signature = types.void(*[types.int64] * 6)
    dispatcher = njit(signature, **OPTIONS)(feed_tasks)
    result = dispatcher.overloads[dispatcher.signatures[0]]
    return result.fndesc.llvm_func_name, result.library.get_llvm_str()
