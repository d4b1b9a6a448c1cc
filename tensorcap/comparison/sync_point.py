"""A sync point: an operation of a compiled program and the node that it computes; and all of two runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from tensorcap.comparison.bands import Bands, SyncMetric
from tensorcap.comparison.ranking import Shade
from tensorcap.runs import ArchiveSummary
from tensorcap_formats.json_values import json_value

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
