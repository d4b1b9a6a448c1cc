"""Values between the nodes of a target that are rounded to whole steps, as a quantised graph has them.

What that does to the results of a module is known from its own run: the steps, and the size of the values.
So is what it loses: an operand of a sum that is below half a step of that adds nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tensorcap.alignment import MappedArchive
from tensorcap.runs import is_fact, is_inner, is_parameter
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.errors import ReadError
from tensorcap_formats.keys import Key
from tensorcap_formats.records import Record

_MOST_ROWS: Final = 512  # of a tensor, the first ones, that are read
_WHOLE: Final = ("int", "uint")  # kinds of dtypes
_DYNAMIC: Final = "DynamicQuantizeLinear"  # makes numbers, their step and their zero point
_PRODUCTS: Final = ("MatMulInteger", "ConvInteger")
_SUMS: Final = ("Add", "Sub", "Sum", "QLinearAdd")
_FEW: Final = 0.25  # of the values that have one number: the sum is hardly more than that


@dataclass(frozen=True, slots=True)
class RoundedNode:
    """A node that rounds what it makes to whole steps.

    Attributes:
        module: Site of the module that it lies in, in the reference's names.
        call: Which call of that it is a part of, in its step.
        name: Its name within that.
        step: In the unit of the values.
        zero: The number that stands for 0, if whole numbers were recorded, else 0.
        record: What it makes.
        operands: Of the sum that it rounds, or is, those that are computed, with the largest magnitude of
            each; none if it is no sum.
    """

    module: str
    call: int
    name: str
    step: float
    zero: float
    record: Record
    operands: tuple[tuple[Record, float], ...]


@dataclass(frozen=True, slots=True)
class LostOperand:
    """An operand of a sum that is rounded to steps so large that it adds nothing.

    Attributes:
        module: Site of the module, in the reference's names.
        rank: Of the run.
        run_step: Of the run.
        text: What is lost, as the end of a sentence.
    """

    module: str
    rank: int
    run_step: int
    text: str


def rounded_nodes(target: Archive) -> Iterator[RoundedNode]:
    """Yield the nodes of a target that round what they make, as facts of its ops say (CAP-331).

    Of those that find the step at each call only operands of products without a weight: what such a node does
    to a product with one is known of the layer.
    """
    names = target.names if isinstance(target, MappedArchive) else {}
    facts = {
        text: value
        for text, value in target.values.items()
        if is_fact(text, value) and isinstance(value, Mapping)
    }
    if not any("step" in value or base_of(value) == _DYNAMIC for value in facts.values()):
        return
    makers = {
        output["record"]: value
        for value in facts.values()
        for output in value.get("outputs", ())
        if isinstance(output, Mapping) and isinstance(output.get("record"), str)
    }
    yield from _rounded_operands(target, facts, makers, names)
    for text, value in facts.items():
        step, key = value.get("step"), f"{text.rpartition('/')[0]}/output"
        if not isinstance(step, float) or not step > 0 or key not in target:
            continue
        made: Any = value
        if base_of(value) == "QuantizeLinear":
            made = next((makers[text] for text in inputs_of(value) if text in makers), {})
        operands = tuple(_operands(target, made, makers)) if base_of(made) in _SUMS else ()
        record, (module, _, name) = target.get(key), Key.parse(text).site.partition(":")
        zero = number_of(value, "zero") if record.dtype.kind in _WHOLE else 0.0
        call = int(number_of(value, "module_call"))
        yield RoundedNode(names.get(module, module), call, name, step, zero, record, operands)


def _rounded_operands(
    target: Archive,
    facts: Mapping[str, Mapping[str, Any]],
    makers: Mapping[str, Mapping[str, Any]],
    names: Mapping[str, str],
) -> Iterator[RoundedNode]:
    """Yield nodes that round operands of a product of two computed tensors, within the module of that."""
    for text, value in facts.items():
        operands = [
            operand for operand in inputs_of(value)[:2] if base_of(makers.get(operand, {})) == _DYNAMIC
        ]
        if base_of(value) not in _PRODUCTS or len(operands) < 2:
            continue
        module = Key.parse(text).site.partition(":")[0]
        for numbers in operands:
            made = [output["record"] for output in makers[numbers]["outputs"]]
            if len(made) != 3 or not all(record in target and target.get(record).stored for record in made):
                continue
            try:
                step, zero = (float(target.load(target.get(record)).reshape(-1)[0]) for record in made[1:])
            except (OSError, ReadError):  # the comparison says so
                continue
            call, name = int(number_of(value, "module_call")), Key.parse(numbers).site.partition(":")[2]
            yield RoundedNode(names.get(module, module), call, name, step, zero, target.get(numbers), ())


def inner_roundings(target: Archive, nodes: Iterable[RoundedNode]) -> dict[str, float]:
    """What rounding within modules does to their results, by module: RMS over that of values, no unit.

    Errors of the nodes of a call are independent. Of one it is the median of rows, without rows of zeros
    alone; of a module it is the largest of its calls.
    """
    squares: dict[tuple[str, int, int, int], float] = {}
    for node in nodes:
        rows = _rows(target, node)
        if rows is not None and (relative := _relative(node, rows)):
            call = node.module, node.record.key.rank, node.record.key.step, node.call
            squares[call] = squares.get(call, 0.0) + relative**2
    largest: dict[str, float] = {}
    for (module, *_), square in squares.items():
        largest[module] = max(math.sqrt(square), largest.get(module, 0.0))
    return largest


def rounded_tensors(target: Archive, nodes: Iterable[RoundedNode]) -> Iterator[tuple[str, float]]:
    """Yield key texts of what modules hand on that a node rounded, and what that makes of it, relative.

    They are known by their values: those of the node, as floats.
    """
    handed_on: dict[tuple[object, ...], list[Record]] = defaultdict(list)
    for record in target.records:
        is_handed_on = not is_parameter(record.key) and not is_inner(record.key)
        if is_handed_on and record.stored and record.dtype.kind == "float" and record.statistics is not None:
            ends = record.statistics.minimum, record.statistics.maximum
            handed_on[record.shape, record.key.rank, record.key.step, ends].append(record)
    for node in nodes:
        values = _values(target, node)
        if values is None or not values.size:
            continue
        key = node.record.key
        place = node.record.shape, key.rank, key.step, (float(values.min()), float(values.max()))
        relative = _relative(node, values) if place in handed_on else 0.0
        for record in handed_on.get(place, ()) if relative else ():
            try:
                held = target.load(record)
            except (OSError, ReadError):  # the comparison says so
                continue
            if np.array_equal(held, values):
                yield record.key.text, relative


def _rows(target: Archive, node: RoundedNode) -> Array | None:
    """The first rows of what a node makes, in the unit of its values, float64; None if there are none."""
    values = _values(target, node)
    return None if values is None else values.reshape(-1, values.shape[-1])[:_MOST_ROWS].astype(np.float64)


def _relative(node: RoundedNode, rows: Array) -> float:
    """What rounding to a step makes of rows, over their size: the median of those that aren't zeros alone."""
    sizes = np.sqrt(np.square(rows.astype(np.float64)).mean(axis=-1))
    sizes = sizes[(sizes > 0) & np.isfinite(sizes)]
    return node.step / math.sqrt(12) / float(np.median(sizes)) if sizes.size else 0.0


def _values(target: Archive, node: RoundedNode) -> Array | None:
    """What a node makes, in the unit of its values; None if there is nothing."""
    if not node.record.stored or not node.record.size or not node.record.shape:
        return None
    try:
        values = target.load(node.record)
    except (OSError, ReadError):  # the comparison says so
        return None
    if node.record.dtype.kind not in _WHOLE:
        return values
    floats: Array = (values.astype(np.float32) - np.float32(node.zero)) * np.float32(node.step)
    return floats


def lost_operands(target: Archive, nodes: Iterable[RoundedNode]) -> Iterator[LostOperand]:
    """Yield the operands that are lost in sums: none of their values is half a step of the sum.

    And the sum is hardly anything else: one number stands for a quarter of its values or more. Of a sum of
    many numbers such an operand is no more than rounding itself, as the mean that a norm takes away.
    """
    for node in nodes:
        lost = [(record, size) for record, size in node.operands if size <= node.step / 2]
        rows = _rows(target, node) if lost else None
        if rows is None or np.unique(rows, return_counts=True)[1].max() < _FEW * rows.size:
            continue
        for record, size in lost:
            text = (
                f"{node.name} rounds a sum to steps of {node.step:.3g}, in which its operand of at most "
                f"{size:.3g} is lost ({record.key.text})"
            )
            yield LostOperand(node.module, node.record.key.rank, node.record.key.step, text)


def _operands(
    target: Archive, facts: Mapping[str, Any], makers: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[Record, float]]:
    """The operands of a sum that are computed and vary, each with its largest magnitude."""
    for text in inputs_of(facts):
        record, maker = target.get(text) if text in target else None, makers.get(text)
        statistics = None if record is None else record.statistics
        if record is None or maker is None or not inputs_of(maker) or statistics is None:
            continue
        if statistics.minimum is None or statistics.maximum is None:
            continue
        step, zero = 1.0, 0.0
        if record.dtype.kind in _WHOLE:
            step, zero = number_of(maker, "step"), number_of(maker, "zero")
        ends = [(float(end) - zero) * step for end in (statistics.minimum, statistics.maximum)]
        if ends[0] != ends[1]:
            yield record, max(abs(end) for end in ends)


def inputs_of(facts: Mapping[str, Any]) -> list[str]:
    """Key texts of the records that an op takes."""
    entries = [entry.get("record") for entry in facts.get("inputs", ()) if isinstance(entry, Mapping)]
    return [text for text in entries if isinstance(text, str)]


def number_of(facts: Mapping[str, Any], name: str) -> float:
    """A number of an op's facts; 0 if they have none of that name."""
    value = facts.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def base_of(facts: Mapping[str, Any]) -> str:
    """An op's name without its domain."""
    return str(facts.get("op")).rpartition(".")[2]
