"""Layout of the one array of words in which a compiled comparison keeps its state; kinds of elements.

There are two kernels: the narrow one computes with float32 scratch, the wide one with float64. Either runs a
table of tasks in one call.
"""

from __future__ import annotations

from typing import Final, Literal

Kernel = Literal["narrow", "wide"]
KERNELS: Final[tuple[Kernel, ...]] = ("narrow", "wide")

BLOCK: Final = 4096  # elements: two blocks of float32 scratch are 32 KiB
ERROR_BINS: Final = 1024  # of |d| as float32, by exponent and two bits of the mantissa
ROW_BINS: Final = 8192  # of row errors as float32, by exponent and five bits of the mantissa
ERROR_SHIFT: Final = 21  # from the bits of a float32 to its bin
ROW_SHIFT: Final = 18

# How the elements of a buffer are widened; those not named here by a table of 256 values.
KINDS: Final = {
    "float32": 0,
    "bfloat16": 1,
    "float16": 2,
    "int8": 4,
    "uint8": 5,
    "int16": 6,
    "uint16": 7,
    "bool": 8,
    # To float64 alone:
    "int32": 9,
    "uint32": 10,
    "int64": 11,
    "uint64": 12,
    "float64": 13,
}
BY_TABLE: Final = 3
FIRST_WIDE: Final = KINDS["int32"]
WHOLE: Final = range(KINDS["int8"], KINDS["float64"])  # of them, integers and bools

# Accumulators, offsets in words; they come first, so that one slice sets them back.
COUNTS: Final = 0  # 24 int64, see below
SUMS: Final = 24  # 8 float64: |d|, d*d, r, r*r, t, t*t, r*t, |d|/|r|; then 8 for the block at hand
MAXIMA: Final = 40  # 4 float64, see below
PLACES: Final = 44  # 4 int64: element numbers of the maxima, and of the first mismatch
SPANS: Final = 48  # 4 float64: least and largest of the reference, and of the target
MOMENTS: Final = 52  # 6 float64: count, both means, centred r*r, t*t and r*t
ROW_SPAN: Final = 58  # 2 int64: the first and the last bin of rows that was counted in
ERRORS: Final = 60  # 4 tables of ERROR_BINS uint32
ROWS: Final = ERRORS + 4 * ERROR_BINS // 2  # ROW_BINS uint32
ACCUMULATORS: Final = ROWS + ROW_BINS // 2

# Scratch
X: Final = -(-ACCUMULATORS // 8) * 8  # BLOCK float32, on a cache line
Y: Final = X + BLOCK // 2
BINS: Final = Y + BLOCK // 2  # BLOCK uint16
RMS: Final = BINS + BLOCK // 4  # 64 float64: a row has 64 elements at least, unless it is alone
RESULTS: Final = RMS + 64  # 8 int64
WORDS: Final = RESULTS + 8

# Of the wide kernel
WIDE_ERRORS: Final = RESULTS + 8  # 2 tables of ROW_BINS uint32: of |d| as float64, as `error_bins` has them
WIDE_ACCUMULATORS: Final = WIDE_ERRORS + ROW_BINS
WIDE_X: Final = -(-WIDE_ACCUMULATORS // 8) * 8  # BLOCK float64
WIDE_Y: Final = WIDE_X + BLOCK
WIDE_WORDS: Final = WIDE_Y + BLOCK

# Counts
ELEMENTS: Final = 0
APART: Final = 1  # elements that are not measured
UNEQUAL: Final = 2
MISMATCHES: Final = 3
ZEROS: Final = 4  # measured elements whose reference is zero
ZEROS_HIT: Final = 5  # those of them that have an error
NONFINITE_X: Final = 6  # NaN, +inf, -inf
NONFINITE_Y: Final = 9
MASKS: Final = 12
MASK_AT: Final = 13
SENTINELS: Final = 14
SENTINELS_LOST: Final = 15
ULPS: Final = 16
UNLIKE: Final = 17  # whether any bit of the widened values differs
ZERO_ROWS: Final = 18
EXACT_SUM: Final = 19  # of |d| of whole numbers
REFUSED: Final = 20  # whether the wide kernel met values that only numpy measures

# Maxima and their places
ERROR: Final = 0
RATIO: Final = 1
OUTLIER: Final = 2
MISMATCH: Final = 3  # a place alone

# A task: elements of both sides that are added up, offsets in words; tolerance and scale are float64
TASK_X: Final = 0  # address, kind, and address of the table of 256 values
TASK_Y: Final = 3
TASK_SIZE: Final = 6
TASK_BASE: Final = 7  # number of the first element, which begins a block
TASK_ROW: Final = 8
TASK_ATOL: Final = 9
TASK_RTOL: Final = 10
TASK_SCALE: Final = 11  # and shift and cap of the format in which distances are counted
TASK_SHIFT: Final = 12
TASK_CAP: Final = 13
TASK_WORDS: Final = 14

# The result of a task that is a whole tensor: what comes before the tables, and how many bins are not empty
RESULT_ERROR_BINS: Final = ERRORS
RESULT_ROW_BINS: Final = ERRORS + 1
RESULT_WORDS: Final = ERRORS + 2
