"""Nodes of graphs under the names that the other run has for them (AIM-20, SYN-1 to SYN-4)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from tensorcap.alignment.node_sequences import GraphNode, pair_nodes, without_ones
from tensorcap.alignment.operation_pairs import pair_operations
from tensorcap.alignment.views import UNMAPPED, renamed_values
from tensorcap.runs import Graph, Value, ViewRecords, is_fact, is_inner, ops_of
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import ROOT_SITE, Key, escape, inner_site, module_of, module_site, unescape
from tensorcap_formats.records import Record
from tensorcap_formats.run_info import RunInfo
from tensorcap_formats.view import ArchiveView

_CONTAINER: Final = "intermediates-folder"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a record of the target stands in a view.

    Attributes:
        key: Its key there.
        shape: Its shape there, of as many elements in the same order.
        steps: Layout steps to that shape; empty if it has it, or if `reason` says why it is given it.
        reason: Why it belongs there; "" if its name says so.
    """

    key: Key
    shape: tuple[int, ...]
    steps: tuple[str, ...] = ()
    reason: str = ""


class NodeArchive(ArchiveView):
    """Records of nodes under the sites, and in the shapes, that another archive has for these nodes.

    Attributes:
        sites: Sites of nodes in the other archive by those in this one.
        placements: Records that stand elsewhere, or in another shape, by key text in the view.
    """

    def __init__(
        self, source: Archive, sites: Mapping[str, str], placements: Mapping[str, Placement] | None = None
    ) -> None:
        self.sites = sites
        self.placements: dict[str, Placement] = {}
        records, sources = [], {}
        for record in source.records:
            placement = (placements or {}).get(record.key.text)
            key = replace(record.key, site=sites.get(record.key.site, record.key.site))
            shape = record.shape
            if placement is not None:
                key, shape = placement.key, placement.shape
                self.placements[key.text] = placement
            records.append(replace(record, key=key, shape=shape))
            sources[key.text] = (record,)
        super().__init__(
            source,
            records,
            sources,
            values=renamed_values(source.values, sites),
            root=source.root,
            is_direct=source.is_direct,
        )

    @cached_property
    def info(self) -> RunInfo:
        """What the source's metadata say, with the names that nodes have here."""
        points = tuple(
            replace(point, site=self.sites.get(point.site, point.site)) for point in self.source.info.points
        )
        return replace(self.source.info, points=points)


def node_sites(archive: Archive) -> Mapping[str, str]:
    """Sites of nodes in a view of a run, by those in the run, as far as they differ."""
    view = _view_of_nodes(archive)
    return {} if view is None else view.sites


def placement_of(archive: Archive, text: str) -> tuple[Placement, Record] | None:
    """Where a record of a view of nodes was placed, and the record of the run; None if it was not."""
    view = _view_of_nodes(archive)
    placement = None if view is None else view.placements.get(text)
    return None if view is None or placement is None else (placement, view.sources[text][0])


def _view_of_nodes(archive: Archive) -> NodeArchive | None:
    while isinstance(archive, ArchiveView):
        if isinstance(archive, NodeArchive):
            return archive
        archive = archive.source
    return None


def names_nodes(archive: Archive) -> bool:
    """Whether a run's records are of operations of a compiled program, under names of nodes of its graph."""
    return bool(archive.info.operation_map)


def share_nodes(reference: Archive, target: Archive) -> bool:
    """Whether one side is of a compiled program, and both recorded nodes of graphs."""
    return (names_nodes(reference) or names_nodes(target)) and all(
        next(_nodes(archive), None) is not None for archive in (reference, target)
    )


def at_modules(reference: Archive, target: Archive) -> tuple[Archive, Archive]:
    """View runs of a graph so that its nodes have the same names on both sides.

    1. Of a folder of intermediates, if the other side recorded nodes of an exported graph in modules and has
       every operator of the folder, under one site, the operators stand at these sites (AIM-20); what the
       run has as views of other tensors is beside them (AIM-47).
    2. If one side is of a compiled program, and the other of a graph, nodes are paired, see `paired_names`;
       the target's stand where the reference has its own (SYN-1).

    Returns:
        The reference and the target, viewed if a condition holds.
    """
    if not (names_nodes(reference) or names_nodes(target)):
        reference, target = _viewed(reference, target), _viewed(target, reference)
        return _with_views(reference, target), _with_views(target, reference)
    ours, theirs = list(_nodes(reference)), list(_nodes(target))
    if not (ours and theirs):
        return reference, target
    names, ours_by_name = paired_names(reference, target), {node.name: node for node in ours}
    partners = {
        target_name: ours_by_name[name] for name, target_name in names.items() if name in ours_by_name
    }
    pairs = [(partners[node.name], node) for node in theirs if node.name in partners]
    at_sites = {r.site: t.site for r, t in pairs if r.module is None and t.module is not None}
    if at_sites:
        at_sites = {own: _renamed(site, own) for own, site in at_sites.items()}
        reference = NodeArchive(reference, at_sites)
    sites = {t.site: at_sites.get(r.site, r.site) for r, t in pairs}
    if ops_of(reference):
        texts = [replace(r.key, site=sites.get(r.key.site, r.key.site)).text for r in target.records]
        reference = ViewRecords.of(reference, texts)
    taken = set(sites.values()) | {at_sites.get(node.site, node.site) for node in ours}
    taken |= {record.key.site for record in reference.records if is_inner(record.key)}
    own = {node.site for node in theirs}
    if not (names_nodes(reference) and names_nodes(target)):  # of two programs see `ProgramPair`
        own |= {record.key.site for record in target.records if is_inner(record.key)}
    for site in own - sites.keys():  # of no partner; an operation that no node names has a number of its own
        if site in taken:
            sites[site] = inner_site(UNMAPPED, site)
    by = (
        "what it computes of what" if _says_inputs(reference, target) else "module, operator, order and shape"
    )
    placements = dict(_placements(reference, target, sites, by))
    moved = {own: site for own, site in sites.items() if own != site}
    return reference, NodeArchive(target, moved, placements) if moved or placements else target


def paired_names(reference: Archive, target: Archive) -> dict[str, str]:
    """Names of nodes of the target's graph by those of the reference's.

    1. If both runs say what each node computes of what, and have modules of the same names, by that, see
       `pair_operations` (ALN-200).
    2. Else by module, operator, order and shape, see `pair_nodes` (SYN-2).
    """
    if _says_inputs(reference, target):
        return pair_operations(reference.info.exported_nodes, target.info.exported_nodes)
    ours, theirs = list(_nodes(reference)), list(_nodes(target))
    if _modules(ours) and not _modules(ours) & _modules(theirs):  # it has other names for them, or none
        theirs = [replace(node, module=None) for node in theirs]
    return {node.name: other.name for node, other in pair_nodes(ours, theirs)}


def _says_inputs(reference: Archive, target: Archive) -> bool:
    ours, theirs = ({node.module for node in run.info.exported_nodes} for run in (reference, target))
    return bool(ours and theirs) and (ours <= {""} or bool((ours & theirs) - {""}))


def _modules(nodes: Iterable[GraphNode]) -> set[str | None]:
    """The modules that nodes lie in, without the model itself."""
    return {node.module for node in nodes} - {None, ROOT_SITE}


def _renamed(site: str, own: str) -> str:
    """The name of a node at the module of another site."""
    return inner_site(module_of(site), unescape(own.partition(":")[2]))


def _nodes(archive: Archive) -> Iterator[GraphNode]:
    """The nodes of a run's graph, as far as it says; none of a run that recorded no graph."""
    shapes = {r.key.site: r.shape for r in reversed(archive.records) if is_inner(r.key)}
    if names_nodes(archive):
        points = (point.site for point in archive.info.points if ":" in point.site)
        sites = {site.partition(":")[2]: site for site in (*points, *shapes)}
        for name, module in {row.node: row.module for row in archive.info.operation_map}.items():
            site = sites.get(escape(name)) or inner_site(module_site(module), name)
            yield GraphNode(name, site, module_of(site), shapes.get(site))
        return
    if archive.container == _CONTAINER:
        for site, shape in shapes.items():
            yield GraphNode(unescape(site.partition(":")[2]), site, None, shape)
        return
    scope = archive.info.scope
    if scope is None or scope.level != "export" or not ops_of(archive):
        return
    for site, node in {Key.parse(f"{node.where}/op").site: node for node in Graph.of(archive).nodes}.items():
        views = (value.view.shape for value in node.outputs if value.view is not None)
        known = shapes[site] if site in shapes else next(views, None)
        yield GraphNode(unescape(site.partition(":")[2]), site, module_of(site), known)


def _placements(
    reference: Archive, target: Archive, sites: Mapping[str, str], by: str
) -> Iterator[tuple[str, Placement]]:
    """Where the target's records stand: nodes at those of the reference, results at those of its model."""
    records = {record.key.text: record for record in reference.records}
    shapes = _view_shapes(reference)
    slots = _slots_of_model(reference.records, target.records)
    for record in target.records:
        key = record.key
        if not is_inner(key):
            slot = slots.get(key.slot, key.slot) if key.site == ROOT_SITE else key.slot
            partner = records.get(replace(key, slot=slot).text)
            if slot != key.slot and partner is not None:
                steps = steps_between_ones(record.shape, partner.shape)
                yield key.text, Placement(partner.key, partner.shape, steps, "in the order of results")
            continue
        partner = records.get(replace(key, site=sites.get(key.site, key.site)).text)
        if partner is None:
            continue
        placement = _placed(record, partner, shapes.get(partner.key.text, {}), by)
        if placement is not None:
            yield key.text, placement


def _placed(
    record: Record, partner: Record, views: Mapping[tuple[int, ...], str], by: str
) -> Placement | None:
    """A record of a node at its partner's place; None if it stands there as it is."""
    reason = ""
    if record.key.site != partner.key.site:
        reason = f"the node {_name(partner)} of the reference is {_name(record)} of the target, by {by}"
    if record.shape == partner.shape:
        return Placement(partner.key, partner.shape, (), reason) if reason else None
    if without_ones(record.shape) == without_ones(partner.shape):
        steps = steps_between_ones(record.shape, partner.shape)
        return Placement(partner.key, partner.shape, steps, reason or "axes of length 1")
    view = views.get(without_ones(record.shape))
    if view is not None and record.size == partner.size:
        fused = f"it has the shape {list(record.shape)}, which {view} of the reference gives to the tensor"
        return Placement(partner.key, partner.shape, (), f"{reason}; {fused}" if reason else fused)
    return Placement(partner.key, record.shape, (), reason) if reason else None


def _name(record: Record) -> str:
    return unescape(record.key.site.partition(":")[2])


def _view_shapes(reference: Archive) -> dict[str, dict[tuple[int, ...], str]]:
    """Shapes, without axes of length 1, in which nodes of a graph show a whole tensor in its own order.

    Returns:
        By key of the tensor and shape, the name of the first such node.
    """
    shapes = defaultdict[str, dict[tuple[int, ...], str]](dict)
    if not ops_of(reference):
        return shapes
    sizes = {record.key.text: record.size for record in reference.records}
    for node in Graph.of(reference).nodes:
        for value in node.outputs:
            if value.key in sizes and _is_whole(value, sizes[value.key]):
                assert value.view is not None
                name = unescape(Key.parse(f"{node.where}/op").site.partition(":")[2])
                shapes[value.key].setdefault(without_ones(value.view.shape), name)
    return shapes


def _is_whole(value: Value, size: int) -> bool:
    """Whether a view shows all elements of a tensor of a size, in the order of the tensor."""
    view = value.view
    if view is None or view.offset or math.prod(view.shape) != size:
        return False
    step = 1
    for length, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if length != 1 and stride != step:
            return False
        step *= length
    return True


def _slots_of_model(reference: Sequence[Record], target: Sequence[Record]) -> dict[str, str]:
    """Slots of the model's results and arguments in the reference, by those in the target (SYN-4).

    A compiled program has names of its own for them: if neither side has a name of the other, and both have
    as many, of the same sizes, they are the same in order.
    """
    slots: dict[str, str] = {}
    for kind in ("output", "input"):
        ours, theirs = (_of_model(records, kind) for records in (reference, target))
        is_alike = [size for _, size in ours.items()] == [size for _, size in theirs.items()]
        if is_alike and not ours.keys() & theirs.keys():
            slots.update(zip(theirs, ours, strict=True))
    return slots


def _of_model(records: Iterable[Record], kind: str) -> dict[str, int]:
    """Sizes of the model's results, or arguments, by slot."""
    return {
        record.key.slot: record.size
        for record in records
        if record.key.site == ROOT_SITE and record.key.slot.partition(".")[0] == kind
    }


def steps_between_ones(shape: Sequence[int], aim: Sequence[int]) -> tuple[str, ...]:
    """Layout steps between two shapes that differ in axes of length 1 only.

    Example:
        >>> steps_between_ones((1, 8, 32), (8, 32)), steps_between_ones((8,), (1, 8, 1))
        (('squeeze 0',), ('unsqueeze 0', 'unsqueeze 2'))
    """
    steps: list[str] = []
    current, axis = list(shape), 0
    while tuple(current) != tuple(aim):
        own = current[axis] if axis < len(current) else None
        wanted = aim[axis] if axis < len(aim) else None
        if own == wanted:
            axis += 1
        elif wanted == 1:
            steps.append(f"unsqueeze {axis}")
            current.insert(axis, 1)
        elif own == 1:
            steps.append(f"squeeze {axis}")
            del current[axis]
        else:
            return ()
    return tuple(steps)


def _with_views(run: Archive, folder: Archive) -> Archive:
    """The run with those of its views as records that a folder, which has no views, has records of."""
    if folder.container != _CONTAINER or not ops_of(run):
        return run
    return ViewRecords.of(run, (record.key.text for record in folder.records))


def _viewed(folder: Archive, run: Archive) -> Archive:
    scope = run.info.scope
    is_run = run.container != _CONTAINER and scope is not None and scope.level == "export"
    if folder.container != _CONTAINER or not is_run:
        return folder
    sites = defaultdict[str, set[str]](set)
    places = (Key.parse(text).site for text in run.values if is_fact(text, run.values[text]))
    for site in (*places, *(record.key.site for record in run.records if is_inner(record.key))):
        sites[f"{ROOT_SITE}:{site.partition(':')[2]}"].add(site)
        sites[site].add(site)  # of a folder that names modules
    nodes = {record.key.site for record in folder.records if is_inner(record.key)}
    if not all(len(sites[node]) == 1 for node in nodes):
        return folder
    return NodeArchive(folder, {node: next(iter(sites[node])) for node in nodes})
