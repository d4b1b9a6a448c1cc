"""The records of an archive by module and by contents: read once, and looked up for each layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property

from tensorcap.runs import contents_of, is_parameter
from tensorcap_formats.archive import Archive
from tensorcap_formats.records import Record


class RecordIndex:
    """The records of an archive, to be looked up many times.

    Attributes:
        archive: Whose records they are.
    """

    def __init__(self, archive: Archive) -> None:
        self.archive = archive

    def parameters(self, site: str) -> Mapping[str, Record]:
        """The parameters and buffers of a module whose values the archive holds, by slot."""
        return self._parameters.get(site, {})

    def tensors(self, site: str) -> Sequence[Record]:
        """What a module was given and made."""
        return self._tensors.get(site, ())

    def holders(self, record: Record) -> Sequence[Record]:
        """The records of this archive that hold what a record holds, parameters aside."""
        return self._holders.get(contents_of(record), ())

    @cached_property
    def _parameters(self) -> Mapping[str, Mapping[str, Record]]:
        parameters: dict[str, dict[str, Record]] = defaultdict(dict)
        for record in self.archive.records:
            if is_parameter(record.key) and record.stored:
                parameters[record.key.site][record.key.slot] = record
        return parameters

    @cached_property
    def _tensors(self) -> Mapping[str, Sequence[Record]]:
        tensors: dict[str, list[Record]] = defaultdict(list)
        for record in self.archive.records:
            if not is_parameter(record.key):
                tensors[record.key.site].append(record)
        return tensors

    @cached_property
    def _holders(self) -> Mapping[object, Sequence[Record]]:
        holders: dict[object, list[Record]] = defaultdict(list)
        for record in self.archive.records:
            if record.digest and not is_parameter(record.key):
                holders[contents_of(record)].append(record)
        return holders
