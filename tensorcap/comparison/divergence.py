"""The first divergence of two runs: the first pair that is not green, and the module that computed it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from tensorcap.comparison.callers import Givers
from tensorcap.comparison.pair import ABSENT, Pair
from tensorcap.comparison.policy import POLICY
from tensorcap.comparison.policy_tests import GROWTH_TESTS, LOCAL_TESTS
from tensorcap.runs import (
    StateWriters,
    is_gradient,
    is_inner,
    is_parameter,
    is_state,
    ops_of,
    passed_in,
)
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import ROOT_SITE, Key
from tensorcap_formats.records import Record

_GROWN: Final = "The error grew past what is expected here; no module stands out."


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first pair, in execution order of the reference, that weighs most among those that are not green.

    Attributes:
        pair: The pair.
        module: Site of the module that computed the tensor; for the run's own inputs, `@root`.
        class_name: Class of that module, "" if the reference does not say.
        is_run_input: Whether it is an input of the whole run, so that no module is to blame.
        explanation: How the module was found, as a sentence.
    """

    pair: Pair
    module: str
    class_name: str
    is_run_input: bool
    explanation: str

    @property
    def is_growth(self) -> bool:
        """Whether errors only grew past what is expected, so that `module` says where, not which is wrong."""
        return has_only_grown(self.pair)


def first_divergence(reference: Archive, pairs: Sequence[Pair]) -> Divergence | None:
    """Find the first required pair that is not green and weighs most, and name its module (CMP-40, CMP-41).

    Args:
        reference: The trusted archive, whose order and modules count.
        pairs: As `pair_records` orders them.

    Returns:
        None if every required pair is green.
    """
    red = [
        p
        for p in pairs
        if p.reference is not None and p.is_required and not p.is_green and p.status not in ABSENT
    ]
    if not red:
        return None
    pair = _first_of_least_weight(red, Inputs(reference, pairs))
    assert pair.reference is not None
    divergence = _explained(reference, pairs, pair, pair.reference)
    return replace(divergence, explanation=_GROWN) if divergence.is_growth else divergence


def _explained(reference: Archive, pairs: Sequence[Pair], pair: Pair, record: Record) -> Divergence:
    key = record.key
    if key.is_bare:
        return Divergence(pair, key.text, "", False, "The archive has no modules, only names.")
    kind = key.slot.partition(".")[0]
    writer = state_writer(StateWriters(reference), pair)
    if writer:
        explanation = f"{writer} is the last to have held this state before it shows here: it wrote it."
        return Divergence(pair, writer, _class_of(reference, writer), False, explanation)
    if key.site == ROOT_SITE and kind in ("given", "input"):
        return Divergence(pair, ROOT_SITE, _class_of(reference, ROOT_SITE), True, _fed(key))
    module = key.site
    if is_inner(key):
        module, point = passed_in(reference, key), key.site.partition(":")[2]
        what = f"argument of {point}" if kind == "input" else "tensor"
        explanation = f"The code of {module} made this {what}."
    elif is_parameter(key):
        explanation = f"{module} holds this; it is no result of a computation."
    elif kind == "grad_output":
        explanation = f"This gradient came back to {module} from what took its output."
    elif is_gradient(key):
        explanation = f"The way back through {module} made this gradient."
    elif kind == "input":
        module = Givers.of_pairs(reference, pairs).of(record)
        explanation = f"The code of {module} made this argument of {key.site}."
    else:
        explanation = f"{module} made this tensor."
    return Divergence(pair, module, _class_of(reference, module), False, explanation)


def state_writer(writers: StateWriters, pair: Pair) -> str:
    """The module that wrote a state in place before it shows; "" of all else, and if that is not known."""
    if pair.reference is None or not is_state(pair.reference.key):
        return ""
    return writers.writer(pair.reference) or ""


def _first_of_least_weight(red: Sequence[Pair], inputs: Inputs) -> Pair:
    """The first of those that weigh least; a certain pair ends the search, since none weighs less."""
    first, least = red[0], _weight(red[0], inputs)
    for pair in red[1:]:
        if not least:
            break
        if (weight := _weight(pair, inputs)) < least:
            first, least = pair, weight
    return first


def _weight(pair: Pair, inputs: Inputs) -> int:
    """Sort key: certain pairs first, then a module's own error, then one that may be inherited."""
    if pair.status == "unjudged":
        return 3
    if is_circumstance(pair, inputs.of(pair)):
        return 2
    tests = {f.test for f in pair.findings if f.status in ("suspect", "diverged")}
    certain = {f.test for f in pair.findings if f.status == "diverged"}
    if pair.status == "diverged" and certain == {"outlier_element"} and _inherits_rows(pair, inputs.of(pair)):
        return 1 if (tests & LOCAL_TESTS) - {"outlier_element"} else 2
    if pair.status != "suspect":
        return 0
    return 1 if tests & LOCAL_TESTS else 2


def is_circumstance(pair: Pair, inputs: Sequence[Pair]) -> bool:
    """Whether a tensor differs in a way that says nothing of the module that computed it.

    An argument of another shape, such as a mask for a longer cache, may hold the same; so may a state, whose
    whole numbers are its own bookkeeping; and a result has the shape of its call's inputs.

    Args:
        pair: The pair.
        inputs: Those of what went into its call.
    """
    if pair.reference is None:
        return False
    if pair.status != "shape-mismatch":
        is_whole = pair.reference.dtype.is_whole
        return pair.status == "diverged" and is_whole and is_state(pair.reference.key)
    is_passed = _is_argument(pair) or is_state(pair.reference.key)
    return is_passed or any(entry.status == "shape-mismatch" for entry in inputs)


def _is_argument(pair: Pair) -> bool:
    return pair.reference is not None and pair.reference.key.slot.partition(".")[0] == "input"


def _inherits_rows(pair: Pair, inputs: Sequence[Pair]) -> bool:
    """Whether the inputs of the call have rows that are as wrong, so that an outlier is not its own."""
    if any(
        f.test == "outlier_element" and f.status == "diverged" for entry in inputs for f in entry.findings
    ):
        return True
    is_no_worse = any(
        f.test in ("gain_tail", "attention_gain_tail") and f.status == "within-rounding"
        for f in pair.findings
    )
    return is_no_worse and any(map(_has_worse_rows, inputs))


def _has_worse_rows(pair: Pair) -> bool:
    error, tail = pair.row_error, pair.tail_error
    return error is not None and tail is not None and tail > POLICY.outlier_spread * error


def has_only_grown(pair: Pair) -> bool:
    """Whether a pair is suspect for nothing but errors that grew past what is expected."""
    suspect = {f.test for f in pair.findings if f.status == "suspect"}
    return pair.status == "suspect" and bool(suspect) and suspect <= GROWTH_TESTS


class Inputs:
    """The inputs of the call, or the op, that computed the record of a pair."""

    def __init__(self, reference: Archive, pairs: Sequence[Pair]) -> None:
        self._ops = ops_of(reference)
        self._pairs = {pair.key: pair for pair in pairs}
        self._of_calls: dict[str, list[Pair]] = {}
        for pair in pairs:
            if pair.reference is not None and _is_argument(pair):
                self._of_calls.setdefault(pair.reference.key.where, []).append(pair)

    def of(self, pair: Pair) -> Sequence[Pair]:
        """Return the pairs of the inputs, none if they are not known."""
        if pair.reference is None or not pair.reference.key.slot.startswith("output"):
            return ()
        place = pair.reference.key.where
        if place in self._ops:
            known = self._ops.inputs(place) or ()
            return [self._pairs[key] for key in known if key in self._pairs]
        return self._of_calls.get(place, ())


def _fed(key: Key) -> str:
    if key.step == 0:
        return "This is an input of the run: the two runs were fed different inputs."
    return f"This is an input of step {key.step}: the code that calls the model made it."


def _class_of(reference: Archive, site: str) -> str:
    module = reference.info.modules.get(site)
    return module.class_name if module else ""
