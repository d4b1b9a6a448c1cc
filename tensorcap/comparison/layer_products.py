"""Layers as products: what calls were given and made, and what the reference's weight makes of it.

A convolution is the product of its weight and the patches that this is laid over.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np

from tensorcap.comparison.injected import Injected
from tensorcap.comparison.policy import POLICY
from tensorcap.comparison.record_index import RecordIndex
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.keys import Key
from tensorcap_formats.records import Record
from tensorcap_formats.run_info import ModuleInfo

BIAS: Final = "param.bias"  # slot
MOST_ROWS: Final = 512  # of an input that are multiplied: the first ones, of patches any
_MATRIX: Final = 2  # axes
_SATURATED: Final = (
    16  # inputs that are equal to the largest, and more than this share of all: an activation cuts
)
_SHARE: Final = 0.001
_LINEAR: Final = 1e-3  # relative error of a product that is a layer's result, in float32


@dataclass(slots=True)
class Call:
    """The tensor that a call was given, and the one that it returned."""

    input: Record
    output: Record

    def values(self, archive: Archive) -> tuple[Array | None, Array | None]:
        """The values of both in float64, see `floats_of`."""
        return floats_of(archive, self.input), floats_of(archive, self.output)


def single_calls(archive: Archive, sites: set[str]) -> Mapping[str, Mapping[tuple[int, int, int], Call]]:
    """The calls of modules that were given one tensor of floats and returned one, by site and place."""
    inputs: dict[tuple[str, tuple[int, int, int]], list[Record]] = defaultdict(list)
    outputs: dict[tuple[str, tuple[int, int, int]], list[Record]] = defaultdict(list)
    for record in archive.records:
        key = record.key
        if key.site in sites and record.dtype.is_inexact and record.stored and record.shape:
            kind = key.slot.partition(".")[0]
            side = {"input": inputs, "output": outputs}.get(kind)
            if side is not None:
                side[key.site, place_in_run(key)].append(record)
    calls: dict[str, dict[tuple[int, int, int], Call]] = defaultdict(dict)
    for (site, place), made in outputs.items():
        given = inputs.get((site, place), [])
        if len(made) == len(given) == 1:
            calls[site][place] = Call(given[0], made[0])
    return calls


def place_in_run(key: Key) -> tuple[int, int, int]:
    """The rank, step and call of a record."""
    return key.rank, key.step, key.call


@dataclass(frozen=True, slots=True)
class Product:
    """One call of a linear layer, or of a convolution, whose rows are patches.

    Attributes:
        key: Key text of its result.
        x: What the target's layer was given, `[rows, inputs]`; of all groups, of a convolution that has some.
        y: What it made, `[rows, outputs]`.
        wanted: What the reference's makes of the same.
        bias: What the reference adds, `[outputs]`.
        given: What the reference's layer was given, `[rows, inputs]`.
        ends: What results of an activation that is a part of the layer lie between.
    """

    key: str
    x: Array
    y: Array
    wanted: Array
    bias: Array
    given: Array
    ends: tuple[float, float] = (-math.inf, math.inf)

    def with_activation(self, key: str, ends: tuple[float, float]) -> Product:
        """Return the product with an activation behind it that cuts its results off; `key` is that of its."""
        return replace(self, key=key, wanted=np.clip(self.wanted, *ends), ends=ends)

    def rest(self, values: Array) -> Array:
        """What is left of results without what a weight makes of the input, `[rows, outputs]`.

        It is 0 where an activation may have cut a result off.
        """
        low, high = self.ends
        left: Array = self.y - multiply(self.x, values)
        return left if math.isinf(low) else np.where((self.y > low) & (self.y < high), left, 0.0)

    def mean(self, rest: Array) -> Array:
        """The mean of a rest by output, of what no activation may have cut off, in the rest's shape."""
        low, high = self.ends
        is_inside = (self.y > low) & (self.y < high)
        means = rest.sum(axis=0) / np.maximum(1, is_inside.sum(axis=0))
        wide: Array = means * is_inside
        return wide

    def with_inputs_within(self, settings: Mapping[str, Any], weight: Array) -> Product:
        """Return the product of inputs that their range cuts off where the reference's activation does.

        That is below 0 if the reference's inputs begin there, and above their largest value if many have it.
        """
        low, high = settings.get("input_range") or (None, None)
        step, least, most = (
            settings.get("input_step", 0.0),
            self.given.min(initial=0.0),
            self.given.max(initial=0.0),
        )
        is_saturated = (self.given == most).sum() >= max(_SATURATED, _SHARE * self.given.size)
        ends = (
            0.0 if low == 0 and least >= 0 else -math.inf,
            float(high)
            if is_saturated and isinstance(high, float) and abs(high - most) <= step
            else math.inf,
        )
        x = np.clip(self.x, *ends)
        if (x == self.x).all():
            return self
        return replace(self, x=x, wanted=multiply(x, weight.reshape(len(weight), -1)) + self.bias)

    def with_norm(self, factors: Array, shifts: Array) -> Product:
        """Return the product with a norm behind it that multiplies channels and adds to them."""
        bias = self.bias * factors + shifts
        return replace(self, wanted=self.wanted * factors + shifts, bias=bias)

    @property
    def kept(self) -> Array | None:
        """Which results an activation hands on, of either side, `[rows, outputs]`; None without one."""
        low, high = self.ends
        if math.isinf(low):
            return None
        is_kept: Array = ((self.wanted > low) & (self.wanted < high)) | ((self.y > low) & (self.y < high))
        return is_kept


def multiply(x: Array, weight: Array) -> Array:
    """Return the product of rows and a weight, group by group where a row has the inputs of several.

    Args:
        x: `[rows, groups * inputs]`.
        weight: `[groups * outputs, inputs]`.

    Returns:
        `[rows, groups * outputs]`.

    Example:
        >>> multiply(np.array([[1.0, 2.0]]), np.array([[3.0], [5.0]])).tolist()
        [[3.0, 10.0]]
    """
    groups = x.shape[1] // weight.shape[1]
    if groups == 1:
        whole: Array = x @ weight.T
        return whole
    parts = x.reshape(len(x), groups, -1).transpose(1, 0, 2)
    weights = weight.reshape(groups, -1, weight.shape[1]).transpose(0, 2, 1)
    made: Array = (parts @ weights).transpose(1, 0, 2)
    return made.reshape(len(x), -1)


def layer_products(
    reference: Archive,
    target: Archive,
    weight: Array,
    ours: Mapping[tuple[int, int, int], Call],
    theirs: Mapping[tuple[int, int, int], Call],
    injected: Injected | None,
    module: ModuleInfo | None = None,
) -> Iterator[Product]:
    """Yield the calls of a layer whose result is its input times its weight, and a bias.

    Args:
        reference: The trusted archive.
        target: The archive under test, under the reference's keys.
        weight: The reference's, float64, `[outputs, inputs]` or that of a convolution.
        ours: The reference's calls.
        theirs: The target's.
        injected: Which inputs of the target were replaced by the reference's; None if none were.
        module: What the reference's metadata say of the layer.
    """
    patches = _Patches.of(module, weight) if weight.ndim > _MATRIX else None
    if weight.ndim != _MATRIX and patches is None:
        return
    matrix = weight.reshape(len(weight), -1)
    for place, call in ours.items():
        other = theirs.get(place)
        if other is None:
            continue
        sides = call.values(reference), other.values(target)
        if any(value is None for side in sides for value in side):
            continue
        rows = [_rows_of(patches, *(value for value in side if value is not None)) for side in sides]
        if rows[0] is None or rows[1] is None:
            continue
        (x, y), (x_target, y_target) = rows[0], rows[1]
        if len(x) != len(y) or len(x_target) != len(y_target) or x.shape[1] != x_target.shape[1]:
            continue
        if not _fits(x, matrix) or y.shape[1] != len(matrix) or y_target.shape[1] != y.shape[1]:
            continue
        rest = y - multiply(x, matrix)
        bias = rest.mean(axis=0)
        size = max(float(np.linalg.norm(y)), 1e-300)
        unit = max(POLICY.units.get(record.dtype.name, 0.0) for record in (call.input, call.output))
        if not np.linalg.norm(rest - bias) <= (_LINEAR + 2 * unit) * size:
            continue
        if injected:
            if not injected.is_made_of_replaced(other.input.key):
                continue
            x_target = x
        yield Product(call.output.key.text, x_target, y_target, multiply(x_target, matrix) + bias, bias, x)


def _fits(x: Array, matrix: Array) -> bool:
    """Whether rows are as wide as a weight, or as several groups of its outputs."""
    inputs, outputs = max(1, int(matrix.shape[1])), len(matrix)
    groups, rest = divmod(int(x.shape[1]), inputs)
    return rest == 0 and groups > 0 and outputs % groups == 0


def _rows_of(patches: _Patches | None, x: Array, y: Array) -> tuple[Array, Array] | None:
    """Rows of what a call was given and made; None if they do not fit each other."""
    return (first_rows(x), first_rows(y)) if patches is None else patches.rows(x, y)


@dataclass(frozen=True, slots=True)
class _Patches:
    """How a convolution lays its weight over what it is given, along each axis of space.

    Attributes:
        sizes: Of the weight.
        strides: Elements from one patch to the next.
        dilations: Elements from one element of a patch to the next.
        before: Zeros that are put before the first element.
        after: Zeros that are put behind the last one.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    @classmethod
    def of(cls, module: ModuleInfo | None, weight: Array) -> _Patches | None:
        """What the settings of a module of torch say; None if it is no convolution of zeros around."""
        settings = {} if module is None else module.settings
        if settings.get("transposed") is not False or settings.get("padding_mode") != "zeros":
            return None
        sizes = weight.shape[2:]
        sides = [settings.get(name) for name in ("stride", "dilation")]
        strides, dilations = (_numbers(side, len(sizes)) for side in sides)
        if strides is None or dilations is None:
            return None
        padding = settings.get("padding")
        if isinstance(padding, str):
            around = [d * (k - 1) * (padding == "same") for d, k in zip(dilations, sizes, strict=True)]
            before = tuple(size // 2 for size in around)
            after = tuple(size - size // 2 for size in around)
            return cls(sizes, strides, dilations, before, after)
        both = _numbers(padding, len(sizes))
        return None if both is None else cls(sizes, strides, dilations, both, both)

    def rows(self, x: Array, y: Array) -> tuple[Array, Array] | None:
        """Patches and what was made of them, `[patches, inputs]` and `[patches, outputs]`, a sample of many.

        Args:
            x: `[batch, channels, …]`, or without a batch.
            y: The result, likewise.
        """
        if x.ndim == y.ndim == len(self.sizes) + 1:
            x, y = x[None], y[None]
        if x.ndim != len(self.sizes) + 2 or y.ndim != x.ndim or len(x) != len(y):
            return None
        around = [(0, 0), (0, 0), *zip(self.before, self.after, strict=True)]
        padded = np.pad(x, around)
        spaces = zip(padded.shape[2:], self.sizes, self.strides, self.dilations, strict=True)
        counts = tuple((size - d * (k - 1) - 1) // stride + 1 for size, k, stride, d in spaces)
        if y.shape[2:] != counts or not y.size:
            return None
        made = np.moveaxis(y, 1, -1).reshape(-1, y.shape[1])
        places = np.arange(len(made))
        if len(places) > MOST_ROWS:
            places = np.sort(np.random.default_rng(0).choice(places, MOST_ROWS, replace=False))
        batch, *starts = np.unravel_index(places, (len(x), *counts))
        axes = len(starts)
        index = [
            (starts[axis] * self.strides[axis]).reshape(-1, *(1,) * axes)
            + (np.arange(self.sizes[axis]) * self.dilations[axis]).reshape(-1, *(1,) * (axes - 1 - axis))
            for axis in range(axes)
        ]
        taken = np.moveaxis(padded, 1, -1)[(batch.reshape(-1, *(1,) * axes), *index)]
        return np.moveaxis(taken, -1, 1).reshape(len(places), -1), made[places]


def _numbers(value: object, count: int) -> tuple[int, ...] | None:
    """So many whole numbers, of a list of them; None if it is no such list."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != count:
        return None
    return tuple(value) if all(isinstance(one, int) for one in value) else None


def first_rows(values: Array) -> Array:
    """The first rows along the last axis."""
    return values.reshape(-1, values.shape[-1])[:MOST_ROWS]


def floats_of(archive: Archive, record: Record) -> Array | None:
    """The values of a record in float64; None if it holds no floats, or some that are not finite."""
    if record.dtype.kind != "float":
        return None
    values = archive.load(record).astype(np.float64)
    return values if np.isfinite(values).all() else None


class LookUp(NamedTuple):
    """A call of a table, as an embedding.

    Attributes:
        key: Key text of its result.
        rows: Places in the table, `[rows]`.
        values: What the target's made, `[rows, columns]`, float64.
    """

    key: str
    rows: Array
    values: Array


def looked_up(reference: RecordIndex, target: Archive, site: str, weight: Array) -> Iterator[LookUp]:
    """Yield the calls of a table, of which the reference's results are rows.

    Args:
        reference: The reference's records.
        target: The archive under test, under the reference's keys.
        site: That of the table.
        weight: The reference's, `[rows, columns]`, float64; of another shape it is no table.

    Raises:
        OSError, ReadError: What was given or made cannot be read.
    """
    if weight.ndim != _MATRIX:
        return
    records = [record for record in reference.tensors(site) if record.stored]
    given = {place_in_run(r.key): r for r in records if r.key.slot.startswith("input") and r.dtype.is_whole}
    for record in records:
        text = record.key.text
        places, own = given.get(place_in_run(record.key)), target.get(text) if text in target else None
        if not record.key.slot.startswith("output") or places is None or own is None or not own.stored:
            continue
        values, theirs = floats_of(reference.archive, record), floats_of(target, own)
        rows = reference.archive.load(places).reshape(-1).astype(np.int64)
        if values is None or theirs is None or values.shape != theirs.shape or not rows.size:
            continue
        if values.shape[-1] != weight.shape[1] or values.size != rows.size * weight.shape[1]:
            continue
        values, theirs = (side.reshape(-1, weight.shape[1]) for side in (values, theirs))
        if rows.min() >= 0 and rows.max() < len(weight) and np.array_equal(values, weight[rows]):
            yield LookUp(text, rows, theirs)
