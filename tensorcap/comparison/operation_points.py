"""The sync points of a comparison: which node each operation computes, and what came of comparing both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from tensorcap.alignment import node_sites
from tensorcap.comparison.bands import Bands, SyncMetric, metric_values, peak_of
from tensorcap.comparison.comparison import Comparison
from tensorcap.comparison.held_values import is_held
from tensorcap.comparison.node_flow import NodeFlow
from tensorcap.comparison.pair import GREEN, Pair, Status
from tensorcap.comparison.pairing import UNNAMED
from tensorcap.comparison.sync_point import COMPARED, PointStatus, SyncPoint
from tensorcap.runs import is_inner
from tensorcap_formats.archive import Archive
from tensorcap_formats.keys import Key, inner_site, module_of, module_path, module_site, unescape
from tensorcap_formats.run_info import MappedOperation
from tensorcap_formats.view import ArchiveView

_NO_VALUE: Final = "the runtime gave no value"
_LEFT_OUT: Final = "left out of the comparison: the target did not compute with that value"
_NO_REFERENCE: Final = "the reference has no record of the node"
_UNMAPPED: Final = "no operation is mapped to the node"
_STATUSES: Final[Mapping[Status, PointStatus]] = {
    **dict.fromkeys(GREEN, "pass"),
    "suspect": "fail",
    "diverged": "fail",
    "nonfinite": "fail",
    "unreadable": "fail",
    "unjudged": "not judged",
    "excluded": "excluded",
    "explained": "explained",
}


def mapped_operations(reference: Archive, target: Archive) -> Sequence[MappedOperation]:
    """Which operation holds which node: as the target's run says it, else a folder of intermediates."""
    if target.info.operation_map:
        return target.info.operation_map
    for archive in (target, reference):
        rows = _rows_of_mappings(archive.info.mappings)
        if rows:
            return rows
    return reference.info.operation_map


def _rows_of_mappings(mappings: Mapping[str, Any]) -> list[MappedOperation]:
    """The rows of the mappings of a folder of intermediates (AIM-6); what is damaged in it is left out."""
    names: dict[int, str] = {}
    by_level = mappings.get("sources")
    sources = by_level.get("torch") if isinstance(by_level, Mapping) else None
    for text, source in sources.items() if isinstance(sources, Mapping) else ():
        known = source.get("identifiers") if isinstance(source, Mapping) else None
        if str(text).isdigit() and isinstance(known, list) and known and isinstance(known[0], str):
            names[int(text)] = known[0]
    targets: dict[tuple[str, int], list[tuple[int, int]]] = {}
    level = ""
    outputs = mappings.get("outputs")
    for row in outputs if isinstance(outputs, list) else ():
        if not isinstance(row, Mapping) or row.get("source_level") != "torch":
            continue
        numbers = [
            row.get(name) for name in ("source_op_id", "source_output", "target_op_id", "target_output")
        ]
        if all(type(number) is int for number in numbers) and numbers[0] in names:
            source, output, operation, own_output = (int(number or 0) for number in numbers)
            targets.setdefault((names[source], output), []).append((operation, own_output))
            level = str(row.get("target_level"))
    return [
        MappedOperation(node, "", output, level, max(ids)[0], tuple(sorted(i for i, _ in ids)), max(ids)[1])
        for (node, output), ids in targets.items()
    ]


class OperationPoints:
    """Makes the points of two runs.

    Args:
        comparison: Of the two runs.
        reference: The trusted archive, as it was compared.
        target: The archive under test, as it was compared.
        metric: The metric of the colours.
        bands: Their bands.
    """

    def __init__(
        self,
        comparison: Comparison,
        reference: Archive,
        target: Archive,
        metric: SyncMetric,
        bands: Bands,
    ) -> None:
        self._reference, self._target = reference, target
        self._metric, self._bands = metric, bands
        self._pairs = [p for p in comparison.pairs if p.reference is not None or p.target is not None]
        self.flow = NodeFlow(reference, target, self._pairs)
        self._by_place: dict[tuple[str, int], Pair] = {}
        for pair in self._pairs:
            record = pair.reference or pair.target
            assert record is not None
            if is_inner(record.key) and record.key.step == 0 and record.key.slot.startswith("output"):
                self._by_place.setdefault((record.key.site, _output_of(record.key.slot)), pair)
        self._sites = _sites_by_node(target)
        self._recorded = {
            (unescape(record.key.site.partition(":")[2]), _output_of(record.key.slot))
            for record in _run_of(target).records
            if is_inner(record.key)
        }
        self._reasons = {point.site: point.reason for point in target.info.points if point.reason}
        self._known = {Key.parse(f"{place}/op").site: node for place, node in self.flow.nodes.items()}

    def of_operations(self, rows: Iterable[MappedOperation]) -> Iterator[SyncPoint]:
        """Yield a point for each mapped output."""
        for row in rows:
            site = self._sites.get(row.node) or inner_site(module_site(row.module), row.node)
            pair = self._by_place.get((site, row.output))
            status, reason = self._status(site, pair, row)
            node = self._known.get(site)
            is_known = node is not None or (pair is not None and pair.reference is not None)
            yield SyncPoint(
                operation=row.op or "operation",
                operation_id=row.op_id,
                node=unescape(site.partition(":")[2]) if is_known else "",
                target_node=row.node,
                output=row.output,
                module=module_path(module_of(site)) if is_known else row.module,
                file=row.file or (node.file or "" if node else ""),
                line=row.line if row.file or node is None else node.line,
                status=status,
                reason=reason,
                **self._measures(pair, status),
                is_failure_source=status == "fail" and self._is_source(site),
            )

    def unmapped(self, rows: Iterable[MappedOperation]) -> Iterator[SyncPoint]:
        """Yield a point for each node of the reference with values that no operation is mapped to."""
        mapped = {
            (self._sites.get(row.node) or inner_site(module_site(row.module), row.node), row.output)
            for row in rows
        }
        for (site, output), pair in self._by_place.items():
            if pair.reference is None or (site, output) in mapped or pair.reason == UNNAMED:
                continue
            if pair.is_compared and pair.target is not None:
                continue  # of an operation that is not in the table and has the node's name
            node = self._known.get(site)
            yield SyncPoint(
                operation="",
                operation_id=None,
                node=unescape(site.partition(":")[2]),
                target_node="",
                output=output,
                module=module_path(module_of(site)),
                file=node.file or "" if node else "",
                line=node.line if node else None,
                status="excluded" if pair.status == "excluded" else "not mapped",
                reason=pair.reason or _UNMAPPED,
                key=pair.key,
                verdict=pair.status,
            )

    def _status(self, site: str, pair: Pair | None, row: MappedOperation) -> tuple[PointStatus, str]:
        """What came of a mapped output, and why."""
        if pair is None and (row.node, row.output) in self._recorded:
            return "excluded", _LEFT_OUT
        if pair is None or pair.target is None:
            if pair is not None and pair.status == "excluded":
                return "excluded", pair.reason
            return "no target value", self._reasons.get(site) or _NO_VALUE
        if pair.reference is None:
            return "no reference value", self._why_no_reference(site)
        if is_held(pair):
            return "holds another value", pair.reason
        if pair.status == "shape-mismatch":
            is_ambiguous = pair.reference.size == pair.target.size
            return "shape ambiguous" if is_ambiguous else "fail", pair.reason
        if pair.status == "nonfinite" and pair.difference is not None and not pair.reason:
            at = list(pair.difference.mask_index or ())
            return "fail", f"{pair.difference.mask_mismatches} elements are not finite alike, first at {at}"
        reason = pair.reason or "; ".join(f.text for f in pair.findings if f.status == pair.status)
        return _STATUSES.get(pair.status, "fail"), "" if pair.is_green and not pair.reason else reason

    def _why_no_reference(self, site: str) -> str:
        """Why the reference has no record of a node: it may be a view, whose values stand elsewhere."""
        node = self._known.get(site)
        if node is None or not self.flow.is_view(node.where):
            return _NO_REFERENCE
        value = node.outputs[0]
        if value.key is None:
            return f"a view of the parameter {value.parameter}"
        return f"a view of {unescape(Key.parse(value.key).site.partition(':')[2]) or value.key}"

    def _measures(self, pair: Pair | None, status: PointStatus) -> dict[str, Any]:
        if pair is None:
            return {}
        own = {"key": pair.key, "verdict": pair.status}
        if status not in COMPARED or not pair.is_compared:
            return own
        metrics = metric_values(pair.difference)
        peak = peak_of(pair.difference)
        shade = self._bands.shade(self._metric, metrics[self._metric], peak)
        return {**own, "metrics": metrics, "peak": peak, "band": shade}

    def _is_source(self, site: str) -> bool:
        """Whether all nodes with compared values that a node is computed from are equal (SYN-21)."""
        node = self._known.get(site)
        if node is None:
            return False

        def has_values(place: str) -> bool:
            return any(pair.is_compared and not is_held(pair) for pair in self.flow.pairs(place))

        inputs = self.flow.nearest_inputs(node.where, has_values)
        compared = [p for place in inputs for p in self.flow.pairs(place) if p.is_compared]
        return all(p.is_equal or p.status in ("explained", "excluded") for p in compared)


def _run_of(archive: Archive) -> Archive:
    """The archive that a view shows."""
    while isinstance(archive, ArchiveView):
        archive = archive.source
    return archive


def _sites_by_node(target: Archive) -> dict[str, str]:
    """Sites of the target's nodes in its view, by their names in the target's graph."""
    moved, run = node_sites(target), _run_of(target)
    own = (*(point.site for point in run.info.points), *(record.key.site for record in run.records))
    return {unescape(site.partition(":")[2]): moved.get(site, site) for site in own if ":" in site}


def _output_of(slot: str) -> int:
    """Which output a slot is."""
    _, _, number = slot.partition(".")
    return int(number) if number.isdigit() else 0
