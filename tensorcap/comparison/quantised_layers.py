"""Quantised layers of a target: weights against the reference's, and results against what rounding predicts.

A weight has to be the reference's, rounded to the numbers that it may have (`weight_rounding`). A layer's own
error, on the input that it was given, has to be what the errors of its weight make of that input, with what
rounding its inputs and results adds: `|(W' - W) x|`. Both are known from the records of two archives.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Final

import numpy as np

from tensorcap.comparison.column_factors import (
    Factors,
    column_factors,
    columns_of_inputs,
    divided_parameters,
    divided_tensors,
    has_divided_maker,
    is_divided_by,
)
from tensorcap.comparison.cut_values import UsedRange, used_range
from tensorcap.comparison.fused_attentions import fused_attentions
from tensorcap.comparison.injected import Injected
from tensorcap.comparison.layer_errors import LayerError, input_variances, layer_error, row_error, step_error
from tensorcap.comparison.layer_mistakes import LayerMistake, describe_unfinite
from tensorcap.comparison.layer_parts import FoldedNorm, Inside, layer_parts, with_parts
from tensorcap.comparison.layer_products import (
    BIAS,
    Call,
    LookUp,
    Product,
    first_rows,
    floats_of,
    layer_products,
    looked_up,
    multiply,
    single_calls,
)
from tensorcap.comparison.other_weights import OtherWeights
from tensorcap.comparison.pair import Decision, Finding, Pair, decide
from tensorcap.comparison.policy import POLICY, Precision
from tensorcap.comparison.quantised_weights import output_steps, packed_weights, quantised_bits, weight_errors
from tensorcap.comparison.record_index import RecordIndex
from tensorcap.comparison.rounded_nodes import (
    RoundedNode,
    inner_roundings,
    lost_operands,
    rounded_nodes,
    rounded_tensors,
)
from tensorcap.comparison.rounded_paths import rounded_paths
from tensorcap.comparison.shared_inputs import FloatLayer, SharedInputs, left_out_text
from tensorcap.comparison.stepped_tensors import stepped_tensors
from tensorcap.comparison.weight_judge import (
    PackedWeights,
    QuantisedWeight,
    held_weight,
    is_rounded,
    judge_weight,
    judge_with_norm,
    with_unit,
)
from tensorcap.comparison.weight_mistakes import WeightMistake, find_other_layer, find_weight_mistake
from tensorcap.comparison.weight_rounding import WeightNumbers
from tensorcap.runs import Contents, contents_of, enclosing_sites, is_parameter, is_result, rms_of
from tensorcap.wording import counted
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import ReadError
from tensorcap_formats.keys import Key, escape
from tensorcap_formats.records import Record

_RANGES: Final = 4  # of a run, to know what is usual
_USED: Final = 0.5  # of their range, that values of most modules need
_FOLDED: Final = "each column times a number that its input is divided by"
_WRONG: Final = ("suspect", "diverged")
_OF_ERRORS: Final = ("gain", "gain_tail", "growth", "wide_error")  # tests of a pair's row errors alone
_OF_FLOATS: Final = "its input is divided by what its columns are multiplied by"


@dataclass(frozen=True, slots=True)
class QuantisedLayers:
    """The quantised layers of a target whose weights both archives hold.

    Attributes:
        weights: What became of each weight, by key text.
        results: The own error of each call of a layer, by the key text of its result.
        predicted: By site, the largest error of its results that rounding predicts, relative.
        undone: Why tensors differ and nothing is wrong, by key text: columns of an input were divided by
            numbers that its layer's weight was multiplied by before it was rounded (AWQ, SmoothQuant).
        divisors: Of these, what the columns of inputs, and of what holds the same, were divided by, or the
            channels of a convolution's: it broadcasts over the tensor.
        folded: Key texts of the results of such layers.
        rounded_to: What each weight is the reference's rounded to, by key text, whatever its columns were
            multiplied by: see `QuantisedWeight`.
        of_weights: By site, the largest error of a weight that is the reference's, rounded, relative.
        inner: By site, what rounding between the nodes of a module does to its results, relative.
        lost: What is lost in a sum of the module that makes a result, by the key text of that.
        rounded: What rounding to whole steps makes of tensors that code between modules rounds, by key text,
            relative.
        wide: Ranges that are far wider than what the module of a result needs on both sides, by key text.
        spare: Modules whose values need a small part of the range that is said for them, by site, in words.
        unfinite: What layers do whose results are not finite, by key text.
        inside: Key texts of what the reference makes within what is one layer of the target, as what a norm
            is given that is folded into the weight: nothing of the target stands in their place.
    """

    weights: Mapping[str, QuantisedWeight] = field(default_factory=dict)
    results: Mapping[str, LayerError] = field(default_factory=dict)
    predicted: Mapping[str, float] = field(default_factory=dict)
    undone: Mapping[str, str] = field(default_factory=dict)
    divisors: Mapping[str, Array] = field(default_factory=dict)
    folded: frozenset[str] = frozenset()
    rounded_to: Mapping[str, str] = field(default_factory=dict)
    of_weights: Mapping[str, float] = field(default_factory=dict)
    inner: Mapping[str, float] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)
    rounded: Mapping[str, float] = field(default_factory=dict)
    wide: Mapping[str, UsedRange] = field(default_factory=dict)
    spare: Mapping[str, str] = field(default_factory=dict)
    unfinite: Mapping[str, LayerMistake] = field(default_factory=dict)
    inside: frozenset[str] = frozenset()

    @property
    def own_errors(self) -> Mapping[str, float]:
        """The largest error that rounding predicts of a module's results, by site, relative."""
        sites = {*self.predicted, *self.inner}
        return {site: max(self.predicted.get(site, 0.0), self.inner.get(site, 0.0)) for site in sites}

    def findings(self, key: str) -> list[Finding]:
        """What is known of the own error of a result in few bits."""
        found = [self.results[key].finding] if key in self.results else []
        if key in self.lost:
            found.append(POLICY.quantised.finding("quantisation", math.inf, self.lost[key]))
        if key in self.wide:
            used = self.wide[key]
            text = f"{used.text}: its steps are {1 / used.share:.2g} times as wide as they have to be"
            found.append(POLICY.quantised.finding("quantisation", 1 / used.share, text))
        return found

    @property
    def warnings(self) -> Iterator[str]:
        """What was taken for the choice of a calibration, a sentence for each kind."""
        cut = {key: weight for key, weight in self.weights.items() if weight.rounding.cut is not None}
        if cut:
            key, weight = max(cut.items(), key=lambda entry: entry[1].rounding.cut or 0.0)
            yield (
                f"Ranges cut values of {counted(len(cut), 'weight')}, as a search may choose: {key}: "
                f"{weight.finding.text}."
            )
        chosen = {key: error for key, error in self.results.items() if error.is_cut_by_choice}
        if chosen:
            key, error = max(chosen.items(), key=lambda entry: entry[1].ratio)
            yield (
                f"Ranges cut values of {counted(len(chosen), 'layer')}, as a calibration may choose: {key}: "
                f"{error.finding.text}."
            )
        if self.spare:
            site, text = next(iter(self.spare.items()))
            yield (
                f"Ranges of {counted(len(self.spare), 'module')} are far wider than what they hold, as "
                f"scales of another tensor are: {site}: {text}."
            )

    def explain(self, pairs: Iterable[Pair]) -> list[Pair]:
        """Make `explained` what is undone by the layer that is given it; say why results are not finite.

        Errors of a tensor with divided columns were judged without that (`Padding.without`): what is wrong
        with it besides is not explained.
        """
        return [self._explained(pair) for pair in pairs]

    def _explained(self, pair: Pair) -> Pair:
        is_divided = pair.key in self.divisors
        if pair.key in self.undone and (pair.status in _WRONG or (is_divided and pair.is_green)):
            if is_divided and any(f.test in _OF_ERRORS and f.status in _WRONG for f in pair.findings):
                return pair
            return decide(pair, Decision("agreement", "explained", self.undone[pair.key], pair.findings))
        if pair.key in self.unfinite and pair.status == "nonfinite":
            return decide(pair, Decision("values", "nonfinite", self.unfinite[pair.key].text, pair.findings))
        return pair


def measure_layers(
    reference: Archive,
    target: Archive,
    precision: Precision | None,
    injected: Injected | None = None,
) -> QuantisedLayers:
    """Measure the quantised layers of a target.

    1. Each weight is held against the reference's, and results of its layer against what it makes of inputs.
    2. Layers of unknown weights that round their inputs have errors that statistics predict.
    3. Modules that only round are held against what they are given.
    4. What code between modules rounds is found in the values of tensors.

    Args:
        reference: The trusted archive.
        target: The archive under test, under the reference's keys.
        precision: What both runs computed in, rounded weights aside.
        injected: Which inputs of the target were replaced by the reference's; None if none were.
    """
    steps = output_steps(target.info)
    nodes = list(rounded_nodes(target))
    is_of_floats = not packed_weights(target.info) and not steps and not nodes
    if is_of_floats and injected:
        return QuantisedLayers()
    measurement = _Measurement(reference, target, precision, injected)
    if is_of_floats:
        measurement.measure_floats()
        return measurement.layers({}, {})
    measurement.measure_weights()
    if not injected:
        measurement.measure_floats()
        measurement.measure_attentions()
    measured = set(measurement.predicted)
    measurement.estimate_layers(besides=measured)
    measurement.measure_roundings(steps)
    measurement.explain_parts(nodes)
    measurement.follow_graph()
    inner = {site: error for site, error in inner_roundings(target, nodes).items() if site not in measured}
    if steps and not nodes:
        for site, error in measurement.measure_code(steps):
            if site not in measured:
                inner[site] = max(error, inner.get(site, 0.0))
    lost = dict(_lost_in_results(reference, target, nodes))
    return measurement.layers(inner, lost)


@dataclass(slots=True)
class _Layer:
    """A layer with a weight in few bits.

    Attributes:
        site: Its site.
        ours: The reference's weight.
        theirs: The target's.
        trusted: What the target's has to be, rounded, `[outputs, inputs]`, float64: the reference's, with
            what the target has folded in.
        weight: The target's, in the same shape.
        shaped: The same in its own shape.
        products: Its calls, if it is linear or a convolution, with the parts that it has.
        calls: Key texts of its own results in these.
        lookups: Its calls, if it is a table.
        norm: The norm that is folded in; None if none is.
        is_right: Whether the weight is what it has to be, rounded.
        mistake: What is wrong with it, if that is known before; None if not.
    """

    site: str
    ours: Record
    theirs: Record
    trusted: Array
    weight: WeightNumbers
    shaped: WeightNumbers
    products: list[Product]
    calls: list[str]
    lookups: list[LookUp]
    norm: FoldedNorm | None
    is_right: bool
    mistake: WeightMistake | None = None


class _Measurement:
    """The quantised layers of a target as they are measured, with the attributes of `QuantisedLayers`."""

    def __init__(
        self, reference: Archive, target: Archive, precision: Precision | None, injected: Injected | None
    ) -> None:
        self.weights: dict[str, QuantisedWeight] = {}
        self.results: dict[str, LayerError] = {}
        self.predicted: dict[str, float] = {}
        self.undone: dict[str, str] = {}
        self.divisors: dict[str, Array] = {}
        self.folded: set[str] = set()
        self.rounded_to: dict[str, str] = {}
        self.of_weights: dict[str, float] = {}
        self.rounded: dict[str, float] = {}
        self.unfinite: dict[str, LayerMistake] = {}
        self._reference, self._target = reference, target
        self._precision, self._injected = precision, injected
        self._ours, self._theirs = RecordIndex(reference), RecordIndex(target)
        self._packed = PackedWeights(self._theirs)
        self._sites = {site for site, _ in self._packed.names}
        calls = [
            single_calls(archive, self._sites | set(output_steps(target.info)))
            for archive in (reference, target)
        ]
        self._our_calls, self._their_calls = calls
        self._others = OtherWeights(reference)
        self._parts = layer_parts(reference, target, self._sites)
        self._inside = Inside(self._ours, self._theirs)
        self._divided: dict[Contents, tuple[str, Array]] = {}  # inputs, with whose weight has the factors
        self._as_they_are: list[tuple[Record, Record]] = []  # weights that are right without factors

    def measure_weights(self) -> None:
        """Measure each weight in few bits of which both archives hold the values, and its layer.

        1. It is held against the reference's, or that with the norm behind it folded in.
        2. If it is not that, and columns of the input are those of the reference times numbers by which
           columns of the weight were divided, it is held against that.
        3. If the reference's result is the product of its weight and input, and a bias, the target's own
           error is its result less such a product of the input that it was given.
        4. One that is right without factors, and is given an input that is divided for the sake of another
           weight, is held against what the factors make of it.
        """
        for site, name in sorted(self._packed.names):
            with suppress(OSError, ReadError):  # the comparison says so
                self._measure_weight(site, f"param.{escape(name)}")
        for ours, theirs in self._as_they_are if self._divided else ():
            with suppress(OSError, ReadError):
                self._measure_left_out(ours, theirs)

    def _measure_weight(self, site: str, slot: str) -> None:
        ours, theirs = (index.parameters(site).get(slot) for index in (self._ours, self._theirs))
        if ours is None or theirs is None or ours.shape != theirs.shape:
            return
        trusted = floats_of(self._reference, ours)
        if trusted is None:
            return
        wide = self._packed.judge_wide(theirs, trusted, self._their_calls.get(site, {}).values())
        if wide is not None:
            self.weights[ours.key.text] = wide
            return
        weight = self._packed.read(theirs)
        if weight is None:
            return
        layer = self._judge(ours, theirs, trusted, with_unit(weight, self._precision))
        if layer.is_right:
            self._as_they_are.append((ours, theirs))
        else:
            self._find_factors(layer)
        self._measure_calls(layer)

    def _measure_left_out(self, ours: Record, theirs: Record) -> None:
        """Measure a layer whose input is divided by what columns of its weight are not multiplied by."""
        inputs = self._inputs(ours.key.site)
        divided = [self._divided[place] for place in map(contents_of, inputs) if place in self._divided]
        trusted, weight = floats_of(self._reference, ours), self._packed.read(theirs)
        if not divided or trusted is None or weight is None:
            return
        layer = self._judge(ours, theirs, trusted, with_unit(weight, self._precision))
        site, factors = divided[0]
        indices = self._ours, self._theirs
        if not layer.products or not (
            is_divided_by(layer.products[0], factors) or has_divided_maker(*indices, inputs, factors)
        ):
            return
        scaled = judge_weight(layer.trusted * factors, layer.weight, layer.products[0].x)
        if is_rounded(scaled.rounding):
            return
        self._multiply(layer, Factors(factors, factors), scaled)
        layer.is_right = False
        layer.mistake = WeightMistake("weight-columns", left_out_text(site))
        self._measure_calls(layer)

    def measure_attentions(self) -> None:
        """Say what attentions do otherwise that are fused with their projections."""
        with suppress(OSError, ReadError):  # the comparison says so
            self.results |= dict(fused_attentions(self._ours, self._theirs))

    def measure_floats(self) -> None:
        """Measure layers in floats that share a divided input, if one of them lacks the factors."""
        shared = SharedInputs(self._ours, self._theirs, self._sites)
        measured: list[tuple[FloatLayer, Array, dict[str, LayerError]]] = []
        with suppress(OSError, ReadError):  # the comparison says so
            for contents, layers in shared.groups(self._divided):
                multiplied = ((la.site, la.factors) for la in layers if la.factors is not None)
                known = self._divided.get(contents) or next(multiplied)
                for layer in layers:
                    found = dict(shared.errors(layer, known[1], known[0], self._precision))
                    measured.append((layer, known[1], found))
        if not any(error.mistake.kind for _, _, errors in measured for error in errors.values()):
            return
        for layer, factors, errors in measured:
            self.results |= errors
            self.folded |= errors.keys()
            if errors and layer.factors is not None:
                self._explain_division(layer.ours, shared.inputs(layer), Factors(factors, factors))
                self.undone[layer.ours.key.text] = _OF_FLOATS

    def _inputs(self, site: str) -> list[Record]:
        """What the reference's layer was given."""
        return [call.input for call in self._our_calls.get(site, {}).values()]

    def _multiply(self, layer: _Layer, factors: Factors, judged: QuantisedWeight) -> None:
        """Hold a weight, and what its layer makes, against the reference's with columns multiplied."""
        layer.trusted = layer.trusted * factors.factors
        self.weights[layer.ours.key.text] = replace(judged, text=f"{judged.text}, {_FOLDED}")
        layer.products = [
            replace(p, wanted=np.clip(multiply(p.x, layer.trusted) + p.bias, *p.ends)) for p in layer.products
        ]
        self.folded |= {product.key for product in layer.products}
        self._explain_division(layer.ours, self._inputs(layer.site), factors)

    def _judge(self, ours: Record, theirs: Record, trusted: Array, weight: WeightNumbers) -> _Layer:
        """Judge a weight by itself, and read the calls of its layer."""
        site, text = ours.key.site, ours.key.text
        products = self._products(site, trusted)
        lookups = list(looked_up(self._ours, self._target, site, trusted))
        inputs = products[0].x if products else None
        parts = [self._parts.get(product.key) for product in products]
        behind = next((part.norm for part in parts if part is not None and part.norm is not None), None)
        judged, norm = judge_with_norm(trusted, weight, inputs, behind)
        self.weights[text], self.rounded_to[text] = judged, judged.rounded_to
        is_right = is_rounded(judged.rounding)
        shaped, trusted, weight = weight, trusted.reshape(len(trusted), -1), weight.matrix
        if norm is not None:
            trusted = trusted * norm.factors[:, None]
        if is_right and (size := float(np.linalg.norm(trusted))):
            off = float(np.linalg.norm(weight.values - trusted)) / size
            self.of_weights[site] = max(off, self.of_weights.get(site, 0.0))
        calls = [product.key for product in products]
        products = [with_parts(product, part, norm) for product, part in zip(products, parts, strict=True)]
        return _Layer(site, ours, theirs, trusted, weight, shaped, products, calls, lookups, norm, is_right)

    def _products(self, site: str, trusted: Array) -> list[Product]:
        """The calls of a layer that is linear or a convolution."""
        calls = self._our_calls.get(site, {}), self._their_calls.get(site, {})
        module, theirs = (archive.info.modules.get(site) for archive in (self._reference, self._target))
        products = layer_products(self._reference, self._target, trusted, *calls, self._injected, module)
        if theirs is not None and "input_range" in theirs.settings:
            return [product.with_inputs_within(theirs.settings, trusted) for product in products]
        return list(products)

    def _find_factors(self, layer: _Layer) -> None:
        """Hold a weight against the reference's with columns multiplied, if that makes it right."""
        site, inputs = layer.site, self._inputs(layer.site)
        indices = self._ours, self._theirs
        for factors in column_factors(*indices, site, layer.trusted, layer.weight, layer.products, inputs):
            scaled = judge_weight(layer.trusted * factors.factors, layer.weight, layer.products[0].x)
            if scaled.finding.status != "within-rounding":
                continue
            layer.is_right = True
            if factors.is_inside:
                layer.trusted = layer.trusted * factors.factors
                self.weights[layer.ours.key.text] = replace(scaled, text=f"{scaled.text}, {_FOLDED}")
                layer.products = [replace(p, x=p.x / factors.factors) for p in layer.products]
                return
            self._multiply(layer, factors, scaled)
            for given in (record for record in inputs if record.digest):
                self._divided.setdefault(contents_of(given), (site, factors.factors))
            return

    def _explain_division(self, weight: Record, inputs: Collection[Record], factors: Factors) -> None:
        """Explain that an input is divided by what columns of a weight of the reference are multiplied by."""
        channels, space = weight.shape[1], weight.shape[2:]
        divisors = np.median(factors.divisors.reshape(channels, -1), axis=1)
        divisors = divisors.reshape(channels, *(1 for _ in space))
        divided = list(divided_tensors(self._ours, self._target, inputs, divisors))
        self.divisors |= dict.fromkeys(divided, divisors)
        divided += divided_parameters(self._ours, self._theirs, inputs, factors.factors)
        reason = (
            f"its columns are divided by what those of the weight of {weight.key.site} were multiplied by"
        )
        self.undone |= dict.fromkeys(divided, reason)

    def _measure_calls(self, layer: _Layer) -> None:
        """Measure the own error of each call of a layer; then look for what is wrong with its weight."""
        module = self._target.info.modules.get(layer.site)
        of_bias = self._bias_error(layer.site)
        beside = cache(partial(self._packed.held_beside, layer.theirs))
        errors = {
            product.key: layer_error(
                product,
                layer.trusted,
                layer.weight,
                module,
                self._precision,
                of_bias,
                beside,
                is_right=layer.is_right,
            )
            for product in layer.products
        }
        text = layer.ours.key.text
        if not layer.is_right and errors and all(error.is_of_more for error in errors.values()):
            ratio = max(error.finding.value for error in errors.values())
            self.weights[text] = replace(self.weights[text], of_results=ratio)
        elif not layer.is_right:
            self.weights[text] = replace(self.weights[text], mistake=self._find_mistake(layer))
        if not layer.products:
            self.unfinite |= self._unfinite_results(layer)
        for key, error in errors.items():
            self._add(layer.site, key, error)
        for call, product in zip(layer.calls, layer.products, strict=True):
            if call in self._parts:
                self._inside.add(call, product, errors[product.key], self._parts[call], layer.norm)
        for lookup in layer.lookups:
            error = row_error(lookup, layer.trusted, layer.weight, module, is_right=layer.is_right)
            self._add(layer.site, lookup.key, error)

    def _find_mistake(self, layer: _Layer) -> WeightMistake:
        """What is wrong with a weight: mistakes are undone, and other weights of both sides looked at."""
        if layer.mistake is not None:
            return layer.mistake
        inputs = layer.products[0].x if layer.products else None
        mistake = find_weight_mistake(layer.trusted, layer.shaped, inputs)
        if mistake.kind == "weight-columns" and layer.products:
            mistake = replace(mistake, text=mistake.text + columns_of_inputs(layer.products[0]))
        if not mistake.text:
            mistake = held_weight(self._others, layer.ours, self._target, layer.theirs, layer.weight)
        if not mistake.held:
            others = self._packed.others_of_shape(layer.theirs, layer.weight.values.shape[1])
            mistake = find_other_layer(layer.trusted, layer.weight, mistake, others)
        return mistake

    def _unfinite_results(self, layer: _Layer) -> Iterator[tuple[str, LayerMistake]]:
        """Yield key texts of results that are not finite, and which reading of the weight makes them so."""
        for place, call in self._our_calls.get(layer.site, {}).items():
            other = self._their_calls.get(layer.site, {}).get(place)
            if other is None or other.output.dtype.kind != "float":
                continue
            x, y = call.values(self._reference)
            given = floats_of(self._target, other.input)
            made = self._target.load(other.output).astype(np.float64)
            if x is None or y is None or given is None or np.isfinite(made).all():
                continue
            x, y, given, made = (first_rows(side) for side in (x, y, given, made))
            shapes = x.shape[1], y.shape[1], given.shape[1], made.shape[1]
            if shapes != (layer.trusted.shape[1], len(layer.trusted)) * 2:
                continue
            if len(x) != len(y) or len(given) != len(made):
                continue
            bias = (y - multiply(x, layer.trusted)).mean(axis=0)
            mistake = describe_unfinite(given, made, bias, layer.weight)
            if mistake.text:
                yield call.output.key.text, mistake

    def _add(self, site: str, key: str, error: LayerError) -> None:
        """Add the own error of a call of a module."""
        self.results[key] = error
        self._predict(site, error.expected)

    def _predict(self, site: str, error: float) -> None:
        self.predicted[site] = max(error, self.predicted.get(site, 0.0))

    def _bias_error(self, site: str) -> Array | None:
        """What a bias in few bits is off by, `[outputs]`; None if it is not the reference's, rounded."""
        ours, theirs = (index.parameters(site).get(BIAS) for index in (self._ours, self._theirs))
        judged = None if ours is None else self.weights.get(ours.key.text)
        if judged is None or judged.finding.status != "within-rounding":
            return None
        if ours is None or theirs is None or ours.shape != theirs.shape:
            return None
        sides = floats_of(self._reference, ours), floats_of(self._target, theirs)
        return None if sides[0] is None or sides[1] is None else sides[1] - sides[0]

    def estimate_layers(self, *, besides: Collection[str]) -> None:
        """Predict the errors of layers by statistics of their weights.

        Args:
            besides: Sites of which more is known.
        """
        for site, error in _errors_by_statistics(
            self._reference, self._target, self._our_calls, besides=besides
        ):
            self._predict(site, error)

    def measure_roundings(self, steps: Mapping[str, float]) -> None:
        """Measure modules without weights in few bits that round what they make.

        Args:
            steps: By site, the step that a module rounds its results to.
        """
        for site, step in steps.items():
            if site in self._sites:
                continue
            settings = self._target.info.modules[site].settings
            for key, wanted, made in self._handed_on(site):
                self._add(site, key, step_error(wanted, made, step, settings))
            if site not in self.predicted and (size := self._least_size(site)):
                self.predicted[site] = step / math.sqrt(12) / size

    def _handed_on(self, site: str) -> Iterator[tuple[str, Array, Array]]:
        """Yield the calls of a module of which the reference's hands on what it is given.

        They are the key text of the result, what the target should make, and what it makes.
        """
        for place, call in self._our_calls.get(site, {}).items():
            other = self._their_calls.get(site, {}).get(place)
            if other is None or (self._injected and not self._injected.is_made_of_replaced(other.input.key)):
                continue
            try:
                x, y, x_target, y_target = (*call.values(self._reference), *other.values(self._target))
            except (OSError, ReadError):  # the comparison says so
                continue
            if x is None or y is None or x_target is None or y_target is None or not np.array_equal(x, y):
                continue
            yield call.output.key.text, x if self._injected else x_target, y_target

    def _least_size(self, site: str) -> float:
        """The least RMS of a module's results of floats; 0 if the reference has none.

        Of each the larger one of both sides: one that the target loses does not widen its own limit.
        """
        sizes: list[float] = []
        for record in self._ours.tensors(site):
            if is_result(record.key) and record.dtype.kind == "float":
                other = self._target.get(record.key.text) if record.key.text in self._target else None
                sizes.append(max(rms_of(each) for each in (record, other) if each is not None))
        return min(filter(None, sizes), default=0.0)

    def explain_parts(self, nodes: Iterable[RoundedNode]) -> None:
        """Add what norms and activations are that a layer of the target has in it, and what nodes round.

        Args:
            nodes: Those between the modules that round what they make.
        """
        self.undone |= {
            key: f"in the target {part.activation.site} is a part of it"
            for key, part in self._parts.items()
            if part.activation is not None and key not in self._inside.calls
        }
        self.undone |= self._inside.undone
        self.results |= self._inside.results
        self.rounded |= {
            k: error for k, error in rounded_tensors(self._target, nodes) if k not in self.results
        }
        self.rounded |= self._inside.rounded

    def follow_graph(self) -> None:
        """Add what nodes of a graph round on the way to results of the modules around them."""
        paths = rounded_paths(self._reference, self._target, self.predicted, self._sites)
        for key, error in paths:
            if key not in self.results:
                self.rounded[key] = max(error, self.rounded.get(key, 0.0))

    def measure_code(self, steps: Mapping[str, float]) -> Iterator[tuple[str, float]]:
        """Measure what code between modules rounds to whole steps; yield sites and what that makes, relative.

        Args:
            steps: By site, the step that a module rounds its results to itself.
        """
        known = {
            record.digest
            for record in self._target.records
            if record.digest and record.key.site in steps and is_result(record.key)
        }
        for tensor in stepped_tensors(self._reference, self._target, known):
            of_step = tensor.step / math.sqrt(12) / _row_size(tensor.values)
            self.rounded[tensor.key] = max(of_step, self.rounded.get(tensor.key, 0.0))
            if tensor.before is not None and not self._injected:
                self.results[tensor.key] = step_error(tensor.before, tensor.values, tensor.step, {})
            yield Key.parse(tensor.key).site, self.rounded[tensor.key]

    def layers(self, inner: Mapping[str, float], lost: Mapping[str, str]) -> QuantisedLayers:
        """Return what was measured.

        Args:
            inner: By site, what rounding between the nodes of a module does to its results, relative.
            lost: What is lost in a sum, by the key text of the result that it makes.
        """
        spare = list(_spare_ranges(self._target, (self._our_calls, self._their_calls)))
        return QuantisedLayers(
            self.weights,
            self.results,
            self.predicted,
            self.undone,
            self.divisors,
            frozenset(self.folded),
            self.rounded_to,
            self.of_weights,
            inner=inner,
            lost=lost,
            rounded=self.rounded,
            spare={spare.site: spare.used.text for spare in spare if not spare.is_proven},
            wide={key: spare.used for spare in spare if spare.is_proven for key in spare.keys},
            unfinite=self.unfinite,
            inside=frozenset(self._inside.inside),
        )


@dataclass(frozen=True, slots=True)
class _SpareRange:
    """A range of a module of which its values need a small part in all calls.

    Attributes:
        site: Its site.
        used: How much they need, and the reference's if these are known.
        keys: Key texts of the module's results.
        is_proven: Whether the reference's values are known, and others of the run need most of their ranges.
    """

    site: str
    used: UsedRange
    keys: tuple[str, ...]
    is_proven: bool


def _spare_ranges(
    target: Archive, calls: Sequence[Mapping[str, Mapping[tuple[int, int, int], Call]]]
) -> Iterator[_SpareRange]:
    """Yield ranges of modules of which values need a small part.

    Inputs that are far smaller than those of the calibration need small parts of all ranges: that is no
    mistake, so that the others of the run have to need half of theirs.

    Args:
        target: The target.
        calls: The reference's, and the target's, by site.
    """
    found: list[_SpareRange] = []
    ours, theirs = calls
    for site, of_site in theirs.items():
        settings, trusted = target.info.modules[site].settings, ours.get(site, {})
        for side in ("input", "output"):
            both = [*of_site.values(), *trusted.values()]
            records = [call.input if side == "input" else call.output for call in both]
            known = [record.statistics for record in records if record.statistics is not None]
            ends = [(float(s.minimum or 0), float(s.maximum or 0)) for s in known]
            if not ends or len(ends) < len(records):
                continue
            least, most = min(low for low, _ in ends), max(high for _, high in ends)
            what = "what it is given" if side == "input" else "its results"
            used = used_range(least, most, settings.get(f"{side}_range"), what)
            if used is not None:
                keys = tuple(call.output.key.text for call in trusted.values())
                found.append(_SpareRange(site, used, keys, is_proven=len(trusted) >= len(of_site)))
    shares = sorted(spare.used.share for spare in found)
    is_typical = len(shares) >= _RANGES and shares[len(shares) // 2] >= _USED
    for spare in found:
        if spare.used.is_spare:
            yield replace(spare, is_proven=spare.is_proven and is_typical)


def _row_size(values: Array) -> float:
    """The RMS of a row, the median of those that are not zeros alone."""
    sizes = np.sqrt(np.square(values.reshape(-1, values.shape[-1])).mean(axis=1))
    return float(np.median(sizes[sizes > 0]))


def _lost_in_results(
    reference: Archive, target: Archive, nodes: Iterable[RoundedNode]
) -> Iterator[tuple[str, str]]:
    """Yield the results of modules that lose an operand of a sum, or of the nearest ones around them."""
    results: dict[tuple[int, int, str], list[str]] = defaultdict(list)
    for record in reference.records:
        if is_result(record.key) and record.key.slot in ("output", "output.0"):
            results[record.key.rank, record.key.step, record.key.site].append(record.key.text)
    for lost in lost_operands(target, nodes):
        around = (lost.module, *enclosing_sites(lost.module))
        places = ((lost.rank, lost.run_step, site) for site in around)
        for text in next((results[place] for place in places if place in results), ()):
            yield text, lost.text


def _errors_by_statistics(
    reference: Archive,
    target: Archive,
    given: Mapping[str, Mapping[tuple[int, int, int], Call]],
    *,
    besides: Collection[str],
) -> Iterator[tuple[str, float]]:
    """Yield sites of linear layers that round inputs, and the row error that rounding predicts.

    Weights are known by statistics alone: the squared error of a row is `e^2 |W|^2 + d^2 m |x|^2`, for m
    outputs and e and d the RMS of the errors of inputs and weights.

    Args:
        reference: The trusted archive.
        target: The archive under test.
        given: The reference's calls, by site and place.
        besides: Sites of which more is known, which are not read.
    """
    recorded: dict[str, list[Record]] = defaultdict(list)
    for record in reference.records:
        if is_parameter(record.key):
            recorded[record.key.site].append(record)
    for site, bits in quantised_bits(reference.info, target.info):
        settings, ours = target.info.modules[site].settings, reference.info.modules.get(site)
        has_one_scale = settings.get("one_scale") is not False
        weight = weight_errors(recorded[site], ours, bits, has_one_scale=has_one_scale)
        if weight is None or site in besides or not isinstance(settings.get("input_bits"), int):
            continue
        for call in given.get(site, {}).values():
            try:
                x, y = (None if side is None else first_rows(side) for side in call.values(reference))
            except (OSError, ReadError):  # the comparison says so
                continue
            if x is None or y is None or len(x) != len(y) or x.shape[1] != weight.shape[1]:
                continue
            squares = input_variances(x, settings) * weight.norm**2
            squares += weight.error**2 * weight.shape[0] * np.square(x).sum(axis=1)
            sizes = np.linalg.norm(y, axis=1)
            rows = np.sqrt(squares[sizes > 0]) / sizes[sizes > 0]
            if rows.size:
                yield site, max(float(np.median(rows)), float(np.quantile(rows, 0.95)) / POLICY.replayed_tail)
