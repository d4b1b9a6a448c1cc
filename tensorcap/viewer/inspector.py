"""All that the inspector says of one row: statistics side by side, metrics, errors by axis, findings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from tensorcap.comparison import Pair
from tensorcap.drawing import AxisErrors, Histogram, draw_histogram, errors_along
from tensorcap.reports.html import worst_element
from tensorcap.viewer.planes import Side, TensorReader, can_seek, difference_of
from tensorcap.viewer.rows import METRICS, Row, shortened
from tensorcap.viewer.subject import Subject
from tensorcap.wording import three_digits
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import TensorcapError, TensorNotFoundError
from tensorcap_formats.records import Record
from tensorcap_formats.statistics import Statistics

_SAMPLE: Final = 1 << 17  # elements that charts are made of
_SINGLE: Final = 1 << 10  # of an axis so long that each is a read of its own
_LONGEST: Final = 1 << 20  # elements of an axis that is read for some of them
_RUNS: Final = 128  # reads of them at most
_FURTHER: Final = (  # metrics besides those that colours are for
    ("row error (median)", "row_error_median"),
    ("row error (95 %)", "row_error_p95"),
    ("max relative", "max_rel"),
    ("SQNR, dB", "sqnr_db"),
    ("max ULP", "max_ulp"),
    ("elements that differ", "unequal"),
    ("finite on one side only", "mask_mismatches"),
)
_STAGES: Final = {  # by stage, what it looks at
    "pairing": "pairing of keys",
    "metadata": "shapes and dtypes",
    "values": "values, bit by bit",
    "masks": "masked positions",
    "routing": "choices of experts",
    "policy": "tests, the worst of which counts",
    "calibration": "calibrated limits",
    "agreement": "what else is known of it",
}
_NAMES: Final = {"posinf": "+inf", "neginf": "-inf", "nan": "NaN", "l2": "norm"}


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of a pair.

    Attributes:
        name: Its name.
        text: What it is, "" if the name says it.
        value: Its value as text, "undefined" for none.
        colour: Its colour, "" for one without.
    """

    name: str
    text: str
    value: str
    colour: str


@dataclass(frozen=True, slots=True)
class Charts:
    """How the error spreads over axes, and the histogram of both sides.

    Attributes:
        axes: Where the error lies; none of one side alone.
        histogram: Of both sides, or of one twice.
        is_pair: Whether there are two sides.
        is_sampled: Whether they are of a sample of the elements.
    """

    axes: tuple[AxisErrors, ...]
    histogram: Histogram | None
    is_pair: bool
    is_sampled: bool


@dataclass(frozen=True, slots=True)
class Inspection:
    """What is said of one row.

    Attributes:
        row: The row.
        class_name: Class of its module, "" if unknown.
        operation: The operation of a compiled program that holds it, with its node, "" for none.
        facts: What it is: dtype, shape, on both sides.
        statistics: Name of each, and its text on each side that has one.
        sides: Names of the sides that the statistics are of.
        metrics: Metrics with colours, then others.
        worst: Where the largest error is, as a sentence; "" if unknown.
        worst_index: That index; None if unknown.
        reason: Why its status is what it is, "" if that is plain.
        tests: Each stage and test that looked at it: name, status, text.
        steps: Layout steps from the target's tensor to the reference's.
        target_keys: The target's own keys, if they are others.
        evidence: Why it is compared with them, "" if keys are equal.
        drawn: The sides with values that can be drawn.
        shape: Of what is drawn.
        missing: Why something is not drawn, as a sentence; "" if nothing is missing.
    """

    row: Row
    class_name: str
    operation: str
    facts: tuple[tuple[str, str], ...]
    statistics: tuple[tuple[str, tuple[str, ...]], ...]
    sides: tuple[str, ...]
    metrics: tuple[Metric, ...]
    worst: str
    worst_index: tuple[int, ...] | None
    reason: str
    tests: tuple[tuple[str, str, str], ...]
    steps: tuple[str, ...]
    target_keys: tuple[str, ...]
    evidence: str
    drawn: tuple[Side, ...]
    shape: tuple[int, ...]
    missing: str


def inspect(subject: Subject, row: Row) -> Inspection:
    """Gather what is said of one row, without reading values."""
    pair = row.pair
    records = _records(subject, row)
    drawn, shape, missing = _drawn(records)
    difference = pair.difference if pair else None
    origin = pair.origin if pair else None
    known = [(name, _statistics(archive, record)) for name, archive, record in records]
    known = [(name, s) for name, s in known if s is not None]
    keys = tuple(shortened(key) for key in origin.target if key != row.key) if origin else ()
    return Inspection(
        row,
        subject.class_of(row),
        _operation(subject, row),
        tuple(_facts(records)),
        tuple(
            (_NAMES.get(f.name, f.name), tuple(_number(getattr(s, f.name)) for _, s in known))
            for f in fields(Statistics)
        )
        if known
        else (),
        tuple(name for name, _ in known),
        tuple(_metrics(subject, row)),
        worst_element(difference),
        _worst_index(pair),
        pair.reason if pair else "",
        tuple(_tests(pair)) if pair else (),
        tuple(map(str, origin.steps)) if origin else (),
        keys,
        origin.reason if origin else "",
        drawn,
        shape,
        missing,
    )


def _operation(subject: Subject, row: Row) -> str:
    point = subject.points.get(row.key)
    if point is None or not point.operation:
        return ""
    source = " and it fails although all that it is computed from agrees" if point.is_failure_source else ""
    return f"{point.name}{source}"


Known = tuple[str, Archive | None, Record]


def _records(subject: Subject, row: Row) -> list[Known]:
    archives: Sequence[Archive | None] = subject.archives or (None, None)
    if row.pair is None:
        return [("values", archives[0], row.record)]
    sides = (
        ("reference", archives[0], row.pair.reference),
        ("target", archives[-1], row.pair.target),
    )
    return [(name, archive, record) for name, archive, record in sides if record is not None]


def _drawn(records: Sequence[Known]) -> tuple[tuple[Side, ...], tuple[int, ...], str]:
    """The sides that can be drawn, their shape, and why one is missing."""
    if all(archive is None for _, archive, _ in records):
        return (), (), "Values are not at hand: a saved comparison has none. Open both archives to see them."
    reasons, sides = [], []
    for name, archive, record in records:
        if not record.stored:
            reasons.append(f"Only statistics were kept of the {name}, no values.")
        elif not record.size:
            reasons.append(f"The {name} has no elements.")
        elif archive is not None:
            sides.append(Side(name, archive, record))
    if len(sides) == 2 and sides[0].record.shape != sides[1].record.shape:
        shapes = " and ".join(str(list(side.record.shape)) for side in sides)
        reasons.append(f"Shapes differ, {shapes}: the reference alone is drawn.")
        sides = sides[:1]
    return tuple(sides), sides[0].record.shape if sides else (), " ".join(reasons)


def _facts(records: Sequence[Known]) -> Iterator[tuple[str, str]]:
    for name, texts in (
        ("dtype", [record.dtype.name for _, _, record in records]),
        ("shape", [str(list(record.shape)) for _, _, record in records]),
    ):
        yield name, " → ".join(dict.fromkeys(texts))


def _statistics(archive: Archive | None, record: Record) -> Statistics | None:
    if record.statistics is not None or archive is None or not record.stored or record.size > _SAMPLE:
        return record.statistics
    try:
        return archive.statistics(record)
    except TensorcapError:
        return None


def _metrics(subject: Subject, row: Row) -> Iterator[Metric]:
    if row.pair is None or not row.pair.is_compared:
        return
    scale, difference = subject.scale, row.pair.difference
    for name, text in METRICS.items():
        yield Metric(
            name, text, _number(scale.value(row, name)) or "undefined", scale.colour(row, name) or ""
        )
    if row.own is not None:
        yield Metric("own error", "what its module added itself", three_digits(row.own), "")
    for name, member in _FURTHER if difference is not None else ():
        value = getattr(difference, member)
        if value is not None:
            yield Metric(name, "", _number(value), "")


def _number(value: float | None) -> str:
    """A number in six digits, a count in full, "" for none; infinite ones by name."""
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def _worst_index(pair: Pair | None) -> tuple[int, ...] | None:
    difference = pair.difference if pair else None
    if difference is None:
        return None
    return difference.mask_index if difference.mask_mismatches else difference.max_abs_index


def _tests(pair: Pair) -> Iterator[tuple[str, str, str]]:
    """What each stage decided, and what each test found."""
    for decision in pair.history:
        status = "no verdict yet" if decision.status in (None, "unjudged") else decision.status
        yield _STAGES.get(decision.stage, decision.stage), status, decision.reason
        for finding in decision.findings:
            yield finding.test.replace("_", " "), finding.status, finding.text
    if not pair.history:  # a saved result keeps the last findings only
        for finding in pair.findings:
            yield finding.test.replace("_", " "), finding.status, finding.text


def draw_charts(reader: TensorReader, sides: Sequence[Side]) -> Charts:
    """Draw histogram and error by axis: of all elements, or of a sample if there are many.

    Raises:
        UsageError: Values cannot be read in parts.
        ReadError: They cannot be read.
    """
    steps = _steps(sides[0])
    values = [_sample(reader, side, steps) for side in sides]
    reference, target = values[0], values[-1]
    axes: list[AxisErrors] = []
    if len(values) == 2:
        difference = difference_of(reference, target).astype(np.float64, copy=False)
        for axis, step in enumerate(steps) if difference.any() else ():
            if difference.shape[axis] > 1:
                one = errors_along(difference, axis)
                size = sides[0].record.shape[axis]
                axes.append(AxisErrors(axis, size, one.bars, one.worst * step, one.share))
    histogram = draw_histogram(reference, target)
    return Charts(tuple(axes), histogram, len(values) == 2, any(step > 1 for step in steps))


def _steps(side: Side) -> list[int]:
    """How far apart indices of each axis are in the sample: the last axis stays whole as long as it can."""
    shape = list(side.record.shape)
    steps = [1] * len(shape)
    seeks = can_seek(side)
    limit = _SINGLE if seeks and shape and shape[-1] > _LONGEST else _SAMPLE

    def count(axes: Sequence[int]) -> int:
        return math.prod(-(-shape[axis] // steps[axis]) for axis in axes)

    every, leading = range(len(shape)), range(len(shape) - 1)
    while count(every) > limit or (seeks and count(every) > limit // 8 and count(leading) > _RUNS):
        axes = [axis for axis in leading if -(-shape[axis] // steps[axis]) > 1] or list(every)
        widest = max(axes, key=lambda axis: -(-shape[axis] // steps[axis]))
        steps[widest] *= 2
    return steps


def _sample(reader: TensorReader, side: Side, steps: Sequence[int]) -> Array:
    """The elements at every so many indices of each axis, real ones."""
    values = reader.sample(side, steps)
    if np.iscomplexobj(values):
        return np.abs(values.astype(np.complex128))
    return values.astype(np.float64)


def row_of(subject: Subject, number: int) -> Row:
    """The row of a number.

    Raises:
        TensorNotFoundError: There is none.
    """
    if not 0 <= number < len(subject.rows):
        raise TensorNotFoundError(f"{subject.title}: has no tensor number {number}")
    return subject.rows[number]
