"""Values of a pair of records: shapes and indices, read block by block, 64-bit integers exactly as floats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array, decode
from tensorcap_formats.errors import UsageError
from tensorcap_formats.records import Record

_BLOCK: Final = 65_536  # values of either side at a time


def values_shape(record: Record) -> tuple[int, ...]:
    """Return the shape of the values: a packed dtype holds several in each stored element."""
    if record.dtype.packed == 1:
        return record.shape
    return (*record.shape[:-1], (record.shape or (1,))[-1] * record.dtype.packed)


def require_rows(reference: Record, target: Record) -> tuple[int, ...]:
    """Return the shape of the values of two records that are compared row by row.

    Raises:
        UsageError: The shapes differ, or there is no axis.
    """
    shape = values_shape(reference)
    if not shape or shape != values_shape(target):
        raise UsageError(
            f"{reference.key.text}: shapes {list(shape)} and {list(values_shape(target))}, expected equal "
            "ones of at least one axis"
        )
    return shape


def unravel(flat: int | None, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Convert the number of an element, in C order, to one index for each axis; None stays None."""
    if flat is None:
        return None
    index = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        index.append(at)
    return tuple(reversed(index))


def classify(parts: Array) -> Array:
    """Classify real floats: 0 for finite, 1 for NaN, 2 for +inf, 3 for -inf."""
    classes = np.isnan(parts).astype(np.uint8)
    classes[parts == np.inf] = 2
    classes[parts == -np.inf] = 3
    return classes


def read_value_blocks(
    reference: tuple[Archive, Record],
    target: tuple[Archive, Record],
    columns: int,
    limit: int = _BLOCK,
) -> Iterator[tuple[int, Array, Array]]:
    """Read both sides in blocks: as many whole rows as fit, or, of a row that is too long, a piece.

    Args:
        reference: An archive and its record.
        target: The same, with as many values.
        columns: Values in a row.
        limit: Values in a block, an even number.

    Yields:
        Number of the first value, and the values of both sides, one-dimensional.
    """
    packed = reference[1].dtype.packed
    total = reference[1].size * packed
    length = columns * max(1, limit // columns) if 0 < columns <= limit else limit
    for row_start in range(0, total, max(columns, length)):
        row_stop = min(total, row_start + max(columns, length))
        for start in range(row_start, row_stop, length):
            stop = min(start + length, row_stop)
            yield start, _read_values(*reference, start, stop), _read_values(*target, start, stop)


def _read_values(archive: Archive, record: Record, start: int, stop: int) -> Array:
    packed = record.dtype.packed  # divides the last axis, and so all places
    return decode(archive.read_range(record, start // packed, stop // packed), record.dtype)


def split_wide(values: Array, kind: Any = np.float64) -> tuple[Array, Array | float]:
    """Split values into a sum of two floats, which holds 64-bit integers exactly; the second is mostly 0."""
    if values.dtype.kind in "iu" and values.dtype.itemsize == 8:
        low = values & values.dtype.type(0xFFFFFFFF)
        return (values - low).astype(kind), low.astype(np.float64)
    return values.astype(kind), 0.0
