"""Attentions that a target fuses with their projections in few bits: what makes their result, if it is wrong.

Queries, keys and values are no tensors of the target. They are made of what it is given and of its weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from tensorcap.comparison.attention_formula import (
    AttentionFormula,
    AttentionValues,
    choose_part,
    find_attention_formula,
    heads_of,
)
from tensorcap.comparison.layer_errors import LayerError
from tensorcap.comparison.layer_mistakes import LayerMistake, rounded_inputs
from tensorcap.comparison.layer_products import BIAS, floats_of
from tensorcap.comparison.policy import POLICY
from tensorcap.comparison.record_index import RecordIndex
from tensorcap.runs import Core, calls_of
from tensorcap_formats.dtypes import Array
from tensorcap_formats.records import Record

_WEIGHT: Final = "param.weight"  # slot
_TOKENS: Final = 3  # axes of what has tokens and channels
_MATRIX: Final = 2  # axes
_MOST: Final = 1 << 24  # elements of a result
_SHARE: Final = 0.25  # of the error, that what is named may leave
_BESIDES: Final = 3.0  # times what rounding of inputs makes, the same, and that an error is at least
_TIMES: Final = (2, 3, 4)  # as many heads, or as few


def fused_attentions(reference: RecordIndex, target: RecordIndex) -> Iterator[tuple[str, LayerError]]:
    """Yield key texts of wrong results of attentions whose projections are fused, with what makes them.

    Args:
        reference: The trusted archive's records.
        target: Those of the archive under test, under the reference's keys.

    Raises:
        OSError, ReadError: A tensor cannot be read.
    """
    calls = calls_of(reference.archive)
    given = {call.place[:3]: call.inputs for call in calls.calls}
    for core in calls.cores():
        result = core.results[0]
        text = result.key.text
        if len(core.sources) != 3 or len(result.shape) != _TOKENS or result.size > _MOST:
            continue
        if text not in target.archive or any(r.key.text in target.archive for r in core.sources):
            continue
        sides = floats_of(reference.archive, result), floats_of(target.archive, target.archive.get(text))
        trusted = [floats_of(reference.archive, record) for record in core.sources]
        made = [_projected(reference, target, record) for record in core.sources]
        if sides[0] is None or sides[1] is None or sides[0].shape != sides[1].shape:
            continue
        queries = [one for one in trusted if one is not None and one.ndim == _TOKENS]
        if len(queries) < len(trusted) or any(one is None for one in made):
            continue
        place = result.key.rank, result.key.step, core.attention
        mask = _mask(reference, given.get(place, ()), result.shape[1])
        module = reference.archive.info.modules.get(core.attention)
        error = _wrong(
            AttentionValues(queries, (), mask),
            [AttentionValues([one[i] for one in made if one is not None], (), mask) for i in (0, 1)],
            (sides[0], sides[1]),
            {} if module is None else module.settings,
            _noise(core),
        )
        if error is not None:
            yield text, error


def _noise(core: Core) -> float:
    return 2 * POLICY.noise(POLICY.precision(core.results[0].dtype.name))


def _projected(reference: RecordIndex, target: RecordIndex, result: Record) -> tuple[Array, Array] | None:
    """What a projection of the target makes, of inputs as they are and rounded as its module says."""
    site = result.key.site
    held = target.parameters(site)
    inputs = [r for r in reference.tensors(site) if r.key.slot.startswith("input")]
    inputs = [r for r in inputs if (r.key.rank, r.key.step, r.key.call) == _call_of(result)]
    module = target.archive.info.modules.get(site)
    if _WEIGHT not in held or len(inputs) != 1 or module is None or "input_bits" not in module.settings:
        return None
    names = [inputs[0].key.text, *(record.key.text for record in reference.holders(inputs[0]))]
    name = next((text for text in names if text in target.archive), "")
    x = floats_of(target.archive, target.archive.get(name)) if name else None
    weight = floats_of(target.archive, held[_WEIGHT])
    bias = floats_of(target.archive, held[BIAS]) if BIAS in held else None
    if x is None or weight is None or weight.ndim != _MATRIX or x.shape[-1] != weight.shape[1]:
        return None
    rows = x.reshape(-1, x.shape[-1])
    rounded = rounded_inputs(
        rows,
        module.settings["input_bits"],
        has_rows=bool(module.settings.get("input_rows")),
        is_symmetric=bool(module.settings.get("input_symmetric")),
    )
    plain, of_rounded = (
        (side @ weight.T + (0.0 if bias is None else bias)).reshape(*x.shape[:-1], -1)
        for side in (rows, rounded)
    )
    return plain, of_rounded


def _call_of(record: Record) -> tuple[int, int, int]:
    return record.key.rank, record.key.step, record.key.call


def _mask(index: RecordIndex, arguments: Sequence[Record], tokens: int) -> Array | None:
    """What the reference's attention adds to its scores."""
    for record in arguments:
        if len(record.shape) == 4 and record.shape[-1] == tokens and record.stored:
            values = index.archive.load(record)
            return np.where(values, 0.0, -np.inf) if values.dtype == np.bool_ else values.astype(np.float64)
    return None


def _wrong(
    trusted: AttentionValues,
    made: Sequence[AttentionValues],
    results: tuple[Array, Array],
    settings: Mapping[str, Any],
    allowed: float,
) -> LayerError | None:
    """The own error of an attention, if one thing that is done otherwise makes its result; else None.

    Args:
        trusted: What the reference's computes with.
        made: What the target's does, of its input as it is and rounded.
        results: Of the reference and the target.
        settings: Of the reference's module.
        allowed: Relative error of the reference's result that a formula may leave.
    """
    formula = find_attention_formula(trusted, results[0], settings, allowed)
    if formula is None:
        return None
    heads, queries = choose_part(results[1], formula.channels)

    def result_of(way: AttentionFormula, values: AttentionValues) -> Array | None:
        count = np.arange(results[1].shape[-1] // way.channels)
        whole = way(values, count if way.channels != formula.channels else heads, queries)
        return None if whole is None else whole.reshape(*whole.shape[:2], -1)

    wanted, plain = result_of(formula, made[1]), result_of(formula, made[0])
    own = heads_of(results[1], formula.channels)[:, queries][:, :, heads]
    own = own.reshape(*own.shape[:2], -1)
    if wanted is None or plain is None:
        return None
    size = max(float(np.linalg.norm(wanted)), 1e-300)
    error, rounding = (float(np.linalg.norm(side - wanted)) / size for side in (own, plain))
    if error <= _BESIDES * rounding:
        return None
    found: list[tuple[float, str, str]] = []
    for kind, text, way in _other_ways(formula, results[1].shape[-1]):
        other = result_of(way, made[1])
        if other is not None and other.shape == own.shape:
            found.append((float(np.linalg.norm(own - other)) / size, kind, text))
    left, kind, text = min(found, default=(np.inf, "", ""))
    if left > min(_SHARE * error, _BESIDES * rounding):
        return None
    return LayerError(error, rounding, 0.0, "few bits", LayerMistake(text, kind, left))


def _other_ways(formula: AttentionFormula, width: int) -> Iterator[tuple[str, str, AttentionFormula]]:
    """Yield what an attention may do otherwise: kind, text, and the formula."""
    channels, heads = formula.channels, width // formula.channels
    if formula.mask == "given":
        yield "attention-mask", "it does not look at the mask", replace(formula, mask="none")
    if formula.mask != "causal":
        yield "attention-mask", "it is causal", replace(formula, mask="causal")
    else:
        yield "attention-mask", "it is not causal", replace(formula, mask="none")
    yield "attention-scale", "its scores are not scaled", replace(formula, scale=1.0)
    yield "attention-scale", "its scores are scaled twice", replace(formula, scale=formula.scale**2)
    for count in (*(heads * n for n in _TIMES), *(heads // n for n in _TIMES if heads % n == 0)):
        if width % count:
            continue
        own = width // count
        for scale in dict.fromkeys((formula.scale * (channels / own) ** 0.5, formula.scale)):
            text = f"it has {count} heads, the reference {heads}"
            yield "attention-layout", text, replace(formula, channels=own, scale=scale)
