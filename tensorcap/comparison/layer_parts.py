"""Modules of a reference that are a part of the layer before them in a target: norms and activations.

A batch norm in inference multiplies each channel and adds to it, and quantisers fold it into the weight and
the bias; they cut off results in the layer itself, where the reference has a ReLU behind it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from tensorcap.alignment import MappedArchive
from tensorcap.comparison.layer_products import floats_of, place_in_run
from tensorcap.runs import contents_of, is_parameter, is_result
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import ReadError
from tensorcap_formats.records import Record

_ENDS: Final[Mapping[str, tuple[float, float]]] = {  # what results of an activation lie between, by class
    "ReLU": (0.0, math.inf),
    "ReLU6": (0.0, 6.0),
}
_NORMS: Final = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")
_EPSILON: Final = 1e-5  # of torch's norms
_MOST: Final = 0.5  # of how results differ, that is left with the activation
_SAME_BIAS: Final = 1e-3  # relative error of a bias that has a norm in it


@dataclass(frozen=True, slots=True)
class FoldedNorm:
    """A norm that multiplies each channel and adds to it.

    Attributes:
        site: Its site, the reference's.
        key: Key text of its result.
        factors: What it multiplies by, `[channels]`, float64.
        shifts: What it adds then.
    """

    site: str
    key: str
    factors: Array
    shifts: Array


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation that cuts results off.

    Attributes:
        site: Its site, the reference's.
        key: Key text of its result.
        ends: What its results lie between.
        is_held: Whether the target has a tensor in the place of its result.
    """

    site: str
    key: str
    ends: tuple[float, float]
    is_held: bool


@dataclass(frozen=True, slots=True)
class LayerParts:
    """What a layer may have in it besides its weight, in the order of execution.

    Attributes:
        norm: A batch norm behind it in the reference, that the target may have folded; None if there is none.
        activation: An activation behind the layer alone, that the target computes in it; None if it does not.
        behind_norm: The same behind the norm.
    """

    norm: FoldedNorm | None = None
    activation: Activation | None = None
    behind_norm: Activation | None = None


def layer_parts(reference: Archive, target: Archive, sites: Collection[str]) -> Mapping[str, LayerParts]:
    """Find what layers of a target may have in them, by the key text of the layer's result.

    Args:
        reference: The trusted archive.
        target: The archive under test, under the reference's keys.
        sites: Those of the layers.
    """
    return dict(_Parts(reference, target).of_layers(sites))


class _Parts:
    """The modules that the reference has behind others, by what they are given."""

    def __init__(self, reference: Archive, target: Archive) -> None:
        self._reference, self._target = reference, target
        self._results: dict[tuple[str, object], Record] = {}
        self._alike: dict[object, list[Record]] = defaultdict(list)
        self._users: dict[object, list[Record]] = defaultdict(list)
        self._parameters: dict[tuple[str, str], Record] = {}
        for record in reference.records:
            key = record.key
            if is_parameter(key) and record.stored:
                self._parameters[key.site, key.slot] = record
            if not record.stored or not record.digest or not record.dtype.is_inexact:
                continue
            if is_result(key):
                self._results[key.site, place_in_run(key)] = record
                self._alike[contents_of(record)].append(record)
            elif key.slot.startswith("input"):
                self._users[contents_of(record)].append(record)

    def of_layers(self, sites: Collection[str]) -> Iterator[tuple[str, LayerParts]]:
        """Yield key texts of results of layers, and what these may have in them."""
        for (site, _), record in self._results.items():
            if site not in sites or record.key.text not in self._target:
                continue
            try:
                norm, result = self._norm(record)
                alone = self._activation(record, record)
                behind = None if result is None else self._activation(result, record)
            except (OSError, ReadError):  # the comparison says so
                continue
            if norm or alone:
                yield record.key.text, LayerParts(norm, alone, behind)

    def _behind(self, record: Record, classes: Collection[str]) -> Record | None:
        """The result of the module of a class that is given what a record holds."""
        for user in self._users[contents_of(record)]:
            module = self._reference.info.modules.get(user.key.site)
            if module is not None and module.short_class in classes:
                return self._results.get((user.key.site, place_in_run(user.key)))
        return None

    def _norm(self, record: Record) -> tuple[FoldedNorm | None, Record | None]:
        """The norm behind a result, and what it makes; None for one that the target has itself."""
        result = self._behind(record, _NORMS)
        is_own = result is not None and result.key.text in self._target and not self._is_in(result, record)
        if result is None or (is_own and not self._is_same(result, record)):
            return None, None
        site = result.key.site
        slots = ("param.weight", "param.bias", "buffer.running_mean", "buffer.running_var")
        held = (self._parameters.get((site, slot)) for slot in slots)
        weight, bias, mean, variance = (
            None if one is None else floats_of(self._reference, one) for one in held
        )
        if mean is None or variance is None:
            return None, None
        epsilon = self._reference.info.modules[site].settings.get("eps", _EPSILON)
        factors = 1 / np.sqrt(variance + float(epsilon))
        factors = factors if weight is None else factors * weight
        shifts = -mean * factors + (0.0 if bias is None else bias)
        return FoldedNorm(site, result.key.text, factors, shifts), result

    def _is_same(self, result: Record, layer: Record) -> bool:
        """Whether the target has a layer's result in the place of one of the reference, or of its like.

        A module around has the result of the last one in it.
        """
        theirs = self._target.get(layer.key.text)
        places = [each.key.text for each in (result, *self._alike[contents_of(result)])]
        held = [self._target.get(text) for text in places if text in self._target and text != layer.key.text]
        if result.key.text in self._target:
            held = held[:1]
        return theirs.stored and any(own.digest and contents_of(own) == contents_of(theirs) for own in held)

    def _is_in(self, result: Record, layer: Record) -> bool:
        """Whether an operation within a layer of the target is what makes a result of the reference."""
        links = self._target.links if isinstance(self._target, MappedArchive) else {}
        link, own = links.get(result.key.text), links.get(layer.key.text)
        site = layer.key.site if own is None else own.target[0].key.site
        return link is not None and link.target[0].key.site.startswith(f"{site}:")

    def _activation(self, before: Record, layer: Record) -> Activation | None:
        """The activation behind a result of the reference that is a part of a layer in the target.

        The target has the same as results of both, and what it cuts off is most of how they differ; or the
        class of its layer says so.
        """
        result = self._behind(before, _ENDS)
        if result is None:
            return None
        modules = self._reference.info.modules, self._target.info.modules
        ends = _ENDS[modules[0][result.key.site].short_class]
        is_held = self._is_same(result, layer)
        own = modules[1].get(layer.key.site)
        if own is not None and "ReLU" in own.short_class:
            return Activation(result.key.site, result.key.text, ends, is_held)
        if not is_held:
            return None
        wanted, whole = (floats_of(self._reference, each) for each in (result, before))
        values = floats_of(self._target, self._target.get(layer.key.text))
        if wanted is None or whole is None or values is None or wanted.shape != values.shape:
            return None
        if np.linalg.norm(values - wanted) > _MOST * np.linalg.norm(values - whole):
            return None
        return Activation(result.key.site, result.key.text, ends, is_held=True)


def is_folded_bias(norm: FoldedNorm, ours: Array | None, theirs: Array) -> bool:
    """Whether a bias is the one that a layer has with a norm in it.

    Args:
        norm: The norm.
        ours: The bias of the reference's layer, `[channels]`; None if it has none.
        theirs: The target's.
    """
    wanted = norm.shifts + (0.0 if ours is None else ours * norm.factors)
    if wanted.shape != theirs.shape:
        return False
    return bool(np.linalg.norm(theirs - wanted) <= _SAME_BIAS * np.linalg.norm(wanted))
