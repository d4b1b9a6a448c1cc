"""Propose variants of a norm of groups of channels: of which channels, over which axes, with which eps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Final

import numpy as np

from tensorcap.diagnosis.context import BIASES, GAINS, PairContext, find_vector
from tensorcap.diagnosis.hypothesis import Hypothesis, inherited_error
from tensorcap.diagnosis.values import Values, fit_factors, relative_error
from tensorcap_formats.float_formats import rounded
from tensorcap_formats.keys import module_of

_EPS: Final = (1e-5, 1e-6, 1e-3, 1e-12, 1e-8, 1e-7, 1e-4)
_MOST_GROUPS: Final = 64
_LEAST_PLACES: Final = 16  # of a channel, to fit its weight and bias
_SAMPLE: Final = 1 << 20  # elements that variants are worked out of, if these are whole sequences
_COUNTS: Final = ("num_groups", "groups", "n_groups")
_GROUPS_HINT: Final = "Which channels are a group: neighbours, or each so many apart; and how many groups."


@dataclass(frozen=True, slots=True)
class _Grouping:
    """What mean and variance are taken of, and how a value is normalised by them.

    Attributes:
        count: Of groups of channels.
        eps: Added to the variance, or to its root.
        is_in_turn: Whether a group has every `count`-th channel, and not neighbours.
        is_each_place: Whether each place, as a pixel, has statistics of its own.
        is_of_batch: Whether all sequences have them together.
        has_mean: Whether the mean is subtracted.
        correction: What is taken off the count that the sum of squares is divided by.
        is_eps_outside: Whether eps is added to the root.
    """

    count: int
    eps: float
    is_in_turn: bool = False
    is_each_place: bool = False
    is_of_batch: bool = False
    has_mean: bool = True
    correction: int = 0
    is_eps_outside: bool = False

    def __call__(self, x: Values) -> Values:
        """Normalise values, (batch, channel, place)."""
        batch, channels, places = x.shape
        each = channels // self.count
        shape = (batch, each, self.count, places) if self.is_in_turn else (batch, self.count, each, places)
        of_group = 1 if self.is_in_turn else 2
        axes = (*((0,) if self.is_of_batch else ()), of_group, *(() if self.is_each_place else (3,)))
        grouped = x.reshape(shape)
        size = math.prod(grouped.shape[axis] for axis in axes)
        centred = grouped - grouped.mean(axis=axes, keepdims=True) if self.has_mean else grouped
        variance = (centred * centred).sum(axis=axes, keepdims=True) / max(size - self.correction, 1)
        root = np.sqrt(variance) + self.eps if self.is_eps_outside else np.sqrt(variance + self.eps)
        return np.asarray((centred / root).reshape(x.shape))

    def describe(self, channels: int) -> str:
        """What the statistics are of, in words."""
        if self.count in (1, channels):
            groups = "all channels" if self.count == 1 else "each channel"
        elif self.is_in_turn:
            groups = f"{self.count} groups of channels that lie {self.count} apart"
        else:
            groups = f"{self.count} groups of channels beside each other"
        groups += ", at each place alone" if self.is_each_place else ""
        return groups + (", of all sequences together" if self.is_of_batch else "")


@dataclass(frozen=True, slots=True)
class _Affine:
    """What a normalised value is multiplied by and what is added: one number for each channel."""

    weight: Values
    bias: Values

    def __call__(self, normed: Values) -> Values:
        return np.asarray(normed * self.weight[:, None] + self.bias[:, None])


def propose_group_norms(context: PairContext) -> Iterator[Hypothesis]:
    """Propose that the target normalises groups of channels otherwise than the reference, of its own input.

    1. The module has one input of the pair's shape, with channels on the second or last axis; of large ones
       the first sequences are looked at.
    2. The groups, as the module's settings or divisors of the channels say them, and the eps that make the
       reference are found; a weight and a bias that are in no archive are fitted to it.
    3. Proposed are an inherited error, and the same with one thing done otherwise.
    """
    if not context.is_same_shape or context.r.ndim < 3:
        return
    inputs = [(slot, x, y) for slot, x, y in context.inputs if x.shape == context.r.shape]
    if len(inputs) != 1:
        return
    ((slot, ours, theirs),) = inputs
    kept = max(1, _SAMPLE // max(1, context.r[0].size))
    for axis in (1, context.r.ndim - 1):
        x, r = (_as_places(side[:kept], axis) for side in (ours, context.r))
        known = _recognise(context, x, r)
        if known is None:
            continue
        usual, affine, own = known
        y, t = (_as_places(side[:kept], axis) for side in (theirs, context.t))
        dtype = context.target.dtype.name
        baseline = rounded(affine(usual(y)), dtype)
        yield inherited_error(t, baseline, r)
        has_others = len(r) == len(context.r) > 1
        ways = list(_list_ways(usual, affine, own, r.shape[1], has_others=has_others))
        for kind, text, grouping, with_parameters, hint in ways:
            yield Hypothesis(
                kind,
                text.format(slot=slot),
                t,
                rounded(with_parameters(grouping(y)), dtype),
                baseline,
                log_alternatives=math.log(len(ways)),
                hint=hint,
                facts={"reference": asdict(usual), "target": asdict(grouping)},
            )
        return


def _as_places(x: Values, axis: int) -> Values:
    """(batch, channel, place), the axis of channels moved behind the first one."""
    moved = np.moveaxis(x, axis, 1)
    return moved.reshape(*moved.shape[:2], -1)


def _recognise(context: PairContext, x: Values, r: Values) -> tuple[_Grouping, _Affine, _Affine] | None:
    """Find what makes the reference, its weight and bias, and the target's; None if nothing does."""
    channels = r.shape[1]
    if not _is_affine(x, r, context.tolerance()):
        return None
    module = context.reference_archive.info.modules.get(module_of(context.reference.key.site))
    settings = {} if module is None else module.settings
    said = [settings[name] for name in _COUNTS if isinstance(settings.get(name), int)]
    counts = said or [n for n in range(1, min(channels, _MOST_GROUPS) + 1) if channels % n == 0]
    eps = settings.get("eps")
    all_eps = dict.fromkeys((*((float(eps),) if isinstance(eps, int | float) else ()), *_EPS))
    parameters = context.read_parameters()
    sides = [find_vector(parameters, names, channels) for names in (GAINS, BIASES)]
    sides = [(ours, ours if theirs is None else theirs) for ours, theirs in sides]
    is_known = any(ours is not None for ours, _ in sides)
    if not is_known and (r.shape[0] * r.shape[2] < _LEAST_PLACES or (len(r) == 1 and not said)):
        return None  # of one sequence, weights and biases can be found for any groups
    for count in counts:
        if not 0 < count <= channels or channels % count:
            continue
        for one_eps in all_eps:
            grouping = _Grouping(count, one_eps)
            normed = grouping(x)
            affine = _read(sides, 0, channels) if is_known else _fit(normed, r)
            if relative_error(r, affine(normed)) <= context.tolerance():
                return grouping, affine, _read(sides, 1, channels) if is_known else affine
    return None


def _is_affine(x: Values, r: Values, tolerance: float) -> bool:
    """Whether each channel of each sequence is its input times a number plus another one.

    Each norm whose statistics are not those of each place alone is that, so that few others are looked at.
    """
    x, r = (side.reshape(1, -1, side.shape[2]) for side in (x, r))
    return relative_error(r, _fit(x, r)(x)) <= tolerance


def _read(sides: list[tuple[Values | None, Values | None]], side: int, channels: int) -> _Affine:
    weight, bias = (both[side] for both in sides)
    return _Affine(
        np.ones(channels) if weight is None else weight, np.zeros(channels) if bias is None else bias
    )


def _fit(normed: Values, r: Values) -> _Affine:
    """Fit weight and bias of each channel to the reference by least squares."""
    means = [side.mean(axis=(0, 2)) for side in (normed, r)]
    centred, centred_r = (side - mean[:, None] for side, mean in zip((normed, r), means, strict=True))
    weight = fit_factors((centred * centred_r).sum(axis=(0, 2)), (centred * centred).sum(axis=(0, 2)))
    return _Affine(weight, means[1] - weight * means[0])


_Way = tuple[str, str, _Grouping, _Affine, str]  # kind, text with {slot}, statistics, parameters, hint


def _list_ways(
    usual: _Grouping, affine: _Affine, own: _Affine, channels: int, *, has_others: bool
) -> Iterator[_Way]:
    """List what the target may do otherwise; `has_others` if all sequences are at hand, and several."""
    yield from _list_other_groups(usual, affine, channels, has_others=has_others)
    text = f"the target adds eps {{eps:g}} to {{place}}, the reference {usual.eps:g} to the variance"
    hint = "Another eps, or outside of the root; it shows where the variance is small."
    for eps in _EPS:
        for is_outside, place in ((False, "the variance"), (True, "the root of the variance")):
            if is_outside or eps != usual.eps:
                way = replace(usual, eps=eps, is_eps_outside=is_outside)
                yield "norm-eps", text.format(eps=eps, place=place), way, affine, hint
    without = replace(usual, has_mean=False)
    hint = "A norm of the root mean square on one side only."
    yield "norm-statistic", "the target does not subtract the mean of its {slot}", without, affine, hint
    sample = replace(usual, correction=1)
    hint = "The variance of a sample on one side, of the whole on the other."
    yield "statistics-differ", "the target divides by the deviation of a sample", sample, affine, hint
    ones, zeros = np.ones(channels), np.zeros(channels)
    hint = "The weight of the norm is not looked at."
    yield (
        "weight-missing",
        "the target does not multiply by the weight",
        usual,
        replace(affine, weight=ones),
        hint,
    )
    hint = "The bias of the norm is not looked at."
    yield "bias-dropped", "the target does not add the bias", usual, replace(affine, bias=zeros), hint
    if not (np.array_equal(affine.weight, own.weight) and np.array_equal(affine.bias, own.bias)):
        text = "the target is right for its own weight and bias, which are not those of the reference"
        yield "other-weights", text, usual, own, "Weights differ: look at how they are loaded."


def _list_other_groups(
    usual: _Grouping, affine: _Affine, channels: int, *, has_others: bool
) -> Iterator[_Way]:
    """List other groups: neighbours or every n-th channel, more or fewer, at each place, of all sequences."""
    ours = usual.describe(channels)
    text = f"the target takes the statistics of its {{slot}} of {{groups}}, the reference of {ours}"
    counts = [usual.count, *(n for n in range(1, channels + 1) if channels % n == 0)]
    for count in dict.fromkeys(n for n in counts if n in (usual.count, channels) or n <= _MOST_GROUPS):
        for is_in_turn in (False, True):
            way = replace(usual, count=count, is_in_turn=is_in_turn)
            if way != usual and not (is_in_turn and count in (1, channels)):
                named = text.replace("{groups}", way.describe(channels))
                yield "groups-differ", named, way, affine, _GROUPS_HINT
    hint = "Statistics are taken over other axes: with or without those of places, or of sequences."
    ways = [replace(usual, count=count, is_each_place=True) for count in (usual.count, 1)]
    if has_others:
        ways += [replace(usual, count=count, is_of_batch=True) for count in (usual.count, channels)]
    for way in dict.fromkeys(ways):
        yield "axes-differ", text.replace("{groups}", way.describe(channels)), way, affine, hint
