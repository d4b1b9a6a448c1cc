"""Weights of experts: one tensor of all on one side, two matrices an expert on the other.

Every Mixtral checkpoint has both projections of an expert's input apart; code that runs all experts at once
holds them as `expert, 2·wide, size`, the one after the other within each expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Final

import numpy as np

from tensorcap.alignment import Entry
from tensorcap.wording import name_numbers, name_pattern
from tensorcap_formats.archive import Archive
from tensorcap_formats.records import Record

_CLOSE: Final = 2.0**-6  # of bfloat16's rounding and some more
_REASON: Final = "each expert's two matrices are one after the other in the tensor of all; values agree"
# From matrices to the tensor, and back: experts, then both matrices of each, or their transposes
_TOGETHER: Final = ('rearrange "(a b) c -> a b c" a={}', 'rearrange "(a b) c -> a c b" a={}')
_APART: Final = ('rearrange "a (b c) d -> (a b) c d" b=2', 'rearrange "a d (b c) -> (a b) c d" b=2')


def expert_entries(
    reference: Archive, target: Archive, *, free: tuple[Sequence[Record], Sequence[Record]]
) -> Iterator[Entry]:
    """Find tensors of all experts whose two matrices an expert are apart on the other side.

    Args:
        reference: The trusted archive.
        target: The archive under test.
        free: Parameters of either that nothing is mapped to.
    """
    for whole in free[0]:
        for records, is_transposed in _matrices(reference, whole, target, free[1]):
            steps = "concat 0", _TOGETHER[is_transposed].format(whole.shape[0])
            yield Entry(_places([whole]), _places(records), {}, steps, "values", _REASON)
    for whole in free[1]:
        for records, is_transposed in _matrices(target, whole, reference, free[0]):
            steps = _APART[is_transposed], "unstack 0"
            yield Entry(_places(records), _places([whole]), {}, steps, "values", _REASON)


def _places(records: Sequence[Record]) -> tuple[str, ...]:
    return tuple(f"{record.key.site}/{record.key.slot}" for record in records)


def _matrices(
    archive: Archive, whole: Record, other: Archive, free: Sequence[Record]
) -> Iterator[tuple[list[Record], bool]]:
    """Find the matrices of a tensor of all experts, expert by expert, and whether they are transposed in it.

    Candidates have the numbers of the tensor's name, such as that of its layer, and one more, the expert's.
    Most of the values decide, so that one wrong expert is compared and not left out.
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
            close = [
                _is_close(half, other, record) for a, b, x, y in pairs for half, record in ((a, x), (b, y))
            ]
            if 2 * sum(close) > len(close):
                yield (
                    [record for both in zip(first, second, strict=True) for record in both],
                    bool(is_transposed),
                )
                return


def _is_close(matrix: np.ndarray, archive: Archive, record: Record) -> bool:
    other = archive.load(record).astype(np.float32)
    return bool(np.linalg.norm(matrix - other) <= _CLOSE * np.linalg.norm(matrix))
