"""The error that a layer in few bits makes itself in a call, beside what rounding predicts of it.

Its own error, on the input that it was given, has to be what the errors of its weight make of that input,
with what rounding its inputs and results adds: `|(W' - W) x|`. Read `layer_error`; `row_error` is the same of
a table, and `step_error` of a module that only rounds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from tensorcap.comparison.cut_values import MOST_CUT, CutValues, cut_inputs, cut_results
from tensorcap.comparison.layer_mistakes import LayerMistake, LayerTrial, rounded_inputs
from tensorcap.comparison.layer_products import MOST_ROWS, LookUp, Product, multiply
from tensorcap.comparison.pair import Finding
from tensorcap.comparison.policy import POLICY, Precision
from tensorcap.comparison.weight_rounding import WeightNumbers, chance_of, chance_of_rows
from tensorcap.wording import counted
from tensorcap_formats.dtypes import Array
from tensorcap_formats.run_info import ModuleInfo

_ROUNDINGS: Final = 3.0  # of the runs' precision, that a layer may add besides
_CUT_OF_RESULT: Final = 0.05  # of a result's norm, that cutting values may make of it by choice
_BITS: Final = 8  # of inputs that are rounded at each call
_SAME: Final = 1e-5  # relative error of a result that floats alone make, in float32
_FOUND: Final = 0.1  # of what a weight leaves of its result, that rounding of inputs may leave
_NAMED: Final = 0.5  # of the error that is left with what a layer computes with besides


@dataclass(frozen=True, slots=True)
class LayerError:
    """The error that a quantised layer makes itself in one call, beside what its rounding predicts.

    Attributes:
        own: Relative to the norm of the reference's result of the same input, no unit.
        predicted: The same, as its rounding predicts.
        worst: The largest ratio of one output, over what chance allows.
        text: The numbers of its weight in words.
        mistake: What is wrong with it, if that is known.
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
    mistake: LayerMistake = field(default_factory=LayerMistake)
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
        is_small = self.taken <= max(MOST_CUT * self.predicted, _CUT_OF_RESULT)
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
        text += f": {self.mistake.text}" if self.mistake.text else ""
        text += f", which leaves {self.mistake.left:.2g}" if self.mistake.kind else ""
        return POLICY.quantised.finding("quantisation", value, text)


def layer_error(
    product: Product,
    reference: Array,
    weight: WeightNumbers,
    module: ModuleInfo | None,
    precision: Precision | None,
    of_bias: Array | None,
    beside: Callable[[], Mapping[str, Array]],
    *,
    is_right: bool,
) -> LayerError:
    """The own error of a call beside what rounding predicts.

    1. How its inputs and results are rounded its module says, or else its result.
    2. The error is held against what the errors of the weight make of the input, or, if that is not the
       reference's rounded, what independent errors of rounding would; and in quadrature what rounding inputs
       and results adds, and what the bias is off by if that is rounded.
    3. If it is more, and ranges do not cut it off, what the layer does is looked for.
    4. If that is no wrong reading of a right weight, and the layer computes with more than that, independent
       errors of rounding are allowed, too.
    """
    settings = dict(module.settings) if module is not None else {}
    settings |= _found_rounding(product, weight, settings)
    roundings = _Roundings.of(product, weight, settings, precision, of_bias)
    squares = (
        _sum_of(np.square(multiply(product.x, weight.values - reference)), product.kept)
        if is_right
        else _sums(np.square(product.x), weight.variances, product.kept)
    )
    error = _error_beside(product, weight, roundings, squares, is_known=is_right)
    if error.finding.status == "within-rounding":
        return error if is_right else replace(error, is_of_more=_has_more(product, weight, roundings))
    if error.cut and error.rest <= error.predicted * POLICY.quantised.green * error.chance:
        return error  # which says it all
    says = any(f"{of}_{name}" in settings for of in ("input", "output") for name in ("step", "bits"))
    besides = math.sqrt(float(roundings.squares.sum()))
    mistake = LayerTrial(product, weight, beside(), besides, settings if says else {}).describe()
    is_read_right = is_right and not mistake.kind.startswith("weight-")
    if is_read_right and _has_more(product, weight, roundings):
        squares = _sums(np.square(product.x), weight.variances, product.kept)
        other = _error_beside(product, weight, roundings, squares, is_known=False)
        if other.finding.status == "within-rounding":
            return replace(other, is_of_more=True)
    return replace(error, mistake=mistake)


@dataclass(frozen=True, slots=True)
class _Roundings:
    """What a call rounds besides its weight.

    Attributes:
        settings: How its inputs and results are rounded.
        squares: The squared error that this, its bias and the runs' precision make of results, `[outputs]`.
        has_inputs: Whether its inputs are rounded.
        has_results: Whether its results are.
    """

    settings: Mapping[str, Any]
    squares: Array
    has_inputs: bool
    has_results: bool

    @classmethod
    def of(
        cls,
        product: Product,
        weight: WeightNumbers,
        settings: Mapping[str, Any],
        precision: Precision | None,
        of_bias: Array | None,
    ) -> _Roundings:
        """What a call rounds by its settings."""
        x, kept = product.x, product.kept
        noise = _ROUNDINGS * POLICY.noise(precision or POLICY.precision("float32"))
        squares = np.square(product.wanted).sum(axis=0) * noise**2
        inputs = input_variances(x, settings)[:, None] * (x != 0)  # zeros are numbers themselves
        if inputs.any():
            squares = squares + _sums(inputs, np.square(weight.values), kept)
        step = settings.get("output_step")
        rows = len(x) if kept is None else kept.sum(axis=0)
        if isinstance(step, float):
            squares = squares + rows * step**2 / 12
        if of_bias is not None:
            squares = squares + rows * np.square(of_bias)
        return cls(settings, squares, bool(inputs.any()), step is not None)


def _error_beside(
    product: Product, weight: WeightNumbers, roundings: _Roundings, squares: Array, *, is_known: bool
) -> LayerError:
    """The own error of a call beside a prediction.

    Args:
        product: The call.
        weight: Its weight.
        roundings: What it rounds besides.
        squares: The squared error that its weight makes of results, `[outputs]`.
        is_known: Whether the errors of the weight are known, and these squares no expectation.
    """
    x, own, kept = product.x, product.y - product.wanted, product.kept
    predicted = squares + roundings.squares
    size = max(float(np.linalg.norm(product.wanted)), 1e-300)
    worst = 0.0
    if not roundings.has_inputs and not roundings.has_results:  # of like rows, these errors are alike
        made = np.square(own).sum(axis=0)
        counts = np.full(len(made), len(x)) if kept is None else kept.sum(axis=0)
        by_chance = np.array([chance_of(max(1, min(int(count), x.shape[1]))) for count in counts])
        if not is_known:  # errors that are not known fall on few directions if the rows are alike
            by_chance = np.full(len(made), chance_of_rows(x))
        ratios = np.sqrt(made / np.maximum(predicted, 1e-300)) / by_chance
        worst = float(ratios.max(initial=0.0))
    of_inputs = cut_inputs(x, roundings.settings)
    taken = multiply(of_inputs.error, weight.values) if of_inputs is not None else np.zeros_like(own)
    taken = taken if kept is None else taken * kept
    of_results = cut_results(product.wanted + taken, roundings.settings)
    taken = taken + of_results.error if of_results is not None else taken
    return LayerError(
        float(np.linalg.norm(own)) / size,
        math.sqrt(float(predicted.sum())) / size,
        worst,
        weight.text,
        chance=1.0 if is_known and not roundings.has_inputs else chance_of(x.shape[1]),
        cut=tuple(cut for cut in (of_inputs, of_results) if cut is not None),
        taken=float(np.linalg.norm(taken)) / size,
        rest=float(np.linalg.norm(own - taken)) / size,
    )


def _sums(rows: Array, weight: Array, kept: Array | None) -> Array:
    """The sum of the products of rows and a weight, `[outputs]`, of those results that are kept."""
    if kept is None:
        whole: Array = multiply(rows.sum(axis=0)[None], weight)[0]
        return whole
    return _sum_of(multiply(rows, weight), kept)


def _sum_of(results: Array, kept: Array | None) -> Array:
    """The sum of results, `[outputs]`, of those that are kept."""
    sums: Array = (results if kept is None else results * kept).sum(axis=0)
    return sums


def _rest(product: Product, weight: WeightNumbers, x: Array) -> float:
    """How far a result is from what the layer's own weight makes of an input, and the reference's bias."""
    made = np.clip(multiply(x, weight.values) + product.bias, *product.ends)
    return float(np.linalg.norm(product.y - made))


def _has_more(product: Product, weight: WeightNumbers, roundings: _Roundings) -> bool:
    """Whether a layer that rounds nothing computes with more than a weight and a bias, as rotated inputs."""
    if roundings.has_inputs or roundings.has_results:
        return False
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
        x = rounded_inputs(product.x, _BITS, has_rows=has_rows, is_symmetric=is_symmetric)
        if _rest(product, weight, x) <= _FOUND * rest:
            return {"input_bits": _BITS, "input_rows": has_rows, "input_symmetric": is_symmetric}
    return {}


def input_variances(x: Array, settings: Mapping[str, Any]) -> Array:
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


def step_error(wanted: Array, made: Array, step: float, settings: Mapping[str, Any]) -> LayerError:
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
        text = f"{counted(far, 'value', 'lie')} beyond the range of its numbers"
        error = replace(error, mistake=LayerMistake(text))
    return error


def row_error(
    lookup: LookUp, reference: Array, weight: WeightNumbers, module: ModuleInfo | None, *, is_right: bool
) -> LayerError:
    """The own error of a table's result beside what rounding the table predicts, which is known exactly."""
    rows, values = lookup.rows, lookup.values
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
