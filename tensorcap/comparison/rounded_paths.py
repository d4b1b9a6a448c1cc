"""What a graph rounds on the way to a tensor, from what is put in the place of arguments on.

An optimiser takes from nodes where they lie, so that what rounds between two results of the reference belongs
to no module. The graph says how a tensor is made, whatever lies where.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Set
from typing import Any, Final

import numpy as np

from tensorcap.alignment import MappedArchive
from tensorcap.comparison.rounded_nodes import base_of, inputs_of, number_of
from tensorcap.runs import is_fact, is_inner, is_parameter, is_result, rms_of
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import ReadError
from tensorcap_formats.records import Record

_ROUNDERS: Final = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear")
_MOST: Final = 256  # nodes on the way to one tensor
_WHOLE: Final = ("int", "uint")  # kinds of dtypes
_Mark = tuple[object, ...]


def rounded_paths(
    reference: Archive, target: Archive, predicted: Mapping[str, float], besides: Collection[str]
) -> Iterator[tuple[str, float]]:
    """Yield key texts of arguments and results, and what rounding makes of them on the way, RMS, relative.

    The way is that of the target's nodes, up to the arguments that both sides have. Errors of nodes are
    independent, each relative to what it rounds; those of layers are predicted.

    Args:
        reference: The trusted archive.
        target: The archive under test, under the reference's keys.
        predicted: The errors of layers by site, with what rounds their inputs.
        besides: Sites of layers, of whose results more is known.
    """
    paths = _Paths(target, predicted)
    if not paths.rounds:
        return
    shared = [record for record in target.records if record.key.text in reference]
    ends = {mark for r in shared if r.key.slot.startswith("input") for mark in paths.marks_of(r)}
    for record in shared:
        key = record.key
        if is_inner(key) or is_parameter(key) or (is_result(key) and key.site in besides):
            continue
        if record.dtype.kind == "float" and (error := paths.error_of(record, ends)):
            yield key.text, error


class _Paths:
    """The nodes of a target, by what they make.

    Attributes:
        rounds: Whether one of them rounds.
    """

    def __init__(self, target: Archive, predicted: Mapping[str, float]) -> None:
        mapped = target if isinstance(target, MappedArchive) else None
        self._links = {} if mapped is None else mapped.links
        self._names = {} if mapped is None else mapped.names
        self._raw = target if mapped is None else mapped.source
        self._predicted = predicted
        facts = [v for text, v in self._raw.values.items() if is_fact(text, v) and isinstance(v, Mapping)]
        self._makers: dict[str, Mapping[str, Any]] = {
            made["record"]: value
            for value in facts
            for made in value.get("outputs", ())
            if isinstance(made, Mapping) and isinstance(made.get("record"), str)
        }
        self.rounds = any("step" in value or base_of(value) in _ROUNDERS for value in facts)
        self._made: dict[_Mark, str] = {}
        self._errors: dict[str, float] = {}
        for text in self._makers if self.rounds else ():
            for mark in self._marks(text):
                self._made.setdefault(mark, text)

    def marks_of(self, record: Record) -> Iterator[_Mark]:
        """What tells which node made a tensor of the target, under the reference's key.

        It is its bits if a node made these; else it stands for numbers.
        """
        link = self._links.get(record.key.text)
        for raw in (record,) if link is None else link.target:
            marks = list(_marks_of(raw, 1.0, 0.0))
            yield from marks[:1] if marks and marks[0] in self._made else marks

    def error_of(self, record: Record, ends: Set[_Mark]) -> float:
        """What rounding makes of a tensor on the way from some ends; 0 if no node is known to make it."""
        start = next((self._made[m] for m in self.marks_of(record) if m in self._made), "")
        squares, seen, left = 0.0, {start}, [start] if start else []
        while left and len(seen) <= _MOST:
            text = left.pop()
            facts = self._makers[text]
            own = self._predicted.get(self._module(facts), 0.0) if _is_product(facts) else 0.0
            squares += own**2 if own else self._rounding(text, facts) ** 2
            for given in inputs_of(facts):
                given = self._before_rounding(given) if own else given
                if given in seen or given not in self._makers or not ends.isdisjoint(self._marks(given)):
                    continue
                seen.add(given)
                left.append(given)
        return math.sqrt(squares)

    def _before_rounding(self, text: str) -> str:
        """What an operand of a layer is before it is rounded for that."""
        while text in self._makers and base_of(self._makers[text]) in _ROUNDERS:
            text = next(iter(inputs_of(self._makers[text])), "")
        return text

    def _module(self, facts: Mapping[str, Any]) -> str:
        module = str(facts.get("module") or "")
        return str(self._names.get(module, module))

    def _marks(self, text: str) -> list[_Mark]:
        facts = self._makers[text]
        step, zero = number_of(facts, "step"), number_of(facts, "zero")
        return [*_marks_of(self._raw.get(text), step or 1.0, zero)] if text in self._raw else []

    def _rounding(self, text: str, facts: Mapping[str, Any]) -> float:
        """What a node's own rounding makes of its result, relative."""
        step = number_of(facts, "step")
        if not step or text not in self._raw:
            return 0.0
        if text not in self._errors:
            record = self._raw.get(text)
            size = _size(self._raw, record, step, number_of(facts, "zero"))
            self._errors[text] = step / math.sqrt(12) / size if size else 0.0
        return self._errors[text]


def _is_product(facts: Mapping[str, Any]) -> bool:
    return any(part in base_of(facts) for part in ("MatMul", "Conv", "Gemm"))


def _size(archive: Archive, record: Record, step: float, zero: float) -> float:
    """The RMS of what a node makes, in the unit of its values; 0 if it is not known."""
    if record.dtype.kind not in _WHOLE:
        return rms_of(record)
    if not record.stored or not record.size:
        return 0.0
    try:
        numbers = archive.load(record).astype(np.float64)
    except (OSError, ReadError):  # the comparison says so
        return 0.0
    return float(np.sqrt(np.square(numbers - zero).mean())) * step


def _marks_of(record: Record, step: float, zero: float) -> Iterator[_Mark]:
    """What is the same of a tensor and of the numbers that stand for it: ends and mean, or its bits."""
    key, statistics = record.key, record.statistics
    if record.digest:
        yield key.rank, key.step, record.shape, record.digest
    if statistics is None or statistics.minimum is None or statistics.maximum is None:
        return
    ends = [np.float32(end) for end in (statistics.minimum, statistics.maximum)]
    mean = float(statistics.mean or 0.0)
    if record.dtype.kind in _WHOLE:
        ends = [(end - np.float32(zero)) * np.float32(step) for end in ends]
        mean = (mean - zero) * step
    largest = max(abs(float(end)) for end in ends)
    if ends[0] != ends[1]:
        yield key.rank, key.step, record.shape, float(ends[0]), float(ends[1]), round(mean / largest, 3)
