"""What is missing or differs although all that is computed from it agrees: `explained` (CMP-54, CMP-55)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Final

import numpy as np

from tensorcap.alignment import WITH_OTHER_VALUES, MappedArchive
from tensorcap.comparison.divergence import first_divergence
from tensorcap.comparison.element_order import ElementOrder, find_order
from tensorcap.comparison.folded_results import FoldedResults
from tensorcap.comparison.held_values import is_held
from tensorcap.comparison.node_flow import NodeFlow
from tensorcap.comparison.other_operations import OtherOperations
from tensorcap.comparison.padding import Padding
from tensorcap.comparison.pair import Decision, Pair, Status, decide
from tensorcap.comparison.pairing import Absences, Selection
from tensorcap.comparison.ranking import error_of
from tensorcap.runs import (
    calls_of,
    contents_of,
    enclosing_sites,
    is_gradient,
    is_inner,
    is_parameter,
    is_result,
    is_state,
    is_telling,
    lies_within,
    ops_of,
)
from tensorcap.wording import some
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import ROOT_SITE, Key, module_of, unescape
from tensorcap_formats.records import Record

if TYPE_CHECKING:
    from tensorcap.comparison.comparison import Comparison

_MISSING: Final[tuple[Status, ...]] = ("missing-in-target", "never-called", "not-capturable", "unmapped")
_DIFFERENT: Final[tuple[Status, ...]] = ("suspect", "diverged", "shape-mismatch")
_FUSED_ATTENTION: Final = ("sdpa", "flash", "flex")  # implementations that keep no attention weights
# How much smaller a result's relative error must be than that of what it is computed from
_UNDONE: Final = 8.0  # by the call that is given it: a matrix product hands errors on nearly whole
_UNDONE_AROUND: Final = 1e4  # by a module around it, whose residuals may hide an error
_EXACT: Final = 1e-4  # relative error, below which a module around another shape agrees

_OF_WHOLE: Final = ("growth", "wide_error")  # tests of the error of a whole tensor
_COMPILED: Final = "_orig_mod"  # what torch.compile wraps

_UNUSED_AGREE: Final = "the target's program has no value of it, and all values that both have agree"

_Place = tuple[int, int, str]  # rank, step, site


def explain_by_agreement(
    reference: Archive, target: Archive, pairs: Sequence[Pair], selection: Selection
) -> list[Pair]:
    """Make `explained` what the target lacks, or has otherwise, and all that is computed from it agrees.

    Args:
        reference: The trusted archive.
        target: The archive under test.
        pairs: Their pairs, judged.
        selection: What a user asked for; nothing explains that a required record is missing.
    """
    judged, errors = list(pairs), _Errors(reference, target)
    while any(pair.status in (*_MISSING, *_DIFFERENT) for pair in judged):
        more = _explained_once(reference, target, judged, selection, errors)
        if all(one is other for one, other in zip(judged, more, strict=True)):
            break
        judged = more  # what is explained is in the way of nothing else
    return judged


def _explained_once(
    reference: Archive, target: Archive, pairs: Sequence[Pair], selection: Selection, errors: _Errors
) -> list[Pair]:
    """Explain what the statuses of all other pairs allow, as they are."""
    agreement = _Agreement(reference, target, pairs, errors)

    def explained(pair: Pair) -> Pair:
        if pair.reference is None or pair.reference.key.is_bare or pair.reason.startswith(WITH_OTHER_VALUES):
            return pair
        reason = ""
        if pair.status in _MISSING and not selection.is_required(pair.key):
            reason = agreement.why_missing(pair.reference)
            if (
                not reason
                and pair.status != "not-capturable"
                and (why := agreement.why_not_captured(pair.reference.key))
            ):
                return decide(pair, Decision("agreement", "not-capturable", f"in the target: {why}"))
        elif pair.status in _DIFFERENT and (places := agreement.other_places(pair)):
            return _named(pair, places)
        elif pair.status in _DIFFERENT and pair.is_required and not _is_of_another_layer(pair, target):
            reason = agreement.why_different(pair) or agreement.why_parameter_differs(pair)
        return decide(pair, Decision("agreement", "explained", reason, pair.findings)) if reason else pair

    return [explained(pair) for pair in pairs]


def explain_in_injected_run(
    reference: Archive, target: Archive, pairs: Sequence[Pair], selection: Selection
) -> list[Pair]:
    """Make `explained` what the target lacks, of runs in which values were replaced.

    What follows a replaced value proves nothing. Two absences are explained all the same: results of a head
    whose weights the target leaves out (CMP-220), and an argument of a call in which all agrees (CMP-221).

    Args:
        reference: The trusted archive.
        target: The archive under test.
        pairs: Their pairs, judged.
        selection: What a user asked for; nothing explains that a required record is missing.
    """
    agreement = _Agreement(reference, target, pairs, _Errors(reference, target))

    def explained(pair: Pair) -> Pair:
        if pair.reference is None or pair.status not in _MISSING or selection.is_required(pair.key):
            return pair
        reason = agreement.why_head_is_missing(pair.reference.key)
        reason = reason or agreement.why_argument_is_missing(pair.reference)
        return decide(pair, Decision("agreement", "explained", reason, pair.findings)) if reason else pair

    return [explained(pair) for pair in pairs]


def _named(pair: Pair, places: str) -> Pair:
    """A pair that stays what it is, with the names of what both sides hold in its place."""
    if places in pair.reason:
        return pair
    reason = f"{pair.reason}; {places}" if pair.reason else places
    return decide(pair, Decision("agreement", pair.status, reason, pair.findings))


def explain_as(comparison: Comparison, free: Comparison, reference: Archive) -> Comparison:
    """Make `explained` what an injected run lacks or has in another shape, as the run without injection.

    Args:
        comparison: Of a run in which values were replaced, so that nothing is explained by what follows.
        free: Of the same model, with its own values.
        reference: The trusted archive, as it was compared.
    """
    reasons = {pair.key: pair.reason for pair in free.pairs if pair.status == "explained"}

    def explained(pair: Pair) -> Pair:
        is_of_structure = pair.status in (*_MISSING, "shape-mismatch")
        if not is_of_structure or pair.key not in reasons:
            return pair
        return decide(pair, Decision("agreement", "explained", reasons[pair.key], pair.findings))

    pairs = tuple(map(explained, comparison.pairs))
    return replace(comparison, pairs=pairs, divergence=first_divergence(reference, pairs))


def _is_of_another_layer(pair: Pair, target: Archive) -> bool:
    """Whether a tensor has not the layout that the other layers of the target have."""
    link = target.links.get(pair.key) if isinstance(target, MappedArchive) else None
    return link is not None and link.entry.evidence == "rule" and link.entry.moves_equal_names


class _Errors:
    """Relative errors of whole tensors, without the tokens that the masks of both runs leave out.

    Args:
        reference: The trusted archive.
        target: The archive under test.
    """

    def __init__(self, reference: Archive, target: Archive) -> None:
        self._archives = reference, target
        self._known: dict[str, float] = {}  # by key text, where a mask leaves tokens out

    def of(self, pair: Pair) -> float | None:
        """The error of a pair, no unit; 0 for equal digests, None if nothing was measured."""
        error, difference = error_of(pair), pair.difference
        if not error or difference is None or difference.mask_mismatches:
            return error
        if pair.key not in self._known:
            valid = self._of_valid(pair)
            self._known[pair.key] = error if valid is None else valid
        return self._known[pair.key]

    def are_much_smaller(self, results: Sequence[Pair], error: float | None, factor: float) -> bool:
        """Whether the largest error of results is that much smaller than an error; None for another shape.

        What is explained has no say, and one result at least has to be green. An error counts as 1 at most:
        one of a reference near zero has no bound, and would make any result small.
        """
        errors = [self.of(result) or 0.0 for result in results if result.status != "explained"]
        largest = max(errors, default=math.inf)
        return largest <= (_EXACT if error is None else min(error, 1.0) / factor)

    @cached_property
    def _padding(self) -> Padding:
        return Padding(*self._archives)

    def _of_valid(self, pair: Pair) -> float | None:
        """The error without padding; None if there is none."""
        records = pair.reference, pair.target
        if records[0] is None or records[1] is None or records[0].shape != records[1].shape:
            return None
        left_out = self._padding.left_out(records[0])
        if left_out is None or left_out.all():
            return None
        ours, theirs = (
            archive.load(record).astype(np.float64)[~left_out]
            for archive, record in zip(self._archives, records, strict=True)
            if record is not None
        )
        is_finite = np.isfinite(ours) & np.isfinite(theirs)
        size = float(np.linalg.norm(ours[is_finite]))
        return float(np.linalg.norm((theirs - ours)[is_finite])) / size if size else None


class _Agreement:
    """What agrees of all that is computed from a tensor.

    Args:
        reference: The trusted archive.
        target: The archive under test.
        pairs: All pairs, judged.
        errors: Their errors.
    """

    def __init__(self, reference: Archive, target: Archive, pairs: Sequence[Pair], errors: _Errors) -> None:
        self._reference, self._target, self._errors = reference, target, errors
        self._orders: dict[tuple[object, ...], ElementOrder | None] = {}  # by contents, once asked for
        self._are_models_green: dict[_Place, bool] = {}  # once asked for
        self._reference_modules = reference.info.modules
        self._reference_calls = calls_of(reference)
        self._classes = {site: module.short_class for site, module in reference.info.modules.items()}
        self._calls = [
            {point.site: point.calls for point in archive.info.points if not point.slots}
            for archive in (target, reference)
        ]
        self._not_capturable = {
            ".".join(part for part in point.site.split(".") if part != _COMPILED): point.reason
            for point in target.info.points
            if point.status == "not-capturable" and not point.slots
        }
        self._pairs = [p for p in pairs if p.reference is not None and p.status != "excluded"]
        self._flow = NodeFlow(reference, target, pairs)
        self._folded = FoldedResults(reference, target, self._pairs)
        self._other_operations = OtherOperations(reference, target, pairs, self._flow)
        ops = ops_of(target)
        self._has_ops = bool(ops)
        self._with_end = {r.key.site for r in target.records if is_result(r.key)}  # or told to have none
        self._with_end |= {point.site for point in target.info.points if point.slots or point.reason}
        self._has_digests = reference.trusts_digests
        self._absences = Absences(reference, ops_of(reference), target, ops)
        self._results: dict[_Place, list[Pair]] = {}
        self._of_call: dict[str, list[Pair]] = {}
        self._states: dict[tuple[object, ...], list[Pair]] = {}  # of an object, and of any step
        self._takers: dict[tuple[object, ...], list[Pair]] = {}  # arguments that hold a record's contents
        for pair in self._pairs:
            record = pair.reference
            assert record is not None
            key = record.key
            if is_state(key):
                for place in (_holder(key), _of_any_step(key)):
                    self._states.setdefault(place, []).append(pair)
            if is_result(key):
                self._results.setdefault((key.rank, key.step, key.site), []).append(pair)
                self._of_call.setdefault(key.where, []).append(pair)
            elif _is_argument(key) and self._has_digests and is_telling(record):
                self._takers.setdefault(contents_of(record), []).append(pair)

    def why_missing(self, record: Record) -> str:
        """Why the target may lack a record of the reference; "" if it may not."""
        key = record.key
        if is_parameter(key) and self._target.info.operation_map:  # a compiled program gives no weights
            return self._used_without(key) or self._computed_without(key, key.site)
        if self._absences.is_left_out(record) or is_gradient(key):
            return ""
        info = self._target.info
        if not info.modules and (not info.dump or is_parameter(key) or is_inner(key)):
            return ""
        if same := self._equal_and_agreeing(record):
            return f"it holds what {same[0].key} holds, which agrees"
        if is_inner(key) and self._target.info.operation_map:
            return self._used_without(key)
        if is_inner(key):
            return self._computed_without(key, module_of(key.site)) if self._has_ops else ""
        if is_parameter(key):
            module = self._target.info.modules.get(key.site)
            has_it = module is not None and key.slot.partition(".")[2] in {
                *module.parameters,
                *module.buffers,
            }
            return "" if has_it else self._computed_without(key, key.site)
        results = [pair for pair in self._of_call.get(key.where, ()) if pair.is_compared]
        if results:
            return self._of_known_call(key, results)
        if key.site != ROOT_SITE and self._is_not_called(key):
            return self._computed_without(key, _enclosing(key.site))
        return ""

    def why_different(self, pair: Pair) -> str:
        """By what a difference is undone; "" if it is not.

        1. A tensor that is the argument of calls: all of their results agree, with an error at most an
           eighth of its own.
        2. A tensor that a later argument holds, too, which agrees: the target has another one in its place.
        3. A tensor that holds the same in another order, as rows of tokens side by side do, though not of
           channels, along the last axis: the nearest module around it that has a result which is green has
           results with an error at most an eighth of its own, and what lies between is explained. Of channels
           the module right around it hands on a result, made by a call within, that agrees so.
        4. Any other one: the nearest module around it agrees, with an error at most 1e-4 of its own.

        Each holds only if the module around it, and the model, have results that agree. Beside a mistake, by
        which the model has none, the first holds of calls that hand on what they are given in the target, and
        of products: these hide no error. Before all of them, and beside a mistake too, comes what the target
        hands on in the place of the result of a call that it does not make, and which agrees with that; and
        what it has folded into a tensor (CMP-260).
        """
        record = pair.reference
        assert record is not None
        key = record.key
        if is_state(key) and (why := self._why_state_reordered(pair)):
            return why
        is_result_of_model = key.site == ROOT_SITE and not _is_argument(key)
        if is_result_of_model or is_gradient(key) or is_parameter(key):
            return ""
        if why := self._why_folded(pair) or self._folded.why_folded(pair):
            return why
        if not self._is_model_green(key):
            takers = self._takers_of(pair)
            why = (
                self._why_undone(takers, self._errors.of(pair))
                if all(map(self._hides_nothing, takers))
                else ""
            )
            return why or self._why_made_otherwise(pair, takers)
        module = module_of(key.site)
        around = self._nearest(
            key, module if is_inner(key) else _enclosing(module), besides=contents_of(record)
        )
        if around is None or not _agree(around[1]):
            return ""
        if is_inner(key) and (why := self._other_operations.why(pair, around[1])):
            return why
        error = self._errors.of(pair)
        if why := self._why_undone(self._takers_of(pair), error):
            return why
        if (later := self._agreeing_later(pair)) and all(f.test != "pass_through" for f in pair.findings):
            return f"it differs, and {later}, which holds the same in the reference, agrees"
        proof = self._nearest_green(key, around, besides=contents_of(record))
        order = (
            self._order_of(pair)
            if proof and self._errors.are_much_smaller(proof[1], error, _UNDONE)
            else None
        )
        if proof and order is not None and len(record.shape) - 1 not in order.moved:  # which is of channels
            return f"{_in_words(order)}, and what {_name(proof[0])} makes of it agrees"
        if order is not None and (last := self._agreeing_end(key, error)):
            return f"{_in_words(order)}, and what {last} makes of it agrees"
        if not is_inner(key) and self._errors.are_much_smaller(around[1], error, _UNDONE_AROUND):
            return f"it differs, and what {_name(around[0])} makes of it agrees"
        return ""

    def _agreeing_end(self, key: Key, error: float | None) -> str:
        """The call that ends the module right around a result, and agrees with an error that is much smaller.

        Args:
            key: Of the result.
            error: Its own.

        Returns:
            "" if there is none.
        """
        parent = _enclosing(module_of(key.site))
        if parent == ROOT_SITE:
            return ""
        results = self._results.get((key.rank, key.step, parent), ())
        main = next((pair.reference for pair in results if pair.reference), None)
        ends = [] if main is None else self._equal_and_agreeing(main)
        within = [pair for pair in ends if pair.reference and lies_within(pair.reference.key.site, parent)]
        if not within or not self._errors.are_much_smaller(within, error, _UNDONE):
            return ""
        return next(pair.reference.key.site for pair in within if pair.reference)

    def why_parameter_differs(self, pair: Pair) -> str:
        """By which results a difference of a parameter is undone; "" if by none.

        All results of its module, in all steps, were compared, those of the model agree, and either they
        differ and are explained (CMP-55), as with a gain that later weights are multiplied by, or they agree
        of arguments that differ and are explained, as of such weights.
        """
        record = pair.reference
        if record is None or not is_parameter(record.key) or pair.status == "shape-mismatch":
            return ""
        site = record.key.site
        given, results = self._arguments_of_site.get(site, []), self._results_of_site.get(site, [])
        if not results or not all(p.is_compared for p in results):
            return ""
        if not all(p.reference and self._is_model_green(p.reference.key) for p in results):
            return ""
        if all(p.status == "explained" for p in results):
            return f"of what {_name(site)} makes of it: {results[0].reason}"
        given = [p for p in given if p.is_compared]
        if given and all(p.status == "explained" for p in given) and _agree(results):
            return f"what {_name(site)} is given differs, and what it makes agrees"
        return ""

    @cached_property
    def _results_of_site(self) -> dict[str, list[Pair]]:
        """Results of all calls of a module, by its site."""
        results: dict[str, list[Pair]] = {}
        for (_, _, site), pairs in self._results.items():
            results.setdefault(site, []).extend(pairs)
        return results

    @cached_property
    def _arguments_of_site(self) -> dict[str, list[Pair]]:
        """Arguments of all calls of a module, by its site."""
        arguments: dict[str, list[Pair]] = {}
        for pair in self._pairs:
            if pair.reference is not None and _is_argument(pair.reference.key):
                arguments.setdefault(pair.reference.key.site, []).append(pair)
        return arguments

    def _why_state_reordered(self, pair: Pair) -> str:
        """By which later steps it is harmless that a state is in another order (CMP-250); "" if by none.

        A ring has the oldest token's place taken by the newest; whoever reads it has to know. Nothing reads
        that of the last step, so that this very state has to have been in another order before, or else to
        show that it is a ring.
        """
        order = self._order_of_state(pair)
        if pair.reference is None or order is None:
            return ""
        key = pair.reference.key
        of_any_step = self._states[_of_any_step(key)]
        first = min(p.reference.key.step for p in of_any_step if p.reference and self._order_of_state(p))
        own: list[Pair] = []
        later: list[list[Pair]] = []
        for (rank, step, site), results in self._results.items():
            others = [p for p in results if p.reference is not None and not is_state(p.reference.key)]
            if rank == key.rank and site == ROOT_SITE and step > first:
                later.append(others)
            elif rank == key.rank and site == ROOT_SITE and step == key.step:
                own += others
        by = "later steps make"
        if not later and self._is_ring(pair, order):
            by, later = "the step makes", [own]
        agrees = bool(later) and all(map(_agree, later))
        agrees = agrees and self._errors.are_much_smaller(
            [*chain.from_iterable(later)], self._errors.of(pair), _UNDONE
        )
        return f"{_in_words(order)}, and what {by} of it agrees" if agrees else ""

    def _is_ring(self, pair: Pair, order: ElementOrder) -> bool:
        """Whether a state is the target's of the step before but for the newest, in the place of the oldest.

        Args:
            pair: Of the state.
            order: Its other order, that of the reference turned by as many places as are new.
        """
        if pair.reference is None or pair.target is None or len(order.moved) != 1:
            return False
        key, (axis,) = pair.reference.key, order.moved
        before = [
            p for p in self._states[_of_any_step(key)] if p.reference and p.reference.key.step < key.step
        ]
        last = max(before, key=lambda p: p.reference.key.step if p.reference else 0, default=None)
        if last is None or last.target is None or not last.is_equal or not last.target.stored:
            return False
        places, new = order.orders[axis], order.orders[axis][0]
        is_turned = places == tuple(range(new, len(places))) + tuple(range(new))
        if not is_turned or last.target.shape != pair.target.shape:
            return False
        was, now = (np.moveaxis(self._target.load(one), axis, 0)[new:] for one in (last.target, pair.target))
        return np.array_equal(was, now)

    def _order_of_state(self, pair: Pair) -> ElementOrder | None:
        """The other order of a state, if all of its shape in the object beside it have it too; else None."""
        own, order = pair.reference, self._order_of(pair)
        if own is None or order is None:
            return None
        beside = (p for p in self._states[_holder(own.key)] if p.is_compared)
        orders = (self._order_of(p) for p in beside if p.reference and p.reference.shape == own.shape)
        return order if all(other and other.orders == order.orders for other in orders) else None

    def _order_of(self, pair: Pair) -> ElementOrder | None:
        """The order in which a tensor holds the reference's elements, another one; None if it does not.

        What differs then may be as large as the limit of tests of a whole tensor.
        """
        record, tested = pair.reference, pair.target
        limit = max((f.limit for f in pair.findings if f.test in _OF_WHOLE), default=0.0)
        if record is None or tested is None or record.shape != tested.shape or not limit:
            return None
        is_read = record.stored and tested.stored and record.dtype.kind == tested.dtype.kind == "float"
        if not is_read:
            return None
        order = self._find_order(record, tested)
        if order is None or not order.moved or not order.is_proven or order.error > limit:
            return None
        return order if order.error <= (self._errors.of(pair) or 0.0) / _UNDONE else None

    def _find_order(self, record: Record, tested: Record) -> ElementOrder | None:
        """Find the order of elements once for all calls that are given the same, as those of a cache are."""
        contents: tuple[object, ...] = (record.key, tested.key)
        if record.digest and tested.digest and self._has_digests and self._target.trusts_digests:
            contents = (*contents_of(record), *contents_of(tested))
        if contents not in self._orders:
            arrays = self._reference.load(record), self._target.load(tested)
            self._orders[contents] = find_order(*arrays)
        return self._orders[contents]

    def _why_folded(self, pair: Pair) -> str:
        """By which calls that the target lacks a difference is undone, as by a norm in the weights before it.

        All calls that are given the tensor are such in the reference. What is computed of their results is
        given the tensor itself in the target, bit for bit, and agrees.
        """
        record, tested = pair.reference, pair.target
        if record is None or tested is None or not tested.digest or not is_result(record.key):
            return ""
        takers = self._takers.get(contents_of(record), [])
        results = [r for t in takers if t.reference for r in self._of_call.get(t.reference.key.where, [])]
        if not results or not all(taker.is_absent or not taker.is_compared for taker in takers):
            return ""
        if any(result.is_compared for result in results):
            return ""
        further = [
            taker
            for result in results
            if result.reference is not None
            for taker in self._takers.get(contents_of(result.reference), [])
            if taker.is_compared
        ]
        is_handed_on = all(t.target is not None and t.target.digest == tested.digest for t in further)
        if not further or not is_handed_on or not all(taker.is_equal for taker in further):
            return ""
        names = dict.fromkeys(result.reference.key.site for result in results if result.reference)
        return (
            f"the target does not call {some(list(names), 2)}, and hands this on in its place, which agrees"
        )

    def other_places(self, pair: Pair) -> str:
        """What a result of the model that differs is on both sides, if it is two other tensors that agree.

        The model computes the same then, and returns something else under the name: no result that what it
        is computed from must lead to. "" if it is not so.
        """
        record, tested = pair.reference, pair.target
        if record is None or tested is None or record.key.site != ROOT_SITE or not is_result(record.key):
            return ""
        ours = [other for other in self._equal_and_agreeing(record) if other.is_equal]
        theirs = self._equal_in_target.get(contents_of(tested))
        if not (ours and theirs and self._has_digests):
            return ""
        return f"the reference returns {ours[0].key} there, the target what {theirs} holds, and both agree"

    @cached_property
    def _equal_in_target(self) -> dict[tuple[object, ...], str]:
        """Keys of pairs that are equal by what their record of the target holds."""
        equal: dict[tuple[object, ...], str] = {}
        for pair in self._pairs if self._target.trusts_digests else ():
            if pair.target is not None and pair.is_equal and is_telling(pair.target):
                equal.setdefault(contents_of(pair.target), pair.key)
        return equal

    def _takers_of(self, pair: Pair) -> Sequence[Pair]:
        """Arguments that hold a tensor: itself, if it is one."""
        record = pair.reference
        assert record is not None
        return [pair] if _is_argument(record.key) else self._takers.get(contents_of(record), [])

    def _why_undone(self, takers: Sequence[Pair], error: float | None) -> str:
        """By which calls an error of their argument is undone; "" if it is not."""
        if not takers or not self._undo(takers, error):
            return ""
        names = dict.fromkeys(taker.reference.key.site for taker in takers if taker.reference)
        return f"it differs, and what {some(list(names), 2)} makes of it agrees"

    def _why_made_otherwise(self, pair: Pair, takers: Sequence[Pair]) -> str:
        """By which arguments a result that differs is right where it is used, as with a scale behind it."""
        compared = [taker for taker in takers if taker is not pair and taker.is_compared]
        is_used_right = bool(compared) and all(taker.is_equal for taker in compared)
        if not is_used_right or any(f.test == "pass_through" for f in pair.findings):
            return ""
        later = self._agreeing_later(pair)
        return f"it differs, and {later}, which holds the same in the reference, agrees" if later else ""

    def _hides_nothing(self, taker: Pair) -> bool:
        """Whether a call that is given another argument gives another result, unless it undoes that."""
        assert taker.reference is not None
        key = taker.reference.key
        if self._reference_calls.is_linear(key.site) and self._reference_calls.is_leaf(key.site):
            return True
        own = taker.target.digest if taker.target else ""
        results = [result.target for result in self._of_call.get(key.where, []) if result.target]
        return bool(own) and [result.digest for result in results] == [own]

    def _undo(self, takers: Sequence[Pair], error: float | None) -> bool:
        """Whether all calls that are given a tensor that differs have results with a much smaller error.

        Of a call whose argument the target has not, its result says it; one at least is given another tensor.
        """
        is_lacking = [taker.target is None for taker in takers]
        different = [taker for taker, lacks in zip(takers, is_lacking, strict=True) if not lacks]
        if not different or not all(taker.status in _DIFFERENT for taker in different):
            return False
        results = [self._of_call.get(p.reference.key.where, []) for p in takers if p.reference]
        of_lacking = [of_call for of_call, lacks in zip(results, is_lacking, strict=True) if lacks]
        if not all(result.is_compared and result.is_green for of_call in of_lacking for result in of_call):
            return False
        every = [result for of_call in results for result in of_call]
        return (
            bool(every) and all(map(_agree, results)) and self._errors.are_much_smaller(every, error, _UNDONE)
        )

    def _is_model_green(self, key: Key) -> bool:
        place = key.rank, key.step, ROOT_SITE
        if place not in self._are_models_green:
            results = self._results.get(place, ())
            left = [pair for pair in results if pair.is_green or not self.other_places(pair)]
            self._are_models_green[place] = _agree(left)
        return self._are_models_green[place]

    @cached_property
    def _agreeing(self) -> dict[tuple[object, ...], list[Pair]]:
        """Pairs that agree, in order, by what their record of the reference holds."""
        agreeing: dict[tuple[object, ...], list[Pair]] = {}
        for pair in self._pairs:
            if pair.reference is not None and pair.is_green and is_telling(pair.reference):
                agreeing.setdefault(contents_of(pair.reference), []).append(pair)
        return agreeing

    def _equal_and_agreeing(self, record: Record) -> list[Pair]:
        """Pairs whose record of the reference holds the same, and that are green."""
        is_known = self._has_digests and is_telling(record)
        return self._agreeing.get(contents_of(record), []) if is_known else []

    def _agreeing_later(self, pair: Pair) -> str:
        """Key of a later pair that agrees, equal in the reference and not in the target; "" if none is."""
        record, tested = pair.reference, pair.target
        if record is None or tested is None:
            return ""
        for other in self._equal_and_agreeing(record):
            if other.reference is None or other.target is None or not other.target.digest:
                continue
            if not other.is_equal:
                continue
            if other.reference.order > record.order and other.target.digest != tested.digest:
                return other.key
        return ""

    def _of_known_call(self, key: Key, results: Sequence[Pair]) -> str:
        """Of a call that the target makes too, with fewer arguments or results."""
        if key.site == ROOT_SITE and is_result(key):
            return self._made_by_left_out(key, results)
        is_scope_known = self._target.info.scope is not None or bool(self._target.info.dump)
        if not _agree(results) or not is_scope_known:
            return ""
        if self._target.info.dump:
            return "the target's dump has no such tensor of the call, and what it has of its results agrees"
        if _is_argument(key):
            return "the target's call is given no such argument, and its results agree"
        implementation = self._target.info.attention_implementation
        if implementation.startswith(_FUSED_ATTENTION):
            return f"the target's call returns no such value ({implementation} keeps no attention weights)"
        return "the target's call returns no such value, and its other results agree"

    def why_argument_is_missing(self, record: Record) -> str:
        """Why the target's call may lack an argument, whatever was replaced before it; "" if it may not.

        The call's results agree, and so does all that was compared within it: what the argument would have
        changed there is in the one or the other.
        """
        key = record.key
        results = [pair for pair in self._of_call.get(key.where, ()) if pair.is_compared]
        if not _is_argument(key) or not results or self._absences.is_left_out(record):
            return ""
        if (key.rank, key.step, key.site) in self._parts_that_differ:
            return ""
        return self._of_known_call(key, results)

    @cached_property
    def _parts_that_differ(self) -> set[_Place]:
        """The modules at which, or within which, something that is compared does not agree."""
        parts: set[_Place] = set()
        for pair in self._pairs:
            if pair.reference is not None and pair.is_compared and not pair.agrees:
                key = pair.reference.key
                site = module_of(key.site)
                parts |= {(key.rank, key.step, part) for part in (site, *enclosing_sites(site))}
        return parts

    def why_head_is_missing(self, key: Key) -> str:
        """Why the target may lack a result of the model that a head makes; "" if it may not, or is none."""
        if key.site != ROOT_SITE or not is_result(key):
            return ""
        results = [pair for pair in self._of_call.get(key.where, ()) if pair.is_compared]
        return self._made_by_left_out(key, results) if results else ""

    def _made_by_left_out(self, key: Key, results: Sequence[Pair]) -> str:
        """Of a result of the model that a head makes whose weights the target's own code leaves out.

        A head is a part of the model, such as `pooler`, of which the target has nothing.
        """
        records = [pair.reference for pair in self._of_call[key.where] if pair.reference is not None]
        record = next((each for each in records if each.key == key), None)
        if (
            not self._target.info.left_out_weights
            or record is None
            or not self._has_digests
            or not _agree(results)
        ):
            return ""
        equal = [
            pair.reference.key.site
            for pair in self._pairs
            if pair.reference is not None and contents_of(pair.reference) == contents_of(record)
        ]
        for head in dict.fromkeys(site.partition(".")[0] for site in equal if site != ROOT_SITE):
            weights = self._weights_below(head)
            is_left_out = all(map(self._target.info.leaves_out, weights))
            if weights and is_left_out and not any(self._is_compared_below(head)):
                return (
                    f"the target's code leaves out the weights of {head}, and all else that it returns agrees"
                )
        return ""

    def _weights_below(self, head: str) -> list[str]:
        """The names of the reference's parameters in a part of the model."""
        return [
            f"{site}.{name}"
            for site, module in self._reference_modules.items()
            if site == head or site.startswith(f"{head}.")
            for name in module.parameters
        ]

    def _is_compared_below(self, head: str) -> Iterator[bool]:
        """For each record in a part of the model, whether it is compared."""
        for pair in self._pairs:
            site = module_of(pair.reference.key.site) if pair.reference is not None else ""
            if site == head or site.startswith(f"{head}."):
                yield pair.is_compared

    def _used_without(self, key: Key) -> str:
        """By the results of all nodes that are computed from one that a compiler left out.

        By all values that both sides have, if no graph says which are, as of a weight.
        """
        if key.where not in self._flow.nodes:
            return _UNUSED_AGREE if _agree([pair for pair in self._pairs if pair.is_compared]) else ""

        def has_values(place: str) -> bool:
            return any(pair.is_compared and not is_held(pair) for pair in self._flow.pairs(place))

        users = self._flow.nearest_users(key.where, has_values, key.text)
        if not users:
            is_used = any(self._flow.nearest_users(key.where, lambda _: True, key.text))
            return "" if is_used else "nothing is computed from it"
        pairs = [pair for user in users for pair in self._flow.pairs(user) if pair.is_compared]
        if not _agree(pairs):
            return ""
        names = [unescape(pair.key.rpartition("/")[0].partition(":")[2]) for pair in pairs]
        return (
            f"the target's program has no value of it, and what is computed from it agrees: {some(names, 2)}"
        )

    def _is_not_called(self, key: Key) -> bool:
        """Whether the target has no such module, or one of another class, does not call it, or less often.

        One that could not be captured counts as not called, and so does one of a graph that has arguments
        alone: its nodes do not say where it ends.
        """
        if self._has_ops and key.site not in self._with_end:
            return True
        tested, trusted = self._target.info.modules.get(key.site), self._classes.get(key.site, "")
        if tested is None or self._absences.is_never_called(key) or self.why_not_captured(key):
            return True
        if isinstance(self._target, MappedArchive) and key.site in self._target.parts:
            return True
        if trusted and tested.short_class not in ("", trusted):
            return True
        calls, of_reference = (calls.get(key.site) for calls in self._calls)
        return calls is not None and of_reference is not None and calls < of_reference

    def _computed_without(self, key: Key, site: str) -> str:
        """By the results of the nearest module around it that both sides called.

        Of what the target could not capture they have to be equal: rounding shows nothing of what is inside.
        """
        around = self._nearest(key, site)
        if around is None or not _agree(around[1]):
            return ""
        why = self.why_not_captured(key)
        if not why:
            return f"the target computes {_name(around[0])} without it, with results that agree"
        if not all(pair.status in ("identical", "explained") for pair in around[1]):
            return ""
        return f"results of {_name(around[0])} are identical; in the target: {why}"

    def why_not_captured(self, key: Key) -> str:
        """Why the target could not capture a module of the same path, "" if it could."""
        return self._not_capturable.get(module_of(key.site), "")

    def _nearest(
        self, key: Key, site: str, besides: tuple[object, ...] | None = None
    ) -> tuple[str, list[Pair]] | None:
        """The nearest module from a site on that both sides called, and its results that hold something else.

        Args:
            key: Whose rank and step count.
            site: The first module that may be it.
            besides: Contents that are no result of their own, since a module hands them on.
        """
        for module in (site, *enclosing_sites(site)):
            results = self._results.get((key.rank, key.step, module), ())
            others = [p for p in results if p.reference and contents_of(p.reference) != besides]
            if results and others[:1] != [results[0]] and module != ROOT_SITE:
                continue  # its main result is what is looked at
            if any(pair.is_compared for pair in others):
                return module, [pair for pair in others if not _is_spare(pair)]
        return None

    def _nearest_green(
        self, key: Key, around: tuple[str, list[Pair]], besides: tuple[object, ...]
    ) -> tuple[str, list[Pair]] | None:
        """The nearest module from one on of whose results, which agree, one at least is green; None if none.

        Args:
            key: Whose rank and step count.
            around: The first module that may be it, and its results.
            besides: See `_nearest`.
        """
        found: tuple[str, list[Pair]] | None = around
        while found is not None and _agree(found[1]):
            if any(pair.is_green for pair in found[1]):
                return found
            found = self._nearest(key, _enclosing(found[0]), besides) if found[0] != ROOT_SITE else None
        return None


def _is_spare(pair: Pair) -> bool:
    """Whether a result is one that the target's call does not return, and need not."""
    return pair.is_absent and pair.reference is not None and pair.reference.key.site != ROOT_SITE


def _agree(results: Sequence[Pair]) -> bool:
    """Whether there are results, and nothing is wrong with any.

    That is enough to say why the target lacks something. Of what differs it is not, since tokens that chose
    other experts are excused: that takes a much smaller error, which is of all tokens, or a result that is
    equal.
    """
    return bool(results) and all(result.agrees for result in results)


def _of_any_step(key: Key) -> tuple[object, ...]:
    """What a state is in each step."""
    return key.rank, key.site, key.call, key.slot


def _holder(key: Key) -> tuple[object, ...]:
    """The object of one step that a state lies in: its path but for its last name."""
    return key.where, key.slot.rpartition(".")[0]


def _in_words(order: ElementOrder) -> str:
    """What another order is, in words."""
    axes = [str(axis) for axis in order.moved]
    return f"it holds the same in another order along {'axis' if len(axes) == 1 else 'axes'} {some(axes, 4)}"


def _is_argument(key: Key) -> bool:
    return key.slot.partition(".")[0] == "input" and not is_inner(key)


def _enclosing(site: str) -> str:
    return next(enclosing_sites(site), ROOT_SITE)


def _name(site: str) -> str:
    return "the model" if site == ROOT_SITE else site
