"""What a quantised layer does whose result is not what its own weight makes of its input.

Something is named if it makes the result but for what rounding of inputs and results adds: another reading
of the weight's bits (`weight_readings`), an input that is divided, rotated or rounded in another way, a
factor, another table of numbers, or a product of two matrices beside the weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from tensorcap.comparison.layer_products import Product, multiply
from tensorcap.comparison.weight_readings import Reading, codes_of, readings, table_of
from tensorcap.comparison.weight_rounding import WeightNumbers
from tensorcap_formats.dtypes import Array

_LEFT: Final = 0.05  # of the error, that what is named may leave
_NAMED: Final = 0.5  # of the error, that it may leave at most, whatever rounding adds
_BESIDES: Final = 1.5  # times what rounding of inputs and results is expected to add
_BETTER: Final = 0.5  # times what another one leaves, that one leaves that comes later
_OUTPUTS: Final = 64  # that are looked at
_FEW_OUTPUTS: Final = 16  # the same, where each row is tried with the step of each
_FEW_ROWS: Final = 32  # the same
_BITS: Final = (8, 4, 6, 7, 5, 3, 2)  # of inputs, in the order of trials
_MOST: Final = 0.9  # of rows, whose steps are others
_TABLE: Final = 16  # numbers of a table that is fitted
_ALIKE: Final = 0.02  # by which factors of powers of two may be off, relative
_FEWEST_ROWS: Final = 4  # of which the mean is a bias
_OFF: Final = 0.01  # by which a fitted number of a table may be off, of the largest


@dataclass(frozen=True, slots=True)
class LayerMistake:
    """What a layer does whose result is wrong.

    Attributes:
        text: The same in words; "" if it is not known.
        kind: What such a mistake is called; "" if the text names none.
        left: What it leaves of the result, relative to the reference's of the same input.
    """

    text: str = ""
    kind: str = ""
    left: float = 0.0


@dataclass(frozen=True, slots=True)
class LayerTrial:
    """A call of a layer whose result is wrong, and what it may be made of.

    Attributes:
        product: The call.
        weight: The layer's own weight.
        beside: Other parameters and buffers of the layer, by slot.
        besides: What rounding of inputs and results is expected to add to the result, as its norm.
        settings: How the layer says that it rounds its inputs and results; nothing if it rounds none.
    """

    product: Product
    weight: WeightNumbers
    beside: Mapping[str, Array]
    besides: float
    settings: Mapping[str, Any]

    def describe(self) -> LayerMistake:
        """Find what the layer does."""
        product = self.product
        own = float(np.linalg.norm(product.y - product.wanted))
        limit = min(_NAMED * own, float(np.hypot(_LEFT * own, _BESIDES * self.besides)))
        stated = self
        text = self._of_own_weight(limit)
        if self.settings and not text:
            stated = replace(self, product=replace(product, x=stated_inputs(product.x, self.settings)))
            text = stated._of_own_weight(limit)
        if text:
            return LayerMistake(text)
        few, rows, share = self._few()
        of_stated = replace(few, product=replace(few.product, x=stated.product.x))
        tried = itertools.chain(_read_otherwise(of_stated, self.weight, rows), _given_otherwise(few))
        found = _best(tried, limit * share)
        if found is not None:
            size = float(np.linalg.norm(few.product.wanted))
            return replace(found, text=f"it is what its weight makes {found.text}", left=found.left / size)
        for find in (_factor, _steps_of_rows, _other_numbers, _product_beside):
            found = find(stated, limit)
            if found is not None:
                return replace(found, left=found.left / float(np.linalg.norm(product.wanted)))
        return LayerMistake("" if self.settings else "it is not what its own weight makes of its input")

    def _of_own_weight(self, limit: float) -> str:
        """What to say of a layer that computes with its weight alone; "" if it does not."""
        product, bias = self.product, self.product.bias
        rest = product.rest(self.weight.values)
        if np.linalg.norm(rest - bias * (rest != 0)) <= limit:
            wrong = product.wanted - bias - multiply(product.x, self.weight.values)
            for name, made in _products_beside(self):
                if np.linalg.norm(wrong - made) <= _NAMED * np.linalg.norm(wrong):
                    return f"the product of its {name} is not added"
            return "it is what its weight makes, which is not the reference's"
        if np.linalg.norm(rest) <= limit:
            return "no bias is added"
        mean = product.mean(rest)
        if np.linalg.norm(rest - mean) > limit or len(rest) < _FEWEST_ROWS:
            return ""
        added = np.where(
            np.abs(mean).max(axis=0) > 0, mean.sum(axis=0) / np.maximum((mean != 0).sum(axis=0), 1), 0
        )
        factor = float((added * bias).sum() / max(float(np.square(bias).sum()), 1e-300))
        if np.linalg.norm(added - factor * bias) <= _LEFT * np.linalg.norm(added):
            return f"{factor:.3g} times the bias is added"
        return "another bias is added"

    def _few(self) -> tuple[LayerTrial, slice | Array, float]:
        """The same of some of the outputs, which they are, and the share of what is wrong that is theirs."""
        product, weight = self.product, self.weight
        outputs = len(weight.values)
        if outputs <= _OUTPUTS or product.x.shape[1] != weight.values.shape[1]:
            return self, slice(None), 1.0
        places = np.linspace(0, outputs - 1, _OUTPUTS).astype(np.intp)
        few = replace(
            product, y=product.y[:, places], wanted=product.wanted[:, places], bias=product.bias[places]
        )
        whole, own = (float(np.linalg.norm(side.y - side.wanted)) for side in (product, few))
        return replace(self, product=few, weight=weight.at(places)), places, own / max(whole, 1e-300)


def _rest(trial: LayerTrial, values: Array, x: Array | None = None) -> float:
    """What another weight, or another input, leaves of a result, but for a constant of each output."""
    product = trial.product if x is None else replace(trial.product, x=x)
    rest = product.rest(values)
    return float(np.linalg.norm(rest - _bias(product, rest)))


def _bias(product: Product, rest: Array) -> Array:
    """A constant of each output: the mean of what is left, of a few rows the reference's bias."""
    return product.mean(rest) if len(rest) >= _FEWEST_ROWS else product.bias * (rest != 0)


def _best(tried: Iterator[LayerMistake], limit: float) -> LayerMistake | None:
    """What leaves least; of two that leave about as little the first."""
    best, least = None, limit
    for mistake in tried:
        if mistake.left <= least:
            best, least = mistake, mistake.left * _BETTER
    return best


def _read_otherwise(trial: LayerTrial, weight: WeightNumbers, rows: slice | Array) -> Iterator[LayerMistake]:
    """What other readings of a whole weight leave, of the rows that the outputs of a trial have."""
    for reading in _own_readings(weight, rows, trial.beside):
        values = reading.weight.values
        if values.shape == trial.weight.values.shape and np.isfinite(values).all():
            yield LayerMistake(reading.made, reading.kind, _rest(trial, values))


def _own_readings(
    weight: WeightNumbers, rows: slice | Array, beside: Mapping[str, Array]
) -> Iterator[Reading]:
    """Other readings of rows of a weight, with what its layer says of the groups of its columns."""
    yield from readings(weight, rows)
    few = weight.at(rows)
    columns = weight.values.shape[1]
    for name, index in beside.items():
        if (
            index.shape != (columns,)
            or weight.steps.shape[1] != columns
            or not (index == np.rint(index)).all()
        ):
            continue
        groups, first = np.unique(index, return_index=True)
        if not 1 < len(groups) < columns or columns % len(groups):
            continue
        order = first[np.arange(columns) // (columns // len(groups))]
        steps = np.array(few.wide_steps)[:, order]
        zeros = np.broadcast_to(few.wide_zeros, few.values.shape)[:, order]
        made = f"with its groups in order, as if {name.partition('.')[2]} were not there (act-order)"
        values = (few.numbers - zeros) * steps
        yield Reading("weight-scales", "", made, replace(few, values=values, steps=steps, zeros=zeros))


# --- inputs


def _given_otherwise(trial: LayerTrial) -> Iterator[LayerMistake]:
    """What the weight leaves with inputs that are divided, rotated or rounded otherwise."""
    weight = trial.weight.values
    for text, x in _changed(trial.product.x, trial.beside):
        if text:
            rest = _rest(trial, weight, stated_inputs(x, trial.settings))
            yield LayerMistake(f"of inputs that are {text}", "layer-inputs", rest)
        if trial.settings:
            continue
        for bits, has_rows, is_symmetric in itertools.product(_BITS, (True, False), (True, False)):
            rounded = rounded_inputs(x, bits, has_rows=has_rows, is_symmetric=is_symmetric)
            which = f"rounded to {bits} bits with a step for {'each row' if has_rows else 'all'}"
            what = f"of inputs that are {text}{' and ' if text else ''}{which}"
            yield LayerMistake(what, "layer-inputs", _rest(trial, weight, rounded))


def _changed(x: Array, beside: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
    """Inputs as they are, and with what a layer holds applied once more, or taken off."""
    size = x.shape[1]
    yield "", x
    for slot, values in beside.items():
        name = slot.partition(".")[2]
        if values.size == size and values.all():
            yield f"not divided by its {name}, by which its columns were multiplied", x * values.reshape(-1)
            yield f"divided by its {name}, or not multiplied by it", x / values.reshape(-1)
        if values.shape == (size, size):
            for matrix in (values, values.T):
                yield f"not rotated by its {name}, or twice", x @ matrix
    if size & (size - 1) == 0:
        yield "rotated by a Hadamard matrix, or not rotated back by one", _hadamard(x)


def _hadamard(x: Array) -> Array:
    """The fast Walsh-Hadamard transform of each row, normalised: it is its own inverse."""
    size = x.shape[1]
    made, step = np.array(x), 1
    while step < size:
        pairs = made.reshape(len(x), -1, 2, step)
        made = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2)
        made, step = made.reshape(len(x), size), 2 * step
    scaled: Array = made / np.sqrt(size)
    return scaled


def stated_inputs(x: Array, settings: Mapping[str, Any]) -> Array:
    """Return inputs as a layer says that it rounds them, in the settings of its module."""
    step, ends, bits = (settings.get(f"input_{name}") for name in ("step", "range", "bits"))
    if isinstance(step, float):
        low, high = ends if isinstance(ends, list) else (-np.inf, np.inf)
        in_steps: Array = np.clip(np.rint(x / step) * step, low, high)
        return in_steps
    if not isinstance(bits, int):
        return x
    has_rows, is_symmetric = (settings.get(f"input_{name}") is True for name in ("rows", "symmetric"))
    return rounded_inputs(x, bits, has_rows=has_rows, is_symmetric=is_symmetric)


def rounded_inputs(x: Array, bits: int, *, has_rows: bool, is_symmetric: bool) -> Array:
    """Round inputs to a few bits, as layers do at each call.

    Args:
        x: `[rows, inputs]`.
        bits: Of a number.
        has_rows: Whether each row has a step of its own.
        is_symmetric: Whether there is no zero point.
    """
    axis = 1 if has_rows else None
    low, high = (np.asarray(end(x, axis=axis, keepdims=True)) for end in (np.min, np.max))
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    top = 2 ** (bits - 1) - 1
    step = np.maximum(-low, high) / top if is_symmetric else (high - low) / (2 * top + 1)
    step = np.where(step == 0, 1.0, step)
    zero = 0.0 if is_symmetric else np.rint(-low / step)
    ends = (-top, top) if is_symmetric else (0, 2 * top + 1)
    rounded: Array = (np.clip(np.rint(x / step) + zero, *ends) - zero) * step
    return rounded


def _steps_of_rows(trial: LayerTrial, limit: float) -> LayerMistake | None:
    """Each row is rounded to 8 bits with the step of another one, which is found among those of all."""
    product, weight = trial.product, trial.weight.values
    if trial.settings or product.x.shape[1] != weight.shape[1] or len(product.x) < 2:
        return None
    own = product.y - product.wanted
    rows = np.argsort(-np.square(own).sum(axis=1), kind="stable")[:_FEW_ROWS]
    outputs = np.unique(np.linspace(0, len(weight) - 1, _FEW_OUTPUTS).astype(np.intp))
    steps = np.abs(product.x).max(axis=1) / (2 ** (_BITS[0] - 1) - 1)
    steps = np.where(steps == 0, 1.0, steps)
    top = 2 ** (_BITS[0] - 1) - 1
    best, left = [], []
    for row in rows.tolist():
        wide = np.clip(np.rint(product.x[row] / steps[:, None]), -top, top) * steps[:, None]
        rest = product.y[row, outputs] - wide @ weight[outputs].T - product.bias[outputs]
        errors = np.square(rest).sum(axis=1)
        best.append(int(np.argmin(errors)))
        left.append(float(errors.min()))
    errors = np.square(own[np.ix_(rows, outputs)]).sum(axis=1)
    are_found = np.array(left) <= (limit / max(float(np.linalg.norm(own)), 1e-300)) ** 2 * errors
    are_others = steps[best] != steps[rows]
    if are_found.mean() < _MOST or are_others.mean() < _MOST:
        return None
    behind = rows - np.array(best)
    which = "other rows"
    for by, name in ((1, "the row before"), (-1, "the row behind")):
        if (behind == by).mean() >= _MOST:
            which = name
    used = np.unique(best).tolist()
    if len(used) <= max(1, len(rows) // 8):
        which = f"row{'s' * (len(used) > 1)} {', '.join(map(str, used))}"
    text = f"its inputs are rounded with the steps of {which}, and cut where these are too small"
    share = np.sqrt(sum(left) / max(float(errors.sum()), 1e-300))
    return LayerMistake(text, "layer-inputs", float(share * np.linalg.norm(own)))


# --- factors, tables, and what is added


def _factor(trial: LayerTrial, limit: float) -> LayerMistake | None:
    """The result is a number of times what the weight makes, or a number for each output."""
    product = trial.product
    made = multiply(product.x, trial.weight.values)
    if np.isfinite(product.ends).any():
        return None
    made, y = made - made.mean(axis=0), product.y - product.y.mean(axis=0)
    squares = np.square(made).sum(axis=0)
    factors = (made * y).sum(axis=0) / np.maximum(squares, 1e-300)
    factor = float((made * y).sum() / max(float(squares.sum()), 1e-300))
    left = float(np.linalg.norm(y - made * factor))
    if left <= limit:
        power = round(float(np.log2(abs(factor)))) if factor else 0
        is_power = power != 0 and abs(factor / 2.0**power - 1) <= _ALIKE
        as_with = f", as with exponents that are {abs(power)} off" if is_power else ""
        text = f"it is {factor:.3g} times what its weight makes{as_with}"
        return LayerMistake(text, "layer-factor", left)
    left = float(np.linalg.norm(y - made * factors))
    if len(y) >= _FEWEST_ROWS and left <= limit:
        low, high = factors.min(), factors.max()
        between = f"{low:.3g} to {high:.3g}"
        text = f"each output is {between} times what its weight makes, as with scales of other rows"
        return LayerMistake(text, "layer-factor", left)
    return None


def _other_numbers(trial: LayerTrial, limit: float) -> LayerMistake | None:
    """Numbers of four bits stand for others than those of their format: a table is fitted (least squares)."""
    product, weight, table = trial.product, trial.weight, table_of(trial.weight.number)
    if table.size > _TABLE or product.x.shape[1] != weight.values.shape[1]:
        return None
    if np.isfinite(product.ends).any():
        return None
    places = np.unique(np.linspace(0, len(weight.values) - 1, _FEW_OUTPUTS).astype(np.intp))
    few = weight.at(places)
    steps, zeros, codes = few.wide_steps, np.broadcast_to(few.wide_zeros, few.values.shape), codes_of(few)
    if codes is None:
        return None
    sums = np.stack([product.x @ (steps * (codes == code)).T for code in range(table.size)], axis=-1)
    y = product.y[:, places] + product.x @ (zeros * steps).T
    sums, y = sums - sums.mean(axis=0), y - y.mean(axis=0)
    fitted = np.linalg.lstsq(sums.reshape(-1, table.size), y.reshape(-1), rcond=None)[0]
    wrong = np.flatnonzero(np.abs(fitted - table) > _OFF * np.abs(table).max())
    codes = codes_of(weight) if wrong.size else None
    if codes is None:
        return None
    others = np.array(table)
    others[wrong] = fitted[wrong]
    left = _rest(trial, (others[codes] - weight.wide_zeros) * weight.wide_steps)
    if left > limit:
        return None
    named = ", ".join(f"{fitted[code]:.3g} for {table[code]:g}" for code in wrong[:4].tolist())
    more = f" and {len(wrong) - 4} others" if len(wrong) > 4 else ""
    text = f"it reads its {weight.number} numbers by another table: {named}{more}"
    return LayerMistake(text, "weight-format", left)


def _products_beside(trial: LayerTrial) -> Iterator[tuple[str, Array]]:
    """Products of two matrices that a layer holds beside its weight with its input, and their names."""
    columns, rows = trial.product.x.shape[1], trial.product.y.shape[1]
    held = {slot: values for slot, values in trial.beside.items() if values.ndim == 2}
    for first, second in itertools.permutations(held, 2):
        for a, b in itertools.product(*((held[slot], held[slot].T) for slot in (first, second))):
            if a.shape[1] == columns and b.shape == (rows, a.shape[0]) and a.shape[0] < min(rows, columns):
                names = " and ".join(slot.partition(".")[2] for slot in (first, second))
                yield names, trial.product.x @ a.T @ b.T


def _product_beside(trial: LayerTrial, limit: float) -> LayerMistake | None:
    """The result is what the weight makes, and a number of times the product of two other matrices."""
    product = trial.product
    rest = product.rest(trial.weight.values)
    rest = rest - _bias(product, rest)
    for names, made in _products_beside(trial):
        made = made - made.mean(axis=0)
        factor = float((made * rest).sum() / max(float(np.square(made).sum()), 1e-300))
        left = float(np.linalg.norm(rest - factor * made))
        if left > limit or abs(factor - 1) <= _ALIKE:
            continue
        how = "subtracted, not added" if abs(factor + 1) <= _ALIKE else f"added {factor:.3g} times"
        return LayerMistake(f"the product of its {names} is {how}", "layer-product", left)
    return None


def describe_unfinite(x: Array, y: Array, bias: Array, weight: WeightNumbers) -> LayerMistake:
    """Find the reading of a weight by which results are not finite where they are not.

    Args:
        x: What the layer was given, `[rows, inputs]`.
        y: What it made, `[rows, outputs]`.
        bias: What the reference adds, `[outputs]`.
        weight: The layer's own weight.
    """
    is_finite = np.isfinite(y).all(axis=0)
    for reading in readings(weight):
        values = reading.weight.values
        if values.shape != weight.values.shape or np.isfinite(values).all():
            continue
        if not np.array_equal(np.isfinite(values).all(axis=1), is_finite) or not is_finite.any():
            continue
        made = x @ values[is_finite].T + bias[is_finite]
        left = float(np.linalg.norm(y[:, is_finite] - made) / max(float(np.linalg.norm(made)), 1e-300))
        if left <= _LEFT:
            return LayerMistake(f"it is what its weight makes {reading.made}", reading.kind, left)
    return LayerMistake()
