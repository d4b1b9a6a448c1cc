"""Bisect: find where two runs part, by reading few tensors of two archives, or by running the target."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tensorcap.alignment import MappingSource
from tensorcap.localization.archive_bisection import Bisection, bisect_archives
from tensorcap.localization.live_bisection import Level, LiveBisection, MakesArchive, bisect_live
from tensorcap_formats.errors import UsageError
from tensorcap_formats.open import Source
from tensorcap_formats.progress import Progress

if TYPE_CHECKING:
    from tensorcap.workload import Workload


def bisect(
    reference: Source,
    target: Source | None = None,
    *,
    target_model: Workload | None = None,
    mapping: MappingSource | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    compute_dtype: str | None = None,
    limit: float | None = None,
    check: str | None = None,
    level: Level = "module",
    reference_ops: MakesArchive | None = None,
    state: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Bisection | LiveBisection:
    """Find the first bad result of a module, in two archives or by runs of the target.

    Args:
        reference: The trusted archive, open or a path.
        target: The archive under test, open or a path: `bisect_archives`.
        target_model: The target, its inputs and its seed, in the place of an archive: `bisect_live`.
        mapping: As for `compare`.
        rtol: Of archives: as for `compare`.
        atol: Of archives: as for `compare`.
        compute_dtype: Of archives: as for `compare`.
        limit: Of runs: as for `bisect_live`.
        check: Of runs: as for `bisect_live`.
        level: Of runs: as for `bisect_live`.
        reference_ops: Of runs: as for `bisect_live`.
        state: Of runs: as for `bisect_live`.
        progress: Shows what is read or run.

    Raises:
        UsageError: There is no target, or there are two; an option is of the other way; and as both raise.
        ReadError: An archive, or a tensor, cannot be read.
        CaptureError: A run fails.
    """
    if target is not None and target_model is None:
        if (limit, check, reference_ops, state) != (None,) * 4 or level != "module":
            raise UsageError(
                "limit, check, level, reference_ops and state are for runs, expected target_model"
            )
        return bisect_archives(
            reference,
            target,
            mapping=mapping,
            rtol=rtol,
            atol=atol,
            compute_dtype=compute_dtype,
            progress=progress,
        )
    if target_model is not None and target is None:
        if (rtol, atol, compute_dtype) != (None,) * 3:
            raise UsageError("rtol, atol and compute_dtype are for archives, expected target")
        return bisect_live(
            reference,
            target_model,
            mapping=mapping,
            limit=limit,
            check=check,
            level=level,
            reference_ops=reference_ops,
            state=state,
            progress=progress,
        )
    raise UsageError("expected target, an archive, or target_model, to be run, and not both")
