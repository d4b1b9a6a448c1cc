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
from tensorcap_formats.keys import Key, module_of
from tensorcap_formats.records import Record

_MOST_ROWS: Final = 512  # of a tensor, the first ones, that are read
_SUMS: Final = ("Add", "Sub", "Sum", "QLinearAdd")


@dataclass(frozen=True, slots=True)
class RoundedNode:
    """A node that rounds what it makes to whole steps.

    Attributes:
        module: Site of the module that it lies in, in the reference's names.
        name: Its name within that.
        step: In the unit of the values.
        record: What it makes.
        sum: Facts of the sum that it rounds, or is; None if it is of another kind.
    """

    module: str
    name: str
    step: float
    record: Record
    sum: Mapping[str, Any] | None


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
        given = [entry.get("record") for entry in value.get("inputs", ()) if isinstance(entry, Mapping)]
        made = value if _base(value) != "QuantizeLinear" else makers.get(given[0] if given else None)
        site = Key.parse(text).site
        module = module_of(site)
        is_sum = made is not None and _base(made) in _SUMS
        yield RoundedNode(
            names.get(module, module), site.partition(":")[2], step, target.get(key), made if is_sum else None
        )


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
        rows = values.reshape(-1, values.shape[-1])[:_MOST_ROWS]
        sizes = np.sqrt(np.square(rows).mean(axis=1))
        sizes = sizes[(sizes > 0) & np.isfinite(sizes)]
        if sizes.size:
            relative = node.step / math.sqrt(12) / float(np.median(sizes))
            squares[node.module] = squares.get(node.module, 0.0) + relative**2
    return {module: math.sqrt(square) for module, square in squares.items()}


def lost_operands(target: Archive, nodes: Iterable[RoundedNode]) -> Iterator[LostOperand]:
    """Yield the operands that are lost in sums: none of their values is half a step of the sum."""
    for node in nodes:
        operands = [] if node.sum is None else list(_operands(target, node.sum))
        for record, size in operands:
            if size <= node.step / 2:
                text = (
                    f"{node.name} rounds a sum to steps of {node.step:.3g}, in which its operand of at most "
                    f"{size:.3g} is lost ({record.key.text})"
                )
                yield LostOperand(node.module, text)


def _operands(target: Archive, facts: Mapping[str, Any]) -> Iterator[tuple[Record, float]]:
    """The operands of a sum that vary, each with its largest magnitude."""
    for entry in facts.get("inputs", ()):
        text = entry.get("record") if isinstance(entry, Mapping) else None
        record = target.get(text) if isinstance(text, str) and text in target else None
        statistics = None if record is None else record.statistics
        if record is None or statistics is None or statistics.minimum is None or statistics.maximum is None:
            continue
        if statistics.minimum != statistics.maximum:
            yield record, float(max(statistics.maximum, -statistics.minimum))


def _base(facts: Mapping[str, Any]) -> str:
    return str(facts.get("op")).rpartition(".")[2]
