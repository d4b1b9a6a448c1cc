"""Matrix products worked out from inputs and weights: whose weights, and which way round."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from tensorcap.diagnosis.context import PairContext, values_of
from tensorcap.diagnosis.scoring import Hypothesis, Scorer, Values, inherited, relative_error
from tensorcap_formats.archive import Archive
from tensorcap_formats.float_formats import rounded
from tensorcap_formats.keys import module_of
from tensorcap_formats.records import Record

_ROWS: Final = 256
_CHANNELS: Final = 256
_LARGEST: Final = 1 << 24  # elements of a weight that is read as a whole
_TABLES: Final = 4
_NARROW: Final = ("bfloat16", "float16")
_PARTS: Final = (2, 4, 8, 16, 32, 64)
_MOST_PARTS: Final = 256


def products(exhibit: PairContext, scales: Scorer) -> Iterator[Hypothesis]:
    """A linear module by its weight or another one, on the target's own input."""
    if not exhibit.is_same_shape or exhibit.r.ndim < 2:
        return
    width = exhibit.r.shape[-1]
    given = [(x, y) for _, x, y in exhibit.inputs if x.shape[:-1] == exhibit.r.shape[:-1]]
    if len(given) != 1:
        return
    ours, theirs = (side.reshape(-1, side.shape[-1]) for side in given[0])
    rows = np.linspace(0, len(ours) - 1, min(len(ours), _ROWS)).astype(np.int64)
    picked = np.linspace(0, width - 1, min(width, _CHANNELS)).astype(np.int64)
    x, own = ours[rows], theirs[rows]
    r, t = (side.reshape(-1, width)[rows][:, picked] for side in (exhibit.r, exhibit.t))
    bias, own_bias = exhibit.parameters().get("bias", (None, None))
    shift = 0.0 if bias is None or bias.shape != (width,) else bias[picked]
    own_shift = shift if own_bias is None or own_bias.shape != (width,) else own_bias[picked]
    weight = _weight(exhibit.ours, exhibit.reference, width, x.shape[1])
    if weight is None:
        return
    matrix = _rows_of(exhibit.ours, weight, picked, width)
    allowed = max(8 * scales.rounding, 1e-5)
    if matrix is None or relative_error(r, x @ matrix.T + shift) > allowed:
        return
    usual = own @ matrix.T + shift
    yield inherited(t, usual, r)
    if exhibit.target.dtype.name in _NARROW:
        yield from _accumulated(own, matrix, own_shift, t, usual, exhibit.target.dtype.name)
    own_weight = _weight(exhibit.theirs, exhibit.target, width, x.shape[1])
    if own_weight is not None:
        other = _rows_of(exhibit.theirs, own_weight, picked, width)
        if other is not None and not np.array_equal(other, matrix):
            text = "the target is right for its own weight, which is not that of the reference"
            hint = "Weights differ: a tie of embedding and head is lost, or a checkpoint is loaded wrongly."
            yield Hypothesis("other-weights", text, t, own @ other.T + own_shift, usual, 0, 0, hint)
    if weight.shape == (width, width) and weight.size <= _LARGEST:
        turned = values_of(exhibit.ours, weight).T[picked]
        text = "the target multiplies by the transposed weight"
        hint = "A square weight is transposed: convolutions of GPT-2 and linear layers lie the other way."
        yield Hypothesis("weight-transposed", text, t, own @ turned.T + own_shift, usual, 0, 0, hint)
    for record in _tables(exhibit, weight):
        other = _rows_of(exhibit.ours, record, picked, width)
        if other is not None and not np.array_equal(other, matrix):
            text = f"the target multiplies by {record.key.text}"
            hint = "Weights of another module are used: ties of embedding and head, or an index of layers."
            facts = {"key": record.key.text}
            yield Hypothesis("other-weights", text, t, own @ other.T + own_shift, usual, 0, 0, hint, facts)


def _accumulated(
    x: Values, matrix: Values, shift: Values | float, t: Values, usual: Values, dtype: str
) -> Iterator[Hypothesis]:
    """Sums over parts of the inputs, each rounded, added up one after the other and rounded each time."""
    width = x.shape[1]
    counts = [c for c in (*_PARTS, width) if c <= min(width, _MOST_PARTS) and width % c == 0]
    for count in dict.fromkeys(counts):
        total = np.zeros_like(t)
        for xs, weights in zip(np.split(x, count, axis=1), np.split(matrix, count, axis=1), strict=True):
            total = rounded(total + rounded(xs @ weights.T, dtype), dtype)
        each = width // count
        text = f"sums over {each} of {width} inputs each are added up in {dtype}"
        hint = "Products are accumulated in low precision."
        logs, facts = math.log(len(_PARTS) + 1), {"parts": count}
        yield Hypothesis("sum-precision", text, t, rounded(total + shift, dtype), usual, 0, logs, hint, facts)


def _weight(archive: Archive, record: Record, width: int, inputs: int) -> Record | None:
    """The weight of a record's module; that of the embedding where the module has none of its own."""
    site = module_of(record.key.site)
    weights = [r for r in archive.records if r.key.slot in ("param.weight", "buffer.weight") and r.stored]
    own = [r for r in weights if module_of(r.key.site) == site and r.shape == (width, inputs)]
    tied = [r for r in weights if "emb" in r.key.site and r.shape == (width, inputs)]
    return (own or tied or [None])[0]  # type: ignore[list-item] # for want of a weight


def _tables(exhibit: PairContext, weight: Record) -> list[Record]:
    """Other weights of the same shape, the nearest by name first."""
    fitting = [
        r
        for r in exhibit.ours.records
        if r.shape == weight.shape and r.row != weight.row and r.key.slot == "param.weight" and r.stored
    ]
    site = weight.key.site.rpartition(".")[0]
    return sorted(fitting, key=lambda r: (not r.key.site.startswith(site), r.row))[:_TABLES]


def _rows_of(archive: Archive, weight: Record, picked: Values, width: int) -> Values | None:
    if weight.size <= _LARGEST // 4:
        return values_of(archive, weight)[picked]
    from tensorcap_formats.dtypes import decode

    each = weight.shape[1]
    return np.stack(
        [decode(archive.read_range(weight, i * each, (i + 1) * each), weight.dtype) for i in picked.tolist()]
    ).astype(np.float64)
