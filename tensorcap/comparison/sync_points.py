"""Sync points: operations of a compiled program, and the nodes of the reference's graph that they compute.

A comparison says of each pair of values whether they agree. Here stands what that is of: which operations are
mapped to which nodes, how many of them could be compared, which of those that fail are computed from what
agrees, and in which modules they lie.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from tensorcap.alignment import MappingSource, node_sites, sides
from tensorcap.comparison.bands import Bands, SyncMetric, metric_values, peak_of
from tensorcap.comparison.comparison import Comparison
from tensorcap.comparison.held_values import is_held
from tensorcap.comparison.node_flow import NodeFlow
from tensorcap.comparison.pair import GREEN, Pair, Status
from tensorcap.comparison.pairing import UNNAMED
from tensorcap.comparison.pipeline import compare
from tensorcap.comparison.ranking import Shade
from tensorcap.runs import ArchiveSummary, is_inner
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError
from tensorcap_formats.json_values import json_value
from tensorcap_formats.keys import Key, inner_site, module_of, module_path, module_site, unescape
from tensorcap_formats.open import Source, opened_both
from tensorcap_formats.run_info import MappedOperation, RunInfo
from tensorcap_formats.view import ArchiveView

PointStatus = Literal[
    "pass",
    "fail",
    "holds another value",
    "explained",
    "shape ambiguous",
    "not judged",
    "no target value",
    "no reference value",
    "excluded",
    "not mapped",
]
POINT_STATUSES: Final[tuple[PointStatus, ...]] = PointStatus.__args__  # type: ignore[attr-defined] # no public name
Sort = Literal["similarity", "operation"]
COMPARED: Final = frozenset[PointStatus]({"pass", "fail", "holds another value", "explained", "not judged"})
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


@dataclass(frozen=True, slots=True)
class SyncPoint:
    """An operation of a compiled program, and the node whose value it holds.

    Attributes:
        operation: Name of the operation, "" if none is mapped to the node.
        operation_id: Its number; None if there is none.
        node: Name of the node in the reference's graph, "" if it has no such node.
        target_node: Name of the node in the target's graph, "" if no operation is mapped to it.
        output: Which output of the node.
        module: Path of the module that the node lies in, "" for the model itself.
        file: Source file, "" if unknown.
        line: Line in it; None if unknown.
        status: What came of it, in words; `pass` and `fail` are the policy's verdict of the pair.
        reason: Why, if the status does not say it.
        key: Key text of the pair, "" if there is none.
        verdict: The pair's own status, "" if there is none.
        metrics: The five metrics; empty if nothing was measured.
        peak: Largest absolute value of the reference, as far as errors say; 0 if they do not.
        band: The colour of the metric that was asked for; None if that is undefined.
        is_failure_source: Whether it fails although all that it is computed from agrees.
    """

    operation: str
    operation_id: int | None
    node: str
    target_node: str
    output: int
    module: str
    file: str
    line: int | None
    status: PointStatus
    reason: str = ""
    key: str = ""
    verdict: str = ""
    metrics: Mapping[SyncMetric, float | None] = field(default_factory=dict)
    peak: float = 0.0
    band: Shade | None = None
    is_failure_source: bool = False

    @property
    def name(self) -> str:
        """Operation and node.

        Example:
            >>> SyncPoint("coreai.mul", 34, "mul_4", "mul_5", 0, "mlp", "", None, "pass").name
            'coreai.mul #34 = mul_4 (mul_5 in the target)'
        """
        number = "" if self.operation_id is None else f" #{self.operation_id}"
        operation = f"{self.operation}{number}" if self.operation else "(no operation)"
        node = self.node or self.target_node
        output = f" output {self.output}" if self.output else ""
        is_other = self.node and self.target_node and self.node != self.target_node
        return f"{operation} = {node}{output}{f' ({self.target_node} in the target)' if is_other else ''}"

    @property
    def source(self) -> str:
        """File and line, "" if unknown."""
        return f"{self.file}:{self.line}" if self.file and self.line is not None else self.file


@dataclass(frozen=True, slots=True)
class ModuleShare:
    """How many points of a module are bad.

    Attributes:
        module: Its path, "" for the model itself.
        compared: Points with values on both sides.
        failed: Those that the policy fails.
        red: Those whose metric is in the red band.
    """

    module: str
    compared: int
    failed: int
    red: int


@dataclass(frozen=True, slots=True)
class SyncPoints:
    """All sync points of two runs.

    Attributes:
        reference: The trusted archive.
        target: The archive of the compiled program.
        settings: Settings of both runs by name, reference first; None where a run has none.
        precision: The precision that errors were held against, "" if unknown.
        metric: The metric of the colours and of the order by similarity.
        bands: The bands of the colours.
        points: In the order of the target's operations, then nodes that none is mapped to.
        has_graph: Whether a run says what is computed from what, so that failure sources are known.
        exit_status: As that of the comparison.
    """

    reference: ArchiveSummary
    target: ArchiveSummary
    settings: Mapping[str, tuple[Any, Any]]
    precision: str
    metric: SyncMetric
    bands: Bands
    points: Sequence[SyncPoint]
    has_graph: bool
    exit_status: int

    @property
    def mapped(self) -> int:
        """Count of outputs of nodes that operations are mapped to: the denominator."""
        return sum(bool(point.operation) for point in self.points)

    @property
    def compared(self) -> int:
        """Count of those whose values were compared."""
        return sum(bool(point.operation) and point.status in COMPARED for point in self.points)

    @property
    def counts(self) -> dict[PointStatus, int]:
        """How many points have each status that occurs."""
        counts = Counter(point.status for point in self.points)
        return {status: counts[status] for status in POINT_STATUSES if counts[status]}

    @property
    def failure_sources(self) -> Sequence[SyncPoint]:
        """Points that fail although all that they are computed from agrees."""
        return [point for point in self.points if point.is_failure_source]

    @property
    def modules(self) -> Sequence[ModuleShare]:
        """Shares of bad points by module, the largest share of failed ones first, then of red ones."""
        members: dict[str, list[SyncPoint]] = {}
        for point in self.points:
            if point.status in COMPARED:
                members.setdefault(point.module, []).append(point)
        shares = [
            ModuleShare(
                module,
                len(points),
                sum(point.status == "fail" for point in points),
                sum(point.band == "red" for point in points),
            )
            for module, points in members.items()
        ]
        return sorted(shares, key=lambda share: (-share.failed / share.compared, -share.red / share.compared))

    @property
    def summary(self) -> str:
        """How many were compared, in a line: `62 of 208 mapped compared: 60 pass, 2 fail`."""
        counts = ", ".join(f"{count} {status}" for status, count in self.counts.items())
        return f"{self.compared} of {self.mapped} mapped compared: {counts}"

    def ordered(self, sort: Sort) -> list[SyncPoint]:
        """The points by operation, or the least similar first; those without a value last."""
        if sort == "operation":
            return list(self.points)
        return sorted(self.points, key=self._similarity)

    def _similarity(self, point: SyncPoint) -> tuple[bool, float]:
        """Sort key: what has values first, and of that the least similar, for the size of its values."""
        value = point.metrics.get(self.metric)
        if point.status not in COMPARED and point.status != "shape ambiguous":
            return True, 0.0
        if value is None or math.isnan(value):
            return False, -math.inf
        if self.metric == "psnr" or not value:
            return False, value or math.inf
        power = {"mean-squared": 2, "mean-relative": 0}.get(self.metric, 1)
        return False, -value / point.peak**power if point.peak else -math.inf

    def to_json(self) -> dict[str, Any]:
        """Convert to the object that `tcap sync-points --json` prints, ready for `json.dumps`."""
        return {
            "format": "tensorcap-sync-points",
            "version": 1,
            "reference": json_value(self.reference),
            "target": json_value(self.target),
            "settings": {name: list(map(json_value, both)) for name, both in self.settings.items()},
            "precision": self.precision,
            "metric": self.metric,
            "bands": json_value(self.bands),
            "mapped": self.mapped,
            "compared": self.compared,
            "counts": self.counts,
            "exit_status": self.exit_status,
            "has_graph": self.has_graph,
            "failure_sources": [point.name for point in self.failure_sources],
            "modules": json_value(self.modules),
            "points": json_value(self.points),
        }


def sync_points(
    reference: Source,
    target: Source,
    *,
    metric: SyncMetric = "psnr",
    bands: Bands | None = None,
    mapping: MappingSource | Literal["none"] | None = None,
) -> SyncPoints:
    """Compare a compiled program's operations with the nodes of a reference run's graph.

    Args:
        reference: The trusted archive, open or a path: a capture of the exported graph, a folder of
            intermediates, or the same program under another configuration.
        target: The archive of the compiled program, open or a path.
        metric: The metric of the colours.
        bands: Their bands; those of the target's precision if None.
        mapping: What belongs together, as for `compare`.

    Raises:
        UsageError: Neither run says which operations hold which nodes.
        ReadError: One of the archives cannot be read.
    """
    with opened_both(reference, target) as (trusted, tested):
        trusted, tested = sides(trusted, tested, mapping)
        comparison = compare(trusted, tested, mapping="none")
        return points_of(comparison, trusted, tested, metric=metric, bands=bands)


def has_sync_points(reference: Archive, target: Archive) -> bool:
    """Whether one of two runs says which operations hold which nodes."""
    return bool(_rows(reference, target))


def points_of(
    comparison: Comparison,
    reference: Archive,
    target: Archive,
    *,
    metric: SyncMetric = "psnr",
    bands: Bands | None = None,
) -> SyncPoints:
    """Make the sync points of a comparison.

    Args:
        comparison: Of these two archives.
        reference: The trusted archive, as it was compared.
        target: The archive of the compiled program, as it was compared.
        metric: As for `sync_points`.
        bands: As for `sync_points`.

    Raises:
        UsageError: Neither run says which operations hold which nodes.
    """
    rows = _rows(reference, target)
    if not rows:
        raise UsageError(
            f"{target.path}: its run does not say which operation holds the value of which node, expected "
            "one of a compiled program",
            hint="Capture the target with its adapter (tcap capture coreai), or give a folder of "
            "intermediates with mappings.",
        )
    precision = comparison.account.precision if comparison.account else ""
    bands = bands or Bands.of(precision or target.info.compute_dtype)
    maker = _Points(comparison, reference, target, metric, bands)
    return SyncPoints(
        reference=comparison.reference,
        target=comparison.target,
        settings=_settings(reference.info, target.info),
        precision=precision,
        metric=metric,
        bands=bands,
        points=(*maker.of_operations(rows), *maker.unmapped(rows)),
        has_graph=maker.flow.graph is not None,
        exit_status=comparison.exit_status,
    )


def _rows(reference: Archive, target: Archive) -> Sequence[MappedOperation]:
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


class _Points:
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
        """Whether all nodes with compared values that a node is computed from agree (SYN-20)."""
        node = self._known.get(site)
        if node is None:
            return False

        def has_values(place: str) -> bool:
            return any(pair.is_compared and not is_held(pair) for pair in self.flow.pairs(place))

        inputs = self.flow.nearest_inputs(node.where, has_values)
        compared = [p for place in inputs for p in self.flow.pairs(place) if p.is_compared]
        return all(p.is_green or p.status in ("explained", "excluded") for p in compared)


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


def _settings(reference: RunInfo, target: RunInfo) -> dict[str, tuple[Any, Any]]:
    """Settings of both runs, side by side."""
    sides_settings = []
    for info in (reference, target):
        own = {"framework": info.framework, "dtype": info.compute_dtype or info.dtype, "device": info.device}
        sides_settings.append({**{name: value for name, value in own.items() if value}, **info.settings})
    ours, theirs = sides_settings
    return {name: (ours.get(name), theirs.get(name)) for name in {**ours, **theirs}}
