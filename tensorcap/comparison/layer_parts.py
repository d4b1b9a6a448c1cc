"""Modules of a reference that are a part of the layer before them in a target: norms and activations.

A batch norm in inference multiplies each channel and adds to it, and quantisers fold it into the weight and
the bias; they cut off results in the layer itself, where the reference has a ReLU behind it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tensorcap.alignment import MappedArchive
from tensorcap.comparison.layer_errors import LayerError
from tensorcap.comparison.layer_products import BIAS, Product, floats_of, place_in_run
from tensorcap.comparison.record_index import RecordIndex
from tensorcap.runs import contents_of, is_parameter, is_result
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import ReadError
from tensorcap_formats.keys import Key
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

        The target has the same as results of both, or its results lie between the ends that the activation
        cuts at; and what that cuts off is most of how they differ. Or the class of its layer says so.
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
        wanted, whole = (floats_of(self._reference, each) for each in (result, before))
        values = floats_of(self._target, self._target.get(layer.key.text))
        if wanted is None or whole is None or values is None or wanted.shape != values.shape:
            return None
        if np.linalg.norm(values - wanted) > _MOST * np.linalg.norm(values - whole):
            return None
        is_cut = values.min(initial=math.inf) >= ends[0] and values.max(initial=-math.inf) <= ends[1]
        return Activation(result.key.site, result.key.text, ends, is_held) if is_held or is_cut else None


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


def with_parts(product: Product, parts: LayerParts | None, norm: FoldedNorm | None) -> Product:
    """A product with the norm and the activation that are a part of the layer."""
    if parts is None:
        return product
    activation = parts.activation if norm is None else parts.behind_norm
    if norm is not None:
        product = product.with_norm(norm.factors, norm.shifts)
    if activation is not None:
        key = activation.key if activation.is_held else product.key
        product = product.with_activation(key, activation.ends)
    return product


@dataclass(slots=True)
class Inside:
    """What lies within layers of which norms and activations are a part, and why it differs.

    Attributes:
        ours: The reference's records.
        theirs: The target's, under the reference's keys.
        undone: Why tensors differ, by key text.
        inside: Key texts of what has no counterpart: what the reference makes before the last part.
        rounded: What rounding makes of tensors that hold what the last part makes, by key text, relative.
        results: The own error of the layer, by the key text of each of them in whose place the target has its
            result.
        calls: Key texts of the results of layers that were added.
    """

    ours: RecordIndex
    theirs: RecordIndex
    undone: dict[str, str] = field(default_factory=dict)
    inside: set[str] = field(default_factory=set)
    rounded: dict[str, float] = field(default_factory=dict)
    results: dict[str, LayerError] = field(default_factory=dict)
    calls: set[str] = field(default_factory=set)

    def add(
        self, call: str, product: Product, error: LayerError, parts: LayerParts, norm: FoldedNorm | None
    ) -> None:
        """Add a call of a layer.

        Args:
            call: Key text of the layer's own result.
            product: The call, with the parts.
            error: Its own error.
            parts: What the layer may have in it.
            norm: The norm that it has; None if it has none.

        Raises:
            OSError, ReadError: A bias cannot be read.
        """
        reference, target = self.ours.archive, self.theirs.archive
        self.calls.add(call)
        layer = target.get(call)
        activation = parts.activation if norm is None else parts.behind_norm
        behind = [part for part in (norm, activation) if part is not None]
        if not behind:
            return
        made = [call, *(part.key for part in behind)]
        same = [[record.key.text for record in self.ours.holders(reference.get(key))] for key in made]
        is_good = error.finding.status == "within-rounding"
        verb = "is a part" if len(behind) == 1 else "are parts"
        reason = f"in the target {' and '.join(part.site for part in behind)} {verb} of it"
        inner = {text for texts in same[:-1] for text in texts}
        self.inside |= inner
        self.undone |= {text: reason for text in inner if is_good or text != product.key}
        self.rounded |= {text: error.expected for text in same[-1] if text != product.key}
        there = [target.get(text) for text in same[-1] if text in target and layer.digest]
        held = [record.key.text for record in there if contents_of(record) == contents_of(layer)]
        self.results |= dict.fromkeys(held, error)
        if norm is None:
            return
        site = Key.parse(call).site
        folded = f"in the target {norm.site} is folded into {site}"
        self.undone |= {record.key.text: folded for record in self.ours.parameters(norm.site).values()}
        bias, other = (index.parameters(site).get(BIAS) for index in (self.ours, self.theirs))
        if bias is None or other is None:
            return
        made_of, theirs = floats_of(reference, bias), floats_of(target, other)
        if theirs is not None and is_folded_bias(norm, made_of, theirs):
            self.undone[bias.key.text] = folded
