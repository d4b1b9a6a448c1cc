"""A part of a stored tensor: parsed from `[0, :, 5:8]`, read without the rest, written as `.npy`."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from tensorcap_formats.archive import Archive
from tensorcap_formats.content import write_errors
from tensorcap_formats.dtypes import Array, DType, decode
from tensorcap_formats.errors import UsageError, WriteError, abbreviate
from tensorcap_formats.output_path import build_beside, put_in_place, refuse_overlap, resolved
from tensorcap_formats.records import Record
from tensorcap_formats.writing import refuse_to_replace_archive

_INDEX: Final = re.compile(r"[+-]?\d{1,18}")
_SLICE: Final = re.compile(r"([+-]?\d{1,18})?:([+-]?\d{1,18})?(?::([+-]?\d{1,18})?)?")
PRINTED_WHOLE: Final = 200  # elements: a tensor up to here is shown whole
DIGITS: Final = 6  # of printed values, significant ones
# Elements shown at the beginning and the end of a longer axis, the last axis first: 144 in all at most.
_EDGES: Final = ((3, 3), (3, 3), (1, 1), (1, 1))
_FIRST_ONLY: Final = (1, 0)


def parse_window(text: str, shape: tuple[int, ...]) -> tuple[range | int, ...]:
    """Read a Python index of integers, slices and one `...`.

    Args:
        text: As between the brackets of `tensor[0, :, 5:8]`, with or without them.
        shape: What it indexes.

    Returns:
        For each axis a number, which drops the axis, or a range.

    Raises:
        UsageError: It is no such index, has too many entries, or points outside the shape.

    Example:
        >>> parse_window("[0, ..., 5:8]", (2, 3, 10))
        (0, range(0, 3), range(5, 8))
    """
    parts = [part.strip() for part in text.strip().removeprefix("[").removesuffix("]").split(",")]
    parts = [] if parts == [""] else parts
    entries = len(parts) - parts.count("...")
    if parts.count("...") > 1 or entries > len(shape):
        raise UsageError(f"index {abbreviate(text)!r}: has {entries} entries, the shape is {list(shape)}")
    at = parts.index("...") if "..." in parts else len(parts)
    parts[at : at + 1] = [":"] * (len(shape) - entries)
    return tuple(
        _parse_entry(part, size, axis) for axis, (part, size) in enumerate(zip(parts, shape, strict=True))
    )


def _parse_entry(part: str, size: int, axis: int) -> range | int:
    if _INDEX.fullmatch(part):
        number = int(part)
        if not -size <= number < size:
            raise UsageError(f"index {number}: is outside axis {axis}, which has {size} elements")
        return number % size
    match = _SLICE.fullmatch(part)
    if match is None:
        raise UsageError(f"index {abbreviate(part)!r}: is no integer and no slice such as 5:8")
    start, stop, step = (int(group) if group else None for group in match.groups())
    if step is not None and step <= 0:
        raise UsageError(f"index {part!r}: has step {step}, expected at least 1")
    return range(*slice(start, stop, step).indices(size))


def read_window(archive: Archive, record: Record, window: Sequence[range | int]) -> Array:
    """Read the values of a part of a tensor; only the runs of bytes that hold it are read.

    Args:
        archive: Holds the record.
        record: The tensor.
        window: A range, or an index, for each axis.

    Returns:
        The values, as `dtypes.decode` gives them; axes with an index are gone.

    Raises:
        UsageError: The archive has only statistics of the tensor.
        ReadError: The bytes cannot be read.
    """
    ranges = [range(w, w + 1) if isinstance(w, int) else w for w in window]
    out = np.empty([len(r) for r in ranges], record.dtype.storage)
    if out.size:
        _read_runs(archive, record, ranges, out.reshape(-1))
    kept = [len(r) for r, w in zip(ranges, window, strict=True) if not isinstance(w, int)]
    return decode(out.reshape(kept), record.dtype)


def _read_runs(archive: Archive, record: Record, ranges: Sequence[range], out: Array) -> None:
    """Fill `out`, one read for each index of the axes before the last one that is cut."""
    strides = [math.prod(record.shape[axis + 1 :]) for axis in range(len(ranges))]
    cut = [axis for axis, r in enumerate(ranges) if len(r) != record.shape[axis]]
    if not cut:
        out[:] = archive.read_range(record, 0, record.size)
        return
    axis = cut[-1]
    along, stride = ranges[axis], strides[axis]
    at = 0
    for index in itertools.product(*ranges[:axis]):
        start = sum(i * s for i, s in zip(index, strides, strict=False))
        run = archive.read_range(record, start + along[0] * stride, start + (along[-1] + 1) * stride)
        picked = run.reshape(-1, stride)[:: along.step].reshape(-1)
        out[at : at + picked.size] = picked
        at += picked.size


def summary(archive: Archive, record: Record, digits: int = DIGITS) -> str:
    """Format the values of a tensor as text: all of a small one, else first and last ones along each axis.

    Args:
        archive: The archive.
        record: The tensor in it.
        digits: How many significant ones each value has at most.

    Raises:
        UsageError: The archive has only statistics of the tensor.
        ReadError: The bytes cannot be read.
    """
    read = partial(read_window, archive, record)
    return _summary(record.shape, read, packed=record.dtype.packed, digits=digits)


def array_summary(values: Array, digits: int = DIGITS) -> str:
    """Format the values of an array as text, as `summary` does."""

    def read(window: tuple[range, ...]) -> Array:
        return values[tuple(slice(r.start, r.stop) for r in window)]

    return _summary(values.shape, read, digits=digits)


def stored_summary(bits: Array, dtype: DType) -> str:
    """Format the values of stored elements as text, as `summary` does; only those shown are decoded."""

    def read(window: tuple[range, ...]) -> Array:
        return decode(bits[tuple(slice(r.start, r.stop) for r in window)], dtype)

    return _summary(bits.shape, read, packed=dtype.packed)


def _summary(
    shape: tuple[int, ...],
    read: Callable[[tuple[range, ...]], Array],
    *,
    packed: int = 1,
    digits: int = DIGITS,
) -> str:
    if not math.prod(shape):
        return f"[] (shape {list(shape)})"
    edges = [(n, 0) for n in shape] if math.prod(shape) <= PRINTED_WHOLE else _edges(shape)
    parts = [
        [range(first)] + ([range(n - last, n)] if last else [])
        for n, (first, last) in zip(shape, edges, strict=True)
    ]
    corners = [read(window) for window in itertools.product(*parts)]
    for axis in reversed(range(len(parts))):  # the last axis varies fastest
        count = len(parts[axis])
        corners = [np.concatenate(corners[i : i + count], axis) for i in range(0, len(corners), count)]
    omitted = [first if first + last < n else None for n, (first, last) in zip(shape, edges, strict=True)]
    if omitted and omitted[-1] is not None:
        omitted[-1] *= packed
    return values_text(corners[0], omitted, digits)


def _edges(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    edges = [_EDGES[i] if i < len(_EDGES) else _FIRST_ONLY for i in range(len(shape))][::-1]
    return [(n, 0) if n <= sum(e) else e for n, e in zip(shape, edges, strict=True)]


def values_text(values: Array, omitted: Sequence[int | None] = (), digits: int = DIGITS) -> str:
    """Format values in nested brackets, as numpy prints them.

    Args:
        values: The values, a few.
        omitted: For each axis, how many elements precede the dots, None for no dots.
        digits: How many significant ones each value has at most.

    Example:
        >>> print(values_text(np.array([[1.0, 2.5], [3.0, 4.0]]), [None, 1]))
        [[  1, ..., 2.5],
         [  3, ...,   4]]
    """
    texts = [_text(value, digits) for value in values.reshape(-1).tolist()]
    omitted = list(omitted) or [None] * values.ndim
    width = max(map(len, texts), default=0)
    cells = [text.rjust(width) for text in texts] if values.ndim and values.shape[-1] > 1 else texts
    return _nested(np.array(cells, object).reshape(values.shape), omitted, 1)


def _nested(cells: Array, omitted: Sequence[int | None], depth: int) -> str:
    if cells.ndim == 0:
        return str(cells[()])
    parts = [_nested(cell, omitted[1:], depth + 1) for cell in cells] if cells.ndim > 1 else list(cells)
    if omitted[0] is not None:
        parts.insert(omitted[0], "...")
    glue = ", " if cells.ndim == 1 else "," + "\n" * min(cells.ndim - 1, 2) + " " * depth
    return f"[{glue.join(parts)}]"


def _text(value: complex | bool, digits: int) -> str:
    return str(value) if isinstance(value, bool | int) else f"{value:.{digits}g}"


def write_npy(
    archive: Archive,
    record: Record,
    path: str | os.PathLike[str],
    *,
    window: Sequence[range | int] | None = None,
    replace: bool = False,
) -> np.dtype[np.generic]:
    """Write a tensor, or a part of it, as `.npy`; a whole one in bounded memory.

    Args:
        archive: Holds the record.
        record: The tensor.
        path: The file.
        window: The part, None for all.
        replace: Whether an existing file may be replaced.

    Returns:
        The dtype in the file: that of the tensor, or a wider one if numpy has no such dtype.

    Raises:
        UsageError: The archive has only statistics of the tensor, or the path is the archive's.
        ReadError: The bytes cannot be read.
        WriteError: The file exists, or is an archive, which is never replaced; or it cannot be written.
    """
    path = Path(path)
    refuse_overlap(archive.path, path)
    if not replace and os.path.lexists(path):
        raise WriteError(f"{path}: is there already", hint="Replace it with --force.")
    refuse_to_replace_archive(path)
    sample = decode(np.zeros(1, record.dtype.storage), record.dtype)
    target = resolved(path)
    with build_beside(target) as building, write_errors(path):
        with open(building, "xb") as file:
            if window is not None:
                np.lib.format.write_array(file, read_window(archive, record, window), allow_pickle=False)
            else:
                shape = (*record.shape[:-1], record.shape[-1] * sample.size) if record.shape else ()
                header = {
                    "descr": np.lib.format.dtype_to_descr(sample.dtype),
                    "fortran_order": False,
                    "shape": shape,
                }
                np.lib.format.write_array_header_1_0(file, header)
                for block in archive.blocks(record):
                    file.write(decode(block, record.dtype).data)
        put_in_place(building, target)
    return sample.dtype
