"""How far one output lies from another: KL, first choices, or a function of the user's. Less is better."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tensorcap.metrics import agreement, divergences
from tensorcap.workload import load_file
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import UsageError, abbreviate


@dataclass(frozen=True, slots=True)
class OutputMetric:
    """A measure of an output against the reference's.

    Attributes:
        name: `kl`, `top1`, or `FILE.py:FUNCTION`.
        text: What its number is, in words.
        measure: Of the reference's output and another one, float64 of one shape; 0 or less is best.
    """

    name: str
    text: str
    measure: Callable[[Array, Array], float]


@dataclass(frozen=True, slots=True)
class Goal:
    """How far the output may be off.

    Attributes:
        metric: Name of its metric.
        limit: The largest number that is good enough, as the metric measures it.
        text: As it was given.
    """

    metric: str
    limit: float
    text: str


def metric_of(name: str) -> OutputMetric:
    """Return the metric of a name.

    Raises:
        UsageError: There is no such metric, or the file has no such function.
    """
    if name == "kl":
        return OutputMetric("kl", "KL divergence of the output, mean, in nats", _kl)
    if name == "top1":
        return OutputMetric("top1", "share of other first choices", _other_choices)
    file, _, function = name.rpartition(":")
    if not file.endswith(".py") or not function.isidentifier():
        raise UsageError(f"metric {abbreviate(name)!r}: expected kl, top1 or FILE.py:FUNCTION")
    try:
        measure = getattr(load_file(file), function, None)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"metric {name}: {_error_text(error, file)}, expected a file that runs") from error
    if not callable(measure):
        raise UsageError(f"metric {name}: {file} has no function {function!r}")

    def checked(reference: Array, target: Array) -> float:
        try:
            value = float(measure(reference.copy(), target.copy()))
        except Exception as error:
            raise UsageError(
                f"metric {name}: {_error_text(error, file)}",
                hint="It is given two arrays of one shape, the reference's output and another one.",
            ) from error
        if math.isnan(value):
            raise UsageError(f"metric {name}: returned NaN, expected a number, less being better")
        return value

    return OutputMetric(name, f"{function} of the output", checked)


def parse_goal(text: str) -> Goal:
    """Parse `kl=0.01`, `top1=0.99` (at least) or `FILE.py:FUNCTION=VALUE`.

    Raises:
        UsageError: It has another form.

    Example:
        >>> parse_goal("top1=0.75").limit
        0.25
    """
    name, _, number = text.rpartition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if (
        not name
        or math.isnan(value)
        or (name == "top1" and not 0 <= value <= 1)
        or (name == "kl" and value < 0)
    ):
        raise UsageError(
            f"goal {abbreviate(text)!r}: expected kl=VALUE, top1=SHARE or FILE.py:FUNCTION=VALUE",
            hint="kl is at most so many nats; top1 is at least such a share of 1.",
        )
    return Goal(name, 1 - value if name == "top1" else value, text)


def _error_text(error: Exception, file: str) -> str:
    """What a user's function raised, and the line of its file."""
    line = None
    trace = error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename).name == Path(file).name:
            line = trace.tb_lineno
        trace = trace.tb_next
    where = f"{file}, line {line}" if line is not None else file
    message = str(error).partition("\n")[0]
    return f"{where} raised {type(error).__name__}{f': {message}' if message else ''}"


def _rows(reference: Array, target: Array) -> list[tuple[Array, Array]]:
    if not reference.ndim or not reference.size:
        raise UsageError("the output has no rows of logits", hint="Give --metric FILE.py:FUNCTION.")
    sides = (side.reshape(-1, side.shape[-1]) for side in (reference, target))
    return list(zip(*sides, strict=True))


def _kl(reference: Array, target: Array) -> float:
    return float(np.mean([divergences(*row)[0] for row in _rows(reference, target)]))


def _other_choices(reference: Array, target: Array) -> float:
    return 1.0 - float(np.mean([agreement(*row, 1) for row in _rows(reference, target)]))
