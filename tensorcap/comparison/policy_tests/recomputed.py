"""Does a target with weights in few bits compute of its own inputs what the reference computes? See POL-650.

What such weights do to all that follows hides mistakes of modules without them, in an error of their inputs
of some percent. But these modules compute in floats, and the reference's records show what: formulas that
make its results of its inputs are held against the target's results and inputs, so that nothing but the
error of a module itself is left. Formula: own error / rho of the module's own precision, against
`Policy.leaf_own`, of attentions `Policy.composite_own`.

1. Results and arguments are taken in execution order; one that holds the same as an earlier one was only
   handed on.
2. A leaf is a function of each element if the reference's elements are points of one, else a product with its
   weight, or a norm, if such a formula makes its results with its own parameters, which the target has too.
3. The core of an attention is one if a usual formula makes its result of queries, keys and values, with the
   tables and the mask that the module was given.
4. What else the code between modules made is the sum of two earlier tensors of its shape, or their product,
   times numbers that are fitted to the reference.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Final

import numpy as np

from tensorcap.comparison.attention_formula import (
    AttentionFormula,
    AttentionValues,
    are_tables,
    choose_part,
    find_attention_formula,
    heads_of,
    sees_something,
    split_sources,
)
from tensorcap.comparison.pair import Finding
from tensorcap.comparison.policy import POLICY, Limits, Precision
from tensorcap.comparison.policy_tests.context import Context, MeasuredPair, PolicyTest
from tensorcap.comparison.robust_errors import first_rows, interpolation_error, sample
from tensorcap.runs import Call, Core, contents_of, enclosing_sites, is_telling
from tensorcap.wording import number_and_limit
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array, decode
from tensorcap_formats.keys import escape
from tensorcap_formats.records import Record

_ELEMENTS: Final = 1 << 17  # as many tell
_FEW: Final = 1 << 9  # by which two terms or factors are chosen
_EARLIER: Final = 16  # tensors of a shape that a sum may be of
_SMOOTH: Final = 1e-3  # relative error of a function, of which half of its points are known, at the others
_POINTS: Final = 256  # of a function, at least
_WITHIN: Final = 0.5  # of the target's elements have to lie between them
_BEYOND: Final = 3.0  # times what a formula misses the reference by, that an error counts from
_EXACT: Final = 4e-6  # relative error of a sum or product in float32
_WEIGHTS: Final = 1 << 22  # elements of a weight that are multiplied
_ROWS: Final = 64  # of an input of a product, the first ones
_ELEMENTS_OF_SEQUENCES: Final = 1 << 24  # of an attention's result, the first ones
_MATRIX: Final = 2  # axes
_SIDES: Final = 2
_TOKENS: Final = 3  # axes of what has tokens and channels
_EPS: Final = (1e-5, 1e-6, 1e-12)  # of norms whose settings do not say it


class RecomputedTest(PolicyTest):
    """Tests `recomputed`, of modules without weights in few bits in a target that has some."""

    names = ("recomputed",)
    is_local = True
    is_evidence = True

    def judge(self, context: Context) -> Iterator[tuple[str, Finding]]:
        """Judge results whose formula is found in the reference."""
        runs = context.runs_precision
        if context.injected or runs is None or not runs.own_roundings or not context.reference.is_ordered:
            return
        yield from _Trace(context).findings()


@dataclass(frozen=True, slots=True)
class _Values:
    """Values of both sides of a pair, float64, one dimension: the same elements of each."""

    reference: Array
    target: Array


@dataclass(frozen=True, slots=True)
class _Recomputed:
    """What the reference's formula makes of the target's inputs.

    Attributes:
        formula: In words.
        missed: By how much the formula misses the reference's own result, relative.
        errors: By how much the target's result differs from what the formula makes, of each element.
        scale: What the norm of the errors is in proportion to: that of the result, or of its largest term.
    """

    formula: str
    missed: float
    errors: Array
    scale: float

    @property
    def own_error(self) -> float:
        """The error of the result that its inputs do not have, relative; 0 where the formula is no better."""
        error = float(np.linalg.norm(self.errors)) / self.scale if self.scale else 0.0
        return error if error > _BEYOND * self.missed else 0.0


_Sides = tuple[Record, Record]  # of the reference and the target


@dataclass
class _Trace:
    """The records of a run in execution order, with earlier ones by their shape.

    Attributes:
        context: What the test may look at.
    """

    context: Context
    _known: set[tuple[object, ...]] = field(default_factory=set)
    _earlier: dict[tuple[object, ...], deque[tuple[str, _Values]]] = field(default_factory=dict)
    _likely: list[AttentionFormula] = field(default_factory=list)  # the last one that was found
    _unknown: set[tuple[object, ...]] = field(default_factory=set)  # shapes of attentions without one

    def findings(self) -> Iterator[tuple[str, Finding]]:
        """Yield the finding of each result, or argument, whose formula is found."""
        calls = self.context.calls
        sites = {call.site for call in calls.calls}
        cores = {core.results[0].key.text: core for core in calls.cores()}
        records = [
            (record.order, is_argument, record, call)
            for call in calls.calls
            for is_argument, part in ((True, call.inputs), (False, call.outputs))
            for record in part
        ]
        for _, is_argument, record, call in sorted(records, key=lambda entry: entry[0]):
            if not is_telling(record) or contents_of(record) in self._known:
                continue
            self._known.add(contents_of(record))
            sides = self._sides(record)
            values = None if sides is None else self._read(sides)
            if values is None:
                continue
            pair = self.context.measured(record.key.text)
            place = record.key.rank, record.key.step, record.shape
            earlier = self._earlier.setdefault(place, deque(maxlen=_EARLIER))
            if pair is not None and self._is_judged(pair):
                core, limits, maker = cores.get(pair.key), POLICY.leaf_own, call.site
                if is_argument:
                    maker = next((site for site in enclosing_sites(call.site) if site in sites), maker)
                if core is not None:
                    made, limits, maker = self._attention(core, pair), POLICY.composite_own, core.attention
                elif calls.is_leaf(call.site) and not is_argument:
                    made = self._of_leaf(call, pair, values)
                else:
                    made = _combination(values, earlier)
                if made is not None and maker in pair.precision.own_roundings:
                    yield pair.key, _judge(pair, pair.precision.of_module(maker), made, limits)
            earlier.appendleft((record.key.text, values))

    def _is_judged(self, pair: MeasuredPair) -> bool:
        return pair.key in self.context.open_keys and pair.key not in self.context.shuffled

    def _sides(self, record: Record) -> _Sides | None:
        """Both records of floats under a key, of one shape; None if one is not known, or not compared."""
        pair = self.context.pairs.get(record.key.text)
        if pair is None or pair.reference is None or pair.target is None or not pair.is_compared:
            return None
        sides = pair.reference, pair.target
        are_known = all(side.stored and side.dtype.kind == "float" and side.shape for side in sides)
        return sides if are_known and sides[0].shape == sides[1].shape else None

    def _read(self, sides: _Sides) -> _Values | None:
        """Read both sides; None if not all of it is finite."""
        archives = self.context.reference, self.context.target
        values = [sample(archive, side, _ELEMENTS) for archive, side in zip(archives, sides, strict=True)]
        return _Values(*values) if all(np.isfinite(side).all() for side in values) else None

    def _of_leaf(self, leaf: Call, result: MeasuredPair, values: _Values) -> _Recomputed | None:
        """What a leaf makes of its one input; None if that is not known."""
        source = self._sides(leaf.inputs[0]) if len(leaf.inputs) == 1 else None
        module = self.context.reference.info.modules.get(leaf.site)
        if source is None:
            return None
        parameters = {} if module is None else module.parameters
        if parameters.keys() - {"weight", "bias"} or (module is not None and module.buffers):
            return None
        held = {name: self._parameter(result.reference, name) for name in parameters}
        weight, bias = held.get("weight"), held.get("bias")
        if any(record is None for record in held.values()):
            return None
        if weight is not None and len(weight.shape) == _MATRIX:
            return self._linear(source, result, weight, bias)
        given = self._read(source) if source[0].shape == result.reference.shape else None
        width = result.reference.shape[-1]
        if given is None or any(r is not None and r.shape != (width,) for r in (weight, bias)):
            return None
        noise = _noise(result.reference)
        if weight is bias is None and (found := _function(given, values, noise)):
            return found
        factors, terms = (
            None if record is None else self._floats(self.context.reference, record)
            for record in (weight, bias)
        )
        settings = {} if module is None else module.settings
        epsilons = [n for name, n in settings.items() if "eps" in name and isinstance(n, float)]
        variants = _norms(factors, terms, epsilons or _EPS)
        sides = [
            tuple(side.reshape(-1, width) for side in both)
            for both in ((given.reference, values.reference), (given.target, values.target))
            if both[0].size % width == 0
        ]
        for norm in variants if len(sides) == _SIDES else ():
            ours, theirs = ((norm(x), y) for x, y in sides)
            if (found := _compared("norm of its input", ours, theirs, 2 * noise)) is not None:
                return found
        return None

    def _parameter(self, result: Record, name: str) -> Record | None:
        """A parameter of the reference's module, if the target has the same."""
        pair = self.context.pairs.get(f"{result.key.step}/{result.key.site}/param.{escape(name)}")
        if pair is None or pair.reference is None or not pair.reference.stored or not pair.is_green:
            return None
        return pair.reference

    def _linear(
        self, source: _Sides, result: MeasuredPair, weight: Record, bias: Record | None
    ) -> _Recomputed | None:
        """What the product with a weight in floats makes, of its first outputs."""
        outputs, inputs = weight.shape
        shapes = source[0].shape, result.reference.shape
        if shapes[0][:-1] != shapes[1][:-1] or (shapes[0][-1], shapes[1][-1]) != (inputs, outputs):
            return None
        count = min(outputs, max(1, _WEIGHTS // inputs))
        bits = self.context.reference.read_range(weight, 0, count * inputs)
        matrix = decode(bits, weight.dtype).astype(np.float64).reshape(count, inputs)
        added = 0.0 if bias is None else self._floats(self.context.reference, bias)[:count]
        ours, theirs = (
            (
                first_rows(archive, x, _ROWS) @ matrix.T + added,
                first_rows(archive, y, _ROWS)[:, :count],
            )
            for archive, x, y in (
                (self.context.reference, source[0], result.reference),
                (self.context.target, source[1], result.target),
            )
        )
        noise = 2 * _noise(result.reference)
        return _compared("product of its input and its weight", ours, theirs, noise)

    def _attention(self, core: Core, result: MeasuredPair) -> _Recomputed | None:
        """What the reference's attention makes of the target's queries, keys and values."""
        records = [sides for record in core.sources if (sides := self._sides(record)) is not None]
        shapes = tuple(record.shape for record in core.sources)
        ours, theirs = result.reference, result.target
        if len(records) < len(core.sources) or len(ours.shape) != _TOKENS or shapes in self._unknown:
            return None
        if not all(len(shape) in (3, 4) and shape[0] == ours.shape[0] for shape in shapes):
            return None
        count = _ELEMENTS_OF_SEQUENCES * ours.shape[0] // ours.size
        if not count:
            return None
        archives = self.context.reference, self.context.target
        given, given_target = (
            AttentionValues(
                split_sources([self._floats(archive, record, count) for record in sources], ours.shape[-1]),
                *self._tables_and_mask(archive, core, ours, count),
            )
            for archive, sources in zip(archives, zip(*records, strict=True), strict=True)
        )
        y, y_target = self._floats(archives[0], ours, count), self._floats(archives[1], theirs, count)
        module, noise = self.context.reference.info.modules.get(core.attention), 2 * _noise(ours)
        settings = {} if module is None else module.settings
        formula = find_attention_formula(given, y, settings, noise, self._likely)
        if formula is None:
            self._unknown.add(shapes)
            return None
        self._likely = [formula]
        heads, queries = choose_part(y, formula.channels)
        kept = ~np.zeros((len(y), queries.size), np.bool_)
        if (left_out := self.context.padding.left_out(ours)) is not None:
            kept &= ~left_out[:count, queries, 0]
        for mask in (given.mask, given_target.mask):
            kept &= True if mask is None else sees_something(mask, queries)
        results = []
        for values, made in ((given, y), (given_target, y_target)):
            wanted = formula(values, heads, queries)
            if wanted is None:
                return None
            results.append((wanted[kept], heads_of(made, formula.channels)[:, queries][:, :, heads][kept]))
        formula_text = "attention of its queries, keys and values"
        return _compared(formula_text, results[0], results[1], noise)

    def _tables_and_mask(
        self, archive: Archive, core: Core, result: Record, count: int
    ) -> tuple[Sequence[Array], Array | None]:
        """The tables and the mask that the attention was given, the reference's where the target has none."""
        tokens, tables, mask = result.shape[1], [], None
        for ours in self._arguments.get((core.attention, result.key.rank, result.key.step), ()):
            pair = self.context.pairs.get(ours.key.text)
            theirs = pair.target if pair is not None and archive is self.context.target else None
            is_target = theirs is not None and theirs.stored and theirs.shape == ours.shape
            source, record = (archive, theirs) if is_target and theirs else (self.context.reference, ours)
            if not record.stored:
                continue
            if len(record.shape) == 4 and record.shape[-2:] in ((tokens, tokens), (1, tokens)):
                held = source.load(record)[:count]
                mask = np.where(held, 0.0, -np.inf) if held.dtype == np.bool_ else held.astype(np.float64)
            elif len(record.shape) == 3 and record.dtype.kind == "float" and record.shape[1] == tokens:
                tables.append(self._floats(source, record, count))
        return next((both for both in itertools.pairwise(tables) if are_tables(*both)), ()), mask

    @cached_property
    def _arguments(self) -> Mapping[tuple[str, int, int], Sequence[Record]]:
        """What modules were given by their first call of each step, by site, rank and step."""
        arguments: dict[tuple[str, int, int], Sequence[Record]] = {}
        for call in self.context.calls.calls:
            rank, step, site, _ = call.place
            arguments.setdefault((site, rank, step), call.inputs)
        return arguments

    @staticmethod
    def _floats(archive: Archive, record: Record, count: int | None = None) -> Array:
        values: Array = archive.load(record)[:count].astype(np.float64)
        return values


def _norms(
    weight: Array | None, bias: Array | None, epsilons: Sequence[float]
) -> Iterator[Callable[[Array], Array]]:
    """Yield usual norms along the last axis."""
    factors, terms = 1.0 if weight is None else weight, 0.0 if bias is None else bias

    def norm(x: Array, *, is_centred: bool, eps: float, added: float) -> Array:
        return _normalised(x, eps, is_centred=is_centred) * (factors + added) + terms

    for is_centred, eps, added in itertools.product((False, True), epsilons, (0.0, 1.0)):
        yield partial(norm, is_centred=is_centred, eps=eps, added=added)


def _normalised(x: Array, eps: float, *, is_centred: bool) -> Array:
    """Divide each row by its root mean square, or that of what is left without its mean."""
    x = x - x.mean(axis=-1, keepdims=True) if is_centred else x
    with np.errstate(divide="ignore", invalid="ignore"):
        y: Array = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + eps)
    return np.nan_to_num(y)


def _function(given: _Values, made: _Values, noise: float) -> _Recomputed | None:
    """What the function of each element makes, that the reference's elements are points of.

    Between two points it lies among the chord and the lines through the two before and the two behind it, if
    it is convex there, or concave; an element counts by how far it is beyond these three.
    """
    points, places = np.unique(given.reference, return_index=True)
    results = made.reference[places]
    is_within = (given.target >= points[0]) & (given.target <= points[-1])
    missed = interpolation_error(points, results)
    if points.size < _POINTS or missed > max(_SMOOTH, 2 * noise) or is_within.mean() < _WITHIN:
        return None
    x, y = given.target[is_within], made.target[is_within]
    at = np.clip(np.searchsorted(points, x, side="right") - 1, 0, points.size - 2)
    first = np.stack([at, np.maximum(at - 1, 0), np.minimum(at + 1, points.size - 2)])
    slopes = np.diff(results) / np.diff(points)
    lines = results[first] + slopes[first] * (x - points[first])
    errors = np.maximum(0.0, np.maximum(lines.min(axis=0) - y, y - lines.max(axis=0)))
    return _Recomputed("function of its input", missed, errors, float(np.linalg.norm(lines[0])))


def _compared(
    formula: str, ours: tuple[Array, Array], theirs: tuple[Array, Array], allowed: float
) -> _Recomputed | None:
    """Compare what a formula makes with the target's result; None if it does not make the reference's.

    Args:
        formula: In words.
        ours: What it makes of the reference's inputs, and the reference's result.
        theirs: The same of the target.
        allowed: By how much it may miss the reference's result, relative.
    """
    size = float(np.linalg.norm(ours[1]))
    missed = float(np.linalg.norm(ours[0] - ours[1])) / size if size else math.inf
    if not missed <= allowed:
        return None
    return _Recomputed(formula, missed, theirs[1] - theirs[0], float(np.linalg.norm(theirs[0])))


def _combination(made: _Values, earlier: Sequence[tuple[str, _Values]]) -> _Recomputed | None:
    """What the sum or the product of two earlier tensors makes that fits the reference best."""
    few = slice(None, None, max(1, made.reference.size // _FEW))
    best: tuple[float, Callable[[Array, Array], Array], Array, int, int] | None = None
    kinds: tuple[Callable[[Array, Array], Array], ...] = (_both, _product)
    for (i, (_, a)), (j, (_, b)) in itertools.combinations(enumerate(earlier), 2):
        for terms in kinds:
            parts = terms(a.reference[few], b.reference[few])
            factors = np.linalg.lstsq(parts.T, made.reference[few], rcond=None)[0]
            missed = _missed(parts, factors, made.reference[few])
            if missed <= _EXACT and (best is None or missed < best[0]):
                best = missed, terms, factors, i, j
    if best is None:
        return None
    _, terms, factors, i, j = best
    (one, a), (other, b) = earlier[i], earlier[j]
    missed = _missed(terms(a.reference, b.reference), factors, made.reference)
    if not missed <= _EXACT:
        return None
    parts = terms(a.target, b.target) * factors[:, None]
    formula = f"{'sum' if terms is _both else 'product'} of {one} and {other}"
    return _Recomputed(
        formula, missed, made.target - parts.sum(axis=0), float(np.linalg.norm(parts, axis=1).max())
    )


def _both(a: Array, b: Array) -> Array:
    return np.stack([a, b])


def _product(a: Array, b: Array) -> Array:
    return np.stack([a * b])


def _missed(parts: Array, factors: Array, wanted: Array) -> float:
    """By how much a sum of terms times factors misses a tensor, relative to the largest term."""
    terms = parts * factors[:, None]
    scale = float(np.linalg.norm(terms, axis=1).max())
    return float(np.linalg.norm(terms.sum(axis=0) - wanted)) / scale if scale else math.inf


def _noise(record: Record) -> float:
    """The relative error that a record of the reference may have itself."""
    return POLICY.noise(POLICY.precision(record.dtype.name))


def _judge(pair: MeasuredPair, precision: Precision, made: _Recomputed, limits: Limits) -> Finding:
    """Judge what a module adds itself in roundings of its own precision."""
    limits = POLICY.sampled(limits, pair.elements).scaled(precision.rounding)
    shown, limit = number_and_limit(made.own_error, limits.green)
    text = f"off by {shown} from the {made.formula} in the target, at most {limit}"
    return limits.finding("recomputed", made.own_error, text)
