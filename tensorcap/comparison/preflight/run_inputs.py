"""Compare the inputs of two runs, and the reference with a second run of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from tensorcap.comparison.preflight.item import Item, UnknownError, make_item
from tensorcap.runs import is_state
from tensorcap.wording import conjugated
from tensorcap_formats.archive import Archive
from tensorcap_formats.dtypes import Array
from tensorcap_formats.keys import ROOT_SITE, Key
from tensorcap_formats.records import Record

_SMALL: Final = 1 << 22  # elements: inputs up to here are read if digests do not decide


def compare_inputs(reference: Archive, target: Archive) -> Iterator[Item]:
    """Compare the inputs of the whole model, by value; by their hashes if not both archives have them."""
    ours_in_order = [
        r for r in reference.records if r.key.site == ROOT_SITE and r.key.slot.startswith("input")
    ]
    theirs = {r.key: r for r in target.records if r.key.site == ROOT_SITE}
    common = [(r, theirs[r.key]) for r in ours_in_order if r.key in theirs]
    if not common:
        yield from _input_hashes(reference.info.inputs, target.info.inputs)
        return
    handed_on = [_HandedOn(reference), _HandedOn(target)]
    for ours, other in common:
        if _is_same_input(reference, ours, target, other):
            continue
        if handed_on[0].holds(ours) and handed_on[1].holds(other):
            continue  # the model made it itself: what made it diverged, and not what the runs were fed
        step = ours.key.step
        text = f"From step {step} on the runs were fed other inputs: later steps are not comparable."
        if step == 0:
            text = _unlike_text(reference, ours, target, other)
        yield make_item("inputs", ours.key.text, list(ours.shape), list(other.shape), text, explains=True)
        return


class _HandedOn:
    """What a model is given that it made itself before: a cache of the last step, an encoder's results."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._made: dict[str, int] | None = None  # where each value first was a result

    def holds(self, record: Record) -> bool:
        """Whether an input of the model is such a value: by its content, or by its name in a later step."""
        if self._made is None:
            self._made = {}
            for other in self._archive.records:
                if other.digest and other.key.slot.startswith("output"):
                    self._made.setdefault(other.digest, other.order)
        if record.key.step > 0 and is_state(record.key) and not self._is_returned(record):
            return True
        made = self._made.get(record.digest) if record.digest and record.dtype.is_inexact else None
        return made is not None and made < record.order

    def _is_returned(self, record: Record) -> bool:
        """Whether the model returned a state of this name before, so that its content can be compared."""
        slot = record.key.slot.replace("input", "output", 1)
        return Key(ROOT_SITE, slot, record.key.step - 1, rank=record.key.rank).text in self._archive


def _input_hashes(ours: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[Item]:
    if not (ours and theirs):
        raise UnknownError("not both archives hold inputs of the model")
    common = [key for key in ours if key in theirs]
    if not common:
        raise UnknownError("the inputs of the two have no name in common")
    for key in common:
        one, other = ours[key], theirs[key]
        if one and other and one != other:
            text = "The two runs were fed different inputs."
            yield make_item("inputs", key, one, other, text, explains=True)


def _is_same_input(reference: Archive, ours: Record, target: Archive, theirs: Record) -> bool:
    have_digests = ours.digest and theirs.digest and reference.algorithm == target.algorithm
    if have_digests and ours.dtype.name == theirs.dtype.name:
        return ours.digest == theirs.digest and ours.shape == theirs.shape
    if ours.shape != theirs.shape:
        return False
    if not (ours.stored and theirs.stored) or ours.size > _SMALL:
        return True  # nothing is known
    if "float" in (ours.dtype.kind, theirs.dtype.kind) and ours.dtype.name != theirs.dtype.name:
        return True  # rounded to another precision: the comparison itself measures it
    return bool(np.array_equal(reference.load(ours), target.load(theirs)))


def _unlike_text(reference: Archive, ours: Record, target: Archive, theirs: Record) -> str:
    text = "The two runs were fed different inputs."
    if not (ours.stored and theirs.stored) or max(ours.size, theirs.size) > _SMALL or not ours.shape:
        return text
    one, other = reference.load(ours), target.load(theirs)
    if one.ndim == other.ndim and one.shape[:-1] == other.shape[:-1]:
        longer = other.shape[-1] - one.shape[-1]
        if longer == 1 and np.array_equal(other[..., 1:], one):
            return f"{text} The target's begin with one token more, as by a BOS token."
        if longer == -1 and np.array_equal(one[..., 1:], other):
            return f"{text} The reference's begin with one token more, as by a BOS token."
    if one.shape == other.shape and one.ndim:
        if np.array_equal(np.sort(one, axis=-1), np.sort(other, axis=-1)):
            return f"{text} They hold the same values in another order, as by padding on the other side."
        at = tuple(int(i) for i in np.argwhere(_differ(one, other))[0])
        values = f"{one[at].item()} in the reference, {other[at].item()} in the target"
        return f"{text} First at {list(at)}: {values}."
    return text


def _differ(one: Array, other: Array) -> Array:
    both_nan = (one != one) & (other != other)
    differ: Array = (one != other) & ~both_nan
    return differ


def compare_repeat(reference: Archive, repeat: Archive | None) -> Iterator[Item]:
    """Compare the reference with a second run of it, by digests."""
    if repeat is None:
        raise UnknownError("no second run of the reference was given")
    if reference.algorithm is None or reference.algorithm != repeat.algorithm:
        raise UnknownError("the repeat has no digests of the same kind")
    theirs = {r.key: r for r in repeat.records}
    pairs = [(r, theirs[r.key]) for r in reference.records if r.key in theirs]
    if not pairs:
        raise UnknownError("the repeat has no tensor of the reference")
    unlike = [(r, other) for r, other in pairs if r.digest != other.digest or r.shape != other.shape]
    if unlike:
        first = unlike[0][0]
        module = reference.info.modules.get(first.key.site)
        class_name = module.short_class if module else ""
        differ, of_class = conjugated(len(unlike), "differ"), f" ({class_name})" if class_name else ""
        text = (
            f"The reference is not deterministic: {len(unlike)} of {len(pairs)} tensors of its second run "
            f"{differ}, first {first.key.text}{of_class}."
        )
        yield make_item("repeat", first.key.text, first.digest, unlike[0][1].digest, text, explains=True)
