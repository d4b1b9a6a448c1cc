"""Where values stop being finite: the first such tensor, and what went into it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tensorcap.comparison import Comparison, called_sites, caller_of
from tensorcap.runs import is_inner, is_parameter, ops_of, passed_in
from tensorcap_formats.archive import Archive
from tensorcap_formats.json_values import json_value
from tensorcap_formats.keys import ROOT_SITE, Key
from tensorcap_formats.records import Record

_FEW: Final = 8  # operands: those nearest before


@dataclass(frozen=True, slots=True)
class NonfiniteContents:
    """What a tensor of the target holds that is not finite.

    Attributes:
        key: Its key text, in the reference's names.
        nan: Count of NaN.
        inf: Count of infinities of either sign.
        elements: Count of all elements.
        largest: Largest magnitude of the finite ones; None if there is none.
        more: How many elements more are not finite than in the reference's tensor; None if it has none.
    """

    key: str
    nan: int
    inf: int
    elements: int
    largest: float | None
    more: int | None

    @property
    def is_finite(self) -> bool:
        """Whether all elements are."""
        return not (self.nan or self.inf)


@dataclass(frozen=True, slots=True)
class NonfiniteOrigin:
    """The first tensor that is finite on one side only.

    Attributes:
        tensor: What it holds in the target.
        module: The module whose code made it.
        operands: What went into it, as far as it was captured: arguments of the call, results of modules that
            were called within it before, and parameters that it holds.
    """

    tensor: NonfiniteContents
    module: str
    operands: tuple[NonfiniteContents, ...]

    @property
    def key(self) -> str:
        """Key text of the tensor."""
        return self.tensor.key

    def to_json(self) -> dict[str, Any]:
        """The tensor, the module, and what went into it, as JSON values."""
        return {
            "key": self.key,
            "module": self.module,
            "tensor": json_value(self.tensor),
            "operands": [{**json_value(o), "is_finite": o.is_finite} for o in self.operands],
        }


def find_nonfinite_origin(reference: Archive, target: Archive, free: Comparison) -> NonfiniteOrigin | None:
    """Find where values stop being finite, in execution order of the reference.

    Args:
        reference: The trusted archive, as it was compared.
        target: The target under the same keys.
        free: Their comparison.

    Returns:
        None if the masks of all pairs are the same.
    """
    records = [pair.reference for pair in free.pairs if pair.status == "nonfinite" and pair.reference]
    if not records:
        return None
    first = min(records, key=lambda record: record.order)
    module = _maker(reference, first.key)
    keys = [record.key.text for record in _operands(reference, first, module)]
    keys += [r.key.text for r in target.records if _is_renamed(r, first, reference)]
    operands = tuple(_contents(reference, target, key) for key in keys if key in target)
    return NonfiniteOrigin(_contents(reference, target, first.key.text), module, operands)


def _is_renamed(record: Record, first: Record, reference: Archive) -> bool:
    """Whether a record is an argument of the call, under a name that the reference does not have."""
    key = record.key
    is_argument = key.where == first.key.where and key.slot.startswith("input")
    return is_argument and first.key.slot.startswith("output") and key.text not in reference


def _maker(reference: Archive, key: Key) -> str:
    if is_inner(key):
        return passed_in(reference, key)
    return caller_of(key.site, called_sites(reference)) if key.slot.startswith("input") else key.site


def _operands(reference: Archive, record: Record, module: str) -> Iterator[Record]:
    """Records that a tensor was computed from.

    1. If the archive has ops, those say it.
    2. Otherwise: the module's parameters, the arguments of its last call before the tensor, and the last
       eight results since then of modules that it calls.
    """
    inputs = ops_of(reference).inputs(record.key.where)
    if inputs is not None:
        yield from (reference.get(key) for key in inputs if key in reference)
        return
    called = called_sites(reference)
    arguments: dict[str, Record] = {}
    results: list[Record] = []
    for earlier in reference.records:
        key = earlier.key
        if is_parameter(key) and key.site == module:
            yield earlier
        if key.step != record.key.step or key.rank != record.key.rank or is_inner(key) or key.is_bare:
            continue
        if earlier.order >= record.order or not earlier.dtype.is_inexact:
            continue
        kind = key.slot.partition(".")[0]
        if kind in ("input", "given") and key.site == module:
            arguments[key.slot] = earlier  # of the last call before
        elif (
            kind == "output" and key.site not in (module, ROOT_SITE) and caller_of(key.site, called) == module
        ):
            results.append(earlier)
    start = min((argument.order for argument in arguments.values()), default=0)
    yield from arguments.values()
    yield from [result for result in results if result.order > start][-_FEW:]


def _contents(reference: Archive, target: Archive, key: str) -> NonfiniteContents:
    theirs = target.get(key)
    nan, inf, largest = _counts(target, theirs)
    more = None
    if key in reference:
        ours = _counts(reference, reference.get(key))
        more = nan + inf - ours[0] - ours[1]
    return NonfiniteContents(key, nan, inf, theirs.size, largest, more)


def _counts(archive: Archive, record: Record) -> tuple[int, int, float | None]:
    """Count how many NaN and infinities a tensor has, and its largest finite magnitude."""
    statistics = record.statistics
    if statistics is not None:
        ends = [abs(end) for end in (statistics.minimum, statistics.maximum) if end is not None]
        return statistics.nan, statistics.posinf + statistics.neginf, float(max(ends)) if ends else None
    values = np.abs(archive.load(record))
    finite = values[np.isfinite(values)]
    largest = float(finite.max()) if finite.size else None
    return int(np.isnan(values).sum()), int(np.isinf(values).sum()), largest
