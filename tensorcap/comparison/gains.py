"""What leaves and attention cores add to the error that they were given: tests D, D', T and T'."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tensorcap.comparison.pair import Finding, Pair
from tensorcap.comparison.policy import Policy, Precision
from tensorcap.comparison.robust_errors import RobustError
from tensorcap.metrics.routing import is_routing
from tensorcap.runs.calls import Call, Calls
from tensorcap_formats.records import Record

Confirm = Callable[[Sequence[Pair], Pair, bool], Sequence[RobustError]]
OfRows = Callable[[Sequence[Pair], Sequence[Pair], Pair], RobustError | None]


@dataclass(frozen=True, slots=True)
class Gain:
    """What one module adds to an error.

    Attributes:
        site: The leaf, or the attention.
        pair: The pair of its result.
        inputs: Row error of what went in, together.
        output: Row error of what came out.
        finding: The verdict.
        tail: The verdict on the worst rows, where they were tested.
    """

    site: str
    pair: Pair
    inputs: float
    output: float
    finding: Finding
    tail: Finding | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All verdicts."""
        return (self.finding,) if self.tail is None else (self.finding, self.tail)


@dataclass(frozen=True, slots=True)
class RobustVerdict:
    """What second looks make of a gain that is not green (POL-15).

    Attributes:
        policy: The limits.
        looks: The looks, the plain one first.
        precision: Of the pair.
        together: Makes one error of those of the inputs.
        is_core: Which limits count.
        elements: How many the errors are of.
    """

    policy: Policy
    looks: Sequence[RobustError]
    precision: Precision
    together: Callable[[Sequence[float]], float]
    is_core: bool
    elements: int

    def of(
        self, first: Finding, measured: tuple[float, float], *, is_tail: bool = False
    ) -> tuple[Finding, float, float]:
        """The least of the gain that was measured and of those of second looks, with its errors."""
        inputs, output = measured
        if first.status == "within-rounding":
            return first, inputs, output
        errors = [look.of(is_tail=is_tail) for look in self.looks]
        together = [(self.together(given), made) for given, made in errors]
        plain_inputs, plain_output = together[0]
        reach = self.policy.second_look
        is_less = plain_output * reach < output
        is_less |= plain_inputs > reach * max(inputs, 2 * self.precision.rounding)
        if is_less and self.looks[0].has_measured_rows:
            return first, inputs, output  # the elements that were read are not like the others
        inputs, output = min(together, key=lambda errors: errors[1] / errors[0] if errors[0] else math.inf)
        judge = self.policy.judge_tail if is_tail else self.policy.judge_gain
        second = judge(output, inputs, self.precision, is_core=self.is_core, elements=self.elements)
        return min(first, second, key=lambda found: found.value), inputs, output


class Gains:
    """Finds the gain of every leaf and attention core whose inputs and outputs were compared.

    Args:
        calls: The reference's calls.
        pairs: Pairs by key text.
        errors: Row errors by key text.
        aligned: Keys whose error is that of rows that were brought together, so that no second look helps.
        policy: The limits.
        precision: The precision of a pair.
        confirm: A second look at a gain that is not green.
        of_rows: A look at the rows whose choices of experts are the same.
        was_replaced: Whether another value than that of a pair went on, so that it says nothing of a gain.

    Attributes:
        untested: Sites of leaves whose inputs were not captured, or not compared.
        has_inputs: Whether the inputs of any leaf were compared.
    """

    def __init__(
        self,
        calls: Calls,
        pairs: Mapping[str, Pair],
        *,
        errors: Mapping[str, float | None],
        aligned: Collection[str],
        policy: Policy,
        precision: Callable[[Pair], Precision],
        confirm: Confirm,
        of_rows: OfRows,
        was_replaced: Callable[[Pair], bool] = lambda pair: False,
    ) -> None:
        self._calls = calls
        self._pairs = pairs
        self._errors = errors
        self._aligned = aligned
        self._policy = policy
        self._precision = precision
        self._confirm = confirm
        self._of_rows = of_rows
        self._was_replaced = was_replaced
        self.untested: dict[str, None] = {}
        self.has_inputs = False
        self._done: set[str] = set()

    def all(self) -> Iterator[Gain]:
        """Every gain: of experts, of leaves, of attention cores."""
        of_experts = [gain for call in self._calls.calls for gain in self._of_experts(call)]
        self._done = {gain.pair.key for gain in of_experts}
        yield from of_experts
        for leaf in self._calls.leaves:
            yield from self._of_leaf(leaf)
        kept: dict[tuple[int, str], float] = {}  # the worst rows of earlier steps, which caches hold
        for core in self._calls.cores():
            sources = self._known(core.sources)
            if sources is None or any(map(self._was_replaced, sources)):
                continue
            place = (sources[0].reference.key.rank if sources[0].reference else 0), core.attention
            for result in core.results:
                yield from self._of(
                    core.attention, sources, result, is_core=True, is_centred=False, kept=kept.get(place, 0.0)
                )
            errors = [self._errors.get(pair.key) for pair in sources]
            tails = [tail_error(pair) for pair in sources]
            known = [error for error in (*errors, *tails) if error is not None]
            kept[place] = max([kept.get(place, 0.0), *known])

    def _of_experts(self, call: Call) -> Iterator[Gain]:
        """The gain of experts over the rows that got the same choices: the others compute something else."""
        inputs = self._known(call.inputs) or []
        chosen = [pair for pair in inputs if pair.reference is not None and is_routing(pair.reference)]
        if not chosen or any(map(self._was_replaced, inputs)):
            return
        rows = _rows(chosen[0])
        sources = [pair for pair in inputs if _is_float(pair) and _rows(pair) == rows]
        for record in call.outputs if sources else ():
            result = self._pairs.get(record.key.text)
            is_by_token = result is not None and _is_float(record) and _rows(result) == rows
            if result is None or result.difference is None or not is_by_token:
                continue
            look = self._of_rows(chosen, sources, result)
            if look is None:
                continue
            precision = self._precision(result)
            together = [self._together(errors, is_core=True) for errors in (look.inputs, look.tails)]
            count = least_elements((*sources, result))
            finding = self._policy.judge_gain(
                look.output, together[0], precision, is_core=True, elements=count
            )
            tail = self._policy.judge_tail(look.tail, together[1], precision, is_core=True, elements=count)
            if not precision.is_wide and tail.status == "within-rounding" and look.rows is not None:
                tail = self._policy.judge_row(*look.rows, precision)
            yield Gain(
                call.site, result, together[0], look.output, finding, None if precision.is_wide else tail
            )

    def _of_leaf(self, leaf: Call) -> Iterator[Gain]:
        inputs = self._known(leaf.inputs)
        self.has_inputs |= bool(inputs)
        if inputs is None or not inputs:
            if any(_is_float(record) for record in leaf.outputs):
                self.untested[leaf.site] = None
            return
        if any(map(self._was_replaced, inputs)):
            return
        if any(not _is_float(pair) and pair.status != "identical" for pair in inputs):
            return  # other tokens, other experts: the outputs have nothing to do with each other
        is_core = not self._calls.is_simple(leaf.site)
        for output in made_directly(leaf):
            yield from self._of(
                leaf.site,
                [pair for pair in inputs if _is_float(pair)],
                output,
                is_core=is_core,
                is_centred=self._calls.is_centred(leaf.site),
            )

    def _known(self, records: Sequence[Record]) -> list[Pair] | None:
        """The pairs of records, or None if one of them was not compared."""
        pairs = [self._pairs.get(record.key.text) for record in records]
        known = [pair for pair in pairs if pair is not None and pair.is_compared]
        return known if len(known) == len(records) else None

    def _of(
        self,
        site: str,
        sources: Sequence[Pair],
        record: Record,
        *,
        is_core: bool,
        is_centred: bool,
        kept: float = 0.0,
    ) -> Iterator[Gain]:
        """The gain of one result; `kept` is the error of what went in besides its sources."""
        result = self._pairs.get(record.key.text)
        if result is None or result.difference is None or not _is_float(record):
            return
        if result.key in self._done:
            return
        output = self._errors.get(result.key)
        errors = [self._errors.get(pair.key) for pair in sources]
        known = [error for error in errors if error is not None]
        if output is None or len(known) < len(errors):
            return
        together = partial(self._together, is_core=is_core, kept=kept)
        inputs = together(known)
        precision = self._precision(result)
        count = least_elements((*sources, result))
        finding = self._policy.judge_gain(output, inputs, precision, is_core=is_core, elements=count)
        tails = None if result.key in self._aligned else self._tail_errors(sources, result, together)
        tail = None
        if tails is not None:
            tail = self._policy.judge_tail(tails[1], tails[0], precision, is_core=is_core, elements=count)
        is_green = finding.status == "within-rounding" and (tail is None or tail.status == "within-rounding")
        if not is_green and result.key not in self._aligned:
            looks = self._confirm(sources, result, is_centred)
            second = RobustVerdict(self._policy, looks, precision, together, is_core=is_core, elements=count)
            finding, inputs, output = second.of(finding, (inputs, output))
            if tail is not None and tails is not None:
                tail, _, _ = second.of(tail, tails, is_tail=True)
        yield Gain(site, result, inputs, output, finding, tail)

    def _tail_errors(
        self, sources: Sequence[Pair], result: Pair, together: Callable[[Sequence[float]], float]
    ) -> tuple[float, float] | None:
        """Errors of the worst rows of inputs and output; None where they are not tested."""
        if self._precision(result).is_wide or any(pair.key in self._aligned for pair in sources):
            return None
        inputs, output = [tail_error(pair) for pair in sources], tail_error(result)
        known = [error for error in inputs if error is not None]
        if output is None or len(known) < len(inputs):
            return None
        return together(known), output

    @staticmethod
    def _together(errors: Sequence[float], *, is_core: bool, kept: float = 0.0) -> float:
        """Errors of inputs as one: of queries, keys and values the largest, of others the root of squares."""
        return max([*errors, kept]) if is_core else math.hypot(*errors)


def made_directly(leaf: Call) -> list[Record]:
    """Outputs of a leaf; of a router its scores alone, since what it does to those it chose is a softmax."""
    chosen = [record.shape[-1] for record in leaf.outputs if is_routing(record)]
    if not chosen:
        return leaf.outputs
    return [record for record in leaf.outputs if record.shape and record.shape[-1] > max(chosen)]


def row_error(pair: Pair) -> float | None:
    """`epsilon`, the median over rows of the relative error; 0 for identical pairs."""
    return 0.0 if pair.difference is None else pair.difference.row_error_median


def least_elements(pairs: Sequence[Pair]) -> int:
    """How many elements the smallest of some tensors has that errors are taken over."""
    return min(elements_of(pair) for pair in pairs)


def elements_of(pair: Pair) -> int:
    """How many elements the error of a pair is taken over."""
    if pair.difference is not None:
        return pair.difference.measured
    return pair.reference.size if pair.reference is not None else 0


def tail_error(pair: Pair) -> float | None:
    """The 95th percentile over rows of the relative error; 0 for identical pairs."""
    return 0.0 if pair.difference is None else pair.difference.row_error_p95


def _rows(pair: Pair) -> int:
    shape = pair.reference.shape if pair.reference is not None else ()
    return math.prod(shape[:-1])


def _is_float(thing: Record | Pair) -> bool:
    record = thing.reference if isinstance(thing, Pair) else thing
    return record is not None and record.dtype.is_inexact
