"""Propose matrix products of inputs and weights: whose weight, which way round, summed in which precision."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from tensorcap.diagnosis.context import PairContext, values_of
from tensorcap.diagnosis.hypothesis import Hypothesis, inherited_error
from tensorcap.diagnosis.ranks import find_weight_mistake
from tensorcap.diagnosis.values import Values, evenly_spaced, relative_error
from tensorcap.wording import name_pattern
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import decode
from tensorcap_formats.float_formats import UNIT_ROUNDOFFS, rounded
from tensorcap_formats.keys import module_of
from tensorcap_formats.records import Record

_ROWS: Final = 256  # rows and channels at which a product is worked out
_CHANNELS: Final = 256
_LARGEST: Final = 1 << 24  # elements of a weight that is read as a whole
_OTHER_WEIGHTS: Final = 4  # that are tried
_NEIGHBOURS: Final = 64  # other weights of which the nearest are tried
_FEW_CHANNELS: Final = 4  # that show which these are
_ROUNDINGS: Final = 8  # that a product may leave of the reference
_ORDER_OF_SUMS: Final = 1e-5  # that the order of sums in float32 may leave
_PARTS: Final = (2, 4, 8, 16, 32, 64)  # counts of sums that a kernel splits the inputs into
_RUNS: Final = (8, 16, 32, 64, 128, 256)  # inputs that kernels sum at once, whether or not they divide all
_NARROW: Final = ("bfloat16", "float16")
_OPERANDS: Final = {"bfloat16": "bfloat16", "tf32": "ten bits, as of TF32 and float16,"}
_MOST_PARTS: Final = 256  # to sum one by one


def propose_products(context: PairContext) -> Iterator[Hypothesis]:
    """Propose another product on the target's own input, at some rows and channels.

    1. The module has one input, and the reference is the product of that and its weight, plus its bias.
    2. The target may be right for its input, be summed in parts in low precision or of rounded operands, or
       be right for its own weight, for the transposed weight, or for another weight of the same shape: one
       of those that at a few channels are nearest to it.
    """
    if not context.is_same_shape or context.r.ndim < 2:
        return
    width = context.r.shape[-1]
    inputs = [(x, y) for _, x, y in context.inputs if x.shape[:-1] == context.r.shape[:-1]]
    if len(inputs) != 1:
        return
    ours, theirs = (side.reshape(-1, side.shape[-1]) for side in inputs[0])
    rows, picked = evenly_spaced(len(ours), _ROWS), evenly_spaced(width, _CHANNELS)
    x, own = ours[rows], theirs[rows]
    r, t = (side.reshape(-1, width)[rows][:, picked] for side in (context.r, context.t))
    bias, own_bias = context.read_parameters().get("bias", (None, None))
    shift = 0.0 if bias is None or bias.shape != (width,) else bias[picked]
    own_shift = shift if own_bias is None or own_bias.shape != (width,) else own_bias[picked]
    weight = _find_weight(context.reference_archive, context.reference, width, x.shape[1])
    if weight is None:
        return
    matrix = _read_rows(context.reference_archive, weight, picked)
    allowed = context.tolerance(_ROUNDINGS, _ORDER_OF_SUMS)
    if relative_error(r, x @ matrix.T + shift) > allowed:
        return
    expected = own @ matrix.T + shift
    yield inherited_error(t, expected, r)
    yield from _propose_low_sums(own, matrix, own_shift, t, expected, context)
    if not context.is_narrow:
        yield from _propose_low_operands(own, matrix, own_shift, t, expected)
    others = _find_other_weights(context, weight, own, t - own_shift, picked)
    own_weight = _find_weight(context.target_archive, context.target, width, x.shape[1])
    if own_weight is not None:
        other = _read_rows(context.target_archive, own_weight, picked)
        if not np.array_equal(other, matrix):
            held = next((key for key, values in others.items() if _is_rounded(values, other, own_weight)), "")
            kind, which = "other-weights", f"the reference's {held}" if held else "not that of the reference"
            text = f"the target is right for its own weight, which is {which}"
            hint = "Weights differ: a tie of embedding and head is lost, or a checkpoint is loaded wrongly."
            mistake = find_weight_mistake(context, weight, own_weight)
            if mistake is not None:
                kind, hint = mistake.kind, mistake.hint
                text = f"the target is right for its own weight, of which {mistake.text}"
            yield Hypothesis(kind, text, t, own @ other.T + own_shift, expected, hint=hint)
    if weight.shape == (width, width) and weight.size <= _LARGEST:
        turned = values_of(context.reference_archive, weight).T[picked]
        text = "the target multiplies by the transposed weight"
        hint = "A square weight is transposed: convolutions of GPT-2 and linear layers lie the other way."
        yield Hypothesis("weight-transposed", text, t, own @ turned.T + own_shift, expected, hint=hint)
    for key, other in others.items():
        if not np.array_equal(other, matrix):
            yield Hypothesis(
                "other-weights",
                f"the target multiplies by {key}",
                t,
                own @ other.T + own_shift,
                expected,
                hint="Weights of another module are used: ties of embedding and head, or an index of layers.",
                facts={"key": key},
            )


def _propose_low_sums(
    x: Values, matrix: Values, shift: Values | float, t: Values, expected: Values, context: PairContext
) -> Iterator[Hypothesis]:
    """Propose sums over runs of the inputs, each rounded, and added up with a rounding each time.

    Runs are equal parts of the inputs, or of a usual length, the last one shorter. They are summed in the
    target's dtype if that is narrow, else in any that is.
    """
    width = x.shape[1]
    equal = [width // c for c in (*_PARTS, width) if c <= min(width, _MOST_PARTS) and width % c == 0]
    runs = [*equal, *(run for run in _RUNS if run < width and math.ceil(width / run) <= _MOST_PARTS)]
    dtypes = (context.target.dtype.name,) if context.is_narrow else _NARROW
    for run, dtype in itertools.product(dict.fromkeys(runs), dtypes):
        starts = np.arange(run, width, run)
        total = np.zeros_like(t)
        for xs, weights in zip(np.split(x, starts, axis=1), np.split(matrix, starts, axis=1), strict=True):
            total = rounded(total + rounded(xs @ weights.T, dtype), dtype)
        yield Hypothesis(
            "sum-precision",
            f"sums over {run} of {width} inputs each are added up in {dtype}",
            t,
            rounded(total + shift, dtype) if context.is_narrow else total + shift,
            expected,
            log_alternatives=math.log(len(dtypes) * (len(_PARTS) + len(_RUNS) + 1)),
            hint="Products are accumulated in low precision.",
            facts={"parts": len(starts) + 1} if width % run == 0 else {"run": run},
        )


def _propose_low_operands(
    x: Values, matrix: Values, shift: Values | float, t: Values, expected: Values
) -> Iterator[Hypothesis]:
    """Propose that a product in float32 is one of inputs and weights that are rounded, or of one of them."""
    for dtype, name in _OPERANDS.items():
        low_x, low_matrix = rounded(x, dtype), rounded(matrix, dtype)
        operands = {
            "inputs and weights": (low_x, low_matrix),
            "inputs": (low_x, matrix),
            "weights": (x, low_matrix),
        }
        for what, (inputs, weights) in operands.items():
            for is_result_low in (False, True):
                result = inputs @ weights.T + shift
                yield Hypothesis(
                    "operand-precision",
                    f"{what} are rounded to {name} before the product" + ", and so is it" * is_result_low,
                    t,
                    rounded(result, dtype) if is_result_low else result,
                    expected,
                    log_alternatives=math.log(2 * len(operands) * len(_OPERANDS)),
                    hint="A product in float32 is computed in low precision: a cast, autocast, or TF32.",
                    facts={"dtype": dtype, "operands": what},
                )


def _find_weight(archive: Archive, record: Record, width: int, inputs: int) -> Record | None:
    """Find the weight of a record's module; that of the embedding if the module has none of its own."""
    site = module_of(record.key.site)
    weights = [r for r in archive.records if r.key.slot in ("param.weight", "buffer.weight") and r.stored]
    own = [r for r in weights if module_of(r.key.site) == site and r.shape == (width, inputs)]
    tied = [r for r in weights if "emb" in r.key.site and r.shape == (width, inputs)]
    return next(iter([*own, *tied]), None)


def _find_other_weights(
    context: PairContext, weight: Record, x: Values, t: Values, picked: Values
) -> dict[str, Values]:
    """Find other weights of the same shape by which a product is nearest to the target's.

    Args:
        context: The reference's archive.
        weight: Its own weight.
        x: Inputs of some rows.
        t: The target's product at these rows and some channels.
        picked: The numbers of these channels.

    Returns:
        Their rows at these channels, by key text, the nearest first.
    """
    archive, own = context.reference_archive, weight.key.site
    fitting = [
        r
        for r in archive.records
        if r.shape == weight.shape and r.row != weight.row and r.key.slot == "param.weight" and r.stored
    ]
    around, pattern = f"{own.rpartition('.')[0]}.", name_pattern(own)

    def apart(record: Record) -> tuple[bool, bool, int]:
        site = record.key.site
        return not site.startswith(around), name_pattern(site) != pattern, abs(record.row - weight.row)

    few = evenly_spaced(len(picked), _FEW_CHANNELS)

    def error(record: Record) -> float:
        made = x @ _read_rows(archive, record, picked[few]).T
        return float(np.nan_to_num(relative_error(t[:, few], made), nan=math.inf))

    nearest = sorted(sorted(fitting, key=apart)[:_NEIGHBOURS], key=error)
    return {r.key.text: _read_rows(archive, r, picked) for r in nearest[:_OTHER_WEIGHTS]}


def _is_rounded(values: Values, other: Values, record: Record) -> bool:
    """Whether some values are those of another tensor, as far as the dtype of a record holds them."""
    return relative_error(values, other) <= UNIT_ROUNDOFFS.get(record.dtype.name, 0.0)


def _read_rows(archive: Archive, weight: Record, picked: Values) -> Values:
    if weight.size <= _LARGEST // 4 and len(picked) > _FEW_CHANNELS:
        return values_of(archive, weight)[picked]
    each = weight.shape[1]
    return np.stack(
        [decode(archive.read_range(weight, i * each, (i + 1) * each), weight.dtype) for i in picked.tolist()]
    ).astype(np.float64)
