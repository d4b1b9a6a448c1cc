"""Which tensors of one run can stand in the place of another run's own, and which cannot."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

from tensorcap.recording import no_fit
from tensorcap.runs import is_inner
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError
from tensorcap_formats.keys import ROOT_SITE, Key
from tensorcap_formats.records import Record

_MOST_MISFITS: Final = 0.5  # of the tensors: versions of one model differ in some, other models in most


def exchangeable(source: Archive, run: Archive) -> Collection[str]:
    """Key texts of an archive's tensors that can stand in the place of a run's own.

    Raises:
        UsageError: There are none.
    """
    keys = {record.key.text for record in source.records if _is_exchangeable(run, record)}
    if not keys:
        raise UsageError(
            f"{source.path}: has no argument or result of a module that the other side has",
            hint="tcap align tells what belongs together.",
        )
    return keys


def _is_exchangeable(run: Archive, record: Record) -> bool:
    """Whether a record has the shape and kind of the run's own under its key."""
    key = record.key
    if not (is_slot(key) and record.stored and key.text in run):
        return False
    own = run.get(key.text)
    kinds = {own.dtype.kind, record.dtype.kind}
    return own.shape == record.shape and (len(kinds) == 1 or kinds == {"float", "bool"})


def natural_arguments(run: Archive, keys: Collection[str]) -> Iterator[str]:
    """Key texts of arguments of a run that nothing replaced."""
    for record in run.records:
        key = record.key
        if key.slot.startswith("input") and not is_inner(key) and key.text not in keys:
            yield key.text


def is_slot(key: Key) -> bool:
    """Whether a key is of an argument or a result of a module's call."""
    kind = key.slot.partition(".")[0]
    return kind in ("input", "output") and not key.rank and not key.is_bare and not is_inner(key)


def unlike_calls(reference: Archive, run: Archive) -> dict[str, None]:
    """The modules that both runs called, and not equally often, as another version of their code may."""
    ours, theirs = (
        {point.site: point.calls for point in archive.info.points if point.calls and not point.slots}
        for archive in (reference, run)
    )
    return {site: None for site, calls in ours.items() if theirs.get(site, calls) != calls}


def misfits(target: Archive, run: Archive, keys: Collection[str]) -> tuple[str, ...]:
    """Key texts of what the model has in another shape than the runs, as another version of its code may.

    Raises:
        UsageError: So it is with one of the model itself, or with most: this is another model.
    """
    records = [record for record in target.records if record.key.text in keys and record.key.text in run]
    misfitting = [record for record in records if not _is_exchangeable(run, record)]
    of_model = [record for record in misfitting if record.key.site == ROOT_SITE]
    if of_model or len(misfitting) > _MOST_MISFITS * len(records):
        first = (of_model or misfitting)[0]
        raise no_fit(target, first.key, first.shape, run.get(first.key.text).shape)
    return tuple(record.key.text for record in misfitting)
