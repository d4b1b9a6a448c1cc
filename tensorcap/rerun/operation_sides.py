"""Both runs of a compiled target as they are compared: operations under the reference's names and shapes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from tensorcap.rerun.operation_values import OperationValues, results_of_model
from tensorcap.runs import PartialArchive
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import ROOT_SITE
from tensorcap_formats.records import Record
from tensorcap_formats.view import ArchiveView


def is_compiled(reference: Archive, target: Archive) -> bool:
    """Whether a target was compiled from a graph that the reference ran, so that operations correspond."""
    return bool(reference.info.exported_nodes and target.info.operation_map)


def operation_sides(values: OperationValues, elsewhere: Collection[str] = ()) -> tuple[Archive, Archive]:
    """What both runs have of the inputs, the outputs and the operations of the model, under equal keys.

    Args:
        values: The target's values.
        elsewhere: The reference's key texts of what the target did not compute with.
    """
    reference, target = values.reference, values.target
    partners: dict[str, Record] = {}
    for record in target.records:
        if record.key.site == ROOT_SITE and record.key.text in reference and "input" in record.key.slot:
            partners[record.key.text] = record
    for (name, at), record in values.records.items():
        text = values.key(name, at) if name in values.places else ""
        if text in reference and text not in elsewhere:
            partners[text] = record
    ours, theirs = results_of_model(reference), results_of_model(target)
    if len(ours) == len(theirs):
        partners.update({one.key.text: other for one, other in zip(ours, theirs, strict=True)})
    records = [record for record in reference.records if record.key.text in partners]
    every = {record.key.text: record for record in records}
    every.update({record.key.text: record for record in ours})
    kept = [record for record in reference.records if record.key.text in every]
    return PartialArchive(reference, kept), _Operations(target, records, partners)


class _Operations(ArchiveView):
    """The target's records under the reference's keys, each with the same elements in the same order."""

    def __init__(self, target: Archive, ours: list[Record], partners: dict[str, Record]) -> None:
        records = []
        for record in ours:
            own = partners[record.key.text]
            shape = record.shape if record.size == own.size else own.shape
            records.append(replace(own, key=record.key, shape=shape, order=record.order))
        sources = {record.key.text: (partners[record.key.text],) for record in records}
        super().__init__(target, records, sources, is_direct=target.is_direct)
