"""All that is known of one pair: its values, what its module was given, its parameters, the configuration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from tensorcap.diagnosis.scoring import Values
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import decode
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import Key, module_of
from tensorcap_formats.records import Record

_NEAR: Final = 48  # records before and behind that are looked at
_NO_TENSOR: Final = ("param.", "buffer.", "grad")
_WIDTHS: Final = ("hidden_size", "d_model", "n_embd", "dim")
_HEADS: Final = ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads")
_KV_HEADS: Final = ("num_key_value_heads",)


@dataclass(frozen=True)
class PairContext:
    """One pair, and what stands beside it in both archives.

    Attributes:
        ours: The reference's archive.
        theirs: The target's.
        reference: The trusted record.
        target: The record under test.
        r: Values of the reference; those that are not finite on either side are 0 on both.
        t: Values of the target.
        window: Which part of the tensors that is, as a slice of the first axis that is longer than 1; None
            for all of them.
    """

    ours: Archive
    theirs: Archive
    reference: Record
    target: Record
    r: Values
    t: Values
    window: tuple[int, int, int] | None = None

    @property
    def is_same_shape(self) -> bool:
        """Whether elements stand against elements."""
        return self.r.shape == self.t.shape

    @property
    def baseline(self) -> Values | None:
        """What the target would be without a mistake."""
        return self.r if self.is_same_shape else None

    def part(self, where: tuple[slice | Values, ...]) -> PairContext:
        """The same of some of the elements."""
        return replace(self, r=self.r[where], t=self.t[where], window=(-1, 0, 0))

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """Entries of the reference's configuration by the last part of their names; the outermost wins."""
        return dict(reversed(list(_entries(self.ours.info.config))))

    def number(self, *names: str) -> float | None:
        """The first of some entries of the configuration that is a number."""
        for name in names:
            value = self.config.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
        return None

    @property
    def heads(self) -> int | None:
        """Count of attention heads."""
        found = self.number(*_HEADS)
        return int(found) if found else None

    @property
    def head_dim(self) -> int | None:
        """Channels of one head."""
        found, width = self.number("head_dim"), self.number(*_WIDTHS)
        if found:
            return int(found)
        return int(width // self.heads) if width and self.heads else None

    @property
    def kv_heads(self) -> int | None:
        """Count of heads of keys and values."""
        found = self.number(*_KV_HEADS)
        return int(found) if found else self.heads

    def axis(self, number: int) -> str:
        """What an axis most likely is: `channel`, `token`, `head`, `batch`, or `axis n`."""
        shape = self.r.shape
        ndim = len(shape)
        number %= ndim
        if number == ndim - 1:
            is_chosen = shape[-1] == self.number("num_experts_per_tok", "num_selected_experts", "top_k")
            is_ids = ndim <= 2 and self.reference.dtype.kind in ("int", "uint", "bool") and not is_chosen
            return "token" if is_ids else "channel"
        if ndim == 4 and number in (1, 2):
            heads = [axis for axis in (1, 2) if shape[axis] in (self.heads, self.kv_heads)]
            if len(heads) == 1:
                return "head" if number == heads[0] else "token"
            return f"axis {number}"
        if number == ndim - 2 and self.axis(-1) == "channel":
            return "token"
        return "batch" if number == 0 else f"axis {number}"

    @cached_property
    def inputs(self) -> list[tuple[str, Values, Values]]:
        """What the module was given, finite and whole on both sides: slot, reference, target."""
        if self.window is not None:
            return []
        found = []
        for record in self._of_call(self.ours, self.reference):
            slot = record.key.slot
            partner = self._find(self.theirs, replace(self.target.key, slot=slot))
            if not slot.startswith("input.") or partner is None or partner.shape != record.shape:
                continue
            if self._is_fit(record) and self._is_fit(partner):
                sides = values_of(self.ours, record), values_of(self.theirs, partner)
                if all(np.isfinite(side).all() for side in sides):
                    found.append((slot, *sides))
        return found

    def parameters(self) -> dict[str, tuple[Values | None, Values | None]]:
        """Parameters of the module by name: the reference's and the target's."""
        sides = []
        for archive, record in ((self.ours, self.reference), (self.theirs, self.target)):
            site = module_of(record.key.site)
            sides.append(
                {
                    r.key.slot.partition(".")[2]: values_of(archive, r)
                    for r in archive.records
                    if module_of(r.key.site) == site
                    and r.key.slot.startswith(("param.", "buffer."))
                    and self._is_fit(r)
                }
            )
        return {name: (sides[0].get(name), sides[1].get(name)) for name in {**sides[0], **sides[1]}}

    def near(self) -> Iterator[Record]:
        """Records of the reference around this one, of the same parent module and of its run's step."""
        own = self.reference.key
        parent = module_of(own.site).rpartition(".")[0]
        around = [r for r in self.ours.records if r.key.step == own.step and r.key.rank == own.rank]
        at = next((i for i, r in enumerate(around) if r.row == self.reference.row), 0)
        for record in around[max(0, at - _NEAR) : at + _NEAR]:
            site = module_of(record.key.site)
            is_kin = site.startswith(parent) if parent else True
            is_value = not record.key.slot.startswith(_NO_TENSOR)
            if record.row != self.reference.row and is_kin and is_value and self._is_fit(record):
                yield record

    def beside(self, shape: tuple[int, ...] | None = None) -> Iterator[tuple[str, Values, Values | None]]:
        """Floating values around this pair, of one shape: key text, reference, target where it has them."""
        seen = {self.reference.digest} if self.reference.digest else set()
        for record in self.near():
            if record.dtype.kind != "float" or record.digest in seen:
                continue
            if shape is not None and record.shape != shape:
                continue
            if record.digest:
                seen.add(record.digest)
            partner = self._find(self.theirs, record.key)
            is_there = partner is not None and partner.shape == record.shape and self._is_fit(partner)
            ours = values_of(self.ours, record)
            theirs = values_of(self.theirs, partner) if partner is not None and is_there else None
            if np.isfinite(ours).all():
                is_finite = theirs is not None and bool(np.isfinite(theirs).all())
                yield record.key.text, ours, theirs if is_finite else None

    def _of_call(self, archive: Archive, record: Record) -> list[Record]:
        where = record.key.where
        return [r for r in archive.records if r.key.where == where and r.row != record.row]

    def _find(self, archive: Archive, key: Key) -> Record | None:
        return archive.get(key) if key.text in archive else None

    def _is_fit(self, record: Record) -> bool:
        return record.stored and record.size <= LARGEST and record.dtype.kind != "complex"


LARGEST: Final = 1 << 22  # elements of a tensor that is looked at beside the pair


def pair_context(
    ours: Archive, reference: Record, theirs: Archive, target: Record, *, limit: int
) -> tuple[PairContext, Values, Values]:
    """Read a pair, or the first part of it that differs.

    Returns:
        The exhibit, and the values as they are, where some may be not finite.
    """
    for archive, record in ((ours, reference), (theirs, target)):
        if record.dtype.kind == "complex":
            raise UsageError(
                f"{archive.path}: {record.key.text}: is {record.dtype.name}, expected real values"
            )
    window: tuple[int, int, int] | None = None
    if max(reference.size, target.size) <= limit:
        r, t = values_of(ours, reference), values_of(theirs, target)
    elif reference.shape != target.shape:
        raise UsageError(
            f"{reference.key.text}: {reference.shape} against {target.shape} are too large to hold against "
            f"each other, expected at most {limit} elements"
        )
    else:
        window, r, t = _first_window(ours, reference, theirs, target, limit)
    raw = r, t
    if r.shape == t.shape:
        finite = np.isfinite(r) & np.isfinite(t)
        if not finite.all():
            r, t = np.where(finite, r, 0.0), np.where(finite, t, 0.0)
    else:
        r, t = (np.where(np.isfinite(side), side, 0.0) for side in (r, t))
    return PairContext(ours, theirs, reference, target, r, t, window), *raw


def last_inputs(exhibit: PairContext) -> Iterator[PairContext]:
    """Pairs of what the last two modules within this one are given, as the last may be a dropout."""
    key, slot = exhibit.reference.key, "output"
    if not key.slot.startswith(slot) or exhibit.window is not None:
        return
    site = module_of(key.site)
    within = [
        r
        for r in exhibit.ours.records
        if module_of(r.key.site).rpartition(".")[0] == site
        and (r.key.step, r.key.rank) == (key.step, key.rank)
        and r.key.slot.startswith("input.")
        and r.dtype.kind == "float"
        and r.stored
        and r.size <= LARGEST
    ]
    for record in sorted(within, key=lambda r: -r.order)[:2]:
        partner = exhibit.theirs.get(record.key) if record.key.text in exhibit.theirs else None
        if partner is not None and partner.shape == record.shape and partner.stored:
            inner, r, t = pair_context(exhibit.ours, record, exhibit.theirs, partner, limit=LARGEST)
            if not np.array_equal(r, t):
                yield inner


def values_of(archive: Archive, record: Record) -> Values:
    """A tensor's values in float64, in its shape."""
    return archive.load(record).astype(np.float64)


def _first_window(
    ours: Archive, reference: Record, theirs: Archive, target: Record, limit: int
) -> tuple[tuple[int, int, int], Values, Values]:
    """The first rows, as many as allowed, that differ: whole along all axes but one."""
    shape = reference.shape
    axis = next(i for i, size in enumerate(shape) if size > 1)
    each = math.prod(shape[axis + 1 :])
    count = max(1, limit // each)
    for start in range(0, shape[axis], count):
        stop = min(shape[axis], start + count)
        r, t = (
            decode(archive.read_range(record, start * each, stop * each), record.dtype).astype(np.float64)
            for archive, record in ((ours, reference), (theirs, target))
        )
        if stop == shape[axis] or not np.array_equal(r, t, equal_nan=True):
            part = (*shape[:axis], stop - start, *shape[axis + 1 :])
            return (axis, start, stop), r.reshape(part), t.reshape(part)
    raise AssertionError("a window is returned in the loop")


def _entries(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    nested = []
    for name, value in config.items():
        if isinstance(value, Mapping):
            nested.append(value)
        else:
            yield str(name), value
    for value in nested:
        yield from _entries(value)
