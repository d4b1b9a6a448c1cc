"""Compare the parameters of two models: by value if both archives have them, else by shape."""

from __future__ import annotations

from collections.abc import Iterator

from tensorcap.comparison.exact import parameter_rounding
from tensorcap.comparison.preflight.item import Item, UnknownError, make_item
from tensorcap.metrics import measure
from tensorcap.runs import is_parameter
from tensorcap.wording import some
from tensorcap_formats.archive import Archive
from tensorcap_formats.records import Record


def compare_parameters(reference: Archive, target: Archive) -> Iterator[Item]:
    """Compare parameters, and buffers that were recorded, of the same name."""
    recorded = [
        {r.key.text: r for r in archive.records if is_parameter(r.key)} for archive in (reference, target)
    ]
    common_records = [key for key in recorded[0] if key in recorded[1]]
    if common_records:
        yield from _parameter_values(
            reference, target, [(recorded[0][k], recorded[1][k]) for k in common_records]
        )
        return
    sides = [
        {
            f"{site}.{name}": about.shape
            for site, module in archive.info.modules.items()
            for name, about in module.parameters.items()
        }
        for archive in (reference, target)
    ]
    common = [name for name in sides[0] if name in sides[1]]
    if not common:
        raise UnknownError("the parameters of the two have no name in common")
    for name in common:
        ours, theirs = (None if side[name] is None else list(side[name] or ()) for side in sides)
        if ours != theirs:
            yield make_item("parameters", name, ours, theirs, "Its shapes differ.", explains=True)
    for kind, one, other in (("reference", 0, 1), ("target", 1, 0)):
        lost = [name for name in sides[other] if name not in sides[one]]
        if lost:
            text = f"The {kind} lacks {len(lost)} parameters of the other: {some(lost)}."
            yield make_item("parameters", lost[0], one, other, text, explains=False, rank=2)


def _parameter_values(
    reference: Archive, target: Archive, pairs: list[tuple[Record, Record]]
) -> Iterator[Item]:
    unlike = []
    for ours, theirs in pairs:
        if ours.shape != theirs.shape:
            shapes = list(ours.shape), list(theirs.shape)
            yield make_item("parameters", ours.key.text, *shapes, "Its shapes differ.", explains=True)
        elif not _has_equal_bits(reference, ours, target, theirs) and ours.stored and theirs.stored:
            tolerance = parameter_rounding(ours, theirs)
            difference = measure(reference, ours, target, theirs, tolerance=tolerance)
            if difference.mismatches or difference.mask_mismatches:
                unlike.append((difference.relative_frobenius or 0.0, ours))
    if unlike:
        error, worst = max(unlike, key=lambda entry: entry[0])
        text = (
            f"{len(unlike)} of {len(pairs)} parameters are not the same numbers, beyond rounding of the "
            f"dtypes: {some([record.key.text for _, record in unlike])}; the worst is off by {error:.3g} "
            "of its norm."
        )
        yield make_item("parameters", worst.key.text, 0.0, error, text, explains=True)


def _has_equal_bits(reference: Archive, ours: Record, target: Archive, theirs: Record) -> bool:
    return (
        bool(ours.digest)
        and ours.digest == theirs.digest
        and ours.dtype.name == theirs.dtype.name
        and reference.algorithm == target.algorithm
    )
