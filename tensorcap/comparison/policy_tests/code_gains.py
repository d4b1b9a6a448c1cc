"""What does the code of a module, between the modules that it calls, add to the error of what it has?

Formula (POL-210): gain = error of what the code made / sqrt(error^2 + (2 rho)^2), with the largest error of
all that was recorded in the call before: its arguments, and arguments and results of calls within it.
Whatever the code computed, it computed of these, of parameters and of states that came in as arguments. An
error of a tensor with as many elements, which may be a term of a sum, counts in proportion to its size, since
what cancels makes a relative error larger. In runs of low precision only: in float32 the whole error tells
(`wide_error`).

One pass over the records in execution order, with the calls that are under way:

1. What came before in a call is bad if it differs and is no float, cannot be compared, or is of a router
   whose choices are not known to be equal; then nothing that its code makes is judged. So is a result that
   the target lacks, unless that is explained; an argument that it lacks is no operand, but with the error of
   what holds the same before. Parameters that are
   wrong are bad for all modules around them.
2. A tensor is judged by the innermost call whose code made it, unless another test of gains has judged it.
3. Its error counts for all calls that are under way, out to one in which something is bad, of which calls
   further out have the result alone; what it was in a call counts in later steps, too, since caches hold
   that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from tensorcap.comparison.pair import ABSENT, Finding, Pair
from tensorcap.comparison.policy import POLICY
from tensorcap.comparison.policy_tests.context import Context, MeasuredPair, PolicyTest
from tensorcap.comparison.tensorless_calls import GivenValues, has_all_inputs
from tensorcap.metrics import is_routing
from tensorcap.runs import Call, Contents, contents_of, enclosing_sites, is_parameter, is_telling, rms_of
from tensorcap.wording import number_and_limit
from tensorcap_formats.keys import ROOT_SITE
from tensorcap_formats.records import Record
from tensorcap_formats.run_info import RunInfo

_ROUTER: Final = re.compile(r"router$|gate$|gating$", re.IGNORECASE)


class CodeGainTest(PolicyTest):
    """Tests `code_gain`."""

    names = ("code_gain",)
    is_local = True
    is_evidence = True

    def judge(self, context: Context) -> Iterator[tuple[str, Finding]]:
        """Judge arguments of calls, and results of calls with others within, of runs of low precision."""
        if context.injected or not context.reference.is_ordered or not _is_whole(context.reference.info):
            return
        if all(pair.precision.is_wide for pair, _ in context.open_results()):
            return  # nothing is judged, and the trace takes as long as all other tests
        yield from _Trace(context).findings()


@dataclass(slots=True)
class _CallUnderWay:
    """A call of which not all was recorded yet.

    Attributes:
        call: The call.
        worst: The largest relative error of what was recorded in it, infinite if it is bad.
        terms: The largest absolute RMS error of tensors in it, by count of elements.
        least_elements: Of all tensors that these errors were taken over.
    """

    call: Call
    worst: float
    terms: dict[int, float] = field(default_factory=dict)
    least_elements: int = 1 << 62

    def error_of_operands(self, record: Record) -> float:
        """Return the relative error of what a result may have been made of, in units of the result."""
        size = rms_of(record)
        term = self.terms.get(record.size, 0.0)
        return max(self.worst, term / size) if size else self.worst


class _Trace:
    """The records of a run in execution order, with the calls that are under way.

    Args:
        context: What the test may look at.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._judged = {gain.pair.key for gain in context.gain_log.gains}
        self._under_way: dict[tuple[int, int, str], _CallUnderWay] = {}
        self._kept: dict[tuple[int, str], float] = {}  # the largest error in a call of an earlier step
        self._known: dict[Contents, float] = {}  # the error of the first tensor that holds something
        self._with_wrong_parameters: set[str] = set()
        self._parameters: dict[str, list[Pair]] = {}
        self._values = GivenValues(context.reference, context.target)
        for pair in context.pairs.values():
            record = pair.reference
            if record is not None and is_parameter(record.key):
                self._parameters.setdefault(record.key.site, []).append(pair)
                if not pair.is_green and pair.status not in ABSENT:
                    self._with_wrong_parameters |= {record.key.site, *enclosing_sites(record.key.site)}

    def findings(self) -> Iterator[tuple[str, Finding]]:
        """Yield the finding of each tensor that was made by the code between modules."""
        records = [
            (record.order, is_argument, record, call)
            for call in self._context.calls.calls
            for is_argument, part in ((True, call.inputs), (False, call.outputs))
            for record in part
        ]
        for _, is_argument, record, call in sorted(records, key=lambda entry: entry[0]):
            own = self._open(call)
            maker = self._maker(call) if is_argument else own
            error = self._error(record, maker)
            pair = self._context.measured(record.key.text)
            if pair is not None and error is not None and self._is_judged(pair, call, maker):
                assert maker is not None
                yield record.key.text, _judge(pair, error, maker)
            self._note(record, call, self._error_of_equal(record) if error is None else error)
            if error is not None and math.isfinite(error) and is_telling(record):
                self._known.setdefault(contents_of(record), error)

    def _error_of_equal(self, record: Record) -> float | None:
        """The error of what an argument is that the target lacks, if it was recorded before; None if not."""
        is_known = self._context.reference.trusts_digests and is_telling(record)
        return self._known.get(contents_of(record)) if is_known else None

    def _is_judged(self, pair: MeasuredPair, call: Call, maker: _CallUnderWay | None) -> bool:
        """Whether the code between modules made a tensor, and all that it had is known and right."""
        if maker is None or not math.isfinite(maker.worst) or not pair.is_inexact:
            return False
        if pair.key in self._judged or pair.precision.is_wide or pair.key in self._context.shuffled:
            return False
        is_of_leaf = maker.call is call and self._context.calls.is_leaf(call.site)
        return not is_of_leaf or not call.inputs

    def _open(self, call: Call) -> _CallUnderWay:
        """Return the state of a call; a call that is new ends that of the same module before."""
        rank, step, site, _ = call.place
        known = self._under_way.get((rank, step, site))
        if known is not None and known.call is call:
            return known
        worst = 0.0
        if site in self._with_wrong_parameters:
            worst = math.inf
        elif not call.inputs:
            worst = self._error_of_parameters(call)
        opened = _CallUnderWay(call, max(worst, self._kept.get((rank, site), 0.0)))
        self._under_way[rank, step, site] = opened
        return opened

    def _error_of_parameters(self, call: Call) -> float:
        """The error of what a leaf without arguments is made of; infinite if that is not known."""
        context, result = self._context, call.outputs[0].key
        is_without = context.calls.is_leaf(call.site) and has_all_inputs(context.reference.info, call.site)
        if not is_without or not self._values.are_equal(result, result):
            return math.inf
        pairs = self._parameters.get(call.site, [])
        errors = [pair.row_error for pair in pairs if pair.is_compared]
        return max([0.0, *(error for error in errors if error is not None)])

    def _maker(self, call: Call) -> _CallUnderWay | None:
        """The innermost call under way around a call, whose code made its arguments."""
        rank, step, site, _ = call.place
        for around in enclosing_sites(site):
            state = self._under_way.get((rank, step, around))
            if state is not None and (around == ROOT_SITE or state.call.end >= call.start):
                return state
        return None

    def _error(self, record: Record, maker: _CallUnderWay | None) -> float | None:
        """The relative error of a tensor; infinite if what is made of it cannot be judged, None if absent."""
        pair = self._context.pairs.get(record.key.text)
        if pair is not None and pair.status in ABSENT:
            is_operand = record.key.slot.startswith("output") and pair.status != "explained"
            return math.inf if is_operand else None
        if pair is None or not pair.is_compared or record.key.text in self._context.shuffled:
            return math.inf
        if not pair.is_inexact:
            return 0.0 if pair.status in ("identical", "match") else math.inf
        error = 0.0 if pair.status == "identical" else self._context.errors.get(pair.key)
        return math.inf if error is None else error

    def _note(self, record: Record, call: Call, error: float | None) -> None:
        """Count the error of a tensor for all calls that are under way."""
        if error is None:
            return
        rank, step, site, _ = call.place
        pair = self._context.pairs.get(record.key.text) if math.isfinite(error) else None
        for around in (site, *enclosing_sites(site)):
            state = self._under_way.get((rank, step, around))
            if state is None or (around != ROOT_SITE and state.call.end < record.order):
                continue
            state.worst = max(state.worst, error)
            if pair is not None and pair.is_compared and pair.is_inexact:
                term = error * rms_of(record)
                state.terms[record.size] = max(state.terms.get(record.size, 0.0), term)
                state.least_elements = min(state.least_elements, pair.elements)
            self._kept[rank, around] = max(self._kept.get((rank, around), 0.0), error)
            if around != site and math.isinf(state.worst):
                break  # calls further out have only the result of this one
        if self._may_choose(record, call):
            parent = self._maker(call)
            if parent is not None:
                parent.worst = math.inf

    def _may_choose(self, record: Record, call: Call) -> bool:
        """Whether a tensor is of a router whose choices may be other ones."""
        site = call.site
        if not record.key.slot.startswith("output") or not self._context.calls.is_leaf(site):
            return False
        names = site.rpartition(".")[2], self._context.calls.class_of(site)
        if not any(_ROUTER.search(name) for name in names):
            return False
        chosen = [one for one in call.outputs if is_routing(one)]
        pairs = [self._context.pairs.get(one.key.text) for one in chosen]
        return not pairs or any(pair is None or pair.status not in ("identical", "match") for pair in pairs)


def _is_whole(info: RunInfo) -> bool:
    """Whether a run recorded all calls of all modules, with what they were given."""
    scope = info.scope
    if info.operation_map:
        return False
    if scope is None:
        return True
    return not (scope.include or scope.exclude) and scope.inputs and scope.level != "export"


def _judge(pair: MeasuredPair, error: float, maker: _CallUnderWay) -> Finding:
    """Judge what the code of a call made by the errors of what it had."""
    inputs = maker.error_of_operands(pair.reference)
    limits = POLICY.sampled(POLICY.code_gain, min(pair.elements, maker.least_elements))
    gain = error / math.hypot(inputs, 2 * pair.precision.of_module(maker.call.site).rounding)
    shown, limit = number_and_limit(gain, limits.green, 3)
    text = (
        f"error at most {inputs:.2g} in all that the code of {maker.call.site} had, {error:.2g} in what it "
        f"made: gain {shown}, at most {limit}"
    )
    return limits.finding("code_gain", gain, text)
