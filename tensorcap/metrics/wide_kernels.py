"""Compiled comparison in float64: floats of 64 bits, integers of 32 and 64, and any two unlike dtypes.

As `kernels`, with float64 scratch, so that nothing has to be done again where float32 does not decide. Not
everything is measured here: integers above 2**35, of which a float64 may not hold a sum, and floats whose
squares overflow or vanish. The kernel then says so, and numpy measures the part of the tensor instead.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from tensorcap.metrics.kernel_loops import (
    FINITE,
    OPTIONS,
    QUOTIENTS,
    add_sums,
    bits64,
    bits_of,
    exact_mismatches,
    f32,
    f64,
    find_error,
    find_mismatch,
    find_ratio,
    float64_of,
    i32,
    i64,
    u16,
    u32,
    u64,
    wide_vectors,
    widen,
)
from tensorcap.metrics.kernel_state import (
    APART,
    BINS,
    BLOCK,
    COUNTS,
    ELEMENTS,
    ERROR,
    EXACT_SUM,
    FIRST_WIDE,
    MASK_AT,
    MASKS,
    MAXIMA,
    MISMATCH,
    MISMATCHES,
    MOMENTS,
    NONFINITE_X,
    NONFINITE_Y,
    OUTLIER,
    PLACES,
    RATIO,
    REFUSED,
    RESULTS,
    RMS,
    ROW_BINS,
    ROW_SPAN,
    ROWS,
    SENTINELS,
    SENTINELS_LOST,
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
    TASK_X,
    TASK_Y,
    ULPS,
    UNEQUAL,
    UNLIKE,
    WHOLE,
    WIDE_ERRORS,
    WIDE_X,
    WIDE_Y,
    ZERO_ROWS,
    ZEROS,
    ZEROS_HIT,
    X,
)
from tensorcap.metrics.kernels import at_address, compile_feed, join_moments

_MAGNITUDE = np.int64(0x7FFFFFFFFFFFFFFF)
_SIGN = np.int64(-(2**63))
_INFINITY = np.int64(0x7FF << 52)
_LARGEST_WHOLE = np.int64(2**35)  # the sum of a part of 2**26 differences fits into 63 bits
_LARGEST = 2.0**400  # squares up to it do not overflow,
_VANISHING = 2.0**-780  # and a sum of squares above it has lost nothing to speak of
_FIRST_WHOLE, _PAST_WHOLE = WHOLE.start, WHOLE.stop
_SENTINELS = (
    -65504.0,
    -1e9,
    -(2.0**127) * (2 - 2.0**-7),
    -(2.0**127) * (2 - 2.0**-23),
    float(np.finfo(np.float64).min),
)


@njit(**OPTIONS)
def _is_sentinel(v):
    return (
        (v == _SENTINELS[0])
        | (v == _SENTINELS[1])
        | (v == _SENTINELS[2])
        | (v == _SENTINELS[3])
        | (v == _SENTINELS[4])
    )


@njit(**OPTIONS)
def _ordered(u):
    return u ^ ((u >> i64(63)) & _MAGNITUDE)


@njit(**OPTIONS)
def _widen(raw, kind, at, n, out, table, narrow):
    """Elements `at` to `at + n` as float64; whether all of them are integers that are small enough."""
    wide_vectors()
    least = i64(0)
    largest = i64(0)
    if kind < FIRST_WIDE:
        widen(raw, kind, at, n, narrow, table)
        for i in range(n):
            out[i] = f64(narrow[i])
    elif kind == 9:
        signed = raw[4 * at : 4 * (at + n)].view(np.int32)
        for i in range(n):
            out[i] = f64(signed[i])
    elif kind == 10:
        unsigned = raw[4 * at : 4 * (at + n)].view(np.uint32)
        for i in range(n):
            out[i] = f64(unsigned[i])
    elif kind == 11:
        long = raw[8 * at : 8 * (at + n)].view(np.int64)
        for i in range(n):
            least = min(least, long[i])
            largest = max(largest, long[i])
            out[i] = f64(long[i])
    elif kind == 12:
        long = raw[8 * at : 8 * (at + n)].view(np.int64)  # those that are too large seem to be negative
        for i in range(n):
            least = min(least, long[i])
            largest = max(largest, long[i])
            out[i] = f64(long[i])
        if least < 0:
            return False
    else:
        double = raw[8 * at : 8 * (at + n)].view(np.float64)
        for i in range(n):
            out[i] = double[i]
    return least >= -_LARGEST_WHOLE and largest <= _LARGEST_WHOLE


@njit(**OPTIONS)
def _find_extremes(x, y, n, results):
    """Largest and smallest of both sides as ordered integers, and whether any bit differs."""
    wide_vectors()
    x_max = _SIGN
    x_min = _MAGNITUDE
    y_max = _SIGN
    y_min = _MAGNITUDE
    unlike = i64(0)
    for i in range(n):
        u = bits64(x[i])
        v = bits64(y[i])
        unlike |= u ^ v
        u = _ordered(u)
        v = _ordered(v)
        x_max = max(x_max, u)
        x_min = min(x_min, u)
        y_max = max(y_max, v)
        y_min = min(y_min, v)
    results[0] = x_max
    results[1] = x_min
    results[2] = y_max
    results[3] = y_min
    return unlike


@njit(**OPTIONS)
def _set_apart(x, y, n, has_sentinels, at, counts, spans):
    """Count what is no number, or a mask sentinel on both sides, and put zeros there; span the others."""
    apart = i64(0)
    for i in range(n):
        p = bits64(x[i]) & _MAGNITUDE
        q = bits64(y[i]) & _MAGNITUDE
        if p < _INFINITY and q < _INFINITY:
            if not (has_sentinels and _is_sentinel(x[i]) and _is_sentinel(y[i])):
                spans[0] = min(spans[0], x[i])
                spans[1] = max(spans[1], x[i])
                spans[2] = min(spans[2], y[i])
                spans[3] = max(spans[3], y[i])
                continue
            counts[SENTINELS] += 1
        else:
            p_class = 1 if p > _INFINITY else (0 if p < _INFINITY else (2 if x[i] > 0 else 3))
            q_class = 1 if q > _INFINITY else (0 if q < _INFINITY else (2 if y[i] > 0 else 3))
            if p_class:
                counts[NONFINITE_X + p_class - 1] += 1
            if q_class:
                counts[NONFINITE_Y + q_class - 1] += 1
            if p_class != q_class:
                if counts[MASKS] == 0:
                    counts[MASK_AT] = at + i
                counts[MASKS] += 1
                if has_sentinels and _is_sentinel(x[i]) and q_class == 3:
                    counts[SENTINELS_LOST] += 1
        x[i] = 0
        y[i] = 0
        apart += 1
    return apart


@njit(**OPTIONS)
def _are_zeros(x, low, high):
    wide_vectors()
    a = x[low:high]
    magnitudes = i64(0)
    for i in range(high - low):
        magnitudes |= bits64(a[i]) & _MAGNITUDE
    return magnitudes == 0


@njit(**OPTIONS)
def _are_equal(x, y, low, high):
    a = x[low:high]
    b = y[low:high]
    unequal = i32(0)
    for i in range(high - low):
        unequal |= i32(a[i] != b[i])
    return unequal == 0


@njit(**OPTIONS)
def _add_rows(x, y, n, row, sums, rows, row_span, counts, rms):
    """As `kernels._add_rows`; false if the squares of a row vanish, though its elements do not."""
    for number, low in enumerate(range(0, n, row)):
        high = min(low + row, n)
        dd, rr, tt = add_sums(x, y, low, high, sums)
        if (
            (rr < _VANISHING and not _are_zeros(x, low, high))
            or (tt < _VANISHING and not _are_zeros(y, low, high))
            or (dd < _VANISHING and not _are_equal(x, y, low, high))
        ):
            return False
        rms[number] = np.sqrt(rr / (high - low))
        if rr > 0:
            bin = i64(bits_of(f32(np.sqrt(dd / rr))) >> i32(18))
            rows[bin] += u32(1)
            row_span[0] = min(row_span[0], bin)
            row_span[1] = max(row_span[1], bin)
        elif dd > 0:
            counts[ZERO_ROWS] += 1
    return True


@njit(fastmath=FINITE, **OPTIONS)
def _add_moments(x, y, n, apart, block, moments):
    """Moments of a block by a second pass over it: its sums would drown a small spread in a large mean."""
    wide_vectors()
    count = n - apart
    mean_r = block[2] / count
    mean_t = block[4] / count
    r = apart * mean_r  # what is set apart stands there as zeros
    t = apart * mean_t
    rr = -r * mean_r
    tt = -t * mean_t
    rt = -r * mean_t
    for i in range(n):
        u = x[i] - mean_r
        v = y[i] - mean_t
        r += u
        t += v
        rr += u * u
        tt += v * v
        rt += u * v
    rr = max(rr - r * r / count, 0.0)  # the means were rounded, so that r and t are not quite zero
    tt = max(tt - t * t / count, 0.0)
    rt -= r * t / count
    join_moments(count, mean_r + r / count, mean_t + t / count, rr, tt, rt, moments)


@njit(fastmath=QUOTIENTS, **OPTIONS)
def _relative_errors(x, y, n, results):
    """Count errors and zeros, find both maxima; return the sum of ratios."""
    wide_vectors()
    zeros = i64(0)
    zeros_hit = i64(0)
    unequal = i64(0)
    largest = i64(0)
    largest_ratio = i64(0)
    total = 0.0
    for i in range(n):
        d = abs(y[i] - x[i])
        r = abs(x[i])
        hit = i64(bits64(d) != i64(0))
        is_zero = bits64(r) == i64(0)
        ratio = i64(0) if is_zero else bits64(d / r)
        unequal += hit
        zeros += i64(is_zero)
        zeros_hit += i64(is_zero) & hit
        largest = max(largest, bits64(d))
        largest_ratio = max(largest_ratio, ratio)
        total += float64_of(ratio)
    results[2] = largest
    results[3] = largest_ratio
    results[4] = zeros
    results[5] = zeros_hit
    results[6] = unequal
    return total


@njit(**OPTIONS)
def _scaled_bits(magnitude, scale, inverse):
    """As `kernel_loops._scaled_bits`: a product that vanishes is rounded once, not twice."""
    product = magnitude * scale
    back = product * inverse
    bits = bits64(product) - i64(back > magnitude)
    return bits | i64(back != magnitude)


@njit(**OPTIONS)
def _largest_distance(x, y, n, scale, shift, cap):
    """Largest distance in values of a format, a float64 cut short by `shift` bits; its sign bit flipped.

    `scale` moves the least normal of the format to that of float64.
    """
    wide_vectors()
    largest = _SIGN
    half = (i64(1) << shift) >> i64(1)
    odd = i64(1) if shift > i64(0) else i64(0)
    inverse = 1 / scale
    for i in range(n):
        p = _scaled_bits(abs(x[i]), scale, inverse)
        q = _scaled_bits(abs(y[i]), scale, inverse)
        p = min((p + half - odd + (odd & (p >> shift))) >> shift, cap)
        q = min((q + half - odd + (odd & (q >> shift))) >> shift, cap)
        p = -p if bits64(x[i]) < i64(0) else p
        q = -q if bits64(y[i]) < i64(0) else q
        largest = max(largest, i64(u64(max(p, q)) - u64(min(p, q))) ^ _SIGN)
    return largest


@njit(**OPTIONS)
def _count_errors(x, y, n, tables, bins):
    """Count |d| by exponent and two bits of the mantissa; two tables, so that increments do not wait."""
    for i in range(n):
        bits = bits64(y[i] - x[i]) & _MAGNITUDE
        number = bits >> i64(50)
        bins[i] = u16(number + (i64(number == 0) & i64(bits != 0)))
    one = tables[0:ROW_BINS]
    two = tables[ROW_BINS : 2 * ROW_BINS]
    whole = n & ~1
    for i in range(0, whole, 2):
        one[bins[i]] += u32(1)
        two[bins[i + 1]] += u32(1)
    for i in range(whole, n):
        one[bins[i]] += u32(1)


@njit(**OPTIONS)
def _row_outlier(x, y, low, high, rms):
    """Largest |d| / (|r| + rms) of a row."""
    wide_vectors()
    a = x[low:high]
    b = y[low:high]
    largest = i64(0)
    for i in range(high - low):
        largest = max(largest, bits64(abs(b[i] - a[i]) / (abs(a[i]) + rms)))
    return float64_of(largest)


@njit(**OPTIONS)
def _add_outliers(x, y, n, row, error, at, maxima, places, rms):
    """Outliers of rows in which one could be above the largest so far; `error`: the block's largest |d|."""
    for number, low in enumerate(range(0, n, row)):
        high = min(low + row, n)
        scale = rms[number]
        # half as much again as float64 divides wrong, so that nothing is left out by rounding
        if scale > 0 and error * (1 + 2.0**-50) >= maxima[OUTLIER] * scale and error > 0:
            outlier = _row_outlier(x, y, low, high, scale)
            if outlier > maxima[OUTLIER]:
                maxima[OUTLIER] = outlier
                for i in range(low, high):
                    if abs(y[i] - x[i]) / (abs(x[i]) + scale) == outlier:
                        places[OUTLIER] = at + i
                        break


@njit(**OPTIONS)
def _count_zeros(x, n):
    wide_vectors()
    zeros = i64(0)
    for i in range(n):
        zeros += i64((bits64(x[i]) & _MAGNITUDE) == i64(0))
    return zeros


@njit(**OPTIONS)
def feed_wide(
    x_raw, x_kind, x_table, y_raw, y_kind, y_table, n, base, row, atol, rtol, scale, shift, cap, state
):  # fmt: skip
    """Add `n` elements of both sides, as `kernels.feed` does, or stop and say that they are refused."""
    x = state[WIDE_X : WIDE_X + BLOCK].view(np.float64)
    y = state[WIDE_Y : WIDE_Y + BLOCK].view(np.float64)
    narrow = state[X : X + BLOCK // 2].view(np.float32)
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
    errors = state[WIDE_ERRORS : WIDE_ERRORS + ROW_BINS].view(np.uint32)
    rows = state[ROWS : ROWS + ROW_BINS // 2].view(np.uint32)
    row_span = state[ROW_SPAN : ROW_SPAN + 2]
    x_is_whole = _FIRST_WHOLE <= x_kind < _PAST_WHOLE
    y_is_whole = _FIRST_WHOLE <= y_kind < _PAST_WHOLE
    has_sentinels = not (x_is_whole or y_is_whole)
    least_usual = _ordered(bits64(-65504.0)) if has_sentinels else _ordered(bits64(-np.inf))
    step = (BLOCK // row) * row if row <= BLOCK else BLOCK
    at = 0
    while at < n:
        m = min(step, n - at)
        if row > BLOCK:
            m = min(m, row - (base + at) % row)
        is_fit = _widen(x_raw, x_kind, at, m, x, x_table, narrow)
        if not (is_fit and _widen(y_raw, y_kind, at, m, y, y_table, narrow)):
            counts[REFUSED] = 1
            return
        unlike = _find_extremes(x, y, m, results)
        counts[ELEMENTS] += m
        apart = i64(0)
        if (
            results[0] >= _INFINITY
            or results[1] <= least_usual
            or results[2] >= _INFINITY
            or results[3] <= least_usual
        ):
            apart = _set_apart(x, y, m, has_sentinels, base + at, counts, spans)
            if apart:
                counts[UNLIKE] |= i64(unlike != 0)
                unlike = _find_extremes(x, y, m, results)
            counts[APART] += apart
        x_max = float64_of(_ordered(results[0]))
        x_min = float64_of(_ordered(results[1]))
        y_max = float64_of(_ordered(results[2]))
        y_min = float64_of(_ordered(results[3]))
        if max(x_max, -x_min) > _LARGEST or max(y_max, -y_min) > _LARGEST:
            counts[REFUSED] = 1
            return
        if apart == 0:
            spans[0] = min(spans[0], x_min)
            spans[1] = max(spans[1], x_max)
            spans[2] = min(spans[2], y_min)
            spans[3] = max(spans[3], y_max)
        block[:] = 0.0
        if not _add_rows(x, y, m, row, block, rows, row_span, counts, rms):
            counts[REFUSED] = 1
            return
        for i in range(7):
            sums[i] += block[i]
        counts[EXACT_SUM] += i64(block[0]) if x_is_whole and y_is_whole else i64(0)
        if m > apart:
            _add_moments(x, y, m, apart, block, moments)
        if unlike == 0:
            counts[ZEROS] += _count_zeros(x, m) - apart
            errors[0] += u32(m - apart)
            at += m
            continue
        counts[UNLIKE] = 1
        sums[7] += _relative_errors(x, y, m, results)
        counts[ZEROS] += results[4] - apart
        counts[ZEROS_HIT] += results[5]
        counts[UNEQUAL] += results[6]
        mismatches = i64(exact_mismatches(x, y, m, atol, rtol))
        if mismatches and counts[MISMATCHES] == 0:
            places[MISMATCH] = base + at + find_mismatch(x, y, m, atol, rtol)
        counts[MISMATCHES] += mismatches
        error = float64_of(results[2])
        ratio = float64_of(results[3])
        if error > maxima[ERROR]:
            maxima[ERROR] = error
            places[ERROR] = base + at + find_error(x, y, m, error)
        if ratio > maxima[RATIO]:
            maxima[RATIO] = ratio
            places[RATIO] = base + at + find_ratio(x, y, m, ratio)
        if cap > 0:
            distance = _largest_distance(x, y, m, scale, shift, cap)
            counts[ULPS] = max(counts[ULPS] ^ _SIGN, distance) ^ _SIGN
        _count_errors(x, y, m, errors, bins)
        errors[0] -= u32(apart)
        _add_outliers(x, y, m, row, error, base + at, maxima, places, rms)
        at += m


def _feed_task(task, numbers, state):
    """Feed what a task describes; `numbers` are its words as float64."""
    n = task[TASK_SIZE]
    feed_wide(
        carray(at_address(task[TASK_X]), n * 8, np.uint8),
        task[TASK_X + 1],
        carray(at_address(task[TASK_X + 2]), 256, f32),
        carray(at_address(task[TASK_Y]), n * 8, np.uint8),
        task[TASK_Y + 1],
        carray(at_address(task[TASK_Y + 2]), 256, f32),
        n,
        task[TASK_BASE],
        task[TASK_ROW],
        numbers[TASK_ATOL],
        numbers[TASK_RTOL],
        numbers[TASK_SCALE],
        task[TASK_SHIFT],
        task[TASK_CAP],
        state,
    )


def compile_feed_wide() -> tuple[str, str]:
    """Compile `feed_wide`, as `kernels.compile_feed` compiles `feed`."""
    return compile_feed(_feed_task, errors_at=WIDE_ERRORS, tables=2, table_bins=ROW_BINS)
