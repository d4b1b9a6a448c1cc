"""Where an error curve changes in the order of execution: steps, after which it stays, and spikes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, Literal

Curve = Literal["own", "total"]
Kind = Literal["step", "spike"]

_JUMP: Final = 10.0  # times the largest error so far: a second mistake on top of a first
_RUN: Final = 3  # results in a row
_AHEAD: Final = 8  # results after one: what runs beside it is soon over


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One result on a curve.

    Attributes:
        key: Key text of the tensor.
        module: The module that made it.
        value: Its error, no unit; infinite if none is defined.
        is_bad: Whether it is not green.
    """

    key: str
    module: str
    value: float
    is_bad: bool


@dataclass(frozen=True, slots=True)
class ChangePoint:
    """A place where errors begin, or become much larger.

    Attributes:
        curve: Of own errors, which no other module passes on, or of total ones.
        kind: `step` if what follows is wrong as well, `spike` if not.
        key: Key text of the first tensor.
        module: The module that made it.
        value: Its error.
        before: The largest error of the run that it stands on; 0 if what is before it is green.
        length: How many results are wrong as much: of a step of the total error all from this one on, else
            this one and those right behind it.
    """

    curve: Curve
    kind: Kind
    key: str
    module: str
    value: float
    before: float
    length: int


def change_points(points: Sequence[CurvePoint], curve: Curve) -> tuple[ChangePoint, ...]:
    """Find where a curve changes: steps in execution order, then spikes in execution order.

    1. A bad point begins a change if the point before it is green, or if its error is ten times the largest
       error so far.
    2. An own error is a step if it and the next two results are wrong, or if it and the last one are.
    3. A total error passes on, but beside it run modules that are not given it: it is a step if most of the
       next eight results are wrong. After a step of the total error only a larger one counts.

    Args:
        points: In execution order.
        curve: What the values are.

    Example:
        >>> values = [0.0, 0.0, 0.2, 0.3, 0.9, 0.4, 0.5]
        >>> points = [CurvePoint(f"0/m{i}/output", f"m{i}", v, v > 0) for i, v in enumerate(values)]
        >>> [(change.kind, change.module, change.length) for change in change_points(points, "total")]
        [('step', 'm2', 5)]
    """
    changes: list[ChangePoint] = []
    level, stays = 0.0, False
    for at, point in enumerate(points):
        if not point.is_bad:
            level = level if stays else 0.0
            continue
        if not level or (math.isfinite(level) and point.value >= _JUMP * level):
            as_wrong = math.sqrt(level * point.value) if level else 0.0
            rest = points[at + 1 :]
            wrong = [later.is_bad and later.value >= as_wrong for later in rest]
            length = 1 + _leading(wrong)
            if curve == "own":
                kind: Kind = "step" if _is_step(length, 1 + len(rest)) else "spike"
            else:
                ahead = wrong[:_AHEAD]
                kind = "step" if 2 * sum(ahead) > len(ahead) else "spike"
            if curve == "total" and kind == "step":
                length = 1 + sum(wrong)
                stays = True
            changes.append(ChangePoint(curve, kind, point.key, point.module, point.value, level, length))
        level = max(level, point.value)
    return tuple(sorted(changes, key=lambda change: change.kind != "step"))


def runs_of(bad: Sequence[bool]) -> list[tuple[int, int]]:
    """Find where runs of own errors that are steps begin and end: three in a row, or two at the end.

    Example:
        >>> runs_of([True, False, True, True, True, False, True, True])
        [(2, 5), (6, 8)]
    """
    runs = []
    starts = [at for at, is_bad in enumerate(bad) if is_bad and not (at and bad[at - 1])]
    for start in starts:
        length = _leading(bad[start:])
        if _is_step(length, len(bad) - start):
            runs.append((start, start + length))
    return runs


def _leading(wrong: Sequence[bool]) -> int:
    """Count how many are wrong from the first on."""
    return sum(1 for _ in takewhile(bool, wrong))


def _is_step(length: int, left: int) -> bool:
    """Whether that many results that are wrong, of those that are left, are a step."""
    return length >= min(_RUN, max(2, left))
