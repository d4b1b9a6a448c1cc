"""Mutations of one call of a reference's module, made again on a target's values (as in mutation testing)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

from tensorcap_formats.dtypes import Array

MASK_EXTENTS: Final = ("one further", "one fewer", "longer window", "shorter window")


@dataclass(frozen=True, slots=True)
class Filled:
    """A tensor of one number."""

    value: float


@dataclass(frozen=True, slots=True)
class Ordered:
    """A tensor with the slices of an axis in another order: slice n is that of `order[n]`."""

    axis: int
    order: Array


@dataclass(frozen=True, slots=True)
class Transposed:
    """A tensor with two axes exchanged."""

    axes: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Added:
    """A tensor of whole numbers with another number added."""

    value: int


@dataclass(frozen=True, slots=True)
class Scaled:
    """A tensor times a number."""

    factor: float


@dataclass(frozen=True, slots=True)
class Absent:
    """No tensor at all."""


@dataclass(frozen=True, slots=True)
class Shifted:
    """A tensor moved along an axis, behind or ahead; zeros come in."""

    axis: int
    by: int


@dataclass(frozen=True, slots=True)
class Rounded:
    """A tensor rounded to a narrower dtype, in its own."""

    dtype: str


@dataclass(frozen=True, slots=True)
class Quantised:
    """A matrix in whole numbers of some bits times scales, the largest number of a slice being its scale's.

    Attributes:
        bits: Of each number, with its sign.
        axis: The axis that has a scale for each slice; None for one scale of all.
        by: How far scales are moved along it when numbers are given back.
        group: Columns of a row that share a scale; 0 for scales along `axis`.
        is_transposed: Whether scales of groups are given back as if rows and groups were exchanged.
    """

    bits: int
    axis: int | None
    by: int = 0
    group: int = 0
    is_transposed: bool = False


@dataclass(frozen=True, slots=True)
class Masked:
    """A mask of attention of another extent, one of `MASK_EXTENTS`."""

    extent: str


@dataclass(frozen=True, slots=True)
class Replaced:
    """A tensor of other values, in its dtype, and in its shape if they are as many.

    For an argument that is none at all it is given as it is.
    """

    values: Array


@dataclass(frozen=True, slots=True)
class Cleared:
    """A tensor with zeros in a part of an axis, from `start` up to but not including `stop`."""

    axis: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class OfModel:
    """A tensor of another module of the model, by its name in the model."""

    name: str


Edit = (
    Filled
    | Cleared
    | OfModel
    | Ordered
    | Transposed
    | Added
    | Scaled
    | Absent
    | Shifted
    | Rounded
    | Quantised
    | Masked
    | Replaced
)


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation that a module's code does itself.

    Attributes:
        name: As the framework calls it.
        place: File and line where it is written.
        line: That line as it is written; "" if it is not known.
        alternatives: What it can do instead: `first` and `second` (it returns that operand), `twice` (a sum),
            `opposite` (of sums and differences), `sum` (for a product), `0 and 1` (parts that are split or
            joined are exchanged), one of `MASK_EXTENTS` (of attention), the name of another function, or one
            option of the operation in words (`over axes 1, 2`, `padding at the end`).
        has_number: Whether an operand is a number.
        own_axes: The axes that a reduction is over, in the words of an alternative; "" of any other one.
        numbers: Numbers that it is given, by their place from 0 or by their name.
        operands: Names of other values that fit in the place of an operand, by its place from 0: of an
            argument of the module, of a call within it, or the key of another operation.
        given: Names of the values that its operands are, by their place, as far as they have one.
        behind: Operations behind which it can be done, by their keys, each with the operand that their result
            is put in the place of.
        child: The module within whose code it is, by its name there; "" for the module's own code.
        ahead: Values before it that it can be done on, by their names as in `operands`, each with the operand
            in whose place they are.
        is_whole: Whether it makes whole numbers, as places are.
    """

    name: str
    place: str
    line: str
    alternatives: tuple[str, ...]
    has_number: bool
    own_axes: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    operands: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    given: Mapping[int, str] = field(default_factory=dict)
    behind: tuple[tuple[int, str], ...] = ()
    child: str = ""
    ahead: tuple[tuple[int, str], ...] = ()
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class Argument:
    """A tensor that a module is given.

    Attributes:
        kind: `float`; `int` if whole numbers may change; `other`.
        shape: Its shape.
        lowest: The smallest of its whole numbers; None for other kinds and without elements.
        highest: The largest of them.
    """

    kind: Literal["float", "int", "other"]
    shape: tuple[int, ...]
    lowest: int | None = None
    highest: int | None = None


@dataclass(frozen=True)
class CallMutation:
    """What is different when a call is made again; nothing by default.

    Attributes:
        tensors: Edits of parameters and buffers, by name.
        settings: Other values of attributes, and of entries of the configuration (`config.NAME`), by name.
        arguments: Edits of tensors that the module is given, or the name of the one in whose place it is
            given that, by name.
        results: Edits of what calls within it return, or the name of the call whose result replaces it, by
            the name of the call.
        operations: One of the alternatives of an operation, by its key in `Rerun.operations`.
        numbers: Other numbers that operations are given, by the key of the operation and the number's name.
        operands: Names of other values that operations are given, by the key and the place of the operand.
        moved: Operations that are not done in their place, by their keys: the operand whose value is their
            result, and the operation behind which they are done, on its result in the place of that operand.
        moved_ahead: Likewise operations that are done on an earlier value, by its name as in `operands`, with
            what else they were given in the call that listed them.
        steps: A dtype that the result of every operation of its code is rounded to; "" for none.
        is_in_turn: Whether sums are then taken one after the other, rounded each time.
        makes_calls_within: Whether calls within it are made, and do not return what they returned.
    """

    tensors: Mapping[str, Edit] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Edit | str] = field(default_factory=dict)
    results: Mapping[str, Edit | str] = field(default_factory=dict)
    operations: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[tuple[str, str], float] = field(default_factory=dict)
    operands: Mapping[tuple[str, int], str] = field(default_factory=dict)
    moved: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    moved_ahead: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    steps: str = ""
    is_in_turn: bool = False
    makes_calls_within: bool = False


class Rerun(Protocol):
    """One call of a module on the target's arguments; calls within it return what the target's returned."""

    @property
    def site(self) -> str:
        """The module's site."""

    @property
    def class_name(self) -> str:
        """The module's class."""

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of floating parameters and buffers that the module's own code reads, by name."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Numbers, switches and lists of words that its code reads, by name.

        Of modules within of which the target has no result as `MODULE.SETTING`.
        """

    @property
    def arguments(self) -> Mapping[str, Argument]:
        """Tensors that it is given, by name."""

    @property
    def results(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of what calls within it return, of one tensor each, by the module's name, in their order."""

    @property
    def operations(self) -> Mapping[str, Operation]:
        """Operations of its own code in the last call that was made, by key, in their order."""

    @property
    def operation_count(self) -> int:
        """How many operations that call did; one in a loop counts each time."""

    @property
    def alike(self) -> Sequence[Mapping[str, str]]:
        """Modules elsewhere in the model of the same class as it, or as one within it, the nearest first.

        Of each the names of its tensors in the model, by names in `tensors`: those that they can stand for.
        """

    def settings_of(self, site: str) -> Mapping[str, Any]:
        """Settings of another module of its class, by name; none if there is no such module."""

    def read_tensor(self, name: str) -> Array:
        """Values of one of `tensors`, float64."""

    def run(self, mutation: CallMutation) -> Array | None:
        """Make the call; the tensor in question as float64, or None if the call fails."""
