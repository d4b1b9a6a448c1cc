"""What does a leaf, an attention core or an expert add to the error of its inputs?

Formula (POL-10, POL-11, POL-22, POL-23): gain = error out / sqrt(error in^2 + (2 rho)^2): a correct leaf
hands an error on about as it is and adds one or two roundings. `gain` is of leaves of known kind (linear,
elementwise, norms), `attention_gain` of the cores of attentions, of experts and of leaves of unknown kind,
which may amplify more; the `_tail` tests are the same of the 95th percentile of rows, so that a mistake in a
part of the tokens is seen. In float32 the own error, sqrt(out^2 - (limit * in)^2), is limited instead
(POL-16). Limits were measured on clean models of 32 layers (`specs/policy.md` section 9): `Policy.leaf_gain`,
`core_gain`, `leaf_tail`, `core_tail`, `expert_row`.

A gain that is not green is measured again over other parts of its tensors (POL-15), and the least counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from tensorcap.comparison.pair import Finding, Pair
from tensorcap.comparison.policy import POLICY, Precision
from tensorcap.comparison.policy_tests.context import Context, Gain, MeasuredPair, PolicyTest
from tensorcap.comparison.robust_errors import RobustError
from tensorcap.metrics import is_routing
from tensorcap.runs import Call, contents_of
from tensorcap.wording import number_and_limit
from tensorcap_formats.dtypes import Array
from tensorcap_formats.records import Record

_IMAGES: Final = 4  # axes, from which on rows of a leaf's result are channels, of very unlike size
_ROW: Final = 64  # elements of a row at least (MET-10)


class GainTest(PolicyTest):
    """Tests `gain`, `attention_gain` and both of the worst rows."""

    names = ("gain", "attention_gain", "gain_tail", "attention_gain_tail")
    is_local = True
    is_evidence = True

    def judge(self, context: Context) -> Iterator[tuple[str, Finding]]:
        """Judge every result of a leaf, core or expert whose inputs were compared."""
        for gain in _Gains(context).all():
            context.gain_log.gains.append(gain)
            for finding in gain.findings:
                yield gain.pair.key, finding


@dataclass(frozen=True, slots=True)
class RobustVerdict:
    """What errors by robust measures make of a gain that is not green (POL-15).

    Attributes:
        errors: The errors by each measure, the plain one first.
        precision: The precision of the pair.
        together: Combines the errors of the inputs.
        judge_tail: Judges the worst rows, as `judge_tail` does.
        is_core: Whether the limits of attention cores count.
        elements: Count of elements that the errors are taken over.
    """

    errors: Sequence[RobustError]
    precision: Precision
    together: Callable[[Sequence[float]], float]
    judge_tail: Callable[..., Finding]
    is_core: bool
    elements: int

    def of(
        self, first: Finding, measured: tuple[float, float], *, is_tail: bool = False
    ) -> tuple[Finding, float, float]:
        """Return the least of the gain that was measured and of the robust ones, with its errors."""
        inputs, output = measured
        if first.status == "within-rounding":
            return first, inputs, output
        sides = [errors.of(is_tail=is_tail) for errors in self.errors]
        together = [(self.together(of_inputs), of_output) for of_inputs, of_output in sides]
        plain_inputs, plain_output = together[0]
        reach = POLICY.second_look
        is_less = plain_output * reach < output
        is_less |= plain_inputs > reach * max(inputs, 2 * self.precision.rounding)
        if is_less and self.errors[0].has_measured_rows:
            return first, inputs, output  # the elements that were read are not like the others
        inputs, output = min(together, key=lambda errors: errors[1] / errors[0] if errors[0] else math.inf)
        judge = self.judge_tail if is_tail else judge_gain
        second = judge(output, inputs, self.precision, is_core=self.is_core, elements=self.elements)
        return min(first, second, key=lambda finding: finding.value), inputs, output


class _Gains:
    """The gains of one comparison, in execution order; experts first."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._calls = context.calls
        self._of_experts_done: set[str] = set()

    def all(self) -> Iterator[Gain]:
        """Yield every gain: of experts, of leaves, of attention cores."""
        of_experts = [gain for call in self._calls.calls for gain in self._of_experts(call)]
        self._of_experts_done = {gain.pair.key for gain in of_experts}
        yield from of_experts
        for leaf in self._calls.leaves:
            yield from self._of_leaf(leaf)
        kept: dict[tuple[int, str], float] = {}  # the worst rows of earlier steps, which caches hold
        for core in self._calls.cores():
            sources, rounded_by = self._compared(core.sources), core.attention
            if sources is None:
                sources, rounded_by = self._before_projections(core.sources)
            if sources is None or any(map(self._context.injected.was_replaced, sources)):
                continue
            place = core.sources[0].key.rank, core.attention
            beside = max(kept.get(place, 0.0), self._largest_error(core.arguments))
            for result in core.results:
                yield from self._of(
                    core.attention,
                    sources,
                    result,
                    is_core=True,
                    is_centred=False,
                    kept=beside,
                    rounded_by=rounded_by,
                )
            errors = [self._context.errors.get(pair.key) for pair in sources]
            tails = [pair.tail_error for pair in sources]
            known = [error for error in (*errors, *tails) if error is not None]
            kept[place] = max([kept.get(place, 0.0), *known])

    def _of_experts(self, call: Call) -> Iterator[Gain]:
        """Find the gain of experts over rows that got the same choices: others compute something else."""
        inputs = self._compared(call.inputs) or []
        chosen = [pair for pair in inputs if pair.reference is not None and is_routing(pair.reference)]
        if not chosen or any(map(self._context.injected.was_replaced, inputs)):
            return
        rows = _count_rows(chosen[0])
        sources = [pair for pair in inputs if pair.is_inexact and _count_rows(pair) == rows]
        for record in call.outputs if sources else ():
            pair = self._context.measured(record.key.text)
            if pair is None or not pair.is_inexact or _count_rows(pair) != rows:
                continue
            errors = self._context.robust_errors.of_rows(chosen, sources, pair)
            if errors is None:
                continue
            precision, count = pair.precision, least_elements((*sources, pair))
            error, worst = max(errors.inputs), max(errors.tails)
            finding = judge_gain(errors.output, error, precision, is_core=True, elements=count)
            tail = None
            if not precision.is_wide:
                tail = judge_tail(errors.tail, worst, precision, is_core=True, elements=count)
                if tail.status == "within-rounding" and errors.rows is not None:
                    tail = judge_worst_row(*errors.rows, precision)
            yield Gain(call.site, pair, error, errors.output, finding, tail)

    def _of_leaf(self, leaf: Call) -> Iterator[Gain]:
        inputs = self._compared(leaf.inputs)
        log = self._context.gain_log
        log.has_inputs |= bool(inputs)
        if not inputs:
            if any(record.dtype.is_inexact for record in leaf.outputs):
                log.untested[leaf.site] = None
            return
        if any(map(self._context.injected.was_replaced, inputs)):
            return
        if any(not pair.is_inexact and pair.status != "identical" for pair in inputs):
            return  # other tokens, other experts: the outputs have nothing to do with each other
        for output in list_direct_outputs(leaf):
            yield from self._of(
                leaf.site,
                [pair for pair in inputs if pair.is_inexact],
                output,
                is_core=not self._calls.is_simple(leaf.site),
                is_centred=self._calls.is_centred(leaf.site),
            )

    def _compared(self, records: Sequence[Record]) -> list[Pair] | None:
        """Return the pairs of records; None if one of them was not compared."""
        pairs = [self._context.pairs.get(record.key.text) for record in records]
        known = [pair for pair in pairs if pair is not None and pair.is_compared]
        return known if len(known) == len(records) else None

    def _before_projections(self, records: Sequence[Record]) -> tuple[list[Pair] | None, str]:
        """What made queries, keys and values was given, and which of that is the coarsest.

        The target has no results of these, since a fused operation multiplies by their weights in few bits.
        None if that is not known of all of them.
        """
        precision = self._context.runs_precision
        roundings = precision.own_roundings if precision is not None else {}
        made = {contents_of(r): leaf for leaf in self._calls.leaves for r in leaf.outputs if r.digest}
        known = {
            contents_of(pair.reference): pair
            for pair in self._context.pairs.values()
            if pair.reference is not None and pair.reference.digest and pair.is_compared and pair.is_inexact
        }
        makers = [made.get(contents_of(record)) for record in records]
        sources: list[Pair] = []
        for maker in makers:
            if maker is None or maker.site not in roundings:
                return None, ""
            given = [known.get(contents_of(record)) for record in maker.inputs]
            if not given or None in given:
                return None, ""
            sources += [pair for pair in given if pair is not None]
        coarsest = max((maker.site for maker in makers if maker is not None), key=roundings.__getitem__)
        return list({pair.key: pair for pair in sources}.values()), coarsest

    def _largest_error(self, records: Sequence[Record]) -> float:
        """Return the largest error of arguments of free runs, of median or worst rows; 0 if not known."""
        pairs = [] if self._context.injected else [self._context.pairs.get(r.key.text) for r in records]
        errors = [
            error
            for pair in pairs
            if pair is not None and pair.is_compared
            for error in (self._context.errors.get(pair.key), pair.tail_error)
        ]
        return max([0.0, *(error for error in errors if error is not None)])

    def _of(
        self,
        site: str,
        sources: Sequence[Pair],
        record: Record,
        *,
        is_core: bool,
        is_centred: bool,
        kept: float = 0.0,
        rounded_by: str = "",
    ) -> Iterator[Gain]:
        """Find the gain of one result.

        1. The error of the inputs is set against that of the output, by the median and by the worst rows.
        2. If one of both is not green, errors are measured again over other parts of the tensors.
        3. Of all measures the least gain counts.

        Args:
            site: The leaf, or the attention.
            sources: The pairs of its float inputs.
            record: The result.
            is_core: Whether the larger limits count.
            is_centred: Whether the module subtracts the mean of its input.
            kept: Row error of what caches, or other arguments, hold besides the sources.
            rounded_by: The module whose weights say what is rounded; `site` if it is "".
        """
        pair = self._context.measured(record.key.text)
        if pair is None or not pair.is_inexact or pair.key in self._of_experts_done:
            return
        output, errors = self._context.errors.get(pair.key), self._context.known_errors(sources)
        if output is None or errors is None:
            return
        together = partial(_together, is_core=is_core, kept=kept)
        inputs = together(errors)
        precision, count = pair.precision.of_module(rounded_by or site), least_elements((*sources, pair))
        is_aligned = pair.key in self._context.aligned
        finding = judge_gain(output, inputs, precision, is_core=is_core, elements=count)
        judge_of_tail = partial(judge_tail, has_channels=len(record.shape) >= _IMAGES)
        tails = None if is_aligned else self._tail_errors(sources, pair, together)
        tail = None
        if tails is not None:
            tail = judge_of_tail(tails[1], tails[0], precision, is_core=is_core, elements=count)
        is_green = finding.status == "within-rounding" and (tail is None or tail.status == "within-rounding")
        if not is_green and not is_aligned:
            robust = self._context.robust_errors(sources, pair, is_centred)
            if not is_core and self._may_be_function(site, sources, pair):
                through = self._context.robust_errors.through_function(sources[0], pair)
                robust += [through] if through is not None else []
            second = RobustVerdict(
                robust, precision, together, judge_of_tail, is_core=is_core, elements=count
            )
            finding, inputs, output = second.of(finding, (inputs, output))
            if tail is not None and tails is not None:
                tail, _, _ = second.of(tail, tails, is_tail=True)
        yield Gain(site, pair, inputs, output, finding, tail)

    def _may_be_function(self, site: str, sources: Sequence[Pair], result: MeasuredPair) -> bool:
        """Whether a leaf may be a function of each element of its one input."""
        shapes = [pair.reference.shape for pair in sources if pair.reference is not None]
        return shapes == [result.reference.shape] and not self._calls.has_own_tensors(site)

    def _tail_errors(
        self, sources: Sequence[Pair], result: MeasuredPair, together: Callable[[Sequence[float]], float]
    ) -> tuple[float, float] | None:
        """Return errors of the worst rows of inputs and output; None if they are not tested."""
        if result.precision.is_wide or any(pair.key in self._context.aligned for pair in sources):
            return None
        inputs, output = [pair.tail_error for pair in sources], result.tail_error
        known = [error for error in inputs if error is not None]
        if output is None or len(known) < len(inputs):
            return None
        return together(known), output


def _together(errors: Sequence[float], *, is_core: bool, kept: float) -> float:
    """Combine errors of inputs: of queries, keys and values the largest, of others the root of squares."""
    return max([*errors, kept]) if is_core else math.hypot(*errors)


def judge_gain(
    output: float, inputs: float, precision: Precision, *, is_core: bool, elements: int
) -> Finding:
    """Judge what a leaf, or the core of an attention, adds to the error of its inputs.

    Args:
        output: Row error of the output.
        inputs: Row error of the inputs, together.
        precision: The precision of the pair.
        is_core: Whether it is the core of an attention, or a leaf of unknown kind.
        elements: Count of elements of the output, or of an input if that has fewer.
    """
    test = "attention_gain" if is_core else "gain"
    gains = POLICY.sampled(POLICY.core_gain if is_core else POLICY.leaf_gain, elements)
    if not precision.is_wide:
        gain = output / math.hypot(inputs, 2 * precision.rounding)
        shown, limit = number_and_limit(gain, gains.green, 3)
        text = f"error {inputs:.2g} in, {output:.2g} out: gain {shown}, at most {limit}"
        return gains.finding(test, gain, text)
    limits = POLICY.in_proportion(POLICY.wide_own, precision)
    own = math.sqrt(max(0.0, output**2 - (gains.green * inputs) ** 2))
    shown, limit = number_and_limit(own, limits.green)
    text = f"error {inputs:.2g} in, {output:.2g} out: {shown} of its own, at most {limit}"
    return limits.finding(test, own, text)


def judge_tail(
    output: float,
    inputs: float,
    precision: Precision,
    *,
    is_core: bool,
    elements: int,
    has_channels: bool = False,
) -> Finding:
    """Judge what a leaf or core adds to the error of the worst rows; not of float32 runs.

    Args:
        output: The 95th percentile of row errors of the output.
        inputs: The same of the inputs, together.
        precision: The precision of the pair.
        is_core: As for `judge_gain`.
        elements: As for `judge_gain`.
        has_channels: Whether rows are channels, some of which are much smaller than others.
    """
    limits = POLICY.core_tail if is_core or has_channels else POLICY.leaf_tail
    limits = POLICY.sampled(limits, count_tail(elements))
    gain = output / math.hypot(inputs, 2 * precision.rounding)
    shown, limit = number_and_limit(gain, limits.green, 3)
    text = f"the worst rows are off by {inputs:.2g} in, {output:.2g} out: gain {shown}, at most {limit}"
    return limits.finding("attention_gain_tail" if is_core else "gain_tail", gain, text)


def judge_worst_row(inputs: Array, outputs: Array, precision: Precision) -> Finding:
    """Judge what experts add to the error of any single row, by the worst one.

    Args:
        inputs: Row errors of the inputs, together, one dimension.
        outputs: Row errors of the output, of the same rows.
        precision: The precision of the pair.
    """
    gains = outputs / np.hypot(inputs, 2 * precision.rounding)
    worst = int(gains.argmax())
    gain, limits = float(gains[worst]), POLICY.expert_row
    shown, limit = number_and_limit(gain, limits.green, 3)
    text = (
        f"one row is off by {inputs[worst]:.2g} in, {outputs[worst]:.2g} out: gain {shown}, at most {limit}"
    )
    return limits.finding("attention_gain_tail", gain, text)


def count_tail(elements: int) -> int:
    """Return how many elements the 95th percentile of rows rests on: a twentieth, and a row at least."""
    return max(elements // 20, min(elements, _ROW))


def list_direct_outputs(leaf: Call) -> list[Record]:
    """List outputs of a leaf; of a router its scores, since weights of those chosen are a softmax."""
    chosen = [record.shape[-1] for record in leaf.outputs if is_routing(record)]
    if not chosen:
        return leaf.outputs
    return [record for record in leaf.outputs if record.shape and record.shape[-1] > max(chosen)]


def least_elements(pairs: Sequence[Pair]) -> int:
    """Return the count of elements of the smallest of some tensors that errors are taken over."""
    return min(pair.elements for pair in pairs)


def _count_rows(pair: Pair) -> int:
    shape = pair.reference.shape if pair.reference is not None else ()
    return math.prod(shape[:-1])
