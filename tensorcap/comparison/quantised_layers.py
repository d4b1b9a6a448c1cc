"""Quantised layers of a target: weights against the reference's, and results against what rounding predicts.

A weight has to be the reference's, rounded to the numbers that it may have (`weight_rounding`). A layer's own
error, on the input that it was given, has to be what the errors of its weight make of that input, with what
rounding its inputs and results adds: `|(W' - W) x|`. Both are known from the records of two archives.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from tensorcap.comparison.column_factors import column_factors, undone_by
from tensorcap.comparison.injected import Injected
from tensorcap.comparison.layer_errors import LayerError, input_variances, layer_error, row_error, step_error
from tensorcap.comparison.layer_parts import Inside, layer_parts, with_parts
from tensorcap.comparison.layer_products import (
    BIAS,
    Call,
    first_rows,
    floats_of,
    layer_products,
    looked_up,
    multiply,
    parameters_of,
    single_calls,
)
from tensorcap.comparison.other_weights import OtherWeights
from tensorcap.comparison.pair import Decision, Finding, Pair, decide
from tensorcap.comparison.policy import POLICY, Precision
from tensorcap.comparison.quantised_weights import output_steps, packed_weights, quantised_bits, weight_errors
from tensorcap.comparison.rounded_nodes import RoundedNode, inner_roundings, lost_operands, rounded_nodes
from tensorcap.comparison.stepped_tensors import SteppedTensor, stepped_tensors
from tensorcap.comparison.weight_judge import (
    QuantisedWeight,
    held_weight,
    is_rounded,
    judge_weight,
    judge_with_norm,
    numbers_of,
    wide_rounding,
    with_unit,
)
from tensorcap.runs import contents_of, enclosing_sites, is_parameter, is_result, rms_of
from tensorcap.wording import counted
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import ReadError
from tensorcap_formats.keys import Key, escape
from tensorcap_formats.records import Record

_FOLDED: Final = "each column times a number that its input is divided by"


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
    ours, theirs = (parameters_of(archive, {site for site, _ in packed}) for archive in (reference, target))
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
    alike, of_parts = _alike(reference) if parts else {}, Inside()
    for site, name in sorted(packed):
        slot = f"param.{escape(name)}"
        records = ours.get((site, slot)), theirs.get((site, slot))
        if records[0] is None or records[1] is None or records[0].shape != records[1].shape:
            continue
        try:
            trusted = floats_of(reference, records[0])
            module = target.info.modules.get(site)
            if trusted is not None and (
                rounding := wide_rounding(
                    target, records[1], theirs, module, trusted, made.get(site, {}).values()
                )
            ):
                weights[records[0].key.text] = rounding
                continue
            weight = numbers_of(target, records[1], theirs, module, name)
            if trusted is None or weight is None:
                continue
            weight = with_unit(weight, precision)
            both = given.get(site, {}), made.get(site, {})
            ours_of = reference.info.modules.get(site)
            products = list(layer_products(reference, target, trusted, *both, injected, ours_of))
            if module is not None and module.settings.get("input_range", [None])[0] == 0:
                products = [product.with_inputs_above_0(trusted) for product in products]
            rows = list(looked_up(reference, target, site, trusted))
        except (OSError, ReadError):  # the comparison says so
            continue
        inputs = products[0].x if products else None
        norms = [found.norm for p in products if (found := parts.get(p.key)) is not None and found.norm]
        judged, norm = judge_with_norm(trusted, weight, inputs, norms[0] if norms else None)
        weights[records[0].key.text] = judged
        rounded_to[records[0].key.text] = judged.rounded_to
        is_right = is_rounded(judged.rounding)
        trusted, weight = trusted.reshape(len(trusted), -1), weight.matrix
        if norm is not None:
            trusted = trusted * norm.factors[:, None]
        if is_right and (size := float(np.linalg.norm(trusted))):
            off = float(np.linalg.norm(weight.values - trusted)) / size
            of_weights[site] = max(off, of_weights.get(site, 0.0))
        layer_keys = [product.key for product in products]
        products = [with_parts(product, parts.get(product.key), norm) for product in products]
        sides = (ours.get((site, BIAS)), theirs.get((site, BIAS)))
        of_bias = _bias_error(reference, target, *sides) if _is_right(weights, sides[0]) else None
        for other in (
            () if is_right else column_factors(reference, target, site, trusted, weight, products, both[0])
        ):
            scaled = judge_weight(trusted * other.factors, weight, inputs)
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
            undone |= undone_by(reference, target, site, both[0].values(), 1 / other.factors)
            break
        errors = {
            product.key: layer_error(product, trusted, weight, module, precision, of_bias, is_right=is_right)
            for product in products
        }
        if not is_right and errors and all(error.is_of_more for error in errors.values()):
            ratio = max(error.finding.value for error in errors.values())
            weights[records[0].key.text] = replace(judged, of_results=ratio)
        elif not is_right and not judged.mistake.text:
            held = held_weight(others, records[0], target, records[1], weight)
            weights[records[0].key.text] = replace(judged, mistake=held)
        results |= errors
        for key, product in zip(layer_keys, products, strict=True):
            if key in parts:
                error = errors[product.key]
                of_parts.add((reference, target), alike, key, product, error, parts[key], norm)
        for error in errors.values():
            predicted[site] = max(error.expected, predicted.get(site, 0.0))
        for key, places, values in rows:
            results[key] = row_error(places, values, trusted, weight, module, is_right=is_right)
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
    rounded = dict(of_parts.rounded)
    for tensor in _between_modules(reference, target, steps) if steps and not nodes else ():
        site = Key.parse(tensor.key).site
        of_step = tensor.step / math.sqrt(12) / _row_size(tensor.values)
        rounded[tensor.key] = max(of_step, rounded.get(tensor.key, 0.0))
        if tensor.before is not None and not injected:
            results[tensor.key] = step_error(tensor.before, tensor.values, tensor.step, {})
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


def _is_right(weights: Mapping[str, QuantisedWeight], record: Record | None) -> bool:
    """Whether a weight is in few bits, and the reference's, rounded."""
    judged = None if record is None else weights.get(record.key.text)
    return judged is not None and judged.finding.status == "within-rounding"


def _bias_error(
    reference: Archive, target: Archive, ours: Record | None, theirs: Record | None
) -> Array | None:
    """What a bias in few bits is off by, `[outputs]`; None if it is not known."""
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return None
    sides = floats_of(reference, ours), floats_of(target, theirs)
    return None if sides[0] is None or sides[1] is None else sides[1] - sides[0]


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
        yield call.output.key.text, step_error(wanted, y_target, step, settings)


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
