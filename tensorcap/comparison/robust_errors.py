"""Errors of a module's inputs and output by robust measures, or over some rows only (POL-15)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tensorcap.comparison.pair import Pair
from tensorcap.comparison.policy import POLICY
from tensorcap.metrics import Operands
from tensorcap.metrics.value_blocks import read_value_blocks
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array, decode
from tensorcap_formats.records import Record

_SAMPLE: Final = 1 << 20  # elements of a tensor that are read at most
_BLOCKS: Final = 256  # of neighbouring rows that they are read in
_LEAST_ROW: Final = 64  # elements of a row of row metrics
_LONGEST_ROW: Final = 4096


@dataclass(frozen=True, slots=True)
class RobustError:
    """Errors of the inputs of a module and of its output, by one measure.

    Attributes:
        inputs: Medians over rows.
        output: The same of the output.
        tails: 95th percentiles over rows of the inputs.
        tail: The same of the output.
        has_measured_rows: Whether its rows are those of row metrics (MET-10).
        rows: Errors of inputs, together, and of the output in each row; None if they are not known.
    """

    inputs: tuple[float, ...]
    output: float
    tails: tuple[float, ...]
    tail: float
    has_measured_rows: bool
    rows: tuple[Array, Array] | None = None

    def of(self, *, is_tail: bool) -> tuple[tuple[float, ...], float]:
        """Return the errors of inputs and output: medians, or the 95th percentiles."""
        return (self.tails, self.tail) if is_tail else (self.inputs, self.output)


class RobustErrors:
    """Measures errors again in ways that one huge element, or a large mean, does not hide.

    A massive activation makes the relative error of a tensor small in the norm, so that the module after
    it, which may well ignore that element, seems to make a large error: the largest elements of a row are
    left out of the input. A norm that subtracts the mean subtracts what made the input large.
    """

    def __init__(self, reference: Archive, target: Archive) -> None:
        self._archives = reference, target

    def __call__(self, sources: Sequence[Pair], result: Pair, is_centred: bool) -> list[RobustError]:
        """Measure the errors of the inputs and of the output, by each measure."""
        (output, tail), _, _ = self._errors(result, is_centred=False)
        inputs = [self._errors(pair, is_centred=is_centred) for pair in sources]
        alike = all(has_measured_rows(pair) for pair in (*sources, result))
        return [
            RobustError(tuple(e[i][0] for e in inputs), output, tuple(e[i][1] for e in inputs), tail, alike)
            for i in range(3)
        ]

    def typical(self, pair: Pair) -> float:
        """Measure the median of a pair's error over rows along the last axis, however short these are."""
        return self._errors(pair, is_centred=False)[0][0]

    def outlier(self, pair: Pair) -> float:
        """Measure the largest error of an element relative to it and to the size of its row (POL-162).

        1. `outlier` of `specs/metrics.md`, of rows of at most 4,096 elements.
        2. But the RMS of a row counts as at least `Policy.least_row` times the median of all rows that are
           not all zeros.

        Args:
            pair: Of stored tensors of one shape, all of whose elements are measured.
        """
        return max((float(outliers.max()) for outliers in self._outliers(pair)), default=0.0)

    def worst_row(self, pair: Pair, left_out: Array | None = None) -> float:
        """Measure the largest error of a row, relative to it or to the median row, whichever is larger.

        Args:
            pair: Of stored tensors of one shape, all of whose elements are measured.
            left_out: Elements of tokens that count for nothing, in the shape of the tensors; None if all do.
        """
        errors, sizes, counts = [], [], []
        for x, y, rms, lengths in self._row_blocks(pair):
            starts = np.cumsum(lengths) - lengths
            errors.append(np.sqrt(np.add.reduceat(np.abs(y - x) ** 2, starts) / lengths))
            sizes.append(rms)
            counts.append(lengths)
        error, size = np.concatenate(errors), np.concatenate(sizes)
        if left_out is not None:
            count = np.concatenate(counts)
            kept = ~np.logical_or.reduceat(left_out.reshape(-1), np.cumsum(count) - count)
            error, size = error[kept], size[kept]
        least = float(np.median(size[size > 0])) if size.any() else 0.0
        return float(_ratio(error, np.maximum(size, least)).max(initial=0))

    def outliers(self, pair: Pair) -> Array:
        """Measure what `outlier` is the largest of, of each element.

        Returns:
            Rows along the last axis, `[rows, elements]`, float64; 0 of what is not finite.
        """
        assert pair.reference is not None
        flat = np.concatenate([np.zeros(0), *self._outliers(pair)])
        rows: Array = np.where(np.isfinite(flat), flat, 0).reshape(-1, (1, *pair.reference.shape)[-1])
        return rows

    def _outliers(self, pair: Pair) -> Iterator[Array]:
        """Yield `outlier` of each element, some rows at a time."""
        sizes = np.concatenate([rms for _, _, rms, _ in self._row_blocks(pair)])
        least = POLICY.least_row * float(np.median(sizes[sizes > 0])) if sizes.any() else 0.0
        for x, y, rms, lengths in self._row_blocks(pair):
            scales = np.abs(x) + np.repeat(np.maximum(rms, least), lengths)
            yield _ratio(np.abs(y - x), scales)

    def _row_blocks(self, pair: Pair) -> Iterator[tuple[Array, Array, Array, Array]]:
        """Read both sides of a pair, some rows at a time, with the RMS and the length of each row."""
        assert pair.reference is not None
        assert pair.target is not None
        ours, theirs = pair.reference, pair.target
        columns = min(Operands(ours.dtype, theirs.dtype, ours.shape).row, _LONGEST_ROW)
        reference, target = self._archives
        for _, x, y in read_value_blocks((reference, ours), (target, theirs), columns):
            x, y = (side.astype(np.complex128 if side.dtype.kind == "c" else np.float64) for side in (x, y))
            starts = np.arange(0, x.size, columns)
            lengths = np.diff(np.append(starts, x.size))
            rms = np.sqrt(np.add.reduceat(np.abs(x) ** 2, starts) / lengths)
            yield x, y, rms, lengths

    def of_rows(self, chosen: Sequence[Pair], sources: Sequence[Pair], result: Pair) -> RobustError | None:
        """Measure errors over those rows whose choices of experts are the same; None if there are none."""
        choices = [self._matrices(pair) for pair in chosen]
        same = np.all([(ours == theirs).all(axis=1) for ours, theirs in choices], axis=0)
        if not same.any():
            return None
        errors = []
        for pair in (*sources, result):
            ours, theirs = (side[same] for side in self._matrices(pair))
            d = np.where(np.isfinite(theirs - ours), theirs - ours, 0)
            sizes = (np.where(np.isfinite(ours), ours, 0) ** 2).sum(axis=1)
            errors.append(np.sqrt(_ratio((d**2).sum(axis=1), sizes)))
        medians = [float(np.median(of_rows)) for of_rows in errors]
        tails = [float(np.quantile(of_rows, 0.95)) for of_rows in errors]
        rows = np.max(errors[:-1], axis=0), errors[-1]
        return RobustError(tuple(medians[:-1]), medians[-1], tuple(tails[:-1]), tails[-1], False, rows)

    def through_function(self, source: Pair, result: Pair) -> RobustError | None:
        """Measure the error that the reference's own function makes of the target's input (POL-100).

        1. The reference's elements are points of the function of a leaf that has no parameters; of half of
           them it is predicted at the others.
        2. If the prediction is off by more than `POLICY.function_error`, there is no such function.
        3. Else its values at the target's input, less those at the reference's, are what the input brings
           along: more than its relative error if large inputs have small results, as those of a GELU.

        Args:
            source: The pair of the leaf's one input.
            result: The pair of its result, of the same shape.

        Returns:
            The error of the result beside that; None if there is no function, or not all is finite.
        """
        records = source.reference, source.target, result.reference, result.target
        archives = (*self._archives, *self._archives)
        values = [sample(a, r) for a, r in zip(archives, records, strict=True) if r is not None]
        if len(values) < len(records) or not np.isfinite(values).all():
            return None
        given, tested_given, right, tested = values
        points, places = np.unique(given, return_index=True)
        results = right[places]
        if interpolation_error(points, results) > POLICY.function_error:
            return None
        rows = -1, records[2].shape[-1] if records[2] is not None and records[2].shape else 1
        squares = [
            (difference.reshape(rows) ** 2).sum(axis=1)
            for difference in (np.interp(tested_given, points, results) - right, tested - right, right)
        ]
        inputs, output = (np.sqrt(_ratio(errors, squares[2])) for errors in squares[:2])
        medians, tails = np.median([inputs, output], axis=1), np.quantile([inputs, output], 0.95, axis=1)
        return RobustError(
            (float(medians[0]),),
            float(medians[1]),
            (float(tails[0]),),
            float(tails[1]),
            has_measured_rows(result),
        )

    def _matrices(self, pair: Pair) -> tuple[Array, Array]:
        """Read both sides of a pair as float64, rows along the last axis."""
        assert pair.reference is not None
        assert pair.target is not None
        reference, target = self._archives
        x, y = reference.load(pair.reference), target.load(pair.target)
        return x.astype(np.float64).reshape(-1, x.shape[-1]), y.astype(np.float64).reshape(-1, y.shape[-1])

    def _errors(self, pair: Pair, *, is_centred: bool) -> list[tuple[float, float]]:
        """Measure a pair's relative error: in the norm, without the largest of each row, around its mean.

        Returns:
            Of each the median over rows and the 95th percentile.
        """
        if pair.difference is None or pair.reference is None or pair.target is None:
            return [(0.0, 0.0)] * 3
        records = pair.reference, pair.target
        x, y = (sample(a, r) for a, r in zip(self._archives, records, strict=True))
        columns = min(pair.reference.shape[-1] if pair.reference.shape else 1, x.size)
        rows = x[: x.size - x.size % columns].reshape(-1, columns)
        d = y[: rows.size].reshape(rows.shape) - rows
        ok = np.isfinite(d)
        d, rows = np.where(ok, d, 0), np.where(ok, rows, 0)
        smaller = np.argpartition(np.abs(rows), columns - _largest(columns) - 1, axis=1)
        smaller = smaller[:, : columns - _largest(columns)]
        errors, squares = (np.take_along_axis(side, smaller, axis=1) ** 2 for side in (d, rows))
        centred = rows - rows.mean(axis=1, keepdims=True) if is_centred else rows
        row_errors = [
            np.sqrt(_ratio((d**2).sum(axis=1), (rows**2).sum(axis=1))),
            np.sqrt(_ratio(errors.sum(axis=1), squares.sum(axis=1))),
            np.sqrt(_ratio((d**2).sum(axis=1), (centred**2).sum(axis=1))),
        ]
        return [(float(np.median(e)), float(np.quantile(e, 0.95))) for e in row_errors]


def sample(archive: Archive, record: Record, limit: int = _SAMPLE) -> Array:
    """Read at most `limit` values of a tensor as float64, one dimension: whole rows spread evenly over it."""
    bits = [archive.read_range(record, start, stop) for start, stop in _spread(record, limit)]
    values = decode(np.concatenate(bits), record.dtype)
    return np.abs(values).astype(np.float64) if values.dtype.kind == "c" else values.astype(np.float64)


def first_rows(archive: Archive, record: Record, count: int) -> Array:
    """Read the first `count` rows of a tensor along its last axis, as float64 `[row, channel]`."""
    columns = record.shape[-1]
    bits = archive.read_range(record, 0, min(record.size, count * columns))
    values: Array = decode(bits, record.dtype).astype(np.float64).reshape(-1, columns)
    return values


def _spread(record: Record, limit: int) -> list[tuple[int, int]]:
    """List ranges of elements: the whole tensor, or blocks of rows at equal distances."""
    if record.size <= limit:
        return [(0, record.size)]
    columns = record.shape[-1] if record.shape[-1] <= limit else 1
    rows, wanted = record.size // columns, limit // columns
    blocks = min(_BLOCKS, wanted)
    count = wanted // blocks
    starts = np.linspace(0, rows - count, blocks).astype(np.int64).tolist()
    return [(start * columns, (start + count) * columns) for start in starts]


def interpolation_error(points: Array, results: Array) -> float:
    """Return how far half of the points of a function miss those between them, relative to all results.

    Args:
        points: Ascending, one dimension.
        results: The function of each; if they are none of a function, the error is large.
    """
    between = slice(1, -1, 2)  # the last one may lie beyond the half
    missed = np.interp(points[between], points[::2], results[::2]) - results[between]
    size = float(np.linalg.norm(results))
    return float(np.linalg.norm(missed)) / size if size else 0.0


def has_measured_rows(pair: Pair) -> bool:
    """Whether rows along the last axis are those that row metrics are taken over (MET-10)."""
    shape = pair.reference.shape if pair.reference is not None else ()
    return len(shape) > 0 and _LEAST_ROW <= shape[-1] <= _LONGEST_ROW


def _largest(columns: int) -> int:
    """Return how many elements of a row are left out: 1 %, at least one if there are several."""
    return max(1, columns // 100) if columns > 1 else 0


def _ratio(errors: Array, sizes: Array) -> Array:
    out: Array = np.zeros(errors.shape)
    np.divide(errors, sizes, out=out, where=sizes > 0)
    return out
