"""What ops add to the error that they were given, by the data-flow graph of the reference (POL-26)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

from tensorcap.comparison.gains import Confirm, Gain, RobustVerdict, least_elements
from tensorcap.comparison.pair import Pair
from tensorcap.comparison.policy import Policy, Precision
from tensorcap.runs.ops import Ops

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
# Errors add up as they are, not in proportion
_SUMS: Final = frozenset(("add", "sub", "rsub", "cat", "stack"))
_CENTRED: Final = frozenset(("native_layer_norm", "native_group_norm"))
_MEANS: Final = "output.1"  # of a norm that takes them away
_CANCEL: Final = _SUMS | {"sum", "mean"}
_SENTINEL: Final = -1e4  # and less: a mask that was added, so that norms say nothing
_FIRST: Final = ("output", "output.0")  # what else an op gives out are statistics and sums


class OpGains:
    """Finds the gain of every op of a known kind whose inputs and output were compared.

    Args:
        ops: Those of the reference.
        pairs: Pairs by key text.
        errors: Row errors by key text.
        policy: The limits.
        precision: The precision of a pair.
        confirm: A second look at a gain that is not green.
    """

    def __init__(
        self,
        ops: Ops,
        pairs: Mapping[str, Pair],
        *,
        errors: Mapping[str, float | None],
        policy: Policy,
        precision: Callable[[Pair], Precision],
        confirm: Confirm,
    ) -> None:
        self._ops = ops
        self._pairs = pairs
        self._errors = errors
        self._policy = policy
        self._precision = precision
        self._confirm = confirm

    def all(self) -> Iterator[Gain]:
        """Every gain, in the order of the pairs."""
        for pair in self._pairs.values():
            if pair.reference is None or pair.difference is None or pair.reference.key.slot not in _FIRST:
                continue
            place = pair.reference.key.where
            name = self._ops.name(place)
            if name in _PLAIN or name in _SUMS:
                yield from self._of(place, name, pair)

    def scale(self, pair: Pair) -> float:
        """What the error of a sum or mean is to be multiplied by to be one of what went in, at most 1."""
        if pair.reference is None or pair.reference.key.slot.partition(".")[0] != "output":
            return 1.0
        place = pair.reference.key.where
        name = self._ops.name(place)
        if name not in _CANCEL and not (name in _CENTRED and pair.reference.key.slot == _MEANS):
            return 1.0
        return 1 / max(1.0, *(_shares(self._sources(place) or (), pair) or (1.0,)))

    def _of(self, place: str, name: str, result: Pair) -> Iterator[Gain]:
        assert result.reference is not None
        output = self._errors.get(result.key)
        sources = self._sources(place)
        if output is None or not sources or not result.reference.dtype.is_inexact:
            return
        shares = _shares(sources, result) if name in _SUMS else [1.0] * len(sources)
        errors = [self._errors.get(pair.key) for pair in sources]
        known = [error for error in errors if error is not None]
        if shares is None or len(known) < len(errors):
            return
        precision = self._precision(result)
        inputs = _together(known, shares)
        count = least_elements((*sources, result))
        finding = self._policy.judge_gain(output, inputs, precision, is_core=True, elements=count)
        if finding.status != "within-rounding":
            looks = self._confirm(sources, result, name in _CENTRED)
            together = partial(_together, shares=shares)
            second = RobustVerdict(self._policy, looks, precision, together, is_core=True, elements=count)
            finding, inputs, output = second.of(finding, (inputs, output))
        yield Gain(result.reference.key.site, result, inputs, output, finding)

    def _sources(self, place: str) -> list[Pair] | None:
        """The pairs of floats that go in; None where one is not known, or where other numbers were chosen."""
        found = [self._pairs.get(key) for key in self._ops.inputs(place) or ()]
        floats = []
        for pair in found:
            if pair is None or pair.reference is None or not pair.is_compared:
                return None
            if pair.reference.dtype.is_inexact:
                floats.append(pair)
            elif pair.status not in ("identical", "match"):
                return None
        return floats


def _together(errors: Sequence[float], shares: Sequence[float]) -> float:
    return math.hypot(*(error * share for error, share in zip(errors, shares, strict=True)))


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
    *given, made = sizes
    return [size / made for size in given] if made else None
