"""Values between the nodes of a target that are rounded to whole steps, as a quantised graph has them.

What that does to the results of a module is known from its own run: the steps, and the size of the values.
So is what it loses: an operand of a sum that is below half a step of that adds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tensorcap.alignment import MappedArchive
from tensorcap.runs import is_fact
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import ReadError
from tensorcap_formats.keys import Key
from tensorcap_formats.records import Record

_MOST_ROWS: Final = 512  # of a tensor, the first ones, that are read
_WHOLE: Final = ("int", "uint")  # kinds of dtypes
_SUMS: Final = ("Add", "Sub", "Sum", "QLinearAdd")


@dataclass(frozen=True, slots=True)
class RoundedNode:
    """A node that rounds what it makes to whole steps.

    Attributes:
        module: Site of the module that it lies in, in the reference's names.
        name: Its name within that.
        step: In the unit of the values.
        zero: The number that stands for 0, if whole numbers were recorded, else 0.
        record: What it makes.
        operands: Of the sum that it rounds, or is, those that are computed, with the largest magnitude of
            each; none if it is no sum.
    """

    module: str
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
        text: What is lost, as the end of a sentence.
    """

    module: str
    text: str


def rounded_nodes(target: Archive) -> Iterator[RoundedNode]:
    """Yield the nodes of a target that round what they make, as facts of its ops say (CAP-331)."""
    names = target.names if isinstance(target, MappedArchive) else {}
    facts = {text: value for text, value in target.values.items() if is_fact(text, value)}
    if not any("step" in value for value in facts.values()):
        return
    makers = {
        output["record"]: value
        for value in facts.values()
        for output in value.get("outputs", ())
        if isinstance(output, Mapping) and isinstance(output.get("record"), str)
    }
    for text, value in facts.items():
        step, key = value.get("step"), f"{text.rpartition('/')[0]}/output"
        if not isinstance(step, float) or not step > 0 or key not in target:
            continue
        made: Any = value
        if _base(value) == "QuantizeLinear":
            made = next((makers[text] for text in _inputs(value) if text in makers), {})
        operands = tuple(_operands(target, made, makers)) if _base(made) in _SUMS else ()
        record, (module, _, name) = target.get(key), Key.parse(text).site.partition(":")
        zero = _number(value, "zero") if record.dtype.kind in _WHOLE else 0.0
        yield RoundedNode(names.get(module, module), name, step, zero, record, operands)


def inner_roundings(target: Archive, nodes: Iterable[RoundedNode]) -> dict[str, float]:
    """What rounding within modules does to their results, by module: RMS over that of values, no unit.

    Errors of nodes are independent. Of one it is the median of rows, without rows of zeros alone.
    """
    squares: dict[str, float] = {}
    for node in nodes:
        if not node.record.stored or not node.record.shape:
            continue
        try:
            values = target.load(node.record).astype(np.float64)
        except (OSError, ReadError):  # the comparison says so
            continue
        unit = node.step if node.record.dtype.kind in _WHOLE else 1.0
        rows = (values.reshape(-1, values.shape[-1])[:_MOST_ROWS] - node.zero) * unit
        sizes = np.sqrt(np.square(rows).mean(axis=1))
        sizes = sizes[(sizes > 0) & np.isfinite(sizes)]
        if sizes.size:
            relative = node.step / math.sqrt(12) / float(np.median(sizes))
            squares[node.module] = squares.get(node.module, 0.0) + relative**2
    return {module: math.sqrt(square) for module, square in squares.items()}


def lost_operands(target: Archive, nodes: Iterable[RoundedNode]) -> Iterator[LostOperand]:
    """Yield the operands that are lost in sums: none of their values is half a step of the sum."""
    for node in nodes:
        for record, size in node.operands:
            if size <= node.step / 2:
                text = (
                    f"{node.name} rounds a sum to steps of {node.step:.3g}, in which its operand of at most "
                    f"{size:.3g} is lost ({record.key.text})"
                )
                yield LostOperand(node.module, text)


def _operands(
    target: Archive, facts: Mapping[str, Any], makers: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[Record, float]]:
    """The operands of a sum that are computed and vary, each with its largest magnitude."""
    for text in _inputs(facts):
        record, maker = target.get(text) if text in target else None, makers.get(text)
        statistics = None if record is None else record.statistics
        if record is None or maker is None or not _inputs(maker) or statistics is None:
            continue
        if statistics.minimum is None or statistics.maximum is None:
            continue
        step, zero = 1.0, 0.0
        if record.dtype.kind in _WHOLE:
            step, zero = _number(maker, "step"), _number(maker, "zero")
        ends = [(float(end) - zero) * step for end in (statistics.minimum, statistics.maximum)]
        if ends[0] != ends[1]:
            yield record, max(abs(end) for end in ends)


def _inputs(facts: Mapping[str, Any]) -> list[str]:
    """Key texts of the records that an op takes."""
    entries = [entry.get("record") for entry in facts.get("inputs", ()) if isinstance(entry, Mapping)]
    return [text for text in entries if isinstance(text, str)]


def _number(facts: Mapping[str, Any], name: str) -> float:
    value = facts.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def _base(facts: Mapping[str, Any]) -> str:
    return str(facts.get("op")).rpartition(".")[2]
