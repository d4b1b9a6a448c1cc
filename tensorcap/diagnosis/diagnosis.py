"""Diagnose one pair: which mistakes explain its values, and how much of the error each leaves.

A family of mistakes is a generator of hypotheses about a `PairContext`, and a line in `FAMILIES`; another
mistake of a family is a line in the family's module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import numpy as np

from tensorcap.adapters import Rerun
from tensorcap.diagnosis.activations import propose_activations
from tensorcap.diagnosis.attention import propose_attention_cores
from tensorcap.diagnosis.context import PairContext, read_pair, values_of
from tensorcap.diagnosis.error_location import propose_error_locations, propose_mistakes_in_inner_inputs
from tensorcap.diagnosis.factors import propose_factors
from tensorcap.diagnosis.group_norms import propose_group_norms
from tensorcap.diagnosis.hypothesis import Explanation, Hypothesis, Scorer, rank_explanations
from tensorcap.diagnosis.linear_weights import propose_linear_weights
from tensorcap.diagnosis.mutation_trials import (
    propose_code_mutations,
    propose_mutations,
    propose_numbers_in_code,
    propose_operations_in_another_order,
    propose_other_tensors,
)
from tensorcap.diagnosis.norm_inputs import propose_other_inputs_of_norms
from tensorcap.diagnosis.norms import propose_norms
from tensorcap.diagnosis.orders import propose_orders
from tensorcap.diagnosis.pointwise import propose_functions
from tensorcap.diagnosis.products import propose_products
from tensorcap.diagnosis.ranks import propose_rank_mistakes
from tensorcap.diagnosis.records import propose_other_records
from tensorcap.diagnosis.rotations import propose_rotations
from tensorcap.diagnosis.routers import propose_routings
from tensorcap.diagnosis.search import Search
from tensorcap.diagnosis.simple import (
    propose_degenerate_values,
    propose_dropouts,
    propose_position_offsets,
)
from tensorcap.diagnosis.values import relative_error
from tensorcap.wording import conjugated, counted, fault_text
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import TensorcapError, UsageError, no_such_tensor
from tensorcap_formats.json_values import json_object
from tensorcap_formats.keys import module_of, unescape
from tensorcap_formats.records import Record

LIMIT: Final = 1 << 22  # elements of a pair that are looked at
_LARGEST_LIMIT: Final = 1 << 24
_RIGHT_FIRST_TOKEN: Final = 0.1  # share of the whole error below which the first token counts as right
_FEW: Final = 2  # fitted numbers; more may make one record out of another
_FEWER: Final = 0.5  # of what another record leaves, that fitted numbers have to leave less than
_UNRELATED_COSINE: Final = 0.5  # two tensors of a smaller cosine have hardly anything in common

Status = Literal["identical", "explained", "unexplained"]


@dataclass(frozen=True, slots=True)
class Family:
    """Hypotheses about one subject.

    Attributes:
        name: In words; `diagnose` leaves families out by it.
        propose: Makes hypotheses about a pair, one after the other.
        is_final: Whether no family behind is tried if one of its hypotheses holds, but those that make NaN
            themselves if the target has some.
        makes_nonfinite: Whether its hypotheses predict NaN and infinities.
        is_last_resort: Whether it is tried only if nothing before it says what is wrong.
    """

    name: str
    propose: Callable[[PairContext], Iterable[Hypothesis]]
    is_final: bool = False
    makes_nonfinite: bool = False
    is_last_resort: bool = False


FAMILIES: Final = (  # in the order in which they are tried
    Family("degenerate values", propose_degenerate_values, is_final=True),
    Family("factors and offsets", propose_factors),
    Family("ranks", propose_rank_mistakes),
    Family("functions of each value", propose_functions),
    Family("positions", propose_position_offsets),
    Family("dropout", propose_dropouts),
    Family("orders and layouts", propose_orders),
    Family("rotary embeddings", propose_rotations),
    Family("activations", propose_activations),
    Family("norms", propose_norms),
    Family("norms of groups", propose_group_norms),
    Family("matrix products", propose_products),
    Family("routers", propose_routings),
    Family("attention", propose_attention_cores),
    Family("inner inputs", propose_mistakes_in_inner_inputs),
    Family("other records", propose_other_records),
    Family("inputs of norms", propose_other_inputs_of_norms, is_last_resort=True),
    Family("linear weights", propose_linear_weights),
    Family("mutations", propose_mutations, makes_nonfinite=True),
    Family("code mutations", propose_code_mutations, makes_nonfinite=True, is_last_resort=True),
    Family("other tensors", propose_other_tensors, makes_nonfinite=True, is_last_resort=True),
    Family("numbers in code", propose_numbers_in_code, makes_nonfinite=True, is_last_resort=True),
    Family("order of operations", propose_operations_in_another_order, is_last_resort=True),
    Family("error locations", propose_error_locations),
)

_OF_MAKERS: Final = ("mutations", "code mutations", "numbers in code")
NOT_OF_MAKERS: Final = frozenset(  # all but those of calls that made what a module was given
    family.name for family in FAMILIES if family.name not in _OF_MAKERS
)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What explains one pair.

    Attributes:
        key: Key text of the reference's record.
        target_key: Key text of the target's.
        status: `identical`: nothing to explain; `explained`: a hypothesis holds; `unexplained`: none does.
        before: Relative error of the target, no unit; None if shapes differ.
        rounding: Relative error of one rounding in the coarser precision of the pair, no unit.
        precision: The name of that precision; "" for integers.
        inherited: Relative error that the inputs arrive with, no unit: no hypothesis can undo it.
        explanations: Hypotheses that hold, the best first.
        tried: Kinds that were tried, and the smallest share of the error that each left, no unit.
        notes: What else a reader should know, as sentences.
        failed: Which hypotheses could not be tried because of a fault in their own code, as sentences.
        families: Names of the families of which a hypothesis holds; saved results lack them.
    """

    key: str
    target_key: str
    status: Status
    before: float | None
    rounding: float
    precision: str
    inherited: float
    explanations: tuple[Explanation, ...]
    tried: dict[str, float]
    notes: tuple[str, ...]
    failed: tuple[str, ...] = ()
    families: tuple[str, ...] = field(default=(), compare=False)

    @property
    def exit_status(self) -> int:
        """0 if nothing is left to explain, 1 if no hypothesis holds."""
        return int(self.status == "unexplained")

    def to_json(self) -> dict[str, Any]:
        """Convert to the members that `tcap diagnose --json` prints (DIA-50)."""
        members = json_object(self)
        del members["families"]
        return {
            "format": "tensorcap-diagnosis",
            "version": 1,
            **members,
            "exit_status": self.exit_status,
        }


@np.errstate(over="ignore", invalid="ignore", divide="ignore")
def diagnose(
    reference: Archive,
    target: Archive,
    key: str,
    *,
    target_key: str | None = None,
    compute_dtype: str | None = None,
    limit: int = LIMIT,
    rerun: Rerun | None = None,
    without: Set[str] = frozenset(),
    further: Family | None = None,
    search: Search | None = None,
) -> Diagnosis:
    """Test hypotheses about a mistake on the values of one pair.

    1. Equal values are `identical`.
    2. The families propose hypotheses in their order; each is scored on the values at once, since the chance
       that it fits by luck grows with the number that were tried.
    3. Those that leave little enough are ranked; without any the pair is `unexplained`.
    4. A family that ends in an exception is told as `failed`; what the others say stands.

    Args:
        reference: The trusted archive.
        target: The archive under test, or its view under a mapping.
        key: The reference's record, as `Archive.get` takes it.
        target_key: The target's, if it has another key.
        compute_dtype: Precision in which the target computed, if its archive does not say.
        limit: Elements of the pair that are looked at, 1 to 2^24: of a larger pair the first part that
            differs.
        rerun: The call of the reference's module that made its record, to be made again with mutations.
        without: Names of families that are left out.
        further: A family that is tried before all others.
        search: How many causes may be tried by calls, and how many were; None for one of this pair alone.

    Raises:
        TensorNotFoundError: One of the records does not exist.
        UsageError: The values are complex or were not kept, the limit is out of range, or there is no such
            family.
        ReadError: An archive cannot be read.
    """
    if not 1 <= limit <= _LARGEST_LIMIT:
        raise UsageError(f"limit: is {limit}, expected 1 to {_LARGEST_LIMIT}")
    unknown = without - {family.name for family in FAMILIES}
    if unknown:
        names = ", ".join(family.name for family in FAMILIES)
        raise UsageError(f"without: is {sorted(unknown)}, expected some of: {names}")
    context = _read_context(reference, target, key, target_key, compute_dtype, limit)
    context = replace(context, rerun=rerun, search=Search() if search is None else search)
    is_identical = context.is_same_shape and np.array_equal(
        context.reference_values, context.target_values, equal_nan=True
    )
    scorer = Scorer(context.rounding, 0.0 if is_identical else context.inherited)
    scores = _Scores() if is_identical else _score_families(context, scorer, without, further)
    ranked = rank_explanations(_without_fits_of_others(scores.explanations, context))
    explanations = tuple(_as_argument(one, context) for one in ranked)
    notes = [*_dtype_notes(context.reference, context.target)]
    if not is_identical:
        notes += [*_input_notes(context), *_value_notes(context)]
    return Diagnosis(
        key=context.reference.key.text,
        target_key=context.target.key.text,
        status="identical" if is_identical else "explained" if explanations else "unexplained",
        before=relative_error(context.t, context.r) if context.is_same_shape else None,
        rounding=context.rounding,
        precision=context.precision,
        inherited=scorer.inherited,
        explanations=explanations,
        tried=dict(sorted(scorer.tried.items(), key=lambda item: item[1])),
        notes=tuple(notes),
        failed=tuple(scores.failed),
        families=tuple(scores.families),
    )


def _read_context(
    reference: Archive,
    target: Archive,
    key: str,
    target_key: str | None,
    compute_dtype: str | None,
    limit: int,
) -> PairContext:
    reference_record = reference.get(key)
    wanted = target_key or reference_record.key.text
    if target_key is None and wanted not in target:
        raise no_such_tensor(str(target.path), wanted, [record.key.text for record in target.records])
    target_record = target.get(wanted)
    sides = (reference, reference_record), (target, target_record)
    for archive, record in sides:
        if not record.stored:
            raise UsageError(f"{archive.path}: {record.key.text}: only its statistics were kept")
    return read_pair(*sides, limit=limit, compute_dtype=compute_dtype)


@dataclass(frozen=True, slots=True)
class _Scores:
    """What the hypotheses of all families came to.

    Attributes:
        explanations: One for each hypothesis.
        failed: Families that could not be tried to their end, a sentence each.
        families: Names of those of which a hypothesis holds.
    """

    explanations: Sequence[Explanation] = ()
    failed: Sequence[str] = ()
    families: Sequence[str] = ()


def _score_families(
    context: PairContext, scorer: Scorer, without: Set[str], further: Family | None
) -> _Scores:
    """Score the hypotheses of all families, in their order; a family that fails loses its own alone."""
    explanations: list[Explanation] = []
    failed: list[str] = []
    families: list[str] = []
    is_final = False
    for family in FAMILIES if further is None else (further, *FAMILIES):
        is_explained = scorer.is_explained or any(_is_exchanged(one, context) for one in explanations)
        if family.name in without or (family.is_last_resort and is_explained):
            continue
        if is_final and not family.makes_nonfinite:
            continue
        known = len(explanations)
        try:
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                for hypothesis in family.propose(context):
                    explanations.append(scorer.score(context.by_role(hypothesis)))
        except TensorcapError:
            raise
        except Exception as error:  # a fault of ours, which no suspect may be lost by
            failed.append(f"Hypotheses about {family.name} could not be tried: {fault_text(error)}.")
        if any(explanation.is_within for explanation in explanations[known:]):
            families.append(family.name)
        if family.is_final and any(explanation.is_within for explanation in explanations):
            if np.isfinite(context.target_values).all():
                break
            is_final = True
    return _Scores(explanations, failed, families)


def _without_fits_of_others(
    explanations: Sequence[Explanation], context: PairContext
) -> Sequence[Explanation]:
    """Drop numbers that were fitted to make another record of one, where an argument is that other."""
    exchanged = [one for one in explanations if _is_exchanged(one, context)]
    least = min((one.after for one in exchanged), default=None)
    if least is None or context.reference.dtype.kind != "float" or context.is_mask:
        return explanations
    return [
        one
        for one in explanations
        if one in exchanged or one.parameters <= _FEW or not one.is_within or one.after < least * _FEWER
    ]


def _as_argument(explanation: Explanation, context: PairContext) -> Explanation:
    """Say of an argument that holds another record that this is handed on in its place, and to whom."""
    if not _is_exchanged(explanation, context):
        return explanation
    site = unescape(module_of(context.reference.key.site))
    text = explanation.text.replace("the target holds the value", f"the target gives {site} the value", 1)
    hint, other = explanation.hint, str(explanation.facts["key"])
    if other in context.reference_archive and (taker := _given_this(other, context)):
        hint = (
            f"{site} and {taker} are exchanged: each is given what the other one is given in the reference."
        )
    return replace(explanation, kind="operand-exchanged", text=text, hint=hint)


def _given_this(other: str, context: PairContext) -> str:
    """The module that is given another record in the reference, and in the target what should stand here."""
    archive, target, r = context.reference_archive, context.target_archive, context.r
    given = values_of(archive, archive.get(other)).reshape(r.shape)
    size = float(np.linalg.norm(given))
    for record in archive.records:
        key, l2 = record.key, record.statistics.l2 if record.statistics is not None else None
        is_argument = key.slot.startswith("input.") and key.where != context.reference.key.where
        if not is_argument or record.size != r.size or key.text not in target or l2 is None:
            continue
        is_read = record.stored and record.dtype.kind == "float" and target.get(key.text).stored
        if not is_read or abs(l2 - size) > context.tolerance() * size:
            continue
        sides = (values_of(archive, record), given), (values_of(target, target.get(key.text)), r)
        if all(x.size == r.size for x, _ in sides) and all(
            relative_error(x.reshape(r.shape), wanted) <= context.tolerance() for x, wanted in sides
        ):
            return unescape(module_of(key.site))
    return ""


def _is_exchanged(explanation: Explanation, context: PairContext) -> bool:
    """Whether it says of an argument that it is another record."""
    is_argument = context.reference.key.slot.startswith("input.")
    return is_argument and explanation.kind == "holds" and explanation.is_within


def _dtype_notes(reference: Record, target: Record) -> Iterator[str]:
    if reference.dtype.name != target.dtype.name:
        yield (
            f"The dtypes differ: {reference.dtype.name} in the reference, {target.dtype.name} in the target."
        )


def _input_notes(context: PairContext) -> Iterator[str]:
    """State the error that the inputs of the module arrive with."""
    errors = context.input_errors
    if not errors:
        yield "What the module was given is not known: an error may come from there."
        return
    slot, error = max(errors, key=lambda item: item[1])
    if error == 0:
        yield "What the module was given is the same on both sides."
    else:
        yield (
            f"{slot} arrives with a relative error of {error:.2g}: "
            "no hypothesis can leave less than it makes."
        )


def _value_notes(context: PairContext) -> Iterator[str]:
    """State which part was read, values that are not finite, other shapes, tokens that are right."""
    if context.window is not None:
        axis, start, stop = context.window
        yield f"Looked at indices {start} to {stop - 1} of axis {axis} alone, the first part that differs."
    for name, values in (("reference", context.reference_values), ("target", context.target_values)):
        count = int(values.size - np.isfinite(values).sum())
        if count:
            yield (
                f"{counted(count, 'value')} of the {name} {conjugated(count, 'are')} not finite and "
                f"{conjugated(count, 'were')} left out."
            )
    r, t = context.r, context.t
    if not context.is_same_shape:
        yield f"The shapes differ: {r.shape} in the reference, {t.shape} in the target."
        return
    yield from _first_token_notes(context)
    size = math.sqrt(float(np.vdot(r, r)) * float(np.vdot(t, t)))
    if size and abs(float(np.vdot(r, t))) < _UNRELATED_COSINE * size:
        cosine = float(np.vdot(r, t)) / size
        yield f"The cosine is {cosine:.3f}: the target is hardly related to the reference."


def _first_token_notes(context: PairContext) -> Iterator[str]:
    """State if the first token alone is right: it sees nothing but itself."""
    axis = context.find_axis("token")
    if axis is None or context.r.shape[axis] < 3:
        return
    first = (slice(None),) * axis + (slice(0, 1),)
    error = relative_error(context.t, context.r)
    if relative_error(context.t[first], context.r[first]) < _RIGHT_FIRST_TOKEN * error:
        yield (
            "The first token is right, or nearly: look at what tokens see of each other (attention, "
            "masks) and at positions."
        )
