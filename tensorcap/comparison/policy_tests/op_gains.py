"""What does an op add to the error of its inputs, by the data-flow graph of the reference? See POL-26.

Formula and limits are those of `attention_gain` in `gains`; the error of a sum's input counts in proportion
to its size, since what cancels makes a relative error larger. An op of unknown kind, or one whose inputs are
not all known, is not tested.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from tensorcap.comparison.pair import Finding, Pair
from tensorcap.comparison.policy_tests.context import Context, Gain, MeasuredPair, PolicyTest
from tensorcap.comparison.policy_tests.gains import RobustVerdict, judge_gain, judge_tail, least_elements
from tensorcap.runs import rms_of
from tensorcap_formats.keys import module_of

# Ops that hand the relative error of a tensor on as it is, or less, or a few times as large
# fmt: off
_PLAIN: Final = frozenset((
    "mm", "bmm", "addmm", "baddbmm", "linear", "matmul", "convolution", "_grouped_mm",
    "mul", "div", "reciprocal", "sqrt", "rsqrt", "pow", "neg",
    "silu", "gelu", "relu", "tanh", "sigmoid",
    "clone", "_unsafe_view", "_to_copy",
    "native_layer_norm", "native_group_norm", "rms_norm", "_fused_rms_norm",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math", "scaled_dot_product_attention",
))
# fmt: on
_PRODUCTS: Final = frozenset(("mm", "bmm", "matmul"))
# Errors add up as they are, not in proportion
_SUMS: Final = frozenset(("add", "sub", "rsub", "cat", "stack"))
_CENTRED: Final = frozenset(("native_layer_norm", "native_group_norm"))
_MEANS: Final = "output.1"  # of a norm that takes them away
_CANCEL: Final = _SUMS | {"sum", "mean"}
_SENTINEL: Final = -1e4  # and less: a mask that was added, so that norms say nothing
_FIRST: Final = ("output", "output.0")  # what else an op gives out are statistics and sums


class OpGainTest(PolicyTest):
    """Tests `attention_gain` of ops."""

    names = ("attention_gain",)
    is_local = True
    is_evidence = True

    def judge(self, context: Context) -> Iterator[tuple[str, Finding]]:
        """Judge the first result of every op of a known kind, in the order of the pairs."""
        for pair in context.pairs.values():
            gain = _gain_of_op(context, pair) if isinstance(pair, MeasuredPair) else None
            if gain is not None:
                context.gain_log.gains.append(gain)
                yield pair.key, gain.finding


def cancellation_scale(context: Context, pair: Pair) -> float:
    """Return what makes the relative error of a sum or mean one of its inputs, at most 1 (POL-29)."""
    if not context.ops or pair.reference is None or pair.reference.key.slot.partition(".")[0] != "output":
        return 1.0
    place = pair.reference.key.where
    name = context.ops.name(place)
    if name not in _CANCEL and not (name in _CENTRED and pair.reference.key.slot == _MEANS):
        return 1.0
    return 1 / max(1.0, *(_shares(_sources(context, place) or (), pair) or (1.0,)))


def _gain_of_op(context: Context, pair: MeasuredPair) -> Gain | None:
    place = pair.reference.key.where
    name = context.ops.name(place)
    if pair.reference.key.slot not in _FIRST or (name not in _PLAIN and name not in _SUMS):
        return None
    output = context.errors.get(pair.key)
    sources = _sources(context, place)
    if output is None or not sources or not pair.is_inexact:
        return None
    shares: list[float] | None = [1.0] * len(sources)
    if name in _SUMS:
        shares = _shares(sources, pair)
    elif name in _PRODUCTS and len(sources) == 2:
        shares = [_cancellation_of_product(sources[0], sources[1], pair)] * 2
    errors = context.known_errors(sources)
    if shares is None or errors is None:
        return None
    together = partial(_together, shares=shares)
    inputs, count = together(errors), least_elements((*sources, pair))
    precision = pair.precision.of_module(module_of(pair.reference.key.site))
    finding = judge_gain(output, inputs, precision, is_core=True, elements=count)
    if finding.status != "within-rounding":
        robust = context.robust_errors(sources, pair, name in _CENTRED)
        second = RobustVerdict(robust, precision, together, judge_tail, is_core=True, elements=count)
        finding, inputs, output = second.of(finding, (inputs, output))
    return Gain(pair.reference.key.site, pair, inputs, output, finding)


def _sources(context: Context, place: str) -> list[Pair] | None:
    """Return the pairs of an op's float inputs; None if one is not known, or other numbers were chosen."""
    floats = []
    for key in context.ops.inputs(place) or ():
        pair = context.pairs.get(key)
        if pair is None or pair.reference is None or not pair.is_compared:
            return None
        if pair.is_inexact:
            floats.append(pair)
        elif pair.status not in ("identical", "match"):
            return None
    return floats


def _together(errors: Sequence[float], shares: Sequence[float]) -> float:
    return math.hypot(*(error * share for error, share in zip(errors, shares, strict=True)))


def _cancellation_of_product(one: Pair, other: Pair, result: Pair) -> float:
    """How much larger the terms of a product of two activations are than their sums, at least 1.

    Independent terms a b, of which k are added up, make a result of the size a b sqrt(k), and so they do of
    their errors. k follows from the sizes: (B m k) (B k n) / (B m n) = B k².
    """
    records = [pair.reference for pair in (one, other, result)]
    sizes = [rms_of(record) for record in records if record is not None]
    if len(sizes) < 3 or not all(sizes) or result.reference is None or len(result.reference.shape) < 2:
        return 1.0
    batch = math.prod(result.reference.shape[:-2])
    counts = [record.size for record in records if record is not None]
    terms = math.sqrt(counts[0] * counts[1] / (counts[2] * batch))
    return max(1.0, sizes[0] * sizes[1] * math.sqrt(terms) / sizes[2])


def _shares(sources: Sequence[Pair], result: Pair) -> list[float] | None:
    """The size of each source in units of the result's: what cancels makes a relative error larger."""
    sizes = []
    for pair in (*sources, result):
        statistics = pair.reference.statistics if pair.reference else None
        if pair.reference is None or statistics is None or statistics.l2 is None or statistics.neginf:
            return None
        if statistics.minimum is not None and statistics.minimum <= _SENTINEL:
            return None
        sizes.append(statistics.l2 / math.sqrt(max(1, pair.reference.size)))
    *source_sizes, result_size = sizes
    return [size / result_size for size in source_sizes] if result_size else None
