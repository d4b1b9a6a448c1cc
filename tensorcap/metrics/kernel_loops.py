"""The loops of the compiled comparison, each over one block of scratch, in forms that LLVM vectorises.

- Maxima and minima are of integers: the bits of a float order as integers do, and a maximum of floats stays
  scalar whatever the flags.
- Nothing divides under Python's error model, which tests for zero, and nothing indexes with an offset, which
  tests for negative indices: slices do.
- Integers stay 32 bits wide; numba would make them 64 wide in any arithmetic that is not cast back.
- One fused loop would be slower than these short ones, which keep few sums in few registers each.

What keeps them exact:

- Sums are float64. Fast-math, which allows them to be vectorised, is only for blocks known to be finite; a
  quotient is never made a product with a reciprocal, which may overflow where the quotient does not.
- Counts and maxima are taken in float32 with a guard band. Where the band decides, the block is done again
  in float64, by loops without any fast-math, so that they are what plain float64 arithmetic gives.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from tensorcap.metrics.kernel_state import (
    ERROR_BINS,
    MASK_AT,
    MASKS,
    NONFINITE_X,
    NONFINITE_Y,
    SENTINELS,
    SENTINELS_LOST,
)

MAGNITUDE: Final = np.int32(0x7FFFFFFF)
SIGN: Final = np.int32(-(2**31))
INFINITY: Final = np.int32(0x7F800000)
LARGE_RATIO: Final = np.int32((127 + 100) << 23)  # bits of 2**100: a float32 sum of larger ones may overflow
SENTINEL_ORDER: Final = np.int32(-1199562753)  # -65504, the largest mask sentinel, as an ordered integer
_SENTINELS: Final = tuple(
    np.int32(bits) for bits in (-947920896, -831624408, -8454144, -8388609)
)  # -65504, -1e9, least finite bfloat16 and float32
LARGE: Final = 1e38  # sums of two moduli above it may overflow float32

i32, u16, u32, i64, u64 = np.int32, np.uint16, np.uint32, np.int64, np.uint64
f32, f64 = np.float32, np.float64
OPTIONS: Final[dict[str, Any]] = {
    "nogil": True,
    "error_model": "numpy",
    "no_cpython_wrapper": True,  # nothing is called from Python, and wrappers take time to compile
    "no_cfunc_wrapper": True,
}
FINITE: Final = {"nsz", "arcp", "contract", "reassoc", "nnan", "ninf"}
QUOTIENTS: Final = {"nsz", "contract", "reassoc"}


@intrinsic
def bits_of(context, x):
    """The bits of a float32 as an int32."""
    return types.int32(types.float32), lambda c, b, s, a: b.bitcast(a[0], ir.IntType(32))


@intrinsic
def float_of(context, x):
    """The float32 whose bits are an int32."""
    return types.float32(types.int32), lambda c, b, s, a: b.bitcast(a[0], ir.FloatType())


@intrinsic
def bits64(context, x):
    """The bits of a float64 as an int64."""
    return types.int64(types.float64), lambda c, b, s, a: b.bitcast(a[0], ir.IntType(64))


@intrinsic
def float64_of(context, x):
    """The float64 whose bits are an int64."""
    return types.float64(types.int64), lambda c, b, s, a: b.bitcast(a[0], ir.DoubleType())


@intrinsic
def wide_vectors(context):
    """Ask LLVM for 512-bit vectors in this function; a hint that other machines ignore."""

    def codegen(context, builder, signature, args):
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.none(), codegen


@njit(**OPTIONS)
def ordered(u):
    """Bits of a float as an integer that orders as the floats do; its own inverse."""
    return u ^ ((u >> i32(31)) & MAGNITUDE)


@njit(**OPTIONS)
def _is_sentinel(u):
    return (u == _SENTINELS[0]) | (u == _SENTINELS[1]) | (u == _SENTINELS[2]) | (u == _SENTINELS[3])


@njit(**OPTIONS)
def widen(raw, kind, at, n, out, table):
    """Elements `at` to `at + n` of a buffer of bytes as float32; `kind` as in `kernel_state`."""
    wide_vectors()
    if kind == 0:
        single = raw[4 * at : 4 * (at + n)].view(np.float32)
        for i in range(n):
            out[i] = single[i]
    elif kind == 1:
        half = raw[2 * at : 2 * (at + n)].view(np.uint16)
        for i in range(n):
            out[i] = float_of(i32(half[i]) << i32(16))
    elif kind == 2:
        # exponent and mantissa moved to their float32 places, then scaled by 2**112, which is exact
        half = raw[2 * at : 2 * (at + n)].view(np.uint16)
        for i in range(n):
            h = i32(half[i])
            magnitude = h & i32(0x7FFF)
            moved = bits_of(float_of(magnitude << i32(13)) * f32(2.0**112))
            special = INFINITY | (magnitude << i32(13))
            moved = special if magnitude >= i32(0x7C00) else moved
            out[i] = float_of(moved | ((h & i32(0x8000)) << i32(16)))
    elif kind == 3:
        byte = raw[at : at + n]
        for i in range(n):
            out[i] = table[byte[i]]
    elif kind == 4:
        signed = raw[at : at + n].view(np.int8)
        for i in range(n):
            out[i] = f32(i32(signed[i]))
    elif kind == 5:
        byte = raw[at : at + n]
        for i in range(n):
            out[i] = f32(i32(byte[i]))
    elif kind == 6:
        short = raw[2 * at : 2 * (at + n)].view(np.int16)
        for i in range(n):
            out[i] = f32(i32(short[i]))
    elif kind == 7:
        half = raw[2 * at : 2 * (at + n)].view(np.uint16)
        for i in range(n):
            out[i] = f32(i32(half[i]))
    else:
        byte = raw[at : at + n]
        for i in range(n):
            out[i] = f32(i32(byte[i] != 0))


@njit(**OPTIONS)
def find_extremes(x, y, n, results):
    """Largest and smallest of both sides as ordered integers, and whether any bit differs."""
    wide_vectors()
    x_max = SIGN
    x_min = MAGNITUDE
    y_max = SIGN
    y_min = MAGNITUDE
    unlike = i32(0)
    for i in range(n):
        u = bits_of(x[i])
        v = bits_of(y[i])
        unlike |= u ^ v
        u = ordered(u)
        v = ordered(v)
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
def count_apart(x, y, n):
    """How many elements are no number on a side, or a mask sentinel on both."""
    wide_vectors()
    apart = i32(0)
    for i in range(n):
        u = bits_of(x[i])
        v = bits_of(y[i])
        special = ((u & MAGNITUDE) >= INFINITY) | ((v & MAGNITUDE) >= INFINITY)
        apart += i32(special | (_is_sentinel(u) & _is_sentinel(v)))
    return apart


@njit(**OPTIONS)
def set_apart(x, y, n, at, counts, spans):
    """Count what is no number, or a mask sentinel on both sides, and put zeros there; span the others."""
    for i in range(n):
        u = bits_of(x[i])
        v = bits_of(y[i])
        p = u & MAGNITUDE
        q = v & MAGNITUDE
        if p < INFINITY and q < INFINITY:
            if not (_is_sentinel(u) and _is_sentinel(v)):
                spans[0] = min(spans[0], f64(x[i]))
                spans[1] = max(spans[1], f64(x[i]))
                spans[2] = min(spans[2], f64(y[i]))
                spans[3] = max(spans[3], f64(y[i]))
                continue
            counts[SENTINELS] += 1
        else:
            p_class = 1 if p > INFINITY else (0 if p < INFINITY else (2 if u > 0 else 3))
            q_class = 1 if q > INFINITY else (0 if q < INFINITY else (2 if v > 0 else 3))
            if p_class:
                counts[NONFINITE_X + p_class - 1] += 1
            if q_class:
                counts[NONFINITE_Y + q_class - 1] += 1
            if p_class != q_class:
                if counts[MASKS] == 0:
                    counts[MASK_AT] = at + i
                counts[MASKS] += 1
                if _is_sentinel(u) and q_class == 3:
                    counts[SENTINELS_LOST] += 1
        x[i] = 0
        y[i] = 0


@njit(fastmath=FINITE, **OPTIONS)
def add_sums(x, y, low, high, sums):
    """Add |d|, d*d, r, r*r, t, t*t, r*t over one row; return its d*d, r*r and t*t."""
    wide_vectors()
    a = x[low:high]
    b = y[low:high]
    absolute = 0.0
    dd = 0.0
    r = 0.0
    rr = 0.0
    t = 0.0
    tt = 0.0
    rt = 0.0
    for i in range(high - low):
        u = f64(a[i])
        v = f64(b[i])
        d = v - u
        absolute += abs(d)
        dd += d * d
        r += u
        rr += u * u
        t += v
        tt += v * v
        rt += u * v
    sums[0] += absolute
    sums[1] += dd
    sums[2] += r
    sums[3] += rr
    sums[4] += t
    sums[5] += tt
    sums[6] += rt
    return dd, rr, tt


@njit(fastmath=QUOTIENTS, **OPTIONS)
def relative_errors(x, y, n, atol, rtol, results):
    """Count mismatches, certain and possible, and zeros, find maxima (float32); return the sum of ratios."""
    wide_vectors()
    certain = i32(0)
    possible = i32(0)
    zeros = i32(0)
    zeros_hit = i32(0)
    unequal = i32(0)
    largest = i32(0)
    largest_ratio = i32(0)
    total = 0.0
    below = f32(1 - 2**-20)
    above = f32(1 + 2**-20)
    tiny = f32(2.0**-140)  # more than what products lose where they vanish
    for i in range(n):
        d = abs(y[i] - x[i])
        r = abs(x[i])
        bound = atol + rtol * r
        hit = i32(bits_of(d) != i32(0))
        certain += i32(d > bound * above + tiny)
        possible += i32(d >= bound * below - tiny) & hit
        is_zero = bits_of(r) == i32(0)
        ratio = i32(0) if is_zero else bits_of(d / r)
        unequal += hit
        zeros += i32(is_zero)
        zeros_hit += i32(is_zero) & hit
        largest = max(largest, bits_of(d))
        largest_ratio = max(largest_ratio, ratio)
        total += f64(float_of(ratio))
    results[0] = certain
    results[1] = possible
    results[2] = largest
    results[3] = largest_ratio
    results[4] = zeros
    results[5] = zeros_hit
    results[6] = unequal
    return total


@njit(**OPTIONS)
def exact_mismatches(x, y, n, atol, rtol):
    """Elements outside the tolerance, counted in float64."""
    wide_vectors()
    above = i32(0)
    for i in range(n):
        above += i32(abs(f64(y[i]) - f64(x[i])) > atol + rtol * abs(f64(x[i])))
    return above


@njit(**OPTIONS)
def find_mismatch(x, y, n, atol, rtol):
    """Where the first element outside the tolerance is."""
    for i in range(n):
        if abs(f64(y[i]) - f64(x[i])) > atol + rtol * abs(f64(x[i])):
            return i
    return -1


@njit(**OPTIONS)
def exact_error(x, y, n):
    """Largest |d| in float64."""
    wide_vectors()
    largest = i64(0)
    for i in range(n):
        largest = max(largest, bits64(abs(f64(y[i]) - f64(x[i]))))
    return float64_of(largest)


@njit(**OPTIONS)
def exact_ratio(x, y, n):
    """Largest |d|/|r| in float64."""
    wide_vectors()
    largest = i64(0)
    for i in range(n):
        r = abs(f64(x[i]))
        ratio = abs(f64(y[i]) - f64(x[i])) / r
        largest = max(largest, i64(0) if bits64(r) == i64(0) else bits64(ratio))
    return float64_of(largest)


@njit(fastmath=QUOTIENTS, **OPTIONS)
def exact_ratio_sum(x, y, n):
    """Sum of |d|/|r| in float64."""
    wide_vectors()
    total = 0.0
    for i in range(n):
        r = abs(f64(x[i]))
        ratio = abs(f64(y[i]) - f64(x[i])) / r
        total += 0.0 if bits64(r) == i64(0) else ratio
    return total


@njit(**OPTIONS)
def find_error(x, y, n, error):
    """Where the largest |d| is first."""
    for i in range(n):
        if abs(f64(y[i]) - f64(x[i])) == error:
            return i
    return -1


@njit(**OPTIONS)
def find_ratio(x, y, n, ratio):
    """Where the largest |d|/|r| is first."""
    for i in range(n):
        if x[i] != 0 and abs(f64(y[i]) - f64(x[i])) / abs(f64(x[i])) == ratio:
            return i
    return -1


@njit(**OPTIONS)
def largest_distance(x, y, n, shift, cap):
    """Largest distance in values of a format, a float32 cut short by `shift` bits; its sign bit flipped."""
    wide_vectors()
    largest = SIGN
    half = (i32(1) << shift) >> i32(1)
    odd = i32(1) if shift > i32(0) else i32(0)
    for i in range(n):
        u = bits_of(x[i])
        v = bits_of(y[i])
        p = u & MAGNITUDE
        q = v & MAGNITUDE
        p = min(i32(p + half - odd + (odd & (p >> shift))) >> shift, cap)
        q = min(i32(q + half - odd + (odd & (q >> shift))) >> shift, cap)
        p = -p if u < i32(0) else p
        q = -q if v < i32(0) else q
        largest = max(largest, i32(i32(max(p, q) - min(p, q)) ^ SIGN))
    return largest


@njit(**OPTIONS)
def _scaled_bits(magnitude, scale, inverse):
    """Bits of a magnitude times a power of two; if that rounds, an odd number just beside it.

    What rounds is a product that vanishes; a second rounding would see a tie that is none, so that the
    number is made one that is no tie and lies on the right side.
    """
    product = magnitude * scale
    back = product * inverse
    bits = bits_of(product) - i32(back > magnitude)
    return bits | i32(back != magnitude)


@njit(**OPTIONS)
def largest_scaled_distance(x, y, n, scale, shift, cap):
    """As `largest_distance`, for fewer exponents; `scale` moves the least normal of a format to float32's."""
    wide_vectors()
    largest = SIGN
    half = (i32(1) << shift) >> i32(1)
    inverse = f32(1) / scale
    for i in range(n):
        u = bits_of(x[i])
        v = bits_of(y[i])
        p = _scaled_bits(abs(x[i]), scale, inverse)
        q = _scaled_bits(abs(y[i]), scale, inverse)
        p = min(i32(p + half - i32(1) + (i32(1) & (p >> shift))) >> shift, cap)
        q = min(i32(q + half - i32(1) + (i32(1) & (q >> shift))) >> shift, cap)
        p = -p if u < i32(0) else p
        q = -q if v < i32(0) else q
        largest = max(largest, i32(i32(max(p, q) - min(p, q)) ^ SIGN))
    return largest


@njit(**OPTIONS)
def count_errors(x, y, n, tables, bins):
    """Count |d| by exponent and two bits of the mantissa; four tables, so that increments do not wait."""
    for i in range(n):
        bins[i] = u16((bits_of(y[i] - x[i]) & MAGNITUDE) >> i32(21))
    one = tables[0:ERROR_BINS]
    two = tables[ERROR_BINS : 2 * ERROR_BINS]
    three = tables[2 * ERROR_BINS : 3 * ERROR_BINS]
    four = tables[3 * ERROR_BINS : 4 * ERROR_BINS]
    whole = n & ~3
    for i in range(0, whole, 4):
        one[bins[i]] += u32(1)
        two[bins[i + 1]] += u32(1)
        three[bins[i + 2]] += u32(1)
        four[bins[i + 3]] += u32(1)
    for i in range(whole, n):
        one[bins[i]] += u32(1)


@njit(fastmath=QUOTIENTS, **OPTIONS)
def row_outlier(x, y, low, high, rms):
    """Largest |d| / (|r| + rms) of a row in float32, as bits; if it is no number they are large."""
    wide_vectors()
    a = x[low:high]
    b = y[low:high]
    largest = i32(0)
    for i in range(high - low):
        largest = max(largest, bits_of(abs(b[i] - a[i]) / (abs(a[i]) + rms)))
    return largest


@njit(**OPTIONS)
def exact_outlier(x, y, low, high, rms):
    """Largest |d| / (|r| + rms) of a row in float64, and its index."""
    largest = 0.0
    place = -1
    for i in range(low, high):
        outlier = abs(f64(y[i]) - f64(x[i])) / (abs(f64(x[i])) + rms)
        if outlier > largest:
            largest = outlier
            place = i
    return largest, place


@njit(**OPTIONS)
def count_zeros(x, n):
    """Elements of the reference that are zero of either sign."""
    wide_vectors()
    zeros = i32(0)
    for i in range(n):
        zeros += i32((bits_of(x[i]) & MAGNITUDE) == i32(0))
    return zeros
