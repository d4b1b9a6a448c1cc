"""Dumps of debug prints beside another run: names that both sides gave by hand, and abbreviated tensors.

A value that is printed in MAX under a name, and saved in torch in a file of that name, is one value. Of a log
that shows the corners of tensors, those corners of the other run's tensors are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from tensorcap.alignment.common_part import CutArchive, Part
from tensorcap_formats.archive import Archive
from tensorcap_formats.foreign import corner, parse_label
from tensorcap_formats.keys import PROBES, Key, inner_site, unescape
from tensorcap_formats.view import ArchiveView

_ABBREVIATED: Final = "abbreviated log"
_ROOT: Final = "model."  # which hooks put before the names of modules


class _RenamedArchive(ArchiveView):
    """Tensors of files under the keys that a dump has for their names."""

    def __init__(self, source: Archive, keys: dict[str, Key]) -> None:
        records = [replace(r, key=keys.get(r.key.text, r.key)) for r in source.records]
        sources = {new.key.text: (old,) for new, old in zip(records, source.records, strict=True)}
        super().__init__(source, records, sources, is_direct=source.is_direct)


def as_printed(reference: Archive, target: Archive) -> tuple[Archive, Archive]:
    """View two runs, one of which is a dump of debug prints, so that both have what was printed.

    1. If the other has tensors with bare names, as of files that a user saved, those whose names are labels
       of the dump stand at its keys.
    2. If the dump is a log that abbreviates, the other's tensors are cut to the elements that it shows.

    Returns:
        The reference and the target, viewed if a condition holds.
    """
    ours, theirs = _named(reference, target), _named(target, reference)
    return _cut(ours, theirs), _cut(theirs, ours)


def _named(files: Archive, dump: Archive) -> Archive:
    if not dump.info.dump or not any(record.key.is_bare for record in files.records):
        return files
    keys: dict[str, Key] = {}
    for record in files.records:
        if record.key.is_bare:
            known = [key for key in _meanings(unescape(record.key.site)) if key.text in dump]
            if known:
                keys[record.key.text] = known[0]
    is_one_to_one = len({key.text for key in keys.values()}) == len(keys)
    return _RenamedArchive(files, keys) if keys and is_one_to_one else files


def _meanings(name: str) -> Iterator[Key]:
    """The keys of a dump that a name may mean: of a layer, with or without the model's name, or a print's."""
    for text in (name, name.removeprefix(_ROOT)):
        label = parse_label(text)
        if label is not None:
            yield label.key(0)
    yield Key(inner_site(PROBES, name.replace("/", "_")), "value", 0)
    yield Key(inner_site(PROBES, name), "value", 0)


def _cut(run: Archive, log: Archive) -> Archive:
    if log.info.dump != _ABBREVIATED or run.info.dump == _ABBREVIATED:
        return run
    parts: dict[str, Part] = {}
    for record in run.records:
        corners = {axis: corner(size) for axis, size in enumerate(record.shape)}
        shortened = {axis: part for axis, part in corners.items() if part.size < record.shape[axis]}
        if shortened:
            parts[record.key.text] = shortened
    if not parts:
        return run
    text = "The log shows three elements at each end of an axis: only those are compared."
    return CutArchive(run, parts, text, run.info)
