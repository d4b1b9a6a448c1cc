"""Sync points: operations of a compiled program, and the nodes of the reference's graph that they compute.

A comparison says of each pair of values whether they agree. Here stands what that is of: which operations are
mapped to which nodes, how many of them could be compared, which of those that fail are computed from what
agrees, and in which modules they lie.
"""

from __future__ import annotations

from typing import Any, Literal

from tensorcap.alignment import MappingSource, sides
from tensorcap.comparison.bands import Bands, SyncMetric
from tensorcap.comparison.comparison import Comparison
from tensorcap.comparison.operation_points import OperationPoints, mapped_operations
from tensorcap.comparison.pipeline import compare
from tensorcap.comparison.sync_point import SyncPoints
from tensorcap_formats.archive import Archive
from tensorcap_formats.errors import UsageError
from tensorcap_formats.open import Source, opened_both
from tensorcap_formats.run_info import RunInfo


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
    return bool(mapped_operations(reference, target))


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
    rows = mapped_operations(reference, target)
    if not rows:
        raise UsageError(
            f"{target.path}: its run does not say which operation holds the value of which node, expected "
            "one of a compiled program",
            hint="Capture the target with its adapter (tcap capture coreai), or give a folder of "
            "intermediates with mappings.",
        )
    precision = comparison.account.precision if comparison.account else ""
    bands = bands or Bands.of(precision or target.info.compute_dtype)
    maker = OperationPoints(comparison, reference, target, metric, bands)
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


def _settings(reference: RunInfo, target: RunInfo) -> dict[str, tuple[Any, Any]]:
    """Settings of both runs, side by side."""
    sides_settings = []
    for info in (reference, target):
        own = {"framework": info.framework, "dtype": info.compute_dtype or info.dtype, "device": info.device}
        sides_settings.append({**{name: value for name, value in own.items() if value}, **info.settings})
    ours, theirs = sides_settings
    return {name: (ours.get(name), theirs.get(name)) for name in {**ours, **theirs}}
