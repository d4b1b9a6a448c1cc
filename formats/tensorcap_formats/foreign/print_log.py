"""The text that MAX's debug prints write to a terminal: a log of tensors, whole or abbreviated.

Each print begins with its label (specs/max-files.md, section 6):

    model.norm-output = tensor<2x3xf32> [1.000000e+00, 2.500000e+00, …]           FULL, all elements
    model.norm-output = tensor([[1.0000, 2.5000, …]], dtype=f32, shape=[2,3])      COMPACT, four decimals

What stands between two prints is not ours, and is passed over.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from tensorcap_formats.dtypes import DTYPES, Array, DType, encode
from tensorcap_formats.errors import NotAnArchiveError, ReadError
from tensorcap_formats.foreign.dump_labels import Label, parse_label, probe_key, remove_root, undouble_names
from tensorcap_formats.foreign_archive import ForeignArchive, ForeignTensor
from tensorcap_formats.input_file import InputFile

_MAX_BYTES: Final = 1 << 28  # of text; .max files are for more
_MAX_DIGITS: Final = 18  # of a size
_SNIFFED_BYTES: Final = 1 << 20
_EDGE: Final = 3  # elements that an abbreviated axis keeps at each end
_COMPACT_DECIMALS: Final = 4
_START: Final = re.compile(rb"^(.{1,4096}?) = tensor([(<])", re.MULTILINE)
_FULL: Final = re.compile(rb"((?:\d+x)*)([a-z]+\d*\w*)> \[([^\]]*)\]")
_COMPACT: Final = re.compile(rb"([^()=]*), dtype=(\w+), shape=\[([\d,]*)\]\)")
_NUMBER: Final = re.compile(rb"[-+]?(?:nan|inf|\d[\d.]*(?:e[-+]?\d+)?)|true|false", re.IGNORECASE)
_DTYPE: Final = re.compile(r"(bf|f|si|ui)(\d+)")
_KINDS: Final = {"bf": "bfloat", "f": "float", "si": "int", "ui": "uint"}
# The precision in which a run is judged whose values were printed with an error of so much, relative to the
# root of their mean square: a tenth of what float32 is allowed, and one rounding of float16 and of bfloat16
_PRECISIONS: Final = (("float32", 1e-6), ("float16", 2.1e-4), ("bfloat16", 1.66e-3))


@dataclass(frozen=True, slots=True)
class _Print:
    """A tensor as it was printed: the elements that are there, in the shape that they make."""

    label: str
    step: int
    dtype: DType
    shape: tuple[int, ...]
    values: Array
    error: float
    is_abbreviated: bool


def is_print_log(path: Path) -> bool:
    """Whether a file has a print of MAX near its beginning."""
    with closing(InputFile(path)) as file:
        return _START.search(file.read(0, min(_SNIFFED_BYTES, file.size))) is not None


def open_print_log(path: Path) -> ForeignArchive:
    """Open a log as an archive whose keys are what the labels of its prints mean.

    The n-th print of a label is of step n - 1. Tensors of which it shows too little are in `skipped`; so are
    damaged prints, which make it incomplete.

    Raises:
        NotAnArchiveError: There is no print in it.
        ReadError: It is too large, or the system cannot read it.
    """
    with closing(InputFile(path)) as file:
        if file.size > _MAX_BYTES:
            raise ReadError(
                f"{path}: has {file.size} bytes, expected at most {_MAX_BYTES} of a log of prints"
            )
        text = file.read_all(_MAX_BYTES)
    skipped: dict[str, str] = {}
    damaged: dict[str, str] = {}
    prints = list(_prints(text, skipped, damaged))
    if not prints and not skipped and not damaged:
        raise NotAnArchiveError(f"{path}: holds no line 'LABEL = tensor(…' of a print of MAX")
    keyed = [
        (probe_key(one.label, one.step) if label is None else label.key(one.step), one)
        for one, label in zip(prints, _labels(prints), strict=True)
    ]
    keyed.sort(key=lambda pair: pair[0].step)
    tensors = [ForeignTensor(key.text, p.dtype, p.shape, partial(_copy, p.values)) for key, p in keyed]
    return ForeignArchive(
        path,
        "print-log",
        tensors,
        skipped=skipped,
        problems=damaged,
        run=_run(prints),
        is_ordered=True,
    )


def _prints(text: bytes, skipped: dict[str, str], damaged: dict[str, str]) -> Iterator[_Print]:
    """The prints in a log, in order.

    Why others are not read goes into `skipped`, or into `damaged` if they are not as MAX prints.
    """
    counts: Counter[str] = Counter()
    for start in _START.finditer(text):
        label = start[1].decode("utf-8", "backslashreplace")
        step = counts[label]
        counts[label] += 1
        is_full = start[2] == b"<"
        match = (_FULL if is_full else _COMPACT).match(text, start.end())
        if match is None:
            damaged[label] = "its print is cut short, or holds something else"
            continue
        sizes, name, elements = match.groups() if is_full else (match[3], match[2], match[1])
        texts = re.findall(rb"\d+", sizes)
        if any(len(size) > _MAX_DIGITS for size in texts):
            damaged[label] = f"a size has more than {_MAX_DIGITS} digits"
            continue
        shape, dtype = tuple(map(int, texts)), _dtype_named(name.decode())
        if dtype is None:
            skipped[label] = f"dtype {name.decode()}"
            continue
        printed = shape if is_full else _printed_shape(shape)
        if printed is None:
            skipped[label] = f"is abbreviated over several axes of shape {list(shape)}"
            continue
        numbers = _NUMBER.findall(elements)
        if len(numbers) != math.prod(printed):
            damaged[label] = f"shows {len(numbers)} elements, expected {math.prod(printed)}"
            continue
        try:
            values = _values(numbers, dtype)
        except (ValueError, OverflowError):
            damaged[label] = f"an element is no {dtype.name}"
            continue
        error = _error(numbers, values, is_full=is_full) if dtype.kind == "float" else 0.0
        if error > _PRECISIONS[-1][1]:
            skipped[label] = "is printed with too few digits for values as small as its own"
            continue
        yield _Print(label, step, dtype, printed, encode(values, dtype).reshape(-1), error, printed != shape)


def _printed_shape(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of what COMPACT shows; None if what it shows has none.

    Of each axis of more than six elements it shows three at each end; axes before the last two count as one.
    """
    if sum(size != 1 for size in shape[:-2]) > 1 and math.prod(shape[:-2]) > 2 * _EDGE:
        return None
    return tuple(min(size, 2 * _EDGE) for size in shape)


def _values(numbers: list[bytes], dtype: DType) -> Array:
    if dtype.kind == "bool":
        return np.array([number.lower() == b"true" for number in numbers])
    if dtype.kind == "float":
        return np.array([float(number) for number in numbers], np.float64)
    return np.array([int(number) for number in numbers], dtype.storage)


def _error(numbers: list[bytes], values: Array, *, is_full: bool) -> float:
    """The error of printing, relative to the root mean square: uniform over a unit of the last digit."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return 0.0
    if is_full:
        digits = max(len(number.partition(b"e")[0].partition(b".")[2]) for number in numbers)
        return float(10.0**-digits / math.sqrt(12))
    root = math.sqrt(float(np.mean(np.square(finite))))
    return 10.0**-_COMPACT_DECIMALS / math.sqrt(12) / root if root else math.inf


def _dtype_named(name: str) -> DType | None:
    match = _DTYPE.fullmatch(name)
    return DTYPES.get(name if match is None else f"{_KINDS[match[1]]}{match[2]}")


def _labels(prints: list[_Print]) -> Iterator[Label | None]:
    """What the labels mean, without the name of the whole model; None of those that are no layers'."""
    parsed = [parse_label(one.label) for one in prints]
    known = iter(remove_root(undouble_names(label) for label in parsed if label))
    for label in parsed:
        yield label and next(known)


def _run(prints: list[_Print]) -> dict[str, Any]:
    """Run metadata: what the values can be held to, and that they are those of a log."""
    floats = [one for one in prints if one.dtype.kind == "float"]
    error = max((one.error for one in floats), default=0.0)
    of_prints = next(name for name, limit in _PRECISIONS if error <= limit)
    own = {one.dtype.name for one in floats}
    order = [name for name, _ in _PRECISIONS]
    coarsest = max([of_prints, *(own & set(order))], key=order.index)
    return {
        "framework": {"name": "max"},
        "dump": "abbreviated log" if any(one.is_abbreviated for one in prints) else "log",
        "compute_dtype": coarsest,
        "notes": [f"Values are as they were printed, and judged as those of {coarsest}."],
    }


def _copy(values: Array, start: int, out: Array) -> None:
    out[:] = values[start : start + out.size]


def corner(size: int) -> Array:
    """The indices of an axis that an abbreviated print shows."""
    if size <= 2 * _EDGE:
        return np.arange(size)
    return np.concatenate([np.arange(_EDGE), np.arange(size - _EDGE, size)])
