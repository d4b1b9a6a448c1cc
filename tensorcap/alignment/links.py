"""Links: records of the target, and the layout that makes them comparable with records of the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

from tensorcap.alignment.layout import Dims, Layout, Shape, steps_between, token_dims
from tensorcap.alignment.mapping import Entry
from tensorcap.alignment.tokens import LAST, VALID, Gather, Gathering, How, TokenAlignment, TokenRule
from tensorcap.wording import counted
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array, DType
from tensorcap_formats.errors import UsageError
from tensorcap_formats.records import Record

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Link:
    """Records of the target, and the records of the reference that a layout makes them comparable with.

    Attributes:
        reference: In the order in which the layout gives tensors.
        target: In the order in which the layout takes them; those of several steps one after the other.
        layout: The steps.
        entry: What it comes from.
        gathers: For each record of the reference, what it and the target's tensors have of the same tokens;
            empty if positions are the same.
        remark: What to know before trusting the pair.
    """

    reference: tuple[Record, ...]
    target: tuple[Record, ...]
    layout: Layout
    entry: Entry
    gathers: tuple[Gather, ...] = ()
    remark: str = ""

    @property
    def is_renaming(self) -> bool:
        """Whether the target's tensors are the reference's as they are."""
        return not self.layout.steps and not self.gathers

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Shapes of the tensors that come out."""
        if not self.gathers:
            return self.layout.shapes([record.shape for record in self.target])
        return tuple(
            gather.shape(record.shape) for gather, record in zip(self.gathers, self.reference, strict=True)
        )

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """Dtypes of the tensors that come out."""
        dtypes = [record.dtype for record in self.runs(self.target)[0]]
        return (self.layout.dtype(dtypes),) * len(self.reference) if self.layout.steps else tuple(dtypes)

    def make(self, read: Callable[[Record], Array]) -> list[Array]:
        """Make the tensors that come out.

        Args:
            read: Gives a record's stored elements.

        Raises:
            UsageError: The values are not as a step says.
        """
        outputs = [
            self.layout.apply([read(record) for record in run], [record.dtype for record in run])[0]
            for run in self.runs(self.target)
        ]
        if not self.gathers:
            return outputs[0]
        return [
            gather.of_target([each[part] for each in outputs], self.reference[part].shape)
            for part, gather in enumerate(self.gathers)
        ]

    def runs(self, items: Sequence[Item]) -> list[Sequence[Item]]:
        """Split what there is one of for each record of the target by the target's steps."""
        count = len(items) // len(self.gathers[0].steps if self.gathers else (0,))
        return [items[start : start + count] for start in range(0, len(items), count)]


def place_of(record: Record) -> str:
    """A record's place in a mapping: its key without step and call."""
    key = record.key
    rank = f"rank{key.rank}/" if key.rank else ""
    return key.site if key.is_bare else f"{rank}{key.site}/{key.slot}"


class Gatherings:
    """Matches tokens if an entry asks for it, each kind once."""

    def __init__(self, rule: TokenRule | None, reference: Archive, target: Archive) -> None:
        self._rule = rule
        self._archives = reference, target
        self._by_step: dict[How, Gathering] = {}

    @property
    def alignments(self) -> tuple[TokenAlignment, ...]:
        """Which tokens are compared with which, for each kind that an entry asked for so far."""
        return tuple(gathering.tokens for gathering in self._by_step.values())

    def for_entry(self, entry: Entry) -> Gathering | None:
        """What an entry asks for, else the whole map; None if positions are the same on both sides."""
        named = [step for step in entry.token_steps if step != LAST]
        if len(named) > 1:
            raise entry.refuse(f"has {' and '.join(named)}, expected one of them")
        rule = self._rule
        if named or (entry.token_steps and rule is None):
            step = cast("How", named[0] if named else VALID)
            rule = TokenRule(step) if rule is None else replace(rule, step=step)
        if rule is None:
            return None
        if rule.step not in self._by_step:
            tokens = TokenAlignment.of(*self._archives, rule)
            dims = Dims.parse(rule.dims) if rule.dims else None
            self._by_step[rule.step] = Gathering(tokens, dims)
        return self._by_step[rule.step]


class LinkMaker:
    """Makes the links of an entry."""

    def __init__(self, entry: Entry, gathering: Gathering | None) -> None:
        self._entry = entry
        self._gathering = gathering
        self._axes = entry.axes()
        self._layout = entry.layout()

    def steps(self, step: int) -> tuple[int, ...]:
        """The target's steps that a step of the reference is compared with."""
        if self._gathering is None or step not in self._gathering.tokens.reference.grids:
            return (step,)
        return self._gathering.steps(step)

    def link(self, reference: tuple[Record, ...], target: Sequence[tuple[Record, ...]]) -> Link | None:
        """A link of records; None if they are of other steps and have no tokens.

        Args:
            reference: Records of a step and call of the reference.
            target: For each step of the target, its records.

        Raises:
            UsageError: The steps do not give the reference's tensors, or tokens cannot be matched.
        """
        entry, step = self._entry, reference[0].key.step
        try:
            layout = self._layout_of(reference, target[0])
            shapes = [layout.shapes([record.shape for record in run]) for run in target]
            if layout.steps:
                for run in target:
                    layout.dtype([record.dtype for record in run])
        except UsageError as error:
            raise entry.refuse(f"{target[0][0].key.text}: {error}", error.hint) from None
        if len(shapes[0]) != len(reference):
            raise entry.refuse(
                f"gives {counted(len(shapes[0]), 'tensor')}, the reference has {len(reference)}",
                "Say by steps how the one side becomes the other: concat, split, sum, …",
            )
        gathers, remark = self._gathers(step, reference, shapes)
        if gathers:
            self._require_one_dtype(target)
            records = tuple(record for run in target for record in run)
            return Link(reference, records, layout, entry, gathers, remark)
        same = next((run for run in target if run[0].key.step == step), None)
        if same is None and (reference[0].key.is_bare or target[0][0].key.is_bare):
            same = target[0]  # a name without a step means any
        return None if same is None else Link(reference, same, layout, entry, (), remark)

    def _require_one_dtype(self, runs: Sequence[tuple[Record, ...]]) -> None:
        """What several steps of the target are put together from has one dtype."""
        for records in zip(*runs, strict=True):
            names = list(dict.fromkeys(record.dtype.name for record in records))
            if len(names) > 1:
                raise self._entry.refuse(
                    f"{records[0].key.text}: is {' and '.join(names)} in the steps that have its tokens"
                )

    def _layout_of(self, reference: tuple[Record, ...], target: tuple[Record, ...]) -> Layout:
        if self._axes is None:
            return self._layout
        if len(reference) > 1:
            raise UsageError(f"dims make one tensor, the reference has {len(reference)}")
        shapes, has_tokens = [record.shape for record in target], self._gathering is not None
        return steps_between(*self._axes, shapes, reference[0].shape, has_tokens=has_tokens)

    def _gathers(
        self, step: int, reference: tuple[Record, ...], shapes: Sequence[Sequence[Shape]]
    ) -> tuple[tuple[Gather, ...], str]:
        """What the tensors have of the same tokens; nothing if all of it lies in the same places."""
        gathering, entry = self._gathering, self._entry
        if gathering is None or step not in gathering.tokens.reference.grids:
            return (), ""
        try:
            dims, is_last = self._token_axes(), LAST in entry.token_steps
            gathers_or_none = [
                gathering.gather(
                    step, record.shape, [each[part] for each in shapes], dims=dims, is_last=is_last
                )
                for part, record in enumerate(reference)
            ]
            gathers = tuple(gather for gather in gathers_or_none if gather is not None)
            if len(gathers) < len(gathers_or_none) and (gathers or entry.token_steps):
                shape = reference[gathers_or_none.index(None)].shape
                grid = list(gathering.tokens.reference.grids[step])
                raise UsageError(f"the reference's {list(shape)} has no axes for the tokens {grid}")
        except UsageError as error:
            if entry.token_steps or entry.dims or entry.reference_dims:
                raise entry.refuse(f"{reference[0].key.text}: {error}", error.hint) from None
            if gathering.is_in_place(step):
                return (), ""
            return (), f"tokens were not matched: {error}"
        return (() if all(gather.is_same(step) for gather in gathers) else gathers), ""

    def _token_axes(self) -> tuple[Dims | None, Dims | None]:
        """Dims that say where the tokens are, of the reference's tensor and of those that steps give."""
        if self._axes is None:
            ours = Dims.parse(self._entry.reference_dims) if self._entry.reference_dims else None
            return ours, ours
        theirs, ours = self._axes
        return ours, token_dims(theirs, ours)
