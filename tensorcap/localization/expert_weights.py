"""Weights of experts: one tensor of all on one side, two matrices an expert on the other.

Every Mixtral checkpoint has both projections of an expert's input apart; code that runs all experts at once
holds them as `expert, 2·wide, size`, the one after the other within each expert.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Final

import numpy as np

from tensorcap.alignment import Entry
from tensorcap.wording import name_numbers, name_pattern
from tensorcap_formats.archive import Archive
from tensorcap_formats.records import Record

_CLOSE: Final = 2.0**-6  # of bfloat16's rounding and some more
_REASON: Final = "each expert's two matrices are one after the other in the tensor of all; values agree"
_ROLES: Final = (("gate", "up"),)  # words of names that say which of an expert's matrices one is
# From matrices to the tensor, and back: experts, then both matrices of each, or their transposes
_TOGETHER: Final = ('rearrange "(a b) c -> a b c" a={}', 'rearrange "(a b) c -> a c b" a={}')
_APART: Final = ('rearrange "a (b c) d -> (a b) c d" b=2', 'rearrange "a d (b c) -> (a b) c d" b=2')


@dataclass(frozen=True, slots=True)
class _Split:
    """A tensor of all experts as matrices of the other side, expert by expert, both of each.

    Attributes:
        whole: The tensor.
        matrices: The matrices, as they stand in it.
        is_transposed: Whether they are transposed in it.
        close: Of how many the values are those in the tensor.
        names_say: 1 if the names of tensor and matrices say this order, -1 if the other one, else 0.
    """

    whole: Record
    matrices: tuple[Record, ...]
    is_transposed: bool
    close: int
    names_say: int


def expert_entries(
    reference: Archive, target: Archive, *, free: tuple[Sequence[Record], Sequence[Record]]
) -> Iterator[Entry]:
    """Find tensors of all experts whose two matrices an expert are apart on the other side.

    Args:
        reference: The trusted archive.
        target: The archive under test.
        free: Parameters of either that nothing is mapped to.
    """
    for split in _splits(reference, free[0], target, free[1]):
        steps = "concat 0", _TOGETHER[split.is_transposed].format(split.whole.shape[0])
        yield Entry(_places([split.whole]), _places(split.matrices), {}, steps, "values", _REASON)
    for split in _splits(target, free[1], reference, free[0]):
        steps = _APART[split.is_transposed], "unstack 0"
        yield Entry(_places(split.matrices), _places([split.whole]), {}, steps, "values", _REASON)


def _splits(
    archive: Archive, wholes: Sequence[Record], other: Archive, free: Sequence[Record]
) -> Iterator[_Split]:
    """How each tensor of all experts is split, in one way for all layers.

    1. A tensor is split in each way that its shape allows, see `_ways`.
    2. Ways that differ in numbers of names alone, as of layers, are one. Of those of a tensor that one is
       taken whose names say the order (`gate_up_proj`, and matrices `gate` and `up`), else that in which most
       values agree, of all layers together, so that a layer whose matrices are exchanged is compared.
    3. It counts if most values of some layer agree in any way.
    """
    ways: dict[str, dict[tuple[object, ...], list[_Split]]] = {}
    for whole in wholes:
        for split in _ways(archive, whole, other, free):
            pattern = name_pattern(whole.key.text)
            way = (*(name_pattern(r.key.text) for r in split.matrices[:2]), split.is_transposed)
            ways.setdefault(pattern, {}).setdefault(way, []).append(split)
    for by_way in ways.values():
        if not any(2 * split.close > len(split.matrices) for splits in by_way.values() for split in splits):
            continue
        yield from max(
            by_way.values(),
            key=lambda splits: (
                splits[0].names_say,
                sum(split.close for split in splits),
                not splits[0].is_transposed,
            ),
        )


def _places(records: Sequence[Record]) -> tuple[str, ...]:
    return tuple(f"{record.key.site}/{record.key.slot}" for record in records)


def _ways(archive: Archive, whole: Record, other: Archive, free: Sequence[Record]) -> Iterator[_Split]:
    """The ways in which a tensor of all experts can be split.

    Candidates have the numbers of the tensor's name, such as that of its layer, and one more, the expert's.
    """
    if len(whole.shape) != 3:
        return
    by_place: dict[tuple[str, str], list[Record]] = {}
    for record in free:
        before, _, behind = name_pattern(record.key.text, last=True).partition("{}")
        if len(record.shape) == 2 and name_numbers(before) == name_numbers(whole.key.text):
            by_place.setdefault((before, behind), []).append(record)
    experts = whole.shape[0]
    groups = {
        place: sorted(records, key=lambda record: name_numbers(record.key.text)[-1])
        for place, records in by_place.items()
        if len(records) == experts
    }
    for (one, first), (two, second) in permutations(groups.items(), 2):
        wide, size = first[0].shape
        if one[0] != two[0] or {record.shape for record in (*first, *second)} != {(wide, size)}:
            continue
        for is_transposed, shape in enumerate(((2 * wide, size), (size, 2 * wide))):
            if whole.shape[1:] != shape:
                continue
            tensor = archive.load(whole).astype(np.float32)
            tensor = tensor.swapaxes(1, 2) if is_transposed else tensor
            pairs = zip(tensor[:, :wide], tensor[:, wide:], first, second, strict=True)
            close = sum(
                _is_close(half, other, record) for a, b, x, y in pairs for half, record in ((a, x), (b, y))
            )
            matrices = tuple(record for both in zip(first, second, strict=True) for record in both)
            names_say = _names_say(whole.key.text, one[1], two[1])
            yield _Split(whole, matrices, bool(is_transposed), close, names_say)


def _names_say(whole: str, first: str, second: str) -> int:
    """1 if names say that the first matrix stands before the second, -1 if behind it, 0 if neither."""
    orders = []
    for one, two in _ROLES:
        texts = (whole.rpartition(".")[2], first, second)
        in_whole, in_first, in_second = (
            [word in re.split(r"[^a-z]+", t.lower()) for word in (one, two)] for t in texts
        )
        if all(in_whole) and in_first != in_second and sum(in_first) == sum(in_second) == 1:
            is_before = texts[0].lower().index(one) < texts[0].lower().index(two)
            orders.append(1 if in_first[0] == is_before else -1)
    return orders[0] if orders else 0


def _is_close(matrix: np.ndarray, archive: Archive, record: Record) -> bool:
    other = archive.load(record).astype(np.float32)
    return bool(np.linalg.norm(matrix - other) <= _CLOSE * np.linalg.norm(matrix))
