"""Collect what is known of a pair: values, precision, inputs and parameters of its module, configuration."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from tensorcap.adapters import Rerun
from tensorcap.comparison import POLICY, Padding
from tensorcap.diagnosis.hypothesis import Hypothesis
from tensorcap.diagnosis.repeated_call import RepeatedCall, repeat_call
from tensorcap.diagnosis.search import Search
from tensorcap.diagnosis.values import Values, relative_error
from tensorcap.runs import Contents, contents_of, enclosing_sites, is_telling
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import decode
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import Key, module_of
from tensorcap_formats.records import Record

Side = tuple[Archive, Record]  # one of a pair

LARGEST: Final = 1 << 22  # elements of a tensor that is read beside the pair
_LARGEST_ROW: Final = 1 << 26  # elements of one index of the first axis: float64 of both sides is 1 GiB
_CHOOSING: Final = (  # kinds that say nothing of what a router is there for
    *("pooling-differs", "slice-order", "slice-shift", "layout-differs", "operand-exchanged"),
    *("operation-missing", "operation-differs", "operations-order", "groups-differ"),
)
_OF_EXTENTS: Final = ("slice-extent", "slice-order", "slice-shift", "axes-differ")
_OF_OTHER_TENSORS: Final = ("operand-exchanged", "results-order", "calls-order")
_ACTIVATION_WORDS: Final = ("activation", "elu", "silu", "sigmoid", "tanh", "mish", "swish", "softplus")
_GIVEN: Final = 4  # results before an argument that it is looked for among
_NEIGHBOURS: Final = 48  # records before and behind that are looked at
_NO_RESULTS: Final = ("param.", "buffer.", "grad")
_WIDTHS: Final = ("hidden_size", "d_model", "n_embd", "dim")
_HEADS: Final = ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads")
_KV_HEADS: Final = ("num_key_value_heads",)
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN_EXPERTS: Final = ("num_experts_per_tok", "num_selected_experts", "top_k", "moe_top_k")
_NARROW: Final = ("bfloat16", "float16")
_PARAMETERS: Final = ("param.", "buffer.", "grad.param.")
GAINS: Final = ("weight", "scale", "gamma")  # names of what each channel is multiplied by
BIASES: Final = ("bias", "beta")  # and of what is added to it
_WEIGHTS: Final = ("weight", "bias", "kernel", "scales", "zeros", "gamma", "beta")  # in files without slots


@dataclass(frozen=True)
class PairContext:
    """One pair, and what stands beside it in both archives.

    Attributes:
        reference_archive: The trusted archive.
        target_archive: The archive under test.
        reference: The trusted record.
        target: The record under test.
        r: Values of the reference, float64; those that are not finite on either side are 0 on both.
        t: Values of the target, likewise.
        reference_values: Values of the reference as they are, NaN and infinities among them, but 0 where they
            are ignored.
        target_values: Values of the target, likewise.
        precision: Name of the coarser precision of the pair; "" for integers.
        rounding: Relative error of one rounding in it, no unit; 0 for integers.
        ignored: Elements that are not finite on one side or both, of tokens that the masks of both runs leave
            out; None if there are none.
        window: The part of the tensors that was read: axis, start and stop; None for all of them.
        rerun: The call of the reference's module that made the record, if the model is at hand.
        outer: The pair in whose module this one is an input; None if it is the pair to be explained itself.
        search: The search for what explains the suspect, which may have several tensors.
    """

    reference_archive: Archive
    target_archive: Archive
    reference: Record
    target: Record
    r: Values
    t: Values
    reference_values: Values
    target_values: Values
    precision: str
    rounding: float
    ignored: Values | None = None
    window: tuple[int, int, int] | None = None
    rerun: Rerun | None = None
    outer: PairContext | None = None
    search: Search = field(default_factory=Search)

    @property
    def is_same_shape(self) -> bool:
        """Whether each element of one side has its counterpart on the other."""
        return self.r.shape == self.t.shape

    @property
    def baseline(self) -> Values | None:
        """What the target would be without a mistake; None if the shapes differ."""
        return self.r if self.is_same_shape else None

    def is_erring(self, axis: int) -> Values:
        """Whether each slice along an axis differs by more than some roundings."""
        others = tuple(other for other in range(self.t.ndim) if other != axis)
        errors, sizes = (np.square(side).sum(axis=others) for side in (self.t - self.r, self.r))
        return np.asarray(errors > self.tolerance() ** 2 * sizes)

    @property
    def sides(self) -> tuple[Side, Side]:
        """Archive and record of the reference, and of the target."""
        return (self.reference_archive, self.reference), (self.target_archive, self.target)

    @property
    def is_narrow(self) -> bool:
        """Whether the target is in bfloat16 or float16."""
        return self.target.dtype.name in _NARROW

    def tolerance(self, roundings: float = 4.0, least: float = 1e-6) -> float:
        """Relative error that a function may leave of the reference that it makes: some roundings.

        Args:
            roundings: How many.
            least: What the order of operations in float32 alone may leave.
        """
        return max(roundings * self.rounding, least)

    def propose(
        self,
        kind: str,
        text: str,
        predicted: Values,
        *,
        baseline: Values | None = None,
        hint: str = "",
        facts: Mapping[str, Any] | None = None,
        parameters: int = 0,
        log_alternatives: float = 0.0,
    ) -> Hypothesis:
        """State what the target's values are if a mistake was made.

        Args:
            kind: As in `Hypothesis`, as are all others.
            text: The mistake.
            predicted: The values, of the target's shape.
            baseline: What they would be without a mistake; by default the reference's.
            hint: The usual mistake that looks so.
            facts: What was fitted or measured.
            parameters: Count of numbers that were fitted.
            log_alternatives: Natural logarithm of how many like it were looked at.
        """
        return Hypothesis(
            kind,
            text,
            self.t,
            predicted,
            self.baseline if baseline is None else baseline,
            parameters=parameters,
            log_alternatives=log_alternatives,
            hint=hint,
            facts=facts or {},
        )

    def restrict(self, index: tuple[slice | Values, ...]) -> PairContext:
        """Keep some of the elements, as a window that no neighbour belongs to."""
        return replace(self, r=self.r[index], t=self.t[index], window=(-1, 0, 0))

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter or a buffer, which has no tokens; in a file without slots by its name."""
        key = self.reference.key
        if key.slot:
            return key.slot.startswith(_PARAMETERS)
        return any(word in key.site.rpartition(".")[2] for word in _WEIGHTS)

    @cached_property
    def is_mask(self) -> bool:
        """Whether it says what is seen: by its name a mask, by its values one of two numbers."""
        values = self.reference_values, self.target_values
        return "mask" in self.reference.key.slot and all(len(np.unique(side)) <= 2 for side in values)

    def by_role(self, hypothesis: Hypothesis) -> Hypothesis:
        """Name a hypothesis by what the tensor is, or the module whose code made it, if that says more.

        Whatever is wrong in a mask is a mistake of the mask; what the code of a router does otherwise, short
        of another activation or precision, chooses other experts; another tensor that an activation is given
        means that the activation is done elsewhere. What a pooling takes otherwise is its pooling; an offset
        of each channel of a leaf that has a weight is its bias.
        """
        kind, hint = hypothesis.kind, hypothesis.hint
        if self.is_mask and not kind.startswith(("only-", "holds", "inherited", "nan")):
            kind, hint = (
                "attention-mask",
                "The mask is another one: what is seen, what is padded, its length.",
            )
        elif self.rerun is not None and kind in _CHOOSING and "router" in self.rerun.class_name.lower():
            kind, hint = "router-differs", "Experts, or groups of them, are chosen otherwise."
        elif kind in _OF_EXTENTS and self.rerun is not None and "pool" in self.rerun.class_name.lower():
            kind, hint = "pooling-differs", f"What is pooled is another part. {hint}".strip()
        elif kind == "channel-offset" and "weight" in self._leaf_tensors:
            is_other = "bias" in self._leaf_tensors
            kind = "bias-differs" if is_other else "bias-added"
            hint = "The bias is another one." if is_other else "The target adds a bias, which this has not."
            hypothesis = replace(hypothesis, text=f"{hypothesis.text}, as by a bias")
        elif kind in _OF_OTHER_TENSORS and self._is_given_to_activation():
            kind, hint = "activation-elsewhere", "The activation is done on another branch, or too late."
        return hypothesis if kind == hypothesis.kind else replace(hypothesis, kind=kind, hint=hint)

    @property
    def _leaf_tensors(self) -> frozenset[str]:
        """Names of the tensors of the module that is called again, if it calls no other one."""
        if self.rerun is None or self.rerun.results or not self.reference.key.slot.startswith("output"):
            return frozenset()
        return frozenset(self.rerun.tensors)

    def _is_given_to_activation(self) -> bool:
        key = self.reference.key
        module = self.reference_archive.info.modules.get(module_of(key.site))
        name = "" if module is None else module.short_class.lower()
        return key.slot.startswith("input") and any(word in name for word in _ACTIVATION_WORDS)

    @cached_property
    def inherited(self) -> float:
        """The largest relative error that an input of the module arrives with, no unit; 0 if unknown."""
        if self.outer is not None:
            return self.outer.inherited
        return max((error for _, error in self.input_errors), default=0.0)

    @property
    def input_errors(self) -> list[tuple[str, float]]:
        """Relative error of each input of the module, by slot; empty if they are not known."""
        if self.reference.key.slot.startswith("input."):
            return []
        return [(slot, relative_error(y, x)) for slot, x, y in self.inputs if x.ndim]

    @cached_property
    def repeated_call(self) -> RepeatedCall | None:
        """The call that made the reference; None if it cannot be made again."""
        if self.rerun is None or self.window is not None:
            return None
        return repeat_call(
            self.rerun,
            self.reference_values,
            self.target_values,
            target_dtype=self.target.dtype.name,
            search=self.search,
            ignored=self.uncounted,
            is_of_choices=self.reference.dtype.kind == "float"
            and self.r.ndim > 0
            and 1 < self.chosen_experts == self.r.shape[-1],
        )

    @cached_property
    def uncounted(self) -> Values | None:
        """Elements of tokens that the masks of both runs leave out, if others err too; else those ignored.

        What an implementation makes of a token that sees nothing is its own affair (POL-31).
        """
        if not self.is_same_shape or self.window is not None or self.t.ndim < 2:
            return self.ignored
        left_out = Padding(self.reference_archive, self.target_archive).left_out(self.reference)
        if left_out is None:
            return self.ignored
        t, r = (np.where(left_out, 0.0, side) for side in (self.t, self.r))
        if relative_error(t, r) <= self.tolerance():
            return self.ignored
        return left_out if self.ignored is None else left_out | self.ignored

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """Entries of the reference's configuration by the last part of their names; the outermost wins."""
        return dict(reversed(list(_flatten(self.reference_archive.info.config))))

    def config_number(self, *names: str) -> float | None:
        """Look up the first of some entries of the configuration that is a number."""
        for name in names:
            value = self.config.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
        return None

    @property
    def heads(self) -> int | None:
        """Count of attention heads."""
        count = self.config_number(*_HEADS)
        return int(count) if count else None

    @property
    def head_dim(self) -> int | None:
        """Channels of one head."""
        head_dim, width = self.config_number("head_dim"), self.config_number(*_WIDTHS)
        if head_dim:
            return int(head_dim)
        return int(width // self.heads) if width and self.heads else None

    @property
    def kv_heads(self) -> int | None:
        """Count of heads of keys and values."""
        count = self.config_number(*_KV_HEADS)
        return int(count) if count else self.heads

    @property
    def experts(self) -> int:
        """Count of experts; 0 if there are none."""
        return int(self.config_number(*_EXPERTS) or 0)

    @property
    def chosen_experts(self) -> int:
        """Count of experts that each token chooses; 0 if there are none."""
        return int(self.config_number(*_CHOSEN_EXPERTS) or 0)

    def axis_name(self, axis: int) -> str:
        """Guess what an axis is: `channel`, `token`, `head`, `batch`, `row`, `column`, or `axis n`.

        0. Of a parameter with several axes the first one has rows and the last one columns.
        1. The last one has channels, unless it is one of token ids (integers of up to two axes that are not
           experts chosen).
        2. Of four axes, one of the middle two is heads if its size says so, and the other one tokens.
        3. The one before channels has tokens; the first of all others has sequences.
        """
        shape = self.r.shape
        ndim = len(shape)
        axis %= ndim
        if self.is_parameter and ndim > 1:
            return "row" if axis == 0 else "column" if axis == ndim - 1 else f"axis {axis}"
        if axis == ndim - 1:
            is_chosen = shape[-1] == self.config_number(*_CHOSEN_EXPERTS)
            is_ids = ndim <= 2 and self.reference.dtype.kind in ("int", "uint", "bool") and not is_chosen
            return "token" if is_ids else "channel"
        if ndim == 4 and axis in (1, 2):
            heads = [middle for middle in (1, 2) if shape[middle] in (self.heads, self.kv_heads)]
            if len(heads) == 1:
                return "head" if axis == heads[0] else "token"
            return f"axis {axis}"
        if axis == ndim - 2 and self.axis_name(-1) == "channel":
            return "token"
        return "batch" if axis == 0 else f"axis {axis}"

    def find_axis(self, name: str, *, start: int = 0) -> int | None:
        """Find the first axis of a name, from an axis on."""
        return next((axis for axis in range(start, self.r.ndim) if self.axis_name(axis) == name), None)

    def find_partner(self, record: Record) -> Record | None:
        """Find the target's record of a reference's: of its key, else of one that holds the same before it.

        A port calls a function where the reference has a module: what that is given is then nowhere in the
        target but as the result that it is. A reference that was run on the target's values has such a result
        as it made it itself, and hands the target's on.
        """
        partner = _find_partner(self.target_archive, record.key, record)
        if partner is not None or not is_telling(record):
            return partner
        alike = (r for r in self._alike.get(contents_of(record), ()) if r.order < record.order)
        partners = (_find_partner(self.target_archive, r.key, r) for r in alike)
        return next((found for found in partners if found is not None), None) or self._find_given(record)

    def _find_given(self, record: Record) -> Record | None:
        """Find the target's result that an argument of a rerun is, if it stands there for the rerun's own."""
        injected = self.reference_archive.info.injected
        if injected is None or not record.key.slot.startswith("input.") or not _is_readable(record):
            return None
        replaced = {(slot.site, slot.slot) for slot in injected.slots if slot.status == "injected"}
        earlier = [
            r
            for r in self.reference_archive.records
            if r.order < record.order
            and r.key.slot.startswith("output")
            and (r.key.site, r.key.slot) in replaced
            and (r.key.step, r.key.rank, r.shape) == (record.key.step, record.key.rank, record.shape)
        ]
        values = values_of(self.reference_archive, record)
        for result in sorted(earlier, key=lambda r: -r.order)[:_GIVEN]:
            partner = _find_partner(self.target_archive, result.key, result)
            if partner is not None and np.array_equal(values_of(self.target_archive, partner), values):
                return partner
        return None

    @cached_property
    def _alike(self) -> Mapping[Contents, Sequence[Record]]:
        """Records of the reference that hold the same, the last ones first."""
        alike: dict[Contents, list[Record]] = defaultdict(list)
        for record in sorted(self.reference_archive.records, key=lambda r: -r.order):
            alike[contents_of(record)].append(record)
        return alike

    @cached_property
    def maker(self) -> Record:
        """The reference's record itself, or the result of a call that it is, where it is handed on."""
        return self.maker_of(self.reference)

    def maker_of(self, record: Record) -> Record:
        """The result of a call that an argument of the reference is; the record itself if it is none."""
        if not record.key.slot.startswith("input") or not is_telling(record):
            return record
        alike = (r for r in self._alike.get(contents_of(record), ()) if r.order < record.order)
        return next((r for r in alike if r.key.slot.startswith("output")), record)

    @cached_property
    def inputs(self) -> list[tuple[str, Values, Values]]:
        """Inputs of the module, finite and whole on both sides: slot, reference, target."""
        if self.window is not None:
            return []
        inputs = []
        for record in self.reference_archive.records:
            slot, maker = record.key.slot, self.maker
            if record.key.where != maker.key.where or record.row == maker.row:
                continue
            partner = None
            if maker is self.reference:
                partner = _find_partner(self.target_archive, replace(self.target.key, slot=slot), record)
            partner = partner or self.find_partner(record)
            if slot.startswith("input.") and partner is not None and _is_readable(record):
                sides = values_of(self.reference_archive, record), values_of(self.target_archive, partner)
                if all(np.isfinite(side).all() for side in sides):
                    inputs.append((slot, *sides))
        return inputs

    def read_parameters(self) -> dict[str, tuple[Values | None, Values | None]]:
        """Read parameters and buffers of the module by name: the reference's and the target's."""
        ours, theirs = (
            {
                r.key.slot.partition(".")[2]: values_of(archive, r)
                for r in archive.records
                if r.key.slot.startswith(("param.", "buffer."))
                and module_of(r.key.site) == module_of(record.key.site)
                and _is_readable(r)
            }
            for archive, record in self.sides
        )
        return {name: (ours.get(name), theirs.get(name)) for name in {**ours, **theirs}}

    def find_neighbours(self) -> Iterator[Record]:
        """Find records of the reference around this one, of the same step: of the parent module and in it."""
        key = self.reference.key
        parent = module_of(key.site).rpartition(".")[0]
        step = [
            r for r in self.reference_archive.records if r.key.step == key.step and r.key.rank == key.rank
        ]
        at = next((i for i, r in enumerate(step) if r.row == self.reference.row), 0)
        for record in step[max(0, at - _NEIGHBOURS) : at + _NEIGHBOURS]:
            site = module_of(record.key.site)
            is_sibling = not parent or f"{site}.".startswith(f"{parent}.")
            is_result = not record.key.slot.startswith(_NO_RESULTS)
            if record.row != self.reference.row and is_sibling and is_result and _is_readable(record):
                yield record

    def read_neighbours(
        self, shape: tuple[int, ...] | None = None
    ) -> Iterator[tuple[str, Values, Values | None]]:
        """Read finite floating neighbours, each value once: key text, reference, target if it has them.

        Args:
            shape: Only tensors of this shape; of any if None.
        """
        yield from self._read_each(self.find_neighbours(), shape)

    def read_with_arguments_around(self, shape: tuple[int, ...]) -> Iterator[tuple[str, Values]]:
        """Read neighbours of a shape, then arguments of modules around, as residuals are: key text, value."""
        step = [r for r in self.reference_archive.records if r.key.step == self.reference.key.step]
        around = [
            record
            for site in enclosing_sites(module_of(self.reference.key.site))
            for record in step
            if record.key.site == site and record.key.slot.startswith("input.") and _is_readable(record)
        ]
        records = (*self.find_neighbours(), *(r for r in around if r.key.rank == self.reference.key.rank))
        yield from ((label, ours) for label, ours, _ in self._read_each(records, shape))

    def _read_each(
        self, records: Iterable[Record], shape: tuple[int, ...] | None
    ) -> Iterator[tuple[str, Values, Values | None]]:
        digests = {self.reference.digest} if self.reference.digest else set()
        for record in records:
            if record.dtype.kind != "float" or record.digest in digests:
                continue
            if shape is not None and record.shape != shape:
                continue
            if record.digest:
                digests.add(record.digest)
            reference = values_of(self.reference_archive, record)
            partner = self.find_partner(record)
            target = None if partner is None else values_of(self.target_archive, partner)
            if np.isfinite(reference).all():
                is_finite = target is not None and bool(np.isfinite(target).all())
                yield record.key.text, reference, target if is_finite else None


def read_pair(reference: Side, target: Side, *, limit: int, compute_dtype: str | None = None) -> PairContext:
    """Read a pair, or the first part of it that differs.

    Args:
        reference: The trusted archive and its record.
        target: The archive under test and its record.
        limit: Elements that are read at most.
        compute_dtype: Precision in which the target computed, if its archive does not say.

    Raises:
        UsageError: The values are complex, of two shapes and too large, or one row of them is too large.
        ReadError: An archive cannot be read.
    """
    for archive, record in (reference, target):
        if record.dtype.kind == "complex":
            raise UsageError(
                f"{archive.path}: {record.key.text}: is {record.dtype.name}, expected real values"
            )
    window: tuple[int, int, int] | None = None
    (reference_archive, ours), (target_archive, theirs) = reference, target
    if max(ours.size, theirs.size) <= limit:
        values = values_of(*reference), values_of(*target)
    elif ours.shape != theirs.shape:
        raise UsageError(
            f"{ours.key.text}: {ours.shape} against {theirs.shape} are too large to hold against each other, "
            f"expected at most {limit} elements"
        )
    else:
        window, values = _read_first_window(reference, target, limit)
    ignored = None if window is not None else _find_ignored(reference, target, values)
    if ignored is not None:
        values = np.where(ignored, 0.0, values[0]), np.where(ignored, 0.0, values[1])
    is_finite = tuple(map(np.isfinite, values))
    if ours.shape == theirs.shape:
        is_finite = (is_finite[0] & is_finite[1],) * 2
    r, t = (np.where(is_kept, side, 0.0) for is_kept, side in zip(is_finite, values, strict=True))
    precision, rounding = _precision(reference, target, compute_dtype)
    return PairContext(
        reference_archive, target_archive, ours, theirs, r, t, *values, precision, rounding, ignored, window
    )


def read_last_inputs(context: PairContext) -> Iterator[PairContext]:
    """Read the inputs of the last two modules within this one that differ, as the last may be a dropout."""
    key = context.reference.key
    if not key.slot.startswith("output") or context.window is not None:
        return
    site = module_of(key.site)
    inputs = [
        r
        for r in context.reference_archive.records
        if module_of(r.key.site).rpartition(".")[0] == site
        and (r.key.step, r.key.rank) == (key.step, key.rank)
        and r.key.slot.startswith("input.")
        and r.dtype.kind == "float"
        and r.stored
        and r.size <= LARGEST
    ]
    for record in sorted(inputs, key=lambda r: -r.order)[:2]:
        partner = context.find_partner(record)
        if partner is not None:
            sides = (context.reference_archive, record), (context.target_archive, partner)
            inner = read_pair(*sides, limit=LARGEST)
            if not np.array_equal(inner.reference_values, inner.target_values):
                yield replace(inner, precision=context.precision, rounding=context.rounding, outer=context)


def find_vector(
    parameters: dict[str, tuple[Values | None, Values | None]], names: tuple[str, ...], width: int
) -> tuple[Values | None, Values | None]:
    """Find a parameter with one number for each channel by its name: the reference's and the target's."""
    for name, (ours, theirs) in parameters.items():
        if name.rpartition(".")[2] in names and ours is not None and ours.shape == (width,):
            return ours, theirs if theirs is not None and theirs.shape == (width,) else None
    return None, None


def values_of(archive: Archive, record: Record) -> Values:
    """Load a tensor's values in float64, in its shape."""
    return archive.load(record).astype(np.float64)


def _find_ignored(reference: Side, target: Side, values: tuple[Values, Values]) -> Values | None:
    """Find elements that are not finite, of tokens that the masks of both runs leave out (POL-31)."""
    is_finite = np.isfinite(values[0]).all() and np.isfinite(values[1]).all()
    if is_finite or values[0].shape != values[1].shape:
        return None
    left_out = Padding(reference[0], target[0]).left_out(reference[1])
    if left_out is None:
        return None
    ignored = left_out & ~(np.isfinite(values[0]) & np.isfinite(values[1]))
    return ignored if ignored.any() else None


def _precision(reference: Side, target: Side, compute_dtype: str | None) -> tuple[str, float]:
    """The coarser precision of a pair, and the relative error of one rounding in it."""
    (reference_archive, ours), (target_archive, theirs) = reference, target
    if not (ours.dtype.is_inexact or theirs.dtype.is_inexact):
        return "", 0.0
    runs = POLICY.precision_of_runs(reference_archive.info, target_archive.info, compute_dtype)
    precision = POLICY.precision_of_pair(runs, ours, theirs)
    return precision.name, precision.rounding


def _read_first_window(
    reference: Side, target: Side, limit: int
) -> tuple[tuple[int, int, int], tuple[Values, Values]]:
    """Read the first rows that differ, as many as allowed: whole along all axes but one."""
    shape = reference[1].shape
    axis = next(i for i, size in enumerate(shape) if size > 1)
    row_size = math.prod(shape[axis + 1 :])
    if row_size > _LARGEST_ROW:
        raise UsageError(
            f"{reference[1].key.text}: each index of axis {axis} has {row_size} elements, "
            f"expected at most {_LARGEST_ROW}",
            hint="Diagnose a module before it whose result is smaller.",
        )
    count = max(1, limit // row_size)
    for start in range(0, shape[axis], count):
        stop = min(shape[axis], start + count)
        r, t = (
            decode(archive.read_range(record, start * row_size, stop * row_size), record.dtype).astype(
                np.float64
            )
            for archive, record in (reference, target)
        )
        if stop == shape[axis] or not np.array_equal(r, t, equal_nan=True):
            part = (*shape[:axis], stop - start, *shape[axis + 1 :])
            return (axis, start, stop), (r.reshape(part), t.reshape(part))
    raise AssertionError("a window is returned in the loop")


def _find_partner(archive: Archive, key: Key, record: Record) -> Record | None:
    """Find the target's record of a key, of the shape of the reference's; None if it cannot be read."""
    partner = archive.get(key) if key.text in archive else None
    is_readable = partner is not None and partner.shape == record.shape and _is_readable(partner)
    return partner if is_readable else None


def _is_readable(record: Record) -> bool:
    return record.stored and record.size <= LARGEST and record.dtype.kind != "complex"


def _flatten(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Entries of a configuration, those of nested ones behind."""
    nested = []
    for name, value in config.items():
        if isinstance(value, Mapping):
            nested.append(value)
        else:
            yield str(name), value
    for value in nested:
        yield from _flatten(value)
