"""Quantised layers of a target: weights against the reference's, and results against what rounding predicts.

A weight has to be the reference's, rounded to the numbers that it may have (`weight_rounding`). A layer's own
error, on the input that it was given, has to be what the errors of its weight make of that input, with what
rounding its inputs and results adds: `|(W' - W) x|`. Both are known from the records of two archives.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from tensorcap.comparison.clipped_weights import cut_of_choice
from tensorcap.comparison.cut_values import CutValues, cut_inputs, cut_results
from tensorcap.comparison.injected import Injected
from tensorcap.comparison.layer_parts import FoldedNorm, LayerParts, is_folded_bias, layer_parts
from tensorcap.comparison.layer_products import (
    MOST_ROWS,
    Call,
    Product,
    first_rows,
    floats_of,
    layer_products,
    multiply,
    place_in_run,
    single_calls,
)
from tensorcap.comparison.other_weights import OtherWeights
from tensorcap.comparison.pair import Decision, Finding, Pair, decide
from tensorcap.comparison.policy import POLICY, Precision
from tensorcap.comparison.quantised_weights import (
    output_steps,
    packed_weights,
    quantised_bits,
    weight_errors,
)
from tensorcap.comparison.rounded_nodes import (
    RoundedNode,
    inner_roundings,
    lost_operands,
    rounded_nodes,
    rounded_tensors,
)
from tensorcap.comparison.stepped_tensors import SteppedTensor, stepped_tensors
from tensorcap.comparison.weight_mistakes import WeightMistake, alternatives, find_weight_mistake
from tensorcap.comparison.weight_rounding import (
    Rounding,
    WeightNumbers,
    chance_of,
    chance_of_rows,
    find_numbers,
    is_wide_step,
    levels_of,
    measure_rounding,
    measure_wide,
    unit_of,
)
from tensorcap.runs import contents_of, enclosing_sites, is_parameter, is_result, rms_of
from tensorcap.wording import counted
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import ReadError
from tensorcap_formats.float_formats import UNIT_ROUNDOFFS
from tensorcap_formats.keys import Key, escape, unescape
from tensorcap_formats.records import Record
from tensorcap_formats.run_info import ModuleInfo

_ROUNDINGS: Final = 3.0  # of the runs' precision, that a layer may add besides
_ALIKE: Final = 0.1  # by which fitted factors may be off, relative
_MOST: Final = 0.98  # of the columns have to have such factors
_FOLDED: Final = "each column times a number that its input is divided by"
_WIDE: Final = ("int16", "uint16", "int32")  # formats of numbers that are too many to be told apart by values
_BIAS: Final = "param.bias"
_WEIGHT_STEP: Final = "param.weight_step"
_CUT: Final = 2.0  # times what rounding makes, that cutting values may make by choice of a calibration
_CUT_OF_RESULT: Final = 0.05  # of a result's norm, likewise
_OFF_STEP: Final = 0.02  # steps that a value may be off, besides its own rounding
_FEWEST_NUMBERS: Final = 8  # of inputs: fewer lie on many a step
_BITS: Final = 8  # of inputs that are rounded at each call
_SAME: Final = 1e-5  # relative error of a result that floats alone make, in float32
_FOUND: Final = 0.1  # of what a weight leaves of its result, that rounding of inputs may leave
_NAMED: Final = 0.5  # of the error that another reading may leave, to be what is wrong


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """What became of a quantised weight.

    Attributes:
        text: Its numbers in words.
        rounding: Its errors beside those of rounding to the nearest number.
        mistake: What is wrong with it, if that is known.
        of_results: The largest own error over predicted error of its layer's results, if these are what
            rounding predicts, and the layer computes with more than this weight; None otherwise.
    """

    text: str
    rounding: Rounding
    mistake: WeightMistake = field(default_factory=WeightMistake)
    of_results: float | None = None

    @property
    def rounded_to(self) -> str:
        """The numbers that it is the reference's rounded to, by its values alone; "" if it is not."""
        by_values = replace(self.rounding, feedback=None)
        return self.text if POLICY.quantised.status(by_values.value) == "within-rounding" else ""

    @property
    def finding(self) -> Finding:
        """The finding of its pair."""
        rounding = self.rounding
        if self.of_results is not None:
            text = (
                f"its layer computes with more than it, and is off by what rounding to {self.text} predicts"
            )
            return POLICY.quantised.finding("weight_rounding", self.of_results, text)
        text = f"the reference's, rounded to {self.text}"
        if POLICY.quantised.status(rounding.value) != "within-rounding":
            text = f"not {text}"
            if self.mistake.text:
                text += f": {self.mistake.text}"
            elif math.isfinite(rounding.value):
                text += f": errors are {rounding.value:.3g} times those of rounding"
        elif rounding.cut is not None:
            text += (
                f"; {counted(rounding.clipped, 'value')} beyond the largest number cut off, as a search for "
                f"ranges may choose: products are off by {rounding.cut:.3g} times what whole ranges make"
            )
        elif not rounding.is_nearest:
            beside = f"{rounding.feedback:.3g} times in its products" if rounding.feedback is not None else ""
            if rounding.clipped:
                beside = (
                    f"{rounding.clipped} values beyond the largest number{', ' if beside else ''}{beside}"
                )
            text += f", not each to the nearest: errors are {rounding.ratio:.3g} times those of rounding"
            text += f" ({beside})" if beside else ""
        return POLICY.quantised.finding("weight_rounding", rounding.value, text)


@dataclass(frozen=True, slots=True)
class LayerError:
    """The error that a quantised layer makes itself in one call, beside what its rounding predicts.

    Attributes:
        own: Relative to the norm of the reference's result of the same input, no unit.
        predicted: The same, as its rounding predicts.
        worst: The largest ratio of one output, over what chance allows.
        text: The numbers of its weight in words.
        mistake: What is wrong with it, in words; "" if nothing is, or if it is not known.
        chance: What chance allows the ratio, if the prediction is one of chance.
        cut: What ranges of a calibration cut of inputs or results.
        taken: What that makes of the result, relative.
        rest: The own error without that, relative.
        is_of_more: Whether the layer computes with more than its weight, and is off by what independent
            errors of rounding make, in each output.
    """

    own: float
    predicted: float
    worst: float
    text: str
    mistake: str = ""
    chance: float = 1.0
    cut: tuple[CutValues, ...] = ()
    taken: float = 0.0
    rest: float = 0.0
    is_of_more: bool = False

    @property
    def ratio(self) -> float:
        """Own error over predicted error."""
        return self.own / self.predicted if self.predicted else math.inf if self.own else 0.0

    @property
    def is_cut_by_choice(self) -> bool:
        """Whether it is more than rounding makes, and what ranges cut as a calibration may choose."""
        if not self.cut:
            return False
        is_more = POLICY.quantised.status(self.ratio / self.chance) != "within-rounding"
        is_explained = self.rest <= self.predicted * POLICY.quantised.green * self.chance
        is_small = self.taken <= max(_CUT * self.predicted, _CUT_OF_RESULT)
        return is_more and is_explained and is_small and all(cut.is_choice for cut in self.cut)

    @property
    def expected(self) -> float:
        """As `predicted`, with what a calibration chose to cut."""
        return math.hypot(self.predicted, self.taken) if self.is_cut_by_choice else self.predicted

    @property
    def finding(self) -> Finding:
        """The finding of the pair of its result."""
        value = max(self.ratio / self.chance, self.worst)
        text = f"own error {self.own:.2g}, {self.ratio:.3g} times what rounding to {self.text} predicts"
        text += "".join(f"; {cut.text}" for cut in self.cut)
        if self.is_cut_by_choice:
            value = self.rest / self.predicted / self.chance if self.rest else 0.0
        finding = POLICY.quantised.finding("quantisation", value, text)
        if finding.status == "within-rounding":
            return finding
        if self.worst > self.ratio / self.chance:
            text += f", of one output {self.worst:.3g} times"
        text += f": {self.mistake}" if self.mistake else ""
        return POLICY.quantised.finding("quantisation", value, text)


@dataclass(frozen=True, slots=True)
class QuantisedLayers:
    """The quantised layers of a target whose weights both archives hold.

    Attributes:
        weights: What became of each weight, by key text.
        results: The own error of each call of a layer, by the key text of its result.
        predicted: By site, the largest error of its results that rounding predicts, relative.
        undone: Why tensors differ and nothing is wrong, by key text: columns of an input were divided by
            numbers that its layer's weight was multiplied by before it was rounded (AWQ, SmoothQuant).
        folded: Key texts of the results of such layers.
        rounded_to: What each weight is the reference's rounded to, by key text, whatever its columns were
            multiplied by: see `QuantisedWeight`.
        of_weights: By site, the largest error of a weight that is the reference's, rounded, relative.
        inner: By site, what rounding between the nodes of a module does to its results, relative.
        lost: What is lost in a sum of the module that makes a result, by the key text of that.
        rounded: What rounding to whole steps makes of tensors that code between modules rounds, by key text,
            relative.
        inside: Key texts of what the reference makes within what is one layer of the target, as what a norm
            is given that is folded into the weight: nothing of the target stands in their place.
    """

    weights: Mapping[str, QuantisedWeight] = field(default_factory=dict)
    results: Mapping[str, LayerError] = field(default_factory=dict)
    predicted: Mapping[str, float] = field(default_factory=dict)
    undone: Mapping[str, str] = field(default_factory=dict)
    folded: frozenset[str] = frozenset()
    rounded_to: Mapping[str, str] = field(default_factory=dict)
    of_weights: Mapping[str, float] = field(default_factory=dict)
    inner: Mapping[str, float] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)
    rounded: Mapping[str, float] = field(default_factory=dict)
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

    def explain(self, pairs: Iterable[Pair]) -> list[Pair]:
        """Make `explained` what differs and is undone by the layer that is given it."""
        return [
            decide(pair, Decision("agreement", "explained", self.undone[pair.key], pair.findings))
            if pair.key in self.undone and pair.status in ("suspect", "diverged")
            else pair
            for pair in pairs
        ]


def measure_layers(
    reference: Archive,
    target: Archive,
    precision: Precision | None,
    injected: Injected | None = None,
) -> QuantisedLayers:
    """Measure the quantised layers of a target.

    1. The numbers of a weight are those that the target says (`param.NAME_step`, `param.NAME_zero`), or else
       those that its values lie on.
    2. It is held against the reference's.
    3. If it is not, and columns of the input are those of the reference times numbers by which columns of the
       weight were divided, it is held against that.
    4. If the reference's result is the product of its weight and input, and a bias, the target's own error is
       its result less such a product of the input that it was given.

    Args:
        reference: The trusted archive.
        target: The archive under test, under the reference's keys.
        precision: What both runs computed in, rounded weights aside.
        injected: Which inputs of the target were replaced by the reference's; None if none were.
    """
    packed = packed_weights(target.info)
    steps = output_steps(target.info)
    nodes = list(rounded_nodes(target))
    if not packed and not steps and not nodes:
        return QuantisedLayers()
    lost = dict(_lost_in_results(reference, target, nodes))
    ours, theirs = (_parameters(archive, {site for site, _ in packed}) for archive in (reference, target))
    sites = {site for site, _ in packed} | set(steps)
    given, made = (single_calls(archive, sites) for archive in (reference, target))
    weights: dict[str, QuantisedWeight] = {}
    results: dict[str, LayerError] = {}
    predicted: dict[str, float] = {}
    undone: dict[str, str] = {}
    folded: set[str] = set()
    rounded_to: dict[str, str] = {}
    of_weights: dict[str, float] = {}
    others = OtherWeights(reference)
    parts = layer_parts(reference, target, {site for site, _ in packed})
    alike, of_parts = _alike(reference) if parts else {}, _Inside()
    for site, name in sorted(packed):
        slot = f"param.{escape(name)}"
        records = ours.get((site, slot)), theirs.get((site, slot))
        if records[0] is None or records[1] is None or records[0].shape != records[1].shape:
            continue
        try:
            trusted = floats_of(reference, records[0])
            module = target.info.modules.get(site)
            if trusted is not None and (
                rounding := _wide_rounding(
                    target, records[1], theirs, module, trusted, made.get(site, {}).values()
                )
            ):
                weights[records[0].key.text] = rounding
                continue
            weight = _numbers(target, records[1], theirs, module, name)
            if trusted is None or weight is None:
                continue
            weight = _with_unit(weight, precision)
            both = given.get(site, {}), made.get(site, {})
            ours_of = reference.info.modules.get(site)
            products = list(layer_products(reference, target, trusted, *both, injected, ours_of))
            if module is not None and "input_range" in module.settings:
                products = [product.with_inputs_within(module.settings, trusted) for product in products]
            rows = list(_looked_up(reference, target, site, trusted))
        except (OSError, ReadError):  # the comparison says so
            continue
        inputs = products[0].x if products else None
        norms = [found.norm for p in products if (found := parts.get(p.key)) is not None and found.norm]
        judged, norm = _judge_with_norm(trusted, weight, inputs, norms[0] if norms else None)
        weights[records[0].key.text] = judged
        rounded_to[records[0].key.text] = judged.rounded_to
        is_right = _is_rounded(judged.rounding)
        trusted, weight = trusted.reshape(len(trusted), -1), weight.matrix
        if norm is not None:
            trusted = trusted * norm.factors[:, None]
        if is_right and (size := float(np.linalg.norm(trusted))):
            off = float(np.linalg.norm(weight.values - trusted)) / size
            of_weights[site] = max(off, of_weights.get(site, 0.0))
        layer_keys = [product.key for product in products]
        products = [_with_parts(product, parts.get(product.key), norm) for product in products]
        sides = (ours.get((site, _BIAS)), theirs.get((site, _BIAS)))
        of_bias = _bias_error(reference, target, *sides) if _is_right(weights, sides[0]) else None
        for other in (
            () if is_right else _factors(reference, target, site, trusted, weight, products, both[0])
        ):
            scaled = _judge_weight(trusted * other.factors, weight, inputs)
            if scaled.finding.status != "within-rounding":
                continue
            trusted, is_right = trusted * other.factors, True
            weights[records[0].key.text] = replace(scaled, text=f"{scaled.text}, {_FOLDED}")
            if other.is_inside:
                products = [replace(p, x=p.x / other.factors) for p in products]
                break
            products = [
                replace(p, wanted=np.clip(multiply(p.x, trusted) + p.bias, *p.ends)) for p in products
            ]
            folded |= {product.key for product in products}
            undone |= _undone(reference, target, site, both[0].values(), 1 / other.factors)
            break
        errors = {
            product.key: _layer_error(product, trusted, weight, module, precision, of_bias, is_right=is_right)
            for product in products
        }
        if not is_right and errors and all(error.is_of_more for error in errors.values()):
            ratio = max(error.finding.value for error in errors.values())
            weights[records[0].key.text] = replace(judged, of_results=ratio)
        elif not is_right and not judged.mistake.text:
            held = _held_weight(others, records[0], target, records[1], weight)
            weights[records[0].key.text] = replace(judged, mistake=held)
        results |= errors
        for key, product in zip(layer_keys, products, strict=True):
            if key in parts:
                error = errors[product.key]
                of_parts.add((reference, target), alike, key, product, error, parts[key], norm)
        for error in errors.values():
            predicted[site] = max(error.expected, predicted.get(site, 0.0))
        for key, places, values in rows:
            results[key] = _row_error(places, values, trusted, weight, module, is_right=is_right)
            predicted[site] = max(results[key].expected, predicted.get(site, 0.0))
    measured = set(predicted)
    for site, estimate in _errors_by_statistics(reference, target, given, besides=measured):
        predicted[site] = max(estimate, predicted.get(site, 0.0))
    for site, step in steps.items():
        if all(site != other for other, _ in packed):
            for key, error in _rounded_results(
                reference,
                target,
                step,
                target.info.modules[site].settings,
                given.get(site, {}),
                made.get(site, {}),
                injected,
            ):
                results[key] = error
                predicted[site] = max(error.expected, predicted.get(site, 0.0))
            if predicted.get(site) is None and (size := _least_size(reference, target, site)):
                predicted[site] = step / math.sqrt(12) / size
    inner = {site: error for site, error in inner_roundings(target, nodes).items() if site not in measured}
    undone |= {
        key: f"in the target {part.activation.site} is a part of it"
        for key, part in parts.items()
        if part.activation is not None and part.activation.is_held and key not in of_parts.calls
    }
    undone |= of_parts.undone
    results |= of_parts.results
    rounded = {key: error for key, error in rounded_tensors(target, nodes) if key not in results}
    rounded |= of_parts.rounded
    for tensor in _between_modules(reference, target, steps) if steps and not nodes else ():
        site = Key.parse(tensor.key).site
        of_step = tensor.step / math.sqrt(12) / _row_size(tensor.values)
        rounded[tensor.key] = max(of_step, rounded.get(tensor.key, 0.0))
        if tensor.before is not None and not injected:
            results[tensor.key] = _step_error(tensor.before, tensor.values, tensor.step, {})
        if site not in measured:
            inner[site] = max(rounded[tensor.key], inner.get(site, 0.0))
    return QuantisedLayers(
        weights,
        results,
        predicted,
        undone,
        frozenset(folded),
        rounded_to,
        of_weights,
        inner=inner,
        lost=lost,
        rounded=rounded,
        inside=frozenset(of_parts.inside),
    )


def _alike(archive: Archive) -> Mapping[object, Sequence[str]]:
    """Key texts of an archive's records by what they hold."""
    alike: dict[object, list[str]] = defaultdict(list)
    for record in archive.records:
        if record.digest and not is_parameter(record.key):
            alike[contents_of(record)].append(record.key.text)
    return alike


def _between_modules(
    reference: Archive, target: Archive, steps: Mapping[str, float]
) -> Iterator[SteppedTensor]:
    """Yield what code between modules rounds to whole steps."""
    known = {r.digest for r in target.records if r.digest and r.key.site in steps and is_result(r.key)}
    return stepped_tensors(reference, target, known)


def _row_size(values: Array) -> float:
    """The RMS of a row, the median of those that are not zeros alone."""
    sizes = np.sqrt(np.square(values.reshape(-1, values.shape[-1])).mean(axis=1))
    return float(np.median(sizes[sizes > 0]))


def _judge_with_norm(
    reference: Array, weight: WeightNumbers, inputs: Array | None, norm: FoldedNorm | None
) -> tuple[QuantisedWeight, FoldedNorm | None]:
    """Judge a weight, or what it is with the norm behind it folded in if it is nearer to that.

    Returns:
        What became of it, and the norm if it is folded in.
    """
    if norm is None or norm.factors.shape != (len(reference),):
        return _judge_weight(reference, weight, inputs), None
    scaled = reference * norm.factors.reshape(-1, *(1,) * (reference.ndim - 1))
    ratios = [measure_rounding(side, weight).ratio for side in (reference, scaled)]
    if ratios[0] <= ratios[1]:
        return _judge_weight(reference, weight, inputs), None
    judged = _judge_weight(scaled, weight, inputs)
    return replace(judged, text=f"{judged.text}, with {norm.site} folded in"), norm


def _with_parts(product: Product, parts: LayerParts | None, norm: FoldedNorm | None) -> Product:
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
class _Inside:
    """What lies within layers of which norms and activations are a part, and why it differs.

    Attributes:
        undone: Why tensors differ, by key text.
        inside: Key texts of what has no counterpart: what the reference makes before the last part.
        rounded: What rounding makes of tensors that hold what the last part makes, by key text, relative.
        results: The own error of the layer, by the key text of each of them in whose place the target has its
            result.
        calls: Key texts of the results of layers that were added.
    """

    undone: dict[str, str] = field(default_factory=dict)
    inside: set[str] = field(default_factory=set)
    rounded: dict[str, float] = field(default_factory=dict)
    results: dict[str, LayerError] = field(default_factory=dict)
    calls: set[str] = field(default_factory=set)

    def add(
        self,
        archives: tuple[Archive, Archive],
        alike: Mapping[object, Sequence[str]],
        call: str,
        product: Product,
        error: LayerError,
        parts: LayerParts,
        norm: FoldedNorm | None,
    ) -> None:
        """Add a call of a layer.

        Args:
            archives: The reference and the target.
            alike: Key texts of the reference's records of equal contents.
            call: Key text of the layer's own result.
            product: The call, with the parts.
            error: Its own error.
            parts: What the layer may have in it.
            norm: The norm that it has; None if it has none.
        """
        reference, target = archives
        self.calls.add(call)
        layer = target.get(call)
        activation = parts.activation if norm is None else parts.behind_norm
        behind = [part for part in (norm, activation) if part is not None]
        if not behind:
            return
        made = [call, *(part.key for part in behind)]
        same = [alike.get(contents_of(reference.get(key)), ()) for key in made]
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
        self.undone |= {record.key.text: folded for record in _parameters(reference, {norm.site}).values()}
        biases = [_parameters(archive, {site}).get((site, _BIAS)) for archive in archives]
        ours, theirs = (
            None if bias is None else floats_of(archive, bias)
            for archive, bias in zip(archives, biases, strict=True)
        )
        if biases[0] is not None and theirs is not None and is_folded_bias(norm, ours, theirs):
            self.undone[biases[0].key.text] = folded


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
            squares = _input_variances(x, settings) * weight.norm**2
            squares += weight.error**2 * weight.shape[0] * np.square(x).sum(axis=1)
            sizes = np.linalg.norm(y, axis=1)
            rows = np.sqrt(squares[sizes > 0]) / sizes[sizes > 0]
            if rows.size:
                yield site, max(float(np.median(rows)), float(np.quantile(rows, 0.95)) / POLICY.replayed_tail)


def _is_right(weights: Mapping[str, QuantisedWeight], record: Record | None) -> bool:
    """Whether a weight is in few bits, and the reference's, rounded."""
    judged = None if record is None else weights.get(record.key.text)
    return judged is not None and judged.finding.status == "within-rounding"


def _held_weight(
    others: OtherWeights, ours: Record, target: Archive, theirs: Record, weight: WeightNumbers
) -> WeightMistake:
    """Which other weight of the reference it is, rounded, if it is one."""

    def is_held(record: Record) -> bool:
        values = floats_of(others.reference, record)
        return values is not None and _is_rounded(measure_rounding(values, weight))

    try:
        held = others.find(ours, target, theirs, is_held)
    except (OSError, ReadError):  # the comparison says so
        held = None
    return WeightMistake() if held is None else WeightMistake.of_other(held.key.text)


def _is_rounded(rounding: Rounding) -> bool:
    """Whether a weight is what it was held against, rounded."""
    return POLICY.quantised.status(rounding.value) == "within-rounding"


def _bias_error(
    reference: Archive, target: Archive, ours: Record | None, theirs: Record | None
) -> Array | None:
    """What a bias in few bits is off by, `[outputs]`; None if it is not known."""
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return None
    sides = floats_of(reference, ours), floats_of(target, theirs)
    return None if sides[0] is None or sides[1] is None else sides[1] - sides[0]


def judge_quantised_weight(
    reference: Archive, ours: Record, target: Archive, theirs: Record
) -> QuantisedWeight | None:
    """Judge a weight that a target holds in few bits, by its values alone; None if its numbers are not known.

    Args:
        reference: The trusted archive.
        ours: Its weight.
        target: The archive under test.
        theirs: Its weight, in floats.
    """
    site, name = theirs.key.site, unescape(theirs.key.slot.partition(".")[2])
    if (site, name) not in packed_weights(target.info):
        return None
    trusted = floats_of(reference, ours)
    module = target.info.modules.get(site)
    weight = _numbers(target, theirs, _parameters(target, {site}), module, name)
    if trusted is None or weight is None or trusted.shape != weight.values.shape:
        return None
    precision = POLICY.precision_of_runs(reference.info, target.info)
    return _judge_weight(trusted, _with_unit(weight, precision), None)


def _with_unit(weight: WeightNumbers, precision: Precision | None) -> WeightNumbers:
    """A weight with the rounding that it, its steps, and the runs, have besides."""
    units = [
        weight.unit,
        unit_of(weight.steps),
        *(p.unit for p in (precision,) if p is not None and not p.is_wide),
    ]
    return replace(weight, unit=max(units))


def _judge_weight(reference: Array, weight: WeightNumbers, inputs: Array | None) -> QuantisedWeight:
    rounding = measure_rounding(reference, weight, inputs)
    if not _is_rounded(rounding) and rounding.clipped:
        cut = cut_of_choice(reference, weight, inputs)
        rounding = replace(rounding, cut=cut if cut is not None and cut <= _CUT else None)
    mistake = WeightMistake() if _is_rounded(rounding) else find_weight_mistake(reference, weight)
    return QuantisedWeight(weight.text, rounding, mistake)


def _looked_up(
    reference: Archive, target: Archive, site: str, weight: Array
) -> Iterator[tuple[str, Array, Array]]:
    """Yield the calls of a table, as an embedding: key, rows of the table, and the target's values."""
    if weight.ndim != 2:
        return
    records = [r for r in reference.records if r.key.site == site and r.stored]
    given = {place_in_run(r.key): r for r in records if r.key.slot.startswith("input") and r.dtype.is_whole}
    for record in records:
        text = record.key.text
        places, own = given.get(place_in_run(record.key)), target.get(text) if text in target else None
        if not record.key.slot.startswith("output") or places is None or own is None or not own.stored:
            continue
        values, theirs = floats_of(reference, record), floats_of(target, own)
        rows = reference.load(places).reshape(-1).astype(np.int64)
        if values is None or theirs is None or values.shape != theirs.shape or not rows.size:
            continue
        if values.shape[-1] != weight.shape[1] or values.size != rows.size * weight.shape[1]:
            continue
        values, theirs = (side.reshape(-1, weight.shape[1]) for side in (values, theirs))
        if rows.min() >= 0 and rows.max() < len(weight) and np.array_equal(values, weight[rows]):
            yield record.key.text, rows, theirs


def _row_error(
    rows: Array,
    values: Array,
    reference: Array,
    weight: WeightNumbers,
    module: ModuleInfo | None,
    *,
    is_right: bool,
) -> LayerError:
    """The own error of a table's result beside what rounding the table predicts, which is known exactly."""
    used, places = np.unique(rows, return_inverse=True)
    errors = np.square(weight.values[used] - reference[used]) if is_right else weight.variances[used]
    squares = float(errors.sum(axis=1)[places].sum())
    step = module.settings.get("output_step") if module is not None else None
    if isinstance(step, float):
        squares += values.size * step**2 / 12
    wanted = reference[rows]
    size = max(float(np.linalg.norm(wanted)), 1e-300)
    own = float(np.linalg.norm(values - wanted)) / size
    chance = 1.0 if is_right and step is None else chance_of(values.size)
    return LayerError(own, math.sqrt(squares) / size, 0.0, weight.text, chance=chance)


@dataclass(frozen=True, slots=True)
class _Factors:
    """Numbers that columns of a weight may have been multiplied by before it was rounded, `[inputs]`.

    Attributes:
        factors: The numbers.
        is_inside: Whether the layer itself divides its input by them, and not what it is given by.
    """

    factors: Array
    is_inside: bool = False


def _factors(
    reference: Archive,
    target: Archive,
    site: str,
    weight: Array,
    rounded: WeightNumbers,
    products: Sequence[Product],
    calls: Mapping[tuple[int, int, int], Call],
) -> Iterator[_Factors]:
    """Yield what columns may have been multiplied by: what fits, a norm has lost, or the layer holds."""
    if not products or products[0].x.shape[1] != weight.shape[1]:
        return
    fitted = _column_factors(weight, rounded, products[0])
    if fitted is not None:
        yield _Factors(fitted)
    inputs = {contents_of(call.input) for call in calls.values()}
    makers = {
        record.key.site
        for record in reference.records
        if record.digest and record.key.slot.startswith("output") and contents_of(record) in inputs
    }
    ours, theirs = (_parameters(archive, makers) for archive in (reference, target))
    for name, record in ours.items():
        other = theirs.get(name)
        if other is not None and record.size == other.size == weight.shape[1]:
            sides = floats_of(reference, record), floats_of(target, other)
            if sides[0] is not None and sides[1] is not None and (sides[0] * sides[1]).all():
                yield _Factors((sides[0] / sides[1]).reshape(-1))
    for (_, slot), record in _parameters(target, {site}).items():
        if record.size == weight.shape[1] and slot not in (_BIAS, "param.weight"):
            values = floats_of(target, record)
            if values is not None and values.all():
                yield _Factors(values.reshape(-1), is_inside=True)
                yield _Factors(1 / values.reshape(-1), is_inside=True)


def _column_factors(reference: Array, weight: WeightNumbers, product: Product) -> Array | None:
    """The numbers that columns of a weight were multiplied by before it was rounded; None if there are none.

    They are fitted to the weight, by least squares, and have to be those that the input's columns were
    divided by.
    """
    sizes = np.square(product.given).sum(axis=0), np.square(reference).sum(axis=0)
    if not (sizes[0] > 0).all() or not (sizes[1] > 0).all():
        return None
    divided: Array = (product.x * product.given).sum(axis=0) / sizes[0]
    factors: Array = (weight.values * reference).sum(axis=0) / sizes[1]
    rest = float(np.linalg.norm(product.x - product.given * divided))
    is_other = np.abs(factors - 1) > _ALIKE
    is_known = rest <= _NAMED * float(np.linalg.norm(product.x - product.given)) and is_other.mean() > 0.5
    is_inverse = np.abs(factors * divided - 1) <= _ALIKE
    return factors if is_known and is_inverse.mean() >= _MOST else None


def _undone(
    reference: Archive, target: Archive, site: str, calls: Iterable[Call], factors: Array
) -> dict[str, str]:
    """Which tensors differ because they are made of a scaled input: it, what holds it, and what scaled it."""
    reason = f"its columns are divided by what those of the weight of {site} were multiplied by"
    inputs = {contents_of(call.input) for call in calls}
    alike = [r for r in reference.records if r.digest and contents_of(r) in inputs]
    undone = {record.key.text: reason for record in alike}
    undone |= {call.input.key.text: reason for call in calls}
    makers = {record.key.site for record in alike if record.key.slot.startswith("output")}
    ours, theirs = (_parameters(archive, makers) for archive in (reference, target))
    for name, record in ours.items():
        other = theirs.get(name)
        if other is None or record.shape != other.shape or record.size != factors.size:
            continue
        sides = floats_of(reference, record), floats_of(target, other)
        if sides[0] is None or sides[1] is None:
            continue
        wanted = sides[0].reshape(-1) * factors
        if np.linalg.norm(sides[1].reshape(-1) - wanted) <= _ALIKE * np.linalg.norm(wanted):
            undone[record.key.text] = reason
    return undone


def _rounded_results(
    reference: Archive,
    target: Archive,
    step: float,
    settings: Mapping[str, Any],
    ours: Mapping[tuple[int, int, int], Call],
    theirs: Mapping[tuple[int, int, int], Call],
    injected: Injected | None,
) -> Iterator[tuple[str, LayerError]]:
    """Yield key and error of each call of a module that hands on what it is given, rounded to whole steps."""
    for place, call in ours.items():
        other = theirs.get(place)
        if other is None or (injected and not injected.is_replaced(other.input.key)):
            continue
        try:
            x, y, x_target, y_target = (*call.values(reference), *other.values(target))
        except (OSError, ReadError):  # the comparison says so
            continue
        if x is None or y is None or x_target is None or y_target is None or not np.array_equal(x, y):
            continue
        wanted = x if injected else x_target
        yield call.output.key.text, _step_error(wanted, y_target, step, settings)


def _step_error(wanted: Array, made: Array, step: float, settings: Mapping[str, Any]) -> LayerError:
    """The error of what is handed on, rounded to whole steps.

    Its range is that of the values, if the settings of the module do not say it.
    """
    size = max(float(np.linalg.norm(wanted)), 1e-300)
    errors = float(np.linalg.norm(made - wanted)), math.sqrt(wanted.size / 12) * step
    error = LayerError(
        errors[0] / size, errors[1] / size, 0.0, f"steps of {step:.3g}", chance=chance_of(wanted.size)
    )
    ends = settings.get("output_range") or [float(made.min()), float(made.max())]
    cut = cut_results(wanted, {"output_step": step, "output_range": ends})
    if cut is not None:
        sides = cut.error, made - wanted - cut.error
        taken, rest = (float(np.linalg.norm(side)) / size for side in sides)
        error = replace(error, cut=(cut,), taken=taken, rest=rest)
    far = int((np.abs(made - wanted) > step).sum())
    if far and cut is None:
        error = replace(error, mistake=f"{counted(far, 'value', 'lie')} beyond the range of its numbers")
    return error


def _least_size(reference: Archive, target: Archive, site: str) -> float:
    """The least RMS of a module's results of floats; 0 if the reference has none.

    Of each the larger one of both sides: one that the target loses does not widen its own limit.
    """
    sizes: list[float] = []
    for record in reference.records:
        if record.key.site == site and is_result(record.key) and record.dtype.kind == "float":
            other = target.get(record.key.text) if record.key.text in target else None
            sizes.append(max(rms_of(each) for each in (record, other) if each is not None))
    return min(filter(None, sizes), default=0.0)


def _layer_error(
    product: Product,
    reference: Array,
    weight: WeightNumbers,
    module: ModuleInfo | None,
    precision: Precision | None,
    of_bias: Array | None,
    *,
    is_right: bool,
) -> LayerError:
    """The own error of a call beside what rounding predicts.

    That is what the errors of the weight make of the input, or, if it is not the reference's rounded, what
    independent errors of rounding would; and in quadrature what rounding inputs and results adds, and what
    the bias is off by if that is rounded.
    """
    x, own = product.x, product.y - product.wanted
    settings = dict(module.settings) if module is not None else {}
    settings |= _found_rounding(product, weight, settings)
    kept = product.kept
    if is_right:
        errors = np.square(multiply(x, weight.values - reference))
        made = (errors if kept is None else errors * kept).sum(axis=0)
    else:
        made = _sums(np.square(x), weight.variances, kept)
    inputs = _input_variances(x, settings)[:, None] * (x != 0)  # zeros are numbers themselves
    if inputs.any():
        made = made + _sums(inputs, np.square(weight.values), kept)
    step = settings.get("output_step")
    rows = len(x) if kept is None else kept.sum(axis=0)
    if isinstance(step, float):
        made = made + rows * step**2 / 12
    if of_bias is not None:
        made = made + rows * np.square(of_bias)
    noise = _ROUNDINGS * POLICY.noise(precision or POLICY.precision("float32"))
    made = made + np.square(product.wanted).sum(axis=0) * noise**2
    squares = np.square(own).sum(axis=0)
    size = max(float(np.linalg.norm(product.wanted)), 1e-300)
    chance = chance_of(x.shape[1])
    is_of_chance = bool(inputs.any()) or not is_right
    worst = 0.0
    if not inputs.any() and step is None:  # of like rows, rounding errors of inputs and results are alike
        by_chance = chance_of(min(len(x), x.shape[1]))
        if not is_right:  # errors that are not known fall on few directions if the rows are alike
            by_chance = chance_of_rows(x)
        ratios = np.sqrt(squares / np.maximum(made, 1e-300)) / by_chance
        worst = float(ratios.max(initial=0.0))
    own_error, predicted = (math.sqrt(float(side.sum())) / size for side in (squares, made))
    of_inputs = cut_inputs(x, settings)
    taken = multiply(of_inputs.error, weight.values) if of_inputs is not None else np.zeros_like(own)
    taken = taken if kept is None else taken * kept
    of_results = cut_results(product.wanted + taken, settings)
    taken = taken + of_results.error if of_results is not None else taken
    error = LayerError(
        own_error,
        predicted,
        worst,
        weight.text,
        chance=chance if is_of_chance else 1.0,
        cut=tuple(cut for cut in (of_inputs, of_results) if cut is not None),
        taken=float(np.linalg.norm(taken)) / size,
        rest=float(np.linalg.norm(own - taken)) / size,
    )
    has_more = not inputs.any() and step is None and _has_more(product, weight)
    if error.finding.status == "within-rounding":
        return replace(error, is_of_more=has_more and not is_right)
    if is_right and has_more:
        other = _layer_error(product, reference, weight, module, precision, of_bias, is_right=False)
        if other.is_of_more:
            return other
    return replace(error, mistake=_describe_result(product, weight, has_rounded_inputs=bool(inputs.any())))


def _sums(rows: Array, weight: Array, kept: Array | None) -> Array:
    """The sum of the products of rows and a weight, `[outputs]`, of those results that are kept."""
    if kept is None:
        whole: Array = multiply(rows.sum(axis=0)[None], weight)[0]
        return whole
    sums: Array = (multiply(rows, weight) * kept).sum(axis=0)
    return sums


def _rest(product: Product, weight: WeightNumbers, x: Array) -> float:
    """How far a result is from what the layer's own weight makes of an input, and the reference's bias."""
    made = np.clip(multiply(x, weight.values) + product.bias, *product.ends)
    return float(np.linalg.norm(product.y - made))


def _has_more(product: Product, weight: WeightNumbers) -> bool:
    """Whether a layer computes with more than its weight and a bias, as with rotated inputs."""
    rest = product.rest(weight.values)
    size = float(np.linalg.norm(rest - product.mean(rest)))
    return size > _NAMED * float(np.linalg.norm(product.y - product.wanted))


def _found_rounding(
    product: Product, weight: WeightNumbers, settings: Mapping[str, Any]
) -> Mapping[str, Any]:
    """How a layer that does not say it rounds its inputs: the way by which its result is what it is.

    They are in 8 bits, with a step for each row or one for all, and with a zero point or without.
    """
    if any(name in settings for name in ("input_bits", "input_step", "output_step")):
        return {}
    rest = _rest(product, weight, product.x)
    if rest <= _SAME * np.linalg.norm(product.y):
        return {}
    for has_rows, is_symmetric in itertools.product((True, False), repeat=2):
        if not has_rows and len(product.x) == MOST_ROWS:  # others may have been larger
            continue
        x = _rounded_inputs(product.x, has_rows=has_rows, is_symmetric=is_symmetric)
        if _rest(product, weight, x) <= _FOUND * rest:
            return {"input_bits": _BITS, "input_rows": has_rows, "input_symmetric": is_symmetric}
    return {}


def _rounded_inputs(x: Array, *, has_rows: bool, is_symmetric: bool) -> Array:
    """Inputs in 8 bits, as layers round them at each call."""
    axis = 1 if has_rows else None
    low, high = (np.asarray(end(x, axis=axis, keepdims=True)) for end in (np.min, np.max))
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    top = 2 ** (_BITS - 1) - 1
    step = np.maximum(-low, high) / top if is_symmetric else (high - low) / (2 * top + 1)
    step = np.where(step == 0, 1.0, step)
    zero = 0.0 if is_symmetric else np.rint(-low / step)
    ends = (-top, top) if is_symmetric else (0, 2 * top + 1)
    rounded: Array = (np.clip(np.rint(x / step) + zero, *ends) - zero) * step
    return rounded


def _input_variances(x: Array, settings: Mapping[str, Any]) -> Array:
    """The mean squared error of each element of a row that rounding the inputs of a call makes, by row.

    It is that of `input_step`, or of steps that are made of the inputs of the call.
    """
    bits = settings.get("input_bits")
    if isinstance(step := settings.get("input_step"), float):
        return np.full(len(x), step**2 / 12)
    if not isinstance(bits, int):
        return np.zeros(len(x))
    low, high = np.minimum(x.min(axis=1), 0), np.maximum(x.max(axis=1), 0)
    if settings.get("input_rows") is not True:
        low, high = np.full(len(x), low.min()), np.full(len(x), high.max())
    step = (high - low) / (2**bits - 1)
    if settings.get("input_symmetric") is True:
        step = np.maximum(-low, high) / (2 ** (bits - 1) - 1)
    variances: Array = step**2 / 12
    return variances


def _describe_result(product: Product, weight: WeightNumbers, *, has_rounded_inputs: bool) -> str:
    """What a layer does whose result is not what its own weight makes of its input, in words."""
    rest = product.rest(weight.values)
    error = float(np.linalg.norm(rest - product.bias * (rest != 0)))
    own = float(np.linalg.norm(product.y - product.wanted))
    if error <= _NAMED * own:
        return "it is what its weight makes, which is not the reference's"
    if np.linalg.norm(rest) <= _NAMED * own:
        return "no bias is added"
    if np.linalg.norm(rest - product.mean(rest)) <= _NAMED * own:
        return "another bias is added"
    for text, values in alternatives(weight):
        other = product.rest(values)
        if np.linalg.norm(other - product.mean(other)) <= _NAMED * own:
            return f"it is what its weight makes {text}"
    return "" if has_rounded_inputs else "it is not what its own weight makes of its input"


def _wide_rounding(
    target: Archive,
    record: Record,
    parameters: Mapping[tuple[str, str], Record],
    module: ModuleInfo | None,
    reference: Array,
    calls: Iterable[Call],
) -> QuantisedWeight | None:
    """A bias of 16 or 32 bits held against the reference's; None if it is none, or has no step of one."""
    name = unescape(record.key.slot.partition(".")[2])
    named = module.settings.get("numbers") if module is not None else None
    number = named.get(name) if isinstance(named, Mapping) else None
    beside = parameters.get((record.key.site, f"{record.key.slot}_step"))
    if number not in _WIDE or beside is None:
        return None
    values, steps = floats_of(target, record), floats_of(target, beside)
    if values is None or steps is None or steps.ndim != values.ndim:
        return None
    of_weight = parameters.get((record.key.site, _WEIGHT_STEP))
    products = floats_of(target, of_weight) if of_weight is not None else None
    if products is not None and products.all():
        step = module.settings.get("input_step") if module is not None else None
        products = products.reshape(-1)
        if not isinstance(step, float):
            step = float(steps.reshape(-1)[0] / products[0])
            step = step if _has_inputs_in_steps(target, calls, step) else math.nan
        products = products * step
    if not is_wide_step(reference, values, steps, products):
        return None
    return QuantisedWeight(f"{number}", measure_wide(reference, values, steps))


def _has_inputs_in_steps(target: Archive, calls: Iterable[Call], step: float) -> bool:
    """Whether what a module was given are whole numbers of a step, and several of them."""
    for call in calls:
        values = floats_of(target, call.input)
        if values is None or not values.size:
            continue
        numbers = first_rows(values) / step
        slack = _OFF_STEP + 2 * UNIT_ROUNDOFFS["float32"] * np.abs(numbers)
        whole = np.rint(numbers)
        if (np.abs(numbers - whole) <= slack).all() and np.unique(whole).size >= _FEWEST_NUMBERS:
            return True
    return False


def _numbers(
    target: Archive,
    record: Record,
    parameters: Mapping[tuple[str, str], Record],
    module: ModuleInfo | None,
    name: str,
) -> WeightNumbers | None:
    """The numbers of a weight: those that the target says if its values lie on them, else found in these."""
    values = floats_of(target, record)
    if values is None:
        return None
    key = record.key
    steps, zeros = (parameters.get((key.site, f"{key.slot}_{end}")) for end in ("step", "zero"))
    named = module.settings.get("numbers") if module is not None else None
    number = named.get(name) if isinstance(named, Mapping) else None
    if isinstance(number, str) and levels_of(number) and steps is not None:
        sides = [None if side is None else floats_of(target, side) for side in (steps, zeros)]
        if sides[0] is not None and sides[0].ndim == values.ndim:
            weight = WeightNumbers(number, values, sides[0], sides[1])
            rounded = replace(weight, unit=unit_of(values))
            for found in (weight, rounded):  # a product in a narrow dtype is rounded
                if found.are_on_levels:
                    return found
    return find_numbers(values)


def _parameters(archive: Archive, sites: set[str]) -> Mapping[tuple[str, str], Record]:
    """The parameters of modules whose values an archive holds, by site and slot."""
    return {
        (record.key.site, record.key.slot): record
        for record in archive.records
        if record.key.site in sites and is_parameter(record.key) and record.stored
    }
