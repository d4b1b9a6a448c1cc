"""How far one set of logits lies from another, as distributions over the vocabulary; row by row.

Definitions are normative in `specs/logits.md`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tensorcap.metrics.value_blocks import read_value_blocks, require_rows, unravel
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import UsageError
from tensorcap_formats.float_formats import UNIT_ROUNDOFFS
from tensorcap_formats.keys import Key
from tensorcap_formats.records import Record

KS: Final = (1, 5, 10)
_TIE: Final = 4.0  # roundings: choices of a flip that both sides have closer than this are a tie (LOG-7)
_BLOCK: Final = 1 << 18  # values of either side at a time; a row of logits is seldom longer


@dataclass(frozen=True, slots=True)
class LogitDifference:
    """Two tensors of logits compared, a row being one distribution. None stands for undefined.

    Attributes:
        rows: Distributions on each side.
        undefined_rows: Rows with a NaN or +inf on a side, or nothing but -inf; they count nowhere else.
        vocabulary: Logits of a row that are compared.
        kl_mean: Mean over rows of KL(reference || target), in nats.
        kl_max: The largest.
        kl_max_row: Where it is, one number for each leading axis.
        js_mean: Mean Jensen-Shannon divergence, in nats, at most ln 2.
        js_max: The largest.
        top1: Mean agreement of the first choice, 0 to 1.
        top5: Mean agreement of the first five choices.
        top10: Mean agreement of the first ten choices.
        flips: Rows whose first choices differ.
        ties: Rows of these in which both choices are equal on both sides to within rounding.
        first_flip_row: The first row whose flip is no tie.
        flip_margin: The largest margin, in logits, by which the reference preferred its own choice in a flip.
        rank_mean: Mean place of the reference's first choice in the target, 1 being the first.
        rank_max: The largest such place.
    """

    rows: int
    undefined_rows: int
    vocabulary: int
    kl_mean: float | None
    kl_max: float | None
    kl_max_row: tuple[int, ...] | None
    js_mean: float | None
    js_max: float | None
    top1: float | None
    top5: float | None
    top10: float | None
    flips: int
    ties: int
    first_flip_row: tuple[int, ...] | None
    flip_margin: float | None
    rank_mean: float | None
    rank_max: int | None


def are_logits(key: Key) -> bool:
    """Whether a key says that its tensor holds logits.

    Example:
        >>> are_logits(Key("@root", "output.logits")), are_logits(Key("model.norm", "output"))
        (True, False)
    """
    slot = key.slot or key.site
    kind = slot.partition(".")[0]
    if kind in ("input", "param", "buffer") or kind.startswith("grad_"):
        return False
    return "logits" in slot.split(".") or key.site.rpartition(".")[2] == "lm_head"


def shared_vocabulary(reference: Archive, target: Archive) -> int | None:
    """The smaller of the vocabularies that the configurations name: what is behind it is padding (LOG-8)."""
    sizes = [archive.info.config.get("vocab_size") for archive in (reference, target)]
    return min((size for size in sizes if isinstance(size, int) and size > 0), default=None)


def logit_metrics(
    reference: Archive,
    reference_record: Record,
    target: Archive,
    target_record: Record,
    *,
    vocabulary: int | None = None,
    compute_dtype: str | None = None,
) -> LogitDifference:
    """Compare stored logits, the last axis being the vocabulary, in bounded memory.

    Args:
        reference: Holds the trusted logits.
        reference_record: The trusted logits, at least one axis.
        target: Holds the logits under test.
        target_record: The logits under test, the same shape.
        vocabulary: Logits of a row that count; the padding behind them is left out. All if None.
        compute_dtype: Precision of the target's run, which says what a tie is; the record's if None.

    Raises:
        UsageError: The shapes differ, there is no axis, or the values are complex.
        ReadError: One side cannot be read.
    """
    shape = require_rows(reference_record, target_record)
    key = reference_record.key.text
    if "complex" in (reference_record.dtype.kind, target_record.dtype.kind):
        raise UsageError(f"{key}: is complex, expected real logits")
    columns = shape[-1]
    used = min(columns, vocabulary or columns)
    precision = (
        compute_dtype if compute_dtype and compute_dtype in UNIT_ROUNDOFFS else target_record.dtype.name
    )
    totals = _Totals(used, UNIT_ROUNDOFFS.get(precision, 0.0))
    # A row is compared as a whole, so one that is longer than a block is read whole
    sides = read_value_blocks(
        (reference, reference_record), (target, target_record), columns, max(_BLOCK, columns)
    )
    for _, ours, theirs in sides:
        rows = zip(ours.reshape(-1, columns), theirs.reshape(-1, columns), strict=True)
        for one, other in rows:
            totals.add(one[:used].astype(np.float64), other[:used].astype(np.float64))
    return totals.result(shape[:-1])


@dataclass
class _Totals:
    vocabulary: int
    rounding: float
    rows: int = 0
    undefined: int = 0
    kl_sum: float = 0.0
    kl_max: float = -1.0
    kl_at: int = 0
    js_sum: float = 0.0
    js_max: float = 0.0
    flips: int = 0
    ties: int = 0
    first_flip: int | None = None
    margin: float = 0.0
    rank_sum: int = 0
    rank_max: int = 0
    agreement: dict[int, float] = field(default_factory=lambda: dict.fromkeys(KS, 0.0))

    def add(self, ours: Array, theirs: Array) -> None:
        """Count one row in; the arrays may be written to."""
        row = self.rows
        self.rows += 1
        tops = [float(side.max(initial=-math.inf)) for side in (ours, theirs)]
        if not all(math.isfinite(top) for top in tops):  # a NaN is the maximum of its row
            self.undefined += 1
            return
        self._add_choices(row, ours, theirs)
        kl, js = divergences(ours, theirs)
        self.kl_sum += kl
        self.js_sum += js
        self.js_max = max(self.js_max, js)
        if kl > self.kl_max:
            self.kl_max, self.kl_at = kl, row

    def _add_choices(self, row: int, ours: Array, theirs: Array) -> None:
        for k in KS:
            self.agreement[k] += agreement(ours, theirs, k)
        i, j = int(ours.argmax()), int(theirs.argmax())
        rank = 1 + int(np.count_nonzero(theirs > theirs[i]))
        self.rank_sum += rank
        self.rank_max = max(self.rank_max, rank)
        if agreement(ours, theirs, 1):
            return
        self.flips += 1
        gaps = float(ours[i] - ours[j]), float(theirs[j] - theirs[i])
        self.margin = max(self.margin, gaps[0])
        noise = self.rounding * max(abs(float(ours[i])), abs(float(theirs[j])))
        if max(gaps) <= _TIE * noise:
            self.ties += 1
        elif self.first_flip is None:
            self.first_flip = row

    def result(self, leading: tuple[int, ...]) -> LogitDifference:
        n = self.rows - self.undefined
        return LogitDifference(
            rows=self.rows,
            undefined_rows=self.undefined,
            vocabulary=self.vocabulary,
            kl_mean=self.kl_sum / n if n else None,
            kl_max=self.kl_max if n else None,
            kl_max_row=unravel(self.kl_at, leading) if n else None,
            js_mean=self.js_sum / n if n else None,
            js_max=self.js_max if n else None,
            top1=self.agreement[1] / n if n else None,
            top5=self.agreement[5] / n if n else None,
            top10=self.agreement[10] / n if n else None,
            flips=self.flips,
            ties=self.ties,
            first_flip_row=unravel(self.first_flip, leading),
            flip_margin=self.margin if self.flips else None,
            rank_mean=self.rank_sum / n if n else None,
            rank_max=self.rank_max if n else None,
        )


def divergences(reference: Array, target: Array) -> tuple[float, float]:
    """Compute KL(reference || target) and Jensen-Shannon of two rows of logits, in nats (LOG-3, LOG-4).

    Args:
        reference: [V] float64, finite or -inf, not all of them -inf.
        target: Likewise.

    Example:
        >>> [round(value, 6) for value in divergences(np.log([0.5, 0.5]), np.log([0.25, 0.75]))]
        [0.143841, 0.033822]
    """
    ours, theirs = reference - reference.max(), target - target.max()
    p, q = np.exp(ours), np.exp(theirs)
    p_sum, q_sum = float(p.sum()), float(q.sum())
    p /= p_sum
    q /= q_sum
    ours -= math.log(p_sum)  # now log-probabilities
    theirs -= math.log(q_sum)
    kl = math.inf if (theirs[p > 0] == -np.inf).any() else max(0.0, _weighted(p, ours, theirs))
    middle = p + q
    middle *= 0.5
    possible = middle > 0
    with np.errstate(divide="ignore"):
        half = np.log(middle[possible])
    # log p is exact from the logits even if p itself is subnormal; 0 log 0 is 0
    js = 0.5 * sum(_weighted(x[possible], log[possible], half) for x, log in ((p, ours), (q, theirs)))
    return kl, min(max(0.0, js), math.log(2))


def _weighted(p: Array, log_p: Array, log_m: Array) -> float:
    """Compute the sum of `p * (log p - log m)`, in which 0 log 0 is 0."""
    possible = p > 0
    return float(np.sum(p[possible] * (log_p[possible] - log_m[possible])))


def agreement(ours: Array, theirs: Array, k: int) -> float:
    """Return the part of the first `k` that both sides share; ties at the boundary count in favour (LOG-6).

    Example:
        >>> agreement(np.array([3.0, 2.0, 1.0]), np.array([3.0, 1.0, 2.0]), 2)
        0.5
        >>> agreement(np.array([2.0, 2.0, 1.0]), np.array([1.0, 2.0, 0.0]), 1)
        1.0
    """
    k = min(k, ours.size)
    above, at, theirs_above, theirs_at = (*_first(ours, k), *_first(theirs, k))
    both = np.count_nonzero
    free = k - int(both(above)), k - int(both(theirs_above))
    from_ties = (
        min(free[0], int(both(at & theirs_above))),
        min(free[1], int(both(above & theirs_at))),
    )
    shared = min(int(both(at & theirs_at)), free[0] - from_ties[0], free[1] - from_ties[1])
    return (int(both(above & theirs_above)) + sum(from_ties) + shared) / k


def _first(values: Array, k: int) -> tuple[Array, Array]:
    """Return which values are above the k-th largest, and which equal it."""
    least = np.partition(values, values.size - k)[values.size - k] if k > 1 else values.max()
    return values > least, values == least
