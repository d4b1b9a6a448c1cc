"""Where values stop being finite: the first such tensor, and what went into it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from tensorcap.comparison.comparison import Comparison
from tensorcap.comparison.divergence import called_sites, caller_of
from tensorcap.runs.ops import ops_of, passed_in
from tensorcap.runs.record_kinds import is_inner, is_parameter
from tensorcap_formats.archive import Archive
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
        largest: Largest magnitude of the finite ones; None where there is none.
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
        operands: What went into it, as far as it was captured: what the call was given, results of modules
            that were called within it before, and parameters that it holds.
    """

    tensor: NonfiniteContents
    module: str
    operands: tuple[NonfiniteContents, ...]

    @property
    def key(self) -> str:
        """Key text of the tensor."""
        return self.tensor.key


def nonfinite_origin(reference: Archive, target: Archive, free: Comparison) -> NonfiniteOrigin | None:
    """Find where values stop being finite, in execution order of the reference.

    Args:
        reference: The trusted archive, as it was compared.
        target: The target under the same keys.
        free: Their comparison.

    Returns:
        None if the masks of all pairs are the same.
    """
    wrong = [pair.reference for pair in free.pairs if pair.status == "nonfinite" and pair.reference]
    if not wrong:
        return None
    first = min(wrong, key=lambda record: record.order)
    module = _maker(reference, first.key)
    operands = [record.key.text for record in _operands(reference, first, module)]
    operands += [r.key.text for r in target.records if _is_renamed(r, first, reference)]
    found = [_contents(reference, target, key) for key in operands if key in target]
    return NonfiniteOrigin(_contents(reference, target, first.key.text), module, tuple(found))


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
    """Records of what a tensor was made of."""
    known = ops_of(reference).inputs(record.key.where)
    if known is not None:
        yield from (reference.get(key) for key in known if key in reference)
        return
    called = called_sites(reference)
    given: dict[str, Record] = {}
    made: list[Record] = []
    for other in reference.records:
        key = other.key
        if is_parameter(key) and key.site == module:
            yield other
        if key.step != record.key.step or key.rank != record.key.rank or is_inner(key) or key.is_bare:
            continue
        if other.order >= record.order or not other.dtype.is_inexact:
            continue
        kind = key.slot.partition(".")[0]
        if kind in ("input", "given") and key.site == module:
            given[key.slot] = other  # of the last call before
        elif (
            kind == "output" and key.site not in (module, ROOT_SITE) and caller_of(key.site, called) == module
        ):
            made.append(other)
    start = min((one.order for one in given.values()), default=0)
    yield from given.values()
    yield from [one for one in made if one.order > start][-_FEW:]


def _contents(reference: Archive, target: Archive, key: str) -> NonfiniteContents:
    theirs = target.get(key)
    nan, inf, largest = _counts(target, theirs)
    more = None
    if key in reference:
        ours = _counts(reference, reference.get(key))
        more = nan + inf - ours[0] - ours[1]
    return NonfiniteContents(key, nan, inf, theirs.size, largest, more)


def _counts(archive: Archive, record: Record) -> tuple[int, int, float | None]:
    """How many NaN and infinities a tensor has, and its largest finite magnitude."""
    known = record.statistics
    if known is not None:
        ends = [abs(end) for end in (known.minimum, known.maximum) if end is not None]
        return known.nan, known.posinf + known.neginf, float(max(ends)) if ends else None
    values = np.abs(archive.load(record))
    finite = values[np.isfinite(values)]
    largest = float(finite.max()) if finite.size else None
    return int(np.isnan(values).sum()), int(np.isinf(values).sum()), largest
