"""The logits of one position on three sides: R, cosine, KL divergence, first choices; and their quantiles.

All in float64. A position is *undefined* if the target's logits are not finite where the source's are, or the
reverse; no number stands for it, and in every quantile it is worse than any number.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tensorcap.comparison.baseline import RELATIVE_EPSILON, ratio_of
from tensorcap.metrics import agreement, divergences
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import CaptureError, UsageError

_SOURCE: Final = "source"
_TWIN: Final = "source in the target's precision"
_MOST_ERRORS: Final = 128  # positions: pairs of them are thousands, and their memory stays small
_EPSILONS: Final = {"float32": RELATIVE_EPSILON, "float64": 1e-15}  # below, a source's twin is exact


@dataclass(frozen=True, slots=True)
class RowMetrics:
    """The target's logits at one position against the source's. None stands for undefined.

    Attributes:
        r_ratio: `||t - s|| / ||w - s||`, w being the source in the target's precision; infinite if that is
            exact and the target is not. None too if there is no w.
        relative_l2: `||t - s|| / ||s||`, no unit.
        cosine: Of the angle between t and s, no unit.
        kl: KL(softmax s || softmax t), nats.
        top1: Agreement of the first choice, 0 or 1 but for ties.
        top5: Share of the first five choices that agree.
        top10: Of the first ten.
        margin: By how much the source prefers its first choice to its second, in logits.
        error: Root mean square of t - s, in logits.
    """

    r_ratio: float | None
    relative_l2: float | None
    cosine: float | None
    kl: float | None
    top1: float | None
    top5: float | None
    top10: float | None
    margin: float
    error: float | None

    @property
    def is_defined(self) -> bool:
        """Whether the target's logits are numbers."""
        return self.cosine is not None


def compare_rows(source: Array, twin: Array | None, target: Array, *, where: str) -> RowMetrics:
    """Compare the logits of one position.

    A logit of -inf is a token that the source rules out: the others have to as well, and it is left out.

    Args:
        source: [V] float32 or float64, of the trusted model in the wide precision.
        twin: [V] of the trusted model in the target's precision; None without R.
        target: [V] under test.
        where: The position, for an error.

    Raises:
        CaptureError: The source's or the twin's logits cannot be judged by.
    """
    is_out = np.isneginf(source)
    trusted = ((_SOURCE, source), *(() if twin is None else ((_TWIN, twin),)))
    for name, side in trusted:
        if is_out.all() or not _is_finite_but(side, is_out):
            raise CaptureError(
                f"{where}: the {name} gives logits that are not finite: nothing is judged by them"
            )
    s, *twins = (side[~is_out].astype(np.float64) for _, side in trusted)
    t = target[~is_out].astype(np.float64)
    norm = float(np.linalg.norm(s))
    if not norm:
        raise CaptureError(
            f"{where}: the {_SOURCE} gives logits that are all zero: nothing is judged by them"
        )
    first = np.partition(s, -2)[-2:] if s.size > 1 else np.array([s[0], s[0]])
    margin = float(first[1] - first[0])
    if not _is_finite_but(target, is_out) or not (size := float(np.linalg.norm(t))):
        return RowMetrics(None, None, None, None, None, None, None, margin, None)
    error = float(np.linalg.norm(t - s))
    r_ratio, epsilon = None, _EPSILONS[source.dtype.name]
    if twins:
        r_ratio = ratio_of(error / norm, float(np.linalg.norm(twins[0] - s)) / norm, epsilon).r
    cosine = 1.0 if not error else float(np.clip(np.dot(s, t) / norm / size, -1.0, 1.0))
    return RowMetrics(
        r_ratio,
        error / norm,
        cosine,
        divergences(s, t)[0],
        agreement(s, t, 1),
        agreement(s, t, 5),
        agreement(s, t, 10),
        margin,
        error / math.sqrt(s.size),
    )


def _is_finite_but(values: Array, is_out: Array) -> bool:
    """Whether values are finite, but for those that are to be -inf and are."""
    return bool(np.where(is_out, np.isneginf(values), np.isfinite(values)).all())


def error_directions(errors: Array) -> float:
    """In how many directions errors point: `1 / mean cos^2` over pairs of positions, no unit.

    Of normal errors with covariance C this is `tr(C)^2 / tr(C^2)`, the participation ratio of its
    eigenvalues: n if n of them are equal.

    Args:
        errors: [positions, V]; values that are not finite count as none.

    Returns:
        Infinite if there are fewer than two errors.
    """
    step = -(-len(errors) // _MOST_ERRORS)
    rows = np.nan_to_num(errors[::step].astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    norms = np.linalg.norm(rows, axis=1)
    rows = rows[norms > 0] / norms[norms > 0, None]
    count = len(rows)
    if count < 2:
        return math.inf
    squares = float(np.square(rows @ rows.T).sum()) - count
    return count * (count - 1) / squares if squares > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Spread:
    """A metric over positions; None where an undefined position leaves no number.

    Attributes:
        mean: Of all.
        worst: The largest, or the least of what is better if larger.
        tail: Its 95th percentile, or the 5th of what is better if larger.
        median: Its median.
        best_tail: The percentile on the other side of the median.
    """

    mean: float | None
    worst: float | None
    tail: float | None
    median: float | None
    best_tail: float | None


def spread(values: Sequence[float | None], *, is_better_if_higher: bool = False) -> Spread:
    """Summarise a metric over positions.

    Percentiles are interpolated linearly between order statistics, as numpy's are (Hyndman and Fan 1996, 7).

    Args:
        values: Of each position, at least one; None is worse than any number.
        is_better_if_higher: Whether more is better.

    Example:
        >>> spread([1.0, 2.0, 3.0]).tail, spread([1.0, None, 3.0]).tail
        (2.9, None)
        >>> spread([1.0] * 99 + [None]).tail, spread([1.0] * 99 + [None]).worst
        (1.0, None)
    """
    sign = -1.0 if is_better_if_higher else 1.0
    numbers = sorted(sign * value for value in values if value is not None)
    is_whole = len(numbers) == len(values)
    tails = (_percentile(numbers, share, len(values)) for share in (0.95, 0.5, 0.05))
    return Spread(
        sign * math.fsum(numbers) / len(numbers) if is_whole else None,
        sign * numbers[-1] if is_whole else None,
        *(None if tail is None else sign * tail for tail in tails),
    )


def _percentile(numbers: Sequence[float], share: float, count: int) -> float | None:
    """The quantile of `count` values in ascending order, of which those behind `numbers` are undefined."""
    place = share * (count - 1)
    below = math.floor(place)
    part = place - below
    if below + (part > 0) >= len(numbers):
        return None
    if not part or numbers[below] == numbers[below + 1]:
        return numbers[below]
    return numbers[below] + part * (numbers[below + 1] - numbers[below])


@dataclass(frozen=True, slots=True)
class Columns:
    """Which logits of a row are compared.

    Attributes:
        count: How many, from the first on.
        remark: What was cut and by which rule, as a sentence; "" if nothing was.
    """

    count: int
    remark: str = ""


def shared_columns(widths: dict[str, int], vocabularies: Collection[int]) -> Columns:
    """Decide which logits of a row are compared, if sides have unlike numbers of them, or padding (LOG-8).

    Args:
        widths: Logits of a row by side.
        vocabularies: The sizes of the vocabulary that configurations name.

    Raises:
        UsageError: The numbers differ, and no configuration says which logits are padding.

    Example:
        >>> shared_columns({"source": 256, "target": 320}, [256]).count
        256
    """
    narrowest = min(widths.values())
    known = min(vocabularies, default=None)
    listed = ", ".join(f"{side} {width}" for side, width in widths.items())
    if len(set(widths.values())) > 1 and (known is None or known > narrowest):
        named = "no configuration names" if known is None else f"a configuration names {known} as"
        raise UsageError(
            f"logits of unlike numbers ({listed}), and {named} the size of the vocabulary",
            hint="Return the logits without padding, or of a model whose config has vocab_size.",
        )
    if known is None or known >= max(widths.values()):
        return Columns(narrowest)
    return Columns(
        known,
        f"Logits from {known} on are padding, as a configuration's vocab_size says, and left out ({listed}).",
    )
