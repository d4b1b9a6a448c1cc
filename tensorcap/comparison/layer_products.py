"""Layers as products: what calls were given and made, and what the reference's weight makes of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from tensorcap.comparison.injected import Injected
from tensorcap.comparison.policy import POLICY
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.keys import Key
from tensorcap_formats.records import Record

MOST_ROWS: Final = 512  # of an input, the first ones, that are multiplied
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
    """One call of a linear layer.

    Attributes:
        key: Key text of its result.
        x: What the target's layer was given, `[rows, inputs]`.
        y: What it made, `[rows, outputs]`.
        wanted: What the reference's makes of the same.
        bias: What the reference adds, `[outputs]`.
        given: What the reference's layer was given, `[rows, inputs]`.
    """

    key: str
    x: Array
    y: Array
    wanted: Array
    bias: Array
    given: Array


def layer_products(
    reference: Archive,
    target: Archive,
    weight: Array,
    ours: Mapping[tuple[int, int, int], Call],
    theirs: Mapping[tuple[int, int, int], Call],
    injected: Injected | None,
) -> Iterator[Product]:
    """Yield the calls of a layer whose result is its input times its weight, and a bias."""
    if weight.ndim != 2:
        return
    for place, call in ours.items():
        other = theirs.get(place)
        if other is None:
            continue
        sides = (*call.values(reference), *other.values(target))
        x, y, x_target, y_target = (None if side is None else first_rows(side) for side in sides)
        if x is None or y is None or x_target is None or y_target is None:
            continue
        if len(x) != len(y) or len(x_target) != len(y_target) or x.shape[1] != x_target.shape[1]:
            continue
        if (x.shape[1], y.shape[1]) != weight.shape[::-1] or y_target.shape[1] != y.shape[1]:
            continue
        rest = y - x @ weight.T
        bias = rest.mean(axis=0)
        size = max(float(np.linalg.norm(y)), 1e-300)
        unit = max(POLICY.units.get(record.dtype.name, 0.0) for record in (call.input, call.output))
        if not np.linalg.norm(rest - bias) <= (_LINEAR + 2 * unit) * size:
            continue
        if injected:
            if not injected.is_replaced(other.input.key):
                continue
            x_target = x
        yield Product(call.output.key.text, x_target, y_target, x_target @ weight.T + bias, bias, x)


def first_rows(values: Array) -> Array:
    """The first rows along the last axis."""
    return values.reshape(-1, values.shape[-1])[:MOST_ROWS]


def floats_of(archive: Archive, record: Record) -> Array | None:
    """The values of a record in float64; None if it holds no floats, or some that are not finite."""
    if record.dtype.kind != "float":
        return None
    values = archive.load(record).astype(np.float64)
    return values if np.isfinite(values).all() else None
