"""Layers in floats that share an input whose columns were divided, as a norm's gains are (SmoothQuant, AWQ).

Columns of their weights are multiplied by the same numbers, and results are as before. A layer that was left
out of it makes something else, and is the one that is wrong. Read `SharedInputs`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tensorcap.comparison.column_factors import has_divided_maker, is_divided_by
from tensorcap.comparison.layer_errors import LayerError
from tensorcap.comparison.layer_mistakes import LayerMistake
from tensorcap.comparison.layer_products import Product, floats_of, layer_products, multiply, single_calls
from tensorcap.comparison.policy import POLICY, Precision
from tensorcap.comparison.record_index import RecordIndex
from tensorcap.runs import Contents, contents_of
from tensorcap_formats.dtypes import Array, decode
from tensorcap_formats.float_formats import UNIT_ROUNDOFFS
from tensorcap_formats.records import Record

WEIGHT: Final = "param.weight"  # slot
_ROUNDINGS: Final = 4.0  # of a weight's dtype, by which rows of it may be off
_OTHER: Final = 16.0  # of these, that factors are off 1 at least
_FEW: Final = 4096  # elements of a weight that tell whether its columns are multiplied
_FEWEST_ROWS: Final = 4  # of which factors are fitted
_SAME: Final = 1e-5  # relative error of a result that floats alone make
_CLEARLY: Final = 8.0  # times as far as from its own weight's product a result is from that with factors


@dataclass(frozen=True, slots=True)
class FloatLayer:
    """A layer whose weight is the reference's in floats, but perhaps for factors of its columns.

    Attributes:
        site: Its site.
        ours: The reference's weight.
        theirs: The target's.
        factors: What its columns are multiplied by, `[inputs]`; None if they are as they were.
    """

    site: str
    ours: Record
    theirs: Record
    factors: Array | None


def left_out_text(other: str) -> str:
    """What is wrong with a layer whose columns are as they were, of which another one's are multiplied."""
    return f"its columns are not multiplied by what its input is divided by, as those of {other} are"


class SharedInputs:
    """The layers in floats by what the reference gives them.

    Args:
        reference: The trusted archive's records.
        target: Those of the archive under test, under the reference's keys.
        besides: Sites of layers in few bits, which are left out.
    """

    def __init__(self, reference: RecordIndex, target: RecordIndex, besides: Collection[str]) -> None:
        self._ours, self._theirs, self._besides = reference, target, besides
        sites = {
            record.key.site
            for record in reference.archive.records
            if record.key.slot == WEIGHT and record.key.site not in besides
        }
        self._calls = [single_calls(archive, sites) for archive in (reference.archive, target.archive)]

    def groups(self, divided: Collection[Contents]) -> Iterator[tuple[Contents, list[FloatLayer]]]:
        """Yield what several layers are given, or what is divided for the sake of others, and the layers.

        Only those are yielded of which one has factors, or whose input is divided.

        Raises:
            OSError, ReadError: A weight cannot be read.
        """
        sites: dict[Contents, dict[str, None]] = {}
        for site, calls in self._calls[0].items():
            for call in calls.values():
                if call.input.digest:
                    sites.setdefault(contents_of(call.input), {})[site] = None
        for contents, of_contents in sites.items():
            if len(of_contents) < 2 and contents not in divided:
                continue
            layers = [layer for site in of_contents if (layer := self._layer(site)) is not None]
            if contents in divided or any(layer.factors is not None for layer in layers):
                yield contents, layers

    def _layer(self, site: str) -> FloatLayer | None:
        """A layer; None if its weight is not the reference's, with or without factors."""
        ours, theirs = (index.parameters(site).get(WEIGHT) for index in (self._ours, self._theirs))
        if ours is None or theirs is None or ours.shape != theirs.shape or len(ours.shape) != 2:
            return None
        if not ours.dtype.kind == theirs.dtype.kind == "float":
            return None
        if ours.digest and ours.digest == theirs.digest and ours.dtype == theirs.dtype:
            return FloatLayer(site, ours, theirs, None)
        unit = _ROUNDINGS * max(UNIT_ROUNDOFFS.get(one.dtype.name, 0.0) for one in (ours, theirs))
        rows = min(max(_FEWEST_ROWS, _FEW // max(1, ours.shape[1])), ours.shape[0])
        few, own_few = (
            self._first_rows(*side, rows) for side in ((self._ours, ours), (self._theirs, theirs))
        )
        if not _is_off(few, own_few, unit):
            return FloatLayer(site, ours, theirs, None)
        if _factors(few, own_few, unit) is None:
            return None
        trusted, own = self._weights(ours, theirs)
        factors = None if trusted is None or own is None else _factors(trusted, own, unit)
        return None if factors is None else FloatLayer(site, ours, theirs, factors)

    def _first_rows(self, index: RecordIndex, record: Record, rows: int) -> Array:
        columns = record.shape[1]
        read = decode(index.archive.read_range(record, 0, rows * columns), record.dtype)
        values: Array = read.astype(np.float64).reshape(rows, columns)
        return values

    def _weights(self, ours: Record, theirs: Record) -> tuple[Array | None, Array | None]:
        return floats_of(self._ours.archive, ours), floats_of(self._theirs.archive, theirs)

    def inputs(self, layer: FloatLayer) -> list[Record]:
        """What the reference gives a layer."""
        return [call.input for call in self._calls[0].get(layer.site, {}).values()]

    def errors(
        self, layer: FloatLayer, factors: Array, other: str, precision: Precision | None
    ) -> Iterator[tuple[str, LayerError]]:
        """Yield the key texts of a layer's results, and their own errors, if its input is divided by factors.

        Of a layer that was left out none is yielded if what it makes is not what its weight makes.

        Args:
            layer: The layer.
            factors: What its columns have to be multiplied by, `[inputs]`.
            other: A layer whose columns are.
            precision: What both runs computed in.

        Raises:
            OSError, ReadError: Something cannot be read.
        """
        trusted, own = self._weights(layer.ours, layer.theirs)
        if trusted is None or own is None:
            return
        is_proven = has_divided_maker(self._ours, self._theirs, self.inputs(layer), factors)
        module = self._ours.archive.info.modules.get(layer.site)
        archives = self._ours.archive, self._theirs.archive
        calls = [side.get(layer.site, {}) for side in self._calls]
        precision = precision or POLICY.precision("float32")
        for product in layer_products(*archives, trusted, calls[0], calls[1], None, module):
            if is_proven or is_divided_by(product, factors):
                wanted = trusted * factors
                if layer.factors is not None:
                    yield product.key, _error(product, wanted, own, precision)
                    continue
                error, left = _error(product, wanted, wanted, precision), _left_by(product, own)
                if left * _CLEARLY <= error.own:
                    mistake = LayerMistake(left_out_text(other), "weight-columns", left)
                    yield product.key, replace(error, mistake=mistake)


def _error(product: Product, trusted: Array, own: Array, precision: Precision) -> LayerError:
    """The own error of a call, beside what its weight is off by and what floats make."""
    wanted = multiply(product.x, trusted) + product.bias
    size = max(float(np.linalg.norm(wanted)), 1e-300)
    of_weight = float(np.linalg.norm(multiply(product.x, own - trusted))) / size
    floats = max(_SAME, _ROUNDINGS * POLICY.noise(precision))
    error = float(np.linalg.norm(product.y - wanted)) / size
    return LayerError(error, float(np.hypot(of_weight, floats)), 0.0, precision.name)


def _left_by(product: Product, own: Array) -> float:
    """How far a result is from what the layer's own weight makes, relative."""
    made = multiply(product.x, own) + product.bias
    return float(np.linalg.norm(product.y - made)) / max(float(np.linalg.norm(made)), 1e-300)


def _is_off(trusted: Array, own: Array, unit: float) -> bool:
    """Whether a weight is another one, beyond rounding."""
    return float(np.linalg.norm(own - trusted)) > unit * float(np.linalg.norm(trusted))


def _factors(trusted: Array, own: Array, unit: float) -> Array | None:
    """What the columns of a weight are multiplied by, beyond rounding; None if they are not."""
    squares = np.square(trusted).sum(axis=0)
    if len(trusted) < _FEWEST_ROWS or not (squares > 0).all():
        return None
    factors: Array = (own * trusted).sum(axis=0) / squares
    if not factors.all() or _is_off(trusted * factors, own, unit):
        return None
    return factors if np.abs(factors - 1).max() > _OTHER * unit else None
