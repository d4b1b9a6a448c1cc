"""Nodes of a graph in a file that names no modules, at the modules that a run of the graph names."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Final

from tensorcap.runs import is_inner
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import ROOT_SITE
from tensorcap_formats.view import ArchiveView

_CONTAINER: Final = "intermediates-folder"


class NodeArchive(ArchiveView):
    """Records of nodes under the sites that another archive has for these nodes."""

    def __init__(self, source: Archive, sites: dict[str, str]) -> None:
        records = [
            replace(record, key=replace(record.key, site=sites.get(record.key.site, record.key.site)))
            for record in source.records
        ]
        sources = {
            record.key.text: (original,) for record, original in zip(records, source.records, strict=True)
        }
        super().__init__(source, records, sources, root=source.root, is_direct=source.is_direct)


def at_modules(reference: Archive, target: Archive) -> tuple[Archive, Archive]:
    """View a folder of intermediates with the modules that the other archive, of that graph, names (AIM-20).

    1. Only if one side is such a folder and the other recorded nodes of an exported graph in modules.
    2. Only if the other has every operator of the folder, under one site: else it is of another graph, in
       which equal names (`add_3`) may be other operators.

    Returns:
        The reference and the target, one of them viewed if both conditions hold.
    """
    return _viewed(reference, target), _viewed(target, reference)


def _viewed(folder: Archive, run: Archive) -> Archive:
    scope = run.info.scope
    is_run = run.container != _CONTAINER and scope is not None and scope.level == "export"
    if folder.container != _CONTAINER or not is_run:
        return folder
    sites = defaultdict[str, set[str]](set)
    for record in run.records:
        if is_inner(record.key):
            _, _, node = record.key.site.partition(":")
            sites[f"{ROOT_SITE}:{node}"].add(record.key.site)
    nodes = {record.key.site for record in folder.records if is_inner(record.key)}
    if not all(len(sites[node]) == 1 for node in nodes):
        return folder
    return NodeArchive(folder, {node: next(iter(sites[node])) for node in nodes})
